"""Optimal splits over accelerators and CPUs: max-load, and the latency of one sample.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino: Efficient Algorithms for Device Placement
of DNN Graph Operators, NeurIPS 2020.

Max-load: every op on one device, colocation classes (and with them explicit backward ops) together,
memory kept; load(d) = seconds of its ops + the transfer time of every op whose output leaves or
enters d; CPUs pay no transfers. The largest load is minimised, over

* contiguous splits: devices follow one another along a chain of ideals of the forward ops. A DP
  over ideals is exact (``split/max_load.py``): O(pairs of ideals x devices). Where there are more
  ideals than ``ideals``: the best of several linear orders, then of all ideals near it, then
  annealing that keeps the split contiguous;
* with ``contiguous=false`` all splits, by annealing from the contiguous one
  (``split/refine.py``), and the better of the two is returned.

Single-sample latency: DP over chains of calls, then annealing (``split/latency.py``). Under any
other metric the largest load stands in for it: an even split with few transfers.

Departures from the authors' program: accelerators may differ in speed and memory (the DP counts the
devices used of each kind; where these are too many kinds, several orders of the devices are tried);
parameters that ops share are held once per device; ops may be pinned; nodes that cost nothing are
merged only where that is shown to lose nothing; no table of all pairs of ideals, which needs 18 GB
on inceptionv3. As there, a backward class without forward ops is ordered as its mirror image.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array, frozen_array
from partita.core.metrics import MemoryRule
from partita.core.placement import placement_plan
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.effort import Effort, SearchTrace, either_limit
from partita.planners.lattice.ideals import count_ideals, window
from partita.planners.lattice.orders import linear_orders
from partita.planners.lattice.quotient import Quotient, quotient, unordered_quotient
from partita.planners.obstacle import Needs, obstacle, unfound
from partita.planners.pipeline import pipeline_plan, solution_of
from partita.planners.split.contiguous import ORDERS, contiguous_split
from partita.planners.split.latency import (
    best_calls,
    best_calls_of_orders,
    coarse_enough,
    latency_flow,
    latency_model,
)
from partita.planners.split.max_load import Chain, liquid_bound
from partita.planners.split.model import SplitModel, split_model, without_idle_nodes
from partita.planners.split.refine import anneal, devices_in_order, no_flow

NAME = "optimal-split"
LATENCY_IDEALS = 20_000
"""Ideals between which chains of calls are looked for; all pairs of them may have to be."""
SHRINKS = (1.0, 0.75, 0.5, 0.3)
"""Shares of the memory that are tried under metrics whose memory rule is another one."""


class _Found(NamedTuple):
    """Plans, what no split is below, and figures about the search."""

    plans: list[Plan]
    bound: float
    stats: dict[str, Any]


def plan_optimal_split(
    problem: Problem,
    *,
    contiguous: bool = True,
    ideals: int = 60_000,
    iterations: int = 0,
    time_limit: float = 0.0,
    seed: int = 0,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the split of least max-load or latency.

    Args:
        problem: The problem.
        contiguous: Whether the devices' parts must follow one another; latency plans always do.
        ideals: Ideals that may be held; above, the search is near good orders.
        iterations: Moves of annealing, where there is any; 0 = as many as suit the size.
        time_limit: Wall seconds instead, counted from the call, which also end the looks at chains
            of ideals; 0 = none.
        seed: Seed of random orders and moves.
        trace: Called with every new best value.

    Raises:
        InfeasibleError: No split fits the devices' memory, or an op may run nowhere.
        InvalidInputError: A limit is negative, or both ``iterations`` and ``time_limit`` are given.
    """
    if ideals < 0:
        raise InvalidInputError(f"ideals is {ideals}; expected 0 or more")
    options = {
        "contiguous": contiguous,
        "ideals": ideals,
        "iterations": iterations,
        "time_limit": time_limit,
        "seed": seed,
    }
    effort = either_limit(iterations, time_limit, seed=seed, trace=trace)
    own_rule = problem.objective.metric.row.memory is MemoryRule.METRIC
    refusal: InfeasibleError | None = None
    for shrink in SHRINKS[:1] if own_rule else SHRINKS:
        if refusal is not None and effort.is_over():
            break
        try:
            found = _search(_with_memory(problem, shrink), effort, ideals, contiguous=contiguous)
            return _solution(problem, found, options)
        except InfeasibleError as exc:
            refusal = refusal or exc
    raise refusal or InfeasibleError(f"{NAME} found no plan")


def _with_memory(problem: Problem, shrink: float) -> Problem:
    """Return the problem with less memory."""
    if shrink == 1.0:
        return problem
    factor = problem.objective.memory_factor * shrink
    return replace(problem, objective=replace(problem.objective, memory_factor=factor))


def _search(problem: Problem, effort: Effort, limit: int, *, contiguous: bool) -> _Found:
    if problem.objective.metric is Metric.SINGLE_SAMPLE_LATENCY:
        return _least_latency(problem, effort, limit)
    return _least_load(problem, effort, limit, contiguous=contiguous)


def _solution(problem: Problem, found: _Found, options: dict[str, Any]) -> Solution:
    """Return the best plan that was found, by the metric of the problem."""
    values = [measure(problem, plan) for plan in found.plans]
    order = sorted(range(len(values)), key=lambda i: (bool(values[i].errors), values[i].value, i))
    plan, *others = (found.plans[index] for index in order)
    solution = solution_of(
        problem,
        plan,
        NAME,
        options,
        bound=found.bound,
        stats=found.stats,
        alternatives=others,
    )
    proven = solution.value <= solution.lower_bound * (1 + 1e-12)
    return replace(solution, proof=Proof.OPTIMAL) if proven else solution


def _least_load(problem: Problem, effort: Effort, limit: int, *, contiguous: bool) -> _Found:
    """Return the split of least max-load."""
    is_metric = problem.objective.metric is Metric.MAX_LOAD
    rebuild = partial(split_model, problem, cpus_are_hosts=is_metric)
    loose = rebuild(unordered_quotient(problem.graph))
    if np.isinf(loose.seconds).all(axis=0).any():
        raise InfeasibleError(f"{NAME}: {_why_no_split(problem, loose)}")
    bound = liquid_bound(loose) if is_metric else 0.0
    model = without_idle_nodes(rebuild(quotient(problem.graph)), rebuild)
    found = contiguous_split(model, limit, effort)
    stats = {"ideals": found.num_ideals, "best_contiguous": found.is_best}
    plans = [] if found.chain is None else [_chain_plan(problem, model, found.chain)]
    if not contiguous:
        refined = _refined(
            problem, without_idle_nodes(loose, rebuild), (model, found.chain), effort
        )
        plans = [*refined, *plans]
    if not plans:
        hint = "; contiguous=false looks at other splits" if contiguous else ""
        raise InfeasibleError(f"{NAME}: {_why_no_split(problem, model)}{hint}")
    return _Found(plans, bound, stats)


def _why_no_split(problem: Problem, model: SplitModel) -> str:
    """Return what keeps all splits of a model from fitting, as far as it is plain."""
    kinds = np.repeat(np.arange(model.num_classes), [len(members) for members in model.devices])
    need, sizes = model.node_bytes.copy(), np.diff(model.shared.ptr)
    np.add.at(need, model.shared.pins, np.repeat(model.shared_bytes, sizes))
    needs = Needs(
        problem=problem,
        unit_of=model.q.node_of,
        unit_bytes=need,
        devices=devices_in_order(model),
        limit_bytes=model.limit_bytes[kinds],
        may=np.isfinite(model.seconds)[kinds],
        total_bytes=float(model.node_bytes.sum() + model.shared_bytes.sum()),
    )
    return obstacle(needs) or unfound(needs, "split")


def _refined(
    problem: Problem, loose: SplitModel, known: tuple[SplitModel, Chain | None], effort: Effort
) -> list[Plan]:
    """Return the plan of an annealing over all splits, if it is better than the chain known."""
    model, chain = known
    home = None if chain is None else _op_devices(model.q, chain)
    start = _by_room(loose) if home is None else _node_devices(loose, home)
    flow = no_flow(loose)
    found = anneal(
        loose,
        flow,
        start,
        effort,
    )
    if not found.value < (np.inf if chain is None else chain.value):
        return []
    return [_placed_plan(problem, devices_in_order(loose)[found.device_of][loose.q.node_of])]


def _by_room(model: SplitModel) -> Array:
    """Return an assignment of large nodes first, each to the device with most room left."""
    kinds = np.repeat(np.arange(model.num_classes), [len(members) for members in model.devices])
    room = np.minimum(model.limit_bytes[kinds], 1e300)
    device_of = np.zeros(model.q.num_nodes, dtype=np.int64)
    for node in np.argsort(-model.node_bytes, kind="stable").tolist():
        may = np.isfinite(model.seconds[kinds, node])
        device = int(np.argmax(np.where(may, room, -np.inf)))
        device_of[node] = device
        room[device] -= model.node_bytes[node]
    return device_of


def _least_latency(problem: Problem, effort: Effort, limit: int) -> _Found:
    """Return the split of least single-sample latency."""
    rebuild = partial(latency_model, problem)
    loose = rebuild(unordered_quotient(problem.graph))
    if np.isinf(loose.seconds).all(axis=0).any():
        raise InfeasibleError(f"{NAME}: {_why_no_split(problem, loose)}")
    model, chain, num_ideals = _chain_of_calls(problem, effort, limit)
    if chain is None:
        raise InfeasibleError(f"{NAME}: {_why_no_split(problem, model)}")
    effort.record(chain.value)
    flow = latency_flow(problem, loose)
    found = anneal(
        loose,
        flow,
        _node_devices(loose, _op_devices(model.q, chain)),
        effort,
    )
    device_of = devices_in_order(loose)[found.device_of][loose.q.node_of]
    return _Found([_placed_plan(problem, device_of)], 0.0, {"ideals": num_ideals})


def _chain_of_calls(
    problem: Problem, effort: Effort, limit: int
) -> tuple[SplitModel, Chain | None, int]:
    """Return the best chain of calls with its model, and the ideals that were looked at."""
    q = quotient(problem.graph)
    coarse = coarse_enough(q, linear_orders(q, count=1)[0])
    model, chain, count = _calls_on(problem, coarse, effort, limit)
    if chain is None and coarse is not q:
        model, chain, count = _calls_on(problem, q, effort, 0)
    return model, chain, count


def _calls_on(
    problem: Problem, q: Quotient, effort: Effort, limit: int
) -> tuple[SplitModel, Chain | None, int]:
    rebuild = partial(latency_model, problem)
    model = rebuild(q)
    if count_ideals(model.q, limit) > limit:
        model = without_idle_nodes(model, rebuild, any_size=True)
    weight = model.seconds.min(axis=0)
    orders = linear_orders(model.q, weight=weight, count=ORDERS, seed=effort.seed)
    chain = best_calls_of_orders(model, orders, effort)
    around = orders[0] if chain is None else np.concatenate([np.sort(p) for p, _ in chain.pieces])
    lattice = window(model.q, around, min(limit, LATENCY_IDEALS))
    upper = np.inf if chain is None else chain.value
    return model, best_calls(model, lattice, upper) or chain, len(lattice)


def _op_devices(q: Quotient, chain: Chain) -> Array:
    """Return the device of the cluster of each op."""
    device_of = np.zeros(q.num_nodes, dtype=np.int64)
    for nodes, device in chain.pieces:
        device_of[nodes] = device
    return np.asarray(device_of[q.node_of])


def _node_devices(model: SplitModel, op_devices: Array) -> Array:
    """Return the place among the model's devices of the device of each node's ops."""
    place = {device: index for index, device in enumerate(devices_in_order(model).tolist())}
    device_of = np.zeros(model.q.num_nodes, dtype=np.int64)
    device_of[model.q.node_of] = [place[device] for device in op_devices.tolist()]
    return device_of


def _chain_plan(problem: Problem, model: SplitModel, chain: Chain) -> Plan:
    """Return a pipeline with a stage for each piece."""
    stage_of = np.zeros(model.q.num_nodes, dtype=np.int32)
    for stage, (nodes, _) in enumerate(chain.pieces):
        stage_of[nodes] = stage
    groups = [[device] for _, device in chain.pieces]
    return pipeline_plan(problem, frozen_array(stage_of[model.q.node_of], np.int32), groups)


def _placed_plan(problem: Problem, device_of: Array) -> Plan:
    """Return the plan that runs each op on a device of the cluster."""
    return placement_plan(
        problem.graph,
        problem.cluster.device_names,
        frozen_array(device_of, np.int32),
        schedule=problem.objective.pipeline_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )
