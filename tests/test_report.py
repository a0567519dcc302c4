"""Pictures and the report: what they say is what was measured, they are small, safe, and never hide a refusal."""

import base64
import html as html_module
import re
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, report
from tensorlens_tl.commands import main
from tensorlens_tl.drawing import charts, heat_maps, marks, matrix, page
from tensorlens_tl.drawing.graphs import LABEL, _label
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.report import predict, stretch_components
from tensorlens_tl.results import attribution
from tensorlens_tl.results.graph import SHOWN_EDGES

NASTY = "<img src=x onerror=alert(1)> \"'></svg><script>alert(2)</script>"


@pytest.fixture(scope="module")
def frozen():
    return tlens.freeze(tlens.load_demo_model(), "Return the value of the")


def sum_of(value: torch.Tensor | None) -> float:
    """The one number of a total or a gap, of a result that has it."""
    assert value is not None
    return float(value)


def decoded(uri):
    """The palette indices of one of our PNGs, by the format's own rules."""
    data = base64.b64decode(uri.split(",", 1)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], chunks


# ------------------------------------------------------------------ marks


def test_colours_have_zero_in_the_middle():
    indices, chunks = decoded(marks.picture(np.array([[-2.0, 0.0, 1.0, 2.0], [np.nan, np.inf, -np.inf, 1e-9]]), 2.0))
    assert indices.tolist() == [[0, 127, 191, 254], [127, 254, 0, 127]]
    colours, alpha = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3), chunks[b"tRNS"]
    assert alpha[127] == 0
    assert alpha[0] == alpha[254] == round(255 * marks.STRONGEST)
    assert tuple(colours[0]) == marks.NEGATIVE
    assert tuple(colours[254]) == marks.POSITIVE
    assert marks.colour(0.0, 2.0).endswith(",0.000)")


@pytest.mark.parametrize("text", [0, 255], ids=["light", "dark"])
@pytest.mark.parametrize("rgb", [marks.POSITIVE, marks.NEGATIVE], ids=["positive", "negative"])
def test_text_on_the_strongest_colour_can_be_read(text, rgb):
    """WCAG AA, 4.5 : 1, black on white ground and white on near-black."""

    def luminance(channels):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in channels)]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    ground = 18 if text else 255
    mixed = [marks.STRONGEST * channel + (1 - marks.STRONGEST) * ground for channel in rgb]
    low, high = sorted([luminance(mixed), luminance([text] * 3)])
    assert (high + 0.05) / (low + 0.05) > 4.5


def test_signs_differ_without_colour_vision():
    """Blue and orange stay apart for all three kinds of dichromats (Viénot, Brettel and Mollon's projection)."""
    lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    lacking = {
        "protan": [[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]],
        "deutan": [[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]],
        "tritan": [[1, 0, 0], [0, 1, 0], [-0.395913, 0.801109, 0]],
    }
    for kind, matrix_ in lacking.items():
        seen = [
            np.linalg.inv(lms) @ np.array(matrix_) @ lms @ np.array(rgb) for rgb in (marks.POSITIVE, marks.NEGATIVE)
        ]
        assert np.linalg.norm(seen[0] - seen[1]) > 80, kind


@pytest.mark.parametrize(
    ("token", "shown"), [("", "∅"), ("\n", "↵"), ("a\tb", "a⇥b"), ("\x00\x1b", "␀␛"), (" the", " the")]
)
def test_every_token_can_be_seen(token, shown):
    assert marks.visible(token) == shown


@pytest.mark.parametrize("token", ["<|im_start|>", "John| Mary", "antidisestablishmentarianism"])
def test_a_node_of_the_graph_ends_with_the_share_that_its_head_attends(token):
    label = _label("L23H2.q", f" ← {token} 71 %")
    assert len(label) <= LABEL
    shown = label.removeprefix("L23H2.q ← ").removesuffix(" 71 %")
    assert token.startswith(shown.removesuffix("…"))
    assert len(shown) == min(len(token), LABEL - len("L23H2.q ←  71 %"))


# ------------------------------------------------------------------ results


def made(pos, query=None, layers=0, heads=0, tokens=None):
    generator = torch.Generator().manual_seed(0)
    rows = pos if query is None else 1
    shape = (1, heads, rows, pos) if heads else (1, rows, pos)
    return tlens.Attribution(
        torch.randn(shape, generator=generator, dtype=torch.float64),
        [tokens or [f" token{i}" for i in range(pos)]],
        torch.arange(pos)[None] if query is None else torch.tensor([[query]]),
        torch.ones(1, pos).bool(),
        "made",
        axes=("batch", "head", "query", "key") if heads else ("batch", "query", "key"),
        layers=torch.randn(layers, 1, pos, pos, generator=generator) if layers else None,
    )


@pytest.mark.parametrize("options", [{}, {"query": 5}, {"layers": 12}, {"heads": 12}, {"layers": 12, "heads": 12}])
def test_128_tokens_stay_small(options):
    html = made(128, **options)._repr_html_()
    assert len(html) < 300_000
    assert "http" not in html


def test_values_travel_exactly():
    result = made(7)
    (packed,) = re.findall(r'class="grid".*?data-values="([^"]+)"', result.to_html(style=False))
    values = np.frombuffer(base64.b64decode(packed), "<f4").reshape(7, 7)
    assert (values == result.scores[0].float().numpy()).all()


def test_padding_is_not_shown():
    two = tlens.attribute(tlens.load_demo_model(), ["Return the value of the", "Return the"], query="all")
    html = two.to_html(batch=1, style=False)
    assert re.findall(r'data-width="(\d+)"', html) == ["3"]
    with pytest.raises(tlens.InvalidInputError, match="batch=2"):
        two.to_html(batch=2)


def test_layers_and_heads_become_small_multiples(frozen):
    every = tlens.attribute(frozen, method="attention", head_reduction=None)
    html = every.to_html(style=False)
    assert html.count("<button") == 4 + 4
    assert "By head" in html
    assert "By layer" in html
    one = tlens.attribute(frozen, method="attention", head_reduction=None, query=-1).to_html(style=False)
    assert "head 3" in one
    assert "<button" in one  # the layers still hold every query


def test_pooling_keeps_the_strongest():
    plane = np.zeros((1, 5, 5))
    plane[0, 3, 1], plane[0, 2, 1], plane[0, 4, 4] = -3, 2, 1
    assert matrix.pool(plane, 2).tolist() == [[[0, 0, 0], [-3, 0, 0], [0, 0, 1]]]
    assert matrix.pool_labels(list("abcde"), 2) == ["ab", "cd", "e"]


def test_many_prompts_are_cut_with_a_note():
    model = tlens.testing.tiny_model("bridge/gpt2")
    html = tlens.attribute(model, some_tokens(batch=11)).to_html(style=False)
    assert html.count('class="line rove"') == attribution.MOST_PROMPTS
    assert "3 more prompts" in html


def test_comparing_methods(frozen):
    a, b = tlens.attribute(frozen), tlens.attribute(frozen, method="rollout", query="all")
    picture = report.compare([a, b])
    assert "tensorlens (target)" in picture.body
    for result, row in ((a, 0), (b, -1)):
        assert f"{float(result.scores[0, row, 2]):.3g}" in picture.body
    assert ">gap<" in picture.body
    assert "Picture(" in repr(picture)
    assert "mine" in report.compare({"mine": a}).body
    other = tlens.attribute(tlens.load_demo_model(), "Another prompt")
    refused: list[tuple[Any, str]] = [
        ([a, other], "compare one prompt"),
        ([], "pass Attributions"),
        ("text", "pass Attributions"),
    ]
    for bad, message in refused:
        with pytest.raises(tlens.InvalidInputError, match=message):
            report.compare(bad)


# ------------------------------------------------------------------ circuits


def test_terms_are_shown_with_their_sum(frozen):
    found = circuits.logit_attribution(frozen, " the", by="head")
    html = found.to_html(3, style=False)
    numbers = [float(value) for value in re.findall(r"<td>([+-][\d.e+-]+)</td></tr>", html)]
    assert len(numbers) == 7  # three parts, then what is left: heads, MLPs, others
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=2e-2)  # four digits each
    assert numbers[-1] == pytest.approx(float(found.total), rel=1e-3)
    grid = found.heads_to_html(style=False)
    (packed,) = re.findall(r'data-values="([^"]+)"', grid)
    values = np.frombuffer(base64.b64decode(packed), "<f4").reshape(4, 5)
    assert values[1, 2] == pytest.approx(float(found["L1H2"]))
    assert values[3, 4] == pytest.approx(float(found["MLP3"]))


def test_a_graph_is_drawn_within_its_frame(frozen):
    graph = circuits.contribution_graph(frozen, " the")
    html = graph._repr_html_()
    width, height = (float(size) for size in re.findall(r'<svg width="(\d+)" height="(\d+)"', html)[0])
    for x, y, r in re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', html):
        assert float(r) <= float(x) <= width - float(r)
        assert float(r) <= float(y) <= height - float(r)
    names = re.findall('data-name="([^"]*)"', html)
    others = {str(number) for number, name in enumerate(names) if name.startswith(("other ", "smaller "))}
    sources = re.findall(r'data-e="(\d+) ', html)
    of_others = sum(source in others for source in sources)
    drawn = len(sources) - of_others
    assert 0 < drawn <= SHOWN_EDGES
    assert of_others
    assert f"{drawn} of {len(graph.edges)} edges" in html
    assert "of what enters the answer; all others are summed by layers" in html


# ------------------------------------------------------------------ the report


def test_the_report_says_what_was_measured(frozen):
    picture = report.explain(frozen, target=" the", minus=" a", methods=["tensorlens", "rollout"])
    assert "logit of &#x27; the&#x27; − &#x27; a&#x27;" in picture.body
    own = tlens.attribute(frozen, collapse="target", target=" the", minus=" a")
    assert f"<b>{sum_of(own.total):+.4g}</b>" in picture.body
    assert f"{float(own.scores[0, 0, 1]):+.4g}" in picture.body
    assert "blocks.3: the composed map" in picture.body
    chances = frozen.last_logits[0].double().softmax(-1)
    assert f"{100 * float(chances.max()):.1f} %" in picture.body


def rows_of(card):
    """The lines of a card's table: names and numbers."""
    found = re.findall(r"<tr[^>]*><t[dh][^>]*>([^<]*)</t[dh]>.*?<td>([+-][\d.e+-]+)</td></tr>", card)
    return [(html_module.unescape(name), float(value)) for name, value in found]


def test_the_report_begins_with_an_answer_that_adds_up(frozen):
    body = report.explain(frozen, target=" the", minus=" a", methods=["rollout"]).body
    first = body.split("<h2>What each method says")[0]
    cards_ = dict(re.findall(r'<section class="card" aria-label="([^"]*)">(.*?)</section>', first))
    tokens, components = cards_["The tokens that moved it"], cards_["The components that moved it"]
    why = tlens.attribute(frozen, " the", minus=" a")
    heads = circuits.logit_attribution(frozen, " the", " a", by="head")
    assert [name for name, _ in rows_of(tokens)[:5]] == [f"{e.name!r} · {e.position}" for e in why.top(5)]
    real = {name: abs(float(heads[name])) for name in heads.names if re.fullmatch(r"L\dH\d|MLP\d", name)}
    assert [name for name, _ in rows_of(components)[:5]] == sorted(real, key=lambda name: real[name], reverse=True)[:5]
    for card in (tokens, components):
        *lines, (name, total) = rows_of(card)
        assert name == "sum"
        assert sum(value for _, value in lines) == pytest.approx(total, abs=5e-3)  # four digits each
        assert total == pytest.approx(sum_of(why.total), rel=1e-3)
    prediction = next(card for name, card in cards_.items() if name.startswith("What it expects after"))
    assert ">explained</td>" in prediction
    assert ">against</td>" in prediction


def test_the_page_of_two_prompts_begins_with_an_answer_that_adds_up():
    model = tlens.load_demo_model()
    first, second = (tlens.freeze(model, f"Open the {name} and read the") for name in ("file", "socket"))
    change = tlens.difference(first, second)
    page = report.explain_difference(change)
    assert page.title == "Why ' file' and not ' socket'?"
    why = tlens.attribute(change, " file", minus=" socket")
    file, socket = map(model.to_single_token, (" file", " socket"))
    live = [run.last_logits[0, file] - run.last_logits[0, socket] for run in (first, second)]
    assert f"is {float(live[0]):+.4g} after the first prompt and {float(live[1]):+.4g}" in page.body
    assert float(live[0] - live[1]) == pytest.approx(sum_of(why.total), rel=1e-5)
    cards_ = dict(re.findall(r'<section class="card" aria-label="([^"]*)">(.*?)</section>', page.body))
    assert [name for name, _ in rows_of(cards_["The tokens that changed it"])] == [
        "' file| socket' · 4", "7 other tokens", "bias (no token)", "sum",
    ]  # fmt: skip
    for title in ("The tokens that changed it", "The components that changed it"):
        *lines, (name, total) = rows_of(cards_[title])
        assert name == "sum"
        assert sum(value for _, value in lines) == pytest.approx(total, abs=5e-3)
        assert total == pytest.approx(sum_of(why.total), rel=1e-3)
    for run in (first, second):
        chances = run.last_logits[0].double().softmax(-1)
        for token in (file, socket):
            assert f"{100 * float(chances[token]):.1f} %" in cards_["Both tokens"]


def test_two_prompts_with_one_answer_are_compared_at_its_runner_up():
    model = tlens.load_demo_model()
    texts = [f"If the {name} is not found, a FileNotFoundError is" for name in ("file", "value")]
    first, second = (tlens.freeze(model, text) for text in texts)
    assert report.explain_difference(tlens.difference(first, second)).title == "Why ' raised' and not ' not'?"
    assert report.explain_difference(tlens.difference(first, second), " raised").title == "Why does ' raised' change?"


def test_what_a_page_of_two_prompts_refuses(frozen):
    with pytest.raises(tlens.InvalidInputError, match="a difference of two runs is needed, got FrozenPass"):
        report.explain_difference(frozen)
    two = tlens.freeze(frozen.model, torch.cat([frozen.tokens, frozen.tokens]))
    with pytest.raises(tlens.InvalidInputError, match="2 pairs of prompts; compare one"):
        report.explain_difference(tlens.difference(two, two))


def test_the_command_compares_two_prompts(tmp_path, capsys):
    page = tmp_path / "page.html"
    texts = ["Open the file and read the", "Open the socket and read the"]
    assert main(["compare", *texts, "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Why ' file' and not ' socket'?")
    assert f"page written to {page}" in said
    assert "<h1>Why &#x27; file&#x27; and not &#x27; socket&#x27;?</h1>" in page.read_text()
    assert main(["compare", texts[0], "Open the old file and read the", "-o", str(page)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "[8] and [10] tokens, with [] in the one and [' o', 'ld'] in the other" in said


@pytest.mark.parametrize("minus", [None, " the"])
@pytest.mark.parametrize("span", ["all", (1, 3)])
def test_the_report_of_a_generated_text_begins_with_an_answer_that_adds_up(frozen, span, minus):
    text = tlens.generation.freeze_generation(frozen.model, "If the file is not found, a", max_new_tokens=5)
    whole = text.attribute(span=span, minus=minus)
    terms = stretch_components(text, whole, minus)
    assert terms is not None
    assert sum_of(terms.total) == pytest.approx(sum_of(whole.total), rel=1e-5)
    assert sum_of(terms.gap) < 1e-6
    body = report.explain_generation(text, span=span, minus=minus).body
    cards_ = re.findall(r'<section class="card" aria-label="([^"]*)">(.*?)</section>', body.split("<h2>Each token")[0])
    assert len(cards_) == 3
    for _, card in cards_[:2]:
        *lines, (name, total) = rows_of(card)
        assert name == "sum"
        assert len(lines) == 7
        assert sum(value for _, value in lines) == pytest.approx(total, abs=0.05)  # four digits each
        assert total == pytest.approx(sum_of(whole.total), rel=1e-3)


def test_components_of_runners_up_are_left_out(frozen):
    text = tlens.generation.freeze_generation(frozen.model, "If the file is not found, a", max_new_tokens=3)
    assert stretch_components(text, text.attribute(span="all", minus="runner-up"), "runner-up") is None
    assert report.explain_generation(text, minus="runner-up").body.count('class="card"') == 2


def test_a_framed_method_does_not_set_the_scale_of_its_group(frozen):
    question = predict(frozen, " the", " a")
    said = report.answers(frozen, question, ["tensorlens", "integrated-gradients"])
    loose = said.shown["integrated-gradients"].result
    exact = said.shown["tensorlens (target)"].result
    huge = replace(loose, scores=1000 * loose.scores, gap=torch.ones_like(loose.scores[:, :, 0]))
    shown = said.shown | {"integrated-gradients": replace(said.shown["integrated-gradients"], result=huge)}
    html = report.grouped_html(shown, question.position).split("Maps of token pairs")[0]
    assert f"+{float(exact.scores.abs().max()):.3g}, blue" in html
    assert "The others set the scale of the colours." in html


def test_methods_stand_in_groups_of_one_scale(frozen):
    said = report.answers(frozen, predict(frozen), tlens.list_methods())
    members = {group: [n for n, a in said.shown.items() if report.group_of(a) is group] for group in report.GROUPS}
    sums = {"tensorlens (target)", "decompx (target)", "alti-logit", "integrated-gradients", "difference"}
    assert sums <= set(members[report.SUMS])
    assert {"attnlrp", "gim"} <= set(members[report.RELEVANCE])
    assert {"rollout", "tensorlens (norm)", "tensorlens (in_out)"} <= set(members[report.MAPS])
    assert members[report.PERTURBATION] == ["leave-one-out", "value-zeroing"]
    assert "chefer" in members[report.RELEVANCE]
    html = report.grouped_html(said.shown, 5)
    sections = re.findall(r'<section class="group" aria-label="([^"]*)">(.*?)</section>', html)
    assert [title for title, _ in sections] == [group.title for group in report.GROUPS]
    for (_, section), group in zip(sections, report.GROUPS, strict=True):
        assert section.count('class="bar') == 1  # one scale
        table = section.split("<table")[1]
        columns = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
        values = np.array([row for row in columns if len(row) == len(members[group]) and all(row)][:6], dtype=float)
        if group.in_shares:
            assert np.abs(values).sum(0) == pytest.approx(1, abs=0.01)


def test_a_method_that_fails_is_named_and_the_others_are_shown(frozen, clean_registry):
    @tlens.register_method("broken")
    def broken(frozen, *, query=-1):
        raise TypeError("no <such> thing")

    with pytest.warns(UserWarning, match="Method 'broken' failed: TypeError: no <such> thing"):
        page = report.explain(frozen, methods=["broken", "attention"]).body
    assert "Method &#x27;broken&#x27; failed: TypeError: no &lt;such&gt; thing" in page
    assert "attention" in page


def test_a_report_compares_weights_at_its_beginning_and_its_end(frozen, clean_registry, monkeypatch):
    """Not for each method; so a method that changes them is noticed at the end."""
    checks = []
    holds = WeightState.holds

    def counted(self, model):
        checks.append(self)
        return holds(self, model)

    monkeypatch.setattr(WeightState, "holds", counted)
    report.explain(frozen, methods=["attention", "input-x-gradient", "leave-one-out", "rollout", "tensorlens"])
    assert sum(state is frozen.capture.weights for state in checks) == 2
    weight = next(frozen.model.parameters())

    @tlens.register_method("meddling")
    def meddling(frozen, *, query=-1):
        weight.data[0] += 1
        return tlens.attribute(frozen, method="attention", query=query)

    before = weight.detach().clone()
    try:
        with pytest.raises(tlens.FrozenModelError, match="weights were changed"):
            report.explain(frozen, methods=["meddling"])
    finally:
        weight.data.copy_(before)
    frozen.check_fresh()


def test_what_costs_too_much_is_left_out_or_estimated(frozen, monkeypatch):
    slow = ["integrated-gradients", "leave-one-out", "tensorlens", "value-zeroing"]
    monkeypatch.setattr(report, "LIMIT", report.operations(frozen, tlens.get_method("rollout"), {}) + 1)
    quick = report.answers(frozen, predict(frozen), tlens.list_methods())
    assert sorted(quick.refused) == sorted(set(slow) - {"tensorlens"})
    assert "runs the model 96 times" in quick.refused["integrated-gradients"]
    estimated = quick.shown["tensorlens (norm)"].result
    exact = tlens.attribute(frozen, collapse="norm", query=-1)
    assert estimated.stderr is not None
    assert ((estimated.scores - exact.scores).abs() <= 5 * estimated.stderr).all()
    page_ = report.explain(frozen)
    assert "tensorlens (norm) is estimated from 32 random rows" in page_.body
    assert "leave-one-out" in page_.body.split("not shown")[1]
    for limits in ({"named": True}, {"slow": True}):
        said = report.answers(frozen, predict(frozen), slow, **limits)
        assert not said.refused
        assert (said.shown["tensorlens (norm)"].result.stderr is None) is ("slow" in limits)


def test_every_method_is_in_the_report_or_named_with_its_reason(model_named):
    neox = tlens.freeze(model_named("bridge/neox"), some_tokens(batch=1))
    said = report.answers(neox, predict(neox), tlens.list_methods())
    assert {"tensorlens (target)", "decompx (norm)", "integrated-gradients"} <= set(said.shown)
    assert "parallel" in said.refused["globenc"]
    shown = {name.split(" (")[0] for name in (*said.shown, *said.refused)}
    assert shown >= set(tlens.list_methods())
    assert "not shown" in report.explain(neox, methods=["globenc"]).body


@pytest.mark.parametrize("name", ["bridge/bert", "encoder/bert", "bridge/llama"])
def test_other_kinds_of_models(name, model_named):
    if name not in tlens.testing.model_names():
        pytest.skip("not on this TransformerLens")
    body = report.explain(model_named(name), some_tokens(batch=1), methods=["tensorlens", "decompx"]).body
    assert "The proofs" in body


def test_the_page_is_one_file_and_inert(tmp_path):
    model = tlens.load_demo_model()
    path = report.explain(model, f"Return {NASTY} the", methods=["tensorlens", "attention"]).save(tmp_path / "r.html")
    html = path.read_text(encoding="utf-8")
    assert html.count("<script>") == 1
    assert "<img src=x" not in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "http" not in html.replace("http.", "")
    assert "@import" not in html
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        page.Picture("x", "").save(tmp_path / "nowhere" / "r.html")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": " the", "target": " a"}, "input already"),
        ({"query": 99}, "out of range"),
        ({"target": "two words"}, "one token"),
    ],
)
def test_bad_reports(frozen, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        report.explain(frozen, **options)
    with pytest.raises(tlens.RegistryError, match="Did you mean"):
        report.explain(frozen, methods=["rolout"])
    with pytest.raises(tlens.InvalidInputError, match="`input` is missing"):
        report.explain(frozen.model)
    with pytest.raises(tlens.InvalidInputError, match="2 prompts"):
        report.explain(frozen.model, ["one", "two"])


# ------------------------------------------------------------------ evaluations


def evaluation(methods=7, labels=None, **changes):
    values = torch.rand(2, methods, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves = values[..., None] * torch.linspace(0, 1, 4, dtype=torch.float64)
    labels = labels or [f"m{i}" for i in range(methods)]
    known = {
        "kind": "test", "values": values, "metrics": {"mse": True, "loss": False}, "methods": labels,
        "units": list("abcde"), "curves": curves, "axis": torch.linspace(0, 0.3, 4), "axis_name": "fraction",
    }  # fmt: skip
    return tlens.evaluate.Evaluation(**(known | changes))


def test_an_evaluation_shows_every_method_and_value():
    result = evaluation()
    assert result.curves is not None
    html = result.to_html(style=False)
    assert html == result._repr_html_().removeprefix(page.head())
    for number, metric in enumerate(result.metrics):
        labels = re.findall(
            r'aria-label="(m\d) · fraction ([^"]*)"', html.split(f"<b>{metric}</b>")[1].split("</details>")[0]
        )
        assert sorted(method for method, _ in labels) == result.methods
        for method, read in labels:
            seen = [float(pair.split(": ")[1]) for pair in read.split(", ")]
            assert seen == pytest.approx(result.curves[number, int(method[1])].mean(0).tolist(), rel=1e-2)
            mean, low, high = (result.table(metric).loc[method, (metric, what)] for what in ("mean", "low", "high"))
            assert f"{mean:.3g} [{low:.3g}, {high:.3g}]" in html
        best = result.table(metric).index[0]
        assert re.findall(rf'<b>{metric}</b>.*?class="r spans"><tbody><tr>.*?</tr><tr><td>(m\d)', html)[0] == best
    assert html.count('class="t other"') == 2 * 2  # all but the best five


def test_evaluations_without_curves_values_or_harm():
    bars = evaluation(methods=2, curves=None, axis=None)
    assert "<svg" not in bars.to_html(style=False)
    values = bars.values.clone()
    values[0, 0], values[1] = torch.nan, torch.nan
    missing = evaluation(methods=2, values=values, skipped={"x": "refused <b>"}).to_html(style=False)
    assert "No values." in missing
    assert "nan" not in missing
    assert "refused &lt;b&gt;" in missing
    nasty = evaluation(2, labels=[NASTY, "b"], kind=NASTY, axis_name=NASTY)
    assert NASTY not in nasty.to_html(style=False)
    assert "<img" not in nasty.to_html(style=False)


def test_a_gap_that_is_none_is_pointed_out(frozen):
    sums = tlens.attribute(frozen, collapse="target", target=5)
    loose = tlens.attribute(frozen, method="integrated-gradients", target=5, steps=1)
    assert sum_of(loose.gap) > heat_maps.LOOSE
    html = report.compare([sums, loose]).body
    assert html.count("class=loose") == 1
    assert "The gap of integrated-gradients is framed: its integral has not converged at steps=1" in html
    assert "loose" not in report.compare([sums]).body


def test_a_method_that_claims_no_sum_is_not_advised_to_take_more_steps(frozen):
    rules = [tlens.attribute(frozen, method=name, target=5) for name in ("attnlrp", "gim")]
    assert all(sum_of(result.gap) > heat_maps.LOOSE for result in rules)
    html = report.compare(rules).body
    assert html.count("class=loose") == 2
    assert "The gap of attnlrp and gim is framed: the method does not claim" in html
    assert "steps" not in html


def test_the_scale_of_scores_without_sign_starts_at_zero():
    assert "unsigned" in marks.colour_bar(np.array([0.0, 2.0]))
    assert "−" not in marks.colour_bar(np.array([0.0, 2.0, np.nan]))
    assert "−2" in marks.colour_bar(np.array([-1.0, 2.0]))


def test_labels_of_lines_stand_apart():
    placed = charts._apart(np.array([50.0, 50.0, 51.0, np.nan, 250.0]))
    assert np.diff(np.sort(placed)).min() >= charts.LINE_HEIGHT - 1e-9
    assert (charts._apart(np.full(5, 260.0)) <= charts.HEIGHT - charts.BOTTOM).all()


def test_positions_are_those_of_the_prompt_after_padding_on_the_left(frozen):
    two = tlens.freeze(frozen.model, ["If the file is not found", "Return it"], padding_side="left")
    result = tlens.attribute(two)
    html = result.to_html(batch=1, style=False)
    for entry in result.top(20, batch=1):
        assert f"at {entry.position}: {marks.number(entry.score)}" in html
    assert re.findall(r'class="t q"[^>]*aria-label="[^"]* at (\d+):', html) == [str(int(result.queries[1, 0]))]


def test_results_of_different_queries_are_not_compared(frozen):
    first, last = (tlens.attribute(frozen, query=query) for query in (0, -1))
    with pytest.raises(tlens.InvalidInputError, match="different queries"):
        report.compare([first, last])
    every = tlens.attribute(frozen, query="all")
    numbered: dict[Any, Any] = {1: every, 2: last}
    assert "2 attributions" in report.compare(numbered).body


def test_small_multiples_have_scales_of_their_own():
    planes = np.stack([np.full((2, 2), 0.1), np.full((2, 2), 5.0), np.full((2, 2), -3.0)])
    html = matrix.small_multiples(["a", "b", "c"], ["r", "s"], ["k", "l"], planes, label="by head")
    assert html.endswith(marks.colour_bar(planes[0]) + "</div>")
    bars = [html_module.unescape(bar) for bar in re.findall(r'data-bar="([^"]*)"', html)]
    assert bars == [marks.colour_bar(plane) for plane in planes]
    assert ["unsigned" in bar for bar in bars] == [True, True, False]


def test_evaluations_at_their_limits():
    values = torch.tensor([[[1.0, 2.0], [torch.inf, 1.0]], [[torch.nan, torch.nan]] * 2], dtype=torch.float64)
    curves = values[..., None].expand(-1, -1, -1, 3).clone()
    curves[0, 0, :, -1] = torch.nan
    axis = torch.arange(3.0)
    odd = tlens.evaluate.Evaluation("t", values, {"m": True, "n": False}, ["_a$", "b"], ["1", "2"], curves, axis, "x$")
    html = odd.to_html(style=False)
    assert not re.search(r"(nan|inf)%|[ML](nan|inf)|nan nan", html)
    assert "–" in odd.to_markdown()
    for result in (odd, tlens.evaluate.Evaluation("t", values, odd.metrics, odd.methods, odd.units)):
        axes = result.plot(metric="m")
        axes.figure.canvas.draw()
