"""Several recorded calls as one op: what may not be cut apart, and coarser graphs.

Calls that write a storage through one tensor and read it through another run as one op, in their
order and really in place. What lies between the calls of such an op joins it, so that the graph has
no cycle. Coarser graphs group calls by module path; a group that is not contiguous in the order of
the calls is split at the gap, which keeps the graph free of cycles too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

import rustworkx

from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tree import Const, Ref, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The storages that tensors share.

    Attributes:
        values: The tensors.
        parameters: Storage of each parameter and buffer.
        constants: Storage of each constant.
        aliased: Storages that are written through one tensor and read through another.
    """

    values: Sequence[ValueInfo]
    parameters: Mapping[str, int]
    constants: Sequence[int]
    aliased: frozenset[int]

    def written(self, op: CapturedOp) -> set[int]:
        """Return the storages that an op writes."""
        made = {self.values[new].storage for _, new in op.writes}
        return made | {self.parameters[name] for name in op.changes}

    def made_elsewhere(self, op: CapturedOp) -> set[int]:
        """Return the storages that an op reads through parameters, constants or model inputs."""
        found = {self.values[v].storage for v in op.reads if self.values[v].op < 0}
        found |= {self.parameters[name] for name in op.parameters}
        return found | {self.constants[c] for c in op.constants}

    def touched(self, op: CapturedOp) -> set[int]:
        """Return the storages that an op reads or writes."""
        found = {self.values[v].storage for v in (*op.reads, *op.makes)}
        return found | self.made_elsewhere(op)


def live_ops(ops: Sequence[CapturedOp], wanted: Iterable[int], stores: Stores) -> list[CapturedOp]:
    """Return the ops that something wanted depends on.

    Those that change buffers or an aliased storage stay too.
    """
    needed = set(wanted)
    kept = []
    for op in reversed(ops):
        if op.changes or needed.intersection(op.makes) or stores.written(op) & stores.aliased:
            needed.update(op.reads)
            kept.append(op)
    return kept[::-1]


def aliased_groups(ops: Sequence[CapturedOp], stores: Stores) -> list[list[int]]:
    """Return the ops that touch each aliased storage up to the last write, readers included.

    Later readers know what they read by the op that made it, unless no op did: then they belong to
    the group.
    """
    groups = []
    touched = [stores.touched(op) for op in ops]
    for store in sorted(stores.aliased):
        last = max((i for i, op in enumerate(ops) if store in stores.written(op)), default=-1)
        groups.append(
            [
                index
                for index, op in enumerate(ops)
                if store in touched[index] and (index <= last or store in stores.made_elsewhere(op))
            ]
        )
    return [group for group in groups if len(group) > 1]


def silent_groups(ops: Sequence[CapturedOp]) -> list[list[int]]:
    """Return pairs that join an op without results to its neighbour in the same module.

    The neighbour is the next op, else the one before: batch norm's count goes with batch norm.
    """
    groups = []
    for index, op in enumerate(ops):
        if op.makes:
            continue
        others = [i for i in (index + 1, index - 1) if 0 <= i < len(ops)]
        near = [i for i in others if ops[i].scopes == op.scopes]
        if near:
            groups.append([index, near[0]])
    return groups


def convex_groups(ops: Sequence[CapturedOp], groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return all ops in groups such that no path leaves a group and comes back, in order."""
    leader = list(range(len(ops)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for group in groups:
        for index in group[1:]:
            leader[find(index)] = find(group[0])
    maker = {value: index for index, op in enumerate(ops) for value in op.makes}
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(len(ops)))
    for index, op in enumerate(ops):
        ends = {(find(maker[v]), find(index)) for v in op.reads if v in maker}
        graph.add_edges_from_no_data([(a, b) for a, b in sorted(ends) if a != b])
    for component in rustworkx.strongly_connected_components(graph):
        for index in component[1:]:
            leader[find(index)] = find(component[0])
    members: dict[int, list[int]] = {}
    for index in range(len(ops)):
        members.setdefault(find(index), []).append(index)
    return _ordered(ops, list(members.values()), maker)


def _ordered(
    ops: Sequence[CapturedOp], groups: list[list[int]], maker: dict[int, int]
) -> list[list[int]]:
    """Return groups with every producer before its readers; ties by the last op of a group."""
    group_of = {index: row for row, group in enumerate(groups) for index in group}
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(len(groups)))
    ends = {
        (group_of[maker[v]], group_of[index])
        for index, op in enumerate(ops)
        for v in op.reads
        if v in maker
    }
    graph.add_edges_from_no_data([(a, b) for a, b in sorted(ends) if a != b])
    order = rustworkx.lexicographical_topological_sort(
        graph, key=lambda row: f"{groups[row][-1]:09d}"
    )
    return [groups[row] for row in order]


def contiguous_groups(keys: Sequence[str]) -> list[list[int]]:
    """Return runs of ops with the same key, given the key of each; one without stays alone."""
    runs = groupby(range(len(keys)), key=lambda index: keys[index] or index)
    return [list(run) for _, run in runs]


def merge(
    ops: Sequence[CapturedOp],
    groups: Sequence[Sequence[int]],
    values: Sequence[ValueInfo],
    wanted: Iterable[int],
    aliased: Iterable[int] = (),
) -> list[CapturedOp]:
    """Return one op for each group, in the order of the groups.

    Args:
        ops: The ops.
        groups: All of them, in groups.
        values: The tensors.
        wanted: Tensors that leave the model.
        aliased: Storages that have to be written really in place.
    """
    forced = set(aliased)
    group_of = {index: row for row, group in enumerate(groups) for index in group}
    readers: dict[int, set[int]] = {value: {-1} for value in wanted}
    for index, op in enumerate(ops):
        for value in op.reads:
            readers.setdefault(value, set()).add(group_of[index])
    made = []
    for row, group in enumerate(groups):
        parts = [ops[index] for index in group]
        if len(parts) == 1:
            made.append(parts[0])
            continue
        leaving = {v for p in parts for v in p.makes if readers.get(v, set()) - {row}}
        made.append(_merged(parts, leaving, values, forced))
    return made


def _merged(
    parts: list[CapturedOp], leaving: set[int], values: Sequence[ValueInfo], forced: set[int]
) -> CapturedOp:
    inside = {value for part in parts for value in part.makes}
    reads = dict.fromkeys(v for part in parts for v in part.reads if v not in inside)
    free = in_place_ops(parts, leaving, values)
    marked = [
        replace(part, in_place=index in free or _touches(part, values, forced))
        for index, part in enumerate(parts)
    ]
    written = {values[new].storage for p in parts for _, new in p.writes} & forced
    owned: list[Ref] = [Value(v) for v in reads if values[v].storage in written]
    if written:
        owned += [Const(c) for c in dict.fromkeys(c for p in parts for c in p.constants)]
    main = next((p for p in reversed(parts) if leaving.intersection(p.makes)), parts[-1])
    scopes = _common([part.scopes for part in parts])
    inner = parts[-1].module if all(p.scopes == parts[-1].scopes for p in parts) else ""
    return CapturedOp(
        kind=main.kind,
        module=inner or (scopes[-1].partition("@")[0] if scopes else ""),
        scopes=scopes,
        func=main.func,
        kwargs={},
        reads=tuple(reads),
        makes=tuple(sorted(leaving)),
        parameters=tuple(dict.fromkeys(n for p in parts for n in p.parameters)),
        changes=tuple(dict.fromkeys(n for p in parts for n in p.changes)),
        constants=tuple(dict.fromkeys(c for p in parts for c in p.constants)),
        draws=any(part.draws for part in parts),
        seed=parts[0].seed,
        parts=tuple(marked),
        owned=tuple(owned),
    )


def _touches(part: CapturedOp, values: Sequence[ValueInfo], stores: set[int]) -> bool:
    return any(values[new].storage in stores for _, new in part.writes)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    same = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return tuple(level[0] for level in same)


def in_place_ops(
    ops: Sequence[CapturedOp], leaving: Iterable[int], values: Sequence[ValueInfo]
) -> frozenset[int]:
    """Return the places of the ops, out of some that run in order, that may write in place.

    Such an op writes a storage that these ops have made, and nobody reads what was there before:
    it does not leave, and no later op reads it.
    """
    left = set(leaving)
    maker = {value: place for place, op in enumerate(ops) for value in op.makes}
    touched: dict[int, dict[int, int]] = {}
    for place, op in enumerate(ops):
        for value in (*op.reads, *op.makes):
            touched.setdefault(values[value].storage, {})[value] = place
    free = set()
    for place, op in enumerate(ops):
        if op.parts or not op.writes:
            continue
        if all(
            isinstance(ref, Value)
            and all(
                value in maker and value not in left and last <= place
                for value, last in touched[values[ref.index].storage].items()
                if maker.get(value, -1) < place
            )
            for ref, _ in op.writes
        ):
            free.add(place)
    return frozenset(free)
