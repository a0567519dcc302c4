"""``tensorlens-tl compress``: what does compressing attention cost?"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError, TensorLensError

HELP = "Compress a model's attention, and measure the cost on held-out prompts."
EXAMPLE = "tensorlens-tl compress --methods circuit-svd --ratio 2 -n 4"
METHODS = ("tucker", "laser", "head-svd", "circuit-svd")
TUCKER = ("rule", "layout", "gauge", "balance", "sweeps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)} (default: all that fit the model)",
    )
    parser.add_argument("--ratio", nargs="+", type=float, default=[2.0, 4.0], help="compression ratios (default: 2 4)")
    parser.add_argument("--layers", nargs="+", type=int, help="(default: all)")
    parser.add_argument("--matrices", help="which of Q, K, V, O, such as VO (default: QKVO)")
    parser.add_argument(
        "--mlp", type=float, metavar="RHO", help="also compress MLPs by LASER, keeping this share of their ranks"
    )
    tucker = parser.add_argument_group("tucker only")
    tucker.add_argument("--rule", choices=("free", "paper"), help="which ranks are considered (default: free)")
    tucker.add_argument(
        "--layout",
        choices=("paper", "released"),
        help="split the heads (paper), or d_model (default: paper)",
    )
    tucker.add_argument("--gauge", choices=("circuit",), help="first move each head into the basis of its own circuits")
    tucker.add_argument(
        "--balance", action="store_true", default=None, help="first scale Q, K, V and O to the same norm"
    )
    tucker.add_argument("--sweeps", type=int, help="HOOI sweeps after the truncation (default: 0)")
    parser.add_argument("--task", choices=shared.TASKS, help="measure on a task with known answers")
    parser.add_argument("--prompts", type=Path, help=f"measure on {shared.PROMPTS_HELP} (default: held-out text)")
    parser.add_argument("-n", type=shared.count, help=f"number of generated prompts (default: {shared.PROMPTS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the plan of one method and one ratio")
    parser.add_argument("-o", "--output", type=Path, help=f"save; {shared.ENDINGS}")


def run(args: argparse.Namespace) -> None:
    """Compress, measure, print the tables, and save where asked."""
    from tensorlens_tl import compress, evaluate

    shared.check_result_output(args.output)
    shared.check_output(args.save, "--save")
    methods = args.methods or list(METHODS)
    if args.save is not None and (args.save.suffix == ".html" or len(methods) > 1 or len(args.ratio) > 1):
        raise InvalidInputError("--save: a file holds one plan (no page); pass one of --methods and one --ratio.")
    tucker_options = shared.given(**{name: getattr(args, name) for name in TUCKER})
    if tucker_options and "tucker" not in methods:
        raise InvalidInputError(f"--{next(iter(tucker_options))}: it is for tucker, which is not among --methods.")
    if args.task is not None and args.prompts is not None:
        raise InvalidInputError(
            "--task: with --prompts the lines of the file are what is measured on; pass one of them."
        )
    shared.check_prompts(args)
    model = shared.loaded_model(args)
    task = _task(args, model)
    options_of = dict.fromkeys(methods, shared.given(mlp=args.mlp, matrices=args.matrices or None))
    options_of["tucker"] = options_of.get("tucker", {}) | tucker_options
    ratios = sorted(set(args.ratio))
    plans: dict[str, dict[float, Any]] = {}
    for method in methods:  # all of them before anything is measured
        plan = partial(compress.plan, model, args.layers, method=method, **options_of[method])
        try:
            plans[method] = {ratio: plan(ratio=ratio) for ratio in ratios}
        except TensorLensError as error:
            if args.methods or (method == methods[-1] and not plans):
                raise
            print(f"{method} is left out: {error}")
    if args.save is not None:
        plan = plans[methods[0]][ratios[0]]
        print(f"{plan}: saved to {plan.save(args.save)}")
    result = evaluate.compression(model, task, plans, seed=args.seed)
    settings = result.settings
    print(
        f"{settings['model']}, uncompressed: loss {settings['base_loss']:.4g}, accuracy "
        f"{settings['base_accuracy']:.4g}, on {settings['prompts']} prompts ({settings['task']})"
    )
    for metric in ("added loss", "accuracy change"):
        print(f"\n{metric} by compression ratio, with 95 % intervals")
        print(evaluate.compression_table(result, metric).drop(index="uncompressed").round(4).to_string())
    ratios_reached = {
        method: ", ".join(f"{plan.ratio:.3g}" for plan in method_plans.values())
        for method, method_plans in plans.items()
    }
    print("\nratios reached: " + "; ".join(f"{method} {text}" for method, text in ratios_reached.items()))
    shared.write_result(result, args.output)


def _task(args: argparse.Namespace, model: Any) -> Any:
    if args.prompts is None and (args.task is not None or args.model in ("demo:recall", "demo:brackets")):
        return shared.task_of(args, model)
    return shared.prompts_of(args, model)
