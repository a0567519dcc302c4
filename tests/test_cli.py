"""The command line, as a user types it."""

import subprocess
import sys

import pytest

import tensorlens_tl as tlens
from tensorlens_tl.commands import main


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


def test_module_and_console_script_are_the_same():
    run = subprocess.run([sys.executable, "-m", "tensorlens_tl", "methods"], capture_output=True, text=True, check=True)
    assert "tensorlens" in run.stdout


def test_methods(capsys):
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in tlens.list_methods())


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
        (["attribute", ""], "empty"),
        (["verify", "--model", "no/such/folder"], "no such folder, and the hub gives no model"),
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
        "print([name for name in ('torch', 'transformer_lens', 'numpy', 'pandas') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


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
        (["evaluate", "stability", "-n", "3", "--prompts", "some.txt"], "it counts prompts that we make"),
        (["evaluate", "stability", "--model", "demo:recall"], "has no text of its own"),
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
    assert "unrecognized arguments" in said or "no number of at least 1" in said


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
    asked = ["graph", "Return the value of", "--target", " the", "--neurons", "1", "--keep", "0.5", "--sources", "0.5"]
    assert main([*asked, "-o", str(tmp_path / name), *(["--format", format_] if format_ else [])]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(first)
    assert "logit of ' the'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "a.html", "--format", "dot"], "format='dot': there is no such format"),
        (["-o", "a.txt"], "does not end in .html, .json"),
        (["-o", "no/such/folder/a.html"], "there is no folder"),
        (["-o", "a.html", "--threshold", "2"], "threshold=2.0: a share of the largest edge"),
        (["-o", "a.html", "--neurons", "1.5"], "neurons=1.5: a whole number"),
    ],
)
def test_a_graph_that_cannot_be_written_is_refused_before_the_model_is_loaded(capsys, arguments, message):
    assert main(["graph", "the", "--model", "no/such/folder", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", [[], ["-o", "a.html", "--keep", "0"], ["-o", "a.html", "--sources", "some"]])
def test_a_graph_needs_an_output_and_numbers(capsys, arguments):
    with pytest.raises(SystemExit):
        main(["graph", "the", *arguments])
    assert "usage" in capsys.readouterr().err
