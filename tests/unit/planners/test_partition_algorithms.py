"""What DynamicMLTrainer's unpublished test file would have covered, eight topics, and the bound."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.bounds import bound
from partita.bounds.figures import Bound
from partita.bounds.sharding import common_step, least_spread
from partita.core.cluster import Cluster, Device, LinkMatrix
from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError
from partita.planners.assignment.anneal import Annealer
from partita.planners.assignment.descent import improved
from partita.planners.assignment.exhaustive import (
    _by_distance,
    _canonical,
    _device_twins,
    search_of,
)
from partita.planners.assignment.instance import instance_of
from partita.planners.assignment.portfolio import best_assignment, sharding_plan
from partita.planners.assignment.starts import near_sequence, starts
from partita.planners.assignment.tree import twins
from partita.planners.brute_force import plan_brute_force
from partita.planners.effort import Effort, SearchTrace
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search
from partita.testing.builders import Figures, chain, flat_cluster, graph_of

STIRLING = {(4, 2): 7, (5, 3): 25, (6, 3): 90, (6, 4): 65}


def sharding_problem(weights, edges, matrix, *, rules=(), **columns):
    graph = graph_of(len(weights), edges, Figures(forward_s=weights, backward_s=0.0))
    if columns:
        graph = replace(graph, ops=replace(graph.ops, **columns))
    matrix = np.asarray(matrix, dtype=float)
    cluster = Cluster(
        devices=tuple(Device(name=f"d{i}") for i in range(len(matrix))),
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=np.full(matrix.size, np.inf), latency_s=matrix.ravel()
        ),
    )
    objective = Objective(metric=Metric.SHARDING_COST)
    return Problem(graph=graph, cluster=cluster, objective=objective, rules=tuple(rules))


def sharding_cost_of(weights, edges, matrix, place):
    """Return the published formula, from scratch."""
    loads = [
        sum(w for w, p in zip(weights, place, strict=True) if p == g) for g in range(len(matrix))
    ]
    if set(place) != set(range(len(matrix))):
        return float("inf")
    mean = sum(loads) / len(loads)
    spread = sum((load - mean) ** 2 for load in loads)
    cut = sum(matrix[place[u]][place[v]] for u, v in edges if place[u] != place[v])
    return spread + cut


def least_cost(weights, edges, matrix):
    places = product(range(len(matrix)), repeat=len(weights))
    return min(sharding_cost_of(weights, edges, matrix, place) for place in places)


@st.composite
def small_instances(draw):
    nodes = draw(st.integers(2, 7))
    devices = draw(st.integers(1, min(3, nodes)))
    whole = draw(st.booleans())
    weight = st.integers(1, 9).map(float) if whole else st.floats(0.1, 9.0)
    weights = draw(st.lists(weight, min_size=nodes, max_size=nodes))
    pairs = [(u, v) for u in range(nodes) for v in range(u + 1, nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=9, unique=True))
    cost = st.sampled_from([0.0, 0.5, 1.0, 2.5])
    row = st.lists(cost, min_size=devices, max_size=devices)
    matrix = np.array(draw(st.lists(row, min_size=devices, max_size=devices)))
    np.fill_diagonal(matrix, 0.0)
    return weights, edges, matrix.tolist()


class TestPartitions:
    """Topic 1: every set partition, once."""

    @pytest.mark.parametrize(("nodes", "parts"), STIRLING)
    def test_placements_on_equal_devices_are_as_many_as_stirling_says(self, nodes, parts):
        problem = Problem(graph=chain(nodes), cluster=flat_cluster(parts))
        search = search_of(problem, Effort())
        twin = _device_twins(problem)
        start = np.zeros(nodes, dtype=np.int64)
        full = {
            _canonical(place, twin)
            for place in _by_distance(search, start)
            if len(set(place.tolist())) == parts
        }
        assert len(full) == STIRLING[nodes, parts]

    def test_every_placement_comes_once_and_near_ones_first(self):
        search = search_of(Problem(graph=chain(4), cluster=flat_cluster(3)), Effort())
        start = np.array([0, 1, 2, 0])
        found = [tuple(place.tolist()) for place in _by_distance(search, start)]
        assert len(found) == len(set(found)) == 3**4
        apart = [int((np.array(place) != start).sum()) for place in found]
        assert apart == sorted(apart)

    def test_only_devices_that_change_nothing_are_twins(self):
        matrix = [[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, 1], [2, 2, 1, 0]]
        problem = sharding_problem([1.0] * 4, [(0, 1)], matrix)
        assert twins(instance_of(problem)).tolist() == [-1, 0, -1, 2]
        pinned = sharding_problem(
            [1.0] * 4, [(0, 1)], matrix, rules=[Rule(ops="op0", devices="d0")]
        )
        assert twins(instance_of(pinned)).tolist() == [-1, -1, -1, 2]


class TestLabels:
    """Topics 2 and 5: all labels are tried, and labels are a permutation."""

    def test_the_best_of_all_labelings_is_found(self):
        matrix = [[0, 5, 1], [1, 0, 5], [5, 1, 0]]
        weights, edges = [3.0, 3.0, 3.0], [(0, 1), (1, 2), (2, 0)][:2]
        values = [
            sharding_cost_of(weights, edges, matrix, place) for place in permutations(range(3))
        ]
        solution = plan_brute_force(sharding_problem(weights, edges, matrix))
        assert solution.value == min(values)
        assert solution.proof is Proof.OPTIMAL

    def test_devices_in_sequence_and_after_annealing_are_a_permutation(self):
        rng = np.random.default_rng(3)
        matrix = rng.random((5, 5))
        np.fill_diagonal(matrix, 0.0)
        problem = sharding_problem([1.0] * 10, [(i, i + 1) for i in range(9)], matrix)
        instance = instance_of(problem)
        assert sorted(near_sequence(instance.matrix).tolist()) == list(range(5))
        annealer = Annealer(instance)
        start = starts(instance)[0]
        place, cost = annealer.cool(start, [0.5, 0.1, 1e-9], 7, is_enough=lambda _: False)
        assert sorted(set(place.tolist())) == list(range(5))
        assert cost == pytest.approx(instance.cost(place))

    def test_labels_alone_are_exchanged_where_that_is_all_there_is_to_gain(self):
        # A path over a ring of devices: parts of one node each, only labels can change.
        matrix = [[0 if a == b else 1 + 3 * ((a * b) % 2) for b in range(6)] for a in range(6)]
        weights, edges = [2.0] * 6, [(i, i + 1) for i in range(5)]
        solution = plan_local_search(sharding_problem(weights, edges, matrix))
        assert solution.value == pytest.approx(least_cost(weights, edges, matrix))


class TestMetric:
    """Topic 3: variance, cut, asymmetric matrices, empty parts."""

    @pytest.mark.parametrize(
        ("place", "value"),
        [([0, 0, 1], 3.0**2 / 2 + 0.25), ([1, 1, 0], 3.0**2 / 2 + 4.0), ([0, 0, 0], np.inf)],
    )
    def test_values_by_hand(self, place, value):
        problem = sharding_problem([1.0, 2.0, 6.0], [(0, 1), (1, 2)], [[0, 0.25], [4, 0]])
        instance = instance_of(problem)
        assert instance.cost(np.array(place)) == value
        assert measure(problem, sharding_plan(problem, instance, np.array(place))).value == value

    @given(small_instances(), st.integers(0, 1000))
    @settings(max_examples=40)
    def test_the_instance_costs_what_the_cost_model_says(self, instance, seed):
        weights, edges, matrix = instance
        problem = sharding_problem(weights, edges, matrix)
        place = np.random.default_rng(seed).integers(0, len(matrix), len(weights))
        found = instance_of(problem)
        expected = sharding_cost_of(weights, edges, matrix, place.tolist())
        assert found.cost(place) == pytest.approx(expected)
        measured = measure(problem, sharding_plan(problem, found, place)).value
        assert measured == pytest.approx(expected)

    def test_ops_that_share_a_device_are_one_node(self):
        edges = [(0, 1), (1, 2), (2, 3)]
        problem = sharding_problem(
            [1.0, 2.0, 3.0, 4.0], edges, [[0, 1], [1, 0]], colocation=[5, -1, 5, -1]
        )
        instance = instance_of(problem)
        assert instance.node_of.tolist() == [0, 1, 0, 2]
        assert instance.weight.tolist() == [4.0, 2.0, 4.0]
        solution = plan_brute_force(problem)
        assert solution.plan.device_of[0] == solution.plan.device_of[2]


class TestStarts:
    """Topic 4: what a search starts from is a placement."""

    @given(small_instances())
    @settings(max_examples=40)
    def test_every_node_has_a_device_and_no_device_is_empty(self, instance):
        weights, edges, matrix = instance
        found = starts(instance_of(sharding_problem(weights, edges, matrix)))
        assert found
        for place in found:
            assert len(place) == len(weights)
            assert set(place.tolist()) == set(range(len(matrix)))

    def test_a_path_is_cut_into_its_best_runs(self):
        weights = [2.0] * 12
        edges = [(i, i + 1) for i in range(11)]
        matrix = 1.0 - np.eye(3)
        best = starts(instance_of(sharding_problem(weights, edges, matrix)))[0]
        assert np.bincount(best).tolist() == [4, 4, 4]
        assert sharding_cost_of(weights, edges, matrix.tolist(), best.tolist()) == 2.0

    def test_a_start_keeps_pins(self):
        rules = [Rule(ops="op0", devices="d2"), Rule(ops="op5", devices="d0")]
        problem = sharding_problem(
            [1.0] * 6, [(i, i + 1) for i in range(5)], 1.0 - np.eye(3), rules=rules
        )
        for place in starts(instance_of(problem)):
            assert place[0] == 2
            assert place[5] == 0

    def test_devices_are_filled_where_only_one_way_is_left(self):
        # Every op but the first may be on d0 alone with it; each other device has one candidate.
        rules = [Rule(ops=f"op{op}", devices=f"d{op - 1}") for op in range(2, 4)]
        problem = sharding_problem([1.0, 9.0, 1.0, 1.0], [(0, 1)], 1.0 - np.eye(3), rules=rules)
        instance = instance_of(problem)
        for place in starts(instance):
            assert np.isfinite(instance.cost(place))
            assert place.tolist()[2:] == [1, 2]

    def test_a_device_that_rules_leave_empty_is_named(self):
        rules = [Rule(ops="*", devices="d1", forbids=True)]
        problem = sharding_problem([1.0] * 4, [(0, 1)], 1.0 - np.eye(3), rules=rules)
        for planner in (plan_brute_force, plan_local_search, plan_hierarchical):
            with pytest.raises(InfeasibleError, match=r"leave.*'d1'"):
                planner(problem)


class TestImprovement:
    """Topic 6: a search never makes it worse."""

    @given(small_instances(), st.integers(0, 5))
    @settings(max_examples=25)
    def test_the_result_is_no_worse_than_the_start_and_the_trace_falls(self, instance, seed):
        weights, edges, matrix = instance
        found = instance_of(sharding_problem(weights, edges, matrix))
        rng = np.random.default_rng(seed)
        start = rng.permutation(np.arange(len(weights)) % len(matrix))
        trace = SearchTrace()
        place, cost = improved(
            found, Effort(trace=trace), start=start, restarts=2, iterations=5, seed=seed
        )
        assert cost <= found.cost(start)
        assert cost == pytest.approx(found.cost(place))
        values = [value for _, value in trace.points]
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(found.cost(start))
        assert values[-1] == pytest.approx(cost)


class TestBruteForce:
    """Topic 7: the optimum of tiny graphs, proven."""

    @given(small_instances())
    @settings(max_examples=60)
    def test_it_is_the_optimum_and_no_bound_is_above(self, instance):
        weights, edges, matrix = instance
        problem = sharding_problem(weights, edges, matrix)
        best = least_cost(weights, edges, matrix)
        solution = plan_brute_force(problem)
        assert solution.value == pytest.approx(best, rel=1e-8)
        assert solution.proof is Proof.OPTIMAL
        assert solution.lower_bound == pytest.approx(solution.value)
        assert bound(problem).value <= best * (1 + 1e-9) + 1e-9

    @given(small_instances())
    @settings(max_examples=15)
    def test_the_other_searches_never_beat_it(self, instance):
        weights, edges, matrix = instance
        problem = sharding_problem(weights, edges, matrix)
        best = least_cost(weights, edges, matrix)
        for planner in (plan_local_search, plan_hierarchical):
            solution = planner(problem, iterations=5, restarts=2)
            assert solution.value >= best - 1e-9
            if solution.proof is Proof.OPTIMAL:
                assert solution.value == pytest.approx(best)
        assert best_assignment(problem, iterations=5).value == pytest.approx(best, rel=1e-8)

    def test_a_few_steps_leave_the_best_so_far(self):
        rng = np.random.default_rng(0)
        weights = rng.random(12).round(3).tolist()
        edges = [(i, j) for i in range(12) for j in range(i + 1, 12) if rng.random() < 0.3]
        matrix = rng.random((3, 3))
        np.fill_diagonal(matrix, 0.0)
        problem = sharding_problem(weights, edges, matrix)
        short = plan_brute_force(problem, iterations=5)
        assert short.stats["complete"] is False
        assert short.proof is Proof.FEASIBLE
        assert short.lower_bound < short.value
        whole = plan_brute_force(problem)
        assert whole.proof is Proof.OPTIMAL
        assert whole.value <= short.value

    def test_more_devices_than_ops_are_refused(self):
        problem = sharding_problem([1.0, 1.0], [(0, 1)], 1.0 - np.eye(3))
        with pytest.raises(InfeasibleError, match=r"'d2'.*2 devices"):
            plan_brute_force(problem)


class TestHierarchical:
    """Topic 8: all nodes, distinct labels."""

    @pytest.mark.parametrize("groups", ["", "2,3", "3,2"])
    def test_it_covers_all_nodes_and_all_devices(self, groups):
        near = np.array(
            [
                [0 if a == b else 0.1 if a // 3 == b // 3 else 1.0 for b in range(6)]
                for a in range(6)
            ]
        )
        problem = sharding_problem([2.0] * 20, [(i, i + 1) for i in range(19)], near)
        solution = plan_hierarchical(problem, groups=groups, iterations=10)
        placed = solution.plan.device_of
        assert len(placed) == 20
        assert set(placed.tolist()) == set(range(6))


class TestBound:
    def test_the_published_chains_have_their_proven_values(self):
        edges = [(i, i + 1) for i in range(200)]
        assert bound(sharding_problem([2.0] * 201, edges, 1.0 - np.eye(3))) == Bound(2.0, "cut")
        device = np.arange(96)
        pairs = np.where(device[:, None] // 2 == device // 2, 0.0, 0.5)
        assert bound(sharding_problem([2.0] * 201, edges, pairs)) == Bound(
            56.125, "spread of weights"
        )

    def test_parts_that_no_edge_joins_need_no_link(self):
        problem = sharding_problem([1.0] * 4, [(0, 1), (2, 3)], 1.0 - np.eye(2))
        assert bound(problem).value == 0.0

    @pytest.mark.parametrize(
        ("weights", "unit"),
        [([2.0, 4.0, 6.0], 2.0), ([0.131, 0.454], 0.001), ([1 / 3, 0.1], 0.0), ([0.0, 0.0], 0.0)],
    )
    def test_the_unit_of_weights(self, weights, unit):
        assert common_step(np.array(weights)) == pytest.approx(unit)

    @given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3))
    @settings(max_examples=80)
    def test_no_spread_is_below_the_least(self, weights, devices):
        values = [
            np.var(np.bincount(place, weights, devices)) * devices
            for place in product(range(devices), repeat=len(weights))
        ]
        assert least_spread(np.array(weights, dtype=float), devices) <= min(values) + 1e-9
