"""Every class of results has the same six members, and a file is what its name says."""

import json
import re
from functools import cache

import pandas as pd
import pytest
import torch
from conftest import some_tokens
from test_features import Dictionary

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.drawing import page
from tensorlens_tl.results import RESULT_ENDINGS, Result
from tensorlens_tl.testing import tiny_model

NAME = "bridge/gpt2"
FIRST_BYTES = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG", ".html": b"<!doctype html>", ".parquet": b"PAR1"}


@cache
def model():
    return tiny_model(NAME)


@cache
def frozen():
    return tlens.freeze(model(), some_tokens())


@cache
def other():
    return tlens.freeze(model(), some_tokens().flip(1))


def feature_edges():
    features = circuits.features(frozen(), Dictionary(kind="topk"), "blocks.0.hook_resid_post")
    return circuits.feature_edges(features, features)


def feature_examples():
    dictionary = Dictionary(hook="blocks.0.hook_resid_post")
    return circuits.feature_examples(model(), dictionary, some_tokens(3, 6), [3, 5, 11], k=2)


RESULTS = {
    "Attribution": lambda: tlens.attribute(frozen(), 5),
    "Terms": lambda: circuits.logit_attribution(frozen(), 5, by="head"),
    "Paths": lambda: circuits.paths(frozen(), 5),
    "FeatureEdges": feature_edges,
    "FeatureExamples": feature_examples,
    "ModelChange": lambda: tlens.compare_models(model(), model(), some_tokens(), 5),
    "ChangeRoutes": lambda: circuits.routes(tlens.difference(frozen(), other()), 5),
    "ScoreAttribution": lambda: circuits.qk_attribution(frozen(), 1, 0, key=2),
    "ScoreChange": lambda: circuits.qk_attribution(tlens.difference(frozen(), other()), 1, 0, key=2),
    "ContributionGraph": lambda: circuits.contribution_graph(tlens.freeze(model(), some_tokens()[:1]), 5),
    "EdgeScores": lambda: circuits.edge_scores(frozen(), other(), 5),
    "Circuit": lambda: circuits.edge_scores(frozen(), other(), 5).circuit(12),
    "Evaluation": lambda: evaluate.perturbation(model(), some_tokens(2, 6), ["rollout", "random"], fractions=(0, 0.5)),
    "Reproduction": lambda: evaluate.reproduce("table-1", model(), some_tokens(1, 12)),
}


@cache
def result(name):
    return RESULTS[name]()


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_class_of_results_is_tested():
    concrete = {kind.__name__ for kind in subclasses(Result) if not kind.__abstractmethods__}
    assert concrete == set(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself(name, capsys, monkeypatch):
    """A table in a terminal, its picture in a notebook, and the same picture on a page."""
    shown = result(name)
    assert type(shown).__name__ == name
    shown.show()
    assert len(capsys.readouterr().out.splitlines()) > 3
    displayed = []
    monkeypatch.setattr(page, "display_in_notebook", lambda html: displayed.append(html()) or True)
    shown.show()
    assert capsys.readouterr().out == ""
    assert len(displayed[0]) > 500
    assert shown._repr_html_() == shown.to_html()
    assert shown.to_html().endswith(shown.to_html(style=False))


def test_a_notebook_displays_and_a_terminal_does_not(monkeypatch):
    displayed = []

    class IPython:
        display = type("display", (), {"HTML": str, "display": displayed.append})
        get_ipython = staticmethod(lambda: IPython)

    monkeypatch.setitem(__import__("sys").modules, "IPython", None)
    assert not page.display_in_notebook(lambda: pytest.fail("computed"))
    monkeypatch.setitem(__import__("sys").modules, "IPython", IPython)
    assert page.display_in_notebook(lambda: "<p>")
    assert displayed == ["<p>"]


def without_gaps(html):
    """A picture without what rounding may change: sums over tensors of another memory order."""
    return re.sub(r"\d\.\de-\d\d", "", html)


@pytest.mark.parametrize("name", RESULTS)
def test_a_file_is_what_its_name_says(name, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    kind = result(name)
    frame = kind.to_dataframe()
    assert len(frame)
    for ending in {*RESULT_ENDINGS, *kind.LOADABLE, *kind._writers()}:
        if ending == ".safetensors" and ending not in kind.LOADABLE:
            with pytest.raises(tlens.InvalidInputError, match="no kind of file"):
                kind.save(tmp_path / "a.safetensors")
            continue
        path = kind.save(tmp_path / f"a{ending}")
        assert path.read_bytes().startswith(FIRST_BYTES.get(ending, b""))
        if ending in kind.LOADABLE:
            again = type(kind).load(path)
            pd.testing.assert_frame_equal(again.to_dataframe(), frame)
            assert without_gaps(again.to_html()) == without_gaps(kind.to_html())
    assert len(pd.read_csv(tmp_path / "a.csv", keep_default_na=False)) == len(frame)
    assert len(pd.read_parquet(tmp_path / "a.parquet")) == len(frame)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    for wrong in ("a.txt", "a.pickle", "a.pt", "v0.2"):
        with pytest.raises(tlens.InvalidInputError, match=r"no kind of file .* Use one of .*, or no ending"):
            kind.save(tmp_path / wrong)
        assert not (tmp_path / wrong).exists()
    with pytest.raises(tlens.InvalidInputError, match="that is a folder"):
        kind.save(tmp_path)
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        kind.save(tmp_path / "none" / "a.csv")


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_is_drawn_where_it_is_told(name):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    _, axes = matplotlib.pyplot.subplots()
    assert result(name).plot(ax=axes) is axes
    axes.figure.canvas.draw()
    assert axes.has_data() or axes.patches
    matplotlib.pyplot.close(axes.figure)


def test_colours_begin_at_zero_where_no_score_is_negative():
    pytest.importorskip("matplotlib").use("Agg")
    rollout = tlens.attribute(frozen(), method="rollout").plot()
    signed = tlens.attribute(frozen(), 5).plot()
    assert rollout.images[0].norm.vmin == 0
    assert signed.images[0].norm.vmin == -signed.images[0].norm.vmax


def test_the_figure_of_terms_holds_their_sum():
    """The bars are the k largest parts and the others; the last is the total."""
    pytest.importorskip("matplotlib").use("Agg")
    terms = result("Terms")
    widths = [bar.get_width() for bar in terms.plot(5).patches][::-1]
    assert sum(widths[:-1]) == pytest.approx(float(terms.total[0, 0]), abs=1e-9)
    assert widths[-1] == pytest.approx(float(terms.total[0, 0]))


def test_a_page_that_cannot_be_drawn_leaves_the_old_file(tmp_path, monkeypatch):
    path = result("Terms").save(tmp_path / "a.html")
    before = path.read_bytes()
    monkeypatch.setattr(circuits.Terms, "to_html", lambda self, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result("Terms").save(path)
    assert path.read_bytes() == before


def test_a_plan_is_kept_in_one_kind_of_file(tmp_path):
    plan = tlens.compress.plan(tlens.load_demo_model(dtype=torch.float32), ratio=2, method="circuit-svd")
    with pytest.raises(tlens.InvalidInputError, match=r"end it in \.safetensors"):
        plan.save(tmp_path / "plan.csv")


def test_a_suffix_in_capitals_is_the_same(tmp_path):
    terms = result("Terms")
    assert len(circuits.Terms.load(terms.save(tmp_path / "a.SAFETENSORS"))) == len(terms)
    assert terms.save(tmp_path / "a.CSV").read_text().startswith("batch,")
