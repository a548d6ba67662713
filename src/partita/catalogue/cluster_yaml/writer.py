"""Clusters written as YAML, for people to read and ``read_cluster_yaml`` to read back.

Every figure is written out, so that the text means the same with any catalogue: those that all
devices of a type share once, under ``types``. Equal clusters give the same bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby

import numpy as np

from partita.catalogue.catalogue import Catalogue, clock_range
from partita.catalogue.cluster_yaml.links import HOST_LEVEL, NO_COLLECTIVES
from partita.catalogue.cluster_yaml.reader import FIGURES, UNKNOWN, read_cluster_yaml
from partita.core.cluster import (
    Cluster,
    Collectives,
    Device,
    Host,
    Level,
    LinkMatrix,
    MeasuredCollective,
)
from partita.core.columns import Floats, same_value
from partita.errors import InvalidInputError
from partita.units import parse_bandwidth, parse_bytes, parse_seconds

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = (*((factor, f"{prefix}B") for factor, prefix in _POWERS), (2**30, "GiB"), (2**20, "MiB"))
_RATES = tuple((factor, f"{prefix}B/s") for factor, prefix in _POWERS)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def write_cluster_yaml(cluster: Cluster) -> str:
    """Return a cluster as YAML: groups of equal hosts if it is made of such, else single devices.

    Raises:
        InvalidInputError: It cannot be written such that it reads back equal, as when it is too
            large, or has a name that YAML has no way to write.
    """
    problem: object = "it does not read back equal"
    head = [f"name: {_name(cluster.name)}", *_type_lines(cluster)]
    tail = [*_link_lines(cluster), ""]
    for device_lines in (_group_lines, _device_lines):
        text = "\n".join([*head, *device_lines(cluster), *tail])
        try:
            if read_cluster_yaml(text, Catalogue()) == cluster:
                return text
        except InvalidInputError as exc:
            problem = exc
    raise InvalidInputError(
        f"cluster {cluster.name!r} cannot be written as YAML ({problem}); save it as JSON"
    )


def _name(text: str) -> str:
    """Return a name as YAML reads it, quoted unless it is plainly a name."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_PLAIN:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _number(value: float) -> str:
    """Return the shortest text of a number that reads back equal."""
    value = float(value) + 0.0
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    texts = [np.format_float_scientific(value, trim="0"), repr(value)]
    if value.is_integer():
        texts.append(str(int(value)))
    return min(reversed(texts), key=len)


def _quantity(
    value: float,
    units: Sequence[tuple[float, str]],
    parse: Callable[[object], float],
) -> str:
    """Return a number with the largest unit that fits and reads back equal, else without."""
    for factor, unit in units:
        if 1 <= value / factor < 1_000_000:
            text = f"{value / factor:.6g}{unit}"
            if parse(text) == value:
                return text
    return _number(value)


def _bytes(value: float) -> str:
    return _quantity(value, _BYTES, parse_bytes)


def _rate(value: float) -> str:
    return _quantity(value, _RATES, parse_bandwidth)


def _time(value: float) -> str:
    return _quantity(value, _TIMES, parse_seconds)


def _table(entries: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"


def _clocks(clocks: Sequence[float]) -> str:
    """Return clocks as a range where they are one, else as a list."""
    if len(clocks) > 2:
        low, high, step = clocks[0], clocks[-1], round(clocks[1] - clocks[0], 6)
        try:
            is_range = clock_range(low, high, step) == tuple(clocks)
        except (InvalidInputError, ArithmeticError):
            is_range = False
        if is_range:
            return _table({"min": _number(low), "max": _number(high), "step": _number(step)})
    return f"[{', '.join(map(_number, clocks))}]"


_WRITERS: Mapping[str, Callable[[Device], str]] = {
    "kind": lambda device: device.kind.value,
    "memory": lambda device: _bytes(device.memory_bytes),
    "speed": lambda device: _number(device.speed),
    "price_per_hour": lambda device: (
        UNKNOWN if math.isnan(device.price_per_hour) else _number(device.price_per_hour)
    ),
    "peak_flop_per_s": lambda device: _table(
        {_name(dtype): _number(rate) for dtype, rate in sorted(device.peak_flop_per_s.items())}
    ),
    "memory_bandwidth": lambda device: _rate(device.memory_bytes_per_s),
    "clocks_mhz": lambda device: _clocks(device.clocks_mhz),
    "idle_w": lambda device: _number(device.idle_w),
    "max_w": lambda device: _number(device.max_w),
    "dvfs": lambda device: _table(
        {key: _number(value) for key, value in asdict(device.dvfs).items()}
    ),
}
assert _WRITERS.keys() == FIGURES.keys()


def _types(cluster: Cluster) -> dict[str, Device]:
    """Return the first device of each type that has a name."""
    types: dict[str, Device] = {}
    for device in cluster.devices:
        if device.type:
            types.setdefault(device.type, device)
    return types


def _figures(device: Device, like: Device | None) -> dict[str, str]:
    """Return what must be said of a device, besides that it is like another of its type."""
    base = Device(name="base") if like is None else like
    always = ("kind", "memory") if like is None else ()
    figures = {}
    for key, write in _WRITERS.items():
        field = FIGURES[key][0]
        if key in always or not same_value(getattr(device, field), getattr(base, field)):
            figures[key] = write(device)
    return figures


def _type_lines(cluster: Cluster) -> Iterator[str]:
    types = _types(cluster)
    if types:
        yield "types:"
    for name, device in types.items():
        yield f"  {_name(name)}:"
        for key, text in _figures(device, None).items():
            yield f"    {key}: {text}"


def _group_lines(cluster: Cluster) -> Iterator[str]:
    """Yield groups; only where hosts and devices are named as in groups will they read back."""
    by_host: list[list[Device]] = [[] for _ in cluster.hosts]
    for device in cluster.devices:
        by_host[device.host].append(device)
    rows = [
        (replace(devices[0], name="", host=0), len(devices), replace(host, name=""))
        for host, devices in zip(cluster.hosts, by_host, strict=True)
        if devices
    ]
    types = _types(cluster)
    keys = {"cpus": "cpus", "memory": "host_memory", "storage": "storage"}
    yield "groups:"
    for (model, count, host), group in groupby(rows):
        numbers = {"hosts": len(list(group)), "count": count}
        sizes = {key: str(number) for key, number in numbers.items() if number > 1}
        head = {"type": _name(model.type)} if model.type else {}
        figures = _figures(model, types.get(model.type))
        yield f"  - {_table(head | sizes | figures | _host_figures(host, keys))}"


def _host_figures(host: Host, keys: Mapping[str, str]) -> dict[str, str]:
    texts = {
        keys["cpus"]: str(host.cpus),
        keys["memory"]: _bytes(host.memory_bytes),
        keys["storage"]: _rate(host.storage_bytes_per_s),
    }
    return {key: text for key, text in texts.items() if text != "0"}


def _device_lines(cluster: Cluster) -> Iterator[str]:
    """Yield single hosts and devices."""
    keys = {"cpus": "cpus", "memory": "memory", "storage": "storage"}
    yield "hosts:"
    for host in cluster.hosts:
        yield f"  {_name(host.name)}: {_table(_host_figures(host, keys))}"
    types = _types(cluster)
    yield "devices:"
    for device in cluster.devices:
        its_host = cluster.hosts[device.host].name
        head = {"type": _name(device.type)} if device.type else {}
        place = {} if device.name.rpartition("/")[0] == its_host else {"host": _name(its_host)}
        figures = _figures(device, types.get(device.type))
        yield f"  {_name(device.name)}: {_table(head | place | figures)}"


def _link_lines(cluster: Cluster) -> Iterator[str]:
    if cluster.matrix is not None:
        yield from _matrix_lines(cluster.matrix, cluster.device_names)
        return
    if not cluster.levels:
        yield "levels: {}"
        return
    yield "levels:"
    for level in cluster.levels:
        yield from _level_lines(level, cluster)


def _level_lines(level: Level, cluster: Cluster) -> Iterator[str]:
    """Yield a level: its usual speed, and the groups that differ from it."""
    rates = list(map(_rate, level.bandwidth_bytes_per_s.tolist()))
    times = list(map(_time, level.latency_s.tolist()))
    reach = list(map(_collectives, level.collectives)) or [NO_COLLECTIVES] * len(rates)
    speeds = list(zip(rates, times, reach, strict=True))
    (rate, time, common), _ = Counter(speeds).most_common(1)[0]
    usual = {"bandwidth": rate, "latency": time}
    if level.port_per_device:
        usual["port_per_device"] = "true"
    if bool((level.port_share < 1).any()):
        usual["port_share"] = _port_share(level, cluster)
    if common != NO_COLLECTIVES:
        usual["collectives"] = common
    names, members = _groups_of(level, cluster)
    groups = []
    same = {"collectives": NO_COLLECTIVES} | usual
    for group, own in enumerate(speeds):
        entries = {} if members is None else {"members": members[group]}
        pairs = zip(("bandwidth", "latency", "collectives"), own, strict=True)
        entries |= {key: text for key, text in pairs if text != same[key]}
        if entries:
            groups.append(f"      {names[group]}: {_table(entries)}")
    if not groups:
        yield f"  {_name(level.name)}: {_table(usual)}"
        return
    yield f"  {_name(level.name)}:"
    yield from (f"    {key}: {text}" for key, text in usual.items())
    yield "    groups:"
    yield from groups


def _collectives(rates: Collectives | None) -> str:
    """Return rates of collectives as a table of all that is not at its default."""
    if rates is None:
        return NO_COLLECTIVES
    entries = {}
    for part in fields(Collectives):
        value = getattr(rates, part.name)
        if value == part.default and part.name != "ring":
            continue
        if part.name == "measured":
            entries[part.name] = f"[{', '.join(map(_measured, value))}]"
        elif isinstance(value, tuple):
            entries[part.name] = f"[{', '.join(map(_number, value))}]"
        else:
            entries[part.name] = _time(value) if part.name.endswith("_s") else _number(value)
    return _table(entries)


def _measured(row: MeasuredCollective) -> str:
    return _table(
        {
            "kind": _name(row.kind),
            "ranks": str(row.ranks),
            "ranks_per_host": str(row.ranks_per_host),
            "start_s": _time(row.start_s),
            "share": _number(row.share),
            **({"ramp": _number(row.ramp)} if row.ramp else {}),
        }
    )


def _port_share(level: Level, cluster: Cluster) -> str:
    """Return the shares of hosts whose devices have less than a full port, else of devices."""
    host_of = np.array([device.host for device in cluster.devices])
    entries: dict[str, str] = {}
    for host, its in enumerate(cluster.hosts):
        rows = np.flatnonzero(host_of == host)
        shares = set(level.port_share[rows].tolist())
        if len(shares) == 1 and its.name not in cluster.index_of:
            entries |= {_name(its.name): _number(share) for share in shares if share < 1}
            continue
        for row in rows.tolist():
            entries[_name(cluster.device_names[row])] = _number(level.port_share[row])
    return _table(entries)


def _groups_of(level: Level, cluster: Cluster) -> tuple[list[str], list[str] | None]:
    """Return the names of a level's groups, and their members unless these go without saying."""
    host_of = np.array([device.host for device in cluster.devices])
    num_groups = len(level.latency_s)
    if level.name == HOST_LEVEL and np.array_equal(level.group_of, host_of):
        return [_name(host.name) for host in cluster.hosts[:num_groups]], None
    if level.name != HOST_LEVEL and num_groups == 1:
        return ["all"], None
    members: list[list[str]] = [[] for _ in range(num_groups)]
    for host, its in enumerate(cluster.hosts):
        devices = np.flatnonzero(host_of == host)
        groups = level.group_of[devices].tolist()
        if len(set(groups)) == 1 and its.name not in cluster.index_of:
            members[groups[0]].append(_name(its.name))
            continue
        for device, group in zip(devices.tolist(), groups, strict=True):
            members[group].append(_name(cluster.device_names[device]))
    lists = [f"[{', '.join(names)}]" for names in members]
    return [_name(f"{level.name}{group}") for group in range(num_groups)], lists


def _matrix_lines(matrix: LinkMatrix, names: Sequence[str]) -> Iterator[str]:
    yield "matrix:"
    yield from _row_lines("bandwidth", matrix.bandwidth_bytes_per_s, names, _rate)
    yield from _row_lines("latency", matrix.latency_s, names, _time)


def _row_lines(
    key: str, values: Floats, names: Sequence[str], write: Callable[[float], str]
) -> Iterator[str]:
    texts = list(map(write, values.tolist()))
    if len(set(texts)) == 1 and (texts[0] != "0" or key == "latency"):
        yield f"  {key}: {texts[0]}"
        return
    yield f"  {key}:"
    for row, name in enumerate(names):
        yield f"    {_name(name)}: [{', '.join(texts[row * len(names) : (row + 1) * len(names)])}]"
