"""Where a run hangs, from dumps of the Flight Recorder: the last call that all sides agree on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.documents import read_bytes
from partita.errors import FormatError, InvalidInputError
from partita.flows.results import Result
from partita.formats.flight_recorder import FlightDump, RecordedCall, read_flight_dump

_SHOWN = 8
_HIDDEN = (".py", ".txt", ".log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the members of a group, or the ends of a pair, have come together.

    Attributes:
        who: The group with its ranks, or the pair.
        agreed: The last call that all issued alike and that is done everywhere; empty = none.
        waiting: What each rank says of the next one; empty = there is no next one.
    """

    who: str
    agreed: str
    waiting: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FlightReport(Result):
    """Dumps of ranks held against each other.

    Attributes:
        ranks: Ranks that have a dump.
        missing: Ranks of groups that have none.
        agreements: For each group and each pair; those that wait first.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    agreements: tuple[Agreement, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "agreements": [
                {
                    "who": one.who,
                    "agreed": one.agreed or None,
                    "waiting": {str(rank): words for rank, words in one.waiting.items()},
                }
                for one in self.agreements
            ],
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each group and pair."""
        return [
            {"who": one.who, "agreed": one.agreed or "nothing", "then": _then(one)}
            for one in self.agreements
        ]

    def lines(self) -> list[str]:
        """Return what each group and each pair last agreed on, and what came then."""
        lines = [f"dumps of ranks {_ranks(self.ranks)}"]
        if self.missing:
            lines[0] += f"; none of {_ranks(self.missing)}, which may be the ones that are lost"
        lines += [
            f"{one.who}: last agreed on {one.agreed or 'nothing'}{_then(one)}"
            for one in self.agreements[:_SHOWN]
        ]
        more = len(self.agreements) - _SHOWN
        return [*lines, f"... {more} more: --json has them"] if more > 0 else lines


def _then(one: Agreement) -> str:
    by_words: dict[str, list[int]] = defaultdict(list)
    for rank, words in one.waiting.items():
        by_words[words].append(rank)
    parts = [f"{_ranks(ranks)}: {words}" for words, ranks in by_words.items()]
    return f"; then {'; '.join(parts)}" if parts else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in few words: ``0-3, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "none"


def read_flight(directory: str | Path) -> FlightReport:
    """Hold the dumps of a directory, one per rank, against each other.

    Raises:
        InvalidInputError: There are none, or two of one rank.
        FormatError: A file is no dump; knows the path.
    """
    place = Path(directory)
    if not place.is_dir():
        raise InvalidInputError(f"{place} is no directory; expected one with a dump per rank")
    dumps: dict[int, FlightDump] = {}
    paths = sorted(path for path in place.iterdir() if path.is_file())
    for path in paths:
        if path.name.startswith(".") or path.suffix in _HIDDEN:
            continue
        try:
            dump = read_flight_dump(read_bytes(str(path)), name=path.name)
        except FormatError as exc:
            raise exc.at(str(path)) from exc
        if dump.rank < 0 or dump.rank in dumps:
            what = "no rank" if dump.rank < 0 else f"rank {dump.rank} again"
            raise InvalidInputError(f"{path} is of {what}; expected names that end in the rank")
        dumps[dump.rank] = dump
    if not dumps:
        raise InvalidInputError(f"{place} has no dumps; TORCH_FR_DUMP_TEMP_FILE says where they go")
    return compare_dumps(dumps)


def compare_dumps(dumps: Mapping[int, FlightDump]) -> FlightReport:
    """Return what groups and pairs of ranks last agreed on."""
    members: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for group, ranks in dump.groups.items():
            members[group] |= set(ranks)
        for call in dump.calls:
            if call.source < 0:
                members[call.group].add(rank)
    found = [
        _of_group(group, sorted(ranks), dumps)
        for group, ranks in members.items()
        if any(call.group == group and call.source < 0 for d in dumps.values() for call in d.calls)
    ]
    found += _of_pairs(dumps)
    found.sort(key=lambda one: not one.waiting)
    missing = {rank for ranks in members.values() for rank in ranks} - set(dumps)
    return FlightReport(
        ranks=tuple(sorted(dumps)), missing=tuple(sorted(missing)), agreements=tuple(found)
    )


def _of_group(group: str, ranks: Sequence[int], dumps: Mapping[int, FlightDump]) -> Agreement:
    """Return the last collective of a group that all have alike and done, and what came then."""
    calls: dict[int, dict[int, RecordedCall]] = {}
    for rank in ranks:
        own = dumps[rank].calls if rank in dumps else ()
        calls[rank] = {call.number: call for call in own if call.group == group and call.source < 0}
    there = [rank for rank in ranks if rank in dumps]
    numbers = sorted({number for rank in there for number in calls[rank]})
    agreed, waiting = "", {}
    for number in numbers:
        each = {rank: calls[rank].get(number) for rank in there}
        said = {rank: _said(call, calls[rank], number) for rank, call in each.items()}
        kept = [call for call in each.values() if call is not None]
        if any(
            call is None and number < min(calls[rank], default=0) for rank, call in each.items()
        ):
            continue  # older than what that rank still remembers
        alike = len({call.words for call in kept}) == 1 and len(kept) == len(each)
        if alike and all(call.state == "completed" for call in kept):
            agreed = f"#{number} {kept[0].words}"
            continue
        waiting = said
        break
    return Agreement(who=f"group {group} of ranks {_ranks(ranks)}", agreed=agreed, waiting=waiting)


def _said(call: RecordedCall | None, own: Mapping[int, RecordedCall], number: int) -> str:
    if call is not None:
        return f"#{number} {call.words} {call.state}"
    last = max(own, default=0)
    return f"never came to #{number}" + (f", its last is #{last} {own[last].words}" if own else "")


def _of_pairs(dumps: Mapping[int, FlightDump]) -> list[Agreement]:
    """Return the last message of each pair of ranks that both ends have done."""
    ends: dict[tuple[int, int], dict[str, list[RecordedCall]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for rank, dump in dumps.items():
        for call in dump.calls:
            if call.source >= 0 and rank == (call.source if call.name == "send" else call.target):
                ends[call.source, call.target][call.name].append(call)
    found = []
    for (source, target), sides in sorted(ends.items()):
        if source not in dumps or target not in dumps:
            continue
        sends, receives = sides["send"], sides["recv"]
        both = list(zip(sends, receives, strict=False))
        done = 0
        while done < len(both) and all(
            call.state == "completed" and call.sizes == both[done][0].sizes for call in both[done]
        ):
            done += 1
        waiting = {
            rank: f"{calls[done].words} {calls[done].state}" if done < len(calls) else "no more"
            for rank, calls in ((source, sends), (target, receives))
            if max(len(sends), len(receives)) > done
        }
        agreed = f"message {done} {both[done - 1][0].sizes}" if done else ""
        found.append(Agreement(who=f"{source}->{target}", agreed=agreed, waiting=waiting))
    return found
