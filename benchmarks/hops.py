"""What generated text costs, and information flow routes, beside FlashTrace: sections of `RESULTS.md`."""

from typing import Any

import torch
from page import Lines, row, table
from shapes import Shape, gpt2_small, llama_160m
from timing import LEAST_SHARE, THREADS, beside_a_product, interleaved

import tensorlens_tl as tlens
from tensorlens_tl.testing import Allocations


def generated() -> Lines:
    """## Generated text: 96 tokens of prompt, 32 generated, in forwards

    Costs in addition to freezing the whole text. "Matrix" is divided by the 32 tokens. The cost of hops starts from the
    matrix, which they need once.
    """
    from tensorlens_tl.generation import freeze_generation

    yield table(
        "shape", "threads", "forward, ms", "its share of the product rate", "span", "matrix ÷ 32", "all hops of a span"
    )
    for shape in (gpt2_small(), llama_160m()):
        ids = shape.tokens(128)
        text = freeze_generation(shape.model, ids[:, :96], continuation=ids[0, 96:])
        for threads in THREADS:
            torch.set_num_threads(threads)

            def matrix(text: Any = text) -> None:
                text._links.clear()
                text.attribute()

            text.attribute()
            calls = {
                "forward": lambda shape=shape, ids=ids: shape.forward(ids),
                "hops": lambda text=text: text.attribute(span="all", hops="all"),
                "span": lambda text=text: text.attribute(span="all"),
                "matrix": matrix,
            }
            seconds, _, share = beside_a_product(calls, 3, shape.d_model, shape.flops(128))
            if share < LEAST_SHARE:
                yield row(shape.name, threads, f"discarded: {share:.0%} of the product rate", *[""] * 4)
                continue
            base = seconds["forward"]
            ratios = (seconds["span"] / base, seconds["matrix"] / base / 32, (seconds["hops"] - seconds["span"]) / base)
            yield row(shape.name, threads, 1000 * base, f"{share:.0%}", *ratios)


def flashtrace() -> Lines:
    """## Generated text beside FlashTrace

    Both explain one span of 32 generated tokens after a prompt of 96, from token ids to scores, on the same random
    Llama of 160M parameters in float32. The conservation error of FlashTrace is how far its scores after the hops, on
    the prompt and on generated tokens, are from its scores at hop 0. Ours is how far scores and bias are from the
    model's logits.
    """
    try:
        from flashtrace.core import compute_ifr_sentence_aggregate, compute_multi_hop_ifr
    except ImportError:
        yield "Not measured: flashtrace is not installed here."
        return
    from tensorlens_tl.generation import freeze_generation

    shape = llama_160m()
    ids, prompt = shape.tokens(128), 96
    peer = flashtrace_of(shape, ids)

    @torch.no_grad()
    def theirs(hops: int = 0) -> Any:
        cache, attentions, metadata, weights = peer._capture_model_state(ids, torch.ones_like(ids))
        asked: dict[str, Any] = {
            "sink_start": prompt, "sink_end": 127, "cache": cache, "attentions": attentions, "weight_pack": weights,
            "params": peer._build_ifr_params(metadata, 128), "rotary_emb": metadata.rotary_emb,
        }  # fmt: skip
        if not hops:
            return compute_ifr_sentence_aggregate(**asked)
        return compute_multi_hop_ifr(thinking_span=(prompt, 127), n_hops=hops, **asked)

    def ours(hops: Any = 0, verify: bool = True) -> Any:
        text = freeze_generation(shape.model, ids[:, :prompt], continuation=ids[0, prompt:], verify=verify)
        return text.attribute(span="all", hops=hops)

    yield table("what", "threads", "FlashTrace, s", "ours, s", "ratio", "FlashTrace's conservation error", "ours")
    for threads in THREADS:
        torch.set_num_threads(threads)
        for hops in (0, 2):
            seconds = interleaved({"theirs": lambda hops=hops: theirs(hops), "ours": lambda hops=hops: ours(hops)}, 2)
            began, error = float(theirs().token_importance_total.sum()), "no total but its own"
            if hops:
                found = theirs(hops)
                ended = float(found.observation["sum"].sum()) + found.thinking_ratios[-1] * began
                error = f"{abs(ended - began) / began:.1e}"
            cells = seconds["theirs"], seconds["ours"], seconds["theirs"] / seconds["ours"]
            yield row(f"a span, {hops} hops", threads, *cells, error, f"{float(ours(hops).gap):.1e}")


def routes() -> Lines:
    """## Information flow routes of all queries, 128 tokens, in forwards

    From token ids to scores, including freezing and proof, on the same random Llama of 160M parameters in float32, on
    one thread. FlashTrace adds up attention's edges over layers, as `aggregate="sum"` does; the product follows them to
    the input tokens. "Difference" is the largest difference from FlashTrace's scores, as a share of its largest score.
    """
    try:
        from flashtrace.core import compute_ifr_for_all_positions
    except ImportError:
        yield "Not measured: flashtrace is not installed here."
        return
    torch.set_num_threads(1)
    shape = llama_160m()
    ids = shape.tokens(128)
    peer = flashtrace_of(shape, ids)

    @torch.no_grad()
    def theirs() -> Any:
        cache, attentions, metadata, weights = peer._capture_model_state(ids, torch.ones_like(ids))
        asked: dict[str, Any] = {"params": peer._build_ifr_params(metadata, 128), "rotary_emb": metadata.rotary_emb}
        return compute_ifr_for_all_positions(cache, attentions, weights, **asked).token_importance_matrix

    def ours(method: str, **options: Any) -> Any:
        return tlens.attribute(shape.model, ids, method=method, **options).scores[0]

    calls = {
        "FlashTrace": theirs,
        '`ifr`, `aggregate="sum"`': lambda: ours("ifr", aggregate="sum"),
        "`ifr`": lambda: ours("ifr"),
        "`alti`": lambda: ours("alti"),
        "`alti-logit`, one query": lambda: ours("alti-logit", target=5),
        "`alti-logit`, every query": lambda: ours("alti-logit", target=5, query="all"),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, 2)
    yield table("what", "forwards", "seconds", "peak, MB", "difference")
    expected = theirs()
    for name, call in calls.items():
        with Allocations() as memory:
            made = call()
        off = f"{float((made - expected).abs().max() / expected.max()):.0e}" if "sum" in name else ""
        yield row(name, seconds[name] / seconds["forward"], seconds[name], f"{memory.peak / 1e6:.0f}", off)


def flashtrace_of(shape: Shape, ids: torch.Tensor) -> Any:
    """FlashTrace around a Hugging Face model with the weights of a Llama-like shape."""
    from flashtrace.attribution import LLMIFRAttribution
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = shape.model.original_model.config
    _, module = LlamaForCausalLM(config), LlamaForCausalLM(config).eval()  # drawn as the shape draws its own
    with torch.no_grad():
        assert torch.allclose(module(ids).logits, shape.model(ids), atol=1e-3)
    return LLMIFRAttribution(module, None, show_progress=False)
