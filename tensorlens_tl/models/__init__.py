"""One reading of any model: what it is made of, how its blocks are put together, what its activations do.

| module | question |
| --- | --- |
| `protocol` | what must a model be able to do, and what may be passed as a query, a token, a range of layers? |
| `view` | what is this model made of, whichever its class: its ends, and how its blocks follow each other? |
| `blocks` | what is each of its blocks made of, and is it what a frozen run or a method needs? |
| `sublayers` | how is each kind of part read: attention, MLPs, experts? |
| `mixers` | and what stands in the place of attention or beside it? |
| `parameters` | what do a module's weights amount to, adapters and packing included? |
| `offload` | how are weights read that lie on a disk or elsewhere? |
| `dictionaries` | how are sparse dictionaries read? |
| `layouts` | how are blocks put together? |
| `loops` | which call of a stack follows which, where stacks run several times each? |
| `activations` | how is an activation replaced by a linear form, and which does torch compute at once? |
| `lifecycle`, `checkpoint` | is a model in a state to be frozen, and still in that of its pass; which weights had it? |
| `writing` | how are other weights put on a model, and taken off again? |
| `names` | which parts are known by their names alone, and why? |
"""

from tensorlens_tl.models.activations import (
    FROZEN_RULES,
    OLD_RULES as OLD_RULES,
    ONCE_ACTIVATION as ONCE_ACTIVATION,
    Activation as Activation,
    Coefficients,
    FrozenRule as FrozenRule,
    check_rule as check_rule,
    coefficients as coefficients,
    derivative as derivative,
    in_one_kernel as in_one_kernel,
)
from tensorlens_tl.models.blocks import (
    BlockView,
    require_attention_alone as require_attention_alone,
    require_one_stream as require_one_stream,
    require_scaled_weights as require_scaled_weights,
)
from tensorlens_tl.models.checkpoint import (
    Classes as Classes,
    ClassScores as ClassScores,
    classes_of as classes_of,
    name_classes as name_classes,
)
from tensorlens_tl.models.dictionaries import DictionaryWeights as DictionaryWeights, read_dictionary as read_dictionary
from tensorlens_tl.models.layouts import (
    LAYOUTS,
    Layout,
    Place,
    Within as Within,
    candidates as candidates,
    compose as compose,
)
from tensorlens_tl.models.loops import (
    FAST as FAST,
    SLOW as SLOW,
    Loop as Loop,
    call_counts as call_counts,
    is_looped as is_looped,
)
from tensorlens_tl.models.mixers import mixer_map, scan_of
from tensorlens_tl.models.protocol import (
    FIRST_CHOICE,
    NEXT,
    RUNNER_UP,
    Direction as Direction,
    HeadChoice as HeadChoice,
    HookedModel,
    LayerRange as LayerRange,
    MlpChoice as MlpChoice,
    ModelLike as ModelLike,
    Query as Query,
    Relative as Relative,
    TokenLike as TokenLike,
)
from tensorlens_tl.models.view import ModelView, PatchWeights as PatchWeights

__all__ = [
    "FIRST_CHOICE",
    "FROZEN_RULES",
    "LAYOUTS",
    "NEXT",
    "RUNNER_UP",
    "BlockView",
    "Coefficients",
    "HookedModel",
    "Layout",
    "ModelView",
    "Place",
    "mixer_map",
    "scan_of",
]
