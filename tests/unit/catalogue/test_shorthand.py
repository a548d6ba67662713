import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.shorthand import (
    EXAMPLES,
    GRAMMAR,
    HostGroup,
    local_cluster,
    parse_shorthand,
    read_shorthand,
    write_shorthand,
)
from partita.core.cluster import MAX_DEVICES
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError, PartitaError

GROUPS = st.lists(
    st.builds(
        HostGroup,
        type=st.sampled_from(sorted(load_catalogue().devices)),
        num_hosts=st.integers(1, 9),
        num_devices=st.integers(1, 16),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("a100", [("a100", 1, 1)]),
        ("4xa100", [("a100", 1, 4)]),
        ("2X4xA100", [("a100", 2, 4)]),
        (" 2x4xa100 + 1x2xv100 ", [("a100", 2, 4), ("v100", 1, 2)]),
        ("8xcpu", [("cpu", 1, 8)]),
        ("2xrtx3090", [("rtx3090", 1, 2)]),
        ("3x2xa100-pcie-40gb", [("a100-pcie-40gb", 3, 2)]),
    ],
)
def test_a_shorthand_is_read_as_groups(text: str, groups: list[tuple[str, int, int]]):
    expected = [HostGroup(type=t, num_hosts=h, num_devices=d) for t, h, d in groups]
    assert parse_shorthand(text) == tuple(expected)


@pytest.mark.parametrize(
    "text",
    ["", "+", "4x", "1x2x3xa100", "a100+", "4 a100", "-1xa100", "4xa100,v100", "a100\n!", "٤xa100"],
)
def test_a_bad_shorthand_is_one_line_with_examples_that_are_right(text: str):
    with pytest.raises(InvalidInputError) as caught:
        parse_shorthand(text)
    assert "is not understood" in str(caught.value)
    assert all(example in str(caught.value) for example in EXAMPLES)
    for example in EXAMPLES:
        parse_shorthand(example.partition(" ")[0])
    assert "\n" not in str(caught.value)


def test_the_grammar_stands_in_the_documents_too():
    path = Path(__file__).parents[3] / "docs" / "clusters.md"
    text = path.read_text(encoding="utf-8")
    assert "\n".join(GRAMMAR) in text


@pytest.mark.parametrize(
    "text", ["0xa100", "2x0xa100", "65537xa100", "60000xa100+6000xa100", f"{'9' * 5000}xa100"]
)
def test_no_devices_or_too_many_are_refused(text: str):
    with pytest.raises(InvalidInputError, match=f"expected 1 to {MAX_DEVICES} devices"):
        parse_shorthand(text)


def test_one_host_has_one_level_with_the_link_of_its_type(catalogue: Catalogue):
    cluster = read_shorthand("4xa100", catalogue)
    assert cluster.name == "4xa100"
    assert cluster.device_names == ("host0/gpu0", "host0/gpu1", "host0/gpu2", "host0/gpu3")
    assert [level.name for level in cluster.levels] == ["host"]
    assert cluster.levels[0].bandwidth_bytes_per_s.tolist() == [2.74e11]
    assert (cluster.hosts[0].cpus, cluster.hosts[0].memory_bytes) == (128, 2e12)


def test_mixed_hosts_have_each_their_bandwidth_and_a_rack_between_them(catalogue: Catalogue):
    cluster = read_shorthand("2x4xA100+1x2xv100", catalogue)
    host, rack = cluster.levels
    assert len(cluster) == 10
    assert cluster.device_names[-1] == "host2/gpu1"
    assert [device.type for device in cluster.devices] == ["a100"] * 8 + ["v100"] * 2
    assert host.group_of.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert host.bandwidth_bytes_per_s.tolist() == [2.74e11, 2.74e11, 1.5e11]
    assert (rack.name, rack.bandwidth_bytes_per_s.tolist()) == ("rack", [2.5e10])


def test_devices_of_a_datacentre_type_have_a_port_each(catalogue: Catalogue):
    rack = read_shorthand("4x8xh100", catalogue).levels[1]
    assert rack.port_per_device
    assert rack.bandwidth_bytes_per_s.tolist() == [5e10]
    assert not read_shorthand("4x8xl40s", catalogue).levels[1].port_per_device


def test_machines_have_their_devices_ports_and_prices(catalogue: Catalogue):
    four = read_shorthand("4xDGX-H100", catalogue)
    assert (four.name, len(four), len(four.hosts)) == ("4xdgx-h100", 32, 4)
    assert four.levels == read_shorthand("4x8xh100", catalogue).levels
    cloud = read_shorthand("2xp4d", catalogue)
    assert cloud.levels[1].bandwidth_bytes_per_s.tolist() == [4 * 1.25e10 / 8]
    assert cloud.devices[0].price_per_hour == pytest.approx(21.96 / 8)


def test_a_rack_of_many_hosts_is_one_domain(catalogue: Catalogue):
    two = read_shorthand("2xgb200-nvl72", catalogue)
    assert (len(two), len(two.hosts)) == (144, 36)
    assert [level.name for level in two.levels] == ["nvlink", "rack"]
    assert np.bincount(two.levels[0].group_of).tolist() == [72, 72]
    assert len(read_shorthand("gb200-nvl72", catalogue).levels) == 1


def test_machines_of_two_generations_have_each_their_ports(catalogue: Catalogue):
    mixed = read_shorthand("2xdgx-h100+2xdgx-a100", catalogue)
    rates = mixed.links(np.array([0, 0, 16]), np.array([8, 16, 24])).bandwidth_bytes_per_s
    assert rates.tolist() == [5e10, 2.5e10, 2.5e10]
    one_port = read_shorthand("dgx-h100+8xl40s", catalogue).levels[1]
    assert one_port.port_share.tolist() == [1.0] * 8 + [2.5e10 / 8 / 5e10] * 8


def test_a_machine_takes_one_count(catalogue: Catalogue):
    with pytest.raises(InvalidInputError, match=r"such as 16xdgx-h100"):
        read_shorthand("2x8xdgx-h100", catalogue)


def test_cpu_hosts_are_joined_by_loopback_inside_and_ethernet_between(catalogue: Catalogue):
    one = read_shorthand("8xcpu", catalogue)
    assert one.device_names[7] == "host0/cpu7"
    assert one.devices[0].kind is DeviceKind.CPU
    loopback = catalogue.link_type("loopback").bandwidth_bytes_per_s
    assert one.levels[0].bandwidth_bytes_per_s.tolist() == [loopback]
    for text in ("2x4xcpu", "4xa100+4xcpu"):
        rack = read_shorthand(text, catalogue).levels[1]
        ethernet = catalogue.link_type("ethernet-10g")
        assert rack.bandwidth_bytes_per_s.tolist() == [ethernet.bandwidth_bytes_per_s]


def test_an_unknown_type_suggests_near_ones(catalogue: Catalogue):
    with pytest.raises(InvalidInputError, match=r"'h1000'.*did.*'h100'"):
        read_shorthand("4xh1000", catalogue)


@settings(derandomize=True, deadline=None)
@given(GROUPS)
def test_groups_survive_being_written_and_read(groups: list[HostGroup]):
    assert parse_shorthand(write_shorthand(groups)) == tuple(groups)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(GROUPS)
def test_a_cluster_has_the_devices_that_its_name_says(groups: list[HostGroup]):
    catalogue = load_catalogue()
    cluster = read_shorthand(write_shorthand(groups), catalogue)
    assert cluster.name == write_shorthand(groups)
    assert len(cluster) == sum(group.num_hosts * group.num_devices for group in groups)
    assert len(cluster.hosts) == sum(group.num_hosts for group in groups)
    assert read_shorthand(cluster.name.upper(), catalogue) == cluster


@settings(derandomize=True, deadline=None)
@given(st.text(alphabet="0123456789xa+v-. cpu", max_size=20))
def test_any_text_gives_a_cluster_or_one_of_our_errors(text: str):
    if len(text) > 12 and any(c.isdigit() for c in text):
        text = text[:12]
    try:
        groups = parse_shorthand(text)
    except PartitaError:
        return
    assert parse_shorthand(write_shorthand(groups)) == groups


def test_local_devices_share_the_memory_of_the_machine(catalogue: Catalogue):
    cluster = local_cluster(4, catalogue, cpus=4, memory_bytes=24e9)
    assert cluster.name == "4xcpu"
    assert cluster.device_names == ("host0/cpu0", "host0/cpu1", "host0/cpu2", "host0/cpu3")
    assert cluster.memory_bytes.tolist() == [6e9] * 4
    assert {device.type for device in cluster.devices} == {"cpu"}
    assert (cluster.hosts[0].cpus, cluster.hosts[0].memory_bytes) == (4, 24e9)
    assert [level.name for level in cluster.levels] == ["host"]
    loopback = catalogue.link_type("loopback")
    assert cluster.levels[0].latency_s.tolist() == [loopback.latency_s]


def test_local_devices_ask_the_system_and_the_package():
    cluster = local_cluster(1)
    assert cluster.hosts[0].cpus >= 1
    assert cluster.hosts[0].memory_bytes > 1e6


def test_more_local_devices_than_cores_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        local_cluster(2, cpus=2, memory_bytes=1e9)
        assert not caplog.records
        local_cluster(3, cpus=2, memory_bytes=1e9)
    assert "3 CPU processes share 2 cores" in caplog.text


@pytest.mark.parametrize("num_devices", [0, -1, 17])
def test_local_devices_are_one_to_sixteen(num_devices: int):
    with pytest.raises(InvalidInputError, match=r"expected 1 to 16"):
        local_cluster(num_devices)
