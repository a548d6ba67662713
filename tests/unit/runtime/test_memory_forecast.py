"""What plans say of memory against what is live on real ranks, where parts of a stage recompute."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Objective, Problem, Schedule
from partita.cost.memory import peak_memory
from partita.profiler.measure.measure import ProfileOptions, measure
from partita.program.lower import lower
from partita.runtime.executor import make_task, run_forked
from partita.runtime.rank import RankOptions
from partita.runtime.rank_capture import Capture
from partita.runtime.training.recipe import Recipe
from partita.runtime.workload import model_workload
from partita.testing.builders import flat_cluster

ROWS, WIDTH, BLOCKS, MICROBATCHES = 4096, 32, 6, 4


@pytest.fixture(scope="module")
def captures() -> Captures:
    torch.manual_seed(0)
    # ``relu`` saves its own result, which the product after it saves, too.
    widths = [2] + [WIDTH] * BLOCKS
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    model = nn.Sequential(*(layer for pair in layers for layer in pair))
    example = Example(args=(torch.randn(ROWS, 2),), labels=torch.randn(ROWS, WIDTH))
    source = ModelSource(
        name="net", model=model, example=lambda *_: example, loss=nn.functional.mse_loss
    )
    return Captures(source, ModelOrigin(text="net"))


@pytest.fixture(scope="module")
def graph(captures: Captures) -> Graph:
    source, captured = captures.source, captures.at(ROWS)
    options = ProfileOptions(rounds=1, warmup=0)
    found = measure(captured, source.example(ROWS, 0), loss=source.loss, options=options)
    return captures.origin.recorded_in(found.graph)


@pytest.mark.parametrize("kind", ["relu", "linear"])
@pytest.mark.parametrize("groups", [[[0]], [[0], [1]]], ids=["one stage", "two stages"])
def test_peaks_of_ranks_are_forecast_where_some_ops_recompute(
    captures: Captures, graph: Graph, groups: list[list[int]], kind: str
) -> None:
    cluster = flat_cluster(len(groups))
    problem = Problem(
        graph=graph, cluster=cluster, objective=Objective(optimizer_bytes_per_element=0.0)
    )
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        # Cut behind a ``relu``, whose result its stage saves.
        stage_of=(np.arange(len(graph)) >= BLOCKS) * (len(groups) - 1),
        stages=tuple(Stage(devices=tuple((d,) for d in group)) for group in groups),
        schedule=Schedule.GPIPE,
        microbatch_sizes=np.full(MICROBATCHES, ROWS),
        recompute=np.array([op.kind == kind for op in captures.at(ROWS).ops]),
    )
    assert 0 < plan.recompute.sum() < len(graph)
    forecast = peak_memory(problem, plan, lower(problem, plan))
    workload = model_workload(captures, problem, plan)
    options = RankOptions(
        steps=2, recipe=Recipe(optimizer="sgd"), keep_results=False, capture=Capture.MEMORY
    )
    run = run_forked(make_task(problem, plan, workload), workload, options=options)
    for name, expected in zip(cluster.device_names, forecast.tolist(), strict=True):
        assert run.memory[name].peak_bytes / expected == pytest.approx(1, abs=0.15), name
