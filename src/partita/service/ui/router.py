"""Routes of the page: its files, its documents, its work, edits of plans, and what runs now.

No route takes a path or the name of code. What is refused is said in the command line's one line.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import StreamingResponse

from partita.catalogue.examples import EXAMPLES
from partita.core.schedules import schedule_names
from partita.errors import InvalidInputError, PartitaError
from partita.fleet.policies.table import allocator_names, ordering_names
from partita.flows.models import large_names
from partita.planners.table import PLANNERS
from partita.report.figures import cluster_figure
from partita.report.page import MODULES, STYLES
from partita.service.errors import Refusal, answers, printable
from partita.service.settings import PageSettings
from partita.service.ui.editing import Editor
from partita.service.ui.held import DocumentStore
from partita.service.ui.jobs import PageJob, PageJobs
from partita.service.ui.keys import HOME, PageKeys
from partita.service.ui.live import LiveView
from partita.service.ui.work import ASKED, HELD, cluster_of

VIEWS = ("model", "plan", "compare", "energy", "fleet", "live")
"""Views that have an address of their own: ``/ui/plan``."""
OWN_MODULES = (
    *("ui.js", "api.js", "forms.js", "work.js"),
    *(f"view_{name}.js" for name in VIEWS),
    *("edit.js", "ui.css", "index.html"),
)
BEAT_S = 5.0
"""Seconds after which a stream says that it is still there."""
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_MISSING = (
    "open the link that 'partita ui' printed; it is good once, and a browser that has followed it "
    "stays known until the server ends. For another browser start 'partita ui' again."
)
COMMON = (400, 401, 409)


class Page:
    """The page of a server: who may see it, what it has, and its work.

    Attributes:
        settings: Its settings.
        keys: Who may see it.
        store: Its documents.
    """

    def __init__(self, settings: PageSettings) -> None:
        self.settings = settings
        self.keys = PageKeys(secure=settings.tls)
        self.store = DocumentStore(settings.store_bytes)
        self.editor = Editor(self.store)
        self.live = LiveView(settings)
        self._jobs: PageJobs | None = None
        self._ending = asyncio.Event()

    @property
    def jobs(self) -> PageJobs:
        """Its work; made when it is asked for first, in the loop of the server."""
        if self._jobs is None:
            self._jobs = PageJobs(self.settings, self.store)
        return self._jobs

    @property
    def is_ending(self) -> bool:
        """Whether the server stops."""
        return self._ending.is_set()

    async def wait(self, event: asyncio.Event, limit_s: float) -> None:
        """Wait for an event, the end of the server, or a while."""
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self._ending)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def stop_waiting(self) -> None:
        """End all streams."""
        self._ending.set()

    def close(self) -> None:
        """End all streams and all work."""
        self.stop_waiting()
        if self._jobs is not None:
            self._jobs.close()


class JobBody(BaseModel):
    """Work that is asked for."""

    model_config = ConfigDict(extra="forbid")

    kind: Annotated[str, Field(max_length=32)]
    values: dict[str, Any]


class UploadBody(BaseModel):
    """A document with the name of its file."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=100_000)]
    text: str


class ClusterBody(BaseModel):
    """The text of a cluster: a shorthand, YAML, or a document."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(max_length=1_000_000)]


class EditBody(BaseModel):
    """A plan that is held, and its edits in their order."""

    model_config = ConfigDict(extra="forbid")

    plan: Annotated[str, Field(max_length=64)]
    edits: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=500)]


def page_router(page: Page) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(tags=["page"])
    _add_files(router, page)
    _add_documents(router, page)
    _add_work(router, page)
    _add_edits(router, page)
    _add_live(router, page)
    return router


def _add_files(router: APIRouter, page: Page) -> None:
    @router.get("/", responses=answers(401), response_class=PlainTextResponse)
    def enter(request: Request, token: Annotated[str, Query(max_length=200)] = "") -> Response:
        """Follow the link: set the cookie, and go on to the page."""
        host = request.headers.get("host", "")
        cookie = page.keys.redeem(token, host) if token else None
        if token and cookie is None:
            return PlainTextResponse(f"this link is wrong or was used; {_MISSING}\n", 401)
        answer = RedirectResponse(HOME, 303)
        if cookie is not None:
            answer.headers["Set-Cookie"] = cookie
        return answer

    def shell() -> Response:
        return _static("index.html")

    for path in (HOME, *(f"{HOME}/{view}" for view in VIEWS)):
        router.add_api_route(
            path,
            shell,
            methods=["GET"],
            name=path.strip("/").replace("/", "_"),
            description="Return the page, which shows the view of its address.",
            responses=answers(401),
            response_class=PlainTextResponse,
        )

    @router.get(f"{HOME}/static/{{name}}", responses=answers(401, 404))
    def own_file(name: str) -> Response:
        """Return a module or a style of the page."""
        return _static(name)

    @router.get(f"{HOME}/static/report/{{name}}", responses=answers(401, 404))
    def report_file(name: str) -> Response:
        """Return a module or a style that reports have, too."""
        if name not in (*MODULES, *STYLES):
            raise Refusal(404, "there is no such file")
        return _file("partita.report", name)

    @router.get(f"{HOME}/api/choices", responses=answers(*COMMON))
    def choices() -> dict[str, Any]:
        """Return what the forms offer."""
        return {
            "models": list(EXAMPLES),
            "large": list(large_names()),
            "planners": [name for name in PLANNERS if name not in ("custom", "grid", "manual")],
            "schedules": schedule_names(),
            "orderings": list(ordering_names()),
            "allocators": list(allocator_names()),
            "limits": {
                "upload_bytes": page.settings.upload_bytes,
                "time_limit_s": page.settings.time_limit_s,
                "jobs": page.settings.jobs,
            },
        }


def _static(name: str) -> Response:
    if name not in OWN_MODULES:
        raise Refusal(404, "there is no such file")
    return _file("partita.service.ui", name)


def _file(package: str, name: str) -> Response:
    text = files(package).joinpath("static", name).read_text(encoding="utf-8")
    return Response(text, media_type=_TYPES[name.rpartition(".")[2]])


def _add_documents(router: APIRouter, page: Page) -> None:
    @router.get(f"{HOME}/api/documents", responses=answers(*COMMON))
    async def documents() -> list[dict[str, Any]]:
        """Return the documents that the page has, the latest first."""
        return [held.to_json() for held in page.store.listed()]

    @router.post(f"{HOME}/api/documents", responses=answers(*COMMON))
    async def upload(body: UploadBody) -> dict[str, Any]:
        """Take a document in any format that is known; it is read in a process of its own."""
        if len(body.text) > page.settings.upload_bytes:
            raise Refusal(413, f"the document is larger than {page.settings.upload_bytes} bytes")
        sent = {HELD: (body.name, body.text)}
        job = await page.jobs.result("read", {"name": body.name, "text": body.text}, documents=sent)
        if "document" not in job.documents:
            raise Refusal(400, job.error)
        return job.documents["document"].to_json()

    @router.get(f"{HOME}/api/documents/{{key}}", responses=answers(404, *COMMON))
    async def download(key: str) -> Response:
        """Return a document as a file."""
        try:
            held = page.store.get(key)
        except InvalidInputError as exc:
            raise Refusal(404, str(exc)) from exc
        return Response(
            held.text,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{held.name}"'},
        )

    @router.post(f"{HOME}/api/cluster", responses=answers(*COMMON))
    def cluster(body: ClusterBody) -> dict[str, Any]:
        """Return the figure of a cluster that is typed; what is not whole yet is no failure."""
        text = body.text.strip()
        if text.startswith(HELD):
            text = _said(partial(page.store.get, text.removeprefix(HELD))).text
        try:
            found = cluster_of(text)
        except PartitaError as exc:
            return {"problem": printable(str(exc))}
        hosts = len({device.host for device in found.devices})
        return {
            "figure": cluster_figure(found),
            "line": f"{len(found.devices)} devices in {hosts} host{'s' * (hosts != 1)}",
        }


def _said(ask: Callable[[], Any]) -> Any:  # noqa: ANN401 (what is asked for)
    """Return an answer; what is wrong with the input is 400, in one line."""
    try:
        return ask()
    except PartitaError as exc:
        raise Refusal(400, str(exc)) from exc


def _add_work(router: APIRouter, page: Page) -> None:
    @router.post(f"{HOME}/api/jobs", responses=answers(429, *COMMON))
    async def ask(body: JobBody) -> dict[str, Any]:
        """Ask for work; what was asked before is answered with what came of it."""
        if body.kind not in ASKED:
            raise Refusal(400, f"there is no work {body.kind!r}; there are {', '.join(ASKED)}")
        return page.jobs.ask(body.kind, body.values, documents=_sent(page, body.values)).to_json()

    @router.get(f"{HOME}/api/jobs/{{key}}", responses=answers(404, *COMMON))
    async def state(key: str) -> dict[str, Any]:
        """Return what a piece of work is at."""
        return page.jobs.get(key).to_json()

    @router.get(f"{HOME}/api/jobs/{{key}}/page", responses=answers(404, *COMMON))
    async def figures(key: str) -> Response:
        """Return the figures of a piece of work that is done."""
        job = page.jobs.get(key)
        if not job.page:
            raise Refusal(404, "there are no figures yet")
        return Response(job.page, media_type="application/json")

    @router.get(f"{HOME}/api/jobs/{{key}}/events", responses=answers(404, *COMMON))
    async def events(key: str) -> Response:
        """Tell of a piece of work until it is over."""
        return _stream(_job_events(page, page.jobs.get(key)))

    @router.post(f"{HOME}/api/jobs/{{key}}/stop", responses=answers(404, *COMMON))
    async def stop(key: str) -> dict[str, Any]:
        """Let a search end with the best that it has."""
        job = page.jobs.get(key)
        job.stop = True
        return job.to_json()

    @router.delete(f"{HOME}/api/jobs/{{key}}", responses=answers(404, *COMMON))
    async def cancel(key: str) -> dict[str, Any]:
        """End a piece of work; nothing comes of it."""
        job = page.jobs.get(key)
        page.jobs.cancel(job)
        return job.to_json()


def _sent(page: Page, values: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the documents that values name, to be sent along."""
    found = {}
    for value in values.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and each.startswith(HELD):
                held = _said(partial(page.store.get, each.removeprefix(HELD)))
                found[each] = (held.name, held.text)
    return found


async def _job_events(page: Page, job: PageJob) -> AsyncIterator[str]:
    while not page.is_ending:
        changed = job.changed
        yield _event("state", job.to_json())
        if job.state.is_over:
            return
        await page.wait(changed, BEAT_S)


def _event(name: str, values: object) -> str:
    return f"event: {name}\ndata: {json.dumps(values, allow_nan=False)}\n\n"


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def _add_edits(router: APIRouter, page: Page) -> None:
    @router.post(f"{HOME}/api/edit", responses=answers(*COMMON))
    def edit(body: EditBody) -> Response:
        """Return a plan with edits, simulated at once; or why no plan comes of them."""
        try:
            return JSONResponse(page.editor.answer(body.plan, body.edits))
        except PartitaError as exc:
            return JSONResponse({"problem": printable(str(exc))})

    @router.post(f"{HOME}/api/edit/save", responses=answers(*COMMON))
    def save(body: EditBody) -> dict[str, Any]:
        """Keep a plan with edits as a document."""
        held = _said(lambda: page.editor.save(body.plan, body.edits))
        return {**held.to_json(), "command": f"partita simulate {held.name}"}


def _add_live(router: APIRouter, page: Page) -> None:
    @router.get(f"{HOME}/api/live", responses=answers(*COMMON))
    def live() -> dict[str, Any]:
        """Return the runs and the fleet as they are now."""
        return page.live.look()

    @router.get(f"{HOME}/api/live/events", responses=answers(*COMMON))
    async def live_events() -> Response:
        """Tell of runs and of the fleet, each time that something has changed."""
        return _stream(_live_events(page))

    @router.get(f"{HOME}/api/live/runs/{{name}}", responses=answers(404, *COMMON))
    def run(name: str) -> dict[str, Any]:
        """Return everything about a run as it is now."""
        return page.live.run(name)

    @router.post(f"{HOME}/api/live/runs/{{name}}/page", responses=answers(404, *COMMON))
    async def run_page(name: str) -> dict[str, Any]:
        """Ask for the report of a run that has ended."""
        folder = page.live.folder_of(name)
        stamp = (folder / "results.json").stat().st_mtime_ns if page.live.has_ended(folder) else 0
        if not stamp:
            raise Refusal(404, "this run has left no results yet")
        return page.jobs.ask("run", {"run": name, "at": stamp}, folder=str(folder)).to_json()


async def _live_events(page: Page) -> AsyncIterator[str]:
    last = ""
    never = asyncio.Event()
    while not page.is_ending:
        found = await asyncio.to_thread(page.live.look)
        now = json.dumps({key: value for key, value in found.items() if key != "at_s"})
        if now != last:
            last = now
            yield _event("live", found)
        else:
            yield _event("beat", {"at_s": found["at_s"]})
        await page.wait(never, 1.0)
