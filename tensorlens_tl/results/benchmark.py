"""Circuits in the JSON of the Mechanistic Interpretability Benchmark (Mueller et al. 2025).

An object with `cfg`, `nodes` (name → ``{"in_graph": …}``) and `edges` (name → ``{"score": …, "in_graph": …}``); nodes
are called ``input``, ``a0.h1``, ``m0``, ``logits``, edges ``a0.h1->m0`` or, into a head, ``input->a0.h1<q>``.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import torch

from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.results.edge_names import ARROW, TARGET, place
from tensorlens_tl.results.storage import GZIP_FILE, JSON_FILE, other_kind

Circuit = Any
"""A `Circuit`, whose module imports this one."""

EXPORTED = {
    frozenset(["graph", "nodes", "links"]): "networkx' node-link form, which export() writes for other tools",
    frozenset(["metadata", "nodes", "links"]): "circuit-tracer's JSON, which export() writes for other tools",
}
"""What a JSON file is that has these names."""

OF_ENDING = {".graphml": "GraphML, which networkx.read_graphml reads"}
"""What kind of XML it is."""

BENCHMARK_NAMES = {"embed": "input", TARGET: "logits"}


def benchmark_json(circuit: Circuit) -> str:
    """A circuit as the benchmark writes it; a score that is NaN is null.

    Raises:
        InvalidInputError: an infinite score, or a node that the benchmark has no name for.
    """
    sources = [_benchmark_name(name) for name in circuit.sources]
    destinations = [_benchmark_name(name) for name in circuit.destinations]
    used = set(circuit.nodes)
    nodes = {
        benchmark_name: {"in_graph": name in used}
        for benchmark_name, name in zip(sources, circuit.sources, strict=True)
    }
    if bool(circuit.scores[circuit.exists].isinf().any()):
        raise InvalidInputError("save: some scores are infinite, which JSON has no number for.")
    scores = circuit.scores.tolist()
    selection = circuit.selection.tolist()
    edges = {
        f"{sources[s]}->{destinations[d]}": {
            "score": scores[s][d],
            "in_graph": selection[s][d],
        }
        for s, d in circuit.exists.nonzero().tolist()
    }
    for edge in edges.values():
        if isnan(edge["score"]):
            edge["score"] = None
    content = {"cfg": circuit.config, "nodes": nodes | {"logits": {"in_graph": True}}, "edges": edges}
    facts = {"target": circuit.target, "method": circuit.method, "provenance": circuit.provenance}
    content |= {name: fact for name, fact in facts.items() if fact}  # the benchmark reads past them
    return json.dumps(content, allow_nan=False)


def read_benchmark(path: str | os.PathLike[str], kind: type[Any]) -> Any:
    """The `Circuit` in such a file, ours or the benchmark's; `kind` is that class.

    Raises:
        FileFormatError: no such JSON, or one without all edges of its nodes, those outside the circuit as well.
        OSError: there is no such file.
    """
    content = _content(Path(path))
    try:
        config = dict(content["cfg"])
        edges = dict(content["edges"])
        facts = {name: content[name] for name in ("target", "method", "provenance") if name in content}
        sources = ["embed", *(_library_name(n) for n in content["nodes"] if n not in ("input", "logits"))]
        pairs = [tuple(map(_library_name, name.split("->"))) for name in edges]
        destinations = sorted({end for _, end in pairs}, key=place)
        sources.sort(key=place)
        exists = torch.zeros(len(sources), len(destinations), dtype=torch.bool)
        selection = exists.clone()
        scores = torch.zeros(exists.shape, dtype=torch.float64)
        for (source, destination), edge in zip(pairs, edges.values(), strict=True):
            pair = sources.index(source), destinations.index(destination)
            exists[pair] = True
            selection[pair] = _truth(edge["in_graph"], "in_graph")
            scores[pair] = _score(edge["score"])
        parallel = "parallel_attn_mlp" in config and _truth(config["parallel_attn_mlp"], "parallel_attn_mlp")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileFormatError(_unreadable(path, error)) from error
    _check_all_edges(path, sources, pairs, parallel)
    edges_of_model = {"scores": scores, "exists": exists, "selection": selection}
    try:
        return kind(sources=sources, destinations=destinations, **edges_of_model, config=config, **facts)
    except InvalidInputError as error:
        raise FileFormatError(_unreadable(path, error)) from error


def _content(path: Path) -> Any:
    """The JSON in a file that is not plainly of another kind, such as what `export` writes for other tools.

    Raises:
        FileFormatError: it is of another kind, or no JSON.
        OSError: there is no such file.
    """
    written = path.read_bytes()
    kind = other_kind(written, path)
    if kind == GZIP_FILE:
        try:
            written = gzip.decompress(written)
        except (OSError, EOFError, zlib.error) as error:
            raise FileFormatError(_unreadable(path, error)) from error
        kind = other_kind(written, path)
    if kind not in ("", JSON_FILE):
        raise FileFormatError(_of_another_kind(path, OF_ENDING.get(path.suffix.lower(), kind)))
    try:
        content = json.loads(written.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(_unreadable(path, error)) from error
    for names, exported in EXPORTED.items():
        if isinstance(content, dict) and names <= set(content):
            raise FileFormatError(_of_another_kind(path, exported))
    return content


def _of_another_kind(path: Path, kind: str) -> str:
    return (
        f"{path}: {kind}, not a circuit in the benchmark's JSON. Load what save() wrote with a name that ends in "
        ".json or .json.gz, or in nothing."
    )


def _unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    return (
        f"{path}: not a circuit in the benchmark's JSON ({type(error).__name__}: {error}). Circuit.load reads what "
        "Circuit.save wrote, and the benchmark's own files."
    )


def _truth(value: Any, name: str) -> bool:
    """JSON's true or false.

    Raises:
        TypeError: anything else; the text "false" would count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f'"{name}" is {value!r}, not true or false')
    return value


def _score(value: Any) -> float:
    """A finite number, or NaN for null.

    Raises:
        TypeError: no number.
        ValueError: one that is not finite, such as 1e999.
    """
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'"score" is {value!r}, not a number or null')
    if not isfinite(value):
        raise ValueError(f'"score" is {value!r}, which no JSON holds')
    return float(value)


def _check_all_edges(
    path: str | os.PathLike[str], sources: Sequence[str], pairs: Sequence[tuple[str, ...]], parallel: bool
) -> None:
    """Refuse a file whose edges are not those of its nodes: every node to whatever comes later.

    Raises:
        FileFormatError: some are missing, or some lead backwards.
    """
    ends = [TARGET]
    for name in sources[1:]:
        if name.startswith("MLP"):
            ends.append(name)
        else:
            ends += [f"{name}.{letter}" for letter in "qkv"]

    def step(name: str) -> tuple[int, int]:
        layer, mlp, *_ = place(name)
        if parallel:
            return layer, 0
        return layer, mlp

    expected = {(source, end) for end in ends for source in sources if step(source) < step(end)}
    if missing := expected - set(pairs):
        some = ARROW.join(min(missing))
        raise FileFormatError(
            f"{path}: {len(missing)} of the {len(expected)} edges between its nodes are missing, such as {some!r}. A "
            'circuit\'s file lists every edge of the model, those outside the circuit with "in_graph": false.'
        )
    if wrong := set(pairs) - expected:
        raise FileFormatError(
            f"{path}: {ARROW.join(min(wrong))!r} is no edge: what it leads from does not come before what it leads to."
        )


def _benchmark_name(name: str) -> str:
    """``"L0H3.q"`` as ``"a0.h3<q>"``, ``"MLP1"`` as ``"m1"``, the first block's input as ``"input"``."""
    if name in BENCHMARK_NAMES:
        return BENCHMARK_NAMES[name]
    head = re.fullmatch(r"L(\d+)H(\d+)(?:\.([qkv]))?", name)
    mlp = re.fullmatch(r"MLP(\d+)", name)
    if mlp is not None:
        return f"m{mlp[1]}"
    if head is None:
        raise InvalidInputError(
            f"save: the benchmark's files have heads and MLPs of one stack only, and no name for {name!r}. Save as "
            ".html, .graphml or .csv, or keep the EdgeScores."
        )
    node = f"a{head[1]}.h{head[2]}"
    if head[3]:
        return f"{node}<{head[3]}>"
    return node


def _library_name(name: str) -> str:
    """The library's name of one of the benchmark's nodes: the inverse of `_benchmark_name`.

    Raises:
        ValueError: no such name.
    """
    for library_name, benchmark_name in BENCHMARK_NAMES.items():
        if name == benchmark_name:
            return library_name
    match = re.fullmatch(r"a(\d+)\.h(\d+)(?:<([qkv])>)?|m(\d+)", name)
    if match is None:
        raise ValueError(f"no node {name!r}")
    layer, head, letter, mlp = match.groups()
    if mlp is not None:
        return f"MLP{mlp}"
    return ".".join(filter(None, [f"L{layer}H{head}", letter]))
