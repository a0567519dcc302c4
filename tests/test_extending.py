"""What somebody adds needs no edit in the package: a map, a layer map, a method, each defined in this file alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import close, some_tokens
from torch import Tensor

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.algebra import ZERO, Chain, Linear, MixingMap, RowPositions, note_bias
from tensorlens_tl.algebra.bias_spreading import Spread, source_vectors, walk
from tensorlens_tl.testing import check_map, map_checks, method_checks, model_checks, parametrize_with_checks

pytestmark = pytest.mark.numeric

BATCH, POS, WIDTH = 2, 6, 16


@dataclass(frozen=True, eq=False)
class Recursion(MixingMap):
    """y_i = x_i + y_{i−1}·W + offset: every position reads all before it, and none of them by a pattern."""

    weight: Tensor
    length: int
    offset: Tensor | None = None

    @property
    def bias(self):
        if self.offset is None:
            return ZERO
        return self._forward(torch.zeros(1, self.length, len(self.weight), dtype=self.weight.dtype), affine=True)

    def at(self, where):
        return replace(self, length=len(range(self.length)[where]))

    def norm_bound(self):
        size = float(torch.linalg.matrix_norm(self.weight.double(), 2))
        return sum(size**power for power in range(self.length))

    def _forward(self, x, affine):
        rows, y = [], torch.zeros_like(x[..., 0, :])
        for position in range(x.shape[-2]):
            y = x[..., position, :] + y @ self.weight
            y = y if self.offset is None or not affine else y + self.offset
            rows.append(y)
        return torch.stack(rows, dim=-2)

    def _backward(self, g, biases):
        rows, back = [], torch.zeros_like(g[..., 0, :])
        for position in reversed(range(g.shape[-2])):
            back = g[..., position, :] + back @ self.weight.T
            rows.insert(0, back)
        pulled = torch.stack(rows, dim=-2)
        note_bias(pulled, ZERO if self.offset is None else self.offset, biases)
        return pulled


def recursion(bias=True):
    weight = 0.2 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    return Recursion(weight, POS, torch.randn(WIDTH, dtype=torch.float64) if bias else None)


@parametrize_with_checks(map_checks(recursion(), torch.zeros(BATCH, POS, WIDTH, dtype=torch.float64)))
def test_a_new_map(check):
    check()


def test_a_new_map_twice_in_a_chain_and_beside_the_stream():
    between = Linear(torch.randn(WIDTH, WIDTH, dtype=torch.float64), torch.randn(WIDTH, dtype=torch.float64))
    for m in (
        recursion() @ between @ recursion(),
        Chain((recursion() + tlens.algebra.Identity(), between, recursion().T)),
    ):
        check_map(m, torch.zeros(BATCH, POS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/bert", "bridge/neox"])
def test_a_new_map_before_a_model(model_named, name):
    """The operator of a model behind it: push, pull, keys, sums, bias walk and bound are its own."""
    op = tlens.freeze(model_named(name), some_tokens(BATCH, POS)).operator()
    made = replace(op, map=op.map @ recursion(), whole=False)
    dense = made.dense()
    x = torch.randn(3, *op.x.shape, dtype=torch.float64)
    pushed = torch.einsum("bidjc,rbjc->rbid", dense, x)
    assert close(made.push(x), pushed)
    assert close(made.pull(x), torch.einsum("bidjc,rbid->rbjc", dense, x))
    sizes = dense.permute(0, 1, 3, 2, 4).flatten(-2).norm(dim=-1)
    for keys in ([0, 4], [5], [2, 1]):
        assert close(made.slice(-1, keys=keys), dense[:, -1][:, :, keys])
        assert close(made.norm("all", keys=keys).scores, sizes[..., keys])
        assert close(made.contributions(keys=keys), made.contributions()[:, :, keys])
    assert float(made.in_out("all").gap.max()) < 1e-9
    by_position = made.in_out("all", bias="position")
    assert float(by_position.gap.max()) < 1e-9
    assert not by_position.bias.any()
    reach = torch.ones(POS, BATCH, POS, dtype=torch.bool)
    spread = Spread("absdot", reach, torch.zeros(BATCH, dtype=torch.long))
    walked = walk(made.map, source_vectors(op.x, False), spread, causal=False, width=24)
    assert close(walked.sum(0), made(op.x))
    largest = float(torch.linalg.matrix_norm(dense[0].reshape(POS * WIDTH, -1), 2))
    assert circuits.norm_bound(made) >= largest


def test_biases_before_attention_are_met_at_the_asked_positions_alone():
    """What `pull_between` says of its biases where only some source tokens are asked for."""
    m, at = recursion() @ Linear(torch.eye(WIDTH).double(), torch.ones(WIDTH).double()), torch.tensor([[5, 5]])
    vectors, terms = torch.randn(1, BATCH, WIDTH, dtype=torch.float64), []
    m.pull_between(vectors, RowPositions(at), [0], POS, causal=True, biases=terms)
    assert [where for _, where in terms] == [slice(0, 6, None), [0]]


def test_a_new_layer_map(model_named, clean_registry):
    @tlens.register_layer_map("first head", holds_residual=False)
    def first_head(frozen):
        real = frozen.mask[:, :, None] & frozen.mask[:, None]
        return torch.stack([frozen.pattern(layer)[:, 0] * real for layer in range(frozen.n_layers)])

    assert "first head" in tlens.list_layer_maps()
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    first, second = (frozen.pattern(layer)[:, 0] for layer in range(2))
    assert close(tlens.attribute(frozen, method="mean", layer_map="first head").scores, (first + second) / 2)
    eye = torch.eye(6, dtype=torch.float64)
    rolled = (second + eye) @ (first + eye) / 4
    assert close(tlens.attribute(frozen, method="rollout", layer_map="first head").scores, rolled)
    with pytest.raises(tlens.InvalidInputError, match="'first head'"):
        tlens.attribute(frozen, method="rollout", layer_map="last head")
    with pytest.raises(tlens.RegistryError, match="is already"):
        tlens.register_layer_map("first head", holds_residual=True)(lambda frozen: first)
    with pytest.raises(tlens.RegistryError, match="a name is needed"):
        tlens.register_layer_map(first_head, holds_residual=True)
    with pytest.raises(tlens.RegistryError, match="a name is needed"):
        tlens.register_method("")


@pytest.mark.parametrize("gives", [torch.ones(2, 2, 6), "maps"])
def test_a_layer_map_of_another_shape_is_refused(model_named, clean_registry, gives):
    tlens.register_layer_map("odd", holds_residual=False)(lambda frozen: gives)
    with pytest.raises(tlens.RegistryError, match=r"\[layer, batch, query, key\] = \(2, 2, 6, 6\)"):
        tlens.attribute(tlens.freeze(model_named("bridge/gpt2"), some_tokens()), method="mean", layer_map="odd")


@parametrize_with_checks(method_checks("rollout", ["bridge/gpt2", "bridge/bert"]))
def test_checks_of_a_method_are_tests_of_their_own(check):
    check()


@parametrize_with_checks(model_checks("bridge/llama"))
def test_checks_of_a_model_are_tests_of_their_own(check):
    check()


def test_checks_have_names():
    names = [check.name for check in model_checks("bridge/llama")]
    assert "bridge/llama: padding on the left" in names
    assert "bridge/llama: held by hooks frozen-integrated-gradients" in names
    assert repr(map_checks(recursion(), torch.zeros(2, 6, 16).double())[0]) == "shapes"


# ------------------------------------------------------------------- a method of one's own that explains a prediction


def _recorder(seen, **registered):
    """A method registered under the name "mine", which notes the target that it is called with."""

    def mine(frozen, *, target=None, query=-1):
        seen.append(target)
        return tlens.attribute(frozen, method="input-x-gradient", target=0 if target is None else target, query=query)

    tlens.register_method("mine", **registered)(mine)


def _evaluations(model):
    tokens, evaluate = some_tokens(2, 6), tlens.evaluate
    return {
        "perturbation": lambda methods: evaluate.perturbation(model, tokens, methods, fractions=(0, 0.5, 1)),
        "stability": lambda methods: evaluate.stability(model, tokens, methods),
        "agreement": lambda methods: evaluate.agreement(model, tokens, [*methods, "random"]),
        "completeness": lambda methods: evaluate.completeness(model, tokens, methods),
        "randomisation": lambda methods: evaluate.randomisation(model, tokens, methods),
        "known_answer": lambda methods: evaluate.known_answer(
            model, evaluate.induction(2, d_vocab=40, segment=8), methods, only_correct=False
        ),
    }


EVALUATIONS = ("perturbation", "stability", "agreement", "completeness", "randomisation", "known_answer")


@pytest.mark.parametrize("what", EVALUATIONS)
def test_evaluations_give_a_method_the_prediction_that_it_explains(what, model_named, clean_registry):
    seen = []
    _recorder(seen)
    _evaluations(model_named("bridge/gpt2"))[what](["mine"])
    assert seen
    assert all(isinstance(target, list) for target in seen)  # a predicted token for each prompt


def test_the_prediction_is_the_models_own(model_named, clean_registry):
    from tensorlens_tl.evaluate.scorers import predictions, scorers_of

    seen = []
    _recorder(seen)
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 6))
    scorers = scorers_of(["mine", "tensorlens", "decompx", "tensorlens target", "decompx target"])
    mine, bare, bare_decompx, target, decompx_target = (scorer(frozen) for scorer in scorers)
    assert seen == [predictions(frozen)[0].tolist()]
    assert close(bare, target)
    assert close(bare_decompx, decompx_target)
    assert bool(torch.isfinite(mine).all())


def test_options_that_say_more_stand(model_named, clean_registry):
    from tensorlens_tl.evaluate.scorers import scorers_of

    seen = []
    _recorder(seen)
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 6))
    for scorer in scorers_of({"a": ("mine", {"target": 5}), "b": ("mine", {"target": None})}):
        scorer(frozen)
    assert seen == [5, None]


def test_a_registration_says_what_a_signature_cannot(model_named, clean_registry):
    from tensorlens_tl.evaluate.scorers import scorers_of

    seen = []
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 6))
    _recorder(seen, explains_prediction=False)
    scorers_of(["mine"])[0](frozen)
    assert seen == [None]

    @tlens.register_method("any-option")
    def any_option(frozen, **options):
        seen.append(options.get("target"))
        return tlens.attribute(frozen, method="alti", query=options["query"])

    scorers_of(["any-option"])[0](frozen)
    assert isinstance(seen[-1], list)


def test_a_sum_that_misses_its_total_is_seen(model_named):
    """Of any method: the gap is compared with what the proof of the pass allows."""

    def doubled(strict):
        frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(1, 6), strict=strict)
        sums = frozen.operator().target(5)
        numbers = {"bias": sums.bias, "total": sums.total, "additive": True}
        assert float(tlens.Attribution.of(frozen, sums.scores, method="sum", query=-1, **numbers).gap.max()) < 1e-9
        return tlens.Attribution.of(frozen, 2 * sums.scores, method="doubled", query=-1, **numbers)

    with pytest.warns(tlens.GapWarning, match="its parts miss the model's own number"):
        assert float(doubled(strict=False).gap.max()) > 0.01
    with pytest.raises(tlens.NumericalError, match="its parts miss the model's own number"):
        doubled(strict=True)


@pytest.mark.parametrize(
    ("reads_maps", "options", "proved"),
    [(True, {}, 2), (False, {}, 1), (False, {"verify": True}, 2), (True, {"verify": False}, 1)],
)
def test_blocks_are_proved_for_a_method_that_reads_their_maps(model_named, clean_registry, reads_maps, options, proved):
    """Both blocks of this model are of one kind, of which at least the first is proved."""

    @tlens.register_method("of-the-pass", reads_maps=reads_maps)
    def of_the_pass(frozen):
        blocks = {"blocks.0", "blocks.1"} & set(frozen.errors)
        scores = frozen.resid_pre(0).new_full((1, 1, 6), len(blocks))
        return tlens.Attribution.of(frozen, scores, method="of-the-pass", query=-1)

    result = tlens.attribute(model_named("bridge/gpt2"), some_tokens(1, 6), method="of-the-pass", **options)
    assert set(result.scores.flatten().tolist()) == {proved}


@pytest.mark.parametrize("command", ["attribute", "report", "evaluate"])
def test_the_command_line_gives_the_prediction_too(command, tmp_path, clean_registry):
    from tensorlens_tl.commands import main

    seen = []
    _recorder(seen)
    words = {
        "attribute": ["attribute", "Return the value of", "--method", "mine"],
        "report": ["report", "Return the value of", "--methods", "mine", "-o", str(tmp_path / "a.html")],
        "evaluate": ["evaluate", "known-answer", "--model", "demo:recall", "-n", "4", "--methods", "mine"],
    }
    assert main(words[command]) == 0
    assert seen
    assert None not in seen


def test_a_minus_that_a_method_does_not_take_is_refused(capsys, clean_registry):
    from tensorlens_tl.commands import main

    _recorder([])
    assert main(["attribute", "Return the value", "--method", "mine", "--target", " the", "--minus", " a"]) == 1
    assert "--minus: 'mine' has no such option" in " ".join(capsys.readouterr().err.split())
