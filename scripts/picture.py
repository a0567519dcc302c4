"""The picture of a report that README.md shows: ``python -m scripts.picture``, where Chromium is installed.

It is the first screen of the report of one prediction of the embedded model, on a light ground.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import tensorlens_tl as tlens

PICTURE = Path(__file__).parent.parent / "docs" / "_static" / "report.png"
SIZE = (1280, 900)


def main() -> None:
    """Write the report, and a picture of its first screen."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    width, height = SIZE
    with tempfile.TemporaryDirectory() as folder:
        page = tlens.report.explain(tlens.load_demo_model(), tlens.demo.PROMPT).save(Path(folder) / "report.html")
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
        command = [chromium, *flags, f"--user-data-dir={folder}/profile", f"--screenshot={PICTURE}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    _fewer_colours(PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


def _fewer_colours(path: Path) -> None:
    """Text and flat colours need no more than a palette, which is a third of the size."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
