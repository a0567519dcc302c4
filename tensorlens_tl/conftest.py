"""Names that every docstring example can use: `tlens`, `torch`, `model`, `text` and `frozen`."""

import pytest
import torch

import tensorlens_tl as tlens

TEXT = "Return the value. Return the"


@pytest.fixture(scope="session")
def _example():
    model = tlens.load_demo_model(kind="bridge")  # available in every supported version of TransformerLens
    return {"tlens": tlens, "torch": torch, "model": model, "text": TEXT, "frozen": tlens.freeze(model, TEXT)}


@pytest.fixture(autouse=True)
def _names_of_examples(request):
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("doctest_namespace").update(request.getfixturevalue("_example"))
