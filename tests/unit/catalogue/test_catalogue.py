import subprocess
import sys

import pytest

from partita.catalogue.catalogue import (
    Catalogue,
    clock_range,
    load_catalogue,
    make_device,
    read_clocks,
)
from partita.core.graph import DeviceKind
from partita.errors import FormatError, InvalidInputError
from partita.yaml_nodes import parse_yaml

LINK = """
links:
  wire: {bandwidth_bytes_per_s: 1GB/s, latency_s: 2us, sources: {bandwidth_bytes_per_s: a,
    latency_s: b}}
"""
DEVICE = """devices:
  mine:
    kind: gpu
    memory_bytes: 10GB
    link: pcie4
    sources: {memory_bytes: data sheet, link: data sheet}
"""


def test_every_type_of_the_package_has_what_cost_and_energy_need(catalogue: Catalogue):
    for name, kind in catalogue.devices.items():
        assert kind.name == name
        assert kind.memory_bytes > 1e9
        assert kind.peak_flop_per_s["float32"] > 1e11
        assert kind.memory_bytes_per_s > 1e9
        assert 0 < kind.idle_w < kind.max_w
        assert len(kind.clocks_mhz) > 2
        assert kind.host_cpus > 0
        assert kind.host_memory_bytes > 0
        assert kind.host_max_devices > 0
        assert kind.title
        assert catalogue.link_of(kind).bandwidth_bytes_per_s > 1e9
        assert make_device(kind, "host0/gpu0").type == name


def test_a100_is_the_sxm_board_with_80_gb_and_v100_sits_in_synergys_host(catalogue: Catalogue):
    assert catalogue.device_type("A100").title == "NVIDIA A100 SXM4 80 GB"
    assert catalogue.device_type("a100").memory_bytes == 80 * 2**30
    assert catalogue.link_of(catalogue.device_type("a100")).name == "nvlink3"
    v100 = catalogue.device_type("v100")
    assert (v100.host_cpus, v100.host_memory_bytes) == (24, 500e9)


def test_clocks_are_expanded_from_low_to_high(catalogue: Catalogue):
    a100 = catalogue.device_type("a100").clocks_mhz
    assert (len(a100), a100[:2], a100[-1]) == (81, (210, 225), 1410)
    titanxp = catalogue.device_type("titanxp").clocks_mhz
    assert (len(titanxp), titanxp[1], titanxp[-1]) == (141, 151.657, 1911)


def test_a_device_copies_all_figures_of_its_type(catalogue: Catalogue):
    kind = catalogue.device_type("a100")
    device = make_device(kind, "host1/gpu2", host=1)
    assert (device.name, device.host, device.kind, device.type) == (
        *("host1/gpu2", 1, DeviceKind.GPU, "a100"),
    )
    assert device.peak_flop_per_s == kind.peak_flop_per_s
    assert device.memory_bytes_per_s == kind.memory_bytes_per_s
    assert device.clocks_mhz == kind.clocks_mhz
    assert (device.idle_w, device.max_w) == (60, 400)
    assert device.price_per_hour == kind.price_per_hour > 0
    other = make_device(kind, "d", memory_bytes=1e9, speed=2.0, price_per_hour=3.0)
    assert (other.memory_bytes, other.speed, other.price_per_hour) == (1e9, 2.0, 3.0)


def test_an_unknown_name_suggests_near_ones(catalogue: Catalogue):
    with pytest.raises(
        InvalidInputError,
        match=r"'a1000'.*'a100'.*known.*a100",
    ):
        catalogue.device_type("a1000")
    with pytest.raises(InvalidInputError, match=r"'pcie'.*;.*'pcie5'"):
        catalogue.link_type("pcie")
    with pytest.raises(InvalidInputError, match=r"'x'.*catalogue"):
        Catalogue().link_type("x")


def test_a_users_file_adds_and_replaces_whole_entries(catalogue: Catalogue):
    text = DEVICE.replace("mine", "a100").replace("pcie4", "WIRE") + LINK
    mixed = load_catalogue(text)
    assert mixed.device_type("a100").memory_bytes == 10e9
    assert mixed.device_type("a100").clocks_mhz == ()
    assert mixed.link_of(mixed.device_type("a100")).latency_s == 2e-6
    assert mixed.device_type("v100") == catalogue.device_type("v100")
    assert load_catalogue().device_type("a100").memory_bytes == 80 * 2**30


def test_all_optional_figures_of_a_users_device_are_read():
    text = """
devices:
  mine:
    kind: cpu
    memory_bytes: 10GB
    peak_flop_per_s: {float32: 1e12}
    memory_bytes_per_s: 10GB/s
    clocks_mhz: [1000, 1500.5]
    power_w: {max: 100}
    price_per_hour: 0.5
    link: loopback
    host: {cpus: 4}
    sources:
      {memory_bytes: s, peak_flop_per_s.float32: s, memory_bytes_per_s: s, clocks_mhz: s,
       power_w: s, price_per_hour: s, link: s, host: s}
"""
    kind = load_catalogue(text).device_type("mine")
    assert kind.clocks_mhz == (1000, 1500.5)
    assert (kind.idle_w, kind.max_w, kind.price_per_hour) == (0, 100, 0.5)
    assert (kind.host_cpus, kind.host_memory_bytes, kind.host_max_devices) == (4, 0, 0)


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("devices:", "device:", 1, "the catalogue: unknown key 'device'; did you mean 'devices'"),
        ("mine", "Mine", 2, "name 'Mine' in devices; expected a lower-case letter"),
        ("mine", "4x", 2, "name '4x' in devices; expected a lower-case letter"),
        ("kind: gpu", "kind: tpu", 3, "device mine: kind is 'tpu'; expected one of gpu, cpu"),
        ("memory_bytes: 10", "memroy_bytes: 10", 4, "device mine: unknown key 'memroy_bytes'"),
        ("10GB", "0", 4, "device mine: memory_bytes is '0'; expected more than 0 bytes"),
        ("10GB", "inf", 4, "device mine: memory_bytes is 'inf'; expected a number below"),
        ("10GB", "-1", 4, "device mine: memory_bytes '-1' is negative"),
        ("10GB", "9223372036854775808", 4, "device mine: memory_bytes is '9223372036854775808'"),
        ("pcie4", "pcie9", 5, "link 'pcie9' is not in the catalogue; did you mean 'pcie5'"),
        ("link: data sheet", "power_w: x", 6, "device mine: sources: unknown key 'power_w'"),
        (", link: data sheet", "", 5, "device mine: link has no source"),
        ("    link: pcie4\n", "", 3, "device mine: key 'link' is missing"),
        (
            "link: pcie4",
            "link: pcie4\n    price_per_hour: 1",
            6,
            "device mine: price_per_hour has no",
        ),
        (
            "link: pcie4",
            "link: pcie4\n    power_w: {idle: 1}",
            6,
            "device mine: power_w.idle has no",
        ),
        (
            "link: pcie4",
            "link: pcie4\n    host: {cpu: 1}",
            6,
            "device mine: host: unknown key 'cpu'",
        ),
        ("link: pcie4", "link: pcie4\n    clocks_mhz: 5", 6, "device mine: clocks_mhz is '5'"),
        (
            "link: pcie4",
            "link: pcie4\n    peak_flop_per_s: {a: 0}",
            6,
            "device mine: peak_flop_per_s.a",
        ),
    ],
)
def test_a_wrong_users_file_is_an_error_with_its_line(old: str, new: str, line: int, reason: str):
    assert old in DEVICE
    with pytest.raises(FormatError) as caught:
        load_catalogue(DEVICE.replace(old, new, 1))
    assert (caught.value.line, caught.value.reason[: len(reason)]) == (line, reason)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("1GB/s", "0", "link wire: bandwidth is '0'; expected more than 0"),
        ("1GB/s", "fast", "link wire: bandwidth 'fast' is not understood"),
        ("2us", "1e20", "link wire: latency is '1e20'; expected a number below 1e+15"),
        ("latency_s: 2us, ", "", "link wire: key 'latency_s' is missing"),
        ("\n    latency_s: b", "", "link wire: latency_s has no source"),
    ],
)
def test_a_wrong_link_is_an_error_with_its_line(old: str, new: str, reason: str):
    with pytest.raises(FormatError) as caught:
        load_catalogue(LINK.replace(old, new, 1))
    assert caught.value.line == 3
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize(
    "text",
    [
        "{min: 100, max: 205, step: 10}",
        "{min: 200, max: 100, step: 10}",
        "{min: 100, max: 200, step: 1e-3}",
        "{min: 1, max: 1.0001, step: 0.0001}",
        "{min: 100, max: 200}",
        "{min: 100, max: 200, step: 0}",
        "[200, 100]",
        "[100, 100]",
        "[-1]",
        "fast",
    ],
)
def test_clocks_that_are_no_ascending_list_or_range_are_refused(text: str):
    with pytest.raises(FormatError, match="line 1: clocks"):
        read_clocks(parse_yaml(text), "clocks")


def test_a_range_of_clocks_ends_with_its_high_end():
    assert clock_range(100, 100, 10) == (100,)
    assert clock_range(100, 130.1, 10) == (100, 110, 120, 130.1)


def test_importing_the_catalogue_reads_no_file():
    code = (
        "import partita.catalogue.catalogue as c, sys; "
        "assert c._package_catalogue.cache_info().currsize == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
