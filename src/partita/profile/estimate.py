"""Prices every op of a captured model on a type of device that is not here.

The capture may be on fake or meta tensors. Its kernels (``estimate_trace``) are priced by a
roofline of the catalogue's device (``roofline``). What is added to the kernels of an op: where
several ops read a tensor, the sum of its gradients; and the sum of every parameter's gradient into
that of the microbatches before.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.kernels import kernels_on
from partita.core.columns import Array
from partita.core.graph import DTYPE_BYTES, CostOrigin, Graph, OpCosts
from partita.errors import InvalidInputError
from partita.profile.captured import CapturedModel
from partita.profile.estimate_trace import Kernels, OpKernels, TracedKernels, trace_kernels
from partita.profile.flops import Kernel, KernelClass
from partita.profile.layers import label_layers
from partita.profile.roofline import Roofline, roofline_of

ANNOTATION = "estimate"
MEASURED_DTYPE = "tfloat32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The kernels of each op, with the sums of gradients, ready to be priced on any device.

    Attributes:
        ops: The kernels of each op.
        notes: What could not be traced.
    """

    ops: tuple[OpKernels, ...]
    notes: tuple[str, ...] = ()

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of forward."""
        return sum(op.flops for op in self.ops)

    @property
    def backward_flops(self) -> float:
        """Floating-point operations of backward, without recomputation."""
        return sum(op.backward_flops for op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """What was asked of an estimate."""

    device_type: str
    kernels: Kernels
    dtype: str
    recompute: bool


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
        recompute: Whether backward computes forward again: in every layer (or repeated block)
            but those with an embedding and the last.
        layers: Name and module paths of the layers that published partitions count.
        catalogue: Where the device type stands; the package's if not given.

    Raises:
        InvalidInputError: No such device type or dtype.
    """
    device = (catalogue or load_catalogue()).device_type(device_type)
    dtype = dtype or captured.graph.dtype
    if dtype not in DTYPE_BYTES:
        raise InvalidInputError(f"dtype {dtype!r} is not known; there are {sorted(DTYPE_BYTES)}")
    factor = DTYPE_BYTES[dtype] / DTYPE_BYTES[captured.graph.dtype]
    roofline = roofline_of(device, dtype, factor)
    found = collect_kernels(captured, Kernels(kernels))
    how = _How(device_type=device.name, kernels=Kernels(kernels), dtype=dtype, recompute=recompute)
    return _with_costs(label_layers(captured.graph, layers), found, roofline, how)


def collect_kernels(captured: CapturedModel, kernels: Kernels = Kernels.FUSED) -> Priced:
    """Return the kernels of each op, and those that sum gradients."""
    traced = trace_kernels(captured, kernels)
    if not captured.is_training:
        ops = [replace(op, backward_input=(), backward_weight=()) for op in traced.ops]
        return Priced(ops=tuple(ops), notes=traced.notes)
    return Priced(ops=tuple(_with_sums(captured, traced)), notes=traced.notes)


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


def recomputed_ops(graph: Graph) -> Array:
    """Return whether each op runs again in backward when activations are recomputed.

    All do but those of layers that embed an input of the model, since no gradient flows into
    these, and of the last layer. Without layers the repeated blocks are computed again.
    """
    ops, count = graph.ops, len(graph.ops)
    if not ops.layers.names:
        blocks = ops.blocks.of
        return np.asarray(blocks >= 0) if len(blocks) else np.zeros(count, dtype=np.bool_)
    embeds = np.array([name.lower() == "embedding" for name in ops.types.names])[ops.types.of]
    reads_input = np.zeros(count, dtype=np.bool_)
    inputs = graph.tensors.producer[graph.edges.tensor] < 0
    reads_input[graph.edges.reader[inputs]] = True
    layer = ops.layers.of
    kept = np.append(layer[embeds & reads_input], len(ops.layers.names) - 1)
    return ~np.isin(layer, kept)


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


def _with_costs(graph: Graph, found: Priced, roofline: Roofline, how: _How) -> Graph:
    forward = np.array([op_seconds(roofline, op.forward) for op in found.ops])
    by_input = np.array([op_seconds(roofline, op.backward_input) for op in found.ops])
    by_weight = np.array([op_seconds(roofline, op.backward_weight) for op in found.ops])
    saved = np.array([op.saved_bytes for op in found.ops]) * roofline.float_factor
    if how.recompute:
        by_input = by_input + np.where(recomputed_ops(graph), forward, 0.0)
    costs = OpCosts(
        device_type=how.device_type,
        origin=CostOrigin.ESTIMATED,
        forward_s=forward,
        backward_s=by_input + by_weight,
        backward_input_s=by_input,
        peak_flop_per_s=roofline.peak_flop_per_s,
        memory_bytes_per_s=roofline.memory_bytes_per_s,
    )
    ops = replace(graph.ops, flops=np.array([op.flops for op in found.ops]), saved_bytes=saved)
    said = {
        "kernels": str(how.kernels),
        "dtype": how.dtype,
        "recompute": how.recompute,
        "forward_flops": found.forward_flops,
        "backward_flops": found.backward_flops,
        "accuracy": accuracy_of(how.device_type, how.kernels, how.dtype),
        "notes": list(found.notes),
    }
    annotations = {ANNOTATION: {how.device_type: said}}
    return replace(graph, ops=ops, costs=(costs,), annotations=annotations)
