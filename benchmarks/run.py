"""Measure, and write `RESULTS.md`: every figure is a ratio within one run.

The machines are noisy, so candidates take turns and the shortest time counts. If a run's plain forward pass is below 40 %
of the speed of a matrix product in the same run, the run is repeated once; if it is slow again, its row is discarded.
"Forward" is a forward pass through the blocks of the plain model, without hooks.

    make bench                                # all sections, about an hour on two cores
    python benchmarks/run.py costs probes     # some of them; the others stay as they are
    python benchmarks/run.py --print probes   # printed and not written

Each section is written as soon as it is measured, so that a run that is stopped loses one at most. Those beside other
libraries are measured where these are installed; `INSEQ_PYTHON` names an interpreter that has inseq.
"""

import os
import platform
import sys
from importlib.metadata import version
from subprocess import run

import sentences
import torch
from data_sets import data_sets
from depth import depths
from difference import differences
from everything_included import everything_included
from explorer import explorer
from hops import flashtrace, generated, routes
from live import live_changes
from norms import bounded, jacobians, norm_slice, probes, profile
from offloaded import offloaded
from page import Lines, heading, measured, row, table, write
from passes import batches, batches_of_prompts, costs, experts, growth, long_prompts
from peers import peers
from questions import clicks, composition, graphs, methods, perturbing, rules
from recursions import scans, selective, whitened
from sizes import sizes
from timing import interleaved


def imports() -> Lines:
    """## Import time, in imports of TransformerLens

    Each time is the minimum over five fresh interpreters. The first result freezes and explains one sentence on the
    bundled model, after both imports.
    """
    first = "tlens.attribute(tlens.freeze(tlens.load_demo_model(), 'Return the value of the'))"
    code = {
        "import transformer_lens": "import transformer_lens",
        "import tensorlens_tl": "import tensorlens_tl",
        "import tensorlens_tl, and a first result": f"import tensorlens_tl as tlens; {first}",
    }
    seconds = interleaved(
        {name: lambda text=text: run([sys.executable, "-c", text], check=True) for name, text in code.items()}, 5
    )
    yield table("what", "seconds", "imports of TransformerLens")
    for name in code:
        yield row(name, seconds[name], seconds[name] / seconds["import transformer_lens"])


SECTIONS = (
    sizes,
    imports,
    costs,
    batches_of_prompts,
    batches,
    experts,
    growth,
    long_prompts,
    offloaded,
    norm_slice,
    jacobians,
    probes,
    bounded,
    profile,
    methods,
    perturbing,
    rules,
    composition,
    graphs,
    clicks,
    scans,
    selective,
    whitened,
    everything_included,
    generated,
    flashtrace,
    routes,
    live_changes,
    differences,
    depths,
    data_sets,
    peers,
    explorer,
)


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--print"]
    unknown = {*names} - {section.__name__ for section in SECTIONS}
    if unknown:
        sys.exit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(one.__name__ for one in SECTIONS)}")
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores · Python {platform.python_version()} · torch "
        f"{torch.__version__} · transformer-lens {version('transformer-lens')} · float32"
    )
    about = " ".join((__doc__ or "").split("\n\n")[1].split())
    head = f"# Results\n\nWritten by `make bench`. {about}\n\n{machine}"
    for section in SECTIONS:
        if names and section.__name__ not in names:
            continue
        text = measured(section)
        if "--print" not in sys.argv[1:]:
            write(head, {heading(section): text}, [heading(one) for one in SECTIONS])
            sentences.main()


if __name__ == "__main__":
    main()
