"""DynamicMLTrainer's instances: its sharding cost by three planners, against recorded plans.

The two published examples must be proven optima in under a CPU second, ``small*`` exact and proven,
``medium*`` and ``large*`` at or below every recorded plan. Every plan is scored by ``evaluate.py``
of the data folder, too.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from _harness import load_script
from _planners_common import Group, timed

from partita.core.problem import Problem
from partita.core.solution import Proof, Solution
from partita.formats.dynamicml import read_dynamicml, write_assignment
from partita.planners.brute_force import plan_brute_force
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search

EXAMPLES = {"chain201_k3": 2.0, "chain201_k96": 56.125}
"""The published examples and their optima."""

PLANNERS: Mapping[str, Callable[[Problem], Solution]] = {
    "brute-force": plan_brute_force,
    "local-search": plan_local_search,
    "hierarchical": plan_hierarchical,
}
REQUIRED = {
    "chain": ("brute-force", "local-search", "hierarchical"),
    "small": ("brute-force",),
    "mediu": ("local-search", "hierarchical"),
    "large": ("local-search", "hierarchical"),
}
"""The planners whose values count for an instance, by the beginning of its name."""

TOLERANCE = 1 + 1e-9


def measure_group(data: Path, scale: float) -> Group:
    """Return the table; ``scale`` is not used, as the seconds asked for are absolute."""
    del scale
    folder = data / "dynamicml"
    recorded: dict[str, float] = {}
    for answer in json.loads((folder / "answers.json").read_text()):
        known = recorded.get(answer["instance"], answer["metric"])
        recorded[answer["instance"]] = min(known, answer["metric"])
    group = Group(
        title="DynamicMLTrainer: sharding cost",
        headers=["instance", "recorded", "planner", "ours", "proof", "bound", "CPU s"],
    )
    scorer = load_script(data, "evaluate")
    _warm_up(folder)
    for name in sorted(recorded):
        for planner in REQUIRED[name[:5]]:
            _row(group, folder, scorer, name, planner, recorded[name])
    gains = [row[1] / row[3] for row in group.rows if row[2] != "brute-force"]
    group.figures = {
        "instances": len(recorded),
        "missed": len(group.misses),
        "best_gain": max(gains),
        "max_cpu_s": max(row[6] for row in group.rows),
    }
    return group


def _warm_up(folder: Path) -> None:
    """Compile all kernels on an instance that is not measured."""
    document = json.loads((folder / "medium1.json").read_text())
    document["node_weights"] = document["node_weights"][::-1]
    problem = read_dynamicml(json.dumps(document))
    for planner in (
        partial(plan_brute_force, iterations=100_000),
        plan_local_search,
        plan_hierarchical,
    ):
        planner(problem)


def _row(
    group: Group, folder: Path, scorer: ModuleType, name: str, planner: str, recorded: float
) -> None:
    text = (folder / f"{name}.json").read_text()
    problem = read_dynamicml(text)
    solution, cpu_s = timed(lambda: PLANNERS[planner](problem))
    scored = scorer.score_dml(
        json.loads(text), json.loads(write_assignment(problem, solution.plan))
    )
    group.rows.append(
        [
            *(name, recorded, planner, solution.value),
            *(solution.proof.value, solution.lower_bound, cpu_s),
        ]
    )
    group.misses += _misses(name, planner, solution, cpu_s, scored, recorded)


def _misses(
    name: str,
    planner: str,
    solution: Solution,
    cpu_s: float,
    scored: Mapping[str, Any],
    recorded: float,
) -> list[str]:
    what, missed = f"{name} by {planner}", []
    if scored["errors"] or abs(scored["metric"] - solution.value) > 1e-9 * max(1, solution.value):
        missed.append(f"{what}: evaluate.py says {scored}")
    if solution.value > recorded * TOLERANCE:
        missed.append(f"{what}: {solution.value:.9g} is above the recorded {recorded:.9g}")
    if name in EXAMPLES and abs(solution.value - EXAMPLES[name]) > 1e-9:
        missed.append(f"{what}: {solution.value:.9g} is not the optimum {EXAMPLES[name]}")
    if name in EXAMPLES and cpu_s >= 1:
        missed.append(f"{what}: {cpu_s:.2f} CPU s, not under 1")
    if name.startswith(("chain", "small")) and solution.proof is not Proof.OPTIMAL:
        missed.append(f"{what}: {solution.value:.9g} is not proven")
    return missed
