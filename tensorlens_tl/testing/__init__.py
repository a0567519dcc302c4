"""What tests of maps, hooks and methods need: tiny random models of every family, and the batteries to run on them."""

from tensorlens_tl.testing.allocations import Allocations
from tensorlens_tl.testing.map_checks import check_map
from tensorlens_tl.testing.method_checks import check_attribution, check_method
from tensorlens_tl.testing.model_checks import ModelReport, check_model
from tensorlens_tl.testing.models import model_names, tiny_model

__all__ = [
    "Allocations",
    "ModelReport",
    "check_attribution",
    "check_map",
    "check_method",
    "check_model",
    "model_names",
    "tiny_model",
]
