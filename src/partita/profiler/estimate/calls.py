"""The calls of ATen that each op of a captured model makes, as torch's profiler names them.

Ops are run again on tensors that have shapes alone, under a profiler: what it sees of an op is what
a trace of the real model has of it. Of calls within calls only the outermost counts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

from partita.capture.captured import CapturedModel
from partita.capture.op import Replay
from partita.profiler.estimate.trace import shapes_only

_MARK = "partita op "


class Call(NamedTuple):
    """A call of ATen.

    Attributes:
        name: Such as ``aten::linear``.
        shapes: Shape of each argument; empty for one that is no tensor.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]


def calls_of(captured: CapturedModel) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of each op; none of an op that shapes alone cannot run."""
    found: list[list[Call]] = [[] for _ in captured.ops]
    # The profiler of today starts Kineto, which writes to stderr; this one has the same calls.
    with (
        shapes_only(captured) as (parameters, constants),
        torch.no_grad(),
        profile(record_shapes=True) as profiler,  # type: ignore[no-untyped-call]  # torch's
    ):
        _run(captured, Replay(values={}, parameters=parameters, constants=constants))
    events: Sequence[Any] = profiler.function_events
    for event in events:
        parent = event.cpu_parent
        if parent is not None and parent.name.startswith(_MARK):
            index = int(parent.name.removeprefix(_MARK))
            found[index].append(Call(event.name, tuple(map(tuple, event.input_shapes))))
    return tuple(map(tuple, found))


def _run(captured: CapturedModel, replay: Replay) -> None:
    for row, info in enumerate(captured.values):
        if info.op < 0:
            replay.values[row] = torch.empty(info.shape, dtype=info.dtype, device=info.device)
    for index, op in enumerate(captured.ops):
        try:
            with record_function(f"{_MARK}{index}"):
                replay.run(op)
        except Exception:  # noqa: BLE001  # a model's own code may raise anything
            for row in op.makes:
                info = captured.values[row]
                made = torch.empty(info.shape, dtype=info.dtype, device=info.device)
                replay.values[row] = made
