"""The picture of the explorer on the site: ``python -m scripts.picture``, where Chromium is installed.

It is the first screen on SmolLM2 with the pair of prompts that README.md begins with, on a light ground.
"""

import shutil
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
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
    driver = shutil.which("chromedriver")
    if driver is None:
        raise SystemExit("no Chromium here: apt-get install chromium chromium-driver")
    model = TransformerBridge.boot_transformers(str(fetch("smollm2")))
    explorer = tlens.explore(model, name="SmolLM2 135M")
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        size = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(f"{explorer.url}#{urlencode(PAIR)}")
        status = browser.find_element(By.ID, "status")
        WebDriverWait(browser, 120).until(lambda _: status.text.startswith("Answered"))
        browser.execute_script("arguments[0].textContent = ''", status)  # the time is this machine's
        browser.save_screenshot(PATH)
    explorer.close()
    # text and flat colours need no more than a palette, which is a third of the size
    Image.open(PATH).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(PATH, optimize=True)
    print(f"{PATH}: {PATH.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
