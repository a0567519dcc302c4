"""The text of an encoder, with the special tokens that its checkpoint's own tokenizer puts around it."""

from typing import Any
from weakref import WeakKeyDictionary

import transformers

from tensorlens_tl.errors import InvalidInputError

OTHERWISE = (
    "Pass token ids, tokenizer(text)['input_ids'] of the tokenizer that the model was trained with, or prepend_bos= "
    "(True or False), which reads the text as TransformerLens does."
)


def ids_as_trained(tokenizer: Any, text: str) -> list[int]:
    """Return a text's token ids as the checkpoint's tokenizer gives them.

    TransformerLens reloads tokenizers with ``add_bos_token=True``, which loses a template that comes from a file
    (``[CLS] … [SEP]``, ``</s>``). Raises `InvalidInputError` where that may be so and the original cannot be loaded.
    """
    ids: list[int] = tokenizer(text)["input_ids"]
    if not _may_have_lost_its_template(tokenizer, text, ids):
        return ids
    return _loaded_as_it_was(tokenizer)(text)["input_ids"]


def _may_have_lost_its_template(tokenizer: Any, text: str, ids: list[int]) -> bool:
    """Whether these token ids are what ``add_bos_token=True`` makes of a text, whatever the template was."""
    if not tokenizer.init_kwargs.get("add_bos_token"):
        return False
    body: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if getattr(tokenizer, "add_eos_token", False) and ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids in (body, [tokenizer.bos_token_id, *body])


_as_they_were: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def _loaded_as_it_was(tokenizer: Any) -> Any:
    """The tokenizer of the same folder or name, with the template that it has there."""
    loaded = _as_they_were.get(tokenizer)
    if loaded is None:
        options = dict(tokenizer.init_kwargs)
        name = options.pop("name_or_path", None)
        del options["add_bos_token"]
        options["local_files_only"] = True  # TransformerLens had it from there
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(name, **options)
        except Exception as error:  # a tokenizer may be a program of its author's, which may raise anything
            raise InvalidInputError(
                "input: TransformerLens loads tokenizers with add_bos_token=True, which drops the other special tokens "
                f"that a text has in an encoder's training; the tokenizer itself cannot be loaded from {name!r} to see "
                f"which these are ({error}). {OTHERWISE}"
            ) from error
        _as_they_were[tokenizer] = loaded
    _refuse_another_vocabulary(tokenizer, loaded)
    return loaded


def _refuse_another_vocabulary(tokenizer: Any, loaded: Any) -> None:
    """Raise `InvalidInputError` where tokens were added besides the special ones that TransformerLens adds."""
    if len(tokenizer) == len(loaded):
        return
    added = set(tokenizer.get_vocab()) - set(loaded.get_vocab())
    added -= {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    if added:
        raise InvalidInputError(
            f"input: the tokenizer of this model has tokens ({', '.join(map(repr, sorted(added)[:3]))}) that "
            f"{tokenizer.name_or_path!r} does not have, where an encoder's special tokens are read from. {OTHERWISE}"
        )
