"""Names of hosts as Slurm writes them: ``n[1-3,07],gpu10``."""

import re
from collections.abc import Iterator

from partita.errors import InvalidInputError

_MOST = 100_000
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list, in its order.

    Raises:
        InvalidInputError: It is no such list, or one of more than 100,000 hosts.
    """
    if text in ("", "(null)", "None"):
        return ()
    hosts: list[str] = []
    for part in _parts(text):
        hosts += _expanded(part)
        if len(hosts) > _MOST:
            raise InvalidInputError(f"host list {text[:60]!r} has more than {_MOST} hosts")
    return tuple(hosts)


def _parts(text: str) -> Iterator[str]:
    """Yield what commas outside of brackets separate."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    if depth:
        raise InvalidInputError(f"host list {text[:60]!r} has a bracket that does not close")
    yield text[begin:]


def _expanded(part: str) -> list[str]:
    found = _BRACKET.search(part)
    if found is None:
        return [part] if part else []
    before, after = part[: found.start()], _expanded(part[found.end() :]) or [""]
    numbers: list[str] = []
    for each in found.group(1).split(","):
        numbers += _numbers(each)
        if len(numbers) * len(after) > _MOST:
            raise InvalidInputError(f"host list {part[:60]!r} has more than {_MOST} hosts")
    return [f"{before}{number}{rest}" for number in numbers for rest in after]


def _numbers(text: str) -> list[str]:
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or len(text) > 40:
        raise InvalidInputError(f"host list has {text[:40]!r}; expected numbers such as 1-4")
    last = int(high) if dash else int(low)
    if last - int(low) > _MOST:
        raise InvalidInputError(f"host list has more than {_MOST} hosts in {text[:40]!r}")
    return [str(number).zfill(len(low)) for number in range(int(low), last + 1)]


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``0-2,5``; none for an empty one.

    Raises:
        InvalidInputError: It is no such list.
    """
    return tuple(int(number) for part in text.split(",") if part for number in _numbers(part))
