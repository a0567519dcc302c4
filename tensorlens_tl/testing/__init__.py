"""What tests of maps, hooks and methods need: tiny random models of every family, and the batteries to run on them."""

from tensorlens_tl.testing.map_checks import check_map, map_checks
from tensorlens_tl.testing.method_checks import MethodReport, check_attribution, check_method, method_checks
from tensorlens_tl.testing.model_checks import ModelReport, check_checkpoint, check_model, held_output, model_checks
from tensorlens_tl.testing.models import encoder_decoder_names, model_names, tiny_input, tiny_model
from tensorlens_tl.testing.requirements import Allocations, Check, parametrize_with_checks
from tensorlens_tl.testing.rule_checks import check_rule, rule_checks

__all__ = [
    "Allocations",
    "Check",
    "MethodReport",
    "ModelReport",
    "check_attribution",
    "check_checkpoint",
    "check_map",
    "check_method",
    "check_model",
    "check_rule",
    "encoder_decoder_names",
    "held_output",
    "map_checks",
    "method_checks",
    "model_checks",
    "model_names",
    "parametrize_with_checks",
    "rule_checks",
    "tiny_input",
    "tiny_model",
]
