"""From a model to a graph with estimated costs for devices that nobody has here.

The capture may be on fake or meta tensors. Its kernels (``trace``) are priced by a roofline of the
catalogue's device with a share of the peak for each class. A kernel takes the longer of
computing and moving, and a launch::

    seconds = max(work / (share[kind] * peak), bytes / (memory_share * bandwidth)) + launch

The work of a product of matrices is what its tiles take: a device computes as many tiles at a time
as it has processors, and the last wave is as long as a full one. Products with an odd length run
slower, and so do convolutions of small images. The shares are fitted on measured runs by
``benchmarks/estimate_accuracy.py`` and stand in ``catalogue/kernels.yaml``.

What is added to the kernels of an op: where several ops read a tensor, the sum of its gradients;
and the sum of every parameter's gradient into that of the microbatches before. Arithmetic in a
narrower type than the model's is mixed precision: activations have that type; parameters, their
gradients and the optimizer's state keep their own, and training keeps one copy in the narrower type
of each matrix that is multiplied by, whatever the microbatches in flight. (Autocast inside a model
casts for every microbatch; such copies are in what ``profile`` measures.) Float8 is the type of
products with parameters alone: everything else is computed and kept in bfloat16.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.graph import arithmetic_of
from partita.capture.sources import ModelSource
from partita.catalogue.catalogue import Catalogue, DeviceType, check_rates, load_catalogue
from partita.catalogue.kernel_rates import DeviceKernels, kernels_on
from partita.core.columns import Array
from partita.core.graph import DTYPE_BYTES, CostOrigin, Graph, OpCosts, TensorTable
from partita.core.precision import activations_of
from partita.errors import InvalidInputError
from partita.profiler.estimate.recompute import with_recomputation
from partita.profiler.estimate.trace import Kernels, OpKernels, TracedKernels, trace_kernels
from partita.profiler.flops import Kernel, KernelClass, Tiles
from partita.profiler.layers import label_layers

TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.7))
"""Rows, columns and relative rate of the tiles that a library chooses from."""
SPLITS = (1, 2, 3, 4)
"""Into how many parts a library cuts the inner length, to fill the last wave."""
ODD_SHARE = 0.8
"""Rate of a product whose innermost length is odd (Perseus runs: heads of 50,257 columns)."""
SMALL_IMAGE_PIXELS = 45.0
"""Convolutions reach pixels / (pixels + this) of their rate (Perseus runs)."""
HOST_S_PER_ELEMENT = 3.8e-9
"""Seconds of one number on the host (17 ms for the 17 steps of T5's 512 x 512)."""

_MOVING = frozenset({KernelClass.ELEMENTWISE, KernelClass.REDUCTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A device's peaks at one dtype, and what kernels reach of them.

    Attributes:
        peak_flop_per_s: Peak rate.
        memory_bytes_per_s: Memory bandwidth.
        kernels: Shares of the peaks that kernels reach.
        float_factor: Bytes of a floating-point number over those of the captured one.
        batched_flop_per_s: Peak rate of all but products with parameters; 0 = the same.
    """

    peak_flop_per_s: float
    memory_bytes_per_s: float
    kernels: DeviceKernels
    float_factor: float = 1.0
    batched_flop_per_s: float = 0.0

    def moved_bytes(self, kernel: Kernel) -> float:
        """Return the bytes that a kernel moves at this dtype."""
        return kernel.read_write_bytes + (self.float_factor - 1.0) * kernel.floating_bytes

    def seconds(self, kernel: Kernel) -> float:
        """Return how long a kernel takes."""
        if kernel.kind is KernelClass.HOST:
            return HOST_S_PER_ELEMENT * kernel.work
        shares = self.kernels.shares
        moving_kind = kernel.kind if kernel.kind in _MOVING else KernelClass.ELEMENTWISE
        moving = self.moved_bytes(kernel) / (shares[moving_kind] * self.memory_bytes_per_s)
        computing = 0.0
        if kernel.flops and kernel.kind not in _MOVING:
            narrow = kernel.kind is KernelClass.MATMUL or not self.batched_flop_per_s
            rate = self.peak_flop_per_s if narrow else self.batched_flop_per_s
            peak = shares[kernel.kind] * rate
            computing = computed_flops(kernel, self.kernels.processors) / peak
        return max(moving, computing) + kernel.launches * self.kernels.launch_s


def computed_flops(kernel: Kernel, processors: int) -> float:
    """Return the FLOPs of full waves that take as long as a kernel."""
    work = kernel.work * kernel.flops
    if kernel.image:
        return work * (kernel.image + SMALL_IMAGE_PIXELS) / kernel.image
    if kernel.tiles is None:
        return work
    tiles = kernel.tiles
    if any(length % 2 and length > 1 for length in (tiles.rows, tiles.columns, tiles.inner)):
        work /= ODD_SHARE
    return work * wave_factor(tiles, processors)


@cache
def _waves(number: int, rows: int, columns: int, processors: int) -> float:
    best = math.inf
    for high, wide, rate in TILES:
        for first, second in ((high, wide), (wide, high)):
            count = number * math.ceil(rows / first) * math.ceil(columns / second)
            for split in SPLITS:
                pieces = count * split
                if processors:
                    pieces = math.ceil(pieces / processors) * processors
                best = min(best, pieces / split * first * second / rate)
    return best / (number * rows * columns)


def wave_factor(tiles: Tiles, processors: int) -> float:
    """Return computed over needed FLOPs of a product: padding of tiles and the last wave."""
    return _waves(tiles.number, tiles.rows, tiles.columns, processors)


def roofline_of(device: DeviceType, dtype: str, float_factor: float = 1.0) -> Roofline:
    """Return the roofline of a type of device at a dtype.

    Raises:
        InvalidInputError: The catalogue has no peak for the dtype, or no memory bandwidth.
    """
    check_rates([device], dtype)
    if not device.memory_bytes_per_s:
        raise InvalidInputError(f"device type {device.name!r} has no memory bandwidth")
    return Roofline(
        peak_flop_per_s=device.peak_flop_per_s[dtype],
        memory_bytes_per_s=device.memory_bytes_per_s,
        kernels=kernels_on(device.name),
        float_factor=float_factor,
        batched_flop_per_s=device.peak_flop_per_s.get("bfloat16", 0.0) * (dtype == "float8"),
    )


ANNOTATION = "estimate"
MEASURED_DTYPE = "tfloat32"
_PRODUCTS = frozenset({KernelClass.MATMUL, KernelClass.BATCHED_MATMUL, KernelClass.CONVOLUTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The kernels of each op, with the sums of gradients, ready to be priced on any device.

    Attributes:
        ops: The kernels of each op.
        workspace_bytes: Scratch memory of each op.
        copy_bytes: Copy of each parameter in the type of the arithmetic that training keeps.
        float_factor: Bytes of a floating-point activation over those of the captured one.
        keepers: The keeper of each edge.
        notes: Ops that could not be traced.
    """

    ops: tuple[OpKernels, ...]
    workspace_bytes: Array
    copy_bytes: Array
    float_factor: float = 1.0
    keepers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of forward."""
        return sum(op.flops for op in self.ops)

    @property
    def backward_flops(self) -> float:
        """Floating-point operations of backward, without recomputation."""
        return sum(op.backward_flops for op in self.ops)


def estimate(
    captured: CapturedModel,
    device_type: str,
    *,
    kernels: Kernels = Kernels.FUSED,
    dtype: str = "",
    recompute: bool = False,
    layers: Sequence[tuple[str, Sequence[str]]] = (),
    catalogue: Catalogue | None = None,
) -> Graph:
    """Return the graph of a captured model with estimated costs as its only ones.

    Args:
        captured: The model; on fake or meta tensors nothing is allocated.
        device_type: A name of the catalogue, such as ``"a100"``.
        kernels: Fused kernels of today, or the unfused ones of PyTorch 1.10.
        dtype: The arithmetic, such as ``"tfloat32"``; that of the model if not given.
        recompute: Whether every layer (or repeated block), but those with an embedding and the
            last, keeps its inputs alone and computes its forward again in backward.
        layers: Name and module paths of the layers that published partitions count.
        catalogue: Source of the device type; the package's if not given.

    Raises:
        InvalidInputError: No such device type or dtype.
    """
    found = collect_kernels(captured, kernels, dtype)
    graph = price(captured, found, device_type, dtype=dtype, kernels=kernels, catalogue=catalogue)
    graph = label_layers(graph, layers)
    return with_recomputation(graph) if recompute else graph


def collect_kernels(
    captured: CapturedModel, kernels: Kernels = Kernels.FUSED, dtype: str = ""
) -> Priced:
    """Return the kernels of each op, and those that sum gradients.

    Raises:
        InvalidInputError: No such dtype.
    """
    factor = _float_factor(captured, dtype)
    traced = trace_kernels(captured, Kernels(kernels), factor)
    ops = list(traced.ops)
    if captured.is_training:
        ops = _with_sums(captured, traced)
    else:
        ops = [replace(op, backward_input=(), backward_weight=()) for op in ops]
    return Priced(
        ops=tuple(ops),
        workspace_bytes=traced.workspace_bytes,
        copy_bytes=_copy_bytes(captured, traced, factor),
        float_factor=factor,
        keepers=traced.keepers if captured.is_training else (-1,) * len(traced.keepers),
        notes=traced.notes,
    )


def _float_factor(captured: CapturedModel, dtype: str) -> float:
    if dtype and dtype not in DTYPE_BYTES:
        raise InvalidInputError(f"dtype {dtype!r} is not known; there are {sorted(DTYPE_BYTES)}")
    own = captured.graph.dtype
    return DTYPE_BYTES[activations_of(dtype or own)] / DTYPE_BYTES[own]


def _copy_bytes(captured: CapturedModel, traced: TracedKernels, factor: float) -> Array:
    """Return what training keeps of each matrix that is multiplied by in a narrower type."""
    table = captured.graph.parameters
    if factor >= 1 or not captured.is_training:
        return np.zeros(len(table))
    multiplied = {
        name
        for op, found in zip(captured.ops, traced.ops, strict=True)
        if any(kernel.kind in _PRODUCTS for kernel in found.forward)
        for name in op.parameters
        if captured.parameters[name].dim() > 1 and captured.parameters[name].is_floating_point()
    }
    copied = np.array([name in multiplied for name in table.names], dtype=bool)
    return np.where(copied, factor * table.bytes, 0.0)


def _with_sums(captured: CapturedModel, traced: TracedKernels) -> list[OpKernels]:
    calls = [leaf for op in captured.ops for leaf in op.leaves]
    readers = Counter(row for call in calls for row in call.reads)
    result = []
    for op, found in zip(captured.ops, traced.ops, strict=True):
        made = [row for leaf in op.leaves for row in leaf.makes]
        sums = [
            _sum(float(captured.values[row].bytes))
            for row in made
            if captured.values[row].requires_grad
            for _ in range(readers[row] - 1)
        ]
        held = [captured.parameters[name] for name in op.parameters]
        own = [_sum(float(p.numel() * p.element_size())) for p in held if p.requires_grad]
        result.append(
            replace(
                found,
                backward_input=(*found.backward_input, *sums),
                backward_weight=(*found.backward_weight, *own),
            )
        )
    return result


def _sum(held: float) -> Kernel:
    """Return the kernel that adds one tensor to another."""
    return Kernel(kind=KernelClass.ELEMENTWISE, read_write_bytes=3 * held, floating_bytes=3 * held)


def op_seconds(roofline: Roofline, kernels: Sequence[Kernel]) -> float:
    """Return how long kernels take, one after another."""
    return sum(roofline.seconds(kernel) for kernel in kernels)


def accuracy_of(
    device_type: str, kernels: Kernels = Kernels.EAGER, dtype: str = MEASURED_DTYPE
) -> str:
    """Return how good estimates for a type of device are, for people.

    The runs that they were compared with used eager kernels and TF32; for others it says so.
    """
    found = kernels_on(device_type)
    if math.isnan(found.median_error):
        return f"accuracy on {device_type} not measured: {found.source}"
    said = (
        f"stages of measured runs that were left out of the fit: median error "
        f"{100 * found.median_error:.1f} %, worst {100 * found.worst_error:.1f} % ({device_type})"
    )
    if kernels is Kernels.EAGER and dtype == MEASURED_DTYPE:
        return said
    return f"{said}; these had eager kernels and {MEASURED_DTYPE}, {kernels} {dtype} not measured"


def price(
    captured: CapturedModel,
    found: Priced,
    device_type: str,
    *,
    dtype: str = "",
    kernels: Kernels = Kernels.FUSED,
    catalogue: Catalogue | None = None,
) -> Graph:
    """Return the graph of a captured model with its kernels priced on a type of device.

    Args:
        captured: The model.
        found: Its kernels, collected for the same dtype.
        device_type: A name of the catalogue.
        dtype: The arithmetic; that of the model if not given.
        kernels: Kind of the kernels that were collected.
        catalogue: Source of the device type; the package's if not given.

    Raises:
        InvalidInputError: No such device type, or it has no rate for the dtype.
    """
    device = (catalogue or load_catalogue()).device_type(device_type)
    dtype = dtype or captured.graph.dtype
    roofline = roofline_of(device, dtype, found.float_factor)
    forward = np.array([op_seconds(roofline, op.forward) for op in found.ops])
    by_input = np.array([op_seconds(roofline, op.backward_input) for op in found.ops])
    by_weight = np.array([op_seconds(roofline, op.backward_weight) for op in found.ops])
    costs = OpCosts(
        device_type=device.name,
        origin=CostOrigin.ESTIMATED,
        forward_s=forward,
        backward_s=by_input + by_weight,
        backward_input_s=by_input,
        peak_flop_per_s=roofline.peak_flop_per_s,
        memory_bytes_per_s=roofline.memory_bytes_per_s,
    )
    said = {
        "kernels": str(Kernels(kernels)),
        "dtype": dtype,
        "forward_flops": found.forward_flops,
        "backward_flops": found.backward_flops,
        "accuracy": accuracy_of(device.name, Kernels(kernels), dtype),
        "notes": list(found.notes),
    }
    graph = captured.graph
    ops = replace(
        graph.ops,
        flops=np.array([op.flops for op in found.ops]),
        saved_bytes=np.array([op.saved_bytes for op in found.ops]),
        saved_fixed_bytes=np.zeros(len(graph)),
        workspace_bytes=found.workspace_bytes,
    )
    annotations = {ANNOTATION: {device.name: said}}
    tensors = _resized(captured, found.float_factor)
    return replace(
        graph,
        ops=ops,
        tensors=tensors,
        edges=replace(graph.edges, keeper=np.array(found.keepers, np.int32)),
        parameters=replace(graph.parameters, copy_bytes=found.copy_bytes),
        costs=(costs,),
        dtype=dtype,
        annotations=annotations,
    )


def _resized(captured: CapturedModel, factor: float) -> TensorTable:
    """Return the tensors with floating-point ones at the dtype of the arithmetic."""
    table = captured.graph.tensors
    floating = [info.dtype.is_floating_point for info in captured.values[: len(table)]]
    times = np.where(floating, factor, 1.0)
    return replace(table, bytes=table.bytes * times, fixed_bytes=table.fixed_bytes * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Options of an estimate.

    Attributes:
        kernels: Fused kernels of today, or unfused ones.
        arithmetic: Type of the arithmetic, such as ``"tfloat32"``; that of the model if empty.
        recompute: Whether blocks keep their inputs alone and backward computes forward again.
        granularity: Size of an op: a torch call, a leaf module, or a block.
        mode: Training, or eval for inference.
    """

    kernels: Kernels = Kernels.FUSED
    arithmetic: str = ""
    recompute: bool = False
    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING


def estimate_source(
    source: ModelSource,
    device_types: Sequence[str],
    options: EstimateOptions | None = None,
    *,
    batch_size: int = 0,
    catalogue: Catalogue | None = None,
) -> Graph:
    """Return a model as a graph with estimated costs for types of devices, the first the reference.

    Args:
        source: The model; on meta tensors nothing is allocated and nothing computed.
        device_types: Names of the catalogue.
        options: Options of the estimate.
        batch_size: Samples of the microbatch; 0 = as the source has it.
        catalogue: Source of the device types; the package's if not given.

    Raises:
        InvalidInputError: No type, one that the catalogue does not have, or one without a rate for
            the arithmetic, which is said before anything is captured.
    """
    how = options or EstimateOptions()
    if not device_types:
        raise InvalidInputError("estimates need at least one type of device, such as a100")
    check_rates(
        [(catalogue or load_catalogue()).device_type(name) for name in device_types],
        how.arithmetic or arithmetic_of(source.model.parameters()),
    )
    captured = capture(
        source.model,
        source.example(batch_size),
        granularity=how.granularity,
        loss=source.loss,
        mode=how.mode,
        name=source.name,
    )
    found = collect_kernels(captured, how.kernels, how.arithmetic)
    graphs = [
        price(
            captured,
            found,
            device_type,
            dtype=how.arithmetic,
            kernels=how.kernels,
            catalogue=catalogue,
        )
        for device_type in device_types
    ]
    said = {name: note for graph in graphs for name, note in graph.annotations[ANNOTATION].items()}
    costs = tuple(graph.costs[0] for graph in graphs)
    graph = replace(graphs[0], costs=costs, annotations={ANNOTATION: said})
    graph = label_layers(graph, source.layers)
    return with_recomputation(graph) if how.recompute else graph
