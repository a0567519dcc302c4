"""`target="first-choice"` and `minus="runner-up"`: tokens named by their logits, wherever a token can be named."""

import inspect

import pytest
import torch
from changed.questions import TARGET, TOKENS, Setting
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, generation, passes
from tensorlens_tl.compress.effect import CompressionEffect
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import FIRST_CHOICE, RUNNER_UP
from tensorlens_tl.testing import model_names, tiny_model
from tensorlens_tl.testing.models import random_input

NAME = "bridge/gpt2"
FACES = (circuits, compress, generation, passes)
CLASSES = (tlens.FrozenOperator, circuits.HeadMap, generation.FrozenGeneration, CompressionEffect)
ELSEWHERE = {"attribute_generation", "FrozenGeneration.attribute", "FrozenGeneration.label", "pixel_scores"}
"""Whose target is no token that is named here: tests below, and in test_generation."""


class Runs(Setting):
    """A model and another one of the same tokens, with passes of two prompts."""

    def __init__(self):
        super().__init__(tiny_model(NAME))
        self.other = tiny_model(NAME, seed=1)
        self.freeze()

    @property
    def circuit(self):
        return circuits.edge_scores(self.frozen, self.corrupted, TARGET).circuit(20)

    @property
    def effect(self):
        return compress.compression_effect(self.frozen, self.plan)


CALLS = {
    "compare_models": lambda s, **how: circuits.compare_models(s.other, s.model, torch.tensor([TOKENS]), **how),
    "contribution_graph": lambda s, **how: circuits.contribution_graph(s.frozen, **how),
    "edge_scores": lambda s, **how: circuits.edge_scores(s.frozen, s.corrupted, **how),
    "feature_effects": lambda s, **how: circuits.feature_effects(s.found, **how),
    "logit_attribution": lambda s, **how: circuits.logit_attribution(s.frozen, **how),
    "patch_scores": lambda s, **how: circuits.patch_scores(s.frozen, s.corrupted, **how),
    "logit_lens": lambda s, **how: circuits.logit_lens(s.frozen, **how),
    "paths": lambda s, **how: circuits.paths(s.frozen, **how),
    "routes": lambda s, **how: circuits.routes(tlens.difference(s.frozen, s.corrupted), **how),
    "run_circuits": lambda s, **how: circuits.run_circuits(s.frozen, s.corrupted, s.circuit, **how),
    "top_paths": lambda s, **how: circuits.top_paths(s.frozen, **how),
    "total_effects": lambda s, **how: circuits.total_effects(s.frozen, **how),
    "FrozenOperator.gradient": lambda s, **how: s.op.gradient(**how),
    "FrozenOperator.target": lambda s, **how: s.op.target(**how),
    "FrozenOperator.totals": lambda s, **how: s.op.totals(**how),
    "HeadMap.target": lambda s, **how: s.head.target(**how),
    "CompressionEffect.target": lambda s, **how: s.effect.target(**how),
}


@pytest.fixture(scope="module")
def runs():
    return Runs()


def taking_minus():
    """The public functions that can be told another token."""
    named = {name: getattr(face, name) for face in FACES for name in face.__all__}
    named |= {f"{of.__name__}.{name}": member for of in CLASSES for name, member in vars(of).items() if name[0] != "_"}
    for name, function in named.items():
        if inspect.isfunction(function) and "minus" in inspect.signature(function).parameters:
            yield name


def methods_taking_minus():
    return [name for name in tlens.list_methods() if "minus" in tlens.get_method(name).options]


def runner_up(model, tokens, target, query=-1):
    logits = model(tokens).detach()[:, query].clone()
    logits[:, target] = -torch.inf
    return logits.argmax(-1)


def numbers(result):
    """The scores of a result."""
    if isinstance(result, tlens.ContributionGraph):
        return torch.tensor(result.to_dataframe()["weight"].to_list())
    return getattr(result, "scores", result)


def test_every_function_that_takes_another_token_is_called_here():
    assert set(taking_minus()) == set(CALLS) | ELSEWHERE


@pytest.mark.parametrize("name", CALLS)
def test_the_runner_up_is_the_token_named(name, runs):
    other = int(runner_up(runs.model, torch.tensor([TOKENS]), TARGET))
    said = numbers(CALLS[name](runs, target=TARGET, minus=RUNNER_UP))
    assert torch.equal(said, numbers(CALLS[name](runs, target=TARGET, minus=other)))
    assert not torch.equal(said, numbers(CALLS[name](runs, target=TARGET, minus=other - 1)))


@pytest.mark.parametrize("name", CALLS)
def test_the_first_choice_is_the_prediction(name, runs):
    """Of two runs, that of the first."""
    first = runs.model
    if name == "compare_models":  # from the other model to this one
        assert not torch.equal(*(model(torch.tensor([TOKENS]))[:, -1].argmax(-1) for model in (runs.other, first)))
    target = int(first(torch.tensor([TOKENS]))[0, -1].argmax())
    said = numbers(CALLS[name](runs, target=FIRST_CHOICE, minus=RUNNER_UP))
    other = int(runner_up(first, torch.tensor([TOKENS]), target))
    assert torch.equal(said, numbers(CALLS[name](runs, target=target, minus=other)))
    alone = numbers(CALLS[name](runs, target=FIRST_CHOICE))
    assert torch.equal(alone, numbers(CALLS[name](runs, target=target)))
    assert not torch.equal(alone, said)


OF_TWO_RUNS = {
    "routes": lambda s, **how: circuits.routes(tlens.difference(*s), **how),
    "attribute": lambda s, **how: tlens.attribute(tlens.difference(*s), **how),
    "FrozenOperator.target": lambda s, **how: tlens.difference(*s).operator().target(**how),
}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"compare_models", "routes"}))
def test_left_out_it_is_the_first_choice_against_the_runner_up(name, runs):
    said = numbers(CALLS[name](runs))
    assert torch.equal(said, numbers(CALLS[name](runs, target=FIRST_CHOICE, minus=RUNNER_UP)))


@pytest.mark.parametrize("method", [name for name in methods_taking_minus() if name != "decompx"])
def test_every_method_contrasts_the_prediction(method, runs):
    """Whether it is called by `attribute` or as a function of a pass."""
    frozen = tlens.freeze(runs.model, some_tokens(batch=2, pos=6))
    said = tlens.attribute(frozen, method=method, query=[-2, -1])
    named = tlens.attribute(frozen, FIRST_CHOICE, minus=RUNNER_UP, method=method, query=[-2, -1])
    alone = tlens.get_method(method).function(frozen, query=[-2, -1])
    assert torch.equal(said.scores, named.scores)
    assert torch.equal(said.scores, alone.scores)
    assert (said.target, said.options) == (named.target, named.options)


def two_predictions(model):
    """Passes of two prompts after which the model predicts two tokens, and these."""
    first = tlens.freeze(model, torch.tensor([TOKENS]))
    prompts = (tlens.freeze(model, some_tokens(1, len(TOKENS), seed)) for seed in range(10))
    second = next(
        other for other in prompts if not torch.equal(first.logits(-1).argmax(-1), other.logits(-1).argmax(-1))
    )
    return (first, second), [int(run.logits(-1)[0, -1].argmax()) for run in (first, second)]


@pytest.mark.parametrize("name", OF_TWO_RUNS)
def test_two_runs_contrast_what_they_predict(name, runs):
    passes, (first, second) = two_predictions(runs.model)
    said = numbers(OF_TWO_RUNS[name](passes))
    assert torch.equal(said, numbers(OF_TWO_RUNS[name](passes, target=first, minus=second)))


def test_two_runs_with_one_prediction_contrast_it_with_its_runner_up(runs):
    """Prompt by prompt: of two prompts one keeps its prediction."""
    passes, (predicted, other) = two_predictions(runs.model)
    first = tlens.freeze(runs.model, torch.tensor([TOKENS, TOKENS]))
    change = tlens.difference(first, tlens.freeze(runs.model, torch.cat([run.tokens for run in passes])))
    said = tlens.attribute(change)
    minus = [int(runner_up(runs.model, torch.tensor([TOKENS]), predicted)), other]
    assert torch.equal(said.scores, tlens.attribute(change, [predicted, predicted], minus=minus).scores)
    assert said.total[0] == 0


@pytest.mark.parametrize("method", methods_taking_minus())
def test_every_method_explains_the_prediction(method, runs):
    model, tokens = runs.model, some_tokens(batch=2, pos=6)
    options = {"method": method, "query": [-2, -1]}
    if method == "decompx":
        options["aggregate"] = "target"
    said = tlens.attribute(model, tokens, FIRST_CHOICE, **options)
    predicted = model(tokens).detach()[:, [-2, -1]].argmax(-1).tolist()
    assert torch.equal(said.scores, tlens.attribute(model, tokens, predicted, **options).scores)
    assert said.target.endswith("logit of the first choice")


def test_a_prediction_to_hold_a_token_against(runs):
    """Of a token that is the prediction itself nothing is left."""
    tokens = torch.tensor([TOKENS])
    predicted = int(runs.model(tokens)[0, -1].argmax())
    other = (predicted + 1) % 5
    said = tlens.attribute(runs.model, tokens, other, minus=FIRST_CHOICE)
    assert torch.equal(said.scores, tlens.attribute(runs.model, tokens, other, minus=predicted).scores)
    with pytest.raises(InvalidInputError, match="same token"):
        tlens.attribute(runs.model, tokens, FIRST_CHOICE, minus=FIRST_CHOICE)


def test_a_tokenizer_that_has_the_word_is_refused(demo_model, monkeypatch):
    """Nobody can say then which of the two is meant."""
    frozen = tlens.freeze(demo_model, "Return the value")
    predicted = frozen.operator().target(FIRST_CHOICE).total
    assert torch.equal(predicted, frozen.operator().target(tlens.evaluate.predictions(frozen)[0].tolist()).total)
    monkeypatch.setattr("tensorlens_tl.passes.target.text_ids", lambda view, text: [7])
    for question in ({"target": FIRST_CHOICE}, {"target": 5, "minus": RUNNER_UP}):
        with pytest.raises(InvalidInputError, match=r"also the text of 7.*Pass that id"):
            frozen.operator().target(**question)


@pytest.mark.parametrize("method", methods_taking_minus())
def test_every_method_takes_it(method, runs):
    model, tokens = runs.model, some_tokens(batch=2, pos=6)
    options = {"method": method, "target": TARGET, "query": [-2, -1]}
    if method == "decompx":
        options["aggregate"] = "target"
    others = torch.stack([runner_up(model, tokens, TARGET, query) for query in (-2, -1)], dim=1)
    said = tlens.attribute(model, tokens, minus=RUNNER_UP, **options)
    assert torch.equal(said.scores, tlens.attribute(model, tokens, minus=others.tolist(), **options).scores)
    assert said.target.endswith("− the runner-up")


def test_two_models_are_asked_about_one_token():
    """The runner-up of the first; the second model's may be another."""
    tuned, base = tiny_model(NAME), tiny_model(NAME, seed=1)
    tokens = some_tokens(batch=3, pos=6)
    others = runner_up(tuned, tokens, TARGET)
    assert not torch.equal(others, runner_up(base, tokens, TARGET))
    change = circuits.compare_models(base, tuned, tokens, TARGET, RUNNER_UP)
    for model, number in ((tuned, change.tuned), (base, change.base)):
        logits = model(tokens).detach()[:, -1]
        expected = logits[:, TARGET] - logits.gather(1, others[:, None])[:, 0]
        assert torch.allclose(number[:, 0], expected, atol=1e-9)


def test_in_batches_and_one_for_each_prompt(runs):
    tokens = [some_tokens(1, size, size)[0].tolist() for size in (4, 6, 5)]
    whole = tlens.attribute(runs.model, tokens, TARGET, minus=RUNNER_UP)
    others = [int(runner_up(runs.model, torch.tensor([row]), TARGET)) for row in tokens]
    some = tlens.attribute(runs.model, tokens, TARGET, minus=[others[0], RUNNER_UP, others[2]])
    parts = tlens.attribute(runs.model, tokens, TARGET, minus=RUNNER_UP, memory="20KB")
    for result in (some, parts):
        assert torch.allclose(result.total, whole.total, atol=1e-9)


def test_classes_of_images_have_a_runner_up():
    model = tiny_model(next(name for name in model_names("signals") if "vit" in name))
    frozen = tlens.freeze(model, random_input(model, 2, torch.Generator().manual_seed(0)))
    logits = frozen.view.logits(frozen.unembedded()[:, 0])
    others = logits.scatter(1, torch.full((len(logits), 1), 1), -torch.inf).argmax(-1)
    said = tlens.attribute(frozen, 1, minus=RUNNER_UP)
    assert torch.equal(said.scores, tlens.attribute(frozen, 1, minus=others.tolist()).scores)
    assert torch.equal(
        tlens.pixel_scores(frozen, 1, RUNNER_UP).scores, tlens.pixel_scores(frozen, 1, others.tolist()).scores
    )


def test_it_is_no_target_and_needs_logits(runs):
    with pytest.raises(InvalidInputError, match="target"):
        runs.op.target(RUNNER_UP)
    scaled = tiny_model(NAME)
    scaled.unembed.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UnsupportedModelError, match="logits"):
        tlens.freeze(scaled, torch.tensor([TOKENS])).operator().target(TARGET, RUNNER_UP)


@pytest.mark.parametrize("token", ["first-choice", ["first-choice"], [["first-choice"]]], ids=str)
@pytest.mark.parametrize("place", ["target", "minus"])
def test_a_token_named_by_its_rank_is_no_side_of_a_subtraction(runs, token, place):
    """However it is spelled: each side has another one."""
    how = {"target": TARGET} | {place: token}
    for question in (lambda f: tlens.attribute(f, **how), lambda f: circuits.logit_attribution(f, **how)):
        sides = [question(tlens.freeze(model, torch.tensor([TOKENS]))) for model in (runs.model, runs.other)]
        with pytest.raises(tlens.InvalidInputError, match="may have another first choice"):
            sides[0] - sides[1]


@pytest.mark.parametrize("minus", ["first-choice", "runner-up", [["runner-up", 5]]], ids=str)
def test_generated_text_beside_a_ranked_token_is_no_side_either(runs, minus):
    written = generation.freeze_generation(runs.model, [TOKENS], continuation=[[9, 10]])
    result = written.attribute(minus=minus)
    with pytest.raises(tlens.InvalidInputError, match="may have another"):
        result - result


@pytest.mark.parametrize(("name", "word"), [("minus", "runnerup"), ("target", "first choice")])
def test_a_misspelt_rank_is_a_near_miss(demo_model, name, word):
    frozen = tlens.freeze(demo_model, "Return the name of the")
    with pytest.raises(InvalidInputError, match="Did you mean"):
        tlens.attribute(frozen, **{"target": " value", name: word})
