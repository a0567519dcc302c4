"""A method over a data set: the same numbers as one prompt at a time, whatever happens on the way."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import close, hooks_left, some_tokens
from hypothesis import given, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl import evaluate
from tensorlens_tl.commands import main
from tensorlens_tl.datasets import folder as folder_module
from tensorlens_tl.datasets.folder import planned

LENGTHS = (5, 3, 8, 8, 1, 6)
ROWS = [
    {"id": f"r{number}", "text": some_tokens(1, length, seed=number)[0].tolist(), "answer": 3 + number}
    for number, length in enumerate(LENGTHS)
]
SMALL = {"tokens_per_batch": 16, "progress": False}


@pytest.fixture
def gpt2(model_named):
    return model_named("bridge/gpt2")


@pytest.fixture
def many_shards(monkeypatch):
    monkeypatch.setattr(folder_module, "BATCHES_PER_SHARD", 1)


def run(model, out, rows=ROWS, **options):
    target = {} if "method" in options else {"target": 5}
    return tlens.attribute_dataset(model, rows, out, **SMALL | target | options)


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "options",
    [
        {"target": 5},
        {"target": 5, "minus": 9, "query": "all"},
        {"target": tlens.NEXT, "query": slice(0, 1)},
        {"collapse": "norm", "target": None, "query": "all"},
        {"method": "rollout", "target": None},
        {"method": "attention", "target": None, "head_reduction": None},
        {"method": "decompx", "target": None, "aggregate": "vector"},
        {"target": 5, "patterns": "recompute", "verify": "sample"},
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_each_row_is_what_it_is_alone(gpt2, tmp_path, options, many_shards):
    options = {name: value for name, value in options.items() if value is not None}
    rows = [row for row in ROWS if len(row["text"]) > 1]
    results = tlens.attribute_dataset(gpt2, rows, tmp_path / "run", **SMALL, **options)
    assert len(results) == len(rows)
    assert results.complete
    for row in rows:
        alone, made = tlens.attribute(gpt2, row["text"], **options), results[row["id"]]
        assert close(made.scores, alone.scores)
        assert (made.tokens, made.axes, made.additive) == (alone.tokens, alone.axes, alone.additive)
        assert (made.method, made.target, made.word_starts) == (alone.method, alone.target, alone.word_starts)
        assert (made.options, made.provenance) == (alone.options, alone.provenance)
        assert made.queries.tolist() == alone.queries.tolist()
        for name in ("bias", "total"):
            mine, theirs = getattr(made, name), getattr(alone, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or close(mine, theirs)
    assert {name for name, _ in results} == {row["id"] for row in rows}
    assert hooks_left(gpt2) == 0


def test_whole_results_beside_the_shards(gpt2, tmp_path):
    results = run(gpt2, tmp_path / "run", method="rollout", keep="all")
    files = sorted((tmp_path / "run").glob("batch-*.safetensors"))
    assert len(files) == len(results.manifest.batches)
    for file, batch in zip(files, results.manifest.batches, strict=True):
        whole = tlens.Attribution.load(file)
        assert whole.layers is not None
        for number, row in enumerate(batch):
            made = results[f"r{row}"].scores[0]
            assert close(whole.scores[number, : len(made), : len(made)], made)


@pytest.mark.parametrize(("keep", "runs"), [("scores", 1 + 8), ("all", 1 + 16)])
def test_a_row_that_fails_costs_few_runs_of_its_batch(gpt2, tmp_path, monkeypatch, keep, runs):
    """The batch is halved around it; whole results that are saved are of all rows or of one."""
    from tensorlens_tl.datasets.work import Attributions

    rows = [[4, 5, 6, 2 + number] for number in range(16)]
    together = Attributions.together
    parts = []

    def failing(self, model, tokens, per_row):
        parts.append([row[-1] for row in tokens])
        if rows[9] in tokens:
            raise tlens.InvalidInputError("this one")
        return together(self, model, tokens, per_row)

    monkeypatch.setattr(Attributions, "together", failing)
    with pytest.warns(UserWarning, match="1 of 16 rows failed"):
        results = run(gpt2, tmp_path / "run", rows, keep=keep, tokens_per_batch=64, target=5)
    assert len(parts) == 1 + runs  # one row is tried before the run begins
    assert results.errors()["row"].tolist() == [9]
    for number in {*range(16)} - {9}:
        assert close(results[number].scores, tlens.attribute(gpt2, rows[number], target=5).scores)
    files = sorted(file.name for file in (tmp_path / "run").glob("batch-*"))
    assert len(files) == (15 if keep == "all" else 0)


def test_what_a_column_says_of_each_row(gpt2, tmp_path):
    results = tlens.attribute_dataset(gpt2, ROWS, tmp_path / "run", columns={"target": "answer"}, **SMALL)
    for row in ROWS:
        alone = tlens.attribute(gpt2, row["text"], target=row["answer"])
        assert close(results[row["id"]].scores, alone.scores)
        assert (results[row["id"]].target, results[row["id"]].options) == (alone.target, alone.options)


def test_the_largest_scores_and_the_sum_of_the_rest(gpt2, tmp_path):
    whole, top = run(gpt2, tmp_path / "whole", query="all"), run(gpt2, tmp_path / "top", query="all", keep="top:2")
    frame = top.to_dataframe(["id", "rest", "scores", "keys"]).set_index("id")
    for name, made in top:
        scores, kept = whole[name].scores, made.scores != 0
        assert close(made.scores[kept], scores[kept])
        assert bool((scores.abs().amax(-1) == made.scores.abs().amax(-1)).all())
        assert close(made.scores.sum(-1) + torch.tensor(frame["rest"][name]), scores.sum(-1))
        assert not made.additive
        assert kept.sum(-1).max() <= 2


def test_batches_do_not_change_the_numbers(gpt2, tmp_path):
    runs = [run(gpt2, tmp_path / str(size), tokens_per_batch=size) for size in (1, 8, 64)]
    backwards = run(gpt2, tmp_path / "backwards", ROWS[::-1], memory="200KB")
    for row in ROWS:
        for other in (*runs[1:], backwards):
            assert close(other[row["id"]].scores, runs[0][row["id"]].scores)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60).flatmap(
        lambda lengths: st.tuples(
            st.just(lengths),
            st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1),
            st.integers(1, 100),
        )
    )
)
def test_the_plan_holds_every_row_once_and_its_bound(case):
    lengths, rejected, most = case
    batches, shards = planned(lengths, sorted(rejected), most)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    good = batches[: len(batches) - bool(rejected)]
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= most for batch in good)
    assert [at for start, stop in shards for at in range(start, stop)] == list(range(len(batches)))


def test_a_list_of_targets_is_of_queries_however_many_rows_run_together(gpt2, tmp_path):
    options = {"target": [5, 9], "query": [0, -1]}
    together, alone = (
        tlens.attribute_dataset(gpt2, ROWS, tmp_path / str(size), tokens_per_batch=size, progress=False, **options)
        for size in (64, 1)
    )
    for row in ROWS:
        expected = tlens.attribute(gpt2, [row["text"]], target=[[5, 9]], query=[0, -1])
        assert close(together[row["id"]].scores, expected.scores)
        assert close(alone[row["id"]].scores, expected.scores)
        assert together[row["id"]].options["target"] == [5, 9]


# ------------------------------------------------------------------ circuits


@pytest.mark.parametrize(
    "options",
    [
        {"target": 5},
        {"target": 5, "minus": 9, "query": "all", "by": "head"},
        {"target": tlens.NEXT, "query": slice(0, 1), "by": "neuron"},
        {"target": [5, 9], "query": [0, -1], "memory": "40KB"},
        {"method": "total_effects", "target": 5},
    ],
    ids=str,
)
def test_the_terms_of_each_row_and_their_summary(gpt2, tmp_path, options, many_shards):
    options = dict(options)
    method = options.pop("method", "logit_attribution")
    rows = [row for row in ROWS if len(row["text"]) > 1]
    results = tlens.attribute_dataset(gpt2, rows, tmp_path / "run", method=method, **SMALL, **options)
    values = []
    for row in rows:
        alone, made = getattr(tlens.circuits, method)(tlens.freeze(gpt2, [row["text"]]), **options), results[row["id"]]
        assert close(made.scores, alone.scores)
        assert close(made.total, alone.total)
        assert (made.names, made.tokens, made.target) == (alone.names, alone.tokens, alone.target)
        assert (made.additive, made.queries.tolist()) == (alone.additive, alone.queries.tolist())
        values.append(alone.scores[0])
    together = torch.cat(values)
    deviations = torch.stack([(value - together.mean(0)).sum(0) for value in values])
    ends = 1.96 * (len(rows) / (len(rows) - 1) * deviations.square().sum(0)).sqrt() / len(together)
    if len(together) == len(rows):  # one query a row: the usual standard error
        assert close(ends, 1.96 * together.std(0) / len(rows) ** 0.5)
    for memory in (None, 200):  # a few terms at a time
        table = results.summary((0, 0.3, 1), memory=memory)
        assert table.index.tolist() == alone.names
        assert set(table["count"]) == {len(together)}
        expected = {"mean": together.mean(0), "variance": together.var(0), "30%": together.quantile(0.3, 0)}
        expected |= {"low": together.mean(0) - ends, "high": together.mean(0) + ends}
        expected |= {"0%": together.amin(0), "100%": together.amax(0), "std": together.std(0)}
        for column, numbers in expected.items():
            assert close(torch.tensor(table[column].tolist(), dtype=torch.float64), numbers.detach())
    if "by" in options:
        assert results.summary(0.5, names="L1H*").index.tolist() == [n for n in alone.names if n.startswith("L1H")]


def test_a_component_that_some_rows_lack_is_zero_there(gpt2, tmp_path, many_shards):
    """A target without a bias in W_U has no term b_U; a row of its own batch has other terms than the rest."""
    changed = tlens.testing.tiny_model("bridge/gpt2").double()
    bias = tlens.models.ModelView(changed).unembedding[1]
    rows = [row | {"answer": 5 if number < 3 else 9} for number, row in enumerate(ROWS)]
    with torch.no_grad():
        bias[5], bias[9] = 0.0, 0.25
    for size in (64, 1):
        results = tlens.attribute_dataset(
            changed, rows, tmp_path / str(size), method="logit_attribution", columns={"target": "answer"},
            tokens_per_batch=size, progress=False,
        )  # fmt: skip
        table = results.summary(names="b_U")
        assert table.loc["b_U", "count"] == len(rows)
        assert table.loc["b_U", "mean"] == pytest.approx(0.125)


def test_terms_with_rows_that_fail_and_what_is_refused(gpt2, tmp_path):
    with pytest.warns(UserWarning, match="1 of 7 rows failed"):
        results = run(
            gpt2, tmp_path / "run", [*ROWS, {"id": "bad", "text": [99]}], method="logit_attribution", target=5
        )
    assert set(results.summary()["count"]) == {len(ROWS)}
    for ask, message in (
        (lambda: results.summary((0.5, 2)), "quantiles="),
        (lambda: results.summary("half"), "quantiles='half'"),
        (lambda: results.summary(names="X*"), "names='X.'"),
        (lambda: results.evaluation(), "results of 'logit_attribution', not of evaluate"),
        (lambda: run(gpt2, tmp_path / "a", method="logit_attribution", target=5, keep="all"), "keep='all'"),
        (lambda: run(gpt2, tmp_path / "a", method="logit_attribution", target=5, by="head_token"), "no source tokens"),
        (lambda: run(gpt2, tmp_path / "a", method="logit_attribution", target=5, by="heads"), "by='heads'"),
        (lambda: run(gpt2, tmp_path / "a", method="logit_attribution", target=5, quer=1), "Did you mean 'query'"),
        (
            lambda: run(gpt2, tmp_path / "run", method="logit_attribution", target=6),
            "differs in its data|differs in its options",
        ),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            ask()
    with pytest.raises(tlens.errors.RegistryError, match="Did you mean 'logit_attribution'"):
        run(gpt2, tmp_path / "a", method="logit_atribution")
    assert not (tmp_path / "a").exists()


def test_a_summary_of_rows_that_all_failed_since(gpt2, tmp_path):
    run(gpt2, tmp_path / "run", method="logit_attribution", target=5)
    for file in (tmp_path / "run").glob("part-*.parquet"):
        file.unlink()
    with pytest.raises(tlens.InvalidInputError, match="no row of"):
        tlens.load_results(tmp_path / "run").summary()


# ------------------------------------------------------------------ perturbation tests

METHODS = {"target": ("tensorlens", {"target": evaluate.PREDICTED}), "attention": "rollout", "random": "random"}


@pytest.mark.parametrize(
    "options",
    [{}, {"replacement": "zero", "order": "ascending", "query": 5}, {"query": "mean", "absolute": True}],
    ids=str,
)
def test_a_perturbation_test_over_rows_is_the_one_in_memory(gpt2, tmp_path, options, many_shards):
    prompts = [some_tokens(1, length, seed=length)[0].tolist() for length in (9, 7, 12, 12, 8)]
    methods = dict(METHODS, **({"target": ("ifr", {})} if options.get("query") == "mean" else {}))
    methods["equal"] = lambda frozen: 0.0 * frozen.mask  # all ties
    whole = evaluate.perturbation(gpt2, prompts, methods, fractions=(0, 0.2, 0.5), **options)
    ask = partial(evaluate.perturbation_dataset, gpt2, prompts, methods=methods, fractions=(0, 0.2, 0.5), **options)
    results = ask(tmp_path / "run", **SMALL)
    made = results.evaluation()
    assert close(made.curves, whole.curves)
    assert close(made.values, whole.values)
    assert (made.kind, made.metrics, made.methods, made.settings) == (
        whole.kind, whole.metrics, whole.methods, whole.settings
    )  # fmt: skip
    assert close(torch.tensor(made.table().values), torch.tensor(whole.table().values))
    assert close(results["3"].values[:, :, 0], whole.values[:, :, 3])
    before = contents(tmp_path / "run")
    next((tmp_path / "run").glob("part-*.parquet")).unlink()
    ask(tmp_path / "run", **SMALL)
    assert contents(tmp_path / "run") == before
    with pytest.raises(tlens.InvalidInputError, match=r"differs in its options .seed: 0, now 1"):
        ask(tmp_path / "run", **SMALL, seed=1)
    with pytest.raises(tlens.InvalidInputError, match=r"results of .perturbation., not of method="):
        results.summary()
    assert hooks_left(gpt2) == 0


def test_rows_without_tokens_to_perturb_are_recorded(demo_model, tmp_path):
    special = [demo_model.tokenizer.bos_token_id]
    rows = [special, [special[0], 300, 400], [10**6]]
    ask = partial(evaluate.perturbation_dataset, demo_model, methods=["random"], fractions=(0, 0.2), **SMALL)
    with pytest.warns(UserWarning, match="2 of 3 rows failed"):
        results = ask(rows, tmp_path / "run")
    assert results.errors()["error"].str.contains("this row has no token that may|1000000").all()
    assert (results.evaluation().units, results.evaluation().settings["failed"]) == (["1"], 2)
    for bad, message in (([special], "longest row cannot be tested. .*no token that may"), ([[]], "none is a prompt")):
        with pytest.raises(tlens.InvalidInputError, match=message):
            ask(bad, tmp_path / "other")
    with pytest.raises(tlens.InvalidInputError, match="order='up'"):
        ask(rows, tmp_path / "other", order="up")
    assert not (tmp_path / "other").exists()


def test_each_row_has_its_own_words_for_its_target_whatever_the_memory(gpt2, tmp_path):
    columns = {"target": "answer"}
    results = tlens.attribute_dataset(gpt2, ROWS, tmp_path / "run", columns=columns, memory="40KB", progress=False)
    assert results["r1"].target == tlens.attribute(gpt2, ROWS[1]["text"], target=4).target


# ------------------------------------------------------------------ what rows may come from


def test_files_frames_and_data_sets_are_the_same(gpt2, tmp_path):
    datasets = pytest.importorskip("datasets")
    model = tlens.load_demo_model()
    texts = ["Return the value", 'Raise an error, "if" so', "for x in"]
    tables = [{"id": number, "text": text} for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, tables)) + "\n\n")
    pd.DataFrame(tables).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(tables).to_parquet(tmp_path / "a.parquet")
    sources = {
        "texts": texts, "generator": (text for text in texts), "tables": tables, "frame": pd.DataFrame(tables),
        "datasets": datasets.Dataset.from_list(tables),
        **{f"file.{end}": tmp_path / f"a.{end}" for end in ("jsonl", "csv", "parquet")},
    }  # fmt: skip
    frames = []
    for name, source in sources.items():
        results = tlens.attribute_dataset(model, source, tmp_path / name, target=" the", progress=False)
        frames.append(results.to_dataframe())
        assert frames[-1]["id"].tolist() == ["0", "1", "2"]
        pd.testing.assert_frame_equal(frames[0], frames[-1])
    files = str(tmp_path / "texts" / "part-*.parquet")
    read = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))["train"]
    assert sorted(read["id"]) == ["0", "1", "2"]


# ------------------------------------------------------------------ rows that fail


def test_rows_that_fail_are_recorded(gpt2, tmp_path):
    long = some_tokens(1, gpt2.cfg.n_ctx + 2)[0].tolist()
    bad = {"empty": [], "number": 3, "nothing": None, "outside": [999], "long": long, "text": "no tokenizer"}
    rows = [*ROWS, *({"id": name, "text": value} for name, value in bad.items())]
    with pytest.warns(UserWarning, match="6 of 12 rows failed"):
        results = run(gpt2, tmp_path / "run", rows)
    errors = results.errors().set_index("id")["error"]
    assert set(errors.index) == set(bad)
    for name, words in {"empty": "neither", "outside": "0 to 47", "long": "truncate=True", "text": "tokenizer"}.items():
        assert words in errors[name]
    assert len(list(results)) == len(ROWS)
    with pytest.raises(tlens.InvalidInputError, match="row 'long' failed: text: 26 tokens"):
        results["long"]
    with pytest.warns(UserWarning, match="5 of 12"):
        cut = run(gpt2, tmp_path / "cut", rows, truncate=True)
    assert close(cut["long"].scores, tlens.attribute(gpt2, long[:-2], target=5).scores)
    assert cut.to_dataframe(["id", "dropped_tokens"]).set_index("id")["dropped_tokens"]["long"] == 2


@pytest.mark.parametrize("value", [["a", "b"], [[3, 4], [5]], "bad \ud800"], ids=["texts", "lists", "unicode"])
def test_what_is_no_one_prompt_is_a_row_with_an_error(value, tmp_path):
    rows = [{"text": "Return the value"}, {"text": value}]
    with pytest.warns(UserWarning, match="1 of 2 rows failed"):
        results = run(tlens.load_demo_model(), tmp_path / "run", rows, target=" the")
    assert results.errors()["id"].tolist() == ["1"]


def test_an_encoder_keeps_its_last_mark_where_a_text_is_cut(tmp_path):
    model = tlens.load_demo_model("encoder")
    results = tlens.attribute_dataset(
        model, ["the value is " * 100], tmp_path / "run", method="attention", truncate=True, progress=False
    )
    ends = [results["0"].tokens[0][0], results["0"].tokens[0][-1]]
    assert ends == [tlens.freeze(model, "the value").str_tokens[0][place] for place in (0, -1)]


def test_one_row_of_a_batch_does_not_take_the_others_down(gpt2, tmp_path):
    rows = [row | {"answer": 999 if row["id"] == "r3" else 5} for row in ROWS]
    with pytest.warns(UserWarning, match="1 of 6 rows failed"):
        results = tlens.attribute_dataset(gpt2, rows, tmp_path / "run", columns={"target": "answer"}, **SMALL)
    assert results.errors()["id"].tolist() == ["r3"]
    assert close(results["r2"].scores, tlens.attribute(gpt2, ROWS[2]["text"], target=5).scores)


def test_a_column_called_prompt_needs_no_name(gpt2, tmp_path):
    prompts = [{"id": row["id"], "prompt": row["text"]} for row in ROWS]
    results = tlens.attribute_dataset(gpt2, prompts, tmp_path / "run", target=5, **SMALL)
    assert torch.equal(
        results["r2"].scores, tlens.attribute_dataset(gpt2, ROWS, tmp_path / "b", target=5, **SMALL)["r2"].scores
    )


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "there is none"),
        ({"text": "a"}, {}, "one table is one row"),
        (3, {}, "int holds no rows"),
        ([{"input": "a"}], {}, "no column 'text', only 'input'"),
        ([{"id": 1, "input": "Return the"}], {}, "Name the column that holds the prompts, such as text='input'"),
        ([{"id": 1, "prompt": "a"}], {"text": "promt"}, "no column 'promt', .* Did you mean 'prompt'"),
        ([{"id": 1, "prompt": "Return the"}], {"text": "zzz"}, "such as text='prompt'"),
        (ROWS, {"id": "name"}, "no column 'name'"),
        ([*ROWS, ROWS[3]], {}, "id='r3' names row 3 and row 6"),
        ([{"id": 1.5, "text": [3]}], {}, "a text or an integer"),
        ("rows.txt", {}, "cannot read rows.txt"),
        ("none.jsonl", {}, "there is no file"),
        (ROWS, {"columns": {"query": "answer"}}, "'query' is not one of"),
        (ROWS, {"columns": {"target": "answer"}}, "in a column and an option"),
        (ROWS, {"columns": {"minus": "other"}}, "no column 'other'"),
        (ROWS, {"keep": "top:0"}, "keep='top:0'"),
        (ROWS, {"tokens_per_batch": 0}, "at least 1"),
        (ROWS, {"quer": 3}, "Did you mean 'query'"),
        (ROWS, {"target": 999}, "none of the 4 rows that were tried works.* .*vocabulary"),
        (ROWS, {"memory": "some"}, "memory='some'"),
        ([{"text": ""}], {}, "none is a prompt. Row 0: text: empty"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(gpt2, tmp_path, rows, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        run(gpt2, tmp_path / "run", rows, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"', "line 1 of .* is not valid JSON"),
        ("a.jsonl", b"[3]", "is list, not an object"),
        ("a.jsonl", b'{"text": "\xef\xef"}', "is not UTF-8"),
        ("a.csv", b"text\nna\xefve\n", "is not UTF-8"),
        ("a.csv", b"text,id\nyes, but,1\n", "line 2 of .* has more fields"),
        ("a.csv", b"text,text\na,b\n", "two columns named 'text'"),
        ("a.csv", b"text\n" + b"x" * 200_000, "line . of .* field limit"),
        ("a.parquet", b"nothing", "is not a Parquet file"),
    ],
)
def test_files_that_cannot_be_read(gpt2, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(tlens.InvalidInputError, match=message):
        run(gpt2, tmp_path / "run", tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_files_of_other_programs(tmp_path):
    for name, content in (("a.CSV", "text\nReturn the value\n"), ("a.jsonl", '{"text": "Return the value"}\n')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())  # a byte-order mark
        assert len(run(tlens.load_demo_model(), tmp_path / f"run of {name}", tmp_path / name, target=" the")) == 1


def test_gaps_and_bytes_are_rows_with_an_error(tmp_path):
    rows = ["Return the value", None, float("nan"), b"Return the"]
    with pytest.warns(UserWarning, match="3 of 4 rows failed"):
        results = run(tlens.load_demo_model(), tmp_path / "run", rows, target=" the")
    assert results.errors()["error"].str.split(";").str[0].tolist() == ["text: missing"] * 2 + ["text: bytes, not text"]


def test_rows_that_end_in_an_error_write_nothing(gpt2, tmp_path):
    def source():
        yield [3, 4]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        run(gpt2, tmp_path / "run", source())
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ folders


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.glob("part-*.parquet"))}


def test_a_run_goes_on_where_it_stopped(gpt2, tmp_path, many_shards, monkeypatch):
    whole = run(gpt2, tmp_path / "whole")
    assert len(whole.shards) > 2
    run(gpt2, tmp_path / "run")
    for file in list((tmp_path / "run").glob("part-*.parquet"))[1:]:
        file.unlink()
    begun = tlens.load_results(tmp_path / "run")
    assert not begun.complete
    assert "of 6 rows" in repr(begun)
    made = run(gpt2, tmp_path / "run")
    assert made.complete
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    monkeypatch.setattr("tensorlens_tl.datasets.running.run_rows", lambda *a, **k: pytest.fail("run again"))
    run(gpt2, tmp_path / "run")  # nothing is left to do


@pytest.mark.parametrize(
    "options",
    [
        {"query": -1},
        {"method": "rollout", "query": "all"},
        {"method": "logit_attribution", "target": 5, "query": -1},
    ],
    ids=str,
)
def test_a_run_is_resumed_however_its_default_query_is_spelled(gpt2, tmp_path, options, monkeypatch):
    default = {name: value for name, value in options.items() if name != "query"}
    run(gpt2, tmp_path / "run", **default)
    monkeypatch.setattr("tensorlens_tl.datasets.running.run_rows", lambda *a, **k: pytest.fail("run again"))
    run(gpt2, tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": 6}, "differs in its options .target: 5, now 6"),
        ({"query": 0}, "differs in its options .query: -1, now 0"),
        ({"method": "rollout"}, "differs in its method"),
        ({"keep": "all"}, "differs in its keep"),
        ({"rows": ROWS[:-1]}, "differs in its data .rows: 6, now 5"),
        ({"rows": [*ROWS[:-1], ROWS[-1] | {"text": [4]}]}, "differs in its data .tokens: not the same"),
        ({"resume": False}, "a run was begun there"),
    ],
    ids=str,
)
def test_another_run_in_the_same_folder_is_refused(gpt2, tmp_path, changed, message):
    run(gpt2, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(tlens.InvalidInputError, match=message):
        run(gpt2, tmp_path / "run", **changed)
    assert contents(tmp_path / "run") == before


def test_another_model_in_the_same_folder_is_refused(model_named, tmp_path):
    run(model_named("bridge/gpt2"), tmp_path / "run")
    changed = tlens.testing.tiny_model("bridge/gpt2")
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    with pytest.raises(tlens.InvalidInputError, match=r"differs in its model \(weights"):
        run(changed, tmp_path / "run")
    with pytest.raises(tlens.InvalidInputError, match="differs in its model"):
        run(model_named("bridge/llama"), tmp_path / "run")


def _hooked_scale(model):
    model.blocks[0].attn.attn_scale *= 2


def _rope(model):
    model.original_model.config.rope_parameters["rope_theta"] = 77.0
    model.original_model.model.rotary_emb.inv_freq.mul_(0.5)


def _window(model):
    model.blocks[0].attn._modules["_original_component"].sliding_window = 2


def _epsilon(model):
    for norm in (model.blocks[0].ln1, model.blocks[1].ln1):
        norm._modules["_original_component"].eps = 0.1


def _activation(model):
    model.blocks[1].mlp._modules["_original_component"].act = torch.nn.ReLU()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hooked/ln", _hooked_scale, r"configuration: blocks.0.attn.attn_scale: 2 -> 4\)"),
        ("bridge/llama", _rope, r"configuration: .*rope_theta: 10000.*rope_theta: 77.*inv_freq"),
        ("bridge/gemma2", _window, r"configuration: blocks.0.self_attn.sliding_window: 3 -> 2\)"),
        ("bridge/gpt2", _epsilon, r"configuration: blocks.\*.ln_1.eps: 1e-05 -> 0.1\)"),
        ("bridge/gpt2", _activation, r"configuration: blocks.1.mlp.act: .*GELUActivation -> .*ReLU"),
    ],
)
def test_the_same_weights_under_another_configuration_are_another_model(name, change, message, tmp_path):
    if name not in tlens.testing.model_names():
        pytest.skip("HookedTransformer is gone in TransformerLens 4")
    model = tlens.testing.tiny_model(name)
    run(model, tmp_path / "run")
    run(tlens.testing.tiny_model(name), tmp_path / "run")  # the same, built again
    before = contents(tmp_path / "run")
    change(model)
    with pytest.raises(tlens.InvalidInputError, match=r"differs in its model \(" + message):
        run(model, tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("package", ["transformer-lens", "transformers", "tensorlens_tl"])
def test_another_version_is_another_run(gpt2, tmp_path, monkeypatch, package):
    from importlib import metadata

    run(gpt2, tmp_path / "run")
    if package == "tensorlens_tl":
        monkeypatch.setattr("tensorlens_tl.datasets.folder.__version__", "99.0")
    else:
        real = metadata.version
        fake = lambda name: "99.0" if name == package else real(name)  # noqa: E731
        monkeypatch.setattr("tensorlens_tl.models.view._version_of_transformer_lens", lambda: fake("transformer-lens"))
        monkeypatch.setattr("tensorlens_tl.datasets.folder.version", fake)
    with pytest.raises(
        tlens.InvalidInputError, match=rf"differs in its model \({package.replace('-', '_')}: .*now '99.0'\)"
    ):
        run(gpt2, tmp_path / "run")


def test_what_changed_of_the_data_is_said(gpt2, tmp_path):
    columns = {"columns": {"target": "answer"}, **SMALL}
    tlens.attribute_dataset(gpt2, ROWS, tmp_path / "run", **columns)
    other = [*ROWS[:-1], ROWS[-1] | {"answer": 40}]
    with pytest.raises(tlens.InvalidInputError, match=r"data \(target: not the same, the same ids and tokens\)"):
        tlens.attribute_dataset(gpt2, other, tmp_path / "run", **columns)
    renamed = [*ROWS[:-1], ROWS[-1] | {"id": "other"}]
    with pytest.raises(tlens.InvalidInputError, match=r"data \(ids: not the same, the same tokens and target\)"):
        tlens.attribute_dataset(gpt2, renamed, tmp_path / "run", **columns)
    with pytest.raises(tlens.InvalidInputError, match=r"data \(target: there, now none\)"):
        tlens.attribute_dataset(gpt2, ROWS, tmp_path / "run", target=5, **SMALL)


def test_columns_that_change_places_and_hooks_are_another_run(gpt2, tmp_path):
    rows = [row | {"other": 40} for row in ROWS]
    columns = {"target": "answer", "minus": "other"}
    tlens.attribute_dataset(gpt2, rows, tmp_path / "run", columns=columns, **SMALL)
    tlens.attribute_dataset(gpt2, rows, tmp_path / "run", columns=dict(reversed(columns.items())), **SMALL)  # the same
    with pytest.raises(tlens.InvalidInputError, match="differs in its data"):
        tlens.attribute_dataset(gpt2, rows, tmp_path / "run", columns={"target": "other", "minus": "answer"}, **SMALL)
    halved = [("blocks.0.hook_resid_pre", lambda stream, hook: stream / 2)]
    with gpt2.hooks(halved), pytest.raises(tlens.InvalidInputError, match=r"differs in its model \(hooks"):
        tlens.attribute_dataset(gpt2, rows, tmp_path / "run", columns=columns, **SMALL)


def test_a_manifest_that_was_half_written_is_in_nobodys_way(gpt2, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".manifest.json.77.tmp").write_text("{")
    assert run(gpt2, tmp_path / "run").complete


def test_damaged_and_foreign_folders(gpt2, tmp_path, many_shards):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(tlens.InvalidInputError, match=r"contains 'a.txt' and no manifest"):
        run(gpt2, tmp_path / "notes")
    assert [file.name for file in (tmp_path / "notes").iterdir()] == ["a.txt"]
    with pytest.raises(tlens.InvalidInputError, match="that is a file"):
        run(gpt2, tmp_path / "notes" / "a.txt")
    with pytest.raises(tlens.FileFormatError, match="no run was begun here"):
        tlens.load_results(tmp_path / "notes")
    results = run(gpt2, tmp_path / "run")
    shard = tmp_path / "run" / "part-00001.parquet"
    good, other = shard.read_bytes(), (tmp_path / "run" / "part-00000.parquet").read_bytes()
    middle = len(good) // 3
    flipped = good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :]
    for damaged in (good[:-20], flipped, b"", other):
        shard.write_bytes(damaged)
        with pytest.raises(tlens.FileFormatError, match=r"part-00001.parquet: .*Delete it and run again"):
            results.to_dataframe()
    with pytest.raises(tlens.FileFormatError, match=r"part-00001"):
        run(gpt2, tmp_path / "run")
    shard.unlink()
    run(gpt2, tmp_path / "run")
    assert shard.read_bytes() == good
    manifest = tmp_path / "run" / "manifest.json"
    text = manifest.read_text()
    for damaged, message in (
        (text.replace("tensorlens_tl.dataset", "other"), "no manifest of this library"),
        (text.replace('"version": 2', '"version": 99'), "newer"),
        (text.replace('"method": "tensorlens"', '"method": "rollout"'), "its digest does not fit"),
        (text[:100], "not a readable manifest"),
        ("[]", "not a readable manifest"),
    ):
        manifest.write_text(damaged)
        for ask in (lambda: tlens.load_results(tmp_path / "run"), lambda: run(gpt2, tmp_path / "run")):
            with pytest.raises(tlens.FileFormatError, match=message):
                ask()


def _rewritten(path, change):
    """A shard written anew by another program, with other metadata."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    pq.write_table(change(table), path, write_page_checksum=True)


def _without(*keys):
    def change(table):
        left = {key: text for key, text in table.schema.metadata.items() if key.decode() not in keys}
        return table.replace_schema_metadata(left)

    return change


def _facts(change):
    def changed(table):
        metadata = dict(table.schema.metadata)
        metadata[b"tensorlens_tl"] = json.dumps(change(json.loads(metadata[b"tensorlens_tl"]))).encode()
        return table.replace_schema_metadata(metadata)

    return changed


def _doubled(table):
    import pyarrow.compute as pc

    place = table.schema.get_field_index("total")
    values = [None if row is None else [2 * value for value in row] for row in table["total"].to_pylist()]
    return table.set_column(place, table.schema.field(place), pc.cast(pd.Series(values).tolist(), table["total"].type))


def _swapped(table):
    names = {"bias": "total", "total": "bias"}
    renamed = table.rename_columns([names.get(name, name) for name in table.column_names])
    return renamed.replace_schema_metadata(table.schema.metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("tensorlens_tl", "tensorlens_tl.seal"), "lacks the facts"),
        (_without("tensorlens_tl"), "lacks the facts"),
        (_without("tensorlens_tl.seal"), "lacks the facts"),
        (_facts(lambda facts: facts | {"additive": False}), "its facts were changed"),
        (_facts(lambda facts: facts | {"options": {}}), "its facts were changed"),
        (_doubled, "its column 'total' was changed"),
        (_swapped, "its facts were changed"),
    ],
)
def test_a_shard_that_was_edited_is_refused(gpt2, tmp_path, change, message):
    results = run(gpt2, tmp_path / "run")
    _rewritten(tmp_path / "run" / "part-00000.parquet", change)
    for ask in (results.to_dataframe, lambda: results["r0"], lambda: list(results)):
        with pytest.raises(tlens.FileFormatError, match=f"part-00000.parquet: .*{message}.*Delete it and run again"):
            ask()


def test_a_shard_of_another_run_is_refused(gpt2, tmp_path, many_shards):
    results = run(gpt2, tmp_path / "run")
    run(gpt2, tmp_path / "other", target=6)
    place = tmp_path / "run" / "part-00001.parquet"
    place.write_bytes((tmp_path / "other" / "part-00001.parquet").read_bytes())
    for ask in (results.to_dataframe, results.errors, lambda: run(gpt2, tmp_path / "run")):
        with pytest.raises(tlens.FileFormatError, match=r"part-00001.parquet: it belongs to another run"):
            ask()
    place.unlink()
    assert run(gpt2, tmp_path / "run").complete


def test_what_a_file_makes_of_a_column_does_not_change_its_digest(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tensorlens_tl.datasets.folder import content_digest

    rows = [{"a": [1.5, None, -0.0], "b": "é", "c": 3}, {"a": None, "b": None, "c": None}, {"a": [], "b": "", "c": 4}]
    kinds = pa.schema([("a", pa.list_(pa.float64())), ("b", pa.string()), ("c", pa.int64())])
    table = pa.Table.from_pylist(rows, kinds)
    parts = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    for name in table.column_names:
        expected = content_digest(table[name])
        assert content_digest(parts[name]) == content_digest(pq.read_table(tmp_path / "t.parquet")[name]) == expected
    lists = (
        [[1.0, 2.0]], [[1.0], [2.0]], [[1.0], [2.0], None],
        [[1.0], [2.0], []], [[1.0, None], [2.0]], [None, [1.0], [2.0]],
    )  # fmt: skip
    seen = {content_digest(pa.chunked_array([pa.array(values, pa.list_(pa.float64()))])) for values in lists}
    assert len(seen) == 6


def test_a_run_that_is_interrupted_says_how_to_go_on(gpt2, tmp_path, many_shards, monkeypatch):
    from tensorlens_tl.datasets import running

    work, calls = running.run_rows, []

    def pressed(*args):
        calls.append(args)
        if len(calls) == 4:  # one is tried before the run begins
            raise KeyboardInterrupt
        return work(*args)

    monkeypatch.setattr(running, "run_rows", pressed)
    with pytest.raises(
        KeyboardInterrupt, match=r"of 6 rows are written; run the same command again to continue"
    ) as raised:
        run(gpt2, tmp_path / "run")
    assert raised.value.__suppress_context__
    checkers = re.compile("jaxtyping|<@beartype|_arguments")  # which check signatures
    ours = [entry for entry in raised.traceback if not checkers.search(str(entry.path))]
    assert len(ours) < 6  # not the frames of what was computed
    done = len(tlens.load_results(tmp_path / "run"))
    assert 0 < done < 6
    assert str(raised.value).startswith(f"{done} of 6 rows")
    assert not [file for file in (tmp_path / "run").iterdir() if file.suffix == ".tmp"]
    assert hooks_left(gpt2) == 0
    monkeypatch.undo()
    assert run(gpt2, tmp_path / "run").complete


def test_the_command_line_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    from tensorlens_tl.datasets import running

    work, calls = running.run_rows, []

    def pressed(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return work(*args)

    monkeypatch.setattr(running, "run_rows", pressed)
    (tmp_path / "a.jsonl").write_text('{"text": "Return the value of the"}\n')
    words = ["dataset", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "run"), "--target", " file"]
    capsys.readouterr()
    assert main(words) == 130
    said = [line for line in capsys.readouterr().err.splitlines() if "row/s" not in line]
    assert said[-1] == "0 of 1 rows are written; run the same command again to continue."
    assert "Traceback" not in "".join(said)
    monkeypatch.setattr(running, "run_rows", work)
    for before in ("0 of 1 rows were written before; continuing with the other 1.", "All 1 rows were written before"):
        assert main(words) == 0
        assert before in capsys.readouterr().err
    monkeypatch.setattr("tensorlens_tl.commands.methods.run", lambda args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.fixture
def small_files():
    """No file may grow beyond a few bytes: what a full disk is to safetensors."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_whole_results_that_cannot_be_written_are_the_systems_error(gpt2, tmp_path, small_files, monkeypatch):
    attribution = tlens.attribute(gpt2, ROWS[0]["text"], target=5)
    small_files(500)
    with pytest.raises(OSError, match="File too large") as raised:
        attribution.save(tmp_path / "a.safetensors")
    small_files(-1)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"batch-000000.safetensors: the disk is full") as raised:
        run(gpt2, tmp_path / "run", keep="all")
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert run(gpt2, tmp_path / "run", keep="all").complete


def test_a_full_disk_loses_nothing(gpt2, tmp_path, many_shards, monkeypatch):
    import pyarrow.parquet as pq

    written, write_table = [], pq.write_table

    def full(table, path, **options):
        if len(written) == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write_table(table, path, **options)

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match=r"part-00001.parquet: the disk is full"):
        run(gpt2, tmp_path / "run")
    left = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert left == ["locks", "manifest.json", "part-00000.parquet"]
    monkeypatch.undo()
    assert run(gpt2, tmp_path / "run").complete


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(gpt2, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(tlens.InvalidInputError, match="cannot write there"):
        run(gpt2, tmp_path / "locked" / "run")


def test_asking_for_rows_that_are_not_there(gpt2, tmp_path):
    results = run(gpt2, tmp_path / "run")
    with pytest.raises(tlens.InvalidInputError, match="no row has the id 'r99'"):
        results["r99"]


# ------------------------------------------------------------------ processes

WORKER = """
import sys, time
import torch
torch.set_num_threads(1)
import tensorlens_tl as tlens
from tensorlens_tl import evaluate
from tensorlens_tl.commands import main
from tensorlens_tl.datasets import folder, running
folder.BATCHES_PER_SHARD = 1
slow, work = float(sys.argv[2]), running.run_rows
def slowly(*args, **options):
    time.sleep(slow)
    return work(*args, **options)
running.run_rows = slowly
model = tlens.testing.tiny_model("bridge/gpt2")
rows = [[3 + number % 40] * (1 + number % 8) for number in range(60)]
print("ready", flush=True)
tlens.attribute_dataset(model, rows, sys.argv[1], target=5, query="all", tokens_per_batch=16, progress=False)
"""


def worker(out, slow=0.0):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(out), str(slow)], stdout=subprocess.PIPE)


def wait_for_shards(out, count):
    for _ in range(6000):
        if len(contents(out)) >= count:
            return
        time.sleep(0.05)
    pytest.fail("no shard was written")


@pytest.mark.whole
def test_killed_and_resumed_and_two_at_once(tmp_path):
    """`kill -9` at several moments, then two processes together: the same bytes as of an uninterrupted run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    calm, process = worker(whole), worker(broken, slow=0.1)
    wait_for_shards(broken, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert calm.wait(timeout=300) == 0
    done = contents(broken)
    assert 2 <= len(done) < len(contents(whole))
    written = {name: (broken / name).stat().st_mtime_ns for name in done}
    both = [worker(broken, slow=0.05), worker(broken, slow=0.05)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert contents(broken) == contents(whole)
    assert all((broken / name).stat().st_mtime_ns == when for name, when in written.items())  # not written again
    assert not list(broken.glob(".*.tmp*"))


HELD_OUT = """
import sys
import torch
torch.set_num_threads(1)
import tensorlens_tl as tlens
from tensorlens_tl.datasets import folder
folder.BATCHES_PER_SHARD = 1
model = tlens.load_demo_model()
rows = [row[: 8 + number % 17].tolist() for number, row in enumerate(tlens.demo.held_out_prompts(model, 800, 24))]
tlens.attribute_dataset(model, rows, sys.argv[1], target=5, tokens_per_batch=512, progress=False)
"""


@pytest.mark.whole
def test_killed_at_three_random_moments(tmp_path):
    """800 rows of held-out text, `kill -9` three times, then resumed: the bytes of an uninterrupted run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start = lambda out: subprocess.Popen([sys.executable, "-c", HELD_OUT, str(out)])  # noqa: E731
    assert start(whole).wait(timeout=600) == 0
    shards = len(contents(whole))
    written: dict[str, int] = {}
    moments = random.Random()
    for third in range(3):
        process = start(broken)
        wait_for_shards(
            broken, moments.randint(max(len(contents(broken)) + 1, third * shards // 4), (third + 1) * shards // 4)
        )
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        for name in contents(broken):
            written.setdefault(name, (broken / name).stat().st_mtime_ns)
    assert len(written) < shards
    assert start(broken).wait(timeout=600) == 0
    assert contents(broken) == contents(whole)
    assert all((broken / name).stat().st_mtime_ns == when for name, when in written.items())  # not written again


# ------------------------------------------------------------------ other engines


def load_tiny():
    return tlens.testing.tiny_model("bridge/gpt2")


def test_a_function_for_datasets_map(gpt2, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [*({"id": row["id"], "text": row["text"]} for row in ROWS), {"id": "bad", "text": [99]}]
    results = run(gpt2, tmp_path / "run", rows[:-1], query="all")
    attributor = tlens.BatchAttributor(lambda: gpt2, target=5, query="all")
    made = datasets.Dataset.from_list(rows).map(
        attributor,
        batched=True,
        batch_size=3,
        remove_columns=["text"],
        new_fingerprint="tiny",
        load_from_cache_file=False,
    )
    for row in made:
        if row["id"] == "bad":
            assert "0 to 47" in row["error"]
        else:
            assert close(torch.tensor(row["scores"], dtype=torch.float64), results[row["id"]].scores.flatten())
    with pytest.raises(tlens.InvalidInputError, match="no column 'id'"):
        attributor({"text": [[3]]})


@pytest.mark.parametrize(
    ("load_model", "options", "message"),
    [
        ("gpt2", {}, "pass a function"),
        (load_tiny, {"quer": 3}, "Did you mean 'query'"),
        (load_tiny, {"columns": {"layers": "x"}}, "'layers' is not one of"),
        (load_tiny, {"keep": "some"}, "keep='some'"),
    ],
    ids=["no function", "option", "column", "keep"],
)
def test_what_such_a_function_refuses(load_model, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.BatchAttributor(load_model, **options)


def test_without_ray(gpt2, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(tlens.InvalidInputError, match=r"pip install -e '.\[ray\]'"):
        run(gpt2, tmp_path / "run", engine="ray")
    with pytest.raises(tlens.InvalidInputError, match="engine='spark'"):
        run(gpt2, tmp_path / "other", engine="spark")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    here = Path(__file__).parent
    path = {"PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}  # actors import this file
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": path})
    yield ray
    ray.shutdown()


class DiesOnce:
    """The model's loader, which makes its actor die at one shard, the first time."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self):
        from tensorlens_tl.datasets import running

        work = running.run_rows

        def deadly(*args, **options):
            if not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **options)

        running.run_rows = deadly
        return tlens.testing.tiny_model("bridge/gpt2")


@pytest.mark.whole
def test_ray_gives_the_same_also_where_an_actor_dies(gpt2, tmp_path, many_shards, cluster):
    run(gpt2, tmp_path / "here", query="all")
    results = run(
        gpt2, tmp_path / "ray", query="all", engine="ray", num_actors=2, load_model=DiesOnce(tmp_path / "died")
    )
    assert (tmp_path / "died").exists()
    assert results.complete
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")


@pytest.mark.whole
def test_a_batch_attributor_in_ray_data(gpt2, tmp_path, cluster):
    import ray.data

    rows = [{"id": row["id"], "text": row["text"]} for row in ROWS]
    results = run(gpt2, tmp_path / "run")
    made = ray.data.from_items(rows).map_batches(
        tlens.BatchAttributor, fn_constructor_args=(load_tiny,), fn_constructor_kwargs={"target": 5}, batch_size=2,
        compute=ray.data.ActorPoolStrategy(size=1),
    ).take_all()  # fmt: skip
    assert len(made) == len(ROWS)
    for row in made:
        assert close(torch.tensor(row["scores"], dtype=torch.float64), results[row["id"]].scores.flatten())


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("name,prompt,answer\nx,Return the value of the, file\ny,,the\n")
    words = ["dataset", str(tmp_path / "a.csv"), "-o", str(tmp_path / "run"), "--text", "prompt", "--id", "name"]
    words += ["--target-column", "answer", "--query", "-1", "--option", "rule=frozen-tangent", "--keep", "top:3"]
    with pytest.warns(UserWarning, match="1 of 2 rows failed"):
        assert main(words) == 0
    assert "2 rows in" in capsys.readouterr().out
    made = tlens.load_results(tmp_path / "run")["x"]
    assert made.options["rule"] == "frozen-tangent"
    assert made.target == "logit of ' file'"
    summary = ["--summary", str(tmp_path / "heads.csv")]
    shared = ["dataset", str(tmp_path / "a.csv"), "-o", str(tmp_path / "heads"), "--text", "prompt", "--id", "name"]
    with pytest.warns(UserWarning, match="1 of 2 rows failed"):
        assert main([*shared, "--target", " file", "--method", "logit_attribution", *summary]) == 0
    assert pd.read_csv(tmp_path / "heads.csv")["count"].eq(1).all()
    assert main([*words, *summary]) == 1
    assert "--summary: it is of --method logit_attribution or total_effects" in capsys.readouterr().err
    assert main([*words, "--option", "activation"]) == 1
    assert "write NAME=VALUE" in capsys.readouterr().err
