"""Layer maps of encoder–decoders: every one of them beside literal loops over the live model's values and patterns."""

from dataclasses import replace

import pytest
import torch
from conftest import close, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import contextualisation
from tensorlens_tl.requirements import REQUIREMENTS
from tensorlens_tl.testing import encoder_decoder_names, method_checks, parametrize_with_checks, tiny_input

pytestmark = pytest.mark.numeric

NAMES = encoder_decoder_names()
LAYOUTS = [name for name in ("encoder-decoder/tied", "bridge/bart", "bridge/t5gemma") if name in NAMES]
"""Pre-LN, post-LN and sandwich blocks."""

METHODS = (
    "attention", "rollout", "mean", "norm", "globenc", "alti", "ifr", "ff-ig", "alti-logit", "chefer", "value-zeroing",
    "leave-one-out",
)  # fmt: skip
VARIED = {
    "attention, heads": ("attention", {"head_reduction": None}),
    "norm, attn_res_ln": ("norm", {"scope": "attn_res_ln"}),
    "ifr, sum": ("ifr", {"aggregate": "sum"}),
    "alti-logit, all": ("alti-logit", {"updates": "all"}),
    "rollout, alti": ("rollout", {"layer_map": "alti"}),
}


def battery(models):
    for case, (method, options) in ({method: (method, {}) for method in METHODS} | VARIED).items():
        target = {}
        if REQUIREMENTS["predictions"] in tlens.get_method(method).requirements():
            target = {"target": 5}
        for check in method_checks(method, models, options=target | options):
            yield replace(check, name=f"{case} on {check.name}")


BY_DEFAULT = [name for name in ("encoder-decoder/tied", "bridge/bart", "bridge/t5") if name in NAMES]


@parametrize_with_checks(battery(BY_DEFAULT))
@pytest.mark.few(8)
def test_battery(check):
    check()


@pytest.mark.whole
@parametrize_with_checks(battery([name for name in NAMES if name not in BY_DEFAULT]))
def test_battery_on_other_models(check):
    check()


# ------------------------------------------------------------------------------------------ in loops


class Norm:
    """The linear part of a norm at the live model's scale, from its module; the identity without a name."""

    def __init__(self, frozen, cache, layer, name):
        self.shift = 0
        self.scale = None
        if name is None:
            return
        at = f"{frozen.view.blocks[layer].name}.{name}"
        module = frozen.model.get_submodule(at)
        module = getattr(module, "original_component", module)
        gain = module.w if hasattr(module, "w") else module.weight
        self.centre = isinstance(module, torch.nn.LayerNorm)
        self.gain = 1 + gain if "Gemma" in type(module).__name__ else gain
        self.shift = module.bias if self.centre else 0
        self.scale = cache[f"{at}.hook_scale"]

    def __call__(self, vectors):
        """Of vectors `[batch, query, d_model]`, or of several for each query."""
        if self.scale is None:
            return vectors
        if self.centre:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        scale = self.scale[:, :, None] if vectors.ndim == 4 else self.scale
        return vectors / scale * self.gain


class Sum:
    """One attention of the live model: what every source token gives every query.

    Attributes:
        x: the stream that it is added to, at the positions `queries` of both sides.
        heads: what each head gives a query from one of `keys`, `[batch, query, key, d_model]`, through the norm after
            attention where there is one; `vectors` is their sum.
        constant: what belongs to no token.
        norm: around the sum.
    """

    def __init__(self, frozen, cache, layer, is_cross, x):
        block, points, layout = frozen.view.blocks[layer], frozen.points.blocks[layer], frozen.layouts[layer]
        self.is_cross = is_cross
        self.queries = self.keys = list(range(*frozen.capture.side(layer)))
        weights, at, place = block.attention, points.heads, layout.attn
        if is_cross:
            weights, at, place = block.cross_attention, points.cross, layout.cross
            self.keys = list(range(frozen.sides[0]))
        self.norm, after = (Norm(frozen, cache, layer, name) for name in (place.outer, place.after))
        self.x, self.pattern = x, cache[at.pattern]
        W_O = weights.W_O.view(weights.heads, -1, weights.W_O.shape[-1])
        self.heads = []
        for head in range(weights.heads):
            u = cache[at.value][:, :, head // (weights.heads // weights.kv_heads)] @ W_O[head]
            given = x.new_zeros(len(x), len(self.queries), len(self.keys), x.shape[-1])
            for query in range(len(self.queries)):
                for key in range(len(self.keys)):
                    given[:, query, key] = self.pattern[:, head, query, key, None] * u[:, key]
            self.heads.append(after(given))
        self.vectors = sum(self.heads)
        self.constant = after.shift + (0 if weights.b_O is None else after(weights.b_O.expand_as(x)))

    @property
    def with_stream(self):
        """The vectors, with the stream added to what a token gives itself; cross-attention has no such column."""
        vectors = self.vectors.clone()
        if not self.is_cross:
            for row in range(len(self.queries)):
                vectors[:, row, row] += self.x[:, row]
        return vectors

    @property
    def y(self):
        """The sum, biases included."""
        return self.x + self.vectors.sum(2) + self.constant

    @property
    def output(self):
        return self.norm(self.y) + self.norm.shift


def cache_of(frozen):
    with torch.no_grad():
        return frozen.model.run_with_cache(**frozen.inputs)[1]


def literal(frozen):
    """The attentions of every block, each with its norms and those of the MLP that follows."""
    cache, blocks = cache_of(frozen), []
    for layer, layout in enumerate(frozen.layouts):
        sums = [Sum(frozen, cache, layer, False, frozen.resid_pre(layer)[:, slice(*frozen.capture.side(layer))])]
        if layout.cross is not None:
            sums.append(Sum(frozen, cache, layer, True, sums[0].output))
        blocks.append((sums, {place: Norm(frozen, cache, layer, getattr(layout.mlp, place)) for place in PLACES}))
    return blocks


PLACES = ("before", "after", "outer")


@pytest.fixture(params=LAYOUTS)
def name(request):
    return request.param


@pytest.fixture
def frozen(name, model_named):
    input, options = tiny_input(model_named(name))
    return tlens.freeze(model_named(name), input, **options)


def identity(frozen):
    batch, pos = frozen.tokens.shape
    return torch.eye(pos, dtype=torch.float64).repeat(batch, 1, 1)


def placed(frozen, *rows):
    """Rows of attentions, `(attention, values)`, in one map with the identity at the other tokens."""
    whole = identity(frozen)
    whole[:, rows[0][0].queries] = 0
    for attention, values in rows:
        for row, query in enumerate(attention.queries):
            for column, key in enumerate(attention.keys):
                whole[:, query, key] = values[:, row, column]
    return whole


def around(sums, attention, vectors):
    """Vectors of an attention through the norm around its sum, and around the sum that follows in its block."""
    for later in sums[sums.index(attention) :]:
        vectors = later.norm(vectors)
    return vectors


@pytest.fixture
def same(name):
    def check(values, expected):
        assert values.shape == expected.shape
        assert float((values - expected).norm() / expected.norm()) < tolerance(name)

    return check


def test_the_loops_are_the_live_model(frozen, same):
    """What they sum to is what the live model's own norms give, or read next."""
    cache, compared = cache_of(frozen), 0
    for layer, (sums, _) in enumerate(literal(frozen)):
        block = frozen.view.blocks[layer].name
        post = frozen.layouts[layer].name == "post"
        for number, attention in enumerate(sums):
            names = [f"{block}.ln{number + 1}.hook_out"] if post else [f"{block}.ln{number + 2}.hook_in"]
            names += [f"{block}.hook_resid_mid{'_cross' * attention.is_cross}"] * (not post)
            for at in [at for at in names if at in cache]:
                same(attention.output, cache[at])
                compared += 1
    assert compared >= 6


def test_attention_and_its_rollout(frozen, same):
    maps = torch.stack([placed(frozen, *((a, a.pattern.mean(1)) for a in sums)) for sums, _ in literal(frozen)])
    same(tlens.registry.get_layer_map("attention")(frozen), maps)
    encoder, first = frozen.sides[0], frozen.view.encoder_layers
    mean = torch.cat([maps[:first, :, :encoder].mean(0), maps[first:, :, encoder:].mean(0)], dim=1)
    for method in ("attention", "mean"):
        same(tlens.attribute(frozen, method=method).scores, mean)
    same(mean.sum(-1), torch.tensor([1.0] * encoder + [2.0] * frozen.sides[1]).expand(2, -1))
    flow = identity(frozen)
    for block in maps:
        flow = (0.5 * block / block.sum(-1, keepdim=True) + 0.5 * identity(frozen)) @ flow
    same(tlens.attribute(frozen, method="rollout").scores, flow)
    heads = tlens.attribute(frozen, method="attention", head_reduction=None)
    same(heads.layers.mean(2)[first:, :, encoder:], maps[first:, :, encoder:])
    assert not heads.layers[:first, :, :, encoder:].any()


@pytest.mark.parametrize("scope", ["attn", "attn_res", "attn_res_ln"])
def test_norms(frozen, scope, same):
    expected = []
    for sums, _ in literal(frozen):
        rows = []
        for attention in sums:
            vectors = attention.vectors if scope == "attn" else attention.with_stream
            vectors = around(sums, attention, vectors) if scope == "attn_res_ln" else vectors
            rows.append((attention, vectors.norm(dim=-1)))
        expected.append(placed(frozen, *rows))
    same(tlens.attribute(frozen, method="norm", scope=scope).layers, torch.stack(expected))


def test_globenc(frozen, same):
    flow = identity(frozen)
    for sums, mlp in literal(frozen):
        second = mlp["outer"] if frozen.layouts[0].name == "post" else mlp["before"]
        rows = [(a, second(around(sums, a, a.with_stream)).norm(dim=-1)) for a in sums]
        flow = placed(frozen, *rows) @ flow
    same(tlens.attribute(frozen, method="globenc").scores, flow)


def nearer(y, vector):
    return (y.norm(p=1, dim=-1) - (y - vector).norm(p=1, dim=-1)).clamp_min(0)


def with_rest(frozen, attention, tokens, rest):
    """A map of one attention with what the stream keeps of its sum."""
    joint = placed(frozen, (attention, tokens))
    for row, query in enumerate(attention.queries):
        joint[:, query, query] += rest[:, row]
    return joint


def literal_alti(frozen):
    """C of every attention among all tokens."""
    maps = []
    for sums, _ in literal(frozen):
        for attention in sums:
            vectors = attention.norm(attention.with_stream)
            tokens = torch.stack([nearer(attention.output, vectors[:, :, k]) for k in range(vectors.shape[2])], dim=-1)
            rest = nearer(attention.output, attention.norm(attention.x)) * attention.is_cross
            total = tokens.sum(-1) + rest
            maps.append(with_rest(frozen, attention, tokens / total[..., None], rest / total))
    return maps


def test_alti_plus(frozen, same):
    """Shares of the encoder's tokens and of the stream, whose share goes on to the decoder's tokens."""
    flow = identity(frozen)
    for joint in literal_alti(frozen):
        flow = joint @ flow
    result, encoder = tlens.attribute(frozen, method="alti"), frozen.sides[0]
    same(result.scores, flow)
    assert close(result.scores.sum(-1), torch.ones_like(flow[..., 0]))
    assert float(result.scores[:, encoder:, :encoder].sum(-1).min()) > 0.05
    assert not result.scores[:, :encoder, encoder:].any()


def test_ifr(frozen, same):
    flow, summed = identity(frozen), 0 * identity(frozen)
    for sums, _ in literal(frozen):
        for attention in sums:
            keys = range(attention.vectors.shape[2])
            edges = sum(torch.stack([nearer(attention.y, u[:, :, k]) for k in keys], -1) for u in attention.heads)
            stream = nearer(attention.y, attention.x)
            total = edges.sum(-1) + stream
            flow = with_rest(frozen, attention, edges / total[..., None], stream / total) @ flow
            only = placed(frozen, (attention, edges / total[..., None]))
            summed[:, attention.queries] += only[:, attention.queries]
    same(tlens.attribute(frozen, method="ifr").scores, flow)
    same(tlens.attribute(frozen, method="ifr", aggregate="sum").scores, summed)


@pytest.mark.parametrize("as_printed", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "bridge/t5gemma"])
def test_ff_ig(frozen, name, as_printed, same):
    """Through an MLP whose activation is its ratio at the live pre-activations; the widest scope ends in the norm that
    reads the block's output, of the encoder's last block that of the encoder."""
    cache, expected = cache_of(frozen), []
    post = frozen.layouts[0].name == "post"
    for layer, (sums, mlp) in enumerate(literal(frozen)):
        points, weights = frozen.points.blocks[layer], frozen.view.blocks[layer].dense_mlp
        pre, hidden = cache[points.pre], cache[points.post]
        ratio = (hidden / pre).reshape(len(frozen.tokens), -1, 1, pre.shape[-1])
        rows = []
        for attention in sums:
            given = attention.with_stream
            if as_printed:  # without b_V, and what the norm before adds
                given = given - biases_of(frozen, cache, layer, attention)
            vectors = around(sums, attention, given)
            bypass = vectors
            if as_printed:
                bypass = torch.zeros_like(vectors)
                for row in range(len(attention.queries) * (not attention.is_cross)):
                    bypass[:, row, row] = vectors[:, row, row]
            ff = ((mlp["before"](vectors) @ weights.W_in) * ratio) @ weights.W_out
            through = mlp["outer"] if post else next_norm(frozen, cache, layer)
            rows.append((attention, through(ff + bypass).norm(dim=-1)))
        expected.append(placed(frozen, *rows))
    same(tlens.attribute(frozen, method="ff-ig", as_printed=as_printed).layers, torch.stack(expected))


def biases_of(frozen, cache, layer, attention):
    """What b_V gives through every head and pair; the models here have norms without a shift before attention."""
    block = frozen.view.blocks[layer]
    weights = block.cross_attention if attention.is_cross else block.attention
    if weights.b_V is None:
        return 0
    W_O = weights.W_O.view(weights.heads, -1, weights.W_O.shape[-1])
    constant = torch.einsum("hd,hdm->hm", weights.b_V.view(weights.heads, -1), W_O)
    return torch.einsum("bhqk,hm->bqkm", attention.pattern, constant)


def next_norm(frozen, cache, layer):
    """The linear part of the norm that reads a pre-LN block's output."""
    at = "encoder_final_ln" if layer + 1 == frozen.view.encoder_layers else "decoder_final_ln"
    if layer + 1 not in (frozen.view.encoder_layers, frozen.n_layers):
        return Norm(frozen, cache, layer + 1, "ln1")
    gain = 1  # what the encoder ends with is shown before its gain, which cross-attention's weights have
    if at.startswith("decoder"):  # tied logits are those of the stream times this
        gain = frozen.model.get_submodule(at).w * frozen.model.cfg.d_model**-0.5
    return lambda vectors: vectors / cache[f"{at}.hook_scale"][:, :, None] * gain


@pytest.mark.parametrize("name", ["encoder-decoder/tied"])
@pytest.mark.skipif("encoder-decoder/tied" not in LAYOUTS, reason="TransformerLens 4 has no HookedEncoderDecoder")
def test_alti_logit(frozen, name, same):
    """What each head adds to the live logit through the final norm, on through ALTI's products before it."""
    model, cache = frozen.model, cache_of(frozen)
    g = model.unembed.W_U[:, 5] * model.cfg.d_model**-0.5 * model.decoder_final_ln.w
    g = g / cache["decoder_final_ln.hook_scale"][:, -1]
    products, expected = identity(frozen), 0
    maps = literal_alti(frozen)
    for attention in [attention for sums, _ in literal(frozen) for attention in sums]:
        if attention.queries[0]:
            given = (attention.vectors[:, -1] * g[:, None]).sum(-1)
            expected = expected + torch.einsum("bk,bkj->bj", given, products[:, attention.keys])
        products = maps.pop(0) @ products
    result = tlens.attribute(frozen, method="alti-logit", target=5)
    same(result.scores[:, 0], expected)
    with torch.no_grad():
        same(result.total[:, 0], model(**frozen.inputs)[:, -1, 5])
    everything = tlens.attribute(frozen, method="alti-logit", target=5, updates="all")
    assert float(everything.gap.max()) < 1e-9
    assert close(everything.scores.sum(-1) + everything.bias, result.scores.sum(-1) + result.bias)


# ------------------------------------------------------------------------------------------ of the live model

HOOKED = [name for name in ("encoder-decoder/tied", "encoder-decoder/gated") if name in NAMES]
"""Models whose values and patterns are changed where their hook points are."""


@pytest.mark.parametrize("name", HOOKED)
def test_chefer(frozen, same):
    """By the gradient of live patterns, rule after rule; of a batch the first prompt."""
    encoder, patterns = frozen.sides[0], {}
    points = [(p, p.cross) for p in frozen.points.blocks]
    names = [at.pattern for own, cross in points for at in (own.heads, cross) if at is not None]

    def see(pattern, hook):
        patterns[hook.name] = pattern
        return pattern

    logits = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(at, see) for at in names])
    R = torch.eye(frozen.tokens.shape[1], dtype=torch.float64)
    i, q = slice(0, encoder), slice(encoder, None)
    for at in names:
        (gradient,) = torch.autograd.grad(logits[0, -1, 5], patterns[at], retain_graph=True)
        A = (gradient * patterns[at])[0].clamp_min(0).mean(0).detach()
        if "cross" in at:
            bars = []
            for side in (q, i):
                rest = R[side, side] - torch.eye(len(R))[side, side]
                total = rest.sum(1, keepdim=True)
                bars.append(torch.where(total > 0, rest / total, 0) + torch.eye(len(R))[side, side])
            R[q, i] = R[q, i] + bars[0].T @ A @ bars[1]
        elif at.startswith("encoder"):
            R[i, i] = R[i, i] + A @ R[i, i]
        else:
            R[q, :] = R[q, :] + A @ R[q, :]
    same(tlens.attribute(frozen, method="chefer", target=5).scores[:1, 0], R[-1:])


@pytest.mark.parametrize("name", HOOKED)
def test_value_zeroing(frozen, same):
    """Each token's value zeroed in the live model's own hook, one layer after the other."""
    cache, flow = cache_of(frozen), identity(frozen)
    for layer, points in enumerate(frozen.points.blocks):
        start, stop = frozen.capture.side(layer)
        output, changes = frozen.capture.output_name(layer), 0 * flow
        for token in range(flow.shape[1]):
            at, place = points.heads.value, token - start
            if token < start:
                if points.cross is None:
                    continue
                at, place = points.cross.value, token
            if token >= stop:
                continue
            seen = {}

            def zero(values, hook, place=place):
                values = values.clone()
                values[:, place] = 0
                return values

            hooks = [(at, zero), (output, lambda live, hook, seen=seen: seen.update(live=live))]
            with torch.no_grad():
                frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
            angle = torch.nn.functional.cosine_similarity(seen["live"], cache[output], dim=-1)
            changes[:, start:stop, token] = 1 - angle
        changes = changes / changes.sum(-1, keepdim=True)
        changes[:, :start] = identity(frozen)[:, :start]
        changes[:, stop:] = identity(frozen)[:, stop:]
        flow = changes @ flow
    same(tlens.attribute(frozen, method="value-zeroing").scores, flow)


def test_leave_one_out(frozen, same):
    """Another token in the place of each one of either side, in the live model; nothing is deleted."""
    inputs, encoder = frozen.inputs, frozen.sides[0]
    decoder_argument = frozen.view.decoder_argument
    with torch.no_grad():
        losses = [frozen.model(**inputs)[:, -1, 5].clone() for _ in range(frozen.tokens.shape[1])]
        for token in range(len(losses)):
            side, place = ("input", token) if token < encoder else (decoder_argument, token - encoder)
            ids = inputs[side].clone()
            ids[:, place] = 11
            losses[token] -= frozen.model(**inputs | {side: ids})[:, -1, 5]
    result = tlens.attribute(frozen, method="leave-one-out", target=5, replacement=11)
    same(result.scores[:, 0], torch.stack(losses, dim=-1))
    with pytest.raises(tlens.UnsupportedModelError, match=r"replacement='delete': tokens of this .* either side"):
        tlens.attribute(frozen, method="leave-one-out", target=5, replacement="delete")


# ------------------------------------------------------------------------------------------ what is refused


def test_what_needs_one_attention_in_each_layer_is_refused(frozen):
    for call in (
        lambda: tlens.methods.flow_edges(frozen),
        lambda: tlens.methods.mixing_ratio(frozen),
        lambda: tlens.methods.head_norms(frozen),
        lambda: contextualisation.gain_against_ff(frozen),
        lambda: tlens.layerwise.locals_of(frozen),
    ):
        with pytest.raises(tlens.UnsupportedModelError, match="not supported for encoder–decoders"):
            call()


def test_a_layer_map_of_ones_own_says_that_it_is_for_both_stacks(frozen, clean_registry):
    @tlens.register_layer_map("diagonal", holds_residual=True)
    def diagonal(frozen):
        return torch.diag_embed(frozen.mask.double()).expand(frozen.n_layers, -1, -1, -1)

    with pytest.raises(tlens.UnsupportedModelError, match="mean: not supported for encoder–decoders"):
        tlens.attribute(frozen, method="mean", layer_map="diagonal")
    tlens.register_layer_map("both", holds_residual=True, both_stacks=True)(lambda frozen: diagonal(frozen))
    assert torch.equal(tlens.attribute(frozen, method="rollout", layer_map="both").scores, identity(frozen))
