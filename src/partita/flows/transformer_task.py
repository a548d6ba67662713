"""From a request to what is trained: the one recipe for plans, estimates and recommendations."""

from collections.abc import Mapping
from typing import Protocol

from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind
from partita.core.precision import DEFAULT_OPTIMIZER, PRECISIONS, parse_precision
from partita.cost.links import fabric_of
from partita.cost.tables import GPU_RESERVE
from partita.errors import InvalidInputError
from partita.names import suggest
from partita.transformer.kernels import machine_of
from partita.transformer.layout import DEFAULT_FRAMEWORK, FRAMEWORKS
from partita.transformer.named import NamedShape
from partita.transformer.search import Task
from partita.transformer.shape import Shape

DEFAULT_TOKENS = 4_194_304
"""Tokens of a step where nobody says how many."""


class TrainingOptions(Protocol):
    """What a request says of how a large transformer is trained."""

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sequence; None = the model's usual length."""
        ...

    @property
    def precision(self) -> str | None:
        """Policy of dtypes; None = bf16, or fp16 where a device has none."""
        ...

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer; None = the usual one."""
        ...

    @property
    def framework(self) -> str | None:
        """Name of the framework; None = the usual one."""
        ...

    @property
    def lora(self) -> int | None:
        """Rank of the adapters that are trained; None = all weights are."""
        ...


def task_of(
    request: TrainingOptions,
    named: NamedShape,
    cluster: Cluster,
    *,
    batch: int,
    memory_share: float | None = None,
    fixed: Mapping[str, object] | None = None,
) -> Task:
    """Return what a request trains on a cluster, with the usual where it does not say.

    Args:
        request: The request.
        named: The transformer.
        cluster: The devices; the first one stands for all where they differ.
        batch: Sequences of a step.
        memory_share: Share of a device's memory that may be used; None = the usual one. Context and
            communicators are counted one by one (``Memory.fixed``): what is left out is for what an
            allocator loses between allocations, a tenth of what it hands out in published figures.
        fixed: Degrees that are given.

    Raises:
        InvalidInputError: No accelerators, a framework that is not there, or an arithmetic that a
            device does not have.
    """
    if any(device.kind is DeviceKind.CPU for device in cluster.devices):
        raise InvalidInputError(
            f"{named.shape.name} is planned for accelerators; cluster {cluster.name!r} has CPUs"
        )
    precision = request.precision or usual_precision(cluster)
    check_rates(cluster, precision)
    first, share = cluster.devices[0], 1.0 - GPU_RESERVE if memory_share is None else memory_share
    compute = parse_precision(precision).compute
    return Task(
        shape=named.shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster), compute=compute),
        batch=batch,
        sequence_length=request.sequence_length or named.sequence_length,
        precision=precision,
        optimizer=request.optimizer or DEFAULT_OPTIMIZER,
        frozen=0.0 if request.lora is None else 1.0 - adapter_share(named.shape, request.lora),
        framework=framework_of(request),
        limit_bytes=first.memory_bytes * share,
        fixed={} if fixed is None else fixed,
    )


def framework_of(request: TrainingOptions) -> str:
    """Return the framework that a request names, or the usual one.

    Raises:
        InvalidInputError: There is no such framework.
    """
    name = request.framework or DEFAULT_FRAMEWORK
    if name not in FRAMEWORKS:
        raise InvalidInputError(f"there is no framework {name!r}{suggest(name, list(FRAMEWORKS))}")
    return name


def adapter_share(shape: Shape, rank: int) -> float:
    """Return the share of parameters that adapters on all matrices of a block add."""
    width = shape.hidden
    pairs = 4 * 2 * width + shape.matrices * (width + (shape.ffn or shape.expert_ffn))
    return shape.layers * rank * pairs / shape.params


def usual_precision(cluster: Cluster) -> str:
    """Return bf16 where all devices have it, else fp16."""
    has = all("bfloat16" in device.peak_flop_per_s for device in cluster.devices)
    return "bf16" if has else "fp16"


def check_rates(cluster: Cluster, precision: str) -> None:
    """Check that all devices compute in a precision.

    Raises:
        InvalidInputError: One does not; says which precisions all have.
    """
    compute = parse_precision(precision).compute
    for device in cluster.devices:
        if compute not in device.peak_flop_per_s:
            able = [
                name
                for name, policy in PRECISIONS.items()
                if all(policy.compute in d.peak_flop_per_s for d in cluster.devices)
            ]
            raise InvalidInputError(
                f"device type {device.type!r} does not compute in {compute} (--precision "
                f"{precision}); use --precision {' or '.join(able)}, or leave it out"
            )
