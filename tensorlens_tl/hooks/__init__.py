"""Where TransformerLens lets us look and hold on: hook points, capture, freezing, and which hooks are on a model."""

from tensorlens_tl.hooks.additions import Passed, StreamPlace, StreamPoint, hooked_stream_points, passing
from tensorlens_tl.hooks.calls import CallChange, changed_calls
from tensorlens_tl.hooks.capture import (
    SomeLogits,
    capture,
    check_finite,
    from_cache,
    graph_of,
    keep_in,
    logits_at,
    observe,
    states_and_logits,
)
from tensorlens_tl.hooks.freeze import (
    attention_hooks,
    leave_out,
    mlp_hooks,
    patterns_take_effect,
    replace,
    whole_hooks,
)
from tensorlens_tl.hooks.inspection import (
    PlacedHook,
    foreign_hooks,
    hook_numbers,
    hooks_on,
    is_attached,
    other_hooks,
    refuse_attached,
    unembeds_by_libraries as unembeds_by_libraries,
    with_other_names,
)
from tensorlens_tl.hooks.loops import without_numbers as without_numbers
from tensorlens_tl.hooks.placing import Placing, take_off_leftovers
from tensorlens_tl.hooks.points import AttentionPoints, BlockPoints, CallPoint, Ends, ModelPoints, model_points
from tensorlens_tl.hooks.rules import BackwardRule, RuleHooks
from tensorlens_tl.hooks.running import (
    FwdHook,
    hook_points,
    hooked,
    in_this_thread,
    lock_of,
    progress_hooks,
    run,
    unheld_run,
)

__all__ = [
    "AttentionPoints",
    "BackwardRule",
    "BlockPoints",
    "CallChange",
    "CallPoint",
    "Ends",
    "FwdHook",
    "ModelPoints",
    "Passed",
    "PlacedHook",
    "Placing",
    "RuleHooks",
    "SomeLogits",
    "StreamPlace",
    "StreamPoint",
    "attention_hooks",
    "capture",
    "changed_calls",
    "check_finite",
    "foreign_hooks",
    "from_cache",
    "graph_of",
    "hook_numbers",
    "hook_points",
    "hooked",
    "hooked_stream_points",
    "hooks_on",
    "in_this_thread",
    "is_attached",
    "keep_in",
    "leave_out",
    "lock_of",
    "logits_at",
    "mlp_hooks",
    "model_points",
    "observe",
    "other_hooks",
    "passing",
    "patterns_take_effect",
    "progress_hooks",
    "refuse_attached",
    "replace",
    "run",
    "states_and_logits",
    "take_off_leftovers",
    "unheld_run",
    "whole_hooks",
    "with_other_names",
]
