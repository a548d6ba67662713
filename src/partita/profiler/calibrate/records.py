"""Measurements of ranks, before anything is fitted: plain records, and their JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from partita.errors import FormatError, InvalidInputError

SIZES_BYTES = (64, 1024, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)
REDUCE_SIZES_BYTES = (64, 65_536, 1_048_576, 4_194_304)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Amount to measure, and time to wait.

    Attributes:
        sizes_bytes: Sizes of messages between pairs, ascending.
        reduce_sizes_bytes: Sizes of all-reduces, ascending.
        budget_s: Time for all links; a pair gets its part, at most ``pair_s``.
        pair_s: Longest time for an ordered pair.
        compute_s: Time for each of the speeds of a device.
        reduce_s: Time for each size of an all-reduce.
        limit_s: Seconds that a rank waits for another before it gives up and names it.
    """

    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    reduce_sizes_bytes: tuple[int, ...] = REDUCE_SIZES_BYTES
    budget_s: float = 60.0
    pair_s: float = 2.0
    compute_s: float = 0.5
    reduce_s: float = 0.3
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        for what in ("sizes_bytes", "reduce_sizes_bytes"):
            sizes = getattr(self, what)
            object.__setattr__(self, what, tuple(sizes))
            if not sizes or sorted(set(sizes)) != list(sizes) or not 1 <= sizes[0] <= sizes[-1]:
                raise InvalidInputError(f"{what} is {sizes}; expected ascending sizes above 0")
            if sizes[-1] > 2**30 or sizes[-1] <= 1024:
                raise InvalidInputError(
                    f"{what} ends with {sizes[-1]}; expected more than 1024, at most {2**30}"
                )
        for what in ("budget_s", "pair_s", "compute_s", "reduce_s", "limit_s"):
            if not 0 < getattr(self, what) < 1e6:
                raise InvalidInputError(f"{what} is {getattr(self, what)}; expected more than 0 s")

    def pair_budget_s(self, num_ranks: int) -> float:
        """Return the time for one ordered pair."""
        return min(self.pair_s, self.budget_s / max(1, num_ranks * (num_ranks - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """A rank, as it describes itself.

    Attributes:
        rank: The rank.
        host: Mark of its host: host name and network namespace.
        kind: ``"gpu"`` or ``"cpu"``.
        title: Name that the system gives the device.
        threads: Threads that it computes with; 0 = not on a CPU.
        memory_bytes: Memory of the device, or of the host for a CPU.
        host_cpus: Cores of the host.
        host_memory_bytes: Memory of the host.
        flop_per_s: Measured rate of matrix products, by dtype.
        memory_bytes_per_s: Measured rate of a copy, reads and writes.
    """

    rank: int
    host: str
    kind: str
    title: str = ""
    threads: int = 0
    memory_bytes: float
    host_cpus: int = 0
    host_memory_bytes: float = 0.0
    flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flop_per_s", MappingProxyType(dict(self.flop_per_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """Messages of one ordered pair, each answered by one byte.

    Attributes:
        source: Rank that sent.
        target: Rank that answered.
        sizes_bytes: Sizes, ascending.
        round_trips_s: Seconds until the answer was there, by size.
    """

    source: int
    target: int
    sizes_bytes: tuple[int, ...]
    round_trips_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRecord:
    """All-reduces, or another collective, over the first ranks.

    Attributes:
        kind: The collective.
        num_ranks: Number of ranks that took part.
        ranks_per_host: Most of them in one host; 0 = as the records of the devices say.
        sizes_bytes: Sizes, ascending.
        seconds: Seconds on rank 0, by size.
    """

    kind: str = "all_reduce"
    num_ranks: int
    ranks_per_host: int = 0
    sizes_bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All that was measured.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        devices: A record for each rank, in order.
        links: A record for each ordered pair.
        reductions: A record for each group size.
    """

    backend: str
    devices: tuple[DeviceRecord, ...]
    links: tuple[LinkRecord, ...] = ()
    reductions: tuple[ReduceRecord, ...] = ()


def write_record(record: DeviceRecord | LinkRecord | ReduceRecord) -> str:
    """Return a record as JSON."""
    return json.dumps(_plain(record))


def write_measurement(measurement: Measurement) -> str:
    """Return all that was measured as JSON."""
    return json.dumps(
        {
            "backend": measurement.backend,
            "devices": [_plain(record) for record in measurement.devices],
            "links": [_plain(record) for record in measurement.links],
            "reductions": [_plain(record) for record in measurement.reductions],
        }
    )


def _plain(record: DeviceRecord | LinkRecord | ReduceRecord) -> dict[str, Any]:
    """Return the fields of a record as JSON values."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}


def read_measurement(text: str) -> Measurement:
    """Return all that was measured from JSON.

    Raises:
        FormatError: It is not such a text.
    """
    with _format_errors("a measurement"):
        values = json.loads(text)
        return Measurement(
            backend=str(values["backend"]),
            devices=tuple(DeviceRecord(**row) for row in values["devices"]),
            links=tuple(_link(row) for row in values["links"]),
            reductions=tuple(
                ReduceRecord(
                    kind=str(row.get("kind", "all_reduce")),
                    num_ranks=int(row["num_ranks"]),
                    ranks_per_host=int(row.get("ranks_per_host", 0)),
                    sizes_bytes=tuple(row["sizes_bytes"]),
                    seconds=_times(row["seconds"]),
                )
                for row in values["reductions"]
            ),
        )


def read_device_record(text: str) -> DeviceRecord:
    """Return the record of a device from JSON."""
    with _format_errors("the record of a device"):
        return DeviceRecord(**json.loads(text))


def read_link_record(text: str) -> LinkRecord:
    """Return the record of a link from JSON."""
    with _format_errors("the record of a link"):
        return _link(json.loads(text))


def _link(values: Mapping[str, Any]) -> LinkRecord:
    return LinkRecord(
        source=int(values["source"]),
        target=int(values["target"]),
        sizes_bytes=tuple(values["sizes_bytes"]),
        round_trips_s=_times(values["round_trips_s"]),
    )


def _times(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in rows)


@contextmanager
def _format_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError) as exc:
        raise FormatError(f"{what} is not understood: {exc!r}") from exc
