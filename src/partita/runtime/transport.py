"""How the devices of a Program talk: the seam between the loop of a device and the world.

Everything is asynchronous: a call starts something and returns a ``Pending``, whose ``poll`` gives
the result when it is there. A transport over real processes waits inside ``poll`` and never returns
None; the one in memory returns None, and the loop lets another device run.

``MemoryTransport`` has no tags, like NCCL: the k-th message that a device posts from a peer is the
k-th that the peer sends it, and it is an error if they are not the same one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from partita.core.program import Kind
from partita.errors import InvalidInputError

_T_co = TypeVar("_T_co", covariant=True)


class Message(NamedTuple):
    """A tensor, or its gradient, on its way from one device to another.

    Attributes:
        source: Device that sends.
        target: Device that receives.
        tensor: Index of the tensor.
        microbatch: The microbatch.
        gradient: Whether it is the gradient of that tensor.
    """

    source: int
    target: int
    tensor: int
    microbatch: int
    gradient: bool

    def __str__(self) -> str:
        what = f"{'gradient of ' if self.gradient else ''}tensor {self.tensor}"
        return f"{what} of microbatch {self.microbatch} from device {self.source} to {self.target}"


class Meeting(NamedTuple):
    """An instruction that all devices of a group carry out together.

    Attributes:
        kind: A collective, or compute of a tensor-parallel group (then without values).
        device: The device that has come.
        members: All devices of the group.
        bucket: The parameters, -1 = none.
        microbatch: The microbatch, -1 = none.
        parts: Of a scatter the parts of the whole: members stand in groups of so many, each of
            which holds a whole; 0 = all members are one group.
    """

    kind: Kind
    device: int
    members: tuple[int, ...]
    bucket: int = -1
    microbatch: int = -1
    parts: int = 0


class Pending(Protocol[_T_co]):
    """Something that has been started."""

    def poll(self) -> _T_co | None:
        """Return its result, or None if it is not there yet."""
        ...


class Transport(Protocol):
    """What a device may ask of the world."""

    @property
    def posted_ahead(self) -> int:
        """How many passes of stages before its place a RECV is posted.

        A send over processes starts when the receive is posted: at its place in the list that would
        be after the compute that it should overlap. The Program must have been checked, as a RECV
        that stands too late would not be found out.
        """
        ...

    def send(self, message: Message, value: Tensor) -> Pending[Tensor]:
        """Send a tensor. The result is the tensor, once the receiver has taken it."""
        ...

    def receive(self, message: Message) -> Pending[Tensor]:
        """Post a receive. The result is a tensor of the receiver's own."""
        ...

    def meet(self, meeting: Meeting, values: Sequence[Tensor] = ()) -> Pending[Sequence[Tensor]]:
        """Come to a meeting; the k-th one of a group on each member is the same one.

        ALL_REDUCE gives the sums over all members. REDUCE_SCATTER takes flat tensors of equal
        parts, and gives the sum over all members of this member's part. ALL_GATHER gives the
        members' tensors end to end. Compute gives nothing.
        """
        ...


@dataclass(slots=True)
class _Slot:
    """A result that may not be there yet."""

    value: Tensor | None = None

    def poll(self) -> Tensor | None:
        return self.value


@dataclass(slots=True)
class _Channel:
    """Messages of an ordered pair of devices that still lack the other end."""

    sent: deque[tuple[Message, Tensor, _Slot]] = field(default_factory=deque)
    posted: deque[tuple[Message, _Slot]] = field(default_factory=deque)


class _Assembly:
    """A meeting to which some members may not have come yet."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.brought: dict[int, tuple[Tensor, ...]] = {}
        self._results: dict[int, Sequence[Tensor]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all members have come."""
        return len(self.brought) == len(self.meeting.members)

    def result(self, device: int) -> Sequence[Tensor] | None:
        """Return what a member takes home."""
        if not self.is_complete:
            return None
        if not self._results:
            parts = [self.brought[member] for member in self.meeting.members]
            columns = list(zip(*parts, strict=True))
            for place, member in enumerate(self.meeting.members):
                self._results[member] = [self._combined(column, place) for column in columns]
        return self._results[device]

    def _combined(self, column: tuple[Tensor, ...], place: int) -> Tensor:
        if self.meeting.kind is Kind.ALL_GATHER:
            return torch.cat(column)
        if self.meeting.kind is Kind.REDUCE_SCATTER:
            parts = self.meeting.parts or len(column)
            column = tuple(part.tensor_split(parts)[place % parts] for part in column)
        total = column[0].clone()
        for part in column[1:]:
            total += part
        return total


@dataclass(frozen=True, slots=True)
class _Attendance:
    """A member's share in a meeting."""

    assembly: _Assembly
    device: int

    def poll(self) -> Sequence[Tensor] | None:
        return self.assembly.result(self.device)


class MemoryTransport:
    """Carries everything within one process; one object serves all devices."""

    posted_ahead = 0

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._assemblies: dict[tuple[int, ...], deque[_Assembly]] = {}

    def send(self, message: Message, value: Tensor) -> Pending[Tensor]:
        """Send a copy of a tensor."""
        slot = _Slot()
        channel = self._channel(message)
        channel.sent.append((message, value.detach().clone(), slot))
        self._deliver(channel)
        return slot

    def receive(self, message: Message) -> Pending[Tensor]:
        """Post a receive."""
        slot = _Slot()
        channel = self._channel(message)
        channel.posted.append((message, slot))
        self._deliver(channel)
        return slot

    def _channel(self, message: Message) -> _Channel:
        return self._channels.setdefault((message.source, message.target), _Channel())

    def _deliver(self, channel: _Channel) -> None:
        if not (channel.sent and channel.posted):
            return
        message, value, sender = channel.sent.popleft()
        expected, receiver = channel.posted.popleft()
        if message != expected:
            raise InvalidInputError(
                f"the {message} arrives where the {expected} is expected; "
                "both ends must list their messages in one order"
            )
        sender.value = receiver.value = value

    def meet(self, meeting: Meeting, values: Sequence[Tensor] = ()) -> Pending[Sequence[Tensor]]:
        """Come to a meeting."""
        line = self._assemblies.setdefault(meeting.members, deque())
        assembly = next((a for a in line if meeting.device not in a.brought), None)
        if assembly is None:
            assembly = _Assembly(meeting)
            line.append(assembly)
        _check_same(assembly.meeting, meeting)
        assembly.brought[meeting.device] = tuple(value.detach().clone() for value in values)
        while line and line[0].is_complete:
            line.popleft()
        return _Attendance(assembly, meeting.device)


def _name(meeting: Meeting) -> str:
    parts = [f"bucket {meeting.bucket}"] if meeting.bucket >= 0 else []
    parts += [f"microbatch {meeting.microbatch}"] if meeting.microbatch >= 0 else []
    return f"{meeting.kind.name}({', '.join(parts)}) of devices {list(meeting.members)}"


def _check_same(first: Meeting, other: Meeting) -> None:
    if first._replace(device=other.device) != other:
        raise InvalidInputError(
            f"device {other.device} comes to {_name(other)} while device {first.device} is at "
            f"{_name(first)}; members of a group must list their joint instructions in one order"
        )
