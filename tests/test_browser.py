"""The report in a real browser: from disk, network off, by pointer and by keyboard, on wide and narrow screens."""

import itertools
import os
import re
import shutil
import struct
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, report
from tensorlens_tl.drawing.heat_maps import patch_scores
from tensorlens_tl.drawing.page import page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)
NASTY = "<img src=x onerror=document.title='hit'>"


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    arguments = ["--headless=new", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"]
    for argument in (*arguments, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_network_conditions(offline=True, latency=0, throughput=0)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The report of a prompt with a nasty token, and a page with the heat maps of 128 tokens and of 8."""
    folder = tmp_path_factory.mktemp("pages")
    model = tlens.load_demo_model()
    explained = report.explain(
        model, f"Return {NASTY} the value of the", methods=["tensorlens", "decompx", "attention"]
    )
    long = tlens.freeze(model, model.to_tokens(tlens.demo.held_out_text()[0])[:, :128])
    short = tlens.freeze(model, "Return the value of the first item")
    results = (
        tlens.attribute(long, method="rollout"),
        tlens.attribute(short, query="all"),
        tlens.attribute(short, method="attention", head_reduction=None),
    )
    maps = "".join(result.to_html(style=False) for result in results).replace("<details>", "<details open>")
    values = torch.rand(2, 8, 5, generator=torch.Generator().manual_seed(0))
    evaluated = tlens.evaluate.Evaluation(
        "test", values, {"mse": True, "loss": False}, [f"method {NASTY} {i}" for i in range(8)], list("abcde"),
        values[..., None] * torch.linspace(0, 1, 4), torch.linspace(0, 0.3, 4), "fraction",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = "".join(
        patch_scores(rng.normal(size=shape), rng.normal(size=grid), title=f"{shape}", special={NASTY: 1.0, "CLS": -9.0})
        for shape, grid in (((1, 8, 8), (4, 4)), ((3, 60, 900), (2, 15)), ((3, 70, 50), (7, 3)))
    )
    frozen = tlens.freeze(model, f"Return {NASTY} the value of the")
    graph = circuits.contribution_graph(frozen, " first", threshold=0, neurons=2, sources=1)
    small = circuits.contribution_graph(frozen, " first").prune(0.7)
    two = "".join(found.to_html(300, style=False) for found in (small, small))
    wrote = tlens.generation.freeze_generation(model, f"Return {NASTY} the value of the", max_new_tokens=8)
    results += (wrote.attribute(),)
    names = ("maps", "evaluation", "images", "graphs")
    paths = {"report": explained.save(folder / "report.html"), **{name: folder / f"{name}.html" for name in names}}
    paths["every"] = report.explain(frozen).save(folder / "every.html")
    paths["generated"] = report.explain_generation(wrote).save(folder / "generated.html")
    paths["evaluation"].write_text(page("evaluation", evaluated.to_html(style=False)), encoding="utf-8")
    paths["images"].write_text(page("images", drawn), encoding="utf-8")
    paths["maps"].write_text(page("maps", maps), encoding="utf-8")
    paths["graphs"].write_text(page("graphs", two), encoding="utf-8")
    paths["graph"] = graph.export(folder / "graph.html", k=5000)
    corrupted = tlens.freeze(model, f"Return {NASTY} the name of the")
    circuit = circuits.edge_scores(frozen, corrupted, " first", method="difference").circuit(40)
    paths["circuit"] = circuit.export(folder / "circuit.html")
    drawn = small.with_others(float(small.edges["weight"].abs().min()))  # what is left out are nodes of the picture
    return {name: path.as_uri() for name, path in paths.items()}, results, drawn, circuit


@pytest.fixture
def opened(browser, pages):
    def go(name, width=1280, scheme="light"):
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(pages[0][name])
        return browser

    return go


def point_at(browser, element):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    webdriver.ActionChains(browser).move_to_element(element).perform()


def point_at_cell(browser, grid, row, column):
    place = """const [grid, row, column] = arguments, cells = grid.querySelector('.cells');
        const size = cells.getBoundingClientRect().width / grid.dataset.width;
        grid.parentElement.scrollLeft = Math.max(0, column * size - 200);
        scrollBy(0, cells.getBoundingClientRect().top + row * size - 300);
        const box = cells.getBoundingClientRect();
        return [box.left + (column + 0.5) * size, box.top + (row + 0.5) * size]"""
    x, y = browser.execute_script(place, grid, row, column)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})


def press(browser, *keys):
    webdriver.ActionChains(browser).send_keys(*(getattr(webdriver.Keys, key) for key in keys)).perform()


def shown_below(browser, mark):
    return browser.execute_script("return getComputedStyle(arguments[0], '::after').content", mark)


def find(browser, css):
    return browser.find_element("css selector", css)


@pytest.mark.parametrize("name", ["report", "maps", "evaluation", "images", "graphs", "graph", "circuit", "generated"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_and_nothing_is_logged(opened, name, width, scheme):
    browser = opened(name, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.get_log("browser") == []
    ground, text = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    assert ground != text
    clipped = """return [...document.querySelectorAll('.line .t')].filter(e => {
        const box = e.getBoundingClientRect();
        return box.right > innerWidth + 1 || box.left < -1; }).length"""
    assert browser.execute_script(clipped) == 0
    sizes = """return Math.min(99, ...[...document.querySelectorAll('.grid, svg text')].map(
        e => parseFloat(getComputedStyle(e).fontSize)))"""
    assert browser.execute_script(sizes) >= 9


def test_nothing_is_asked_of_the_network(opened):
    browser = opened("report")
    sent = [
        entry["message"] for entry in browser.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert sent
    assert not [message for message in sent if '"url":"file:' not in message and '"url":"data:' not in message]


def test_a_script_in_the_prompt_is_inert(opened):
    browser = opened("report")
    assert "onerror" in find(browser, ".line").text
    assert browser.title.startswith("Where a prediction")
    assert browser.execute_script("return document.querySelectorAll('img:not([src^=\"data:\"])').length") == 0


@pytest.mark.parametrize("name", ["report", "generated"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answer_fits_on_one_screen(opened, name, scheme):
    browser = opened(name, 1280, scheme)
    cards = browser.find_elements("css selector", ".card")
    assert len(cards) == 3
    assert all(card.rect["y"] + card.rect["height"] <= 900 for card in cards)
    assert len({card.rect["y"] for card in cards}) == 1  # side by side
    cut = (
        """return [...document.querySelectorAll('.card')].filter(card => card.scrollWidth > card.clientWidth).length"""
    )
    assert browser.execute_script(cut) == 0


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["report", "generated"])
def test_what_is_unfolded_stays_within_the_page(opened, name, width):
    browser = opened(name, width)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    out = """return [...document.querySelectorAll('table')].filter(table => {
        const box = (table.closest('.scroll') ?? table).getBoundingClientRect();
        return box.right > innerWidth + 1; }).length"""
    assert browser.execute_script(out) == 0


def test_every_column_of_a_group_is_in_sight_on_a_wide_screen(opened):
    browser = opened("every", 1280)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    hidden = (
        """return [...document.querySelectorAll('.group .scroll')].filter(e => e.scrollWidth > e.clientWidth).length"""
    )
    assert browser.execute_script(hidden) == 0
    assert len(browser.find_elements("css selector", ".group")) == 4


def test_a_report_needs_no_script_to_be_read(opened, browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened("report")
        mark = browser.find_elements("css selector", ".line .t")[3]
        webdriver.ActionChains(browser).move_to_element(mark).perform()
        assert shown_below(browser, mark) != "none"
        folded = find(browser, ".group details")
        assert not folded.find_element("css selector", "table").is_displayed()
        folded.find_element("css selector", "summary").click()
        assert folded.find_element("css selector", "table").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_one_line_says_what_the_marks_of_a_group_say(opened, browser):
    opened("report")
    marks = browser.find_elements("css selector", ".strips .strip:nth-child(2) .t")
    point_at(browser, marks[1])
    label = marks[1].get_attribute("aria-label")
    assert shown_below(browser, marks[1]) == '"' + label.replace('"', '\\"') + '"'
    name = find(browser, ".strips .strip:nth-child(2) .name").text
    assert label.startswith(f"{name}, ")
    tabs = "return [...document.querySelectorAll('.strips')].map(e => e.querySelectorAll('[tabindex=\"0\"]').length)"
    assert set(browser.execute_script(tabs)) == {1}


def test_pointing_at_a_token_reads_its_value(opened, browser):
    opened("report")
    for mark in browser.find_elements("css selector", ".line .t")[:3]:
        point_at(browser, mark)
        label = mark.get_attribute("aria-label")
        assert shown_below(browser, mark) == '"' + label.replace('"', '\\"') + '"'
        assert float(label.rsplit(": ", 1)[1])


def test_tokens_by_keyboard(opened, browser):
    opened("report")
    first, second = browser.find_elements("css selector", ".line .t")[:2]
    first.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == second
    assert [mark.get_attribute("tabindex") for mark in (first, second)] == ["-1", "0"]
    assert shown_below(browser, second) != "none"
    press(browser, "ARROW_LEFT")
    assert browser.switch_to.active_element == first


@pytest.mark.parametrize("number", [0, 2])
def test_cells_by_pointer_and_keyboard(opened, pages, browser, number):
    opened("maps")
    result = pages[1][0 if number == 0 else 1]
    grid = browser.find_elements("css selector", ".grid")[number]
    out = browser.execute_script("return arguments[0].parentElement.nextElementSibling", grid)
    row, column = len(result.tokens[0]) - 2, len(result.tokens[0]) - 4
    point_at_cell(browser, grid, row, column)
    assert read(out) == (row, column, pytest.approx(float(result.scores[0, row, column]), rel=1e-3))
    browser.execute_script("arguments[0].focus()", grid)
    press(browser, "ARROW_UP", "ARROW_LEFT")
    assert read(out)[:2] == (row - 1, column - 1)
    press(browser, *["ARROW_LEFT"] * (column + 2))
    assert read(out)[1] == 0  # the edge holds


def read(out):
    """Row, column and value of what stands below a matrix."""
    left, value = out.text.rsplit(": ", 1)
    row, column = (int(part.rsplit("(", 1)[1].split(")")[0]) for part in left.rsplit(" ← ", 1))
    return row, column, float(value)


def test_choosing_a_head(opened, pages, browser):
    opened("maps")
    heads = pages[1][2]
    group = find(browser, ".multiples .thumbs[aria-label='by head']")
    button = group.find_elements("css selector", "button")[3]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    grid = browser.execute_script("return arguments[0].parentElement.querySelector('.grid')", group)
    out = browser.execute_script("return arguments[0].parentElement.nextElementSibling", grid)
    point_at_cell(browser, grid, 5, 2)
    assert read(out) == (5, 2, pytest.approx(float(heads.scores[0, 3, 5, 2]), rel=1e-3))
    assert "head 3" in grid.get_attribute("aria-label")


def test_a_generated_token_is_asked_by_pointer_click_and_keyboard(opened, pages, browser):
    opened("generated")
    scores = pages[1][3].scores[0]
    first = pages[1][3].options["generated"][0][0]
    marks = browser.find_elements("css selector", ".generated .t")
    out = find(browser, ".generated .out")

    def shown(question):
        labels = [float(mark.get_attribute("aria-label").rsplit(": ", 1)[1]) for mark in marks]
        total = float(out.text.rsplit(": ", 1)[1])
        return labels == pytest.approx(scores[question].tolist(), rel=1e-3, abs=1e-6) and (
            total == pytest.approx(float(pages[1][3].total[0, question]), rel=1e-3)
        )

    assert shown(7)  # the last, without a script
    point_at(browser, marks[first + 2])
    assert shown(2)
    assert "q" in marks[first + 2].get_attribute("class").split()
    ground = "return getComputedStyle(arguments[0]).backgroundColor"
    strongest = int(scores[2].abs().argmax())
    assert "0.65" in browser.execute_script(ground, marks[strongest])
    marks[first + 4].click()  # kept while others are pointed at
    point_at(browser, marks[first + 1])
    assert shown(4)
    assert marks[first + 4].get_attribute("aria-pressed") == "true"
    marks[first + 4].click()
    browser.execute_script("arguments[0].focus()", marks[first + 4])
    press(browser, "ARROW_RIGHT")
    assert browser.switch_to.active_element == marks[first + 5]
    assert shown(5)
    press(browser, "ENTER", "ARROW_LEFT")
    assert shown(5)


def test_nodes_of_the_circuit_can_be_read(opened, browser):
    opened("report")
    marks = browser.find_elements("css selector", "svg .t")
    point_at(browser, marks[0].find_element("css selector", "rect"))
    assert find(browser, ".graph .out").text == marks[0].get_attribute("aria-label")
    browser.execute_script("arguments[0].focus()", marks[0])
    press(browser, "ARROW_RIGHT")
    assert find(browser, ".graph .out").text == marks[1].get_attribute("aria-label")


def test_lines_of_an_evaluation_can_be_read(opened, browser):
    opened("evaluation")
    lines = browser.find_elements("css selector", "details[open] svg .t")
    assert len(lines) == 8
    end = "const p = arguments[0].querySelector('.wide'), q = p.getPointAtLength(p.getTotalLength() * 0.9)"
    x, y = browser.execute_script(
        f"{end}; const b = p.ownerSVGElement.getBoundingClientRect(); return [b.left + q.x, b.top + q.y]", lines[-1]
    )
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    assert find(browser, ".graph .out").text == lines[-1].get_attribute("aria-label")
    browser.execute_script("arguments[0].focus()", lines[3])
    press(browser, "ARROW_RIGHT")
    assert find(browser, ".graph .out").text == lines[4].get_attribute("aria-label")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_patches_cover_the_image_and_their_scores_can_be_read(opened, width, scheme):
    browser = opened("images", width, scheme)
    boxes = """const box = e => (b => [b.left, b.top, b.right, b.bottom])(e.getBoundingClientRect());
        return [...document.querySelectorAll('.images')].map(e => {
            const [over, beside] = e.querySelectorAll('svg');
            const patches = [...over.querySelectorAll('rect')].map(box);
            return [box(over), box(over.querySelector('image')), box(beside), patches] })"""
    found = browser.execute_script(boxes)
    assert [len(patches) for *_, patches in found] == [16, 30, 21]
    for over, image, beside, patches in found:
        patches = np.array(patches)
        assert np.allclose(over, image, atol=1)
        assert np.allclose([*patches[:, :2].min(0), *patches[:, 2:].max(0)], image, atol=1)
        sizes = patches[:, 2:] - patches[:, :2]
        assert sizes.prod(1).sum() == pytest.approx((image[2] - image[0]) * (image[3] - image[1]), rel=0.01)
        assert np.allclose(np.subtract(beside[2:], beside[:2]), np.subtract(over[2:], over[:2]), atol=1)
        assert max(over[2], beside[2]) <= width
    wide = found[1][0]
    assert wide[2] - wide[0] == pytest.approx(min(640, width - 32), abs=20)  # as wide as the page lets it be

    contrast = """const rgb = s => s.match(/[\\d.]+/g).map(Number);
        const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const bright = c => c.slice(0, 3).map(v => linear(v / 255))
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const ground = rgb(getComputedStyle(document.body).backgroundColor);
        return Math.min(...[...document.querySelectorAll('.special span')].map(e => {
            const style = getComputedStyle(e), [r, g, b, a = 1] = rgb(style.backgroundColor);
            const mixed = [r, g, b].map((v, i) => a * v + (1 - a) * ground[i]);
            const [low, high] = [bright(mixed), bright(rgb(style.color))].sort((x, y) => x - y);
            return (high + .05) / (low + .05) }))"""
    assert browser.execute_script(contrast) > 4.5  # WCAG AA

    marks = browser.find_elements("css selector", ".images rect")
    out = find(browser, ".graph .out")
    point_at(browser, marks[6])
    assert out.text == marks[6].get_attribute("aria-label")
    assert out.text.startswith("row 1, column 2: ")
    browser.execute_script("arguments[0].focus()", marks[6])
    press(browser, "ARROW_DOWN")
    assert out.text.startswith("row 2, column 2: ")
    press(browser, "ARROW_LEFT")
    assert out.text.startswith("row 2, column 1: ")


# ------------------------------------------------------------------ contribution graphs


def edges_of(browser, which=0):
    """Source, target and weight of the edges that are seen in a graph, by the names and positions of their ends."""
    return browser.execute_script(
        """const graph = document.querySelectorAll('.circuit')[arguments[0]], marks = [...graph.querySelectorAll('.t')];
        const name = i => `${marks[i].dataset.name} ${marks[i].dataset.at}`;
        return [...graph.querySelectorAll('path[data-e]:not([hidden])')].map(path => {
            const [from, to, weight] = path.dataset.e.split(' ').map(Number);
            return [name(from), name(to), weight] })""",
        which,
    )


def lines_of(browser, title):
    """Name and number of each line of a list beside the graph."""
    tables = """return [...document.querySelector('.side').querySelectorAll('table')].map(table =>
        [...table.rows].map(row => [row.cells[0].textContent, row.cells[1].textContent, row.cells[1].title]))"""
    (found,) = [rows[1:] for rows in browser.execute_script(tables) if rows[0][0].startswith(title)]
    return {key_of(name): exact(*value) for name, *value in found}


def key_of(name):
    """The name and the position in what a list calls a node."""
    return name.split(" “")[0].replace(" at ", " ").replace("answer ", "target ")


def exact(shown, title):
    """The number of a line in full, which it shows rounded."""
    decimals = len(shown.partition(".")[2])
    assert float(shown.replace("−", "-")) == pytest.approx(float(title), abs=0.51 * 10.0**-decimals)
    return float(title)


SLIDE = """const slider = document.querySelector('.least'); slider.value = arguments[0];
    slider.dispatchEvent(new Event('input', {bubbles: true}))"""


def mark_of(browser, name, at):
    return find(browser, f'.circuit .t[data-name="{name}"][data-at="{at}"]')


def click(browser, element):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    webdriver.ActionChains(browser).move_to_element(element).click().perform()


def test_tokens_stand_below_a_graph_from_the_start(opened, browser, pages):
    opened("graphs")
    labels = browser.find_elements("css selector", ".circuit svg .column")
    assert labels
    assert all(label.is_displayed() and label.text for label in labels)


def test_a_node_of_a_graph_shows_its_inputs_and_outputs(opened, browser, pages):
    opened("graphs")
    small = pages[2]
    target = len(small.nodes) - 1
    end = small.nodes.iloc[target]
    click(browser, mark_of(browser, "target", end["pos"]).find_element("css selector", "rect"))
    mark = mark_of(browser, "target", end["pos"])
    assert mark.get_attribute("aria-pressed") == "true"
    assert mark.get_attribute("role") == "button"
    into = small.edges[small.edges["target"] == target]
    names = small.nodes["name"] + " " + small.nodes["pos"].astype(str)
    shown = lines_of(browser, "Inputs")
    names = names.where(small.nodes["kind"] != "others", small.nodes["name"])  # these stand at no position
    for source, weight in zip(into["source"], into["weight"], strict=True):
        assert shown[names[source]] == pytest.approx(weight, rel=1e-3)
    assert shown["sum"] == pytest.approx(small.total, rel=1e-3)
    assert into["weight"].sum() == pytest.approx(small.total - small.constant, rel=1e-5)
    assert "not in this picture" not in shown
    # from the list on to a node, and the other graph on the page is as it was
    first = browser.find_elements("css selector", ".side button.go")[0]
    name = first.text
    first.click()
    assert browser.switch_to.active_element.get_attribute("data-name") == name.split(" at ")[0]
    largest = int(into.loc[into["weight"].abs().idxmax(), "source"])
    given = small.edges[small.edges["source"] == largest]["weight"].sum()
    given_away = lines_of(
        browser, "Outputs"
    )  # the drawn edges, and what goes to nodes that are not drawn, are its weight
    weight = small.nodes["weight"].iloc[largest]
    assert given_away["sum"] == pytest.approx(weight, rel=1e-3)
    assert given_away["to what is not drawn"] == pytest.approx(weight - given, rel=1e-3)
    assert browser.execute_script("return document.querySelectorAll('.circuit svg.picked').length") == 1


def test_small_edges_of_a_graph_are_hidden_except_between_pinned_nodes(opened, browser, pages):
    opened("graphs")
    every = edges_of(browser)
    assert len(every) == len(pages[2].edges)
    browser.execute_script(SLIDE, 50)
    largest = max(abs(weight) for *_, weight in every)
    large = [edge for edge in every if abs(edge[2]) >= largest / 4]
    assert edges_of(browser) == large
    assert 0 < len(large) < len(every)
    assert f"{len(large)} of {len(every)} shown" in find(browser, ".count").text
    assert "25 percent" in find(browser, ".least").get_attribute("aria-valuetext")
    assert len(edges_of(browser, 1)) == len(every)
    small = min((edge for edge in every if edge not in large), key=lambda edge: abs(edge[2]))
    browser.execute_script(SLIDE, 0)
    for end in small[:2]:
        mark = mark_of(browser, *end.rsplit(" ", 1))
        browser.execute_script("arguments[0].focus()", mark)
        webdriver.ActionChains(browser).send_keys("p").perform()
        assert "pinned" in mark.get_attribute("class")
    browser.execute_script(SLIDE, 50)
    assert edges_of(browser) == [edge for edge in every if edge in large or edge == small]
    listed = [button.text for button in browser.find_elements("css selector", ".side .n button")]
    ends = [end.rsplit(" ", 1)[0] if end.startswith("other") else end for end in small[:2]]
    assert [key_of(text) for text in listed] == ends


def test_grouped_nodes_have_the_sums_of_their_edges(opened, browser, pages):
    opened("graphs")
    every = edges_of(browser)
    into_target = [edge for edge in every if edge[1].startswith("target")]
    members = [edge[0] for edge in into_target[:3]]
    for member in members:
        browser.execute_script("arguments[0].focus()", mark_of(browser, *member.rsplit(" ", 1)))
        webdriver.ActionChains(browser).send_keys("p").perform()
    find(browser, ".name").send_keys(NASTY + webdriver.Keys.ENTER)
    assert find(browser, ".side .title").text == f"{NASTY} at 3 places"
    assert browser.title == "graphs"
    assert not browser.find_elements("css selector", ".circuit img")
    expected = {}
    for source, end, weight in every:
        if source in members and end not in members:
            expected[end] = expected.get(end, 0.0) + weight
    shown = lines_of(browser, "Outputs")
    assert shown.pop("sum") == pytest.approx(sum(expected.values()), rel=1e-3)
    assert shown == {end: pytest.approx(weight, rel=1e-3) for end, weight in expected.items()}
    assert not set(members) & {end for edge in edges_of(browser) for end in edge[:2]}
    assert not mark_of(browser, *members[0].rsplit(" ", 1)).is_displayed()
    find(browser, ".part").click()
    assert edges_of(browser) == every
    assert mark_of(browser, *members[0].rsplit(" ", 1)).is_displayed()


def test_a_graph_is_searched_and_walked_by_keyboard(opened, browser, pages):
    opened("graphs")
    find(browser, ".find").send_keys("mlp")
    found = [mark.get_attribute("data-name") for mark in browser.find_elements("css selector", ".found")]
    assert found
    assert all("MLP" in name for name in found)
    assert find(browser, ".hits").text == f"{len(found)} found"
    find(browser, ".find").send_keys(webdriver.Keys.ENTER)
    assert find(browser, ".side .title").text.startswith(found[0])
    assert browser.switch_to.active_element.get_attribute("class") == "find"
    end = pages[2].nodes.iloc[-1]
    browser.execute_script("arguments[0].focus()", mark_of(browser, "target", end["pos"]))
    press(browser, "ARROW_DOWN")  # to the strongest input
    strongest = max((edge for edge in edges_of(browser) if edge[1].startswith("target")), key=lambda edge: abs(edge[2]))
    active = browser.switch_to.active_element
    assert f"{active.get_attribute('data-name')} {active.get_attribute('data-at')}" == strongest[0]
    assert active.get_attribute("aria-pressed") == "true"
    press(browser, "ESCAPE")
    assert active.get_attribute("aria-pressed") == "false"
    press(browser, "ENTER")
    assert active.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("width", [1280, 400])
def test_a_graph_of_500_nodes_answers(opened, width):
    browser = opened("graph", width)
    assert len(browser.find_elements("css selector", ".circuit .t")) >= 500
    assert browser.title.startswith("How the logit")
    mark = browser.find_elements("css selector", ".circuit .t")[-1]
    click(browser, mark.find_element("css selector", "rect"))
    assert lines_of(browser, "Inputs")["sum"] == pytest.approx(float(mark.get_attribute("data-weight")), rel=1e-3)
    side, graph = (find(browser, css).rect for css in (".side", ".circuit .scroll"))
    assert side["x"] + side["width"] <= width
    assert (side["y"] >= graph["y"] + graph["height"]) is (width == 400)  # beside it, or below


SEEN = """const box = e => e.getBoundingClientRect();
    const inner = box(arguments[0]), outer = box(document.querySelector('.circuit .scroll'));
    return inner.left >= outer.left && inner.right <= outer.right && inner.top >= outer.top
        && inner.bottom <= outer.bottom"""


def test_a_graph_that_shrinks_shows_the_chosen_node_and_the_names_of_rows(opened):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = opened("graph", 1280)
    click(browser, browser.find_elements("css selector", ".circuit .t")[-1].find_element("css selector", "rect"))
    chosen = find(browser, ".circuit .t[aria-pressed=true] rect")
    browser.execute_script("document.querySelector('.circuit .both > .scroll').style.flex = '0 0 200px'")
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script(SEEN, chosen))
    scroll = "const shell = document.querySelector('.circuit .scroll'); shell.scrollTo(shell.scrollWidth, 0)"
    browser.execute_script(scroll)
    label = browser.find_elements("css selector", ".circuit text.row")[0]
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script(SEEN, label))


def test_a_graph_needs_no_script_to_be_read(opened, browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened("graphs")
        assert not find(browser, ".tools").is_displayed()
        assert not find(browser, ".side").is_displayed()
        assert find(browser, ".circuit svg .t rect").is_displayed()
        assert find(browser, ".circuit .t title").get_attribute("textContent")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


# ------------------------------------------------------------------ what is shown is laid out, grouped and saved

DRAWN = """const svg = document.querySelector('.circuit svg'), box = e => e.getBBox();
    return [...svg.querySelectorAll('.t:not([hidden])')].map(mark => {
        const [node, text] = [mark.querySelector('rect'), mark.querySelector('text')].map(box);
        return [`${mark.dataset.name} ${mark.dataset.at}`, node.x + node.width / 2, node.y + node.height / 2,
            [text.x, text.y, text.x + text.width, text.y + text.height]] })"""


def size_of(browser):
    box = "document.querySelector('.circuit svg').viewBox.baseVal"
    return browser.execute_script(f"return [{box}.width, {box}.height]")


def test_the_script_draws_what_python_drew(opened, browser):
    """A page with and without scripts shows each node at the same place."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    opened("graph")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    before = [browser.execute_script(DRAWN), size_of(browser)]
    opened("graph")
    after = [browser.execute_script(DRAWN), size_of(browser)]
    assert before[1] == pytest.approx(after[1], abs=1)
    assert [name for name, *_ in before[0]] == [name for name, *_ in after[0]]
    places = [np.array([mark[1:3] for mark in drawn]) for drawn, _ in (before, after)]
    assert np.abs(places[0] - places[1]).max() <= 1


def test_without_a_script_only_nodes_with_edges_are_drawn(pages):
    """`most` leaves the largest edges; nodes that only smaller ones reached would stand about alone."""
    frozen = tlens.freeze(tlens.load_demo_model(), "If the file is not found, a FileNotFoundError is")
    html = circuits.contribution_graph(frozen, " raised", threshold=0.005).to_html(120)
    used = {int(number) for ends in re.findall(r'data-e="(\d+) (\d+) ', html) for number in ends}
    assert html.count('<g class="t"') == len(used)


@pytest.mark.parametrize("width", [1280, 400])
def test_idle_nodes_go_and_the_rest_is_laid_out_again(opened, width):
    browser = opened("graph", width)
    wide, high = size_of(browser)
    every = len(browser.execute_script(DRAWN))
    browser.execute_script(SLIDE, 60)
    drawn = browser.execute_script(DRAWN)
    ends = {end for edge in edges_of(browser) for end in edge[:2]}
    assert {name for name, *_ in drawn} == ends | {drawn[-1][0]}
    assert drawn[-1][0].startswith("target")
    assert 1 < len(drawn) < every / 4
    narrow, low = size_of(browser)
    assert narrow < wide / 2
    assert low <= high
    labels = [box for *_, box in drawn]
    for one, two in itertools.combinations(labels, 2):  # no name lies over another, none is cut
        apart = one[2] <= two[0] + 1 or two[2] <= one[0] + 1 or one[3] <= two[1] + 1 or two[3] <= one[1] + 1
        assert apart
    assert min(box[0] for box in labels) >= 0
    assert max(box[2] for box in labels) <= narrow
    browser.execute_script(SLIDE, 0)
    assert size_of(browser) == [wide, high]
    assert len(browser.execute_script(DRAWN)) == every


@pytest.mark.parametrize("by", ["layer", "place"])
def test_layers_become_one_node_each(opened, browser, pages, by):
    opened("graphs")
    small = pages[2]
    every = edges_of(browser)
    choose = """const box = document.querySelector('.by'); box.value = arguments[0];
        box.dispatchEvent(new Event('change', {bubbles: true}))"""
    browser.execute_script(choose, by)
    used = small.nodes.loc[sorted(set(small.edges["source"]) | set(small.edges["target"]))]
    inner = used[~used["kind"].isin(["target", "others"])]
    others = (used["kind"] == "others").sum()
    keys = inner["layer"].where((inner["layer"] >= 0) | (inner["kind"] != "bias"), 99).astype(str)
    if by == "place":
        keys = keys + " " + inner["pos"].astype(str)
    shown = browser.execute_script(DRAWN)
    assert len(shown) == 1 + others + keys.nunique()
    click(browser, mark_of(browser, "target", small.nodes.iloc[-1]["pos"]).find_element("css selector", "rect"))
    group_of = dict(zip(inner.index, keys, strict=True))
    into = small.edges[small.edges["target"] == len(small.nodes) - 1]
    sums = into.groupby(into["source"].map(lambda row: group_of.get(row, row)))["weight"].sum()
    inputs = """return [...document.querySelector('.side table').rows].filter(row => row.querySelector('button'))
        .map(row => Number(row.cells[1].title))"""
    lines = browser.execute_script(inputs)
    assert sorted(lines) == pytest.approx(sorted(sums), rel=1e-3)
    browser.execute_script(choose, "")
    assert edges_of(browser) == every


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_shown_is_saved_as_svg_and_png(opened, tmp_path, scheme):
    browser = opened("graphs", scheme=scheme)
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.execute_script(SLIDE, 50)
    names = {name.split(" ")[0] for name, *_ in browser.execute_script(DRAWN)}
    width, height = size_of(browser)
    for kind in ("svg", "png"):
        find(browser, f".circuit .{kind}").click()
    for _ in range(100):
        files = {path.suffix: path for path in tmp_path.iterdir()}
        if set(files) == {".svg", ".png"} and all(path.stat().st_size for path in files.values()):
            break
        time.sleep(0.1)
    svg = ElementTree.parse(files[".svg"]).getroot()
    space = "{http://www.w3.org/2000/svg}"
    called = {"embed": "token", "target": "answer"}
    texts = " ".join(text.text for text in svg.iter(f"{space}text"))
    assert all(called.get(name, name) in texts for name in names)
    assert len([g for g in svg.iter(f"{space}g") if g.find(f"{space}rect") is not None]) == len(
        browser.execute_script(DRAWN)
    )
    assert len(list(svg.iter(f"{space}path"))) == len(edges_of(browser))
    assert not [name for element in svg.iter() for name in element.attrib if name.startswith(("data-", "aria-"))]
    assert "var(" not in files[".svg"].read_text(encoding="utf-8")
    data = files[".png"].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == pytest.approx((3 * width, 3 * height), abs=2)
    browser.get(files[".svg"].as_uri())
    assert browser.execute_script("return document.documentElement.tagName") == "svg"
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_circuit_is_a_page_whose_edges_are_readings(opened, pages, width, scheme):
    browser = opened("circuit", width, scheme)
    circuit = pages[3]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paths = """return [...document.querySelectorAll('.circuit path[data-reads]')].map(path =>
        [path.dataset.reads, getComputedStyle(path).strokeDasharray, path.getAttribute('d')])"""
    drawn = browser.execute_script(paths)
    assert len(drawn) == len(circuit)
    dashes = {reads: {dash for other, dash, _ in drawn if other == reads} for reads in ("queries", "keys", "values")}
    assert all(len(dash) == 1 for dash in dashes.values())
    assert len(set.union(*dashes.values())) == 3
    assert len({way for *_, way in drawn}) == len(drawn)  # none lies over another
    assert browser.execute_script("return document.querySelector('.circuit .key').textContent") == "valuesquerieskeys"
    head = next(edge.split(" → ")[1].split(".")[0] for edge in circuit.edges if edge.endswith(".k"))
    click(browser, find(browser, f'.circuit .t[data-name="{head}"]').find_element("css selector", "rect"))
    table = """return [...document.querySelector('.side table').rows].slice(1).map(row =>
        [row.cells[0].textContent, row.cells[1].textContent, row.cells[1].title])"""
    frame = circuit.to_dataframe()
    frame = frame[frame["destination"].str.startswith(head + ".")]
    words = {"q": "queries", "k": "keys", "v": "values"}
    expected = {f"{row.source} {words[row.destination[-1]]}": row.score for row in frame.itertuples()}
    assert {name: exact(*value) for name, *value in browser.execute_script(table)} == {
        name: pytest.approx(score, rel=1e-3) for name, score in expected.items()
    }
    assert browser.get_log("browser") == []


def test_long_tables_of_the_site_can_be_filtered(browser, tmp_path):
    """A box above a long table hides the rows without its words; a short table has none."""
    script = (Path(__file__).parents[1] / "docs" / "_static" / "filter.js").read_text(encoding="utf-8")
    rows = "".join(f"<tr><td>bridge/model-{number}</td><td>{number % 2}</td></tr>" for number in range(30))
    tables = "".join(
        f"<table class=docutils><thead><tr><th>a<th>b</tr></thead><tbody>{body}</tbody></table>"
        for body in (rows, "<tr><td>short</td></tr>")
    )
    file = tmp_path / "tables.html"
    file.write_text(f"<meta charset=utf-8><script>{script}</script>{tables}", encoding="utf-8")
    browser.get(file.as_uri())
    boxes = browser.find_elements("css selector", "input.filter")
    assert [box.get_attribute("placeholder") for box in boxes] == ["filter 30 rows"]
    assert ["long" in table.get_attribute("class") for table in browser.find_elements("css selector", "table")] == [
        True,
        False,
    ]

    def shown():
        return [row.text for row in browser.find_elements("css selector", "tbody tr") if row.is_displayed()]

    boxes[0].send_keys("MODEL-2 0")
    assert shown() == ["bridge/model-2 0", *(f"bridge/model-{number} 0" for number in range(20, 30, 2)), "short"]
    boxes[0].clear()
    boxes[0].send_keys(" ")
    assert len(shown()) == 31


@pytest.mark.parametrize("count", [19, 20])
def test_many_sections_of_the_site_open_one_by_one(browser, tmp_path, count):
    """By a click, or by a link to one of them; a few sections stay as they are."""
    script = (Path(__file__).parents[1] / "docs" / "_static" / "filter.js").read_text(encoding="utf-8")
    sections = "".join(
        f"<section id=part-{number}><span id=label-{number}></span><h2>Part {number}</h2><p>text {number}</p></section>"
        for number in range(count)
    )
    file = tmp_path / "sections.html"
    file.write_text(f"<meta charset=utf-8><script>{script}</script><article>{sections}</article>", encoding="utf-8")
    browser.get(f"{file.as_uri()}#label-3")
    texts = browser.find_elements("css selector", "p")

    def shown():
        return [text.text for text in texts if text.is_displayed()]

    if count < 20:
        assert len(shown()) == count
        return
    assert shown() == ["text 3"]
    browser.find_element("css selector", "#part-5 h2").click()
    browser.execute_async_script("addEventListener('hashchange', () => arguments[0]()); location.hash = '#part-7'")
    assert shown() == ["text 3", "text 5", "text 7"]
    assert len(browser.find_elements("css selector", "h2")) == count
