"""PipeDream's planner: Narayanan et al., PipeDream: generalized pipeline parallelism, SOSP 2019.

Stages of consecutive ops, each on several replicas, so that the slowest stage or transfer takes the
least time. With C the work of a stage, P its trained bytes, r its replicas, B the bandwidth, b the
live bytes of a cut and g = 4 the factor of the all-reduce, on a flat cluster

    T = max over stages (C + g (r - 1) P / (B r)) / r,   max over cuts 2 b / (B min(r, r'))

which is ``cost.objectives.repaired``; its definition covers servers with a port each.

The released optimizer goes through all pairs of ideals (down-sets of the graph) and all pairs of
device counts. Here the period is bisected, and for a given period the fewest devices that finish
the graph from an ideal on are one number an ideal (``flat``): ``O(ideals^2)`` a test, about 15
tests, and exact. Several servers and mixed devices: ``row``, ``mixed``. Ops that cost nothing are
joined to others where that loses nothing (``model``). More ideals than ``ideals``: a portfolio of
linear orders and the neighbourhood of the best (``repaired``).

Departures from the released optimizer (numbers of its known faults):

* B1 graphs with too many ideals are solved by orders and neighbourhoods; B2 all sources count;
  B3 stages are pairs of ideals one inside the other on every level; B4 the first stage's output is
  charged; B5 cuts count live bytes; B6 devices may stay unused (``fewer``);
* B7 stages may span servers and share them; B8 the all-reduce between servers is never divided by
  devices that do not take part; B9 memory counts all versions, gradients and optimizer state of a
  stage, the last one too; B10 transfers are always charged;
* B11 latency and bubbles stay outside this objective: ``simulate`` has them;
* B12, B13, B16 what cannot be is one clear error; B14 nothing recurses; B15 no picture is drawn;
  B17 the order of sets reaches nothing: ties go to fewer devices, then to larger earlier stages;
  B18, B19 concern printing and dead code of the original.

The room ``released`` has the released optimizer, faults included.
"""

import math
from typing import Any

import numpy as np

from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InfeasibleError
from partita.planners.effort import Effort, SearchTrace
from partita.planners.obstacle import Needs, obstacle, places, unfound
from partita.planners.pipedream.bound import FACTOR
from partita.planners.pipedream.build import check_positive
from partita.planners.pipedream.repaired import Breadth, repaired_search
from partita.planners.pipedream.state import Rules, Search
from partita.planners.pipeline import solution_of

ONE_DEVICE_AN_OP = frozenset(
    {
        Metric.LATENCY,
        Metric.MAX_LOAD,
        Metric.SINGLE_SAMPLE_LATENCY,
        Metric.MAKESPAN_PARALLEL,
        Metric.MAKESPAN_SEQUENTIAL,
        Metric.SHARDING_COST,
    }
)
"""Metrics of plans without replicas."""


def plan_pipedream(  # noqa: PLR0913 (the options of the released optimizer, and of our search)
    problem: Problem,
    *,
    straight: bool = False,
    fewer: bool | None = None,
    memory: bool | None = None,
    compression: float | None = None,
    ideals: int = 3000,
    orders: int = 32,
    iterations: int = 3,
    time_limit: float = math.inf,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the pipeline of replicated stages with the least period.

    Other metrics than PipeDream's two take the period as a proxy; those of plans without replicas
    get one device per stage.

    Args:
        problem: The problem.
        straight: One device per stage.
        fewer: Whether devices may stay unused; by default they may.
        memory: Whether the search keeps within memory; by default it does.
        compression: Activation compression ratio; by default 1.
        ideals: Ideals up to which all are looked at.
        orders: Linear orders to look at where there are more.
        iterations: Rounds of looking near the best pipeline where there are more.
        time_limit: Seconds after which nothing further is looked at, once there is a plan; by
            default where devices differ a fixed number of steps, a few seconds.
        trace: Called with every new best period.

    Raises:
        InfeasibleError: No pipeline keeps the limits.
        InvalidInputError: An option is out of range.
    """
    for name, value in (("compression", compression), ("ideals", ideals), ("orders", orders)):
        check_positive(name, value)
    options: dict[str, Any] = {"straight": straight}
    given = {"fewer": fewer, "memory": memory, "compression": compression}
    options |= {name: value for name, value in given.items() if value is not None}
    straight = straight or problem.objective.metric in ONE_DEVICE_AN_OP
    rules = Rules(
        straight=straight,
        exact=fewer is False,
        memory=memory is not False,
        charge=1 / (compression or 1.0),
    )
    breadth = Breadth(ideals=ideals, orders=orders, rounds=iterations)
    effort = Effort(time_limit=None if math.isinf(time_limit) else time_limit, trace=trace)
    search = repaired_search(problem, rules, breadth, effort)
    return repaired_solution(search, "pipedream", options)


def repaired_solution(search: Search, planner: str, options: dict[str, Any]) -> Solution:
    """Return the solution of a finished search.

    Raises:
        InfeasibleError: It found nothing; names an op or device.
    """
    problem = search.problem
    if search.best.found is None:
        raise InfeasibleError(f"{planner} found no pipeline that fits: {why_nothing(search)}")
    rules = search.rules
    proven = search.exact and rules == Rules(weighted=rules.weighted)
    # What is charged less than the objective charges bounds it all the same.
    comparable = rules.factor <= FACTOR and rules.charge <= 1
    bound = search.best.value * (1 - 1e-9) if proven else search.low if comparable else 0.0
    ours = problem.objective.metric is Metric.PIPEDREAM_REPAIRED and _uses_all_places(search)
    stats = {
        "predicted_s": float(search.best.value),
        "bound_s": float(bound),
        "bound_by": "search of all ideals" if proven else search.term,
        "nodes": search.model.q.num_nodes,
    }
    return solution_of(
        problem,
        search.best.found.plan,
        planner,
        options,
        proof=Proof.OPTIMAL if ours and proven else Proof.FEASIBLE,
        bound=bound if ours else 0.0,
        stats=stats,
    )


def _uses_all_places(search: Search) -> bool:
    """Return whether no op may run beside the devices that were searched (on a CPU, say)."""
    _, matrix = search.problem.allowed
    return not bool(np.delete(matrix, search.site.devices, axis=1).any())


def why_nothing(search: Search) -> str:
    """Return what stands in the way of every pipeline, and what would do."""
    problem, site = search.problem, search.site
    nodes, devices = search.model.q.num_nodes, len(site.devices)
    if search.rules.straight and search.rules.exact and nodes < devices:
        return (
            f"{devices} devices with one stage each, {problem.graph.name!r} can be cut into "
            f"{nodes} at most (device {problem.cluster.device_names[site.devices[nodes]]!r} would "
            "stay empty); let devices stay unused with fewer=true"
        )
    need = search.model.fixed_bytes + search.model.version_bytes
    may = places(problem, search.model.q.node_of, nodes)[:, site.devices].T
    needs = Needs(
        problem=problem,
        unit_of=search.model.q.node_of,
        unit_bytes=need,
        devices=site.devices,
        limit_bytes=site.memory_bytes if search.rules.memory else np.full(devices, math.inf),
        may=may,
        total_bytes=float(need.sum()),
        counted="at least, with one minibatch in flight",
    )
    return obstacle(needs) or unfound(needs, "order of stages", by_rules=not may.all())
