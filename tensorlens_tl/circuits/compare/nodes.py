"""What differs between a clean and a corrupted prompt, node by node.

A node's score is what the target loses when the node's clean value is replaced by its corrupted one
(`tensorlens_tl.circuits.compare.pairs` states the sign). Four ways to get it:

| method | score of a node with values a | what it takes |
| --- | --- | --- |
| `frozen` | (a_clean − a_corrupted) · pull of the target to the node | one pull |
| `frozen+qk` | the same, the pull joined by live gradients where queries and keys are read | `steps` gradients |
| `gradient` | (a_clean − a_corrupted) · ∂target/∂a at the clean prompt | one gradient |
| `integrated` | the same, gradients averaged from the corrupted to the clean embeddings | `steps` gradients |
| `patching` | target(clean) − target(node patched), measured | a live run for each node |

Everything later than the node is linear in the model frozen at the clean prompt, so the first is exact there, whatever
the two prompts are. In a masked model, or another one with a prediction head after its blocks, that head is held in the
algebra and not by the hooks: the frozen model's hooks leave it live. Patterns, ratios and scales do not respond in the
frozen model: what acts through an attention pattern is invisible to it. `frozen+qk` adds what the patterns do, by
gradients of the live model averaged on the way from the corrupted to the clean embeddings
(`tensorlens_tl.circuits.compare.edges` says of which models). The gradients of the live model see it to first order:
`gradient` is attribution patching (Nanda 2023), `integrated` the inputs' variant of EAP-IG (Hanna et al. 2024).
Patching is the live model's own answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.compare.edges import edge_layout, pull_with_patterns
from tensorlens_tl.circuits.compare.pairs import METHODS, corrupted_stream, number_of, pair_target
from tensorlens_tl.circuits.compare.weights_forward import Replay
from tensorlens_tl.circuits.effects import LiveTarget, hidden_point
from tensorlens_tl.circuits.stream import Pulled, Stream, StreamTarget
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, capture, in_this_thread, run
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.passes.frozen import FrozenPass, PassLike
from tensorlens_tl.passes.live import Copies
from tensorlens_tl.results.terms import Terms

BY = ("component", "head", "neuron", "stream")


def patch_scores(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "head",
    method: str = "frozen",
    positions: bool = False,
    query: Query = -1,
    direction: Any = None,
    activation: str = "ratio",
    steps: int = 5,
    memory: Memory = None,
) -> Terms:
    """What the target loses when each node's clean value is replaced by its corrupted one.

    Nodes are the first block's input (``"embed"``) and, by `by`,

    * ``"component"``: each layer's attention and MLP;
    * ``"head"``: heads one by one, MLPs whole;
    * ``"neuron"``: heads and neurons one by one (``"MLP1.N7"``);
    * ``"stream"``: the residual stream before each block, ``"L1.stream"``.

    Args:
        clean, corrupted: passes of prompts of the same length, by one model, each clean prompt beside its corrupted
            one.
        target, minus, direction: as in `FrozenOperator.target`, of the clean prompt.
        by: what a node is.
        method: ``"frozen"``, ``"frozen+qk"``, ``"gradient"``, ``"integrated"`` or ``"patching"``; see this module's
            table.
        positions: also each node at each position, in `Terms.keys`, `[batch, query, node, pos]`. They sum to the
            node's score, except under ``"patching"``, where each is patched by itself.
        query: one position of each prompt, the last unless said.
        activation: the rule for MLPs, of the frozen methods.
        steps: gradients of ``"integrated"`` and ``"frozen+qk"``, at the midpoints of as many equal steps.
        memory: what the runs of ``"patching"`` may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: what goes through two nodes counts for both. `Terms.total` is the clean number.

    Raises:
        InvalidInputError: no such `by` or method, prompts that cannot be compared (see `check_pair`), and what
            `logit_attribution` refuses.
        UnsupportedModelError: an encoder–decoder, a mixture of experts, or, except under ``"frozen"``, a part that
            no hook reaches.
        FrozenModelError: weights changed since a pass; and except under ``"frozen"``, which describes the passes
            alone, hooks put on the model or taken off since that change what it does (under ``"frozen+qk"`` any), or
            a frozen pass attached to it.
    """
    for name, value, known in (("by", by, BY), ("method", method, METHODS)):
        if value not in known:
            raise InvalidInputError(f"{name}={value!r}; use one of {', '.join(map(repr, known))}.")
    steps = whole_number("steps", steps, least=1)
    readout = pair_target(clean, corrupted, target, minus, direction, query, activation)
    midpoints = [(step + 0.5) / steps for step in range(steps)]
    if method in ("frozen", "frozen+qk"):
        if method == "frozen":
            pulled = readout.stream.pull(readout.seed)
        else:
            replay = Replay(readout, clean, corrupted, edge_layout(readout.stream).exists)
            pulled = pull_with_patterns(readout, replay.gradients(midpoints))
        names, by_position = _along(pulled, readout.stream, corrupted_stream(readout, corrupted, activation), by)
        scores = by_position.sum(-1)
    else:
        live = LiveTarget(readout, f"patch_scores(method={method!r})")
        nodes = _Nodes(live, corrupted, list(_sites(readout, by)))
        names = [site.name for site in nodes.sites]
        if method == "patching":
            scores = nodes.patched(memory)
            by_position = nodes.patched_at_positions(memory) if positions else None
        else:
            by_position = nodes.along_gradients([1.0] if method == "gradient" else midpoints)
            scores = by_position.sum(-1)
    keys = by_position[:, None] if positions and by_position is not None else None
    terms = Terms(names=names, scores=scores[:, None], keys=keys, **readout.fields())
    return replace(terms, target=f"{readout.label}, clean − patched")


# ------------------------------------------------------------------ frozen


def _along(pulled: Pulled, stream: Stream, other: Stream, by: str) -> tuple[list[str], Float[Tensor, "batch node pos"]]:
    """What differs between two streams at every node, dotted with the target pulled back to it."""
    names = ["embed"]
    scores = [_at_positions(pulled.stream[0], stream.x[0] - other.x[0])]
    for number, step in enumerate(stream.steps):
        if by == "stream":
            if step.layer >= 0 and (not number or stream.steps[number - 1].layer != step.layer):
                names.append(f"L{step.layer}.stream")
                scores.append(_at_positions(pulled.stream[number], stream.x[number] - other.x[number]))
            continue
        for sublayer, hidden, others in zip(step.sublayers, stream.hidden[number], other.hidden[number], strict=True):
            cotangent = sublayer.write.pull(pulled.sums[number])[0]
            product = upcast(cotangent) * (hidden - others)
            if by == "component":
                names.append(sublayer.name)
                scores.append(product.sum(-1)[:, None])
            elif by == "neuron" and sublayer.kind == "mlp":
                names += [f"{sublayer.name}.N{neuron}" for neuron in range(hidden.shape[-1])]
                scores.append(product.mT)
            else:
                names += sublayer.nodes
                scores.append(sublayer.split(product).sum(-1).mT)
    return names, torch.cat(scores, dim=1)


def _at_positions(cotangent: Float[Tensor, "1 batch pos d"], x: Tensor) -> Float[Tensor, "batch 1 pos"]:
    return (upcast(cotangent[0]) * x).sum(-1)[:, None]


# ------------------------------------------------------------------ live


class _Site(NamedTuple):
    """A node where the live model has it: its hook point, and which of how many equal parts of the vector there."""

    name: str
    point: str
    part: int | None = None
    parts: int = 1


def _sites(readout: StreamTarget, by: str) -> Iterator[_Site]:
    frozen = readout.stream.frozen
    yield _Site("embed", frozen.capture.stream_names(0)[0])
    if by == "stream":
        for layer in range(frozen.n_layers):
            yield _Site(f"L{layer}.stream", frozen.capture.stream_names(layer)[0])
        return
    for step in readout.stream.steps:
        for sublayer in step.sublayers:
            at = frozen.points.blocks[sublayer.layer]
            inside = hidden_point(sublayer, at)
            if inside is None:
                raise UnsupportedModelError(
                    f"patch_scores: nothing inside {sublayer.name} of this {frozen.view.description} can be patched by "
                    "a hook (a gate or a norm inside, a mixer in place of attention). Use method='frozen', which "
                    "reads weights, or by='stream'."
                )
            neurons = by == "neuron" and not sublayer.is_attention
            width = max(1, sublayer.heads)
            if neurons:
                mlp = frozen.view.blocks[sublayer.layer].dense_mlp
                width = 1 if mlp is None else mlp.W_out.shape[0]
            if by == "component":
                yield _Site(sublayer.name, inside)
                continue
            names = [f"{sublayer.name}.N{neuron}" for neuron in range(width)] if neurons else sublayer.nodes
            yield from (_Site(name, inside, part, width) for part, name in enumerate(names))


class _Nodes:
    """The nodes of a live model, with their values for both prompts."""

    def __init__(self, live: LiveTarget, corrupted: PassLike, sites: list[_Site]) -> None:
        self.live = live
        self.readout = live.asked
        self.sites = sites
        self.frozen = live.frozen
        self.corrupted = corrupted
        self.points = list(dict.fromkeys(site.point for site in sites))
        self.clean, _ = self._values(self.frozen)
        self.other, number = self._values(corrupted)
        live.check_other(number, number_of(self.readout, corrupted))

    def _values(self, frozen: FrozenPass) -> tuple[dict[str, Tensor], Float[Tensor, "batch query"]]:
        """What the live model has at every node for some prompts, and the number that it gives."""
        read_at = self.readout.read_at
        activations, _ = capture(frozen.model, frozen.inputs, list(dict.fromkeys([*self.points, read_at])))
        vectors = activations[read_at]
        if vectors.ndim == 2:
            vectors = vectors[:, None]
        number = self.readout.number(vectors)
        return {point: self._rows(activations[point]) for point in self.points}, number

    def _rows(self, value: Tensor, copies: int = 1) -> Float[Tensor, "rows pos width"]:
        """Values with heads side by side; some classes flatten batch and position."""
        batch, pos = self.frozen.tokens.shape
        return value.reshape(copies * batch, pos, -1)

    def along_gradients(self, shares: Sequence[float]) -> Float[Tensor, "batch node pos"]:
        """(a_clean − a_corrupted) · mean gradient, embeddings at these shares of the way from corrupted to clean."""
        mean = self._gradients(shares[0])
        for share in shares[1:]:
            for point, gradient in self._gradients(share).items():
                mean[point] = mean[point] + gradient
        products = {
            point: (self.clean[point] - self.other[point]) * (mean[point] / len(shares)) for point in self.points
        }
        scores: list[Tensor] = []
        for (point, parts), sites in groupby(self.sites, key=lambda site: (site.point, site.parts)):
            by_part = products[point].unflatten(-1, (parts, -1)).sum(-1).mT
            scores.append(by_part[:, [site.part or 0 for site in sites]])
        return torch.cat(scores, dim=1)

    def _gradients(self, share: float) -> dict[str, Float[Tensor, "batch pos width"]]:
        """Gradients of the target at every point, with the first block's input on the way between the prompts."""
        readout = self.readout
        frozen = self.frozen
        start = self.frozen.capture.stream_names(0)[0]
        added: dict[str, Tensor] = {}

        def add(live: Tensor, *, hook: Any, name: str) -> Tensor:
            # what a Bridge shows a hook need not be what it goes on with; what a hook returns is
            added[name] = torch.zeros_like(live, requires_grad=True)
            return live + added[name]

        def see(live: Tensor, *, hook: Any) -> None:
            added[readout.read_at] = live

        with torch.inference_mode(False), torch.enable_grad():
            x = torch.lerp(self.corrupted.resid_pre(0), frozen.resid_pre(0), share).clone().requires_grad_(True)
            hooks: list[FwdHook] = [(start, in_this_thread(lambda live, *, hook: x))]
            hooks += [(name, in_this_thread(partial(add, name=name))) for name in self.points if name != start]
            run(frozen.model, frozen.inputs, [*hooks, (readout.read_at, in_this_thread(see))])
            vectors = added[readout.read_at]
            if vectors.ndim == 2:
                vectors = vectors[:, None]
            number = readout.number(vectors).sum()
            inputs = [x if point == start else added[point] for point in self.points]
            gradients = torch.autograd.grad(number, inputs)
        return {point: self._rows(gradient) for point, gradient in zip(self.points, gradients, strict=True)}

    def patched(self, memory: Memory) -> Float[Tensor, "batch node"]:
        """What the target loses with each node patched, at all its positions."""
        return self._losses([(site, None) for site in self.sites], memory)

    def patched_at_positions(self, memory: Memory) -> Float[Tensor, "batch node pos"]:
        """The same with each node patched at one position at a time."""
        pos = self.frozen.tokens.shape[1]
        return self._losses([(site, at) for site in self.sites for at in range(pos)], memory).unflatten(1, (-1, pos))

    def _losses(self, changes: list[tuple[_Site, int | None]], memory: Memory) -> Float[Tensor, "batch change"]:
        def run(copies: Copies) -> Float[Tensor, "copy batch query"]:
            return self._run([None if number is None else changes[number] for number in copies])

        remaining = [numbers[..., 0].T for _, numbers in self.live.changed(len(changes), run, memory, "patches")]
        return self.readout.total - torch.cat(remaining, dim=1)

    def _run(self, changes: Sequence[tuple[_Site, int | None] | None]) -> Float[Tensor, "copy batch query"]:
        """The number in copies of the prompts, with one node of each patched, or none."""
        copies = len(changes)
        pos = self.frozen.tokens.shape[1]
        hooks: list[FwdHook] = []
        patches = [(copy, *change) for copy, change in enumerate(changes) if change is not None]
        for point in dict.fromkeys(site.point for _, site, _ in patches):
            point_patches = [patch for patch in patches if patch[1].point == point]
            put = torch.zeros(
                copies, pos, point_patches[0][1].parts, dtype=torch.bool, device=self.frozen.tokens.device
            )
            for copy, site, at in point_patches:
                positions = slice(None) if at is None else at
                part = slice(None) if site.part is None else site.part
                put[copy, positions, part] = True
            hooks.append((point, in_this_thread(partial(self._put, point=point, put=put))))
        return self.live.numbers(copies, hooks)

    def _put(self, live: Tensor, *, hook: Any, point: str, put: Bool[Tensor, "copy pos part"]) -> Tensor:
        """Corrupted values in the copies, positions and parts that are marked."""
        copies, _, parts = put.shape
        values = self._rows(live, copies).unflatten(-1, (parts, -1)).unflatten(0, (copies, -1))
        other = self.other[point].to(live).unflatten(-1, (parts, -1))
        return torch.where(put[:, None, ..., None], other, values).reshape(live.shape)
