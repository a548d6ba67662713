"""``partita fleet curve``: a job's speed by number and type of GPUs, with the planner."""

import dataclasses
import re
from typing import Any

import click

from partita.cli.console import format_rate, print_json, progress, stdout_console, table
from partita.cli.inputs import (
    ProblemOptions,
    read_asked,
    read_catalogue,
    read_planner,
    take_effort_options,
    take_problem_options,
)
from partita.cli.options import (
    choice_options,
    estimate_options,
    output_options,
    shape_options,
    step_options,
)
from partita.core.problem import Problem
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.curves import Curve, planner_curve
from partita.planners.table import get_planner
from partita.units import format_seconds, parse_bytes

MOST_POINTS = 64
_COLUMNS = (
    *(("GPUs", "right"), ("type", "left"), ("step", "right"), ("samples/s", "right")),
    *(("speed", "right"), ("of linear", "right"), ("plan", "left")),
)


@click.command(
    name="curve",
    epilog="Example: partita fleet curve gpt-small --devices a100:1,2,4,8 --devices v100:2,4,8 "
    "-o gpt.json",
)
@click.argument("model")
@click.option(
    "--devices",
    "counts",
    multiple=True,
    required=True,
    metavar="TYPE:N,N",
    help="A type of GPU and the numbers of it; several times. The first is speed 1.",
)
@click.option("--bandwidth", help="Bandwidth by level: host=25GB/s,rack=1e9.")
@click.option("--latency", help="Latency by level: host=5us.")
@click.option("--catalogue", "catalogue_file", help="Your own device types, a YAML file.")
@step_options
@choice_options
@shape_options
@estimate_options
@click.option("--name", help="Of the job. [MODEL]")
@click.option("--kind", default="", help="Class of the job, such as language.")
@click.option(
    "--cpus-per-gpu",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="CPUs that a GPU of the job needs.",
)
@click.option("--memory-per-gpu", default="8GB", show_default=True, help="Main memory, likewise.")
@click.option("-o", "--output", help="Write it as a sensitivity: FILE.json.")
@output_options
def command(model: str, **rest: Any) -> None:
    """Plan MODEL on several numbers and types of GPUs, the same samples a step everywhere.

    The result is a sensitivity with points by number of GPUs, for elastic jobs: 'partita fleet
    trace --profiles FILE --elastic 1:8' draws some. A point that no plan fits is left out.
    """
    rest.pop("debug")
    effort = take_effort_options(rest)
    chosen = (rest.pop("planner"), rest.pop("partition"), rest.pop("options"), None)
    planner, values = read_planner(*chosen, effort)
    options = take_problem_options(rest)
    quiet = rest["quiet"] or rest["as_json"]
    with progress("planning", quiet=quiet) as tell:
        found = planner_curve(
            _problems(model, rest["counts"], options),
            get_planner(planner, **values),
            name=rest["name"] or model.rsplit("/", 1)[-1].removesuffix(".json"),
            kind=rest["kind"],
            share=(
                rest["cpus_per_gpu"],
                parse_bytes(rest["memory_per_gpu"], "--memory-per-gpu") / 1e9,
            ),
            progress=tell,
        )
    if rest["output"]:
        save(found.sensitivity, rest["output"])
    if rest["as_json"]:
        print_json(
            {
                "name": found.sensitivity.name,
                "points": found.to_json(),
                "frontier": "modelled" if found.has_frontier else None,
                "written": rest["output"],
            }
        )
    elif rest["output"] != "-":
        _show(found, rest["output"])


def _problems(
    model: str, texts: tuple[str, ...], options: ProblemOptions
) -> dict[tuple[str, int], Problem]:
    catalogue = read_catalogue(options)
    problems: dict[tuple[str, int], Problem] = {}
    for text in texts:
        kind, colon, numbers = text.lower().partition(":")
        if not colon or not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", numbers):
            raise InvalidInputError(f"--devices {text!r} is not of the form TYPE:1,2,4")
        held = catalogue.device_type(kind).host_max_devices or 8
        for count in sorted(map(int, numbers.split(","))):
            if count > held and count % held:
                raise InvalidInputError(
                    f"--devices {text!r}: {count} GPUs do not fill hosts of {held}; more than one "
                    f"host takes a multiple of {held}"
                )
            cluster = f"{count}x{kind}" if count <= held else f"{count // held}x{held}x{kind}"
            if len(problems) >= MOST_POINTS:
                raise InvalidInputError(f"--devices: more than {MOST_POINTS} points")
            here = dataclasses.replace(options, cluster=cluster)
            problems[kind, count] = read_asked(model, here).problem
    return problems


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
            f"time against energy of the plan at speed 1, modelled: {watts[0]:.0f} W a GPU at full "
            f"speed, {watts[-1]:.0f} W at {100 * part.frontier_speed[-1]:.0f} % of it"
        )
    else:
        console.print("no frontier: clocks or powers of the GPUs are not known")
    if output:
        console.print(f"written to {output}")
