"""Files that are there whole or not at all, whoever reads meanwhile and whatever ends the writer.

Imports nothing heavy: jobs of a fleet and ranks use it too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODE = 0o666
"""Permissions of a new file, before the process's mask."""


@contextmanager
def replacing(target: Path, *, mode: int = MODE, to_disk: bool = False) -> Iterator[Path]:
    """Give an empty file beside ``target``, which takes its place when this ends without an error.

    Its name begins with a dot and is new, so that two writers do not meet; a writer that is killed
    leaves it there.

    Args:
        target: The file to be written; its folder must be there.
        mode: Permissions, before the process's mask.
        to_disk: Whether the file and its name are on the disk when this ends, and not only in the
            system's memory.
    """
    part = target.with_name(f".{target.name[:32]}.{os.urandom(4).hex()}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield part
        if to_disk:
            synchronise(part)
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if to_disk:
        synchronise(target.parent)


def write_atomically(
    target: Path, data: bytes | str, *, mode: int = MODE, to_disk: bool = False
) -> None:
    """Put a new file in the place of one that there may be; see `replacing`."""
    with replacing(target, mode=mode, to_disk=to_disk) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def synchronise(path: Path) -> None:
    """Return when a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
