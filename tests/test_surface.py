"""One surface: queries, targets, many prompts, tables and files mean the same everywhere."""

import inspect
import pickle
import re

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.testing import tiny_model

TEXT = "If the file is not found, a FileNotFoundError is"
ABOUT_A_PREDICTION = {
    "tensorlens", "alti-logit", "input-x-gradient", "integrated-gradients", "chefer", "leave-one-out", "relp",
    "attnlrp", "cp-lrp", "gim", "difference",
}  # fmt: skip
METHODS = tlens.list_methods()


@pytest.fixture(scope="module")
def frozen():
    return tlens.freeze(tlens.load_demo_model(dtype=torch.float64), TEXT)


@pytest.fixture(scope="module")
def pair():
    model = tlens.load_demo_model(dtype=torch.float64)
    return tlens.freeze(model, ["Return the value of the file", "Raise an exception if the file"], padding_side="left")


def options(method):
    if method not in ABOUT_A_PREDICTION - {"tensorlens"}:
        return {}
    known = tlens.get_method(method).options
    return {option: value for option, value in {"target": " the", "steps": 3}.items() if option in known}


# ------------------------------------------------------------------ queries


def test_what_a_query_stands_for(frozen, pair):
    last = frozen.tokens.shape[1] - 1
    for query, expected in (
        (-1, [last]), (2, [2]), ([0, -1], [0, last]), (slice(1, 3), [1, 2]), (" file", [3]), ("file", [3]),
        ("FileNotFoundError", [15]), (["file", 1], [3, 1]), (torch.tensor([4, 2]), [4, 2]), (range(2), [0, 1]),
        ("all", list(range(last + 1))),
    ):  # fmt: skip
        assert query_positions(frozen.prompt, query).tolist() == [expected], query
    first = int(pair.mask[0].long().argmax())
    assert query_positions(pair.prompt, 0).tolist()[0] == [first]
    words = query_positions(pair.prompt, "file")
    assert [pair.str_tokens[row][at] for row, (at,) in enumerate(words.tolist())] == [" file", " file"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (99, "out of range"), ([0, 99], "out of range"), ([], "at least one"), (slice(50, None), "at least one"),
        ("nowhere", "whole tokens"), (1.5, "a position, a list or a slice"), ([None], "a position, a list or a slice"),
        (True, "a position, a list or a slice"),
    ],
)  # fmt: skip
def test_queries_that_stand_for_nothing(frozen, query, message):
    for ask in (frozen.operator().in_out, lambda q: tlens.attribute(frozen, method="rollout", query=q)):
        with pytest.raises(tlens.InvalidInputError, match=message):
            ask(query)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(8)
def test_every_method_takes_every_kind_of_query(frozen, method):
    whole = tlens.attribute(frozen, method=method, query="all", **options(method))
    for query in ([3, 15], slice(3, 5), "file", "FileNotFoundError", -1):
        made = tlens.attribute(frozen, method=method, query=query, **options(method))
        rows = query_positions(frozen.prompt, query)[0].tolist()
        assert made.queries.tolist() == [rows]
        assert close(made.scores, whole.scores[:, rows], atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_default_query_follows_one_rule(method):
    """Questions about a prediction ask at the last token; maps of token pairs hold every query."""
    default = tlens.get_method(method).options["query"]
    assert default == (-1 if method in ABOUT_A_PREDICTION else "all")


def test_circuits_and_collapses_ask_at_the_last_token():
    about = (
        circuits.logit_attribution, circuits.total_effects, circuits.paths, circuits.top_paths,
        circuits.contribution_graph, circuits.qk_attribution, circuits.HeadMap.target, tlens.FrozenOperator.target,
        tlens.FrozenOperator.in_out, tlens.FrozenOperator.norm, tlens.FrozenOperator.slice,
    )  # fmt: skip
    for function in about:
        assert inspect.signature(function).parameters["query"].default == -1, function


def test_target_and_minus_come_in_one_order():
    for function in (
        circuits.logit_attribution, circuits.total_effects, circuits.paths, circuits.top_paths,
        circuits.contribution_graph, circuits.HeadMap.target, tlens.FrozenOperator.target,
    ):  # fmt: skip
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters[1:3]] == ["target", "minus"], function
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters[3:]), function


# ------------------------------------------------------------------ targets


def test_a_target_for_each_query(frozen, pair):
    tokens, others = [" the", " not"], [" a", " is"]
    for method, more in (("tensorlens", {}), ("decompx", {}), ("alti-logit", {}), ("input-x-gradient", {})):
        made = tlens.attribute(frozen, method=method, target=tokens, minus=others, query=[3, -1], **more)
        for row, query in enumerate((3, -1)):
            alone = tlens.attribute(frozen, method=method, target=tokens[row], minus=others[row], query=query, **more)
            assert close(made.scores[:, row], alone.scores[:, 0]), method
    nested = [[" the", " a"], [" not", " is"]]
    made = pair.operator().target(nested, query=[1, 2])
    for row in range(2):
        for column in range(2):
            alone = pair.operator().target([tokens[column] for tokens in nested], query=[1, 2][column])
            assert close(made.scores[row, column], alone.scores[row, 0])
    directions = torch.randn(1, 2, 128, dtype=torch.float64)
    made = frozen.operator().target(direction=directions, query=[3, -1])
    assert close(made.scores[:, 1], frozen.operator().target(direction=directions[0, 1]).scores[:, 0])
    effects = circuits.logit_attribution(frozen, tokens, query=[3, -1])
    assert close(effects.scores[:, 1], circuits.logit_attribution(frozen, " not").scores[:, 0])


@pytest.mark.parametrize(
    ("target", "query", "message"),
    [
        ([" the", " a", " not"], [3, -1], "one for each of its 2 queries"),
        ([[" the", " a", " not"]], [3, -1], "3 tokens for 2 queries"),
        ([" the", " a"], -1, "2 tokens for 1 prompts"),
    ],
)
def test_targets_that_fit_no_query(frozen, target, query, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        frozen.operator().target(target, query=query)


def test_a_token_held_against_itself_is_refused(frozen):
    for ask in (
        lambda: frozen.operator().target(" the", " the"),
        lambda: tlens.attribute(frozen, method="input-x-gradient", target=" the", minus=" the"),
        lambda: tlens.attribute(frozen, method="alti-logit", target=" the", minus=" the"),
        lambda: tlens.attribute(frozen, method="decompx", target=" the", minus=" the"),
        lambda: circuits.logit_attribution(frozen, [" the", " a"], [" not", " a"], query=[3, 4]),
        lambda: tlens.report.explain(frozen, target=" the", minus=" the"),
    ):
        with pytest.raises(tlens.InvalidInputError, match="same token"):
            ask()


def test_a_target_implies_what_explains_it(frozen):
    for method, name, implied in (("tensorlens", "collapse", "target"), ("decompx", "aggregate", "target")):
        made = tlens.attribute(frozen, method=method, target=" the", query=-1)
        said = tlens.attribute(frozen, method=method, target=" the", query=-1, **{name: implied})
        assert made.options[name] == implied
        assert torch.equal(made.scores, said.scores)
    assert tlens.attribute(frozen).options["collapse"] == "target"
    assert tlens.attribute(frozen, direction=torch.ones(128)).options["collapse"] == "target"


# ------------------------------------------------------------------ many prompts


PROMPTS = [TEXT[:length] for length in (12, 48, 20, 35, 8, 48, 30, 16)]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("tensorlens", {}), ("tensorlens", {"query": "all"}), ("rollout", {}), ("decompx", {"query": "all"}),
        ("attention", {"head_reduction": None}), ("tensorlens", {"collapse": "norm", "probes": 4}),
        ("tensorlens", {"target": " the"}), ("decompx", {"bias": "token"}), ("alti", {"query": [0, -1]}),
    ],
)  # fmt: skip
@pytest.mark.few(3)
def test_prompts_in_batches_are_what_each_is_alone(method, more, demo_model):
    together = tlens.attribute(demo_model, PROMPTS, method=method, memory="2MB", **more)
    assert together.scores.shape[0] == len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = tlens.attribute(demo_model, prompt, method=method, **more)
        real, queries = together.mask[row].nonzero()[:, 0], slice(0, alone.queries.shape[1])
        assert [together.tokens[row][i] for i in real] == alone.tokens[0]
        assert together.queries[row, queries].tolist() == alone.queries[0].tolist()
        mine = together.scores[row][..., queries, :][..., real]
        if "probes" not in more:  # each batch draws its own
            assert close(mine, alone.scores[0], atol=1e-9)
        assert float(together.scores[row].abs().sum()) == pytest.approx(float(mine.abs().sum()))  # none at padding
        for part in ("bias", "total"):
            mine, theirs = getattr(together, part), getattr(alone, part)
            assert (mine is None) is (theirs is None)
            assert theirs is None or close(mine[row, queries], theirs[0])
        assert (together.layers is None) is (alone.layers is None)
        if alone.layers is not None:
            size = alone.layers.shape[-1]
            assert close(together.layers[:, row][..., :size, :size], alone.layers[:, 0])


def test_targets_and_ids_of_many_prompts(demo_model):
    rows = [list(range(3, 3 + length)) for length in (4, 9, 6)]
    targets = [5, 6, 7]
    together = tlens.attribute(demo_model, rows, target=targets, memory="300KB")
    assert together.options["target"] == targets
    assert together.target == "logit of each answer"
    for row, target in enumerate(targets):
        alone = tlens.attribute(demo_model, [rows[row]], target=target)
        assert close(together.scores[row, 0, : len(rows[row])], alone.scores[0, 0])
    assert "batch=3" in repr(together)
    with pytest.raises(tlens.InvalidInputError, match="target: 5 for 3 prompts"):
        tlens.attribute(demo_model, rows, target=[1, 2, 3, 4, 5], memory="300KB")


SIXTEEN = [list(range(5 + i, 25 + i)) for i in range(8)] + [list(range(50 + i, 60 + i)) for i in range(8)]


def test_what_is_named_for_each_prompt_is_counted_over_all_of_them(demo_model):
    """Prompts run in two batches of eight: eight targets must not be taken for one of each batch's prompts."""
    run = lambda **options: tlens.attribute(demo_model, SIXTEEN, **options)  # noqa: E731
    wide = torch.eye(128)[:, : demo_model.cfg.d_model]
    for options in ({"target": list(range(8))}, {"target": 5, "minus": [6] * 8}, {"direction": wide[:8]}):
        with pytest.raises(tlens.InvalidInputError, match="8 for 16 prompts"):
            run(**options)
    named = run(target=list(range(3, 19)))
    assert close(run(target=torch.arange(3, 19)).scores, named.scores)
    assert close(run(target=torch.arange(3, 19).numpy()).scores, named.scores)
    assert close(named.scores[9:10, :, :10], tlens.attribute(demo_model, SIXTEEN[9:10], target=12).scores)
    assert close(run(target=torch.tensor(5)).scores, run(target=5).scores)


def test_one_direction_serves_as_many_prompts_as_it_has_channels():
    model = tiny_model("bridge/gpt2")
    prompts = [list(range(3, 8 + i % 2)) for i in range(model.cfg.d_model)]
    direction = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = tlens.attribute(model, prompts, direction=direction, memory="20KB")
    assert close(
        together.scores[3:4, :, : len(prompts[3])], tlens.attribute(model, prompts[3:4], direction=direction).scores
    )


def test_a_slice_of_unequal_lengths_is_refused_in_batches_too(demo_model):
    with pytest.raises(tlens.InvalidInputError, match="same number in each"):
        tlens.attribute(demo_model, SIXTEEN, query=slice(1, None), target=7)
    three = tlens.attribute(demo_model, SIXTEEN, query=slice(-3, None), target=7)
    assert three.queries[0].tolist() == [17, 18, 19]
    assert three.queries[15].tolist() == [7, 8, 9]


def test_messages_count_all_prompts(demo_model):
    with pytest.raises(tlens.InvalidInputError, match=r"query=15 is out of range: prompt (8|9|1\d) has 10 real tokens"):
        tlens.attribute(demo_model, SIXTEEN, query=15, target=7)
    texts = ["Return the value of the file", "Raise an exception"]
    with pytest.raises(tlens.InvalidInputError, match=r"query, prompt 1: 'file' does not occur") as caught:
        tlens.attribute(demo_model, texts, query="file", target=7)
    assert str(caught.value).count("<|bos|>") == 1  # its own tokens, no padding
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(tlens.InvalidInputError, match=r"query, prompt [01]: 'row 7' does not occur"):
        tlens.attribute(demo_model, texts, query="row 7", target=7)
    with pytest.raises(tlens.InvalidInputError, match="memory"):
        tlens.attribute(demo_model, texts, method="alti", memory="banana")
    with pytest.raises(tlens.InvalidInputError, match="Did you mean 'layers'"):
        tlens.attribute(demo_model, texts, layer=slice(0, 2))


def test_nothing_is_found_or_said_at_padding(demo_model):
    """The padding token's text is also the first token's."""
    frozen = tlens.freeze(demo_model, ["Return the value of the file", "Return it"])
    terms = circuits.logit_attribution(frozen, " the", query="all")
    assert terms.query_row("<|bos|>", batch=1) == 0
    every = tlens.attribute(frozen, method="rollout")
    assert [entry.position for entry in every.score("<|bos|>", batch=1)] == [0]
    assert every.score(-1, batch=1)[0].name == " it"
    with pytest.raises(tlens.InvalidInputError, match="is padding in this prompt"):
        every.score(5, batch=1)
    padded = ~frozen.mask
    for found in (
        terms, circuits.total_effects(frozen, " the", query="all"),
        circuits.total_effects(frozen, " the", query="all", live=True),
    ):  # fmt: skip
        assert not found.scores[padded].any()
        assert not found.total[padded].any()
    assert torch.equal(terms.total, tlens.attribute(frozen, target=" the", query="all").total)


def test_batches_keep_within_their_bound():
    from tensorlens_tl.models import ModelView
    from tensorlens_tl.passes.inputs import captured_bytes, memory_batches

    view = ModelView(tlens.load_demo_model())
    lengths = [3, 250, 7, 8, 250, 249, 30, 31, 200, *[5] * 50]
    batches = memory_batches(view, lengths, "8MB")
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or len(batch) * captured_bytes(view, longest) <= 8 * 10**6
    assert len(memory_batches(view, [10, 11, 12])) == 1


# ------------------------------------------------------------------ tables and files


def test_every_top_gives_the_same_kind_of_entry(frozen):
    from tensorlens_tl import contextualisation

    attribution = tlens.attribute(frozen)
    found = [
        attribution.top(2), attribution["file"], circuits.logit_attribution(frozen, " the").top(2),
        circuits.top_paths(frozen, " the", k=3).top(2), circuits.contribution_graph(frozen, " the").top(2, kind="head"),
        circuits.qk_attribution(frozen, 1, 0).top(2), circuits.total_effects(frozen, " the").top(2),
        contextualisation.top_pairs(frozen, contextualisation.ff_amp(frozen, "atb", "atb_ln"), 2),
    ]  # fmt: skip
    for entries in found:
        assert entries
        assert all(type(entry) is tlens.Entry for entry in entries)
        assert all(isinstance(entry.name, str) and isinstance(entry.score, float) for entry in entries)
    assert [type(entries[0].position) for entries in found] == [
        int,
        int,
        *[type(None)] * 2,
        int,
        tuple,
        type(None),
        tuple,
    ]


def shown(capsys, result, **options):
    result.show(**options)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    return {cells[-3].strip(): float(cells[-2].strip()) for cells in lines}


def test_tables_end_in_a_line_for_all_others(frozen, capsys):
    for result, k in ((tlens.attribute(frozen), 3), (circuits.logit_attribution(frozen, " the"), 4)):
        lines = shown(capsys, result, k=k)
        counted = [int(name.split()[0]) for name in lines if re.match(r"\d+ other", name)]
        assert sum(counted) == (len(result.tokens[0]) if k == 3 else len(result)) - k
        total = lines.pop("total")
        assert sum(lines.values()) == pytest.approx(total, rel=2e-3, abs=2e-2)  # four digits each


@pytest.mark.parametrize("by", ["token", "component", "head"])
def test_a_score_is_shown_by_sums_of_either_side(frozen, capsys, by):
    """Each table sums to its last line, and its line for all others is no larger than what it stands beside."""
    score = circuits.qk_attribution(frozen, 2, 0, by=by)
    score.show(3)
    tables = [part.split("└")[0] for part in capsys.readouterr().out.split("┏")[1:]]
    assert len(tables) == (3 if by == "token" else 4)
    for table in tables:
        lines = [line.split("│") for line in table.splitlines() if "│" in line]
        *parts, (_, whole) = [(cells[1].strip(), float(cells[2])) for cells in lines]
        assert sum(value for _, value in parts) == pytest.approx(whole, abs=2e-2)  # four digits each
        others = [abs(value) for name, value in parts if re.match(r"\d+ other", name)]
        assert max(others, default=0) <= max(abs(value) for name, value in parts if not name.endswith("bias"))
    assert [float(lines.split("total │")[1].split()[0]) for lines in tables[:2]] == pytest.approx(
        [float(score.total)] * 2, rel=1e-3
    )
    layers = score.by_layer()
    assert float(layers.gap.max()) < 1e-5
    assert torch.allclose(layers.pairs.sum(), score.pairs.sum(), atol=1e-5)
    assert "source in the key" in score.to_html()


def test_a_table_of_many_queries_says_which_it_shows(frozen, capsys):
    tlens.attribute(frozen, method="rollout").show(query="file")
    printed = " ".join(capsys.readouterr().out.split())
    assert "query=3, ' file' at 3, one of 17" in printed
    circuits.logit_attribution(frozen, " the", query=[2, 3]).show(query=0)
    assert "query=0, ' the' at 2, one of 2" in " ".join(capsys.readouterr().out.split())


def test_terms_graphs_and_scores_can_be_kept(frozen, tmp_path):
    for number, result in enumerate(
        (
            circuits.logit_attribution(frozen, " the", by="head_token", query=[2, -1]),
            circuits.paths(frozen, " the", max_order=1),
            circuits.total_effects(frozen, " the"),
            circuits.contribution_graph(frozen, " the", threshold=0.1),
            circuits.qk_attribution(frozen, 1, 0, by="component"),
        )
    ):
        path = result.save(tmp_path / f"{number}.safetensors")
        again = type(result).load(path)
        assert repr(again) == repr(result)
        assert [e.name for e in again.top(3)] == [e.name for e in result.top(3)]
        assert again.to_dataframe().equals(result.to_dataframe())
        with pytest.raises(tlens.FileFormatError, match="not Attribution; tlens"):
            tlens.Attribution.load(path)


def test_frames_are_long(frozen):
    terms = circuits.logit_attribution(frozen, " the", by="head_token", query=[2, -1])
    frame = terms.to_dataframe(keys=False)
    assert list(frame) == ["batch", "query", "query_token", "term", "target", "score"]
    assert len(frame) == 2 * len(terms)
    keys = terms.to_dataframe()
    assert len(keys) == 2 * len(terms) * 17
    assert keys.groupby(["query", "term"])["score"].sum().sum() == pytest.approx(frame["score"].sum())
    with pytest.raises(tlens.InvalidInputError, match="head_token"):
        circuits.logit_attribution(frozen, " the").to_dataframe(keys=True)
    assert list(circuits.qk_attribution(frozen, 1, 0).to_dataframe()) == [
        "batch", "query_source", "key_source", "score",
    ]  # fmt: skip


def test_total_effects_claim_no_sum(frozen):
    effects = circuits.total_effects(frozen, " the")
    assert not effects.additive
    assert "not additive" in repr(effects)
    with pytest.raises(tlens.InvalidInputError, match="not additive"):
        _ = effects.gap


def test_public_names_come_from_where_they_are_listed():
    assert set(dir(tlens)) == {*tlens.__all__, "__version__"}
    for name in tlens.__all__:
        assert getattr(tlens, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = tlens.nothing
    with pytest.raises(AttributeError, match=r"it is tensorlens_tl\.circuits\.logit_attribution$"):
        _ = tlens.logit_attribution
    with pytest.raises(AttributeError, match="It is called 'edge_scores' here"):
        _ = tlens.circuits.path_patching
    with pytest.raises(AttributeError, match="Did you mean 'logit_lens'"):
        _ = tlens.circuits.logitlens
    with pytest.raises(AttributeError, match="did you mean 'attribute'"):
        _ = tlens.atribute


def test_a_model_is_what_it_can_do(model_named):
    assert isinstance(model_named("bridge/gpt2"), tlens.HookedModel)
    assert not isinstance("gpt2", tlens.HookedModel)
    assert some_tokens().shape == (2, 6)


# ------------------------------------------------------------------ any part of the stream, the live model


def test_the_last_blocks_output_before_the_final_norm(frozen):
    """A probe of ``hook_resid_post``: what the final norm gives is another stream."""
    probe = torch.randn(frozen.output.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = frozen.resid_pre(frozen.n_layers)[0, -1] @ probe
    assert abs(own - frozen.output[0, -1] @ probe) > 1e-2
    asked = {"direction": probe, "final_norm": False}
    op = frozen.operator(final_norm=False)
    found = [
        tlens.attribute(frozen, **asked), circuits.logit_attribution(frozen, by="head", **asked),
        circuits.paths(frozen, max_order=1, **asked), circuits.top_paths(frozen, k=3, **asked),
        circuits.total_effects(frozen, live=True, **asked),
    ]  # fmt: skip
    for result in found:
        assert close(result.total[0, 0], own)
    assert all(float(result.gap.max()) < 1e-9 for result in found[:-1])
    assert circuits.contribution_graph(frozen, **asked).total == pytest.approx(float(own), rel=1e-12)
    assert close(op(op.x), frozen.resid_pre(frozen.n_layers))
    with pytest.raises(tlens.InvalidInputError, match="before the unembedding"):
        op.target(" the")
    head = circuits.head_map(frozen, 1, 0, final_norm=False)
    effect = circuits.total_effects(frozen, **asked)["L1H0"]
    assert close(head.target(direction=probe).sum((-2, -1)), effect[0])


def test_what_asks_the_live_model_wants_it_free_and_unchanged(frozen):
    with frozen.attached():
        for ask in (
            lambda: circuits.total_effects(frozen, " the", live=True),
            lambda: tlens.attribute(frozen, method="input-x-gradient", target=" the"),
            lambda: tlens.attribute(frozen, method="integrated-gradients", target=" the", steps=2),
            lambda: tlens.attribute(frozen, method="attnlrp", target=" the"),
        ):
            with pytest.raises(tlens.FrozenModelError, match="attached"):
                ask()
    model = frozen.model
    model.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: torch.zeros_like(pattern))
    try:
        with pytest.raises(tlens.FrozenModelError, match="put on it or taken off since"):
            circuits.total_effects(frozen, " the", live=True)
    finally:
        model.reset_hooks()


def test_dropout_switched_on_later_is_noticed():
    model = tiny_model("bridge/gpt2")
    for module in model.original_model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    frozen = tlens.freeze(model, some_tokens())
    model.train()
    for ask in (
        lambda: circuits.total_effects(frozen, 5, live=True),
        lambda: tlens.attribute(frozen, method="input-x-gradient", target=5),
    ):
        with pytest.raises(tlens.InvalidInputError, match="train mode"):
            ask()


def test_gradients_in_inference_mode(frozen):
    for method in ("input-x-gradient", "attnlrp"):
        outside = tlens.attribute(frozen, method=method, target=" the")
        with torch.inference_mode():
            again = tlens.freeze(frozen.model, TEXT)
            for one in (frozen, again):
                assert close(tlens.attribute(one, method=method, target=" the").scores, outside.scores)


def test_a_key_after_its_query_is_refused(frozen):
    with pytest.raises(tlens.InvalidInputError, match="attends to no later token"):
        circuits.qk_attribution(frozen, 1, 0, query="file", key="Error")


def test_options_come_back_from_a_file_as_they_were(frozen, tmp_path):
    asked = {
        "layers": slice(0, 2),
        "heads": {1: [0]},
        "direction": torch.eye(frozen.output.shape[-1])[3],
        "query": (1, 2),
    }
    result = tlens.attribute(frozen, **asked)
    loaded = tlens.Attribution.load(result.save(tmp_path / "a"))
    assert loaded.options["layers"] == slice(0, 2)
    assert loaded.options["heads"] == {1: [0]}
    assert loaded.options["query"] == (1, 2)
    again = tlens.attribute(frozen, **loaded.options)
    assert torch.equal(again.scores, result.scores)


def test_decompx_in_half_precision_measures_what_it_returns():
    frozen = tlens.freeze(tlens.load_demo_model(dtype=torch.bfloat16), "Return the value of the")
    result = tlens.attribute(frozen, method="decompx", target=" the", query="all")
    size = result.scores.double().abs().sum(-1) + result.bias.double().abs()
    off = (result.scores.double().sum(-1) + result.bias.double() - result.total.double()).abs() / size
    assert result.scores.dtype == torch.float32
    assert torch.allclose(off, result.gap.double(), atol=1e-6)


def test_tables_say_which_and_whether_they_add_up(frozen, pair, capsys):
    circuits.total_effects(frozen, " the").show(3)
    printed = " ".join(capsys.readouterr().out.split())
    assert "which do not add up" in printed
    assert "│ total" not in printed
    for result in (circuits.logit_attribution(pair, " the"), tlens.attribute(pair, target=" the")):
        result.show(batch=1)
        assert "prompt 1 of 2" in " ".join(capsys.readouterr().out.split())
    circuits.contribution_graph(frozen, " the").show(4)
    assert "node" in capsys.readouterr().out
    with pytest.raises(tlens.InvalidInputError, match="use one of 'embedding', 'whitening', 'head'"):
        circuits.contribution_graph(frozen, " the").top(kind="heads")
    with pytest.raises(tlens.InvalidInputError, match="batch=9"):
        circuits.qk_attribution(frozen, 1, 0).top(batch=9)
