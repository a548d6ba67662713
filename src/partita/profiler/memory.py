"""Bytes that ops keep for backward, the most that is live at a time, and operations of forward.

Saved bytes are those that autograd packs, each storage once and those of parameters and buffers
never: their sum over the ops is that of the whole model. Live bytes are counted by weak references
to storages under a dispatch mode; what a kernel allocates for itself alone is not seen.
Floating-point operations are counted from the ATen calls that really run.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.capture.captured import CapturedModel
from partita.capture.op import storage_of
from partita.core.cluster import Cluster, Device
from partita.core.columns import Floats, Ints
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.cost.memory import peak_memory
from partita.profiler.flops import aten_name, attention_kernels, kernels_of
from partita.profiler.measure.ops import OpRunner
from partita.profiler.measure.step import NO_OP, ConnectedStep, WholeStep
from partita.program.lower import lower


class ForwardFlops(TorchDispatchMode):
    """Counts the products of matrices, by the op that runs; elementwise work is none, as is usual.

    Attributes:
        by_op: FLOPs of each op.
        current: The op that runs.
    """

    def __init__(self, num_ops: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.by_op = np.zeros(num_ops)
        self.current = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the op returns
        """Run a function and count what it computes."""
        result = func(*args, **(kwargs or {}))
        name = aten_name(func)
        counted = _FUSED.get(name)
        if counted is not None:
            self.by_op[self.current] += counted(args, result)
        else:
            kernels = kernels_of(name, args, kwargs or {}, result)
            self.by_op[self.current] += sum(kernel.flops for kernel in kernels)
        return result


def _attention(args: Sequence[Any], _: object) -> float:
    query, key, value = (tuple(tensor.shape) for tensor in args[:3])
    forward, _ = attention_kernels(query, key, value, causal=False, item=1)
    return sum(kernel.flops for kernel in forward)


def _recurrent(args: Sequence[Any], _: object) -> float:
    """Return the products of all steps with the weights of inputs and of the state."""
    rows = args[0].numel() // args[0].shape[-1]
    return float(2 * rows * (args[1].numel() + args[2].numel()))


def _grouped(args: Sequence[Any], result: object) -> float:
    """Return the products of rows with the matrix of their group."""
    assert isinstance(result, Tensor)
    return float(2 * result.numel() * args[0].shape[-1])


_FUSED: Mapping[str, Callable[[Sequence[Any], object], float]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "mkldnn_rnn_layer": _recurrent,
    "_grouped_mm": _grouped,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """Memory of the ops of a captured model, and what they compute.

    Attributes:
        saved_bytes: Bytes that each op keeps for backward that no op before it keeps.
        workspace_bytes: The most that is live while an op runs, forward or backward, besides
            parameters, gradients of parameters and what is saved: unsaved activations, gradients of
            activations, temporaries. The gradient of a tied parameter, of which autograd has a part
            between the ops that use it, is left out: those ops may come to stand in other stages.
        flops: Floating-point operations of each forward.
        keepers: The keeper of each edge, in the order of ops and what they read.
    """

    saved_bytes: Floats
    workspace_bytes: Floats
    flops: Floats
    keepers: Ints


class SavedBytes:
    """Counts what autograd saves, by the op that runs.

    Attributes:
        by_op: Bytes that each op saves and no op before it.
        current: The op that runs.
        keepers: By op and storage that it saves, the first op that does.
    """

    def __init__(self, parameters: Mapping[str, Tensor], num_ops: int = 1) -> None:
        self.by_op = np.zeros(num_ops)
        self.current = 0
        self._skipped = frozenset(storage_of(tensor) for tensor in parameters.values())
        self._seen: dict[int, Tensor] = {}
        self._first: dict[int, int] = {}
        self.keepers: dict[tuple[int, int], int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        key = storage_of(tensor)
        if key in self._skipped:
            return tensor.detach()
        if key not in self._seen:
            # Kept, so that no other storage gets its number.
            self._seen[key] = tensor.detach()
            self._first[key] = self.current
            self.by_op[self.current] += _storage_bytes(tensor)
        self.keepers[self.current, key] = self._first[key]
        return tensor.detach()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


def _storage_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive.

    Attributes:
        now: Bytes that are alive.
        peak: The most since ``restart``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.now = 0
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the op returns
        """Run an op and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count a storage from now until it is freed."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        key = storage_of(tensor)
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.now += self._live[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    def restart(self) -> None:
        """Start to look for the peak anew."""
        self.peak = self.now


def measure_memory(runner: OpRunner) -> OpMemory:
    """Return the memory and FLOPs of the ops of a captured model, by running it twice."""
    count = len(runner.captured.ops)
    saved, flops = SavedBytes(runner.parameters, count), ForwardFlops(count)
    read: list[tuple[int, int]] = []

    def before(index: int, values: Mapping[int, Tensor]) -> None:
        saved.current = flops.current = index
        read.extend((index, storage_of(values[v])) for v in runner.captured.ops[index].reads)

    with saved.hooks(), flops:
        runner.forwards(before=before)
    return OpMemory(
        saved_bytes=saved.by_op,
        workspace_bytes=_workspace_bytes(runner, saved.by_op),
        flops=flops.by_op,
        keepers=np.array([saved.keepers.get(pair, -1) for pair in read], np.int32),
    )


class _LiveByOp:
    """Sees what is live while each op of a step runs, besides what is always there and saved."""

    def __init__(self, live: LiveBytes, saved: Floats, always: int, pending: Floats) -> None:
        self._live, self._always, self._pending = live, always, pending
        self._saved, self._is_backward = np.cumsum(saved), False
        self._current = NO_OP
        self.workspace = np.zeros(len(saved))

    def forward_begins(self, index: int) -> None:
        """Start to look for the peak of an op."""
        self._live.restart()
        self._current = index

    def forward_ends(self, index: int) -> None:
        """Note the peak of an op."""
        self._note(index)

    def backward_begins(self, index: int) -> None:
        """Note the peak of the op until now, and go on with another."""
        self._note(self._current)
        self._live.restart()
        self._current, self._is_backward = index, True

    def step_ends(self) -> None:
        """Note the peak of the last op."""
        self._note(self._current)

    def _note(self, index: int) -> None:
        above = self._live.peak - self._always - self._saved[index]
        above -= self._pending[index] if self._is_backward else 0.0
        self.workspace[index] = max(self.workspace[index], above)


def _workspace_bytes(runner: OpRunner, saved: Floats) -> Floats:
    """Return the most that is live while each op runs, besides parameters and what is saved."""
    captured = runner.captured
    with gradient_buffers(captured.parameters):
        live = LiveBytes()
        for tensor in (*captured.parameters.values(), *runner.parameters.values()):
            live.watch(tensor)
            if tensor.grad is not None:
                live.watch(tensor.grad)
        by_op = _LiveByOp(live, saved, live.now, _between_uses(captured.graph))
        for tensor in (*runner.inputs.values(), *captured.constants):
            live.watch(tensor)
        with live:
            ConnectedStep(runner).run(by_op)
    return by_op.workspace


def _between_uses(graph: Graph) -> Floats:
    """Return the bytes of gradients of tied parameters that wait while each op runs."""
    table = graph.parameters
    found = np.zeros(len(graph))
    for parameter in np.flatnonzero(table.trainable).tolist():
        users = table.use_op[table.use_parameter == parameter]
        if len(users) > 1:
            found[users.min() : users.max()] += table.bytes[parameter]
            # At the first user the part that waits, that of the op itself and their sum.
            found[users.min()] += table.bytes[parameter]
    return found


@contextmanager
def gradient_buffers(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Give every parameter a gradient of zeros, as all but the first microbatch finds it."""
    wanted = [t for t in parameters.values() if t.is_leaf and t.requires_grad]
    before = [tensor.grad for tensor in wanted]
    try:
        if torch.is_grad_enabled():
            for tensor in wanted:
                tensor.grad = torch.zeros_like(tensor)
        yield
    finally:
        for tensor, gradient in zip(wanted, before, strict=True):
            tensor.grad = gradient


def measured_peak_bytes(whole: WholeStep, captured: CapturedModel, inputs: Sequence[Tensor]) -> int:
    """Return the most bytes that are live during a step of the untouched model.

    Parameters and buffers that the graph uses, gradients and inputs count; gradients are there from
    the start, as in all microbatches but the first.
    """
    live = LiveBytes()
    used = {name: captured.parameters[name] for name in captured.graph.parameters.names}
    with gradient_buffers(used):
        for tensor in used.values():
            live.watch(tensor)
            if tensor.grad is not None:
                live.watch(tensor.grad)
        for tensor in inputs:
            live.watch(tensor)
        with live:
            whole.backward(whole.forward())
        return live.peak


def predicted_peak_bytes(graph: Graph, *, training: bool = True) -> float:
    """Return what the cost model says one device needs for a microbatch, without an optimizer."""
    mode = Mode.TRAINING if training else Mode.INFERENCE
    problem = Problem(
        graph=graph,
        cluster=Cluster(devices=(Device(name="device"),)),
        objective=Objective(mode=mode, optimizer_bytes_per_element=0.0),
    )
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=np.zeros(len(graph), dtype=np.int32),
        stages=(Stage(devices=((0,),)),),
        microbatch_sizes=equal_microbatches(1, graph.batch_size),
        schedule=Schedule.ONE_F_ONE_B if training else Schedule.INFERENCE,
    )
    return float(peak_memory(problem, plan, lower(problem, plan))[0])
