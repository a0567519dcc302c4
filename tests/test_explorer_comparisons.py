"""Two runs in the explorer: two images as two prompts are compared, and whose runner-up the target stands against."""

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits.compare import patched_at
from tensorlens_tl.explorer import Explorer, Session

pytest.importorskip("tensorlens_tl.explorer.server", exc_type=ImportError)

from test_explorer import OTHER, PROMPT, chromium, load, one, settled, several, wait
from test_explorer_inputs import file_of, run_code

PAIR = {"image": "2", "other_image": "3"}
HEAD = {"layer": 1, "head": 0}


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.fixture(scope="module")
def digits():
    return tlens.load_demo_model("digits")


@pytest.fixture(scope="module")
def pixels():
    return tlens.demo.digit_images()[0][:5]


@pytest.fixture(scope="module")
def session(digits, pixels):
    return Session(digits, images=pixels, name="digits")


# ------------------------------------------------------------------ two images


def test_two_images_have_the_difference_that_the_library_gives(session, digits, pixels):
    first, second = (tlens.freeze(digits, pixels[at : at + 1]) for at in (2, 3))
    prompt = session.view("prompt", PAIR)
    target = {"target": prompt["target"]["id"], "minus": prompt["minus"]["id"]}
    expected = tlens.attribute(tlens.difference(first, second), **target, method="difference")
    view = session.view("image", PAIR)
    assert view["scores"] == pytest.approx(expected.scores[0, 0].tolist(), abs=1e-6)
    logits = [frozen.logits(0)[0, 0].double() for frozen in (first, second)]
    numbers = [float(of[target["target"]] - of[target["minus"]]) for of in logits]
    assert prompt["numbers"] == pytest.approx(numbers, abs=1e-5)
    assert sum(view["scores"]) + view["bias"] == pytest.approx(numbers[0] - numbers[1], abs=1e-4)
    assert view["picture"] == session.view("image", {"image": "2"})["picture"]
    assert view["second_picture"] == session.view("image", {"image": "3"})["picture"]
    assert {token["chance"] for token in prompt["next"]} == {float(p) for p in logits[0].softmax(-1)}
    assert {token["other_chance"] for token in prompt["next"]} == {float(p) for p in logits[1].softmax(-1)}


@pytest.mark.parametrize(
    ("view", "fields"),
    [
        ("tokens", {}),
        ("image", {}),
        ("components", {}),
        ("head", HEAD),
        ("graph", {"nodes": 20}),
        ("routes", {}),
        ("neurons", {"node": "MLP1"}),
    ],
)
def test_the_code_of_two_images_gives_the_result_again(session, digits, pixels, view, fields):
    answer = session.view(view, PAIR | fields)
    assert answer.get("gap", 0.0) < 1e-5
    again = run_code(answer, model=digits, pixels=pixels[2:3], other_pixels=pixels[3:4])
    assert torch.allclose(torch.as_tensor(again.total), torch.as_tensor(session.last.total))


def test_two_models_are_compared_on_one_image(digits, pixels):
    tuned = tlens.load_demo_model("digits")
    with torch.no_grad():
        tuned.blocks[1].attn.W_O.mul_(0.5)
    session = Session(digits, tuned, images=pixels)
    view = session.view("tokens", {"image": "2", "other_image": "2"})
    first, second = (tlens.freeze(of, pixels[2:3]).logits(0)[0, 0] for of in (digits, tuned))
    target, minus = first.topk(2).indices
    change = (first - second)[target] - (first - second)[minus]
    assert view["total"] == pytest.approx(float(change), abs=1e-4)
    assert abs(view["total"]) > 1e-3


# ------------------------------------------------------------------ two texts that a model writes

WRITTEN = {"text": "If the module is not found, the", "other": "If the class is not found, the"}


def generations(model, tuned=None, new=6):
    return [
        tlens.generation.freeze_generation(of, text, max_new_tokens=new)
        for of, text in zip((model, tuned or model), WRITTEN.values(), strict=True)
    ]


def test_two_written_texts_have_the_sources_that_the_library_gives(model):
    session = Session(model)
    for span, fields in (("all", {}), ((1, 3), {"start": 1, "stop": 3})):
        view = session.view("generated", {**WRITTEN, "new": 6, **fields})
        for text, written in zip((view, view["second"]), generations(model), strict=True):
            expected = written.attribute(span=span, minus="runner-up")
            assert text["tokens"] == written.frozen.str_tokens[0]
            assert text["scores"] == pytest.approx(expected.scores[0, 0].tolist(), abs=1e-5)
            assert sum(text["scores"]) + text["bias"] == pytest.approx(text["total"], abs=1e-3)
    again = run_code(view, model=model)
    assert torch.allclose(again.scores, session.last.scores, atol=1e-5)


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_token_of_two_written_texts_is_explained_by_their_difference(model, is_tuned):
    tuned = None
    if is_tuned:
        tuned = tlens.load_demo_model()
        with torch.no_grad():
            tuned.blocks[1].attn.W_O.mul_(0.9)
    session = Session(model, tuned)
    fields = {**WRITTEN, "new": 6, "start": 2}
    first, second = generations(model, tuned)
    query = first.generated_ranges()[0][0] + 1
    prompt = session.view("prompt", fields)
    assert (prompt["tokens"], prompt["query"]) == (first.frozen.str_tokens[0], query)
    logits = [of.frozen.logits(query)[0, 0] for of in (first, second)]
    target, minus = prompt["target"]["id"], prompt["minus"]["id"]
    assert prompt["numbers"] == pytest.approx([float(of[target] - of[minus]) for of in logits], abs=1e-4)
    expected = tlens.attribute(
        tlens.difference(first.frozen, second.frozen), target, minus=minus, query=query, method="difference"
    )
    tokens = session.view("tokens", fields)
    assert tokens["scores"] == pytest.approx(expected.scores[0, 0].tolist(), abs=1e-5)
    assert tokens["total"] == pytest.approx(prompt["numbers"][0] - prompt["numbers"][1], abs=1e-3)
    again = run_code(tokens, model=model, tuned=tuned)
    assert torch.allclose(again.scores, expected.scores, atol=1e-5)


def test_where_one_text_ends_before_the_other_both_are_cut(model, monkeypatch):
    """What is written up to the explained token is the same, so that the runs have the same number of tokens."""
    session = Session(model)
    real = tlens.generation.freeze_generation

    def ended(of, prompt, max_new_tokens):
        return real(of, prompt, max_new_tokens=min(max_new_tokens, 4) if prompt == WRITTEN["text"] else max_new_tokens)

    monkeypatch.setattr("tensorlens_tl.explorer.questions.freeze_generation", ended)
    prompt = session.view("prompt", {**WRITTEN, "new": 6, "start": 3})
    first, second = (of.frozen.logits(prompt["query"])[0, 0] for of in generations(model, new=4))
    target, minus = prompt["target"]["id"], prompt["minus"]["id"]
    expected = [float(of[target] - of[minus]) for of in (first, second)]
    assert prompt["numbers"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(tlens.InvalidInputError, match="start is 5; the model wrote 4 tokens"):
        session.view("tokens", {**WRITTEN, "new": 6, "start": 5})


def test_written_tokens_of_prompts_of_different_lengths_are_predicted_each_at_its_place(model):
    fields = {"text": WRITTEN["text"], "other": "The " + WRITTEN["other"], "new": 3, "start": 1}
    view = Session(model).view("prompt", fields)
    for name, text in (("chance", fields["text"]), ("other_chance", fields["other"])):
        written = tlens.generation.freeze_generation(model, text, max_new_tokens=3)
        chances = written.frozen.logits(written.generated_ranges()[0][0])[0, 0].double().softmax(-1)
        assert {token["id"]: token[name] for token in view["next"]} == pytest.approx(
            {token["id"]: float(chances[token["id"]]) for token in view["next"]}, abs=1e-6
        )
    assert view["aligned"]


# ------------------------------------------------------------------ drawn nodes, patched live


def test_drawn_nodes_are_patched_live_beside_what_the_difference_finds(model):
    session = Session(model)
    fields = {"text": PROMPT, "other": OTHER, "nodes": 20}
    view = session.view("measured", fields)
    result = session.last
    frozen, other = (tlens.freeze(model, text) for text in (PROMPT, OTHER))
    prompt = session.view("prompt", fields)
    aim = {"target": prompt["target"]["id"], "minus": prompt["minus"]["id"]}
    patched, found = (
        circuits.patch_scores(frozen, other, **aim, method=method, positions=True)
        for method in ("patching", "difference")
    )
    for row in view["rows"]:
        at = patched.names.index(row["name"])
        assert row["live"] == pytest.approx(float(patched.keys[0, 0, at, row["at"]]), abs=1e-4)
        at = found.names.index(row["name"])
        assert row["difference"] == pytest.approx(float(found.keys[0, 0, at, row["at"]]), abs=1e-5)
    drawn = [
        node for node in session.view("graph", fields)["nodes"] if node["kind"] not in ("target", "others", "bias")
    ]
    assert sorted(key for row in view["rows"] for key in row["nodes"]) == sorted(
        f"{node['name']}@{node['pos']}" for node in drawn
    )
    weights = {f"{node['name']}@{node['pos']}": node["weight"] for node in drawn}
    whole = [row for row in view["rows"] if row["name"].startswith("MLP")]
    assert [row["difference"] for row in whole] == pytest.approx([weights[row["nodes"][0]] for row in whole], abs=1e-4)
    assert whole
    assert any(row["nodes"][0] != f"{row['name']}@{row['at']}" for row in view["rows"])  # a head by what it reads
    again = run_code(view, model=model)
    assert again.names == result.names
    assert torch.allclose(again.scores, result.scores, atol=1e-5)


@pytest.mark.parametrize("node", ["L9H0@3", "L1H0", "L1H0@99", "L1H0@x", "L1H0@-99", "", "MLP1.N3@2"])
def test_a_node_that_is_none_is_refused(model, node):
    frozen, other = (tlens.freeze(model, text) for text in (PROMPT, OTHER))
    with pytest.raises(tlens.InvalidInputError, match="is no node at a position"):
        patched_at(frozen, other, nodes=["MLP2@-1", node])


@pytest.mark.parametrize(
    ("view", "fields", "message"),
    [
        ("measured", {"text": PROMPT}, "measured nodes are of two runs"),
        ("removed", PAIR, "tokens are removed from one run"),
        ("tokens", {"other_image": "2", "text": "If"}, "choose the first image, too"),
        ("tokens", {"image": "2", "other": "If"}, "send other_image to compare two images"),
        ("tokens", {"image": "2", "other_image": "99"}, "not here any more"),
        ("ablate", {**PAIR, "without": "MLP9"}, "name some of"),
        ("generated", {**PAIR, "new": 3}, "text is generated after a prompt"),
        ("routes", {"image": "2"}, "choose a second image"),
    ],
)
def test_wrong_pairs_are_refused(session, view, fields, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        session.view(view, fields)


def test_the_page_offers_small_pictures_of_what_it_was_given(digits):
    large = torch.rand(70, 3, 224, 224)
    about = Session(digits, images=large).about()
    assert len(about["images"]) == 70
    assert len(about["pictures"]) == 60
    assert len(about["pictures"][0]) < 30_000
    assert Session(digits, images=torch.rand(2, 4, 8, 8)).about()["pictures"] == []


# ------------------------------------------------------------------ runners-up


def test_the_runner_up_of_each_run_is_named(model):
    session = Session(model)
    runs = [tlens.freeze(model, text) for text in (PROMPT, OTHER)]
    for query in (3, 12, 34):
        view = session.view("prompt", {"text": PROMPT, "other": OTHER, "query": query})
        logits = [run.logits(query)[0, 0].clone() for run in runs]
        for of in logits:
            of[view["target"]["id"]] = -torch.inf
        assert [token["id"] for token in view["runners_up"]] == [int(of.argmax()) for of in logits]
        choice = int(runs[1].logits(query)[0, 0].argmax())
        assert view["second_choice"] == (choice != view["target"]["id"])
        # by default the target is compared with the second run's first choice, else with the first run's runner-up
        assert view["minus"]["id"] == (choice if view["second_choice"] else view["runners_up"][0]["id"])
    assert len(session.view("prompt", {"text": PROMPT})["runners_up"]) == 1


def test_the_tokens_that_two_prompts_move_most_are_offered(model):
    view = Session(model).view("prompt", {"text": PROMPT, "other": OTHER})
    first, second = (tlens.freeze(model, text).logits()[0, 0].double().softmax(-1) for text in (PROMPT, OTHER))
    moved = [torch.nn.functional.kl_div(b.log(), a, reduction="none") for a, b in ((first, second), (second, first))]
    assert [token["id"] for token in view["moved"]] == [int(of.argmax()) for of in moved]
    assert Session(model).view("prompt", {"text": PROMPT, "other": PROMPT})["moved"] == []


def differing(model):
    """A question of two prompts whose runs have different runners-up, and the view of it."""
    session = Session(model)
    for query in range(3, 35):
        question = {"text": PROMPT, "other": OTHER, "query": query}
        view = session.view("prompt", question)
        if view["runners_up"][0] != view["runners_up"][1] and not view["second_choice"]:
            return question, view
    raise AssertionError("both runs have one runner-up everywhere")


# ------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def opened(model):
    explorer = Explorer(Session(model, name="demo"), 0).start()
    yield explorer
    explorer.close()


@pytest.fixture(scope="module")
def opened_digits(session):
    explorer = Explorer(session, 0).start()
    yield explorer
    explorer.close()


def test_the_page_says_whose_runner_up_it_is_and_offers_the_other(browser, opened, model):
    question, view = differing(model)
    first, second = view["runners_up"]
    load(browser, opened, **question)
    options = several(browser, ".next select option")
    assert "the first run’s runner-up" in options[0].text
    assert first["text"].strip() in options[0].text
    other = next(option for option in options if "second run’s" in option.text)
    assert second["text"].strip() in other.text
    assert [option.get_attribute("value") for option in options].count(str(second["id"])) == 1
    other.click()
    wait(browser, lambda: f"minus={second['id']}" in browser.current_url)
    settled(browser)
    assert "second run’s" in one(browser, ".next select option:checked").text
    expected = circuits.logit_attribution(
        tlens.difference(*(tlens.freeze(model, question[text]) for text in ("text", "other"))),
        view["target"]["id"],
        minus=second["id"],
        query=question["query"],
    )
    shown = float(several(browser, ".components .sum b")[2].get_attribute("title"))
    assert shown == pytest.approx(float(expected.total), abs=1e-5)


def test_the_page_explains_the_tokens_that_moved_most_at_a_press(browser, opened, model):
    load(browser, opened, text=PROMPT, other=OTHER)
    first, second = Session(model).view("prompt", {"text": PROMPT, "other": OTHER})["moved"]
    one(browser, "#moved").click()
    wait(browser, lambda: f"target={first['id']}&" in browser.current_url + "&")
    settled(browser)
    assert f"minus={second['id']}" in browser.current_url
    assert not several(browser, "#moved")


def test_one_run_names_its_runner_up(browser, opened, model):
    load(browser, opened, text=PROMPT)
    minus = Session(model).view("prompt", {"text": PROMPT})["minus"]["text"]
    assert one(browser, ".next select option").text == f"the runner-up, “{minus.replace(chr(10), '↵').strip()}”"


def test_a_comparison_says_what_it_does_not_show(browser, opened):
    load(browser, opened, text=PROMPT, other=OTHER)
    assert "a comparison does not show them" in one(browser, "#foot").text
    load(browser, opened, text=PROMPT)
    assert "comparison" not in one(browser, "#foot").text


@pytest.mark.parametrize("width", [1280, 400])
def test_a_press_on_a_written_token_moves_every_view_of_both_texts(browser, opened, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    load(browser, opened, **WRITTEN, new=6)
    wait(browser, lambda: several(browser, ".generated .opposite"))
    view = opened._session.view("generated", {**WRITTEN, "new": 6})
    rows = several(browser, ".generated .opposite tr")
    for row, text in zip(rows, (view, view["second"]), strict=True):
        chips = row.find_elements("css selector", ".chip")
        assert [float(chip.get_attribute("title")) for chip in chips] == pytest.approx(
            text["scores"][text["first"] :], abs=1e-6
        )
    rows[1].find_elements("css selector", ".chip")[2].click()
    wait(browser, lambda: "start=2" in browser.current_url)
    settled(browser)
    wait(browser, lambda: len(several(browser, ".generated .opposite .chip[aria-pressed=true]")) == 2)
    tokens = opened._session.view("tokens", {**WRITTEN, "new": 6, "start": 2})
    shown = [float(chip.get_attribute("title")) for chip in several(browser, ".tokens .chip")]
    assert shown == pytest.approx(tokens["scores"], abs=1e-6)
    for place in (".graph-card", ".components", ".routes"):
        assert several(browser, place)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_graph_is_marked_with_what_the_live_model_loses(browser, opened, model):
    load(browser, opened, text=PROMPT, other=OTHER, nodes=20)
    wait(browser, lambda: several(browser, ".graph .t"))
    assert not several(browser, ".measured")
    one(browser, "#measure").click()
    wait(browser, lambda: several(browser, ".measured .matrix"))
    settled(browser)
    rows = opened._session.view("measured", {"text": PROMPT, "other": OTHER, "nodes": 20})["rows"]
    shown = [float(value.get_attribute("title")) for value in several(browser, ".measured .matrix button")]
    assert shown == pytest.approx(
        [row[column] for row in rows for column in ("difference", "live")], rel=1e-4, abs=1e-6
    )
    lost = {key: row["live"] for row in rows for key in row["nodes"]}
    most = max(map(abs, lost.values()))
    outline = (
        "return [...document.querySelectorAll('.graph .t')].map((t) => [t.dataset.node, t.ariaLabel,"
        "Number(t.querySelector('rect:not(.ground)').getAttribute('stroke-width'))])"
    )
    for key, said, width in browser.execute_script(outline):
        assert (key in lost) == ("; patched live: " in said)
        if key in lost:
            assert width == pytest.approx(1.5 + 2.5 * abs(lost[key]) / most, rel=1e-3)
    several(browser, ".measured .matrix button")[1].click()
    wait(browser, lambda: several(browser, f'.graph [data-node="{rows[0]["nodes"][0]}"][aria-pressed=true]'))
    settled(browser)
    assert "lost when patched live" in one(browser, ".graph .side").text
    one(browser, "#measure").click()
    wait(browser, lambda: not several(browser, ".measured"))
    settled(browser)
    wait(browser, lambda: not any("patched live" in said for _, said, _ in browser.execute_script(outline)))


def test_the_page_compares_two_images(browser, opened_digits, session, pixels, tmp_path):
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(opened_digits.url)
    wait(browser, lambda: several(browser, ".gallery button"))
    assert not one(browser, "#compare-images").is_displayed()
    several(browser, ".gallery button")[2].click()
    wait(browser, lambda: "image=2" in browser.current_url)
    settled(browser)
    assert not one(browser, "#given-other").is_displayed()
    one(browser, "#compare-images").click()
    settled(browser)
    one(browser, "#given-other [value='3']").click()
    wait(browser, lambda: "other_image=3" in browser.current_url)
    settled(browser)
    view = session.view("image", PAIR)
    shown = [float(patch.get_attribute("title")) for patch in several(browser, ".patches span")]
    assert shown == pytest.approx(view["scores"][1:], abs=1e-6)
    assert len(several(browser, ".pictures figure")) == 3
    assert several(browser, ".routes .matrix td")
    numbers = [float(part.get_attribute("title")) for part in several(browser, ".tokens .sum + .sum b")]
    assert numbers[0] - numbers[1] == pytest.approx(numbers[2])
    file = tmp_path / "digit.png"
    file.write_bytes(file_of((pixels[1, 0] * 255).byte().numpy()))
    one(browser, "#upload-other").send_keys(str(file))
    wait(browser, lambda: "other_image=upload-" in browser.current_url)
    settled(browser)
    assert one(browser, "#given-other option:checked").text == "Uploaded image"
    one(browser, "#compare-images").click()
    wait(browser, lambda: "other_image" not in browser.current_url)
    settled(browser)
    assert len(several(browser, ".pictures figure")) == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", [400, 1280])
def test_two_images_stay_inside_the_page(browser, opened_digits, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        load(browser, opened_digits, **PAIR, **HEAD)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_name_is_cut_where_two_lines_hold_it(browser, opened):
    load(browser, opened, text=PROMPT, **HEAD)
    cut = "return [...document.querySelectorAll('.head .name')].filter((of) => of.scrollHeight > of.clientHeight + 1"
    assert browser.execute_script(f"{cut} || of.scrollWidth > of.clientWidth + 1).map((of) => of.textContent)") == []
    bars = "return Math.min(...[...document.querySelectorAll('.head .bars-bar')].map((of) => of.clientWidth))"
    assert browser.execute_script(bars) > 60


def test_the_answers_parts_stand_beside_the_graph_until_a_node_is_pressed(browser, opened):
    load(browser, opened, text=PROMPT)
    assert one(browser, ".side .title").text.startswith("answer at")
    graph = Session(tlens.load_demo_model()).view("graph", {"text": PROMPT})
    shown = float(one(browser, ".side .sum td").get_attribute("title"))
    assert shown == pytest.approx(graph["total"], abs=1e-5)
