"""The Slurm engine on a real slurmctld with four slurmd of fake GPUs."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from _fleet_live import (
    Plan,
    Server,
    check_segments,
    fleet_name,
    metered_jobs,
    wait_for_all,
)

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.inventory import Completion
from partita.fleet.engines.protocol import Cause, EngineAwayError, Handle, Place
from partita.fleet.engines.slurm import SlurmEngine, SlurmOptions
from partita.fleet.policies.resources import Servers
from partita.flows.slurm_cluster import read_slurm_cluster
from partita.slurm.commands import SlurmCommands
from partita.testing.engine_jobs import MINE, Start, ended, runs, started_jobs, until
from partita.testing.slurm import PrivateSlurm

pytestmark = [pytest.mark.slow, pytest.mark.root]


def nodes() -> Servers:
    return Servers(
        names=("n1", "n2", "n3", "n4"),
        gpu_types=("v100",),
        gpu_type=np.zeros(4, dtype=np.int32),
        gpus=np.full(4, 4, dtype=np.int32),
        cpus=np.full(4, 24.0),
        memory_bytes=np.full(4, 500_000.0 * 2**20),
        storage_bytes_per_s=np.zeros(4),
    )


def place(server: str, gpus: int = 1, cpus: float = 1.0, memory_bytes: float = 1e9) -> Place:
    return Place(
        server=server, gpus=tuple(range(gpus)), cpu_ids=(), cpus=cpus, memory_bytes=memory_bytes
    )


@pytest.fixture
def engine(slurm: PrivateSlurm) -> SlurmEngine:
    return engine_of(slurm)


def engine_of(slurm: PrivateSlurm, **options: object) -> SlurmEngine:
    commands = SlurmCommands(slurm.environment, limit_s=20)
    return SlurmEngine(nodes(), SlurmOptions(every=0.1, **options), commands=commands)


@pytest.fixture
def start(slurm: PrivateSlurm, engine: SlurmEngine, tmp_path: Path) -> Iterator[Start]:
    """Start shell commands as jobs of one fleet; all are cancelled in the end."""

    def cancel(handle: Handle) -> None:
        slurm.call("scancel", str(handle["id"]), check=False)

    with started_jobs(engine, tmp_path, cancel) as begin:
        yield begin


def printed(folder: Path, job: int, words: str) -> list[str]:
    """Return what a job has printed, as soon as some words are there."""
    log = folder / f"job-{job}" / "log.txt"
    last_s = time.monotonic() + 60
    while not log.exists() or words not in log.read_text():
        assert time.monotonic() < last_s, log.read_text() if log.exists() else "no log"
        time.sleep(0.05)
    return log.read_text().splitlines()


def test_a_job_gets_the_planned_node_and_its_end_is_seen(
    engine: SlurmEngine, start: Start, tmp_path: Path
) -> None:
    asked = place("n3", gpus=2, cpus=3.0, memory_bytes=2e9)
    started = start('echo "$CUDA_VISIBLE_DEVICES $MINE $PARTITA_GPUS"; sleep 1; exit 3', [asked])
    status = until(engine, started, runs)
    (given,) = status.given or ()
    assert (given.server, len(given.gpus), given.cpus) == ("n3", 2, 3.0)
    assert given.memory_bytes == pytest.approx(2e9, rel=0.01)
    assert status.grant.startswith("Slurm job ")
    status = until(engine, started, ended)
    assert (status.exit_code, status.cause, status.why) == (3, Cause.ITSELF, "")
    assert printed(tmp_path, 1, MINE)[0] == f"{','.join(map(str, given.gpus))} {MINE} 2"
    assert json.loads((tmp_path / "job-1/attempt-1/ended.json").read_text())["exit_code"] == 3


def test_mixed_hosts_are_one_heterogeneous_job_whose_ranks_are_the_places(
    engine: SlurmEngine, start: Start, tmp_path: Path
) -> None:
    command = (
        "trap 'echo asked $NODE_RANK; exit 0' TERM; "
        'echo "rank $NODE_RANK of $NNODES on $SLURMD_NODENAME with $CUDA_VISIBLE_DEVICES"; '
        "while :; do sleep 0.1; done"
    )
    started = start(command, [place("n4", gpus=3, cpus=2.0), place("n1", gpus=1)])
    status = until(engine, started, runs)
    assert [(one.server, len(one.gpus)) for one in status.given or ()] == [("n4", 3), ("n1", 1)]
    printed(tmp_path, 1, "rank 0 of 2 on n4")
    printed(tmp_path, 1, "rank 1 of 2 on n1")
    engine.stop(started[1], grace_s=math.inf)
    assert until(engine, started, ended).exit_code == 0
    lines = printed(tmp_path, 1, "asked 1")
    assert "asked 0" in lines


def test_equal_hosts_are_ranked_as_planned_and_not_as_slurm_orders_them(
    engine: SlurmEngine, start: Start, tmp_path: Path
) -> None:
    started = start('echo "rank $NODE_RANK on $SLURMD_NODENAME"', [place("n4"), place("n1")])
    assert until(engine, started, ended).exit_code == 0
    assert set(printed(tmp_path, 1, "rank 1")) == {"rank 0 on n4", "rank 1 on n1"}


def test_a_job_that_is_asked_to_stop_may_take_its_time(
    engine: SlurmEngine, start: Start, tmp_path: Path
) -> None:
    started = start(
        "trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done",
        [place("n2")],
    )
    printed(tmp_path, 1, "up")
    until(engine, started, runs)
    engine.stop(started[1], grace_s=math.inf)
    assert until(engine, started, ended).exit_code == 0
    printed(tmp_path, 1, "saved")


def test_who_cancels_or_preempts_outside_of_the_fleet_is_told(
    slurm: PrivateSlurm, engine: SlurmEngine, start: Start
) -> None:
    cancelled = start("sleep 600", [place("n2")])
    preempted = start("sleep 600", [place("n1", gpus=4)])
    until(engine, cancelled, runs)
    until(engine, preempted, runs)
    slurm.call("scancel", str(cancelled[1]["id"]))
    urgent = slurm.call(
        "sbatch", "--parsable", "-p", "urgent", "-w", "n1", "--gres=gpu:4", "-o", "/dev/null",
        "--wrap", "sleep 600",
    ).strip()  # fmt: skip
    try:
        status = until(engine, cancelled, ended)
        assert status.cause is Cause.OTHERS
        assert status.why == "cancelled in Slurm, outside of the fleet (scancel)"
        status = until(engine, preempted, ended)
        assert status.cause is Cause.ENGINE
        assert status.why == "Slurm preempted it (PREEMPTED)"
    finally:
        slurm.call("scancel", urgent)


def test_a_drained_node_is_away_with_its_reason(slurm: PrivateSlurm, engine: SlurmEngine) -> None:
    slurm.call("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=bad fan")
    try:
        (name, why), *_ = engine.look({}).away.items()
        assert name == "n4"
        assert "DRAIN" in why
        assert "bad fan" in why
    finally:
        slurm.call("scontrol", "update", "NodeName=n4", "State=RESUME")


def test_the_text_of_old_versions_says_the_same(engine: SlurmEngine, start: Start) -> None:
    started = start("sleep 600", [place("n2", gpus=2, cpus=2.0), place("n3", gpus=2, cpus=2.0)])
    by_json = until(engine, started, runs)
    engine._has_json = False
    engine._seen.at_s = -math.inf
    assert until(engine, started, runs) == by_json


def test_while_the_controller_is_away_nothing_is_known_and_nothing_lost(
    slurm: PrivateSlurm, engine: SlurmEngine, start: Start
) -> None:
    started = start("sleep 600", [place("n2")])
    until(engine, started, runs)
    slurm.stop_controller()
    try:
        engine._seen.at_s = -math.inf
        look = engine.look({started[0]: started[1]})
        assert not look.statuses
        assert look.failure.startswith("Slurm is away, asked again in ")
        calls = engine.commands.calls
        assert engine.look({started[0]: started[1]}).failure
        assert engine.commands.calls == calls
        with pytest.raises(EngineAwayError):
            start("true", [place("n2")])
    finally:
        slurm.start_controller()
    assert until(engine, started, runs).running
    other = engine_of(slurm)
    assert list(other.running(started[1]["fleet"])) == [started[0]]


def test_many_jobs_are_looked_at_with_two_calls(engine: SlurmEngine, start: Start) -> None:
    handles = dict(start("sleep 600", [place(f"n{row % 4 + 1}")]) for row in range(8))
    engine._seen.at_s = -math.inf
    before = engine.commands.calls
    assert len(engine.look(handles).statuses) == 8
    assert engine.commands.calls - before == 2


def test_doctor_and_cluster_speak_of_this_slurm(
    slurm: PrivateSlurm, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in slurm.environment.items():
        monkeypatch.setenv(name, text)
    code, out, _ = run("fleet", "doctor", "--engine", "slurm", "--engine-option", "partition=gone")
    lines = {line.split()[1].rstrip(":"): line for line in out.splitlines()}
    assert code == 4
    assert lines["commands"].startswith("ok")
    assert lines["partition"].startswith("missing partition: partition 'gone' is not up")
    assert set(lines) == {"commands", "munge", "controller", "partition"}
    code, out, _ = run("fleet", "doctor", "--engine", "slurm", "--json")
    assert code == 0  # jobs run without accounting
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["gres"]["detail"] == "16 GPUs on 4 nodes"
    assert checks["permission"]["ok"]
    assert (checks["accounting"]["ok"], checks["accounting"]["needed"]) == (False, False)
    assert checks["accounting"]["detail"].startswith("sacct: Slurm accounting storage is disabled")
    assert checks["munge"]["ok"]
    assert checks["munge"]["detail"].endswith("munge.socket")
    assert checks["controller"]["ok"]
    code, _, err = run("plan", "gpt-small", "--cluster", "slurm:main")
    assert code == 0, err
    cluster = read_slurm_cluster("slurm:main", Completion(catalogue=load_catalogue()))
    assert [host.name for host in cluster.hosts] == ["n1", "n2", "n3", "n4"]
    assert [level.name for level in cluster.levels] == ["host", "rack", "spine"]


def test_a_job_without_a_shared_file_system_reports_over_http(
    slurm: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in slurm.environment.items():
        monkeypatch.setenv(name, text)
    plan = Plan(jobs=1, policy="fifo:tune", round_s=2.0, seconds=(2.0, 2.0), span_s=0.1)
    options = ("--engine-option", "shared=no", "--engine-option", "every=0.2")
    server = Server(plan, tmp_path, more=("--engine", "slurm", *options))
    server.start()
    try:
        ((_, spec),) = metered_jobs(plan, tmp_path)
        number = server.client.submit(spec)
        (row,) = wait_for_all(server.client, 1, 90)
        assert (row["state"], row["step"], row["attempts"]) == ("finished", spec.steps, 1)
        assert check_segments(spec) == []
        home = tmp_path / "fleet.sqlite.d" / f"job-{number}"
        assert json.loads((home / "progress.json").read_text())["state"] == "done"
        assert not (home / "log.txt").exists()
    finally:
        server.end()
        for log in Path("/tmp").glob(f"partita-{fleet_name(tmp_path)}-*.log"):
            log.unlink()
