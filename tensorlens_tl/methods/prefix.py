"""The beginning of a causal model's prompts, run once: keys and values that runs of different endings share.

Both of TransformerLens' classes continue from a cache of their own: a TransformerBridge from Hugging Face's, a
HookedTransformer from TransformerLens'. Nothing is trusted: whoever uses it compares the numbers of an unchanged ending
with the whole run's.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from tensorlens_tl.hooks import run
from tensorlens_tl.passes import FrozenPass


class SharedPrefix:
    """Keys and values of the first tokens of a pass's prompts; it grows with `reach`.

    Args:
        frozen: a pass for which `applies`.
    """

    def __init__(self, frozen: FrozenPass) -> None:
        self.frozen = frozen
        self.length = 0
        self._bridge = frozen.view.is_bridge
        self._cache = None
        if not self._bridge:
            device = frozen.inputs["input"].device
            self._cache: Any = TransformerLensKeyValueCache.init_cache(frozen.view.cfg, device, len(frozen.tokens))

    @staticmethod
    def applies(frozen: FrozenPass) -> bool:
        """Whether nothing but token ids is read, causally and without padding, by attention alone."""
        view = frozen.view
        plain = set(frozen.inputs) <= {"input", "attention_mask"} and view.reads == "tokens" and not view.is_whitened
        attends = all(block.mixer is None and not block.has_beside for block in view.blocks)
        # keys that are repeated for their queries do not fit TransformerLens' own cache
        fits = not getattr(view.cfg, "ungroup_grouped_query_attention", False)
        # somebody's hooks may count positions
        return plain and attends and fits and frozen.causal and bool(frozen.mask.all()) and not frozen.other_hooks

    def reach(self, stop: int) -> bool:
        """Run on to the token before `stop`; False where the model gives no cache."""
        if stop > self.length:
            inputs: dict[str, Any] = {"input": self.frozen.inputs["input"][:, self.length : stop]}
            if self._bridge:
                inputs |= {"use_cache": True, "return_type": "logits_and_cache"}
                if self._cache is not None:
                    inputs["past_key_values"] = self._cache
                output = run(self.frozen.model, inputs, [])
                self._cache = output[1] if isinstance(output, tuple) else None
            else:
                run(self.frozen.model, inputs | self._masked(self._cache, inputs["input"]), [])
            self.length = stop
        return self._cache is not None and (not self._bridge or hasattr(self._cache, "batch_select_indices"))

    def before(self, inputs: dict[str, Any], copies: int) -> dict[str, Any]:
        """The inputs of a run that goes on from here, on as many copies of the prompts, copy after copy."""
        rows = torch.arange(len(self.frozen.tokens), device=inputs["input"].device).repeat(copies)
        cache = copy.deepcopy(self._cache)  # a run appends to it
        if self._bridge:
            cache.batch_select_indices(rows)
            return inputs | {"past_key_values": cache, "use_cache": True}
        for entry in cache.entries:
            entry.past_keys = entry.past_keys[rows]
            entry.past_values = entry.past_values[rows]
        cache.previous_attention_mask = cache.previous_attention_mask[rows]
        return inputs | self._masked(cache, inputs["input"])

    @staticmethod
    def _masked(cache: Any, tokens: Tensor) -> dict[str, Any]:
        """Without a mask, a HookedTransformer asks its tokenizer for one."""
        return {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens)}
