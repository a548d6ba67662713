"""Steps before a run: state that replicas divide, and what a plan is specialised to."""

from dataclasses import replace

import pytest

from partita.core.plan import Shard
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.flows.problem import specialised_remarks
from partita.flows.runs.requests import RunRequest, TrainRequest
from partita.flows.runs.steps import plan_for_devices, sharded
from partita.planners.table import get_planner
from partita.requests import make
from partita.testing.builders import chain, flat_cluster


@pytest.mark.parametrize(
    ("zero", "shard"), [(1, Shard.OPTIMIZER), (2, Shard.GRADIENTS), (3, Shard.PARAMETERS)]
)
def test_zero_divides_state_as_it_is_counted(zero: int, shard: Shard) -> None:
    problem = Problem(graph=chain(4), cluster=flat_cluster(4))
    plan = get_planner("uniform", stages=2, replicas=2)(problem).plan
    found = sharded(plan, zero)
    assert [stage.shard for stage in found.stages] == [shard, shard]
    assert replace(found, stages=plan.stages) == plan


def test_without_replicas_there_is_nothing_to_divide() -> None:
    problem = Problem(graph=chain(4), cluster=flat_cluster(2))
    plan = get_planner("uniform", stages=2)(problem).plan
    with pytest.raises(InvalidInputError, match="--zero 1"):
        sharded(plan, 1)
    with pytest.raises(InvalidInputError, match="zero"):
        make(TrainRequest, model="toy", zero=4)


@pytest.mark.parametrize(("count", "degrees"), [(4, {2}), (3, {1})])
def test_fewer_devices_keep_the_tensor_parallel_degree_that_divides_them(
    count: int, degrees: set[int]
) -> None:
    problem = Problem(graph=chain(8), cluster=flat_cluster(6))
    first = get_planner("uniform", stages=3, tp=2)(problem)
    fewer = replace(problem, cluster=problem.cluster.only(problem.cluster.device_names[:count]))
    for request in (
        make(TrainRequest, model="toy", tp=2),
        make(TrainRequest, model="toy", tp=2, pp=3),
        make(RunRequest, plan="toy.json"),
    ):
        found = plan_for_devices(request, first, fewer).plan
        assert {stage.tp for stage in found.stages} == degrees


def test_a_model_that_reads_its_data_is_remarked_on_by_plan_and_run() -> None:
    note = "specialised to the example: block reads a tensor by bool"
    records = {"profile": {"cpu": {"notes": ["no op uses x", note]}, "gpu": {"notes": [note]}}}
    graph = replace(chain(2), annotations=records)
    (remark,) = specialised_remarks(graph)
    assert remark == f"{note}; the plan computes what it did there, whatever the data"
    assert specialised_remarks(chain(2)) == ()
