"""The planners by name, and the one way to call them.

A row names a planner, ``"module:function"``, and says what it minimises; only the planner that is
asked for is imported. A planner refuses a problem that asks for another metric, in one line that
names who minimises it: a plan that is good by something else looks like an answer and is none.
``auto`` answers everything, and so do those that follow a rule and minimise nothing (``single``,
``uniform``, maps by hand, ...): what they return is measured by whatever is asked.

A row may name the planner as its authors released it, too, faults included. The option
``as_released`` asks for that one, and it is imported only then.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args

from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.names import did_you_mean
from partita.plugins import PluginGroup, guarded, load_target

logger = logging.getLogger(__name__)

Planner: TypeAlias = Callable[..., Solution]


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """One planner.

    Attributes:
        target: Where it is, ``"module:function"``; options are its keyword-only parameters.
        summary: What it does, in one sentence.
        minimises: The metrics that it minimises; ``None`` = it plans for any.
        released: Where it is as its authors released it, ``"module:function"``, which takes the
            same options; ``None`` = there is no such form.
    """

    target: str
    summary: str
    minimises: tuple[Metric, ...] | None = None
    released: str | None = None


_PIPEDREAM = (Metric.PIPEDREAM, Metric.PIPEDREAM_REPAIRED)
_MAKESPAN = (Metric.MAKESPAN_PARALLEL, Metric.MAKESPAN_SEQUENTIAL)
_SPLIT = (Metric.MAX_LOAD, Metric.SINGLE_SAMPLE_LATENCY)
_SHARDING = (Metric.SHARDING_COST,)

PLANNERS: Mapping[str, PlannerRow] = {
    "auto": PlannerRow(
        "partita.planners.auto.planner:plan_auto",
        "The best plan that the others and a local search on the simulator find.",
    ),
    "single": PlannerRow(
        "partita.planners.single:plan_single",
        "Everything on the fastest device that holds it.",
    ),
    "uniform": PlannerRow(
        "partita.planners.uniform:plan_uniform",
        "Equal numbers of layers on consecutive devices.",
    ),
    "uniform_floor": PlannerRow(
        "partita.planners.merak:plan_uniform_floor",
        "floor(layers / stages) layers each, the rest on the last stage.",
    ),
    "uniform_transformer": PlannerRow(
        "partita.planners.merak:plan_uniform_transformer",
        "Equal numbers of transformer blocks, embeddings first, head last.",
    ),
    "parameters": PlannerRow(
        "partita.planners.merak:plan_parameters",
        "A heaviest stage with as few trainable parameters as possible.",
    ),
    "autopipe": PlannerRow(
        "partita.planners.autopipe:plan_autopipe",
        "A balanced cut, then layers leave the critical stage of the simulated pipeline.",
        (Metric.THROUGHPUT,),
    ),
    "custom": PlannerRow(
        "partita.planners.custom:plan_custom",
        "Stages of layers between given boundaries.",
    ),
    "expert": PlannerRow(
        "partita.planners.expert:plan_expert",
        "Encoder and decoder placed as people do by hand.",
    ),
    "random": PlannerRow(
        "partita.planners.scattered:plan_random",
        "A seeded random placement.",
    ),
    "manual": PlannerRow(
        "partita.planners.manual:plan_manual",
        "A map from op, module path or pattern to device.",
    ),
    "grid": PlannerRow(
        "partita.planners.grid:plan_grid",
        "What a trainer's own configuration says: grid:train.sh.",
    ),
    "m-topo": PlannerRow(
        "partita.planners.baechi.m_topo:plan_m_topo",
        "Devices filled one after the other along the data.",
        released="partita.released.baechi:plan_m_topo_released",
    ),
    "m-etf": PlannerRow(
        "partita.planners.baechi.m_etf:plan_m_etf",
        "Earliest task first under memory limits.",
        _MAKESPAN,
        released="partita.released.baechi:plan_m_etf_released",
    ),
    "m-sct": PlannerRow(
        "partita.planners.baechi.m_sct:plan_m_sct",
        "Ops next to their favourite children, scheduled as early as possible.",
        _MAKESPAN,
        released="partita.released.baechi:plan_m_sct_released",
    ),
    "brute-force": PlannerRow(
        "partita.planners.brute_force:plan_brute_force",
        "All placements, the best so far at any time; a proof when it finishes.",
    ),
    "local-search": PlannerRow(
        "partita.planners.local_search:plan_local_search",
        "Moves and swaps from good starts.",
        _SHARDING,
    ),
    "hierarchical": PlannerRow(
        "partita.planners.hierarchical:plan_hierarchical",
        "Groups of devices first, then inside them.",
        _SHARDING,
    ),
    "piper": PlannerRow(
        "partita.planners.piper.planner:plan_piper",
        "Pipeline, data and tensor parallelism with recomputation under memory.",
        (Metric.PIPER,),
    ),
    "optimal-split": PlannerRow(
        "partita.planners.optimal_split:plan_optimal_split",
        "The least maximum load, or single-sample latency, over accelerators and CPUs.",
        _SPLIT,
    ),
    "pipedream": PlannerRow(
        "partita.planners.pipedream.planner:plan_pipedream",
        "Stages, replicas and shares of the least period.",
        _PIPEDREAM,
        released="partita.released.pipedream:plan_pipedream_released",
    ),
    "sparse-pipedream": PlannerRow(
        "partita.planners.sparse_pipedream:plan_sparse_pipedream",
        "The same on servers with several types of device.",
        _PIPEDREAM,
    ),
}

DEFAULT_PLANNER = "auto"
PLUGINS = PluginGroup(group="partita.planners", noun="planner")
TRACE = "trace"
"""The keyword of planners that report progress: no option, as it never changes the result."""
STARTS = "starts"
"""The keyword of planners that search on from given plans: no option of a document."""
AS_RELEASED = "as_released"
"""The option of every planner whose row has a released form: whether to call that one."""
_AS_RELEASED = inspect.Parameter(
    AS_RELEASED, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool
)


def find_planner(name: str) -> Planner | None:
    """Return a planner by name, of the table or of a plug-in; None if there is none.

    Plug-ins are looked at only where the table has no such name, and only the one that has it is
    loaded.

    Raises:
        UnsupportedError: It is a plug-in that cannot be loaded.
    """
    if name in PLANNERS:
        planner: Planner = load_target(PLANNERS[name].target)
        return planner
    plugged = PLUGINS.find(name)
    return None if plugged is None else guarded("planner", name, plugged, returns=Solution)


def plugged_planners(metric: Metric) -> Iterator[tuple[str, Planner]]:
    """Yield the plug-ins that declare to minimise a metric; broken ones are a warning each."""
    for name, planner in PLUGINS.load_all().items():
        try:
            declared = _declared(name, planner)
        except UnsupportedError as exc:
            logger.warning("%s", exc)
            continue
        if name not in PLANNERS and metric in (declared or ()):
            yield name, guarded("planner", name, planner, returns=Solution)


def _declared(name: str, planner: Planner) -> tuple[Metric, ...] | None:
    """Return what a plug-in minimises, its attribute ``minimises``; ``None`` = it plans for any."""
    found = getattr(planner, "minimises", None)
    if found is None:
        return None
    try:
        return tuple(map(Metric, found))
    except (TypeError, ValueError) as exc:
        raise UnsupportedError(
            f"planner {name!r} is a plug-in and declares to minimise {found!r}; expected metrics "
            f"such as ('{Metric.THROUGHPUT.value}',)"
        ) from exc


def get_planner(name: str, **options: object) -> Callable[..., Solution]:
    """Return a planner by name with its options bound.

    It refuses a problem whose metric it does not minimise with an ``InvalidInputError``.

    Raises:
        InvalidInputError: There is no such planner or option; suggests near names.
        UnsupportedError: It is a plug-in that cannot be loaded.
    """
    planner = find_planner(name)
    if planner is None:
        raise PLUGINS.unknown(name, PLANNERS)
    parameters = _options(planner)
    released = PLANNERS[name].released if name in PLANNERS else None
    if released is not None:
        parameters[AS_RELEASED] = _AS_RELEASED
    for option, value in options.items():
        if option not in parameters:
            raise InvalidInputError(
                f"planner {name!r} has no option {option!r}{did_you_mean(option, parameters)}"
            )
        _check_option(name, parameters[option], value)
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            raise InvalidInputError(f"planner {name!r} needs the option {parameter.name!r}")
    minimises = PLANNERS[name].minimises if name in PLANNERS else _declared(name, planner)
    if released is not None and options.pop(AS_RELEASED, False):
        planner = load_target(released)
    return partial(_planned, name, minimises, partial(planner, **options))


def _options(planner: Planner) -> dict[str, inspect.Parameter]:
    return {
        parameter.name: parameter
        for parameter in inspect.signature(planner).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.name not in (TRACE, STARTS)
    }


def _check_option(planner: str, parameter: inspect.Parameter, value: object) -> None:
    """Check the value of an option that is of a plain type, or none; others are not checked."""
    kinds = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
    kind = parameter.annotation
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    plain = [part for part in parts if part is not NoneType]
    allowed = kinds.get(plain[0]) if len(plain) == 1 else None
    if allowed is None or (value is None and NoneType in parts):
        return
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise InvalidInputError(
            f"option {parameter.name!r} of planner {planner!r} is {value!r}; "
            f"expected a value of type {plain[0].__name__}"
        )


def _planned(
    name: str,
    minimises: tuple[Metric, ...] | None,
    planner: Planner,
    problem: Problem,
    **options: Any,  # noqa: ANN401 (checked against the planner's signature)
) -> Solution:
    """Return what a planner finds, where the problem asks for a metric that it minimises."""
    metric = problem.objective.metric
    if minimises is not None and metric not in minimises:
        raise InvalidInputError(why_not_for(name, minimises, metric))
    return planner(problem, **options)


def why_not_for(name: str, minimises: tuple[Metric, ...], metric: Metric) -> str:
    """Return in one line what a planner minimises instead of a metric, and who does minimise it.

    >>> why_not_for("piper", (Metric.PIPER,), Metric.MAKESPAN_PARALLEL)
    "planner 'piper' minimises piper, not makespan-parallel; m-etf, m-sct, auto do"
    """
    able = [*planners_for(metric), DEFAULT_PLANNER]
    own = ", ".join(item.value for item in minimises)
    return (
        f"planner {name!r} minimises {own}, not {metric.value}; "
        f"{', '.join(able)} {'do' if len(able) > 1 else 'does'}"
    )


def planners_for(metric: Metric) -> list[str]:
    """Return the planners of the table that declare to minimise a metric."""
    return [name for name, row in PLANNERS.items() if metric in (row.minimises or ())]


def takes(name: str, option: str) -> bool:
    """Return whether a planner has an option; one that does not exist is said to have all.

    Raises:
        UnsupportedError: It is a plug-in that cannot be loaded.
    """
    if option == AS_RELEASED and name in PLANNERS:
        return PLANNERS[name].released is not None
    planner = find_planner(name)
    return planner is None or option in inspect.signature(planner).parameters


def solve(problem: Problem, planner: str = DEFAULT_PLANNER, **options: Any) -> Solution:  # noqa: ANN401
    """Return the solution that a planner finds for a problem.

    >>> from partita.catalogue.examples import example
    >>> solve(example("gpt-small"), "uniform").plan.schedule.value
    '1f1b'

    Raises:
        InfeasibleError: Nothing that it finds fits.
        InvalidInputError: There is no such planner or option, or it minimises another metric.
    """
    return get_planner(planner, **options)(problem)
