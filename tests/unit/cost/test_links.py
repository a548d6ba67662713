"""Seconds of collectives."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import MeasuredCollective
from partita.core.graph import DeviceKind
from partita.core.program import Kind
from partita.cost.links import PASSES, collective_s, fabric_of, group_collective_s
from partita.testing.builders import host_cluster


def test_collectives_of_cpus_are_flat_rings() -> None:
    gpus = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    cpus = replace(
        gpus, devices=tuple(replace(device, kind=DeviceKind.CPU) for device in gpus.devices)
    )
    everyone = np.arange(4)
    assert collective_s(cpus, Kind.ALL_REDUCE, everyone, 1e6) == pytest.approx(2 * 3 / 4)
    assert collective_s(gpus, Kind.ALL_REDUCE, everyone, 1e6) == pytest.approx(1 + 1e-3)


def test_cpus_scatter_straight_to_the_owners() -> None:
    cluster = host_cluster(2, 4, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    cpus = replace(
        cluster, devices=tuple(replace(device, kind=DeviceKind.CPU) for device in cluster.devices)
    )
    # Four ranks of a host send half of what they have over its one port, an eighth to each owner.
    assert collective_s(cpus, Kind.REDUCE_SCATTER, np.arange(8), 1e6) == pytest.approx(2.0)
    assert collective_s(cpus, Kind.ALL_GATHER, np.arange(8), 1e6) == pytest.approx(7 / 8)
    assert collective_s(cpus, Kind.REDUCE_SCATTER, np.array([0, 4]), 1e6) == pytest.approx(0.5)


def bus_gb_s(name: str, kind: Kind, ranks: int, per_host: int, size: float) -> float:
    """Return the bus bandwidth as nccl-tests counts it, in GB/s."""
    fabric = fabric_of(read_shorthand(name, load_catalogue()))
    seconds = float(group_collective_s(fabric, kind, ranks, per_host, size))
    return PASSES[kind] * (ranks - 1) / ranks * size / seconds / 1e9


def test_hosts_with_a_port_for_each_device_use_all_of_them_at_once() -> None:
    cluster = read_shorthand("4xdgx-h200", load_catalogue())
    assert collective_s(cluster, Kind.ALL_REDUCE, np.arange(32), 2**32) == pytest.approx(
        22.8e-3, rel=0.05
    )
    same = read_shorthand("4x8xh100", load_catalogue())
    assert collective_s(same, Kind.ALL_REDUCE, np.arange(32), 2**32) == pytest.approx(
        22.8e-3, rel=0.05
    )


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "per_host", "published"),
    [
        ("dgx-a100", Kind.ALL_REDUCE, 8, 8, 234),
        ("dgx-h100", Kind.ALL_REDUCE, 8, 8, 480),
        ("dgx-h100", Kind.ALL_REDUCE, 4, 4, 363),
        ("dgx-h100", Kind.ALL_GATHER, 8, 8, 361),
        ("dgx-h100", Kind.ALL_TO_ALL, 8, 8, 320),
        ("dgx-b200", Kind.ALL_REDUCE, 8, 8, 840),
        ("dgx-b200", Kind.ALL_REDUCE, 4, 4, 673),
        ("gb200-nvl72", Kind.ALL_TO_ALL, 72, 72, 640),
        ("4xdgx-a100", Kind.ALL_REDUCE, 32, 8, 192),
        ("4xdgx-h100", Kind.ALL_REDUCE, 32, 8, 380),
        ("4xdgx-h100", Kind.ALL_TO_ALL, 32, 8, 48),
        ("8xdgx-h100", Kind.ALL_GATHER, 8, 1, 48),
        ("2x4xl40s", Kind.ALL_REDUCE, 4, 4, 24),
    ],
)
def test_published_bus_bandwidths_of_long_messages(
    name: str, kind: Kind, ranks: int, per_host: int, published: float
) -> None:
    assert bus_gb_s(name, kind, ranks, per_host, 2**34) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("size", [2**20, 2**26, 2**32])
def test_start_up_grows_with_hosts(size: int) -> None:
    rates = [bus_gb_s(f"{h}xdgx-h100", Kind.ALL_REDUCE, 8 * h, 8, size) for h in (4, 64, 512)]
    assert rates == sorted(rates, reverse=True)


def test_many_groups_at_once_cost_what_each_does() -> None:
    cluster = read_shorthand("4xdgx-a100", load_catalogue())
    hosts = np.arange(32).reshape(4, 8)
    groups = [np.arange(8), np.arange(3), hosts[:, 0], hosts[:2, :4].ravel(), np.arange(32)]
    per_host = [8, 3, 1, 4, 8]
    for kind in PASSES:
        for size in (0.0, 1e6, 1e9):
            each = [collective_s(cluster, kind, group, size) for group in groups]
            together = group_collective_s(
                fabric_of(cluster), kind, np.array([len(g) for g in groups]), per_host, size
            )
            assert together == pytest.approx(each)
    assert group_collective_s(fabric_of(cluster), Kind.ALL_REDUCE, 1, 1, 1e9) == 0


def test_a_send_takes_the_innermost_link_that_joins_the_two() -> None:
    fabric = fabric_of(read_shorthand("2xdgx-h100", load_catalogue()))
    inside, across = group_collective_s(fabric, Kind.SEND, 2, np.array([2, 1]), 1e9)
    assert inside == pytest.approx(3.4e-6 + 1e9 / 376e9)
    assert across == pytest.approx(1.4e-5 + 1e9 / 50e9)


def test_groups_of_the_slower_hosts_pay_for_their_ports() -> None:
    cluster = read_shorthand("2xdgx-h100+2xdgx-a100", load_catalogue())
    fast, slow, both = (
        collective_s(cluster, Kind.ALL_REDUCE, np.arange(start, end), 2**32)
        for start, end in ((0, 16), (16, 32), (8, 24))
    )
    assert fast < 0.6 * slow
    assert both == pytest.approx(slow, rel=0.02)


def test_overlapped_collectives_take_compute_units() -> None:
    fabric = fabric_of(read_shorthand("2xdgx-h100", load_catalogue()))
    assert fabric.compute_share(across_hosts=True) == pytest.approx(16 / 132, rel=0.02)
    plain = fabric_of(host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6))
    assert plain.compute_share(across_hosts=True) == 0


def test_links_without_rates_take_their_bandwidths_and_latencies() -> None:
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e9)
    rack = replace(cluster.levels[1], port_per_device=True)
    both_ports = replace(cluster, levels=(cluster.levels[0], rack))
    ring = 2 * 3 / 4 * 1e6 / 1e9
    assert collective_s(cluster, Kind.ALL_REDUCE, np.arange(4), 1e6) == pytest.approx(ring)
    slower = replace(rack, bandwidth_bytes_per_s=np.array([4e8]))
    narrow = replace(both_ports, levels=(cluster.levels[0], slower))
    # Two ports of a host together: 8e8 bytes/s.
    assert collective_s(narrow, Kind.ALL_REDUCE, np.arange(4), 1e6) == pytest.approx(
        2 * 3 / 4 * 1e6 / 8e8
    )


def test_measured_collectives_come_before_the_model() -> None:
    cluster = read_shorthand("2xdgx-h100", load_catalogue())
    host = cluster.levels[0]
    row = MeasuredCollective(
        kind="all_gather", ranks=8, ranks_per_host=8, start_s=1e-3, share=0.5, ramp=0.0
    )
    rates = tuple(replace(part, measured=(row,)) for part in host.collectives if part)
    known = replace(cluster, levels=(replace(host, collectives=rates), cluster.levels[1]))
    expected = 1e-3 + 7 / 8 * 1e9 / 188e9
    assert collective_s(known, Kind.ALL_GATHER, np.arange(8), 1e9) == pytest.approx(expected)
    # Half as many ranks are near enough, two hosts and other collectives are not.
    assert collective_s(known, Kind.ALL_GATHER, np.arange(4), 0.0) == pytest.approx(1e-3)
    for kind, group in ((Kind.ALL_GATHER, np.arange(16)), (Kind.ALL_REDUCE, np.arange(8))):
        assert collective_s(known, kind, group, 1e9) == collective_s(cluster, kind, group, 1e9)
