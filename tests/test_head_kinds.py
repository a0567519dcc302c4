"""Previous-token, duplicate-token and induction heads: the scores of a literal loop, and of TransformerLens."""

import pytest
import torch
from conftest import close

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.testing import model_names, tiny_model

PROMPTS = [[3, 7, 5, 3, 7, 3, 7], [4, 9, 4, 4], [5, 6, 7, 8, 6]]
FUNCTIONS = {
    "previous": circuits.previous_token_scores,
    "duplicate": circuits.duplicate_token_scores,
    "induction": circuits.induction_scores,
}


def places(kind, tokens, query):
    """Where a token is to attend, by the definition."""
    if kind == "previous":
        return [query - 1] if query else []
    earlier = [key for key in range(query) if tokens[key] == tokens[query]]
    if kind == "duplicate":
        return earlier
    return [key + 1 for key in earlier]


def by_loop(kind, tokens, pattern):
    """The mean attention of one head's pattern `[query, key]`."""
    shares = [
        sum(float(pattern[query, key]) for key in places(kind, tokens, query))
        for query in range(len(tokens))
        if places(kind, tokens, query)
    ]
    return sum(shares) / len(shares), len(shares)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_literal_loop_gives_the_same(kind, padding_side):
    model = tiny_model("bridge/gpt2")
    width = max(map(len, PROMPTS))
    tokens = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(PROMPTS):
        real = slice(width - len(prompt), None) if padding_side == "left" else slice(0, len(prompt))
        tokens[row, real], mask[row, real] = torch.tensor(prompt), 1
    result = FUNCTIONS[kind](model, tokens, attention_mask=mask)
    frozen = tlens.freeze(model, tokens, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        real = mask[row].bool()
        for layer in range(2):
            for head in range(model.cfg.n_heads):
                pattern = frozen.pattern(layer)[row, head][real][:, real]
                expected, count = by_loop(kind, prompt, pattern)
                assert float(result.scores[row, layer, head]) == pytest.approx(expected, abs=1e-12)
                assert int(result.counts[row]) == count
    parts = FUNCTIONS[kind](model, PROMPTS, memory="20KB")
    whole = FUNCTIONS[kind](model, PROMPTS)
    assert close(parts.scores, whole.scores)
    assert torch.equal(parts.counts, whole.counts)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("previous", "previous_token_head"), ("duplicate", "duplicate_token_head"), ("induction", "induction_head")],
)
def test_transformer_lens_divides_by_the_attention_of_every_token(kind, name):
    detector = pytest.importorskip("transformer_lens.head_detector")
    model = tlens.load_demo_model()
    text = "Return the value of the file, or the name of the file"
    frozen = tlens.freeze(model, text)
    theirs = detector.detect_head(model, text, name)
    ours = FUNCTIONS[kind](frozen)
    share = int(ours.counts) / frozen.tokens.shape[1]
    assert torch.allclose(ours.scores[0] * share, theirs.to(ours.scores), atol=1e-5)


def test_the_program_for_induction_has_both_kinds_of_heads():
    program = tlens.demo.program("induction")
    tokens = program.attention(8).tokens
    assert circuits.previous_token_scores(program.model(), tokens).top(1)[0].score > 0.9
    assert circuits.induction_scores(program.model(), tokens).top(1)[0].score > 0.9


def test_the_trained_induction_heads_are_in_the_second_layer():
    model = tlens.demo.induction_checkpoints()[2200]
    tokens = evaluate.induction(16, d_vocab=model.cfg.d_vocab, segment=8).tokens
    assert circuits.induction_scores(model, tokens).top(1)[0].name.startswith("L1")
    assert circuits.previous_token_scores(model, tokens).top(1)[0].name.startswith("L0")


def test_a_prompt_without_such_a_token_has_no_score():
    model = tiny_model("bridge/gpt2")
    result = circuits.induction_scores(model, [PROMPTS[0], [3, 4, 5]])
    assert result.scores[1].isnan().all()
    assert torch.equal(result.mean().scores, result.scores[:1])
    assert set(result.to_dataframe()["batch"]) == {0}


def test_what_has_no_such_heads_is_refused():
    model = tiny_model("bridge/gpt2")
    with pytest.raises(InvalidInputError, match="none of the prompts"):
        circuits.duplicate_token_scores(model, [[3, 4, 5]])
    with pytest.raises(InvalidInputError, match="missing"):
        circuits.duplicate_token_scores(model)
    with pytest.raises(InvalidInputError, match="already"):
        circuits.duplicate_token_scores(tlens.freeze(model, PROMPTS[:1]), PROMPTS)
    if "bridge/mamba" in model_names():
        with pytest.raises(UnsupportedModelError, match="no layer"):
            circuits.duplicate_token_scores(tiny_model("bridge/mamba"), PROMPTS[:1])
