"""Checkpoints listed, verified and written in other forms: what ``partita checkpoint`` does."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from partita.core.plan import Plan
from partita.core.solution import Solution
from partita.documents import load, read_bytes
from partita.errors import FormatError, InvalidInputError, reason_of
from partita.flows.extras import torch_needed
from partita.flows.results import Result
from partita.flows.summary import describe_plan
from partita.requests import OnProgress, Request, declare, make, silent
from partita.runtime.checkpoint.files import (
    MANIFEST,
    PLAN,
    Manifest,
    damage_of,
    newest_in,
    read_manifest,
)
from partita.runtime.checkpoint.files import list_checkpoints as checkpoints_in
from partita.units import format_bytes

_PLAN_PREFIX = "plan:"
_FORMS = ("safetensors", "hf")


@dataclass(frozen=True, kw_only=True)
class CheckpointsRequest(Request):
    """A folder of checkpoints, or one of them."""

    folder: str = declare(
        "", is_argument=True, metavar="DIR", help="Folder of checkpoints, or a checkpoint."
    )
    verify: bool = declare(False, help="Read all bytes and compare their digests.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConvertRequest(Request):
    """A checkpoint, and the form to write it in."""

    folder: str = declare(
        "", is_argument=True, metavar="DIR", help="Checkpoint, or a folder: its newest."
    )
    to: str = declare(
        "safetensors",
        metavar="safetensors|hf|plan:PLAN",
        help="Form to write: the weights as safetensors, a directory for Hugging Face, or a "
        "checkpoint laid out for the ranks of a plan.",
    )
    output: str = declare(
        "", flags=("-o",), is_required=True, help="Directory to write; it must not be there."
    )
    shard_size: float = declare(5.0, above=0, help="Largest size of a file of weights, in GB.")
    model_config: str | None = declare(
        None, help="File config.json of the model, copied into a directory for Hugging Face."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint of a folder.

    Attributes:
        path: Its directory.
        manifest: What it says of itself; None = that cannot be read.
        plan: Its plan in words; empty = not known.
        damage: What is wrong with it; empty = nothing that was looked at.
        is_verified: Whether all of its bytes were read.
    """

    path: Path
    manifest: Manifest | None
    plan: str
    damage: str
    is_verified: bool

    @property
    def state(self) -> str:
        """Whether it is whole, in a word or two."""
        if self.damage:
            return f"damaged: {self.damage}"
        return "verified" if self.is_verified else "sizes match"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found = self.manifest
        return {
            "path": str(self.path),
            "step": None if found is None else found.step,
            "model": None if found is None else found.model,
            "plan": self.plan or None,
            "bytes": None if found is None else found.num_bytes,
            "saved": None if found is None else _date(found).isoformat(),
            "verified": self.is_verified and not self.damage,
            "damage": self.damage or None,
        }


def _date(manifest: Manifest) -> datetime:
    return datetime.fromtimestamp(manifest.saved_s, tz=UTC)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CheckpointList(Result):
    """The checkpoints of a folder, oldest first.

    Attributes:
        folder: The folder, or the one checkpoint that was named.
        checkpoints: The checkpoints.
    """

    folder: str
    checkpoints: tuple[CheckpointRow, ...]

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return a value for each checkpoint."""
        return [row.to_json() for row in self.checkpoints]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each checkpoint."""
        return [
            {
                "checkpoint": row.path.name,
                "step": "-" if row.manifest is None else str(row.manifest.step),
                "plan": row.plan or "-",
                "size": "-" if row.manifest is None else format_bytes(row.manifest.num_bytes),
                "saved": "-" if row.manifest is None else f"{_date(row.manifest):%Y-%m-%d %H:%M}",
                "state": row.state,
            }
            for row in self.checkpoints
        ]

    def lines(self) -> list[str]:
        """Return how many there are, and how many of them are damaged."""
        if not self.checkpoints:
            return [f"no checkpoints in {self.folder}"]
        damaged = sum(bool(row.damage) for row in self.checkpoints)
        return [f"{len(self.checkpoints)} checkpoints in {self.folder}, {damaged} damaged"]

    def require_whole(self) -> None:
        """Check that no checkpoint is damaged.

        Raises:
            FormatError: One is; names the first, and what is wrong with it.
        """
        for row in self.checkpoints:
            if row.damage:
                raise FormatError(row.damage, path=str(row.path))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CheckpointConversion(Result):
    """A checkpoint that was written in another form.

    Attributes:
        source: The checkpoint.
        form: The form.
        written: The directory.
        files: Names of its files.
        remarks: What is missing from it, a sentence each.
    """

    source: str
    form: str
    written: str
    files: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "source": self.source,
            "form": self.form,
            "written": self.written,
            "files": list(self.files),
            "remarks": list(self.remarks),
        }

    def lines(self) -> list[str]:
        """Return what was written where, and what is missing."""
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return [f"{self.source} written as {self.form} to {self.written}: {count}", *self.remarks]


def list_checkpoints(
    folder: str,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of the request)
) -> CheckpointList:
    """List the checkpoints of a folder, and whether they are whole.

    Args:
        folder: The folder, or one checkpoint.
        on_progress: Called with each checkpoint that is read.
        **options: The fields of :class:`CheckpointsRequest`: the options of
            ``partita checkpoint ls``.

    Raises:
        InvalidInputError: There is no such folder.
    """
    return checkpoints_request(make(CheckpointsRequest, folder=folder, **options), on_progress)


def checkpoints_request(
    request: CheckpointsRequest, on_progress: OnProgress = silent
) -> CheckpointList:
    """List what a request asks for; see :func:`list_checkpoints`."""
    folder = Path(request.folder)
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder of checkpoints")
    paths = [folder] if (folder / MANIFEST).exists() else checkpoints_in(folder)
    rows = []
    for path in paths:
        if request.verify:
            on_progress(f"reading {path.name}")
        rows.append(_row(path, verify=request.verify))
    return CheckpointList(folder=request.folder, checkpoints=tuple(rows))


def _row(path: Path, *, verify: bool) -> CheckpointRow:
    try:
        manifest = read_manifest(path)
    except FormatError as exc:
        return CheckpointRow(
            path=path,
            manifest=None,
            plan="",
            damage=f"{MANIFEST} {exc.reason}",
            is_verified=verify,
        )
    damage = damage_of(path, manifest) if verify else _wrong_size(path, manifest)
    return CheckpointRow(
        path=path, manifest=manifest, plan=_plan_words(path), damage=damage, is_verified=verify
    )


def _wrong_size(path: Path, manifest: Manifest) -> str:
    for name, file in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as exc:
            return f"{name} cannot be read: {reason_of(exc)}"
        if size != file.bytes:
            return f"{name} has {size} bytes; expected {file.bytes}"
    return ""


def _plan_words(path: Path) -> str:
    try:
        found = load(path / PLAN)
    except InvalidInputError:
        return ""
    return describe_plan(found) if isinstance(found, Plan) else ""


def convert_checkpoint(
    folder: str,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of the request)
) -> CheckpointConversion:
    """Write a checkpoint in another form, tensor by tensor.

    Args:
        folder: A checkpoint, or a folder of them, of which the newest is taken.
        on_progress: Called with each tensor.
        **options: The fields of :class:`CheckpointConvertRequest`: the options of
            ``partita checkpoint convert``.

    Raises:
        FormatError: The checkpoint is damaged.
        InvalidInputError: There is none, or the directory to write is there already.
    """
    request = make(CheckpointConvertRequest, folder=folder, **options)
    return checkpoint_convert_request(request, on_progress)


def checkpoint_convert_request(
    request: CheckpointConvertRequest, on_progress: OnProgress = silent
) -> CheckpointConversion:
    """Write what a request asks for; see :func:`convert_checkpoint`."""
    for_plan = request.to.startswith(_PLAN_PREFIX)
    if not for_plan and request.to not in _FORMS:
        raise InvalidInputError(
            f"there is no form {request.to!r}; expected {', '.join(_FORMS)} or plan:PLAN"
        )
    if request.model_config is not None and request.to != "hf":
        raise InvalidInputError("--model-config is for --to hf")
    if not request.output:
        raise InvalidInputError("name the directory to write with -o")
    path = newest_in(Path(request.folder))
    if path is None:
        raise InvalidInputError(f"{request.folder} is no checkpoint, and no folder that has one")
    solution = _solution(request.to.removeprefix(_PLAN_PREFIX)) if for_plan else None
    config = b"" if request.model_config is None else read_bytes(request.model_config)
    with torch_needed("a checkpoint needs"):
        from partita.runtime.checkpoint.convert import (  # noqa: PLC0415 (torch)
            check_whole,
            write_for_plan,
            write_safetensors,
        )
    on_progress(f"reading {path.name}")
    check_whole(path)

    def note(name: str, number: int, count: int) -> None:
        on_progress(f"{number}/{count} {name}")

    output, remarks = Path(request.output), []
    if solution is not None:
        made = write_for_plan(path, output, solution.problem, solution.plan, on_tensor=note)
        files, written = tuple(sorted(file.name for file in made.iterdir())), str(made)
    else:
        found = write_safetensors(
            path,
            output,
            shard_bytes=round(request.shard_size * 1e9),
            config=config,
            on_tensor=note,
        )
        files, written = tuple(found), request.output
        if request.to == "hf" and not config:
            remarks.append("config.json is not known: name it by --model-config, or copy it there")
    return CheckpointConversion(
        source=str(path), form=request.to, written=written, files=files, remarks=tuple(remarks)
    )


def _solution(path: str) -> Solution:
    found = load(path)
    if not isinstance(found, Solution):
        raise InvalidInputError(f"{path} holds no plan with its problem; 'partita plan' writes one")
    return found
