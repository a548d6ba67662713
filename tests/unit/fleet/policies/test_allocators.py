"""Allocators against independent answers: brute force, plain kernels, every round computed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fleet_cluster import servers
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.fleet import Job, Sensitivity, trace_of
from partita.fleet.policies.allocators import round_tables
from partita.fleet.policies.allocators.joint import keep_running
from partita.fleet.policies.table import ALLOCATORS, policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.rounds import _Player, check_promise
from partita.fleet.simulate.state import first_state
from partita.fleet.simulate.table import simulate_trace
from partita.kernels import Threshold
from partita.testing.fleet_builders import flat, small_trace, steep

CURVES = st.lists(st.floats(0.2, 3.0), min_size=3, max_size=3).map(sorted)


def curve(i, speeds):
    return Sensitivity(
        name=f"s{i}",
        iteration_s=1.0,
        cpus=np.array([2.0, 3.0, 5.0]),
        memory_bytes=np.full(3, 20e9),
        speed=np.array(speeds),
    )


def snapshot_of(jobs, cluster):
    state = first_state(trace_of(jobs), cluster, Rules())
    state.active = np.arange(len(jobs))
    return state.snapshot(0.0)


def wants(*memory_bytes):
    """Return jobs that run with some memory per GPU, faster with the next."""
    return Sensitivity(
        name=f"{memory_bytes}",
        iteration_s=1.0,
        cpus=np.full(len(memory_bytes), 3.0),
        memory_bytes=np.array(memory_bytes),
        speed=np.arange(1.0, 1.0 + len(memory_bytes)),
    )


def grants(allocator, jobs, cluster):
    snapshot = snapshot_of(jobs, cluster)
    return policy_of(f"fifo:{allocator}").allocator.allocate(snapshot, np.arange(len(jobs)))


def best_sum(snapshot, cpus):
    """Return the highest sum of speeds that some choices within the CPUs of a server give."""
    profiles = snapshot.profiles
    lists = [range(profiles.first[p], profiles.first[p + 1]) for p in snapshot.profile.tolist()]
    return max(
        sum(profiles.speed[c] for c in chosen)
        for chosen in itertools.product(*lists)
        if sum(profiles.cpus[c] for c in chosen) <= cpus + 1e-9
    )


@given(st.lists(CURVES, min_size=1, max_size=4))
@settings(max_examples=40)
def test_opt_on_one_server_is_the_best_there_is(curves):
    jobs = [
        Job(job_id=i, sensitivity=curve(i, speeds), iterations=5000)
        for i, speeds in enumerate(curves)
    ]
    snapshot = snapshot_of(jobs, servers(1))
    order = np.arange(len(jobs))
    best = best_sum(snapshot, 12.0)
    found = policy_of("fifo:opt").allocator.allocate(snapshot, order)
    assert found.bound == pytest.approx(best, rel=1e-6)
    assert found.speed.sum() <= best * (1 + 1e-9)
    assert found.gap == pytest.approx(1 - found.speed.sum() / best, abs=1e-6)
    for name, entry in ALLOCATORS.items():
        granted = entry.allocate(snapshot, order)
        check_promise(snapshot, granted)
        # Greedy may let a job wait, which others have to serve.
        assert name == "greedy" or granted.speed.sum() <= best * (1 + 1e-9), name


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_shares_of_memory_that_are_no_whole_bytes_fit_beside_one_another(allocator):
    cluster = servers(1, gpus=7, cpus=21.0, memory_bytes=100e9)
    share = 100e9 / 7
    whole = [Job(job_id=i, sensitivity=wants(share), iterations=5000) for i in range(7)]
    granted = grants(allocator, whole, cluster)
    assert granted.running.all()
    check_promise(snapshot_of(whole, cluster), granted)
    # Who asks for more than a byte more than there is does not get it.
    more = [*whole[:6], replace(whole[6], sensitivity=wants(share, share + 5))]
    granted = grants(allocator, more, cluster)
    assert granted.memory_bytes.sum() <= 100e9 + 1


@pytest.mark.parametrize("policy", ["fifo:fair", "srtf:tune", "las:tune", "ftf:fair", "drf:tune"])
def test_rounds_that_are_skipped_change_nothing(policy, monkeypatch):
    trace = small_trace(jobs=12, every_s=700.0)
    fast = simulate_trace(trace, servers(1), policy)
    plain = _Player._rounds
    monkeypatch.setattr(_Player, "_rounds", lambda *given: min(plain(*given), 1))
    slow = simulate_trace(trace, servers(1), policy)
    assert fast.finish_s == pytest.approx(slow.finish_s)
    assert fast.rounds == slow.rounds
    assert len(fast.usage) < len(slow.usage)


@pytest.mark.parametrize("allocator", ["greedy", "tune", "joint"])
def test_compiled_kernels_grant_what_plain_ones_do(allocator, monkeypatch):
    kinds = (steep(), flat())
    jobs = [
        Job(job_id=i, sensitivity=kinds[i % 3 > 0], iterations=3000 + 500 * i, gpus=1 + i % 3)
        for i in range(9)
    ]
    plain = simulate_trace(trace_of(jobs), servers(3), f"srtf:{allocator}")
    monkeypatch.setattr(round_tables, "JOB_ROUNDS", Threshold(size=0))
    fast = simulate_trace(trace_of(jobs), servers(3), f"srtf:{allocator}")
    assert fast == plain


def test_a_broken_promise_is_noticed():
    snapshot = snapshot_of([Job(job_id=0, sensitivity=steep(), iterations=10)], servers(1))
    granted = policy_of("fifo:tune").allocator.allocate(snapshot, np.arange(1))
    check_promise(snapshot, granted)
    slow = type(granted)(
        **{
            **{name: getattr(granted, name) for name in granted.__slots__},
            "speed": np.array([0.5]),
        }
    )
    with pytest.raises(AssertionError, match=r"below.*speed"):
        check_promise(snapshot, slow)


def running(jobs, cluster, *, held):
    """Return a snapshot in which the job of row ``held`` holds its GPUs on the first server."""
    state = first_state(trace_of(jobs), cluster, Rules())
    state.active = np.arange(len(jobs))
    state.speed[held] = 1.0
    state.held = (np.array([held]), np.array([0]), np.array([jobs[held].gpus]))
    return state.snapshot(600.0)


def test_greedy_starts_a_job_beside_those_who_run_and_not_in_their_place():
    part = flat()
    jobs = [Job(job_id=i, sensitivity=part, iterations=4000, gpus=4) for i in range(2)]
    snapshot = running(jobs, servers(2), held=1)
    granted = policy_of("fifo:greedy").allocator.allocate(snapshot, np.array([0, 1]))
    check_promise(snapshot, granted)
    assert granted.server[granted.first[1] : granted.first[2]].tolist() == [0]
    assert granted.server[granted.first[0] : granted.first[1]].tolist() != []


def test_greedy_moves_the_last_where_the_order_asks_for_it():
    # The first needs 6 CPUs of one server, and each server has 5 that nobody holds.
    jobs = [Job(job_id=0, sensitivity=steep(), iterations=4000)]
    jobs += [Job(job_id=i, sensitivity=flat(), iterations=4000, gpus=3) for i in (1, 2)]
    state = first_state(trace_of(jobs), servers(2, cpus=8.0), Rules())
    state.active = np.arange(3)
    state.speed[1:] = 1.0
    state.held = (np.array([1, 2]), np.array([0, 1]), np.array([3, 3]))
    granted = policy_of("fifo:greedy").allocator.allocate(state.snapshot(600.0), np.arange(3))
    places = [granted.server[a:b].tolist() for a, b in itertools.pairwise(granted.first.tolist())]
    assert places == [[1], [0], [0, 1]]


def test_greedy_moves_jobs_about_as_rarely_as_tune():
    kinds = (steep(), flat())
    trace = trace_of(
        [
            Job(
                job_id=i,
                sensitivity=kinds[i % 3 > 0],
                arrival_s=400.0 * i,
                iterations=2000 + 1700 * (i * 7 % 11),
                gpus=1 + i % 2,
            )
            for i in range(60)
        ]
    )
    moved = {
        name: int(simulate_trace(trace, servers(4), f"srtf:{name}").migrations.sum())
        for name in ("greedy", "tune")
    }
    assert moved["tune"] == 0
    assert moved["greedy"] <= 8


@pytest.mark.parametrize(
    ("work", "gpus", "priority", "stopped"),
    [
        (5000, 4, 0.0, False),  # as much to do: they would only take turns
        (1000, 4, 0.0, True),  # less to do
        (9000, 8, 0.0, True),  # needs more GPUs than that job would leave
        (9000, 2, 0.0, False),  # fewer GPUs for longer: as much GPU time
        (9000, 1, 0.0, True),  # less GPU time
        (9000, 4, 1.0, True),  # a higher priority
    ],
)
def test_joint_stops_nobody_for_a_job_that_has_as_much_to_do(work, gpus, priority, stopped):
    part = flat()
    jobs = [
        Job(job_id=0, sensitivity=part, iterations=4000, gpus=4),
        Job(job_id=1, sensitivity=part, iterations=work, gpus=gpus, priority=priority),
    ]
    snapshot = running(jobs, servers(2), held=0)
    assert keep_running(snapshot, np.array([1, 0])).tolist() == ([1, 0] if stopped else [0, 1])


def test_jobs_overtake_under_fifo_only_where_the_policy_says_so():
    """Of the next jobs in line, twice as many as there are GPUs, who ends soonest goes first."""
    part, come = flat(), list(range(10))
    jobs = [Job(job_id=i, sensitivity=part, iterations=900 - i) for i in come]
    snapshot = snapshot_of(jobs, servers(1))
    assert snapshot.servers.num_gpus == 4
    assert policy_of("fifo:joint").order(snapshot).tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 8, 9]
    for name in ("fifo:joint-in-order", "las:joint-in-order", "fifo:tune"):
        assert policy_of(name).order(snapshot).tolist() == come
    late = replace(snapshot, now_s=900.0 + 86_400.0 + 1)
    assert policy_of("fifo:joint").order(late).tolist() == come


def test_of_equals_with_as_many_gpus_the_shortest_goes_first():
    sizes, lengths = [1, 2, 1, 2, 1], [500, 900, 300, 100, 400]
    jobs = [
        Job(job_id=i, sensitivity=flat(), iterations=n, gpus=g)
        for i, (n, g) in enumerate(zip(lengths, sizes, strict=True))
    ]
    snapshot = snapshot_of(jobs, servers(1))
    assert policy_of("las:joint").order(snapshot).tolist() == [2, 3, 4, 1, 0]
    assert policy_of("las:tune").order(snapshot).tolist() == [0, 1, 2, 3, 4]
    attained = replace(snapshot, attained_s=np.array([0.0, 0.0, 9.0, 0.0, 0.0]))
    assert policy_of("las:joint").order(attained).tolist() == [4, 3, 1, 0, 2]


def test_who_was_overtaken_for_too_long_goes_before_those_who_run():
    part = flat()
    jobs = [
        Job(job_id=0, sensitivity=part, iterations=900, gpus=4),
        Job(job_id=1, sensitivity=part, iterations=300),
    ]
    snapshot = running(jobs, servers(1), held=1)
    assert policy_of("fifo:joint").order(snapshot).tolist() == [1, 0]
    late = replace(snapshot, now_s=900.0 + 86_400.0 + 1)
    assert policy_of("fifo:joint").order(late).tolist() == [0, 1]
