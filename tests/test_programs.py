"""Models built from programs do what they say, and their truth is true: of the live model and of changed prompts."""

import importlib
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import close

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.commands import main
from tensorlens_tl.demo import programs
from tensorlens_tl.results import ARROW
from tensorlens_tl.results.statistics import auroc
from tensorlens_tl.testing import model_names

HAS_HOOKED = any(name.startswith("hooked/") for name in model_names())
KINDS = ["hooked", "bridge"] if HAS_HOOKED else ["bridge"]
COPYING = [name for name in demo.PROGRAMS if name != "counting"]
VERSIONS = [(kind, norm) for kind in KINDS for norm in (False, True)]
CHANGES = [(name, change) for name in demo.PROGRAMS for change in demo.program(name).changes]
PROMPTS = 4


@cache
def model_of(name, kind=KINDS[-1], norm=False):
    return demo.program(name).model(kind, norm=norm, dtype=torch.float64)


@pytest.fixture(params=VERSIONS, ids=lambda version: f"{version[0]}{'-norm' * version[1]}")
def version(request):
    return request.param


@pytest.mark.parametrize("of", demo.PROGRAMS)
def test_every_answer_is_right_and_a_true_source_is_first(of, version):
    """At every query: the answer by a clear margin, the frozen map exact, and by the target's scores a source first."""
    program, model = demo.program(of), model_of(of, *version)
    tokens = program.prompts(PROMPTS, seed=1)
    with torch.no_grad():
        logits = model(tokens)
    frozen = tlens.freeze(model, tokens)
    assert max(frozen.errors.values()) <= 1e-9
    tasks = [program.answers(PROMPTS, seed=1, query=query) for query in program.queries]
    answers, queries = torch.stack([task.answers for task in tasks], dim=1), list(program.queries)
    largest = logits[:, queries].topk(2)
    assert torch.equal(largest.indices[..., 0], answers)
    assert float(largest.values.diff().max()) < -8
    found = frozen.operator().target(answers.tolist(), query=queries)
    assert float(found.gap.max()) <= 1e-9
    assert close(found.total, logits[:, queries].gather(2, answers[..., None])[..., 0])
    first = found.scores.argmax(-1)
    for number, task in enumerate(tasks):
        assert torch.equal(task.tokens, tokens[:, : queries[number] + 1])
        assert bool(task.sources[torch.arange(PROMPTS), first[:, number]].all())


@pytest.mark.parametrize("of", demo.PROGRAMS)
def test_the_truth_of_every_query_is_what_heads_do(of):
    """The heads of the paths attend where it says, the copying ones to nothing else; and every claim is stated."""
    program, frozen = demo.program(of), tlens.freeze(model_of(of, norm=True), demo.program(of).prompts(2, seed=2))
    for row, tokens in enumerate(frozen.tokens):
        for query in program.queries:
            truth = program.truth(tokens, query)
            moving = {place for path in truth.paths for place in path[1:]}
            assert moving <= {(f"L{why.layer}H{why.head}", why.query) for why in truth.choices}
            assert all(path[-1][1] == query for path in truth.paths)
            for why in truth.choices:
                given = frozen.pattern(why.layer)[row, why.head, why.query]
                assert all((why.query_tokens, why.key_tokens, why.query_parts, why.key_parts))
                if of == "counting":
                    others = given[sorted(truth.sources)]
                    assert close(others, given[why.key].expand(len(others)))
                    assert float(given.sum() - others.sum() - given[0]) < 1e-9  # all else is the first token's
                else:
                    assert float(given[why.key]) >= 1 - 1e-9


@pytest.mark.skipif(not HAS_HOOKED, reason="both classes are there in TransformerLens 3.9")
@pytest.mark.parametrize("norm", [False, True])
def test_both_classes_are_the_same_model(norm):
    for name in ("reverse", "counting"):
        tokens = demo.program(name).prompts(3)
        with torch.no_grad():
            made = [model_of(name, kind, norm)(tokens) for kind in ("hooked", "bridge")]
        assert close(*made, atol=1e-12)


def test_norms_hardly_change_a_program():
    """Each norm multiplies what it reads by a factor within 1e-3 of 1, and centring does nothing."""
    model = model_of("two-hop", norm=True)
    frozen = tlens.freeze(model, demo.program("two-hop").prompts(PROMPTS))
    for layer in range(frozen.n_layers):
        x = frozen.resid_pre(layer)
        assert float(x.mean(-1).abs().max()) < 1e-12
        ratio = frozen.maps.norm(layer, "ln1")(x).norm(dim=-1) / x.norm(dim=-1)
        assert float((ratio - 1).abs().max()) < 1e-3


@pytest.mark.parametrize(("of", "change"), CHANGES)
@pytest.mark.few(4)
def test_components_that_are_true_are_found(of, change):
    """By patching the live model and by the exact difference on every change; by what explains the clean prompt alone
    always."""
    task = demo.program(of).components(2, seed=3, change=change)
    methods = ["logit_attribution", "contribution_graph", "frozen", "difference", "patching"]
    result = evaluate.known_components(model_of(of, norm=change == "source"), task, methods)
    assert result.settings["accuracy"] == 1
    for method in ("contribution_graph", "difference", "patching"):
        rows = result.values[:, result.methods.index(method)]
        assert bool((rows == 1).all()), (method, rows.mean(-1))
    direct = result.values[:, 0]
    assert bool((direct[:3] == 1).all())
    assert bool(direct[3:].isnan().all())  # it scores no edges
    held = result.mean("node recall", "frozen")
    assert held == 1 if change == "source" else held < 1  # a frozen pattern does not show what chose it


def test_edges_that_are_true_are_true_of_the_live_model():
    """Alone they give the clean answer, all others corrupted; and without any one of them it is lost."""
    for of, change in [*((of, change) for of, change in CHANGES if change == "choice"), ("counting", "source")]:
        task = demo.program(of).components(2, seed=4, change=change)
        pairs, model = task.pairs, model_of(of)
        clean, corrupted = tlens.freeze(model, pairs.clean), tlens.freeze(model, pairs.corrupted)
        asked = {"target": pairs.target.tolist(), "minus": pairs.minus.tolist()}
        scores = tlens.circuits.edge_scores(clean, corrupted, **asked)
        circuits = []
        for left_out in [None, *sorted(task.edges)]:
            selection = torch.zeros_like(scores.exists)
            for source, end in (edge.split(ARROW) for edge in task.edges - {left_out}):
                selection[scores.sources.index(source), scores.destinations.index(end)] = True
            circuits.append(replace(scores.circuit(0), selection=selection))
        numbers = tlens.circuits.run_circuits(clean, corrupted, circuits, **asked)
        share = (numbers - scores.corrupted) / (scores.clean - scores.corrupted)
        assert close(share[0], torch.ones_like(share[0]), 1e-6)
        assert float(share[1:].max()) < 0.9, (of, change)


@pytest.mark.parametrize("of", demo.PROGRAMS)
def test_what_chose_the_attention_is_found(of):
    program = demo.program(of)
    result = evaluate.known_attention(model_of(of, norm=True), program.attention(4, seed=5))
    assert bool((result.values[:, 0] == 1).all())
    assert float(result.values[:, 1].mean()) < 0.7  # at random
    assert result.settings["gap"] <= 1e-9
    assert len(result.units) == 4 * len(program.truth(program.prompts(1)[0]).choices)


def test_known_answers_of_a_program():
    """Whole-vector maps follow the query's own position, as the page says; input × gradient loses a normed source."""
    program, methods = demo.program("previous-token"), ["tensorlens target", "tensorlens norm", "input-x-gradient"]
    task = program.answers(8, seed=6)
    result = evaluate.known_answer(model_of("previous-token", norm=True), task, methods)
    assert result.settings["accuracy"] == 1
    assert result.mean("mass", "tensorlens target") == pytest.approx(1)
    assert result.mean("mrr", "tensorlens norm") == 0.5
    frozen = tlens.freeze(model_of("previous-token", norm=True), task.tokens)
    own = frozen.operator().norm().scores[:, 0].argmax(-1)
    assert bool((own == task.tokens.shape[1] - 1).all())
    assert result.mean("mass", "input-x-gradient") < 1e-3
    plain = evaluate.known_answer(model_of("previous-token"), task, methods)
    assert plain.mean("mass", "input-x-gradient") == pytest.approx(1)


def test_auroc_by_counting_pairs():
    scores, true = torch.tensor([3.0, 1, 1, 0, 2]), torch.tensor([True, True, False, False, False])
    pairs = [(a > b) + 0.5 * (a == b) for a in (3, 1) for b in (1, 0, 2)]
    assert auroc(scores, true) == pytest.approx(sum(pairs) / 6)
    assert auroc(-scores, true) == pytest.approx(1 - sum(pairs) / 6)
    assert auroc(torch.zeros(5), true) == 0.5
    for every in (torch.ones(5), torch.zeros(5)):
        assert auroc(scores, every.bool()) != auroc(scores, every.bool())  # NaN


def test_precision_and_recall_by_hand():
    """Two of the named nodes are true, one of which is under the threshold; one is found wrongly."""
    module = importlib.import_module("tensorlens_tl.evaluate.known")
    scores = {"a": -4.0, "b": 0.1, "c": 1.0, "d": 0.0}
    assert module._ranking_metrics(scores, frozenset("ab"), 0.05) == (3 / 4, 1 / 2, 1 / 2)
    assert module._ranking_metrics(scores, frozenset("ab"), 0.025) == (3 / 4, 2 / 3, 1)


def test_a_program_by_name_from_the_shell(capsys):
    assert main(["evaluate", "known-answer", "--model", "program:sort:norm", "-n", "4", "--methods", "random"]) == 0
    assert "known answers: sort" in capsys.readouterr().out
    asked = ["evaluate", "known-components", "--model", "program:induction", "-n", "2", "--change", "choice"]
    assert main([*asked, "--methods", "frozen"]) == 0
    assert "induction, choice changed" in " ".join(capsys.readouterr().out.split())
    asked = [
        "evaluate",
        "patching",
        "--model",
        "program:sort",
        "--change",
        "question",
        "-n",
        "2",
        "--methods",
        "frozen",
    ]
    assert main(asked) == 0
    assert "sort, choice changed" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", "known-attention", "-n", "2"]) == 0
    assert "known attention: induction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["known-answer", "--model", "program:srt"], "program='srt'; use one of 'previous-token'"),
        (["known-components", "--model", "name/of-model"], "this is known of programs only"),
        (["known-components", "--model", "program:two-back", "--change", "choice"], "two-back has 'source'"),
        (["known-attention", "--methods", "norm"], "methods: 'norm'; use some of 'qk_attribution', 'random'"),
        (["perturbation", "--model", "program:sort"], "has no text of its own"),
    ],
)
def test_what_the_shell_refuses(capsys, arguments, message):
    assert main(["evaluate", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_is_refused():
    program, model = demo.program("sort"), model_of("sort")
    for call, message in [
        (lambda: demo.program("srt"), "program='srt'; use one of"),
        (lambda: program.model("hookd"), "kind='hookd'; use 'hooked' or 'bridge'"),
        (lambda: program.prompts(0), "prompts=0: pass at least 1"),
        (lambda: program.answers(query=2), "query=2: sort gives answers at"),
        (lambda: program.components(change="question"), "change='question': sort has 'source', 'choice'"),
        (lambda: evaluate.known_components(model, program.answers()), "task=KnownAnswers: pass KnownComponents"),
        (lambda: evaluate.known_components(model, program.components(2), ["ablation"]), "methods: 'ablation'"),
        (lambda: evaluate.known_components(model, program.components(2), threshold=0.0), "threshold=0.0: a share"),
        (lambda: evaluate.known_attention(model, program.answers()), "task=KnownAnswers: pass KnownAttention"),
    ]:
        with pytest.raises(tlens.InvalidInputError, match=message):
            call()
    if not HAS_HOOKED:
        with pytest.raises(tlens.InvalidInputError, match="TransformerLens 4 has no HookedTransformer"):
            program.model("hooked")


def test_a_truth_that_the_model_does_not_have_is_refused():
    of_two, one = demo.program("two-back"), model_of("previous-token")
    with pytest.raises(tlens.InvalidInputError, match="answers both prompts of none"):
        evaluate.known_components(one, of_two.components(2))
    for method, what in [
        ("patching", "node L1H0"),
        ("contribution_graph", "place"),
        ("logit_attribution", "node L1H0"),
    ]:
        with pytest.raises(tlens.InvalidInputError, match=f"no {what}"):
            evaluate.known_components(one, of_two.components(2), method, only_correct=False)
    with pytest.raises(tlens.InvalidInputError, match="layer=1"):
        evaluate.known_attention(one, of_two.attention(2))
    task = of_two.attention(2)
    other = replace(task, choices=(replace(task.choices[0], query_parts=frozenset({"MLP7"})),))
    with pytest.raises(tlens.InvalidInputError, match="L0H0 reads no component 'MLP7'"):
        evaluate.known_attention(model_of("two-back"), other)


def test_malformed_truths_are_refused():
    task, attention = demo.program("sort").components(2), demo.program("sort").attention(2)
    (choice,) = attention.choices
    for changed, message in [
        ({"paths": task.paths[:1]}, "paths of 1 prompts"),
        ({"paths": ((), ())}, "without a path"),
        ({"nodes": frozenset()}, "no true node"),
    ]:
        with pytest.raises(tlens.InvalidInputError, match=message):
            replace(task, **changed)
    for changed, message in [
        ({"key": choice.key[:1]}, "stated for"),
        ({"key": choice.key + 99}, "a position outside 0 to 10"),
        ({"key_tokens": (frozenset(), frozenset())}, "lacks a true source"),
        ({"query_parts": frozenset()}, "lacks a true source"),
    ]:
        other = replace(choice, **changed)
        with pytest.raises(tlens.InvalidInputError, match=message):
            replace(attention, choices=(other,))
    with pytest.raises(tlens.InvalidInputError, match="has no choices"):
        replace(attention, choices=())


def test_a_space_reads_what_was_written_to_it():
    spaces = programs.Spaces(first=2, second=3)
    matrix = torch.arange(6.0).reshape(2, 3)
    assert spaces.width == 5
    assert torch.equal(spaces.write("second", matrix) @ spaces.read("second"), matrix.double())
    assert not (spaces.write("second", matrix) @ spaces.read("first")).any()
