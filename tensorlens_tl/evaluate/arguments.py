"""The kinds of argument that evaluations share.

As in `tensorlens_tl.models.protocol`, the aliases tell a type checker and whoever reads a signature what may be passed;
at run time they are `Any`, because our own errors say what is wrong with an argument and what to do.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal, SupportsIndex

    from torch import Tensor

    from tensorlens_tl.passes import FrozenPass
    from tensorlens_tl.results import Attribution

    MethodFunction = Callable[[FrozenPass], Attribution | Tensor]
    """A method as a function of a pass: it gives an Attribution, or scores `[batch, key]`."""

    MethodSpec = str | tuple[str, Mapping[str, Any]] | MethodFunction
    """A method: a label of `STANDARD` or a registered name, a name with options, or a function."""

    Methods = str | Sequence[str] | Mapping[str, MethodSpec] | None
    """Names, or a mapping from labels to methods; None is an evaluation's default."""

    Names = str | Sequence[str] | None
    """Names of methods out of a fixed list; None is an evaluation's default."""

    WholeNumber = SupportsIndex
    """An integer of any kind: Python's, numpy's or torch's."""

    Share = float
    """A share, or a size as a share of another."""

    TokenIds = Tensor | Sequence[int] | Sequence[Sequence[int]]
    Mask = Tensor | Sequence[Sequence[bool]]

    PromptLength = WholeNumber | Literal["most common"] | None
    """The token length of prompts: a number, the most common, or None where all must agree."""

    PerturbationQuery = Literal["last", "cls", "mean"] | WholeNumber
    """The last or the first token, a position, or a mean over all positions."""

    Fractions = Sequence[float] | Tensor
    Metric = Literal["hs_mse", "aopc", "aopc_abs", "logit"]
    Metrics = Metric | Sequence[Metric]
    Order = Literal["descending", "ascending"]
    Hidden = Literal["unembedded", "output"]

    ReplacementName = Literal["resampled", "mask", "pad", "mean", "zero"] | str | int | None
    """What stands for a replaced token: see `tensorlens_tl.evaluate.perturbation`."""
else:
    MethodFunction = MethodSpec = Methods = Names = WholeNumber = PerturbationQuery = Any
    Share = TokenIds = Mask = PromptLength = Any
    Fractions = Metric = Metrics = Order = Hidden = ReplacementName = Any
