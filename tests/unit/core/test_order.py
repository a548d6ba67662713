import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.order import is_acyclic, topological_order
from partita.errors import InvalidInputError


def order(num_nodes: int, edges: list[tuple[int, int]]) -> list[int]:
    source, target = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    names = [f"op{node}" for node in range(num_nodes)]
    return topological_order(num_nodes, source, target, names).tolist()


def test_nodes_numbered_along_their_edges_stay_as_they_are():
    assert order(4, [(0, 2), (1, 3)]) == [0, 1, 2, 3]
    assert order(3, []) == [0, 1, 2]


def test_ties_go_to_the_smallest_index():
    assert order(5, [(4, 0), (3, 0)]) == [1, 2, 3, 4, 0]
    assert order(4, [(3, 1)]) == [0, 2, 3, 1]


def test_a_node_read_twice_over_is_counted_once_for_each_edge():
    assert order(3, [(2, 0), (2, 0), (0, 1)]) == [2, 0, 1]


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([(1, 1)], "the graph has a cycle: 'op1' -> 'op1'; expected a DAG"),
        ([(0, 1), (1, 0), (1, 2)], "the graph has a cycle: 'op0' -> 'op1' -> 'op0'"),
        ([(0, 2), (2, 3), (3, 1), (1, 2)], "'op1' -> 'op2' -> 'op3' -> 'op1'; expected a DAG"),
    ],
)
def test_a_cycle_is_named(edges, words):
    with pytest.raises(InvalidInputError) as caught:
        order(4, edges)
    named = str(caught.value).split(": ")[1].split(";")[0].split(" -> ")
    assert named[0] == named[-1]
    known = {(f"'op{a}'", f"'op{b}'") for a, b in edges}
    assert set(itertools.pairwise(named)) <= known
    assert len(named) == words.count("->") + 1


def test_a_long_cycle_is_shortened():
    ring = [(node, (node + 1) % 1000) for node in range(1000)]
    with pytest.raises(InvalidInputError, match=r" \.\.\. \(1000 in all\); expected a DAG$"):
        order(1000, ring)
    with pytest.raises(InvalidInputError, match=r"'op\d' -> 'op\d'; expected a DAG$"):
        order(7, [(node, (node + 1) % 7) for node in range(7)])


def test_nodes_behind_a_cycle_are_not_named():
    with pytest.raises(InvalidInputError, match=r"cycle: ('op[12]'( -> )?){3};"):
        order(5, [(0, 1), (1, 2), (2, 1), (2, 3), (3, 4)])


def test_a_chain_of_100000_numbered_backwards_needs_no_recursion():
    size = 100_000
    begin = time.process_time()
    found = topological_order(size, np.arange(1, size), np.arange(size - 1), [""] * size)
    assert found.tolist() == list(range(size - 1, -1, -1))
    assert time.process_time() - begin < 5


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(
    st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=14))))  # fmt: skip
def test_an_order_exists_exactly_for_acyclic_graphs(case):
    size, edges = case
    source, target = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    if is_acyclic(size, source, target):
        found = order(size, edges)
        position = {node: place for place, node in enumerate(found)}
        assert sorted(found) == list(range(size))
        assert all(position[a] < position[b] for a, b in edges)
        for place, node in enumerate(found):
            free = [
                other
                for other in found[place:]
                if all(position[a] < place for a, b in edges if b == other)
            ]
            assert node == min(free)
    else:
        with pytest.raises(InvalidInputError, match=r"graph.*cycle"):
            order(size, edges)
