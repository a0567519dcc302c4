"""How long the explorer's page waits: the first answer to a new prompt, and each click, beside one forward.

Views are computed as the server does; the browser's own time is not counted. Wall-clock, this machine.

    python benchmarks/explorer.py
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import tensorlens_tl as tlens
from tensorlens_tl.explorer import Session

WORDS = 'The value of the "Lock" class is returned if the file is not found and the name of the module is a string. '
ROUNDS = 3
PROMPTS = 500


def seconds(run: Callable[[], Any]) -> float:
    """The least of some runs."""
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def gpt2() -> Any:
    """GPT-2 small's shape with random weights, read through the bundled tokenizer."""
    from shapes import gpt2_small

    model = gpt2_small().model
    model.tokenizer = tlens.load_demo_model().tokenizer
    return model


def measure(name: str, model: Any, tokens: int) -> None:
    """Print what the page waits for, of a prompt of so many tokens."""
    ids = model.tokenizer.encode(WORDS * 9)[: tokens - 1]
    texts = [model.tokenizer.decode([*ids[:-1], at], skip_special_tokens=True) for at in range(600, 600 + 2 * ROUNDS)]
    session = Session(model)
    fresh = iter(texts)
    first = {"prompt": {}, "tokens": {}, "components": {}}

    def answer() -> None:
        text = next(fresh)
        for view in first:
            session.view(view, {"text": text})

    print(f"{name}, {tokens} tokens: the first answer {seconds(answer):.2f} s")
    asked = {"text": texts[0]}
    clicks = {
        "another query": ("tokens", {"query": tokens // 2}),
        "20 new tokens": ("generated", {"new": 20}),
        "three of them, hops": ("generated", {"new": 20, "start": 4, "stop": 7, "hops": "all"}),
        "a head": ("head", {"layer": 1, "head": 0}),
        "ablate it": ("ablate", {"node": "L1H0"}),
        "the graph": ("graph", {}),
        "neurons of an MLP": ("neurons", {"node": "MLP1"}),
        "two prompts, tokens": ("tokens", {"other": texts[1]}),
        "two prompts, graph": ("graph", {"other": texts[1]}),
        "routes": ("routes", {"other": texts[1]}),
    }
    for what, (view, fields) in clicks.items():
        print(f"    {what:20} {seconds(lambda view=view, fields=fields: session.view(view, asked | fields)):.3f} s")


def memory(model: Any) -> None:
    """Print how much the largest resident size grows over many prompts."""
    session = Session(model)
    for number in range(PROMPTS):
        if number == PROMPTS // 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        session.view("tokens", {"text": f"The value of item {number} is returned if the name is not found."})
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"memory after {PROMPTS} prompts / after {PROMPTS // 5}: {after / before:.3f}")


def main() -> None:
    demo = tlens.load_demo_model()
    measure("the bundled model", demo, 35)
    memory(demo)
    measure("GPT-2 small's shape", gpt2(), 64)


if __name__ == "__main__":
    main()
