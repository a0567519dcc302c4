"""Tables of results: what their columns are called, and the long one of an Attribution."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tensorlens_tl.results.targets import OF_GENERATED, query_texts, target_texts
from tensorlens_tl.results.views import AXES, Shown

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Mapping[str, str] = {
    "id": "of a data set: the name of the row",
    "row": "of a data set: its number",
    "batch": "the prompt, counted from 0",
    "query": "the position that is explained, padding counted",
    "query_token": "its token; of generated text, the token or the stretch that is explained",
    "query_side": "of an encoder–decoder: the side of the query",
    "key": "the position of the source token, padding counted; empty where a row is about no token",
    "key_token": "its token",
    "key_side": "of an encoder–decoder: its side",
    "head": "the number of a head, where an attribution has an axis of heads",
    "kind": "`token`, `bias`, `total`, `left out` (tokens that `without` leaves out, together), or `rest`: all tokens "
    'that a data set did not store (`keep="top:N"`)',
    "generated": "whether the model wrote the source token",
    "target": "what is explained, in words; for head scores, what is attended to",
    "term": "the name of a part: a head, an MLP, a path, a feature",
    "feature": "a feature of a dictionary",
    "label": "of a feature: what it is called",
    "rank": "of an example: its place among the feature's largest, counted from 0",
    "position": "of an active feature: the position of the token in its prompt or row, padding counted",
    "token": "that token",
    "activation": "how active the feature is there",
    "is_peak": "whether the example was chosen for this token",
    "layer": "a layer",
    "route": "by which route a change passes the layer",
    "source": "where an edge begins, or the part that is read",
    "destination": "where an edge ends",
    "side": "`query` or `key`, whose part it is",
    "query_source": "of an attention score: the part of the query",
    "key_source": "the part of the key",
    "n": "of a mean: over how many prompts it is",
    "low": "of a mean: the lower end of its interval",
    "high": "the upper end",
    "score": "the number",
    "weight": "the weight of an edge of a graph",
    "source_pos": "of a graph: the position of the node where an edge begins",
    "source_token": "its token",
    "destination_pos": "the position of the node where the edge ends",
    "destination_token": "its token",
    "reads": "what the edge is read by",
    "metric": "of an evaluation: what is measured",
    "method": "the method that the numbers are of; of an evaluation, the one that is measured",
    "unit": "the prompt that it is measured on",
    "value": "the measured number",
}
"""The columns of every result's `to_dataframe`; an evaluation's axis and a program's own numbers come besides."""


def long_frame(result: Shown) -> "pd.DataFrame":
    """One line per prompt, query and source token, and where a result has them one for each bias and total.

    Lines of all other kinds sum to that of the kind ``"total"`` where the result is additive.
    """
    import pandas as pd

    tokens = _token_lines(result)
    numbers = {"left out": left_out_sums(result), "bias": result.bias, "total": result.total}
    sums = [_lines_of_queries(result, kind, values) for kind, values in numbers.items() if values is not None]
    frame = pd.concat([tokens, *sums], ignore_index=True)
    frame = frame.sort_values(["batch", "row"], kind="stable", ignore_index=True).drop(columns="row")
    numbers = ["key", *[axis for axis in result.axes if axis not in AXES]]
    frame = frame.astype(dict.fromkeys(numbers, "Int64"))
    sides = ["query_side", "key_side"] if result.sides is not None else []
    frame["method"] = result.method
    return frame[[*result.axes, "query_token", "key_token", *sides, "kind", "generated", "method", "target", "score"]]


def _token_lines(result: Shown) -> "pd.DataFrame":
    import pandas as pd

    index = np.indices(tuple(result.scores.shape)).reshape(result.scores.ndim, -1)
    frame = pd.DataFrame({name: index[axis] for axis, name in enumerate(result.axes)})
    frame["row"] = frame["query"]
    frame["score"] = _numbers(result.scores)
    frame["kind"] = "token"
    listed = np.zeros(tuple(result.mask.shape), dtype=bool)
    for number in range(len(listed)):
        listed[number, result.listed(number)] = True
    frame = frame.loc[listed[frame["batch"], frame["key"]]]
    batch, key = (frame[name].to_list() for name in ("batch", "key"))
    frame["key_token"] = [result.tokens[b][k] for b, k in zip(batch, key, strict=True)]
    ranges: Sequence[Sequence[int]] = result.options.get(OF_GENERATED[0], [(0, 0)] * len(result.tokens))
    frame["generated"] = [ranges[b][0] <= k < ranges[b][1] for b, k in zip(batch, key, strict=True)]
    if result.sides is not None:
        frame["key_side"] = [result.sides[b][k] for b, k in zip(batch, key, strict=True)]
    return _with_queries(result, frame)


def left_out_sums(result: Shown) -> Tensor | None:
    """What the tokens that are left out give to each query, `[batch, query]`; None where there are none."""
    if not result.left_out or result.axes != AXES:
        return None
    rows = zip(result.scores, result.left_out, strict=True)
    return torch.stack([scores[:, positions].sum(-1) for scores, positions in rows])


def _lines_of_queries(result: Shown, kind: str, values: Tensor) -> "pd.DataFrame":
    """One line per query, of a number that belongs to no single token."""
    import pandas as pd

    batch, row = np.indices(tuple(result.queries.shape)).reshape(2, -1)
    frame = pd.DataFrame({"batch": batch, "row": row, "score": _numbers(values), "kind": kind})
    frame["key_token"] = ""
    frame["generated"] = False
    if result.sides is not None:
        frame["key_side"] = ""
    return _with_queries(result, frame)


def _with_queries(result: Shown, frame: "pd.DataFrame") -> "pd.DataFrame":
    """Lines of real queries, with position, token and target of each."""
    batch, row = (frame[name].to_numpy() for name in ("batch", "row"))
    positions = result.queries.cpu().numpy()[batch, row]
    frame = frame.assign(query=positions)
    texts = [query_texts(result, number) for number in range(len(result.tokens))]
    targets = [target_texts(result, number) for number in range(len(result.tokens))]
    frame["query_token"] = [texts[b][r] for b, r in zip(batch, row, strict=True)]
    frame["target"] = [targets[b][r] for b, r in zip(batch, row, strict=True)]
    if result.sides is not None:
        frame["query_side"] = [result.sides[b][q] for b, q in zip(batch, positions, strict=True)]
    return frame.loc[result.mask.cpu().numpy()[batch, positions]]


def _numbers(values: Tensor) -> np.ndarray:
    return values.detach().to(torch.float64).cpu().reshape(-1).numpy()
