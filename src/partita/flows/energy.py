"""Plans with the energy of their stages: from files and options to a frontier and its savings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from partita.core.energy import EnergyOrigin, EnergyProfile, Frontier
from partita.core.plan import Plan
from partita.core.schedules import Schedule, schedule_names
from partita.core.solution import Solution
from partita.documents import OpenedFile, load, open_file
from partita.energy.frontier.fit import split_backward, without_energy
from partita.energy.frontier.frontier import TRIES
from partita.energy.frontier.pipeline import Pipeline
from partita.energy.frontier.savings import (
    Savings,
    frontier_figures,
    frontier_of,
    pipeline_solution,
    savings,
    sources_of,
)
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.flows.fields import ClusterFields
from partita.flows.results import Result
from partita.flows.solutions import SolutionRequest, read_solution
from partita.flows.summary import describe_plan
from partita.formats.perseus import read_clock_plan
from partita.requests import OnProgress, Request, declare, fields_of, make, part, silent
from partita.units import format_joules

Source: TypeAlias = str | OpenedFile | Solution | EnergyProfile | Frontier
"""A plan, an energy profile or a frontier: the path of its file, or the object itself."""

ASSUMED_BLOCKING_W = 70.0
"""Power of a waiting device where nobody says: the default of Zeus's own example."""
ORIGIN_WORDS: Mapping[EnergyOrigin, str] = {
    EnergyOrigin.MEASURED: "measured energy",
    EnergyOrigin.PUBLISHED: "energy from a profile file",
    EnergyOrigin.MODELLED: "modelled energy, nothing was measured",
}


@dataclass(frozen=True, kw_only=True)
class BlockingFields(Request):
    """What waiting devices draw."""

    blocking_power: tuple[str, ...] = declare(
        (), help="Watts of a device that waits, or TYPE=WATTS; several times."
    )


@dataclass(frozen=True, kw_only=True)
class PipelineFields(Request):
    """How the stages of a bare profile run."""

    schedule: str | None = declare(
        None,
        choices=schedule_names,
        added=Schedule.plugins().names,
        usual="1f1b",
        help="Pipeline schedule of a profile's stages.",
    )
    stages: int | None = declare(None, minimum=1, help="Stages that the profile must have.")
    microbatches: int | None = declare(None, minimum=1, usual="8", help="Microbatches in a step.")
    replicas: int = declare(1, minimum=1, help="Replicas of each stage.")
    tensor_parallel: int = declare(1, minimum=1, help="Devices that share a stage.")
    chunks: int = declare(1, minimum=1, help="Stages per device, for interleaved schedules.")


@dataclass(frozen=True, kw_only=True)
class EnergySourceFields(ClusterFields, PipelineFields, BlockingFields):
    """A plan or a profile, and what its file does not say."""

    profile: str | None = declare(None, usual="modelled", help="Energy profile of a PLAN.")
    graph: str | None = declare(None, help="The graph, where PLAN is a bare plan.")


@dataclass(frozen=True, kw_only=True)
class SearchFields(Request):
    """How hard the clocks of a frontier are searched for."""

    points: int = declare(50, minimum=1, maximum=2000, help="Points of the frontier.")
    tries: int = declare(
        TRIES,
        minimum=0,
        maximum=100_000_000,
        help="How long to search for better clocks where the gap to the bound is large.",
    )


@dataclass(frozen=True, kw_only=True)
class StragglerFields(Request):
    """The case in which a slow pipeline holds up the others."""

    straggler: float = declare(
        1.2, minimum=1, help="Slowdown of the straggler in the savings: T' / all-max."
    )
    pipelines: int = declare(
        16, minimum=2, help="Pipelines that wait for each other in the savings with a straggler."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EnergySource:
    """A plan with the energy profile of its stages.

    Attributes:
        name: What tables call it.
        solution: The plan; of a bare profile a pipeline of its stages.
        profile: Seconds and joules by clock.
        assumed: What was assumed because nothing was known, a sentence each.
        frontier: The frontier that it was read from, if it was.
    """

    name: str
    solution: Solution
    profile: EnergyProfile
    assumed: tuple[str, ...] = ()
    frontier: Frontier | None = None


def read_source(source: Source, request: EnergySourceFields, *, alone: bool = True) -> EnergySource:
    """Return the plan and the profile that a file and options describe.

    A plan has the profile that is named, else a modelled one; a profile alone is a pipeline of its
    stages; a frontier carries both.

    Args:
        source: The file, which may be opened already, or what it holds.
        request: What the file does not say.
        alone: Whether the options are for this file alone, so that one that says nothing of it is
            refused.

    Raises:
        InvalidInputError: The file is none of these, or the profile has more stages than the plan.
    """
    name, opened, found = _opened(source, request)
    if isinstance(found, Frontier):
        solution, profile = sources_of(found)
        if alone:
            names = ("profile", *_names(PipelineFields), "blocking_power", *_names(ClusterFields))
            _refuse(request, "a frontier says this itself", names)
        return EnergySource(name=name, solution=solution, profile=profile, frontier=found)
    if isinstance(found, EnergyProfile):
        if alone:
            names = ("profile", *_names(ClusterFields))
            _refuse(request, "SOURCE is a profile itself", names)
        pipeline = _pipeline(found, request)
        profile, assumed = _fitted(found, request.blocking_power, pipeline.schedule)
        solution = pipeline_solution(profile, pipeline)
        assumed += without_energy(solution, profile)
        return EnergySource(name=name, solution=solution, profile=profile, assumed=assumed)
    if found is not None and not isinstance(found, Solution | Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{name!r} holds a {kind}; expected a plan, an energy profile or a frontier"
        )
    if alone:
        _refuse(request, "a plan says this itself", _names(PipelineFields))
    cluster = {n: getattr(request, n) for n in _names(ClusterFields)}
    solution = read_solution(SolutionRequest(plan=opened, graph=request.graph, **cluster))
    return _with_profile(name, solution, request, alone=alone)


def _opened(
    source: Source, request: EnergySourceFields
) -> tuple[str, OpenedFile | Solution, object]:
    """Return the name of a source, what a plan is read from, and what it holds."""
    if isinstance(source, Solution):
        return source.problem.graph.name, source, source
    if isinstance(source, EnergyProfile | Frontier):
        profile = source if isinstance(source, EnergyProfile) else source.profile
        return (profile.name if profile is not None else "frontier"), OpenedFile("-", b""), source
    file = open_file(source) if isinstance(source, str) else source
    name = Path(file.name).name.split(".")[0].strip("-") or "stdin"
    return name, file, None if request.graph is not None else file.load()


def _with_profile(
    name: str, solution: Solution, request: EnergySourceFields, *, alone: bool
) -> EnergySource:
    """Return a plan with the profile that is named, else a modelled one."""
    if request.profile is None:
        if alone:
            _refuse(request, "a modelled profile says this itself", ("blocking_power",))
        return EnergySource(name=name, solution=solution, profile=modelled(solution))
    given = read_profile(request.profile)
    stages = len(solution.plan.stages)
    if given.num_stages > stages:
        raise InvalidInputError(
            f"profile {request.profile!r} has {given.num_stages} stages, the plan {stages}"
        )
    profile, assumed = _fitted(given, request.blocking_power, solution.plan.schedule)
    assumed += without_energy(solution, profile)
    return EnergySource(name=name, solution=solution, profile=profile, assumed=assumed)


def _names(group: type[Request]) -> tuple[str, ...]:
    return tuple(field.name for field in fields_of(group))


def _refuse(request: EnergySourceFields, why: str, names: tuple[str, ...]) -> None:
    """Refuse options that would be ignored."""
    given = request.given()
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')} does not apply: {why}")


def read_profile(path: str) -> EnergyProfile:
    """Return the energy profile in a file."""
    found = load(path)
    if not isinstance(found, EnergyProfile):
        kind = type(found).__name__.lower()
        raise InvalidInputError(f"{path!r} holds a {kind}, not an energy profile")
    return found


def read_blocking(given: tuple[str, ...]) -> dict[str, float]:
    """Return the power of waiting devices by type; ``""`` = any.

    >>> read_blocking(("70", "a100=83.6"))
    {'': 70.0, 'a100': 83.6}

    Raises:
        InvalidInputError: One is not of the form WATTS or TYPE=WATTS.
    """
    result = {}
    for text in given:
        name, _, watts = text.rpartition("=")
        try:
            result[name] = float(watts)
        except ValueError:
            raise InvalidInputError(
                f"--blocking-power {text!r} is not of the form WATTS or TYPE=WATTS"
            ) from None
    return result


def _fitted(
    profile: EnergyProfile, blocking: tuple[str, ...], schedule: Schedule
) -> tuple[EnergyProfile, tuple[str, ...]]:
    """Return a profile for a schedule with the powers of waiting devices, and what was assumed."""
    known = {**profile.blocking_w, **read_blocking(blocking)}
    assumed: tuple[str, ...] = ()
    if not known:
        known = {"": ASSUMED_BLOCKING_W}
        assumed = (
            f"a device that waits draws {ASSUMED_BLOCKING_W:g} W, as the profile does not say "
            "(--blocking-power)",
        )
    split, more = split_backward(replace(profile, blocking_w=known), schedule)
    return split, (*assumed, *more)


def _pipeline(profile: EnergyProfile, request: PipelineFields) -> Pipeline:
    if request.stages is not None and request.stages != profile.num_stages:
        raise InvalidInputError(
            f"--stages is {request.stages}; profile {profile.name!r} has {profile.num_stages} "
            "stages"
        )
    return Pipeline(
        schedule=Schedule(request.schedule or Schedule.ONE_F_ONE_B),
        microbatches=request.microbatches or 8,
        replicas=request.replicas,
        tensor_parallel=request.tensor_parallel,
        chunks=request.chunks,
    )


@dataclass(frozen=True, kw_only=True)
class FrontierRequest(EnergySourceFields, SearchFields, StragglerFields):
    """A plan or a profile whose time-energy frontier is wanted."""

    source: Source = declare("", is_argument=True, help="A plan, or an energy profile.")
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
    """

    source: EnergySource
    frontier: Frontier
    savings: tuple[Savings, Savings]

    def to_json(self) -> dict[str, Any]:
        """Return the frontier and its savings as JSON values."""
        return {
            "source": self.source.name,
            "plan": describe_plan(self.source.solution.plan),
            **frontier_figures(self.frontier),
            "savings": [each.to_json() for each in self.savings],
            "assumed": list(self.source.assumed),
        }

    def lines(self) -> list[str]:
        """Return the frontier in three lines: what it is of, what is saved at once, and at T*."""
        words = (
            f"{describe_plan(self.source.solution.plan)} on {len(self.frontier.devices)} devices"
        )
        origin = ORIGIN_WORDS[self.frontier.origin]
        return [f"{self.source.name} · {words} · {origin}", *headlines(self.frontier)]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each point."""
        columns = zip(
            self.frontier.time_s.tolist(),
            self.frontier.energy_j.tolist(),
            self.frontier.bound_j.tolist(),
            strict=True,
        )
        return [{"step (s)": t, "energy (J)": e, "bound (J)": b} for t, e, b in columns]


def frontier(
    source: Source,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of FrontierRequest)
) -> FrontierResult:
    """Find the least energy for every time of a step of a plan, or of a profile's stages.

    Args:
        source: A plan, an energy profile or a frontier, or the path of a file that holds one.
        on_progress: Called with each step.
        **options: The fields of :class:`FrontierRequest`: options of ``partita energy frontier``.

    Raises:
        InvalidInputError: The file holds something else, or an option does not apply to it.
    """
    return frontier_request(make(FrontierRequest, source=source, **options), on_progress)


def frontier_request(request: FrontierRequest, on_progress: OnProgress = silent) -> FrontierResult:
    """Find the frontier that a request asks for; see :func:`frontier`."""
    on_progress(f"reading {request.source if isinstance(request.source, str) else 'the plan'}")
    found = read_source(request.source, part(EnergySourceFields, request))
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
    return FrontierResult(source=found, frontier=solved, savings=gains)


def headlines(frontier: Frontier) -> list[str]:
    """Return a frontier in two lines: what is saved at once, and at T*."""
    base = savings(frontier)
    best = float(frontier.energy_j.min())
    at_once = f"{format_joules(frontier.all_max_j)} -> {format_joules(base.energy_j)}"
    return [
        f"T_min {frontier.fastest_s:.5g} s  all-max {at_once} ({share(-base.saving)}, no slowdown)",
        f"T* {frontier.best_s:.5g} s  {format_joules(best)} "
        f"({share(best / frontier.all_max_j - 1)})  "
        f"gap to bound {100 * float(frontier.gap.max()):.2f} %",
    ]


def share(value: float) -> str:
    """Return a change of energy for people, to a tenth of a percent.

    >>> share(-0.1374)
    '-13.7 %'
    """
    return f"{100 * value:+.1f} %"


@dataclass(frozen=True, kw_only=True)
class ClockFile:
    """A clock plan from a file.

    Attributes:
        entries: By device or stage, the name of each instruction and its clock.
        time_s: Seconds that the file claims; NaN where it does not.
        energy_j: Joules that it claims; likewise.
    """

    entries: list[list[tuple[str, int]]]
    time_s: float
    energy_j: float


def read_clock_file(file: OpenedFile) -> ClockFile:
    """Return a clock plan; what ours claim stands in their comments."""
    text = file.text
    try:
        entries = read_clock_plan(text)
    except FormatError as exc:
        raise exc.at(file.name) from exc
    return ClockFile(
        entries=entries, time_s=_claimed(text, "time_s"), energy_j=_claimed(text, "energy_j")
    )


def _claimed(text: str, what: str) -> float:
    found = re.search(rf"^# {what} ([-+.0-9e]+)$", text, flags=re.MULTILINE)
    try:
        return float(found[1]) if found else float("nan")
    except ValueError:
        return float("nan")


def claims(time_s: float, energy_j: float, origin: EnergyOrigin) -> str:
    """Return what a clock plan claims, as lines of its comment."""
    return f"{ORIGIN_WORDS[origin]}\ntime_s {time_s!r}\nenergy_j {energy_j!r}"
