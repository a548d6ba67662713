"""Checkpoints as files: which there are, whether each is whole, and how one comes to be.

A folder of checkpoints holds a directory for each, ``step-000120``, and ``latest``, a line with the
name of the newest. A checkpoint holds the tensors as torch.distributed.checkpoint writes them
(``__0_0.distcp`` of each rank, ``.metadata``), ``plan.json``, and ``manifest.json``: the step, the
small values beside the tensors, and bytes and digest of every other file.

A checkpoint is written under a name that ends in ``.tmp``. When all files and digests are on the
disk it is renamed, and only then does ``latest`` name it; so whoever is killed at any instant
leaves the checkpoints of before as they were. Nothing is ever overwritten: a step that is saved
again, by a run that went back, has a number behind its name.
"""

import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.atomic_files import synchronise, write_atomically
from partita.errors import FormatError, InvalidInputError, reason_of, unreadable

MANIFEST = "manifest.json"
PLAN = "plan.json"
LATEST = "latest"
FORMAT = "partita.checkpoint"
VERSION = 1
_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")
_LEFTOVER = re.compile(r"step-\d{6,}.*\.(tmp|old)|\.latest\..*")
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Length of a file and SHA-256 of its bytes."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint but for its tensors.

    Attributes:
        step: Steps that were done before it was written: the step that a run goes on with.
        number: Its place in the order in which the checkpoints of a folder were written.
        saved_s: When it was written, in seconds since 1970.
        model: Name of the model's graph.
        files: All other files.
        extra: Small values: position in the data, random numbers, scheduler, scaler.
    """

    step: int
    number: int
    saved_s: float
    model: str
    files: Mapping[str, FileDigest]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that it names."""
        return sum(file.bytes for file in self.files.values())

    def to_text(self) -> str:
        """Return the text of the file, which holds a digest of itself.

        Raises:
            InvalidInputError: A small value is none of JSON's.
        """
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "number": self.number,
            "saved_s": self.saved_s,
            "model": self.model,
            "files": {
                name: {"bytes": file.bytes, "sha256": file.sha256}
                for name, file in sorted(self.files.items())
            },
            "extra": dict(self.extra),
        }
        try:
            return json.dumps({**body, "sha256": _digest_of_body(body)}, indent=1) + "\n"
        except (TypeError, ValueError) as exc:
            raise InvalidInputError(
                f"a value beside the tensors of a checkpoint cannot be written as JSON: {exc}"
            ) from exc


def _digest_of_body(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        FormatError: It is not there, damaged, or of a newer version.
    """
    file = path / MANIFEST
    try:
        body = json.loads(file.read_bytes())
        digest = body.pop("sha256")
        if digest != _digest_of_body(body):
            raise FormatError("is damaged: its digest is not that of its text", path=str(file))
        if body["format"] != FORMAT or body["version"] > VERSION:
            raise FormatError(
                f"is of format {body['format']!r} version {body['version']}; expected {FORMAT!r} "
                f"version {VERSION}",
                path=str(file),
            )
        return Manifest(
            step=body["step"],
            number=body["number"],
            saved_s=body["saved_s"],
            model=body["model"],
            files={name: FileDigest(**values) for name, values in body["files"].items()},
            extra=body["extra"],
        )
    except OSError as exc:
        raise unreadable(file, exc) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        if isinstance(exc, FormatError):
            raise
        raise FormatError(f"is damaged: {exc}", path=str(file)) from exc


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order in which they were written.

    Those whose manifest cannot be read, of which the place is not known, come last.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        try:
            place = (0, read_manifest(path).number)
        except FormatError:
            place = (1, int(match[1]))
        found.append((place, path.name, path))
    return [path for _, _, path in sorted(found)]


def newest_in(path: Path) -> Path | None:
    """Return a checkpoint, or the newest of a folder of them; None if there is none.

    Manifests alone are read: whether it is whole is for whoever loads it to find out.
    """
    if (path / MANIFEST).exists():
        return path
    return next((found for found in reversed(list_checkpoints(path)) if _is_readable(found)), None)


def newest_step(folder: Path) -> int:
    """Return the step that the newest checkpoint of a folder goes on with; 0 = there is none."""
    found = newest_in(folder)
    return 0 if found is None else read_manifest(found).step


def newest_of_runs(runs: Path, model: str) -> Path | None:
    """Return the checkpoint that was written last in any run directory by a run of a model."""
    found = []
    for folder in runs.glob("*/checkpoints"):
        newest = newest_in(folder)
        if newest is not None:
            manifest = read_manifest(newest)
            if manifest.model == model:
                found.append((manifest.saved_s, newest))
    return max(found)[1] if found else None


def digest_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> FileDigest:
    """Return length and digest of a file.

    Args:
        path: The file.
        on_bytes: Called with each number of bytes that was read.
    """
    digest, count = hashlib.sha256(), 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while taken := file.readinto(buffer):
            digest.update(view[:taken])
            count += taken
            on_bytes(taken)
    return FileDigest(bytes=count, sha256=digest.hexdigest())


def damage_of(
    path: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> str:
    """Return what is wrong with files of a checkpoint, in a few words; empty = nothing.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        names: The files to read; all if not given.
        on_bytes: Called with each number of bytes that was read.
    """
    for name in manifest.files if names is None else names:
        wanted = manifest.files[name]
        try:
            size = (path / name).stat().st_size
            if size != wanted.bytes:
                return f"{name} has {size} bytes; expected {wanted.bytes}"
            if digest_of(path / name, on_bytes) != wanted:
                return f"{name} is damaged: its digest is not that of the manifest"
        except OSError as exc:
            return f"{name} cannot be read: {reason_of(exc)}"
    return ""


def temporary_path(folder: Path, step: int) -> Path:
    """Return where a checkpoint is written before it is whole; nobody else has the name."""
    return folder / f"step-{step:06d}.{secrets.token_hex(4)}.tmp"


def delete_leftovers(folder: Path) -> None:
    """Delete what a run that was killed has left half-written or half-deleted."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                _delete(path)


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or is to be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Make a checkpoint whose other files are written and synchronised one that counts.

    Returns:
        Its path.

    Raises:
        OSError: The disk is full, or something like it.
    """
    folder = temporary.parent
    write_atomically(temporary / MANIFEST, manifest.to_text(), to_disk=True)
    base = f"step-{manifest.step:06d}"
    target, again = folder / base, 1
    while target.exists():
        again += 1
        target = folder / f"{base}-{again}"
    temporary.rename(target)
    synchronise(folder)
    name_latest(folder, target.name)
    return target


def next_number(folder: Path) -> int:
    """Return the number of the next checkpoint of a folder."""
    numbers = [0]
    for path in list_checkpoints(folder):
        try:
            numbers.append(read_manifest(path).number)
        except FormatError:
            continue
    return max(numbers) + 1


def name_latest(folder: Path, name: str) -> None:
    """Let ``latest`` name a checkpoint; whoever reads it finds the old or the new name."""
    write_atomically(folder / LATEST, f"{name}\n", to_disk=True)


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints; damaged manifests go first."""
    paths = list_checkpoints(folder)
    readable = [path for path in paths if _is_readable(path)]
    oldest_first = [*(path for path in paths if path not in readable), *readable]
    for path in oldest_first[: max(0, len(paths) - keep)]:
        gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}.old")
        # One that is half-deleted must not look like one that counts.
        path.rename(gone)
        _delete(gone)


def _is_readable(path: Path) -> bool:
    try:
        read_manifest(path)
    except FormatError:
        return False
    return True


def make_manifest(
    folder: Path, step: int, model: str, files: Mapping[str, FileDigest], extra: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of the next checkpoint of a folder."""
    return Manifest(
        step=step,
        number=next_number(folder),
        saved_s=time.time(),
        model=model,
        files=files,
        extra=extra,
    )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
