"""``auto`` on mixed problems with tight memory: how good in two seconds, of how many candidates.

Twenty problems (``_tight_problems``), 30 to 1,000 ops on 6 to 24 devices of three types behind
three levels of links. Seconds are CPU seconds of a process that has its kernels loaded. Measured:

* the value after 2 seconds against that after 30, and the gap of the latter to the bound;
* candidates that the search of 2 seconds measures, per CPU second, against those of the version
  that lowered and simulated every candidate (recorded once, ``BEFORE_PER_S``);
* on one problem each, the same candidates by both evaluators in this run: the whole Program, and
  the condensed one.
"""

import statistics
import time

# The clock of a search is this process's CPU time: other processes must not change its answers.
time.monotonic = time.process_time

from _harness import Measured, cpu_s, run_benchmark  # noqa: E402 (after the clock)
from _tight_problems import problems  # noqa: E402

from partita.core.problem import Problem  # noqa: E402
from partita.cost.condensed import CondensedModel  # noqa: E402
from partita.cost.judge import judge_candidate  # noqa: E402
from partita.planners.auto.coarse import working_problem  # noqa: E402
from partita.planners.auto.estimate import Estimator  # noqa: E402
from partita.planners.auto.frame import frame_of  # noqa: E402
from partita.planners.auto.moves import Position, recompute, shift  # noqa: E402
from partita.planners.auto.planner import plan_auto  # noqa: E402
from partita.planners.auto.starts import likely_starts  # noqa: E402
from partita.planners.effort import Effort  # noqa: E402

SHORT_S, LONG_S = 2.0, 30.0
BEFORE_PER_S = {
    "tight00": 38.2,
    "tight01": 33.0,
    "tight02": 5.5,
    "tight03": 7.2,
    "tight04": 27.8,
    "tight05": 7.2,
    "tight06": 5.3,
    "tight07": 8.8,
    "tight08": 7.8,
    "tight09": 19.4,
    "tight10": 14.2,
    "tight11": 4.2,
    "tight12": 7.0,
    "tight13": 15.2,
    "tight14": 32.0,
    "tight15": 24.4,
    "tight16": 30.4,
    "tight17": 18.5,
    "tight18": 6.2,
    "tight19": 14.0,
}
"""Candidates per CPU second of the version before, within the same two seconds."""
MEDIAN_LOSS, WORST_LOSS, MEDIAN_GAP, SPEED_UP = 0.03, 0.08, 0.30, 30.0


def measure() -> Measured:
    """Return the figures of all problems, and what is missed."""
    plan_auto(problems()[12][1], iterations=60)
    losses, gaps, ratios, evaluators = [], [], [], []
    for name, problem in problems():
        begin = time.process_time()
        short = plan_auto(problem, time_limit=SHORT_S)
        spent_s = time.process_time() - begin
        long = plan_auto(problem, time_limit=LONG_S)
        best = min(short.value, long.value)
        losses.append(short.value / best - 1)
        gaps.append(best / long.lower_bound - 1)
        rate = short.stats["measured"] / spent_s
        ratios.append(rate / BEFORE_PER_S.get(name, rate))
        evaluators.append(_evaluator_ratio(problem))
        print(
            f"{name} {problem.graph.name:14} {len(problem.cluster):2} devices: "
            f"{short.value * 1e3:9.2f} ms, {LONG_S:g} s {losses[-1]:+6.1%}, "
            f"gap {gaps[-1]:6.1%}, {rate:6.0f} candidates/s ({ratios[-1]:.0f} times; "
            f"evaluator {evaluators[-1]:.0f} times), {spent_s:.1f} CPU s",
            flush=True,
        )
    figures = {
        "median_loss": statistics.median(losses),
        "worst_loss": max(losses),
        "median_gap": statistics.median(gaps),
        "median_speed_up": statistics.median(ratios),
        "median_evaluator_speed_up": statistics.median(evaluators),
    }
    return figures, _missed(figures)


def _evaluator_ratio(problem: Problem) -> float:
    """Return how many times faster moves around a start are measured condensed."""
    frame = frame_of(working_problem(problem).work)
    estimator = Estimator(frame)
    start = likely_starts(frame, estimator, Effort(time_limit=0.5))[0]
    position = Position(frame, estimator, start, estimator.estimate(start).load)
    near = [start, *shift(position), *recompute(position)][:40]
    model = CondensedModel(frame.problem, frame.units.node_of, frame.num_units)
    plans = [sketch.plan(frame.problem, frame.units) for sketch in near[:4]]
    quick = cpu_s(lambda: [model.measure(sketch.candidate) for sketch in near], repeats=2)
    whole = cpu_s(lambda: [judge_candidate(frame.problem, plan) for plan in plans], repeats=2)
    return (whole / len(plans)) / (quick / len(near))


def _missed(figures: dict[str, float]) -> list[str]:
    limits = (
        ("median_loss", MEDIAN_LOSS),
        ("worst_loss", WORST_LOSS),
        ("median_gap", MEDIAN_GAP),
    )
    missed = [
        f"{name} is {figures[name]:.1%}, at most {most:.0%} expected"
        for name, most in limits
        if figures[name] > most
    ]
    if figures["median_speed_up"] < SPEED_UP:
        missed.append(f"{figures['median_speed_up']:.1f} times the candidates, {SPEED_UP:g} wanted")
    return missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
