"""Facts that can only be known by name, collected in one place with the reasons.

Elsewhere, parts of a model are recognised by what they contain and what they do to random vectors. What remains are the
names under which TransformerLens lists a block's parts, which are needed to reach them at all, and a few facts that
neither a module's weights nor its output reveal.
"""

NORMS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln3", "ln3_post")
"""A block's norms, in block order. Of two norms around a sublayer, the name tells which comes first."""

ATTENTION = ("attn", "self_attn")
"""Self-attention."""

MIXERS = ("mixer", "mamba", "conv", "linear_attn", "time_mix")
"""Mixers in place of attention."""

MLPS = ("mlp", "moe", "shared_mlp", "channel_mix")
"""An MLP or experts (the first that a block has); then a shared expert next to them."""

ENTRY_NORM = "pre_ln"
"""A norm applied to the embeddings inside the first block, before anything else (RWKV)."""

EXPERTS_BESIDE = {
    "experts": ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    "shared": ("ln2", "post_feedforward_layernorm_1"),
}
"""The norms before and after each, if experts run in parallel with an MLP (Gemma 4): six norms of one class and shape
in one block, distinguished only by their names. The proof of the block shows whether the assignment is right."""

STREAMS = {
    "altup": "AltUp computes the factors that mix them outside of every hook point of TransformerLens, so that no hook "
    "sees or holds them",
    "attn_hc": "hyper-connections mix them; TransformerLens shows these, but no pattern of the attention between them",
}
"""Modules that mix several streams before and after a block's sublayers (Gemma 3n, DeepSeek-V4), by name, and what
TransformerLens does not show of them."""

LOOPS = ("H_blocks", "L_blocks")
"""Stacks that a model runs several times each, in a loop, the slow one first (HRM-Text)."""

END_NORM = "ln_final"
"""The norm that ends a call of such a stack, listed among the norms of its last block."""

ENCODER_NORM = "encoder_ln_final"
"""The norm after an encoder–decoder's last encoder block, listed among the norms of that block."""

PER_LAYER_NORM = "post_per_layer_input_norm"
"""The norm of a block's per-layer input of each token (Gemma 3n, Gemma 4), also listed among its norms."""

STABLE = "do_stable_layer_norm"
"""The option by which Hubert and Wav2Vec2 apply a norm after the last block instead of before the first. It is the same
module under the same name; only the encoder's forward pass differs."""

UNSCALED = ("mt5",)
"""T5 variants that tie the unembedding to the embedding without scaling its input, unlike T5's forward pass. Newer
versions of transformers state this in the config, `scale_decoder_outputs`, which takes precedence."""

PACKED = ("quant_state", "SCB")
"""Attributes of bitsandbytes' 4- and 8-bit weights, which torch does not see as wrappers; before packing, their dtype
still is a floating-point one."""
