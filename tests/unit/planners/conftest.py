"""Problems that the tests of planners share."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from partita.core.cluster import Cluster
from partita.core.graph import Graph, Labels
from partita.core.problem import Objective, Problem
from partita.testing.builders import chain, flat_cluster


def _layered(layers: Sequence[int], count: int = 0, **columns: object) -> Graph:
    """Return a chain whose op i is in ``layers[i]`` (-1 = none) of some layers."""
    names = tuple(f"layer{layer}" for layer in range(count or max(layers) + 1))
    graph = chain(len(layers))
    labels = Labels(names=names, of=np.array(layers))
    return replace(graph, ops=replace(graph.ops, layers=labels, **columns))


def _problem(graph: Graph | int, cluster: Cluster | int = 4, **objective: object) -> Problem:
    graph = chain(graph) if isinstance(graph, int) else graph
    cluster = flat_cluster(cluster) if isinstance(cluster, int) else cluster
    return Problem(graph=graph, cluster=cluster, objective=Objective(**objective))


@pytest.fixture
def layered() -> Callable[..., Graph]:
    return _layered


@pytest.fixture
def problem_of() -> Callable[..., Problem]:
    return _problem
