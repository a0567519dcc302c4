"""Text classifiers as models for every analysis of this package: their logits are those of classes."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import Classes, ClassScores, classes_of, name_classes
from tensorlens_tl.passes import TOLERANCE

OF_SEQUENCES = "ForSequenceClassification"
OF_ANSWERS = "ForQuestionAnswering"
LOADERS = {
    OF_SEQUENCES: transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    OF_ANSWERS: transformers.AutoModelForQuestionAnswering,
}
"""Name endings of the transformers classes whose heads are supported, and their loaders."""

NEUTRAL = {
    "final_logit_softcapping": None, "logits_soft_cap": None, "logit_scale": 1.0, "logits_scaling": 1.0,
    "output_multiplier": 1.0, "lm_head_multiplier": 1.0, "tie_word_embeddings": False,
}  # fmt: skip
"""What language models do to token logits but no classifier to class logits, switched off."""

SEVERAL = ("regression", "multi_label_classification")
"""Problem types whose outputs do not exclude each other."""

TOKENS = 8
"""The number of random tokens on which the two models are compared."""


def load_classifier(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    hf_model: Any = None,
) -> Any:
    """Boot a text classifier from Hugging Face as a TransformerBridge whose logits are those of its classes.

    The backbone is booted as TransformerLens boots its language model, with the classifier's head in place of the
    unembedding. Classes then take the place of tokens everywhere: ``target="POSITIVE"`` is the logit of that label, and
    if target and minus are left out, the predicted class is explained against the runner-up (for a regression, or for
    labels that do not exclude each other, the largest output alone).

    Supported heads: a linear head for sequences, tokens or answer spans (whose classes are ``"start"`` and ``"end"``);
    and, for sequences, a dense layer with tanh before it, BERT's pooler or RoBERTa's, whose ratio tanh(z)/z is frozen
    like that of any activation. A sequence's classes are read at the first token of an encoder and at the last one of a
    decoder, which is the default `query`; those of tokens and spans at every position, so pass a `query`.

    Text is tokenized as by the classifier's own tokenizer: it may put no BOS token first, or an EOS token last, where
    TransformerLens does otherwise for language models. The logits are compared with those of Hugging Face's own model
    on random tokens.

    Args:
        name: a folder, or a name on the hub.
        device, dtype, tokenizer, revision, trust_remote_code: as in TransformerBridge.boot_transformers.
        hf_model: the classifier, if it is already loaded, on its device and in its dtype; it is taken apart, so do
            not use it afterwards.

    Returns:
        A TransformerBridge with logits `[batch, pos, class]`.

    Raises:
        InvalidInputError: the checkpoint is not a classifier's.
        UnsupportedModelError: an unsupported head, a backbone that TransformerLens does not boot, or a model whose
            logits differ from those of Hugging Face's.

    >>> import tempfile, transformers
    >>> folder = tempfile.mkdtemp()
    >>> config = transformers.BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    ...     id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1},
    ... )
    >>> transformers.BertForSequenceClassification(config).save_pretrained(folder)
    >>> classifier = tlens.load_classifier(folder, dtype=torch.float64)
    >>> attribution = tlens.attribute(classifier, [1, 7, 8, 2], "POSITIVE", minus="NEGATIVE", collapse="target")
    >>> attribution.target, bool(attribution.gap.max() < 1e-9)
    ("logit of 'POSITIVE' − 'NEGATIVE'", True)
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities.devices import get_device

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if hf_model is None:
        config: Any = transformers.AutoConfig.from_pretrained(name, **options)
        named = next(iter(config.architectures or ()), "model of no known class")
    else:
        config = hf_model.config
        dtype = hf_model.dtype
        named = type(hf_model).__name__
    loader = loader_of(named)
    if loader is None:
        raise InvalidInputError(
            f"load_classifier: {name} is the checkpoint of a {named}. Classes that end in {', '.join(LOADERS)} are "
            "supported; TransformerBridge.boot_transformers(name) boots models of language, images and sound."
        )
    language = _language_model(config, named)
    if hf_model is None:
        hf_model = loader.from_pretrained(name, dtype=dtype, attn_implementation="eager", **options)
        hf_model.to(device or get_device())
    hf_model.set_attn_implementation("eager")
    tokens = random_tokens(config).to(hf_model.device)
    theirs = classifier_logits(hf_model.eval(), tokens)
    head = _head(hf_model, named)
    _give(language, hf_model, head, named)
    model = TransformerBridge.boot_transformers(
        name, hf_model=language, device=tokens.device, dtype=dtype, tokenizer=tokenizer, **options
    )
    if model.tokenizer is not None:
        untouched = tokenizer or transformers.AutoTokenizer.from_pretrained(name, **options)
        _read_text_as_trained(model, untouched)
    ours = rows_of(model, tokens, theirs)
    error = float("inf")
    if ours.shape == theirs.shape:
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(torch.finfo(dtype).tiny))
    if not error <= TOLERANCE.get(dtype, 1e-4):
        raise UnsupportedModelError(
            f"load_classifier: the logits of {named} put together from its backbone and its head are not those of "
            f"Hugging Face's own (largest difference {error:.1e} of the largest logit, on {TOKENS} random tokens). "
            "Its head computes something else as well, or TransformerLens boots its backbone as another model."
        )
    return model


def _read_text_as_trained(model: Any, tokenizer: Any) -> None:
    """Let a model read a tokenizer's tokens unchanged: no BOS token added, and no EOS token removed."""
    first = tokenizer("a")["input_ids"][:1]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model._tokenizer = tokenizer  # the public name reloads it with add_bos_token=True, which drops [CLS] and [SEP]
    model.cfg.tokenizer_prepends_bos = first == [tokenizer.bos_token_id]
    model.cfg.default_prepend_bos = model.cfg.tokenizer_prepends_bos
    model.cfg.tokenizer_appends_eos = False


def loader_of(named: str) -> Any:
    """Return the loader of a transformers class, by its name; None unless it is a classifier with a supported head."""
    return next((loader for ending, loader in LOADERS.items() if named.endswith(ending)), None)


def is_classifier(name: str) -> bool:
    """Whether a folder, or a name on the hub, is the checkpoint of a classifier with a supported kind of head.

    False without a config: loading the model then says why.
    """
    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return False
    return any(loader_of(named) is not None for named in config.get("architectures") or ())


def random_tokens(config: Any, seed: int = 0) -> Tensor:
    """Return one prompt of random tokens, none of them padding: classifiers look for where padding begins."""
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary - 1, (1, TOKENS), generator=generator)
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    return torch.where(tokens == padding, vocabulary - 1, tokens) if isinstance(padding, int) else tokens


def classifier_logits(classifier: Any, tokens: Tensor) -> Float[Tensor, "row class"]:
    """Return the class logits of Hugging Face's own model for one prompt; one row for a sequence classifier."""
    with torch.no_grad():
        output = classifier(input_ids=tokens)
    if "logits" not in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)[0]
    return output.logits.reshape(-1, output.logits.shape[-1])


def rows_of(model: Any, tokens: Tensor, theirs: Float[Tensor, "row class"]) -> Float[Tensor, "row class"]:
    """Return the rows of a booted classifier's logits that correspond to those of Hugging Face's own model."""
    with torch.no_grad():
        ours = model(tokens)[0]
    if len(theirs) > 1:
        return ours
    classes = classes_of(model)
    assert classes is not None
    return ours[:1] if classes.at_first else ours[-1:]


def _language_model(config: Any, named: str) -> Any:
    """Return the language model of a classifier's backbone without weights, in the class that TransformerLens knows."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"load_classifier: {named} is an encoder–decoder, whose head is not supported.")
    # encoders come first: they are among the causal models as well
    mappings: list[Any] = [MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING]
    kind: Any = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if kind is None or kind.__name__ not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"load_classifier: this TransformerLens does not boot the backbone of {named} "
            f"({kind.__name__ if kind else type(config).__name__})."
        )
    neutral = copy.deepcopy(config)
    for option, value in NEUTRAL.items():
        if hasattr(neutral, option):
            setattr(neutral, option, value)
    neutral.architectures = [kind.__name__]
    with torch.device("meta"):
        return kind._from_config(neutral, attn_implementation="eager")


@dataclass(frozen=True)
class _Head:
    """A classifier's head: the linear layer, whatever comes before it, and the names of both in the checkpoint."""

    linear: nn.Linear
    linear_name: str
    dense: nn.Module | None = None
    act: nn.Module | None = None
    dense_name: str = ""


def _head(classifier: Any, named: str) -> _Head:
    """Return a classifier's head, as far as its modules show; comparing logits decides whether that is all of it."""
    backbone = classifier.base_model
    parts = dict(classifier.named_children())
    heads = {name: part for name, part in parts.items() if part is not backbone and not isinstance(part, nn.Dropout)}
    name, part = next(iter(heads.items()), ("", nn.Identity()))
    pooler = getattr(backbone, "pooler", None)
    of_sequences = named.endswith(OF_SEQUENCES)
    if len(heads) == 1 and isinstance(part, nn.Linear):
        if not of_sequences or pooler is None:
            return _Head(part, name)
        if isinstance(getattr(pooler, "activation", None), nn.Tanh):
            dense_name = f"{classifier.base_model_prefix}.pooler.dense"
            return _Head(part, name, pooler.dense, pooler.activation, dense_name)
    dense, linear = (getattr(part, inner, None) for inner in ("dense", "out_proj"))
    if len(heads) == 1 and of_sequences and isinstance(dense, nn.Linear) and isinstance(linear, nn.Linear):  # RoBERTa's
        return _Head(linear, f"{name}.out_proj", dense, nn.Tanh(), f"{name}.dense")
    described = ", ".join(f"{name} ({type(part).__name__})" for name, part in heads.items())
    raise UnsupportedModelError(
        f"load_classifier: the head of {named} is {described or 'nothing besides its backbone'}, which is not "
        "supported; a linear layer is, or before it a dense one with tanh. Where adapters wrap it, merge them first "
        "(merge_and_unload)."
    )


def _give(language: Any, classifier: Any, head: _Head, named: str) -> None:
    """Put a classifier's backbone and head in place of a language model's own, and register its classes."""
    backbone = classifier.base_model
    if hasattr(backbone, "pooler"):
        backbone.pooler = None  # part of the head, if it is used
    setattr(language, language.base_model_prefix, backbone)
    encodes = type(language).__name__.endswith("ForMaskedLM")
    if encodes:
        language.cls = ClassScores(head.dense, head.act, head.linear)
        names = {"cls.seq_relationship": head.linear_name, "cls.dense": head.dense_name}
        if hasattr(language, "lm_head"):  # RoBERTa's
            language.lm_head = language.cls
    else:
        language.set_output_embeddings(head.linear)
        names = {name: head.linear_name for name, part in language.named_modules() if part is head.linear}
    left = [name for name, weight in language.named_parameters() if weight.is_meta]
    if left:
        raise UnsupportedModelError(
            f"load_classifier: the language model of {named} has a weight that the classifier lacks: {left[0]}."
        )
    labels = {int(number): str(label) for number, label in classifier.config.id2label.items()}
    if named.endswith(OF_ANSWERS):
        labels = dict(enumerate(("start", "end")))
    several = named.endswith(OF_ANSWERS) or classifier.config.problem_type in SEVERAL
    exclude = len(labels) > 1 and not several
    of_sequences = named.endswith(OF_SEQUENCES)
    padding: Any = None
    if of_sequences and not encodes:
        padding = getattr(classifier.config.get_text_config(), "pad_token_id", None)
    classes = Classes(named, labels, of_sequences and encodes, exclude, padding, names)
    name_classes(language.eval(), classes)
