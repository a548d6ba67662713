"""The released rules without the published data: small cases by hand, compiled equal to plain."""

import numpy as np
import pytest
from fleet_cluster import servers
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.fleet import Job, trace_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.kernels import compiled as kernels
from partita.fleet.kernels.sorting import sort_jobs
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.play import simulate_fleet
from partita.fleet.simulate.released import ALLOCATORS, ORDERINGS, simulate_released
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


def ends(trace, policy, cluster=None):
    ordering, _, allocator = policy.partition(":")
    history = simulate_released(
        trace, cluster or servers(1), ordering=ordering, allocator=allocator
    )
    return history.finish_s.tolist()


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


def test_what_the_released_code_does_not_know_is_refused():
    trace = small_trace()
    with pytest.raises(InvalidInputError, match="'priority' is not in the released code"):
        simulate_fleet(trace, servers(), "priority:fair", as_released=True)
    with pytest.raises(InvalidInputError, match="all alike"):
        simulate_fleet(trace, servers(2, kinds=["a", "b"]), "fifo:fair", as_released=True)
    with pytest.raises(InvalidInputError, match="rules of rounds"):
        simulate_fleet(trace, servers(), "fifo:fair", as_released=True, rules=Rules(restart_s=1.0))
    with pytest.raises(InvalidInputError, match="an iteration of 'flat' takes 400 s"):
        simulate_fleet(
            jobs(5, part=flat(iteration_s=400.0)), servers(), "fifo:fair", as_released=True
        )
    with pytest.raises(InfeasibleError, match="asks for 9 GPUs; there are 8"):
        simulate_fleet(jobs(5, gpus=9), servers(), "fifo:fair", as_released=True)


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(100, 3000), st.sampled_from([1, 2, 4]), st.integers(0, 2000)
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(POLICIES),
)
@settings(max_examples=60)
def test_rounds_that_are_skipped_change_nothing(rows, policy):
    kinds = (steep(), flat())
    made = [
        Job(job_id=i, sensitivity=kinds[s], iterations=n, gpus=g, arrival_s=float(a))
        for i, (s, n, g, a) in enumerate(sorted(rows, key=lambda row: row[3]))
    ]
    trace = trace_of(made)
    ordering, allocator = policy
    with pytest.MonkeyPatch.context() as patch:
        fast = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        patch.setattr("partita.fleet.kernels.released.equal_rounds", lambda *_: 1)
        slow = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
    assert np.array_equal(fast.finish_s, slow.finish_s, equal_nan=True)
    assert (fast.rounds, fast.events) == (slow.rounds, slow.events)
    assert len(fast.usage) <= len(slow.usage)


def test_compiled_kernels_return_what_plain_ones_do(monkeypatch):
    trace = small_trace(jobs=30)
    for ordering, allocator in (("fifo", "tune"), ("las", "greedy")):
        plain = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        monkeypatch.setattr(kernels, "COMPILE_FROM", 0)
        fast = simulate_released(trace, servers(2), ordering=ordering, allocator=allocator)
        monkeypatch.setattr(kernels, "COMPILE_FROM", 10**9)
        monkeypatch.setattr(kernels, "_loaded", set())
        assert fast == plain


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40))
def test_sorting_is_by_rank_key_and_number(rows):
    order = list(range(len(rows)))[::-1]
    key, rank = [float(k) for _, k in rows], [r for r, _ in rows]
    sort_jobs(order, len(rows), key, rank, [0] * len(rows))
    assert order == sorted(range(len(rows)), key=lambda j: (-rank[j], key[j], j))
