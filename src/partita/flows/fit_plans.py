"""Plans that are tried to see whether a model fits: equal pipelines, sharded data parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from partita.core.columns import Floats
from partita.core.json_values import number_or_none
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.problem import Mode, Problem, Schedule
from partita.cost.judge import Peaks
from partita.cost.memory import MemoryBreakdown, memory_breakdown, memory_limits
from partita.cost.tables import SHARD_LEVEL, held_bytes
from partita.errors import InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.planners.pipeline import (
    cut_layers,
    layer_of_ops,
    legal_boundaries,
    main_devices,
)
from partita.planners.uniform import uniform_boundaries
from partita.program.lower import lower

SHARDED: Mapping[Shard, str] = {
    Shard.OPTIMIZER: "optimizer state",
    Shard.GRADIENTS: "optimizer state and gradients",
    Shard.PARAMETERS: "optimizer state, gradients and parameters",
}
"""What replicas divide at each level of sharding, for people."""
_CUTS = (1, 2, 4, 8, 16)
"""Parts in which a stage may gather sharded parameters, besides its layers one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A way to use all devices.

    Attributes:
        stages: Stages of the pipeline; fewer where equal numbers of layers give fewer.
        replicas: Replicas of each stage.
        shard: What the replicas divide.
    """

    stages: int
    replicas: int
    shard: Shard = Shard.NONE

    @property
    def title(self) -> str:
        """The shape for people."""
        words = f"{self.stages} stages" if self.stages > 1 else ""
        if self.replicas > 1:
            copies = f"{self.replicas} replicas"
            words = f"{words} x {copies}" if words else f"data parallel, {copies}"
        if self.shard is not Shard.NONE:
            words += f", {self.shard.value} sharded"
        return words or "one device"


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


def shapes(problem: Problem, shard: Shard = Shard.NONE) -> list[Shape]:
    """Return the ways to use all devices that are tried.

    Pipelines of every number of stages that divides the devices, replicated to use all of them.
    In training also data parallelism over all devices at each level of sharding.

    Args:
        problem: The problem.
        shard: What replicas divide at least.
    """
    count = len(main_devices(problem))
    _, layers = layer_of_ops(problem.graph)
    sizes = [size for size in range(1, min(count, layers) + 1) if count % size == 0]
    infers = problem.objective.mode is Mode.INFERENCE
    found = [
        Shape(
            stages=size,
            replicas=count // size,
            shard=shard if count > size and not infers else Shard.NONE,
        )
        for size in sizes
    ]
    if count > 1 and not infers:
        levels = list(Shard)
        more = levels[levels.index(shard) + 1 :]
        found += [Shape(stages=1, replicas=count, shard=level) for level in more]
    return found


def is_hopeless(problem: Problem, shape: Shape) -> bool:
    """Return whether a shape cannot fit, by figures that need no Program.

    A stage holds its parameters with gradients and optimizer state, divided as they are sharded,
    and what forward saves of as many microbatches as 1F1B has in flight, or of one. Nothing is
    said of graphs whose ops have variants with memory of their own.
    """
    graph, objective = problem.graph, problem.objective
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
        saved = graph.ops.saved_at(problem.microbatch_size / graph.batch_size)
        in_flight: Floats = np.ones(count)
        if problem.objective.pipeline_schedule is Schedule.ONE_F_ONE_B:
            rounds = problem.microbatches // shape.replicas
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
    if problem.microbatches % shape.replicas:
        raise InvalidInputError(
            f"{problem.microbatches} microbatches cannot be dealt to {shape.replicas} replicas"
        )
    coarse = uniform_boundaries(problem.graph, shape.stages)
    shape = replace(shape, stages=len(coarse) - 1)
    cuts = {tuple(coarse)}
    if shape.shard is Shard.PARAMETERS:
        _, layers = layer_of_ops(problem.graph)
        rounds = problem.microbatches // shape.replicas
        counts = [layers] if rounds == 1 else [shape.stages * cut for cut in _CUTS] + [layers]
        for count in counts:
            finer = {*coarse, *uniform_boundaries(problem.graph, min(count, layers))}
            cuts.add(tuple(legal_boundaries(problem.graph, sorted(finer))))
    trials = [_trial(problem, shape, coarse, list(cut)) for cut in sorted(cuts)]
    return min(trials, key=lambda trial: trial.peaks.fullness)


def _trial(problem: Problem, shape: Shape, coarse: list[int], boundaries: list[int]) -> Trial:
    plan = _plan(problem, shape, coarse, boundaries)
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


def _plan(problem: Problem, shape: Shape, coarse: list[int], boundaries: list[int]) -> Plan:
    """Return the plan that cuts at boundaries; parts of one coarse stage share its devices."""
    devices = main_devices(problem)
    names = problem.cluster.device_names
    home = np.searchsorted(coarse, boundaries[:-1], side="right") - 1
    stages = tuple(
        Stage(
            devices=tuple((int(stage) * shape.replicas + r,) for r in range(shape.replicas)),
            shard=shape.shard,
        )
        for stage in home
    )
    used = (len(coarse) - 1) * shape.replicas
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=tuple(names[device] for device in devices[:used]),
        stage_of=cut_layers(problem.graph, boundaries),
        stages=stages,
        schedule=problem.objective.pipeline_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )
