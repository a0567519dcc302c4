"""Whitening: measures against the formulas by hand, and the filter of a process against the process itself."""

import math

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import demo, whitening
from tensorlens_tl.commands import main
from tensorlens_tl.whitening.measures import SETTLING, activations

pytestmark = pytest.mark.numeric
BATCH, POS, WIDTH = 2000, 48, 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filter_of(radius, seed=0):
    """L lower triangular and M, L⁻¹M of this spectral radius."""
    L = torch.tril(0.3 * normal(WIDTH, WIDTH, seed=seed))
    L.diagonal().copy_(torch.linspace(0.6, 1.4, WIDTH, dtype=torch.float64))
    M = normal(WIDTH, WIDTH, seed=seed + 1)
    return L, radius * M / torch.linalg.eigvals(torch.linalg.solve(L, M)).abs().max()


def moving_average(L, M, batch=BATCH, pos=POS, seed=2):
    """x_i = L e_i + M e_{i−1}: a process whose covariance reaches one position far."""
    noise = normal(batch, pos + 1, len(L), seed=seed)
    return noise[:, 1:] @ L.T + noise[:, :-1] @ M.T


def test_whiteness_by_hand():
    x = normal(40, 3, 2) * torch.tensor([1.0, 5.0])
    covariance = torch.cov(x.flatten(1).T)
    off = ~torch.eye(6, dtype=torch.bool)
    made = whitening.whiteness(x)
    assert math.isclose(
        made.covariance, float(covariance[off].abs().mean() / covariance.diagonal().mean()), rel_tol=1e-12
    )
    assert math.isclose(made.correlation, float(torch.corrcoef(x.flatten(1).T)[off].abs().mean()), rel_tol=1e-12)
    in_chunks = whitening.whiteness(x, memory=200)
    for whole, summed in zip(made, in_chunks, strict=True):
        assert math.isclose(whole, summed, rel_tol=1e-12)


def test_stationarity_by_hand():
    x = normal(12, 5, 3)
    steps = torch.stack([torch.cov(torch.cat([x[:, t], x[:, t + 1]], dim=1).T)[:3, 3:] for t in range(4)])
    deviation = sum(float((step - steps.mean(0)).norm()) for step in steps)
    made = whitening.stationarity(x)
    assert math.isclose(made.rho, deviation, rel_tol=1e-12)
    assert math.isclose(made.relative, deviation / sum(float(step.norm()) for step in steps), rel_tol=1e-12)


def test_what_noise_alone_gives():
    for batch in (20, 200, 2000):
        found = whitening.whiteness(normal(batch, 10, 8))
        assert abs(found.correlation / found.floor - 1) < 0.03
        assert abs(found.covariance / found.floor - 1) < 0.05
    unequal = whitening.whiteness(normal(200, 10, 8) * torch.linspace(0.1, 10, 8))
    assert unequal.covariance < 0.9 * unequal.floor  # unequal variances look white; correlations do not fall for it
    assert abs(unequal.correlation / unequal.floor - 1) < 0.05


def test_stationarity_tells_a_changing_process_from_noise():
    L, M = filter_of(0.5)
    steady = whitening.stationarity(moving_average(L, M, batch=1000))
    strength = torch.linspace(0.2, 1.8, POS, dtype=torch.float64)[:, None]
    changing = whitening.stationarity(moving_average(L, M, batch=1000) * strength)
    assert steady.rho_without_noise < 0.4 * steady.rho
    assert steady.relative_without_noise < 0.1
    noise = whitening.stationarity(normal(200, 12, 4))
    assert noise.rho_without_noise < 0.5 * noise.rho
    assert math.isnan(noise.relative_without_noise) or noise.relative_without_noise < 1
    few = whitening.stationarity(normal(5, 5, 3))
    assert not few.relative_without_noise > 10
    assert changing.relative_without_noise > 0.4
    assert abs(changing.rho_without_noise / changing.rho - 1) < 0.2


@pytest.mark.parametrize("radius", [0.3, 0.6, 0.8])
def test_a_moving_average_is_whitened(radius):
    """The first positions aside: there the recursion has not settled."""
    L, M = filter_of(radius)
    x = moving_average(L, M)
    fitted = whitening.estimate(x)
    assert abs(fitted.radius - radius) < 0.02
    assert float((torch.linalg.inv(fitted.L_inv) - L).norm() / L.norm()) < 0.02
    start = POS // 2
    before, after = whitening.whiteness(x[:, start:]), whitening.whiteness(fitted(x)[:, start:])
    assert before.covariance > 1.3 * before.floor
    assert abs(after.covariance / after.floor - 1) < 0.02
    assert abs(after.correlation / after.floor - 1) < 0.02


def test_the_filter_is_the_literal_recursion():
    fitted = whitening.estimate(moving_average(*filter_of(0.6), batch=50))
    x, rows = normal(2, 9, WIDTH), []
    for i in range(9):
        past = fitted.M @ rows[-1].mT if rows else torch.zeros(WIDTH, 2, dtype=torch.float64)
        rows.append((fitted.L_inv @ ((x[:, i] - fitted.mean).mT - past)).mT)
    assert torch.allclose(fitted(x), torch.stack(rows, dim=1), rtol=0, atol=1e-12)


def test_what_does_not_vary_is_left_out_whatever_the_dtype():
    x = normal(201, 17, 8)
    x[:, 0] = 3.0 + normal(8)
    alone = whitening.whiteness(x[:, 1:])
    assert whitening.whiteness(x) == pytest.approx(tuple(alone))
    assert whitening.whiteness(x.float()) == pytest.approx(tuple(alone), rel=1e-4)


def test_a_process_that_reaches_farther_is_refused_and_may_be_shrunk():
    noise, rows = normal(400, 60, 3), [torch.zeros(400, 3, dtype=torch.float64)]
    for i in range(60):
        rows.append(0.95 * rows[-1] + noise[:, i])
    x = torch.stack(rows[30:], dim=1)
    with pytest.raises(tlens.InvalidInputError, match="smaller reach="):
        whitening.estimate(x)
    shrunk = whitening.estimate(x, reach="auto")
    assert 0.3 < shrunk.reach < 0.6
    with pytest.raises(tlens.InvalidInputError, match="smaller reach="):
        whitening.estimate(x, reach=shrunk.reach + 0.15)
    assert torch.equal(whitening.estimate(x, reach=shrunk.reach).M, shrunk.M)
    assert whitening.whiteness(shrunk(x)).correlation < whitening.whiteness(x).correlation


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: whitening.whiteness(x[:3]), "3 sequences"),
        (lambda x: whitening.whiteness(0 * x), "that vary"),
        (lambda x: whitening.stationarity(x[:, :2]), "3 or more"),
        (lambda x: whitening.estimate(x[:, :1]), "2 positions"),
        (lambda x: whitening.estimate(x.numpy()), "got ndarray"),
        (lambda x: whitening.whiteness(x.tolist()), "got list"),
        (lambda x: whitening.estimate(x)(x[..., :2]), "vectors of 3 numbers"),
        (lambda x: whitening.estimate(x, reach=1.5), "reach=1.5"),
        (lambda x: whitening.estimate(x, ridge=-1), "ridge=-1"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(tlens.InvalidInputError, match=words):
        call(normal(8, 5, 3))


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/opt", "bridge/bert", "bridge/gemma2"])
def test_the_stream_of_a_model(name, model):
    tokens = some_tokens(batch=40, pos=5)
    frozen = tlens.freeze(model, tokens)
    table = whitening.measure(model, tokens)
    assert len(table) == frozen.n_layers + 1
    for layer, row in enumerate(table.itertuples(index=False)):
        white, steady = whitening.whiteness(frozen.resid_pre(layer)), whitening.stationarity(frozen.resid_pre(layer))
        assert row[:3] == pytest.approx(tuple(white), rel=1e-6)
        assert row[3:] == pytest.approx(tuple(steady), rel=1e-5, nan_ok=True)
    point = frozen.points.blocks[1].resid_pre
    assert whitening.measure(model, tokens, point).equals(table.loc[[point]])


def test_the_stream_of_a_model_of_images():
    """Its positions are patches; batches of prompts were read again from their numbers, as token ids."""
    model = tlens.load_demo_model("digits")
    images = demo.digit_images()[0][:40]  # more than run at once
    name = "blocks.1.hook_resid_pre"
    with torch.no_grad():
        _, cache = model.run_with_cache(images, names_filter=name)
    table = whitening.measure(model, images, name)
    varies = (cache[name] - cache[name][:1]).abs().amax((0, 2)) > 1e-6
    expected = whitening.whiteness(cache[name][:, varies])
    assert table.loc[name, "of correlations"] == pytest.approx(expected.correlation, rel=1e-4)


def test_what_cannot_be_measured_is_refused(model_named):
    model = model_named("bridge/gpt2")
    with pytest.raises(tlens.InvalidInputError, match="3 to 5 tokens"):
        whitening.measure(model, [[3, 4, 5], [3, 4, 5, 6, 7]])
    with pytest.raises(tlens.InvalidInputError, match="not one vector"):
        whitening.measure(model, some_tokens(8), "blocks.0.attn.hook_pattern")
    with pytest.raises(tlens.InvalidInputError, match=r"'blocks\.0\.hook_resid_pre'\?"):
        whitening.measure(model, some_tokens(8), "blocks.0.hook_resid_per")


@pytest.mark.parametrize("name", ["language", "whitened"])
def test_filters_make_the_stream_of_an_embedded_model_whiter(name):
    model = tlens.load_demo_model(name)
    tokens = demo.held_out_prompts(model, 400, 11)
    points = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(2)), "blocks.1.hook_resid_post"]
    filters = whitening.stream_filters(model, tokens[::2], points)
    before = whitening.measure(model, tokens[1::2], points)
    after = whitening.measure(model, tokens[1::2], filters=filters)
    assert list(after.index) == points
    excess = [(table["of correlations"] / table["floor"] - 1) for table in (before, after)]
    assert bool((excess[1] < 0.9 * excess[0]).all())
    assert excess[1].mean() < 0.6 * excess[0].mean()
    x = activations(model, tokens[1::2], points)
    assert before.equals(whitening.measure(model, tokens[1::2], points, skip=0))  # the first token is in neither
    own = whitening.whiteness(filters[points[1]](x[points[1]])[:, SETTLING:])
    assert after["whiteness"].iloc[1] == pytest.approx(own.covariance)
    drawn = whitening.picture(before, after, "Ψ")
    assert "of correlations, filtered" in drawn.body
    assert drawn.body.count("<svg") == 2
    with pytest.raises(tlens.InvalidInputError, match="filters: none for"):
        whitening.measure(model, tokens, "blocks.0.hook_resid_mid", filters=filters)
    with pytest.raises(tlens.InvalidInputError, match="leave 2 positions"):
        whitening.measure(model, tokens[:, :6], filters=filters)


def test_filters_are_a_start_for_whitening():
    model = tlens.load_demo_model()
    filters = whitening.stream_filters(model, demo.held_out_prompts(model, 200, 11))
    tlens.whiten(model, init=filters)
    for layer, block in enumerate(model.blocks):
        made = filters[f"blocks.{layer}.hook_resid_pre"]
        assert torch.allclose(block.whitening.L_inv.weight, made.L_inv.float())
    for wrong, message in (({}, "it needs blocks.0"), ([filters], "1 filters")):
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.whiten(tlens.load_demo_model(), init=wrong)
    for wrong, message in (
        ({"hooks": []}, "hooks: none"),
        ({"hooks": [0]}, "no hook point 0"),
        ({"filters": [1]}, "filters: pass"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            whitening.measure(model, some_tokens(8), **wrong)


def test_pictures_of_something_else_are_refused():
    table = whitening.measure(tlens.load_demo_model("whitened"), some_tokens(8))
    for wrong in ((table[["rho"]],), (table[:1],), (table, table[::-1])):
        with pytest.raises(tlens.InvalidInputError, match="picture: pass tables of"):
            whitening.picture(*wrong)


def test_the_command(tmp_path, capsys):
    words = ["whiteness", "--model", "demo:whitened", "-n", "24", "--length", "8"]
    assert main([*words, "--filters", "-o", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "12 prompts of 9 tokens, the first 4 left out" in printed
    assert "blocks.1.whitening.hook_in: WhiteningFilter(d=32" in printed
    assert "filtered" in (tmp_path / "page.html").read_text(encoding="utf-8")
    text = tmp_path / "lines.txt"
    text.write_text("The first of the lines\nshort\n" * 3 + "Another line of text\n" * 2, encoding="utf-8")
    asked = [*words[:3], "--prompts", str(text), "--length", "9", "-o", str(tmp_path / "table.csv")]
    assert main([*asked, "--hooks", "blocks.0.whitening.hook_in", "blocks.0.whitening.hook_out"]) == 0
    assert "5 prompts of 9 tokens" in capsys.readouterr().out
    assert "blocks.0.whitening.hook_out" in (tmp_path / "table.csv").read_text(encoding="utf-8")
    for wrong, message in (
        (["--prompts", str(text), "--length", "60"], "none of 8 lines has 60 tokens"),
        (["--prompts", str(tmp_path / "no")], "there is no 'no'"),
        (["-o", str(tmp_path / "table.txt")], "end its name in .html or .csv"),
        (["-o", str(tmp_path / "a.html"), "--hooks", "blocks.0.hook_resid_pre"], "2 hook points or more"),
        (["-n", "6", "--filters"], "6 prompts; at least 8 are needed with --filters"),
        (["--length", "5000"], "the model reads 128 tokens"),
    ):
        assert main([*words[:3], *wrong]) == 1
        assert message in capsys.readouterr().err
    assert main(["whiteness", "--model", "demo:recall"]) == 1
    assert "has no text of its own" in capsys.readouterr().err


def test_values_that_are_not_finite_are_refused():
    for measure in (whitening.whiteness, whitening.stationarity):
        with pytest.raises(tlens.NumericalError, match="not finite"):
            measure(normal(8, 5, 3) / 0)
