"""Predicted timeline of a plan, with memory; also disturbed, or repeated."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Program, TransferMode
from partita.core.timeline import Timeline
from partita.cost.durations import instruction_seconds
from partita.cost.memory import memory_curve, memory_limits
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.simulate import play, repeat_program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Differences of a simulated step from the ideal one.

    Attributes:
        slow: By device name, the factor by which its compute is slower (a straggler).
        perturb: Every compute and transfer time is multiplied by uniform(1 - perturb, 1 + perturb).
        seed: Of the perturbation.
    """

    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    perturb: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.perturb < 1:
            raise InvalidInputError(f"perturb is {self.perturb}; expected 0 or more, below 1")
        if self.seed < 0:
            raise InvalidInputError(f"seed is {self.seed}; expected 0 or more")
        for name, factor in self.slow.items():
            if not 0 < factor <= 1e6:
                raise InvalidInputError(
                    f"device {name!r} is slowed by {factor}; expected more than 0"
                )


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    program: Program | None = None,
    disturbance: Disturbance | None = None,
    transfers: TransferMode = TransferMode.OVERLAPPED,
    period: bool = False,
) -> Timeline:
    """Return the predicted timeline of one step, from idle.

    Args:
        problem: The problem.
        plan: A plan for it.
        program: Its Program, if it was lowered before.
        disturbance: Stragglers and noise.
        transfers: Whether messages travel beside compute, or hold their devices.
        period: Whether to find the seconds from a step to the next in steady state, too.
    """
    program = program or lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    if disturbance is not None:
        seconds = _disturbed(program, seconds, disturbance)
    timeline = play(program, problem.cluster, seconds, transfers)
    device, time_s, used = memory_curve(problem, plan, program, timeline)
    return dataclasses.replace(
        timeline,
        memory_device=device,
        memory_s=time_s,
        memory_bytes=used,
        limit_bytes=memory_limits(problem, plan),
        period_s=steady_period_s(problem, plan, transfers, program) if period else float("nan"),
    )


def makespan_s(problem: Problem, plan: Plan, transfers: TransferMode) -> float:
    """Return the seconds of one step, from idle; its memory, which takes longer, is not followed.

    Args:
        problem: The problem.
        plan: A plan for it.
        transfers: Whether messages travel beside compute, or hold their devices.
    """
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    return play(program, problem.cluster, seconds, transfers).makespan_s


def steady_period_s(
    problem: Problem,
    plan: Plan,
    transfers: TransferMode = TransferMode.OVERLAPPED,
    program: Program | None = None,
) -> float:
    """Return the seconds from a step to the next when steps follow each other.

    Weight stashing flows on: the period is what more microbatches add to a longer run. Schedules
    that flush begin a step on each device as soon as it has ended the one before.
    """
    if plan.stashes_weights:
        few, many = (
            simulate(problem, _repeat_microbatches(plan, times), transfers=transfers)
            for times in (3, 6)
        )
        # Six steps may still be filling the pipeline; no period is shorter than a device's work.
        return max((many.makespan_s - few.makespan_s) / 3, float(many.busy_s.max()) / 6)
    program = program or lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    ends = []
    for times in (3, 6):
        repeated, rows = repeat_program(program, times)
        ends.append(play(repeated, problem.cluster, seconds[rows], transfers).makespan_s)
    return (ends[1] - ends[0]) / 3


def _repeat_microbatches(plan: Plan, times: int) -> Plan:
    return dataclasses.replace(plan, microbatch_sizes=np.tile(plan.microbatch_sizes, times))


def _disturbed(program: Program, seconds: Array, disturbance: Disturbance) -> Array:
    seconds = seconds.copy()
    for name, factor in disturbance.slow.items():
        if name not in program.devices:
            raise InvalidInputError(
                f"device {name!r} is not in the plan; it uses {', '.join(program.devices[:8])}"
            )
        rows = (program.device == program.devices.index(name)) & program.is_compute
        seconds[rows] *= factor
    if disturbance.perturb:
        rng = np.random.default_rng(disturbance.seed)
        low, high = 1 - disturbance.perturb, 1 + disturbance.perturb
        seconds *= rng.uniform(low, high, len(seconds))
    return seconds
