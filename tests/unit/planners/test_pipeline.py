import dataclasses

import numpy as np
import pytest

from partita.bounds import lower_bound
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind, Labels
from partita.core.problem import Metric, Mode, Schedule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError, UnsupportedError
from partita.planners.pipeline import (
    allowed_boundaries,
    cut_layers,
    layer_of_ops,
    main_devices,
    pipeline_plan,
    solution_of,
)
from partita.testing.builders import Figures, chain, diamond, flat_cluster, graph_of, pipeline


def cluster(*kinds: DeviceKind) -> Cluster:
    devices = tuple(Device(name=f"d{index}", kind=kind) for index, kind in enumerate(kinds))
    level = Level(name="host", group_of=[0] * len(kinds), bandwidth_bytes_per_s=1e9)
    return Cluster(devices=devices, levels=(level,))


def with_ops(graph, **columns):
    return dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, **columns))


def test_plain_planners_use_the_accelerators_or_the_cpus(problem_of):
    gpu, cpu = DeviceKind.GPU, DeviceKind.CPU
    assert main_devices(problem_of(2, cluster(cpu, gpu, gpu))) == [1, 2]
    assert main_devices(problem_of(2, cluster(cpu, cpu))) == [0, 1]


def test_the_schedule_is_the_one_asked_for(problem_of):
    assert problem_of(2).objective.pipeline_schedule is Schedule.ONE_F_ONE_B
    assert problem_of(2, mode=Mode.INFERENCE).objective.pipeline_schedule is Schedule.INFERENCE
    assert problem_of(2, schedule=Schedule.GPIPE).objective.pipeline_schedule is Schedule.GPIPE
    assert problem_of(2).objective.placement_schedule is Schedule.GPIPE
    assert problem_of(2, mode=Mode.INFERENCE).objective.placement_schedule is Schedule.INFERENCE
    asked = problem_of(2, schedule=Schedule.ONE_F_ONE_B).objective
    assert asked.placement_schedule is Schedule.ONE_F_ONE_B


def test_without_layers_the_topological_order_counts():
    graph = graph_of(4, [(3, 1), (1, 0), (0, 2)])
    layer, count = layer_of_ops(graph)
    assert (layer.tolist(), count) == ([2, 1, 3, 0], 4)


def test_backward_ops_have_no_layer():
    layer, count = layer_of_ops(with_ops(chain(4), phase=[0, 0, 1, 1]))
    assert (layer.tolist(), count) == ([0, 1, -1, -1], 2)


def test_an_op_without_a_layer_and_without_inputs_is_in_the_first():
    graph = with_ops(diamond(2), layers=Labels(names=("a", "b"), of=np.array([-1, 1, -1, -1])))
    assert layer_of_ops(graph)[0].tolist() == [0, 1, 0, 1]


def test_an_op_without_a_layer_that_reads_from_backward_is_in_the_first():
    labels = Labels(names=("a", "b"), of=np.array([0, -1, -1, 1]))
    graph = with_ops(chain(4), phase=[0, 1, 0, 0], layers=labels)
    assert layer_of_ops(graph)[0].tolist() == [0, -1, 0, 1]


def test_labels_without_a_layer_are_none():
    graph = with_ops(chain(3), layers=Labels(of=np.array([-1, -1, -1])))
    assert layer_of_ops(graph)[1] == 3
    with pytest.raises(InvalidInputError, match=r"'built'.*3 ops,.*3"):
        cut_layers(graph, [0, 4])


def test_boundaries_split_no_class():
    graph = with_ops(chain(6), colocation=[-1, 0, -1, 0, 1, 1])
    assert allowed_boundaries(graph).tolist() == [0, 1, 4, 6]
    assert allowed_boundaries(chain(3)).tolist() == [0, 1, 2, 3]
    crossed = with_ops(chain(4), colocation=[0, 1, 0, 1])
    assert allowed_boundaries(crossed).tolist() == [0, 4]


def test_every_allowed_boundary_can_be_cut_and_no_other():
    graph = with_ops(chain(6), colocation=[-1, 0, -1, 0, 1, 1])
    allowed = set(allowed_boundaries(graph).tolist())
    for place in range(1, 6):
        if place in allowed:
            cut_layers(graph, [0, place, 6])
        else:
            with pytest.raises(InvalidInputError, match=r"must.*device"):
                cut_layers(graph, [0, place, 6])


def test_backward_ops_go_with_their_class_or_with_what_they_read():
    graph = with_ops(chain(6), phase=[0, 0, 0, 1, 1, 1], colocation=[0, -1, 2, -1, 9, 0])
    assert cut_layers(graph, [0, 1, 3]).tolist() == [0, 1, 1, 1, 1, 0]
    shared = with_ops(chain(6), phase=[0, 0, 1, 1, 1, 1], colocation=[-1, -1, 9, -1, 9, -1])
    assert cut_layers(shared, [0, 1, 2]).tolist() == [0, 1, 1, 1, 1, 1]


def test_a_pipeline_names_the_devices_that_it_uses(problem_of):
    plan = pipeline_plan(problem_of(4), np.array([0, 0, 1, 1]), [[3], [1, 2]])
    assert plan.devices == ("d3", "d1", "d2")
    assert [stage.devices for stage in plan.stages] == [((0,),), ((1,), (2,))]
    assert plan.num_microbatches == 8


def test_a_solution_holds_what_the_cost_model_says(problem_of):
    problem = problem_of(4, 2)
    plan = pipeline(problem.graph, problem.cluster, [0, 1], microbatches=8)
    solution = solution_of(problem, plan, "mine", {"a": 1}, proof=Proof.OPTIMAL)
    assert solution.value == measure(problem, plan).value
    assert solution.lower_bound == lower_bound(problem)
    assert (solution.planner, solution.options, solution.unit) == ("mine", {"a": 1}, "s")
    assert solution.proof is Proof.OPTIMAL


def test_a_plan_that_breaks_a_rule_of_the_devices_is_infeasible(problem_of):
    picky = with_ops(chain(4), device_kinds=[3, 3, 2, 3])
    both = cluster(DeviceKind.GPU, DeviceKind.CPU)
    problem = problem_of(picky, both)
    plan = pipeline(picky, both, [0, 1], microbatches=8)
    assert solution_of(problem, plan, "mine", {}).plan == plan
    wrong = pipeline(picky, both, [1, 0], microbatches=8)
    with pytest.raises(InfeasibleError) as caught:
        solution_of(problem, wrong, "mine", {})
    assert str(caught.value) == (
        "mine breaks a rule: 1 ops are on a kind of device that cannot run them: 'op2'"
    )
    apart = with_ops(chain(4), colocation=[0, 0, 0, 0])
    plan = pipeline(apart, both, [0, 1], microbatches=8)
    with pytest.raises(InfeasibleError, match=r"colocation.*0"):
        solution_of(problem_of(apart, both), plan, "", {})


def test_a_plan_that_a_published_metric_refuses_is_infeasible(problem_of):
    graph = chain(4, Figures(parameter_bytes=1e6))
    problem = problem_of(graph, flat_cluster(2, memory_bytes=10.0), metric=Metric.MAX_LOAD)
    plan = pipeline(graph, problem.cluster, [0, 1])
    with pytest.raises(InfeasibleError, match=r"mine.*'d0'"):
        solution_of(problem, plan, "mine", {})


def test_a_metric_without_figures_is_unsupported(problem_of):
    problem = problem_of(4, 2, metric=Metric.ENERGY)
    plan = pipeline(problem.graph, problem.cluster, [0, 1], microbatches=8)
    with pytest.raises(UnsupportedError, match="'energy'"):
        solution_of(problem, plan, "mine", {})
