"""The visible table of policies: an ordering times an allocator, such as ``fifo:tune``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from partita.core.columns import Floats, Longs
from partita.errors import InvalidInputError
from partita.fleet.policies import orderings
from partita.fleet.policies.allocators.joint import joint, overtake, shortest_of_equals
from partita.fleet.policies.allocators.opt import opt
from partita.fleet.policies.allocators.simple import fair, greedy, tune
from partita.fleet.policies.snapshot import Allocation, Snapshot

Allocator: TypeAlias = Callable[..., Allocation]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingEntry:
    """An ordering.

    Attributes:
        keys: Returns a key for each job, lower first.
        ranked: Whether higher priorities go before all keys.
        linear: Whether keys change in proportion to time while grants stay the same.
        by_arrival: Whether it is the plain order of arrival.
        title: What it does, in a few words.
    """

    keys: Callable[[Snapshot], Floats]
    ranked: bool = True
    linear: bool = True
    by_arrival: bool = False
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEntry:
    """An allocator.

    Attributes:
        allocate: Returns who gets what, given the order of the jobs.
        ordered: Whether the order matters although every job runs.
        overtakes: Whether short jobs may overtake, within bounds, in the plain order of arrival,
            and equals in other orders.
        title: What it does, in a few words.
    """

    allocate: Allocator
    ordered: bool = False
    overtakes: bool = False
    title: str


ORDERINGS: Mapping[str, OrderingEntry] = {
    "fifo": OrderingEntry(
        keys=orderings.fifo, ranked=False, by_arrival=True, title="first come, first served"
    ),
    "srtf": OrderingEntry(keys=orderings.srtf, title="shortest remaining time first"),
    "las": OrderingEntry(keys=orderings.las, title="least attained service first"),
    "ftf": OrderingEntry(keys=orderings.ftf, title="worst finish-time ratio first"),
    "priority": OrderingEntry(keys=orderings.priority, title="highest priority first"),
    "drf": OrderingEntry(keys=orderings.drf, title="least dominant share of a tenant first"),
    "tetris": OrderingEntry(
        keys=orderings.tetris, linear=False, title="best alignment and least work first"
    ),
}
ALLOCATORS: Mapping[str, AllocatorEntry] = {
    "fair": AllocatorEntry(allocate=fair, title="GPU-proportional shares"),
    "greedy": AllocatorEntry(allocate=greedy, ordered=True, title="the ideal demand or nothing"),
    "tune": AllocatorEntry(allocate=tune, title="the ideal demand, or the fastest that fits"),
    "opt": AllocatorEntry(allocate=opt, title="the highest sum of speeds, by an ILP"),
    "joint": AllocatorEntry(
        allocate=joint, overtakes=True, title="GPUs, CPUs and memory by what they speed up"
    ),
    "joint-in-order": AllocatorEntry(
        allocate=joint, title="as joint, but nobody overtakes under fifo"
    ),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """An ordering and an allocator.

    Attributes:
        name: Both names, such as ``"fifo:tune"``.
        ordering: The ordering.
        allocator: The allocator.
    """

    name: str
    ordering: OrderingEntry
    allocator: AllocatorEntry

    def order(self, snapshot: Snapshot) -> Longs:
        """Return the jobs of a snapshot, first first."""
        keys = self.ordering.keys(snapshot)
        ordered = orderings.order_of(snapshot, keys, ranked=self.ordering.ranked)
        return self.admitted(snapshot, ordered, keys)

    def admitted(self, snapshot: Snapshot, ordered: Longs, keys: Floats) -> Longs:
        """Return the order in which jobs are served, given that of the ordering and its keys."""
        if not self.allocator.overtakes:
            return ordered
        if self.ordering.by_arrival:
            return overtake(snapshot, ordered)
        return shortest_of_equals(snapshot, ordered, keys)


def policy_of(name: str) -> Policy:
    """Return a policy by name.

    Raises:
        InvalidInputError: There is no such ordering or allocator.
    """
    ordering, colon, allocator = name.partition(":")
    if not colon or ordering not in ORDERINGS or allocator not in ALLOCATORS:
        raise InvalidInputError(
            f"policy {name!r} is not ORDERING:ALLOCATOR with an ordering of "
            f"{', '.join(ORDERINGS)} and an allocator of {', '.join(ALLOCATORS)}"
        )
    return Policy(name, ORDERINGS[ordering], ALLOCATORS[allocator])
