"""All pipelines of a small problem, for comparison with what a search finds."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.planners.pipedream.build import plan_on


def ideals(graph: Graph) -> list[int]:
    """Return all down-sets of a graph as bits, ascending."""
    before = [0] * len(graph)
    for source, reader in zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True):
        if source >= 0:
            before[reader] |= 1 << source
    return [
        mask
        for mask in range(1 << len(graph))
        if all(before[op] & ~mask == 0 for op in range(len(graph)) if mask >> op & 1)
    ]


def cuts(graph: Graph, most: int) -> Iterator[np.ndarray]:
    """Yield the stage of each op for all pipelines of up to ``most`` stages."""
    found = ideals(graph)
    full = (1 << len(graph)) - 1

    def extend(chain: list[int]) -> Iterator[list[int]]:
        yield [*chain, full]
        if len(chain) + 1 < most:
            for mask in found:
                if (not chain or chain[-1] & ~mask == 0) and mask not in (0, full, *chain[-1:]):
                    yield from extend([*chain, mask])

    for chain in extend([]):
        yield np.array(
            [next(k for k, mask in enumerate(chain) if mask >> op & 1) for op in range(len(graph))]
        )


def compositions(parts: int, total: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to deal ``total`` devices to ``parts`` stages, one each at least."""
    for ends in combinations(range(1, total), parts - 1):
        edges = (0, *ends, total)
        yield tuple(edges[k + 1] - edges[k] for k in range(parts))


def rows(problem: Problem, *, exact: bool = False, straight: bool = False) -> Iterator[Plan]:
    """Yield all pipelines on consecutive devices that end with the last one."""
    count = len(problem.cluster)
    for stage_of in cuts(problem.graph, count):
        parts = int(stage_of.max()) + 1
        for used in range(parts, count + 1):
            if exact and used < count:
                continue
            for sizes in compositions(parts, used):
                if straight and max(sizes) > 1:
                    continue
                yield plan_on(problem, stage_of, consecutive(sizes, count - used))


def consecutive(sizes: Sequence[int], first: int) -> list[list[int]]:
    """Return groups of consecutive devices."""
    groups = []
    for size in sizes:
        groups.append(list(range(first, first + size)))
        first += size
    return groups
