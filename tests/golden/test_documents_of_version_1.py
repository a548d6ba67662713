"""Every file that the first version wrote is read, and nothing in it gets lost.

Files: ``documents_v1``; its README says what wrote them.
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita import load, lower, simulate
from partita.cli.main import main
from partita.core.cluster import Cluster
from partita.core.codec import decode, decode_part, encode, encode_part
from partita.core.energy import EnergyProfile, Frontier
from partita.core.fleet import FleetHistory, Sensitivity, Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Objective, Problem
from partita.core.program import Program
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.fleet.live.jobspec import read_spec
from partita.fleet.live.store import FleetStore, JobState
from partita.fleet.profiler.record import read_record
from partita.profiler.cache import ProfileCache
from partita.profiler.calibrate.records import read_measurement, write_measurement
from partita.runtime.directory import past_runs
from partita.runtime.job import Job, JobDirectory, read_job, write_job

FILES = Path(__file__).parent / "documents_v1"
DOCUMENTS = FILES / "documents"
NAMES = sorted(path.stem for path in DOCUMENTS.glob("*.json"))
TYPES: Mapping[str, type] = {
    "partita.graph": Graph,
    "partita.cluster": Cluster,
    "partita.objective": Objective,
    "partita.problem": Problem,
    "partita.plan": Plan,
    "partita.solution": Solution,
    "partita.program": Program,
    "partita.timeline": Timeline,
    "partita.energy-profile": EnergyProfile,
    "partita.frontier": Frontier,
    "partita.sensitivity": Sensitivity,
    "partita.trace": Trace,
    "partita.fleet-history": FleetHistory,
}
RENAMED: Mapping[str, tuple[str, float]] = {
    "dataset_gb": ("dataset_bytes", 1e9),
    "working_gb": ("working_bytes", 1e9),
    "memory_gb": ("memory_bytes", 1e9),
    "demand_memory_gb": ("demand_memory_bytes", 1e9),
    "storage_mb_per_s": ("storage_bytes_per_s", 1e6),
    "storage_bandwidth_mb_per_s": ("storage_bandwidth_bytes_per_s", 1e6),
    "memory_gib_per_s": ("memory_bytes_per_s", 2.0**30),
}
"""Keys of version 1 that have another name today, with the factor from the old unit to the new."""


def values_of(name: str) -> Any:
    """Return the JSON values of a sample document."""
    return json.loads((DOCUMENTS / f"{name}.json").read_text(encoding="utf-8"))


def lost(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield what version 1 has written and a document of today does not say any more.

    Keys that have been added since are no loss.
    """
    old, new = unfolded(old), unfolded(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            name, factor = (key, 1.0) if key in new else RENAMED.get(key, (key, 1.0))
            if name in new:
                yield from lost(scaled(value, factor), new[name], f"{path}.{key}")
            else:
                yield f"{path}.{key} is gone"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for row, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from lost(before, now, f"{path}[{row}]")
    elif old != new and not (isinstance(new, float) and old == pytest.approx(new, rel=1e-15)):
        yield f"{path} was {old!r}, is {new!r}"


def unfolded(value: Any) -> Any:
    """Return a column or tuple with all of its rows, however short it is written."""
    if isinstance(value, dict) and value.keys() == {"every", "rows"}:
        return [value["every"]] * value["rows"]
    if isinstance(value, dict) and value.keys() == {"distinct", "of"}:
        return [value["distinct"][row] for row in value["of"]]
    return value


def scaled(value: Any, factor: float) -> Any:
    """Return a number or column in another unit; what is not known or unlimited stays so."""
    value = unfolded(value)
    if isinstance(value, list):
        return [scaled(part, factor) for part in value]
    return value if factor == 1 or not isinstance(value, int | float) else value * factor


def test_there_is_a_sample_of_every_document() -> None:
    assert {values_of(name)["format"] for name in NAMES} == set(TYPES)
    assert {values_of(name)["version"] for name in NAMES} == {1}


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_read_whole(name: str) -> None:
    values = values_of(name)
    found = load(DOCUMENTS / f"{name}.json")
    assert type(found) is TYPES[values["format"]]
    again = encode(found)
    assert decode(again) == found
    # The version may be a newer one; all else must still be there.
    assert list(lost({**values, "version": again["version"]}, again)) == []


def test_a_plan_is_lowered_and_played_as_before() -> None:
    solution = load(DOCUMENTS / "solution-alternatives.json")
    program = lower(solution.problem, solution.plan)
    assert program == load(DOCUMENTS / "program-tp-shares.json")
    timeline = simulate(solution.problem, solution.plan, program=program)
    before = load(DOCUMENTS / "timeline-simulated.json")
    # What ops that recompute read of others of their stage is kept, which was not counted.
    assert (timeline.memory_bytes >= before.memory_bytes).all()
    assert replace(timeline, memory_bytes=before.memory_bytes) == before
    planned = load(DOCUMENTS / "solution-uniform.json")
    timeline = simulate(planned.problem, planned.plan)
    assert timeline == load(DOCUMENTS / "timeline-of-command.json")


def test_a_trace_is_played_as_before(tmp_path: Path) -> None:
    trace, output = str(DOCUMENTS / "trace-drawn.json"), str(tmp_path / "history.json")
    with pytest.raises(SystemExit) as stop:
        main(["fleet", "simulate", trace, "-c", "2x8xv100", "-p", "fifo:tune", "-o", output])
    assert stop.value.code == 0
    assert load(output) == load(DOCUMENTS / "history-simulated.json")


def test_the_fingerprint_of_a_graph_is_that_of_before() -> None:
    """Or else old plans would not fit their graphs, and no profile in a cache be found."""
    solution = load(DOCUMENTS / "solution-uniform.json")
    assert load(DOCUMENTS / "graph-profiled.json").fingerprint == solution.plan.fingerprint


def test_a_run_directory_is_read() -> None:
    (run,) = past_runs(FILES / "runs")
    assert run.name == "2026-11-18_build_2xcpu_1f1b_001"
    assert run.results["losses"] == [0.038044773042201996, 0.0358143225312233]
    directory = JobDirectory(run.path)
    job = directory.read_job()
    assert (job.steps, job.recipe.optimizer) == (2, "adam")
    assert job.model is not None
    assert job.model.text == "tiny:build"
    assert directory.read_solution().planner == "uniform"
    assert [news[0] for news in directory.read_news(0, 0)[0]] == [0, 1]
    assert isinstance(load(run.path / "timeline.json"), Timeline)


@pytest.mark.parametrize("name", ["emulated", "script"])
def test_a_job_is_read_whole(name: str) -> None:
    text = (FILES / "jobs" / f"{name}.json").read_text(encoding="utf-8")
    job = read_job(text)
    assert read_job(write_job(job)) == job
    new = encode_part(job)
    # What it trains with stands together today.
    assert list(lost(json.loads(text), {**new, **new["recipe"]})) == []
    assert decode_part(new, Job, "job") == job


def test_a_profile_in_the_cache_is_found(caplog: pytest.LogCaptureFixture) -> None:
    (path,) = (FILES / "cache").glob("*.graph.json")
    graph = ProfileCache(path.parent).load(path.name.removesuffix(".graph.json"))
    assert graph is not None
    assert graph.fingerprint == load(DOCUMENTS / "graph-profiled.json").fingerprint
    assert not caplog.records


def test_calibration_samples_and_the_cluster_are_read() -> None:
    text = (FILES / "calibration" / "samples.json").read_text(encoding="utf-8")
    found = read_measurement(text)
    assert len(found.devices) == 2
    assert list(lost(json.loads(text), json.loads(write_measurement(found)))) == []
    cluster = load(FILES / "calibration" / "cluster.yaml")
    assert isinstance(cluster, Cluster)
    assert cluster.device_names == ("host0/cpu0", "host0/cpu1")


def test_a_record_of_a_fleet_profile_is_read_whole() -> None:
    folder = FILES / "fleet-profile" / "job-0"
    record = read_record(folder)
    values = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    assert list(lost(values, encode_part(record))) == []


def database(name: str, path: Path) -> Path:
    """Return a database as the first version left it."""
    with sqlite3.connect(path) as connection:
        connection.executescript((FILES / "databases" / name).read_text(encoding="utf-8"))
    connection.close()
    return path


def test_the_jobs_of_a_fleet_are_read(tmp_path: Path) -> None:
    store = FleetStore(database("fleet.sql", tmp_path / "fleet.sqlite"))
    try:
        jobs = store.jobs()
        attempts = store.attempts()
        events = store.events(4)
    finally:
        store.close()
    assert [job.state for job in jobs] == [
        JobState.FINISHED,
        JobState.RUNNING,
        JobState.RUNNING,
        JobState.WAITING,
    ]
    specs = [read_spec(json.loads(job.spec)) for job in jobs]
    assert [spec.name for spec in specs] == ["first", "second", "third", "fourth"]
    assert [spec.gpus[0].most for spec in specs] == [1, 4, 4, 2]
    for job, spec in zip(jobs, specs, strict=True):
        now = encode(spec.sensitivity)
        then = {**json.loads(job.spec)["sensitivity"], "version": now["version"]}
        assert list(lost(then, now)) == []
    assert [attempt.gpus for attempt in attempts] == [1, 4, 4, 2]
    assert [attempt.places[0].memory_bytes for attempt in attempts] == [1e9, 4e9, 4e9, 2e9]
    assert [attempt.ended_s is None for attempt in attempts] == [False, True, True, False]
    assert events[-1][1] == "ended with exit code 0"


def test_the_energy_server_gives_its_old_jobs_the_same_clocks(tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx")
    app_of = pytest.importorskip("partita.service.app")
    settings_of = pytest.importorskip("partita.service.settings")
    state = database("energy.sql", tmp_path / "jobs.sqlite")
    expected = json.loads((FILES / "databases" / "energy-answers.json").read_text("utf-8"))
    settings = settings_of.EnergySettings(state=state, scheduler="all-max", microbatches=2)

    async def ask() -> dict[str, Any]:
        app = app_of.make_app(settings_of.Settings(energy=settings))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            answers = {}
            for job in expected:
                answer = await client.get(f"/schedule/{job}", params={"rank": 0, "wait": 20})
                answers[job] = answer.json()
            return answers

    found = asyncio.run(asyncio.wait_for(ask(), 60))
    assert list(lost(expected, found)) == []


def test_a_change_of_a_document_is_seen() -> None:
    """The comparison of these tests misses nothing: a value, a row, a key."""
    old = {"a": [1.0, 2.0], "b": {"every": 3, "rows": 2}, "c": None}
    assert list(lost(old, {"a": [1.0, 2.0], "b": [3, 3], "c": None, "new": 1})) == []
    assert list(lost(old, {"a": [1.0, 2.5], "b": [3, 3], "c": None})) == [".a[1] was 2.0, is 2.5"]
    assert len(list(lost(old, {"a": [1.0], "b": [3], "c": 0}))) == 3
    assert list(lost(old, {"a": [1.0, 2.0], "b": [3, 3]})) == [".c is gone"]
