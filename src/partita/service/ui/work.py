"""The process that works for the page: it is sent what was asked, and says what comes of it.

What it says are frames: a line of JSON, and after it the text of a document or of a page. It opens
no file that a browser names: models are built in or sent along, clusters are texts.
"""

import json
import re
import resource
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.bounds import lower_bound
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import EXAMPLES
from partita.catalogue.parse import read_cluster
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.core.codec import format_of, write_json
from partita.core.energy import Frontier
from partita.core.fleet import FleetHistory, Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import formats
from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.flows.answer import answer_of
from partita.flows.models import is_model, large_names
from partita.flows.pages import NamedPlan, compare_page, plan_page
from partita.flows.plan import PlanRequest, PlanResult, SearchWatch, plan_request
from partita.flows.summary import summarise
from partita.formats.detect import read_any
from partita.names import suggest
from partita.planners.effort import SearchTrace
from partita.planners.table import PLANNERS
from partita.processes import die_with_parent
from partita.report.page import Page
from partita.requests import Request, arguments_of, fields_of, make
from partita.service.child import Pipe

STOP = b"stop"
HELD = "doc:"
"""What a value begins with that names a document which the page has."""
_LOOK_S = 0.05
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CUSTOM = re.compile(r"custom:\d+(,\d+)*")
CONFIGURATION = "config.json"
_CONFIGURED_CODE = frozenset(
    {"auto_map", "attn_implementation", "attn_implementation_internal", "quantization_config"}
)
"""Keys of a configuration, without leading underscores, that can name code to be loaded."""
_TRACE = re.compile(r"generated(:[\w.,=-]*)?")
_NO_FILES = frozenset({"custom", "grid", "manual"})
"""Planners that read a file, or that need an argument."""
PLAN_FIELDS = (
    *("microbatches", "microbatch_size", "batch_size", "schedule", "objective", "planner"),
    *("time_limit", "iterations", "seed", "precision", "optimizer", "reserve", "mode"),
    *("sequence_length", "recompute", "slowdown", "what_if", "pin", "forbid"),
)
"""Options of ``plan`` that the page may give: none of them names a file or code."""


@dataclass(slots=True, eq=False)
class Work:
    """A piece of work, and the way to whoever asked for it.

    Attributes:
        values: What was asked.
        documents: Titles and texts of the documents that it names, by key.
        pipe: Where frames go.
        folder: The run directory that it is about; empty = none.
    """

    values: Mapping[str, Any]
    documents: Mapping[str, tuple[str, str]]
    pipe: Pipe
    folder: str = ""
    _stopped: bool = False
    _looked_s: float = field(default_factory=time.monotonic)

    def say(self, what: str, body: str = "", **rest: object) -> None:
        """Send a frame."""
        head = json.dumps({"what": what, **rest})
        self.pipe.send_bytes(f"{head}\n{body}".encode())

    def words(self, text: str) -> None:
        """Tell of a step."""
        self.say("words", text=text)

    def stopped(self) -> bool:
        """Return whether to end with the best that there is; asks a few times a second."""
        now = time.monotonic()
        if not self._stopped and now - self._looked_s > _LOOK_S:
            self._looked_s = now
            self._stopped = self.pipe.poll(0) and self.pipe.recv_bytes() == STOP
        return self._stopped

    def put(self, role: str, title: str, value: object, about: str) -> None:
        """Hand on a document."""
        kind = format_of(type(value)).removeprefix("partita.")
        self.say("document", write_json(value), role=role, title=title, kind=kind, about=about)

    def show(self, page: Page) -> None:
        """Hand on figures."""
        self.say("page", json.dumps(page.to_json(), separators=(",", ":"), allow_nan=False))

    def text_of(self, name: str) -> tuple[str, str]:
        """Return title and text of a document that a value names."""
        if name not in self.documents:
            raise InvalidInputError(f"{name[:80]!r} is no document that was sent along")
        return self.documents[name]

    def held(self, name: str, *kinds: type, what: str) -> Any:  # noqa: ANN401 (any document)
        """Return the document that a value names.

        Raises:
            InvalidInputError: It holds something else.
        """
        title, text = self.text_of(name)
        found = read_document(title, text)
        if not isinstance(found, kinds):
            raise InvalidInputError(
                f"{title[:80]!r} holds a {type(found).__name__.lower()}; expected {what}"
            )
        return found


def read_document(title: str, text: str, problem: Problem | None = None) -> Any:  # noqa: ANN401
    """Return what a text holds, in any format that is known; it may name no other file.

    Raises:
        FormatError: It holds nothing that is known.
    """
    name = Path(title).name.split(".")[0]
    return read_any(text.encode(), name=name, problem=problem, formats=formats())


def is_configuration(text: str) -> bool:
    """Return whether a text is the ``config.json`` of a Hugging Face model.

    Raises:
        InvalidInputError: It names code or other files, which nothing from a browser may.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or "format" in found or "model_type" not in found:
        return False
    if naming := [name for name in found if name.strip("_") in _CONFIGURED_CODE]:
        raise InvalidInputError(
            f"the configuration names code ({naming[0]}); the page loads none: 'partita plan' "
            "takes such a file"
        )
    return True


@contextmanager
def configuration_at_hand(work: Work) -> Iterator[None]:
    """Let a configuration that is the model be a file in the folder of this process.

    What is planned then knows it as the command line does, whatever the file was called.
    """
    name = str(work.values.get("model", ""))
    if not name.startswith(HELD) or not is_configuration(work.text_of(name)[1]):
        yield
        return
    with TemporaryDirectory(prefix="partita-page-") as folder, chdir(folder):
        Path(CONFIGURATION).write_text(work.text_of(name)[1], encoding="utf-8")
        yield


def cluster_of(text: str) -> Cluster:
    """Return the cluster of a text: a shorthand, YAML, or our document.

    Raises:
        InvalidInputError: It is none.
    """
    text = text.strip()
    if not text:
        raise InvalidInputError("name a cluster: 2x4xa100, or the text of a cluster file")
    catalogue = load_catalogue()
    if "\n" in text or text.startswith("{") or ":" in text:
        return read_cluster(text, catalogue)
    return read_shorthand(text, catalogue)


def typed(request: type[Request], values: Mapping[str, Any], allowed: Sequence[str]) -> Any:  # noqa: ANN401
    """Return values of options as their declarations have them.

    Raises:
        InvalidInputError: An option is not one of those allowed, or a value is not of its type.
    """
    fields = {each.name: each for each in fields_of(request)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in allowed:
            raise InvalidInputError(f"the page has no option {name[:80]!r}")
        if value in ("", None, []):
            continue
        field_ = fields[name]
        each = value if isinstance(value, list) else [value]
        read = [_number(field_.kind, one, name) for one in each]
        found[name] = tuple(read) if field_.is_multiple else read[0]
    return found


def _number(kind: type, value: object, name: str) -> Any:  # noqa: ANN401 (of the field's type)
    text = str(value)
    if len(text) > 2000:
        raise InvalidInputError(f"{name} has {len(text):,} characters; expected fewer")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            words = "a whole number" if kind is int else "a number"
            raise InvalidInputError(f"{name} is {text[:40]!r}; expected {words}") from None
    return value if isinstance(value, bool) else text


def _planner(name: str) -> str:
    """Return a planner of the table that reads no file.

    Raises:
        InvalidInputError: It is none.
    """
    if (name in PLANNERS and name not in _NO_FILES) or _CUSTOM.fullmatch(name):
        return name
    known = ", ".join(each for each in PLANNERS if each not in _NO_FILES)
    raise InvalidInputError(f"the page has no planner {name[:80]!r}; there are {known}")


def model_of(work: Work, name: str) -> tuple[str | Graph | Problem, str]:
    """Return a model that is built in or was sent along, and how the command line names it.

    Raises:
        InvalidInputError: There is no such model; a path or code is none.
    """
    if name.startswith(HELD) and is_configuration(work.text_of(name)[1]):
        return CONFIGURATION, CONFIGURATION
    if name.startswith(HELD):
        found = work.held(name, Graph, Problem, Solution, what="a graph or a plan")
        return (found.problem if isinstance(found, Solution) else found), work.text_of(name)[0]
    if name in EXAMPLES:
        return name, name
    if _PLAIN.fullmatch(name) and is_model(name):
        return name, name
    near = suggest(name[:80], (*EXAMPLES, *large_names()))
    raise InvalidInputError(
        f"there is no model {name[:80]!r}{near}; others of 'partita models' are known by name, "
        "and a graph can be uploaded; the page opens no files and loads no code"
    )


def asked_of(
    work: Work, request: type[Request], allowed: Sequence[str], **more: object
) -> tuple[Any, Any]:
    """Return the request of a problem that the page asks for, and the same as one would type it."""
    values = dict(work.values)
    model, said = model_of(work, str(values.pop("model", "")))
    text = str(values.pop("cluster", "") or "")
    options = {**typed(request, values, allowed), **more}
    if "planner" in options:
        given = options["planner"]
        each = (given,) if isinstance(given, str) else given
        for name in each:
            _planner(name)
    cluster: Cluster | None = None
    named: str | None = None
    if text:
        title, body = work.text_of(text) if text.startswith(HELD) else ("cluster.yaml", text)
        cluster = cluster_of(body)
        plain = not text.startswith(HELD) and cluster.name == text.strip()
        named = text.strip() if plain or _is_shorthand(body) else title
    elif isinstance(model, str) and model not in EXAMPLES:
        raise InvalidInputError("name a cluster: 2x4xa100, or the text of a cluster file")
    done = make(request, model=model, cluster=cluster, **options)
    return done, make(request, model=said, cluster=named, **options)


def _is_shorthand(text: str) -> bool:
    return "\n" not in text.strip() and ":" not in text and "{" not in text


def typed_command(*words: str, request: Request) -> str:
    """Return the command that gives the same."""
    return shlex.join(["partita", *words, *arguments_of(request)])


def _plan(work: Work) -> None:
    """Plan a problem; tell of each better plan."""
    with configuration_at_hand(work):
        request, said = asked_of(work, PlanRequest, PLAN_FIELDS)
        result = searched(work, request)
    solution = result.solution
    name = f"{solution.problem.graph.name}.plan.json"
    command = typed_command("plan", request=said)
    points: Sequence[tuple[float, float]] = ()
    frontier = None
    answer = answer_of(solution)
    if isinstance(result, PlanResult):
        answer = result.answer
        points = () if result.trace is None else result.trace.points
        frontier = None if result.energy is None else result.energy.best.frontier
        _facts(work, result.posed.remarks)
    work.put("plan", name, solution, _about(solution))
    work.show(plan_page(answer, searched=points, frontier=frontier, command=command))


def searched(work: Work, request: PlanRequest) -> Any:  # noqa: ANN401 (either result)
    """Return what planning comes to; each better plan is told of, and it can be stopped."""
    bound = 0.0

    def better(seconds: float, value: float) -> None:
        gap = value / bound - 1 if bound > 0 else None
        work.say("point", seconds=seconds, value=value, gap=gap)

    def begun(problem: Problem) -> None:
        nonlocal bound
        bound = lower_bound(problem)
        work.say("search", unit=problem.objective.metric.row.unit, bound=bound)

    trace = SearchTrace(on_record=better, stopped=work.stopped)
    return plan_request(request, work.words, SearchWatch(trace=trace, on_problem=begun))


def _facts(work: Work, remarks: Sequence[str]) -> None:
    if remarks:
        work.say("fact", name="remarks", value=list(remarks))


def _about(solution: Solution) -> str:
    problem = solution.problem
    return (
        f"{problem.graph.name} on {problem.cluster.name}: {summarise(solution).title}, "
        f"{solution.value:.5g} {solution.unit}"
    )


def _show(work: Work) -> None:
    """Show a plan that the page has."""
    name = str(work.values.get("plan", ""))
    solution = work.held(name, Solution, what="a plan with its problem")
    title = work.text_of(name)[0]
    command = shlex.join(["partita", "report", title])
    work.put("plan", title, solution, _about(solution))
    work.show(plan_page(answer_of(solution), command=command))


def _read(work: Work) -> None:
    """Say what an uploaded document holds; what is foreign becomes a document of ours."""
    title, text = work.text_of(HELD)
    if is_configuration(text):
        kind = str(json.loads(text)["model_type"])[:80]
        about = f"Configuration of a Hugging Face model: {kind}"
        work.say("document", text, role="document", title=title, kind="config", about=about)
        return
    found = read_document(title, text)
    if isinstance(found, Plan):
        raise InvalidInputError(
            f"{title[:80]!r} is a bare plan; the page takes plans with their problem, as "
            "'partita plan' writes them"
        )
    known = (Graph, Problem, Solution, Cluster, Frontier, Trace, FleetHistory)
    if not isinstance(found, known):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{title[:80]!r} holds a {kind}; the page takes graphs, problems, clusters, plans, "
            "frontiers, traces, histories and a config.json"
        )
    work.put("document", title, found, _line_of(found))


def _line_of(value: Any) -> str:  # noqa: ANN401 (any document)
    from partita.report.notebook import line  # noqa: PLC0415 (where one is uploaded)

    if isinstance(value, Graph):
        return f"Graph {value.name}: {len(value)} ops"
    return line(value) if not isinstance(value, Trace) else f"Trace {value.name}: {len(value)} jobs"


def _compare(work: Work) -> None:
    """Rank several planners on a problem, or several plans that the page has."""
    names = work.values.get("plans")
    if names:
        found = [
            (work.text_of(str(n))[0], work.held(str(n), Solution, what="a plan")) for n in names
        ]
        plans = [NamedPlan(name=name, summary=summarise(each)) for name, each in found]
        graphs = dict.fromkeys(each.problem.graph.name for _, each in found)
        command = shlex.join(["partita", "report", *(name for name, _ in found)])
        work.show(compare_page(plans, title=", ".join(graphs), command=command))
        return
    from partita.flows.compare import CompareRequest, compare_request  # noqa: PLC0415 (here alone)

    with configuration_at_hand(work):
        request, said = asked_of(work, CompareRequest, PLAN_FIELDS)
        result = compare_request(request, work.words)
    plans = [
        NamedPlan(name=each.name, summary=each.summary)
        for each in result.candidates
        if each.summary is not None
    ]
    refused = [f"{each.name}: {each.refusal}" for each in result.candidates if each.refusal]
    if not plans:
        raise InvalidInputError("no planner found a plan that fits; " + "; ".join(refused))
    for each in plans:
        graph = each.summary.solution.problem.graph.name
        title = f"{graph}.{each.name.replace(':', '-')}.plan.json"
        solution = each.summary.solution
        work.put(f"plan {each.name}", title, solution, _about(solution))
    problem = result.problem
    page = compare_page(
        plans,
        title=f"{problem.graph.name} on {problem.cluster.name}",
        command=typed_command("compare", request=said),
    )
    work.show(replace(page, notes=[*page.notes, *refused]))


def _frontier(work: Work) -> None:
    """Find time against energy of a plan that the page has."""
    from partita.flows.energy.frontier import (  # noqa: PLC0415 (numba)
        FrontierRequest,
        frontier_request,
    )
    from partita.flows.pages import frontier_page  # noqa: PLC0415 (likewise)

    allowed = ("points", "tries", "straggler", "pipelines", "to_slowest")
    values = {name: value for name, value in work.values.items() if name != "plan"}
    options = typed(FrontierRequest, values, allowed)
    name = str(work.values.get("plan", ""))
    title = work.text_of(name)[0]
    source = work.held(name, Solution, Frontier, what="a plan or a frontier")
    if isinstance(source, Frontier) and not options:
        frontier = source
        said = make(FrontierRequest, source=title)
    else:
        result = frontier_request(make(FrontierRequest, source=source, **options), work.words)
        frontier = result.frontier
        said = make(FrontierRequest, source=title, **options)
    solution = frontier.solution
    graph = title if solution is None else solution.problem.graph.name
    page = frontier_page(
        frontier, name=graph, command=typed_command("energy", "frontier", request=said)
    )
    work.put("frontier", f"{graph}.frontier.json", frontier, page.summary[:300])
    work.show(page)


def _clocks(work: Work) -> None:
    """Choose a point of a frontier, and write its clocks."""
    from partita.flows.energy.choose import (  # noqa: PLC0415 (numba)
        ChooseRequest,
        ChosenClocks,
        choose_request,
    )

    name = str(work.values.get("frontier", ""))
    frontier = work.held(name, Frontier, what="a frontier")
    title = work.text_of(name)[0]
    allowed = ("slowdown", "deadline", "energy", "power", "straggler", "least_energy")
    values = {k: v for k, v in work.values.items() if k not in ("frontier", "point")}
    options = typed(ChooseRequest, values, allowed)
    if "point" in work.values:
        point = int(typed(ChooseRequest, {"deadline": work.values["point"]}, allowed)["deadline"])
        if not 0 <= point < len(frontier):
            raise InvalidInputError(f"point is {point}; expected 0 to {len(frontier) - 1}")
        limits = ChooseRequest(deadline=float(frontier.time_s[point])).limits()
        chosen = ChosenClocks(frontier=frontier, point=point, limits=limits)
        said = ChooseRequest(frontier=title, deadline=float(frontier.time_s[point]))
    else:
        chosen = choose_request(ChooseRequest(frontier=frontier, **options), work.words)
        said = ChooseRequest(frontier=title, **options)
    text = chosen.clock_plan()
    work.say(
        "document",
        text,
        role="clocks",
        title=f"freqs_pipeline_{chosen.point:05d}.py",
        kind="clocks",
        about=f"{len(text.splitlines())} lines of clocks, a step of {chosen.time_s:.5g} s",
    )
    work.say("fact", name="lines", value=chosen.lines())
    work.say("fact", name="command", value=typed_command("energy", "choose", request=said))


def _fleet(work: Work) -> None:
    """Play the jobs of a trace under several policies."""
    from partita.flows.fleet.simulate import (  # noqa: PLC0415 (scipy)
        SimulateFleetRequest,
        simulate_fleet_request,
    )
    from partita.flows.pages import fleet_page  # noqa: PLC0415 (likewise)

    values = dict(work.values)
    trace = str(values.pop("trace", "") or "generated:jobs=100")
    text = str(values.pop("cluster", "") or "")
    allowed = ("policy", "loads", "seed", "jobs", "round", "restart_cost", "quota", "power_cap")
    options = typed(SimulateFleetRequest, values, allowed)
    title = trace
    source: str | Trace = trace
    if trace.startswith(HELD):
        source, title = work.held(trace, Trace, what="a trace of jobs"), work.text_of(trace)[0]
    elif not _TRACE.fullmatch(trace):
        raise InvalidInputError(
            f"{trace[:80]!r} is no trace; expected generated:jobs=100,load=9,seed=1, or upload one"
        )
    cluster = {"cluster": cluster_of(text)} if text else {}
    named = {"cluster": text if _is_shorthand(text) else "cluster.yaml"} if text else {}
    request = make(SimulateFleetRequest, trace=source, **cluster, **options)
    result = simulate_fleet_request(request, work.words)
    said = make(SimulateFleetRequest, trace=title, **named, **options)
    name = result.study.question.trace.name
    work.put("history", f"{name}.history.json", result.history, "; ".join(result.lines()))
    command = typed_command("fleet", "simulate", request=said)
    page = fleet_page(result.runs, title=name, command=command)
    work.show(replace(page, notes=[*page.notes, *result.remarks]))


def _run(work: Work) -> None:
    """Show a run that left its results."""
    from partita.flows.pages import run_page  # noqa: PLC0415 (here alone)
    from partita.runtime.directory import read_run  # noqa: PLC0415 (likewise)

    folder = Path(work.folder)
    work.show(run_page(read_run(folder), command=shlex.join(["partita", "report", work.folder])))


JOBS: Mapping[str, Callable[[Work], None]] = {
    "plan": _plan,
    "show": _show,
    "compare": _compare,
    "frontier": _frontier,
    "clocks": _clocks,
    "fleet": _fleet,
    "run": _run,
    "read": _read,
}
"""What the page can ask for."""
QUICK = ("read", "show", "clocks")
"""What takes no longer than reading a document; it has a process of its own."""
ASKED = tuple(kind for kind in JOBS if kind not in ("run", "read"))
"""What a browser may name as work; the others have routes of their own."""


def work_for_page(pipe: Pipe, parent: int, memory_bytes: int) -> None:
    """Be the process that works: take what is asked, one after the other, until the pipe ends."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    while True:
        try:
            asked = pipe.recv_bytes()
        except EOFError:
            return
        if asked == STOP:  # it came after the work was done
            continue
        message = json.loads(asked)
        documents = {name: tuple(held) for name, held in message.get("documents", {}).items()}
        work = Work(
            values=message["values"],
            documents=documents,
            pipe=pipe,
            folder=message.get("folder", ""),
        )
        try:
            JOBS[message["kind"]](work)
            work.say("done")
        except PartitaError as exc:
            work.say("failed", text=str(exc))
        except MemoryError:
            work.say("failed", text="this needs more memory than it may have")
        except ModuleNotFoundError as exc:
            work.say("failed", text=str(UnsupportedError(f"this needs {exc.name}: pip install it")))
        except Exception as exc:  # noqa: BLE001 (a process border: whoever asked is told)
            work.say("failed", text=f"an error of ours: {type(exc).__name__}: {exc}")
        work.say("end")
