"""The time-energy frontier against lowtime, published frontiers, an integer program, and growth.

    python benchmarks/energy.py [--check] [--json] [--group NAME ...]

``--check`` exits with 1 when a number is missed, with 4 when the data is absent. ``--group`` runs
some groups only. All energies are evaluations of the profiles' figures, not measurements.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from _harness import run_groups, shared_data

GROUPS: Mapping[str, tuple[str, str]] = {
    "lowtime": ("_energy_against_lowtime", "measure_group"),
    "published": ("_energy_published", "measure_group"),
    "schedules": ("_energy_schedules", "measure_group"),
    "milp": ("_energy_sizes", "measure_milp"),
    "growth": ("_energy_sizes", "measure_growth"),
}


def measure(names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Run the groups, show their tables, and return the figures and what is missed."""
    data = shared_data()
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in names:
        module, function = GROUPS[name]
        group = getattr(importlib.import_module(module), function)(data)
        group.show()
        missed += [f"{name}: {line}" for line in group.misses]
        figures |= {f"{name}.{key}": value for key, value in group.figures.items()}
    return figures, missed


if __name__ == "__main__":
    run_groups((__doc__ or "").splitlines()[0], GROUPS, measure)
