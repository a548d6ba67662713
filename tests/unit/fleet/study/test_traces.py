"""Traces on order, and curves by the planner."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import example
from partita.catalogue.shorthand import read_shorthand
from partita.core.fleet import trace_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.metrics import metrics_of
from partita.fleet.policies.resources import servers_of
from partita.fleet.simulate.table import simulate_trace
from partita.fleet.study.generated import INSENSITIVE
from partita.fleet.study.traces import (
    TraceOptions,
    changed_trace,
    drawn_trace,
    logged_trace,
    summary_of,
)
from partita.flows.fleet.curve import planner_curve
from partita.flows.fleet.examples import example_sensitivities
from partita.planners.table import get_planner

MODELS = example_sensitivities(load_catalogue())


def drawn(**options):
    return drawn_trace(MODELS, TraceOptions(**{"jobs": 50, "seed": 1, **options}), name="drawn")


def test_the_same_seed_draws_the_same_trace():
    first, second, other = drawn(), drawn(), drawn(seed=2)
    assert np.array_equal(first.iterations, second.iterations)
    assert not np.array_equal(first.iterations, other.iterations)


def test_static_jobs_are_there_at_once_and_have_no_load():
    trace = drawn(static=True)
    assert trace.start_s == 1
    assert np.isnan(summary_of(trace).per_hour)
    with pytest.raises(InvalidInputError, match="no load"):
        TraceOptions(static=True, load=3.0)


def test_jobs_of_minutes_have_no_rate_by_the_hour():
    few = drawn(jobs=3, load=60.0)
    hours = summary_of(drawn(jobs=100, load=9.0)).line()
    assert summary_of(few).span_s < 3600
    assert "all arrive within" in summary_of(few).line()
    assert "jobs an hour" not in summary_of(few).line()
    assert "jobs an hour for" in hours


def test_classes_and_gpu_demands_keep_their_shares():
    trace = drawn(jobs=100, split={"image": 1.0, "speech": 1.0}, gpu_shares={2: 1.0, 4: 0.0})
    found = summary_of(trace)
    jobs = {kind: sum(row.jobs for row in found.models if row.kind == kind) for kind in ("image",)}
    assert jobs["image"] == 50
    assert found.gpu_demands == {2: 100}


def test_a_source_is_cut_to_its_first_jobs_and_gets_new_arrivals():
    trace = drawn()
    cut = changed_trace(trace, TraceOptions(jobs=10))
    assert len(cut) == 10
    assert cut.arrival_s.max() <= np.sort(trace.arrival_s)[9]
    faster = changed_trace(trace, TraceOptions(load=100.0))
    assert faster.arrival_s.max() < trace.arrival_s.max()
    at_once = changed_trace(trace, TraceOptions(static=True))
    assert at_once.arrival_s.max() < 0.1


def test_tenants_are_drawn_by_their_shares():
    trace = drawn(tenants={"a": 1.0, "b": 0.0})
    assert summary_of(trace).tenants == {"a": 50, "b": 0}


def test_a_log_keeps_its_arrivals_durations_and_gpus():
    rows = [(0.0, 7200.0, 1), (60.0, 36000.0, 4), (120.0, 60.0, 1)]
    trace, notes = logged_trace(rows, MODELS, TraceOptions(), name="log")
    assert notes == ()
    assert trace.arrival_s.tolist() == [0, 60, 120]
    assert trace.gpus.tolist() == [1, 4, 1]
    assert trace.fair_s == pytest.approx([7200, 36000, 60], rel=1e-2)
    single, _ = logged_trace(rows, MODELS, TraceOptions(multi_gpu=False), name="log")
    assert single.gpus.tolist() == [1, 1, 1]
    published, notes = logged_trace(rows, MODELS, TraceOptions(published_filter=True), name="log")
    assert published.arrival_s.tolist() == [0, 60]
    assert notes == ("1 shorter than 32 or longer than 10,000 minutes left out",)


def test_a_log_that_names_models_is_taken_at_its_word():
    rows = [(0.0, 600.0, 1), (60.0, 600.0, 1), (120.0, 600.0, 1), (180.0, 600.0, 1)]
    last, other = MODELS[-1].name, "nobody-measured-it"
    trace, _ = logged_trace(rows, MODELS, TraceOptions(), name="log", named=[last, other, last, ""])
    names = [trace.sensitivities[i].name for i in trace.sensitivity]
    assert [names[0], names[2]] == [last, last]
    assert names[1] == INSENSITIVE.name
    assert names[3] in {part.name for part in MODELS}  # dealt, as the log does not say it


def test_jobs_without_points_by_number_of_gpus_cannot_be_elastic():
    with pytest.raises(InvalidInputError, match="partita fleet curve"):
        drawn(elastic=(1, 8))


@pytest.fixture(scope="module")
def curve():
    problem, catalogue = example("gpt-small"), load_catalogue()
    problems = {
        (kind, count): _on(problem, read_shorthand(f"{count}x{kind}", catalogue))
        for kind, count in (("a100", 1), ("a100", 2), ("a100", 4), ("v100", 4))
    }
    return planner_curve(problems, get_planner("uniform"), name="gpt", kind="language")


def _on(problem, cluster):
    return replace(problem, cluster=cluster)


def test_a_curve_has_speed_1_first_and_never_falls(curve):
    part = curve.sensitivity
    assert part.speed[0] == 1
    assert part.gpu_types == ("a100", "v100")
    assert part.gpus.tolist() == [1, 2, 4, 4]
    assert (np.diff(part.speed[:3]) >= 0).all()
    assert part.speed[3] < part.speed[2]
    assert all(point.samples_per_s > 0 for point in curve.points)


def test_a_curve_carries_the_frontier_of_its_first_plan(curve):
    part = curve.sensitivity
    assert curve.has_frontier
    assert part.frontier_speed.max() == 1
    assert 0 < part.frontier_w.min() < part.frontier_w.max() <= 400


def test_elastic_jobs_on_a_planner_curve_end_sooner_under_joint(curve):
    servers = servers_of(read_shorthand("1x8xa100", load_catalogue()))
    options = TraceOptions(jobs=20, load=4.0, short=True, gpu_shares={2: 1.0})
    fixed = drawn_trace([curve.sensitivity], options, name="fixed")
    elastic = changed_trace(fixed, TraceOptions(elastic=(1, 4)))
    assert summary_of(elastic).elastic == 20
    means = [
        metrics_of(simulate_trace(trace, servers, "fifo:joint")).mean_s
        for trace in (fixed, elastic)
    ]
    assert means[1] < means[0]
    assert len(trace_of([elastic.job(0)])) == 1


def test_a_model_that_fits_nowhere_says_so():
    problem = example("gpt-small")

    def refuse(_):
        raise InfeasibleError("too large")

    with pytest.raises(InfeasibleError, match="these GPUs"):
        planner_curve({("a100", 1): problem}, refuse, name="gpt")
