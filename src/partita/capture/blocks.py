"""Repeated blocks: children of a ``ModuleList`` or ``Sequential`` that compute the same.

Two blocks are equal when their calls are: functions, literal arguments, shapes and types of what
they read and of their parameters, and which call of the block made what a call reads. Names and
values of parameters do not count.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tree import Param, Ref, Value, leaves_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A child of a list of modules that repeats.

    Attributes:
        name: Its module path, with the number of its call where there are several.
        kind: A hash of what it computes; equal blocks have equal kinds.
        ops: Indices of its ops.
    """

    name: str
    kind: str
    ops: tuple[int, ...]


def call_signature(op: CapturedOp, describe: Callable[[Ref], object]) -> str:
    """Return a text of what an op calls, with a description of each tensor.

    Objects other than numbers, strings and tensors count by their type.
    """
    texts = []
    for leaf_op in op.leaves:
        said = [leaf_op.kind, str(leaf_op.grad)]
        for path, leaf in leaves_of((leaf_op.args, dict(leaf_op.kwargs))):
            if isinstance(leaf, Ref):
                said.append(f"{path}={describe(leaf)}")
            elif isinstance(leaf, str | int | float | complex | None):
                said.append(f"{path}={leaf!r}")
            else:
                said.append(f"{path}={type(leaf).__name__} {_plain(leaf)}")
        texts.append(" ".join(said))
    return ";".join(texts)


def _plain(leaf: object) -> str:
    """Return the text of a dtype, device or the like; of other objects nothing."""
    return str(leaf) if type(leaf).__module__ == "torch" else ""


def find_blocks(
    ops: Sequence[CapturedOp],
    values: Sequence[ValueInfo],
    parameters: Mapping[str, Tensor],
    containers: Mapping[str, bool],
) -> list[Block]:
    """Return the repeated blocks of a model, in order; no op is in two.

    Of nested lists the outermost one counts that has two equal children, or whose children are of
    one class, with all its children.

    Args:
        ops: The ops.
        values: The tensors.
        parameters: Parameters and buffers by name.
        containers: Paths of the lists of modules, and whether their children are of one class.
    """
    members: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for scope in op.scopes:
            if scope and _parent(scope) in containers:
                members.setdefault(scope, []).append(index)
    kinds = {s: _kind([ops[i] for i in rows], values, parameters) for s, rows in members.items()}
    repeats: dict[str, Counter[str]] = {}
    for scope, kind in kinds.items():
        repeats.setdefault(_parent(scope), Counter())[kind] += 1
    repeated = {
        path for path, count in repeats.items() if max(count.values()) > 1 or containers[path]
    }
    taken: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        outer = next((s for s in op.scopes if s in members and _parent(s) in repeated), None)
        if outer is not None:
            taken.setdefault(outer, []).append(index)
    return [Block(name=s, kind=kinds[s], ops=tuple(rows)) for s, rows in taken.items()]


def _parent(scope: str) -> str:
    path = scope.partition("@")[0]
    parent, dot, _ = path.rpartition(".")
    return parent if dot else "" if path else "@"


def _kind(
    ops: Sequence[CapturedOp], values: Sequence[ValueInfo], parameters: Mapping[str, Tensor]
) -> str:
    inside = {value: place for place, value in enumerate(v for op in ops for v in op.makes)}
    outside: dict[Ref, int] = {}

    def describe(ref: Ref) -> object:
        if isinstance(ref, Value):
            info = values[ref.index]
            if ref.index in inside:
                return ("made", inside[ref.index])
            return ("read", outside.setdefault(ref, len(outside)), info.shape, info.dtype)
        if isinstance(ref, Param):
            held = parameters[ref.name]
            return ("parameter", outside.setdefault(ref, len(outside)), held.shape, held.dtype)
        return "constant"

    text = "\n".join(call_signature(op, describe) for op in ops)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
