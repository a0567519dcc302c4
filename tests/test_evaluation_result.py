"""The result of an evaluation: statistics, tables, files, plots, the methods it names, and the command line."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import some_tokens
from evaluation_cases import THIRDS
from hypothesis import given, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.commands import main
from tensorlens_tl.evaluate.scorers import random_scores, scorers_of
from tensorlens_tl.results import Evaluation
from tensorlens_tl.results.statistics import auroc, bootstrap_interval, holm, sign_flip_p


@pytest.fixture
def result():
    values = torch.tensor([[[1.0, 2, 3, 4], [2.0, 3, 4, 5.5], [9.0, 9, 9, float("nan")]]])
    return evaluate.Evaluation(
        "test", values, {"score": True}, ["a", "b", "c"], ["p", "q", "r", "s"], settings={"seed": 1}
    )


def test_tables_and_comparisons(result):
    table = result.table()
    assert list(table.index) == ["c", "b", "a"]
    assert table.loc["a", ("score", "mean")] == 2.5
    assert table.loc["a", ("score", "low")] < 2.5 < table.loc["a", ("score", "high")]
    assert table.loc["c", ("score", "low")] == table.loc["c", ("score", "high")] == 9
    compared = result.compare("b", "a")
    assert compared.difference == pytest.approx(1.125)
    assert 1 <= compared.low < 1.125 < compared.high
    assert compared.p == pytest.approx(2 / 16, rel=0.1)  # two of the sixteen sign patterns are as large
    assert list(result.paired("a").index) == ["b", "c"]
    assert "**9** [9, 9]" in result.to_markdown()
    assert len(result.to_dataframe()) == 12
    assert result.only("b").methods == ["b"]
    for call in (lambda: result.table("other"), lambda: result.compare("a", "z"), lambda: result.table(level=1)):
        with pytest.raises(tlens.InvalidInputError):
            call()


def test_a_printed_table_has_every_column(monkeypatch):
    values = torch.rand(3, 2, 8, dtype=torch.float64)
    metrics = dict.fromkeys(["mrr", "precision", "mass"], True)
    table = evaluate.Evaluation("test", values, metrics, ["relp", "random"], list("abcdefgh")).table()
    for width in (80, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = repr(table).splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        assert words.count("low") == words.count("mean") == words.count("high") == 3
        assert "..." not in words
        assert [f"{number:.3g}" in words for number in table.to_numpy().flatten()] == [True] * 18
    assert type(table.head()) is pd.DataFrame


def test_bootstrap_covers():
    """95 % intervals of means of 40 normal numbers hold the truth about as often as they say."""
    values = torch.randn(400, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(values)
    assert 0.90 < float(((low < 0) & (high > 0)).double().mean()) < 0.97
    p = [sign_flip_p(row) for row in values[:100]]
    assert np.mean(np.array(p) < 0.1) == pytest.approx(0.1, abs=0.08)


def test_nothing_known_is_not_significant():
    assert np.isnan(sign_flip_p(torch.full((4,), torch.nan)))
    assert np.isnan(sign_flip_p(torch.zeros(0)))


def test_holm_by_hand():
    """The smallest times 4, the next times 3, and so on, each raised to the one before it; NaN is no comparison."""
    nan = float("nan")
    for p, expected in [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.04, 0.01, 0.02, 0.03], [0.06, 0.04, 0.06, 0.06]),
        ([0.5, nan, 0.6], [1.0, nan, 1.0]),
        ([0.01, nan], [0.01, nan]),
        ([nan], [nan]),
        ([], []),
    ]:
        made = holm(torch.tensor(p, dtype=torch.float64))
        np.testing.assert_allclose(made.numpy(), expected, rtol=1e-12)
    with pytest.raises(tlens.InvalidInputError, match=r"in \[0, 1\]"):
        holm(torch.tensor([0.2, 1.5]))


def test_statistics_take_lists_and_arrays():
    """Numbers may come from a data frame or a list, and labels may be 1 and 0 (which chose items as indices)."""
    numbers, p = [1.0, 2.0, 4.0], [0.01, 0.04]
    for read in (list, np.array, pd.Series):
        assert bootstrap_interval(read(numbers)) == bootstrap_interval(torch.tensor(numbers))
        assert torch.equal(holm(read(p)), holm(torch.tensor(p, dtype=torch.float64)))
        assert auroc(read(numbers), read([1, 0, 0])) == 0
        assert auroc(read(numbers), read([False, False, True])) == 1
    assert auroc(torch.tensor(numbers), torch.tensor([1, 0, 0])) == 0
    assert bootstrap_interval(torch.zeros(2, 0))[0].isnan().tolist() == [True, True]
    for call in (
        lambda: bootstrap_interval(3.0),
        lambda: bootstrap_interval(["a"]),
        lambda: bootstrap_interval(numbers, resamples=0),
        lambda: holm([p, p]),
        lambda: auroc(numbers, [1, 0]),
        lambda: auroc(numbers, [1, 0, 2]),
    ):
        with pytest.raises(tlens.InvalidInputError):
            call()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_holds(p):
    raw = torch.tensor(p, dtype=torch.float64)
    made = holm(raw)
    assert bool((made >= raw).all() and (made <= 1).all())
    assert bool((made[raw.argsort()].diff() >= 0).all())  # keeps the order
    assert torch.equal(made, holm(raw.flip(0)).flip(0))  # and does not depend on the order given
    assert bool((made <= (raw * len(p)).clamp(max=1) + 1e-15).all())  # never stricter than Bonferroni
    assert float(made.min()) == min(1.0, float(raw.min()) * len(p))
    if len(p) == 1:
        assert torch.equal(made, raw)


def test_paired_comparisons_are_corrected_for_their_number(result):
    table = result.paired("a")
    assert list(table.columns) == ["difference", "low", "high", "p", "p_holm"]
    np.testing.assert_allclose(table["p_holm"], holm(torch.tensor(table["p"].to_numpy())))
    assert (table["p_holm"] >= table["p"]).all()
    assert (table["p_holm"] > table["p"]).any()
    alone = result.only("a", "b").paired("a")
    assert alone.loc["b", "p_holm"] == alone.loc["b", "p"] == result.compare("b", "a").p
    with pytest.raises(tlens.InvalidInputError, match="method='z'"):
        result.paired("z")


def test_files(result, tmp_path):
    path = result.save(tmp_path / "result")
    loaded = evaluate.Evaluation.load(path)
    assert torch.equal(loaded.values, result.values) or torch.equal(loaded.values.isnan(), result.values.isnan())
    assert (loaded.metrics, loaded.methods, loaded.settings) == (result.metrics, result.methods, {"seed": 1})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(tlens.FileFormatError, match="not a readable"):
        evaluate.Evaluation.load(path)
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        result.save(tmp_path / "none" / "result")
    attribution = tlens.attribute(demo.load_demo_model(), "Return the").save(tmp_path / "attribution")
    with pytest.raises(tlens.FileFormatError, match="holds Attribution, not Evaluation"):
        evaluate.Evaluation.load(attribution)


def test_plots(result, model_named):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(result.plot().patches) == 3
    curves = evaluate.perturbation(model_named("bridge/gpt2"), some_tokens(2, 6), ["rollout", "alti"], fractions=THIRDS)
    assert len(curves.plot(metric="logit", methods=["alti"]).lines) == 1
    assert len(curves.to_dataframe()) == 3 * 2 * 2 * 4


def test_methods_may_be_given_in_many_ways(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 6))
    for query in (-1, 2, "all"):
        made = scorers_of(
            {"a": "rollout", "b": ("rollout", {"query": "all"}), "c": lambda f: tlens.attribute(f, method="rollout")}
        )
        if query == "all":
            made = [made[0], made[2]]
        scores = [scorer(frozen, query) for scorer in made if scorer.label != "b"]
        assert torch.equal(scores[0], scores[1])
    assert torch.equal(random_scores(3)(frozen), random_scores(3)(frozen))
    assert not torch.equal(random_scores(3)(frozen), random_scores(4)(frozen))


# ------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "command",
    [
        ["perturbation", "-n", "2", "--methods", "rollout", "random"],
        ["known-answer", "--model", "demo:recall", "-n", "3", "--methods", "tensorlens target"],
        ["stability", "-n", "2", "--methods", "rollout", "random"],
        ["agreement", "-n", "2", "--methods", "rollout", "random"],
    ],
    ids=lambda command: command[0],
)
def test_evaluate_from_the_command_line(command, tmp_path, capsys):
    output = tmp_path / ("result.csv" if command[0] == "agreement" else "result")
    assert main(["evaluate", *command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert command[-1].split(" ")[0] in printed
    assert "saved to" in printed
    assert output.exists()


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    for command, message in [
        (["perturbation", "--model", "demo:recall"], "--prompts"),
        (["perturbation", "--prompts", str(tmp_path / "none")], "there is no 'none'"),
        (["perturbation", "--prompts", str(tmp_path / "empty")], "is empty"),
        (["perturbation", "-n", "2", "--methods", "nothing"], "no method called"),
        (["relations", "--model", "demo:relations", "--relations", str(tmp_path / "none")], "not a relation"),
        (["known-answer", "--model", "demo:poems"], "name='poems'"),
    ]:
        assert main(["evaluate", *command]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_methods_with_the_same_numbers_are_named(capsys):
    """To rounding, NaN where the other has NaN; nothing of methods without any number."""
    nothing = float("nan")
    rows = [[1.0, 2.0, nothing], [1.0, 2.0 + 1e-9, nothing], [1.0, 2.1, nothing], [1.0, 2.0, 3.0], *[[nothing] * 3] * 2]
    methods = ["a", "b", "c", "d", "e", "f"]
    result = Evaluation("test", torch.tensor([rows], dtype=torch.float64), {"m": True}, methods, ["0", "1", "2"])
    assert result.same_numbers == [["a", "b"]]
    result.show()
    assert "the same numbers: a, b" in capsys.readouterr().out
    assert "the same numbers: a, b" in result.to_html()
    assert result.only("a", "c").same_numbers == []


def test_a_figure_names_random_and_methods_with_the_same_numbers():
    """The best five lines have colours, others are grey; equal lines would hide each other."""
    pytest.importorskip("matplotlib").use("Agg")
    axis = torch.linspace(0, 1, 4, dtype=torch.float64)
    heights = torch.tensor([9.0, 9, 7, 6, 5, 4, 3, 2, 1], dtype=torch.float64)
    curves = heights[None, :, None, None] * (1 + axis.expand(1, 9, 3, 4))
    methods = ["best", "twin", "c", "d", "e", "f", "g", "h", "random"]
    values = curves.mean(-1)
    result = Evaluation("test", values, {"score": True}, methods, ["p", "q", "r"], curves, axis)
    axes = result.plot()
    names = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert names == ["best = twin", "c", "d", "e", "f", "random"]
    assert len(axes.lines) == 8
    (line,) = (line for line in axes.lines if line.get_label() == "random")
    assert line.get_linestyle() == ":"
    assert line.get_ydata().tolist() == curves[0, -1].mean(0).tolist()
    few = result.plot(methods=["random", "best"])
    assert [text.get_text() for text in few.figure.legends[0].get_texts()] == ["random", "best"]


@pytest.mark.parametrize(("higher", "values", "noted"), [
    (True, [0.378, 0.379, 0.3785], True),
    (True, [0.378, 0.379, 0.2], False),
    (False, [0.5, 0.1, 0.05], True),
    (False, [0.5, 0.1, 0.3], False),
])  # fmt: skip
def test_a_table_in_which_random_is_no_worse_says_so(capsys, higher, values, noted):
    table = Evaluation(
        kind="positive perturbation",
        values=torch.tensor(values, dtype=torch.float64)[None, :, None],
        metrics={"aopc": higher},
        methods=["one", "two", "random"],
        units=["prompt 0"],
        settings={"replacement": "mean"},
    )
    table.show()
    assert ("random does as well as every method" in " ".join(capsys.readouterr().out.split())) is noted
