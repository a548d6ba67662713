"""What ``nvidia-smi`` prints of one machine: its table, ``topo -m``, ``--query-gpu``, ``-L``.

A file may hold one of them or several, one after the other. ``topo -m`` says how GPUs are joined
and not what they are: names and memory come from the others, else the caller gives the type. A
cell is ``NVk`` (k links of NVLink), ``PIX``, ``PXB``, ``PHB``, ``NODE`` (PCI Express, ever longer
ways) or ``SYS`` (between sockets; ``SOC`` in old versions). Columns of network cards and of
affinities are left out. Nothing here is a bandwidth: those of links are the catalogue's, of single
NVLinks as NCCL counts them, and a way between sockets is taken to have half the rate of PCIe.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from partita.catalogue.catalogue import Catalogue, DeviceType
from partita.catalogue.hierarchy import LIKE_GIVEN, infer_levels
from partita.catalogue.inventory import Completion, FoundGpu, FoundHost, inventory_cluster
from partita.core.cluster import Cluster, Level, LinkMatrix
from partita.errors import FormatError, InvalidInputError
from partita.names import short

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Za-z0-9]")
_GPU = re.compile(r"GPU(\d{1,4})")
_CELL = re.compile(r"X|NV(\d{1,3})|PIX|PXB|PHB|NODE|SYS|SOC|PSB|N/A")
_LISTED = re.compile(r"GPU\s+(\d{1,4}):\s*(.+?)\s*\(UUID:.*", re.IGNORECASE)
_LISTED_SLICE = re.compile(r"\s+MIG\s+(\S+)\s+Device\s+\d+:.*", re.IGNORECASE)
_TABLED = re.compile(  # | 0  NVIDIA A100-SXM4-80GB  On | 00000000:07:00.0 Off | ...
    r"\|\s+(\d{1,4})\s+(\S.*?)(?:\s+(?:On|Off|N/A|TCC|WDDM))?\s*\|"
    r"\s+[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+\s.*"
)
_TABLED_MEMORY = re.compile(r"\|.*\|\s*\d+MiB\s*/\s*(\d{1,9})MiB\s*\|.*")
_TABLED_MIG = re.compile(r"\|.*\|.*\|\s+Enabled\*?\s*\|")
_DIVIDED = "MIG"
_MEMORY = re.compile(r"\[?(\d{1,12})(?:\s*MiB)?\]?")
_QUERY_COLUMNS = frozenset({"index", "uuid", "pci.bus_id", "memory.total", "gpu_uuid", "gpu_name"})
_FAILED = "Failed to run topology matrix"
_MOST_GPUS = 256
_LONGEST = 4000
"""Characters of a line; a matrix of all GPUs has fewer."""
_MIB = 2**20
SYSTEM_SHARE = 0.5
"""Rate of a way between sockets, as a share of that of PCI Express."""
_FULL_LINKS = {"nvlink2": 6, "nvlink3": 12, "nvlink4": 18, "nvlink5": 18}
"""Links of a GPU that the figure of a link in the catalogue is of."""
_GENERATIONS = (
    (("p100",), 60),
    (("v100", "titanv", "rtx2080", "t4"), 70),
    (("a100",), 80),
    (("a40", "a10", "rtx3"), 86),
    (("h100", "h200", "gh200", "l4", "rtx4", "rtx6000-ada"), 90),
    (("b200", "b300", "gb200", "gb300", "rtx5", "rtx-pro"), 100),
)
_PCIE = {60: "pcie3", 70: "pcie3", 80: "pcie4", 86: "pcie4", 90: "pcie5", 100: "pcie5"}


def nvlink_bytes_per_s(capability: int) -> float:
    """Return the rate of one NVLink in one direction by compute capability, as NCCL counts it."""
    for least, rate in ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0)):
        if capability >= least:
            return rate * 1e9
    return 20.0e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiText:
    """What was found in a text.

    Attributes:
        cells: The cells of the matrix among GPUs, row by row; empty = there is none.
        gpus: The GPUs by number, with names and memory where those are said.
    """

    cells: tuple[tuple[str, ...], ...]
    gpus: tuple[FoundGpu, ...]


def is_nvidia_smi(text: str) -> bool:
    """Return whether a text has a matrix of GPUs, a table of them or a list of them."""
    if _FAILED in text[:10_000]:
        return True
    lines = _lines(text[:100_000])
    has_matrix = any(_is_head(words) for words in map(str.split, lines))
    return has_matrix or any(
        _columns(line) or _LISTED.fullmatch(line.strip()) or _TABLED.fullmatch(line)
        for line in _narrow(lines)
    )


def read_nvidia_smi(text: str, known: Completion, *, name: str = "host0") -> Cluster:
    """Return the GPUs of one machine and their links.

    Raises:
        FormatError: The matrix is broken; knows the line.
        InvalidInputError: The types of the GPUs are not known.
    """
    found = read_smi_text(text)
    host = FoundHost(name="host0", gpus=found.gpus)
    if len(found.cells) < 2:
        return inventory_cluster(name, [host], known)
    return inventory_cluster(
        name,
        [host],
        known,
        links_of=lambda types: _links(found.cells, types, known.catalogue),
    )


def read_smi_text(text: str) -> SmiText:
    """Return the matrix and the GPUs of a text.

    Raises:
        FormatError: There are none, or they contradict each other.
    """
    lines = _lines(text)
    cells = _matrix(lines)
    narrow = _narrow(lines)
    titled = {**_tabled(narrow), **_listed(narrow), **_queried(lines)}
    if not cells and not titled:
        why = "nvidia-smi could not make its matrix" if _FAILED in text else "no GPUs are in it"
        raise FormatError(f"{why}; expected what nvidia-smi topo -m or --query-gpu prints")
    count = len(cells) or max(titled) + 1
    missing = [number for number in range(count) if number not in titled]
    if titled and (missing or len(titled) != count):
        what = f"GPU{missing[0]} is not among them" if missing else f"{len(titled)} are listed"
        raise FormatError(f"the matrix has {count} GPUs and {what}")
    return SmiText(
        cells=cells, gpus=tuple(titled.get(number, FoundGpu()) for number in range(count))
    )


def _lines(text: str) -> list[str]:
    """Return the lines without the codes that colour or underline them; none that is too long."""
    return _narrow([line.rstrip() for line in _ANSI.sub("", text).splitlines()], _LONGEST)


def _narrow(lines: Sequence[str], most: int = 300) -> list[str]:
    """Return the lines; empty ones for those that patterns would take long for."""
    return [line if len(line) <= most else "" for line in lines]


def _is_head(words: Sequence[str]) -> bool:
    """Return whether words are the head of a matrix: GPU0, and nothing of numbers before it."""
    return bool(words) and words[0] == "GPU0" and not any(_CELL.fullmatch(word) for word in words)


def _matrix(lines: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the cells among GPUs, row by row."""
    start = next((at for at, line in enumerate(lines) if _is_head(line.split())), None)
    if start is None:
        return ()
    gpus = [word for word in lines[start].split() if _GPU.fullmatch(word)]
    if len(gpus) > _MOST_GPUS or gpus != [f"GPU{number}" for number in range(len(gpus))]:
        raise FormatError(
            f"columns {short(' '.join(gpus))}; expected GPU0, GPU1, ...", line=start + 1
        )
    rows: list[tuple[str, ...]] = []
    for at, line in enumerate(lines[start + 1 :], start + 2):
        first, *cells = line.split() or [""]
        if not _GPU.fullmatch(first) or len(rows) == len(gpus):
            continue
        if first != gpus[len(rows)]:
            raise FormatError(f"row {first}; expected {gpus[len(rows)]}", line=at)
        row = tuple(cells[: len(gpus)])
        bad = [cell for cell in row if not _CELL.fullmatch(cell)]
        if bad or len(row) < len(gpus) or row[len(rows)] != "X":
            shown = short(bad[0]) if bad else short(" ".join(row))
            raise FormatError(
                f"row {first} has {shown}; expected {len(gpus)} cells such as NV12, PIX or SYS, "
                "and X for itself",
                line=at,
            )
        rows.append(row)
    if len(rows) < len(gpus):
        raise FormatError(f"the matrix has {len(rows)} rows for {len(gpus)} GPUs", line=start + 1)
    return tuple(rows)


def _columns(line: str) -> tuple[str, ...]:
    """Return the columns of the head of a table of GPUs; none of another line."""
    cells = tuple(cell.split("[")[0].strip().lower() for cell in line.split(","))
    has_name = "name" in cells or "gpu_name" in cells
    return cells if has_name and _QUERY_COLUMNS & set(cells) else ()


def _queried(lines: Sequence[str]) -> dict[int, FoundGpu]:
    """Return the GPUs of a table as CSV, by number."""
    start = next((at for at, line in enumerate(lines) if _columns(line)), None)
    if start is None:
        return {}
    columns = _columns(lines[start])
    found: dict[int, FoundGpu] = {}
    for at, line in enumerate(lines[start + 1 :], start + 2):
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        if len(cells) != len(columns):
            break
        row = dict(zip(columns, cells, strict=True))
        number = row.get("index", str(len(found)))
        if not (number.isdecimal() and int(number[:6]) < _MOST_GPUS):
            raise FormatError(f"index {short(number)}; expected a number", line=at)
        memory = _MEMORY.fullmatch(row.get("memory.total", ""))
        title = row.get("name") or row.get("gpu_name", "")
        if row.get("mig.mode.current", "").lower() == "enabled":
            title = f"{title} {_DIVIDED}"
        found[int(number)] = FoundGpu(
            title="" if title.startswith("[") else title,  # [N/A], [Not Supported]
            memory_bytes=float(memory.group(1)) * _MIB if memory else 0.0,
        )
    return found


def _listed(lines: Sequence[str]) -> dict[int, FoundGpu]:
    """Return the GPUs of ``nvidia-smi -L`` by number; one that is divided has a part's name."""
    found: dict[int, FoundGpu] = {}
    for line in lines:
        match, part = _LISTED.fullmatch(line.strip()), _LISTED_SLICE.fullmatch(line)
        if match and int(match.group(1)) < _MOST_GPUS:
            found[int(match.group(1))] = FoundGpu(title=match.group(2))
        elif part and found:
            last = max(found)
            whole = found[last].title.partition(" MIG ")[0]
            found[last] = FoundGpu(title=f"{whole} MIG {part.group(1)[:40]}")
    return found


def _tabled(lines: Sequence[str]) -> dict[int, FoundGpu]:
    """Return the GPUs of the table that ``nvidia-smi`` alone prints; long names end in dots."""
    found: dict[int, FoundGpu] = {}
    last = -1
    for line in lines:
        match = _TABLED.fullmatch(line)
        if match and int(match.group(1)) < _MOST_GPUS:
            last = int(match.group(1))
            found[last] = FoundGpu(title=match.group(2).rstrip(". "))
        elif last >= 0 and (memory := _TABLED_MEMORY.fullmatch(line)):
            found[last] = replace(found[last], memory_bytes=float(memory.group(1)) * _MIB)
        elif last >= 0 and _TABLED_MIG.fullmatch(line):
            found[last] = replace(found[last], title=f"{found[last].title} {_DIVIDED}")
        elif not line.startswith("|"):
            last = -1
    return found


def _links(
    cells: Sequence[Sequence[str]], types: Sequence[DeviceType], catalogue: Catalogue
) -> tuple[Level, ...] | LinkMatrix | None:
    """Return the links of a matrix; None = the usual ones: all are alike, and there is no more."""
    size = len(cells)
    apart = {cells[a][b] for a in range(size) for b in range(size) if a != b}
    own = catalogue.link_of(types[0])
    if len({kind.name for kind in types}) == 1 and apart == {f"NV{_FULL_LINKS.get(own.name, 0)}"}:
        return None
    bandwidth, latency = np.zeros((size, size)), np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            if a != b:
                ways = [_link(cells[a][b], types[end], catalogue) for end in (a, b)]
                bandwidth[a, b] = min(rate for rate, _ in ways)
                latency[a, b] = max(delay for _, delay in ways)
    return infer_levels(bandwidth, latency, host_of=[0] * size, like=LIKE_GIVEN)


def _link(cell: str, kind: DeviceType, catalogue: Catalogue) -> tuple[float, float]:
    """Return bytes per second and seconds of the way that a cell names, from a GPU of a type."""
    own = catalogue.link_of(kind)
    capability = next((number for names, number in _GENERATIONS if kind.name.startswith(names)), 80)
    number = _CELL.fullmatch(cell)
    if number is not None and number.group(1):
        links = int(number.group(1))
        if links == 0:
            raise InvalidInputError("NV0 is no link")
        full = _FULL_LINKS.get(own.name)
        single = own.bandwidth_bytes_per_s / full if full else nvlink_bytes_per_s(capability)
        nvlink = own if full else catalogue.link_type("nvlink3")
        return links * single, nvlink.latency_s
    pcie = own if own.name.startswith("pcie") else catalogue.link_type(_PCIE[capability])
    share = SYSTEM_SHARE if cell in ("SYS", "SOC", "N/A") else 1.0
    return share * pcie.bandwidth_bytes_per_s, pcie.latency_s
