"""Draw the pictures of the pages in a headless browser: ``python docs/pictures/render.py``."""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))

from _browser import Watched, browser_or_skip  # noqa: E402 (the folder above)

import partita  # noqa: E402 (likewise)
from partita.documents import save  # noqa: E402 (likewise)

WIDTH, HEIGHT = 1180, 1010
COLOURS = 64
"""Colours of a picture: enough for bars and text, and a fourth of the size."""


def main() -> None:
    """Write report.png, the first screen of a plan's report."""
    found = partita.plan(
        "gpt-small", cluster="1x4xa100+1x2xv100", planner="uniform", microbatches=16
    )
    with tempfile.TemporaryDirectory() as folder, browser_or_skip() as browser:
        plan, report = Path(folder) / "gpt-small.plan.json", Path(folder) / "report.html"
        save(found.solution, plan)
        partita.write_report(str(plan), output=str(report))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        Watched(page, "file://").open(f"file://{report}")
        page.evaluate("document.querySelector('.command').remove()")  # a path of this machine
        data = page.screenshot()
    _save(data, "report.png")
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
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
            )
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
