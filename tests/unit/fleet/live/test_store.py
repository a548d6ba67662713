"""The fleet's store: files of before, keys of submissions."""

import json
import sqlite3
from pathlib import Path

import pytest
from live_builders import spec

from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.engines.protocol import Place
from partita.fleet.live.jobspec import GpuChoice, read_spec
from partita.fleet.live.store import SCHEMA, FleetStore

CLEARS = "\x1b[2J\N{RIGHT-TO-LEFT OVERRIDE}job"


def test_jobs_of_the_first_version_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    connection = sqlite3.connect(path)
    for statement in SCHEMA[0]:
        assert isinstance(statement, str)
        connection.execute(statement)
    plain = spec(tmp_path).to_json()
    for number, said in enumerate((plain, {**plain, "name": CLEARS, "tenant": "a\n"})):
        connection.execute(
            "INSERT INTO fleet_jobs (key, spec, submitted_s, state) VALUES (?, ?, 1, 'waiting')",
            (f"key{number}", json.dumps(said)),
        )
    connection.commit()
    connection.close()
    store = FleetStore(path)
    first, second = store.jobs()
    assert (first.owner, json.loads(first.spec)) == ("", plain)
    found = read_spec(json.loads(second.spec))
    assert (found.name, found.tenant) == ("\\x1b[2J\\u202ejob", "a\\n")
    store.close()
    assert len(list(tmp_path.glob("fleet.sqlite.fleet-0-1.backup"))) == 1


def test_memory_that_was_kept_in_gb_is_taken_over_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    connection = sqlite3.connect(path)
    for step in (*SCHEMA[0], *SCHEMA[1]):
        if isinstance(step, str):
            connection.execute(step)
        else:
            step(connection)
    connection.execute("CREATE TABLE versions (part TEXT PRIMARY KEY, version INTEGER NOT NULL)")
    connection.execute("INSERT INTO versions VALUES ('fleet', 2)")
    place = {"server": "a", "gpus": [0], "cpu_ids": [], "cpus": 1.5, "memory_gb": 62.5}
    for number, handle in ((1, json.dumps({"name": "x", "places": [place]})), (2, None)):
        connection.execute(
            "INSERT INTO fleet_attempts (job, number, places, speed, handle, started_s) "
            "VALUES (1, ?, ?, 1, ?, 1)",
            (number, json.dumps([place]), handle),
        )
    connection.commit()
    connection.close()
    store = FleetStore(path)
    ray, planned = store.attempts()
    assert [each.places[0].memory_bytes for each in (ray, planned)] == [62.5e9, 62.5e9]
    assert ray.handle is not None
    assert planned.handle is None
    assert [Place.read(each) for each in ray.handle["places"]] == list(ray.places)
    store.close()


def test_a_key_is_that_of_one_job(tmp_path: Path) -> None:
    store = FleetStore(tmp_path / "fleet.sqlite")
    said = spec(tmp_path).to_json()
    assert store.add_job(said, "k", 1.0, owner="ana") == (1, True)
    assert store.add_job(said, "k", 2.0, owner="ana") == (1, False)
    for other, owner in (({**said, "steps": 11}, "ana"), (said, "bo")):
        with pytest.raises(InfeasibleError, match="'k'"):
            store.add_job(other, "k", 3.0, owner=owner)
    assert len(store.jobs()) == 1
    store.close()


@pytest.mark.parametrize("field", ["name", "tenant"])
def test_names_that_no_terminal_shows_are_refused(tmp_path: Path, field: str) -> None:
    for bad in (CLEARS, "a\nb", "a\x9bb", "zero\N{ZERO WIDTH SPACE}width", "\x7f"):
        with pytest.raises(InvalidInputError, match=r"terminals.*show") as refused:
            spec(tmp_path, **{field: bad})
        assert str(refused.value).isprintable()
    spec(tmp_path, **{field: "größe-2 ünïcode [x]"})
    with pytest.raises(InvalidInputError, match="type of GPU"):
        GpuChoice(least=1, most=1, type="a\x1b")
