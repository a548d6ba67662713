"""Groups of options that several requests share, each declared once."""

from dataclasses import dataclass
from typing import TypeAlias

from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.metrics import Metric, metric_names
from partita.core.problem import Mode, Problem
from partita.core.schedules import Schedule, schedule_names
from partita.core.solution import Solution
from partita.planners.table import DEFAULT_PLANNER, PLANNERS
from partita.requests import Request, declare

Model: TypeAlias = str | Graph | Problem | Solution
"""A model: its name or the path of a file, or the object itself."""

GRANULARITIES = ("op", "module", "block")
DTYPES = ("float64", "float32", "bfloat16", "float16")
GPU_RESERVE = 0.08
"""Share of a GPU's memory that no plan can use: context, NCCL's buffers, fragmentation."""
OPTIMIZER_BYTES = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0}
"""Bytes of state that an optimizer keeps per element of a parameter."""


@dataclass(frozen=True, kw_only=True)
class ClusterFields(Request):
    """The devices to plan for."""

    cluster: str | Cluster | None = declare(
        None, flags=("-c",), help="Shorthand such as 2x4xa100+1x2xv100, or a file."
    )
    devices: int | None = declare(
        None, minimum=1, maximum=16, help="Number of CPU processes of this machine."
    )
    bandwidth: str | None = declare(None, help="Bandwidth by level: host=25GB/s,rack=1e9.")
    latency: str | None = declare(None, help="Latency by level: host=5us.")
    catalogue: str | None = declare(None, help="Your own device types, a YAML file.")


@dataclass(frozen=True, kw_only=True)
class ChangeFields(Request):
    """Changes of the cluster."""

    what_if: tuple[str, ...] = declare(
        (), help="Change of the cluster, such as +1x8xa100 or memory=1.2x; several times."
    )


@dataclass(frozen=True, kw_only=True)
class ShapeFields(Request):
    """What a model that is built by name is built as."""

    sequence_length: int | None = declare(
        None, minimum=2, help="Tokens per sample, not for callables."
    )
    dtype: str | None = declare(
        None, choices=DTYPES, usual="as built", help="Type of weights and inputs."
    )
    scale: float = declare(1.0, help="Factor on the widths of a built-in model.")
    granularity: str = declare("op", choices=GRANULARITIES, help="What a node of the graph is.")


@dataclass(frozen=True, kw_only=True)
class EstimateFields(Request):
    """How a model is priced by its shapes alone."""

    kernels: str = declare(
        "fused",
        choices=("fused", "eager"),
        help="Kernels of an estimate: today's, or unfused ones.",
    )
    arithmetic: str = declare(
        "", usual="the dtype", help="Arithmetic of an estimate, such as tfloat32."
    )
    recompute: bool = declare(False, help="In an estimate, blocks keep their inputs alone.")


@dataclass(frozen=True, kw_only=True)
class SourceFields(ShapeFields, EstimateFields):
    """What a model is built as, and how it is priced; a graph has its own figures."""


@dataclass(frozen=True, kw_only=True)
class StepFields(Request):
    """What a step is."""

    mode: str | None = declare(
        None, choices=[mode.value for mode in Mode], usual="training", help="Training or inference."
    )
    schedule: str | None = declare(
        None,
        choices=schedule_names,
        added=Schedule.plugins().names,
        help="Pipeline schedule.",
    )
    microbatches: int | None = declare(None, minimum=1, help="Microbatches in a step.")
    microbatch_size: int | None = declare(None, minimum=1, help="Samples in a microbatch.")
    batch_size: int | None = declare(None, minimum=1, help="Samples in a step: their product.")
    memory_factor: float | None = declare(None, help="Share of each device's memory to use.")
    reserve: float | None = declare(
        None,
        minimum=0,
        below=1,
        usual=f"{GPU_RESERVE:g} of GPUs",
        help="Share of memory to leave free for context, buffers and fragmentation.",
    )
    optimizer: str | None = declare(
        None,
        choices=list(OPTIMIZER_BYTES),
        usual="adam",
        help="Optimizer: its state counts in memory, and a run steps with it.",
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveFields(StepFields):
    """What a step is, and what is minimised."""

    objective: str | None = declare(
        None, choices=metric_names, added=Metric.plugins().names, help="Metric to minimise."
    )


@dataclass(frozen=True, kw_only=True)
class RuleFields(Request):
    """Where ops must and must not run."""

    pin: tuple[str, ...] = declare((), help="Ops that must run there: 'encoder.*=host0/*'.")
    forbid: tuple[str, ...] = declare((), help="Ops that must not run there: 'head=*/gpu0'.")


@dataclass(frozen=True, kw_only=True)
class EffortFields(Request):
    """How long a planner searches."""

    time_limit: float | None = declare(None, above=0.0, maximum=1e6, help="Seconds to search.")
    iterations: int | None = declare(
        None, minimum=1, help="Steps to search: the same plan every time."
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceFields(EffortFields):
    """Which planner, and how it searches."""

    planner: str | None = declare(
        None,
        flags=("-p",),
        usual=DEFAULT_PLANNER,
        help=f"Planner: {', '.join(PLANNERS)}, or a plug-in; some take an argument: custom:0,8,14.",
    )
    partition: str | None = declare(None, help="The same as --planner.")
    option: tuple[str, ...] = declare((), flags=("-O",), help="Option of the planner, k=v.")
    as_released: bool = declare(
        False, help="Plan as the planner's authors released it, faults and all."
    )


@dataclass(frozen=True, kw_only=True)
class PlannerFields(ChoiceFields):
    """Which planner, how it searches, and the seed of a random one."""

    seed: int | None = declare(None, help="Seed of a random planner.")
