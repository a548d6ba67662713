"""What ``plan`` and ``compare`` say of energy."""

from rich.console import Console

from partita.cli.console import table
from partita.flows.energy_plan import EnergyAnswer, EnergyCandidate

MOST_PLANS = 6


_COLUMNS = (
    *(("plan by energy", "left"), ("devices", "right"), ("step, all-max", "right")),
    *(("step", "right"), ("J/sample", "right"), ("all-max", "right"), ("T_min", "right")),
    *(("T*", "right"), ("gap", "right")),
)


def show_energy(console: Console, answer: EnergyAnswer) -> None:
    """Print the candidates, cheapest first, and what was gained."""
    shown = list(answer.candidates[:MOST_PLANS])
    if answer.fastest not in shown:
        shown[-1] = answer.fastest
    origin = answer.best.frontier.origin.value
    console.print(
        f"energy is {origin}; within {100 * answer.slowdown:g} % of the fastest plan "
        f"({answer.limit_s:.5g} s a step):"
    )
    console.print(table(_COLUMNS, [_row(each, answer) for each in shown]))
    best, fastest = answer.best, answer.fastest
    simulated = f"simulated again: {answer.simulated_s:.5g} s"
    joules = answer.simulated_j / best.solution.plan.samples
    console.print(f"{simulated}, {joules:.5g} J/sample with these clocks")
    if best is fastest:
        console.print("the plan of least energy is the fastest one, with other clocks")
    elif fastest.point is not None:
        less = 1 - best.joules_per_sample / fastest.joules_per_sample
        console.print(
            f"the plan of least energy is not the fastest: {100 * less:.1f} % less energy than the "
            f"fastest plan with its own clocks, {100 * (best.step_s / fastest.step_s - 1):.2f} % "
            "slower at the highest"
        )


def _row(each: EnergyCandidate, answer: EnergyAnswer) -> list[str]:
    samples = each.solution.plan.samples
    chosen = each.point is not None
    mark = " (fastest)" if each is answer.fastest else ""
    gap = float(each.frontier.gap[each.point]) if each.point is not None else 0.0
    return [
        each.words + mark,
        str(len(each.solution.plan.devices)),
        f"{each.step_s:.5g} s",
        f"{each.time_s:.5g} s" if chosen else "-",
        f"{each.joules_per_sample:.5g}" if chosen else "-",
        f"{each.frontier.all_max_j / samples:.5g}",
        f"{each.frontier.fastest_s:.5g} s",
        f"{each.frontier.best_s:.5g} s",
        f"{100 * gap:.2f} %" if chosen else "-",
    ]
