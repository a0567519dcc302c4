"""Why attention moved: which sources change an attention score, or an entry of the pattern, between two runs.

Both are linear in the difference of the stream that the layer reads, once by the query and once by the keys (for an
entry of the pattern all keys of its row): what heads give whose values are one-hot. That difference is a sum: over
components of what each writes, or, through the secants of the layers before, over tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Chain
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.algebra.secants import Offset, pull_noting
from tensorlens_tl.circuits.scores.place import ScorePlace
from tensorlens_tl.circuits.scores.reading import score_of, score_reading
from tensorlens_tl.circuits.scores.sources import components_before, maps_before
from tensorlens_tl.circuits.stream import dot
from tensorlens_tl.passes import Difference
from tensorlens_tl.results import ScoreChange

OF = ("score", "pattern")


def score_change(difference: Difference, place: ScorePlace, by: str, of: str) -> ScoreChange:
    """The change of one score or one entry of the pattern in each prompt; see `qk_attribution`, which checks."""
    batch, pos = difference.mask.shape
    start, stop = place.keys
    seed = difference.output.new_zeros(batch, pos, stop - start)
    seed[torch.arange(batch), place.query, place.key - start] = 1
    routes = [Chain((r,)) for r in difference.maps.score_routes(place.layer, place.head, of, cross=place.cross)]
    names = [list(row) for row in difference.str_tokens]
    if by == "token":
        before = maps_before(difference, place)
        routes = [Chain((*before.stages, route)) for route in routes]
    constants: dict[str, Tensor] = {}

    def note(offset: Offset, pulled: Float[Tensor, "batch pos d"]) -> None:
        constants[offset.name] = constants.get(offset.name, 0) + (upcast(pulled) * offset.vectors).sum((-2, -1))

    pulled = [pull_noting(route, seed, note) for route in routes]
    if by == "token":
        sides = [(upcast(g) * difference.resid_pre(0)).sum(-1) for g in pulled]
    else:
        sources = components_before(difference, place, by)
        names = [list(sources)] * batch
        sides = [torch.cat([dot(g, part) for part in sources.values()], dim=-1) for g in pulled]
    constants = {name: value for name, value in constants.items() if bool(value.any())}
    numbers = _numbers(difference, place, of)
    result = ScoreChange(
        names=names,
        query_sources=sides[0],
        key_sources=sides[1],
        constant_names=list(constants),
        constants=torch.stack([*constants.values()], dim=-1) if constants else sides[0][:, :0],
        total=numbers[0] - numbers[1],
        by=by,
        of=of,
        reading_error=difference.maps.pattern_error(place.layer),
        places=place.words(difference.str_tokens),
        provenance=difference.provenance(),
    )
    size = size_of_sum(torch.cat([*sides, result.constants], dim=-1), torch.zeros_like(result.total))
    noise = difference.rounding * (numbers[0].abs() + numbers[1].abs())
    return difference.checked(result, noise / size)


def _numbers(difference: Difference, place: ScorePlace, of: str) -> list[Float[Tensor, "batch"]]:
    """What changes, in either run: the model's own."""
    if of == "pattern":
        _, key = place.inside
        return [upcast(place.pattern_row(run)).gather(1, key[:, None])[:, 0] for run in difference.runs]
    readings = [score_reading(run, place.layer, cross=place.cross) for run in difference.runs]
    return [upcast(score_of(run, reading, place)) for run, reading in zip(difference.runs, readings, strict=True)]
