"""What compression costs: against a computation by hand, on every kind of task; and the command line."""

import re

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import commands, compress, demo, evaluate
from tensorlens_tl.testing import model_names, tiny_model

HOOKED = any(name.startswith("hooked/") for name in model_names())


@pytest.fixture(scope="module")
def recall():
    return tlens.load_demo_model("recall")


@pytest.fixture(scope="module")
def task():
    return evaluate.recall(24)


def by_hand(model, tokens, answers, plan=None):
    """Loss and accuracy of every prompt, from the model's own logits at asked positions."""
    with torch.no_grad():
        if plan is None:
            logits = model(tokens)
        else:
            with plan.applied():
                logits = model(tokens)
    asked = answers != -100
    loss = torch.nn.functional.cross_entropy(logits.double().mT, answers, reduction="none")
    right = (logits.argmax(-1) == answers).double()
    return torch.stack([(part * asked).sum(1) / asked.sum(1) for part in (loss, right)])


def last_only(task):
    answers = torch.full_like(task.tokens, -100)
    answers[:, -1] = task.answers
    return answers


def test_every_kind_of_task_against_a_computation_by_hand(recall, task):
    plan = compress.plan(recall, ratio=2, balance=True)
    shifted = torch.full_like(task.tokens, -100)
    shifted[:, :-1] = task.tokens[:, 1:]
    for asked, answers in (
        (task, last_only(task)),
        ((task.tokens, last_only(task)), last_only(task)),
        (task.tokens, shifted),
        ([row.tolist() for row in task.tokens], shifted),
    ):
        result = evaluate.compression(recall, asked, {"half": plan})
        before, after = by_hand(recall, task.tokens, answers), by_hand(recall, task.tokens, answers, plan)
        assert list(result.metrics) == ["added loss", "accuracy change", "loss", "accuracy"]
        assert result.methods == ["uncompressed", "half"]
        expected = torch.stack([torch.cat([0 * before, before]), torch.cat([after - before, after])], dim=1)
        assert torch.allclose(result.values, expected, rtol=0, atol=1e-5)
        assert result.curves is None


def test_prompts_of_different_length_count_their_own_tokens(recall):
    rows = [list(range(3, 12)), list(range(5, 10))]
    result = evaluate.compression(recall, rows, {"half": compress.plan(recall, ratio=2)})
    for number, row in enumerate(rows):
        tokens = torch.tensor([row])
        answers = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
        assert torch.allclose(result.values[2:, 0, number], by_hand(recall, tokens, answers)[:, 0], atol=1e-5)


def test_a_masked_models_answers():
    encoder = tlens.load_demo_model("encoder")
    whole, masked = demo.held_out_prompts(encoder, 8, 24), demo.held_out_prompts(encoder, 8, 24, mask_at=9)
    answers = torch.where(masked != whole, whole, -100)
    answers[:, 9] = whole[:, 9]
    result = evaluate.compression(
        encoder, (masked, answers), {"svd": compress.plan(encoder, method="circuit-svd", ratio=2)}
    )
    assert torch.allclose(result.values[2:, 0], by_hand(encoder, masked, answers), atol=1e-4)


def test_ratios_give_curves_and_a_table(recall, task):
    plans = {
        label: {ratio: compress.plan(recall, ratio=ratio, **options) for ratio in (4, 1.5)}
        for label, options in {"laser": {"method": "laser"}, "tucker": {}}.items()
    }
    result = evaluate.compression(recall, task, plans)
    assert result.axis.tolist() == [1.5, 4]
    assert torch.allclose(result.values, result.curves.mean(-1))
    table = evaluate.compression_table(result)
    assert list(table.index) == ["uncompressed", "laser", "tucker"]
    assert bool((table.loc["uncompressed"] == 0).all())
    for label, by_ratio in plans.items():
        for ratio, plan in by_ratio.items():
            added = by_hand(recall, task.tokens, last_only(task), plan) - by_hand(recall, task.tokens, last_only(task))
            assert abs(table.loc[label, (f"{ratio:g}", "mean")] - float(added[0].mean())) < 1e-5
            low, high = table.loc[label, (f"{ratio:g}", "low")], table.loc[label, (f"{ratio:g}", "high")]
            assert low <= table.loc[label, (f"{ratio:g}", "mean")] <= high
    assert "compression ratio" in result.to_html()
    assert result.compare("laser", "tucker", "added loss").difference < 0


def test_what_is_chosen_is_not_reported(recall, task):
    candidates = [compress.plan(recall, layer, ratio=ratio) for layer in (0, 1) for ratio in (1.3, 6)]
    result = evaluate.compression(recall, task, {"best": candidates, "one": candidates[3]}, validation=0.25)
    assert result.settings["validation"] == 6
    assert result.settings["prompts"] == len(result.units) == 18
    reported = {int(unit.removeprefix("prompt ")) for unit in result.units}
    chosen_on = sorted(set(range(24)) - reported)
    answers = last_only(task)
    losses = [by_hand(recall, task.tokens[chosen_on], answers[chosen_on], plan)[0].mean() for plan in candidates]
    best = candidates[int(torch.stack(losses).argmin())]
    assert result.settings["chosen"]["best"] == [f"{best.label}, layers {list(best.layers)}, ratio {best.ratio:.3g}"]
    kept = sorted(reported)
    assert torch.allclose(result.values[2, 1], by_hand(recall, task.tokens[kept], answers[kept], best)[0], atol=1e-5)
    lazy = evaluate.compression(
        recall, task, {"best": [lambda plan=plan: plan for plan in candidates]}, validation=0.25
    )
    assert torch.equal(lazy.values[:, 1], result.values[:, 1])
    by_accuracy = evaluate.compression(recall, task, {"best": candidates}, choose_by="accuracy")
    assert by_accuracy.settings["validation"] == 8


def test_refusals(recall, task):
    plan = compress.plan(recall, ratio=2)
    other = compress.plan(tlens.load_demo_model("brackets"), ratio=2)
    for arguments, words in (
        ((task, {}), "pass a table"),
        ((task, plan), "pass a table"),
        ((task, {"uncompressed": plan}), "use another label"),
        ((task, {"a": []}), "without any"),
        ((task, {"a": {2: plan}, "b": {4: plan}}), "the same ratios"),
        ((task, {"a": {2: plan}, "b": plan}), "the same ratios"),
        ((task, {"a": 5}), "pass what compress.plan made"),
        ((task, {"a": other}), "another model"),
        ((task.only(torch.arange(24) < 1), {"a": [plan, plan]}), "too few"),
        ((torch.tensor([[5]]), {"a": plan}), "one token"),
        (((task.tokens, task.tokens[:, :2]), {"a": plan}), "must be [prompt, pos]"),
        (((task.tokens, task.tokens + 1000), {"a": plan}), "outside the vocabulary"),
        (((task.tokens, task.tokens.clamp_max(3) - 5), {"a": plan}), "outside the vocabulary"),
        (((task.tokens[0], task.answers[:29]), {"a": plan}), "must be [prompt, pos]"),
        ((task, {"a": {100: plan}}), "holds a plan of ratio 2"),
        (((task.tokens, torch.full_like(task.tokens, -100)), {"a": plan}), "at least one answer"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=re.escape(words)):
            evaluate.compression(recall, *arguments)
    for options, words in (
        ({"validation": 1.5}, "validation"),
        ({"validation": 0}, "validation"),
        ({"choose_by": "size"}, "choose_by"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=words):
            evaluate.compression(recall, task, {"a": [plan, plan]}, **options)
    with pytest.raises(tlens.InvalidInputError, match="without ratios"):
        evaluate.compression_table(evaluate.compression(recall, task, {"a": plan}))
    frozen = tlens.freeze(recall, task.tokens)
    with frozen.attached(), pytest.raises(tlens.FrozenModelError, match="attached"):
        evaluate.compression(recall, task, {"a": plan})
    if HOOKED:
        encoder = tiny_model("encoder/bert")
        del encoder.unembed
        with pytest.raises(tlens.UnsupportedModelError, match="predicts no tokens"):
            evaluate.compression(encoder, task.tokens, {"a": compress.plan(encoder, ratio=2)})


# ------------------------------------------------------------------ the command line


def test_command_line(capsys, tmp_path):
    from tensorlens_tl.commands import compress as command

    assert tuple(compress.METHODS) == command.METHODS  # written twice: help comes without an import of torch
    words = ["compress", "--model", "demo:recall", "-n", "8", "--ratio", "2"]
    page, plan = tmp_path / "costs.html", tmp_path / "plan.safetensors"
    assert commands.main([*words, "--methods", "laser", "tucker", "--gauge", "circuit", "-o", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "uncompressed: loss" in shown
    assert "added loss by compression ratio" in shown
    assert "accuracy change" in page.read_text(encoding="utf-8")
    assert commands.main([*words, "--methods", "circuit-svd", "--layers", "1", "--save", str(plan)]) == 0
    model = tlens.load_demo_model("recall")
    assert list(compress.Plan.load(plan, model).layers) == [1]
    lines = tmp_path / "lines.txt"
    lines.write_text("The file was not found.\nReturn the value of the key.\n", encoding="utf-8")
    assert commands.main(["compress", "--prompts", str(lines), "--methods", "head-svd", "--mlp", "0.5"]) == 0
    assert "on 2 prompts (next tokens)" in capsys.readouterr().out


def test_command_line_leaves_out_what_does_not_fit(capsys, monkeypatch, tmp_path):
    rotary = tiny_model("bridge/llama")
    monkeypatch.setattr("tensorlens_tl.commands.shared.loaded_model", lambda args: rotary)
    words = ["compress", "--model", "demo:recall", "--ratio", "1.5"]
    monkeypatch.setattr("tensorlens_tl.commands.compress._task", lambda args, model: torch.arange(3, 9)[None])
    assert commands.main(words) == 0
    shown = capsys.readouterr().out
    assert "circuit-svd is left out" in shown
    assert "ratios reached: tucker" in shown
    assert commands.main([*words, "--methods", "circuit-svd"]) == 1
    assert "not free here" in capsys.readouterr().err
    assert commands.main(["compress", "--save", str(tmp_path / "no" / "plan")]) == 1
    assert "--save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "plan.safetensors"], "one plan"),
        (["--methods", "laser", "--balance"], "--balance: it is for tucker"),
        (["--ratio", "1e9"], "the largest here is"),
        (["--ratio", "0.5"], "at least 1"),
        (["--methods", "laser", "--ratio", "2", "--save", "plan.html"], "no page"),
        (["--matrices", "XY"], "--matrices 'XY'"),
        (["--task", "recall", "--prompts", __file__], "pass one of them"),
        (["--layers", "9"], "--layers 9"),
    ],
)
def test_command_line_refusals(words, message, capsys):
    assert commands.main(["compress", "--model", "demo:recall", "-n", "4", *words]) == 1
    assert message in capsys.readouterr().err
