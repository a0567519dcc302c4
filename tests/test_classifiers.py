"""Classifiers of text as models: what is explained is the logit of Hugging Face's own classifier."""

import importlib.util
import warnings

import pytest
import torch
from conftest import some_tokens
from test_untrained import SIZES, TEXT, tokenizer

import tensorlens_tl as tlens
from tensorlens_tl.commands import main
from tensorlens_tl.testing import check_checkpoint, check_model

transformers = pytest.importorskip("transformers")

PAD = 49
LABELS = {"id2label": {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}}
LABELS["label2id"] = {label: number for number, label in LABELS["id2label"].items()}
LINE_4 = importlib.util.find_spec("transformer_lens.model_bridge.supported_architectures.roberta") is not None
DECODERS = [
    "LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering",
    "GPT2ForSequenceClassification", "GPT2ForTokenClassification", "GPTNeoXForQuestionAnswering",
    "Gemma2ForSequenceClassification",
]  # fmt: skip
ENCODERS = ["BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"]
if LINE_4:
    ENCODERS += ["RobertaForSequenceClassification", "RobertaForTokenClassification"]
ALL = [*DECODERS, *ENCODERS]


def saved(folder, name, **options):
    """A checkpoint of a tiny classifier whose logits depend on everything in it."""
    kind = getattr(transformers, name)
    sizes = {**SIZES, "pad_token_id": PAD, "head_dim": 8}
    if name.startswith("GPT2"):
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32, "pad_token_id": PAD}
    if name.startswith("Roberta"):
        sizes["pad_token_id"] = 1
    if name.startswith("Gemma2"):  # language models of this kind cap their logits, classifiers do not
        sizes |= {"num_key_value_heads": 1, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}
    if not name.endswith("ForQuestionAnswering"):
        sizes |= LABELS
    model = kind(kind.config_class(**sizes | options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def theirs(folder, name, tokens, **inputs):
    """The classifier's logits as Hugging Face computes them, at the last axis classes or start and end."""
    classifier = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        output = classifier(input_ids=tokens, **inputs)
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], dim=-1)


def tolerance(name):
    return 1e-6 if name.startswith(("Llama", "Gemma")) else 1e-9  # whose norms compute in float32


def relative(ours, expected):
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.few(5)
def test_the_sums_are_the_classifiers_own_logits(tmp_path, name):
    folder = saved(tmp_path, name)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    tokens = some_tokens(2, 7)
    logits = theirs(folder, name, tokens)
    query = -1 if logits.ndim == 2 else 3
    expected = logits if logits.ndim == 2 else logits[:, 3]
    frozen = tlens.freeze(model, tokens)
    for number, other in ((1, 0), (0, None)):
        attribution = tlens.attribute(frozen, number, minus=other, query=query)
        wanted = expected[:, number] - (0 if other is None else expected[:, other])
        assert relative(attribution.total[:, 0], wanted) < tolerance(name)
        sums = attribution.scores.sum(-1)[:, 0] + attribution.bias[:, 0]
        assert relative(sums, wanted) < tolerance(name)
        terms = tlens.circuits.logit_attribution(frozen, number, minus=other, query=query)
        assert relative(terms.total[:, 0], wanted) < tolerance(name)
        lens = tlens.circuits.logit_lens(frozen, number, minus=other, query=query)
        assert relative(lens[:, 0, -1], wanted) < tolerance(name)
    live = tlens.attribute(frozen, 1, minus=0, query=query, method="leave-one-out")
    assert live.scores.isfinite().all()
    assert tlens.attribute(frozen, query=query).target == (
        "logit of the first choice" if "Question" in name else "logit of the first choice − the runner-up"
    )


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "BertForSequenceClassification"])
def test_labels_are_targets_and_float32_is_close(tmp_path, name):
    folder = saved(tmp_path, name)
    tokens = some_tokens(1, 7)
    logits = theirs(folder, name, tokens)[0]
    model = tlens.load_classifier(folder)
    attribution = tlens.attribute(model, tokens, "POSITIVE", minus="NEGATIVE")
    assert attribution.target == "logit of 'POSITIVE' − 'NEGATIVE'"
    assert abs(attribution.total[0, 0] - (logits[2] - logits[0])) < 1e-5 * logits.abs().max()
    assert attribution.queries.tolist() == [[0 if name.startswith("Bert") else 6]]
    for target, message in (
        (
            "happy",
            "no class of this model, whose labels are 'NEGATIVE', 'NEUTRAL', 'POSITIVE'; or pass a number.(\\n|$)",
        ),
        ("Positive", "a number. Did you mean 'POSITIVE'"),
        (3, "classes are 0 to 2"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            tlens.attribute(model, tokens, target)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2ForSequenceClassification", ALL[-1]])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_are_explained_as_each_of_them_alone(tmp_path, name, side):
    """Hugging Face's encoders read padding in the place of [CLS] where a prompt is padded on the left; here none do."""
    folder = saved(tmp_path, name)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    tokens = some_tokens(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 2) if side == "left" else slice(5, 7)] = 0
    tokens = tokens.where(mask.bool(), torch.tensor(1 if name.startswith("Roberta") else PAD))
    attribution = tlens.attribute(model, tokens, 1, attention_mask=mask, query=-1 if "Sequence" in name else 3)
    for row in range(2):
        alone = theirs(folder, name, tokens[row : row + 1][:, mask[row].bool()])
        expected = alone[0] if "Sequence" in name else alone[0, 3]
        assert relative(attribution.total[row], expected[1]) < 1e-9
        assert relative(attribution.scores[row].sum() + attribution.bias[row], expected[1]) < 1e-9
        assert not attribution.scores[row][:, mask[row] == 0].any()


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_a_difference_of_two_texts_sums_to_the_change_of_the_logits(tmp_path, name):
    folder = saved(tmp_path, name)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    first, second = some_tokens(1, 7), some_tokens(1, 7).flip(1)
    change = theirs(folder, name, first) - theirs(folder, name, second)
    difference = tlens.difference(tlens.freeze(model, first), tlens.freeze(model, second))
    attribution = tlens.attribute(difference, "POSITIVE", minus="NEGATIVE")
    assert relative(attribution.total[0], change[0, 2] - change[0, 0]) < 10 * tolerance(name)
    assert attribution.gap.max() < 10 * tolerance(name)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForTokenClassification", DECODERS[0]])
def test_the_battery_and_the_checkpoint_agree(tmp_path, name):
    model = tlens.load_classifier(saved(tmp_path, name), dtype=torch.float64)
    assert set(check_model(model, some_tokens(1, 6)).refused) <= {"padding on the left"}  # NaN in Llama's Bridge
    assert check_checkpoint(model) < tolerance(name)
    with torch.no_grad():
        model.unembed.weight.mul_(1.1)
    with pytest.raises(tlens.ConformanceError, match=f"in the {name} that Hugging Face loads"):
        check_checkpoint(model)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
@pytest.mark.parametrize("problem", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_outputs_that_do_not_exclude_each_other_are_explained_one_by_one(tmp_path, name, problem):
    labels = {} if "num_labels" in problem else LABELS
    folder = saved(tmp_path, name, **{"id2label": None, "label2id": None} | labels | problem)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    tokens = some_tokens(1, 7)
    frozen = tlens.freeze(model, tokens)
    attribution = tlens.attribute(frozen)
    assert attribution.target == "logit of the first choice"
    assert relative(attribution.total[0], theirs(folder, name, tokens)[0].max()) < tolerance(name)
    with pytest.raises(tlens.UnsupportedModelError, match="do not exclude each other"):
        tlens.attribute(frozen, method="leave-one-out", of="probability")
    assert main(["attribute", TEXT, "--model", folder]) == 0


@pytest.mark.parametrize(
    ("name", "head"),
    [("LlamaForSequenceClassification", "score.weight"), ("BertForSequenceClassification", "classifier.weight")],
)
def test_a_head_that_the_checkpoint_lacks_is_named(tmp_path, name, head):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, name)
    file = tmp_path / "model.safetensors"
    save_file({key: weight for key, weight in load_file(file).items() if key != head}, file, {"format": "pt"})
    model = tlens.load_classifier(folder)
    with pytest.warns(tlens.UntrainedWarning, match=f"does not have {head}"):
        attribution = tlens.attribute(model, some_tokens(1, 5), 1)
    assert attribution.provenance["newly_initialised"] == head
    assert main(["attribute", TEXT, "--model", folder]) == 1


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2ForTokenClassification"])
def test_a_whole_checkpoint_says_nothing(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlens.UntrainedWarning)
        model = tlens.load_classifier(saved(tmp_path, name))
        assert "newly_initialised" not in tlens.attribute(model, some_tokens(1, 5)).provenance


def test_a_classifier_in_memory_is_taken(tmp_path):
    folder = saved(tmp_path, "BertForSequenceClassification")
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        classifier.classifier.bias.add_(torch.tensor([0.0, 1.0, 0.0]))
    tokens = some_tokens(1, 5)
    expected = theirs(folder, "BertForSequenceClassification", tokens)[0, 1] + 1
    model = tlens.load_classifier(folder, hf_model=classifier, dtype=torch.float64)
    assert relative(tlens.attribute(model, tokens, "NEUTRAL").total[0], expected) < 1e-9


TEMPLATES = {"none": "$A", "Llama's": "<s> $A", "BERT's": "<c> $A <e>", "RoBERTa's": "<s> $A </s>"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2ForSequenceClassification"])
def test_text_is_what_the_classifiers_tokenizer_makes_of_it(tmp_path, name, template):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"<s>": 40, "</s>": 41, "<c>": 42, "<e>": 43, "<pad>": PAD}
    words = {f"w{number}": number for number in range(40)} | special | {"<unk>": 48}
    splitter = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    splitter.post_processor = processors.TemplateProcessing(
        single=TEMPLATES[template], special_tokens=list(special.items())
    )
    ends = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<c>", "sep_token": "<e>", "pad_token": "<pad>"}
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token="<unk>", **ends)
    folder = saved(tmp_path, name)
    own.save_pretrained(folder)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    expected = own(TEXT)["input_ids"]
    frozen = tlens.freeze(model, [TEXT, f"{TEXT} w5 w6"])
    assert frozen.tokens[0][frozen.mask[0]].tolist() == expected
    assert frozen.tokens[1].tolist() == own(f"{TEXT} w5 w6")["input_ids"]
    logits = theirs(folder, name, torch.tensor([expected]))
    assert relative(tlens.attribute(frozen, "POSITIVE").total[0], logits[0, 2]) < 1e-9
    assert model.to_tokens(TEXT).tolist() == [expected]


def test_a_prompt_that_ends_in_what_the_classifier_takes_for_padding_is_refused(tmp_path):
    name = "GPT2ForSequenceClassification"
    folder = saved(tmp_path, name)
    model = tlens.load_classifier(folder, dtype=torch.float64)
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, PAD, PAD]])
    with pytest.raises(tlens.InvalidInputError, match="prompt 1 ends in token 49, which this classifier"):
        tlens.freeze(model, tokens, attention_mask=torch.ones_like(tokens))
    expected = theirs(folder, name, tokens)
    attribution = tlens.attribute(model, tokens, 2, attention_mask=(tokens != PAD).long())
    assert relative(attribution.total[:, 0], expected[:, 2]) < 1e-9


ENCODER_DECODER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BertForMaskedLM", SIZES, "is the checkpoint of a BertForMaskedLM"),
        ("BertForMultipleChoice", SIZES, "is the checkpoint of a BertForMultipleChoice"),
        ("BartForSequenceClassification", ENCODER_DECODER, "is an encoder–decoder"),
        ("DistilBertForSequenceClassification", {"vocab_size": 50, "dim": 16, "n_layers": 1, "n_heads": 2,
         "hidden_dim": 32}, "does not boot the backbone"),
        ("ModernBertDecoderForSequenceClassification", SIZES | {"pad_token_id": PAD}, "head .*ModernBert"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tmp_path, name, options, message):
    kind = getattr(transformers, name)
    kind(kind.config_class(**options)).save_pretrained(tmp_path)
    with pytest.raises((tlens.InvalidInputError, tlens.UnsupportedModelError), match=message):
        tlens.load_classifier(str(tmp_path))


def test_a_head_that_computes_something_else_besides_is_refused(tmp_path):
    folder = saved(tmp_path, "GPT2ForSequenceClassification")
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    forward = classifier.forward

    def scaled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 1.01
        return output

    classifier.forward = scaled
    with pytest.raises(tlens.UnsupportedModelError, match="are not those of Hugging Face's own"):
        tlens.load_classifier(folder, hf_model=classifier)


def test_a_classifier_writes_nothing(tmp_path):
    model = tlens.load_classifier(saved(tmp_path, "GPT2ForSequenceClassification"))
    with pytest.raises(tlens.InvalidInputError, match="a classifier predicts no next token"):
        tlens.attribute(model, some_tokens(1, 5), tlens.NEXT, query=0)
    with pytest.raises(tlens.UnsupportedModelError, match="is a classifier, which writes nothing"):
        tlens.attribute_generation(model, some_tokens(1, 5), max_new_tokens=2)


def test_only_the_position_that_is_read_is_explained(tmp_path):
    model = tlens.load_classifier(saved(tmp_path, "BertForSequenceClassification"))
    with pytest.raises(tlens.InvalidInputError, match="predicts its classes only at position 0"):
        tlens.attribute(model, some_tokens(1, 5), 1, query=2)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_the_command_line_explains_the_first_class(tmp_path, capsys, name):
    folder = saved(tmp_path, name)
    assert main(["attribute", TEXT, "--model", folder]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the model predicts 'N" in said or "the model predicts 'POSITIVE'" in said
    assert main(["attribute", TEXT, "--model", folder, "--target", "POSITIVE", "--minus", "NEGATIVE"]) == 0
    assert "'POSITIVE' − 'NEGATIVE'" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", TEXT, "--model", folder]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "All weights come from the checkpoint" in said
    assert "Its logits equal those of the Hugging Face model" in said


def test_the_explorer_answers_about_classes(tmp_path):
    model = tlens.load_classifier(saved(tmp_path, "BertForSequenceClassification"))
    view = tlens.explorer.Session(model).view("prompt", {"text": TEXT})
    assert {token["text"] for token in view["next"]} == set(LABELS["id2label"].values())
    assert sum(token["chance"] for token in view["next"]) == pytest.approx(1.0)
    assert view["query"] == 0
