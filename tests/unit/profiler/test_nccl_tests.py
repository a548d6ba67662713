"""Outputs of nccl-tests, read into a cluster."""

import re

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.catalogue.cluster_yaml.writer import write_cluster_yaml
from partita.catalogue.shorthand import read_shorthand
from partita.core.program import Kind
from partita.cost.links import PASSES, collective_s, transfer_s
from partita.errors import FormatError, InvalidInputError
from partita.profiler.calibrate.calibrate import calibration_of_tests
from partita.profiler.calibrate.fit import fit_collective
from partita.profiler.calibrate.nccl_tests import read_nccl_tests

HEAD = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong\n"
)
SIZES = [2**k for k in range(12, 35, 2)]


def output(
    ranks: int = 8,
    hosts: int = 1,
    *,
    start_s: float = 3e-5,
    rate: float = 400e9,
    passes: float = 2.0,
    said: str = "",
    title: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """Return what nccl-tests prints of a collective with a start-up and a rate."""
    lines = [f"# Collective test starting: {said}_perf" if said else "# nThread 1 nGpus 1"]
    for rank in range(ranks):
        host = rank * hosts // ranks
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid   {900 + rank} on  node-{host} device {rank % 8:2d} "
            f"[0000:{rank:02d}:00] {title}"
        )
    rows = []
    for size in SIZES:
        us = (start_s + passes * (ranks - 1) / ranks * size / rate) * 1e6
        figures = f"{us:10.2f} {size / us / 1e3:7.2f} {0.0:7.2f}      0"
        rows.append(f"{size:12d} {size // 4:12d}     float     sum      -1 {figures} {figures}")
    return "\n".join([*lines, HEAD + "\n".join(rows), "# Out of bounds values : 0 OK"])


@pytest.mark.parametrize(
    ("said", "path", "kind"),
    [
        ("all_reduce", "", "all_reduce"),
        ("alltoall", "all_reduce.txt", "all_to_all"),
        ("", "runs/all-gather_8.log", "all_gather"),
        ("", "reduce_scatter_perf.out", "reduce_scatter"),
        ("", "sendrecv.txt", "send_recv"),
    ],
)
def test_the_text_or_the_file_says_which_collective_it_is(said: str, path: str, kind: str):
    record = read_nccl_tests(output(said=said), path=path).record
    assert (record.kind, record.num_ranks, record.ranks_per_host) == (kind, 8, 8)
    assert record.sizes_bytes == tuple(SIZES)
    assert all(len(times) == 2 for times in record.seconds)


def test_rows_without_operation_and_root_are_understood():
    text = output(said="all_gather").replace("   redop    root", "").replace("     sum      -1", "")
    again = read_nccl_tests(text)
    assert again.record.seconds == read_nccl_tests(output(said="all_gather")).record.seconds
    once = "\n".join(
        line.rsplit(maxsplit=4)[0] if line[:1] == " " else line
        for line in output(said="broadcast").splitlines()
    )
    assert all(len(times) == 1 for times in read_nccl_tests(once).record.seconds)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing", "0 lines that name a rank"),
        (output(), "does not say which collective"),
        (output(said="all_reduce").split(HEAD)[0], "0 sizes with times"),
        (re.sub(r"-1 +[0-9.]+", "-1 fast", output(said="all_reduce"), count=1), "'fast' is no"),
    ],
)
def test_other_texts_are_refused(text: str, reason: str):
    with pytest.raises(FormatError, match=reason):
        read_nccl_tests(text, path="out.txt")


def test_collectives_of_a_cluster_are_those_that_were_measured():
    tests = [
        read_nccl_tests(output(said="all_reduce", rate=300e9)),
        read_nccl_tests(output(16, 2, said="all_reduce", rate=200e9, start_s=2e-4)),
        read_nccl_tests(output(16, 2, said="alltoall", rate=40e9, passes=1.0)),
    ]
    found = calibration_of_tests(tests, name="mine")
    cluster = found.cluster
    assert (cluster.name, len(cluster), len(cluster.hosts)) == ("mine", 16, 2)
    assert {device.type for device in cluster.devices} == {"h100"}
    for kind, ranks, start_s, rate in (
        (Kind.ALL_REDUCE, 8, 3e-5, 300e9),
        (Kind.ALL_REDUCE, 16, 2e-4, 200e9),
        (Kind.ALL_TO_ALL, 16, 3e-5, 40e9),
    ):
        expected = start_s + PASSES[kind] * (ranks - 1) / ranks * 2**28 / rate
        seconds = collective_s(cluster, kind, np.arange(ranks), 2**28)
        assert seconds == pytest.approx(expected, rel=0.01)
    assert read_cluster_yaml(write_cluster_yaml(cluster), load_catalogue()) == cluster
    assert [row["kind"] for row in found.to_json()["all_reduce"]] == [
        *("all_reduce", "all_reduce", "all_to_all")
    ]


def test_transfers_set_the_bandwidth_and_leave_collectives_as_they_were():
    known = read_shorthand("2xdgx-h100", load_catalogue())
    test = read_nccl_tests(output(said="sendrecv", rate=300e9, passes=8 / 7))
    cluster = calibration_of_tests([test], cluster=known).cluster
    pair = np.array([0]), np.array([1]), np.array([1e9])
    assert transfer_s(cluster, *pair) == pytest.approx(3.4e-6 + 1e9 / 300e9, rel=0.01)
    for kind in PASSES:
        before = collective_s(known, kind, np.arange(8), 1e9)
        assert collective_s(cluster, kind, np.arange(8), 1e9) == pytest.approx(before, rel=0.01)


def test_a_cluster_that_does_not_fit_the_tests_is_refused():
    test = read_nccl_tests(output(16, 2, said="all_reduce"))
    with pytest.raises(InvalidInputError, match="16 ranks"):
        calibration_of_tests([test], cluster=read_shorthand("dgx-h100", load_catalogue()))
    odd = read_nccl_tests(output(said="all_reduce", title="Some Other GPU"))
    with pytest.raises(InvalidInputError, match=r"no type.*catalogue"):
        calibration_of_tests([odd])


@pytest.mark.parametrize("ramp", [0.0, 0.4])
def test_a_curve_is_found_again(ramp: float):
    part = np.array(SIZES) / 3e11
    times = 5e-5 + part + 2 * ramp * np.sqrt(5e-5 * part)
    found = fit_collective(SIZES, [(time, 2 * time) for time in times.tolist()])
    assert found.start_s == pytest.approx(5e-5, rel=1e-3)
    assert 1 / found.byte_s == pytest.approx(3e11, rel=1e-3)
    assert found.ramp == pytest.approx(ramp, abs=1e-3)
    assert abs(found.worst_error) < 1e-6
