"""What a job reported of its speed, and its speed from wall times where it reported nothing."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partita.errors import WorkerError

SPEED_FILE = "speed.json"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one run.

    Attributes:
        iteration_s: Mean seconds of an iteration.
        source: Where that comes from.
    """

    iteration_s: float
    source: str


def clear_reports(directory: Path, folder: Path, name: str) -> None:
    """Remove what an earlier run has left, so that it cannot be taken for this one's report."""
    for path in (directory / SPEED_FILE, folder / f"PERF_{name}.txt", *_perf_files(directory)):
        path.unlink(missing_ok=True)


def read_speed(directory: Path, folder: Path, name: str) -> Speed | None:
    """Return what a run has reported: by our own helper, or as Synergy's ``Register`` does.

    A script that brings Synergy's own ``Register`` writes to its working directory; that file is
    moved to the run's.

    Args:
        directory: Of the run.
        folder: Working directory of the script.
        name: Of the job as it was told to the script.

    Raises:
        WorkerError: The report is not a time.
    """
    own = directory / SPEED_FILE
    if own.is_file():
        return _speed(own, lambda text: json.loads(text)["iteration_s"], "reported by the script")
    beside = folder / f"PERF_{name}.txt"
    if beside.is_file():
        with suppress(OSError):
            (directory / beside.name).write_bytes(beside.read_bytes())
            beside.unlink()
    for path in _perf_files(directory):
        return _speed(path, lambda text: text.splitlines()[0], "reported through Register")
    return None


def _perf_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("PERF_*.txt"))


def _speed(path: Path, value_of: Callable[[str], object], source: str) -> Speed:
    try:
        seconds = float(str(value_of(path.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise WorkerError(f"{path} holds no seconds of an iteration") from exc
    if not (seconds > 0 and math.isfinite(seconds)):
        raise WorkerError(f"{path} says {seconds:g} seconds an iteration; expected more than 0")
    return Speed(seconds, source)


def speed_of_two(long: tuple[int, float], short: tuple[int, float], what: str) -> Speed:
    """Return the speed from the wall times of two runs with different numbers of iterations.

    What a start costs is the same in both, so the difference is that of the iterations.

    Raises:
        WorkerError: The longer run was not slower.
    """
    (more, longer_s), (fewer, shorter_s) = long, short
    seconds = (longer_s - shorter_s) / (more - fewer)
    if seconds <= 0:
        raise WorkerError(
            f"{what}: {more} iterations took {longer_s:.2f} s and {fewer} took {shorter_s:.2f} s, "
            "so a start hides the iterations; raise --max-iterations, or report the speed"
        )
    return Speed(seconds, f"wall time of {more} less that of {fewer} iterations")
