"""``partita simulate``: play a plan and look at it."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import (
    check_line,
    percent,
    print_json,
    progress,
    stdout_console,
    step_line,
    table,
    terminal_width,
)
from partita.cli.inputs import read_solution, take_problem_options
from partita.cli.options import cluster_options, output_options, problem_options
from partita.core.codec import encode
from partita.core.json_values import number_or_none
from partita.core.program import TransferMode
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.judge import check
from partita.cost.predict import Disturbance, simulate
from partita.documents import save, write_bytes, write_text
from partita.errors import InvalidInputError
from partita.flows.summary import describe_plan
from partita.program.lower import lower
from partita.report.charts import memory_chart, render
from partita.report.picture import pipeline_picture
from partita.report.svg import timeline_svg
from partita.report.trace import chrome_trace
from partita.units import format_bytes, format_seconds


@click.command(
    epilog="Example: partita simulate gpt-small.plan.json --trace trace.json --slow host0/gpu1=1.5"
)
@click.argument("plan")
@click.option("--graph", help="The graph, where PLAN is a bare plan.")
@cluster_options
@problem_options
@click.option("--slow", multiple=True, help="Straggler: DEVICE=FACTOR, several times.")
@click.option("--perturb", type=float, default=0.0, help="Times x uniform(1 - P, 1 + P).")
@click.option("--seed", type=int, default=0, help="Of the perturbation.")
@click.option(
    "--transfers",
    type=click.Choice([mode.value for mode in TransferMode]),
    default=TransferMode.OVERLAPPED.value,
    help="Whether messages travel beside compute, or hold both devices.",
)
@click.option("--period", is_flag=True, help="Find the steady period of steps, too.")
@click.option("--trace", help="Write a Chrome trace that Perfetto opens.")
@click.option("--picture", help="Write the pipeline as an SVG file.")
@click.option("--memory-picture", help="Write memory over the step: .svg, .png, .pdf.")
@click.option("--width", type=click.IntRange(40, 400), help="Columns of the picture.")
@click.option("-o", "--output", help="Write the timeline as a Partita document.")
@output_options
def command(plan: str, graph: str | None, **rest: Any) -> None:
    """Play PLAN on its cluster and show pipeline, utilisation and memory.

    PLAN is what 'partita plan' wrote, or a bare plan with --graph and --cluster; - is stdin.
    """
    rest.pop("debug")
    solution = read_solution(plan, graph, take_problem_options(rest))
    disturbance = Disturbance(
        slow=_factors(rest["slow"]), perturb=rest["perturb"], seed=rest["seed"]
    )
    transfers = TransferMode(rest["transfers"])
    quiet = rest["quiet"] or rest["as_json"]
    with progress("simulating", quiet=quiet) as tell:
        tell(solution.problem.graph.name)
        report = check(solution.problem, solution.plan)
        period = rest["period"] or solution.plan.stashes_weights
        timeline = simulate(
            solution.problem,
            solution.plan,
            disturbance=disturbance,
            transfers=transfers,
            period=period,
        )
    written = _write(solution, timeline, rest)
    if rest["as_json"]:
        print_json({**_figures(solution, timeline, transfers), "written": written})
        return
    console = stdout_console()
    how = "simulated" if transfers is TransferMode.OVERLAPPED else "simulated, blocking transfers"
    console.print(f"{solution.problem.graph.name} · {describe_plan(solution.plan)} · {how}")
    console.print(step_line(solution.problem, solution.plan))
    width = rest["width"] or terminal_width()
    click.echo(pipeline_picture(timeline, width, colour=console.is_terminal), nl=False)
    console.print(table(_DEVICE_COLUMNS, _device_rows(timeline)))
    step = f"step {format_seconds(timeline.makespan_s)} from idle"
    if np.isfinite(timeline.period_s):
        step += f", {format_seconds(timeline.period_s)} in steady state"
    console.print(f"{step} · {check_line(report)}")
    for path in written:
        console.print(f"written: {path}")


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
                format_bytes(peak),
                format_bytes(limit) if np.isfinite(limit) else "-",
                format_bytes(limit - peak) if np.isfinite(limit) else "-",
            ]
        )
    return rows


def _factors(pairs: tuple[str, ...]) -> dict[str, float]:
    result = {}
    for pair in pairs:
        name, sign, factor = pair.rpartition("=")
        try:
            if not sign:
                raise ValueError
            result[name] = float(factor)
        except ValueError:
            raise InvalidInputError(f"--slow {pair!r} is not of the form DEVICE=FACTOR") from None
    return result


def _write(solution: Solution, timeline: Timeline, rest: dict[str, Any]) -> list[str]:
    written = []
    if rest["trace"]:
        names = solution.problem.graph.tensors.names
        program = lower(solution.problem, solution.plan)
        text = chrome_trace(timeline, program=program, tensor_names=names)
        json.loads(text)
        write_text(rest["trace"], text)
        written.append(rest["trace"])
    if rest["picture"]:
        target = Path(rest["picture"])
        if target.suffix.lower() != ".svg":
            raise InvalidInputError(f"--picture {str(target)!r}: only .svg files can be written")
        write_text(target, timeline_svg(timeline))
        written.append(str(target))
    if rest["memory_picture"]:
        title = f"{solution.problem.graph.name}: memory of a step (simulated)"
        drawn = render(lambda: memory_chart(timeline, title=title), rest["memory_picture"])
        write_bytes(rest["memory_picture"], drawn)
        written.append(rest["memory_picture"])
    if rest["output"]:
        save(timeline, rest["output"])
        written.append(rest["output"])
    return written


def _figures(solution: Solution, timeline: Timeline, transfers: TransferMode) -> dict[str, Any]:
    return {
        "model": solution.problem.graph.name,
        "plan": describe_plan(solution.plan),
        "origin": timeline.origin.value,
        "transfers": transfers.value,
        "makespan_s": timeline.makespan_s,
        "period_s": number_or_none(timeline.period_s),
        "instructions": len(timeline),
        "devices": [
            {
                "device": name,
                "busy_s": float(timeline.busy_s[index]),
                "utilisation": float(timeline.utilisation[index]),
                "bubble": float(timeline.bubble[index]),
                "peak_bytes": float(timeline.peak_bytes[index]),
                "limit_bytes": number_or_none(float(timeline.limit_bytes[index])),
            }
            for index, name in enumerate(timeline.devices)
        ],
        "critical_path": timeline.critical_path.tolist(),
        "objective": encode(solution.problem.objective),
    }
