"""Compression on every family: full ranks give the model back, what was removed is accounted for, nothing is left."""

import copy
import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from conftest import close, hooks_left, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import compress
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import MLPWeights
from tensorlens_tl.models.writing import joint_copies, writable
from tensorlens_tl.testing import model_names, tiny_model

HOOKED = any(name.startswith("hooked/") for name in model_names())
PLAIN = "hooked/ln" if HOOKED else "bridge/gpt2"
GROUPED = "hooked/gqa-ungrouped" if HOOKED else "bridge/llama"


def logits(model, tokens=None):
    with torch.no_grad():
        out = model(some_tokens() if tokens is None else tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def everything(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unchanged(model, before):
    return all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def scores_are_free(model):
    return compress.head_weights(model, 0).fixed_scores() is None


def has_plain_mlps(model):
    """Whether every block has one MLP for all tokens, of matrices of its own."""
    mlps = [block.mlp for block in ModelView(model).blocks]
    if all(isinstance(mlp, MLPWeights) and (mlp.hooked or mlp.post_factor is not None) for mlp in mlps):
        return True
    with pytest.raises(tlens.UnsupportedModelError, match=r"mixture of experts|packed") if any(mlps) else nullcontext():
        compress.plan(model, method="laser", rho=1.0, mlp=1.0 if any(mlps) else None)
    return False


def refused(model):
    """Whether attention is more than four matrices, and then whether that is said."""
    if all(block.attention.hooked for block in ModelView(model).blocks):
        return False
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .* stands inside its attention"):
        compress.plan(model, ratio=2)
    return True


def full_ranks(model):
    """Every method at full ranks, where it is allowed."""
    weights = compress.head_weights(model, 0)
    heads, d_model, d_head = weights.matrices["Q"].shape
    ranks = (d_model, d_head, 2 * weights.group + 2)
    yield {"method": "tucker", "ranks": ranks}
    yield {"method": "tucker", "ranks": ranks, "balance": True, "sweeps": 1}
    yield {"method": "tucker", "ranks": ranks, "start": "sequential"}
    yield {"method": "laser", "rho": 1.0, "mlp": 1.0 if has_plain_mlps(model) else None}
    yield {"method": "head-svd", "rank": d_head}
    yield {"method": "circuit-svd", "rank": d_head, "matrices": "VO"}
    if weights.group == 1 and d_model % heads == 0:
        yield {"method": "tucker", "ranks": (heads * d_head, d_model // heads, 4), "layout": "released"}
    if scores_are_free(model):
        yield {"method": "tucker", "ranks": ranks, "gauge": "circuit"}
        yield {"method": "circuit-svd", "rank": d_head}


# ------------------------------------------------------------------ models


@pytest.mark.numeric
@pytest.mark.few(8)
def test_full_ranks_give_the_model_back(name, model):
    before, own = everything(model), logits(model)
    if refused(model):
        return
    for options in full_ranks(model):
        plan = compress.plan(model, **options)
        moved = options.get("gauge") or options["method"] == "circuit-svd"
        for layer, weights in plan.weights().items():
            there = writable(ModelView(model).blocks[layer])
            for weight, new in () if moved else weights.items():
                assert relative_error(new.flatten()[None], there[weight].flatten()[None]) <= 1e-12, (options, weight)
        with plan.applied() as changed:
            assert changed is model
            assert close(logits(model), own, tolerance(name)), options
        assert unchanged(model, before), options
    assert not hooks_left(model)


@pytest.mark.numeric
def test_what_was_kept_and_removed_is_the_model(name, model):
    if refused(model):
        return
    frozen = tlens.freeze(model, some_tokens())
    has_mlp = has_plain_mlps(model)
    plan = compress.plan(model, ratio=3, balance=True, mlp=0.4 if has_mlp else None)
    if frozen.view.blocks[0].branch_factor != 1:
        with pytest.raises(tlens.UnsupportedModelError, match="multiplied by a constant"):
            compress.compression_effect(frozen, plan)
        return
    taken = compress.compression_effect(frozen, plan)
    x = torch.randn(3, *frozen.resid_pre(0).shape, dtype=frozen.resid_pre(0).dtype)
    for layer in range(frozen.n_layers):
        pairs = [(frozen.maps.attention(layer), *taken.attention(layer))]
        pairs += [(frozen.maps.mlp(layer), *taken.mlp(layer))] if has_mlp else []
        for whole, kept, removed in pairs:
            both = kept + removed
            assert relative_error(both.push(x), whole.push(x)) <= 1e-12
            assert relative_error(both.pull(x), whole.pull(x)) <= 1e-12
            assert close(both.bias + 0 * x[0], whole.bias + 0 * x[0], 1e-12)
            assert not close(removed.push(x), 0 * x, 1e-3)
    direction = torch.randn(frozen.output.shape[-1], dtype=frozen.output.dtype)
    asked = {"direction": direction} if frozen.view.unembedding is None else {"target": 5, "minus": 7}
    terms = taken.target(**asked, query=[-1, 1])
    assert float(terms.gap.max()) <= tolerance(name)
    assert close(terms.keys.nansum((-2, -1)) + terms.scores[..., -3:].sum(-1), terms.scores.sum(-1), 1e-12)
    assert float(terms.scores[..., -3:].abs().max()) > 1e-6  # something settles anew


@pytest.mark.numeric
@pytest.mark.parametrize(
    "name", [n for n in ("hooked/ln", "bridge/gpt2", "hooked/post-only", "bridge/opt") if n in model_names()]
)
def test_the_change_is_the_live_models_own(name, model):
    """The same change from live runs alone: compressed weights with the old pass held by hooks, and without."""
    frozen = tlens.freeze(model, some_tokens())
    plan = compress.plan(model, ratio=2, method="laser", matrices="VO")
    terms = compress.compression_effect(frozen, plan).target(5)
    hooks = frozen.fwd_hooks()
    with torch.no_grad(), plan.applied():
        live = logits(model)[:, -1, 5]
        held = model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)[:, -1, 5]
    own = logits(model)[:, -1, 5]
    assert close(terms.total[:, 0], live - own)
    assert close(terms.scores[:, 0, :-3].sum(-1), held - own)
    assert close(terms.scores[:, 0, -3:].sum(-1), live - held)


def test_passes_are_refused_inside_and_valid_afterwards(model_named):
    model = model_named(PLAIN)
    frozen = tlens.freeze(model, some_tokens())
    before, scores = everything(model), frozen.operator().target(5).scores
    plan = compress.plan(model, ratio=2)
    with plan.applied():
        inside = tlens.freeze(model, some_tokens())
        for stale in (frozen.operator, frozen.fwd_hooks, lambda: tlens.attribute(frozen, target=5)):
            with pytest.raises(tlens.FrozenModelError, match=r"Freeze again.*plan\.applied"):
                stale()
        inside.operator()
    with pytest.raises(tlens.FrozenModelError, match=r"Freeze again.*plan\.applied"):
        inside.operator()
    assert torch.equal(frozen.operator().target(5).scores, scores)
    with pytest.raises(KeyError), plan.applied():
        raise KeyError
    assert unchanged(model, before)
    frozen.check_fresh()
    with frozen.attached(), pytest.raises(tlens.FrozenModelError, match="attached"), plan.applied():
        pass
    with plan.applied(), pytest.raises(tlens.InvalidInputError, match="applied already"), plan.applied():
        pass
    assert unchanged(model, before)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in ("hooked/ln", "hooked/gqa", "bridge/gpt2", "bridge/llama", "bridge/gpt2-compatibility")
        if n in model_names()
    ],
)
def test_a_copy_is_the_compressed_model(name, model):
    before = everything(model)
    plan = compress.plan(model, [1], ratio=2)
    model(some_tokens())  # what a run leaves in its modules has a gradient's history
    other = plan.copied()
    with plan.applied():
        assert close(logits(other), logits(model), 1e-12)
    assert not close(logits(other), logits(model), 1e-3)
    assert unchanged(model, before)
    tlens.freeze(other, some_tokens())


@pytest.mark.parametrize("family", ["gpt2", "neox", "phi3"])
def test_joint_projections_see_the_change(family):
    """A Bridge keeps a joint projection beside the split ones once it was cast."""
    model = tiny_model(f"bridge/{family}").to(torch.float32)
    block = ModelView(model).blocks[0]
    joint = block.module.attn.qkv.original_component
    if family == "neox":  # the tiny model draws both at random: say the same in both
        split = torch.stack([writable(block)[w] for w in ("W_Q", "W_K", "W_V")], dim=1)  # head, part, d_model, d_head
        joint.weight.data.copy_(split.permute(0, 1, 3, 2).flatten(0, 2))
    copies = joint_copies(block, writable(block))
    assert [copied.parts for copied in copies if "W_Q" in copied.parts] == [("W_Q", "W_K", "W_V")]
    before = joint.weight.detach().clone()
    plan = compress.plan(model, 0, ratio=2)
    with plan.applied():
        assert len(joint_copies(block, writable(block))) == len(copies)
        assert not torch.equal(joint.weight, before)
    assert torch.equal(joint.weight, before)


def test_what_is_cast_inside_comes_back_cast(model_named):
    for name in {PLAIN, "bridge/gpt2", "bridge/phi3"}:
        model = tiny_model(name)
        expected = everything(tiny_model(name).to(torch.float32))
        with compress.plan(model, ratio=2).applied():
            model.to(torch.float32)
        assert unchanged(model, expected), name
        frozen = tlens.freeze(model, some_tokens())
        assert float(compress.compression_effect(frozen, compress.plan(model, ratio=2)).target(5).gap.max()) < 1e-4


def test_what_is_changed_inside_is_said():
    model = tiny_model("bridge/gpt2")
    own, other = copy.deepcopy(model.state_dict()), tiny_model("bridge/gpt2", seed=1).state_dict()
    with (
        pytest.raises(tlens.FrozenModelError, match="Load the model again"),
        compress.plan(model, 0, ratio=2).applied(),
    ):
        model.load_state_dict(other)
    model.load_state_dict(own)
    with pytest.raises(tlens.FrozenModelError, match=r"blocks\.0\.W_Q"), compress.plan(model, 0, ratio=2).applied():
        writable(ModelView(model).blocks[0])["W_Q"].mul_(2)


def test_plans_left_in_the_wrong_order():
    joint = tiny_model("bridge/gpt2").to(torch.float32)
    before = everything(joint)
    first, second = (compress.plan(joint, 0, ratio=2, matrices=letters).applied() for letters in ("QK", "VO"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert unchanged(joint, before)


@pytest.mark.parametrize("nth", [1, 3, 6, 9, 12, 15])
def test_an_interruption_leaves_nothing_behind(nth, monkeypatch):
    """Ctrl-C while weights are written, while the model runs, or while they are put back."""
    from tensorlens_tl.models import writing

    model, calls, overwrite = tiny_model(PLAIN), [], writing._overwrite
    before = everything(model)
    plan = compress.plan(model, ratio=2)

    def interrupted(there, value):
        calls.append(1)
        if len(calls) == nth:
            raise KeyboardInterrupt
        overwrite(there, value)

    monkeypatch.setattr(writing, "_overwrite", interrupted)
    with pytest.raises(KeyboardInterrupt), plan.applied():
        pass
    assert unchanged(model, before)


def test_half_precision_and_gradients(model_named):
    model = copy.deepcopy(model_named(PLAIN)).to(torch.bfloat16)
    frozen = tlens.freeze(model, some_tokens(), tolerance=0.2)
    plan = compress.plan(model, ratio=1.5)
    assert plan.layers[0][0].core.dtype == torch.float32
    terms = compress.compression_effect(frozen, plan).target(5)
    assert float(terms.gap.max()) < 0.05
    wide = model.to(torch.float64)  # the same numbers, widened
    with plan.applied():
        assert wide is model


# ------------------------------------------------------------------ the basis inside a head


@pytest.mark.numeric
@pytest.mark.parametrize(
    "name", [PLAIN, GROUPED, *(("hooked/alibi", "hooked/shortformer") if HOOKED else ("bridge/opt",))]
)
def test_the_gauge_is_free(name, model):
    letters = "QKVO" if scores_are_free(model) else "VO"
    for moved in (compress.rotate_heads, lambda weights: compress.in_circuit_gauge(weights, letters)):
        plan = compress.plan(model, method=as_method(moved))
        own = logits(model)
        with plan.applied():
            assert close(logits(model), own, tolerance(name))


def as_method(moved):
    """A change of basis as a compression that compresses nothing."""

    def method(weights):
        other = moved(weights)
        identity = compress.laser(other, rho=1.0)
        biases = {f"b_{letter}": bias for letter, bias in other.biases.items()}
        return compress.LowRank(
            before=1, biases=biases, left=identity.left, right=identity.right, widths=identity.widths, error=0.0
        )

    return method


def product(weights):
    """Every circuit of a layer as one tensor: what its weights mean, whatever their basis."""
    from tensorlens_tl.compress.heads import circuits

    return torch.stack([a @ b.mT for a, b in circuits(weights).values()])


def compressed(weights, **options):
    made = compress.tucker(weights, ranks=(9, 3, 3), **options)
    return weights.changed({m: w.mT if m == "O" else w for w_name, w in made.matrices().items() for m in w_name[-1]})


@pytest.mark.numeric
def test_what_each_result_depends_on(model_named):
    """The paper's layout: on the basis inside heads, not on the order of heads or channels; the gauge: on neither;
    the released layout: on the order of channels."""
    weights = compress.head_weights(model_named(PLAIN), 0)
    turned = compress.rotate_heads(weights, seed=3)
    heads, channels = torch.tensor([2, 0, 3, 1]), torch.randperm(16)

    def apart(one, other):
        return float((product(one) - product(other)).norm() / product(weights).norm())

    def permuted(given, by):
        made = {m: w[heads] if by == "heads" else w[:, channels] for m, w in given.matrices.items()}
        return given.changed(made, {m: b[heads] for m, b in given.biases.items()} if by == "heads" else {})

    assert apart(weights, turned) < 1e-12
    for balance in (False, True):
        base = compressed(weights, balance=balance)
        assert apart(base, compressed(turned, balance=balance)) > 1e-2
        gauged = compressed(weights, gauge="circuit", balance=balance)
        assert apart(gauged, compressed(turned, gauge="circuit", balance=balance)) < 1e-9
        for by in ("heads", "channels"):
            for gauge, own in ((None, base), ("circuit", gauged)):
                other = compressed(permuted(weights, by), gauge=gauge, balance=balance)
                assert apart(permuted(own, by), other) < 1e-9, (by, gauge)
    released = compressed(weights, layout="released")
    assert apart(permuted(released, "channels"), compressed(permuted(weights, "channels"), layout="released")) > 1e-2


@pytest.mark.numeric
def test_circuit_svd_is_the_best_for_each_circuit(model_named):
    """Against torch's own SVD of the circuits with their biases, and never behind the other per-head baseline."""
    weights = compress.head_weights(model_named(PLAIN), 0)
    made = compress.circuit_svd(weights, rank=2).dense()
    for read, other, row in (("Q", "K", True), ("V", "O", False)):
        a = torch.cat([weights.matrices[read], weights.biases[read][:, None]], 1)
        b = torch.cat([weights.matrices[other], weights.biases[other][:, None]], 1) if row else weights.matrices["O"]
        u, s, vh = torch.linalg.svd(a @ b.mT)
        best = (u[..., :2] * s[:, None, :2]) @ vh[:, :2]
        ours_a = torch.cat([made[f"W_{read}"], made[f"b_{read}"][:, None]], 1)
        ours_b = torch.cat([made["W_K"], made["b_K"][:, None]], 1) if row else made["W_O"].mT
        assert close(ours_a @ ours_b.mT, best, 1e-10)


def test_balance_helps_the_smaller_matrices():
    weights = compress.head_weights(tiny_model(PLAIN), 0)
    loud = weights.changed({m: 30 * weights.matrices[m] for m in "QK"})

    def lost(balance, letters):
        made = compress.tucker(loud, ratio=2, balance=balance).matrices()
        parts = [(made[f"W_{m}"].mT if m == "O" else made[f"W_{m}"], loud.matrices[m]) for m in letters]
        return math.sqrt(
            sum(float((a - b).square().sum()) for a, b in parts) / sum(float(b.square().sum()) for _, b in parts)
        )

    assert lost(True, "VO") < 0.8 * lost(False, "VO")


# ------------------------------------------------------------------ methods and ratios


@pytest.mark.parametrize("name", [PLAIN, GROUPED, "bridge/llama"])
def test_ratios_are_met_and_counted(name, model):
    weights = compress.head_weights(model, 0)
    free = scores_are_free(model)
    for ratio, (method, options) in itertools.product(
        (1.3, 2, 3),
        [("tucker", {}), ("tucker", {"balance": True}), ("laser", {}), ("head-svd", {}), ("circuit-svd", {})],
    ):
        if method == "circuit-svd" and not free:
            options = {"matrices": "VO"}
        plan = compress.plan(model, method=method, ratio=ratio, **options)
        assert plan.ratio >= ratio
        part = plan.layers[0][0]
        assert part.before == weights.count(options.get("matrices", "QKVO"))
        held, _ = part.packed()
        assert part.parameters == sum(tensor.numel() for key, tensor in held.items() if not key.startswith("biases"))
        assert 0 < part.error < 1
        if method != "circuit-svd":
            new = {m: part.matrices()[f"W_{m}"] for m in "QKVO"}
            lost = sum(
                float(((new[m].mT if m == "O" else new[m]) - w).square().sum()) for m, w in weights.matrices.items()
            )
            told = math.sqrt(lost / sum(float(w.square().sum()) for w in weights.matrices.values()))
            assert math.isclose(part.error, told, rel_tol=1e-6)


def test_the_papers_ablation_and_hybrid(model_named):
    """Table IV: one kind of matrix alone; Table III: LASER on MLPs, whole or one matrix, and Tucker beside."""
    model = model_named(PLAIN)
    for letters in ("Q", "K", "V", "O", "QKVO", "VK"):
        plan = compress.plan(model, 0, ranks=(8, 2, 1), rule="paper", matrices=letters)
        assert set(plan.weights()[0]) == {f"W_{letter}" for letter in letters}
    plan = compress.plan(model, ranks=(2, 3), rule="paper", mlp=0.25)
    assert plan.layers[0][0].ranks == (8, 2, 3)
    assert set(plan.weights()[1]) == {"W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"}
    only = compress.plan(model, [-1], method=None, mlp={"W_in": 0.25})
    assert only.weights()[1].keys() == {"W_in"}
    assert torch.linalg.matrix_rank(only.weights()[1]["W_in"]) == 4
    assert [part.ratio for part in only.layers[1]] == [only.ratio]


def test_plans_add_up(model_named, tmp_path):
    model = model_named(PLAIN)
    scores, rest = (
        compress.plan(model, ratio=2, method="laser", matrices="QK"),
        compress.plan(model, 1, ratio=3, matrices="VO"),
    )
    both = scores + rest
    assert both.parameters == scores.parameters + rest.parameters
    with both.applied():
        together = logits(model)
    with scores.applied(), rest.applied():
        assert close(logits(model), together)
    assert torch.equal(
        compress.Plan.load(both.save(tmp_path / "both"), model).weights()[1]["W_O"], rest.weights()[1]["W_O"]
    )
    with pytest.raises(tlens.InvalidInputError, match=r"both replace blocks\.1\.W_"):
        both + compress.plan(model, 1, ratio=2)
    with pytest.raises(tlens.InvalidInputError, match="same model"):
        both + compress.plan(tiny_model(PLAIN, seed=1), ratio=2)


def test_sharing_finds_what_heads_share(model_named):
    model = copy.deepcopy(model_named(PLAIN))
    found = compress.sharing(model)
    assert found.energy.shape == (2, 4, 16)
    assert bool((found.energy[..., -1] - 1).abs().max() < 1e-9)
    apart = (found.energy - found.chance)[:, :, 3]
    assert float(apart.abs().max()) < 0.25  # random weights share what chance gives
    with torch.no_grad():
        for name in ("W_V", "W_O"):  # every head of the first layer the same
            writable(ModelView(model).blocks[0])[name].copy_(
                writable(ModelView(model).blocks[0])[name][:1].expand(4, -1, -1)
            )
    same = compress.sharing(model)
    assert bool((same.energy[0, 2:, 3] - 1).abs().max() < 1e-9)
    assert float(same.chance[0, 2:, 3].max()) < 0.9
    for measure in (same.similarity, same.core_similarity):
        assert close(measure[0, 1], torch.ones(4, 4, dtype=torch.float64))
        assert bool((measure.diagonal(dim1=-2, dim2=-1) - 1).abs().max() < 1e-9)
    assert set(same.to_dataframe()["side"]) == {"query", "key", "value", "output"}
    turned = compress.plan(model, method=as_method(compress.rotate_heads))
    with turned.applied():
        assert close(compress.sharing(model, baseline=None).similarity, same.similarity)


# ------------------------------------------------------------------ files and refusals


def test_files(model_named, tmp_path):
    model = model_named(PLAIN)
    for plan in (
        compress.plan(model, ratio=2, gauge="circuit", mlp=0.5, sweeps=2),
        compress.plan(model, method="circuit-svd", ratio=2),
        compress.plan(model, 1, method="laser", rho=0.5),
    ):
        path = plan.save(tmp_path / "plan.safetensors")
        again = compress.Plan.load(path, model)
        assert repr(again) == repr(plan)
        assert again.parameters == plan.parameters
        for layer, weights in plan.weights().items():
            assert all(torch.equal(again.weights()[layer][name], weight) for name, weight in weights.items())
        with pytest.raises(tlens.InvalidInputError, match="other weights"):
            compress.Plan.load(path, tiny_model(PLAIN, seed=1))
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    with pytest.raises(tlens.FileFormatError):
        compress.Plan.load(tmp_path / "other.safetensors", model)
    with pytest.raises(tlens.InvalidInputError, match="not a Own; let the method return"):
        compress.plan(model, method=Own).save(tmp_path / "own.safetensors")


class Own(compress.Replacement):
    """A compression of one's own: outputs halved."""

    def __init__(self, weights):
        super().__init__(before=2, biases={})
        object.__setattr__(self, "half", weights.matrices["O"].mT / 2)

    parameters = 1

    def matrices(self):
        return {"W_O": self.half}


def test_chance_knows_that_grouped_heads_share(model_named):
    """The query heads of a group have keys and values in common by construction, random ones too."""
    beyond = []
    for seed in range(6):
        found = compress.sharing(tiny_model("bridge/llama", seed=seed), draws=8, seed=seed)
        beyond.append((found.energy - found.chance)[..., found.rank - 1])
    assert float(torch.stack(beyond).mean((0, 1)).abs().max()) < 0.05


def rounded(weights, *, bits=8):
    """Every matrix rounded to so many bits, a scale for each head."""
    new = {}
    for letter, matrix in weights.matrices.items():
        step = matrix.abs().amax((1, 2), keepdim=True) / (2 ** (bits - 1) - 1)
        new[letter] = (matrix / step).round() * step
    return compress.Dense.of(weights, new, count=weights.parameters * bits // 32)


def test_dense_replacements(model_named, tmp_path):
    model = model_named(PLAIN)
    plan = compress.plan(model, method=rounded, bits=4)
    assert plan.ratio == 8
    again = compress.Plan.load(plan.save(tmp_path / "rounded"), model)
    assert torch.equal(again.weights()[1]["W_O"], plan.weights()[1]["W_O"])
    halved = compress.plan(model, method=lambda weights: weights.changed({"O": weights.matrices["O"] / 2}))
    assert set(halved.weights()[0]) == {"W_O"}
    assert halved.ratio == 1
    assert close(2 * halved.weights()[0]["W_O"], writable(ModelView(model).blocks[0])["W_O"].detach())
    for new, words in (({"O": torch.zeros(1, 2, 3)}, "W_O is"), ({"X": torch.zeros(1)}, "no matrix 'X'")):
        with pytest.raises(tlens.InvalidInputError, match=words):
            compress.plan(model, method=lambda weights, new=new: compress.Dense.of(weights, new, count=1))


def test_a_method_of_ones_own(model_named):
    model = model_named(PLAIN)
    plan = compress.plan(model, method=Own)
    assert plan.ratio == 2
    frozen = tlens.freeze(model, some_tokens())
    assert float(compress.compression_effect(frozen, plan).target(5).gap.max()) <= 1e-9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 7, "ratio": 2}, "layers=7"),
        ({"ratio": 0.5}, "at least 1"),
        ({"mlp": 0.5}, "method=None for MLPs only"),
        ({"layers": [], "ratio": 2}, "none of this model's"),
        ({"method": "best"}, "method='best'; use one of tucker"),
        ({"method": None}, "pass mlp="),
        ({"ratio": 1e9}, "the largest here is"),
        ({"ratio": 0}, "positive"),
        ({"ranks": (99, 1, 1)}, r"ranks\[0\]=99"),
        ({"ranks": (1, 1)}, "pass three"),
        ({"ranks": (9, 3), "rule": "paper"}, "r=9"),
        ({"ratio": 2, "energy": 0.5}, "pass one of"),
        ({"ratio": 2, "rang": 3}, "its options are ranks, ratio"),
        ({"ratio": 2, "layout": "new"}, "layout='new'"),
        ({"ratio": 2, "gauge": "free"}, "gauge='free'"),
        ({"ratio": 2, "start": "sequential"}, "needs ranks="),
        ({"ratio": 2, "matrices": "QX"}, "matrices='QX'"),
        ({"ratio": 2, "matrices": "QV", "gauge": "circuit"}, "belongs to both"),
        ({"ratio": 2, "sweeps": -1}, "sweeps"),
        ({"ratio": 2, "mlp": 2.0}, "mlp=2.0"),
        ({"ratio": 2, "mlp": {"W_up": 0.5}}, "W_in, W_out"),
        ({"method": "laser"}, "pass one of"),
        ({"method": "laser", "ratio": 2, "rho": 0.5}, "pass one of"),
        ({"method": "laser", "ratio": 1e6}, "the largest here is"),
        ({"method": "head-svd", "rank": 9}, "rank=9"),
        ({"method": lambda weights: 5}, "returns a int"),
        ({"method": lambda weights: weights}, "none of the matrices"),
        ({"method": lambda weights: weights, "ratio": 2}, "its options are none"),
    ],
)  # fmt: skip
def test_refusals(options, words, model_named):
    model = model_named(PLAIN)
    before = everything(model)
    with pytest.raises(tlens.InvalidInputError, match=words):
        compress.plan(model, **options)
    assert unchanged(model, before)


def test_models_that_are_refused(model_named):
    rotary = model_named("bridge/llama")
    for options in ({"gauge": "circuit"}, {"method": "circuit-svd"}):
        with pytest.raises(tlens.UnsupportedModelError, match="not free here"):
            compress.plan(rotary, ratio=2, **options)
        compress.plan(rotary, ratio=2, matrices="VO", **options)
    with pytest.raises(tlens.InvalidInputError, match="layout='released'"):
        compress.plan(rotary, ratio=2, layout="released")
    shared = tiny_model(PLAIN)
    blocks = shared.blocks
    if hasattr(blocks[1].attn, "_parameters") and "W_Q" in blocks[1].attn._parameters:
        blocks[1].attn.W_Q = blocks[0].attn.W_Q
    else:
        blocks[1].attn = blocks[0].attn
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 and blocks\.1 .* share weights"):
        compress.plan(shared, 1, ratio=2)
    model = model_named(PLAIN)
    frozen = tlens.freeze(tiny_model(PLAIN, seed=2), some_tokens())
    with pytest.raises(tlens.InvalidInputError, match="another model"):
        compress.compression_effect(frozen, compress.plan(model, ratio=2))
    with pytest.raises(tlens.InvalidInputError, match="pass a plan from compress"):
        compress.compression_effect(frozen, None)
    with pytest.raises(tlens.InvalidInputError, match="baseline"):
        compress.sharing(model, baseline="none")


def test_hooks_that_came_since_are_refused(model_named):
    model = model_named(PLAIN)
    frozen, plan = tlens.freeze(model, some_tokens()), compress.plan(model, ratio=2)
    doubled = [("blocks.0.hook_resid_post", lambda t, hook: 2 * t)]
    with model.hooks(fwd_hooks=doubled), pytest.raises(tlens.FrozenModelError, match="hooks were put on"):
        compress.compression_effect(frozen, plan)


def test_the_change_is_before_a_soft_cap(model_named):
    model = model_named("hooked/soft-caps" if HOOKED else "bridge/gemma2")
    frozen = tlens.freeze(model, some_tokens())
    terms = compress.compression_effect(frozen, compress.plan(model, ratio=2)).target(5)
    assert terms.soft_cap is not None
    assert terms.target.startswith("change of uncapped logit of ")


def test_every_line_of_the_table_sums_to_the_change(model_named):
    frozen = tlens.freeze(model_named(PLAIN), some_tokens(batch=1))
    terms = compress.compression_effect(frozen, compress.plan(model_named(PLAIN), ratio=2)).target(5)
    frame = terms.to_dataframe(keys=True)
    assert math.isclose(frame["score"].sum(), float(terms.total), rel_tol=1e-9)
    assert list(frame.loc[frame["key"].isna(), "term"]) == ["patterns", "ratios", "scales"]


def test_numbers_of_other_kinds_and_edges(model_named):
    import numpy as np

    model = model_named(PLAIN)
    for ratio in (np.int64(2), np.float32(2), torch.tensor(2.0)):
        assert compress.plan(model, ratio=ratio).label == "tucker"
        assert compress.plan(model, ratio=ratio).parameters == compress.plan(model, ratio=2).parameters
    assert compress.plan(model, ranks=np.array([4, 2, 2])).layers[0][0].ranks == (4, 2, 2)
    assert compress.shared_tucker(model, -1, ratio=2).error == compress.shared_tucker(model, 1, ratio=2).error
    weights = compress.head_weights(model, 0)
    for method in (compress.circuit_svd, compress.head_svd, compress.laser):
        for rank in range(1, 5):  # a ratio that was made from a rank gives the rank back
            again = method(weights, ratio=max(1.0, method(weights, rank=rank).ratio))
            assert again.left["Q"].shape[-1] == rank or method(weights, rank=rank).ratio <= 1
        nothing = weights.changed({letter: 0 * matrix for letter, matrix in weights.matrices.items()})
        assert method(nothing, rank=1).error == 0
    broken = tiny_model(PLAIN)
    writable(ModelView(broken).blocks[0])["W_V"][0, 0] = torch.nan
    with pytest.raises(tlens.NumericalError, match="not finite"):
        compress.plan(broken, ratio=2, method="laser")


@pytest.mark.skipif(not HOOKED, reason="no HookedTransformer here")
def test_heads_wider_than_the_stream():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=1, d_model=6, n_ctx=8, d_head=9, n_heads=2, d_vocab=48, act_fn="gelu", dtype=torch.float64,
        device="cpu", default_prepend_bos=False,
    )  # fmt: skip
    model = HookedTransformer(config)
    own = logits(model)
    for options in ({"method": "circuit-svd", "rank": 9}, {"ranks": (6, 9, 4), "gauge": "circuit"}):
        with compress.plan(model, **options).applied():
            assert close(logits(model), own)
    assert compress.sharing(model).rank == 6


@pytest.mark.skipif(not HOOKED, reason="no HookedTransformer here")
def test_a_partly_quantised_mlp_is_refused():
    model = tiny_model("hooked/ln")
    model.blocks[1].mlp.W_out = torch.nn.Parameter(torch.zeros(24, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(tlens.UnsupportedModelError, match="quantised"):
        compress.plan(model, ratio=2, mlp=0.5)
    with pytest.raises(tlens.InvalidInputError, match="has no MLP"):
        compress.plan(tiny_model("hooked/attn-only-no-norm"), ratio=2, mlp=0.5)


@pytest.mark.skipif(not HOOKED, reason="no HookedTransformer here")
def test_integer_weights_are_refused():
    model = tiny_model("hooked/ln")
    weight = model.blocks[1].attn.W_Q
    model.blocks[1].attn.W_Q = torch.nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(tlens.UnsupportedModelError, match="quantised"):
        compress.plan(model, ratio=2)
    packed = tiny_model("hooked/ln")
    del packed.blocks[0].attn._parameters["W_Q"]
    packed.blocks[0].attn.__dict__["W_Q"] = weight.detach().clone()  # a copy, as packed weights are unpacked into
    with pytest.raises(tlens.UnsupportedModelError, match="not a view"):
        compress.plan(packed, ratio=2)


def test_matrices_around_a_norm_inside_an_mlp_are_refused():
    with pytest.raises(tlens.UnsupportedModelError, match="a norm inside its MLP"):
        compress.plan(tiny_model("bridge/bitnet"), [1], method=None, mlp=0.5)
