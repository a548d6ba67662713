"""The page of ``partita ui`` in a real browser: the whole flow, by mouse and by keyboard.

One server, one browser context, one run and one fleet are shared by all that is tried, as starting
them is what takes long.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _browser import HOSTILE, Watched

import partita
from partita.core.codec import read_json, write_json
from partita.documents import save
from partita.errors import PartitaError
from partita.fleet.live.client import FleetClient
from partita.flows.edits import cuts_of, edit_plan

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PARTITA = (sys.executable, "-m", "partita")
TRAIN = (
    *("train", "gpt3-small", "--scale", "0.05", "--sequence-length", "8"),
    *("--microbatch-size", "2", "--microbatches", "4", "--devices", "2", "--steps", "12"),
)
JOB = """name: {name}
command: {python} -c "import time; time.sleep({seconds})"
gpus: 1
steps: 1
progress: none
sensitivity: {{iteration: 1s, points: [{{cpus: 1, memory: 0.1GB, speed: 1}}]}}
retries: 0
"""
LIMIT_MS = 60_000


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a server, and return it with what it says in JSON."""
    process = subprocess.Popen(
        [*PARTITA, *arguments, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            return process, json.loads(text)
    raise AssertionError(f"{arguments} said {text!r}")


class Site:
    """The page, with a run and a fleet beside it."""

    def __init__(self, folder: Path, browser: Any) -> None:
        self.folder, self.closing = folder, []
        for name, seconds in (("first", 3600), ("second", 3600), ("third", 3600)):
            (folder / f"{name}.yaml").write_text(
                JOB.format(name=name, python=sys.executable, seconds=seconds)
            )
        fleet_process, fleet = started(folder, "fleet", "serve", "--gpus", "2", "--round", "1")
        self.closing.append(fleet_process)
        token = Path(folder / fleet["token_file"]) if fleet["token_file"] else None
        assert token is not None
        self.fleet = FleetClient(fleet["url"], token=token.read_text().strip())
        page_process, said = started(
            folder, "ui", "--server", fleet["url"], "--token-file", str(token), "--jobs", "1"
        )
        self.closing.append(page_process)
        self.url, self.link = said["url"], said["link"]
        context = browser.new_context(
            viewport={"width": 1400, "height": 900}, accept_downloads=True
        )
        self.context = context
        self.watched = Watched(context.new_page(), self.url)
        self.page = self.watched.page

    def end_jobs(self) -> None:
        """End the fleet's jobs, which would go on without it."""
        over = ("done", "failed", "cancelled")
        for _ in range(100):
            left = [job for job in self.fleet.jobs(all_jobs=True) if job["state"] not in over]
            if not left:
                return
            for job in left:
                with suppress(PartitaError):
                    self.fleet.cancel(job["id"])
            time.sleep(0.1)

    def wait(self, mark: str, limit_ms: int = LIMIT_MS) -> None:
        self.page.wait_for_selector(f"html{mark}", state="attached", timeout=limit_ms)

    def mark(self, name: str) -> str:
        return self.page.locator("html").get_attribute(f"data-{name}") or ""

    def open(self, path: str, view: str) -> None:
        self.page.goto(self.url + path)
        self.wait(f"[data-ready={view}]")

    def downloaded(self, click: Any) -> str:
        with self.page.expect_download() as saved:
            click()
        return Path(saved.value.path()).read_text()


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(tmp_path_factory.mktemp("page"), browser)
    yield found
    found.context.close()
    found.end_jobs()
    for process in reversed(found.closing):
        process.terminate()
    for process in found.closing:
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def test_the_whole_flow(site: Site) -> None:
    folder = site.folder
    run = subprocess.Popen(
        [*PARTITA, *TRAIN], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    site.closing.append(run)
    submit = [*PARTITA, "fleet", "submit", "first.yaml", "second.yaml", "third.yaml"]
    address = {"PARTITA_FLEET_SERVER": site.fleet.url}
    subprocess.run(
        submit, cwd=folder, check=True, env={**os.environ, **address}, stdout=subprocess.DEVNULL
    )
    for part in (_plan, _edit, _compare_and_reload, _energy, _fleet):
        part(site)
        site.watched.check()
    _live(site, run)
    site.watched.check()


def _plan(site: Site) -> None:
    """Upload a graph by mouse, type a cluster, ask for a plan by keyboard."""
    page, folder = site.page, site.folder
    graph = partita.plan("gpt-small", cluster="4xa100", planner="uniform").problem.graph
    save(graph, folder / "mine.graph.json")
    page.goto(site.link)
    site.wait("[data-ready=model]")
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""  # no script can read it
    page.locator("input[type=file]").set_input_files(str(folder / "mine.graph.json"))
    site.wait("[data-uploaded]")
    assert page.locator("select[name=model]").input_value() == f"doc:{site.mark('uploaded')}"
    cluster = page.locator("textarea[name=cluster]")
    cluster.fill("")
    cluster.type("2x2xnothing")
    page.get_by_text("nothing", exact=False).last.wait_for()
    page.locator(".cluster-place .message").wait_for()
    cluster.fill("")
    cluster.type("2x2xa100+1x2xv100")
    page.get_by_role("heading", name="6 devices in 3 hosts").wait_for()
    snapshot = page.locator("main").aria_snapshot()
    for words in ('heading "Model and cluster" [level=1]', 'textbox "Cluster"', 'button "Plan"'):
        assert words in snapshot
    page.locator("input[name=microbatches]").fill("8")
    page.locator("select[name=planner]").select_option("uniform")
    page.get_by_role("button", name="Plan", exact=True).focus()
    page.keyboard.press("Enter")
    site.wait("[data-ready=plan]")
    assert page.locator("code").last.inner_text().startswith("partita plan mine.graph.json")


def _edit(site: Site) -> None:
    """Drag a boundary by mouse and by keyboard, put a stage elsewhere, take it back, save."""
    page = site.page
    base = read_json(site.downloaded(page.get_by_role("link", name="download").first.click))
    cuts = cuts_of(base.plan)
    handle = page.locator(".handle").nth(1)
    assert handle.get_attribute("role") == "slider"
    assert int(handle.get_attribute("aria-valuenow")) == cuts[1]
    bar, box = page.locator(".stages").bounding_box(), handle.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 5 + bar["width"] * 0.04, box["y"] + 20, steps=5)
    page.mouse.up()
    site.wait('[data-edit="1"]')
    dragged = int(handle.get_attribute("aria-valuenow"))
    assert dragged > cuts[1]
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f".handle[aria-valuenow='{dragged + 1}']")
    site.wait('[data-edit="1"]')  # the same boundary is one edit
    step_s = edit_plan(base, [f"cut:1={dragged + 1}"]).step_s
    shown = page.locator(".editor .fact dd").first.inner_text()
    assert float(shown.split()[0]) == pytest.approx(step_s * _unit(shown), rel=0.01)
    page.get_by_text("stages: devices and replicas").click()
    page.get_by_label("device of stage 0").first.select_option("host0/gpu1")
    site.wait('[data-edit="2"]')
    page.locator("input[name=microbatches]").last.fill("nonsense")
    page.keyboard.press("Tab")
    page.locator(".editor .message").get_by_text("nonsense").wait_for()
    page.get_by_role("button", name="Undo", exact=True).click()
    site.wait('[data-edit="1"]')
    assert page.locator(".editor canvas.lanes").count() == 2
    page.get_by_role("button", name="Save as plan").click()
    site.wait("[data-saved]")
    text = site.downloaded(page.get_by_role("link", name="edited.plan.json").click)
    saved = read_json(text)
    assert cuts_of(saved.plan)[1] == dragged + 1
    assert saved.value == pytest.approx(step_s)
    address = page.url
    page.reload()
    site.wait('[data-ready=plan][data-edit="1"]')
    assert page.url == address
    assert int(page.locator(".handle").nth(1).get_attribute("aria-valuenow")) == dragged + 1


def _unit(text: str) -> float:
    return {"s": 1.0, "ms": 1e3, "us": 1e6}[text.split()[1]]


def _compare_and_reload(site: Site) -> None:
    """Compare the plan with the one that was saved, found in the list of documents."""
    page = site.page
    site.open("/ui/compare", "compare")
    boxes = page.locator("input[name=plans]")
    assert boxes.count() == 2
    for at in range(2):
        boxes.nth(at).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("heading", name="Steps on one axis").wait_for()
    site.wait("[data-ready=compare]")
    assert page.url.count("plans=doc") == 2
    page.reload()
    site.wait("[data-ready=compare]")
    spans = page.evaluate(
        "() => [...document.querySelectorAll('canvas.lanes')].map((c) => c.partita.axis.to)"
    )
    assert len(spans) == 2
    assert spans[0] == spans[1]


def _energy(site: Site) -> None:
    """Find a frontier, walk along it by keyboard, take the clocks of its end."""
    page = site.page
    site.open("/ui/energy", "energy")
    page.locator("input[name=points]").fill("6")
    page.get_by_role("button", name="Find the frontier").click()
    page.locator("input[type=range]").wait_for(timeout=LIMIT_MS)
    site.wait("[data-ready=energy]")
    colours = "() => [...document.querySelector('canvas.lanes').partita.tracks[0].colourOf].join()"
    first = page.evaluate(colours)
    page.locator("input[type=range]").focus()
    page.keyboard.press("End")
    assert page.evaluate(colours) != first
    assert "MHz" in page.locator(".legend").last.inner_text()
    page.get_by_role("button", name="Clocks of the slider's point").click()
    page.get_by_role("link", name="freqs_pipeline").wait_for(timeout=LIMIT_MS)
    text = site.downloaded(page.get_by_role("link", name="freqs_pipeline").click)
    assert "forward" in text
    assert "partita energy choose" in page.locator(".clocks-box code").inner_text()


def _fleet(site: Site) -> None:
    """Simulate two policies that are chosen by keyboard."""
    page = site.page
    site.open("/ui/fleet", "fleet")
    page.locator("input[name=number]").fill("8")
    page.get_by_label("srtf:joint", exact=True).focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Simulate").click()
    page.get_by_role("heading", name="Over time").wait_for(timeout=LIMIT_MS)
    site.wait("[data-ready=fleet]")
    assert page.locator("svg.chart").count() >= 4
    assert "partita fleet simulate generated:jobs=8" in page.locator("code").inner_text()


def _live(site: Site, run: subprocess.Popen[bytes]) -> None:
    """See a run of two processes to its end, and three jobs of a fleet, one of them killed."""
    page = site.page
    site.open("/ui/live", "live")
    page.get_by_role("cell", name="third").wait_for(timeout=LIMIT_MS)
    states = page.locator(".state.running")
    states.nth(1).wait_for(timeout=LIMIT_MS)
    jobs = {job["name"]: job for job in site.fleet.jobs(all_jobs=True)}
    assert {job["state"] for job in jobs.values()} >= {"running"}
    waits = page.get_by_role("row", name="third").first.inner_text()
    assert "GPU" in waits or "wait" in waits
    site.fleet.cancel(jobs["first"]["id"])
    page.locator("tr", has_text="first").locator(".state.cancelled").wait_for(timeout=LIMIT_MS)
    assert run.wait(120) == 0
    link = page.get_by_role("link", name="gpt3-small")
    link.first.wait_for(timeout=LIMIT_MS)
    link.first.click()
    site.wait('[data-run="ended 12"]')
    detail = page.locator(".run-detail").inner_text()
    for words in ("12 of 12", "Memory by rank", "Loss", "running 12 steps"):
        assert words in detail
    page.get_by_role("button", name="Predicted over measured").click()
    page.get_by_role("heading", name="A step, predicted and measured").wait_for(timeout=LIMIT_MS)
    assert "last heard" in page.locator(".heard").inner_text()


def test_hostile_names_are_texts_on_the_page(site: Site) -> None:
    page = site.page
    solution = partita.plan("gpt-small", cluster="2xa100", planner="uniform").solution
    text = write_json(solution.problem.graph)
    for at, name in enumerate(solution.problem.graph.ops.names[:5]):
        text = text.replace(json.dumps(name), json.dumps(f"{HOSTILE[at]}{at}"), 1)
    page.goto(site.link if page.url == "about:blank" else f"{site.url}/ui/model")
    site.wait("[data-ready=model]")
    before = site.mark("uploaded")
    file = {"name": f"{HOSTILE[1]}.json", "mimeType": "text/plain", "buffer": text.encode()}
    page.locator("input[type=file]").set_input_files(file)
    page.wait_for_selector(f"html[data-uploaded]:not([data-uploaded='{before}'])", state="attached")
    page.locator("textarea[name=cluster]").fill("2xa100")
    page.locator("select[name=planner]").select_option("uniform")
    page.get_by_role("button", name="Plan", exact=True).click()
    site.wait("[data-ready=plan]")
    assert page.get_by_text("<script>window.__xss=1</script>").count() > 0
    site.watched.check()
    # The control: a page that made markup of a text would be stopped, and that is noticed.
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<img src=x onerror=window.__xss=1>'; }"
        " catch (error) { return error.name; } return ''; }"
    )
    assert refused == "TypeError"
    assert any("TrustedHTML" in error for error in site.watched.errors)
    site.watched.errors.clear()
