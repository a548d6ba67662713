"""The planner of a request, with its options."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import read_text
from partita.errors import FormatError, InvalidInputError, reading
from partita.flows.fields import ChoiceFields, EffortFields, PlannerFields
from partita.planners.table import DEFAULT_PLANNER, get_planner, takes
from partita.yaml_nodes import guess_value, parse_yaml, read_table
from partita.yaml_nodes import read_text as read_yaml_text

if TYPE_CHECKING:
    from partita.core.grid import Grid

logger = logging.getLogger(__name__)
EFFORT = ("time_limit", "iterations", "as_released", "seed")
"""Fields of a request that only some planners take; ``seed`` may be that of something else."""
_MAX_ASSIGNMENT = 2**27
"""Characters of a file that places the ops of a graph one by one."""
TRIAL_LIMIT_S = 0.5
"""Seconds that a planner with a time limit may search for each change that is tried."""
TRIAL_STEPS = 20
"""The same of the usual planner in steps, so that what follows from the trials is repeatable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerChoice:
    """A planner by name with its options.

    Attributes:
        label: The planner as it was asked for, such as ``"custom:0,8"``.
        name: Its name in the table.
        options: Its options.
    """

    label: str
    name: str
    options: Mapping[str, Any]

    def function(self) -> Callable[..., Solution]:
        """Return the planner with its options bound."""
        return get_planner(self.name, **self.options)

    def quick(self) -> Callable[[Problem], Solution]:
        """Return the planner for trials: with a short limit where it has one."""
        if not takes(self.name, "time_limit") or "iterations" in self.options:
            return self.function()
        if self.name == DEFAULT_PLANNER and "time_limit" not in self.options:
            return get_planner(self.name, **{**self.options, "iterations": TRIAL_STEPS})
        limit = min(TRIAL_LIMIT_S, self.options.get("time_limit", TRIAL_LIMIT_S))
        return get_planner(self.name, **{**self.options, "time_limit": limit})


def chosen_planner(request: ChoiceFields) -> PlannerChoice:
    """Return the planner that a request asks for.

    Raises:
        InvalidInputError: The planner does not take what was given.
    """
    named = {request.planner, request.partition} - {None}
    if len(named) > 1:
        raise InvalidInputError("--planner and --partition are the same; give one")
    label = request.planner or request.partition or DEFAULT_PLANNER
    return planner_choice(label, request.option, effort_of(request))


def effort_of(request: ChoiceFields) -> dict[str, Any]:
    """Return the options of a request that only some planners take; None or False = not given."""
    names = EFFORT if isinstance(request, PlannerFields) else EFFORT[:-1]
    return {name: getattr(request, name) for name in names}


def planner_choice(
    label: str, options: tuple[str, ...] | Mapping[str, Any], effort: Mapping[str, Any]
) -> PlannerChoice:
    """Return a planner by its name and argument, such as ``"custom:0,8,14"``.

    Args:
        label: The planner, with its argument after a colon.
        options: Pairs ``name=value``, or the values by name.
        effort: Options that only some planners take, by name; None or False = not given.

    Raises:
        InvalidInputError: The planner does not take what was given.
    """
    name, _, argument = label.partition(":")
    values = dict(options) if isinstance(options, Mapping) else _pairs(options)
    if argument:
        values |= _argument(name, argument)
    for key, value in effort.items():
        if value is None or value is False:
            continue
        if not takes(name, key):
            raise InvalidInputError(f"planner {name!r} takes no --{key.replace('_', '-')}")
        values[key] = value
    return PlannerChoice(label=label, name=name, options=values)


def chosen_planners(
    labels: tuple[str, ...], options: tuple[str, ...] | Mapping[str, Any], request: EffortFields
) -> list[PlannerChoice]:
    """Return several planners; the limits of a search go to those that search.

    Raises:
        InvalidInputError: None of them takes a limit that was given.
    """
    limits = {"time_limit": request.time_limit, "iterations": request.iterations}
    given = {key: value for key, value in limits.items() if value is not None}
    names = [label.partition(":")[0] for label in labels]
    for name in names:
        if len(several := name.split(",")) > 1:
            raise InvalidInputError(
                f"--planner {name!r} names several; give each its own: "
                f"{' '.join(f'--planner {each.strip()}' for each in several)}"
            )
    for key in given:
        if not any(takes(name, key) for name in names):
            raise InvalidInputError(
                f"none of {', '.join(names)} takes --{key.replace('_', '-')}; name one that does"
            )
    return [
        planner_choice(
            label, options, {key: value for key, value in given.items() if takes(name, key)}
        )
        for label, name in zip(labels, names, strict=True)
    ]


def _pairs(options: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in options:
        key, sign, value = pair.partition("=")
        if not sign:
            raise InvalidInputError(f"--option {pair!r} is not of the form name=value")
        values[key.replace("-", "_")] = _value(value)
    return values


def _value(text: str) -> Any:  # noqa: ANN401 (as YAML reads it)
    if re.fullmatch(r"-?\d+(,-?\d+)+", text):
        return [int(part) for part in text.split(",")]
    return guess_value(text)


def _argument(name: str, argument: str) -> dict[str, Any]:
    """Return what stands after the colon of ``name:argument`` as options."""
    if name == "custom":
        try:
            return {"boundaries": [int(part) for part in argument.split(",")]}
        except ValueError:
            raise InvalidInputError(
                f"custom:{argument} is not understood; write indices like custom:0,8,14,20,26"
            ) from None
    if name == "manual":
        return {"assignment": _read_assignment(argument)}
    if name == "grid":
        return {"grid": read_grid(argument)}
    if name == "random":
        return {"seed": _value(argument)}
    if name == "single":
        return {"device": argument}
    raise InvalidInputError(f"planner {name!r} takes no argument after a colon")


def _read_assignment(path: str) -> dict[str, str]:
    """Return a map from ops to devices, a YAML or JSON object."""
    try:
        root = parse_yaml(read_text(path), max_text=_MAX_ASSIGNMENT)
        entries = read_table(root, "the map from ops (or modules) to devices").entries
        return {op: read_yaml_text(device, f"device of {op}") for op, device in entries.items()}
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc


def read_grid(path: str) -> "Grid | Mapping[str, str]":
    """Return what a trainer's configuration says; see :mod:`partita.trainers.read`.

    Raises:
        FormatError: It is none that is known, or a value is wrong; knows the path.
    """
    from partita.trainers.read import (  # noqa: PLC0415 (where one is named)
        not_modelled,
        read_configuration,
    )

    with reading(path):
        grid = read_configuration(read_text(path))
    left = [] if isinstance(grid, Mapping) else not_modelled(grid)
    if left:
        logger.warning("%s: not modelled: %s", path, ", ".join(left)[:400])
    return grid
