"""The share of the peak rate is that of the arithmetic that the costs were computed with."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.sources import SourceOptions, load_source
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.codec import decode, encode
from partita.core.graph import Graph, OpCosts, OpTable, ParameterTable
from partita.core.problem import Mode, Objective, Problem
from partita.core.solution import Solution
from partita.cost.judge import evaluate
from partita.planners.table import get_planner
from partita.profiler.estimate.estimate import estimate

PEAK = 312e12  # of an A100 at bfloat16
ZOO = ("gpt3-small", "resnet50")


def solved(graph: Graph, cluster: str = "2xa100", **objective: object) -> Solution:
    problem = Problem(
        graph=graph,
        cluster=read_shorthand(cluster, load_catalogue()),
        objective=Objective(microbatches=4, **objective),
    )
    return get_planner("uniform")(problem)


def utilisation(graph: Graph, cluster: str = "2xa100", **objective: object) -> float:
    solution = solved(graph, cluster, **objective)
    return evaluate(solution.problem, solution.plan).flop_utilisation


def one_op(flops: float, **costs: object) -> Graph:
    return Graph(
        ops=OpTable(names=("op",), flops=np.array([flops])),
        costs=(OpCosts(device_type="a100", forward_s=np.array([1.0]), **costs),),
        parameters=ParameterTable(
            names=("w",), bytes=np.array([4.0]), use_op=np.array([0]), use_parameter=np.array([0])
        ),
        dtype="bfloat16",
    )


@cache
def captured(name: str, dtype: str = "float32") -> CapturedModel:
    source = load_source(name, SourceOptions(device="meta", dtype=dtype, batch_size=4))
    return capture(source.model, source.example(4), loss=source.loss, name=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_no_arithmetic_of_any_model_beats_the_peak(name: str, dtype: str) -> None:
    for arithmetic in ("", "float32", "tfloat32", "bfloat16", "float16"):
        graph = estimate(captured(name, dtype), "a100", dtype=arithmetic)
        assert graph.dtype == (arithmetic or dtype)
        assert graph.parameters.dtypes[0] == dtype
        assert 0.0 < utilisation(graph) < 1.0
        assert 0.0 < utilisation(graph, mode=Mode.INFERENCE) < 1.0


def test_the_peak_is_that_of_the_arithmetic_and_not_of_the_weights() -> None:
    graph = estimate(captured("gpt3-small"), "a100", dtype="bfloat16")
    solution = solved(graph, "1xa100")
    found = evaluate(solution.problem, solution.plan)
    work = 3 * float(graph.ops.flops.sum()) * solution.plan.samples / graph.batch_size
    assert found.flop_utilisation == pytest.approx(work / found.step_s / PEAK, rel=0.01)


def test_a_document_that_says_the_dtype_of_weights_is_measured_by_the_peak_of_its_costs() -> None:
    graph = estimate(captured("gpt3-small"), "a100", dtype="bfloat16")
    before = decode(encode(replace(graph, dtype="float32")))
    assert isinstance(before, Graph)
    assert utilisation(before) == utilisation(graph)


def test_a_type_without_costs_is_scaled_by_the_peaks_of_one_arithmetic() -> None:
    graph = estimate(captured("gpt3-small"), "a100", dtype="bfloat16")
    modelled, own = solved(graph, "1xh100"), solved(graph, "1xa100")
    assert modelled.value < own.value
    assert utilisation(graph, "1xh100") < 1.0


def test_recomputation_is_not_counted_as_work() -> None:
    plain, again = (
        estimate(captured("gpt3-small"), "a100", recompute=recompute) for recompute in (False, True)
    )
    assert utilisation(again) < utilisation(plain)


@pytest.mark.parametrize(
    ("costs", "trainable", "passes"),
    [
        ({"backward_s": np.array([2.0])}, True, 3),
        ({"backward_s": np.array([2.0]), "backward_input_s": np.array([1.0])}, True, 3),
        ({"backward_s": np.array([1.0]), "backward_input_s": np.array([0.0])}, True, 2),
        ({"backward_s": np.array([1.0]), "backward_input_s": np.array([1.0])}, False, 2),
        ({}, True, 1),
    ],
)
def test_only_gradients_that_are_computed_count(
    costs: dict[str, object], trainable: bool, passes: int
) -> None:
    graph = one_op(PEAK / 10, **costs)
    graph = replace(graph, parameters=replace(graph.parameters, trainable=np.array([trainable])))
    solution = solved(graph, "1xa100")
    found = evaluate(solution.problem, solution.plan)
    assert found.flop_utilisation == pytest.approx(0.4 * passes / found.step_s, rel=1e-6)
