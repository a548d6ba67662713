"""Checkpoints in other forms, tensor by tensor: never more than one tensor is in memory."""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from partita.atomic_files import write_atomically
from partita.core.codec import write_json
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import FormatError, InvalidInputError
from partita.program.layout import owners
from partita.runtime.checkpoint.checkpoint import BoxPlanner, box, load_tensors, tensors_in
from partita.runtime.checkpoint.files import (
    PLAN,
    commit,
    damage_of,
    digest_of,
    make_manifest,
    read_manifest,
    temporary_path,
)
from partita.runtime.safetensors_file import Described, size_of, write_weights

_MODEL = "model."
OnTensor = Callable[[str, int, int], None]
"""Called with the name of each tensor that is written, its number from 1, and of how many."""


def check_whole(path: Path) -> None:
    """Check that a checkpoint is whole; all of it is read.

    Raises:
        FormatError: It is not.
    """
    if damage := damage_of(path, read_manifest(path)):
        raise FormatError(damage, path=str(path))


def write_safetensors(
    path: Path,
    target: Path,
    *,
    shard_bytes: int,
    config: bytes = b"",
    on_tensor: OnTensor = lambda *_: None,
) -> list[str]:
    """Write the weights of a checkpoint as safetensors, in files of a size, with their index.

    The directory is there when all of it is written.

    Args:
        path: A checkpoint that is known to be whole.
        target: The directory to make.
        shard_bytes: Largest size of a file, unless one tensor is larger.
        config: Text of ``config.json``; empty = none is written.
        on_tensor: Called with each tensor that was written.

    Returns:
        The names of the files.

    Raises:
        InvalidInputError: The directory is there.
        UnsupportedError: The format does not know the type of a tensor.
    """
    if target.exists():
        raise InvalidInputError(f"{target} is there already; name another with -o")
    there = {
        name.removeprefix(_MODEL): described
        for name, described in tensors_in(path).items()
        if name.startswith(_MODEL)
    }
    shards = list(_shards(there, shard_bytes))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        written = [_file_name(number, len(shards)) for number in range(len(shards))]
        numbers = {name: number for number, name in enumerate(there, 1)}

        def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for name in names:
                yield name, load_tensor(path, f"{_MODEL}{name}")
                on_tensor(name, numbers[name], len(there))

        for file_name, names in zip(written, shards, strict=True):
            write_weights(part / file_name, {name: there[name] for name in names}, read(names))
        if len(shards) > 1:
            written.append("model.safetensors.index.json")
            (part / written[-1]).write_text(_index(there, shards, written), encoding="utf-8")
        if config:
            written.append("config.json")
            (part / written[-1]).write_bytes(config)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return written


def load_tensor(path: Path, name: str) -> Tensor:
    """Return one tensor of a checkpoint, whole."""
    shape, dtype = tensors_in(path)[name]
    value = torch.empty(shape, dtype=dtype)
    load_tensors(path, {name: value})
    return value


def _shards(there: Mapping[str, Described], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, described in there.items():
        if names and held + size_of(described) > shard_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size_of(described)
    yield names


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _index(
    there: Mapping[str, Described],
    shards: Sequence[Sequence[str]],
    files: Sequence[str],
) -> str:
    total = sum(map(size_of, there.values()))
    home = {name: file for file, names in zip(files, shards, strict=False) for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": home}, indent=2) + "\n"


class _Streamed(BoxPlanner):
    """Writes whole tensors of another checkpoint, each read when its turn comes."""

    def __init__(self, path: Path, on_tensor: Callable[[str], None]) -> None:
        super().__init__({}, {})
        self._path, self._on_tensor = path, on_tensor

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return a tensor."""
        self._on_tensor(index.fqn)
        return load_tensor(self._path, index.fqn)


def write_for_plan(
    path: Path,
    folder: Path,
    problem: Problem,
    plan: Plan,
    *,
    on_tensor: OnTensor = lambda *_: None,
) -> Path:
    """Write a checkpoint again, with a file for each rank of a plan that holds what it needs first.

    A tensor lies in the file of the first rank of the first stage that uses it, so that a rank of
    the plan reads few files. Any plan reads the result, as it reads any other.

    Args:
        path: A checkpoint that is known to be whole.
        folder: The folder to write it to.
        problem: The problem that the plan is for.
        plan: The plan.
        on_tensor: Called with each tensor that was written.

    Raises:
        InvalidInputError: The checkpoint lacks a parameter of the plan's model.
    """
    there, before = tensors_in(path), read_manifest(path)
    rank_of = _ranks_of(problem, plan)
    missing = [name for name in rank_of if f"{_MODEL}{name}" not in there]
    if missing:
        raise InvalidInputError(f"{path} has no {missing[0]}, which the plan's model has")
    ranks = max(rank_of.values(), default=0) + 1
    items: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for name, (shape, dtype) in there.items():
        items[_rank_of(name, rank_of)].append(_item(name, shape, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder, before.step)
    done: list[str] = []

    def note(name: str) -> None:
        done.append(name)
        on_tensor(name, len(done), len(there))

    planner = _Streamed(path, note)
    writer = FileSystemWriter(temporary, overwrite=False)
    try:
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = planner.create_global_plan([SavePlan(found) for found in items])
        plans = writer.prepare_global_plan([writer.prepare_local_plan(each) for each in plans])
        writer.finish(metadata, [writer.write_data(each, planner).value() for each in plans])
        write_atomically(temporary / PLAN, write_json(plan), to_disk=True)
        files = {file.name: digest_of(file) for file in sorted(temporary.iterdir())}
        manifest = make_manifest(folder, before.step, before.model, files, before.extra)
        return commit(temporary, manifest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _ranks_of(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the first rank of the first stage that uses each parameter or buffer."""
    used = sorted({d for stage in plan.stages for group in stage.devices for d in group})
    names, found = problem.graph.parameters.names, dict[str, int]()
    for row, stage in zip(*(c.tolist() for c in owners(problem.graph, plan)), strict=True):
        found.setdefault(names[row], used.index(min(plan.stages[stage].devices[0])))
    return found


def _rank_of(name: str, rank_of: Mapping[str, int]) -> int:
    """Return the rank of a tensor: that of its parameter."""
    kind, _, rest = name.partition(".")
    return rank_of.get(rest if kind == "model" else rest.rpartition(".")[0], 0)


def _item(name: str, shape: torch.Size, dtype: torch.dtype) -> WriteItem:
    offsets = torch.Size([0] * len(shape))
    properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=dtype))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=box(offsets, shape), properties=properties, size=shape),
    )
