"""The Ray engine: a job is a submission to the Jobs API of a Ray cluster.

Spoken to over HTTP alone, so that the scheduler needs no Ray of its own and works with whatever
version the cluster has; the driver (`ray_driver`) runs on the cluster, where Partita has to be
installed. It makes a placement group with a bundle per host, in the order of the hosts, each on the
node that the policy chose, and runs the command in each. Ray keeps the accounts of GPUs, CPUs and
memory; it does not enforce CPUs and memory.

All jobs are looked at with two requests: the list of jobs and that of nodes.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.engines import shim
from partita.fleet.engines.environment import grant_variables, identity_variables
from partita.fleet.engines.protocol import (
    Attempt,
    Cause,
    EngineAwayError,
    Handle,
    Look,
    Order,
    Place,
    Status,
    Traits,
    attempt_of,
)
from partita.fleet.engines.ray_driver import ENDED, GIVEN, ORDER_VARIABLE
from partita.fleet.engines.remote import Controller, read_options
from partita.fleet.policies.resources import Servers
from partita.http import FIRST_PAUSE_S, LONGEST_PAUSE_S, ServerError, ServerLink, is_loopback
from partita.processes import job_environment

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
TYPE_LABEL = "ray.io/accelerator-type"
_TYPE_RESOURCE = "accelerator_type:"
_PORT = 20000
_START_S = 180.0
_OWN = ("GPU", "CPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How jobs are submitted.

    Attributes:
        address: Of the cluster's Jobs API (its dashboard).
        python: The interpreter on the cluster that has Partita.
        shared: Whether the nodes see the fleet's folder. If not, lease and progress travel over the
            fleet's HTTP API alone, and logs are Ray's.
        every: Seconds between two looks at Ray.
        start: Whether to start a Ray on this machine where nobody answers at the address. It goes
            on when the fleet ends, as jobs do.
    """

    address: str = DEFAULT_ADDRESS
    python: str = "python"
    shared: bool = True
    every: float = 1.0
    start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray describes it.

    Attributes:
        name: Its name.
        id: What tells it from others.
        is_alive: Whether it is there.
        gpu_type: Type of its GPUs by label, by Ray's own resource, or by a custom resource of as
            many as it has GPUs; empty = none of them.
        gpus: GPUs.
        cpus: CPUs.
        memory_bytes: Memory.
    """

    name: str
    id: str
    is_alive: bool
    gpu_type: str
    gpus: int
    cpus: float
    memory_bytes: float


def read_ray_nodes(answer: Any) -> tuple[RayNode, ...]:  # noqa: ANN401 (JSON)
    """Return the nodes of an answer of Ray's state API.

    Raises:
        InvalidInputError: It is no such answer.
    """
    try:
        return tuple(_node(row) for row in answer["data"]["result"]["result"])
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"Ray's list of nodes cannot be read: {exc!r}") from exc


def _node(row: Mapping[str, Any]) -> RayNode:
    total = row.get("resources_total") or {}
    gpus = int(total.get("GPU", 0))
    kinds = [(row.get("labels") or {}).get(TYPE_LABEL, "")]
    kinds += [key.removeprefix(_TYPE_RESOURCE) for key in total if key.startswith(_TYPE_RESOURCE)]
    kinds += [
        key for key, count in total.items() if key not in _OWN and ":" not in key and count == gpus
    ]
    return RayNode(
        name=str(row["node_name"]),
        id=str(row["node_id"]),
        is_alive=row["state"] == "ALIVE",
        gpu_type=next(filter(None, kinds), "").lower() if gpus else "",
        gpus=gpus,
        cpus=float(total.get("CPU", 0)),
        memory_bytes=float(total.get("memory", 0)),
    )


def ray_servers(options: Mapping[str, str]) -> Servers:
    """Return the living nodes of a Ray cluster that have GPUs, as servers.

    Raises:
        InvalidInputError: There are none, or two have one name.
        UnsupportedError: Ray does not answer.
    """
    chosen = read_options("ray", RayOptions, options)
    link = _link(chosen.address)
    try:
        nodes = _asked_nodes(link, chosen)
    except ServerError as exc:
        raise UnsupportedError(
            f"Ray cannot be asked: {exc}; give --engine-option address=http://HEAD:8265, or "
            "start=yes to start one here"
        ) from exc
    finally:
        link.close()
    # Ray lists them in no order that stays.
    there = sorted(
        (node for node in nodes if node.is_alive and node.gpus), key=lambda node: node.name
    )
    if len({node.name for node in there}) < len(there):
        raise InvalidInputError(
            "two nodes of Ray have one name; start them with --node-name, so that jobs can be "
            "placed"
        )
    if not there:
        raise InvalidInputError("Ray has no living node with GPUs")
    types = list(dict.fromkeys(node.gpu_type for node in there))
    return Servers(
        names=tuple(node.name for node in there),
        gpu_types=tuple(types),
        gpu_type=np.array([types.index(node.gpu_type) for node in there], dtype=np.int32),
        gpus=np.array([node.gpus for node in there], dtype=np.int32),
        cpus=np.array([node.cpus for node in there]),
        memory_bytes=np.array([node.memory_bytes for node in there], dtype=np.float64),
        storage_bytes_per_s=np.zeros(len(there)),
    )


def _asked_nodes(link: ServerLink, options: RayOptions) -> tuple[RayNode, ...]:
    """Return the nodes of a Ray cluster; starts one here where that is wanted and there is none."""
    query = {"limit": 10000}
    try:
        return read_ray_nodes(link.get("/api/v0/nodes", query))
    except ServerError as exc:
        if not options.start or exc.status:
            raise
    start_ray(options.address)
    last_s = time.monotonic() + _START_S
    while True:
        try:
            return read_ray_nodes(link.get("/api/v0/nodes", query))
        except ServerError:
            if time.monotonic() > last_s:
                raise
            time.sleep(0.5)


def start_ray(address: str) -> None:
    """Start a Ray on this machine whose Jobs API is at an address.

    Raises:
        InvalidInputError: The address is not this machine's.
        UnsupportedError: Ray is not installed, or does not start.
    """
    parts = urlsplit(address)
    if not is_loopback(parts.hostname or ""):
        raise InvalidInputError(f"a Ray can be started at a loopback address only, not {address}")
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError("ray is not installed; pip install 'partita[ray]'")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    command += ["--disable-usage-stats", f"--dashboard-host={parts.hostname}"]
    command += ["--port=0", "--include-dashboard=true", f"--dashboard-port={parts.port or 8265}"]
    command += [f"--node-name={socket.gethostname()}"]
    try:
        done = subprocess.run(
            command,
            env=job_environment(),
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise UnsupportedError(f"ray start did not end in {_START_S:g} s") from exc
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason is known"]
        raise UnsupportedError(f"ray start failed: {lines[-1][:200]}")


def make_ray_engine(
    servers: Servers, *, groups: bool = True, options: Mapping[str, str] | None = None
) -> "RayEngine":
    """Return the engine of a Ray cluster.

    Args:
        servers: The servers; their names are Ray's nodes.
        groups: Not used: Ray enforces nothing.
        options: Of ``RayOptions``, as texts.

    Raises:
        InvalidInputError: There is no such option.
    """
    del groups
    return RayEngine(servers, read_options("ray", RayOptions, options or {}))


def _link(address: str) -> ServerLink:
    return ServerLink(address, noun="ray", token="", timeout_s=30.0, keeps_open=False)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What Ray last said."""

    at_s: float = -1e9
    jobs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    nodes: tuple[RayNode, ...] = ()


class RayEngine:
    """Jobs as submissions to Ray.

    Args:
        servers: The servers; their names are Ray's nodes.
        options: How jobs are submitted.
        clock: Seconds that only grow.
    """

    name = "ray"
    traits = Traits(can_resize=False, chooses_gpus=True, is_remote=True)

    def __init__(
        self,
        servers: Servers,
        options: RayOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers, self.options = servers, options or RayOptions()
        self._clock = clock
        self._link = _link(self.options.address)
        self._seen = _Seen()
        self._given: dict[str, tuple[Place, ...]] = {}
        self._controller = Controller(
            noun="Ray", clock=clock, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S
        )

    def notes(self) -> tuple[str, ...]:
        """Return lines for people on how jobs run here."""
        return ("Ray counts CPUs and memory and enforces neither; jobs keep theirs while they run",)

    def start(self, order: Order) -> Handle:
        """Submit a job; where it is not known whether that happened, it is looked for."""
        if self._controller.pause_s > 0:
            raise self._controller.away_error()
        if not self._seen.nodes:
            self._ask_ray()
        handle = {
            "name": order.name,
            "fleet": order.fleet,
            "job": order.attempt.job,
            "attempt": order.attempt.number,
            "at_s": time.time(),
            "places": [place.to_json() for place in order.places],
        }
        grace_s = order.grace_s + 10
        variables = {
            **identity_variables(order, shared=self.options.shared),
            **grant_variables(order.places),
            ORDER_VARIABLE: _sealed(self._order(order)),
            "RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s)),
        }
        body = {
            "entrypoint": f"{self.options.python} -m partita.fleet.engines.ray_driver",
            "submission_id": order.name,
            "runtime_env": {"env_vars": variables},
        }
        try:
            self._link.post("/api/jobs/", body)
        except ServerError as exc:
            if not exc.is_passing:
                raise UnsupportedError(f"Ray refuses the job: {str(exc.detail)[:300]}") from exc
            self._controller.failed(exc)
        return handle

    def _order(self, order: Order) -> dict[str, Any]:
        ids = {node.name: node.id for node in self._seen.nodes if node.is_alive}
        missing = [place.server for place in order.places if place.server not in ids]
        if missing:
            raise EngineAwayError(f"Ray has no living node {missing[0]!r}", self.options.every)
        return {
            "name": order.name,
            "command": list(order.command),
            "folder": str(order.folder),
            "environment": dict(order.environment),
            "log": str(order.directory / shim.LOG) if self.options.shared else "",
            "grace_s": order.grace_s,
            "master_port": _PORT + (order.attempt.job * 7 + order.attempt.number) % 20000,
            "places": [
                {
                    "server": place.server,
                    "node": ids[place.server],
                    "gpus": len(place.gpus),
                    "cpus": round(place.cpus, 4),
                    "memory_bytes": int(place.memory_bytes),
                }
                for place in order.places
            ],
        }

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the driver to end the commands; it kills those that outlast their grace itself."""
        del grace_s
        try:
            self._link.post(f"/api/jobs/{handle['name']}/stop", {})
        except ServerError as exc:
            if exc.is_passing:
                self._controller.failed(exc)

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        """Refuse: a placement group cannot be changed.

        Raises:
            UnsupportedError: Always; `traits` says so before.
        """
        raise UnsupportedError(f"Ray cannot change what job {handle['name']} holds")

    def look(self, handles: Mapping[Attempt, Handle]) -> Look:
        """Return how jobs are, by two requests; none while the last look is recent."""
        now_s = self._clock()
        if self._controller.pause_s > 0:
            return Look(statuses={}, away=self._away(), failure=self._controller.failure)
        known = all(handle["name"] in self._seen.jobs for handle in handles.values())
        if now_s - self._seen.at_s >= self.options.every or not known:
            try:
                self._ask_ray()
            except (ServerError, InvalidInputError) as exc:
                self._controller.failed(exc)
                return Look(statuses={}, away=self._away(), failure=self._controller.failure)
            self._controller.answered()
        statuses = {}
        for attempt, handle in handles.items():
            status = self._status(handle)
            if status is not None:
                statuses[attempt] = status
        return Look(statuses=statuses, away=self._away())

    def _ask_ray(self) -> None:
        jobs = self._link.get("/api/jobs/")
        nodes = read_ray_nodes(self._link.get("/api/v0/nodes", {"limit": 10000}))
        found = {str(job["submission_id"]): job for job in jobs if job.get("submission_id")}
        self._seen = _Seen(at_s=self._clock(), jobs=found, nodes=nodes)

    def _away(self) -> dict[str, str]:
        alive = {node.name for node in self._seen.nodes if node.is_alive}
        if not self._seen.nodes:
            return {}
        return {name: "Ray lost it" for name in self.servers.names if name not in alive}

    def _status(self, handle: Handle) -> Status | None:
        job = self._seen.jobs.get(handle["name"])
        if job is None:
            if time.time() - handle["at_s"] <= 10 * self.options.every:
                return None
            return Status(running=False, cause=Cause.ENGINE, why="Ray does not know it")
        state = str(job["status"])
        if state in ("PENDING", "RUNNING"):
            given = self._what_was_given(handle) if state == "RUNNING" else None
            return Status(
                running=True,
                given=given,
                grant=_grant(handle["name"], given or ()),
                waits="" if given else "Ray prepares it",
            )
        self._given.pop(handle["name"], None)
        away = self._away()
        return _end(job, [p["server"] for p in handle["places"] if p["server"] in away])

    def _what_was_given(self, handle: Handle) -> tuple[Place, ...] | None:
        """Return what the driver has printed; asked for until it is there, then kept."""
        name = str(handle["name"])
        if name not in self._given:
            try:
                log = str(self._link.get(f"/api/jobs/{name}/logs").get("logs", ""))
            except ServerError:
                return None
            line = next((row for row in log.splitlines() if row.startswith(GIVEN)), None)
            if line is None:
                return None
            rows = json.loads(line.removeprefix(GIVEN))
            planned = {place["server"]: Place.read(place) for place in handle["places"]}
            self._given[name] = tuple(
                Place(
                    server=row["server"],
                    gpus=tuple(row["gpus"]),
                    cpu_ids=(),
                    cpus=planned[row["server"]].cpus,
                    memory_bytes=planned[row["server"]].memory_bytes,
                )
                for row in rows
            )
        return self._given[name]

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        """Return this fleet's jobs that run or wait, by their names."""
        try:
            self._ask_ray()
        except (ServerError, InvalidInputError) as exc:
            self._controller.failed(exc)
            raise self._controller.away_error() from exc
        handles = {}
        for name, job in self._seen.jobs.items():
            attempt = attempt_of(fleet, name)
            if attempt is not None and job["status"] in ("PENDING", "RUNNING"):
                order = (job.get("runtime_env") or {}).get("env_vars", {}).get(ORDER_VARIABLE)
                handles[attempt] = {
                    "name": name,
                    "fleet": fleet,
                    "job": attempt.job,
                    "attempt": attempt.number,
                    "at_s": time.time(),
                    "places": _planned(order),
                }
        return handles


def _sealed(order: Mapping[str, Any]) -> str:
    """Return an order as JSON without ``$``: Ray replaces variables in those that it is given."""
    return json.dumps(order).replace("$", "\\u0024")


def _planned(order: str | None) -> list[dict[str, Any]]:
    """Return the places of an order, as a handle keeps them."""
    if order is None:
        return []
    return [
        Place(
            server=place["server"],
            gpus=tuple(range(place["gpus"])),
            cpu_ids=(),
            cpus=place["cpus"],
            memory_bytes=float(place["memory_bytes"]),
        ).to_json()
        for place in json.loads(order)["places"]
    ]


def _grant(name: str, given: Sequence[Place]) -> str:
    parts = [
        f"{place.server}: GPUs {','.join(map(str, place.gpus))}, {place.cpus:g} CPUs"
        for place in given
    ]
    return f"Ray job {name} on {'; '.join(parts)}" if parts else ""


def _end(job: Mapping[str, Any], lost: Sequence[str]) -> Status:
    """Return how a job ended, by the last line of its driver where there is one.

    Args:
        job: The job, as Ray describes it.
        lost: Nodes of it that Ray has lost: a driver may have died with one.
    """
    ended_s = float(job["end_time"]) / 1000 if job.get("end_time") else None
    state, message = str(job["status"]), str(job.get("message") or "")
    if state == "SUCCEEDED":
        return Status(running=False, exit_code=0, ended_s=ended_s)
    if state == "STOPPED":
        return Status(
            running=False,
            ended_s=ended_s,
            cause=Cause.OTHERS,
            why="stopped in Ray, outside of the fleet",
        )
    line = next((row for row in message.splitlines() if row.startswith(ENDED)), None)
    if line is None and lost:
        why = f"node {lost[0]} died"
        return Status(running=False, ended_s=ended_s, cause=Cause.ENGINE, why=why)
    if line is None:
        said = (message.strip().splitlines() or ["no reason is known"])[-1][:200]
        return Status(running=False, ended_s=ended_s, why=f"its driver on Ray died: {said}")
    values = json.loads(line.removeprefix(ENDED))
    if values["cause"] == "itself":
        return Status(running=False, exit_code=int(values["exit_code"]), ended_s=ended_s)
    cause = Cause.ENGINE if values["cause"] == "node" else Cause.ITSELF
    return Status(running=False, ended_s=ended_s, cause=cause, why=str(values["why"]))
