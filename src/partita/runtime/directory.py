"""Run directories: one for each run, with a readable name, never overwritten."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from partita.documents import write_text
from partita.errors import FormatError, InvalidInputError, reason_of

RESULTS = "results.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run that left its results.

    Attributes:
        path: Its directory.
        results: What ``results.json`` says.
    """

    path: Path
    results: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def differs(self) -> bool | None:
        """Whether it differs from what it was compared with; None = it was not compared."""
        check = self.results.get("check")
        if not check:
            return None
        return not check.get("equal") or (check.get("module") or {}).get("equal") is False


def make_run_directory(root: Path, *words: str, now: datetime | None = None) -> Path:
    """Make a new directory: date, words, number.

    Args:
        root: Where runs are kept; made if it is not there.
        words: What it is about, such as the model and the devices.
        now: The time; now if not given.
    """
    day = (now or datetime.now().astimezone()).strftime("%Y-%m-%d")
    base = "_".join([day, *(_UNSAFE.sub("-", word).strip("-") for word in words if word)])
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MOST):
            path = root / f"{base}_{number:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as exc:
        raise InvalidInputError(f"{root}: no run directory can be made: {reason_of(exc)}") from exc
    raise InvalidInputError(f"{root} holds {_MOST} runs named {base}; move some away")


def write_results(directory: Path, results: Mapping[str, Any]) -> Path:
    """Write what a run has to say."""
    path = directory / RESULTS
    write_text(path, json.dumps(results, indent=2) + "\n")
    return path


def has_results(directory: Path) -> bool:
    """Return whether a run has left its results."""
    return (directory / RESULTS).exists()


def past_runs(root: Path) -> Iterator[PastRun]:
    """Yield the runs under a directory that left results, oldest first."""
    if not root.is_dir():
        why = "is no directory of runs" if root.exists() else "holds no runs: it is not there yet"
        raise InvalidInputError(
            f"{root} {why}; 'partita train MODEL' and 'partita run PLAN' make runs, --runs names "
            "another directory"
        )
    for path in sorted(root.glob(f"*/{RESULTS}"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        yield read_run(path.parent)


def read_run(directory: Path) -> PastRun:
    """Return a run by its directory.

    Raises:
        FormatError: Its results cannot be read.
    """
    path = directory / RESULTS
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise FormatError(f"no results: {reason_of(exc)}", path=str(path)) from exc
    except ValueError as exc:
        raise FormatError(f"not JSON: {exc}", path=str(path)) from exc
    if not isinstance(results, dict):
        raise FormatError("expected a JSON object", path=str(path))
    return PastRun(path=directory, results=results)
