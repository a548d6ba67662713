"""Carries the messages of a Program over torch.distributed: one process a device.

There are no tags: both ends of a pair list their messages in one order, which the checker has
proved, and NCCL knows none. Shapes and types are agreed before the first step (``agree``), as a
receive buffer of another size ends the process without a word. Sent tensors are kept until the send
is done.

NCCL serves the messages of a group one after the other, in both directions, so there each ordered
pair has a group of its own. No GPU was here to try it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.core.program import Kind, Program
from partita.errors import InvalidInputError, UnsupportedError
from partita.processes import clock_identity
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase
from partita.runtime.task import Task
from partita.runtime.transport import Meeting, Message, Pending
from partita.runtime.workload import Shape, ShapeOf


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
class _Reduction:
    """Sums under way: flat tensors, each for some of the values."""

    shapes: Sequence[torch.Size]
    flats: Sequence[tuple[Tensor, Any, Sequence[int]]]

    def poll(self) -> Sequence[Tensor]:
        found: dict[int, Tensor] = {}
        for flat, work, places in self.flats:
            if work is not None:
                work.wait()
            begin = 0
            for place in places:
                shape = self.shapes[place]
                found[place] = flat[begin : begin + shape.numel()].view(shape)
                begin += shape.numel()
        return [found[place] for place in range(len(self.shapes))]


class ProcessTransport:
    """Carries the messages of one device; all ranks make theirs at the same time.

    Attributes:
        shares_clock: Whether all ranks read one clock.
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
            entered: Told what it is at.

        Raises:
            InvalidInputError: Ranks disagree; names the first difference.
            UnsupportedError: The Program needs what the executor cannot do.
            WorkerError: The others did not come.
        """
        self._task, self._member, self._shape_of = task, member, shape_of
        devices = used_devices(task.program)
        self._rank_of = {device: rank for rank, device in enumerate(devices)}
        self._world = len(devices)
        self._device = devices[member.rank]
        self._messages = messages_of(task.program, self._device)
        self.shares_clock = True
        entered(Phase.AGREE)
        self._agree(job)
        entered(Phase.OPEN)
        try:
            self._pairs = self._open_pairs()
            self._groups = self._open_groups()
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
                f"rank {member.rank}: not all ranks told what they will send within "
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
        if self._member.backend != "nccl":
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

    def _open_groups(self) -> dict[tuple[int, ...], Any]:
        """Return the groups that this device reduces in."""
        program = self._task.program
        found: dict[tuple[int, ...], Any] = {}
        for group in range(len(program.group_ptr) - 1):
            members = tuple(
                program.group_devices[program.group_ptr[group] : program.group_ptr[group + 1]]
                .tolist()
            )  # fmt: skip
            if self._device in members and len(members) > 1 and members not in found:
                found[members] = self._member.group_of(
                    [self._rank_of[device] for device in members]
                )
        return found

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
        """Start a reduction, one for each type of tensor."""
        if meeting.kind is not Kind.ALL_REDUCE:
            raise UnsupportedError(f"the executor has no {meeting.kind.name} of a group yet")
        # Values come in the order of the bucket on every member, so that types do, too, and the
        # k-th reduction of each is the same one.
        by_type: dict[torch.dtype, list[int]] = {}
        for place, value in enumerate(values):
            by_type.setdefault(value.dtype, []).append(place)
        flats = []
        for places in by_type.values():
            flat = torch.cat([values[place].detach().reshape(-1) for place in places])
            group = self._groups.get(meeting.members)
            # A group of one has nothing to add up.
            work = None if group is None else dist.all_reduce(flat, group=group, async_op=True)
            flats.append((flat, work, places))
        return _Reduction([value.shape for value in values], flats)


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
