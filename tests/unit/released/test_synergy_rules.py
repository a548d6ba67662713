"""The released rules without the published data: small cases by hand, compiled equal to plain."""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from fleet_cluster import servers
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.fleet import Job, Sensitivity, trace_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.kernels.sorting import sort_jobs
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.table import simulate_trace
from partita.formats.synergy import read_trace
from partita.kernels import Threshold
from partita.released import synergy as simulator
from partita.released import synergy_packing, synergy_rounds
from partita.released.synergy import ALLOCATORS, ORDERINGS, simulate_released
from partita.testing.fleet_builders import flat, small_trace, steep

POLICIES = [(ordering, allocator) for ordering in ORDERINGS for allocator in ALLOCATORS]


def jobs(*iterations, part=None, gpus=1):
    part = steep() if part is None else part
    return trace_of(
        [
            Job(job_id=i, sensitivity=part, iterations=n, arrival_s=0.001 * i, gpus=gpus)
            for i, n in enumerate(iterations)
        ],
        start_s=1.0,
    )


def asks(cpus, memory_gb, speed=1.0, iteration_s=1.0):
    """Return a job that asks for so much a GPU, and is so much faster with it than at fair."""
    return Sensitivity(
        name=f"{cpus} CPUs, {memory_gb} GB",
        iteration_s=iteration_s,
        cpus=np.array([cpus]),
        memory_bytes=np.array([memory_gb * 1e9]),
        speed=np.array([speed]),
    )


def rows(*parts, start_s=1.0):
    """Return a trace of (sensitivity, iterations, GPUs) or (..., arrival)."""
    made = [
        Job(
            job_id=i,
            sensitivity=part,
            iterations=n,
            gpus=gpus,
            arrival_s=at[0] if at else 0.001 * i,
        )
        for i, (part, n, gpus, *at) in enumerate(parts)
    ]
    return trace_of(made, start_s=start_s)


def play(trace, policy, cluster=None):
    ordering, _, allocator = policy.partition(":")
    return simulate_released(trace, cluster or servers(1), ordering=ordering, allocator=allocator)


def ends(trace, policy, cluster=None):
    return play(trace, policy, cluster).finish_s.tolist()


def test_jobs_end_with_rounds_at_their_speed():
    assert ends(jobs(300, 301, 600), "fifo:fair") == [301.0, 601.0, 601.0]
    assert ends(jobs(300, 601), "fifo:tune") == [301.0, 601.0]


def test_greedy_waits_for_the_ideal_demand():
    assert ends(jobs(600, 600, 600), "fifo:greedy") == [301.0, 301.0, 601.0]


def test_tune_demotes_all_or_nothing():
    # Two run at the ideal 6 of 12 CPUs; the third takes from the first, which falls to 3.
    assert ends(jobs(600, 600, 300), "fifo:tune") == [601.0, 301.0, 301.0]


def test_srtf_serves_short_jobs_and_ftf_the_smallest_ratio():
    trace = jobs(900, 600, 300, 300, 300, 300)
    assert ends(trace, "srtf:fair") == [1201.0, 901.0, 301.0, 301.0, 301.0, 301.0]
    assert ends(trace, "ftf:fair")[0] == 901.0


def test_a_job_of_several_gpus_is_split_over_servers():
    trace = jobs(300, 300, 300, part=flat(), gpus=3)
    assert ends(trace, "fifo:fair", servers(2)) == [301.0, 301.0, 601.0]


def test_a_demand_above_a_server_is_cut_and_its_speed_with_it():
    # 3 GPUs ask for 18 CPUs, get 12: halfway between fair (9) and ideal (18) is a third.
    assert ends(jobs(400, gpus=3), "fifo:tune") == [301.0]
    assert ends(jobs(401, gpus=3), "fifo:tune") == [601.0]


def test_a_cut_speed_is_rounded_as_released():
    # Memory is cut and CPUs are not: (1.7 - 1) / 3 * 3 + 1 is just above 1.7, so 510 fit a round.
    assert ends(rows((asks(4.5, 250.0, 1.7), 510, 2)), "fifo:tune") == [301.0]


def test_a_job_beyond_one_server_keeps_what_fits_one():
    kept = play(rows((asks(1.5, 20.0, 2.0), 600, 8)), "fifo:tune", servers(2))
    assert kept.finish_s.tolist() == [301.0]
    assert (kept.usage.cpus[0], kept.usage.memory_bytes[0]) == (12.0, 160e9)
    cut = play(rows((asks(2.0, 20.0, 2.0), 600, 8)), "fifo:tune", servers(2))
    assert cut.finish_s.tolist() == [601.0]
    assert (cut.usage.cpus[0], cut.usage.memory_bytes[0]) == (24.0, 160e9)


def test_a_job_that_starves_goes_first_from_the_round_after_it_is_found():
    # One of two GPUs is busy for 12,100 rounds; the other job is found in round 12,000.
    trace = rows((flat(), 300, 2), (flat(), 12_100 * 300, 1))
    assert ends(trace, "drf:fair", servers(1, gpus=2)) == [3_600_601.0, 3_630_301.0]


def test_equal_arrivals_come_in_the_order_of_a_heap():
    trace = rows(*[(flat(), 1, 4, 100.0)] * 3, start_s=np.nan)
    assert ends(trace, "fifo:fair") == [600.0, 1200.0, 900.0]


@pytest.mark.parametrize(
    ("arrival_s", "rest"),
    [(1000.0, [3000.0, 3300.0, 3900.0, 3600.0]), (1300.0, [3600.0, 3000.0, 3900.0, 3300.0])],
)
def test_rounds_before_them_change_the_order_of_equal_arrivals(arrival_s, rest):
    # Ends of leases go through the same heap, and leave it in another shape.
    late = [(flat(), 1, 4, arrival_s)] * 4
    trace = rows((flat(), 2400, 4, 50.0), *late, start_s=np.nan)
    assert ends(trace, "fifo:fair") == [2700.0, *rest]


def test_equal_keys_keep_the_order_of_the_last_round():
    trace = rows(*[(flat(), 600, 4, 100.0)] * 3, start_s=np.nan)
    assert ends(trace, "las:fair") == [2100.0, 1500.0, 1800.0]


def test_the_first_row_sets_the_first_round():
    trace = rows((flat(), 1, 1, 700.0), (flat(), 1, 1, 10.0), start_s=np.nan)
    assert ends(trace, "fifo:fair") == [1200.0, 1200.0]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("5,flat,0.005,100,1\n9,flat,0.009,100,1\n", 301.0),
        ("5,flat,0.005,100,1\n", 301.0),
        ("0,flat,0,100,1\n", 300.0),
        ("2000,flat,2.0,100,1\n", 600.0),
    ],
)
def test_jobs_of_a_static_trace_start_at_one_second(text, end):
    assert set(ends(read_trace(text, {"flat": flat()}), "fifo:fair")) == {end}


def test_tetris_adds_up_as_released():
    # Both keys are 990; the other way round, 450 s times the sum of shares is 990.0000000000001.
    trace = rows((asks(3.0, 20.0, 1.0, 0.5), 900, 4), (asks(1.0, 50.0, 1.0, 0.6), 900, 4))
    assert ends(trace, "tetris:fair") == [601.0, 1201.0]


def test_a_victim_that_asks_for_no_more_than_fair_is_slow_and_keeps_its_key():
    # The third job lacks 20 GB: the second is walked first, and has none to give, then the first.
    trace = rows((asks(1.0, 200.0, 2.0), 600, 1), (asks(3.0, 100.0, 2.0), 900, 2), (flat(), 600, 1))
    assert ends(trace, "srtf:tune") == [601.0, 901.0, 601.0]


def test_what_the_released_code_does_not_know_is_refused():
    trace = small_trace()
    with pytest.raises(InvalidInputError, match="'priority'"):
        simulate_trace(trace, servers(), "priority:fair", simulator="released")
    with pytest.raises(InvalidInputError, match="all alike"):
        simulate_trace(trace, servers(2, kinds=["a", "b"]), "fifo:fair", simulator="released")
    with pytest.raises(InvalidInputError, match="rules of rounds"):
        simulate_trace(
            trace, servers(), "fifo:fair", simulator="released", rules=Rules(restart_s=1.0)
        )
    with pytest.raises(InvalidInputError, match=r"'flat'.*400 s"):
        simulate_trace(
            jobs(5, part=flat(iteration_s=400.0)), servers(), "fifo:fair", simulator="released"
        )
    with pytest.raises(InfeasibleError, match=r"9 GPUs;.*8"):
        simulate_trace(jobs(5, gpus=9), servers(), "fifo:fair", simulator="released")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(st.integers(100, 3000), st.sampled_from([600, 1200, 2000])),
            st.sampled_from([1, 2, 4]),
            st.one_of(st.integers(0, 2000), st.sampled_from([0, 400, 1100, 5000])),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(POLICIES),
)
@settings(max_examples=100)
def test_rounds_that_are_skipped_change_nothing(drawn, policy):
    kinds = (steep(), flat(), flat("third", iteration_s=0.3))
    made = [
        Job(job_id=i, sensitivity=kinds[s], iterations=n, gpus=g, arrival_s=float(a))
        for i, (s, n, g, a) in enumerate(drawn)
    ]
    trace = trace_of(made)
    ordering, allocator = policy
    with pytest.MonkeyPatch.context() as patch:
        fast = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        patch.setattr("partita.released.synergy_rounds.equal_rounds", lambda *_: 1)
        slow = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
    assert np.array_equal(fast.finish_s, slow.finish_s, equal_nan=True)
    assert (fast.rounds, fast.events) == (slow.rounds, slow.events)
    assert len(fast.usage) <= len(slow.usage)


@pytest.mark.parametrize("every_s", [100.0, 0.0])
def test_compiled_kernels_return_what_plain_ones_do(monkeypatch, every_s):
    trace = small_trace(jobs=30, every_s=every_s)
    for ordering, allocator in (("fifo", "tune"), ("las", "greedy")):
        monkeypatch.setattr(simulator, "JOB_ROUNDS", Threshold(size=math.inf))
        plain = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        monkeypatch.setattr(simulator, "JOB_ROUNDS", Threshold(size=0))
        fast = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        assert fast == plain


@dataclass(order=True)
class Event:
    """One that compares by its time alone."""

    time: int
    number: int = field(compare=False)


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=60))
def test_the_heap_is_that_of_python(steps):
    when = [step or 0 for step in steps]
    events = synergy_packing.Events(
        clock=[0.0], tied=[], place=[], heap=[0] * len(steps), when=when
    )
    count, theirs = [0] * synergy_packing.COUNTS, []
    for number, step in enumerate(steps):
        if step is not None:
            synergy_rounds.push(number, events, count)
            heapq.heappush(theirs, Event(step, number))
        elif theirs:
            assert synergy_rounds.pop(events, count) == heapq.heappop(theirs).number
    assert events.heap[: count[synergy_packing.QUEUED]] == [event.number for event in theirs]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40))
def test_sorting_is_by_rank_key_and_number(rows):
    order = list(range(len(rows)))[::-1]
    key, rank = [float(k) for _, k in rows], [r for r, _ in rows]
    sort_jobs(order, len(rows), key, rank, [0] * len(rows))
    assert order == sorted(range(len(rows)), key=lambda j: (-rank[j], key[j], j))
