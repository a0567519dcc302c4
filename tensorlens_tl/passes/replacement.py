"""Replacements for removed tokens: another token, or a vector in place of the embedding.

A model may overwrite embeddings, for instance by features of an image, so that a vector inserted at the embedding is
lost. A `Placement` finds such positions and inserts into the first block's input what a token with that embedding would
have become; every run verifies that the replacement has arrived there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, capture, in_this_thread, model_points
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import Prompt, image_tokens, token_inputs
from tensorlens_tl.passes.target import token_ids

REPLACEMENTS = ("mask", "pad", "mean", "zero")
EMBEDDINGS = ("embed.hook_out", "embed.hook_embed", "hook_embed")
"""Hook points of token embeddings before positions are added: a Bridge, a HookedEncoder, a HookedTransformer."""

DECODER_EMBEDDING = "decoder_embed.hook_out"
ENCODER_EMBEDDINGS = ("encoder_embed.hook_out", "embed.hook_out")
"""The same in an encoder–decoder's encoder."""

Mean = Callable[[str], Float[Tensor, "d"]]
"""A function from the hook point of token embeddings to the mean embedding."""


@dataclass(frozen=True, eq=False)
class Replacement:
    """A token id, or a vector that replaces token embeddings at the hook point `at`.

    The vector is the same for all positions, `[d]` (or just zero), or one for each, `[pos, d]`, per prompt or for all.
    In an encoder–decoder it is the encoder's, and `decoder` has the decoder's; a token is for both. `tokens` has one
    token for each position, for prompts that consist of tokens only.
    """

    name: str
    token: int | None = None
    at: str | None = None
    vector: Tensor | None = None
    decoder: "Replacement | None" = None
    tokens: Int[Tensor, "prompt pos"] | None = None

    @classmethod
    def of(
        cls, view: ModelView, prompt: Prompt, replacement: Any, mean: Mean | None = None, *, alone: bool = False
    ) -> "Replacement":
        """Return the replacement that a user names.

        Args:
            view: the model.
            prompt: the prompts in which tokens are replaced.
            replacement: ``"mask"`` or ``"pad"`` (the tokenizer's), ``"mean"``, ``"zero"``, or a token. None is the mask
                token if there is one, else the mean.
            mean: the meaning of ``"mean"`` for tokens; None is the mean over all prompts' real tokens.
            alone: whether ``"mean"`` is each image's or sound's own mean, whatever else is in the batch.

        Raises:
            InvalidInputError: a replacement that the model does not have, or not a single token.
            UnsupportedModelError: the model has no hook point for token embeddings.
        """
        tokenizer = view.tokenizer
        if replacement is None:
            replacement = fixed(view)
        if view.reads != "tokens":
            if replacement not in ("mean", "zero"):
                raise InvalidInputError(f"replacement={replacement!r}: for {view.reads}, use 'mean' or 'zero'.")
            return cls._of_signal(view, prompt, replacement, alone)
        if replacement in ("mask", "pad"):
            token = getattr(tokenizer, f"{replacement}_token_id", None)
            if token is None:
                raise InvalidInputError(
                    f"replacement={replacement!r}: this model's tokenizer has no {replacement} token; use 'mean', "
                    "'zero' or a token."
                )
            return cls(str(replacement), token=int(token))
        if replacement in ("mean", "zero"):
            sides: list[Replacement] = []
            for at in embedding_points(view, prompt, f"replacement={replacement!r}"):
                vector = torch.zeros(())
                if replacement == "mean":
                    vector = (mean or _of_prompts(view, prompt))(at)
                sides.append(cls(replacement, at=at, vector=vector))
            return cls.of_sides(*sides)
        try:
            token = int(token_ids(view, replacement, 1, "replacement"))
        except InvalidInputError as error:
            raise InvalidInputError(f"{error} Or use one of {', '.join(map(repr, REPLACEMENTS))}.") from error
        if view.is_encoder_decoder and token >= min(view.d_vocab, view.decoder_vocab):
            raise InvalidInputError(
                f"replacement={replacement!r}: token id {token} must be in the vocabularies of both sides, which have "
                f"{view.d_vocab} and {view.decoder_vocab} tokens."
            )
        return cls(repr(replacement), token=token)

    @classmethod
    def of_sides(cls, first: "Replacement", decoder: "Replacement | None" = None) -> "Replacement":
        """Combine the replacements for an encoder and its decoder; with one stack, return the first."""
        return replace(first, decoder=decoder)

    @classmethod
    def _of_signal(cls, view: ModelView, prompt: Prompt, replacement: str, alone: bool) -> "Replacement":
        """The replacement for a patch or a sound's frame: its position embedding, or the mean patch at its position.

        Without a known position embedding (sound), it is the mean vector of the first block's input, or zero.
        """
        at = model_points(view).blocks[0].resid_pre
        stream = torch.cat([activation.cpu() for _, activation in _activations(view, prompt, at)])
        vector = torch.zeros_like(stream[0])
        if view.patches is not None:
            vector = view.patches.constant.to(stream)
        if replacement == "mean":
            means = (stream - vector)[:, prompt.special :].mean(1, keepdim=True)
            if not alone:
                means = means.mean(0)
            vector = vector + means
        return cls(replacement, at=at, vector=vector)

    def put(
        self, inputs: dict[str, Any], replaced: Bool[Tensor, "row pos"], rows: Int[Tensor, "row"] | None = None
    ) -> tuple[dict[str, Any], list[FwdHook]]:
        """Return the inputs of a run with some tokens replaced, and the hooks that replace their vectors.

        Args:
            inputs: the keyword arguments of the run.
            replaced: the positions to replace.
            rows: the prompt of each row, if prompts have different replacement tokens.
        """
        names = token_inputs(inputs)
        if self.tokens is not None:
            return inputs | {"input": torch.where(replaced, self.tokens[rows], inputs["input"])}, []
        if self.token is not None:
            sides = replaced.split([inputs[name].shape[1] for name in names], dim=1)
            filled = zip(names, sides, strict=True)
            return inputs | {name: inputs[name].masked_fill(side, self.token) for name, side in filled}, []
        if self.decoder is not None:
            first, second = replaced.split([inputs[name].shape[1] for name in names], dim=1)
            return inputs, [*self._hooks(first), *self.decoder._hooks(second)]
        return inputs, self._hooks(replaced)

    def _hooks(self, replaced: Bool[Tensor, "row pos"]) -> list[FwdHook]:
        """The hook that inserts the vector at some positions."""
        if self.at is None or self.vector is None:
            return []
        vector = self.vector

        def put(embedded: Tensor, *, hook: Any) -> Tensor:
            return torch.where(replaced[..., None], vector.to(embedded), embedded)

        return [(self.at, in_this_thread(put))]


def fixed(view: ModelView) -> str:
    """Return the default replacement where nothing is drawn: the mask token if there is one, else the mean."""
    return "mean" if getattr(view.tokenizer, "mask_token_id", None) is None else "mask"


WITHOUT_CONTENT = ("position_ids", "token_type_ids")
"""Arguments besides tokens that only add position-dependent vectors to the stream."""

ARRIVED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest error of a replacement at the first block, by dtype; 2e-2 in half precision."""


@dataclass(frozen=True, eq=False)
class Placement:
    """A replacement in the prompts of one model, inserted where it reaches the first block.

    Attributes:
        replacement: the replacement for tokens.
        arrivals: by the hook point of each stack's first input, its value with everything replaced; empty if the model
            reads the replacement as a token, or it is inserted at that point itself.
        overwritten: where the model's input is not a token's embedding, as at the pieces of an image.
    """

    replacement: Replacement
    arrivals: dict[str, Float[Tensor, "batch _side d"]]
    overwritten: Bool[Tensor, "batch pos"]

    @classmethod
    def of(cls, view: ModelView, prompt: Prompt, replacement: Replacement, *, singly: bool = False) -> "Placement":
        """Return the placement of a replacement in some prompts; runs the model up to its first block.

        Args:
            view: the model.
            prompt: the prompts.
            replacement: the replacement for tokens.
            singly: whether prompts will be run one by one.

        Raises:
            InvalidInputError: the replacement is a token that represents a piece of an image.
            UnsupportedModelError: a vector inserted at the embedding does not reach the first block.
        """
        blocks = model_points(view).blocks
        streams = [blocks[0].resid_pre]
        if view.is_encoder_decoder:
            streams.append(blocks[view.encoder_layers].resid_pre)
        nowhere = torch.zeros_like(prompt.mask)
        has_content = bool(set(prompt.extra) - set(WITHOUT_CONTENT))
        are_tokens = replacement.token is not None or replacement.tokens is not None
        if replacement.at in streams or (are_tokens and not has_content):
            return cls(replacement, {}, nowhere)
        if has_content and replacement.token in image_tokens(view):
            raise InvalidInputError(
                f"replacement={replacement.name}: this token represents a piece of an image; use another token, 'mean' "
                "or 'zero'."
            )
        sides = [side for side in (replacement, replacement.decoder) if side is not None and side.at is not None]
        points = [str(side.at) for side in sides]
        present = _at_points(view, inputs_of(prompt, slice(None)), [*points, *streams], singly)
        plain = {name: value for name, value in prompt.kwargs.items() if name not in prompt.extra}
        plain |= {name: prompt.kwargs[name] for name in WITHOUT_CONTENT if name in prompt.extra}
        overwritten = nowhere
        if has_content:
            words = _at_points(view, plain, streams, singly)
            overwritten = torch.cat([(present[name] != words[name]).any(-1) for name in streams], dim=1)
        expected = _at_points(view, plain, streams, singly, replacement, torch.ones_like(prompt.mask))
        stays = torch.cat([(expected[name] == present[name]).all(-1) for name in streams], dim=1)
        if sides:
            differs = [(present[at] != side.vector).any(-1) for at, side in zip(points, sides, strict=True)]
            _refuse_lost(view, replacement, stays & torch.cat(differs, dim=1) & prompt.mask)
        return cls(replacement, expected, overwritten)

    def put(
        self,
        inputs: dict[str, Any],
        replaced: Bool[Tensor, "row pos"],
        rows: Int[Tensor, "row"] | None = None,
        *,
        proves: bool = True,
    ) -> tuple[dict[str, Any], list[FwdHook]]:
        """Return the inputs of a run with some tokens replaced, and the hooks that insert and verify replacements.

        Args:
            inputs: the keyword arguments of the run.
            replaced: the positions to replace; in a run that begins later, the last ones.
            rows: the prompt of each row; None is all of them, copy after copy.
            proves: whether the hooks verify the replacements; otherwise `check` does so for a pass that runs together
                with other masks.
        """
        count, width = replaced.shape
        if rows is None:
            rows = torch.arange(len(self.overwritten)).repeat(count // len(self.overwritten))
        rows = rows.to(self.overwritten.device)
        instead = replaced & self.overwritten[rows][:, -width:]
        inputs, hooks = self.replacement.put(inputs, replaced & ~instead, rows)
        start = 0
        for name, arrival in self.arrivals.items():
            side = slice(start, start + min(width, arrival.shape[1]))
            start = side.stop
            expected = arrival[rows.to(arrival.device)][:, -width:]
            arrives = _Arrives(self.replacement, name, expected, replaced[:, side], instead, proves)
            hooks.append((name, in_this_thread(arrives)))
        return inputs, hooks

    def check(self, stream: Float[Tensor, "batch pos d"], replaced: Bool[Tensor, "batch pos"]) -> None:
        """Refuse a run of the prompts in which a replacement did not reach the input of the first blocks.

        Raises:
            FrozenModelError: names the position.
        """
        if self.arrivals:
            expected = torch.cat(list(self.arrivals.values()), dim=1)
            _check_arrived(self.replacement, " and ".join(self.arrivals), stream, expected, replaced)


@dataclass(frozen=True, eq=False)
class _Arrives:
    """A hook at the first block that inserts a replacement where the model overwrote it, and verifies its arrival."""

    replacement: Replacement
    name: str
    expected: Float[Tensor, "row side d"]
    replaced: Bool[Tensor, "row side"]
    instead: Bool[Tensor, "row pos"]
    proves: bool

    def __call__(self, stream: Tensor, *, hook: Any) -> Tensor | None:
        changed = bool(self.instead.any())
        if changed:  # models that read images have a single stack
            stream = torch.where(self.instead[..., None].to(stream.device), self.expected.to(stream), stream)
        if self.proves:
            _check_arrived(self.replacement, self.name, stream, self.expected, self.replaced)
        return stream if changed else None


def _check_arrived(
    replacement: Replacement,
    name: str,
    stream: Float[Tensor, "row pos d"],
    expected: Float[Tensor, "row pos d"],
    replaced: Bool[Tensor, "row pos"],
) -> None:
    """Refuse a stream without the replacement in place of tokens."""
    wanted = upcast(expected.to(stream))
    allowed = ARRIVED.get(stream.dtype, 2e-2) * wanted.abs().amax(-1)
    arrived = (upcast(stream) - wanted).abs().amax(-1) <= allowed
    lost = replaced.to(stream.device) & ~arrived
    if bool(lost.any()):
        row, position = lost.nonzero()[0].tolist()
        raise FrozenModelError(
            f"replacement={replacement.name}: the replacement for position {position} (row {row} of the run) did not "
            f"arrive at {name}: the model or a hook writes something else there, or hooks were taken off during the "
            "run. Take hooks at the embedding and at the first block off the model."
        )


def _at_points(
    view: ModelView,
    inputs: dict[str, Any],
    names: list[str],
    singly: bool,
    replacement: Replacement | None = None,
    where: Bool[Tensor, "batch pos"] | None = None,
) -> dict[str, Tensor]:
    """Return the activations at some hook points up to the first block, unchanged or with everything replaced.

    Raises:
        UnsupportedModelError: the model does not run on tokens alone.
    """
    rows = [slice(None)]
    if singly:
        rows = [slice(row, row + 1) for row in range(len(inputs["input"]))]
    parts: list[dict[str, Tensor]] = []
    for part in rows:
        some = {name: value[part] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        hooks: list[FwdHook] = []
        if replacement is not None and where is not None:
            some, hooks = replacement.put(some, where[part])
        try:
            seen, _ = capture(view.model, some, names, hooks=hooks, last=names[-1], changed=True)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, TensorLensError):
                raise
            raise UnsupportedModelError(
                f"{view.description} does not run on these tokens without its other inputs "
                f"({type(error).__name__}: {error}), so the pieces of an image cannot be replaced."
            ) from error
        parts.append(seen)
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _refuse_lost(view: ModelView, replacement: Replacement, lost: Bool[Tensor, "batch pos"]) -> None:
    """Refuse a vector at the embedding that leaves the first block's input unchanged."""
    if not bool(lost.any()):
        return
    row, position = lost.nonzero()[0].tolist()
    raise UnsupportedModelError(
        f"replacement={replacement.name}: the replacement at {replacement.at} of {view.description}, for position "
        f"{position} of prompt {row}, does not reach the first block: that hook point only observes, or another hook "
        "overwrites it. Take that hook off, or use a token."
    )


def embedding_points(view: ModelView, prompt: Prompt, what: str) -> list[str]:
    """Return the hook points of token embeddings before positions are added, for an encoder–decoder on either side.

    Args:
        view: a model that reads tokens.
        prompt: used to run the model if no embedding has a hook point: T5's stream begins with its embeddings.
        what: the argument, for messages.

    Raises:
        UnsupportedModelError: the model has no hook point for token embeddings.
    """
    known = view.model.hook_dict
    refusal = UnsupportedModelError(f"{what}: {view.description} has no hook point for token embeddings; use a token.")
    if not view.is_encoder_decoder:
        for name in EMBEDDINGS:
            if name in known:
                return [name]
        raise refusal
    encoder = next((name for name in ENCODER_EMBEDDINGS if name in known), None)
    if encoder is not None and DECODER_EMBEDDING in known:
        return [encoder, DECODER_EMBEDDING]
    blocks = model_points(view).blocks
    streams = [blocks[0].resid_pre, blocks[view.encoder_layers].resid_pre]
    activations, _ = capture(view.model, inputs_of(prompt, slice(None)), streams, last=streams[1])
    both = torch.cat([activations[name] for name in streams], dim=1)
    if not torch.equal(both, view.embedding[prompt.tokens].to(both)):
        raise refusal
    return streams


def inputs_of(prompt: Prompt, rows: slice | Tensor) -> dict[str, Any]:
    """Return the model's keyword arguments for some prompts."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in prompt.kwargs.items()}


def _of_prompts(view: ModelView, prompt: Prompt) -> Mean:
    def mean(at: str) -> Tensor:
        encoder = prompt.encoder_length
        mask = prompt.mask[:, encoder:] if at.startswith("decoder") else prompt.mask[:, : encoder or None]
        real = [activation[mask[part]] for part, activation in _activations(view, prompt, at)]
        return torch.cat(real).mean(0)

    return mean


def _activations(view: ModelView, prompt: Prompt, at: str) -> Iterator[tuple[slice, Tensor]]:
    """Yield the activation at one hook point for some prompts at a time."""
    for start in range(0, len(prompt.tokens), 64):
        part = slice(start, start + 64)
        yield part, capture(view.model, inputs_of(prompt, part), [at], last=at)[0][at]


def vocabulary_mean(view: ModelView, counts: Int[Tensor, "token"] | None = None) -> Mean:
    """Return the mean embedding of all tokens in the model's vocabulary, the same for every prompt.

    With `counts`, the frequency of each token, it is the mean weighted by these.
    """

    def mean(at: str) -> Tensor:
        device = view.device
        of_decoder = view.is_encoder_decoder and at.startswith("decoder")
        ids = torch.arange(view.decoder_vocab if of_decoder else view.model.cfg.d_vocab, device=device)
        often = torch.ones_like(ids) if counts is None else counts.to(device)
        ids = ids[often > 0]
        often = often[often > 0].double()
        width = min(64, view.model.cfg.n_ctx)
        sums: list[Tensor] = []
        for some, times in zip(ids.split(64 * width), often.split(64 * width), strict=True):
            padded = torch.nn.functional.pad(some, (0, -len(some) % width)).view(-1, width)
            inputs = {"input": padded}
            if view.is_encoder_decoder:  # the other side reads a single token
                inputs = {"input": padded[:, :1] * 0, view.decoder_argument: padded[:, :1] * 0}
                inputs[view.decoder_argument if of_decoder else "input"] = padded
            captured, _ = capture(view.model, inputs, [at], last=at)
            sums.append(times @ captured[at].flatten(0, 1)[: len(some)].double())
        return torch.stack(sums).sum(0) / often.sum()

    return mean
