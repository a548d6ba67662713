"""The time-energy frontier of a plan, what it saves, and how clocks from elsewhere fare.

A step is charged ``sum of e + sum over devices of P (T - busy)``: the joules of every instruction
at its clock, and the blocking power P of a device whenever it waits. Whatever is said here of a
step was simulated with the profile's own seconds.

With a straggler every one of n pipelines takes T'. The straggler itself runs its fastest clocks,
time and energy stretched to T'; each of the others uses a frontier point of time t and waits:
``E(t) + P_all (T' - t)``. The baseline is the same with every clock at its highest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.columns import Array
from partita.core.energy import TIE, EnergyOrigin, EnergyProfile, Frontier
from partita.core.problem import Metric
from partita.core.program import LAST_COMPUTE, Kind, Program
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.durations import instruction_seconds
from partita.cost.judge import measure
from partita.energy.frontier.choose import PointLimits, choose_point
from partita.energy.frontier.clock_plan import NAMES
from partita.energy.frontier.frontier import (
    TRIES,
    EnergyModel,
    clock_changes,
    energy_model,
    solve_frontier,
)
from partita.energy.frontier.pipeline import Pipeline, bare_pipeline
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.simulate import play

SAME_MHZ = 1.0
"""Clocks that differ by less are the same one: drivers and files cut fractions off."""
_UNNAMED = (
    (Kind.FORWARD, Kind.BACKWARD),
    tuple(kind for kind in NAMES if kind not in (Kind.LOAD, Kind.UPDATE)),
)
"""Kinds that a clock plan without names may list; it means the first that are as many."""


def pipeline_solution(profile: EnergyProfile, pipeline: Pipeline) -> Solution:
    """Return the plan of a pipeline that is known by its energy profile alone."""
    problem, plan = bare_pipeline(profile, pipeline)
    value = measure(problem, plan).value
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=value, unit="s")


def model_of(solution: Solution, profile: EnergyProfile) -> EnergyModel:
    """Return the Program of a plan with the clocks that its instructions may run at."""
    problem, plan = solution.problem, solution.plan
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    return energy_model(program, problem.cluster, profile, seconds)


def frontier_of(
    solution: Solution,
    profile: EnergyProfile,
    *,
    points: int = 50,
    to_slowest: bool = False,
    at: Sequence[float] = (),
    stragglers: Sequence[float] = (),
    tries: int = TRIES,
) -> Frontier:
    """Return the frontier of a plan, which carries the plan and the profile with it.

    One of its points is at the time of all-max, where that is not the fastest.

    Args:
        solution: The plan.
        profile: Seconds and joules of its stages by clock.
        points: Number of points.
        to_slowest: Whether to go on beyond the least energy.
        at: Further times, in seconds, at which a point is wanted.
        stragglers: Further times, relative to all-max.
        tries: How long to search for better clocks, as ``solve_frontier`` says.
    """
    model = model_of(solution, profile)
    all_max_s = model.all_max()[0]
    asked = (all_max_s, *at, *(all_max_s * factor for factor in stragglers))
    found = solve_frontier(model, points=points, to_slowest=to_slowest, at=asked, tries=tries)
    return replace(found, solution=solution, profile=profile)


def with_point_at(frontier: Frontier, time_s: float, *, tries: int = TRIES) -> Frontier:
    """Return a frontier with a point at a time, solved for if it carries its plan and profile.

    A time before its first point or after T* needs none; nor does one that has a point.
    """
    between = float(frontier.time_s[0]) < time_s < frontier.best_s
    near = float(np.min(np.abs(frontier.time_s - time_s)))
    if frontier.solution is None or frontier.profile is None or not between or near < TIE * time_s:
        return frontier
    model = model_of(frontier.solution, frontier.profile)
    more = solve_frontier(model, points=1, at=(time_s,), tries=tries)
    times, joules, bounds = (
        np.concatenate([getattr(each, name) for each in (frontier, more)])
        for name in ("time_s", "energy_j", "bound_j")
    )
    clocks = np.concatenate([frontier.clock_mhz, more.clock_mhz])
    order = np.lexsort((joules, times))
    least = np.minimum.accumulate(joules[order])
    kept = order[np.concatenate([[True], joules[order][1:] < least[:-1]])]
    return replace(
        frontier,
        time_s=times[kept],
        energy_j=joules[kept],
        bound_j=bounds[kept],
        clock_mhz=clocks.reshape(len(times), -1)[kept].ravel(),
    )


def sources_of(frontier: Frontier) -> tuple[Solution, EnergyProfile]:
    """Return the plan and the profile that a frontier was solved for.

    Raises:
        InvalidInputError: It does not carry them.
    """
    if frontier.solution is None or frontier.profile is None:
        raise InvalidInputError(
            "this frontier does not carry its plan and profile; solve it with "
            "'partita energy frontier'"
        )
    return frontier.solution, frontier.profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A step with a clock for every instruction, simulated.

    Attributes:
        timeline: The step, with the clock and the joules of every instruction that has them.
        energy_j: Joules of the step, waiting included.
        waiting_j: Those of waiting devices among them.
    """

    timeline: Timeline
    energy_j: float
    waiting_j: float

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.makespan_s


def played(model: EnergyModel, clocks: Array) -> Played:
    """Return a step with given clocks, simulated with the profile's own figures.

    Args:
        model: The Program and its profile.
        clocks: The clock of each row; 0 = the one before stays, at first the highest.

    Raises:
        InvalidInputError: The profile does not know an instruction at its clock.
    """
    program, profile = model.program, model.profile
    seconds, joules = model.seconds.copy(), np.full(len(program), np.nan)
    shown = np.full(len(program), np.nan)
    rows_of: dict[tuple[int, int, int, float], int] = {}
    for row, clock in _held_clocks(program, clocks):
        device, kind, stage = (
            int(column[row]) for column in (program.device, program.kind, program.stage)
        )
        key = (stage, kind, device, clock)
        if key not in rows_of:
            rows_of[key] = _profile_row(profile, stage, kind, model.device_types[device], clock)
        found = rows_of[key]
        if found >= 0:
            seconds[row], joules[row] = profile.seconds[found], profile.joules[found]
            shown[row] = profile.clock_mhz[found]
    waits = np.zeros(len(program))
    if profile.switch_s:
        held = np.where(np.isnan(shown), 0.0, shown)
        waits = profile.switch_s * clock_changes(program, held[None])[0]
    timeline = play(program, model.cluster, seconds + waits)
    known = ~np.isnan(joules)
    powers = np.array([profile.blocking_power_w(name) for name in model.device_types])
    busy = np.bincount(
        program.device[known], weights=seconds[known], minlength=len(program.devices)
    )
    waiting = float((powers * (timeline.makespan_s - busy)).sum())
    return Played(
        timeline=replace(timeline, clock_mhz=shown, energy_j=joules),
        energy_j=float(joules[known].sum()) + waiting,
        waiting_j=waiting,
    )


def _held_clocks(program: Program, clocks: Array) -> list[tuple[int, float]]:
    """Return the compute rows with the clock that holds there; 0 = none was set yet."""
    result = []
    for device in range(len(program.devices)):
        held = 0.0
        for row in range(int(program.ptr[device]), int(program.ptr[device + 1])):
            if program.kind[row] > LAST_COMPUTE:
                continue
            held = float(clocks[row]) or held
            result.append((row, held))
    return result


def _profile_row(
    profile: EnergyProfile, stage: int, kind: int, device_type: str, clock: float
) -> int:
    """Return the row of an instruction at a clock, 0 = the highest; -1 where it has no rows."""
    rows = profile.rows_of(stage, kind, device_type)
    if not len(rows):
        return -1
    known = profile.clock_mhz[rows]
    if not clock:
        return int(rows[np.argmax(known)])
    nearest = int(np.argmin(np.abs(known - clock)))
    if abs(known[nearest] - clock) > SAME_MHZ:
        name = NAMES[Kind(kind)]
        raise InvalidInputError(
            f"stage {stage}, {name}: the profile has no row at {clock:g} MHz; the nearest is "
            f"{known[nearest]:g} MHz"
        )
    return int(rows[nearest])


def planned_clocks(program: Program, plan: Sequence[Sequence[tuple[str, int]]]) -> Array:
    """Return the clock of each row of a Program that a clock plan asks for; 0 = not named.

    A plan has a list for each device, or one for each stage, which all of its devices follow.

    Raises:
        InvalidInputError: It is not one for this Program; says where it differs.
    """
    clocks = np.zeros(len(program))
    lists = _lists_of_devices(program, plan)
    for device, entries in enumerate(lists):
        rows = _rows_listed(program, device, entries)
        if len(rows) != len(entries):
            raise InvalidInputError(
                f"the clock plan has {len(entries)} entries for {program.devices[device]}, which "
                f"has {len(rows)} such instructions in a step"
            )
        for position, (row, (name, clock)) in enumerate(zip(rows, entries, strict=True)):
            ours = NAMES[Kind(int(program.kind[row]))]
            if name not in ("", ours):
                raise InvalidInputError(
                    f"entry {position} of {program.devices[device]} in the clock plan is {name!r}; "
                    f"the plan does {ours!r} there"
                )
            clocks[row] = clock
    return clocks


def _rows_listed(program: Program, device: int, entries: Sequence[tuple[str, int]]) -> list[int]:
    """Return the rows of a device of the kinds that its entries name."""
    named = {name for name, _ in entries}
    choices: Sequence[Sequence[Kind]] = _UNNAMED
    if named != {""}:
        choices = [[kind for kind in NAMES if NAMES[kind] in named]]
    own = range(int(program.ptr[device]), int(program.ptr[device + 1]))
    found = [[row for row in own if program.kind[row] in kinds] for kinds in choices]
    return next((rows for rows in found if len(rows) == len(entries)), found[0])


def _lists_of_devices(
    program: Program, plan: Sequence[Sequence[tuple[str, int]]]
) -> list[Sequence[tuple[str, int]]]:
    if len(plan) == len(program.devices):
        return list(plan)
    if len(plan) != program.num_stages:
        raise InvalidInputError(
            f"the clock plan has {len(plan)} lists; expected one for each of "
            f"{len(program.devices)} devices or {program.num_stages} stages"
        )
    compute = np.flatnonzero(program.kind <= LAST_COMPUTE)
    first = [
        compute[program.device[compute] == device][:1] for device in range(len(program.devices))
    ]
    return [plan[int(program.stage[rows[0]])] if len(rows) else () for rows in first]


def waiting_w(frontier: Frontier) -> float:
    """Return the power of all devices of a frontier together while they wait."""
    solution, profile = sources_of(frontier)
    cluster = solution.problem.cluster
    types = (cluster.devices[cluster.index_of[name]].type for name in frontier.devices)
    return sum(profile.blocking_power_w(name) for name in types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What a frontier saves against every clock at its highest.

    Attributes:
        straggler: How much slower than the highest clocks the slowest pipeline is; 1 = none.
        pipelines: Pipelines that wait for each other at the end of a step.
        point: The frontier's point that the others use.
        time_s: Seconds of a step of all.
        all_max_j: Joules of a step of all with the highest clocks.
        energy_j: Joules with the frontier's.
    """

    straggler: float
    pipelines: int
    point: int
    time_s: float
    all_max_j: float
    energy_j: float

    @property
    def saving(self) -> float:
        """Share of the energy that is saved."""
        return 1 - self.energy_j / self.all_max_j if self.all_max_j > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "straggler": self.straggler,
            "pipelines": self.pipelines,
            "point": self.point,
            "time_s": self.time_s,
            "all_max_j": self.all_max_j,
            "energy_j": self.energy_j,
            "saving": self.saving,
        }


def savings(
    frontier: Frontier, *, straggler: float = 1.0, pipelines: int = 1, waiting: float | None = None
) -> Savings:
    """Return what the frontier saves without slowing anybody down.

    Without a straggler all pipelines use the cheapest point within the time of all-max (of the
    fastest point, where none is as fast). With one they use the point at ``min(T*, T')``.

    Args:
        frontier: Of one pipeline.
        straggler: T' over the time of all-max, 1 = no straggler.
        pipelines: How many there are, the straggler among them.
        waiting: Power of a whole pipeline that waits; None = as its profile says.

    Raises:
        InvalidInputError: The straggler is faster than the others, or nobody waits for it.
    """
    if straggler < 1 or pipelines < 1:
        raise InvalidInputError(
            f"straggler is {straggler:g} and pipelines {pipelines}; expected 1 or more"
        )
    if straggler > 1 and pipelines < 2:
        raise InvalidInputError("a straggler needs other pipelines that wait; pipelines is 1")
    fastest = float(frontier.time_s[0])
    limit = max(straggler * frontier.all_max_s, fastest)
    point = choose_point(frontier, PointLimits(straggler_s=limit))
    if straggler <= 1:
        own = float(frontier.energy_j[point])
        return Savings(
            straggler=1.0,
            pipelines=pipelines,
            point=point,
            time_s=float(frontier.time_s[point]),
            all_max_j=pipelines * frontier.all_max_j,
            energy_j=pipelines * own,
        )
    power = waiting_w(frontier) if waiting is None else waiting
    others = pipelines - 1
    base = _with_wait(frontier.all_max_s, frontier.all_max_j, limit, power)
    ours = _with_wait(float(frontier.time_s[point]), float(frontier.energy_j[point]), limit, power)
    slow = float(frontier.energy_j[0]) * limit / fastest
    slow_base = frontier.all_max_j * limit / frontier.all_max_s
    return Savings(
        straggler=straggler,
        pipelines=pipelines,
        point=point,
        time_s=limit,
        all_max_j=slow_base + others * base,
        energy_j=slow + others * ours,
    )


def _with_wait(time_s: float, energy_j: float, until_s: float, power_w: float) -> float:
    return energy_j + power_w * max(0.0, until_s - time_s)


def claimed_frontier(times: Array, joules: Array, base: Frontier) -> Frontier:
    """Return points that somebody claims, without clocks, beside the all-max of another frontier.

    Points that another one beats in both are left out. No bound is known for them.
    """
    order = np.lexsort((joules, times))
    least = np.minimum.accumulate(joules[order])
    kept = order[np.concatenate([[True], joules[order][1:] < least[:-1]])]
    return Frontier(
        devices=base.devices,
        num_instructions=0,
        time_s=times[kept],
        energy_j=joules[kept],
        bound_j=np.zeros(len(kept)),
        clock_mhz=np.zeros(0),
        all_max_s=base.all_max_s,
        all_max_j=base.all_max_j,
        fastest_s=float(times[kept].min()),
        best_s=float(times[kept][np.argmin(joules[kept])]),
        origin=EnergyOrigin.PUBLISHED,
    )


def frontier_figures(frontier: Frontier) -> Mapping[str, Any]:
    """Return a frontier's figures as JSON values, without its clocks."""
    return {
        "origin": frontier.origin.value,
        "devices": list(frontier.devices),
        "instructions": frontier.num_instructions,
        "all_max_s": frontier.all_max_s,
        "all_max_j": frontier.all_max_j,
        "fastest_s": frontier.fastest_s,
        "best_s": frontier.best_s,
        "better_than_all_max": list(frontier.better_than_all_max),
        "points": [
            {"time_s": time, "energy_j": energy, "bound_j": bound, "gap": gap}
            for time, energy, bound, gap in zip(
                *(
                    column.tolist()
                    for column in (
                        *(frontier.time_s, frontier.energy_j, frontier.bound_j),
                        frontier.gap,
                    )
                ),
                strict=True,
            )
        ],
    }
