"""Prices every op of a captured model on a type of device that is not here.

The capture may be on fake or meta tensors. Its kernels (``estimate_trace``) are priced by a
roofline of the catalogue's device (``roofline``). What is added to the kernels of an op: where
several ops read a tensor, the sum of its gradients; and the sum of every parameter's gradient into
that of the microbatches before. Arithmetic in a narrower type than the model's is mixed precision:
activations have that type; parameters, their gradients and the optimizer's state keep their own,
and ops that multiply by a matrix keep a copy of it in the narrower type for backward.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from partita.capture.captured import CapturedModel
from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.kernel_rates import kernels_on
from partita.core.columns import Array
from partita.core.graph import DTYPE_BYTES, CostOrigin, Graph, OpCosts, TensorTable
from partita.errors import InvalidInputError
from partita.profiler.estimate.recompute import with_recomputation
from partita.profiler.estimate.roofline import Roofline, roofline_of
from partita.profiler.estimate.trace import Kernels, OpKernels, TracedKernels, trace_kernels
from partita.profiler.flops import Kernel, KernelClass
from partita.profiler.layers import label_layers

ANNOTATION = "estimate"
MEASURED_DTYPE = "tfloat32"
_PRODUCTS = frozenset({KernelClass.MATMUL, KernelClass.BATCHED_MATMUL, KernelClass.CONVOLUTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The kernels of each op, with the sums of gradients, ready to be priced on any device.

    Attributes:
        ops: The kernels of each op.
        workspace_bytes: Scratch memory of each op.
        copied_bytes: Copies of its parameters in the type of the arithmetic that an op keeps.
        float_factor: Bytes of a floating-point activation over those of the captured one.
        notes: What could not be traced.
    """

    ops: tuple[OpKernels, ...]
    workspace_bytes: Array
    copied_bytes: Array
    float_factor: float = 1.0
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
        catalogue: Where the device type stands; the package's if not given.

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
        copied_bytes=_copied_bytes(captured, traced, factor),
        float_factor=factor,
        notes=traced.notes,
    )


def _float_factor(captured: CapturedModel, dtype: str) -> float:
    if dtype and dtype not in DTYPE_BYTES:
        raise InvalidInputError(f"dtype {dtype!r} is not known; there are {sorted(DTYPE_BYTES)}")
    own = captured.graph.dtype
    return DTYPE_BYTES[dtype or own] / DTYPE_BYTES[own]


def _copied_bytes(captured: CapturedModel, traced: TracedKernels, factor: float) -> Array:
    """Return what ops keep of their matrices in a narrower type, as autocast does."""
    copied = np.zeros(len(captured.ops))
    if factor >= 1 or not captured.is_training:
        return copied
    for index, (op, found) in enumerate(zip(captured.ops, traced.ops, strict=True)):
        if any(kernel.kind in _PRODUCTS for kernel in found.forward):
            held = [captured.parameters[name] for name in op.parameters]
            copied[index] = factor * sum(
                p.numel() * p.element_size() for p in held if p.dim() > 1 and p.is_floating_point()
            )
    return copied


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
        kernels: Which kernels were collected.
        catalogue: Where the device type stands; the package's if not given.

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
        saved_bytes=np.array([op.saved_bytes for op in found.ops]) + found.copied_bytes,
        saved_fixed_bytes=found.copied_bytes,
        workspace_bytes=found.workspace_bytes,
    )
    annotations = {ANNOTATION: {device.name: said}}
    tensors = _resized(captured, found.float_factor)
    return replace(
        graph, ops=ops, tensors=tensors, costs=(costs,), dtype=dtype, annotations=annotations
    )


def _resized(captured: CapturedModel, factor: float) -> TensorTable:
    """Return the tensors with floating-point ones at the dtype of the arithmetic."""
    table = captured.graph.tensors
    floating = [info.dtype.is_floating_point for info in captured.values[: len(table)]]
    times = np.where(floating, factor, 1.0)
    return replace(table, bytes=table.bytes * times, fixed_bytes=table.fixed_bytes * times)
