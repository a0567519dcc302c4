"""The registry and the namespace: near names are suggested, what is no method refused, broken plug-ins harmless."""

import pytest
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import registry


def test_names_are_suggested_and_the_namespace_is_tidy():
    for name, near in (("ALTI", "alti"), ("tensorlense", "tensorlens"), ("nope", None)):
        with pytest.raises(tlens.RegistryError) as raised:
            tlens.get_method(name)
        assert ("Did you mean" in str(raised.value)) is (near is not None)
        assert near is None or f"mean {near!r}" in str(raised.value)
    with pytest.raises(tlens.RegistryError, match="mean 'tensorlens target'"):
        tlens.evaluate.known_answer(
            tlens.load_demo_model(), tlens.evaluate.induction(2, d_vocab=99), ["tensorlens targett"]
        )
    assert "collapsed by its norm" in tlens.get_method("tensorlens").__doc__
    assert {"testing", "attribute"} < set(dir(tlens))
    assert "budget" not in dir(tlens)
    assert tlens.testing.check_method
    with pytest.raises(AttributeError, match="nonsense"):
        tlens.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: tlens.register_method(lambda frozen: None), "'my-method'"),
        (lambda f: tlens.attribute(f, method="returns-a-collapse"), "returned Collapse"),
    ],
)
def test_what_is_no_method_is_refused(model_named, clean_registry, call, message):
    tlens.register_method("returns-a-collapse")(lambda frozen: frozen.operator().in_out())
    with pytest.raises(tlens.RegistryError, match=message):
        call(tlens.freeze(model_named("bridge/gpt2"), some_tokens()))


def test_a_broken_plug_in_takes_nothing_down(clean_registry, monkeypatch):
    class Point:
        name, value = "broken", "nowhere:broken"

        def load(self):
            raise ImportError("no such module")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    monkeypatch.setattr(registry, "_LOADED", set())
    with pytest.warns(UserWarning, match="'broken'"):
        assert "tensorlens" in tlens.list_methods()
