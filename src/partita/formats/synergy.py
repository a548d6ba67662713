"""Synergy's files: traces, clusters (INI), matrices of models, profiles (JSON), results (CSV).

A trace has no header: ``job_id,model,arrival_s,iterations,gpus``. A matrix holds speeds relative to
the GPU-proportional share by CPUs (rows) and GB (columns) per GPU. The released reader takes an
unknown model for alexnet; here it is refused. Arrivals of ``0.001 * row`` or ``0.001 * job_id``
mark a static trace: its first round starts at 1 s.

``profile.json`` of Synergy's offline profiler: read and written.

A list of three objects: seconds of an iteration by CPUs; seconds of an epoch by CPUs and percent of
the dataset in memory; storage bandwidth in MB/s, likewise. CPUs are those of the whole job, a MB
has 2^20 bytes. The file names neither the job, nor its GPUs, its batch size or its dataset. Its
size follows from what an epoch with nothing cached reads; the rest the reader must be told.

A cluster is an INI file, known by its section ``[CLUSTER]``; all its servers are alike.
"""

import configparser
import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.codec import parse_json
from partita.core.columns import MAX_SECONDS, Floats
from partita.core.fleet import FleetHistory, Sensitivity, SensitivityOrigin, Trace
from partita.errors import FormatError, InvalidInputError
from partita.formats.json_fields import as_number, format_errors, refuse

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
        which: The set; those of the release differ by the CPUs per GPU of the servers.

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
        name: Its name.
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


_BYTES_PER_MIB = 2**20
_PARTS = ("seconds of an iteration", "seconds of an epoch", "storage bandwidth")


def is_synergy_profile(value: object) -> bool:
    """Return whether a JSON value looks like a profile."""
    return isinstance(value, list) and len(value) == 3 and all(isinstance(v, dict) for v in value)


def read_synergy_profile(
    text: str, *, name: str, gpus: int = 1, batch_size: int = 0
) -> Sensitivity:
    """Return the sensitivity in a profile.

    Speed 1 is that with the most CPUs and all data cached.

    Args:
        text: The file.
        name: Of the job.
        gpus: GPUs of the job.
        batch_size: Samples per iteration and GPU; 0 = not known.

    Raises:
        FormatError: It is not a profile.
    """
    value = parse_json(text)
    if not is_synergy_profile(value):
        raise FormatError("expected Synergy's profile, a list of three objects by CPU count")
    iteration = {cpus: as_number(s, f"[0].{key}", low=1e-9) for key, cpus, s in _keys(value[0], 0)}
    epoch, storage = (_table(value[part], part) for part in (1, 2))
    for part, table in enumerate((epoch, storage), 1):
        if table.keys() != iteration.keys():
            raise FormatError(f"[{part}] has other CPU counts than [0]")
    top = max(iteration)
    for cpus in iteration:
        if epoch[cpus].keys() != storage[cpus].keys() or not epoch[cpus].keys() >= {0.0, 100.0}:
            raise FormatError(
                f"{cpus:g} CPUs: expected the same percents twice, 0 and 100 among them"
            )
    rows = [(cpus, percent) for cpus in sorted(iteration) for percent in sorted(epoch[cpus])]
    dataset_bytes = _BYTES_PER_MIB * storage[top][0.0] * epoch[top][0.0]
    whole = round(epoch[top][100.0] / iteration[top])
    with format_errors():
        return Sensitivity(
            name=name,
            origin=SensitivityOrigin.MEASURED,
            iteration_s=iteration[top],
            batch_size=batch_size,
            dataset_samples=whole * gpus * max(1, batch_size),
            dataset_bytes=dataset_bytes,
            gpus=np.full(len(rows), gpus),
            cpus=np.array([cpus / gpus for cpus, _ in rows]),
            memory_bytes=np.array([percent / 100 * dataset_bytes / gpus for _, percent in rows]),
            speed=np.array([epoch[top][100.0] / epoch[cpus][percent] for cpus, percent in rows]),
            measured=np.array([percent == 100 for _, percent in rows]),
            storage_bytes_per_s=np.array([storage[cpus][m] * _BYTES_PER_MIB for cpus, m in rows]),
        )


def _keys(value: Mapping[str, Any], part: int) -> list[tuple[str, float, Any]]:
    """Return keys as they stand, as numbers, and their values; ``"12"`` and ``"12.0"`` are one."""
    found: dict[float, tuple[str, float, Any]] = {}
    for key, item in value.items():
        try:
            count = float(key)
        except ValueError:
            count = math.nan
        if not 0 <= count < math.inf:
            raise FormatError(f"[{part}]: key {key!r}; expected a number")
        if count in found:
            raise FormatError(
                f"[{part}]: {count:g} stands twice, as {key!r} and {found[count][0]!r}"
            )
        found[count] = key, count, item
    if not found:
        raise FormatError(f"[{part}], {_PARTS[part]}, is empty")
    return list(found.values())


def _table(value: Mapping[str, Any], part: int) -> dict[float, dict[float, float]]:
    table: dict[float, dict[float, float]] = {}
    for key, cpus, row in _keys(value, part):
        if not isinstance(row, dict):
            refuse(f"[{part}].{key}", row, "an object by percent")
        low = 1e-9 if part == 1 else 0.0
        table[cpus] = {
            percent: as_number(item, f"[{part}].{key}.{name}", low=low)
            for name, percent, item in _keys(row, part)
        }
    return table


def write_synergy_profile(sensitivity: Sensitivity) -> str:
    """Return a sensitivity as Synergy's profile.

    Raises:
        InvalidInputError: It does not say the dataset, or speaks of several kinds of GPUs.
    """
    where = f"sensitivity {sensitivity.name!r}"
    if not (sensitivity.dataset_bytes > 0 and sensitivity.dataset_samples > 0):
        raise InvalidInputError(
            f"{where} does not know the size of its dataset, so there are no percents of it"
        )
    gpus = np.unique(sensitivity.gpus)
    if len(gpus) > 1 or len(sensitivity.gpu_types) > 1:
        raise InvalidInputError(f"{where} has several kinds or numbers of GPUs; a profile has one")
    count = max(1, int(gpus[0]))
    whole = max(1, sensitivity.dataset_samples // (count * max(1, sensitivity.batch_size)))
    cached = (
        (sensitivity.memory_bytes - sensitivity.working_bytes) * count / sensitivity.dataset_bytes
    )
    iteration: dict[str, float] = {}
    epoch: dict[str, dict[str, float]] = {}
    storage: dict[str, dict[str, float]] = {}
    order = np.lexsort((cached, -sensitivity.cpus))
    for row in order.tolist():
        cpus = f"{sensitivity.cpus[row] * count:.6g}"
        percent = f"{100 * cached[row]:.4g}"
        seconds = sensitivity.iteration_s / float(sensitivity.speed[row])
        needed = float(sensitivity.storage_bytes_per_s[row]) / _BYTES_PER_MIB
        epoch.setdefault(cpus, {})[percent] = seconds * whole
        storage.setdefault(cpus, {})[percent] = needed
        if percent == "100":
            iteration[cpus] = seconds
    if iteration.keys() != epoch.keys() or any(
        math.isnan(value) for row in storage.values() for value in row.values()
    ):
        raise InvalidInputError(
            f"{where} lacks points with all data cached, or the storage that they need"
        )
    return json.dumps([iteration, epoch, storage], allow_nan=False) + "\n"


SECTION = "[CLUSTER]"


def is_synergy_cluster(text: str) -> bool:
    """Return whether a text looks like such a file."""
    return any(line.strip().upper() == SECTION for line in text.splitlines())


def write_cluster_ini(cluster: Cluster) -> str:
    """Return a cluster of equal servers as an INI file; types of GPU have no place in it.

    Raises:
        InvalidInputError: Servers differ, or CPUs and memory are not known.
    """
    gpus = np.bincount([device.host for device in cluster.devices], minlength=len(cluster.hosts))
    rows = {
        (int(count), host.cpus, host.memory_bytes, host.storage_bytes_per_s)
        for count, host in zip(gpus, cluster.hosts, strict=True)
    }
    if len(rows) != 1:
        raise InvalidInputError(f"servers of {cluster.name!r} differ; Synergy's are all alike")
    count, cpus, memory, storage = rows.pop()
    if not (count and cpus and memory):
        raise InvalidInputError(f"cluster {cluster.name!r}: GPUs, cpus and memory must be known")
    lines = [
        SECTION,
        "racks = 1",
        f"servers_per_rack = {len(cluster.hosts)}",
        f"gpus_per_server = {count}",
        f"cpus_per_server = {cpus}",
        f"dram_per_server = {memory / 1e9:g}",
    ]
    # What the reader takes for a missing line is not written, so that files come back as they were.
    if storage and storage != _CLUSTER_DEFAULTS["sspeed_per_server"] * 1e6:
        lines.append(f"sspeed_per_server = {storage / 1e6:g}")
    network = cluster.levels[-1].bandwidth_bytes_per_s if cluster.levels else np.zeros(0)
    if len(network) and np.isfinite(network).all():
        lines.append(f"net_per_server = {float(network.min()) * 8 / 1e9:g}")
    return "\n".join(lines) + "\n"
