"""The logit lens: what the model would predict if it stopped before a layer.

The residual stream before each layer goes through the model's own end: the final norm with the scale that *this* stream
has there, a masked language model's prediction head, the unembedding. Nothing is held fixed but the stream itself.
The last value is the model's own logit (nostalgebraist, "interpreting GPT: the logit lens", 2020).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import Linear, Norm
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.models.parameters import NormWeights, norm_epsilon
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import resolve_target


@checked_names
def logit_lens(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    direction: Direction = None,
    query: Query = -1,
) -> Float[Tensor, "batch query depth"]:
    """The logit of a token in the residual stream before every layer, and after the last one.

    Args:
        frozen: the pass.
        target, minus: as in `FrozenOperator.target`; ``"first-choice"`` is what the whole model predicts.
        direction: a vector at the final norm's output instead of a token.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.

    Returns:
        Logits before any final soft cap, `n_layers + 1` of them: in the stream before layer 0, 1, …, and at the end,
        where it is the model's own. Of an encoder–decoder, its decoder's layers. They are no parts of a sum: what each
        component adds to the logit is `logit_attribution`.

    Raises:
        InvalidInputError: no frozen pass, and what `FrozenOperator.target` refuses.
        UnsupportedModelError: several streams, or an end that does not give the model's own number from its last
            stream.

    >>> tlens.circuits.logit_lens(frozen, " value").shape  # batch query depth
    torch.Size([1, 1, 5])
    """
    check_pass(frozen)
    frozen.view.require_single_streams("the logit lens")
    frozen.check_fresh()
    positions = query_positions(frozen.prompt, query)
    resolved = resolve_target(frozen, target, minus, direction, positions)
    real = torch.take_along_dim(frozen.mask, positions, dim=1)
    at = positions[..., None]

    def number(read: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch query"]:
        vectors = upcast(torch.take_along_dim(read, at, dim=1))
        return ((vectors * resolved.vectors).sum(-1) + resolved.constant) * real

    depths = range(frozen.view.encoder_layers, frozen.n_layers + 1)
    lens = torch.stack([number(_end(frozen, layer, resolved.of_tokens)) for layer in depths], dim=-1)
    expected = number(frozen.unembedded() if resolved.of_tokens else frozen.output)
    size = upcast(frozen.output).norm(dim=-1).gather(1, positions) * resolved.vectors.norm(dim=-1) + expected.abs()
    error = float(((lens[..., -1] - expected).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)).max())
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"logit_lens: the end of {frozen.view.description}, as read from its weights, gives another number for the "
            f"last stream than the model (relative error {error:.1e}; are there hooks at its final norm?)."
        )
    return lens


def _end(frozen: FrozenPass, layer: int, to_tokens: bool) -> Float[Tensor, "batch pos d_model"]:
    """What is unembedded (or the final norm's output) if the model stops before a layer."""
    view = frozen.view
    x = upcast(frozen.resid_pre(layer))
    if view.final_norm is not None:
        x = _normed(frozen, view.final_norm, view.final_norm_name, x)
    if not to_tokens:
        return x
    classes, head = view.class_head, view.mlm_head
    if classes is not None:  # one answer for all positions
        x = x[:, : classes.tokens].mean(1, keepdim=True).expand_as(x)
        return x if classes.norm is None else _normed(frozen, classes.norm, "classifier_ln", x)
    if head is None:
        return x
    x = head.activation(Linear(head.W, head.b)(x))
    return x if head.norm is None else _normed(frozen, head.norm, head.scale_name, x)


def _normed(frozen: FrozenPass, norm: NormWeights, name: str | None, x: Tensor) -> Float[Tensor, "batch pos d_model"]:
    """A norm with the scale that this stream has; `name` is the module's (or its hook point's), where it has one."""
    if norm.epsilon is None:
        assert name is not None  # it has a hook point of its own
        module = frozen.view.model.get_submodule(name.removesuffix(".hook_scale"))
        norm = replace(norm, epsilon=norm_epsilon(module, frozen.view.cfg))
    return Norm(norm.scale_of(x), norm.gain, norm.shift, norm.centre)(x)
