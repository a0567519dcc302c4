"""Relations: a subject, an object, and templates that ask for it; in the published JSON format.

``{"name": ..., "prompt_templates": ["The capital of {} is"], "samples": [{"subject": ..., "object": ...}]}``, the
format of Hernandez et al. 2024; of its other fields ``properties.relation_type`` is read, as the category.

    >>> relation = shipped_relations()["country capital"]
    >>> few_shot_text(relation.prompt_templates[0], relation.samples[:1], relation.samples[1].subject)
    'The capital of France is Paris\\nThe capital of Italy is'
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorlens_tl.errors import FileFormatError, InvalidInputError

SHIPPED = Path(__file__).parent / "data" / "relations"


@dataclass(frozen=True)
class Sample:
    """One pair of a relation."""

    subject: str
    object: str


@dataclass(frozen=True)
class Relation:
    """A named relation: templates with ``{}`` for the subject, its pairs, and its category where the file has one."""

    name: str
    prompt_templates: tuple[str, ...]
    samples: tuple[Sample, ...]
    category: str = ""

    def __repr__(self) -> str:
        return f"Relation({self.name!r}, {len(self.samples)} samples, {self.prompt_templates[0]!r})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Relation":
        """Read one JSON file.

        Raises:
            FileFormatError: not JSON, or without the fields of the format.
        """
        try:
            facts: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            samples = tuple(Sample(str(s["subject"]), str(s["object"])) for s in facts["samples"])
            category = str(facts.get("properties", {}).get("relation_type", ""))
            relation = cls(str(facts["name"]), tuple(map(str, facts["prompt_templates"])), samples, category)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(
                f"{path}: not a relation ({type(error).__name__}: {error}). It is JSON with name, prompt_templates and "
                "samples of subject and object."
            ) from error
        if not relation.prompt_templates or any(t.count("{}") != 1 for t in relation.prompt_templates):
            raise FileFormatError(f"{path}: every prompt template needs one {{}} for the subject.")
        if not relation.samples:
            raise FileFormatError(f"{path}: no samples.")
        return relation


@lru_cache
def shipped_relations() -> dict[str, Relation]:
    """The relations that come with the library, by name; the bundled relations model was trained on them.

    >>> from tensorlens_tl import evaluate
    >>> sorted(evaluate.shipped_relations())[:2]
    ['adjective opposite', 'animal young']
    """
    relations = [Relation.load(path) for path in sorted(SHIPPED.glob("*.json"))]
    return {relation.name: relation for relation in relations}


def few_shot_text(template: str, examples: Sequence[Sample], subject: str, separator: str = "\n") -> str:
    """A prompt: examples filled in with their objects, then the template with the subject alone.

    Raises:
        InvalidInputError: the template has no ``{}``.
    """
    if template.count("{}") != 1:
        raise InvalidInputError(f"template={template!r}: it needs one {{}} for the subject.")
    statements = [f"{template.replace('{}', example.subject)} {example.object}" for example in examples]
    return separator.join([*statements, template.replace("{}", subject)])
