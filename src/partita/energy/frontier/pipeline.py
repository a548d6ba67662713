"""A pipeline that is known by its energy profile alone: no model, no transfers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partita.core.cluster import Cluster, Device, Level
from partita.core.columns import Array
from partita.core.energy import EnergyProfile
from partita.core.graph import CostOrigin, EdgeTable, Graph, OpCosts, OpTable, TensorTable
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Mode, Objective, Problem
from partita.core.program import Kind
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.cost.durations import instruction_seconds
from partita.errors import InvalidInputError
from partita.program.lower import lower

if TYPE_CHECKING:
    from partita.energy.frontier.frontier import EnergyModel

FORWARD_KINDS = (Kind.FORWARD,)
BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How the stages of a profile run.

    Attributes:
        schedule: Order of the microbatches.
        microbatches: Microbatches in a step.
        replicas: Replicas of every stage; each has clocks of its own.
        tensor_parallel: Devices that share every instruction, and its clock.
        chunks: Stages that each device takes in turn, for interleaved schedules.
    """

    schedule: Schedule = DEFAULT_SCHEDULE
    microbatches: int = 8
    replicas: int = 1
    tensor_parallel: int = 1
    chunks: int = 1


def bare_pipeline(profile: EnergyProfile, pipeline: Pipeline) -> tuple[Problem, Plan]:
    """Return a problem with one op a stage whose tensors cost nothing to move, and its plan.

    Raises:
        InvalidInputError: The stages cannot be dealt to devices as asked, or one is missing.
    """
    stages = profile.num_stages
    known = np.unique(profile.stage)
    if len(known) < stages:
        missing = int(np.argmax(known != np.arange(len(known))))
        raise InvalidInputError(
            f"energy profile {profile.name!r} says nothing of stage {missing}, but has a stage "
            f"{stages - 1}; expected stages 0 to {stages - 1}"
        )
    if stages % pipeline.chunks:
        raise InvalidInputError(
            f"{stages} stages cannot be dealt out {pipeline.chunks} to a device"
        )
    ring = stages // pipeline.chunks
    width = pipeline.replicas * pipeline.tensor_parallel
    graph = _graph(profile, stages)
    early = pipeline.schedule.row.recomputes_early
    cluster = _cluster(profile, ring, width)
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=np.arange(stages, dtype=np.int32),
        stages=tuple(_stage(stage % ring, pipeline) for stage in range(stages)),
        schedule=pipeline.schedule,
        recompute=np.array(
            [early and _fastest(profile, s, (Kind.RECOMPUTE,)) > 0 for s in range(stages)]
        ),
        microbatch_sizes=equal_microbatches(pipeline.microbatches, 1),
    )
    infers = pipeline.schedule.row.infers
    objective = Objective(
        mode=Mode.INFERENCE if infers else Mode.TRAINING,
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatches,
        optimizer_bytes_per_element=0.0,
    )
    return Problem(graph=graph, cluster=cluster, objective=objective), plan


def pipeline_model(profile: EnergyProfile, pipeline: Pipeline) -> "EnergyModel":
    """Return the energy model of a profile's stages run as a pipeline."""
    from partita.energy.frontier.frontier import energy_model  # noqa: PLC0415 (loads Numba)

    problem, plan = bare_pipeline(profile, pipeline)
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    return energy_model(program, problem.cluster, profile, seconds)


def _stage(place: int, pipeline: Pipeline) -> Stage:
    first = place * pipeline.replicas * pipeline.tensor_parallel
    groups = range(first, first + pipeline.replicas * pipeline.tensor_parallel)
    wide = pipeline.tensor_parallel
    return Stage(devices=tuple(tuple(groups[i : i + wide]) for i in range(0, len(groups), wide)))


def _graph(profile: EnergyProfile, stages: int) -> Graph:
    """Return a chain of one op a stage, with the times of its fastest clocks."""
    forward, backward = (
        np.array([_fastest(profile, stage, kinds) for stage in range(stages)])
        for kinds in (FORWARD_KINDS, BACKWARD_KINDS)
    )
    load = [_fastest(profile, stage, (Kind.LOAD,)) for stage in range(stages)]
    loaded = [stage for stage in range(stages) if load[stage] > 0]
    chain = np.arange(stages - 1)
    return Graph(
        name=profile.name,
        ops=OpTable(names=tuple(f"stage{stage}" for stage in range(stages))),
        costs=(OpCosts(origin=CostOrigin.PUBLISHED, forward_s=forward, backward_s=backward),),
        tensors=TensorTable(
            names=(
                *(f"t{stage}" for stage in range(stages)),
                *(f"input{stage}" for stage in loaded),
            ),
            producer=np.array([*range(stages), *(-1 for _ in loaded)]),
            differentiable=np.array([True] * stages + [False] * len(loaded)),
            load_s=np.array([0.0] * stages + [load[stage] for stage in loaded]),
        ),
        edges=EdgeTable(
            tensor=np.array([*chain, *range(stages, stages + len(loaded))], dtype=np.int32),
            reader=np.array([*(chain + 1), *loaded], dtype=np.int32),
        ),
        loss=stages - 1,
    )


def _fastest(profile: EnergyProfile, stage: int, kinds: tuple[Kind, ...]) -> float:
    """Return the sum over kinds of the fastest time of a stage; 0 for a kind without rows."""
    total = 0.0
    for kind in kinds:
        rows: Array = np.flatnonzero((profile.stage == stage) & (profile.kind == int(kind)))
        total += float(profile.seconds[rows].min()) if len(rows) else 0.0
    return total


def _cluster(profile: EnergyProfile, ring: int, width: int) -> Cluster:
    """Return devices side by side, each of the type that its stages have rows of."""
    types = [_type_of(profile, place, ring) for place in range(ring)]
    devices = ring * width
    return Cluster(
        devices=tuple(
            Device(name=f"gpu{index}", type=types[index // width]) for index in range(devices)
        ),
        levels=(
            Level(
                name="host",
                group_of=np.zeros(devices, np.int32),
                bandwidth_bytes_per_s=np.full(1, 1e15),
            ),
        ),
    )


def _type_of(profile: EnergyProfile, place: int, ring: int) -> str:
    """Return the type of device whose rows the stages of a place have; those for any come first.

    Raises:
        InvalidInputError: They have rows of several.
    """
    rows = np.unique(profile.device_type[profile.stage % ring == place])
    found = [profile.device_types[index] for index in rows]
    if len(found) > 1 and "" not in found:
        raise InvalidInputError(
            f"energy profile {profile.name!r} has rows of {', '.join(found)} for the device of "
            f"stage {place}; without a plan one type is expected"
        )
    return "" if "" in found else found[0]
