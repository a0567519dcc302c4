"""The stream of a run under a rule: what reads it and what writes to it are parts of the live model, as it ran.

No weight is read and no architecture described here. A run is cut where its nodes are: what arrives there ends
one part of the run, and what goes on begins the next, so that autograd has a graph of each part by itself. Attention is
cut at its queries, keys and values as well, where the rule lets patterns respond: its heads are then three sublayers
each, as in a difference of two runs.

The steps are those of the frozen stream. What the cuts leave is proved: the target pulled through all parts must be the
gradient that the rule gives without any cut, by the first block's input.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import Chain, Identity
from tensorlens_tl.algebra.numerics import refuse_nan, relative_error
from tensorlens_tl.circuits.arguments import RuleLike
from tensorlens_tl.circuits.stream.stream import Pulled, StreamTarget
from tensorlens_tl.circuits.stream.sublayers import Kind, Step, Sublayer
from tensorlens_tl.core import Recorded, Rule, gradients, refuse_other_functions, rule_of, ruled
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, Placing, hook_points, in_this_thread, run_until
from tensorlens_tl.models import Place
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.requirements import check_rule

Start = Mapping[str, Float[Tensor, "batch pos d_model"]]
"""What enters the first block, by hook point, where it is not what the prompts of the pass give."""


def target_under(
    readout: StreamTarget, rule: RuleLike, question: str, activation: str = "ratio", *, neurons: bool = False
) -> StreamTarget:
    """A target of the frozen stream, or under a rule of a run; see `ruled_target`.

    Args:
        readout: the target.
        rule: a rule or its name; None for the frozen stream.
        question: the function that was called, for messages.
        activation: its rule for MLPs.
        neurons: whether it is about the neurons of MLPs.

    Raises:
        InvalidInputError: no such rule, one for a difference, or another `activation` beside it.
        UnsupportedModelError: no hook point shows the neurons of an MLP; and as `ruled_target`.
    """
    if rule is None:
        return readout
    if activation != "ratio" or not isinstance(readout.stream.frozen, FrozenPass):
        raise InvalidInputError(
            f"{question}(rule=): a rule is of one run, and says what activations do; leave activation out, and ask "
            "about one of the passes of a difference."
        )
    chosen = rule_of(rule)
    check_rule(chosen, readout.stream.run, f"{question}(rule=)")
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
    """A target of the frozen stream as one of a run under a rule.

    Args:
        readout: the target.
        rule: what gradients follow; None for the model's own.
        start: what enters the first block instead.
        biases: whether what the parts add besides their linear maps is wanted; it takes a push through each.

    Returns:
        The target, and it pulled back along its stream.

    Raises:
        UnsupportedModelError: a part that cannot be cut out of the run, or an operation that the rule does not know.
        NumericalError: the parts together are not the whole, or the rule changes what the model computes.
        FrozenModelError: a frozen pass is attached, or weights were changed since the pass.
    """
    readout.stream.run.live("a run under a rule")  # refuses an attached pass, changed weights, train mode
    run = _RuledRun(readout, rule, start or {})
    steps = tuple(run.steps(biases))
    x = [run.vectors(value) for value in run.streams]
    stream = replace(readout.stream, steps=steps, values=(x, run.hidden))
    pulled = stream.pull(readout.seed)
    run.check(pulled.stream[0])
    return replace(readout, stream=stream), pulled


@dataclass(frozen=True, eq=False)
class _Cut:
    """Nodes that one hook point shows.

    Attributes:
        sublayer: theirs in the frozen stream.
        point: where they are.
        nodes, kind: of the ruled sublayer.
        ways: the hook points of queries, keys and values, of heads.
    """

    sublayer: Sublayer
    point: str
    nodes: tuple[str, ...]
    kind: Kind
    ways: tuple[str, ...] = ()


@dataclass(eq=False)
class _Seen:
    """What a run shows: values as they arrive somewhere, and what goes on from there where it is cut."""

    arrived: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    leaves: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def cut(self, name: str, instead: Tensor | None = None) -> FwdHook:
        """A hook that ends one part of the run and begins the next, with another value where one is given."""

        def at_cut(live: Tensor, *, hook: Any) -> Tensor:
            self.arrived[name] = live
            self.leaves[name] = (live if instead is None else instead.to(live)).detach().clone().requires_grad_()
            return self.leaves[name]

        return name, in_this_thread(at_cut)

    def watch(self, name: str, called: str = "") -> FwdHook:
        """A hook that only looks, at what may be called something else."""

        def look(live: Tensor, *, hook: Any) -> None:
            self.arrived[called or name] = live

        return name, in_this_thread(look)

    def watch_call(self, placing: Placing, module: nn.Module, name: str, *, output: bool = False) -> None:
        """Look at what a module is called with, or gives."""
        home = threading.get_ident()

        def look(module: Any, args: tuple[Any, ...], last: Any) -> None:
            if threading.get_ident() == home:
                values = [last] if output else [*args, *last.values()]
                self.arrived[name] = next(value for value in values if isinstance(value, Tensor))

        placing.on_module(module, look, before=not output)


class _RuledRun:
    """One run under a rule, cut at the nodes of a stream.

    Attributes:
        streams: the stream before each step and at the end, parts of the run's graph.
        hidden: each sublayer's hidden vector, by step.
    """

    def __init__(self, readout: StreamTarget, rule: Rule | None, start: Start) -> None:
        self.frozen = readout.stream.run
        self.readout = readout
        self.plain = readout.stream
        self.hidden: list[tuple[Tensor, ...]] = []
        self.streams: list[Tensor] = []
        self.known = hook_points(self.frozen.model)
        self.blocks = [step for step in self.plain.steps if step.layer >= 0]
        self.ends = [step for step in self.plain.steps if step.layer < 0]  # what follows the last
        self.entries = [self.frozen.points.blocks[layer].resid_pre for layer in self.plain.layers]
        self.last = self.frozen.capture.output_name(self.plain.layers.stop - 1)
        self.read_at = readout.points[-1]
        self._refuse_other_blocks()
        self.cuts = [self._cuts(step) for step in self.blocks]
        seen = self._run(rule, start)
        self.arrived, self.leaves = seen.arrived, seen.leaves
        self._prove(rule, start)

    # ------------------------------------------------------------------ what is cut

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{what} of this {self.frozen.view.description} cannot be cut out of a run, so that nothing says how its "
            "parts pass gradients on. Ask about the frozen model (rule=None, method='frozen' or 'difference'), or "
            "circuits.total_effects and tlens.attribute, which take rules here, too."
        )

    def _refuse_other_blocks(self) -> None:
        """Refuse what is more than sublayers that read the stream and add to it, before anything runs."""
        if self.frozen.sides is not None:
            raise self._refuse("the pair of stacks")
        layers = [step.layer for step in self.blocks]
        for step in self.blocks:
            if not step.sublayers:
                raise self._refuse(step.outer_name or f"L{step.layer}")
            if layers.count(step.layer) > 2:
                raise self._refuse(f"L{step.layer}, more than attention and an MLP,")
            if self.frozen.view.blocks[step.layer].offloaded:
                raise self._refuse(f"L{step.layer}, whose weights are offloaded,")

    def _cuts(self, step: Step) -> list[_Cut]:
        """Where the nodes of a step are."""
        points = self.frozen.points.blocks[step.layer]
        layer = step.layer
        cuts: list[_Cut] = []
        for sublayer in step.sublayers:
            experts = isinstance(self.frozen.view.blocks[layer].mlp, ExpertsWeights) and sublayer.is_mlp
            if sublayer.is_attention and points.attention is None and points.heads is not None and not points.merged:
                stem = points.heads.z.removesuffix("hook_z")
                ways = tuple(f"{stem}hook_{letter}" for letter in "qkv")
                if not all(name in self.known for name in ways):
                    raise self._refuse(f"what queries, keys and values of {sublayer.name} read")
                cuts.append(_Cut(sublayer, points.heads.z, sublayer.nodes, "head", ways))
            elif sublayer.is_attention and points.attention is not None:
                cuts.append(_Cut(sublayer, points.attention.out, (sublayer.name,), "mixer"))
            elif sublayer.kind == "mixer":
                whole = points.beside or points.attention
                assert whole is not None
                cuts.append(_Cut(sublayer, whole.out, sublayer.nodes, "mixer"))
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
        """The norms around a step's sublayers."""
        layout = self.frozen.layouts[step.layer]
        if layout.parallel or not any(sublayer.is_mlp for sublayer in step.sublayers):
            return layout.attn
        return layout.mlp

    def _middle(self, step: Step) -> str:
        """A HookedTransformer's hook point between attention and the MLP, whose inputs may be copies; "" elsewhere."""
        view = self.frozen.view
        point = f"{view.blocks[step.layer].name}.hook_resid_mid"
        return "" if view.is_bridge or view.is_hooked_encoder or point not in self.known else point

    # ------------------------------------------------------------------ the run

    def _run(self, rule: Rule | None, start: Start) -> _Seen:
        """Run the model, cut at every node and before every block."""
        frozen, seen = self.frozen, _Seen()
        hooks = [seen.cut(name, start.get(name)) for name in self.entries]
        hooks.append(seen.cut(self.last) if self.ends else seen.watch(self.last))
        hooks += [seen.cut(point) for cuts in self.cuts for cut in cuts for point in (*cut.ways, cut.point)]
        if self.read_at != self.last:
            hooks.append(seen.watch(self.read_at))
        with torch.enable_grad(), Placing() as placing:
            for before, step in pairwise([None, *self.blocks]):
                assert step is not None
                block, place = frozen.view.blocks[step.layer], self._place(step)
                between = f"L{step.layer}.mlp"
                if place.outer is not None:
                    seen.watch_call(placing, getattr(block.module, place.outer), f"L{step.layer}.{place.outer}")
                if before is None or before.layer != step.layer:
                    continue
                norm = self._place(before).outer
                middle = self._middle(step)
                if middle:
                    hooks.append(seen.watch(middle, between))
                elif norm is not None:
                    seen.watch_call(placing, getattr(block.module, norm), between, output=True)
                else:
                    module = block.parts.mlp if place.before is None else getattr(block.module, place.before)
                    seen.watch_call(placing, module, between)
            with ruled(frozen.model, rule):
                run_until(frozen.model, frozen.inputs, hooks, self.read_at)
        if rule is not None:
            refuse_other_functions(list(seen.arrived.values()))
        return seen

    def _prove(self, rule: Rule | None, start: Start) -> None:
        """Pull the target through the uncut run too, and compare; so do values with those of the pass."""
        frozen = self.frozen
        first = self.entries[0]
        whole = _Seen()
        hooks = [whole.cut(first, start.get(first)), whole.watch(self.read_at)]
        with torch.enable_grad(), ruled(frozen.model, rule):
            run_until(frozen.model, frozen.inputs, hooks, self.read_at)
        read = whole.arrived[self.read_at]
        seed = self.readout.seed.reshape(-1, *read.shape).to(read)
        self.uncut = self.vectors(gradients(read, whole.leaves[first], seed), len(seed))
        live = self.vectors(read)
        if not start:
            self._refuse_error(
                relative_error(live, frozen.activation(self.read_at)), "under the rule it computes something else"
            )
        error = relative_error(self.vectors(self.arrived[self.read_at]), live)
        self._refuse_error(error, "where it is cut, it computes something else")

    def check(self, pulled: Float[Tensor, "query batch pos d_model"]) -> None:
        """Compare the target pulled through all parts with the gradient of the uncut run.

        Raises:
            NumericalError: they differ.
        """
        refuse_nan(f"{self.frozen.view.description}: gradients", pulled)
        error = relative_error(pulled.flatten(0, 1), self.uncut.to(pulled).flatten(0, 1))
        self._refuse_error(error, "the parts of a run are not the whole: pulled through them, the target differs")

    def _refuse_error(self, error: float, what: str) -> None:
        if not error <= self.frozen.tolerance * self.frozen.n_layers:
            raise NumericalError(f"{self.frozen.view.description}: {what}, by {error:.1e}. Leave rule out.")

    # ------------------------------------------------------------------ its parts

    def vectors(self, value: Tensor, *rows: int) -> Float[Tensor, "*rows batch pos width"]:
        """What the model has somewhere, as vectors where the input is: heads side by side."""
        tokens = self.frozen.tokens
        return value.detach().reshape(*rows, *tokens.shape, -1).to(tokens.device)

    def _recorded(self, given: Tensor, output: Tensor, mixes: bool = False) -> Recorded:
        batch, length = self.frozen.tokens.shape
        return Recorded(given, output, (batch, length), mixes)

    def steps(self, biases: bool) -> Iterator[Step]:
        """The steps, which fill `streams` and `hidden`."""
        arrived, leaves = self.arrived, self.leaves
        entry = leaves[self.entries[0]]
        for step, later, cuts in zip(self.blocks, [*self.blocks[1:], None], self.cuts, strict=True):
            if later is None:
                yield self._step(step, cuts, entry, arrived[self.last], biases)
            elif later.layer == step.layer:  # the MLP's half of the same block
                between = arrived[f"L{step.layer}.mlp"]
                yield self._step(step, cuts, entry, between, biases)
                entry = between
            else:
                name = self.frozen.points.blocks[later.layer].resid_pre
                yield self._step(step, cuts, entry, arrived[name], biases)
                entry = leaves[name]
        if self.ends:
            self.streams.append(leaves[self.last])
            self.hidden.append(())
            mixes = any(step.outer.mixes for step in self.ends)
            outer = self._outer(leaves[self.last], arrived[self.read_at], biases, mixes)
            yield Step(-1, (), outer, self.ends[0].outer_name)
        self.streams.append(arrived[self.read_at if self.ends else self.last])

    def _step(self, step: Step, cuts: list[_Cut], entry: Tensor, after: Tensor, biases: bool) -> Step:
        place = self._place(step)
        total = after if place.outer is None else self.arrived[f"L{step.layer}.{place.outer}"]
        sublayers: list[Sublayer] = []
        hidden: list[Tensor] = []
        for cut in cuts:
            write = Chain((self._recorded(self.leaves[cut.point], total),))
            reads = self._reads(cut, entry)
            for kind, (read, value) in self._with_values(reads, cut, entry, biases).items():
                hidden.append(value)
                changed = {"nodes": cut.nodes, "kind": kind, "in_parts": len(reads) > 1, "point": cut.point}
                sublayers.append(replace(cut.sublayer, read=read, write=write, **changed))
        self.streams.append(entry)
        self.hidden.append(tuple(hidden))
        if biases:  # of all sublayers together: what each adds by itself is not seen
            written = sum(part.write.push(value) for part, value in zip(sublayers, hidden, strict=True))
            rest = self.vectors(total) - self.vectors(entry) - written
            sublayers[-1] = replace(sublayers[-1], write=self._plus(sublayers[-1].write, rest, total))
        if total is after:
            return Step(step.layer, tuple(sublayers), Identity(), step.outer_name)
        return Step(step.layer, tuple(sublayers), self._outer(total, after, biases), step.outer_name)

    def _outer(self, total: Tensor, after: Tensor, biases: bool, mixes: bool = False) -> Chain:
        """What the whole stream goes through."""
        outer = Chain((self._recorded(total, after, mixes),))
        if not biases:
            return outer
        return self._plus(outer, self.vectors(after) - outer.push(self.vectors(total)), after)

    def _reads(self, cut: _Cut, entry: Tensor) -> dict[Kind, Chain]:
        """What a cut's nodes read the stream by: heads by queries, keys and values, where patterns respond."""
        arrived = self.arrived[cut.point]
        if not cut.ways:
            return {cut.kind: Chain((self._recorded(entry, arrived, cut.sublayer.read.mixes),))}
        if _depends(arrived, entry):
            raise self._refuse(f"what queries, keys and values of {cut.sublayer.name} read")
        kinds: tuple[Kind, ...] = ("query", "key", "head")
        return {
            kind: Chain((self._recorded(entry, self.arrived[way]), self._recorded(self.leaves[way], arrived, True)))
            for kind, way in zip(kinds, cut.ways, strict=True)
            if kind == "head" or _depends(arrived, self.leaves[way])
        }

    def _with_values(
        self, reads: Mapping[Kind, Chain], cut: _Cut, entry: Tensor, biases: bool
    ) -> dict[Kind, tuple[Chain, Tensor]]:
        """Each with its share of the hidden vector: what is no linear share of the others is the last one's bias."""
        *others, last = reads
        x, rest = self.vectors(entry), self.vectors(self.arrived[cut.point])
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
        """A chain of recorded parts that adds something at its end; what is rounding beside its value is nothing."""
        *before, last = read.stages
        assert isinstance(last, Recorded)
        if float(offset.norm()) <= self.frozen.tolerance / 10 * float(value.detach().norm()):
            return read
        return Chain((*before, replace(last, offset=offset)))


def _depends(output: Tensor, given: Tensor) -> bool:
    """Whether a gradient reaches what is given from an output."""
    if not output.requires_grad:
        return False
    nothing = torch.zeros_like(output)
    return torch.autograd.grad(output, given, nothing, retain_graph=True, allow_unused=True)[0] is not None
