"""Checkpoints of a run: every rank writes what it alone owns, and any plan reads what it needs.

Tensors go through torch.distributed.checkpoint under their names in the model (``model.<name>``,
``optim.<name>.<entry>``) as boxes of the whole tensor: a whole tensor is one box, a part several
(``Part.boxes``). What replicas hold alike is written once. So a checkpoint knows nothing of the
plan that wrote it, and other plans, other numbers of devices and a single process read it.

A save copies the tensors and goes on; a thread writes the copies and agrees with the threads of the
other ranks in a group of its own. What can go wrong with a disk costs that checkpoint and a line of
warning, not the run. How a checkpoint becomes one that counts is the business of ``files``.
"""

import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_boxes
from torch.distributed.checkpoint.state_dict_saver import save as save_boxes

from partita.atomic_files import write_atomically
from partita.core.codec import write_json
from partita.core.plan import Plan
from partita.errors import FormatError, InvalidInputError, WorkerError
from partita.ranks.failures import PeerError, first_line, speaks_of_peer
from partita.ranks.member import Member
from partita.runtime.checkpoint.files import (
    MANIFEST,
    PLAN,
    FileDigest,
    commit,
    damage_of,
    delete_leftovers,
    digest_of,
    free_bytes,
    keep_newest,
    list_checkpoints,
    make_manifest,
    read_manifest,
    temporary_path,
)
from partita.runtime.parts import Box, Part
from partita.units import format_bytes

logger = logging.getLogger(__name__)

Holding: TypeAlias = Tensor | Part
"""A tensor, or what a rank holds of one."""
Warn: TypeAlias = Callable[[str], None]
"""Called with a line that its user should see."""

_METADATA = ".metadata"
_SHOWN = 3


def boxes_of(held: Holding) -> Iterator[Box]:
    """Yield offsets, lengths and values of what is held, as boxes of the whole tensor."""
    if isinstance(held, Tensor):
        value = held.detach()
        yield (0,) * value.dim(), tuple(value.shape), value
    else:
        yield from held.boxes()


def open_checkpoints(
    member: Member, folder: Path, *, keep: int = 2, warn: Warn = logger.warning, model: str = ""
) -> "Checkpoints":
    """Return the checkpoints of a run with several ranks; all of them call it."""
    # On CPUs also where ranks compute on GPUs, and used by nobody else: the thread that writes
    # must not come between the messages of a step.
    group = None
    if member.world > 1:
        group = member.group_of(range(member.world), "checkpoints", backend="gloo")
    return Checkpoints(folder, keep=keep, group=group, warn=warn, model=model)


class Checkpoints:
    """The checkpoints of a run, in a folder that all of its ranks see."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        group: Any = None,  # noqa: ANN401 (torch's)
        warn: Warn = logger.warning,
        model: str = "",
    ) -> None:
        """Delete what an earlier run left half-written; all ranks of the group call it.

        Args:
            folder: Where they are; made with the first one.
            keep: Number of checkpoints that stay.
            group: A process group of all ranks over gloo that nobody else uses; None = this process
                is alone.
            warn: Called, on the first rank, with what its user should know.
            model: Name of the model's graph.
        """
        if keep < 1:
            raise InvalidInputError(f"keep is {keep}; expected 1 or more checkpoints")
        self.folder, self._keep, self._group = folder, keep, group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world = 1 if group is None else dist.get_world_size(group)
        self._warn, self._model = warn, model
        # Copies of what was saved last: their memory is used again.
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._verified: set[Path] = set()
        self.saved: Path | None = None
        if self._rank == 0:
            delete_leftovers(folder)

    def save(
        self,
        step: int,
        holdings: Mapping[str, Holding],
        extra: Mapping[str, Any],
        plan: Plan | None = None,
    ) -> None:
        """Write a checkpoint beside what comes next; all ranks call it after the same step.

        What is held may change as soon as this returns. A save that is still being written is
        waited for first.

        Args:
            step: Steps that are done: the step that a run goes on with.
            holdings: What this rank holds, by names that are the same under every plan.
            extra: Small values of JSON; of each the first rank's that is not empty counts.
            plan: The plan of the run.
        """
        self.wait()
        _expect_one_process()
        boxes = {name: list(self._copied(name, held)) for name, held in holdings.items()}
        shapes = {name: tuple(held.shape) for name, held in holdings.items()}
        self._thread = threading.Thread(
            target=self._write,
            args=(step, BoxPlanner(boxes, shapes), dict(extra), plan),
            daemon=True,
            name="checkpoint",
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save that was begun last is written, or has failed.

        Raises:
            WorkerError: Ranks do not hold all of a tensor, or one has gone away.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kind = PeerError if speaks_of_peer(error) else WorkerError
            raise kind(f"the checkpoint was not written: {first_line(error)}") from error

    def _copied(self, name: str, held: Holding) -> Iterator[Box]:
        for offsets, lengths, values in boxes_of(held):
            copy = self._copies.get((name, offsets))
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype)
                self._copies[name, offsets] = copy
            copy.copy_(values)
            yield offsets, lengths, copy

    def _write(
        self, step: int, planner: "BoxPlanner", extra: dict[str, Any], plan: Plan | None
    ) -> None:
        try:
            self._write_all(step, planner, extra, plan)
        except BaseException as exc:  # noqa: BLE001 (the end of a thread: ``wait`` raises it)
            self._error = exc

    def _write_all(
        self, step: int, planner: "BoxPlanner", extra: dict[str, Any], plan: Plan | None
    ) -> None:
        """Write, digest and commit; what goes wrong with the disk is reported, all else raised."""
        temporary: Path = self._from_first(lambda: temporary_path(self.folder, step))
        failure = ""
        files: dict[str, FileDigest] = {}
        try:
            save_boxes(
                {},
                storage_writer=FileSystemWriter(temporary, overwrite=False),
                planner=planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
            files = self._digests(temporary, plan)
        except CheckpointException as exc:
            failure = _disk_failure(exc)
        except OSError as exc:
            failure = first_line(exc)
        results = self._from_all((failure, files, extra))
        failure = next((text for text, _, _ in results if text), "")
        written = {name: digest for _, part, _ in results for name, digest in part.items()}
        # Of a rank that trains nothing the schedule, say, is empty.
        small = {
            key: value
            for *_, part in reversed(results)
            for key, value in part.items()
            if value not in ({}, None)
        }
        done = self._from_first(
            lambda: self._commit(temporary, step, written, {**extra, **small}, failure)
        )
        self.saved = done

    def _digests(self, temporary: Path, plan: Plan | None) -> dict[str, FileDigest]:
        """Return the digests of the files that this rank has written."""
        paths = list(temporary.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            paths.append(temporary / _METADATA)
            if plan is not None:
                write_atomically(temporary / PLAN, write_json(plan), to_disk=True)
                paths.append(temporary / PLAN)
        return {path.name: digest_of(path) for path in paths}

    def _commit(
        self,
        temporary: Path,
        step: int,
        files: Mapping[str, FileDigest],
        extra: Mapping[str, Any],
        failure: str,
    ) -> Path | None:
        """Make the checkpoint count, on the first rank; None if it was not written."""
        if not failure:
            unseen = [name for name in sorted(files) if not (temporary / name).exists()]
            if unseen:
                failure = f"{unseen[0]} is not there: checkpoints need a folder that all hosts see"
        if not failure:
            try:
                manifest = make_manifest(self.folder, step, self._model, files, extra)
                done = commit(temporary, manifest)
                keep_newest(self.folder, self._keep)
            except OSError as exc:
                failure = first_line(exc)
            else:
                return done
        # torch's words for a full disk do not say so: how much was left does.
        free = free_bytes(self.folder)
        delete_leftovers(self.folder)
        self._warn(
            f"the checkpoint of step {step} was not written, training goes on: "
            f"{format_bytes(free)} were free in {self.folder}: {failure}"
        )
        return None

    def newest(self, folder: Path | None = None) -> Path | None:
        """Return the newest checkpoint that is whole, None if there are none; all ranks call it.

        All bytes are read, each file by one rank. What is passed over is reported.

        Args:
            folder: Another folder than that of the run.

        Raises:
            InvalidInputError: There are some, and none is whole.
        """
        where = self.folder if folder is None else folder
        paths: list[Path] = self._from_first(lambda: list_checkpoints(where)[::-1])
        for path in paths:
            damage = self._damage(path)
            if not damage:
                return path
            self._tell(f"{path}: {damage}; the checkpoint before it is taken")
        if paths:
            # A run that began anew without a word would be taken for one that went on.
            raise InvalidInputError(
                f"no checkpoint of {where} is whole ({len(paths)} damaged); delete them to begin "
                "at the beginning"
            )
        return None

    def named(self, path: Path) -> Path:
        """Return a checkpoint, or the newest that is whole of a folder of them; all ranks call it.

        Raises:
            InvalidInputError: It is neither.
        """
        if self._from_first((path / MANIFEST).exists):
            return path
        found = self.newest(path)
        if found is None:
            raise InvalidInputError(f"{path} is no checkpoint, and no folder that has one")
        return found

    def _damage(self, path: Path) -> str:
        """Return what is wrong with a checkpoint; all ranks call it, each reads some files."""
        damage = ""
        try:
            manifest = read_manifest(path)
            damage = damage_of(path, manifest, sorted(manifest.files)[self._rank :: self._world])
        except FormatError as exc:
            damage = exc.reason
        found = next((text for text in self._from_all(damage) if text), "")
        if not found:
            self._verified.add(path.resolve())
        return found

    def load(self, path: Path, holdings: Mapping[str, Holding]) -> dict[str, Any]:
        """Fill what is held, in place, and return the small values; all ranks call it.

        Args:
            path: A checkpoint.
            holdings: What this rank holds, by name.

        Raises:
            FormatError: The checkpoint is damaged.
            InvalidInputError: It has no such tensor, or one of another shape.
        """
        if path.resolve() not in self._verified and (damage := self._damage(path)):
            raise FormatError(damage, path=str(path))
        load_tensors(path, holdings)
        return dict(read_manifest(path).extra)

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._warn(text)

    def _from_all(self, value: Any) -> list[Any]:  # noqa: ANN401 (any small value)
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _from_first(self, make: Callable[[], Any]) -> Any:  # noqa: ANN401 (any small value)
        """Return what the first rank makes."""
        if self._group is None:
            return make()
        values = [make() if self._rank == 0 else None]
        dist.broadcast_object_list(values, group_src=0, group=self._group)
        return values[0]


def _disk_failure(error: CheckpointException) -> str:
    """Return why the disk did not take a checkpoint.

    Raises:
        CheckpointException: That is not why.
    """
    for _, (exc, _) in sorted(error.failures.items()):
        # torch's writer wraps what the system says in a RuntimeError of its own.
        if isinstance(exc, OSError | RuntimeError):
            found: BaseException = exc
            while not isinstance(found, OSError) and (found.__cause__ or found.__context__):
                found = found.__cause__ or found.__context__  # type: ignore[assignment]
            return first_line(found)
    raise error


class BoxPlanner(DefaultSavePlanner):
    """Writes boxes of tensors, each once."""

    def __init__(
        self, boxes: Mapping[str, Sequence[Box]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes, self._shapes = boxes, shapes
        self._values = {
            (name, offsets): values for name, found in boxes.items() for offsets, _, values in found
        }

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write."""
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=box(offsets, lengths),
                        properties=TensorProperties.create_from_tensor(values),
                        size=torch.Size(self._shapes[name]),
                    ),
                )
                for name, found in self._boxes.items()
                for offsets, lengths, values in found
            ]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what every rank writes; names stand as they are, for readers of torch's."""
        plans, metadata = super().create_global_plan(without_overlaps(all_plans))
        names = {name: (name,) for name in metadata.state_dict_metadata}
        self.metadata = replace(metadata, planner_data=names)
        return plans, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values of a box."""
        assert index.offset is not None
        return self._values[index.fqn, tuple(index.offset)]


def without_overlaps(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans without boxes that lie in others.

    Ranks may divide the same tensor differently (a tied weight is whole in one stage and divided in
    another). The largest boxes stay; equal ones are torch's to distribute.
    """
    found: dict[str, dict[MetadataIndex, ChunkStorageMetadata]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for plan in plans:
        for item in plan.items:
            assert item.tensor_data is not None
            held = found[item.index.fqn].get(item.index)
            chunk = item.tensor_data.chunk
            if held is None or prod(chunk.sizes) > prod(held.sizes):
                found[item.index.fqn][item.index] = chunk
            sizes[item.index.fqn] = prod(item.tensor_data.size)
    kept: dict[str, set[tuple[torch.Size, torch.Size]]] = {}
    for name, chunks in found.items():
        if sum(prod(chunk.sizes) for chunk in chunks.values()) > sizes[name]:
            taken: list[ChunkStorageMetadata] = []
            for chunk in sorted(chunks.values(), key=lambda c: (-prod(c.sizes), c.offsets)):
                if not any(_overlap(chunk, other) for other in taken):
                    taken.append(chunk)
            kept[name] = {(chunk.offsets, chunk.sizes) for chunk in taken}
    if not kept:
        return plans
    return [
        replace(plan, items=[item for item in plan.items if _stays(item, kept)]) for plan in plans
    ]


def _stays(item: WriteItem, kept: Mapping[str, set[tuple[torch.Size, torch.Size]]]) -> bool:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return item.index.fqn not in kept or (chunk.offsets, chunk.sizes) in kept[item.index.fqn]


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + length_b and b < a + length_a
        for a, length_a, b, length_b in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def box(offsets: Sequence[int], lengths: Sequence[int]) -> ChunkStorageMetadata:
    """Return a box of a tensor as torch.distributed.checkpoint has it."""
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(lengths))


class _LoadPlanner(DefaultLoadPlanner):
    """Fills boxes of tensors from whatever boxes there are."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = boxes
        self._values = {
            (name, offsets): values for name, found in boxes.items() for offsets, _, values in found
        }

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, found in self._boxes.items():
            described = self.metadata.state_dict_metadata[name]
            assert isinstance(described, TensorStorageMetadata)
            chunks = [box(offsets, lengths) for offsets, lengths, _ in found]
            items += create_read_items_for_chunk_list(name, described, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the values of a box."""
        assert index.offset is not None
        return self._values[index.fqn, tuple(index.offset)]


def tensors_in(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and type of the tensors of a checkpoint that is known to be whole."""
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (described.size, described.properties.dtype)
        for name, described in found.items()
        if isinstance(described, TensorStorageMetadata)
    }


def load_tensors(path: Path, holdings: Mapping[str, Holding]) -> None:
    """Fill tensors, or what is held of them, in place, from a checkpoint that is known to be whole.

    Raises:
        InvalidInputError: The checkpoint has no such tensor, or one of another shape.
    """
    there = tensors_in(path)
    missing = [name for name in holdings if name not in there]
    if missing:
        raise InvalidInputError(
            f"{path} has no {_some(missing)}; it has {_some(sorted(there))}: it is of another model"
        )
    for name, held in holdings.items():
        if there[name][0] != held.shape:
            raise InvalidInputError(
                f"{path} has {name} of shape {list(there[name][0])}; the model's is of shape "
                f"{list(held.shape)}"
            )
    planner = _LoadPlanner({name: list(boxes_of(held)) for name, held in holdings.items()})
    _expect_one_process()
    load_boxes({}, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)


def _expect_one_process() -> None:
    """Let torch not warn of what is meant; in the main thread, as filters belong to all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))
