"""The result object: reading, merging, comparing, saving, showing; and the registry that makes it."""

import importlib

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import registry
from tensorlens_tl.testing import tiny_model


@pytest.fixture
def frozen(model_named):
    return tlens.freeze(model_named("bridge/gpt2"), some_tokens())


@pytest.fixture
def every(frozen):
    return tlens.attribute(frozen, query="all")


def made(tokens, scores, mask=None, **fields):
    """An Attribution by hand, one prompt."""
    scores = torch.tensor([scores], dtype=torch.float64)
    mask = torch.tensor([mask or [True] * len(tokens)])
    last = int(mask[0].nonzero()[-1])
    queries = torch.arange(scores.shape[1])[None] if scores.shape[1] > 1 else torch.tensor([[last]])
    return tlens.Attribution(scores, [tokens], queries, mask, "hand", **fields)


def test_three_collapses(frozen):
    operator = frozen.operator()
    for collapse, expected in (
        ("in_out", operator.in_out()),
        ("norm", operator.norm()),
        ("target", operator.target(5)),
    ):
        options = {"target": 5} if collapse == "target" else {}
        result = tlens.attribute(frozen, collapse=collapse, **options)
        assert torch.equal(result.scores, expected.scores)
        assert result.additive is (collapse != "norm")
        assert result.axes == ("batch", "query", "key")
        assert result.tokens == frozen.str_tokens
        assert result.queries.tolist() == [[5], [5]]
        assert result.provenance["class"] == "TransformerBridge"
        assert result.provenance["weight_processing"] == "raw"
        if result.additive:
            assert torch.allclose(result.scores.sum(-1) + result.bias, result.total)
            assert float(result.gap.max()) < 1e-9


def test_attribute_from_model_and_from_pass_agree(frozen):
    direct = tlens.attribute(frozen.model, frozen.tokens, collapse="in_out", verify=False)
    assert torch.equal(direct.scores, tlens.attribute(frozen, collapse="in_out").scores)


def test_a_part_of_the_model_says_so(frozen):
    assert tlens.attribute(frozen).target == "logit of the first choice − the runner-up"
    assert tlens.attribute(frozen, collapse="in_out").target == "squared norm of the output"
    for options, words in (
        ({"mlp": False}, "heads or MLPs left out"),
        ({"heads": {0: [1]}}, "heads or MLPs left out"),
        ({"layers": slice(1, None)}, "from blocks.1 input"),
        ({"layers": slice(0, 1)}, "at blocks.1 input"),
        ({"final_norm": False}, "at the last block's output"),
        ({"direction": torch.ones(16)}, "a direction at the final norm's output"),
    ):
        assert words in tlens.attribute(frozen, **options).target


def test_top(frozen):
    result = made(["a", "b", "c", "<pad>"], [[1.0, -3.0, 2.0, 9.0]], [True, True, True, False])
    assert [(e.position, e.token, e.score) for e in result.top(2)] == [(1, "b", -3.0), (2, "c", 2.0)]
    assert len(result.top(100)) == 3
    for bad in ({"query": 1}, {"query": -2}, {"batch": 1}):
        with pytest.raises(tlens.InvalidInputError):
            result.top(**bad)


def test_top_skips_the_queries_of_padding(model_named):
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    result = tlens.attribute(model_named("bridge/gpt2"), tokens, attention_mask=mask, query="all")
    assert abs(result.top(1, batch=1)[0].score) == float(result.scores[1, 2].abs().max())
    assert len(result.top(10, query=-3, batch=1)) == 3


def test_top_shows_at_least_one(frozen):
    with pytest.raises(tlens.InvalidInputError, match="at least 1"):
        tlens.attribute(frozen).top(0)


def test_scores_of_a_text():
    result = made(["If", " the", " file", " is", " un", "readable", ",", " the"], [[1.0, 2, 3, 4, 5, 6, 7, 8]])
    assert result["the"] == [(" the", 2.0, 1), (" the", 8.0, 7)]
    assert result["unreadable"] == [(" unreadable", 11.0, 4)]
    assert result[" file is"] == [(" file is", 7.0, 2)]
    assert result[-1] == result[7] == [(" the", 8.0, 7)]
    assert [entry.score for entry in result[1:3]] == [2.0, 3.0]
    assert "unreadable" not in result._ipython_key_completions_()
    assert {"If", "the", "un"} <= set(result._ipython_key_completions_())
    for bad in ("read", "", "  ", "The"):
        with pytest.raises(tlens.InvalidInputError, match="whole tokens"):
            result[bad]
    for bad in (8, -9, 1.5, None):
        with pytest.raises(tlens.InvalidInputError, match="position"):
            result[bad]


def test_scores_of_word_pieces():
    result = made(["[CLS]", "un", "##believ", "##able", "end"], [[1.0, 2, 3, 4, 5]])
    assert result["unbelievable"] == [("un##believ##able", 9.0, 1)]
    with pytest.raises(tlens.InvalidInputError, match="whole tokens"):
        result["lievable"]


def test_queries_by_text(every):
    token = every.tokens[0][3]
    assert every.top(6, query=token) == every.top(6, query=3)
    assert every.score(0, query=2, batch=1)[0].score == float(every.scores[1, 2, 0])
    with pytest.raises(tlens.InvalidInputError, match="positions \\[5\\]"):
        made(list("abcdef"), [[1.0] * 6]).top(query="b")


def test_normalize(every):
    shares = every.normalize()
    assert torch.allclose(shares.scores.abs().sum(-1), torch.ones(2, 6, dtype=torch.float64))
    assert not shares.additive
    assert shares.bias is None


def test_merge_words_keeps_sums():
    tokens = ["The", " un", "believ", "able", " end", ".", "\n", "Next"]
    one = made(tokens, [[1, 2, 3, 4, 5, 6, 7, 8]], additive=True, total=torch.tensor([[36.0]], dtype=torch.float64))
    words = one.merge_words()
    assert words.tokens == [["The", " unbelievable", " end.", "\n", "Next"]]
    assert words.scores.tolist() == [[[1, 9, 11, 7, 8]]]
    assert words.queries.tolist() == [[4]]
    square = made(tokens, torch.arange(64.0).view(8, 8).tolist())
    merged = square.merge_words()
    assert merged.scores.shape == (1, 5, 5)
    assert float(merged.scores[0, 1, 0]) == pytest.approx((8 + 16 + 24) / 3)


def test_merge_word_pieces():
    words = made(["[CLS]", "un", "##believ", "##able", "end", "[SEP]"], [[1, 2, 3, 4, 5, 6]]).merge_words()
    assert words.tokens == [["[CLS]", "unbelievable", "end", "[SEP]"]]
    assert words.scores.tolist() == [[[1, 9, 5, 6]]]


def word_tokenizer(kind):
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat"]
    if kind == "wordpiece":
        vocabulary = {t: i for i, t in enumerate([*words, "##s", "##ting"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        inner.decoder = tokenizers.decoders.WordPiece()
    else:
        vocabulary = {t: i for i, t in enumerate([*words[:3], "▁the", "▁cat", "s", "▁sat"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        inner.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.mark.parametrize(
    ("kind", "ids", "words"),
    [
        ("wordpiece", [1, 3, 4, 6, 5, 2], ["[CLS]", "the", "cats", "sat", "[SEP]"]),
        ("wordpiece", [1, 3, 4, 5, 2], ["[CLS]", "the", "cat", "sat", "[SEP]"]),
        ("sentencepiece", [1, 3, 4, 5, 6, 2], ["[CLS]", " the", " cats", " sat", "[SEP]"]),
    ],
)
def test_words_are_the_tokenizers_own(kind, ids, words):
    model = tiny_model("bridge/gpt2")
    model.tokenizer = word_tokenizer(kind)
    merged = tlens.attribute(model, ids).merge_words()
    assert merged.tokens == [words]


def test_merge_ignores_padding():
    words = made(["x", " y", "z", "p"], [[1, 2, 3, 9]], [True, True, True, False]).merge_words()
    assert words.tokens == [["x", " yz"]]
    assert words.scores.tolist() == [[[1, 5]]]


def test_to_dataframe(every):
    frame = every.to_dataframe()
    assert list(frame.columns) == [
        "batch", "query", "key", "query_token", "key_token", "kind", "generated", "method", "target", "score",
    ]  # fmt: skip
    assert frame["kind"].value_counts().to_dict() == {"token": 2 * 6 * 6, "bias": 12, "total": 12}
    row = frame[(frame.kind == "token") & (frame.batch == 1) & (frame["query"] == 4) & (frame.key == 2)].iloc[0]
    assert row.score == float(every.scores[1, 4, 2])
    assert row.key_token == every.tokens[1][2]


def test_difference(frozen):
    a, b = (tlens.attribute(frozen, collapse="target", target=t) for t in (5, 9))
    both = tlens.attribute(frozen, collapse="target", target=5, minus=9)
    assert torch.allclose((a - b).scores, both.scores)
    assert torch.allclose((a - b).total, both.total)
    other = tlens.attribute(frozen.model, some_tokens(seed=3), collapse="target", target=5)
    with pytest.raises(tlens.InvalidInputError, match="differ in tokens"):
        a - other


def test_difference_across_weight_processing_is_refused(frozen, model_named):
    a = tlens.attribute(frozen, collapse="target", target=5)
    b = tlens.attribute(model_named("bridge/gpt2-compatibility"), frozen.tokens, collapse="target", target=5)
    with pytest.raises(tlens.InvalidInputError, match=r"weight processing \('raw' and 'plain norms, centred"):
        a - b


@pytest.mark.parametrize("options", [{"query": "all"}, {"collapse": "norm", "probes": 4}, {"layers": slice(0, 1)}])
def test_save_and_load(frozen, tmp_path, options):
    result = tlens.attribute(frozen, **options)
    path = result.save(tmp_path / "result.safetensors")
    again = tlens.Attribution.load(path)
    for field in ("scores", "queries", "mask", "bias", "total", "gap", "stderr"):
        mine, theirs = getattr(result, field), getattr(again, field)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert (again.tokens, again.axes, again.method, again.target) == (
        result.tokens,
        result.axes,
        result.method,
        result.target,
    )
    assert again.provenance == result.provenance
    assert [p.name for p in tmp_path.iterdir()] == ["result.safetensors"]


def test_html_escapes_every_token():
    nasty = "<img src=x onerror=alert(1)>"
    for scores in ([[1.0, -2.0]], [[1.0, -2.0], [0.5, float("nan")]]):
        page = made([nasty, '"><script>x</script>'], scores, target=nasty).to_html(style=False)
        assert "<img src=x" not in page
        assert "<script" not in page
        assert "http" not in page


def test_html_shows_values_and_the_proof(frozen):
    page = tlens.attribute(frozen)._repr_html_()
    assert "gap" in page
    assert page.count('class="t') - page.count('class="tlens"') - page.count('class="title"') == 12
    assert f"{float(tlens.attribute(frozen).scores[0, 0, 0]):+.4g}" in page
    assert tlens.attribute(frozen, query="all").to_html(batch=1).count('class="grid"') == 1


def test_show_prints_a_table(frozen, capsys):
    tlens.attribute(frozen).show()
    assert "position" in capsys.readouterr().out


def test_plot(every, frozen):
    pytest.importorskip("matplotlib").use("Agg")
    axes = every.plot(batch=1)
    assert len(axes.get_xticklabels()) == 6
    low, high = axes.images[0].get_clim()
    assert low == -high == -float(every.scores[1].abs().max())  # zero is in the middle
    assert 10 < high < 100  # so that cells have one decimal, and none that would be 0.0 is written
    written = every.scores[1][(10 * every.scores[1]).round() != 0]
    assert [text.get_text() for text in axes.texts] == [f"{score:.1f}" for score in written.tolist()]
    assert not every.plot(values=False).texts
    assert tlens.attribute(frozen).plot(ax=axes) is axes
    assert made(["$a", "b$"], [[1.0, -2.0]]).plot().figure.canvas.draw() is None  # no mathematics


def test_axes_must_name_the_scores():
    with pytest.raises(tlens.InvalidInputError, match=r"scores have 2 axes.* but 3 are named"):
        tlens.Attribution(torch.zeros(1, 2), [["a"]], torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), "x")


def test_further_axes_are_reduced_for_showing():
    heads = tlens.Attribution(
        torch.rand(1, 3, 2, 2),
        [["a", "b"]],
        torch.arange(2)[None],
        torch.ones(1, 2).bool(),
        "heads",
        axes=("batch", "head", "query", "key"),
    )
    assert len(heads.top(2)) == 2
    assert list(heads.to_dataframe().columns)[:4] == ["batch", "head", "query", "key"]
    with pytest.raises(tlens.InvalidInputError, match="merge_words"):
        heads.merge_words()


# ------------------------------------------------------------------------------------------ registry


def test_register_and_call(frozen, clean_registry):
    @tlens.register_method("length")
    def length(frozen, *, scale=1.0):
        """The norm of each source token's embedding."""
        scores = scale * frozen.resid_pre(0).norm(dim=-1)[:, None]
        return tlens.Attribution.of(frozen, scores, method="length", query=-1)

    assert "length" in tlens.list_methods()
    assert tlens.get_method("length").summary == "The norm of each source token's embedding."
    assert torch.allclose(
        tlens.attribute(frozen, method="length", scale=2.0).scores, 2 * tlens.attribute(frozen, method="length").scores
    )
    tlens.register_method("length")(length)  # the same function again, as a notebook cell does
    with pytest.raises(tlens.RegistryError, match="already"):
        tlens.register_method("length")(lambda frozen: None)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: tlens.attribute(f, method="tensorlns"), tlens.RegistryError, "Did you mean 'tensorlens'"),
        (lambda f: tlens.attribute(f, colapse="norm"), tlens.InvalidInputError, "no option 'colapse'"),
        (lambda f: tlens.attribute(f, collapse="mean"), tlens.InvalidInputError, "'in_out', 'norm', 'target'"),
        (lambda f: tlens.attribute(f, collapse="norm", target=5), tlens.InvalidInputError, "leave 'norm' out"),
        (lambda f: tlens.attribute(f, probes=5), tlens.InvalidInputError, "belong to collapse='norm'"),
        (lambda f: tlens.attribute(f, "text", 5), tlens.InvalidInputError, "has its input already"),
        (lambda f: tlens.attribute(f, verify=False), tlens.InvalidInputError, "has its input already"),
        (lambda f: tlens.attribute(f.model), tlens.InvalidInputError, "`input` is missing"),
    ],
)
def test_bad_calls(frozen, call, error, message):
    with pytest.raises(error, match=message):
        call(frozen)


def test_methods_published_by_packages_are_found(clean_registry, monkeypatch):
    def published(frozen):
        """From elsewhere."""

    class Point:
        name, value = "published", "somewhere:published"

        def load(self):
            return published

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "tensorlens_tl.methods" else [])
    monkeypatch.setattr(registry, "_LOADED", set())
    assert "published" in tlens.list_methods()
    assert tlens.get_method("published").function is published


# ------------------------------------------------------------------------------------------ at first sight


def test_reprs_are_short_and_do_nothing(frozen, monkeypatch):
    operator = frozen.operator()
    shown = [
        frozen, frozen.view, frozen.prompt, operator, operator.map, operator.T, operator.in_out(),
        frozen.maps.attention(0), frozen.maps.norm(0, "ln1"), tlens.attribute(frozen), tlens.get_method("rollout"),
        tlens.circuits.logit_attribution(frozen, 5), tlens.circuits.head_map(frozen, 0, 1),
    ]  # fmt: skip
    monkeypatch.setattr(frozen.model, "forward", lambda *a, **k: pytest.fail("a repr ran the model"))
    for thing in shown:
        assert len(repr(thing)) < 700, type(thing)
        assert "tensor(" not in repr(thing)
        assert "\n" not in repr(thing)
    assert (
        repr(frozen.maps.attention(0))
        == "Linear(16 → 16, offset) @ Attention(4 heads, 6 × 6) @ Linear(16 → 16, offset)"
    )


def test_parts_that_do_not_fit_are_refused():
    """A full matrix under one query would show the first query's scores as the last one's."""
    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens())
    every = frozen.pattern(1).mean(1)
    with pytest.raises(tlens.InvalidInputError, match="one query was named; name query='all'"):
        tlens.Attribution.of(frozen, every, method="x", query=-1)
    assert tlens.Attribution.of(frozen, every, method="x").queries.shape == (2, 6)
    assert tlens.Attribution.of(frozen, every[:, -1:], method="x", query=-1).queries.tolist() == [[5], [5]]
    for wrong, message in ((every[..., :3], "mask is"), (every[:1], "queries is")):
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.Attribution.of(frozen, wrong, method="x")


def test_a_word_is_found_without_its_punctuation():
    result = tlens.attribute(tlens.load_demo_model(), "If the file, once read, is closed", collapse="in_out")
    words = result.merge_words()
    assert [entry.token for entry in words["file"]] == [" file,"]
    assert words["file"] == words["file,"]
    assert [entry.token for entry in result["file"]] == [" file"]
    with pytest.raises(tlens.InvalidInputError, match="does not occur"):
        words["!"]


@pytest.mark.parametrize(
    "axes", [("batch", "key", "query"), ("query", "batch", "key"), ("head", "batch", "query", "key")]
)
def test_axes_in_another_order_are_refused(axes):
    scores = torch.zeros(2, 2, 2, 2)[(0,) * (4 - len(axes))]
    with pytest.raises(tlens.InvalidInputError, match="axes"):
        tlens.Attribution(
            scores, [["a", "b"]] * 2, torch.arange(2).expand(2, 2), torch.ones(2, 2).bool(), "x", axes=axes
        )


def test_a_bias_among_the_sources_has_words_too():
    """DecompX with its bias as a token, on a model with a tokenizer; its words, once and again."""
    model = tlens.load_demo_model()
    result = tlens.attribute(model, "The unreadable filenames", method="decompx", bias="token")
    assert result.tokens[0][-1] == "[bias]"
    words = result.merge_words()
    assert words.tokens[0][-1] == "[bias]"
    assert len(words.tokens[0]) < len(result.tokens[0])
    assert words.scores.shape[1:] == (len(words.tokens[0]) - 1, len(words.tokens[0]))
    again = words.merge_words()
    assert again.tokens == words.tokens
    assert torch.allclose(again.scores, words.scores)
    two = tlens.attribute(model, ["The unreadable filenames", "The file"], method="decompx", bias="token")
    with pytest.raises(tlens.InvalidInputError, match="one prompt at a time"):
        two.merge_words()


# ------------------------------------------------------------------ left out


def test_tokens_left_out_are_one_line_and_the_sum_holds(demo_model, capsys):
    result = tlens.attribute(demo_model, "Return the value of the name", " of", minus=" if")
    assert result.special == [[0]]
    left = result.without("special", "name", -2)
    place = len(result.tokens[0]) - 2
    assert left.left_out == [sorted({0, place, *(entry.position for entry in result["name"])})]
    assert torch.equal(left.scores, result.scores)
    listed = {entry.position for entry in left.top(20)}
    assert listed == set(range(len(result.tokens[0]))) - set(left.left_out[0])
    frame = left.to_dataframe()
    kinds = frame.groupby("kind")["score"].sum()
    assert kinds["token"] + kinds["left out"] + kinds["bias"] == pytest.approx(kinds["total"], rel=1e-5)
    assert kinds["left out"] == pytest.approx(float(result.scores[0, 0, left.left_out[0]].sum()), rel=1e-5)
    left.show(2)
    assert f"{len(left.left_out[0])} left out" in capsys.readouterr().out
    assert f"{len(left.left_out[0])} left out" in left.to_html()
    shares = left.normalize().scores
    assert float(shares.abs().sum()) == pytest.approx(1)
    assert not shares[0, 0, left.left_out[0]].any()


def test_what_is_left_out_survives_files_words_and_batches(demo_model, tmp_path):
    prompts = ["Return the value", "Set the name of the value"]
    result = tlens.attribute(demo_model, prompts, memory="100KB").without("special", "value")
    assert result.left_out == [[0, 3], [0, 6]]
    assert tlens.Attribution.load(result.save(tmp_path / "result")).left_out == result.left_out
    words = tlens.attribute(demo_model, "FileNotFoundError").without("special").merge_words()
    assert [entry.token for entry in words.top()] == ["FileNotFoundError"]


def test_without_a_tokenizer_special_tokens_are_unknown(frozen):
    with pytest.raises(tlens.InvalidInputError, match="name their positions"):
        tlens.attribute(frozen).without("special")


@pytest.mark.parametrize(
    ("what", "message"),
    [((), "name what to leave out"), ((9,), "position=9"), (("z",), "does not occur"), ((0, 1, 2), "would remain")],
)
def test_what_cannot_be_left_out(what, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        made(["a", "b", "c"], [[1.0, 2.0, 3.0]]).without(*what)


def test_generated_tokens_stay(demo_model):
    generated = tlens.attribute_generation(demo_model, "If the file is", max_new_tokens=2)
    left = generated.without("special")
    assert left.left_out == [[0]]
    left.plot()
    left.to_html()
    with pytest.raises(tlens.InvalidInputError, match="were generated"):
        generated.without(-1)


def test_a_first_token_that_takes_most_is_pointed_out(capsys):
    made(["<s>", "b", "c"], [[5.0, 2.0, -1.0]]).show()
    assert "without(0) leaves it out" in " ".join(capsys.readouterr().out.split())
    made(["<s>", "b", "c"], [[3.0, 2.0, -1.0]]).show()
    assert "without(" not in capsys.readouterr().out
