"""What tests of maps, hooks and methods need: tiny random models of every supported class and family."""

from tensorlens_tl.testing.models import model_names, tiny_model

__all__ = ["model_names", "tiny_model"]
