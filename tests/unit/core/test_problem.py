import dataclasses

import pytest

from partita.core.cluster import Cluster, Device
from partita.core.graph import DeviceKind
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.errors import InvalidInputError
from partita.testing.builders import Figures, chain, flat_cluster

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatches": 0}, "microbatches is 0; expected 1 to 1000000"),
        ({"microbatch_size": -1}, "microbatch_size is -1; expected 1 to 1000000"),
        ({"microbatches": 2**63}, "microbatches is 9223372036854775808; expected 1 to 1000000"),
        ({"memory_factor": 0.0}, "memory_factor is 0.0; expected above 0 and up to 1"),
        ({"memory_factor": 1.5}, "memory_factor is 1.5; expected above 0 and up to 1"),
        ({"memory_factor": NAN}, "memory_factor is nan; expected above 0 and up to 1"),
        (
            {"optimizer_bytes_per_element": -1.0},
            "optimizer_bytes_per_element is -1.0; expected >= 0",
        ),
        (
            {"optimizer_bytes_per_element": INF},
            "optimizer_bytes_per_element is inf; expected >= 0",
        ),
        ({"schedule": Schedule.INFERENCE}, "schedule 'inference' is not one for training"),
        (
            {"mode": Mode.INFERENCE, "schedule": Schedule.GPIPE},
            "schedule 'gpipe' is not one for inference",
        ),
    ],
)
def test_objectives_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidInputError) as caught:
        Objective(**changes)
    assert str(caught.value) == words


def test_an_objective_is_frozen_and_hashable():
    objective = Objective(mode=Mode.INFERENCE, schedule=Schedule.INFERENCE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.mode = Mode.TRAINING
    assert {objective: 1}[dataclasses.replace(objective)] == 1


def test_what_is_not_asked_follows_from_the_graph_and_the_metric():
    graph = chain(2, Figures(batch_size=16))
    problem = Problem(graph=graph, cluster=flat_cluster(2))
    assert (problem.microbatches, problem.microbatch_size) == (8, 16)
    single = Problem(
        graph=graph, cluster=flat_cluster(2), objective=Objective(metric=Metric.LATENCY)
    )
    assert single.microbatches == 1
    asked = Objective(metric=Metric.LATENCY, microbatches=3, microbatch_size=2)
    problem = dataclasses.replace(problem, objective=asked)
    assert (problem.microbatches, problem.microbatch_size) == (3, 2)


def test_an_op_that_no_device_may_run_is_named():
    graph = chain(3)
    picky = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, device_kinds=[3, 2, 1]))
    with pytest.raises(InvalidInputError, match=r"'op1'.*'cluster'"):
        Problem(graph=picky, cluster=flat_cluster(2))
    cpu = Cluster(name="laptop", devices=(Device(name="cpu", kind=DeviceKind.CPU),))
    with pytest.raises(InvalidInputError, match=r"'op2'.*'laptop'"):
        Problem(graph=picky, cluster=cpu)


def test_problems_are_equal_by_value():
    first, second = (Problem(graph=chain(2), cluster=flat_cluster(2)) for _ in range(2))
    assert first == second
    assert first != dataclasses.replace(first, objective=Objective(microbatches=2))
