"""Train the small models that evaluation runs on: ``python -m scripts.train_small NAME OUT_DIR``.

| name | what | minutes on two cores |
| --- | --- | --- |
| `recall` | GPT-2 architecture, 2 layers: key–value recall (`tensorlens_tl.evaluate.recall`) | 3 |
| `brackets` | the same, 3 layers: the closing bracket of the innermost open one | 5 |
| `relations` | the same, 3 layers: knows the shipped relations, in every order of examples | 5 |
| `encoder` | BERT architecture, 3 layers: masked words of the bundled model's own text, with its tokenizer | 20 |

Tokenizers of the first three are lists of words; the encoder's is the bundled model's with ``[CLS]``, ``[SEP]``,
``[PAD]`` and ``[MASK]`` added.
"""

import argparse
import itertools
import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from scripts.train import optimiser_for, python_documents, small_gpt2, split_documents, step
from tensorlens_tl.demo import MODEL_FOLDER
from tensorlens_tl.evaluate import tasks
from tensorlens_tl.evaluate.relations import few_shot_text, shipped_relations

IGNORED = -100
Batch = tuple[Tensor, Tensor]
"""Token ids, and the label at each position that is learnt (`IGNORED` elsewhere), `[row, pos]` each."""


# ------------------------------------------------------------------------------------------- models


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words between spaces; a new line is a word of its own."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=tasks.PAD))
    split = [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split("\n", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tasks.BOS,
        eos_token=tasks.BOS,
        unk_token=tasks.PAD,
        pad_token=tasks.PAD,
    )


def masking_tokenizer() -> PreTrainedTokenizerFast:
    """The bundled model's tokenizer with the special tokens of a masked language model."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    at = {name: tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=list(at.items())
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[PAD]",
    )


def small_bert(vocabulary: int, pad: Any) -> Any:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        type_vocab_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=pad,
        initializer_range=0.05,
    )
    model = BertForMaskedLM(config)
    known = load_file(MODEL_FOLDER / "model.safetensors")
    words, places = known["transformer.wte.weight"], known["transformer.wpe.weight"]
    embeddings = model.bert.embeddings
    with torch.no_grad():  # the same tokens and width: the bundled model's embeddings save much of a long plateau
        embeddings.word_embeddings.weight[: len(words)] = words
        embeddings.position_embeddings.weight[:] = places[: config.max_position_embeddings]
    return model


# ------------------------------------------------------------------------------------------ batches


def recall_batches(rng: random.Random, rows: int = 64) -> Iterator[Batch]:
    """Every key of a row is asked for, every answer learnt; every other batch repeats random words instead.

    Without the repeated rows the circuit (a previous-token head, and heads that look for what it wrote) did not form.
    """
    ids = {word: number for number, word in enumerate(tasks.RECALL_WORDS)}
    while True:
        period = rng.randint(3, 16)
        segments = torch.tensor([rng.choices(range(2, len(ids)), k=period) for _ in range(rows)])
        repeated = torch.cat([torch.zeros(rows, 1, dtype=torch.long), segments.repeat(1, 20)[:, :47]], dim=1)
        yield repeated, repeated.masked_fill(torch.arange(48) <= period, IGNORED)
        pairs, distractors = rng.randint(2, 8), rng.randint(0, 14)
        questions = pairs
        made = [tasks.recall_row(rng, pairs, distractors, questions)[0] for _ in range(rows)]
        tokens = torch.tensor([[ids[word] for word in words] for words in made])
        labels = torch.full_like(tokens, IGNORED)
        labels[:, -3 * questions + 2 :: 3] = tokens[:, -3 * questions + 2 :: 3]
        yield tokens, labels


def bracket_batches(rng: random.Random, rows: int = 64) -> Iterator[Batch]:
    """Every closing bracket is learnt."""
    ids = {word: number for number, word in enumerate(tasks.BRACKET_WORDS)}
    while True:
        length = rng.randint(8, 48)
        made = [tasks.bracket_row(rng, length) for _ in range(rows)]
        tokens = torch.tensor([[ids[word] for word in words] for words, _ in made])
        closing = torch.tensor([[match is not None for match in matches] for _, matches in made])
        yield tokens, tokens.masked_fill(~closing, IGNORED)


def relation_batches(tokenizer: Any, rng: random.Random, rows: int = 64) -> Iterator[Batch]:
    """One to five examples of a relation a row, every object learnt."""
    relations = list(shipped_relations().values())
    while True:
        encoded: list[list[int]] = []
        marked: list[list[int]] = []
        for _ in range(rows):
            relation = rng.choice(relations)
            template = rng.choice(relation.prompt_templates)
            chosen = rng.sample(relation.samples, rng.randint(1, 5))
            text = few_shot_text(template, chosen[:-1], chosen[-1].subject) + f" {chosen[-1].object}"
            ids = [0, *tokenizer(text, add_special_tokens=False)["input_ids"]]
            newline = tokenizer.convert_tokens_to_ids("\n")
            ends = [place - 1 for place, token in enumerate(ids) if token == newline] + [len(ids) - 1]
            encoded.append(ids)
            marked.append(ends)
        length = max(map(len, encoded))
        tokens = torch.tensor([ids + [1] * (length - len(ids)) for ids in encoded])
        labels = torch.full_like(tokens, IGNORED)
        for row, ends in enumerate(marked):
            labels[row, ends] = tokens[row, ends]
        yield tokens, labels


def masked_batches(tokenizer: Any, stream: Tensor, generator: torch.Generator, short: int = 0) -> Iterator[Batch]:
    """Windows of text between [CLS] and [SEP]; of 20 % of the tokens four in five are masked, the rest drawn or kept.

    The first `short` batches have short windows: with few positions the model finds out about neighbours much sooner.
    """
    start, end, mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
    for number in itertools.count():
        length = int(torch.randint(24, 40 if number < short else 97, (1,), generator=generator))
        rows = 1500 // length
        at = torch.randint(0, len(stream) - length, (rows,), generator=generator)
        text = stream[at[:, None] + torch.arange(length)]
        draw = torch.rand(text.shape, generator=generator)
        shown = torch.where(draw < 0.16, mask, text)
        other = torch.randint(1, 2048, text.shape, generator=generator)
        shown = torch.where((draw >= 0.16) & (draw < 0.18), other, shown)
        edge = torch.ones(rows, 1, dtype=torch.long)
        tokens = torch.cat([start * edge, shown, end * edge], dim=1)
        labels = torch.cat([IGNORED * edge, text.masked_fill(draw >= 0.2, IGNORED), IGNORED * edge], dim=1)
        yield tokens, labels


# ------------------------------------------------------------------------------------------ training


def learn(
    model: Any,
    batches: Iterator[Batch],
    steps: int,
    rate: float,
    score: Callable[[], float],
    *,
    shift: int,
    enough: float = 0.995,
    every: int = 250,
) -> int:
    """Train until some time after `score` reached `enough`, or `steps` are done; returns the steps taken.

    `shift` is 1 where a position predicts the next token, 0 where it predicts its own.
    """
    optimiser, started = optimiser_for(model, rate, 0.01), time.time()
    body, head = (model.transformer, model.lm_head) if shift else (model.bert, model.cls)
    number = 0
    while number < steps:
        number += 1
        pace = min(1.0, number / 200, 0.02 + 4 * (1 - number / steps))  # down in the last quarter
        for group in optimiser.param_groups:
            group["lr"] = rate * pace
        tokens, labels = next(batches)
        states, wanted = body(tokens)[0], labels
        if shift:
            states, wanted = states[:, :-1], labels[:, 1:]
        known = wanted != IGNORED  # logits of the others are not needed
        loss = cross_entropy(head(states[known]), wanted[known])
        step(model, optimiser, loss)
        if number % every == 0 or number == steps:
            model.eval()
            with torch.no_grad():
                reached = score()
            model.train()
            print(
                f"{number:6d}  loss {loss.item():.3f}  score {reached:.4f}  {time.time() - started:.0f} s", flush=True
            )
            if reached >= enough and steps > number + steps // 4:  # time to come down
                steps = number + steps // 4
    return steps


def train_task(name: str, seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    words, layers = (tasks.RECALL_WORDS, 2) if name == "recall" else (tasks.BRACKET_WORDS, 3)
    torch.manual_seed(seed)
    model, rng = small_gpt2(len(words), layers, 64, width=64), random.Random(seed)
    held = tasks.recall(500, seed=10**6) if name == "recall" else tasks.brackets(500, seed=10**6)

    def accuracy() -> float:
        return float((model(held.tokens).logits[:, -1].argmax(-1) == held.answers).float().mean())

    batches = recall_batches(rng) if name == "recall" else bracket_batches(rng)
    taken = learn(model, batches, steps, 2e-3, accuracy, shift=1)
    return model, word_tokenizer(list(words)), {"steps": taken, "accuracy": accuracy()}


def train_relations(seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    relations = list(shipped_relations().values())
    texts = [
        few_shot_text(template, [], sample.subject) + f" {sample.object}"
        for relation in relations
        for template in relation.prompt_templates
        for sample in relation.samples
    ]
    words = [tasks.BOS, tasks.PAD, "\n", *dict.fromkeys(word for text in texts for word in text.split(" "))]
    tokenizer = word_tokenizer(words)
    torch.manual_seed(seed)
    model, rng = small_gpt2(len(words), 3, 64, width=64), random.Random(seed)
    held = [next(relation_batches(tokenizer, random.Random(10**6 + k))) for k in range(4)]

    def accuracy() -> float:
        right = [
            (model(tokens).logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != IGNORED]
            for tokens, labels in held
        ]
        return float(torch.cat(right).float().mean())

    taken = learn(model, relation_batches(tokenizer, rng), steps, 2e-3, accuracy, shift=1)
    return model, tokenizer, {"steps": taken, "accuracy": accuracy()}


def train_encoder(seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = masking_tokenizer()
    training, _ = split_documents(python_documents())
    held_text = json.loads((MODEL_FOLDER / "held_out.json").read_text(encoding="utf-8"))

    def stream(texts: list[str]) -> Tensor:
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([token for row in rows for token in row])  # pyright: ignore[reportGeneralTypeIssues]

    torch.manual_seed(seed)
    model = small_bert(len(tokenizer), tokenizer.pad_token_id)
    held_batches = masked_batches(tokenizer, stream(held_text), torch.Generator().manual_seed(10**6))
    held = [next(held_batches) for _ in range(16)]

    def accuracy() -> float:
        right = [(model(t).logits.argmax(-1) == labels)[labels != IGNORED] for t, labels in held]
        return float(torch.cat(right).float().mean())

    batches = masked_batches(tokenizer, stream(training), torch.Generator().manual_seed(seed), short=1500)
    taken = learn(model, batches, steps, 1e-3, accuracy, shift=0)
    model.eval()
    with torch.no_grad():
        reached = accuracy()
    return model, tokenizer, {"steps": taken, "held_out_accuracy": reached}


STEPS = {"recall": 4000, "brackets": 6000, "relations": 6000, "encoder": 6000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(STEPS))
    parser.add_argument("out", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="at most so many")
    args = parser.parse_args()
    steps = args.steps or STEPS[args.name]
    started = time.time()
    if args.name == "encoder":
        model, tokenizer, facts = train_encoder(args.seed, steps)
    elif args.name == "relations":
        model, tokenizer, facts = train_relations(args.seed, steps)
    else:
        model, tokenizer, facts = train_task(args.name, args.seed, steps)
    args.out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    facts = {"python": platform.python_version(), "torch": torch.__version__, "seed": args.seed} | facts
    facts["minutes"] = round((time.time() - started) / 60, 1)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
