"""The planners against the recorded answers of their ancestors, a table a group.

    python benchmarks/planners.py [--check] [--json] [--group NAME ...]

Values are those of our cost model for the plan that a call returns; CPU seconds are those of the
same call in a warm process, against recorded seconds scaled by the plain-Python loop of
``calibrate.py`` in the data folder (best of before and after). ``--check`` exits with 1 when a
number is missed, with 4 when the data is absent. ``--group`` runs some groups only.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _harness import load_script, run_groups, shared_data
from _planners_common import Group

RECORDED_LOOP_S = 0.096
"""CPU seconds of the calibration loop where the recorded seconds were taken."""

GROUPS: Mapping[str, tuple[str, str]] = {
    "pipedream": ("_planners_pipedream", "measure_group"),
    "sparse-pipedream": ("_planners_pipedream", "measure_sparse"),
    "baechi": ("_planners_baechi", "measure_group"),
    "dynamicml": ("_planners_dynamicml", "measure_group"),
    "dnn-partitioning": ("_planners_tarnawski", "measure_group"),
    "piper": ("_planners_piper", "measure_group"),
    "bounds": ("_planners_bounds", "measure_group"),
    "auto": ("_planners_auto", "measure_group"),
}


def calibration_loop_s(data: Path) -> float:
    """Return the CPU seconds of the calibration loop on this machine."""
    return float(load_script(data, "calibrate").calibrate())


def measure(names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Run the groups, show their tables, and return the figures and what is missed."""
    data = shared_data()
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in names:
        module, function = GROUPS[name]
        scale = calibration_loop_s(data) / RECORDED_LOOP_S
        found: Group | list[Group] = getattr(importlib.import_module(module), function)(data, scale)
        for group in [found] if isinstance(found, Group) else found:
            group.show()
            missed += [f"{name}: {line}" for line in group.misses]
            figures |= {f"{name}.{key}": value for key, value in group.figures.items()}
    return figures, missed


if __name__ == "__main__":
    run_groups((__doc__ or "").splitlines()[0], GROUPS, measure)
