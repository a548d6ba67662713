"""Whether a model fits: plans that are tried, and the smallest changes that make it fit."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.cluster import Cluster
from partita.core.graph import Graph, Labels
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.flows.fit import FitReport, Question, fit, problem_of, solution_of
from partita.flows.fit_plans import is_hopeless, try_shape
from partita.flows.least_change import Setting
from partita.planners.equal_shapes import Shape, shapes
from partita.testing.builders import Figures, chain, flat_cluster, random_figures


def layered(figures: Figures, num_ops: int = 8) -> Graph:
    """Return a chain whose ops are layers in pairs, with a layer before and after."""
    graph = chain(num_ops + 2, figures)
    of = np.array([0, *[1 + op // 2 for op in range(num_ops)], 1 + num_ops // 2])
    names = tuple(f"layer{index}" for index in range(int(of.max()) + 1))
    return replace(graph, ops=replace(graph.ops, layers=Labels(names=names, of=of)))


def question(
    graph: Graph,
    memory_bytes: float,
    *,
    devices: int = 4,
    size: int = 4,
    batch_size: int | None = None,
    most: int = 6,
    **objective: object,
) -> Question:
    def cluster_at(growth: int) -> Cluster | None:
        if growth > most:
            return None
        return flat_cluster(devices * (1 + growth), memory_bytes=memory_bytes)

    return Question(
        graph_at=lambda _: graph,
        cluster_at=cluster_at,
        objective=Objective(**objective),  # type: ignore[arg-type]
        start=Setting(microbatch_size=size),
        batch_size=batch_size,
    )


def changes(report: FitReport) -> list[tuple[int, bool, Shard, int]]:
    return [
        (c.setting.microbatch_size, c.setting.recompute, c.setting.shard, c.setting.growth)
        for c in report.changes
    ]


WEIGHTY = Figures(parameter_bytes=100.0, batch_size=4)
"""Ten ops of 100 bytes: 4000 bytes with gradients and Adam's state, and nothing saved."""
ACTIVE = Figures(parameter_bytes=1.0, saved_bytes=100.0, tensor_bytes=10.0, batch_size=4)
"""Ten ops that save 100 bytes each of a microbatch of four."""


def test_every_plan_is_tried_and_the_parts_sum_to_the_peak() -> None:
    report = fit(question(layered(ACTIVE), 1e9))
    assert report.fits
    assert not report.changes
    titles = {trial.shape.title for trial in report.trials}
    assert titles == {
        "data parallel, 4 replicas",
        "data parallel, 4 replicas, optimizer sharded",
        "data parallel, 4 replicas, gradients sharded",
        "data parallel, 4 replicas, parameters sharded",
        "2 stages x 2 replicas",
        "3 stages",
    }
    assert report.best.step_s == min(trial.step_s for trial in report.trials)
    for trial in report.trials:
        memory = trial.memory
        assert sum(memory[:7]) == pytest.approx(trial.peaks.peak_bytes)
        assert sum(memory[7:]) == pytest.approx(trial.problem.cluster.memory_bytes[0])
        timeline = simulate(trial.problem, trial.plan)
        assert trial.peaks.peak_bytes == pytest.approx(timeline.peak_bytes)
        assert trial.step_s == timeline.makespan_s
        check(trial.problem, trial.plan)


def test_sharded_data_parallelism_fits_where_copies_do_not() -> None:
    report = fit(question(layered(WEIGHTY), 3000))
    fitting = {
        trial.shape.shard for trial in report.trials if trial.fits and trial.shape.stages == 1
    }
    assert fitting == {Shard.GRADIENTS, Shard.PARAMETERS, Shard.OPTIMIZER}
    (copies,) = [t for t in report.trials if t.shape == Shape(stages=1, replicas=4)]
    assert copies.peaks.peak_bytes.tolist() == [4000] * 4


def test_smaller_microbatches_and_recomputation_are_found_one_by_one() -> None:
    report = fit(question(layered(ACTIVE), 700, devices=1, batch_size=8, most=0))
    assert not report.fits
    # One device: 40 bytes of weights, 1000 saved by four samples.
    assert (2, False, Shard.NONE, 0) in changes(report)
    assert (4, True, Shard.NONE, 0) in changes(report)
    assert all(change.trial.fits for change in report.changes)


def test_the_largest_smaller_microbatch_is_taken() -> None:
    report = fit(question(layered(ACTIVE), 300, devices=1, batch_size=12, most=0))
    assert [size for size, again, *_ in changes(report) if not again] == [1]
    report = fit(question(layered(ACTIVE), 800, devices=1, batch_size=12, most=0))
    assert [size for size, again, *_ in changes(report) if not again] == [3]


def test_the_fewest_more_devices_are_found() -> None:
    report = fit(question(layered(WEIGHTY), 1200, devices=2))
    grown = [c for c in report.changes if c.setting.growth and len(c.words) == 1]
    (change,) = grown
    count = len(change.trial.problem.cluster)
    assert change.trial.fits
    assert change.words == (f"{count} devices instead of 2",)
    fewer = question(layered(WEIGHTY), 1200, devices=2)
    for growth in range(change.setting.growth):
        problem = problem_of(fewer, Setting(microbatch_size=4, growth=growth))
        assert not any(try_shape(problem, shape).fits for shape in shapes(problem))


def test_pairs_are_tried_where_one_change_is_not_enough() -> None:
    report = fit(question(layered(ACTIVE), 200, devices=1, batch_size=4, most=0))
    assert changes(report) == [(2, True, Shard.NONE, 0)]
    assert len(report.changes[0].words) == 2
    assert report.changes[0].trial.fits


def test_nothing_helps_where_one_op_is_too_large() -> None:
    report = fit(question(layered(WEIGHTY), 20, devices=2))
    assert not report.fits
    assert report.changes == ()


def test_a_change_is_tried_with_the_graph_of_its_own_size() -> None:
    asked: list[int] = []
    graph = layered(ACTIVE)

    def graph_at(size: int) -> Graph:
        asked.append(size)
        return replace(
            graph,
            batch_size=size,
            ops=replace(graph.ops, saved_bytes=graph.ops.saved_bytes * size / 4),
        )

    report = fit(replace(question(graph, 700, devices=1, batch_size=8, most=0), graph_at=graph_at))
    (size,) = {c.setting.microbatch_size for c in report.changes if not c.setting.recompute}
    assert size in asked
    assert report.changes[0].trial.problem.graph.batch_size == size


def test_inference_has_no_gradients_and_is_not_sharded() -> None:
    report = fit(question(layered(WEIGHTY), 800, devices=2, mode=Mode.INFERENCE))
    assert report.fits
    assert {trial.shape.shard for trial in report.trials} == {Shard.NONE}
    assert not any(trial.memory.gradients.any() for trial in report.trials)


def test_shapes_that_cannot_share_the_microbatches_are_refused_by_name() -> None:
    report = fit(question(layered(ACTIVE), 1e9, batch_size=8))
    assert any("4 replicas" in refusal for refusal in report.refusals)
    with pytest.raises(InvalidInputError, match=r"into.*4"):
        fit(question(layered(ACTIVE), 1e9, batch_size=10))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_called_hopeless_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    figures = replace(random_figures(12, rng), batch_size=2)
    graph = layered(figures, 10)
    reached = 0
    for memory in (10.0, 100.0, 1000.0, 1e4, 1e5):
        cluster = flat_cluster(4, memory_bytes=memory)
        objective = Objective(microbatches=8, microbatch_size=rng.randint(1, 4))
        problem = Problem(graph=graph, cluster=cluster, objective=objective)
        for shape in shapes(problem):
            if is_hopeless(problem, shape):
                reached += 1
                assert not try_shape(problem, shape).fits
    assert reached


def test_the_report_is_json_and_the_best_plan_a_solution() -> None:
    report = fit(question(layered(WEIGHTY), 1200, devices=2))
    figures = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert figures["fits"] is False
    assert {"change", "batch_size", "trial", "num_devices"} <= set(figures["changes"][0])
    solution = solution_of(fit(question(layered(ACTIVE), 1e9)).best)
    assert solution.value > 0
    assert solution.lower_bound <= solution.value
