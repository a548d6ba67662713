"""The settings of a trainer that lead from one plan to a better one."""

import json
from collections.abc import Mapping
from typing import Any

from partita.core.grid import Grid, grid_of
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.trainers import accelerate, deepspeed, megatron, torchtitan
from partita.trainers.rules import TRAINERS


def settings_of(trainer: str, grid: Grid) -> dict[str, str]:
    """Return a grid as settings of a trainer, by name.

    Raises:
        InfeasibleError: The trainer cannot run it.
    """
    TRAINERS[trainer].check(grid)
    if trainer == "megatron":
        return {name: value or "" for name, value in megatron.flags_of(grid).items()}
    if trainer == "torchtitan":
        found: Mapping[str, Any] = {
            **torchtitan.parallelism_of(grid, {}, "lm_head"),
            **torchtitan.batch_of(grid),
        }
    elif trainer == "deepspeed":
        found = deepspeed.config_of(grid)
    else:
        found = accelerate.config_of(grid, 1)
    return {name: json.dumps(value) for name, value in found.items()}


def changes_to(trainer: str, mine: Solution, better: Solution) -> tuple[str, ...]:
    """Return the settings to change in a configuration, a line each, or why there are none."""
    title = TRAINERS[trainer].title
    try:
        old = settings_of(trainer, grid_of(mine.problem, mine.plan))
        new = settings_of(trainer, grid_of(better.problem, better.plan))
    except InfeasibleError as exc:
        return (f"not a setting of {title}: {exc}; partita plan --for {trainer} finds one that is",)
    lines = []
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            before, after = (_words(values, name) for values in (old, new))
            lines.append(f"{name}: {before} -> {after}")
    return tuple(lines) or (f"the same settings of {title}",)


def _words(values: Mapping[str, str], name: str) -> str:
    return "not set" if name not in values else values[name] or "set"
