"""The stream of a run under a rule: its sublayers are parts of the live model, as it ran.

No weight is read and no architecture is described here. A run is cut at its nodes: the value that arrives there ends
one part of the run and a new leaf begins the next, so that autograd has a separate graph of each part. Where the rule
lets patterns respond, attention is also cut at its queries, keys and values: its heads are then three sublayers each,
as in a difference of two runs.

The steps are those of the frozen stream. The cuts are verified: the target pulled through all parts must equal the
gradient that the rule gives without any cut, with respect to the first block's input.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import ZERO, AffineMap, Chain, Diagonal, Identity, Segment
from tensorlens_tl.algebra.numerics import refuse_nan, relative_error
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.arguments import RuleLike
from tensorlens_tl.circuits.stream import Kind, Pulled, Step, StreamTarget, Sublayer
from tensorlens_tl.core import (
    SAME_VALUE,
    Cuts,
    Recorded,
    Rule,
    Side,
    depends,
    gradients,
    refuse_other_functions,
    rule_of,
    ruled,
)
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, Placing, hook_points, in_this_thread, run_until
from tensorlens_tl.models import Place
from tensorlens_tl.models.names import ENCODER_NORM
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import is_of_run
from tensorlens_tl.requirements import check_needs

Start = Mapping[str, Float[Tensor, "batch _pos d_model"]]
"""The first block's input, by hook point, where it differs from that of the pass's prompts."""


def target_under(readout: StreamTarget, rule: RuleLike, question: str, *, neurons: bool = False) -> StreamTarget:
    """Return a target of the frozen stream, or under a rule of a run; see `ruled_target`.

    Args:
        readout: the target.
        rule: a rule or its name; None and rules of the frozen model return the target unchanged.
        question: the function that was called, for messages.
        neurons: whether the caller needs the neurons of MLPs as nodes.

    Raises:
        InvalidInputError: no such rule, or one for a difference.
        UnsupportedModelError: no hook point shows the neurons of an MLP; and as `ruled_target`.
    """
    if rule is not None and not isinstance(readout.stream.frozen, FrozenPass):
        raise InvalidInputError(
            f"{question}(rule=): a rule applies to one run; pass one of the passes of a difference, or leave rule out."
        )
    if not is_of_run(rule):
        return readout
    chosen = rule_of(rule)
    check_needs(chosen, readout.stream.run, f"{question}(rule=)")
    answer = ruled_target(readout, chosen)[0]
    parts = [part for step in answer.stream.steps for part in step.sublayers if part.is_mlp]
    for part in parts if neurons else []:
        if part.point != answer.stream.run.points.blocks[part.layer].post:
            raise UnsupportedModelError(
                f"{question}(rule=): no hook point shows the neurons of {part.name} of this "
                f"{answer.stream.run.view.description}, which is one node in a run under a rule. Leave out its neurons "
                "or the rule."
            )
    return answer


def ruled_target(
    readout: StreamTarget, rule: Rule | None, start: Start | None = None, *, biases: bool = True
) -> tuple[StreamTarget, Pulled]:
    """Return a target of the frozen stream as one of a run under a rule, and its pull along that stream.

    Args:
        readout: the target.
        rule: the rule that gradients follow; None for the model's own.
        start: a replacement for the first block's input.
        biases: whether to compute what the parts add besides their linear maps, which takes a push through each.

    Raises:
        UnsupportedModelError: a part that cannot be cut out of the run, or an operation that the rule does not cover.
        NumericalError: the parts together do not reproduce the run, or the rule changes what the model computes.
        FrozenModelError: a frozen pass is attached, or weights or hooks were changed since the pass.
    """
    # rejects an attached pass, changed weights, train mode, and hooks added since that change the run
    readout.stream.run.live("a run under a rule").check_hooks()
    run = _RuledRun(readout, rule, start or {})
    steps = tuple(run.steps(biases))
    stream = replace(readout.stream, steps=steps, values=(run.streams, run.hidden))
    pulled = stream.pull(readout.seed)
    run.check(pulled.stream[0])
    return replace(readout, stream=stream), pulled


@dataclass(frozen=True, eq=False)
class _Cut:
    """Nodes that one hook point shows.

    Attributes:
        sublayer: their sublayer in the frozen stream.
        point: the hook point.
        nodes, kind: of the ruled sublayer.
        ways: for heads, the hook points of queries, keys and values.
    """

    sublayer: Sublayer
    point: str
    nodes: tuple[str, ...]
    kind: Kind
    ways: tuple[str, ...] = ()


@dataclass(eq=False)
class _Seen(Cuts):
    """The values that a run shows, including the arguments of modules and values that are only observed."""

    def watch(self, name: str, called: str = "") -> FwdHook:
        """Return a hook that only observes a value, noted under `called` or its own name."""

        def look(live: Tensor, *, hook: Any) -> None:
            self.arrived[called or name] = live

        return name, in_this_thread(look)

    def watch_call(self, placing: Placing, module: nn.Module, name: str, *, output: bool = False) -> None:
        """Observe a module's first tensor argument, or its output."""
        home = threading.get_ident()

        def look(module: Any, args: tuple[Any, ...], last: Any) -> None:
            if threading.get_ident() == home:
                values = [last] if output else [*args, *last.values()]
                self.arrived[name] = next(value for value in values if isinstance(value, Tensor))

        placing.on_module(module, look, before=not output)


class _RuledRun:
    """One run under a rule, cut at the nodes of a stream.

    Attributes:
        streams: the stream before each step and after the last.
        hidden: each sublayer's hidden vector, by step.
    """

    def __init__(self, readout: StreamTarget, rule: Rule | None, start: Start) -> None:
        self.frozen = readout.stream.run
        self.capture = self.frozen.capture
        self.readout = readout
        self.plain = readout.stream
        self.hidden: list[tuple[Tensor, ...]] = []
        self.known = hook_points(self.frozen.model)
        self.blocks = [step for step in self.plain.steps if step.layer >= 0]
        self.ends = [step for step in self.plain.steps if step.layer < 0]  # what follows the last
        self.entries = self.capture.stream_names(self.plain.layers.start)
        self.last = self.capture.output_name(self.plain.layers.stop - 1)
        self._refuse_other_blocks()
        self.cuts = [self._cuts(step) for step in self.blocks]
        self.read_at = readout.points[-1]
        seen = self._run(rule, start)
        self.arrived, self.leaves = seen.arrived, seen.leaves
        for number, step in enumerate(self.blocks):
            if not step.sublayers and _is_factor(step.outer):  # which no hook point shows
                self.arrived[_border(number)] = self._after(number) / step.outer.factor.to(self._after(number))
        entering = torch.cat([self.leaves[name].detach() for name in self.entries], dim=1)
        self.streams = [self.vectors(entering, (0, self.frozen.tokens.shape[1]))]
        self._prove(rule, start)

    # ------------------------------------------------------------------ what is cut

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{what} of this {self.frozen.view.description} cannot be cut out of a run, so gradients cannot be "
            "assigned to its parts. Use the frozen model (rule=None, method='frozen' or 'difference'), or "
            "circuits.total_effects and tlens.attribute, which support rules here."
        )

    def _refuse_other_blocks(self) -> None:
        """Reject steps other than sublayers that read the stream and add to it, before anything runs."""
        for step in self.blocks:
            points = self.frozen.points.blocks[step.layer]
            shown = step.outer_name == f"L{step.layer}.whitening" and points.whitened is not None
            shown = shown or step.outer_name == f"{ENCODER_NORM}.b" or _is_factor(step.outer)
            if not step.sublayers and not shown:
                raise self._refuse(step.outer_name or f"L{step.layer}")
            if self.frozen.view.blocks[step.layer].offloaded:
                raise self._refuse(f"L{step.layer}, whose weights are offloaded,")

    def _cuts(self, step: Step) -> list[_Cut]:
        """Return the cuts of a step's nodes."""
        points = self.frozen.points.blocks[step.layer]
        layer = step.layer
        cuts: list[_Cut] = []
        for sublayer in step.sublayers:
            experts = isinstance(self.frozen.view.blocks[layer].mlp, ExpertsWeights) and sublayer.is_mlp
            heads = points.cross if sublayer.is_cross else points.heads
            if sublayer.is_attention and points.attention is None and heads is not None and not points.merged:
                stem = heads.z.removesuffix("hook_z")
                ways = tuple(f"{stem}hook_{letter}" for letter in "qkv")
                if not all(name in self.known for name in ways):
                    raise self._refuse(f"what queries, keys and values of {sublayer.name} read")
                cuts.append(_Cut(sublayer, heads.z, sublayer.nodes, "head", ways))
            elif sublayer.is_attention and points.attention is not None:
                cuts.append(_Cut(sublayer, points.attention.out, (sublayer.name,), "mixer"))
            elif sublayer.kind == "mixer":
                whole = points.beside or points.attention
                assert whole is not None
                cuts.append(_Cut(sublayer, whole.out, sublayer.nodes, "mixer"))
            elif sublayer.kind == "per_layer" and points.per_layer is not None:
                cuts.append(_Cut(sublayer, points.per_layer.out, sublayer.nodes, "per_layer"))
            elif sublayer.is_mlp and points.post is not None and not experts:
                cuts.append(_Cut(sublayer, points.post, sublayer.nodes, "mlp"))
            elif sublayer.is_mlp and points.mlp is not None:
                cuts.append(_Cut(sublayer, points.mlp.out, (sublayer.name,), "mlp"))
                if points.shared is not None:
                    cuts.append(_Cut(sublayer, points.shared.out, (f"L{layer}.shared",), "mlp"))
            else:
                raise self._refuse(sublayer.name)
        return cuts

    def _place(self, step: Step) -> Place:
        """Return the norms around a step's sublayers."""
        layout = self.frozen.layouts[step.layer]
        if step.sublayers and step.sublayers[0].is_cross and layout.cross is not None:
            return layout.cross
        if layout.parallel or not any(sublayer.is_mlp for sublayer in step.sublayers):
            return layout.attn
        return layout.mlp

    # ------------------------------------------------------------------ the run

    def _run(self, rule: Rule | None, start: Start) -> _Seen:
        """Run the model, cut at every node and before every block."""
        frozen, seen = self.frozen, _Seen()
        entries = dict.fromkeys(frozen.points.blocks[layer].resid_pre for layer in self.plain.layers)
        entries |= dict.fromkeys(self.entries)
        if frozen.sides is not None:
            entries |= dict.fromkeys(self.capture.stream_names(self.plain.layers.stop)[:1])
        hooks = [seen.at(name, start.get(name)) for name in entries]
        hooks.append(seen.at(self.last) if self.ends else seen.watch(self.last))
        hooks += [seen.at(point) for cuts in self.cuts for cut in cuts for point in (*cut.ways, cut.point)]
        if self.read_at != self.last:
            hooks.append(seen.watch(self.read_at))
        with torch.enable_grad(), Placing() as placing:
            for number, step in enumerate(self.blocks):
                outer = self._place(step).outer
                if step.sublayers and outer is not None:
                    module = getattr(frozen.view.blocks[step.layer].module, outer)
                    seen.watch_call(placing, module, f"{_border(number)}.{outer}")
                if self._is_second(number):
                    hooks += self._at_border(seen, placing, number)
            with ruled(frozen.model, rule):
                run_until(frozen.model, frozen.inputs, hooks, self.read_at)
        if rule is not None:
            refuse_other_functions(list(seen.arrived.values()))
        return seen

    def _is_second(self, number: int) -> bool:
        """Whether a step follows another one of its block."""
        return number > 0 and self.blocks[number - 1].layer == self.blocks[number].layer

    def _at_border(self, seen: _Seen, placing: Placing, number: int) -> list[FwdHook]:
        """Observe the stream between two steps of a block, by the returned hooks or by modules."""
        before, step = self.blocks[number - 1 : number + 1]
        view, name = self.frozen.view, _border(number)
        block, points = view.blocks[step.layer], self.frozen.points.blocks[step.layer]
        if not step.sublayers:
            if not _is_factor(step.outer):
                seen.watch_call(placing, getattr(self.frozen.model, view.encoder_norm_name), name)
            return []
        if not before.sublayers:
            assert points.whitened is not None
            return [seen.watch(points.whitened, name)]
        if step.sublayers[0].kind == "per_layer":
            assert points.per_layer is not None
            return [seen.watch(points.per_layer.into, name)]
        crossed = "_cross" if before.sublayers[0].is_cross else ""
        middle = f"{block.name}.hook_resid_mid{crossed}"
        if not view.is_bridge and not view.is_hooked_encoder and middle in self.known:
            return [seen.watch(middle, name)]  # a HookedTransformer's readers may get copies of it
        outer, place = self._place(before).outer, self._place(step)
        if outer is not None:
            seen.watch_call(placing, getattr(block.module, outer), name, output=True)
        else:
            part = block.module.cross_attn if step.sublayers[0].is_cross else block.parts.mlp
            seen.watch_call(placing, part if place.before is None else getattr(block.module, place.before), name)
        return []

    def _prove(self, rule: Rule | None, start: Start) -> None:
        """Check the cut run against an uncut one, and both against the values of the pass; note the uncut gradient."""
        frozen = self.frozen
        whole = _Seen()
        hooks = [*(whole.at(name, start.get(name)) for name in self.entries), whole.watch(self.read_at)]
        with torch.enable_grad(), ruled(frozen.model, rule):
            run_until(frozen.model, frozen.inputs, hooks, self.read_at)
        read = whole.arrived[self.read_at]
        value = read.detach()
        seed = self.readout.seed[..., slice(*self._side(-1)), :].reshape(-1, *read.shape).to(read)
        pulled = [gradients(read, whole.leaves[name], seed) for name in self.entries]
        tokens = frozen.tokens
        self.uncut = torch.cat([part.flatten(3).to(tokens.device) for part in pulled], dim=2)
        if not start:
            live = frozen.activation(self.read_at)
            self._refuse_error(
                relative_error(value.to(live), live), "under the rule it computes something else", SAME_VALUE
            )
        error = relative_error(self.arrived[self.read_at].detach(), value)
        self._refuse_error(error, "the cut run computes something else")

    def check(self, pulled: Float[Tensor, "query batch pos d_model"]) -> None:
        """Compare the target pulled through all parts with the gradient of the uncut run.

        Raises:
            NumericalError: they differ.
        """
        refuse_nan(f"{self.frozen.view.description}: gradients", pulled)
        error = relative_error(pulled.flatten(0, 1), self.uncut.to(pulled).flatten(0, 1))
        self._refuse_error(error, "the parts of a run are not the whole: pulled through them, the target differs")

    def _refuse_error(self, error: float, what: str, advice: str = "Leave rule out.") -> None:
        if not error <= self.frozen.tolerance * self.frozen.n_layers:
            raise NumericalError(f"{self.frozen.view.description}: {what}, by {error:.1e}. {advice}")

    # ------------------------------------------------------------------ its parts

    def _side(self, layer: int) -> Side:
        """Return the positions that a block acts on; -1 stands for everything after the last block."""
        return self.capture.side(layer if layer >= 0 else self.plain.layers.stop - 1)

    def vectors(self, value: Tensor, side: Side) -> Float[Tensor, "batch pos width"]:
        """Return the values of one side as vectors at all positions, heads side by side, zero elsewhere."""
        tokens = self.frozen.tokens
        vectors = value.detach().reshape(len(tokens), side[1] - side[0], -1).to(tokens.device)
        return widened(vectors, side[0], tokens.shape[1])

    def _recorded(self, given: Tensor, output: Tensor, sides: tuple[Side, Side], mixes: bool = False) -> Recorded:
        batch, length = self.frozen.tokens.shape
        whole = sides == ((0, length), (0, length))
        return Recorded(given, output, (batch, length), mixes, sides=None if whole else sides)

    def steps(self, biases: bool) -> Iterator[Step]:
        """Yield the steps, filling `streams` and `hidden`."""
        for number, (step, cuts) in enumerate(zip(self.blocks, self.cuts, strict=True)):
            entry = self.leaves[self.frozen.points.blocks[step.layer].resid_pre]
            if self._is_second(number):
                entry = self.arrived[_border(number)]
            after = self._after(number)
            yield self._step(number, step, cuts, entry, after, biases)
            self._pass_on(after, step.layer)
        if self.ends:
            entry, after = self.leaves[self.last], self.arrived[self.read_at]
            self.hidden.append(())
            mixes = any(step.outer.mixes for step in self.ends)
            outer = self._outer(entry, after, -1, biases, mixes)
            yield Step(-1, (), outer, self.ends[0].outer_name, self.ends[0].side)
            self._pass_on(after, -1)

    def _pass_on(self, after: Tensor, layer: int) -> None:
        """Note the stream after a step, which changes only the positions of its side."""
        start, stop = self._side(layer)
        before = self.streams[-1]
        changed = self.vectors(after, (start, stop))[:, start:stop]
        self.streams.append(torch.cat([before[:, :start], changed, before[:, stop:]], dim=1))

    def _after(self, number: int) -> Tensor:
        """Return the stream after a step."""
        if number + 1 == len(self.blocks):
            return self.arrived[self.last]
        layer, following = self.blocks[number].layer, self.blocks[number + 1].layer
        return self.arrived[_border(number + 1) if following == layer else self.capture.output_name(layer)]

    def _step(self, number: int, step: Step, cuts: list[_Cut], entry: Tensor, after: Tensor, biases: bool) -> Step:
        side = self._side(step.layer)
        outer = self._place(step).outer
        if not step.sublayers:
            self.hidden.append(())
            mixes = step.outer.mixes
            passed = step.outer if _is_factor(step.outer) else self._outer(entry, after, step.layer, biases, mixes)
            return replace(step, outer=passed)
        total = after if outer is None else self.arrived[f"{_border(number)}.{outer}"]
        sublayers: list[Sublayer] = []
        hidden: list[Tensor] = []
        for cut in cuts:
            write = Chain((self._recorded(self.leaves[cut.point], total, (side, side)),))
            reads = self._reads(cut, entry, side)
            for kind, (read, value) in self._with_values(reads, cut, biases).items():
                hidden.append(value)
                changed = {"nodes": cut.nodes, "kind": kind, "in_parts": len(reads) > 1, "point": cut.point}
                sublayers.append(replace(cut.sublayer, read=read, write=write, **changed))
        self.hidden.append(tuple(hidden))
        if biases:  # of all sublayers together: their separate shares cannot be observed
            written = sum(part.write.push(value) for part, value in zip(sublayers, hidden, strict=True))
            rest = self.vectors(total, side) - self.vectors(entry, side) - written
            sublayers[-1] = replace(sublayers[-1], write=self._plus(sublayers[-1].write, rest, total))
        passed = Identity() if total is after else self._outer(total, after, step.layer, biases)
        return replace(step, sublayers=tuple(sublayers), outer=passed)

    def _outer(self, total: Tensor, after: Tensor, layer: int, biases: bool, mixes: bool = False) -> AffineMap:
        """Return the map of the whole stream after the sublayers; the other stack's stream is unchanged."""
        batch, length = self.frozen.tokens.shape
        start, stop = self._side(layer)
        outer = Chain((Recorded(total, after, (batch, stop - start), mixes),))
        if biases:
            x, y = (self.vectors(value, (start, stop))[:, start:stop] for value in (total, after))
            outer = self._plus(outer, y - outer.push(x), after)
        return outer if stop - start == length else Segment(outer, start, stop, length)

    def _reads(self, cut: _Cut, entry: Tensor, side: Side) -> dict[Kind, Chain]:
        """Return how a cut's nodes read the stream; heads by queries, keys and values where patterns respond."""
        arrived = self.arrived[cut.point]
        if not cut.ways:
            return {cut.kind: Chain((self._recorded(entry, arrived, (side, side), cut.sublayer.read.mixes),))}
        if depends(arrived, entry):
            raise self._refuse(f"what queries, keys and values of {cut.sublayer.name} read")
        attended = entry, side
        if cut.sublayer.is_cross:
            attended = self.leaves[str(self.frozen.points.encoder_output)], (0, side[0])
        kinds: tuple[Kind, ...] = ("query", "key", "head")
        reads: dict[Kind, Chain] = {}
        for kind, way in zip(kinds, cut.ways, strict=True):
            if kind != "head" and not depends(arrived, self.leaves[way]):
                continue
            given, at = (entry, side) if kind == "query" else attended
            read = self._recorded(given, self.arrived[way], (at, at))
            reads[kind] = Chain((read, self._recorded(self.leaves[way], arrived, (at, side), True)))
        return reads

    def _with_values(self, reads: Mapping[Kind, Chain], cut: _Cut, biases: bool) -> dict[Kind, tuple[Chain, Tensor]]:
        """Pair each read with its share of the hidden vector; the nonlinear remainder is the last one's bias."""
        *others, last = reads
        x, rest = self.streams[-1], self.vectors(self.arrived[cut.point], self._side(cut.sublayer.layer))
        shares: dict[Kind, tuple[Chain, Tensor]] = {}
        for kind in others:
            share = reads[kind].push(x) if biases else torch.zeros_like(rest)
            shares[kind] = (reads[kind], share)
            rest = rest - share
        read = reads[last]
        if biases:
            read = self._plus(read, rest - read.push(x), self.arrived[cut.point])
        shares[last] = (read, rest)
        return shares

    def _plus(self, read: Chain, offset: Float[Tensor, "batch pos d"], value: Tensor) -> Chain:
        """Add an offset at the end of a chain, unless it is mere rounding of the value."""
        *before, last = read.stages
        assert isinstance(last, Recorded)
        if float(offset.norm()) <= self.frozen.tolerance / 10 * float(value.detach().norm()):
            return read
        return Chain((*before, replace(last, offset=offset)))


def _border(number: int) -> str:
    """Return the name under which the stream before a step is noted, where no hook point has it."""
    return f"step {number}"


def _is_factor(outer: AffineMap) -> TypeGuard[Diagonal]:
    """Whether a step only multiplies the stream by a constant."""
    return isinstance(outer, Diagonal) and outer.bias is ZERO
