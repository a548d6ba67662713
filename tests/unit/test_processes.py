"""How processes end and what they leave behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita.errors import InvalidInputError, UnsupportedError
from partita.processes import (
    clock_identity,
    ended_by_signals,
    how_it_ended,
    interface_towards,
    last_lines,
    loopback_identity,
    machine_cores,
    other_load,
)
from partita.ranks.environment import RankEnvironment
from partita.ranks.setup import local_device

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "still runs"),
        (5, "ended with exit code 5"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_told(code: int | None, words: str) -> None:
    assert how_it_ended(code) == words


def test_a_log_that_was_opened_twice_keeps_all_that_was_written(tmp_path: Path) -> None:
    log, parts = tmp_path / "log", ["first out", "first err", "then", "at last"]
    text = f"""
import os, pathlib, sys
from partita.processes import append_output, redirect_output
append_output()
os.write(1, b"first out\\n")
os.write(2, b"first err\\n")
before = os.dup(2)
redirect_output(pathlib.Path({str(log)!r}))
os.write(1, b"then\\n")
os.write(before, b"at last\\n")
"""
    with log.open("w") as out, log.open("w") as err:
        subprocess.run([sys.executable, "-c", text], stdout=out, stderr=err, check=True, timeout=60)
    assert log.read_text().splitlines() == parts


def test_the_last_lines_of_a_long_log_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 9000 + b"\n" + b"".join(b"line %d\n" % n for n in range(9)))
    assert last_lines(log, 2) == ["line 7", "line 8"]
    assert last_lines(tmp_path / "none", 2) == []


@LINUX
def test_the_interface_of_this_host_is_found() -> None:
    assert interface_towards("127.0.0.1", 9) in {name for _, name in socket.if_nameindex()}
    assert interface_towards("no-such-host.invalid", 9) == ""


@LINUX
def test_processes_of_one_machine_have_one_clock() -> None:
    code = "from partita.processes import clock_identity; print(clock_identity())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout.strip() == clock_identity() != ""


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_processes_of_one_machine_may_have_networks_of_their_own() -> None:
    code = "from partita.processes import loopback_identity; print(loopback_identity())"
    found = [
        subprocess.run(
            [*apart, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for apart in ((), ("unshare", "--net"))
    ]
    assert found[0] == loopback_identity() != ""
    assert found[1] not in ("", found[0])


def test_tying_a_process_to_its_parent_imports_no_torch() -> None:
    code = "import sys, partita.processes, partita.runtime.__main__; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "False"


def test_a_process_whose_parent_is_gone_ends_at_once() -> None:
    code = "from partita.processes import die_with_parent; die_with_parent(1 << 30); print('here')"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (found.returncode, found.stdout) == (5, "")


def test_a_signal_to_end_raises_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_has_its_share_of_the_cores() -> None:
    threads = torch.get_num_threads()
    try:
        assert local_device(0, gpu=False, num_local_ranks=10_000).type == "cpu"
        assert torch.get_num_threads() == 1
        local_device(0, gpu=False, num_local_ranks=1)
        assert torch.get_num_threads() == machine_cores()
    finally:
        torch.set_num_threads(threads)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="GPU 99 here"):
        local_device(99, gpu=True, num_local_ranks=1)


def test_the_environment_of_torchrun_is_read() -> None:
    found = RankEnvironment.of(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    )
    assert (found.rank, found.local_rank, found.host, found.num_hosts) == (3, 1, 1, 2)
    with pytest.raises(InvalidInputError, match="'WORLD_SIZE' is missing"):
        RankEnvironment.of({"RANK": "0"})


def test_a_busy_machine_is_said_before_something_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("partita.processes.machine_cores", lambda: 2)
    for load, said in ((1.4, ""), (6.5, "load average 6.5 on 2 cores: measured times are ")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert other_load() == said + "unreliable" * bool(said)
