"""Long tables of results: lines that sum, names that are the same everywhere; differences and means of terms."""

import csv
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import close, some_tokens
from test_results import RESULTS, result

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate, results
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.testing import tiny_model

ROOT = Path(__file__).parents[1]
NAME = "bridge/gpt2"
TEXTS = ["Return the value of the", "Raise an error if", "Set the name"]


@pytest.fixture(scope="module")
def model():
    return tiny_model(NAME)


@pytest.fixture(scope="module")
def demo():
    return tlens.load_demo_model(dtype=torch.float64)


def assert_sums(frame, by=("batch", "query")):
    """Tokens and biases of each query sum to its total."""
    table = frame.pivot_table(index=list(by), columns="kind", values="score", aggfunc="sum")
    parts = table.drop(columns="total").sum(1)
    assert (parts - table["total"]).abs().max() < 1e-9
    assert len(table)


# ------------------------------------------------------------------ the long table of an attribution


def test_lines_sum_to_the_total(demo, tmp_path):
    why = tlens.attribute(demo, TEXTS, [" file", " the", " of"], query=[-2, -1])
    frame = why.to_dataframe()
    assert_sums(frame)
    lengths = [int(row.sum()) for row in why.mask]
    assert len(frame) == sum(2 * (length + 2) for length in lengths)
    assert frame.groupby("batch")["target"].unique().str[0].to_dict() == {
        0: "logit of ' file'", 1: "logit of ' the'", 2: "logit of ' of'",
    }  # fmt: skip
    assert not frame["generated"].any()
    assert frame.loc[frame["kind"] != "token", "key"].isna().all()
    why.save(tmp_path / "why.csv")
    assert_sums(pd.read_csv(tmp_path / "why.csv"))
    why.save(tmp_path / "why.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "why.parquet"), frame)


def test_an_axis_of_heads_and_a_method_without_a_sum(demo):
    frozen = tlens.freeze(demo, TEXTS[0])
    heads = tlens.attribute(frozen, method="attention", head_reduction=None)
    frame = heads.to_dataframe()
    assert set(frame["kind"]) == {"token"}
    assert frame["score"].sum() == pytest.approx(float(heads.scores.sum()))


def test_generated_tokens_are_named(demo):
    prompts = ["If the file is not found, a", "Raise"]
    each = tlens.attribute_generation(demo, prompts, max_new_tokens=4, minus="runner-up")
    frame = each.to_dataframe()
    assert_sums(frame)
    for batch, (first, stop) in enumerate(each.options["generated"]):
        lines = frame[frame["batch"] == batch]
        written = each.tokens[batch][first:stop]
        assert [label.split(" of ")[-1] for label in lines["target"].unique()] == [repr(token) for token in written]
        assert set(lines.loc[lines["generated"], "key"]) == set(range(first, stop))
        assert list(lines["query_token"].unique()) == list(dict.fromkeys(written))
    whole = tlens.attribute_generation(demo, prompts, max_new_tokens=4, span="all").to_dataframe()
    for batch, (first, stop) in enumerate(each.options["generated"]):
        named = whole.loc[whole["batch"] == batch, "query_token"].unique()
        assert list(named) == ["".join(each.tokens[batch][first:stop])]


def test_next_tokens_and_means_of_queries_are_named(demo):
    frozen = tlens.freeze(demo, TEXTS[0])
    following = tlens.attribute(frozen, tlens.NEXT, query=slice(0, 3)).to_dataframe()
    assert list(following["target"].unique()) == [f"logit of {token!r}" for token in frozen.str_tokens[0][1:4]]
    mean = tlens.attribute(frozen, " file", query="mean").to_dataframe()
    assert set(mean["query_token"]) == {results.MEAN_QUERY}
    assert_sums(mean)


@pytest.mark.parametrize("name", sorted({*RESULTS} - {"Reproduction"}))  # the published numbers beside ours
def test_columns_have_the_same_names_everywhere(name):
    kind = result(name)
    besides = {getattr(kind, "axis_name", "")}
    assert set(kind.to_dataframe().columns) - besides <= set(results.COLUMNS)


def test_tables_of_several_methods_and_targets_are_told_apart(demo):
    frozen = tlens.freeze(demo, TEXTS[0])
    methods = ["tensorlens", "decompx", "rollout"]
    explained = [tlens.attribute(frozen, method=name) for name in ("rollout", "alti")]
    explained += [tlens.attribute(frozen, " file", method=name) for name in ("tensorlens", "decompx")]
    frame = pd.concat([result.to_dataframe() for result in explained])
    assert set(frame["method"]) == {*methods, "alti"}
    sums = frame[frame["kind"] == "token"].groupby("method")["score"].sum()
    for each in explained:
        assert sums[each.method] == pytest.approx(float(each.scores.double().sum()))
    terms = [circuits.logit_attribution(frozen, target) for target in (" file", " value")]
    both = pd.concat([each.to_dataframe() for each in terms]).groupby("target")["score"].sum()
    assert both.to_dict() == pytest.approx({each.target: float(each.scores.sum()) for each in terms})
    other = tlens.freeze(demo, TEXTS[0].replace("value", "name"))
    edges = circuits.edge_scores(frozen, other, " file", method="frozen").to_dataframe()
    assert set(edges["method"]) == {"frozen"}


def test_a_column_that_is_nearly_one_is_named(demo, tmp_path):
    run = tlens.attribute_dataset(demo, TEXTS, tmp_path / "run", target=" the", progress=False)
    for long in (False, True):
        with pytest.raises(InvalidInputError, match=r"columns='scor'; use one of .* Did you mean 'score"):
            run.to_dataframe(["id", "scor"], long=long)
    with pytest.raises(
        InvalidInputError, match=r"there is no column 'text', only 'txt'\. Name the column .* text='txt'"
    ):
        tlens.attribute_dataset(demo, [{"txt": "a"}], tmp_path / "none", target=" the")
    with pytest.raises(InvalidInputError, match=r"'targt' is not one of .* Did you mean 'target'"):
        tlens.attribute_dataset(demo, TEXTS, tmp_path / "none", columns={"targt": "answer"})
    tested = result("Evaluation")
    with pytest.raises(InvalidInputError, match=r"metric='hs_mes': .* Did you mean 'hs_mse'"):
        tested.table("hs_mes")
    with pytest.raises(InvalidInputError, match=r"method='rolout': .* Did you mean 'rollout'"):
        tested.mean("hs_mse", "rolout")
    with pytest.raises(InvalidInputError, match=r"by_relation: metric='aop'; .* Did you mean 'aopc'"):
        evaluate.by_relation(tested, "aop")


def test_the_site_lists_the_columns():
    with (ROOT / "docs/_static/columns.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    assert rows == [[f"`{name}`", meaning] for name, meaning in results.COLUMNS.items()]


# ------------------------------------------------------------------ data sets


@pytest.mark.parametrize(
    ("keep", "kinds"), [("scores", {"token", "bias", "total"}), ("top:2", {"token", "bias", "total", "rest"})]
)
def test_long_tables_of_a_data_set(keep, kinds, demo, tmp_path):
    rows = [{"id": f"r{number}", "text": text, "answer": " the"} for number, text in enumerate([*TEXTS, "", *TEXTS])]
    run = tlens.attribute_dataset(
        demo, rows, tmp_path / keep[:3], columns={"target": "answer"}, keep=keep, query=[-2, -1],
        tokens_per_batch=16, progress=False,
    )  # fmt: skip
    frame = run.to_dataframe(long=True)
    assert list(frame.columns)[:2] == ["id", "row"]
    assert set(frame["kind"]) == kinds
    assert_sums(frame, ("id", "query"))
    assert "r3" not in set(frame["id"])
    assert frame["row"].is_monotonic_increasing
    shards = list(run.frames())
    assert len(shards) == len(run.shards) - 1  # one holds nothing but the row that failed
    assert sum(map(len, shards)) == len(frame)
    one = frame[frame["id"] == "r0"]
    stored = {"scores": len(run["r0"].tokens[0]), "top:2": 2}[keep]
    assert len(one) == 2 * (stored + len(kinds) - 1)
    assert list(run.to_dataframe(["id", "score"], long=True).columns) == ["id", "score"]


def test_terms_and_evaluations_of_a_data_set(demo, tmp_path):
    run = tlens.attribute_dataset(
        demo, TEXTS, tmp_path / "terms", method="logit_attribution", by="head", target=" the", progress=False
    )
    frame = run.to_dataframe(long=True)
    assert set(frame["id"]) == {"0", "1", "2"}
    assert frame.groupby("id")["score"].sum()["1"] == pytest.approx(float(run["1"].scores.sum()))
    tested = evaluate.perturbation_dataset(
        demo, TEXTS, tmp_path / "tested", ["random"], fractions=(0, 0.5), progress=False
    )
    assert set(tested.to_dataframe(long=True)["unit"]) == {"0", "1", "2"}


# ------------------------------------------------------------------ differences and means


def test_terms_subtract(model):
    frozen, other = (tlens.freeze(model, some_tokens(seed=seed)) for seed in (1, 2))
    first, second = (circuits.logit_attribution(run, 5, by="head", query="all") for run in (frozen, other))
    change = first - second
    assert change.additive
    assert close(change["L1H2"], first["L1H2"] - second["L1H2"])
    assert close(change.scores.sum(-1) + change.remainder, first.total - second.total)
    assert "−" in change.target
    fewer = circuits.logit_attribution(other, 5, by="component", query="all")
    mixed = first - fewer
    assert close(mixed.scores.sum(-1) + mixed.remainder, first.total - fewer.total)
    assert close(mixed["L1H2"], first["L1H2"])
    with pytest.raises(InvalidInputError, match="queries"):
        first - circuits.logit_attribution(frozen, 5, by="head")
    with pytest.raises(TypeError):
        first - 1


def test_the_mean_of_terms_has_intervals(model, tmp_path):
    terms = circuits.logit_attribution(tlens.freeze(model, some_tokens(batch=8)), 5, by="head", query=[-2, -1])
    mean = terms.mean()
    scores = terms.scores[:, 0].double()
    assert close(mean.scores[0, 0], scores.mean(0))
    low, high = evaluate.bootstrap_interval(scores.T)
    assert torch.equal(mean.low[0, 0], low)
    assert torch.equal(mean.high[0, 0], high)
    assert bool((low <= mean.scores[0, 0] + 1e-12).all())  # equal of a constant
    assert float(mean.gap.max()) < 1e-9
    assert mean.target.endswith("mean of 8 prompts")
    frame = mean.to_dataframe()
    assert list(frame.columns) == ["batch", "query", "query_token", "term", "target", "n", "low", "high", "score"]
    again = tlens.Terms.load(mean.save(tmp_path / "mean"))
    assert torch.equal(again.high, mean.high)
    wide = terms.mean(level=0.99)
    assert bool((wide.high - wide.low >= mean.high - mean.low).all())
    assert not (terms - terms).mean().total.any()
    uneven = circuits.logit_attribution(tlens.freeze(model, [[3, 4, 5], [6, 7]]), 5, query="all").mean()
    assert float(uneven.gap.max()) < 1e-9
    assert uneven.low[0, 2].isnan().all()  # one prompt has a third token
    assert uneven.target.endswith("mean of 1 to 2 prompts")
    assert uneven.tokens == [["mean of 2 prompts", "mean of 2 prompts", "mean of 1 prompt"]]
    lines = uneven.to_dataframe()
    assert lines.groupby("query")["n"].unique().str[0].tolist() == [2, 2, 1]
    assert {*lines.loc[lines["n"] == 1, "query_token"]} == {"mean of 1 prompt"}
    assert torch.equal(tlens.Terms.load(uneven.save(tmp_path / "uneven")).counts, uneven.counts)
    assert "mean of 8 prompts" in mean.to_html()
    with pytest.raises(InvalidInputError, match="level"):
        terms.mean(level=95)


def test_a_difference_of_two_models_says_of_which(model):
    other, tokens = tiny_model("bridge/gpt2", seed=1), some_tokens()
    first, second = (tlens.attribute(of, tokens, 5) for of in (model, other))
    first.provenance["model"] = "one"
    second.provenance["model"] = "two"
    change = first - second
    assert (change.provenance["model"], change.provenance["second model"]) == ("one", "two")
    assert "second dtype" not in change.provenance
    assert change.additive
    assert float(change.gap.max()) < 1e-9
    assert close(change.scores.sum(-1) + change.bias, first.total - second.total)
    assert change.target == f"change of the {first.target}"
    moved = second.__class__(**{**vars(second), "bias": second.bias + 1})
    assert float((first - moved).gap.max()) > 1e-3


def test_terms_of_several_prompts_show_their_mean(demo, capsys):
    """As edges and figures do; one prompt is asked for by its number."""
    frozen = tlens.freeze(demo, ["Return the value. Return the", "If the file is not", "Raise an error if"])
    for query in (-1, "all"):
        terms = circuits.logit_attribution(frozen, " value", query=query)
        rows = [terms.query_row(-1, prompt) for prompt in range(3)]
        total = sum(float(terms.total[prompt, row]) for prompt, row in enumerate(rows)) / 3
        terms.show()
        printed = capsys.readouterr().out
        assert f"{total:+.4g}" in printed
        assert f"{total:+.4g}" in terms.to_html()
        terms.show(batch=1)
        assert f"{float(terms.total[1, rows[1]]):+.4g}" in capsys.readouterr().out


def test_results_with_runners_up_of_their_own_are_not_subtracted(demo):
    runs = [tlens.freeze(demo, text) for text in ("Return the value of the",) * 2]
    for ask in (tlens.attribute, circuits.logit_attribution):
        value, name = (ask(run, " value", minus="runner-up") for run in runs)
        with pytest.raises(InvalidInputError, match=r"another runner-up.*Name the token"):
            value - name


def test_routes_average_and_subtract(demo, capsys):
    first = tlens.freeze(demo, ["Return the value of the", "Return the name of the"])
    second = tlens.freeze(demo, ["Return the index of the", "Return the list of the"])
    routes = circuits.routes(tlens.difference(first, second), " value")
    mean = routes.mean()
    assert close(mean.scores[0], routes.scores.mean(0), 1e-12)
    assert close(mean.scores.sum(-1), mean.total[..., None].expand_as(mean.scores[..., 0]), 1e-9)
    routes.show()
    printed = capsys.readouterr().out
    assert "mean of 2 prompts" in printed
    assert f"{float(routes.total.mean()):+.4g}" in printed
    assert "mean of 2 prompts" in routes.plot().get_title(loc="left").replace("\n", " ")
    other = circuits.routes(tlens.difference(first, second), " name")
    both = circuits.routes(tlens.difference(first, second), " value", " name")
    assert close((routes - other).scores, both.scores, 1e-9)
    with pytest.raises(InvalidInputError, match="routes of other prompts"):
        routes - mean


def test_labels_stay_in_means_and_differences(demo):
    frozen = tlens.freeze(demo, ["Return the value of the", "Set the name of the"])
    terms = replace(circuits.logit_attribution(frozen, " value"), labels={"MLP0": "first"})
    assert terms.mean().labels == (terms - terms).labels == {"MLP0": "first"}


def test_a_runner_up_is_named_in_a_table(model):
    frozen = tlens.freeze(model, some_tokens())
    logits = model(frozen.tokens)[:, -1]
    result = tlens.attribute(frozen, [5, 7], minus="runner-up")
    seconds = [
        int(row.scatter(0, torch.tensor([first]), -torch.inf).argmax())
        for row, first in zip(logits, [5, 7], strict=True)
    ]
    assert targets_of(result) == [
        f"logit of '{first}' − '{second}'" for first, second in zip([5, 7], seconds, strict=True)
    ]


def test_a_mean_over_the_queries_of_two_stacks_is_refused_by_name():
    bart = tiny_model("bridge/bart")
    frozen = tlens.freeze(bart, some_tokens(), decoder_input_ids=some_tokens()[:, :3])
    with pytest.raises(tlens.UnsupportedModelError, match="query='mean'"):
        tlens.attribute(frozen, 5, query="mean")


# ------------------------------------------------------------------ targets of each prompt and query, in words


def targets_of(result):
    """What the table says is explained, in its order."""
    return result.to_dataframe()["target"].drop_duplicates().to_list()


@pytest.mark.parametrize("memory", [None, "150KB"])
def test_each_prompt_and_query_names_its_own_target(demo, memory):
    texts = ["Return the value of the", "Raise an exception if the"]
    words = [[" first", " file"], [" a", "first-choice"]]
    said = tlens.attribute(demo, texts, words, minus=["runner-up", 5], query=[-2, -1], memory=memory)
    likeliest = [demo.tokenizer.decode(row.argmax()) for row in demo(texts[0])[0, -2:]]  # none of these is the target
    assert targets_of(said) == [
        f"logit of ' first' − {likeliest[0]!r}",
        f"logit of ' file' − {likeliest[1]!r}",
        "logit of ' a' − '%'",
        "logit of ' exception' − '%'",
    ]
    assert "'logit of each answer − other'" in repr(said)
    assert "[[" not in said.to_html()
    one = tlens.attribute(demo, texts, [" first", " file"], memory=memory)
    assert targets_of(one) == ["logit of ' first'", "logit of ' file'"]
    assert one.describe(batch=1).startswith("tensorlens: logit of ' file'")
    assert "logit of &#x27; file&#x27;" in one.to_html()
    alone = tlens.attribute(demo, texts[0], [" first", " file"], query=[-2, -1], memory=memory)
    assert targets_of(alone) == ["logit of ' first'", "logit of ' file'"]


@pytest.mark.parametrize("memory", [None, "150KB"])
def test_words_for_ranks_are_tokens_in_a_table(demo, memory, tmp_path):
    texts = ["Return the value of the", "Raise an exception if"]
    first, second = ([demo.tokenizer.decode(row[-1].topk(2).indices[rank]) for row in map(demo, texts) for row in row]
                     for rank in (0, 1))  # fmt: skip
    assert len({*first, *second}) > 2
    said = tlens.attribute(demo, texts, "first-choice", memory=memory)
    assert targets_of(said) == [f"logit of {token!r}" for token in first]
    assert "'logit of the first choice'" in repr(said)
    named = [f"logit of {one!r} − {other!r}" for one, other in zip(first, second, strict=True)]
    ranks = {"target": "first-choice", "minus": "runner-up"}
    assert targets_of(tlens.attribute(demo, texts, **ranks, memory=memory)) == named
    assert targets_of(tlens.Attribution.load(said.save(tmp_path / "said"))) == targets_of(said)
    live = tlens.attribute(demo, texts, "first-choice", method="leave-one-out", of="probability")
    assert targets_of(live) == [f"probability of {token!r}" for token in first]
    change = tlens.attribute(tlens.difference(*map(tlens.freeze, (demo, demo), texts[:1] * 2)), **ranks)
    assert targets_of(change) == [f"change of the {named[0]}"]
    run = tlens.attribute_dataset(demo, texts, tmp_path / "run", **ranks, progress=False)
    assert run.to_dataframe(["target"])["target"].to_list() == named
    assert run.to_dataframe(long=True)["target"].drop_duplicates().to_list() == named


def test_lists_of_tokens_are_named_in_tables_of_parts(demo):
    texts = ["Return the value of the", "Return the name of the"]
    clean, corrupted = tlens.freeze(demo, texts), tlens.freeze(demo, texts[::-1])
    words = {"target": [" first", " file"], "minus": [5, 7]}
    named = ["logit of ' first' − 5", "logit of ' file' − 7"]
    assert targets_of(circuits.logit_attribution(clean, **words)) == named
    assert targets_of(circuits.total_effects(clean, **words)) == named
    assert targets_of(circuits.edge_scores(clean, corrupted, **words)) == named
    queries = circuits.logit_attribution(tlens.freeze(demo, texts[0]), [" first", " file"], query=[-2, -1])
    assert targets_of(queries) == ["logit of ' first'", "logit of ' file'"]


def test_the_mean_over_queries_has_no_token_of_one(demo):
    mean = tlens.attribute(demo, TEXTS[0], "first-choice", query="mean")
    assert targets_of(mean) == ["mean over the queries of the logit of the first choice"]
    words = tlens.attribute(demo, TEXTS[0], "first-choice", query="all").merge_words()
    assert targets_of(words) == ["logit of the first choice"]


def test_a_list_of_one_token_is_that_token(demo):
    single, listed = (tlens.attribute(demo, TEXTS[0], target, query=[-3, -2]) for target in (5, [5]))
    assert listed.target == single.target == "logit of '%'"
    assert targets_of(listed) == ["logit of '%'"]
    terms = circuits.logit_attribution(tlens.freeze(demo, TEXTS[0]), [5], [6])
    assert terms.target == "logit of '%' − '&'"


def test_next_tokens_less_a_list_are_named(demo):
    queries = {"query": [-4, -3, -2], "minus": [1, 2, 11]}
    said = tlens.attribute(demo, TEXTS[0], tlens.NEXT, **queries)
    tokens = said.tokens[0][-3:]
    assert targets_of(said) == [f"logit of {token!r} − {other!r}" for token, other in zip(tokens, '!"+', strict=True)]
    assert "NEXT" not in said.to_html()
    assert "NEXT" not in said.describe(0, 1)
    assert said.describe(0, 1).startswith(f"tensorlens: logit of {tokens[1]!r} − ")


@pytest.mark.parametrize("memory", [None, "150KB"])
@pytest.mark.parametrize("method", ["tensorlens", "relp"])
def test_each_prompt_names_its_own_span(demo, memory, method, capsys):
    texts = ["Return the value of the", "Raise an exception if the"]
    options = {"max_new_tokens": 3, "span": (0, 2), "memory": memory, "method": method}
    said = tlens.attribute_generation(demo, texts, **options, minus=[5, 7])
    first, second = (["".join(tokens[place] for place in places) for tokens, places in
                      zip(said.tokens, said.options["asked"], strict=True)])  # fmt: skip
    assert targets_of(said) == [
        f"sum of the logit differences to 5 of 2 generated tokens {first!r}",
        f"sum of the logit differences to 7 of 2 generated tokens {second!r}",
    ]
    assert said.target == "sum of the logit differences to each minus token of each prompt's span"
    said.show(2, batch=1)
    assert "differences to 7" in " ".join(capsys.readouterr().out.split())


def test_lists_of_tokens_in_titles(demo):
    frozen = tlens.freeze(demo, ["Return the value of the", "Raise an exception if the"])
    terms = circuits.logit_attribution(frozen, [" first", " file"])
    assert "'logit of each answer'" in repr(terms)


def test_words_name_the_token_that_was_explained(demo_model):
    """The next token of a query, where its word is longer than the token."""
    prompts = ["def f(x):", "for x in range"]
    result = tlens.attribute(demo_model, prompts, target=tlens.NEXT, query=1)
    expected = [f"logit of {row[2]!r}" for row in result.tokens]
    words = result.merge_words()
    assert words.tokens[0] != result.tokens[0]
    assert list(dict.fromkeys(words.to_dataframe()["target"])) == expected
