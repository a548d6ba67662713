"""A trace played in rounds by our rules; policies decide when something has changed.

Jobs keep their GPUs between rounds; a resumption or move costs the seconds of a restart; progress
is not cut to whole iterations, and a job ends when its last iteration does, its GPUs being free
with the next round. A policy is asked again in the first round after an arrival, an end, a failure,
or a change of order that can matter; rounds between cost nothing. A server that fails loses what
its jobs did in that round: the last checkpoint is that of its start. A job over several servers may
lose a share of its speed (``Rules.split_loss``); policies do not know of it, but they split a job
only where no server has the GPUs.

Fewer jobs run under a power cap that they would exceed even at their slowest: the policy is asked
as if there were no cap. Where its jobs need more, those that fit the cap, in the order they are
served, stay; who no longer fits what is left waits, and the policy is asked again for the others.
Jobs do not grow into GPUs that are idle for want of power.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from partita.core.columns import Flags, Floats, Longs
from partita.core.fleet import FleetHistory, Sensitivity, Trace
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.orderings import order_of
from partita.fleet.policies.power import choose_points, equal_limit, least_w
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.snapshot import Allocation, Snapshot
from partita.fleet.policies.table import Policy
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.recorder import Recorder
from partita.fleet.simulate.state import ahead, first_state

_CLOSE = 1e-9
Progress = Callable[[int, int], None]


def simulate_rounds(
    trace: Trace,
    servers: Servers,
    policy: Policy,
    *,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> FleetHistory:
    """Return what a policy makes of a trace.

    Args:
        trace: The jobs.
        servers: The servers.
        policy: Ordering and allocator.
        rules: How rounds are played.
        progress: Called with the jobs done and all jobs, now and then.

    Raises:
        InfeasibleError: A job can never run, or nothing runs although jobs wait.
        InvalidInputError: A rule does not fit the trace or the servers.
    """
    rules = Rules() if rules is None else rules
    for outage in rules.outages:
        if not 0 <= outage.server < len(servers):
            raise InvalidInputError(f"outage of server {outage.server}; there are {len(servers)}")
    for part in trace.sensitivities:
        if part.restart_s >= rules.round_s:
            raise InvalidInputError(
                f"a restart of {part.name!r} takes {part.restart_s:g} s, a round {rules.round_s:g} "
                "s: a job that is resumed each round would never end; expected less than a round"
            )
    return _Player(trace, servers, policy, rules).play(progress)


class _Player:
    """One simulation."""

    def __init__(self, trace: Trace, servers: Servers, policy: Policy, rules: Rules) -> None:
        self.trace, self.policy, self.rules = trace, policy, rules
        self.state = first_state(trace, servers, rules)
        self.effort = float((trace.fair_s / rules.round_s).sum())
        self.kept_split = _kept_split(trace, rules)
        self.recorder = Recorder(trace, policy.name, rules, self.state)
        self.next = 0
        first = float(trace.arrival_s.min())
        start = trace.start_s
        self.now_s = (
            math.ceil(first / rules.round_s) * rules.round_s if math.isnan(start) else start
        )

    def play(self, progress: Progress | None) -> FleetHistory:
        """Play until every job is done."""
        state, reported = self.state, 0
        while self._admit():
            snapshot = state.snapshot(self.now_s)
            keys = self.policy.ordering.keys(snapshot)
            order = order_of(snapshot, keys, ranked=self.policy.ordering.ranked)
            served = self.policy.admitted(snapshot, order, keys)
            ask = partial(self.policy.allocator.allocate, effort=self.effort)
            granted = allocate_under(
                self.rules.power_cap_w, self.trace.sensitivities, snapshot, served, ask
            )
            check_promise(snapshot, granted)
            granted = self._split(snapshot, granted)
            share, watts = self._power(snapshot, granted)
            state.grant(snapshot, granted, self.now_s)
            rate = granted.speed * share / snapshot.iteration_s
            rounds = self._rounds(snapshot, granted, order, rate)
            self._advance(granted, rate, watts, rounds)
            done = len(state.row) - len(state.active) - (len(state.row) - self.next)
            if progress is not None and done - reported >= max(len(state.row) // 100, 1):
                reported = done
                progress(done, len(state.row))
        return self.recorder.history()

    def _split(self, snapshot: Snapshot, granted: Allocation) -> Allocation:
        """Return the same grants with the speeds that jobs over several servers keep."""
        if not self.rules.split_loss:
            return granted
        over_several = np.diff(granted.first) > 1
        kept = np.where(over_several, self.kept_split[snapshot.part], 1.0)
        return replace(granted, speed=granted.speed * kept)

    def _admit(self) -> bool:
        """Add the jobs that have come; where none is there, go to the next. False = all done."""
        state, arrival = self.state, self.state.fixed["arrival_s"]
        round_s = self.rules.round_s
        if not len(state.active):
            if self.next == len(arrival):
                return False
            wait = float(arrival[self.next]) - self.now_s
            self.now_s += max(math.ceil(wait / round_s), 0) * round_s
        until = int(np.searchsorted(arrival, self.now_s, side="right"))
        if until > self.next:
            state.active = np.concatenate([state.active, np.arange(self.next, until)])
            self.recorder.events += until - self.next
            self.next = until
        return True

    def _power(self, snapshot: Snapshot, granted: Allocation) -> tuple[Floats, Floats]:
        """Return the share of speed and the watts of each job; watts NaN = not known."""
        share, watts = np.ones(len(snapshot)), np.full(len(snapshot), math.nan)
        parts, cap = self.trace.sensitivities, self.rules.power_cap_w
        running = np.flatnonzero(granted.running)
        held = np.add.reduceat(granted.gpus, granted.first[running]) if len(running) else running
        if math.isinf(cap):
            full = np.array([p.frontier_w.max() if len(p.frontier_w) else math.nan for p in parts])
            watts[running] = full[snapshot.part[running]] * held
            return share, watts
        choose = equal_limit if self.rules.equal_clocks else choose_points
        if len(running):
            share[running], watts[running] = choose(parts, snapshot.part[running], held, cap)
        return share, watts

    def _rounds(self, snapshot: Snapshot, granted: Allocation, order: Longs, rate: Floats) -> int:
        """Return for how many rounds all grants stay the same."""
        round_s, running = self.rules.round_s, granted.running
        limit = math.inf
        if self.next < len(self.state.row):
            limit = (float(self.state.fixed["arrival_s"][self.next]) - self.now_s) / round_s
        for outage in self.rules.outages:
            for moment in (outage.start_s, outage.end_s):
                if moment > self.now_s:
                    limit = min(limit, (moment - self.now_s) / round_s)
        if running.any():
            left = (
                snapshot.remaining[running] / rate[running]
                + self.state.lost_s[snapshot.job][running]
            )
            limit = min(limit, float(left.min()) / round_s)
        elif math.isinf(limit):
            raise InfeasibleError(
                f"{len(snapshot)} jobs wait at {self.now_s:g} s and none can run; the first is job "
                f"{self.trace.job_id[self.state.row[snapshot.job[order[0]]]]}"
            )
        rounds = max(math.ceil(limit - _CLOSE), 1)
        if self.policy.allocator.ordered or not running.all():
            rounds = min(rounds, self._rounds_in_order(snapshot, order, rate))
        return self._until_failure(rounds)

    def _rounds_in_order(self, snapshot: Snapshot, order: Longs, rate: Floats) -> int:
        """Return for how many rounds the order stays the same, if the grants do."""
        entry = self.policy.ordering
        if not entry.linear:
            return 1
        one, two = (entry.keys(ahead(snapshot, rate, k))[order] for k in (1, 2))
        if one is two:
            return 2**40
        gap = np.diff(one)
        closing = -np.diff(two - one)
        same = np.diff(snapshot.rank[order]) == 0 if entry.ranked else np.ones(len(gap), dtype=bool)
        scale = 1e-12 * np.maximum(np.abs(one[1:]), np.abs(one[:-1]))
        if (same & (gap < -scale)).any():
            return 1
        meets = same & (closing > scale)
        if not meets.any():
            return 2**40
        first = float((gap[meets] / closing[meets]).min())
        return 1 + max(math.ceil(first * (1 - _CLOSE) - _CLOSE), 0)

    def _until_failure(self, rounds: int) -> int:
        """Return the rounds before the one in which a server fails, or 1 if that is now."""
        for outage in self.rules.outages:
            ahead_s = outage.start_s - self.now_s
            if 0 < ahead_s <= rounds * self.rules.round_s:
                rounds = max(min(rounds, math.ceil(ahead_s / self.rules.round_s) - 1), 1)
        return rounds

    def _advance(self, granted: Allocation, rate: Floats, watts: Floats, rounds: int) -> None:
        """Let rounds pass, and end the jobs that are done."""
        state, active = self.state, self.state.active
        seconds = rounds * self.rules.round_s
        self.recorder.add(self.now_s, rounds, granted, watts)
        lost = state.lost_s[active]
        needs = np.full(len(active), math.inf)
        needs[rate > 0] = state.remaining[active][rate > 0] / rate[rate > 0] + lost[rate > 0]
        worked = np.clip(seconds - lost, 0.0, None)
        done = needs <= seconds * (1 + 1e-12)
        failed = self._failing(granted, needs, seconds)
        done &= ~failed
        state.remaining[active] -= np.where(failed, 0.0, rate * worked)
        state.finish_s[active[done]] = self.now_s + needs[done]
        ran = np.where(rate > 0, np.minimum(needs, seconds), 0.0)
        state.attained_s[active] += np.where(rate > 0, seconds, 0.0)
        state.lease_s[active] += np.where(rate > 0, seconds, 0.0)
        held = np.add.reduceat(np.append(granted.gpus, 0), granted.first[:-1]) * granted.running
        state.gpu_s[active] += np.where(rate > 0, seconds, 0.0) * held
        state.energy_j[active] += np.where(rate > 0, ran * watts, 0.0)
        state.preemptions[active[failed]] += 1
        self.now_s += seconds
        state.drop(active[done | failed])
        state.active = active[~done]

    def _failing(self, granted: Allocation, needs: Floats, seconds: float) -> Flags:
        """Return which jobs lose their server before they are done."""
        failed = np.zeros(len(needs), dtype=np.bool_)
        for outage in self.rules.outages:
            offset = outage.start_s - self.now_s
            if not 0 < offset < seconds:
                continue
            jobs = np.repeat(np.arange(len(needs)), np.diff(granted.first))
            struck = jobs[granted.server == outage.server]
            failed[struck] |= needs[struck] > offset
        return failed


def _kept_split(trace: Trace, rules: Rules) -> Floats:
    """Return the share of speed that jobs of each model keep over several servers."""
    models = [part.name for part in trace.sensitivities]
    for name in rules.split_loss:
        if name not in models:
            raise InvalidInputError(f"split_loss of {name!r}; the trace has {', '.join(models)}")
    return np.array([1.0 - rules.split_loss.get(name, 0.0) for name in models])


def check_promise(snapshot: Snapshot, granted: Allocation) -> None:
    """Check that nobody runs below its GPU-proportional speed and no server gives what it has not.

    Raises:
        AssertionError: An allocator broke its promise.
    """
    profiles, servers = snapshot.profiles, snapshot.servers
    running = np.flatnonzero(granted.running)
    assert bool((granted.speed[running] > 0).all()), "a job runs at no speed"
    if len(running):
        server = granted.server[granted.first[running]]
        held = np.add.reduceat(granted.gpus, granted.first[running])
        rows = snapshot.profile[running] + (held - snapshot.gpus[running])
        fair = profiles.fair_speed[rows * profiles.num_classes + profiles.server_class[server]]
        slow = granted.speed[running] < fair * (1 - 1e-6)
        assert not slow.any(), f"job {snapshot.job[running[slow]][0]} runs below its fair speed"
    limits = (
        ("gpus", granted.gpus, np.where(snapshot.up, servers.gpus, 0)),
        ("cpus", granted.cpus, servers.cpus),
        ("memory", granted.memory_bytes, servers.memory_bytes),
    )
    for name, given, have in limits:
        used = np.bincount(granted.server, weights=given, minlength=len(servers))
        assert bool((used <= have * (1 + 1e-6)).all()), f"a server gives more {name} than it has"


Asked = Callable[[Snapshot, Longs], Allocation]


def allocate_under(
    cap_w: float, parts: Sequence[Sensitivity], snapshot: Snapshot, served: Longs, ask: Asked
) -> Allocation:
    """Return grants to jobs that can run within a cap.

    Args:
        cap_w: What the GPUs of all jobs may take together; ``inf`` = any.
        parts: The sensitivities of jobs.
        snapshot: The round.
        served: The order in which jobs are served.
        ask: Returns the grants of the policy.

    Raises:
        InfeasibleError: Not one of the jobs fits the cap.
    """
    granted = ask(snapshot, served)
    if math.isinf(cap_w):
        return granted
    lowest = least_w(parts, snapshot.part, snapshot.least)
    while True:
        needed = _needed(parts, snapshot, granted)
        fits, room = _first_that_fit(needed, served, cap_w)
        if fits.all():
            return granted
        if (snapshot.most > snapshot.gpus).any():
            snapshot = replace(snapshot, most=snapshot.gpus)
            granted = ask(snapshot, served)
            continue
        if not fits[granted.running].any():
            raise InfeasibleError(
                f"the jobs that could run at {snapshot.now_s:g} s need "
                f"{needed[granted.running].min():g} W or more each at their slowest; the cap is "
                f"{cap_w:g} W"
            )
        stays = granted.running & fits
        allowed = stays | (~granted.running & (lowest <= room))
        may_run = snapshot.may_run.reshape(len(snapshot), -1) & allowed[:, None]
        snapshot = replace(snapshot, may_run=may_run.ravel())
        granted = ask(snapshot, served)


def _needed(parts: Sequence[Sensitivity], snapshot: Snapshot, granted: Allocation) -> Floats:
    """Return the watts that each job takes at its slowest with what it was granted."""
    held = np.zeros(len(snapshot), dtype=np.int64)
    jobs = np.repeat(np.arange(len(snapshot)), np.diff(granted.first))
    np.add.at(held, jobs, granted.gpus)
    return least_w(parts, snapshot.part, held)


def _first_that_fit(needed: Floats, served: Longs, cap_w: float) -> tuple[Flags, float]:
    """Return which jobs fit a cap when taken in order, and what is left of it."""
    fits = np.ones(len(needed), dtype=np.bool_)
    left = cap_w
    for job in served[needed[served] > 0].tolist():
        if needed[job] <= left:
            left -= float(needed[job])
        else:
            fits[job] = False
    return fits, left
