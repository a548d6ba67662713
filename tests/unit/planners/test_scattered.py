import dataclasses

import pytest

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind
from partita.core.problem import Mode, Schedule
from partita.errors import InfeasibleError
from partita.planners.scattered import plan_random
from partita.testing.builders import Figures, chain, flat_cluster


def mixed() -> Cluster:
    devices = (Device(name="gpu"), Device(name="cpu", kind=DeviceKind.CPU))
    level = Level(name="host", group_of=[0, 0], bandwidth_bytes_per_s=1e9)
    return Cluster(devices=devices, levels=(level,))


def with_ops(count: int, **columns: object):
    graph = chain(count)
    return dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, **columns))


def test_one_seed_one_placement(problem_of):
    problem = problem_of(12)
    found = [plan_random(problem, seed=seed).plan.device_of.tolist() for seed in range(5)]
    again = [plan_random(problem, seed=seed).plan.device_of.tolist() for seed in range(5)]
    assert found == again
    assert len({tuple(row) for row in found}) == 5
    assert plan_random(problem) == plan_random(problem, seed=0)
    assert plan_random(problem, seed=3).options == {"seed": 3}


def test_ops_that_stay_together_do(problem_of):
    graph = with_ops(8, colocation=[0, 1, 0, 1, -1, -1, 0, 1])
    for seed in range(10):
        device = plan_random(problem_of(graph), seed=seed).plan.device_of
        assert len({device[0], device[2], device[6]}) == 1
        assert len({device[1], device[3], device[7]}) == 1


def test_ops_run_on_the_kinds_that_they_may(problem_of):
    graph = with_ops(6, device_kinds=[1, 2, 3, 3, 1, 2], colocation=[0, 1, 0, 1, -1, -1])
    for seed in range(10):
        device = plan_random(problem_of(graph, mixed()), seed=seed).plan.device_of.tolist()
        assert device == [0, 1, 0, 1, 0, 1]


def test_ops_that_can_share_no_device_are_named(problem_of):
    graph = with_ops(3, device_kinds=[3, 1, 2], colocation=[-1, 0, 0])
    with pytest.raises(InfeasibleError) as caught:
        plan_random(problem_of(graph, mixed()))
    assert (
        str(caught.value)
        == "no device may run op 'op1' and 1 that must share its device, such as 'op2'"
    )


def test_a_placement_that_does_not_fit_is_drawn_again(problem_of):
    graph = chain(4, Figures(parameter_bytes=[100.0, 100.0, 1.0, 1.0]))
    problem = problem_of(graph, flat_cluster(2, memory_bytes=500.0))
    for seed in range(10):
        device = plan_random(problem, seed=seed).plan.device_of
        assert device[0] != device[1]


def test_after_some_draws_it_gives_up_and_names_a_device(problem_of):
    graph = chain(2, Figures(parameter_bytes=1e6))
    problem = problem_of(graph, flat_cluster(2, memory_bytes=500.0))
    with pytest.raises(InfeasibleError, match=r"20 random.*'d\d'"):
        plan_random(problem)


def test_the_schedule_follows_the_problem(problem_of):
    assert plan_random(problem_of(4)).plan.schedule is Schedule.GPIPE
    asked = problem_of(4, schedule=Schedule.ONE_F_ONE_B, microbatches=3, microbatch_size=2)
    plan = plan_random(asked).plan
    assert plan.schedule is Schedule.ONE_F_ONE_B
    assert plan.microbatch_sizes.tolist() == [2, 2, 2]
    assert plan_random(problem_of(4, mode=Mode.INFERENCE)).plan.schedule is Schedule.INFERENCE
