"""A real server process: what it was told is there after SIGKILL; it ends cleanly on SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

CLOCKS = (1400, 1100, 800)
WAIT_S = 120.0
SERVE = [sys.executable, "-m", "partita", "energy", "serve", "--port", "0"]
SERVE += ["--state", "jobs.sqlite"]
Start = Callable[..., tuple[subprocess.Popen[str], httpx.Client]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a server over the same database every time."""
    running: list[tuple[subprocess.Popen[str], httpx.Client]] = []
    dropped = ("PARTITA_TOKEN", "ZEUS_PFO_", "PERSEUS_", "PORT")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}

    def begin(*arguments: str, **env: str) -> tuple[subprocess.Popen[str], httpx.Client]:
        process = subprocess.Popen(
            [*SERVE, "--json", *arguments],
            cwd=tmp_path,
            env={**clean, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=30)[1]
        client = httpx.Client(base_url=json.loads(line)["url"], timeout=WAIT_S)
        running.append((process, client))
        return process, client

    yield begin
    for process, client in running:
        client.close()
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def register(client: httpx.Client, ranks: int = 2, **rest: Any) -> str:
    body = {"pp_degree": ranks, "dp_degree": 1, "tp_degree": 1, "world_size": ranks, **rest}
    job: str = client.post("/register_job", json=body).raise_for_status().json()
    for rank in range(ranks):
        place = {"rank": rank, "dp_rank": 0, "pp_rank": rank, "tp_rank": 0}
        told = {**place, "available_frequencies": list(CLOCKS), "blocking_w": 80.0}
        client.post(f"/register_rank/{job}", json=told).raise_for_status()
    return job


def schedule(client: httpx.Client, job: str, rank: int = 0, **query: Any) -> dict[str, Any]:
    params = {"rank": rank, **query}
    found: dict[str, Any] = client.get(f"/schedule/{job}", params=params).raise_for_status().json()
    return found


def report(client: httpx.Client, job: str, rank: int, clocks: dict[str, Any]) -> None:
    """Report one iteration of a device whose time and power follow from its clock."""
    seconds: dict[str, list[float]] = {}
    joules: dict[str, list[float]] = {}
    for name, clock in clocks["frequencies"]:
        one_s = (0.1 if name == "forward" else 0.2) * (1 + rank / 10) * (0.2 + 1120 / clock)
        seconds.setdefault(name, []).append(one_s)
        joules.setdefault(name, []).append(one_s * (84 + 214 * (clock / 1400) ** 2.7))
    body = {
        "rank": rank,
        "version": clocks["version"],
        "iter_time": [2 * sum(map(sum, seconds.values()))],
        "iter_energy": None,
        "time_breakdown": {name: [values] for name, values in seconds.items()},
        "energy_breakdown": {name: [values] for name, values in joules.items()},
    }
    client.post(f"/result/{job}", json=body).raise_for_status()


def test_profile_solve_deploy_straggle_with_a_kill_at_every_stage(
    start: Start, tmp_path: Path
) -> None:
    arguments = ("--microbatches", "3", "-O", "points=8", "--dump", "dump")
    process, client = start(*arguments)
    job = register(client)
    last = 0
    for round_number in range(len(CLOCKS)):
        clocks = [schedule(client, job, rank, after=last) for rank in (0, 1)]
        assert {one["version"] for one in clocks} == {last + 1}
        assert {mhz for one in clocks for _, mhz in one["frequencies"]} == {CLOCKS[round_number]}
        last += 1
        report(client, job, 0, clocks[0])
        process.kill()
        process.wait(timeout=30)
        process, client = start(*arguments)
        assert client.get(f"/jobs/{job}").json()["silent"] == [1]
        report(client, job, 1, clocks[1])
    process.kill()  # while it solves, or just before or after
    process.wait(timeout=30)
    process, client = start(*arguments)
    deployed = schedule(client, job, after=last)
    assert (deployed["state"], deployed["version"]) == ("deployed", len(CLOCKS) + 1)
    found = client.get(f"/frontier/{job}").raise_for_status().json()
    assert deployed["energy_j"] < found["frontier"]["all_max_j"]
    assert deployed["time_s"] <= found["frontier"]["all_max_s"] * (1 + 1e-9)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(schedule, client, job, after=deployed["version"])
        client.post(f"/straggler/{job}", json={"rank": 0, "slowdown": 1.5}).raise_for_status()
        slow = waiting.result(timeout=WAIT_S)
    assert slow["time_s"] > deployed["time_s"]
    process.kill()
    process.wait(timeout=30)
    process, client = start(*arguments)
    assert schedule(client, job) == slow
    client.delete(f"/straggler/{job}").raise_for_status()
    healthy = schedule(client, job, after=slow["version"])
    assert healthy["frequencies"] == deployed["frequencies"]
    files = {file.name for file in (tmp_path / "dump" / job).iterdir()}
    assert files >= {"perseus.json", "ranks.json", "0.sched.json", "0.prof.json", "profile.csv"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def test_sigterm_ends_long_polls_and_a_second_server_is_refused(
    start: Start, tmp_path: Path
) -> None:
    process, client = start("--scheduler", "all-max", "--microbatches", "1")
    job = register(client)
    version = schedule(client, job)["version"]
    second = subprocess.run(
        SERVE,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 4
    assert "in use by another server" in second.stderr
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, f"/schedule/{job}", params={"rank": 0, "after": version})
        while "partita_energy_polls 1" not in client.get("/metrics").text:
            pass
        process.send_signal(signal.SIGINT)
        assert waiting.result(timeout=WAIT_S).status_code == 503
    assert process.wait(timeout=30) == 0


def test_a_token_for_clients_that_only_take_a_url(start: Start) -> None:
    _, client = start("--scheduler", "all-max", PARTITA_TOKEN="secret")
    assert client.get("/info").status_code == 401
    url = client.base_url.copy_with(username="any", password="secret")
    assert httpx.get(url.join("/info"), timeout=WAIT_S).status_code == 200


def test_the_ancestors_variables_are_honoured(start: Start, tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text("[[('forward', 1100), ('backward', 800)]]\n")
    given = json.dumps({"solution_path": "plan.py"})
    _, client = start(ZEUS_PFO_SCHEDULER="PointSolution", ZEUS_PFO_SCHEDULER_ARGS=given)
    job = register(client, 1)
    assert schedule(client, job)["frequencies"] == [["forward", 1100], ["backward", 800]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "a token is needed"),
        (("--scheduler", "fast"), "there is no scheduler 'fast'"),
        (("-O", "points"), "not of the form k=v"),
        (("-O", "points=x"), "expected a value of type int"),
        (("-O", "points=-3"), "points is -3; expected a number above 0"),
        (("-O", "warmup_step_ratio=5"), "warmup_step_ratio is 5; expected 0 up to below 1"),
        (("--poll-limit", "nan"), "poll_limit is nan; expected a finite number"),
        (("--solve-limit", "inf"), "'--solve-limit'"),
        (("--scheduler", "point-solution"), "needs the option 'solution_path'"),
        (("--scheduler", "point-solution", "-O", "solution_path=evil.py"), "code in a plan"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    (tmp_path / "evil.py").write_text("__import__('os').abort()")
    code, _, stderr = run("energy", "serve", "--port", "0", *arguments)
    assert code == 2
    assert words in stderr
    assert len(stderr.splitlines()) == 1
