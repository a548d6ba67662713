"""What the energy commands read: profiles, plans, frontiers, clock plans and logs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from partita.cli.inputs import read_solution, take_problem_options
from partita.cli.options import SCHEDULE, cluster_options
from partita.core.energy import EnergyOrigin, EnergyProfile, Frontier
from partita.core.plan import Plan
from partita.core.problem import Schedule
from partita.core.solution import Solution
from partita.documents import OpenedFile, load, open_file
from partita.energy.frontier.fit import split_backward, without_energy
from partita.energy.frontier.frontier import TRIES
from partita.energy.frontier.pipeline import Pipeline
from partita.energy.frontier.savings import pipeline_solution, sources_of
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.formats.perseus import read_clock_plan

_F = TypeVar("_F", bound=Callable[..., Any])

ASSUMED_BLOCKING_W = 70.0
"""Power of a waiting device where nobody says: the default of Zeus's own example."""
ORIGIN_WORDS: Mapping[EnergyOrigin, str] = {
    EnergyOrigin.MEASURED: "measured energy",
    EnergyOrigin.PUBLISHED: "energy from a profile file",
    EnergyOrigin.MODELLED: "modelled energy, nothing was measured",
}


def _all(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


blocking_option = click.option(
    "--blocking-power",
    "blocking",
    multiple=True,
    help="Watts of a device that waits, or TYPE=WATTS; several times.",
)

source_options = _all(
    click.option("--profile", "profile_file", help="Energy profile of a PLAN. [modelled]"),
    click.option("--graph", help="The graph, where PLAN is a bare plan."),
    cluster_options,
    click.option(
        "--schedule",
        type=SCHEDULE,
        default=None,
        help="Pipeline schedule of a profile's stages. [1f1b]",
    ),
    click.option("--stages", type=click.IntRange(1), help="Stages that the profile must have."),
    click.option("--microbatches", type=click.IntRange(1), help="Microbatches in a step. [8]"),
    click.option("--replicas", type=click.IntRange(1), default=1, help="Replicas of each stage."),
    click.option(
        "--tensor-parallel", type=click.IntRange(1), default=1, help="Devices that share a stage."
    ),
    click.option(
        "--chunks",
        type=click.IntRange(1),
        default=1,
        help="Stages a device, for interleaved schedules.",
    ),
    blocking_option,
)
_OPTIONS = (
    *("profile_file", "graph", "schedule", "stages", "microbatches", "replicas"),
    *("tensor_parallel", "chunks", "blocking"),
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


tries_option = click.option(
    "--tries",
    type=click.IntRange(0, 100_000_000),
    default=TRIES,
    show_default=True,
    help="How long to search for better clocks where the gap to the bound is large.",
)
"""How much effort the search of a frontier's clocks may take."""


def take_source_options(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a source out of a command's arguments."""
    found = {name: values.pop(name) for name in _OPTIONS}
    return {**found, "problem": take_problem_options(values)}


def read_source(
    opened: str | OpenedFile, options: Mapping[str, Any], *, alone: bool = True
) -> EnergySource:
    """Return the plan and the profile that a file and options describe.

    A plan has the profile that is named, else a modelled one; a profile alone is a pipeline of its
    stages; a frontier carries both.

    Args:
        opened: The file, which may be opened already.
        options: What ``take_source_options`` took.
        alone: Whether the options are for this file alone, so that one that says nothing of it is
            refused.

    Raises:
        InvalidInputError: The file is none of these, or the profile has more stages than the plan.
    """
    file = open_file(opened) if isinstance(opened, str) else opened
    path = file.name
    found = None if options["graph"] is not None else file.load()
    name = Path(path).name.split(".")[0].strip("-") or "stdin"
    if isinstance(found, Frontier):
        solution, profile = sources_of(found)
        if alone:
            names = ("profile_file", *_PIPELINE, "blocking", *_CLUSTER)
            _refuse(options, "a frontier says this itself", names)
        return EnergySource(name=name, solution=solution, profile=profile, frontier=found)
    if isinstance(found, EnergyProfile):
        if alone:
            _refuse(options, "SOURCE is a profile itself", ("profile_file", *_CLUSTER))
        pipeline = _pipeline(found, options)
        profile, assumed = _fitted(found, options["blocking"], pipeline.schedule)
        solution = pipeline_solution(profile, pipeline)
        assumed += without_energy(solution, profile)
        return EnergySource(name=name, solution=solution, profile=profile, assumed=assumed)
    if found is not None and not isinstance(found, Solution | Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{path!r} holds a {kind}; expected a plan, an energy profile or a frontier"
        )
    if alone:
        _refuse(options, "a plan says this itself", _PIPELINE)
    solution = read_solution(file, options["graph"], options["problem"])
    if options["profile_file"] is None:
        if alone:
            _refuse(options, "a modelled profile says this itself", ("blocking",))
        return EnergySource(name=name, solution=solution, profile=modelled(solution))
    given = read_profile(options["profile_file"])
    stages = len(solution.plan.stages)
    if given.num_stages > stages:
        raise InvalidInputError(
            f"profile {options['profile_file']!r} has {given.num_stages} stages, the plan {stages}"
        )
    profile, assumed = _fitted(given, options["blocking"], solution.plan.schedule)
    assumed += without_energy(solution, profile)
    return EnergySource(name=name, solution=solution, profile=profile, assumed=assumed)


_CLUSTER = ("cluster", "devices", "bandwidth", "latency", "catalogue_file")
_PIPELINE = ("schedule", "stages", "microbatches", "replicas", "tensor_parallel", "chunks")


def _refuse(options: Mapping[str, Any], why: str, names: tuple[str, ...]) -> None:
    """Refuse options that would be ignored."""
    spelled = {
        "profile_file": "profile",
        "blocking": "blocking-power",
        "catalogue_file": "catalogue",
    }
    for name in names:
        given = getattr(options["problem"], name) if name in _CLUSTER else options[name]
        if given not in (None, 1, ()):
            option = spelled.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{option} does not apply: {why}")


def read_profile(path: str) -> EnergyProfile:
    """Return the energy profile in a file."""
    found = load(path)
    if not isinstance(found, EnergyProfile):
        kind = type(found).__name__.lower()
        raise InvalidInputError(f"{path!r} holds a {kind}, not an energy profile")
    return found


def read_blocking(given: tuple[str, ...]) -> dict[str, float]:
    """Return the power of waiting devices by type; ``""`` = any.

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
    powered, assumed = _powered(profile, blocking)
    split, more = split_backward(powered, schedule)
    return split, (*assumed, *more)


def _powered(
    profile: EnergyProfile, given: tuple[str, ...]
) -> tuple[EnergyProfile, tuple[str, ...]]:
    """Return a profile with the powers of waiting devices, and what was assumed of them."""
    known = {**profile.blocking_w, **read_blocking(given)}
    if known:
        return replace(profile, blocking_w=known), ()
    words = (
        f"a device that waits draws {ASSUMED_BLOCKING_W:g} W, as the profile does not say "
        "(--blocking-power)"
    )
    return replace(profile, blocking_w={"": ASSUMED_BLOCKING_W}), (words,)


def _pipeline(profile: EnergyProfile, options: Mapping[str, Any]) -> Pipeline:
    stages = options["stages"]
    if stages is not None and stages != profile.num_stages:
        raise InvalidInputError(
            f"--stages is {stages}; profile {profile.name!r} has {profile.num_stages} stages"
        )
    return Pipeline(
        schedule=Schedule(options["schedule"] or Schedule.ONE_F_ONE_B),
        microbatches=options["microbatches"] or 8,
        replicas=options["replicas"],
        tensor_parallel=options["tensor_parallel"],
        chunks=options["chunks"],
    )


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
