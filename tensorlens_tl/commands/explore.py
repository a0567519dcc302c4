"""``tensorlens-tl explore``: a local page for prompts, tokens, heads and two runs."""

import argparse

from tensorlens_tl.commands.options import add_model_arguments, loaded_model

HELP = "Open a local page: type a prompt, click, and see exact sums. Ctrl-C ends it."
EXAMPLE = "tensorlens-tl explore --model demo --features demo"
IMAGES = 20
"""Handwritten digits that the page of the bundled image model offers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--tuned", help="a second model of the same architecture, to compare with: named as for --model"
    )
    parser.add_argument(
        "--features",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a sparse autoencoder of the model, whose features the page shows: a folder as SAELens' save_model writes "
        "it, or demo (may be given again)",
    )
    parser.add_argument(
        "--labels",
        action="append",
        default=[],
        metavar="FILE",
        help="what its features are called: a CSV or JSON file, one for each --features in their order; - for none",
    )
    parser.add_argument("--port", type=int, default=0, help="where it listens, on this machine only (default: any)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    import webbrowser

    from tensorlens_tl.commands.dictionaries import named_dictionary, named_labels
    from tensorlens_tl.demo import digit_images
    from tensorlens_tl.explorer import Explorer, Session, check_installed

    check_installed()
    labels = named_labels(args.labels, len(args.features))
    model = loaded_model(args, images=True)
    dictionaries = [named_dictionary(of, model) for of in args.features]
    tuned = None if args.tuned is None else loaded_model(args, args.tuned)
    name = args.model if args.tuned is None else f"{args.model} and {args.tuned}"
    images = None
    if args.model == "demo:digits":
        images = digit_images()[0][:IMAGES]
    session = Session(model, tuned, name=name, images=images, dictionaries=dictionaries, labels=labels)
    page = Explorer(session, args.port)
    print(f"Explorer of {name}: {page.url}\nCtrl-C ends it.", flush=True)
    if args.open:
        webbrowser.open(page.url)
    page.run()
