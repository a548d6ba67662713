"""Bytes across cuts, counted by hand."""

import numpy as np

from partita.objectives.cuts import counted_ops, live_cut_bytes, released_cut_bytes


def test_a_chain_has_the_output_of_its_last_op_in_both_counts(make_graph):
    graph = make_graph([1, 1, 1], [(0, 1), (1, 2)], sizes=[5, 7, 9])
    stage_of = np.array([0, 1, 2], np.int32)
    every = np.ones(3, bool)
    assert live_cut_bytes(graph, stage_of, 3, every).tolist() == [5, 7, 0]
    assert released_cut_bytes(graph, stage_of, 3, every).tolist() == [5, 7, 9]


def test_the_augmented_antichain_counts_an_op_whose_readers_are_all_inside(make_graph):
    # op0 -> op1, op2; both -> op3. After {0, 1, 2} only the outputs of 1 and 2 are needed, but op0
    # is an ancestor of the maximal op1 with an edge to op2, which is no ancestor of op1.
    graph = make_graph([1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)], sizes=[100, 10, 1, 1000])
    stage_of = np.array([0, 0, 0, 1], np.int32)
    every = np.ones(4, bool)
    assert live_cut_bytes(graph, stage_of, 2, every).tolist() == [11, 0]
    assert released_cut_bytes(graph, stage_of, 2, every).tolist() == [111, 1000]


def test_a_skip_connection_crosses_every_cut_on_its_way_once(make_graph):
    graph = make_graph([1] * 4, [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)], sizes=[8, 4, 2, 1])
    stage_of = np.array([0, 1, 2, 3], np.int32)
    every = np.ones(4, bool)
    assert live_cut_bytes(graph, stage_of, 4, every).tolist() == [8, 12, 10, 0]
    # After op1 and op2 the ancestor op0 still feeds op3.
    assert released_cut_bytes(graph, stage_of, 4, every).tolist() == [8, 12, 10, 1]


def test_an_end_of_the_graph_inside_counts_only_as_released(make_graph):
    graph = make_graph([1] * 3, [(0, 1), (0, 2)], sizes=[3, 50, 1])
    stage_of = np.array([0, 0, 1], np.int32)
    every = np.ones(3, bool)
    assert live_cut_bytes(graph, stage_of, 2, every).tolist() == [3, 0]
    assert released_cut_bytes(graph, stage_of, 2, every)[0] == 53


def test_unused_elements_of_tuples_do_not_count_also_when_nested(make_graph):
    types = ["LSTM", "__getitem__", "__getitem__", "__getitem__", "Linear"]
    graph = make_graph([1] * 5, [(0, 1), (0, 2), (2, 3), (1, 4)], types=types)
    assert counted_ops(graph).tolist() == [True, True, False, False, True]


def test_a_graph_without_types_counts_every_op(make_graph):
    assert counted_ops(make_graph([1, 1], [(0, 1)])).all()
