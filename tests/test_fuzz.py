"""Random models, and random hooks, caches and loops of other people: what a pass gives is right, or it is refused.

``make fuzz`` tries 300 of each, the default suite 40. What fails is shrunk to the smallest model, shortest prompt and
fewest options that still fail.
"""

import functools

import pytest
import torch
from conftest import hooks_left
from hypothesis import event, given, note, settings, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl.testing import check_map, check_model, model_names, tiny_model
from tensorlens_tl.testing.models import build_bridge, build_hooked

HOOKED = any(name.startswith("hooked/") for name in model_names())
PROCESSED = ("raw", "processed")


def options(**choices):
    """A dict with each option drawn from its choices; the first is the simplest, towards which hypothesis shrinks."""
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


# a head count with the key-value heads that divide it, and the width of a head
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 3)])
D_HEAD = st.sampled_from([2, 4, 6, 8])


@st.composite
def hooked(draw):
    """A HookedTransformer: layout, norm, gating, positions, attention, activation, sizes, processing."""
    heads, kv_heads = draw(HEADS)
    d_head = draw(D_HEAD)
    config = {
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": heads,
        "d_head": d_head,
        "d_model": draw(st.sampled_from([heads * d_head, 6, 10, 16])),
        **draw(options(normalization_type=["LN", "RMS", None, "LNPre", "RMSPre"])),
    }
    if draw(st.booleans()):
        config["n_key_value_heads"] = kv_heads
        config["ungroup_grouped_query_attention"] = draw(st.booleans())
    if draw(st.integers(0, 4)) == 4:
        config["attn_only"] = True
    else:
        config |= draw(options(act_fn=["relu", "gelu", "gelu_new", "silu", "gelu_fast"], gated_mlp=[False, True]))
        config["d_mlp"] = draw(st.integers(1, 20))
    layout = draw(st.sampled_from(["pre", "parallel", "sandwich", "post-only"]))
    if layout == "parallel" and not config.get("attn_only"):
        config["parallel_attn_mlp"] = True
    elif layout == "sandwich" and config["normalization_type"] == "RMS":  # TransformerLens builds no other
        config["use_normalization_before_and_after"] = True
    elif layout == "post-only" and config["normalization_type"] in ("LN", "RMS") and not config.get("attn_only"):
        config |= {"original_architecture": "Olmo2ForCausalLM", "d_model": heads * d_head}  # its Q/K norms want that
    positions = draw(st.sampled_from(["standard", "rotary", "alibi", "shortformer"]))
    config["positional_embedding_type"] = positions
    if positions == "rotary":
        config["rotary_dim"] = draw(st.sampled_from([d for d in (2, 4, d_head) if d <= d_head]))
    special = draw(st.sampled_from([None, "caps", "qk norm", "sinks", "local", "bidirectional"]))
    if special == "sinks" and positions == "alibi":
        special = (
            None  # TransformerLens shifts a row's ALiBi after a longer prompt; with sinks the model itself changes
        )
    config |= {
        "caps": {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
        "qk norm": {"use_qk_norm": True} if "original_architecture" not in config else {},  # Olmo 2 has its own
        "sinks": {"use_attention_sinks": True},
        "local": {"use_local_attn": True, "attn_types": ["local", "global", "local"], "window_size": 2},
        "bidirectional": {"attention_dir": "bidirectional"},
    }.get(special, {})
    return "hooked", draw(st.sampled_from(PROCESSED)), config


@st.composite
def bridge(draw):
    """A TransformerBridge of a Hugging Face model of some family, with sizes and activation of its own."""
    heads, kv_heads = draw(HEADS)
    d_head = draw(st.sampled_from([2, 4, 8]))
    family = draw(st.sampled_from(["gpt2", "bert", "llama", "neox", "opt", "gemma2", "olmo2", "phi", "qwen3", "gptj"]))
    layers, d_mlp = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    act = draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu"]))
    if family in ("gpt2", "gptj"):
        config = {"n_layer": layers, "n_head": heads, "n_embd": heads * d_head, "n_inner": d_mlp}
        config["activation_function"] = act
        if family == "gptj":
            config["rotary_dim"] = 2
    elif family == "opt":
        width = heads * d_head
        config = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "ffn_dim": d_mlp}
        config |= {"word_embed_proj_dim": width, "activation_function": act}
    else:
        config = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * d_head}
        config |= {"intermediate_size": d_mlp, "hidden_act": act, "hidden_activation": act}
        if family in ("llama", "gemma2", "olmo2", "qwen3"):
            config |= {"num_key_value_heads": kv_heads, "head_dim": d_head}
        if family == "gemma2":
            config |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"][:layers]}
    processed = draw(st.sampled_from(PROCESSED)) if family in ("gpt2", "llama", "neox") else "raw"
    return "bridge/" + family, processed, config


@st.composite
def prompts(draw):
    """Lengths of one to three prompts, and the side they are padded on."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return lengths, draw(st.sampled_from(["right", "left"]))


def build(kind, processed, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "hooked":
            return build_hooked(processed=processed == "processed", **config)
        return build_bridge(kind.removeprefix("bridge/"), compatibility=processed == "processed", **config)


def padded(lengths, side, vocabulary=48):
    longest = max(lengths)
    tokens = torch.randint(3, vocabulary, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    place = torch.arange(longest)[None]
    counts = torch.tensor(lengths)[:, None]
    mask = place < counts if side == "right" else place >= longest - counts
    return torch.where(mask, tokens, 0), mask.long()


@pytest.mark.whole
@settings(max_examples=settings.default.max_examples * 3 // 5)  # each builds and checks a model
@given(
    st.one_of(hooked(), bridge()) if HOOKED else bridge(),
    prompts(),
    st.sampled_from([torch.float64, torch.float64, torch.float32]),
)
def test_any_configuration_holds_everything_or_is_refused(configuration, prompt, dtype):
    note(str(configuration))
    model = build(*configuration)
    if dtype != torch.float64 and configuration[1] == "raw":  # a Bridge does not cast its processed weights
        model = model.to(dtype)
        if hasattr(model.cfg, "dtype"):
            model.cfg.dtype = dtype
    tokens, mask = padded(*prompt)
    try:
        report = check_model(model, tokens, attention_mask=mask)
    except (tlens.UnsupportedModelError, tlens.NumericalError) as refusal:
        if bool(mask.all()) or "padd" not in str(refusal):
            raise  # the one thing that may be refused is padding that the model itself does not handle
        event("padding refused")
        check_model(model, tokens[:1, mask[0].bool()])
    else:
        event("holds, at best" if max(report.errors.values()) < 1e-9 else "holds, in float32")
        check_map(tlens.freeze(model, tokens, attention_mask=mask).operator())
    assert hooks_left(model) == 0


# ------------------------------------------------------------------ user-installed hooks, caches and loops

FAMILIES = [
    name
    for name in ("hooked/ln", "hooked/gqa", "bridge/gpt2", "bridge/llama", "bridge/opt", "bridge/bert", "bridge/phi")
    if name in model_names()
]
POINTS = (
    "hook_resid_pre", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_q", "attn.hook_v", "attn.hook_z",
    "attn.hook_pattern", "attn.hook_attn_scores", "mlp.hook_pre", "mlp.hook_post", "ln1.hook_scale", "ln2.hook_scale",
    "ln1.hook_normalized",
)  # fmt: skip
CHANGES = {
    "scaled": lambda x: 1.5 * x,
    "shifted": lambda x: x + 0.1,
    "zeroed": lambda x: 0 * x,
    "flipped": lambda x: x.flip(-1),
    "observed": lambda x: None,
}


@st.composite
def changes(draw):
    """A hook of somebody else: where, what it does, and from which position on."""
    point = draw(st.sampled_from(POINTS))
    where = draw(st.sampled_from([f"blocks.{layer}.{point}" for layer in (0, 1)] + ["unembed.hook_out"]))
    return where, draw(st.sampled_from(sorted(CHANGES))), draw(st.integers(0, 5))


def hook_of(change, first):
    def hook(x, hook):
        made = CHANGES[change](x)
        if made is None or x.ndim < 3:
            return made
        axis = 2 if hook.name.endswith(("pattern", "attn_scores")) else 1  # both have a head axis first
        keep = torch.arange(x.shape[axis]) < first
        return torch.where(keep.reshape(*(-1 if i == axis else 1 for i in range(x.ndim))), x, made)

    return hook


def recomputed(frozen, token, query):
    """Scores of a target by hooks and autograd on the live model: no weight is read."""
    x = frozen.resid_pre(0)
    with frozen.attached() as model, torch.enable_grad():
        leaf = x.clone().requires_grad_(True)
        hooks = [(frozen.points.blocks[0].resid_pre, lambda live, hook: leaf)]
        logit = model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)[:, query, token]
        (gradient,) = torch.autograd.grad(logit.sum(), leaf)
    return (gradient * x).sum(-1), logit.detach()


@given(
    st.sampled_from(FAMILIES),
    st.lists(changes(), min_size=0, max_size=2),
    st.sampled_from(["none", "own", "foreign", "mixed"]),
    st.integers(0, 5),
    st.booleans(),
)
def test_other_peoples_hooks_and_caches_give_the_right_number_or_none(name, changed, cached, query, looped):
    model = _tiny(name)
    tokens = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    hooks = [(where, hook_of(change, first)) for where, change, first in changed if where in model.hook_dict]
    note(f"{name}: {changed}, cache {cached}, query {query}, looped {looped}")
    block = model.blocks[1]
    kind = type(block)
    if looped:
        block.__class__ = _looped(kind)
    try:
        cache = None
        if cached != "none":
            _, cache = model.run_with_cache(tokens)
            cache = dict(cache.items())
        if cached == "mixed":  # one activation of another prompt
            _, other = model.run_with_cache(tokens.flip(1))
            picked = sorted(key for key in cache if "hook" in key and cache[key].shape == other[key].shape)
            place = picked[query * 7 % len(picked)]
            cache[place] = other[place]
        if cached == "foreign":
            _, cache = model.run_with_cache(tokens.flip(1))
        with model.hooks(fwd_hooks=hooks):
            try:
                frozen = tlens.freeze(model, tokens, cache=cache)
                found = frozen.operator().target(5, query=query)
                live = model(**frozen.inputs)[:, query, 5].detach()
                scores, held = recomputed(frozen, 5, query)
            except tlens.TensorLensError as refusal:
                event(f"refused: {type(refusal).__name__}")
                return
        assert not looped
        event("right")
        size = found.scores.abs().amax() + live.abs().amax()
        cap = frozen.view.soft_cap
        total = found.total[:, 0] if cap is None else cap * torch.tanh(found.total[:, 0] / cap)
        assert float((total - live).abs().max()) <= 1e-6 * float(size)
        assert float((held - live).abs().max()) <= 1e-6 * float(size)
        if frozen.prediction_head() is None:  # the activation in a masked model's head has no hook, and stays live
            assert float((scores - found.scores[:, 0]).abs().max()) <= 1e-6 * float(size)
    finally:
        block.__class__ = kind
    assert hooks_left(model) == 0


@functools.cache
def _tiny(name):
    return tiny_model(name)


def _looped(kind):
    class Looped(kind):
        def forward(self, x, *args, **options):
            args = [None if hasattr(value, "get_seq_length") else value for value in args]  # no key-value cache
            options = {key: None if "past" in key else value for key, value in options.items()}
            first = super().forward(x, *args, **options)
            return super().forward(first[0] if isinstance(first, tuple) else first, *args, **options)

    return Looped
