"""Proofs: is what the weights say what the model does?"""

from tensorlens_tl.passes.proof.blocks import LayoutSearch, Proof, block_error, prove
from tensorlens_tl.passes.proof.logits import LogitsCheck, compared_positions, logits_error
from tensorlens_tl.passes.proof.patterns import check_pattern, looks_ahead
from tensorlens_tl.passes.proof.sampled import POSITIONS, can_be_sampled, sampled_positions
from tensorlens_tl.passes.proof.writes import SeenWrites

__all__ = [
    "POSITIONS",
    "LayoutSearch",
    "LogitsCheck",
    "Proof",
    "SeenWrites",
    "block_error",
    "can_be_sampled",
    "check_pattern",
    "compared_positions",
    "logits_error",
    "looks_ahead",
    "prove",
    "sampled_positions",
]
