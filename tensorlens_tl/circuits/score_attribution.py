"""Which source tokens make an attention score.

The score of a head is bilinear in the stream at the query and at the key. On the frozen operator that stream is a sum
of source tokens' contributions and a bias, so the score is a sum over pairs of source tokens, plus what one side's
bias makes with the other side's tokens, plus the two biases' own product.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.arguments import check_pass
from tensorlens_tl.budget import chunks
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.collapse import relative_residual
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.maps import AffineMap, Chain
from tensorlens_tl.positions import Points, Shares, in_total, pull_between
from tensorlens_tl.selection import chosen_head

if TYPE_CHECKING:
    import pandas as pd

    from tensorlens_tl.frozen import FrozenPass


@dataclass(frozen=True, eq=False)
class ScoreAttribution:
    """An attention score as a sum over pairs of source tokens.

    ``pairs + query_tokens + key_tokens + bias``, all summed, are `total` up to `residual`.

    Attributes:
        pairs: `[batch, source_q, source_k]`: source token a in the query with source token b in the key.
        query_tokens: source tokens of the query with the key's bias, `[batch, source_q]`.
        key_tokens: source tokens of the key with the query's bias, `[batch, source_k]`.
        bias: the two biases' own product, `[batch]`.
        total: the score before soft cap and mask, ALiBi left out, computed from the captured stream, `[batch]`.
        alibi: what ALiBi adds to it, or None.
        soft_cap: the cap the model puts on the score, or None.
        rotary: whether queries and keys are rotated (the distance is in the pairs then).
        reading_error: how far the softmax of all the layer's scores, so read, is from its own pattern.
    """

    pairs: Float[Tensor, "batch source_q source_k"]
    query_tokens: Float[Tensor, "batch source_q"]
    key_tokens: Float[Tensor, "batch source_k"]
    bias: Float[Tensor, "batch"]
    total: Float[Tensor, "batch"]
    alibi: Float[Tensor, "batch"] | None
    soft_cap: float | None
    rotary: bool
    reading_error: float
    tokens: list[list[str]]

    def __repr__(self) -> str:
        total = ", ".join(f"{total:.4g}" for total in self.total.tolist())
        residual = f"{float(self.residual.max()):.1e}"
        return f"ScoreAttribution(total={total}, residual={residual}, reading_error={self.reading_error:.1e})"

    @property
    def residual(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum is from holding."""
        parts = torch.cat([self.pairs.flatten(1), self.query_tokens, self.key_tokens], dim=1)
        return relative_residual(parts[:, None], self.bias[:, None], self.total[:, None])[:, 0]

    def top(self, k: int = 10, batch: int = 0) -> "pd.DataFrame":
        """The k largest pairs of one prompt, by absolute value."""
        import pandas as pd

        pairs = self.pairs[batch]
        order = pairs.abs().flatten().argsort(descending=True)[: max(k, 0)]
        query, key = (order // pairs.shape[1]).tolist(), (order % pairs.shape[1]).tolist()
        names = self.tokens[batch]
        return pd.DataFrame(
            {
                "source_q": [f"{i} {names[i]}" for i in query],
                "source_k": [f"{j} {names[j]}" for j in key],
                "score": pairs.flatten()[order].tolist(),
            }
        )


def qk_attribution(
    frozen: "FrozenPass",
    layer: Any,
    head: Any,
    query: Any = -1,
    key: Any = 0,
    *,
    activation: str = "ratio",
) -> ScoreAttribution:
    """Which pairs of source tokens make one attention score, everything before the layer included.

    Patterns, activation ratios and norm scales before the layer are frozen, and so are the scales of the layer's own
    norms, of queries and keys too.

    Args:
        frozen: the pass.
        layer, head: which head (with grouped-query attention a query head).
        query, key: positions, counted over each prompt's real tokens.
        activation: the rule for the MLPs before.

    Raises:
        InvalidInputError: no such layer, head or position.
        UnsupportedModelError: the layer's scores cannot be read.
    """
    check_pass(frozen)
    layer, head = chosen_head(frozen.view, layer, head)
    positions = {}
    for name, position in (("query", query), ("key", key)):
        if position is None:
            raise InvalidInputError(f"{name}=None: a score has one query and one key; pass integers.")
        positions[name] = query_positions(frozen.mask, position)[:, 0]
    frozen.check_fresh()
    reading = score_reading(frozen, layer)
    earlier = tuple(frozen.block(number, activation=activation) for number in range(layer))
    x0, x = frozen.resid_pre(0), frozen.resid_pre(layer)
    d_head = reading.query(x).shape[-1] // reading.heads
    bytes_per_row = frozen.operator().row_bytes

    def side(read: Chain, own_head: int, heads: int, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This head's query or key at one position per prompt: by source token, its bias, and itself."""
        own = slice(own_head * d_head, (own_head + 1) * d_head)
        whole: AffineMap = Chain((*earlier, *read.stages))
        R = torch.eye(d_head).to(x).expand(len(at), -1, -1) if reading.rotation is None else reading.rotation[at]
        shares, constants = [], []
        for rows in chunks(d_head, bytes_per_row, None, "score"):
            basis = x.new_zeros(len(rows), len(at), heads * d_head)
            # row c, pulled back, gives channel c of the rotated vector
            basis[:, :, own] = R[..., rows.start : rows.stop].permute(2, 0, 1)
            biases = Shares()
            reached = pull_between(
                whole, basis, Points(at[None]), None, x.shape[1], causal=frozen.causal, biases=biases
            )
            share = x0.new_zeros(len(rows), *x0.shape[:2])
            share[:, :, : reached.shape[2]] = (reached * x0[:, : reached.shape[2]]).sum(-1)
            shares.append(share)
            constants.append(in_total(biases, x0.new_zeros(len(rows), len(at))))
        vector = torch.take_along_dim(read(x), at[:, None, None], dim=1)[:, 0, own]
        return torch.cat(shares), torch.cat(constants), torch.einsum("bd,bde->be", vector, R)

    q, q_bias, q_own = side(reading.query, head, reading.heads, positions["query"])
    k, k_bias, k_own = side(
        reading.key, head // (reading.heads // reading.kv_heads), reading.kv_heads, positions["key"]
    )
    scale = reading.scale
    alibi = None if reading.alibi is None else reading.alibi[head][positions["query"], positions["key"]]
    return ScoreAttribution(
        pairs=scale * torch.einsum("cbi,cbj->bij", q, k),
        query_tokens=scale * torch.einsum("cbi,cb->bi", q, k_bias),
        key_tokens=scale * torch.einsum("cb,cbj->bj", q_bias, k),
        bias=scale * (q_bias * k_bias).sum(0),
        total=scale * (q_own * k_own).sum(-1),
        alibi=alibi,
        soft_cap=reading.soft_cap,
        rotary=reading.rotation is not None,
        reading_error=reading.error,
        tokens=frozen.str_tokens,
    )
