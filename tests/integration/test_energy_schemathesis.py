"""Requests made up from the server's own OpenAPI description, right and wrong ones, at every route.

No answer may be a failure of the server, every status must be documented, and every body must be as
described. Jobs in each state that routes tell apart wait on the server and stand in for most of the
made-up names: otherwise nearly every request would end at "no such job".
"""

import contextlib
import importlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.core.codec import encode
from partita.testing.builders import small_energy_profile

for _package in ("fastapi", "httpx"):
    pytest.importorskip(_package, reason=f"the server needs {_package}")
schemathesis = pytest.importorskip("schemathesis", reason="needs the package schemathesis")
SchemathesisConfig = importlib.import_module("schemathesis.config").SchemathesisConfig
engine = importlib.import_module("schemathesis.engine")
asgi = importlib.import_module("schemathesis.python.asgi")
make_app = importlib.import_module("partita.service.app").make_app
models = importlib.import_module("partita.service.energy.models")
settings = importlib.import_module("partita.service.settings")
users = importlib.import_module("partita.service.users")

pytestmark = pytest.mark.slow

SEED = 20240817
TOKEN = "a-token-of-this-test"
LIMIT_S = 60.0
POLL = "GET /schedule/{job_id}"
BEGIN = "POST /register_job"
END = "DELETE /jobs/{job_id}"
DEGREES = ("pp_degree", "dp_degree", "tp_degree", "world_size")

CONFIG = {
    "seed": SEED,
    "cache": {"enabled": False},
    "suppress-health-check": ["too_slow"],  # machines are shared
    "generation": {"max-examples": 12, "deterministic": True, "database": "none"},
    "phases": {"stateful": {"max-steps": 6}},
    "checks": {
        # Degrees have a product and ranks a place, which a schema cannot say.
        "positive_data_acceptance": {"enabled": False},
        # The router names the methods of one route where a path has two.
        "allow_header_conformance": {"enabled": False},
    },
    # A wait that is over is answered with 504, by design. Tuples in a body are rewritten for an
    # older JSON Schema and then refused by a newer one. Both are looked at below instead.
    "operations": [
        {
            "include-name": POLL,
            "checks": {
                "not_a_server_error": {"enabled": False},
                "response_schema_conformance": {"enabled": False},
            },
        },
    ],
}


def energy(folder: Path, **rest: Any) -> settings.EnergySettings:
    return settings.EnergySettings(
        state=folder / "energy.sqlite", poll_limit_s=0.05, microbatches=2, **rest
    )


@pytest.fixture
def client(tmp_path: Path) -> Iterator[asgi.ASGIClient]:
    """Yield a client of an app in this process, started as Schemathesis starts it."""
    with asgi.ASGIClient(
        make_app(
            settings.Settings(
                allow_hosts=(asgi.HOST,), energy=energy(tmp_path, scheduler="perseus")
            )
        )
    ) as client:
        yield client
    asgi.shutdown_lifespans()


def register(client: asgi.ASGIClient, ranks: int, **rest: Any) -> str:
    """Register a job of two replicas of one stage and some of its ranks; returns its name."""
    body = {"pp_degree": 1, "dp_degree": 2, "tp_degree": 1, "world_size": 2, **rest}
    answer = client.post("/register_job", json=body)
    assert answer.status_code == 200, answer.text
    job = answer.json()
    for rank in range(ranks):
        place = {"rank": rank, "dp_rank": rank, "pp_rank": 0, "tp_rank": 0}
        body = {**place, "available_frequencies": [1400, 1050, 700], "blocking_w": 80.0}
        answer = client.post(f"/register_rank/{job}", json=body)
        assert answer.status_code == 200, answer.text
    return str(job)


def await_frontier(client: asgi.ASGIClient, job: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (answer := client.get(f"/frontier/{job}")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


@contextlib.contextmanager
def stand_in(jobs: list[str]) -> Iterator[None]:
    """Let requests speak of jobs and ranks that there are, most of the time."""
    names = itertools.cycle([*jobs, None])
    places = itertools.cycle([True, True, False])

    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        name = next(names)
        named = "job_id" in (case.path_parameters or {}) and case.operation.label != END
        if named and name is not None:
            case.path_parameters["job_id"] = name
        if case.meta.generation.mode.is_negative or not next(places):
            return
        for holder in (case.query, case.body):
            if isinstance(holder, dict) and isinstance(holder.get("rank"), int):
                holder["rank"] %= 2
        if case.operation.label == BEGIN and isinstance(case.body, dict):
            case.body |= {name: 1 for name in DEGREES if name in case.body}

    schemathesis.hook(before_call)
    try:
        yield
    finally:
        schemathesis.hooks.unregister(before_call)


def explore(schema: Any) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Run every phase; returns how often each operation gave which status, and what is wrong."""
    seen: Counter[tuple[str, int]] = Counter()
    wrong = []
    for event in engine.from_schema(schema).execute():
        if isinstance(event, engine.events.FatalError):
            wrong.append(repr(event.exception))
        elif isinstance(event, engine.events.NonFatalError):
            wrong.append(f"{event.label}: {event.value!r}")
        elif isinstance(event, engine.events.ScenarioFinished):
            seen.update(statuses(event.recorder))
            wrong += failures(event.recorder)
    return seen, wrong


def statuses(recorder: Any) -> Iterator[tuple[str, int]]:
    """Yield the operation and the status of each answer; bodies of clocks are read on the way."""
    for key, interaction in recorder.interactions.items():
        label, response = recorder.cases[key].value.operation.label, interaction.response
        if response is not None:
            if (label, response.status_code) == (POLL, 200):
                models.ScheduleReply.model_validate_json(response.content, strict=True)
            yield label, response.status_code


def failures(recorder: Any) -> Iterator[str]:
    """Yield each failed check with what repeats it."""
    for key, checks in recorder.checks.items():
        label = recorder.cases[key].value.operation.label
        for check in checks:
            if check.status == engine.Status.FAILURE:
                found = check.failure_info
                yield f"{label}: {check.name}: {found.failure.message}\n{found.code_sample}"


def operations(client: asgi.ASGIClient) -> list[tuple[str, str]]:
    """Return the methods and paths that the description lists."""
    paths = client.app.openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_keeps_to_its_description(client: asgi.ASGIClient) -> None:
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", client.app, config=SchemathesisConfig.from_dict(CONFIG)
    )
    deployed = register(client, 2, profile=encode(small_energy_profile()))
    await_frontier(client, deployed)
    with stand_in([deployed, register(client, 2), register(client, 1)]):
        seen, wrong = explore(schema)
    assert not wrong, "\n\n".join(wrong[:5])
    assert {(label, status) for label, status in seen if status >= 500} <= {(POLL, 504)}
    # Every route was reached, and took a request; a made-up rank has no place in any job.
    known = {f"{method} {path}" for method, path in operations(client)}
    assert {label for label, _ in seen} == known
    assert known - {label for label, status in seen if status == 200} <= {
        "POST /register_rank",
        "POST /register_rank/{job_id}",
    }


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN])
def test_nothing_is_said_without_the_token(tmp_path: Path, header: str | None) -> None:
    app = make_app(
        settings.Settings(
            allow_hosts=(asgi.HOST,), users=users.Users(TOKEN), energy=energy(tmp_path)
        )
    )
    headers = {} if header is None else {"Authorization": header}
    with asgi.ASGIClient(app) as client:
        for method, template in operations(client):
            path = template.format(job_id="some-job")
            wanted = 200 if path == "/healthz" else 401
            assert client.request(method, path, headers=headers).status_code == wanted, path
            right = {"Authorization": f"Bearer {TOKEN}"}
            assert client.request(method, path, headers=right).status_code != 401, path
        assert client.get("/openapi.json", headers=headers).status_code == 401
    asgi.shutdown_lifespans()


CODE = (
    "__import__('os').system('touch {mark}')",
    "[[('forward', __import__('os').system('touch {mark}'))]]",
    "import os\nos.system('touch {mark}')",
    "[[('forward', open('{mark}', 'w').write('x'))]]",
)


@pytest.mark.parametrize("code", CODE)
def test_a_plan_with_code_is_refused(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, code: str
) -> None:
    mark = tmp_path / "ran"
    plan = tmp_path / "freqs_pipeline_00001.py"
    plan.write_text(code.format(mark=mark), encoding="utf-8")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(encode(small_energy_profile())), encoding="utf-8")
    # A server that took the plan would only get as far as a folder that is not there.
    point = ("--scheduler", "point-solution", "--scheduler-option", f"solution_path={plan}")
    serve = ("energy", "serve", "--port", "0", "--state", str(tmp_path / "no" / "x.sqlite"), *point)
    for arguments in (serve, ("energy", "replay", "-q", str(profile), str(plan))):
        status, out, err = run(*arguments)
        assert (status, out) == (2, ""), err
        assert plan.name in err
        assert len(err.splitlines()) == 1, err
    assert not mark.exists()
