"""Going down through the clocks while training goes on, and what was measured on the way."""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from partita.core.energy import LONGEST_S, MOST_J, SHORTEST_S, EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.energy.frontier.clock_plan import NAMES
from partita.energy.policies.job import Rank, Result
from partita.energy.policies.workload import CLOCKED, KIND_OF, Workload
from partita.errors import InvalidInputError

WAITING_SHARE = 0.02
"""Share of an iteration that a rank has to wait for its waiting power to be told from noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How the clocks are gone through.

    Attributes:
        warmup_step_ratio: Share of the iterations of each report that is dropped, one at least.
        minimum_clock: Clocks below are left out, in MHz.
        clocks: Number of clocks, evenly spread; 0 = all.
        patience: Clocks in a row at which everybody's energy has to rise before the sweep ends.
    """

    warmup_step_ratio: float = 0.1
    minimum_clock: int = 0
    clocks: int = 0
    patience: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_step_ratio < 1:
            raise InvalidInputError(
                f"warmup_step_ratio is {self.warmup_step_ratio}; expected 0 up to below 1"
            )
        if self.minimum_clock < 0 or self.clocks < 0 or self.patience < 1:
            raise InvalidInputError(
                f"minimum_clock is {self.minimum_clock}, clocks {self.clocks}, patience "
                f"{self.patience}; expected 0, 0 and 1 or more"
            )

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> "SweepOptions":
        """Return those that are among the options of a scheduler.

        Raises:
            InvalidInputError: A value makes no sense.
        """
        return cls(**{one.name: options[one.name] for one in fields(cls) if one.name in options})


class Sweep:
    """The clocks of all ranks, from the highest down, until it does not pay any more.

    Ranks with fewer clocks than others stay at their last one.

    Args:
        ranks: The ranks.
        options: How to go.
    """

    def __init__(self, ranks: Sequence[Rank], options: SweepOptions) -> None:
        self._options = options
        self._lists = [_spread(rank, options) for rank in ranks]
        self._place = 0
        self._best: dict[Hashable, float] = {}
        self._rises: dict[Hashable, int] = defaultdict(int)
        self.done = False

    @property
    def clocks(self) -> list[int]:
        """The clock of each rank now; 0 = leave alone."""
        return [clocks[min(self._place, len(clocks) - 1)] for clocks in self._lists]

    def advance(self, scores: Mapping[Hashable, float]) -> None:
        """Go on to the next clocks, or end.

        Args:
            scores: What the clocks cost each of those that count; less is better.
        """
        for who, score in scores.items():
            if score < self._best.get(who, float("inf")):
                self._best[who] = score
                self._rises[who] = 0
            else:
                self._rises[who] += 1
        risen = bool(scores) and all(self._rises[who] >= self._options.patience for who in scores)
        self._place += 1
        self.done = risen or self._place >= max(map(len, self._lists))


def _spread(rank: Rank, options: SweepOptions) -> tuple[int, ...]:
    """Return the clocks that a rank goes through; 0 alone where none can be set."""
    wanted = [clock for clock in rank.clocks_mhz if clock >= options.minimum_clock]
    wanted = wanted or list(rank.clocks_mhz[:1])
    if 1 < options.clocks < len(wanted):
        places = np.linspace(0, len(wanted) - 1, options.clocks).round().astype(int).tolist()
        wanted = [wanted[place] for place in places]
    elif options.clocks == 1:
        wanted = wanted[:1]
    return tuple(wanted) or (0,)


def kept(values: Sequence[object], warmup_step_ratio: float) -> slice:
    """Return which iterations of a report count: all but the first few, if there are more."""
    if len(values) <= 1:
        return slice(0, None)
    return slice(min(max(int(len(values) * warmup_step_ratio), 1), len(values) - 1), None)


def check_seconds(what: str, seconds: float) -> None:
    """Refuse a time that nothing takes.

    Raises:
        InvalidInputError: It is too short or too long.
    """
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise InvalidInputError(
            f"{what} took {seconds:g} s; expected {SHORTEST_S:g} to {LONGEST_S:g}"
        )


Row = tuple[int, Kind, str, int]
"""Stage, kind, type of device and clock."""


class Measured:
    """What ranks measured of their instructions, by stage, kind, type of device and clock.

    Over the ranks of a stage the slowest counts for time; energy is the mean of a device, so that
    that of a stage is the sum over its devices.

    Args:
        workload: The instructions of the ranks.
        warmup_step_ratio: See ``SweepOptions``.
        blocking_w: Power of a device that waits, where its rank does not say.
    """

    def __init__(
        self, workload: Workload, warmup_step_ratio: float, blocking_w: float | None = None
    ) -> None:
        self._workload = workload
        self._ratio = warmup_step_ratio
        self._given_w = blocking_w
        self._rows: dict[Row, list[tuple[float, float]]] = defaultdict(list)
        self._waiting_w: dict[str, list[float]] = defaultdict(list)
        self.problem = ""

    def add(self, results: Sequence[Result], clocks: Sequence[int]) -> Mapping[Hashable, float]:
        """Take the reports of all ranks at some clocks.

        Returns:
            The effective energy of the instructions of each stage and type: what is left when the
            power of waiting is taken off.
        """
        scores: dict[Hashable, list[float]] = defaultdict(list)
        for result in results:
            rank = self._workload.ranks[result.rank]
            try:
                rows = self._rows_of(rank, result, clocks[result.rank])
            except InvalidInputError as exc:
                self.problem = self.problem or str(exc)
                return {}
            self._note_waiting(rank, result)
            power = self.blocking_w(rank.device_type) or 0.0
            for row, (seconds, joules) in rows.items():
                self._rows[row].append((seconds, joules))
                scores[row[0], row[2]].append(joules - power * seconds)
        return {who: sum(values) for who, values in scores.items()}

    def _rows_of(self, rank: Rank, result: Result, clock: int) -> dict[Row, tuple[float, float]]:
        """Return mean seconds and joules of each kind of instruction of a rank.

        Raises:
            InvalidInputError: Something that is needed was not measured, or cannot be.
        """
        samples: dict[Row, list[tuple[float, float]]] = defaultdict(list)
        for name, iterations in result.seconds.items():
            kind = KIND_OF.get(name)
            if kind not in CLOCKED:
                continue
            energies = result.joules.get(name, ())
            if [len(one) for one in energies] != [len(one) for one in iterations]:
                raise InvalidInputError(
                    f"rank {rank.rank} did not report the energy of its {name!r}"
                )
            which = kept(iterations, self._ratio)
            for seconds, joules in zip(iterations[which], energies[which], strict=True):
                stages = self._stages(rank, name, len(seconds))
                for stage, second, joule in zip(stages, seconds, joules, strict=True):
                    row = (stage, kind, rank.device_type, max(clock, 1))
                    samples[row].append((second, joule))
        if not samples:
            raise InvalidInputError(f"rank {rank.rank} did not report the time of its instructions")
        found = {}
        for row, pairs in samples.items():
            mean_s, mean_j = (statistics.fmean(values) for values in zip(*pairs, strict=True))
            what = f"rank {rank.rank} reported that its {NAMES[row[1]]!r}"
            check_seconds(what, mean_s)
            if not mean_j <= MOST_J:
                raise InvalidInputError(f"{what} used {mean_j:g} J; expected {MOST_J:g} at most")
            found[row] = mean_s, mean_j
        return found

    def _stages(self, rank: Rank, name: str, count: int) -> list[int]:
        """Return the stage of each instruction of a name in a report.

        Raises:
            InvalidInputError: They cannot be told apart.
        """
        if self._workload.job.solution is None:
            return [rank.pp_rank] * count
        stages = self._workload.stages(rank.rank, name)
        if len(stages) != count and len(set(stages)) != 1:
            raise InvalidInputError(
                f"rank {rank.rank} reported {count} x {name!r} in an iteration; its plan has "
                f"{len(stages)} on several stages"
            )
        return stages if len(stages) == count else stages[:1] * count

    def _note_waiting(self, rank: Rank, result: Result) -> None:
        """Note the power at which a rank waited, as far as its report tells."""
        if len(result.iteration_j) != len(result.iteration_s):
            return
        for at in range(len(result.iteration_s))[kept(result.iteration_s, self._ratio)]:
            seconds, joules = result.iteration_s[at], result.iteration_j[at]
            for name, iterations in result.seconds.items():
                if at >= len(iterations) or at >= len(result.joules.get(name, ())):
                    return
                seconds -= sum(iterations[at])
                joules -= sum(result.joules[name][at])
            if seconds > WAITING_SHARE * result.iteration_s[at]:
                self._waiting_w[rank.device_type].append(max(joules, 0.0) / seconds)

    def blocking_w(self, device_type: str) -> float | None:
        """Return the power of a device that waits: as ranks say, as was given, or as measured."""
        said = [
            rank.blocking_w
            for rank in self._workload.ranks
            if rank.device_type == device_type and rank.blocking_w is not None
        ]
        if said:
            return statistics.fmean(said)
        if self._given_w is not None:
            return self._given_w
        seen = self._waiting_w.get(device_type)
        return statistics.median(seen) if seen else None

    def profile(self) -> EnergyProfile | None:
        """Return the profile as far as it goes; ``None`` = there is no row yet."""
        if not self._rows:
            return None
        rows = sorted(self._rows, key=lambda row: (row[0], int(row[1]), row[2], -row[3]))
        types = sorted({row[2] for row in rows})
        powers = {name: self.blocking_w(name) for name in types}
        modelled = any(rank.origin is EnergyOrigin.MODELLED for rank in self._workload.ranks)
        return EnergyProfile(
            name="measured while training",
            origin=EnergyOrigin.MODELLED if modelled else EnergyOrigin.MEASURED,
            device_types=tuple(types),
            stage=np.array([row[0] for row in rows]),
            kind=np.array([int(row[1]) for row in rows]),
            device_type=np.array([types.index(row[2]) for row in rows]),
            clock_mhz=np.array([float(row[3]) for row in rows]),
            seconds=np.array([max(pair[0] for pair in self._rows[row]) for row in rows]),
            joules=np.array([statistics.fmean(p[1] for p in self._rows[row]) for row in rows]),
            blocking_w={name: power for name, power in powers.items() if power is not None},
        )
