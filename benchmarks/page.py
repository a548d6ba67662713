"""Reports in headless Chromium: size of the file, time to the picture, frames, script per redraw.

Medians of five. *Ready* is from navigation to two frames after the first whole picture; frames are
counted while the wheel zooms and while a drag pans; a redraw is the script of one whole view. The
edit of a plan (a boundary dragged by an op, at 64 microbatches) is what the page's server does for
it: lower, simulate, figures, JSON; as CPU time of this process. There is no GPU here, so that all
is drawn in software.
"""

import dataclasses
import json
import statistics
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from _browser import Watched, browser_or_skip
from _harness import Measured, cpu_s, run_benchmark

import partita
from partita.core.codec import write_json
from partita.core.solution import Solution
from partita.flows.edits import cuts_of
from partita.flows.report import save_page
from partita.report.figures import Track, memory_figure, timeline_figure
from partita.report.page import MODULES, STYLES, Page, Section, static_text
from partita.service.ui.editing import Editor
from partita.service.ui.held import DocumentStore
from partita.service.ui.router import OWN_MODULES

REPEATS = 5
FRAMES_S = 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    """A report of a size, and what it must reach."""

    name: str
    cluster: str
    microbatches: int
    perturb: float
    most_bytes: float
    most_ready_s: float
    least_fps: float


SIZES = (
    Size("12k", "2x4xa100", 263, 0.0, 300e3, 0.6, 45.0),
    Size("200k", "14xa100", 3650, 0.1, 2e6, 2.5, 30.0),
)
MOST_REDRAW_MS = 25.0
MOST_EDIT_S = 0.2
LEAST_EDIT_ROWS = 10_000
MOST_STATIC_BYTES = 200_000


def planned(size: Size) -> Solution:
    """Return a zero-bubble pipeline of about the size."""
    found = partita.plan(
        "gpt-small",
        cluster=size.cluster,
        planner="uniform",
        microbatches=size.microbatches,
        schedule="zero-bubble",
    )
    return found.solution


def write(solution: Solution, size: Size, path: Path) -> int:
    """Write the report of a step, irregular where the size says so; return its instructions."""
    timeline = partita.simulate(solution, perturb=size.perturb).timeline
    cluster = solution.problem.cluster
    figures = [
        timeline_figure([Track(name="predicted", timeline=timeline)], cluster=cluster),
        memory_figure(timeline, cluster=cluster),
    ]
    title = f"{solution.problem.graph.name}, {len(timeline):,} instructions"
    save_page(Page(title=title, sections=[Section(figures=figures)]), str(path))
    return len(timeline)


_FRAMES = """(seconds) => new Promise((resolve) => {
  let frames = 0;
  const began = performance.now();
  const count = () => {
    frames += 1;
    const spent = (performance.now() - began) / 1000;
    if (spent < seconds) requestAnimationFrame(count);
    else resolve(frames / spent);
  };
  requestAnimationFrame(count);
})"""


def frames(page: Any, move: Any) -> float:
    """Return the frames per second that the page reaches while something moves."""
    page.evaluate(
        f"(seconds) => {{ window.frames_ = ({_FRAMES})(seconds); return null; }}", FRAMES_S
    )
    for turn in range(40):
        move(turn)
        page.wait_for_timeout(FRAMES_S * 1000 / 50)
    return float(page.evaluate("() => window.frames_"))


def look(browser: Any, path: Path) -> dict[str, float]:
    """Open a report once, zoom, pan and redraw it."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    watched = Watched(page, f"file://{path}")
    watched.open(f"file://{path}")
    ready_ms = page.evaluate(
        "() => performance.getEntriesByName('ready')[0]?.startTime ?? performance.now()"
    )
    canvas = page.locator("canvas.lanes").first
    box = canvas.bounding_box()
    x, y = box["x"] + 600, box["y"] + 90
    redraws = page.evaluate(
        """async () => {
          const gantt = document.querySelector("canvas.lanes").partita;
          const spent = [];
          for (let turn = 0; turn < 7; turn += 1) {
            gantt.draw();
            spent.push(gantt.drawMs);
          }
          return spent;
        }"""
    )
    canvas.focus()
    page.mouse.move(x, y)
    zoom = frames(page, lambda turn: page.mouse.wheel(0, -120 if turn % 20 < 10 else 120))
    page.mouse.down()
    pan = frames(page, lambda turn: page.mouse.move(x + 8 * (turn % 20), y))
    page.mouse.up()
    watched.check()
    page.close()
    return {
        "ready_s": ready_ms / 1000,
        "zoom_fps": zoom,
        "pan_fps": pan,
        "redraw_ms": statistics.median(redraws),
    }


def edit_s() -> tuple[float, int]:
    """Return the CPU seconds in which a dragged boundary is answered, and the instructions."""
    found = partita.plan(
        "chain201", cluster="13x2xa100", planner="uniform", microbatches=64, schedule="zero-bubble"
    )
    solution: Solution = found.solution
    store = DocumentStore(2**28)
    held = store.add("chain201.plan.json", "solution", "", write_json(solution))
    editor = Editor(store)
    editor.answer(held.key, [])  # a page shows the plan before it is changed
    cut = cuts_of(solution.plan)[0]
    count, moved = 0, 0

    def answer() -> None:
        # Another plan each time, as in a drag: nothing that was derived from one helps the next.
        nonlocal count, moved
        moved += 1
        answered = editor.answer(held.key, [f"cut:0={cut + moved}"])
        json.dumps(answered)
        count = answered["instructions"]

    return statistics.median(cpu_s(answer) for _ in range(REPEATS)), count


def measure() -> Measured:
    """Return the figures, and what is missed."""
    figures: dict[str, Any] = {}
    missed: list[str] = []

    def note(name: str, value: float, bound: float, *, least: bool = False) -> None:
        figures[name] = value
        print(f"{name:<18} {value:>12,.4g}   ({'at least' if least else 'at most'} {bound:,g})")
        if value < bound if least else value > bound:
            missed.append(f"{name} {value:.4g}; wanted {'>=' if least else '<='} {bound:g}")

    static = sum(len(static_text(name).encode()) for name in (*MODULES, *STYLES))
    own = files("partita.service.ui").joinpath("static")
    static += sum(len(own.joinpath(name).read_bytes()) for name in OWN_MODULES)
    note("static_bytes", float(static), MOST_STATIC_BYTES)
    with tempfile.TemporaryDirectory() as folder, browser_or_skip() as browser:
        for size in SIZES:
            path = Path(folder) / f"{size.name}.html"
            solution = planned(size)
            figures[f"{size.name}_rows"] = write(solution, size, path)
            print(f"{size.name}: {figures[f'{size.name}_rows']:,} instructions")
            note(f"{size.name}_bytes", float(path.stat().st_size), size.most_bytes)
            seen = [look(browser, path) for _ in range(REPEATS)]
            median = {key: statistics.median(each[key] for each in seen) for key in seen[0]}
            note(f"{size.name}_ready_s", median["ready_s"], size.most_ready_s)
            note(f"{size.name}_zoom_fps", median["zoom_fps"], size.least_fps, least=True)
            note(f"{size.name}_pan_fps", median["pan_fps"], size.least_fps, least=True)
            note(f"{size.name}_redraw_ms", median["redraw_ms"], MOST_REDRAW_MS)
    spent, count = edit_s()
    print(f"edit: {count:,} instructions")
    note("edit_rows", count, LEAST_EDIT_ROWS, least=True)
    note("edit_s", spent, MOST_EDIT_S)
    return figures, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
