"""Calibration with real processes: on this machine, under torchrun, over an emulated link."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.catalogue.hierarchy import infer_levels
from partita.errors import UnsupportedError, WorkerError
from partita.profiler.calibrate.calibrate import fit_pairs, link_matrices
from partita.profiler.calibrate.records import read_measurement
from partita.runtime.emulation.link import emulated_link, enter_namespace, why_unavailable

pytestmark = pytest.mark.slow
CALIBRATE = (
    "import sys; from partita.cli.main import _fail; from partita.cli.calibrate import command\n"
    "from partita.errors import PartitaError\n"
    "try: command.main(standalone_mode=False)\n"
    "except PartitaError as exc: _fail(str(exc), exc.exit_code)\n"
)
QUICK = ("--budget", "1", "--sizes", "64,64KiB,1MiB,4MiB")
LIMIT_S = 240


@pytest.fixture
def needs_root() -> None:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(commands: Any, tmp_path: Path) -> Run:
    """Return what calibrates in a process of its own."""

    def call(
        *arguments: str, python: str = CALIBRATE, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = commands.run(
            *arguments, python=python, folder=tmp_path, timeout_s=LIMIT_S, **environment
        )
        return done

    return call


def rank_environment(
    rank: int, num_ranks: int, *, port: int, address: str = "127.0.0.1"
) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def test_this_machine_becomes_a_cluster(run: Run, tmp_path: Path) -> None:
    yaml, npy, samples = (tmp_path / name for name in ("c.yaml", "s.npy", "s.json"))
    result = run(
        *("--devices", "2", "-o", str(yaml), "--npy", str(npy), "--samples", str(samples)), *QUICK
    )
    assert result.returncode == 0, result.stderr
    assert "host0/cpu0  host0/cpu1" in result.stdout
    cluster = read_cluster_yaml(yaml.read_text(), load_catalogue())
    assert cluster.device_names == ("host0/cpu0", "host0/cpu1")
    assert [level.name for level in cluster.levels] == ["host"]
    assert cluster.levels[0].bandwidth_bytes_per_s[0] > 1e8
    assert cluster.levels[0].latency_s[0] < 0.05
    assert np.load(npy).shape == (2, 2)
    again = run("--from-samples", str(samples), "--json")
    values = json.loads(again.stdout)
    assert [pair["source"] for pair in values["pairs"]] == ["host0/cpu0", "host0/cpu1"]
    assert values["all_reduce"][0]["devices"] == 2
    assert values["devices"][0]["flop_per_s"]["float32"] > 1e8
    assert values["written"] == {}


def test_json_alone_is_printed_for_one_device(run: Run) -> None:
    result = run("--devices", "1", "--json", *QUICK)
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["pairs"] == values["levels"] == values["all_reduce"] == []
    assert result.stderr == ""


def test_torchrun_ranks_are_measured_and_rank_0_writes(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "calibrate.py"
    script.write_text(CALIBRATE)
    yaml = tmp_path / "c.yaml"
    result = run(
        *("--standalone", "--nproc-per-node", "2", str(script), "-o", str(yaml)),
        *("--interface", "lo", *QUICK),
        python="from torch.distributed.run import main; main()",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("cluster written") == 1
    assert len(read_cluster_yaml(yaml.read_text(), load_catalogue())) == 2


def test_a_rank_that_never_comes_is_named(run: Run) -> None:
    begin = time.monotonic()
    result = run("--limit", "2", *QUICK, **rank_environment(0, 2, port=0))
    assert result.returncode == 5
    assert "rank 0, meeting the other ranks: nothing from rank 1 within 2 s" in result.stderr
    assert time.monotonic() - begin < 60


def test_a_rank_that_dies_is_named(run: Run) -> None:
    code = (
        "import os\n"
        "from partita.profiler.calibrate import local, ranks\n"
        "from partita.profiler.calibrate.records import MeasureOptions\n"
        "real = ranks._measure_links\n"
        "def links(rank, options):\n"
        "    if rank.rank == 1: os._exit(7)\n"
        "    real(rank, options)\n"
        "ranks._measure_links = links\n"
        "local.measure_local(2, MeasureOptions(limit_s=5), fork=True)\n"
    )
    result = run(python=code)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "rank 1" in last, last


def test_a_rank_that_hangs_is_named(run: Run) -> None:
    code = (
        "import time\n"
        "from partita.profiler.calibrate import local, ranks\n"
        "from partita.profiler.calibrate.records import MeasureOptions\n"
        "real = ranks._measure_links\n"
        "def links(rank, options):\n"
        "    if rank.rank == 1: time.sleep(600)\n"
        "    real(rank, options)\n"
        "ranks._measure_links = links\n"
        "local.measure_local(2, MeasureOptions(limit_s=3), fork=True)\n"
    )
    begin = time.monotonic()
    result = run(python=code)
    last = result.stderr.strip().splitlines()[-1]
    assert "rank 0, sending to rank 1" in last, last
    assert time.monotonic() - begin < 60


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20
    ).stdout


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_link_is_removed_with_all_that_runs_inside() -> None:
    with emulated_link(rate_bytes_per_s=10e6, delay_s=0.001) as (first, second):
        assert first.name in namespaces()
        sleeper = subprocess.Popen(second.command("sleep", "600"))
        ping = subprocess.run(
            first.command(
                sys.executable,
                "-c",
                f"import socket, time; t = time.time(); s = socket.socket()\n"
                f"try: s.connect(('{second.address}', 9))\n"
                "except ConnectionRefusedError: print(time.time() - t)",
            ),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert float(ping.stdout) >= 0.002
    assert sleeper.wait(10) != 0
    assert first.name not in namespaces()
    assert second.name not in namespaces()


def fail_inside_link(names: list[str]) -> None:
    with emulated_link(rate_bytes_per_s=10e6) as ends:
        names += [end.name for end in ends]
        raise ZeroDivisionError


def kill_relay_inside_link(names: list[str]) -> None:
    with emulated_link(rate_bytes_per_s=10e6) as ends:
        names += [end.name for end in ends]
        stem = names[0][:-1].encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and stem in _command_of(entry):
                os.kill(int(entry.name), 9)
        time.sleep(0.3)


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_link_is_removed_when_its_user_fails_or_is_killed() -> None:
    names: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail_inside_link(names)
    assert len(names) == 2
    assert not any(name in namespaces() for name in names)
    code = (
        "import os, signal\n"
        "from partita.runtime.emulation.link import emulated_link\n"
        "with emulated_link(rate_bytes_per_s=10e6) as ends:\n"
        "    print(*ends, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    names = result.stdout.split()
    assert len(names) == 2
    deadline = time.monotonic() + 20
    while any(name in namespaces() for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(name in namespaces() for name in names)


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_relay_that_dies_is_an_error() -> None:
    names: list[str] = []
    with pytest.raises(WorkerError, match="died while"):
        kill_relay_inside_link(names)
    assert not any(name in namespaces() for name in names)


def _command_of(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_namespace_that_is_not_there_cannot_be_entered() -> None:
    with pytest.raises(UnsupportedError, match="no-such-namespace"):
        enter_namespace("no-such-namespace")


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_calibration_over_an_emulated_link_draws_two_levels(
    commands: Any, tmp_path: Path
) -> None:
    yaml, samples = tmp_path / "c.yaml", tmp_path / "s.json"
    ranks = []
    with emulated_link(rate_bytes_per_s=100e6, delay_s=0.005) as ends:
        try:
            for rank in range(4):
                end = ends[rank // 2]
                options = ("--interface", end.interface, "--limit", "60", "--budget", "5")
                files = ("-o", str(yaml), "--samples", str(samples))
                # Other tests may run meanwhile: waiting for a core is not the link's delay.
                inside = (
                    "import os; from partita.runtime.emulation.link import enter_namespace\n"
                    f"enter_namespace({end.name!r}); os.nice(-10)\n"
                )
                ranks.append(
                    commands.start(
                        *options,
                        *files,
                        python=inside + CALIBRATE,
                        folder=tmp_path,
                        environment=rank_environment(rank, 4, port=29_511, address=ends[0].address),
                    )
                )
            texts = [process.communicate(timeout=LIMIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [0, 0, 0, 0], texts
    cluster = read_cluster_yaml(yaml.read_text(), load_catalogue())
    host, rack = cluster.levels
    assert (host.name, rack.name) == ("host", "rack")
    assert host.group_of.tolist() == [0, 0, 1, 1]
    # benchmarks/calibration.py has the strict limits; a busy machine must not fail a test.
    assert rack.bandwidth_bytes_per_s[0] == pytest.approx(100e6, rel=0.5)
    assert 0.004 < rack.latency_s[0] < 0.05
    pairs = fit_pairs(read_measurement(samples.read_text()).links)
    alone = infer_levels(*link_matrices(pairs, 4))
    assert isinstance(alone, tuple)
    assert [level.group_of.tolist() for level in alone] == [[0, 0, 1, 1], [0, 0, 0, 0]]
