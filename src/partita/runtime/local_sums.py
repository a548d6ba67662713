"""Sums of small tensors over the ranks of one machine, through memory that they share.

gloo takes about a millisecond of its threads' time for a sum over TCP, however small; a small
network needs ten for a whole step. Here every rank copies what it brings into its own part of a
memory that all of them have mapped, sends each other one a message, and adds up all parts when the
messages of the others have come, in the order of the ranks: the result is the same on all of them.

Each rank has two parts for each sum, used in turns. A rank that begins the k-th sum has ended the
one before, so it has the messages of all others for that; they had read the parts of the sum before
that one when they sent them. So the part that it writes now is read by nobody.

Sockets and not counters in the memory wake whoever waits: they order what is written before, end
when a rank dies, and a rank that waits for one leaves its core to others.
"""

import mmap
import os
import socket
import struct
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from partita.processes import clock_identity, loopback_identity

MOST_BYTES = 2**20
"""Sums of more bytes are gloo's: its threads add them up while the rank computes."""
_ALIGNED = 64
_MESSAGE = struct.Struct("<I")


class LocalRanks:
    """The other ranks of a group on this machine: a connection to each."""

    def __init__(self, ranks: Sequence[int], rank: int, store: Store, name: str) -> None:
        """Connect; all of the ranks do, and ``same_machine`` holds.

        Args:
            ranks: The ranks, ascending.
            rank: This one.
            store: Where they find one another.
            name: Name of the group in the store.
        """
        self.ranks, self.rank = tuple(ranks), rank
        self._num_sums = 0
        # Messages that have come and were not waited for, by rank and number of the sum.
        self._arrived: Counter[tuple[int, int]] = Counter()
        self._sockets: dict[int, socket.socket] = {}
        # An abstract address: it lives in the network of the machine, and needs no file.
        address = f"\0partita-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(len(ranks))
            store.set(f"{name}/address/{rank}", address[1:])
            for other in ranks:
                if other < rank:
                    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    found.connect("\0" + store.get(f"{name}/address/{other}").decode())
                    found.send(_MESSAGE.pack(rank))
                    self._sockets[other] = found
            while len(self._sockets) < len(ranks) - 1:
                found, _ = listener.accept()
                (other,) = _MESSAGE.unpack(found.recv(_MESSAGE.size))
                self._sockets[other] = found

    def open(self, sizes: Sequence[int]) -> list["LocalSum"]:
        """Share memory for some sums; all ranks call it between two steps.

        Args:
            sizes: Most bytes that a rank brings to each.
        """
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        total = 2 * len(self.ranks) * sum(rooms)
        if self.rank == self.ranks[0]:
            file = os.memfd_create("partita-sums")
            os.ftruncate(file, total)
            for other in self._sockets.values():
                socket.send_fds(other, [_MESSAGE.pack(0)], [file])
        else:
            _, (file,), _, _ = socket.recv_fds(self._sockets[self.ranks[0]], _MESSAGE.size, 1)
        try:
            memory = np.frombuffer(mmap.mmap(file, total), np.uint8)
        finally:
            os.close(file)
        found, begin = [], 0
        for room in rooms:
            end = begin + 2 * len(self.ranks) * room
            parts = memory[begin:end].reshape(2, len(self.ranks), room)
            found.append(LocalSum(self, self._num_sums, torch.from_numpy(parts)))
            self._num_sums += 1
            begin = end
        return found

    def tell(self, number: int) -> None:
        """Tell all others that this rank has written its part of a sum."""
        message = _MESSAGE.pack(number)
        for other, connection in self._sockets.items():
            try:
                connection.send(message)
            except OSError as exc:
                raise _lost(other) from exc

    def await_all(self, number: int) -> None:
        """Wait until all others have written their parts of a sum."""
        for other, connection in self._sockets.items():
            while not self._arrived[other, number]:
                message = _received(connection, other)
                self._arrived[other, _MESSAGE.unpack(message)[0]] += 1
            self._arrived[other, number] -= 1

    def close(self) -> None:
        """End the connections."""
        for connection in self._sockets.values():
            connection.close()


def _received(connection: socket.socket, rank: int) -> bytes:
    """Wait for the next message of a rank.

    Raises:
        RuntimeError: The rank has gone.
    """
    try:
        message = connection.recv(_MESSAGE.size)
    except OSError as exc:
        raise _lost(rank) from exc
    if not message:
        raise _lost(rank)
    return message


def _lost(rank: int) -> RuntimeError:
    return RuntimeError(f"connection closed by peer: rank {rank} has gone")


class _Place(NamedTuple):
    """Where a value lies in the parts of a sum: that of this rank, and those of all in order."""

    own: Tensor
    all: Sequence[Tensor]


@dataclass(slots=True)
class LocalSum:
    """A sum that the same ranks compute again and again, one at a time.

    Attributes:
        ranks: The ranks.
        number: Its number among their sums.
        parts: Bytes by turn and place of the rank.
    """

    ranks: LocalRanks
    number: int
    parts: Tensor
    _turn: int = 0
    # What is brought, by turn: the shapes and types, and the places.
    _known: dict[int, tuple[list[object], list[_Place]]] = field(default_factory=dict)

    def start(self, values: Sequence[Tensor]) -> "LocalSumUnderWay | None":
        """Bring values; all ranks bring the same shapes and types. None = they have no room."""
        what: list[object] = [(value.shape, value.dtype) for value in values]
        known = self._known.get(self._turn)
        if known is None or known[0] != what:
            if sum(map(_room, values)) > self.parts.shape[2]:
                return None
            known = self._known[self._turn] = (what, self._places(values))
        self._turn ^= 1
        for value, place in zip(values, known[1], strict=True):
            place.own.copy_(value)
        self.ranks.tell(self.number)
        return LocalSumUnderWay(self.ranks, self.number, known[1])

    def _places(self, values: Sequence[Tensor]) -> list[_Place]:
        parts = self.parts[self._turn]
        mine = self.ranks.ranks.index(self.ranks.rank)
        found, begin = [], 0
        for value in values:
            end = begin + value.numel() * value.element_size()
            views = [part[begin:end].view(value.dtype).view(value.shape) for part in parts]
            found.append(_Place(views[mine], views))
            begin += _room(value)
        return found


class LocalSumUnderWay(NamedTuple):
    """A sum that was started."""

    ranks: LocalRanks
    number: int
    places: Sequence[_Place]

    def poll(self) -> Sequence[Tensor]:
        """Wait for the others, and return the sums."""
        self.ranks.await_all(self.number)
        sums = []
        for _, (first, second, *others) in self.places:
            total = first + second
            for other in others:
                total += other
            sums.append(total)
        return sums


def _room(value: Tensor) -> int:
    return -(-value.numel() * value.element_size() // _ALIGNED) * _ALIGNED


def same_machine(ranks: Sequence[int], rank: int, store: Store, name: str) -> bool:
    """Return whether ranks share a machine and its network; all of them call it."""
    clock, loopback = clock_identity(), loopback_identity()
    can = bool(clock and loopback) and hasattr(os, "memfd_create")
    store.set(f"{name}/machine/{rank}", f"{clock} {loopback}" if can else "")
    found = {store.get(f"{name}/machine/{other}") for other in ranks}
    return len(found) == 1 and found != {b""}


def bytes_of_sum(elements: Iterable[float]) -> int:
    """Return the most bytes that a rank brings, given how many elements its tensors have."""
    return sum(-(-8 * int(count) // _ALIGNED) * _ALIGNED for count in elements)
