"""The bundled models. Everything is on disk; nothing is downloaded.

| name | what |
| --- | --- |
| `language` | GPT-2 architecture, 4 layers, width 128: reads Python documentation, has induction heads |
| `recall` | 2 layers, width 64: key–value recall (`tensorlens_tl.evaluate.recall`) |
| `brackets` | 3 layers, width 64: closes nested brackets (`tensorlens_tl.evaluate.brackets`) |
| `relations` | 3 layers, width 64: knows the shipped relations (`tensorlens_tl.evaluate.shipped_relations`) |
| `encoder` | BERT architecture, 3 layers, width 128: masked words of the same text as `language` |
| `whitened` | GPT-NeoX architecture, 2 layers, width 32, whitening before each: characters of the same text |
| `digits` | Vision Transformer, 3 layers, width 32: which digit an image of 8 × 8 pixels shows (`digit_images`) |
| `reversal` | BART architecture, 1 + 1 layers, width 32: writes six letters in reverse (`reversal_words`) |

In the repository, ``scripts/train.py`` trains the first, ``train_whitened.py`` `whitened`, ``train_vision.py``
`digits`, ``train_reversal.py`` `reversal`, and ``train_small.py`` the others. `load_demo_dictionary` gives sparse
autoencoders of the first one's residual stream. `induction_checkpoints` gives one small model at several steps of its
training (``train_induction.py``), on the way to induction.
Weights are stored in half precision (`recall`, `brackets`, `relations`, `encoder`, the autoencoders and checkpoints) or
as float32 numbers rounded to 15 bits (``scripts/rounding.py``), which an archive compresses.
`program` gives models that nobody trained: their weights are constructed by hand (`tensorlens_tl.demo.programs`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Whole, check_choice, whole_count, whole_number
from tensorlens_tl.demo.programs import PROGRAMS, Program, program
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.whitening import whiten

__all__ = [
    "CHECKPOINTS", "DICTIONARIES", "FOLDERS", "INDUCTION_WORDS", "PROGRAMS", "PROMPT", "Dictionary", "Program",
    "digit_images", "held_out_prompts", "held_out_text", "induction_checkpoints", "load_demo_dictionary",
    "load_demo_model", "program", "reversal_words",
]  # fmt: skip

MODEL_FOLDER = Path(__file__).parent / "model"
DICTIONARY_FOLDER = Path(__file__).parent / "dictionaries"
FOLDERS = {"language": MODEL_FOLDER} | {
    name: Path(__file__).parent / "models" / name
    for name in ("recall", "brackets", "relations", "encoder", "whitened", "digits", "reversal")
}
"""Where each model lies, in Hugging Face format."""

CHECKPOINT_FOLDER = Path(__file__).parent / "models" / "induction"

CHECKPOINTS = (0, 500, 1000, 1400, 1600, 1700, 1800, 2200)
"""The training steps that `induction_checkpoints` has."""

INDUCTION_WORDS = ("<|bos|>", "<|pad|>", *"abcdefghijklmnopqrstuv")
"""What the model of these checkpoints reads."""

DICTIONARIES = ("blocks.0.hook_resid_post", "blocks.2.hook_resid_post")
"""Where the bundled model `language` has sparse autoencoders."""

ONLY_BRIDGE = ("encoder", "whitened", "digits", "reversal")

PROMPT = "If the module is not found, a ModuleNotFoundError is raised. If the file is not found, a FileNotFoundError is"
"""The sentence of the demo."""


def held_out_text() -> list[str]:
    """The documents the model was not trained on (the standard library differs between Python versions).

    >>> all(tlens.demo.held_out_text())
    True
    """
    return json.loads((MODEL_FOLDER / "held_out.json").read_text(encoding="utf-8"))


def held_out_prompts(
    model: Any, prompts: Whole = 128, length: Whole = 48, *, mask_at: int | None = None
) -> Int[Tensor, "prompt pos"]:
    """Windows of the held-out text, spread evenly over it, between the special tokens that the model expects.

    Args:
        model: a bundled text model (`language`, `encoder` or `whitened`).
        prompts: how many.
        length: tokens of text in each.
        mask_at: a position that gets the tokenizer's mask token.

    Raises:
        InvalidInputError: a model that reads no text, or more prompts or tokens than there can be.

    >>> tlens.demo.held_out_prompts(model, 4, length=8).shape  # with the token that texts begin with
    torch.Size([4, 9])
    """
    prompts = whole_count("prompts", prompts)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InvalidInputError("held_out_prompts: this model reads no text; digit_images() gives images of digits.")
    rows = tokenizer(held_out_text(), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for row in rows for token in row])
    length = whole_number("length", length, 1, len(stream))
    starts = torch.linspace(0, len(stream) - length, prompts).long()
    start = tokenizer.cls_token_id or tokenizer.bos_token_id
    end = tokenizer.sep_token_id
    before, after = (torch.full((prompts, int(t is not None)), t or 0) for t in (start, end))
    windows = torch.cat([before, stream[starts[:, None] + torch.arange(length)], after], dim=1)
    if mask_at is not None:
        windows[:, mask_at] = tokenizer.mask_token_id
    return windows


def digit_images(*, held_out: bool = True) -> tuple[Float[Tensor, "image 1 8 8"], Int[Tensor, "image"]]:
    """Handwritten digits for the model `digits`: 899 images that it has not seen, or the 898 it was trained on.

    Pixels are shares of ink, 0 to 1, in float32; the labels say which digit each image shows. The images are the test
    set of *Optical Recognition of Handwritten Digits* (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998;
    CC BY 4.0), as scikit-learn brings them (`load_digits`) and in its order; the first half is for training.

    Args:
        held_out: the second half.

    >>> images, digits = tlens.demo.digit_images()
    >>> images.shape, digits.shape
    (torch.Size([899, 1, 8, 8]), torch.Size([899]))
    """
    from safetensors.torch import load_file

    data = load_file(FOLDERS["digits"] / "digits.safetensors")
    middle = len(data["labels"]) // 2
    half = slice(middle, None) if held_out else slice(middle)
    return data["images"][half, None].float() / 16, data["labels"][half].long()


def reversal_words() -> Int[Tensor, "word letter"]:
    """The 1004 words that the model `reversal` has not seen, six letters each, as token ids: every 997th of all words.

    >>> tlens.demo.reversal_words().shape
    torch.Size([1004, 6])
    """
    numbers = torch.arange(0, 10**6, 997)[:, None]
    return numbers // 10 ** torch.arange(5, -1, -1) % 10 + 3


@dataclass(eq=False)
class Dictionary:
    """A TopK sparse autoencoder: ``x ≈ encode(x) @ W_dec + b_dec`` with at most `k` active features for a token.

    Attributes:
        hook_name, model_name: whose residual stream it was trained on.
    """

    W_enc: Float[Tensor, "d_model feature"]
    b_enc: Float[Tensor, "feature"]
    W_dec: Float[Tensor, "feature d_model"]
    b_dec: Float[Tensor, "d_model"]
    k: int
    hook_name: str
    model_name: str = "tensorlens-demo"

    def encode(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any feature"]:
        """What each feature is worth, zero for all but the `k` largest."""
        before = x @ self.W_enc + self.b_enc
        largest = before.topk(self.k)
        return torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())

    def decode(self, features: Float[Tensor, "*any feature"]) -> Float[Tensor, "*any d_model"]:
        """The reconstruction."""
        return features @ self.W_dec + self.b_dec


def load_demo_dictionary(
    hook: str = "blocks.2.hook_resid_post", dtype: torch.dtype = torch.float32, *, folder: Path | str | None = None
) -> Dictionary:
    """A sparse autoencoder of the bundled model `language`: 512 features, of which 16 are active at a token.

    Trained by the repository's ``scripts/train_dictionary.py``; how well it reconstructs held-out text stands in
    ``dictionaries/training.json``.

    Args:
        hook: one of `DICTIONARIES`.
        dtype: of the weights, as the model's.
        folder: another folder of dictionaries.

    Raises:
        InvalidInputError: no dictionary for that hook point.

    >>> tlens.load_demo_dictionary().W_enc.shape
    torch.Size([128, 512])
    """
    from safetensors.torch import load_file

    if hook not in DICTIONARIES:
        raise InvalidInputError(f"load_demo_dictionary: hook={hook!r}; use {' or '.join(map(repr, DICTIONARIES))}.")
    folder = DICTIONARY_FOLDER if folder is None else Path(folder)
    weights = {name: weight.to(dtype) for name, weight in load_file(folder / f"{hook}.safetensors").items()}
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return dictionary_of(weights, facts["k"], hook)


def dictionary_of(weights: dict[str, Tensor], k: int, hook: str) -> Dictionary:
    """A dictionary of the bundled model from the weights that a file holds."""
    W_enc, b_enc, W_dec, b_dec = (weights[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec"))
    return Dictionary(W_enc, b_enc, W_dec, b_dec, k, hook)


def load_demo_model(
    name: str = "language",
    dtype: torch.dtype = torch.float32,
    *,
    kind: str | None = None,
    folder: Path | str | None = None,
) -> Any:
    """A bundled model in eval mode, its norms unfolded and its weights uncentred.

    A HookedTransformer's loader folds the value biases into b_O: no token's score depends on it, single heads' do.

    Args:
        name: one of `FOLDERS`.
        dtype: of the weights.
        kind: ``"hooked"`` for a HookedTransformer (TransformerLens 3.9), ``"bridge"`` for a TransformerBridge (3.9 and
            4.x); None takes the first that is there. `encoder`, `whitened`, `digits` and `reversal` are always a
            TransformerBridge.
        folder: another model of the same architecture, in Hugging Face format.

    Raises:
        InvalidInputError: no such name or kind, HookedTransformer asked for on TransformerLens 4, or for a
            model that is always a TransformerBridge.

    >>> tlens.load_demo_model().cfg.n_layers
    4
    """
    from transformers import AutoTokenizer

    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        HookedTransformer = None
    if kind not in (None, "hooked", "bridge"):
        named = f", or {kind!r} as the first argument for that model" if kind in FOLDERS else ""
        raise InvalidInputError(f"load_demo_model: kind={kind!r}; use 'hooked' or 'bridge'{named}.")
    if kind == "hooked" and HookedTransformer is None:
        raise InvalidInputError(
            "load_demo_model: TransformerLens 4 has no HookedTransformer; use kind='bridge', or transformer-lens 3.9."
        )
    check_choice("load_demo_model: name", name, FOLDERS)
    if kind == "hooked" and name in ONLY_BRIDGE:
        raise InvalidInputError(f"load_demo_model: the {name} model comes as a TransformerBridge; leave kind out.")
    folder = FOLDERS[name] if folder is None else Path(folder)
    weights, filters = _module(folder, dtype, name)
    tokenizer = None if name == "digits" else AutoTokenizer.from_pretrained(folder)
    model_name = "tensorlens-demo" if name == "language" else f"tensorlens-demo-{name}"
    as_bridge = kind == "bridge" or HookedTransformer is None or name in ONLY_BRIDGE
    return _wrapped(weights, tokenizer, model_name, filters, None if as_bridge else HookedTransformer)


def induction_checkpoints(dtype: torch.dtype = torch.float32, *, folder: Path | str | None = None) -> dict[int, Any]:
    """A small model at several steps of its training, from the first to the last, each a TransformerBridge.

    It learns to continue repeated random letters (`INDUCTION_WORDS`): GPT-2 architecture, 2 layers of four heads, width
    24, rows of 24 tokens. Trained by the repository's ``scripts/train_induction.py``; the losses stand in
    ``models/induction/training.json``.

    Args:
        dtype: of the weights; what is stored is half precision.
        folder: another folder that the script wrote.

    Returns:
        The model at every step of `CHECKPOINTS`, or at those that the other folder has.

    >>> list(tlens.demo.induction_checkpoints())
    [0, 500, 1000, 1400, 1600, 1700, 1800, 2200]
    """
    from transformers import AutoTokenizer

    folder = CHECKPOINT_FOLDER if folder is None else Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    steps = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.safetensors"))
    models: dict[int, Any] = {}
    for number in steps:
        weights, _ = _module(folder, dtype, "induction", f"step-{number}.safetensors")
        models[number] = _wrapped(weights, tokenizer, f"tensorlens-demo-induction-{number}")
    return models


def _wrapped(
    weights: Any,
    tokenizer: Any,
    model_name: str,
    filters: list[tuple[Tensor, Tensor]] | None = None,
    HookedTransformer: Any = None,
) -> Any:
    """A TransformerBridge around a Hugging Face module, or a HookedTransformer with its weights, in eval mode."""
    if HookedTransformer is None:
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

        model = build_bridge_from_module(
            weights, type(weights).__name__, hf_config=weights.config, tokenizer=tokenizer, model_name=model_name
        )
        return (whiten(model, init=filters) if filters else model).eval()
    return _hooked(HookedTransformer, weights, tokenizer, weights.dtype, model_name)


def _module(
    folder: Path, dtype: torch.dtype, name: str, file: str = "model.safetensors"
) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """The Hugging Face module, and a whitened model's filters (L⁻¹, M).

    The module is read by hand because `from_pretrained` prints a progress bar.
    """
    import transformers
    from safetensors.torch import load_file

    config, architecture = {
        "encoder": ("BertConfig", "BertForMaskedLM"),
        "whitened": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
        "digits": ("ViTConfig", "ViTForImageClassification"),
        "reversal": ("BartConfig", "BartForConditionalGeneration"),
    }.get(name, ("GPT2Config", "GPT2LMHeadModel"))
    facts = getattr(transformers, config).from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    module = getattr(transformers, architecture)(facts)
    state = load_file(folder / file)
    module.load_state_dict(state, strict=False)  # tied weights are stored once, whitening has no place in the module
    module.tie_weights()
    maps = [[state[key] for key in sorted(state) if f"whitening.{part}." in key] for part in ("L_inv", "M")]
    return torch.nn.Module.to(module, dtype=dtype).eval(), list(zip(*maps, strict=True))


def _hooked(HookedTransformer: Any, weights: Any, tokenizer: Any, dtype: torch.dtype, model_name: str) -> Any:
    from transformer_lens import HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    facts = weights.config
    config = HookedTransformerConfig(
        n_layers=facts.n_layer,
        d_model=facts.n_embd,
        n_ctx=facts.n_positions,
        n_heads=facts.n_head,
        d_head=facts.n_embd // facts.n_head,
        d_mlp=4 * facts.n_embd,
        d_vocab=facts.vocab_size,
        act_fn=facts.activation_function,
        eps=facts.layer_norm_epsilon,
        normalization_type="LN",
        model_name=model_name,
        original_architecture="GPT2LMHeadModel",
        dtype=dtype,
        device="cpu",
        init_weights=False,
    )
    model = HookedTransformer(config, tokenizer=tokenizer, move_to_device=False)
    state = convert_gpt2_weights(weights, config)
    state.setdefault("unembed.b_U", torch.zeros(facts.vocab_size, dtype=dtype))
    model.load_and_process_state_dict(state, fold_ln=False, center_writing_weights=False, center_unembed=False)
    return model.eval()
