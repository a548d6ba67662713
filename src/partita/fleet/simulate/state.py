"""What a simulation remembers between rounds: columns over the jobs of a trace, by arrival."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from partita.core.columns import Flags, Floats, Longs
from partita.core.fleet import Trace
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.profiles import Profiles, build_profiles, fewest_gpus
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.snapshot import Allocation, Snapshot, piece_jobs
from partita.fleet.simulate.options import Rules


@dataclass(slots=True)
class State:
    """The jobs of a trace, sorted by arrival, and where they stand.

    Attributes:
        row: Row of each job in the trace.
        fixed: Columns that do not change, by the names of the snapshot.
        remaining: Iterations left.
        attained_s: Seconds that it ran.
        speed: Speed in the last round; 0 = it waited.
        lease_s: Seconds since it last started or moved.
        lost_s: Seconds at the start of this stretch that restarts take.
        start_s: When it first ran.
        finish_s: When it was done.
        preemptions: How often it was stopped.
        migrations: How often it went on elsewhere.
        gpu_s: GPU seconds that it held.
        energy_j: Energy of its GPUs.
        active: Jobs that are there and not done, ascending.
        held: Pieces that each job holds, as ``(job, server, gpus)``, jobs ascending.
    """

    row: Longs
    profiles: Profiles
    servers: Servers
    rules: Rules
    quota: Longs
    fixed: dict[str, Longs | Floats | Flags]
    may_run: Flags
    remaining: Floats
    attained_s: Floats
    speed: Floats
    lease_s: Floats
    lost_s: Floats
    start_s: Floats
    finish_s: Floats
    preemptions: Longs
    migrations: Longs
    gpu_s: Floats
    energy_j: Floats
    active: Longs = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    held: tuple[Longs, Longs, Longs] = field(
        default_factory=lambda: (np.zeros(0, dtype=np.int64),) * 3
    )

    def snapshot(self, now_s: float) -> Snapshot:
        """Return what a policy sees now."""
        active = self.active
        job, server, gpus = self.held
        first = np.append(np.searchsorted(job, active), len(job))
        up = np.ones(len(self.servers), dtype=np.bool_)
        for outage in self.rules.outages:
            if outage.start_s <= now_s < outage.end_s:
                up[outage.server] = False
        return Snapshot(
            now_s=now_s,
            round_s=self.rules.round_s,
            servers=self.servers,
            up=up,
            profiles=self.profiles,
            job=active,
            may_run=self.may_run[active].ravel(),
            remaining=self.remaining[active],
            attained_s=self.attained_s[active],
            speed=self.speed[active],
            lease_s=self.lease_s[active],
            held_first=first,
            held_server=server,
            held_gpus=gpus,
            quota=self.quota,
            **{name: values[active] for name, values in self.fixed.items()},  # type: ignore[arg-type]  # columns by their names
        )

    def grant(self, snapshot: Snapshot, granted: Allocation, now_s: float) -> None:
        """Start, stop and move jobs as an allocation has it."""
        active, running = self.active, granted.running
        was = self.speed[active] > 0
        new = (active[piece_jobs(granted.first)], granted.server, granted.gpus)
        before = self.attained_s[active] > 0
        moved = was & running & self._moved(new)
        self.preemptions[active[was & ~running]] += 1
        self.migrations[active[moved]] += 1
        again = moved | (running & ~was & before)
        self.lost_s[active] = np.where(again, snapshot.restart_s, 0.0)
        self.lease_s[active[moved | ~running]] = 0.0
        fresh = active[running & np.isnan(self.start_s[active])]
        self.start_s[fresh] = now_s
        self.speed[active] = granted.speed
        self.held = new

    def _moved(self, new: tuple[Longs, Longs, Longs]) -> Flags:
        """Return which active jobs hold other GPUs than before."""
        if all(np.array_equal(a, b) for a, b in zip(self.held, new, strict=True)):
            return np.zeros(len(self.active), dtype=np.bool_)
        # Two sums of server numbers tell placements apart; the second is of scattered numbers.
        marks = (np.arange(len(self.servers)) * 2654435761 + 12345) % 1000003
        result = np.zeros(len(self.active), dtype=np.bool_)
        for mark in (np.arange(len(marks)) + 1.0, marks.astype(np.float64)):
            was, now = (
                np.bincount(
                    np.searchsorted(self.active, job),
                    weights=gpus * mark[server],
                    minlength=len(self.active),
                )
                for job, server, gpus in (self.held, new)
            )
            result |= was != now
        return result

    def drop(self, jobs: Longs) -> None:
        """Take from jobs what they hold."""
        keep = ~np.isin(self.held[0], jobs)
        job, server, gpus = self.held
        self.held = (job[keep], server[keep], gpus[keep])
        self.speed[jobs] = 0.0


def ahead(snapshot: Snapshot, rate: Floats, rounds: int) -> Snapshot:
    """Return a snapshot some rounds later, if all grants stay the same."""
    seconds = rounds * snapshot.round_s
    return replace(
        snapshot,
        now_s=snapshot.now_s + seconds,
        remaining=snapshot.remaining - rate * seconds,
        attained_s=snapshot.attained_s + (rate > 0) * seconds,
    )


def first_state(trace: Trace, servers: Servers, rules: Rules) -> State:
    """Return the state before the first round.

    Raises:
        InfeasibleError: A job can never run here.
        InvalidInputError: A quota names no tenant, an outage no server.
    """
    quota = _quota(trace, rules)
    trace = _within_reach(trace, servers, quota)
    row = np.argsort(trace.arrival_s, kind="stable")
    profiles = build_profiles(trace, servers)
    least, most = trace.gpu_range
    part = trace.sensitivity[row].astype(np.int64)
    keys = zip(part.tolist(), trace.gpus[row].tolist(), strict=True)
    profile = np.array([profiles.rows[key] for key in keys], dtype=np.int64)
    may_run = _may_run(trace, servers, profiles, row, profile)
    restart = np.array([part.restart_s for part in trace.sensitivities])
    restart = np.minimum(np.where(np.isnan(restart), rules.restart_s, restart), rules.round_s)
    seconds = np.array([part.iteration_s for part in trace.sensitivities])
    count = len(row)
    total = trace.iterations[row].astype(np.float64)
    return State(
        row=row,
        profiles=profiles,
        servers=servers,
        rules=rules,
        quota=quota,
        fixed={
            "profile": profile,
            "arrival_s": trace.arrival_s[row],
            "gpus": trace.gpus[row].astype(np.int64),
            "least": least[row].astype(np.int64),
            "most": most[row].astype(np.int64),
            "part": part,
            "iteration_s": seconds[part],
            "total": total,
            "top_speed": _top_speed(profiles, profile),
            "restart_s": restart[part],
            "rank": trace.priority[row],
            "tenant": trace.tenant[row].astype(np.int64),
        },
        may_run=may_run,
        remaining=total.copy(),
        attained_s=np.zeros(count),
        speed=np.zeros(count),
        lease_s=np.zeros(count),
        lost_s=np.zeros(count),
        start_s=np.full(count, math.nan),
        finish_s=np.full(count, math.nan),
        preemptions=np.zeros(count, dtype=np.int64),
        migrations=np.zeros(count, dtype=np.int64),
        gpu_s=np.zeros(count),
        energy_j=np.zeros(count),
    )


def _top_speed(profiles: Profiles, profile: Longs) -> Floats:
    """Return the highest speed of each profile on any class."""
    top = np.zeros(len(profiles.rows))
    for row in range(len(top)):
        begin = profiles.first[row * profiles.num_classes]
        end = profiles.first[(row + 1) * profiles.num_classes]
        top[row] = profiles.speed[begin:end].max(initial=0.0)
    return top[profile]


def _within_reach(trace: Trace, servers: Servers, quota: Longs) -> Trace:
    """Return a trace in which no job asks for more GPUs than it can ever hold.

    That is what the servers of one class have, of the types that it may use and is known to run on,
    and what its tenant may hold. A job with a range of GPUs asks for as many as that, and takes no
    fewer than it is known to run on; one without cannot run.

    Raises:
        InfeasibleError: The fewest GPUs of a job are more than that.
    """
    of_server, _ = servers.classes
    have = np.bincount(of_server, weights=servers.gpus).astype(np.int64)
    fewest = _fewest_gpus(trace, servers)
    there = np.where(np.isfinite(fewest), have, 0).max(axis=1)
    allowed = np.append(np.where(quota < 0, there.max(), quota), there.max())[trace.tenant]
    least, most = trace.gpu_range
    for limit, why in (
        (there, "of type {kinds} on servers of one kind; the most there are is {limit}"),
        (allowed, "and its tenant {tenant!r} may hold {limit}"),
    ):
        if (least > limit).any():
            row = int(np.argmax(least > limit))
            job = trace.job(row)
            types = job.gpu_types or tuple(filter(None, job.sensitivity.gpu_types))
            words = why.format(kinds=", ".join(types) or "any", tenant=job.tenant, limit=limit[row])
            raise InfeasibleError(f"job {job.job_id} needs {least[row]} GPUs {words}")
    reach = np.minimum(there, allowed)
    known = np.minimum(fewest.min(axis=1), reach).astype(np.int64)
    if ((most <= reach) & ((least == most) | (least >= known))).all():
        return trace
    raised = np.where(least < most, np.maximum(least, known), least)
    return replace(
        trace,
        min_gpus=raised,
        gpus=np.clip(trace.gpus, raised, np.maximum(reach, raised)),
        max_gpus=np.maximum(np.minimum(most, reach), raised),
    )


def _fewest_gpus(trace: Trace, servers: Servers) -> Floats:
    """Return for each job and class of servers the fewest GPUs it is known to run on there.

    Infinite = it may not use that type of GPU, or does not run on it.
    """
    _, samples = servers.classes
    kinds = [servers.gpu_types[int(servers.gpu_type[server])] for server in samples.tolist()]
    known = np.array([[fewest_gpus(part, kind) for kind in kinds] for part in trace.sensitivities])
    bits = np.array(
        [1 << trace.gpu_types.index(kind) if kind in trace.gpu_types else 0 for kind in kinds]
    )
    barred = (trace.gpu_mask[:, None] != 0) & ((trace.gpu_mask[:, None] & bits) == 0)
    result: Floats = np.where(barred, math.inf, known[trace.sensitivity])
    return result


def _may_run(
    trace: Trace, servers: Servers, profiles: Profiles, row: Longs, profile: Longs
) -> Flags:
    """Return for each job and class of servers whether it may run there.

    Raises:
        InfeasibleError: A job may run nowhere.
    """
    classes = profiles.num_classes
    has_choices = (profiles.floor.reshape(-1, classes) >= 0)[profile]
    result: Flags = has_choices & np.isfinite(_fewest_gpus(trace, servers)[row])
    have = np.bincount(profiles.server_class, weights=servers.gpus, minlength=classes)
    least = trace.gpu_range[0][row]
    runs = (result & (least[:, None] <= have)).any(axis=1)
    if not runs.all():
        job = trace.job(int(row[int(np.argmin(runs))]))
        raise InfeasibleError(
            f"job {job.job_id} needs {job.min_gpus} GPUs on servers of one kind where "
            f"{job.sensitivity.name!r} runs; there are none"
        )
    return result


def _quota(trace: Trace, rules: Rules) -> Longs:
    for name in rules.quotas:
        if name not in trace.tenants:
            known = ", ".join(trace.tenants) or "none"
            raise InvalidInputError(f"quota for tenant {name!r}; the trace has {known}")
    values = [rules.quotas.get(name, -1) for name in trace.tenants]
    return np.array(values, dtype=np.int64).reshape(-1)
