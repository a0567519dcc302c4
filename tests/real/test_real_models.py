"""Two trained models, by the jobs that users have for them: `make real`.

Every expected value is computed here by Hugging Face's own model, by itself or under hooks of this file. In float32 and
bfloat16 a sum may be off by what that model itself rounds there: by how far its logits are from its own in float64.
"""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from conftest import bridge_of
from real.prompts import KNOWN, PROMPTS
from test_features import Dictionary
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import tensorlens_tl as tlens
from scripts.real_models import FOLDER, MODELS
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.circuits import compare
from tensorlens_tl.datasets import running
from tensorlens_tl.explorer import Explorer, Session
from tensorlens_tl.generation import freeze_generation

if "TENSORLENS_TEST_THREADS" not in os.environ:  # these tests run in one process
    torch.set_num_threads(os.cpu_count() or 1)


class Real:
    """One model in any precision. The last of each kind is held, so that tests of one precision load it once."""

    def __init__(self, name):
        self.name = name
        self.folder = str(FOLDER / name)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self._held = {}
        self._logits = {}

    def bridge(self, dtype=torch.float32):
        return self._load("bridge", dtype, TransformerBridge.boot_transformers)

    def own(self, dtype=torch.float32):
        """Hugging Face's own model, which no test leaves a hook on."""
        return self._load("own", dtype, AutoModelForCausalLM.from_pretrained, attn_implementation="eager")

    def _load(self, kind, dtype, load, **options):
        if self._held.get(kind, (None,))[0] is not dtype:
            self._held.pop(kind, None)
            self._held[kind] = dtype, load(self.folder, dtype=dtype, **options)
        return self._held[kind][1]

    def ids(self, prompt):
        """Token ids of a text, behind the mark of its beginning, or of messages."""
        if isinstance(prompt, str):
            return [self.tokenizer.bos_token_id, *self.tokenizer(prompt, add_special_tokens=False).input_ids]
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        turns = [f"<start_of_turn>{turn['role']}\n{turn['content']}<end_of_turn>\n" for turn in prompt]
        return self.ids("".join(turns) + "<start_of_turn>model\n")

    def token(self, text):
        (token,) = self.tokenizer(text, add_special_tokens=False).input_ids
        return token

    def logits(self, ids, dtype=torch.float32):
        """What the model says after these tokens, by itself and without padding."""
        key = tuple(ids), dtype
        if key not in self._logits:
            with torch.no_grad():
                self._logits[key] = self.own(dtype)(torch.tensor([ids])).logits[0, -1].double()
        return self._logits[key]

    def change(self, texts, target, minus):
        """By how much a difference of two logits differs between two texts."""
        first, second = (self.logits(self.ids(text)) for text in texts)
        return float((first - second)[target] - (first - second)[minus])

    @cached_property
    def allowed(self):
        """What a sum of a few logits in float32 may be off: some of the model's own rounding there."""
        some = [self.ids(prompt) for prompt in list(PROMPTS.values())[:8]]
        exact = [self.logits(ids, torch.float64) for ids in some]
        return 4 * max(float((self.logits(ids) - other).abs().max()) for ids, other in zip(some, exact, strict=True))


def layers(own):
    return own.model.layers


def sums(result):
    return result.scores.double().sum(-1) + result.bias.double()


@pytest.fixture(scope="session", params=MODELS)
def real(request):
    if not (FOLDER / request.param).exists():
        pytest.skip(f"no {request.param} in {FOLDER}: make real")
    return Real(request.param)


# ------------------------------------------------------------------ sums


BATCH = 11


def padded(rows, side, filler=0):
    """Rows of token ids as one tensor, padded on one side, and its mask."""
    width = max(map(len, rows))
    left = side == "left"
    gaps = [[filler] * (width - len(row)) for row in rows]
    ids = [gap * left + row + gap * (not left) for gap, row in zip(gaps, rows, strict=True)]
    mask = [
        [0] * len(gap) * left + [1] * len(row) + [0] * len(gap) * (not left)
        for gap, row in zip(gaps, rows, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def of_every_kind(real):
    """The prompts' token ids in batches of similar length."""
    rows = sorted(map(real.ids, PROMPTS.values()), key=len)
    assert len(rows) > 40
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
def test_prompts_of_every_kind(real, dtype):
    batches = of_every_kind(real)
    exact = [[real.logits(ids, torch.float64) for ids in rows] for rows in batches]
    own = [[real.logits(ids, dtype) for ids in rows] for rows in batches]
    pairs = [pair for rows in zip(exact, own, strict=True) for pair in zip(*rows, strict=True)]
    rounding = max(float((rounded - logits).abs().max()) for logits, rounded in pairs)  # one prompt may round little
    # of a row that is padded on the left, transformers' own model gives NaN in float64
    sides = itertools.cycle(["right"] if dtype == torch.float64 else ["right", "left"])
    for rows, side, expected in zip(batches, sides, exact, strict=False):
        best = [logits.topk(2).indices.tolist() for logits in expected]
        ids, mask = padded(rows, side)
        frozen = tlens.freeze(real.bridge(dtype), ids, attention_mask=mask)
        one = tlens.attribute(frozen, target=[first for first, _ in best])
        two = tlens.attribute(frozen, target=[first for first, _ in best], minus=[second for _, second in best])
        for row, (logits, (first, second)) in enumerate(zip(expected, best, strict=True)):
            allowed = 2 * rounding
            if dtype == torch.float64:
                allowed = 1e-6 * float(logits.abs().max())  # norms compute in float32 inside
            for result, value in ((one, logits[first]), (two, logits[first] - logits[second])):
                assert abs(float(sums(result)[row]) - float(value)) <= allowed, (real.tokenizer.decode(rows[row]), side)


STATUS = Path("/proc/self/status")
"""What Linux says of this process; other systems have no peak that can be reset."""


def peak(reset=False):
    """The most memory that this process has held since the last reset, in GiB."""
    if not STATUS.exists():
        return float("nan")
    if reset:
        STATUS.with_name("clear_refs").write_text("5")
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    return int(kilobytes) / 2**20


def test_many_tokens(real, capsys):
    """1,024 of them; time and memory are reported."""
    ids = list(itertools.islice(itertools.cycle(real.ids(PROMPTS["several sentences"])), 1024))
    expected = real.logits(ids)
    model, before, started = real.bridge(), peak(reset=True), time.process_time()
    result = tlens.attribute(model, torch.tensor([ids]), target=int(expected.argmax()))
    seconds = time.process_time() - started
    assert abs(float(sums(result)) - float(expected.max())) <= real.allowed
    with capsys.disabled():
        print(f"\n{real.name}, 1,024 tokens: {seconds:.0f} s of processor time, {before:.1f} to {peak():.1f} GiB")


CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"
ANSWER, OTHER = " Paris", " Rome"


class Pair:
    """Two prompts, frozen, and the question that they answer differently."""

    def __init__(self, real):
        self.allowed = real.allowed  # first: it loads the model in float64 in the place of that which hooks go on
        self.question = {"target": real.token(ANSWER), "minus": real.token(OTHER)}
        self.ids = [real.ids(text) for text in (CLEAN, CORRUPTED)]
        self.clean, self.corrupted = (tlens.freeze(real.bridge(), torch.tensor([ids])) for ids in self.ids)
        self.difference = tlens.difference(self.clean, self.corrupted)
        self.change = real.change((CLEAN, CORRUPTED), **self.question)

    def contrast(self, logits):
        return float(logits[self.question["target"]] - logits[self.question["minus"]])


@pytest.fixture(scope="module")
def pair(real):
    return Pair(real)


def hooked(own, ids, *hooks):
    """The last logits of Hugging Face's model with a function on what some modules are given, or give."""
    handles = []
    for module, when, change in hooks:
        if when == "input":
            handles.append(
                module.register_forward_pre_hook(lambda module, args, change=change: (change(args[0]), *args[1:]))
            )
        else:
            handles.append(module.register_forward_hook(lambda module, args, out, change=change: change(out)))
    with torch.no_grad():
        logits = own(torch.tensor([ids])).logits[0, -1].double()
    for handle in handles:
        handle.remove()
    return logits


# ------------------------------------------------------------------ two runs


def test_a_difference_of_two_prompts_by_tokens_routes_edges_and_a_graph(real, pair):
    tokens = tlens.attribute(pair.difference, **pair.question)
    parts = {
        "tokens": sums(tokens),
        "heads": circuits.logit_attribution(pair.difference, **pair.question, by="head").scores.sum(-1),
        "routes": circuits.routes(pair.difference, **pair.question).scores.sum(-1),
    }
    edges = circuits.edge_scores(pair.clean, pair.corrupted, **pair.question, method="difference")
    parts["edges"] = edges.scores[0, :, edges.destinations.index("target")].sum()
    nodes = circuits.patch_scores(pair.clean, pair.corrupted, **pair.question, method="difference")
    parts["embeddings"] = nodes["embed"]
    graph = circuits.contribution_graph(pair.difference, **pair.question, threshold=0.05)
    parts["graph"] = torch.as_tensor(graph.total)
    for name, found in parts.items():
        assert float((found.double() - pair.change).abs().max()) <= real.allowed, name
    assert graph.gap < 1e-3
    for node in ("L3H1", "MLP5"):
        outgoing = edges.scores[0, edges.sources.index(node)].sum()
        assert abs(float(outgoing - nodes[node])) <= real.allowed, node


def test_a_model_with_changed_weights(real, pair):
    changed = copy.deepcopy(real.own())
    with torch.no_grad():
        for number, size in ((2, 1.1), (9, 0.8)):
            layers(changed)[number].mlp.down_proj.weight.mul_(size)
            layers(changed)[number].self_attn.q_proj.weight.mul_(size)
    logits = hooked(changed, pair.ids[0])
    model = bridge_of(changed)
    model.tokenizer = real.tokenizer
    expected = pair.contrast(logits - real.logits(pair.ids[0]))
    change = circuits.compare_models(real.bridge(), model, torch.tensor([pair.ids[0]]), **pair.question)
    assert abs(expected) > 100 * real.allowed
    assert change.remainder is not None
    assert abs(float(change.scores.double().sum() + change.remainder.double().sum()) - expected) <= real.allowed
    moved = {name.split(".")[0] for name, score in zip(change.names, change.scores[0, 0], strict=True) if score != 0}
    assert moved == {"L2", "L9"}


def test_steering(real, pair):
    layer = 9
    stream = real.bridge().blocks[layer].hook_in.name
    vector = (
        0.3
        * pair.clean.resid_pre(layer)[0, -1].norm()
        * torch.nn.functional.normalize(
            torch.randn(real.bridge().cfg.d_model, generator=torch.Generator().manual_seed(0)), dim=0
        )
    )

    def add(x, hook=None):
        return torch.cat([x[:, :-1], x[:, -1:] + vector], dim=1)

    with real.bridge().hooks(fwd_hooks=[(stream, add)]):
        steered = tlens.freeze(real.bridge(), torch.tensor([pair.ids[0]]))
    why = tlens.attribute(tlens.difference(steered, pair.clean), **pair.question)
    live = hooked(real.own(), pair.ids[0], (layers(real.own())[layer], "input", add))
    expected = pair.contrast(live - real.logits(pair.ids[0]))
    assert abs(expected) > 100 * real.allowed
    assert abs(float(sums(why)) - expected) <= real.allowed


def test_the_method_difference_against_the_mean_embedding(real, pair):
    """Special tokens stay what they are."""
    why = tlens.attribute(pair.clean, method="difference", baseline="mean", **pair.question)
    embed = real.own().get_input_embeddings()
    with torch.no_grad():
        mean = embed(torch.arange(embed.num_embeddings)).mean(0)
    special = torch.isin(torch.tensor([pair.ids[0]]), torch.tensor(real.tokenizer.all_special_ids))
    everywhere = (embed, "output", lambda x: torch.where(special[..., None], x, mean))
    baseline = hooked(real.own(), pair.ids[0], everywhere)
    assert abs(float(sums(why)) - pair.contrast(real.logits(pair.ids[0]) - baseline)) <= real.allowed


# ------------------------------------------------------------------ one run


def test_live_effects(real, pair):
    layer, head, width = 4, 2, real.own().config.head_dim
    effects = circuits.total_effects(pair.clean, **pair.question, live=True, nodes=["L4H2", "MLP6"])

    def without_head(z):
        return torch.cat([z[..., : head * width], 0 * z[..., :width], z[..., (head + 1) * width :]], dim=-1)

    hooks = {
        "L4H2": (layers(real.own())[layer].self_attn.o_proj, "input", without_head),
        "MLP6": (layers(real.own())[6].mlp, "output", torch.zeros_like),
    }
    for node, hook in hooks.items():
        lost = pair.contrast(real.logits(pair.ids[0]) - hooked(real.own(), pair.ids[0], hook))
        assert abs(lost) > 10 * pair.allowed
        assert abs(float(effects[node]) - lost) <= pair.allowed, node


def test_patching(real, pair):
    scores = circuits.patch_scores(pair.clean, pair.corrupted, **pair.question, method="patching", by="component")
    for node, module in (("L4.attn", layers(real.own())[4].self_attn.o_proj), ("MLP6", layers(real.own())[6].mlp)):
        noted = []
        hooked(real.own(), pair.ids[1], (module, "output", lambda out, noted=noted: noted.append(out) or out))
        live = hooked(real.own(), pair.ids[0], (module, "output", lambda out, noted=noted: noted[0]))
        lost = pair.contrast(real.logits(pair.ids[0]) - live)
        assert abs(lost) > 10 * pair.allowed
        assert abs(float(scores[node]) - lost) <= pair.allowed, node
    assert abs(float(scores["embed"]) - pair.change) <= pair.allowed


PAIRS = {
    ("The capital of Italy is the city of", "The capital of Spain is the city of"): (" Rome", " Madrid"),
    ("The keys to the cabinet", "The key to the cabinet"): (" are", " is"),
    ("The opposite of hot is", "The opposite of big is"): (" cold", " small"),
}


@pytest.mark.whole
@pytest.mark.parametrize("texts", PAIRS, ids=lambda texts: texts[0])
def test_scores_that_are_measured_agree_with_patching(real, texts, monkeypatch):
    """Ten of the largest nodes and five others in live runs of 301 or 91, and the error of the rest as it is stated."""
    clean, corrupted = (tlens.freeze(real.bridge(), torch.tensor([real.ids(text)])) for text in texts)
    question = [real.token(word) for word in PAIRS[texts]]
    monkeypatch.setitem(compare.POINTS, "near", compare.NEAR[1])
    measured, patched, *others = (
        circuits.patch_scores(clean, corrupted, *question, method=method, steps=1, points="near")
        for method in ("measured", "patching", "difference", "gradient", "integrated-gradients")
    )
    truth = patched.scores[0, 0, 1:].double()

    def agreement(scores):
        return float(torch.corrcoef(torch.stack([scores.scores[0, 0, 1:].double(), truth]))[0, 1])

    assert agreement(measured) > 0.98
    assert agreement(measured) > max(map(agreement, others))
    live = measured.measured
    assert 11 < int(live.sum()) <= 16
    assert float((measured.scores - patched.scores)[live].abs().max()) <= real.allowed
    estimates = torch.stack([other.scores[0, 0, 1:].double() for other in others])
    size = estimates.abs().amax(0) + estimates.amax(0) - estimates.amin(0)
    misses = (estimates.median(0).values - truth).abs().scatter(0, size.topk(10).indices, 0)
    rest = measured.rest().iloc[0]
    assert rest["low"] <= float(misses.sum() / measured.scores.abs().sum()) <= rest["high"]
    assert float((measured.scores - patched.scores).abs().max()) <= rest["largest"]


@pytest.mark.whole
@pytest.mark.parametrize("name", evaluate.LANGUAGE_TASKS)
def test_tasks_have_pairs_that_the_model_answers(real, name):
    if (real.name, name) == ("smollm2", "pronouns"):
        with pytest.raises(tlens.InvalidInputError, match=r"the model answers \d+ of these, fewer than 4"):
            evaluate.language_task(real.bridge(), name, prompts=4)
        return
    pairs = evaluate.language_task(real.bridge(), name, prompts=4).pairs
    assert len(pairs) == 4
    for tokens, answers in ((pairs.clean, pairs.target), (pairs.corrupted, pairs.minus)):
        assert [int(real.logits(row).argmax()) for row in tokens.tolist()] == answers.tolist()


def test_a_contribution_graph(real, pair):
    graph = circuits.contribution_graph(pair.clean, **pair.question, threshold=0.05)
    assert abs(float(graph.total) - pair.contrast(real.logits(pair.ids[0]))) <= real.allowed
    assert graph.gap < 1e-4


@pytest.mark.whole
@pytest.mark.parametrize("rule", ["attnlrp", "gim", "tangent"])
def test_a_graph_edges_and_routes_under_a_rule(real, pair, rule):
    """Every sum is the logit; edges of a run that is cut sum to the nodes of one that is not."""
    live = pair.contrast(real.logits(pair.ids[0]))
    graph = circuits.contribution_graph(pair.clean, **pair.question, threshold=0.05, nodes=40, rule=rule)
    routes = circuits.routes(pair.clean, **pair.question, rule=rule)
    assert abs(float(graph.total) - live) <= real.allowed
    assert graph.gap < 1e-4
    assert float((routes.scores.sum(-1) - live).abs().max()) <= pair.allowed
    edges = circuits.edge_scores(pair.clean, pair.corrupted, **pair.question, rule=rule)
    nodes = circuits.patch_scores(pair.clean, pair.corrupted, **pair.question, rule=rule)
    sums_of_edges = edges.scores[0].sum(-1)
    expected = torch.stack([nodes[source].flatten()[0] for source in edges.sources])
    assert float((sums_of_edges - expected).abs().max()) <= 1e-4 * float(edges.scores.abs().max())


def test_edges_into_keys_are_autograds_own(real, pair):
    """The gradient at the keys of Hugging Face's model, through its projection and norm, of what embeddings change."""
    own = copy.deepcopy(real.own())
    layer = layers(own)[5]
    kept = {}
    handles = [
        layer.register_forward_pre_hook(lambda module, args: kept.update(stream=args[0])),
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, out: kept.update(keys=out)),
    ]
    logits = own(torch.tensor([pair.ids[0]])).logits[0, -1]
    number = logits[pair.question["target"]] - logits[pair.question["minus"]]
    (at_keys,) = torch.autograd.grad(number, kept["keys"])
    for handle in handles:
        handle.remove()
    stream = kept["stream"].detach().requires_grad_(True)
    keys = layer.self_attn.k_proj(layer.input_layernorm(stream))
    (pulled,) = torch.autograd.grad(keys, stream, at_keys)
    edges = circuits.edge_scores(pair.clean, pair.corrupted, **pair.question, method="gradient")
    expected = float(((pair.clean.resid_pre(0) - pair.corrupted.resid_pre(0)) * pulled).sum())
    into = [name for name in edges.destinations if name.startswith("L5H") and name.endswith(".k")]
    found = sum(float(edges[f"embed → {name}"]) for name in into)
    assert abs(found - expected) <= 1e-4 * float(edges.scores.abs().max())


def test_features_of_a_random_dictionary(real, pair):
    dictionary = Dictionary(real.bridge().cfg.d_model, "topk", "layer_norm", dtype=torch.float32)
    found = circuits.features(pair.clean, dictionary, "blocks.7.hook_out")
    noted = []
    hooked(real.own(), pair.ids[0], (layers(real.own())[8], "input", lambda x: noted.append(x) or x))
    active = dictionary.encode(noted[0])
    values = torch.zeros_like(active).index_put(tuple(found.index.T), found.values)
    assert torch.allclose(values, active, rtol=1e-4, atol=1e-4 * float(active.max()))
    effects = circuits.feature_effects(found, **pair.question)
    assert abs(float(effects.scores.double().sum()) - pair.contrast(real.logits(pair.ids[0]))) <= real.allowed
    feature = int(active[0, -1].argmax())
    why = circuits.feature_attribution(found, feature)
    before = dictionary.before(noted[0])[0, -1, feature]
    assert abs(float(sums(why) - before)) <= 1e-3 * float(before)


def test_generated_text_spans_and_hops(real):
    text = freeze_generation(real.bridge(), CLEAN, max_new_tokens=6)
    ids = real.ids(CLEAN)
    expected = []
    for token in text.frozen.tokens[0, len(ids) :].tolist():
        logits = real.logits(ids)
        assert int(logits.argmax()) == token
        expected.append(float(logits.max()))
        ids.append(token)
    each, span = text.attribute(), text.attribute(span=(1, 4))
    assert float((sums(each)[0] - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= real.allowed
    for result in (span, text.attribute(span=(1, 4), hops=1), text.attribute(span=(1, 4), hops="all")):
        assert abs(float(sums(result)) - sum(expected[1:4])) <= 3 * real.allowed
    assert not result.scores[..., len(real.ids(CLEAN)) :].any()  # everything is on the prompt's tokens


@pytest.mark.whole
@pytest.mark.parametrize(("text", "names"), KNOWN.items())
def test_the_known_source_of_an_answer_is_first(real, text, names):
    for source, other in (names, names[::-1]):
        prompt = text.format(source=source, other=other)
        answer = real.token(f" {source}")
        assert int(real.logits(real.ids(prompt)).argmax()) == answer
        why = tlens.attribute(real.bridge(), prompt, answer, minus=f" {other}")
        best = int(why.scores[0, 0].argmax())
        assert why.tokens[0][best] == f" {source}"
        assert why.tokens[0].index(f" {source}") == best


@pytest.mark.whole  # minutes: a commit runs it in its turn
def test_a_perturbation_test_tells_the_default_method_from_a_random_order(real):
    """The mean embedding breaks these predictions wherever it stands; tokens that the model would write do not."""
    texts = [
        "When Mary and John went to the store, John gave a drink to",
        "The opposite of hot is cold, and the opposite of big is",
    ]
    methods = {"default": "tensorlens", "random": "random"}
    found = evaluate.perturbation(real.bridge(), texts, methods, fractions=(0, 0.1, 0.2), metrics=["aopc"])
    assert found.mean("aopc", "default") > 1.25 * found.mean("aopc", "random")


# ------------------------------------------------------------------ data sets, the command line, the explorer


@pytest.mark.whole  # minutes: a commit runs it in its turn
def test_a_data_set_of_200_rows_that_is_interrupted(real, tmp_path, monkeypatch):
    words = [real.tokenizer.decode([token]) for token in range(3000, 3200)]
    rows = [{"text": f"The word{word} means", "answer": " the"} for word in words]
    options = {"columns": {"target": "answer"}, "minus": " a", "tokens_per_batch": 64, "progress": False}
    run, calls = running.run_rows, itertools.count()

    def interrupted(*args):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(running, "run_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tlens.attribute_dataset(real.bridge(), rows, tmp_path, **options)
    monkeypatch.undo()
    written = len(tlens.load_results(tmp_path))
    assert 0 < written < 200
    results = tlens.attribute_dataset(real.bridge(), rows, tmp_path, **options)
    assert results.complete
    assert len(results) == 200
    the, a = real.token(" the"), real.token(" a")
    for number in range(0, 200, 7):
        found = results[str(number)]
        logits = real.logits(real.ids(rows[number]["text"]))
        assert abs(float(sums(found)) - float(logits[the] - logits[a])) <= real.allowed


COMMANDS = {
    "attribute": [CLEAN, "--target", ANSWER, "--minus", OTHER, "-o", "saved.safetensors"],
    "verify": [],
    "report": [CLEAN, "--target", ANSWER, "--minus", OTHER, "--methods", "tensorlens", "-o", "page.html"],
    "dataset": ["rows.jsonl", "--target-column", "answer", "--minus-column", "other", "-o", "run"],
}


@pytest.mark.whole
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line(real, command, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": CLEAN, "answer": ANSWER, "other": OTHER}) + "\n")
    words = [sys.executable, "-m", "tensorlens_tl", command, *COMMANDS[command], "--model", real.folder]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logits = real.logits(real.ids(CLEAN))
    expected = float(logits[real.token(ANSWER)] - logits[real.token(OTHER)])
    if command == "attribute":
        assert float(sums(tlens.Attribution.load(tmp_path / "saved.safetensors"))) == pytest.approx(
            expected, abs=real.allowed
        )
    if command == "dataset":
        assert float(sums(tlens.load_results(tmp_path / "run")["0"])) == pytest.approx(expected, abs=real.allowed)
    if command == "report":
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        total = re.findall(r"total</th><td>([^<]+)", page)[0]
        assert float(total) == pytest.approx(expected, rel=1e-3)
    if command == "verify":
        assert "All weights come from the checkpoint" in done.stdout


def test_the_explorers_first_answer(real, pair):
    session = Session(real.bridge(), name=real.name)
    view = session.view("prompt", {"text": CLEAN})
    chances = real.logits(pair.ids[0]).softmax(-1)
    best = chances.argsort(descending=True)[:10].tolist()
    assert [token["id"] for token in view["next"]] == best
    assert [token["chance"] for token in view["next"]] == pytest.approx(chances[best].tolist(), rel=1e-3)
    tokens = session.view("tokens", {"text": CLEAN})
    first, second = best[:2]
    expected = float(real.logits(pair.ids[0])[first] - real.logits(pair.ids[0])[second])
    assert sum(tokens["scores"]) + tokens["bias"] == pytest.approx(expected, abs=real.allowed)
    explorer = Explorer(session, 0).start()
    try:
        assert b"<title>Explorer</title>" in urlopen(explorer.url, timeout=30).read()
    finally:
        explorer.close()
