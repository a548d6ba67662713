"""Blocking transfers: closed forms, a second evaluation, what they hold, and refusals."""

import dataclasses
import random
from functools import cache

import numpy as np
import pytest

from partita import kernels
from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind, TransferMode
from partita.cost.durations import instruction_seconds
from partita.cost.predict import simulate
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.matching import match
from partita.program.simulate import play
from partita.testing.builders import (
    Figures,
    chain,
    flat_cluster,
    graph_of,
    host_cluster,
    lists_of,
    paired_cluster,
    pipeline,
    random_dag,
    random_pipeline,
    relisted,
)

BLOCKING = TransferMode.BLOCKING
CLUSTERS = {
    "one host": lambda count: flat_cluster(count, bandwidth_bytes_per_s=37.0, latency_s=0.013),
    "matrix": lambda count: paired_cluster(count, bandwidth_bytes_per_s=37.0, latency_s=0.013),
    "two hosts": lambda count: host_cluster(
        2, (count + 1) // 2, inside_bytes_per_s=61.0, between_bytes_per_s=17.0
    ),
}


def two_stages(schedule, microbatches, size=4.0):
    """Return two equal stages with f = 1, b = 2 and T = size."""
    graph = chain(2, Figures(forward_s=1.0, backward_s=2.0, tensor_bytes=size))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1.0)
    plan = pipeline(graph, cluster, [0, 1], schedule=schedule, microbatches=microbatches)
    return Problem(graph=graph, cluster=cluster), plan


def spans(program, timeline, kind, **fields):
    mask = program.kind == kind
    for name, value in fields.items():
        mask &= getattr(program, name) == value
    return list(zip(timeline.start_s[mask].tolist(), timeline.end_s[mask].tolist(), strict=True))


# Closed forms.


@pytest.mark.parametrize("size", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_two_stages_of_1f1b_exchange_once_a_microbatch(microbatches, size):
    problem, plan = two_stages(Schedule.ONE_F_ONE_B, microbatches, size)
    expected = (microbatches + 1) * 3.0 + (microbatches + 2) * size
    assert simulate(problem, plan, transfers=BLOCKING).makespan_s == pytest.approx(expected)


def test_one_microbatch_travels_there_and_back():
    problem, plan = two_stages(Schedule.ONE_F_ONE_B, 1)
    assert simulate(problem, plan, transfers=BLOCKING).makespan_s == 2 * 3.0 + 2 * 4.0


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_two_stages_of_gpipe_send_one_way_at_a_time(microbatches):
    problem, plan = two_stages(Schedule.GPIPE, microbatches)
    expected = (microbatches + 1) * 3.0 + 2 * microbatches * 4.0
    assert simulate(problem, plan, transfers=BLOCKING).makespan_s == expected


def test_without_bytes_the_modes_are_alike():
    problem, plan = two_stages(Schedule.ONE_F_ONE_B, 6, 0.0)
    modes = [simulate(problem, plan, transfers=mode) for mode in TransferMode]
    assert modes[0].makespan_s == modes[1].makespan_s == 21.0


def test_a_pair_exchanges_activation_and_gradient_at_once():
    problem, plan = two_stages(Schedule.ONE_F_ONE_B, 4)
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program, transfers=BLOCKING)
    for turn in (2, 3):
        there = spans(program, timeline, Kind.SEND, gradient=False, microbatch=turn)
        assert there == spans(program, timeline, Kind.SEND, gradient=True, microbatch=turn - 1)


def test_a_send_waits_for_its_receiver():
    # d1 computes op1 for five seconds before it comes to the receive of op0's tensor.
    graph = graph_of(3, [(0, 2), (1, 2)], Figures(forward_s=(1, 5, 1), tensor_bytes=4.0))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1.0)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 1]))
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    overlapped, blocking = (
        simulate(problem, plan, program=program, transfers=mode) for mode in TransferMode
    )
    assert spans(program, overlapped, Kind.SEND, gradient=False) == [(1, 5)]
    assert spans(program, blocking, Kind.SEND, gradient=False) == [(5, 9)]
    assert spans(program, blocking, Kind.RECV, gradient=False) == [(5, 9)]


def test_the_period_is_that_of_blocking_steps():
    problem, plan = two_stages(Schedule.PIPEDREAM, 6)
    timeline = simulate(problem, plan, transfers=BLOCKING, period=True)
    assert timeline.period_s == pytest.approx(6 * (3.0 + 4.0))
    problem, plan = two_stages(Schedule.GPIPE, 2)
    timeline = simulate(problem, plan, transfers=BLOCKING, period=True)
    assert 2 * 3.0 + 4 * 4.0 <= timeline.period_s <= timeline.makespan_s


# Any Program.


def placements(links, count):
    """Return random placements without collectives, each with its Program and unequal times."""
    for seed in range(count):
        rng = random.Random(f"{links}{seed}")
        graph, cluster = random_dag(18, rng, tied=0), CLUSTERS[links](4)
        schedule = rng.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
        plan = placement_plan(
            graph,
            cluster.device_names,
            np.array([rng.randrange(4) for _ in range(18)]),
            schedule=schedule,
            microbatch_sizes=np.array([1, 2, 3]),
        )
        problem = Problem(graph=graph, cluster=cluster)
        program = lower(problem, plan)
        seconds = instruction_seconds(problem, plan, program)
        yield problem, program, seconds * [rng.uniform(0.9, 1.1) for _ in range(len(seconds))]


def recurrence(program, seconds):
    """Return start and end of every row, each from the rows it waits for; a link for each pair."""
    partner, before, batch = match(program).partner.tolist(), {}, {}
    queue, link = {}, {}
    for rows in lists_of(program):
        done, since = -1, []
        for row in rows:
            before[row], batch[row] = done, tuple(since)
            if program.kind[row] in (Kind.SEND, Kind.RECV):
                since.append(row)
            else:
                done, since = row, []
            if program.kind[row] == Kind.SEND:
                way = (int(program.device[row]), int(program.peer[row]))
                link[row] = queue.get(way, -1)
                queue[way] = row

    @cache
    def come(row):
        return max(0.0, end(before[row])) if before[row] >= 0 else 0.0

    @cache
    def start(row):
        if program.kind[row] == Kind.RECV:
            return come(row)
        if program.kind[row] == Kind.SEND:
            free = end(link[row]) if link[row] >= 0 else 0.0
            return max(come(row), come(partner[row]), free)
        return max([come(row), *(end(message) for message in batch[row])])

    @cache
    def end(row):
        if program.kind[row] == Kind.RECV:
            return end(partner[row])
        return start(row) + seconds[row]

    rows = range(len(program))
    return [start(row) for row in rows], [end(row) for row in rows]


def test_a_recurrence_over_the_lists_gives_the_same_times():
    for problem, program, seconds in placements("matrix", 12):
        timeline = play(program, problem.cluster, seconds, BLOCKING)
        start, end = recurrence(program, seconds)
        assert np.allclose(timeline.start_s, start, rtol=1e-12, atol=1e-12)
        assert np.allclose(timeline.end_s, end, rtol=1e-12, atol=1e-12)


def test_blocking_is_never_faster_on_links_of_their_own():
    slower = 0
    for problem, program, seconds in placements("matrix", 12):
        overlapped, blocking = (
            play(program, problem.cluster, seconds, mode) for mode in TransferMode
        )
        assert (blocking.end_s >= overlapped.end_s - 1e-9).all()
        slower += blocking.makespan_s > overlapped.makespan_s
    assert slower > 6


def check_held(program, timeline):
    """Check that a device does nothing else from a batch of messages on until all have ended."""
    for rows in lists_of(program):
        free = 0.0
        for row in rows:
            is_message = program.kind[row] in (Kind.SEND, Kind.RECV)
            if program.kind[row] < FIRST_COLLECTIVE:
                assert timeline.start_s[row] >= free - 1e-9 or is_message
            if is_message or program.kind[row] <= LAST_COMPUTE:
                free = max(free, timeline.end_s[row])


def check_causes(timeline):
    """Check that the critical path has no gap: every row starts when its cause ends."""
    for row in np.flatnonzero(timeline.kind != Kind.RECV).tolist():
        cause = int(timeline.cause[row])
        before = timeline.end_s[cause] if cause >= 0 else 0.0
        assert timeline.start_s[row] == pytest.approx(before, rel=1e-12)
    path = timeline.critical_path
    took = (timeline.end_s - timeline.start_s)[path].sum()
    assert took == pytest.approx(timeline.makespan_s, rel=1e-9)


@pytest.mark.parametrize("links", CLUSTERS)
@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule_runs_with_its_devices_held(schedule, links):
    for seed, shard in enumerate([*Shard, *Shard]):
        rng = random.Random(f"{schedule}{links}{seed}")
        problem, plan = random_pipeline(
            rng, schedule=schedule, shard=shard, make_cluster=CLUSTERS[links]
        )
        program = lower(problem, plan)
        timeline = simulate(problem, plan, program=program, transfers=BLOCKING)
        check_held(program, timeline)
        check_causes(timeline)


@pytest.mark.parametrize("links", CLUSTERS)
def test_compiled_and_uncompiled_kernels_agree(links, monkeypatch):
    problem, plan = random_pipeline(
        random.Random(5),
        schedule=Schedule.ONE_F_ONE_B,
        shard=Shard.OPTIMIZER,
        make_cluster=CLUSTERS[links],
    )
    slow = simulate(problem, plan, transfers=BLOCKING)
    monkeypatch.setattr(kernels, "ROWS", kernels.Threshold(size=0))
    fast = simulate(problem, plan, transfers=BLOCKING)
    assert dataclasses.replace(fast, period_s=0.0) == dataclasses.replace(slow, period_s=0.0)


# Refusals.


def test_a_program_that_only_runs_with_overlap_names_its_open_messages():
    # Stages 0 and 2 send to the other device, which runs stage 4 or 5 before it receives.
    graph = graph_of(6, [(0, 1), (2, 3)], Figures(tensor_bytes=4.0))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1.0)
    plan = pipeline(graph, cluster, [0, 1, 1, 0, 0, 1], schedule=Schedule.INFERENCE)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(mode=Mode.INFERENCE))
    program = lower(problem, plan)
    compute_turn = {0: 0, 2: 0, 4: 2, 5: 2, 1: 4, 3: 4}

    def turn(row):
        messages = {Kind.SEND: 1, Kind.RECV: 3}
        return messages.get(program.kind[row], compute_turn[int(program.stage[row])])

    changed = relisted(program, [sorted(rows, key=turn) for rows in lists_of(program)])
    assert simulate(problem, plan, program=changed).makespan_s == 6.0
    with pytest.raises(InvalidInputError, match=r"SEND.*;.*SEND"):
        simulate(problem, plan, program=changed, transfers=BLOCKING)
