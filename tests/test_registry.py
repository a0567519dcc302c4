"""The registry and the namespace: near names are suggested, what is no method refused, broken plug-ins harmless."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
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
    assert "by its norm" in tlens.get_method("tensorlens").__doc__
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


class Published:
    """An entry point of somebody else's package."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"theirs:{name}", load


def test_published_functions_keep_to_their_own_registry(clean_registry, monkeypatch):
    def their_map(frozen):
        return frozen.pattern(0)[None].mean(2)

    def publish():
        return tlens.register_layer_map("their-map", holds_residual=False)(their_map)

    points = [Published("their-map", publish), Published("rollout", lambda: lambda frozen: None)]
    real = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda group: [*real(group=group), *points])
    with pytest.warns(UserWarning, match="'rollout' .* cannot be loaded"):
        names = tlens.list_methods()
    assert "their-map" not in names
    assert "their-map" in tlens.list_layer_maps()
    assert tlens.get_method("rollout").function.__module__.startswith("tensorlens_tl")


def test_a_built_in_name_cannot_be_taken_before_anything_is_loaded():
    """In a process of its own: registering is the first thing done there."""
    code = (
        "import tensorlens_tl as tlens\n"
        "try:\n"
        "    tlens.register_method('norm')(lambda frozen: None)\n"
        "except tlens.RegistryError as error:\n"
        "    print(error)\n"
        "print(*tlens.list_methods())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'norm' is already tensorlens_tl.methods.norm" in printed
    assert "rollout" in printed


@pytest.mark.whole
def test_an_interrupted_import_is_taken_up_again():
    """Ctrl-C every few lines while methods are imported: the next call goes on, and in the end nothing is missing."""
    code = (
        "import sys\n"
        "import tensorlens_tl as tlens\n"
        "left = interrupts = 0\n"
        "def trace(frame, event, argument):\n"
        "    global left\n"
        "    if 'tensorlens_tl' not in frame.f_code.co_filename:\n"
        "        return None\n"
        "    left -= event == 'line'\n"
        "    if left == 0:\n"
        "        raise KeyboardInterrupt\n"
        "    return trace\n"
        "while True:\n"
        "    left = 40 + 20 * interrupts\n"
        "    sys.settrace(trace)\n"
        "    try:\n"
        "        names = tlens.list_methods()\n"
        "        break\n"
        "    except KeyboardInterrupt:\n"
        "        interrupts += 1\n"
        "    finally:\n"
        "        sys.settrace(None)\n"
        "print(interrupts, *names)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    interrupts, *names = printed.split()
    assert int(interrupts) > 10
    built_in = [
        name
        for name in tlens.list_methods()
        if tlens.get_method(name).function.__module__.startswith("tensorlens_tl.methods")
    ]
    assert set(built_in) <= set(names)
    assert len(built_in) > 20


def test_what_exec_defines_may_register_again(clean_registry):
    code = "@tlens.register_layer_map('executed', holds_residual=False)\ndef executed(frozen):\n    pass"
    for _ in range(2):
        exec(code, {"tlens": tlens, "__name__": None})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("minus", [None, 7])
@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/gemma2"])
def test_the_gap_of_a_sum_is_measured_whatever_is_handed_over(model_named, clean_registry, name, minus, strict):
    """Three times the scores, with a gap of 0, or with three times the total."""

    @tlens.register_method("thrice")
    def thrice(frozen, *, target=None, minus=None, query=-1, factor=3.0, share=1.0):
        of_target = tlens.methods.tensorlens(frozen, target=target, minus=minus, query=query)
        own = {name: getattr(of_target, name) * factor for name in ("scores", "bias")}
        return replace(of_target, method="thrice", gap=0 * of_target.gap, total=share * of_target.total, **own)

    frozen = tlens.freeze(model_named(name), [[3, 4, 5, 6], [7, 8, 9]], strict=strict)
    right = tlens.attribute(frozen, 5, method="thrice", minus=minus, factor=1.0, query=[-1, 0])
    own = tlens.attribute(frozen, 5, minus=minus, query=[-1, 0])
    assert torch.equal(right.total, own.total)
    assert torch.equal(right.gap, own.gap)
    assert float(own.gap.max()) > 0
    for share in (1.0, 3.0):
        refused = pytest.raises(tlens.NumericalError) if strict else pytest.warns(tlens.GapWarning)
        with refused:
            wrong = tlens.attribute(frozen, 5, method="thrice", minus=minus, share=share)
            expected = tlens.attribute(frozen, 5, minus=minus).total
            assert torch.equal(wrong.total, expected)
            assert float(wrong.gap.max()) > 0.1
