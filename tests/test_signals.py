"""Models of images and sound, and multimodal ones: exact as language models are, down to the pixels."""

import pytest
import torch
from conftest import close, hooks_left
from transformer_lens.hook_points import HookPoint

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.testing import check_method, check_model, model_names, tiny_model
from tensorlens_tl.testing.models import random_input

pytestmark = pytest.mark.numeric
DEFAULT = ("bridge/vit", "bridge/ast")
SIGNALS = [
    pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.whole, id=name) for name in model_names("signals")
]
CLASSIFIERS = [case for case in SIGNALS if case.values[0] in (*DEFAULT, "bridge/deit")]

TARGETED = {
    "alti-logit", "input-x-gradient", "integrated-gradients", "chefer", "leave-one-out", "relp", "attnlrp", "cp-lrp",
    "gim",
}  # fmt: skip
_made = {}


@pytest.fixture
def frozen(signal):
    if signal not in _made:
        model = tiny_model(signal)
        _made[signal] = tlens.freeze(model, random_input(model, 8, torch.Generator().manual_seed(1)))
    yield _made[signal]
    assert not hooks_left(_made[signal].model)


@pytest.fixture(scope="module")
def digits():
    return tlens.load_demo_model("digits", dtype=torch.float64)


@pytest.mark.parametrize("signal", SIGNALS)
def test_everything_a_pass_promises(frozen):
    report = check_model(frozen.model)
    assert max(report.errors.values()) < 1e-9
    assert not report.refused


@pytest.mark.whole
@pytest.mark.parametrize("signal", model_names("signals"))
def test_every_method_holds_or_refuses_by_name(frozen):
    refused = {}
    for method in tlens.list_methods():
        options = {"target": 2} if method in TARGETED else {}
        options |= {"steps": 2} if method == "integrated-gradients" else {}
        for why in check_method(method, frozen.model, options=options).values():
            refused[method] = why
    headless = frozen.view.unembedding is None
    assert set(refused) == (TARGETED if headless else set())
    assert all("predicts no tokens" in why for why in refused.values())


@pytest.mark.parametrize("method", tlens.list_methods())
def test_methods_run_on_images(digits, method):
    images, _ = tlens.demo.digit_images()
    options = {"target": "3"} if method in TARGETED else {}
    options |= {"steps": 2} if method == "integrated-gradients" else {}
    attribution = tlens.attribute(digits, images[:2], method=method, **options)
    assert bool(torch.isfinite(attribution.scores).all())
    assert attribution.tokens[0][:2] == [" CLS", " patch 0,0"]


@pytest.mark.parametrize("signal", CLASSIFIERS)
def test_classes_are_read_where_the_model_reads_them(frozen):
    own = frozen.model(**frozen.inputs).detach()
    assert close(frozen.last_logits, own)
    op = frozen.operator()
    target = op.target("LABEL_3", minus=1)
    assert target.total.shape == (2, 1)
    assert close(target.total[:, 0], own[:, 3] - own[:, 1])
    assert float(target.gap.max()) < 1e-12
    assert tlens.attribute(frozen, target=3).queries.tolist() == [[0], [0]]
    assert tlens.attribute(frozen, target=3).target == "logit of 'LABEL_3'"
    for query in (1, slice(0, 2), "all"):
        with pytest.raises(tlens.InvalidInputError, match="only at position 0; use query=0"):
            op.target(3, query=query)
    for label in ("LABEL_9", "3"):
        with pytest.raises(tlens.InvalidInputError, match="is no class of this model"):
            op.target(label)
    last = frozen.tokens.shape[1] - 1
    vector = torch.randn(frozen.output.shape[-1], dtype=torch.float64)
    assert close(op.target(direction=vector, query=last).total[:, 0], frozen.output[:, -1] @ vector)
    # -1 asks about the class, but as a key it is the last patch
    assert torch.equal(op.contributions(-1, keys=-1), op.contributions(0, keys=last))


@pytest.mark.parametrize("signal", CLASSIFIERS)
def test_circuits_sum_to_the_logit(frozen):
    own = frozen.model(**frozen.inputs).detach()[:, 3]
    for by in ("component", "head", "head_token"):
        assert close(circuits.logit_attribution(frozen, 3, by=by).scores.sum(-1)[:, 0], own)
    live = circuits.total_effects(frozen, 3, live=True)
    assert close(live.total[:, 0], own)


@pytest.mark.parametrize("signal", CLASSIFIERS)
def test_pixels_are_those_of_the_held_model(frozen):
    """The held model from its own input, by autograd: another computation that knows nothing of the patch embedding."""
    pixels = tlens.pixel_scores(frozen, 3)
    x = frozen.inputs["input"].clone().requires_grad_(True)
    with frozen.attached() as held:
        logits = held(x)[:, 3]
        (gradient,) = torch.autograd.grad(logits.sum(), x)
        nothing = held(torch.zeros_like(x))[:, 3].detach()
    assert close(pixels.scores[:, 0], gradient * x.detach())
    assert close(pixels.bias[:, 0], nothing)
    assert close(pixels.scores.flatten(1).sum(1, keepdim=True) + pixels.bias, frozen.model(x).detach()[:, [3]])
    assert float(pixels.gap.max()) < 1e-12
    embedding = tlens.patch_embedding(frozen)
    assert embedding.error < 1e-12
    g = torch.randn(3, *frozen.resid_pre(0).shape, dtype=torch.float64)
    noise = torch.randn_like(x)
    forward = (embedding.push(noise) * g).sum((-2, -1))
    assert close(forward, (embedding.pull(g) * noise).flatten(2).sum(-1))
    vector = torch.randn(frozen.output.shape[-1], dtype=torch.float64)
    some = tlens.pixel_scores(frozen, direction=vector, query=[0, 2])
    assert close(some.total, frozen.output[:, [0, 2]] @ vector)
    assert float(some.gap.max()) < 1e-12


# ------------------------------------------------------------------ two images

FLOAT32 = 1e-6
"""The softmax of these Bridges computes in float32 whatever the dtype, so that scores give patterns to that alone."""


def two_images(model, seeds=(1, 2)):
    return [tlens.freeze(model, random_input(model, 8, torch.Generator().manual_seed(seed))) for seed in seeds]


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_difference_of_two_signals_is_that_of_the_live_models(signal):
    a, b = two_images(tiny_model(signal))
    change = tlens.difference(a, b)
    assert max(change.errors.values()) < FLOAT32
    query = 0 if a.prompt.class_at == 0 else -1
    vector = torch.randn(a.output.shape[-1], dtype=torch.float64)
    along = tlens.methods.difference(change, direction=vector, query=query)
    assert close(along.scores.sum(-1)[:, 0], (a.output - b.output)[:, query] @ vector, FLOAT32)
    if a.view.unembedding is not None:
        live = [frozen.model(**frozen.inputs).detach() for frozen in (a, b)]
        logits = [out if out.ndim == 2 else out[:, -1] for out in live]
        result = tlens.attribute(change, 3, minus=1)
        moved = logits[0] - logits[1]
        assert close((result.scores.sum(-1) + result.bias)[:, 0], moved[:, 3] - moved[:, 1], FLOAT32)


@pytest.mark.parametrize("signal", CLASSIFIERS)
def test_the_change_of_pixels_sums_to_the_change_of_the_logit(signal):
    model = tiny_model(signal)
    a, b = two_images(model)
    change = tlens.difference(a, b)
    pixels = tlens.pixel_scores(change, 3)
    live = [model(**frozen.inputs).detach()[:, 3] for frozen in (a, b)]
    assert close(pixels.scores.flatten(1).sum(1), live[0] - live[1], FLOAT32)
    assert not pixels.bias.abs().max() > 1e-12
    assert float(pixels.gap.max()) < FLOAT32
    assert pixels.target == "change of the logit of 'LABEL_3'" if a.view.labels else "change" in pixels.target
    back = tlens.pixel_scores(tlens.difference(b, a), 3)
    assert close(back.scores, -pixels.scores, 1e-12)
    # where both are one image the change is the live model's gradient
    x = a.inputs["input"].clone().requires_grad_(True)
    size = 1e-7
    step = torch.randn_like(x)
    near = tlens.freeze(model, (x + size * step).detach())
    (gradient,) = torch.autograd.grad(model(x)[:, 3].sum(), x)
    few = tlens.pixel_scores(tlens.difference(near, a), 3).scores[:, 0] / size
    assert close(few, gradient * step, 1e-5)
    with pytest.raises(tlens.InvalidInputError, match=r"difference\.a"):
        tlens.patch_embedding(change)


def test_pixels_that_are_the_same_give_nothing(digits):
    images, _ = tlens.demo.digit_images()
    image = images[:1].double()
    other = image.clone()
    other[..., 2:4, 5] = 1 - other[..., 2:4, 5]
    pixels = tlens.pixel_scores(tlens.difference(*(tlens.freeze(digits, x) for x in (image, other))), "8")
    nonzero = pixels.scores[0, 0, 0] != 0
    assert nonzero.nonzero().tolist() == [[2, 5], [3, 5]]
    assert close(pixels.scores.sum(), (digits(image) - digits(other)).detach()[0, 8], FLOAT32)


def test_two_models_of_images(digits):
    """What their patch embeddings make otherwise of the mean image is no pixel's."""
    other = tlens.load_demo_model("digits", dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    images, _ = tlens.demo.digit_images()
    change = tlens.difference(tlens.freeze(digits, images[:2]), tlens.freeze(other, images[2:4]))
    pixels = tlens.pixel_scores(change, "3", query=0)
    live = digits(images[:2].double())[:, 3] - other(images[2:4].double())[:, 3]
    assert float(pixels.gap.max()) < FLOAT32
    assert close(pixels.scores.flatten(1).sum(1, keepdim=True) + pixels.bias, live.detach()[:, None], FLOAT32)
    assert bool(pixels.bias.abs().min() > 1e-6)


def test_a_picture_of_a_change_and_images_as_baselines(digits):
    images, _ = tlens.demo.digit_images()
    a, b = (tlens.freeze(digits, images[rows]) for rows in (slice(0, 2), slice(2, 4)))
    change = tlens.attribute(tlens.difference(a, b), "3")
    assert change.to_html().count("<image") == 4
    assert torch.equal(change.image, images[:2].double())
    for baseline in (images[2:4], images[2], images[2:3]):
        compared = tlens.methods.difference(a, target="3", baseline=baseline)
        assert close(compared.scores[:1], change.scores[:1])
    assert close(tlens.methods.difference(a, target="3", baseline=images[2:4]).scores, change.scores)
    stream = a.resid_pre(0)
    positions = digits.embed.original_component.position_embeddings.detach()[0, 1:]
    mean = stream.clone()
    mean[:, 1:] = positions + (stream[:, 1:] - positions).mean(1, keepdim=True)
    with digits.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda live, *, hook: mean)]):
        of_mean = digits(images[:2].double()).detach()[:, 3]
    by_mean = tlens.methods.difference(a, target="3", baseline="mean")
    assert close(by_mean.scores.sum(-1)[:, 0], digits(images[:2].double()).detach()[:, 3] - of_mean, FLOAT32)
    assert not by_mean.scores[..., 0].any()


def test_a_patch_embedding_that_does_more_is_refused(digits):
    images, _ = tlens.demo.digit_images()
    with digits.hooks(fwd_hooks=[("embed.hook_out", lambda stream, *, hook: 1.5 * stream)]):
        frozen = tlens.freeze(digits, images[:1])
        with pytest.raises(tlens.UnsupportedModelError, match="not its patches times"):
            tlens.pixel_scores(frozen, "3")


def test_classes_that_are_read_elsewhere_are_refused():
    model = tiny_model("bridge/vit")
    pooled = [("unembed.hook_in", lambda vector, *, hook: vector + 0.1)]
    with model.hooks(fwd_hooks=pooled):
        frozen = tlens.freeze(model, random_input(model, 8, torch.Generator().manual_seed(1)))
        with pytest.raises(tlens.UnsupportedModelError, match="are not cap"):
            frozen.operator().target(2)


def test_names_of_positions(digits):
    images, labels = tlens.demo.digit_images()
    frozen = tlens.freeze(digits, images[0])  # one image without its batch axis
    assert frozen.str_tokens[0][:3] == [" CLS", " patch 0,0", " patch 0,1"]
    assert len(frozen.str_tokens[0]) == frozen.tokens.shape[1] == 17
    attribution = tlens.attribute(frozen, target=str(int(labels[0])))
    assert attribution["patch 3,1"][0].score == float(attribution.scores[0, 0, 14])
    assert tlens.attribute(frozen, query="patch 3,1").queries.tolist() == [[14]]
    assert torch.equal(attribution.merge_words().scores, attribution.scores)


def test_a_picture_shows_the_image(digits, tmp_path):
    images, _ = tlens.demo.digit_images()
    one = tlens.attribute(digits, images[:1], target="3")
    many = tlens.attribute(digits, images[:3], target=[3, 4, 4], memory="60kB")  # several passes
    assert torch.equal(many.image, images[:3].double())
    assert close(many.scores[:1], one.scores)
    page = one.to_html()
    assert page.count("<image") == 2
    assert "4 × 4 patches" in page
    assert "CLS" in page
    one.save(tmp_path / "one")
    assert tlens.Attribution.load(tmp_path / "one").to_html() == page
    assert "<image" not in tlens.attribute(digits, images[:1], query="all").to_html()


def test_patches_are_replaced_one_by_one(digits):
    """Both replacements by hand, through a hook of our own."""
    images, _ = tlens.demo.digit_images()
    images = images[:3]
    methods = {"first patches": lambda frozen: -frozen.tokens.double()}
    found = {
        replacement: evaluate.perturbation(digits, images, methods, fractions=(0, 0.25), replacement=replacement)
        for replacement in ("zero", "mean")
    }
    inner = digits.embed.original_component
    stream = tlens.freeze(digits, images).resid_pre(0)
    positions = inner.position_embeddings.detach()[0, 1:]
    vectors = stream[:, 1:] - positions
    own = digits(images.double()).detach()
    best = own.argmax(-1, keepdim=True)
    for replacement, vector in (("zero", 0), ("mean", vectors.mean((0, 1)))):
        changed = stream.clone()
        changed[:, 1:5] = positions[:4] + vector
        with digits.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda live, *, hook, new=changed: new)]):
            fall = (own - digits(images.double()).detach()).gather(1, best)[:, 0]
        measured = found[replacement]
        assert close(measured.curves[list(measured.metrics).index("logit"), 0, :, 1], fall)
    with pytest.raises(tlens.InvalidInputError, match="for images, use 'mean' or 'zero'"):
        evaluate.perturbation(digits, images, methods, replacement="mask")
    with pytest.raises(tlens.InvalidInputError, match="only at position 0"):
        evaluate.perturbation(digits, images, methods, query=3)


def test_random_scores_differ_between_images(digits):
    images, _ = tlens.demo.digit_images()
    scorer = evaluate.scorers.random_scores()
    scores = scorer(tlens.freeze(digits, images[:2]))
    assert not torch.equal(scores[0], scores[1])
    assert torch.equal(scores[1], scorer(tlens.freeze(digits, images[1:2]))[0])


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ("a cat", "reads images, floating-point .*not text"),
        ([[1, 2, 3]], "reads images.*got torch.int64"),
        (torch.ones(1, 1, 8, 8, dtype=torch.uint8), "reads images.*got torch.uint8"),
        (torch.randn(1, 3, 8, 8), r"reads images \[batch, 1, 8, 8\], got \[1, 3, 8, 8\]"),
        (torch.randn(1, 1, 8, 9), r"reads images \[batch, 1, 8, 8\]"),
        (torch.randn(8), r"got \[8\]"),
        (torch.randn(0, 1, 8, 8), r"got \[0, 1, 8, 8\]"),
        (torch.full((1, 1, 8, 8), float("nan")), "not finite"),
        ([torch.randn(1, 8, 8), torch.randn(1, 8, 9)], "of one size"),
    ],
)
def test_what_is_no_image_is_refused(digits, input, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.freeze(digits, input)


def test_options_of_tokens_are_refused_for_images(digits, demo_model):
    images, _ = tlens.demo.digit_images()
    for name in ("attention_mask", "token_type_ids", "model_inputs", "decoder_input_ids"):
        with pytest.raises(tlens.InvalidInputError, match=f"{name}: .*reads images"):
            tlens.freeze(digits, images[:1], **{name: torch.ones(1, 17)})
    with pytest.raises(tlens.InvalidInputError, match="reads tokens, got values"):
        tlens.freeze(demo_model, images[:1])
    with pytest.raises(tlens.UnsupportedModelError, match="no patch embedding"):
        tlens.patch_embedding(tlens.freeze(demo_model, "If the"))


def test_model_inputs_are_checked_by_name():
    model = tlens.load_demo_model(kind="bridge")
    for given, message in (
        ({"pixel_values": torch.ones(1, 3, 8, 8)}, "'pixel_values' cannot be given to .* no such argument"),
        ({"attention_mask": torch.ones(1, 3)}, "freeze has its own argument"),
        ({"inputs_embeds": torch.full((1, 2, 128), float("inf"))}, "not finite"),
        (["pixel_values"], "pass a mapping"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.freeze(model, [[3, 4]], model_inputs=given)


@pytest.mark.whole
def test_short_sound_is_refused():
    model = tiny_model("bridge/hubert")
    with pytest.raises(tlens.InvalidInputError, match="does not read"):
        tlens.freeze(model, torch.randn(1, 3))
    frozen = tlens.freeze(model, torch.randn(160))
    assert frozen.str_tokens[0][0] == " frame 0"
    with pytest.raises(tlens.UnsupportedModelError, match="no patch embedding"):
        tlens.pixel_scores(frozen, 3)
    found = evaluate.perturbation(model, torch.randn(2, 160), ["tensorlens norm", "random"], fractions=(0, 0.5))
    assert bool((found.values[0] > 0).all())  # hs_mse


@pytest.fixture(scope="module")
def seen():
    """Prompts with an image of four pieces, and the pass."""
    model = tiny_model("bridge/llava")
    tokens = torch.tensor([[5, 6, 47, 47, 47, 47, 7, 8]])
    return tlens.freeze(model, tokens, model_inputs={"pixel_values": _image(1)})


def _image(seed):
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.whole
def test_text_and_image_are_sources_together(seen):
    assert seen.str_tokens[0] == [" 5", " 6", " image 0", " image 1", " image 2", " image 3", " 7", " 8"]
    own = seen.model(**seen.inputs).detach()
    target = seen.operator().target(11, minus=4)
    assert close(target.total[0], (own[:, -1, 11] - own[:, -1, 4]))
    assert float(target.gap.max()) < 1e-6  # Llama's norms compute in float32
    other = tlens.freeze(seen.model, seen.tokens, model_inputs={"pixel_values": _image(2)})
    assert not close(other.operator().target(11).scores, seen.operator().target(11).scores, 1e-3)
    assert max(check_model(seen.model, seen.tokens, model_inputs=_images(seen)).errors.values()) < 1e-6
    words = tlens.freeze(seen.model, [[5, 6, 7]])
    assert max(words.errors.values()) < 1e-6


@pytest.mark.whole
def test_an_image_may_attend_both_ways():
    model, pixels = tiny_model("bridge/gemma3-sees"), {"pixel_values": torch.randn(1, 3, 8, 8)}
    tokens = torch.tensor([[5, 46, 47, 47, 47, 47, 45, 7, 8]])
    types = (tokens == 47).long()
    frozen = tlens.freeze(model, tokens, token_type_ids=types, model_inputs=pixels)
    assert not frozen.causal
    assert frozen.pattern(0)[0, 0, 2, 5] > 0  # the first piece of the image sees the last
    own = model(**frozen.inputs).detach()
    target = frozen.operator().target(11)
    assert close(target.total[0], own[:, -1, 11])
    assert float(target.gap.max()) < 1e-6  # its norms compute in float32
    report = check_model(model, tokens, token_type_ids=types, model_inputs=pixels)
    assert max(report.errors.values()) < 1e-5


def _images(frozen):
    return {"pixel_values": frozen.inputs["pixel_values"]}


@pytest.mark.whole
def test_methods_take_multimodal_passes(seen):
    for method in tlens.list_methods():
        options = {"target": 3} if method in TARGETED else {}
        attribution = tlens.attribute(seen, method=method, **options)
        assert bool(torch.isfinite(attribution.scores).all())
    again = tlens.attribute(seen.model, seen.tokens, model_inputs=_images(seen), target=3)
    assert close(again.scores, tlens.attribute(seen, target=3).scores)
    assert evaluate.stability(seen.model, seen.tokens, ["tensorlens target"], model_inputs=_images(seen)).values.any()


def _seeing(family):
    """A pass of a prompt with an image of four pieces."""
    model = tiny_model(f"bridge/{family}")
    tokens = torch.tensor([[5, 46, 47, 47, 47, 47, 45, 7, 8]])
    types = {"token_type_ids": (tokens == 47).long()} if family == "gemma3-sees" else {}
    return tlens.freeze(model, tokens, model_inputs={"pixel_values": _image(1)}, **types)


@pytest.mark.parametrize("family", ["llava", "gemma3-sees"])
def test_what_replaces_a_piece_of_an_image_reaches_the_first_block(family):
    """The stream before the first block is replaced by hand: these models add no positions to their embeddings."""
    frozen = _seeing(family)
    model = frozen.model
    own = model(**frozen.inputs).detach()[0, -1, 11]
    embedding = frozen.capture.activation(frozen.points.blocks[0].resid_pre)[0]
    words = model.run_with_cache(torch.arange(48)[None], names_filter="embed.hook_out")[1]["embed.hook_out"][0]
    assert close(embedding[-1], words[8])
    for replacement, vector in (("zero", torch.zeros_like(words[0])), ("mean", words.mean(0)), (9, words[9])):
        losses = []
        for position in range(len(embedding)):
            changed = embedding.clone()
            changed[position] = vector
            with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda live, *, hook, new=changed: new[None])]):
                losses.append(own - model(**frozen.inputs).detach()[0, -1, 11])
        found = tlens.attribute(frozen, 11, method="leave-one-out", replacement=replacement)
        assert close(found.scores[0, 0], torch.stack(losses), 1e-6)  # the norms compute in float32
        assert bool((found.scores[0, 0, 2:6].abs() > 1e-3).all())
    mean = tlens.methods.difference(frozen, target=11, baseline="mean")
    base = words.mean(0).expand_as(embedding)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda live, *, hook: base[None])]):
        change = own - model(**frozen.inputs).detach()[0, -1, 11]
    assert close(mean.scores.sum() + mean.bias.sum(), change, 1e-6)
    assert bool((mean.scores[0, 0, 2:6].abs() > 1e-4).all())
    with pytest.raises(tlens.InvalidInputError, match="represents a piece of an image"):
        tlens.attribute(frozen, 11, method="leave-one-out", replacement=47)


@pytest.mark.parametrize("place", ["embed.hook_out", "blocks.0.hook_resid_pre"])
def test_a_replacement_that_goes_nowhere_is_refused(place):
    """Another hook writes over what is put at the embedding; a token would be read all the same."""
    model, text = tlens.load_demo_model(kind="bridge"), "If the sky is clear, the"
    with model.hooks(fwd_hooks=[(place, lambda live, *, hook: torch.ones_like(live))]):
        frozen = tlens.freeze(model, text)
        if place == "embed.hook_out":  # ours come after it
            assert tlens.attribute(frozen, " the", method="leave-one-out", replacement="zero").scores.any()
            return
        for question in (
            lambda: tlens.attribute(frozen, " the", method="leave-one-out", replacement="zero"),
            lambda: tlens.methods.difference(frozen, target=" the", baseline="mean"),
            lambda: evaluate.perturbation(model, text, ["random"], fractions=(0, 0.5), replacement="mean"),
        ):
            with pytest.raises(tlens.UnsupportedModelError, match="does not reach the first block"):
                question()


@pytest.mark.whole
def test_features_that_go_in_between_blocks_are_refused_by_name(seen):
    vision = seen.model.original_model.config.vision_config
    assert not hasattr(vision, "deepstack_visual_indexes")
    vision.deepstack_visual_indexes = [0]
    try:
        with pytest.raises(tlens.UnsupportedModelError, match="DeepStack"):
            tlens.freeze(seen.model, seen.tokens, model_inputs=_images(seen))
    finally:
        del vision.deepstack_visual_indexes


class Observing(HookPoint):
    """A hook point that ignores what its hooks return."""

    def __call__(self, x):
        super().__call__(x)
        return x


def test_a_hook_that_only_observes_is_found():
    """The trial goes by another residual stream, for images as for tokens."""
    images, _ = tlens.demo.digit_images()
    model = tlens.load_demo_model("digits", dtype=torch.float64)
    model.hook_dict["blocks.1.mlp.hook_post"].__class__ = Observing
    frozen = tlens.freeze(model, images[:1])
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 of this .* does not obey"):
        frozen.fwd_hooks()
