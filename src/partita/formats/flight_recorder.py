"""Dumps of torch's Flight Recorder: the last collectives and messages of a rank.

A dump is a pickle of plain values or JSON. The pickle is read with every class refused, so that a
file can make nothing but numbers, texts, lists and tables. Entries of gloo have no times, and their
state stays ``scheduled``: that they are ``retired`` says that they are done.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from partita.core.codec import parse_json
from partita.errors import FormatError
from partita.names import escaped, short

_RANK_IN_NAME = re.compile(r"(\d{1,6})(?:\.(?:json|pkl|pickle))?$")
_MESSAGE = re.compile(r"(send|recv)(?:_coalesced)?\s+(\d{1,7})\s*(?:->|<-)\s*(\d{1,7})")
_MOST_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A collective or a message that a rank issued.

    Attributes:
        group: Name of the process group.
        number: Its number in the group; of a message, its number among messages.
        name: Such as ``all_reduce``, ``send`` or ``recv``.
        sizes: Shapes of what goes in, as text.
        state: ``scheduled``, ``started`` or ``completed``.
        source: Rank that a message comes from; -1 = a collective.
        target: Rank that it goes to.
    """

    group: str
    number: int
    name: str
    sizes: str
    state: str
    source: int = -1
    target: int = -1

    @property
    def words(self) -> str:
        """What was called, with its shape."""
        way = f" {self.source}->{self.target}" if self.source >= 0 else ""
        return f"{self.name}{way} {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """The dump of a rank.

    Attributes:
        rank: The rank; -1 = its file does not say.
        groups: Ranks of each process group, by name; empty = not said.
        calls: What it issued, in order.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    calls: tuple[RecordedCall, ...]


class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 (that in C obeys huge numbers of memos)
    """Reads plain values alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse whatever is not plain."""
        raise FormatError(f"the pickle asks for {short(f'{module}.{name}')}; only values are read")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse what lies elsewhere."""
        raise FormatError(f"the pickle names something outside of it, {short(pid)}")


def read_flight_dump(data: bytes, *, name: str = "") -> FlightDump:
    """Return what a rank recorded.

    Args:
        data: The dump, as a pickle or JSON.
        name: Name of its file, which ends in the rank.

    Raises:
        FormatError: It is no dump, or has more than plain values.
    """
    value = _value(data)
    entries = value.get("entries")
    if not isinstance(entries, list | tuple) or len(entries) > _MOST_ENTRIES:
        raise FormatError("it has no list 'entries'; expected a dump of the Flight Recorder")
    found = _RANK_IN_NAME.search(name)
    rank = value.get("rank")
    rank = rank if isinstance(rank, int) else int(found.group(1)) if found else -1
    return FlightDump(
        rank=rank,
        groups=_groups(value.get("pg_config")),
        calls=tuple(_call(entry) for entry in entries if isinstance(entry, dict)),
    )


def _value(data: bytes) -> dict[str, Any]:
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            value = parse_json(data.decode("utf-8"))
        except UnicodeDecodeError as exc:
            raise FormatError("the dump is neither a pickle nor UTF-8 text") from exc
    else:
        try:
            value = _PlainUnpickler(io.BytesIO(data)).load()
        except FormatError:
            raise
        except Exception as exc:  # whatever broken bytes make of a pickle
            raise FormatError(f"the pickle is broken: {type(exc).__name__}") from exc
    if not isinstance(value, dict):
        raise FormatError("it holds no table; expected a dump of the Flight Recorder")
    return value


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group."""
    if not isinstance(config, dict):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for key, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        digits = re.findall(r"\d{1,7}", ranks[:1_000_000]) if isinstance(ranks, str) else ranks
        if isinstance(digits, list | tuple) and all(isinstance(d, str | int) for d in digits):
            found[str(key)] = tuple(int(d) for d in digits if str(d).isdecimal())
    return found


def _call(entry: Mapping[Any, Any]) -> RecordedCall:
    title = entry.get("profiling_name")
    name = escaped(str(title if isinstance(title, str) else "?")).rpartition(":")[2][:80]
    message = _MESSAGE.search(name)
    source = target = -1
    if message:
        ends = int(message.group(2)), int(message.group(3))
        # "send 0->1" is of rank 0; "recv 1<-0" of rank 1.
        source, target = ends if message.group(1) == "send" else ends[::-1]
        name = message.group(1)
    group = entry.get("process_group")
    own = group[0] if isinstance(group, list | tuple) and group else group
    is_done = entry.get("state") == "completed" or entry.get("retired") is True
    return RecordedCall(
        group=escaped(str(own if isinstance(own, str | int) else ""))[:80],
        number=_number(entry.get("p2p_seq_id" if message else "collective_seq_id")),
        name=name,
        sizes=_sizes(entry.get("input_sizes")),
        state="completed" if is_done else escaped(str(entry.get("state")))[:20],
        source=source,
        target=target,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**62 else 0


def _sizes(value: object) -> str:
    """Return shapes as text, such as ``[1000]``."""
    if not isinstance(value, list | tuple):
        return ""
    shapes = [
        f"[{', '.join(str(n) for n in shape[:8] if isinstance(n, int))}]"
        for shape in value[:4]
        if isinstance(shape, list | tuple)
    ]
    return " ".join(shapes)
