"""What can only be known by its name, in one place, and why.

Parts of a model are recognised by what they have and by what they do to random vectors. What is left is here: the names
under which TransformerLens lists a block's parts, which is how they are reached at all, and a few facts that neither a
module's weights nor its output on its own tell.
"""

NORMS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln3", "ln3_post")
"""A block's norms, in block order. Of two norms around a sublayer, the name tells which comes first."""

ATTENTION = ("attn", "self_attn")
"""Self-attention."""

MIXERS = ("mixer", "mamba", "conv", "linear_attn", "time_mix")
"""What mixes positions in place of attention."""

MLPS = ("mlp", "moe", "shared_mlp", "channel_mix")
"""An MLP or experts, the first that a block has; then a shared expert that stands beside them."""

ENTRY_NORM = "pre_ln"
"""A norm that the embeddings go through inside the first block, before anything else (RWKV)."""

EXPERTS_BESIDE = {
    "experts": ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    "shared": ("ln2", "post_feedforward_layernorm_1"),
}
"""The norms before and after each, where experts stand beside an MLP (Gemma 4): six norms of one class and shape in one
block, of which only their names tell which belongs to what. The proof of the block shows whether that is right."""

STREAMS = {
    "altup": "AltUp computes the factors that mix them outside of every hook point of TransformerLens, so that no hook "
    "sees or holds them",
    "attn_hc": "hyper-connections mix them; TransformerLens shows these, but no pattern of the attention between them",
}
"""What mixes several streams before and after a block's sublayers (Gemma 3n, DeepSeek-V4), by its module's name, and
what TransformerLens does not show there."""

LOOPS = ("H_blocks", "L_blocks")
"""Stacks that a model runs several times each, in a loop, the slow one first (HRM-Text)."""

END_NORM = "ln_final"
"""The norm that ends a call of such a stack, among the norms of its last block."""

ENCODER_NORM = "encoder_ln_final"
"""The norm after an encoder–decoder's last encoder block, among the norms of that block."""

PER_LAYER_NORM = "post_per_layer_input_norm"
"""The norm of what a block adds for an input of each token at this layer (Gemma 3n, Gemma 4); as above."""

STABLE = "do_stable_layer_norm"
"""The option by which Hubert and Wav2Vec2 norm the stream after the last block, instead of before the first. The norm
itself is the same module under the same name; only the forward pass of its encoder differs."""

UNSCALED = ("mt5",)
"""Types of T5 that tie the unembedding to the embedding and yet do not scale what is unembedded: the forward pass of a
T5 does. Newer versions of transformers say it in the config, `scale_decoder_outputs`, which is read first."""

PACKED = ("quant_state", "SCB")
"""What bitsandbytes' weights of 4 and of 8 bits have, which torch does not know as wrappers; before they are packed
their dtype is still a floating-point one."""
