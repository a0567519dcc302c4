"""The difference of two runs: complete against the live model, antisymmetric, the derivative where both are one."""

import copy
import functools
import itertools
import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import UNREAD, close, hooks_left, rerun_tolerance, rest_whole, some_tokens
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from test_fuzz import HOOKED, bridge, build, hooked, padded, prompts

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.algebra import Linear
from tensorlens_tl.algebra.secants import KeyResponse, QueryResponse, change as change_module, numbers, parts
from tensorlens_tl.circuits.stream import stream_target
from tensorlens_tl.errors import GapWarning
from tensorlens_tl.passes import freeze_changed
from tensorlens_tl.passes.proof import LayoutSearch
from tensorlens_tl.passes.two_runs import scores as scores_module
from tensorlens_tl.testing import encoder_decoder_names, model_names, tiny_model

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]

ROUTED = (
    "mixtral", "qwen2-moe", "gpt-oss", "llama4", "granite-moe", "deepseek-v3", "afmoe", "hooked/experts",
    "hooked/gpt-oss",
)  # fmt: skip
"""Families whose routing is held: the gradient that they have with it held is in test_difference_families."""


OTHERS = [*encoder_decoder_names(), *(f"bridge/{family}" for family in UNREAD)]
WHOLE = [name for name in model_names() if name not in OTHERS]
"""Those that read one input and whose scores are read; encoder–decoders have test_difference_encoder_decoders."""
BOTH = [name for name in ("hooked/ln", "hooked/rmspre", "bridge/gpt2", "bridge/neox") if name in model_names()]
EXACT = [name for name in ("hooked/ln", "hooked/alibi", "bridge/gpt2", "encoder/bert") if name in model_names()]
ONE = EXACT[0]
HOOKED_ONLY = pytest.mark.skipif(not HOOKED, reason="of HookedTransformers")
EMBEDDINGS = ("embed.hook_out", "embed.hook_embed", "hook_embed")


def logits(frozen):
    """The live model's own logits of a run, before any soft cap."""
    with torch.no_grad():
        out = frozen.model(**frozen.inputs)
    live = out if isinstance(out, torch.Tensor) else out.logits
    cap = frozen.view.soft_cap
    return live if cap is None else cap * torch.atanh(live / cap)


def two_runs(model, **options):
    return (tlens.freeze(model, some_tokens(seed=seed), **options) for seed in (0, 1))


def embeddings_of(model):
    return next(name for name in EMBEDDINGS if name in model.hook_dict)


def moved(frozen, size):
    """The same prompt with its embeddings moved by so much."""
    generator = torch.Generator().manual_seed(7)

    def move(x, hook):
        return x + size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

    return freeze_changed(frozen, frozen.inputs, [(embeddings_of(frozen.model), move)])


def summed(result):
    return result.scores.sum(-1) + result.bias


# ------------------------------------------------------------------ completeness


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.few(10)
def test_scores_sum_to_the_difference_of_the_live_logits(name, model):
    a, b = two_runs(model)
    difference = tlens.difference(a, b)
    allowed = rerun_tolerance(name)
    assert max(difference.errors.values()) <= allowed
    assert list(difference.errors)[: a.n_layers] == [f"blocks.{layer}" for layer in range(a.n_layers)]
    changes = logits(a) - logits(b)
    size = logits(a).abs().max()
    for query in (-1, [1, 3], "all"):
        result = tlens.attribute(difference, 5, minus=7, query=query)
        of_queries = torch.take_along_dim(changes[..., 5] - changes[..., 7], result.queries, dim=1)
        assert close(summed(result) / size, of_queries / size, allowed)
        assert close(result.total / size, of_queries / size, allowed)
    one = tlens.attribute(difference, 5)
    assert close(summed(one) / size, changes[:, -1:, 5] / size, allowed)


@pytest.mark.parametrize("name", WHOLE)
def test_the_sum_along_the_change_is_its_length(name, model):
    a, b = two_runs(model)
    result = tlens.attribute(tlens.difference(a, b), direction="change", query=[0, 2, -1])
    change = a.output[:, [0, 2, -1]] - b.output[:, [0, 2, -1]]
    assert close(summed(result), change.norm(dim=-1), rerun_tolerance(name))
    assert result.target == "length of the change of the output"


@pytest.mark.parametrize("name", WHOLE)
def test_a_direction_of_the_output(name, model):
    a, b = two_runs(model)
    direction = torch.randn(a.output.shape[-1], dtype=torch.float64)
    result = tlens.methods.difference(tlens.difference(a, b), direction=direction)
    assert close(summed(result), (a.output - b.output)[:, -1:] @ direction, 10 * rerun_tolerance(name))


SIDES = [
    ("hooked/ln", "left"), ("hooked/ln", "right"), ("bridge/gpt2", "left"), ("bridge/bert", "right"),
    ("encoder/bert", "right"), ("bridge/llama", "right"),
]  # fmt: skip
"""Models, and a side on which padding changes nothing for them."""


@pytest.mark.parametrize(("name", "side"), [case for case in SIDES if case[0] in model_names()])
def test_padded_batches_are_their_prompts(name, side, model_named):
    model = model_named(name)
    batches = []
    for seed in (0, 1):
        rows = [row[:length].tolist() for row, length in zip(some_tokens(2, 6, seed), (6, 4), strict=True)]
        batches.append(rows)
    together = tlens.difference(*(tlens.freeze(model, rows, padding_side=side) for rows in batches))
    scores = tlens.attribute(together, 5).scores
    for number, length in enumerate((6, 4)):
        alone = tlens.difference(*(tlens.freeze(model, rows[number]) for rows in batches))
        expected = tlens.attribute(alone, 5).scores[0, 0]
        real = together.mask[number]
        assert real.sum() == length
        assert close(scores[number, 0, real], expected, rerun_tolerance(name))
        assert not scores[number, 0, ~real].any()


KINDS = [{"patterns": "recompute"}, {"store": "cpu"}, {"verify": "sample"}, {"verify": False}]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_passes_of_every_kind(name, options, model_named):
    a, b = two_runs(model_named(name))
    expected = tlens.attribute(tlens.difference(a, b), 5).scores
    other_a, other_b = two_runs(model_named(name), **options)
    assert close(tlens.attribute(tlens.difference(other_a, other_b), 5).scores, expected, rerun_tolerance(name))


@HOOKED_ONLY
@pytest.mark.parametrize("side", ["left", "right"])
def test_sinks_are_read_from_real_queries(side):
    """Rotary positions are counted otherwise at padding, where scores do not give the pattern."""
    model = build("hooked", "raw", {"use_attention_sinks": True, "positional_embedding_type": "rotary"})
    tokens, mask = padded([1, 1, 4], side)
    a = tlens.freeze(model, tokens, attention_mask=mask)
    for size in (1e-6, 1.0):
        difference = tlens.difference(a, moved(a, size))
        assert max(difference.errors.values()) < 1e-8
        assert tlens.attribute(difference, 5).gap.max() < 1e-8


# ------------------------------------------------------------------ signs, nothing, and the derivative


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.few(8)
def test_swapped_runs_have_opposite_scores_and_equal_runs_none(name, model):
    a, b = two_runs(model)
    there = tlens.attribute(tlens.difference(a, b), 5)
    back = tlens.attribute(tlens.difference(b, a), 5)
    assert close(back.scores, -there.scores, 1e-12)
    assert close(back.total, -there.total, 1e-12)
    for again in (a, tlens.freeze(model, some_tokens())):
        same = tlens.difference(a, again)
        for target in (5, None):
            result = tlens.attribute(same, target)
            assert not result.scores.any()
            assert not result.total.any()
            assert not result.gap.any()


def live_gradient(frozen, token):
    """The live model's gradient of a logit at the last token, by autograd alone."""
    leaf = frozen.resid_pre(0).clone().requires_grad_(True)
    name = frozen.points.blocks[0].resid_pre
    with torch.enable_grad():
        out = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(name, lambda x, hook: leaf)])
        live = out if isinstance(out, torch.Tensor) else out.logits
        if frozen.view.soft_cap is not None:
            live = frozen.view.soft_cap * torch.atanh(live / frozen.view.soft_cap)
        (gradient,) = torch.autograd.grad(live[:, -1, token].sum(), leaf)
    return gradient


@pytest.mark.parametrize("name", [name for name in WHOLE if name.removeprefix("bridge/") not in ROUTED])
def test_of_one_run_it_is_the_live_models_gradient(name, model):
    """No weight is read on the other side: autograd differentiates the model between its hooks."""
    frozen = tlens.freeze(model, some_tokens())
    same = tlens.difference(frozen, frozen).operator().gradient(5)[:, 0]
    expected = live_gradient(frozen, 5)
    assert same.abs().max() > 0
    assert close(same / expected.abs().max(), expected / expected.abs().max(), rerun_tolerance(name))


@pytest.mark.parametrize("name", EXACT)
def test_close_runs_converge_to_the_gradient(name, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    expected = live_gradient(frozen, 5)
    misses = []
    for size in (1e-1, 1e-2, 1e-3, 1e-4):
        pulled = tlens.difference(frozen, moved(frozen, size)).operator().gradient(5)[:, 0]
        misses.append(float((pulled - expected).norm() / expected.norm()))
    for coarse, fine in itertools.pairwise(misses):
        assert fine < 0.3 * coarse
    assert misses[-1] < 1e-3


@pytest.mark.parametrize("name", [name for name in BOTH if name.startswith("hooked")] or ["bridge/gpt2"])
def test_a_constant_of_rows_of_scores_changes_nothing(name, model_named):
    model = model_named(name)
    a, b = two_runs(model)
    expected = tlens.attribute(tlens.difference(a, b), 5)
    shifts = torch.randn(6, 1, dtype=torch.float64)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda x, hook: x + shifts)]):
        shifted = tlens.freeze(model, some_tokens())
    result = tlens.attribute(tlens.difference(shifted, b), 5)
    assert close(result.scores, expected.scores, 1e-9)
    assert close(result.total, expected.total, 1e-9)


# ------------------------------------------------------------------ close prompts, and large scores

SIZES = (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)
CLOSE = [
    name
    for name in ("hooked/ln", "hooked/no-norm", "hooked/rotary", "encoder/bert", "bridge/gpt2", "bridge/llama")
    if name in model_names()
] + ["bridge/opt", "bridge/phi"]


@functools.cache
def in_dtype(name, dtype):
    model = tiny_model(name)
    if dtype != torch.float64:
        model = model.to(dtype)
        if hasattr(model.cfg, "dtype"):
            model.cfg.dtype = dtype
    return model


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size:g}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", rest_whole(CLOSE, "hooked/ln", "bridge/gpt2", "bridge/llama"))
@pytest.mark.few(20)
def test_close_prompts(name, dtype, size):
    """The sum misses the difference by a share of it and the rounding of the two numbers; nothing warns or is refused.

    In bfloat16 that is 0.02 of either, in float32 1e-4 of the difference and 1e-6 of the numbers.
    """
    a = tlens.freeze(in_dtype(name, dtype), some_tokens())
    b = moved(a, size)
    difference = tlens.difference(a, b)
    computes_in = dtype
    if dtype == torch.float64 and rerun_tolerance(name) > 1e-9:
        computes_in = torch.float32
    share, of_numbers = {torch.float64: (1e-9, 1e-13), torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.05, 0.02)}[
        computes_in
    ]
    for target in (5, None):
        result = tlens.attribute(difference, target)
        lengths = (a.unembedded()[:, -1:].norm(dim=-1) + b.unembedded()[:, -1:].norm(dim=-1)).double()
        if target is not None:
            lengths = lengths * float(a.view.unembedding[0][:, target].double().norm() * a.view.logit_factor)
        misses = (summed(result) - result.total).abs().double()
        assert (misses <= share * result.total.abs().double() + of_numbers * lengths).all()
        if size == 0.0:
            assert not result.scores.any()


@HOOKED_ONLY
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 60), (torch.float32, 20)], ids=str)
def test_attention_that_underflows(dtype, factor):
    """Scores of ±1000 (±100 in float32): probabilities of one run are 0 where the other's are not."""
    model = tiny_model("hooked/ln")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q *= factor
            block.attn.W_K *= factor
    model = model.to(dtype)
    model.cfg.dtype = dtype
    a, b = two_runs(model)
    underflowed = (a.pattern(0) == 0) & (b.pattern(0) > 0.1) & (torch.ones(6, 6).tril() > 0)
    assert underflowed.any()
    difference = tlens.difference(a, b)
    result = tlens.attribute(difference, 5)
    assert close(summed(result), (logits(a) - logits(b))[:, -1:, 5], 1e-9 if dtype == torch.float64 else 1e-4)
    assert torch.isfinite(result.scores).all()


def test_a_gap_beyond_rounding_warns(model_named):
    """What rounding does not explain is not let pass."""
    difference = tlens.difference(*two_runs(model_named(ONE)))
    collapse = difference.operator().target(5)
    wrong = type(collapse)(collapse.scores, collapse.bias, collapse.total, collapse.gap + 1e-3)
    assert difference.checked(collapse) is collapse
    with pytest.raises(tlens.GapWarning, match="beyond rounding"):
        difference.checked(wrong)
    assert difference.checked(wrong, torch.full_like(wrong.gap, 2e-3)) is wrong
    strict = tlens.difference(*two_runs(model_named(ONE), strict=True))
    with pytest.raises(tlens.NumericalError, match="beyond rounding"):
        strict.checked(wrong)


# ------------------------------------------------------------------ hooks


def added(x, hook):
    return x + torch.linspace(-1, 1, x.shape[-1]).to(x)


@pytest.mark.parametrize("name", BOTH)
def test_a_vector_added_to_what_enters_is_explained(name, model_named):
    model = model_named(name)
    plain = tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[(plain.points.blocks[0].resid_pre, added)]):
        steered = tlens.freeze(model, some_tokens())
        expected = logits(steered)[:, -1:, 5] - plain.operator().target(5).total
    result = tlens.attribute(tlens.difference(steered, plain), 5)
    assert close(summed(result), expected, rerun_tolerance(name))
    assert "blocks.0" in result.provenance["hooks"]


POINTS = (
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_q",
    "attn.hook_k", "attn.hook_v", "attn.hook_z", "attn.hook_attn_scores", "attn.hook_pattern", "mlp.hook_pre",
    "mlp.hook_post", "ln1.hook_scale", "ln2.hook_scale", "ln1.hook_normalized", "hook_in", "hook_out",
)  # fmt: skip
AFTER = ("ln_final.hook_scale", "ln_final.hook_normalized", "unembed.hook_in", "unembed.hook_out", "hook_unembed")


def curved(x, hook):
    """Another number at every point, and no constant of a row of scores."""
    return x + 0.1 * torch.linspace(-1, 1, x.shape[-1]).square().to(x)


@pytest.mark.parametrize("point", [*(f"blocks.1.{point}" for point in POINTS), *AFTER])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.few(30)
def test_what_a_hook_changes_inside_is_explained_or_refused(name, point, model_named):
    """In either run; a refusal names the block or what follows the last, and says what to do."""
    model = model_named(name)
    if point not in model.hook_dict:
        pytest.skip("no such hook point")
    plain = tlens.freeze(model, some_tokens())
    of_plain = logits(plain)
    with model.hooks(fwd_hooks=[(point, curved)]):
        of_changed = logits(plain)
        changed, refusal = answer_or_refusal(lambda: tlens.freeze(model, some_tokens()))
    if refusal:
        assert re.search(r"blocks\.[01]|between the last block and the unembedding", refusal)
        return
    for a, b, change in ((plain, changed, of_plain - of_changed), (changed, plain, of_changed - of_plain)):
        result, refusal = answer_or_refusal(lambda a=a, b=b: tlens.attribute(tlens.difference(a, b), 5))
        if not refusal:
            assert close(summed(result), change[:, -1:, 5], rerun_tolerance(name))
        elif "does not give the difference" in refusal:
            assert re.search(r"map of (blocks\.1|head) .* were hooks on the model \(.*\).*: freeze both runs", refusal)
        else:
            assert re.search(r"blocks\.1|target: the logits", refusal)


NAMED = ("hook_resid_mid", "attn.hook_q", "attn.hook_v", "attn.hook_pattern", "attn.hook_attn_scores", "mlp.hook_pre")


@pytest.mark.parametrize("point", NAMED)
@pytest.mark.parametrize("name", BOTH)
def test_a_refusal_because_of_a_hook_names_the_hook_point_by_the_name_that_the_user_took(name, point, model_named):
    model = model_named(name)
    point = f"blocks.1.{point}"
    if point not in model.hook_dict:
        pytest.skip("no such hook point")
    plain = tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[(point, curved)]):
        changed, refusal = answer_or_refusal(lambda: tlens.freeze(model, some_tokens()))
    refusals = [refusal]
    if not refusal:
        pairs = ((plain, changed), (changed, plain))
        refusals = [answer_or_refusal(lambda pair=pair: tlens.difference(*pair))[1] for pair in pairs]
    if not any(refusals) and "resid_mid" in point:
        return  # a HookedTransformer's is a point of the stream, which is held
    for refusal in refusals:
        assert re.search(rf"A hook at .*{re.escape(point)}\b", refusal)


def answer_or_refusal(question):
    try:
        return question(), ""
    except tlens.UnsupportedModelError as refusal:
        return None, str(refusal)


# ------------------------------------------------------------------ refusals


def test_runs_that_do_not_match_are_refused(model_named):
    model = model_named(ONE)
    a = tlens.freeze(model, some_tokens())
    match = "do not match position by position"
    for other in (some_tokens(2, 5), some_tokens(1, 6), [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6]]):
        with pytest.raises(tlens.InvalidInputError, match=match):
            tlens.difference(a, tlens.freeze(model, other))
    rows = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6]]
    left, right = (tlens.freeze(model, rows, padding_side=side) for side in ("left", "right"))
    with pytest.raises(tlens.InvalidInputError, match=match):
        tlens.difference(left, right)


@pytest.mark.parametrize("passed", [None, "text", 5, some_tokens()], ids=["None", "text", "number", "tensor"])
def test_what_is_no_frozen_pass_is_refused(passed, model_named):
    frozen = tlens.freeze(model_named(ONE), some_tokens())
    for pair in ((frozen, passed), (passed, frozen), (frozen, tlens.difference(frozen, frozen))):
        with pytest.raises(tlens.InvalidInputError, match="a frozen pass is needed, got"):
            tlens.difference(*pair)
    with pytest.raises(tlens.InvalidInputError, match="a frozen pass is needed, got"):
        tlens.difference(frozen.model, frozen)


@HOOKED_ONLY
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hooked/parallel", "composed in different ways"),
        ("hooked/attn-only", "architectures"),
        ("hooked/rms", "architectures"),
        ("hooked/gated", "different forms"),
        ("bridge/llama", "architectures"),
    ],
)
def test_two_architectures_are_refused(name, says, model_named):
    first = model_named("hooked/ln")
    second = copy.deepcopy(model_named(name))
    if name.startswith("hooked") and not second.cfg.attn_only:  # of the same activation function
        for block, other in zip(first.blocks, second.blocks, strict=True):
            other.mlp.act_fn = block.mlp.act_fn
    a, b = (tlens.freeze(model, some_tokens()) for model in (first, second))
    with pytest.raises((tlens.InvalidInputError, tlens.UnsupportedModelError), match=says):
        tlens.difference(a, b)


def silenced(parallel):
    """A ReLU model of one block, sequential or parallel, whose MLP gives nothing on one prompt but not on another.

    A sequential block's neurons are silent by one bias, a parallel one's by another.
    """
    model = build("hooked", "raw", {"n_layers": 1, "act_fn": "relu", "parallel_attn_mlp": parallel})
    _, cache = model.run_with_cache(some_tokens())
    with torch.no_grad():
        model.blocks[0].mlp.b_in -= cache["blocks.0.mlp.hook_pre"].amax((0, 1)) + 0.01
    return model


@HOOKED_ONLY
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
def test_a_layout_that_one_run_cannot_tell_is_the_other_runs(parallel):
    model = silenced(parallel)
    a, b = two_runs(model)
    assert gives_nothing(a)
    assert not gives_nothing(b)
    assert (a.layouts != b.layouts) == parallel  # a pass by itself takes the first of two
    difference = tlens.difference(a, b)
    back = tlens.difference(b, a)
    assert difference.layouts == back.layouts == b.layouts
    assert max(difference.errors.values()) < 1e-9
    expected = (logits(a) - logits(b))[:, -1:, 5]
    assert close(summed(tlens.attribute(difference, 5)), expected)
    assert close(summed(tlens.attribute(back, 5)), -expected)


@HOOKED_ONLY
def test_layouts_that_no_run_tells_are_refused(monkeypatch):
    """Two ways that reproduce both runs, of which each took another: nobody knows which is right."""
    a, b = two_runs(silenced(True))
    everything = [a.layouts[0], b.layouts[0]]
    monkeypatch.setattr(LayoutSearch, "reproducing", lambda search: everything)
    with pytest.raises(tlens.InvalidInputError, match=r"in different ways, pre and parallel\."):
        tlens.difference(a, b)
    monkeypatch.setattr(LayoutSearch, "reproducing", lambda search: [])
    with pytest.raises(tlens.InvalidInputError, match="zero output in one"):
        tlens.difference(a, b)


@HOOKED_ONLY
def test_two_sizes_are_refused():
    a = tlens.freeze(build("hooked", "raw", {"n_layers": 1}), some_tokens())
    for config in ({"n_layers": 2}, {"n_layers": 1, "d_model": 24}, {"n_layers": 1, "d_vocab": 60}):
        b = tlens.freeze(build("hooked", "raw", config), some_tokens())
        with pytest.raises(tlens.InvalidInputError, match="two architectures"):
            tlens.difference(a, b)


@HOOKED_ONLY
def test_blocks_of_other_parts_are_refused():
    configs = ({"d_mlp": 64}, {"attn_only": True})
    a, b = (tlens.freeze(build("hooked", "raw", config), some_tokens()) for config in configs)
    with pytest.raises(tlens.InvalidInputError, match=r"blocks\.0 has attention\+ln1\+ln2\+mlp and attention\+ln1,"):
        tlens.difference(a, b)


def test_two_vocabularies_are_refused(model_named, monkeypatch):
    class Tokenizer:
        def __init__(self, words):
            self.words = words

        def get_vocab(self):
            return self.words

    a = tlens.freeze(model_named(ONE), some_tokens())
    b = tlens.freeze(tiny_model(ONE), some_tokens())
    assert tlens.difference(a, b).n_layers == 2
    for frozen, words in ((a, {"a": 0}), (b, {"b": 0})):
        monkeypatch.setitem(vars(frozen.view), "tokenizer", Tokenizer(words))
    with pytest.raises(tlens.InvalidInputError, match="different vocabularies"):
        tlens.difference(a, b)


def test_a_model_that_is_no_longer_that_of_its_run_is_refused():
    model = tiny_model(ONE)
    a, b = two_runs(model)
    difference = tlens.difference(a, b)
    with a.attached(), pytest.raises(tlens.FrozenModelError):
        tlens.attribute(a, 5, method="difference")
    with torch.no_grad():
        next(model.blocks[0].parameters()).add_(0.01)
    for answer in (
        lambda: tlens.difference(a, b),
        lambda: tlens.attribute(difference, 5),
        lambda: tlens.attribute(a, 5, method="difference"),
        lambda: tlens.difference(a, tlens.freeze(model, some_tokens())),
    ):
        with pytest.raises(tlens.FrozenModelError, match="changed"):
            answer()


@pytest.mark.parametrize("name", [name for name in ("bridge/gpt2",) if name in model_names()])
def test_train_mode_since_then_is_refused(name):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    with pytest.raises((tlens.InvalidInputError, tlens.FrozenModelError)):
        tlens.attribute(frozen, 5, method="difference")


@pytest.mark.parametrize("name", BOTH)
def test_a_hook_put_on_or_taken_off_since_is_no_baseline(name):
    """What a hook did to the prompt's own run would count as the baseline's."""
    model = tiny_model(name)
    point = embeddings_of(model)
    plain = tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[(point, added)]):
        steered = tlens.freeze(model, some_tokens())
        with pytest.raises(tlens.FrozenModelError, match="hooks were put on it or taken off since"):
            tlens.attribute(plain, 5, method="difference")
        under = tlens.attribute(steered, 5, method="difference", baseline=7)
        with torch.no_grad():
            expected = logits(steered) - model(torch.full((2, 6), 7))
    with pytest.raises(tlens.FrozenModelError, match="hooks were put on it or taken off since"):
        tlens.attribute(steered, 5, method="difference")
    with model.hooks(fwd_hooks=[(point, lambda x, hook: None)]):
        idle = tlens.attribute(plain, 5, method="difference", baseline=7)
    assert close(idle.scores, tlens.attribute(plain, 5, method="difference", baseline=7).scores, 1e-12)
    assert close(summed(under), expected[:, -1:, 5], rerun_tolerance(name))


EVEN = [name for name in ("hooked/alibi", "hooked/ln", "bridge/gpt-oss", "bridge/llama") if name in model_names()]


@pytest.mark.parametrize("name", EVEN)
def test_attention_that_is_too_even_in_one_run_is_read_in_the_other(name, model_named):
    """With ALiBi, attention to one repeated token is the same for every scale of its scores."""
    model = model_named(name)
    even = tlens.freeze(model, torch.full((1, 6), 4))
    other = tlens.freeze(model, some_tokens()[:1])
    results = [tlens.attribute(tlens.difference(*runs), 5) for runs in ((even, other), (other, even))]
    assert close(results[0].scores, -results[1].scores, rerun_tolerance(name))
    assert close(
        (results[0].scores.sum(-1) + results[0].bias)[0],
        (logits(even) - logits(other))[0, -1:, 5],
        rerun_tolerance(name),
    )


@pytest.mark.parametrize("name", [name for name in EVEN if name == "hooked/alibi"])
def test_attention_that_is_too_even_in_both_runs_is_that_of_the_live_module(name, model_named):
    """No weights say how its scores come about there, in one model or in two."""
    runs = [tlens.freeze(model_named(name), torch.full((1, 6), token)) for token in (4, 7)]
    tuned = copy.deepcopy(model_named(name))
    with torch.no_grad():
        tuned.blocks[0].attn.W_V *= 1.5
    runs.append(tlens.freeze(tuned, torch.full((1, 6), 7)))
    change = tlens.attribute(tlens.difference(runs[0], runs[2]), 5)
    assert close(summed(change), (logits(runs[0]) - logits(runs[2]))[:, -1:, 5], rerun_tolerance(name))
    runs.pop()
    for first, second in (runs, runs[::-1]):
        change = tlens.attribute(tlens.difference(first, second), 5)
        assert close(summed(change), (logits(first) - logits(second))[:, -1:, 5], rerun_tolerance(name))


@pytest.mark.parametrize("name", BOTH)
def test_streams_of_zeros(name, model_named):
    """One run's are answered, in both orders; those of both runs are refused with the reason."""
    model = model_named(name)
    plain = tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: torch.zeros_like(x))]):
        zero = tlens.freeze(model, some_tokens())
        of_zero = logits(zero)
    for pair, sign in (((plain, zero), 1), ((zero, plain), -1)):
        result = tlens.attribute(tlens.difference(*pair), 5)
        assert close(summed(result), sign * (logits(plain) - of_zero)[:, -1:, 5], rerun_tolerance(name))
    if name == "bridge/neox":  # rotated biases of queries and keys tell one token from another
        assert max(tlens.difference(zero, zero).errors.values()) == 0
        return
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 reads is zero at every token of both runs"):
        tlens.difference(zero, zero)


@pytest.mark.parametrize("name", [name for name in model_names() if "whitened" in name][:1])
def test_a_baseline_of_zeros_under_whitening(name, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    result = tlens.attribute(frozen, 5, method="difference", baseline="zero")
    assert close(summed(result), result.total, rerun_tolerance(name))


@pytest.mark.parametrize("name", EVEN)
def test_prompts_of_one_token(name, model_named):
    runs = [tlens.freeze(model_named(name), [[token]]) for token in (3, 5)]
    for first, second in (runs, runs[::-1]):
        result = tlens.attribute(tlens.difference(first, second), 5)
        assert close(
            (result.scores.sum(-1) + result.bias)[0], (logits(first) - logits(second))[0, -1:, 5], rerun_tolerance(name)
        )


@HOOKED_ONLY
@pytest.mark.parametrize("switch", ["use_split_qkv_input", "use_attn_in"])
def test_a_stream_for_each_head_since_is_refused(switch):
    model = tiny_model("hooked/gated")
    frozen = tlens.freeze(model, some_tokens())
    getattr(model, f"set_{switch}")(True)
    with pytest.raises(tlens.UnsupportedModelError, match="head axis to the residual stream"):
        tlens.attribute(frozen, 5, method="difference")


@pytest.mark.parametrize("method", sorted(set(tlens.list_methods()) - {"difference"}))
def test_other_methods_refuse_a_difference(method, model_named):
    difference = tlens.difference(*two_runs(model_named(ONE)))
    refusal = rf"'{method}' explains one run. For two runs use 'difference'"
    with pytest.raises(tlens.InvalidInputError, match=refusal):
        tlens.attribute(difference, method=method)


def test_the_method_of_a_difference_may_be_named_or_left_out(model_named):
    first, second = two_runs(model_named(ONE))
    difference = tlens.difference(first, second)
    named = tlens.attribute(difference, 5, method="difference")
    assert torch.equal(tlens.attribute(difference, 5).scores, named.scores)
    assert tlens.attribute(first, 5).method == "tensorlens"
    with pytest.raises(tlens.RegistryError, match="no method called 'differences'"):
        tlens.attribute(difference, 5, method="differences")


def test_arguments_that_a_difference_does_not_take(model_named):
    difference = tlens.difference(*two_runs(model_named(ONE)))
    with pytest.raises(tlens.InvalidInputError, match="has its baseline already"):
        tlens.attribute(difference, 5, baseline="mean")
    with pytest.raises(tlens.InvalidInputError, match="has its input already"):
        tlens.attribute(difference, 5, padding_side="left")
    with pytest.raises(tlens.InvalidInputError, match="vocabulary"):
        tlens.attribute(difference, 4800)
    for query in (6, [0, 99]):
        with pytest.raises(tlens.InvalidInputError):
            tlens.attribute(difference, 5, query=query)


# ------------------------------------------------------------------ the method and its baselines


def baselines(frozen):
    """Every kind, and what stands in the place of each token's embedding: ids, or vectors."""
    ids = some_tokens(1, 6, seed=3)[0]
    each = some_tokens(2, 6, seed=4)
    at = embeddings_of(frozen.model)
    _, cache = frozen.model.run_with_cache(torch.arange(3, 9)[None].expand(2, 6))
    width = cache[at].shape[-1]
    some = torch.randn(6, width, dtype=torch.float64)
    return {
        "token id": (5, torch.full((2, 6), 5)),
        "token tensor": (torch.tensor(5), torch.full((2, 6), 5)),
        "list of ids": (ids.tolist(), ids.expand(2, 6)),
        "ids": (ids, ids.expand(2, 6)),
        "ids of each prompt": (each, each),
        "frozen pass": (tlens.freeze(frozen.model, each), each),
        "zero": ("zero", torch.zeros(2, 6, width, dtype=torch.float64)),
        "embedding": (some[0], some[0].expand(2, 6, width)),
        "embeddings": (some, some.expand(2, 6, width)),
    }


BASELINES = (
    "token id", "token tensor", "list of ids", "ids", "ids of each prompt", "frozen pass", "zero", "embedding",
    "embeddings",
)  # fmt: skip


@pytest.mark.parametrize("kind", BASELINES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.few(12)
def test_a_baseline_is_what_the_live_model_runs_on(name, kind, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    baseline, stands = baselines(frozen)[kind]
    result = tlens.attribute(frozen, 5, method="difference", baseline=baseline, query=[-1, 2])
    inputs = dict(frozen.inputs)
    hooks = []
    if stands.is_floating_point():
        hooks = [(embeddings_of(frozen.model), lambda x, hook: stands.to(x))]
    else:
        inputs["input"] = stands
    with torch.no_grad():
        out = frozen.model.run_with_hooks(**inputs, fwd_hooks=hooks)
    live = out if isinstance(out, torch.Tensor) else out.logits
    expected = (logits(frozen) - live)[..., 5][:, [-1, 2]]
    assert close(summed(result), expected)
    assert result.scores.abs().sum() > 0
    assert result.additive


@pytest.mark.parametrize("name", EXACT)
def test_the_mean_embedding_is_the_default_without_a_mask_token(name, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    default = tlens.attribute(frozen, 5, method="difference")
    mean = tlens.attribute(frozen, 5, method="difference", baseline="mean")
    assert torch.equal(default.scores, mean.scores)
    table = frozen.model.run_with_cache(torch.arange(48).view(8, 6))[1][embeddings_of(frozen.model)]
    vector = table.flatten(0, 1).mean(0)
    given = tlens.attribute(frozen, 5, method="difference", baseline=vector)
    assert close(given.scores, mean.scores)


@pytest.mark.parametrize("name", EXACT)
def test_several_baselines_are_averaged(name, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    several = ["mean", 5, some_tokens(2, 6, seed=3), [4, 5, 6, 7, 8, 9]]
    together = tlens.attribute(frozen, 7, method="difference", baseline=several)
    alone = [tlens.attribute(frozen, 7, method="difference", baseline=one) for one in several]
    for part in ("scores", "bias", "total"):
        assert close(getattr(together, part), torch.stack([getattr(one, part) for one in alone]).mean(0), 1e-12)


@pytest.mark.parametrize(("baseline", "meant"), [("average", "mean"), ("zeros", "zero"), ("maen", "mean")])
def test_a_misspelt_baseline_is_not_only_a_prompt_of_another_length(demo_model, baseline, meant):
    with pytest.raises(tlens.InvalidInputError, match=f"'{meant}'( here.|\\?)$"):
        tlens.attribute(demo_model, "Return the value. Return the", method="difference", baseline=baseline)


def test_texts_and_masks_as_baselines(demo_model):
    text = "If the file is not found"
    frozen = tlens.freeze(demo_model, [text, text])
    other = "If the word is not found"
    ids = tlens.freeze(demo_model, other).tokens[0]
    by_text = tlens.attribute(frozen, 5, method="difference", baseline=other)
    by_ids = tlens.attribute(frozen, 5, method="difference", baseline=ids)
    assert torch.equal(by_text.scores, by_ids.scores)
    assert close(by_text.scores[0], by_text.scores[1], 1e-12)
    (changed,) = (frozen.tokens[0] != ids).nonzero().T
    assert by_text.scores[0, 0].nonzero().flatten().tolist() == changed.tolist()  # tokens of both runs give nothing
    with pytest.raises(tlens.InvalidInputError, match="positions must match"):
        tlens.attribute(frozen, 5, method="difference", baseline="too short")
    tokenizer = frozen.view.tokenizer
    for kind in ("mask", "pad"):
        token = getattr(tokenizer, f"{kind}_token_id", None)
        if token is None:
            with pytest.raises(tlens.InvalidInputError, match=f"no {kind} token"):
                tlens.attribute(frozen, 5, method="difference", baseline=kind)
            continue
        by_name = tlens.attribute(frozen, 5, method="difference", baseline=kind)
        assert close(by_name.scores, tlens.attribute(frozen, 5, method="difference", baseline=token).scores, 1e-12)


@pytest.mark.parametrize(
    ("baseline", "says"),
    [
        ([], "pass one baseline"),
        ([3, 4, 5], "positions must match"),
        (torch.arange(3, 8), "positions must match"),
        (some_tokens(3, 6), "positions must match"),
        (torch.tensor([3, 4, 5, 6, 7, 480]), "outside the vocabulary"),
        (480, "outside the vocabulary"),
        (torch.zeros(3), "positions must match"),
        (torch.zeros(4, 16), "positions must match"),
        (torch.tensor(0.5), "positions must match"),
        ("a text", "no tokenizer"),
        ("mask", "no mask token"),
        (1.5, "baseline"),
        (True, "baseline"),
        ({"a": 1}, "baseline"),
        (torch.ones(6, dtype=torch.bool), "must be integers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [name for name in ("hooked/ln", "bridge/gpt2") if name in model_names()])
def test_what_is_no_baseline_is_refused(name, baseline, says, model_named):
    """Before the model runs on it; `model_named` looks for hooks that are left."""
    frozen = tlens.freeze(model_named(name), some_tokens())
    with pytest.raises(tlens.InvalidInputError, match=says):
        tlens.attribute(frozen, 5, method="difference", baseline=baseline)


@pytest.mark.parametrize("name", EXACT)
def test_no_hook_is_left_after_an_error(name, model_named):
    frozen = tlens.freeze(model_named(name), some_tokens())
    width = baselines(frozen)["embedding"][0].shape[-1]
    with pytest.raises(tlens.NumericalError, match="NaN"):
        tlens.attribute(frozen, 5, method="difference", baseline=torch.full((width,), torch.nan))
    assert hooks_left(frozen.model) == 0
    assert tlens.attribute(frozen, 5, method="difference").gap.max() < 1e-12


@pytest.mark.parametrize("name", [*EXACT, "bridge/bert"])
@pytest.mark.parametrize("baseline", ["mean", 5, [3, 4, 5, 6, 7, 8]], ids=str)
def test_a_padded_batch_against_a_baseline_is_its_prompts(name, baseline, model_named):
    model = model_named(name)
    rows = [[3, 9, 14, 15, 9, 26], [4, 8, 30, 31]]
    together = tlens.attribute(tlens.freeze(model, rows), 5, method="difference", baseline=baseline)
    for number, row in enumerate(rows):
        one = baseline[: len(row)] if isinstance(baseline, list) else baseline
        alone = tlens.attribute(tlens.freeze(model, row), 5, method="difference", baseline=one)
        assert close(together.scores[number, 0, : len(row)], alone.scores[0, 0])


def test_results_are_attributions_like_others(tmp_path, model_named):
    a, b = two_runs(model_named(ONE))
    result = tlens.attribute(tlens.difference(a, b), 5, minus=7)
    assert result.method == "difference"
    assert "change of the logit" in result.target
    assert result.tokens[0][0] == f"{a.str_tokens[0][0]}|{b.str_tokens[0][0]}"
    assert result.provenance == a.provenance()
    loaded = tlens.Attribution.load(result.save(tmp_path / "result"))
    assert torch.equal(loaded.scores, result.scores)
    assert (loaded.target, loaded.options, loaded.tokens) == (result.target, result.options, result.tokens)
    assert result.top(1)[0].token in result._repr_html_() or "|" in result._repr_html_()
    frame = result.to_dataframe()
    assert (frame["kind"] == "token").sum() == result.scores.numel()
    for baseline in (torch.arange(3, 9), torch.zeros(16), a, ["mean", torch.zeros(6, 16)]):
        of_baseline = tlens.attribute(a, 5, method="difference", baseline=baseline)
        again = tlens.Attribution.load(of_baseline.save(tmp_path / "other"))
        assert torch.equal(again.scores, of_baseline.scores)


def test_provenance_names_both_models(model_named):
    a = tlens.freeze(model_named(ONE), some_tokens())
    other = tiny_model(ONE)
    other.cfg.model_name = "the other"
    b = tlens.freeze(other, some_tokens())
    provenance = tlens.difference(a, b).provenance()
    assert provenance["second model"] == "the other"
    assert {f"second {name}": value for name, value in b.provenance().items()}.items() <= provenance.items()
    first = {name: value for name, value in provenance.items() if not name.startswith("second ")}
    assert first == a.provenance() | {"weights": a.capture.weights.digest}


# ------------------------------------------------------------------ random models


@pytest.mark.whole
@settings(max_examples=settings.default.max_examples, suppress_health_check=list(HealthCheck))
@given(st.one_of(hooked(), bridge()) if HOOKED else bridge(), prompts(), st.sampled_from([1e-6, 1.0]))
def test_any_configuration_is_complete(configuration, prompt, size):
    """Models whose runs tell how their blocks are put together: LayerNorm takes two channels to ±1 whatever they are,
    and where an MLP gives nothing nobody sees what it reads. Those may be refused, and are not silently wrong."""
    model = build(*configuration)
    assume(model.cfg.d_model >= 6 and sum(prompt[0]) > 3)
    tokens, mask = padded(*prompt)
    try:
        a = tlens.freeze(model, tokens, attention_mask=mask)
    except Exception:  # what a pass holds, or is refused of, is test_fuzz's question
        assume(False)
    b = moved(a, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", tlens.GapWarning)
            result = tlens.attribute(tlens.difference(a, b), 5)
    except (tlens.UnsupportedModelError, tlens.InvalidInputError) as refusal:
        assume("attention scores cannot be read" not in str(refusal))  # shortformers with the blocks of OLMo 2
        assume(not gives_nothing(a) and not gives_nothing(b))
        raise
    change = summed(result) - (logits(a) - result_of(b))[..., 5].gather(1, result.queries)
    scale = a.unembedded().abs().amax() * a.view.unembedding[0][:, 5].norm()
    assert float(change.abs().max()) <= 1e-6 * float(result.scores.abs().sum()) + 1e-6 * float(scale)
    assert hooks_left(model) == 0


def result_of(frozen):
    """A run's logits by its last states, before any soft cap: the hooks that it ran under are gone."""
    factor = frozen.view.logit_factor
    W_U, b_U = frozen.view.unembedding
    return frozen.unembedded() @ W_U * factor + (0 if b_U is None else b_U * factor)


def gives_nothing(frozen):
    """Whether the MLP of some block gives nothing at any token: no neuron is active."""
    hidden = [frozen.activation(block.pre) for block in frozen.points.blocks if block.pre is not None]
    return any(bool((z[frozen.mask] <= 0).all()) for z in hidden)


# ------------------------------------------------------------------ the proof sees every part


def scaled_linear(name):
    """A secant of one matrix that is one percent too large."""

    def secant(a, b, x_a, x_b, of):
        stages = parts.linear_secant(a, b, x_a, x_b, of)
        if not of.endswith(name):
            return stages
        return (Linear(stages[0].weight * 1.01), *stages[1:])

    return [(change_module, "linear_secant", secant)]


def scaled_result(*places):
    """A function whose result is one percent too large, wherever it was imported."""
    module, name = places[0]
    original = getattr(module, name)

    def secant(*args, **options):
        result = original(*args, **options)
        return replace(result, read=result.read * 1.01) if hasattr(result, "read") else result * 1.01

    return [(place, called, secant) for place, called in places]


def scaled_map(kind):
    original = kind._forward
    return [(kind, "_forward", lambda self, x, affine: original(self, x, affine) * 1.01)]


WRONG = {
    **{name: scaled_linear(name) for name in ("W_V", "W_O", "W_Q", "W_K", "W_in", "W_out")},
    "slopes": scaled_result((numbers, "slope"), (change_module, "slope"), (scores_module, "slope")),
    "patterns": scaled_result((scores_module, "mean_share")),
    "scales of norms": scaled_result((parts, "scale_response"), (change_module, "scale_response")),
    "queries": scaled_map(QueryResponse),
    "keys": scaled_map(KeyResponse),
}


@pytest.mark.parametrize("part", WRONG)
@pytest.mark.parametrize("name", [name for name in ("hooked/ln", "bridge/gpt2") if name in model_names()])
def test_the_proof_refuses_each_part_that_is_wrong(name, part, model_named, monkeypatch):
    model = model_named(name)
    a, b = (tlens.freeze(model, tokens) for tokens in (some_tokens(), some_tokens().flip(1)))
    tlens.difference(a, b)
    for place, called, wrong in WRONG[part]:
        monkeypatch.setattr(place, called, wrong)
    with pytest.raises(tlens.UnsupportedModelError, match="does not give the difference of its outputs"):
        tlens.difference(a, b)


@pytest.mark.parametrize("name", [name for name in ("hooked/ln", "bridge/gpt2") if name in model_names()])
def test_a_hooked_run_is_asked_at_any_query(name, model_named):
    """Its logits are compared everywhere while its hooks stand: nobody can run it again."""
    model = model_named(name)
    plain = tlens.freeze(model, some_tokens())
    vector = torch.randn(model.cfg.d_model, dtype=torch.float64)
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x + vector)]):
        hooked = tlens.freeze(model, some_tokens())
        expected = model(some_tokens()).detach()
    expected = (expected - model(some_tokens()).detach())[..., 5]
    result = tlens.attribute(tlens.difference(hooked, plain), 5, query="all")
    assert torch.allclose(result.scores.sum(-1) + result.bias, expected, rtol=1e-9, atol=1e-9)
    for method in ("frozen", "frozen+qk"):
        with pytest.raises(tlens.InvalidInputError, match=r"in one of the two passes only \(blocks.1.hook_resid_pre\)"):
            tlens.circuits.edge_scores(hooked, plain, 5, method=method)


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="HookedTransformer is gone in TransformerLens 4")
def test_other_activation_functions_are_another_architecture():
    """What an activation function changes is no token's."""
    first = tiny_model("hooked/ln")
    second = copy.deepcopy(first)
    for block in second.blocks:
        block.mlp.act_fn = torch.nn.functional.relu
    passes = [
        tlens.freeze(model, tokens) for model, tokens in ((first, some_tokens()), (second, some_tokens().flip(1)))
    ]
    with pytest.raises(tlens.InvalidInputError, match=r"blocks.0 has two activation functions"):
        tlens.difference(*passes)


@pytest.mark.parametrize(
    "of",
    [
        lambda change: circuits.logit_attribution(change, 5),
        lambda change: circuits.logit_attribution(change, 5, by="head", query=[2, -1]),
        lambda change: circuits.paths(change, 5, max_order=2),
        lambda change: circuits.contribution_graph(change, 5),
        lambda change: circuits.routes(change, 5),
        lambda change: tlens.attribute(change, 5),
    ],
)
def test_a_difference_that_is_rounding_is_no_gap(of):
    """Two models that differ in the last bits: the parts miss the total by as much, and none is wrong."""
    model = tiny_model("bridge/gpt2").to(torch.float32)
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    change = tlens.difference(tlens.freeze(model, tokens), tlens.freeze(other, tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GapWarning)
        assert float(torch.as_tensor(of(change).gap).max()) > change.allowed_gap


def test_a_wrong_difference_is_still_a_gap():
    """What rounding explains is small beside a change of a token."""
    model = tiny_model("bridge/gpt2").to(torch.float32)
    runs = [tlens.freeze(model, torch.tensor([tokens])) for tokens in ([3, 4, 5, 6, 7], [3, 4, 8, 6, 7])]
    change = tlens.difference(*runs)
    terms = circuits.logit_attribution(change, 5)
    wrong = replace(terms, total=terms.total * 1.01)
    size = terms.scores.abs().sum(-1)
    with pytest.warns(GapWarning, match="beyond rounding"):
        change.checked(wrong, stream_target(change, 5, None, None, -1, "frozen", one=False).noise / size)


def test_special_tokens_stay_in_a_baseline_of_one_thing():
    """BOS has no content, and without it streams may be thousands of times shorter."""
    model = tlens.load_demo_model(kind="bridge", dtype=torch.float64)
    frozen = tlens.freeze(model, ["If the", "while True"], prepend_bos=True)
    first = frozen.tokens[:, 0]
    assert set(first.tolist()) <= set(model.tokenizer.all_special_ids)
    result = tlens.methods.difference(frozen, target=" the", baseline="mean")
    assert not result.scores[..., 0].any()
    other = tlens.methods.difference(frozen, target=" the", baseline=5)
    tokens = torch.where(torch.arange(frozen.tokens.shape[1]) > 0, 5, frozen.tokens)
    by_ids = tlens.methods.difference(frozen, target=" the", baseline=tokens)
    assert torch.allclose(other.scores, by_ids.scores, rtol=1e-9, atol=1e-12)
    whole = tlens.freeze(model, first[:1, None])
    assert tlens.methods.difference(whole, target=" the", baseline=5).scores.any()


def test_scores_that_are_rounding_are_refused_by_position(monkeypatch):
    """As they are on a large model where one run has an attention sink and the other has none."""
    model = tiny_model("bridge/llama")
    frozen = tlens.freeze(model, [[3, 4, 5]])
    short = frozen.resid_pre(0)[0].clone()
    short[1] *= 1e-4
    monkeypatch.setattr(sys.modules["tensorlens_tl.methods.difference"], "LARGEST_GAP", -1.0)
    with pytest.raises(tlens.NumericalError, match=r"At position 1 one run's stream is up to 10000 times as long"):
        tlens.methods.difference(frozen, target=7, baseline=short)
    assert tlens.methods.difference(frozen, target=7, baseline=[5, 6, 7]).scores.any()


def test_a_difference_of_two_dtypes_that_is_refused_names_them(monkeypatch):
    wide = tiny_model("bridge/gpt2").to(torch.float32)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    runs = [tlens.freeze(model, some_tokens()[:1]) for model in (wide, narrow)]
    monkeypatch.setattr(tlens.Difference, "tolerance", 1e-6)
    with pytest.raises(tlens.UnsupportedModelError, match=r"in float32, the other in bfloat16.*one dtype"):
        tlens.difference(*runs)


@pytest.mark.parametrize("method", ["tensorlens", "attnlrp"])
def test_what_a_sum_misses_is_printed_whether_or_not_it_should_be_exact(demo_model, capsys, method):
    scores = tlens.attribute(demo_model, "The value is not found, a", 5, method=method)
    scores.show()
    title = capsys.readouterr().out.splitlines()[0]
    assert f"gap {float(scores.gap.max()):.1e}" in title
    assert scores.additive is not title.endswith("no exact sum")
