"""Draw the pictures of the pages in a headless browser: ``python docs/pictures/render.py``."""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))

from _browser import Watched, browser_or_skip  # noqa: E402 (the folder above)

import partita  # noqa: E402 (likewise)
from partita.documents import save  # noqa: E402 (likewise)

WIDTH = 1180
COLOURS = 96
"""Colours of a picture: enough for bars and text, and a third of the size."""


def draw(
    browser: Any,  # noqa: ANN401 (playwright's, which need not be there)
    document: object,
    name: str,
    *,
    height: int,
    point: int = 0,
) -> None:
    """Write the first screen of a document's report; of a frontier its curve at a point."""
    with tempfile.TemporaryDirectory() as folder:
        saved, report = Path(folder) / "document.json", Path(folder) / "report.html"
        save(document, saved)
        partita.write_report(str(saved), output=str(report))
        page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
        Watched(page, "file://").open(f"file://{report}")
        page.evaluate("document.querySelector('.command').remove()")  # a path of this machine
        for _ in range(point):
            page.locator("input[type=range]").press("ArrowRight")
        page.evaluate("window.scrollTo(0, 0); document.activeElement.blur()")
        shown = page.locator(".section").first if point else page
        data = shown.screenshot()
        page.close()
    _save(data, f"{name}.png")


def main() -> None:
    """Write report.png, of a plan over two types of GPUs, and frontier.png, of a pipeline."""
    mixed = partita.plan(
        "gpt-small", cluster="1x4xa100+1x2xv100", planner="uniform", microbatches=16
    )
    equal = partita.plan("gpt-small", cluster="4xa100", planner="uniform", microbatches=12)
    frontier = partita.frontier(equal.solution, points=12).frontier
    with browser_or_skip() as browser:
        draw(browser, mixed.solution, "report", height=1040)
        draw(browser, frontier, "frontier", height=900, point=4)
    _page()


def _page() -> None:
    """Write ui.png, a plan on the page whose boundary was moved."""
    command = [sys.executable, "-m", "partita", "ui", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = "".join(iter(server.stdout.readline, "}\n")) + "}"
    asked = "model=gpt-small&cluster=1x4xa100%2B1x2xv100&planner=uniform&microbatches=16"
    try:
        with browser_or_skip() as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": 1010}, color_scheme="light")
            address = json.loads(said)
            Watched(page, address["url"]).open(address["link"])
            page.goto(f"{address['url']}/ui/plan?{asked}&edits=cut:3%3D112")
            page.wait_for_selector("html[data-ready=plan]", state="attached", timeout=120_000)
            page.wait_for_timeout(1000)
            _save(page.screenshot(), "ui.png")
    finally:
        server.terminate()
        server.wait()


def _save(data: bytes, name: str) -> None:
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(COLOURS)
    picture.save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
