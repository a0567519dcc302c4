"""The picture of the explorer on the site: ``python -m scripts.picture``, where Chromium is installed.

It is the first screen on SmolLM2 with the pair of prompts that README.md begins with, on a light ground.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from transformer_lens.model_bridge import TransformerBridge

import tensorlens_tl as tlens
from scripts.real_models import fetch

PATH = Path(__file__).parent.parent / "docs" / "_static" / "explorer.png"
SIZE = (1280, 900)
PAIR = {
    "text": "When Mary and John went to the store, John gave a drink to",
    "other": "When Mary and John went to the store, Mary gave a drink to",
}


def main() -> None:
    """Open the explorer and take a picture of it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    model = TransformerBridge.boot_transformers(str(fetch("smollm2")))
    explorer = tlens.explore(model, name="SmolLM2 135M")
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=60000"]
        flags += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--user-data-dir={folder}", f"--screenshot={PATH}"]
        subprocess.run([chromium, *flags, f"{explorer.url}#{urlencode(PAIR)}"], check=True, capture_output=True)
    explorer.close()
    # text and flat colours need no more than a palette, which is a third of the size
    Image.open(PATH).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(PATH, optimize=True)
    print(f"{PATH}: {PATH.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
