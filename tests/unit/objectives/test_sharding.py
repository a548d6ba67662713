"""DynamicMLTrainer's sharding cost, computed by hand."""

import math

import numpy as np

from partita.core.placement import placement_plan
from partita.core.problem import Problem
from partita.objectives.sharding import sharding_cost, why_not_sharding


def test_cost_is_spread_of_weights_plus_directed_latencies(make_graph, matrix):
    graph = make_graph([1, 2, 3, 6], [(0, 1), (1, 2), (2, 3), (0, 3)])
    cluster = matrix([[0, 5], [7, 0]])
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 0, 1]))
    value = sharding_cost(Problem(graph=graph, cluster=cluster), plan)
    # Weights 4 and 8, mean 6: 4 + 4. Edges 0->1, 2->3, 0->3 cost 5, edge 1->2 costs 7.
    assert value.details == {"variance": 8.0, "cross_edge": 22.0, "cut_edges": 4}
    assert value.value == 30.0
    assert value.unit == "cost"
    assert value.bottleneck == "edges between devices"


def test_the_heaviest_device_is_named(make_graph, matrix):
    graph = make_graph([1, 9], [(0, 1)])
    cluster = matrix([[0, 1], [1, 0]])
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1]))
    assert sharding_cost(Problem(graph=graph, cluster=cluster), plan).bottleneck == "weight of d0"


def test_an_empty_device_is_infinite(make_graph, matrix):
    graph = make_graph([1, 2], [(0, 1)])
    cluster = matrix([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    plan = placement_plan(graph, ["d0", "d2"], np.array([0, 1]))
    value = sharding_cost(Problem(graph=graph, cluster=cluster), plan)
    assert value.value == math.inf
    assert value.errors == ("device 'd1' holds no op",)


def test_it_needs_a_matrix(make_graph, flat):
    graph = make_graph([1.0], [])
    cluster = flat(1)
    plan = placement_plan(graph, cluster.device_names, np.array([0]))
    assert "matrix" in why_not_sharding(Problem(graph=graph, cluster=cluster), plan)
