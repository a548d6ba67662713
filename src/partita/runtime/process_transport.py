"""Carries the messages of a Program over torch.distributed: one process a device.

There are no tags: both ends of a pair list their messages in one order, which the checker has
proved, and NCCL knows none. Shapes and types are agreed before the first step (``agree``), as a
receive buffer of another size ends the process without a word. Sent tensors are kept until the send
is done.

NCCL serves the messages of a group one after the other, in both directions, so there each ordered
pair has a group of its own. No GPU was here to try it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.core.graph import DTYPE_BYTES
from partita.core.program import LAST_COMPUTE, Kind, Program
from partita.errors import InvalidInputError
from partita.processes import clock_identity
from partita.ranks.device import GLOO, has_ordered_groups
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase
from partita.runtime.local_sums import (
    MOST_BYTES,
    LocalRanks,
    LocalSum,
    bytes_of_sum,
    same_machine,
)
from partita.runtime.task import Task
from partita.runtime.tensor_parallel import ProcessGroup
from partita.runtime.transport import Meeting, Message, Pending
from partita.runtime.workload import Shape, ShapeOf

# Their names before torch 2.13, which warns of them.
_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What ``torch._utils._flatten_dense_tensors`` calls, which DDP has too: its only name.
_flattened: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors  # noqa: SLF001


MOST_CARRIED = 128
"""Numbers that travel beside the gradients of a bucket for which room is kept: losses, metrics."""


def used_devices(program: Program) -> list[int]:
    """Return the devices that have something to do; their places are their ranks."""
    return [d for d in range(len(program.devices)) if program.ptr[d] < program.ptr[d + 1]]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message under way, with the tensor that it needs until it is done."""

    value: Tensor
    work: Any

    def poll(self) -> Tensor:
        # Blocks; hence a device over processes never yields a Wait.
        self.work.wait()
        return self.value


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A collective under way over flat tensors: one for each type, with the places of its values.

    Attributes:
        num_values: Number of values that were brought.
        flats: For each type what ends it, giving a matrix with a row for each part of the values;
            and for each value of the type its place and its columns.
    """

    num_values: int
    flats: Sequence[tuple[Callable[[], Tensor], Sequence[tuple[int, torch.Size]]]]

    def poll(self) -> Sequence[Tensor]:
        found: list[Any] = [None] * self.num_values
        for finish, places in self.flats:
            rows = finish()
            is_flat = rows.shape[0] == 1
            flat = rows.view(-1) if is_flat else rows
            pieces = flat.split_with_sizes([shape.numel() for _, shape in places], -1)
            for (place, shape), piece in zip(places, pieces, strict=True):
                found[place] = piece.view(shape) if is_flat else piece.reshape(-1)
        return found


class _Met:
    """A meeting at which nothing changes hands."""

    def poll(self) -> Sequence[Tensor]:
        return ()


class ProcessTransport:
    """Carries the messages of one device; all ranks make theirs at the same time.

    Attributes:
        shares_clock: Whether all ranks read one clock.
        tensor_group: The ranks with which this one divides tensors; None = it is alone.
    """

    # A send starts when its receive is posted; two passes ahead, the message travels while the
    # device computes what comes before its reader.
    posted_ahead = 2

    def __init__(
        self,
        task: Task,
        member: Member,
        shape_of: ShapeOf,
        *,
        job: str = "job",
        entered: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        """Agree with the others on what will travel, and open the channels.

        Args:
            task: What is run.
            member: This process.
            shape_of: What travels.
            job: Name of the run in the store; another one for every run of a group.
            entered: Called with what it is at.

        Raises:
            InvalidInputError: Ranks disagree; names the first difference.
            WorkerError: The others did not come.
        """
        self._task, self._member = task, member
        devices = used_devices(task.program)
        self._rank_of = {device: rank for rank, device in enumerate(devices)}
        self._world = len(devices)
        self._device = devices[member.rank]
        self._shape_of = shapes_for(task, self._device, shape_of)
        self._messages = messages_of(task.program, self._device)
        self.shares_clock = True
        self._starts: Mapping[Kind, Callable[[Tensor, Meeting], Callable[[], Tensor]]] = {
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.ALL_GATHER: self._all_gather,
            Kind.REDUCE_SCATTER: self._reduce_scatter,
        }
        entered(Phase.AGREE)
        self._agree(job)
        entered(Phase.OPEN)
        try:
            self._pairs = self._open_pairs()
            self._groups = self._open_groups()
            self.tensor_group = self._open_tensor_group()
            self._local_sums = self._open_local_sums(job)
            self._warm_up()
        except RuntimeError as exc:
            raise PeerError(
                f"rank {member.rank}: the channels to the others could not be opened: "
                f"{first_line(exc)}"
            ) from exc

    def _agree(self, job: str) -> None:
        """Compare with every peer what will travel between the two."""
        member = self._member
        text = statement(self._task, member.rank, self._shape_of)
        mine = json.loads(text)
        try:
            # Say first, then ask: a get blocks until the other rank has said its own.
            member.store.set(agreement_key(job, member.rank), text)
            for rank in range(self._world):
                theirs = json.loads(member.store.get(agreement_key(job, rank)))
                self._compare(mine, theirs, rank)
                self.shares_clock &= bool(mine["clock"]) and mine["clock"] == theirs["clock"]
        except RuntimeError as exc:
            raise PeerError(
                f"rank {member.rank}: not all ranks said what they will send within "
                f"{member.limit_s:g} s: {first_line(exc)}"
            ) from exc

    def _compare(self, mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
        ours = self._member.rank
        for what, value in mine["facts"].items():
            if theirs["facts"][what] != value:
                raise InvalidInputError(
                    f"rank {ours} has {what} {value}, rank {rank} has {theirs['facts'][what]}; all "
                    "ranks need the same"
                )
        names = self._task.graph.tensors.names
        for message in self._messages:
            if rank not in (self._rank_of[message.source], self._rank_of[message.target]):
                continue
            value, other = mine["table"][_key(message)], theirs["table"].get(_key(message))
            if value != other:
                raise InvalidInputError(
                    f"tensor {names[message.tensor]!r} of microbatch {message.microbatch} is "
                    f"{value} on rank {ours} and {other} on rank {rank}; both ends must agree"
                )

    def _open_pairs(self) -> dict[tuple[int, int], Any]:
        """Return a group for each ordered pair of devices, where the backend needs that."""
        if not has_ordered_groups(self._member.backend):
            return {}
        program = self._task.program
        sends = program.kind == Kind.SEND
        # Opening a group waits for both ends; in one order on all ranks no circle can form.
        pairs = sorted(
            set(zip(program.device[sends].tolist(), program.peer[sends].tolist(), strict=True))
        )
        found = {}
        for pair in pairs:
            if self._device in pair:
                source, target = (self._rank_of[device] for device in pair)
                found[pair] = self._member.group_of((source, target), f"{source}>{target}")
        return found

    def _open_tensor_group(self) -> ProcessGroup | None:
        """Return the group with which this device divides tensors; None = it is alone."""
        for stage in self._task.plan.stages:
            for members in stage.devices:
                if self._device in members and len(members) > 1:
                    ranks = [self._rank_of[device] for device in members]
                    order = [sorted(ranks).index(rank) for rank in ranks]
                    group = self._member.group_of(ranks, "tensor")
                    return ProcessGroup(group, order, members.index(self._device))
        return None

    def _open_groups(self) -> dict[tuple[int, ...], Any]:
        """Return the groups that this device has collectives in."""
        program = self._task.program
        found: dict[tuple[int, ...], Any] = {}
        if self._world > 1:
            # A pool may have more ranks than the plan uses.
            whole = self._world == self._member.world
            everyone = dist.group.WORLD if whole else self._member.group_of(range(self._world))
            found[tuple(self._rank_of)] = everyone
        for group in range(len(program.group_ptr) - 1):
            members = tuple(
                program.group_devices[program.group_ptr[group] : program.group_ptr[group + 1]]
                .tolist()
            )  # fmt: skip
            if self._device not in members:
                continue
            # A scatter within some members needs two groups more. In one order on all ranks: no
            # two wait for each other in different groups.
            for part in (members, *self._scatter_groups(group, members)):
                if len(part) > 1 and part not in found:
                    found[part] = self._member.group_of([self._rank_of[device] for device in part])
        return found

    def _open_local_sums(self, job: str) -> dict[tuple[tuple[int, ...], int], LocalSum]:
        """Return what adds up small buckets among ranks of one machine, by members and bucket."""
        member, program = self._member, self._task.program
        if member.device.type != "cpu" or dist.get_backend() != GLOO:
            return {}
        wanted: dict[tuple[int, ...], dict[int, int]] = {}
        if self._world > 1:  # what all agree on has no bucket
            wanted[tuple(self._rank_of)] = {-1: bytes_of_sum([MOST_CARRIED])}
        table = self._task.graph.parameters
        for row in range(int(program.ptr[self._device]), int(program.ptr[self._device + 1])):
            if program.kind[row] != Kind.ALL_REDUCE:
                continue
            bucket, members = int(program.bucket[row]), tuple(program.group_of(row).tolist())
            elements = [
                table.bytes[p] / DTYPE_BYTES[table.dtypes[p]]
                for p in program.parameters_of(bucket).tolist()
            ]
            size = bytes_of_sum([*elements, MOST_CARRIED])
            if len(members) > 1 and size <= MOST_BYTES:
                wanted.setdefault(members, {})[bucket] = size
        found = {}
        # In one order on all ranks: no two wait for each other in different groups.
        for members, sizes in sorted(wanted.items()):
            local = self._local_ranks(members, job)
            if local is not None:
                sums = local.open([sizes[bucket] for bucket in sorted(sizes)])
                pairs = zip(sorted(sizes), sums, strict=True)
                found.update({(members, bucket): total for bucket, total in pairs})
        return found

    def _local_ranks(self, members: tuple[int, ...], job: str) -> LocalRanks | None:
        """Return the connections among members on one machine; None = they are on several."""
        member, ranks = self._member, sorted(self._rank_of[device] for device in members)
        key = ("local sums", tuple(ranks))
        if key not in member.groups:
            name = f"{job}/sums/{ranks}"
            is_local = same_machine(ranks, member.rank, member.store, name)
            member.groups[key] = (
                LocalRanks(ranks, member.rank, member.store, name) if is_local else None
            )
        found: LocalRanks | None = member.groups[key]
        return found

    def _scatter_groups(self, group: int, members: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the groups in which this device scatters, where some members hold a whole."""
        program = self._task.program
        rows = (program.group == group) & (program.kind == Kind.REDUCE_SCATTER)
        for stage in sorted(set(program.stage[rows].tolist())):
            parts = self._task.plan.stages[stage].shard_size()
            yield from scatter_groups(members, parts, self._device)

    def _warm_up(self) -> None:
        """Send a byte each way along every channel: a first message takes longer."""
        # One order of pairs on all ranks and one message at a time: the lowest pair that is left
        # can always go on.
        peers = sorted({(m.source, m.target) for m in self._messages})
        for source, target in peers:
            byte = torch.zeros(1, dtype=torch.uint8, device=self._member.device)
            group = self._pairs.get((source, target))
            if source == self._device:
                dist.isend(byte, self._rank_of[target], group=group).wait()  # type: ignore[union-attr]
            else:
                dist.irecv(byte, self._rank_of[source], group=group).wait()  # type: ignore[union-attr]

    def send(self, message: Message, value: Tensor) -> Pending[Tensor]:
        """Send a tensor.

        Raises:
            InvalidInputError: It has not the shape and type that were agreed.
        """
        shape, dtype = self._shape_of(message.tensor, message.microbatch)
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise InvalidInputError(
                f"the {message} is {_text((tuple(value.shape), value.dtype))}; agreed was "
                f"{_text((shape, dtype))}"
            )
        # The backend reads the memory as it lies. The result holds it, as it must not be freed or
        # used again before the send is done.
        value = value.detach().contiguous()
        group = self._pairs.get((message.source, message.target))
        return _Transfer(value, dist.isend(value, self._rank_of[message.target], group=group))

    def receive(self, message: Message) -> Pending[Tensor]:
        """Post a receive."""
        shape, dtype = self._shape_of(message.tensor, message.microbatch)
        value = self._buffer(shape, dtype)
        group = self._pairs.get((message.source, message.target))
        return _Transfer(value, dist.irecv(value, self._rank_of[message.source], group=group))

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return where a tensor is received."""
        return torch.empty(shape, dtype=dtype, device=self._member.device)

    def meet(self, meeting: Meeting, values: Sequence[Tensor] = ()) -> Pending[Sequence[Tensor]]:
        """Start a collective, one for each type of tensor."""
        if meeting.kind <= LAST_COMPUTE:
            return _Met()  # the calls among the ranks within the compute make them wait
        if meeting.kind is Kind.ALL_REDUCE:
            local = self._local_sums.get((meeting.members, meeting.bucket))
            started = None if local is None else local.start(values)
            if started is not None:
                return started
        # Values come in the order of the bucket on every member, so that types do, too, and the
        # k-th collective of each is the same one.
        by_type: dict[torch.dtype, list[int]] = {}
        for place, value in enumerate(values):
            by_type.setdefault(value.dtype, []).append(place)
        # A scatter gives each of some members a row of what all bring, in equal parts.
        rows = meeting.parts or len(meeting.members)
        rows = rows if meeting.kind is Kind.REDUCE_SCATTER else 1
        flats = []
        for places in by_type.values():
            brought = [values[place] for place in places]
            if rows == 1:
                # One call for all: a stage has many small parameters.
                flat = _flattened(brought).detach().unsqueeze(0)
                shapes = [value.shape for value in brought]
            else:
                flat = torch.cat([value.reshape(rows, -1) for value in brought], 1)
                shapes = [torch.Size((value.numel() // rows,)) for value in brought]
            start = self._starts[meeting.kind]
            flats.append((start(flat, meeting), list(zip(places, shapes, strict=True))))
        return _Bundle(len(values), flats)

    def _all_reduce(self, flat: Tensor, meeting: Meeting) -> Callable[[], Tensor]:
        group = self._groups.get(meeting.members)
        if group is None:  # a group of one has nothing to add up
            return lambda: flat
        work = dist.all_reduce(flat, group=group, async_op=True)
        return lambda: _waited(work, flat)

    def _all_gather(self, flat: Tensor, meeting: Meeting) -> Callable[[], Tensor]:
        group = self._groups.get(meeting.members)
        if group is None:
            return lambda: flat
        result = flat.new_empty(len(meeting.members), flat.numel())
        work = _gather_single(result.view(-1), flat.view(-1), group=group, async_op=True)
        return lambda: _waited(work, result, flat)

    def _reduce_scatter(self, flat: Tensor, meeting: Meeting) -> Callable[[], Tensor]:
        """Start a scatter within this device's group; the sum over groups follows when it ends."""
        within, across = scatter_groups(meeting.members, len(flat), self._device)
        group, work, result = self._groups.get(within), None, flat
        if group is not None and has_ordered_groups(self._member.backend):
            result = torch.empty_like(flat[:1])
            work = _scatter_single(result, flat, group=group, async_op=True)
        elif group is not None:
            # gloo reduces a scatter as a whole and then cuts it; sent part by part, half as much
            # travels, and the parts are added up in the order of the members.
            result = torch.empty_like(flat)
            work = dist.all_to_all_single(result, flat, group=group, async_op=True)

        def finish() -> Tensor:
            found = result if work is None else _waited(work, result, flat)
            found = found if len(found) == 1 else found.sum(0, keepdim=True)
            over = self._groups.get(across)
            if over is not None:
                dist.all_reduce(found, group=over)
            return found

        return finish


def scatter_groups(
    members: tuple[int, ...], parts: int, device: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members among whom a device's scatter divides, and those with its part.

    Members stand in groups of ``parts``, each of which holds a whole.

    >>> scatter_groups((4, 5, 6, 7), 2, 6)
    ((6, 7), (4, 6))
    """
    place = members.index(device)
    first = place - place % parts
    return members[first : first + parts], members[place % parts :: parts]


def _waited(work: Any, value: Tensor, *_: Tensor) -> Tensor:  # noqa: ANN401  # torch's
    """Return what work has made; whoever calls this holds what it needs until then."""
    work.wait()
    return value


def shapes_for(task: Task, device: int, shape_of: ShapeOf) -> ShapeOf:
    """Return the shapes of what a device sends and receives, given those of whole tensors."""
    crossing_split = getattr(task.code, "crossing_split", None)  # hand-written code divides nothing
    if crossing_split is None or not any(s.sequence_parallel for s in task.plan.stages):
        return shape_of

    def shape(tensor: int, microbatch: int) -> Shape:
        whole, dtype = shape_of(tensor, microbatch)
        split = crossing_split(tensor, microbatch)
        if split is None:
            return whole, dtype
        maker = int(task.plan.stage_of[task.graph.tensors.producer[tensor]])
        ends = [task.plan.stages[index] for index in (maker, *task.readers[tensor])]
        # A device has the same place in the groups of both ends.
        group = next(group for stage in ends for group in stage.devices if device in group)
        return split.shape(whole, group.index(device), len(group)), dtype

    return shape


def statement(task: Task, rank: int, shape_of: ShapeOf) -> str:
    """Return what a rank tells the others before the first step."""
    program = task.program
    messages = messages_of(program, used_devices(program)[rank])
    return json.dumps(
        {
            "facts": {
                "torch version": torch.__version__,
                "plan": task.plan.fingerprint,
                "instructions": len(program),
            },
            "clock": clock_identity(),
            "table": {_key(m): _text(shape_of(m.tensor, m.microbatch)) for m in messages},
        }
    )


def agreement_key(job: str, rank: int) -> str:
    """Return under which name a rank's statement is in the store."""
    return f"{job}/agree/{rank}"


def messages_of(program: Program, device: int) -> list[Message]:
    """Return what a device sends and receives, in the order of its list."""
    found = []
    for row in range(int(program.ptr[device]), int(program.ptr[device + 1])):
        if program.kind[row] not in (Kind.SEND, Kind.RECV):
            continue
        ends = [device, int(program.peer[row])]
        source, target = ends if program.kind[row] == Kind.SEND else ends[::-1]
        tensor, microbatch = int(program.tensor[row]), int(program.microbatch[row])
        found.append(Message(source, target, tensor, microbatch, bool(program.gradient[row])))
    return found


def _key(message: Message) -> str:
    return f"{message.tensor}/{message.microbatch}"


def _text(shape: Shape) -> str:
    sizes, dtype = shape
    return f"{list(sizes)} of {str(dtype).removeprefix('torch.')}"
