"""From a foreign list of edges to tensors, and back.

Foreign files say "node u feeds node v with so many bytes". Here an edge names its *tensor*: edges
out of one op with equal bytes and equal transfer time read the same tensor, others another one. An
op that feeds nobody makes one tensor too, which is an output of the model.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Level
from partita.core.columns import Ints, frozen_array
from partita.core.graph import EdgeTable, Labels, ParameterTable, TensorTable


class Wiring(NamedTuple):
    """Tensors and edges of a graph.

    Attributes:
        tensors: The tensors; those of one op are numbered in the order of its edges.
        edges: The edges, as the file has them.
        outputs: The tensors that nobody reads.
    """

    tensors: TensorTable
    edges: EdgeTable
    outputs: Ints


def wire(
    op_names: Sequence[str],
    source: Sequence[int],
    target: Sequence[int],
    *,
    num_bytes: Sequence[float],
    transfer_s: Sequence[float],
    unread_bytes: Sequence[float],
) -> Wiring:
    """Return the tensors of a list of edges.

    Args:
        op_names: Names of the ops.
        source: The op that each edge comes from.
        target: The op that it leads to.
        num_bytes: Bytes that it carries.
        transfer_s: Seconds that it takes between two devices; NaN = from bytes.
        unread_bytes: Bytes of the output of each op, for ops that feed nobody.
    """
    found: dict[tuple[int, float, float | None], int] = {}
    made = [0] * len(op_names)
    names: list[str] = []
    rows: list[tuple[int, float, float]] = []
    tensor = []
    for op, size, time_s in zip(source, num_bytes, transfer_s, strict=True):
        key = (op, size, None if math.isnan(time_s) else time_s)
        if key not in found:
            found[key] = len(rows)
            names.append(op_names[op] if not made[op] else f"{op_names[op]}#{made[op]}")
            rows.append((op, size, time_s))
            made[op] += 1
        tensor.append(found[key])
    unread = [op for op in range(len(op_names)) if not made[op]]
    outputs = range(len(rows), len(rows) + len(unread))
    rows += [(op, unread_bytes[op], np.nan) for op in unread]
    names += [op_names[op] for op in unread]
    return Wiring(
        TensorTable(
            names=tuple(names),
            producer=frozen_array([row[0] for row in rows], np.int32),
            bytes=frozen_array([row[1] for row in rows], np.float64),
            transfer_s=frozen_array([row[2] for row in rows], np.float64),
        ),
        EdgeTable(tensor=frozen_array(tensor, np.int32), reader=frozen_array(target, np.int32)),
        frozen_array(list(outputs), np.int32),
    )


def weights(op_names: Sequence[str], num_bytes: Sequence[float]) -> ParameterTable:
    """Return one float32 parameter ``<op>.weight`` for each op with bytes above 0."""
    ops = [op for op, size in enumerate(num_bytes) if size > 0]
    return ParameterTable(
        names=tuple(f"{op_names[op]}.weight" for op in ops),
        bytes=frozen_array([num_bytes[op] for op in ops], np.float64),
        use_op=frozen_array(ops, np.int32),
        use_parameter=frozen_array(range(len(ops)), np.int32),
    )


def labels(values: Sequence[str]) -> Labels:
    """Return labels that give each op its value; empty = none."""
    index: dict[str, int] = {}
    of = [index.setdefault(value, len(index)) if value else -1 for value in values]
    return Labels(names=tuple(index), of=frozen_array(of, np.int32))


def unlimited_level(num_devices: int) -> Level:
    """Return one level for files that give the time of each transfer instead of a bandwidth."""
    return Level(
        name="host",
        group_of=frozen_array(np.zeros(num_devices), np.int32),
        bandwidth_bytes_per_s=frozen_array([np.inf], np.float64),
    )
