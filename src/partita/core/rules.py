"""Rules of where ops must and must not run: pins and bans, by patterns of names."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import Cluster
from partita.core.columns import Ints, frozen_array
from partita.core.graph import KIND_BIT, Graph
from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A set of ops with the devices that they must, or must not, run on.

    Attributes:
        ops: Name of an op, a module path that holds it, or a pattern with ``*``.
        devices: Name of a device, or a pattern such as ``host0/*``.
        forbids: Whether these devices are barred; otherwise only they are allowed.
    """

    ops: str
    devices: str
    forbids: bool = False

    def __str__(self) -> str:
        return f"{'forbid' if self.forbids else 'pin'} {self.ops}={self.devices}"


def allowed_places(
    graph: Graph, cluster: Cluster, rules: Sequence[Rule]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return ``(row_of_op, matrix)``: op i may run on device d iff ``matrix[row_of_op[i], d]``.

    Ops with the same rights share a row, so that the matrix stays small.

    Raises:
        InvalidInputError: A rule names no op or no device, or leaves an op without a device.
    """
    rights = np.zeros((len(graph), len(rules) + 1), dtype=np.int8)
    rights[:, 0] = graph.ops.device_kinds
    claimed_by = name_matcher(graph.ops.names if rules else ())
    reach = []
    for number, rule in enumerate(rules, 1):
        claimed = claimed_by(rule.ops)
        if not claimed:
            raise InvalidInputError(f"{rule}: {rule.ops!r} names no op of graph {graph.name!r}")
        rights[claimed, number] = 1
        reach.append(_devices(cluster, rule))
    kinds = np.array([KIND_BIT[device.kind] for device in cluster.devices])
    distinct, row_of = np.unique(rights, axis=0, return_inverse=True)
    matrix = (distinct[:, :1].astype(np.int64) & kinds) > 0
    for number, devices in enumerate(reach, 1):
        matrix[distinct[:, number] == 1] &= devices
    stuck = np.flatnonzero(~matrix.any(axis=1))
    if len(stuck):
        op = int(np.argmax(np.isin(row_of, stuck)))
        named = [str(rules[i]) for i in np.flatnonzero(rights[op, 1:]).tolist()]
        what = f"device under {' and '.join(named)}" if named else "kind of device"
        raise InvalidInputError(
            f"op {graph.ops.names[op]!r} runs on no {what} in cluster {cluster.name!r}"
        )
    return frozen_array(row_of.ravel(), np.int32), matrix


def _devices(cluster: Cluster, rule: Rule) -> NDArray[np.bool_]:
    named = np.array([fnmatchcase(name, rule.devices) for name in cluster.device_names])
    if not named.any():
        known = ", ".join(cluster.device_names[:8])
        more = ", ..." if len(cluster) > 8 else ""
        raise InvalidInputError(
            f"{rule}: {rule.devices!r} names no device; there are {known}{more}"
        )
    found: NDArray[np.bool_] = ~named if rule.forbids else named
    return found


def name_matcher(names: Sequence[str]) -> Callable[[str], list[int]]:
    """Return a function from a key to the ops that it claims; only patterns look at every op.

    A key is the name of an op, a module path that holds it (``encoder.layers.0``), or a pattern
    with ``*``.
    """
    by_name = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[op] for op in by_name]

    def claimed(key: str) -> list[int]:
        if "*" in key:
            return [op for op, name in enumerate(names) if fnmatchcase(name, key)]
        same = bisect_left(ordered, key)
        own = by_name[same : same + 1] if ordered[same : same + 1] == [key] else []
        # Modules inside begin with "key.", captured ops of the module itself with "key/": in
        # Unicode "/" follows ".", and "0" follows "/".
        inner = by_name[bisect_left(ordered, f"{key}.") : bisect_left(ordered, f"{key}0")]
        return sorted([*own, *inner])

    return claimed


def parse_rule(text: str, *, forbids: bool) -> Rule:
    """Return the rule that ``OPS=DEVICES`` stands for.

    >>> str(parse_rule("encoder.*=host0/*", forbids=False))
    'pin encoder.*=host0/*'

    Raises:
        InvalidInputError: It is not of that form.
    """
    ops, sign, devices = text.partition("=")
    if not (ops and sign and devices):
        raise InvalidInputError(f"{text!r} is not of the form OPS=DEVICES, such as encoder.*=gpu0")
    return Rule(ops=ops, devices=devices, forbids=forbids)


def broken_rules(
    allowed: tuple[Ints, NDArray[np.bool_]], op_devices: NDArray[Any], op_rows: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the ops of which a device is not allowed.

    Args:
        allowed: As ``allowed_places`` returns it.
        op_devices: ``[sets, devices]``: whether a set of devices holds a device.
        op_rows: The set of devices of each op.
    """
    row_of, matrix = allowed
    bad = np.any(op_devices[:, None, :] & ~matrix[None, :, :], axis=2)
    return np.flatnonzero(np.asarray(bad)[op_rows, row_of])
