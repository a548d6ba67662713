"""Whatever the plan: its Program is proved, it runs to its end, and takes no less than it must."""

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import LAST_COMPUTE, Kind
from partita.cost.predict import Disturbance, simulate
from partita.cost.proof import check
from partita.errors import PartitaError
from partita.program.layout import crossings
from partita.program.lower import lower
from partita.testing.builders import (
    flat_cluster,
    host_cluster,
    lists_of,
    paired_cluster,
    random_dag,
    random_pipeline,
    relisted,
)

SEEDS = st.integers(min_value=0, max_value=10**9)
CLUSTERS = {
    "instant": flat_cluster,
    "one host": lambda count: flat_cluster(count, bandwidth_bytes_per_s=20.0),
    "matrix": lambda count: paired_cluster(count, bandwidth_bytes_per_s=20.0, latency_s=0.1),
    "two hosts": lambda count: host_cluster(
        2, (count + 1) // 2, inside_bytes_per_s=50.0, between_bytes_per_s=10.0
    ),
}


def deterministic(examples):
    return settings(derandomize=True, deadline=None, database=None, max_examples=examples)


@st.composite
def pipelines(draw):
    return random_pipeline(
        random.Random(draw(SEEDS)),
        schedule=draw(st.sampled_from(Schedule)),
        shard=draw(st.sampled_from(Shard)),
        make_cluster=CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))],
    )


@st.composite
def placements(draw):
    """Return a random graph, dealt at random to a few devices."""
    rng = random.Random(draw(SEEDS))
    num_ops, num_devices = draw(st.integers(2, 20)), draw(st.integers(1, 4))
    schedule = draw(st.sampled_from([s for s in Schedule if s is not Schedule.PIPEDREAM]))
    graph = random_dag(num_ops, rng)
    cluster = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))](num_devices)
    plan = placement_plan(
        graph,
        cluster.device_names,
        np.array([rng.randrange(num_devices) for _ in range(num_ops)]),
        schedule=schedule,
        microbatch_sizes=np.array([rng.randint(1, 3) for _ in range(draw(st.integers(1, 4)))]),
    )
    mode = Mode.INFERENCE if schedule is Schedule.INFERENCE else Mode.TRAINING
    return Problem(graph=graph, cluster=cluster, objective=Objective(mode=mode)), plan


@deterministic(300)
@given(st.one_of(pipelines(), placements()))
def test_every_plan_is_proved_and_takes_no_less_than_it_must(case):
    problem, plan = case
    program = lower(problem, plan)
    report = check(problem, plan, program)
    assert report.num_messages == np.count_nonzero(program.kind == Kind.SEND)
    timeline = simulate(problem, plan, program=program)
    assert timeline.makespan_s >= timeline.busy_s.max() * (1 - 1e-12)
    assert timeline.makespan_s >= longest_microbatch_s(problem, plan, timeline) * (1 - 1e-12)
    assert timeline.peak_bytes == pytest.approx(report.peak_bytes)
    for device in range(len(plan.devices)):
        rows = np.flatnonzero((timeline.device == device) & (timeline.kind <= LAST_COMPUTE))
        assert (timeline.start_s[rows[1:]] >= timeline.end_s[rows[:-1]]).all()


def longest_microbatch_s(problem, plan, timeline):
    """Return the longest way of one microbatch forward and back, transfers left out."""
    took = defaultdict(float)
    for row in np.flatnonzero((timeline.kind <= Kind.UPDATE) & (timeline.microbatch >= 0)).tolist():
        key = (int(timeline.kind[row]), int(timeline.stage[row]), int(timeline.microbatch[row]))
        took[key] = max(took[key], float(timeline.end_s[row] - timeline.start_s[row]))
    crossing = crossings(problem.graph, plan)
    flows = problem.graph.tensors.differentiable[crossing.tensor].tolist()
    edges = list(zip(crossing.producer.tolist(), crossing.reader.tolist(), flows, strict=True))
    stages = range(len(plan.stages))
    longest = 0.0
    for turn in range(plan.num_microbatches):
        forward = dict.fromkeys(stages, 0.0)
        for stage in stages:
            before = [forward[a] for a, b, _ in edges if b == stage]
            forward[stage] = max(before, default=0.0) + took[Kind.FORWARD, stage, turn]
        back = {}
        for stage in reversed(stages):
            after = [back[b] for a, b, flow in edges if a == stage and flow]
            own = took[Kind.BACKWARD, stage, turn] + took[Kind.BACKWARD_INPUT, stage, turn]
            back[stage] = max([forward[stage], *after]) + own
        longest = max(longest, *back.values())
    return longest


@deterministic(60)
@given(pipelines(), SEEDS)
def test_noise_changes_times_but_nothing_else(case, seed):
    problem, plan = case
    noisy = simulate(problem, plan, disturbance=Disturbance(perturb=0.5, seed=seed))
    plain = simulate(problem, plan)
    assert 0.5 * plain.busy_s.max() <= noisy.makespan_s * (1 + 1e-12)
    assert np.array_equal(noisy.kind, plain.kind)
    assert noisy.peak_bytes == pytest.approx(plain.peak_bytes)


@deterministic(400)
@given(st.one_of(pipelines(), placements()), st.data())
def test_what_the_checker_accepts_runs_whatever_was_done_to_it(case, data):
    """Rows are moved at random: refused in one line, or still played to the end."""
    problem, plan = case
    program = lower(problem, plan)
    lists = lists_of(program)
    rows = lists[data.draw(st.sampled_from([d for d, part in enumerate(lists) if part]))]
    source = data.draw(st.integers(0, len(rows) - 1))
    step = data.draw(st.integers(-3, 3))
    rows.insert(max(0, source + step), rows.pop(source))
    moved = relisted(program, lists)
    try:
        check(problem, plan, moved)
    except PartitaError as exc:
        refusal = str(exc)
    else:
        refusal = ""
        simulate(problem, plan, program=moved)
    assert "\n" not in refusal


@deterministic(300)
@given(pipelines(), st.data())
def test_nothing_can_be_left_out_or_doubled(case, data):
    problem, plan = case
    program = lower(problem, plan)
    lists = lists_of(program)
    rows = lists[data.draw(st.sampled_from([d for d, part in enumerate(lists) if part]))]
    place = data.draw(st.integers(0, len(rows) - 1))
    if data.draw(st.booleans()):
        rows.insert(place, rows[place])
    else:
        rows.pop(place)
    with pytest.raises(PartitaError):
        check(problem, plan, relisted(program, lists))
