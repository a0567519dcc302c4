"""Models that were changed: every public question is exact, or refused (`docs/guarantees.md`).

The default run is a cross-section: every third change, and every question. What carries the mark `whole` asks a share
of the questions about every change; `make changed` asks others, and writes the tables.
"""

import re
from dataclasses import dataclass

import pytest
import torch
from changed import (
    CHANGES,
    answers as changed_answers,
    applied,
    names,
    questions as changed_questions,
    table as changed_table,
)
from changed.answers import ABSENT, CRASH, EXACT, FAILURES, WRONG, cells, numbers
from changed.questions import CORRUPTED, MINUS, REPLACEMENT, TARGET, TOKENS, Question, Setting, questions, unknown
from changed.weights import DTYPES, HEAD, HEADS, MODELS, NoEquivalentError, built
from conftest import close, hooks_left, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits

ASKED = {question.name: question for question in questions()}
NAMED = {change.name: change for change in CHANGES}


@dataclass(frozen=True)
class Known:
    """Cells that fail today, and one of them, which must fail as long as the entry stands here.

    Attributes:
        changes, questions: regular expressions of names.
        finding: what is to be done.
        cell: the one that is tried: change, model, dtype and question.
    """

    changes: str
    questions: str
    finding: str
    cell: tuple[str, str, str, str]


KNOWN: list[Known] = []
"""Empty when every finding is repaired; an entry whose cell no longer fails fails its test."""


def known(change, question):
    return any(re.search(k.changes, change) and re.search(k.questions, question) for k in KNOWN)


def failing(change, found):
    """Cells that are neither exact nor refused, and are not known."""
    return {
        question: f"{cell.outcome}: {cell.note}"
        for question, cell in found.items()
        if cell.outcome in FAILURES and not known(change, question)
    }


def only(*patterns):
    return [
        question for question in ASKED.values() if any(re.fullmatch(pattern, question.name) for pattern in patterns)
    ]


# ------------------------------------------------------------------ the cross-section

HANDFUL = only(*map(re.escape, changed_table.HANDFUL))


SHARE = 6
"""Of so many questions one is asked of each change in the whole run."""


def place(number, change, among=MODELS, dtypes=("float64", "bfloat16")):
    """One model and dtype, another for the next change."""
    places = [(name, dtype) for name in among for dtype in dtypes if change.takes(name, dtype)]
    places = places or [(name, dtype) for name in among for dtype in DTYPES if change.takes(name, dtype)]
    return places[(5 * number) % len(places)] if places else None


SOME = [
    pytest.param(number, marks=[] if number % 3 == 0 else pytest.mark.whole, id=name)
    for number, name in enumerate(names())
]


@pytest.mark.parametrize("number", SOME)
@pytest.mark.few(4)
def test_every_change(number):
    change = CHANGES[number]
    if (at := place(number, change)) is None:
        pytest.skip("no model of this TransformerLens can be changed so")
    found = cells(at[0], change, at[1], HANDFUL)
    assert not failing(change.name, found), at
    compare_with_page(change, at, found)


@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        *(pytest.param(other, marks=pytest.mark.whole) for other in ("LoRA on q", "a hook changes the logits")),
    ],
)
def test_every_question(change):
    for name in ("bridge/gpt2",) if change != "nothing" else MODELS[-2:-1]:
        found = cells(name, NAMED[change], "float64", [q for q in ASKED.values() if not q.heavy])
        assert not failing(change, found)
        if change == "nothing":
            assert {cell.outcome for cell in found.values()} <= {EXACT, ABSENT, CRASH}


@pytest.mark.whole
def test_every_heavy_question():
    found = cells("bridge/gpt2", NAMED["nothing"], "float64", [q for q in ASKED.values() if q.heavy])
    assert not failing("nothing", found)


@pytest.mark.whole
@pytest.mark.parametrize("number", range(len(CHANGES)), ids=names())
def test_questions_in_turn_on_every_change(number):
    change, at = CHANGES[number], place(number, CHANGES[number], dtypes=tuple(DTYPES))
    if at is None:
        pytest.skip("no model of this TransformerLens can be changed so")
    found = cells(at[0], change, at[1], changed_table.in_turn(number, SHARE, at[1]))
    assert not failing(change.name, found), at
    changed_answers.forget()


def compare_with_page(change, at, found):
    """What the page does not say does not happen."""
    rows = changed_table.written()
    if not rows:
        return
    said = rows[change.name].get(changed_table.column(*at), set())
    if not said & set(changed_table.SHORT.values()):
        return  # not tried there
    outcomes = {changed_table.SHORT[cell.outcome] for cell in found.values() if cell.outcome != ABSENT}
    assert outcomes <= said, (change.name, at)


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: entry.finding[:30])
def test_what_is_known_to_fail_fails(entry):
    change, name, dtype, question = entry.cell
    if name not in MODELS:
        pytest.skip("TransformerLens 4")
    assert cells(name, NAMED[change], dtype, [ASKED[question]])[question].outcome in FAILURES


# ------------------------------------------------------------------ the table itself


def test_every_public_function_is_asked():
    assert unknown() == {}
    assert set(changed_questions.CALLS) <= set(ASKED)
    assert set(changed_questions.WEIGHTS) <= {question.function for question in ASKED.values()}
    for owner, (cls, _) in changed_questions.CLASSES.items():
        assert not [
            member
            for member in changed_questions.PARTS[owner]
            if not hasattr(cls, member) and member not in fields(cls)
        ]


def fields(cls):
    return getattr(cls, "__dataclass_fields__", {})


def test_a_new_function_has_to_be_asked(monkeypatch, clean_registry):
    def novel(frozen, what):
        """Something that nobody has heard of."""

    def derived(frozen, target=None, *, live=False):
        """Its arguments are known."""

    monkeypatch.setattr(circuits, "__all__", [*circuits.__all__, "novel", "derived"])
    monkeypatch.setattr(circuits, "novel", novel, raising=False)
    monkeypatch.setattr(circuits, "derived", derived, raising=False)
    tlens.register_method("newest")(lambda frozen, *, target=None: None)
    assert unknown() == {"circuits.novel": "what"}
    assert {"circuits.derived", "circuits.derived [live=True]", "method newest"} <= {q.name for q in questions()}


def test_an_answer_of_a_new_kind_has_to_be_read():
    with pytest.raises(TypeError, match="say how the numbers of a object are read"):
        numbers(object())


WRONG_ANSWERS = {
    "off": lambda s: 1.001 * s.op.output,
    "another total": lambda s: tlens.attribute(s.frozen, target=TARGET, minus=MINUS, query=1),
    "a raw error": lambda s: [][0],
    "a hook is left": lambda s: s.model.add_hook("blocks.0.hook_resid_pre", lambda t, hook: t),
}


@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
def test_what_is_wrong_is_seen(wrong, monkeypatch):
    """The right answer first, so that the truth is one; then another."""
    right = lambda s: tlens.attribute(s.frozen, target=TARGET, minus=MINUS) if wrong == "another total" else s.op.output  # noqa: E731
    question = f"a question, {wrong}"
    answers = iter([right, right, WRONG_ANSWERS[wrong]])
    asked = Question(question, lambda s: next(answers)(s), "pass")
    changed = NAMED["a hook adds a vector to the first block's input"]
    cell = cells("bridge/gpt2", changed, "float64", [Question(question, right, "pass")])[question]
    assert cell.outcome == EXACT
    asked = Question(question, WRONG_ANSWERS[wrong], "pass")
    assert cells("bridge/gpt2", changed, "float64", [asked])[question].outcome in (WRONG, CRASH)


def states_and_logits(model, edits=(), tokens=TOKENS):
    """One prompt, one run, hooks beside those that are on the model."""
    with torch.no_grad():
        logits = model.run_with_hooks(torch.tensor([tokens]), fwd_hooks=list(edits))
    return logits[0].double()


def of(logits):
    return float(logits[-1, TARGET] - logits[-1, MINUS])


SAME = [change.name for change in CHANGES if change.frozen_as and change.asked_as == "the same"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, marks=[] if (number + place) % len(MODELS) == 0 else pytest.mark.whole)
        for place, name in enumerate(MODELS)
        for number, change in enumerate(SAME)
    ],
)
@pytest.mark.few(20)
def test_an_equivalent_computes_the_same(name, change):
    """Before anything is compared with it: logits of the changed model and of its untouched equivalent."""
    change = NAMED[change]
    if not change.takes(name, "float64") or change.asking or change.freezing:
        pytest.skip("another class, or no change of the model")
    equivalent = built(name, torch.float64)
    try:
        change.frozen_as(equivalent)
    except NoEquivalentError:
        pytest.skip("no untouched model computes the same")
    with applied(change, built(name, torch.float64)) as model:
        if model.__dict__.get("_a_plan") is None:
            assert close(states_and_logits(model), states_and_logits(equivalent), tolerance(name))


# ------------------------------------------------------------------ live answers, by hand


def without_head(model, layer, head):
    def edit(z, hook):
        flat = z.flatten(2).clone()
        flat[..., head * HEAD : (head + 1) * HEAD] = 0
        return flat.view_as(z)

    return of(states_and_logits(model, [(f"blocks.{layer}.attn.hook_z", edit)]))


def with_heads_of(model, layer, head, z_of_other):
    def edit(z, hook):
        flat = z.flatten(2).clone()
        flat[..., head * HEAD : (head + 1) * HEAD] = z_of_other.flatten(2)[..., head * HEAD : (head + 1) * HEAD]
        return flat.view_as(z)

    return of(states_and_logits(model, [(f"blocks.{layer}.attn.hook_z", edit)]))


def captured(model, point, tokens):
    found = []
    states_and_logits(model, [(point, lambda t, hook: found.append(t.detach().clone()))], tokens)
    return found[0]


BY_HAND = [
    "nothing",
    "a hook sharpens a pattern",
    pytest.param("a hook adds a vector at one position: t[:, 3] += v", marks=pytest.mark.whole),
    pytest.param("a hook scales a norm's denominator", marks=pytest.mark.whole),
]


@pytest.mark.parametrize("change", BY_HAND)
@pytest.mark.parametrize("name", MODELS)
def test_live_answers_are_those_of_runs_by_hand(name, change):
    """What takes something away from the live model is compared with plain TransformerLens, one prompt at a time."""
    with applied(NAMED[change], built(name, torch.float64)) as model:
        setting = Setting(model)
        setting.freeze()
        own = of(states_and_logits(model))
        effects = circuits.total_effects(setting.frozen, TARGET, MINUS, live=True)
        left_out = tlens.attribute(
            setting.frozen, method="leave-one-out", target=TARGET, minus=MINUS, replacement=REPLACEMENT
        )
        patched = circuits.patch_scores(setting.frozen, setting.corrupted, TARGET, MINUS, method="patching")
        allowed = max(1e-9, tolerance(name))
        for layer in (0, 1):
            other = captured(model, f"blocks.{layer}.attn.hook_z", CORRUPTED)
            for head in range(HEADS):
                label = f"L{layer}H{head}"
                assert abs(float(effects[label]) - (own - without_head(model, layer, head))) < allowed
                moved = with_heads_of(model, layer, head, other)
                assert abs(float(patched[label]) - (own - moved)) < allowed
        for position in range(len(TOKENS)):
            replaced = [*TOKENS[:position], REPLACEMENT, *TOKENS[position + 1 :]]
            lost = own - of(states_and_logits(model, tokens=replaced))
            assert abs(float(left_out.scores[0, 0, position]) - lost) < allowed
        expected = hooks_left(model)
    assert expected == (0 if change == "nothing" else 1)
