"""The explorer: its numbers are the library's, its code gives them again, and its server answers to its page alone."""

import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode
from urllib.request import urlopen
from xml.etree import ElementTree

import pandas
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits import effects
from tensorlens_tl.explorer import Explorer, Session
from tensorlens_tl.explorer.questions import LONGEST_TEXT

server = pytest.importorskip("tensorlens_tl.explorer.server", exc_type=ImportError)

PROMPT = tlens.demo.PROMPT
OTHER = PROMPT.replace("module is not", "class is not")
HEAD = {"layer": 1, "head": 0}


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.fixture(scope="module")
def dictionary():
    return tlens.load_demo_dictionary()


@pytest.fixture(scope="module")
def session(model):
    return Session(model, name="demo")


@pytest.fixture(scope="module")
def with_features(model, dictionary):
    return Session(model, name="demo", dictionaries=dictionary, labels={357: "forms of to be"})


# ------------------------------------------------------------------ numbers


def test_the_prompt_says_what_the_model_says(model, session):
    view = session.view("prompt", {"text": PROMPT})
    frozen = tlens.freeze(model, PROMPT)
    assert view["tokens"] == frozen.str_tokens[0]
    chances = frozen.logits()[0, 0].double().softmax(-1)
    best = chances.argsort(descending=True)[:10].tolist()
    assert [token["id"] for token in view["next"]] == best
    assert [token["chance"] for token in view["next"]] == pytest.approx(chances[best].tolist(), rel=1e-5)
    assert (view["target"]["id"], view["minus"]["id"]) == (best[0], best[1])


@pytest.mark.parametrize("fields", [{"query": 9}, {"other": OTHER}], ids=str)
def test_what_comes_next_takes_one_run_for_each_prompt(model, monkeypatch, fields):
    session = Session(model)
    expected = session.view("prompt", {"text": PROMPT, **fields})
    runs = []
    handle = model.embed.register_forward_hook(lambda *_: runs.append(1))
    monkeypatch.setattr("tensorlens_tl.explorer.questions.freeze", None)
    try:
        view = Session(model).view("prompt", {"text": PROMPT, **fields})
    finally:
        handle.remove()
    assert len(runs) == 1 + ("other" in fields)
    assert [token["id"] for token in view["next"]] == [token["id"] for token in expected["next"]]
    assert view["numbers"] == pytest.approx(expected["numbers"], abs=1e-4)


UNEQUAL = {"text": "Return the name of the module", "other": "Return the value of the first item of the module"}


def test_prompts_of_different_lengths_are_predicted_and_stand_opposite(model, session):
    view = session.view("prompt", UNEQUAL)
    alone = [session.view("prompt", {"text": text}) for text in UNEQUAL.values()]
    for end, of in zip(("first", "second"), alone, strict=True):
        assert [token for part in view["aligned"] for token in part[end]] == of["tokens"]
    assert all(part["first"] == part["second"] for part in view["aligned"] if part["same"])
    assert any(not part["same"] for part in view["aligned"])
    chances = [{token["id"]: token["chance"] for token in of["next"]} for of in alone]
    for token in view["next"]:
        for name, of in zip(("chance", "other_chance"), chances, strict=True):
            assert token[name] == pytest.approx(of.get(token["id"], token[name]), rel=1e-5)
    assert view["target"]["id"] == alone[0]["target"]["id"]
    names = {"model": model}
    exec(view["code"], names)
    assert [int(logits[0, 0].argmax()) for logits in names["result"]] == [of["target"]["id"] for of in alone]


@pytest.mark.parametrize("turned", [False, True])
def test_mends_make_two_prompts_equally_long(model, session, turned):
    fields = dict(zip(UNEQUAL, reversed(UNEQUAL.values()), strict=True)) if turned else UNEQUAL
    rows = session.view("mends", fields)["mends"]
    assert {row["kind"] for row in rows} == {"leave out", "put in"}
    for row in rows:
        name = ("text", "other")[row["which"]]
        changed = fields | {name: row["text"]}
        before, after = (tlens.freeze(model, of[name]).logits()[0, 0].double().softmax(-1) for of in (fields, changed))
        choice = int(before.argmax())
        assert model.tokenizer.decode([choice]) == row["choice"]
        assert row["before"] == pytest.approx(float(before[choice]), rel=1e-4)
        assert row["after"] == pytest.approx(float(after[choice]), rel=1e-4)
        assert row["stays"] == (int(after.argmax()) == choice)
        assert "aligned" not in session.view("prompt", changed)  # both have as many tokens
        assert session.view("tokens", changed)["additive"]
    with pytest.raises(tlens.InvalidInputError, match="nothing to mend"):
        session.view("mends", {"text": PROMPT, "other": OTHER})


@pytest.mark.parametrize("method", ["tensorlens", "rollout", "leave-one-out"])
def test_token_scores_are_those_of_the_method(model, session, method):
    view = session.view("tokens", {"text": PROMPT, "method": method, "query": 10})
    frozen = tlens.freeze(model, PROMPT)
    options = {"method": method, "query": 10}
    if tlens.get_method(method).explains_prediction():
        best, second = frozen.logits(10)[0, 0].argsort(descending=True)[:2].tolist()
        options |= {"target": best, "minus": second}
    expected = tlens.attribute(frozen, **options)
    assert view["scores"] == pytest.approx(expected.scores[0, 0].tolist(), rel=1e-5, abs=1e-6)
    assert view["additive"] == expected.additive


def test_components_sum_to_the_total(session):
    for fields in ({"text": PROMPT}, {"text": PROMPT, "other": OTHER}):
        view = session.view("components", fields)
        parts = [*(score for row in view["heads"] for score in row), *view["mlps"]]
        total = sum(parts) + sum(term["score"] for term in view["rest"])
        assert total == pytest.approx(view["total"], abs=1e-4)


def test_a_difference_is_that_of_the_two_live_runs(model, session):
    view = session.view("tokens", {"text": PROMPT, "other": OTHER})
    prompt = session.view("prompt", {"text": PROMPT, "other": OTHER})
    logits = [tlens.freeze(model, text).logits()[0, 0] for text in (PROMPT, OTHER)]
    change = logits[0] - logits[1]
    expected = float(change[prompt["target"]["id"]] - change[prompt["minus"]["id"]])
    assert sum(view["scores"]) + view["bias"] == pytest.approx(expected, abs=1e-4)
    assert [at for at, changed in enumerate(prompt["changed"]) if changed] == [3]
    assert prompt["numbers"][0] - prompt["numbers"][1] == pytest.approx(expected, abs=1e-4)
    routes = session.view("routes", {"text": PROMPT, "other": OTHER})
    assert [sum(row) for row in routes["scores"]] == pytest.approx([expected] * len(routes["layers"]), abs=1e-3)


def test_a_head_shows_its_pattern(model, session):
    view = session.view("head", {"text": PROMPT, **HEAD})
    frozen = tlens.freeze(model, PROMPT)
    assert view["pattern"] == pytest.approx(frozen.pattern(1)[0, 0, -1].tolist(), rel=1e-5)
    assert view["key"] == int(frozen.pattern(1)[0, 0, -1].argmax())
    assert sum(view["moved"]) == pytest.approx(view["score"], abs=1e-5)
    full = circuits.full_ov(frozen, 1, 0)
    row = (full.A @ full.B)[frozen.tokens[0, view["key"]]]
    explained = [session.view("prompt", {"text": PROMPT})[name]["id"] for name in ("target", "minus")]
    promoted = {one["id"]: one["score"] for one in view["promotes"]}
    assert [*promoted][:2] == explained
    assert [*promoted][2] == next(token for token in row.argsort(descending=True).tolist() if token not in explained)
    assert [*promoted.values()] == pytest.approx([float(row[token]) for token in promoted], rel=1e-5)


WHY = {"layer": 2, "head": 1, "key": 4}


def scores_of(rows):
    return {row["name"]: row["score"] for row in rows}


def test_why_a_head_attends_begins_with_sums_by_token_and_by_layer(model, session):
    view = session.view("why", {"text": PROMPT, **WHY})
    frozen = tlens.freeze(model, PROMPT)
    tokens, parts = (circuits.qk_attribution(frozen, 2, 1, key=4, by=by) for by in ("token", "head"))
    of_query = tokens.pairs[0].sum(1) + tokens.query_sources[0]
    layer_0 = [at for at, name in enumerate(parts.names[0]) if name.startswith(("L0", "MLP0"))]
    of_key = parts.pairs[0].sum(0) + parts.key_sources[0]
    lists = {(one["by"], one["side"]): one for one in view["lists"]}
    assert scores_of(lists["token", "query"]["rows"])["34"] == pytest.approx(float(of_query[34]), abs=1e-5)
    assert scores_of(lists["layer", "key"]["rows"])["L0"] == pytest.approx(float(of_key[layer_0].sum()), abs=1e-5)
    for one in lists.values():
        rows = scores_of(one["rows"])
        assert sum(rows.values()) == pytest.approx(float(parts.total[0]), abs=1e-4)
        assert f"the {one['side']}'s bias" in rows
    assert view["total"] == float(parts.total[0])
    assert view["gap"] == float(max(tokens.gap[0], parts.gap[0]))


@pytest.mark.parametrize("other", [None, OTHER])
def test_all_others_are_no_more_than_what_they_stand_beside(session, other):
    fields = {"text": PROMPT, "other": other}
    counted = 0
    for layer, head in ((1, 0), (2, 1), (2, 3)):
        for one in session.view("why", {**fields, "layer": layer, "head": head})["lists"]:
            listed = [abs(row["score"]) for row in one["rows"] if row["part"]]
            others = [abs(row["score"]) for row in one["rows"] if row["name"].endswith((" others", " other"))]
            assert max(others, default=0) <= max(listed)
            counted += len(others)
    assert counted


def test_of_two_runs_the_token_that_gained_most_attention_is_explained(session):
    fields = {"text": PROMPT, "other": OTHER, "layer": 1, "head": 1}
    head = session.view("head", fields)
    change = [first - second for first, second in zip(head["pattern"], head["other_pattern"], strict=True)]
    assert max(change) < -min(change)  # it is not the one that changed most
    assert head["key"] == change.index(max(change))
    assert session.view("why", fields)["total"] == pytest.approx(max(change), abs=1e-6)


def test_why_attention_moved_sums_to_the_change(session):
    why = session.view("why", {"text": PROMPT, "other": OTHER, **HEAD})
    for by in ("token", "layer"):
        sides = sum(sum(scores_of(one["rows"]).values()) for one in why["lists"] if one["by"] == by)
        constants = sum(value for name, value in why["sums"].items() if name not in ("query", "key"))
        assert sides + constants == pytest.approx(why["total"], abs=1e-5)
    assert sum(why["sums"].values()) == pytest.approx(why["total"], abs=1e-5)
    layer = session.view("why", {"text": PROMPT, "other": OTHER, **HEAD, "part": "key L0"})
    row = next(scores_of(one["rows"])["L0"] for one in why["lists"] if (one["by"], one["side"]) == ("layer", "key"))
    assert sum(scores_of(layer["opened"]["rows"]).values()) == pytest.approx(row, abs=1e-6)


def test_a_row_opens_into_what_it_is_made_of(model, session):
    """A layer into its parts, a token and a part into pairs with the other side: each sums to its row."""
    pairs = circuits.qk_attribution(tlens.freeze(model, PROMPT), 2, 1, key=4, by="token")
    before = session.view("why", {"text": PROMPT, **WHY})["lists"]
    for by, side, name in (
        ("token", "query", "34"),
        ("token", "key", "4"),
        ("layer", "query", "L0"),
        ("layer", "key", "embed"),
    ):
        (row,) = (
            row
            for one in before
            if (one["by"], one["side"]) == (by, side)
            for row in one["rows"]
            if row["name"] == name
        )
        opened = session.view("why", {"text": PROMPT, **WHY, "part": row["part"]})["opened"]
        assert sum(scores_of(opened["rows"]).values()) == pytest.approx(row["score"], abs=1e-5)
        assert opened["total"] == pytest.approx(row["score"], abs=1e-5)
        if name == "34":
            assert scores_of(opened["rows"])["4"] == pytest.approx(float(pairs.pairs[0, 34, 4]), abs=1e-6)
        if name != "L0":
            continue
        for part in [row for row in opened["rows"] if row["part"]]:
            inside = session.view("why", {"text": PROMPT, **WHY, "part": part["part"]})["opened"]
            assert inside["pairs"]
            assert sum(scores_of(inside["rows"]).values()) == pytest.approx(part["score"], abs=1e-5)


def test_the_method_difference_names_its_baseline(model, session):
    view = session.view("tokens", {"text": PROMPT, "method": "difference"})
    prompt = session.view("prompt", {"text": PROMPT})
    baseline = tlens.methods.difference(tlens.freeze(model, PROMPT), baseline="mean", **target_of(prompt))
    assert view["baseline"] == "the mean embedding in every place"  # this tokenizer has no mask
    assert view["total"] == pytest.approx(float(baseline.total[0, 0]), abs=1e-4)
    assert "baseline" not in session.view("tokens", {"text": PROMPT, "other": OTHER})


def target_of(prompt):
    return {name: prompt[name]["id"] for name in ("target", "minus")}


@pytest.mark.parametrize("fields", [{"query": 7}, {"other": OTHER}], ids=str)
def test_the_code_of_what_comes_next_gives_its_logits(model, session, fields):
    view = session.view("prompt", {"text": PROMPT, **fields})
    names = {"model": model}
    exec(view["code"], names)
    logits = names["result"]
    if "other" in fields:
        logits = logits[0]
    assert int(logits[0, 0].argmax()) == view["next"][0]["id"]


def test_labels_are_text_of_bounded_length(model, dictionary):
    session = Session(model, dictionaries=dictionary, labels={357: "half \ud83d of one " + "x" * 9000})
    names = [row["label"] for row in session.view("features", {"text": PROMPT})["top"] if row["feature"] == 357]
    assert names
    for label in (*names, session.view("feature", {"text": PROMPT, "feature": 357})["label"]):
        assert label.startswith("half ? of one x")
        assert len(label) == 200
        json.dumps(label, ensure_ascii=False).encode()


def test_no_token_stands_against_itself(session):
    best, second = (token["id"] for token in session.view("prompt", {"text": PROMPT})["next"][:2])
    view = session.view("prompt", {"text": PROMPT, "minus": best})
    assert (view["target"]["id"], view["minus"]["id"]) == (second, best)


@pytest.mark.parametrize("fields", [{}, {"other": OTHER}], ids=str)
def test_a_typed_token_is_compared_with_as_its_number_is(model, session, fields):
    """It need not be one of the likeliest, which are listed."""
    token = model.to_single_token(" file")
    typed, numbered = (session.view("prompt", {"text": PROMPT, **fields, "minus": minus}) for minus in (" file", token))
    assert token not in [one["id"] for one in typed["next"]]
    assert typed == numbered
    assert (typed["minus"]["id"], typed["minus"]["text"]) == (token, " file")
    chances = model(model.to_tokens(PROMPT))[0, -1].detach().double().softmax(-1)
    assert typed["minus"]["chance"] == pytest.approx(float(chances[token]), rel=1e-4)


@pytest.mark.parametrize("by", ["zero", "mean", "other"])
@pytest.mark.parametrize("other", [None, OTHER])
def test_ablation_is_the_live_model_without_the_nodes(model, session, by, other):
    fields = {"text": PROMPT, "other": other, "without": "L1H0,MLP2,L1H3", "by": by}
    if by == "other" and other is None:
        with pytest.raises(tlens.InvalidInputError, match="type a second prompt"):
            session.view("ablate", fields)
        return
    view = session.view("ablate", fields)
    points = {"blocks.1.attn.hook_z": (0, 3), "blocks.2.mlp.hook_post": None}
    texts = [PROMPT] if other is None else [PROMPT, other]
    caches = [model.run_with_cache(text)[1] for text in texts]

    def changed(point, cache):
        def hook_function(value, hook):  # a bridge's hook has another name than the alias it is added under
            mean = cache[point][:, 1:].mean(1, keepdim=True).expand_as(value)
            instead = {"zero": 0 * value, "mean": mean, "other": caches[-1][point]}[by]
            if points[point] is None:
                return instead
            value = value.clone()
            for head in points[point]:
                value[:, :, head] = instead[:, :, head]
            return value

        return hook_function

    prompt = session.view("prompt", fields)
    ids = [prompt[name]["id"] for name in ("target", "minus")]
    numbers = []
    for at, (text, cache) in enumerate(zip(texts, caches, strict=True)):
        hooks = [(point, changed(point, cache)) for point in points]
        if by == "other" and at:
            hooks = []
        logits = model.run_with_hooks(text, fwd_hooks=hooks)[0, -1].detach().double()
        numbers.append(float(logits[ids[0]] - logits[ids[1]]))
        chances = logits.softmax(-1)
        for answer, token in zip(view["answers"], ids, strict=True):
            assert answer["after"][at] == pytest.approx(float(chances[token]), rel=1e-4)
        best = view["next"][at]
        assert max(best, key=lambda token: token["other_chance"])["id"] == int(chances.argmax())
    before = prompt["numbers"][0] - sum(prompt["numbers"][1:])
    assert view["after"] == pytest.approx(numbers[0] - sum(numbers[1:]), abs=1e-4)
    assert view["before"] == pytest.approx(before, abs=1e-5)
    assert view["share"] == pytest.approx(view["after"] / before, rel=1e-4)
    names = {"model": model}
    exec(view["code"], names)
    chances = names["result"][0, 0].double().softmax(-1)
    assert float(chances[ids[0]]) == pytest.approx(view["answers"][0]["after"][0], rel=1e-5)


@pytest.mark.parametrize("fields", [{}, {"other": OTHER}, {"query": 20, "nodes": 15}], ids=str)
def test_the_graph_is_the_librarys_and_what_enters_a_node_sums_to_it(model, session, fields):
    view = session.view("graph", {"text": PROMPT, **fields})
    run = tlens.freeze(model, PROMPT)
    best, second = run.logits(fields.get("query", -1))[0, 0].argsort(descending=True)[:2].tolist()
    if "other" in fields:
        run = tlens.difference(run, tlens.freeze(model, OTHER))
    whole = circuits.contribution_graph(run, best, second, query=fields.get("query", -1), threshold=0)
    nodes = view["nodes"]
    kept = [node for node in nodes if node["kind"] != "others"]
    if "nodes" in fields:
        assert len(kept) == fields["nodes"] + 1
    final = whole.edges[whole.edges["target"] == len(whole.nodes) - 1]
    drawn = {(node["name"], node["pos"]) for node in kept}
    ends = whole.nodes[["name", "pos"]].apply(tuple, axis=1).tolist()
    carried = sum(abs(weight) for source, _, weight in final.itertuples(index=False) if ends[source] in drawn)
    assert view["coverage"] == pytest.approx(carried / final["weight"].abs().sum(), rel=1e-3)
    assert view["covered"] == (view["coverage"] >= 0.8)
    assert view["covered"] or "nodes" in fields
    assert nodes[-1]["name"] == "target"
    assert nodes[-1]["weight"] == pytest.approx(view["total"])
    weights = {
        (name, pos): weight for name, pos, weight in whole.nodes[["name", "pos", "weight"]].itertuples(index=False)
    }
    scale = max(map(abs, weights.values()))
    for node in kept:
        assert node["weight"] == pytest.approx(weights[node["name"], node["pos"]], abs=1e-5 * scale)
    ends = whole.nodes[["name", "pos"]].apply(tuple, axis=1).tolist()
    entering = {}
    for source, end, weight in whole.edges.itertuples(index=False):
        entering.setdefault(ends[end], {})[ends[source]] = weight
    layers = {
        (name, pos): (kind, layer) for name, pos, kind, layer in whole.nodes[["name", "pos", "kind", "layer"]].values
    }
    for number, node in enumerate(nodes):  # what is said to come from other nodes does come from these
        if node["kind"] == "others":
            continue
        into = {
            nodes[source]["name"]: weight
            for source, end, weight in view["edges"]
            if end == number and nodes[source]["kind"] == "others"
        }
        expected = {}
        for source, weight in entering.get((node["name"], node["pos"]), {}).items():
            kind, layer = layers[source]
            half = "L0–1" if layer < 2 else "L2–3"
            name = {"head": f"other heads {half}", "mlp": f"other MLPs {half}"}.get(kind, "other embeddings and biases")
            if source not in drawn:
                expected[name] = expected.get(name, 0) + weight
        for name in {*into, *expected} - {"smaller edges"}:
            assert into.get(name, 0) == pytest.approx(expected.get(name, 0), abs=1e-4 * scale)
        assert abs(into.get("smaller edges", 0)) < 1e-4 * scale
        edges = sum(weight for _, end, weight in view["edges"] if end == number)
        if node["kind"] not in ("embedding", "bias"):
            assert edges + node["bias"] == pytest.approx(node["weight"], abs=1e-4 * scale)


@pytest.mark.parametrize("rule", ["gim", "frozen-tangent"])
def test_a_rule_is_that_of_graph_and_token_scores(model, session, rule):
    fields = {"text": PROMPT, "rule": rule, "nodes": 12}
    frozen = tlens.freeze(model, PROMPT)
    best, second = frozen.logits()[0, 0].argsort(descending=True)[:2].tolist()
    tokens = session.view("tokens", fields)
    expected = tlens.attribute(frozen, best, minus=second, rule=rule)
    assert tokens["scores"] == pytest.approx(expected.scores[0, 0].tolist(), abs=1e-4)
    assert tokens["rule"] == rule
    assert tokens["scores"] != session.view("tokens", {"text": PROMPT})["scores"]
    graph = session.view("graph", fields)
    whole = circuits.contribution_graph(frozen, best, second, rule=rule, nodes=12, threshold=0).nodes
    weights = dict(zip(zip(whole["name"], whole["pos"], strict=True), whole["weight"], strict=True))
    drawn = [node for node in graph["nodes"] if node["kind"] != "others"]
    assert {(node["name"], node["pos"]): node["weight"] for node in drawn} == pytest.approx(weights, abs=1e-4)
    assert any(node["name"].endswith(".q") for node in drawn) == any(name.endswith(".q") for name in whole["name"])
    rollout = session.view("tokens", {**fields, "method": "rollout"})
    assert rollout["scores"] == session.view("tokens", {"text": PROMPT, "method": "rollout"})["scores"]
    for view in ("tokens", "graph"):
        with pytest.raises(tlens.InvalidInputError, match="a rule applies to one run; leave it out"):
            session.view(view, {**fields, "other": OTHER})
        with pytest.raises(tlens.InvalidInputError, match="gim"):
            session.view(view, {"text": PROMPT, "rule": "gym"})


def test_neurons_sum_to_their_mlp(session):
    for fields in ({"text": PROMPT}, {"text": PROMPT, "other": OTHER}):
        view = session.view("neurons", {**fields, "node": "MLP2"})
        assert sum(row["score"] for row in view["top"]) + view["others"] == pytest.approx(view["total"], abs=1e-5)
        assert view["total"] == pytest.approx(session.view("components", fields)["mlps"][2], abs=1e-4)
        assert len(view["top"]) + view["count"] == 512


def test_features_and_what_is_none_sum_to_the_answer(model, with_features, dictionary):
    view = with_features.view("features", {"text": PROMPT})
    active = circuits.features(tlens.freeze(model, PROMPT), dictionary)
    best = with_features.view("prompt", {"text": PROMPT})
    terms = circuits.feature_effects(active, best["target"]["id"], best["minus"]["id"])
    for row in view["top"]:
        assert row["score"] == pytest.approx(float(terms[row["name"]]), abs=1e-5)
    assert view["top"][0]["label"] == "forms of to be"
    rest = sum(row["score"] for row in view["rest"])
    assert sum(row["score"] for row in view["top"]) + view["others"] + rest == pytest.approx(view["whole"], abs=1e-4)
    assert {row["name"] for row in view["rest"]} >= {"error", "b_dec", "bias"}


def test_a_feature_says_what_makes_it_active_and_what_it_promotes(model, with_features, dictionary):
    view = with_features.view("feature", {"text": PROMPT, "feature": 357, "at": 34})
    active = circuits.features(tlens.freeze(model, PROMPT), dictionary)
    assert view["value"] == pytest.approx(float(active.value(357)[0, 34]))
    assert sum(view["scores"]) + view["bias"] == pytest.approx(view["total"], abs=1e-4)
    assert view["total"] == pytest.approx(
        view["value"], abs=1e-4
    )  # it is active: the same number before its activation
    row = dictionary.W_dec[357].detach()
    centred = (row - row.mean()) * model.ln_final.w
    logits = (centred @ model.W_U).detach()
    assert view["promotes"][0]["score"] == pytest.approx(float(logits.max()), rel=1e-4)
    assert view["promotes"][0]["text"] == model.tokenizer.decode([int(logits.argmax())])


def test_both_runs_say_what_comes_next(model, session):
    view = session.view("prompt", {"text": PROMPT, "other": OTHER})
    chances = [tlens.freeze(model, text).logits()[0, 0].double().softmax(-1) for text in (PROMPT, OTHER)]
    for token in view["next"]:
        assert token["chance"] == pytest.approx(float(chances[0][token["id"]]), rel=1e-4)
        assert token["other_chance"] == pytest.approx(float(chances[1][token["id"]]), rel=1e-4)
    assert {int(run.argmax()) for run in chances} <= {token["id"] for token in view["next"]}


def test_every_dictionary_has_its_labels(model, dictionary):
    early = tlens.load_demo_dictionary("blocks.0.hook_resid_post")
    session = Session(model, dictionaries=[early, dictionary], labels=[None, {357: "to be"}])
    assert session.about()["dictionaries"] == ["blocks.0.hook_resid_post", "blocks.2.hook_resid_post"]
    assert session.view("features", {"text": PROMPT, "dictionary": 1})["top"][0]["label"] == "to be"
    with pytest.raises(tlens.InvalidInputError, match="there are 2 dictionaries; pass a list"):
        Session(model, dictionaries=[early, dictionary], labels={357: "to be"})


def test_chosen_nodes_have_the_effects_that_they_have_among_all(model):
    frozen = tlens.freeze(model, PROMPT)
    for live in (False, True):
        whole = circuits.total_effects(frozen, " raised", live=live)
        chosen = circuits.total_effects(frozen, " raised", live=live, nodes=["MLP2", "L1H0"])
        assert chosen.names == ["MLP2", "L1H0"]
        for name in chosen.names:
            assert torch.allclose(chosen[name], whole[name], atol=1e-4)
    for wrong in (["L9H9"], "L1H0", []):
        for live in (False, True):
            with pytest.raises(tlens.InvalidInputError, match=r"nodes=.*name some of L0H0"):
                circuits.total_effects(frozen, " raised", nodes=wrong, live=live)
    change = tlens.difference(frozen, tlens.freeze(model, OTHER))
    with pytest.raises(tlens.InvalidInputError, match="live effects are of a single run"):
        circuits.total_effects(change, " raised", live=True)


@pytest.mark.parametrize(
    ("view", "fields"),
    [
        ("tokens", {}),
        ("tokens", {"method": "rollout"}),
        ("components", {"query": 12}),
        ("head", HEAD),
        ("why", HEAD),
        ("tokens", {"other": OTHER}),
        ("components", {"other": OTHER}),
        ("head", {"other": OTHER, **HEAD}),
        ("routes", {"other": OTHER}),
        ("graph", {"nodes": 20}),
        ("graph", {"other": OTHER}),
        ("neurons", {"node": "MLP2"}),
        ("features", {}),
        ("feature", {"feature": 98, "at": 20}),
    ],
)
@pytest.mark.few(6)
def test_the_code_gives_the_result_again(model, with_features, dictionary, view, fields):
    answer = with_features.view(view, {"text": PROMPT, **fields})
    names = {"model": model, "dictionary": dictionary, "labels": {357: "forms of to be"}}
    exec(answer["code"], names)
    result = with_features.last
    assert type(names["result"]) is type(result)
    for name in type(result).TENSORS:
        table, _, column = name.partition(".")  # a graph's are columns of its tables
        value, again = getattr(result, table), getattr(names["result"], table)
        if column:
            value, again = (torch.tensor(of[column].to_numpy(float)) for of in (value, again))
        if value is not None:
            assert torch.allclose(again, value, equal_nan=True)


def test_two_models_are_compared(model):
    checkpoints = tlens.demo.induction_checkpoints()
    first, last = checkpoints[min(checkpoints)], checkpoints[max(checkpoints)]
    text = "a b c a b"
    session = Session(last, first)
    view = session.view("tokens", {"text": text, "other": text})
    assert view["total"] != 0
    size = sum(map(abs, view["scores"])) + abs(view["bias"])  # large parts that nearly cancel
    assert sum(view["scores"]) + view["bias"] == pytest.approx(view["total"], abs=1e-5 * size)
    assert "tlens.freeze(tuned, 'a b c a b')" in view["code"]


def test_what_all_clicks_on_a_prompt_share_is_computed_once(model, monkeypatch):
    session = Session(model)
    fields = {"text": PROMPT, "other": OTHER}
    computed = []

    def counted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: computed.append(name) or function(*args, **kwargs))

    counted(circuits, "logit_attribution")
    counted(effects, "states_and_logits")
    clicks = [("head", {"layer": 1, "head": head}) for head in range(3)]
    clicks += [("ablate", {"without": name}) for name in ("L1H0", "L1H0,MLP1")]
    views = [session.view(name, fields | click) for name, click in clicks]
    # an ablation is one run, of both prompts; the first checks unchanged copies in the same run
    assert sorted(computed) == ["logit_attribution", "states_and_logits", "states_and_logits"]
    alone = [Session(model).view(name, fields | click) for name, click in clicks]
    assert views[:-1] == alone[:-1]
    assert float(views[-1].pop("after")) == pytest.approx(alone[-1].pop("after"), rel=1e-4)
    rounded = json.loads(json.dumps([views[-1], alone[-1]]), parse_float=lambda number: f"{float(number):.3g}")
    assert rounded[0] == rounded[1]  # another run, of other rows
    held = weakref.ref(session.last)
    session.view("tokens", {"text": OTHER})  # of other runs nothing stays
    gc.collect()
    assert held() is None


def test_what_clicks_share_is_dropped_with_the_model():
    changed = tlens.load_demo_model()
    session = Session(changed)
    head = {"text": PROMPT, **HEAD}
    ablation = {"text": PROMPT, "without": "L1H0"}
    before = [session.view("head", head)["moved"], session.view("ablate", ablation)["after"]]
    with torch.no_grad():
        changed.blocks[1].attn.W_O.mul_(2)
    after = [session.view("head", head)["moved"], session.view("ablate", ablation)["after"]]
    assert after == [
        Session(changed).view(name, fields)[key]
        for name, fields, key in (("head", head, "moved"), ("ablate", ablation, "after"))
    ]
    assert after != before


def test_passes_are_bounded(model):
    session = Session(model, passes=3)
    for number in range(6):
        session.view("tokens", {"text": f"The value of {number}", "other": f"The name of {number}"})
    assert 0 < len(session._passes._frozen[0]) <= 3
    assert len(session._passes._differences) <= 3


@pytest.mark.parametrize(
    ("view", "fields", "message"),
    [
        ("prompt", {}, "text is empty; type a prompt"),
        ("prompt", {"text": 5}, "text is int; send a text"),
        ("prompt", {"text": "a" * (LONGEST_TEXT + 1)}, f"shorten it to {LONGEST_TEXT}"),
        ("prompt", {"text": "a \ud800 b"}, "half of a surrogate pair"),
        ("prompt", {"text": PROMPT, "query": 99}, "query is 99; the prompt has 35 tokens"),
        ("prompt", {"text": PROMPT, "query": -1}, "query is -1; send a whole number of at least 0"),
        ("tokens", {"text": PROMPT, "other": "short"}, "do not match position by position"),
        ("tokens", {"text": PROMPT, "method": "nothing"}, "nothing"),
        ("head", {"text": PROMPT}, "layer and head are missing"),
        ("head", {"text": PROMPT, "layer": 9, "head": 0}, "9"),
        ("head", {"text": PROMPT, "layer": 1, "head": 99}, "99"),
        ("head", {"text": PROMPT, **HEAD, "key": 999}, "key is 999"),
        ("why", {"text": PROMPT, "layer": 1}, "layer and head are missing"),
        ("why", {"text": PROMPT, **HEAD, "part": "query L9"}, "part is 'query L9'; click a row"),
        ("why", {"text": PROMPT, **HEAD, "part": "value L0"}, "click a row"),
        ("why", {"text": PROMPT, **HEAD, "part": "key 999"}, "click a row"),
        ("why", {"text": PROMPT, **HEAD, "part": "key ²"}, "click a row"),
        ("why", {"text": PROMPT, **HEAD, "part": "<img src=x>"}, "click a row"),
        ("why", {"text": PROMPT, **HEAD, "part": "x" * 300}, "300 characters long"),
        ("why", {"text": PROMPT, "other": OTHER, **HEAD, "part": "query 3"}, "click a row"),
        ("tokens", {"text": PROMPT, "target": 10**30}, "the vocabulary has"),
        ("prompt", {"text": PROMPT, "minus": " file list"}, r"minus=' file list' is 2 tokens \[' file', ' list'\]"),
        ("prompt", {"text": PROMPT, "minus": "first-choice"}, "minus='first-choice' is .* tokens"),
        ("prompt", {"text": PROMPT, "minus": "a" * 999}, "minus is 999 characters long"),
        ("prompt", {"text": PROMPT, "minus": 1.5}, "minus is 1.5; send a whole number"),
        ("ablate", {"text": PROMPT}, "without is missing"),
        ("ablate", {"text": PROMPT, "without": "L9H9"}, "name some of"),
        ("ablate", {"text": PROMPT, "without": "L1H0,"}, "name some of"),
        ("ablate", {"text": PROMPT, "without": "L1H0", "by": "half"}, "by='half'"),
        ("ablate", {"text": PROMPT, "without": "L1H0," * 999}, "without is 4995 characters long"),
        ("routes", {"text": PROMPT}, "type a second prompt"),
        ("neurons", {"text": PROMPT}, "node is missing; click an MLP"),
        ("neurons", {"text": PROMPT, "node": "L1H0"}, "node is 'L1H0'; click an MLP, which has neurons"),
        ("neurons", {"text": PROMPT, "node": "MLP"}, "click an MLP, which has neurons"),
        ("graph", {"text": PROMPT, "nodes": -3}, "nodes is -3; send a whole number of at least 0"),
        ("features", {"text": PROMPT}, r"dictionary 0 of 0; pass explore\(model, dictionaries=…\)"),
        ("feature", {"text": PROMPT}, "feature is missing; click a feature"),
        ("secrets", {"text": PROMPT}, "use one of prompt, mends, tokens"),
    ],
)
def test_wrong_questions_are_refused(session, view, fields, message):
    with pytest.raises(tlens.TensorLensError, match=message):
        session.view(view, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"other": OTHER}, "features are of one run"),
        ({"feature": 99999}, "feature"),
        ({"at": 99}, "99"),
        ({"dictionary": 1}, "dictionary 1 of 1"),
    ],
)
def test_wrong_questions_about_features_are_refused(with_features, fields, message):
    with pytest.raises(tlens.TensorLensError, match=message):
        with_features.view("feature", {"text": PROMPT, "feature": 1, **fields})


# ------------------------------------------------------------------ the server


@pytest.fixture(scope="module")
def opened(session):
    explorer = Explorer(session, 0).start()
    yield explorer
    explorer.close()


def send(explorer, path="/api/prompt", body=None, method="POST", **headers):
    """One request, as anybody could send it; headers of None are left out."""
    address = explorer._server
    headers = {"X-Token": address.token, "Host": f"127.0.0.1:{address.port}"} | headers
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name.replace("_", "-"), value)
    connection.putheader("Content-Length", str(len(data)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
        connection.endheaders(data)
    answer = connection.getresponse()
    text = b""
    with contextlib.suppress(ConnectionResetError):  # what it has not read resets the connection behind its answer
        text = answer.read()
    return answer.status, text, dict(answer.getheaders())


def alive(explorer):
    status, body, _ = send(explorer, body={"text": "The value of the"})
    return status == 200 and json.loads(body)["tokens"][-1] == " the"


def test_a_question_is_answered(opened):
    status, body, headers = send(opened, body={"text": PROMPT})
    assert status == 200
    assert json.loads(body)["query"] == 34
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert opened.selection["text"] == PROMPT
    send(opened, "/api/tokens", {"text": PROMPT})
    assert opened.result.method == "tensorlens"


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Token": None},
        {"X-Token": "wrong"},
        {"X-Token": "é"},
        {"Host": "evil.example"},
        {"Host": None},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
@pytest.mark.parametrize("path", ["/api/prompt", "/api/about", "/"])
def test_other_pages_are_refused(opened, headers, path):
    method = "GET" if path == "/" else "POST"
    status, _, _ = send(opened, path, {"text": "hello"}, method, **headers)
    assert status in (400, 403)
    assert alive(opened)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * (10 << 20), 413),
        (b"x" * (server.LARGEST_BODY + 1), 413),
        (b"{", 400),
        (b"[1, 2]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"text": NaN}', 400),
        (json.dumps({"text": "x" * 100_000}).encode(), 400),
        (b'{"text": "\\ud800"}', 400),
    ],
)
def test_hostile_bodies_are_refused(opened, body, status):
    assert send(opened, body=body)[0] == status
    assert alive(opened)


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/../pyproject.toml", "/api/../x"]
)
def test_no_other_file_is_served(opened, path):
    assert send(opened, path, method="GET")[0] in (404, 405)


def test_a_web_socket_is_refused(opened, capfd):
    connection = http.client.HTTPConnection("127.0.0.1", opened._server.port, timeout=30)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    connection.request("GET", "/", headers=headers | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert connection.getresponse().status == 403
    connection.close()
    assert "ERROR" not in capfd.readouterr().err
    assert alive(opened)


def test_a_long_name_is_not_sent_back(opened):
    status, answer, _ = send(opened, "/api/ablate", {"text": PROMPT, "without": "L" * 9000})
    assert status == 400
    assert len(answer) < 300


def test_many_questions_at_once_are_answered_or_told_to_come_back(opened):
    with ThreadPoolExecutor(100) as pool:
        statuses = list(pool.map(lambda _: send(opened, body={"text": PROMPT})[0], range(100)))
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= server.MOST_JOBS
    assert alive(opened)


def test_a_fault_of_ours_leaves_the_server_up(opened, monkeypatch, capsys):
    monkeypatch.setitem(opened._session._views, "prompt", lambda inquiry: 1 / 0)
    status, body, _ = send(opened, body={"text": PROMPT})
    assert status == 500
    assert "ZeroDivisionError" in json.loads(body)["error"]
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.undo()
    assert alive(opened)


def test_a_number_that_is_none_is_a_fault_and_no_wrong_question(opened, monkeypatch):
    monkeypatch.setitem(opened._session._views, "prompt", lambda inquiry: {"value": float("nan")})
    status, body, _ = send(opened, body={"text": PROMPT})
    assert status == 500
    assert "JSON object" not in json.loads(body)["error"]


def test_a_question_whose_page_went_away_is_dropped(opened, monkeypatch):
    asked, go = [], threading.Event()
    real = opened._session._views["prompt"]

    def slow(inquiry):
        asked.append(inquiry.question.text)
        go.wait(30)
        return real(inquiry)

    monkeypatch.setitem(opened._session._views, "prompt", slow)
    address = opened._server
    connections = []
    for text in ("The value of a", "The value of b"):
        connection = http.client.HTTPConnection("127.0.0.1", address.port)
        connection.request("POST", "/api/prompt", json.dumps({"text": text}), {"X-Token": address.token})
        connections.append(connection)
        time.sleep(0.3)
    connections[1].close()
    time.sleep(0.5)
    go.set()
    assert connections[0].getresponse().status == 200
    assert alive(opened)
    assert "The value of b" not in asked


def test_a_taken_port_is_refused(opened, session):
    for port in (opened._server.port, 99_999, -1):
        with pytest.raises(tlens.InvalidInputError, match=r"cannot listen on port .*[^.]\. Use --port 0"):
            Explorer(session, port)


def test_without_the_extra_it_says_what_to_install(session, monkeypatch):
    monkeypatch.setattr("tensorlens_tl.explorer.find_spec", lambda name: None)
    with pytest.raises(tlens.InvalidInputError, match=r"starlette and uvicorn.*\.\[explore\]"):
        Explorer(session, 0)


@pytest.mark.whole
def test_the_command_serves_until_ctrl_c():
    command = [sys.executable, "-m", "tensorlens_tl", "explore", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        assert b"<title>Explorer</title>" in urlopen(url, timeout=30).read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)


# ------------------------------------------------------------------ the page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@contextlib.contextmanager
def chromium():
    """A browser; the test is skipped where none is installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_window_size(1280, 900)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser(opened):
    with chromium() as driver:
        yield driver


def wait(browser, condition):
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30, 0.05, (WebDriverException,)).until(lambda driver: condition())


def one(browser, selector):
    return browser.find_element("css selector", selector)


def several(browser, selector):
    return browser.find_elements("css selector", selector)


def settled(browser):
    wait(browser, lambda: one(browser, "#status").text.endswith(" s") and not several(browser, "main.busy"))


def load(browser, opened, **state):
    browser.get("about:blank")
    browser.get_log("browser")  # what earlier tests provoked
    browser.get(f"{opened.url}#{urlencode(state)}")
    settled(browser)


def percent(shown):
    return float(shown.removesuffix(" %").replace("−", "-")) / 100


def test_type_click_ablate_undo_reload(browser, opened, session):
    browser.get(opened.url)
    wait(browser, lambda: one(browser, "#model").text == "demo")
    one(browser, "#text").send_keys(PROMPT + "\n")
    settled(browser)
    tokens = session.view("tokens", {"text": PROMPT})
    titles = [chip.get_attribute("title") for chip in several(browser, ".tokens .chip")]
    assert [float(title) for title in titles] == pytest.approx(tokens["scores"])
    assert f"{tokens['total']:.3g}" in one(browser, ".tokens .sum").text
    several(browser, ".tokens .chip")[20].click()  # another query
    wait(browser, lambda: "query=20" in browser.current_url)
    settled(browser)
    one(browser, '.components [data-cell="1,0"]').click()
    wait(browser, lambda: several(browser, ".head"))
    head = session.view("head", {"text": PROMPT, "query": 20, **HEAD})
    chips = several(browser, ".head .chips .chip")[: len(head["pattern"])]
    attention = [percent(chip.get_attribute("title")) for chip in chips]
    assert attention == pytest.approx(head["pattern"], abs=6e-4)
    one(browser, "#ablate").click()
    wait(browser, lambda: several(browser, ".ablate"))
    ablated = session.view("ablate", {"text": PROMPT, "query": 20, "without": "L1H0"})
    shown = [float(value.get_attribute("title")) for value in several(browser, ".ablate .answer b")]
    assert shown == pytest.approx([of[when][0] for of in ablated["answers"] for when in ("before", "after")], rel=1e-4)
    assert f"{100 * ablated['share']:.0f} % is left" in one(browser, ".ablate").text.replace("−", "-")
    browser.refresh()  # the address holds all of it
    wait(browser, lambda: several(browser, ".ablate") and several(browser, ".head"))
    one(browser, "#undo").click()
    wait(browser, lambda: not several(browser, ".ablate"))
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("query", [2, 10, 20, 30])
def test_shown_sums_add_up_in_their_digits(browser, opened, query):
    load(browser, opened, text=PROMPT, query=query, layer=1, head=0)
    tokens = one(browser, ".tokens .sum").find_elements("css selector", "b")[:3]
    components = several(browser, ".components .sum b")[:3]
    for parts in (tokens, components):
        first, second, total = (part.text.replace("−", "-") for part in parts)
        decimals = {len(part.partition(".")[2]) for part in (first, second, total)}
        assert len(decimals) == 1
        assert float(first) + float(second) == pytest.approx(float(total), abs=1.01 * 10.0 ** -decimals.pop())
    rows = [row.text.replace("−", "-") for row in several(browser, ".why .pair > div:first-child .value")]
    total = one(browser, ".why .pair > div:first-child .sum b").text.replace("−", "-")
    digits = len(total.partition(".")[2])
    assert sum(map(float, rows)) == pytest.approx(float(total), abs=len(rows) * 10.0**-digits)


def test_choosing_the_other_token_of_a_comparison_keeps_the_page(browser, opened, session):
    first, second, third = (token["id"] for token in session.view("prompt", {"text": PROMPT})["next"][:3])
    load(browser, opened, text=PROMPT, minus=second)
    several(browser, ".next .bars .name")[1].click()
    wait(browser, lambda: f"target={second}" in browser.current_url)
    settled(browser)
    assert "minus" not in browser.current_url
    assert several(browser, ".tokens .chip")
    load(browser, opened, text=PROMPT, minus=first)
    assert one(browser, ".next [aria-pressed=true]").get_attribute("title") == session.view("prompt", {"text": PROMPT})[
        "next"
    ][1]["text"].replace("\n", "↵")
    one(browser, f".next select [value='{third}']").click()
    wait(browser, lambda: f"minus={third}" in browser.current_url)
    settled(browser)
    assert not one(browser, "#error").is_displayed()


def test_the_first_screen_is_an_answered_question(browser, opened, session):
    browser.get("about:blank")
    browser.get(opened.url)
    settled(browser)
    question = {name: one(browser, f"#{name}").get_attribute("value") for name in ("text", "other")}
    view = session.view("prompt", question)
    chances = {token["id"]: (token["chance"], token["other_chance"]) for token in view["next"]}
    title = one(browser, "#question").text
    assert title.startswith("Why “string” and not “list”?")
    for token in (view["target"], view["minus"]):
        for chance in chances[token["id"]]:
            assert f"{100 * chance:.1f} %" in title
    assert browser.switch_to.active_element.get_attribute("id") == "text"
    assert several(browser, ".graph .t")
    several(browser, ".example")[1].click()
    wait(browser, lambda: one(browser, "#text").get_attribute("value") == PROMPT)
    settled(browser)
    assert len(several(browser, ".example")) == 3
    assert not several(browser, ".next .runs")


@pytest.mark.parametrize("width", [400, 1280])
def test_what_is_pressed_opens_in_the_window(browser, opened, width):
    script = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    override = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", override)
    try:
        load(browser, opened, text=PROMPT)
        for selector, opens in (('.components [data-cell="3,1"]', ".head"), ("#ablate", ".ablate")):
            control = one(browser, selector)
            browser.execute_script("arguments[0].scrollIntoView({block: 'nearest'})", control)
            before = browser.execute_script(script, ".components h2")
            control.click()
            wait(browser, lambda opens=opens: several(browser, opens))
            settled(browser)
            wait(browser, lambda opens=opens: -1 <= browser.execute_script(script, opens) < 700)
            assert browser.execute_script(script, ".components h2") == pytest.approx(before, abs=40)
        if width == 400:
            one(browser, "#fold").click()
            wait(browser, lambda: one(browser, ".panel").size["height"] < 100)
        one(browser, "#close").click()
        wait(browser, lambda: not one(browser, ".panel").is_displayed())
        assert "without" not in browser.current_url
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def prompt_numbers(session):
    return session.view("prompt", {"text": PROMPT, "other": OTHER})["numbers"]


def test_two_prompts_show_their_difference(browser, opened, session):
    load(browser, opened, text=PROMPT, other=OTHER, layer=1, head=0)
    changed = several(browser, ".tokens .chip.changed")
    assert [chip.get_attribute("data-at") for chip in changed] == ["3"]
    assert f"{prompt_numbers(session)[0]:.3g}" in one(browser, ".tokens").text.replace("−", "-")
    routes = session.view("routes", {"text": PROMPT, "other": OTHER})
    cells = [float(cell.get_attribute("title")) for cell in several(browser, ".routes td span")]
    assert cells == pytest.approx([score for row in routes["scores"] for score in row], abs=1e-6)
    one(browser, "#other").clear()
    one(browser, "#other").send_keys("Too short\n")
    wait(browser, lambda: several(browser, ".aligned"))
    assert f"{len(session.view('prompt', {'text': 'Too short'})['tokens'])} tokens" in one(browser, ".aligned").text
    assert not several(browser, ".routes")


@pytest.mark.parametrize("key", [3, 23])
def test_a_head_says_whether_it_turned_to_a_token_or_away(browser, opened, session, key):
    fields = {"text": PROMPT, "other": OTHER, "layer": 1, "head": 1, "key": key}
    load(browser, opened, **fields)
    wait(browser, lambda: several(browser, ".why .bars"))
    head = session.view("head", fields)
    runs = [head[name][key] for name in ("pattern", "other_pattern")]
    assert ("turned away from" in one(browser, ".why h2").text) is (runs[0] < runs[1])
    first, second = one(browser, f'.head .chip[data-at="{key}"]').get_attribute("title").split(" in the first run, ")
    assert [percent(first), percent(second.removesuffix(" in the second"))] == pytest.approx(runs, abs=6e-4)
    style = "return Number(arguments[0].style.getPropertyValue('--strength'))"
    strength = browser.execute_script(style, one(browser, f'.head .chip[data-at="{key}"]'))
    assert strength == pytest.approx(0.03 + 0.67 * abs(runs[0] - runs[1]), abs=1e-3)  # 1 is full, not the largest


def test_one_token_that_differs_is_said_in_a_line(browser, opened):
    load(browser, opened, text=PROMPT, other=OTHER)
    assert not several(browser, ".tokens .bars")
    assert "at position 3, the only token that differs" in one(browser, ".tokens").text
    load(browser, opened, text=PROMPT)
    assert several(browser, ".tokens .bars .name small")[0].text.isdecimal()


def values(browser, selector):
    return [float(value.get_attribute("title")) for value in several(browser, selector)]


def test_both_runs_stand_side_by_side(browser, opened, session):
    load(browser, opened, text=PROMPT, other=OTHER)
    shown = values(browser, ".next .runs .value")
    view = session.view("prompt", {"text": PROMPT, "other": OTHER})
    assert shown == pytest.approx([token[run] for token in view["next"] for run in ("chance", "other_chance")])
    first, second = view["numbers"]
    sums = one(browser, ".tokens .sum + .sum").text.replace("−", "-")
    assert f"first run {first:+.3g}" in sums
    assert f"second run {second:+.3g}" in sums


def node(browser, name):
    return one(browser, f'.graph [data-node="{name}"]')


def test_a_node_of_the_graph_is_selected_in_every_view(browser, opened, session):
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    view = session.view("graph", {"text": PROMPT})
    drawn = [mark.get_attribute("data-node") for mark in several(browser, ".graph .t")]
    assert drawn == [f"{node['name']}@{node['pos']}" for node in view["nodes"]]
    assert f"carry {100 * view['coverage']:.1f} %" in one(browser, ".graph-card header").text
    sums = values(browser, ".graph-card > .sum b")
    assert sums[0] + sums[1] == pytest.approx(sums[2], abs=1e-5)
    assert sums[1] == pytest.approx(view["others"])
    node(browser, "L3H1@34").click()
    wait(browser, lambda: "L3H1" in one(browser, ".head h2").text)
    settled(browser)
    assert one(browser, '.components [data-cell="3,1"]').get_attribute("aria-pressed") == "true"
    assert one(browser, ".tokens .chip.linked").get_attribute("data-at") == "34"
    number = drawn.index("L3H1@34")
    edges = sorted((weight for _, end, weight in view["edges"] if end == number), key=abs)
    shown = [
        float(of.get_attribute("title"))
        for of in several(browser, ".side table:first-of-type tr:not(.heading) td:last-child")
    ]
    assert shown[-1] == pytest.approx(view["nodes"][number]["weight"], abs=1e-5)
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=1e-5)
    assert abs(shown[0]) == pytest.approx(abs(edges[-1]), abs=1e-5)
    node(browser, "MLP2@34").click()  # another node: an MLP opens its neurons
    wait(browser, lambda: several(browser, ".neurons"))
    neurons = session.view("neurons", {"text": PROMPT, "node": "MLP2"})
    assert values(browser, ".neurons .value") == pytest.approx(
        [*(row["score"] for row in neurons["top"]), neurons["others"]], abs=1e-5
    )
    one(browser, "#ablate").click()
    wait(browser, lambda: several(browser, ".ablate"))
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_sliders_change_the_graph(browser, opened):
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    drawn = "return document.querySelectorAll('.graph path[data-e]:not([hidden])').length"
    first = browser.execute_script(drawn)
    assert 60 <= first < 80  # 60, and those that one step of the slider adds
    slide = "const s = document.querySelector('.least'); s.value = 60;"
    browser.execute_script(f"{slide} s.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert 0 < browser.execute_script(drawn) < first
    choose = "const s = document.querySelector('[aria-label=Nodes]'); s.value = 20;"
    browser.execute_script(f"{choose} s.dispatchEvent(new Event('change'))")
    wait(browser, lambda: len(several(browser, ".graph .t:not([data-kind=others])")) == 21)
    assert "partial: " in one(browser, ".graph-card h2").text
    assert "nodes=20" in browser.current_url


def test_all_others_are_a_number_without_a_bar(browser, opened, session):
    load(browser, opened, text=PROMPT, **HEAD)
    wait(browser, lambda: several(browser, ".why .bars"))
    script = """return [...arguments[0].querySelectorAll('.name')].map((name) => [name.classList.contains('soft'),
        parseFloat(name.nextSibling.firstChild?.style.width ?? 0), Number(name.nextSibling.nextSibling.title)])"""
    lists = session.view("why", {"text": PROMPT, **HEAD})["lists"]
    for drawn, one_list in zip(several(browser, ".why .bars"), lists, strict=True):
        rows = browser.execute_script(script, drawn)
        assert [score for *_, score in rows] == pytest.approx([row["score"] for row in one_list["rows"]], rel=1e-4)
        assert {width for muted, width, _ in rows if muted} <= {0}
        shares = [(width, abs(score)) for muted, width, score in rows if not muted]
        most = max(score for _, score in shares)
        widest = max(width for width, _ in shares)
        assert widest in (50, 100)
        assert [width for width, _ in shares] == pytest.approx([widest * score / most for _, score in shares], rel=1e-4)


def test_why_a_head_attends_is_opened_row_by_row(browser, opened, session):
    load(browser, opened, text=PROMPT, **WHY)
    wait(browser, lambda: several(browser, ".why .bars"))
    for part in ("query L0", "query MLP0", "key 4"):
        name = part.split()[1].replace("4", "“is” 4")
        aria = {"query L0": "Layers in the query", "key 4": "Tokens in the key"}.get(part, "L0 in the query, by part")
        one(browser, f'.why [aria-label="{aria}"] button[title="{name}"]').click()
        wait(browser, lambda part=part: part.replace(" ", "+") in browser.current_url)
        settled(browser)
        wait(browser, lambda: several(browser, ".why .inside"))
        expected = session.view("why", {"text": PROMPT, **WHY, "part": part})["opened"]["rows"]
        shown = [float(value.get_attribute("title")) for value in several(browser, ".why .inside .value")]
        assert shown == pytest.approx([row["score"] for row in expected], rel=1e-4)
    one(browser, "#undo").click()
    wait(browser, lambda: "MLP0" in one(browser, ".why .inside h3").text)
    several(browser, ".head .chips .chip")[0].click()
    wait(browser, lambda: "part=" not in browser.current_url)
    settled(browser)
    assert not several(browser, ".why .inside")


def test_a_rule_is_chosen_for_graph_and_tokens(browser, opened, session):
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    choose = "const s = document.getElementById('rule'); s.value = 'gim'; s.dispatchEvent(new Event('change'))"
    browser.execute_script(choose)
    wait(browser, lambda: "rule='gim'" in one(browser, ".graph-card .code").get_attribute("data-code"))
    wait(browser, lambda: "rule='gim'" in one(browser, ".tokens .code").get_attribute("data-code"))
    titles = "return [...document.querySelectorAll('.tokens .chip')].map((of) => Number(of.title))"
    shown = browser.execute_script(titles)
    assert shown == pytest.approx(session.view("tokens", {"text": PROMPT, "rule": "gim"})["scores"])
    load(browser, opened, text=PROMPT, other=OTHER, rule="gim")  # two runs have none
    wait(browser, lambda: several(browser, ".graph .t"))
    assert not several(browser, "#rule")
    assert not one(browser, "#error").is_displayed()


def test_pins_and_groups_are_in_the_link_and_undone(browser, opened):
    def seen():
        script = """const marks = (of) => [...document.querySelectorAll(`.graph-card ${of}`)];
        const all = (of) => marks(of).map((mark) => mark.dataset.node);
        return [all('.t.pinned'), all('.t[data-node^="#"]'), document.querySelector('.graph-card .by').value]"""
        return browser.execute_script(script)

    def press(selector):
        browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
        browser.switch_to.active_element.send_keys("p")

    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    nodes = [mark.get_attribute("data-node") for mark in several(browser, '.graph .t[data-node*="@"]')[:2]]
    assert seen() == [[], [], ""]
    for number, node in enumerate(nodes):
        press(f'.graph [data-node="{node}"]')
        wait(browser, lambda number=number: browser.current_url.count("%40") > number)
    assert sorted(seen()[0]) == sorted(nodes)
    one(browser, ".graph-card .name").send_keys("<b>mine</b>")
    one(browser, ".graph-card .join").click()
    wait(browser, lambda: seen() == [[], ["#0"], ""])
    choose = "const s = document.querySelector('.by'); s.value = 'layer'"
    browser.execute_script(f"{choose}; s.dispatchEvent(new Event('change', {{bubbles: true}}))")
    wait(browser, lambda: "%22by%22%3A%22layer%22" in browser.current_url)
    link = browser.current_url
    browser.get("about:blank")
    browser.get(link)
    wait(browser, lambda: several(browser, '.graph [data-node="#0"]'))
    assert seen() == [[], ["#0"], "layer"]
    assert one(browser, '.graph [data-node="#0"] text').get_attribute("textContent") == "<b>mine</b>"
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    press(f'.graph [data-node="{nodes[0]}"]')
    wait(browser, lambda: seen()[0] == nodes[:1] and "arranged" in browser.current_url)
    one(browser, "#undo").click()
    wait(browser, lambda: seen()[0] == [])
    one(browser, "#redo").click()
    wait(browser, lambda: seen()[0] == nodes[:1])
    load(browser, opened, text=PROMPT, arranged='{"groups": [["#0", "x", ["no", "node"]], 3], "pinned": {}}')
    wait(browser, lambda: several(browser, ".graph .t"))
    settled(browser)
    assert seen() == [[], [], ""]


def test_the_graph_is_exported_and_its_code_runs(browser, opened, model, session, tmp_path):
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    view = session.view("graph", {"text": PROMPT})
    names = {"model": model}
    exec(one(browser, ".graph-card .code").get_attribute("data-code"), names)
    assert len(names["result"].nodes) == view["count"] + 1
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    one(browser, ".graph-card .menu summary").click()
    for ending in ("csv", "svg", "png"):
        one(browser, f'.graph-card [data-save="{ending}"]').click()
    files = [tmp_path / f"graph.{ending}" for ending in ("csv", "svg", "png")]
    wait(browser, lambda: all(file.exists() and file.stat().st_size for file in files))
    table = pandas.read_csv(files[0])
    assert table["weight"].tolist() == pytest.approx([weight for *_, weight in view["edges"]])
    root = ElementTree.parse(files[1]).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert 60 <= len(root.findall(".//svg:path", space)) < 80
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_the_keyboard_does_what_the_pointer_does(browser, opened):
    from selenium.webdriver.common.keys import Keys

    def press(*keys):
        for key in keys:
            browser.switch_to.active_element.send_keys(key)

    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    one(browser, '.tokens [data-at="34"]').send_keys(Keys.ARROW_LEFT)
    assert browser.switch_to.active_element.get_attribute("data-at") == "33"
    press(Keys.ENTER)
    wait(browser, lambda: "query=33" in browser.current_url)
    settled(browser)
    assert browser.switch_to.active_element.get_attribute("data-at") == "33"  # it is drawn anew and stays focused
    press("z")
    wait(browser, lambda: "query" not in browser.current_url)
    settled(browser)
    one(browser, '.components [data-cell="0,0"]').send_keys(Keys.ARROW_DOWN)
    press(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("data-cell") == "1,1"
    press(Keys.ENTER)
    wait(browser, lambda: several(browser, ".head"))
    settled(browser)
    press(Keys.ESCAPE)
    wait(browser, lambda: not several(browser, ".head"))
    settled(browser)
    browser.execute_script("document.querySelector('.graph [data-node=\"MLP2@34\"]').focus()")
    below = ""
    while not below.startswith("L"):  # what enters it most, down to a head
        press(Keys.ARROW_DOWN)
        below = browser.switch_to.active_element.get_attribute("data-node")
    assert browser.switch_to.active_element.get_attribute("aria-pressed") == "true"
    press(Keys.ENTER, Keys.ENTER)
    wait(browser, lambda: below.removesuffix("@34") in one(browser, ".head h2").text)
    settled(browser)
    assert browser.switch_to.active_element.get_attribute("data-node") == below
    press("/")
    assert browser.switch_to.active_element.get_attribute("id") == "text"


def test_a_feature_is_opened(browser, with_features):
    explorer = Explorer(with_features, 0).start()
    try:
        load(browser, explorer, text=PROMPT)
        view = with_features.view("features", {"text": PROMPT})
        shown = values(browser, ".features > .bars .value")
        assert shown == pytest.approx([*(row["score"] for row in view["top"]), view["others"]], abs=1e-5)
        one(browser, ".features .bars button").click()
        wait(browser, lambda: several(browser, ".feature"))
        assert one(browser, ".feature h2").text == "F357 · forms of to be"
        feature = with_features.view("feature", {"text": PROMPT, "feature": 357, "at": 34})
        tokens = [float(chip.get_attribute("title")) for chip in several(browser, ".feature .chip")]
        assert tokens == pytest.approx(feature["scores"], abs=1e-5)
        assert values(browser, ".feature .bars .value") == pytest.approx([row["score"] for row in feature["promotes"]])
    finally:
        explorer.close()


def test_what_is_refused_in_one_view_leaves_the_others(browser, opened, session, monkeypatch):
    def refuse(question):
        raise tlens.UnsupportedModelError("no graph of this model")

    monkeypatch.setitem(session._views, "graph", refuse)
    load(browser, opened, text=PROMPT)
    assert "no graph of this model" in one(browser, ".refused").text
    assert several(browser, ".tokens .chip")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser, opened, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        load(browser, opened, text=PROMPT, node="L1H0", **HEAD)
        assert browser.execute_script(CONTRAST) > 4.5  # WCAG AA
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


CONTRAST = """
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const over = (colours) => {  // painted one over the other, as the browser itself mixes them
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const bright = (c) => c.reduce((sum, v, i) => sum + linear(v / 255) * [.2126, .7152, .0722][i], 0);
    const grounds = (e) => e ? [...grounds(e.parentElement), getComputedStyle(e).backgroundColor] : [];
    const texts = '.chip, .matrix button, .soft, small, .sum, .sum b, .value, .name, h2, h3, .main';
    const all = document.querySelectorAll(texts);
    return Math.min(...[...all].filter((e) => e.checkVisibility()).map((e) => {
        const ground = grounds(e);
        const pair = [over(ground), over([...ground, getComputedStyle(e).color])].map(bright);
        return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    }))"""
"""The least contrast between a text and what lies behind it."""


def test_text_of_a_prompt_is_text(browser, opened):
    load(browser, opened, text="<img src=x onerror=document.title='hit'><script>document.title='hit'</script>")
    assert browser.title == "demo · Explorer"
    assert not several(browser, "main img, main script")


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out(browser, opened, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        states = [{"node": "L1H0", **HEAD}, {"node": "MLP2", "pick": "MLP2@34"}, {"other": OTHER, "nodes": 120}]
        for state in ({"text": PROMPT, **state} for state in states):
            load(browser, opened, **state)
            browser.execute_script(  # as many columns as a deep model has layers
                "for (const row of document.querySelectorAll('.components tr')) "
                "for (let more = 0; more < 60; more++) row.append(row.lastChild.cloneNode(true))"
            )
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
