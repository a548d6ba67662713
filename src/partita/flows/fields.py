"""Groups of options that several requests share, each declared once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Protocol, TypeAlias

from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.metrics import Metric, metric_names
from partita.core.plan import RECOMPUTE_SETS, Plan
from partita.core.precision import DEFAULT_OPTIMIZER, OPTIMIZERS, PRECISIONS
from partita.core.problem import Mode, Problem
from partita.core.schedules import Schedule, schedule_names
from partita.core.solution import Solution
from partita.cost.tables import GPU_RESERVE
from partita.documents import OpenedFile
from partita.errors import InvalidInputError
from partita.planners.table import DEFAULT_PLANNER, PLANNERS
from partita.requests import Request, declare

if TYPE_CHECKING:
    from partita.workers import Workers

SLURM = "slurm"
"""The cluster that Slurm describes, and the engine."""

Model: TypeAlias = str | Graph | Problem | Solution
"""A model: its name or the path of a file, or the object itself."""


class HasSolution(Protocol):
    """A result that holds a plan with its problem, such as that of ``partita.plan``."""

    @property
    def solution(self) -> Solution:
        """The plan with its problem."""
        ...


PlanSource: TypeAlias = str | OpenedFile | Solution | HasSolution
"""A plan: the path of a file, the file opened already, a solution, or a result that has one."""


def is_python(model: str) -> bool:
    """Return whether a model is named by a file of Python: ``model.py`` or ``model.py:build``."""
    return model.partition(":")[0].endswith(".py")


def is_slurm(spec: object) -> bool:
    """Return whether a user means Slurm's cluster: ``slurm``, or ``slurm:PARTITION``."""
    return isinstance(spec, str) and spec.partition(":")[0] == SLURM


GRANULARITIES = ("op", "module", "block")
DTYPES = ("float64", "float32", "bfloat16", "float16")
WHOLE_OR_NONE = ("none", "full")
"""What ``recompute`` may be of any model; large transformers have named sets, too."""


@dataclass(frozen=True, kw_only=True)
class ClusterFields(Request):
    """The devices to plan for."""

    group = "cluster"
    cluster: str | Cluster | None = declare(
        None,
        often=True,
        flags=("-c",),
        help="Shorthand such as 2x4xa100+1x2xv100, a file, or slurm: its nodes.",
    )
    type: str | None = declare(
        None,
        help="Type of GPUs that a file of the cluster does not name: a100, or 8xa100 per host.",
    )
    devices: int | None = declare(
        None, often=True, minimum=1, maximum=16, help="Number of CPU processes of this machine."
    )
    bandwidth: str | None = declare(None, help="Bandwidth by level: host=25GB/s,rack=1e9.")
    latency: str | None = declare(None, help="Latency by level: host=5us.")
    catalogue: str | None = declare(None, help="Your own device types, a YAML file.")


@dataclass(frozen=True, kw_only=True)
class WorkerFields(Request):
    """What works where there is much to do."""

    group = "workers"
    workers: str | int = declare(
        "1",
        often=True,
        metavar="N|ray[:ADDRESS]",
        help="Processes of this machine that work at a time, or those of a Ray; same results.",
    )

    @contextmanager
    def working(self) -> Iterator["Workers | None"]:
        """Yield the workers; None = this process alone.

        Raises:
            InvalidInputError: There are none of that name.
            UnsupportedError: There is no Ray.
        """
        if str(self.workers) == "1":
            yield None
            return
        from partita.workers import open_workers  # noqa: PLC0415 (rarely used)

        with open_workers(str(self.workers)) as workers:
            yield workers


@dataclass(frozen=True, kw_only=True)
class ChangeFields(Request):
    """Changes of the cluster."""

    group = "cluster"
    what_if: tuple[str, ...] = declare(
        (),
        often=True,
        help="Change of the cluster: +1x8xa100, -host0/gpu3 or memory=1.2x; several times.",
    )


@dataclass(frozen=True, kw_only=True)
class LengthFields(Request):
    """How long samples are."""

    group = "model"
    sequence_length: int | None = declare(
        None, minimum=2, help="Tokens per sample, not for callables."
    )


@dataclass(frozen=True, kw_only=True)
class ShapeFields(LengthFields):
    """What a model that is built by name is built as."""

    group = "model"
    dtype: str | None = declare(
        None, choices=DTYPES, usual="as built", help="Type of weights and inputs."
    )
    scale: float = declare(1.0, help="Factor on the widths of a built-in model.")
    granularity: str = declare(
        "op", choices=GRANULARITIES, help="Make each node of the graph one of these."
    )


def joined_sets() -> list[str]:
    """Return the texts that join named sets of recomputation: ``mlp+norm``, in any order."""
    single = [name for name in RECOMPUTE_SETS if name not in WHOLE_OR_NONE]
    return [
        "+".join(names)
        for count in range(2, len(single) + 1)
        for names in permutations(single, count)
    ]


@dataclass(frozen=True, kw_only=True)
class EstimateFields(Request):
    """How a model is priced by its shapes alone."""

    group = "model"
    kernels: str = declare(
        "fused",
        choices=("fused", "eager"),
        help="Kernels of an estimate: today's, or unfused ones.",
    )
    arithmetic: str = declare(
        "",
        usual="as the devices are used",
        help="Arithmetic of an estimate, such as tfloat32.",
    )
    recompute: str | None = declare(
        None,
        choices=("none", *RECOMPUTE_SETS),
        added=joined_sets,
        bare="full",
        joined_by="+",
        help="Activations that backward computes again: of a whole block without a value; named "
        "sets, several times or joined as in mlp+norm, are for large transformers.",
    )

    @property
    def recomputes_blocks(self) -> bool:
        """Whether backward computes whole blocks again, in a model that is planned op by op.

        Raises:
            InvalidInputError: A named set was given, which only the shapes of large transformers
                have.
        """
        if self.recompute not in (None, *WHOLE_OR_NONE):
            raise InvalidInputError(
                f"--recompute {self.recompute} is for large transformers that are named by their "
                "shape (partita models large, or a config.json); op by op it is full or none"
            )
        return self.recompute == "full"


@dataclass(frozen=True, kw_only=True)
class TrainingFields(Request):
    """How a large transformer is trained, however it is divided."""

    group = "large transformers"
    framework: str | None = declare(
        None,
        flags=("--for",),
        usual="megatron for a large transformer, else Partita's own",
        help="Framework that will run it, which says what overlaps and what may be combined: "
        "megatron, torchtitan, deepspeed, fsdp, accelerate, maxtext, partita, or a release such as "
        "megatron-24.07.",
    )
    lora: int | None = declare(
        None, minimum=1, help="Train low-rank adapters of that rank; the weights are frozen."
    )
    tokens: str | None = declare(
        None, often=True, help="Tokens to train on, such as 15T: time and money for all of them."
    )


@dataclass(frozen=True, kw_only=True)
class DegreeFields(TrainingFields):
    """How a large transformer is divided; what is not given is searched."""

    group = "large transformers"
    tp: str | None = declare(None, metavar="N|auto", help="Tensor-parallel degree.")
    pp: str | None = declare(None, metavar="N|auto", help="Stages of the pipeline.")
    vp: str | None = declare(None, metavar="N|auto", help="Virtual stages per device.")
    dp: str | None = declare(None, metavar="N|auto", help="Data-parallel degree.")
    cp: str | None = declare(None, metavar="N|auto", help="Context-parallel degree.")
    ep: str | None = declare(None, metavar="N|auto", help="Expert-parallel degree.")
    zero: str | None = declare(
        None,
        metavar="N|auto",
        help="Let replicas divide: 1 optimizer state, 2 gradients too, 3 weights too.",
    )
    shard_group: str | None = declare(
        None, metavar="N|auto", help="Devices that divide one copy of the weights (HSDP)."
    )
    etp: str | None = declare(
        None, metavar="N", usual="1", help="Tensor-parallel degree of experts."
    )
    sp: str | None = declare(
        None,
        choices=("yes", "no", "auto"),
        usual="with tp, where the framework has it",
        help="Split norms along the sequence in tensor parallelism, or do not.",
    )
    cp_kind: str | None = declare(
        None,
        choices=("ring", "all-to-all"),
        usual="the framework's first",
        help="Kind of context parallelism.",
    )
    rank_order: str | None = declare(
        None,
        metavar="ORDER|auto",
        usual="tp-cp-dp-pp, others where hosts make them quicker",
        help="Degrees by which ranks are numbered, the innermost first.",
    )
    offload_optimizer: str | None = declare(
        None,
        metavar="SHARE|auto",
        usual="0",
        help="Share of the optimizer's state in host memory, updated there; auto searches.",
    )
    offload_activations: str | None = declare(
        None, metavar="SHARE|auto", usual="0", help="Share of activations kept in host memory."
    )


@dataclass(frozen=True, kw_only=True)
class SourceFields(ShapeFields, EstimateFields):
    """What a model is built as, and how it is priced; a graph has its own figures."""


@dataclass(frozen=True, kw_only=True)
class StateFields(Request):
    """What of a device's memory may be used, and what training keeps in it."""

    group = "step and memory"
    reserve: float | None = declare(
        None,
        minimum=0,
        below=1,
        usual=f"{GPU_RESERVE:g} of GPUs",
        help="Share of memory to leave free for context, buffers and fragmentation.",
    )
    optimizer: str | None = declare(
        None,
        choices=list(OPTIMIZERS),
        usual=DEFAULT_OPTIMIZER,
        help="Optimizer: its state counts in memory, and a run steps with it.",
    )
    precision: str | None = declare(
        None,
        often=True,
        usual="the model's dtype throughout",
        help=f"Dtypes of weights, gradients, master copy, state and collectives: "
        f"{', '.join(PRECISIONS)}, bf16-master (= bf16-fp32-grads); parts of it may differ: "
        "bf16,state=bfloat16.",
    )


@dataclass(frozen=True, kw_only=True)
class StepFields(StateFields):
    """What a step is."""

    group = "step and memory"
    mode: str | None = declare(
        None,
        often=True,
        choices=[mode.value for mode in Mode],
        usual="training",
        help="Training or inference.",
    )
    schedule: str | None = declare(
        None,
        choices=schedule_names,
        added=Schedule.plugins().names,
        help="Pipeline schedule.",
    )
    microbatches: int | None = declare(None, often=True, minimum=1, help="Microbatches in a step.")
    microbatch_size: int | None = declare(None, minimum=1, help="Samples in a microbatch.")
    batch_size: int | None = declare(
        None, often=True, minimum=1, help="Samples in a step: their product."
    )
    memory_factor: float | None = declare(None, help="Share of each device's memory to use.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveFields(StepFields):
    """What a step is, and what is minimised."""

    group = "step and memory"
    objective: str | None = declare(
        None,
        often=True,
        choices=metric_names,
        added=Metric.plugins().names,
        help="Metric to minimise.",
    )


@dataclass(frozen=True, kw_only=True)
class RuleFields(Request):
    """Where ops must and must not run."""

    group = "where ops run"
    pin: tuple[str, ...] = declare((), help="Ops that must run there: 'encoder.*=host0/*'.")
    forbid: tuple[str, ...] = declare((), help="Ops that must not run there: 'head=*/gpu0'.")


@dataclass(frozen=True, kw_only=True)
class EffortFields(Request):
    """How long a planner searches."""

    group = "search"
    time_limit: float | None = declare(
        None, often=True, above=0.0, maximum=1e6, help="Seconds to search."
    )
    iterations: int | None = declare(
        None, minimum=1, help="Steps to search: the same plan every time."
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceFields(EffortFields):
    """Which planner, and how it searches."""

    group = "search"
    planner: str | None = declare(
        None,
        often=True,
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

    group = "search"
    seed: int | None = declare(None, help="Seed of a random planner.")


@dataclass(frozen=True, kw_only=True)
class MoveFields(Request):
    """A plan that is to be replaced, and how few moves are sought."""

    group = "in the place of another plan"
    slowdown: float | None = declare(
        None,
        minimum=0,
        usual="0.02; with --minimise-moves 0.05",
        help="With --objective energy or --minimise-moves: slower than the fastest plan by at "
        "most that share.",
    )
    from_plan: PlanSource | Plan | None = declare(
        None,
        flags=("--from",),
        metavar="PLAN",
        help="Plan that ran before: the search starts from it too, and state that moves is shown.",
    )
    minimise_moves: bool = declare(
        False,
        help="With --from: of the plans that are nearly as fast as the fastest, take the one that "
        "moves least state.",
    )
