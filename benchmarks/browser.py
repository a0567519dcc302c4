"""A browser without a window, and what is timed in it."""

import os
import shutil
from typing import Any

TIMED = """const done = arguments[1], start = performance.now(); act(arguments[0]); const own = performance.now() - start;
requestAnimationFrame(() => requestAnimationFrame(() => done([own, performance.now() - start])));"""
CLICK = f"""const act = at => document.querySelectorAll('.circuit .t')[at].dispatchEvent(new MouseEvent('click', {{bubbles: true}}));
{TIMED}"""
SLIDE = f"""const act = value => {{ const slider = document.querySelector('.least'); slider.value = value;
slider.dispatchEvent(new Event('input', {{bubbles: true}})) }};
{TIMED}"""


def chromium() -> Any:
    """A browser without a window."""
    from selenium import webdriver

    options, found = webdriver.ChromeOptions(), map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    options.binary_location = next(filter(None, found))
    for argument in ("--headless=new", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
