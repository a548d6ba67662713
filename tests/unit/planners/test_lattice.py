"""The core of planners over ideals, against sets listed by brute force."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.core.graph import Phase
from partita.planners.lattice import ideals as ideals_module
from partita.planners.lattice.ideals import (
    count_ideals,
    enumerate_ideals,
    prefixes,
    window,
)
from partita.planners.lattice.nets import nets_by_node
from partita.planners.lattice.orders import linear_orders
from partita.planners.lattice.quotient import collapse, node_sums, quotient
from partita.testing.builders import chain, diamond, random_dag


def with_ops(graph, **columns):
    return replace(graph, ops=replace(graph.ops, **columns))


def edges_of(q):
    source, target = q.edges
    return list(zip(source.tolist(), target.tolist(), strict=True))


def rows_of(found):
    """Return the ideals as Python sets of nodes."""
    bits = np.unpackbits(found.sets.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    return [frozenset(np.flatnonzero(row).tolist()) for row in bits]


def all_ideals(q):
    """Return all sets of nodes that hold their predecessors, by trying every set."""
    edges = edges_of(q)
    nodes = range(q.num_nodes)
    return {
        frozenset(chosen)
        for size in range(q.num_nodes + 1)
        for chosen in combinations(nodes, size)
        if all(a in chosen for a, b in edges if b in chosen)
    }


def check_structure(q, found):
    """Check order, parents and steps of some ideals, and return them as sets."""
    rows = rows_of(found)
    assert len(set(rows)) == len(rows) == len(found)
    assert rows[0] == frozenset()
    assert rows[-1] == frozenset(range(q.num_nodes))
    assert found.size.tolist() == sorted(map(len, rows))
    for row, (parent, last) in enumerate(zip(found.parent, found.last, strict=True)):
        assert row == 0 or rows[row] == rows[parent] | {int(last)}
    here = set(rows)
    for row, held in enumerate(rows):
        steps = slice(found.step_ptr[row], found.step_ptr[row + 1])
        targets = [rows[target] for target in found.step_target[steps]]
        assert targets == [held | {node} for node in found.step_node[steps].tolist()]
        assert {other for other in here if held < other and len(other) == len(held) + 1} == set(
            targets
        )
    return here


def random_quotient(seed, size=9):
    return quotient(random_dag(size, random.Random(seed)))


class TestQuotient:
    def test_a_plain_graph_keeps_its_ops_and_edges(self):
        q = quotient(diamond(3))
        assert q.num_nodes == 5
        assert edges_of(q) == [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
        assert q.pred[q.pred_ptr[4] : q.pred_ptr[5]].tolist() == [1, 2, 3]

    def test_nets_name_tensor_source_and_all_readers(self):
        q = quotient(diamond(2))
        nets = {
            int(tensor): (int(source), q.net_pins[begin:end].tolist())
            for tensor, source, begin, end in zip(
                q.net_tensor, q.net_source, q.net_ptr[:-1], q.net_ptr[1:], strict=True
            )
        }
        assert sorted(nets.values()) == [(0, [0, 1, 2]), (1, [1, 3]), (2, [2, 3])]
        ptr, of_node = nets_by_node(q.nets, q.num_nodes)
        assert [len(of_node[ptr[v] : ptr[v + 1]]) for v in range(4)] == [1, 2, 2, 2]

    def test_a_class_with_ops_between_joins_them(self):
        q = quotient(with_ops(chain(5), colocation=[-1, 0, -1, 0, -1]))
        assert q.node_of.tolist() == [0, 1, 1, 1, 2]
        assert edges_of(q) == [(0, 1), (1, 2)]
        assert node_sums(q, np.arange(5.0)).tolist() == [0.0, 6.0, 4.0]

    def test_merge_labels_join_classes(self):
        graph = with_ops(chain(6), colocation=[0, 0, 1, -1, -1, -1])
        q = quotient(graph, merge=np.array([-1, 7, 7, -1, 3, 3]))
        assert q.node_of.tolist() == [0, 0, 0, 1, 2, 2]

    def test_backward_ops_ride_with_their_class(self):
        phase = [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3
        q = quotient(with_ops(chain(6), phase=phase, colocation=[0, 1, 2, 2, 1, 0]))
        assert q.node_of.tolist() == [0, 1, 2, 2, 1, 0]
        assert edges_of(q) == [(0, 1), (1, 2)]
        assert len(q.nets) == 4

    def test_a_backward_class_without_forward_op_lies_as_its_mirror(self):
        phase = [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 4
        q = quotient(with_ops(chain(7), phase=phase, colocation=[0, 1, 2, 2, 9, 1, 0]))
        orphan = int(q.node_of[4])
        first, second = int(q.node_of[1]), int(q.node_of[2])
        assert {(first, orphan), (orphan, second)} <= set(edges_of(q))

    def test_collapse_joins_labels_and_what_lies_between(self):
        q = collapse(quotient(chain(5)), np.array([4, -1, 4, -1, -1]))
        assert q.node_of.tolist() == [0, 0, 0, 1, 2]
        assert len(q.nets) == 2

    @given(st.integers(0, 10_000))
    def test_nodes_are_numbered_along_their_edges(self, seed):
        rng = random.Random(seed)
        size = rng.randint(4, 12)
        colors = [rng.randint(-1, 5) for _ in range(size)]
        q = quotient(with_ops(random_dag(size, rng), colocation=colors))
        assert all(a < b for a, b in edges_of(q))
        assert sorted(set(q.node_of.tolist())) == list(range(q.num_nodes))


class TestIdeals:
    @pytest.mark.parametrize("interpreted", [3_000, 0])
    @pytest.mark.parametrize("seed", range(6))
    def test_all_ideals_are_found_interpreted_and_compiled(self, monkeypatch, seed, interpreted):
        monkeypatch.setattr(ideals_module, "INTERPRETED", interpreted)
        q = random_quotient(seed)
        found = enumerate_ideals(q, 10_000)
        assert check_structure(q, found) == all_ideals(q)
        assert count_ideals(q, 10_000) == len(found)

    @given(st.integers(0, 10_000))
    def test_all_ideals_are_found(self, seed):
        q = random_quotient(seed, size=4 + seed % 5)
        assert check_structure(q, enumerate_ideals(q, 10_000)) == all_ideals(q)

    def test_counting_stops_at_the_limit(self):
        q = quotient(diamond(5))
        assert count_ideals(q, 34) == count_ideals(q, 1000) == 34
        assert count_ideals(q, 33) == 34
        assert enumerate_ideals(q, 33) is None
        assert count_ideals(quotient(diamond(300)), 10**6) == 10**6 + 1

    def test_sums_add_up_the_nodes(self):
        q = random_quotient(3)
        found = enumerate_ideals(q, 10_000)
        weight = np.arange(1.0, q.num_nodes + 1)
        expected = [sum(node + 1.0 for node in held) for held in rows_of(found)]
        assert found.sums(weight).tolist() == expected
        last = len(found) - 1
        assert found.holds(last, q.num_nodes).all()
        assert found.between(0, last, q.num_nodes).tolist() == list(range(q.num_nodes))

    def test_words_beyond_the_first_are_used(self):
        q = quotient(chain(130))
        found = enumerate_ideals(q, 1000)
        assert len(check_structure(q, found)) == 131
        assert np.array_equal(found.sets, prefixes(q, np.arange(130)).sets)

    def test_prefixes_are_a_chain_of_ideals(self):
        q = random_quotient(5)
        for order in linear_orders(q, count=6):
            chain_of = check_structure(q, prefixes(q, order))
            assert len(chain_of) == q.num_nodes + 1
            assert chain_of <= all_ideals(q)

    def test_a_window_holds_as_many_ideals_as_fit(self):
        q = quotient(diamond(8))
        order = linear_orders(q, count=1)[0]
        for limit in (11, 40, 120, 10_000):
            found = window(q, order, limit)
            assert check_structure(q, found) <= all_ideals(q)
            assert q.num_nodes < len(found) <= limit
        assert len(found) == count_ideals(q, 10_000)


class TestOrders:
    @given(st.integers(0, 10_000))
    def test_orders_are_linear_extensions_and_distinct(self, seed):
        q = random_quotient(seed, size=12)
        orders = linear_orders(q, count=9, seed=seed)
        assert len({order.tobytes() for order in orders}) == len(orders) <= 9
        for order in orders:
            place = {node: index for index, node in enumerate(order.tolist())}
            assert len(place) == q.num_nodes
            assert all(place[a] < place[b] for a, b in edges_of(q))

    def test_a_chain_has_one_order(self):
        assert [order.tolist() for order in linear_orders(quotient(chain(4)))] == [[0, 1, 2, 3]]

    def test_equal_seeds_give_equal_orders(self):
        q = random_quotient(1, size=20)
        first, second = linear_orders(q, count=10, seed=3), linear_orders(q, count=10, seed=3)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

    def test_few_live_bytes_finishes_a_branch_before_the_next(self):
        q = quotient(diamond(3))
        cost = np.where(q.net_source == 0, 1.0, 0.0)
        assert all(len(order) == 5 for order in linear_orders(q, net_cost=cost, count=4))

    def test_thousands_of_ops_are_ordinary(self):
        q = quotient(random_dag(5_000, random.Random(2)))
        assert len(linear_orders(q, count=6)) == 6
        assert count_ideals(q, 50_000) == 50_001
        assert len(prefixes(q, np.arange(5_000))) == 5_001
