"""Writing down what happens in a simulation, as a history."""

from typing import Any

import numpy as np

from partita.core.columns import Array, Floats
from partita.core.fleet import FleetHistory, Leases, Trace, Usage
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.snapshot import Allocation, piece_jobs
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.state import State


def known_before(trace: Trace, servers: Servers) -> dict[str, Any]:
    """Return what a history holds of its trace and servers, whatever becomes of the jobs."""
    return {
        "trace": trace.name,
        "servers": servers.names,
        "num_gpus": servers.num_gpus,
        "num_cpus": float(servers.cpus.sum()),
        "memory_bytes": float(servers.memory_bytes.sum()),
        "models": tuple(part.name for part in trace.sensitivities),
        "kinds": tuple(part.kind for part in trace.sensitivities),
        "job_id": trace.job_id,
        "model": trace.sensitivity,
        "gpus": trace.gpus,
        "arrival_s": trace.arrival_s,
        "fair_s": trace.fair_s,
    }


class Recorder:
    """The rows of a history, as they come."""

    def __init__(self, trace: Trace, policy: str, rules: Rules, state: State) -> None:
        self.trace, self.policy, self.rules, self.state = trace, policy, rules, state
        self.rounds = 0
        self.events = 0
        self._usage: list[tuple[float, ...]] = []
        self._leases: list[tuple[Array, ...]] = []

    def add(self, now_s: float, rounds: int, granted: Allocation, watts: Floats) -> None:
        """Add a stretch of rounds in which all grants stay the same."""
        running = granted.running
        count = int(running.sum())
        self.rounds += rounds
        self.events += rounds * (count + 1)
        self._usage.append(
            (
                now_s,
                rounds,
                count,
                len(running) - count,
                float(granted.gpus.sum()),
                float(granted.cpus.sum()),
                float(granted.memory_bytes.sum()),
                float(watts[running].sum()),
                granted.gap,
            )
        )
        if not self.rules.record:
            return
        jobs = piece_jobs(granted.first)
        rows = self.state.row[self.state.active[jobs]]
        end = now_s + rounds * self.rules.round_s
        self._leases.append(
            (
                rows,
                granted.server,
                np.full(len(rows), now_s),
                np.full(len(rows), end),
                granted.gpus,
                granted.cpus,
                granted.memory_bytes,
                granted.speed[jobs],
            )
        )

    def history(self) -> FleetHistory:
        """Return the history; rows are those of the trace."""
        trace, state, servers = self.trace, self.state, self.state.servers
        back = np.argsort(state.row, kind="stable")
        columns = np.array(self._usage).T if self._usage else np.zeros((9, 0))
        known = np.array([len(part.frontier_w) > 0 for part in trace.sensitivities])
        energy = np.where(known[trace.sensitivity], state.energy_j[back], np.nan)
        return FleetHistory(
            **known_before(trace, servers),
            policy=self.policy,
            round_s=self.rules.round_s,
            rounds=self.rounds,
            events=self.events,
            start_s=state.start_s[back],
            finish_s=state.finish_s[back],
            attained_gpu_s=state.gpu_s[back],
            preemptions=state.preemptions[back].astype(np.int32),
            migrations=state.migrations[back].astype(np.int32),
            energy_j=energy,
            leases=self._merged(state.finish_s[back]),
            usage=Usage(
                start_s=columns[0],
                rounds=columns[1].astype(np.int64),
                running=columns[2].astype(np.int32),
                waiting=columns[3].astype(np.int32),
                gpus=columns[4].astype(np.int32),
                cpus=columns[5],
                memory_bytes=columns[6],
                power_w=columns[7],
                gap=columns[8],
            ),
        )

    def _merged(self, finish_s: Floats) -> Leases:
        """Return the leases, those that only go on joined into one."""
        if not self._leases:
            return Leases()
        parts = [np.concatenate(column) for column in zip(*self._leases, strict=True)]
        order = np.lexsort((parts[2], parts[1], parts[0]))
        job, server, start, end, gpus, cpus, memory, speed = (part[order] for part in parts)
        kept = (job, server, gpus, cpus, memory, speed)
        new = np.ones(len(job), dtype=np.bool_)
        new[1:] = start[1:] > end[:-1] + 1e-6
        for column in kept:
            new[1:] |= column[1:] != column[:-1]
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(job)) - 1
        return Leases(
            job=job[first],
            server=server[first],
            start_s=start[first],
            end_s=np.fmin(end[last], finish_s[job[first]]),
            gpus=gpus[first],
            cpus=cpus[first],
            memory_bytes=memory[first],
            speed=speed[first],
        )
