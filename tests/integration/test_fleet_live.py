"""The live scheduler with real processes, kills and the command line.

``benchmarks/fleet_live.py`` has the strict limits (completion times within 15 % of the simulator's,
ten kills each); a busy machine must not fail a test.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from _fleet_live import (
    AWAY_S,
    Plan,
    Server,
    Submitting,
    check_segments,
    compared,
    epoch_of,
    left_over,
    metered_jobs,
    run_with_kills,
    wait_for_all,
)

import partita
from partita.core.fleet import HistoryOrigin, Sensitivity
from partita.errors import InvalidInputError
from partita.fleet.engines.local import LocalEngine, machine_for
from partita.fleet.engines.proc import processes_of
from partita.fleet.engines.protocol import Attempt, Order, Place, Status
from partita.fleet.live.files import write_json
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.jobspec import GpuChoice, JobSpec, Progress
from partita.fleet.live.scheduler import FleetSettings
from partita.fleet.policies.resources import Servers
from partita.fleet.profiler.isolation import IsolationRequest, Way, choose_isolation

pytestmark = pytest.mark.slow
CPUS = sorted(os.sched_getaffinity(0))


def one_server(gpus: int = 2, cpus: float = 1.0, memory_bytes: float = 1e9) -> Servers:
    return Servers(
        names=("local",),
        gpu_type=np.zeros(1, dtype=np.int32),
        gpus=np.array([gpus], dtype=np.int32),
        cpus=np.array([cpus]),
        memory_bytes=np.array([memory_bytes]),
        storage_bytes_per_s=np.zeros(1),
    )


def until(done: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    last_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < last_s, f"{what} did not happen in {limit_s} s"
        time.sleep(0.02)


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine(machine_for(one_server()))


@pytest.fixture
def start(tmp_path: Path, engine: LocalEngine) -> Iterator[Callable[..., dict]]:
    """Start a shell command as attempt 1 of job 1."""
    fleet = f"test{os.getpid()}"

    def begin(command: str, number: int = 1, lease: int = 1) -> dict:
        home = tmp_path / "job-1"
        home.mkdir(exist_ok=True)
        write_json(home / "lease.json", {"attempt": lease})
        place = Place(server="local", gpus=(1,), cpu_ids=(0,), cpus=1.0, memory_bytes=0.5e9)
        order = Order(
            fleet=fleet,
            attempt=Attempt(1, number),
            command=("/bin/sh", "-c", command),
            folder=tmp_path,
            directory=home,
            environment={"MINE": "yes"},
            places=(place,),
        )
        return dict(engine.start(order))

    yield begin
    for _, process in processes_of(fleet):
        process.send(signal.SIGKILL)


def ended(engine: LocalEngine, handle: dict) -> Status:
    until(lambda: not engine.status(handle).running, "the end of the job")
    return engine.status(handle)


def test_a_command_gets_its_devices_and_its_log(
    start, engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_TOKEN", "secret")
    handle = start(
        "echo $CUDA_VISIBLE_DEVICES $PARTITA_CPUS $MINE$PARTITA_TOKEN; "
        "grep Cpus_allowed_l /proc/self/status"
    )
    assert ended(engine, handle).exit_code == 0
    first, second = (tmp_path / "job-1" / "log.txt").read_text().splitlines()
    assert first == "1 1 yes"
    assert second.split()[1] == str(CPUS[0])


def test_the_token_reaches_neither_the_environment_nor_the_log_of_a_job(
    start, engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_TOKEN", "token-of-the-server")
    monkeypatch.setenv("PARTITA_FLEET_SERVER", "http://any:token-of-the-server@127.0.0.1:7788")
    handle = start("env; tr '\\0' '\\n' < /proc/$PPID/environ; echo done")
    assert ended(engine, handle).exit_code == 0
    files = [path for path in (tmp_path / "job-1").rglob("*") if path.is_file()]
    assert "done" in (tmp_path / "job-1" / "log.txt").read_text()
    assert not [path for path in files if b"token-of-the-server" in path.read_bytes()]


def test_handles_are_data_that_another_engine_understands(start, engine) -> None:
    handle = json.loads(json.dumps(start("sleep 60")))
    other = LocalEngine(engine.machine)
    until(lambda: other.status(handle).grant, "the grant")
    assert other.status(handle).grant.startswith(f"CPUs {CPUS[0]} by affinity")
    assert {k: v["pid"] for k, v in other.running(handle["fleet"]).items()} == {
        Attempt(1, 1): handle["pid"]
    }
    other.stop(handle, grace_s=5)
    assert ended(other, handle).exit_code == -signal.SIGTERM


def test_who_ignores_sigterm_is_killed(start, engine, tmp_path: Path) -> None:
    handle = start("trap '' TERM; echo up; while true; do sleep 0.1; done")
    log = tmp_path / "job-1" / "log.txt"
    until(lambda: log.exists() and log.read_text(), "the first line")
    engine.stop(handle, grace_s=5)
    time.sleep(0.3)
    assert engine.status(handle).running
    engine.stop(handle, grace_s=0)
    ended(engine, handle)
    assert not list(processes_of(handle["fleet"]))


def test_what_a_job_leaves_behind_is_ended(start, engine) -> None:
    handle = start("setsid sleep 1000 & setsid sleep 1001 & exit 3")
    assert ended(engine, handle).exit_code == 3
    assert not list(processes_of(handle["fleet"]))


def test_the_command_dies_with_the_process_above_it(start, engine) -> None:
    handle = start("sleep 1000")
    until(lambda: engine.status(handle).grant, "the start")
    os.kill(handle["pid"], signal.SIGKILL)
    assert ended(engine, handle).exit_code is None
    assert not list(processes_of(handle["fleet"]))


def test_a_start_for_another_lease_runs_nothing(start, engine, tmp_path: Path) -> None:
    handle = start("echo never", number=1, lease=2)
    assert ended(engine, handle).exit_code == 126
    assert not (tmp_path / "job-1" / "log.txt").exists()


def test_a_program_that_is_not_there_is_said(tmp_path: Path, engine: LocalEngine) -> None:
    settings = FleetSettings(
        state=tmp_path / "s.sqlite", round_s=0.3, poll_s=0.02, backoff_s=0.05, restart_s=0.0
    )
    fleet = Fleet(settings, one_server(), "fifo:tune", engine)
    fleet.open()
    try:
        job = fleet.submit(
            JobSpec(
                name="gone",
                command=("./not-there",),
                folder=tmp_path,
                steps=1,
                retries=0,
                progress=Progress.NONE,
                sensitivity=flat(),
            )
        )
        until(lambda: fleet.status(job)["state"] == "failed", "the failure")
        assert "could not be started" in fleet.status(job)["note"]
        assert "not-there" in fleet.status(job)["note"]
    finally:
        fleet.close()


def flat(cpus: float = 1.0, memory_bytes: float = 0.2e9) -> Sensitivity:
    return Sensitivity(
        name="flat",
        iteration_s=1.0,
        cpus=np.array([cpus]),
        memory_bytes=np.array([memory_bytes]),
        speed=np.array([1.0]),
    )


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_grants_are_enforced_and_read_back(tmp_path: Path) -> None:
    """Two jobs on the two CPUs of this machine: disjoint affinity, memory by control group."""
    isolation = choose_isolation(IsolationRequest())
    machine = machine_for(one_server(cpus=2.0), isolation.hierarchies)
    settings = FleetSettings(state=tmp_path / "s.sqlite", round_s=0.5, poll_s=0.05, restart_s=0.0)
    fleet = Fleet(settings, one_server(cpus=2.0), "fifo:tune", LocalEngine(machine))
    fleet.open()
    try:
        jobs = [
            fleet.submit(
                JobSpec(
                    name=name,
                    command=("sleep", "1000"),
                    folder=tmp_path,
                    gpus=(GpuChoice(least=1, most=1),),
                    steps=10**6,
                    sensitivity=flat(),
                )
            )
            for name in ("one", "two")
        ]
        until(lambda: all(fleet.status(job)["read_back"] for job in jobs), "both grants")
        read = [fleet.status(job)["read_back"] for job in jobs]
        assert {words.split(" by ")[0] for words in read} == {f"CPUs {cpu}" for cpu in CPUS[:2]}
        if isolation.way is Way.CGROUP:
            assert all("memory 200 MB by control group" in words for words in read)
        for job in jobs:
            fleet.cancel(job)
        until(lambda: not fleet.jobs(), "the end of both")
        assert [row["state"] for row in fleet.jobs(all_jobs=True)] == ["cancelled"] * 2
        assert not list(processes_of(fleet.store.fleet))
    finally:
        fleet.close()


def test_metered_jobs_finish_as_simulated(tmp_path: Path) -> None:
    """Twenty jobs on eight declared GPUs, in emulated time; see the benchmark for the limits."""
    plan = Plan(policy="fifo:tune", seconds=(1.0, 4.0), span_s=3.0, round_s=1.0)
    jobs, server = metered_jobs(plan, tmp_path), Server(plan, tmp_path)
    server.start()
    try:
        Submitting(server.client, jobs).wait(AWAY_S)
        rows = wait_for_all(server.client, len(jobs), 120)
        history = server.client.history()
    finally:
        server.end()
    specs = [spec for _, spec in jobs]
    assert [row["state"] for row in rows] == ["finished"] * 20
    assert not [text for spec in specs for text in check_segments(spec)]
    assert not left_over(tmp_path)
    assert compared(plan, specs, rows, epoch_of(tmp_path))["jobs"] == 20
    assert history["origin"] == HistoryOrigin.LIVE
    assert len(history["job_id"]) == 20


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    """On a busy machine the jobs may end before the last kill; the benchmark wants all of them."""
    plan = Plan(policy="srtf:tune", jobs=10, seconds=(1.0, 4.0), span_s=2.0, round_s=0.6)
    found = run_with_kills(plan, tmp_path, kills=3)
    assert found["wrong"] == []
    assert (found["finished"], found["finished_once"], found["processes_left"]) == (10, 10, 0)
    assert min(found["scheduler_kills"], found["worker_kills"]) >= 1


def test_the_command_line_from_end_to_end(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(policy="fifo:fair", round_s=0.4)
    server = Server(plan, tmp_path, more=("--gpus", "2", "--cpus", "8", "--memory", "999GB"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PARTITA_TOKEN", raising=False)
    server.start()
    monkeypatch.setenv("PARTITA_FLEET_SERVER", f"http://127.0.0.1:{server.port}")

    def call(*words: str, code: int = 0) -> str:
        found, out, err = run("fleet", *words)
        assert found == code, err
        return err if code else out

    job = "name: {}\ncommand: /bin/sh -c '{}'\nprogress: none\nsteps: 1\ngrace: 5s\n"
    Path("short.yaml").write_text(job.format("short", "echo hello from $PARTITA_GPUS"))
    Path("long.yaml").write_text(job.format("long", "sleep 1000"))
    Path("wide.yaml").write_text("command: x\nsteps: 1\ngpus: 3\n")
    Path("wrong.yaml").write_text("command: x\nsteps: none\n")
    try:
        assert call("submit", "short.yaml", "long.yaml") == "job 1 short\njob 2 long\n"
        assert call("logs", "-f", "1") == "hello from 1\n"
        assert "wrong.yaml:2: steps is 'none'" in call("submit", "wrong.yaml", code=2)
        assert "3 GPUs" in call("submit", "wide.yaml", code=3)
        monkeypatch.setenv("PARTITA_TOKEN", "wrong")
        assert "--token-file or PARTITA_TOKEN" in call("cancel", "2", code=4)
        monkeypatch.delenv("PARTITA_TOKEN")
        assert "there is no job 7" in call("status", "7", code=2)
        until(lambda: "CPUs emulated" in call("status", "2"), "the grant")
        assert "long" in call("top", "--once")
        call("drain", "--wait", "30")
        assert json.loads(call("queue", "--json"))[0]["state"] == "waiting"
        call("drain", "--resume")
        # The same in Python, which is given the address and finds the token itself.
        here = {"server": f"http://127.0.0.1:{server.port}"}
        assert partita.submit_jobs("short.yaml", check=True, **here).numbers == (None,)
        listed = partita.list_jobs(**here)
        assert [(job["id"], job["name"]) for job in listed.jobs] == [(2, "long")]
        assert listed.info["running"] + listed.info["waiting"] == 1
        assert "".join(partita.job_log(1, **here)) == "hello from 1\n"
        assert partita.job_status(1, **here).to_json()["state"] == "finished"
        assert repr(partita.drain_fleet(wait=30, **here)).startswith("the fleet drains: 0 running")
        assert repr(partita.drain_fleet(resume=True, **here)).startswith("the fleet goes on")
        with pytest.raises(InvalidInputError, match="no job 7"):
            partita.cancel_jobs(7, **here)
        call("cancel", "2")
        wait_for_all(server.client, 2, 30)
        assert "has ended already" in call("cancel", "2", code=2)
        assert "cancelled" in call("queue", "--all")
        second = [*server.more, "--state", str(tmp_path / "fleet.sqlite"), "--port", "0"]
        assert "in use by another scheduler" in call("serve", *second, code=4)
        assert "a token is needed" in call("serve", "--gpus", "1", "--host", "0.0.0.0", code=2)
    finally:
        server.end()
    assert "no fleet answers" in call("queue", code=4)
