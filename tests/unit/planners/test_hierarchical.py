"""Groups of devices: where they come from, and thousands of devices."""

import json

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device, LinkMatrix
from partita.core.problem import Metric, Objective, Problem
from partita.errors import InvalidInputError
from partita.formats.dynamicml import read_dynamicml
from partita.planners.assignment.groups import _mean_costs, group_levels
from partita.planners.assignment.instance import instance_of
from partita.planners.hierarchical import plan_hierarchical
from partita.testing.builders import Figures, chain, flat_cluster, graph_of, host_cluster


def read(matrix, *, nodes=40, weights=None, **rest):
    document = {
        "k": len(matrix),
        "node_weights": [2.0] * nodes if weights is None else weights,
        "edges": [[i, i + 1] for i in range(nodes - 1)],
        "matrix": np.asarray(matrix).tolist(),
        **rest,
    }
    return read_dynamicml(json.dumps(document))


def nested(*sizes):
    """Return a matrix of groups in groups: 0.1 inside the innermost, and more further out."""
    device = np.arange(int(np.prod(sizes)))
    matrix = np.zeros((len(device), len(device)))
    step = len(device)
    for number, size in enumerate(sizes):
        step //= size
        matrix = np.maximum(
            matrix, np.where(device[:, None] // step != device // step, 1.0 / 4**number, 0.0)
        )
    return matrix


def counts(problem, sizes=()):
    levels = group_levels(problem, instance_of(problem).matrix, sizes)
    return [int(level.max()) + 1 for level in levels]


def test_groups_are_found_in_the_matrix_whatever_the_order_of_devices():
    shuffle = np.random.default_rng(1).permutation(12)
    matrix = nested(2, 3, 2)[np.ix_(shuffle, shuffle)]
    assert counts(read(matrix)) == [2, 6, 12]


def test_stated_groups_are_taken_where_the_matrix_agrees():
    assert counts(read(nested(2, 3, 2), k_values=[2, 3, 2])) == [2, 6, 12]
    # Said to be 2 x 6, but the matrix has three groups of four: the matrix is believed.
    assert counts(read(nested(3, 4), k_values=[2, 6])) == [3, 12]


def test_levels_of_a_cluster_are_its_groups():
    cluster = host_cluster(3, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    problem = Problem(graph=chain(12), cluster=cluster)
    assert counts(problem) == [3, 6]
    assert counts(Problem(graph=chain(12), cluster=flat_cluster(4))) == [4]


def test_groups_by_hand_must_be_the_devices():
    assert counts(read(nested(2, 3)), [3, 2]) == [3, 6]
    with pytest.raises(InvalidInputError, match=r"2 x 2.*6 devices"):
        plan_hierarchical(read(nested(2, 3)), groups="2,2")
    with pytest.raises(InvalidInputError, match=r"'2,x';.*2,3,4"):
        plan_hierarchical(read(nested(2, 3)), groups="2,x")


def test_many_different_links_make_a_few_levels():
    rng = np.random.default_rng(2)
    matrix = rng.random((40, 40))
    assert len(counts(read(matrix))) <= 7


def test_mean_costs_of_groups_keep_directions():
    matrix = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0], [5.0, 6.0, 0.0]])
    group = np.array([0, 0, 1])
    means = _mean_costs(matrix, group, group)
    assert means.tolist() == [[0.0, 3.0], [5.5, 0.0]]


def test_a_path_stays_together_across_groups():
    problem = read(nested(2, 2, 2), nodes=64)
    solution = plan_hierarchical(problem)
    # 1 edge between the halves, 2 between quarters, 4 inside, all parts equal.
    assert solution.value == pytest.approx(1 + 2 / 4 + 4 / 16)


def test_thousands_of_devices():
    device = np.arange(2000)
    matrix = np.where(device[:, None] // 200 == device // 200, 0.5, 1.0)
    np.fill_diagonal(matrix, 0.0)
    graph = graph_of(10_000, [(op, op + 1) for op in range(9_999)], Figures(backward_s=0.0))
    cluster = Cluster(
        devices=tuple(Device(name=f"d{index}") for index in device.tolist()),
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=np.full(matrix.size, np.inf), latency_s=matrix.ravel()
        ),
    )
    objective = Objective(metric=Metric.SHARDING_COST)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    solution = plan_hierarchical(problem, iterations=5, restarts=1)
    assert set(solution.plan.device_of.tolist()) == set(range(2000))
    # Five ops each, a run of the chain a device: 9 edges between groups, 1990 inside.
    assert solution.value == pytest.approx(9 * 1.0 + 1990 * 0.5)
    assert solution.lower_bound == pytest.approx(solution.value)
