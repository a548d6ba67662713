"""From what ranks measured to a cluster: fits of links, the hierarchy, devices and their speeds.

Devices of one type share one figure of each rate, the median, and a device that computes more than
10 % faster or slower than that has a ``speed`` of its own. Pure functions; measuring is in
``ranks``. One-way times are round trips less half of the shortest round trip of the pair:
without clocks that agree, the two directions of a pair have one latency.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.core.cluster import Cluster, Device, Host, Level, LinkMatrix
from partita.core.columns import Floats, frozen_array
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError
from partita.profiler.calibrate.fit import SMALL_BYTES, LinkFit, fit_link, one_way_s
from partita.profiler.calibrate.hierarchy import infer_levels
from partita.profiler.calibrate.records import DeviceRecord, LinkRecord, Measurement, ReduceRecord

DYNAMICML_BYTES = 4 * 2**20
_SAME_SPEED = 0.1
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFit:
    """The link of an ordered pair.

    Attributes:
        source: Index of the device that sends.
        target: Index of the device that receives.
        fit: Its latency, bandwidth and residuals.
    """

    source: int
    target: int
    fit: LinkFit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceFit:
    """All-reduces over some of the devices.

    Attributes:
        num_devices: The first so many devices take part.
        fit: Time as a line over bytes.
    """

    num_devices: int
    fit: LinkFit

    @property
    def bus_bytes_per_s(self) -> float:
        """The rate of the slowest link, if it is a ring: 2 (n - 1) / n of the bytes pass it."""
        return self.fit.bandwidth_bytes_per_s * 2 * (self.num_devices - 1) / self.num_devices


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured cluster, and how well the figures stand.

    Attributes:
        cluster: Hosts, devices and links.
        hosts: Marks by which hosts are distinguished, in order.
        devices: Measurements of each device.
        pairs: The fit of each ordered pair.
        reductions: The fit of each group size.
    """

    cluster: Cluster
    hosts: tuple[str, ...]
    devices: tuple[DeviceRecord, ...]
    pairs: tuple[PairFit, ...]
    reductions: tuple[ReduceFit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        names = self.cluster.device_names
        devices = zip(names, self.cluster.devices, self.devices, strict=True)
        return {
            "name": self.cluster.name,
            "hosts": list(self.hosts),
            "devices": [
                {
                    "name": name,
                    "type": device.type,
                    "title": record.title,
                    "threads": record.threads,
                    "speed": device.speed,
                    "flop_per_s": dict(record.flop_per_s),
                    "memory_bytes_per_s": record.memory_bytes_per_s,
                }
                for name, device, record in devices
            ],
            "pairs": [
                {
                    "source": names[pair.source],
                    "target": names[pair.target],
                    **pair.fit.to_json(),
                }
                for pair in self.pairs
            ],
            "all_reduce": [
                {
                    "devices": row.num_devices,
                    "bus_bytes_per_s": row.bus_bytes_per_s,
                    **row.fit.to_json(),
                }
                for row in self.reductions
            ],
            "levels": [
                {
                    "name": level.name,
                    "group_of": level.group_of.tolist(),
                    "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s.tolist(),
                    "latency_s": level.latency_s.tolist(),
                }
                for level in self.cluster.levels
            ],
            "is_matrix": self.cluster.matrix is not None,
        }


def calibrate(
    measurement: Measurement,
    *,
    name: str = "calibrated",
    catalogue: Catalogue | None = None,
    keep_matrix: bool = False,
) -> Calibration:
    """Return the cluster that a measurement describes.

    Args:
        measurement: Measurements of the ranks.
        name: Name of the cluster.
        catalogue: Source of the types of GPUs; the package's own if not given.
        keep_matrix: Keep a link for each pair, even where levels explain them.

    Raises:
        InvalidInputError: A device or a link is missing, or times are impossible.
    """
    devices = measurement.devices
    if not devices or [record.rank for record in devices] != list(range(len(devices))):
        raise InvalidInputError("records of devices must be of ranks 0, 1, ..., and at least one")
    catalogue = load_catalogue() if catalogue is None else catalogue
    pairs = fit_pairs(measurement.links)
    bandwidth, latency = link_matrices(pairs, len(devices))
    hosts = tuple(dict.fromkeys(record.host for record in devices))
    host_of = [hosts.index(record.host) for record in devices]
    links: tuple[Level, ...] | LinkMatrix
    if keep_matrix and len(devices) > 1:
        links = LinkMatrix(bandwidth_bytes_per_s=bandwidth.ravel(), latency_s=latency.ravel())
    else:
        links = infer_levels(bandwidth, latency, host_of=host_of)
    cluster = Cluster(
        name=name,
        hosts=_hosts(devices, host_of),
        devices=_devices(devices, host_of, catalogue),
        levels=() if isinstance(links, LinkMatrix) else tuple(map(_rounded_level, links)),
        matrix=_rounded_matrix(links) if isinstance(links, LinkMatrix) else None,
    )
    return Calibration(
        cluster=cluster,
        hosts=hosts,
        devices=devices,
        pairs=pairs,
        reductions=tuple(_fit_reduction(record) for record in measurement.reductions),
    )


def fit_pairs(links: Sequence[LinkRecord]) -> tuple[PairFit, ...]:
    """Return the fit of each ordered pair of which there is a record.

    The answers of both directions of a pair take half of its fastest round trip.
    """
    answers: dict[frozenset[int], float] = {}
    for link in links:
        short = [
            min(times)
            for size, times in zip(link.sizes_bytes, link.round_trips_s, strict=True)
            if size <= SMALL_BYTES and times
        ]
        if not short:
            raise InvalidInputError(
                f"link {link.source} to {link.target} has no message of {SMALL_BYTES} bytes or less"
            )
        pair = frozenset((link.source, link.target))
        answers[pair] = min(answers.get(pair, float("inf")), min(short) / 2)
    return tuple(
        PairFit(
            source=link.source,
            target=link.target,
            fit=fit_link(
                link.sizes_bytes,
                one_way_s(link.round_trips_s, answers[frozenset((link.source, link.target))]),
            ),
        )
        for link in links
    )


def link_matrices(pairs: Sequence[PairFit], num_devices: int) -> tuple[Floats, Floats]:
    """Return bandwidth and latency of all ordered pairs as matrices; diagonals are 0.

    Raises:
        InvalidInputError: A pair is missing.
    """
    bandwidth = np.zeros((num_devices, num_devices))
    latency = np.zeros((num_devices, num_devices))
    for pair in pairs:
        bandwidth[pair.source, pair.target] = pair.fit.bandwidth_bytes_per_s
        latency[pair.source, pair.target] = pair.fit.latency_s
    missing = (bandwidth <= 0) & ~np.eye(num_devices, dtype=bool)
    if missing.any():
        source, target = np.argwhere(missing)[0].tolist()
        raise InvalidInputError(f"the link from device {source} to {target} was not measured")
    return bandwidth, latency


def speed_cluster(calibration: Calibration) -> Cluster:
    """Return the cluster whose ``gpu_speed.npy`` tells DynamicMLTrainer the measured links.

    Its speed is the rate of messages of 4 MiB relative to the fastest pair, and what it costs to
    use a link is how much slower it is than that; here costs are latencies, as that format has it.
    """
    size = len(calibration.cluster)
    seconds = np.zeros((size, size))
    for pair in calibration.pairs:
        seconds[pair.source, pair.target] = pair.fit.seconds(DYNAMICML_BYTES)
    apart = ~np.eye(size, dtype=bool)
    fastest = seconds[apart].min() if size > 1 else 1.0
    cost = np.where(apart, 1 - fastest / np.where(apart, seconds, 1.0), 0.0)
    return Cluster(
        name=calibration.cluster.name,
        hosts=calibration.cluster.hosts,
        devices=calibration.cluster.devices,
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=np.full(size * size, np.inf), latency_s=cost.ravel()
        ),
    )


def _fit_reduction(record: ReduceRecord) -> ReduceFit:
    return ReduceFit(num_devices=record.num_ranks, fit=fit_link(record.sizes_bytes, record.seconds))


def _hosts(devices: Sequence[DeviceRecord], host_of: Sequence[int]) -> tuple[Host, ...]:
    first = {host: record for record, host in reversed(list(zip(devices, host_of, strict=True)))}
    return tuple(
        Host(
            name=f"host{host}",
            cpus=first[host].host_cpus,
            memory_bytes=first[host].host_memory_bytes,
        )
        for host in range(len(first))
    )


def _devices(
    records: Sequence[DeviceRecord], host_of: Sequence[int], catalogue: Catalogue
) -> tuple[Device, ...]:
    """Return devices named by host and number, with the rates of their type."""
    types = [
        "cpu" if record.kind == "cpu" else gpu_type(record.title, catalogue) for record in records
    ]
    keys = [kind or record.title for kind, record in zip(types, records, strict=True)]
    result = []
    for index, (record, host) in enumerate(zip(records, host_of, strict=True)):
        alike = [other for other, key in zip(records, keys, strict=True) if key == keys[index]]
        rates = {
            dtype: _rounded(np.median([other.flop_per_s.get(dtype, 0.0) for other in alike]))
            for dtype in record.flop_per_s
        }
        here = list(host_of).count(host)
        memory = record.memory_bytes if record.kind == "gpu" else record.memory_bytes / here
        result.append(
            Device(
                name=f"host{host}/{record.kind}{list(host_of[:index]).count(host)}",
                host=host,
                kind=DeviceKind(record.kind),
                type=types[index],
                memory_bytes=float(int(memory)),
                speed=_speed(record, rates),
                peak_flop_per_s={dtype: rate for dtype, rate in rates.items() if rate > 0},
                memory_bytes_per_s=_rounded(
                    np.median([other.memory_bytes_per_s for other in alike])
                ),
            )
        )
    return tuple(result)


def _speed(record: DeviceRecord, usual: dict[str, float]) -> float:
    """Return how much faster a device is than is usual for its type; 1 if hardly."""
    ratios = [rate / usual[dtype] for dtype, rate in record.flop_per_s.items() if usual[dtype] > 0]
    ratio = float(np.median(ratios)) if ratios else 1.0
    return 1.0 if abs(ratio - 1) <= _SAME_SPEED or ratio <= 0 else round(ratio, 3)


def gpu_type(title: str, catalogue: Catalogue) -> str:
    """Return the type of the catalogue that a GPU's own name says; empty if none.

    >>> gpu_type("NVIDIA A100-SXM4-80GB", load_catalogue())
    'a100'
    >>> gpu_type("NVIDIA GeForce RTX 3090", load_catalogue())
    'rtx3090'
    """
    words = re.findall(r"[a-z0-9]+", title.lower())
    joined = {*words, *(a + b for a, b in pairwise(words))}

    def fits(name: str) -> bool:
        first, *others = name.split("-")
        return first in joined and all(any(w.startswith(o) for w in words) for o in others)

    found = [name for name in catalogue.devices if fits(name)]
    return max(found, key=lambda name: (name.count("-"), -len(name)), default="")


def _rounded(value: float) -> float:
    """Return a measured figure with four digits: more would be noise."""
    return float(f"{float(value):.{_DIGITS}g}")


def _rounded_column(values: Floats) -> Floats:
    return frozen_array([_rounded(value) for value in values.tolist()], np.float64)


def _rounded_level(level: Level) -> Level:
    return Level(
        name=level.name,
        group_of=level.group_of,
        bandwidth_bytes_per_s=_rounded_column(level.bandwidth_bytes_per_s),
        latency_s=_rounded_column(level.latency_s),
        port_per_device=level.port_per_device,
    )


def _rounded_matrix(matrix: LinkMatrix) -> LinkMatrix:
    return LinkMatrix(
        bandwidth_bytes_per_s=_rounded_column(matrix.bandwidth_bytes_per_s),
        latency_s=_rounded_column(matrix.latency_s),
    )
