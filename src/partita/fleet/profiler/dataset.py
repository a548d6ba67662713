"""How large a dataset is, and reading it once so that the system keeps it in memory."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PART_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Dataset:
    """The data of an epoch.

    Attributes:
        size_bytes: Of all files.
        samples: How many samples; counted as files unless the user gives it.
    """

    size_bytes: int
    samples: int


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(root, name) for name in sorted(names))


def training_part(path: Path) -> Path:
    """Return ``path/train`` where it is there, as in ImageNet's layout, else the path itself."""
    return path / "train" if (path / "train").is_dir() else path


def measure_dataset(path: Path) -> Dataset | None:
    """Return the size of a dataset and its number of files; None where there is none."""
    if path.is_file():
        return Dataset(path.stat().st_size, 1)
    sizes = [file.stat().st_size for file in _files(training_part(path)) if file.is_file()]
    return Dataset(sum(sizes), len(sizes)) if sizes else None


def read_into_memory(path: Path, *, limit_s: float) -> int:
    """Read the files of a dataset once and return the bytes read; stops at a limit of time."""
    last_s = time.monotonic() + limit_s
    read = 0
    for file in [path] if path.is_file() else _files(training_part(path)):
        if not file.is_file():
            continue
        with file.open("rb", buffering=0) as stream:
            while part := stream.read(_PART_BYTES):
                read += len(part)
                if time.monotonic() > last_s:
                    return read
    return read
