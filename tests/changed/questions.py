"""Every public function that takes a model or a pass, and how it is called on a tiny model.

Calls are derived from signatures: what a parameter of some name is passed stands in `ARGUMENTS`, and parameters that
choose between ways to compute something give a question for each way (`VARIANTS`). A public function that cannot be
called so needs a line in `CALLS`, or a reason in `LEFT_OUT`: `unknown()` names those that have neither.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, evaluate, generation, whitening
from tensorlens_tl.methods import contextualisation
from tensorlens_tl.models import FROZEN_RULES

TOKENS = [7, 11, 23, 31, 19, 41]
"""The prompt: six different tokens."""
CORRUPTED = [7, 11, 29, 31, 19, 41]
TARGET, MINUS, REPLACEMENT = 5, 9, 13
MIDDLE = 2
"""A query that is not the last token."""
REPEATED = torch.tensor([TOKENS[:3] * 2])
"""A prompt whose tokens occur twice."""


class Setting:
    """What a question is put to: a model, passes of it, and what is made from them when it is needed.

    A change that happens after freezing is made between `freeze` and the questions; what is made from a pass or from
    weights (an operator, a plan) is then made by the question.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def freeze(self) -> None:
        """Make both passes now, before the model is changed further."""
        self.frozen, self.corrupted = self._pass(TOKENS), self._pass(CORRUPTED)

    def _pass(self, tokens: list[int]) -> Any:
        return tlens.freeze(self.model, torch.tensor([tokens]))

    @property
    def op(self) -> Any:
        """The operator, of the pass's weights at the moment of the question."""
        return self.frozen.operator()

    @property
    def found(self) -> Any:
        """Features of a dictionary between the two blocks."""
        return circuits.features(self.frozen, self.dictionary(0), "blocks.0.hook_resid_post")

    @property
    def late(self) -> Any:
        """Features of another dictionary after both."""
        return circuits.features(self.frozen, self.dictionary(1), "blocks.1.hook_resid_post")

    @property
    def head(self) -> Any:
        """One head by itself."""
        return circuits.head_map(self.frozen, 0, 2)

    @property
    def plan(self) -> Any:
        """A compression of both layers."""
        return compress.plan(self.model, ratio=2, method="head-svd")

    @property
    def generated(self) -> Any:
        """A prompt of four tokens, and the two that follow as its continuation."""
        return generation.freeze_generation(self.model, torch.tensor([TOKENS[:4]]), continuation=[TOKENS[4:]])

    def dictionary(self, seed: int) -> Any:
        """A sparse autoencoder of random weights, in the model's dtype."""
        draw = torch.Generator().manual_seed(seed)
        like = next(self.model.parameters())
        width = self.model.cfg.d_model
        make = lambda *shape: torch.randn(*shape, generator=draw).to(like)  # noqa: E731
        # an encoder with large biases: which features are active must not hang on rounding
        return SimpleNamespace(
            W_enc=0.05 * make(width, 12),
            b_enc=3 * make(12).sign(),
            W_dec=0.3 * make(12, width),
            b_dec=0.3 * make(width),
        )

    @property
    def pairs(self) -> Any:
        """One pair of prompts."""
        one = partial(torch.tensor, dtype=torch.long)
        return evaluate.PromptPairs("a pair", one([TOKENS]), one([CORRUPTED]), one([TARGET]), one([MINUS]))

    @property
    def task(self) -> Any:
        """One prompt with a source that is said to be known."""
        sources = torch.arange(len(TOKENS))[None] == MIDDLE
        return evaluate.KnownAnswers("one prompt", torch.tensor([TOKENS]), torch.tensor([TARGET]), sources)

    @property
    def tasks(self) -> Any:
        """Three prompts: what chooses by some of them and measures on the others needs several."""
        rows = torch.tensor([TOKENS, CORRUPTED, TOKENS[::-1]])
        sources = (torch.arange(len(TOKENS))[None] == MIDDLE).expand(3, -1)
        return evaluate.KnownAnswers("three prompts", rows, torch.tensor([TARGET] * 3), sources)

    @property
    def components(self) -> Any:
        """The pair, with components that are said to be known."""
        path = ((("embed", MIDDLE), ("L0H0", 5)),)
        edge = frozenset({"embed → L0H0.v", "L0H0 → target"})
        return evaluate.KnownComponents("a pair", self.pairs, (path,), frozenset({"embed", "L0H0"}), edge)

    @property
    def attention(self) -> Any:
        """The prompt, with a choice of one head that is said to be known."""
        place, sources = torch.tensor([5]), (frozenset({MIDDLE}),)
        part = frozenset({"embed"})
        choice = evaluate.KnownChoice(1, 0, place, torch.tensor([MIDDLE]), sources, sources, part, part)
        return evaluate.KnownAttention("one prompt", torch.tensor([TOKENS]), (choice,))


SUBJECTS: dict[str, Callable[[Setting], Any]] = {
    "model": lambda s: s.model,
    "frozen": lambda s: s.frozen,
    "clean": lambda s: s.frozen,
    "corrupted": lambda s: s.corrupted,
    "op": lambda s: s.op,
    "m": lambda s: s.op,
    "found": lambda s: s.found,
    "early": lambda s: s.found,
    "late": lambda s: s.late,
    "record": lambda s: s.frozen,
}
"""Parameters that are a model, a pass, or something made from one: a function that has one of them is a question."""

TYPES = ("FrozenPass", "PassLike", "ModelLike", "HookedModel", "ModelView", "Record")
"""Types whose parameters make a function a question whatever their names."""

ARGUMENTS: dict[str, Callable[[Setting], Any]] = {
    "target": lambda s: TARGET,
    "minus": lambda s: MINUS,
    "layer": lambda s: 1,
    "head": lambda s: 2,
    "kind": lambda s: "V",
    "heads": lambda s: [(0, 1), (1, 2)],
    "feature": lambda s: int(s.found.index[-1, 2]),
    "features": lambda s: [int(s.found.index[-1, 2])],
    "dictionary": lambda s: s.dictionary(0),
    "circuits": lambda s: [circuits.edge_scores(s.frozen, s.corrupted, TARGET, MINUS).circuit(20)],
    "x": lambda s: 1.1 * s.op.x,
    "plan": lambda s: s.plan,
    "plans": lambda s: [s.plan],
    "task": lambda s: s.task,
    "pairs": lambda s: s.pairs,
    "prompts": lambda s: torch.tensor([TOKENS]),
    "prompt": lambda s: torch.tensor([TOKENS[:4]]),
    "input": lambda s: torch.tensor([TOKENS]),
    "rows": lambda s: [TOKENS],
    "out": lambda s: tempfile.mkdtemp(),
}
"""What is passed for a parameter that has no default; for `ALWAYS`, also for one that has."""

ALWAYS: dict[str, Callable[[Setting], Any]] = {
    "target": ARGUMENTS["target"],
    "minus": ARGUMENTS["minus"],
    "continuation": lambda s: [TOKENS[4:]],
    "steps": lambda s: 3,
    "draws": lambda s: 1,
    "progress": lambda s: False,
    "only_correct": lambda s: False,
    "threshold": lambda s: 0.0,
    "normalize": lambda s: False,
    "hook": lambda s: "blocks.0.hook_resid_post",
}
"""Passed wherever a function takes it: questions about a prediction, little work, no choice that hangs on rounding."""

VARIANTS: dict[str, tuple[Any, ...]] = {
    "rule": FROZEN_RULES[1:],
    "live": (True,),
    "query": (MIDDLE,),
    "collapse": ("in_out", "norm"),
    "of": ("probability",),
    "attention": ("live",),
}
"""Parameters that choose a way: one more question for each of these values, where a function takes it."""

SAME = {
    "rule": ("method ", "FrozenPass.block", "circuits.logit_attribution", "circuits.total_effects"),
    "query": ("method ", "FrozenOperator.target", "circuits.logit_attribution", "circuits.total_effects"),
    "of": ("method ",),
}
"""Where a way of so many functions is the way of one operator, it is tried in these alone."""

CALLS: dict[str, Callable[[Setting], Any]] = {
    # a pass and its operator
    "FrozenPass.operator": lambda s: s.op.map,
    "FrozenPass.fwd_hooks": lambda s: s.model.run_with_hooks(torch.tensor([TOKENS]), fwd_hooks=s.frozen.fwd_hooks()),
    "FrozenPass.attached": lambda s: _attached(s),
    "FrozenPass.logits": lambda s: s.frozen.logits([MIDDLE, -1]),
    "FrozenPass.norm": lambda s: s.frozen.maps.norm(1, "ln1"),
    "FrozenOperator.push": lambda s: s.op.push(1.1 * s.op.x),
    "FrozenOperator.pull": lambda s: s.op.pull(1.1 * s.op.x),
    "FrozenOperator.T": lambda s: s.op.T,
    "FrozenOperator.dense": lambda s: s.op.dense(),
    "passes.freeze": lambda s: tlens.freeze(s.model, torch.tensor([TOKENS])).operator().map,
    "passes.freeze [patterns=recompute]": lambda s: (
        tlens.freeze(s.model, torch.tensor([TOKENS]), patterns="recompute").operator().map
    ),
    "passes.freeze [verify=sample]": lambda s: (
        tlens.freeze(s.model, torch.tensor([TOKENS]), verify="sample").operator().map
    ),
    "registry.attribute": lambda s: tlens.attribute(s.model, torch.tensor([TOKENS]), target=TARGET, minus=MINUS),
    # methods
    # its total is the change between two runs, and not the model's number
    "method difference": lambda s: tlens.attribute(s.frozen, TARGET, method="difference").scores,
    "method difference [query=2]": lambda s: tlens.attribute(s.frozen, TARGET, method="difference", query=2).scores,
    "method leave-one-out": lambda s: _leave_one_out(s, "logit"),
    "method leave-one-out [of=probability]": lambda s: _leave_one_out(s, "probability"),
    "method leave-one-out [replacement=delete]": lambda s: tlens.attribute(
        s.frozen, method="leave-one-out", target=TARGET, minus=MINUS, replacement="delete"
    ),
    # circuits
    "circuits.edge_scores": lambda s: circuits.edge_scores(s.frozen, s.corrupted, TARGET, MINUS),
    "circuits.edge_scores [method=frozen]": lambda s: circuits.edge_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="frozen"
    ),
    "circuits.edge_scores [method=gradient]": lambda s: circuits.edge_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="gradient"
    ),
    "circuits.edge_scores [method=integrated-gradients]": lambda s: circuits.edge_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="integrated-gradients", steps=3
    ),
    "circuits.edge_scores [method=measured]": lambda s: circuits.edge_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="measured"
    ),
    "circuits.edge_scores [method=patching]": lambda s: circuits.edge_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="patching"
    ),
    # as of `difference` above
    "circuits.patch_scores": lambda s: circuits.patch_scores(s.frozen, s.corrupted, TARGET, MINUS).scores,
    "circuits.patch_scores [method=frozen]": lambda s: circuits.patch_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="frozen"
    ),
    "circuits.patch_scores [method=gradient]": lambda s: circuits.patch_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="gradient"
    ),
    "circuits.patch_scores [method=measured]": lambda s: circuits.patch_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="measured"
    ),
    "circuits.patch_scores [method=atp*]": lambda s: circuits.patch_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="atp*"
    ),
    "circuits.patch_scores [method=patching]": lambda s: circuits.patch_scores(
        s.frozen, s.corrupted, TARGET, MINUS, method="patching"
    ),
    "circuits.logit_attribution [by=head]": lambda s: circuits.logit_attribution(s.frozen, TARGET, MINUS, by="head"),
    "circuits.logit_attribution [by=neuron]": lambda s: circuits.logit_attribution(
        s.frozen, TARGET, MINUS, by="neuron"
    ),
    "circuits.logit_attribution [by=head_token]": lambda s: circuits.logit_attribution(
        s.frozen, TARGET, MINUS, by="head_token"
    ),
    "circuits.qk_attribution [by=component]": lambda s: circuits.qk_attribution(s.frozen, 1, 2, by="component"),
    "circuits.previous_token_scores": lambda s: circuits.previous_token_scores(s.model, REPEATED).scores,
    "circuits.duplicate_token_scores": lambda s: circuits.duplicate_token_scores(s.model, REPEATED).scores,
    "circuits.induction_scores": lambda s: circuits.induction_scores(s.model, REPEATED).scores,
    "circuits.singular_directions": lambda s: circuits.singular_directions(s.op).values,
    "circuits.svd_tokens": lambda s: _singular_values(circuits.svd_tokens(s.model, 1, 2)),
    "circuits.as_scipy": lambda s: circuits.as_scipy(s.op) @ s.op.x.flatten().double().numpy(),
    "circuits.features": lambda s: s.found.values,
    "circuits.feature_examples": lambda s: (
        circuits.feature_examples(
            s.model, s.dictionary(0), torch.tensor([TOKENS]), hook="blocks.0.hook_resid_post", k=1
        ).activations
    ),
    "circuits.top_paths": lambda s: circuits.top_paths(s.frozen, TARGET, MINUS, k=200, width=400),
    # text that was written
    "generation.freeze_generation": lambda s: s.generated.frozen.operator().map,
    # compression
    "compress.plan": lambda s: s.plan.weights(),
    "Plan.weights": lambda s: s.plan.weights(),
    "Plan.applied": lambda s: _with_plan(s),
    "Plan.copied": lambda s: s.plan.copied()(torch.tensor([TOKENS])),
    "compress.head_weights": lambda s: _products(compress.head_weights(s.model, 1)),
    "compress.shared_tucker": lambda s: compress.shared_tucker(s.model, 1, ratio=2),
    "compress.sharing": lambda s: compress.sharing(s.model, baseline=None),
    # evaluations
    "evaluate.agreement": lambda s: evaluate.agreement(s.model, torch.tensor([TOKENS]), SOME),
    "evaluate.completeness": lambda s: evaluate.completeness(s.model, torch.tensor([TOKENS]), SOME[:1]).values < 1e-3,
    "evaluate.known_answer": lambda s: evaluate.known_answer(s.model, s.task, SOME, only_correct=False),
    "evaluate.known_components": lambda s: evaluate.known_components(
        s.model, s.components, ["frozen", "patching"], only_correct=False
    ),
    "evaluate.known_attention": lambda s: evaluate.known_attention(s.model, s.attention),
    "evaluate.perturbation": lambda s: evaluate.perturbation(
        s.model, torch.tensor([TOKENS]), SOME, replacement=3, fractions=(0.0, 0.5)
    ),
    "evaluate.perturbation_dataset": lambda s: evaluate.perturbation_dataset(
        s.model, [TOKENS], tempfile.mkdtemp(), SOME, replacement=3, fractions=(0.0, 0.5), progress=False
    ).evaluation(),
    "evaluate.randomisation": lambda s: evaluate.randomisation(s.model, torch.tensor([TOKENS]), SOME[:1]),
    "evaluate.stability": lambda s: evaluate.stability(s.model, torch.tensor([TOKENS]), SOME[:1], draws=1),
    "evaluate.compression": lambda s: evaluate.compression(s.model, s.tasks, {"svd": s.plan}),
    "evaluate.circuit_faithfulness": lambda s: evaluate.circuit_faithfulness(
        s.model, s.pairs, ["gradient"], proportions=(0.2, 1.0), only_correct=False
    ),
    "evaluate.patching_agreement": lambda s: evaluate.patching_agreement(
        s.model, s.pairs, ["frozen"], only_correct=False
    ),
    "evaluate.predictions": lambda s: evaluate.predictions(s.frozen)[1],
    # data sets
    "datasets.attribute_dataset": lambda s: _rows(s, target=TARGET, minus=MINUS),
    "datasets.attribute_dataset [method=total_effects]": lambda s: _rows(
        s, method="total_effects", target=TARGET, minus=MINUS
    ),
    "BatchAttributor": lambda s: _columns(s),
    # the stream
    "whitening.measure": lambda s: whitening.measure(
        s.model, torch.tensor([TOKENS, CORRUPTED, TOKENS[::-1], CORRUPTED[::-1]])
    ),
    "whitening.stream_filters": lambda s: list(whitening.stream_filters(s.model, torch.tensor([TOKENS] * 3)).values()),
    # contextualisation
    "contextualisation.context_change": lambda s: contextualisation.context_change(s.frozen, "atb", "atb_ln_ff"),
    "contextualisation.ff_amp": lambda s: contextualisation.ff_amp(s.frozen, "atb", "atb_ln"),
    "layerwise.implicit_attention": lambda s: tlens.implicit_attention(s.frozen, 1),
    "layerwise.locals_of": lambda s: tlens.layerwise.locals_of(s.frozen),
    "testing.check_model": lambda s: tlens.testing.check_model(s.model, torch.tensor([TOKENS])).layouts and None,
    "testing.held_output": lambda s: tlens.testing.held_output(s.frozen, 1.1 * s.op.x),
}
"""How what cannot be derived from a signature is called; ``name [option=value]`` is a question besides."""

SOME = ["tensorlens target", "input-x-gradient"]

LEFT_OUT = {
    "hooks.": "plumbing of the hooks, seen through freeze and attached",
    "models.": "reads modules, seen through freeze",
    "testing.": "for tests of maps and methods; check_model is asked",
    "demo.": "the bundled models",
    "passes.patch_embedding": "models of images",
    "passes.pixel_scores": "models of images",
    "passes.difference": "two runs: test_difference",
    "passes.freeze_changed": "the other run of a difference: test_difference",
    "passes.check_explained": "a check",
    "layerwise.refuse_whitened": "a check",
    "layerwise.select_query": "an index",
    "layerwise.attentions_of": "seen through the methods of layer maps",
    "layerwise.by_attention": "seen through the methods of layer maps",
    "layerwise.side_by_side": "seen through the methods of layer maps",
    "layerwise.mean_of_layers": "a mean",
    "layerwise.of_layers": "seen through the methods of layer maps",
    "layerwise.only_acting": "a product",
    "evaluate.text_": "reads texts; what it gives is asked",
    "evaluate.few_shot_prompts": "writes prompts",
    "evaluate.language_task": "writes pairs of prompts",
    "evaluate.relation_decoding": "needs a tokenizer and text; frozen.operator and its block maps are asked",
    "evaluate.reproduce": "runs other evaluations, which are asked",
    "evaluate.published": "the paper's numbers",
    "explorer.": "a page of the numbers that are asked here",
    "report.": "pages of the numbers that are asked here",
    "whitening.whiten": "changes a model",
    "methods.": "the functions of registered methods, asked by name",
    "registry.register": "a decorator",
    "registry.list_methods": "names, by the requirements that methods check themselves",
    "circuits.compare_models": "two models that are changed apart: test_compare_models",
    "contextualisation.top_pairs": "the largest of what is asked",
    "algebra.": "maps, which a pass or an operator is asked for",
}  # fmt: skip
"""Public functions that take a model or a pass and are no question, by name or by what it begins with, and why."""

KEPT = {
    "testing.check_model",
    "testing.held_output",
    "methods.flow_edges",
    "methods.head_norms",
    "methods.mixing_ratio",
}
"""Questions among what `LEFT_OUT` leaves out as a whole."""

CLASSES: dict[str, tuple[type, Callable[[Setting], Any]]] = {
    "FrozenPass": (tlens.FrozenPass, lambda s: s.frozen),
    "FrozenOperator": (tlens.FrozenOperator, lambda s: s.op),
    "FrozenGeneration": (generation.FrozenGeneration, lambda s: s.generated),
    "HeadMap": (circuits.HeadMap, lambda s: s.head),
    "Features": (circuits.Features, lambda s: s.found),
    "Plan": (compress.Plan, lambda s: s.plan),
}
"""Classes that hold a pass or a plan: their methods and properties are questions too."""

PARTS = {
    "FrozenPass": (
        "activation", "allowed_gap", "capture", "causal", "check_fresh", "checked", "cross_pattern", "cut",
        "errors", "final_map", "inputs", "layouts", "live", "logit_vectors", "mask", "model", "n_layers", "noise",
        "other_hooks", "points", "prediction_head", "prompt", "provenance", "routing", "row_bytes", "runs", "sides",
        "stages", "str_tokens", "tokens", "tolerance", "unembedding_error", "view", "with_capture",
    ),
    "FrozenOperator": ("of", "x", "end"),
    "FrozenGeneration": ("difference", "generated_ranges", "label", "real", "texts"),
    "HeadMap": (),
    "Features": (
        "pre_activation", "reader", "writer", "gains", "active_per_token", "explained", "top", "value", "checked",
        "heading", "load", "plot", "save", "show", "to_csv", "to_dataframe", "to_html", "FACTS", "LATER_FACTS",
        "LOADABLE", "TENSORS",
    ),
    "Plan": ("before", "check_fits", "label", "load", "parameters", "ratio", "save"),
}  # fmt: skip
"""Members that are facts, or parts of the maps that are asked about as a whole."""


@dataclass(frozen=True)
class Question:
    """A public function, and how it is asked here.

    Attributes:
        name: ``package.function``, ``Class.method`` or ``method NAME``, and in brackets the way that it was told to go.
        ask: calls it on a setting.
        of: ``"pass"`` for what is put to a frozen pass, ``"model"`` for what freezes or runs the model itself,
            ``"weights"`` for what reads weights and no run.
    """

    name: str
    ask: Callable[[Setting], Any]
    of: str

    @cached_property
    def function(self) -> str:
        """Without the way."""
        return self.name.split(" [")[0]

    @property
    def middle(self) -> bool:
        """Whether it is about the query in the middle."""
        return f"query={MIDDLE}" in self.name

    @property
    def gathers(self) -> bool:
        """Whether it is about several prompts that run together: a hook on one row is then on one of them."""
        return self.function in SEVERAL

    @property
    def runs(self) -> bool:
        """Whether the caller runs the held model, with the hooks that are on it then."""
        return self.function in ("FrozenPass.attached", "FrozenPass.fwd_hooks", "testing.held_output")

    @property
    def heavy(self) -> bool:
        """Whether it is many of the others, one after another."""
        return self.function.startswith(("evaluate.", "testing.", "datasets.", "Plan.copied")) and self.of == "model"


SEVERAL = ("evaluate.compression", "whitening.measure", "whitening.stream_filters")

WEIGHTS = (
    "circuits.ov", "circuits.qk", "circuits.full_ov", "circuits.full_qk", "circuits.ov_eigenvalues",
    "circuits.copying_scores", "circuits.composition_scores", "circuits.virtual_head", "circuits.svd_tokens",
    "compress.head_weights", "compress.plan", "compress.shared_tucker", "compress.sharing", "Plan.weights",
)  # fmt: skip
"""What reads weights alone: a hook on activations is no part of it."""


def questions() -> list[Question]:
    """All of them, from the public surface."""
    found = {question.name: question for question in (*_of_methods(), *_of_functions(), *_of_members())}
    for name, ask in CALLS.items():
        found.setdefault(name, Question(name, ask, _kind(name, None)))
    return list(found.values())


def unknown() -> dict[str, str]:
    """Public functions that nobody has said how to call, and which parameter is not known."""
    lacking = {}
    for name, function in _public():
        if name in CALLS or name.startswith("method "):
            continue
        missing = [parameter for parameter in _required(function) if parameter not in ARGUMENTS | SUBJECTS]
        if missing:
            lacking[name] = ", ".join(missing)
    return lacking


def _of_methods() -> Iterator[Question]:
    for method in tlens.list_methods():
        options, name = tlens.get_method(method).options, f"method {method}"
        call = partial(_attribute, method=method, options=options)
        for label, extra in _ways(name, options):
            named = f"{name}{label}"
            yield Question(named, CALLS.get(named) or partial(call, extra=extra), "pass")


def _attribute(s: Setting, method: str, options: dict[str, Any], extra: dict[str, Any]) -> Any:
    fixed = {name: value(s) for name, value in ALWAYS.items() if name in options}
    if extra.get("collapse"):  # a norm or In+Out explains no token
        fixed = {name: value for name, value in fixed.items() if name not in ("target", "minus")}
    return tlens.attribute(s.frozen, method=method, **fixed | extra)


def _of_functions() -> Iterator[Question]:
    for name, function in _public():
        parameters = inspect.signature(function).parameters
        if name in CALLS or name in unknown():
            if name in CALLS:
                yield Question(name, CALLS[name], _kind(name, function))
            continue
        for label, extra in _ways(name, parameters):
            if f"{name}{label}" not in LEFT_OUT:
                yield Question(f"{name}{label}", partial(_call, function=function, extra=extra), _kind(name, function))


def _call(s: Setting, function: Callable[..., Any], extra: dict[str, Any]) -> Any:
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        given = SUBJECTS.get(name) or ALWAYS.get(name)
        if given is None and parameter.default is parameter.empty:
            given = ARGUMENTS[name]
        if given is not None:
            arguments[name] = given(s)
    return function(**arguments | extra)


def _of_members() -> Iterator[Question]:
    for owner, (cls, make) in CLASSES.items():
        for member in dir(cls):
            static = inspect.getattr_static(cls, member)
            name = f"{owner}.{member}"
            if member.startswith("_") or member in PARTS[owner] or static is None:
                continue
            if name in CALLS:
                yield Question(name, CALLS[name], _kind(name, None))
            elif callable(static):
                for label, extra in _ways(name, inspect.signature(static).parameters):
                    ask = partial(_member, make=make, member=member, extra=extra)
                    yield Question(f"{name}{label}", ask, _kind(name, None))
            else:
                yield Question(name, partial(_value, make=make, member=member), _kind(name, None))


def _member(s: Setting, make: Callable[[Setting], Any], member: str, extra: dict[str, Any]) -> Any:
    return _call(s, getattr(make(s), member), extra)


def _value(s: Setting, make: Callable[[Setting], Any], member: str) -> Any:
    return getattr(make(s), member)


def _ways(name: str, parameters: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {}
    for option, values in VARIANTS.items():
        if option in parameters and name.startswith(SAME.get(option, "")):
            default = getattr(parameters[option], "default", parameters[option])
            for value in values:
                if value != default:
                    yield f" [{option}={value}]", {option: value}


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function that takes a model, a pass, or what is made from one."""
    packages = {name: thing for name in tlens.__all__ if inspect.ismodule(thing := getattr(tlens, name))}
    for package, module in (packages | {"contextualisation": contextualisation}).items():
        for name in getattr(module, "__all__", None) or _defined(module):
            function, full = getattr(module, name), f"{package}.{name}"
            left_out = any(full.startswith(start) for start in LEFT_OUT) and full not in KEPT
            if inspect.isfunction(function) and not left_out and _takes_a_model(function):
                yield full, function


def _defined(module: Any) -> list[str]:
    return [
        name
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and name[0] != "_"
    ]


def _takes_a_model(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        parameter.name in SUBJECTS or any(kind in str(parameter.annotation) for kind in TYPES)
        for parameter in parameters
    )


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _kind(name: str, function: Callable[..., Any] | None) -> str:
    plain = name.split(" [")[0]
    if plain in WEIGHTS:
        return "weights"
    of_model = function is not None and "model" in inspect.signature(function).parameters
    of_model |= plain.startswith(("FrozenGeneration", "Plan", "BatchAttributor", "evaluate.", "datasets.", "passes."))
    of_model |= plain in ("generation.freeze_generation", "registry.attribute")
    return "model" if of_model and plain != "evaluate.predictions" else "pass"


# ------------------------------------------------------------------ longer calls


def _attached(s: Setting) -> Any:
    with s.frozen.attached() as model, torch.no_grad():
        return model(torch.tensor([TOKENS]))


def _leave_one_out(s: Setting, of: str) -> Any:
    options = {"replacement": REPLACEMENT, "of": of, "target": TARGET, "minus": MINUS}
    return tlens.attribute(s.frozen, method="leave-one-out", **options)


def _with_plan(s: Setting) -> Any:
    with s.plan.applied() as model, torch.no_grad():
        return model(torch.tensor([TOKENS]))


def _products(weights: Any) -> Any:
    """Heads' circuits: what does not hang on how a head's inner basis is chosen."""
    return {name: getattr(weights, name) for name in ("Q", "K", "V", "O") if hasattr(weights, name)}


def _singular_values(table: Any) -> Any:
    """Without the tokens, whose order rounding decides."""
    return [[float(value) for value in row] for row in table["singular_values"]]


def _rows(s: Setting, **options: Any) -> Any:
    results = tlens.attribute_dataset(s.model, [TOKENS], tempfile.mkdtemp(), progress=False, **options)
    failed = results.errors()
    if len(failed):
        raise tlens.InvalidInputError(str(failed.iloc[0].to_dict()))
    return [result for _, result in results]


def _columns(s: Setting) -> Any:
    table = tlens.BatchAttributor(lambda: s.model, target=TARGET, minus=MINUS)({"id": ["0"], "text": [TOKENS]})
    row = table.to_pandas().iloc[0]
    if isinstance(row["error"], str) and row["error"]:
        raise tlens.InvalidInputError(row["error"])
    return {name: row[name] for name in ("scores", "bias", "total")}
