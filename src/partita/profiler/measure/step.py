"""One step of a model, untouched as a whole or op by op: forward, loss, backward.

Op by op there is a mark where one op ends and another begins. All ops share one autograd graph, as
in the model itself: caches, allocations and sums of gradients are those of a real step, and
autograd's engine is started once. The engine runs the functions of a later op before those of an
earlier one, and adds to the gradients of parameters at once. So the backward of an op is all that
happens from the first of its functions to the first of the next op.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from partita.capture.captured import CapturedModel
from partita.capture.op import Replay
from partita.capture.setting import Setting, with_metrics
from partita.capture.tree import Value, leaves_of, tensors_of
from partita.errors import InvalidInputError
from partita.profiler.measure.clock import Stopwatch
from partita.profiler.measure.ops import OpRunner, Overheads, RoundTimes


class WholeStep:
    """Runs a model as its user would."""

    def __init__(self, captured: CapturedModel, setting: Setting, clock: Stopwatch) -> None:
        """Prepare the step.

        Raises:
            InvalidInputError: The graph has a loss that the model does not return, and no loss
                function was given.
        """
        self._captured, self._setting, self._clock = captured, setting, clock
        loss = captured.graph.loss
        places = [leaf for _, leaf in leaves_of(captured.output)]
        self._place = places.index(Value(loss)) if Value(loss) in places else -1
        if captured.is_training and loss >= 0 and self._place < 0 and setting.loss is None:
            raise InvalidInputError(
                f"{captured.graph.name!r} was captured with a loss function; "
                "measure it with the same"
            )

    def forward(self) -> list[Tensor]:
        """Return what the backward starts from: the loss, or all outputs."""
        setting = self._setting
        output = setting.model(*setting.example.args, **setting.example.kwargs)
        if not self._captured.is_training:
            return []
        if self._place >= 0:
            leaf = list(leaves_of(output))[self._place][1]
            assert isinstance(leaf, Tensor)
            return [leaf]
        if setting.loss is not None:
            return [with_metrics(setting.loss(output, setting.example.labels))[0]]
        return [tensor for tensor in tensors_of(output) if tensor.requires_grad]

    def backward(self, roots: list[Tensor]) -> None:
        """Add the gradients of all parameters."""
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def seconds(self) -> tuple[float, float]:
        """Return the time of forward and backward."""
        for parameter in self._setting.parameters.values():
            parameter.grad = None
        first = self._clock.mark()
        roots = self.forward()
        middle = self._clock.mark()
        self.backward(roots)
        last = self._clock.mark()
        self._clock.settle()
        return self._clock.between(first, middle), self._clock.between(middle, last)


@contextmanager
def gradients_kept(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Leave the gradients of parameters as they were."""
    before = [(tensor, tensor.grad) for tensor in parameters.values() if tensor.is_leaf]
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


NO_OP = -1


class StepWatcher(Protocol):
    """Is called as a step goes on."""

    def forward_begins(self, index: int) -> None:
        """Act before the forward of an op."""
        ...

    def forward_ends(self, index: int) -> None:
        """Act after the forward of an op, when what no other op reads is gone."""
        ...

    def backward_begins(self, index: int) -> None:
        """Act when the backward of an op begins; maybe several times, one after the other."""
        ...

    def step_ends(self) -> None:
        """Act when all is done."""
        ...


class ConnectedStep:
    """Runs the ops of a captured model in one autograd graph."""

    def __init__(self, runner: OpRunner) -> None:
        self._runner = runner
        graph = runner.captured.graph
        self._wanted = {*graph.outputs.tolist(), graph.loss} - {-1}
        self._roots = [graph.loss] if graph.loss >= 0 else graph.outputs.tolist()

    def run(self, watcher: StepWatcher, *, twice: bool = False) -> None:
        """Run all ops forward, and backward in training.

        Args:
            watcher: Called as the step goes on.
            twice: Tell it of each tensor's gradient too, as ``NO_OP``, right before the backward of
                the op that made the tensor.
        """
        roots = self._forward(watcher, twice=twice)
        if roots:
            self._runner.where = "the backward of the ops"
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        watcher.step_ends()

    def _forward(self, watcher: StepWatcher, *, twice: bool) -> list[Tensor]:
        runner = self._runner
        captured = runner.captured
        replay = Replay(
            values=dict(runner.inputs),
            parameters=runner.parameters,
            constants=captured.constants,
            protected=runner.protected,
        )
        values = replay.values
        for index, op in enumerate(captured.ops):
            runner.where = f"the forward of op {op.name!r}"
            in_place = index in runner.in_place
            drops = [v for v in runner.drops[index] if v not in self._wanted]
            before = [values[v].grad_fn for v in op.reads]
            watcher.forward_begins(index)
            replay.run(op, in_place=in_place)
            made = [values[v] for v in op.makes]
            for v in drops:
                values.pop(v, None)
            watcher.forward_ends(index)
            if captured.is_training:
                own = [t for t in made if not any(t.grad_fn is other for other in before)]
                _tell(watcher, index, own, twice=twice)
        if not captured.is_training:
            return []
        return [values[v] for v in self._roots if values[v].requires_grad]


def _tell(watcher: StepWatcher, index: int, made: Sequence[Tensor], *, twice: bool) -> None:
    """Call a watcher when the engine comes to an op, which is at what it made."""
    for function in {id(t.grad_fn): t.grad_fn for t in made if t.grad_fn is not None}.values():
        function.register_prehook(lambda _: watcher.backward_begins(index))
    if twice:
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]  # torch's
                    lambda _: watcher.backward_begins(NO_OP)
                )


class MarkedStep:
    """Times the ops of a captured model within one step."""

    def __init__(self, runner: OpRunner, clock: Stopwatch) -> None:
        self._runner, self._clock = runner, clock
        self._step = ConnectedStep(runner)

    def _marks(self, *, twice: bool = False) -> "_Marks":
        for tensor in self._runner.parameters.values():
            if tensor.is_leaf:
                tensor.grad = None
        marks = _Marks(self._clock, len(self._runner.captured.ops))
        self._step.run(marks, twice=twice)
        self._clock.settle()
        return marks

    def round(self) -> RoundTimes:
        """Run one step and return the times of its ops."""
        marks, between = self._marks(), self._clock.between
        backward = np.zeros(len(marks.forward))
        for (index, first), (_, last) in pairwise([*marks.backward, (NO_OP, marks.end)]):
            backward[index] += between(first, last)
        return RoundTimes(
            forward_s=np.array([between(*pair) for pair in marks.forward]),
            backward_s=backward,
            backward_input_s=np.zeros_like(backward),
        )

    def overheads(self) -> Overheads:
        """Return what the marks cost, with what it costs to fill in the arguments of each op.

        The cost of a mark in the backward is the time from one to another at the same function.
        """
        count = len(self._runner.captured.ops)
        if not self._clock.counts_host:
            return Overheads(forward_s=np.zeros(count), backward_s=np.zeros(count), each_s=0.0)
        marks = self._marks(twice=True).backward
        costs = [
            self._clock.between(first, last)
            for (no_op, first), (op, last) in pairwise(marks)
            if no_op == NO_OP and op != NO_OP
        ]
        each_s = statistics.median(costs) if costs else 0.0
        number = np.zeros(count)
        for op, _ in marks:
            if op != NO_OP:
                number[op] += 1
        return Overheads(
            forward_s=self._runner.filling_s(), backward_s=number * each_s, each_s=each_s
        )


class _Marks:
    """Marks of one step.

    Attributes:
        forward: Two of each op.
        backward: An op and a mark, in the order in which the engine comes to them.
        end: When all was done.
    """

    def __init__(self, clock: Stopwatch, num_ops: int) -> None:
        self._mark = clock.mark
        self._first: Any = None
        self.forward: list[Any] = [None] * num_ops
        self.backward: list[tuple[int, Any]] = []
        self.end: Any = None

    def forward_begins(self, _: int) -> None:
        """Mark the begin."""
        self._first = self._mark()

    def forward_ends(self, index: int) -> None:
        """Mark the end."""
        self.forward[index] = (self._first, self._mark())

    def backward_begins(self, index: int) -> None:
        """Mark the begin, which is the end of another."""
        self.backward.append((index, self._mark()))

    def step_ends(self) -> None:
        """Mark the end of the last."""
        self.end = self._mark()
