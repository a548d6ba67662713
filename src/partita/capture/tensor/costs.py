"""Costs of a captured model's ops when a tensor-parallel group divides them.

The seconds and bytes of an op are divided as far as its calls are (``profile --tp`` measures them:
``alone_code``), and the moves between whole and split tensors are calls among the ranks: a sum
counts as two all-gathers of the same size.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tensor.code import GroupCode
from partita.capture.tensor.parallel import SplitCode, SplitOp, TensorSplits
from partita.core.columns import Array
from partita.core.graph import DegreeTable, Graph
from partita.core.plan import Plan, Stage

_WHOLE = "none"
_SUM, _GATHER = 2.0, 1.0
_MOVES = {
    "share": (0.0, _SUM),
    "scatter": (0.0, _GATHER),
    "gather": (_GATHER, 0.0),
    "collect": (_GATHER, _GATHER),
}
"""All-gathers of each move, in forward and in backward."""


class AloneGroup:
    """The first rank of a group whose other ranks are not there: what it computes takes its time.

    Sums are its own parts, and what it gathers is its own part as often as there are ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, value: Tensor) -> Tensor:
        """Return the rank's own part, as a tensor of one's own."""
        return value.clone()

    maximum = sum

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the rank's own part for every rank."""
        return [value] * self.size

    def sum_of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rank's own part."""
        return parts[0].clone()


def alone_code(code: SplitCode, splits: TensorSplits) -> GroupCode:
    """Return a captured model as the first rank of a group runs all of it, without the others."""
    graph = code.graph
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=("rank",),
        stage_of=np.zeros(len(graph), dtype=np.int32),
        stages=(Stage(devices=((0,),)),),
    )
    return GroupCode(code, plan, splits, AloneGroup(splits.degree))


def degree_table(
    code: SplitCode, splits: TensorSplits, graph: Graph, types: Sequence[str]
) -> DegreeTable:
    """Return the costs of each op on one device and on a rank of a group.

    Args:
        code: The captured model.
        splits: How the group divides it.
        graph: Its graph with costs on one device.
        types: Types of devices; those without costs of their own take the first ones.
    """
    degree, count = splits.degree, len(graph)
    written = alone_code(code, splits)
    rows = [
        _figures(op, calls, written.values)
        for op, calls in zip(written.ops, splits.calls, strict=True)
    ]
    split, size, forward, backward = (np.array(part) for part in zip(*rows, strict=True))
    left = 1 - split + split / degree
    costs_of = {costs.device_type: costs for costs in graph.costs}
    costs = [costs_of.get(kind, graph.costs[0]) for kind in types]
    none, kinds = np.zeros(count), np.arange(count, dtype=np.int32)

    def column(pairs: Sequence[tuple[Array, Array]]) -> Array:
        """Return what one device does and what a rank does, by type of device."""
        return np.concatenate([part for pair in pairs for part in pair])

    alike = len(types)
    return DegreeTable(
        kind_of=kinds,
        device_types=tuple(types),
        recompute_sets=(_WHOLE,),
        kind=column([(kinds, kinds)] * alike),
        device_type=np.repeat(np.arange(alike, dtype=np.int32), 2 * count),
        tp=column([(none + 1, none + degree)] * alike).astype(np.int32),
        forward_s=column([(c.forward_s, c.forward_s * left) for c in costs]),
        backward_s=column([(c.backward_s, c.backward_s * left) for c in costs]),
        saved_bytes=column([(graph.ops.saved_bytes, graph.ops.saved_bytes * left)] * alike),
        tensor_bytes=column([(none, size)] * alike),
        tensor_calls=column([(none, forward)] * alike),
        tensor_calls_back=column([(none, backward)] * alike),
    )


def _figures(
    op: CapturedOp, calls: Sequence[SplitOp], values: Sequence[ValueInfo]
) -> tuple[float, float, float, float]:
    """Return the divided share of an op, the bytes of a call, and calls in forward and backward."""
    total = divided = 0.0
    moved: list[tuple[float, float, float]] = []
    for call in calls:
        weight = 1.0 + sum(values[row].bytes for row in (*call.op.reads, *call.op.makes))
        total += weight
        if call.local is None:
            continue
        divided += weight
        if call.local.ends:
            made = sum(values[row].bytes for _, row in call.op.outputs)
            moved.append((float(made), _SUM, 0.0))
    for part in op.parts:
        if part.kind in _MOVES:
            row = part.reads[0] if part.reads else part.makes[0]
            moved.append((float(values[row].bytes), *_MOVES[part.kind]))
    size = max((found for found, *_ in moved), default=0.0)
    if not size:
        return divided / total, 0.0, 0.0, 0.0
    forward = sum(found / size * calls for found, calls, _ in moved)
    backward = sum(found / size * calls for found, _, calls in moved)
    return divided / total, size, forward, backward
