"""From records of ranks to a cluster."""

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.gpu_names import gpu_type
from partita.errors import FormatError, InvalidInputError
from partita.formats.dynamicml import read_speed_matrix, write_speed_matrix
from partita.profiler.calibrate.calibrate import calibrate, speed_cluster
from partita.profiler.calibrate.records import (
    SIZES_BYTES,
    DeviceRecord,
    LinkRecord,
    Measurement,
    MeasureOptions,
    ReduceRecord,
    read_device_record,
    read_link_record,
    read_measurement,
    write_measurement,
    write_record,
)


def device(rank, host, *, flops=40e9, kind="cpu", title=""):
    return DeviceRecord(
        rank=rank,
        host=host,
        kind=kind,
        title=title,
        threads=1,
        memory_bytes=16e9,
        host_cpus=8,
        host_memory_bytes=16e9,
        flop_per_s={"float32": flops},
        memory_bytes_per_s=9e9,
    )


def link(source, target, latency_s, rate):
    trips = tuple((2 * latency_s + size / rate,) * 3 for size in SIZES_BYTES)
    return LinkRecord(source=source, target=target, sizes_bytes=SIZES_BYTES, round_trips_s=trips)


def two_hosts(flops=(40e9, 41e9, 39e9, 40e9)):
    devices = tuple(device(r, "ab"[r // 2], flops=flops[r]) for r in range(4))
    links = tuple(
        link(a, b, *((5e-5, 4e9) if a // 2 == b // 2 else (5e-3, 1e8)))
        for a in range(4)
        for b in range(4)
        if a != b
    )
    reduction = ReduceRecord(
        num_ranks=4,
        sizes_bytes=(64, 2**20, 2**22),
        seconds=((0.02,), (0.02 + 2**20 / 5e7,), (0.02 + 2**22 / 5e7,)),
    )
    return Measurement(backend="gloo", devices=devices, links=links, reductions=(reduction,))


def test_two_hosts_become_two_levels():
    found = calibrate(two_hosts())
    cluster = found.cluster
    assert cluster.device_names == ("host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1")
    host, rack = cluster.levels
    assert host.latency_s == pytest.approx(5e-5, rel=0.01)
    assert host.bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.01)
    assert rack.latency_s == pytest.approx(5e-3, rel=0.01)
    assert rack.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert cluster.devices[0].memory_bytes == 8e9
    assert cluster.hosts[1].cpus == 8
    assert found.hosts == ("a", "b")


def test_the_cluster_reads_back_from_its_yaml():
    cluster = calibrate(two_hosts()).cluster
    assert read_cluster_yaml(write_cluster_yaml(cluster), load_catalogue()) == cluster


def test_devices_of_like_speed_share_the_figure_of_their_type():
    devices = calibrate(two_hosts()).cluster.devices
    assert {d.speed for d in devices} == {1.0}
    assert {d.peak_flop_per_s["float32"] for d in devices} == {40e9}


def test_a_slow_device_has_a_speed_of_its_own_and_the_peak_of_its_type():
    devices = calibrate(two_hosts((40e9, 40e9, 40e9, 20e9))).cluster.devices
    assert [d.speed for d in devices] == [1, 1, 1, 0.5]
    assert {d.peak_flop_per_s["float32"] for d in devices} == {40e9}


def test_reductions_are_fitted_and_given_as_a_ring_too():
    (row,) = calibrate(two_hosts()).reductions
    assert row.fit.latency_s == pytest.approx(0.02, rel=0.01)
    assert row.bus_bytes_per_s == pytest.approx(5e7 * 2 * 3 / 4, rel=0.01)


def test_a_matrix_can_be_kept():
    cluster = calibrate(two_hosts(), keep_matrix=True).cluster
    assert cluster.levels == ()
    assert cluster.matrix.bandwidth_bytes_per_s.reshape(4, 4)[0, 2] == pytest.approx(1e8, rel=0.01)
    assert read_cluster_yaml(write_cluster_yaml(cluster), load_catalogue()) == cluster


def test_the_speed_matrix_costs_what_links_are_slower_than_the_fastest():
    found = calibrate(two_hosts())
    back = read_speed_matrix(write_speed_matrix(speed_cluster(found)))
    cost = back.matrix.latency_s.reshape(4, 4)
    fast, slow = 5e-5 + 2**22 / 4e9, 5e-3 + 2**22 / 1e8
    assert cost[0, 1] == pytest.approx(0, abs=1e-6)
    assert cost[0, 2] == pytest.approx(1 - fast / slow, rel=0.01)


def test_one_device_needs_no_links():
    found = calibrate(Measurement(backend="gloo", devices=(device(0, "a"),)))
    assert found.cluster.levels == ()
    assert write_cluster_yaml(found.cluster)


def test_a_link_that_was_not_measured_is_named():
    whole = two_hosts()
    part = Measurement(backend="gloo", devices=whole.devices, links=whole.links[1:])
    with pytest.raises(InvalidInputError, match=r"0.*1.*measured"):
        calibrate(part)


def test_links_without_short_messages_are_refused():
    record = LinkRecord(source=0, target=1, sizes_bytes=(4096,), round_trips_s=((1.0,),))
    devices = (device(0, "a"), device(1, "a"))
    with pytest.raises(InvalidInputError, match=r"1024 bytes.*less"):
        calibrate(Measurement(backend="gloo", devices=devices, links=(record,)))


def test_ranks_must_be_complete():
    with pytest.raises(InvalidInputError, match="ranks 0, 1"):
        calibrate(Measurement(backend="gloo", devices=(device(1, "a"),)))


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2080", "rtx2080"),
        ("NVIDIA RTX A4000", ""),
    ],
)
def test_gpus_are_found_in_the_catalogue_by_their_own_names(title, name):
    assert gpu_type(title, load_catalogue()) == name


def test_an_unknown_gpu_keeps_no_type():
    record = device(0, "a", kind="gpu", title="Acme Xpu")
    (found,) = calibrate(Measurement(backend="nccl", devices=(record,))).cluster.devices
    assert (found.name, found.type, found.memory_bytes) == ("host0/gpu0", "", 16e9)


def test_records_survive_json():
    whole = two_hosts()
    assert read_measurement(write_measurement(whole)) == whole
    assert read_device_record(write_record(whole.devices[0])) == whole.devices[0]
    assert read_link_record(write_record(whole.links[0])) == whole.links[0]


@pytest.mark.parametrize("read", [read_measurement, read_device_record, read_link_record])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"backend": 1, "devices": 2}'])
def test_other_texts_are_not_records(read, text):
    with pytest.raises(FormatError, match="not understood"):
        read(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes_bytes": ()}, "sizes_bytes"),
        ({"sizes_bytes": (64, 64)}, "ascending"),
        ({"sizes_bytes": (64,)}, "ends with 64"),
        ({"sizes_bytes": (64, 2**31)}, "ends with"),
        ({"limit_s": 0}, "limit_s is 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        MeasureOptions(**options)


def test_the_budget_is_divided_among_pairs():
    assert MeasureOptions(budget_s=60).pair_budget_s(2) == 2.0
    assert MeasureOptions(budget_s=60).pair_budget_s(16) == 0.25
