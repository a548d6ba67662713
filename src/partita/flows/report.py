"""Plans, runs, frontiers and fleets as one HTML file: what ``partita.write_report`` does."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.core.energy import Frontier
from partita.core.fleet import FleetHistory
from partita.core.plan import Plan
from partita.core.solution import Solution
from partita.documents import open_file, write_text
from partita.errors import InvalidInputError
from partita.fleet.study.study import run_of
from partita.flows.answer import answer_of
from partita.flows.pages import (
    NamedPlan,
    compare_page,
    fleet_page,
    frontier_page,
    plan_page,
    run_page,
)
from partita.flows.results import Result
from partita.flows.solutions import SolutionRequest, read_solution
from partita.flows.summary import summarise
from partita.report.page import Page, render_page
from partita.requests import OnProgress, Request, arguments_of, declare, make, silent
from partita.runtime.directory import has_results, read_run
from partita.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ReportRequest(Request):
    """What to show, and where to write it."""

    things: tuple[str, ...] = declare(
        (),
        is_argument=True,
        is_required=True,
        metavar="THING...",
        help="Plans, a run directory, a frontier, or histories of a fleet.",
    )
    output: str = declare("report.html", flags=("-o",), help="File to write; - is stdout.")
    graph: str | None = declare(None, help="The graph, where a thing is a bare plan.")
    cluster: str | None = declare(
        None, flags=("-c",), help="The cluster, where a thing is a bare plan."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Report(Result):
    """A report that was written.

    Attributes:
        page: What it shows.
        html: The file.
        output: Where it was written.
    """

    page: Page
    html: str
    output: str

    def to_json(self) -> dict[str, Any]:
        """Return its words as JSON values, without the figures."""
        return {
            "title": self.page.title,
            "summary": self.page.summary,
            "facts": {label: value for value, label in self.page.facts},
            "figures": [
                figure["title"] for section in self.page.sections for figure in section.figures
            ],
            "bytes": len(self.html.encode("utf-8")),
            "written": self.output,
        }

    def lines(self) -> list[str]:
        """Return the summary, and where the report is."""
        size = format_bytes(len(self.html.encode("utf-8")))
        return [self.page.title, self.page.summary, f"{self.output}: {size}, opens in any browser"]


def write_report(
    *things: str,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ReportRequest)
) -> Report:
    """Write plans, a run, a frontier or a fleet's histories as one HTML file that needs no network.

    Args:
        *things: Paths: a plan, several plans, a run directory, a frontier, or fleet histories.
        on_progress: Called with each thing.
        **options: The fields of :class:`ReportRequest`: the options of ``partita report``.

    Raises:
        InvalidInputError: The things cannot be shown together, or one of them not at all.
    """
    return report_request(make(ReportRequest, things=things, **options), on_progress)


def report_request(request: ReportRequest, on_progress: OnProgress = silent) -> Report:
    """Write the report that a request asks for; see :func:`write_report`."""
    command = shlex.join(("partita", "report", *arguments_of(request)))
    page = _page(request, on_progress, command)
    return save_page(page, request.output)


def save_page(page: Page, output: str) -> Report:
    """Write a page as one HTML file."""
    text = render_page(page)
    write_text(output, text)
    return Report(page=page, html=text, output=output)


def _page(request: ReportRequest, on_progress: OnProgress, command: str) -> Page:
    if not request.things:
        raise InvalidInputError("name what to show: a plan, a run directory, a frontier, a history")
    if len(request.things) == 1 and Path(request.things[0]).is_dir():
        folder = Path(request.things[0])
        if not has_results(folder):
            raise InvalidInputError(f"{folder} holds no results.json; it is no run directory")
        on_progress(folder.name)
        return run_page(read_run(folder), command=command)
    found = [_read(name, request, on_progress) for name in request.things]
    names = [Path(name).name for name in request.things]
    if all(isinstance(each, Solution) for each in found):
        return _plans_page(found, names, command)
    if all(isinstance(each, FleetHistory) for each in found):
        runs = [run_of(each) for each in found]
        return fleet_page(runs, title=runs[0].history.trace, command=command)
    if len(found) == 1 and isinstance(found[0], Frontier):
        solution = found[0].solution
        name = names[0] if solution is None else solution.problem.graph.name
        return frontier_page(found[0], name=name, command=command)
    if len(found) == 1:
        kind = type(found[0]).__name__.lower()
        raise InvalidInputError(
            f"{request.things[0]} holds a {kind}; a report shows plans, runs, frontiers and fleets"
        )
    kinds = sorted({type(each).__name__.lower() for each in found})
    raise InvalidInputError(
        f"a report shows one run or frontier, or several plans or histories; got {', '.join(kinds)}"
    )


def _read(name: str, request: ReportRequest, on_progress: OnProgress) -> Any:  # noqa: ANN401
    on_progress(name)
    if Path(name).is_dir():
        raise InvalidInputError(f"{name} is a run directory, which is shown alone")
    file = open_file(name)
    found = None if request.graph is not None else file.load()
    if found is None or isinstance(found, Plan):
        return read_solution(
            SolutionRequest(plan=file, graph=request.graph, cluster=request.cluster)
        )
    return found


def _plans_page(solutions: Sequence[Solution], names: Sequence[str], command: str) -> Page:
    if len(solutions) == 1:
        return plan_page(answer_of(solutions[0]), command=command)
    plans = [
        NamedPlan(name=name, summary=summarise(solution))
        for name, solution in zip(names, solutions, strict=True)
    ]
    graphs = dict.fromkeys(solution.problem.graph.name for solution in solutions)
    return compare_page(plans, title=", ".join(graphs), command=command)
