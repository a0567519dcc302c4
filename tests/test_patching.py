"""Two prompts: what a patch costs in the frozen model is its score, and live runs are the model's own.

The independent computations are TransformerLens' own hooks: a node's or an edge's corrupted value put into the model,
frozen or live, and autograd at its split query, key and value inputs.
"""

import copy
import json
import re
from functools import partial
from itertools import product

import networkx
import pytest
import torch
from conftest import close, hooks_left, some_tokens, tolerance
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.circuits.compare import corrupted_stream, edge_layout, pair_target
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.commands import main
from tensorlens_tl.models import ModelView
from tensorlens_tl.results.circuit import edge_order, pruned
from tensorlens_tl.testing import model_names, tiny_model
from tensorlens_tl.testing.models import build_bridge

HERE = set(model_names())
NAMES = ["hooked/gqa", "hooked/sandwich", "encoder/bert", "bridge/gpt2", "bridge/llama", "bridge/neox", "bridge/opt"]
NAMES = [name for name in NAMES if name in HERE]
LIVE = [name for name in NAMES if name not in ("hooked/sandwich", "encoder/bert")]
BOTH = ["encoder-decoder/tied", "encoder-decoder/gated", "bridge/bart", "bridge/pegasus", "bridge/t5", "bridge/t5gemma"]
BOTH = [name for name in BOTH if name in HERE]
LIVE_BOTH = [name for name in BOTH if name not in ("bridge/bart", "bridge/t5gemma")]
SPLIT = pytest.mark.skipif("hooked/ln" not in HERE, reason="its split inputs are TransformerLens 3.9's")
ASKED = {"target": 5, "minus": 7}


def two(model, batch=2):
    """Passes of two prompts that differ in one token of each side, and not in the last."""
    tokens = some_tokens(batch)
    clean, corrupted = {"input": tokens}, {"input": changed(tokens, 2)}
    if ModelView(model).is_encoder_decoder:
        written = some_tokens(batch, 4, seed=1)
        clean["decoder_input_ids"], corrupted["decoder_input_ids"] = written, changed(written, 1)
    return tlens.freeze(model, **clean), tlens.freeze(model, **corrupted)


def changed(tokens, pos):
    """Tokens with others at one position."""
    other = tokens.clone()
    other[:, pos] = torch.where(tokens[:, pos] > 25, tokens[:, pos] - 11, tokens[:, pos] + 11)
    return other


def number(frozen, hooks, held=True):
    """The logit difference of the model, frozen or live, with hooks on."""
    seen, by_stream = {}, frozen.view.mlm_head is not None
    asked = pair_target(frozen, frozen, 5, 7, None, -1)
    points = [frozen.points.last_output] if by_stream else asked.points
    hooks = [*(frozen.fwd_hooks() if held else ()), *hooks]

    def see(live, hook, point):
        seen[point] = live.detach()

    with torch.no_grad():
        watching = [(point, partial(see, point=point)) for point in points]
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*hooks, *watching])
    if not by_stream:
        return asked.number_of(seen.__getitem__)[:, 0]
    x = seen[points[0]]
    x = frozen.prediction_head()(x if frozen.maps.final_norm() is None else frozen.maps.final_norm()(x))
    return asked.number(x)[:, 0]


def put(value, part=slice(None), pos=slice(None), heads=None):
    """A hook that puts in another run's values: of one part of the vector, at some positions.

    Some classes show heads side by side; their number takes them apart.
    """

    def hook(live, hook):
        made, other = live.clone(), value.reshape(live.shape)
        if heads is not None and made.ndim == 3:
            made, other = (vectors.unflatten(-1, (heads, -1)) for vectors in (made, other))
        if made.ndim == 2:
            made[:, part] = other[:, part]
        else:
            made[:, pos, part] = other[:, pos, part]
        return made.reshape(live.shape)

    return hook


def values(frozen, points):
    seen = {}

    def see(live, hook, name):
        seen[name] = live.detach().clone()

    with torch.no_grad():
        hooks = [(name, partial(see, name=name)) for name in points]
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    return seen


def node_hooks(frozen, corrupted):
    """By node: the hook points with the hooks that patch it. Attention by head, as `by="head"`."""
    first = frozen.capture.stream_names(0)
    heads = {
        f"L{layer}{name}": (point, block.attention.heads)
        for layer, (block, at) in enumerate(zip(frozen.view.blocks, frozen.points.blocks, strict=True))
        for name, point in {"H": at.z, ".cross.H": at.cross and at.cross.z, "MLP": at.post}.items()
        if point is not None
    }
    other = values(corrupted, [*first, *(point for point, _ in heads.values())])
    made = {"embed": [(point, put(other[point])) for point in first]}
    for name, (point, count) in heads.items():
        layer = name[1:].removesuffix("MLP")
        if name.endswith("MLP"):
            made[f"MLP{layer}"] = [(point, put(other[point]))]
            continue
        for head in range(count):
            made[f"{name}{head}"] = [(point, put(other[point], part=head, heads=count))]
    return made


def stream_point(frozen, layer):
    """Where the stream enters a block: what the block before gives; of an encoder–decoder at its side."""
    names = frozen.capture.stream_names(layer)
    return names[-1 if layer >= frozen.view.encoder_layers else 0]


# ------------------------------------------------------------------ nodes


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_patching_a_node_of_the_frozen_model_costs_its_score(name, model_named):
    clean, corrupted = two(model_named(name))
    scores = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen")
    before, hooks = number(clean, []), node_hooks(clean, corrupted)
    assert scores.names == list(hooks)
    assert not scores.additive
    for node in ("embed", "L0H1", "MLP0", "L1H2", "MLP1", *some_of_both(clean)):
        assert close(before - number(clean, hooks[node]), scores[node][:, 0], tolerance(name)), node
    assert float(scores.scores.abs().max()) > 1e-3


def some_of_both(frozen):
    """Some nodes of an encoder–decoder's decoder."""
    return ("L2H3", "L2.cross.H0", "L3.cross.H2", "MLP3") if frozen.sides else ()


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/llama", *BOTH])
def test_so_do_neurons_positions_and_the_stream(name, model_named):
    clean, corrupted = two(model_named(name))
    before, points = number(clean, []), clean.points.blocks
    streams = [stream_point(clean, layer) for layer in range(clean.n_layers)]
    other = values(corrupted, [points[1].post, points[1].z, *streams])
    neurons = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen", by="neuron", positions=True)
    hook = (points[1].post, put(other[points[1].post], part=3))
    assert close(before - number(clean, [hook]), neurons["MLP1.N3"][:, 0], tolerance(name))
    place = neurons.names.index("L1H2")
    last = clean.capture.side(1)[1] - 1
    hook = (points[1].z, put(other[points[1].z], part=2, pos=-1, heads=4))
    assert close(before - number(clean, [hook]), neurons.keys[:, 0, place, last], tolerance(name))
    assert close(neurons.keys.sum(-1), neurons.scores, 1e-12)
    stream = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen", by="stream")
    for layer, point in enumerate(streams):
        hook = (point, put(other[point]))
        assert close(before - number(clean, [hook]), stream[f"L{layer}.stream"][:, 0], tolerance(name))
    whole = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen", by="component")
    heads = [neurons[f"L1H{head}"] for head in range(4)]
    assert close(sum(heads), whole["L1.attn"], 1e-12)


@pytest.mark.few(6)
@pytest.mark.parametrize("method", ["frozen", "gradient", "difference", "patching"])
@pytest.mark.parametrize("name", BOTH[-3:])
def test_nodes_are_at_positions_of_their_side(name, method, model_named):
    """The decoder's follow the encoder's; the embeddings are one node of both."""
    clean, corrupted = two(model_named(name))
    encoder, decoder = slice(0, 6), slice(6, 10)
    assert clean.sides == (6, 4)
    for by in ("head", "stream"):
        scores = circuits.patch_scores(clean, corrupted, **ASKED, method=method, by=by, positions=True)
        assert scores.keys.shape == (2, 1, len(scores.names), 10)
        size = float(scores.keys.abs().max())
        for node, keys in zip(scores.names, scores.keys.unbind(2), strict=True):
            assert float(keys.abs().max()) > 1e-9 * size, node
            if node == "embed":
                assert (keys.abs().amax((0, 1)) > 1e-9 * size).nonzero()[:, 0].tolist() == [2, 7]
                continue
            other = decoder if int(re.search(r"\d+", node)[0]) < 2 else encoder
            assert not keys[..., other].any(), node
        if method != "patching":
            assert close(scores.keys.sum(-1), scores.scores, 1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_embeddings_of_both_sides_are_the_whole_difference(name, model_named):
    clean, corrupted = two(model_named(name))
    scores = circuits.patch_scores(clean, corrupted, **ASKED, method="difference", by="stream")
    change = number(clean, [], held=False) - number(corrupted, [], held=False)
    assert close(scores["embed"][:, 0], change, tolerance(name))
    assert close(scores.total[:, 0], change, tolerance(name))
    assert close(scores["L0.stream"] + scores["L2.stream"], scores["embed"])  # what enters the two stacks


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [*(name for name in LIVE if name not in ("bridge/llama", "bridge/neox")), *BOTH])
def test_patching_the_live_model_is_what_hooks_do(name, model_named):
    clean, corrupted = two(model_named(name))
    live = circuits.patch_scores(clean, corrupted, **ASKED, method="patching", positions=True)
    before, hooks = number(clean, [], held=False), node_hooks(clean, corrupted)
    for node in ("L0H1", "L1H3", "MLP0", *some_of_both(clean)):
        assert close(before - number(clean, hooks[node], held=False), live[node][:, 0], tolerance(name)), node
    assert close(live["embed"][:, 0], before - number(corrupted, [], held=False), tolerance(name))
    moved = live.keys[:, 0, 0].abs().amax(0)  # patched elsewhere, the first block's input is as it was
    differs = (clean.tokens != corrupted.tokens).any(0)
    assert float(moved[~differs].max()) < tolerance(name) < float(moved[differs].min())
    chunked = circuits.patch_scores(clean, corrupted, **ASKED, method="patching", memory="200KB")
    assert close(chunked.scores, live.scores, tolerance(name))
    points = [stream_point(clean, layer) for layer in range(clean.n_layers)]
    streams = values(corrupted, points)
    of_streams = circuits.patch_scores(clean, corrupted, **ASKED, method="patching", by="stream")
    for layer, point in enumerate(points):
        lost = before - number(clean, [(point, put(streams[point]))], held=False)
        assert close(lost, of_streams[f"L{layer}.stream"][:, 0], tolerance(name)), point
    assert not hooks_left(clean.model)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [*LIVE, *LIVE_BOTH])
def test_gradients_of_nodes_are_those_of_their_edges(name, model_named):
    """Two computations: autograd through the model's own hook points, and through its parts, cut there."""
    clean, corrupted = two(model_named(name))
    for method in ("frozen", "gradient", "integrated-gradients"):
        nodes = circuits.patch_scores(clean, corrupted, **ASKED, method=method, steps=2, positions=True)
        edges = circuits.edge_scores(clean, corrupted, **ASKED, method=method, steps=2)
        assert nodes.names == edges.sources
        error = 1e-6 if name == "bridge/opt" else tolerance(name)  # a Bridge OPT's softmax is float32's
        assert close(nodes.scores[:, 0], edges.scores.sum(-1), error), method
        assert close(nodes.keys.sum(-1), nodes.scores, 1e-9)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_a_frozen_pull_is_joined_by_the_gradients_of_edges_into_queries_and_keys(name, model_named):
    """A node scores what its edges do together, whatever norms are on their way; those that join are the live model's
    own where no norm is."""
    clean, corrupted = two(model_named(name))
    options = {**ASKED, "steps": 2}
    nodes = circuits.patch_scores(clean, corrupted, **options, method="frozen+qk", positions=True)
    edges = circuits.edge_scores(clean, corrupted, **options, method="frozen+qk")
    assert nodes.names == edges.sources
    error = 1e-6 if name == "bridge/opt" else tolerance(name)  # a Bridge OPT's softmax is float32's
    assert close(nodes.scores[:, 0], edges.scores.sum(-1), error)
    assert close(nodes.keys.sum(-1), nodes.scores, 1e-9)
    joining = [end.endswith((".q", ".k")) for end in edges.destinations]
    assert float(edges.scores[:, :, joining].abs().max()) > 1e-4
    if name in (*LIVE, *LIVE_BOTH):
        live = circuits.edge_scores(clean, corrupted, **options, method="integrated-gradients").scores
        assert close(edges.scores[:, :, joining], live[:, :, joining], error)


def test_integrated_gradients_of_the_embedding_find_the_whole_difference(model_named):
    clean, corrupted = two(model_named("bridge/gpt2"))
    whole = pair_target(clean, corrupted, 5, 7, None, -1).total[:, 0]
    whole = whole - pair_target(corrupted, corrupted, 5, 7, None, -1).total[:, 0]
    errors = []
    for steps in (1, 40):
        made = circuits.patch_scores(clean, corrupted, **ASKED, method="integrated-gradients", steps=steps)["embed"][
            :, 0
        ]
        errors.append(float((made - whole).abs().max() / whole.abs().max()))
    assert errors[1] < 1e-3 < errors[0]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [*LIVE, *LIVE_BOTH])
def test_all_methods_score_the_same_edges(name, model_named):
    """So that circuits of the difference, whose heads are three sublayers each, are circuits of the model."""
    clean, corrupted = two(model_named(name))
    frozen, exact = (circuits.edge_scores(clean, corrupted, **ASKED, method=m) for m in ("frozen", "difference"))
    assert (frozen.sources, frozen.destinations) == (exact.sources, exact.destinations)
    assert frozen.config == exact.config
    assert frozen.target == exact.target
    assert torch.equal(frozen.exists, exact.exists)
    assert close(frozen.clean, exact.clean, 1e-9)
    assert close(frozen.corrupted, exact.corrupted, 1e-9)
    nodes = [circuits.patch_scores(clean, corrupted, **ASKED, method=m) for m in ("frozen", "difference")]
    assert nodes[0].names == nodes[1].names
    assert nodes[0].target == f"{frozen.target}, clean − patched, by frozen"
    assert nodes[1].target == f"change of the {frozen.target}, clean − corrupted, by difference"
    assert close(nodes[0].total, exact.clean[:, None], 1e-9)
    assert close(nodes[1].total, (exact.clean - exact.corrupted)[:, None], 1e-9)
    numbers = circuits.run_circuits(clean, corrupted, [exact.circuit(0), exact.circuit(len(exact))], **ASKED)
    error = 1e-6 if name == "bridge/opt" else tolerance(name)  # a Bridge OPT's softmax is float32's
    assert close(numbers[1], exact.clean, error)


EITHER_END = ("frozen", "frozen+qk", "gradient", "integrated-gradients", "atp*", "difference", "patching")


@pytest.mark.few(7)
@pytest.mark.parametrize("method", EITHER_END)
@pytest.mark.parametrize("name", [LIVE[0], *LIVE_BOTH[:1]])
def test_the_corrupted_run_patched_gains_what_it_loses_as_the_clean_one(method, name, model_named):
    """Scores of the corrupted run are those of the two prompts in the other order, negated; of both, the mean."""
    clean, corrupted = two(model_named(name))
    for scores_of in (circuits.patch_scores, circuits.edge_scores):
        if (method, scores_of) == ("atp*", circuits.edge_scores):
            continue
        noised = scores_of(clean, corrupted, **ASKED, method=method)
        denoised = scores_of(clean, corrupted, **ASKED, method=method, patched="corrupted")
        other = scores_of(corrupted, clean, **ASKED, method=method)
        assert close(denoised.scores, -other.scores, tolerance(name))
        both = scores_of(clean, corrupted, **ASKED, method=method, patched="both")
        assert close(both.scores, (noised.scores + denoised.scores) / 2, tolerance(name))


@pytest.mark.parametrize("method", ["patching", "measured"])
def test_from_either_end_the_whole_input_is_the_whole_difference(method, model_named):
    """A target that is not named is what the clean prompt predicts, whichever run is patched."""
    clean, corrupted = two(model_named(LIVE[0]))
    numbers, labels = [], []
    for patched in ("clean", "corrupted", "both"):
        scores = circuits.patch_scores(clean, corrupted, method=method, positions=True, patched=patched)
        numbers.append((scores["embed"], scores.total))
        labels.append(scores.target)
        assert scores.keys.shape == (2, 1, len(scores), clean.tokens.shape[1])
    change = numbers[0][1] - numbers[1][1]
    assert all(torch.allclose(embed, change) for embed, _ in numbers)
    assert torch.allclose(numbers[2][1], change)
    assert [label.split(", ")[1] for label in labels] == [*circuits.compare.PATCHED.values()]


def test_one_prompt_twice_has_no_scores(model_named):
    clean, _ = two(model_named("bridge/gpt2"))
    for method in circuits.compare.METHODS:
        assert float(circuits.patch_scores(clean, clean, **ASKED, method=method).scores.abs().max()) < 1e-12


def test_mixers_have_scores_by_the_frozen_model_and_by_gradients(model_named):
    clean, corrupted = two(model_named("bridge/lfm2"))
    nodes = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen")
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen")
    assert "L0.mixer" in nodes.names
    assert close(nodes.scores[:, 0], edges.scores.sum(-1), 1e-9)
    with pytest.raises(tlens.UnsupportedModelError, match=r"L0\.mixer"):
        circuits.patch_scores(clean, corrupted, **ASKED, method="gradient")
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0"):
        circuits.edge_scores(clean, corrupted, **ASKED, method="patching")
    alive = circuits.edge_scores(clean, corrupted, **ASKED, method="gradient")
    assert alive.sources == edges.sources
    assert not close(alive.scores, edges.scores, 1e-3)


# ------------------------------------------------------------------ edges


EDGES = ["embed → L0H1.v", "L0H2 → L1H0.v", "embed → MLP1", "L0H3 → MLP1", "MLP0 → target", "L1H1 → target"]
ACROSS = [
    "embed → L1H1.v",
    "L0H3 → L2.cross.H1.v",
    "MLP1 → L3.cross.H2.v",
    "L2.cross.H0 → L3H1.v",
    "L3.cross.H2 → target",
]


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        *product([*NAMES, "bridge/whitened"], EDGES),
        *product(BOTH, ACROSS),
    ],
)
@pytest.mark.few(16)
def test_patching_an_edge_of_the_frozen_steps_costs_its_score(name, edge, model_named):
    clean, corrupted = two(model_named(name))
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen", positions=True)
    assert close(edges.by_position.sum(-1), edges.scores, 1e-12)
    asked = pair_target(clean, corrupted, 5, 7, None, -1)
    before = rerun(asked, corrupted, None, None)
    assert close(before, edges.clean, tolerance(name))
    patched = rerun(asked, corrupted, *edge.split(" → "))
    assert close(before - patched, edges[edge], tolerance(name))
    matching = [name.endswith((".q", ".k")) for name in edges.destinations]
    assert sum(matching) == (48 if clean.sides else 16)
    assert not bool(edges.scores[:, :, matching].any())


@pytest.mark.parametrize("edge", ["embed → L1H2.v", "embed → MLP1", "embed → target"])
@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/neox"])
def test_patching_an_edge_by_hooks_on_the_frozen_model_costs_its_score(name, edge, model_named):
    """What the embedding gives a head's values, an MLP's neurons, and the end, taken away at their own hook points."""
    clean, corrupted = two(model_named(name))
    edges, before = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen"), number(clean, [])
    start, points = clean.capture.stream_names(0)[0], clean.points.blocks[1]
    away = values(clean, [start])[start] - values(corrupted, [start])[start]
    block = clean.view.blocks[1]
    values_away = clean.maps.norm(1, "ln1").push(away[None])[0] @ block.attention.W_V
    neurons_away = clean.maps.norm(1, "ln2").push(away[None])[0] @ block.dense_mlp.W_in

    def less_values(live, hook):
        live = live.clone()
        live[:, :, 2] -= values_away.unflatten(-1, (4, -1))[:, :, 2]
        return live

    # the hook that holds the ratio reads what the MLP reads before this one does
    ratio = clean.maps.mlp_coefficients(1).through
    hooks = {
        "embed → L1H2.v": (points.value, less_values),
        "embed → MLP1": (points.post, lambda live, hook: live - (ratio * neurons_away).reshape(live.shape)),
        "embed → target": (clean.points.last_output, lambda live, hook: live - away),
    }
    assert close(before - number(clean, [hooks[edge]]), edges[edge])


@pytest.mark.few(5)
@pytest.mark.parametrize("edge", ["embed → L2.cross.H1.v", "MLP0 → L3.cross.H2.v", "L2.cross.H0 → target"])
@pytest.mark.parametrize("name", LIVE_BOTH)
def test_patching_an_edge_across_the_stacks_by_hooks_costs_its_score(name, edge, model_named):
    """Where no norm lies between, what a node writes is in the stream as it is, up to the norm at the encoder's end."""
    clean, corrupted = two(model_named(name))
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen")
    source, destination = edge.split(" → ")
    away = written(clean, source) - written(corrupted, source)
    held = clean.fwd_hooks()
    if destination == "target":  # before the hooks that hold the norm read what it reads
        hooks = [(clean.points.last_output, lambda live, hook: live - away), *held]
    else:
        layer, head = int(destination[1]), int(destination[-3])
        away = clean.maps.encoder_norm().push(away[None])[0] @ clean.view.blocks[layer].cross_attention.W_V
        away = clean.cross_pattern(layer)[:, head] @ away.unflatten(-1, (4, -1))[:, :, head]

        def less_values(z, hook):
            heads = z.clone().reshape(2, 4, 4, -1)
            heads[:, :, head] -= away
            return heads.reshape(z.shape)

        hooks = [*held, (clean.points.blocks[layer].cross.z, less_values)]
    patched = number(clean, hooks, held=False)
    assert close(number(clean, []) - patched, edges[edge], tolerance(name))
    assert float(edges[edge].abs().max()) > 1e-6


@pytest.mark.few(5)
@pytest.mark.parametrize("edge", ["embed → L2.cross.H1.k", "MLP0 → L3.cross.H2.v", "MLP0 → L2.cross.H3.k"])
@pytest.mark.parametrize("name", LIVE_BOTH)
def test_live_edges_across_the_stacks_are_what_hooks_make_of_them(name, edge, model_named):
    """Keys and values of one head, as the model's own norm and weights make them of the encoder's stream without what
    differs: all of it (patching), or as much as a slope needs (gradient).
    """
    clean, corrupted = two(model_named(name))
    source, destination = edge.split(" → ")
    layer, head, letter = int(destination[1]), int(destination[-3]), destination[-1]
    model = clean.model
    is_bridge = clean.view.is_bridge
    end = model.encoder_ln_final.original_component if is_bridge else model.encoder_final_ln
    module = (model.decoder_blocks if is_bridge else model.decoder)[layer - 2].cross_attn
    point = clean.points.blocks[layer].cross.value.replace("hook_v", f"hook_{letter}")
    stream_point = f"{clean.view.blocks[1].name}.hook_resid_post"
    stream = values(clean, [stream_point])[stream_point]
    away = written(clean, source) - written(corrupted, source)

    def projected(x):
        if is_bridge:
            weight = getattr(module, letter).original_component.weight
            return (end(x) @ weight.T.to(x))[..., 4 * head : 4 * head + 4]
        return end(x) @ getattr(module, f"W_{letter.upper()}")[head]

    def number_without(share):
        change = projected(stream - share * away) - projected(stream)

        def hook(live, hook):
            heads = live.clone().reshape(2, 6, 4, -1)
            heads[:, :, head] += change
            return heads.reshape(live.shape)

        return number(clean, [(point, hook)], held=False)

    patching, gradient = (circuits.edge_scores(clean, corrupted, **ASKED, method=m) for m in ("patching", "gradient"))
    before = number(clean, [], held=False)
    assert close(before - number_without(1), patching[edge], tolerance(name))
    if tolerance(name) < 1e-6:  # a slope magnifies what float32 rounds
        slope = (number_without(-1e-4) - number_without(1e-4)) / 2e-4
        assert close(slope, gradient[edge], 1e-6)
    assert float(patching[edge].abs().max()) > 1e-6


def written(frozen, source):
    """What a node writes at its positions: the encoder's embeddings, an MLP, or a head of cross-attention."""
    points = frozen.points.blocks
    if source == "embed":
        return values(frozen, [points[0].resid_pre])[points[0].resid_pre]
    if source == "MLP0":
        return (
            values(frozen, [points[0].post])[points[0].post].reshape(2, 6, -1) @ frozen.view.blocks[0].dense_mlp.W_out
        )
    z = values(frozen, [points[2].cross.z])[points[2].cross.z].reshape(2, 4, 4, -1)
    return z[:, :, 0] @ frozen.view.blocks[2].cross_attention.W_O.unflatten(0, (4, -1))[0]


@pytest.mark.few(6)
@pytest.mark.parametrize("method", ["frozen", "difference"])
@pytest.mark.parametrize("name", BOTH)
def test_edges_of_both_stacks_sum_to_their_nodes(name, method, model_named):
    """They stay in their stack, but for those into keys and values of cross-attention."""
    clean, corrupted = two(model_named(name))
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method=method)
    nodes = circuits.patch_scores(clean, corrupted, **ASKED, method=method)
    assert edges.sources == nodes.names
    assert close(edges.scores.sum(-1), nodes.scores[:, 0])
    change = number(clean, [], held=False) - number(corrupted, [], held=False)
    assert close(edges.clean - edges.corrupted, change, tolerance(name))
    if method == "difference":
        assert close(edges.scores[..., -1].sum(-1), change, tolerance(name))
    assert not edges.scores[:, ~edges.exists].any()
    before = 1  # the sources that a block of either stack may read
    expected = 0
    for layer in range(4):
        if layer == 2:
            assert before == 11  # of the encoder: embeddings, and in two layers 4 heads and an MLP
            before = 1
        expected += 12 * before
        before += 4
        if layer >= 2:
            expected += 4 * before + 8 * 11  # queries; keys and values
            before += 4
        expected += before
        before += 1
    assert len(edges) == expected + before
    with pytest.raises(tlens.InvalidInputError, match="no edge"):
        edges["L1H0 → L2H0.v"]


@pytest.mark.parametrize("name", BOTH)
def test_a_direction_may_read_the_encoder(name, model_named):
    """There the decoder's nodes count nothing, and no edge leads from them to the target."""
    clean, corrupted = two(model_named(name))
    direction = torch.randn(16, dtype=torch.float64)
    own, other = (frozen.output[:, 3] @ direction for frozen in (clean, corrupted))
    asked = {"direction": direction, "query": 3}
    for method in ("difference", "patching", "gradient", "frozen"):
        nodes = circuits.patch_scores(clean, corrupted, **asked, method=method)
        later = [number_ for number_, node in enumerate(nodes.names) if node.startswith(("L2", "L3", "MLP2", "MLP3"))]
        assert float(nodes.scores[..., later].abs().max()) < tolerance(name)
        if method in ("difference", "patching"):
            assert close(other + nodes["embed"][:, 0], own, tolerance(name)), method
    edges = circuits.edge_scores(clean, corrupted, **asked, method="difference")
    assert close(other + edges.scores[..., -1].sum(-1), own, tolerance(name))
    assert int(edges.exists[:, -1].sum()) == 11
    if name in LIVE_BOTH:
        numbers = circuits.run_circuits(clean, corrupted, [edges.circuit(len(edges)), edges.circuit(0)], **asked)
        assert close(numbers, torch.stack([own, other]), tolerance(name))


@pytest.mark.parametrize("name", LIVE_BOTH[:1])
def test_a_circuit_of_a_target_in_the_other_stack_is_refused(name, model_named):
    """All of its edges would not give the clean number: those into the target are others."""
    clean, corrupted = two(model_named(name))
    circuit = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen").circuit(20)
    direction = torch.randn(16, dtype=torch.float64)
    with pytest.raises(tlens.InvalidInputError, match="number 0 is of a target that reads elsewhere"):
        circuits.run_circuits(clean, corrupted, circuit, direction=direction, query=3)
    assert circuits.run_circuits(clean, corrupted, circuit, direction=direction).shape == (1, 2)


def test_a_circuit_of_both_stacks_is_drawn_and_written(model_named, tmp_path):
    clean, corrupted = two(model_named("bridge/bart"))
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="difference")
    circuit = edges.circuit(len(edges))
    assert len(circuit) == len(edges) == 529
    graph = circuit.to_networkx()
    assert graph.nodes["L2.cross.H0"] == {"name": "L2.cross.H0", "kind": "head", "layer": 2}
    assert graph.edges["L0H1", "L2.cross.H0", "L0H1 → L2.cross.H0.k"]["reads"] == "keys"
    assert "L2.cross.H0" in circuit.to_html()
    reader = next(node for node in circuit.to_circuit_tracer()["nodes"] if node["clerp"] == "keys of L3.cross.H2")
    assert reader["layer"] == "3"
    again = circuits.EdgeScores.load(edges.save(tmp_path / "edges.safetensors"))
    assert torch.equal(again.exists, edges.exists)
    with pytest.raises(tlens.InvalidInputError, match=r"of one stack only, and no name for 'L2\.cross\.H0'"):
        circuit.save(tmp_path / "circuit.json")


def rerun(asked, corrupted, source, destination):
    """The frozen steps run forwards, one destination reading one source's corrupted output."""
    stream, other = asked.stream, corrupted_stream(asked, corrupted)
    x, away = stream.x[0], torch.zeros_like(stream.x[0])  # what the destination must not read, carried along
    if source == "embed":
        away = stream.x[0] - other.x[0]
    for number_, step in enumerate(stream.steps):
        written, joined = x, away
        for place, sublayer in enumerate(step.sublayers):
            hidden = sublayer.read(x)
            apart = sublayer.split(hidden).clone()
            for node, own in enumerate(sublayer.nodes):
                if destination in (own, f"{own}.v"):
                    apart[..., node, :] = sublayer.read_of(node)(x - away)
            written = written + sublayer.write(apart.flatten(-2))
            if source in sublayer.nodes:
                node = sublayer.nodes.index(source)
                away_here = stream.hidden[number_][place] - other.hidden[number_][place]
                joined = joined + sublayer.outputs(away_here)[node]
        x, away = step.outer(written), step.outer.push(joined[None])[0]
    return asked.number(x - away if destination == "target" else x)[:, 0]


@pytest.fixture
def split(model_named):
    """Two passes of a model whose parts have inputs of their own, and what every source wrote in each."""
    model = tiny_model("hooked/ln")
    clean, corrupted = two(model)
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    model.set_use_attn_result(True)
    written = []
    for frozen in (clean, corrupted):
        _, cache = model.run_with_cache(frozen.tokens)
        rows = [cache["blocks.0.hook_resid_pre"]]
        for layer in range(2):
            rows += [*cache[f"blocks.{layer}.attn.hook_result"].unbind(2), cache[f"blocks.{layer}.hook_mlp_out"]]
        written.append(torch.stack(rows).detach())
    return clean, corrupted, written


def reading_hook(destination):
    """The hook point where a destination reads, and its head or None."""
    if destination == "target":
        return "blocks.1.hook_resid_post", None
    if destination.startswith("MLP"):
        return f"blocks.{destination[3:]}.hook_mlp_in", None
    layer, head, letter = destination[1], int(destination[3]), destination[-1]
    return f"blocks.{layer}.hook_{letter}_input", head


@SPLIT
def test_edges_are_what_split_inputs_of_the_model_say(split):
    """Live gradients and live patching, at every destination's own hook point."""
    clean, corrupted, (own, other) = split
    difference = own - other
    live = ("gradient", "patching")
    made = {method: circuits.edge_scores(clean, corrupted, **ASKED, method=method) for method in live}
    layout = edge_layout(Stream.of(clean))
    gradients = live_gradients(clean, layout.destinations)
    before = number(clean, [], held=False)
    for place, destination in enumerate(layout.destinations):
        point, head = reading_hook(destination)
        for source in range(int(layout.exists[:, place].sum())):
            edge = f"{layout.sources[source]} → {destination}"
            expected = (difference[source] * gradients[destination]).sum((-2, -1))
            assert close(made["gradient"][edge], expected), edge
            if (source + 3 * place) % 5:
                continue

            def patch(live, hook, head=head, source=source):
                live = live.clone()
                live[:, :, slice(None) if head is None else head] -= difference[source]
                return live

            def patch_stream(live, hook, source=source):
                return live - difference[source]

            hook = (point, patch_stream if head is None else patch)
            assert close(before - number(clean, [hook], held=False), made["patching"][edge]), edge


def live_gradients(clean, destinations, start=None):
    """By autograd at every destination's own hook point; `start` stands for the first block's input."""
    seen, asked = {}, pair_target(clean, clean, 5, 7, None, -1)

    def see(live, hook):
        live.retain_grad()
        seen[hook.name] = live

    points = dict.fromkeys(reading_hook(name)[0] for name in destinations)
    with torch.enable_grad():
        hooks = [(point, see) for point in [*points, "unembed.hook_in"] if point in clean.model.hook_dict]
        if start is not None:
            hooks.insert(0, ("blocks.0.hook_resid_pre", lambda live, hook: start.clone().requires_grad_(True)))
        final = []
        hooks.append(("ln_final.hook_normalized", lambda live, hook: final.append(live)))
        clean.model.run_with_hooks(clean.tokens, fwd_hooks=hooks)
        x = seen["blocks.1.hook_resid_post"]
        asked.number(clean.model.ln_final(x)).sum().backward()
    clean.model.zero_grad()
    found = {}
    for name in destinations:
        point, head = reading_hook(name)
        gradient = seen[point].grad
        found[name] = gradient if head is None else gradient[:, :, head]
    return found


@SPLIT
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_edges_by_left_ends_are_what_the_published_code_of_eap_ig_computes(split, steps):
    """Embeddings at k/steps of the way from the corrupted prompt for k = 0, 1, …; gradients summed, then averaged."""
    clean, corrupted, (own, other) = split
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="integrated-gradients", points="left", steps=steps)
    by_default = circuits.edge_scores(clean, corrupted, **ASKED, method="integrated-gradients", steps=steps)
    totals = dict.fromkeys(edges.destinations, 0.0)
    for k in range(steps):
        start = other[0] + (k / steps) * (own[0] - other[0])
        for name, gradient in live_gradients(clean, edges.destinations, start).items():
            totals[name] = totals[name] + gradient
    for place, name in enumerate(edges.destinations):
        expected = torch.einsum("sbpd,bpd->bs", own - other, totals[name] / steps)
        assert close(edges.scores[:, :, place], expected * edges.exists[:, place]), name
    assert not close(edges.scores, by_default.scores, 1e-4)


@pytest.mark.few(8)
@pytest.mark.parametrize("method", ["gradient", "integrated-gradients"])
@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/llama", *BOTH])
def test_gradients_of_nodes_are_what_hooks_and_autograd_compute(name, method, model_named):
    """At the clean prompt, or at the left ends of four steps from the corrupted one."""
    clean, corrupted = two(model_named(name))
    first = clean.capture.stream_names(0)
    heads = {f"L{layer}H": point.z for layer, point in enumerate(clean.points.blocks)}
    heads |= {f"L{layer}.cross.H": at.cross.z for layer, at in enumerate(clean.points.blocks) if at.cross}
    points = [*first, *heads.values()]
    own, other = values(clean, points), values(corrupted, points)
    summed = dict.fromkeys(points, 0.0)
    shares = [1] if method == "gradient" else [0, 1 / 4, 2 / 4, 3 / 4]
    for share in shares:
        seen = {}

        def enter(live, hook, point, share=share, seen=seen):
            seen[point] = torch.lerp(other[point], own[point], share).requires_grad_(True)
            return seen[point]

        def see(live, hook, point, seen=seen):
            seen[point] = live + torch.zeros_like(live).requires_grad_(True)
            seen[point].retain_grad()
            return seen[point]

        hooks = [(point, partial(enter if point in first else see, point=point)) for point in points]
        with torch.enable_grad():
            logits = clean.model.run_with_hooks(**clean.inputs, fwd_hooks=hooks)[:, -1]
            if clean.soft_cap is not None:  # the number is the one before it
                logits = clean.soft_cap * torch.atanh(logits / clean.soft_cap)
            (logits[:, 5] - logits[:, 7]).sum().backward()
        summed = {point: summed[point] + seen[point].grad for point in points}
    clean.model.zero_grad()
    nodes = circuits.patch_scores(clean, corrupted, **ASKED, method=method, points="left", steps=4)
    products = {point: (own[point] - other[point]) * summed[point] / len(shares) for point in points}
    embeddings = sum(products[point].flatten(1).sum(1) for point in first)
    assert close(nodes["embed"][:, 0], embeddings, tolerance(name))
    for head, point in heads.items():
        by_head = products[point].reshape(len(clean.tokens), -1, 4, products[point][0, 0].numel() // 4).sum((1, 3))
        scores = torch.stack([nodes[f"{head}{number_}"][:, 0] for number_ in range(4)], dim=1)
        assert close(scores, by_head, tolerance(name))


@SPLIT
def test_a_circuit_runs_as_hooks_at_split_inputs_run_it(split):
    clean, corrupted, (_, other) = split
    layout = edge_layout(Stream.of(clean))
    kept = layout.exists & (torch.rand(layout.exists.shape, generator=torch.Generator().manual_seed(1)) < 0.6)
    config = {"n_layers": 2, "n_heads": 4}
    some = circuits.Circuit(layout.sources, layout.destinations, kept.double(), layout.exists, kept, config)
    written, hooks = [], []

    def note(live, hook, heads):
        written.extend(live.unbind(2) if heads else [live])

    def enter(live, hook, places, heads):
        live = live.clone()
        for head, place in enumerate(places):
            for source, out in enumerate(written):
                if layout.exists[source, place] and not kept[source, place]:
                    into = live[:, :, head] if heads else live
                    into -= out - other[source]
        return live

    hooks.append(("blocks.0.hook_resid_pre", partial(note, heads=False)))
    for layer in range(2):
        first = layer * 13
        for letter, name in enumerate("qkv"):
            places = range(first + 4 * letter, first + 4 * letter + 4)
            hooks.append((f"blocks.{layer}.hook_{name}_input", partial(enter, places=places, heads=True)))
        hooks.append((f"blocks.{layer}.attn.hook_result", partial(note, heads=True)))
        hooks.append((f"blocks.{layer}.hook_mlp_in", partial(enter, places=[first + 12], heads=False)))
        hooks.append((f"blocks.{layer}.hook_mlp_out", partial(note, heads=False)))
    hooks.append(("blocks.1.hook_resid_post", partial(enter, places=[26], heads=False)))
    expected = number(clean, hooks, held=False)
    made = circuits.run_circuits(clean, corrupted, some, **ASKED)[0]
    assert close(made, expected)
    assert float((made - number(clean, [], held=False)).abs().max()) > 1e-3


def sharp(name):
    """Passes of a model that is so sure where to look that many probabilities underflow."""
    # a rotary pattern with nothing but zeros and ones would not tell its scores' reading
    model, factor = tiny_model(name), 3000.0 if name.startswith("hooked") else 600.0
    with torch.no_grad():
        for block in model.blocks:
            query = block.attn.W_Q if name.startswith("hooked") else block.attn.q.original_component.weight
            query.mul_(factor)
    tokens = [torch.tensor([row]) for row in ([3, 5, 7, 9, 2, 11], [3, 15, 17, 19, 12, 21])]
    return [tlens.freeze(model, row) for row in tokens]


@pytest.mark.parametrize("name", [n for n in ("hooked/ln", "hooked/local", "bridge/llama") if n in HERE])
def test_a_circuit_may_attend_where_every_probability_underflowed(name):
    """Clean queries meet corrupted keys, as hooks at the model's own queries make them."""
    clean, corrupted = sharp(name)
    closed = [frozen.pattern(0) == 0 for frozen in (clean, corrupted)]
    assert bool((closed[0] & closed[1]).all(1).tril().any())  # probabilities of the causal part, zero in every head
    scores = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen")
    kept = scores.exists.clone()
    kept[:, [end.startswith("L0") and end.endswith(".q") for end in scores.destinations]] = False
    some = circuits.Circuit(scores.sources, scores.destinations, scores.scores[0], scores.exists, kept, scores.config)
    made = circuits.run_circuits(clean, corrupted, some, **ASKED)[0]
    point = "blocks.0.attn.hook_q"
    if name.startswith("bridge"):
        point = "blocks.0.attn.q.hook_out"
    expected = number(clean, [(point, put(values(corrupted, [point])[point]))], held=False)
    assert close(made, expected, tolerance(name))
    assert float((made - scores.clean).abs().max()) > 1e-3


@pytest.mark.parametrize("name", [*LIVE, *LIVE_BOTH])
def test_all_edges_give_the_clean_number_and_none_the_corrupted(name, model_named):
    clean, corrupted = two(model_named(name))
    scores = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen")
    both = [scores.circuit(len(scores)), scores.circuit(0)]
    made = circuits.run_circuits(clean, corrupted, both, **ASKED)
    error = 1e-6 if name == "bridge/opt" else tolerance(name)
    assert close(made, torch.stack([scores.clean, scores.corrupted]), error)
    edges = 102 if clean.layouts[0].parallel else 110
    assert len(both[0]) == len(scores) == (529 if clean.sides else edges)
    memory = "1MB" if clean.sides else "200KB"  # of one run at a time
    chunked = circuits.run_circuits(clean, corrupted, both, **ASKED, memory=memory)
    assert close(chunked, made, 1e-12)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bridge/gemma2", "sandwich layout has norms"),
        ("bridge/bart", r"encoder_blocks\.0: its post layout has norms .* any other method, work"),
        ("bridge/bert", "prediction head"),
        ("bridge/olmo2", "post-only layout"),
        ("bridge/whitened", "whitening stands"),
        *([("hooked/shortformer", r"hook_q, by the weights, differs")] if "hooked/ln" in NAMES else []),
    ],
)
def test_live_edges_are_refused_by_name_where_they_are_not_defined(name, why, model_named):
    clean, corrupted = two(model_named(name))
    with pytest.raises(tlens.UnsupportedModelError, match=why):
        circuits.edge_scores(clean, corrupted, **ASKED, method="patching")


@pytest.mark.parametrize("point", ["blocks.0.attn.q.hook_out", "blocks.1.hook_mlp_out"])
def test_live_edges_are_refused_where_hooks_change_one_prompt(point):
    model = tiny_model("bridge/gpt2")

    def act(live, hook):
        live = live.clone()
        live[0, 3] += 1
        return live

    model.add_hook(point, act)
    clean, corrupted = two(model, 1)
    with pytest.raises(tlens.UnsupportedModelError, match=r"live edges .*(by the weights, differs|stands between)"):
        circuits.edge_scores(clean, corrupted, **ASKED, method="patching")


class Made(TorchDispatchMode):
    """The shapes and dtypes of everything that is made."""

    def __init__(self):
        super().__init__()
        self.tensors = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.tensors.add((tuple(tensor.shape), tensor.dtype))
        return made


@pytest.mark.parametrize("method", ["frozen", "frozen+qk", "gradient"])
def test_edges_by_position_are_made_only_where_they_are_asked_for(method, model_named):
    clean, corrupted = two(model_named("bridge/gpt2"))
    seen, options = [], {**ASKED, "method": method, "steps": 1}
    for positions in (False, True):
        with Made() as made:
            scores = circuits.edge_scores(clean, corrupted, **options, positions=positions)
        seen.append(any(len(shape) == 4 and shape[1:3] == scores.scores.shape[1:] for shape, _ in made.tensors))
        assert close(scores.scores, circuits.edge_scores(clean, corrupted, **options).scores, 1e-12)
    assert seen == [False, True]


def test_the_masks_of_patched_edges_are_within_the_memory_bound(model_named):
    clean, corrupted = two(model_named("bridge/gpt2"))
    scores = circuits.edge_scores(clean, corrupted, **ASKED, method="patching")
    with Made() as made:
        chunked = circuits.edge_scores(clean, corrupted, **ASKED, method="patching", memory="4MB")
    assert close(chunked.scores, scores.scores, 1e-12)
    masks = [shape[0] for shape, dtype in made.tensors if shape[1:] == scores.exists.shape and dtype == torch.bool]
    assert 1 < max(masks) < len(scores)


# ------------------------------------------------------------------ circuits


@pytest.fixture(scope="module")
def scores():
    model = tlens.load_demo_model("recall", torch.float64, kind="bridge")
    pairs = evaluate.prompt_pairs(evaluate.recall(4))
    clean, corrupted = tlens.freeze(model, pairs.clean), tlens.freeze(model, pairs.corrupted)
    asked = {"target": pairs.target.tolist(), "minus": pairs.minus.tolist()}
    return circuits.edge_scores(clean, corrupted, **asked, method="gradient")


@pytest.mark.parametrize("choice", ["top", "greedy"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_pruned_circuit_is_what_paths_go_through(scores, choice, absolute):
    mean = scores.scores.mean(0)
    for edges in (0, 3, 10, 40, len(scores)):
        made = scores.circuit(edges, absolute=absolute, choice=choice)
        order = edge_order(mean, scores.exists, scores.sources, scores.destinations, absolute=absolute, choice=choice)
        graph = networkx.DiGraph()
        graph.add_nodes_from(["embed", "target"])
        chosen = [divmod(place, len(scores.destinations)) for place in order[:edges].tolist()]
        names = [(scores.sources[s], scores.destinations[d]) for s, d in chosen]
        graph.add_edges_from((s, d.split(".")[0]) for s, d in names)
        alive = (networkx.descendants(graph, "embed") | {"embed"}) & (networkx.ancestors(graph, "target") | {"target"})
        expected = {f"{s} → {d}" for s, d in names if s in alive and d.split(".")[0] in alive}
        assert set(made.edges) == expected
        assert len(made) == len(expected) <= edges
    if choice == "top":
        sizes = (mean.abs() if absolute else mean).flatten()[order]
        assert bool((sizes.diff() <= 0).all())
        assert len(order) == len(scores)


def test_many_circuits_are_pruned_at_once(scores):
    kept = scores.exists & (torch.rand(5, *scores.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.2)
    together = pruned(kept, scores.sources, scores.destinations)
    for number_, one in enumerate(kept):
        assert torch.equal(together[number_], pruned(one, scores.sources, scores.destinations))
    assert bool((kept & ~together).any())


def test_the_benchmarks_json_round_trips(scores, tmp_path):
    made = scores.circuit(20)
    content = json.loads(made.save(tmp_path / "circuit.json").read_text())
    assert set(content) == {"cfg", "nodes", "edges", "target", "method", "provenance"}
    assert content["cfg"] == {"n_layers": 2, "n_heads": 4, "d_model": 64, "parallel_attn_mlp": False}
    assert list(content["nodes"])[:3] == ["input", "a0.h0", "a0.h1"]
    assert {"input->a0.h0<q>", "a0.h3->m0", "m0->a1.h2<v>", "m1->logits"} <= set(content["edges"])
    assert len(content["edges"]) == len(scores)
    kept = {name for name, edge in content["edges"].items() if edge["in_graph"]}
    assert len(kept) == len(made)
    assert {name.split("->")[0] for name in kept} == {n for n, node in content["nodes"].items() if node["in_graph"]} - {
        "logits"
    }
    again = circuits.Circuit.load(tmp_path / "circuit.json")
    assert (again.sources, again.destinations, again.edges) == (made.sources, made.destinations, made.edges)
    assert close(again.scores, made.scores, 1e-12)
    assert torch.equal(again.exists, made.exists)
    for text in ("{}", "no JSON", '{"cfg": {}, "nodes": {}, "edges": {"x->y": {"score": 1, "in_graph": true}}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(tlens.FileFormatError, match="benchmark"):
            circuits.Circuit.load(tmp_path / "other.json")
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        made.save(tmp_path / "none" / "circuit.json")


def test_gpt2_has_the_benchmarks_number_of_edges():
    model = build_bridge("gpt2", n_layer=12, n_head=12, n_embd=24)
    layout = edge_layout(Stream.of(tlens.freeze(model, some_tokens(1, 3))))
    assert int(layout.exists.sum()) == 32491


def test_edge_scores_are_kept_and_shown(scores, tmp_path, capsys):
    again = circuits.EdgeScores.load(scores.save(tmp_path / "edges.safetensors"))
    assert close(again.scores, scores.scores, 0)
    assert again.top(3) == scores.top(3)
    assert scores.top(1)[0].score == pytest.approx(float(scores[scores.top(1)[0].name].mean()))
    frame = scores.to_dataframe()
    assert len(frame) == 4 * len(scores)
    assert frame["score"].sum() == pytest.approx(float(scores.scores.sum()))
    scores.show(3)
    assert scores.top(1)[0].name in capsys.readouterr().out
    for edge in ("embed → nowhere", "MLP1 → MLP0", "x"):
        with pytest.raises(tlens.InvalidInputError, match="no edge"):
            scores[edge]


# ------------------------------------------------------------------ bad input


def test_prompts_that_cannot_be_compared_are_refused(model_named, scores):
    model = model_named("bridge/gpt2")
    clean, corrupted = two(model)
    other = tlens.freeze(model_named("bridge/llama"), some_tokens())
    padded = tlens.freeze(model, some_tokens(), attention_mask=torch.tensor([[1] * 6, [0] + [1] * 5]))
    wrong = [
        ((clean, other), "two models"),
        ((clean, tlens.freeze(model, some_tokens(2, 5))), "6 tokens and the corrupted ones 5"),
        ((clean, tlens.freeze(model, some_tokens(1))), "2 clean prompts and 1"),
        ((clean, padded), "corrupted prompt 1 is padded"),
        ((clean, model), "a frozen pass is needed"),
    ]
    for passes, message in wrong:
        for call in (circuits.patch_scores, circuits.edge_scores):
            with pytest.raises(tlens.InvalidInputError, match=message):
                call(*passes, **ASKED)
    for options, message in (
        ({"by": "word"}, "by="),
        ({"method": "guess"}, "method="),
        ({"steps": 0}, "steps"),
        ({"points": "right"}, "points="),
        ({"minus": 5}, "same token"),
        ({"query": [0, 1]}, "one"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            circuits.patch_scores(clean, corrupted, **{**ASKED, **options})
    with pytest.raises(tlens.InvalidInputError, match="method="):
        circuits.edge_scores(clean, corrupted, **ASKED, method="guess")
    with pytest.raises(tlens.InvalidInputError, match="positions"):
        circuits.edge_scores(clean, corrupted, **ASKED, method="patching", positions=True)
    with pytest.raises(tlens.InvalidInputError, match="another model"):
        circuits.run_circuits(clean, corrupted, scores.circuit(3), **ASKED)
    for given in ([], ["L0H1"]):
        with pytest.raises(tlens.InvalidInputError, match="circuits"):
            circuits.run_circuits(clean, corrupted, given, **ASKED)
    for edges in (111, -1, 1.5):
        with pytest.raises(tlens.InvalidInputError, match="edges"):
            scores.circuit(edges)
    with pytest.raises(tlens.InvalidInputError, match="choice"):
        scores.circuit(3, choice="best")


def test_encoder_decoders_and_experts_are_refused_by_name(model_named):
    model = model_named("bridge/bart")
    frozen = tlens.freeze(model, some_tokens(), decoder_input_ids=some_tokens(2, 4))
    with pytest.raises(tlens.UnsupportedModelError, match=r"live edges .*patch_scores, and .* work without"):
        circuits.edge_scores(frozen, frozen, **ASKED, method="patching")
    with pytest.raises(tlens.InvalidInputError, match="6 tokens for the encoder and the corrupted ones 5"):
        circuits.patch_scores(
            frozen, tlens.freeze(model, some_tokens(2, 5), decoder_input_ids=some_tokens(2, 5)), **ASKED
        )
    with pytest.raises(tlens.InvalidInputError, match="4 tokens for the decoder and the corrupted ones 3"):
        circuits.edge_scores(frozen, tlens.freeze(model, some_tokens(), decoder_input_ids=some_tokens(2, 3)), **ASKED)
    if "bridge/jamba" in HERE:
        mixer = tlens.freeze(model_named("bridge/jamba"), some_tokens())
        with pytest.raises(tlens.UnsupportedModelError, match=r"'frozen\+qk': no hook points show .*mixer"):
            circuits.patch_scores(mixer, mixer, **ASKED, method="frozen+qk")
    frozen = tlens.freeze(model_named("bridge/mixtral"), some_tokens())
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0.*mixture of experts"):
        circuits.edge_scores(frozen, frozen, **ASKED)


def test_a_stale_pass_and_an_attached_one_are_refused():
    model = tiny_model("bridge/gpt2")
    clean, corrupted = two(model)
    with clean.attached(), pytest.raises(tlens.FrozenModelError, match="attached"):
        circuits.patch_scores(clean, corrupted, **ASKED, method="gradient")
    with torch.no_grad():
        next(iter(model.parameters())).add_(0.1)
    with pytest.raises(tlens.FrozenModelError, match="changed"):
        circuits.patch_scores(tlens.freeze(model, some_tokens()), corrupted, **ASKED)


def test_hooks_put_on_since_the_passes_are_refused_as_such(model_named):
    model = tiny_model("bridge/gpt2")
    clean, corrupted = two(model)
    scores = circuits.edge_scores(clean, corrupted, **ASKED)
    live = [
        *(partial(circuits.edge_scores, method=method) for method in ("gradient", "frozen+qk", "patching")),
        partial(circuits.patch_scores, method="frozen+qk"),
        lambda *given, **asked: circuits.run_circuits(*given, scores.circuit(9), **asked),
    ]
    by_hooks = [
        partial(circuits.patch_scores, method="patching"),
        lambda clean, _, **asked: circuits.total_effects(clean, **asked, live=True),
    ]
    for call in live:
        with clean.attached(), pytest.raises(tlens.FrozenModelError, match="attached"):
            call(clean, corrupted, **ASKED)
    fixed = torch.ones_like(values(clean, ["blocks.1.mlp.hook_post"])["blocks.1.mlp.hook_post"])
    model.add_hook("blocks.1.mlp.hook_post", lambda act, hook: fixed.repeat(len(act) // 2, 1, 1))
    for call in (*live, *by_hooks):
        with pytest.raises(tlens.FrozenModelError, match="hooks were put on"):
            call(clean, corrupted, **ASKED)
    assert close(circuits.edge_scores(clean, corrupted, **ASKED).scores, scores.scores, 0)
    model.reset_hooks()
    for call in live:
        call(clean, corrupted, **ASKED)


def test_what_are_no_circuits_and_no_edges_is_said(model_named):
    clean, corrupted = two(model_named("bridge/gpt2"))
    for given in (None, 3):
        with pytest.raises(tlens.InvalidInputError, match=f"circuits={given}: pass one or a list"):
            circuits.run_circuits(clean, corrupted, given, **ASKED)
    with pytest.raises(tlens.InvalidInputError, match="no edge 3; edges are called by name"):
        circuits.edge_scores(clean, corrupted, **ASKED)[3]


def test_circuits_of_several_devices_run_together(model_named):
    clean, corrupted = two(model_named("bridge/gpt2"))
    one = circuits.edge_scores(clean, corrupted, **ASKED).circuit(9)
    seen = []

    class Elsewhere:
        """A matrix that has to be moved before it can stand beside others."""

        def to(self, device):
            seen.append(device)
            return one.selection

    there = copy.copy(one)
    object.__setattr__(there, "selection", Elsewhere())
    made = circuits.run_circuits(clean, corrupted, [one, there], **ASKED)
    assert seen == [clean.tokens.device]
    assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/neox"])
def test_a_file_of_a_circuit_is_json_and_complete(name, model_named, tmp_path):
    clean, corrupted = two(model_named(name))
    made, path = circuits.edge_scores(clean, corrupted, **ASKED).circuit(9), tmp_path / "circuit.json"
    made.scores[0, 0] = torch.nan
    content = json.loads(made.save(path).read_text(), parse_constant=pytest.fail)
    assert content["edges"]["input->a0.h0<q>"]["score"] is None
    again = circuits.Circuit.load(path)
    assert torch.equal(again.exists, made.exists)
    assert bool(again.scores[0, 0].isnan())
    assert json.loads(again.save(path).read_text(), parse_constant=pytest.fail) == content
    kept = {edge: entry for edge, entry in content["edges"].items() if entry["in_graph"]}
    path.write_text(json.dumps(content | {"edges": kept}))
    with pytest.raises(tlens.FileFormatError, match=rf"{len(made.exists.nonzero()) - len(made)} of the .*are missing"):
        circuits.Circuit.load(path)
    back = content["edges"] | {"m1->a0.h0<q>": {"score": 1.0, "in_graph": True}}
    path.write_text(json.dumps(content | {"edges": back}))
    with pytest.raises(tlens.FileFormatError, match=r"MLP1 → L0H0\.q' is no edge"):
        circuits.Circuit.load(path)
    made.scores[0, 0] = torch.inf
    with pytest.raises(tlens.InvalidInputError, match="infinite"):
        made.save(path)


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize("change", ["source", "question"])
@pytest.mark.parametrize(
    "task", [evaluate.recall(12), evaluate.induction(12, d_vocab=200)], ids=["recall", "induction"]
)
def test_pairs_differ_in_one_token_and_in_their_answers(task, change):
    pairs = evaluate.prompt_pairs(task, change)
    differ = pairs.clean != pairs.corrupted
    assert bool((differ.sum(1) == 1).all())
    expected = task.sources if change == "source" else torch.arange(differ.shape[1]) == differ.shape[1] - 1
    assert bool((differ == expected).all())
    assert bool((pairs.target != pairs.minus).all())
    for row, other in zip(pairs.corrupted.tolist(), pairs.minus.tolist(), strict=True):
        place = row.index(row[-1])  # what the question asks for stood there first, and its answer after it
        assert row[place + 1] == other
    assert torch.equal(evaluate.prompt_pairs(task, change).corrupted, pairs.corrupted)
    assert not torch.equal(evaluate.prompt_pairs(task, change, seed=1).corrupted, pairs.corrupted)


def test_pairs_that_are_none_are_refused():
    tokens = torch.tensor([[1, 2]])
    for answers, others, corrupted, message in (
        ([3], [3], tokens, "the same token"),
        ([3, 4], [5], tokens, "target is"),
        ([3], [4], tokens[:, :1], "positions must match"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            evaluate.PromptPairs("x", tokens, corrupted, torch.tensor(answers), torch.tensor(others))
    with pytest.raises(tlens.InvalidInputError, match="brackets"):
        evaluate.prompt_pairs(evaluate.brackets(2))
    with pytest.raises(tlens.InvalidInputError, match="change"):
        evaluate.prompt_pairs(evaluate.recall(2), "both")


def test_faithfulness_is_the_benchmarks_ratio_of_means(tmp_path):
    model = tlens.load_demo_model("recall", torch.float64, kind="bridge")
    pairs = evaluate.prompt_pairs(evaluate.recall(4))
    made = evaluate.circuit_faithfulness(model, pairs, ["gradient", "random"], folder=tmp_path)
    clean, corrupted = tlens.freeze(model, pairs.clean), tlens.freeze(model, pairs.corrupted)
    asked = {"target": pairs.target.tolist(), "minus": pairs.minus.tolist()}
    scores = circuits.edge_scores(clean, corrupted, **asked, method="gradient")
    areas = []
    for absolute in (False, True):
        chosen = [scores.circuit(int(p * len(scores)), absolute=absolute) for p in evaluate.PROPORTIONS]
        means = circuits.run_circuits(clean, corrupted, chosen, **asked).mean(1)
        curve = (means - scores.corrupted.mean()) / (scores.clean.mean() - scores.corrupted.mean())
        curve = (1 - curve).abs() if absolute else curve
        areas.append(float(torch.trapezoid(curve, torch.tensor(evaluate.PROPORTIONS, dtype=curve.dtype))))
    assert made.mean("cpr", "gradient") == pytest.approx(areas[0], abs=1e-9)
    assert made.mean("cmd", "gradient") == pytest.approx(areas[1], abs=1e-9)
    assert made.mean("cpr", "gradient") > made.mean("cpr", "random") + 0.2
    assert close(made.curves[0, :, :, -1].mean(-1), torch.ones(2, dtype=torch.float64), 1e-9)
    saved = circuits.Circuit.load(tmp_path / "gradient.json")
    assert saved.edges == scores.circuit(int(0.1 * len(scores))).edges
    left = evaluate.circuit_faithfulness(model, pairs, ["integrated-gradients, left"], proportions=(0.1, 1))
    ends = circuits.edge_scores(clean, corrupted, **asked, method="integrated-gradients", points="left")
    alone = circuits.run_circuits(clean, corrupted, ends.circuit(int(0.1 * len(ends)), absolute=False), **asked)[0]
    share = (alone - ends.corrupted) / (ends.clean - ends.corrupted).mean()
    assert close(left.curves[0, 0, :, 0], share, 1e-9)
    for options, message in (
        ({"proportions": [0.5, 0.1]}, "proportions"),
        ({"methods": ["guess"]}, "methods"),
        ({"methods": ["random", "random"]}, "twice"),
        ({"choice": "best"}, "choice"),
        ({"folder": tmp_path / "none" / "deeper"}, "folder"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            evaluate.circuit_faithfulness(model, pairs, **options)
    with pytest.raises(tlens.InvalidInputError, match="pairs="):
        evaluate.circuit_faithfulness(model, evaluate.recall(2))


def test_agreement_finds_what_acts_through_patterns():
    """Where the question changes, heads attend elsewhere: a frozen model cannot see it, what joins its pull does."""
    model = tlens.load_demo_model("recall", torch.float64, kind="bridge")
    task = evaluate.recall(3)
    source = evaluate.patching_agreement(model, evaluate.prompt_pairs(task))
    question = evaluate.patching_agreement(model, evaluate.prompt_pairs(task, "question"))
    screens = [
        "frozen",
        "frozen+qk",
        "gradient",
        "integrated-gradients",
        "integrated-gradients, left",
        "atp*",
        "difference",
    ]
    assert source.methods == [*screens, "measured"]
    assert question.mean("pearson", "measured") > question.mean("pearson", "difference") > 0.95
    assert source.mean("pearson", "frozen") > 0.95
    assert question.mean("pearson", "frozen") < 0.7 < 0.85 < question.mean("pearson", "frozen+qk")
    edges = evaluate.patching_agreement(model, evaluate.prompt_pairs(task), ["frozen"], by="edge")
    assert edges.mean("pearson", "frozen") > 0.95


def test_methods_that_a_model_does_not_allow_are_left_out(model_named, monkeypatch):
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 2] = 40
    pairs = evaluate.PromptPairs("random", tokens, changed, torch.tensor([5, 6]), torch.tensor([7, 8]))

    def refused(*given, **options):
        raise tlens.UnsupportedModelError("no hook points show queries")

    monkeypatch.setattr("tensorlens_tl.circuits.compare._pattern_responses", refused)
    made = evaluate.patching_agreement(model_named("bridge/gemma2"), pairs, only_correct=False)
    assert made.methods == [
        "frozen",
        "gradient",
        "integrated-gradients",
        "integrated-gradients, left",
        "atp*",
        "difference",
        "measured",
    ]
    assert "no hook points" in made.skipped["frozen+qk"]
    with pytest.raises(tlens.InvalidInputError, match="nothing to explain"):
        evaluate.patching_agreement(model_named("bridge/gemma2"), pairs)


def test_commands(tmp_path, capsys):
    asked = ["--model", "demo:recall", "-n", "2", "--methods", "frozen+qk"]
    assert main(["evaluate", "circuits", *asked, "--circuits", str(tmp_path), "-o", str(tmp_path / "r.csv")]) == 0
    assert "cpr" in capsys.readouterr().out
    assert (tmp_path / "frozen+qk.json").is_file()
    assert (tmp_path / "r.csv").is_file()
    assert main(["evaluate", "patching", *asked, "--change", "question"]) == 0
    assert "pearson" in capsys.readouterr().out
    assert main(["evaluate", "circuits", *asked, "--circuits", str(tmp_path / "none" / "deeper")]) == 1
    assert "no folder" in capsys.readouterr().err


@pytest.mark.few(5)
@pytest.mark.parametrize("method", ["gradient", "integrated-gradients", "frozen+qk", "patching"])
@pytest.mark.parametrize("scores_of", [circuits.edge_scores, circuits.patch_scores])
def test_in_inference_mode_scores_are_the_same(scores_of, method):
    """What a question computes there before autograd records it can be recorded."""
    model = tiny_model("bridge/gpt2")

    def scores():
        runs = [tlens.freeze(model, some_tokens(batch=1, seed=seed)) for seed in (0, 1)]
        return scores_of(*runs, 5, method=method).scores

    with torch.inference_mode():
        inside = scores()
    assert close(inside.clone(), scores(), 1e-12)
