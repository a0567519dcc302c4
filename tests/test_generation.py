"""Generated text: every token and span exact, one pull for a span, and hops that conserve the total."""

import copy
import random
from pathlib import Path

import pytest
import torch
from conftest import close, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits, generation
from tensorlens_tl.commands import main
from tensorlens_tl.evaluate import tasks
from tensorlens_tl.generation import freeze_generation, sent_on
from tensorlens_tl.report import predict
from tensorlens_tl.testing import encoder_decoder_names, model_names, tiny_model

NEXT = tlens.NEXT
PROMPT = "If the file is not found, a"
PROMPTS = [PROMPT, "Return the value of the", "Raise"]
ENCODERS = {"encoder/bert", "bridge/bert", "bridge/roberta", "hooked/bidirectional", *encoder_decoder_names()}


@pytest.fixture(params=[name for name in model_names() if name not in ENCODERS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def written():
    return freeze_generation(tlens.load_demo_model(dtype=torch.float64), PROMPT, max_new_tokens=8)


def sums(result):
    return result.scores.sum(-1) + result.bias


# ------------------------------------------------------------------ exact, in every family


def test_tokens_spans_and_hops_are_exact(model, name):
    prompts, limit = some_tokens(batch=2, pos=4), tolerance(name)
    text = freeze_generation(model, prompts, max_new_tokens=4, stop_at_eos=False)
    logits = model(text.frozen.tokens).detach()[:, 3:7]
    assert torch.equal(text.frozen.tokens[:, 4:], logits.argmax(-1))  # greedy
    cap = text.frozen.view.soft_cap
    own = logits.amax(-1) if cap is None else cap * torch.atanh(logits.amax(-1) / cap)

    tokens = text.attribute()
    assert tokens.queries.tolist() == [[3, 4, 5, 6]] * 2
    assert close(tokens.total, own, limit)
    span = text.attribute(span=(1, 4))  # one pull
    assert close(span.total[:, 0], own[:, 1:].sum(1), limit)
    assert close(span.scores[:, 0], tokens.scores[:, 1:].sum(1), limit)
    assert close(span.bias[:, 0], tokens.bias[:, 1:].sum(1), limit)
    sent = text.attribute(span=(1, 4), hops="all")
    assert not sent.scores[:, :, 4:].any()  # everything has landed on the prompt
    for result in (tokens, span, sent, text.attribute(span=(1, 4), hops=1)):
        assert float(result.gap.max()) <= limit
        assert close(sums(result), result.total, limit)


def test_a_difference_to_the_runner_up(model_named):
    model, prompts = model_named("bridge/gpt2"), some_tokens(batch=2, pos=5)
    text = freeze_generation(model, prompts, max_new_tokens=4, stop_at_eos=False)
    best, _ = model(text.frozen.tokens).detach()[:, 4:8].topk(2, dim=-1)  # greedy: the first is what is there
    tokens = text.attribute(minus="runner-up")
    assert close(tokens.total, best[..., 0] - best[..., 1])
    assert close(sums(text.attribute(minus="runner-up", span="all")), tokens.total.sum(1, keepdim=True))


# ------------------------------------------------------------------ the next token as a target


def test_the_next_token_in_every_method_and_circuit():
    frozen = tlens.freeze(tlens.load_demo_model(dtype=torch.float64), PROMPT)
    named = frozen.tokens[:, [4, 7]].tolist()
    for method in ("tensorlens", "decompx", "input-x-gradient"):
        made = tlens.attribute(frozen, method=method, target=NEXT, minus=" the", query=[3, 6])
        said = tlens.attribute(frozen, method=method, target=named, minus=" the", query=[3, 6])
        assert torch.equal(made.scores, said.scores)
        assert "each query's next token − ' the'" in made.target
    made = circuits.logit_attribution(frozen, NEXT, query=[3, 6])
    assert torch.equal(made.scores, circuits.logit_attribution(frozen, named, query=[3, 6]).scores)
    against = tlens.attribute(frozen, target=" the", minus=NEXT, query=[3, 6])
    assert torch.equal(against.scores, -tlens.attribute(frozen, target=NEXT, minus=" the", query=[3, 6]).scores)
    prediction = predict(frozen, NEXT, query=3)
    assert prediction.target == named[0][0]


def test_the_next_token_is_kept_in_files(tmp_path):
    model = tlens.load_demo_model()
    made = tlens.attribute(model, PROMPTS[:2], target=NEXT, query=slice(0, 3), memory="1MB")
    kept = tlens.Attribution.load(made.save(tmp_path / "a.safetensors"))
    assert kept.options["target"] is NEXT
    again = tlens.attribute_generation(model, PROMPT, max_new_tokens=2, span=slice(0, 2), hops="all")
    kept = tlens.Attribution.load(again.save(tmp_path / "b.safetensors"))
    assert kept.options == again.options
    assert kept.to_html() == again.to_html()


@pytest.mark.parametrize("query", [-1, "all", [0, -1], slice(None)])
def test_the_last_token_has_no_next(query):
    frozen = tlens.freeze(tlens.load_demo_model(), PROMPTS[:2], padding_side="left")
    with pytest.raises(tlens.InvalidInputError, match=r"nothing follows position|unequal|same number"):
        tlens.attribute(frozen, target=NEXT, query=query)


def test_an_image_has_no_next_token():
    images, _ = tlens.demo.digit_images()
    with pytest.raises(tlens.InvalidInputError, match="no next token"):
        tlens.attribute(tlens.freeze(tlens.load_demo_model("digits"), images[:1]), target=NEXT)


def test_neither_side_of_an_encoder_decoder_goes_on(model_named):
    frozen = tlens.freeze(model_named("bridge/bart"), some_tokens(), decoder_input_ids=some_tokens(pos=4))
    made = tlens.attribute(frozen, target=NEXT, query=[6, 8])
    assert close(made.scores, tlens.attribute(frozen, target=frozen.tokens[:, [7, 9]].tolist(), query=[6, 8]).scores)
    summed = frozen.operator().target(NEXT, query=[6, 8], summed=True)
    assert close(summed.scores[:, 0], made.scores.sum(1))
    for query in (5, 9):
        with pytest.raises(tlens.InvalidInputError, match="nothing follows"):
            frozen.operator().target(NEXT, query=query)


def test_places_of_each_prompt_as_a_query():
    frozen = tlens.freeze(tlens.load_demo_model(dtype=torch.float64), PROMPTS)
    places = torch.tensor([[3, 8], [2, 4], [1, 8]])  # the last is padding
    made = frozen.operator().in_out(places)
    every = frozen.operator().in_out("all")
    assert close(made.scores[0], every.scores[0, [3, 8]])
    assert close(made.scores[1], every.scores[1, [2, 4]])
    assert not made.scores[2, 1].any()
    for bad in (places[:2], places + 90, places.double(), places[:, :0]):
        with pytest.raises(tlens.InvalidInputError, match=r"\[3, query\]"):
            frozen.operator().in_out(bad)


# ------------------------------------------------------------------ hops


def slowly(scores, bias, links, link_bias, positions, hops, shares):
    """The definition, one token after another."""
    scores, total = scores.clone(), bias.clone()
    for _ in range(hops):
        before = scores.clone()
        for token, position in enumerate(positions):
            scores[position] -= before[position]
            made, apart = links[token], link_bias[token]
            if shares == "absolute":
                made, apart = made.abs(), apart.abs()
            size = made.sum() + apart
            scores += before[position] * made / size
            total += before[position] * apart / size
    return scores, total


@pytest.mark.parametrize("shares", ["signed", "absolute"])
@pytest.mark.parametrize("hops", [0, 1, 2, 4, 9, "all"])
def test_hops_are_the_definition(hops, shares):
    tokens, pos, first = 4, 9, 5
    draw = torch.Generator().manual_seed(1)
    scores, links = (torch.randn(2, n, pos, dtype=torch.float64, generator=draw) for n in (3, tokens))
    bias, link_bias = (torch.randn(2, n, dtype=torch.float64, generator=draw) for n in (3, tokens))
    links = links * (torch.arange(pos) < torch.arange(first, pos)[:, None])
    generated = (torch.arange(pos) == torch.arange(first, pos)[:, None]).expand(2, -1, -1)
    landed, left = sent_on(scores, bias, links, link_bias, generated, hops, shares)
    count = tokens if hops == "all" else hops
    for row in range(2):
        for query in range(3):
            args = scores[row, query], bias[row, query], links[row], link_bias[row], range(first, pos), count, shares
            expected, total = slowly(*args)
            assert close(landed[row, query], expected)
            assert close(left[row, query], total)
    assert close(landed.sum(-1) + left, scores.sum(-1) + bias)


def test_signed_shares_by_hand():
    """Two prompt tokens and two generated ones, of totals 4 and 2: each line is worked out on paper."""
    scores, bias = torch.tensor([[[1.0, 0.0, 2.0, 4.0]]]), torch.tensor([[0.5]])
    links, apart = torch.tensor([[[2.0, 3.0, 0.0, 0.0], [1.0, 0.0, -2.0, 0.0]]]), torch.tensor([[-1.0, 3.0]])
    generated = torch.tensor([[[False, False, True, False], [False, False, False, True]]])
    for hops, expected, left in (
        (1, [4.0, 1.5, -4.0, 0.0], 6.0),
        (2, [2.0, -1.5, 0.0, 0.0], 7.0),
        ("all", [2.0, -1.5, 0.0, 0.0], 7.0),
    ):
        landed, rest = sent_on(scores, bias, links, apart, generated, hops)
        assert landed.tolist() == [[expected]]
        assert rest.tolist() == [[left]]
    landed, rest = sent_on(scores, bias, links, apart, generated, 1, totals=torch.tensor([[4.0, 0.0]]))
    assert landed.tolist() == [[[2.0, 1.5, 0.0, 0.0]]]  # the second has no shares: its 4 are the bias's
    assert rest.tolist() == [[4.0]]


def witness(text, span, hops, minus=None):
    """Signed shares from the scores of each token, one question and one hop after the other; the text is one row."""
    positions = text.positions[0].tolist()
    operator = text.frozen.operator()
    rows = [operator.target(NEXT, query=position - 1) for position in positions]
    asked = [operator.target(NEXT, minus, query=position - 1) for position in positions[span]]
    scores = sum(one.scores[0, 0] for one in asked)
    bias = sum(one.bias[0, 0] for one in asked)
    typical = (sum(float(one.total) ** 2 for one in rows) / len(rows)) ** 0.5
    for _ in range(hops):
        held = {position: float(scores[position]) for position in positions}
        for position, row in zip(positions, rows, strict=True):
            scores[position] -= held[position]
            if abs(float(row.total)) < typical / 4:
                bias = bias + held[position]
                continue
            scores = scores + row.scores[0, 0] * held[position] / row.total[0, 0]
            bias = bias + row.bias[0, 0] * held[position] / row.total[0, 0]
    return scores, bias


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.few(24)
def test_hops_at_one_pull_each(model, name, hops):
    """What is sent on without the scores of single tokens is what these give, and nothing is lost on the way."""
    limit = tolerance(name)
    text = freeze_generation(model, some_tokens(batch=1, pos=4), max_new_tokens=5, stop_at_eos=False)
    for minus in (None, "runner-up"):
        pulled = text.attribute(span=slice(1, 5), hops=hops, minus=minus)
        assert not text._links  # no token was asked about by itself
        scores, bias = witness(text, slice(1, 5), hops, minus)
        assert close(pulled.scores[0, 0], scores, limit)
        assert close(pulled.bias[0, 0], bias, limit)
        plain = text.attribute(span=slice(1, 5), minus=minus)
        assert close(sums(pulled), plain.total, limit)
        assert close(pulled.total, plain.total, limit)
        assert not pulled.scores[0, 0, 9 - hops :].any()  # exactly nothing, where nothing can be


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bias", ["apart", "position"])
def test_pulled_hops_of_uneven_prompts_are_those_of_every_token(side, bias, demo_model):
    given = {"continuation": [[5, 6, 9, 3], [7, 8, 9], [4, 6]], "padding_side": side}
    text = freeze_generation(demo_model, PROMPTS, **given)
    settings = {"span": slice(-2, None), "bias": bias, "hops": 1}
    pulled = text.attribute(**settings)
    text.links(bias=bias)
    by_links = text.attribute(**settings)
    assert close(pulled.scores, by_links.scores, 1e-5)
    assert close(pulled.bias, by_links.bias, 1e-5)
    assert close(pulled.total, by_links.total, 1e-5)


@pytest.mark.parametrize("program", ["previous-token", "two-back", "reverse", "sort", "induction"])
@pytest.mark.parametrize("norm", [False, True])
def test_hops_lead_to_the_known_sources(program, norm):
    """Programs whose truth is written down, by way of the tokens that they write themselves."""
    known = tlens.demo.program(program)
    start = known.queries[0] + 1
    count = min(len(known.queries), 6)
    model = known.model(norm=norm, dtype=torch.float64)
    text = freeze_generation(model, known.prompts(6, seed=3)[:, :start], max_new_tokens=count, stop_at_eos=False)
    rows = text.frozen.tokens.tolist()
    for hops in (1, count - 1):
        sent = text.attribute(span=-1, hops=hops)
        assert float(sent.gap.max()) < 1e-9
        for number, row in enumerate(rows):
            sources = {start + count - 1}
            for _ in range(hops + 1):
                written = {position for position in sources if position >= start}
                sources -= written
                for position in written:
                    truth = known.explain(row, position - 1)
                    assert truth.answer == row[position]
                    sources |= truth.sources
            scores = sent.scores[number, 0].abs()
            assert float(scores[list(sources)].sum() / scores.sum()) > 0.99


def test_signed_and_absolute_shares_find_the_sources_of_a_trained_model():
    rng = random.Random(11)
    ids = {word: number for number, word in enumerate(tasks.RECALL_WORDS)}
    rows = [tasks.recall_row(rng, 4, 2, questions=3) for _ in range(40)]
    tokens = torch.tensor([[ids[word] for word in words] for words, _ in rows])
    text = freeze_generation(tlens.load_demo_model("recall"), tokens[:, :-7], continuation=tokens[:, -7:])
    page = Path(__file__).parents[1] / "docs/howto/10_generated_text.md"
    assert f"ranks first on all {len(rows)} prompts" in page.read_text(encoding="utf-8")
    for shares in ("signed", "absolute"):
        for hops in (1, 2, "all"):
            best = text.attribute(span=-1, hops=hops, shares=shares).scores[:, 0].argmax(-1)
            assert best.tolist() == [positions[-1] for _, positions in rows]


def test_a_token_that_nothing_made_gives_to_the_bias():
    generated = torch.tensor([[[False, True]]])
    landed, left = sent_on(
        torch.tensor([[[1.0, 2.0]]]), torch.zeros(1, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1), generated
    )
    assert landed.tolist() == [[[1.0, 0.0]]]
    assert left.tolist() == [[2.0]]


def test_hops_of_every_token_and_of_differences(written):
    plain, sent = written.attribute(), written.attribute(hops="all")
    assert close(sums(sent), plain.total)
    assert torch.equal(written.attribute(hops=0).scores, plain.scores)
    assert close(sent.scores.sum(1), written.attribute(span="all", hops="all").scores[:, 0])
    place = written.attribute(span="all", bias="position", hops=2)
    assert float(place.gap.max()) < 1e-9


# ------------------------------------------------------------------ many prompts


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"span": "all", "minus": "runner-up", "hops": "all"}, {"padding_side": "left"}),
        ({"hops": 1}, {"memory": "150KB"}),
    ],
)
def test_prompts_together_are_what_each_is_alone(asked, options, demo_model):
    given = [[5, 6], [7, 8, 9], [4]]
    together = tlens.attribute_generation(demo_model, PROMPTS, continuation=given, **asked, **options)
    for row, (prompt, more) in enumerate(zip(PROMPTS, given, strict=True)):
        alone = tlens.attribute_generation(demo_model, prompt, continuation=more, **asked)
        real = together.mask[row].nonzero()[:, 0]
        held = together.mask[row][together.queries[row]]
        assert [together.tokens[row][place] for place in real] == alone.tokens[0]
        assert close(together.scores[row][held][:, real], alone.scores[0])
        assert not together.scores[row][~held].any()
        for part in ("bias", "total"):
            assert close(getattr(together, part)[row, held], getattr(alone, part)[0])
        first, stop = together.options["generated"][row]
        assert together.tokens[row][first:stop] == alone.tokens[0][-len(more) :]
        assert len(together.options["asked"][row]) == len(alone.options["asked"][0])
        assert together.to_html(batch=row)


def test_targets_of_many_prompts_in_batches(demo_model):
    asked = {"continuation": [[5, 6]] * 3, "span": "all", "minus": [" the", " a", " is"]}
    whole, split = (tlens.attribute_generation(demo_model, PROMPTS, memory=m, **asked) for m in (None, "150KB"))
    assert close(split.total, whole.total)
    assert split.options["minus"] == whole.options["minus"]


def test_a_span_of_each_prompt(demo_model, tmp_path):
    """One list, with a span for each prompt, is what each prompt gives alone, in one batch and in several."""
    spans = [(0, 2), -1, " the"]
    question = {"continuation": [" the value", " is not", " to the"], "minus": "runner-up"}
    together = tlens.attribute_generation(demo_model, PROMPTS, span=spans, **question)
    split = tlens.attribute_generation(demo_model, PROMPTS, span=spans, memory="150KB", **question)
    assert close(split.total, together.total)
    assert split.options["asked"] == together.options["asked"]
    for row, span in enumerate(spans):
        alone = tlens.attribute_generation(
            demo_model, PROMPTS[row], continuation=question["continuation"][row], minus="runner-up", span=span
        )
        assert close(together.total[row], alone.total[0])
        assert len(together.options["asked"][row]) == len(alone.options["asked"][0])
    again = tlens.Attribution.load(together.save(tmp_path / "spans.safetensors"))
    assert again.target == together.target
    with pytest.raises(tlens.InvalidInputError, match=r"span: 2 .*3 prompts"):
        tlens.attribute_generation(demo_model, PROMPTS, span=spans[:2], **question)
    with pytest.raises(tlens.InvalidInputError, match="span: 3 for 1 prompts"):
        freeze_generation(demo_model, PROMPT, max_new_tokens=3).attribute(span=["all", -1, 0])


def test_methods_are_tested_on_a_span_of_each_prompt(demo_model):
    prompts, written, spans = PROMPTS[:2], [" the value", " is not"], [(0, 2), -1]
    settings = {"fractions": (0, 0.5), "replacement": " the", "metrics": ["logit"]}
    together = tlens.evaluate.perturbation(demo_model, prompts, ["relp"], continuation=written, span=spans, **settings)
    for row, (prompt, text, span) in enumerate(zip(prompts, written, spans, strict=True)):
        alone = tlens.evaluate.perturbation(demo_model, prompt, ["relp"], continuation=text, span=span, **settings)
        assert close(together.values[0, 0, row], alone.values[0, 0, 0])


# ------------------------------------------------------------------ texts and spans


def test_a_continuation_is_what_was_generated(written, demo_model):
    (text,) = written.texts
    for given in (text, written.frozen.tokens[0, 9:].tolist(), written.frozen.tokens[:, 9:]):
        made = freeze_generation(demo_model, PROMPT, continuation=given)
        assert torch.equal(made.frozen.tokens, written.frozen.tokens)
        assert torch.equal(made.positions, written.positions)


def test_spans_in_every_way(written):
    tokens = written.attribute()
    for span, chosen in (
        ("all", range(8)), ((2, 5), range(2, 5)), (slice(-2, None), (6, 7)), (3, (3,)), (-1, (7,)),
        ("not found", (2, 3)), ("not", (7,)),
    ):  # fmt: skip
        made = written.attribute(span=span)
        assert close(made.total[0, 0], tokens.total[0, list(chosen)].sum())
        assert made.options["asked"] == [[9 + number for number in chosen]]


def test_a_text_ends_before_the_first_end_token(model_named):
    model = tiny_model("bridge/llama")
    prompt = some_tokens(batch=1, pos=4)
    free = freeze_generation(model, prompt, max_new_tokens=4, stop_at_eos=False).frozen.tokens[0, 4:].tolist()
    later = next(number for number, token in enumerate(free) if token not in free[:number] and number)
    model.original_model.config.eos_token_id = [free[later]]
    assert freeze_generation(model, prompt, max_new_tokens=4).frozen.tokens[0, 4:].tolist() == free[:later]
    model.original_model.config.eos_token_id = free[0]
    with pytest.raises(tlens.InvalidInputError, match="nothing is written"):
        tlens.attribute_generation(model, prompt, max_new_tokens=4)
    assert tlens.attribute_generation(model, prompt, max_new_tokens=4, stop_at_eos=False).queries.shape == (1, 4)


def test_a_wrong_draft_is_mended(monkeypatch, demo_model, written):
    for draft in ([], [3, 4, 5], written.frozen.tokens[0, 9:12].tolist() + [3] * 5):
        monkeypatch.setattr(generation.written, "_draft", lambda *_, draft=draft: draft)
        made = freeze_generation(demo_model, PROMPT, max_new_tokens=8)
        assert torch.equal(made.frozen.tokens, written.frozen.tokens)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "pass one of them"),
        ({"max_new_tokens": 2, "continuation": " x"}, "pass one of them"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": "4"}, "an integer"),
        ({"max_new_tokens": 250}, "at most 247"),
        ({"continuation": ""}, "no token"),
        ({"continuation": []}, "no token"),
        ({"continuation": [[4], [5]]}, "2 for 1 prompts"),
        ({"continuation": [99999]}, "outside the vocabulary"),
        ({"continuation": 1.5}, "1.5 for 1 prompts"),
        ({"continuation": "bcd"}, "changes the prompt's own tokens.*'Ġa'"),
        ({"max_new_tokens": 3, "span": (1, 1)}, "is empty"),
        ({"max_new_tokens": 3, "span": (1, 9)}, "0 to 3"),
        ({"max_new_tokens": 3, "span": slice(5, 9)}, "is empty"),
        ({"max_new_tokens": 3, "span": 3}, "-3 to 2"),
        ({"max_new_tokens": 3, "span": "the file is not"}, "does not occur"),
        ({"max_new_tokens": 3, "span": 0.5}, "a generated token"),
        ({"max_new_tokens": 3, "hops": -1}, "at least 0"),
        ({"max_new_tokens": 3, "hops": "some"}, "a number of hops"),
        ({"max_new_tokens": 3, "shares": "squared"}, "shares"),
        ({"max_new_tokens": 3, "minus": "two words"}, "a target is one token"),
        ({"max_new_tokens": 3, "bias": "nowhere"}, "bias"),
        ({"max_new_tokens": 3, "rule": "relu"}, "frozen"),
        ({"max_new_tokens": 3, "padding_side": "top"}, "padding_side"),
        ({"max_new_tokens": 3, "memory": "much"}, "memory"),
    ],
)
def test_bad_input(demo_model, asked, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.attribute_generation(demo_model, PROMPT, **asked)


def test_one_prompt_as_a_row_of_token_ids(demo_model):
    rows = tlens.attribute_generation(demo_model, [[5, 6, 7]], continuation=[[8, 9]])
    for prompt, more in (([5, 6, 7], [8, 9]), (torch.tensor([5, 6, 7]), torch.tensor([8, 9]))):
        assert torch.equal(tlens.attribute_generation(demo_model, prompt, continuation=more).scores, rows.scores)


def test_several_queries_of_one_word_have_a_row_each(demo_model):
    """A word of several generated tokens is one row of the picture, and its neighbours keep their own names."""
    written = tlens.attribute_generation(
        demo_model, "If it is not found, a", continuation=" ModuleNotFoundError is raised"
    )
    html = written.merge_words().to_html()
    assert "raised" in html
    frozen = tlens.freeze(demo_model, "a ModuleNotFoundError is raised here")
    words = tlens.attribute(frozen, target=tlens.NEXT, query=slice(1, -1)).merge_words()
    rows = words.to_html().split('class="rows"')[1].split("</div>")[0]
    assert rows.count("<span>") == words.scores.shape[1]


def test_bad_input_of_several_prompts(demo_model):
    for given, message in (("x", "one for 2 prompts"), ([" x"], "1 for 2 prompts"), ([" x", ""], "no token")):
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.attribute_generation(demo_model, PROMPTS[:2], continuation=given)
    with pytest.raises(tlens.InvalidInputError, match="pass the continuation as token ids"):
        tlens.attribute_generation(demo_model, [4, 5], continuation=" x")
    same, read = ["Return the value", "Return the file"], demo_model.tokenizer.convert_tokens_to_ids
    given = [read(["Ġis", "Ġnot"]), read(["i", "s"])]  # the same text as one token, and as two
    with pytest.raises(tlens.InvalidInputError, match="equally long"):
        tlens.attribute_generation(demo_model, same, continuation=given, span="is")


@pytest.mark.parametrize("name", ["encoder/bert", "bridge/bert", "hooked/bidirectional", "bridge/bart", "bridge/t5"])
def test_models_that_continue_nothing_are_refused(name, model_named):
    if name not in model_names():
        pytest.skip("not on this TransformerLens")
    with pytest.raises(tlens.UnsupportedModelError, match=r"generated text: .* is an encoder"):
        tlens.attribute_generation(model_named(name), some_tokens(), max_new_tokens=2)


def test_images_are_refused():
    with pytest.raises(tlens.UnsupportedModelError, match="reads images"):
        tlens.attribute_generation(tlens.load_demo_model("digits"), torch.zeros(1, 1, 8, 8), max_new_tokens=2)


# ------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("method", ["generation", "relp"])
def test_a_row_is_named_by_the_token_that_it_explains(demo_model, capsys, monkeypatch, padding_side, method):
    """The token that follows the query; what stands at the query, or in the prompt, names nothing."""
    monkeypatch.setenv("COLUMNS", "300")
    given = {} if method == "generation" else {"method": method}
    result = tlens.attribute_generation(demo_model, PROMPTS[:2], max_new_tokens=5, padding_side=padding_side, **given)
    for batch, positions in enumerate(result.options["asked"]):
        ids = demo_model.to_tokens([PROMPTS[batch]])[0].tolist()
        names = [result.tokens[batch][position] for position in positions]
        for row, (position, name) in enumerate(zip(positions, names, strict=True)):
            logits = demo_model(torch.tensor([ids]))[0, -1]
            ids.append(int(logits.argmax()))
            assert demo_model.tokenizer.decode(ids[-1]) == name
            capsys.readouterr()
            result.show(2, query=row, batch=batch)
            printed = " ".join(capsys.readouterr().out.split())
            assert close(result.total[batch, row], logits.max())
            assert f"logit of {name!r}" in printed
            assert f"query={row}, {name!r} at {position}, one of 5" in printed
            if name.strip():
                assert result.query_row(name, batch) == len(names) - 1 - names[::-1].index(name)
        lines = result.to_dataframe().query(f"batch == {batch}").groupby("query")
        assert lines["query_token"].first().tolist() == names
        with pytest.raises(tlens.InvalidInputError, match=f"The one at position {positions[0]} is query=0"):
            result.top(query=positions[0], batch=batch)
    with pytest.raises(tlens.InvalidInputError, match="0 to 4, or their text"):
        result.top(query="If", batch=0)  # of the prompt


def test_words_that_were_generated_name_their_own_rows(demo_model):
    written = tlens.attribute_generation(
        demo_model, "If it is not found, a", continuation=" FileNotFoundError is raised"
    )
    words = written.merge_words()
    for name, last in (("FileNotFoundError", "Error"), ("is", " is"), ("raised", " raised")):
        row = words.query_row(name)
        assert row == written.query_row(last)
        frame = words.to_dataframe()
        lines = frame[frame["query_token"].str.strip() == name]
        assert {text.strip("' ") for text in lines["target"].str.removeprefix("logit of ")} == {name}
        assert float(lines.loc[lines["kind"] == "total", "score"].iloc[-1]) == float(written.total[0, row])
    # after a prompt of BOS alone, queries are the first positions, as those of every query are
    alone = tlens.attribute_generation(demo_model, "", continuation="FileNotFoundError is raised")
    assert close(alone.merge_words().total, alone.total)


def test_words_and_files_of_generated_text(written):
    words = written.attribute(span="all").merge_words()
    assert close(words.scores.sum(-1), written.attribute(span="all").scores.sum(-1))
    assert 'class="generated"' in written.attribute().to_html()
    assert "generated" not in words.options
    assert words.to_html()
    written.attribute().show()


def test_report_of_a_generated_text(tmp_path, capsys, written):
    page = tmp_path / "page.html"
    assert main(["report", PROMPT, "--max-new-tokens", "6", "--span", "2:4", "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "http" not in text
    for part in ("Each token", "not found", "on generated tokens", "hops: Σ scores"):
        assert part in text
    assert main(["report", PROMPT, "--continuation", " file is", "--hops", "0", "-o", str(page)]) == 0
    assert "on generated tokens" not in page.read_text(encoding="utf-8")
    for wrong, message in (
        (["--continuation", "bcd"], "changes the prompt"),
        (["--max-new-tokens", "2", "--continuation", " x"], "pass one of them"),
        (["--max-new-tokens", "2", "--span", "nowhere"], "does not occur"),
        (["--max-new-tokens", "2", "--minus", "two words"], "one token"),
        (["--hops", "1"], "--hops: it is of generated text"),
        (["--max-new-tokens", "2", "--query", "1"], "--query: a page about generated text"),
    ):
        assert main(["report", PROMPT, "-o", str(page), *wrong]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", PROMPT, "--hops", "-1"])
    assert "What made" in tlens.report.explain_generation(written).title
    for bad in ({"prompt": PROMPT}, {"continuation": " x"}):
        with pytest.raises(tlens.InvalidInputError, match="frozen already"):
            tlens.report.explain_generation(written, **bad)
    with pytest.raises(tlens.InvalidInputError, match="2 prompts"):
        tlens.report.explain_generation(tlens.load_demo_model(), PROMPTS[:2], continuation=[" is", " is"])


# ------------------------------------------------------------------ two texts

TWO = ("hooked/gqa", "hooked/soft-caps", "bridge/gpt2", "bridge/llama")
DIFFERENT = [name for name in TWO if name in model_names()]


def own_logits(text, tokens):
    """The live logits that a text's positions give to these tokens, before a soft cap."""
    logits = text.frozen.model(text.frozen.tokens).detach()
    cap = text.frozen.view.soft_cap
    if cap is not None:
        logits = cap * torch.atanh(logits / cap)
    return logits[:, 3:7].gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("name", DIFFERENT)
def test_two_texts_differ_by_what_differs_in_them(name, model_named):
    model = model_named(name)
    first, second = (
        freeze_generation(model, some_tokens(batch=2, pos=4, seed=seed), max_new_tokens=4, stop_at_eos=False)
        for seed in (0, 1)
    )
    limit = max(tolerance(name), 1e-9)
    text = first.difference(second)
    written = first.frozen.tokens[:, 4:]
    change = own_logits(first, written) - own_logits(second, written)
    tokens = text.attribute()
    assert close(tokens.total, change, limit)
    assert close(sums(tokens), change, limit)
    logit = "logit" if first.frozen.view.soft_cap is None else "uncapped logit"
    assert tokens.target == f"change of the {logit} of each generated token"
    span = text.attribute(span="all")  # one question
    assert span.scores.shape[1] == 1
    assert close(sums(span)[:, 0], change.sum(1), limit)
    assert close(span.scores[:, 0], tokens.scores.sum(1), limit)
    part = text.attribute(span=(1, 3))
    assert close(sums(part)[:, 0], change[:, 1:3].sum(1), limit)
    for hops in (1, "all"):
        sent = text.attribute(span="all", hops=hops)
        assert close(sums(sent)[:, 0], change.sum(1), limit)
    assert not sent.scores[:, :, 4:].any()  # all of it has landed on the prompts
    assert not torch.equal(written, second.frozen.tokens[:, 4:])


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_next_tokens_are_targets_of_a_difference(name, model_named):
    """Each query asks for the token that follows it in the first text."""
    model = model_named(name)
    a, b = (tlens.freeze(model, some_tokens(seed=seed)) for seed in (0, 1))
    result = tlens.attribute(tlens.difference(a, b), target=NEXT, query=slice(None, -1))
    logits = [model(frozen.tokens).detach()[:, :-1] for frozen in (a, b)]
    if a.view.soft_cap is not None:
        logits = [a.view.soft_cap * torch.atanh(each / a.view.soft_cap) for each in logits]
    expected = (logits[0] - logits[1]).gather(-1, a.tokens[:, 1:, None])[..., 0]
    assert close(sums(result), expected, max(tolerance(name), 1e-9))
    assert "each query's next token" in result.target
    with pytest.raises(tlens.InvalidInputError, match="nothing follows"):
        tlens.attribute(tlens.difference(a, b), target=NEXT, query="all")


def test_one_text_in_two_models_differs_by_their_weights(model_named):
    """Tokens are the same: all of the change is a constant."""
    model = model_named("bridge/gpt2")
    prompt = some_tokens(batch=1, pos=4)
    first = freeze_generation(model, prompt, max_new_tokens=4, stop_at_eos=False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].mlp.original_component.c_fc.weight.mul_(1.1)
    written = first.frozen.tokens[:, 4:]
    second = freeze_generation(other, prompt, continuation=written.tolist(), stop_at_eos=False)
    whole = first.difference(second).attribute(span="all")
    assert not whole.scores.any()
    assert close(whole.bias[:, 0], (own_logits(first, written) - own_logits(second, written)).sum(1))
    runner_up = first.difference(second).attribute(minus="runner-up")
    assert float(runner_up.gap.max()) < 1e-9
    assert close(first.difference(first).attribute(span="all").total, torch.zeros(1, 1, dtype=torch.float64))


def test_texts_that_do_not_match_are_refused(written):
    model = written.frozen.model
    other = freeze_generation(model, PROMPT, max_new_tokens=7)
    with pytest.raises(tlens.InvalidInputError, match="stand elsewhere"):
        written.difference(other)
    with pytest.raises(tlens.InvalidInputError, match="another FrozenGeneration"):
        written.difference(written.frozen.operator())
    with pytest.raises(tlens.InvalidInputError, match="texts of one run"):
        written.difference(written).difference(written)
