"""Routes of information against the peers' own numbers, and against slow loops over cached activations."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import close, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl.methods import flow_edges
from tensorlens_tl.testing import tiny_model

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["bridge/gpt2", "bridge/llama", "bridge/neox", "bridge/gemma2", "bridge/bert"]
"""Pre-LN, RMSNorm with grouped queries, parallel, norms on both sides of a sublayer, and post-LN."""


# ------------------------------------------------------------------ beside the peers' own numbers

ROTARY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
LEARNED = {
    "max_position_embeddings": 32, "hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "ffn_dim": 24,
}  # fmt: skip
STORED = {
    "ifr_llama": ("LlamaConfig", "LlamaForCausalLM", ROTARY),
    "ifr_qwen2": ("Qwen2Config", "Qwen2ForCausalLM", ROTARY),
    "alti_logit_gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4}),
    "alti_logit_opt": ("OPTConfig", "OPTForCausalLM", LEARNED),
}
"""What is in `golden`, beside the scripts that made it, and the models that it is of."""


def stored(file):
    """A frozen pass of the model that a peer was asked about, and what it found."""
    transformers = importlib.import_module("transformers")
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    theirs, (config, architecture, sizes) = np.load(GOLDEN / f"{file}.npz"), STORED[file]
    config = getattr(transformers, config)(vocab_size=48, attn_implementation="eager", use_cache=False, **sizes)
    module = getattr(transformers, architecture)(config).double().eval()
    module.load_state_dict(
        {key.removeprefix("weights."): torch.from_numpy(theirs[key]) for key in theirs if key.startswith("weights.")}
    )
    model = builder.build_bridge_from_module(module, architecture, hf_config=config)
    found = {key: torch.from_numpy(theirs[key]).double() for key in theirs if not key.startswith("weights.")}
    return tlens.freeze(model, found.pop("tokens").long()), found


@pytest.fixture(scope="module", params=["ifr_llama", "ifr_qwen2"])
def peer(request):
    return stored(request.param)


def agree(mine, theirs):
    """To 1e-6 of the largest: the norms of these models, and where FlashTrace ends, are float32."""
    assert mine.shape == theirs.shape
    assert float((mine - theirs).abs().max()) < 1e-6 * float(theirs.abs().max())


@pytest.mark.numeric
def test_edges_are_flashtraces(peer):
    frozen, theirs = peer
    edges = flow_edges(frozen, value_bias=False)
    agree(edges.heads[:, 0].sum(1).transpose(0, 1), theirs["e_attn_tokens"])
    agree(edges.heads[:, 0].sum(-1).permute(2, 0, 1), theirs["head_importance"])
    agree(edges.stream[:, 0].T, theirs["e_resid_attn"])
    agree(edges.mlp[:, 0].T, theirs["e_ffn"])
    agree(edges.bypass[:, 0].T, theirs["e_resid_ffn"])
    agree(tlens.attribute(frozen, method="ifr", aggregate="sum", value_bias=False).scores[0], theirs["total"])


def test_flashtrace_leaves_the_value_bias_out(peer):
    """Which Qwen 2 has and Llama has not: with it, Qwen's numbers are others."""
    frozen, theirs = peer
    off = tlens.attribute(frozen, method="ifr", aggregate="sum").scores[0] - theirs["total"]
    qwen = frozen.view.blocks[0].attention.b_V is not None
    assert (float(off.abs().max()) > 0.01) is qwen


@pytest.mark.numeric
@pytest.mark.parametrize(("file", "atol"), [("alti_logit_gpt2", 1e-9), ("alti_logit_opt", 1e-6)])
def test_alti_logit_is_its_authors(file, atol):
    """OPT's softmax computes in float32 whatever the dtype, so that its patterns differ between processors."""
    frozen, theirs = stored(file)
    result = tlens.attribute(frozen, method="alti-logit", target=5, minus=9)
    assert close(result.layers[:, 0, 0], theirs["layers"], atol)
    assert close(result.scores[0, 0], theirs["layers"].sum(0), atol)
    assert close(result.bias[0, 0], theirs["rest"], atol)


# ------------------------------------------------------------------ the formulas, one pair of tokens at a time


class Slowly:
    """The parts of one prompt's formulas from TransformerLens' own cache and Hugging Face's own modules."""

    def __init__(self, model, frozen):
        self.model, self.frozen, self.blocks = model, frozen, model.blocks
        self.post, self.heads = frozen.layouts[0].name == "post", model.blocks[0].attn.W_O.shape[0]
        _, self.cache = model.run_with_cache(frozen.tokens)

    def normed(self, vector, module, scale):
        """The linear part of a norm: its scale is held."""
        inner = getattr(module, "original_component", module)
        kind = type(inner).__name__
        if kind == "LayerNorm":
            vector = vector - vector.mean()
        gain = 1 + inner.weight if kind.startswith("Gemma") else inner.weight
        return vector / scale * gain

    def given(self, layer, head, i, j):
        """A^h_ij u_j^h, through a norm after attention where there is one."""
        attention, at = self.blocks[layer].attn, f"blocks.{layer}"
        v = self.cache[f"{at}.attn.hook_v"][0, j]
        v = v[head // (self.heads // len(v))]
        vector = self.cache[f"{at}.attn.hook_pattern"][0, head, i, j] * (v @ attention.W_O[head])
        after = self.frozen.layouts[layer].attn.after
        if after is None:
            return vector
        return self.normed(vector, getattr(self.blocks[layer], after), self.cache[f"{at}.{after}.hook_scale"][0, i])

    def stream(self, layer):
        return self.frozen.resid_pre(layer)[0]

    def attention_sum(self, layer):
        """x + attention, before a norm around it."""
        at, after = f"blocks.{layer}", self.frozen.layouts[layer].attn.after
        if self.post:
            return self.cache[f"{at}.ln1.hook_in"][0]
        return self.stream(layer) + self.cache[f"{at}.{after}.hook_out" if after else f"{at}.hook_attn_out"][0]


@pytest.mark.parametrize("name", FAMILIES)
def test_flow_edges_by_the_papers_formula(name, model_named):
    model = model_named(name)
    frozen = tlens.freeze(model, some_tokens(1, 4))
    it, edges = Slowly(model, frozen), flow_edges(frozen)
    maps = torch.zeros(2, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for layer in range(2):
            parallel, x = frozen.layouts[layer].parallel, it.stream(layer)
            whole = it.attention_sum(layer)
            end = it.stream(layer + 1) if not it.post else it.cache[f"blocks.{layer}.ln2.hook_in"][0]
            mid = it.cache[f"blocks.{layer}.ln1.hook_out"][0] if it.post else whole
            written = end - (whole if parallel else mid)
            whole = end if parallel else whole
            for i in range(4):

                def nearer(vector, y):
                    return max(0.0, float(y.abs().sum() - (y - vector).abs().sum()))

                pairs = [[nearer(it.given(layer, head, i, j), whole[i]) for j in range(4)] for head in range(it.heads)]
                stream = nearer(x[i], whole[i])
                mlp, bypass = nearer(written[i], end[i]), 0.0 if parallel else nearer(mid[i], end[i])
                total = sum(map(sum, pairs)) + stream + (mlp if parallel else 0)
                through = total if parallel else mlp + bypass
                expected = torch.tensor(pairs, dtype=torch.float64) / total
                assert close(edges.heads[layer, 0, :, i], expected, atol=tolerance(name))
                assert float(edges.stream[layer, 0, i]) == pytest.approx(stream / total, abs=tolerance(name))
                assert float(edges.mlp[layer, 0, i]) == pytest.approx(mlp / through, abs=tolerance(name))
                assert float(edges.bypass[layer, 0, i]) == pytest.approx(bypass / through, abs=tolerance(name))
                maps[layer, i] = expected.sum(0)
                maps[layer, i, i] += (stream + (mlp if parallel else 0)) / total
    result = tlens.attribute(frozen, method="ifr")
    assert close(result.layers[:, 0], maps, atol=tolerance(name))
    assert close(result.scores[0], maps[1] @ maps[0], atol=tolerance(name))
    assert close(result.scores, tlens.attribute(frozen, method="rollout", layer_map="ifr").scores)


def test_a_threshold_leaves_out_edges_and_shares_out_the_rest(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    every, some = flow_edges(frozen), flow_edges(frozen, 0.05)
    kept = every.heads * (every.heads > 0.05)
    stream = every.stream * (every.stream > 0.05)
    total = kept.sum((2, 4)) + stream
    assert bool((kept == 0).any())
    assert close(some.heads, kept / total[:, :, None, :, None])
    assert close(some.stream, stream / total)
    assert close(some.mlp + some.bypass, torch.ones_like(some.mlp))
    rows = tlens.attribute(frozen, method="ifr", threshold=0.05).scores.sum(-1)
    assert close(rows, torch.ones_like(rows))


def test_chunks_of_head_vectors_change_nothing(model_named, monkeypatch):
    for name in ("bridge/llama", "bridge/bert"):
        frozen = tlens.freeze(model_named(name), some_tokens())
        whole = flow_edges(frozen).heads
        monkeypatch.setattr("tensorlens_tl.layerwise.VECTOR_BUDGET", 3 * frozen.resid_pre(0).nbytes)
        assert torch.equal(flow_edges(frozen).heads, whole)


# ------------------------------------------------------------------ ALTI-Logit


def directly(it, layer, vector, i):
    """What a vector that attention adds at a position adds to the stream that is unembedded, past every sublayer."""
    if it.post:
        norms = [f"blocks.{number}.{name}" for number in range(layer, 2) for name in ("ln1", "ln2")]
        for at in norms:
            vector = it.normed(vector, it.model.get_submodule(at), it.cache[f"{at}.hook_scale"][0, i])
        own = it.model.original_model.cls.predictions.transform
        dense = getattr(own.dense, "original_component", own.dense)
        z = dense(it.stream(2)[i])
        vector = torch.nn.functional.gelu(z) / z * (vector @ dense.weight.T)
    return it.normed(vector, it.model.ln_final, it.cache["ln_final.hook_scale"][0, i])


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/llama", "bridge/bert"])
def test_alti_logit_by_the_papers_formula(name, model_named):
    model, target, minus, i = model_named(name), 5, 9, 3
    frozen = tlens.freeze(model, some_tokens(1, 4))
    it = Slowly(model, frozen)
    rolled, parts = torch.eye(4, dtype=torch.float64), []
    with torch.no_grad():
        W_U = model.original_model.get_output_embeddings()
        W_U = getattr(W_U, "original_component", W_U).weight
        for layer in range(2):
            delta, mixing = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
            for k in range(4):
                for head in range(it.heads):
                    moved = directly(it, layer, it.given(layer, head, i, k), i)
                    delta[k] += (W_U[target] - W_U[minus]) @ moved
            parts.append(delta @ rolled)
            for query in range(4):
                y = it.attention_sum(layer)[query]
                ln1 = f"blocks.{layer}.ln1"
                y = it.cache[f"{ln1}.hook_out"][0, query] if it.post else y
                for key in range(4):
                    vector = sum(it.given(layer, head, query, key) for head in range(it.heads))
                    vector = vector + it.stream(layer)[query] if key == query else vector
                    if it.post:
                        vector = it.normed(vector, model.get_submodule(ln1), it.cache[f"{ln1}.hook_scale"][0, query])
                    mixing[query, key] = max(0.0, float(y.abs().sum() - (y - vector).abs().sum()))
            rolled = mixing / mixing.sum(-1, keepdim=True) @ rolled
        logits = model(frozen.tokens)[0, i].double()
    result = tlens.attribute(frozen, method="alti-logit", target=target, minus=minus)
    assert close(result.layers[:, 0, 0], torch.stack(parts), atol=tolerance(name))
    assert close(result.scores[0, 0], sum(parts), atol=tolerance(name))
    assert float(result.total) == pytest.approx(float(logits[target] - logits[minus]), abs=10 * tolerance(name))
    assert float(result.gap) < tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_alti_logit_sums_to_the_logit(name, model_named):
    """And what it leaves as bias is what direct effects say that the other components add."""
    frozen = tlens.freeze(model_named(name), some_tokens())
    direct = tlens.circuits.logit_attribution(frozen, 5, 9, query="all", by="component")
    moves = torch.tensor([".attn" in part for part in direct.names])
    begins = ("MLP", "embed", "pos_embed", "token_type")
    sums = moves | torch.tensor([part.startswith(begins) for part in direct.names])
    for updates, scored in (("attention", moves), ("all", sums)):
        result = tlens.attribute(frozen, method="alti-logit", target=5, minus=9, updates=updates, query="all")
        assert close(result.scores.sum(-1) + result.bias, result.total, atol=tolerance(name))
        assert close(result.scores.sum(-1), direct.scores[..., scored].sum(-1), atol=tolerance(name))
        assert close(result.bias, direct.scores[..., ~scored].sum(-1), atol=tolerance(name))
        if updates == "attention":
            assert close(result.layers.sum(0), result.scores)
            for layer in range(2):
                one = direct.scores[..., direct.names.index(f"L{layer}.attn")]
                assert close(result.layers[layer].sum(-1), one, atol=tolerance(name))


def test_all_updates_go_on_from_where_they_are_read(model_named):
    """By hand from direct effects and ALTI's maps: behind attention, or in a parallel block before it."""
    for name in ("bridge/gpt2", "bridge/neox"):
        frozen = tlens.freeze(model_named(name), some_tokens())
        direct = tlens.circuits.logit_attribution(frozen, 5, by="component")
        maps = tlens.attribute(frozen, method="alti").layers
        last = [torch.eye(6, dtype=torch.float64).expand(2, 6, 6), maps[0], maps[1] @ maps[0]]
        attention = tlens.attribute(frozen, method="alti-logit", target=5)
        everything = tlens.attribute(frozen, method="alti-logit", target=5, updates="all")
        expected = attention.scores.clone()
        for part, score in zip(direct.names, direct.scores.unbind(-1), strict=True):
            if part.startswith("MLP"):
                expected += score[..., None] * last[int(part[3:]) + (not frozen.layouts[0].parallel)][:, 5:]
            elif "embed" in part:
                expected[..., 5] += score
        assert close(everything.scores, expected)


def test_targets_of_alti_logit(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())

    def of(target, **options):
        return tlens.attribute(frozen, method="alti-logit", target=target, **options)

    assert close(of(5, minus=9).scores, of(5).scores - of(9).scores)
    assert close(of([5, 7]).scores[1], of(7).scores[1])
    twice = of([[5, 7], [5, 7]], query=[2, 2])  # two questions about one position
    assert close(twice.scores[:, 1:], of(7, query=2).scores)
    assert close(twice.scores[:, :1], of(5, query=2).scores)
    following = of(tlens.NEXT, query=slice(None, -1))
    assert close(following.scores[:1, 2:3], of([int(frozen.tokens[0, 3])] * 2, query=2).scores[:1])


def test_a_position_that_no_vector_brings_nearer_keeps_what_it_has():
    """Attention adds twice the stream, with the other sign, as a bias: ALTI's row is empty there."""
    model = tiny_model("bridge/gpt2")
    tokens = some_tokens(1, 1)
    with torch.no_grad():
        attention = model.blocks[0].attn.original_component
        attention.c_attn.weight.zero_()
        attention.c_attn.bias.zero_()
        attention.c_proj.bias.copy_(-2 * tlens.freeze(model, tokens).resid_pre(0)[0, 0])
    frozen = tlens.freeze(model, tokens)
    assert float(tlens.attribute(frozen, method="alti").layers[0].sum()) == 0
    assert float(flow_edges(frozen).stream[0].sum()) == 0
    result = tlens.attribute(frozen, method="alti-logit", target=5, updates="all")
    assert float(result.gap) < 1e-12
    assert float(result.scores.abs()) > 0.01


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ifr", {"aggregate": "mean"}, "'product' or 'sum'"),
        ("ifr", {"threshold": 1}, "at least 0, below 1"),
        ("ifr", {"threshold": "0.1"}, "at least 0, below 1"),
        ("ifr", {"query": 9}, "out of range"),
        ("alti-logit", {"target": 5, "updates": "mlp"}, "'attention' or 'all'"),
        ("alti-logit", {"target": 5, "distance": "cosine"}, "'l1' or 'l2'"),
        ("alti-logit", {"target": 5, "minus": 5}, "same token"),
    ],
)
def test_bad_options(method, options, message, model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.attribute(frozen, method=method, **options)
