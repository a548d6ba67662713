"""Piper: pipeline, data and tensor parallelism with recomputation under memory.

Tarnawski, Narayanan and Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. Stages i = 1..m in order, each with a data-parallel degree d_i, a tensor-parallel
degree t_i and, for each op, whether it recomputes; y_i = ceil((d_i + ... + d_m) / d_i) microbatches
are in flight. With f_v the faster choice of an op, e_v the extra seconds of the slower one, R_i the
ops that take the slower one, c the transfers and g the gradients a microbatch:

    T = min max_i (Σ f_v + Σ_R e_v + c_i + (d_i - 1) g_i) / d_i
    Σ (A_v y_i + B_v) <= memory,   Σ d_i t_i <= devices,   d_i divides N,   Σ d_i <= N

The paper fills a table over ideals, devices and sums of degrees. Here T is bisected; for one T only
ways that no other beats in (sum of degrees, devices) are kept for each ideal, and a stage takes the
least d that keeps T (see ``search``). With P pairs of ideals, D divisors of N, F the longest front:
``O(P t (F + D))`` a trial and about 15 trials, instead of ``O(P t k d y)``.

Departures from the published program:

* The choice of R is exact (branch and bound over items sorted by seconds a byte) instead of greedy,
  which can be worse by some percent; where that stays open, so does the proof.
* Ops with several choices of unequal parameters or exchanged bytes are charged the dearer one.
* More ideals than fit are cut down to a window around one order (see ``space``).
* Devices of unequal memory: those with at least m bytes, for every m that there is.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import frozen_array
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.effort import SearchTrace
from partita.planners.pipeline import solution_of
from partita.planners.piper.choices import Allowed, Choices, choices_of
from partita.planners.piper.pools import Pool, assign_devices, pools, search_in, why_nothing_fits
from partita.planners.piper.search import TOLERANCE, Found
from partita.planners.piper.space import (
    THOROUGH,
    Space,
    restricted,
    space_of,
)

ROUNDED = (1 + 1e-12, 1 - 1e-9)
"""Shares of the memory to plan with: sums of bytes may round to either side of a limit."""


class _Task(NamedTuple):
    """Plans of some kinds over some devices."""

    problem: Problem
    allowed: Allowed
    choices: Choices
    pool: Pool

    def with_share(self, share: float) -> "_Task":
        """Return the task with a share of the devices' memory."""
        return self._replace(pool=replace(self.pool, size=self.pool.size * share))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draft:
    """A plan that was found, with what the search says of it."""

    plan: Plan
    found: Found
    whole: bool


def plan_piper(
    problem: Problem,
    *,
    data_parallel: bool = True,
    tensor_parallel: bool = True,
    recompute: bool = True,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the plan whose slowest stage is fastest, by Piper's objective.

    Args:
        problem: The problem.
        data_parallel: Whether a stage may have several replicas.
        tensor_parallel: Whether ops may be split over devices, as the graph's variants say.
        recompute: Whether activations may be computed again to save memory.
        trace: Records the values of plans as they are found.

    Raises:
        InfeasibleError: No plan fits; names an op or a device and its limit.
        InvalidInputError: The metric is another one, or the graph has no variants of its ops.
    """
    options = {
        "data_parallel": data_parallel,
        "tensor_parallel": tensor_parallel,
        "recompute": recompute,
    }
    if problem.objective.metric is not Metric.PIPER or not len(problem.graph.variants):
        raise InvalidInputError(
            f"piper minimises its own objective over variants of ops; the metric is "
            f"{problem.objective.metric.value}, and graph {problem.graph.name!r} has "
            f"{len(problem.graph.variants)} variants: choose another planner, such as auto"
        )
    allowed = Allowed(
        data_parallel=data_parallel, tensor_parallel=tensor_parallel, recompute=recompute
    )
    return _best_plan(problem, allowed, options, trace)


def _best_plan(
    problem: Problem, allowed: Allowed, options: dict[str, Any], trace: SearchTrace | None
) -> Solution:
    """Return the best plan by Piper's own objective."""
    choices = choices_of(problem, allowed)
    failures: list[InfeasibleError] = []
    tasks = [_Task(problem, allowed, choices, pool) for pool in pools(problem)]
    for share in ROUNDED:
        drafts = [_draft(task.with_share(share)) for task in tasks]
        found = [draft for draft in drafts if draft is not None]
        if not found:
            break
        try:
            best = min(found, key=lambda draft: draft.found.value)
            solution = _proven(problem, allowed, choices, best, options)
        except InfeasibleError as exc:
            failures.append(exc)
            continue
        if trace is not None:
            trace.record(solution.value)
        return solution
    if failures:
        raise failures[0]
    largest = max(pools(problem), key=lambda pool: pool.size)
    raise InfeasibleError(why_nothing_fits(problem, allowed, choices, largest))


def _proven(
    problem: Problem, allowed: Allowed, choices: Choices, draft: _Draft, options: dict[str, Any]
) -> Solution:
    """Return a plan of Piper's own objective with what is proven of it."""
    found = draft.found
    stats = {"trials": found.trials, "all_ideals": draft.whole}
    only, *others = pools(problem)
    alike = not others and len(only.devices) == len(problem.cluster)
    everything = alike and allowed == Allowed() and bool(problem.allowed[1].all())
    given = problem.objective.microbatches is not None
    if not (everything and given and draft.whole and choices.exact):
        return solution_of(problem, draft.plan, "piper", options, stats=stats)
    closed = found.bound >= found.value * (1 - 2 * TOLERANCE)
    proof = Proof.OPTIMAL if closed else Proof.FEASIBLE
    return solution_of(
        problem, draft.plan, "piper", options, proof=proof, bound=found.bound, stats=stats
    )


def _draft(task: _Task) -> _Draft | None:
    """Return the best plan of a task; ``None`` where none fits."""
    problem, allowed, choices, pool = task
    space = space_of(problem.graph, choices, pool.size, THOROUGH)
    row_of, matrix = problem.allowed
    space = restricted(space, row_of, matrix[:, pool.devices])
    found = search_in(problem, allowed, choices, space, pool).best()
    if not found.stages:
        return None
    plan = _plan_of(problem, choices, space, found, pool)
    return _Draft(plan=plan, found=found, whole=space.whole)


def _plan_of(problem: Problem, choices: Choices, space: Space, found: Found, pool: Pool) -> Plan:
    graph, member = problem.graph, space.lattice.member
    stage_of = np.zeros(len(graph), dtype=np.int32)
    degree_of = np.zeros(len(graph), dtype=np.int64)
    for number, placed in enumerate(found.stages):
        inside = member[space.stages.upper[placed.stage]] != member[placed.lower]
        ops = inside[space.node_of]
        stage_of[ops] = number
        degree_of[ops] = placed.degree
    ops = np.arange(len(graph))
    slower = found.slower[space.item_of] != 0
    slower &= np.isfinite(choices.extra_s[degree_of, ops])
    shapes = [(stage.data, int(choices.degrees[stage.degree])) for stage in found.stages]
    groups = assign_devices(problem, stage_of, [d * t for d, t in shapes], pool.devices)
    first = np.cumsum([0, *(len(group) for group in groups)]).tolist()
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(problem.cluster.device_names[device] for group in groups for device in group),
        stage_of=frozen_array(stage_of, np.int32),
        stages=tuple(
            Stage(devices=tuple(tuple(range(b + r * t, b + (r + 1) * t)) for r in range(d)))
            for b, (d, t) in zip(first, shapes, strict=False)
        ),
        schedule=problem.objective.pipeline_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
        recompute=frozen_array(choices.recompute[degree_of, ops] ^ slower, np.bool_),
    )
