"""Seconds to move bytes between devices: point to point and in collectives.

A transfer takes ``latency + bytes / bandwidth`` of the innermost level that holds both devices, and
occupies its ports for that time.

A collective over n ranks moves ``x = passes (n - 1) / n x bytes`` and takes ``a + x / B``. Its ring
passes hosts one by one and uses all ports at once: B is the least of the rate inside a host and of
``ranks per host x port`` between hosts where each device has a port (one port where the host has
one), and so on outwards. The other way is hierarchical: a ring inside each group, then between
groups, level by level, where each port carries its own part. The faster of the two counts.

Where the levels say what collectives reach on them (``core.cluster.Collectives``: data of NCCL),
rates are those, all-reduces of enough ranks of one host may be done in its switches, the start-up
``a`` grows with the steps of a ring or with the doublings of a tree, and messages of middle size
lose ``2 ramp sqrt(a x / B)``, as pipelines over chunks do. Where they do not, rates are the
bandwidths and each step of a ring takes the largest latency on its way. Among CPUs, where gloo has
no other, and over a matrix of links, only the ring counts; a reduce-scatter among CPUs sends every
part straight to its owner, as gloo's own would move twice the bytes.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster, Collectives, Level, MeasuredCollective, ring_order
from partita.core.columns import Array, derived
from partita.core.graph import DeviceKind
from partita.core.program import Kind

PASSES = {
    Kind.ALL_REDUCE: 2.0,
    Kind.ALL_GATHER: 1.0,
    Kind.REDUCE_SCATTER: 1.0,
    Kind.ALL_TO_ALL: 1.0,
    Kind.BROADCAST: 1.0,
}
PEERS_AT_A_TIME = 8
"""Peers that a rank of an all-to-all sends to at a time, as NCCL does: they share a latency."""
NEVER = 1e150
"""Start-up of a way that does not exist: finite, so that no bytes cost no NaN."""
MAX_KEPT = 10_000
"""Groups of devices whose ways are kept with their cluster."""


def transfer_s(
    cluster: Cluster,
    source: Array,
    target: Array,
    size_bytes: Array,
    given_s: Array | None = None,
) -> Array:
    """Return seconds of transfers between pairs of devices; 0 on one device.

    Args:
        cluster: The cluster.
        source: Index of the sending device of each transfer.
        target: Index of the receiving device.
        size_bytes: Bytes of each transfer.
        given_s: Seconds as a file gives them; NaN = from bytes.
    """
    links = cluster.links(source, target)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = links.latency_s + size_bytes / links.bandwidth_bytes_per_s
    if given_s is not None:
        seconds = np.where(np.isnan(given_s), seconds, given_s)
    return np.where(source == target, 0.0, seconds)


class Tier(NamedTuple):
    """One level of links as a set of devices sees it: its slowest port.

    Attributes:
        bandwidth_bytes_per_s: Bandwidth of a port.
        latency_s: Latency of a link.
        port_per_device: Whether each device has a port here, instead of one for each child.
        children: Most children (devices, hosts, racks) that one group joins.
        rates: Rates of collectives; None = not known.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    port_per_device: bool
    children: int
    rates: Collectives | None


class Fabric(NamedTuple):
    """The links of a cluster, or of some of its devices, from the inside out.

    Attributes:
        tiers: The levels, innermost (the "host": all devices of one NVLink domain) first.
        is_flat: Whether only flat rings are run (CPUs, a matrix of links).
        scatters_directly: Whether a reduce-scatter sends every part straight to its owner (CPUs).
    """

    tiers: tuple[Tier, ...]
    is_flat: bool = False
    scatters_directly: bool = False

    @property
    def devices_per_host(self) -> int:
        """Devices that the innermost links join."""
        return self.tiers[0].children if self.tiers else 1

    def compute_share(self, *, across_hosts: bool) -> float:
        """Return the share of the compute units that a collective takes while it runs.

        Compute under an overlapped collective takes ``1 / (1 - share)`` times as long.
        """
        used = self.tiers if across_hosts else self.tiers[:1]
        return max((tier.rates.compute_share for tier in used if tier.rates), default=0.0)


class Spread(NamedTuple):
    """Places of the ranks of a group, an array each over groups.

    Attributes:
        groups: Ranks, hosts with ranks, racks with ranks, ...: one more than there are tiers.
        least: Least ranks below one child of each tier.
        most: Most ranks in one host.
    """

    groups: tuple[Array, ...]
    least: tuple[Array, ...]
    most: Array


def fabric_of(cluster: Cluster, devices: Array | None = None) -> Fabric:
    """Return the links that a set of devices has, all devices unless given.

    Of groups that differ (hosts with other links) each tier has the slowest.
    """
    if devices is None:
        return derived(cluster, "fabric", lambda: _fabric(cluster, np.arange(len(cluster))))
    return _fabric(cluster, np.asarray(devices))


def _fabric(cluster: Cluster, devices: Array) -> Fabric:
    has_cpus = any(cluster.devices[device].kind is DeviceKind.CPU for device in devices.tolist())
    if cluster.matrix is not None:
        ring = ring_order(devices)
        links = cluster.links(ring, np.roll(ring, -1)) if len(ring) > 1 else None
        rate = float(links.bandwidth_bytes_per_s.min()) if links else math.inf
        latency = float(links.latency_s.max()) if links else 0.0
        tier = Tier(rate, latency, True, len(devices), None)
        return Fabric((tier,), is_flat=True, scatters_directly=has_cpus)
    tiers = []
    child: Array = np.arange(len(cluster))
    for level in cluster.levels:
        tiers.append(_tier(level, child, devices))
        child = level.group_of
    return Fabric(tuple(tiers), is_flat=has_cpus, scatters_directly=has_cpus)


def _tier(level: Level, child: Array, devices: Array) -> Tier:
    """Return a level as the devices see it: the slowest of the groups in which they cross it."""
    pairs = np.unique(level.group_of[devices].astype(np.int64) * 2**32 + child[devices])
    groups, members = np.unique(pairs >> 32, return_counts=True)
    crossing = groups[members > 1]
    used = crossing if len(crossing) else groups
    share = level.port_share[devices].min()
    bandwidth = level.bandwidth_bytes_per_s[used]
    rates: Collectives | None = None
    if level.collectives:
        found = zip(map(level.collectives_of, used.tolist()), bandwidth.tolist(), strict=True)
        known = [(part, rate * part.ring[-1]) for part, rate in found if part is not None]
        if len(known) == len(used):
            rates = min(known, key=lambda row: row[1])[0]
    return Tier(
        float(bandwidth.min() * share),
        float(level.latency_s[used].max()),
        level.port_per_device,
        int(members.max()),
        rates,
    )


def collective_s(cluster: Cluster, kind: Kind, devices: Array, size_bytes: float) -> float:
    """Return seconds of a collective over a set of devices on ``size_bytes`` each.

    An all-reduce passes the bytes twice, the others once; each pass moves ``(n - 1) / n`` of them.
    """
    if len(devices) < 2:
        return 0.0
    known: dict[tuple[Kind, bytes], list[tuple[float, ...]]] = derived(cluster, "ways", dict)
    key = (kind, devices.tobytes())
    if key not in known:
        if len(known) >= MAX_KEPT:
            known.clear()
        ways = _ways(fabric_of(cluster, devices), kind, _spread_of(cluster, devices))
        known[key] = [tuple(float(part) for part in way) for way in ways]
    size = float(size_bytes)
    return min(
        start + size * byte_s + 2 * ramp * math.sqrt(start * size * byte_s)
        for start, byte_s, ramp in known[key]
    )


def _spread_of(cluster: Cluster, devices: Array) -> Spread:
    """Return the places of a set of devices."""
    groups, least, most = [np.asarray(len(devices))], [np.asarray(1)], np.asarray(len(devices))
    for index, level in enumerate(cluster.levels):
        _, ranks = np.unique(level.group_of[devices], return_counts=True)
        groups.append(np.asarray(len(ranks)))
        least.append(np.asarray(ranks.min()))
        if index == 0:
            most = np.asarray(ranks.max())
    if not cluster.levels:
        groups.append(np.asarray(1))
    return Spread(tuple(groups), tuple(least), most)


def group_collective_s(
    fabric: Fabric, kind: Kind, ranks: Array, ranks_per_host: Array, size_bytes: Array
) -> Array:
    """Return seconds of collectives over groups of ranks, for many groups and sizes at once.

    The arguments are numbers or arrays that broadcast. A host is what the innermost links join,
    such as an NVLink domain; hosts are filled one by one into the groups of the next level.

    Args:
        fabric: The links.
        kind: The collective, or ``Kind.SEND``: one transfer, over the innermost links where
            ``ranks_per_host`` is 2 or more.
        ranks: Ranks of each group.
        ranks_per_host: Ranks of it in one host.
        size_bytes: Bytes that each rank has (all-reduce, reduce-scatter, all-to-all) or ends up
            with (all-gather).
    """
    n, per_host, size = np.broadcast_arrays(
        np.asarray(ranks, np.float64),
        np.asarray(ranks_per_host, np.float64),
        np.asarray(size_bytes, np.float64),
    )
    per_host = np.minimum(np.clip(per_host, 1.0, fabric.devices_per_host), n)
    if kind is Kind.SEND:
        return _send_s(fabric, per_host, size)
    groups, least, below = [n], [np.ones_like(n)], np.ones_like(n)
    for index, tier in enumerate(fabric.tiers):
        wide = np.asarray(tier.children if index else per_host, np.float64)
        outermost = index == len(fabric.tiers) - 1
        groups.append(np.ones_like(n) if outermost else np.ceil(groups[-1] / wide))
        below = np.minimum(below * wide, n)
        least.append(below)
    most = per_host if len(fabric.tiers) > 1 else n
    ways = _ways(fabric, kind, Spread(tuple(groups), tuple(least), most))
    seconds = [
        start + size * byte_s + 2 * ramp * np.sqrt(start * size * byte_s)
        for start, byte_s, ramp in ways
    ]
    return np.where(n > 1, np.minimum.reduce(seconds), 0.0)


def _send_s(fabric: Fabric, per_host: Array, size: Array) -> Array:
    inner, outer = fabric.tiers[0], fabric.tiers[min(1, len(fabric.tiers) - 1)]
    inside = per_host >= 2
    return np.asarray(
        np.where(inside, inner.latency_s, outer.latency_s)
        + size / np.where(inside, inner.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s)
    )


class Way(NamedTuple):
    """One way to run a collective, an array each over groups.

    It takes ``start + t + 2 ramp sqrt(start t)`` with ``t`` the seconds of all bytes.

    Attributes:
        start_s: Seconds of the start-up; ``NEVER`` where the way does not exist.
        byte_s: Seconds of each byte that a rank has.
        ramp: Slowness of messages of middle size.
    """

    start_s: Array
    byte_s: Array
    ramp: Array


def _ways(fabric: Fabric, kind: Kind, spread: Spread) -> list[Way]:
    """Return all ways in which a collective can run; the fastest counts."""
    tiers = fabric.tiers
    if len(tiers) > 1 and tiers[0].rates and not all(tier.rates for tier in tiers):
        # Groups within one host have known rates, whatever is not known of the network.
        inner = _ways(fabric._replace(tiers=tiers[:1]), kind, spread)
        bare = fabric._replace(tiers=tuple(tier._replace(rates=None) for tier in tiers))
        outer = _ways(bare, kind, spread)
        one_host = spread.groups[1] == 1
        return [_where(one_host, way) for way in inner] + [_where(~one_host, way) for way in outer]
    known = bool(tiers) and all(tier.rates for tier in tiers) and not fabric.is_flat
    ways = [_ring(fabric, kind, spread, known=known)]
    if not fabric.is_flat and kind is not Kind.ALL_TO_ALL:
        ways.append(_hierarchy(fabric, kind, spread, ways[0], known=known))
    if known and kind is Kind.ALL_REDUCE:
        ways += _in_switch(tiers[0], spread)
    measured = [
        (row, tier.bandwidth_bytes_per_s * row.share)
        for tier in tiers
        for row in (tier.rates.measured if tier.rates else ())
        if row.kind == kind.name.lower()
    ]
    return _with_measured(ways, measured, kind, spread) if measured else ways


def _with_measured(
    ways: list[Way], rows: list[tuple[MeasuredCollective, float]], kind: Kind, spread: Spread
) -> list[Way]:
    """Return the ways, with what was measured in place of all others where it was.

    A group takes the row with the nearest number of ranks, up to twice or half as many: within one
    host any such row, over hosts one with as many ranks in a host.
    """
    ranks, inside = spread.groups[0], spread.groups[1] == 1
    distance = np.stack(
        [
            np.where(
                inside
                if row.ranks == row.ranks_per_host
                else ~inside & (spread.most == row.ranks_per_host),
                np.abs(np.log2(ranks / row.ranks)),
                np.inf,
            )
            for row, _ in rows
        ]
    )
    nearest = distance.argmin(axis=0)
    has = distance.min(axis=0) <= 1
    table = np.array([(row.start_s, 1 / rate, row.ramp) for row, rate in rows])
    start, byte_s, ramp = np.moveaxis(table[nearest], -1, 0)
    way = Way(np.asarray(start), _traffic(kind, spread) * byte_s, np.asarray(ramp))
    return [*(_where(~has, other) for other in ways), _where(has, way)]


def _where(exists: Array, way: Way) -> Way:
    return way._replace(start_s=np.where(exists, way.start_s, NEVER))


def _traffic(kind: Kind, spread: Spread) -> Array:
    """Return how often each byte of a rank goes over the links of a ring."""
    count = spread.groups[0]
    return np.asarray(PASSES[kind] * (count - 1) / count)


def _ring(fabric: Fabric, kind: Kind, spread: Spread, *, known: bool) -> Way:
    """Return the ring that uses all ports at once, or the exchange of an all-to-all.

    A reduce-scatter that sends directly is an exchange, too: all parts leave in one round.
    """
    is_direct = kind is Kind.REDUCE_SCATTER and fabric.scatters_directly
    zero = np.zeros_like(spread.groups[0], dtype=np.float64)
    steps, rate, slowest = zero, zero + np.inf, zero
    start, trees, ramp, treed = zero, zero, zero, known and kind is Kind.ALL_REDUCE
    at_a_time = PEERS_AT_A_TIME if known and kind is Kind.ALL_TO_ALL else 1.0
    for index, tier in enumerate(fabric.tiers):
        inside, above = spread.groups[index], spread.groups[index + 1]
        used = inside > above
        rate = np.where(used, np.minimum(rate, _rate(fabric, spread, index, known=known)), rate)
        steps = steps + (inside - above) * tier.latency_s / at_a_time
        slowest = np.where(used, np.maximum(slowest, tier.latency_s), slowest)
        if known and tier.rates:
            start = np.where(used, np.maximum(start, tier.rates.start_s), start)
            ramp = np.where(used, tier.rates.ramp, ramp)
            if index:
                trees = trees + tier.rates.tree_s * np.log2(inside / above)
                treed = treed and (tier.rates.tree_s > 0 or not bool(used.any()))
    if is_direct or (kind is Kind.ALL_TO_ALL and not fabric.is_flat):
        byte_s = _exchange_s(fabric, spread)
    else:
        byte_s = _traffic(kind, spread) / rate
    passes = PASSES[kind]
    if not known:
        rounds = 1.0 if is_direct else passes * (spread.groups[0] - 1)
        return Way(rounds * slowest, byte_s, ramp)
    start_up = start + passes * steps
    if treed and len(fabric.tiers) > 1:
        by_trees = np.minimum(start_up, start + trees)
        start_up = np.where(spread.groups[1] > 1, by_trees, start_up)
    return Way(start_up, byte_s, ramp)


def _rate(fabric: Fabric, spread: Spread, index: int, *, known: bool) -> Array:
    """Return the rate of a ring over the ports of one tier."""
    tier = fabric.tiers[index]
    lanes = spread.least[index] if tier.port_per_device and not fabric.is_flat else 1.0
    share: Array | float = 1.0
    if known and tier.rates:
        share = _by_ranks(tier.rates.ring, 2, _children(spread, index))
    return np.asarray(tier.bandwidth_bytes_per_s * share * lanes)


def _children(spread: Spread, index: int) -> Array:
    """Return how many children of a group of one tier take part."""
    if index == 0:
        return spread.most
    return np.ceil(spread.groups[index] / spread.groups[index + 1])


def _by_ranks(shares: tuple[float, ...], first: int, ranks: Array) -> Array:
    """Return the share for each number of ranks; the last one for more."""
    table = np.array(shares)
    return np.asarray(table[np.clip(ranks.astype(np.int64) - first, 0, len(table) - 1)])


def _exchange_s(fabric: Fabric, spread: Spread) -> Array:
    """Return the seconds that each byte of a rank takes in an all-to-all."""
    count = spread.groups[0]
    slowest = np.zeros_like(count, dtype=np.float64)
    below = np.ones_like(count, dtype=np.float64)
    for index, tier in enumerate(fabric.tiers):
        inside, above = spread.groups[index], spread.groups[index + 1]
        used = inside > above
        within = np.where(above > 1, spread.most if index == 0 else count / above, count)
        # Of its bytes a rank sends this part to ranks that it meets at this tier; those of one
        # child share its port unless each has one.
        part = np.where(used, (within - below) / count, 0.0)
        share = tier.rates.all_to_all if tier.rates else 1.0
        sharing = 1.0 if tier.port_per_device or index == 0 else below
        slowest = np.maximum(slowest, part * sharing / (tier.bandwidth_bytes_per_s * share))
        below = np.where(used, within, below)
    return slowest


def _hierarchy(fabric: Fabric, kind: Kind, spread: Spread, ring: Way, *, known: bool) -> Way:
    """Return a ring between the children of each tier, one after another, a part for each port."""
    start = np.zeros_like(spread.groups[0], dtype=np.float64)
    byte_s = start
    for index, tier in enumerate(fabric.tiers):
        used = spread.groups[index] > spread.groups[index + 1]
        children = _children(spread, index)
        passed = PASSES[kind] * (children - 1) / children
        rate = _rate(fabric, spread, index, known=known)
        byte_s = byte_s + np.where(used, passed / rate, 0.0)
        start = start + np.where(used, PASSES[kind] * (children - 1) * tier.latency_s, 0.0)
    # Known start-ups are those of the library, whichever way it takes.
    return Way(ring.start_s if known else start, byte_s, ring.ramp)


def _in_switch(tier: Tier, spread: Spread) -> list[Way]:
    """Return the all-reduce in the switches of one host, if they can."""
    rates = tier.rates
    if rates is None or not rates.switch:
        return []
    ranks = spread.groups[0]
    rate = tier.bandwidth_bytes_per_s * _by_ranks(rates.switch, rates.switch_ranks, ranks)
    way = Way(
        np.asarray(rates.switch_start_s),
        _traffic(Kind.ALL_REDUCE, spread) / rate,
        np.asarray(rates.ramp),
    )
    return [_where((ranks >= rates.switch_ranks) & (spread.groups[1] == 1), way)]
