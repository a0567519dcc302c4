"""The public face: every name of the package, and where it comes from. `__init__.py` reads this file."""

from tensorlens_tl import (
    algebra as algebra,
    circuits as circuits,
    compress as compress,
    datasets as datasets,
    demo as demo,
    drawing as drawing,
    evaluate as evaluate,
    explorer as explorer,
    generation as generation,
    hooks as hooks,
    layerwise as layerwise,
    methods as methods,
    models as models,
    passes as passes,
    registry as registry,
    report as report,
    results as results,
    testing as testing,
    whitening as whitening,
)
from tensorlens_tl.circuits import (
    compare_models as compare_models,
)
from tensorlens_tl.classifiers import (
    load_classifier as load_classifier,
)
from tensorlens_tl.core import (
    Rule as Rule,
)
from tensorlens_tl.datasets import (
    BatchAttributor as BatchAttributor,
    attribute_dataset as attribute_dataset,
    load_results as load_results,
)
from tensorlens_tl.demo import (
    load_demo_dictionary as load_demo_dictionary,
    load_demo_model as load_demo_model,
)
from tensorlens_tl.errors import (
    ConformanceError as ConformanceError,
    FileFormatError as FileFormatError,
    FrozenModelError as FrozenModelError,
    GapWarning as GapWarning,
    InvalidInputError as InvalidInputError,
    MethodError as MethodError,
    NumericalError as NumericalError,
    RegistryError as RegistryError,
    SizeError as SizeError,
    TensorLensError as TensorLensError,
    UnsupportedModelError as UnsupportedModelError,
    UntrainedWarning as UntrainedWarning,
    WrongCallError as WrongCallError,
)
from tensorlens_tl.explorer import (
    explore as explore,
)
from tensorlens_tl.generation import (
    attribute_generation as attribute_generation,
)
from tensorlens_tl.layerwise import (
    implicit_attention as implicit_attention,
)
from tensorlens_tl.loading import (
    load as load,
)
from tensorlens_tl.methods import (
    contextualisation as contextualisation,
)
from tensorlens_tl.models import (
    FROZEN_RULES as FROZEN_RULES,
    NEXT as NEXT,
    HookedModel as HookedModel,
)
from tensorlens_tl.passes import (
    Collapse as Collapse,
    Difference as Difference,
    FrozenOperator as FrozenOperator,
    FrozenPass as FrozenPass,
    PatchEmbedding as PatchEmbedding,
    PixelScores as PixelScores,
    difference as difference,
    freeze as freeze,
    patch_embedding as patch_embedding,
    pixel_scores as pixel_scores,
)
from tensorlens_tl.registry import (
    attribute as attribute,
    get_method as get_method,
    list_layer_maps as list_layer_maps,
    list_methods as list_methods,
    list_rules as list_rules,
    register_layer_map as register_layer_map,
    register_method as register_method,
    register_rule as register_rule,
)
from tensorlens_tl.requirements import (
    Requirement as Requirement,
)
from tensorlens_tl.results import (
    Attribution as Attribution,
    ContributionGraph as ContributionGraph,
    Entry as Entry,
    Evaluation as Evaluation,
    Terms as Terms,
)

__version__: str
from tensorlens_tl.whitening import (
    unwhiten as unwhiten,
    whiten as whiten,
)
