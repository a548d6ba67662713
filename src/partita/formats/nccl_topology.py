"""The topology that NCCL writes (``NCCL_TOPO_DUMP_FILE``): the GPUs of one host that took part.

Rates are those that NCCL itself counts with: a PCI Express lane by its generation, an NVLink by the
compute capability. GPUs on NVSwitches have a port of all their links each. A file has no names and
no memory of GPUs: the caller gives their type. NCCL takes an unknown speed of PCI Express for that
of generation 3 without a word; here it is refused, with its line, where it matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.parsers import expat

import numpy as np

from partita.catalogue.catalogue import Catalogue, DeviceType
from partita.catalogue.hierarchy import LIKE_GIVEN, infer_levels
from partita.catalogue.inventory import Completion, FoundGpu, FoundHost, inventory_cluster
from partita.core.cluster import Cluster, Level, LinkMatrix
from partita.errors import FormatError
from partita.formats.nvidia_smi import SYSTEM_SHARE, nvlink_bytes_per_s
from partita.names import short

_LANE = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60}
_LANE |= {"16": 120, "16.0": 120, "32": 240, "32.0": 240, "64": 480, "64.0": 480}
"""Rate of sixteen lanes in units of 1/5 GB/s, by giga transfers per second."""
_SWITCH_CLASS = "0x068000"
_MOST_DEPTH = 32
_MOST_GPUS = 256


@dataclass(slots=True)
class _Element:
    """An element of the file; changed while it is read."""

    tag: str
    attributes: dict[str, str]
    line: int
    above: "_Element | None"
    below: "list[_Element]" = field(default_factory=list)

    def number(self, key: str, default: int) -> int:
        """Return an attribute that is a whole number."""
        text = self.attributes.get(key, "")
        if not text:
            return default
        try:
            return int(text[:12])
        except ValueError:
            raise FormatError(
                f"{self.tag} has {key} {short(text)}; expected a number", line=self.line
            ) from None

    def path(self) -> "list[_Element]":
        """Return the elements above it, the nearest first."""
        found, element = [], self.above
        while element is not None:
            found.append(element)
            element = element.above
        return found


def is_nccl_topology(text: str) -> bool:
    """Return whether a text is the XML of a topology of NCCL."""
    head = text.lstrip()[:4000]
    return head.startswith("<") and "<system" in head


def read_nccl_topology(text: str, known: Completion, *, name: str = "host0") -> Cluster:
    """Return the GPUs of the file, by rank or number, and their links.

    Raises:
        FormatError: It is no such file, or has no GPUs; knows the line.
        InvalidInputError: No type of the GPUs is given.
    """
    gpus = _gpus(_parse(text))
    host = FoundHost(name="host0", gpus=(FoundGpu(),) * len(gpus))

    def links_of(types: Sequence[DeviceType]) -> tuple[Level, ...] | LinkMatrix:
        return _links(gpus, types, known.catalogue)

    return inventory_cluster(name, [host], known, links_of=links_of)


def _parse(text: str) -> list[_Element]:
    """Return all elements of a text, in its order."""
    found: list[_Element] = []
    stack: list[_Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) >= _MOST_DEPTH:
            raise FormatError(
                f"nested more than {_MOST_DEPTH} levels deep", line=parser.CurrentLineNumber
            )
        above = stack[-1] if stack else None
        element = _Element(tag, attributes, parser.CurrentLineNumber, above)
        if above is not None:
            above.below.append(element)
        found.append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise FormatError("declarations (DOCTYPE) are not read", line=parser.CurrentLineNumber)

    parser = expat.ParserCreate("utf-8")  # the text is one, whatever it says of itself
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as exc:
        raise FormatError(f"not valid XML: {expat.ErrorString(exc.code)}", line=exc.lineno) from exc
    if not found or found[0].tag != "system":
        raise FormatError("it has no <system>; expected what NCCL_TOPO_DUMP_FILE writes")
    return found


def _gpus(elements: Sequence[_Element]) -> list[_Element]:
    """Return the GPUs in the order of their ranks, else of their numbers."""
    gpus = [element for element in elements if element.tag == "gpu"]
    if not gpus:
        raise FormatError(
            "it has no <gpu>: a template of a machine; expected what a run wrote to "
            "NCCL_TOPO_DUMP_FILE"
        )
    if len(gpus) > _MOST_GPUS:
        raise FormatError(f"it has {len(gpus)} GPUs; expected at most {_MOST_GPUS} of one host")
    return sorted(gpus, key=lambda gpu: (gpu.number("rank", 0), gpu.number("dev", 0)))


def _links(
    gpus: Sequence[_Element], types: Sequence[DeviceType], catalogue: Catalogue
) -> tuple[Level, ...] | LinkMatrix:
    """Return the links of the GPUs as NCCL counts them."""
    size = len(gpus)
    switched = [_nvlinks(gpu, None) for gpu in gpus]
    bandwidth, latency = np.zeros((size, size)), np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            if a == b:
                continue
            direct = _nvlinks(gpus[a], gpus[b])
            nvlink = direct or min(switched[a], switched[b])
            bandwidth[a, b] = nvlink or _pcie(gpus[a], gpus[b])
            own = catalogue.link_of(types[a])
            usual = own if nvlink or own.name.startswith("pcie") else catalogue.link_type("pcie4")
            latency[a, b] = usual.latency_s
    return infer_levels(bandwidth, latency, host_of=[0] * size, like=LIKE_GIVEN)


def _nvlinks(gpu: _Element, other: _Element | None) -> float:
    """Return bytes per second of the NVLinks to another GPU, or to switches (None)."""
    count = 0
    bus = _bus(other) if other is not None else ""
    for link in gpu.below:
        if link.tag != "nvlink":
            continue
        is_switch = link.attributes.get("tclass", "").lower() == _SWITCH_CLASS
        target = link.attributes.get("target", "").lower()
        if is_switch if other is None else (bool(bus) and target == bus and not is_switch):
            count += max(0, link.number("count", 1))
    return min(count, 1000) * nvlink_bytes_per_s(gpu.number("sm", 0))


def _bus(gpu: _Element) -> str:
    """Return the address of a GPU on its bus."""
    above = gpu.above
    return above.attributes.get("busid", "").lower() if above is not None else ""


def _pcie(one: _Element, other: _Element) -> float:
    """Return bytes per second of the slowest part of the way over PCI Express."""
    first, second = one.path(), other.path()
    shared = {id(element) for element in first} & {id(element) for element in second}
    way = [part for part in (*first, *second) if id(part) not in shared]
    rates = [_rate(part) for part in way if part.tag == "pci"]
    if not rates:
        raise FormatError("a GPU hangs on no <pci>", line=one.line)
    between_sockets = any(part.tag == "cpu" for part in way)
    return min(rates) * (SYSTEM_SHARE if between_sockets else 1.0)


def _rate(element: _Element) -> float:
    """Return bytes per second of a link of PCI Express, as NCCL counts it."""
    speed = element.attributes.get("link_speed", "")
    lane = _LANE.get(speed.split()[0]) if speed.split() else None
    if lane is None:
        raise FormatError(
            f"link_speed is {short(speed)}; expected such as '16.0 GT/s PCIe'", line=element.line
        )
    width = element.number("link_width", 0) or 16  # machines of clouds hide it
    if not 1 <= width <= 32:
        raise FormatError(f"link_width is {width}; expected 1 to 32", line=element.line)
    return width * lane / 80 * 1e9
