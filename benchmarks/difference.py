"""What the difference of two runs costs, in forwards of the same run and in frozen pulls.

Six blocks of GPT-2 small's shape with random weights, two prompts of 128 tokens, one thread, float32. Processor time of
that thread, so that what else a machine runs does not count; candidates are interleaved, and minima taken.

    python benchmarks/difference.py               # this checkout
    python benchmarks/difference.py OTHER         # and another one (a git worktree), in turn
"""

import time

from checkouts import in_turn, main
from page import Lines, row, table

ROUNDS = 5
PROCESSES = 2

COLUMNS = {
    "freeze": "freezing one run",
    "frozen pull": "a frozen target's pull",
    "difference": "building and proving the difference",
    "difference pull": "its target's pull",
    "edges, frozen": "edges, frozen",
    "edges, difference": "edges, difference",
    "edges, integrated-gradients": "edges, EAP-IG of 5 steps",
    "nodes, frozen": "nodes, frozen",
    "nodes, difference": "nodes, difference",
    "nodes, integrated-gradients": "nodes, integrated of 5 steps",
}


def seconds() -> dict[str, float]:
    """Of each candidate, with the package that is imported here."""
    import torch
    from shapes import gpt2_small
    from timing import interleaved

    import tensorlens_tl as tlens
    from tensorlens_tl import circuits

    torch.set_num_threads(1)
    shape = gpt2_small(layers=6)
    prompts = torch.randint(5, 1000, (2, 128), generator=torch.Generator().manual_seed(0))
    a, b = (tlens.freeze(shape.model, prompt[None]) for prompt in prompts)
    change = tlens.difference(a, b)
    candidates = {
        "forward": lambda: shape.forward(prompts[:1]),
        "freeze": lambda: tlens.freeze(shape.model, prompts[:1]),
        "frozen pull": lambda: a.operator().target(5),
        "difference": lambda: tlens.difference(a, b),
        "difference pull": lambda: change.operator().target(5),
    }
    for method in ("frozen", "difference", "integrated-gradients"):
        candidates[f"edges, {method}"] = lambda method=method: circuits.edge_scores(a, b, 5, method=method)
        candidates[f"nodes, {method}"] = lambda method=method: circuits.patch_scores(a, b, 5, method=method)
    return interleaved(candidates, ROUNDS, time.thread_time)


def ratios(times: dict[str, float]) -> dict[str, float]:
    """In forwards; and how many frozen pulls a difference's target costs beyond its two runs."""
    found = {column: times[name] / times["forward"] for name, column in COLUMNS.items()}
    whole = times["difference"] + times["difference pull"]
    return found | {"difference, proof and pull, in frozen pulls": whole / times["frozen pull"]}


def differences() -> Lines:
    """## The difference of two runs, in forwards

    Processor time on one thread, for six blocks of GPT-2 small's shape and two prompts of 128 tokens. Edges and nodes
    by "difference" include building and proving the difference. `python benchmarks/difference.py OTHER` alternates with
    another checkout.
    """
    yield table("what", "forwards")
    for name, value in ratios(in_turn(__file__, processes=PROCESSES)[0]).items():
        yield row(name, value)


if __name__ == "__main__":
    main(__file__, seconds, ratios, PROCESSES)
