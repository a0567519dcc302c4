"""What the main questions cost, in forwards of the same run, beside a wide limit: a slip of a factor shows at once.

Three blocks of GPT-2 small's shape with random weights, prompts of 64 tokens, one thread and its processor time,
candidates interleaved, minima. The limits stand half again above what was measured when they were set; a cost above its
limit is marked and fails nothing, because machines differ. Then what freezing and two backward questions cost on loaded
models of 4 and 48 layers (`depth.py`), in forwards of each: a cost that grows with depth is marked as well.

    python benchmarks/guard.py
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from depth import in_forwards, random_times
from shapes import gpt2_small
from timing import interleaved

import tensorlens_tl as tlens
from tensorlens_tl import circuits

ROUNDS = 4

LIMITS = {
    "freeze": 4.5,
    "freeze, sampled proof": 3.6,
    "freeze, no proof": 3.4,
    "target": 2.3,
    "target and foil over components": 2.0,
    "In+Out": 2.3,
    "difference": 3.3,
    "edges of a difference": 11.0,
    "edges, frozen": 6.5,
    "text of 16 tokens, a span": 7.5,
    "text of 16 tokens, two hops": 9.0,
}
"""Forwards of the model's blocks. A pass that is asked reads all weights to see that they are its own: of the 1.5 that
target and In+Out take, each of two such readings (as the operator is made, and as it is pulled) takes a third or so."""

DEPTHS = (4, 48)
DEEP = ("freeze", "difference", "attnlrp")
MOST_GROWTH = 1.5
"""How many times as many forwards a question may cost on the deeper model; machines are noisy."""


def candidates() -> dict[str, Callable[[], Any]]:
    """By the name of their limit; ``"forward"`` is the unit."""
    shape = gpt2_small(layers=3)
    model = shape.model
    prompts = torch.randint(5, 1000, (2, 64), generator=torch.Generator().manual_seed(0))
    one, other = (tlens.freeze(model, prompt[None]) for prompt in prompts)
    return {
        "forward": lambda: shape.forward(prompts[:1]),
        "freeze": lambda: tlens.freeze(model, prompts[:1]),
        "freeze, sampled proof": lambda: tlens.freeze(model, prompts[:1], verify="sample"),
        "freeze, no proof": lambda: tlens.freeze(model, prompts[:1], verify=False),
        "target": lambda: one.operator().target(5),
        "target and foil over components": lambda: circuits.logit_attribution(one, 5, minus=6, by="component"),
        "In+Out": lambda: one.operator().in_out(),
        "difference": lambda: tlens.difference(one, other),
        "edges of a difference": lambda: circuits.edge_scores(one, other, 5, method="difference"),
        "edges, frozen": lambda: circuits.edge_scores(one, other, 5, method="frozen"),
        "text of 16 tokens, a span": lambda: tlens.attribute_generation(
            model, prompts[:1, :48], continuation=prompts[0, 48:], span="all"
        ),
        "text of 16 tokens, two hops": lambda: tlens.attribute_generation(
            model, prompts[:1, :48], continuation=prompts[0, 48:], span="all", hops=2
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    seconds = interleaved(candidates(), ROUNDS, time.thread_time)
    forward = seconds.pop("forward")
    print(f"{'':34} forwards   limit")
    for name, spent in seconds.items():
        cost = spent / forward
        mark = "" if cost <= LIMITS[name] else "  above its limit"
        print(f"{name:34} {cost:8.2f} {LIMITS[name]:7.1f}{mark}")
    costs = in_forwards(random_times(DEPTHS, DEEP))
    print(f"\n{'':34} " + " ".join(f"{layers:>2} layers" for layers in DEPTHS))
    for name in DEEP:
        shallow, deep = (costs[f"{layers} layers/{name}"] for layers in DEPTHS)
        mark = "" if deep <= MOST_GROWTH * shallow else "  grows with depth"
        print(f"{name:34} {shallow:9.2f} {deep:9.2f}{mark}")


if __name__ == "__main__":
    main()
