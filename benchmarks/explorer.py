"""How long the explorer's page waits: the first answer to a new prompt, and each click.

Views are computed as the server does; the browser's own time is not counted.
"""

import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from page import Lines, row, table
from shapes import gpt2_small
from timing import THREADS
from transformer_lens.model_bridge import TransformerBridge

import tensorlens_tl as tlens
from scripts.real_models import FOLDER
from tensorlens_tl.explorer import Session

WORDS = 'The value of the "Lock" class is returned if the file is not found and the name of the module is a string. '
ROUNDS = 3
PROMPTS = 500


def gpt2() -> Any:
    """GPT-2 small's shape with random weights, read through the bundled tokenizer."""
    model = gpt2_small().model
    model.tokenizer = tlens.load_demo_model().tokenizer
    return model


def smollm2() -> Any | None:
    """SmolLM2 135M, where `make real` has fetched it."""
    folder = FOLDER / "smollm2"
    if not folder.exists():
        return None
    return TransformerBridge.boot_transformers(str(folder), dtype=torch.float32)


def first_answer(session: Session, text: str) -> None:
    """What the page shows of a prompt that it has not seen."""
    for view in ("prompt", "tokens", "components"):
        session.view(view, {"text": text})


def waits(model: Any, tokens: int) -> dict[str, float]:
    """Seconds that the page waits for, of prompts of so many tokens: the least of some rounds, each of new prompts.

    A session keeps its results, so that a round asks everything once.
    """
    ids = model.tokenizer.encode(WORDS * 9)[: tokens - 1]
    texts = [model.tokenizer.decode([*ids[:-1], at], skip_special_tokens=True) for at in range(600, 600 + 4 * ROUNDS)]
    session = Session(model)
    session.view("prompt", {"text": WORDS})  # the model has been read once
    several = iter(texts)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        alone, text, other, third = (next(several) for _ in range(4))
        waited: dict[str, float] = {}

        def wait(what: str, run: Callable[[], Any], waited: dict[str, float] = waited) -> None:
            start = time.perf_counter()
            run()
            waited[what] = time.perf_counter() - start

        wait("next tokens of a new prompt", partial(session.view, "prompt", {"text": alone}))
        wait("the first answer to a prompt", partial(first_answer, session, text))
        for what, (view, fields) in clicks(tokens, other, third).items():
            wait(what, partial(session.view, view, {"text": text} | fields))
        rounds.append(waited)
    return {what: min(waited[what] for waited in rounds) for what in rounds[0]}


def clicks(tokens: int, other: str, third: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The views that a page asks for after its first answer, in order; the last pair of prompts is new."""
    return {
        "another query": ("tokens", {"query": tokens // 2}),
        "20 new tokens": ("generated", {"new": 20}),
        "three of them, hops": ("generated", {"new": 20, "start": 4, "stop": 7, "hops": "all"}),
        "a head": ("head", {"layer": 1, "head": 0}),
        "another head": ("head", {"layer": 2, "head": 1}),
        "why it attends": ("why", {"layer": 1, "head": 0}),
        "ablate it": ("ablate", {"without": "L1H0"}),
        "ablate another": ("ablate", {"without": "L0H1"}),
        "the graph": ("graph", {}),
        "neurons of an MLP": ("neurons", {"node": "MLP1"}),
        "two prompts, tokens": ("tokens", {"other": other}),
        "two prompts, graph": ("graph", {"other": other}),
        "its nodes, patched live": ("measured", {"other": other}),
        "two heads, by the second run": ("ablate", {"other": other, "without": "L1H0,L1H1", "by": "other"}),
        "an MLP of both, by its mean": ("ablate", {"other": other, "without": "MLP1", "by": "mean"}),
        "two prompts, routes": ("routes", {"other": other}),
        "the graph of a new pair": ("graph", {"other": third}),
    }


def growth_of_memory(model: Any) -> float:
    """The largest resident size after many prompts, in those after a fifth of them."""
    session = Session(model)
    sizes: list[int] = []
    for number in range(PROMPTS):
        session.view("tokens", {"text": f"The value of item {number} is returned if the name is not found."})
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return sizes[-1] / sizes[PROMPTS // 5]


def explorer() -> Lines:
    """## The explorer, in seconds

    Wall-clock, two threads, without the browser's own time, each view asked for the first time. The first
    answer has next tokens, scores of tokens, and components.
    """
    torch.set_num_threads(THREADS[-1])
    demo = tlens.load_demo_model()
    bundled = waits(demo, 35)
    growth = growth_of_memory(demo)
    models = {"bundled model, 35 tokens": bundled, "GPT-2 small's shape, 64 tokens": waits(gpt2(), 64)}
    trained = smollm2()
    if trained is not None:
        models["SmolLM2 135M, 16 tokens"] = waits(trained, 16)
    yield table("what the page waits for", *models)
    for what in bundled:
        yield row(what, *(of[what] for of in models.values()))
    yield f"\nThe process is {growth:.2f} times as large after {PROMPTS} prompts as after {PROMPTS // 5}."
