"""The page of ``partita ui`` in a real browser: the whole flow, by mouse and by keyboard.

One server, one browser context, one run and one fleet are shared by all that is tried, as starting
them is what takes long.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _browser import HOSTILE, Watched, made_hostile

import partita
from partita.core.codec import read_json, write_json
from partita.documents import save
from partita.errors import PartitaError
from partita.fleet.live.client import FleetClient
from partita.flows.edits import cuts_of, edit_plan
from partita.report.page import static_text

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

PARTITA = (sys.executable, "-m", "partita")
TRAIN = (
    *("train", "gpt3-small", "--scale", "0.05", "--sequence-length", "8"),
    *("--microbatch-size", "2", "--microbatches", "4", "--devices", "2", "--steps", "12"),
)
JOB = """name: {name}
command: {python} -c "import os, time; open('{pid}', 'w').write(str(os.getpid())); time.sleep(9e3)"
gpus: 1
steps: 1
progress: none
sensitivity: {{iteration: 1s, points: [{{cpus: 1, memory: 0.1GB, speed: 1}}]}}
retries: 0
"""
JOBS = ("first", "second", "third")
LIMIT_MS = 60_000
ARIA = Path(__file__).parents[1] / "golden" / "ui"
NUMBERS = re.compile(
    r"(?<![\w=.])[+-]?\d[\d.,:]*(e[+-]?\d+)?( (%|([mun]?s|h|[kMGT]?B|[mkM]?J|min)\b))?(?!\w)"
)
"""Numbers with their units, and no digits of names."""
UPDATE = bool(os.environ.get("PARTITA_UPDATE_GOLDEN"))


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
        for name in JOBS:
            (folder / f"{name}.yaml").write_text(
                JOB.format(name=name, python=sys.executable, pid=folder / f"{name}.pid")
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

    def check_spoken(self, name: str) -> None:
        """Compare what a screen reader is told of a view with what was read over by a person.

        Numbers and dates are those of the machine, and what a list offers besides grows.
        """
        found = self.page.locator("body").aria_snapshot()
        found = re.sub(r"\S*_gpt3-small_\S+", "RUN", found)
        found = re.sub(r"documents/\w+", "documents/ID", found)
        found = re.sub(r"\n *- option [^\n]*(?<!\[selected\])(?=\n)", "", found)
        found = re.sub(r"http://\S+?:\d+", "ADDRESS", found)
        found = re.sub(r"\b0( 0)+\b", "0", NUMBERS.sub("0", found))
        path = ARIA / f"{name}.aria.yml"
        if UPDATE:
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{found}\n")
        assert found == path.read_text().rstrip(), name

    def api(self, path: str) -> Any:
        """Return what the server answers to the page."""
        return self.page.request.get(f"{self.url}/ui/api{path}").json()

    def run_at_hand(self) -> None:
        """Let there be a run to look at, where none was made before."""
        folder = self.folder / "runs" / "one"
        folder.mkdir(parents=True, exist_ok=True)
        row = {"step": 1, "time_s": 1.0, "loss": 5.0, "step_s": 0.1, "memory_bytes": 3e8}
        row["rank_memory_bytes"] = {"0": 1e8, "1": 3e8}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "driver.log").write_text("a line\n")
        event = {"at_s": 1.0, "text": "rank 1 is a straggler"}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")

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
    site.check_spoken("model")
    address = page.url
    page.reload()
    site.wait("[data-ready=model]")
    assert page.url == address
    assert page.locator("select[name=model]").input_value().startswith("doc:")
    assert page.locator("textarea[name=cluster]").input_value() == "2x2xa100+1x2xv100"
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
    site.check_spoken("plan")
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
    site.check_spoken("compare")
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
    site.check_spoken("energy")
    page.get_by_role("button", name="Clocks of least energy").click()
    page.wait_for_url("**least_energy=true**")
    words = page.locator("output").inner_text()
    page.wait_for_url("**point=**")
    page.reload()
    site.wait("[data-ready=energy]")
    assert page.locator("output").inner_text() == words
    page.get_by_role("link", name="freqs_pipeline").wait_for(timeout=LIMIT_MS)


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
    site.check_spoken("fleet")


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
    assert "waits for 1 GPU; 0 of 2 GPUs are free" in waits
    os.kill(int((site.folder / "first.pid").read_text()), signal.SIGKILL)
    page.locator("tr", has_text="first").locator(".state.failed").wait_for(timeout=LIMIT_MS)
    assert "SIGKILL" in page.get_by_role("row", name="first").first.inner_text()
    page.locator("tr", has_text="third").locator(".state.running").wait_for(timeout=LIMIT_MS)
    assert run.wait(120) == 0
    link = page.get_by_role("link", name="gpt3-small")
    link.first.wait_for(timeout=LIMIT_MS)
    link.first.click()
    site.wait('[data-run="ended 12"]')
    detail = page.locator(".run-detail").inner_text()
    for words in ("12 of 12", "Memory by rank over time", "Loss", "running 12 steps"):
        assert words in detail
    # A log may be there or not, and of a busy machine there are stragglers.
    page.evaluate("for (const each of document.querySelectorAll('.log, .events')) each.remove()")
    site.check_spoken("live")
    page.get_by_role("button", name="Predicted over measured").click()
    page.get_by_role("heading", name="A step, predicted and measured").wait_for(timeout=LIMIT_MS)
    assert "last heard" in page.locator(".heard").inner_text()


def answer_hostile(route: Any, turn: Iterator[int]) -> None:
    """Answer a question of the page with what the server says, every text of it hostile."""
    with suppress(sync_api.Error):  # the page went on to another view meanwhile
        _answer(route, turn)


def _answer(route: Any, turn: Iterator[int]) -> None:
    url = route.request.url
    stream = url.endswith("/events")
    answer = route.fetch(url=url.removesuffix("/events"))
    if "json" not in answer.headers.get("content-type", ""):
        route.fulfill(response=answer)
        return
    text = json.dumps(made_hostile(answer.json(), turn))
    if not stream:
        route.fulfill(response=answer, body=text)
        return
    event = "live" if "/live/" in url else "state"
    body = f"event: {event}\ndata: {text}\n\n"
    route.fulfill(status=200, body=body, headers={"content-type": "text/event-stream"})


def hostile_views(site: Site) -> Iterator[tuple[str, str]]:
    """Return addresses of all views that show something, and where the reader must see a text."""
    held = {each["kind"]: f"doc:{each['id']}" for each in reversed(site.api("/documents"))}
    plan = held["solution"]
    yield "/ui/model", "option"
    yield f"/ui/plan?plan={plan}&edits=cut:0%3D9", ".device, .stage-row, td"
    yield f"/ui/compare?plans={plan}&plans={plan}", ".box, td"
    yield f"/ui/energy?plan={plan}&points=3", "option, code"
    yield "/ui/fleet?policy=fifo:fair&policy=srtf:joint&number=4", "th, td"
    run = site.api("/live")["runs"][0]["name"]
    yield f"/ui/live?run={run}", "td, .events, .server"


def test_hostile_names_are_texts_on_every_view(site: Site) -> None:
    page = site.page
    page.goto(site.link if page.url == "about:blank" else f"{site.url}/ui/model")
    site.wait("[data-ready=model]")
    site.run_at_hand()
    plan = partita.plan("gpt-small", cluster="2xa100+1xv100", planner="uniform").solution
    file = {"name": f"{HOSTILE[1]}.json", "mimeType": "text/plain"}
    file["buffer"] = write_json(plan).encode()
    page.locator("input[type=file]").set_input_files(file)
    site.wait("[data-ready=plan]")
    views = list(hostile_views(site))
    turn = itertools.count()
    page.route("**/ui/api/**", lambda route: answer_hostile(route, turn))
    for address, where in views:
        site.open(address, address.split("/")[2].partition("?")[0])
        if "live" in address:
            page.locator(".run-detail .facts").wait_for()
        assert page.locator(where).get_by_text(HOSTILE[0]).count() > 0, address
        for summary in page.locator("details summary").all():
            summary.click()
        for selector in (".device", "canvas.lanes", "svg.chart", "svg.graph rect", ".part"):
            if page.locator(selector).count():
                page.locator(selector).first.hover()
        page.set_viewport_size({"width": 420, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, address
        page.set_viewport_size({"width": 1400, "height": 900})
        site.watched.check()
    page.unroute("**/ui/api/**")
    _notices_a_careless_page(site, turn)


CARELESS = """function fill(element, attributes, children) {
  for (const child of children) if (typeof child === "string") element.innerHTML += child;"""


def _notices_a_careless_page(site: Site, turn: Iterator[int]) -> None:
    """Control: a page that makes markup of texts is stopped by its policy; without it, it runs."""
    context = site.context.browser.new_context(storage_state=site.context.storage_state())
    careless = context.new_page()
    plain, policy = CARELESS.partition("\n")[0], "content-security-policy"
    module = static_text("dom.js").replace(plain, CARELESS, 1)
    careless.route("**/ui/api/**", lambda route: answer_hostile(route, turn))
    careless.route(
        "**/dom.js", lambda route: route.fulfill(body=module, content_type="text/javascript")
    )
    with careless.expect_event("pageerror", timeout=LIMIT_MS) as refused:
        careless.goto(f"{site.url}/ui/live")
    assert "TrustedHTML" in str(refused.value)
    assert careless.evaluate("window.__xss") is None

    def without_policy(route: Any) -> None:
        answer = route.fetch()
        kept = {name: value for name, value in answer.headers.items() if name != policy}
        route.fulfill(response=answer, headers=kept)

    careless.route("**/ui/live", without_policy)
    careless.goto(f"{site.url}/ui/live")
    careless.wait_for_function("window.__xss === 1", timeout=LIMIT_MS)
    context.close()
