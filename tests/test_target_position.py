"""What a pass is followed by: every public function takes the target at the same place."""

import inspect
from typing import Any

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits

TEXT = "If the file is not found, a FileNotFoundError is"


@pytest.fixture(scope="module")
def frozen():
    return tlens.freeze(tlens.load_demo_model(dtype=torch.float64), TEXT)


def public_functions():
    """Every public function that takes a target, by its name."""
    homes = (tlens, circuits, tlens.evaluate, tlens.generation, tlens.methods, tlens.report)
    members = {f"{home.__name__}.{name}": getattr(home, name) for home in homes for name in vars(home)["__all__"]}
    return {
        name: member
        for name, member in members.items()
        if inspect.isfunction(member) and "target" in inspect.signature(member).parameters
    }


WITH_TARGET = public_functions()
BY_NAME_ONLY = ("tensorlens_tl.methods.", "tensorlens_tl.evaluate.")  # options of a method; what follows a model's rows


@pytest.mark.parametrize("name", WITH_TARGET)
def test_a_target_follows_the_pass(name, frozen):
    """One position for what is explained: after the pass, or after all that is run; then what it is compared with."""
    function = WITH_TARGET[name]
    parameters = inspect.signature(function).parameters
    positional = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if name.startswith(BY_NAME_ONLY):
        assert "target" not in positional
    else:
        before = positional[: positional.index("target")]
        runs = {"model", "input", "frozen", "clean", "corrupted", "circuits", "difference", "features", "base", "tuned",
                "prompts"}  # fmt: skip
        assert set(before) <= runs
        assert positional[len(before) + 1 :] in ([], ["minus"])
    if name.startswith("tensorlens_tl.methods."):
        with pytest.raises(tlens.WrongCallError, match="passed by name"):
            function(frozen, " the")


@pytest.mark.parametrize(
    "function",
    [
        tlens.attribute, tlens.report.explain, circuits.contribution_graph, circuits.logit_attribution,
        circuits.logit_lens, circuits.paths, circuits.top_paths, circuits.total_effects,
    ],
)  # fmt: skip
def test_a_target_by_position_is_the_one_by_name(function, frozen):
    more: dict[str, Any] = {"methods": ["tensorlens"]} if function is tlens.report.explain else {}
    by_position = said(function(frozen, " a", **more))
    assert by_position == said(function(frozen, target=" a", **more))
    assert by_position != said(function(frozen, target=" the", **more))


def said(result):
    """What a result says, to be compared."""
    if isinstance(result, tlens.report.Picture):
        return result.body
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return result.target, torch.as_tensor(result.total).tolist()


def test_a_prompt_that_follows_a_pass_is_no_target(frozen):
    with pytest.raises(tlens.InvalidInputError, match=r"input already.*one token"):
        tlens.report.explain(frozen, TEXT)
    with pytest.raises(tlens.InvalidInputError, match="what follows it is the target"):
        tlens.report.explain(frozen, TEXT, " the")
