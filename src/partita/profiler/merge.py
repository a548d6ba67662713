"""One graph with costs for several types of devices."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np

from partita.core.graph import DegreeTable, Graph
from partita.errors import InvalidInputError
from partita.profiler.estimate.estimate import ANNOTATION as ESTIMATED
from partita.profiler.measure.costs import ANNOTATION as MEASURED


def merge_costs(graphs: Sequence[Graph], names: Sequence[str] = ()) -> Graph:
    """Return the first graph with the costs of all of them.

    Bytes of an op are the largest that any of them has. The first device type of the first graph
    stays the reference.

    Args:
        graphs: Graphs of one model, each measured on other types of devices.
        names: Their names in errors, such as their files.

    Raises:
        InvalidInputError: They are of several models, sizes or types, or two have costs for one
            type of device.
    """
    if len(graphs) < 2:
        raise InvalidInputError(f"{len(graphs)} graphs to merge; expected two or more")
    names = names or [graph.name for graph in graphs]
    first = graphs[0]
    owner: dict[str, str] = {}
    for graph, name in zip(graphs, names, strict=True):
        _check_same(first, graph, (names[0], name))
        for costs in graph.costs:
            if costs.device_type in owner:
                raise InvalidInputError(
                    f"{owner[costs.device_type]} and {name} both have costs for "
                    f"{costs.device_type or 'any device'!r}; give one of them another --device-type"
                )
            owner[costs.device_type] = name
    ops = replace(
        first.ops,
        saved_bytes=reduce(np.maximum, [graph.ops.saved_bytes for graph in graphs]),
        workspace_bytes=reduce(np.maximum, [graph.ops.workspace_bytes for graph in graphs]),
    )
    return replace(
        first,
        ops=ops,
        costs=tuple(costs for graph in graphs for costs in graph.costs),
        degrees=_degrees([graph.degrees for graph in graphs if len(graph.degrees)]),
        annotations={**first.annotations, **_records(graphs)},
    )


def _degrees(tables: Sequence[DegreeTable]) -> DegreeTable:
    """Return the costs of ranks of tensor-parallel groups of all graphs, by type of device."""
    if len(tables) < 2:
        return tables[0] if tables else DegreeTable()
    types = tuple(dict.fromkeys(name for table in tables for name in table.device_types))
    sets = tuple(dict.fromkeys(name for table in tables for name in table.recompute_sets))
    columns = {
        field.name: np.concatenate([getattr(table, field.name) for table in tables])
        for field in fields(DegreeTable)
        if field.name not in ("device_types", "recompute_sets", "kind_of")
    }
    columns["device_type"] = np.concatenate(
        [np.array([types.index(name) for name in t.device_types])[t.device_type] for t in tables]
    )
    columns["recompute"] = np.concatenate(
        [np.array([sets.index(name) for name in t.recompute_sets])[t.recompute] for t in tables]
    )
    return replace(tables[0], device_types=types, recompute_sets=sets, **columns)


def _records(graphs: Sequence[Graph]) -> dict[str, dict[str, Any]]:
    """Return how the costs were measured and estimated, by type of device."""
    found: dict[str, dict[str, Any]] = {}
    for graph in graphs:
        for origin in (MEASURED, ESTIMATED):
            if origin in graph.annotations:
                found.setdefault(origin, {}).update(graph.annotations[origin])
    return found


def _check_same(first: Graph, other: Graph, names: tuple[str, str]) -> None:
    for what, ours, theirs in (
        ("fingerprint", first.fingerprint, other.fingerprint),
        ("batch size", first.batch_size, other.batch_size),
        ("dtype", first.dtype, other.dtype),
    ):
        if ours != theirs:
            raise InvalidInputError(
                f"{names[0]} has {what} {ours}, {names[1]} {theirs}; costs can be merged for one "
                "graph of one batch size and type only (options of profile name them)"
            )
