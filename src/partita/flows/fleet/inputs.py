"""What requests on fleets name: servers, sensitivities, traces; and how options are read.

Options that several requests share are declared here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.catalogue.catalogue import load_catalogue
from partita.core.cluster import Cluster
from partita.core.fleet import Sensitivity, Trace
from partita.documents import open_file
from partita.errors import FormatError, InvalidInputError
from partita.fleet.engines.ray import ray_servers
from partita.fleet.engines.slurm import servers_of_nodes
from partita.fleet.policies.resources import Servers, servers_of
from partita.fleet.study.generated import GPU_SHARES, INSENSITIVE
from partita.fleet.study.traces import TraceOptions, changed_trace, drawn_trace, logged_trace
from partita.flows.fields import ClusterFields, is_slurm
from partita.flows.fleet.examples import DEFAULT_TYPE, EXAMPLE_JOBS, example_sensitivities
from partita.flows.fleet.power import with_frontiers
from partita.flows.problem import read_cluster
from partita.flows.slurm_cluster import slurm_nodes
from partita.formats.philly import read_philly
from partita.formats.submissions import read_submissions
from partita.formats.synergy import read_models, read_synergy_profile, read_trace
from partita.processes import machine_cores
from partita.requests import Request, declare
from partita.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class JobFields(Request):
    """Where the jobs of a trace get their sensitivities and powers from, and how they are drawn."""

    profiles: tuple[str | Sensitivity, ...] = declare(
        (),
        metavar="FILE",
        usual="built-in modelled classes",
        help="Sensitivities: documents, Synergy's profile.json or matrices, or a folder of "
        "'fleet profile'; several times.",
    )
    profile_set: str = declare("models", help="Set of Synergy's matrices to use.")
    power_model: str | None = declare(
        None,
        metavar="TYPE",
        help="Type of GPU for which time against energy of jobs that carry no frontier is "
        "modelled.",
    )
    published_filter: bool = declare(
        False,
        help="Keep of a log only what Synergy's reader keeps: jobs of 32 to 10,000 minutes and up "
        "to 16 GPUs; other GPUs than powers of two are 1.",
    )
    seed: int = declare(1, minimum=0, help="Seed of arrivals and all other draws.")


GENERATED = "generated"
MOST_LOADS = 200
_NO_LOG = "--published-filter is for a log of submissions"
_SPEC_KEYS = ("jobs", "load", "seed", "static", "short", "multi-gpu")


def read_profiles(request: JobFields) -> dict[str, Sensitivity]:
    """Return sensitivities by name: those of files, or else the built-in classes.

    Raises:
        FormatError: A file holds none.
        InvalidInputError: A name stands twice.
    """
    if not request.profiles:
        parts = example_sensitivities(load_catalogue(), request.power_model or DEFAULT_TYPE)
        return {part.name: part for part in parts}
    found: dict[str, Sensitivity] = {}
    for profile in request.profiles:
        for part in _sensitivities(profile, request.profile_set):
            if part.name in found:
                raise InvalidInputError(f"--profiles: {part.name!r} is in two files")
            found[part.name] = part
    return found


def _sensitivities(profile: str | Sensitivity, which: str) -> list[Sensitivity]:
    if isinstance(profile, Sensitivity):
        return [profile]
    files = _profile_files(Path(profile))
    return [part for file in files for part in _read_profile(str(file), which)]


def _profile_files(path: Path) -> list[Path]:
    """Return a file, or those of the jobs in a folder that 'fleet profile' wrote."""
    if not path.is_dir():
        return [path]
    files = sorted({*path.glob("sensitivity.json"), *path.glob("*/sensitivity.json")})
    if not files:
        raise FormatError("holds no JOB/sensitivity.json", path=str(path))
    return files


def _read_profile(path: str, which: str) -> list[Sensitivity]:
    opened = open_file(path)
    kind = opened.format
    try:
        if kind == "synergy-models":
            return list(read_models(opened.text, which).values())
        if kind == "synergy-profile":
            file = Path(path)
            name = file.resolve().parent.name if file.stem == "profile" else file.stem
            return [read_synergy_profile(opened.text, name=name)]
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc
    found = opened.load()
    if isinstance(found, Trace):
        return list(found.sensitivities)
    if not isinstance(found, Sensitivity):
        raise FormatError(f"holds a {type(found).__name__.lower()}, no sensitivity", path=path)
    return [found]


def read_fleet_trace(
    source: str | Trace,
    models: Mapping[str, Sensitivity],
    options: TraceOptions,
    *,
    power_model: str | None = None,
) -> tuple[Trace, tuple[str, ...]]:
    """Return the trace that a user names, changed by options, and remarks on what was changed.

    Args:
        source: ``generated[:key=value,...]``, a file (a document, Synergy's CSV, a log), or the
            trace itself.
        models: Sensitivities by name.
        options: What to change, and how to draw what a source does not hold.
        power_model: Type of GPU whose frontier jobs get that carry none; ``None`` = none.

    Raises:
        FormatError: The file holds no trace.
        InvalidInputError: The options do not fit it.
    """
    trace, remarks = _read_source(source, models, options)
    if power_model is not None:
        trace = with_frontiers(trace, load_catalogue().device_type(power_model))
    return trace, remarks


def _read_source(
    source: str | Trace, models: Mapping[str, Sensitivity], options: TraceOptions
) -> tuple[Trace, tuple[str, ...]]:
    if isinstance(source, str) and not _is_generated(source):
        return _read_file(source, models, options)
    if options.published_filter:
        raise InvalidInputError(_NO_LOG)
    if isinstance(source, Trace):
        return changed_trace(source, options), ()
    return drawn_trace(list(models.values()), _spec(source, options), name=GENERATED), ()


def _is_generated(source: str) -> bool:
    return source.partition(":")[0] == GENERATED and not Path(source).exists()


def _read_file(
    source: str, models: Mapping[str, Sensitivity], options: TraceOptions
) -> tuple[Trace, tuple[str, ...]]:
    opened = open_file(source)
    kind = opened.format_of(("jobs",))
    name = Path(source).name.split(".")[0] or "trace"
    try:
        if options.published_filter and kind not in ("philly", "submissions"):
            raise InvalidInputError(_NO_LOG)
        if kind == "synergy-trace":
            return changed_trace(_synergy(opened.text, models, name), options), ()
        if kind in ("philly", "submissions"):
            read = read_philly if kind == "philly" else read_submissions
            log = read(opened.text)
            known = list(models.values())
            is_known = bool(options.split) or not set(models) <= {job.name for job in EXAMPLE_JOBS}
            if not is_known and not options.published_filter:
                known = [INSENSITIVE]
            named = (
                log.models if is_known and not (options.split or options.published_filter) else ()
            )
            trace, dropped = logged_trace(
                log.rows, known, options, name=name, tenants=log.tenants, named=named
            )
            if dropped:
                dropped = (f"by --published-filter {', '.join(dropped)}",)
            changes = "; ".join((*log.notes, *dropped))
            remarks: tuple[str, ...] = ()
            if changes:
                remarks = (f"{source}: {len(trace):,} jobs; {changes}",)
            if others := sorted(set(named) - {part.name for part in known} - {""}):
                remarks += (
                    f"{source}: no profile for {', '.join(others)[:200]}: these jobs count as "
                    "insensitive to CPUs and memory",
                )
            if known == [INSENSITIVE]:
                remarks += (
                    f"{source}: what its jobs need is not known: they count as insensitive to CPUs "
                    "and memory; --profiles says what they need",
                )
            return trace, remarks
    except FormatError as exc:
        raise (exc if exc.path else exc.at(source)) from exc
    found = opened.load()
    if not isinstance(found, Trace):
        raise FormatError(f"holds a {type(found).__name__.lower()}, no trace", path=source)
    return changed_trace(found, options), ()


def _synergy(text: str, models: Mapping[str, Sensitivity], name: str) -> Trace:
    try:
        return read_trace(text, models, name=name)
    except FormatError as exc:
        if "unknown model" not in str(exc):
            raise
        reason = f"{exc.reason}; name the file of its sensitivity with --profiles"
        raise FormatError(reason, line=exc.line) from exc


def _spec(source: str, options: TraceOptions) -> TraceOptions:
    """Return options with what stands after ``generated:``."""
    changes: dict[str, Any] = {}
    for pair in filter(None, source.partition(":")[2].split(",")):
        key, sign, value = pair.partition("=")
        if key not in _SPEC_KEYS or (bool(sign) == (key in _SPEC_KEYS[3:])):
            raise InvalidInputError(
                f"{source!r}: {pair!r} is not understood; write generated:jobs=100,load=9,seed=1 "
                "with, if you like, static, short or multi-gpu; 'partita fleet trace' has more"
            )
        if key == "multi-gpu":
            changes["gpu_shares"] = GPU_SHARES
        elif key in ("static", "short"):
            changes[key] = True
        else:
            changes[key] = (parse_number if key == "load" else parse_count)(value, key)
    return replace(options, **changes)


def parse_number(text: str, what: str) -> float:
    """Return a number above 0.

    Raises:
        InvalidInputError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise InvalidInputError(f"{what} is {text!r}; expected a number above 0")
    return value


def parse_count(text: str, what: str) -> int:
    """Return a whole number, 0 or more.

    Raises:
        InvalidInputError: It is none.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidInputError(f"{what} is {text!r}; expected a whole number")
    return int(text)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return seeds for ``7``, ``0,1,2`` or ``0:9``.

    Raises:
        InvalidInputError: It is none of these, or too many.
    """
    found: list[int] = []
    for part in text.split(","):
        first, sign, last = part.partition(":")
        begin = parse_count(first, "--seeds")
        end = parse_count(last, "--seeds") if sign else begin
        if end < begin or end - begin >= MOST_LOADS:
            raise InvalidInputError(
                f"--seeds {part!r}; expected FIRST:LAST of {MOST_LOADS} seeds at most"
            )
        found += range(begin, end + 1)
    return tuple(found)


def parse_loads(text: str | None) -> tuple[float, ...]:
    """Return loads for ``4``, ``1,2,4``, ``1:10`` (by 1) or ``0.5:8:0.5``; none for ``None``.

    Raises:
        InvalidInputError: It is none of these, or too many.
    """
    if text is None:
        return ()
    found: list[float] = []
    for part in text.split(","):
        ends = [parse_number(end, "--loads") for end in part.split(":")]
        if len(ends) == 1:
            found += ends
            continue
        if len(ends) > 3 or ends[1] < ends[0]:
            raise InvalidInputError(
                f"--loads {part!r} is not FIRST:LAST or FIRST:LAST:STEP, from the smaller to the "
                "larger"
            )
        step = ends[2] if len(ends) == 3 else 1.0
        count = int((ends[1] - ends[0]) / step + 1e-9) + 1
        if count > MOST_LOADS:
            raise InvalidInputError(f"--loads {part!r} are {count} loads; {MOST_LOADS} at most")
        found += [ends[0] + step * index for index in range(count)]
    return tuple(dict.fromkeys(round(load, 9) for load in found))


def parse_span(text: str | None, what: str) -> tuple[int, int] | None:
    """Return first and last of ``FIRST:LAST``.

    Raises:
        InvalidInputError: It is not of that form.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon:
        raise InvalidInputError(f"{what} {text!r} is not of the form FIRST:LAST")
    found = parse_count(first, what), parse_count(last, what)
    if found[0] > found[1]:
        raise InvalidInputError(f"{what} {text!r} ends before it begins")
    return found


def parse_shares(text: str | None, what: str, names: Sequence[str] = ()) -> dict[str, float]:
    """Return shares for ``a=2,b=1``; also ``2,1`` where the names are known.

    Raises:
        InvalidInputError: It is not of that form.
    """
    if text is None:
        return {}
    parts = [part.strip() for part in text.strip("()").split(",")]
    if names and len(parts) == len(names) and not any("=" in part for part in parts):
        parts = [f"{name}={part}" for name, part in zip(names, parts, strict=True)]
    found: dict[str, float] = {}
    for part in parts:
        name, sign, value = part.partition("=")
        try:
            share = float(value) if sign else -1.0
        except ValueError:
            share = -1.0
        if not name or not 0 <= share < 1e9 or name in found:
            raise InvalidInputError(f"{what} {text!r} is not understood; write NAME=SHARE,...")
        found[name] = share
    return found


def parse_pairs(pairs: Sequence[str], what: str) -> dict[str, str]:
    """Return names and values for texts like ``partition=gpu``.

    Raises:
        InvalidInputError: One is not of that form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise InvalidInputError(f"{what} {pair!r} is not of the form NAME=VALUE")
        if name in found:
            raise InvalidInputError(f"{what} gives {name!r} twice")
        found[name] = value
    return found


def parse_quotas(pairs: Sequence[str]) -> dict[str, int]:
    """Return quotas for texts like ``team=8``.

    Raises:
        InvalidInputError: One is not of that form.
    """
    found: dict[str, int] = {}
    for pair in pairs:
        name, sign, value = pair.rpartition("=")
        if not sign:
            raise InvalidInputError(f"--quota {pair!r} is not of the form TENANT=GPUS")
        found[name] = parse_count(value, f"--quota of {name!r}")
    return found


RAY = "ray"
"""Cluster that means the nodes of a Ray cluster."""


def declared_servers(
    cluster: str | Cluster | None,
    gpus: int | None,
    cpus: int | None,
    memory: str | None,
    engine_options: Mapping[str, str] | None = None,
) -> Servers:
    """Return the servers that the options declare.

    Args:
        cluster: A cluster, or what names one.
        gpus: GPUs of one server, instead.
        cpus: CPUs per server; None = the cluster's, this machine's.
        memory: Memory per server; None = the cluster's, this machine's.
        engine_options: Say where Ray is, if its nodes are meant.

    Raises:
        InvalidInputError: They are not given, given twice, or wrong.
    """
    if (cluster is None) == (gpus is None):
        raise InvalidInputError("give either --gpus N or --cluster")
    if isinstance(cluster, str) and is_slurm(cluster):
        servers = servers_of_nodes(slurm_nodes(cluster))
    elif cluster == RAY:
        servers = ray_servers(engine_options or {})
    elif cluster is not None:
        found, _ = read_cluster(ClusterFields(cluster=cluster))
        assert found is not None  # one was named
        servers = servers_of(found)
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        servers = Servers(
            names=("local",),
            gpu_type=np.zeros(1, dtype=np.int32),
            gpus=np.array([gpus], dtype=np.int32),
            cpus=np.array([float(machine_cores())]),
            memory_bytes=np.array([float(there)]),
            storage_bytes_per_s=np.zeros(1),
        )
    if cpus is not None:
        servers = replace(servers, cpus=np.full(len(servers), float(cpus)))
    if memory is not None:
        size = parse_bytes(memory, "--memory")
        servers = replace(servers, memory_bytes=np.full(len(servers), size))
    return servers
