"""The pictures of README.md: ``python -m scripts.picture``, where Chromium is installed.

They are the explorer with a node of the graph picked, and the first screen of a report, of one prediction of the
bundled model, on a light ground.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlencode

import tensorlens_tl as tlens

FOLDER = Path(__file__).parent.parent / "docs" / "_static"
SIZES = {"report": (1280, 900), "explorer": (1280, 1330)}
NODE = {"layer": 3, "head": 1, "pick": "L3H1@34", "at": 34}


def main() -> None:
    """Open the explorer, write the report, and take a picture of either."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    model = tlens.load_demo_model()
    explorer = tlens.explore(model, name="bundled model")
    with tempfile.TemporaryDirectory() as folder:
        page = tlens.report.explain(model, tlens.demo.PROMPT).save(Path(folder) / "report.html")
        state = urlencode({"text": tlens.demo.PROMPT, **NODE})
        for name, address in {"report": page.as_uri(), "explorer": f"{explorer.url}#{state}"}.items():
            width, height = SIZES[name]
            path = FOLDER / f"{name}.png"
            flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
            flags += [f"--window-size={width},{height}", f"--user-data-dir={folder}/{name}", f"--screenshot={path}"]
            subprocess.run([chromium, *flags, address], check=True, capture_output=True)
            _fewer_colours(path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    explorer.close()


def _fewer_colours(path: Path) -> None:
    """Text and flat colours need no more than a palette, which is a third of the size."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
