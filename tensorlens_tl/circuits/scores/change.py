"""Why attention moved: which sources change an attention score, or an entry of the pattern, between two runs.

Both are linear in the difference of the stream that the layer reads, once by the query and once by the keys (for an
entry of the pattern all keys of its row): what heads give whose values are one-hot. That difference is a sum: over
components of what each writes, or, through the secants of the layers before, over tokens.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import Chain
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.algebra.secants import Offset, pull_noting
from tensorlens_tl.circuits.scores.reading import score_of, score_reading
from tensorlens_tl.circuits.scores.sources import components_before, places_of
from tensorlens_tl.circuits.stream import dot
from tensorlens_tl.passes import Difference
from tensorlens_tl.results import ScoreChange

OF = ("score", "pattern")


def score_change(
    difference: Difference, layer: int, head: int, query: Int[Tensor, "batch"], key: Int[Tensor, "batch"], by: str,
    of: str,
) -> ScoreChange:  # fmt: skip
    """The change of one score or one entry of the pattern in each prompt; see `qk_attribution`, which checks."""
    difference.view.refuse_encoder_decoder("qk_attribution of a difference")
    pos = difference.mask.shape[1]
    seed = difference.output.new_zeros(len(query), pos, pos)
    seed[torch.arange(len(query)), query, key] = 1
    routes = [Chain((route,)) for route in difference.maps.score_routes(layer, head, of)]
    names = [list(row) for row in difference.str_tokens]
    if by == "token":
        whitening = difference.maps.whitening(layer) or Chain(())
        earlier = [difference.maps.block_map(number) for number in range(layer)]
        routes = [Chain((*earlier, whitening, route)) for route in routes]
    constants: dict[str, Tensor] = {}

    def note(offset: Offset, pulled: Float[Tensor, "batch pos d"]) -> None:
        constants[offset.name] = constants.get(offset.name, 0) + (upcast(pulled) * offset.vectors).sum((-2, -1))

    pulled = [pull_noting(route, seed, note) for route in routes]
    if by == "token":
        sides = [(upcast(g) * difference.resid_pre(0)).sum(-1) for g in pulled]
    else:
        sources = components_before(difference, layer, by)
        names = [list(sources)] * len(query)
        sides = [torch.cat([dot(g, part) for part in sources.values()], dim=-1) for g in pulled]
    constants = {name: value for name, value in constants.items() if bool(value.any())}
    numbers = _numbers(difference, layer, head, query, key, of)
    result = ScoreChange(
        names=names,
        query_sources=sides[0],
        key_sources=sides[1],
        constant_names=list(constants),
        constants=torch.stack([*constants.values()], dim=-1) if constants else sides[0][:, :0],
        total=numbers[0] - numbers[1],
        by=by,
        of=of,
        reading_error=difference.maps.pattern_error(layer),
        places=places_of(difference.str_tokens, layer, head, query, key),
        provenance=difference.provenance(),
    )
    size = size_of_sum(torch.cat([*sides, result.constants], dim=-1), torch.zeros_like(result.total))
    noise = difference.rounding * (numbers[0].abs() + numbers[1].abs())
    return difference.checked(result, noise / size)


def _numbers(
    difference: Difference, layer: int, head: int, query: Int[Tensor, "batch"], key: Int[Tensor, "batch"], of: str
) -> list[Float[Tensor, "batch"]]:
    """What changes, in either run: the model's own."""
    if of == "pattern":
        prompts = torch.arange(len(query), device=query.device)
        return [upcast(run.pattern(layer)[prompts, head, query, key]) for run in difference.runs]
    readings = [score_reading(run, layer) for run in difference.runs]
    return [
        upcast(score_of(run, reading, layer, head, query, key))
        for run, reading in zip(difference.runs, readings, strict=True)
    ]
