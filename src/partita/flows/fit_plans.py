"""Plans that are tried to see whether a model fits, and the memory that each needs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from partita.core.columns import Floats, number_or_none
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem, Schedule
from partita.core.solution import Solution
from partita.cost.judge import Peaks
from partita.cost.memory import MemoryBreakdown, memory_breakdown, memory_limits
from partita.cost.tables import SHARD_LEVEL, held_bytes
from partita.errors import InfeasibleError
from partita.flows.summary import describe_plan
from partita.objectives.placed import placement_errors
from partita.planners.equal_shapes import Shape, dealt, plans_of
from partita.planners.pipeline import cut_layers, main_devices
from partita.planners.uniform import uniform_boundaries
from partita.program.lower import lower

SHARDED: Mapping[Shard, str] = {
    Shard.OPTIMIZER: "optimizer state",
    Shard.GRADIENTS: "optimizer state and gradients",
    Shard.PARAMETERS: "optimizer state, gradients and parameters",
}
"""What replicas divide at each level of sharding, for people."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A plan that was tried, and the memory that it needs.

    Attributes:
        shape: How it uses the devices.
        problem: What it is a plan for.
        plan: The plan.
        peaks: The memory that each device of the plan needs and may use.
        memory: Where the memory of each device goes at its peak.
        step_s: Seconds of a step; NaN where it was not simulated.
    """

    shape: Shape
    problem: Problem
    plan: Plan
    peaks: Peaks
    memory: MemoryBreakdown
    step_s: float = float("nan")

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.peaks.fit

    @property
    def samples_per_s(self) -> float:
        """Samples a second; NaN where it was not simulated."""
        return self.plan.samples / self.step_s if self.step_s > 0 else float("nan")

    def to_json(self) -> dict[str, object]:
        """Return the trial as JSON values."""
        return {
            "plan": self.shape.title,
            "stages": self.shape.stages,
            "replicas": self.shape.replicas,
            "shard": self.shape.shard.value,
            "fits": self.fits,
            "microbatches": self.plan.num_microbatches,
            "microbatch_size": int(self.plan.microbatch_sizes[0]),
            "step_s": number_or_none(self.step_s),
            "samples_per_s": number_or_none(self.samples_per_s),
            "devices": [
                {
                    "device": name,
                    "peak_bytes": float(self.peaks.peak_bytes[index]),
                    "limit_bytes": number_or_none(float(self.peaks.limit_bytes[index])),
                    "parameters_bytes": float(self.memory.weights[index]),
                    "optimizer_bytes": float(self.memory.optimizer[index]),
                    **self.memory.to_json(index),
                }
                for index, name in enumerate(self.plan.devices)
            ],
        }


def is_hopeless(problem: Problem, shape: Shape) -> bool:
    """Return whether a shape cannot fit, by figures that need no Program.

    A stage holds its parameters with gradients and optimizer state, divided as they are sharded,
    and what forward saves of as many microbatches as 1F1B has in flight, or of one. Nothing is
    said of graphs whose ops have variants with memory of their own.

    Raises:
        InvalidInputError: The microbatches cannot be dealt to the replicas.
    """
    graph, objective = problem.graph, problem.objective
    batch = dealt(problem, shape.replicas)
    if len(graph.variants):
        return False
    boundaries = uniform_boundaries(graph, shape.stages)
    stage_of, count = cut_layers(graph, boundaries), len(boundaries) - 1
    trains = objective.mode is Mode.TRAINING
    table, whole = graph.parameters, held_bytes(graph.parameters, objective)
    each = whole.on_device(level=SHARD_LEVEL[shape.shard], replicas=shape.replicas).total
    used = np.unique(np.stack([table.use_parameter, stage_of[table.use_op]]), axis=1)
    held: Floats = np.zeros(count) + np.bincount(used[1], weights=each[used[0]], minlength=count)
    if trains:
        saved = graph.ops.saved_at(batch.size / graph.batch_size)
        in_flight: Floats = np.ones(count)
        if problem.objective.pipeline_schedule is Schedule.ONE_F_ONE_B:
            rounds = batch.count // shape.replicas
            in_flight = np.clip(count - np.arange(count, dtype=np.float64), 1, max(1, rounds))
        held = held + in_flight * np.bincount(stage_of, weights=saved, minlength=count)
    devices = main_devices(problem)[: count * shape.replicas]
    limit = problem.limit_bytes[devices].reshape(count, shape.replicas).min(axis=1)
    return bool((held > limit).any())


def try_shape(problem: Problem, shape: Shape) -> Trial:
    """Return what a shape needs; of the ways to gather sharded parameters the leanest.

    Raises:
        InvalidInputError: The microbatches cannot be dealt to the replicas.
        InfeasibleError: It would put an op where a rule forbids it.
    """
    plans = plans_of(problem, shape)
    shape = replace(shape, stages=len(uniform_boundaries(problem.graph, shape.stages)) - 1)
    trials = [_trial(problem, shape, plan) for plan in plans]
    return min(trials, key=lambda trial: trial.peaks.fullness)


def searched_trial(solution: Solution) -> Trial:
    """Return what the plan of a search needs, with the time of its step."""
    plan = solution.plan
    shape = Shape(
        stages=len(plan.stages),
        replicas=max(stage.num_replicas for stage in plan.stages),
        shard=max((stage.shard for stage in plan.stages), key=list(Shard).index),
        words=f"{describe_plan(plan)} (searched)",
    )
    return replace(_trial(solution.problem, shape, plan), step_s=solution.value)


def _trial(problem: Problem, shape: Shape, plan: Plan) -> Trial:
    if problem.rules:
        errors = placement_errors(problem, plan)
        if errors:
            raise InfeasibleError(errors[0])
    program = lower(problem, plan)
    memory = memory_breakdown(problem, plan, program)
    return Trial(
        shape=shape,
        problem=problem,
        plan=plan,
        peaks=Peaks(memory.peak, memory_limits(problem, plan)),
        memory=memory,
    )
