from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.shorthand import local_cluster, read_shorthand
from partita.core.cluster import Cluster, Device, Host, Level, LinkMatrix
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError

NAMES = st.sampled_from(
    ["a", "b/c", "null", "12", "x y", "é", "🎵", "a: b", "#", "'\"\\", "\n", "no"]
)
TYPES = st.sampled_from(["", "a100", "A100", "own type", "yes"])
SIZES = st.one_of(
    st.floats(1e-3, 2.0**62),
    st.sampled_from([80e9, 2.0**34, 1.0, 1e12, 2.039e12, 3.4e-6, 123456789.0]),
)
RATES = st.one_of(SIZES, st.just(float("inf")))
TIMES = st.one_of(st.floats(0, 1e14), st.sampled_from([0.0, -0.0, 3.4e-6, 5e-6, 1.4e-5, 1e-9]))


@st.composite
def devices(draw: st.DrawFn, name: str, num_hosts: int) -> Device:
    clocks = draw(st.sampled_from([(), (100.0,), (100.0, 115.0, 130.0), (1.0, 2.5, 3.0, 900.25)]))
    return Device(
        name=name,
        host=draw(st.integers(0, num_hosts - 1)),
        kind=draw(st.sampled_from(DeviceKind)),
        type=draw(TYPES),
        memory_bytes=draw(RATES),
        speed=draw(st.floats(1e-6, 1e6)),
        peak_flop_per_s=draw(st.dictionaries(NAMES, st.floats(1, 1e18), max_size=2)),
        memory_bytes_per_s=draw(st.one_of(st.just(0.0), SIZES)),
        clocks_mhz=clocks,
        idle_w=draw(st.sampled_from([0.0, 25.5])),
        max_w=draw(st.sampled_from([0.0, 300.0])),
        price_per_hour=draw(st.sampled_from([float("nan"), 0.0, 2.5])),
    )


@st.composite
def level_tuples(draw: st.DrawFn, size: int, host_of: list[int]) -> tuple[Level, ...]:
    names = draw(st.lists(NAMES | st.just("host"), min_size=1, max_size=3, unique=True))
    inner = list(range(size))
    levels = []
    for name in names[:-1]:
        num_groups = draw(st.integers(1, size))
        outer = [draw(st.integers(0, num_groups - 1)) for _ in range(max(inner) + 1)]
        by_host = not levels and draw(st.booleans())
        inner = host_of if by_host else [outer[group] for group in inner]
        levels.append(draw(one_level(name, inner)))
    return (*levels, draw(one_level(names[-1], [0] * size)))


@st.composite
def one_level(draw: st.DrawFn, name: str, group_of: list[int]) -> Level:
    num_groups = max(group_of) + 1
    return Level(
        name=name,
        group_of=np.array(group_of),
        bandwidth_bytes_per_s=np.array([draw(RATES) for _ in range(num_groups)]),
        latency_s=np.array([draw(TIMES) for _ in range(num_groups)]),
        port_per_device=draw(st.booleans()),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    host_names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    hosts = tuple(
        Host(
            name=name,
            cpus=draw(st.integers(0, 2**31)),
            memory_bytes=draw(st.one_of(st.just(0.0), SIZES)),
            storage_bytes_per_s=draw(st.one_of(st.just(0.0), SIZES)),
        )
        for name in host_names
    )
    names = draw(
        st.lists(NAMES | st.just(f"{host_names[0]}/gpu0"), min_size=1, max_size=4, unique=True)
    )
    parts = tuple(draw(devices(name, len(hosts))) for name in names)
    size = len(parts)
    matrix, levels = None, ()
    if draw(st.booleans()):
        pairs = st.lists(RATES, min_size=size**2, max_size=size**2)
        bandwidth = np.array(draw(pairs)).reshape(size, size)
        if draw(st.booleans()):
            np.fill_diagonal(bandwidth, 0)
        times = draw(st.lists(TIMES, min_size=size**2, max_size=size**2))
        matrix = LinkMatrix(bandwidth_bytes_per_s=bandwidth, latency_s=np.array(times))
    elif size > 1 or draw(st.booleans()):
        levels = draw(level_tuples(size, [part.host for part in parts]))
    return Cluster(name=draw(NAMES), hosts=hosts, devices=parts, levels=levels, matrix=matrix)


def check_round_trip(cluster: Cluster) -> None:
    text = write_cluster_yaml(cluster)
    for catalogue in (Catalogue(), load_catalogue()):
        again = read_cluster_yaml(text, catalogue)
        assert again == cluster
        assert write_cluster_yaml(again) == text
    yaml.safe_load(text)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(clusters())
def test_any_cluster_reads_back_equal_and_writes_the_same_bytes(cluster: Cluster):
    check_round_trip(cluster)


@pytest.mark.parametrize(
    "text",
    [
        "a100",
        "2x8xa100",
        "3x2xa100+1x2xv100+titanxp",
        "4xcpu",
        "2x2xcpu+a40",
        "16x8xh100",
        "2xdgx-h100+2xdgx-a100",
    ],
)
def test_a_shorthand_is_written_as_groups(catalogue: Catalogue, text: str):
    cluster = read_shorthand(text, catalogue)
    written = write_cluster_yaml(cluster)
    assert "\ngroups:\n" in written
    assert "\ndevices:\n" not in written
    check_round_trip(cluster)


def test_local_devices_survive():
    check_round_trip(local_cluster(3, cpus=4, memory_bytes=25e9 / 7))


def test_a_domain_of_many_hosts_reads_back(catalogue: Catalogue):
    check_round_trip(read_shorthand("2xgb200-nvl72", catalogue))


def test_groups_are_written_as_people_would(catalogue: Catalogue):
    cluster = read_shorthand("2x4xa100+1x2xv100", catalogue)
    fast = tuple(
        replace(device, speed=2.0) if device.host == 1 else device for device in cluster.devices
    )
    levels = tuple(replace(level, collectives=()) for level in cluster.levels)
    text = write_cluster_yaml(replace(cluster, devices=fast, levels=levels, name="lab"))
    start = text.index("groups:")
    assert text.startswith("name: lab\ntypes:\n  a100:\n    kind: gpu\n    memory: 80GiB\n")
    assert text[start:] == (
        "groups:\n"
        "  - {type: a100, count: 4, cpus: 128, host_memory: 2TB}\n"
        "  - {type: a100, count: 4, speed: 2, cpus: 128, host_memory: 2TB}\n"
        "  - {type: v100, count: 2, cpus: 24, host_memory: 500GB}\n"
        "levels:\n"
        "  host:\n"
        "    bandwidth: 274GB/s\n"
        f"    latency: {text.split('latency: ')[1].splitlines()[0]}\n"
        "    groups:\n"
        "      host2: {bandwidth: 150GB/s}\n"
        "  rack: {bandwidth: 25GB/s, latency: 14us, port_per_device: true, "
        "port_share: {host2: 0.5}}\n"
    )
    text = write_cluster_yaml(replace(cluster, devices=fast, name="lab"))
    assert "    collectives: {ring: [0.73, 0.81, " in text
    assert "      host2: {bandwidth: 150GB/s, collectives: {ring: [0.1505, " in text


def test_racks_are_written_as_lists_of_hosts(catalogue: Catalogue):
    cluster = read_shorthand("3x2xa100", catalogue)
    rack = Level(
        name="rack",
        group_of=np.array([0, 0, 1, 1, 0, 0]),
        bandwidth_bytes_per_s=np.array([1e9, 2e9]),
    )
    room = replace(cluster.levels[1], name="room")
    cluster = replace(cluster, levels=(cluster.levels[0], rack, room))
    text = write_cluster_yaml(cluster)
    assert "      rack0: {members: [host0, host2]}\n" in text
    assert "      rack1: {members: [host1], bandwidth: 2GB/s}\n" in text
    check_round_trip(cluster)


def test_equal_clusters_give_the_same_bytes():
    def make(zero: float, peaks: dict[str, float]) -> Cluster:
        pair = tuple(Device(name=name, peak_flop_per_s=peaks) for name in "ab")
        level = Level(
            name="net",
            group_of=np.zeros(2),
            bandwidth_bytes_per_s=np.array([1e9]),
            latency_s=np.array([zero]),
        )
        return Cluster(devices=pair, levels=(level,))

    one, two = make(0.0, {"a": 1.0, "b": 2.0}), make(-0.0, {"b": 2.0, "a": 1.0})
    assert one == two
    assert write_cluster_yaml(one) == write_cluster_yaml(two)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(name="a", memory_bytes=2.0**63), "memory is '9223372036854775808'"),
        (Device(name="\ud800"), "not valid YAML"),
        (Device(name="a" * 2000), "not valid YAML"),
        (Device(name="a", price_per_hour=float("inf")), "price_per_hour is 'inf'"),
    ],
)
def test_what_yaml_cannot_hold_is_refused_with_the_reason(device: Device, reason: str):
    with pytest.raises(InvalidInputError, match="YAML") as caught:
        write_cluster_yaml(Cluster(devices=(device,)))
    assert reason in str(caught.value)
    assert str(caught.value).endswith("save it as JSON")


def test_a_matrix_of_more_than_a_megabyte_is_refused():
    size = 240
    rng = np.random.default_rng(0)
    matrix = LinkMatrix(bandwidth_bytes_per_s=rng.uniform(1e9, 2e9, size * size))
    parts = tuple(Device(name=f"d{index}") for index in range(size))
    with pytest.raises(InvalidInputError, match=r"characters;.*1000000"):
        write_cluster_yaml(Cluster(devices=parts, matrix=matrix))
