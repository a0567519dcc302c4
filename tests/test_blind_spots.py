"""What a proof on the prompt alone would not see: each situation is built, and refused or right."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import close, hooks_left, some_tokens, tolerance
from transformer_lens.hook_points import HookPoint

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.hooks import states_and_logits, unembeds_by_libraries
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.testing import check_model, model_names, tiny_model

MODELS = [name for name in ("hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/opt") if name in model_names()]
every_class = pytest.mark.parametrize("name", MODELS)


# ------------------------------------------------------------------ looped models


@every_class
@pytest.mark.parametrize("store", ["model", "cpu"])
def test_a_block_that_runs_twice_is_refused(name, store):
    model = tiny_model(name)
    block = model.blocks[1]

    class Looped(type(block)):
        def forward(self, x, *args, **options):
            args = [None if hasattr(value, "get_seq_length") else value for value in args]  # no key-value cache
            options = {key: None if "past" in key else value for key, value in options.items()}
            first = super().forward(x, *args, **options)
            return super().forward(first[0] if isinstance(first, tuple) else first, *args, **options)

    block.__class__ = Looped
    with pytest.raises(tlens.UnsupportedModelError, match=r"fires several times .* run in a loop"):
        tlens.freeze(model, some_tokens(), store=store)
    assert hooks_left(model) == 0


def test_a_point_that_shows_the_same_again_is_no_loop():
    """A HookedTransformer computes its norm for queries, keys and values each, a Bridge calls a hook for every name."""
    for name in {"hooked/ln", "bridge/gpt2-compatibility"} & set(model_names()):
        tlens.freeze(tiny_model(name), some_tokens(), store="cpu")


# ------------------------------------------------------------------ caches


@every_class
def test_a_cache_from_under_a_hook_is_refused(name):
    model = tiny_model(name)
    point = tlens.freeze(model, some_tokens()).points.blocks[1]
    for hooked in (point.z, point.resid_pre):
        with model.hooks(fwd_hooks=[(hooked, lambda x, hook: 1.5 * x)]):
            _, cache = model.run_with_cache(some_tokens())
        with pytest.raises(tlens.InvalidInputError, match=r"under other hooks, or with other weights: .* differs"):
            tlens.freeze(model, some_tokens(), cache=cache)
    _, cache = model.run_with_cache(some_tokens())
    with torch.no_grad():
        model.blocks[1].mlp.W_out.mul_(1.1) if name.startswith("hooked") else _scale_a_weight(model)
    with pytest.raises(tlens.InvalidInputError, match="with other weights"):
        tlens.freeze(model, some_tokens(), cache=cache)


def _scale_a_weight(model):
    weights = [weight for name, weight in model.original_model.named_parameters() if ".1." in name and weight.ndim == 2]
    weights[-1].mul_(1.1)


@every_class
def test_its_own_cache_is_taken(name):
    model = tiny_model(name)
    _, cache = model.run_with_cache(some_tokens())
    taken, own = tlens.freeze(model, some_tokens(), cache=cache), tlens.freeze(model, some_tokens())
    assert close(tlens.attribute(taken, target=5).scores, tlens.attribute(own, target=5).scores)


# ------------------------------------------------------------------ logits


@every_class
def test_a_hook_after_the_unembedding_is_noticed_where_it_acts(name):
    model = tiny_model(name)
    where = "unembed.hook_out"

    def late(logits, hook):
        logits = logits.clone()
        logits[:, 3:5, 5] -= 3
        return logits

    with model.hooks(fwd_hooks=[(where, late)]):
        frozen = tlens.freeze(model, some_tokens())
        for query in (0, 2, 5):
            own = model(**frozen.inputs)[:, query, 5]
            assert close(frozen.operator().target(5, query=query).total[:, 0], own)
        for query in (3, [0, 4], "all"):
            with pytest.raises(tlens.UnsupportedModelError, match="a hook after the unembedding"):
                tlens.freeze(model, some_tokens()).operator().target(5, query=query)
    assert hooks_left(model) == 0


def test_logits_are_compared_once_for_each_position():
    model = tiny_model("bridge/gpt2")
    frozen, runs = tlens.freeze(model, some_tokens()), []
    with model.hooks(fwd_hooks=[(frozen.points.blocks[0].resid_pre, lambda x, hook: runs.append(1))]):
        for query in (-1, 5, 2, 2, [2, -1]):
            frozen.operator().target(5, query=query)
    assert len(runs) == 1  # position 2; the last was compared when it was frozen
    assert frozen.errors["unembed"] < 1e-12


def runs_during(model, work):
    """How often the model runs its first block meanwhile."""
    runs = []
    handle = model.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    try:
        work()
    finally:
        handle.remove()
    return len(runs)


@every_class
def test_logits_that_will_be_asked_for_are_compared_while_freezing(name):
    model, tokens = tiny_model(name), some_tokens()
    own = model(tokens).detach()
    tlens.freeze(model, tokens)  # once for each model: does it repeat itself?
    for query in (2, [0, 4], slice(1, 3), "all"):
        frozen = tlens.freeze(model, tokens, query=query)
        compared = frozen.logits_check.compared.clone()
        assert runs_during(model, lambda: frozen.operator().target(5, query=query)) == 0  # noqa: B023
        assert torch.equal(frozen.logits_check.compared, compared)
        result = frozen.operator().target(5, query=query)
        positions = query_positions(frozen.prompt, query)
        assert close(result.total, own[..., 5].gather(1, positions))
        assert runs_during(model, lambda: tlens.attribute(model, tokens, 5, query=query)) == 1  # noqa: B023
    with pytest.raises(tlens.InvalidInputError, match="out of range"):
        tlens.freeze(model, tokens, query=99)


def test_a_late_hook_is_noticed_where_logits_will_be_asked_for():
    model = tiny_model("bridge/gpt2")

    def late(logits, hook):
        logits = logits.clone()
        logits[:, 3, 5] -= 3
        return logits

    with model.hooks(fwd_hooks=[("unembed.hook_out", late)]):
        frozen = tlens.freeze(model, some_tokens(), query=3)
        with pytest.raises(tlens.UnsupportedModelError, match="a hook after the unembedding"):
            frozen.operator().target(5, query=3)


class _PositionDependent(torch.nn.Module):
    """An unembedding of somebody's own that does something else at late positions."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.W_U, self.b_U = inner.W_U, inner.b_U

    def forward(self, x):
        logits = self.inner(x).clone()
        logits[:, 3:, 5] += 20
        return logits


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="a Bridge's unembedding is compared with its weights")
@pytest.mark.parametrize("query", [-1, [-3, -1]])
def test_an_unembedding_of_somebodys_own_class_is_run_at_every_position(query):
    """Cut to some positions, it would show them what it does at others."""
    model = tiny_model("hooked/ln")
    model.unembed = _PositionDependent(model.unembed)
    assert not unembeds_by_libraries(model)
    frozen = tlens.freeze(model, some_tokens(batch=1), query=query)
    with pytest.raises(tlens.UnsupportedModelError, match="are not cap"):
        frozen.operator().target(5, query=query)
    assert torch.equal(frozen.logits(-1)[:, 0], model(**frozen.inputs)[:, -1])


def test_masks_and_the_first_token_of_a_masked_model_are_compared_while_freezing():
    model = tlens.load_demo_model("encoder")
    mask = model.tokenizer.mask_token_id
    tokens = torch.tensor([[2, 7, mask, 8, mask, 9, 3], [2, 7, 8, 9, 11, mask, 3]])
    frozen = tlens.freeze(model, tokens)
    expected = torch.zeros_like(tokens, dtype=torch.bool)
    expected[:, [0, -1]] = True
    expected |= tokens == mask
    assert torch.equal(frozen.logits_check.compared, expected)
    for query in (torch.tensor([[2], [5]]), 0):
        assert runs_during(model, lambda: frozen.operator().target(5, query=query)) == 0  # noqa: B023
    assert runs_during(model, lambda: frozen.operator().target(5, query=3)) == 1


@every_class
def test_logits_of_some_positions_are_those_of_a_whole_run(name):
    model, tokens = tiny_model(name), some_tokens(batch=2, pos=6)
    own = model(tokens).detach()
    at = tlens.freeze(model, tokens).points.unembed_in
    for positions in ([[5], [0]], [[4, 1, 4], [0, 5, 2]], [[5, 4, 3, 2, 1, 0], [0, 2, 1, 3, 5, 4]], [[0] * 9, [3] * 9]):
        positions = torch.tensor(positions)
        _, logits = states_and_logits(model, {"input": tokens}, at, positions)
        assert close(logits, torch.take_along_dim(own, positions[..., None], dim=1))


# ------------------------------------------------------------------ threads


@every_class
def test_two_threads_freeze_their_own_prompts(name):
    model, prompts = tiny_model(name), [some_tokens(1, 6, seed=seed) for seed in range(2)]
    alone = [tlens.freeze(model, tokens) for tokens in prompts]
    start = threading.Barrier(2)

    def work(tokens):
        start.wait()
        return [tlens.freeze(model, tokens) for _ in range(60 if name == MODELS[0] else 15)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, prompts))
    for passes, expected in zip(results, alone, strict=True):
        for frozen in passes:
            assert all(
                close(frozen.capture.activations[point], kept) for point, kept in expected.capture.activations.items()
            )
    assert close(tlens.attribute(results[0][-1], target=5).scores, tlens.attribute(alone[0], target=5).scores)
    assert hooks_left(model) == 0


def test_a_thread_with_an_attached_pass_keeps_others_waiting():
    model = tiny_model("bridge/gpt2")
    frozen, other = tlens.freeze(model, some_tokens()), some_tokens(seed=3)
    expected = tlens.attribute(model, other, target=5).scores
    with ThreadPoolExecutor(1) as pool:
        with frozen.attached():
            waiting = pool.submit(lambda: tlens.attribute(model, other, target=5).scores)
            held = frozen.model(**{**frozen.inputs, "input": other})
            assert not waiting.done()
        assert close(waiting.result(timeout=60), expected)
    assert not close(held, model(other))


def test_plain_runs_of_another_thread_are_not_taken_for_our_own():
    """Nobody locks what a user runs: its activations must not end in our pass, nor our early stop in its run."""
    model = tiny_model("bridge/gpt2")
    tokens, other = some_tokens(1, 6), some_tokens(1, 6, seed=9)
    expected, plain, stop = tlens.attribute(model, tokens, target=5).scores, model(other), threading.Event()

    def run():
        outputs = []
        while not stop.is_set():
            outputs.append(model(other))
        return outputs

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        mine = [tlens.attribute(model, tokens, target=5).scores for _ in range(40)]
        stop.set()
        assert all(close(output, plain) for output in running.result())
    assert all(close(scores, expected) for scores in mine)


# ------------------------------------------------------------------ hook points that only observe


class Observing(HookPoint):
    """A hook point that ignores what its hooks return."""

    def __call__(self, x):
        super().__call__(x)
        return x


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="needs TransformerLens 3.9")
@pytest.mark.parametrize(
    "point", ["blocks.1.mlp.hook_post", "blocks.0.ln1.hook_scale", "ln_final.hook_scale", "attn.hook_z"]
)
def test_a_hook_point_that_only_observes_is_refused(point):
    model = tiny_model("hooked/ln")
    model.hook_dict[f"blocks.0.{point}" if point.startswith("attn") else point].__class__ = Observing
    frozen = tlens.freeze(model, some_tokens())
    part = "ln_final" if "final" in point else "blocks.1" if "blocks.1" in point else "blocks.0"
    for hold in (frozen.fwd_hooks, lambda: frozen.attached().__enter__()):
        with pytest.raises(tlens.UnsupportedModelError, match=rf"{part} of this .* does not obey the hooks"):
            hold()
    with pytest.raises(tlens.UnsupportedModelError, match="does not obey"):
        circuits.total_effects(frozen, 5, live=True)
    with pytest.raises(tlens.UnsupportedModelError, match="does not obey"):
        check_model(model)
    assert float(tlens.attribute(frozen, target=5).gap.max()) < 1e-9  # what reads weights is right
    assert hooks_left(model) == 0


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="needs TransformerLens 3.9")
def test_a_pattern_that_only_observes_is_held_at_z():
    model = tiny_model("hooked/ln")
    model.hook_dict["blocks.0.attn.hook_pattern"].__class__ = Observing
    check_model(model)


def test_what_a_model_obeys_is_tried_once(monkeypatch):
    from tensorlens_tl.passes import live

    model, tried = tiny_model("bridge/gpt2"), []
    prove = live._prove
    monkeypatch.setattr(live, "_prove", lambda record: tried.append(1) or prove(record))
    for seed in range(3):
        tlens.freeze(model, some_tokens(seed=seed)).fwd_hooks()
    assert len(tried) == 1
    with torch.no_grad():
        next(model.parameters()).mul_(1)  # written to: processing weights may rewire hook points
    tlens.freeze(model, some_tokens()).fwd_hooks()
    assert len(tried) == 2


@pytest.mark.parametrize("where", ["pattern", "values"])
def test_dropout_that_is_on_in_eval_mode_is_noticed(where):
    """Before the pattern's hook point the proof of the block agrees with what it sees: only a second run does not."""
    model = tiny_model("bridge/gpt2")
    point = model.hook_dict["blocks.0.attn.hook_pattern" if where == "pattern" else "blocks.0.hook_resid_pre"]

    class Dropping(type(point)):
        def __call__(self, x):
            return super().__call__(torch.nn.functional.dropout(x, 0.3, training=True))

    point.__class__ = Dropping
    with pytest.raises(tlens.UnsupportedModelError, match=r"two runs of this .* differ|cannot be frozen"):
        tlens.freeze(model, some_tokens())
    assert hooks_left(model) == 0


# ------------------------------------------------------------------ crashes


@every_class
def test_a_users_patch_at_a_late_position_is_part_of_the_pass(name):
    model = tiny_model(name)
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def patch(x, hook):
        x = x.clone()
        x[:, 4] = vector
        return x

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", patch)]):
        frozen = tlens.freeze(model, some_tokens())
        assert close(frozen.operator().target(5).total[:, 0], model(**frozen.inputs)[:, -1, 5])
        own = model(**frozen.inputs)
        with frozen.attached():
            assert close(model(**frozen.inputs), own, tolerance(name))
    assert hooks_left(model) == 0


def test_decompx_gives_biases_to_the_first_real_token_where_padding_is_left(demo_model):
    texts = ["Return the value of the file", "Return the"]
    padded = tlens.freeze(demo_model, texts, padding_side="left")
    alone = tlens.freeze(demo_model, texts[1])
    result = tlens.attribute(padded, method="decompx", bias="cls", target=" the", query=-1)
    own = tlens.attribute(alone, method="decompx", bias="cls", target=" the", query=-1)
    length = alone.tokens.shape[1]
    assert close(result.scores[1, 0, -length:], own.scores[0, 0])
    assert not result.scores[1, 0, :-length].any()


@every_class
def test_a_copied_pass_belongs_to_its_copied_model(name):
    frozen = tlens.freeze(tiny_model(name), some_tokens())
    expected = tlens.attribute(frozen, target=5).scores
    copied = copy.deepcopy(frozen)
    assert copied.model is not frozen.model
    assert torch.equal(tlens.attribute(copied, target=5).scores, expected)
    with torch.no_grad():
        next(copied.model.parameters()).mul_(1.5)
    with pytest.raises(tlens.FrozenModelError, match="changed"):
        tlens.attribute(copied, target=5)
    assert torch.equal(tlens.attribute(frozen, target=5).scores, expected)


def test_saving_through_a_link_replaces_what_it_points_to(demo_model, tmp_path):
    result = tlens.attribute(demo_model, "Return the value", target=" of")
    (tmp_path / "there").mkdir()
    place, link = tmp_path / "there" / "result", tmp_path / "link"
    link.symlink_to(place)
    for _ in range(2):
        result.save(link)
        assert link.is_symlink()
        assert torch.equal(tlens.Attribution.load(place).scores, result.scores)


def test_a_page_that_cannot_be_encoded_leaves_the_old_one(demo_model, tmp_path):
    from tensorlens_tl.drawing import Picture

    place = tmp_path / "page.html"
    Picture("a title", "<p>body</p>").save(place)
    before = place.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        Picture("a title", "\ud800").save(place)
    assert place.read_bytes() == before


@every_class
def test_positions_that_are_no_tokens_are_refused(name):
    """Virtual tokens of a prompt adapter: the stream has more positions than there are tokens."""
    model = tiny_model(name)

    class Prefixed(type(model)):
        def forward(self, input, attention_mask=None, **options):
            longer = [torch.cat([t[:, :1], t], dim=1) for t in (input, torch.ones_like(input))]
            return super().forward(longer[0], attention_mask=longer[1], **options)

    model.__class__ = Prefixed
    with pytest.raises(tlens.UnsupportedModelError, match="has 7 positions for 6 tokens"):
        tlens.freeze(model, some_tokens())
    assert hooks_left(model) == 0


@pytest.mark.parametrize("name", ["bridge/mixtral", "bridge/gpt2", "bridge/opt"])
def test_two_threads_in_one_attached_pass(name):
    """Each of a user's threads that run the held model gets its own output."""
    model = tiny_model(name)
    frozen, start = tlens.freeze(model, some_tokens(1, 6)), threading.Barrier(2)
    others = [some_tokens(1, 6, seed=seed) for seed in (3, 4)]

    def work(tokens):
        start.wait()
        return [model(tokens) for _ in range(15)]

    with frozen.attached(), torch.no_grad():
        expected = [model(tokens) for tokens in others]
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(work, others))
    assert all(close(output, own) for outputs, own in zip(made, expected, strict=True) for output in outputs)
