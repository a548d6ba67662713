"""Machines that can be had, with prices and numbers: from a file, or those of the catalogue.

A file is a list, or a mapping with ``machines`` and ``mix``::

    mix: true                     # machines of different devices may train together
    machines:
      - machine: dgx-h100         # of the catalogue, or
        count: 16                 # as many as there are; no limit if absent
        price_per_hour: $24       # of one machine
      - name: old rack
        device: a100              # a device type, with
        devices_per_host: 4
        price_per_device_hour: 1.10
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.shorthand import parse_shorthand
from partita.core.cluster import MAX_DEVICES
from partita.core.graph import DeviceKind
from partita.errors import FormatError, InvalidInputError
from partita.names import short, suggest
from partita.units import parse_money
from partita.yaml_nodes import (
    Items,
    Node,
    check_present,
    parse_yaml,
    read_count,
    read_flag,
    read_items,
    read_quantity,
    read_table,
    read_text,
)

MOST_EACH = 16
"""Machines up to which every number of them is tried."""
_KEYS = (
    *("name", "machine", "device", "devices_per_host", "count", "price_per_hour"),
    "price_per_device_hour",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Equal machines that can be had.

    Attributes:
        name: Name for people.
        machine: Machine of the catalogue, or ``8xh100``: a host with devices of a type.
        devices: Devices of one machine.
        price_per_hour: US dollars for an hour of one machine.
        count: Machines that there are; None = as many as one wants.
    """

    name: str
    machine: str
    devices: int
    price_per_hour: float
    count: int | None = None

    def cluster(self, count: int) -> str:
        """Return the shorthand of some of the machines.

        >>> Offer(name="a", machine="8xh100", devices=8, price_per_hour=20).cluster(4)
        '4x8xh100'
        """
        return self.machine if count == 1 else f"{count}x{self.machine}"

    def counts(self, most_devices: int) -> list[int]:
        """Return the numbers of machines to try: all of few, 1, 2, 3, 4, 6, 8, 12, ... of many.

        >>> Offer(name="a", machine="8xh100", devices=8, price_per_hour=20).counts(320)
        [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
        """
        most = most_devices // self.devices
        most = most if self.count is None else min(most, self.count)
        if most <= MOST_EACH:
            return list(range(1, most + 1))
        ladder = {step * 2**power for step in (2, 3) for power in range(most.bit_length())}
        return sorted({1, most, *(count for count in ladder if count <= most)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Machines on offer.

    Attributes:
        offers: The machines.
        mix: Whether machines of two offers may train together.
        left_out: Names of machines that are not tried: others of the same devices cost no more.
    """

    offers: tuple[Offer, ...]
    mix: bool = False
    left_out: tuple[str, ...] = ()


def catalogue_offers(catalogue: Catalogue, names: Sequence[str] = ()) -> Offers:
    """Return machines of the catalogue, at its prices: the named ones, or all that have one.

    Of all, those are left out that cost at least as much as others with the same devices in hosts
    that are as large, whose network is at least as fast.

    Raises:
        InvalidInputError: A name is not known, or has no price.
    """
    if not names:
        found = [_known(name, catalogue) for name in catalogue.hosts]
        found = [offer for offer in found if not math.isnan(offer.price_per_hour)]
        beaten = [
            offer
            for index, offer in enumerate(found)
            if any(
                _beats(other, offer, catalogue)
                and (at < index or not _beats(offer, other, catalogue))
                for at, other in enumerate(found)
                if other is not offer
            )
        ]
        return Offers(
            offers=tuple(offer for offer in found if offer not in beaten),
            left_out=tuple(offer.name for offer in beaten),
        )
    named = tuple(_known(name, catalogue) for name in dict.fromkeys(names))
    for offer in named:
        if math.isnan(offer.price_per_hour):
            raise InvalidInputError(
                f"machine {offer.name!r} has no price in the catalogue; give one in a file "
                "(--offer)"
            )
    return Offers(offers=named)


def _beats(one: Offer, other: Offer, catalogue: Catalogue) -> bool:
    """Return whether a machine of the catalogue is as good as another one, and costs no more."""
    here, there = catalogue.hosts[one.machine], catalogue.hosts[other.machine]
    links = [catalogue.link_type(host.network) for host in (here, there)]
    rates = [
        link.bandwidth_bytes_per_s * host.num_ports
        for link, host in zip(links, (here, there), strict=True)
    ]
    return (
        (here.device, here.num_devices, here.num_hosts)
        == (there.device, there.num_devices, there.num_hosts)
        and one.price_per_hour <= other.price_per_hour
        and rates[0] >= rates[1]
        and links[0].latency_s <= links[1].latency_s
    )


def _known(name: str, catalogue: Catalogue) -> Offer:
    """Return one machine at the catalogue's price; NaN where there is none."""
    host = catalogue.hosts.get(name.lower())
    if host is not None:
        kind = catalogue.device_type(host.device)
        count = host.num_devices * host.num_hosts
        price = host.price_per_hour * host.num_hosts
        price = kind.price_per_hour * count if math.isnan(price) else price
        return Offer(name=host.name, machine=host.name, devices=count, price_per_hour=price)
    (group, *more) = parse_shorthand(name)
    if more or group.num_hosts > 1 or group.type in catalogue.hosts:
        raise InvalidInputError(
            f"machine {short(name)}: expected one machine, such as dgx-h100 or 8xh100"
        )
    if group.type not in catalogue.devices:
        hint = suggest(group.type, [*catalogue.hosts, *catalogue.devices])
        raise InvalidInputError(f"machine {short(name)} is not in the catalogue{hint}")
    return _host(group.type, group.num_devices, catalogue)


def _host(device: str, count: int, catalogue: Catalogue) -> Offer:
    kind = catalogue.device_type(device)
    if kind.kind is DeviceKind.CPU:
        raise InvalidInputError(f"device type {device!r} is no accelerator")
    name = f"{count}x{kind.name}"
    return Offer(name=name, machine=name, devices=count, price_per_hour=kind.price_per_hour * count)


def read_offers(text: str, catalogue: Catalogue) -> Offers:
    """Return the offers of a YAML text.

    Raises:
        FormatError: It is not what the module describes; knows the line.
    """
    root = parse_yaml(text)
    mix = False
    if not isinstance(root, Items):
        table = read_table(root, "offer", ("machines", "mix"))
        check_present(table, "offer", ("machines",))
        entries = table.entries
        mix = read_flag(entries["mix"], "mix") if "mix" in entries else False
        root = entries["machines"]
    offers = tuple(_read(node, catalogue) for node in read_items(root, "machines"))
    if not offers:
        raise FormatError("offer: there are no machines; expected at least one", line=root.line)
    twice = next((name for name in _names(offers) if _names(offers).count(name) > 1), None)
    if twice is not None:
        raise FormatError(f"offer: name {twice!r} stands twice; give one of them another 'name'")
    return Offers(offers=offers, mix=mix)


def _names(offers: Sequence[Offer]) -> list[str]:
    return [offer.name for offer in offers]


def _read(node: Node, catalogue: Catalogue) -> Offer:
    """Return one offer of a file."""
    table = read_table(node, "machine", _KEYS)
    found = table.entries
    if ("machine" in found) == ("device" in found):
        raise FormatError("machine: expected either 'machine' or 'device'", line=table.line)
    if "machine" in found and "devices_per_host" in found:
        raise FormatError(
            "machine: 'devices_per_host' goes with 'device'; a machine has its own",
            line=table.line_of["devices_per_host"],
        )
    prices = [key for key in ("price_per_hour", "price_per_device_hour") if key in found]
    if len(prices) > 1:
        raise FormatError(
            "machine: expected one price, of a machine or of a device", line=node.line
        )
    key = "machine" if "machine" in found else "device"
    try:
        if key == "machine":
            base = _known(read_text(found[key], key), catalogue)
        else:
            each = found.get("devices_per_host")
            count = 1 if each is None else read_count(each, "devices_per_host", low=1, high=1024)
            base = _host(read_text(found[key], key).lower(), count, catalogue)
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise FormatError(str(exc), line=found[key].line) from exc
    price = base.price_per_hour
    for name in prices:
        given = read_quantity(found[name], name, parse_money, limit=1e12)
        price = given * (base.devices if name == "price_per_device_hour" else 1)
    if math.isnan(price):
        raise FormatError(
            f"machine {base.name!r} has no price in the catalogue; give price_per_hour or "
            "price_per_device_hour",
            line=table.line,
        )
    return Offer(
        name=read_text(found["name"], "name") if "name" in found else base.name,
        machine=base.machine,
        devices=base.devices,
        price_per_hour=price,
        count=read_count(found["count"], "count", low=1, high=MAX_DEVICES)
        if "count" in found
        else None,
    )


def mixtures(offers: Sequence[Offer], most_devices: int) -> Iterator[tuple[tuple[Offer, int], ...]]:
    """Yield pairs of offers with their numbers: powers of two, and all that there are."""
    for index, first in enumerate(offers):
        for second in offers[index + 1 :]:
            for left in _some(first, most_devices):
                for right in _some(second, most_devices - left * first.devices):
                    yield (first, left), (second, right)


def _some(offer: Offer, most_devices: int) -> list[int]:
    counts = offer.counts(most_devices)
    return [n for n in counts if n & (n - 1) == 0 or n == counts[-1]]
