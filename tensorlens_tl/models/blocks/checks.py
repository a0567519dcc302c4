"""What a block has to be for a run to be frozen, or for a method: each function refuses one that is not."""

from torch import nn

from tensorlens_tl.models.blocks.block import BlockView
from tensorlens_tl.models.names import STREAMS
from tensorlens_tl.models.parameters import AttentionWeights, innermost
from tensorlens_tl.models.sublayers import halving_period


def require_one_stream(block: BlockView) -> None:
    """Refuse a block that reads and writes several vectors for each token.

    Raises:
        UnsupportedModelError: naming what mixes them.
    """
    inner = innermost(block.module)
    mixed = [cause for name, cause in STREAMS.items() if isinstance(getattr(inner, name, None), nn.Module)]
    if mixed:
        raise block.refuse(
            f"its stream has several vectors for each token, and {mixed[0]}. Only models with one vector for each "
            "token can be frozen."
        )


def require_scaled_weights(block: BlockView) -> None:
    """Refuse offloaded weights of a model that halves its stream.

    Raises:
        UnsupportedModelError: they are.
    """
    every = halving_period(block.module)
    if block.offloaded and every > 0:
        raise block.refuse(
            f"it halves its stream after every {every} blocks, and in its first run scales the weights that write to "
            "the stream, which does nothing to offloaded ones: what it computes is not what it was trained for. Load "
            "the model into memory, or set config.rescale_every = 0 before it is loaded."
        )


def require_attention_alone(block: BlockView) -> AttentionWeights:
    """The attention weights, of a block in which nothing else mixes positions.

    Raises:
        UnsupportedModelError: nothing that mixes positions is attention, a mixer stands beside it, or its softmax
            is also over the encoder's tokens.
    """
    if block.parts.is_merged:
        raise block.refuse(
            "its self- and cross-attention share one softmax (T5Gemma 2), so that neither gives its queries a "
            "mixture of its own. The operator and what is made from it work (tensorlens, decompx, gradients)."
        )
    if block.has_beside:
        raise block.refuse(
            f"{block.parts.beside_name} stands beside its attention, so that its patterns do not say what tokens take "
            "from each other. The operator and what is made from it work (tensorlens, gradients, "
            "logit_attribution, with terms for each head and for the mixer)."
        )
    return block.attention


def require_scores(block: BlockView) -> None:
    """Refuse attention whose scores are read neither from the stream nor from latents, cross-attention likewise.

    Raises:
        UnsupportedModelError: naming what stands between.
    """
    if block.mixer is not None or block.latent_scores is None:
        block.require_query_key()
    if block.cross_attention is not None:
        _ = block.cross_query_key
