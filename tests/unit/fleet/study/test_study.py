"""Studies of a fleet: ranking, loads, windows, the power cap, panels."""

import math

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.errors import InvalidInputError
from partita.fleet.policies.resources import servers_of
from partita.fleet.simulate.options import Rules
from partita.fleet.study.panels import panels_of
from partita.fleet.study.study import Question, study
from partita.fleet.study.traces import TraceOptions, drawn_trace
from partita.flows.fleet.examples import example_sensitivities
from partita.flows.fleet.power import with_frontiers
from partita.report.charts import panels_chart, render


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue()


@pytest.fixture(scope="module")
def trace(catalogue):
    options = TraceOptions(jobs=40, load=6.0, short=True, seed=3)
    return drawn_trace(example_sensitivities(catalogue), options, name="drawn")


@pytest.fixture(scope="module")
def servers(catalogue):
    return servers_of(read_shorthand("1x8xv100", catalogue))


def asked(trace, servers, *policies, **rest):
    return Question(
        trace=trace, servers=servers, policies=policies, rules=rest.pop("rules", Rules()), **rest
    )


def test_runs_are_ranked_by_mean_completion_time(trace, servers):
    found = study(asked(trace, servers, "fifo:fair", "fifo:tune", "srtf:joint"))
    means = [run.metrics.mean_s for run in found.runs]
    assert means == sorted(means)
    assert {run.policy for run in found.runs} == {"fifo:fair", "fifo:tune", "srtf:joint"}
    assert found.runs[0].to_json()["load_per_hour"] is None
    assert sum(each.jobs for each in found.runs[0].kinds.values()) == 40


def test_a_higher_load_waits_longer_with_the_same_jobs(trace, servers):
    found = study(asked(trace, servers, "fifo:tune", loads=(1.0, 12.0)))
    low, high = found.runs
    assert (low.load, high.load) == (1.0, 12.0)
    assert low.metrics.queueing_s < high.metrics.queueing_s
    assert np.array_equal(low.trace.iterations, high.trace.iterations)


def test_seeds_are_played_each_and_put_together(catalogue, trace, servers):
    options = TraceOptions(jobs=40, load=6.0, short=True, seed=4)
    other = drawn_trace(example_sensitivities(catalogue), options, name="other")
    question = asked(
        trace, servers, "fifo:fair", "fifo:tune", loads=(2.0, 12.0), seed=3, further={4: other}
    )
    found = study(question)
    assert [(run.load, run.seed) for run in found.runs] == [
        *[(2.0, 3)] * 2,
        *[(2.0, 4)] * 2,
        *[(12.0, 3)] * 2,
        *[(12.0, 4)] * 2,
    ]
    # Each is what it is alone.
    alone = study(asked(other, servers, "fifo:tune", loads=(12.0,), seed=4)).runs[0]
    same = next(
        run for run in found.runs if (run.policy, run.load, run.seed) == ("fifo:tune", 12.0, 4)
    )
    assert same.metrics == alone.metrics
    over = found.over_seeds
    assert [each.load for each in over] == [2.0, 2.0, 12.0, 12.0]
    best = over[2]
    of_best = [run for run in found.runs if (run.title, run.load) == (best.title, 12.0)]
    assert best.means_s == {run.seed: run.metrics.mean_s for run in of_best}
    assert best.mean_s == pytest.approx(sum(best.means_s.values()) / 2)
    low, high = sorted(best.means_s.values())
    assert best.deviation_s == pytest.approx((high - low) / math.sqrt(2))
    assert sum(each.wins for each in over[2:]) >= 2
    assert study(asked(trace, servers, "fifo:tune")).over_seeds == ()


def test_a_window_counts_its_jobs_alone(trace, servers):
    found = study(asked(trace, servers, "fifo:tune", window=(10, 19)))
    assert found.runs[0].metrics.jobs == 10
    assert sum(each.jobs for each in found.runs[0].kinds.values()) == 10
    with pytest.raises(InvalidInputError, match="holds no job"):
        asked(trace, servers, "fifo:tune", window=(100, 200))


def test_both_rules_leave_out_what_the_released_code_lacks(trace, servers):
    found = study(asked(trace, servers, "fifo:tune", "fifo:joint", simulators=("ours", "released")))
    titles = sorted(run.title for run in found.runs)
    assert titles == ["fifo:joint", "fifo:tune", "fifo:tune as released"]
    released = next(run for run in found.runs if run.simulator.name == "released")
    assert released.to_json()["preemptions"] is None


def test_the_power_cap_holds_and_loses_less_than_one_limit_for_all(trace, servers):
    for cap_w in (1500.0, 1900.0):
        found = study(asked(trace, servers, "fifo:tune", rules=Rules(power_cap_w=cap_w)))
        (each,) = found.capped
        assert each.free_w > cap_w
        assert max(each.peak_w, each.equal_peak_w) <= cap_w * (1 + 1e-9)
        assert 0 < each.lost < each.equal_lost
        assert 0 < each.held < 1


def test_a_policy_that_stands_twice_is_refused(trace, servers):
    with pytest.raises(InvalidInputError, match="stands twice"):
        asked(trace, servers, "fifo:tune", "fifo:tune")


def test_frontiers_are_added_where_none_is(catalogue, trace):
    gpu = catalogue.device_type("a100")
    bare = with_frontiers(trace, gpu)
    assert bare.sensitivities == trace.sensitivities
    for part in trace.sensitivities:
        assert part.frontier_speed[0] == 1
        assert (np.diff(part.frontier_speed) < 0).all()
        assert (np.diff(part.frontier_w) < 0).all()


def test_example_classes_have_speed_1_at_the_usual_share(catalogue):
    for part in example_sensitivities(catalogue):
        row = np.flatnonzero((part.cpus == 3) & (part.memory_bytes == 62.5e9))
        assert part.speed[row] == pytest.approx(1)
        order = np.lexsort((part.cpus, part.memory_bytes))
        steps = np.diff(part.speed[order].reshape(-1, len(np.unique(part.cpus))), axis=1)
        assert (steps >= 0).all(), part.name


def test_panels_show_loads_only_where_there_are_several(trace, servers):
    one = panels_of(study(asked(trace, servers, "fifo:fair", "fifo:tune")).runs)
    assert [panel.key for panel in one] == ["cdf", "queue", "gpus", "cpus", "memory"]
    several = panels_of(study(asked(trace, servers, "fifo:tune", loads=(2.0, 4.0))).runs)
    assert several[0].key == "loads"
    assert several[0].lines[0].x.tolist() == [2.0, 4.0]
    assert "at 4 jobs an hour" in several[1].title
    cdf = one[0].lines[0]
    assert cdf.y[-1] == 1
    assert (np.diff(cdf.x) >= 0).all()


def test_the_picture_names_each_policy(trace, servers):
    found = study(asked(trace, servers, "fifo:fair", "fifo:tune"))
    text = render(lambda: panels_chart(panels_of(found.runs), title="a < b"), "a.svg").decode(
        "utf-8"
    )
    assert text.count(">fifo:tune<") == 5
    assert "a &lt; b" in text
    assert not math.isnan(found.runs[0].use.gpus)
