"""Rules answer questions about tokens, nodes and edges: the live model under one, against the frozen operator."""

from dataclasses import replace

import pytest
import torch
from conftest import MIXED, close, hooks_left, rerun_tolerance, some_tokens, tolerance
from test_patching import BOTH, LIVE, NAMES, two
from test_scans import Wide

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.core import ATTNLRP, FROZEN, RULES, constant, held, shared, stands, unchanged
from tensorlens_tl.core.rules import derivative
from tensorlens_tl.testing import tiny_model

pytestmark = pytest.mark.numeric
ASKED = {"target": 5, "minus": 7}
ONE_RUN = ("attnlrp", "frozen", "gim", "relp", "tangent")


def in_order(terms, names):
    return terms.scores[..., [terms.names.index(name) for name in names]]


@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_effects_under_the_frozen_rule_are_the_frozen_models(name, model_named):
    """One by gradients of the live model, the other by weights; of one query and of several."""
    clean, _ = two(model_named(name))
    for more in ({"by": "head"}, {"by": "component"}, {"query": [-1, -2]}):
        mine = circuits.total_effects(clean, **ASKED, rule=FROZEN, **more)
        theirs = circuits.total_effects(clean, **ASKED, **more)
        assert close(in_order(mine, theirs.names), theirs.scores, atol=tolerance(name))
        assert torch.equal(mine.total, theirs.total)
    assert not hooks_left(clean.model)


@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_patches_under_the_frozen_rule_are_the_frozen_models(name, model_named):
    clean, corrupted = two(model_named(name))
    mine = circuits.patch_scores(clean, corrupted, **ASKED, rule=FROZEN, positions=True)
    theirs = circuits.patch_scores(clean, corrupted, **ASKED, method="frozen", positions=True)
    order = [mine.names.index(node) for node in theirs.names]
    assert close(mine.keys[..., order, :], theirs.keys, atol=tolerance(name))


@pytest.mark.parametrize("family", MIXED)
def test_the_frozen_rule_holds_what_the_operator_holds_of_mixers(family, model_named):
    """Where products do not say which factor is held: scans, the delta rule, gated convolutions and time mixing."""
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 0, 0]])
    with Wide():
        frozen = tlens.freeze(model_named(f"bridge/{family}"), tokens, attention_mask=(tokens != 0).long())
        asked = {**ASKED, "query": [-1, 2]}
        mine = tlens.attribute(frozen, **asked, rule=FROZEN)
        theirs = tlens.attribute(frozen, **asked)
    assert close(mine.scores, theirs.scores)
    assert close(mine.bias, theirs.bias)
    assert float(mine.gap.max()) < 1e-9
    assert not hooks_left(frozen.model)


@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_scores_and_bias_of_the_frozen_rule_are_the_logit(name, model_named):
    """The bias of each prompt and query, of one prompt by itself too; other rules claim no sum."""
    both = two(model_named(name))[0]
    for frozen in (both, tlens.freeze(both.model, both.tokens[:1]) if both.sides is None else both):
        asked = {**ASKED, "query": [-1, -2]}
        mine, theirs = tlens.attribute(frozen, **asked, rule=FROZEN), tlens.attribute(frozen, **asked)
        assert mine.additive
        assert close(mine.bias, theirs.bias, atol=tolerance(name))
        assert float(mine.gap.max()) <= 10 * tolerance(name)
    relp = tlens.attribute(both, **ASKED, rule="relp")
    assert not relp.additive
    assert relp.bias is None


BROKEN = {
    "a live pattern": {"softmax": unchanged, "matmul": shared},
    "a live scale": {"scale": unchanged, "function": unchanged, "multiply": shared},
    "a product twice": {"multiply": unchanged},
    "a tangent without what it leaves": {"activation": unchanged, "multiply": shared},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_rule_that_says_affine_and_is_not_is_refused(what):
    """With both numbers; without the claim it is answered."""
    rule = replace(FROZEN, **BROKEN[what])
    frozen = tlens.freeze(tiny_model("bridge/llama"), some_tokens(1))
    loose = tlens.attribute(frozen, **ASKED, rule=replace(rule, affine=False))
    numbers = rf"sum to -?[\d.e-]+, but the model's number is {float(loose.total):.6g}: "
    with pytest.raises(tlens.NumericalError, match=numbers):
        tlens.attribute(frozen, **ASKED, rule=rule)


def test_an_affine_rule_of_ones_own():
    """Gates by their tangent, the rest of which is bias; gates held, as in the operator of that name."""

    def by_tangent(f, z):
        out, slope = f(z.detach()), derivative(f, z)
        return stands(out, slope * z + constant(out - slope * z.detach()))

    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens(2))
    mine = tlens.attribute(frozen, **ASKED, rule=replace(FROZEN, activation=by_tangent))
    theirs = tlens.attribute(frozen, **ASKED, method="tensorlens", collapse="target", rule="frozen-tangent")
    assert close(mine.scores, theirs.scores)
    assert close(mine.bias, theirs.bias)
    assert bool(mine.bias.any())
    assert float(mine.gap.max()) < 1e-9


@pytest.mark.parametrize("rule", ONE_RUN)
@pytest.mark.parametrize("name", LIVE)
def test_edges_of_a_node_sum_to_the_node(name, rule, model_named):
    """Nodes by hooks on the live model, edges by its parts, cut at the nodes; under each rule."""
    clean, corrupted = two(model_named(name))
    for method in ("gradient", "integrated-gradients"):
        asked = {**ASKED, "rule": RULES[rule], "method": method, "steps": 2}
        nodes = circuits.patch_scores(clean, corrupted, **asked)
        edges = circuits.edge_scores(clean, corrupted, **asked)
        assert close(edges.scores.sum(-1), in_order(nodes, edges.sources)[:, 0], atol=rerun_tolerance(name))
    if rule == "frozen":
        theirs = circuits.edge_scores(clean, corrupted, **ASKED, method="frozen")
        made = circuits.edge_scores(clean, corrupted, **ASKED, rule=FROZEN)
        assert close(made.scores, theirs.scores, atol=rerun_tolerance(name))
    if rule == "tangent":
        plain = circuits.edge_scores(clean, corrupted, **ASKED, method="gradient")
        made = circuits.edge_scores(clean, corrupted, **ASKED, rule="tangent")
        assert close(made.scores, plain.scores, atol=tolerance(name))


def test_rules_give_their_methods_numbers():
    """Methods of the literature are rules, and those of users become methods."""
    frozen = tlens.freeze(tiny_model("bridge/llama"), some_tokens())
    for rule in ("attnlrp", "gim"):
        asked = {**ASKED, "query": [-1, 1]}
        assert torch.equal(
            tlens.attribute(frozen, **asked, rule=rule).scores, tlens.attribute(frozen, **asked, method=rule).scores
        )
    live = tlens.attribute(frozen, **ASKED, method="relp", attention="live")
    assert torch.equal(tlens.attribute(frozen, **ASKED, rule="relp").scores, live.scores)
    held_model = tlens.attribute(frozen, **ASKED, rule=FROZEN)
    assert close(held_model.scores, tlens.attribute(frozen, **ASKED).scores, atol=1e-6)


@pytest.fixture
def own():
    """A rule of a user's own, under a name."""
    yield tlens.register_rule("values-only", tlens.Rule(softmax=held, multiply=shared))
    RULES.pop("values-only")


def test_a_rule_of_ones_own_is_a_method_and_a_rule_of_every_question(own):
    model = tiny_model("bridge/llama")
    clean, corrupted = two(model)
    by_name, by_value = (tlens.attribute(clean, **ASKED, rule=rule) for rule in ("values-only", own))
    as_method = tlens.attribute(model, clean.tokens, **ASKED, method="values-only")
    assert torch.equal(by_name.scores, by_value.scores)
    assert torch.equal(by_name.scores, as_method.scores)
    assert "values-only" in tlens.list_methods()
    assert "values-only" in tlens.list_rules()
    edges = circuits.edge_scores(clean, corrupted, **ASKED, rule="values-only")
    matching = [name.endswith((".q", ".k")) for name in edges.destinations]
    assert not bool(edges.scores[:, :, matching].any())
    tlens.register_rule("values-only", own)  # as a notebook's cell does


def test_a_rule_that_changes_values_is_refused():
    doubled = tlens.Rule(matmul=lambda f, x, y: 2 * f(x, y))
    clean, corrupted = two(tiny_model("bridge/llama"))
    for ask in (
        lambda: tlens.attribute(clean, **ASKED, rule=doubled),
        lambda: circuits.total_effects(clean, **ASKED, rule=doubled),
        lambda: circuits.patch_scores(clean, corrupted, **ASKED, rule=doubled),
        lambda: circuits.edge_scores(clean, corrupted, **ASKED, rule=doubled),
    ):
        with pytest.raises(tlens.NumericalError, match="operation's own value"):
            ask()
    assert not hooks_left(clean.model)


def test_rules_that_make_no_sense_are_refused():
    clean, corrupted = two(tiny_model("bridge/llama"))
    change = tlens.difference(clean, corrupted)
    wrong = {
        "Did you mean 'attnlrp'": lambda: tlens.attribute(clean, **ASKED, rule="attn-lrp"),
        "exclude each other": lambda: tlens.attribute(clean, **ASKED, rule="gim", method="gim"),
        "explains one run": lambda: tlens.attribute(change, **ASKED, rule="gim"),
        "is of two runs": lambda: tlens.attribute(clean, **ASKED, rule="secant"),
        "with method='gradient'": lambda: circuits.patch_scores(clean, corrupted, **ASKED, rule="gim", method="frozen"),
        "use it with method": lambda: circuits.edge_scores(clean, corrupted, **ASKED, rule="gim", method="patching"),
        "a rule applies to one run": lambda: circuits.total_effects(change, **ASKED, rule="gim"),
        "leave live out": lambda: circuits.total_effects(clean, **ASKED, rule="gim", live=True),
    }
    for message, ask in wrong.items():
        with pytest.raises(tlens.InvalidInputError, match=message):
            ask()
    with pytest.raises(tlens.RegistryError, match="built-in rule"):
        tlens.register_rule("gim", ATTNLRP)
    with pytest.raises(tlens.RegistryError, match="is already"):
        tlens.register_rule("alti", ATTNLRP)
    with pytest.raises(tlens.UnsupportedModelError, match="no softmax attention"):
        circuits.total_effects(tlens.freeze(tiny_model("bridge/mamba"), some_tokens()), 5, 7, rule="attnlrp")
