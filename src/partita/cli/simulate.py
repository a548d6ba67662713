"""``partita simulate``: play a plan and look at it."""

import json
from pathlib import Path

import click
import numpy as np

from partita.cli.console import (
    breakdown_table,
    check_line,
    percent,
    picture_signs,
    print_json,
    print_point,
    print_remarks,
    progress,
    stdout_console,
    step_line,
    table,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.core.program import TransferMode
from partita.core.timeline import Timeline
from partita.documents import save, write_bytes, write_text
from partita.errors import InvalidInputError
from partita.flows.problem import objective_remarks
from partita.flows.simulate import SimulateRequest, Simulation, simulate_request
from partita.program.lower import lower
from partita.report.charts import memory_chart, render
from partita.report.picture import pipeline_picture
from partita.report.svg import timeline_svg
from partita.report.trace import chrome_trace
from partita.units import format_bytes


@click.command(
    cls=Documented,
    epilog="Example: partita simulate gpt-small.plan.json --trace trace.json --slow host0/gpu1=1.5",
)
@takes(SimulateRequest)
@click.option("--trace", help="Write a Chrome trace that Perfetto opens.")
@click.option("--picture", help="Write the pipeline as an SVG file.")
@click.option("--memory-picture", help="Write memory over the step: .svg, .png, .pdf.")
@click.option("--width", type=click.IntRange(40, 400), help="Columns of the picture.")
@click.option("-o", "--output", help="Write the timeline as a Partita document.")
@output_options
def command(
    request: SimulateRequest,
    *,
    trace: str | None,
    picture: str | None,
    memory_picture: str | None,
    width: int | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Play PLAN on its cluster and show pipeline, utilisation and memory.

    PLAN is what 'partita plan' wrote, or a bare plan with --graph and --cluster; - is stdin. Of a
    run directory, or the timeline.json in it, the step that was measured is shown.
    """
    del debug  # read by main
    with progress("simulating", quiet=quiet or as_json) as on_progress:
        found = simulate_request(request, on_progress)
    print_remarks(objective_remarks(request))
    written = _write(found, trace=trace, picture=picture, memory=memory_picture, output=output)
    if as_json:
        print_json({**found.to_json(), "written": written})
    elif output != "-":
        _show(found, width or terminal_width())
        for path in written:
            stdout_console().print(f"written: {path}")


def _show(found: Simulation, width: int) -> None:
    console, timeline, solution = stdout_console(), found.timeline, found.solution
    blocking = "" if found.transfers is TransferMode.OVERLAPPED else ", blocking transfers"
    print_point(console, "", f"{found.title} · {timeline.origin.value}{blocking}")
    console.print(step_line(solution.problem, solution.plan))
    colour, encoding = picture_signs(console)
    click.echo(pipeline_picture(timeline, width, colour=colour, encoding=encoding), nl=False)
    console.print(table(_DEVICE_COLUMNS, _device_rows(timeline)))
    console.print(breakdown_table(timeline.devices, found.memory))
    console.print(f"{found.step_words} · {check_line(found.report)}")


_DEVICE_COLUMNS = (
    ("device", "left"),
    ("busy", "right"),
    ("idle", "right"),
    ("peak memory", "right"),
    ("limit", "right"),
    ("headroom", "right"),
)


def _device_rows(timeline: Timeline) -> list[list[str]]:
    rows = []
    for index, name in enumerate(timeline.devices):
        peak, limit = float(timeline.peak_bytes[index]), float(timeline.limit_bytes[index])
        rows.append(
            [
                name,
                percent(float(timeline.utilisation[index])),
                percent(float(timeline.bubble[index])),
                format_bytes(peak) if timeline.has_memory else "-",
                format_bytes(limit) if np.isfinite(limit) else "-",
                format_bytes(limit - peak) if timeline.has_memory and np.isfinite(limit) else "-",
            ]
        )
    return rows


def _write(
    found: Simulation,
    *,
    trace: str | None,
    picture: str | None,
    memory: str | None,
    output: str | None,
) -> list[str]:
    """Write the files that were asked for; return their names."""
    if picture and Path(picture).suffix.lower() != ".svg":
        raise InvalidInputError(f"--picture {picture!r}: only .svg files can be written")
    problem = found.solution.problem
    if trace:
        text = chrome_trace(
            found.timeline,
            program=lower(problem, found.solution.plan),
            tensor_names=problem.graph.tensors.names,
        )
        json.loads(text)
        write_text(trace, text)
    if picture:
        write_text(picture, timeline_svg(found.timeline, title=found.title))
    if memory:
        title = f"{found.title}: memory of a step ({found.timeline.origin.value})"
        write_bytes(memory, render(lambda: memory_chart(found.timeline, title=title), memory))
    if output:
        save(found.timeline, output)
    return [path for path in (trace, picture, memory, output) if path]
