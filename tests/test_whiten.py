"""Whitening as a layer: what it computes, putting it on models, and what a whitened model can and cannot do."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, whitening
from tensorlens_tl.testing import model_names, tiny_model

PLAIN = [name for name in ("hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/native") if name in model_names()]
WHITENED = [name for name in model_names() if "whitened" in name]
pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("ignore:.*is deprecated")]


@pytest.fixture(params=PLAIN)
def plain(request):
    return tiny_model(request.param)


@pytest.fixture(params=WHITENED)
def whitened(request):
    return tiny_model(request.param)


def logits(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, **options)


def make_random(model):
    """Filters that do something."""
    with torch.no_grad():
        for block in model.blocks:
            for part in (block.whitening.L_inv, block.whitening.M):
                part.weight.add_(0.1 * torch.randn_like(part.weight))
    return model


# ------------------------------------------------------------------ the layer


def test_the_layer_is_equation_9():
    layer = whitening.Whitening(5, 0).double()
    layer.L_inv.weight.data, layer.M.weight.data = torch.randn(2, 5, 5, dtype=torch.float64) / 3
    x, w = torch.randn(2, 9, 5, dtype=torch.float64), []
    for i in range(9):
        before = w[-1] @ layer.M.weight.T if w else 0
        w.append((x[:, i] - before) @ layer.L_inv.weight.T)
    assert close(layer(x), torch.stack(w, 1), atol=1e-12)
    assert layer.radius == pytest.approx(
        float(torch.linalg.eigvals(layer.L_inv.weight @ layer.M.weight).abs().max()), rel=1e-12
    )


def test_padding_is_left_out_of_the_recursion_whatever_it_holds():
    layer, x = whitening.Whitening(4, 0), torch.randn(2, 6, 4)
    with torch.no_grad():
        layer.M.weight.normal_(0, 0.3)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    x[0, :2] = float("nan")
    made = layer(x, mask)
    assert close(made[0, 2:], layer(x[:1, 2:])[0], atol=1e-6)
    assert not made[0, :2].any()
    assert close(made[1], layer(x[1:])[0], atol=1e-6)


# ------------------------------------------------------------------ putting it on


def test_the_identity_changes_nothing_at_all(plain):
    tokens = some_tokens()
    before = logits(plain, tokens)
    assert tlens.whiten(plain) is plain
    assert torch.equal(logits(plain, tokens), before)
    assert not torch.equal(logits(make_random(plain), tokens), before)


def test_hook_points_and_caches(whitened):
    _, cache = whitened.run_with_cache(some_tokens())
    for layer in range(2):
        at = f"blocks.{layer}."
        x, w = cache[at + "whitening.hook_in"], cache[at + "whitening.hook_out"]
        assert torch.equal(cache[at + "hook_resid_pre"], w)
        assert close(whitened.blocks[layer].whitening(x), w, atol=1e-12)
    assert torch.equal(cache["blocks.1.whitening.hook_in"], cache["blocks.0.hook_resid_post"])
    frozen = tlens.freeze(whitened, some_tokens(), cache=cache)
    assert torch.equal(frozen.resid_pre(1), cache["blocks.1.whitening.hook_in"])
    assert close(frozen.capture.resid_read(1), cache["blocks.1.whitening.hook_out"], atol=1e-12)


def test_state_dict_and_copies_are_exact(plain):
    tokens = some_tokens()
    made = make_random(tlens.whiten(plain))
    own = logits(made, tokens)
    state = made.state_dict()
    assert {f"blocks.{b}.whitening.{part}.weight" for b in (0, 1) for part in ("L_inv", "M")} <= set(state)
    twin = copy.deepcopy(made)
    assert torch.equal(logits(twin, tokens), own)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(logits(made, tokens), own)
    assert torch.equal(logits(twin, tokens), own)  # a copy whitens with its own filters
    state = twin.state_dict()
    made.load_state_dict(state)
    assert torch.equal(logits(made, tokens), own)
    with pytest.raises(tlens.UnsupportedModelError, match="center_writing_weights"):
        getattr(twin, "process_weights_" if hasattr(twin, "process_weights_") else "enable_compatibility_mode")()


def test_a_layer_can_be_pickled():
    layer = make_random(tlens.whiten(tiny_model(PLAIN[0]))).blocks[1].whitening
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_both_maps_learn(plain):
    model = tlens.whiten(plain)
    loss = model(some_tokens(), return_type="loss")
    loss.backward()
    for block in model.blocks:
        assert float(block.whitening.L_inv.weight.grad.abs().max()) > 0
        assert float(block.whitening.M.weight.grad.abs().max()) > 0


@pytest.mark.parametrize("filters", ["random", "estimated", "pairs"])
def test_other_starts(plain, filters):
    x = torch.randn(40, 6, 16)
    given = {
        "random": "random",
        "estimated": [whitening.estimate(x)] * 2,
        "pairs": [(2 * torch.eye(16), 0.5 * torch.eye(16))] * 2,
    }[filters]
    model = tlens.whiten(plain, init=given)
    for block, start in zip(model.blocks, given, strict=False):
        if filters != "random":
            L_inv, M = (start.L_inv, start.M) if filters == "estimated" else start
            assert close(block.whitening.L_inv.weight, L_inv.double(), atol=1e-12)
            assert close(block.whitening.M.weight, M.double(), atol=1e-12)
    assert tlens.freeze(model, [[3, 4, 5, 6]]).errors["blocks.1"] < 1e-6


# ------------------------------------------------------------------ the frozen model


def test_no_later_token_reaches_a_query(whitened):
    frozen = tlens.freeze(whitened, some_tokens())
    dense = frozen.operator().dense()
    later = torch.ones(dense.shape[1], dense.shape[1]).triu(1).bool()
    assert not dense.permute(1, 3, 0, 2, 4)[later].any()
    assert frozen.causal


def test_every_token_passes_something_on_without_attention(whitened):
    """With all heads and MLPs left out, what is left is the two recursions."""
    op = tlens.freeze(whitened, some_tokens()).operator(heads={0: [], 1: []}, mlp=False, final_norm=False)
    first, second = (block.whitening for block in whitened.blocks)
    x = torch.randn_like(op.x)
    with torch.no_grad():
        assert close(op.push(x), second(first(x)), atol=1e-12)


def test_whitening_is_a_node_of_the_graph_and_its_edges_keep_their_positions(whitened):
    frozen = tlens.freeze(whitened, some_tokens(1))
    graph = circuits.contribution_graph(frozen, target=5, threshold=0)
    nodes, edges = graph.nodes, graph.edges
    assert graph.gap < 1e-9
    place = {(row["name"], row["pos"]): number for number, row in nodes.iterrows()}
    weight = {(e["source"], e["target"]): e["weight"] for _, e in edges.iterrows()}
    asked = circuits.stream.stream_target(frozen, 5, None, None, -1, "frozen")
    met = asked.stream.pull(asked.seed).stream[1][0, 0]  # after the first whitening
    entry, step = frozen.view.blocks[0].whitening.entry, frozen.view.blocks[0].whitening.step
    sources = asked.stream.sources()
    for (i, j), (name, part) in zip([(4, 4), (4, 3), (4, 0), (2, 1)], list(sources.items()) * 4, strict=False):
        expected = part[0, j] @ entry @ torch.linalg.matrix_power(step, i - j) @ met[i]
        assert weight[place[name, j], place["L0.whitening", i]] == pytest.approx(float(expected), abs=1e-9)
    assert not set(edges["target"]) & {place[name, 0] for name in sources}
    entering = edges[edges["target"] == place["L1.whitening", 3]]["weight"].sum()
    assert entering == pytest.approx(nodes["weight"][place["L1.whitening", 3]], abs=1e-9)


def test_the_layer_before_whitening_has_no_next_norm(whitened):
    frozen = tlens.freeze(whitened, some_tokens())
    if frozen.layouts[0].parallel:
        pytest.skip("ff-ig refuses parallel blocks")
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .* is whitened.*atb_ln_ff_res"):
        tlens.attribute(frozen, method="ff-ig")
    tlens.attribute(frozen, method="ff-ig", scope="atb_ln_ff_res")


@pytest.mark.parametrize("what", ["full_ov", "full_qk", "virtual_head", "copying", "svd_tokens"])
def test_products_of_weights_across_whitening_are_refused(whitened, what):
    ask = {
        "full_ov": lambda: circuits.full_ov(whitened, 0, 1),
        "full_qk": lambda: circuits.full_qk(whitened, 0, 1, offset=1),
        "virtual_head": lambda: circuits.virtual_head(whitened, [(0, 1), (1, 1)]),
        "copying": lambda: circuits.copying_scores(whitened),
        "svd_tokens": lambda: circuits.svd_tokens(whitened, 0, 1),
    }[what]
    with pytest.raises(tlens.UnsupportedModelError, match=f"{what}: .* is whitened"):
        ask()
    assert circuits.ov(whitened, 0, 1).AB.shape == (16, 16)


# ------------------------------------------------------------------ what it cannot do


def test_generation_needs_no_cache_or_refuses_it(whitened):
    tokens = some_tokens(1)[:, :4]
    options = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    with torch.no_grad():
        made = whitened.generate(tokens, use_past_kv_cache=False, **options)
        expected = tokens
        for _ in range(4):
            expected = torch.cat([expected, whitened(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, expected)
    try:
        with torch.no_grad():
            cached = whitened.generate(tokens, use_past_kv_cache=True, **options)
    except tlens.UnsupportedModelError as refusal:
        assert "use_past_kv_cache=False" in str(refusal)  # noqa: PT017
    else:
        assert torch.equal(cached, expected)  # a native Bridge has no cache to continue from


def test_padding_on_the_left_changes_nothing(whitened):
    tokens = some_tokens()
    padded = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    alone = logits(whitened, tokens)
    assert close(logits(whitened, padded, attention_mask=mask)[:, 3:], alone, atol=1e-9)
    assert close(logits(whitened, tokens), alone)  # nothing of the mask is left behind


CALLS = {
    "scores": lambda model, tokens, mask, at: model(tokens, attention_mask=scores_of(mask), position_ids=at),
    "mask": lambda model, tokens, mask, at: model(tokens, attention_mask=mask, position_ids=at),
    "unnamed": lambda model, tokens, mask, at: model.original_model(tokens, None, mask, position_ids=at).logits,
    "inside": lambda model, tokens, mask, at: (
        model.original_model.base_model(tokens, attention_mask=mask, position_ids=at).last_hidden_state
    ),
}


def scores_of(mask):
    """The mask as what is added to attention scores, `[batch, 1, query, key]`."""
    seen = torch.ones(mask.shape[1], mask.shape[1]).tril().bool() & mask.bool()[:, None, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("left_out", [(0, 1), (3, 4)])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("bridge/whitened", how) for how in CALLS),
        *(("bridge/whitened-neox", how) for how in ("scores", "mask", "inside")),
    ],
)
def test_padding_is_seen_however_the_mask_is_given(name, how, left_out):
    """At the start or in the middle. (NeoX takes a mask by its name only, a native model no positions.)"""
    model, tokens = tiny_model(name), some_tokens()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, left_out] = 0
    real, padded = mask[0].bool(), torch.full((2, 8), 7)
    padded[:, real] = tokens
    with torch.no_grad():
        made = CALLS[how](model, padded, mask, (mask.cumsum(-1) - 1).clamp_min(0))
        alone = CALLS[how](model, tokens, torch.ones_like(tokens), torch.arange(6).expand(2, 6))
    assert close(made[:, real], alone, atol=1e-9)


def test_a_gap_is_left_out_of_the_recursion():
    layer, x = whitening.Whitening(4, 0), torch.randn(2, 6, 4)
    with torch.no_grad():
        layer.M.weight.normal_()
    mask = torch.tensor([[True, False, True, True, False, True], [True] * 6])
    made = layer(x, mask)
    assert close(made[0, mask[0]], layer(x[:1, mask[0]])[0], atol=1e-6)
    assert close(made[1], layer(x[1:])[0], atol=1e-6)
    assert not made[0, ~mask[0]].any()


def padded_at(count):
    """Tokens behind so much padding, and their mask."""
    tokens, mask = torch.cat([some_tokens()[:, :count], some_tokens()], 1), torch.ones(2, 6 + count, dtype=torch.long)
    mask[:, :count] = 0
    return tokens, mask


def test_a_run_inside_a_run_leaves_its_mask_alone():
    model, (padded, mask) = tiny_model("bridge/whitened"), padded_at(2)
    alone, once = logits(model, padded, attention_mask=mask), []

    def again(tensor, hook):
        if not once:
            once.append(hook)
            logits(model, some_tokens())

    with torch.no_grad():
        made = model.run_with_hooks(padded, attention_mask=mask, fwd_hooks=[("blocks.0.hook_resid_post", again)])
    assert once
    assert torch.equal(made, alone)


def test_threads_keep_their_own_masks():
    model = tiny_model("bridge/whitened-neox").original_model

    def run(count):
        tokens, mask = padded_at(count)
        return logits(model, tokens, attention_mask=mask).logits

    alone = {count: run(count) for count in (1, 3)}
    counts = [1, 3] * 20
    with ThreadPoolExecutor(2) as pool:
        assert all(close(made, alone[count]) for count, made in zip(counts, pool.map(run, counts), strict=True))


STARTING = [name for name in WHITENED if name.startswith("hooked/") or "hooked/whitened" not in WHITENED]
"""Where TransformerLens can start at a layer: HookedTransformer, and the Bridge of 4.x."""


@pytest.mark.parametrize("name", STARTING)
def test_starting_at_a_layer_whitens_there(name):
    model, tokens = tiny_model(name), some_tokens()
    with torch.no_grad():
        later = model(model(tokens, stop_at_layer=1), start_at_layer=1)
    assert close(later, logits(model, tokens), atol=1e-9)


@pytest.mark.parametrize("name", [name for name in WHITENED if name in ("hooked/whitened", "bridge/whitened-neox")])
def test_a_padded_pass_is_held_also_without_its_mask(name):
    """Rotary positions: others are counted from the mask by the model itself."""
    frozen = tlens.freeze(tiny_model(name), [[3, 4, 5, 6], [7, 8]], padding_side="left")
    with frozen.attached() as held, torch.no_grad():
        given, left_out = held(**frozen.inputs), held(frozen.tokens)
    assert close(given[frozen.mask], left_out[frozen.mask], atol=1e-9)


def test_autocast_does_not_round_the_stream(plain):
    model, tokens = tlens.whiten(plain).to(torch.float32), some_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["blocks.0.whitening.hook_out"], cache["blocks.0.whitening.hook_in"])


def test_source_tokens_of_direct_effects_are_where_they_came_from(whitened):
    """Whitening brings what earlier tokens hold to the query: each embedding alone is pushed past the blocks."""
    frozen = tlens.freeze(whitened, some_tokens(1))
    effects = circuits.logit_attribution(frozen, 5, by="head_token")
    assert close(effects.keys.sum(-1), effects.scores, atol=1e-9)
    asked = circuits.stream.stream_target(frozen, 5, None, None, -1, "frozen")
    for name, part in asked.stream.sources().items():
        alone = torch.diag_embed(part[0].T).permute(1, 2, 0)[:, None]  # a row for each token's own vector
        for step in asked.stream.steps:
            alone = step.outer.push(alone)
        reached = (alone[:, 0, -1] * asked.vectors[0, 0]).sum(-1)
        assert close(effects.keys[0, 0, effects.names.index(name)], reached, atol=1e-9)
    assert float(effects.keys[0, 0, 0, :-1].abs().max()) > 1e-6


def test_bounds_stay_bounds(whitened):
    frozen = tlens.freeze(whitened, some_tokens(1))
    op = frozen.operator()
    true = float(torch.linalg.matrix_norm(op.dense()[0].flatten(2).flatten(0, 1), 2))
    assert true <= circuits.norm_bound(op) < float("inf")
    assert true <= circuits.spectral_norm_bound(frozen) < float("inf")
    other = frozen.resid_pre(0) + 0.1 * torch.randn_like(op.x)
    bound = circuits.error_bound(frozen, other)
    assert bound.error <= bound.bound < float("inf")


def test_a_layer_taken_away_and_put_back_is_applied_once(plain):
    tokens = some_tokens()
    model = make_random(tlens.whiten(plain))
    own, before = logits(model, tokens), [block.whitening for block in model.blocks]
    for block in model.blocks:
        block.whitening = None
    logits(model, tokens)
    for block, layer in zip(model.blocks, before, strict=True):
        whitening.attach(block, layer)
    assert torch.equal(logits(model, tokens), own)


def test_weights_that_write_to_the_stream_are_not_centred(plain):
    tokens = some_tokens()
    model = make_random(tlens.whiten(plain))
    before = torch.log_softmax(logits(model, tokens), -1)
    process = model.process_weights_ if hasattr(model, "process_weights_") else model.enable_compatibility_mode
    with pytest.raises(tlens.UnsupportedModelError, match="center_writing_weights=False"):
        process()
    process(center_writing_weights=False)
    assert close(torch.log_softmax(logits(model, tokens), -1), before, atol=1e-6)
    assert max(tlens.freeze(model, tokens).errors.values()) < 1e-6


def test_stopping_at_a_layer_gives_the_stream_before_whitening(whitened):
    _, cache = whitened.run_with_cache(some_tokens())
    with torch.no_grad():
        stopped = whitened(some_tokens(), stop_at_layer=1)
        assert torch.equal(stopped, cache["blocks.1.whitening.hook_in"])
        again, _ = whitened.run_with_cache(some_tokens(), stop_at_layer=1)
    bridge = hasattr(whitened, "original_model")  # it stops at the block's own hook, which sees the whitened stream
    assert torch.equal(again, cache["blocks.1.whitening.hook_out" if bridge else "blocks.1.whitening.hook_in"])


def test_whitening_that_grows_is_named(plain):
    growing = [(torch.eye(16), -1.8 * torch.eye(16))] * 2
    model = tlens.whiten(plain, init=growing).to(torch.float32)
    assert model.blocks[0].whitening.radius == pytest.approx(1.8)
    with pytest.warns(UserWarning, match=r"blocks\.0\.whitening .*spectral radius 1\.8.*times larger over this prompt"):
        tlens.freeze(model, [list(range(10))])
    with pytest.raises(tlens.NumericalError, match=r"blocks\.0\.whitening .*spectral radius 1\.8.*shorter prompt"):
        tlens.freeze(model, [list(range(24))])
    with torch.no_grad():
        for block in model.blocks:
            block.whitening.M.weight.mul_(0.5)
    tlens.freeze(model, [list(range(24))])
    with torch.no_grad():  # nilpotent: a radius of zero, and growth all the same
        model.blocks[1].whitening.M.weight.copy_(100 * torch.ones(16, 16).triu(1))
    assert model.blocks[1].whitening.radius < 1e-3
    with pytest.raises(tlens.NumericalError, match=r"blocks\.1\.whitening"):
        tlens.freeze(model, [list(range(24))])
    with torch.no_grad():
        model.blocks[1].whitening.M.weight.copy_(-1e6 * torch.eye(16))
    with pytest.raises(tlens.NumericalError, match=r"blocks\.1\.whitening .*(inf|nan) times"):
        tlens.freeze(model, [list(range(24))])
    with pytest.raises(tlens.InvalidInputError, match="tolerance=0"):
        tlens.freeze(plain, [[3, 4]], tolerance=0)


def test_what_cannot_be_whitened(plain):
    pair = (torch.eye(16), torch.zeros(16, 16))
    wrong = {
        "reads='mlp'": {"reads": "mlp"},
        "values='no'": {"values": "no"},
        "init is 'zeros'": {"init": "zeros"},
        "init is 3 filters": {"init": [pair] * 3},
        "needs two matrices of": {"init": [pair, (torch.eye(8), torch.eye(8))]},
        "filter of block 0 is a int": {"init": [1, 2]},
        "block 1 has values that are not finite": {"init": [pair, (torch.eye(16), torch.full((16, 16), torch.nan))]},
    }
    for message, options in wrong.items():
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.whiten(plain, **options)
    assert not any(hasattr(block, "whitening") for block in plain.blocks)
    tlens.whiten(plain)
    for reads in ("stream", "attention"):
        with pytest.raises(tlens.InvalidInputError, match="whitened already"):
            tlens.whiten(plain, reads=reads)


@pytest.mark.parametrize("reads", ["stream", "attention"])
def test_whitening_is_taken_off_again(plain, reads):
    """Logits, state dict, hook points and processing are those of before; it can be whitened again, in another way."""
    before, names, state = logits(plain, some_tokens()), set(plain.hook_dict), set(plain.state_dict())
    scores = tlens.freeze(plain, some_tokens()).operator().in_out().scores
    hooks = [len(module._forward_pre_hooks) for module in plain.modules()]
    for way in (reads, "stream"):
        tlens.whiten(plain, init="random", reads=way)
        assert not close(logits(plain, some_tokens()), before)
        assert tlens.unwhiten(plain) is plain
        assert torch.equal(logits(plain, some_tokens()), before)
        assert (set(plain.hook_dict), set(plain.state_dict())) == (names, state)
        assert not any(type(value).__name__ == "Uncentred" for value in vars(plain).values())
        assert [len(module._forward_pre_hooks) for module in plain.modules()] == hooks
        assert set(plain.run_with_cache(some_tokens())[1]) <= names
        assert torch.equal(tlens.freeze(plain, some_tokens()).operator().in_out().scores, scores)
    with pytest.raises(tlens.InvalidInputError, match="is not whitened"):
        tlens.unwhiten(plain)


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="no HookedTransformer")
def test_values_that_were_dropped_do_not_come_back():
    model = tlens.whiten(tiny_model("hooked/ln"), values="dropped")
    with pytest.raises(tlens.InvalidInputError, match="replaced its W_V"):
        tlens.unwhiten(model)
    assert hasattr(model.blocks[0], "whitening")


def test_attention_with_inputs_of_its_own_is_refused(plain):
    model = tlens.whiten(plain, reads="attention")
    switch = getattr(model, "set_use_split_qkv_input", None)
    if switch is None:
        pytest.skip("no such switch here")
    try:
        switch(True)
    except (NotImplementedError, ValueError, AttributeError):
        pytest.skip("this model cannot split them")
    with pytest.raises(tlens.UnsupportedModelError, match="use_split_qkv_input"):
        logits(model, some_tokens())


def test_other_classes_are_refused():
    if "encoder/bert" in model_names():
        with pytest.raises(tlens.UnsupportedModelError, match="neither a HookedTransformer"):
            tlens.whiten(tiny_model("encoder/bert"))
    if "hooked/shortformer" in model_names():
        with pytest.raises(tlens.UnsupportedModelError, match="shortformer"):
            tlens.whiten(tiny_model("hooked/shortformer"), reads="attention")
    with pytest.raises(tlens.UnsupportedModelError, match="no `cfg`"):
        tlens.whiten(torch.nn.Linear(2, 2))


# ------------------------------------------------------------------ variants


def test_whitening_what_attention_reads_leaves_the_stream_alone(plain):
    tokens = some_tokens()
    before = logits(plain, tokens)
    model = tlens.whiten(plain, reads="attention")
    assert torch.equal(logits(model, tokens), before)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.whitening.M.weight.normal_(0, 0.1)
    _, cache = model.run_with_cache(tokens)
    assert not torch.equal(logits(model, tokens), before)
    read, made = (cache[f"blocks.0.attn.whitening.hook_{end}"] for end in ("in", "out"))
    assert close(model.blocks[0].attn.whitening(read), made, atol=1e-12)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*reads='stream'"):
        tlens.freeze(model, tokens)
    assert set(model.state_dict()) > {"blocks.0.attn.whitening.M.weight"}


@pytest.mark.skipif("hooked/rotary" not in model_names(), reason="TransformerLens 4 has no HookedTransformer")
def test_equation_4_leaves_queries_alone_and_has_no_values():
    tokens, plain = some_tokens(), tiny_model("hooked/rotary")
    model = tlens.whiten(tiny_model("hooked/rotary"), reads="keys and values", values="dropped")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.whitening.M.weight.normal_(0, 0.1)
    _, own = plain.run_with_cache(tokens)
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["blocks.0.attn.hook_q"], own["blocks.0.attn.hook_q"])
    assert not close(cache["blocks.0.attn.hook_k"], own["blocks.0.attn.hook_k"])
    w = cache["blocks.0.attn.whitening.hook_out"]
    assert close(cache["blocks.0.attn.hook_v"].flatten(-2), w, atol=1e-12)
    assert not model.blocks[0].attn.W_V.requires_grad
    with pytest.raises(tlens.UnsupportedModelError, match="share d_model evenly"):
        tlens.whiten(tiny_model("hooked/gqa"), values="dropped")


def test_what_needs_a_hooked_transformer():
    for options in ({"reads": "keys and values"}, {"values": "dropped"}):
        with pytest.raises(tlens.UnsupportedModelError, match=r"keys and values|values='dropped'"):
            tlens.whiten(tiny_model("bridge/gpt2"), **options)


def test_another_module_in_its_place_is_refused():
    """The training script's control is no recursion."""
    from scripts.train_whitened import Shift

    model = tiny_model("bridge/gpt2")
    for block in model.blocks:
        whitening.attach(block, Shift(16, 0).double())
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*whitening \(Shift\) has no readable entry"):
        tlens.freeze(model, some_tokens())
