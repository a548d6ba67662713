"""Synergy's files: traces (CSV), clusters (INI), matrices of its models (JSON), results (CSV).

A trace has no header: ``job_id,model,arrival_s,iterations,gpus``. A matrix holds speeds relative to
the GPU-proportional share by CPUs (rows) and GB (columns) a GPU. The released reader takes an
unknown model for alexnet; here it is refused. Arrivals of ``0.001 * row`` or ``0.001 * job_id``
mark a static trace: its first round starts at 1 s.
"""

import configparser
import csv
import io
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.codec import parse_json
from partita.core.columns import MAX_SECONDS, Floats
from partita.core.fleet import FleetHistory, Sensitivity, SensitivityOrigin, Trace
from partita.errors import FormatError, InvalidInputError

KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("alexnet", "res18", "res50", "mobilenet", "shufflenet"), "image"),
    **dict.fromkeys(("gnmt", "transformer", "lstm"), "language"),
    **dict.fromkeys(("m5", "deepspeech"), "speech"),
}
"""The classes of the published generator, and the order in which it deals their models."""
STATIC_STEP_S = 0.001
STATIC_START_S = 1.0
_CLUSTER_DEFAULTS = {
    "racks": 1,
    "servers_per_rack": 4,
    "gpus_per_server": 8,
    "cpus_per_server": 24,
    "dram_per_server": 500,
    "sspeed_per_server": 300,
    "net_per_server": 40,
}
_WHOLE = ("racks", "servers_per_rack", "gpus_per_server", "cpus_per_server")
_MOST_GPUS = 2**20
_LARGEST = 2**53
_N = TypeVar("_N", int, float)
_RESULT_COLUMNS = "job_id,model,gpus,arrival_s,iters,iter_time_s,finish_s,jct_s"


def read_models(text: str, which: str = "models") -> dict[str, Sensitivity]:
    """Return the sensitivities of one set of matrices by model, single-GPU profiles only.

    Args:
        text: The JSON file: axes, and per set and model its matrix.
        which: The set; those of the release differ by the CPUs a GPU of the servers.

    Raises:
        FormatError: There is no such set, or a matrix does not fit the axes.
    """
    document = parse_json(text)
    try:
        cpus, memory = document["cpu_axis_per_gpu"], document["mem_axis_gb_per_gpu"]
        sets = document["sets"]
    except (KeyError, TypeError) as exc:
        raise FormatError(f"not a file of Synergy's matrices: {exc} is missing") from exc
    if not isinstance(sets, dict) or not isinstance(sets.get(which), dict):
        known = ", ".join(sets) if isinstance(sets, dict) and sets else "none"
        raise FormatError(f"there is no set {which!r} of models; the sets are {known}")
    found = {}
    for key, entry in sets[which].items():
        name, _, gpus = key.rpartition("_")
        if gpus == "1":
            found[name] = _model(name, entry, cpus, memory)
    return found


def _model(name: str, entry: Any, cpus: list[float], memory: list[float]) -> Sensitivity:  # noqa: ANN401
    try:
        matrix = np.array(entry["tput"], dtype=np.float64)
        if matrix.shape != (len(cpus), len(memory)):
            raise FormatError(
                f"matrix of {name!r} is {matrix.shape}; expected {len(cpus)} by {len(memory)}"
            )
        return Sensitivity(
            name=name,
            kind=KIND_OF.get(name, ""),
            origin=SensitivityOrigin.PUBLISHED,
            iteration_s=float(entry["iter_time"]),
            batch_size=int(entry.get("batch", 0)),
            cpus=np.repeat(np.array(cpus, dtype=np.float64), len(memory)),
            memory_bytes=np.tile(np.array(memory, dtype=np.float64) * 1e9, len(cpus)),
            speed=matrix.ravel(),
            demand_cpus=float(entry["cpus"]),
            demand_memory_bytes=float(entry["mem"]) * 1e9,
            demand_speed=float(entry["speedup"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, InvalidInputError):
            raise
        raise FormatError(f"model {name!r}: {exc}") from exc


def read_trace(
    text: str,
    models: Mapping[str, Sensitivity],
    *,
    name: str = "trace",
    static: bool | None = None,
) -> Trace:
    """Return the trace of a CSV file.

    Args:
        text: The file.
        models: Sensitivity by model, of the file of matrices (``read_models``). The published ones
            are data of others: they are read from the user's file and never shipped here.
        name: What to call it.
        static: Whether all jobs are there from the start; ``None`` = by the arrivals.

    Raises:
        FormatError: A line is broken or names an unknown model; knows the line.
    """
    rows = [
        _job(row, line, models) for line, row in enumerate(csv.reader(io.StringIO(text)), 1) if row
    ]
    if not rows:
        raise FormatError("the trace is empty; expected job_id,model,arrival_s,iterations,gpus")
    used = list(dict.fromkeys(row[1] for row in rows))
    arrival = np.array([row[2] for row in rows])
    if static is None:
        static = _is_static(arrival, np.array([row[0] for row in rows], dtype=np.float64))
    return Trace(
        name=name,
        sensitivities=tuple(models[model] for model in used),
        start_s=STATIC_START_S if static else math.nan,
        job_id=np.array([row[0] for row in rows], dtype=np.int64),
        sensitivity=np.array([used.index(row[1]) for row in rows], dtype=np.int32),
        arrival_s=arrival,
        iterations=np.array([row[3] for row in rows], dtype=np.int64),
        gpus=np.array([row[4] for row in rows], dtype=np.int32),
    )


def _is_static(arrival: Floats, job_id: Floats) -> bool:
    """Return whether arrivals only count jobs, all of them or those that were picked from more."""
    if arrival.min() > STATIC_START_S or arrival.max() == 0:
        return False
    return any(
        np.allclose(arrival, STATIC_STEP_S * number, rtol=0, atol=1e-9)
        for number in (np.arange(len(arrival)), job_id)
    )


def _job(
    row: list[str], line: int, models: Mapping[str, Sensitivity]
) -> tuple[int, str, float, int, int]:
    if len(row) != 5:
        raise FormatError(
            f"{len(row)} fields; expected job_id,model,arrival_s,iterations,gpus", line=line
        )
    model = row[1].strip()
    if model not in models:
        raise FormatError(f"unknown model {model!r}; known are {', '.join(models)}", line=line)
    arrival = _figure(float, row[2], "arrival_s", line, most=MAX_SECONDS)
    job = _figure(int, row[0], "job_id", line)
    iterations = _figure(int, row[3], "iterations", line)
    return job, model, arrival, iterations, _figure(int, row[4], "gpus", line, most=2**31 - 1)


def _figure(
    number: Callable[[str], _N], cell: str, what: str, line: int, *, most: float = _LARGEST
) -> _N:
    """Return the number in a field.

    Raises:
        FormatError: It is none, or none that can be; names the field and the line.
    """
    try:
        value = number(cell)
    except ValueError as exc:
        raise FormatError(
            f"{what}: {exc}; expected job_id,model,arrival_s,iterations,gpus", line=line
        ) from exc
    if not 0 <= value <= most:
        raise FormatError(f"{what} is {float(cell):.3g}; expected 0 to {most:.3g}", line=line)
    return value


def write_trace(trace: Trace) -> str:
    """Return a trace as CSV; what the format has no column for is left out."""
    names = [part.name for part in trace.sensitivities]
    lines = [
        f"{job},{names[model]},{_number(arrival)},{iterations},{gpus}"
        for job, model, arrival, iterations, gpus in zip(
            trace.job_id.tolist(),
            trace.sensitivity.tolist(),
            trace.arrival_s.tolist(),
            trace.iterations.tolist(),
            trace.gpus.tolist(),
            strict=True,
        )
    ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def read_cluster(text: str, *, name: str = "cluster") -> Cluster:
    """Return the cluster of an INI file; servers of all racks have distinct names.

    The file gives the network of a server alone; links inside a server are taken to be as fast.

    Raises:
        FormatError: It is no such file, or a value is wrong.
    """
    parser = configparser.ConfigParser()
    try:
        parser.read_string(text)
        section = parser["CLUSTER"]
        value = {
            key: section.getfloat(key, fallback=float(d)) for key, d in _CLUSTER_DEFAULTS.items()
        }
    except (configparser.Error, KeyError, ValueError) as exc:
        keys = ", ".join(_CLUSTER_DEFAULTS)
        reason = str(exc).splitlines()[0]
        raise FormatError(f"not a cluster of Synergy ([CLUSTER] with {keys}): {reason}") from exc
    for key, number in value.items():
        if not (number > 0 and math.isfinite(number)):
            raise FormatError(f"{key} is {number:g}; expected more than 0")
        if key in _WHOLE and number != int(number):
            raise FormatError(f"{key} is {number:g}; expected a whole number")
    if math.prod(value[key] for key in _WHOLE[:3]) > _MOST_GPUS:
        raise FormatError(f"the cluster has more than {_MOST_GPUS:,} GPUs")
    servers = int(value["racks"]) * int(value["servers_per_rack"])
    gpus = int(value["gpus_per_server"])
    hosts = [
        Host(
            name=f"server{i}",
            cpus=int(value["cpus_per_server"]),
            memory_bytes=value["dram_per_server"] * 1e9,
            storage_bytes_per_s=value["sspeed_per_server"] * 1e6,
        )
        for i in range(servers)
    ]
    host_of = np.repeat(np.arange(servers, dtype=np.int32), gpus)
    devices = tuple(
        Device(name=f"server{host}/gpu{k % gpus}", host=host)
        for k, host in enumerate(host_of.tolist())
    )
    network = value["net_per_server"] * 1e9 / 8
    levels = (
        Level(name="host", group_of=host_of, bandwidth_bytes_per_s=np.full(servers, network)),
        Level(
            name="network",
            group_of=np.zeros(len(devices), dtype=np.int32),
            bandwidth_bytes_per_s=np.array([network]),
        ),
    )
    return Cluster(name=name, hosts=tuple(hosts), devices=devices, levels=levels)


def read_results(text: str) -> dict[int, float]:
    """Return the finish of each job of a results file, by job id.

    Raises:
        FormatError: It has other columns, or a broken line.
    """
    rows = csv.DictReader(io.StringIO(text))
    if rows.fieldnames is None or not {"job_id", "finish_s"} <= set(rows.fieldnames):
        raise FormatError(f"expected the columns {_RESULT_COLUMNS}", line=1)
    try:
        return {int(row["job_id"]): float(row["finish_s"]) for row in rows}
    except (TypeError, ValueError) as exc:
        raise FormatError(f"{exc}; expected numbers", line=rows.line_num) from exc


def write_results(history: FleetHistory, trace: Trace) -> str:
    """Return what became of the jobs that ended, in the columns of Synergy's results."""
    lines = [_RESULT_COLUMNS]
    iteration_s = [part.iteration_s for part in trace.sensitivities]
    for row in np.flatnonzero(~np.isnan(history.finish_s)).tolist():
        model = int(history.model[row])
        lines.append(
            f"{history.job_id[row]},{history.models[model]},{history.gpus[row]},"
            f"{float(history.arrival_s[row])},{trace.iterations[row]},{iteration_s[model]},"
            f"{_number(float(history.finish_s[row]))},{float(history.completion_s[row])}"
        )
    return "\n".join(lines) + "\n"
