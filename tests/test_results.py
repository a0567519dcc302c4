"""Every class of results has the same six members, and a file is what its name says."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import some_tokens
from rich.console import Console
from test_features import Dictionary

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.drawing import figure, page, terminal
from tensorlens_tl.results import RESULT_ENDINGS, Result, storage
from tensorlens_tl.results.entry import shown_target
from tensorlens_tl.results.storage import LOADABLE
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


def active_features():
    dictionary = Dictionary(kind="topk")
    return circuits.features(frozen(), dictionary, "blocks.0.hook_resid_post", labels={3: "a label"})


def feature_examples():
    dictionary = Dictionary(hook="blocks.0.hook_resid_post")
    return circuits.feature_examples(model(), dictionary, some_tokens(3, 6), [3, 5, 11], k=2)


RESULTS = {
    "Attribution": lambda: tlens.attribute(frozen(), 5),
    "Terms": lambda: circuits.logit_attribution(frozen(), 5, by="head"),
    "Paths": lambda: circuits.paths(frozen(), 5),
    "Features": active_features,
    "FeatureEdges": feature_edges,
    "FeatureExamples": feature_examples,
    "ModelChange": lambda: tlens.compare_models(model(), model(), some_tokens(), 5),
    "ChangeRoutes": lambda: circuits.routes(tlens.difference(frozen(), other()), 5),
    "ScoreAttribution": lambda: circuits.qk_attribution(frozen(), 1, 0, key=2),
    "ScoreChange": lambda: circuits.qk_attribution(tlens.difference(frozen(), other()), 1, 0, key=2),
    "ContributionGraph": lambda: circuits.contribution_graph(tlens.freeze(model(), some_tokens()[:1]), 5),
    "EdgeScores": lambda: circuits.edge_scores(frozen(), other(), 5),
    "MeasuredTerms": lambda: circuits.patch_scores(frozen(), other(), 5, method="measured"),
    "MeasuredEdges": lambda: circuits.edge_scores(frozen(), other(), 5, method="measured"),
    "HeadScores": lambda: circuits.previous_token_scores(frozen()),
    "Circuit": lambda: circuits.edge_scores(frozen(), other(), 5).circuit(12),
    "Evaluation": lambda: evaluate.perturbation(model(), some_tokens(2, 6), ["rollout", "random"], fractions=(0, 0.5)),
    "Reproduction": lambda: evaluate.reproduce("table-1", model(), some_tokens(1, 12)),
}


@cache
def result(name):
    return RESULTS[name]()


def model_provenance():
    return frozen().view.provenance()


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_class_of_results_is_tested():
    concrete = {kind.__name__ for kind in subclasses(Result) if not kind.__abstractmethods__}
    assert concrete == set(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.few(8)
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


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_which_model_it_is_of(name, tmp_path):
    """In its provenance, an evaluation in its settings; pictures show it, and files hold it."""
    expected = model_provenance().items()
    of = result(name)
    if name in ("Evaluation", "Reproduction"):
        assert expected <= getattr(of, "evaluation", of).settings.items()
        return
    assert expected <= of.provenance.items()
    for fact, value in of.provenance.items():
        assert f"{fact.replace('_', ' ')}: {value}" in of.to_html()
    if name == "Features":  # they are of their pass, and no file is read back
        return
    kind = type(of)
    again = kind.load(of.save(tmp_path / "result"))
    assert again.provenance == of.provenance
    if "provenance" in kind.LATER_FACTS:  # as files of earlier versions
        tensors, facts = storage.read(tmp_path / "result", name, None)
        del facts["provenance"]
        assert not kind.load(storage.write(tmp_path / "old", name, tensors, facts)).provenance


@pytest.mark.parametrize("name", ["ChangeRoutes", "ScoreChange", "Terms"])
def test_a_result_of_two_models_names_both_and_tells_their_weights_apart(name):
    base = model()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.blocks[0].mlp.W_in.add_(0.01)
    runs = [tlens.freeze(of, some_tokens()) for of in (tuned, base)]
    asked = {
        "ChangeRoutes": lambda: circuits.routes(tlens.difference(*runs), 5),
        "ScoreChange": lambda: circuits.qk_attribution(tlens.difference(*runs), 1, 0, key=2),
        "Terms": lambda: circuits.logit_attribution(tlens.difference(*runs), 5),
    }
    provenance = asked[name]().provenance
    assert {f"second {fact}" for fact in model_provenance()} <= provenance.keys()
    assert provenance["weights"] != provenance["second weights"]
    same = tlens.difference(tlens.freeze(copy.deepcopy(base), some_tokens()), runs[1]).provenance()
    assert same["weights"] == same["second weights"] == provenance["second weights"]


def test_a_comparison_says_which_model_is_the_base():
    base, tuned = model(), tiny_model(NAME, seed=1)
    change = tlens.compare_models(base, tuned, some_tokens(), 5)
    facts = change.provenance
    assert facts["class"] == model_provenance()["class"]
    assert facts["base weights"] == tlens.freeze(base, some_tokens()).provenance()["weights"]
    assert facts["tuned weights"] == tlens.freeze(tuned, some_tokens()).provenance()["weights"]
    assert facts["base weights"] != facts["tuned weights"]
    assert 0 < float(change.gap.max()) < 1e-12


def test_what_is_subtracted_adds_its_provenance():
    base = result("Terms")
    changed = dataclasses.replace(base, provenance=base.provenance | {"model": "other"})
    assert (base - changed).provenance == base.provenance | {"second model": "other"}
    assert (base - base).mean().provenance == base.provenance
    routes = result("ChangeRoutes")
    two = dataclasses.replace(routes, provenance=routes.provenance | {"second model": "one"})
    three = dataclasses.replace(routes, provenance=routes.provenance | {"second model": "another"})
    assert (two - three).provenance == two.provenance | {"subtracted second model": "another"}


NUMBER = re.compile(r"[+-]?\d[\d.]*(?:e[+-]\d+)?")


def words_of(printed):
    """Numbers, and words of headings, in what was printed."""
    headings = [line for line in printed.splitlines() if line.startswith("┃")]
    return sorted({*NUMBER.findall(printed)}), sorted({word for line in headings for word in line.split()})


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", RESULTS)
def test_tables_are_as_wide_as_the_terminal(name, width, capsys, monkeypatch):
    """No number and no word of a heading is broken, whatever the width."""
    monkeypatch.setenv("COLUMNS", "250")
    result(name).show()
    wide = words_of(capsys.readouterr().out)
    monkeypatch.setenv("COLUMNS", str(width))
    result(name).show()
    printed = capsys.readouterr().out
    assert words_of(printed) == wide
    assert max(len(line) for line in printed.splitlines() if line[:1] in "┏┃│├└") <= width


def test_columns_go_on_in_a_second_table(capsys):
    headings = ("method", *(f"a metric {number}" for number in range(6)))
    rows = [(f"integrated gradients {'x' * 40}", *("0.123 [0.111, 0.222]",) * 6), ("alti", *("-",) * 6)]
    terminal.show_table("", headings, rows, [("total", *("1",) * 6)], left=("method",), console=Console(width=60))
    printed = capsys.readouterr().out
    assert printed.count("0.123 [0.111, 0.222]") == 6
    assert printed.count("method") == printed.count("alti") == printed.count("total") == 6
    terminal.show_table("", headings, rows, left=("method",), console=Console(width=250))
    assert capsys.readouterr().out.count("method") == 1


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
@pytest.mark.few(3)
def test_a_file_is_what_its_name_says(name, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    kind = result(name)
    frame = kind.to_dataframe()
    assert len(frame)
    for ending in {*RESULT_ENDINGS, *kind.LOADABLE, *kind._writers()}:
        if ending in LOADABLE and ending not in kind.LOADABLE:
            with pytest.raises(tlens.InvalidInputError, match="not a supported ending"):
                kind.save(tmp_path / f"a{ending}")
            continue
        path = kind.save(tmp_path / f"a{ending}")
        assert path.read_bytes().startswith(FIRST_BYTES.get(ending, b""))
        if ending in kind.LOADABLE:
            again = type(kind).load(path)
            pd.testing.assert_frame_equal(again.to_dataframe(), frame)
            assert without_gaps(again.to_html()) == without_gaps(kind.to_html())
    assert len(pd.read_csv(tmp_path / "a.csv", keep_default_na=False)) == len(frame)
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == kind.to_csv()
    assert kind.to_csv(tmp_path / "table.txt") is None
    assert (tmp_path / "table.txt").read_bytes() == (tmp_path / "a.csv").read_bytes()
    assert len(pd.read_parquet(tmp_path / "a.parquet")) == len(frame)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    for wrong in ("a.txt", "a.pickle", "a.pt", "v0.2"):
        with pytest.raises(tlens.InvalidInputError, match=r"not a supported ending\. Use one of \..*\.") as refused:
            kind.save(tmp_path / wrong)
        assert not (tmp_path / wrong).exists()
        assert str(refused.value).endswith("or no ending.") == ("" in kind.LOADABLE)
    with pytest.raises(tlens.InvalidInputError, match="that is a folder"):
        kind.save(tmp_path)
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        kind.save(tmp_path / "none" / "a.csv")


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_is_drawn_where_it_is_told(name):
    pytest.importorskip("matplotlib").use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    _, axes = pyplot.subplots()
    assert result(name).plot(ax=axes) is axes
    axes.figure.canvas.draw()
    assert axes.has_data() or axes.patches
    pyplot.close(axes.figure)


def test_features_are_listed_with_their_labels(capsys, tmp_path):
    """In tables, figures, frames and `top`; a row for each of the most active, a column for each token."""
    pytest.importorskip("matplotlib").use("Agg")
    shown = result("Features")
    best = shown.top(2, batch=1)
    labelled = dataclasses.replace(shown, labels={int(best[0].name[1:]): "the best"})
    first, second = labelled.top(2, batch=1)
    assert (first.name, first.label, second.label) == (best[0].name, "the best", "")
    assert "label='the best'" in repr(first)
    assert "label" not in repr(second)
    assert first == (first.name, first.score, first.position)
    assert pickle.loads(pickle.dumps(first)).label == "the best"
    assert labelled.value(first.name)[1, first.position] == pytest.approx(first.score)
    labelled.show(2, batch=1)
    assert f"{first.name} · the best" in capsys.readouterr().out
    axes = labelled.plot(2, batch=1)
    assert axes.get_yticklabels()[0].get_text() == f"{first.name} · the best"
    cells = axes.images[0].get_array()
    for row, entry in enumerate((first, second)):
        assert cells[row].tolist() == pytest.approx(shown.value(entry.name)[1].tolist())
    frame = labelled.to_dataframe()
    assert len(frame) == len(shown.values)
    line = frame[(frame["batch"] == 1) & (frame["label"] == "the best") & (frame["position"] == first.position)]
    assert line["activation"].tolist() == pytest.approx([first.score])
    with pytest.raises(tlens.InvalidInputError, match=r"circuits\.features\(frozen, dictionary\) again"):
        circuits.Features.load(tmp_path / "a")


def test_colours_begin_at_zero_where_no_score_is_negative():
    pytest.importorskip("matplotlib").use("Agg")
    rollout = tlens.attribute(frozen(), method="rollout", query="all").plot()
    signed = tlens.attribute(frozen(), 5, query="all").plot()
    assert rollout.images[0].norm.vmin == 0
    assert signed.images[0].norm.vmin == -signed.images[0].norm.vmax


def test_one_query_is_drawn_as_its_text():
    """Every token in its place, the query underlined, the colours' scale from zero where no score is negative."""
    pytest.importorskip("matplotlib").use("Agg")
    rollout = tlens.attribute(frozen(), method="rollout")
    axes = rollout.plot(batch=1, query=-1)
    assert [text.get_text() for text in axes.texts] == rollout.tokens[1]
    assert len(axes.patches) == len(rollout.tokens[1])
    (line,) = axes.lines
    last = axes.patches[int(rollout.queries[1, -1])]
    assert list(line.get_xdata()) == [last.get_x(), last.get_x() + last.get_width()]
    scale = axes.figure.axes[1].get_xlim()
    assert scale == pytest.approx((0, float(rollout.scores[1, -1].max())))
    strongest = max(range(len(axes.patches)), key=lambda number: -sum(axes.patches[number].get_facecolor()[:3]))
    assert strongest == int(rollout.scores[1, -1].argmax())


def test_an_image_is_drawn_as_its_patches():
    pytest.importorskip("matplotlib").use("Agg")
    images, digits = tlens.demo.digit_images()
    scored = tlens.attribute(tlens.load_demo_model("digits"), images[:1], target=int(digits[0]))
    cells = scored.plot().images[0].get_array()
    patches = [number for number, token in enumerate(scored.tokens[0]) if token.startswith(" patch ")]
    assert cells.shape == (len(patches) ** 0.5,) * 2
    assert cells.flatten().tolist() == pytest.approx(scored.scores[0, 0, patches].tolist())


def test_generated_tokens_are_the_rows_and_the_marks():
    """Of two prompts of different length, the padded one too."""
    pytest.importorskip("matplotlib").use("Agg")
    prompts = ["If the file is not found, a", "Return the"]
    wrote = tlens.generation.freeze_generation(tlens.load_demo_model(), prompts, max_new_tokens=4)
    scored = wrote.attribute()
    for prompt in range(2):
        start, end = scored.options["generated"][prompt]
        tokens = scored.tokens[prompt][start:end]
        rows = [label.get_text() for label in scored.plot(batch=prompt).get_yticklabels()]
        assert rows == tokens
        axes = scored.plot(batch=prompt, query=1)
        (underline,) = [line for line in axes.lines if line.get_linewidth() == 1]
        first = int(scored.mask[prompt].int().argmax())
        box = axes.patches[start + 1 - first]
        assert list(underline.get_xdata()) == [box.get_x(), box.get_x() + box.get_width()]
        assert repr(tokens[1]) in axes.get_title(loc="left").replace("\n", " ")


def test_long_text_is_wrapped_and_breaks_where_it_does():
    pytest.importorskip("matplotlib").use("Agg")
    tokens = ["one", " two\n", "three", *["ab" * 20] * 4, "ａ" * 3, "$_x"]
    axes = figure.text(tokens, np.linspace(-1, 1, len(tokens)), "t", marked=[1, 2], first=8)
    boxes = [(box.get_y(), box.get_x(), box.get_width()) for box in axes.patches]
    assert boxes[2][0] > boxes[1][0]
    assert boxes[2][1] == 0
    assert boxes[7][2] == 6  # wide letters
    assert boxes[8][1] == 0
    assert boxes[8][0] > boxes[7][0]
    assert max(start + width for _, start, width in boxes) <= axes.get_xlim()[1]
    axes.figure.canvas.draw()


def test_the_figure_of_terms_holds_their_sum():
    """The bars are the k largest parts and the others; the last is the total."""
    pytest.importorskip("matplotlib").use("Agg")
    terms = result("Terms")
    widths = [bar.get_width() for bar in terms.plot(5, batch=0).patches][::-1]
    assert sum(widths[:-1]) == pytest.approx(float(terms.total[0, 0]), abs=1e-9)
    assert widths[-1] == pytest.approx(float(terms.total[0, 0]))


def spans(axes):
    """Low and high end of every interval, the first bar's first."""
    (segments,) = [lines.get_segments() for lines in axes.collections]
    return [tuple(segment[:, 0]) for segment in segments][::-1]


@pytest.mark.parametrize("name", ["Terms", "EdgeScores"])
def test_a_mean_over_prompts_has_its_intervals(name):
    pytest.importorskip("matplotlib").use("Agg")
    several = result(name)
    axes = several.plot(3)
    assert "mean of 2 prompts: logit of" in axes.get_title(loc="left").replace("\n", " ")
    widths = [bar.get_width() for bar in axes.patches][::-1]
    labels = [label.get_text() for label in axes.get_yticklabels()][::-1]
    for label, width, span in list(zip(labels, widths, spans(axes), strict=True))[:3]:
        values = several[label].flatten()
        low, high = evaluate.bootstrap_interval(values)
        assert width == pytest.approx(float(values.mean()))
        assert span == pytest.approx((float(low), float(high)))
        assert span[0] <= width <= span[1]
    if name == "Terms":
        assert labels[3:] == ["14 others", "total"]
        assert sum(widths[:4]) == pytest.approx(widths[4])
        assert widths[4] == pytest.approx(float(several.total.mean()))
    assert not several.plot(3, batch=1).collections


def test_heads_are_a_matrix():
    pytest.importorskip("matplotlib").use("Agg")
    terms = result("Terms")
    one, mean = terms.plot_heads(batch=0), terms.plot_heads()
    columns = [label.get_text() for label in one.get_xticklabels()]
    for axes, of in ((one, lambda name: terms[name][0, 0]), (mean, lambda name: terms[name].mean())):
        cells = axes.images[0].get_array()
        for layer, head in ((0, 1), (1, 0)):
            assert cells[layer, columns.index(f"H{head}")] == pytest.approx(float(of(f"L{layer}H{head}")))
        assert cells[1, columns.index("MLP")] == pytest.approx(float(of("MLP1")))
    with pytest.raises(tlens.InvalidInputError, match="no term is a head"):
        dataclasses.replace(terms, names=[f"F{number}" for number in range(len(terms))]).plot_heads()


def test_what_no_change_came_from_is_no_line(capsys):
    """Sources that are the same in both runs are counted among the others."""
    pytest.importorskip("matplotlib").use("Agg")
    change = result("ScoreChange")
    assert not change.top(100)[-1].score
    nonzero = sum(bool(entry.score) for entry in change.top(100))
    assert len(change.plot(100).patches) == nonzero + 2  # the others, and the total
    change.show(100)
    printed = capsys.readouterr().out
    assert f"{len(change.top(100)) - nonzero} other" in printed


def test_scores_of_heads_are_the_same_matrix():
    """A head that a layer lacks is blank, in the figure and on the page."""
    pytest.importorskip("matplotlib").use("Agg")
    scores = result("HeadScores")
    for axes, plane in ((scores.plot_heads(), scores.mean().scores[0]), (scores.plot(batch=1), scores.scores[1])):
        np.testing.assert_allclose(axes.images[0].get_array(), plane.numpy())
        assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"H{head}" for head in range(4)]
    fewer = scores.scores.clone()
    fewer[:, 1, 2:] = torch.nan
    cells = dataclasses.replace(scores, scores=fewer).plot_heads().images[0].get_array()
    assert np.ma.getmaskarray(cells).tolist() == [[False] * 4, [False, False, True, True]]


def test_an_evaluation_has_a_panel_for_every_metric(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    evaluated = result("Evaluation")
    panels = evaluated.plot()
    assert len(panels) == len(evaluated.metrics) > 1
    colours = []
    for metric, axes in zip(evaluated.metrics, panels, strict=True):
        assert axes.get_title(loc="left").removesuffix(" ↑") == metric
        lines = {line.get_label(): line for line in axes.lines}
        for row, method in enumerate(evaluated.methods):
            means = evaluated.curves[list(evaluated.metrics).index(metric), row].nanmean(0)
            assert list(lines[method].get_ydata()) == pytest.approx(means.tolist())
        colours.append({name: line.get_color() for name, line in lines.items()})
    assert all(colour == colours[0] for colour in colours)
    (legend,) = panels[0].figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(evaluated.methods)
    bars = evaluate.Evaluation("agreement", evaluated.values, evaluated.metrics, evaluated.methods, evaluated.units)
    every = bars.plot()
    assert [axes.get_title(loc="left").removesuffix(" ↑") for axes in every] == list(evaluated.metrics)
    best = str(bars.table().index[0])
    assert [every[0].get_yticklabels()[-1].get_text()] == [best]
    assert every[1].patches[-1].get_width() == pytest.approx(bars.mean(list(bars.metrics)[1], best))
    assert bars.plot(metric=list(bars.metrics)[1]).get_title(loc="left").startswith(list(bars.metrics)[1])


def test_titles_break_in_no_token():
    pytest.importorskip("matplotlib").use("Agg")
    for length in range(30, 60):
        axes = figure.signed_bars([("a", 1.0)], f"{'x ' * length}' file' and the model's ' end'")
        title = axes.get_title(loc="left")
        assert "' file'" in title
        assert "' end'" in title
        pytest.importorskip("matplotlib.pyplot").close(axes.figure)


def test_titles_of_batches_name_no_ids():
    pytest.importorskip("matplotlib").use("Agg")
    answers, others = torch.arange(5, 7), torch.arange(7, 9)
    terms = circuits.logit_attribution(frozen(), answers, others)
    assert terms.target == "logit of [5, 6] − [7, 8]"
    assert terms.plot().get_title(loc="left") == "mean of 2 prompts: logit of answer − other"
    assert terms.heading == "What adds to logit of each answer − other"
    assert tlens.attribute(frozen(), answers, minus=others).describe().startswith("tensorlens: logit of each answer")


@pytest.mark.parametrize("target", ["logit of '[', ' ,'", "logit of '[1, 2]'", "logit of ' a'", "a direction", ""])
def test_titles_leave_other_targets_as_they_are(target):
    assert shown_target(target) == target


def test_colour_blind_readers_tell_signs_apart():
    """Orange and blue as Machado, Oliveira and Fernandes (2009) simulate three kinds of colour blindness."""
    matrices = {
        "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    }

    def seen(rgb, matrix):
        linear = np.where(np.array(rgb) <= 0.04045, np.array(rgb) / 12.92, ((np.array(rgb) + 0.055) / 1.055) ** 2.4)
        return (np.array(matrix) @ linear).clip(0, 1)

    def lab(linear):
        xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
        f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    for matrix in matrices.values():
        blue, orange = (lab(seen(figure.of_sign(sign), matrix)) for sign in (1, -1))
        assert np.linalg.norm(blue - orange) > 30  # 2.3 is just noticeable
    greys = [lab(seen(figure.scale(np.array([-1.0, 1.0]))[0](at)[:3], np.eye(3)))[0] for at in np.linspace(0, 1, 9)]
    assert greys[:5] == sorted(greys[:5])
    assert greys[4:] == sorted(greys[4:])[::-1]


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".png"])
def test_the_same_figure_is_the_same_file(ending, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    first, second = (result("Terms").save(tmp_path / f"{name}{ending}").read_bytes() for name in "ab")
    assert first == second


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


def test_shares_by_token_are_named_where_they_are(capsys):
    """A list of parts does not show them; a table has them unless it is told not to."""
    change = tlens.compare_models(model(), tiny_model(NAME, seed=1), some_tokens()[:1], 5, positions=True)
    assert "share: to_dataframe()" in change.to_html()
    change.show()
    assert "each token's share: to_dataframe()" in capsys.readouterr().out
    table = change.to_dataframe()
    summed = table.groupby("term", sort=False)["score"].sum()
    plain = change.to_dataframe(keys=False).set_index("term")["score"]
    assert np.allclose(summed[plain.index], plain, atol=1e-9)
    assert {"key", "key_token"} <= set(table.columns)
    without = tlens.compare_models(model(), tiny_model(NAME, seed=1), some_tokens()[:1], 5)
    assert "share: to_dataframe()" not in without.to_html()
    assert "key" not in without.to_dataframe()
    with pytest.raises(tlens.InvalidInputError, match="positions=True"):
        without.to_dataframe(keys=True)


def test_a_circuit_names_its_target_in_pictures_and_files(tmp_path):
    circuit = result("Circuit")
    assert circuit.target == result("EdgeScores").target
    assert circuit.target in circuit.heading
    assert circuit.heading in circuit.plot().get_title(loc="left").replace("\n", " ")
    assert circuits.Circuit.load(circuit.save(tmp_path / "circuit.json")).target == circuit.target
    with pytest.raises(tlens.InvalidInputError, match=r"save\(path\)"):
        circuit.export(tmp_path / "circuit.pdf")


def test_one_prompt_is_no_prompts():
    one = circuits.edge_scores(tlens.freeze(model(), some_tokens()[:1]), tlens.freeze(model(), some_tokens()[1:]), 5)
    assert "1 prompt," in repr(one)
    heads = circuits.previous_token_scores(tlens.freeze(model(), some_tokens()[:1]))
    assert "1 prompt," in repr(heads)
    assert "of 1 prompt" in heads.to_html()
    assert "1 prompts" not in heads.to_html()


def title(axes):
    return axes.get_title(loc="left").replace("\n", " ")


def test_a_figure_of_a_batch_names_its_prompt():
    pytest.importorskip("matplotlib").use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    several = tlens.freeze(model(), some_tokens(batch=3))
    generated = tlens.attribute_generation(model(), some_tokens(batch=3), max_new_tokens=3)
    first_choice = tlens.attribute(several, "first-choice", query="all")
    rollout = tlens.attribute(several, method="rollout", query="all")
    pairs = circuits.qk_attribution(several, 1, 0, key=2)
    for result in (generated, first_choice, rollout, pairs, tlens.attribute(several, "first-choice")):
        assert title(result.plot()).endswith(" · prompt 0 of 3")
        assert title(result.plot(batch=1)).endswith(" · prompt 1 of 3")
        assert title(result.plot(batch=-1)).endswith(" · prompt 2 of 3")
        pyplot.close("all")
    assert title(circuits.logit_attribution(several, 5, by="head").plot_heads(batch=1)).endswith(" · prompt 1 of 3")
    one = tlens.freeze(model(), some_tokens(batch=1))
    assert "prompt" not in title(tlens.attribute(one, 5, query="all").plot())
    assert "prompt" not in title(circuits.qk_attribution(one, 1, 0, key=2).plot())


def test_attention_scores_of_a_batch_say_which_prompt_is_shown(capsys):
    several = tlens.freeze(model(), some_tokens(batch=2))
    other = tlens.freeze(model(), some_tokens(batch=2, seed=1))
    for asked in (several, tlens.difference(several, other)):
        result = circuits.qk_attribution(asked, 1, 0, key=2)
        for batch, name in ((0, "prompt 0 of 2"), (1, "prompt 1 of 2"), (-1, "prompt 1 of 2")):
            result.show(batch=batch)
            assert name in " ".join(capsys.readouterr().out.split())
            assert name in result.to_html(batch=batch)
            assert f"{result.places[batch]} · {name}" in result._title(batch)


def test_save_draws_the_prompt_that_was_chosen(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    several = tlens.freeze(model(), some_tokens(batch=2))
    attribution = tlens.attribute(several, 5, query="all")
    terms = circuits.logit_attribution(several, 5, by="head")
    for of_batch in (attribution, terms, circuits.qk_attribution(several, 1, 0, key=2)):
        text = of_batch.save(tmp_path / "second.svg", batch=1).read_text()
        assert text != of_batch.save(tmp_path / "first.svg", batch=0).read_text()
    for suffix in ("", ".safetensors", ".html", ".csv", ".parquet", ".json"):
        with pytest.raises(tlens.InvalidInputError, match=r"batch= chooses the prompt of a figure"):
            attribution.save(tmp_path / f"all{suffix}", batch=0)
    with pytest.raises(tlens.InvalidInputError, match="holds 2 prompts"):
        attribution.save(tmp_path / "third.svg", batch=2)
    circuit = result("Circuit")
    with pytest.raises(tlens.InvalidInputError, match="Circuit does not show a single prompt"):
        circuit.save(tmp_path / "circuit.svg", batch=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.svg", "second.svg"]


# ------------------------------------------------------------------ one set of arguments


SHOW = ("show", "plot", "to_html", "top")


@pytest.mark.parametrize("name", RESULTS)
def test_signatures_say_what_can_be_chosen(name):
    """Editors show the arguments of the class that they are asked about; all but k are passed by name."""
    of = result(name)
    for member in SHOW:
        if not hasattr(of, member):
            assert name in ("Evaluation", "Reproduction")
            continue
        parameters = dict(inspect.signature(getattr(of, member)).parameters)
        assert parameters.pop("k").default in (of.DRAWN, of.PRINTED)
        assert {one.kind for one in parameters.values()} <= {inspect.Parameter.KEYWORD_ONLY}
        with pytest.raises(tlens.InvalidInputError) as refused:
            getattr(of, member)(quary=1)
        said = re.search(r"pass (.*?)\.", str(refused.value))[1].split(", ")
        assert {"k", *parameters} - {"ax", "style"} == {*said}


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in ("Evaluation", "Reproduction")])
def test_parts_are_counted_and_looked_up_by_name(name):
    of = result(name)
    assert len(of) > 0
    assert getattr(of, "target", "activations")
    best = {"ChangeRoutes": "direct", "FeatureExamples": "F5"}.get(name) or of.top(1)[0].name
    values = of[best]
    assert len(values) > 0
    with pytest.raises(tlens.InvalidInputError):
        of["nothing of this name"]


@pytest.mark.parametrize("name", ["EdgeScores", "MeasuredEdges", "HeadScores"])
def test_one_less_itself_is_nothing_and_a_mean_is_of_one_prompt(name):
    of = result(name)
    assert not (of - of).scores.nan_to_num().any()
    mean = of.mean()
    torch.testing.assert_close(mean.scores[0], of.scores.nanmean(0))
    best = mean.top(1)[0]
    assert best == of.top(1)[0]
    assert float(mean[best.name]) == pytest.approx(best.score)
    mean.show()
    with pytest.raises(tlens.InvalidInputError, match="a − b"):
        of - mean
    assert of.__sub__(3) is NotImplemented


@pytest.mark.parametrize("name", RESULTS)
def test_k_and_names_are_checked_in_one_way(name):
    of = result(name)
    calls = [of.show, of.plot, of.to_html, *([of.top] if hasattr(of, "top") else [])]
    for call in calls:
        with pytest.raises(tlens.InvalidInputError, match="k=0: pass at least 1"):
            call(k=0)
        with pytest.raises(tlens.InvalidInputError, match=r"'quary' cannot be chosen for this \w+; pass k"):
            call(quary=1)
        with pytest.raises(TypeError, match="positional argument"):
            call(1, 2)


def test_what_a_notebook_shows_has_the_k_of_show(monkeypatch):
    """A graph's k is of the nodes that a table lists: its picture has the edges that it has by itself."""
    displayed = []
    monkeypatch.setattr(page, "display_in_notebook", lambda html: displayed.append(html()) or True)
    result("Terms").show(3, batch=0)
    result("ContributionGraph").show(3)
    assert displayed == [result("Terms").to_html(3, batch=0), result("ContributionGraph").to_html()]


def test_a_graph_of_one_edge_is_kept(tmp_path):
    small = result("ContributionGraph").prune(1e-9)
    assert len(small.edges) == 1
    assert len(type(small).load(small.save(tmp_path / "graph")).edges) == 1


# ------------------------------------------------------------------ what is not listed


def of_parts(**scores):
    values = torch.tensor([list(scores.values())], dtype=torch.float64)[None]
    total = values.sum(-1)
    queries = torch.zeros(1, 1, dtype=torch.long)
    return circuits.Terms(
        list(scores), values, total, queries, torch.ones(1, 1, dtype=torch.bool), [["a"]], "logit of 'a'",
        remainder=torch.zeros_like(total),
    )  # fmt: skip


def rows_of(terms, k, capsys):
    terms.show(k)
    lines = [re.split(r"\s*[│┃]\s*", line.strip("│┃ ")) for line in capsys.readouterr().out.splitlines()]
    return dict(line for line in lines if len(line) == 2)


def test_the_rest_is_one_row_where_it_is_small(capsys):
    assert rows_of(of_parts(L0H0=5, MLP0=1, L1H0=1), 1, capsys)["2 others"] == "+2"


def test_a_rest_that_is_larger_than_every_part_is_split_by_kind(capsys):
    rows = rows_of(of_parts(L0H0=2, L0H1=1.5, MLP0=1.5, MLP1=1, embed=0.5), 1, capsys)
    assert (rows["1 other head"], rows["2 other MLPs"], rows["1 other part"]) == ("+1.5", "+2.5", "+0.5")


def test_and_by_layer_where_all_are_heads(capsys):
    rows = rows_of(of_parts(L0H0=2, L0H1=1.5, L1H0=1.5), 1, capsys)
    assert (rows["1 other part of layer 0"], rows["1 other part of layer 1"]) == ("+1.5", "+1.5")


def test_show_and_top_of_several_prompts_name_one_winner(capsys):
    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens(batch=3))
    terms = circuits.logit_attribution(frozen, by="head")
    winner = terms.top(1)[0]
    assert winner.score == pytest.approx(float(terms[winner.name].mean()))
    assert winner.name in rows_of(terms, 1, capsys)
    assert terms.top(1, batch=1)[0].score in terms.scores[1].flatten().tolist()
