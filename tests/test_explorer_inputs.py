"""What the explorer reads besides one prompt: text that the model writes, chats, and images."""

import io
import json
import struct
import zlib

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.explorer import Explorer, Session, images
from tensorlens_tl.explorer.questions import MOST_NEW, Inquiry, Question

pytest.importorskip("tensorlens_tl.explorer.server", exc_type=ImportError)

from test_explorer import alive, chromium, load, one, send, settled, several, wait

TEXT = "If the module is not"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.fixture(scope="module")
def chat_model():
    model = tlens.load_demo_model()
    model.tokenizer.chat_template = TEMPLATE
    return model


@pytest.fixture(scope="module")
def digits():
    return tlens.load_demo_model("digits")


@pytest.fixture(scope="module")
def digit_images():
    return tlens.demo.digit_images()[0][:5]


def run_code(view, **names):
    exec(view["code"], names)
    return names["result"]


# ------------------------------------------------------------------ generated text


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"span": "all", "minus": "runner-up"}),
        ({"minus": None}, {"span": "all"}),
        ({"start": 2, "stop": 3}, {"span": (2, 3), "minus": "runner-up"}),
        ({"start": 3, "stop": 7, "hops": "all"}, {"span": (3, 7), "minus": "runner-up", "hops": "all"}),
        ({"start": 3, "stop": 7, "hops": 1, "minus": 7}, {"span": (3, 7), "minus": 7, "hops": 1}),
    ],
)
def test_generated_text_has_the_sources_that_the_library_gives(model, fields, options):
    view = Session(model).view("generated", {"text": TEXT, "new": 8, **fields})
    expected = tlens.attribute_generation(model, TEXT, max_new_tokens=8, **options)
    assert view["scores"] == pytest.approx(expected.scores[0, 0].tolist(), rel=1e-5, abs=1e-6)
    assert sum(view["scores"]) + view["bias"] == pytest.approx(view["total"], abs=1e-3)
    assert (view["label"], view["gap"]) == (expected.target, pytest.approx(float(expected.gap), abs=1e-6))
    asked = expected.options["asked"][0]
    assert (view["first"], view["start"], view["stop"]) == (6, asked[0], asked[-1] + 1)
    assert torch.allclose(run_code(view, model=model).scores, expected.scores)
    if options.get("hops") == "all":
        assert not any(view["scores"][view["first"] :])


def test_a_written_token_is_explained_by_every_view(model):
    session = Session(model)
    fields = {"text": TEXT, "new": 6, "start": 2}
    written = tlens.generation.freeze_generation(model, TEXT, max_new_tokens=6)
    run = written.frozen
    query = written.generated_ranges()[0][0] + 1
    best, second = run.logits(query)[0, 0].argsort(descending=True)[:2].tolist()
    assert best == int(run.tokens[0, query + 1])  # it wrote its first choice
    prompt = session.view("prompt", fields)
    assert (prompt["tokens"], prompt["query"]) == (run.str_tokens[0], query)
    assert (prompt["target"]["id"], prompt["minus"]["id"]) == (best, second)
    tokens = session.view("tokens", fields)
    expected = tlens.attribute(run, best, minus=second, query=query)
    assert tokens["scores"] == pytest.approx(expected.scores[0, 0].tolist(), abs=1e-5)
    assert tokens["total"] == pytest.approx(prompt["numbers"][0], abs=1e-3)
    assert torch.allclose(run_code(tokens, model=model).scores, expected.scores, atol=1e-5)
    components = session.view("components", fields)
    effects = tlens.circuits.logit_attribution(run, best, second, query=query)
    assert components["total"] == pytest.approx(float(effects.total), abs=1e-4)
    head = session.view("head", {**fields, "layer": 1, "head": 0})
    assert head["pattern"] == pytest.approx(run.pattern(1)[0, 0, query].tolist(), abs=1e-6)
    ablated = session.view("ablate", {**fields, "without": "L1H0"})
    assert ablated["before"] == pytest.approx(prompt["numbers"][0], abs=1e-3)
    graph = session.view("graph", {**fields, "nodes": 10})
    assert graph["total"] == pytest.approx(prompt["numbers"][0], abs=1e-3)
    moved = session.view("prompt", {**fields, "query": 3})
    assert moved["query"] == 3
    alone = session.view("prompt", {"text": TEXT, "new": 6})  # without a start it is the prompt's own
    assert alone["tokens"] == run.str_tokens[0][: written.generated_ranges()[0][0]]
    with pytest.raises(tlens.InvalidInputError, match="start is 6; the model wrote 6 tokens"):
        session.view("prompt", {**fields, "start": 6})


def test_clicks_on_one_text_freeze_it_once(model, monkeypatch):
    session = Session(model)
    runs = []
    real = tlens.generation.freeze_generation

    def counted(*args, **options):
        runs.append(1)
        return real(*args, **options)

    monkeypatch.setattr("tensorlens_tl.explorer.questions.freeze_generation", counted)
    for start in range(4):
        session.view("generated", {"text": TEXT, "new": 6, "start": start, "stop": start + 1})
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "new is missing"),
        ({"new": 0}, f"new is 0; ask for 1 to {MOST_NEW} tokens"),
        ({"new": 10**9}, "ask for 1 to"),
        ({"new": "5"}, "send a whole number"),
        ({"new": 5, "start": 3, "stop": 3}, "start is 3 and stop 3"),
        ({"new": 5, "start": 0, "stop": 10**30}, "span"),
        ({"new": 5, "hops": -1}, "hops is -1"),
        ({"new": 5, "hops": "many"}, "hops is 'many'"),
        ({"new": 5, "minus": 10**30}, "minus"),
        ({"new": MOST_NEW, "text": "the " * 200}, "beyond the context"),
    ],
)
def test_wrong_generations_are_refused(model, fields, message):
    with pytest.raises(tlens.TensorLensError, match=message):
        Session(model).view("generated", {"text": TEXT, **fields})


# ------------------------------------------------------------------ chats


def test_a_chat_is_read_through_the_tokenizers_template(chat_model):
    session = Session(chat_model)
    assert session.about()["chat"]
    view = session.view("prompt", {"text": "Return it.", "chat": True})
    ids = chat_model.tokenizer.encode("user: Return it.\nassistant:", add_special_tokens=False)
    assert "".join(view["tokens"]) == "user: Return it.\nassistant:"
    frozen = tlens.freeze(chat_model, torch.tensor([ids]))
    assert view["next"][0]["id"] == int(frozen.logits()[0, 0].argmax())
    plain = session.view("prompt", {"text": "Return it."})
    assert plain["tokens"] != view["tokens"]


@pytest.mark.parametrize(
    ("view", "fields"),
    [
        ("tokens", {}),
        ("tokens", {"other": "Return is."}),
        ("generated", {"new": 3}),
        ("head", {"layer": 1, "head": 0}),
    ],
)
def test_the_code_of_a_chat_gives_its_result_again(chat_model, view, fields):
    session = Session(chat_model)
    answer = session.view(view, {"text": "Return it.", "chat": True, **fields})
    result = run_code(answer, model=chat_model)
    assert torch.allclose(result.total, session.last.total)
    if view == "tokens":
        assert result.scores[0, 0].tolist() == pytest.approx(answer["scores"], rel=1e-5)


def test_without_a_template_a_chat_is_refused(model):
    session = Session(model)
    assert not session.about()["chat"]
    with pytest.raises(tlens.InvalidInputError, match="no chat template"):
        session.view("prompt", {"text": "Return it.", "chat": True})
    for wrong in (1, "yes", []):
        with pytest.raises(tlens.InvalidInputError, match="send true or false"):
            session.view("prompt", {"text": "Return it.", "chat": wrong})


# ------------------------------------------------------------------ images


def test_an_image_has_the_scores_that_the_library_gives(digits, digit_images):
    session = Session(digits, images=digit_images)
    about = session.about()
    assert (about["images"], about["classes"]) == (["0", "1", "2", "3", "4"], [str(n) for n in range(10)])
    frozen = tlens.freeze(digits, digit_images[2:3])
    best, second = frozen.logits()[0, 0].argsort(descending=True)[:2].tolist()
    view = session.view("tokens", {"image": "2"})
    expected = tlens.attribute(frozen, target=best, minus=second)
    assert view["scores"] == pytest.approx(expected.scores[0, 0].tolist(), rel=1e-4, abs=1e-5)
    assert sum(view["scores"]) + view["bias"] == pytest.approx(view["total"], abs=1e-3)
    other = session.view("tokens", {"image": "2", "target": 7, "minus": None})
    assert other["total"] == pytest.approx(float(frozen.logits()[0, 0, 7]), abs=1e-4)
    assert torch.allclose(run_code(view, model=digits, pixels=digit_images[2:3]).scores, expected.scores, atol=1e-5)
    drawn = session.view("image", {"image": "2"})
    assert (drawn["rows"], drawn["columns"], drawn["special"]) == (4, 4, 1)
    assert drawn["picture"].startswith("data:image/png;base64,")
    head = session.view("head", {"image": "2", "layer": 1, "head": 0, "key": 9})
    assert head["pattern"] == pytest.approx(frozen.pattern(1)[0, 0, 0].tolist(), rel=1e-4, abs=1e-6)
    assert session.view("ablate", {"image": "2", "without": "L1H0"})["before"] == pytest.approx(view["total"], abs=1e-3)


def file_of(array, kind="PNG"):
    """A picture of 0–255 values as a file."""
    Image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def test_an_uploaded_file_is_read_as_the_model_reads_it(digits, digit_images):
    session = Session(digits)
    array = (digit_images[1, 0] * 255).round().byte().numpy()
    name = session.images.add(file_of(array))
    assert torch.equal(session.images.pixels(name)[0, 0], torch.from_numpy(array).float() / 255)
    assert session.images.add(file_of(array)) == name
    given = Session(digits, images=session.images.pixels(name)).view("tokens", {"image": "0"})
    assert session.view("tokens", {"image": name})["scores"] == pytest.approx(given["scores"], rel=1e-5, abs=1e-5)
    large = session.images.add(file_of(digit_images.new_zeros(40, 60).byte().numpy(), "JPEG"))
    assert session.images.pixels(large).shape == (1, 1, 8, 8)


def uploaded(session, picture, kind="PNG", **options):
    """The values of a picture as the model reads it, 0–255."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return (session.images.pixels(session.images.add(file.getvalue()))[0, 0] * 255).round().int()


def test_sixteen_bits_become_eight(digits):
    Image = pytest.importorskip("PIL.Image")
    values = torch.arange(64).reshape(8, 8) * 4
    picture = Image.fromarray((values * 257).numpy().astype("uint16"))
    assert torch.equal(uploaded(Session(digits), picture), values.int())


def test_what_is_transparent_lies_on_white(digits):
    Image = pytest.importorskip("PIL.Image")
    session = Session(digits)
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    half.paste((9, 9, 9, 0), (0, 0, 4, 8))
    expected = torch.tensor([255] * 4 + [0] * 4).int().expand(8, 8)
    assert torch.equal(uploaded(session, half), expected)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([50, 50, 50, 0, 0, 0])
    palette.paste(0, (0, 0, 4, 8))
    assert torch.equal(uploaded(session, palette, transparency=b"\0\xff"), expected)
    values = torch.zeros(8, 8).numpy().astype("uint16")
    values[:, :4] = 700
    grey = Image.fromarray(values)
    assert torch.equal(uploaded(session, grey, transparency=700), expected)


def test_a_photograph_is_turned_as_it_says(digits):
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("L", (8, 8), 0)
    picture.paste(255, (0, 0, 8, 4))  # white above
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = uploaded(Session(digits), picture, "JPEG", exif=exif, quality=100)
    assert turned[:3].max() < 30
    assert turned[5:].min() > 225


def test_a_model_of_one_class_is_compared_with_nothing(digits, digit_images, monkeypatch):
    session = Session(digits, images=digit_images)
    logits = session._passes.logits
    monkeypatch.setattr(session._passes, "logits", lambda *args, **options: logits(*args, **options)[:1])
    question = Question.of({"image": "0"})
    monkeypatch.setattr(type(session.frozen(question).view), "d_vocab", 1)
    assert Inquiry(question, session._passes).target == {"target": 0}


def test_an_image_processor_prepares_uploads(digits):
    def processor(picture, return_tensors):
        assert return_tensors == "pt"
        return {"pixel_values": torch.full((1, 1, 8, 8), float(picture.width))}

    session = Session(digits, processor=processor)
    assert session.about()["processor"]
    name = session.images.add(file_of(torch.zeros(5, 3).byte().numpy()))
    assert session.images.pixels(name).unique().tolist() == [3.0]


def test_uploads_are_bounded(digits):
    session = Session(digits)
    names = [session.images.add(file_of(torch.full((8, 8), n).byte().numpy())) for n in range(images.MOST_IMAGES + 3)]
    with pytest.raises(tlens.InvalidInputError, match="upload it again"):
        session.view("tokens", {"image": names[0]})
    assert session.view("tokens", {"image": names[-1]})["scores"]


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def huge_png(width, height):
    """A small file that says it is a large picture."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


HOSTILE = {
    "empty": (b"", "no PNG and no JPEG"),
    "text": (b"<svg onload=alert(1)>", "no PNG and no JPEG"),
    "gif": (b"GIF89a" + b"\0" * 100, "no PNG and no JPEG"),
    "tiff": (b"II*\0" + b"\0" * 100, "no PNG and no JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no PNG and no JPEG"),
    "signature": (b"\x89PNG\r\n\x1a\n", "cannot be read"),
    "jpeg signature": (b"\xff\xd8\xff" + b"\0" * 50, "cannot be read"),
    "truncated": (huge_png(100, 100)[:60], "cannot be read"),
    "bomb": (huge_png(60_000, 60_000), "cannot be read|pixels; at most"),
    "large": (huge_png(5_000, 4_000), "pixels; at most"),
    "no size": (huge_png(0, 0), "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(digits, name):
    pytest.importorskip("PIL")
    file, message = HOSTILE[name]
    with pytest.raises(tlens.InvalidInputError, match=message):
        Session(digits).images.add(file)


def test_without_pillow_uploads_are_refused_by_name(digits, monkeypatch):
    monkeypatch.setattr("tensorlens_tl.explorer.images.find_spec", lambda name: None)
    with pytest.raises(tlens.InvalidInputError, match="need Pillow, not installed here: pip install pillow"):
        Session(digits).images.add(b"")


@pytest.mark.parametrize(
    ("view", "fields", "message"),
    [
        ("tokens", {"image": "9" * 100}, "upload it again"),
        ("tokens", {"image": "../../etc/passwd"}, "upload it again"),
        ("tokens", {"image": 3}, "image is int"),
        ("tokens", {"text": "a prompt"}, "not text"),
        ("tokens", {"image": "0", "target": 99}, "vocabulary has 10"),
        ("generated", {"image": "0", "new": 3}, "generated after a prompt"),
        ("image", {"text": "a prompt"}, "image is missing"),
    ],
)
def test_wrong_questions_of_images_are_refused(digits, digit_images, view, fields, message):
    with pytest.raises(tlens.TensorLensError, match=message):
        Session(digits, images=digit_images).view(view, fields)


def test_a_model_of_text_refuses_images(model):
    with pytest.raises(tlens.TensorLensError):
        Session(model).view("tokens", {"image": "0"})
    with pytest.raises(tlens.InvalidInputError, match="does not say which images"):
        Session(model).images.add(file_of(torch.zeros(8, 8).byte().numpy()))
    with pytest.raises(tlens.InvalidInputError, match="images are a tensor"):
        tlens.explore(model, images=[1, 2])


# ------------------------------------------------------------------ over HTTP, and on the page


@pytest.fixture(scope="module")
def opened_digits(digits, digit_images):
    explorer = Explorer(Session(digits, images=digit_images, name="digits"), 0).start()
    yield explorer
    explorer.close()


@pytest.fixture(scope="module")
def opened_chat(chat_model):
    explorer = Explorer(Session(chat_model, name="demo"), 0).start()
    yield explorer
    explorer.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def test_uploads_over_http(opened_digits):
    file = file_of(torch.zeros(8, 8).byte().numpy())
    status, body, _ = send(opened_digits, "/api/upload", file)
    assert status == 200
    name = json.loads(body)["image"]
    assert send(opened_digits, "/api/tokens", {"image": name})[0] == 200
    assert send(opened_digits, "/api/upload", file, **{"X-Token": "wrong"})[0] == 403
    assert send(opened_digits, "/api/upload", b"\x89PNG" + b"x" * images.LARGEST_FILE)[0] == 413
    for hostile, _ in HOSTILE.values():
        assert send(opened_digits, "/api/upload", hostile)[0] == 400
    assert send(opened_digits, "/api/tokens", {"image": name})[0] == 200


def test_a_large_file_is_no_question(opened_chat):
    assert send(opened_chat, "/api/tokens", b"x" * (1 << 20))[0] == 413
    assert alive(opened_chat)


def shown_scores(browser, selector):
    return [float(of.get_attribute("title")) for of in several(browser, selector)]


def test_the_page_writes_and_takes_stretches(browser, opened_chat, chat_model):
    from selenium.webdriver import ActionChains

    session = Session(chat_model)
    load(browser, opened_chat, text=TEXT)
    one(browser, "#new").send_keys("6\n")
    wait(browser, lambda: several(browser, ".generated"))
    settled(browser)
    view = session.view("generated", {"text": TEXT, "new": 6})
    assert shown_scores(browser, ".generated .chip") == pytest.approx(view["scores"], abs=1e-6)
    several(browser, ".generated .chip")[8].click()
    wait(browser, lambda: "start=2" in browser.current_url)
    settled(browser)
    asked = {"text": TEXT, "new": 6, "start": 2}
    assert shown_scores(browser, ".tokens .chip") == pytest.approx(session.view("tokens", asked)["scores"], abs=1e-6)
    effects = float(one(browser, ".components .bars .value").get_attribute("title"))
    components = session.view("components", asked)
    parts = [score for row in components["heads"] for score in row] + components["mlps"]
    assert effects == pytest.approx(max(parts, key=abs), abs=1e-6)
    chips = several(browser, ".generated .chip")
    browser.execute_script(
        "arguments[0].dispatchEvent(new MouseEvent('click', {shiftKey: true, bubbles: true}))", chips[10]
    )
    wait(browser, lambda: "stop=5" in browser.current_url)
    settled(browser)
    view = session.view("generated", {"text": TEXT, "new": 6, "start": 2, "stop": 5})
    assert shown_scores(browser, ".generated .chip") == pytest.approx(view["scores"], abs=1e-6)
    pressed = [chip.get_attribute("aria-pressed") for chip in several(browser, ".generated .chip.new")]
    assert pressed == ["false", "false", "true", "true", "true", "false"]
    several(browser, ".generated .chip")[9].click()
    wait(browser, lambda: "start=3" in browser.current_url)
    settled(browser)
    chips = several(browser, ".generated .chip")
    ActionChains(browser).click_and_hold(chips[8]).move_to_element(chips[10]).release().perform()
    wait(browser, lambda: "start=2&stop=5" in browser.current_url)
    settled(browser)
    one(browser, "#hops [value=all]").click()
    wait(browser, lambda: "hops=all" in browser.current_url)
    settled(browser)
    view = session.view("generated", {"text": TEXT, "new": 6, "start": 2, "stop": 5, "hops": "all"})
    assert shown_scores(browser, ".generated .chip") == pytest.approx(view["scores"], abs=1e-6)
    assert one(browser, ".generated .code").get_attribute("data-code") == view["code"]
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_page_shows_the_tokens_of_a_chat(browser, opened_chat):
    load(browser, opened_chat, text="Return it.")
    one(browser, "#chat").click()
    wait(browser, lambda: "chat=true" in browser.current_url)
    settled(browser)
    tokens = "".join(chip.get_attribute("textContent") for chip in several(browser, ".tokens .chips .chip"))
    assert tokens == "user: Return it.↵assistant:"
    one(browser, "#text").send_keys(" Now.\n")
    settled(browser)
    assert "chat=true" in browser.current_url
    assert one(browser, "#chat").is_selected()


def test_the_page_shows_images(browser, opened_digits, digits, digit_images, tmp_path):
    browser.get("about:blank")
    browser.get(opened_digits.url)
    wait(browser, lambda: one(browser, "#given").is_displayed())
    assert not one(browser, "#text").is_displayed()
    one(browser, "#given [value='2']").click()
    settled(browser)
    session = Session(digits, images=digit_images)
    scores = session.view("tokens", {"image": "2"})["scores"]
    assert shown_scores(browser, ".patches span") == pytest.approx(scores[1:], abs=1e-5)
    one(browser, "#class [value='7']").click()
    wait(browser, lambda: "target=7" in browser.current_url)
    settled(browser)
    scores = session.view("tokens", {"image": "2", "target": 7})["scores"]
    assert shown_scores(browser, ".patches span") == pytest.approx(scores[1:], abs=1e-5)
    assert "Press a token" not in one(browser, ".tokens").text
    assert not several(browser, ".tokens button.chip")
    columns = {text.text.splitlines()[0] for text in several(browser, ".graph svg text.column")}
    assert "CLS" in columns
    assert columns & {f"{row},{column}" for row in range(4) for column in range(4)}
    one(browser, '.components [data-cell="1,0"]').click()
    wait(browser, lambda: several(browser, ".head"))
    file = tmp_path / "digit.png"
    file.write_bytes(file_of((digit_images[1, 0] * 255).byte().numpy()))
    one(browser, "#upload").send_keys(str(file))
    wait(browser, lambda: "image=upload-" in browser.current_url)
    settled(browser)
    assert len(several(browser, ".patches span")) == 16
    file.write_bytes(b"no picture")
    one(browser, "#upload").send_keys(str(file))
    wait(browser, lambda: one(browser, "#error").is_displayed())
    assert "no PNG and no JPEG" in one(browser, "#error").text
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("/api/upload" in message for message in severe)


def test_a_narrow_screen_begins_at_the_answer(browser, opened_digits):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        load(browser, opened_digits, image=1)
        wait(browser, lambda: several(browser, ".graph .t"))
        inside = (
            "const [mark, shell] = ['[data-node=\"target@0\"]', '.graph .scroll']"
            ".map((of) => document.querySelector(of).getBoundingClientRect());"
            "return mark.left >= shell.left && mark.right <= shell.right"
        )
        wait(browser, lambda: browser.execute_script(inside))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_of_these_sticks_out(browser, opened_chat, opened_digits, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        for explorer, state in ((opened_chat, {"text": TEXT, "new": 20}), (opened_digits, {"image": 1})):
            load(browser, explorer, **state)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_written_text_is_text(browser, opened_chat):
    load(browser, opened_chat, text="<img src=x onerror=document.title='hit'>", new=2, chat="true")
    assert browser.title == "demo · Explorer"
    assert not several(browser, ".generated img, .tokens img")
