"""Plans with the energy of their stages, and clocks for them, from files and options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from partita.core.energy import EnergyOrigin, EnergyProfile, Frontier
from partita.core.plan import Plan
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule, schedule_names
from partita.core.solution import Solution
from partita.documents import OpenedFile, load, open_file
from partita.energy.frontier.fit import split_backward, without_energy
from partita.energy.frontier.frontier import TRIES
from partita.energy.frontier.pipeline import Pipeline
from partita.energy.frontier.savings import pipeline_solution, sources_of
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.flows.fields import ClusterFields, HasSolution
from partita.flows.solutions import SolutionRequest, read_solution
from partita.formats.perseus import read_clock_plan
from partita.requests import Request, declare, fields_of
from partita.units import parse_seconds


@runtime_checkable
class HasFrontier(Protocol):
    """A result that holds a frontier, such as that of ``partita.frontier``."""

    @property
    def frontier(self) -> Frontier:
        """The frontier."""
        ...


@runtime_checkable
class HasEnergyProfile(Protocol):
    """A result that holds an energy profile, such as that of ``partita.profile_energy``."""

    @property
    def energy_profile(self) -> EnergyProfile:
        """The energy profile."""
        ...


Source: TypeAlias = (
    str
    | OpenedFile
    | Solution
    | EnergyProfile
    | Frontier
    | HasSolution
    | HasFrontier
    | HasEnergyProfile
)

"""A plan, an energy profile or a frontier: the path of its file, or the object itself, or a result
that has one."""

_WANTED = ("a plan", "an energy profile", "a frontier")
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

    group = "power"
    blocking_power: tuple[str, ...] = declare(
        (), help="Watts of a device that waits, or TYPE=WATTS; several times."
    )


@dataclass(frozen=True, kw_only=True)
class PipelineFields(Request):
    """How the stages of a bare profile run."""

    group = "pipeline"
    schedule: str | None = declare(
        None,
        choices=schedule_names,
        added=Schedule.plugins().names,
        usual="1f1b",
        help="Pipeline schedule of a profile's stages.",
    )
    stages: str | int | None = declare(None, help="Stages that the profile must have.")
    microbatches: int | None = declare(None, minimum=1, usual="8", help="Microbatches in a step.")
    replicas: int = declare(1, minimum=1, help="Replicas of each stage.")
    tensor_parallel: int = declare(1, minimum=1, help="Devices that share a stage.")
    chunks: int = declare(1, minimum=1, help="Stages per device, for interleaved schedules.")


@dataclass(frozen=True, kw_only=True)
class EnergySourceFields(ClusterFields, PipelineFields, BlockingFields):
    """A plan or a profile, and what its file does not say."""

    profile: str | EnergyProfile | HasEnergyProfile | None = declare(
        None, usual="modelled", help="Energy profile of a PLAN."
    )
    graph: str | None = declare(None, help="The graph, where PLAN is a bare plan.")
    switch_time: str | None = declare(
        None,
        usual="the profile's, else 0",
        help="Time that a device waits whenever its clock changes, such as 10ms.",
    )


@dataclass(frozen=True, kw_only=True)
class SearchFields(Request):
    """How hard the clocks of a frontier are searched for."""

    group = "search"
    points: int = declare(50, minimum=1, maximum=2000, help="Points of the frontier.")
    tries: int = declare(
        TRIES,
        minimum=0,
        maximum=100_000_000,
        help="Search this long for better clocks where the gap to the bound is large.",
    )


@dataclass(frozen=True, kw_only=True)
class StragglerFields(Request):
    """The case in which a slow pipeline holds up the others."""

    group = "stragglers"
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
            names += ("switch_time",)
            _refuse(request, "a frontier says this itself", names)
        return EnergySource(name=name, solution=solution, profile=profile, frontier=found)
    if isinstance(found, EnergyProfile):
        if alone:
            names = ("profile", *_names(ClusterFields))
            _refuse(request, "SOURCE is a profile itself", names)
        pipeline = _pipeline(found, request)
        found = _switching(found, request)
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
    own = held(source)
    if isinstance(own, Solution):
        return own.problem.graph.name, own, own
    if isinstance(own, EnergyProfile | Frontier):
        profile = own if isinstance(own, EnergyProfile) else own.profile
        return (profile.name if profile is not None else "frontier"), OpenedFile("-", b""), own
    file = open_file(own) if isinstance(own, str) else own
    name = Path(file.name).name.split(".")[0].strip("-") or "stdin"
    return name, file, None if request.graph is not None else file.load(wanted=_WANTED)


def held(source: Source) -> str | OpenedFile | Solution | EnergyProfile | Frontier:
    """Return the object that a result holds; anything else as it is."""
    if isinstance(source, str | OpenedFile | Solution | EnergyProfile | Frontier):
        return source
    if isinstance(source, HasFrontier):
        return source.frontier
    return source.energy_profile if isinstance(source, HasEnergyProfile) else source.solution


def source_words(source: object) -> str:
    """Return what progress calls a source: its path, else its kind."""
    if isinstance(source, OpenedFile):
        return source.name
    return source if isinstance(source, str) else f"a {type(source).__name__.lower()}"


def _with_profile(
    name: str, solution: Solution, request: EnergySourceFields, *, alone: bool
) -> EnergySource:
    """Return a plan with the profile that is named, else a modelled one."""
    if request.profile is None:
        if alone:
            _refuse(request, "a modelled profile says this itself", ("blocking_power",))
        profile = _switching(modelled(solution), request)
        return EnergySource(name=name, solution=solution, profile=profile)
    given = _switching(read_profile(request.profile), request)
    name_of = request.profile if isinstance(request.profile, str) else given.name
    stages = len(solution.plan.stages)
    if given.num_stages > stages:
        raise InvalidInputError(
            f"profile {name_of!r} has {given.num_stages} stages, the plan {stages}"
        )
    profile, assumed = _fitted(given, request.blocking_power, solution.plan.schedule)
    assumed += without_energy(solution, profile)
    return EnergySource(name=name, solution=solution, profile=profile, assumed=assumed)


def _switching(profile: EnergyProfile, request: EnergySourceFields) -> EnergyProfile:
    """Return a profile with the time that a change of a clock takes, where that is said."""
    if request.switch_time is None:
        return profile
    return replace(profile, switch_s=parse_seconds(request.switch_time, "--switch-time"))


def _names(group: type[Request]) -> tuple[str, ...]:
    return tuple(field.name for field in fields_of(group))


def _refuse(request: EnergySourceFields, why: str, names: tuple[str, ...]) -> None:
    """Refuse options that would be ignored."""
    given = request.given()
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')} does not apply: {why}")


def read_profile(source: str | EnergyProfile | HasEnergyProfile) -> EnergyProfile:
    """Return the energy profile in a file, or in a result."""
    if not isinstance(source, str):
        return source if isinstance(source, EnergyProfile) else source.energy_profile
    found = load(source)
    if not isinstance(found, EnergyProfile):
        kind = type(found).__name__.lower()
        raise InvalidInputError(f"{source!r} holds a {kind}, not an energy profile")
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
    if request.stages is not None and _count(request.stages) != profile.num_stages:
        raise InvalidInputError(
            f"--stages is {request.stages}; profile {profile.name!r} has {profile.num_stages} "
            "stages"
        )
    return Pipeline(
        schedule=Schedule(request.schedule or DEFAULT_SCHEDULE),
        microbatches=request.microbatches or 8,
        replicas=request.replicas,
        tensor_parallel=request.tensor_parallel,
        chunks=request.chunks,
    )


def _count(stages: str | int) -> int:
    """Return a number of stages.

    Raises:
        InvalidInputError: It is none, such as times of stages beside a profile that has them.
    """
    if str(stages).isdecimal() and int(stages) > 0:
        return int(stages)
    raise InvalidInputError(
        f"--stages is {stages!r}; expected a number of stages, as the profile says their times"
    )


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
