"""What methods and circuits cost: sections of `RESULTS.md`."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from browser import CLICK, SLIDE, chromium
from page import Lines, row, table
from shapes import Shape, bert_base, bundled, gpt2_small
from timing import THREADS, interleaved

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import Allocations


def methods() -> Lines:
    """## Methods at BERT-base size, 64 tokens, freezing and proof included

    Times are in forward passes of the plain encoder in the same run. The peak counts the tensors allocated beyond the
    model's own.
    """
    torch.set_num_threads(THREADS[-1])
    shape = bert_base()
    ids = shape.tokens(64)
    calls = {
        "GlobEnc": lambda: tlens.attribute(shape.model, ids, method="globenc"),
        "ALTI": lambda: tlens.attribute(shape.model, ids, method="alti"),
        "ALTI-Logit": lambda: tlens.attribute(shape.model, ids, method="alti-logit", target=5),
        "Information flow routes": lambda: tlens.attribute(shape.model, ids, method="ifr"),
        "DecompX vectors": lambda: tlens.attribute(shape.model, ids, method="decompx", aggregate="vector"),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, rounds=3)
    yield table("method", "forwards", "seconds", "peak, MB")
    for name, call in calls.items():
        with Allocations() as memory:
            call()
        yield row(name, seconds[name] / seconds["forward"], seconds[name], f"{memory.peak / 1e6:.0f}")


def perturbing() -> Lines:
    """## Methods that run the live model, 64 tokens, one thread

    Times are in forward passes through the plain blocks in the same run, with the pass already frozen; "÷ token"
    divides them by the number of tokens.
    """
    torch.set_num_threads(1)
    yield table("shape", "method", "forwards", "÷ token", "seconds", "peak, MB")
    for shape in (bert_base(), gpt2_small()):
        ids = shape.tokens(64)
        frozen = tlens.freeze(shape.model, ids)
        asked: dict[str, dict[str, Any]] = {"value-zeroing": {}}
        if target_of(shape) is not None and frozen.view.unembedding is not None:
            asked |= {"chefer": {"target": 5}, "leave-one-out": {"target": 5, "replacement": 7}}
        calls = {
            name: lambda name=name, options=options, frozen=frozen: tlens.attribute(frozen, method=name, **options)
            for name, options in asked.items()
        }
        seconds = interleaved({"forward": lambda ids=ids, shape=shape: shape.forward(ids), **calls}, rounds=1)
        for name, call in calls.items():
            with Allocations() as memory:
                call()
            cells = seconds[name] / seconds["forward"], seconds[name] / seconds["forward"] / 64, seconds[name]
            yield row(shape.name, name, *cells, f"{memory.peak / 1e6:.0f}")


def rules() -> Lines:
    """## Backward rules, 64 tokens

    The pass is already frozen. Times are per query, for one query and for the last 16 together, in forward passes of
    the plain model in the same run.
    """
    torch.set_num_threads(THREADS[0])
    yield table("shape", "method", "one query, forwards", "16 queries, forwards each")
    for shape in (gpt2_small(), bert_base()):
        ids = shape.tokens(64)
        frozen = tlens.freeze(shape.model, ids)
        target = target_of(shape)
        if target is None or frozen.view.unembedding is None:
            continue
        cases: dict[str, dict[str, Any]] = {
            "input-x-gradient": {}, "relp": {}, "relp, live": {"attention": "live"}, "cp-lrp": {}, "attnlrp": {}, "gim": {},
        }  # fmt: skip

        def ask(name: str, options: dict[str, Any], query: Any, of: Any = frozen, to: int = target) -> Any:
            return tlens.attribute(of, method=name.split(",")[0], target=to, query=query, **options)

        calls = {name: lambda n=name, o=options: ask(n, o, -1) for name, options in cases.items()}
        calls |= {
            f"{name} all": lambda n=name, o=options: ask(n, o, slice(-16, None)) for name, options in cases.items()
        }
        for call in calls.values():
            call()  # what is proved once
        forward = partial(shape.forward, ids)
        seconds = interleaved({"forward": forward, **calls}, rounds=2)
        for name in cases:
            yield row(
                shape.name, name, seconds[name] / seconds["forward"], seconds[f"{name} all"] / 16 / seconds["forward"]
            )


def composition() -> Lines:
    """## Composition scores of all pairs of heads, GPT-2 small's shape

    TransformerLens' own `all_composition_scores` ran on the same weights.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small()
    own = getattr(shape.model, "all_composition_scores", None)
    yield table("kind", "seconds", "peak, MB", "TransformerLens' ÷ ours", "its peak, MB", "largest difference")
    for kind in "QKV":
        with Allocations() as ours:
            made = circuits.composition_scores(shape.model, kind)
        seconds = interleaved({"ours": lambda kind=kind: circuits.composition_scores(shape.model, kind)}, 2)["ours"]
        if own is None:
            yield row(kind, seconds, f"{ours.peak / 1e6:.0f}", "", "", "")
            continue
        with Allocations() as theirs, torch.no_grad():
            expected = own(kind)
        expected = getattr(expected, "scores", expected)

        def run(kind: str = kind) -> None:
            with torch.no_grad():
                own(kind)

        peer = interleaved({"theirs": run}, 1)["theirs"]
        yield row(
            kind,
            seconds,
            f"{ours.peak / 1e6:.0f}",
            peer / seconds,
            f"{theirs.peak / 1e6:.0f}",
            f"{float((made - expected).abs().max()):.0e}",
        )


def graphs() -> Lines:
    """## Circuits of one target, bundled model, 32 tokens, in forwards"""
    torch.set_num_threads(THREADS[-1])
    shape = bundled()
    ids = shape.tokens(32)
    frozen = tlens.freeze(shape.model, ids)
    frozen.operator().target(5)
    calls = {
        "`contribution_graph(threshold=0.01)`": lambda: circuits.contribution_graph(frozen, 5),
        "`contribution_graph(threshold=0)`, every edge": lambda: circuits.contribution_graph(frozen, 5, threshold=0),
        "`contribution_graph(neurons=5, sources=2)`": lambda: circuits.contribution_graph(
            frozen, 5, neurons=5, sources=2
        ),
        '`logit_attribution(by="head")`': lambda: circuits.logit_attribution(frozen, 5, by="head"),
        "`paths(max_order=2)`": lambda: circuits.paths(frozen, 5, max_order=2),
        "`top_paths(10)`": lambda: circuits.top_paths(frozen, 5, k=10),
        "`qk_attribution` of layer 1": lambda: circuits.qk_attribution(frozen, 1, 0),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, 10)
    yield table("call", "forwards")
    for name in calls:
        yield row(name, seconds[name] / seconds["forward"])


def clicks() -> Lines:
    """## From a click in a contribution graph to the picture, in milliseconds

    Headless Chromium shows a graph of the bundled model with neurons and source tokens. Times run from the click to the
    second frame after it (at 60 frames a second, two frames alone take 33 ms); the script's own part is separate. The
    table has medians and maxima over 30 nodes.
    """
    try:
        browser = chromium()
    except Exception as error:
        yield f"Not measured: no Chromium with selenium here ({type(error).__name__})."
        return
    shape = bundled()
    frozen = tlens.freeze(shape.model, shape.tokens(32))
    graph = circuits.contribution_graph(frozen, 5, threshold=0, neurons=2, sources=1)
    yield table(
        "nodes", "edges", "width", "page, kB", "median", "largest", "the script's median", "hiding by threshold"
    )
    with TemporaryDirectory() as folder, browser:
        for most in (300, 1000, 6000):
            page = graph.export(Path(folder) / f"{most}.html", k=most)
            for width in (1280, 400):
                browser.set_window_size(width, 900)
                browser.get(page.as_uri())
                count = "return [document.querySelectorAll('.circuit .t').length, document.querySelectorAll('[data-e]').length]"
                nodes, edges = browser.execute_script(count)
                timed = [browser.execute_async_script(CLICK, number * nodes // 30) for number in range(30)]
                own, frames = (sorted(column) for column in zip(*timed, strict=True))
                slid = sorted(browser.execute_async_script(SLIDE, value)[1] for value in range(5, 65, 2))
                times = (float(frames[15]), float(frames[-1]), float(own[15]), float(slid[15]))
                yield row(nodes, edges, width, page.stat().st_size // 1000, *times)


def target_of(shape: Shape) -> int | None:
    return 5 if shape.model.cfg.d_vocab > 5 else None
