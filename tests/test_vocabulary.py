"""One vocabulary: what means the same has one name and one default, and old names warn with the new one."""

import warnings

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import tiny_model

RULES = dict(zip(("ratio", "ig", "split", "tangent"), tlens.FROZEN_RULES, strict=True))
"""What `activation=` called the rules of the frozen model."""


@pytest.fixture(scope="module")
def frozen():
    return tlens.freeze(tiny_model("bridge/llama"), some_tokens(1))


WITH_RULES = {
    "operator": lambda frozen, **rule: frozen.operator(**rule).target(5).scores,
    "attribute": lambda frozen, **rule: tlens.attribute(frozen, 5, **rule).scores,
    "a method by name": lambda frozen, **rule: tlens.attribute(frozen, 5, method="tensorlens", **rule).scores,
    "a method": lambda frozen, **rule: tlens.methods.tensorlens(frozen, target=5, **rule).scores,
    "effects": lambda frozen, **rule: circuits.total_effects(frozen, 5, **rule).scores,
    "paths": lambda frozen, **rule: circuits.paths(frozen, 5, **rule).scores,
    "patches": lambda frozen, **rule: circuits.patch_scores(frozen, other(frozen), 5, **rule).scores,
    "edges": lambda frozen, **rule: circuits.edge_scores(frozen, other(frozen), 5, **rule).scores,
}


def other(frozen):
    return tlens.freeze(frozen.model, (frozen.tokens + 1) % 10)


@pytest.mark.parametrize("old", RULES)
@pytest.mark.parametrize("what", WITH_RULES)
def test_an_activation_rule_is_a_rule_of_the_frozen_model(frozen, what, old):
    """By its new name without a warning, by its old one with the new one in the warning."""
    ask = WITH_RULES[what]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = ask(frozen, rule=RULES[old])
    with pytest.warns(DeprecationWarning, match=f"activation='{old}' is rule='{RULES[old]}' now"):
        theirs = ask(frozen, activation=old)
    assert torch.equal(mine, theirs)
    assert close(mine, ask(frozen)) is (old == "ratio")


def test_the_rules_by_their_old_name_warn():
    with pytest.warns(DeprecationWarning, match="FROZEN_RULES now"):
        assert tlens.RULES == tlens.FROZEN_RULES


def test_a_rule_by_both_names_is_an_error(frozen):
    with pytest.raises(tlens.InvalidInputError, match="leave activation out"):
        frozen.operator(rule="frozen", activation="ratio")
    with pytest.raises(tlens.InvalidInputError, match="It is called 'frozen-split' here"):
        circuits.total_effects(frozen, 5, rule="split")
    with pytest.raises(tlens.InvalidInputError, match="use it with method='gradient'"):
        circuits.patch_scores(frozen, other(frozen), 5, rule="frozen-split", method="patching")
