"""The explorer's page: the keyboard keeps its place, typed prompts stay, a cancelled question leaves nothing behind."""

import csv
import io
from xml.etree import ElementTree

import pytest

import tensorlens_tl as tlens

pytest.importorskip("tensorlens_tl.explorer.server", exc_type=ImportError)

from test_explorer import OTHER, PROMPT, chromium, load, one, settled, several, wait
from test_explorer_jobs import gated

from tensorlens_tl.explorer import Explorer, Session


@pytest.fixture(scope="module")
def opened():
    explorer = Explorer(Session(tlens.load_demo_model(), name="demo"), 0).start()
    yield explorer
    explorer.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def focused(browser, says):
    """Whether the keyboard is on what a line of script says of the active element."""
    return browser.execute_script(f"const active = document.activeElement; return {says}")


CHOICES = {
    "#method": ("rollout", "method=rollout", "active.id === 'method'"),
    ".next select": ("none", "minus=none", "active.ariaLabel === 'Compared with'"),
    ".graph-card [aria-label=Nodes]": ("20", "nodes=20", "active.ariaLabel === 'Nodes'"),
}


@pytest.mark.parametrize("selector", CHOICES)
def test_a_choice_keeps_the_keyboard(browser, opened, selector):
    value, address, says = CHOICES[selector]
    load(browser, opened, text=PROMPT)
    script = "const box = arguments[0]; box.focus(); box.value = arguments[1]; box.dispatchEvent(new Event('change'))"
    browser.execute_script(script, one(browser, selector), value)
    wait(browser, lambda: address in browser.current_url)
    settled(browser)
    assert focused(browser, says)


def press(browser, control):
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("arguments[0].focus()", control)
    browser.switch_to.active_element.send_keys(Keys.ENTER)


def test_a_pressed_button_keeps_the_keyboard(browser, opened):
    load(browser, opened, text=PROMPT, layer=1, head=0)
    button = several(browser, ".next .bars .name")[1]
    title = button.get_attribute("title")
    press(browser, button)
    wait(browser, lambda: "target=" in browser.current_url)
    settled(browser)
    assert focused(browser, "active.title") == title
    press(browser, one(browser, "#ablate"))
    wait(browser, lambda: several(browser, ".ablate"))
    settled(browser)
    assert focused(browser, "active.id") == "ablate"
    press(browser, one(browser, '.graph [data-node="MLP2@34"]'))
    wait(browser, lambda: several(browser, '.graph [data-node="MLP2@34"][aria-pressed=true]'))
    settled(browser)
    press(browser, one(browser, ".side button.go"))
    wait(browser, lambda: "pick=MLP2" not in browser.current_url)
    settled(browser)
    assert focused(browser, "active.closest('.graph-card') !== null")


def test_the_number_of_tokens_to_write_keeps_the_keyboard(browser, opened):
    load(browser, opened, text="If the module is not")
    one(browser, "#new").send_keys("2\n")
    wait(browser, lambda: several(browser, ".generated .chip"))
    settled(browser)
    assert focused(browser, "active.id") == "new"
    one(browser, "#undo").click()
    wait(browser, lambda: not several(browser, ".generated .chip"))
    assert one(browser, "#new").get_attribute("value") == ""


def test_a_typed_prompt_stays_until_it_is_submitted(browser, opened):
    load(browser, opened, text=PROMPT)
    one(browser, "#text").send_keys(" not")
    one(browser, "#compare").click()
    several(browser, ".tokens .chip")[20].click()
    wait(browser, lambda: "query=20" in browser.current_url)
    settled(browser)
    assert one(browser, "#text").get_attribute("value") == f"{PROMPT} not"
    assert one(browser, "#other").get_attribute("value") == f"{PROMPT} not"
    one(browser, "#compare").click()
    one(browser, "#text").send_keys("\n")
    wait(browser, lambda: len(several(browser, ".tokens .chip")) == 36)
    one(browser, "#undo").click()
    settled(browser)
    wait(browser, lambda: one(browser, "#text").get_attribute("value") == PROMPT)


def entered(browser, opened, monkeypatch, view):
    """Enter another prompt, one view of which waits for the event that is returned."""
    load(browser, opened, text=PROMPT)
    _, go = gated(opened, monkeypatch, view)
    one(browser, "#text").clear()
    one(browser, "#text").send_keys(OTHER + "\n")
    wait(browser, lambda: one(browser, "#cancel").is_displayed())
    return go


def test_a_cancelled_prompt_leaves_nothing_of_the_one_before(browser, opened, monkeypatch):
    go = entered(browser, opened, monkeypatch, "prompt")
    one(browser, "#cancel").click()
    wait(browser, lambda: one(browser, "#status").text == "Cancelled")
    assert not several(browser, "main .chip")
    assert not several(browser, "main .sum")
    go.set()
    one(browser, ".again").click()
    settled(browser)
    assert several(browser, ".tokens .chip")
    assert one(browser, "#text").get_attribute("value") == OTHER


def test_next_tokens_are_shown_before_they_are_explained(browser, opened, monkeypatch):
    view = opened._session.view("prompt", {"text": OTHER})  # while the page waits, so would a second question
    go = entered(browser, opened, monkeypatch, "tokens")
    titles = [value.get_attribute("title") for value in several(browser, ".next .bars .value")]
    assert [float(title) for title in titles] == pytest.approx([token["chance"] for token in view["next"]])
    assert "Next tokens in" in one(browser, "#status").text
    assert several(browser, ".tokens-slot.busy")
    go.set()
    settled(browser)


def test_prompts_of_different_lengths_stand_opposite(browser, opened):
    first, second = "Return the name of the module", "Return the value of the first item of the module"
    load(browser, opened, text=first, other=second)
    view = opened._session.view("prompt", {"text": first, "other": second})
    for row, end in zip(several(browser, ".opposite tr"), ("first", "second"), strict=True):
        tokens = [token for part in view["aligned"] for token in part[end]]
        shown = [chip.get_attribute("textContent") for chip in row.find_elements("css selector", ".chip")]
        assert shown == tokens
        assert f"{len(tokens)} tokens" in row.text
    assert several(browser, ".next .runs")
    assert not one(browser, "#error").is_displayed()
    assert not several(browser, "main .graph")
    mends = opened._session.view("mends", {"text": first, "other": second})["mends"]
    buttons = several(browser, ".mends button")
    assert len(buttons) == len(mends)
    for row, mend in zip(several(browser, ".mends li"), mends, strict=True):
        assert f"{100 * mend['after']:.1f} %" in row.text
    buttons[0].click()
    wait(browser, lambda: several(browser, ".tokens .chip.changed"))
    settled(browser)
    name = ("text", "other")[mends[0]["which"]]
    assert one(browser, f"#{name}").get_attribute("value") == mends[0]["text"]


def test_several_heads_of_two_runs_are_ablated_together(browser, opened):
    fields = {"text": PROMPT, "other": OTHER}
    load(browser, opened, **fields, layer=1, head=0)
    one(browser, "#ablate").click()
    wait(browser, lambda: several(browser, ".ablate"))
    one(browser, '.components [data-cell="1,2"]').click()
    wait(browser, lambda: "L1H2" in one(browser, ".head h2").text)
    settled(browser)
    one(browser, "#ablate").click()
    for by in ("zero", "mean", "other"):
        one(browser, f"#by option[value={by}]").click()
        wait(browser, lambda by=by: one(browser, "#by").get_attribute("value") == by)
        wait(browser, lambda: "L1H2" in one(browser, ".ablate h2").text)
        settled(browser)
        view = opened._session.view("ablate", {**fields, "without": "L1H0,L1H2", "by": by})
        shown = float(several(browser, ".ablate .sum b")[2].get_attribute("title"))
        assert shown == pytest.approx(view["share"], rel=1e-3)
        assert len(several(browser, ".ablate .runs")) == (1 if by == "other" else 2)
    one(browser, ".gone").click()
    wait(browser, lambda: one(browser, ".ablate h2").text == "Without L1H2")


def test_a_map_of_many_heads_reads_its_numbers(browser, opened):
    load(browser, opened, text="If")
    script = (
        "const done = arguments[0]; import('/static/draw.js').then(({ map }) => {"
        "const values = [...Array(30).keys()].map((layer) => [layer, null, -layer]);"
        "const drawn = map(values.map((_, layer) => `L${layer}`), ['H0', 'H1', 'MLP'], values, {"
        "pick: (...cell) => { window.picked = cell; }, selected: (layer) => layer === 3, label: 'map' });"
        "document.body.style.width = '200px'; document.body.replaceChildren(drawn); done(); })"
    )
    browser.execute_async_script(script)
    assert len(several(browser, ".map button")) == 60
    right = "return document.querySelector(arguments[0]).getBoundingClientRect().right"
    strongest = '.map [data-cell="29,0"]'
    wait(browser, lambda: browser.execute_script(right, strongest) <= browser.execute_script(right, ".scroll") + 1)
    browser.execute_script("document.body.style.width = ''")
    cell = one(browser, '.map [data-cell="20,2"]')
    cell.click()
    assert one(browser, "output").text == "L20 MLP −20.0"
    assert browser.execute_script("return window.picked") == [20, 2]
    assert cell.get_attribute("title") == "L20 MLP: -20"
    assert len(several(browser, ".map [aria-pressed=true]")) == 2


def test_a_token_of_spaces_can_be_seen(browser, opened):
    load(browser, opened, text="If")
    script = (
        "const [tokens, done] = arguments; import('/static/draw.js').then(({ visible }) => done(tokens.map(visible)));"
    )
    shown = browser.execute_async_script(script, [" ", "   ", "\u00a0", " a", "a  b"])
    assert shown == ["·", "···", "⍽", " a", "a··b"]


# ------------------------------------------------------------------ files


def exported(browser, function, *arguments):
    """What a function of the page's exports gives."""
    script = (
        "const [name, values, done] = arguments; import('/static/export.js').then((of) => done(of[name](...values)))"
    )
    return browser.execute_async_script(script, function, arguments)


def test_a_picture_of_any_tokens_is_sound_xml(browser, opened):
    load(browser, opened, text="If")
    names = ["a\0b", "\x1b[0m", '<&>"' * 20, "\r", "\x7f", "\uffff", "漢" * 50, "a long name " * 9]
    picture = exported(browser, "tablePicture", "title \x01", {"columns": ["", "s"], "rows": [[n, 1] for n in names]})
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "title ␁"
    assert texts[1] == "a␀b"
    browser.execute_script("document.body.innerHTML = arguments[0]", picture.replace("<svg", "<svg id='drawn'"))
    lefts = browser.execute_script("return [...document.querySelectorAll('#drawn text')].map((of) => of.getBBox().x)")
    assert min(lefts) >= 0


def test_headings_of_a_picture_do_not_overlap(browser, opened):
    load(browser, opened, text="If")
    table = {"columns": ["layer", "attention by queries", "attention by keys"], "rows": [["L0", 1, -2]]}
    browser.execute_script("document.body.innerHTML = arguments[0]", exported(browser, "tablePicture", "t", table))
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('svg text[fill]')].map((of) => [of.getBBox().x, of.getBBox().width])"
    )
    assert len(boxes) == 2
    assert boxes[0][0] + boxes[0][1] <= boxes[1][0]


def test_tables_are_read_again(browser, opened):
    load(browser, opened, text="If")
    rows = [["a\rb", 1], ['say "no"', 2], ["x,y", 3]]
    text = exported(browser, "csv", {"columns": ["token", "score"], "rows": rows})
    assert [[name, int(score)] for name, score in list(csv.reader(io.StringIO(text, newline="")))[1:]] == rows


def test_every_node_of_the_graphs_picture_has_a_box(browser, opened):
    load(browser, opened, text=PROMPT)
    wait(browser, lambda: several(browser, ".graph .t"))
    browser.execute_script(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.picture = text; }); return 'data:,'; };"
        "document.querySelector('.graph-card [data-save=svg]').click()"
    )
    wait(browser, lambda: browser.execute_script("return window.picture"))
    picture = ElementTree.fromstring(browser.execute_script("return window.picture"))
    rects = [rect for rect in picture.iter("{http://www.w3.org/2000/svg}rect") if rect.get("fill") == "white"]
    assert len(rects) == len(several(browser, ".graph .t"))
    assert all(rect.get("stroke") for rect in rects)


# ------------------------------------------------------------------ words and numbers


def test_what_the_model_loses_without_each_token_stands_below_the_sum(browser, opened):
    short = "If the file is not found, a FileNotFoundError is"
    load(browser, opened, text=short)
    session = opened._session
    aim = {
        key: token["id"] for key, token in session.view("prompt", {"text": short}).items() if key in ("target", "minus")
    }
    lost = tlens.attribute(tlens.freeze(session.model, short), method="leave-one-out", **aim).scores[0, 0]
    assert session.view("removed", {"text": short})["scores"] == pytest.approx(lost.tolist())
    shown = [float(bar.get_attribute("title")) for bar in several(browser, ".removed .bars .value")]
    assert shown[0] == pytest.approx(float(lost[lost.abs().argmax()]), rel=1e-4)
    load(browser, opened, text=PROMPT)  # a long prompt waits for a click
    assert not several(browser, ".removed")
    one(browser, "#remove").click()
    wait(browser, lambda: several(browser, ".removed"))
    assert not several(browser, "#remove")
    load(browser, opened, text=PROMPT, other=OTHER)
    assert not several(browser, ".removed")


def test_the_baseline_of_a_difference_stands_beside_its_number(browser, opened):
    load(browser, opened, text=PROMPT, method="difference")
    live, baseline, change = (float(part.get_attribute("title")) for part in several(browser, ".tokens .sum + .sum b"))
    view = opened._session.view("tokens", {"text": PROMPT, "method": "difference"})
    assert "with the mean embedding in every place" in one(browser, ".tokens .sum + .sum").text
    assert change == pytest.approx(live - baseline)
    assert change == pytest.approx(view["total"], abs=1e-5)


@pytest.mark.parametrize("method", ["gim", "integrated-gradients"])
def test_scores_that_miss_the_logit_say_how_much_is_not_attributed(browser, opened, method):
    load(browser, opened, text=PROMPT, method=method)
    view = opened._session.view("tokens", {"text": PROMPT, "method": method})
    *parts, total, missing = (float(part.get_attribute("title")) for part in several(browser, ".tokens .sum b"))
    assert parts == pytest.approx([sum(view["scores"]), *([view["bias"]] if view["bias"] else [])], rel=1e-5)
    assert total == pytest.approx(view["total"], rel=1e-5)
    assert missing == pytest.approx(total - sum(parts), rel=1e-5)
    assert "not attributed" in one(browser, ".tokens .sum").text


@pytest.mark.parametrize("nodes", [None, 5])
def test_the_graph_says_what_its_share_is_of(browser, opened, nodes):
    load(browser, opened, text=PROMPT, **({} if nodes is None else {"nodes": nodes}))
    view = opened._session.view("graph", {"text": PROMPT, "nodes": nodes})
    share = f"{100 * view['coverage']:.1f} %"
    header = one(browser, ".graph-card header").text
    assert (
        f"the {view['count']} nodes drawn carry {share} of the answer’s inputs, added up without their signs" in header
    )
    assert (f"(partial: {share})" in header) is (nodes == 5)


def test_routes_that_carry_almost_nothing_are_named_and_not_drawn(browser, opened):
    load(browser, opened, text="If")
    script = (
        "const done = arguments[0]; import('/static/views.js').then(({ routesView }) => { const view = {"
        "layers: ['L0', 'end'], routes: ['direct', 'keys', 'norms'], scores: [[9.5, 0.5, 0.001], [10, 0.0001, -0.002]],"
        "total: 10, gap: 0, code: '' }; document.body.replaceChildren(routesView(view)); done(); })"
    )
    browser.execute_async_script(script)
    rows = [[cell.text for cell in row.find_elements("css selector", "th, td")] for row in several(browser, "tr")]
    assert rows == [["", "direct", "keys"], ["L0", "+9.5", "+0.5"], ["end", "+10.0", ""]]
    assert "not shown: norms." in one(browser, ".hint").text


@pytest.mark.parametrize(
    ("share", "says"), [(-0.004, "nothing is left"), (-0.2, "−20 % is left"), (1, "100 % is left")]
)
def test_what_an_ablation_leaves_is_a_percentage_or_nothing(browser, opened, share, says):
    load(browser, opened, text="If")
    script = (
        "const [share, done] = arguments; import('/static/inspect.js').then(({ ablateView }) => { const view = {"
        "nodes: ['L0H0'], by: 'zero', before: 1, after: share, share, answers: [], next: [[]], code: '' };"
        "document.body.replaceChildren(ablateView(view, {}, () => {})); done(); })"
    )
    browser.execute_async_script(script, share)
    assert one(browser, ".ablate .sum").text.endswith(f"of the number explained {says}")


def test_methods_stand_in_groups_and_tokens_are_written_in_one_way(browser, opened):
    load(browser, opened, text=PROMPT)
    about = opened._session.about()["methods"]
    groups = {
        group.get_attribute("label"): [
            of.get_attribute("value") for of in group.find_elements("css selector", "option")
        ]
        for group in several(browser, "#method optgroup")
    }
    assert groups == {label: [of["name"] for of in about if of["group"] == label] for label in groups}
    assert sorted(name for names in groups.values() for name in names) == sorted(tlens.list_methods())
    (removal,) = (names for label, names in groups.items() if label.startswith("Removal"))
    assert removal == [name for name in tlens.list_methods() if tlens.get_method(name).perturbs]
    view = opened._session.view("prompt", {"text": PROMPT})
    target, minus = (f"“{view[name]['text'].strip(' ').replace(chr(10), '↵')}”" for name in ("target", "minus"))
    assert one(browser, "#question").text.startswith(f"Why {target} and not {minus}?")
    for place in (".tokens", ".components", ".graph-card"):
        assert f"{target} − {minus}" in one(browser, f"{place} header small").text


def test_a_link_names_what_the_target_is_compared_with(browser, opened):
    listed = [token["id"] for token in opened._session.view("prompt", {"text": PROMPT})["next"]]
    assert 5 not in listed
    load(browser, opened, text=PROMPT, minus=5)
    chosen = one(browser, ".next select option:checked")
    assert chosen.get_attribute("value") == "5"
    text = opened._session.view("prompt", {"text": PROMPT, "minus": 5})["minus"]["text"]
    assert chosen.text.strip() == text.strip()


def test_any_token_can_be_typed_to_compare_with(browser, opened):
    view = opened._session.view("prompt", {"text": PROMPT, "minus": " file"})
    token = view["minus"]["id"]
    assert token not in [one["id"] for one in view["next"]]
    load(browser, opened, text=PROMPT)
    one(browser, ".next input").send_keys(" file list\n")
    wait(browser, lambda: one(browser, "#error").is_displayed())
    assert "minus=' file list' is 2 tokens [' file', ' list']" in one(browser, "#error").text
    assert "minus" not in browser.current_url
    assert one(browser, ".next input").get_attribute("value") == " file list"  # to be mended
    one(browser, ".next input").clear()
    one(browser, ".next input").send_keys(" file\n")
    wait(browser, lambda: f"minus={token}" in browser.current_url)
    settled(browser)
    assert one(browser, ".next select option:checked").get_attribute("value") == str(token)
    assert not one(browser, "#error").is_displayed()
    assert one(browser, ".next input").get_attribute("value") == ""
    assert focused(browser, "active.closest('.next') !== null && active.localName === 'input'")
