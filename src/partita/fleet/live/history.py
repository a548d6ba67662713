"""What the live scheduler's store says of the past, as a ``FleetHistory``."""

import json
import math
from collections.abc import Sequence

import numpy as np

from partita.core.columns import Floats
from partita.core.fleet import FleetHistory, HistoryOrigin, Leases, Sensitivity
from partita.errors import InvalidInputError
from partita.fleet.live.jobspec import core_job, read_spec
from partita.fleet.live.store import AttemptRow, FleetStore, JobState
from partita.fleet.policies.resources import GB, Servers


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
        memory_bytes=float(servers.memory_gb.sum()) * GB,
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
        memory_bytes=np.array([place.memory_gb * GB for _, place in held], dtype=np.float64),
        speed=np.array([each.speed for each, _ in held], dtype=np.float64),
    )
