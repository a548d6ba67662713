"""Evaluation on the stages of a run against the untouched module in evaluation mode."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.catalogue.shorthand import local_cluster
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Objective, Problem, Schedule
from partita.planners.table import solve
from partita.runtime.executor import make_task, run_forked
from partita.runtime.rank import RankOptions, StepNews
from partita.runtime.training.evaluation import Evaluation
from partita.runtime.training.recipe import Recipe
from partita.runtime.workload import model_workload

pytestmark = pytest.mark.slow


def example(size: int, turn: int = 0) -> Example:
    drawn = torch.Generator().manual_seed(turn % 1000)
    values = torch.randn(size, 4, generator=drawn, dtype=torch.float64)
    return Example(args=(values,), labels=torch.arange(size) % 4, batch_size=size)


def network(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    block = [nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)]
    return nn.Sequential(*block, nn.Linear(4, 4)).double()


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [(Schedule.ONE_F_ONE_B, 3), (Schedule.PIPEDREAM, 3), (Schedule.ONE_F_ONE_B, 4)],
    ids=["1f1b", "pipedream", "divided parameters"],
)
def test_the_loss_on_held_out_data_is_that_of_the_module(
    schedule: Schedule, microbatches: int
) -> None:
    torch.set_num_threads(1)
    # Running statistics belong to a replica.
    norm = nn.LayerNorm if microbatches == 4 else nn.BatchNorm1d
    source = ModelSource(
        name="net", model=network(norm), example=example, loss=nn.functional.cross_entropy
    )
    origin = ModelOrigin(text="net")
    graph = Captures(source, origin).at(4).graph
    ones = np.ones(len(graph))
    graph = replace(graph, costs=(replace(graph.costs[0], forward_s=ones, backward_s=ones),))
    objective = Objective(microbatch_size=4, microbatches=microbatches)
    problem = Problem(graph=graph, cluster=local_cluster(2), objective=objective)
    plan: Plan = replace(solve(problem, "uniform").plan, schedule=schedule)
    if microbatches == 4:  # two replicas, each with half of every parameter
        whole = Stage(devices=((0,), (1,)), shard=Shard.PARAMETERS)
        plan = replace(plan, stages=(whole,), stage_of=np.zeros(len(graph), np.int32))
    workload = model_workload(Captures(source, origin), problem, plan)
    options = RankOptions(
        steps=5,
        recipe=Recipe(optimizer="adam", learning_rate=0.01),
        evaluation=Evaluation(every=2, batches=3),
    )
    news: list[StepNews] = []
    run = run_forked(
        make_task(problem, plan, workload),
        workload,
        options=options,
        on_step=lambda _, step: news.append(step),
    )
    assert sorted(run.held_out) == [1, 3, 4]  # every second step, and the last
    assert {step.step for step in news if step.held_out is not None} == {1, 3, 4}
    assert len(run.step_s) == 5
    model = network(norm)
    model.load_state_dict(dict(run.result.state), strict=True)
    model.eval()
    losses = []
    for turn in range(3 * microbatches):  # three batches
        batch = example(4, -1 - turn)
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(*batch.args), batch.labels)))
    assert run.held_out[4] == pytest.approx(sum(losses) / len(losses), abs=1e-12)
