"""Train the small translation model: ``python -m scripts.train_reversal OUT_DIR``; one minute on one core.

A BART of one encoder and one decoder layer, width 32 and 4 heads, that writes six letters in reverse, so that it is
known which letter of the input every letter of the output is a copy of. It learns from random words of the letters a
to j; every 997th of the million words (`tensorlens_tl.demo.reversal_words`) is left out, and only measured.
"""

import time
from typing import Any

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts import small
from scripts.rounding import round_parameters
from tensorlens_tl.demo import reversal_words

STEPS, ROWS, RATE = 2000, 128, 3e-3
PAD, START, END, LETTERS, LENGTH = "<|pad|>", "<|start|>", "<|end|>", "abcdefghij", 6


def is_held_out_word(words: Int[Tensor, "word letter"]) -> Bool[Tensor, "word"]:
    """Which words, as token ids, the model does not see: those of `reversal_words`."""
    return ((words - 3) * 10 ** torch.arange(5, -1, -1)).sum(1) % 997 == 0


def letter_tokenizer() -> Any:
    """One token for each letter after the start token; spaces between letters are nothing."""
    from transformers import PreTrainedTokenizerFast

    words = [PAD, START, END, *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    template = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, words.index(START))])
    tokenizer.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=PAD, unk_token=PAD
    )


def small_bart(vocabulary: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
    options: dict[str, Any] = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    options |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = BartConfig(
        vocab_size=vocabulary, d_model=32, max_position_embeddings=16, dropout=0.0, init_std=0.05,
        forced_eos_token_id=None, **options,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def started(letters: Int[Tensor, "word letter"]) -> Int[Tensor, "word pos"]:
    """Letters after the start token, as both sides read them."""
    return torch.cat([letters.new_ones(len(letters), 1), letters], dim=1)


def predicted(model: Any, letters: Int[Tensor, "word letter"]) -> tuple[Tensor, Tensor]:
    """Logits at every position of the decoder, which reads the right answer so far, and the right answers."""
    answers = torch.cat([letters.flip(1), torch.full_like(letters[:, :1], 2)], dim=1)
    return model(input_ids=started(letters), decoder_input_ids=started(answers[:, :-1])).logits, answers


@torch.no_grad()
def accuracy(model: Any) -> float:
    """The share of words that were left out and come out right as a whole, each letter written after its own ones."""
    letters = reversal_words()
    written = letters[:, :0]
    for _ in range(LENGTH):
        logits = model(input_ids=started(letters), decoder_input_ids=started(written)).logits
        written = torch.cat([written, logits[:, -1:].argmax(-1)], dim=1)
    return float((written == letters.flip(1)).all(1).float().mean())


def learn(model: Any, steps: int, seed: int) -> None:
    """Train in place on random words."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of() -> Tensor:
        letters = torch.randint(3, 3 + len(LETTERS), (ROWS, LENGTH), generator=generator)
        logits, answers = predicted(model, letters[~is_held_out_word(letters)])
        return cross_entropy(logits.flatten(0, 1), answers.flatten())

    small.learn(model, steps, loss_of, rate=RATE, decay=0.01, every=250)


def main(arguments: list[str] | None = None) -> None:
    args = small.read_arguments(__doc__, STEPS, arguments)
    started = time.time()
    torch.manual_seed(args.seed)
    tokenizer = letter_tokenizer()
    model = small_bart(len(tokenizer))
    learn(model, args.steps, args.seed)
    round_parameters(model)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    small.report(args, model, started, held_out_accuracy=accuracy(model))


if __name__ == "__main__":
    main()
