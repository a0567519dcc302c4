"""Weights that a checkpoint does not have are random: results say so, and the command line does not explain them."""

import copy
import importlib
import re
import warnings

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.commands import main
from tensorlens_tl.models import ModelView
from tensorlens_tl.testing import check_checkpoint

transformers = pytest.importorskip("transformers")
TransformerBridge = importlib.import_module("transformer_lens.model_bridge").TransformerBridge

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 32,
}  # fmt: skip
BERT_HEAD = {
    "cls.predictions.bias", "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
}  # fmt: skip


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(48)} | {"<unk>": 48, "<pad>": 49}
    splitter = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": "<pad>" for name in ("pad", "bos", "eos")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token="<unk>", **special)


def saved(folder, name, *, tied=False):
    """A folder with the checkpoint of a tiny model, of a class of transformers."""
    model = getattr(transformers, name)
    options = {**SIZES, "tie_word_embeddings": tied}
    if name.startswith("GPT2"):
        options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model(model.config_class(**options)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def booted(folder, **options):
    return TransformerBridge.boot_transformers(str(folder), dtype=torch.float64, **options)


def newly_initialised(model):
    names = ModelView(model).untrained.names
    return None if names is None else set(names)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("LlamaModel", {"lm_head.weight"}), ("GPTNeoXModel", {"lm_head.weight"}), ("BertModel", BERT_HEAD)],
)
def test_a_head_that_the_checkpoint_lacks_is_named_in_every_result(tmp_path, name, lacking):
    model = booted(saved(tmp_path, name, tied=name == "BertModel"))
    view = ModelView(model)
    head = set(view.untrained.head)
    assert head == lacking == set(view.untrained.names)
    assert view.untrained.stack == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlens.UntrainedWarning)
        frozen = tlens.freeze(model, some_tokens(1, 5))
        tlens.attribute(frozen)  # the hidden state
    with pytest.warns(tlens.UntrainedWarning, match=re.escape(sorted(lacking)[0]) if len(lacking) < 4 else "more"):
        explained = tlens.attribute(frozen, target=3)
    for result in (
        explained,
        tlens.circuits.contribution_graph(frozen, 3),
        tlens.evaluate.completeness(model, some_tokens(1, 5), ["tensorlens in_out"]),
    ):
        facts = result.settings if hasattr(result, "settings") else result.provenance
        assert head <= set(facts["newly_initialised"].split(", "))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPTNeoXForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_whole_checkpoint_says_nothing(tmp_path, name):
    model = booted(saved(tmp_path, name))
    assert newly_initialised(model) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlens.UntrainedWarning)
        assert "newly_initialised" not in tlens.attribute(model, some_tokens(1, 5), target=3).provenance


CLASSIFIERS = [
    "LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering",
    "GPT2ForSequenceClassification", "BertForSequenceClassification", "BertForTokenClassification",
    "BertForQuestionAnswering",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_logits_of_a_classifier_without_its_head_are_no_answer(tmp_path, name):
    folder = saved(tmp_path, name)
    model = booted(folder)
    assert ModelView(model).untrained.stack == ()
    frozen = tlens.freeze(model, some_tokens(1, 5))
    with pytest.warns(tlens.UntrainedWarning, match=f"the checkpoint of a {name}, whose head is not in this model"):
        tlens.attribute(frozen, target=3)


def test_a_classifier_whose_head_is_not_read_is_refused_on_the_command_line(tmp_path, capsys):
    folder = saved(tmp_path, "BertForMultipleChoice")
    assert main(["attribute", TEXT, "--model", folder]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the checkpoint of a BertForMultipleChoice, whose head is not in this model" in said
    assert "tlens.load_classifier" in said


def test_tied_weights_are_the_checkpoints(tmp_path):
    assert newly_initialised(booted(saved(tmp_path / "gpt2", "GPT2Model"))) == set()
    assert newly_initialised(booted(saved(tmp_path / "llama", "LlamaModel", tied=True))) == set()


def test_legacy_names_are_read(tmp_path):
    """Old checkpoints call a norm's gain and shift gamma and beta."""
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "BertForMaskedLM")
    weights = load_file(tmp_path / "model.safetensors")
    legacy = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for key, weight in weights.items()
    }
    assert set(legacy) != set(weights)
    save_file(legacy, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert newly_initialised(booted(folder)) == set()


def test_a_block_that_the_checkpoint_lacks_is_part_of_the_stack(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "LlamaForCausalLM")
    weights = load_file(tmp_path / "model.safetensors")
    lacking = "model.layers.1.mlp.down_proj.weight"
    save_file({k: w for k, w in weights.items() if k != lacking}, tmp_path / "model.safetensors", {"format": "pt"})
    model = booted(folder)
    view = ModelView(model)
    assert view.untrained.stack == (lacking,)
    assert view.untrained.head == ()
    with pytest.warns(tlens.UntrainedWarning, match=re.escape(lacking)):
        tlens.freeze(model, some_tokens(1, 5))


def _trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(some_tokens(1, 5), labels=some_tokens(1, 5)).loss.backward()
    optimizer.step()


def _read_whole(model):
    model.load_state_dict(transformers.LlamaForCausalLM(model.config).state_dict())


@pytest.mark.parametrize("written", [_trained, _read_whole])
def test_a_head_that_was_written_to_since_is_no_longer_new(tmp_path, written):
    folder = saved(tmp_path, "LlamaModel")
    inner = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert newly_initialised(booted(folder, hf_model=inner)) == {"lm_head.weight"}
    inner = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    written(inner)
    assert newly_initialised(booted(folder, hf_model=inner)) == set()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_a_trained_head_that_was_resized_is_not_new(tmp_path, name):
    folder = saved(tmp_path, name)
    inner = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64)
    inner.resize_token_embeddings(60)
    assert newly_initialised(booted(folder, hf_model=inner)) == set()


def test_one_step_of_training_makes_nothing_new_that_a_bridge_made(tmp_path):
    """A Bridge splits joint weights, and gives unembeddings a bias: none of them has transformers' mark."""
    model = booted(saved(tmp_path, "GPT2LMHeadModel"))
    with torch.no_grad():
        for weight in model.original_model.parameters():
            weight.mul_(1.0)
    assert newly_initialised(model) == set()


def test_what_cannot_be_known_is_not_claimed(tmp_path, model_named):
    folder = saved(tmp_path, "LlamaModel")
    inner = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).double()
    assert newly_initialised(booted(folder, hf_model=inner)) is None  # of a config alone
    lacking = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert newly_initialised(booted(folder, hf_model=copy.deepcopy(lacking))) is None
    assert newly_initialised(tlens.load_demo_model()) is None
    assert newly_initialised(model_named("bridge/gpt2")) is None
    assert "newly_initialised" not in tlens.freeze(model_named("bridge/gpt2"), some_tokens(1, 5)).provenance()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel"])
def test_a_folder_that_is_gone_changes_nothing(tmp_path, name):
    import shutil

    model = booted(saved(tmp_path / "model", name))
    shutil.rmtree(tmp_path / "model")
    assert newly_initialised(model) == ({"lm_head.weight"} if name == "LlamaModel" else set())


# ------------------------------------------------------------------------------------------------ the command line

TEXT = "w1 w2 w3"


@pytest.fixture
def headless(tmp_path):
    return saved(tmp_path, "LlamaModel")


@pytest.mark.parametrize(
    "command",
    [
        ["attribute", TEXT],
        ["attribute", TEXT, "--method", "leave-one-out"],
        ["report", TEXT, "-o", "{out}"],
        ["graph", TEXT, "-o", "{out}"],
        ["compare", TEXT, TEXT, "-o", "{out}"],
        ["report", TEXT, "--max-new-tokens", "2", "-o", "{out}"],
        ["evaluate", "agreement", "--prompts", "{prompts}"],
    ],
    ids=lambda command: " ".join(command[:1] + command[2:4]),
)
def test_logits_of_an_untrained_head_are_not_explained(tmp_path, headless, capsys, command):
    out = tmp_path / "out.html"
    (tmp_path / "prompts.txt").write_text(TEXT)
    words = [word.format(out=out, prompts=tmp_path / "prompts.txt") for word in command]
    assert main([*words, "--model", headless]) == 1
    said = " ".join(capsys.readouterr().err.split())
    for part in ("does not have lm_head.weight", "newly initialised", "--collapse in_out", "--allow-untrained"):
        assert part in said
    assert not out.exists()


def test_its_hidden_state_is_explained(headless, capsys):
    assert main(["attribute", TEXT, "--model", headless, "--collapse", "in_out"]) == 0
    said = capsys.readouterr().out
    assert "squared norm of the output" in said
    assert "the model predicts" not in said  # noise


def test_an_untrained_head_is_explained_where_that_is_allowed(headless, capsys):
    assert main(["attribute", TEXT, "--model", headless, "--allow-untrained"]) == 0
    assert "the model predicts" in capsys.readouterr().out


def test_a_stack_with_new_weights_is_not_explained_at_all(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "LlamaForCausalLM")
    weights = load_file(tmp_path / "model.safetensors")
    lacking = "model.layers.1.mlp.down_proj.weight"
    save_file({k: w for k, w in weights.items() if k != lacking}, tmp_path / "model.safetensors", {"format": "pt"})
    assert main(["attribute", TEXT, "--model", folder, "--collapse", "in_out"]) == 1
    assert lacking in " ".join(capsys.readouterr().err.split())
    assert main(["attribute", TEXT, "--model", folder, "--collapse", "in_out", "--allow-untrained"]) == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("LlamaModel", "the checkpoint does not have them: lm_head.weight"),
        ("LlamaForCausalLM", "All weights come from the checkpoint"),
    ],
)
def test_verify_says_which_weights_are_new(tmp_path, capsys, name, line):
    assert main(["verify", TEXT, "--model", saved(tmp_path, name)]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


def test_verify_says_where_it_cannot_know(capsys):
    assert main(["verify"]) == 0
    assert "It is unknown whether the checkpoint" in " ".join(capsys.readouterr().out.split())


# ----------------------------------------------------------------------------------------------- the checkpoint's model


GROUPED = {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
ENCODER_DECODER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip


def saved_with_large_weights(folder, name, **options):
    """A checkpoint whose logits depend on everything in it, as a trained model's do."""
    model = getattr(transformers, name)
    model = model(model.config_class(**options))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", SIZES | GROUPED),
        ("BertForMaskedLM", SIZES),
        ("BartForConditionalGeneration", ENCODER_DECODER),
        ("CohereForCausalLM", SIZES | GROUPED),
        ("Cohere2ForCausalLM", SIZES | GROUPED),
        ("HunYuanDenseV1ForCausalLM", SIZES | GROUPED),
    ],
)
@pytest.mark.few(3)
def test_a_bridge_that_is_not_the_model_of_its_checkpoint_is_told(tmp_path, capsys, name, options):
    """Some families of TransformerLens 3.9 are not; whoever computes something else must be told, and nobody else."""
    folder = saved_with_large_weights(tmp_path, name, **options)
    model = booted(folder)
    theirs = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64).eval()
    tokens = some_tokens(1, 5)
    decoder = {"decoder_input_ids": tokens} if name.startswith("Bart") else {}
    with torch.no_grad():
        expected = theirs(tokens, **decoder).logits
        ours = model(tokens, **{key.removesuffix("_ids"): ids for key, ids in decoder.items()})
    differs = float((ours - expected).abs().max() / expected.abs().max())
    assert differs < 1e-6 or differs > 1e-3
    if differs < 1e-6:
        assert check_checkpoint(model) < 1e-6
        with torch.no_grad():
            next(model.parameters()).add_(torch.randn(16))  # and if it is changed, it is another
    with pytest.raises(tlens.ConformanceError, match=f"here and .* in the {name} that Hugging Face loads"):
        check_checkpoint(model)
    if differs < 1e-6:
        return
    assert main(["verify", TEXT, "--model", folder, "--dtype", "float64"]) == 1
    printed = capsys.readouterr()
    assert "not the one of its checkpoint" in " ".join(printed.err.split())
    assert "Every weight" not in printed.out
    with pytest.warns(UserWarning, match="not the one of its checkpoint"):
        assert main(["attribute", TEXT, "--model", folder]) == 0


def test_verify_compares_the_logits_with_the_checkpoints_model(tmp_path, capsys):
    folder = saved_with_large_weights(tmp_path, "LlamaForCausalLM", **SIZES, **GROUPED)
    assert main(["verify", TEXT, "--model", folder]) == 0
    assert "Its logits equal those of the Hugging Face model" in " ".join(capsys.readouterr().out.split())


def test_what_has_no_checkpoint_at_hand_is_not_compared(tmp_path):
    import shutil

    assert check_checkpoint(tlens.load_demo_model()) is None
    assert check_checkpoint(booted(saved(tmp_path / "headless", "LlamaModel"))) is None
    model = booted(saved(tmp_path / "whole", "LlamaForCausalLM"))
    shutil.rmtree(tmp_path / "whole")
    assert check_checkpoint(model) is None
