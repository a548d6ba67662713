"""Clocks from elsewhere, or a recorded log, in the simulator: what they claim and what they do."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from partita.core.columns import number_or_none
from partita.documents import open_file
from partita.energy.frontier.frontier import EnergyModel
from partita.energy.frontier.replay import ReplayedStep, replay_log
from partita.energy.frontier.savings import Played, model_of, planned_clocks, played
from partita.errors import InvalidInputError
from partita.flows.energy.logs import read_logs
from partita.flows.energy.source import (
    ORIGIN_WORDS,
    EnergySource,
    EnergySourceFields,
    Source,
    read_clock_file,
    read_source,
    share,
    source_words,
)
from partita.flows.results import Result
from partita.flows.summary import describe_plan
from partita.requests import OnProgress, declare, make, part, silent
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(EnergySourceFields):
    """Clocks or a log, and the plan or profile to play them on."""

    source: Source = declare("", is_argument=True, help="A plan, an energy profile or a frontier.")
    clocks: str = declare("", is_argument=True, help="A clock plan, or a folder of logs.")
    clock: float | None = declare(None, help="MHz of a log that does not say its clocks.")
    claimed_time: float | None = declare(
        None, usual="its comment", help="Seconds that CLOCKS claims."
    )
    claimed_energy: float | None = declare(
        None, usual="its comment", help="Joules that CLOCKS claims."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Replay(Result):
    """Clocks that were played, beside what was claimed or measured of them.

    Attributes:
        source: The plan and the profile that they were played on.
        clocks: The path of the clock plan, or of the folder of logs.
        time_s: Seconds of a step, simulated; of a log the median of its steps.
        energy_j: Joules of a step, likewise.
        all_max_s: Seconds with all clocks at their highest.
        all_max_j: Joules with all clocks at their highest.
        known_s: Seconds that a clock plan claims, or that a log measured; None = not known.
        known_j: Joules, likewise.
        step: The step of a clock plan; None for a log.
        steps: The steps of a log; empty for a clock plan.
        is_modelled_log: Whether a log's counters are those of modelled devices.
    """

    source: EnergySource
    clocks: str
    time_s: float
    energy_j: float
    all_max_s: float
    all_max_j: float
    known_s: float | None
    known_j: float | None
    step: Played | None = None
    steps: tuple[ReplayedStep, ...] = ()
    is_modelled_log: bool = False

    @property
    def known_as(self) -> str:
        """The word for what is known of the clocks from elsewhere: claimed or measured."""
        return "claimed" if self.step is not None else "measured"

    def to_json(self) -> dict[str, Any]:
        """Return what was simulated, known and possible as JSON values."""
        found: dict[str, Any] = {
            "origin": self.source.profile.origin.value,
            "assumed": list(self.source.assumed),
            "time_s": self.time_s,
            "energy_j": self.energy_j,
            "all_max_s": self.all_max_s,
            "all_max_j": self.all_max_j,
            f"{self.known_as}_s": self.known_s,
            f"{self.known_as}_j": self.known_j,
        }
        if self.step is not None:
            return {**found, "waiting_j": self.step.waiting_j}
        return {
            **found,
            "counters": "modelled" if self.is_modelled_log else "measured",
            "steps": [step.to_json() for step in self.steps],
        }

    def lines(self) -> list[str]:
        """Return what was played on what, and what of a log is known how well."""
        plan = describe_plan(self.source.solution.plan)
        origin = ORIGIN_WORDS[self.source.profile.origin]
        lines = [f"{self.clocks} on {self.source.name} · {plan} · {origin}"]
        if self.steps:
            counters = ", energy counters of modelled devices" * self.is_modelled_log
            lines.append(f"medians of {len(self.steps)} recorded steps{counters}")
            if self.known_j is None:
                lines.append("measured energy is unknown: there is no counter for all of it")
        return lines

    def rows(self) -> list[Mapping[str, object]]:
        """Return the simulated step, what is known of it, and all clocks at their highest."""
        rows: list[Mapping[str, object]] = [
            _row("simulated", f"{self.time_s:.5g} s", "", format_joules(self.energy_j), "")
        ]
        if self.known_s is not None or self.known_j is not None:
            rows.append(self._against(self.known_as, self.known_s, self.known_j))
        return [*rows, self._against("all-max", self.all_max_s, self.all_max_j)]

    def _against(
        self, word: str, time_s: float | None, energy_j: float | None
    ) -> Mapping[str, object]:
        """Return known figures, and how much more or less than that the simulation says."""
        return _row(
            word,
            "unknown" if time_s is None else f"{time_s:.5g} s",
            "" if not time_s else f"simulated {share(self.time_s / time_s - 1)}",
            "unknown" if energy_j is None else format_joules(energy_j),
            "" if not energy_j else f"simulated {share(self.energy_j / energy_j - 1)}",
        )


def _row(*cells: str) -> Mapping[str, object]:
    return dict(zip(("clocks", "step", "", "energy", " "), cells, strict=True))


def replay_clocks(
    source: Source,
    clocks: str,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ReplayRequest)
) -> Replay:
    """Play clocks on a plan or a profile, and compare with what was claimed or measured.

    Args:
        source: A plan, an energy profile or a frontier, or the path of a file that holds one.
        clocks: The path of a clock plan, or of a folder of logs.
        on_progress: Called with each step.
        **options: The fields of :class:`ReplayRequest`: options of ``partita energy replay``.

    Raises:
        InvalidInputError: A file holds something else, or an option does not apply to it.
    """
    request = make(ReplayRequest, source=source, clocks=clocks, **options)
    return replay_request(request, on_progress)


def replay_request(request: ReplayRequest, on_progress: OnProgress = silent) -> Replay:
    """Play the clocks that a request names; see :func:`replay_clocks`."""
    on_progress(f"{request.clocks} on {source_words(request.source)}")
    found = read_source(request.source, part(EnergySourceFields, request))
    model = model_of(found.solution, found.profile)
    if Path(request.clocks).is_dir():
        for name in ("claimed_time", "claimed_energy"):
            if getattr(request, name) is not None:
                given = name.replace("_", "-")
                raise InvalidInputError(
                    f"--{given} is for a clock plan; a log says what was measured"
                )
        return _log_replay(found, model, request)
    if request.clock is not None:
        raise InvalidInputError("--clock is for a log; a clock plan says its clocks")
    return _plan_replay(found, model, request)


def _plan_replay(found: EnergySource, model: EnergyModel, request: ReplayRequest) -> Replay:
    file = read_clock_file(open_file(request.clocks))
    step = played(model, planned_clocks(model.program, file.entries))
    all_max_s, all_max_j = model.all_max()
    time_s, energy_j = request.claimed_time, request.claimed_energy
    return Replay(
        source=found,
        clocks=request.clocks,
        time_s=step.time_s,
        energy_j=step.energy_j,
        all_max_s=all_max_s,
        all_max_j=all_max_j,
        known_s=number_or_none(file.time_s if time_s is None else time_s),
        known_j=number_or_none(file.energy_j if energy_j is None else energy_j),
        step=step,
    )


def _log_replay(found: EnergySource, model: EnergyModel, request: ReplayRequest) -> Replay:
    logs = read_logs(Path(request.clocks), request.clock)
    if not logs:
        raise InvalidInputError(f"{request.clocks} holds no instructions-%d.csv")
    steps = replay_log(model, list(logs.values()))
    all_max_s, all_max_j = model.all_max()
    measured = [step.measured_j for step in steps]
    return Replay(
        source=found,
        clocks=request.clocks,
        time_s=median(step.time_s for step in steps),
        energy_j=median(step.energy_j for step in steps),
        all_max_s=all_max_s,
        all_max_j=all_max_j,
        known_s=median(step.measured_s for step in steps),
        known_j=None if any(map(math.isnan, measured)) else median(measured),
        steps=tuple(steps),
        is_modelled_log=any(log.is_modelled for log in logs.values()),
    )
