"""Reports in a real browser: they draw what the documents say, and nothing of a text runs."""

import dataclasses
import io
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _browser import HOSTILE, Watched, made_hostile
from PIL import Image

import partita
from partita.core.energy import Frontier
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.documents import save
from partita.flows.answer import answer_of
from partita.flows.fleet.simulate import FleetResult as StudyResult
from partita.flows.pages import NamedPlan, compare_page, fleet_page, frontier_page, plan_page
from partita.flows.report import save_page
from partita.flows.summary import summarise
from partita.report.page import Section, json_in_html, render_page
from partita.report.study_figures import rank_memory_figure

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PIXELS = 200
HOSTILE_ESCAPED = HOSTILE[1].replace("<", "&lt;") + '&lt;main id="page">'
ARIA = Path(__file__).parents[1] / "golden" / "report.aria.yml"
WORDS = {
    Kind.LOAD: "load",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight gradient",
    Kind.UPDATE: "update",
    Kind.SEND: "message",
    Kind.ALL_REDUCE: "all-reduce",
}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@pytest.fixture(scope="module")
def solution() -> Solution:
    found = partita.plan(
        "gpt-small", cluster="1x3xa100+1x2xv100", planner="uniform", microbatches=12
    )
    return found.solution


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    contexts = []

    def open_file(path: Path, **settings: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **settings})
        contexts.append(context)
        watched = Watched(context.new_page(), f"file://{path}")
        watched.open(f"file://{path}")
        return watched

    yield open_file
    for context in contexts:
        context.close()


def written(solution: Solution, folder: Path) -> Path:
    path = folder / "report.html"
    save_page(plan_page(answer_of(solution)), str(path))
    return path


def test_the_tip_at_random_pixels_is_the_row_of_the_document(
    solution: Solution, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    watched = opened(written(solution, tmp_path))
    page = watched.page
    timeline = partita.simulate(solution).timeline
    rng = random.Random(7)
    canvas = page.locator("canvas.lanes").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    seen = 0
    for turn in range(PIXELS):
        if turn == PIXELS // 2:  # closer, around a quarter of the step
            canvas.focus()
            page.mouse.move(box["x"] + 400, box["y"] + 60)
            for _ in range(6):
                page.mouse.wheel(0, -300)
            page.wait_for_timeout(100)
        place = page.evaluate(_PLACE)
        x = rng.uniform(place["left"] + 1, place["left"] + place["width"] - 1)
        y = rng.uniform(place["top"], place["top"] + len(timeline.devices) * place["step"])
        page.mouse.move(box["x"] + x, box["y"] + y)
        found = page.evaluate(
            "() => [document.querySelector('canvas.lanes').dataset.row ?? null,"
            " document.querySelector('.tip').hidden ? null :"
            " [...document.querySelector('.tip').children].map((line) => line.textContent)]"
        )
        expected = _at(timeline, place, x, y)
        if expected is None:
            assert found[0] in (None, ""), (x, y)
        else:
            seen += 1
            assert int(found[0]) == expected, (x, y)
            _check_tip(timeline, expected, found[1])
    assert seen > PIXELS // 4
    watched.check()


_PLACE = """() => {
  const { place, axis } = document.querySelector("canvas.lanes").partita;
  return { ...place, from: axis.from, to: axis.to, top: 24, step: place.lane + 7 };
}"""


def _at(timeline: Timeline, place: dict[str, float], x: float, y: float) -> int | None:
    """Return the row of the document at a pixel: compute in a lane, what it sends below."""
    device = int((y - place["top"]) // place["step"])
    inside = y - place["top"] - device * place["step"]
    if device >= len(timeline.devices) or inside > place["lane"]:
        return None
    share = (x - place["left"]) / place["width"]
    time = place["from"] + share * (place["to"] - place["from"])
    own, kind = timeline.device == device, timeline.kind
    if inside < 17:
        rows = np.flatnonzero(own & (kind <= LAST_COMPUTE))
    else:
        rows = np.flatnonzero(own & ((kind == Kind.SEND) | (kind >= FIRST_COLLECTIVE)))
    rows = rows[(timeline.start_s[rows] <= time) & (timeline.end_s[rows] > time)]
    return int(rows[np.argmax(timeline.start_s[rows])]) if len(rows) else None


def _check_tip(timeline: Timeline, row: int, lines: list[str]) -> None:
    kind = Kind(int(timeline.kind[row]))
    words = [WORDS[kind]]
    words += [f"stage {timeline.stage[row]}"] if timeline.stage[row] >= 0 else []
    words += [f"microbatch {timeline.microbatch[row]}"] if timeline.microbatch[row] >= 0 else []
    assert lines[0] == " · ".join(words)
    assert lines[1] == timeline.devices[timeline.device[row]]
    times = re.findall(r"([\d.e-]+) (s|ms|us)\b", lines[2])
    shown = [float(number) * UNITS[unit] for number, unit in times]
    start, end = float(timeline.start_s[row]), float(timeline.end_s[row])
    assert shown == pytest.approx([start, end, end - start], rel=1e-6, abs=2e-8)


def test_idle_shares_of_lanes_are_the_simulators(
    solution: Solution, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    watched = opened(written(solution, tmp_path))
    timeline = partita.simulate(solution).timeline
    shown, drawn = watched.page.evaluate(
        """() => {
          const { tracks } = document.querySelector("canvas.lanes").partita;
          const [track] = tracks;
          const busy = track.lanes.map(({ compute: [begin, end] }) => {
            let sum = 0;
            for (let row = begin; row < end; row += 1) sum += track.to[row] - track.from[row];
            return 1 - sum / track.about.makespan_s;
          });
          return [track.about.idle, busy];
        }"""
    )
    assert shown == pytest.approx(timeline.bubble)
    assert drawn == pytest.approx(timeline.bubble, abs=1e-6)
    assert sum(shown) == pytest.approx(float(timeline.bubble.sum()))
    watched.check()


def hostile(solution: Solution, most: int = 10_000) -> Solution:
    """Return a plan whose every name is a text that a careless page would run."""
    problem, plan = solution.problem, solution.plan
    cluster, graph = problem.cluster, problem.graph
    name_of = {
        device.name: f"{HOSTILE[at % len(HOSTILE)]}{at}"
        for at, device in enumerate(cluster.devices)
    }
    cluster = dataclasses.replace(
        cluster,
        name=HOSTILE[0],
        hosts=tuple(
            dataclasses.replace(host, name=f"{HOSTILE[at + 1]}{at}")
            for at, host in enumerate(cluster.hosts)
        ),
        devices=tuple(
            dataclasses.replace(device, name=name_of[device.name]) for device in cluster.devices
        ),
    )
    names = tuple(f"{HOSTILE[at % len(HOSTILE)][:most]}{at}" for at in range(len(graph)))
    graph = dataclasses.replace(
        graph, name=HOSTILE[1], ops=dataclasses.replace(graph.ops, names=names)
    )
    problem = dataclasses.replace(problem, cluster=cluster, graph=graph)
    devices = tuple(name_of[name] for name in plan.devices)
    plan = dataclasses.replace(plan, devices=devices, fingerprint=graph.fingerprint)
    return dataclasses.replace(solution, problem=problem, plan=plan, alternatives=())


def test_hostile_names_are_text_everywhere(
    solution: Solution, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    watched = opened(written(hostile(solution), tmp_path))
    page = watched.page
    assert HOSTILE[1] in page.locator("h1").inner_text()
    for selector in (".device", ".part", "svg.graph rect"):
        page.locator(selector).first.hover()
        assert page.locator(".tip").is_visible()
    assert HOSTILE[0] in page.locator(".tip").inner_text()
    canvas = page.locator("canvas.lanes").first
    canvas.focus()
    for key in (".", ".", "ArrowDown", "+", "Home", ","):
        page.keyboard.press(key)
    assert HOSTILE[1] in page.locator("[role=status]").inner_text()
    for summary in page.locator("details summary").all():
        summary.click()
    assert page.locator("td", has_text=HOSTILE[0]).count() > 0
    page.set_viewport_size({"width": 420, "height": 800})
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 420
    watched.check()


def test_the_check_would_notice_a_text_that_runs(
    solution: Solution, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    path = written(solution, tmp_path)
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text())
    text = text.replace("<h1>", "<h1>", 1).replace("<body>", f"<body>{HOSTILE[1]}", 1)
    path.write_text(text)
    watched = opened(path)
    with pytest.raises(AssertionError):
        watched.check()
    path.write_text(
        written(solution, tmp_path).read_text().replace("<body>", f"<body>{HOSTILE[0]}", 1)
    )
    refused = opened(path)
    assert refused.page.evaluate("window.__xss") is None  # the policy of the file
    assert any("Content Security Policy" in error for error in refused.errors)


_FOCUSED = """() => {
  const { activeElement: element } = document;
  return `${element.tagName} ${element.getAttribute("class") || ""}`;
}"""


def test_a_report_is_walked_through_by_keyboard_and_named_for_screen_readers(
    solution: Solution, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    watched = opened(written(solution, tmp_path), color_scheme="dark")
    page = watched.page
    # What a screen reader is told, from top to bottom.
    assert page.locator("main").aria_snapshot() == ARIA.read_text().rstrip()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(_FOCUSED))
    assert {"CANVAS lanes", "svg graph", "SUMMARY ", "SELECT "} <= reached
    with page.expect_download() as saved:
        page.get_by_role("button", name="Timeline: save as CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert len(lines) == len(partita.simulate(solution).timeline) + 1
    assert lines[0].startswith("timeline,row,device,kind,stage")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Memory, on the same axis: save as CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "device,time (s),memory (bytes)"
    timeline = partita.simulate(solution).timeline
    assert len(lines) == len(timeline.memory_s) + 1
    peak = max(float(line.rpartition(",")[2]) for line in lines[1:])
    assert peak == pytest.approx(float(timeline.peak_bytes.max()), rel=1e-4)
    page.get_by_role("button", name="colours").click()
    page.emulate_media(media="print")
    assert not page.locator(".controls button").first.is_visible()
    watched.check()


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    planned = partita.plan("gpt-small", cluster="4xa100", planner="uniform", microbatches=6)
    return partita.frontier(planned.solution, points=6).frontier


@pytest.fixture(scope="module")
def study() -> StudyResult:
    return partita.simulate_fleet(
        "generated:jobs=12,short", cluster="1x8xv100", policy="fifo:fair,fifo:tune"
    )


def test_every_text_of_every_kind_of_page_may_be_hostile(
    solution: Solution,
    frontier: Frontier,
    study: StudyResult,
    tmp_path: Path,
    opened: Callable[..., Watched],
) -> None:
    """Whatever stands in the figures: hosts, jobs, policies, curves, units of nobody's tables."""
    named = NamedPlan(name="one", summary=summarise(solution))
    pages = [
        plan_page(answer_of(solution), searched=[(0.1, 2.0), (0.2, 1.0)], command="partita"),
        compare_page([named, named], title="two"),
        frontier_page(frontier, name="clocks"),
        fleet_page(study.runs, title="jobs"),
    ]
    rows = [{"step": at, "time_s": at, "rank_memory_bytes": {"0": 1e8}} for at in range(3)]
    chart = rank_memory_figure(rows)
    assert chart is not None
    extra = Section(title="Run", words=["one", "two"], figures=[chart])
    sections = [*(section for page in pages for section in page.sections), extra]
    whole = dataclasses.replace(pages[0], sections=sections, notes=["a note"] * len(HOSTILE))
    plain = json_in_html(whole.to_json())
    hostile_json = json_in_html(made_hostile(whole.to_json(), itertools.count()))
    path = tmp_path / "report.html"
    path.write_text(render_page(whole).replace(plain, hostile_json))
    page = opened(path).page
    for summary in page.locator("details summary").all():
        summary.click()
    for place in ("h1", "h2", "h3", ".fact", ".note", ".words li", ".notes li", ".host-name", "td"):
        assert page.locator(place, has_text="__xss").count() > 0, place
    for selector in ("canvas.lanes", "svg.chart", ".device", ".part", ".key"):
        page.locator(selector).first.hover(force=True)
    page.locator("input[type=range]").press("End")
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert page.evaluate("window.__xss") is None


def test_the_slider_of_a_frontier_moves_the_bars(
    frontier: Frontier, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    save(frontier, tmp_path / "frontier.json")
    partita.write_report(str(tmp_path / "frontier.json"), output=str(tmp_path / "f.html"))
    watched = opened(tmp_path / "f.html")
    page = watched.page
    ends = "() => { const t = document.querySelector('canvas.lanes').partita.tracks[0];"
    ends += " return [Math.max(...t.to), [...t.colourOf].join(), t.palette.length]; }"
    first, colours, _ = page.evaluate(ends)
    page.locator("input[type=range]").focus()
    page.keyboard.press("End")
    last, other, _ = page.evaluate(ends)
    assert first == pytest.approx(frontier.time_s[0], rel=1e-4)
    assert last == pytest.approx(frontier.time_s[-1], rel=1e-4)
    assert colours != other
    words = page.locator("output").inner_text()
    assert words.startswith(f"point {len(frontier) - 1}: ")
    watched.check()


def test_plans_side_by_side_and_fleets_draw_without_errors(
    solution: Solution, study: StudyResult, tmp_path: Path, opened: Callable[..., Watched]
) -> None:
    other = partita.plan("gpt-small", cluster="4xa100", planner="single").solution
    for name, document in (("one", solution), ("two", other)):
        save(document, tmp_path / f"{name}.json")
    things = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    found = partita.write_report(*things, output=str(tmp_path / "both.html"))
    assert json.dumps(found.to_json())
    watched = opened(tmp_path / "both.html")
    spans = watched.page.evaluate(
        "() => [...document.querySelectorAll('canvas.lanes')].map((c) => c.partita.axis.to)"
    )
    assert len(spans) == 2
    assert spans[0] == spans[1]
    watched.check()
    for run in study.runs:
        save(run.history, tmp_path / f"{run.policy.replace(':', '-')}.json")
    things = [str(tmp_path / f"fifo-{name}.json") for name in ("fair", "tune")]
    partita.write_report(*things, output=str(tmp_path / "fleet.html"))
    watched = opened(tmp_path / "fleet.html")
    assert watched.page.locator("svg.chart path").count() >= 8
    watched.check()


def _notebook(outputs: list[str], folder: Path) -> Path:
    path = folder / "notebook.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{"<hr>".join(outputs)}</body>')
    return path


def test_a_notebook_draws_the_figures_in_sandboxes_and_names_are_text(
    solution: Solution, frontier: Frontier, study: StudyResult, tmp_path: Path, browser: Any
) -> None:
    named = hostile(solution, most=200)  # a frame that is too large is left out
    shown = [named._repr_html_(), partita.simulate(named).timeline._repr_html_()]
    jobs = study.runs[0].history
    called = {"trace": HOSTILE[0], "policy": HOSTILE[1]}
    called |= {"servers": tuple(f"{HOSTILE[2]}{at}" for at in range(len(jobs.servers)))}
    history = dataclasses.replace(jobs, **called)
    others = (named.problem, named.problem.cluster, named.plan, history)
    shown += [
        each._repr_html_() for each in (*others, dataclasses.replace(frontier, solution=named))
    ]
    shown.append(shown[0].replace("<iframe ", "<a ").replace("</iframe>", "</a>"))
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    watched = Watched(context.new_page(), "file://")
    watched.page.goto(f"file://{_notebook(shown, tmp_path)}")
    frames = watched.page.frames[1:]
    assert len(frames) == sum(text.count("<iframe ") for text in shown) >= 4
    for at, frame in enumerate(frames):
        watched.page.locator("iframe").nth(at).scroll_into_view_if_needed()  # drawn when seen
        frame.wait_for_selector("html[data-ready]", state="attached")
        assert frame.evaluate("window.__xss") is None
        assert frame.evaluate("window.origin") == "null"
    frames[0].locator(".device").first.hover()
    assert HOSTILE[0] in frames[0].locator(".tip").inner_text()
    assert frames[1].locator("canvas.lanes").count() == 2
    assert frames[1].evaluate("document.querySelector('canvas.lanes').partita.draws") > 0
    assert HOSTILE[1] in watched.page.locator("body").inner_text()
    watched.check()
    # Where frames are taken out, as some sites do, the picture is still there.
    assert watched.page.locator("img").last.is_visible()
    # A page that were careless would be noticed.
    policy = "Content-Security-Policy"
    careless = shown[0].replace(policy, "x").replace('&lt;main id="page">', f"{HOSTILE_ESCAPED}")
    watched.page.goto(f"file://{_notebook([careless], tmp_path)}")
    frame = watched.page.frames[1]
    frame.wait_for_function("window.__xss === 1")
    context.close()


def test_a_notebook_whose_frames_may_run_nothing_shows_the_picture_below_them(
    solution: Solution, tmp_path: Path, browser: Any
) -> None:
    text = partita.simulate(solution).timeline._repr_html_().replace("allow-scripts", "")
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    page.goto(f"file://{_notebook([text], tmp_path)}")
    box = page.locator("img").bounding_box()
    picture = Image.open(io.BytesIO(page.screenshot(clip=box))).convert("RGB")
    context.close()
    assert len(picture.getcolors(1_000_000)) > 20
