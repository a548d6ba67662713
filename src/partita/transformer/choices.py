"""The best ways to train a transformer on a cluster: searched in closed form, then played exactly.

Devices of one type are searched alone, on all of them and on fewer where their number divides
badly, and types together (``mixed.py``). What looks best is played, the rest is not; what needs
more memory than there is, is no choice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.cluster import Cluster
from partita.core.precision import parse_precision
from partita.errors import InvalidInputError
from partita.transformer.layout import Layout
from partita.transformer.mixed import (
    Candidate,
    Group,
    fits_places,
    groups_of,
    mixed_candidates,
    place_memory,
)
from partita.transformer.pipelines import (
    Pipeline,
    as_number,
    even_layers,
    played_s,
    regular_pipeline,
)
from partita.transformer.price import Steps
from partita.transformer.search import Task, keeps, price_all, search, with_orders
from partita.transformer.uneven import refined, uneven_candidates

PLAYED = 24
"""Layouts that are played exactly."""
KEPT = 8
"""Choices of different structure that are returned."""
FAR = 1.25
"""How far behind the best one that was played a closed form may be for it to be played, too."""
LEAST_PLAYED = 5
"""Layouts that are played in any case."""
REFINED = 3
"""Layouts whose stages are changed while that makes a step shorter."""
MOST_FEWER = 2
"""Smaller numbers of devices that are searched where all of them divide badly."""
DEGREES = ("tp", "pp", "vp", "dp", "cp", "ep", "zero", "shard_group")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, and what it costs.

    Attributes:
        lanes: The pipelines; several where types of devices run side by side.
        step_s: Seconds of a step, played exactly.
        parts: Seconds of a step by what takes them; they add up to it.
        memory: Bytes per device by what takes them, of the fullest place.
        limit_bytes: Memory that a device of that place may use.
        device_type: Type of the devices of that place.
        price_per_hour: Money for an hour of its devices; NaN = not known.
    """

    lanes: tuple[Pipeline, ...]
    step_s: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    limit_bytes: float
    device_type: str
    price_per_hour: float

    @property
    def layout(self) -> Layout:
        """The layout of the first place."""
        return self.lanes[0].layout

    @property
    def device_types(self) -> tuple[str, ...]:
        """Types of all devices in use."""
        return tuple(dict.fromkeys(p.device_type for lane in self.lanes for p in lane.places))

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(lane.num_devices for lane in self.lanes)

    @property
    def title(self) -> str:
        """The degrees in words; of several types one after the other."""
        words = [_layout_words(self.lanes[0])]
        if len(self.lanes) > 1:
            shares = ":".join(str(lane.microbatches) for lane in self.lanes)
            types = ", ".join(lane.places[0].kind for lane in self.lanes)
            words.append(f"microbatches {shares} on {types}")
        return "; ".join(words)

    @property
    def total_bytes(self) -> float:
        """Bytes per device."""
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return {
            "title": self.title,
            "layout": layout_json(self.layout),
            "stages": [
                {
                    "device_type": place.device_type,
                    "tp": place.layout.tp,
                    "recompute": list(place.layout.recompute),
                    "replicas": len(place.devices),
                    "layers": [
                        n
                        for chunk, n in enumerate(lane.layers)
                        if chunk % len(lane.places) == number
                    ],
                }
                for lane in self.lanes
                for number, place in enumerate(lane.places)
            ],
            "step_s": self.step_s,
            "parts_s": dict(self.parts),
            "memory_bytes": dict(self.memory),
            "limit_bytes": self.limit_bytes,
        }


def layout_json(layout: Layout) -> dict[str, Any]:
    """Return the degrees of a layout as JSON values."""
    named = (*DEGREES, "sp", "microbatch", "expert_overlap", "rank_order", "precision", "framework")
    return {**{name: getattr(layout, name) for name in named}, "recompute": list(layout.recompute)}


def _layout_words(lane: Pipeline) -> str:
    layout = lane.layout
    kinds = Counter(f"{place.kind} tp {place.layout.tp}" for place in lane.places)
    sets = Counter("+".join(place.layout.recompute) or "none" for place in lane.places)
    notes: list[str] = []
    text = str(replace(layout, recompute=()) if len(sets) > 1 else layout)
    if len(kinds) > 1:
        text = text.replace(f"tp {layout.tp}, ", "", 1)
        notes.append(", ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    if len(sets) > 1:
        words = ", ".join(f"{name} on {count}" for name, count in sets.items())
        notes.append(f"recompute {words} stages")
    if len(kinds) > 1 or sorted(lane.layers) != sorted(even_layers(sum(lane.layers), layout)):
        notes.append(f"layers {_ranges(lane.layers)}")
    return f"{text} [{'; '.join(notes)}]" if notes else text


def _ranges(layers: Sequence[int]) -> str:
    words: list[str] = []
    for count in layers:
        if words and words[-1].split("x")[0] == str(count):
            times = int(words[-1].split("x")[1]) if "x" in words[-1] else 1
            words[-1] = f"{count}x{times + 1}"
        else:
            words.append(str(count))
    return " ".join(words)


def find_choices(task: Task, cluster: Cluster, *, by_price: bool = False) -> list[Choice]:
    """Return the best choices of different structure, the best first; empty = nothing fits.

    Args:
        task: What is trained; devices and machine are those of the cluster.
        cluster: The devices.
        by_price: Whether the money for a step counts, instead of its seconds.

    Raises:
        InvalidInputError: No layout has the degrees that are fixed; or prices are not known.
    """
    factor = task.limit_bytes / cluster.devices[0].memory_bytes
    groups = groups_of(cluster, factor, compute=parse_precision(task.precision).compute)
    price = _prices(cluster) if by_price else np.zeros(0)

    def worth(step_s: float, lanes: Iterable[Pipeline]) -> float:
        return step_s * float(price[_used(lanes)].sum()) if by_price else step_s

    found = [
        (worth(candidate.step_s, candidate.lanes), candidate.lanes)
        for candidate in _candidates(task, cluster, groups, by_price=by_price)
    ]
    played: list[tuple[float, float, tuple[Pipeline, ...]]] = []
    for about, lanes in sorted(found, key=lambda pair: pair[0]):
        # The closed form is near what is played: what is far behind need not be played.
        if len(played) >= LEAST_PLAYED and about > FAR * min(row[0] for row in played):
            break
        step_s = played_s(lanes)
        played.append((worth(step_s, lanes), step_s, lanes))
    played.sort(key=lambda row: row[0])
    for number, (_, step_s, lanes) in enumerate(played[:REFINED]):
        step_s, lanes = refined(step_s, lanes)  # noqa: PLW2901 (the same, better)
        played[number] = (worth(step_s, lanes), step_s, lanes)
    played.sort(key=lambda row: row[0])
    seen: set[tuple[object, ...]] = set()
    kept: list[Choice] = []
    for _, step_s, lanes in played:
        layout = lanes[0].layout
        places = tuple((p.kind, p.layout.tp) for lane in lanes for p in lane.places)
        key = (layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, places)
        if key not in seen and len(kept) < KEPT:
            seen.add(key)
            kept.append(_choice(cluster, lanes, step_s))
    return kept


def _used(lanes: Iterable[Pipeline]) -> list[int]:
    return [d for lane in lanes for place in lane.places for group in place.devices for d in group]


def _prices(cluster: Cluster) -> np.ndarray[Any, np.dtype[np.float64]]:
    prices = np.array([device.price_per_hour for device in cluster.devices])
    if np.isnan(prices).any():
        kind = cluster.devices[int(np.flatnonzero(np.isnan(prices))[0])].type
        raise InvalidInputError(
            f"device type {kind!r} has no price_per_hour, which --objective cost needs; give it in "
            "the cluster's file"
        )
    return prices


def _candidates(
    task: Task, cluster: Cluster, groups: Sequence[Group], *, by_price: bool
) -> list[Candidate]:
    """Return layouts that fit, on devices of one type and on several types together."""
    found: list[Candidate] = []
    refused: list[InvalidInputError] = []
    searched = 0
    whole: list[Group] = []
    for group in groups:
        fewer = list(_fewer(cluster, group, task.batch, by_price=by_price))
        even = _whole_hosts(cluster, group)
        whole.append(group if even is None else even)
        for part in (group, *fewer):
            alone = replace(
                task, devices=len(part), machine=part.machine, limit_bytes=part.limit_bytes
            )
            searched += 1
            try:
                priced = with_orders(search(alone), PLAYED)
            except InvalidInputError as exc:
                refused.append(exc)
                continue
            for row in np.flatnonzero(priced.fits)[:PLAYED].tolist():
                lane = regular_pipeline(alone, priced.layouts[row], cluster, part.devices)
                found.append(Candidate(lanes=(lane,), step_s=float(priced.step_s[row])))
            found += uneven_candidates(priced, cluster, part.devices)
    if len(groups) > 1:
        found += mixed_candidates(task, cluster, groups)[:PLAYED]
        if [len(group) for group in whole] != [len(group) for group in groups]:
            found += mixed_candidates(task, cluster, whole)[:PLAYED]
    # Degrees that are fixed may be possible on all types together and on none alone.
    if not found and task.fixed and len(refused) == searched:
        raise refused[0]
    return [
        candidate
        for candidate in found
        if all(fits_places(lane) and _keeps(lane, task) for lane in candidate.lanes)
    ]


def _keeps(lane: Pipeline, task: Task) -> bool:
    return all(keeps(place.layout, task.fixed) for place in lane.places)


def _whole_hosts(cluster: Cluster, group: Group) -> Group | None:
    """Return the devices of the hosts that have most of a group; None where all have as many."""
    hosts = _hosts(cluster, group)
    most = max(map(len, hosts))
    if all(len(host) == most for host in hosts):
        return None
    return group.some(cluster, [d for host in hosts if len(host) == most for d in host])


def _hosts(cluster: Cluster, group: Group) -> list[list[int]]:
    """Return the devices of a group by host, in the order of the cluster."""
    if not cluster.levels:
        return [group.devices.tolist()]
    hosts: dict[int, list[int]] = {}
    for device in group.devices.tolist():
        hosts.setdefault(int(cluster.levels[0].group_of[device]), []).append(device)
    return list(hosts.values())


def _fewer(cluster: Cluster, group: Group, batch: int, *, by_price: bool) -> Iterator[Group]:
    """Yield fewer devices of a group, where all of them divide badly, the most first.

    Whole hosts, or devices of one host: those of hosts that are all there, and the largest numbers
    from half on whose odd part divides the batch. Where hosts themselves have a number that divides
    badly (racks of 72), as many devices of each. Where money counts, every power of two.
    """
    hosts = _hosts(cluster, group)
    most = max(map(len, hosts))
    units = [host for host in hosts if len(host) == most]
    if len(hosts) == 1:
        units = [[device] for device in hosts[0]]
    elif batch % _odd_part(most):
        even = next(n for n in range(most, 0, -1) if batch % _odd_part(n) == 0)
        units = [host[:even] for host in hosts if len(host) >= even]
    each, total = len(units[0]), len(group)
    counts = {len(units)} if each * len(units) < total else set()
    good = [
        count
        for count in range(len(units), 0, -1)
        if 2 * each * count >= total and batch % _odd_part(each * count) == 0
    ]
    if batch % _odd_part(total):
        counts |= set(good[:MOST_FEWER])
    if by_price:
        counts |= {2**power for power in range(len(units).bit_length())}
    for count in sorted(counts, reverse=True):
        if count and each * count < total:
            yield group.some(cluster, [device for unit in units[:count] for device in unit])


def _odd_part(number: int) -> int:
    return number // (number & -number)


def _choice(cluster: Cluster, lanes: tuple[Pipeline, ...], step_s: float) -> Choice:
    """Return lanes whose step was played with what takes time and memory."""
    slowest = max(
        lanes, key=lambda lane: lane.microbatches / lane.places[0].machine.peak_flop_per_s
    )
    fullest = [(place_memory(lane, n), lane, n) for lane in lanes for n in range(len(lane.places))]
    memory, lane, number = max(
        fullest, key=lambda row: as_number(row[0].total) / row[1].limit_bytes(row[2])
    )
    return Choice(
        lanes=lanes,
        step_s=step_s,
        parts=parts_of(slowest, step_s),
        memory={name: as_number(value) for name, value in memory._asdict().items()},
        limit_bytes=lane.limit_bytes(number),
        device_type=lane.places[number].device_type,
        price_per_hour=sum(cluster.devices[index].price_per_hour for index in _used(lanes)),
    )


def parts_of(lane: Pipeline, step_s: float) -> dict[str, float]:
    """Return the seconds of a step by what takes them; waiting is what is left."""
    # Of stages that recompute different sets the most common one stands for all.
    sets = Counter(place.layout.recompute for place in lane.places)
    place = replace(
        lane.places[0], layout=replace(lane.layout, recompute=sets.most_common(1)[0][0])
    )
    alone = replace(lane.task, machine=place.machine)
    replicas = lane.task.batch // (lane.microbatches * place.layout.microbatch)
    layout = replace(place.layout, dp=max(1, replicas))
    priced: Steps = price_all(alone, [layout]).steps
    parts = {name: as_number(value) for name, value in priced._asdict().items()}
    busy = sum(v for k, v in parts.items() if k not in ("bubble_s", "recompute_s", "pipeline_s"))
    # What the exact play takes beyond the busy time is waiting for other stages.
    waiting = max(step_s - busy, 0.0)
    if busy > step_s:
        scale = step_s / busy
        parts = {name: value * scale for name, value in parts.items()}
    sends = min(parts["pipeline_s"], waiting)
    return {**parts, "pipeline_s": sends, "bubble_s": max(waiting - sends, 0.0)}
