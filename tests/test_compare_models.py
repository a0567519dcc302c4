"""Two models, and two runs: changed weights and routes through layers sum to the change of the model's own number.

The independent computations are the models' own logits, models of which one weight alone was changed, and the change of
what heads write from TransformerLens' cache.
"""

import copy

import pytest
import tokenizers
import torch
from conftest import close, rest_whole, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.algebra.secants import MatrixChange
from tensorlens_tl.circuits.two_runs import directions_of
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import HEAD_ROUTES, ROUTES, ChangeRoutes, ModelChange
from tensorlens_tl.testing import encoder_decoder_names, model_names, tiny_input, tiny_model

HERE = set(model_names())
NAMES = [
    "hooked/ln", "hooked/gqa", "hooked/gated", "hooked/qk-norm", "hooked/parallel", "hooked/sandwich",
    "hooked/post-only", "encoder/bert", "bridge/gpt2", "bridge/llama", "bridge/qwen3", "bridge/neox",
]  # fmt: skip
"""Pre-LN, parallel, sandwich, post-only and post-LN blocks; plain and gated MLPs; grouped heads; norms of queries."""
NAMES = rest_whole([name for name in NAMES if name in HERE], "hooked/ln", "bridge/gpt2", "bridge/qwen3")
BOTH_STACKS = rest_whole(encoder_decoder_names(), "bridge/bart", "bridge/t5", "encoder-decoder/tied")
PLAIN = "hooked/ln" if "hooked/ln" in HERE else "bridge/gpt2"
HOOKED = pytest.mark.skipif("hooked/ln" not in HERE, reason="edits parameters of TransformerLens 3.9's class")
BY = ["matrix", "layer", "component", "head", "head_matrix", "rank"]
ASKED = {"target": 5, "minus": 9}


def two_models(name):
    """Two of one architecture that have no weight in common."""
    return tiny_model(name), tiny_model(name, seed=1)


def live(model, tokens, query=-1, target=5, minus=9):
    """The model's own logit difference."""
    logits = tlens.freeze(model, tokens).logits(query)
    return logits[..., target] - logits[..., minus]


def edited(model, change):
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        change(tuned)
    return tuned


def nonzero(change):
    return {name for name in change.names if bool(change[name].any())}


# ------------------------------------------------------------------ the sum


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", BY)
@pytest.mark.few(6)
def test_terms_sum_to_the_change_of_the_logit(name, by):
    base, tuned = two_models(name)
    tokens = some_tokens()
    change = tlens.compare_models(base, tuned, tokens, 5, 9, by=by, query=[2, -1])
    expected = live(tuned, tokens, [2, -1]) - live(base, tokens, [2, -1])
    assert close(change.total, expected, 1e-9)
    assert float(change.gap.max()) < tolerance(name)
    assert close(change.scores.sum(-1) + change.remainder, change.total, tolerance(name))
    assert close(change.tuned - change.base, change.total)


@pytest.mark.parametrize("name", NAMES)
def test_ways_to_group_terms_agree(name):
    base, tuned = two_models(name)
    ways = {by: tlens.compare_models(base, tuned, some_tokens(), 5, 9, by=by) for by in BY}
    matrix, layer, component, head, head_matrix, _ = ways.values()
    for at in range(2):
        own = [term for term in matrix.names if term.startswith(f"L{at}.")]
        assert close(sum(matrix[term] for term in own), layer[f"L{at}"])
        heads = [term for term in head.names if term.startswith(f"L{at}H") or term == f"L{at}.b_O"]
        assert close(sum(head[term] for term in heads), component[f"L{at}.attn"])
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            parts = [term for term in head_matrix.names if term.startswith(f"L{at}H") and term.endswith(weight)]
            assert close(sum(head_matrix[term] for term in parts), matrix[f"L{at}.{weight}"])
    for other in (layer, component, head):
        assert close(other["unembed"], sum(matrix[term] for term in ("W_U", "b_U") if term in matrix.names))


@pytest.mark.parametrize("name", NAMES)
def test_terms_by_position(name):
    base, tuned = two_models(name)
    change = tlens.compare_models(base, tuned, some_tokens(), 5, 9, query=[2, -1], positions=True)
    plain = tlens.compare_models(base, tuned, some_tokens(), 5, 9, query=[2, -1])
    assert change.names == plain.names
    assert close(change.keys.sum(-1), plain.scores)
    if "bert" not in name:
        assert not bool(change.keys[:, 0, :, 3:].any())  # nothing acts after the query
    assert len(change.to_dataframe()) == change.keys.numel()


@pytest.mark.parametrize("name", NAMES)
def test_swapped_models_change_the_sign(name):
    base, tuned = two_models(name)
    there = tlens.compare_models(base, tuned, some_tokens(), 5, 9, by="head")
    back = tlens.compare_models(tuned, base, some_tokens(), 5, 9, by="head")
    assert there.names == back.names
    assert close(there.scores, -back.scores, tolerance(name))


def test_a_model_and_itself():
    model = tiny_model(PLAIN)
    for other in (model, copy.deepcopy(model)):
        change = tlens.compare_models(model, other, some_tokens(), 5, 9)
        assert change.names == ["embed"]
        assert not bool(change.scores.any())
        assert not bool(change.total.any())


def test_a_direction():
    base, tuned = two_models(PLAIN)
    direction = torch.randn(16, dtype=torch.float64)
    change = tlens.compare_models(base, tuned, some_tokens(), direction=direction)
    ends = [tlens.freeze(model, some_tokens()).output[:, -1] for model in (tuned, base)]
    assert close(change.total[:, 0], (ends[0] - ends[1]) @ direction)
    assert float(change.gap.max()) < 1e-9
    assert "W_U" not in change.names


def test_queries_in_chunks():
    base, tuned = two_models(PLAIN)
    for by in ("head", "rank"):
        asked = {"by": by, "query": "all", **ASKED}
        whole = tlens.compare_models(base, tuned, some_tokens(), **asked)
        row = tlens.difference(*(tlens.freeze(model, some_tokens()) for model in (tuned, base))).row_bytes
        parts = tlens.compare_models(base, tuned, some_tokens(), **asked, memory=2 * row)
        assert parts.names == whole.names
        assert close(parts.scores, whole.scores)


# ------------------------------------------------------------------ weights that are changed alone


def term_of(parameter):
    """The term of a HookedTransformer's parameter: ``blocks.0.attn.W_V`` is ``L0.W_V``."""
    place, *rest = parameter.split(".")
    if place in ("embed", "pos_embed"):
        return "embed"
    if place == "blocks":
        number, *inside = rest
        return ".".join([f"L{number}", *(part for part in inside if part not in ("attn", "mlp"))])
    return parameter.removeprefix("unembed.")


@pytest.mark.parametrize(
    "name", rest_whole([name for name in ("hooked/ln", "bridge/gpt2", "bridge/neox") if name in HERE], "bridge/gpt2")
)
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.few(1)
def test_one_changed_parameter_is_the_whole_change(name, first):
    """Each parameter alone, a third of them at a time: its own term, equal to the change of the live model."""
    base = tiny_model(name)
    tokens = some_tokens()
    before = live(base, tokens)
    for number, (parameter, _) in list(enumerate(base.named_parameters()))[first::3]:

        def change(model, number=number):
            values = list(model.parameters())[number]
            values.add_(0.3 * torch.randn_like(values))

        tuned = edited(base, change)
        result = tlens.compare_models(base, tuned, tokens, **ASKED)
        assert close(result.scores.sum(-1), live(tuned, tokens) - before), parameter
        if name == "hooked/ln":
            assert set(result.names) == {term_of(parameter)}
            assert nonzero(result) <= {term_of(parameter)}


@HOOKED
def test_a_planted_change_of_one_head_is_all_there_is():
    base = tiny_model("hooked/ln")

    def plant(model):
        for weight in (model.blocks[1].attn.W_V, model.blocks[1].attn.W_O):
            weight[2] += 0.5 * torch.randn_like(weight[2])

    tuned = edited(base, plant)
    change = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="head")
    assert nonzero(change) == {"L1H2"}
    assert close(change["L1H2"], live(tuned, some_tokens()) - live(base, some_tokens()))
    by_matrix = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="head_matrix")
    assert nonzero(by_matrix) == {"L1H2.W_V", "L1H2.W_O"}


@HOOKED
@pytest.mark.parametrize(
    ("weight", "index", "heads"),
    [("W_Q", 2, {"L0H2"}), ("_W_K", 1, {"L0H2", "L0H3"}), ("_W_V", 0, {"L0H0", "L0H1"}), ("_b_K", 1, {"L0H2", "L0H3"})],
)
def test_heads_that_share_keys_and_values_each_have_their_part(weight, index, heads):
    base = tiny_model("hooked/gqa")

    def plant(model):
        values = getattr(model.blocks[0].attn, weight)
        values[index] += 0.5 * torch.randn_like(values[index])

    tuned = edited(base, plant)
    change = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="head")
    assert nonzero(change) == heads
    assert close(change.scores.sum(-1), live(tuned, some_tokens()) - live(base, some_tokens()))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(tied):
    from tensorlens_tl.testing.models import build_bridge

    torch.manual_seed(0)
    base = build_bridge("gpt2", tie_word_embeddings=tied)

    def embedding_changed(model):
        weights = [w for name, w in model.named_parameters() if w.shape == (48, 16)]
        weights[0].add_(0.3 * torch.randn_like(weights[0]))

    tuned = edited(base, embedding_changed)
    result = tlens.compare_models(base, tuned, some_tokens(), **ASKED)
    assert nonzero(result) == ({"embed", "W_U"} if tied else {"embed"})
    assert close(result.scores.sum(-1), live(tuned, some_tokens()) - live(base, some_tokens()))


# ------------------------------------------------------------------ a fine-tuned model


@pytest.fixture(scope="module")
def tuned_recall():
    """The bundled model of recall, and the same after some steps towards another rule."""
    base = tlens.load_demo_model("recall", dtype=torch.float64)
    tuned = copy.deepcopy(base).requires_grad_(True)
    task = evaluate.recall(64, seed=3)
    answers = sorted(set(task.answers.tolist()))
    following = dict(zip(answers, [*answers[1:], answers[0]], strict=True))
    expected = torch.tensor([following[int(answer)] for answer in task.answers])
    optimizer = torch.optim.Adam(tuned.parameters(), 1e-3)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(tuned(task.tokens)[:, -1], expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return base, tuned, evaluate.recall(4, seed=9)


def test_a_fine_tuned_model(tuned_recall):
    base, tuned, task = tuned_recall
    change = tlens.compare_models(base, tuned, task.tokens, task.answers.tolist(), by="component")
    with torch.no_grad():
        expected = [model(task.tokens)[:, -1].gather(1, task.answers[:, None]) for model in (tuned, base)]
    assert close(change.total, expected[0] - expected[1])
    assert float(change.total.abs().min()) > 1e-3
    assert float(change.gap.max()) < 1e-9
    assert len(nonzero(change)) == len(change)
    assert not change.scores.requires_grad


@HOOKED
def test_a_change_in_all_directions_has_no_terms_by_rank():
    base = tlens.load_demo_model()

    def change(model):
        weight = model.blocks[1].attn.W_O
        weight.add_(0.1 * torch.randn_like(weight))

    with pytest.raises(InvalidInputError, match=r"L1\.W_O changed in more than 64 singular directions"):
        tlens.compare_models(base, edited(base, change), "Return the value", " the", by="rank")


def test_the_mean_over_prompts(tuned_recall):
    base, tuned, task = tuned_recall
    change = tlens.compare_models(base, tuned, task.tokens, task.answers.tolist())
    mean = change.mean()
    assert close(mean.scores[0, 0], change.scores[:, 0].mean(0))
    assert close(mean.scores.sum(-1), mean.total)
    assert [entry.name for entry in mean.top(3)] == [
        mean.names[i] for i in mean.scores[0, 0].abs().argsort()[-3:].flip(0)
    ]
    assert "mean of 4 prompts" in mean.tokens[0]


def test_padded_prompts():
    base, tuned = two_models(PLAIN)
    prompts = [[5, 9, 11, 4, 8], [7, 6, 10]]
    for side in ("left", "right"):
        together = tlens.compare_models(base, tuned, prompts, **ASKED, padding_side=side)
        for row, prompt in enumerate(prompts):
            alone = tlens.compare_models(base, tuned, [prompt], **ASKED)
            if side == "right":  # learned positions count padding on the left
                assert close(together.scores[row], alone.scores[0])
        assert float(together.gap.max()) < 1e-9
        mean = tlens.compare_models(base, tuned, prompts, **ASKED, query="all", padding_side=side).mean()
        assert close(mean.scores.sum(-1), mean.total)


# ------------------------------------------------------------------ many prompts

MANY = [[5, 9, 11, 4, 8], [7, 6, 10], [3, 12, 8, 9, 1], [2, 40, 33, 21], [6, 5], [11, 8, 30]]
TARGETS = [5, 7, 3, 20, 31, 9]


@pytest.mark.parametrize("name", [name for name in NAMES if getattr(name, "values", [name])[0] != "encoder/bert"])
@pytest.mark.parametrize("by", rest_whole(BY, "matrix", "head", "rank"))
@pytest.mark.few(3)
def test_many_prompts_in_small_batches_are_each_what_it_is_alone(name, by):
    """Terms sum to the change of the live logit for every prompt, however they are batched."""
    base, tuned = two_models(name)
    asked = {"target": TARGETS, "minus": [12, 13, 14, 15, 16, 17], "by": by, "padding_side": "right"}
    many = tlens.compare_models(base, tuned, MANY, **asked, memory=1)
    assert close(many.scores.sum(-1) + many.remainder, many.total, tolerance(name))
    for row in (0, 3, 4):  # of every length but one
        prompt = MANY[row]
        each = {"target": TARGETS[row], "minus": asked["minus"][row]}
        expected = live(tuned, [prompt], **each) - live(base, [prompt], **each)
        assert close(many.total[row : row + 1], expected, 1e-9)
        alone = tlens.compare_models(base, tuned, [prompt], **each, by=by)
        assert alone.names == many.names
        assert close(many.scores[row], alone.scores[0], tolerance(name))
        assert many.tokens[row][: len(prompt)] == alone.tokens[0]
    together = tlens.compare_models(base, tuned, MANY, **asked)
    assert close(many.scores, together.scores, tolerance(name))
    assert many.target == "change of the logit of each answer − other"


@pytest.mark.parametrize("query", ["all", [0, -1]])
def test_batches_of_other_lengths_join_at_every_query(query):
    base, tuned = two_models(PLAIN)
    asked = {**ASKED, "query": query, "positions": True, "padding_side": "right"}
    many = tlens.compare_models(base, tuned, MANY, **asked, memory="8KB")  # a prompt each, and a query of it at a time
    for row, prompt in enumerate(MANY):
        alone = tlens.compare_models(base, tuned, [prompt], **asked)
        queries = alone.queries.shape[1]
        assert close(many.scores[row, :queries], alone.scores[0])
        assert close(many.keys[row, :queries, :, : len(prompt)], alone.keys[0])
        assert not bool(many.keys[row, queries:].any())
        assert not bool(many.keys[row, :, :, len(prompt) :].any())
        assert close(many.base[row, :queries], alone.base[0])
    assert float(many.gap.max()) < 1e-9
    assert len(many.to_dataframe(keys=False)) == sum(map(len, MANY) if query == "all" else [2] * 6) * len(many)
    assert close(many.mean().scores.sum(-1), many.mean().total)


@HOOKED
def test_a_term_that_a_batch_lacks_is_zero_there():
    """Two columns of the unembedding change: a batch about other tokens has no such term."""
    base = tiny_model("hooked/ln")

    def change(model):
        model.unembed.W_U[:, 5] += 0.5
        model.blocks[1].attn.W_V.mul_(1.1)

    many = tlens.compare_models(base, edited(base, change), some_tokens(), [4, 5], memory=1)
    assert many.names == ["L1.W_V", "W_U"]
    assert not bool(many["W_U"][0].any())
    assert bool(many["W_U"][1].any())
    assert close(many.scores.sum(-1), many.total)
    with pytest.raises(InvalidInputError, match=r"'L1\.W_V' is a term of this change"):
        many.with_names(["W_U"])


def test_a_prompt_that_is_refused_is_named_by_its_number():
    base, tuned = two_models(PLAIN)
    with pytest.raises(InvalidInputError, match="prompt 4"):
        tlens.compare_models(base, tuned, MANY, **ASKED, query=2, memory=1)
    with pytest.raises(InvalidInputError, match="target: 2 for 6 prompts"):
        tlens.compare_models(base, tuned, MANY, [5, 6], memory=1)


def test_the_mean_over_prompts_has_intervals(tuned_recall):
    base, tuned, _ = tuned_recall
    task = evaluate.recall(24, seed=9)
    change = tlens.compare_models(base, tuned, task.tokens, task.answers.tolist(), memory="1MB")
    frame = change.summary(0.9, seed=3)
    mean = change.mean()
    assert frame.index[-1] == "total"
    assert float(frame["mean"].iloc[:-1].sum()) == pytest.approx(float(mean.total), rel=1e-9)
    assert list(frame.index[:3]) == [entry.name for entry in mean.top(3)]
    draws = torch.randint(24, (2000, 24), generator=torch.Generator().manual_seed(3))
    for name in (frame.index[0], "total"):
        values = change.total[:, 0] if name == "total" else change[name][:, 0]
        ends = torch.quantile(values[draws].mean(1), torch.tensor([0.05, 0.95], dtype=torch.float64))
        assert close(torch.tensor(frame.loc[name, ["low", "high"]].to_numpy(dtype=float)), ends)
    assert (frame["low"] <= frame["mean"]).all()
    assert set(change.summary(names="L1.*").index[:-1]) == {name for name in change.names if name.startswith("L1.")}
    for options, message in (({"level": 95}, "level=95"), ({"names": "L9*"}, "names=")):
        with pytest.raises(InvalidInputError, match=message):
            change.summary(**options)


def test_models_that_tokenize_apart_are_refused_in_batches():
    model, other = tlens.load_demo_model(), tlens.load_demo_model()
    other.tokenizer = copy.deepcopy(other.tokenizer)
    other.tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    texts = ["Return the Value", "Set the Name of the"]
    with pytest.raises(InvalidInputError, match="tokenize the prompts differently"):
        tlens.compare_models(model, other, texts, " the", memory=1)


# ------------------------------------------------------------------ results


def test_results_subtract():
    base, tuned = two_models(PLAIN)
    other = tiny_model(PLAIN, seed=2)
    first, second = (tlens.compare_models(base, model, some_tokens(), **ASKED) for model in (tuned, other))
    steps = first - second
    assert close(steps.total, live(tuned, some_tokens()) - live(other, some_tokens()))
    assert close(steps.scores.sum(-1), steps.total)
    same = tlens.compare_models(base, base, some_tokens(), **ASKED)
    assert close((first - same).scores, first.scores)  # a term that one of them lacks is zero there
    assert close((same - first)["L0.W_V"], -first["L0.W_V"])
    with pytest.raises(InvalidInputError, match="Compare both by the same terms"):
        first - tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="layer")
    with pytest.raises(TypeError):
        first - 3


def test_results_are_saved_and_shown(tmp_path, capsys):
    base, tuned = two_models(PLAIN)
    change = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="head", positions=True)
    again = ModelChange.load(change.save(tmp_path / "change"))
    assert again.by == "head"
    assert close(again.keys, change.keys)
    assert close(again.base, change.base)
    change.show()
    assert change.top(1)[0].name in capsys.readouterr().out
    assert "H1" in change.heads_to_html()
    by = circuits.routes(two_runs(PLAIN), **ASKED)
    loaded = ChangeRoutes.load(by.save(tmp_path / "routes"))
    assert close(loaded.scores, by.scores)
    assert loaded.layers == by.layers
    assert "every row sums to the change" in by.to_html()
    frame = by.to_dataframe()
    assert close(
        torch.tensor(frame.groupby(["batch", "layer"])["score"].sum().values).reshape(2, 3), by.total.expand(2, 3)
    )
    assert "layers" in repr(by)


def test_what_is_printed_of_routes_is_what_the_figure_and_the_table_have(capsys, monkeypatch):
    """Every route, none merged with another; those by a norm's scale in a row below their layer's."""
    monkeypatch.setenv("COLUMNS", "400")
    by = circuits.routes(two_runs(PLAIN), **ASKED)
    by.show(batch=0)
    lines = [line.replace("┃", "│").split("│")[1:-1] for line in capsys.readouterr().out.splitlines()]
    headings, *rows = [[cell.strip() for cell in line] for line in lines if line]
    printed = {
        (row[0].removesuffix(", scale"), f"{route}{', scale' if row[0].endswith(', scale') else ''}"): float(cell)
        for row in rows
        for route, cell in zip(headings[1:], row[1:], strict=True)
        if cell
    }
    frame = by.to_dataframe()
    frame = frame.loc[frame["batch"] == 0]
    for layer, route, score in frame[["layer", "route", "score"]].itertuples(index=False):
        assert printed.get((layer, route), 0.0) == pytest.approx(score, rel=1e-2, abs=1e-6)
    assert {route for _, route in printed} == set(frame.loc[frame["score"] != 0, "route"])
    assert all(route in by.to_html(batch=0) for _, route in printed)


@pytest.mark.parametrize("by", BY)
def test_what_is_no_layers_is_in_every_table(by, capsys):
    """The embedding, the final norm and the unembedding, where they changed; no line of the embedding where not."""
    base, tuned = two_models(PLAIN)
    change = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by=by)
    expected = {"embed", "ln_final", "unembed"}
    if by in ("matrix", "rank"):
        expected = {"embed", "ln_final.w", "ln_final.b", "W_U"}
    assert expected <= set(change.names) & set(change.summary().index) & set(change.to_dataframe()["term"])
    change.show(len(change))
    printed = capsys.readouterr().out
    assert all(name in printed for name in expected)
    if by == "head":
        assert all(name in change.heads_to_html() for name in expected)


# ------------------------------------------------------------------ adapters


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_adapters_by_rank(family):
    pytest.importorskip("peft")
    from test_adapters import LLAMA, adapted, bridge, lora

    targets = {"llama": LLAMA, "neox": ["dense", "dense_h_to_4h", "dense_4h_to_h"]}[family]
    module = adapted(family, lora(targets))
    base = bridge(copy.deepcopy(module).unload())
    tuned = bridge(module.get_base_model())
    by_rank = tlens.compare_models(base, tuned, some_tokens(), **ASKED, by="rank")
    by_matrix = tlens.compare_models(base, tuned, some_tokens(), **ASKED)
    assert float(by_rank.gap.max()) < tolerance(family)
    assert close(by_rank.remainder, torch.zeros_like(by_rank.remainder), 1e-9)
    for matrix in by_matrix.names:
        parts = [name for name in by_rank.names if name.startswith(f"{matrix} rank ")]
        assert len(parts) == (2 if matrix != "embed" else 0)
        if parts:
            assert close(sum(by_rank[name] for name in parts), by_matrix[matrix])
    merged = bridge(copy.deepcopy(module).merge_and_unload())
    assert close(by_matrix.scores, tlens.compare_models(base, merged, some_tokens(), **ASKED).scores, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rank", [1, 5, 64])
def test_directions_of_a_change(rank, dtype):
    a = torch.randn(90, 110, dtype=dtype)
    factors = torch.randn(90, rank, dtype=dtype), torch.randn(rank, 110, dtype=dtype)
    change = MatrixChange(torch.randn(1, 3, 90, dtype=dtype), a, a - 0.1 * factors[0] @ factors[1])
    read, write = directions_of(change, "W")
    assert len(read) == rank
    expected = torch.linalg.svdvals(change.matrix)[:rank]
    assert torch.allclose(read.norm(dim=1), expected, rtol=1e-4 if dtype == torch.float32 else 1e-10)
    assert torch.allclose(read.mT @ write, change.matrix, atol=1e-4 if dtype == torch.float32 else 1e-12)


def test_a_change_of_more_directions_is_refused():
    a, factors = torch.randn(90, 110), (torch.randn(90, 65), torch.randn(65, 110))
    with pytest.raises(InvalidInputError, match=r"L0\.W_V changed in more than 64"):
        directions_of(MatrixChange(torch.randn(1, 3, 90), a, a - factors[0] @ factors[1]), "L0.W_V")


# ------------------------------------------------------------------ refused


def test_what_cannot_be_compared():
    model = tiny_model(PLAIN)
    wider = tlens.load_demo_model("recall", dtype=torch.float64)
    with pytest.raises(InvalidInputError, match=r"two architectures.*d_model"):
        tlens.compare_models(model, wider, some_tokens(), **ASKED)
    with pytest.raises(InvalidInputError, match="by='neuron'"):
        tlens.compare_models(model, model, some_tokens(), **ASKED, by="neuron")


def test_other_vocabularies_are_refused():
    model = tlens.load_demo_model()
    other = tlens.load_demo_model()
    other.tokenizer = copy.deepcopy(other.tokenizer)
    other.tokenizer.add_tokens(["a new word"])
    with pytest.raises(InvalidInputError, match="different vocabularies"):
        tlens.compare_models(model, other, "Return the value", " the")


# ------------------------------------------------------------------ routes


def two_runs(name, models=1):
    """A difference of two prompts; of two models as well, where there are two."""
    first = tiny_model(name)
    second = first if models == 1 else tiny_model(name, seed=1)
    tokens, options = tiny_input(first)
    others = {option: ids.flip(0) for option, ids in options.items()}
    return tlens.difference(tlens.freeze(first, tokens, **options), tlens.freeze(second, tokens.flip(0), **others))


@pytest.mark.parametrize("name", [*NAMES, *BOTH_STACKS])
@pytest.mark.parametrize("models", [1, 2])
def test_routes_sum_to_the_change_at_every_layer(name, models):
    difference = two_runs(name, models)
    by = circuits.routes(difference, **ASKED, query=[-3, -1])
    logits = [frozen.logits([-3, -1]) for frozen in (difference.a, difference.b)]
    cap = difference.view.soft_cap
    if cap is not None:
        logits = [cap * torch.atanh(capped / cap) for capped in logits]
    numbers = [row[..., 5] - row[..., 9] for row in logits]
    assert close(by.total, numbers[0] - numbers[1], 1e-9 if difference.sides is None else tolerance(name))
    assert by.layers == [*(f"L{layer}" for layer in range(difference.n_layers)), "end"]
    assert float(by.gap.max()) < tolerance(name)
    for column, route in enumerate(HEAD_ROUTES):
        assert close(by.heads[..., column].sum(-1), by[route])
    for layer in range(difference.n_layers + 1):
        assert float(by.at(layer).gap.max()) < tolerance(name)
    if models == 1:
        assert not bool(by["constants"].any())
        assert not bool(by["later constants"].any())


@pytest.mark.parametrize("name", [*NAMES, *BOTH_STACKS])
def test_swapped_runs_change_the_sign_of_every_route(name):
    difference = two_runs(name)
    there = circuits.routes(difference, **ASKED)
    back = circuits.routes(tlens.difference(difference.b, difference.a), **ASKED)
    assert close(there.scores, -back.scores, tolerance(name))


@pytest.mark.parametrize("name", [*NAMES, *BOTH_STACKS])
def test_norms_respond_where_they_are(name):
    """Before a sublayer they split its routes; after one, or around the stream, they are a route."""
    difference = two_runs(name)
    by = circuits.routes(difference, **ASKED)
    layout = difference.layouts[0]
    inner = slice(0, 2)
    of_norms = bool({layout.attn.after, layout.attn.outer} - {None})
    assert bool(by["values, scale"][..., inner].any()) == (layout.attn.before is not None)
    assert bool(by["MLP, scale"][..., inner].any()) == (layout.mlp.before is not None)
    if difference.sides is None:
        assert bool(by["norms"][..., inner].any()) == of_norms
        return
    assert bool(by["norms"][..., 0].any()) == of_norms
    assert bool(by["norms"][..., 1].any()) == (of_norms or difference.view.encoder_norm is not None)
    assert bool(by["cross queries, scale"].any()) == (difference.layouts[2].cross.before is not None)


@HOOKED
def test_routes_of_heads_are_what_their_values_and_patterns_change():
    """Of the last layer without a norm: Δz = P̄·Δv + ΔP·v̄, from the model's own cache."""
    model = tiny_model("hooked/attn-only-no-norm")
    tokens = some_tokens()
    caches = [model.run_with_cache(one)[1] for one in (tokens, tokens.flip(0))]
    patterns = [cache["blocks.1.attn.hook_pattern"] for cache in caches]
    values = [cache["blocks.1.attn.hook_v"] for cache in caches]
    direction = model.W_U[:, 5] - model.W_U[:, 9]
    mean = [(of_a + of_b) / 2 for of_a, of_b in (patterns, values)]
    out = model.blocks[1].attn.W_O @ direction
    by_values = torch.einsum("bhqk,bkhd,hd->bqh", mean[0], values[0] - values[1], out)[:, -1]
    by_patterns = torch.einsum("bhqk,bkhd,hd->bqh", patterns[0] - patterns[1], mean[1], out)[:, -1]
    stream = [cache["blocks.1.hook_resid_pre"][:, -1] for cache in caches]
    by = circuits.routes(two_runs("hooked/attn-only-no-norm"), **ASKED)
    heads = by.heads[:, 0, 1]
    assert close(heads[..., HEAD_ROUTES.index("values")], by_values)
    assert close(heads[..., HEAD_ROUTES.index("queries")] + heads[..., HEAD_ROUTES.index("keys")], by_patterns)
    assert close(by["direct"][:, 0, 1], (stream[0] - stream[1]) @ direction)
    assert {route for route in ROUTES if bool(by[route].any())} == {"direct", "values", "queries", "keys"}


@HOOKED
def test_heads_whose_scores_do_not_change_have_no_routes_by_attention():
    model = tiny_model("hooked/ln")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q[1] = 0
            block.attn.b_Q[1] = 0
    tokens = some_tokens()
    by = circuits.routes(tlens.difference(*(tlens.freeze(model, one) for one in (tokens, tokens.flip(0)))), **ASKED)
    by_attention = [HEAD_ROUTES.index(route) for route in HEAD_ROUTES if route.startswith(("queries", "keys"))]
    by_keys = by.heads[:, 0, :2, 1][..., by_attention]
    assert not bool(by_keys.any())
    assert bool(by.heads[:, 0, :2, 0][..., by_attention].all())


def test_routes_of_queries_in_chunks_and_of_a_direction():
    difference = two_runs(PLAIN, 2)
    whole = circuits.routes(difference, **ASKED, query="all")
    parts = circuits.routes(difference, **ASKED, query="all", memory=2 * difference.row_bytes)
    assert close(parts.scores, whole.scores)
    assert close(parts.heads, whole.heads)
    direction = torch.randn(16, dtype=torch.float64)
    by = circuits.routes(difference, direction=direction)
    assert close(by.total[:, 0], difference.output[:, -1] @ direction)
    assert float(by.gap.max()) < 1e-9
    assert [entry.name for entry in by.top(2, layer=0)] == [entry.name for entry in by.at(0).top(2)]


def test_no_such_route_or_layer():
    by = circuits.routes(two_runs(PLAIN), **ASKED)
    with pytest.raises(InvalidInputError, match="no route"):
        by["sideways"]
    with pytest.raises(InvalidInputError, match="layer"):
        by.at(3)
    with pytest.raises(InvalidInputError, match="top: a ChangeRoutes needs layer=, as in layer=0"):
        by.top(2)


def test_an_unknown_option_is_refused(model_named):
    model = model_named(PLAIN)
    with pytest.raises(InvalidInputError, match=r"no argument 'verfy'\. Did you mean 'verify'\? Freezing takes"):
        tlens.compare_models(model, model, some_tokens(), 5, verfy=True)
