"""What a profile has measured so far, kept in a file so that it goes on where it stopped."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partita.atomic_files import write_atomically
from partita.core.codec import decode_part, encode_part, parse_json
from partita.errors import FormatError

RECORD_FILE = "runs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run that ended well.

    Attributes:
        cpus: CPUs that it had.
        workers: Loading processes of each rank.
        iterations: Number of iterations that it was given.
        iteration_s: Mean seconds of an iteration.
        source: Where that comes from.
        wall_s: How long the run took.
        peak_bytes: Most memory of its processes, as sampled, or counted for one rank.
    """

    cpus: float
    workers: int
    iterations: int
    iteration_s: float
    source: str
    wall_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a job so far.

    Attributes:
        fingerprint: Of the script and all that makes its figures comparable.
        command: The script and its arguments, for people.
        spellings: How the script spells the contract; empty = not checked yet.
        runs: Runs that ended well, in their order.
        storage_bytes_per_s: Bandwidth of the storage; 0 = not measured yet.
        storage_way: How it was measured.
        memory_cpus: CPU counts at which the throughput of memory was measured.
        memory_bytes_per_s: That throughput.
        is_done: Whether nothing is left to measure.
    """

    fingerprint: str
    command: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    storage_bytes_per_s: float = 0.0
    storage_way: str = ""
    memory_cpus: tuple[float, ...] = ()
    memory_bytes_per_s: tuple[float, ...] = ()
    is_done: bool = False


def fingerprint(script: Path, parts: Sequence[object]) -> str:
    """Return what distinguishes profiles: the text of a script, and what was asked of it."""
    text = json.dumps([str(part) for part in parts])
    return hashlib.sha256(script.read_bytes() + b"\0" + text.encode()).hexdigest()[:32]


class RecordFile:
    """A record and the file that it is kept in.

    Attributes:
        record: What is known.
    """

    def __init__(self, directory: Path, record: Record) -> None:
        self._path = directory / RECORD_FILE
        self.record = record

    def update(self, **changes: object) -> None:
        """Change the record, and write it whole or not at all."""
        self.record = dataclasses.replace(self.record, **changes)  # type: ignore[arg-type]
        write_atomically(self._path, json.dumps(encode_part(self.record), indent=1))


def read_record(directory: Path) -> Record | None:
    """Return the record in a directory; None where there is none.

    Raises:
        FormatError: It cannot be read.
    """
    path = directory / RECORD_FILE
    try:
        return decode_part(parse_json(path.read_text(encoding="utf-8")), Record, "runs")
    except FileNotFoundError:
        return None
    except FormatError as exc:
        raise exc.at(str(path)) from exc


def open_record(parent: Path, name: str, mark: str, *, again: bool) -> tuple[Path, RecordFile]:
    """Return the directory of a job and its record: that of an equal request, or a new one.

    An unequal one keeps its directory; the new one is numbered.
    """
    for number in range(1, 10_000):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        if not directory.exists():
            directory.mkdir(parents=True)
            return directory, RecordFile(directory, Record(fingerprint=mark))
        record = read_record(directory)
        if record is not None and record.fingerprint == mark:
            fresh = Record(fingerprint=mark)
            return directory, RecordFile(directory, fresh if again else record)
        if record is None and not any(directory.iterdir()):
            return directory, RecordFile(directory, Record(fingerprint=mark))
    raise FormatError(f"{parent / name} and 9998 numbered ones exist; name another job")
