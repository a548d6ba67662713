"""``partita replan``: a plan against a run of it, and whether another plan is faster."""

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import save
from partita.flows.replan import ReplanRequest, ReplanResult, replan_request

_COLUMNS = (("compute and links", "left"), ("measured / thought", "right"))


@click.command(
    cls=Documented,
    epilog="Example: partita replan gpt3-small.plan.json --measured "
    "runs/2026-11-16_gpt3-small_2xcpu_1f1b_001 -o faster.plan.json",
)
@takes(ReplanRequest)
@click.option(
    "-o", "--output", help="Write the best plan that was found to this file; - is stdout."
)
@output_options
def command(
    request: ReplanRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Recalibrate the costs of PLAN from a measured run, plan again, and say if it is worth it.

    RUN is a directory that 'partita run' or 'partita train' left, its name under --runs, the
    timeline of a step, or a directory of traces of torch's profiler. Compute of each device and
    stage and the links take as long as they were measured. One line says whether another plan is at
    least --least-gain faster; it exits with 0 either way.
    """
    del debug  # read by main
    with progress("planning again", quiet=quiet or as_json) as on_progress:
        result = replan_request(request, on_progress)
    if output is not None:
        save(result.solution, output)
    if as_json:
        print_json({**result.to_json(), "written": output})
    elif output != "-":
        _show(result, output)


def _show(result: ReplanResult, output: str | None) -> None:
    console, found = stdout_console(), result.calibration
    rows = [[f"compute on {name}", f"{factor:.3g} x"] for name, factor in found.seen.items()]
    for name, factors in found.levels.items():
        low, high = min(factors), max(factors)
        words = f"{low:.3g} x" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g} x"
        rows.append([f"links of level {name}", words])
    console.print(table(_COLUMNS, rows))
    verdict, *more = result.lines()
    for line in (*more, verdict):
        console.print(line, style="bold" if line is verdict else None)
    if output is not None:
        console.print(f"written to {output}")
