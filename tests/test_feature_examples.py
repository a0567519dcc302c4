"""Top activating examples of features: a running top-k over batches is what a literal loop over all tokens gives."""

import csv
import itertools
import json
import warnings
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import close
from test_features import Dictionary

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits import feature_rows as module
from tensorlens_tl.circuits.feature_rows import Examples
from tensorlens_tl.drawing import figure

HOOK = "blocks.2.hook_resid_post"
FEATURES = [357, 156, 3, 98]


def shipped(hook=HOOK):
    return tlens.load_demo_dictionary(hook, torch.float64)


@pytest.fixture(scope="module")
def rows(demo_model):
    """Rows of five lengths, two of them alike."""
    windows = tlens.demo.held_out_prompts(demo_model, 14, 24).tolist()
    cut = [row[: 25 - 5 * (number % 5)] for number, row in enumerate(windows)]
    return [*cut, cut[0]]


@pytest.fixture(scope="module")
def examples(demo_model, rows):
    return circuits.feature_examples(demo_model, shipped(), rows, FEATURES, k=6, window=(3, 2))


@cache
def frozen_row(model, row):
    return tlens.freeze(model, torch.tensor([row]))


def literal(model, rows, feature, *, skip=0, dictionary=None):
    """(activation, row, position, values of the row) of each row's largest token, largest first."""
    best = []
    for number, row in enumerate(rows):
        active = circuits.features(frozen_row(model, tuple(row)), dictionary or shipped())
        values = active.value(feature)[0].tolist()
        peak, at = 0.0, None
        for position in range(skip, len(values)):
            if abs(values[position]) > abs(peak):
                peak, at = values[position], position
        if at is not None:
            best.append((peak, number, at, values))
    return sorted(best, key=lambda entry: (-abs(entry[0]), entry[1]))


def test_the_running_top_is_that_of_a_literal_loop(demo_model, rows, examples):
    for place, feature in enumerate(FEATURES):
        expected = literal(demo_model, rows, feature)
        shown = expected[:6]
        assert examples.rows[place, : len(shown)].tolist() == [row for _, row, _, _ in shown]
        assert examples.positions[place, : len(shown)].tolist() == [at for _, _, at, _ in shown]
        assert (examples.rows[place, len(shown) :] == -1).all()
        for rank, (peak, row, at, values) in enumerate(shown):
            assert close(examples.peaks[place, rank], torch.tensor(peak), 1e-5)
            for column in range(6):
                position = at - 3 + column
                token = int(examples.tokens[place, rank, column])
                if 0 <= position < len(rows[row]):
                    assert close(examples.activations[place, rank, column], torch.tensor(values[position]), 1e-5)
                    assert examples.texts[token] == demo_model.tokenizer.decode([rows[row][position]])
                else:
                    assert token == -1
        sizes = [abs(value) for *_, values in expected for value in values if value]
        assert int(examples.counts[place].sum()) == len(sizes)
        for low, high, count in zip(examples.edges, examples.edges[1:], examples.counts[place].tolist(), strict=False):
            assert count == sum(low <= size < high for size in sizes)
    assert examples.n_tokens == sum(map(len, rows))
    assert examples.n_rows == len(rows)


@pytest.mark.parametrize(
    "memory",
    ["1MB", "200KB", "1KB"],  # the last: one feature at a time
)
def test_batches_and_chunks_change_nothing(demo_model, rows, examples, memory, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
    again = circuits.feature_examples(
        demo_model,
        shipped(),
        (torch.tensor(row) for row in rows),  # a generator: rows are read once
        [f"F{feature}" for feature in FEATURES],
        k=6,
        window=(3, 2),
        memory=memory,
    )
    for name in ("rows", "positions", "counts"):
        assert torch.equal(getattr(again, name), getattr(examples, name)), name
    assert close(again.activations, examples.activations, 1e-4)


def test_tokens_at_the_beginning_can_be_left_out(demo_model, rows):
    dictionary = shipped()
    first = circuits.features(tlens.freeze(demo_model, torch.tensor([rows[0]])), dictionary).top(1, query=0)[0].name
    for skip in (0, 1):
        made = circuits.feature_examples(demo_model, dictionary, rows, first, k=2, skip=skip)
        expected = literal(demo_model, rows, int(first[1:]), skip=skip)[:2]
        assert [(entry.score, entry.position) for entry in made.top(2)] == [
            (pytest.approx(peak, rel=1e-4), at) for peak, _, at, _ in expected
        ]
        assert made.n_tokens == sum(len(row) - skip for row in rows)


def test_of_equal_examples_the_earlier_row_stays():
    values = torch.zeros(3, 2, 1)
    values[:, 1] = torch.tensor([[2.0], [-2.0], [1.0]])
    tokens = torch.arange(6).reshape(3, 2)
    lengths = torch.tensor([2, 2, 2])

    def of(numbers):
        return Examples.of(values[numbers], tokens[numbers], numbers, lengths[numbers], 2, (0, 0))

    whole = of(torch.arange(3))
    assert whole.rows.tolist() == [[0, 1]]
    assert whole.peaks.tolist() == [[2.0, -2.0]]
    assert of(torch.tensor([1, 2])).merged(of(torch.tensor([0])), 2).rows.tolist() == [[0, 1]]


def test_what_the_decoder_promotes(demo_model, examples):
    dictionary = shipped()
    view = tlens.models.ModelView(demo_model)
    gain = view.final_norm.gain
    direction = dictionary.W_dec[357] - dictionary.W_dec[357].mean()
    logits = (gain * direction) @ view.unembedding[0]
    expected = logits.topk(10)
    assert close(examples.promotion[0], expected.values, 1e-4)
    decoded = [demo_model.tokenizer.decode([token]) for token in expected.indices.tolist()]
    assert [examples.texts[number] for number in examples.promoted[0].tolist()] == decoded


def test_texts_and_other_dictionaries(model_named):
    """A transcoder on a model of another family, whose rows are token ids."""
    model = model_named("bridge/llama")
    dictionary = Dictionary(seed=3, hook="blocks.0.hook_resid_post")
    rows = torch.tensor([[3, 5, 7, 9], [4, 4, 8, 1], [9, 2, 2, 6]])
    made = circuits.feature_examples(model, dictionary, rows, None, k=2, promoted=3)
    for feature in (0, 11, 39):
        expected = literal(model, rows.tolist(), feature, dictionary=dictionary)[:2]
        assert [entry.position for entry in made.top(2, feature=feature)] == [at for _, _, at, _ in expected]
    assert made.promoted.shape == (40, 3)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.words, self.labels = [], []

    def handle_starttag(self, tag, attributes):
        self.labels += [value for name, value in attributes if name == "aria-label"]

    def handle_data(self, data):
        self.words.append(data)


def test_pages_tables_and_files(demo_model, rows, tmp_path, capsys):
    made = circuits.feature_examples(demo_model, shipped(), rows, FEATURES, k=3, labels={"F357": "forms of <be>"})
    reader = Reader()
    reader.feed(made.only(357).to_html())
    assert "F357 · forms of <be>" in reader.words
    assert any(label.startswith("sizes of ") for label in reader.labels)
    example = made.top(1, feature="F357")[0]
    assert f"{example.token} at {example.position} of row {int(made.rows[0, 0])}: {example.score:+.4g}" in reader.labels
    made.only(357).show(2)
    printed = " ".join(capsys.readouterr().out.split())
    assert "F357 · forms of <be> · active at" in printed
    assert f"«{example.token}»" in printed
    frame = made.to_dataframe()
    assert frame.loc[frame["is_peak"], "activation"].tolist() == made.peaks[made.rows >= 0].double().tolist()
    assert set(frame.loc[frame["feature"] == 357, "label"]) == {"forms of <be>"}
    for name in ("a.parquet", "a.csv", "a.html", "a.json", "a"):
        assert made.save(tmp_path / name).exists()
    pd = pytest.importorskip("pandas")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "a.parquet"), frame)
    read = circuits.FeatureExamples.load(tmp_path / "a")
    assert read.labels == made.labels
    assert all(torch.equal(getattr(read, name), getattr(made, name)) for name in made.TENSORS)
    assert read.to_html() == made.to_html()


def test_a_figure_of_sizes(examples):
    pytest.importorskip("matplotlib").use("Agg")
    assert examples.plot(feature="F156").get_title(loc="left") == "F156"
    nothing = circuits.FeatureExamples(**vars(examples) | {"counts": torch.zeros_like(examples.counts)})
    with pytest.raises(tlens.InvalidInputError, match="active at no token"):
        nothing.plot()
    assert "Not active" not in examples.to_html()
    active = [place for place, counts in enumerate(examples.counts.tolist()) if any(counts)]
    assert len(active) > 1
    axes = examples.plot()
    names = [axis.get_title(loc="left").split(" · ")[0] for axis in axes]
    assert names == [f"F{examples.features[place]}" for place in active]
    one = axes[0].figure.subplots()
    assert examples.plot(ax=one) is one
    assert one.get_title(loc="left") == f"{names[0]} · 1 of {len(examples)} features shown"
    assert examples.plot(feature=examples.features[active[0]], ax=one) is one
    few = circuits.FeatureExamples(**vars(examples) | {"counts": examples.counts.clone()})
    few.counts[active[0]] = 0
    drawn = few.plot()
    assert f"{len(drawn)} of {len(few)} features shown" in drawn[0].get_title(loc="left")


def test_labels_from_files(tmp_path):
    expected = {3: "commas", 12: "names, of files"}
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [["index", "other", "description"], [3, "x", "commas"], ["F12", "", "names, of files"], [4, "", ""]]
        )
    (tmp_path / "a.json").write_text(json.dumps({"3": "commas", "F12": "names, of files"}), encoding="utf-8")
    listed = [{"feature": 3, "label": "commas"}, {"feature": "12", "label": "names, of files"}]
    (tmp_path / "b.json").write_text(json.dumps(listed), encoding="utf-8")
    for source in (tmp_path / "a.csv", str(tmp_path / "a.json"), tmp_path / "b.json", expected):
        assert circuits.feature_labels(source) == expected
    assert circuits.feature_labels(None) == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "number,text\n1,x\n", "its columns are 'number', 'text'; one of feature, index"),
        ("a.csv", "feature,label\n1,x\n1,y\n", "feature 1 is labelled twice, 'x' and 'y'"),
        ("a.csv", "feature,label\none,x\n", "labels: feature='one': pass an integer"),
        ("a.json", "[1]", "neither an object"),
        ("a.json", '{"1": 2}', "feature 1 has the label 2; pass a text"),
        ("a.json", "{", "no labels of features"),
        ("a.txt", "", "'a.txt' ends in '.txt'; use one of .csv"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((tlens.FileFormatError, tlens.InvalidInputError), match=message):
        circuits.feature_labels(tmp_path / name)


def test_labels_go_along(demo_model, tmp_path):
    frozen = tlens.freeze(demo_model, tlens.demo.PROMPT)
    labels = {357: "to be", 244: "x"}
    late = circuits.features(frozen, shipped(), labels=labels)
    terms = circuits.feature_effects(late, " raised")
    assert terms.labels["F357@34"] == "to be"
    assert "F357@34 · to be" in terms.to_html()
    assert "pre-activation of F357 · to be at" in circuits.feature_attribution(late, 357).target
    assert float(terms["F357@34"])  # names stay what they are
    assert tlens.Terms.load(terms.save(tmp_path / "terms")).labels == terms.labels
    early = circuits.features(frozen, shipped("blocks.0.hook_resid_post"), labels={244: "early"})
    assert circuits.feature_edges(early, late, [357]).into(357).labels["F244@34"] == "early"
    graph = circuits.contribution_graph(frozen, " raised", dictionaries=[early, late], features=3, threshold=0.02)
    assert graph.labels["L2.F357"] == "to be"
    assert graph.labels["L0.F244"] == "early"
    assert "L2.F357 · to be" in graph.to_html()
    assert any(node["clerp"].startswith("L2.F357 · to be at") for node in graph.to_circuit_tracer()["nodes"])
    assert tlens.ContributionGraph.load(graph.save(tmp_path / "graph")).labels == graph.labels
    with pytest.raises(tlens.InvalidInputError, match="there is one for feature 512, but this Dictionary has 512"):
        circuits.features(frozen, shipped(), labels={512: "none"})


def test_hundreds_of_active_features_are_said(demo_model):
    frozen = tlens.freeze(demo_model, "Return the value.")
    dictionary = shipped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        circuits.features(frozen, dictionary)
    dictionary.k = 300
    dictionary.b_enc = dictionary.b_enc + 2
    with pytest.warns(UserWarning, match=r"of 512 features .*top\(k\).*names='F\*'.*features=k.*threshold"):
        circuits.features(frozen, dictionary)


@pytest.mark.parametrize(
    ("input", "options", "message"),
    [
        ([], {}, "there are no rows"),
        (5, {}, "cannot read int as rows"),
        ({"text": ["a"]}, {}, r"cannot read dict as rows.*dataset\['text'\]"),
        ([{"text": "a"}], {}, "row 0 is a dict with 'text'"),
        ([[1, 2], [1, 5000]], {}, "row 1 has the token id 5000"),
        ([[1] * 2000], {}, "row 0 has 2000 tokens.*truncate=True"),
        ([[[1, 2], [3, 4]]], {}, "row 0 holds 2 rows"),
        ("q.csv", {}, r"input: 'q.csv' is the name of a file.*pandas.read_csv\('q.csv'\)\['text'\].*input=\['q.csv'\]"),
        (Path("q.jsonl"), {}, r"'q.jsonl' is the name of a file.*read_json\('q.jsonl', lines=True\)\['text'\]"),
        ("q.json", {}, r"read_json\('q.json'\)"),
        ("Q.PARQUET", {}, r"read_parquet\('Q.PARQUET'\)"),
        ("q.tsv", {}, r"read_csv\('q.tsv', sep='\\t'\)"),
        ("q.txt", {}, r"open\('q.txt', encoding='utf-8'\)"),
        (Path("rows"), {}, "cannot read (Posix|Windows)Path as rows"),
        (pd.DataFrame({"id": [1], "prompt": ["a"]}), {}, r"is a table with 'id', 'prompt'; pass the column"),
        (["a"], {"features": ["F357@7", "F357@8"]}, "F357 is named twice"),
        (["a"], {"features": "error@7"}, "feature='error@7'"),
        (["a"], {"features": ["F9999"]}, "F9999|9999"),
        (["a"], {"features": []}, r"features=\[\]"),
        (["a"], {"features": [3, "F3"]}, "F3 is named twice"),
        (["a"], {"window": 3}, r"window=3: .*\(12, 4\)"),
        (["a"], {"k": 0}, "k=0"),
        (["a"], {"hook": "blocks.9.hook_resid_post"}, "blocks.9"),
    ],
)
def test_bad_requests(demo_model, input, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        circuits.feature_examples(demo_model, shipped(), input, **options)


def test_bad_features_of_a_result(examples):
    for call in (lambda: examples.only("F9"), lambda: examples.top(1, feature=9), lambda: examples.plot(feature="F9")):
        with pytest.raises(tlens.InvalidInputError, match=r"'F9'|feature 9.*it has F357"):
            call()
    with pytest.raises(tlens.InvalidInputError, match="name at least one"):
        examples.only()


def test_a_row_is_cut_only_where_that_is_wanted(demo_model):
    context = tlens.models.ModelView(demo_model).n_ctx
    made = circuits.feature_examples(demo_model, shipped(), [[5] * (context + 3)], 1, truncate=True)
    assert made.n_tokens == context


def test_entries_of_active_features_are_named_features(demo_model, rows):
    """What `top` returns goes into `features=` as it is."""
    active = circuits.features(tlens.freeze(demo_model, torch.tensor([rows[0]])), shipped())
    entries = active.top(2)
    by_entry = circuits.feature_examples(demo_model, shipped(), rows[:4], entries, k=1)
    assert [f"F{number}" for number in by_entry.features] == [entry.name for entry in entries]
    one = circuits.feature_examples(demo_model, shipped(), rows[:4], entries[0], k=1)
    assert one.features == by_entry.features[:1]


def test_entries_of_effects_are_named_features(demo_model, rows):
    """Names of terms, such as ``"F357@34"``, are features at any token."""
    active = circuits.features(tlens.freeze(demo_model, tlens.demo.PROMPT), shipped())
    entries = circuits.feature_effects(active, " raised").top(2, names="F*")
    assert [entry.name for entry in entries] == ["F156@34", "F357@34"]
    assert circuits.feature_examples(demo_model, shipped(), rows[:4], entries, k=1).features == [156, 357]
    assert circuits.feature_examples(demo_model, shipped(), rows[:4], "F357@34", k=1).features == [357]


def test_one_text_that_ends_like_a_file_is_a_list_of_one(demo_model):
    assert circuits.feature_examples(demo_model, shipped(), ["q.csv"], 357).n_rows == 1
    for text in ("Return the value.", "Read\nthe rows of q.csv"):
        assert circuits.feature_examples(demo_model, shipped(), text, 357).n_rows == 1


def test_a_column_of_a_file_is_rows(demo_model, tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("id,text\n1,Return the value\n2,Raise an error\n", encoding="utf-8")
    made = circuits.feature_examples(demo_model, shipped(), pd.read_csv(path)["text"], 357)
    assert made.n_rows == 2


def test_sizes_below_a_histogram_do_not_overlap():
    pytest.importorskip("matplotlib").use("Agg")
    for least, bins in ((1.0, 1), (1.1, 3), (0.5, 8), (0.0001, 40)):
        edges = [least * 2 ** (0.5 * step) for step in range(bins + 1)]
        axes = figure.histogram(edges, [1] * bins, "title", "activation", figure.axes(None, (2.6, 2.4)))
        axes.figure.canvas.draw()
        labels = [label for label in axes.get_xticklabels(which="both") if label.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        assert 2 <= len(boxes) <= 5
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert {label.get_text() for label in labels} <= {f"{edge:.3g}" for edge in edges}
