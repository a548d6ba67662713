"""Tables that follow from a problem once: bytes held, alike devices, joined ops, and so on."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import ParameterTable
from partita.core.plan import Shard
from partita.core.precision import PRECISIONS, parse_precision
from partita.core.problem import Mode, Objective, Problem
from partita.core.rules import Rule
from partita.cost.tables import (
    GPU_RESERVE,
    SHARD_LEVEL,
    alike_in_time,
    at_each_user,
    at_first_user,
    device_classes,
    fixed_bytes,
    fold_backward,
    held_bytes,
    joined_ops,
    state_bytes,
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
    assert held.state.tolist() == [80, 0, 160]  # 10 elements of float32, 20 of float16
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


D = 8
_ADAM8 = "adam8bit"


@pytest.mark.parametrize(
    ("precision", "optimizer", "parts", "levels"),
    [
        ("fp32", "adam", (4, 4, 0, 8), (16, 8 + 8 / D, 4 + 12 / D, 16 / D)),
        ("tf32", "adam", (4, 4, 0, 8), (16, 8 + 8 / D, 4 + 12 / D, 16 / D)),
        ("fp32", "momentum", (4, 4, 0, 4), (12, 8 + 4 / D, 4 + 8 / D, 12 / D)),
        ("fp32", "sgd", (4, 4, 0, 0), (8, 8, 4 + 4 / D, 8 / D)),
        ("fp32", "adafactor", (4, 4, 0, 0), (8, 8, 4 + 4 / D, 8 / D)),
        ("bf16-fp32-grads", "adam", (2, 4, 4, 8), (18, 6 + 12 / D, 2 + 16 / D, 18 / D)),
        ("bf16", "adam", (2, 2, 4, 8), (16, 4 + 12 / D, 2 + 14 / D, 16 / D)),
        ("fp16", "adam", (2, 2, 8, 8), (20, 4 + 16 / D, 2 + 18 / D, 20 / D)),
        ("bf16-fp32-grads,state=bf16", "adam", (2, 4, 4, 4), (14, 6 + 8 / D, 2 + 12 / D, 14 / D)),
        ("bf16-fp32-grads", _ADAM8, (2, 4, 4, 2), (12, 6 + 6 / D, 2 + 10 / D, 12 / D)),
        ("pure-bf16", "adam", (2, 2, 0, 4), (8, 4 + 4 / D, 2 + 6 / D, 8 / D)),
        ("pure-bf16", _ADAM8, (2, 2, 0, 2), (6, 4 + 2 / D, 2 + 4 / D, 6 / D)),
        ("fp8", "adam", (2, 2, 4, 8), (16, 4 + 12 / D, 2 + 14 / D, 16 / D)),
        # A copy in bfloat16 for the step, which gathers bring where the weights are divided.
        ("bf16-mixed", "adam", (4, 4, 0, 8), (18, 10 + 8 / D, 6 + 12 / D, 16 / D)),
    ],
)
def test_bytes_per_parameter_are_those_of_the_published_table(precision, optimizer, parts, levels):
    held = state_bytes(parse_precision(precision), optimizer)
    assert (held.weights, held.gradients, held.master, held.state) == parts
    found = held.on_device(level=np.arange(4), replicas=D).total
    assert found == pytest.approx(levels)


def test_lora_holds_frozen_weights_and_the_whole_state_of_its_adapters():
    held = state_bytes(PRECISIONS["bf16"], frozen=0.99)
    assert float(held.total) == pytest.approx(2 + 0.01 * 14)


def test_a_policy_gives_every_part_of_a_graphs_parameters_its_dtype():
    table = replace(TABLE, buffer=np.array([False, True, False]))
    held = held_bytes(table, Objective().with_precision(PRECISIONS["bf16-fp32-grads"]))
    assert held.weights.tolist() == [20, 40, 40]  # a buffer keeps its own dtype
    assert held.gradients.tolist() == [40, 0, 80]
    assert held.master.tolist() == [40, 0, 80]
    assert held.state.tolist() == [80, 0, 160]
    mixed = held_bytes(table, Objective().with_precision(PRECISIONS["bf16-mixed"]))
    assert mixed.copy.tolist() == [20, 0, 40]


def test_the_copy_of_weights_in_the_type_of_the_arithmetic_is_for_training_alone():
    table = replace(TABLE, copy_bytes=np.array([20.0, 0.0, 0.0]))
    assert held_bytes(table, Objective()).total.tolist() == [180, 40, 240]
    assert held_bytes(table, Objective(mode=Mode.INFERENCE)).total.tolist() == [40, 40, 40]


def test_weights_beside_a_master_copy_are_written_by_an_update_but_not_read():
    held = held_bytes(TABLE, Objective().with_precision(PRECISIONS["bf16"]))
    assert held.update_traffic.tolist() == [20 + 20 + 2 * (40 + 80), 0, 40 + 40 + 2 * (80 + 160)]


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


def test_a_process_with_a_few_communicators_takes_two_to_three_gibibytes():
    assert 1.0 < fixed_bytes(1) / 2**30 < 1.5
    assert 1.5 < fixed_bytes(4) / 2**30 < 2.9


def test_the_usual_reserve_covers_a_process_and_fragments_of_a_large_gpu():
    memory, fragments = 80e9, 0.025
    assert GPU_RESERVE * memory >= fixed_bytes(2) + fragments * memory
