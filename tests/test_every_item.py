"""The checker of `make test-shapes` refuses an item that differs, wherever it stands: beartype looks at one of them."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from every_item import checked
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

LONG = torch.zeros(2, 5)
SHORT = torch.zeros(2, 3)


@jaxtyped(typechecker=checked)
def of_alike(
    rows: Sequence[Float[Tensor, "batch pos"] | None] = (),
    by_name: Mapping[str, tuple[str, Float[Tensor, "batch pos"]]] | None = None,
    result: object = None,
) -> list[Float[Tensor, "batch pos"]]:
    return [LONG, *([] if result is None else [result])]


@jaxtyped(typechecker=checked)
def of_any_length(rows: Sequence[Float[Tensor, "batch _pos"]]) -> None:
    return None


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": [LONG] * 20 + [SHORT]},
        {"rows": [LONG, None, SHORT]},
        {"by_name": {str(n): ("long", LONG) for n in range(20)} | {"last": ("short", SHORT)}},
        {"result": SHORT},
    ],
)
def test_one_item_that_differs_is_refused(arguments):
    with pytest.raises(TypeCheckError):
        of_alike(**arguments)


def test_items_alike_pass():
    assert len(of_alike([LONG, None, LONG], {"long": ("long", LONG)}, LONG)) == 2
    of_any_length([LONG, SHORT])
