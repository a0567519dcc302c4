"""The shipped batteries catch what is broken, by name, and pass what is not."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from conftest import hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.algebra import ZERO, AffineMap, Attention, Linear, MixingMap, PositionwiseMap, RowPositions
from tensorlens_tl.core import FROZEN, RULES, Linearised, Rule, unchanged
from tensorlens_tl.core.rules import secant
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.testing import (
    check_attribution,
    check_map,
    check_method,
    check_model,
    check_rule,
    model_checks,
    model_names,
    parametrize_with_checks,
    tiny_model,
)
from tensorlens_tl.testing.method_checks import METHOD_CHECKS
from tensorlens_tl.testing.requirements import Untouched

GPT2, LLAMA, OPT = "bridge/gpt2", "bridge/llama", "bridge/opt"
LIVE_GQA = "hooked/gqa" if "hooked/gqa" in model_names() else LLAMA


# ------------------------------------------------------------------------------------------ maps


class Base(PositionwiseMap):
    """A right one: x·W + b. Each subclass below breaks one thing."""

    def __init__(self):
        self.W, self.b = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    @property
    def bias(self):
        return self.b

    def at(self, where):
        return self

    def norm_bound(self):
        return float(torch.linalg.matrix_norm(self.W.double(), 2))

    def _forward(self, x, affine):
        return x @ self.W + (self.b if affine else 0)

    def _backward(self, g, biases):
        if biases is not None:
            biases.append(g @ self.b)
        return g @ self.W.T


class WrongTranspose(Base):
    def _backward(self, g, biases):
        super()._backward(g, biases)
        return g @ self.W


class NoScaleInTheAdjoint(Base):
    def _backward(self, g, biases):
        return 1.0000001 * super()._backward(g, biases)


class DroppedBias(Base):
    def _forward(self, x, affine):
        return x @ self.W


class UndeclaredBias(Base):
    @property
    def bias(self):
        return ZERO


class BiasInTheLinearPart(Base):
    def _forward(self, x, affine):
        return x @ self.W + self.b


class BiasMissedByTheAdjoint(Base):
    def _backward(self, g, biases):
        return super()._backward(g, None)


class RowsMixed(Base):
    def _forward(self, x, affine):
        out = super()._forward(x, affine)
        return out if x.ndim == 3 else out - out.mean(0)


class RowsMixedBackwards(Base):
    def _backward(self, g, biases):
        out = super()._backward(g, biases)
        return out if g.ndim == 3 else out.flip(0)


class PromptsMixed(Base):
    def _forward(self, x, affine):
        return super()._forward(x, affine) + 0.1 * (x.flip(-3) @ self.W)

    def _backward(self, g, biases):
        return super()._backward(g, biases) + 0.1 * (g.flip(-3) @ self.W.T)


class Bent(Base):
    def _forward(self, x, affine):
        return super()._forward(x.relu(), affine)


class GroupsSwapped(Base):
    def push_groups(self, x, groups):
        return super().push_groups(x, groups).flip(0)


class Noisy(Base):
    def _forward(self, x, affine):
        return super()._forward(torch.nn.functional.dropout(x, 0.1), affine)


class Widened(Base):
    def _forward(self, x, affine):
        return super()._forward(x, affine).float()


class Narrowed(Base):
    def _backward(self, g, biases):
        return super()._backward(g, biases).float()


class InPlace(Base):
    def _forward(self, x, affine):
        return super()._forward(x.mul_(2) / 2, affine)


class OneChannelShort(Base):
    def _backward(self, g, biases):
        return super()._backward(g, biases)[..., 1:]


class Infinite(Base):
    def _forward(self, x, affine):
        return super()._forward(x, affine) / 0


class BiasedTranspose(Base):
    @property
    def T(self):
        return Linear(self.W.T.contiguous(), self.b)


class HeadsMixedUp(MixingMap):
    """Grouped-query attention whose adjoint reads key-value head ``h % kv`` instead of ``h // group``."""

    def __init__(self):
        self.right = Attention(torch.rand(2, 4, 3, 3, dtype=torch.float64), kv_heads=2)
        order = [0, 2, 1, 3]
        self.wrong = Attention(self.right.pattern[:, order], kv_heads=2)

    @property
    def bias(self):
        return ZERO

    def at(self, where):
        return self.right.at(where)

    def norm_bound(self):
        return self.right.norm_bound()

    def _forward(self, x, affine):
        return self.right._forward(x, affine)

    def _backward(self, g, biases):
        return self.wrong._backward(g, biases)


class Shifts(Base):
    """Says that it treats positions alone, and reads the one before."""

    def _forward(self, x, affine):
        return super()._forward(torch.nn.functional.pad(x, (0, 0, 1, 0))[..., :-1, :], affine)

    def _backward(self, g, biases):
        return torch.nn.functional.pad(super()._backward(g, biases), (0, 0, 0, 1))[..., 1:, :]


class PerPosition(Base):
    """A factor for each position, forgotten when it is cut."""

    def __init__(self):
        super().__init__()
        self.factor = torch.rand(3, 1, dtype=torch.float64)

    def _forward(self, x, affine):
        return super()._forward(x * self.factor[: x.shape[-2]], affine)

    def _backward(self, g, biases):
        return super()._backward(g, biases) * self.factor[: g.shape[-2]]

    def norm_bound(self):
        return super().norm_bound() * float(self.factor.max())


class CutAtRowsOnly(Base):
    """A cut to slices is right, a cut to one position per row forgets the bias."""

    def at(self, where):
        if isinstance(where, RowPositions):
            other = Base()
            other.W, other.b = self.W, 0 * self.b
            return other
        return self


class TooSmallABound(Base):
    def norm_bound(self):
        return 0.9 * super().norm_bound()


class NotCutAtAll(AffineMap):
    """Mixes positions, and hands out its own first positions whatever it is cut to."""

    def __init__(self):
        self.right = Attention(torch.rand(2, 1, 3, 3, dtype=torch.float64).tril(), kv_heads=1)

    bias, mixes = property(lambda self: ZERO), property(lambda self: True)

    def at(self, where):
        return self.right.at(slice(0, len(range(3)[where])))

    def norm_bound(self):
        return self.right.norm_bound()

    def _forward(self, x, affine):
        return self.right._forward(x, affine)

    def _backward(self, g, biases):
        return self.right._backward(g, biases)

    def _pull(self, g, here, there, reach, biases):
        return self.right._pull(g, here, there, reach, biases)


class PullsAllOfItself(NotCutAtAll):
    """Pulls to every position within reach, whatever is asked for."""

    def at(self, where):
        return self.right.at(where)

    def _pull(self, g, here, there, reach, biases):
        pulled = self.right._pull(g, here, reach, reach, biases)
        return pulled if there == reach else pulled[:, :, : len(there)]


BROKEN_MAPS = {
    WrongTranspose: "not the adjoint",
    NoScaleInTheAdjoint: "not the adjoint",
    HeadsMixedUp: "not the adjoint",
    DroppedBias: r"m\(0\) is not the bias|not push",
    UndeclaredBias: "is not push.x. . bias",
    BiasInTheLinearPart: "push is not linear|adds a bias",
    BiasMissedByTheAdjoint: "pull_with_bias misses",
    RowsMixed: "push mixes its rows",
    RowsMixedBackwards: "pull mixes its rows",
    PromptsMixed: "mixes prompts",
    Bent: "push is not linear",
    GroupsSwapped: "push_groups is not push",
    Noisy: "another result the second time",
    Widened: "push turns",
    Narrowed: "pull turns",
    InPlace: "writes to its input",
    OneChannelShort: "pull maps",
    Infinite: "not finite",
    BiasedTranspose: "the transpose has a bias",
    Shifts: "mixes says False",
    PerPosition: "cut to some positions it pushes otherwise",
    CutAtRowsOnly: "pull_between misses",
    TooSmallABound: "norm_bound is",
    NotCutAtAll: "cut to some positions it pushes otherwise",
    PullsAllOfItself: "pull_between .keys=.* is not pull",
}


@pytest.mark.parametrize("broken", BROKEN_MAPS)
def test_broken_maps_are_caught(broken):
    with pytest.raises(tlens.ConformanceError, match=BROKEN_MAPS[broken]):
        check_map(broken(), torch.zeros(2, 3, 4 if broken is HeadsMixedUp else 6, dtype=torch.float64))


@pytest.mark.parametrize("lacking", ["at", "norm_bound", "bias", "_forward", "_backward"])
def test_a_map_that_lacks_a_rule_cannot_be_made(lacking):
    rules = {name: member for name, member in vars(Base).items() if name != lacking}
    with pytest.raises(TypeError, match=lacking):
        type("Lacking", (PositionwiseMap,), rules)()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_map_passes(dtype):
    right = Base()
    right.W, right.b = right.W.to(dtype), right.b.to(dtype)
    check_map(right, torch.zeros(2, 3, 6, dtype=dtype))


@pytest.mark.parametrize(
    ("map", "x"), [(None, None), (Base(), None), (Base(), torch.zeros(3, 6)), (Base(), torch.zeros(1, 3, 6).long())]
)
def test_what_is_no_map(map, x):
    with pytest.raises(tlens.InvalidInputError, match="check_map"):
        check_map(map, x)


# ------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("name", sorted(RULES))
def test_built_in_rules_pass(name):
    assert check_rule(name, ["bridge/llama", "bridge/bert", "bridge/bart"]) == {}


def test_a_rule_that_refuses_a_model_says_why():
    refusals = check_rule("gim", ["bridge/mamba", "bridge/gpt2"])
    assert [*refusals] == ["bridge/mamba"]
    assert "is no softmax attention" in refusals["bridge/mamba"]
    assert check_rule("frozen", tiny_model("bridge/mamba")) == {}


class Bending(torch.autograd.Function):
    """A value whose gradient is bent by some function."""

    @staticmethod
    def forward(ctx, x, bend):
        ctx.bend = bend
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.bend(gradient), None


BROKEN_RULES = {
    "Rule.matmul changes the value of matmul": Rule(matmul=lambda f, x, y: 2 * f(x, y)),
    "under the rule": Rule(activation=lambda f, z: f(z) * (1 if z.shape[-1] == 4 else 2)),
    "of a zero target is not zero": Rule(activation=lambda f, z: Bending.apply(f(z), lambda gradient: gradient + 1)),
    "not linear in the target": Rule(activation=lambda f, z: Bending.apply(f(z), lambda gradient: gradient.abs())),
    "affine=True, and its scores and bias sum to": replace(FROZEN, activation=unchanged),
}


@pytest.mark.parametrize("message", BROKEN_RULES)
def test_broken_rules_are_caught(message):
    with pytest.raises(tlens.ConformanceError, match=message):
        check_rule(BROKEN_RULES[message], ["bridge/gpt2"])


def test_a_derivative_that_is_none_is_caught(monkeypatch):
    """All functions unchanged, but what calls them is not right."""
    ruled = Linearised._ruled

    def without_patterns(self, func, name, *given):
        out = ruled(self, func, name, *given)
        return out.detach() if name == "softmax" else out

    monkeypatch.setattr(Linearised, "_ruled", without_patterns)
    with pytest.raises(tlens.ConformanceError, match="the derivative and autograd's"):
        check_rule("tangent", ["bridge/gpt2"])


@pytest.mark.parametrize("rule", [secant(lambda x: (x, x)), "no-such-rule", None])
def test_what_is_no_rule_of_one_run(rule):
    with pytest.raises(tlens.InvalidInputError, match="rule="):
        check_rule(rule)


# ------------------------------------------------------------------------------------------ methods


def scores_of(frozen, query):
    return frozen.operator().in_out(query).scores


def made(frozen, scores, query, **fields):
    return tlens.Attribution.of(frozen, scores, method="broken", query=query, **fields)


def noisy(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, query) * (1 + 1e-12 * torch.rand((), dtype=torch.float64)), query)


def leaves_a_hook(frozen, *, query="all"):
    frozen.model.add_hook(frozen.points.blocks[0].resid_pre, lambda x, hook: x)
    return made(frozen, scores_of(frozen, query), query)


def leaves_gradients(frozen, *, query="all"):
    frozen.model(**frozen.inputs).sum().backward()
    return made(frozen, scores_of(frozen, query), query)


def changes_the_mode(frozen, *, query="all"):
    frozen.model.train()
    return made(frozen, scores_of(frozen, query), query)


def writes_to_weights(frozen, *, query="all"):
    scores = scores_of(frozen, query)
    with torch.no_grad():
        next(frozen.model.parameters()).add_(0)
    return made(frozen, scores, query)


def looks_ahead(frozen, *, query="all"):
    """Scores in place, but they depend on later tokens."""
    scores = scores_of(frozen, query)
    last = frozen.resid_pre(0)[torch.arange(len(frozen.tokens)), frozen.mask.sum(1) - 1].norm(dim=-1)
    return made(frozen, scores * last[:, None, None], query)


def scores_ahead(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, query) + frozen.mask[:, None] * frozen.mask[:, :, None] * 0.1, query)


def scores_padding(frozen, *, query="all"):
    scores = scores_of(frozen, query)
    every = 0.1 * torch.ones(2, *frozen.mask.shape[1:] * 2, dtype=scores.dtype)[: len(scores)].tril()
    rows = slice(None) if query == "all" else query if isinstance(query, list) else [query]
    return made(frozen, scores + every[:, rows], query)


def mixes_the_batch(frozen, *, query="all"):
    scores = scores_of(frozen, query)
    return made(frozen, scores - scores.mean(0) * (scores != 0), query)


def counts_padding(frozen, *, query="all"):
    scores = scores_of(frozen, query)
    return made(frozen, scores / frozen.tokens.shape[1], query)


def overstates(frozen, *, query="all"):
    found = frozen.operator().in_out(query)
    return made(frozen, found.scores, query, bias=found.bias * 1.001, total=found.total, additive=True)


def claims_without_a_total(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, query), query, additive=True)


def not_finite(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, query) / 0, query)


def too_many_queries(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, "all")[:, :-1], query)


def ignores_a_bad_query(frozen, *, query="all"):
    query = min(query, frozen.tokens.shape[1] - 1) if isinstance(query, int) else query
    return made(frozen, scores_of(frozen, query), query)


def right_by_default_only(frozen, *, query=-1):
    return made(frozen, scores_of(frozen, query) * (1 if query == -1 else 2), query)


def other_queries_know_the_end(frozen, *, query=-1):
    scores = scores_of(frozen, query)
    known = scores * frozen.tokens[:, -1:, None]
    last = query in (-1, frozen.tokens.shape[1] - 1)
    return made(
        frozen, scores if last else torch.cat([known[:, :-1], scores[:, -1:]], 1) if query == "all" else known, query
    )


def its_own_error(frozen, *, query="all"):
    if isinstance(query, int) and query > 5:
        raise IndexError("query")
    return made(frozen, scores_of(frozen, query), query)


def no_words(frozen, *, query="all"):
    if isinstance(query, int) and query > 5:
        raise tlens.InvalidInputError("bad query")
    return made(frozen, scores_of(frozen, query), query)


def axes_of_its_own(frozen, *, query="all"):
    return made(frozen, scores_of(frozen, query), query, axes=("batch", "to", "from"))


BROKEN_METHODS = {
    noisy: "two runs on one pass differ",
    leaves_a_hook: "hooks of the model",
    leaves_gradients: "gradients of the model",
    changes_the_mode: "modes of the model",
    writes_to_weights: "weights were changed|weights of the model",
    looks_ahead: "change with a token after it",
    scores_ahead: "ahead of the query",
    scores_padding: "padding gives or receives|ahead of the query",
    mixes_the_batch: "differs from its prompts one by one",
    counts_padding: "padding on the right changes the scores",
    overstates: "additive, but off by",
    claims_without_a_total: "without a bias",
    not_finite: "not finite",
    too_many_queries: r"queries is \(2, 6\), not \[2, 5\]",
    right_by_default_only: "by default is not what query='all' gives",
    other_queries_know_the_end: "change with a token after it",
    ignores_a_bad_query: "takes a query out of range",
    its_own_error: "with IndexError, not InvalidInputError",
    no_words: "with no more than 'bad query'",
    axes_of_its_own: "must include batch, query, key once each",
}


@pytest.mark.parametrize("broken", BROKEN_METHODS, ids=lambda function: function.__name__)
@pytest.mark.few(8)
def test_broken_methods_are_caught(broken, clean_registry):
    tlens.register_method("broken")(broken)
    model = tiny_model(GPT2)
    errors = (tlens.ConformanceError, tlens.FrozenModelError, tlens.InvalidInputError)  # the last by Attribution itself
    with pytest.raises(errors, match=BROKEN_METHODS[broken]):
        check_method("broken", model)


def test_a_method_that_takes_stale_passes_is_caught(clean_registry, monkeypatch):
    """`attribute` refuses them for every method; without that the battery says so."""
    real = lambda frozen: frozen.mask[:, :, None] & frozen.mask[:, None]  # noqa: E731
    tlens.register_method("patterns")(lambda frozen: made(frozen, frozen.pattern(0).mean(1) * real(frozen), "all"))
    assert check_method("patterns", GPT2) == {}
    monkeypatch.setattr(tlens.FrozenPass, "check_fresh", lambda self: None)
    with pytest.raises(tlens.ConformanceError, match="takes a pass older"):
        check_method("patterns", GPT2)


@pytest.mark.whole
def test_by_default_every_layout_is_tried():
    refusals = check_method("globenc")
    assert set(refusals) == {"bridge/neox", "bridge/olmo2"}
    assert all(words.startswith("globenc: undefined") for words in refusals.values())


def test_what_was_checked_can_be_read():
    report = check_method("globenc", ["bridge/gpt2", "bridge/neox"])
    frame = report.to_dataframe()
    assert {*frame["model"]} == {"bridge/gpt2"}
    assert len(frame) == len(METHOD_CHECKS)
    assert bool((frame["measured"].dropna() <= frame["allowed"].dropna()).all())
    assert "holds on 1 of 2 models" in repr(report)
    assert "bridge/neox  refused: globenc: undefined" in repr(report)
    assert "one by one" in repr(report)


def test_a_target_is_named_as_everywhere():
    report = check_method("relp", GPT2, target="first-choice", minus="runner-up")
    assert report == {}
    measured, allowed = next(iter(report.residuals.values()))["one by one"]
    assert 0 < measured < allowed < 1e-6
    with pytest.raises(InvalidInputError, match="among the options as well"):
        check_method("relp", GPT2, target=5, options={"target": 5})


def test_something_that_is_no_result(model_named):
    with pytest.raises(tlens.ConformanceError, match="not an Attribution"):
        check_attribution("scores", tlens.freeze(model_named(GPT2), some_tokens()))


# ------------------------------------------------------------------------------------------ models


def misread(monkeypatch, part, **changes):
    """A model adapter that hands out other weights than the model computes with."""
    from tensorlens_tl.models import BlockView

    right = getattr(BlockView, part).func
    wrong = property(lambda self: dataclasses.replace(right(self), **{k: f(right(self)) for k, f in changes.items()}))
    monkeypatch.setattr(BlockView, part, wrong)


def wrong_transpose(monkeypatch):
    misread(monkeypatch, "attention", W_O=lambda w: w.W_O.T.contiguous())


def dropped_bias(monkeypatch):
    misread(monkeypatch, "attention", b_V=lambda w: None)


def dropped_output_bias(monkeypatch):
    misread(monkeypatch, "mlp", b_out=lambda w: None)


def kv_heads_mixed_up(monkeypatch):
    def flipped(bias):
        return None if bias is None else bias.flip(0)

    misread(monkeypatch, "attention", value_matrix=lambda w: w.W_V.flip(1), b_V=lambda w: flipped(w.b_V))


def another_activation(monkeypatch):
    misread(monkeypatch, "mlp", activation=lambda w: torch.relu)


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        (GPT2, wrong_transpose, r"blocks\.0 .*hook_attn_out"),
        (GPT2, dropped_bias, r"blocks\.0 .*hook_z"),
        (GPT2, dropped_output_bias, r"blocks\.0"),
        (LIVE_GQA, kv_heads_mixed_up, r"blocks\.0 .*hook_z"),
        (GPT2, another_activation, r"blocks\.0 .*hook_post"),
    ],
)
def test_a_misread_model_is_caught_by_its_proof(name, broken, message, monkeypatch):
    model = tiny_model(name)
    check_model(model)
    broken(monkeypatch)
    with pytest.raises(tlens.UnsupportedModelError, match=message):
        check_model(model)
    assert hooks_left(model) == 0


def ignored_patterns(monkeypatch):
    """Patterns are replaced where the model only observes them: what our probe of the model is there to find."""
    from tensorlens_tl.passes import live

    monkeypatch.setattr(live, "patterns_take_effect", lambda model, inputs, blocks: [True] * len(blocks))
    monkeypatch.setattr(live, "_effective_patterns", OncePerWeights())


def ignored_norms(monkeypatch):
    hooks = tlens.FrozenPass.fwd_hooks
    monkeypatch.setattr(tlens.FrozenPass, "fwd_hooks", lambda self, **o: hooks(self, **{**o, "norms": False}))


def ignored_rule(monkeypatch):
    hooks = tlens.FrozenPass.fwd_hooks
    monkeypatch.setattr(tlens.FrozenPass, "fwd_hooks", lambda self, **o: hooks(self, **{**o, "rule": "frozen"}))


def wrong_adjoint(monkeypatch):
    right = Linear._backward
    monkeypatch.setattr(Linear, "_backward", lambda self, g, biases: right(self, g, biases) * 1.001)


def forgotten_bias(monkeypatch):
    monkeypatch.setattr(tlens.FrozenOperator, "bias", property(lambda self: torch.zeros_like(self.x)))


def a_hook_stays(monkeypatch):
    probe = tlens.FrozenPass.unembedding_error.fget

    def leave(self):
        self.model.add_hook(self.points.blocks[0].resid_pre, lambda x, hook: x)
        return probe(self)

    monkeypatch.setattr(tlens.FrozenPass, "unembedding_error", property(leave))


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        (OPT, ignored_patterns, "the hook-frozen model equals the operator"),
        (GPT2, ignored_norms, "the hook-frozen model equals the operator"),
        (LLAMA, ignored_rule, r"the hook-frozen model equals the operator \(frozen-integrated-gradients\)"),
        (GPT2, wrong_adjoint, "pull is the adjoint of push"),
        (GPT2, forgotten_bias, "contributions and bias sum to the model's output"),
        (GPT2, a_hook_stays, "hooks of the model are not what they were"),
    ],
)
def test_what_the_proof_cannot_see_is_caught(name, broken, message, monkeypatch):
    model = tiny_model(name)
    check_model(model)
    broken(monkeypatch)
    tlens.freeze(model, some_tokens())  # every block is proved all the same
    with pytest.raises(tlens.ConformanceError, match=message):
        check_model(model)


@pytest.mark.skipif("hooked/bidirectional" not in model_names(), reason="needs TransformerLens 3.9")
def test_padding_that_a_model_ignores_is_caught(monkeypatch):
    model = tiny_model("hooked/bidirectional")
    assert "attention mask" in check_model(model).refused["padding on the right"]
    monkeypatch.setattr("tensorlens_tl.passes.freezing.check_padding", lambda *_: None)
    with pytest.raises(tlens.ConformanceError, match="padding on the right changes nothing"):
        check_model(model)


@pytest.mark.numeric
@parametrize_with_checks(check for name in model_names() for check in model_checks(name))
@pytest.mark.few(130)
def test_every_model_passes(check):
    check()


def test_a_report_of_a_model_holds_every_check(model_named):
    report = check_model(model_named(GPT2))
    held = {f"the hook-frozen model equals the operator ({rule})" for rule in tlens.FROZEN_RULES}
    assert set(report.errors) == held | {
        "blocks.0", "blocks.0.writes", "blocks.1", "blocks.1.writes", "head", "unembed",
        "contributions and bias sum to the model's output",
        "pull is the adjoint of push", "autograd through the frozen model equals pull",
        "a batch equals its prompts run one by one",
        "padding on the right changes nothing", "padding on the left changes nothing",
    }  # fmt: skip


def test_the_cause_of_an_error_stays_visible(model_named):
    model = model_named(GPT2)
    with pytest.raises(KeyError), Untouched(model, "somebody"):
        raise KeyError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_excuse(clean_registry, dtype):
    """Its tolerance is wide, but not so wide that a factor of two passes."""

    @tlens.register_method("doubling")
    def doubling(frozen, *, query="all"):
        return made(frozen, scores_of(frozen, query) * len(frozen.tokens), query)

    model = tiny_model(GPT2).to(dtype)
    with pytest.raises(tlens.ConformanceError, match="one by one"):
        check_method("doubling", model)
