"""The operator: subsets of layers, heads and MLPs, chunking, probes, targets, and what it refuses."""

import math

import pytest
import torch
from conftest import close, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl.algebra import memory as budget
from tensorlens_tl.algebra.probes import chi_square_quantile, probed
from tensorlens_tl.passes.operator import Collapse
from tensorlens_tl.testing import model_names


@pytest.fixture(params=["bridge/gpt2", "bridge/llama", "bridge/bert"])
def frozen(request, model_named):
    return tlens.freeze(model_named(request.param), some_tokens())


def test_layer_ranges_compose_to_the_whole(frozen):
    first, rest = frozen.operator(layers=slice(0, 1)), frozen.operator(layers=slice(1, None))
    assert close(first(first.x), frozen.resid_pre(1), 1e-6)
    assert close(rest(first(first.x)), frozen.output, 1e-6)
    assert close(rest.push(first.push(first.x)), frozen.operator().push(first.x))
    assert frozen.operator(layers=[1]).in_out().gap.max() < 1e-6
    assert frozen.operator(layers=slice(0, 1)).in_out().gap.max() < 1e-6


def test_heads_add_up(frozen):
    """What each head alone adds, and all of them."""
    x = frozen.operator().x
    sublayer = frozen.maps.attention(0)
    none = frozen.maps.attention(0, heads=[])
    alone = [frozen.maps.attention(0, heads=[head]) for head in range(4)]
    assert close(sum(a.push(x) for a in alone), sublayer.push(x), 1e-12)
    assert not none.push(x).any()
    b_O = frozen.view.blocks[0].attention.b_O
    assert torch.equal(none(x), torch.zeros_like(x) if b_O is None else b_O.expand_as(x))


def test_dropping_all_heads_but_named_layers_keeps_the_others(frozen):
    op = frozen.operator(heads={1: [0, 2]})
    assert not op.whole
    assert op.in_out().gap.max() < 1e-6
    assert close(
        frozen.operator(heads={0: range(4), 1: range(4)}).in_out().scores, frozen.operator().in_out().scores, 1e-6
    )
    assert not close(op.in_out().scores, frozen.operator().in_out().scores)


def test_without_heads_a_head_zeroed_in_the_frozen_model_agrees(frozen):
    """Dropping head 1 of layer 0 is the hook-frozen model with that head's z set to zero."""
    heads = frozen.view.blocks[0].attention.heads

    def zero(z, *, hook):
        z = z.clone().view(*z.shape[:2], heads, -1)
        z[:, :, 1] = 0
        return z.view(*frozen.tokens.shape, heads, -1)

    seen = {}
    ends = frozen.points.unembed_in if frozen.view.final_norm is not None else frozen.points.last_output
    hooks = [*frozen.fwd_hooks(), (frozen.points.blocks[0].z, zero)]
    hooks += [(ends, lambda x, *, hook: seen.__setitem__("x", x))]
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    op = frozen.operator(heads={0: [0, 2, 3]})
    assert close(op(op.x), seen["x"], 1e-6)


def test_mlp_false_leaves_the_branches_out(frozen):
    bare = frozen.operator(mlp=False)
    assert bare.in_out().gap.max() < 1e-6
    assert close(frozen.operator(mlp=[0, 1])(bare.x), frozen.output, 1e-6)
    assert not close(frozen.operator(mlp=[0])(bare.x), frozen.operator(mlp=[1])(bare.x))


def test_results_do_not_depend_on_chunks(frozen, monkeypatch):
    op = frozen.operator()
    whole = (op.contributions(), op.slice(), op.in_out("all").scores, op.norm().scores, op.norm(probes=6).scores)
    monkeypatch.setattr(budget, "WORKING_BYTES", 1)
    parts = (op.contributions(), op.slice(), op.in_out("all").scores, op.norm().scores, op.norm(probes=6).scores)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("rows", ["gaussian", "orthonormal"])
@pytest.mark.parametrize("name", ["bridge/bert", pytest.param("bridge/llama", marks=pytest.mark.whole)])
def test_probes_estimate_the_square_without_bias_and_state_their_error(name, rows, model_named):
    op = tlens.freeze(model_named(name), some_tokens()).operator()
    exact = op.norm("all").scores
    estimates = [op.norm("all", probes=8, rows=rows, seed=seed) for seed in range(60)]
    squares = torch.stack([estimate.scores.square() for estimate in estimates])
    live = exact > 0
    off = (squares.mean(0) - exact.square()) / (squares.std(0) / len(squares) ** 0.5).clamp_min(1e-300)
    assert float((off[live].abs() < 3.5).double().mean()) > 0.97
    spread, stated = torch.stack([e.scores for e in estimates]).std(0)[live], torch.stack([e.stderr for e in estimates])
    assert float((stated.mean(0)[live] / spread).median()) == pytest.approx(1.0, abs=0.15)
    assert all(estimate.probes == 8 for estimate in estimates)
    assert torch.equal(estimates[0].scores, op.norm("all", probes=8, rows=rows).scores)
    assert not torch.equal(estimates[0].scores, estimates[1].scores)
    low, high = estimates[0].interval(0.9)
    assert bool((low <= estimates[0].scores).all() and (estimates[0].scores <= high).all())


@pytest.mark.whole
def test_orthonormal_rows_vary_less(frozen):
    op = frozen.operator()
    spreads = [
        torch.stack([op.norm(probes=8, rows=rows, seed=seed).scores for seed in range(40)]).std(0).sum()
        for rows in ("gaussian", "orthonormal")
    ]
    assert spreads[1] < spreads[0]


def test_as_many_probes_as_dimensions_are_exact(frozen):
    op = frozen.operator()
    for options in ({"probes": 16}, {"probes": 400}, {"tol": 1e-6}):
        found = op.norm(**options)
        assert torch.equal(found.scores, op.norm().scores)
        assert not found.stderr.any()
        assert found.probes == 16


def test_a_tolerance_is_reached_with_the_rows_it_takes(demo_model):
    op = tlens.freeze(demo_model, "Return the value of the").operator()
    loose, tight = (op.norm("all", tol=tol) for tol in (0.2, 0.06))
    assert 16 <= loose.probes < tight.probes < 128
    for found, tol in ((loose, 0.2), (tight, 0.06)):
        relevant = found.scores > 0.01 * found.scores.amax(-1, keepdim=True)
        assert float((found.stderr / found.scores)[relevant].max()) <= tol


@pytest.mark.parametrize("rows", ["gaussian", "orthonormal"])
@pytest.mark.parametrize("rank", [1, 2, 8, 24])
@pytest.mark.parametrize("spectrum", ["flat", "falling"])
@pytest.mark.few(4)
def test_intervals_cover_what_they_say_with_few_probes(rank, spectrum, rows):
    """A thousand estimates of one block at once, as prompts of a batch."""
    width, draws = 64, 1000
    values = torch.ones(rank) if spectrum == "flat" else 1 / torch.arange(1, rank + 1)
    generator = torch.Generator().manual_seed(rank)
    Q = torch.linalg.qr(torch.randn(width, rank, generator=generator, dtype=torch.float64))[0]
    block = Q * values.double()
    truth = block.norm()

    def pull(vectors, kept):
        pulled = (vectors.double() @ block)[:, :, None]
        return pulled.square().sum(-1), pulled[:kept]

    few = 0.92 if (spectrum, rows) == ("flat", "gaussian") else 0.90  # the standard error of a share is 0.01 here
    for probes, least in ((2, 0.74), (4, few), (16, 0.92), (48, 0.92)):
        found = probed(pull, (draws, width), generator, probes=probes, tol=None, rows=rows, stored=64)
        low, high = Collapse(found.norm[:, None], freedom=found.freedom[:, None]).interval()
        covered = float(((low <= truth) & (truth <= high)).double().mean())
        assert least <= covered <= (0.98 if probes > 4 or rows == "gaussian" else 1), (probes, covered)


@pytest.mark.parametrize("level", [0.025, 0.5, 0.975])
def test_chi_square_quantiles(level):
    freedom = torch.tensor([0.5, 1.0, 2.0, 7.3, 100.0, 5e4], dtype=torch.float64)
    found = chi_square_quantile(freedom, level)
    assert torch.allclose(torch.special.gammainc(freedom / 2, found / 2), torch.full_like(found, level), rtol=1e-9)
    assert float(chi_square_quantile(torch.tensor([2.0]), 0.5)) == pytest.approx(2 * math.log(2), rel=1e-12)


@pytest.mark.whole
def test_probes_of_the_embedded_model(demo_model):
    """At the cost of 48 rows: median relative error, and how often the stated 95 % interval holds the truth."""
    text = "If the file is not found, a FileNotFoundError is raised. Return the value of the"
    op = tlens.freeze(demo_model, text).operator()
    exact = op.norm().scores
    for rows in ("gaussian", "orthonormal"):
        found = [op.norm(probes=48, rows=rows, seed=seed) for seed in range(50)]
        errors = torch.stack([(estimate.scores - exact).abs() / exact for estimate in found])
        assert float(errors.median()) <= 0.08
        ends = [estimate.interval() for estimate in found]
        inside = torch.stack([(low <= exact) & (exact <= high) for low, high in ends]).double().mean()
        assert 0.90 <= float(inside) <= 0.97


def test_source_tokens_can_be_chosen(frozen):
    op, keys = frozen.operator(), [0, 3, -1]
    for query in (-1, 2):
        assert close(op.slice(query, keys=keys), op.slice(query)[:, :, keys])
        assert close(op.norm(query, keys=keys).scores, op.norm(query).scores[..., keys])
        assert torch.allclose(
            op.contributions(query, keys=keys), op.contributions(query)[:, :, keys], rtol=1e-9, atol=1e-12
        )
    assert close(op.norm("all", keys=[4]).scores, op.norm("all").scores[..., [4]])
    assert close(op.contributions(keys=[2, 1]), op.contributions()[:, :, [2, 1]])
    assert torch.allclose(
        op.norm(2, probes=5, keys=[1]).scores, op.norm(2, probes=5).scores[..., [1]], rtol=1e-9, atol=1e-12
    )
    assert torch.allclose(
        op.slice(0, keys=[3, 5]), op.slice(0)[:, :, [3, 5]], rtol=1e-9, atol=1e-12
    )  # in a causal model all zero
    assert close(op.norm(0, keys=[3, 5]).scores, op.norm(0).scores[..., [3, 5]])
    assert close(op.contributions(0, keys=[3, 5]), op.contributions(0)[:, :, [3, 5]])
    part = frozen.operator(layers=[1], heads={1: []}, mlp=False)  # nothing mixes positions but a pattern of zeros
    assert close(part.slice(2, keys=[2, 4]), part.slice(2)[:, :, [2, 4]])
    assert close(op.norm("all", keys=slice(1, 3)).scores, op.norm("all").scores[..., 1:3])
    assert close(op.norm("all", keys=3).scores, op.norm("all").scores[..., [3]])
    for wrong in ("none of them", None, [], [None], [6], 6, slice(6, None)):
        with pytest.raises(tlens.InvalidInputError):
            op.norm(keys=wrong)


def test_chosen_source_tokens_count_each_prompts_real_ones(model_named):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    op = tlens.freeze(model_named("bridge/gpt2"), some_tokens(), attention_mask=mask).operator()
    for found, whole in (
        (op.norm(-1, keys=[0, -2]).scores, op.norm().scores),
        (op.contributions("all", keys=[0, -2]), op.contributions()),
        (op.slice(-1, keys=[0, -2]), op.slice()),
    ):
        assert close(found[0], whole[0][:, [2, 4]])
        assert close(found[1], whole[1][:, [0, 4]])


def test_query_counts_real_tokens(frozen):
    op = frozen.operator()
    every = op.in_out(query="all").scores
    for query in (-1, 0, 3, -6):
        assert torch.allclose(op.in_out(query).scores[:, 0], every[:, query])
    for query in (6, -7):
        with pytest.raises(tlens.InvalidInputError, match="out of range"):
            op.in_out(query)
    with pytest.raises(tlens.InvalidInputError, match="integer"):
        op.norm(query=True)


def test_a_slice_is_of_one_query(model_named):
    with pytest.raises(tlens.InvalidInputError, match="one is needed"):
        tlens.freeze(model_named("bridge/gpt2"), some_tokens()).operator().slice("all")


def test_contributions_of_one_query(model_named):
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    op = tlens.freeze(model_named("bridge/gpt2"), tokens, attention_mask=mask).operator()
    every = op.contributions()
    assert torch.allclose(op.contributions(-1)[:, 0], torch.stack([every[0, 5], every[1, 3]]))
    assert not op.contributions(-1)[1, 0, 4:].any()


def test_a_direction_is_as_good_as_a_token(frozen):
    op = frozen.operator()
    direction = torch.randn(16, dtype=op.x.dtype)
    scores = op.target(direction=direction)
    assert torch.allclose(scores.total[:, 0], frozen.output[:, -1] @ direction)
    assert scores.gap.max() < 1e-6
    per_prompt = torch.randn(2, 16, dtype=op.x.dtype)
    assert torch.allclose(op.target(direction=per_prompt).total[:, 0], (frozen.output[:, -1] * per_prompt).sum(-1))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "family", [name for name in ("hooked/ln", "bridge/gpt2", "bridge/llama") if name in model_names()]
)
def test_the_gradient_is_what_the_frozen_model_does_when_the_stream_is_changed(family, layer, model_named):
    frozen = tlens.freeze(model_named(family), some_tokens())
    change = torch.randn_like(frozen.resid_pre(layer))
    gradient = frozen.operator(layers=slice(layer, None)).gradient(3, 5, query=[-2, -1])
    expected = torch.stack([(g * change * frozen.mask[..., None]).sum((-2, -1)) for g in gradient.unbind(1)], dim=1)

    def add(stream, hook):
        return stream + change * frozen.mask[..., None]

    point = frozen.points.blocks[layer].resid_pre
    with frozen.attached() as held:
        logits = [held(**frozen.inputs), held.run_with_hooks(**frozen.inputs, fwd_hooks=[(point, add)])]
    before, after = ((made[..., 3] - made[..., 5])[:, -2:] for made in logits)
    assert close((after - before).detach(), expected, tolerance(family))
    scores = frozen.operator(layers=slice(layer, None)).target(3, 5, query=[-2, -1]).scores
    assert close((gradient * frozen.resid_pre(layer)[:, None]).sum(-1), scores)


def test_one_target_for_each_prompt(frozen):
    op = frozen.operator()
    both = op.target([5, 9])
    assert torch.allclose(both.scores[0], op.target(5).scores[0])
    assert torch.allclose(both.scores[1], op.target(9).scores[1])


def test_numpy_numbers_are_tokens_too(model_named):
    numpy = pytest.importorskip("numpy")
    op = tlens.freeze(model_named("bridge/gpt2"), some_tokens()).operator()
    assert torch.equal(op.target(numpy.int64(5)).scores, op.target(5).scores)
    assert torch.equal(op.target(numpy.array([5, 6])).scores, op.target([5, 6]).scores)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op: op.target(48), "outside the vocabulary"),
        (lambda op: op.target(-1), "outside the vocabulary"),
        (lambda op: op.target(" Paris"), "no tokenizer"),
        (lambda op: op.target(1.5), "string or an id"),
        (lambda op: op.target([1, 2, 3]), "3 tokens for 2 prompts"),
        (lambda op: op.target(1, direction=torch.ones(16)), "not both"),
        (lambda op: op.target(direction=torch.ones(15)), "direction is"),
        (lambda op: op.target(1, minus=99), "minus=99"),
        (lambda op: op.norm(probes=1), "at least 2"),
        (lambda op: op.frozen.operator(layers=slice(2, 2)), "no such range"),
        (lambda op: op.frozen.operator(layers=slice(0, 9)), "no such range"),
        (lambda op: op.frozen.operator(layers=[0, 2]), "layers=2: pass 0 to 1"),
        (lambda op: op.frozen.operator(layers=[1, 0]), "consecutive"),
        (lambda op: op.frozen.operator(layers=[]), "layers"),
        (lambda op: op.frozen.operator(heads={0: [4]}), "=4: pass 0 to 3, heads of layer 0"),
        (lambda op: op.frozen.operator(heads={0: [True]}), "pass an integer, heads of layer 0"),
        (lambda op: op.frozen.operator(heads={2: [0]}), "not among"),
        (lambda op: op.frozen.operator(layers=2), r"slice\(0, 2\) for those before the input of blocks.2"),
        (lambda op: op.frozen.resid_pre(3), "pass 0 to 2"),
        (lambda op: op.frozen.pattern(-1), "pass 0 to 1"),
        (lambda op: op.frozen.block(2), "pass 0 to 1"),
        (lambda op: op.frozen.operator(mlp=[7]), "not among"),
        (lambda op: op.frozen.operator(rule="relu"), "a rule of the frozen model"),
        (lambda op: op.frozen.fwd_hooks(rule="relu"), "a rule of the frozen model"),
        (lambda op: op.frozen.operator(layers=slice(0, 1)).target(3), "ends at blocks.1 input, before the unembedding"),
        (lambda op: op.push(torch.ones(2, 5, 16)), "push"),
        (lambda op: op.pull(torch.ones(16)), "pull"),
    ],
)
def test_bad_input(frozen, call, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        call(frozen.operator())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.operator(layers=1), "slice"),
        (lambda f: f.operator(heads={0: 1}), "collection"),
        (lambda f: f.operator(mlp=None), "True, False"),
        (lambda f: tlens.freeze(f.model, f.tokens, store="gpu"), "store='gpu'"),
        (lambda f: f.operator(mlp={1: [3]}), "each whole"),
        (lambda f: f.operator(heads=[0, 3]), "layer -> heads"),
        (lambda f: f.operator().target([1, 2, 3]), "minus="),
    ],
)
def test_wrong_kinds_of_argument(model_named, call, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        call(tlens.freeze(model_named("bridge/gpt2"), some_tokens()))


def test_a_direction_that_is_not_finite_is_named(model_named):
    operator = tlens.freeze(model_named("bridge/gpt2"), some_tokens()).operator()
    with pytest.raises(tlens.InvalidInputError, match="direction has values that are not finite"):
        operator.target(direction=torch.full((16,), torch.nan))


def test_a_tensor_too_large_is_refused_before_work(frozen, monkeypatch):
    monkeypatch.setattr(budget, "MOST_BYTES", 1000)
    op = frozen.operator()
    for call in (op.dense, op.slice, op.contributions):
        with pytest.raises(tlens.SizeError, match="GiB"):
            call()
    assert op.in_out().scores.shape == (2, 1, 6)


def test_reprs_are_short_and_without_side_effects(frozen):
    for thing in (frozen, frozen.operator(), frozen.operator(mlp=False)):
        assert len(repr(thing)) < 200
    assert "parts left out" in repr(frozen.operator(mlp=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [n for n in ("hooked/gqa", "encoder/bert", "bridge/gpt2", "bridge/llama") if n in model_names()]
)
def test_other_dtypes_need_nothing(name, dtype):
    from tensorlens_tl.testing import tiny_model

    model = tiny_model(name).to(dtype)
    if hasattr(model.cfg, "dtype"):
        model.cfg.dtype = dtype
    frozen = tlens.freeze(model, some_tokens())
    result = frozen.operator().in_out()
    assert result.scores.dtype == torch.float32  # half precision is summed wide
    assert float(result.gap.max()) < {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert torch.isfinite(frozen.operator().contributions()).all()


@pytest.mark.parametrize("family", ["bridge/gpt2", "bridge/bert", "bridge/phi"])
@pytest.mark.parametrize("query", [-1, 2, "all"])
def test_biases_by_position_are_the_pulls_of_each_bias(family, query, model_named):
    """Every stage's bias, dotted with what is pulled back to it by the full maps, position by position."""
    frozen = tlens.freeze(model_named(family), some_tokens())
    operator = frozen.operator()
    apart, placed = (operator.in_out(query, bias=bias) for bias in ("apart", "position"))
    assert float(placed.gap.max()) < 1e-9
    assert not bool(placed.bias.any())
    assert torch.allclose((placed.scores - apart.scores).sum(-1), apart.bias, rtol=0, atol=1e-9)
    if frozen.causal:
        at = torch.arange(frozen.tokens.shape[1])
        queries = at if query == "all" else torch.tensor([at[query]])
        assert not bool((placed.scores - apart.scores)[:, at[None] > queries[:, None]].any())

    # what stands in the last block and the final norm, by hand: attention's biases at their own positions
    end = operator.map.stages[-1]
    if query == 2 and family == "bridge/gpt2":
        last = frozen.operator(layers=[frozen.n_layers - 1])
        g = torch.zeros_like(last.x)
        g[:, 2] = frozen.output[:, 2]
        shares = torch.zeros(last.x.shape[:2], dtype=last.x.dtype)
        shares += (g * end.bias).sum(-1)
        g = end.pull(g)
        layer = frozen.n_layers - 1
        mlp, attention = frozen.maps.mlp(layer), frozen.maps.attention(layer)
        norms = {name: frozen.maps.norm(layer, name) for name in frozen.view.blocks[layer].norms}
        branch = g
        for stage in reversed((norms["ln2"], *mlp.stages)):
            shares += (branch * stage.bias).sum(-1)
            branch = stage.pull(branch)
        g = branch = g + branch
        for stage in reversed((norms["ln1"], *attention.stages)):
            shares += (branch * stage.bias).sum(-1)
            branch = stage.pull(branch)
        made = last.in_out(2, bias="position").scores[:, 0] - last.in_out(2).scores[:, 0]
        assert torch.allclose(made, shares, rtol=0, atol=1e-9)


def test_biases_of_no_known_kind(model_named):
    operator = tlens.freeze(model_named("bridge/gpt2"), some_tokens()).operator()
    for call in (lambda: operator.in_out(bias="spread"), lambda: operator.target(5, bias="spread")):
        with pytest.raises(tlens.InvalidInputError, match="bias='spread'"):
            call()
    with pytest.raises(tlens.InvalidInputError, match="norm of T has no biases"):
        tlens.attribute(operator.frozen, collapse="norm", bias="position")


def test_inference_mode_is_no_obstacle(model_named):
    with torch.inference_mode():
        frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
        frozen.operator(rule="frozen-tangent").in_out()
    op = frozen.operator()
    x = op.x.clone().requires_grad_(True)
    op(x).sum().backward()
    assert x.grad is not None
