"""A registered method over the rows of a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorlens_tl._arguments import plain
from tensorlens_tl.datasets.packing import entry_limit, facts_of, packed
from tensorlens_tl.datasets.work import Record, Work
from tensorlens_tl.models import ModelLike
from tensorlens_tl.registry import PER_PROMPT, Method, attribute, get_method, split_options
from tensorlens_tl.results import Attribution


@dataclass(frozen=True)
class Attributions(Work):
    """What `attribute` gives of each row.

    Attributes:
        name: the method.
        keep, options: see `attribute_dataset`.
        of_rows: the options of which every row has another value.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an unknown option or `keep`.
    """

    name: str
    keep: str
    options: Mapping[str, Any]
    of_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split_options(get_method(self.name), dict(self.options) | dict.fromkeys(self.of_rows))
        entry_limit(self.keep)

    @property
    def save_whole(self) -> bool:
        """Whether results are also saved as safetensors."""
        return self.keep == "all"

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run of it is resumed."""
        return {"method": self.name, "options": with_query(get_method(self.name), self.options), "keep": self.keep}

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> Attribution:
        """The result of some rows."""
        options: dict[str, Any] = repeated_options(self.options, len(tokens)) | dict(per_row)
        return attribute(model, list(tokens), method=self.name, **options)

    def packed(self, result: Attribution) -> list[Record]:
        """Such a result as one record for each row."""
        return packed(result, self.keep)

    def facts(self, result: Attribution) -> dict[str, Any]:
        """What the rows of such a result have in common."""
        return facts_of(result, self.options)


def with_query(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the method's default query where none is given: both ways to ask for it are one run."""
    if "query" not in method.options:
        return dict(options)
    return {"query": method.options["query"], **options}


def repeated_options(options: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Options as some rows take them: a list is of one token for each query, however many rows there are."""
    several = {name for name in PER_PROMPT[:2] if isinstance(plain(options.get(name)), list | tuple)}
    return {**options, **{name: [options[name]] * rows for name in several}}
