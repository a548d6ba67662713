"""The visible table of policies: an ordering times an allocator, such as ``fifo:tune``.

A new policy is a function and a row here. Other packages add theirs by entry points of the groups
``partita.fleet.orderings`` and ``partita.fleet.allocators``: a row, or the function alone, which
then has the properties that promise least.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from partita.core.columns import Floats, Longs
from partita.errors import InvalidInputError
from partita.fleet.policies import orderings
from partita.fleet.policies.allocators.joint import joint, overtake, shortest_of_equals
from partita.fleet.policies.allocators.opt import opt
from partita.fleet.policies.allocators.simple import fair, greedy, tune
from partita.fleet.policies.snapshot import Allocation, Snapshot
from partita.plugins import PluginGroup, guarded

ORDERING_PLUGINS = PluginGroup(group="partita.fleet.orderings", noun="ordering")
ALLOCATOR_PLUGINS = PluginGroup(group="partita.fleet.allocators", noun="allocator")
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
    """Return a policy by name; of plug-ins, only those that it names are loaded.

    Raises:
        InvalidInputError: There is no such ordering or allocator.
        UnsupportedError: A plug-in that it names cannot be loaded.
    """
    ordering, _, allocator = name.partition(":")
    first, second = _ordering(ordering), _allocator(allocator)
    if first is None or second is None:
        raise InvalidInputError(
            f"policy {name!r} is not ORDERING:ALLOCATOR with an ordering of "
            f"{', '.join(ordering_names())} and an allocator of {', '.join(allocator_names())}"
        )
    return Policy(name, first, second)


def ordering_names() -> list[str]:
    """Return the names of all orderings, built in and plugged in; loads none."""
    return list(dict.fromkeys([*ORDERINGS, *ORDERING_PLUGINS.names()]))


def allocator_names() -> list[str]:
    """Return the names of all allocators, built in and plugged in; loads none."""
    return list(dict.fromkeys([*ALLOCATORS, *ALLOCATOR_PLUGINS.names()]))


def _ordering(name: str) -> OrderingEntry | None:
    if name in ORDERINGS:  # what is built in cannot be replaced
        return ORDERINGS[name]
    found: Any = ORDERING_PLUGINS.find(name)
    if found is None:
        return None
    if not isinstance(found, OrderingEntry):
        found = OrderingEntry(keys=found, linear=False, title="a plug-in")
    row: OrderingEntry = found
    return replace(row, keys=guarded("ordering", name, row.keys))


def _allocator(name: str) -> AllocatorEntry | None:
    if name in ALLOCATORS:
        return ALLOCATORS[name]
    found: Any = ALLOCATOR_PLUGINS.find(name)
    if found is None:
        return None
    if not isinstance(found, AllocatorEntry):
        found = AllocatorEntry(allocate=found, ordered=True, title="a plug-in")
    row: AllocatorEntry = found
    return replace(row, allocate=guarded("allocator", name, row.allocate, returns=Allocation))
