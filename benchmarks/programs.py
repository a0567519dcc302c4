"""Every method on models built from programs, whose truth is known: a section of benchmarks/EVALUATION.md.

``make evaluation`` writes the section with the whole page; ``python benchmarks/programs.py`` writes this section alone,
in about a minute. Methods that are registered but not among `evaluate.STANDARD` run with their defaults.
"""

import sys
import time
from collections import Counter
from pathlib import Path

import torch

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.evaluate.known import ranking
from tensorlens_tl.evaluate.scorers import Scorer, scorers_of

PAGE = Path(__file__).parent / "EVALUATION.md"
HEADING = "## Models built from programs"
PROMPTS, PAIRS = 12, 8
IN_PLACE_OF = ("own position", "first token", "another token")


def every_method() -> dict[str, object]:
    """The standard methods, and every other one that is registered; integrated gradients as on the whole page."""
    methods: dict[str, object] = {label: label for label in evaluate.STANDARD}
    methods["integrated-gradients"] = ("integrated-gradients", {"target": evaluate.PREDICTED, "steps": 8})
    covered = {name for name, _ in evaluate.STANDARD.values()}
    covered |= {options.get("layer_map", "").partition(":")[0] for _, options in evaluate.STANDARD.values()}
    for name in tlens.list_methods():
        if name not in covered:
            asks = "target" in tlens.get_method(name).options
            methods[name] = (name, {"target": evaluate.PREDICTED} if asks else {})
    return methods | {"random": "random"}


def fitting(scorers: list[Scorer], frozen: tlens.FrozenPass) -> list[Scorer]:
    """Those that this model allows."""
    kept = []
    for scorer in scorers:
        try:
            scorer(frozen)
            kept.append(scorer)
        except tlens.TensorLensError:
            continue
    return kept


def tokens_table() -> list[str]:
    """Mean reciprocal ranks by program, over all queries; and which token is first where no true source is."""
    scorers = scorers_of(every_method())
    ranks: dict[tuple[str, str, bool], list[float]] = {}
    shares: dict[str, list[float]] = {}
    instead: dict[str, Counter[str]] = {scorer.label: Counter() for scorer in scorers}
    generator = torch.Generator().manual_seed(0)
    for name in demo.PROGRAMS:
        program = demo.program(name)
        for norm in (False, True):
            model = program.model(norm=norm)
            usable: list[Scorer] | None = None
            for query in program.queries:
                task = program.answers(PROMPTS, seed=21, query=query)
                frozen = tlens.freeze(model, task.tokens)
                usable = fitting(scorers, frozen) if usable is None else usable
                for scorer in usable:
                    ties = torch.rand(task.sources.shape, generator=generator, dtype=torch.float64)
                    scores = scorer(frozen)
                    made, _, mass = ranking(scores, task.sources, ties)
                    shares.setdefault(scorer.label, []).extend(mass.tolist())
                    ranks.setdefault((scorer.label, name, norm), []).extend(made.tolist())
                    best = (scores + ties * 1e-12 * scores.abs().amax(1, keepdim=True)).argmax(1)[made < 1]
                    for place in best.tolist():
                        where = 0 if place == query else 1 if place == 0 else 2
                        instead[scorer.label][IN_PLACE_OF[where]] += 1
    lines = [f"| method | {' | '.join(demo.PROGRAMS)} | mass | first in place of a source |", "| --- |" + " --- |" * 9]
    means = {key: sum(values) / len(values) for key, values in ranks.items()}
    whole = {
        scorer.label: [value for (label, _, _), value in means.items() if label == scorer.label] for scorer in scorers
    }
    left_out = [label for label, values in whole.items() if not values]
    shown = [label for label, values in whole.items() if values]
    for label in sorted(shown, key=lambda label: -sum(whole[label]) / len(whole[label])):
        cells = [_both(*(means.get((label, name, norm)) for norm in (False, True))) for name in demo.PROGRAMS]
        wrong = instead[label].total()
        said = ", ".join(f"{what} {count / wrong:.0%}" for what, count in instead[label].most_common()) if wrong else ""
        mass = sum(shares[label]) / len(shares[label])
        lines.append(f"| {label} | {' | '.join(cells)} | {mass:.2f} | {said or '–'} |")
    return lines + ([f"\nLeft out, undefined on all of them: {', '.join(left_out)}."] if left_out else [])


def components_table(change: str) -> list[str]:
    """AUROC and recall of nodes and edges by program, with and without norms together."""
    names = [name for name in demo.PROGRAMS if change in demo.program(name).changes]
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name in names:
        program = demo.program(name)
        task = program.components(PAIRS, seed=22, change=change)
        for norm in (False, True):
            result = evaluate.known_components(program.model(norm=norm, dtype=torch.float64), task)
            for method, values in zip(result.methods, result.values.unbind(1), strict=True):
                found.setdefault((method, name), []).append(values)
    metrics = list(result.metrics)
    lines = [f"| method | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for method in dict.fromkeys(method for method, _ in found):
        cells = []
        for name in names:
            mean = dict(zip(metrics, torch.cat(found[method, name], dim=-1).nanmean(-1).tolist(), strict=True))
            parts = [f"{mean[f'{what} auroc']:.2f} ({mean[f'{what} recall']:.2f})" for what in ("node", "edge")]
            cells.append("; ".join(part for part in parts if "nan" not in part))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def attention_table() -> list[str]:
    """Reciprocal ranks of the true sources of queries and keys, with and without norms together."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in demo.PROGRAMS:
        program = demo.program(name)
        task = program.attention(PROMPTS, seed=23)
        for norm in (False, True):
            result = evaluate.known_attention(program.model(norm=norm, dtype=torch.float64), task)
            for method, values in zip(result.methods, result.values.unbind(1), strict=True):
                found.setdefault("all, random" if method == "random" else name, []).append(values)
    means = {name: torch.cat(values, dim=-1).mean(-1).tolist() for name, values in found.items()}
    means["all, random"] = means.pop("all, random")  # below the others
    lines = [f"| program | {' | '.join(result.metrics)} |", "| --- |" + " --- |" * len(result.metrics)]
    return lines + [f"| {name} | {' | '.join(f'{v:.2f}' for v in values)} |" for name, values in means.items()]


def _both(plain: float | None, norm: float | None) -> str:
    """Without norms / with them; one number where they are alike, a dash where there is none."""
    cells = ["–" if value is None or value != value else f"{value:.2f}" for value in (plain, norm)]
    return cells[0] if cells[0] == cells[1] else " / ".join(cells)


def sections() -> list[str]:
    """The whole section, by lines."""
    lines = [
        HEADING,
        "",
        "Hand-constructed weights (`tensorlens_tl.demo.programs`), without norms and with LayerNorms, so that the truth about every answer is known.",
        "",
        "### Programs: source tokens",
        "",
        f"Mean reciprocal rank of the best-placed true source, {PROMPTS} prompts at each of a program's queries: without norms / with them, where these differ. Then the "
        "mean share of the absolute scores that lies on true sources, and which token is first where no true source is.",
        "",
        *tokens_table(),
        "",
    ]
    titles = {
        "source": "another token stands where the answer is read",
        "choice": "heads attend elsewhere in the corrupted prompt",
    }
    for change, title in titles.items():
        lines += [
            f"### Programs: components, {title}",
            "",
            f"AUROC and, in brackets, recall of true nodes; the same of true edges. {PAIRS} pairs of prompts, without norms and with them. `logit_attribution` and "
            "`contribution_graph` explain the clean prompt alone.",
            "",
            *components_table(change),
            "",
        ]
    lines += [
        "### Programs: what chose the attention",
        "",
        f"Mean reciprocal rank, by `qk_attribution`, of the best-placed true source of queries, of keys, and of pairs of them: every head on the way in {PROMPTS} "
        "prompts, without norms and with them.",
        "",
        *attention_table(),
        "",
    ]
    return lines


def main() -> None:
    """Write the section into the page, in place of the one that is there."""
    started, text = time.time(), PAGE.read_text(encoding="utf-8")
    before, _, after = text.partition(f"{HEADING}\n")
    following = after[after.index("\n## ") + 1 :] if "\n## " in after else ""
    if not after:  # not there yet: after the tasks with known answers
        place = text.index("## Relation decoding")
        before, following = text[:place], text[place:]
    PAGE.write_text(before + "\n".join([*sections(), following]), encoding="utf-8")
    print(f"{HEADING}: {time.time() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
