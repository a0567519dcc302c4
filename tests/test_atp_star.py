"""method="atp*": GradDrop and the exact response of softmaxes, beside TransformerLens' own hooks and autograd.

What a layer writes is detached here where it enters the stream, and every query, key and value is put into the model by
itself, head by head.
"""

from functools import partial

import pytest
import torch
from conftest import close, tolerance
from test_patching import ASKED, HERE, two, values

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.circuits.compare import pair_target
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError

NAMES = ["hooked/gqa", "hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/neox", "bridge/t5"]
NAMES = [name for name in NAMES if name in HERE]


def gradients(frozen, points, dropped=()):
    """The gradient of the logit difference at hook points, nothing passed back through others."""
    leaves, seen = {}, {}
    asked = pair_target(frozen, frozen, 5, 7, None, -1)

    def leaf(live, hook, point):
        leaves[point] = torch.zeros_like(live, requires_grad=True)
        return live + leaves[point]

    def see(live, hook, point):
        seen[point] = live

    hooks = [(point, partial(leaf, point=point)) for point in points]
    hooks += [(point, lambda live, hook: live.detach()) for point in dropped]
    hooks += [(point, partial(see, point=point)) for point in asked.points]
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    number = asked.number_of(seen.__getitem__).sum()
    return dict(zip(points, torch.autograd.grad(number, [leaves[point] for point in points]), strict=True))


def by_hand(clean, corrupted, point, part, parts, layer, changed=None):
    """The score of one part of what a layer has at a point, of its position and in all."""
    sizes = []
    for other, block in enumerate(clean.points.blocks):
        if other != layer:
            written = [block.attention_write, block.mlp_write]
            sizes.append(product(clean, corrupted, point, part, parts, written, changed).abs())
    whole = product(clean, corrupted, point, part, parts, (), changed)
    return whole.sign() * torch.stack(sizes).mean(0)


def product(clean, corrupted, point, part, parts, dropped, changed):
    before = values(clean, [point])[point]
    after = values(corrupted, [point])[point] if changed is None else changed
    rows = (before - after) * gradients(clean, [point], dropped)[point]
    batch = len(clean.tokens)
    of_part = rows.reshape(batch, -1, parts, rows[0].numel() // parts // clean.tokens.shape[1])[:, :, part]
    return torch.cat([of_part.sum(-1), of_part.sum((1, 2))[:, None]], 1)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bridge/t5"])
def test_sizes_are_those_without_each_layer(name, model_named):
    clean, corrupted = two(model_named(name))
    scores = circuits.patch_scores(clean, corrupted, **ASKED, method="atp*", positions=True)
    heads = clean.view.blocks[0].attention.heads
    for layer, block in enumerate(clean.points.blocks):
        for node, point, part, parts in ((f"L{layer}H1", block.heads.z, 1, heads), (f"MLP{layer}", block.post, 0, 1)):
            expected = by_hand(clean, corrupted, point, part, parts, layer)
            number = scores.names.index(node)
            assert close(scores.scores[:, 0, number], expected[:, -1], tolerance(name))
            assert close(scores.keys[:, 0, number], expected[:, :-1], tolerance(name))
    stream = circuits.patch_scores(clean, corrupted, **ASKED, method="atp*", by="stream")
    expected = by_hand(clean, corrupted, clean.points.blocks[1].resid_pre, 0, 1, None)
    assert close(stream["L1.stream"], expected[:, -1:], tolerance(name))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_queries_keys_and_values_act_through_the_models_own_softmax(name, model_named):
    clean, corrupted = two(model_named(name))
    scores, patched = (
        circuits.patch_scores(clean, corrupted, **ASKED, method=method, by="qkv") for method in ("atp*", "patching")
    )
    assert scores.names == patched.names
    plain = circuits.patch_scores(clean, corrupted, **ASKED, method="atp*")
    assert close(scores.scores[..., : len(plain)], plain.scores, tolerance(name))
    layer, head = clean.n_layers - 1, 1
    z = clean.points.blocks[layer].heads.z
    heads = clean.view.blocks[layer].attention.heads
    for letter in "qkv":
        point = z.removesuffix("z") + letter
        other = values(corrupted, [point])[point]
        seen = {}

        def see(live, hook, seen=seen):
            seen["z"] = live.detach()

        with torch.no_grad():
            hooks = [(point, lambda live, hook, other=other: other), (z, see)]
            clean.model.run_with_hooks(**clean.inputs, fwd_hooks=hooks)
        number = scores.names.index(f"L{layer}H{head}.{letter}")
        before, width = values(clean, [z])[z], seen["z"].shape
        mixed = before.reshape(*before.shape[:2], heads, -1).clone()
        mixed[:, :, head] = seen["z"].reshape(mixed.shape)[:, :, head]
        hook = (z, lambda live, hook, mixed=mixed, width=width: mixed.reshape(width))
        expected = logit_difference(clean, []) - logit_difference(clean, [hook])
        assert close(patched.scores[:, 0, number], expected, tolerance(name))
        if not clean.view.is_encoder_decoder:
            expected = by_hand(clean, corrupted, z, head, heads, layer, seen["z"])[:, -1]
            assert close(scores.scores[:, 0, number], expected, tolerance(name))


def logit_difference(frozen, hooks):
    seen = {}
    asked = pair_target(frozen, frozen, 5, 7, None, -1)

    def see(live, hook, point):
        seen[point] = live.detach()

    hooks = [*hooks, *((point, partial(see, point=point)) for point in asked.points)]
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    return asked.number_of(seen.__getitem__)[:, 0]


def test_a_saturated_softmax_is_no_blind_spot():
    """Keys of induction heads: as patching has them, where the gradient by them is far off."""
    end = " is raised. If the file is not found, a File"
    model = tlens.load_demo_model()
    texts = (f"If the {word.lower()} is not found, a {word}NotFoundError{end}" for word in ("File", "Module"))
    clean, corrupted = (tlens.freeze(model, text) for text in texts)
    scores, patched = (
        circuits.patch_scores(clean, corrupted, "N", "Error", method=method, by="qkv")
        for method in ("atp*", "patching")
    )
    point = "blocks.1.attn.hook_k"
    change = values(clean, [point])[point] - values(corrupted, [point])[point]
    by_gradient = (change * gradients_of(clean, point, "N", "Error")).sum((0, 1, 3))
    truth, ours = (torch.stack([of[f"L1H{head}.k"][0, 0] for head in range(4)]) for of in (patched, scores))
    assert bool((truth > 1).all())
    assert bool(((ours / truth - 1).abs() < 0.15).all())
    assert float((ours - truth).abs().sum()) < float((by_gradient - truth).abs().sum()) / 4


def gradients_of(frozen, point, target, minus):
    leaves = {}

    def leaf(live, hook):
        leaves["x"] = torch.zeros_like(live, requires_grad=True)
        return live + leaves["x"]

    model = frozen.model
    logits = model.run_with_hooks(**frozen.inputs, fwd_hooks=[(point, leaf)])[0, -1]
    number = logits[model.to_single_token(target)] - logits[model.to_single_token(minus)]
    return torch.autograd.grad(number, leaves["x"])[0]


def test_what_it_is_not_for_is_refused(model_named):
    clean, corrupted = two(model_named("bridge/gpt2" if "bridge/gpt2" in HERE else NAMES[0]))
    with pytest.raises(InvalidInputError, match="scores nodes"):
        circuits.edge_scores(clean, corrupted, **ASKED, method="atp*")
    for options in ({"method": "gradient"}, {}, {"method": "atp*", "positions": True}):
        with pytest.raises(InvalidInputError, match="queries, keys and values are nodes of"):
            circuits.patch_scores(clean, corrupted, **ASKED, by="qkv", **options)
    with pytest.raises(InvalidInputError, match="methods: 'atp\\*'"):
        evaluate.patching_agreement(clean.model, pairs_of(clean), ["atp*"], by="edge", only_correct=False)
    found = evaluate.patching_agreement(clean.model, pairs_of(clean), ["atp*"], only_correct=False)
    assert found.methods == ["atp*"]
    name = next(name for name in ("bridge/qwen3-next", "hooked/shortformer", "bridge/bert") if name in HERE)
    with pytest.raises(UnsupportedModelError):
        circuits.patch_scores(*two(model_named(name)), **ASKED, method="atp*", by="qkv")


def pairs_of(clean):
    return evaluate.PromptPairs(
        "tokens", clean.tokens, clean.tokens.flip(1), torch.tensor([5, 5]), torch.tensor([7, 7])
    )
