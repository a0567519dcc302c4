"""Proofs: is what the weights say what the model does?"""

from tensorlens_tl.passes.proof.blocks import block_error, compare_logits, logits_error, prove, unembedding_error
from tensorlens_tl.passes.proof.patterns import check_pattern, looks_ahead
from tensorlens_tl.passes.proof.sampled import POSITIONS, can_be_sampled, sampled_positions
from tensorlens_tl.passes.proof.writes import SeenWrites

__all__ = [
    "POSITIONS",
    "SeenWrites",
    "block_error",
    "can_be_sampled",
    "check_pattern",
    "compare_logits",
    "logits_error",
    "looks_ahead",
    "prove",
    "sampled_positions",
    "unembedding_error",
]
