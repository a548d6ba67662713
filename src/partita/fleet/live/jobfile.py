"""Job files: YAML, read strictly, every error with its line.

    name: resnet50
    command: python train.py --lr 0.1
    gpus: 4 to 8 a100 or 8 v100
    steps: 20000
    sensitivity: resnet50.sensitivity.json
    checkpoint: checkpoints/resnet50

Paths are relative to the file. A text as command is split as a shell would, and no shell runs it.
"""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partita.core.codec import decode_as, parse_json
from partita.core.fleet import MAX_ITERATIONS, Sensitivity, SensitivityOrigin
from partita.errors import FormatError, InvalidInputError, reason_of
from partita.fleet.live.jobspec import (
    DEFAULT_GRACE_S,
    DEFAULT_RETRIES,
    GpuChoice,
    JobSpec,
    Progress,
    plain_sensitivity,
)
from partita.units import parse_bytes, parse_seconds
from partita.yaml_nodes import (
    Items,
    Node,
    Scalar,
    Table,
    at_line,
    parse_yaml,
    read_count,
    read_items,
    read_number,
    read_quantity,
    read_table,
    read_text,
    refuse,
)

AUTO = "auto"
_KEYS = (
    *("name", "command", "folder", "gpus", "cpus", "memory", "steps", "iteration", "progress"),
    *("sensitivity", "checkpoint", "environment", "priority", "tenant", "deadline", "retries"),
    *("grace", "restart"),
)
_CURVE_KEYS = ("iteration", "points", "restart")
_POINT_KEYS = ("cpus", "memory", "speed", "gpus", "type")
_GPUS = re.compile(r"(\d{1,7})(?:\s*(?:to|-)\s*(\d{1,7}))?(?:\s+([A-Za-z][\w.-]*))?")
_GPU_EXAMPLE = "a count, a range and a type, such as '4 to 8 a100 or 8 v100'"
Profiler = Callable[["JobFile"], Sensitivity]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The command of a job file, for whoever profiles it.

    Attributes:
        name: Of the job.
        command: Program and arguments.
        folder: Working directory.
        gpus: The most GPUs of its first choice.
        line: Where ``sensitivity`` stands.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    gpus: int
    line: int


def _no_profiler(job: JobFile) -> Sensitivity:
    raise FormatError("sensitivity is 'auto', and nobody profiles here", line=job.line)


def read_job(text: str, path: Path, *, profile: Profiler = _no_profiler) -> JobSpec:
    """Return the job of a file.

    Args:
        text: The file.
        path: Its name: for errors, and for paths that are relative to it.
        profile: Measures a job whose sensitivity is ``auto``.

    Raises:
        FormatError: It is not such a file; knows the line.
    """
    try:
        return _job(read_table(parse_yaml(text), "the job", _KEYS), path.resolve(), profile)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(str(path))) from exc


def _job(table: Table, path: Path, profile: Profiler) -> JobSpec:
    entries, home = table.entries, path.parent
    for key in ("command", "steps"):
        if key not in entries:
            raise FormatError(f"the key {key} is missing", line=table.line)
    name = _text(table, "name", path.stem)
    command = _command(entries["command"])
    folder = home / _text(table, "folder", ".")
    gpus = read_gpus(entries["gpus"]) if "gpus" in entries else (GpuChoice(least=1, most=1),)
    asked = JobFile(
        name=name,
        command=command,
        folder=folder,
        gpus=gpus[0].most,
        line=table.line_of.get("sensitivity", table.line),
    )
    curve = _sensitivity(table, asked, home, profile)
    checkpoint = _text(table, "checkpoint", "")
    with at_line(table.line):
        return JobSpec(
            name=name,
            command=command,
            folder=folder,
            gpus=gpus,
            steps=read_count(entries["steps"], "steps", low=1, high=MAX_ITERATIONS),
            progress=_progress(entries.get("progress")),
            sensitivity=curve,
            checkpoint=home / checkpoint if checkpoint else None,
            environment=_environment(entries.get("environment")),
            priority=_number(entries.get("priority"), "priority"),
            tenant=_text(table, "tenant", ""),
            deadline_s=_seconds(table, "deadline", math.nan),
            retries=_count(entries.get("retries"), "retries", DEFAULT_RETRIES),
            grace_s=_seconds(table, "grace", DEFAULT_GRACE_S),
        )


def read_gpus(node: Node) -> tuple[GpuChoice, ...]:
    """Return the choices of ``4 to 8 a100 or 8 v100``.

    Raises:
        FormatError: It is of another form.
    """
    text = read_text(node, "gpus")
    found = []
    for part in re.split(r"\s+or\s+|\s*,\s*", text.strip()):
        match = _GPUS.fullmatch(part)
        if match is None:
            refuse(node, "gpus", _GPU_EXAMPLE)
        least, most, kind = match.groups()
        with at_line(node.line):
            found.append(
                GpuChoice(least=int(least), most=int(most or least), type=(kind or "").lower())
            )
    return tuple(found)


def _command(node: Node) -> tuple[str, ...]:
    if isinstance(node, Items):
        return tuple(read_text(part, "a word of command") for part in read_items(node, "command"))
    try:
        words = shlex.split(read_text(node, "command"))
    except ValueError as exc:
        raise FormatError(f"command cannot be split: {exc}".lower(), line=node.line) from exc
    if not words:
        refuse(node, "command", "a program and its arguments")
    return tuple(words)


def _sensitivity(table: Table, asked: JobFile, home: Path, profile: Profiler) -> Sensitivity:
    """Return the curve: measured now, of a file, written out, or made of what the job asks for."""
    node = table.entries.get("sensitivity")
    if node is None:
        return _wanted(table, asked)
    for key in ("cpus", "memory", "iteration", "restart"):
        if key in table.entries:
            raise FormatError(
                f"{key} is part of the sensitivity; leave one of them out", line=table.line_of[key]
            )
    if isinstance(node, Table):
        return _curve(node, asked.name)
    text = read_text(node, "sensitivity")
    with at_line(node.line):
        if text == AUTO:
            return profile(asked)
        return _loaded(home / text)


def _loaded(path: Path) -> Sensitivity:
    try:
        return decode_as(parse_json(path.read_text(encoding="utf-8")), Sensitivity)
    except OSError as exc:
        reason = reason_of(exc)
        raise InvalidInputError(f"sensitivity {path} cannot be read: {reason}") from exc
    except FormatError as exc:
        raise InvalidInputError(f"sensitivity {path}: {exc}") from exc


def _wanted(table: Table, asked: JobFile) -> Sensitivity:
    entries = table.entries
    cpus = _number(entries.get("cpus"), "cpus", asked.gpus, positive=True) / asked.gpus
    memory = _bytes(entries.get("memory")) / asked.gpus
    with at_line(table.line):
        return plain_sensitivity(
            asked.name,
            iteration_s=_seconds(table, "iteration", 1.0),
            cpus=cpus,
            memory_bytes=memory,
            restart_s=_seconds(table, "restart", math.nan),
        )


def _curve(node: Table, name: str) -> Sensitivity:
    """Return a curve that is written out: points of CPUs and memory per GPU with their speed."""
    table = read_table(node, "sensitivity", _CURVE_KEYS)
    for key in ("iteration", "points"):
        if key not in table.entries:
            raise FormatError(f"sensitivity: the key {key} is missing", line=table.line)
    rows = [
        read_table(row, "a point", _POINT_KEYS)
        for row in read_items(table.entries["points"], "points")
    ]
    for row in rows:
        if not {"cpus", "speed"} <= row.entries.keys():
            raise FormatError("a point needs cpus and speed", line=row.line)
    kinds = [_text(row, "type", "").lower() for row in rows]
    types = tuple(dict.fromkeys(kinds)) or ("",)
    with at_line(table.line):
        return Sensitivity(
            name=name,
            origin=SensitivityOrigin.MODELLED,
            iteration_s=_seconds(table, "iteration", 1.0),
            gpu_types=types,
            gpu_type=np.array([types.index(kind) for kind in kinds], dtype=np.int32),
            gpus=np.array([_count(row.entries.get("gpus"), "gpus", 0) for row in rows]),
            cpus=np.array([_number(row.entries["cpus"], "cpus", positive=True) for row in rows]),
            memory_bytes=np.array([_bytes(row.entries.get("memory")) for row in rows]),
            speed=np.array([_number(row.entries["speed"], "speed") for row in rows]),
            measured=np.zeros(len(rows), dtype=np.bool_),
            restart_s=_seconds(table, "restart", math.nan),
        )


def _progress(node: Node | None) -> Progress:
    if node is None:
        return Progress.LEASE
    text = read_text(node, "progress")
    if text not in tuple(Progress):
        refuse(node, "progress", " or ".join(Progress))
    return Progress(text)


def _environment(node: Node | None) -> dict[str, str]:
    if node is None:
        return {}
    found = {}
    for key, value in read_table(node, "environment").entries.items():
        if not isinstance(value, Scalar):
            refuse(value, f"environment.{key}", "a text")
        if not key or "=" in key or "\0" in key + value.text:
            raise FormatError(f"environment: {key!r} is no name of a variable", line=value.line)
        found[key] = value.text
    return found


def _text(table: Table, key: str, default: str) -> str:
    return read_text(table.entries[key], key) if key in table.entries else default


def _seconds(table: Table, key: str, default: float) -> float:
    node = table.entries.get(key)
    return default if node is None else read_quantity(node, key, parse_seconds, limit=1e12)


def _bytes(node: Node | None) -> float:
    return 0.0 if node is None else read_quantity(node, "memory", parse_bytes, limit=1e18)


def _count(node: Node | None, what: str, default: int) -> int:
    return default if node is None else read_count(node, what, low=0, high=1_000_000)


def _number(node: Node | None, what: str, default: float = 0.0, *, positive: bool = False) -> float:
    return default if node is None else read_number(node, what, positive=positive)
