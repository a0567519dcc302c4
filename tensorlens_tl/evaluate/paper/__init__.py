"""The experiments of TensorLens (2026), and the published numbers beside them."""

from tensorlens_tl.evaluate.paper.few_shot import few_shot_prompts
from tensorlens_tl.evaluate.paper.published_numbers import (
    EXPERIMENTS,
    LENGTH,
    PAPER_METHODS,
    Experiment,
    PublishedNumber,
    experiment_named,
    published,
)
from tensorlens_tl.evaluate.paper.relation_decoders import (
    LinearRelation,
    RelationDecoder,
    by_relation,
    relation_decoding,
)
from tensorlens_tl.evaluate.paper.relations import Relation, Sample, few_shot_text, shipped_relations
from tensorlens_tl.evaluate.paper.reproduction import Reproduction, reproduce

__all__ = [
    "EXPERIMENTS",
    "LENGTH",
    "PAPER_METHODS",
    "Experiment",
    "LinearRelation",
    "PublishedNumber",
    "Relation",
    "RelationDecoder",
    "Reproduction",
    "Sample",
    "by_relation",
    "experiment_named",
    "few_shot_prompts",
    "few_shot_text",
    "published",
    "relation_decoding",
    "reproduce",
    "shipped_relations",
]
