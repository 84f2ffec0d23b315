"""Takes the picture of the page in the docs: a real conversation on a running server, in Chromium.

    thinfer serve MODEL &
    python scripts/page_picture.py http://127.0.0.1:8737 docs/figures/page.png

Needs playwright, Pillow, and a Chromium on the path or in THINFER_CHROMIUM.
"""

import io
import json
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 800
COLOURS = 128
SECONDS = 5  # into the last answer
QUESTIONS = ("Hello! Who are you?", "How do I make a good cup of tea?")
SETTINGS = {"temperature": "0.3", "seed": "1"}


def picture(url: str) -> bytes:
    """PNG of the page some seconds into the last answer."""
    path = os.environ.get("THINFER_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.add_init_script(f"localStorage.setItem('thinfer.settings', JSON.stringify({json.dumps(SETTINGS)}))")
        page.goto(url)
        page.wait_for_selector("#model-name:not(:text('connecting…'))")
        for question in QUESTIONS:
            page.fill("#draft", question)
            page.press("#draft", "Enter")
            page.wait_for_selector("#stop:not([hidden])")
            if question == QUESTIONS[-1]:
                page.wait_for_timeout(SECONDS * 1000)
                break
            page.wait_for_selector("#stop", state="hidden")
        shot = page.screenshot()
        browser.close()
    return shot


def main() -> None:
    """Write the picture, with a palette: it is flat colours and text."""
    url, target = sys.argv[1:]
    image = Image.open(io.BytesIO(picture(url))).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(Path(target), optimize=True)


if __name__ == "__main__":
    main()
