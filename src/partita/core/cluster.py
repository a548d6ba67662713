"""The machines: hosts, devices and the links between them.

Links are a tree of levels (device < host < rack < ...), or an explicit matrix. Two devices talk at
the innermost level that holds both; at that level each side has one port out and one port in, of
the level's child that it lies in (a whole host between hosts) or, with ``port_per_device``, its
own. A matrix has one link for each ordered pair.

What a collective reaches over the links of a level (``Collectives``) is given as shares of the
bandwidth of a port, so that whoever changes a bandwidth changes it too.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import (
    Array,
    Columns,
    Displayed,
    Floats,
    Ints,
    Longs,
    column,
    every,
    frozen_array,
    names,
)
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError

MAX_DEVICES = 65_536
MAX_LATENCY_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that holds devices.

    Attributes:
        name: Unique within its cluster.
        cpus: Number of CPU cores; 0 = not known.
        memory_bytes: Main memory; 0 = not known.
        storage_bytes_per_s: Rate at which it reads training data; 0 = not known.
    """

    name: str
    cpus: int = 0
    memory_bytes: float = 0.0
    storage_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for what in ("cpus", "memory_bytes", "storage_bytes_per_s"):
            value = getattr(self, what)
            if not 0 <= value < 2**63:
                raise InvalidInputError(
                    f"host {self.name!r}: {what} is {value}; expected 0 or more"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dvfs:
    """Constants of the DVFS model: how time and power of a type of device depend on its clock.

    ``energy/frontier/modelled.py`` has the model. Clocks and voltages are relative to those at the
    highest clock. The defaults are those of the A100, whose published profiles they were fitted to;
    the catalogue's source of ``dvfs`` says which types have constants of their own.

    Attributes:
        full_w: Power at the highest clock if nothing limited it; 0 = the power limit, so that the
            device never throttles.
        static_share: Share of the full power that does not depend on the clock.
        knee: The clock below which the voltage does not fall any more.
        floor_voltage: The voltage there.
        fixed_forward: Share of a forward pass that no clock makes faster.
        fixed_backward: Share of a backward pass that no clock makes faster.
    """

    full_w: float = 0.0
    static_share: float = 0.152
    knee: float = 0.772
    floor_voltage: float = 0.788
    fixed_forward: float = 0.131
    fixed_backward: float = 0.212

    def __post_init__(self) -> None:
        if not 0 <= self.full_w < float("inf"):
            raise InvalidInputError(f"dvfs: full_w is {self.full_w}; expected 0 or more, finite")
        for what in ("static_share", "fixed_forward", "fixed_backward"):
            if not 0 <= getattr(self, what) <= 1:
                raise InvalidInputError(f"dvfs: {what} is {getattr(self, what)}; expected 0 to 1")
        if not 0 <= self.knee < 1 or not 0 < self.floor_voltage <= 1:
            raise InvalidInputError(
                f"dvfs: knee is {self.knee} and floor_voltage {self.floor_voltage}; expected a "
                "clock below the highest, which is 1, and a voltage above 0, at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or a CPU that computes.

    Attributes:
        name: Unique within its cluster, such as ``"host0/gpu1"``.
        host: Index of its host.
        kind: Accelerator or CPU.
        type: Its catalogue name, such as ``"a100"``; empty = not known.
        memory_bytes: Memory of the device; ``inf`` = not limited.
        speed: An op profiled at ``t`` seconds takes ``t / speed`` seconds here.
        peak_flop_per_s: Peak rate by dtype.
        memory_bytes_per_s: Memory bandwidth; 0 = not known.
        clocks_mhz: Clocks it can be set to, ascending; empty = not known.
        idle_w: Power while idle; 0 = not known.
        max_w: Power limit; 0 = not known.
        dvfs: Dependence of its time and power on its clock.
        price_per_hour: Money for an hour; NaN = not known.
    """

    name: str
    host: int = 0
    kind: DeviceKind = DeviceKind.GPU
    type: str = ""
    memory_bytes: float = float("inf")
    speed: float = 1.0
    peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0
    clocks_mhz: tuple[float, ...] = ()
    idle_w: float = 0.0
    max_w: float = 0.0
    dvfs: Dvfs = field(default_factory=Dvfs)
    price_per_hour: float = float("nan")

    def __post_init__(self) -> None:
        object.__setattr__(self, "clocks_mhz", tuple(self.clocks_mhz))
        object.__setattr__(self, "peak_flop_per_s", MappingProxyType(dict(self.peak_flop_per_s)))
        if not self.memory_bytes > 0:
            self._refuse("memory_bytes", self.memory_bytes, "more than 0")
        if not 0 < self.speed < float("inf"):
            self._refuse("speed", self.speed, "more than 0, finite")
        for what in ("memory_bytes_per_s", "idle_w", "max_w"):
            if not 0 <= getattr(self, what) < float("inf"):
                self._refuse(what, getattr(self, what), "0 or more, finite")
        if self.price_per_hour < 0:
            self._refuse("price_per_hour", self.price_per_hour, "0 or more")
        for dtype, rate in self.peak_flop_per_s.items():
            if not 0 < rate < float("inf"):
                self._refuse(f"peak_flop_per_s of {dtype}", rate, "more than 0, finite")
        ends = (0.0, *self.clocks_mhz, float("inf"))
        if not all(a < b for a, b in pairwise(ends)):
            self._refuse("clocks_mhz", self.clocks_mhz, "ascending clocks above 0")

    def _refuse(self, what: str, value: object, expected: str) -> None:
        raise InvalidInputError(f"device {self.name!r}: {what} is {value}; expected {expected}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.name)

    def _key(self) -> tuple[object, ...]:
        price = None if self.price_per_hour != self.price_per_hour else self.price_per_hour
        return (
            *(self.name, self.host, self.kind, self.type, self.memory_bytes, self.speed),
            *(dict(self.peak_flop_per_s), self.memory_bytes_per_s, self.clocks_mhz),
            *(self.idle_w, self.max_w, self.dvfs, price),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One measured collective: ``start + t + 2 ramp sqrt(start t)``, t the seconds of its bytes.

    Those are ``traffic / (share x bandwidth)``. The traffic is that of a ring, ``(n - 1) / n`` of
    the bytes, twice for an all-reduce, so that the rate is what ``nccl-tests`` calls bus bandwidth.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``.
        ranks: Number of ranks.
        ranks_per_host: Ranks in one host, or in one domain of the innermost links.
        start_s: Seconds besides those of the bytes.
        share: Rate as a share of the bandwidth of one port of the level.
        ramp: Slowness of messages of middle size.
    """

    kind: str
    ranks: int
    ranks_per_host: int
    start_s: float
    share: float
    ramp: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_host <= self.ranks or self.ranks < 2:
            raise InvalidInputError(
                f"measured {self.kind}: {self.ranks} ranks, {self.ranks_per_host} in a host; "
                "expected 2 ranks or more, and 1 or more of them in a host"
            )
        _check_finite(f"measured {self.kind}", start_s=self.start_s, ramp=self.ramp)
        if not 0 < self.share < float("inf"):
            raise InvalidInputError(
                f"measured {self.kind}: share is {self.share}; expected more than 0, finite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Rates of collectives as shares of the bandwidth of a port, and their start-up.

    Attributes:
        ring: Rate of a ring of 2, 3, ... ranks; more ranks than given have the last one's.
        switch: Rate of an all-reduce in the switches (NVLS, SHARP) of ``switch_ranks``,
            ``switch_ranks + 1``, ... ranks of one group; empty = the switches do not reduce.
        switch_ranks: Least ranks of an all-reduce in the switches.
        switch_start_s: Start-up of an all-reduce in the switches.
        all_to_all: Rate of one device in an all-to-all.
        start_s: Start-up of a ring; each step adds the latency of the level.
        tree_s: Seconds that every doubling of the children adds to an all-reduce by trees, which
            is chosen where its start-up is shorter than a ring's; 0 = there are no trees.
        ramp: Slowness of messages of middle size: adds ``2 ramp sqrt(start-up x bytes / rate)``.
        compute_share: Share of the compute units that a collective takes while it runs.
        measured: Measured collectives whose members meet at this level; used before the rest.
    """

    ring: tuple[float, ...] = (1.0,)
    switch: tuple[float, ...] = ()
    switch_ranks: int = 5
    switch_start_s: float = 0.0
    all_to_all: float = 1.0
    start_s: float = 0.0
    tree_s: float = 0.0
    ramp: float = 0.0
    compute_share: float = 0.0
    measured: tuple[MeasuredCollective, ...] = ()

    def __post_init__(self) -> None:
        for what in ("ring", "switch", "measured"):
            object.__setattr__(self, what, tuple(getattr(self, what)))
        for share in (*self.ring, *self.switch, self.all_to_all):
            if not 0 < share < float("inf"):
                raise InvalidInputError(
                    f"collectives: share {share} of a bandwidth; expected more than 0, finite"
                )
        if not self.ring or self.switch_ranks < 2:
            raise InvalidInputError(
                "collectives: expected a share for a ring of 2 ranks, and 2 switch_ranks or more"
            )
        _check_finite(
            "collectives",
            switch_start_s=self.switch_start_s,
            start_s=self.start_s,
            tree_s=self.tree_s,
            ramp=self.ramp,
        )
        if not 0 <= self.compute_share < 1:
            raise InvalidInputError(
                f"collectives: compute_share is {self.compute_share}; expected 0 to less than 1"
            )

    @property
    def fastest(self) -> float:
        """The largest of all shares: no collective moves its bytes faster."""
        rates = (*self.ring, *self.switch, self.all_to_all)
        return max(*rates, *(row.share for row in self.measured), 0.0)


def _check_finite(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < MAX_LATENCY_S:
            raise InvalidInputError(f"{what}: {name} is {value}; expected 0 or more, finite")


@dataclass(frozen=True, kw_only=True, eq=False)
class Level(Columns):
    """One level of the hierarchy: which devices it joins, and how fast.

    Attributes:
        name: Such as ``"host"``: links between the devices of one host.
        group_of: The group that each device lies in.
        bandwidth_bytes_per_s: Bandwidth of a port, by group.
        latency_s: Seconds before the first byte arrives, by group.
        port_per_device: Whether each device has its own port here, instead of one for each child.
        port_share: Bandwidth of the port of each device (or of its child) as a share of that of
            its group, at most 1: where hosts with slower ports are in the same group.
        collectives: Rates of collectives by group; None = not known, empty = for none.
    """

    name: str
    group_of: Ints
    bandwidth_bytes_per_s: Floats
    latency_s: Floats = every(0.0)
    port_per_device: bool = False
    port_share: Floats = every(1.0)
    collectives: tuple[Collectives | None, ...] = ()

    def __post_init__(self) -> None:
        rows = np.size(self.group_of)
        group_of = column(
            self.group_of, np.int32, rows, f"group of level {self.name!r}", high=MAX_DEVICES - 1
        )
        groups = int(group_of.max()) + 1 if rows else 0
        bandwidth = np.asarray(self.bandwidth_bytes_per_s, dtype=np.float64)
        bandwidth = np.full(groups, bandwidth) if bandwidth.ndim == 0 else bandwidth
        if bandwidth.shape != (groups,):
            raise InvalidInputError(
                f"level {self.name!r} has {groups} groups and {bandwidth.size} bandwidths"
            )
        if not bool((bandwidth > 0).all()):
            raise InvalidInputError(
                f"level {self.name!r}: bandwidth is {bandwidth[~(bandwidth > 0)][0]}; "
                "expected more than 0 bytes/s"
            )
        self._set(
            group_of=group_of,
            bandwidth_bytes_per_s=frozen_array(bandwidth, np.float64),
            latency_s=column(
                self.latency_s,
                np.float64,
                groups,
                f"latency of level {self.name!r}",
                high=MAX_LATENCY_S,
            ),
            port_share=column(
                self.port_share, np.float64, rows, f"port share of level {self.name!r}", high=1.0
            ),
            collectives=self._checked_collectives(groups),
        )
        if not bool((self.port_share > 0).all()):
            raise InvalidInputError(
                f"level {self.name!r}: a port has share 0; expected more than 0, to 1"
            )

    def _checked_collectives(self, groups: int) -> tuple[Collectives | None, ...]:
        found = tuple(self.collectives)
        if not any(part is not None for part in found):
            return ()
        if len(found) != groups:
            raise InvalidInputError(
                f"level {self.name!r} has {groups} groups and collectives of {len(found)}"
            )
        return found

    def collectives_of(self, group: int) -> Collectives | None:
        """Return the rates of collectives of a group; None = not known."""
        return self.collectives[group] if self.collectives else None

    def taken(self, devices: Array) -> "Level":
        """Return the level as some of its devices, or as repeated ones, see it."""
        group_of = self.group_of[devices]
        groups = int(group_of.max()) + 1
        return replace(
            self,
            group_of=group_of,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s[:groups],
            latency_s=self.latency_s[:groups],
            port_share=self.port_share[devices],
            collectives=self.collectives[:groups],
        )

    @cached_property
    def slowest_bytes_per_s(self) -> float:
        """Bandwidth of the slowest port."""
        if bool((self.port_share == 1).all()):
            return float(self.bandwidth_bytes_per_s.min())
        return float((self.bandwidth_bytes_per_s[self.group_of] * self.port_share).min())

    @cached_property
    def fastest_collective_bytes_per_s(self) -> Floats:
        """Rate of one port that no transfer and no collective exceeds, by group."""
        shares = {part: max(1.0, part.fastest) for part in set(self.collectives) if part}
        factor = [shares[part] if part else 1.0 for part in self.collectives]
        return (
            self.bandwidth_bytes_per_s * np.array(factor)
            if factor
            else (self.bandwidth_bytes_per_s)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkMatrix(Columns):
    """A link for each ordered pair of devices; the diagonal is ignored.

    Attributes:
        bandwidth_bytes_per_s: Row by row, source times destination; ``inf`` = only latency counts.
        latency_s: Likewise.
    """

    bandwidth_bytes_per_s: Floats
    latency_s: Floats = every(0.0)

    def __post_init__(self) -> None:
        bandwidth = frozen_array(
            np.asarray(self.bandwidth_bytes_per_s, np.float64).ravel(), np.float64
        )
        size = math.isqrt(len(bandwidth))
        if size * size != len(bandwidth):
            raise InvalidInputError(f"a link matrix must be square, got {len(bandwidth)} values")
        if bool((bandwidth < 0).any()):
            source, target = divmod(int(np.argmax(bandwidth < 0)), size)
            raise InvalidInputError(
                f"bandwidth from device {source} to {target} is "
                f"{bandwidth[source * size + target]}; expected more than 0 bytes/s"
            )
        latency = self.latency_s
        latency = latency if np.ndim(latency) == 0 else np.ravel(latency)
        self._set(
            bandwidth_bytes_per_s=bandwidth,
            latency_s=column(
                latency, np.float64, size * size, "latency of a link", high=MAX_LATENCY_S
            ),
        )

    @property
    def num_devices(self) -> int:
        """Number of devices that it joins."""
        return math.isqrt(len(self.bandwidth_bytes_per_s))


class Links(NamedTuple):
    """The way between pairs of devices; each pair is a row.

    Attributes:
        bandwidth_bytes_per_s: Bandwidth.
        latency_s: Latency.
        out_port: Port that the source sends through.
        in_port: Port that the destination receives through; -1 = none of its own (matrix).
        level: Index of the level, -1 for a matrix.
    """

    bandwidth_bytes_per_s: Floats
    latency_s: Floats
    out_port: Longs
    in_port: Longs
    level: Ints


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cluster(Displayed):
    """Hosts, devices and their links.

    Attributes:
        name: Its name in tables.
        hosts: The hosts.
        devices: The devices.
        levels: The hierarchy, innermost first; empty where there is a matrix.
        matrix: Links between pairs, instead of levels.
    """

    name: str = "cluster"
    hosts: tuple[Host, ...] = (Host(name="host0"),)
    devices: tuple[Device, ...]
    levels: tuple[Level, ...] = ()
    matrix: LinkMatrix | None = None

    def __post_init__(self) -> None:
        self._set(hosts=tuple(self.hosts), devices=tuple(self.devices), levels=tuple(self.levels))
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise InvalidInputError(
                f"cluster {self.name!r} has {len(self.devices)} devices; "
                f"expected 1 to {MAX_DEVICES}"
            )
        names([host.name for host in self.hosts], "hosts")
        names(self.device_names, "devices")
        for device in self.devices:
            if not 0 <= device.host < len(self.hosts):
                raise InvalidInputError(
                    f"device {device.name!r} is on host {device.host}, not there"
                )
        if self.matrix is not None:
            self._check_matrix(self.matrix)
        else:
            self._check_levels()

    def _check_matrix(self, matrix: LinkMatrix) -> None:
        size = len(self.devices)
        if self.levels:
            raise InvalidInputError("a cluster has levels or a matrix of links, not both")
        if matrix.num_devices != size:
            raise InvalidInputError(f"the matrix joins {matrix.num_devices} devices, not {size}")
        bandwidth = matrix.bandwidth_bytes_per_s.reshape(size, size)
        missing = ~(bandwidth > 0) & ~np.eye(size, dtype=bool)
        if missing.any():
            source, target = np.argwhere(missing)[0].tolist()
            self._refuse_pair(source, target)

    def _check_levels(self) -> None:
        size = len(self.devices)
        names([level.name for level in self.levels], "levels")
        inner: NDArray[Any] = np.arange(size)
        for level in self.levels:
            if len(level.group_of) != size:
                raise InvalidInputError(
                    f"level {level.name!r} groups {len(level.group_of)} of {size} devices"
                )
            outer_of = np.full(int(inner.max()) + 1, -1)
            outer_of[inner] = level.group_of
            if not np.array_equal(outer_of[inner], level.group_of):
                raise InvalidInputError(
                    f"level {level.name!r} cuts through a group of the level below"
                )
            inner = level.group_of
        apart = np.flatnonzero(inner != inner[0])
        if len(apart) and size > 1:
            self._refuse_pair(0, int(apart[0]))

    def _refuse_pair(self, source: int, target: int) -> None:
        raise InvalidInputError(
            f"cluster {self.name!r}: no link between {self.devices[source].name!r} and "
            f"{self.devices[target].name!r}; add a level that joins them, or a bandwidth"
        )

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """Index of each device by name."""
        return {name: index for index, name in enumerate(self.device_names)}

    @cached_property
    def memory_bytes(self) -> Floats:
        """Memory of each device."""
        return frozen_array([device.memory_bytes for device in self.devices], np.float64)

    def only(self, kept: Collection[str]) -> "Cluster":
        """Return the cluster without the devices that are not named; hosts and links stay.

        Raises:
            InvalidInputError: None is left.
        """
        rows = np.array([row for row, name in enumerate(self.device_names) if name in kept], int)
        if len(rows) == 0:
            raise InvalidInputError(f"cluster {self.name!r}: none of its devices is left")
        size = len(self.devices)
        matrix = self.matrix
        if matrix is not None:
            pairs = (rows[:, None] * size + rows[None, :]).ravel()
            matrix = LinkMatrix(
                bandwidth_bytes_per_s=matrix.bandwidth_bytes_per_s[pairs],
                latency_s=matrix.latency_s[pairs],
            )
        return replace(
            self,
            devices=tuple(self.devices[row] for row in rows.tolist()),
            levels=tuple(level.taken(rows) for level in self.levels),
            matrix=matrix,
        )

    @property
    def num_ports(self) -> int:
        """Number of ports in one direction."""
        if self.matrix is not None:
            return len(self.devices) ** 2
        return self._ports_per_level * max(1, len(self.levels))

    @cached_property
    def _ports_per_level(self) -> int:
        """Numbers for the ports of a level: of devices or of groups, which may stand empty."""
        return max(len(self.devices), *(len(level.latency_s) for level in self.levels), 1)

    def links(self, source: NDArray[Any], target: NDArray[Any]) -> Links:
        """Return the way from each source device to its target device (which must differ)."""
        size = len(self.devices)
        if self.matrix is not None:
            pair = source.astype(np.int64) * size + target
            none = np.full(len(pair), -1)
            return Links(
                self.matrix.bandwidth_bytes_per_s[pair],
                self.matrix.latency_s[pair],
                pair,
                none,
                none.astype(np.int32),
            )
        bandwidth = np.zeros(len(source))
        latency = np.zeros(len(source))
        ports = np.zeros((2, len(source)), dtype=np.int64)
        found = np.full(len(source), -1, dtype=np.int32)
        child: NDArray[Any] = np.arange(size)
        for index, level in enumerate(self.levels):
            here = np.flatnonzero((found < 0) & (level.group_of[source] == level.group_of[target]))
            group = level.group_of[source[here]]
            slower = np.minimum(level.port_share[source[here]], level.port_share[target[here]])
            bandwidth[here] = level.bandwidth_bytes_per_s[group] * slower
            latency[here] = level.latency_s[group]
            owner: NDArray[Any] = np.arange(size) if level.port_per_device else child
            first = index * self._ports_per_level
            ports[0, here] = first + owner[source[here]]
            ports[1, here] = first + owner[target[here]]
            found[here] = index
            child = level.group_of
        return Links(bandwidth, latency, ports[0], ports[1], found)


def ring_order(devices: Array) -> Array:
    """Return the devices in the order of a ring: by index, so that hosts are passed one by one."""
    return np.sort(devices)
