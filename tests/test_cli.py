"""The command line, as a user types it."""

import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pandas
import pytest
import torch

import tensorlens_tl as tlens
from scripts import choose
from tensorlens_tl import commands
from tensorlens_tl._method_names import ENTRY_POINTS, built_in_methods, published_elsewhere
from tensorlens_tl.commands import command_first, dataset, early, evaluate, main, shared, with_options
from tensorlens_tl.commands.shared import read_prompts
from tensorlens_tl.datasets.work import CIRCUITS
from tensorlens_tl.evaluate.scorers import RANDOM, STANDARD


def test_demo_writes_a_page_that_needs_no_network(tmp_path, capsys):
    page = tmp_path / "demo.html"
    assert main(["demo", "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    for part in ("bias (no token)", "total", "proof", "forward passes"):
        assert part in printed
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "http" not in text
    assert text.count('class="line rove"') == 3


def test_demo_escapes_its_text(tmp_path):
    page = tmp_path / "demo.html"
    assert main(["demo", "<img src=x onerror=alert(1)> is not found", "-o", str(page)]) == 0
    assert "<img src=x" not in page.read_text(encoding="utf-8")


NO_MODEL = ["--model", "no_model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Return the value", "--target", " a b"], "--target ' a b' is 2 tokens [' a', ' b']"),
        (["graph", "Return the", "--target", " a b"], "--target ' a b' is 2 tokens"),
        (["dataset", "ROWS", "-o", "RUN", "--target", " a"], "holds the prompts, such as --text 'txt'."),
        (
            ["dataset", "ROWS", "--text", "tx", "-o", "RUN", *NO_MODEL],
            "there is no column 'tx', only 'txt'. Did you mean 'txt'?",
        ),
        (["dataset", "ROWS", "--text", "txt", "-o", "RUN", "--memory", "1X"], "--memory '1X': pass bytes"),
        (["dataset", "ROWS", "--text", "txt", "-o", "RUN", "--query", "9", "--target", " a"], "--query 9 is out"),
        (
            ["dataset", "ROWS", "--text", "txt", "--target-column", "answer", "-o", "RUN", *NO_MODEL],
            "no column 'answer'",
        ),
        (["dataset", "NONE", "-o", "RUN", *NO_MODEL], "there is no file"),
        (["evaluate", "perturbation", "--prompts", "ROWS", *NO_MODEL], "its columns are 'txt'"),
        (["compress", "--prompts", "ROWS", *NO_MODEL], "its columns are 'txt'"),
        (["whiteness", "--prompts", "ROWS", *NO_MODEL], "its columns are 'txt'"),
    ],
)
def test_errors_speak_of_options(words, message, tmp_path, capsys):
    """Files are looked at before a model is loaded."""
    rows = tmp_path / "rows.csv"
    rows.write_text("txt\nReturn the value\n", encoding="utf-8")
    places = {"ROWS": str(rows), "RUN": str(tmp_path / "run"), "NONE": str(tmp_path / "none.csv")}
    assert main([places.get(word, word) for word in words]) == 1
    assert message in capsys.readouterr().err


def test_calls_and_quotations_are_not_options():
    parser = commands.parser().commands["dataset"]
    for text in ("call freeze(model, query=-1)", "the text ' target=5'", "columns={'target': 1}", "collapse='target'"):
        assert with_options(text, parser) == text
    assert with_options("pass truncate=True, or another query=.", parser) == "pass --truncate, or another --query."
    assert with_options("leave truncate=False", parser) == "leave truncate=False"


def test_module_and_console_script_are_the_same():
    run = subprocess.run([sys.executable, "-m", "tensorlens_tl", "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage: tensorlens-tl ")


def test_methods(capsys):
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in tlens.list_methods())
    words = " ".join(re.sub("[│┃]", " ", printed).split())
    assert "numbers of" in words


@pytest.mark.parametrize("kind", [[], ["--kind", "bridge"]])
def test_verify(capsys, kind):
    assert main(["verify", *kind]) == 0
    printed = capsys.readouterr().out
    assert "supported" in printed
    assert "blocks.3" in printed


def test_verify_on_a_local_folder(capsys):
    assert main(["verify", "--model", str(tlens.demo.MODEL_FOLDER), "Return the value"]) == 0
    assert "TransformerBridge" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--target", " the"],
        ["--collapse", "norm"],
        ["--target", " the", "--minus", " a", "--query", "2"],
        ["--top", "2"],
    ],
)
def test_attribute(capsys, options):
    assert main(["attribute", "Return the value of", *options]) == 0
    assert "score" in capsys.readouterr().out


def test_attribute_saves(tmp_path):
    page, file = tmp_path / "a.html", tmp_path / "a.safetensors"
    for path in (page, file):
        assert main(["attribute", "Return the value of", "-o", str(path)]) == 0
    assert "<!doctype html>" in page.read_text(encoding="utf-8")
    assert tlens.Attribution.load(file).method == "tensorlens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attribute", "the", "--method", "tensorlns"], "Did you mean 'tensorlens'"),
        (["attribute", "the", "--target", "two words"], "a target is one token"),
        (["verify", "--model", "no/such/folder"], "there is no 'no' in "),
        (["verify", "--model", "no--such..model"], "not a local folder, and not found on the Hugging Face Hub"),
    ],
)
def test_errors_are_printed_without_a_traceback(capsys, arguments, message):
    assert main(arguments) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed


# ------------------------------------------------------------------------------------------ the shape of the commands


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from tensorlens_tl.commands import parser; parser().format_help();"
        "print([name for name in ('torch', 'transformer_lens', 'numpy', 'pandas', 'beartype') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a text", "--model", "PLACE/model-on"], "there is no 'model-on' in PLACE. Did you mean 'model-one'?"),
        (["a text", "--model", "PLACE/elsewhere/model"], "there is no 'elsewhere' in PLACE."),
        (["a text", "--model", "PLACE/rows.csv"], "that is a file; name the folder of the model."),
        (["explore", "--tuned", "PLACE/model-on"], "--tuned PLACE/model-on: there is no 'model-on'"),
        (["a text", "--method", "rolout"], "Did you mean 'rollout'?"),
        (["report", "a text", "--methods", "alti", "rolout"], "Did you mean 'rollout'?"),
        (["evaluate", "stability", "--methods", "tensorlns in_out"], "Did you mean 'tensorlens'?"),
        (["dataset", "PLACE/rows.csv", "-o", "PLACE/run", "--method", "total_effect"], "Did you mean 'total_effects'?"),
        (["dataset", "PLACE/rows.csv", "-o", "PLACE/run", "--text", "tx"], "Did you mean 'txt'?"),
        (["compress", "--prompts", "PLACE/row.csv"], "there is no 'row.csv' in PLACE. Did you mean 'rows.csv'?"),
        (["compress", "--prompts", "PLACE"], "--prompts PLACE: that is a folder; name a file in it."),
        (["evaluate", "patching", "--pairs", "PLACE/pairs.csv"], "--pairs PLACE/pairs.csv: there is no 'pairs.csv'"),
    ],
)
def test_names_are_checked_before_anything_heavy_is_imported(words, message, tmp_path):
    (tmp_path / "model-one").mkdir()
    (tmp_path / "rows.csv").write_text("txt\nReturn the value\n", encoding="utf-8")
    words = [word.replace("PLACE", str(tmp_path)) for word in words]
    code = (
        "import sys; from tensorlens_tl.commands import main; status = main(sys.argv[1:]);"
        "print(status, [name for name in ('torch', 'transformers', 'transformer_lens') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1 []"
    assert message.replace("PLACE", str(tmp_path)) in run.stderr


def test_names_that_are_known_without_imports_are_those_that_are_registered(clean_registry):
    assert built_in_methods() == sorted(choose.built_in())
    assert not published_elsewhere()
    assert tuple(CIRCUITS) == dataset.MORE_METHODS
    labels = {label.partition(" ")[0] for label in [*STANDARD, RANDOM]}
    assert labels <= {*built_in_methods(), *evaluate.MORE_METHODS}


def test_methods_that_other_packages_publish_are_not_refused_unseen(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorlens_tl.registry")  # as before anything is imported
    args = commands.parser().parse_args(["attribute", "--method", "theirs", "a text"])
    with pytest.raises(tlens.RegistryError, match="no method called 'theirs'"):
        early.check(args)
    theirs = metadata.EntryPoint("theirs", "their_package", ENTRY_POINTS)
    monkeypatch.setattr("tensorlens_tl._method_names.entry_points", lambda group: [theirs])
    early.check(args)


def test_a_text_by_itself_is_explained(capsys):
    assert main(["If the file is not found, a FileNotFoundError is"]) == 0
    printed = capsys.readouterr().out
    assert "raised" in printed  # what the model predicts
    assert "score" in printed


def test_a_word_that_is_no_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["verfy"])
    assert "verfy" in capsys.readouterr().err


METHOD = '''
import tensorlens_tl as tlens


@tlens.register_method("pushed-norm")
def pushed_norm(frozen, *, query=-1):
    """The length of what each source token adds."""
    scores = frozen.operator().contributions(query).norm(dim=-1)
    return tlens.Attribution.of(frozen, scores, method="pushed-norm", query=query)
'''


def test_methods_of_ones_own(tmp_path, capsys, clean_registry):
    file = tmp_path / "my_methods.py"
    file.write_text(METHOD, encoding="utf-8")
    assert main(["attribute", "Return the value of", "--import", str(file), "--method", "pushed-norm"]) == 0
    assert main(["methods", "--import", str(file)]) == 0
    assert "pushed-norm" in capsys.readouterr().out
    asked = ["evaluate", "known-answer", "--model", "demo:recall", "-n", "4", "--methods", "pushed-norm", "random"]
    assert main([*asked, "--import", str(file)]) == 0
    assert "pushed-norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attribute", "the", "--import", "no_such_file.py"], "--import no_such_file.py: FileNotFoundError"),
        (["attribute", "the", "--device", "nowhere"], "--device nowhere"),
        (["attribute", "the", "-o", "no/such/folder/a.html"], "there is no folder"),
        (["evaluate", "stability", "-n", "3", "--prompts", __file__], "it counts prompts that we make"),
        (["evaluate", "stability", "--model", "demo:recall"], "has no text of its own"),
        (["evaluate", "patching", "--pairs", "nowhere.csv"], "--pairs nowhere.csv: there is no 'nowhere.csv'"),
        (["evaluate", "circuits", "--pairs", "pyproject.toml", "-n", "3"], "-n: it is about pairs that we make"),
        (["evaluate", "patching", "--pairs", "pyproject.toml", "--task", "facts"], "--task: it is about pairs"),
        (
            ["evaluate", "patching", "--task", "facts", "--change", "source"],
            "--change: the corrupted prompts of 'facts'",
        ),
        (["evaluate", "patching", "--task", "facts"], "facts: of 200 pairs of prompts"),
        (["attribute", "the", "-o", "."], "that is a folder"),
        (["attribute", "the", "--method", "unasked", "--query", "1"], "--query: 'unasked' has no such option"),
        (["attribute", "the", "--kind", "hooked", "--model", "tests"], "a folder is loaded as a TransformerBridge"),
        (["verify", "--model", "tests"], "the model in this folder cannot be loaded"),
    ],
)
def test_options_that_do_not_fit_are_told(capsys, arguments, message, clean_registry):
    tlens.register_method("unasked")(lambda frozen: tlens.attribute(frozen, method="alti"))
    assert main(arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("what", ["patching", "circuits"])
def test_pairs_are_read_from_a_file(what, tmp_path, capsys):
    path, output = tmp_path / "mine.csv", tmp_path / "result.safetensors"
    end = " is raised. If the file is not found, a File"
    texts = [f"If the {name.lower()} is not found, a {name}NotFoundError{end}" for name in ("File", "Module")]
    asked = ["evaluate", what, "--pairs", str(path), "--methods", "frozen", "-o", str(output)]
    pandas.DataFrame([[*texts, "Error", "N"]], columns=["clean", "corrupted", "target", "minus"]).to_csv(path)
    assert main(asked) == 1
    assert "mine: the model answers both prompts of none of these 1 pairs" in capsys.readouterr().err
    pandas.DataFrame([texts], columns=["clean", "corrupted"]).to_csv(path)
    assert main(asked) == 0
    model = tlens.load_demo_model()
    of = tlens.evaluate.patching_agreement if what == "patching" else tlens.evaluate.circuit_faithfulness
    expected = of(model, tlens.evaluate.text_pairs(model, [texts[0]], [texts[1]]), ["frozen"])
    assert torch.equal(tlens.load(output).values, expected.values)


def test_tasks_of_language_are_those_of_the_evaluation():
    assert tuple(tlens.evaluate.LANGUAGE_TASKS) == shared.LANGUAGE_TASKS
    assert inspect.signature(tlens.evaluate.language_task).parameters["prompts"].default == shared.LANGUAGE_PROMPTS


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "known-answer", "--prompts", "a.txt"],
        ["evaluate", "completeness", "--task", "recall"],
        ["evaluate", "relations", "--order", "ascending"],
        ["methods", "--device", "cpu"],
        ["evaluate", "stability", "-n", "0"],
    ],
    ids=" ".join,
)
def test_options_belong_to_their_command(capsys, arguments):
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().err
    assert "there is no option" in said or "no number of at least 1" in said


@pytest.mark.parametrize(
    ("option", "message"), [("--share 2", "no share above 0"), ("--share x", "'x'"), ("--neurons x", "such as 0.1")]
)
def test_parts_of_a_graph_that_are_no_number(capsys, option, message):
    with pytest.raises(SystemExit):
        main(["graph", "for x in", *option.split()])
    assert message in capsys.readouterr().err


def test_methods_with_options_of_any_name_get_them(capsys, clean_registry):
    given = {}

    def any_option(frozen, **options):
        given.update(options)
        return tlens.attribute(frozen, method="alti", query=options["query"])

    tlens.register_method("any-option")(any_option)
    assert main(["attribute", "Return the value", "--method", "any-option", "--query", "1", "--target", " the"]) == 0
    assert given["query"] == 1
    assert "target" in given


def test_a_single_word_is_a_text(capsys):
    assert main(["Return"]) == 0
    assert "the model predicts" in capsys.readouterr().out


def test_a_model_that_only_a_bridge_knows_is_tried_as_one(monkeypatch):
    from transformer_lens import model_bridge

    tried = []

    def boot(name, **options):
        tried.append(name)
        raise ValueError("offline")

    monkeypatch.setattr(model_bridge.TransformerBridge, "boot_transformers", boot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # which retries for 20 s without a network
    assert main(["verify", "--model", "somebody/a-new-model"]) == 1
    assert tried == ["somebody/a-new-model"]


def test_the_device_is_the_models(capsys):
    assert main(["attribute", "Return the value of", "--device", "cpu"]) == 0


def test_verify_without_a_tokenizer(tmp_path, capsys):
    import transformers

    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    config.architectures = ["GPT2LMHeadModel"]
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    assert "verified on random tokens" in capsys.readouterr().out
    assert main(["attribute", "a text", "--model", str(tmp_path)]) == 1
    assert "no tokenizer, or an empty one" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "format_", "first"),
    [("a.html", None, "<!doctype html>"), ("a.graphml", None, "<?xml"), ("a.json", "circuit-tracer", '{"metadata"')],
)
def test_graph_is_written(tmp_path, capsys, name, format_, first):
    asked = ["graph", "Return the value of", "--target", " the", "--neurons", "1", "--share", "0.5", "--sources", "0.5"]
    assert main([*asked, "-o", str(tmp_path / name), *(["--format", format_] if format_ else [])]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(first)
    assert "logit of ' the'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "a.html", "--format", "dot"], "--format 'dot'; use one of 'html'"),
        (["-o", "a.txt"], "ends in '.txt', which is not a supported ending. Use one of"),
        (["-o", "a.txt", "--format", "dot"], "--format 'dot'; use one of 'html'"),
        (["-o", "no/such/folder/a.html"], "there is no folder"),
        (["-o", "a.html", "--threshold", "2"], "--threshold 2.0: a share of the largest edge"),
        (["-o", "a.html", "--neurons", "1.5"], "--neurons 1.5: a whole number"),
        (["-o", "a.html", "--rule", "gimm"], "--rule 'gimm'; use one of 'attnlrp'"),
    ],
)
def test_a_graph_that_cannot_be_written_is_refused_before_the_model_is_loaded(capsys, arguments, message):
    assert main(["graph", "the", "--model", "no_such_model", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_graph_under_a_rule_is_the_functions(tmp_path):
    path = tmp_path / "a.safetensors"
    assert main(["graph", "Return the", "--target", " value", "--rule", "gim", "-o", str(path)]) == 0
    frozen = tlens.freeze(tlens.load_demo_model(), "Return the")
    expected = tlens.circuits.contribution_graph(frozen, " value", rule="gim")
    loaded = tlens.ContributionGraph.load(path)
    assert list(loaded.nodes["name"]) == list(expected.nodes["name"])
    assert loaded.nodes["weight"].values == pytest.approx(expected.nodes["weight"].values, abs=1e-4)


@pytest.mark.parametrize("arguments", [["-o", "a.html", "--share", "0"], ["-o", "a.html", "--sources", "some"]])
def test_a_graph_needs_numbers(capsys, arguments):
    with pytest.raises(SystemExit):
        main(["graph", "the", *arguments])
    assert "tensorlens-tl graph: argument --" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ help, and near misses


def examples():
    """The examples of the help of every command and every evaluation."""
    found = [commands.EXAMPLE]
    for name in commands.COMMANDS:
        found.append(importlib.import_module(f"tensorlens_tl.commands.{name.replace('-', '_')}").EXAMPLE)
    found += [f"tensorlens-tl evaluate {name} {rest}" for name, rest in evaluate.EXAMPLES.items()]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("example", examples())
@pytest.mark.few(4)
def test_examples_of_the_help_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.csv").write_text("text\nReturn the value of the\nRaise an error if the\n", encoding="utf-8")
    program, *words = shlex.split(example)
    assert program == "tensorlens-tl"
    if words[0] == "explore":  # which serves until Ctrl-C
        monkeypatch.setattr(pytest.importorskip("uvicorn").Server, "run", lambda server, sockets: sockets[0].close())
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", [[], *([name] for name in commands.COMMANDS), ["evaluate", "patching"]], ids=" ".join)
def test_help_shows_an_example_and_no_wall_of_choices(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "-h"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  tensorlens-tl {' '.join(words)}".rstrip() in shown
    usage = shown.split("\n\n")[0]
    assert len(usage) < 100
    assert not re.search(r"\{[^}]*,[^}]*,[^}]*,[^}]*\}", shown)


def test_every_evaluation_has_an_example():
    assert list(evaluate.EXAMPLES) == list(evaluate.EVALUATIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy"], "there is no 'verfy'. Did you mean 'verify'?"),
        (["evaluate", "pertubation"], "Did you mean 'perturbation'?"),
        (["report", "--modle", "demo", "a text"], "there is no option '--modle'. Did you mean '--model'?"),
        (["--foo"], "there is no option '--foo'"),
        (["--quer=1"], "the following arguments are required: text"),  # short for --query
        (["attribute", "--foo=1"], "there is no option '--foo'"),
        (["dataset", "--modle", "demo"], "Did you mean '--model'?"),
        (["--modle", "demo", "a text"], "Did you mean '--model'?"),
        (["evaluate", "stability", "--prompt=a.txt", "--sed=1"], "Did you mean '--seed'?"),
        (["report", "--methods", "alti", "a text"], "before an option that takes several values, or after --"),
        (["attribute", "two", "words"], "Put a text of several words in quotes"),
        (["evaluate", "patching", "--by", "edges"], "--by: there is no 'edges'; it is one of component, head, neuron"),
    ],
)
def test_near_misses_are_named_in_a_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert message in said[0]
    assert said[1].startswith("See tensorlens-tl")


def test_a_method_that_is_nearly_one_is_named_alone(capsys):
    assert main(["attribute", "the", "--method", "rolout"]) == 1
    said = capsys.readouterr().err
    assert said == "RegistryError: no method called 'rolout'. Did you mean 'rollout'?\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "demo", "Return the value of"],
        ["--top", "2", "Return the value of"],
        ["--top=2", "--model", "demo", "Return the value of", "--target", " the"],
        ["report", "--methods", "alti", "--", "Return the value of"],
    ],
)
def test_options_may_stand_before_the_text(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--model", "demo", "report", "a text"], ["report", "--model", "demo", "a text"]),
        (["--model=demo", "evaluate", "stability", "-n", "2"], ["evaluate", "stability", "--model=demo", "-n", "2"]),
        (["evaluate", "--seed", "1", "stability"], ["evaluate", "stability", "--seed", "1"]),
        (["--methods", "alti", "report", "--", "a text"], ["report", "--methods", "alti", "--", "a text"]),
        (["--query", "-1", "--slow", "report", "a text"], ["report", "--query", "-1", "--slow", "a text"]),
        (["--model", "report", "a text"], ["--model", "report", "a text"]),  # a folder called like a command
        (["--modle", "demo", "report"], ["--modle", "demo", "report"]),
        (["-h", "report"], ["-h", "report"]),
        (["--version"], ["--version"]),
        (["report", "--slow", "graph"], ["report", "--slow", "graph"]),
    ],
)
def test_options_may_stand_before_the_command(words, same):
    assert command_first(words, commands.parser()) == same


def test_an_option_takes_the_same_number_of_words_in_every_command():
    """Which is why it can be read before the command is known."""
    counts = {}
    for command in commands.parser().commands.values():
        for name, option in command.options.items():
            counts.setdefault(name, set()).add(option.nargs)
    assert {name: some for name, some in counts.items() if len(some) > 1} == {}


def test_a_command_behind_options_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "demo", "--threshold", "0.1", "graph", "Return the value of"]) == 0
    assert "saved to graph.html" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".png", ".parquet", ".safetensors", ".HTML"])
def test_a_graph_is_saved_as_every_kind_of_file(ending, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    path = tmp_path / f"a{ending}"
    assert main(["graph", "Return the value of", "--threshold", "0.1", "-o", str(path)]) == 0
    first = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG", ".parquet": b"PAR1", ".HTML": b"<!doctype html>"}
    assert path.read_bytes().startswith(first.get(ending, b""))
    if ending == ".safetensors":
        assert tlens.ContributionGraph.load(path).target


def test_commands_have_the_same_question_by_default(tmp_path, capsys):
    """The first choice against the second; with a target, its logit."""
    text = "If the file is not found, a FileNotFoundError is"
    graph, tokens = tmp_path / "graph", tmp_path / "tokens"
    for words, target in (([], r"logit of '.*' − '.*'"), (["--target", " raised"], "logit of ' raised'")):
        assert main(["graph", text, *words, "--threshold", "0.1", "-o", str(graph)]) == 0
        assert main(["attribute", text, *words, "-o", str(tokens)]) == 0
        drawn, listed = tlens.ContributionGraph.load(graph), tlens.Attribution.load(tokens)
        assert re.fullmatch(target, drawn.target)
        assert drawn.total == pytest.approx(float(listed.total), rel=1e-4)
    capsys.readouterr()
    for command in ("attribute", "report", "graph"):
        with pytest.raises(SystemExit):
            main([command, "-h"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "default: the model's first choice, against its second" in shown


# ------------------------------------------------------------------------------------------ prompts of a file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", 'id,prompt\n1,"Return the value, of the"\n2,Raise an error if the\n'),
        ("p.csv", '\ufefftext,label\n"Return the value, of the",a\nRaise an error if the,b\n'),
        ("p.jsonl", '{"prompt": "Return the value, of the"}\n{"prompt": "Raise an error if the"}\n'),
        ("p.txt", "Return the value, of the\n\nRaise an error if the\n"),
        ("prompts", "\ufeffReturn the value, of the\nRaise an error if the\n"),
    ],
)
def test_prompts_of_a_table_are_its_column(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_prompts(path) == ["Return the value, of the", "Raise an error if the"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", b"a,b\n1,2\n", "its columns are 'a', 'b'; call the one with the prompts 'prompt' or 'text'"),
        ("p.csv", b"prompt\n", "the file is empty"),
        ("p.csv", b"prompt\na, b\n", "has more fields than the header"),
        ("p.jsonl", b'{"text": 3}\n', "'text' of row 1 is 3, no text"),
        ("p.csv", b'id,prompt\n1,a\n2,\n3,b\n4,"  "\n', "'prompt' is empty in rows 2, 4"),
        ("p.csv", b"id,text\n1,a\n2,\n", "'text' is empty in row 2; fill it in, or take the row out"),
        ("p.jsonl", b'{"text": ""}\n' * 9, "'text' is empty in rows 1, 2, 3, 4, 5 and 4 more"),
        ("p.txt", b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("p.txt", b"\n \n", "the file is empty"),
    ],
)
def test_prompts_that_are_none_are_refused(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["evaluate", "stability", "--prompts", str(path), "--methods", "tensorlens target"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_evaluation_reads_a_table_of_prompts(tmp_path, capsys):
    path = tmp_path / "p.csv"
    path.write_text("prompt\nReturn the value of the\nRaise an error if the\n", encoding="utf-8")
    words = ["--prompts", str(path), "--methods", "tensorlens target", "-o", str(tmp_path / "a.csv")]
    assert main(["evaluate", "completeness", *words]) == 0
    saved = (tmp_path / "a.csv").read_text(encoding="utf-8")
    assert "prompt 1" in saved
    assert "prompt 2" not in saved


def perturbed(path, *words):
    """The table that a perturbation test of the prompts of a file writes."""
    table = path.with_name("result.csv")
    options = ["--methods", "tensorlens target", "relp", "--fractions", "0", "0.5", "-o", str(table)]
    assert main(["evaluate", "perturbation", "--prompts", str(path), *options, *words]) == 0
    return table.read_text(encoding="utf-8")


def test_a_table_of_prompts_says_what_is_asked(tmp_path, capsys):
    """The columns are those of the options in Python."""
    texts = ["Return the value of the", "Raise an error if the"]
    columns = tmp_path / "p.csv"
    columns.write_text(
        f"prompt,target,minus,query\n{texts[0]}, file, first,-1\n{texts[1]}, list,runner-up,-1\n",
        encoding="utf-8",
    )
    model = tlens.load_demo_model()
    expected = tlens.evaluate.perturbation(
        model, texts, ["tensorlens target", "relp"], target=[" file", " list"], minus=[" first", "runner-up"],
        fractions=(0, 0.5),
    )  # fmt: skip
    expected.save(tmp_path / "expected.csv")
    assert perturbed(columns) == (tmp_path / "expected.csv").read_text(encoding="utf-8")
    lines = tmp_path / "p.txt"
    lines.write_text("\n".join(texts), encoding="utf-8")
    assert perturbed(lines, "--target", "first-choice") == perturbed(lines)
    assert perturbed(lines, "--target", " file", "--minus", "runner-up") != perturbed(lines)
    zero = ["--replacement", "zero", "--max-new-tokens"]  # a mean would be that of the whole texts
    tables = [
        pandas.read_csv(io.StringIO(perturbed(lines, *zero, *words))) for words in (["2", "--span", "0:1"], ["1"])
    ]
    assert tables[0]["value"].to_list() == pytest.approx(tables[1]["value"].to_list(), rel=1e-4, abs=1e-6)
    assert main(["evaluate", "completeness", "--prompts", str(columns), "--methods", "tensorlens target"]) == 0
    assert "target, minus, query: not read here" in capsys.readouterr().out


def test_a_perturbation_test_averages_so_many_draws(tmp_path):
    """They are those of the option in Python, and other numbers than of the default."""
    text = "Return the value of the"
    path = tmp_path / "p.txt"
    path.write_text(text, encoding="utf-8")
    methods = ["tensorlens target", "relp"]
    expected = tlens.evaluate.perturbation(
        tlens.load_demo_model(), [text], methods, fractions=(0, 0.5), replacement="resampled", draws=1
    )
    expected.save(tmp_path / "expected.csv")
    drawn = perturbed(path, "--replacement", "resampled", "--draws", "1")
    assert drawn == (tmp_path / "expected.csv").read_text(encoding="utf-8")
    assert perturbed(path) != drawn


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ("prompt,target\nReturn the, file\nRaise an,\n", [], "prompt 1 has no 'target'"),
        ("prompt,target\nReturn the, file\n", ["--target", " a"], "has a column 'target' as well"),
        ("prompt,query\nReturn the,0\nRaise an,1\n", [], "2 different values"),
        ("prompt\nReturn the value\n", ["--span", "0:1"], "max_new_tokens"),
    ],
)
def test_tables_that_ask_nothing_clear_are_refused(rows, words, message, tmp_path, capsys):
    path = tmp_path / "p.csv"
    path.write_text(rows, encoding="utf-8")
    assert main(["evaluate", "perturbation", "--prompts", str(path), "--methods", "relp", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_data_set_has_targets_and_what_they_are_held_against(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("text,answer,other\nReturn the value of the, file, first\n", encoding="utf-8")
    named = ["--target", " file", "--minus", " first"]
    columns = ["--target-column", "answer", "--minus-column", "other"]
    totals = []
    for number, words in enumerate((named, columns)):
        folder = tmp_path / str(number)
        assert main(["dataset", str(path), "-o", str(folder), *words]) == 0
        totals.append(float(tlens.load_results(folder)["0"].total))
    expected = tlens.attribute(tlens.load_demo_model(), "Return the value of the", " file", minus=" first").total
    assert totals == [pytest.approx(float(expected))] * 2


@pytest.mark.parametrize(
    ("format_", "name"), [(None, "graph.html"), ("graphml", "graph.graphml"), ("csv", "graph.csv")]
)
def test_a_graph_has_a_default_output(format_, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["graph", "Return the value of", *(["--format", format_] if format_ else [])]) == 0
    assert (tmp_path / name).stat().st_size
    assert f"saved to {name}" in capsys.readouterr().out
