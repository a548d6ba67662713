"""The graph of a captured model: names, tables, labels; costs are zero until measured."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from partita.capture.blocks import Block
from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tree import Ref, Value, map_leaves
from partita.core.graph import (
    DTYPE_BYTES,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSource:
    """The parts that a graph is made of.

    Attributes:
        name: Name of the graph.
        ops: The ops.
        values: The tensors, those of the graph first.
        inputs: Names of the inputs of the model, which are the first tensors.
        outputs: Rows of the tensors that the model returns.
        loss: Row of the loss, -1 = none.
        parameters: Parameters and buffers by name.
        blocks: The repeated blocks.
        batch_size: Samples of the example.
    """

    name: str
    ops: Sequence[CapturedOp]
    values: Sequence[ValueInfo]
    inputs: Sequence[str]
    outputs: Sequence[int]
    loss: int
    parameters: Mapping[str, Tensor]
    blocks: Sequence[Block]
    batch_size: int


def named(ops: Sequence[CapturedOp]) -> list[CapturedOp]:
    """Return the ops with unique names: scope, function, and a number where that is not enough."""
    seen: Counter[str] = Counter()
    result = []
    for op in ops:
        scope = op.scopes[-1] if op.scopes else ""
        kind = op.kind.strip("_")
        base = f"{scope}/{kind}" if scope else kind
        seen[base] += 1
        turn = seen[base] - 1
        result.append(replace(op, name=f"{base}_{turn}" if turn else base))
    return result


def renumbered(
    ops: Sequence[CapturedOp], values: Sequence[ValueInfo], num_inputs: int
) -> tuple[list[CapturedOp], list[ValueInfo], dict[int, int]]:
    """Number the tensors: inputs, what ops make in their order, what stays inside of ops.

    Returns:
        The ops, the tensors and the new number of each tensor.
    """
    order = list(range(num_inputs)) + [value for op in ops for value in op.makes]
    order += [value for op in ops for leaf in op.leaves for value in leaf.makes]
    row_of = {value: row for row, value in enumerate(dict.fromkeys(order))}
    maker = {value: index for index, op in enumerate(ops) for value in op.makes}
    infos = [replace(values[value], op=maker.get(value, -1)) for value in row_of]

    def moved_ref(leaf: object) -> object:
        return Value(row_of[leaf.index]) if isinstance(leaf, Value) else leaf

    def move_ref(ref: Ref) -> Ref:
        return Value(row_of[ref.index]) if isinstance(ref, Value) else ref

    def move(op: CapturedOp) -> CapturedOp:
        return replace(
            op,
            args=tuple(map_leaves(moved_ref, arg) for arg in op.args),
            kwargs={name: map_leaves(moved_ref, arg) for name, arg in op.kwargs.items()},
            outputs=tuple((place, row_of[value]) for place, value in op.outputs),
            writes=tuple((move_ref(ref), row_of[value]) for ref, value in op.writes),
            reads=tuple(row_of[value] for value in op.reads),
            makes=tuple(row_of[value] for value in op.makes),
            parts=tuple(map(move, op.parts)),
            owned=tuple(map(move_ref, op.owned)),
        )

    return [move(op) for op in ops], infos, row_of


def make_graph(source: GraphSource) -> Graph:
    """Return the graph of a captured model, with costs of zero."""
    ops = source.ops
    rows = len(source.inputs) + sum(len(op.makes) for op in ops)
    blocks = {index: block.name for block in source.blocks for index in block.ops}
    return Graph(
        name=source.name,
        ops=OpTable(
            names=tuple(op.name for op in ops),
            colocation=_colocation(ops, source.values),
            types=_labels([op.kind for op in ops]),
            modules=_labels([op.module for op in ops]),
            blocks=_labels([blocks.get(index, "") for index in range(len(ops))]),
        ),
        costs=(OpCosts(forward_s=np.zeros(len(ops))),),
        tensors=_tensors(source, rows),
        edges=EdgeTable(
            tensor=np.array([value for op in ops for value in op.reads], dtype=np.int32),
            reader=np.array([i for i, op in enumerate(ops) for _ in op.reads], dtype=np.int32),
        ),
        parameters=_parameters(source),
        outputs=np.array(source.outputs, dtype=np.int32),
        loss=source.loss,
        batch_size=source.batch_size,
        tokens_per_sample=_tokens(source),
        dtype=arithmetic_of(source.parameters.values()),
    )


def _labels(texts: Sequence[str]) -> Labels:
    names = list(dict.fromkeys(text for text in texts if text))
    index = {name: row for row, name in enumerate(names)}
    return Labels(names=tuple(names), of=np.array([index.get(text, -1) for text in texts]))


def _tensors(source: GraphSource, rows: int) -> TensorTable:
    names = list(source.inputs)
    for op in source.ops:
        several = len(op.makes) > 1
        names += [f"{op.name}:{i}" if several else op.name for i in range(len(op.makes))]
    infos = source.values[:rows]
    grows = _grows(source, rows)
    sizes = [float(info.bytes) for info in infos]
    return TensorTable(
        names=tuple(_unique(names)),
        producer=np.array([info.op for info in infos]),
        bytes=np.array(sizes),
        fixed_bytes=np.array([0.0 if g else b for g, b in zip(grows, sizes, strict=True)]),
        differentiable=np.array([i.requires_grad and i.op >= 0 for i in infos], dtype=np.bool_),
    )


def _unique(names: Sequence[str]) -> list[str]:
    used: set[str] = set()
    result = []
    for name in names:
        free, turn = name or "input", 0
        while free in used:
            turn += 1
            free = f"{name}_{turn}"
        used.add(free)
        result.append(free)
    return result


def _grows(source: GraphSource, rows: int) -> list[bool]:
    """Return whether each tensor grows with the samples, as far as shapes and readers tell.

    It does if it depends on an input that does and a dimension is a multiple of the batch size. At
    a batch size of one the dependence alone decides, for tensors of more than one element.
    """
    batch = source.batch_size
    grows = [False] * len(source.values)

    def fits(info: ValueInfo) -> bool:
        if batch == 1:
            return any(length > 1 for length in info.shape)
        return any(length and length % batch == 0 for length in info.shape)

    depends = [row < len(source.inputs) for row in range(len(source.values))]
    for op in source.ops:
        reached = any(depends[value] for value in op.reads)
        for value in op.makes:
            depends[value] = reached
    for row in range(rows):
        info = source.values[row]
        grows[row] = depends[row] and (fits(info) or bool(info.flexible))
    return grows[:rows]


def _colocation(ops: Sequence[CapturedOp], values: Sequence[ValueInfo]) -> np.ndarray:
    """Return a class for ops joined by a tensor of data-dependent shape or a changed buffer."""
    leader = list(range(len(ops)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    first: dict[object, int] = {}
    changed = {name for op in ops for name in op.changes}
    for index, op in enumerate(ops):
        keys: list[object] = [v for v in (*op.reads, *op.makes) if values[v].flexible]
        keys += [name for name in op.parameters if name in changed]
        for key in keys:
            other = find(first.setdefault(key, index))
            leader[max(other, find(index))] = min(other, find(index))
    roots = [find(index) for index in range(len(ops))]
    sizes = Counter(roots)
    classes: dict[int, int] = {}
    return np.array(
        [classes.setdefault(r, len(classes)) if sizes[r] > 1 else -1 for r in roots], dtype=np.int32
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as graphs have it; of others that of a type of the same size."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "float8"
    return name if name in DTYPE_BYTES else f"int{8 * min(dtype.itemsize, 8)}"


def _parameters(source: GraphSource) -> ParameterTable:
    used = {name for op in source.ops for name in op.parameters}
    held = {name: value for name, value in source.parameters.items() if name in used}
    row_of = {name: row for row, name in enumerate(held)}
    uses = [(index, row_of[name]) for index, op in enumerate(source.ops) for name in op.parameters]
    is_parameter = [isinstance(value, nn.Parameter) for value in held.values()]
    return ParameterTable(
        names=tuple(held),
        bytes=np.array([float(v.numel() * v.element_size()) for v in held.values()]),
        dtypes=tuple(dtype_name(value.dtype) for value in held.values()),
        trainable=np.array(
            [p and v.requires_grad for p, v in zip(is_parameter, held.values(), strict=True)],
            dtype=np.bool_,
        ),
        buffer=~np.array(is_parameter, dtype=np.bool_),
        use_op=np.array([op for op, _ in uses], dtype=np.int32),
        use_parameter=np.array([row for _, row in uses], dtype=np.int32),
    )


def _tokens(source: GraphSource) -> int:
    """Return the length of the first input that looks like token numbers; 0 = there is none."""
    for info in source.values[: len(source.inputs)]:
        if info.dtype in (torch.int64, torch.int32) and len(info.shape) == 2:
            return info.shape[1] if info.shape[0] == source.batch_size else 0
    return 0


def arithmetic_of(parameters: Iterable[Tensor]) -> str:
    """Return the dtype that most elements have among parameters that are floats."""
    sizes: Counter[str] = Counter()
    for value in parameters:
        if value.is_floating_point():
            sizes[dtype_name(value.dtype)] += value.numel()
    return sizes.most_common(1)[0][0] if sizes else "float32"
