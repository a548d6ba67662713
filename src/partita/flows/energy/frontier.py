"""The time-energy frontier of a plan or a profile, and what it saves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partita.core.energy import TIE, Frontier
from partita.energy.frontier.frontier import clock_changes
from partita.energy.frontier.modelled import stages_profile
from partita.energy.frontier.savings import Savings, frontier_figures, frontier_of, savings
from partita.errors import InvalidInputError
from partita.flows.energy.source import (
    ORIGIN_WORDS,
    EnergySource,
    EnergySourceFields,
    SearchFields,
    Source,
    StragglerFields,
    read_source,
    share,
    source_words,
)
from partita.flows.problem import catalogue_of
from partita.flows.results import Result
from partita.flows.summary import describe_plan
from partita.program.lower import lower
from partita.requests import OnProgress, declare, make, part, silent
from partita.units import format_joules, format_seconds, parse_seconds

NO_CHOICE = "one clock: nothing to choose"
"""What is said of a profile whose frontier is one point."""


@dataclass(frozen=True, kw_only=True)
class FrontierRequest(EnergySourceFields, SearchFields, StragglerFields):
    """A plan or a profile whose time-energy frontier is wanted."""

    source: Source | None = declare(
        None, is_argument=True, help="A plan, or an energy profile; or --stages says the times."
    )
    stages: str | int | None = declare(
        None,
        metavar="TIMES|N",
        help="Without SOURCE: forward time of each stage, as in 65.7,58.2ms. With a profile: "
        "stages that it must have.",
    )
    backward: str | None = declare(
        None,
        metavar="Nx|TIMES",
        usual="2x",
        help="With times of --stages: backward over forward, or a time for each stage.",
    )
    device: str | None = declare(
        None,
        metavar="TYPE",
        help="With times of --stages: type of device, whose energy is modelled.",
    )
    at: tuple[float, ...] = declare(
        (),
        above=0,
        help="A further time in seconds, between the fastest step and T*; several times.",
    )
    to_slowest: bool = declare(False, help="Go on beyond the least energy.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FrontierResult(Result):
    """A frontier with what it saves.

    Attributes:
        source: The plan and the profile that it is of.
        frontier: The frontier: what is saved to a file.
        savings: Without a straggler, and with one.
        changes: Changes of clocks in a step at the fastest point, of all devices.
    """

    source: EnergySource
    frontier: Frontier
    savings: tuple[Savings, Savings]
    changes: int

    def to_json(self) -> dict[str, Any]:
        """Return the frontier and its savings as JSON values."""
        return {
            "source": self.source.name,
            "plan": describe_plan(self.source.solution.plan),
            **frontier_figures(self.frontier),
            "savings": [each.to_json() for each in self.savings],
            "clock_changes": self.changes,
            "assumed": list(self.source.assumed),
        }

    def lines(self) -> list[str]:
        """Return the frontier in three lines: what it is of, what is saved at once, and at T*."""
        words = (
            f"{describe_plan(self.source.solution.plan)} on {len(self.frontier.devices)} devices"
        )
        origin = ORIGIN_WORDS[self.frontier.origin]
        first = f"{self.source.name} · {words} · {origin}"
        if not self.source.profile.has_choice:
            first += f" · {NO_CHOICE}"
        return [first, *headlines(self.frontier)]

    def switching(self) -> list[str]:
        """Return how often clocks change at the fastest point, and what that costs."""
        if not self.source.profile.has_choice:
            return []
        devices, switch_s = len(self.frontier.devices), self.source.profile.switch_s
        often = f"{self.changes / devices:.3g} changes of the clock per step and device"
        if not switch_s:
            return [f"{often} at the fastest point, which take no time (--switch-time says more)"]
        return [f"{often} at the fastest point, {format_seconds(switch_s)} each, waited for"]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each point."""
        columns = zip(
            self.frontier.time_s.tolist(),
            self.frontier.energy_j.tolist(),
            self.frontier.bound_j.tolist(),
            strict=True,
        )
        return [{"step (s)": t, "energy (J)": e, "bound (J)": b} for t, e, b in columns]

    def document(self) -> object:
        """Return the frontier, which a notebook draws."""
        return self.frontier


def frontier(
    source: Source | None = None,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of FrontierRequest)
) -> FrontierResult:
    """Find the least energy for every time of a step of a plan, or of a profile's stages.

    Args:
        source: A plan, an energy profile or a frontier, or the path of a file that holds one; None
            = stages whose times ``stages`` says.
        on_progress: Called with each step.
        **options: The fields of :class:`FrontierRequest`: options of ``partita energy frontier``.

    Raises:
        InvalidInputError: The file holds something else, or an option does not apply to it.
    """
    return frontier_request(make(FrontierRequest, source=source, **options), on_progress)


def frontier_request(request: FrontierRequest, on_progress: OnProgress = silent) -> FrontierResult:
    """Find the frontier that a request asks for; see :func:`frontier`."""
    found = _source(request, on_progress)
    on_progress(f"{found.name}: {describe_plan(found.solution.plan)}")
    solved = frontier_of(
        found.solution,
        found.profile,
        points=request.points,
        to_slowest=request.to_slowest,
        at=request.at,
        stragglers=(request.straggler,),
        tries=request.tries,
    )
    gains = (
        savings(solved),
        savings(solved, straggler=request.straggler, pipelines=request.pipelines),
    )
    program = lower(found.solution.problem, found.solution.plan)
    changes = int(clock_changes(program, solved.clocks(0)[None]).sum())
    return FrontierResult(source=found, frontier=solved, savings=gains, changes=changes)


def _source(request: FrontierRequest, on_progress: OnProgress) -> EnergySource:
    """Return the plan and the profile that a request is about."""
    fields = part(EnergySourceFields, request)
    if request.source is not None:
        for name in ("backward", "device"):
            if getattr(request, name) is not None:
                raise InvalidInputError(f"--{name} does not apply: SOURCE says this itself")
        on_progress(f"reading {source_words(request.source)}")
        return read_source(request.source, fields)
    if request.stages is None or request.device is None:
        raise InvalidInputError(
            "what is the frontier of? name a plan or an energy profile, or say --stages "
            "65.7,58.2,56.1,58.1ms --device a100"
        )
    if str(request.stages).isdecimal():
        raise InvalidInputError(
            f"--stages is {request.stages}; without SOURCE the time of each stage is wanted, as in "
            "65.7,58.2ms"
        )
    forward_s = _times(str(request.stages), "--stages")
    profile = stages_profile(
        forward_s,
        _backward_times(request.backward or "2x", forward_s),
        catalogue_of(request).device_type(request.device),
        device_type=request.device,
    )
    return read_source(profile, replace(fields, stages=None, catalogue=None))


def _times(text: str, what: str) -> list[float]:
    """Return seconds of times with commas between them; the last unit holds for those without.

    >>> _times("65.7,58.2ms", "--stages")
    [0.0657, 0.0582]
    """
    words = [word.strip() for word in text.split(",")]
    parse_seconds(words[-1], what)  # or its unit is none, and the others are not to blame
    unit = words[-1].lstrip("+-.0123456789e ")
    times_s = [
        parse_seconds(f"{word}{unit}" if word[-1:].isdigit() else word, what) for word in words
    ]
    if min(times_s) <= 0:
        raise InvalidInputError(f"{what} is {text!r}; expected times above 0")
    return times_s


def _backward_times(text: str, forward_s: Sequence[float]) -> list[float]:
    """Return seconds of the backward passes: times, or a multiple of the forward passes.

    >>> _backward_times("2x", [0.1, 0.2])
    [0.2, 0.4]
    """
    if text.endswith("x"):
        try:
            ratio = float(text[:-1])
        except ValueError:
            ratio = math.nan
        if not (ratio > 0 and math.isfinite(ratio)):
            raise InvalidInputError(f"--backward is {text!r}; expected a multiple such as 2x")
        return [ratio * each_s for each_s in forward_s]
    times_s = _times(text, "--backward")
    if len(times_s) != len(forward_s):
        raise InvalidInputError(
            f"--backward has {len(times_s)} times and --stages {len(forward_s)}; expected as many"
        )
    return times_s


def headlines(frontier: Frontier) -> list[str]:
    """Return a frontier in two lines: what is saved at once, and at T*."""
    base = savings(frontier)
    cheapest = int(frontier.energy_j.argmin())
    best, took_s = float(frontier.energy_j[cheapest]), float(frontier.time_s[cheapest])
    slower = f" in {took_s:.5g} s" if took_s > frontier.best_s * (1 + TIE) else ""
    at_once = f"{format_joules(frontier.all_max_j)} -> {format_joules(base.energy_j)}"
    return [
        f"T_min {frontier.fastest_s:.5g} s  all-max {at_once} ({share(-base.saving)}, no slowdown)",
        f"T* {frontier.best_s:.5g} s  {format_joules(best)}{slower} "
        f"({share(best / frontier.all_max_j - 1)})  "
        f"gap to bound {100 * float(frontier.gap.max()):.2f} %",
    ]
