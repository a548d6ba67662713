"""What ops keep for backward, and the most memory that is live at a time.

Saved bytes are what autograd packs, each storage once and those of parameters and buffers never:
their sum over the ops is that of the whole model. Live bytes are counted by weak references to
storages under a dispatch mode; what a kernel allocates for itself alone is not seen.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.core.columns import Floats
from partita.core.graph import Graph
from partita.profile.captured import CapturedModel
from partita.profile.captured_op import Replay, storage_of
from partita.profile.coarsen import in_place_ops
from partita.profile.measure_ops import OpRunner
from partita.profile.measure_whole import WholeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """Memory of the ops of a captured model.

    Attributes:
        saved_bytes: What each op keeps for backward that no op before it keeps.
        workspace_bytes: The most that is live while an op runs, forward or backward, besides
            parameters, gradients of parameters and what is saved: unsaved activations, gradients of
            activations, temporaries.
    """

    saved_bytes: Floats
    workspace_bytes: Floats


class SavedBytes:
    """Counts what autograd saves, by the op that runs."""

    def __init__(self, parameters: Mapping[str, Tensor], num_ops: int = 1) -> None:
        self.by_op = np.zeros(num_ops)
        self.current = 0
        self._skipped = frozenset(storage_of(tensor) for tensor in parameters.values())
        self._seen: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        key = storage_of(tensor)
        if key not in self._seen and key not in self._skipped:
            # Kept, so that no other storage gets its number.
            self._seen[key] = tensor.detach()
            self.by_op[self.current] += _storage_bytes(tensor)
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


def measure_memory(captured: CapturedModel, inputs: Sequence[Tensor], runner: OpRunner) -> OpMemory:
    """Return the memory of the ops of a captured model, by running it twice."""
    count = SavedBytes(runner.parameters, len(captured.ops))

    def before(index: int, _: object) -> None:
        count.current = index

    if captured.is_training:
        with count.hooks():
            runner.forwards(before=before)
    saved = count.by_op
    return OpMemory(
        saved_bytes=saved, workspace_bytes=_ConnectedStep(captured, inputs, saved, runner).run()
    )


class _ConnectedStep:
    """Runs the ops in one autograd graph, and sees what is live while each runs."""

    def __init__(
        self,
        captured: CapturedModel,
        inputs: Sequence[Tensor],
        saved: Floats,
        runner: OpRunner,
    ) -> None:
        self._captured, self._inputs, self._runner = captured, inputs, runner
        self._saved = np.cumsum(saved)
        self._peak = np.zeros(len(captured.ops))
        self._current = -1
        self._always = 0

    def run(self) -> Floats:
        captured = self._captured
        held = {
            name: t if isinstance(t, nn.Parameter) else t.detach().clone()
            for name, t in captured.parameters.items()
        }
        with gradient_buffers(captured.parameters):
            live = LiveBytes()
            for tensor in (*captured.parameters.values(), *held.values()):
                live.watch(tensor)
                if tensor.grad is not None:
                    live.watch(tensor.grad)
            self._always = live.now
            for tensor in (*self._inputs, *captured.constants):
                live.watch(tensor)
            with live:
                roots = self._forward(live, held)
                live.restart()
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                    self._mark(live, -1)
        return np.maximum(self._peak, 0.0)

    def _forward(self, live: LiveBytes, held: Mapping[str, Tensor]) -> list[Tensor]:
        captured, graph = self._captured, self._captured.graph
        guarded = [*self._inputs, *captured.constants, *captured.parameters.values()]
        replay = Replay(
            values=dict(enumerate(self._inputs)),
            parameters=held,
            constants=captured.constants,
            protected=frozenset(map(storage_of, guarded)),
        )
        wanted = {*graph.outputs.tolist(), graph.loss} - {-1}
        in_place = in_place_ops(captured.ops, wanted, captured.values)
        for index, op in enumerate(captured.ops):
            live.restart()
            replay.run(op, in_place=index in in_place)
            self._peak[index] = live.peak - self._always - self._saved[index]
            for v in op.makes:
                self._hook(replay.values[v], index, live)
            for v in self._runner.drops[index]:
                if v not in wanted:
                    replay.values.pop(v, None)
        roots = [graph.loss] if graph.loss >= 0 else graph.outputs.tolist()
        return [replay.values[v] for v in roots if replay.values[v].requires_grad]

    def _hook(self, tensor: Tensor, index: int, live: LiveBytes) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._mark(live, index))  # type: ignore[no-untyped-call]

    def _mark(self, live: LiveBytes, index: int) -> None:
        """Note that the backward of an op begins; what was live until now was another's."""
        if self._current >= 0:
            above = live.peak - self._always - self._saved[self._current]
            self._peak[self._current] = max(self._peak[self._current], above)
        live.restart()
        self._current = index


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

    Parameters, buffers, gradients and inputs count; gradients are there from the start, as in all
    microbatches but the first.
    """
    live = LiveBytes()
    with gradient_buffers(captured.parameters):
        for tensor in captured.parameters.values():
            live.watch(tensor)
            if tensor.grad is not None:
                live.watch(tensor.grad)
        for tensor in inputs:
            live.watch(tensor)
        with live:
            whole.backward(whole.forward())
        return live.peak


def predicted_peak_bytes(graph: Graph, *, training: bool = True) -> float:
    """Return what the cost model says one device needs for a graph, without an optimizer."""
    table = graph.parameters
    gradients = float(table.bytes[table.trainable].sum()) if training else 0.0
    workspace = float(graph.ops.workspace_bytes.max())
    return float(table.bytes.sum()) + gradients + float(graph.ops.saved_bytes.sum()) + workspace
