import dataclasses
import time

import pytest

from partita.core.graph import Graph
from partita.core.problem import Schedule
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.manual import plan_manual
from partita.testing.builders import chain, diamond


def named(*names: str) -> Graph:
    """Return a chain of ops with the given names."""
    graph = chain(len(names))
    return dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, names=names))


def modules() -> Graph:
    return named("embed", "encoder.layers.0.attn", "encoder.layers.0.mlp", "encoder.layers.10.mlp")


def devices(solution) -> list[str]:
    return [solution.plan.devices[device] for device in solution.plan.device_of]


def test_ops_are_placed_by_name(problem_of):
    assignment = {"op0": "d1", "op1": "d1", "op2": "d3"}
    solution = plan_manual(problem_of(3), assignment=assignment)
    assert devices(solution) == ["d1", "d1", "d3"]
    assert solution.options == {"assignment": assignment}


def test_a_module_claims_all_that_it_holds_and_no_more(problem_of):
    assignment = {"embed": "d0", "encoder.layers.0": "d1", "encoder.layers.10": "d2"}
    solution = plan_manual(problem_of(modules()), assignment=assignment)
    assert devices(solution) == ["d0", "d1", "d1", "d2"]
    with pytest.raises(InvalidInputError, match=r"'encoder\.layers\.1'.*'bui"):
        plan_manual(problem_of(modules()), assignment={"encoder.layers.1": "d0"})


def test_a_pattern_claims_what_it_matches(problem_of):
    assignment = {"embed": "d0", "*.attn": "d1", "*.mlp": "d0"}
    solution = plan_manual(problem_of(modules()), assignment=assignment)
    assert devices(solution) == ["d0", "d1", "d0", "d0"]


def test_two_keys_may_agree(problem_of):
    assignment = {"*": "d0", "encoder": "d0"}
    assert set(devices(plan_manual(problem_of(modules()), assignment=assignment))) == {"d0"}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        (
            {"encoder": "d0", "*.mlp": "d1", "embed": "d1"},
            "op 'encoder.layers.0.mlp' is claimed twice, by 'encoder' and by '*.mlp'",
        ),
        ({"encoder": "d0"}, "op 'embed' is placed nowhere; every op must be on one device"),
        ({}, "op 'embed' is placed nowhere; every op must be on one device"),
        (
            {"encoder": "gpu9"},
            "'encoder' is on device 'gpu9', which is not one of d0, d1, d2, d3",
        ),
        ({"decoder": "d0"}, "'decoder' names no op of graph 'built'"),
        ({"dec*": "d0"}, "'dec*' names no op of graph 'built'"),
        ({"": "d0"}, "'' names no op of graph 'built'"),
    ],
)
def test_maps_that_cannot_be_are_refused(problem_of, assignment, words):
    with pytest.raises(InvalidInputError) as caught:
        plan_manual(problem_of(modules()), assignment=assignment)
    assert str(caught.value) == words


def test_a_map_that_is_a_pipeline_has_one_stage_for_each_device(problem_of):
    assignment = {"op0": "d2", "op1": "d0", "op2": "d0", "op3": "d1"}
    plan = plan_manual(problem_of(4), assignment=assignment).plan
    assert plan.stage_of.tolist() == [0, 1, 1, 2]
    assert [stage.devices for stage in plan.stages] == [((2,),), ((0,),), ((1,),)]
    assert plan.schedule is Schedule.ONE_F_ONE_B


def test_any_other_map_is_a_placement(problem_of):
    assignment = {"op0": "d0", "op1": "d1", "op2": "d0", "op3": "d0"}
    plan = plan_manual(problem_of(4), assignment=assignment).plan
    assert plan.stage_of.tolist() == [0, 1, 2, 2]


def test_branches_of_a_pipeline_are_numbered_along_the_data(problem_of):
    graph = diamond(2)
    assignment = {"op0": "d3", "op1": "d2", "op2": "d1", "op3": "d0"}
    plan = plan_manual(problem_of(graph), assignment=assignment).plan
    assert plan.stage_of.tolist() == [0, 1, 2, 3]


def test_a_map_that_parts_ops_which_stay_together_is_infeasible(problem_of):
    graph = chain(3)
    graph = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, colocation=[4, -1, 4]))
    assignment = {"op0": "d0", "op1": "d0", "op2": "d1"}
    with pytest.raises(InfeasibleError, match=r"colocation.*4"):
        plan_manual(problem_of(graph), assignment=assignment)


def test_a_map_of_every_op_of_a_large_graph_is_read_at_once(problem_of):
    problem = problem_of(20_000, microbatches=1)
    assignment = dict.fromkeys(problem.graph.ops.names, "d0")
    begin = time.process_time()
    assert len(plan_manual(problem, assignment=assignment).plan.stages) == 1
    assert time.process_time() - begin < 5
