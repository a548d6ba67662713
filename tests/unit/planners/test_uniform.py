import dataclasses

import pytest

from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.uniform import plan_uniform
from partita.testing.builders import Figures, chain, flat_cluster


def sizes(plan) -> list[int]:
    stages = plan.stage_of.tolist()
    return [stages.count(stage) for stage in range(len(plan.stages))]


@pytest.mark.parametrize(
    ("ops", "devices", "stages", "expected"),
    [
        (8, 4, 0, [2, 2, 2, 2]),
        (8, 3, 0, [3, 3, 2]),
        (9, 4, 0, [3, 3, 3]),
        (3, 4, 0, [1, 1, 1]),
        (8, 4, 1, [8]),
        (8, 4, 3, [3, 3, 2]),
        (1, 4, 4, [1]),
    ],
)
def test_stages_have_equal_numbers_of_layers(problem_of, ops, devices, stages, expected):
    solution = plan_uniform(problem_of(ops, devices), stages=stages)
    assert sizes(solution.plan) == expected
    assert solution.options == {"stages": stages, "replicas": 1, "chunks": 1}
    assert solution.plan.devices == tuple(f"d{index}" for index in range(len(expected)))


def test_layers_count_and_not_their_ops(layered, problem_of):
    plan = plan_uniform(problem_of(layered([0, 0, 0, 0, 1, 2, 3]), 2)).plan
    assert plan.stage_of.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_an_op_without_a_layer_joins_the_latest_that_it_reads(layered, problem_of):
    plan = plan_uniform(problem_of(layered([0, -1, 1, -1]), 2)).plan
    assert plan.stage_of.tolist() == [0, 0, 1, 1]


def test_layers_that_hold_no_op_make_no_stage(layered, problem_of):
    plan = plan_uniform(problem_of(layered([0, 0, 3, 3], count=6), 4)).plan
    assert plan.stage_of.tolist() == [0, 0, 1, 1]
    plan = plan_uniform(problem_of(layered([2, 2, 3, 3], count=4), 4)).plan
    assert plan.stage_of.tolist() == [0, 0, 1, 1]


def test_replicas_take_their_share_of_the_devices(problem_of):
    plan = plan_uniform(problem_of(8, 4), replicas=2).plan
    assert [stage.devices for stage in plan.stages] == [((0,), (1,)), ((2,), (3,))]
    plan = plan_uniform(problem_of(8, 4), stages=1, replicas=4).plan
    assert plan.stages[0].num_replicas == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 5}, "5 stages of 1 replicas need 5 devices; there are 4"),
        ({"stages": 3, "replicas": 2}, "3 stages of 2 replicas need 6 devices; there are 4"),
        ({"stages": -1}, "stages is -1; expected 0 or more"),
        ({"replicas": 0}, "replicas is 0; expected 1 to 4"),
        ({"replicas": 5}, "replicas is 5; expected 1 to 4"),
    ],
)
def test_more_than_there_is_is_refused(problem_of, options, words):
    with pytest.raises(InvalidInputError) as caught:
        plan_uniform(problem_of(8, 4), **options)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("colocation", "expected"),
    [
        ([-1, -1, 0, 0, -1, -1, -1, -1], [2, 2, 2, 2]),
        ([-1, 0, 0, -1, -1, -1, -1, -1], [3, 1, 2, 2]),
        ([-1, 0, -1, -1, 0, -1, -1, -1], [5, 1, 2]),
        ([0, -1, -1, -1, -1, -1, -1, 0], [8]),
        ([0, 0, 1, 1, 2, 2, 3, 3], [2, 2, 2, 2]),
        ([0, 1, 0, 1, 2, 3, 2, 3], [4, 4]),
    ],
)
def test_a_boundary_moves_rather_than_split_ops_that_stay_together(
    problem_of, colocation, expected
):
    graph = chain(8)
    graph = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, colocation=colocation))
    plan = plan_uniform(problem_of(graph, 4)).plan
    found = {}
    for op, color in enumerate(colocation):
        if color >= 0:
            assert found.setdefault(color, plan.stage_of[op]) == plan.stage_of[op]
    assert sum(sizes(plan)) == 8
    assert sizes(plan) == expected


def test_backward_ops_follow_the_forward_op_of_their_class(problem_of):
    graph = chain(6)
    ops = dataclasses.replace(graph.ops, phase=[0, 0, 0, 1, 1, 1], colocation=[0, 1, 2, 2, 1, 0])
    plan = plan_uniform(problem_of(dataclasses.replace(graph, ops=ops), 3)).plan
    assert plan.stage_of.tolist() == [0, 1, 2, 2, 1, 0]


def test_a_graph_without_a_forward_op_is_refused(problem_of):
    graph = chain(3)
    graph = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, phase=1))
    with pytest.raises(InvalidInputError, match=r"'built'.*into"):
        plan_uniform(problem_of(graph))


def test_a_device_that_is_too_small_is_named_with_what_is_missing(problem_of):
    graph = chain(4, Figures(parameter_bytes=[1000.0, 1.0, 1.0, 1.0]))
    cluster = flat_cluster(2, memory_bytes=3000.0)
    with pytest.raises(InfeasibleError, match=r"'d0'.*4\.00 kB.*0.*, 1\.00 kB"):
        plan_uniform(problem_of(graph, cluster))


def test_chunks_deal_the_devices_in_turn(problem_of):
    solution = plan_uniform(problem_of(8, 2), chunks=2)
    assert [stage.devices[0][0] for stage in solution.plan.stages] == [0, 1, 0, 1]
    assert sizes(solution.plan) == [2, 2, 2, 2]
    with pytest.raises(InvalidInputError, match="chunks is 0"):
        plan_uniform(problem_of(8, 2), chunks=0)
