"""The hierarchy behind measured links: like links make a level.

The distance of two devices is the mean logarithm of the time of messages of several sizes, both
ways, so that a ratio of times counts the same at every speed. Average linkage (Sokal and Michener
1958) joins the nearest groups first, O(n^3); where the distance of the next join leaps, a level
ends. Groups that come out of one join more than others need not wait for them: levels whose groups
are not joined again before the next are one, since a level has a bandwidth for each group.

Where no tree explains the links, as on a ring or with one direction slower than the other, the
answer is the matrix itself.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import Level, LinkMatrix
from partita.core.columns import Floats, Longs, frozen_array
from partita.errors import InvalidInputError

LIKE = 1.5
LIKE_GIVEN = 1.25
"""Factor for links whose figures are given and not measured: they have no noise."""
MAX_ODD_SHARE = 0.1
SIZES_BYTES = (0.0, 64e3, 1e6, 16e6)
_ABOVE_HOST = ("rack", "room", "site")
_LEAST_S = 1e-7


def infer_levels(
    bandwidth_bytes_per_s: Floats,
    latency_s: Floats,
    *,
    host_of: Sequence[int] | None = None,
    like: float = LIKE,
) -> tuple[Level, ...] | LinkMatrix:
    """Return the levels that explain a matrix of links, innermost first, else the matrix.

    A level is called ``host`` if it joins the devices of each host, below it is ``island``, above
    it ``rack``, ``room``, ``site``. Without ``host_of`` the innermost is the host. A level of hosts
    is made even if links inside are like links between, because hosts share a port.

    Args:
        bandwidth_bytes_per_s: From each device (row) to each other; the diagonal is ignored.
        latency_s: Likewise.
        host_of: The host of each device, where that is known.
        like: Links are of one level if their times differ by less than this factor.

    Raises:
        InvalidInputError: The matrices are not square, not of one size, or have a value that is not
            above 0 (bandwidth) or at least 0 (latency).
    """
    bandwidth, latency = _square(bandwidth_bytes_per_s, latency_s)
    size = len(bandwidth)
    hosts = None if host_of is None else np.array(host_of, dtype=np.int64)
    if hosts is not None and len(hosts) != size:
        raise InvalidInputError(f"{len(hosts)} hosts are given for {size} devices")
    if size == 1:
        return ()
    times = _log_times(bandwidth, latency)
    partitions = _partitions((times + times.T) / 2, np.log(like))
    partitions = _with_hosts(partitions, hosts)
    names = _names(partitions, hosts)
    levels = _levels(partitions, names, bandwidth, latency)
    if _is_explained(levels, times, np.log(like)):
        return levels
    return LinkMatrix(
        bandwidth_bytes_per_s=frozen_array(bandwidth.ravel(), np.float64),
        latency_s=frozen_array(latency.ravel(), np.float64),
    )


def _square(bandwidth: Floats, latency: Floats) -> tuple[Floats, Floats]:
    """Return copies of both matrices with a diagonal of 0."""
    rates = np.array(bandwidth, dtype=np.float64)
    delays = np.array(latency, dtype=np.float64)
    if rates.ndim != 2 or rates.shape[0] != rates.shape[1] or not rates.size:
        raise InvalidInputError(f"bandwidths have shape {rates.shape}; expected a square matrix")
    if delays.shape != rates.shape:
        raise InvalidInputError(f"latencies have shape {delays.shape}, bandwidths {rates.shape}")
    apart = ~np.eye(len(rates), dtype=bool)
    for what, bad in (
        ("bandwidth", ~(rates > 0) & apart),
        ("latency", ~((delays >= 0) & np.isfinite(delays)) & apart),
    ):
        if bad.any():
            source, target = np.argwhere(bad)[0].tolist()
            values = rates if what == "bandwidth" else delays
            raise InvalidInputError(f"{what} from {source} to {target} is {values[source, target]}")
    np.fill_diagonal(rates, 0.0)
    np.fill_diagonal(delays, 0.0)
    return rates, delays


def _log_times(bandwidth: Floats, latency: Floats) -> Floats:
    """Return the mean logarithm of the time of messages for each ordered pair."""
    rates = bandwidth + np.eye(len(bandwidth))
    times = [np.log(np.maximum(latency + size / rates, _LEAST_S)) for size in SIZES_BYTES]
    result: Floats = np.mean(times, axis=0)
    np.fill_diagonal(result, 0.0)
    return result


def _joins(distance: Floats) -> list[tuple[float, Longs]]:
    """Return each join of average linkage: its distance, and the groups after it.

    Ties go to the devices of lowest number.
    """
    size = len(distance)
    current = distance.astype(np.float64).copy()
    np.fill_diagonal(current, np.inf)
    weight = np.ones(size)
    group_of = np.arange(size)
    joins, height = [], -np.inf
    for _ in range(size - 1):
        first, second = divmod(int(np.argmin(current)), size)
        first, second = min(first, second), max(first, second)
        height = max(height, float(current[first, second]))
        total = weight[first] + weight[second]
        merged = (weight[first] * current[first] + weight[second] * current[second]) / total
        current[first], current[:, first] = merged, merged
        current[second], current[:, second] = np.inf, np.inf
        current[first, first] = np.inf
        weight[first] = total
        group_of = np.where(group_of == second, first, group_of)
        joins.append((height, group_of))
    return joins


def _partitions(distance: Floats, leap: float) -> list[Longs]:
    """Return the groups of each level, innermost first."""
    joins = _joins(distance)
    ends = [
        groups for (height, groups), (following, _) in pairwise(joins) if following - height > leap
    ]
    found = [_numbered(groups) for groups in [*ends, joins[-1][1]]]
    return _compact(found)


def _numbered(group_of: NDArray[np.int64]) -> Longs:
    """Return groups numbered by their first device."""
    _, first, inverse = np.unique(group_of, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    result: Longs = rank[inverse].astype(np.int64)
    return result


def _compact(partitions: list[Longs]) -> list[Longs]:
    """Return partitions without those whose groups the next one leaves as they are.

    A partition can go if every group of the next that it changes anything in is made of groups that
    were there before it: the two then differ in nothing but which groups came first.
    """
    kept: list[Longs] = []
    for partition in partitions:
        inner = kept[-2] if len(kept) > 1 else np.arange(len(partition))
        if kept and _joins_only(inner, kept[-1], partition):
            kept[-1] = partition
        else:
            kept.append(partition)
    return kept


def _joins_only(inner: Longs, middle: Longs, outer: Longs) -> bool:
    """Return whether each outer group is one middle group, or only groups of ``inner``."""
    for group in range(int(outer.max()) + 1):
        inside = outer == group
        parts = set(middle[inside].tolist())
        if len(parts) > 1 and len(parts) != len(set(inner[inside].tolist())):
            return False
    return True


def _with_hosts(partitions: list[Longs], hosts: Longs | None) -> list[Longs]:
    """Return partitions with that of the hosts among them, where it nests with all others."""
    if hosts is None or len(set(hosts.tolist())) == 1:
        return partitions
    wanted = _numbered(hosts)
    if len(set(wanted.tolist())) == len(wanted):
        return partitions
    if any(np.array_equal(wanted, partition) for partition in partitions):
        return partitions
    finer = [p for p in partitions if _nests(p, wanted)]
    coarser = [p for p in partitions if _nests(wanted, p)]
    if len(finer) + len(coarser) != len(partitions):
        return partitions
    return [*finer, wanted, *coarser]


def _nests(inner: Longs, outer: Longs) -> bool:
    """Return whether every inner group lies in one outer group."""
    pairs = len(set(zip(inner.tolist(), outer.tolist(), strict=True)))
    return pairs == len(set(inner.tolist()))


def _names(partitions: list[Longs], hosts: Longs | None) -> list[str]:
    at_host = 0
    if hosts is not None:
        wanted = _numbered(hosts)
        same = [i for i, partition in enumerate(partitions) if np.array_equal(wanted, partition)]
        finer = sum(_nests(partition, wanted) for partition in partitions)
        # Hosts of one device have no level of their own: the innermost is above them.
        at_host = same[0] if same else finer - 1
    names = []
    for index in range(len(partitions)):
        above = index - at_host
        if above < 0:
            names.append("island" if above == -1 else f"island{-above}")
        elif above == 0:
            names.append("host")
        else:
            names.append(_ABOVE_HOST[above - 1] if above <= 3 else f"level{above}")
    return names


def _levels(
    partitions: list[Longs], names: list[str], bandwidth: Floats, latency: Floats
) -> tuple[Level, ...]:
    """Return levels with the median of their links, by group."""
    size = len(bandwidth)
    joined = np.eye(size, dtype=bool)
    levels = []
    for name, groups in zip(names, partitions, strict=True):
        together = groups[:, None] == groups[None, :]
        new = together & ~joined
        members = [new & (groups[:, None] == group) for group in range(int(groups.max()) + 1)]
        usual = new if new.any() else ~np.eye(size, dtype=bool)
        rates, delays = (
            [float(np.median(values[own if own.any() else usual])) for own in members]
            for values in (bandwidth, latency)
        )
        levels.append(
            Level(
                name=name,
                group_of=frozen_array(groups, np.int32),
                bandwidth_bytes_per_s=frozen_array(rates, np.float64),
                latency_s=frozen_array(delays, np.float64),
            )
        )
        joined = together
    return tuple(levels)


def _is_explained(levels: tuple[Level, ...], times: Floats, leap: float) -> bool:
    """Return whether nearly all links take the time that their level says."""
    size = len(times)
    rates, delays = np.ones((size, size)), np.zeros((size, size))
    for level in reversed(levels):
        together = level.group_of[:, None] == level.group_of[None, :]
        rates = np.where(together, level.bandwidth_bytes_per_s[level.group_of][:, None], rates)
        delays = np.where(together, level.latency_s[level.group_of][:, None], delays)
    odd = np.abs(_log_times(rates, delays) - times) > leap
    return int(odd.sum()) <= MAX_ODD_SHARE * size * (size - 1)


def describe_levels(levels: Sequence[Level], names: Sequence[str]) -> list[str]:
    """Return a drawing of levels, outermost first: one line a group, indented by depth.

    Args:
        levels: The levels, innermost first.
        names: The devices.
    """
    lines: list[str] = []
    _describe(levels, list(range(len(names))), names, 0, lines)
    return lines


def _describe(
    levels: Sequence[Level],
    members: list[int],
    names: Sequence[str],
    depth: int,
    lines: list[str],
) -> None:
    if not levels or len(members) == 1:
        lines.append(f"{'  ' * depth}{', '.join(names[member] for member in members)}")
        return
    level = levels[-1]
    by_group = sorted(members, key=lambda member: (int(level.group_of[member]), member))
    for group, part in groupby(by_group, key=lambda member: int(level.group_of[member])):
        its = list(part)
        if len(its) == 1:
            lines.append(f"{'  ' * depth}{names[its[0]]}")
            continue
        rate = level.bandwidth_bytes_per_s[group] / 1e6
        delay = level.latency_s[group] * 1e3
        lines.append(f"{'  ' * depth}{level.name} {group}: {rate:.4g} MB/s, {delay:.3g} ms")
        _describe(levels[:-1], its, names, depth + 1, lines)
