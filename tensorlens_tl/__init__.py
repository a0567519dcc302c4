"""tensorlens_tl: frozen passes, exact operators and attribution methods for TransformerLens.

>>> import tensorlens_tl as tlens
>>> model = tlens.load_demo_model()
>>> attribution = tlens.attribute(model, "Return the value. Return the", collapse="in_out")
>>> bool(attribution.residual.max() < 1e-4)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from tensorlens_tl import circuits, contextualisation, evaluate, methods, report
from tensorlens_tl.activation import RULES
from tensorlens_tl.attribution import Attribution, TokenScore
from tensorlens_tl.collapse import Collapse
from tensorlens_tl.demo import load_demo_model
from tensorlens_tl.errors import (
    ConformanceError,
    FileFormatError,
    FrozenModelError,
    InvalidInputError,
    NumericalError,
    RegistryError,
    SizeError,
    TensorLensError,
    UnsupportedModelError,
)
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.maps import AffineMap, Attention, Chain, Diagonal, Identity, Linear, Norm, Sum, Transpose
from tensorlens_tl.operator import FrozenOperator
from tensorlens_tl.registry import attribute, get_method, list_methods, register_method

if TYPE_CHECKING:
    from tensorlens_tl import testing

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "AffineMap",
    "Attention",
    "Attribution",
    "Chain",
    "Collapse",
    "ConformanceError",
    "Diagonal",
    "FileFormatError",
    "FrozenModelError",
    "FrozenOperator",
    "FrozenPass",
    "Identity",
    "InvalidInputError",
    "Linear",
    "Norm",
    "NumericalError",
    "RegistryError",
    "SizeError",
    "Sum",
    "TensorLensError",
    "TokenScore",
    "Transpose",
    "UnsupportedModelError",
    "attribute",
    "circuits",
    "contextualisation",
    "evaluate",
    "freeze",
    "get_method",
    "list_methods",
    "load_demo_model",
    "methods",
    "register_method",
    "report",
    "testing",
]


def __getattr__(name: str) -> Any:
    """`testing` brings model classes with it: it is imported when somebody asks for it."""
    if name == "testing":
        return importlib.import_module("tensorlens_tl.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
