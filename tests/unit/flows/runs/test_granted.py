"""Requests of runs that a fleet has started."""

from pathlib import Path

import pytest

from partita.errors import InvalidInputError
from partita.fleet.lease import RunLease
from partita.fleet.live.files import PROGRESS, read_json, write_json
from partita.flows.runs.granted import Grant, by_grant
from partita.flows.runs.requests import RunRequest, TrainRequest
from partita.requests import make
from partita.runtime.checkpoint.files import MANIFEST
from partita.runtime.rendezvous import Host

JOB = {"PARTITA_LEASE": "job-1", "PARTITA_GPUS": "2", "PARTITA_STEPS": "40"}
GRANT = Grant(devices=2, steps=40, checkpoints="kept", servers=("local",), gpus=(2,))
WIDE = Grant(devices=3, steps=1, servers=("n1", "n2"), gpus=(2, 1))


def test_a_grant_is_what_the_variables_of_a_job_say() -> None:
    more = {"PARTITA_CHECKPOINT": "kept", "PARTITA_SERVERS": "local", "PARTITA_SERVER_GPUS": "2"}
    assert Grant.of({**JOB, **more}) == GRANT
    assert Grant.of({}) is None
    assert Grant.of({name: value for name, value in JOB.items() if name != "PARTITA_LEASE"}) is None


def test_what_a_request_leaves_open_is_the_grant_s() -> None:
    found = by_grant(make(TrainRequest, model="own:build"), GRANT, Host())
    assert (found.devices, found.steps, found.checkpoints) == (2, 40, "kept")
    assert (found.resume, found.save_every) == ("auto", 4)


def test_what_a_request_says_stays() -> None:
    asked = make(TrainRequest, model="m", steps=7, save_every=3, checkpoints="mine")
    found = by_grant(asked, GRANT, Host())
    assert (found.steps, found.save_every, found.checkpoints) == (7, 3, "mine")
    assert by_grant(asked, None, Host()) is asked


def test_a_script_s_steps_are_its_own() -> None:
    found = by_grant(make(RunRequest, plan="p.json", script=("own.py",)), GRANT, Host())
    assert "steps" not in found.given()
    assert found.checkpoints == "kept"


def test_a_run_that_goes_on_compares_no_first_steps(tmp_path: Path) -> None:
    asked = make(TrainRequest, model="m", check=True)
    assert by_grant(asked, GRANT, Host()).check
    (tmp_path / MANIFEST).write_text("{}")
    kept = Grant(devices=2, steps=40, checkpoints=str(tmp_path))
    assert not by_grant(asked, kept, Host()).check


@pytest.mark.parametrize(
    ("request_", "grant", "words"),
    [
        (make(TrainRequest, model="m", devices=4), GRANT, "--devices 4: the fleet granted 2"),
        (make(TrainRequest, model="m", devices=2), WIDE, "--devices 2: the fleet granted 3"),
    ],
)
def test_what_cannot_be_had_is_said(request_: TrainRequest, grant: Grant, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        by_grant(request_, grant, Host())
    assert words in str(caught.value)


def test_each_host_has_its_share_of_a_grant() -> None:
    asked = make(TrainRequest, model="m")
    hosts = [Host(index=index, num_hosts=2, port=1) for index in range(2)]
    assert [by_grant(asked, WIDE, host).devices for host in hosts] == [2, 1]
    assert by_grant(asked, WIDE, Host()).devices == 3  # declared servers are one machine
    with pytest.raises(InvalidInputError, match=r"PARTITA_SERVER_GPUS has .* 1 hosts"):
        by_grant(asked, GRANT, hosts[0])


def test_a_run_reports_its_steps_and_is_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_LEASE", str(tmp_path))
    monkeypatch.setenv("PARTITA_ATTEMPT", "2")
    write_json(tmp_path / "lease.json", {"attempt": 2})
    saved = [3]
    lease = RunLease(steps=9, saved=lambda: saved[-1], poll_s=0.0, report_s=0.0)
    word = read_json(tmp_path / PROGRESS)
    assert (word["state"], word["step"], word["saved_step"]) == ("running", 3, 3)
    lease.note(5)
    assert read_json(tmp_path / PROGRESS)["step"] == 5
    assert (lease.why(), lease.is_done) == ("", False)
    write_json(tmp_path / "lease.json", {"attempt": 2, "stop": True})
    assert lease.why() == "the end of its lease"
    saved.append(6)
    lease.note(6)
    lease.end(stopped=True)
    word = read_json(tmp_path / PROGRESS)
    assert (word["state"], word["saved_step"], word["done_s"]) == ("stopped", 6, None)
    lease.note(9)
    assert lease.is_done
    lease.end(stopped=False)
    word = read_json(tmp_path / PROGRESS)
    assert (word["state"], word["saved_step"]) == ("done", 9)
    assert word["done_s"] > 0
