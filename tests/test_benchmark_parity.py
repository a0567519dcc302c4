"""The numbers of the Mechanistic Interpretability Benchmark: circuits and areas against two independent computations.

One reads the benchmark's JSON and chooses, prunes and integrates as its text says, edge by edge; the other is
TransformerLens' own `faithfulness` (from 4.3 on), which runs a circuit by hooks at split inputs.
"""

import json
from functools import partial

import pytest
import torch
from conftest import close

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate

EAP_IG = "integrated-gradients, left"


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model("recall", torch.float64, kind="bridge")


@pytest.fixture(scope="module")
def pairs():
    return evaluate.prompt_pairs(evaluate.recall(6, seed=3), "question")


@pytest.fixture(scope="module")
def passes(model, pairs):
    return tlens.freeze(model, pairs.clean), tlens.freeze(model, pairs.corrupted)


@pytest.fixture(scope="module")
def question(pairs):
    return {"target": pairs.target.tolist(), "minus": pairs.minus.tolist()}


@pytest.fixture(scope="module")
def scores(passes, question):
    return circuits.edge_scores(*passes, **question, method="integrated-gradients", points="left")


def node_of(end):
    """The node that an end of an edge belongs to: ``a0.h1`` of ``a0.h1<q>``."""
    return end.split("<")[0]


def pruned_literally(chosen):
    """Edges whose nodes have edges in and out, taken away until nothing changes; the input and the logits stay."""
    edges = set(chosen)
    while True:
        into = {node_of(end) for _, end in edges} | {"input"}
        out_of = {start for start, _ in edges}
        alive = into & out_of
        left = {(start, end) for start, end in edges if start in alive and (end == "logits" or node_of(end) in alive)}
        if left == edges:
            return edges
        edges = left


def chosen_literally(content, count, absolute):
    """The best edges of a file, pruned."""
    scored = {tuple(name.split("->")): edge["score"] for name, edge in content["edges"].items()}
    size = abs if absolute else float
    best = sorted(scored, key=lambda edge: -size(scored[edge]))[:count]
    return pruned_literally(best)


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("share", evaluate.PROPORTIONS)
def test_circuits_are_chosen_and_pruned_as_in_its_files(scores, tmp_path, absolute, share):
    count = int(share * len(scores))
    circuit = scores.circuit(count, absolute=absolute)
    content = json.loads(circuit.save(tmp_path / "c.json").read_text())
    in_graph = {tuple(name.split("->")) for name, edge in content["edges"].items() if edge["in_graph"]}
    assert in_graph == chosen_literally(content, count, absolute)
    assert len(in_graph) == len(circuit)
    used = {start for start, _ in in_graph}
    assert {name for name, node in content["nodes"].items() if node["in_graph"]} == used | {"logits"}


def test_gradients_stand_at_the_left_ends(model, pairs, passes, question, scores):
    """The mean over k = 0 … 4 of EAP with its gradient at corrupted + k/5 · (clean − corrupted) of the embeddings."""
    clean, corrupted = passes
    one = circuits.edge_scores(*passes, **question, method="integrated-gradients", points="left", steps=1)
    target, minus = pairs.target, pairs.minus
    x_clean, x_corrupted = clean.resid_pre(0), corrupted.resid_pre(0)
    hook = "blocks.0.hook_resid_pre"
    total = 0
    for k in range(5):
        x = (x_corrupted + k / 5 * (x_clean - x_corrupted)).requires_grad_()
        logits = model.run_with_hooks(pairs.clean, fwd_hooks=[(hook, lambda _, hook, x=x: x)])[:, -1]
        rows = torch.arange(len(pairs))
        value = (logits[rows, target] - logits[rows, minus]).sum()
        (gradient,) = torch.autograd.grad(value, x)
        effect = ((x_clean - x_corrupted) * gradient).sum((1, 2))
        total = total + effect / 5
        if k == 0:
            first = effect
    # the input's edges sum to what the gradient at the embeddings says of the whole input
    assert close(input_edges(one), first, 1e-9)
    assert close(input_edges(scores), total, 1e-9)


def input_edges(scores):
    return scores.scores[:, scores.sources.index("embed")].sum(-1)


def test_the_preset_gives_areas_of_means_over_all_pairs(model, pairs, passes, question, scores):
    result = evaluate.circuit_faithfulness(model, pairs, [EAP_IG], **evaluate.MIB_OPTIONS)
    assert len(result.units) == len(pairs)
    assert result.settings["dropped"] == 0
    area = {}
    for metric, absolute in (("cpr", False), ("cmd", True)):
        values = []
        for share in evaluate.PROPORTIONS:
            circuit = scores.circuit(int(share * len(scores)), absolute=absolute)
            value = float(circuits.run_circuits(*passes, circuit, **question).mean())
            low, high = float(scores.corrupted.mean()), float(scores.clean.mean())
            faithful = (value - low) / (high - low)
            values.append(abs(1 - faithful) if absolute else faithful)
        area[metric] = sum(
            (b - a) * (v + w) / 2
            for a, b, v, w in zip(evaluate.PROPORTIONS, evaluate.PROPORTIONS[1:], values, values[1:], strict=False)
        )
    for metric, expected in area.items():
        assert result.mean(metric, EAP_IG) == pytest.approx(expected, abs=1e-9)


def test_the_preset_counts_pairs_that_are_answered_wrongly(model, pairs):
    wrong = evaluate.PromptPairs("wrong", pairs.clean, pairs.corrupted, pairs.minus, pairs.target)
    with pytest.raises(tlens.InvalidInputError, match="only_correct=False"):
        evaluate.circuit_faithfulness(model, wrong, ["gradient"])
    assert len(evaluate.circuit_faithfulness(model, wrong, ["gradient"], **evaluate.MIB_OPTIONS).units) == len(pairs)


def tl_edges(module, circuit, length, layers):
    """A circuit's edges at every position, as TransformerLens names nodes."""
    names = [edge.split(" → ") for edge in circuit.edges]
    return [
        (tl_node(module, source, at, layers), tl_node(module, end, at, layers))
        for source, end in names
        for at in range(length)
    ]


def tl_node(module, name, position, layers):
    node = partial(module.Node, position=position)
    if name == "embed":
        return node("embed")
    if name == "target":
        return node("logits", layer=layers - 1)
    if name.startswith("MLP"):
        return node("mlp_out", layer=int(name[3:]))
    head, _, letter = name.partition(".")
    layer, number = map(int, head[1:].split("H"))
    if letter:
        return node(f"{letter}_input", layer=layer, head=number)
    return node("attn_head_out", layer=layer, head=number)


def read_by(module, edge):
    """The same edge with its MLP as a reader."""
    source, end = edge
    if end.kind == "mlp_out":
        end = module.Node("mlp_in", position=end.position, layer=end.layer)
    return source, end


@pytest.mark.parametrize("count", [0, 6, 25, 110])
def test_circuits_run_as_transformerlens_runs_them(model, pairs, passes, question, scores, count):
    module = pytest.importorskip("transformer_lens.tools.analysis.attribution_patching")
    if not hasattr(module, "faithfulness"):
        pytest.skip("this TransformerLens has no faithfulness()")
    circuit = scores.circuit(count)
    ours = circuits.run_circuits(*passes, circuit, **question)[0]
    length = pairs.clean.shape[1]
    edges = [read_by(module, edge) for edge in tl_edges(module, circuit, length, model.cfg.n_layers)]
    for number in range(3):
        answer, other = int(pairs.target[number]), int(pairs.minus[number])
        result = module.faithfulness(
            model,
            pairs.clean[number : number + 1],
            pairs.corrupted[number : number + 1],
            lambda logits, a=answer, b=other: logits[0, -1, a] - logits[0, -1, b],
            edges,
        )
        gap = result.full_metric - result.corrupt_metric
        assert result.total_edges == len(scores) * length
        assert float(scores.clean[number]) == pytest.approx(result.full_metric, abs=1e-9)
        assert float(scores.corrupted[number]) == pytest.approx(result.corrupt_metric, abs=1e-9)
        assert float(ours[number]) == pytest.approx(result.corrupt_metric + result.recovered * gap, abs=1e-9)
