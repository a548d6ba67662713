"""From what ranks measured to a cluster: fits of links, the hierarchy, devices and their speeds.

Devices of one type share one figure of each rate, the median, and a device that computes more than
10 % faster or slower than that has a ``speed`` of its own. Pure functions; measuring is in
``ranks``. One-way times are round trips less half of the shortest round trip of the pair:
without clocks that agree, the two directions of a pair have one latency.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.catalogue.gpu_names import gpu_type
from partita.catalogue.hierarchy import infer_levels
from partita.catalogue.shorthand import HostGroup, read_shorthand, write_shorthand
from partita.core.cluster import (
    Cluster,
    Collectives,
    Device,
    Host,
    Level,
    LinkMatrix,
    MeasuredCollective,
)
from partita.core.columns import Floats, frozen_array
from partita.core.graph import DeviceKind
from partita.core.program import Kind
from partita.cost.links import PASSES
from partita.errors import InvalidInputError
from partita.profiler.calibrate.fit import (
    SMALL_BYTES,
    LinkFit,
    fit_collective,
    fit_link,
    one_way_s,
)
from partita.profiler.calibrate.nccl_tests import NcclTest
from partita.profiler.calibrate.records import DeviceRecord, LinkRecord, Measurement, ReduceRecord

DYNAMICML_BYTES = 4 * 2**20
TRANSFER = "send_recv"
"""Kind of a record of transfers: each rank sends to the next and receives from the one before."""
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
    """All-reduces, or another collective, over some of the devices.

    Attributes:
        num_devices: The first so many devices take part.
        fit: Time as a line over bytes.
        kind: The collective.
        ranks_per_host: Most of the devices in one host.
    """

    num_devices: int
    fit: LinkFit
    kind: str = "all_reduce"
    ranks_per_host: int = 0

    @property
    def bus_bytes_per_s(self) -> float:
        """The rate of the slowest link, if it is a ring: (n - 1) / n of the bytes pass each way."""
        return self.fit.bandwidth_bytes_per_s * _traffic(self.kind, self.num_devices)


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
                    "kind": row.kind,
                    "devices": row.num_devices,
                    "ranks_per_host": row.ranks_per_host,
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
    reductions = [
        replace(record, ranks_per_host=max(Counter(host_of[: record.num_ranks]).values()))
        for record in measurement.reductions
    ]
    if measurement.backend == "nccl" and cluster.matrix is None:
        # Rings of gloo follow from the links; what NCCL does with them does not.
        cluster = with_collectives(cluster, reductions)
    return Calibration(
        cluster=cluster,
        hosts=hosts,
        devices=devices,
        pairs=pairs,
        reductions=tuple(map(_fit_reduction, reductions)),
    )


def with_collectives(cluster: Cluster, records: Sequence[ReduceRecord]) -> Cluster:
    """Return a cluster whose levels know measured collectives.

    Those within one host belong to the innermost level, others to the outermost. Transfers
    (``send_recv``) set the bandwidth of their level; the rates that it had stay what they were.
    """
    levels = list(cluster.levels)
    order = sorted(records, key=lambda record: record.kind != TRANSFER)
    for record in order if levels else ():
        index = 0 if record.num_ranks == record.ranks_per_host else len(levels) - 1
        levels[index] = _with_collective(levels[index], record)
    return replace(cluster, levels=tuple(levels))


def _with_collective(level: Level, record: ReduceRecord) -> Level:
    found = fit_collective(record.sizes_bytes, record.seconds)
    count = len(level.latency_s)
    known = level.collectives or (None,) * count
    if record.kind == TRANSFER:
        rate = _rounded(1 / found.byte_s)
        factor = level.bandwidth_bytes_per_s / rate
        return replace(
            level,
            bandwidth_bytes_per_s=np.full(count, rate),
            collectives=tuple(
                None if part is None else _scaled(part, float(by))
                for part, by in zip(known, factor, strict=True)
            ),
        )
    rate = _traffic(record.kind, record.num_ranks) / found.byte_s
    rows = [
        MeasuredCollective(
            kind=record.kind,
            ranks=record.num_ranks,
            ranks_per_host=record.ranks_per_host,
            start_s=_rounded(found.start_s),
            share=_rounded(rate / bandwidth),
            ramp=_rounded(found.ramp),
        )
        for bandwidth in level.bandwidth_bytes_per_s.tolist()
    ]
    parts = [Collectives() if part is None else part for part in known]
    return replace(
        level,
        collectives=tuple(
            replace(part, measured=(*(r for r in part.measured if not _same(r, row)), row))
            for part, row in zip(parts, rows, strict=True)
        ),
    )


def _same(a: MeasuredCollective, b: MeasuredCollective) -> bool:
    return (a.kind, a.ranks, a.ranks_per_host) == (b.kind, b.ranks, b.ranks_per_host)


def _scaled(rates: Collectives, factor: float) -> Collectives:
    """Return the same rates as shares of a bandwidth that is so many times smaller."""
    return replace(
        rates,
        ring=tuple(share * factor for share in rates.ring),
        switch=tuple(share * factor for share in rates.switch),
        all_to_all=rates.all_to_all * factor,
        measured=tuple(replace(row, share=row.share * factor) for row in rates.measured),
    )


def _traffic(kind: str, num_ranks: int) -> float:
    """Return how often each byte passes the links of a ring; 1 of a transfer."""
    if kind == TRANSFER:
        return 1.0
    return PASSES[Kind[kind.upper()]] * (num_ranks - 1) / num_ranks


def calibration_of_tests(
    tests: Sequence[NcclTest],
    *,
    name: str = "calibrated",
    cluster: Cluster | None = None,
    catalogue: Catalogue | None = None,
) -> Calibration:
    """Return a cluster with the collectives that ``nccl-tests`` measured.

    Args:
        tests: Outputs of the program.
        name: Name of the cluster.
        cluster: The cluster that they were run on; if not given, its hosts and GPUs are as the
            output with the most ranks says, and their figures those of the catalogue.
        catalogue: Source of the types of GPUs; the package's own if not given.

    Raises:
        InvalidInputError: A GPU is of a type that is not in the catalogue, or the cluster is
            smaller than what was measured or has a matrix of links.
    """
    catalogue = load_catalogue() if catalogue is None else catalogue
    if cluster is None:
        cluster = _cluster_of(max(tests, key=lambda test: len(test.hosts)), catalogue)
    for test in tests:
        if cluster.matrix is not None or test.record.num_ranks > len(cluster):
            raise InvalidInputError(
                f"cluster {cluster.name!r} has {len(cluster)} devices"
                f"{' and a matrix of links' if cluster.matrix is not None else ''}; the test had "
                f"{test.record.num_ranks} ranks: expected levels of links and as many devices"
            )
    records = [test.record for test in tests]
    hosts = tuple(host.name for host in cluster.hosts)
    return Calibration(
        cluster=with_collectives(replace(cluster, name=name), records),
        hosts=hosts,
        devices=tuple(
            DeviceRecord(
                rank=rank,
                host=hosts[device.host],
                kind=device.kind.value,
                title=device.type,
                memory_bytes=device.memory_bytes,
                flop_per_s=device.peak_flop_per_s,
                memory_bytes_per_s=device.memory_bytes_per_s,
            )
            for rank, device in enumerate(cluster.devices)
        ),
        pairs=(),
        reductions=tuple(map(_fit_reduction, records)),
    )


def _cluster_of(test: NcclTest, catalogue: Catalogue) -> Cluster:
    """Return the hosts and GPUs that an output names, with the figures of the catalogue."""
    groups: list[HostGroup] = []
    for host in dict.fromkeys(test.hosts):
        pairs = zip(test.hosts, test.titles, strict=True)
        titles = [title for its, title in pairs if its == host]
        kind = gpu_type(titles[0], catalogue)
        if not kind:
            raise InvalidInputError(
                f"GPU {titles[0]!r} is of no type of the catalogue; give the cluster that the "
                "tests were run on (--cluster)"
            )
        last = groups[-1] if groups else None
        if last is not None and (last.type, last.num_devices) == (kind, len(titles)):
            groups[-1] = replace(last, num_hosts=last.num_hosts + 1)
        else:
            groups.append(HostGroup(type=kind, num_devices=len(titles)))
    return read_shorthand(write_shorthand(groups), catalogue)


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
    return ReduceFit(
        num_devices=record.num_ranks,
        fit=fit_link(record.sizes_bytes, record.seconds),
        kind=record.kind,
        ranks_per_host=record.ranks_per_host,
    )


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


def _rounded(value: float) -> float:
    """Return a measured figure with four digits: more would be noise."""
    return float(f"{float(value):.{_DIGITS}g}")


def _rounded_column(values: Floats) -> Floats:
    return frozen_array([_rounded(value) for value in values.tolist()], np.float64)


def _rounded_level(level: Level) -> Level:
    return replace(
        level,
        bandwidth_bytes_per_s=_rounded_column(level.bandwidth_bytes_per_s),
        latency_s=_rounded_column(level.latency_s),
    )


def _rounded_matrix(matrix: LinkMatrix) -> LinkMatrix:
    return LinkMatrix(
        bandwidth_bytes_per_s=_rounded_column(matrix.bandwidth_bytes_per_s),
        latency_s=_rounded_column(matrix.latency_s),
    )
