"""Bandwidths and latencies given on the command line: ``host=1e10,rack=1e9``, or one for all."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from partita.core.cluster import Cluster, Level, LinkMatrix
from partita.core.columns import Floats
from partita.errors import InvalidInputError
from partita.names import short, suggest
from partita.units import parse_bandwidth, parse_seconds

ALL_LEVELS = "*"


def parse_overrides(text: str, parse: Callable[[object, str], float]) -> Mapping[str, float]:
    """Return the value for each level that a text names; a bare number is for ``*``, all levels.

    >>> dict(parse_overrides("1GB/s,host=25GB/s", parse_bandwidth))
    {'*': 1000000000.0, 'host': 25000000000.0}

    Args:
        text: Parts ``LEVEL=VALUE`` or ``VALUE`` with commas between them.
        parse: ``parse_bandwidth`` or ``parse_seconds`` of ``partita.units``.

    Raises:
        InvalidInputError: A part is empty or not understood, or a level stands twice.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        level = name.strip() if equals else ALL_LEVELS
        if not level or not value.strip():
            raise InvalidInputError(
                f"{short(text)}: {short(part)} is not understood; write LEVEL=VALUE or one VALUE, "
                "such as host=1e10,rack=1e9"
            )
        if level in values:
            what = "the value for all levels" if level == ALL_LEVELS else f"level {short(level)}"
            raise InvalidInputError(f"{short(text)}: {what} stands twice")
        values[level] = parse(value.strip(), f"value of level {level}" if equals else "value")
    return values


def apply_overrides(
    cluster: Cluster, *, bandwidth: str | None = None, latency: str | None = None
) -> Cluster:
    """Return the cluster with other bandwidths and latencies.

    A level that is named takes its own value, the others that of the bare number, if there is one.
    Where a bandwidth is given, all ports of the level have it, and collectives reach it: what the
    catalogue knew of them counts no more.

    Args:
        cluster: The cluster.
        bandwidth: Text for ``parse_overrides``, such as ``host=1e10,rack=100Gbit/s``.
        latency: Likewise, such as ``host=5us``.

    Raises:
        InvalidInputError: A text is wrong, or names a level that is not there.
    """
    rates = parse_overrides(bandwidth, parse_bandwidth) if bandwidth is not None else {}
    times = parse_overrides(latency, parse_seconds) if latency is not None else {}
    for level in (*rates, *times):
        _check_level(cluster, level)
    if cluster.matrix is not None:
        matrix = cluster.matrix
        return replace(
            cluster,
            matrix=LinkMatrix(
                bandwidth_bytes_per_s=_filled(matrix.bandwidth_bytes_per_s, rates, ALL_LEVELS),
                latency_s=_filled(matrix.latency_s, times, ALL_LEVELS),
            ),
        )
    levels = tuple(_override(level, rates, times) for level in cluster.levels)
    return replace(cluster, levels=levels)


def _check_level(cluster: Cluster, name: str) -> None:
    if name == ALL_LEVELS:
        return
    if cluster.matrix is not None:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has a matrix of links and no level {short(name)}; "
            "give one number for all links"
        )
    known = [level.name for level in cluster.levels]
    if name not in known:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has no level {short(name)}{suggest(name, known)}"
        )


def _override(level: Level, rates: Mapping[str, float], times: Mapping[str, float]) -> Level:
    level = replace(level, latency_s=_filled(level.latency_s, times, level.name))
    if not {level.name, ALL_LEVELS} & rates.keys():
        return level
    return replace(
        level,
        bandwidth_bytes_per_s=_filled(level.bandwidth_bytes_per_s, rates, level.name),
        port_share=np.ones(len(level.group_of)),
        collectives=(),
    )


def _filled(old: Floats, values: Mapping[str, float], name: str) -> Floats:
    """Return a column with the value for a level in each row, or the old column."""
    value = values.get(name, values.get(ALL_LEVELS))
    return old if value is None else np.full(len(old), value)
