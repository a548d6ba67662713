"""Jobs in fresh processes: by our launcher, by torchrun, on one host and between two."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from partita.capture.origin import Captures
from partita.capture.sources import load_source
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.ranks.status import Phase, Place
from partita.runtime.emulation.link import Namespace, emulated_link, why_unavailable
from partita.runtime.executor import Run, make_task
from partita.runtime.job import JobDirectory
from partita.runtime.launch import collect, launch
from partita.runtime.rendezvous import Host
from partita.runtime.training.recipe import Recipe
from partita.runtime.verify import Verdict, verify
from partita.runtime.workload import model_workload

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
LAUNCHER = """
import os, sys
from pathlib import Path
from typing import Any
from partita.errors import PartitaError
from partita.runtime.launch import launch
from partita.runtime.rendezvous import Host
try:
    launch(Path(sys.argv[1]), Host.of(os.environ))
except PartitaError as exc:
    sys.stderr.write(str(exc))
    sys.exit(exc.exit_code)
"""
ENTER = """
from partita.runtime.emulation.link import enter_namespace
enter_namespace({name!r})
"""

MakeJob = Callable[..., JobDirectory]
Start = Callable[..., Any]


def verdict_of(files: JobDirectory, run: Run) -> Verdict:
    """Return how a run compares with one process."""
    job, solution = files.read_job(), files.read_solution()
    assert job.model is not None
    torch.set_num_threads(1)
    problem, plan = solution.problem, solution.plan
    source = load_source(job.model.text, job.model.options)
    workload = model_workload(Captures(source, job.model), problem, plan)
    task = make_task(problem, plan, workload)
    return verify(task, workload, run.result, job.rank_options())


@pytest.fixture
def start(commands: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return what starts a launcher; it starts fresh ranks, and is itself forked."""

    def call(files: JobDirectory, end: Namespace | None = None, **environment: object) -> Any:
        inside = "" if end is None else ENTER.format(name=end.name)
        return commands.start(
            str(files.path),
            python=inside + LAUNCHER,
            folder=tmp_path,
            environment={name: str(value) for name, value in environment.items()},
        )

    return call


def await_steps(files: JobDirectory, rank: int, launcher: Any) -> None:
    """Wait until a rank has done a step."""
    deadline = time.monotonic() + LIMIT_S
    while not files.read_news(rank, 0)[0]:
        assert launcher.poll() is None, launcher.communicate(LIMIT_S)[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids_of(files: JobDirectory, hosts: int = 1) -> list[int]:
    boards = [files.open_board(host, 3) for host in range(hosts)]
    return [pid for board in boards for rank in range(3) if (pid := board.read(rank).pid)]


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_torchrun_runs_a_job_whose_reports_equal_one_process(
    tmp_path: Path, make_job: MakeJob, commands: Any
) -> None:
    files = make_job(tmp_path / "job", [[0, 1], 2], steps=2, recipe=Recipe(optimizer="adam"))
    result = commands.run(
        *("--standalone", "--nproc-per-node", "3", "-m", "partita.runtime", str(files.path)),
        python="from torch.distributed.run import main; main()",
        folder=tmp_path,
        timeout_s=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    verdict = verdict_of(files, collect(files.path))
    assert verdict.is_equal, verdict.line()
    assert verdict.count("gradient") > 10


def test_too_few_processes_are_refused_with_the_right_number(
    tmp_path: Path, make_job: MakeJob, commands: Any
) -> None:
    files = make_job(tmp_path / "job", [0, 1])
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    module = "import runpy; runpy.run_module('partita.runtime', run_name='__main__')"
    result = commands.run(str(files.path), python=module, folder=tmp_path, **environment)
    assert result.returncode == 2
    assert "the plan has 2 ranks on host 0, 1 were started; use --nproc-per-node 2" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks(
    tmp_path: Path, make_job: MakeJob, start: Start, number: signal.Signals
) -> None:
    files = make_job(tmp_path / "job", [0], steps=100_000, keep_results=False)
    launcher = start(files)
    await_steps(files, 0, launcher)
    pids = pids_of(files)
    assert len(left(pids)) == 1
    launcher.send_signal(number)
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == (143 if number is signal.SIGTERM else -signal.SIGINT)
    assert not left(pids)
    assert files.read_job().steps == 100_000
    assert files.read_news(0, 0)[0]


def test_a_launcher_that_is_killed_takes_its_ranks_along(
    tmp_path: Path, make_job: MakeJob, start: Start
) -> None:
    files = make_job(tmp_path / "job", [0], steps=100_000, keep_results=False)
    launcher = start(files)
    await_steps(files, 0, launcher)
    pids = pids_of(files)
    assert len(left(pids)) == 1
    launcher.kill()
    launcher.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while left(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(pids)


def test_a_frozen_rank_ends_the_launcher_with_its_name(
    tmp_path: Path, make_job: MakeJob, start: Start
) -> None:
    files = make_job(
        tmp_path / "job", [0, 1], steps=100_000, keep_results=False, stall_limit_s=5.0
    )  # fmt: skip
    launcher = start(files)
    await_steps(files, 1, launcher)
    pids = pids_of(files)
    os.kill(pids[1], signal.SIGSTOP)
    _, said = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 5
    assert said.startswith("rank 1 stands still, without a sign of life"), said
    assert not left(pids)
    for rank in range(2):
        assert files.log(rank).exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_taken_port_is_named(tmp_path: Path, make_job: MakeJob) -> None:
    files = make_job(tmp_path / "job", [0, 2])
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        host = Host(num_hosts=2, address="127.0.0.1", port=port)
        with pytest.raises(UnsupportedError, match=f"port {port} .* set another MASTER_PORT"):
            launch(files.path, host)


def test_a_host_that_does_not_come_is_named(tmp_path: Path, make_job: MakeJob) -> None:
    files = make_job(tmp_path / "job", [0, 2], start_limit_s=0.5)
    host = Host(num_hosts=2, address="127.0.0.1", port=free_port())
    with pytest.raises(WorkerError, match=r"host 0: host 1.* NNODES=2 NODE_RANK=1"):
        launch(files.path, host)


def test_a_first_host_that_is_not_there_is_named(tmp_path: Path, make_job: MakeJob) -> None:
    files = make_job(tmp_path / "job", [0, 2], start_limit_s=0.5)
    host = Host(index=1, num_hosts=2, address="127.0.0.1", port=free_port())
    with pytest.raises(WorkerError, match=r"host 1: host 0.*127\.0\.0\.1"):
        launch(files.path, host)


class Stranger(threading.Thread):
    """Something else that listens on the port: answers in its own way, or not at all."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._listener, self._answer = socket.create_server(("127.0.0.1", 0)), answer
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                if self._answer:
                    client.sendall(self._answer)
                    client.close()

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.join()
        for held in (self._listener, *self._open):
            held.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_something_else_on_the_port_is_named(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("partita.runtime.rendezvous.GRACE_S", 0.5)
    files = make_job(tmp_path / "job", [0, 2], start_limit_s=0.5)
    stranger = Stranger(answer)
    stranger.start()
    host = Host(index=1, num_hosts=2, address="127.0.0.1", port=stranger.port)
    where = rf"host 1: what listens at 127\.0\.0\.1:{stranger.port} is not the store of host 0"
    try:
        with pytest.raises(WorkerError, match=where):
            launch(files.path, host)
    finally:
        stranger.end()


def test_hosts_that_do_not_belong_together_are_refused(tmp_path: Path, make_job: MakeJob) -> None:
    files = make_job(tmp_path / "job", [0, 2], start_limit_s=5.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host = Host(index=1, num_hosts=2, address="127.0.0.1", port=store.port)
    store.set("0/host/0", json.dumps({"torch": "1.0.0", "plan": "another"}))
    with pytest.raises(InvalidInputError, match=r"torch .* host 0 has 1\.0\.0"):
        launch(files.path, host)
    with pytest.raises(InvalidInputError, match="two hosts have NODE_RANK 1"):
        launch(files.path, host)


@pytest.mark.parametrize("name", ["rank0.pt", "rank1.error", "rank1.news"])
def test_a_directory_that_was_used_is_not_run_again(
    tmp_path: Path, make_job: MakeJob, name: str
) -> None:
    files = make_job(tmp_path / "job", [0, 1])
    files.prepare()
    (files.ranks / name).touch()
    with pytest.raises(InvalidInputError, match=rf"holds what a run has left already \({name}\)"):
        launch(files.path)


def test_what_ranks_of_another_host_have_left_does_not_matter(
    tmp_path: Path, make_job: MakeJob
) -> None:
    files = make_job(tmp_path / "job", [0, 2], start_limit_s=0.1)
    files.prepare()
    (files.ranks / "rank1.news").touch()
    files.open_board(0, 2).write(0, Place(7, -1, 1), 5, pid=1)
    with pytest.raises(WorkerError, match="host 1 did not"):
        launch(files.path, Host(num_hosts=2, address="127.0.0.1", port=free_port()))
    assert files.open_board(0, 2).read(0).phase is Phase.ABSENT


def test_another_number_of_hosts_is_refused_with_the_right_one(
    tmp_path: Path, make_job: MakeJob
) -> None:
    files = make_job(tmp_path / "job", [0, 1, 2])
    with pytest.raises(InvalidInputError, match=r"uses 2 hosts \(h0, h1\), NNODES is 3"):
        launch(files.path, Host(num_hosts=3, address="127.0.0.1", port=1))


@pytest.fixture
def needs_root() -> None:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


def start_hosts(
    start: Start, files: list[JobDirectory], ends: tuple[Namespace, Namespace]
) -> list[Any]:
    meeting = {"NNODES": 2, "MASTER_ADDR": ends[0].address, "MASTER_PORT": 29500}
    return [start(files[k], ends[k], NODE_RANK=k, **meeting) for k in range(2)]


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_two_and_one_ranks_on_two_hosts_equal_one_process(
    tmp_path: Path, make_job: MakeJob, start: Start
) -> None:
    files = [make_job(tmp_path / f"job{k}", [[0, 1], 2], steps=2) for k in range(2)]
    with emulated_link(rate_bytes_per_s=1e8) as ends:
        launchers = start_hosts(start, files, ends)
        for launcher in launchers:
            _, said = launcher.communicate(timeout=LIMIT_S)
            assert launcher.returncode == 0, said
    run = collect(files[0].path)
    verdict = verdict_of(files[0], run)
    assert verdict.is_equal, verdict.line()
    assert len(run.timelines) == 2
    assert [path.name for path in sorted(files[1].ranks.glob("*.pt"))] == ["rank2.pt"]


@pytest.mark.root
@pytest.mark.usefixtures("needs_root")
def test_a_cut_link_ends_both_hosts_and_is_named(
    tmp_path: Path, make_job: MakeJob, start: Start
) -> None:
    settings = {"steps": 100_000, "keep_results": False, "stall_limit_s": 4.0}
    files = [make_job(tmp_path / f"job{k}", [0, 1, 2], **settings) for k in range(2)]
    with emulated_link(rate_bytes_per_s=1e8) as ends:
        launchers = start_hosts(start, files, ends)
        await_steps(files[1], 2, launchers[1])
        pids = pids_of(files[0]) + pids_of(files[1], hosts=2)
        assert len(left(pids)) == 3
        subprocess.run(
            ["ip", "-n", ends[1].name, "link", "set", ends[1].interface, "down"], check=True
        )
        said = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [5, 5]
        assert not left(pids)
    assert "host 0: rank 2, which runs on another host, does not answer" in said[0], said[0]
    assert "stage 1" in said[0]
    # By where the cut found it: it waits for its neighbour, or for the other end of a reduction.
    wanted = r"host 1: rank [01], which runs on another host, does not answer"
    assert re.search(wanted, said[1]), said[1]
    assert "stage 2" in said[1]
