"""What the fleet's commands make of their options."""

from pathlib import Path

import pytest

from partita.errors import InvalidInputError
from partita.fleet.engines.local import machine_for
from partita.fleet.live.jobfile import JobFile
from partita.flows.fleet.doctor import fleet_doctor
from partita.flows.fleet.inputs import declared_servers
from partita.flows.fleet.live import gpus_words, profile_first, server_line, status_lines

INI = """\
[CLUSTER]
racks = 1
servers_per_rack = 3
gpus_per_server = 8
cpus_per_server = 24
dram_per_server = 500
sspeed_per_server = 500
"""


def test_one_server_has_the_cpus_and_memory_of_this_machine() -> None:
    servers = declared_servers(None, 8, None, None)
    machine = machine_for(servers)
    assert (servers.num_gpus, machine.has_memory, list(machine.cpu_ids)) == (8, True, ["local"])
    assert machine.num_declared == 8


def test_declared_servers_beyond_this_machine_are_emulated_and_said(tmp_path: Path) -> None:
    (tmp_path / "cluster.ini").write_text(INI)
    for spec in (str(tmp_path / "cluster.ini"), "3x8xv100"):
        servers = declared_servers(spec, None, 4096, "900TB")
        assert servers.num_gpus == 24
        assert servers.cpus.tolist() == [4096.0] * 3
        machine = machine_for(servers)
        assert not machine.cpu_ids
        assert not machine.has_memory
        assert list(machine.first_gpu.values()) == [0, 8, 16]
        notes = " ".join(machine.notes())
        assert "GPUs are declared: 24" in notes
        assert "CPU grants are emulated" in notes
        assert "memory grants are emulated" in notes


@pytest.mark.parametrize(("cluster", "gpus"), [(None, None), ("4xv100", 4)])
def test_servers_are_told_once(cluster: str | None, gpus: int | None) -> None:
    with pytest.raises(InvalidInputError, match="either --gpus N or --cluster"):
        declared_servers(cluster, gpus, None, None)


def test_only_python_scripts_are_profiled_first(tmp_path: Path) -> None:
    job = JobFile(name="x", command=("./train", "-x"), folder=tmp_path, gpus=1, line=1)
    with pytest.raises(InvalidInputError, match=r"'python SCRIPT.py ...'"):
        profile_first(job)


def test_lines_for_people() -> None:
    place = {"server": "host0", "gpus": [0, 2], "cpus": 6.0, "memory_bytes": 20e9}
    said = {
        "id": 3,
        "name": "bert",
        "state": "running",
        "note": "",
        "step": 7,
        "steps": 9,
        "gpus": [[1, 2, "a100"], [4, 4, ""]],
        "attempts": 1,
        "preemptions": 0,
        "migrations": 0,
        "faults": 0,
        "places": [place],
        "read_back": "CPUs 0-5 by affinity",
        "engine": "slurm",
        "lease_end_s": None,
        "curve_speed": 1.6,
        "measured_speed": 1.2,
        "command": ["python", "x.py"],
        "events": [{"at_s": 0.0, "what": "submitted"}],
    }
    lines = status_lines(said)
    assert lines[0] == "job 3 bert · running"
    assert "asks for 1 to 2 a100 or 4 GPUs" in lines[1]
    assert lines[2] == "holds host0: GPUs 0,2, 6 CPUs, 20.0 GB"
    speed = "speed 1.20, 75% of its curve's 1.60"
    assert lines[3] == f"runs on slurm · its lease has ended · {speed}"
    assert lines[4] == "read back from its process: CPUs 0-5 by affinity"
    assert lines[-1].endswith("  submitted")
    assert status_lines({**said, "owner": "ana"})[0] == "job 3 bert of ana · running"
    assert gpus_words([[2, 2, ""]]) == "2"


def test_the_line_of_a_fleet_says_what_is_wrong() -> None:
    server = {"gpus": 4, "gpus_in_use": 2, "cpus": 8.0, "cpus_granted": 6.0}
    info = {
        "policy": "fifo:tune",
        "engine": "local",
        "round_s": 300.0,
        "servers": [server],
        "running": 1,
        "waiting": 2,
        "draining": True,
        "failure": "the disk is full",
    }
    assert server_line(info).endswith(
        "GPUs 2/4 · CPUs 6/8 · 1 running, 2 waiting · draining · the scheduler fails: "
        "the disk is full"
    )


def test_the_doctor_of_an_engine_stops_at_the_first_thing_that_all_else_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = fleet_doctor(engine="slurm")
    assert not found.ok
    (line,) = found.lines()
    assert line.startswith("missing commands: sbatch is not installed here")
