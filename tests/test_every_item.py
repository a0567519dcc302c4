"""The checker of `make test-shapes` refuses an item that differs, wherever it stands: beartype looks at one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from every_item import checked, jaxtyped_for_arrays
from jaxtyping import Float, jaxtyped
from torch import Tensor

LONG = torch.zeros(2, 5)
SHORT = torch.zeros(2, 3)
REFUSALS = (TypeError, BeartypeCallHintViolation)
"""jaxtyping's own, or the checker's."""


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
    with pytest.raises(REFUSALS):
        of_alike(**arguments)


def test_items_alike_pass():
    assert len(of_alike([LONG, None, LONG], {"long": ("long", LONG)}, LONG)) == 2
    of_any_length([LONG, SHORT])


# ------------------------------------------------------------------ functions with arrays, and those without


@jaxtyped_for_arrays(typechecker=checked)
def without(count: int, name: str = "") -> list[int | str]:
    return [count, name] if name else [count]


def test_a_function_without_arrays_is_checked_all_the_same():
    assert without(1) == [1]
    with pytest.raises(BeartypeCallHintViolation):
        without("1")
    with pytest.raises(BeartypeCallHintViolation):
        without(1, name=2)


def in_a_union(x: int | Float[Tensor, "pos"], y: Float[Tensor, "pos"] | None) -> None: ...
def in_text(x: "Float[Tensor, 'pos']", y: Float[Tensor, "pos"] | None) -> None: ...
def in_a_container(x: list[Float[Tensor, "pos"]], y: "Float[Tensor, 'pos']") -> None: ...
def in_a_callable(x: Callable[[int], Float[Tensor, "pos"]], y: object) -> None: ...
def only_returned(x: object, y: object) -> Float[Tensor, "2"]:
    return x


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (in_a_union, LONG[0]),
        (in_text, LONG[0]),
        (in_a_container, [LONG[0]]),
        (in_a_callable, 1),
        (only_returned, LONG[0]),
    ],
)
def test_axes_have_one_size_wherever_arrays_stand(function, x):
    with pytest.raises(REFUSALS):
        jaxtyped_for_arrays(function, typechecker=checked)(x, SHORT[0])


def test_fields_of_a_dataclass_are_checked():
    @jaxtyped_for_arrays(typechecker=checked)
    @dataclass
    class Pair:
        x: Float[Tensor, "pos"]
        y: Float[Tensor, "pos"]

    Pair(LONG[0], LONG[1])
    with pytest.raises(REFUSALS):
        Pair(LONG[0], SHORT[0])


def test_of_functions_inside_another_the_first_is_checked():
    def outer():
        @jaxtyped_for_arrays(typechecker=checked)
        def inner(count: int) -> None: ...

        return inner

    with pytest.raises(BeartypeCallHintViolation):
        outer()("1")
    assert "beartype" not in outer().__code__.co_filename
