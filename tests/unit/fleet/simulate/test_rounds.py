import math
from dataclasses import replace

import numpy as np
import pytest
from fleet_cluster import servers
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.fleet import Job, Sensitivity, trace_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.metrics import by_kind, cdf, in_window, load_of, metrics_of
from partita.fleet.policies.table import ALLOCATORS, ORDERINGS
from partita.fleet.simulate.options import Outage, Rules
from partita.fleet.simulate.table import simulate_trace
from partita.testing.fleet_builders import flat, small_trace, steep
from partita.units import format_bytes

POLICIES = [f"{ordering}:{allocator}" for ordering in ORDERINGS for allocator in ALLOCATORS]


def one(part, *, iterations, **fields):
    return Job(**({"job_id": 0, "sensitivity": part, "iterations": iterations} | fields))


def test_a_lone_job_runs_at_its_fair_or_top_speed():
    trace = trace_of([one(steep(), iterations=1000)])
    ends = {a: simulate_trace(trace, servers(), f"fifo:{a}").finish_s[0] for a in ALLOCATORS}
    assert ends == dict.fromkeys(ALLOCATORS, 500.0) | {"fair": 1000.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_every_job_and_records_who_ran(policy):
    trace = small_trace(jobs=14)
    history = simulate_trace(trace, servers(1), policy, rules=Rules(record=True))
    assert history.unfinished == 0
    alone = trace.fair_s / np.where(trace.sensitivity == 0, 2.0, 1.0)
    assert (history.completion_s >= alone - 1e-6).all()
    leases = history.leases
    done = np.bincount(
        leases.job, weights=(leases.end_s - leases.start_s) * leases.speed, minlength=14
    )
    lost = 30.0 * (history.preemptions + history.migrations) * 2
    assert (done >= trace.iterations - 1e-6).all()
    assert (done <= trace.iterations + lost + 1e-6).all()


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("quota", [None, 2])
def test_a_range_of_gpus_beyond_reach_ends_at_what_there_is(allocator, quota):
    job = one(flat(), iterations=600, gpus=64, min_gpus=1, max_gpus=64, tenant="lab")
    rules = Rules(record=True, quotas={} if quota is None else {"lab": quota})
    history = simulate_trace(trace_of([job]), servers(2), f"fifo:{allocator}", rules=rules)
    assert history.unfinished == 0
    assert history.leases.gpus.sum() <= (quota or servers(2).num_gpus)


@pytest.mark.parametrize("policy", ["fifo:joint", "srtf:joint-in-order", "las:joint"])
def test_jobs_with_ranges_keep_the_quota_of_their_tenant(policy):
    jobs = [
        one(flat(), iterations=3000, job_id=i, gpus=2, min_gpus=1, max_gpus=8, tenant="ab"[i % 2])
        for i in range(6)
    ]
    rules = Rules(record=True, quotas={"a": 2})
    leases = simulate_trace(trace_of(jobs), servers(2), policy, rules=rules).leases
    of_a = leases.job % 2 == 0
    for moment in np.unique(leases.start_s):
        held = of_a & (leases.start_s <= moment) & (moment < leases.end_s)
        assert leases.gpus[held].sum() <= 2


def counted(**points):
    """Return a curve that is known for some numbers of GPUs of a type: a100=(4, 8)."""
    kinds = tuple(points)
    rows = [(kinds.index(kind), gpus) for kind, known in points.items() for gpus in known]
    return Sensitivity(
        name="counted",
        iteration_s=1.0,
        gpu_types=kinds,
        gpu_type=np.array([kind for kind, _ in rows]),
        gpus=np.array([gpus for _, gpus in rows]),
        cpus=np.ones(len(rows)),
        memory_bytes=np.full(len(rows), 10e9),
        speed=np.array([float(gpus) for _, gpus in rows]),
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_nobody_runs_on_fewer_gpus_than_are_known(allocator):
    jobs = [
        one(counted(v100=(4, 8)), iterations=900, job_id=i, gpus=8, min_gpus=1, max_gpus=8)
        for i in range(3)
    ]
    there = replace(servers(1), gpu_types=("v100",), gpus=np.array([6]))
    rules = Rules(record=True)
    history = simulate_trace(trace_of(jobs), there, f"fifo:{allocator}", rules=rules)
    assert history.unfinished == 0
    assert set(history.leases.gpus.tolist()) <= {4, 5, 6}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_range_ends_at_the_gpus_of_the_types_that_are_known(allocator):
    job = one(counted(a100=(1, 8)), iterations=900, gpus=8, min_gpus=1, max_gpus=8)
    there = replace(
        servers(2),
        gpu_types=("a100", "v100"),
        gpu_type=np.array([0, 1]),
        gpus=np.array([2, 8]),
    )
    history = simulate_trace(trace_of([job]), there, f"fifo:{allocator}")
    assert history.unfinished == 0


def test_what_no_server_can_run_is_told_with_its_reason():
    there = replace(servers(1), gpu_types=("v100",))
    small = trace_of([one(counted(v100=(4, 8)), iterations=9, gpus=2)])
    with pytest.raises(InfeasibleError, match=r"4 GPUs.*2"):
        simulate_trace(small, there, "fifo:tune")
    share = float((servers(1).memory_bytes / servers(1).gpus)[0])
    hungry = replace(flat("hungry"), memory_bytes=np.array([share + 1e9]))
    with pytest.raises(
        InfeasibleError, match=rf"'hungry' need {format_bytes(share + 1e9)} of memory per GPU"
    ):
        simulate_trace(trace_of([one(hungry, iterations=9)]), servers(1), "fifo:tune")


def test_a_job_beyond_the_quota_of_its_tenant_is_named():
    jobs = [one(flat(), iterations=600, gpus=n, job_id=n, tenant="lab") for n in (1, 3)]
    with pytest.raises(InfeasibleError, match=r"3 needs 3 GPUs.*'lab'.*2"):
        simulate_trace(trace_of(jobs), servers(), "fifo:tune", rules=Rules(quotas={"lab": 2}))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(100, 4000), st.integers(1, 6), st.integers(0, 3000)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from(POLICIES),
)
@settings(max_examples=60)
def test_any_trace_ends_within_what_servers_have(rows, policy):
    kinds = (steep(), flat())
    jobs = [
        Job(job_id=i, sensitivity=kinds[s], iterations=n, gpus=g, arrival_s=float(a))
        for i, (s, n, g, a) in enumerate(rows)
    ]
    history = simulate_trace(trace_of(jobs), servers(2), policy)
    assert history.unfinished == 0
    assert (history.usage.gpus <= 8).all()
    assert (history.usage.cpus <= 24 + 1e-6).all()


def test_rounds_in_which_nothing_changes_are_not_computed():
    trace = trace_of([one(flat(), iterations=30_000)])
    history = simulate_trace(trace, servers(), "las:tune")
    assert (history.rounds, len(history.usage)) == (100, 1)


def test_an_idle_gap_is_waited_through():
    jobs = [one(flat(), iterations=300), one(flat("b"), iterations=300, arrival_s=1e6, job_id=1)]
    history = simulate_trace(trace_of(jobs), servers(), "fifo:fair")
    assert history.unfinished == 0
    released = simulate_trace(trace_of(jobs), servers(), "fifo:fair", simulator="released")
    assert released.unfinished == 1


def test_tune_demotes_along_the_matrix_only_as_far_as_needed():
    jobs = [one(steep(), iterations=9000, job_id=i) for i in range(3)]
    part = jobs[0].sensitivity
    trace = trace_of([replace(job, sensitivity=part) for job in jobs])
    history = simulate_trace(trace, servers(1), "fifo:tune", rules=Rules(record=True))
    first = history.leases.start_s == 0.0
    assert sorted(history.leases.cpus[first]) == [3.0, 3.0, 6.0]
    trace = trace_of([replace(job, sensitivity=part) for job in jobs[:2]])
    roomy = simulate_trace(trace, servers(1, cpus=11.0), "fifo:tune", rules=Rules(record=True))
    assert sorted(roomy.leases.cpus[roomy.leases.start_s == 0.0]) == [5.0, 6.0]


def test_joint_puts_light_jobs_beside_heavy_ones():
    heavy, light = steep(), flat()
    jobs = [one(heavy if i < 4 else light, iterations=9000, job_id=i) for i in range(8)]
    tuned, joint = (
        simulate_trace(trace_of(jobs), servers(2), f"fifo:{a}").completion_s.mean()
        for a in ("tune", "joint")
    )
    assert joint <= tuned


def test_joint_hands_out_spare_cpus():
    jobs = [one(flat(), iterations=9000, job_id=i) for i in range(3)]
    history = simulate_trace(
        trace_of(jobs), servers(1, cpus=13.0), "fifo:joint", rules=Rules(record=True)
    )
    assert sorted(history.leases.cpus) == [4.0, 4.0, 5.0]


def test_a_restart_costs_what_the_job_says_else_the_rules():
    part = steep("slow to start")
    jobs = [
        one(flat(), iterations=6000, gpus=8),
        one(
            replace(part, restart_s=100.0),
            iterations=300,
            gpus=8,
            job_id=1,
            arrival_s=1.0,
            priority=1.0,
        ),
    ]
    history = simulate_trace(trace_of(jobs), servers(), "priority:fair")
    assert history.preemptions.tolist() == [1, 0]
    assert history.finish_s[0] == pytest.approx(300 + 300 + 5700 + 30)
    free = simulate_trace(trace_of(jobs), servers(), "priority:fair", rules=Rules(restart_s=0.0))
    assert free.finish_s[0] == pytest.approx(6300)


def test_a_server_that_fails_loses_the_round_and_its_jobs_go_elsewhere():
    trace = trace_of([one(flat(), iterations=3000)])
    rules = Rules(outages=(Outage(server=0, start_s=950.0, end_s=2000.0),), record=True)
    history = simulate_trace(trace, servers(2), "fifo:fair", rules=rules)
    assert history.leases.server.tolist() == [0, 1]
    assert history.finish_s[0] == pytest.approx(3000 + 300 + 30)
    with pytest.raises(InvalidInputError, match="outage of server 5"):
        simulate_trace(
            trace, servers(2), "fifo:fair", rules=Rules(outages=(Outage(server=5, start_s=1.0),))
        )


def test_quotas_hold_tenants_back():
    jobs = [one(flat(), iterations=300, job_id=i, tenant="a" if i < 4 else "b") for i in range(6)]
    part = flat()
    trace = trace_of([replace(job, sensitivity=part) for job in jobs])
    for allocator in ("fair", "greedy", "tune", "opt", "joint"):
        history = simulate_trace(
            trace, servers(), f"fifo:{allocator}", rules=Rules(quotas={"a": 2})
        )
        assert history.start_s.tolist() == [0.0, 0.0, 300.0, 300.0, 0.0, 0.0]
    with pytest.raises(InvalidInputError, match="quota for tenant 'c'"):
        simulate_trace(trace, servers(), "fifo:fair", rules=Rules(quotas={"c": 1}))


def test_jobs_run_on_the_types_they_name_and_on_the_fastest_of_them():
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        gpu_types=("old", "new"),
        gpu_type=np.array([0, 1]),
        cpus=np.array([1.0, 1.0]),
        memory_bytes=np.array([10e9, 10e9]),
        speed=np.array([1.0, 3.0]),
    )
    jobs = [one(part, iterations=900), one(part, iterations=900, job_id=1, gpu_types=("old",))]
    history = simulate_trace(trace_of(jobs), servers(2, kinds=["old", "new"]), "fifo:joint")
    assert history.finish_s.tolist() == [300.0, 900.0]
    with pytest.raises(InfeasibleError, match="needs 9 GPUs"):
        simulate_trace(
            trace_of([one(part, iterations=9, gpus=9)]),
            servers(2, kinds=["old", "new"]),
            "fifo:fair",
        )


def test_elastic_jobs_grow_into_free_gpus_and_shrink_to_run():
    gpus = np.arange(1, 9)
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        gpus=gpus,
        cpus=np.full(8, 1.0),
        memory_bytes=np.full(8, 10e9),
        speed=gpus / 2.0,
    )
    alone = trace_of([one(part, iterations=1200, gpus=2, min_gpus=1, max_gpus=4)])
    assert simulate_trace(alone, servers(), "fifo:joint").finish_s[0] == 600.0
    assert simulate_trace(alone, servers(), "fifo:tune").finish_s[0] == 1200.0
    short = trace_of([one(part, iterations=1200, gpus=8, min_gpus=1)])
    assert simulate_trace(short, servers(1), "fifo:joint").finish_s[0] == 600.0


def test_a_multi_gpu_job_goes_to_one_server_or_is_split_over_few():
    jobs = [one(flat(), iterations=3000, gpus=3), one(flat("b"), iterations=3000, gpus=4, job_id=1)]
    history = simulate_trace(trace_of(jobs), servers(2), "fifo:tune", rules=Rules(record=True))
    assert len(history.leases) == 2
    wide = trace_of([one(flat(), iterations=3000, gpus=7)])
    history = simulate_trace(wide, servers(2), "fifo:tune", rules=Rules(record=True))
    assert sorted(history.leases.gpus) == [3, 4]


def test_a_job_over_several_servers_loses_what_the_rules_say():
    wide = trace_of([one(flat(), iterations=3000, gpus=7), one(steep(), iterations=300, job_id=1)])
    for loss, end in ((0.0, 3000.0), (0.25, 4000.0)):
        rules = Rules(split_loss={"flat": loss, "steep": 0.5})
        history = simulate_trace(wide, servers(2), "fifo:fair", rules=rules)
        assert history.finish_s.tolist() == pytest.approx([end, 300.0])
    with pytest.raises(InvalidInputError, match=r"split_loss.*'x';.*trace"):
        simulate_trace(wide, servers(2), "fifo:fair", rules=Rules(split_loss={"x": 0.1}))


def test_jobs_that_can_never_run_are_named():
    trace = trace_of([one(flat(), iterations=10, gpus=2)])
    gone = Rules(outages=(Outage(server=0, start_s=0.0, end_s=math.inf),))
    with pytest.raises(InfeasibleError, match=r"1 jobs.*0 s"):
        simulate_trace(trace, servers(1), "fifo:greedy", rules=gone)


def test_a_power_cap_holds_and_choosing_loses_less_than_one_limit():
    share = np.array([1.0, 0.8, 0.6])
    gentle = replace(
        flat("gentle"), frontier_speed=share, frontier_w=np.array([300.0, 150.0, 100.0])
    )
    stiff = replace(flat("stiff"), frontier_speed=share, frontier_w=np.array([300.0, 280.0, 260.0]))
    jobs = [one(gentle if i % 2 else stiff, iterations=9000, job_id=i) for i in range(8)]
    trace = trace_of(jobs)
    free = simulate_trace(trace, servers(), "fifo:fair")
    assert load_of(free).peak_w == 2400.0
    assert metrics_of(free).energy_j == pytest.approx(8 * 300 * 9000)
    held = {}
    for equal in (False, True):
        rules = Rules(power_cap_w=1800.0, equal_clocks=equal)
        history = simulate_trace(trace, servers(), "fifo:fair", rules=rules)
        assert load_of(history).peak_w <= 1800.0
        held[equal] = history.attained_gpu_s.sum()
    assert held[False] < held[True]
    with pytest.raises(InfeasibleError, match="at their slowest"):
        simulate_trace(trace, servers(), "fifo:fair", rules=Rules(power_cap_w=90.0))
    with pytest.raises(InvalidInputError, match="carry no frontier"):
        simulate_trace(small_trace(), servers(), "fifo:fair", rules=Rules(power_cap_w=100.0))


@pytest.mark.parametrize("policy", ["fifo:fair", "srtf:greedy", "fifo:tune", "las:joint"])
def test_a_power_cap_below_what_all_need_lets_jobs_wait(policy):
    share = np.array([1.0, 0.5])
    parts = [
        replace(flat("cool"), frontier_speed=share, frontier_w=np.array([150.0, 100.0])),
        replace(flat("hot"), frontier_speed=share, frontier_w=np.array([500.0, 400.0])),
    ]
    jobs = [one(parts[i % 2], iterations=900, job_id=i) for i in range(8)]
    history = simulate_trace(trace_of(jobs), servers(), policy, rules=Rules(power_cap_w=650.0))
    assert history.unfinished == 0
    assert load_of(history).peak_w <= 650.0
    # One hot job and two cool ones at most are within the cap, or six cool ones.
    assert history.usage.running.max() in (3, 4)
    assert history.usage.running[0] == 3


def test_elastic_jobs_do_not_grow_beyond_a_power_cap():
    gpus = np.arange(1, 9)
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        gpus=gpus,
        cpus=np.full(8, 1.0),
        memory_bytes=np.full(8, 10e9),
        speed=gpus / 2.0,
        frontier_speed=np.array([1.0]),
        frontier_w=np.array([100.0]),
    )
    jobs = [one(part, iterations=900, gpus=2, min_gpus=1, max_gpus=8, job_id=i) for i in range(3)]
    history = simulate_trace(
        trace_of(jobs), servers(), "fifo:joint", rules=Rules(power_cap_w=450.0)
    )
    assert history.unfinished == 0
    assert load_of(history).peak_w <= 450.0


def test_opt_reports_its_gap():
    history = simulate_trace(small_trace(jobs=12), servers(1), "fifo:opt")
    load = load_of(history)
    assert 0 <= load.mean_gap < 0.2
    assert math.isnan(load_of(simulate_trace(small_trace(), servers(1), "fifo:tune")).mean_gap)


def test_metrics_of_all_jobs_of_classes_and_of_a_window():
    history = simulate_trace(small_trace(jobs=8), servers(1), "fifo:fair")
    whole = metrics_of(history)
    assert (whole.jobs, whole.unfinished) == (8, 0)
    assert whole.mean_s == pytest.approx(history.completion_s.mean())
    assert whole.median_s <= whole.p99_s <= whole.max_s <= whole.makespan_s
    assert 0 < whole.fairness <= 1
    assert set(by_kind(history)) == {"image", "language"}
    assert metrics_of(history, jobs=in_window(history, 2, 3)).jobs == 2
    with pytest.raises(InvalidInputError, match="no job"):
        metrics_of(history, jobs=in_window(history, 90, 99))
    load = load_of(history)
    assert 0 < load.gpus <= 1
    times, shares = cdf(history)
    assert (times[-1], shares[-1]) == (whole.max_s, 1.0)


def test_progress_is_told():
    told = []
    simulate_trace(
        small_trace(), servers(), "fifo:fair", progress=lambda done, all_: told.append((done, all_))
    )
    assert told[-1] == (6, 6)


@pytest.mark.parametrize(
    "fields",
    [{"round_s": 0.0}, {"restart_s": 300.0}, {"power_cap_w": 0.0}, {"split_loss": {"x": 1.0}}],
)
def test_rules_that_cannot_be_are_refused(fields):
    with pytest.raises(InvalidInputError, match="expected"):
        Rules(**fields)
    with pytest.raises(InvalidInputError, match="outage"):
        Outage(server=0, start_s=5.0, end_s=5.0)


def test_a_restart_as_long_as_a_round_is_refused():
    slow = replace(flat(), restart_s=300.0)
    trace = trace_of([Job(job_id=0, sensitivity=slow, iterations=10)])
    with pytest.raises(InvalidInputError, match="takes 300 s, a round 300 s"):
        simulate_trace(trace, servers(1), "las:tune")


def test_an_outage_at_the_end_of_a_round_takes_nothing_of_it():
    trace = trace_of([Job(job_id=0, sensitivity=flat(), iterations=1000)])

    def finish(start_s: float) -> float:
        rules = Rules(outages=(Outage(server=0, start_s=start_s, end_s=start_s + 900.0),))
        history = simulate_trace(trace, servers(2, gpus=1), "fifo:tune", rules=rules)
        return float(history.finish_s[0])

    assert finish(600.0) + 300.0 == pytest.approx(finish(601.0))
