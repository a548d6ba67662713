"""``partita plan``: from a model and a cluster to a plan."""

from pathlib import Path

import click

from partita.cli.console import (
    alternatives_table,
    basis_line,
    bound_line,
    effort_line,
    memory_table,
    model_line,
    overfull_line,
    print_json,
    print_remarks,
    progress,
    reserve_line,
    rules_line,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    unused_line,
)
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.documents import save, unused_path, write_bytes, write_text
from partita.flows.plan import NothingFitsError, PlanRequest, PlanResult, plan_request


@click.command(
    epilog="Example: partita plan gpt-small --cluster 2x4xa100+1x2xv100 --microbatches 32\n\n"
    "partita plan gpt3-xl --cluster 2x4xa100+4xv100 --pin 'blocks.0=host0/*'\n\n"
    "partita plan resnet50 --cluster 6xa40+2xa100 --microbatches 16 --objective energy"
)
@takes(PlanRequest)
@click.option("-o", "--output", help="Where to write the plan; - is stdout. [NAME.plan.json]")
@output_options
def command(
    request: PlanRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Plan MODEL over a cluster and write the plan.

    MODEL is a built-in example (gpt-small, resnet50, chain201, ...), a Partita document, or any
    graph file that 'partita convert' reads; - is stdin. A model of 'partita models', a Hugging Face
    configuration (hf:tiny-llama) or package.module:callable is estimated for the devices of the
    cluster. MODEL may be left out where the cluster file names its profiles. With --json no file is
    written unless -o names one.

    With --objective energy the plan and the clocks of least joules per sample are searched, by a
    model of the devices, among plans that are at most --slowdown slower than the fastest.

    Where no plan fits it exits with 3, and says what is the least that makes it fit.
    """
    del debug  # read by main
    with progress("planning", quiet=quiet or as_json) as on_progress:
        try:
            result = plan_request(request, on_progress)
        except NothingFitsError as exc:
            if as_json:
                print_json(exc.to_json())
            raise
    print_remarks(result.posed.remarks)
    name = f"{result.problem.graph.name}.plan.json"
    target = output or (None if as_json else str(unused_path(Path(name))))
    if target is not None and target != "-":
        save(result.solution, target)
    traced = _write_trace(result, request.trace_search)
    if as_json:
        print_json({**result.to_json(), "written": target, "traced": traced})
    elif target == "-":
        save(result.solution, "-")
    else:
        _show(result, str(target))
        if traced:
            stdout_console().print(f"search traced in {' and '.join(traced)}")


def _write_trace(result: PlanResult, file: str | None) -> list[str]:
    """Write what the search found over time, if it was recorded; return the names of the files."""
    if result.trace is None or file is None:
        return []
    from partita.report.charts import (  # noqa: PLC0415 (only where a search is drawn)
        ENDINGS,
        render,
        search_chart,
        search_csv,
    )

    ending = Path(file).suffix
    stem = Path(file).with_suffix("") if ending in (".csv", *ENDINGS) else Path(file)
    picture = f"{stem}{ending if ending in ENDINGS else '.svg'}"
    solution, points = result.searched, result.trace.points
    title = f"{solution.problem.graph.name} by {solution.planner}"
    unit = f"{solution.metric.value}, {solution.unit}"
    drawn = render(lambda: search_chart(points, title=title, unit=unit), picture)
    write_text(f"{stem}.csv", search_csv(points))
    write_bytes(picture, drawn)
    return [f"{stem}.csv", picture]


def _show(result: PlanResult, target: str) -> None:
    console, answer, problem = stdout_console(), result.answer, result.problem
    summary = answer.summary
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    console.print(step_line(problem, summary.solution.plan))
    console.print(summary_table([summary_row(1, summary, result.planner.name)]))
    console.print(memory_table(summary))
    if line := reserve_line(problem):
        console.print(line)
    console.print(f"bound by: {summary.evaluation.bottleneck}")
    if summary.overfull:
        console.print(overfull_line(summary), style="yellow")
    console.print(bound_line(summary))
    for line in (unused_line(summary), effort_line(answer), rules_line(problem)):
        if line:
            console.print(line)
    if result.energy is not None:
        from partita.cli.plan_energy import show_energy  # noqa: PLC0415 (numba)

        show_energy(console, result.energy)
    elif answer.alternatives:
        console.print(alternatives_table(answer))
    console.print(f"written to {target}")
    for line in summary.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")
    more = f" · partita energy frontier {target}" if result.energy is not None else ""
    console.print(f"next: partita explain {target} · partita simulate {target}{more}", style="dim")
