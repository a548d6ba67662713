from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.catalogue.what_if import what_if
from partita.core.cluster import Cluster, Device, Level, LinkMatrix
from partita.errors import InvalidInputError


def groups(cluster: Cluster) -> list[tuple[str, list[int]]]:
    return [(level.name, level.group_of.tolist()) for level in cluster.levels]


def matrix_cluster() -> Cluster:
    devices = tuple(Device(name=f"d{i}", type=t, memory_bytes=1e9) for i, t in enumerate("aab"))
    bandwidth = np.array([0, 9, 2, 8, 0, 3, 4, 5, 0], dtype=float)
    return Cluster(devices=devices, matrix=LinkMatrix(bandwidth_bytes_per_s=bandwidth))


def test_bandwidth_latency_memory_and_speed_are_scaled(catalogue: Catalogue):
    cluster = read_shorthand("2x2xa100", catalogue)
    faster = what_if(cluster, "bandwidth=2x", catalogue)
    assert [level.bandwidth_bytes_per_s[0] for level in faster.levels] == [5.48e11, 5e10]
    assert faster.levels[0].latency_s.tolist() == cluster.levels[0].latency_s.tolist()
    assert what_if(cluster, "latency=0.5", catalogue).levels[1].latency_s.tolist() == [7e-6]
    assert what_if(cluster, "Memory = .5X", catalogue).memory_bytes.tolist() == [40 * 2**30] * 4
    assert what_if(cluster, "speed=1.5x", catalogue).devices[3].speed == 1.5
    assert faster.name == "2x2xa100 bandwidth=2x"


def test_a_matrix_is_scaled_too(catalogue: Catalogue):
    changed = what_if(matrix_cluster(), "bandwidth=2x", catalogue)
    assert changed.matrix is not None
    assert changed.matrix.bandwidth_bytes_per_s[1] == 18


def test_one_more_device_goes_where_its_like_are_and_there_is_room(catalogue: Catalogue):
    cluster = read_shorthand("4xv100+2x7xa100", catalogue)
    more = what_if(cluster, "+1xa100", catalogue)
    assert more.device_names[-1] == "host1/gpu7"
    assert more.hosts == cluster.hosts
    assert groups(more)[0][1][-1] == 1
    three = what_if(cluster, "+3xA100", catalogue)
    assert three.device_names[-3:] == ("host1/gpu7", "host2/gpu7", "host3/gpu0")
    assert three.levels[0].bandwidth_bytes_per_s.tolist() == [1.5e11, 2.74e11, 2.74e11, 2.74e11]
    assert three.hosts[3] == replace(three.hosts[2], name="host3")


def test_a_new_device_is_like_the_last_of_its_type(catalogue: Catalogue):
    cluster = read_shorthand("2xa100", catalogue)
    slow = replace(cluster.devices[1], speed=0.5, memory_bytes=1e9)
    cluster = replace(cluster, devices=(cluster.devices[0], slow))
    new = what_if(cluster, "+a100", catalogue).devices[-1]
    assert (new.name, new.speed, new.memory_bytes) == ("host0/gpu2", 0.5, 1e9)


def test_a_type_that_is_not_there_comes_on_a_new_host_behind_a_rack(catalogue: Catalogue):
    cluster = what_if(read_shorthand("2xa100", catalogue), "+2xv100", catalogue)
    assert groups(cluster) == [("host", [0, 0, 1, 1]), ("rack", [0, 0, 0, 0])]
    assert cluster.levels[0].bandwidth_bytes_per_s.tolist() == [2.74e11, 1.5e11]
    assert cluster.hosts[1].cpus == 24
    assert cluster == replace(read_shorthand("2xa100+2xv100", catalogue), name=cluster.name)


def test_more_hosts_can_be_asked_for(catalogue: Catalogue):
    cluster = what_if(read_shorthand("2xrtx3090", catalogue), "+2x2xrtx3090", catalogue)
    assert cluster == replace(read_shorthand("3x2xrtx3090", catalogue), name=cluster.name)


def test_names_that_are_taken_are_passed_over(catalogue: Catalogue):
    cluster = read_shorthand("2xa100+1xv100", catalogue)
    hosts = (replace(cluster.hosts[0], name="host2"), cluster.hosts[1])
    devices = (replace(cluster.devices[0], name="host2/gpu2"), *cluster.devices[1:])
    cluster = replace(cluster, hosts=hosts, devices=devices)
    assert what_if(cluster, "+1xa100", catalogue).devices[-1].name == "host2/gpu3"
    assert what_if(cluster, "+1x1xa100", catalogue).devices[-1].name == "host3/gpu0"


def test_levels_inside_a_host_get_new_groups_and_flat_ones_do_not(catalogue: Catalogue):
    base = read_shorthand("4xa100", catalogue)
    socket = Level(
        name="socket", group_of=np.array([0, 0, 1, 1]), bandwidth_bytes_per_s=np.array([4e9, 5e9])
    )
    two = what_if(replace(base, levels=(socket, *base.levels)), "+1x2xa100", catalogue)
    assert groups(two) == [
        ("socket", [0, 0, 1, 1, 2, 2]),
        ("host", [0, 0, 0, 0, 1, 1]),
        ("rack", [0] * 6),
    ]
    assert two.levels[0].bandwidth_bytes_per_s.tolist() == [4e9, 5e9, 5e9]
    flat = Level(name="net", group_of=np.zeros(4), bandwidth_bytes_per_s=np.array([1e9]))
    assert groups(what_if(replace(base, levels=(flat,)), "+1xv100", catalogue)) == [
        ("net", [0] * 5)
    ]


def test_a_device_without_links_gets_the_usual_ones(catalogue: Catalogue):
    one = replace(read_shorthand("a100", catalogue), levels=())
    assert groups(what_if(one, "+1xa100", catalogue)) == [("host", [0, 0])]
    strange = Cluster(devices=(Device(name="x", type="b100"),))
    with pytest.raises(InvalidInputError, match="'b100'"):
        what_if(strange, "+1xb100", catalogue)


def test_a_type_beyond_the_catalogue_can_be_repeated(catalogue: Catalogue):
    base = read_shorthand("2xa100", catalogue)
    own = tuple(replace(device, type="B100") for device in base.devices)
    more = what_if(replace(base, devices=own), "+20xb100", catalogue)
    assert (len(more), len(more.hosts)) == (22, 1)


def test_in_a_matrix_a_new_device_has_the_links_of_its_like(catalogue: Catalogue):
    more = what_if(matrix_cluster(), "+1xa", catalogue)
    assert more.matrix is not None
    assert more.matrix.bandwidth_bytes_per_s.reshape(4, 4).tolist() == [
        [0, 9, 2, 9],
        [8, 0, 3, 8],
        [4, 5, 0, 5],
        [8, 8, 3, 8],
    ]
    assert more.device_names[-1] == "host0/gpu3"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", "what if '' is not understood; expected \\+COUNTxTYPE"),
        ("bandwith=2x", "is not understood"),
        ("bandwidth=-2x", "is not understood"),
        ("bandwidth=0x", "is 0; expected more than 0, finite, such as 2x"),
        ("memory=1e999x", "is inf; expected more than 0, finite"),
        ("+", "is not understood; write it like 8xa100"),
        ("+1xa100+1xv100", "expected one type of device"),
        ("+1xa1000", "did you mean 'a100'"),
        ("+65536xa100", "more than 65536 devices"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(catalogue: Catalogue, change: str, reason: str):
    with pytest.raises(InvalidInputError, match=reason):
        what_if(read_shorthand("2xa100", catalogue), change, catalogue)


def test_a_matrix_says_nothing_of_another_type(catalogue: Catalogue):
    with pytest.raises(InvalidInputError, match=r"nothing.*'a100'"):
        what_if(matrix_cluster(), "+1xa100", catalogue)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["a100", "v100", "cpu", "t4"]), min_size=1, max_size=3),
    st.lists(st.sampled_from(["a100", "v100", "cpu", "t4"]), min_size=1, max_size=3),
    st.integers(1, 20),
    st.booleans(),
)
def test_additions_are_valid_clusters_with_so_many_more(
    old: list[str], new: list[str], count: int, hosts: bool
):
    catalogue = load_catalogue()
    cluster = read_shorthand("+".join(f"2x3x{kind}" for kind in old), catalogue)
    for kind in new:
        before = len(cluster)
        cluster = what_if(cluster, f"+2x{count}x{kind}" if hosts else f"+{count}x{kind}", catalogue)
        assert len(cluster) - before == (2 * count if hosts else count)
        assert {device.type for device in cluster.devices[before:]} == {kind}


def test_machines_can_be_added(catalogue: Catalogue):
    more = what_if(read_shorthand("dgx-h100", catalogue), "+2xdgx-h100", catalogue)
    assert (len(more), len(more.hosts)) == (24, 3)
    assert more.levels == read_shorthand("3xdgx-h100", catalogue).levels


def test_devices_are_left_out_by_name_or_pattern(catalogue: Catalogue):
    cluster = read_shorthand("2x2xa100", catalogue)
    fewer = what_if(cluster, "-host0/gpu1", catalogue)
    assert fewer.device_names == ("host0/gpu0", "host1/gpu0", "host1/gpu1")
    assert fewer.levels[0].group_of.tolist() == [0, 1, 1]
    assert what_if(cluster, "-host1/*", catalogue).device_names == ("host0/gpu0", "host0/gpu1")
    left = what_if(matrix_cluster(), "-d1", catalogue)
    assert left.matrix is not None
    assert left.matrix.bandwidth_bytes_per_s.tolist() == [0, 2, 4, 0]
    with pytest.raises(InvalidInputError, match=r"no.*cluster has"):
        what_if(cluster, "-host7/gpu1", catalogue)
    with pytest.raises(InvalidInputError, match=r"every.*cluster"):
        what_if(cluster, "-*", catalogue)
