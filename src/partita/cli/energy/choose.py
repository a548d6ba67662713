"""``partita energy choose``: a point of a frontier, its clocks, and how they look."""

from dataclasses import dataclass
from typing import Any

import click

from partita.cli.console import print_json, progress, stdout_console
from partita.cli.energy.frontier import write_picture
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.core.energy import Frontier
from partita.documents import load, write_text
from partita.energy.frontier.choose import PointLimits, choose_point
from partita.energy.frontier.frontier import TRIES
from partita.energy.frontier.savings import model_of, played, sources_of, waiting_w, with_point_at
from partita.errors import InvalidInputError
from partita.flows.energy import ORIGIN_WORDS, claims, share
from partita.flows.summary import describe_plan
from partita.formats.perseus import write_clock_plan
from partita.report.charts import ORIGINS
from partita.report.clock_svg import clock_svg
from partita.requests import Request, declare
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class ChooseRequest(Request):
    """A frontier, and the limits that the chosen point has to keep."""

    frontier: str = declare("", is_argument=True, help="What 'partita energy frontier -o' wrote.")
    slowdown: float | None = declare(None, help="Slower than all-max by at most: 0.02 = 2 %.")
    deadline: float | None = declare(None, help="Seconds that a step may take.")
    energy: float | None = declare(None, help="Joules that a step may use.")
    power: float | None = declare(None, help="Watts that all devices may draw on average.")
    straggler: float | None = declare(None, help="Seconds that somebody makes all steps take.")
    least_energy: bool = declare(False, help="Choose the point of least energy, T*.")
    tries: int = declare(
        TRIES,
        minimum=0,
        maximum=100_000_000,
        help="How long to search for better clocks where the gap to the bound is large.",
    )

    def limits(self) -> PointLimits:
        """Return the limits."""
        return PointLimits(
            least_energy=self.least_energy,
            slowdown=self.slowdown,
            deadline_s=self.deadline,
            energy_j=self.energy,
            power_w=self.power,
            straggler_s=self.straggler,
        )


@click.command(
    epilog="Example: partita energy choose frontier.json --slowdown 0.02 -o clocks.py "
    "--picture clocks.svg"
)
@takes(ChooseRequest)
@click.option("-o", "--output", help="Write the clocks as a plan that Zeus and Perseus read.")
@click.option("--unnamed", is_flag=True, help="Clocks without names, as Perseus's artifact reads.")
@click.option("--picture", help="Write the step coloured by clock, an SVG file.")
@output_options
def command(
    request: ChooseRequest,
    *,
    output: str | None,
    unnamed: bool,
    picture: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Choose the point of FRONTIER that keeps some limits; without any the fastest.

    FRONTIER is what 'partita energy frontier -o' wrote. Within limits of time the cheapest point is
    taken, solved for where the frontier has none at the limit; within limits of energy and power
    the fastest of its points. With a straggler it is the point at min(T*, T').
    """
    del debug  # read by main
    found = load(request.frontier)
    if not isinstance(found, Frontier):
        raise InvalidInputError(
            f"{request.frontier!r} holds a {type(found).__name__.lower()}, not a frontier; make "
            "one with 'partita energy frontier -o'"
        )
    if unnamed and not output:
        raise InvalidInputError("--unnamed needs -o, the plan that it is about")
    limits = request.limits()
    limit_s = _time_limit(found, limits)
    if limit_s is not None:
        with progress("choosing", quiet=quiet or as_json) as on_progress:
            on_progress(f"the point at {limit_s:.5g} s")
            found = with_point_at(found, limit_s, tries=request.tries)
    point = choose_point(found, limits)
    written = []
    if picture:
        written.append(_write_picture(found, point, picture))
    if output:
        written.append(_write_clocks(found, point, output, named=not unnamed))
    figures = _figures(found, point, limits)
    if as_json:
        print_json({**figures, "written": written})
        return
    console = stdout_console()
    console.print(_line(found, point))
    if figures["waiting_j"] is not None:
        console.print(
            f"waiting for the straggler until {limits.straggler_s:.5g} s: "
            f"{format_joules(figures['waiting_j'])} more"
        )
    for path in written:
        console.print(f"written: {path}")


def _time_limit(frontier: Frontier, limits: PointLimits) -> float | None:
    """Return the seconds that a step may take; None where nothing limits it."""
    times = [limit for limit in (limits.deadline_s, limits.straggler_s) if limit is not None]
    if limits.slowdown is not None:
        times.append(frontier.all_max_s * (1 + limits.slowdown))
    return min(times, default=None)


def _line(frontier: Frontier, point: int) -> str:
    time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
    beats = ", faster and cheaper than all-max" if point in frontier.better_than_all_max else ""
    return (
        f"point {point} of {len(frontier)}: step {time_s:.5g} s "
        f"({100 * (time_s / frontier.all_max_s - 1):+.2f} %), {format_joules(energy_j)} "
        f"({share(energy_j / frontier.all_max_j - 1)} against all-max{beats}) · "
        f"gap to bound {100 * float(frontier.gap[point]):.2f} % · {ORIGIN_WORDS[frontier.origin]}"
    )


def _figures(frontier: Frontier, point: int, limits: PointLimits) -> dict[str, Any]:
    time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
    waiting = None
    if (
        limits.straggler_s is not None
        and limits.straggler_s > time_s
        and frontier.profile is not None
    ):
        waiting = waiting_w(frontier) * (limits.straggler_s - time_s)
    return {
        "point": point,
        "points": len(frontier),
        "time_s": time_s,
        "energy_j": energy_j,
        "power_w": energy_j / time_s,
        "bound_j": float(frontier.bound_j[point]),
        "gap": float(frontier.gap[point]),
        "all_max_s": frontier.all_max_s,
        "all_max_j": frontier.all_max_j,
        "waiting_j": waiting,
        "origin": frontier.origin.value,
    }


def _write_picture(frontier: Frontier, point: int, path: str) -> str:
    solution, profile = sources_of(frontier)
    step = played(model_of(solution, profile), frontier.clocks(point))
    title = f"{describe_plan(solution.plan)}, point {point} ({ORIGINS[frontier.origin]})"
    facts = [f"{format_joules(step.energy_j)}, {format_joules(step.waiting_j)} of it waiting"]
    write_picture(path, clock_svg(step.timeline, title=title, facts=facts))
    return path


def _write_clocks(frontier: Frontier, point: int, path: str, *, named: bool) -> str:
    model, clocks = model_of(*sources_of(frontier)), frontier.clocks(point)
    step = played(model, clocks)
    comment = claims(step.time_s, step.energy_j, frontier.origin)
    write_text(path, write_clock_plan(model.program, clocks, named=named, comment=comment))
    return path
