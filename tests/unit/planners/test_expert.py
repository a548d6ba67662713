"""Encoder-decoder models placed by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import Graph, Labels
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.cost.judge import measure
from partita.cost.proof import check
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.expert import plan_expert
from partita.planners.table import solve
from partita.testing.builders import flat_cluster, graph_of


def labels_of(values: Sequence[str]) -> Labels:
    names = tuple(dict.fromkeys(value for value in values if value))
    return Labels(names=names, of=[names.index(value) if value else -1 for value in values])


def graph_with(
    modules: Sequence[str], edges: Sequence[tuple[int, int]], types: Sequence[str] = ()
) -> Graph:
    """Return a graph whose op i belongs to ``modules[i]`` and is of ``types[i]``."""
    graph = graph_of(len(modules), edges)
    ops = replace(graph.ops, modules=labels_of(modules))
    if types:
        ops = replace(ops, types=labels_of(types))
    return replace(graph, ops=ops)


def transformer() -> Graph:
    """Return a source mask, an encoder, a target mask, a decoder and an output."""
    modules = ["", "encoder.embedding", "encoder.layers.0", "encoder.layers.1"]
    modules += ["", "decoder.embedding", "decoder.layers.0", "decoder.layers.1", "projection", ""]
    edges = [(0, 2), (1, 2), (2, 3), (0, 3), (4, 6), (5, 6), (3, 6), (0, 6), (6, 7), (3, 7)]
    return graph_with(modules, [*edges, (7, 8), (8, 9)])


def translator() -> Graph:
    """Return GNMT in small: the decoder calls the encoder's embedding once more."""
    modules = ["encoder.embedding", "encoder.dropout", "encoder.first", "encoder.second"]
    modules += ["encoder.others.0", "encoder", "encoder.embedding", "decoder.first"]
    modules += ["decoder.attention", "decoder.others.0", "decoder.others.1", "classifier"]
    types = ["embedding", "dropout", "lstm", "lstm", "lstm", "add", "embedding", "lstm"]
    types += ["bmm", "LSTM", "LSTM", "linear"]
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (3, 5), (6, 7), (7, 8), (5, 8)]
    return graph_with(modules, [*edges, (8, 9), (7, 9), (9, 10), (8, 10), (10, 11)], types)


def problem_of(graph: Graph, devices: int = 2, **objective: object) -> Problem:
    return Problem(
        graph=graph,
        cluster=flat_cluster(devices),
        objective=Objective(**{"microbatches": 4, **objective}),
    )


def test_a_transformer_has_its_encoder_on_one_device_and_the_rest_on_the_other():
    solution = plan_expert(problem_of(transformer(), 3))
    assert solution.plan.device_of.tolist() == [0] * 4 + [1] * 6
    assert len(solution.plan.stages) == 2
    assert solution.plan.schedule is Schedule.ONE_F_ONE_B
    assert solution.plan.devices == solution.problem.cluster.device_names[:2]


def test_stacks_may_lie_inside_of_another_module():
    graph = transformer()
    names = tuple(f"model.{name}" for name in graph.ops.modules.names)
    inside = replace(graph, ops=replace(graph.ops, modules=replace(graph.ops.modules, names=names)))
    assert plan_expert(problem_of(inside)).plan.device_of.tolist() == [0] * 4 + [1] * 6


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (2, [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
        (3, [0, 0, 0, 1, 2, 2, 0, 0, 0, 1, 2, 2]),
        (8, [0, 0, 0, 1, 2, 2, 0, 0, 0, 1, 2, 2]),
    ],
)
def test_recurrent_layers_go_round_the_devices_in_both_stacks(devices, expected):
    solution = plan_expert(problem_of(translator(), devices))
    assert solution.plan.device_of.tolist() == expected
    assert solution.plan.schedule is Schedule.GPIPE


def test_ops_that_must_share_a_device_join_the_layer_of_the_first():
    graph = translator()
    together = np.full(len(graph), -1)
    together[[3, 10]] = 0
    graph = replace(graph, ops=replace(graph.ops, colocation=together))
    plan = plan_expert(problem_of(graph, 3)).plan
    assert plan.device_of[3] == plan.device_of[10] == 1


@pytest.mark.parametrize("make", [transformer, translator])
@pytest.mark.parametrize("mode", Mode)
def test_a_plan_is_complete_and_its_value_is_that_of_the_cost_model(make, mode):
    problem = problem_of(make(), 3, mode=mode)
    solution = plan_expert(problem)
    check(problem, solution.plan)
    assert solution.value == measure(problem, solution.plan).value
    assert solution.lower_bound <= solution.value
    assert solve(problem, "expert") == solution
    assert solution.planner == "expert"


def test_a_schedule_that_is_asked_for_is_kept():
    for make in (transformer, translator):
        problem = problem_of(make(), 2, schedule=Schedule.GPIPE)
        assert plan_expert(problem).plan.schedule is Schedule.GPIPE


@pytest.mark.parametrize(
    "modules", [["encoder.0", "encoder.1", "head"], ["", "", ""], ["blocks.0", "blocks.1", "head"]]
)
def test_other_models_are_refused(modules):
    graph = graph_with(modules, [(0, 1), (1, 2)])
    with pytest.raises(InvalidInputError, match=r"models.*encoder"):
        plan_expert(problem_of(graph))


def test_a_graph_without_modules_is_refused():
    with pytest.raises(InvalidInputError, match=r"models.*encoder"):
        plan_expert(problem_of(graph_of(3, [(0, 1), (1, 2)])))


def test_an_encoder_that_reads_the_decoder_is_refused():
    graph = graph_with(["decoder.0", "encoder.0", "encoder.1"], [(0, 1), (1, 2)])
    with pytest.raises(InvalidInputError, match=r"encoder.*'op0'"):
        plan_expert(problem_of(graph))


def test_one_device_is_refused():
    with pytest.raises(InvalidInputError, match=r"2 devices.*1"):
        plan_expert(problem_of(transformer(), 1))


def test_a_model_that_does_not_fit_is_infeasible():
    graph = transformer()
    graph = replace(graph, ops=replace(graph.ops, saved_bytes=np.full(len(graph), 1e15)))
    problem = replace(problem_of(graph), cluster=flat_cluster(2, memory_bytes=1e9))
    with pytest.raises(InfeasibleError, match="GB"):
        plan_expert(problem)
