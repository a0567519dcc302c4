"""Heat maps of images: what is drawn is the image and the scores that were given, at any size, and nothing else."""

import base64
import html as html_module
import re
import struct
import zlib

import numpy as np
import pytest

import tensorlens_tl as tlens
from tensorlens_tl.drawing import heat_maps, marks

NASTY = "<img src=x onerror=alert(1)> \"'></svg><script>alert(2)</script>"


def decoded(uri):
    """Pixels `[row, column, channel]` of a PNG in grey or colour, by the format's own rules."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, kind, *others = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, others) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3}[kind]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + channels * width)
    assert not rows[:, 0].any()  # no filter
    return rows[:, 1:].reshape(height, width, channels)


def pictures(html):
    """The greys under the scores, and the image beside them."""
    return [decoded(uri) for uri in re.findall(r'href="(data:[^"]*)"', html)]


def rectangles(html):
    """Left, top, width and height of every patch, and its label."""
    found = re.findall(r'<rect class="t" x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)".*?aria-label="(.*?)">', html)
    return np.array([list(map(float, place)) for *place, _ in found]), [label for *_, label in found]


def made(shape=(1, 8, 8), grid=(4, 4), **options):
    rng = np.random.default_rng(0)
    image, scores = rng.normal(size=shape), rng.normal(size=grid)
    return image, scores, heat_maps.patch_scores(image, scores, title="digit", **options)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_image_survives(channels):
    """Rescaled to the whole range of a byte; below the scores its brightness alone."""
    image, _, html = made((channels, 6, 10), (3, 2))
    under, beside = pictures(html)
    wanted = 255 * (image - image.min()) / (image.max() - image.min())
    assert np.abs(beside - wanted.transpose(1, 2, 0)).max() <= 0.5
    assert (beside.min(), beside.max()) == (0, 255)
    weights = [1.0] if channels == 1 else [0.299, 0.587, 0.114]
    brightness = np.tensordot(weights, wanted, 1) / 255
    span = heat_maps.LIGHTEST - heat_maps.DARKEST
    assert np.abs(under[..., 0] - (heat_maps.DARKEST + span * brightness)).max() <= 1
    assert under.shape == (6, 10, 1)


@pytest.mark.parametrize("value", [0.0, -3.5, 1e9])
def test_an_image_without_differences_is_middle_grey(value):
    html = heat_maps.patch_scores(np.full((1, 4, 4), value), np.eye(2), title="flat")
    assert set(pictures(html)[1].flat) == {128}


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 700), (1, 1500, 9), (1, 1281, 1281)])
def test_images_of_any_size(shape):
    """Large ones are reduced to means of blocks, in the image's own coordinates: their mean stays."""
    image = np.linspace(0, 1, np.prod(shape)).reshape(shape)
    html = heat_maps.patch_scores(image, np.ones((1, 1)), title="size")
    _, beside = pictures(html)
    assert max(beside.shape) <= max(heat_maps.LARGEST, 3)
    assert f'viewBox="0 0 {shape[2]} {shape[1]}"' in html
    assert len(html) < 1_000_000
    if image.size > 1:
        assert beside.mean() / 255 == pytest.approx(image.mean(), abs=0.01)


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (2, 5), (3, 7), (16, 1)])
def test_patches_cover_the_image_once_with_their_own_scores(grid):
    _, scores, html = made((3, 16, 20), grid)
    places, labels = rectangles(html)
    assert len(places) == scores.size
    for (row, column), (x, y, w, h), label in zip(np.ndindex(grid), places, labels, strict=True):
        assert (x, y) == pytest.approx((column * 20 / grid[1], row * 16 / grid[0]), abs=1e-4)
        assert (w, h) == pytest.approx((20 / grid[1], 16 / grid[0]), abs=1e-4)
        assert label == f"row {row}, column {column}: {marks.number(scores[row, column])}"
    assert float((places[:, 2] * places[:, 3]).sum()) == pytest.approx(16 * 20, rel=1e-4)
    assert html.count('tabindex="0"') == 1


def test_colours_have_the_signs_and_sizes_of_the_scores():
    html = heat_maps.patch_scores(np.zeros((1, 2, 4)), np.array([[2.0, -1.0, 0.0, -4.0]]), title="signs")
    fills = re.findall(r'fill="rgb\((.*?)\)" fill-opacity="(.*?)"', html)
    blue, orange = (",".join(map(str, rgb)) for rgb in (marks.POSITIVE, marks.NEGATIVE))
    assert [(rgb, float(part)) for rgb, part in fills] == [
        (blue, pytest.approx(marks.STRONGEST / 2, abs=1e-3)),
        (orange, pytest.approx(marks.STRONGEST / 4, abs=1e-3)),
        (blue, 0.0),
        (orange, marks.STRONGEST),
    ]
    assert marks.colour_bar(np.array([-4.0, 2.0])) in html


def test_tokens_that_are_no_patch_are_named_with_their_scores():
    _, _, html = made(special={"CLS": 0.25, "distillation": -1e6})
    marked = re.findall(r'<span style="background:rgba\(([^"]*)\)">(.*?)</span>', html)
    assert [text for _, text in marked] == ["CLS +0.25", "distillation -1e+06"]
    assert float(marked[1][0].split(",")[-1]) == marks.STRONGEST  # beyond the patches' scale
    assert "no patch" not in made()[2]


def test_what_is_given_as_text_stays_text():
    html = made(special={NASTY: 1.0})[2] + heat_maps.patch_scores(np.zeros((1, 2, 2)), np.zeros((1, 1)), title=NASTY)
    assert "<img" not in html
    assert "<script" not in html
    assert html_module.unescape(html).count(NASTY) == 3  # the title is also the picture's name
    assert "http" not in html


@pytest.mark.parametrize(
    ("image", "scores", "special", "message"),
    [
        (np.zeros((4, 4)), np.zeros((2, 2)), None, r"the image has shape \[4, 4\]"),
        (np.zeros((2, 4, 4)), np.zeros((2, 2)), None, "one channel .* or three"),
        (np.zeros((1, 0, 4)), np.zeros((2, 2)), None, "the image has shape"),
        (np.zeros((1, 4, 4)), np.zeros(4), None, r"scores have shape \[4\]"),
        (np.zeros((1, 4, 4)), np.zeros((0, 2)), None, "scores have shape"),
        (np.full((1, 4, 4), np.nan), np.zeros((2, 2)), None, "the image must be finite"),
        (np.zeros((1, 4, 4)), np.array([[np.nan]]), None, "scores must be finite"),
        (np.zeros((1, 4, 4)), np.array([[np.inf]]), None, "scores must be finite"),
        (np.zeros((1, 4, 4)), np.zeros((2, 2)), {"CLS": np.nan}, "the score of CLS must be finite"),
    ],
)
def test_bad_images_and_scores_are_refused(image, scores, special, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        heat_maps.patch_scores(image, scores, title="x", special=special)
