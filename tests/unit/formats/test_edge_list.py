import math

from partita.formats.edge_list import labels, unlimited_level, weights, wire


def test_equal_edges_out_of_an_op_read_one_tensor():
    wiring = wire(
        ["a", "b", "c"],
        [0, 0, 0, 1],
        [1, 2, 2, 2],
        num_bytes=[4.0, 4.0, 4.0, 4.0],
        transfer_s=[math.nan, math.nan, 0.5, math.nan],
        unread_bytes=[0.0, 0.0, 9.0],
    )
    assert wiring.tensors.names == ("a", "a#1", "b", "c")
    assert wiring.tensors.producer.tolist() == [0, 0, 1, 2]
    assert wiring.edges.tensor.tolist() == [0, 0, 1, 2]
    assert wiring.tensors.bytes.tolist() == [4, 4, 4, 9]
    assert wiring.outputs.tolist() == [3]


def test_only_positive_weights_are_parameters():
    table = weights(["a", "b", "c"], [0.0, 8.0, 4.0])
    assert table.names == ("b.weight", "c.weight")
    assert table.use_op.tolist() == [1, 2]


def test_labels_count_distinct_values_and_leave_out_empty_ones():
    found = labels(["x", "", "y", "x"])
    assert found.names == ("x", "y")
    assert found.of.tolist() == [0, -1, 1, 0]


def test_a_level_without_limit_joins_all():
    level = unlimited_level(3)
    assert level.group_of.tolist() == [0, 0, 0]
    assert math.isinf(level.bandwidth_bytes_per_s[0])
