"""Layers of published partitions on captured models."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from partita.capture.capture import capture
from partita.capture.setting import Example
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.models.zoo import build_model, example_inputs, layers_of, loss_of
from partita.planners.custom import plan_custom
from partita.planners.merak import plan_uniform_transformer
from partita.profiler.layers import label_layers

PUBLISHED = [
    ("bert-huge-uncased", 26, [0, 8, 14, 20, 26]),
    ("bloom-3b", 32, [0, 10, 18, 26, 32]),
    ("gpt3-xl", 27, [0, 8, 14, 21, 27]),
    ("t5-3b", 74, [0, 16, 33, 53, 74]),
    ("wide-resnet101_8", 34, [0, 7, 16, 25, 34]),
    ("bloom-3b", 32, [0, 6, 10, 14, 18, 22, 26, 30, 32]),
    ("t5-3b", 74, [0, 9, 16, 24, 33, 43, 53, 63, 74]),
    ("wide-resnet101_8", 34, [0, 4, 9, 13, 17, 21, 25, 30, 34]),
]
UNIFORM = [
    ("bert-huge-uncased", 26, [0, 4, 7, 10, 13, 16, 19, 22]),
    ("gpt3-2.7b", 35, [0, 6, 10, 14, 18, 22, 26, 30]),
    ("t5-3b", 74, [0, 7, 13, 19, 25, 37, 49, 61]),
]


@cache
def labelled(name: str) -> Graph:
    model = build_model(name, device="meta")
    batch = example_inputs(name, 2, device="meta")
    example = Example(args=batch.args, kwargs=batch.kwargs, labels=batch.labels, batch_size=2)
    captured = capture(model, example, loss=loss_of(name), name=name)
    return label_layers(captured.graph, layers_of(name, model))


def problem_of(graph: Graph, count: int) -> Problem:
    cluster = Cluster(
        devices=[Device(name=f"host0/gpu{index}") for index in range(count)],
        levels=(Level(name="host", group_of=np.zeros(count), bandwidth_bytes_per_s=1e11),),
    )
    return Problem(graph=graph, cluster=cluster)


def first_layers(graph: Graph, stage_of: np.ndarray) -> list[int]:
    layer, stages = graph.ops.layers.of, np.asarray(stage_of)
    return [int(layer[stages == stage].min()) for stage in range(stages.max() + 1)]


@pytest.mark.parametrize(("name", "count", "boundaries"), PUBLISHED)
def test_published_boundaries_cut_the_full_model(
    name: str, count: int, boundaries: list[int]
) -> None:
    graph = labelled(name)
    assert len(graph.ops.layers.names) == count
    plan = plan_custom(problem_of(graph, len(boundaries) - 1), boundaries=boundaries).plan
    assert first_layers(graph, plan.stage_of) == boundaries[:-1]


@pytest.mark.parametrize(("name", "count", "starts"), UNIFORM)
def test_uniform_transformer_finds_the_blocks(name: str, count: int, starts: list[int]) -> None:
    graph = labelled(name)
    assert len(graph.ops.layers.names) == count
    plan = plan_uniform_transformer(problem_of(graph, 8), stages=8).plan
    assert first_layers(graph, plan.stage_of) == starts


def test_ops_outside_of_layers_follow_the_op_before() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        graph = capture(model, Example(args=(torch.zeros(2, 4),))).graph
    found = label_layers(graph, [("a", ("0",)), ("b", ("2",))])
    assert found.ops.layers.of.tolist() == [0, 0, 1]
    assert label_layers(graph, []) is graph


def test_a_layer_without_ops_is_refused_by_name() -> None:
    with torch.device("meta"):
        graph = capture(nn.Sequential(nn.Linear(4, 4)), Example(args=(torch.zeros(2, 4),))).graph
    with pytest.raises(InvalidInputError, match="'b' holds no op"):
        label_layers(graph, [("a", ("0",)), ("b", ("7",))])
