"""``partita fleet curve``: a job's speed by number and type of GPUs, with the planner."""

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import save
from partita.flows.fleet.curve import Curve, CurveRequest, fleet_curve_request
from partita.units import format_rate, format_seconds

_COLUMNS = (
    *(("GPUs", "right"), ("type", "left"), ("step", "right"), ("samples/s", "right")),
    *(("speed", "right"), ("of linear", "right"), ("plan", "left")),
)


@click.command(
    cls=Documented,
    name="curve",
    epilog="Example: partita fleet curve gpt-small --devices a100:1,2,4,8 --devices v100:2,4,8 "
    "-o gpt.json",
)
@takes(CurveRequest, without=("cluster", "seed"))
@click.option("-o", "--output", help="File for the sensitivity: FILE.json.")
@output_options
def command(
    request: CurveRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Plan MODEL on several numbers and types of GPUs, the same samples per step everywhere.

    The result is a sensitivity with points by number of GPUs, for elastic jobs: 'partita fleet
    trace --profiles FILE --elastic 1:8' draws some. A point that no plan fits is left out.
    """
    del debug  # read by main
    with progress("planning", quiet=quiet or as_json) as on_progress:
        found = fleet_curve_request(request, on_progress)
    if output:
        save(found.sensitivity, output)
    if as_json:
        print_json({**found.to_json(), "written": output})
    elif output != "-":
        _show(found, output)


def _show(found: Curve, output: str | None) -> None:
    console, part = stdout_console(), found.sensitivity
    fitting = [point for point in found.points if point.used]
    first = fitting[0]
    rows = []
    for point in fitting:
        speed = first.step_s / point.step_s
        linear = speed * first.gpus / point.gpus
        idle = "" if point.used == point.gpus else f", {point.gpus - point.used} idle"
        rows.append(
            [
                str(point.gpus),
                point.gpu_type,
                format_seconds(point.step_s),
                format_rate(point.samples_per_s),
                f"{speed:.2f}",
                f"{100 * linear:.0f} %" if point.gpu_type == first.gpu_type else "-",
                point.plan + idle,
            ]
        )
    console.print(
        f"{part.name} · planned, not measured · speed 1 = {first.gpus} x {first.gpu_type}"
    )
    console.print(table(_COLUMNS, rows))
    for point in found.points:
        if not point.used:
            console.print(f"{point.gpus} x {point.gpu_type}: {point.plan}", style="yellow")
    if found.has_frontier:
        watts = part.frontier_w
        console.print(
            f"time against energy of the plan at speed 1, modelled: {watts[0]:.0f} W per GPU at "
            f"full speed, {watts[-1]:.0f} W at {100 * part.frontier_speed[-1]:.0f} % of it"
        )
    else:
        console.print("no frontier: clocks or powers of the GPUs are not known")
    if output:
        console.print(f"written to {output}")
