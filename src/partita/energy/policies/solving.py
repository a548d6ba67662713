"""A frontier to be solved, as plain text that another process can be handed.

Solving takes seconds and holds the interpreter, so that a server does it elsewhere; the key of a
task is a digest of all that its answer depends on, under which the answer can be kept.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from partita.core.cluster import Cluster
from partita.core.codec import read_json, write_json
from partita.core.energy import EnergyProfile
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.core.solution import Solution
from partita.cost.durations import instruction_seconds
from partita.energy.frontier.pipeline import Pipeline, bare_pipeline
from partita.program.lower import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the instructions of one pipeline follow from little text.

    Attributes:
        solution: The document of the plan that runs; empty = the four figures below.
        stages: Stages.
        tensor_parallel: Devices of a stage.
        microbatches: Microbatches of a step.
        schedule: Their order.
    """

    solution: str = ""
    stages: int = 1
    tensor_parallel: int = 1
    microbatches: int = 1
    schedule: Schedule = DEFAULT_SCHEDULE


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveTask:
    """A frontier to be solved.

    Attributes:
        shape: The pipeline.
        profile: The document of its energy profile.
        device_types: Type of each device of the pipeline, for the rows of the profile.
        points: Points of the frontier.
        quick: Whether an answer in a fraction of the time is worth more than the last permille.
    """

    shape: Shape
    profile: str
    device_types: tuple[str, ...]
    points: int
    quick: bool = False

    @property
    def key(self) -> str:
        """A digest of the task."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def shaped(shape: Shape, profile: EnergyProfile) -> tuple[Problem, Plan]:
    """Return the problem and the plan of a shape; the profile gives bare stages their times."""
    if shape.solution:
        solution: Solution = read_json(shape.solution)
        return solution.problem, solution.plan
    pipeline = Pipeline(
        schedule=Schedule(shape.schedule),
        microbatches=shape.microbatches,
        tensor_parallel=shape.tensor_parallel,
    )
    return bare_pipeline(profile, pipeline)


def with_types(cluster: Cluster, program: Program, types: tuple[str, ...]) -> Cluster:
    """Return a cluster in which the devices of a Program are of other types."""
    devices = list(cluster.devices)
    for name, kind in zip(program.devices, types, strict=True):
        place = cluster.index_of[name]
        devices[place] = replace(devices[place], type=kind)
    return replace(cluster, devices=tuple(devices))


def solve_task(task: SolveTask) -> str:
    """Return the document of the frontier of a task.

    Raises:
        InvalidInputError: The profile does not fit the pipeline.
    """
    from partita.energy.frontier.frontier import energy_model, solve_frontier  # noqa: PLC0415 (Numba)

    profile: EnergyProfile = read_json(task.profile)
    problem, plan = shaped(task.shape, profile)
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    cluster = with_types(problem.cluster, program, task.device_types)
    model = energy_model(program, cluster, profile, seconds)
    if task.quick:
        return write_json(solve_frontier(model, points=task.points, tries=0))
    return write_json(solve_frontier(model, points=task.points))


def warm_up() -> None:
    """Solve a small frontier: the first one asked for then finds its code loaded and compiled."""
    forward, backward = int(Kind.FORWARD), int(Kind.BACKWARD)
    profile = EnergyProfile(
        stage=np.repeat([0, 1], 4),
        kind=np.tile(np.repeat([forward, backward], 2), 2),
        clock_mhz=np.tile([2.0, 1.0], 4),
        seconds=np.tile([1.0, 1.8, 2.0, 3.6], 2) * np.repeat([1.0, 1.5], 4),
        joules=np.tile([300.0, 270.0, 600.0, 540.0], 2),
        blocking_w={"": 80.0},
    )
    shape = Shape(stages=2, microbatches=3)
    solve_task(SolveTask(shape=shape, profile=write_json(profile), device_types=("", ""), points=3))
