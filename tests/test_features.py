"""Sparse dictionaries on a frozen pass: every sum holds, and a score is what the frozen live model loses.

The independent computations are the live model, held by hooks, with a feature or a source token taken out of its
stream, and the dictionary's own `encode`.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import NAMES, close, some_tokens, tolerance
from test_circuits import token_logit

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models.dictionaries import read_dictionary
from tensorlens_tl.results import FeatureEdges
from tensorlens_tl.testing import tiny_input

CASES = [
    ("hooked/ln", "jumprelu", "layer_norm"),
    ("hooked/sandwich", "relu", "none"),
    ("bridge/gpt2", "topk", "constant_norm_rescale"),
    ("bridge/llama", "topk", "layer_norm"),
    ("bridge/gemma2", "relu", "none"),
    ("bridge/phi", "gained", "constant_norm_rescale"),
]
"""Families, how features are chosen, and how the dictionary normalises what it reads."""
ON_HAND = [case for case in CASES if case[0] in NAMES]
FAMILIES = [name for name, *_ in ON_HAND if name not in ("hooked/sandwich", "bridge/gpt2")]
AFTER = "blocks.0.hook_resid_post"
FEATURES = 40


class Dictionary:
    """A sparse autoencoder of random weights, written as SAELens writes them and independently of how it is read."""

    def __init__(
        self, width=16, kind="relu", normalise="none", from_input=True, seed=0, dtype=torch.float64, hook=None
    ):
        draw = torch.Generator().manual_seed(seed)
        make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
        self.W_enc, self.b_enc = 0.3 * make(width, FEATURES), 0.5 * make(FEATURES)
        self.W_dec, self.b_dec = 0.3 * make(FEATURES, width), 0.5 * make(width)
        self.kind = kind
        if kind == "jumprelu":
            self.threshold = make(FEATURES).abs()
        if kind == "topk":
            self.k = 7
        self.cfg = SimpleNamespace(
            apply_b_dec_to_input=from_input,
            normalize_activations=normalise,
            rescale_acts_by_decoder_norm=kind == "gained",
            metadata=SimpleNamespace(hook_name=hook),
        )

    def before(self, x):
        if self.cfg.normalize_activations == "layer_norm":
            self.mean, x = x.mean(-1, keepdim=True), x - x.mean(-1, keepdim=True)
            self.scale = x.std(-1, keepdim=True)
            x = x / (self.scale + 1e-5)
        elif self.cfg.normalize_activations == "constant_norm_rescale":
            self.mean, self.scale = 0, x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            x = x / self.scale
        else:
            self.mean, self.scale = 0, 1
        x = (x - self.b_dec * self.cfg.apply_b_dec_to_input) @ self.W_enc + self.b_enc
        return x * self.W_dec.norm(dim=1) if self.kind == "gained" else x

    def encode(self, x):
        x = self.before(x)
        if self.kind == "jumprelu":
            return x.relu() * (x > self.threshold)
        if self.kind == "topk":
            best = x.topk(self.k)
            return torch.zeros_like(x).scatter(-1, best.indices, best.values.relu())
        return x.relu()

    def decode(self, features):
        features = features / self.W_dec.norm(dim=1) if self.kind == "gained" else features
        return (features @ self.W_dec + self.b_dec) * self.scale + self.mean


class Transcoder(Dictionary):
    """The same from what an MLP reads to what it gives, with a skip."""

    def __init__(self, width=16, seed=0):
        super().__init__(width, from_input=False, seed=seed)
        self.W_skip = 0.2 * torch.randn(width, width, dtype=torch.float64)

    def __call__(self, x):
        return self.decode(self.encode(x)) + x @ self.W_skip.T


def bare(dictionary, *names):
    """A dictionary's weights in an object that knows nothing else."""
    return SimpleNamespace(**{name: getattr(dictionary, name) for name in ("W_enc", "b_enc", "W_dec", "b_dec", *names)})


def own_stream(frozen, hook):
    kept = {}
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(hook, lambda x, *, hook: kept.update(x=x.detach()))])
    return kept["x"]


def subtracting(hook_point, vector, batch=0, position=slice(None)):
    """A hook that takes a vector out of what a point holds."""

    def subtract(live, *, hook):
        live = live.clone()
        live[batch, position] -= vector
        return live

    return hook_point, subtract


def seen_frozen(frozen, hook, hooks=()):
    """What a point holds in the frozen live model."""
    kept = {}
    see = (hook, lambda x, *, hook: kept.update(x=x.detach()))
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, see])
    return kept["x"]


# ------------------------------------------------------------------ sums


def test_every_sum_holds(model, name):
    """Logit = features + error + bias; pre-activation = tokens + bias = components + biases = earlier features + …"""
    frozen = tlens.freeze(model, some_tokens())
    first, last = frozen.capture.output_name(0), frozen.capture.output_name(frozen.n_layers - 1)
    early, late = (
        circuits.features(frozen, Dictionary(frozen.output.shape[-1], kind, seed=seed), hook)
        for seed, (kind, hook) in enumerate([("jumprelu", first), ("relu", last)])
    )
    feature = 3
    own = late.dictionary.source.before(frozen.activation(last))[..., feature]
    by_token = circuits.feature_attribution(late, feature, query="all")
    assert close(by_token.total, own)
    made = [
        by_token,
        circuits.feature_attribution(late, feature, by="head"),
        circuits.feature_edges(early, late, [feature], query="all"),
    ]
    if frozen.view.unembedding is not None:
        made.append(circuits.feature_effects(early, 5, 7, query="all"))
        assert close(made[-1].total, frozen.operator().target(5, 7, query="all").total)
    for result in made:
        assert float(result.gap.max()) < tolerance(name), result


@pytest.mark.parametrize(("name", "kind", "normalise"), ON_HAND)
def test_a_feature_is_worth_what_the_frozen_model_loses_without_it(model_named, name, kind, normalise):
    frozen = tlens.freeze(model_named(name), some_tokens())
    hook = "blocks.1.hook_resid_pre"
    dictionary = Dictionary(kind=kind, normalise=normalise)
    found = circuits.features(frozen, dictionary, hook)
    terms = circuits.feature_effects(found, 5, 7)
    assert float(terms.gap.max()) < tolerance(name)
    x = own_stream(frozen, hook)
    active = dictionary.encode(x)
    error = x - dictionary.decode(active)
    written = active / dictionary.W_dec.norm(dim=1) if kind == "gained" else active
    assert close(found.error, error, atol=1e-6)
    whole = token_logit(frozen)
    for batch, position in ((0, 2), (1, 4)):
        feature = int(active[batch, position].argmax())
        scale = dictionary.scale[batch, position] if normalise != "none" else 1
        dictionary.encode(x)  # what it holds of its scale is of this stream again
        vector = written[batch, position, feature] * dictionary.W_dec[feature] * scale
        lost = whole - token_logit(frozen, [subtracting(hook, vector, batch, position)])
        assert lost[batch].abs() > 1e-6
        assert close(lost[batch], terms[f"F{feature}@{position}"][batch, 0], atol=tolerance(name))
        lost = whole - token_logit(frozen, [subtracting(hook, error[batch, position], batch, position)])
        assert close(lost[batch], terms[f"error@{position}"][batch, 0], atol=tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_source_token_is_worth_what_the_pre_activation_loses_without_it(model_named, name):
    frozen = tlens.freeze(model_named(name), some_tokens())
    hook, dictionary, feature = frozen.capture.output_name(1), Dictionary(kind="topk"), 11
    scores = circuits.feature_attribution(circuits.features(frozen, dictionary, hook), feature).scores
    x = frozen.resid_pre(0)
    before = lambda hooks=(): dictionary.before(seen_frozen(frozen, hook, hooks))[:, -1, feature]  # noqa: E731
    for source in (1, 4):
        start = frozen.points.blocks[0].resid_pre
        lost = before() - before([subtracting(start, x[:, source], slice(None), source)])
        assert close(lost, scores[:, 0, source], atol=tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edge_is_what_the_later_feature_loses_without_the_earlier_one(model_named, name):
    frozen = tlens.freeze(model_named(name), some_tokens())
    first, last = "blocks.1.hook_resid_pre", frozen.capture.output_name(1)
    early, late = Dictionary(seed=1), Dictionary(kind="topk", seed=2)
    edges = circuits.feature_edges(
        circuits.features(frozen, early, first), circuits.features(frozen, late, last), [2, 9], query=[3, 5]
    )
    active, position = early.encode(own_stream(frozen, first)), 2
    feature = int(active[1, position].argmax())
    hooks = [subtracting(first, active[1, position, feature] * early.W_dec[feature], 1, position)]
    lost = late.before(seen_frozen(frozen, last)) - late.before(seen_frozen(frozen, last, hooks))
    for row, (number, query) in enumerate(zip(edges.features, edges.queries[1].tolist(), strict=True)):
        assert close(lost[1, query, number], edges[f"F{feature}@{position}"][1, row], atol=tolerance(name))
    assert edges.features == [2, 9, 2, 9]
    assert float(edges.into(9).gap.max()) < tolerance(name)


# ------------------------------------------------------------------ transcoders


@pytest.mark.parametrize("name", FAMILIES)
def test_transcoders_in_the_place_of_an_mlp(model_named, name):
    frozen = tlens.freeze(model_named(name), some_tokens())
    read, write = "blocks.0.mlp.hook_in", "blocks.0.hook_mlp_out"
    read = read if read in frozen.model.hook_dict else "blocks.0.ln2.hook_normalized"
    source = Transcoder()
    found = circuits.features(frozen, source, read, hook_out=write)
    terms = circuits.feature_effects(found, 5, 7, by="feature_token")
    late = circuits.features(frozen, Dictionary(seed=4), frozen.capture.output_name(1))
    edges = circuits.feature_edges(found, late, [1, 2], by="feature")
    into = [circuits.feature_attribution(found, 6, by=by, query="all") for by in ("token", "component")]
    for result in (terms, edges, *into):
        assert float(result.gap.max()) < tolerance(name)
    x, given = own_stream(frozen, read), own_stream(frozen, write)
    assert close(into[0].total, source.before(x)[..., 6], atol=tolerance(name))
    active = source.encode(x)
    feature, whole = int(active[1, 3].argmax()), token_logit(frozen)
    parts = {
        f"F{feature}@3": active[1, 3, feature] * source.W_dec[feature],
        "error@3": (given - source(x))[1, 3],
    }
    for term, vector in parts.items():
        lost = whole - token_logit(frozen, [subtracting(write, vector, 1, 3)])
        assert close(lost[1], terms[term][1, 0], atol=tolerance(name))
    lost = whole - token_logit(frozen, [subtracting(write, given[1], 1)])
    assert close(lost[1], (terms.total[1, 0] - terms["beside MLP0"][1, 0] - terms["bias"][1, 0]), atol=tolerance(name))


# ------------------------------------------------------------------ what is read


@pytest.mark.parametrize("kind", ["relu", "jumprelu", "topk"])
def test_weights_alone_say_the_same_as_encode(model_named, kind):
    """Without `encode` the weights decide; with it, whether b_dec is taken from the input is found by trying."""
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    hook = "blocks.0.hook_resid_post"
    full = Dictionary(kind=kind, from_input=False)
    known = circuits.features(frozen, full, hook)
    extra = [name for name in ("threshold", "k") if hasattr(full, name)]
    alone = circuits.features(frozen, bare(full, *extra), hook)
    assert torch.equal(known.index, alone.index)
    assert close(known.values, alone.values, atol=1e-12)
    active = full.encode(frozen.activation(frozen.capture.output_name(0)))
    assert torch.equal(known.index, active.nonzero())
    silent = Dictionary(kind=kind, from_input=True)
    del silent.cfg.apply_b_dec_to_input
    silent.cfg.__dict__["apply_b_dec_to_input"] = True
    tried = bare(silent, "encode", "decode", *extra)
    assert close(circuits.features(frozen, tried, hook).values, circuits.features(frozen, silent, hook).values, 1e-12)


def test_padding_and_batches_change_nothing(model_named):
    model = model_named("bridge/gpt2")
    rows = [[5, 9, 3, 8, 20], [7, 4, 30]]
    dictionary, hook = Dictionary(), "blocks.0.hook_resid_post"
    both = circuits.features(tlens.freeze(model, rows), dictionary, hook)
    terms, wide = circuits.feature_effects(both, 5, 7), circuits.feature_attribution(both, 2)
    assert float(terms.gap.max()) < 1e-9
    for number, row in enumerate(rows):
        alone = circuits.features(tlens.freeze(model, [row]), dictionary, hook)
        single = circuits.feature_effects(alone, 5, 7)
        assert int((both.index[:, 0] == number).sum()) == len(alone.values)
        shift = int(both.frozen.mask[number].nonzero()[0])
        for name in single.names:
            at = name.rpartition("@")
            moved = f"{at[0]}@{int(at[2]) + shift}" if at[1] else name
            assert close(terms[moved][number], single[name][0])
        assert close(
            wide.scores[number, 0, shift : shift + len(row)], circuits.feature_attribution(alone, 2).scores[0, 0]
        )


@pytest.mark.parametrize("by", ["component", "head", "head_token", "neuron"])
def test_direct_effects_on_a_pre_activation(model_named, by):
    """In the middle of a block as well; each is what the pre-activation loses without it, past every later part."""
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    found = circuits.features(frozen, Dictionary(), "blocks.1.hook_resid_mid")
    terms = circuits.feature_attribution(found, 4, by=by, query=[2, -1])
    assert float(terms.gap.max()) < 1e-9
    assert "b_enc" in terms.names
    assert not [name for name in terms.names if name.startswith("MLP1")]
    if by == "head":
        z = own_stream(frozen, "blocks.1.attn.hook_z")[:, -1, 2]
        written = z @ frozen.view.blocks[1].attention.W_O.unflatten(0, (-1, z.shape[-1]))[2]
        assert close(terms["L1H2"][:, -1], written @ found.dictionary.W_enc[:, 4])


def test_small_memory_gives_the_same(model_named):
    frozen = tlens.freeze(model_named("bridge/llama"), some_tokens())
    found = circuits.features(frozen, Dictionary(), "blocks.0.hook_resid_post")
    late = circuits.features(frozen, Dictionary(seed=3), frozen.capture.output_name(1))
    for call in (
        partial(circuits.feature_effects, found, 5, 7),
        partial(circuits.feature_edges, found, late),
        partial(circuits.feature_attribution, late, 3),
    ):
        wide, narrow = call(query="all"), call(query="all", memory="60KB")
        assert close(narrow.scores, wide.scores, atol=1e-12)


def test_a_feature_that_is_not_active(model_named):
    """Its pre-activation is explained like any other; as a source it has no term."""
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    dictionary = Dictionary(kind="topk")
    found = circuits.features(frozen, dictionary, "blocks.0.hook_resid_post")
    silent = next(feature for feature in range(FEATURES) if not bool(found.value(feature).any()))
    assert float(circuits.feature_attribution(found, silent).gap.max()) < 1e-9
    names = circuits.feature_effects(found, 5, by="feature").names
    assert f"F{silent}" not in names
    assert len(names) == len(found.index[:, 2].unique()) + 3  # error, b_dec, bias


# ------------------------------------------------------------------ results


def test_a_dictionary_of_which_nothing_is_active(model_named):
    """Its error and b_dec are all that adds to a target."""
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    dictionary = Dictionary()
    dictionary.b_enc = dictionary.b_enc - 1e3
    nothing = circuits.features(frozen, dictionary, AFTER)
    assert not len(nothing.values)
    late = circuits.features(frozen, Dictionary(seed=1), "blocks.1.hook_resid_post")
    for by in ("feature", "feature_token"):
        effects = circuits.feature_effects(nothing, 5, 7, by=by)
        assert close(effects.total, circuits.logit_attribution(frozen, 5, 7).total)
        assert not any(name.startswith("F") for name in effects.names)
        for sums in (effects, circuits.feature_edges(nothing, late, by=by)):
            assert float(sums.gap.max()) < 1e-9


def test_what_features_tell(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    dictionary = Dictionary(kind="topk", hook="blocks.0.hook_resid_post")
    found = circuits.features(frozen, dictionary)
    x = frozen.activation(frozen.capture.output_name(0))
    active = dictionary.encode(x)
    best = active[1, -1].topk(3)
    assert [(entry.name, entry.position) for entry in found.top(3, batch=1)] == [(f"F{i}", 5) for i in best.indices]
    assert close(torch.tensor([entry.score for entry in found.top(3, batch=-1)]).double(), best.values, 1e-6)
    assert close(found.value(best.indices[0]), active[..., best.indices[0]])
    left = x - dictionary.decode(active)
    rest = 1 - left.square().sum() / (x - x.flatten(0, 1).mean(0)).square().sum()
    assert found.explained == pytest.approx(float(rest))
    assert found.active_per_token == pytest.approx(float((active > 0).sum(-1).double().mean()))
    assert f"Dictionary at 'blocks.0.hook_resid_post', 40 features, {found.active_per_token:.1f} active" in repr(found)
    assert sum(circuits.feature_effects(found, 5).to_dataframe()["score"]) == pytest.approx(
        float(circuits.feature_effects(found, 5).total.sum())
    )


def test_edges_are_kept_and_read_back(model_named, tmp_path):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    found = circuits.features(frozen, Dictionary(kind="topk"), "blocks.0.hook_resid_post")
    edges = circuits.feature_edges(found, found, query=[1, -1])
    edges.save(tmp_path / "edges")
    again = FeatureEdges.load(tmp_path / "edges")
    assert again.features == edges.features
    assert torch.equal(again.scores, edges.scores)
    frame = edges.to_dataframe()
    assert set(frame["feature"]) == set(edges.features)
    assert len(frame) == edges.scores.numel()
    shown = edges.into(edges.features[0])
    assert f"F{edges.features[0]}" in shown.to_html()
    with pytest.raises(tlens.InvalidInputError, match="no edges into feature 99"):
        edges.into(99)


# ------------------------------------------------------------------ bad input


def altered(**changes):
    dictionary = Dictionary()
    for name, value in changes.items():
        setattr(dictionary, name, value)
    return dictionary


def broken(name):
    weights = Dictionary()
    getattr(weights, name)[0] = torch.nan
    return weights


class Tanh(Dictionary):
    """Features that are no pre-activations."""

    def encode(self, x):
        return self.before(x).tanh().relu()


@pytest.mark.parametrize(
    ("dictionary", "hook", "message"),
    [
        (Dictionary(32), AFTER, "reads vectors of 32 numbers"),
        (Dictionary(dtype=torch.float32), AFTER, r"torch.float32 .* dictionary.to\(torch.float64\)"),
        (Dictionary(), "blocks.7.hook_resid_post", "no hook point of a block .* which has 2"),
        (Dictionary(), "blocks.0.resid_post", r"there are .*hook_resid_post"),
        (Dictionary(), "ln_final.hook_scale", "no hook point of a block"),
        (Dictionary(), "blocks.0.attn.hook_z", "does not hold the residual stream"),
        (Dictionary(), "blocks.0.hook_mlp_out", "does not hold the residual stream"),
        (Dictionary(), None, "does not say where it belongs"),
        (altered(W_dec=None), AFTER, "W_dec missing"),
        (altered(W_dec=torch.zeros(7, 16).double()), AFTER, "needed are W_enc"),
        (altered(b_enc=torch.zeros(7).double()), AFTER, r"b_enc is \(7,\); \[40\] fits"),
        (altered(b_dec=[0.0] * 16), AFTER, "b_dec is a list"),
        (altered(k=0), AFTER, "k is 0"),
        (altered(r_mag=torch.zeros(40)), AFTER, "is gated"),
        (altered(cfg=SimpleNamespace(normalize_activations="batch")), AFTER, "by 'batch'; known"),
        (Tanh(), AFTER, "encode differs from the output of its weights"),
        (altered(decode=lambda features: features[..., :16]), AFTER, "decode differs from"),
        (bare(altered(activation_fn="tanh"), "activation_fn"), AFTER, "activation_fn is tanh"),
        (SimpleNamespace(), AFTER, "W_enc missing, W_dec missing"),
    ],
)
def test_bad_dictionaries(model_named, dictionary, hook, message):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    with pytest.raises(tlens.InvalidInputError, match=message):
        circuits.features(frozen, dictionary, hook)


def named_relu(before):
    return before.relu() ** 2


named_relu.__name__ = "relu"


class HalvedTopK:
    """A TopK that does not give what it chooses."""

    def __call__(self, before):
        best = before.topk(3)
        return torch.zeros_like(before).scatter(-1, best.indices, best.values.relu() / 2)


HalvedTopK.__name__ = "TopK"


class Bare:
    """Weights without `encode`, and whatever else an object may say of itself."""

    def __init__(self, **said):
        whole = Dictionary()
        for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
            setattr(self, name, getattr(whole, name))
        vars(self).update(said)


@pytest.mark.parametrize(
    "said", [{"activation_fn": "relu"}, {"activation_fn": torch.relu}, {"act_fn": torch.nn.ReLU()}]
)
def test_a_plain_relu_is_read_from_weights_alone(model_named, said):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    assert circuits.features(frozen, Bare(**said), frozen.capture.output_name(0)).active_per_token > 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"activation_fn": "leaky_relu"}, "activation_fn is leaky_relu"),
        ({"activation": torch.nn.GELU()}, "activation is GELU"),
        ({"architecture": "gated"}, "architecture is gated"),
        ({"log_threshold": torch.zeros(40)}, "has log_threshold"),
        ({"cfg": {"activation_fn_str": "tanh-relu"}}, "activation_fn_str is tanh-relu"),
        ({"activation_fn_str": "topk"}, "activation_fn_str is topk, and it has no k"),
        ({"architecture": "jumprelu"}, "architecture is jumprelu, and it has no threshold"),
        ({"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3, "postact_fn": None}}, "has postact_fn"),
        ({"k": 3, "activation_fn_str": "relu"}, "what k does is not clear"),
        ({"topk": 5}, "has topk, which is not supported"),
        ({"nonlinearity": "gelu"}, "nonlinearity is gelu"),
        ({"pre_bias": torch.ones(16)}, "has pre_bias, which is not supported"),
        ({"input_scale": 2.0}, "has input_scale"),
        ({"cfg": {"norm_factor": 0.1}}, "has norm_factor"),
        ({"config": SimpleNamespace(metadata={"norm_factor": 0.1})}, "has norm_factor"),
        ({"gate": torch.ones(40)}, "has gate"),
        ({"scaling_factor": torch.ones(40)}, "has scaling_factor"),
        ({"finetuning_scaling_factor": True}, "no such weight"),
        ({"activation_fn": named_relu}, "differs from ReLU on random numbers"),
        ({"activation_fn": HalvedTopK(), "k": 3}, "differs from TopK with k=3"),
        ({"k": 3, "threshold": torch.ones(40, dtype=torch.float64)}, "both k and threshold"),
        ({"k": 3.7}, "k is 3.7"),
        ({"k": torch.tensor([1, 2])}, "a whole number"),
        ({"b_enc": torch.zeros(40)}, r"b_enc is torch.float32 .* W_enc torch.float64"),
        ({"hook_name": "blocks.1.hook_resid_pre"}, "says that it belongs at 'blocks.1.hook_resid_pre'"),
    ],
)
def test_what_weights_alone_do_not_tell_is_refused(model_named, said, message):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    with pytest.raises(tlens.InvalidInputError, match=message):
        circuits.features(frozen, Bare(**said), frozen.capture.output_name(1))


class Gated(torch.nn.Module):
    """A module that says in its class, its buffers and its parts what it does besides."""

    def __init__(self, part):
        super().__init__()
        whole = Dictionary()
        for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
            self.register_buffer(name, getattr(whole, name))
        if part == "buffer":
            self.register_buffer("input_scale", torch.ones(16))
        if part == "module":
            self.inner_norm = torch.nn.LayerNorm(16)
        if part == "activation":
            self.activation = torch.nn.GELU()
        if part == "class":
            self.__class__ = type("Scaled", (Gated,), {"norm_factor": 3.0, "__module__": __name__})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("buffer", "has input_scale"),
        ("module", "has inner_norm"),
        ("activation", "activation is GELU"),
        ("class", "has norm_factor"),
    ],
)
def test_what_a_module_says_in_its_parts_is_refused(model_named, part, message):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    circuits.features(frozen, Gated(None), frozen.capture.output_name(1))
    with pytest.raises(tlens.InvalidInputError, match=message):
        circuits.features(frozen, Gated(part), frozen.capture.output_name(1))


class Forward(Gated):
    """No `encode`, and a `forward` that shows what it is."""

    def __init__(self, factor):
        super().__init__(None)
        self._factor = factor

    def forward(self, x):
        return self._factor * ((x @ self.W_enc + self.b_enc).relu() @ self.W_dec) + self.b_dec


def test_a_forward_without_encode_is_compared(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    assert circuits.features(frozen, Forward(1.0), frozen.capture.output_name(1)).active_per_token > 0
    with pytest.raises(tlens.InvalidInputError, match=r"Forward.forward differs from"):
        circuits.features(frozen, Forward(1.5), frozen.capture.output_name(1))


SAELENS_5 = {
    "architecture": "standard", "d_in": 16, "d_sae": 40, "activation_fn_str": "relu", "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False, "context_size": 128, "model_name": None, "hook_name": None, "hook_layer": 1,
    "hook_head_index": None, "prepend_bos": True, "dataset_path": "a/b", "dataset_trust_remote_code": True,
    "normalize_activations": "none", "dtype": "float64", "device": "cpu", "sae_lens_training_version": "5.11.0",
    "activation_fn_kwargs": {}, "neuronpedia_id": None, "model_from_pretrained_kwargs": {}, "seqpos_slice": (None,),
}  # fmt: skip
"""What SAELens up to 5 writes into cfg.json."""


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("relu", {}),
        ("topk", {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 7}}),
        ("topk", {"architecture": "topk", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 7}}),
        ("jumprelu", {"architecture": "jumprelu"}),
        ("relu", {"normalize_activations": "layer_norm"}),
        ("relu", {"normalize_activations": "constant_norm_rescale", "apply_b_dec_to_input": False}),
    ],
)
def test_configurations_of_saelens_5_are_read(model_named, kind, said, factor):
    """Weights and `cfg.json` alone give the features and the reconstruction of what they configure."""
    config = SAELENS_5 | said | {"finetuning_scaling_factor": factor}
    whole = Dictionary(kind=kind, normalise=config["normalize_activations"], from_input=config["apply_b_dec_to_input"])
    factors = 0.5 + torch.rand(FEATURES, dtype=torch.float64) if factor else torch.ones(FEATURES).double()
    names = ["threshold"] if kind == "jumprelu" else []
    weights = bare(whole, *names)
    weights.cfg = config
    if factor:
        weights.finetuning_scaling_factor = factors
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    hook = frozen.capture.output_name(0)
    found = circuits.features(frozen, weights, hook)
    x = own_stream(frozen, hook)
    features = whole.encode(x)
    assert torch.equal(found.index, features.nonzero())
    assert torch.allclose(found.values, features[features != 0], atol=1e-12)
    assert torch.allclose(found.reconstruction, whole.decode(features * factors), atol=1e-12)
    terms = circuits.feature_effects(found, 5, 7)
    assert float(terms.gap.max()) < 1e-9


def test_a_small_b_dec_is_found_in_half_precision():
    """Whether b_dec is taken away is read from the better of both fits, not from the first that is good enough."""
    frozen = tlens.freeze(tlens.testing.tiny_model("bridge/gpt2").to(torch.bfloat16), some_tokens())

    class Subtracting(Bare):
        def encode(self, x):
            return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    whole = Subtracting()
    for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
        setattr(whole, name, getattr(whole, name).to(torch.bfloat16) * (0.05 if name == "b_dec" else 1))
    read = circuits.features(frozen, whole, frozen.capture.output_name(0)).dictionary
    assert torch.equal(read.b_enc, whole.b_enc - whole.b_dec @ whole.W_enc)


def test_weights_that_are_not_finite():
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        with pytest.raises(tlens.NumericalError, match=f"{name} has values that are not finite"):
            read_dictionary(broken(name))


def test_encoder_decoders_are_refused(model_named):
    model = model_named("bridge/bart")
    input, options = tiny_input(model)
    frozen = tlens.freeze(model, input, **options)
    with pytest.raises(tlens.UnsupportedModelError, match="sparse dictionaries"):
        circuits.features(frozen, Dictionary(), "blocks.0.hook_resid_post")


def test_bad_questions(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    early, late = (circuits.features(frozen, Dictionary(), frozen.capture.output_name(layer)) for layer in range(2))
    again = circuits.features(tlens.freeze(frozen.model, some_tokens()), Dictionary(), frozen.capture.output_name(1))
    named, numbered = (circuits.feature_attribution(late, feature) for feature in ("F7", 7))
    assert torch.equal(named.scores, numbered.scores)
    for call, message in (
        (lambda: circuits.feature_attribution(late, 40), "feature=40: pass 0 to 39"),
        (lambda: circuits.features(frozen, Dictionary(), 3), "hook=3: pass the name of a hook point"),
        (lambda: circuits.feature_attribution(late, "F7@2"), "feature='F7@2': pass an integer"),
        (lambda: circuits.feature_attribution(late, 1, by="path"), "by='path'; use one of 'token'"),
        (lambda: circuits.feature_effects(late, 5, by="head"), "use one of 'feature_token'"),
        (lambda: circuits.feature_effects(frozen, 5), r"make them with circuits.features"),
        (lambda: circuits.feature_edges(late, early), "Swap them"),
        (lambda: circuits.feature_edges(early, again), "of two passes"),
        (lambda: circuits.feature_edges(early, late, []), "name at least one"),
        (lambda: circuits.feature_edges(early, late, [50]), "feature=50"),
        (lambda: circuits.features(frozen, Dictionary(), "blocks.1.hook_resid_mid", hook_out="blocks.0.hook_mlp_out"),
         "comes before"),
        (lambda: circuits.features(frozen, Dictionary(), "blocks.1.hook_resid_mid", hook_out="blocks.1.hook_attn_out"),
         "does not hold what the MLP gives"),
    ):  # fmt: skip
        with pytest.raises(tlens.InvalidInputError, match=message):
            call()


# ------------------------------------------------------------------ the bundled model


def test_the_shipped_dictionaries(demo_model):
    """What is written about them is true, and another model's are refused."""
    import json

    from tensorlens_tl import demo

    facts = json.loads((demo.DICTIONARY_FOLDER / "training.json").read_text(encoding="utf-8"))
    assert sum(path.stat().st_size for path in demo.DICTIONARY_FOLDER.iterdir()) < 600_000
    frozen = tlens.freeze(demo_model, demo.held_out_prompts(demo_model, 32, 64))
    for hook in demo.DICTIONARIES:
        dictionary = tlens.load_demo_dictionary(hook, torch.float64)
        found = circuits.features(frozen, dictionary)
        assert found.active_per_token == pytest.approx(facts["k"], abs=0.5)
        x = own_stream(frozen, hook)[:, 1:].flatten(0, 1)
        left = x - dictionary.decode(dictionary.encode(x))
        explained = 1 - float(left.square().sum() / (x - x.mean(0)).square().sum())
        assert explained == pytest.approx(facts[hook]["explained"], abs=0.03)
    dictionary.model_name = "gpt2"
    with pytest.raises(tlens.InvalidInputError, match="trained on 'gpt2', and this model is 'tensorlens-demo'"):
        circuits.features(frozen, dictionary)
    assert circuits.features(frozen, dictionary, any_model=True).active_per_token > 0
    with pytest.raises(tlens.InvalidInputError, match=r"use 'blocks.0.hook_resid_post' or"):
        tlens.load_demo_dictionary("blocks.3.hook_resid_post")
