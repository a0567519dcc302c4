"""The public face: every name of the package, and where it comes from. `__init__.py` reads this file."""

from tensorlens_tl import (
    algebra as algebra,
)
from tensorlens_tl import (
    circuits as circuits,
)
from tensorlens_tl import (
    demo as demo,
)
from tensorlens_tl import (
    drawing as drawing,
)
from tensorlens_tl import (
    evaluate as evaluate,
)
from tensorlens_tl import (
    hooks as hooks,
)
from tensorlens_tl import (
    layerwise as layerwise,
)
from tensorlens_tl import (
    methods as methods,
)
from tensorlens_tl import (
    models as models,
)
from tensorlens_tl import (
    passes as passes,
)
from tensorlens_tl import (
    registry as registry,
)
from tensorlens_tl import (
    report as report,
)
from tensorlens_tl import (
    results as results,
)
from tensorlens_tl import (
    testing as testing,
)
from tensorlens_tl.algebra import (
    AffineMap as AffineMap,
)
from tensorlens_tl.algebra import (
    Attention as Attention,
)
from tensorlens_tl.algebra import (
    Chain as Chain,
)
from tensorlens_tl.algebra import (
    Diagonal as Diagonal,
)
from tensorlens_tl.algebra import (
    Identity as Identity,
)
from tensorlens_tl.algebra import (
    Linear as Linear,
)
from tensorlens_tl.algebra import (
    MixingMap as MixingMap,
)
from tensorlens_tl.algebra import (
    Norm as Norm,
)
from tensorlens_tl.algebra import (
    PositionwiseMap as PositionwiseMap,
)
from tensorlens_tl.algebra import (
    Sum as Sum,
)
from tensorlens_tl.algebra import (
    Transpose as Transpose,
)
from tensorlens_tl.demo import (
    load_demo_model as load_demo_model,
)
from tensorlens_tl.errors import (
    ConformanceError as ConformanceError,
)
from tensorlens_tl.errors import (
    FileFormatError as FileFormatError,
)
from tensorlens_tl.errors import (
    FrozenModelError as FrozenModelError,
)
from tensorlens_tl.errors import (
    InvalidInputError as InvalidInputError,
)
from tensorlens_tl.errors import (
    NumericalError as NumericalError,
)
from tensorlens_tl.errors import (
    RegistryError as RegistryError,
)
from tensorlens_tl.errors import (
    SizeError as SizeError,
)
from tensorlens_tl.errors import (
    TensorLensError as TensorLensError,
)
from tensorlens_tl.errors import (
    UnsupportedModelError as UnsupportedModelError,
)
from tensorlens_tl.methods import (
    contextualisation as contextualisation,
)
from tensorlens_tl.models import (
    RULES as RULES,
)
from tensorlens_tl.models import (
    HookedModel as HookedModel,
)
from tensorlens_tl.passes import (
    Collapse as Collapse,
)
from tensorlens_tl.passes import (
    FrozenOperator as FrozenOperator,
)
from tensorlens_tl.passes import (
    FrozenPass as FrozenPass,
)
from tensorlens_tl.passes import (
    freeze as freeze,
)
from tensorlens_tl.registry import (
    attribute as attribute,
)
from tensorlens_tl.registry import (
    get_method as get_method,
)
from tensorlens_tl.registry import (
    list_layer_maps as list_layer_maps,
)
from tensorlens_tl.registry import (
    list_methods as list_methods,
)
from tensorlens_tl.registry import (
    register_layer_map as register_layer_map,
)
from tensorlens_tl.registry import (
    register_method as register_method,
)
from tensorlens_tl.results import (
    Attribution as Attribution,
)
from tensorlens_tl.results import (
    ContributionGraph as ContributionGraph,
)
from tensorlens_tl.results import (
    Entry as Entry,
)
from tensorlens_tl.results import (
    Evaluation as Evaluation,
)
from tensorlens_tl.results import (
    Terms as Terms,
)

__version__: str
