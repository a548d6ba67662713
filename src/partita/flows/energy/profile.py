"""Seconds and joules of each stage by clock, from whatever there is: files, logs, a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.documents import OpenedFile, open_file, read_text
from partita.energy.frontier.replay import RankLog
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy.logs import numbered, read_logs
from partita.flows.energy.source import (
    ORIGIN_WORDS,
    BlockingFields,
    Source,
    held,
    read_blocking,
    source_words,
)
from partita.flows.energy_plan import modelled
from partita.flows.fields import ClusterFields
from partita.flows.results import Result
from partita.flows.solutions import SolutionRequest, read_solution
from partita.formats.perseus import profile_from_logs, read_results
from partita.formats.perseus_runs import WARM_UP, profile_from_reports, ranks_of
from partita.requests import OnProgress, declare, fields_of, make, silent
from partita.units import format_joules, format_seconds


@dataclass(frozen=True, kw_only=True)
class EnergyProfileRequest(ClusterFields, BlockingFields):
    """Where an energy profile comes from."""

    source: Source = declare("", is_argument=True, help="A profile, a folder of logs, or a plan.")
    modelled: bool = declare(False, help="Model the devices of a PLAN.")
    graph: str | None = declare(None, help="The graph, where PLAN is a bare plan.")
    ranks_per_stage: int = declare(
        1, minimum=1, help="Ranks that share a stage in a folder of logs."
    )
    clock: float | None = declare(None, help="MHz of a log that does not say its clocks.")
    warm_up: float = declare(
        WARM_UP,
        minimum=0,
        maximum=0.9,
        help="Share of the steps of each report that is left out.",
    )
    name: str | None = declare(None, usual="SOURCE's name", help="Name of the profile.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EnergyProfileResult(Result):
    """An energy profile.

    Attributes:
        energy_profile: The profile: what is saved to a file.
    """

    energy_profile: EnergyProfile

    def to_json(self) -> dict[str, Any]:
        """Return what the profile knows as JSON values."""
        profile = self.energy_profile
        return {
            "name": profile.name,
            "origin": profile.origin.value,
            "stages": profile.num_stages,
            "rows": len(profile),
            "device_types": list(profile.device_types),
            "clocks_mhz": sorted({float(clock) for clock in profile.clock_mhz}),
            "blocking_w": dict(profile.blocking_w) or None,
        }

    def lines(self) -> list[str]:
        """Return the profile in one line: its size, where the joules come from, and waiting."""
        profile = self.energy_profile
        return [
            f"{profile.name} · {profile.num_stages} stages, {len(profile)} rows · "
            f"{ORIGIN_WORDS[profile.origin]} · {_blocking_words(profile)}"
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each instruction of each stage and type of device."""
        profile, rows = self.energy_profile, list[Mapping[str, object]]()
        keys = np.stack([profile.stage, profile.kind, profile.device_type], axis=1)
        for stage, kind, type_ in np.unique(keys, axis=0).tolist():
            here = np.flatnonzero((keys == [stage, kind, type_]).all(axis=1))
            clocks, seconds = profile.clock_mhz[here], profile.seconds[here]
            joules = profile.joules[here]
            rows.append(
                {
                    "stage": str(stage),
                    "instruction": Kind(kind).name.lower(),
                    "device": profile.device_types[type_],
                    "clocks": str(len(here)),
                    "MHz": f"{clocks.min():g} to {clocks.max():g}",
                    "fastest": format_seconds(float(seconds.min())),
                    "slowest": format_seconds(float(seconds.max())),
                    "most": format_joules(float(joules.max())),
                    "least energy": f"{format_joules(float(joules.min()))} at "
                    f"{clocks[int(np.argmin(joules))]:g} MHz",
                }
            )
        return rows


def _blocking_words(profile: EnergyProfile) -> str:
    if not profile.blocking_w:
        return "blocking power not known"
    parts = (f"{name} {power:.4g} W".strip() for name, power in profile.blocking_w.items())
    return f"waiting {', '.join(parts)}"


def profile_energy(
    source: Source,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of EnergyProfileRequest)
) -> EnergyProfileResult:
    """Make an energy profile: seconds and joules of each stage by clock.

    Args:
        source: A profile, a plan (with ``modelled=True``), the path of a file that holds one, or a
            folder of logs that the ranks of a run wrote.
        on_progress: Called with each step.
        **options: The fields of :class:`EnergyProfileRequest`: options of ``partita energy
            profile``.

    Raises:
        InvalidInputError: The source holds something else, or an option does not apply to it.
    """
    return profile_energy_request(make(EnergyProfileRequest, source=source, **options), on_progress)


def profile_energy_request(
    request: EnergyProfileRequest, on_progress: OnProgress = silent
) -> EnergyProfileResult:
    """Make the profile that a request asks for; see :func:`profile_energy`."""
    folder = Path(request.source) if isinstance(request.source, str) else None
    is_folder = folder is not None and folder.is_dir()
    _refuse_ignored(request, is_folder=is_folder)
    on_progress(f"reading {source_words(request.source)}")
    if folder is not None and is_folder:
        return EnergyProfileResult(energy_profile=_from_folder(folder, request))
    return EnergyProfileResult(energy_profile=_from_file(request))


def _refuse_ignored(request: EnergyProfileRequest, *, is_folder: bool) -> None:
    """Refuse options that say nothing of such a source."""
    given = request.given()
    names: tuple[str, ...] = ("ranks_per_stage", "clock", "warm_up")
    why = "is for a folder of logs; this is a file"
    if is_folder:
        names = ("graph", "cluster", "devices")
        why = "is for a PLAN; this is a folder of logs"
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')} {why}")


def _from_file(request: EnergyProfileRequest) -> EnergyProfile:
    own, blocking = held(request.source), read_blocking(request.blocking_power)
    own = open_file(own) if isinstance(own, str) else own
    found: object = own
    if isinstance(own, OpenedFile):
        found = None if request.graph is not None else own.load()
    if isinstance(found, EnergyProfile):
        if request.modelled:
            raise InvalidInputError("--modelled needs a PLAN; this is a profile already")
        return _changed(found, request.name or found.name, {**found.blocking_w, **blocking})
    if not isinstance(own, OpenedFile | Solution) or (
        found is not None and not isinstance(found, Solution) and not request.modelled
    ):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{source_words(request.source)!r} holds a {kind}; expected an energy profile or a plan"
        )
    if not request.modelled:
        raise InvalidInputError(
            "a plan has no measured energy; say --modelled to model its devices"
        )
    cluster = {field.name: getattr(request, field.name) for field in fields_of(ClusterFields)}
    profile = modelled(read_solution(SolutionRequest(plan=own, graph=request.graph, **cluster)))
    return _changed(profile, request.name or profile.name, {**profile.blocking_w, **blocking})


def _changed(profile: EnergyProfile, name: str, blocking: dict[str, float]) -> EnergyProfile:
    return replace(profile, name=name, blocking_w=blocking)


def _from_folder(folder: Path, request: EnergyProfileRequest) -> EnergyProfile:
    if request.modelled:
        raise InvalidInputError("--modelled needs a PLAN; this is a folder of logs")
    blocking = read_blocking(request.blocking_power)
    name = request.name or folder.resolve().name
    logs = read_logs(folder, request.clock)
    if logs:
        return _from_logs(logs, request.ranks_per_stage, name, blocking)
    reports = numbered(folder, r"(\d+)\.prof\.json")
    if not reports:
        raise InvalidInputError(
            f"{folder} holds neither instructions-%d.csv nor %d.prof.json files"
        )
    pairs = []
    for number, path in sorted(reports.items()):
        schedule = folder / f"{number}.sched.json"
        pairs.append((_results(schedule), _results(path)))
    known = folder / "ranks.json"
    ranks = ranks_of(_results(known)) if known.exists() else {}
    return profile_from_reports(
        pairs, ranks, name=name, blocking_w=blocking, warm_up=request.warm_up
    )


def _results(path: Path) -> list[dict[str, Any]]:
    try:
        return read_results(read_text(str(path)))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(str(path))) from exc


def _from_logs(
    logs: dict[int, RankLog], ranks_per_stage: int, name: str, blocking: dict[str, float]
) -> EnergyProfile:
    ranks = []
    for rank, log in logs.items():
        if log.readings is None:
            raise InvalidInputError(
                f"there is no time-energy-{rank}.csv; the energy of rank {rank} is not known, so "
                "there is no profile of it"
            )
        ranks.append((rank // ranks_per_stage, log.logged, log.readings))
    modelled = any(log.is_modelled for log in logs.values())
    origin = EnergyOrigin.MODELLED if modelled else EnergyOrigin.MEASURED
    return profile_from_logs(ranks, name=name, blocking_w=blocking, origin=origin)
