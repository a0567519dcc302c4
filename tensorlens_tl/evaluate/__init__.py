"""Which method is faithful? Perturbation tests, tasks with known answers, relation decoding, and checks.

>>> import tensorlens_tl as tlens
>>> from tensorlens_tl import evaluate
>>> model = tlens.load_demo_model()
>>> task = evaluate.induction(4, d_vocab=2048)
>>> result = evaluate.known_answer(model, task, ["tensorlens target", "random"])
>>> result.mean("mrr", "tensorlens target") > 2 * result.mean("mrr", "random")
True

Every evaluation returns an `Evaluation`: a value per metric, method and prompt, with `table()` (bootstrap intervals),
`compare()` (paired), `plot()`, `to_dataframe()`, `save()` and `load()`.
"""

from tensorlens_tl.evaluate.checks import agreement, agreement_table, completeness, randomisation, spearman, stability
from tensorlens_tl.evaluate.compression import compression, compression_table
from tensorlens_tl.evaluate.few_shot import few_shot_prompts
from tensorlens_tl.evaluate.known_answer import expected_mrr, known_answer
from tensorlens_tl.evaluate.pairs import PromptPairs, prompt_pairs
from tensorlens_tl.evaluate.patching import PROPORTIONS, circuit_faithfulness, patching_agreement
from tensorlens_tl.evaluate.perturbation import perturbation
from tensorlens_tl.evaluate.relation_decoding import (
    LinearRelation,
    RelationDecoder,
    by_relation,
    relation_decoding,
)
from tensorlens_tl.evaluate.relations import Relation, Sample, shipped_relations
from tensorlens_tl.evaluate.scorers import PREDICTED, STANDARD, predictions
from tensorlens_tl.evaluate.tasks import KnownAnswers, brackets, induction, recall
from tensorlens_tl.results.evaluation import Comparison, Evaluation
from tensorlens_tl.results.statistics import bootstrap_interval

__all__ = [
    "PREDICTED",
    "PROPORTIONS",
    "STANDARD",
    "Comparison",
    "Evaluation",
    "KnownAnswers",
    "LinearRelation",
    "PromptPairs",
    "Relation",
    "RelationDecoder",
    "Sample",
    "agreement",
    "agreement_table",
    "bootstrap_interval",
    "brackets",
    "by_relation",
    "circuit_faithfulness",
    "completeness",
    "compression",
    "compression_table",
    "expected_mrr",
    "few_shot_prompts",
    "induction",
    "known_answer",
    "patching_agreement",
    "perturbation",
    "predictions",
    "prompt_pairs",
    "randomisation",
    "recall",
    "relation_decoding",
    "shipped_relations",
    "spearman",
    "stability",
]
