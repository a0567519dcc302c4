"""What tests of maps, hooks and methods need: tiny random models of every family, and the battery to run on them."""

from tensorlens_tl.testing.allocations import Allocations
from tensorlens_tl.testing.battery import check_attribution, check_method
from tensorlens_tl.testing.models import model_names, tiny_model

__all__ = ["Allocations", "check_attribution", "check_method", "model_names", "tiny_model"]
