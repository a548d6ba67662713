"""Ranks that measure what a small model of their devices says."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from partita.core.codec import read_json
from partita.core.energy import Frontier
from partita.energy.policies.base import Deployment
from partita.energy.policies.job import Job, Rank, Result, Straggler
from partita.energy.policies.session import Session
from partita.energy.policies.solving import solve_task
from partita.energy.policies.table import make_scheduler

CLOCKS = (1400, 1200, 1000, 800, 600)
BLOCKING_W = 80.0
SOLVED: dict[str, Frontier] = {}
"""Frontiers by task, as many tests ask for the same."""


def figures(stage: int, name: str, clock: int) -> tuple[float, float]:
    """Return seconds and joules of an instruction."""
    base_s = (1.0 + 0.1 * (stage % 3)) * (0.06 if name == "forward" else 0.12)
    seconds = base_s * (0.8 * CLOCKS[0] / clock + 0.2)
    return seconds, seconds * (84 + 214 * (clock / CLOCKS[0]) ** 2.7)


@dataclass
class Cluster:
    """A job with its ranks, told everything at once."""

    job: Job
    scheduler: str = "perseus"
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: Mapping[str, Any] = field(default_factory=dict)
    energy: bool = True

    def __post_init__(self) -> None:
        self.session = Session(
            self.job, lambda job, ranks: make_scheduler(self.scheduler, job, ranks, self.options)
        )
        job = self.job
        places = [
            (dp, pp, tp) for pp in range(job.pp) for dp in range(job.dp) for tp in range(job.tp)
        ]
        self.ranks = [
            Rank(
                **{
                    "rank": rank,
                    "dp_rank": dp,
                    "pp_rank": pp,
                    "tp_rank": tp,
                    "clocks_mhz": CLOCKS,
                    "blocking_w": BLOCKING_W,
                    **self.rank,
                }
            )
            for rank, (dp, pp, tp) in enumerate(places)
        ]

    @property
    def deployment(self) -> Deployment:
        assert self.session.deployment is not None, self.session.failure
        return self.session.deployment

    def advance(self) -> None:
        while self.session.due:
            for task in self.session.needs():
                if task.key not in SOLVED:
                    SOLVED[task.key] = read_json(solve_task(replace(task, quick=True)))
            self.session.install(self.session.next(SOLVED))

    def register(self) -> "Cluster":
        for rank in self.ranks:
            self.session.add_rank(rank)
        self.advance()
        return self

    def result(self, rank: Rank, stages: Sequence[int] | None = None) -> Result:
        """Return two iterations; the first is ten times as slow, as a warm-up is."""
        seconds: dict[str, list[float]] = defaultdict(list)
        joules: dict[str, list[float]] = defaultdict(list)
        for at, (name, clock) in enumerate(self.deployment.entries[rank.rank]):
            stage = rank.pp_rank if stages is None else stages[at]
            one_s, one_j = figures(stage, name, clock or CLOCKS[0])
            seconds[name].append(one_s)
            joules[name].append(one_j)
        busy_s = sum(map(sum, seconds.values()))
        busy_j = sum(map(sum, joules.values()))
        known = {name: (tuple(10 * x for x in v), tuple(v)) for name, v in joules.items()}
        return Result(
            rank=rank.rank,
            version=self.session.version,
            iteration_s=(20 * busy_s, 2 * busy_s),
            iteration_j=(20 * busy_j, busy_j + BLOCKING_W * busy_s) if self.energy else (),
            seconds={name: (tuple(10 * x for x in v), tuple(v)) for name, v in seconds.items()},
            joules=known if self.energy else {},
        )

    def step(self) -> None:
        for result in [self.result(rank) for rank in self.ranks]:
            self.session.add_result(result)
        self.advance()

    def settle(self) -> "Cluster":
        while not self.session.settled:
            self.step()
        return self

    def straggle(self, **said: Any) -> None:
        self.session.straggle(Straggler(**said))
        self.advance()


@pytest.fixture
def cluster() -> type[Cluster]:
    return Cluster
