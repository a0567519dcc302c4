"""The registry: methods and layer maps, one name, one call, one kind of result.

A method is a function of a `FrozenPass` and keyword options that returns an `Attribution`:

    >>> import tensorlens_tl as tlens
    >>> @tlens.register_method("uniform")
    ... def uniform(frozen, *, query=-1):
    ...     \"\"\"The same score for every source token: a baseline.\"\"\"
    ...     scores = frozen.operator().in_out(query).scores
    ...     return tlens.Attribution.of(frozen, 0 * scores + 1, method="uniform", query=query)
    >>> "uniform" in tlens.list_methods()
    True

A layer map is a function of a `FrozenPass` that returns one map of token pairs per layer,
`[layer, batch, query, key]`. `mean` and `rollout` aggregate it by its name:

    >>> import torch
    >>> @tlens.register_layer_map("first-head", holds_residual=False)
    ... def first_head(frozen):
    ...     \"\"\"The pattern of each layer's first head, between real tokens.\"\"\"
    ...     real = frozen.mask[:, :, None] & frozen.mask[:, None]
    ...     return torch.stack([frozen.pattern(layer)[:, 0] * real for layer in range(frozen.n_layers)])
    >>> frozen = tlens.freeze(tlens.load_demo_model(), "Return the value of the")
    >>> tlens.attribute(frozen, method="rollout", layer_map="first-head", query=-1)
    Attribution('rollout', batch=1, query=1, key=6)

What a method needs of a model, its registration says by names of `tensorlens_tl.requirements.REQUIREMENTS`, as in
``@register_method("mine", needs=("head_vectors", "unwhitened"))``: other models are refused before any work starts.

Packages publish methods and layer maps through the entry-point group ``tensorlens_tl.methods``: a function, or a module
that registers them when it is imported. The built-in ones are published and registered in just that way.
"""

from tensorlens_tl.registry.attributing import (
    PER_PROMPT as PER_PROMPT,
    attribute,
    by_rule as by_rule,
    list_rules,
    register_rule,
    split_options as split_options,
)
from tensorlens_tl.registry.registering import (
    LayerMap,
    Method,
    get_layer_map,
    get_method,
    list_layer_maps,
    list_methods,
    register_alias,
    register_layer_map,
    register_method,
    renamed as renamed,
    unknown_method as unknown_method,
)

__all__ = [
    "LayerMap",
    "Method",
    "attribute",
    "get_layer_map",
    "get_method",
    "list_layer_maps",
    "list_methods",
    "list_rules",
    "register_alias",
    "register_layer_map",
    "register_method",
    "register_rule",
]
