"""docs/evaluation.md and its CSV files say what the tables of benchmarks/EVALUATION.md say."""

import csv
import runpy
from pathlib import Path

import pytest

pages = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "evaluation_pages.py"))
TEXT = pages["TABLES"].read_text(encoding="utf-8")
PAGE_TEXT = " ".join(pages["PAGE"].read_text(encoding="utf-8").split())


def test_the_files_are_those_of_the_tables():
    """`python benchmarks/evaluation_pages.py` writes them again, and the page shows each."""
    page = pages["PAGE"].read_text(encoding="utf-8")
    for name, content in pages["files"](TEXT).items():
        assert (pages["STATIC"] / name).read_text(encoding="utf-8") == content, name
        assert f":file: _static/{name}\n" in page


def test_no_cell_of_the_tables_is_lost():
    cells = sum(len(row) - 1 for table in pages["tables"](TEXT) for row in table.rows)
    assert len(pages["cells"](TEXT)) + len(pages["other_cells"](TEXT)) == cells
    assert len(pages["verdicts"](TEXT)) == TEXT.count("first is **")


def test_every_method_of_a_test_is_in_the_overview():
    (row,) = [row for row in pages["overview"](TEXT) if row[0] == "leave-one-out"]
    shown = [cell.replace(pages["SPACE"], " ") for cell in row[1:8]]
    assert shown == ["○ 7.35", "● -0.373", "7.74", "● -0.758", "○ 15", "● -0.379", "2.87"]


POSITIVE, INDUCTION = "Language model: positive perturbation", "Induction, language model"


@pytest.mark.parametrize(
    ("finding", "quoted"),
    [
        (
            "(mrr) is {} on the induction task and {} on the brackets task",
            [(INDUCTION, "difference", "mrr"), ("Brackets", "difference", "mrr")],
        ),
        (
            "leads on the recall task ({}; only `decompx target`, `relp` and `cp-lrp` do not differ significantly)",
            [("Key–value recall", "tensorlens target", "mass")],
        ),
        ("On the induction task, In+Out ({}) does not", [(INDUCTION, "tensorlens in_out", "mass")]),
        ("On the brackets task, leaving one out ({}) leads", [("Brackets", "leave-one-out", "mass")]),
        (
            "(logit {} against {} for the best)",
            [(POSITIVE, "mean attention", "logit"), (POSITIVE, "tensorlens target", "logit")],
        ),
        ("+ table (logit {} against {})", [(POSITIVE, "value-zeroing", "logit"), (POSITIVE, "random", "logit")]),
        (
            "(hidden state {} against {} for `decompx target`)",
            [(POSITIVE, "alti-logit", "hs_mse"), (POSITIVE, "decompx target", "hs_mse")],
        ),
        ("half of the best mass ({} against {})", [(INDUCTION, "chefer", "mass"), (INDUCTION, "alti-logit", "mass")]),
    ],
)
def test_findings_quote_the_tables(finding, quoted):
    """A table that is drawn again changes what the page has to say about it."""
    numbers = {(cell.table, cell.method, cell.metric): float(cell.mean) for cell in pages["cells"](TEXT)}
    assert finding.format(*(f"{numbers[cell]:.2f}" for cell in quoted)) in PAGE_TEXT


@pytest.mark.parametrize(
    ("method", "quoted"),
    [
        (
            "tensorlens target",
            "mrr is {:.3f} on the recall task, {:.3f} on the brackets task and {:.3f} on the induction task",
        ),
        ("leave-one-out", "leaving one out is {:.3f}, {:.3f} and {:.3f}"),
    ],
)
def test_ranks_of_known_sources_are_quoted(method, quoted):
    numbers = {cell.table: float(cell.mean) for cell in pages["cells"](TEXT) if cell[1:3] == (method, "mrr")}
    assert quoted.format(*(numbers[of] for of in ("Key–value recall", "Brackets", INDUCTION))) in PAGE_TEXT


real = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "evaluation_real.py"))


def test_the_section_of_trained_models_its_chart_and_tables_are_those_of_the_numbers():
    """`python benchmarks/evaluation_real.py tables` writes them again."""
    assert real["PAGE"].read_text(encoding="utf-8") == real["page"]()
    for path, text in real["files"]().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_means_and_worst_prompts_are_those_of_the_values():
    for line in real["lines"]():
        if line.method == real["NONE"]:
            continue
        assert len(line.numbers) == int(line.prompts)
        worst = line.numbers.max() if line.metric in real["LOWER"] else line.numbers.min()
        assert float(line.mean) == pytest.approx(float(line.numbers.mean()), rel=1e-3, abs=1e-4)
        assert float(line.worst) == pytest.approx(float(worst), rel=1e-3, abs=1e-4)


def test_verdicts_on_trained_models_hold():
    by_column = {}
    for line in real["lines"]():
        if line.test == "nodes" and line.metric == "pearson":
            by_column.setdefault((line.model, line.task), {})[line.method] = float(line.mean), float(line.worst)
    assert len({model for model, _ in by_column}) == 2
    for scores in by_column.values():
        assert max(scores, key=lambda method: scores[method][0]) == "measured"
    worst = {name: min(scores[name][1] for scores in by_column.values()) for name in real["NODES"]}
    assert worst["measured"] > 0.93 > 0.9 > max(worst["difference"], worst["integrated-gradients"])
    assert max(worst[name] for name in ("gradient", "atp*", "frozen")) < 0.3
    lists = {
        metric: {
            name: sum(
                float(one.mean) for one in real["lines"]() if one[1:5:2] == ("nodes", name) and one.metric == metric
            )
            for name in ("gradient", "difference")
        }
        for metric in ("largest", "spearman")
    }
    assert all(of["gradient"] > of["difference"] for of in lists.values())
    stated = [line for line in real["lines"]() if line.metric.startswith("stated")]
    assert (
        min(
            float(sum(of.numbers.sum() for of in stated if of.metric == metric))
            / sum(len(of.numbers) for of in stated if of.metric == metric)
            for metric in {of.metric for of in stated}
        )
        >= 0.9
    )


def test_what_measuring_costs_on_a_short_prompt_is_quoted():
    lines = [line for line in real["lines"]() if line[2] == "15 tokens" and line[4] == "forwards"]
    costs = {line[3]: float(line.mean) for line in lines if line.model == "smollm2"}
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    assert 14 <= costs["measured"] <= 18
    assert "this takes about 16 forward passes" in page
    assert 42 <= costs["patching"] <= 48
    assert "this takes about 45 forward passes" in page


def test_the_agreement_of_measured_with_patching_is_quoted():
    nodes = [line for line in real["lines"]() if line[1:5:2] == ("nodes", "measured") and line.metric == "pearson"]
    least = f"with {{}} is at least {int(100 * min(float(line.mean) for line in nodes)) / 100:.2f} in every task"
    assert least.format("patching") in (DOCS / "choose.md").read_text(encoding="utf-8")
    assert least.format("activation patching") in (DOCS / "howto" / "12_two_prompts.md").read_text(encoding="utf-8")


def test_attention_is_no_better_than_a_random_order_and_gates_make_no_significant_difference():
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    assert "the weights are no better than a random order" in page
    assert "this rule rank that token about equally well for a logit difference (no significant difference)" in page
    for metric in ("mrr", "mrr of a difference"):
        result = real["pooled"](real["lines_of"](real["lines"](), "sources", metric))
        assert all(
            result.mean(metric, f"{of} attention") <= result.mean(metric, "random") for of in ("mean", "rollout")
        )
    best, others = real["leading"](result)
    assert best == "tensorlens target"
    assert "relp" in others  # which is its rule on models with gates


def test_circuits_by_the_difference_and_by_integrated_gradients_do_not_differ_significantly():
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    for metric in ("cpr", "cmd"):
        chosen = real["lines_of"](real["lines"](), "circuits", metric)
        result = real["pooled"](chosen)
        best, others = real["leading"](result)
        assert {"difference", "integrated-gradients"} <= {best, *others}
        measured = f"On SmolLM2 ({len(result.units)} prompt pairs from {len({line.task for line in chosen})} tasks)"
        assert measured in page


def test_names_with_commas_are_not_divided():
    section = (
        "* `mass`: first is **b**; not significantly different (corrected p ≥ 0.05, paired): a, biases, c. "
        "Best TensorLens: a, behind by 0.1 (corrected p = 1).\n"
    )
    assert pages["leading"](section, "mass", ["a", "a, biases", "b", "c"]) == ("b", {"a, biases", "c"})
    alone = "* `mass`: first is **b**; all others differ from it (corrected p < 0.05).\n"
    assert pages["leading"](alone, "mass", ["a", "b"]) == ("b", set())


def test_a_cell_is_a_mean_with_its_interval():
    text = "### A\n\n| method | x | y |\n| --- | --- | --- |\n| m | **-0.5** [-1, 0] | 3e-05 |\n| n | – | 2 |\n"
    assert [tuple(cell) for cell in pages["cells"](text)] == [
        ("A", "m", "x", "-0.5", "-1", "0"),
        ("A", "m", "y", "3e-05", "", ""),
        ("A", "n", "y", "2", "", ""),
    ]


# ------------------------------------------------------------------ docs/howto/26_evaluate_circuits.md

DOCS = Path(__file__).parents[1] / "docs"
CIRCUITS = (DOCS / "howto" / "26_evaluate_circuits.md").read_text(encoding="utf-8")
METHODS = ["frozen", "frozen+qk", "gradient", "integrated-gradients", "integrated-gradients, left", "difference"]
SOURCE = (0, 2)
QUESTION = (1, 3)
"""Columns in which the source or the question changes, of recall and of induction."""


def means(row, table="agreement"):
    """The means of a row of a table, `recall, source` first."""
    with (DOCS / "_static" / f"circuits-{table}.csv").open(encoding="utf-8", newline="") as file:
        (cells,) = [others for label, *others in csv.reader(file) if label == row]
    return [float(cell.strip("* ").split("*")[0].split(" ")[0]) for cell in cells]


def correlations(part, table="agreement"):
    return {method: means(f"{part}: `{method}`", table) for method in METHODS}


def circuits(measure, method):
    return means(f"{measure} {method}", "circuits")


def test_difference_agrees_with_patching_best_or_nearly_best():
    nodes, edges = correlations("nodes"), correlations("edges")
    behind = [max(row[column] for row in nodes.values()) - nodes["difference"][column] for column in range(4)]
    assert behind[:2] == [0, 0]
    assert max(behind) < 0.0045
    first = [edges["difference"][column] == max(row[column] for row in edges.values()) for column in range(4)]
    assert sum(first) == 3
    assert "within 0.004 of the first on the induction task; over the edges it is first, alone or jointly" in CIRCUITS
    assert "alone or jointly, in three of four columns" in CIRCUITS


def test_frozen_scores_hold_where_the_source_changes_and_fail_where_the_question_does():
    parts = [correlations("nodes"), correlations("edges")]
    for column, least in zip(SOURCE, (0.001, 0.021), strict=True):
        behind = [max(row[column] for row in part.values()) - part["frozen"][column] for part in parts]
        assert round(max(behind), 3) <= least
    assert "within 0.001 of the best on the recall task, and within 0.021 on the induction task" in CIRCUITS
    gradients = [part["gradient"][column] for part in parts for column in QUESTION]
    assert (round(min(gradients), 2), round(max(gradients), 1)) == (0.28, 0.5)
    for column in QUESTION:
        assert circuits("CPR", "`frozen`")[column] < 1.05 * circuits("CPR", "random scores")[column]
        assert circuits("CMD", "`frozen`")[column] > circuits("CMD", "random scores")[column]
    assert [circuits("CPR", "`gradient`")[column] for column in QUESTION] == [0.919, 0.259]
    assert circuits("CMD", "`gradient`")[QUESTION[1]] == 0.0749


def test_patterns_by_gradient_are_behind_difference_and_ahead_by_rank():
    for part in ("nodes", "edges"):
        rows = correlations(part)
        behind = [exact - slope for exact, slope in zip(rows["difference"], rows["frozen+qk"], strict=True)]
        assert 0 <= min(behind) <= max(behind) < 0.07
    ranks = correlations("edges", "ranks")
    assert all(slope > exact for exact, slope in zip(ranks["difference"], ranks["frozen+qk"], strict=True))
