"""The loop of the live scheduler: rounds, leases, starts, stops and ends.

At the end of a round the policy is asked. Who keeps its GPUs has its lease renewed and is not
disturbed; its CPUs and memory are changed while it runs where the engine can. Who loses them is
asked to stop, checkpoints and ends, and whoever is granted its devices starts as soon as they are
free. What happens between rounds (a job ends, crashes, comes) waits for the next one, as in the
simulator; `decision.py` has what counts when one ends.

Everything that matters is in the store before it is done, so that `recover` finds after a kill at
any instant: what was to be started and was, what was not, and what has ended meanwhile.
"""

import hmac
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.core.fleet import Sensitivity
from partita.errors import InvalidInputError, PartitaError, reason_of
from partita.fleet.engines.devices import (
    Share,
    choose_devices,
    keep_sizes,
    pieces_of,
    same_gpus,
    whole_cpus,
)
from partita.fleet.engines.protocol import (
    Attempt,
    Engine,
    EngineAwayError,
    Look,
    Order,
    Place,
    Status,
)
from partita.fleet.engines.shim import LOG
from partita.fleet.gigabytes import in_gb
from partita.fleet.lease import CHECKPOINT_VARIABLE, STEPS_VARIABLE
from partita.fleet.live.decision import (
    Decider,
    Granted,
    LiveJob,
    Rounds,
    has_ended,
    is_about_to_end,
)
from partita.fleet.live.files import LEASE, PROGRESS, figure, read_json, write_json
from partita.fleet.live.jobspec import JobSpec, core_job, read_spec
from partita.fleet.live.news import NEWS_PATH, TOKEN_VARIABLE, URL_VARIABLE, news_token
from partita.fleet.live.store import AttemptRow, FleetStore, JobRow, JobState
from partita.fleet.live.verdict import End, Verdict, judge
from partita.processes import how_it_ended, last_lines, retry_pause_s
from partita.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of the live scheduler.

    Attributes:
        state: The SQLite file; the jobs' directories are beside it.
        round_s: Length of a round.
        poll_s: Seconds between two looks at the jobs.
        hold_s: How long a job goes on after the end of its lease when nobody renews it.
        backoff_s: Seconds before the first try after a fault; doubled with each in a row.
        restart_s: Assumed cost of a restart of a job that gives none.
        quotas: GPUs that a tenant may hold, by name.
    """

    state: Path
    round_s: float = 300.0
    poll_s: float = 0.5
    hold_s: float = 3600.0
    backoff_s: float = 10.0
    restart_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("round_s", "poll_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise InvalidInputError(
                    f"{name} is {getattr(self, name)}; expected more than 0 seconds"
                )

    @property
    def home(self) -> Path:
        """Where the directories of jobs are."""
        return self.state.with_name(f"{self.state.name}.d").resolve()

    def directory(self, job: int) -> Path:
        """Return where lease, progress and log of a job are."""
        return self.home / f"job-{job}"


logger = logging.getLogger(__name__)
DRAINING = "draining"
_STOPS = "stops: "
_LONGEST_BACKOFF_S = 600.0
_NOBODY = -1
"""Attempt in a lease that is nobody's: who still comes to start for an older one does not."""


class Scheduler:
    """Runs the jobs of a store on an engine.

    Args:
        store: The state.
        engine: Starts and stops jobs.
        decider: Says what each job gets.
        settings: Rounds, waits and retries.
    """

    def __init__(
        self, store: FleetStore, engine: Engine, decider: Decider, settings: FleetSettings
    ) -> None:
        self.store, self.engine, self.settings = store, engine, settings
        self._decider = decider
        self._gpus = decider.servers.gpus_by_type
        self._specs: dict[int, JobSpec] = {}
        self._curves: dict[str, Sensitivity] = {}
        self._unfit: dict[int, str] = {}
        self._targets: dict[int, tuple[Granted, tuple[Place, ...]]] = {}
        self.epoch_s = float(store.fact("epoch_s", repr(time.time())))
        self.rounds = Rounds(epoch_s=self.epoch_s, round_s=settings.round_s)
        self._last_round = -1
        self.news_url = ""
        """Address at which jobs elsewhere reach this scheduler; empty = they do not."""
        self._news_secret = store.fact("news_secret", secrets.token_hex(32))
        self._is_recovered = False
        self._first_words: dict[tuple[Attempt, tuple[Place, ...]], tuple[float, float]] = {}
        self.seen = Look(statuses={})
        """How jobs and servers were when they were last looked at."""

    @property
    def draining(self) -> bool:
        """Whether nothing is started, and what runs is stopped."""
        return self.store.fact(DRAINING, "") == "1"

    def recover(self, now_s: float) -> None:
        """Take over what a scheduler before this one has left.

        Raises:
            EngineAwayError: What runs cannot be found out now; ``poll`` tries again.
        """
        running = dict(self.engine.running(self.store.fleet))
        for row in self.store.attempts(open_only=True):
            found = running.pop(row.id, None)
            if row.handle is None and found is not None:
                self.store.update_attempt(row.id, handle=json.dumps(dict(found)))
            elif row.handle is None:
                self._write_lease(row.id.job, _NOBODY, (), now_s, stop=True)
                with self.store.change():
                    self.store.update_attempt(row.id, ended_s=now_s, how="was not started")
                    self.store.update_job(row.id.job, state=JobState.WAITING)
        for attempt, handle in running.items():
            logger.warning("job %d attempt %d is nobody's: it is ended", *attempt)
            self.engine.stop(handle, grace_s=0)
        self._is_recovered = True

    def poll(self, now_s: float) -> float:
        """Look at all jobs once, and do what is due.

        Returns:
            The seconds after which it should look again.
        """
        if not self._is_recovered:
            try:
                self.recover(now_s)
            except EngineAwayError as exc:
                self.seen = Look(statuses={}, failure=str(exc))
                return exc.retry_s
        attempts = self.store.attempts(open_only=True)
        self.seen = self.engine.look(
            {row.id: row.handle for row in attempts if row.handle is not None}
        )
        for row in attempts:
            status = self.seen.statuses.get(row.id)
            if status is not None:
                self._watch(row, status, now_s)
        number = self.rounds.number(now_s)
        if number != self._last_round:
            # The first decision is about what is there now; all others, about a boundary.
            is_first = self._last_round < 0
            at_s = now_s if is_first else self.rounds.start_s(number)
            if not is_first and not self._is_settled(at_s, now_s):
                return self.rounds.settling_s / 10
            self._round(at_s, now_s)
            self._last_round = number
        jobs = [row for row in self.store.open_jobs() if row.state is JobState.WAITING]
        if jobs:
            self._start_waiting(jobs, now_s)
        return min(self.settings.poll_s, max(0.0, self.rounds.start_s(number + 1) - now_s))

    def _is_settled(self, at_s: float, now_s: float) -> bool:
        """Whether every job has reported at a boundary, or had the time to."""
        by_s = at_s + self.rounds.settling_s
        return now_s >= by_s or not any(
            row.stop_s is None and is_about_to_end(self._progress(row), by_s)
            for row in self.store.attempts(open_only=True)
        )

    def _progress(self, attempt: AttemptRow) -> Mapping[str, Any]:
        """Return the last word of an attempt; empty if there is none."""
        values = read_json(self.settings.directory(attempt.id.job) / PROGRESS)
        return values if values.get("attempt") == attempt.id.number else {}

    def spec(self, row: JobRow) -> JobSpec:
        """Return what was submitted; equal sensitivities are one object."""
        if row.id not in self._specs:
            values = self.submitted(row)
            spec = read_spec(values)
            key = json.dumps(values["sensitivity"], sort_keys=True)
            curve = self._curves.setdefault(key, spec.sensitivity)
            self._specs[row.id] = replace(spec, sensitivity=curve)
        return self._specs[row.id]

    def submitted(self, row: JobRow) -> Mapping[str, Any]:
        """Return what was submitted, as a JSON object."""
        values: Mapping[str, Any] = json.loads(row.spec)
        return values

    def step(self, row: JobRow) -> int:
        """Return how many steps a job has done, by its last word."""
        values = read_json(self.settings.directory(row.id) / PROGRESS)
        running = row.state is JobState.RUNNING and values.get("attempt") == row.attempts
        step = figure(values, "step" if running else "saved_step")
        return row.step if step is None else int(step)

    def measured_speed(self, attempt: AttemptRow, iteration_s: float) -> float | None:
        """Return how fast an attempt runs, in the unit of its curve; None = not known yet.

        Counted from the first word of the attempt that was seen on its present grant.
        """
        values = self._progress(attempt)
        step, at_s = figure(values, "step"), figure(values, "at_s")
        if step is None or at_s is None:
            return None
        first = self._first_words.setdefault((attempt.id, attempt.places), (at_s, step))
        if at_s <= first[0] or step <= first[1]:
            return None
        return (step - first[1]) / (at_s - first[0]) * iteration_s

    # Rounds

    def _round(self, at_s: float, now_s: float) -> None:
        """Ask the policy how things stood at the start of a round, and carry it out."""
        attempts = {row.id.job: row for row in self.store.attempts(open_only=True)}
        jobs = self.store.open_jobs()
        with self.store.change():
            for row in jobs:
                step = self.step(row)
                if step != row.step:
                    self.store.update_job(row.id, step=step)
        ended = {
            job
            for job, row in attempts.items()
            if row.stop_s is None and has_ended(self._progress(row), at_s)
        }
        grants: dict[int, Granted] = {}
        if not self.draining:
            there = [row for row in jobs if row.id not in ended and self._may_run(row, at_s)]
            grants = self._decider.grants(
                at_s - self.epoch_s,
                [self._live(row, attempts.get(row.id), at_s) for row in there],
                self.seen.away,
            )
        places = self._places(grants, attempts)
        self._targets = {job: (grants[job], places[job]) for job in grants}
        self._first_words = {
            key: word for key, word in self._first_words.items() if key[0].job in attempts
        }
        for job, attempt in attempts.items():
            if job in ended:
                self._stop_if_stuck(attempt, now_s)
            elif attempt.stop_s is None:
                self._renew_or_stop(attempt, self._targets.get(job), now_s)

    def _places(
        self, grants: Mapping[int, Granted], attempts: Mapping[int, AttemptRow]
    ) -> dict[int, tuple[Place, ...]]:
        """Return the devices of all grants, as the engine can give them."""
        servers, traits = self._decider.servers, self.engine.traits
        held = {job: row.places for job, row in attempts.items() if row.stop_s is None}
        pieces = {job: grant.pieces for job, grant in grants.items()}
        places = choose_devices(pieces, held, servers)
        if not traits.can_split_cpus:
            places = whole_cpus(places, servers)
        if not traits.can_resize:
            shares = {
                job: Share(
                    places=places[job],
                    gain=grant.speed / attempts[job].speed if job in held else 1.0,
                )
                for job, grant in grants.items()
            }
            places = keep_sizes(shares, held, servers)
        return places

    def _stop_if_stuck(self, attempt: AttemptRow, now_s: float) -> None:
        """Ask a job to stop whose steps are done and whose process does not end."""
        row = self.store.job(attempt.id.job)
        done_s = figure(self._progress(attempt), "done_s")
        if row is not None and done_s is not None and now_s > done_s + self.spec(row).grace_s:
            why = f"its steps have been done for {now_s - done_s:.3g} s, and it has not ended"
            self._ask_to_stop(attempt, why, now_s)

    def _may_run(self, row: JobRow, at_s: float) -> bool:
        """Whether the policy is asked about a job; one that no longer fits here only waits."""
        if row.cancelled or max(row.submitted_s, row.retry_s) > at_s:
            return False
        if row.id not in self._unfit:
            try:
                self._decider.check(core_job(self.spec(row), row.id, 0.0, self._gpus))
            except PartitaError as exc:
                self._unfit[row.id] = f"cannot run on these servers: {exc}"
                self.store.update_job(row.id, note=self._unfit[row.id])
            else:
                self._unfit[row.id] = ""
        return not self._unfit[row.id]

    def _live(self, row: JobRow, attempt: AttemptRow | None, at_s: float) -> LiveJob:
        spec = self.spec(row)
        job = core_job(spec, row.id, max(0.0, row.submitted_s - self.epoch_s), self._gpus)
        remaining = max(1, spec.steps - self.step(row))
        if attempt is None or attempt.stop_s is not None:
            return LiveJob(job=job, remaining=remaining, attained_s=row.attained_s)
        lease_s = max(0.0, at_s - self.rounds.start_before_s(attempt.started_s))
        return LiveJob(
            job=job,
            remaining=remaining,
            attained_s=row.attained_s + lease_s,
            lease_s=lease_s,
            speed=attempt.speed,
            held=pieces_of(attempt.places, self._decider.servers.names),
        )

    def _renew_or_stop(
        self,
        attempt: AttemptRow,
        target: tuple[Granted, tuple[Place, ...]] | None,
        now_s: float,
    ) -> None:
        names = self._decider.servers.names
        if target is None or not same_gpus(target[0].pieces, attempt.places, names):
            what = "its GPUs go to others" if target is None else "it goes on on other GPUs"
            gone = [one.server for one in attempt.places if one.server in self.seen.away]
            if gone:
                what = f"{gone[0]} cannot be used: {self.seen.away[gone[0]]}"
            counter = "preemptions" if target is None else "migrations"
            with self.store.change() as connection:
                connection.execute(
                    # The name of the counter is one of two above.
                    f"UPDATE fleet_jobs SET {counter} = {counter} + 1 WHERE id = ?",
                    (attempt.id.job,),
                )
                self._ask_to_stop(attempt, what, now_s)
            return
        granted, places = target
        if places != attempt.places:
            if not self.engine.traits.can_resize:
                self._ask_to_stop(attempt, "its CPUs or memory change", now_s)
                return
            self._resize(attempt, granted, places)
        self._write_lease(attempt.id.job, attempt.id.number, places, now_s)

    def _resize(self, attempt: AttemptRow, granted: Granted, places: tuple[Place, ...]) -> None:
        values = json.dumps([place.to_json() for place in places])
        self.store.update_attempt(attempt.id, places=values, speed=granted.speed)
        if attempt.handle is not None:
            self.engine.resize(attempt.handle, places)

    def _ask_to_stop(self, attempt: AttemptRow, why: str, now_s: float) -> None:
        """Ask a job to checkpoint and end; who does not is killed when its grace is over."""
        with self.store.change():
            self.store.update_attempt(attempt.id, stop_s=now_s)
            self.store.update_job(attempt.id.job, state=JobState.STOPPING, note=f"{_STOPS}{why}")
            self.store.add_event(attempt.id.job, now_s, f"asked to stop: {why}")
        self._write_lease(attempt.id.job, attempt.id.number, attempt.places, now_s, stop=True)
        if attempt.handle is not None:
            self.engine.stop(attempt.handle, grace_s=math.inf)

    def _write_lease(
        self, job: int, attempt: int, places: Sequence[Place], now_s: float, *, stop: bool = False
    ) -> None:
        directory = self.settings.directory(job)
        directory.mkdir(parents=True, exist_ok=True)
        number = self.rounds.number(now_s)
        memory_bytes = sum(place.memory_bytes for place in places)
        grant = {
            "gpus": sum(len(place.gpus) for place in places),
            "cpus": sum(place.cpus for place in places),
            "memory_bytes": memory_bytes,
            "memory_gb": in_gb(memory_bytes),  # for jobs that run with Partita 0.1
        }
        write_json(
            directory / LEASE,
            {
                "attempt": attempt,
                "begin_s": self.rounds.start_s(number),
                "end_s": self.rounds.start_s(number + 1),
                "hold_s": self.settings.hold_s,
                "stop": stop,
                "grant": grant,
            },
        )

    # Starts

    def _start_waiting(self, jobs: Sequence[JobRow], now_s: float) -> None:
        """Start who has a grant for this round and whose devices are free."""
        draining = self.draining
        busy = [place for row in self.store.attempts(open_only=True) for place in row.places]
        for row in jobs:
            if row.cancelled:
                self._close(row, JobState.CANCELLED, "cancelled", now_s)
                continue
            target = self._targets.get(row.id)
            if draining or target is None or row.retry_s > now_s:
                continue
            if any(place.server in self.seen.away for place in target[1]) or self.seen.failure:
                continue
            if all(self._is_free(place, busy) for place in target[1]):
                busy += target[1]
                self._start(row, *target, now_s)

    def _is_free(self, wanted: Place, busy: Sequence[Place]) -> bool:
        """Whether nobody holds the GPUs of a place; where the engine chooses them, their number."""
        taken = [gpu for place in busy if place.server == wanted.server for gpu in place.gpus]
        if not self.engine.traits.chooses_gpus:
            return not set(wanted.gpus) & set(taken)
        servers = self._decider.servers
        there = int(servers.gpus[servers.names.index(wanted.server)])
        return len(taken) + len(wanted.gpus) <= there

    def _start(
        self, row: JobRow, granted: Granted, places: tuple[Place, ...], now_s: float
    ) -> None:
        spec = self.spec(row)
        try:
            _check_checkpoint(spec.checkpoint)
        except InvalidInputError as exc:
            self._fault(row, str(exc), row.step, now_s)
            return
        attempt = Attempt(row.id, row.attempts + 1)
        where = "; ".join(_words(place) for place in places)
        with self.store.change():
            self.store.add_attempt(attempt, places, granted.speed, now_s)
            first = now_s if row.started_s is None else row.started_s
            self.store.update_job(
                row.id, state=JobState.RUNNING, attempts=attempt.number, started_s=first, note=""
            )
            self.store.add_event(row.id, now_s, f"attempt {attempt.number} on {where}")
        self._write_lease(row.id, attempt.number, places, now_s)
        order = Order(
            fleet=self.store.fleet,
            attempt=attempt,
            command=spec.command,
            folder=spec.folder,
            directory=self.settings.directory(row.id),
            environment={**_environment(spec), **self._news_variables(attempt)},
            places=places,
            grace_s=spec.grace_s,
        )
        try:
            handle = self.engine.start(order)
        except EngineAwayError as exc:
            with self.store.change():
                self.store.update_attempt(attempt, ended_s=now_s, how=f"was not started: {exc}")
                self.store.update_job(
                    row.id, state=JobState.WAITING, note=str(exc), retry_s=now_s + exc.retry_s
                )
        except PartitaError as exc:
            self.store.update_attempt(attempt, ended_s=now_s, how=str(exc))
            self._fault(row, str(exc), row.step, now_s)
        else:
            self.store.update_attempt(attempt, handle=json.dumps(dict(handle)))

    def _news_variables(self, attempt: Attempt) -> dict[str, str]:
        """Return the variables by which a job elsewhere finds this scheduler's HTTP API."""
        if not self.news_url or not self.engine.traits.is_remote:
            return {}
        return {
            URL_VARIABLE: f"{self.news_url}{NEWS_PATH}{attempt.job}",
            TOKEN_VARIABLE: news_token(self._news_secret, *attempt),
        }

    def hear(
        self, job: int, attempt: int, token: str, progress: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Take the word of a job that speaks over HTTP, and return its lease.

        Returns:
            The lease, which may be for another attempt; None = the token is not this attempt's.
        """
        if not hmac.compare_digest(token, news_token(self._news_secret, job, attempt)):
            return None
        directory = self.settings.directory(job)
        lease = read_json(directory / LEASE)
        # An attempt that was replaced has nothing to say any more.
        if progress is not None and lease.get("attempt") == attempt:
            write_json(directory / PROGRESS, {**progress, "attempt": attempt})
        return lease

    # Ends

    def _watch(self, attempt: AttemptRow, status: Status, now_s: float) -> None:
        """Look at one attempt: it ended, is to be cancelled, or does not heed its lease."""
        row = self.store.job(attempt.id.job)
        if row is None or attempt.handle is None:
            return
        self._note_given(row, attempt, status, now_s)
        if not status.running:
            self._ended(row, attempt, status, now_s)
        elif attempt.stop_s is None:
            if row.cancelled or self.draining:
                why = "cancelled" if row.cancelled else "the fleet is drained"
                self._ask_to_stop(attempt, why, now_s)
        elif now_s > attempt.stop_s + self.spec(row).grace_s:
            if not attempt.killed:
                self.store.update_attempt(attempt.id, killed=1)
            self.engine.stop(attempt.handle, grace_s=0)

    def _note_given(self, row: JobRow, attempt: AttemptRow, status: Status, now_s: float) -> None:
        """Keep what the engine has given, or why it waits, if that is new."""
        if status.given is not None and status.given != attempt.places:
            values = json.dumps([place.to_json() for place in status.given])
            with self.store.change():
                self.store.update_attempt(attempt.id, places=values)
                if _counts(status.given) != _counts(attempt.places):
                    where = "; ".join(_words(place) for place in status.given)
                    self.store.add_event(row.id, now_s, f"{self.engine.name} gave {where}")
        note = f"waits in {self.engine.name}: {status.waits}" if status.waits else ""
        if status.running and attempt.stop_s is None and note != row.note:
            self.store.update_job(row.id, note=note)

    def _ended(self, row: JobRow, attempt: AttemptRow, status: Status, now_s: float) -> None:
        directory = self.settings.directory(row.id)
        progress = read_json(directory / PROGRESS)
        last = (last_lines(directory / LOG, 1) or [""])[0]
        verdict = judge(self.spec(row), attempt, status, progress, last)
        ended_s = min(status.ended_s or now_s, now_s)
        ran_s = max(0.0, ended_s - attempt.started_s)
        # Leases count from boundary to boundary, as in the simulator.
        left_s = ended_s if attempt.stop_s is None else self.rounds.start_before_s(attempt.stop_s)
        held_s = max(0.0, left_s - self.rounds.start_before_s(attempt.started_s))
        with self.store.change():
            self.store.update_attempt(attempt.id, ended_s=ended_s, how=verdict.how)
            self.store.update_job(
                row.id,
                step=verdict.step,
                attained_s=row.attained_s + held_s,
                attained_gpu_s=row.attained_gpu_s + ran_s * attempt.gpus,
            )
            self._conclude(row, verdict, ended_s, now_s)

    def _conclude(self, row: JobRow, verdict: Verdict, ended_s: float, now_s: float) -> None:
        if verdict.end is End.FINISHED:
            self._close(row, JobState.FINISHED, verdict.how, ended_s)
        elif row.cancelled:
            self._close(row, JobState.CANCELLED, f"cancelled at step {verdict.step}", ended_s)
        elif verdict.end is End.CANCELLED:
            self._close(row, JobState.CANCELLED, verdict.how, ended_s)
        elif verdict.end is End.WAITS:
            # Whoever looks at a job that waits wants to know why it was stopped; how it ended then
            # is among its events.
            note = verdict.how
            if row.note.startswith(_STOPS):
                why = row.note.replace(_STOPS, "was stopped: ", 1)
                note = why if note == how_it_ended(0) else f"{why}; {note}"
            self.store.update_job(row.id, state=JobState.WAITING, note=note)
            self.store.add_event(row.id, ended_s, verdict.how)
        else:
            self._fault(row, verdict.how, verdict.step, now_s)

    def _fault(self, row: JobRow, how: str, step: int, now_s: float) -> None:
        """Try again later, or give up after too many faults without progress."""
        spec = self.spec(row)
        faults = row.faults + 1 if step <= row.fault_step else 1
        with self.store.change():
            self.store.update_job(row.id, faults=faults, fault_step=step)
            if faults > spec.retries:
                note = f"{how}; given up after {faults} faults in a row at step {step}"
                self._close(row, JobState.FAILED, note, now_s)
                return
            wait_s = retry_pause_s(
                faults, first_s=self.settings.backoff_s, longest_s=_LONGEST_BACKOFF_S
            )
            note = f"{how}; fault {faults} of at most {spec.retries}, tried again in {wait_s:.3g} s"
            self.store.update_job(row.id, state=JobState.WAITING, note=note, retry_s=now_s + wait_s)
            self.store.add_event(row.id, now_s, note)

    def _close(self, row: JobRow, state: JobState, note: str, now_s: float) -> None:
        with self.store.change():
            self.store.update_job(row.id, state=state, note=note, finished_s=now_s)
            self.store.add_event(row.id, now_s, f"{state}: {note}")
        self._targets.pop(row.id, None)
        self._specs.pop(row.id, None)
        self._unfit.pop(row.id, None)


def _counts(places: Sequence[Place]) -> list[tuple[str, int, float]]:
    return sorted((place.server, len(place.gpus), place.cpus) for place in places)


def _words(place: Place) -> str:
    gpus = ",".join(map(str, place.gpus))
    # 0 = it was not asked for.
    memory = f", {format_bytes(place.memory_bytes)}" if place.memory_bytes else ""
    return f"{place.server}: GPUs {gpus}, {place.cpus:g} CPUs{memory}"


def _environment(spec: JobSpec) -> dict[str, str]:
    variables: dict[str, Any] = {STEPS_VARIABLE: spec.steps, "PYTHONUNBUFFERED": 1}
    if spec.checkpoint is not None:
        variables[CHECKPOINT_VARIABLE] = spec.checkpoint
    return {**spec.environment, **{name: str(value) for name, value in variables.items()}}


def _check_checkpoint(directory: Path | None) -> None:
    """Make the directory of checkpoints where it is not there, and see that it can be used.

    Raises:
        InvalidInputError: It cannot.
    """
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.listdir(directory)  # noqa: PTH208 (only whether it can be read)
    except OSError as exc:
        reason = reason_of(exc)
        raise InvalidInputError(
            f"checkpoint directory {directory} cannot be used: {reason}"
        ) from exc
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidInputError(f"checkpoint directory {directory} cannot be used: no permission")
