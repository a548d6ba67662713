"""``partita compare``: several planners, one ranked table."""

import shlex
from typing import TYPE_CHECKING

import click

from partita.cli.console import (
    basis_line,
    bound_line,
    model_line,
    print_json,
    print_remarks,
    progress,
    reserve_line,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    table,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, report_option, write_page
from partita.documents import save
from partita.errors import InfeasibleError
from partita.flows.compare import CompareRequest, Comparison, compare_request
from partita.requests import arguments_of

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyColumns
    from partita.report.page import Page


@click.command(
    cls=Documented,
    epilog="Example: partita compare resnet50 --cluster 4xa100 -p single -p uniform -p random:1",
)
@takes(CompareRequest)
@click.option("-o", "--output", help="Write the best plan to this file.")
@report_option
@output_options
def command(
    request: CompareRequest,
    *,
    output: str | None,
    report_file: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Run several planners on MODEL and rank what they find.

    --time-limit and --iterations go to the planners that search.
    """
    del debug  # read by main
    with progress("comparing", quiet=quiet or as_json) as on_progress:
        found = compare_request(request, on_progress)
    print_remarks(found.posed.remarks)
    if found.best is not None and output is not None:
        save(found.best.solution, output)
    if found.best is not None and report_file is not None:
        write_page(_page(found, request), report_file, quiet=quiet or as_json)
    if as_json:
        print_json(found.to_json())
    elif output != "-":
        _show(found)
        if found.best is not None and output is not None:
            stdout_console().print(f"best plan written to {output}")
    if found.best is None:
        raise InfeasibleError("no planner found a plan that fits")


def _page(found: Comparison, request: CompareRequest) -> "Page":
    """Return the plans side by side, with the command that makes them again."""
    from partita.flows.pages import NamedPlan, compare_page  # noqa: PLC0415 (where it is asked for)

    plans = [
        NamedPlan(name=each.name, summary=each.summary)
        for each in found.candidates
        if each.summary is not None
    ]
    return compare_page(
        plans,
        title=f"{found.problem.graph.name} on {found.problem.cluster.name}",
        command=shlex.join(["partita", "compare", *arguments_of(request)]),
    )


def _show(found: Comparison) -> None:
    console, problem = stdout_console(), found.problem
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    console.print(step_line(problem))
    rows = [
        summary_row(rank, each.summary, each.name)
        for rank, each in enumerate(found.candidates, 1)
        if each.summary is not None
    ]
    if rows:
        console.print(summary_table(rows))
    if line := reserve_line(problem):
        console.print(line)
    if found.energy:
        console.print("energy is modelled:")
        console.print(table(_ENERGY_COLUMNS, [_energy_row(*pair) for pair in found.energy.items()]))
    for each in found.candidates:
        if each.summary is None:
            console.print(f"{each.name}: {each.refusal}", style="yellow")
    for name, changes in found.changes.items():
        console.print(f"from {name} to {found.candidates[0].name}:", markup=False)
        for line in changes:
            console.print(f"  {line}", markup=False, highlight=False)
    if found.best is not None:
        console.print(bound_line(found.best, "the first"))


_ENERGY_COLUMNS = (
    *(("planner", "left"), ("T_min", "right"), ("T*", "right"), ("J/sample, all-max", "right")),
    *(("in T_min", "right"), ("in T*", "right"), ("gap to bound", "right")),
)


def _energy_row(name: str, energy: "EnergyColumns") -> list[str]:
    return [
        name,
        f"{energy.fastest_s:.5g} s",
        f"{energy.best_s:.5g} s",
        f"{energy.all_max_j:.5g}",
        f"{energy.fastest_j:.5g}",
        f"{energy.best_j:.5g}",
        f"{100 * energy.gap:.2f} %",
    ]
