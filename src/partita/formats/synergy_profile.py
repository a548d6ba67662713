"""``profile.json`` of Synergy's offline profiler: read and written.

A list of three objects: seconds of an iteration by CPUs; seconds of an epoch by CPUs and percent of
the dataset in memory; storage bandwidth in MB/s, likewise. CPUs are those of the whole job, a MB
has 2^20 bytes. The file names neither the job, nor its GPUs, its batch size or its dataset. Its
size follows from what an epoch with nothing cached reads; the rest the reader must be told.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from partita.core.codec import parse_json
from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.errors import FormatError, InvalidInputError
from partita.formats.json_fields import as_number, format_errors, refuse

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
        batch_size: Samples an iteration and GPU; 0 = not known.

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
