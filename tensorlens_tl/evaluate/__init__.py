"""Which method is faithful? Perturbation tests, tasks with known answers, relation decoding, and checks.

>>> import tensorlens_tl as tlens
>>> from tensorlens_tl import evaluate
>>> model = tlens.load_demo_model()
>>> task = evaluate.induction(4, d_vocab=2048)
>>> result = evaluate.known_answer(model, task, ["tensorlens target", "random"])
>>> result.mean("mrr", "tensorlens target") > 2 * result.mean("mrr", "random")
True

Every evaluation returns an `Evaluation`: a value per metric, method and prompt, with `table()` (bootstrap intervals),
`compare()` (two methods on the same prompts), `paired()` (all against one, p-values corrected for their number),
`plot()`, `to_dataframe()`, `save()` and `load()`.
"""

from tensorlens_tl.evaluate.checks import (
    agreement,
    agreement_table,
    completeness,
    over_seeds,
    randomisation,
    spearman,
    stability,
)
from tensorlens_tl.evaluate.compression import compression, compression_table
from tensorlens_tl.evaluate.known import expected_mrr, known_answer, known_attention, known_components
from tensorlens_tl.evaluate.language import TASKS as LANGUAGE_TASKS, LanguageTask, language_task
from tensorlens_tl.evaluate.paper import (
    EXPERIMENTS,
    LENGTH as LENGTH,
    Experiment,
    PublishedNumber,
    Reproduction,
    experiment_named as experiment_named,
    published,
    reproduce,
)
from tensorlens_tl.evaluate.patching import MIB_OPTIONS, PROPORTIONS, circuit_faithfulness, patching_agreement
from tensorlens_tl.evaluate.perturbation import perturbation, perturbation_dataset
from tensorlens_tl.evaluate.relations import (
    LinearRelation,
    Relation,
    RelationDecoder,
    Sample,
    by_relation,
    few_shot_prompts,
    relation_decoding,
    shipped_relations,
)
from tensorlens_tl.evaluate.scorers import PREDICTED, STANDARD, predictions
from tensorlens_tl.evaluate.tasks import (
    KnownAnswers,
    KnownAttention,
    KnownChoice,
    KnownComponents,
    Place as Place,
    PromptPairs,
    brackets,
    induction,
    prompt_pairs,
    recall,
    text_answers,
    text_pairs,
)
from tensorlens_tl.results import Comparison, Evaluation
from tensorlens_tl.results.statistics import auroc, bootstrap_interval, holm

__all__ = [
    "EXPERIMENTS",
    "LANGUAGE_TASKS",
    "MIB_OPTIONS",
    "PREDICTED",
    "PROPORTIONS",
    "STANDARD",
    "Comparison",
    "Evaluation",
    "Experiment",
    "KnownAnswers",
    "KnownAttention",
    "KnownChoice",
    "KnownComponents",
    "LanguageTask",
    "LinearRelation",
    "PromptPairs",
    "PublishedNumber",
    "Relation",
    "RelationDecoder",
    "Reproduction",
    "Sample",
    "agreement",
    "agreement_table",
    "auroc",
    "bootstrap_interval",
    "brackets",
    "by_relation",
    "circuit_faithfulness",
    "completeness",
    "compression",
    "compression_table",
    "expected_mrr",
    "few_shot_prompts",
    "holm",
    "induction",
    "known_answer",
    "known_attention",
    "known_components",
    "language_task",
    "over_seeds",
    "patching_agreement",
    "perturbation",
    "perturbation_dataset",
    "predictions",
    "prompt_pairs",
    "published",
    "randomisation",
    "recall",
    "relation_decoding",
    "reproduce",
    "shipped_relations",
    "spearman",
    "stability",
    "text_answers",
    "text_pairs",
]
