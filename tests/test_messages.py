"""Deliberate mistakes across the public API: each message says what was wrong, where, and what to do.

A row of `MISTAKES` is a mistake that users make, and three texts that its message must contain: the value that was
wrong, the argument or place, and something that would be right.
"""

import pathlib
import tempfile
import warnings
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, evaluate
from tensorlens_tl.generation import freeze_generation

TEXT = "Return the value. Return the"
OTHER = "Return the name. Return the"
LONGER = "Return the value of it. Return the"
AFTER = "blocks.0.hook_resid_post"


class Setting:
    """Tiny models, passes and results, each made when a mistake first needs it."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())

    @cached_property
    def model(self):
        return tlens.load_demo_model(kind="bridge")

    @cached_property
    def twin(self):
        return tlens.load_demo_model(kind="bridge")

    @cached_property
    def recall(self):
        return tlens.load_demo_model("recall", kind="bridge")

    @cached_property
    def encoder(self):
        return tlens.load_demo_model("encoder")

    @cached_property
    def images(self):
        return tlens.load_demo_model("digits")

    @cached_property
    def reversal(self):
        return tlens.load_demo_model("reversal")

    @cached_property
    def whitened(self):
        return tlens.load_demo_model("whitened")

    @cached_property
    def frozen(self):
        return tlens.freeze(self.model, TEXT)

    @cached_property
    def corrupted(self):
        return tlens.freeze(self.model, OTHER)

    @cached_property
    def longer(self):
        return tlens.freeze(self.model, LONGER)

    @cached_property
    def twins(self):
        return tlens.freeze(self.twin, OTHER)

    @cached_property
    def other(self):
        return tlens.freeze(self.recall, torch.tensor([[1, 2, 3, 4, 5, 6, 7]]))

    @cached_property
    def double(self):
        return tlens.freeze(tlens.load_demo_model(kind="bridge", dtype=torch.float64), TEXT)

    @cached_property
    def difference(self):
        return tlens.difference(self.frozen, self.corrupted)

    @cached_property
    def attribution(self):
        return tlens.attribute(self.frozen, " value")

    @cached_property
    def terms(self):
        return circuits.logit_attribution(self.frozen, " value", by="head")

    @cached_property
    def edges(self):
        return circuits.edge_scores(self.frozen, self.corrupted, " value", " name")

    @cached_property
    def graph(self):
        return circuits.contribution_graph(self.frozen, " value", threshold=0.1)

    @cached_property
    def dictionary(self):
        return tlens.load_demo_dictionary()

    @cached_property
    def features(self):
        return circuits.features(self.frozen, self.dictionary)

    @cached_property
    def pairs(self):
        return evaluate.prompt_pairs(evaluate.recall(4))

    @cached_property
    def program(self):
        return tlens.demo.program("induction")

    @cached_property
    def saved_terms(self):
        return self.terms.save(self.folder / "terms.safetensors")

    @cached_property
    def saved_attribution(self):
        return self.attribution.save(self.folder / "attribution")

    @cached_property
    def others_file(self):
        from safetensors.torch import save_file

        path = self.folder / "others.safetensors"
        save_file({"a": torch.ones(2)}, path)
        return path

    def text_file(self, name, text=""):
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path


def hooked():
    """A model with a hook that zeroes a head."""
    model = tlens.load_demo_model(kind="bridge")
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: z * torch.rand_like(z))
    return model


def changed():
    """A pass whose model was changed after it."""
    model = tlens.load_demo_model(kind="bridge")
    frozen = tlens.freeze(model, TEXT)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    return frozen


def sae(width=128, features=8, device=None, **more):
    weights = torch.ones(width, features, device=device)
    return SimpleNamespace(W_enc=weights, W_dec=weights.T, **more)


def single_result(setting):
    """The file of one result."""
    path = setting.folder / "single.safetensors"
    tlens.attribute(setting.frozen, " value").save(path)
    return path


MISTAKES = {
    # ------------------------------------------------------------------ models
    "a model by name": (lambda c: tlens.freeze("gpt2", TEXT), "str", "cfg", "load one by its name first"),
    "a torch module": (lambda c: tlens.freeze(torch.nn.Linear(2, 2), TEXT), "Linear", "cfg", "TransformerBridge"),
    "a Hugging Face model": (
        lambda c: tlens.freeze(c.model.original_model, TEXT),
        "GPT2LMHeadModel",
        "cfg",
        "TransformerBridge.boot_transformers",
    ),
    "an activation misspelt": (
        lambda c: c.frozen.activation("blocks.3.hook_resid_pri"),
        "'blocks.3.hook_resid_pri'",
        "activation",
        "Did you mean 'blocks.3.hook_resid_pre'?",
    ),
    "a target without text": (lambda c: tlens.attribute(c.frozen, ""), "''", "target", "the text of one token"),
    "a file as a run": (
        lambda c: tlens.load_results(single_result(c)),
        "single.safetensors",
        "folder",
        "Attribution.load",
    ),
    "a layer without cross-attention": (
        lambda c: circuits.qk_attribution(
            tlens.freeze(c.reversal, [[3, 4]], decoder_input_ids=[[1, 5]]), 0, 0, cross=True
        ),
        "layer=0",
        "cross-attention",
        "only layer",
    ),
    "a pass as a model": (
        lambda c: tlens.compare_models(c.frozen, c.frozen, TEXT, " a"),
        "FrozenPass",
        "cfg",
        "frozen.model",
    ),
    "an operator as a model": (
        lambda c: tlens.attribute(c.frozen.operator(), TEXT),
        "FrozenOperator",
        "cfg",
        "operator.frozen",
    ),
    "a model as a pass": (
        lambda c: circuits.logit_attribution(c.model, " value"),
        "TransformerBridge",
        "frozen pass",
        "tlens.freeze",
    ),
    "a model as an operator": (
        lambda c: circuits.spectral_norm(c.model),
        "TransformerBridge",
        "an operator is needed",
        "frozen.operator()",
    ),
    "two objects of one model": (
        lambda c: circuits.patch_scores(c.frozen, c.twins, " value", " name"),
        "both TransformerBridge (tensorlens-demo)",
        "clean and corrupted",
        "freeze both prompts with one",
    ),
    "two architectures": (
        lambda c: tlens.difference(c.frozen, c.other),
        "n_layers 4 and 2",
        "difference",
        "must be of one architecture",
    ),
    "a demo model misspelt": (
        lambda c: tlens.load_demo_model("languag"),
        "'languag'",
        "name=",
        "Did you mean 'language'?",
    ),
    "a demo kind": (lambda c: tlens.load_demo_model(kind="tl"), "'tl'", "kind=", "'bridge'"),
    "a program misspelt": (
        lambda c: tlens.demo.program("inductions"),
        "'inductions'",
        "program=",
        "Did you mean 'induction'?",
    ),
    # ------------------------------------------------------------------ inputs
    "no text": (
        lambda c: tlens.freeze(c.model, ["a", ""], prepend_bos=False),
        "has no token",
        "text number 1",
        "prepend_bos=True",
    ),
    "a log-probability": (
        lambda c: tlens.attribute(c.model, TEXT, " the", of="log_probability"),
        "no option 'of'",
        "With minus= scores sum to",
        "method='leave-one-out'",
    ),
    "two answers of different lengths": (
        lambda c: freeze_generation(c.model, TEXT, continuation=" the").difference(
            freeze_generation(c.model, TEXT, continuation=" the value")
        ),
        "stand elsewhere",
        "attribute each by itself (span='all'",
        "the first token in which they differ",
    ),
    "nothing": (lambda c: tlens.freeze(c.model, None), "NoneType", "input", "Pass a string"),
    "ids that are no integers": (
        lambda c: tlens.freeze(c.model, torch.ones(1, 3)),
        "torch.float32",
        "input",
        "must be integers",
    ),
    "an id that is no token": (
        lambda c: tlens.freeze(c.model, [[1, 99999]]),
        "99999 at [0, 1]",
        "input",
        "vocabulary of 2048",
    ),
    "a prompt that is too long": (
        lambda c: tlens.freeze(c.model, torch.ones(1, 5000, dtype=torch.long)),
        "5000 tokens",
        "input",
        "shorten the prompt",
    ),
    "messages of a chat": (
        lambda c: tlens.freeze(c.model, [{"role": "user", "content": "x"}]),
        "messages of a chat",
        "input",
        "set model.tokenizer.chat_template",
    ),
    "a list of encodings": (
        lambda c: tlens.freeze(c.model, [c.model.tokenizer(TEXT)]),
        "a list of BatchEncoding",
        "input",
        "in one call",
    ),
    "a mask of another shape": (
        lambda c: tlens.freeze(c.model, [[1, 2, 3]], attention_mask=torch.ones(1, 4)),
        "(1, 4)",
        "attention_mask",
        "must agree",
    ),
    "ids without values": (
        lambda c: tlens.freeze(c.model, torch.ones(1, 3, dtype=torch.long, device="meta")),
        "meta device",
        "input: a tensor [1, 3]",
        "on the CPU",
    ),
    "a mask without values": (
        lambda c: tlens.freeze(c.model, [[1, 2, 3]], attention_mask=torch.ones(1, 3, device="meta")),
        "meta device",
        "attention_mask",
        "on the CPU",
    ),
    "a padding side": (
        lambda c: tlens.freeze(c.model, ["a", "b c"], padding_side="middle"),
        "'middle'",
        "padding_side=",
        "'left' or 'right'",
    ),
    "text for images": (
        lambda c: tlens.freeze(c.images, "text"),
        "not text",
        "input",
        "[batch, channel, height, width]",
    ),
    "images of another size": (
        lambda c: tlens.freeze(c.images, torch.ones(1, 3, 8, 8)),
        "[1, 3, 8, 8]",
        "input",
        "[batch, 1, 8, 8]",
    ),
    "images for a text model": (
        lambda c: tlens.freeze(c.model, torch.rand(1, 1, 8, 8)),
        "torch.float32",
        "input",
        "model_inputs=",
    ),
    "no input for a decoder": (
        lambda c: tlens.freeze(c.reversal, [[3, 4, 5]]),
        "encoder–decoder",
        "decoder_input_ids",
        "decoder_start_token_id",
    ),
    "a tolerance": (
        lambda c: tlens.freeze(c.model, TEXT, tolerance=-1),
        "tolerance=-1",
        "tolerance",
        "positive number",
    ),
    "how to verify": (lambda c: tlens.freeze(c.model, TEXT, verify="maybe"), "'maybe'", "verify=", "'sample'"),
    "hooks on the model": (
        lambda c: tlens.freeze(hooked(), TEXT),
        "misses its own output",
        "blocks.0.attn.hook_z",
        "Take it off",
    ),
    "weights that were changed": (lambda c: tlens.attribute(changed(), " value"), "changed", "weights", "Freeze again"),
    # ------------------------------------------------------------------ methods and options
    "a method misspelt": (
        lambda c: tlens.attribute(c.frozen, " value", method="tensorlense"),
        "'tensorlense'",
        "method",
        "Did you mean 'tensorlens'?",
    ),
    "a method's other name": (
        lambda c: tlens.attribute(c.frozen, " value", method="IG"),
        "'IG'",
        "method",
        "It is called 'integrated-gradients' here",
    ),
    "a method with underscores": (
        lambda c: tlens.get_method("value_zeroing"),
        "'value_zeroing'",
        "method",
        "Did you mean 'value-zeroing'?",
    ),
    "an option misspelt": (
        lambda c: tlens.attribute(c.frozen, " value", method="integrated-gradients", step=3),
        "'step'",
        "'integrated-gradients'",
        "Did you mean 'steps'?",
    ),
    "a target for rollout": (
        lambda c: tlens.attribute(c.frozen, " value", method="rollout"),
        "'target'",
        "'rollout'",
        "These do: 'alti-logit'",
    ),
    "an input besides a pass": (
        lambda c: tlens.attribute(c.frozen, TEXT, " value"),
        "has its input already",
        "attribute",
        "attribute(frozen, ' Paris')",
    ),
    "no input": (lambda c: tlens.attribute(c.model), "missing", "`input`", "pass text"),
    "a collapse": (lambda c: tlens.attribute(c.frozen, collapse="in-out"), "'in-out'", "collapse=", "'in_out'"),
    "an activation rule": (
        lambda c: tlens.attribute(c.frozen, " value", rule="relu"),
        "'relu'",
        "rule=",
        "'frozen-split'",
    ),
    "a layer map": (
        lambda c: tlens.attribute(c.frozen, method="mean", layer_map="value_zeroing"),
        "'value_zeroing'",
        "layer_map=",
        "'value-zeroing'",
    ),
    "layers that are not there": (
        lambda c: tlens.attribute(c.frozen, " value", layers=slice(3, 9)),
        "slice(3, 9",
        "layers=",
        "4 layers",
    ),
    "a memory bound": (lambda c: tlens.attribute(c.frozen, " value", memory="lots"), "'lots'", "memory=", "'512MB'"),
    "a method that is no function": (
        lambda c: tlens.register_method("mine")(3),
        "int",
        "register_method('mine')",
        "decorates a function",
    ),
    # ------------------------------------------------------------------ targets and queries
    "a text for a model without a tokenizer": (
        lambda c: tlens.testing.check_method("relp", ["bridge/gpt2"], target=" raised"),
        "' raised'",
        "no tokenizer",
        "pass a token id or 'first-choice'",
    ),
    "the same, to compare with": (
        lambda c: tlens.testing.check_method("relp", ["bridge/gpt2"], target=5, minus=" a"),
        "' a'",
        "no tokenizer",
        "pass a token id or 'first-choice' or 'runner-up'",
    ),
    "a target of several tokens": (
        lambda c: tlens.attribute(c.frozen, " valuezzz"),
        "' valuezzz'",
        "target=",
        "attribute_generation",
    ),
    "a target without its space": (
        lambda c: tlens.attribute(c.frozen, "FileNotFoundError"),
        "'FileNotFoundError'",
        "target=",
        "a target is one token",
    ),
    "a target that is no token": (lambda c: tlens.attribute(c.frozen, 99999), "target=99999", "target", "0 to 2047"),
    "a number as a target": (lambda c: tlens.attribute(c.frozen, 1.5), "target=1.5", "target", "direction="),
    "token and direction": (
        lambda c: tlens.attribute(c.frozen, " value", direction=torch.ones(128)),
        "not both",
        "direction=",
        "pass either",
    ),
    "a direction of another width": (
        lambda c: tlens.attribute(c.frozen, direction=torch.ones(3)),
        "(3,)",
        "direction",
        "[128]",
    ),
    "a query out of range": (lambda c: tlens.attribute(c.frozen, " value", query=99), "query=99", "query", "-7 to 6"),
    "a query that is not in the text": (
        lambda c: tlens.attribute(c.frozen, " value", query="zebra"),
        "'zebra'",
        "query",
        "' value'",
    ),
    "the mean over queries": (
        lambda c: circuits.logit_attribution(c.frozen, " value", query="mean"),
        "'mean'",
        "query",
        "query='all'",
    ),
    "several queries for one": (
        lambda c: circuits.contribution_graph(c.frozen, " value", query=[1, 2]),
        "[1, 2]",
        "query=",
        "an integer or a text",
    ),
    "a key after its query": (
        lambda c: circuits.qk_attribution(c.frozen, 0, 0, query=3, key=6),
        "key=6",
        "query=3",
        "no later token",
    ),
    # ------------------------------------------------------------------ results and files
    "k of no entries": (lambda c: c.attribution.top(0), "k=0", "k", "at least 1"),
    "a query that a result lacks": (lambda c: c.attribution.top(3, query=5), "query=5", "query", "query='all'"),
    "a prompt that a result lacks": (lambda c: c.attribution.top(3, batch=5), "batch=5", "batch", "1 prompt,"),
    "a kind of file": (
        lambda c: c.attribution.save(c.folder / "a.docx"),
        "'.docx'",
        "save",
        ".safetensors, .html, .csv",
    ),
    "a folder that is missing": (
        lambda c: c.attribution.save(c.folder / "no" / "a"),
        "no/a",
        "save",
        "there is no folder",
    ),
    "a file of another result": (
        lambda c: tlens.Attribution.load(c.saved_terms),
        "holds Terms, not Attribution",
        "terms.safetensors",
        "tlens.load(",
    ),
    "a file of an attribution": (
        lambda c: tlens.Terms.load(c.saved_attribution),
        "holds Attribution, not Terms",
        "attribution",
        "tlens.load(",
    ),
    "somebody else's file": (
        lambda c: tlens.Attribution.load(c.others_file),
        "not one that this library saved",
        "others.safetensors",
        "safetensors.torch.load_file",
    ),
    "a table as a result": (
        lambda c: tlens.Attribution.load(c.text_file("table.csv", "a,b\n")),
        "a CSV table",
        "table.csv",
        "pandas.read_csv",
    ),
    "a circuit from another file": (
        lambda c: circuits.Circuit.load(c.text_file("c.json", "{}")),
        "KeyError",
        "c.json",
        "Circuit.load reads what",
    ),
    "Neuronpedia's name": (
        lambda c: c.graph.export(c.folder / "g.json", "neuronpedia"),
        "'neuronpedia'",
        "format=",
        "It is called 'circuit-tracer' here",
    ),
    "an ending of no format": (lambda c: c.graph.export(c.folder / "g.xyz"), "'g.xyz'", "format", "circuit-tracer"),
    "a term misspelt": (lambda c: c.terms["L0H9"], "'L0H9'", "term", "Did you mean 'L0H"),
    # ------------------------------------------------------------------ circuits
    "parts by another name": (
        lambda c: circuits.logit_attribution(c.frozen, " a", by="heads"),
        "'heads'",
        "by=",
        "Did you mean 'head'?",
    ),
    "live as a text": (lambda c: circuits.total_effects(c.frozen, " value", live="yes"), "'yes'", "live=", "True"),
    "a layer of a head": (lambda c: circuits.ov(c.model, 9, 0), "layer=9", "layer", "0 to 3"),
    "a head": (lambda c: circuits.head_map(c.frozen, 0, 9), "head=9", "head", "0 to 3"),
    "a circuit of weights": (lambda c: circuits.svd_tokens(c.model, 0, 0, circuit="OV"), "'OV'", "circuit=", "'ov'"),
    "EAP-IG": (
        lambda c: circuits.edge_scores(c.frozen, c.corrupted, " value", " name", method="eap-ig"),
        "'eap-ig'",
        "method=",
        "It is called 'integrated-gradients' here",
    ),
    "gradient points": (
        lambda c: circuits.edge_scores(c.frozen, c.corrupted, " value", " name", points="leftt"),
        "'leftt'",
        "points=",
        "Did you mean 'left'?",
    ),
    "pairs that do not align": (
        lambda c: circuits.edge_scores(c.frozen, c.longer, " value", " name"),
        "7 tokens",
        "clean",
        "Replace tokens one for one",
    ),
    "an edge with another arrow": (
        lambda c: c.edges["L0H1->target"],
        "'L0H1->target'",
        "edge",
        "Did you mean 'L0H1 → target'?",
    ),
    "an edge backwards": (lambda c: c.edges["MLP3 → L0H1.q"], "'MLP3 → L0H1.q'", "edge", "does not read what"),
    "more edges than there are": (lambda c: c.edges.circuit(10000), "edges=10000", "edges", "0 to 479"),
    "a choice of edges": (
        lambda c: c.edges.circuit(10, choice="greed"),
        "'greed'",
        "choice=",
        "Did you mean 'greedy'?",
    ),
    "scores as a circuit": (
        lambda c: circuits.run_circuits(c.frozen, c.corrupted, c.edges, " value", " name"),
        "EdgeScores",
        "circuits=",
        ".circuit(100)",
    ),
    "a share of a graph": (lambda c: c.graph.prune(2), "share=2", "share", "above 0 and at most 1"),
    "a node that is none": (lambda c: c.graph.inputs("L0H9"), "'L0H9'", "node", "top() names the largest"),
    "a kind of node": (lambda c: c.graph.top(3, kind="heads"), "'heads'", "kind=", "Did you mean 'head'?"),
    "a threshold": (
        lambda c: circuits.contribution_graph(c.frozen, " value", threshold=-1),
        "threshold=-1",
        "threshold",
        "from 0 to 1",
    ),
    "heads' product in a whitened model": (
        lambda c: circuits.composition_scores(c.whitened, "Q"),
        "whitened",
        "composition",
        "contribution_graph",
    ),
    # ------------------------------------------------------------------ two runs
    "a text for a pass or a difference": (
        lambda c: circuits.routes("x", " value"),
        "str",
        "frozen pass",
        "tlens.freeze",
    ),
    "a text for a pass": (lambda c: tlens.difference(c.frozen, "x"), "str", "frozen pass", "tlens.freeze"),
    "runs of other lengths": (
        lambda c: tlens.difference(c.frozen, c.longer),
        "[7] and [9]",
        "difference",
        "replace words",
    ),
    "one run's method for two": (
        lambda c: tlens.attribute(c.difference, " value", method="alti"),
        "'alti'",
        "method=",
        "pass one of the two runs",
    ),
    # ------------------------------------------------------------------ dictionaries
    "a dictionary of another width": (
        lambda c: circuits.features(c.frozen, sae(64), AFTER),
        "64 numbers",
        AFTER,
        "another model's",
    ),
    "a dictionary's name": (
        lambda c: circuits.features(c.frozen, "gpt2-small-res-jb", AFTER),
        "'gpt2-small-res-jb'",
        "dictionary=",
        "SAE.from_pretrained",
    ),
    "no dictionary": (
        lambda c: circuits.features(c.frozen, SimpleNamespace(), AFTER),
        "missing",
        "W_enc",
        "[d_in, feature]",
    ),
    "a dictionary of another dtype": (
        lambda c: circuits.features(c.double, c.dictionary),
        "torch.float32",
        "dictionary",
        ".to(torch.float64)",
    ),
    "a dictionary without values": (
        lambda c: circuits.features(c.frozen, sae(device="meta"), AFTER),
        "meta device",
        "SimpleNamespace.W_enc",
        "on the model's device",
    ),
    "a gated dictionary": (
        lambda c: circuits.features(c.frozen, sae(b_gate=torch.ones(8)), AFTER),
        "gated (b_gate)",
        "dictionary",
        "JumpReLU",
    ),
    "a dictionary without a place": (
        lambda c: circuits.features(c.frozen, sae()),
        "does not say where",
        "features",
        "hook=",
    ),
    "a hook point of a head": (
        lambda c: circuits.features(c.frozen, c.dictionary, "blocks.0.attn.hook_z"),
        "'blocks.0.attn.hook_z'",
        "hook=",
        AFTER,
    ),
    "a hook point misspelt": (
        lambda c: circuits.features(c.frozen, c.dictionary, "blocks.2.hook_resid_pst"),
        "hook_resid_pst",
        "hook=",
        "blocks.2.hook_resid_post",
    ),
    "a feature that is none": (
        lambda c: circuits.feature_attribution(c.features, "F9999"),
        "feature=9999",
        "feature",
        "0 to 511",
    ),
    "a dictionary as features": (
        lambda c: circuits.feature_effects(c.dictionary, " a"),
        "Dictionary",
        "features are needed",
        "circuits.features(",
    ),
    "rows as a mapping": (
        lambda c: circuits.feature_examples(c.model, c.dictionary, {"text": [TEXT]}),
        "dict",
        "input",
        "dataset['text']",
    ),
    "labels of another dictionary": (
        lambda c: circuits.features(c.frozen, c.dictionary, labels={600: "x"}),
        "feature 600",
        "labels",
        "0 to 511",
    ),
    # ------------------------------------------------------------------ generated text
    "a span that was not written": (
        lambda c: tlens.attribute_generation(c.model, "Return the", continuation=" value.", span="zebra"),
        "'zebra'",
        "span=",
        "' value'",
    ),
    "no new tokens": (
        lambda c: tlens.attribute_generation(c.model, "Return the", max_new_tokens=0),
        "max_new_tokens=0",
        "max_new_tokens",
        "at least 1",
    ),
    "an encoder that writes": (
        lambda c: tlens.attribute_generation(c.encoder, "Return", max_new_tokens=2),
        "encoder",
        "generated text",
        "causal language model",
    ),
    # ------------------------------------------------------------------ data sets
    "a method of a data set": (
        lambda c: tlens.attribute_dataset(c.model, ["a"], c.folder / "m", method="tensorlense"),
        "'tensorlense'",
        "method",
        "Did you mean 'tensorlens'?",
    ),
    "a column": (
        lambda c: tlens.attribute_dataset(c.model, [{"txt": "a"}], c.folder / "c"),
        "'text'",
        "rows",
        "text='txt'",
    ),
    "a file of rows": (
        lambda c: tlens.attribute_dataset(c.model, c.folder / "no.csv", c.folder / "f"),
        "no.csv",
        "rows",
        "there is no file",
    ),
    "a folder without results": (
        lambda c: tlens.load_results(c.folder / "none"),
        "manifest.json",
        "none",
        "attribute_dataset(model, rows, folder)",
    ),
    # ------------------------------------------------------------------ evaluation
    "texts as a task": (
        lambda c: evaluate.KnownAnswers("x", ["a b"], [" value"], [[True]]),
        "'a b'",
        "KnownAnswers: tokens",
        "token ids",
    ),
    "pairs as a task": (
        lambda c: evaluate.known_answer(c.recall, c.pairs, ["tensorlens"]),
        "PromptPairs",
        "task=",
        "evaluate.recall()",
    ),
    "a task as pairs": (
        lambda c: evaluate.patching_agreement(c.recall, evaluate.recall(2)),
        "KnownAnswers",
        "pairs=",
        "evaluate.prompt_pairs",
    ),
    "a model that cannot do the task": (
        lambda c: evaluate.known_answer(c.model, evaluate.recall(2), ["tensorlens"]),
        "none of these 2",
        "known_answer",
        "only_correct=False",
    ),
    "a method of circuits": (
        lambda c: evaluate.circuit_faithfulness(c.recall, c.pairs, ["eap-ig"]),
        "'eap-ig'",
        "methods",
        "It is called 'integrated-gradients, left' here",
    ),
    "proportions": (
        lambda c: evaluate.circuit_faithfulness(c.recall, c.pairs, ["frozen"], proportions=(0.5,)),
        "(0.5,)",
        "proportions=",
        "up to 1",
    ),
    "parts of an agreement": (
        lambda c: evaluate.patching_agreement(c.recall, c.pairs, ["frozen"], by="edges"),
        "'edges'",
        "by=",
        "Did you mean 'edge'?",
    ),
    "a switch in place of methods": (
        lambda c: evaluate.patching_agreement(c.model, c.pairs, True),
        "True",
        "methods",
        "'gradient'",
    ),
    "shares that are a text": (
        lambda c: evaluate.circuit_faithfulness(c.model, c.pairs, ["gradient"], proportions="all"),
        "'all'",
        "proportions",
        "up to 1",
    ),
    "how pairs differ": (
        lambda c: evaluate.prompt_pairs(evaluate.recall(2), "sources"),
        "'sources'",
        "change=",
        "Did you mean 'source'?",
    ),
    # ------------------------------------------------------------------ compression and whitening
    "a compression misspelt": (
        lambda c: compress.plan(c.model, ratio=2, method="head_svd"),
        "'head_svd'",
        "method=",
        "Did you mean 'head-svd'?",
    ),
    "a ratio below 1": (lambda c: compress.plan(c.model, ratio=0.5), "ratio=0.5", "ratio", "at least 1"),
    "layers to compress": (lambda c: compress.plan(c.model, ratio=2, layers=[9]), "layers=9", "layers", "-4 to 3"),
    # ------------------------------------------------------------------ arguments of another type
    "several methods at once": (
        lambda c: tlens.attribute(c.frozen, method=["ifr", "alti"]),
        "['ifr', 'alti']",
        "method",
        "'alti'",
    ),
    "several methods for a data set": (
        lambda c: tlens.attribute_dataset(c.model, [TEXT], c.folder / "never", method=["ifr"]),
        "['ifr']",
        "method",
        "'ifr'",
    ),
    "columns without their options": (
        lambda c: tlens.attribute_dataset(c.model, [TEXT], c.folder / "never", columns=["target"]),
        "['target']",
        "columns",
        "{'target': 'answer'}",
    ),
    "a list of text columns": (
        lambda c: tlens.attribute_dataset(c.model, [{"text": TEXT}], c.folder / "never", text=["text"]),
        "['text']",
        "column",
        "'text'",
    ),
    "a list of layer maps": (
        lambda c: tlens.attribute(c.frozen, method="rollout", layer_map=["norm", "ifr"]),
        "['norm', 'ifr']",
        "layer_map",
        "'norm'",
    ),
    "the listed tokens of a second prompt": (lambda c: c.attribution.listed(1), "1", "batch", "0"),
    "the description of a second prompt": (lambda c: c.attribution.describe(1), "1", "batch", "0"),
    "one token of several": (lambda c: circuits.full_ov(c.model, 0, 0, tokens=3), "tokens=3", "tokens", "list"),
    "one head of several": (lambda c: c.frozen.block(0, heads=3), "layer 0", "heads", "{0: [0, 2]}"),
    "a head that a block lacks": (lambda c: c.frozen.block(0, heads=[4]), "=4", "heads", "0 to 3"),
    "one hook point by number": (lambda c: tlens.whitening.measure(c.model, [TEXT] * 4, 2), "none", "hooks", "names"),
    "one token id without a prompt": (
        lambda c: tlens.attribute(c.model, torch.tensor(3)),
        "()",
        "input",
        "[batch, pos]",
    ),
    "a text in place of a mask": (
        lambda c: tlens.freeze(c.model, torch.tensor([[3, 4]]), attention_mask="left"),
        "'str'",
        "attention_mask",
        "1 at",
    ),
    "a switch in place of a cache": (
        lambda c: tlens.freeze(c.model, TEXT, cache=True),
        "bool",
        "cache",
        "run_with_cache",
    ),
    "a text in place of a stream": (lambda c: circuits.error_bound(c.frozen, TEXT), "Return", "x=", "tensor"),
    "a mean over queries of one query": (
        lambda c: circuits.logit_attribution(c.frozen, " value", query="mean"),
        "'mean'",
        "query",
        "pass a position",
    ),
    "whitening twice": (lambda c: tlens.whiten(c.whitened), "whitened already", "whiten", "load it again"),
    "whitening's start": (lambda c: tlens.whiten(c.model, init="zero"), "'zero'", "init", "'identity'"),
}


@pytest.fixture(scope="module")
def setting():
    return Setting()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_message_says_what_where_and_what_to_do(setting, mistake):
    call, *parts = MISTAKES[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(tlens.TensorLensError) as raised:
            call(setting)
    message = str(raised.value)
    for question, part in zip(("what", "where", "what to do"), parts, strict=True):
        assert part in message, f"{question}: {part!r} is not in: {message}"


TOO_MANY = 10**30
COUNTS = {
    "steps": [
        lambda c: circuits.edge_scores(c.frozen, c.corrupted, " value", steps=TOO_MANY),
        lambda c: tlens.attribute(c.frozen, " value", method="integrated-gradients", steps=TOO_MANY),
        lambda c: evaluate.patching_agreement(c.model, c.pairs, steps=TOO_MANY),
        lambda c: evaluate.circuit_faithfulness(c.model, c.pairs, steps=TOO_MANY),
        lambda c: evaluate.known_components(c.program.model(), c.program.components(2), steps=TOO_MANY),
    ],
    "draws": [
        lambda c: evaluate.perturbation(c.model, TEXT, ["random"], replacement="resampled", draws=TOO_MANY),
        lambda c: evaluate.stability(c.model, TEXT, ["ifr"], draws=TOO_MANY),
        lambda c: compress.sharing(c.model, draws=TOO_MANY),
    ],
    "prompts": [
        lambda c: evaluate.induction(TOO_MANY, d_vocab=99),
        lambda c: evaluate.brackets(TOO_MANY),
        lambda c: evaluate.recall(TOO_MANY),
        lambda c: c.program.prompts(TOO_MANY),
        lambda c: tlens.demo.held_out_prompts(c.model, TOO_MANY),
    ],
    "d_vocab": [lambda c: evaluate.induction(2, d_vocab=TOO_MANY)],
    "segment": [lambda c: evaluate.induction(2, d_vocab=99, segment=TOO_MANY)],
    "length": [
        lambda c: evaluate.brackets(2, length=TOO_MANY),
        lambda c: tlens.demo.held_out_prompts(c.model, 2, TOO_MANY),
    ],
    "distractors": [lambda c: evaluate.recall(2, distractors=TOO_MANY)],
    "tokens": [lambda c: evaluate.expected_mrr(TOO_MANY)],
    "splits": [lambda c: evaluate.relation_decoding(c.model, splits=TOO_MANY)],
    "resamples": [lambda c: evaluate.bootstrap_interval([1.0, 2.0], resamples=TOO_MANY)],
    "seed": [
        lambda c: evaluate.bootstrap_interval([1.0, 2.0], seed=TOO_MANY),
        lambda c: evaluate.stability(c.model, TEXT, ["ifr"], seed=TOO_MANY),
        lambda c: compress.rotate_heads(compress.head_weights(c.model, 0), seed=TOO_MANY),
    ],
}


@pytest.mark.parametrize("name", COUNTS)
def test_more_than_memory_or_time_allow_is_an_error_before_the_work(setting, name):
    for call in COUNTS[name]:
        with pytest.raises(tlens.InvalidInputError, match=f"{name}={TOO_MANY}: pass (at most|-?[0-9]+ to) "):
            call(setting)


def test_the_table_is_long_enough():
    assert len(MISTAKES) >= 60


WRONG_CALLS = {
    "two targets": (lambda s: tlens.attribute(s.model, TEXT, " value", " name"), "too many", "attribute(model, input="),
    "a head by its name": (lambda s: circuits.qk_attribution(s.frozen, "L1H0"), "'head'", "(frozen, layer, head, "),
    "freeze": (lambda s: tlens.freeze(s.model, TEXT, prepend_boss=True), "prepend_boss", "'prepend_bos'"),
    "no text": (lambda s: tlens.freeze(s.model), "missing a required argument", "freeze(model, input"),
    "total_effects": (lambda s: circuits.total_effects(s.frozen, " value", abblation=1), "abblation", "(frozen, "),
    "logit_lens": (lambda s: circuits.logit_lens(s.frozen, " value", minos=" name"), "minos", "'minus'"),
    "top_paths": (lambda s: circuits.top_paths(s.frozen, " value", min=" name"), "min", "minus="),
    "contribution_graph": (
        lambda s: circuits.contribution_graph(s.frozen, " value", tresholds=0.1),
        "tresholds",
        "'threshold'",
    ),
    "known_answer": (lambda s: evaluate.known_answer(s.recall, evaluate.recall(2), method="relp"), "method", "methods"),
    "text_pairs": (lambda s: evaluate.text_pairs(s.model, [TEXT], [OTHER], targets=[" a"]), "targets", "'target'"),
    "perturbation": (lambda s: evaluate.perturbation(s.model, TEXT, fraction=[0.5]), "fraction", "'fractions'"),
}
"""A call with an argument that the function does not have, or without one that it needs, and what is said of it."""


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_misspelt_argument_gets_the_near_name_and_all_names(name, setting):
    call, wrong, right = WRONG_CALLS[name]
    with pytest.raises(tlens.WrongCallError) as error:
        call(setting)
    assert isinstance(error.value, tlens.InvalidInputError)
    assert isinstance(error.value, TypeError)
    assert wrong in str(error.value)
    assert right in str(error.value)
    assert "It is called as" in str(error.value)


def test_a_misspelt_option_beside_those_of_freezing_gets_the_near_name(setting):
    with pytest.raises(tlens.InvalidInputError, match=r"no argument 'targets'.* Did you mean 'target'"):
        tlens.compare_models(setting.model, setting.twin, TEXT, targets=" a")


def test_a_warning_names_the_users_line(model_named):
    """However many functions of ours, and wrappers of them, lie in between."""
    frozen = tlens.freeze(model_named("bridge/gpt2"), torch.tensor([[3, 4, 5, 6]]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tlens.attribute(frozen, 5, method="integrated-gradients", steps=2)
        tlens.methods.integrated_gradients(frozen, target=5, steps=2)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
