"""Reading a model of any class: its parts, how its blocks are put together, and how its activations are frozen.

| module | question |
| --- | --- |
| `protocol` | what must a model be able to do, and what may be passed as a query, token or range of layers? |
| `view` | what is a model made of, whatever its class: its ends, and the order of its blocks? |
| `blocks` | what is each block made of, and does it meet the needs of a frozen run or a method? |
| `sublayers` | how are attention, MLPs and experts read? |
| `mixers` | how are mixers read that replace attention, or run in parallel with it? |
| `parameters` | what weights does a module effectively have, including adapters and packing? |
| `offload` | how are weights read that are on disk or on another device? |
| `dictionaries` | how are sparse dictionaries read? |
| `layouts` | how is a block composed of its sublayers and norms? |
| `loops` | in which order are stacks called that run several times? |
| `activations` | how is an activation replaced by a linear form, and when does torch compute it in one kernel? |
| `lifecycle`, `checkpoint` | can a model be frozen, has it changed since, and which weights did its checkpoint lack? |
| `writing` | how are a model's weights replaced and restored? |
| `names` | which parts can only be recognised by their names, and why? |
"""

from tensorlens_tl.models.activations import (
    FROZEN_RULES,
    OLD_RULES as OLD_RULES,
    ONCE_ACTIVATION as ONCE_ACTIVATION,
    Activation as Activation,
    Coefficients,
    FrozenRule as FrozenRule,
    coefficients as coefficients,
    derivative as derivative,
    in_one_kernel as in_one_kernel,
    known_rule as known_rule,
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
