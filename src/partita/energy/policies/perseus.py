"""Profile, solve, deploy, and deploy anew when somebody becomes slow.

After Perseus (SOSP '24), with the part that its server never had: a straggler. The frontier of each
pipeline is solved from what was measured (or from a profile that the job brings), and the point
that the job's wish asks for is deployed.

* A straggler elsewhere makes every step take T': waiting is free until then, so the point of least
  energy within ``min(T*, T')`` is deployed. Limits on time in the wish do not count then, as time
  is lost anyway; limits on energy and power do.
* A slow rank of a pipeline changes that pipeline's own trade-off: the profile of its stage is
  scaled by the slowdown and the frontier solved anew; the job's other pipelines then wait for this
  one, as for any straggler. The time by which an instruction is longer counts as waiting, at
  blocking power: a device that is held up does no more work. As the plan has to change within a
  step, this is solved without the search for the last permille of energy.

Figures of time and energy are those of one pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.codec import write_json
from partita.core.energy import EnergyProfile, Frontier
from partita.energy.frontier.choose import TIE, PointLimits, choose_point
from partita.energy.frontier.clock_plan import Entry
from partita.energy.policies.base import ChosenPoint, Deployment, Scheduler, State, positive
from partita.energy.policies.job import Job, Rank, Result, Straggler
from partita.energy.policies.solving import SolveTask
from partita.energy.policies.sweep import Measured, Sweep, SweepOptions
from partita.errors import InfeasibleError


class Perseus(Scheduler):
    """Profile, solve, deploy by the wish, deploy anew on stragglers.

    Args:
        job: The job.
        ranks: Its ranks.
        points: Points of the frontier.
        blocking_w: Power of a device that waits, where ranks do not say; without it what they
            measured between instructions counts.
        warmup_step_ratio: Share of the iterations of each report that is dropped, one at least.
        minimum_clock: Clocks below are left out, in MHz.
        clocks: Number of clocks to profile, evenly spread; 0 = all.
        patience: Clocks in a row at which every stage's energy has to rise before profiling ends.
    """

    solves = True

    def __init__(  # noqa: PLR0913 (options of a scheduler)
        self,
        job: Job,
        ranks: Sequence[Rank],
        *,
        points: int = 50,
        blocking_w: float | None = None,
        warmup_step_ratio: float = 0.1,
        minimum_clock: int = 0,
        clocks: int = 0,
        patience: int = 3,
    ) -> None:
        super().__init__(job, ranks)
        options = SweepOptions(
            warmup_step_ratio=warmup_step_ratio,
            minimum_clock=minimum_clock,
            clocks=clocks,
            patience=patience,
        )
        self._points = points
        self._sweep = Sweep(self.ranks, options)
        self._measured = Measured(self.workload, warmup_step_ratio, blocking_w)
        self._stragglers: tuple[Straggler, ...] = ()
        self._profile: EnergyProfile | None = None
        self._problem = ""
        self._chosen: dict[int, ChosenPoint] = {}
        nothing = np.zeros(len(self.workload.program))
        for rank in self.ranks:
            self.workload.entries(rank.rank, nothing)  # refuses names that no plan will fit
        if job.profile is not None:
            self._take(job.profile)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that no job can have."""
        positive("points", options.get("points", 1))
        if options.get("blocking_w"):
            positive("blocking_w", options["blocking_w"])
        SweepOptions.among(options)

    @property
    def _profiling(self) -> bool:
        return self._profile is None and not self._problem

    @property
    def profile(self) -> EnergyProfile | None:
        """What is known of the instructions so far."""
        return self._profile or self._measured.profile()

    def chosen(self, pipeline: int) -> ChosenPoint | None:
        """Return where a pipeline is on its frontier."""
        return self._chosen.get(pipeline)

    def observe(self, results: Sequence[Result]) -> None:
        """Take the measurements at the clocks in force."""
        if not self._profiling:
            return
        self._sweep.advance(self._measured.add(results, self._sweep.clocks))
        self._problem = self._measured.problem
        profile = self._measured.profile()
        if self._sweep.done and profile is not None:
            self._take(profile)

    def _take(self, profile: EnergyProfile) -> None:
        """Take a profile, with the powers of waiting that it lacks."""
        powers = dict(profile.blocking_w)
        for pipeline in range(self.job.pipelines):
            for name in self.workload.device_types(pipeline):
                known = name in powers or "" in powers
                power = None if known else self._measured.blocking_w(name)
                if power is not None:
                    powers[name] = power
                elif not known:
                    self._problem = (
                        f"the power of a waiting {name or 'device'} is not known; ranks may say "
                        "blocking_w, or the server -O blocking_w=WATTS"
                    )
                    return
        self._profile = replace(profile, blocking_w=powers)

    def straggle(self, stragglers: Sequence[Straggler]) -> bool:
        """Take the stragglers that there are now."""
        changed = tuple(stragglers) != self._stragglers
        self._stragglers = tuple(stragglers)
        return changed and self._profile is not None

    def needs(self) -> tuple[SolveTask, ...]:
        """Return the frontiers of the pipelines, as healthy or slow as they are."""
        if self._profile is None or self._problem:
            return ()
        tasks = {task.key: task for task in self._tasks(self._profile)}
        return tuple(tasks.values())

    def _tasks(self, profile: EnergyProfile) -> list[SolveTask]:
        """Return what has to be solved for each pipeline."""
        slow = self._slow_ranks()
        found = []
        for pipeline in range(self.job.pipelines):
            types = self.workload.device_types(pipeline)
            own = {
                rank: factor
                for rank, factor in slow.items()
                if self.workload.pipeline(rank) == pipeline
            }
            there = profile
            for rank, factor in sorted(own.items()):
                devices = self.workload.together(self.workload.device(rank))
                there, types = _slowed(there, types, devices, factor, f"slow{rank}")
            found.append(
                SolveTask(
                    shape=self.workload.shape,
                    profile=write_json(there),
                    device_types=types,
                    points=self._points,
                    quick=bool(own),
                )
            )
        return found

    def _slow_ranks(self) -> dict[int, float]:
        """Return how many times as long ranks of this job take."""
        slow = {}
        for one in self._stragglers:
            if one.slowdown is None:
                continue
            if one.rank is not None:
                slow[one.rank] = one.slowdown
            elif one.dp_rank is not None and self.job.solution is not None:
                slow |= {r.rank: one.slowdown for r in self.ranks if r.dp_rank == one.dp_rank}
        return slow

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the clocks to measure at, or those of the points to deploy."""
        if self._profiling:
            return self.uniform(self._sweep.clocks, state=State.PROFILING)
        if self._profile is None:
            top = [rank.top_mhz for rank in self.ranks]
            return self.uniform(top, state=State.DEPLOYED, note=self._problem)
        tasks = self._tasks(self._profile)
        places = [_Place(solved[task.key], self.job.wish) for task in tasks]
        chosen = [
            place.within(self._held_up_s(pipeline, places)) for pipeline, place in enumerate(places)
        ]
        self._chosen = {
            pipeline: ChosenPoint(task=task, frontier=place.frontier, point=point)
            for pipeline, (task, place, point) in enumerate(zip(tasks, places, chosen, strict=True))
        }
        mine = [self._chosen[self.workload.pipeline(rank.rank)] for rank in self.ranks]
        return Deployment(
            state=State.DEPLOYED,
            entries=tuple(
                self._entries(rank, point) for rank, point in zip(self.ranks, mine, strict=True)
            ),
            time_s=tuple(float(one.frontier.time_s[one.point]) for one in mine),
            energy_j=tuple(float(one.frontier.energy_j[one.point]) for one in mine),
            note=next((place.note for place in places if place.note), ""),
        )

    def _held_up_s(self, pipeline: int, places: Sequence["_Place"]) -> float:
        """Return how long everybody else makes a step of a pipeline take."""
        found = [place.time_s for i, place in enumerate(places) if i != pipeline]
        for one in self._stragglers:
            if one.rank is not None:
                continue
            if self.job.solution is not None:
                theirs = None
                counted = one.iteration_s is not None or one.dp_rank is None
            else:
                theirs = one.dp_rank
                counted = theirs != pipeline
            if counted:
                usual_s = places[pipeline if theirs is None else theirs].time_s
                found.append(one.iteration_s or usual_s * (one.slowdown or 1.0))
        return max(found, default=0.0)

    def _entries(self, rank: Rank, chosen: ChosenPoint) -> tuple[Entry, ...]:
        """Return the clocks of a rank at a point, each one that its device can be set to."""
        entries = self.workload.entries(rank.rank, chosen.frontier.clocks(chosen.point))
        if not rank.clocks_mhz:
            return tuple((name, 0) for name, _ in entries)
        real = {clock: _settable(rank, clock) for clock in {clock for _, clock in entries}}
        return tuple((name, real[clock]) for name, clock in entries)


@dataclass(frozen=True, slots=True)
class _Place:
    """A pipeline on its frontier.

    Attributes:
        frontier: The frontier.
        wish: What its point has to keep.
    """

    frontier: Frontier
    wish: PointLimits

    @property
    def time_s(self) -> float:
        """Its step when nobody holds it up."""
        return float(self.frontier.time_s[self._nearest()[0]])

    @property
    def note(self) -> str:
        """What the wish asks for in vain."""
        return self._nearest()[1]

    def _nearest(self) -> tuple[int, str]:
        """Return the point of the wish; the nearest there is, and why, where nothing keeps it."""
        frontier, wish = self.frontier, self.wish
        try:
            return choose_point(frontier, wish), ""
        except InfeasibleError as exc:
            if wish.energy_j is None and wish.power_w is None:
                return 0, str(exc)
            power = frontier.energy_j / frontier.time_s
            least = frontier.energy_j if wish.energy_j is not None else power
            return int(np.argmin(least)), str(exc)

    def within(self, held_up_s: float) -> int:
        """Return the point when everybody else makes a step take so long."""
        usual = self._nearest()[0]
        if held_up_s <= self.time_s * (1 + TIE):
            return usual
        freed = PointLimits(
            energy_j=self.wish.energy_j, power_w=self.wish.power_w, straggler_s=held_up_s
        )
        try:
            return choose_point(self.frontier, freed)
        except InfeasibleError:
            return usual


def _slowed(
    profile: EnergyProfile,
    types: tuple[str, ...],
    devices: Sequence[int],
    factor: float,
    mark: str,
) -> tuple[EnergyProfile, tuple[str, ...]]:
    """Return a profile and types of devices in which some devices take longer."""
    for kind in sorted({types[device] for device in devices}):
        own = kind if kind in profile.device_types else ""
        rows = np.flatnonzero(profile.device_type == profile.device_types.index(own))
        power = profile.blocking_power_w(kind)
        seconds = profile.seconds[rows]
        name = f"{kind}#{mark}"
        profile = replace(
            profile,
            device_types=(*profile.device_types, name),
            stage=np.concatenate([profile.stage, profile.stage[rows]]),
            kind=np.concatenate([profile.kind, profile.kind[rows]]),
            device_type=np.concatenate(
                [profile.device_type, np.full(len(rows), len(profile.device_types))]
            ),
            clock_mhz=np.concatenate([profile.clock_mhz, profile.clock_mhz[rows]]),
            seconds=np.concatenate([profile.seconds, seconds * factor]),
            joules=np.concatenate(
                [profile.joules, profile.joules[rows] + power * seconds * (factor - 1)]
            ),
            blocking_w={**profile.blocking_w, name: power},
        )
        types = tuple(
            name if place in devices and one == kind else one for place, one in enumerate(types)
        )
    return profile, types


def _settable(rank: Rank, clock: int) -> int:
    """Return the lowest clock of a rank that is not below one, or its highest; 0 stays 0."""
    if clock <= 0:
        return 0
    return next((mine for mine in reversed(rank.clocks_mhz) if mine >= clock), rank.top_mhz)
