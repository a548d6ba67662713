"""Requests made up from the description of the fleet's routes, right and wrong ones.

No answer may be a failure of the server, every status must be documented, and every body must be as
described. Nothing is started: the engine only remembers. Jobs that wait, run or have ended stand in
for most of the made-up numbers.
"""

import importlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_builders import FakeEngine, servers, spec

for _package in ("fastapi", "httpx"):
    pytest.importorskip(_package, reason=f"the server needs {_package}")
schemathesis = pytest.importorskip("schemathesis", reason="needs the package schemathesis")
SchemathesisConfig = importlib.import_module("schemathesis.config").SchemathesisConfig
engine = importlib.import_module("schemathesis.engine")
events = importlib.import_module("schemathesis.engine.events")
asgi = importlib.import_module("schemathesis.python.asgi")
make_app = importlib.import_module("partita.service.app").make_app
Settings = importlib.import_module("partita.service.settings").Settings
Users = importlib.import_module("partita.service.users").Users
Fleet = importlib.import_module("partita.fleet.live.fleet").Fleet
FleetSettings = importlib.import_module("partita.fleet.live.scheduler").FleetSettings

pytestmark = pytest.mark.slow

SUBMIT = "POST /fleet/jobs"
TOKEN = "secret"
CONFIG = {
    "headers": {"Authorization": f"Bearer {TOKEN}"},
    "seed": 20240817,
    "cache": {"enabled": False},
    "suppress-health-check": ["too_slow"],  # machines are shared
    "generation": {"max-examples": 8, "deterministic": True, "database": "none"},
    "phases": {"stateful": {"enabled": False}},
    "checks": {
        # A sensitivity is a document of its own, of which the description says nothing; and the
        # least and the most GPUs have an order, which it cannot say.
        "positive_data_acceptance": {"enabled": False},
        # The router names the methods of one route where a path has two.
        "allow_header_conformance": {"enabled": False},
    },
}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    # One decision, at the start: what is submitted meanwhile only waits.
    settings = FleetSettings(state=tmp_path / "fleet.sqlite", round_s=3600.0, poll_s=0.1)
    return Fleet(settings, servers(), "fifo:fair", FakeEngine())


def submitted(fleet: Fleet, folder: Path) -> list[int]:
    """Return jobs of which one will have ended, one will run and one wait after the decision."""
    jobs = [fleet.submit(spec(folder, gpus=4)) for _ in range(3)]
    fleet.cancel(jobs[0])
    return jobs


def wait_for_states(fleet: Fleet) -> None:
    last_s = time.monotonic() + 30
    while [row["state"] for row in fleet.jobs(all_jobs=True)] != [
        "cancelled",
        "running",
        "waiting",
    ]:
        assert time.monotonic() < last_s, fleet.jobs(all_jobs=True)
        time.sleep(0.02)


@contextmanager
def stand_in(jobs: list[int], folder: Path) -> Iterator[None]:
    """Let requests speak of jobs that there are, and submit some that can be, most of the time."""
    numbers, whole = itertools.cycle([*jobs, None]), itertools.cycle([True, True, False])
    good = spec(folder).to_json()

    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        del context, kwargs
        if case.meta.generation.mode.is_negative:
            return
        number = next(numbers)
        if "job" in (case.path_parameters or {}) and number is not None:
            case.path_parameters["job"] = number
        if case.operation.label == SUBMIT and isinstance(case.body, dict) and next(whole):
            kept = ("name", "tenant", "command", "sensitivity", "gpus")
            case.body |= {key: good[key] for key in kept}
            case.body.pop("key", None)

    schemathesis.hook(before_call)
    try:
        yield
    finally:
        schemathesis.hooks.unregister(before_call)


def explore(schema: Any) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Run every phase; returns how often each operation gave which status, and what is wrong."""
    seen: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    for event in engine.from_schema(schema).execute():
        if isinstance(event, events.FatalError):
            wrong.append(repr(event.exception))
        elif isinstance(event, events.NonFatalError):
            wrong.append(f"{event.label}: {event.value!r}")
        elif isinstance(event, events.ScenarioFinished):
            record = event.recorder
            labels = {key: case.value.operation.label for key, case in record.cases.items()}
            seen.update(
                (labels[key], each.response.status_code)
                for key, each in record.interactions.items()
                if each.response is not None
            )
            wrong += [
                f"{labels[key]}: {check.name}: {check.failure_info.failure.message}\n"
                f"{check.failure_info.code_sample}"
                for key, checks in record.checks.items()
                for check in checks
                if check.status == engine.Status.FAILURE
            ]
    return seen, wrong


def test_every_route_keeps_to_its_description(fleet: Fleet, tmp_path: Path) -> None:
    jobs, app = (
        submitted(fleet, tmp_path),
        make_app(Settings(users=Users(TOKEN), allow_hosts=(asgi.HOST,)), fleet),
    )
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json",
        app,
        config=SchemathesisConfig.from_dict(CONFIG),
        headers=CONFIG["headers"],
    )
    with asgi.ASGIClient(app), stand_in(jobs, tmp_path):
        wait_for_states(fleet)
        seen, wrong = explore(schema)
        known = {
            f"{method.upper()} {path}"
            for path, methods in app.openapi()["paths"].items()
            for method in methods
        }
    asgi.shutdown_lifespans()
    assert not wrong, "\n\n".join(wrong[:5])
    assert {label for label, _ in seen} == known
    # Jobs show tokens of their own there, which nobody can guess.
    known.remove("POST /fleet/news/{job}")
    assert {label for label, status in seen if status == 200} == known
    assert not fleet.failure
