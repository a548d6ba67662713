"""The table of objectives."""

import numpy as np
import pytest

from partita.core.metrics import METRICS
from partita.core.placement import placement_plan
from partita.core.problem import Metric, Problem
from partita.errors import InvalidInputError
from partita.objectives.value import PUBLISHED, Value, evaluate_published, why_not

SIMULATED = {Metric.THROUGHPUT, Metric.LATENCY, Metric.ENERGY, Metric.COST}


def test_every_published_metric_has_a_function_and_a_reason():
    assert set(PUBLISHED) == set(Metric) - SIMULATED
    assert set(METRICS) == set(Metric)
    assert all(metric.row.load("why_not") is not None for metric in PUBLISHED)


def test_all_that_apply_to_a_pipeline_are_returned(make_graph, flat, pipeline):
    graph = make_graph([1, 2], [(0, 1)], sizes=[4, 0])
    cluster = flat(2, 4.0)
    problem = Problem(graph=graph, cluster=cluster)
    single = evaluate_published(problem, pipeline(graph, cluster, [0, 1], [["d0"], ["d1"]]))
    assert {metric: value.value for metric, value in single.items()} == pytest.approx(
        {
            Metric.PIPEDREAM: 2.0,
            Metric.PIPEDREAM_REPAIRED: 2.0,
            Metric.MAX_LOAD: 3.0,
            Metric.SINGLE_SAMPLE_LATENCY: 1 + 1 + 1 + 2,
            Metric.MAKESPAN_PARALLEL: 4.0,
            Metric.MAKESPAN_SEQUENTIAL: 4.0,
        }
    )
    assert all(value.metric is metric for metric, value in single.items())
    replicated = evaluate_published(problem, pipeline(graph, cluster, [0, 0], [["d0", "d1"]]))
    assert set(replicated) == {Metric.PIPEDREAM, Metric.PIPEDREAM_REPAIRED}


def test_a_plan_for_another_graph_is_refused(make_graph, flat):
    cluster = flat(1)
    plan = placement_plan(make_graph([1, 1], [(0, 1)]), ["d0"], np.array([0, 0]))
    with pytest.raises(InvalidInputError, match=r"every.*placed"):
        evaluate_published(Problem(graph=make_graph([1], []), cluster=cluster), plan)


def test_simulated_metrics_are_not_published_ones(make_graph, flat):
    graph = make_graph([1], [])
    cluster = flat(1)
    plan = placement_plan(graph, ["d0"], np.array([0]))
    problem = Problem(graph=graph, cluster=cluster)
    assert why_not(Metric.THROUGHPUT, problem, plan) == "it is not a published objective"


def test_a_value_is_not_negative_and_its_details_cannot_change():
    with pytest.raises(InvalidInputError, match="piper is nan"):
        Value(metric=Metric.PIPER, value=float("nan"))
    value = Value(metric=Metric.PIPER, value=1.0, details={"a": 1})
    with pytest.raises(TypeError):
        value.details["a"] = 2
    assert value.feasible
    assert not Value(metric=Metric.PIPER, value=1.0, errors=("too big",)).feasible


def test_many_split_classes_are_counted_not_listed(make_graph, flat):
    count = 16
    graph = make_graph(
        [1] * count,
        [(i, i + 1) for i in range(count - 1)],
        colocation=[i // 2 for i in range(count)],
    )
    cluster = flat(2, 1.0)
    plan = placement_plan(graph, cluster.device_names, np.arange(count) % 2)
    errors = evaluate_published(Problem(graph=graph, cluster=cluster), plan)[Metric.MAX_LOAD].errors
    assert len(errors) == 6
    assert errors[-1] == "3 more colocation classes are split"
