"""One function loads whatever was saved."""

import pytest
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, loading, results
from tensorlens_tl.results import Result
from tensorlens_tl.testing import tiny_model


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.fixture(scope="module")
def saveable(model):
    frozen, corrupted = tlens.freeze(model, "Return the value."), tlens.freeze(model, "Return the name.")
    edges = circuits.edge_scores(frozen, corrupted, " value", " name")
    return [
        tlens.attribute(frozen, " value"),
        circuits.logit_attribution(frozen, " value"),
        circuits.top_paths(frozen, " value"),
        circuits.contribution_graph(frozen, " value"),
        edges,
        edges.circuit(20),
        tlens.evaluate.stability(model, ["Return the value.", "Set the name"], ["ifr", "random"], draws=1),
    ]


@pytest.mark.parametrize("ending", ["", ".safetensors", ".json"])
def test_every_kind_of_result(saveable, tmp_path, ending):
    for number, result in enumerate(saveable):
        if ending in type(result).LOADABLE:
            again = tlens.load(result.save(tmp_path / f"{number}{ending}"))
            assert type(again) is type(result)
            assert repr(again) == repr(result)


def test_no_class_of_results_is_forgotten():
    """All that hold tensors of their own; what cannot be saved says so by itself."""
    saved = {name for name in dir(results) if isinstance(getattr(results, name), type)}
    saved = {name for name in saved if issubclass(getattr(results, name), Result) and getattr(results, name).TENSORS}
    assert saved == set(loading.KINDS)


def test_a_plan_and_a_run(model, tmp_path):
    plan = compress.plan(model, [0], ratio=2)
    path = plan.save(tmp_path / "plan")
    assert tlens.load(path, model).fingerprints == plan.fingerprints
    with pytest.raises(tlens.InvalidInputError, match="pass the model"):
        tlens.load(path)
    run = tlens.attribute_dataset(model, [{"text": "Return the"}], tmp_path / "run", progress=False)
    assert tlens.load(tmp_path / "run").manifest == run.manifest
    with pytest.raises(tlens.InvalidInputError, match="holds no plan"):
        tlens.load(tmp_path / "run", model)


def test_a_circuit_keeps_every_chosen_edge_where_that_is_asked_for(saveable):
    edges = next(result for result in saveable if isinstance(result, tlens.results.EdgeScores))
    for choice in ("top", "greedy"):
        whole = edges.circuit(40, choice=choice, prune=False)
        acting = edges.circuit(40, choice=choice)
        assert len(whole) == 40 > len(acting)
        assert set(acting.edges) < set(whole.edges)


def test_what_it_cannot_load_is_named(tmp_path):
    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens())
    table = tlens.attribute(frozen).save(tmp_path / "why.csv")
    other = tmp_path / "other"
    other.write_text("x" * 100)
    for path, message in ((table, "pandas.read_csv"), (other, "nothing that this library saved")):
        with pytest.raises(tlens.FileFormatError, match=message):
            tlens.load(path)
    with pytest.raises(FileNotFoundError):
        tlens.load(tmp_path / "none")
