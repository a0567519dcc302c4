"""One vocabulary: what means the same has one name and one default, and old names warn with the new one."""

import ast
import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.evaluate.patching import ROWS, checked_methods
from tensorlens_tl.testing import tiny_model

RULES = dict(zip(("ratio", "ig", "split", "tangent"), tlens.FROZEN_RULES, strict=True))
"""What `activation=` called the rules of the frozen model."""


@pytest.fixture(scope="module")
def frozen():
    return tlens.freeze(tiny_model("bridge/llama"), some_tokens(1))


FACES = (
    "tensorlens_tl", *(f"tensorlens_tl.{name}" for name in (
        "circuits", "compress", "datasets", "evaluate", "generation", "methods", "passes", "report", "results",
        "whitening",
    )),
)  # fmt: skip


def public_functions():
    """The parameters of every public function and method, by name."""
    found = []
    for face in map(importlib.import_module, FACES):
        for thing in (getattr(face, name) for name in face.__all__):
            if inspect.isclass(thing) and thing.__module__.startswith("tensorlens_tl"):
                found += [getattr(thing, key) for key in vars(thing) if key[0] != "_"]
            found.append(thing)
    functions = filter(inspect.isfunction, map(inspect.unwrap, filter(inspect.isroutine, found)))
    ours = {each for each in functions if each.__module__.startswith("tensorlens_tl")}
    return {f"{each.__module__}.{each.__qualname__}": inspect.signature(each).parameters for each in ours}


PUBLIC = public_functions()
REQUIRED = inspect.Parameter.empty
MAPS = "all"  # of what holds a score for every pair of tokens
DEFAULTS = {
    "target": {None, REQUIRED},
    "minus": {None},
    "direction": {None, REQUIRED},
    "query": {-1, MAPS, None, REQUIRED},
    "rule": {"frozen", None, REQUIRED, "free"},
    "layers": {None, REQUIRED},
    "memory": {None, REQUIRED},
    "seed": {0, REQUIRED},
    "points": {"midpoint"},
    "prepend_bos": {None},
    "final_norm": {None},
    "padding_side": {None},
    "verify": {True},
}
"""What a name means has one default, or where a function cannot do without an answer none; ``"free"`` is of ranks."""

NODES = ("logit_attribution", "total_effects", "patch_scores", "patching_agreement")

OLD = {"activation": "rule", "answers": "target", "others": "minus", "against": "minus"}
"""Names that an argument does not have, and the one that it has."""


def defaults(argument):
    """The default of an argument in every public function that has it."""
    return {name: parameters[argument].default for name, parameters in PUBLIC.items() if argument in parameters}


@pytest.mark.parametrize("argument", DEFAULTS)
def test_an_argument_has_one_default(argument):
    having = defaults(argument)
    assert having
    assert {name: value for name, value in having.items() if value not in DEFAULTS[argument]} == {}


def test_nodes_are_heads_unless_by_says_otherwise():
    having = {name.rpartition(".")[2]: default for name, default in defaults("by").items()}
    assert {name: having[name] for name in NODES} == dict.fromkeys(NODES, "head")


def test_no_argument_has_an_old_name():
    assert not {f"{name}({old}=)" for name, parameters in PUBLIC.items() for old in OLD if old in parameters}


def test_integrated_gradients_have_one_name():
    """As a method of tokens, of nodes and edges, and as a rule of activations."""
    name = "integrated-gradients"
    assert name in tlens.list_methods()
    assert name in circuits.compare.METHODS
    assert f"frozen-{name}" in tlens.list_rules()
    for names in (tlens.list_methods(), circuits.compare.METHODS, tlens.list_rules()):
        assert not {"ig", "integrated"} & {*names}


def test_old_names_of_integrated_gradients_warn(frozen):
    for ask in (circuits.patch_scores, circuits.edge_scores):
        mine = ask(frozen, other(frozen), 5, method="integrated-gradients")
        with pytest.warns(DeprecationWarning, match="is method='integrated-gradients' now"):
            theirs = ask(frozen, other(frozen), 5, method="integrated")
        assert torch.equal(mine.scores, theirs.scores)
    with pytest.warns(DeprecationWarning, match="'integrated-gradients, left' now"):
        assert checked_methods("integrated, left", ROWS) == ["integrated-gradients, left"]


WITH_RULES = {
    "operator": lambda frozen, **rule: frozen.operator(**rule).target(5).scores,
    "attribute": lambda frozen, **rule: tlens.attribute(frozen, 5, **rule).scores,
    "a method by name": lambda frozen, **rule: tlens.attribute(frozen, 5, method="tensorlens", **rule).scores,
    "a method": lambda frozen, **rule: tlens.methods.tensorlens(frozen, target=5, **rule).scores,
    "effects": lambda frozen, **rule: circuits.total_effects(frozen, 5, **rule).scores,
    "paths": lambda frozen, **rule: circuits.paths(frozen, 5, **rule).scores,
    "patches": lambda frozen, **rule: circuits.patch_scores(frozen, other(frozen), 5, method="frozen", **rule).scores,
    "edges": lambda frozen, **rule: circuits.edge_scores(frozen, other(frozen), 5, method="frozen", **rule).scores,
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
    with pytest.raises(tlens.InvalidInputError, match="leave out activation="):
        frozen.operator(rule="frozen", activation="ratio")
    with pytest.raises(tlens.InvalidInputError, match="It is called 'frozen-split' here"):
        circuits.total_effects(frozen, 5, rule="split")
    with pytest.raises(tlens.InvalidInputError, match="use it with method='gradient'"):
        circuits.patch_scores(frozen, other(frozen), 5, rule="frozen-split", method="patching")


def listed(tree, kind):
    """Assignments of a module, those below ``if TYPE_CHECKING`` as well."""
    lines = [line for node in tree.body for line in (node.body if isinstance(node, ast.If) else [node])]
    return [line for line in lines if isinstance(line, kind)]


def test_editors_offer_what_is_accepted():
    """The values of a type are those of the constant by which the argument is checked; as code runs, it is `Any`."""
    seen = 0
    for path in Path(tlens.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree, checked = ast.parse(text), re.findall(r"check_choice\([^()]*?, \w+, ([A-Z]+)", text)
        literals = {
            line.targets[0].id: ast.literal_eval(line.value.slice)
            for line in listed(tree, ast.Assign)
            if isinstance(line.value, ast.Subscript) and ast.unparse(line.value.value) == "Literal"
        }
        for line in listed(tree, ast.AnnAssign):
            if line.target.id not in checked:
                continue
            for name in {node.id for node in ast.walk(line.annotation) if isinstance(node, ast.Name)} & {*literals}:
                values = line.value.elts if isinstance(line.value, ast.Tuple) else line.value.keys
                assert tuple(map(ast.literal_eval, values)) == literals[name], (path.name, name)
                seen += 1
    assert seen == 10
