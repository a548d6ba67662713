from dataclasses import replace

import numpy as np
import pytest
from fleet_cluster import servers

from partita.core.fleet import Job, trace_of
from partita.errors import InvalidInputError
from partita.fleet.policies.table import ALLOCATORS, ORDERINGS, policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.state import first_state
from partita.testing.fleet_builders import flat, steep


def snapshot(jobs, now_s=0.0, **changes):
    state = first_state(trace_of(jobs), servers(), Rules())
    state.active = np.arange(len(jobs))
    return replace(state.snapshot(now_s), **changes)


def job(i, **fields):
    return Job(
        **({"job_id": i, "sensitivity": flat(), "iterations": 100, "arrival_s": float(i)} | fields)
    )


def order(name, shot):
    return policy_of(f"{name}:fair").order(shot).tolist()


def test_fifo_goes_by_arrival_whatever_the_priority():
    assert order("fifo", snapshot([job(0), job(1, priority=9.0)])) == [0, 1]


def test_priority_goes_first_elsewhere():
    assert order("priority", snapshot([job(0), job(1, priority=9.0)])) == [1, 0]
    assert order("las", snapshot([job(0), job(1, priority=9.0)])) == [1, 0]


def test_srtf_counts_time_at_top_speed():
    fast = job(0, sensitivity=steep(), iterations=150)
    assert order("srtf", snapshot([fast, job(1)])) == [0, 1]
    assert order("srtf", snapshot([job(0, iterations=300), job(1)])) == [1, 0]


def test_las_counts_gpu_seconds():
    shot = snapshot([job(0, gpus=4), job(1)], attained_s=np.array([100.0, 300.0]))
    assert order("las", shot) == [1, 0]


def test_ftf_serves_the_worst_ratio_first():
    assert order("ftf", snapshot([job(0, iterations=10_000), job(1)], now_s=500.0)) == [1, 0]


def test_drf_fills_the_tenant_with_the_least_share():
    jobs = [job(0, tenant="a", gpus=2), job(1, tenant="a"), job(2, tenant="b"), job(3, tenant="b")]
    assert order("drf", snapshot(jobs)) == [2, 0, 3, 1]


def test_drf_without_tenants_serves_small_jobs_first():
    assert order("drf", snapshot([job(0, gpus=4), job(1, gpus=1), job(2, gpus=2)])) == [1, 2, 0]


def test_tetris_prefers_short_work_and_large_demand():
    assert order("tetris", snapshot([job(0, iterations=1000), job(1)])) == [1, 0]
    assert order("tetris", snapshot([job(0, iterations=400), job(1, gpus=4, iterations=100)])) == [
        1,
        0,
    ]


def test_equal_jobs_stay_in_order_of_arrival():
    for name in ORDERINGS:
        assert order(name, snapshot([job(0), job(1, arrival_s=0.0), job(2, arrival_s=0.0)])) == [
            0,
            1,
            2,
        ]


def test_a_policy_that_is_not_there_is_refused_with_those_that_are():
    for name in ("fifo", "fifo:best", "lifo:fair"):
        with pytest.raises(InvalidInputError, match="not ORDERING:ALLOCATOR"):
            policy_of(name)
    assert set(ALLOCATORS) == {"fair", "greedy", "tune", "opt", "joint", "joint-in-order"}
