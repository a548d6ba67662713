import dataclasses

import pytest

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.single import plan_single
from partita.testing.builders import Figures, chain, flat_cluster


def mixed(*devices: Device) -> Cluster:
    level = Level(name="host", group_of=[0] * len(devices), bandwidth_bytes_per_s=1e9)
    return Cluster(devices=devices, levels=(level,))


def with_kinds(kinds: list[int]):
    graph = chain(len(kinds))
    return dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, device_kinds=kinds))


def test_the_fastest_device_is_taken_and_ties_go_to_the_first(problem_of):
    fast = problem_of(4, flat_cluster(3, speeds=(1.0, 3.0, 2.0)))
    assert plan_single(fast).plan.devices == ("d1",)
    assert plan_single(problem_of(4, 3)).plan.devices == ("d0",)
    solution = plan_single(fast)
    assert (solution.planner, solution.options) == ("single", {"device": ""})
    assert len(solution.plan.stages) == 1


def test_costs_of_its_type_decide_and_not_speed_alone(problem_of):
    graph = chain(2)
    slow = dataclasses.replace(graph.costs[0], device_type="slow", forward_s=[9.0, 9.0])
    quick = dataclasses.replace(graph.costs[0], device_type="quick", forward_s=[1.0, 1.0])
    graph = dataclasses.replace(graph, costs=(slow, quick))
    cluster = mixed(Device(name="a", type="slow"), Device(name="b", type="quick", speed=0.9))
    assert plan_single(problem_of(graph, cluster)).plan.devices == ("b",)


def test_a_device_can_be_asked_for(problem_of):
    problem = problem_of(4, flat_cluster(3, speeds=(1.0, 3.0, 2.0)))
    solution = plan_single(problem, device="d2")
    assert solution.plan.devices == ("d2",)
    assert solution.options == {"device": "d2"}
    with pytest.raises(InvalidInputError) as caught:
        plan_single(problem, device="gpu0")
    assert str(caught.value) == "device 'gpu0' is not in the cluster; there are d0, d1, d2"


def test_the_next_device_is_taken_where_the_fastest_is_too_small(problem_of):
    graph = chain(2, Figures(parameter_bytes=100.0))
    cluster = mixed(
        Device(name="slow", speed=1.0), Device(name="small", speed=9.0, memory_bytes=50.0)
    )
    assert plan_single(problem_of(graph, cluster)).plan.devices == ("slow",)
    with pytest.raises(InfeasibleError, match=r"'small'.*800 B.*0.*, 750 B"):
        plan_single(problem_of(graph, cluster), device="small")


def test_only_devices_that_may_run_every_op_count(problem_of):
    cluster = mixed(Device(name="gpu", speed=9.0), Device(name="cpu", kind=DeviceKind.CPU))
    assert plan_single(problem_of(with_kinds([3, 2]), cluster)).plan.devices == ("cpu",)
    with pytest.raises(InfeasibleError) as caught:
        plan_single(problem_of(with_kinds([1, 2]), cluster))
    assert str(caught.value) == (
        "no single device may run all ops of the graph: 'gpu' does not run op 'op1'"
    )
    with pytest.raises(InfeasibleError, match=r"'gpu'.*'op1'"):
        plan_single(problem_of(with_kinds([3, 2]), cluster), device="gpu")
