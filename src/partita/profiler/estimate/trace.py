"""The kernels of every op of a captured model, forward and backward, without hardware.

Ops are run again on tensors that have shapes alone. A dispatch mode sees the ATen calls of an op's
forward, and those of real autograd for the gradients of its inputs and of its parameters; equal ops
are traced once. An op that cannot be run so (its shapes depend on data) is priced by the bytes of
its inputs and outputs, and a note says so.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.capture.blocks import call_signature
from partita.capture.captured import CapturedModel
from partita.capture.op import CapturedOp, Replay, storage_of
from partita.capture.tree import Ref
from partita.core.columns import Array
from partita.profiler.estimate.eager import DEVICE_FORMS, EAGER_FORMS
from partita.profiler.estimate.memory import CallMemory, TensorMemory, workspace_bytes
from partita.profiler.flops import (
    Kernel,
    KernelClass,
    aten_name,
    attention_kernels,
    bytes_of,
    kernels_of,
)
from partita.profiler.memory import LiveBytes

ATTENTION = "scaled_dot_product_attention"
WEIGHT_KINDS: Mapping[KernelClass, KernelClass] = {
    KernelClass.MATMUL: KernelClass.WEIGHT_GRADIENT,
}


class Kernels(StrEnum):
    """Kernels that run an op: those of today, or the unfused ones of PyTorch 1.10."""

    FUSED = "fused"
    EAGER = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKernels:
    """The kernels of one op.

    Attributes:
        forward: Of its forward.
        backward_input: Of the gradients of its inputs.
        backward_weight: Of the gradients of its parameters.
        saved_bytes: Bytes that its forward keeps and no op before it kept.
        forward_bytes: Bytes that its forward allocates and frees again.
        backward_bytes: Bytes that its backward allocates.
        passed: Positions of a tensor that it reads and one that it makes with the same gradient.
    """

    forward: tuple[Kernel, ...] = ()
    backward_input: tuple[Kernel, ...] = ()
    backward_weight: tuple[Kernel, ...] = ()
    saved_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    passed: tuple[tuple[int, int], ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of its forward."""
        return sum(kernel.flops for kernel in self.forward)

    @property
    def backward_flops(self) -> float:
        """Floating-point operations of its backward, both parts."""
        return sum(kernel.flops for kernel in (*self.backward_input, *self.backward_weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedKernels:
    """The kernels of a captured model.

    Attributes:
        ops: Those of each op.
        workspace_bytes: Scratch memory of each op.
        keepers: The keeper of each edge, in the order of ops and what they read.
        notes: Ops that could not be traced.
    """

    ops: tuple[OpKernels, ...]
    workspace_bytes: Array
    keepers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Collects the kernels of the ATen calls under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.kernels: list[Kernel] = []
        self.is_muted = False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # as torch has it
        types: Sequence[type],  # as torch has it
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # as torch has it
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.is_muted:
            self.kernels += kernels_of(aten_name(func), args, kwargs, out)
        return out

    def drain(self) -> tuple[Kernel, ...]:
        """Return what was collected, and begin anew."""
        found, self.kernels = tuple(self.kernels), []
        return found


@dataclass(slots=True)
class _ShapeReplay(Replay):
    """Runs ops on shapes; copies that only protect what an op writes are no kernels."""

    recorder: _Recorder | None = None

    def _target(self, ref: Ref, *, in_place: bool) -> Tensor:
        recorder = self.recorder
        if recorder is not None:
            recorder.is_muted = True
        try:
            return super(_ShapeReplay, self)._target(ref, in_place=in_place)
        finally:
            if recorder is not None:
                recorder.is_muted = False


@dataclass(slots=True)
class _Saved:
    """Counts what autograd keeps, every storage once; parameters do not count.

    Attributes:
        current: The op that runs.
        keepers: By op and storage that it keeps, the first op that does.
    """

    seen: set[int]
    float_factor: float = 1.0
    held: list[Tensor] = field(default_factory=list)
    bytes: float = 0.0
    current: int = -1
    first: dict[int, int] = field(default_factory=dict)
    keepers: dict[tuple[int, int], int] = field(default_factory=dict)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor."""
        key = storage_of(tensor)
        if key not in self.seen:
            self.first[key] = self.current
            self.seen.add(key)
            self.held.append(tensor)
            self.bytes += self.scaled(tensor, _storage_bytes(tensor))
        if key in self.first:
            self.keepers[self.current, key] = self.first[key]
        return tensor

    def scaled(self, tensor: Tensor, size: float) -> float:
        """Return bytes of a tensor at the dtype of the arithmetic."""
        return size * self.float_factor if tensor.is_floating_point() else size

    def drain(self) -> float:
        """Return the bytes since the last time."""
        found, self.bytes = self.bytes, 0.0
        return found


def trace_kernels(
    captured: CapturedModel, kernels: Kernels = Kernels.FUSED, float_factor: float = 1.0
) -> TracedKernels:
    """Return the kernels of every op of a captured model.

    Args:
        captured: The model; on fake or meta tensors nothing is allocated.
        kernels: Fused or eager.
        float_factor: Bytes of a floating-point activation over those of the captured one.
    """
    with shapes_only(captured) as (parameters, constants):
        tracer = _Tracer(captured, kernels, parameters, constants)
        tracer.saved.float_factor = float_factor
        ops = tuple(tracer.trace(index) for index in range(len(captured.ops)))
        workspace = tracer.workspace()
    return TracedKernels(
        ops=ops,
        workspace_bytes=workspace,
        keepers=tuple(tracer.keepers),
        notes=tuple(tracer.notes),
    )


@contextmanager
def shapes_only(
    captured: CapturedModel,
) -> Iterator[tuple[dict[str, Tensor], tuple[Tensor, ...]]]:
    """Make parameters and constants without values, in a context that keeps them so."""
    held = [*captured.parameters.values(), *captured.constants]
    context: AbstractContextManager[object] = nullcontext()
    convert: Callable[[Tensor], Tensor] = _detached
    fake = next((t for t in held if isinstance(t, FakeTensor)), None)
    if fake is not None:
        context = fake.fake_mode
    elif not all(place.type == "meta" for place in _places(captured)):
        mode = FakeTensorMode()
        context, convert = mode, lambda t: _faked(mode, t)
    parameters = {name: convert(value) for name, value in captured.parameters.items()}
    constants = tuple(convert(value) for value in captured.constants)
    with context:
        yield parameters, constants


def _places(captured: CapturedModel) -> set[torch.device]:
    held = [*captured.parameters.values(), *captured.constants]
    return {tensor.device for tensor in held} | {info.device for info in captured.values}


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    made: Tensor = mode.from_tensor(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Gradients(NamedTuple):
    """Costs of gradients: kernels, bytes that are allocated, and (leaf, maker) passed on."""

    kernels: tuple[Kernel, ...] = ()
    allocated_bytes: float = 0.0
    passed: tuple[tuple[int, int], ...] = ()


class _Tracer:
    """Goes through the ops in order, with the shapes and strides that eager tensors would have."""

    def __init__(
        self,
        captured: CapturedModel,
        kernels: Kernels,
        parameters: dict[str, Tensor],
        constants: tuple[Tensor, ...],
    ) -> None:
        self.captured, self.kernels = captured, kernels
        self.notes: list[str] = []
        self.known: dict[str, OpKernels] = {}
        self.recorder, self.live = _Recorder(), LiveBytes()
        self.calls: list[CallMemory] = []
        self.values: dict[int, Tensor] = {}
        self.replay = _ShapeReplay(values=self.values, parameters=parameters, constants=constants)
        self.saved = _Saved(seen={storage_of(value) for value in parameters.values()})
        self.keepers: list[int] = []
        self.on_host: set[int] = set()
        for held in (*parameters.values(), *constants):
            self.live.watch(held)
        count = len(captured.graph.tensors.names)
        self.inputs = [row for row in range(count) if captured.values[row].op < 0]
        for row in self.inputs:
            self._invent(row)

    def _invent(self, row: int) -> None:
        info = self.captured.values[row]
        device = info.device
        made = torch.empty(info.shape, dtype=info.dtype, device=device)
        self.values[row] = made.requires_grad_(info.requires_grad and made.is_floating_point())

    def trace(self, index: int) -> OpKernels:
        """Return the kernels of an op, and put what it makes into ``values``."""
        op, saved = self.captured.ops[index], self.saved
        saved.current = index
        calls = [self._remember(index, leaf, self._trace_call(leaf)) for leaf in op.leaves]
        reads = [storage_of(self.values[row]) for row in op.reads]
        self.keepers += [saved.keepers.get((index, storage), -1) for storage in reads]
        return _joined(calls)

    def _remember(self, index: int, call: CapturedOp, found: OpKernels) -> OpKernels:
        factor = self.saved.float_factor
        self.calls.append(
            CallMemory(
                op=index,
                reads=tuple(call.reads),
                makes=tuple(call.makes),
                forward_bytes=factor * found.forward_bytes,
                backward_bytes=factor * found.backward_bytes,
                passed=tuple((call.reads[a], call.makes[b]) for a, b in found.passed),
            )
        )
        return found

    def workspace(self) -> Array:
        """Return the scratch memory of each op, once all are traced."""
        given = {storage_of(t) for t in (*self.replay.parameters.values(), *self.replay.constants)}
        given |= {storage_of(self.values[row]) for row in self.inputs}
        rows = {row for call in self.calls for row in (*call.reads, *call.makes)}
        tensors = {}
        for row in rows:
            tensor, storage = self.values[row], storage_of(self.values[row])
            tensors[row] = TensorMemory(
                storage=storage,
                storage_bytes=self.saved.scaled(tensor, _storage_bytes(tensor)),
                gradient_bytes=self.saved.scaled(tensor, tensor.numel() * tensor.element_size()),
                is_kept=storage in given or storage in self.saved.seen,
                has_gradient=tensor.requires_grad,
            )
        returned = frozenset(self.captured.graph.outputs.tolist())
        return workspace_bytes(self.calls, tensors, len(self.captured.ops), returned)

    def _trace_call(self, call: CapturedOp) -> OpKernels:
        is_eager = self.kernels is Kernels.EAGER
        op = with_forms(call, EAGER_FORMS if is_eager else DEVICE_FORMS)
        try:
            found = self._traced(op)
        except Exception as exc:  # noqa: BLE001  # a model's own code may raise anything
            name = op.name or op.kind
            self.notes.append(f"{name} is priced by its bytes: {type(exc).__name__}: {exc}")
            found = self._by_bytes(op)
        self.saved.held.extend(self.values[row] for row in op.makes)
        return self._with_host(op, found)

    def _traced(self, op: CapturedOp) -> OpKernels:
        leaves = self._leaves(op)
        key = call_signature(op, self._describe)
        found = self.known.get(key)
        fused = op.kind == ATTENTION and self.kernels is Kernels.FUSED
        with torch.autograd.graph.saved_tensors_hooks(self.saved.keep, lambda t: t):
            if found is None and not fused:
                found = self._run_recorded(op, leaves)
            elif fused:
                with torch.no_grad():
                    self.replay.run(op)
                found = self._fused_attention(op)
            else:
                self.replay.run(op)
        assert found is not None
        self.known[key] = found
        for row in op.makes:
            made = self.values[row].detach()
            wants = self.captured.values[row].requires_grad and made.is_floating_point()
            self.values[row] = made.requires_grad_(wants)
        if fused:
            for row in (*op.reads[:3], *op.makes):
                self.saved.keep(self.values[row])
        return dataclasses.replace(found, saved_bytes=self.saved.drain())

    def _describe(self, ref: Ref) -> object:
        tensor = self.replay.resolve(ref)
        return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def _leaves(self, op: CapturedOp) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [self.values[row] for row in op.reads if self.values[row].requires_grad]
        held = [self.replay.parameters[name] for name in op.parameters]
        return inputs, [tensor for tensor in held if tensor.requires_grad]

    def _run_recorded(self, op: CapturedOp, leaves: tuple[list[Tensor], list[Tensor]]) -> OpKernels:
        inputs, parameters = leaves
        self.replay.recorder = self.recorder
        self.recorder.drain()
        for row in op.reads:
            self.live.watch(self.values[row])
        self.live.restart()
        try:
            with self.live, self.recorder:
                self.replay.run(op)
            forward = self.recorder.drain()
        finally:
            self.replay.recorder = None
        scratch = float(self.live.peak - self.live.now)
        places = [i for i, row in enumerate(op.makes) if self.values[row].grad_fn is not None]
        makers = [self.values[op.makes[place]] for place in places]
        by_input = self._gradients(makers, inputs)
        by_weight = self._gradients(makers, parameters)
        weight = tuple(map(_as_weight_gradient, by_weight.kernels))
        if op.kind in ("batch_norm", "BatchNorm2d") and by_input.kernels:
            weight = ()  # the gradients of its parameters are sums that the input's needs too
        reads = [i for i, row in enumerate(op.reads) if self.values[row].requires_grad]
        return OpKernels(
            forward=forward,
            backward_input=by_input.kernels,
            backward_weight=weight,
            forward_bytes=scratch,
            backward_bytes=by_input.allocated_bytes + by_weight.allocated_bytes,
            passed=tuple((reads[leaf], places[maker]) for leaf, maker in by_input.passed),
        )

    def _gradients(self, makers: list[Tensor], leaves: list[Tensor]) -> _Gradients:
        if not makers or not leaves:
            return _Gradients()
        given = [torch.empty(made.shape, dtype=made.dtype, device=made.device) for made in makers]
        for tensor in given:
            self.live.watch(tensor)
        self.recorder.drain()
        before = self.live.now
        self.live.restart()
        with self.live, self.recorder:
            found = torch.autograd.grad(makers, leaves, given, retain_graph=True, allow_unused=True)
        maker_of = {storage_of(tensor): index for index, tensor in enumerate(given)}
        passed = [
            (leaf, maker_of[storage_of(gradient)])
            for leaf, gradient in enumerate(found)
            if gradient is not None and storage_of(gradient) in maker_of
        ]
        return _Gradients(self.recorder.drain(), float(self.live.peak - before), tuple(passed))

    def _fused_attention(self, op: CapturedOp) -> OpKernels:
        shapes = [tuple(self.values[row].shape) for row in op.reads[:3]]
        if len(shapes) < 3:
            shapes = [shapes[0]] * 3
        item = self.values[op.makes[0]].element_size()
        causal = bool(op.kwargs.get("is_causal", len(op.args) > 5 and op.args[5]))
        forward, backward = attention_kernels(*shapes, causal=causal, item=item)
        wants = any(self.values[row].requires_grad for row in op.reads)
        made = sum(bytes_of([self.values[row]])[0] for row in op.reads[:3])
        return OpKernels(
            forward=tuple(forward),
            backward_input=tuple(backward) if wants else (),
            backward_bytes=made if wants else 0.0,
        )

    def _by_bytes(self, op: CapturedOp) -> OpKernels:
        """Return kernels for a call that shapes alone cannot run, such as a packed LSTM.

        It moves what it reads and makes; each row of its first input meets every matrix among its
        parameters.
        """
        for row in op.makes:
            if row not in self.values or self.values[row].grad_fn is not None:
                self._invent(row)
        infos = [self.captured.values[row] for row in (*op.reads, *op.makes)]
        moved = float(sum(info.bytes for info in infos))
        floating = float(sum(i.bytes for i in infos if i.dtype.is_floating_point))
        forward = [
            Kernel(kind=KernelClass.ELEMENTWISE, read_write_bytes=moved, floating_bytes=floating)
        ]
        shape = infos[0].shape if op.reads else ()
        rows = math.prod(shape[:-1])
        matrices = [self.replay.parameters[name] for name in op.parameters]
        products = [
            Kernel(kind=KernelClass.MATMUL, flops=2.0 * rows * matrix.numel())
            for matrix in matrices
            if matrix.dim() == 2
        ]
        wants = any(self.captured.values[row].requires_grad for row in op.makes)
        return OpKernels(
            forward=(*forward, *products),
            backward_input=(*forward, *products) if wants else (),
            backward_weight=tuple(map(_as_weight_gradient, products)) if wants else (),
            saved_bytes=self.saved.drain(),
            backward_bytes=moved if wants else 0.0,
        )

    def _with_host(self, op: CapturedOp, found: OpKernels) -> OpKernels:
        """Return the kernels of an op; of one on numbers of positions, what the host does.

        Eager models compute tables of positions on the host, from ``arange`` on.
        """
        starts = op.kind == "arange" and not op.reads
        follows = bool(op.reads) and self.on_host.issuperset(op.reads) and not op.parameters
        if self.kernels is not Kernels.EAGER or not (starts or follows):
            return found
        self.on_host.update(op.makes)
        if not found.forward:
            return found
        elements = float(sum(self.values[row].numel() for row in op.makes))
        return dataclasses.replace(
            found, forward=(Kernel(kind=KernelClass.HOST, work=elements, launches=0),)
        )


def with_forms(op: CapturedOp, forms: Mapping[str, Callable[..., Tensor]]) -> CapturedOp:
    """Return a call with another form of the same function, where there is one."""
    form = forms.get(op.kind)
    return op if form is None else dataclasses.replace(op, func=form)


def _joined(calls: Sequence[OpKernels]) -> OpKernels:
    """Return the kernels of several calls that are one op."""
    if len(calls) == 1:
        return calls[0]
    return OpKernels(
        forward=tuple(kernel for call in calls for kernel in call.forward),
        backward_input=tuple(kernel for call in calls for kernel in call.backward_input),
        backward_weight=tuple(kernel for call in calls for kernel in call.backward_weight),
        saved_bytes=sum(call.saved_bytes for call in calls),
    )


def _storage_bytes(tensor: Tensor) -> float:
    """Return the bytes of the storage that a tensor keeps alive."""
    try:
        return float(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return bytes_of([tensor])[0]


def _as_weight_gradient(kernel: Kernel) -> Kernel:
    kind = WEIGHT_KINDS.get(kernel.kind, kernel.kind)
    return dataclasses.replace(kernel, kind=kind)
