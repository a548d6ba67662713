"""Tables that follow from a problem once: bytes held, alike devices, joined ops, and so on."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import ParameterTable
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem
from partita.core.rules import Rule
from partita.cost.tables import (
    SHARD_LEVEL,
    alike_in_time,
    at_each_user,
    at_first_user,
    device_classes,
    fold_backward,
    held_bytes,
    joined_ops,
    units,
)
from partita.testing.builders import Figures, chain, flat_cluster

TABLE = ParameterTable(
    names=("w", "frozen", "half"),
    bytes=np.array([40.0, 40.0, 40.0]),
    dtypes=("float32", "float32", "float16"),
    trainable=np.array([True, False, True]),
    use_op=np.array([0, 1, 1, 2]),
    use_parameter=np.array([0, 0, 1, 2]),
)


def test_training_adds_gradients_and_optimizer_state_of_what_is_trained():
    held = held_bytes(TABLE, Objective(optimizer_bytes_per_element=8.0))
    assert held.weights.tolist() == [40, 40, 40]
    assert held.gradients.tolist() == [40, 0, 40]
    assert held.optimizer.tolist() == [80, 0, 160]  # 10 elements of float32, 20 of float16
    assert held.total.tolist() == [160, 40, 240]


def test_inference_holds_weights_alone():
    objective = Objective(mode=Mode.INFERENCE)
    assert held_bytes(TABLE, objective).total.tolist() == [40, 40, 40]
    assert held_bytes(TABLE, objective, mode=Mode.TRAINING).total.tolist() == [160, 40, 240]


def test_an_update_reads_and_writes_all_but_gradients_which_it_reads():
    held = held_bytes(TABLE, Objective(optimizer_bytes_per_element=8.0))
    assert held.update_traffic.tolist() == [3 * 40 + 2 * 80, 0, 3 * 40 + 2 * 160]


@pytest.mark.parametrize(
    ("shard", "trained"),
    [
        (Shard.NONE, 40 + 40 + 80),
        (Shard.OPTIMIZER, 40 + 40 + 80 / 4),
        (Shard.GRADIENTS, 40 + 40 / 4 + 80 / 4),
        (Shard.PARAMETERS, 160 / 4),
    ],
)
def test_replicas_divide_what_the_level_says_and_frozen_parameters_stay_whole(shard, trained):
    held = held_bytes(TABLE, Objective(optimizer_bytes_per_element=8.0))
    one = held.on_device(level=SHARD_LEVEL[shard], replicas=4)
    assert one.total[:2].tolist() == [trained, 40]
    both = held.on_device(level=SHARD_LEVEL[shard], replicas=4, tp=2)
    assert both.total[:2].tolist() == [trained / 2, 20]


def test_shared_parameters_count_at_each_user_or_at_the_first():
    graph = replace(chain(3), parameters=TABLE)
    assert at_each_user(graph, TABLE.bytes).tolist() == [40, 80, 40]
    assert at_first_user(graph, TABLE.bytes).tolist() == [40, 40, 40]
    counted = np.array([False, True, True])
    assert at_first_user(graph, TABLE.bytes, counted).tolist() == [0, 80, 40]


def test_devices_are_alike_in_time_whatever_their_memory_but_not_for_a_plan():
    cluster = flat_cluster(4, speeds=[1.0, 2.0, 1.0, 1.0])
    devices = tuple(
        replace(device, memory_bytes=100.0 if index == 2 else 50.0)
        for index, device in enumerate(cluster.devices)
    )
    assert alike_in_time(devices).of.tolist() == [0, 1, 0, 0]
    assert alike_in_time(devices).first == (0, 1)
    problem = Problem(graph=chain(2), cluster=replace(cluster, devices=devices))
    classes = device_classes(problem)
    assert classes.of.tolist() == [0, 1, 2, 0]
    assert classes.sizes.tolist() == [2, 1, 1]
    assert classes.limit_bytes.tolist() == [50, 50, 100]


def test_a_rule_tells_devices_apart():
    rule = Rule(ops="op0", devices="d0")
    problem = Problem(graph=chain(2), cluster=flat_cluster(2), rules=(rule,))
    classes = device_classes(problem)
    assert classes.of.tolist() == [0, 1]
    assert classes.allowed.tolist() == [[True, True], [False, True]]


def test_ops_with_one_label_are_joined_and_the_others_alone():
    assert joined_ops(np.array([-1, 3, 0, 3, -1])).tolist() == [2, 1, 0, 1, 3]
    graph = chain(3)
    assert units(graph).num_units == 3
    tied = replace(graph, ops=replace(graph.ops, colocation=np.array([0, -1, 0])))
    assert units(tied).total(np.array([1.0, 2.0, 4.0])).tolist() == [5, 2]


def test_explicit_backward_ops_count_in_backward():
    graph = chain(2, Figures(forward_s=1.0, backward_s=2.0))
    assert [part.tolist() for part in fold_backward(graph, graph.forward_s, graph.backward_s)] == [
        [1, 1],
        [2, 2],
    ]
    last = replace(graph, ops=replace(graph.ops, phase=np.array([0, 1])))
    ahead, back = fold_backward(last, last.forward_s, last.backward_s)
    assert (ahead.tolist(), back.tolist()) == ([1, 0], [2, 3])
