"""Tasks and models whose truth is known: prompts, pairs of prompts, and what scores have to find in them."""

from tensorlens_tl.evaluate.known.answer import expected_mrr, known_answer, ranking
from tensorlens_tl.evaluate.known.attention import known_attention
from tensorlens_tl.evaluate.known.components import known_components
from tensorlens_tl.evaluate.known.pairs import PromptPairs, prompt_pairs
from tensorlens_tl.evaluate.known.patching import MIB_OPTIONS, PROPORTIONS, circuit_faithfulness, patching_agreement
from tensorlens_tl.evaluate.known.tasks import KnownAnswers, brackets, induction, recall
from tensorlens_tl.evaluate.known.texts import text_answers, text_pairs
from tensorlens_tl.evaluate.known.truths import KnownAttention, KnownChoice, KnownComponents, Place

__all__ = [
    "MIB_OPTIONS",
    "PROPORTIONS",
    "KnownAnswers",
    "KnownAttention",
    "KnownChoice",
    "KnownComponents",
    "Place",
    "PromptPairs",
    "brackets",
    "circuit_faithfulness",
    "expected_mrr",
    "induction",
    "known_answer",
    "known_attention",
    "known_components",
    "patching_agreement",
    "prompt_pairs",
    "ranking",
    "recall",
    "text_answers",
    "text_pairs",
]
