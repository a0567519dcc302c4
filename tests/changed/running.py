"""In which precision, mode and thread a model is run."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import tensorlens_tl as tlens
from changed.change import add, untouched
from tensorlens_tl import compress

RUNNING = "precision, modes and threads"


@contextmanager
def autocast(model: Any) -> Iterator[None]:
    """Half precision for what torch thinks fit."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """No gradients at all."""
    with torch.inference_mode():
        yield


floats = lambda name, dtype: dtype == "float32"  # noqa: E731
add("frozen inside autocast, asked outside", RUNNING, freezing=autocast, frozen_as=untouched, takes=floats)
add("frozen outside autocast, asked inside", RUNNING, asking=autocast, frozen_as=untouched, takes=floats)
add("frozen and asked inside autocast", RUNNING, freezing=autocast, asking=autocast, frozen_as=untouched, takes=floats)
add("everything in inference mode", RUNNING, freezing=inference, asking=inference, frozen_as=untouched)
add("no parameter requires gradients", RUNNING, before=lambda m: m.requires_grad_(False) and None, frozen_as=untouched)
add(
    "norms in float32 in a half-precision model",
    RUNNING,
    before=lambda m: _float_norms(m),
    takes=lambda name, dtype: "16" in dtype,
)


def _float_norms(model: Any) -> None:
    for name, module in model.named_modules():
        if ("norm" in type(module).__name__.lower() and "Bridge" not in type(module).__name__) or name.endswith(
            (".ln1", ".ln2")
        ):
            module.float()


@contextmanager
def meanwhile(enter: Callable[[Any], Any], model: Any) -> Iterator[None]:
    """Another thread is inside a context of the model's for a while, and leaves it."""
    inside, leave = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with enter(model):
                inside.set()
                leave.wait(10)
        except BaseException as error:
            failed.append(error)
        finally:
            inside.set()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    timer = threading.Timer(0.02, leave.set)
    timer.start()
    try:
        yield
    finally:
        leave.set()
        timer.cancel()
        thread.join(10)
    if failed:
        raise failed[0]


def _of_another_prompt(model: Any) -> Any:
    return model.__dict__["_another_pass"].attached()


def _of_a_plan(model: Any) -> Any:
    return model.__dict__["_a_plan"].applied()


def _prepared(model: Any) -> None:
    """A pass of another prompt, and a plan, which another thread will use."""
    model.__dict__["_another_pass"] = tlens.freeze(model, torch.tensor([[3, 17, 5]]))
    model.__dict__["_a_plan"] = compress.plan(model, ratio=2, method="head-svd")


add(
    "another thread is inside attached()",
    RUNNING,
    before=_prepared,
    asking=partial(meanwhile, _of_another_prompt),
    frozen_as=untouched,
)
add(
    "another thread is inside plan.applied()",
    RUNNING,
    before=_prepared,
    asking=partial(meanwhile, _of_a_plan),
    frozen_as=untouched,
)
add("a copy by copy.deepcopy", RUNNING, before=lambda m: None, frozen_as=untouched)
