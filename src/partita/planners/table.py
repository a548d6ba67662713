"""The planners by name, and the one way to call them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.names import did_you_mean
from partita.planners.auto.planner import plan_auto
from partita.planners.autopipe import plan_autopipe
from partita.planners.baechi.m_etf import plan_m_etf
from partita.planners.baechi.m_sct import plan_m_sct
from partita.planners.baechi.m_topo import plan_m_topo
from partita.planners.brute_force import plan_brute_force
from partita.planners.custom import plan_custom
from partita.planners.expert import plan_expert
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search
from partita.planners.manual import plan_manual
from partita.planners.merak import (
    plan_parameters,
    plan_uniform_floor,
    plan_uniform_transformer,
)
from partita.planners.optimal_split import plan_optimal_split
from partita.planners.pipedream.planner import plan_pipedream
from partita.planners.piper.planner import plan_piper
from partita.planners.scattered import plan_random
from partita.planners.single import plan_single
from partita.planners.sparse_pipedream import plan_sparse_pipedream
from partita.planners.uniform import plan_uniform
from partita.plugins import PluginGroup, guarded

Planner: TypeAlias = Callable[..., Solution]

PLANNERS: Mapping[str, Planner] = {
    "auto": plan_auto,
    "single": plan_single,
    "uniform": plan_uniform,
    "uniform_floor": plan_uniform_floor,
    "uniform_transformer": plan_uniform_transformer,
    "parameters": plan_parameters,
    "autopipe": plan_autopipe,
    "custom": plan_custom,
    "expert": plan_expert,
    "random": plan_random,
    "manual": plan_manual,
    "m-topo": plan_m_topo,
    "m-etf": plan_m_etf,
    "m-sct": plan_m_sct,
    "brute-force": plan_brute_force,
    "local-search": plan_local_search,
    "hierarchical": plan_hierarchical,
    "piper": plan_piper,
    "optimal-split": plan_optimal_split,
    "pipedream": plan_pipedream,
    "sparse-pipedream": plan_sparse_pipedream,
}

DEFAULT_PLANNER = "auto"
PLUGINS = PluginGroup(group="partita.planners", noun="planner")
TRACE = "trace"
"""The keyword of planners that report progress: no option, as it never changes the result."""


def planners() -> Mapping[str, Planner]:
    """Return all planners: those of the table, and of installed plug-ins.

    A plug-in that cannot be loaded is left out, with a warning.
    """
    return {**PLUGINS.load_all(), **PLANNERS}


def find_planner(name: str) -> Planner | None:
    """Return a planner by name, of the table or of a plug-in; None if there is none.

    Plug-ins are looked at only where the table has no such name, and only the one that has it is
    loaded.

    Raises:
        UnsupportedError: It is a plug-in that cannot be loaded.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    plugged = PLUGINS.find(name)
    return None if plugged is None else guarded("planner", name, plugged, returns=Solution)


def get_planner(name: str, **options: object) -> Callable[[Problem], Solution]:
    """Return a planner by name with its options bound.

    Raises:
        InvalidInputError: There is no such planner or option; suggests near names.
        UnsupportedError: It is a plug-in that cannot be loaded.
    """
    planner = find_planner(name)
    if planner is None:
        raise PLUGINS.unknown(name, PLANNERS)
    accepted = [
        parameter.name
        for parameter in inspect.signature(planner).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name != TRACE
    ]
    for option in options:
        if option not in accepted:
            raise InvalidInputError(
                f"planner {name!r} has no option {option!r}{did_you_mean(option, accepted)}"
            )
    needed = [
        parameter.name
        for parameter in inspect.signature(planner).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.default is inspect.Parameter.empty
        and parameter.name not in options
    ]
    if needed:
        raise InvalidInputError(f"planner {name!r} needs the option {needed[0]!r}")
    for option, value in options.items():
        _check_option(name, inspect.signature(planner).parameters[option], value)
    return partial(planner, **options)


def _check_option(planner: str, parameter: inspect.Parameter, value: object) -> None:
    """Check the value of an option whose annotation is a plain type; others are not checked."""
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
    allowed = kinds.get(parameter.annotation)
    if allowed is None:
        return
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise InvalidInputError(
            f"option {parameter.name!r} of planner {planner!r} is {value!r}; "
            f"expected a value of type {parameter.annotation.__name__}"
        )


def solve(problem: Problem, planner: str = DEFAULT_PLANNER, **options: Any) -> Solution:  # noqa: ANN401
    """Return the solution that a planner finds for a problem.

    >>> from partita.catalogue.examples import example
    >>> solve(example("gpt-small"), "uniform").plan.schedule.value
    '1f1b'

    Raises:
        InfeasibleError: Nothing that it finds fits.
        InvalidInputError: There is no such planner or option.
    """
    return get_planner(planner, **options)(problem)
