"""A plan changed by hand: a boundary, a device, replicas, the schedule, the microbatches.

An edit is a short text, so that a list of them can be kept, shared and taken back:

    cut:2=14              14 ops lie before the boundary between stages 2 and 3
    device:3=host0/gpu1   stage 3 runs there; device:3.1=... is its replica 1
    replicas:3=2          stage 3 has two replicas
    schedule=zero-bubble  the pipeline's schedule
    microbatches=64       microbatches of a step, of the size that they have

The changed plan is lowered and simulated directly, which takes a fraction of planning. Ops are
counted by stage, and within a stage along the data, so that no edge leads back wherever a boundary
is drawn.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.core.schedules import Schedule, schedule_names
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.predict import simulate
from partita.errors import InvalidInputError
from partita.flows.solutions import evaluated
from partita.flows.summary import describe_plan, overfull
from partita.names import suggest
from partita.objectives.placed import placement_errors

MOST_MICROBATCHES = 65_536
KINDS = ("cut", "device", "replicas", "schedule", "microbatches")


@dataclass(frozen=True, kw_only=True, eq=False)
class EditedPlan:
    """A plan that was changed by hand, and its simulated step.

    Attributes:
        problem: The problem, with the schedule and the microbatches that were asked for.
        plan: The plan.
        timeline: Its step.
        refusal: The limit or rule that it breaks, in a line; empty = it keeps all.
    """

    problem: Problem
    plan: Plan
    timeline: Timeline
    refusal: str

    @property
    def step_s(self) -> float:
        """Seconds of a step; with weight stashing of the steady state."""
        period = self.timeline.period_s
        return period if math.isfinite(period) else self.timeline.makespan_s

    @property
    def title(self) -> str:
        """The plan in a few words."""
        return describe_plan(self.plan)

    def solution(self, base: Solution) -> Solution:
        """Return it as a solution that can be saved, with its value computed again.

        Args:
            base: The solution that was edited.
        """
        found = evaluated(self.problem, self.plan, base)
        return dataclasses.replace(found, planner="", options={})


def edit_plan(solution: Solution, edits: Sequence[str]) -> EditedPlan:
    """Return a plan with edits applied one after the other, simulated.

    Raises:
        InvalidInputError: An edit is not understood, or no plan comes of it; says which and why.
    """
    problem, plan = solution.problem, solution.plan
    for edit in edits:
        problem, plan = _applied(problem, plan, edit)
    plan.check_fits(problem)
    timeline = simulate(problem, plan, period=plan.stashes_weights)
    broken = placement_errors(problem, plan)
    return EditedPlan(
        problem=problem,
        plan=plan,
        timeline=timeline,
        refusal=broken[0] if broken else overfull(timeline),
    )


def op_order(plan: Plan, problem: Problem) -> Array:
    """Return the ops by stage, and within a stage along the data."""
    order = problem.graph.topological_order
    return order[np.argsort(plan.stage_of[order], kind="stable")]


def cuts_of(plan: Plan) -> list[int]:
    """Return how many ops lie before each boundary between stages."""
    ends = np.cumsum(np.bincount(plan.stage_of, minlength=len(plan.stages)))
    return [int(end) for end in ends[:-1]]


def stage_rows(found: EditedPlan) -> list[dict[str, Any]]:
    """Return the stages of an edited plan as JSON values: ops, where they end, seconds, devices."""
    plan, graph = found.plan, found.problem.graph
    spent = graph.forward_s + graph.backward_s
    seconds = np.bincount(plan.stage_of, weights=spent, minlength=len(plan.stages))
    order, ends = op_order(plan, found.problem), [*cuts_of(plan), len(plan.stage_of)]
    starts = [0, *ends[:-1]]
    return [
        {
            "ops": ends[index] - starts[index],
            "end": ends[index],
            "seconds": float(seconds[index]),
            "first": graph.ops.names[order[starts[index]]][:200],
            "devices": [[plan.devices[device] for device in group] for group in stage.devices],
            "movable": stage.ranks == 1,
        }
        for index, stage in enumerate(plan.stages)
    ]


def _applied(problem: Problem, plan: Plan, edit: str) -> tuple[Problem, Plan]:
    what, sign, value = edit.partition("=")
    kind, _, place = what.partition(":")
    if not sign or kind not in KINDS or bool(place) != (kind in KINDS[:3]):
        raise InvalidInputError(
            f"edit {edit[:80]!r} is not understood; expected cut:STAGE=OPS, device:STAGE=NAME, "
            "replicas:STAGE=N, schedule=NAME or microbatches=N"
        )
    if kind == "schedule":
        return _scheduled(problem, plan, value)
    if kind == "microbatches":
        count = _whole(value, edit, 1, MOST_MICROBATCHES)
        sizes = equal_microbatches(count, int(plan.microbatch_sizes[0]))
        objective = dataclasses.replace(problem.objective, microbatches=count)
        problem = dataclasses.replace(problem, objective=objective)
        return problem, dataclasses.replace(plan, microbatch_sizes=sizes)
    number, _, replica = place.partition(".")
    stage = _whole(number, edit, 0, len(plan.stages) - 1)
    if kind == "cut":
        return problem, _cut(problem, plan, stage, _whole(value, edit, 0, len(plan.stage_of)))
    if kind == "replicas":
        count = _whole(value, edit, 1, len(problem.cluster))
        return problem, _replicated(problem, plan, stage, count)
    most = plan.stages[stage].num_replicas - 1
    which = _whole(replica, edit, 0, most) if replica else 0
    return problem, _moved(problem, plan, (stage, which), value)


def _whole(text: str, edit: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text[:12]) <= high):
        raise InvalidInputError(f"edit {edit[:80]!r}: {text[:20]!r} is not within {low} and {high}")
    return int(text)


def _scheduled(problem: Problem, plan: Plan, name: str) -> tuple[Problem, Plan]:
    known = schedule_names()
    if name not in known:
        raise InvalidInputError(f"there is no schedule {name[:80]!r}{suggest(name, known)}")
    objective = dataclasses.replace(problem.objective, schedule=Schedule(name))
    problem = dataclasses.replace(problem, objective=objective)
    return problem, dataclasses.replace(plan, schedule=Schedule(name))


def _cut(problem: Problem, plan: Plan, stage: int, count: int) -> Plan:
    """Return the plan with so many ops before the end of a stage; both sides keep one at least."""
    cuts = [0, *cuts_of(plan), len(plan.stage_of)]
    if stage + 2 >= len(cuts):
        raise InvalidInputError(f"stage {stage} is the last: no boundary lies behind it")
    low, now, high = cuts[stage], cuts[stage + 1], cuts[stage + 2]
    if not low < count < high:
        raise InvalidInputError(
            f"the boundary behind stage {stage} may lie after {low + 1} to {high - 1} ops, not "
            f"after {count}: a stage holds an op at least"
        )
    if not problem.graph.is_forward.all():
        raise InvalidInputError(
            "the graph has backward ops of its own, which boundaries do not move"
        )
    stage_of = plan.stage_of.copy()
    order = op_order(plan, problem)
    stage_of[order[now:count]] = stage
    stage_of[order[count:now]] = stage + 1
    return dataclasses.replace(plan, stage_of=stage_of)


def _names(plan: Plan) -> list[list[list[str]]]:
    """Return the names of devices by stage, replica and rank."""
    return [
        [[plan.devices[device] for device in group] for group in stage.devices]
        for stage in plan.stages
    ]


def _placed(problem: Problem, plan: Plan, names: Sequence[Sequence[Sequence[str]]]) -> Plan:
    """Return the plan with stages on devices by name; those of the plan are in the cluster's order.

    A stage whose number of replicas changed deals a microbatch to each in turn.
    """
    used = {name for stage in names for group in stage for name in group}
    devices = [name for name in problem.cluster.device_names if name in used]
    at = {name: index for index, name in enumerate(devices)}
    stages = []
    for stage, groups in zip(plan.stages, names, strict=True):
        changes: dict[str, Any] = {
            "devices": tuple(tuple(at[name] for name in group) for group in groups)
        }
        if len(groups) != stage.num_replicas:
            changes["shares"] = ()
        stages.append(dataclasses.replace(stage, **changes))
    return dataclasses.replace(plan, devices=tuple(devices), stages=tuple(stages))


def _single(stage: Stage, number: int) -> None:
    if stage.ranks > 1:
        raise InvalidInputError(
            f"a replica of stage {number} is {stage.ranks} devices that divide its tensors; such "
            "groups are not moved by hand"
        )


def _moved(problem: Problem, plan: Plan, place: tuple[int, int], device: str) -> Plan:
    """Return the plan with a stage on another device; one that is in use is exchanged with it."""
    stage, replica = place
    _single(plan.stages[stage], stage)
    if device not in problem.cluster.index_of:
        known = problem.cluster.device_names
        raise InvalidInputError(f"there is no device {device[:80]!r}{suggest(device, known)}")
    names = _names(plan)
    old = names[stage][replica][0]
    if device not in plan.devices:
        names[stage][replica][0] = device
        return _placed(problem, plan, names)
    swapped = {old: device, device: old}
    changed = [[[swapped.get(n, n) for n in group] for group in groups] for groups in names]
    return _placed(problem, plan, changed)


def _replicated(problem: Problem, plan: Plan, stage: int, count: int) -> Plan:
    """Return the plan with another number of replicas of a stage, on idle devices close by."""
    _single(plan.stages[stage], stage)
    names = _names(plan)
    own = names[stage]
    more = count - len(own)
    cluster = problem.cluster
    first = cluster.devices[cluster.index_of[own[0][0]]]
    idle = [device for device in cluster.devices if device.name not in plan.devices]
    idle.sort(key=lambda each: (each.type != first.type, each.host != first.host))
    if more > len(idle):
        raise InvalidInputError(
            f"{count} replicas of stage {stage} need {more} idle devices more; there are "
            f"{len(idle)}: take them from other stages first"
        )
    names[stage] = own[:count] if more <= 0 else [*own, *([one.name] for one in idle[:more])]
    return _placed(problem, plan, names)
