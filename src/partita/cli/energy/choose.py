"""``partita energy choose``: a point of a frontier, its clocks, and how they look."""

from typing import Any

import click

from partita.cli.console import print_json, progress, stdout_console
from partita.cli.energy.frontier import share, write_picture
from partita.cli.energy.inputs import ORIGIN_WORDS, claims, tries_option
from partita.cli.options import output_options
from partita.core.energy import Frontier
from partita.documents import load, write_text
from partita.energy.frontier.choose import WISHES, Wish, choose_point
from partita.energy.frontier.savings import model_of, played, sources_of, waiting_w, with_point_at
from partita.errors import InvalidInputError
from partita.flows.summary import describe_plan
from partita.formats.perseus import write_clock_plan
from partita.report.charts import ORIGINS
from partita.report.clock_svg import clock_svg
from partita.units import format_joules


@click.command(
    epilog="Example: partita energy choose frontier.json --slowdown 0.02 -o clocks.py "
    "--picture clocks.svg"
)
@click.argument("frontier")
@click.option("--slowdown", type=float, help="Slower than all-max by at most: 0.02 = 2 %.")
@click.option("--deadline", "deadline_s", type=float, help="Seconds a step may take.")
@click.option("--energy", "energy_j", type=float, help="Joules a step may use.")
@click.option("--power", "power_w", type=float, help="Watts that all devices may draw on average.")
@click.option(
    "--straggler", "straggler_s", type=float, help="Seconds that somebody makes all steps take."
)
@click.option("--least-energy", is_flag=True, help="The point of least energy, T*.")
@tries_option
@click.option("-o", "--output", help="Write the clocks as a plan that Zeus and Perseus read.")
@click.option("--unnamed", is_flag=True, help="Clocks without names, as Perseus's artifact reads.")
@click.option("--picture", help="Write the step coloured by clock, an SVG file.")
@output_options
def command(frontier: str, **rest: Any) -> None:
    """Choose the point of FRONTIER that keeps some limits; without any the fastest.

    FRONTIER is what 'partita energy frontier -o' wrote. Within limits of time the cheapest point is
    taken, solved for where the frontier has none at the limit; within limits of energy and power
    the fastest of its points. With a straggler it is the point at min(T*, T').
    """
    rest.pop("debug")
    found = load(frontier)
    if not isinstance(found, Frontier):
        raise InvalidInputError(
            f"{frontier!r} holds a {type(found).__name__.lower()}, not a frontier; make one with "
            "'partita energy frontier -o'"
        )
    if rest["unnamed"] and not rest["output"]:
        raise click.UsageError("--unnamed needs -o, the plan that it is about")
    wish = Wish(**{name: rest[name] for name in ("least_energy", *WISHES.values())})
    limit_s = _time_limit(found, wish)
    if limit_s is not None:
        with progress("choosing", quiet=rest["quiet"] or rest["as_json"]) as tell:
            tell(f"the point at {limit_s:.5g} s")
            found = with_point_at(found, limit_s, tries=rest["tries"])
    point = choose_point(found, wish)
    written = _write(found, point, rest)
    figures = _figures(found, point, wish)
    if rest["as_json"]:
        print_json({**figures, "written": written})
        return
    console = stdout_console()
    console.print(_line(found, point))
    if figures["waiting_j"] is not None:
        console.print(
            f"waiting for the straggler until {wish.straggler_s:.5g} s: "
            f"{format_joules(figures['waiting_j'])} more"
        )
    for path in written:
        console.print(f"written: {path}")


def _time_limit(frontier: Frontier, wish: Wish) -> float | None:
    """Return the seconds that a step may take; None where nothing limits it."""
    limits = [limit for limit in (wish.deadline_s, wish.straggler_s) if limit is not None]
    if wish.slowdown is not None:
        limits.append(frontier.all_max_s * (1 + wish.slowdown))
    return min(limits, default=None)


def _line(frontier: Frontier, point: int) -> str:
    time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
    beats = ", faster and cheaper than all-max" if point in frontier.better_than_all_max else ""
    return (
        f"point {point} of {len(frontier)}: step {time_s:.5g} s "
        f"({100 * (time_s / frontier.all_max_s - 1):+.2f} %), {format_joules(energy_j)} "
        f"({share(energy_j / frontier.all_max_j - 1)} against all-max{beats}) · "
        f"gap to bound {100 * float(frontier.gap[point]):.2f} % · {ORIGIN_WORDS[frontier.origin]}"
    )


def _figures(frontier: Frontier, point: int, wish: Wish) -> dict[str, Any]:
    time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
    waiting = None
    if wish.straggler_s is not None and wish.straggler_s > time_s and frontier.profile is not None:
        waiting = waiting_w(frontier) * (wish.straggler_s - time_s)
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


def _write(frontier: Frontier, point: int, rest: dict[str, Any]) -> list[str]:
    if not rest["output"] and not rest["picture"]:
        return []
    model = model_of(*sources_of(frontier))
    clocks, written = frontier.clocks(point), []
    step = played(model, clocks)
    if rest["picture"]:
        plan = sources_of(frontier)[0].plan
        title = f"{describe_plan(plan)}, point {point} ({ORIGINS[frontier.origin]})"
        facts = [f"{format_joules(step.energy_j)}, {format_joules(step.waiting_j)} of it waiting"]
        write_picture(rest["picture"], clock_svg(step.timeline, title=title, facts=facts))
        written.append(rest["picture"])
    if rest["output"]:
        comment = claims(step.time_s, step.energy_j, frontier.origin)
        text = write_clock_plan(model.program, clocks, named=not rest["unnamed"], comment=comment)
        write_text(rest["output"], text)
        written.append(rest["output"])
    return written
