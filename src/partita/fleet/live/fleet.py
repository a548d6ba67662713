"""The live fleet as its users see it: submit, look, cancel, drain; and the thread that runs it.

What its store holds of the past is a ``FleetHistory``.
"""

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from partita.core.columns import Floats
from partita.core.fleet import FleetHistory, HistoryOrigin, Leases, Sensitivity
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.engines.protocol import Engine, EngineAwayError
from partita.fleet.engines.shim import LOG
from partita.fleet.live.decision import Decider
from partita.fleet.live.jobspec import JobSpec, core_job, read_spec
from partita.fleet.live.scheduler import DRAINING, FleetSettings, Scheduler
from partita.fleet.live.store import OPEN, AttemptRow, FleetStore, JobRow, JobState
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import policy_of
from partita.units import format_seconds

logger = logging.getLogger(__name__)


class NoSuchJobError(InvalidInputError):
    """There is no job of that number."""


class Fleet:
    """A store, an engine and the scheduler between them.

    Args:
        settings: How it is set up.
        servers: What there is.
        policy: Name of the policy, such as ``fifo:tune``.
        engine: Starts and stops jobs.

    Raises:
        InvalidInputError: The policy is not known, or the state cannot be opened.
        UnsupportedError: Another scheduler has the state.
    """

    def __init__(
        self, settings: FleetSettings, servers: Servers, policy: str, engine: Engine
    ) -> None:
        self.settings, self.servers, self.policy, self.engine = settings, servers, policy, engine
        self._decider = Decider(
            servers,
            policy_of(policy),
            round_s=settings.round_s,
            restart_s=settings.restart_s,
            quotas=settings.quotas,
        )
        self.store = FleetStore(settings.state)
        settings.home.mkdir(mode=0o700, exist_ok=True)
        self.scheduler = Scheduler(self.store, engine, self._decider, settings)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure = ""

    def open(self) -> None:
        """Take over what is there as soon as the engine can be asked, and start the loop."""
        with suppress(EngineAwayError):
            self.scheduler.recover(time.time())
        self._thread = threading.Thread(target=self._loop, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the loop; jobs go on, and the next scheduler on this state finds them."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.store.close()

    def _loop(self) -> None:
        while not self._stop.is_set():
            pause_s = self.settings.poll_s
            try:
                pause_s = self.scheduler.poll(time.time())
                self.failure = ""
            except Exception as exc:
                # A full disk or a policy that fails must not end the scheduler of running jobs.
                if str(exc) != self.failure:
                    logger.exception("the scheduler failed; it tries again")
                self.failure = str(exc) or type(exc).__name__
            self._stop.wait(pause_s)

    def submit(self, spec: JobSpec, key: str = "", *, owner: str = "") -> int:
        """Keep a new job and return its number; the same key again is the same job.

        Args:
            spec: The job.
            key: What tells it from others, so that it can be sent again; empty = it is not.
            owner: Name of the user who submits it; empty = the server's own.

        Raises:
            InfeasibleError: It can never run here, or the key was that of another job.
            InvalidInputError: It wants a type of GPU that is not there.
        """
        try:
            self._decider.check(core_job(spec, 0, 0.0, self.servers.gpus_by_type))
        except InfeasibleError as exc:
            why = str(exc).removeprefix("job 0 ")
            raise InfeasibleError(f"job {spec.name!r} can never run here: {why}") from exc
        number, _ = self.store.add_job(
            spec.to_json(), key or uuid.uuid4().hex, time.time(), owner=owner
        )
        return number

    def tenant(self, job: int) -> str:
        """Return the tenant of a job; may be empty.

        Raises:
            NoSuchJobError: There is no such job.
        """
        return str(self.scheduler.submitted(self._row(job))["tenant"])

    def job_counts(self) -> dict[str, int]:
        """Return how many jobs there are in each state."""
        return self.store.job_counts()

    def cancel(self, job: int, *, by: str = "") -> None:
        """Let a job end; it may checkpoint.

        Args:
            job: Its number.
            by: Name of the user who cancels it; empty = the server's own.

        Raises:
            NoSuchJobError: There is no such job.
            InfeasibleError: It has ended already.
        """
        row = self._row(job)
        if row.state not in OPEN:
            raise InfeasibleError(f"job {job} has ended already: {row.state}")
        with self.store.change():
            self.store.update_job(job, cancelled=1)
            self.store.add_event(job, time.time(), f"{by or 'its user'} cancels it")

    def drain(self, *, on: bool) -> None:
        """Stop all jobs with their checkpoints and start none, or go on."""
        self.store.set_fact(DRAINING, "1" if on else "")

    def _row(self, job: int) -> JobRow:
        row = self.store.job(job)
        if row is None:
            raise NoSuchJobError(f"there is no job {job}")
        return row

    def read_log(self, job: int, offset: int, limit: int) -> tuple[str, int, bool]:
        """Return what a job printed from an offset on, where to go on, and whether that is all.

        Raises:
            NoSuchJobError: There is no such job.
        """
        row = self._row(job)  # before the file is read: what an ended job printed is all there
        try:
            with (self.settings.directory(job) / LOG).open("rb") as file:
                file.seek(offset)
                data = file.read(limit)
        except OSError:
            data = b""
        return _whole_text(data), offset + len(data), row.state not in OPEN and len(data) < limit

    def info(self) -> dict[str, Any]:
        """Return how the fleet is set up, and what is in use."""
        holding = self.store.attempts(open_only=True)
        states = [row.state for row in self.store.open_jobs()]
        return {
            "policy": self.policy,
            "engine": self.engine.name,
            "round_s": self.settings.round_s,
            "draining": self.scheduler.draining,
            "failure": self.failure or self.scheduler.seen.failure,
            "servers": [self._server(row, holding) for row in range(len(self.servers))],
            "waiting": states.count(JobState.WAITING),
            "running": len(states) - states.count(JobState.WAITING),
        }

    def _server(self, row: int, holding: list[AttemptRow]) -> dict[str, Any]:
        name = self.servers.names[row]
        here = [place for each in holding for place in each.places if place.server == name]
        return {
            "name": name,
            "gpu_type": self.servers.gpu_types[int(self.servers.gpu_type[row])],
            "gpus": int(self.servers.gpus[row]),
            "cpus": float(self.servers.cpus[row]),
            "memory_bytes": float(self.servers.memory_bytes[row]),
            "away": self.scheduler.seen.away.get(name, ""),
            "gpus_in_use": sum(len(place.gpus) for place in here),
            "cpus_granted": sum(place.cpus for place in here),
            "memory_bytes_granted": sum(place.memory_bytes for place in here),
        }

    def jobs(self, *, all_jobs: bool = False) -> list[dict[str, Any]]:
        """Return the jobs as they stand: those that are not done, or all."""
        rows = self.store.jobs() if all_jobs else self.store.open_jobs()
        attempts = {row.id.job: row for row in self.store.attempts(open_only=True)}
        free = self._free_gpus()
        return [self._job_json(row, attempts.get(row.id), free) for row in rows]

    def status(self, job: int) -> dict[str, Any]:
        """Return everything about a job.

        Raises:
            NoSuchJobError: There is no such job.
        """
        row = self._row(job)
        attempts = self.store.attempts(job)
        now = next((each for each in attempts if each.ended_s is None), None)
        seen = None if now is None else self.scheduler.seen.statuses.get(now.id)
        spec = read_spec(self.scheduler.submitted(row))
        return {
            **self._job_json(row, now, self._free_gpus()),
            "command": list(spec.command),
            "folder": str(spec.folder),
            "checkpoint": None if spec.checkpoint is None else str(spec.checkpoint),
            "read_back": "" if seen is None else seen.grant,
            "attempt_list": [_attempt_json(each) for each in attempts],
            "events": [{"at_s": at, "what": what} for at, what in self.store.events(job)],
        }

    def _job_json(
        self, row: JobRow, attempt: AttemptRow | None, free: tuple[int, int]
    ) -> dict[str, Any]:
        values = self.scheduler.submitted(row)
        due_s = None if values["deadline_s"] is None else row.submitted_s + values["deadline_s"]
        late_s = 0.0 if due_s is None else (row.finished_s or time.time()) - due_s
        late = f"past its deadline by {format_seconds(late_s)}" if late_s > 0 else ""
        notes = (row.note or self._waits(row, free), late)
        return {
            "id": row.id,
            "name": values["name"],
            "state": str(row.state),
            "note": "; ".join(note for note in notes if note),
            "deadline_s": due_s,
            "tenant": values["tenant"],
            "priority": values["priority"],
            "gpus": values["gpus"],
            "step": self.scheduler.step(row),
            "steps": values["steps"],
            "submitted_s": row.submitted_s,
            "started_s": row.started_s,
            "finished_s": row.finished_s,
            "attempts": row.attempts,
            "preemptions": row.preemptions,
            "migrations": row.migrations,
            "faults": row.faults,
            "owner": row.owner,
            "places": [place.to_json() for place in attempt.places] if attempt else [],
            "engine": self.engine.name,
            "lease_end_s": self._lease_end_s(attempt),
            "curve_speed": None if attempt is None else attempt.speed,
            "measured_speed": None if attempt is None else self._speed(row, attempt),
        }

    def _free_gpus(self) -> tuple[int, int]:
        """Return how many GPUs of servers that are not away nobody holds, and all of these."""
        holding = self.store.attempts(open_only=True)
        rows = [self._server(row, holding) for row in range(len(self.servers))]
        here = [row for row in rows if not row["away"]]
        total = sum(row["gpus"] for row in here)
        return total - sum(row["gpus_in_use"] for row in here), total

    def _waits(self, row: JobRow, free: tuple[int, int]) -> str:
        """Return why a job waits of which nothing else is known; empty = it does not."""
        if row.state is not JobState.WAITING:
            return ""
        if self.scheduler.draining:
            return "waits until the fleet starts jobs again"
        wanted = min(least for least, _, _ in self.scheduler.submitted(row)["gpus"])
        has = f"{free[0]} of {free[1]} GPUs are free"
        if wanted <= free[0]:
            return f"waits for its turn; {has}"
        return f"waits for {wanted} GPU{'s' * (wanted != 1)}; {has}"

    def _lease_end_s(self, attempt: AttemptRow | None) -> float | None:
        """Return when the lease of a job that runs ends if nobody renews it."""
        if attempt is None or attempt.stop_s is not None:
            return None
        rounds = self.scheduler.rounds
        return rounds.start_s(rounds.number(time.time()) + 1)

    def _speed(self, row: JobRow, attempt: AttemptRow) -> float | None:
        iteration_s = self.scheduler.spec(row).sensitivity.iteration_s
        return self.scheduler.measured_speed(attempt, iteration_s)

    def history(self) -> FleetHistory:
        """Return who ran where and when, as the simulator does."""
        return history_of(
            self.store,
            self.servers,
            policy=self.policy,
            round_s=self.settings.round_s,
            epoch_s=self.scheduler.epoch_s,
        )


def _whole_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _attempt_json(row: AttemptRow) -> dict[str, Any]:
    return {
        "number": row.id.number,
        "started_s": row.started_s,
        "ended_s": row.ended_s,
        "how": row.how,
        "places": [place.to_json() for place in row.places],
    }


def history_of(
    store: FleetStore, servers: Servers, *, policy: str, round_s: float, epoch_s: float
) -> FleetHistory:
    """Return who ran where and when; times are from the first start of the scheduler.

    Raises:
        InvalidInputError: No job was ever submitted.
    """
    rows = store.jobs()
    if not rows:
        raise InvalidInputError("no job was submitted yet; there is no history")
    specs = [read_spec(json.loads(row.spec)) for row in rows]
    parts: list[Sensitivity] = [spec.sensitivity for spec in specs]
    models = list(dict.fromkeys(part.name for part in parts))
    kinds = {part.name: part.kind for part in parts}
    attempts = store.attempts()
    ends = [each.ended_s for each in attempts if each.ended_s is not None]
    last_s = max([row.submitted_s for row in rows] + ends)
    done = [row.finished_s if row.state is JobState.FINISHED else None for row in rows]
    return FleetHistory(
        trace="live",
        policy=policy,
        origin=HistoryOrigin.LIVE,
        round_s=round_s,
        rounds=max(0, math.ceil((last_s - epoch_s) / round_s)),
        events=len(rows) + 2 * len(attempts),
        servers=servers.names,
        num_gpus=servers.num_gpus,
        num_cpus=float(servers.cpus.sum()),
        memory_bytes=float(servers.memory_bytes.sum()),
        models=tuple(models),
        kinds=tuple(kinds[name] for name in models),
        job_id=np.array([row.id for row in rows]),
        model=np.array([models.index(part.name) for part in parts]),
        gpus=np.array([core_job(s, 0, 0.0, {}).gpus for s in specs]),
        arrival_s=_since(epoch_s, [row.submitted_s for row in rows]),
        start_s=_since(epoch_s, [row.started_s for row in rows]),
        finish_s=_since(epoch_s, done),
        fair_s=np.array([s.steps * s.sensitivity.iteration_s for s in specs]),
        attained_gpu_s=np.array([row.attained_gpu_s for row in rows]),
        preemptions=np.array([row.preemptions for row in rows]),
        migrations=np.array([row.migrations for row in rows]),
        leases=_leases(attempts, servers, [row.id for row in rows], epoch_s, last_s),
    )


def _since(epoch_s: float, times: Sequence[float | None]) -> Floats:
    return np.array([math.nan if at is None else max(0.0, at - epoch_s) for at in times])


def _leases(
    attempts: Sequence[AttemptRow],
    servers: Servers,
    jobs: Sequence[int],
    epoch_s: float,
    last_s: float,
) -> Leases:
    rows = {job: row for row, job in enumerate(jobs)}
    held = [
        (each, place) for each in attempts for place in each.places if place.server in servers.names
    ]
    return Leases(
        job=np.array([rows[each.id.job] for each, _ in held], dtype=np.int32),
        server=np.array([servers.names.index(p.server) for _, p in held], dtype=np.int32),
        start_s=_since(epoch_s, [each.started_s for each, _ in held]),
        end_s=_since(epoch_s, [each.ended_s or last_s for each, _ in held]),
        gpus=np.array([len(place.gpus) for _, place in held], dtype=np.int32),
        cpus=np.array([place.cpus for _, place in held], dtype=np.float64),
        memory_bytes=np.array([place.memory_bytes for _, place in held], dtype=np.float64),
        speed=np.array([each.speed for each, _ in held], dtype=np.float64),
    )
