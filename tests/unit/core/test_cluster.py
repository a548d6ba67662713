import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level, LinkMatrix
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError
from partita.testing.builders import flat_cluster, paired_cluster

NAN, INF = float("nan"), float("inf")


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        make()
    return str(caught.value)


def devices(count: int, **columns: object) -> tuple[Device, ...]:
    return tuple(Device(name=f"d{index}", **columns) for index in range(count))


def level(name: str, groups: list[int], bandwidth: object = 1e9, **more: object) -> Level:
    return Level(name=name, group_of=groups, bandwidth_bytes_per_s=bandwidth, **more)


def racks(*, port_per_device: bool = False) -> Cluster:
    """Return 8 devices: 2 to a host, 2 hosts to a rack, 2 racks."""
    return Cluster(
        devices=devices(8),
        levels=(
            level("host", [0, 0, 1, 1, 2, 2, 3, 3], [80.0, 81.0, 82.0, 83.0], latency_s=1e-6),
            level("rack", [0, 0, 0, 0, 1, 1, 1, 1], [40.0, 41.0], latency_s=[2e-6, 3e-6]),
            level("room", [0] * 8, 10.0, latency_s=5e-6, port_per_device=port_per_device),
        ),
    )


def links(cluster: Cluster, pairs: list[tuple[int, int]]) -> list[tuple[float, ...]]:
    source, target = np.array(pairs).T
    return [tuple(part.item() for part in row) for row in zip(*cluster.links(source, target))]  # noqa: B905 (of one length)


def test_devices_talk_at_the_innermost_level_that_holds_both():
    found = links(racks(), [(0, 1), (3, 2), (0, 2), (5, 6), (1, 7)])
    assert [row[0] for row in found] == [80, 81, 40, 41, 10]
    assert [row[1] for row in found] == [1e-6, 1e-6, 2e-6, 3e-6, 5e-6]
    assert [row[4] for row in found] == [0, 0, 1, 1, 2]


def test_a_level_has_one_port_for_each_of_its_children():
    found = links(racks(), [(0, 1), (1, 0), (0, 2), (1, 3), (0, 4), (3, 7)])
    ports = [row[2:4] for row in found]
    assert ports[0] == ports[1][::-1]
    assert ports[2] == ports[3]
    assert ports[4] == ports[5]
    assert len({port for pair in ports for port in pair}) == 6
    assert max(max(pair) for pair in ports) < racks().num_ports


def test_a_level_may_have_a_port_for_each_device():
    found = links(racks(port_per_device=True), [(0, 4), (1, 4), (3, 7)])
    assert len({row[2] for row in found}) == 3
    assert found[0][3] == found[1][3] != found[2][3]


def test_a_matrix_has_one_link_for_each_ordered_pair():
    bandwidth = np.arange(9.0) + 1
    cluster = Cluster(
        devices=devices(3),
        matrix=LinkMatrix(bandwidth_bytes_per_s=bandwidth.reshape(3, 3), latency_s=bandwidth / 8),
    )
    found = links(cluster, [(0, 1), (1, 0), (2, 1)])
    assert [row[0] for row in found] == [2, 4, 8]
    assert [row[1] for row in found] == [0.25, 0.5, 1.0]
    assert [row[2:] for row in found] == [(1, -1, -1), (3, -1, -1), (7, -1, -1)]
    assert cluster.num_ports == 9


def test_ports_of_groups_do_not_meet_even_where_groups_stand_empty():
    cluster = Cluster(
        hosts=tuple(Host(name=f"h{index}") for index in range(6)),
        devices=(Device(name="a", host=4), Device(name="b", host=5)),
        levels=(level("host", [4, 5]), level("room", [0, 0]), level("site", [0, 0])),
    )
    found = links(cluster, [(0, 1), (1, 0)])
    assert {row[4] for row in found} == {1}
    assert all(0 <= port < cluster.num_ports for row in found for port in row[2:4])


def test_a_bandwidth_may_be_unlimited_and_the_diagonal_of_a_matrix_anything():
    assert flat_cluster(2).levels[0].bandwidth_bytes_per_s.tolist() == [INF]
    matrix = LinkMatrix(bandwidth_bytes_per_s=[NAN, 1.0, INF, 0.0])
    assert len(Cluster(devices=devices(2), matrix=matrix)) == 2


def test_a_cluster_is_frozen_all_the_way_down():
    rates = {"float32": 1e12}
    cluster = dataclasses.replace(
        racks(), devices=devices(8, peak_flop_per_s=rates, clocks_mhz=[1.0, 2.0])
    )
    device = cluster.devices[0]
    rates["float32"] = -1
    assert device.peak_flop_per_s == {"float32": 1e12}
    assert device.clocks_mhz == (1.0, 2.0)
    with pytest.raises(TypeError, match=r"support.*assignment"):
        device.peak_flop_per_s["float32"] = 1
    for owner, name in ((cluster, "name"), (device, "speed"), (cluster.hosts[0], "cpus")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(owner, name, 1)
    for part in (*cluster.levels, paired_cluster(2).matrix):
        for values in (part.bandwidth_bytes_per_s, part.latency_s):
            assert not values.flags.writeable
    assert not cluster.memory_bytes.flags.writeable


def test_devices_are_found_by_name():
    cluster = flat_cluster(3, memory_bytes=5.0)
    assert cluster.device_names == ("d0", "d1", "d2")
    assert cluster.index_of == {"d0": 0, "d1": 1, "d2": 2}
    assert cluster.memory_bytes.tolist() == [5.0] * 3


def test_devices_are_equal_by_value_also_without_a_price():
    first, second = (Device(name="a", peak_flop_per_s={"float16": 1.0}) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, price_per_hour=1.0)
    assert first != dataclasses.replace(first, peak_flop_per_s={})
    assert first != "a"
    assert racks() == racks() != racks(port_per_device=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpus": -1}, "host 'h': cpus is -1; expected 0 or more"),
        ({"memory_bytes": NAN}, "host 'h': memory_bytes is nan; expected 0 or more"),
        ({"memory_bytes": INF}, "host 'h': memory_bytes is inf; expected 0 or more"),
        ({"storage_bytes_per_s": -0.5}, "host 'h': storage_bytes_per_s is -0.5; expected 0 or"),
    ],
)
def test_hosts_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: Host(name="h", **changes)).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0; expected more than 0"),
        ({"memory_bytes": NAN}, "memory_bytes is nan; expected more than 0"),
        ({"speed": 0.0}, "speed is 0.0; expected more than 0, finite"),
        ({"speed": INF}, "speed is inf; expected more than 0, finite"),
        ({"speed": NAN}, "speed is nan; expected more than 0, finite"),
        ({"memory_bytes_per_s": -1.0}, "memory_bytes_per_s is -1.0; expected 0 or more, finite"),
        ({"idle_w": NAN}, "idle_w is nan; expected 0 or more, finite"),
        ({"max_w": INF}, "max_w is inf; expected 0 or more, finite"),
        ({"price_per_hour": -2.0}, "price_per_hour is -2.0; expected 0 or more"),
        ({"peak_flop_per_s": {"int8": 0}}, "peak_flop_per_s of int8 is 0; expected more than 0"),
        ({"clocks_mhz": (2.0, 1.0)}, "clocks_mhz is (2.0, 1.0); expected ascending clocks above 0"),
        ({"clocks_mhz": (0.0,)}, "clocks_mhz is (0.0,); expected ascending clocks above 0"),
        ({"clocks_mhz": (1.0, NAN)}, "clocks_mhz is (1.0, nan); expected ascending clocks above 0"),
        ({"clocks_mhz": (1.0, INF)}, "clocks_mhz is (1.0, inf); expected ascending clocks above 0"),
    ],
)
def test_devices_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: Device(name="gpu0", **changes)).startswith(f"device 'gpu0': {words}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: level("host", [0, 1], [1.0]),
            "level 'host' has 2 groups and 1 bandwidths",
        ),
        (
            lambda: level("host", [0, 1], [1.0, 0.0]),
            "level 'host': bandwidth is 0.0; expected more than 0 bytes/s",
        ),
        (
            lambda: level("host", [0, 0], NAN),
            "level 'host': bandwidth is nan; expected more than 0 bytes/s",
        ),
        (
            lambda: level("host", [0, -1]),
            "group of level 'host' of row 1 is -1; expected 0 to 65535",
        ),
        (
            lambda: level("host", [0, 2**31 - 1]),
            "group of level 'host' of row 1 is 2147483647; expected 0 to 65535",
        ),
        (
            lambda: level("host", [0], latency_s=INF),
            "latency of level 'host' of row 0 is inf; expected 0 to 1e+15",
        ),
        (
            lambda: level("host", [0, 1], latency_s=[1.0]),
            "latency of level 'host' has 1 values for 2 rows",
        ),
        (
            lambda: LinkMatrix(bandwidth_bytes_per_s=[1.0, 2.0]),
            "a link matrix must be square, got 2 values",
        ),
        (
            lambda: LinkMatrix(bandwidth_bytes_per_s=[0, 1, -2.0, 0]),
            "bandwidth from device 1 to 0 is -2.0; expected more than 0 bytes/s",
        ),
        (
            lambda: LinkMatrix(bandwidth_bytes_per_s=[1.0] * 4, latency_s=[0.0, NAN, 0.0, 0.0]),
            "latency of a link of row 1 is nan; expected 0 to 1e+15",
        ),
    ],
)
def test_links_that_cannot_be_are_refused(make, words):
    assert refusal(make) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": ()}, "cluster 'c' has 0 devices; expected 1 to 65536"),
        (
            {"devices": (Device(name="d"),) * (MAX_DEVICES + 1)},
            "cluster 'c' has 65537 devices; expected 1 to 65536",
        ),
        ({"devices": devices(2)[:1] * 2}, "devices: 'd0' stands twice; names must be unique"),
        ({"devices": (Device(name=""),)}, "devices: '' is not a name"),
        ({"hosts": (Host(name="h"),) * 2}, "hosts: 'h' stands twice; names must be unique"),
        ({"devices": devices(2, host=1)}, "device 'd0' is on host 1, not there"),
        ({"devices": devices(2, host=-1)}, "device 'd0' is on host -1, not there"),
        ({"levels": (level("a", [0, 0]),) * 2}, "levels: 'a' stands twice; names must be unique"),
        ({"levels": (level("a", [0, 0, 0]),)}, "level 'a' groups 3 of 2 devices"),
        (
            {"levels": ()},
            "cluster 'c': no link between 'd0' and 'd1'; add a level that joins them, or a "
            "bandwidth",
        ),
        ({"levels": (level("a", [0, 1]),)}, "cluster 'c': no link between 'd0' and 'd1'"),
        (
            {"levels": (level("a", [0, 0]), level("b", [0, 1]))},
            "level 'b' cuts through a group of the level below",
        ),
        (
            {"levels": (), "matrix": LinkMatrix(bandwidth_bytes_per_s=[1.0, 1.0, 0.0, 1.0])},
            "cluster 'c': no link between 'd1' and 'd0'; add a level that joins them, or a "
            "bandwidth",
        ),
        (
            {"levels": (), "matrix": LinkMatrix(bandwidth_bytes_per_s=[1.0, NAN, 1.0, 1.0])},
            "cluster 'c': no link between 'd0' and 'd1'",
        ),
        (
            {"levels": (), "matrix": LinkMatrix(bandwidth_bytes_per_s=np.ones(9))},
            "the matrix joins 3 devices, not 2",
        ),
        (
            {"matrix": LinkMatrix(bandwidth_bytes_per_s=np.ones(4))},
            "a cluster has levels or a matrix of links, not both",
        ),
    ],
)
def test_clusters_that_cannot_be_are_refused(changes, words):
    parts = {"name": "c", "devices": devices(2), "levels": (level("a", [0, 0]),)} | changes
    assert refusal(lambda: Cluster(**parts)).startswith(words)


def test_a_device_alone_needs_no_link():
    alone = Cluster(devices=(Device(name="cpu", kind=DeviceKind.CPU),))
    assert len(alone) == 1
    assert alone.num_ports == 1


def test_a_cluster_of_some_devices_keeps_their_links() -> None:
    cluster = racks().only(["d1", "d4", "d5"])
    assert cluster.device_names == ("d1", "d4", "d5")
    pairs = np.array([0, 0, 1]), np.array([1, 2, 2])
    before = racks().links(np.array([1, 1, 4]), np.array([4, 5, 5]))
    assert cluster.links(*pairs).bandwidth_bytes_per_s.tolist() == (
        before.bandwidth_bytes_per_s.tolist()
    )
    matrix = LinkMatrix(bandwidth_bytes_per_s=np.arange(1.0, 10.0))
    left = Cluster(devices=devices(3), matrix=matrix).only(["d0", "d2"])
    assert left.matrix is not None
    assert left.matrix.bandwidth_bytes_per_s.tolist() == [1.0, 3.0, 7.0, 9.0]
    assert "none of its devices is left" in refusal(lambda: racks().only(["d9"]))
