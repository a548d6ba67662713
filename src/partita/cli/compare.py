"""``partita compare``: several planners, one ranked table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from partita.cli.console import (
    basis_line,
    bound_line,
    model_line,
    print_json,
    progress,
    reserve_line,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    table,
)
from partita.cli.inputs import (
    read_asked,
    read_planner,
    take_effort_options,
    take_problem_options,
)
from partita.cli.options import (
    change_options,
    cluster_options,
    effort_options,
    estimate_options,
    output_options,
    problem_options,
    rule_options,
    shape_options,
)
from partita.core.problem import Metric
from partita.documents import save
from partita.errors import InfeasibleError
from partita.flows.compare import Candidate, compare
from partita.planners.table import DEFAULT_PLANNER, takes

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyColumns

DEFAULTS = tuple(dict.fromkeys((DEFAULT_PLANNER, "single", "uniform", "random")))


@click.command(
    epilog="Example: partita compare resnet50 --cluster 4xa100 -p single -p uniform -p random:1"
)
@click.argument("model", required=False)
@cluster_options
@change_options
@problem_options
@rule_options
@shape_options
@estimate_options
@click.option(
    "--planner",
    "-p",
    "planners",
    multiple=True,
    help=f"A planner with its argument; several times. [{', '.join(DEFAULTS)}]",
)
@click.option("--option", "-O", "options", multiple=True, help="Option k=v of all planners.")
@effort_options
@click.option(
    "--energy", is_flag=True, help="Also T_min, T* and joules a sample, by a model of the devices."
)
@click.option("-o", "--output", help="Where to write the best plan.")
@output_options
def command(
    model: str | None,
    planners: tuple[str, ...],
    options: tuple[str, ...],
    output: str | None,
    *,
    as_json: bool,
    quiet: bool,
    **rest: Any,
) -> None:
    """Run several planners on MODEL and rank what they find.

    --time-limit and --iterations go to the planners that search.
    """
    rest.pop("debug")
    chosen = _chosen(planners or DEFAULTS, options, take_effort_options(rest))
    problem = read_asked(model, take_problem_options(rest)).problem
    with progress("comparing", quiet=quiet or as_json) as tell:
        found = compare(problem, chosen, progress=tell)
        wanted = rest["energy"] or problem.objective.metric is Metric.ENERGY
        energy = _energy(found, tell) if wanted else {}
    best = next((candidate.summary for candidate in found if candidate.summary), None)
    if best is not None and output is not None:
        save(best.solution, output)
    if as_json:
        print_json(
            {
                "model": problem.graph.name,
                "cluster": problem.cluster.name,
                "plans": _rows(found, energy),
            }
        )
    else:
        console = stdout_console()
        console.print(model_line(problem.graph))
        if line := basis_line(problem.graph):
            console.print(line)
        console.print(step_line(problem))
        ranked = [c for c in found if c.summary is not None]
        rows = [summary_row(r + 1, c.summary, c.name) for r, c in enumerate(ranked) if c.summary]
        if rows:
            console.print(summary_table(rows))
        if line := reserve_line(problem):
            console.print(line)
        if energy:
            console.print("energy is modelled:")
            console.print(table(_ENERGY_COLUMNS, [_energy_row(*pair) for pair in energy.items()]))
        for candidate in found:
            if candidate.summary is None:
                console.print(f"{candidate.name}: {candidate.refusal}", style="yellow")
        if best is not None:
            console.print(bound_line(best, "the first"))
            if output is not None:
                console.print(f"best plan written to {output}")
    if best is None:
        raise InfeasibleError("no planner found a plan that fits")


def _chosen(
    specs: Sequence[str], options: Sequence[str], effort: dict[str, Any]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the planners with their options, the limits of a search where they search."""
    given = {key: value for key, value in effort.items() if value is not None}
    names = [spec.partition(":")[0] for spec in specs]
    for key in given:
        if not any(takes(name, key) for name in names):
            raise click.UsageError(
                f"none of {', '.join(names)} takes --{key.replace('_', '-')}; name one that does"
            )
    own = [{key: value for key, value in given.items() if takes(name, key)} for name in names]
    return [
        (spec, *read_planner(spec, None, options, None, effort))
        for spec, effort in zip(specs, own, strict=True)
    ]


def _energy(found: Sequence[Candidate], tell: Callable[[str], None]) -> "dict[str, EnergyColumns]":
    """Return what the devices' model says of the energy of each plan."""
    from partita.flows.energy_plan import energy_columns  # noqa: PLC0415 (numba)

    result = {}
    for candidate in found:
        if candidate.summary is not None:
            tell(f"energy of {candidate.name}")
            result[candidate.name] = energy_columns(candidate.summary.solution)
    return result


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


def _rows(found: list[Candidate], energy: "dict[str, EnergyColumns]") -> list[dict[str, Any]]:
    return [
        {
            "name": c.name,
            "refusal": c.refusal or None,
            **(c.summary.to_json() if c.summary else {}),
            **({"energy": energy[c.name].to_json()} if c.name in energy else {}),
        }
        for c in found
    ]
