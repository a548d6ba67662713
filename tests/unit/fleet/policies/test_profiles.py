from dataclasses import replace

import numpy as np
import pytest
from fleet_cluster import servers
from hypothesis import given
from hypothesis import strategies as st

from partita.core.cluster import Cluster, Device, Host
from partita.core.fleet import Job, Sensitivity, trace_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.profiles import build_profiles, speed_at
from partita.fleet.policies.resources import servers_of
from partita.testing.fleet_builders import flat, small_trace, steep


def choices(profiles, row=0):
    begin, end = profiles.first[row], profiles.first[row + 1]
    return list(
        zip(
            profiles.cpus[begin:end],
            profiles.memory_bytes[begin:end],
            profiles.speed[begin:end],
            strict=True,
        )
    )


def test_speed_is_linear_between_points_and_falls_below_them():
    part = steep()
    assert speed_at(part, "", 1, 4.5, 50e9) == pytest.approx(1.5)
    assert speed_at(part, "", 1, 0.5, 50e9) == pytest.approx(1 / 6)
    assert speed_at(part, "", 1, 99, 50e9) == 2.0


def test_memory_counts_by_the_size_below():
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        cpus=np.array([2.0, 2.0]),
        memory_bytes=np.array([50e9, 100e9]),
        speed=np.array([1.0, 3.0]),
    )
    assert [speed_at(part, "", 1, 2, m) for m in (40e9, 50e9, 99e9, 100e9)] == [0.0, 1.0, 1.0, 3.0]


def test_counts_between_those_measured_are_interpolated():
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        gpus=np.array([1, 4]),
        cpus=np.array([1.0, 1.0]),
        memory_bytes=np.array([10e9, 10e9]),
        speed=np.array([1.0, 3.0]),
    )
    assert speed_at(part, "", 2, 1, 10e9) == pytest.approx(1 + 2 / 3)
    assert speed_at(part, "", 8, 1, 10e9) == pytest.approx(3.0)


def test_types_of_gpus_have_their_own_points():
    part = replace(steep(), gpu_types=("a100", "v100"), gpu_type=np.array([0, 0, 1]))
    assert speed_at(part, "a100", 1, 3, 50e9) == 1.0
    assert speed_at(part, "v100", 1, 6, 50e9) == 2.0
    assert speed_at(part, "h100", 1, 6, 50e9) == 0.0


def test_no_choice_is_slower_than_the_fair_share_and_the_floor_is_cheap():
    profiles = build_profiles(small_trace(), servers())
    assert choices(profiles, 0)[0] == (3.0, 50e9, 1.0)
    assert choices(profiles, 0)[-1] == (6.0, 50e9, 2.0)
    assert choices(profiles, 1) == [(1.0, 20e9, 1.0)]
    assert profiles.fair_speed.tolist() == [1.0, 1.0]
    assert profiles.floor.tolist() == [0, profiles.first[1]]


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from([10.0, 50.0, 90.0]), st.floats(0.1, 5)),
        min_size=1,
        max_size=12,
        unique_by=lambda p: p[:2],
    ),
    st.integers(1, 6),
)
def test_choices_are_undominated_ascend_and_are_supported_by_points(points, gpus):
    part = Sensitivity(
        name="x",
        iteration_s=1.0,
        cpus=np.array([p[0] for p in points], dtype=float),
        memory_bytes=np.array([1e9 * p[1] for p in points]),
        speed=np.array([p[2] for p in points]),
    )
    trace = trace_of([Job(job_id=0, sensitivity=part, iterations=1, gpus=gpus)])
    profiles = build_profiles(trace, servers(gpus=4, cpus=12.0, memory_bytes=400e9))
    found = choices(profiles)
    assert [c[2] for c in found] == sorted(c[2] for c in found)
    for a in found:
        assert a[2] == pytest.approx(speed_at(part, "", gpus, a[0], a[1]))
        assert a[2] >= profiles.fair_speed[0] * (1 - 1e-9)
        assert not any(b != a and b[0] <= a[0] and b[1] <= a[1] and b[2] >= a[2] for b in found)
    floor = found[int(profiles.floor[0])]
    assert floor[0] <= 3.0
    assert floor[1] <= 100e9


def test_a_job_for_no_type_of_the_cluster_is_refused():
    part = replace(flat(), gpu_types=("h100",))
    trace = trace_of([Job(job_id=0, sensitivity=part, iterations=1)])
    with pytest.raises(InfeasibleError, match=r"h100;.*a100"):
        build_profiles(trace, servers(1, kinds=["a100"]))


def host_cluster(*kinds, cpus=8):
    return Cluster(
        hosts=(Host(name="h0", cpus=cpus, memory_bytes=64e9), Host(name="idle", cpus=1)),
        devices=tuple(Device(name=f"d{i}", host=0, type=kind) for i, kind in enumerate(kinds)),
    )


def test_hosts_become_servers():
    found = servers_of(host_cluster("a100"))
    assert (found.names, found.gpu_types) == (("h0",), ("a100",))
    assert (found.num_gpus, found.cpus[0], found.memory_bytes[0]) == (1, 8.0, 64e9)
    with pytest.raises(InvalidInputError, match="memory are"):
        servers_of(host_cluster("a100", cpus=0))


def test_servers_that_are_alike_form_a_class():
    found = servers(3, kinds=["a", "b", "a"])
    assert found.classes[0].tolist() == [0, 1, 0]
    assert not found.alike
    assert servers(3).alike
