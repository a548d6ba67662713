"""Ranks that fall behind, found by what they compute per step."""

from collections.abc import Sequence

import pytest

from partita.core.metrics import Metric
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.program.lower import lower
from partita.runtime.emulation.rehearsal import Emulation, emulate_forked, emulated_workload
from partita.runtime.rank import StepNews
from partita.runtime.stragglers import WINDOW, Straggler, StragglerWatch
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def planned(stages: int = 3, forward_s: float = 0.001) -> Solution:
    graph = chain(2 * stages, Figures(forward_s=forward_s, backward_s=forward_s))
    cluster = flat_cluster(stages)
    plan = pipeline(graph, cluster, list(range(stages)), microbatches=2)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def watch_of(solution: Solution) -> StragglerWatch:
    return StragglerWatch(solution, lower(solution.problem, solution.plan))


def played(watch: StragglerWatch, paces: Sequence[float], steps: range) -> list[Straggler]:
    """Let ranks say so many milliseconds of compute in each step; returns what was found."""
    found = []
    for step in steps:
        for rank, pace in enumerate(paces):
            found.append(watch.note(rank, StepNews(step, 0.0, compute_s=pace / 1000)))
    return [straggler for straggler in found if straggler is not None]


def test_a_rank_behind_the_others_is_named_once_with_device_stage_and_factor() -> None:
    watch = watch_of(planned())
    (found,) = played(watch, [8, 20, 8], range(40))
    assert (found.rank, found.device, found.stages) == (1, "d1", (1,))
    assert found.slowdown == pytest.approx(2.5)
    assert watch.factors() == {"d1": pytest.approx(2.5)}
    assert "rank 1 (d1 of host0, stage 1) is a straggler after step" in found.line()
    assert "2.50 times the 8.00 ms" in found.line()


def test_who_is_twice_as_slow_as_predicted_like_all_others_is_no_straggler() -> None:
    assert not played(watch_of(planned()), [16, 17, 16], range(40))


def test_one_slow_step_and_the_first_ones_are_none() -> None:
    watch = watch_of(planned())
    assert not played(watch, [80, 800, 80], range(2))
    assert not played(watch, [8, 8, 8], range(2, 20))
    assert not played(watch, [8, 90, 8], range(20, 21))
    assert not played(watch, [8, 8, 8], range(21, 40))


def test_a_rank_that_gets_slower_is_said_again_and_one_that_keeps_up_again_too() -> None:
    watch = watch_of(planned())
    (first,) = played(watch, [8, 12, 8], range(16))
    (worse,) = played(watch, [8, 24, 8], range(16, 40))
    (over,) = played(watch, [8, 8, 8], range(40, 60))
    assert [round(one.slowdown, 1) for one in (first, worse, over)] == [1.5, 3.0, 1.0]
    assert over.is_over
    assert "keeps up again" in over.line()
    assert not watch.factors()


def test_who_takes_many_times_too_long_but_little_beside_the_longest_is_no_straggler() -> None:
    assert not played(watch_of(planned()), [0.01, 0.01, 0.6], range(40))
    watch = watch_of(planned(forward_s=1e-6))
    watch._expected_s = [0.1, 0.1, 0.001]
    assert not played(watch, [100, 100, 9], range(40))


def test_news_without_times_says_nothing() -> None:
    assert not played(watch_of(planned()), [0, 0, 0], range(2 * WINDOW))


def test_an_emulated_device_that_is_slower_than_planned_is_found_by_its_news() -> None:
    solution = planned(2, 0.004)
    emulation = Emulation(scale=1.0, steps=WINDOW + 4, slow={"d1": 2.0})
    watch, found = watch_of(solution), []
    run = emulate_forked(
        emulated_workload(solution.problem, solution.plan, emulation),
        on_step=lambda rank, news: found.append(watch.note(rank, news)),
    )
    (straggler,) = [one for one in found if one is not None]
    assert (straggler.rank, straggler.device) == (1, "d1")
    assert straggler.slowdown > 1.5
    assert len(run.step_s) == WINDOW + 4
