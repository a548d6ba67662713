"""Schedulers that measure while training goes on: the profiler, and one clock for everybody."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from partita.core.energy import EnergyProfile, Frontier
from partita.energy.policies.base import Deployment, Scheduler, State, positive
from partita.energy.policies.job import Job, Rank, Result
from partita.energy.policies.sweep import Measured, Sweep, SweepOptions, check_seconds, kept
from partita.errors import InvalidInputError


class InstructionProfiler(Scheduler):
    """Goes through the clocks and measures every instruction; then the highest clocks stay.

    The artifact's profiler runs through all clocks to a fixed minimum and then ends the training
    with an error; this one ends when energy rises at every stage, and training goes on.

    Args:
        job: The job.
        ranks: Its ranks.
        warmup_step_ratio: Share of the iterations of each report that is dropped, one at least.
        minimum_clock: Clocks below are left out, in MHz.
        clocks: Number of clocks, evenly spread; 0 = all.
        patience: Clocks in a row at which every stage's energy has to rise before the sweep ends.
    """

    def __init__(
        self,
        job: Job,
        ranks: Sequence[Rank],
        *,
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
        self._sweep = Sweep(self.ranks, options)
        self._measured = Measured(self.workload, warmup_step_ratio)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that no job can have."""
        SweepOptions.among(options)

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the clocks that are measured next."""
        del solved
        if not self._sweep.done and not self._measured.problem:
            return self.uniform(self._sweep.clocks, state=State.PROFILING)
        return self.uniform(
            [rank.top_mhz for rank in self.ranks],
            state=State.DEPLOYED,
            note=self._measured.problem,
            finished=not self._measured.problem,
        )

    def observe(self, results: Sequence[Result]) -> None:
        """Take the measurements at the clocks in force."""
        self._sweep.advance(self._measured.add(results, self._sweep.clocks))

    @property
    def profile(self) -> EnergyProfile | None:
        """What was measured so far."""
        return self._measured.profile()


class GlobalPowerLimit(Scheduler):
    """One limit for all devices, by Zeus's cost ``eta E + (1 - eta) P_max T`` of a step.

    The limit is set through the clock: ranks are told clocks and nothing else, so that "one limit"
    is the highest clock that all devices have to stay within. Devices that throttle themselves at a
    power limit would settle at other clocks than this.

    Args:
        job: The job.
        ranks: Its ranks.
        eta_knob: 1 = least energy, 0 = least time.
        max_power_w: P_max of one device; 0 = the mean power of a device at the highest clock.
        warmup_step_ratio: Share of the iterations of each report that is dropped, one at least.
        minimum_clock: Clocks below are left out, in MHz.
        clocks: Number of clocks, evenly spread; 0 = all.
        patience: Clocks in a row at which the cost has to rise before the sweep ends.
    """

    def __init__(  # noqa: PLR0913 (options of a scheduler)
        self,
        job: Job,
        ranks: Sequence[Rank],
        *,
        eta_knob: float = 0.5,
        max_power_w: float = 0.0,
        warmup_step_ratio: float = 0.1,
        minimum_clock: int = 0,
        clocks: int = 0,
        patience: int = 3,
    ) -> None:
        super().__init__(job, ranks)
        self._eta = eta_knob
        self._ratio = warmup_step_ratio
        self._max_w = max_power_w * job.world_size
        options = SweepOptions(
            warmup_step_ratio=warmup_step_ratio,
            minimum_clock=minimum_clock,
            clocks=clocks,
            patience=patience,
        )
        self._sweep = Sweep(self.ranks, options)
        self._best: tuple[float, list[int], float, float] | None = None
        self._problem = ""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that no job can have."""
        eta = options.get("eta_knob", 0.0)
        if not 0 <= eta <= 1:
            raise InvalidInputError(f"eta_knob is {eta}; expected 0 to 1")
        if options.get("max_power_w"):
            positive("max_power_w", options["max_power_w"])
        SweepOptions.among(options)

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the clock that is measured next, or in the end the best."""
        del solved
        if not self._sweep.done and not self._problem:
            return self.uniform(self._sweep.clocks, state=State.PROFILING)
        if self._best is None or self._problem:
            top = [rank.top_mhz for rank in self.ranks]
            return self.uniform(top, state=State.DEPLOYED, note=self._problem)
        _, clocks, seconds, joules = self._best
        world = self.job.world_size
        return replace(
            self.uniform(clocks, state=State.DEPLOYED),
            time_s=(seconds,) * world,
            energy_j=(joules / self.job.pipelines,) * world,
        )

    def observe(self, results: Sequence[Result]) -> None:
        """Take the iterations at the clock in force."""
        clocks = self._sweep.clocks
        for result in results:
            if not result.iteration_s or len(result.iteration_j) != len(result.iteration_s):
                self._problem = f"rank {result.rank} did not report the energy of its iterations"
                return
        seconds = max(statistics.fmean(self._kept(one.iteration_s)) for one in results)
        try:
            check_seconds("the ranks reported that an iteration", seconds)
        except InvalidInputError as exc:
            self._problem = str(exc)
            return
        joules = sum(statistics.fmean(self._kept(one.iteration_j)) for one in results)
        self._max_w = self._max_w or joules / seconds
        cost = self._eta * joules + (1 - self._eta) * self._max_w * seconds
        if self._best is None or cost < self._best[0]:
            self._best = (cost, clocks, seconds, joules)
        self._sweep.advance({"job": cost})

    def _kept(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values[kept(values, self._ratio)]
