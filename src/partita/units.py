"""Quantities as people write them: ``"16GiB"`` to bytes, ``"5us"`` to seconds, and back."""

import math
import re
import sys
from decimal import Decimal, DecimalException

from partita.errors import InvalidInputError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}
_BYTE_UNITS = {f"{p}b": f for p, f in (_DECIMAL | _BINARY).items()} | {"": 1.0}
_BIT_UNITS = {f"{p}bit": f / 8 for p, f in (_DECIMAL | _BINARY).items()}
_RATE_UNITS = (
    {f"{u}/s": f for u, f in (_BYTE_UNITS | _BIT_UNITS).items() if u}
    | {f"{p}bps": f / 8 for p, f in _DECIMAL.items()}
    | {"": 1.0}
)
_COUNT_UNITS = {**_DECIMAL, "b": 1e9}
_MICRO = ("us", "\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s")
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "ns": 1e-9, "min": 60.0} | dict.fromkeys(_MICRO, 1e-6)
_LONG_TIMES = {
    spelling: seconds
    for seconds, spellings in (
        (60.0, ("min", "minute", "minutes")),
        (3600.0, ("h", "hour", "hours")),
        (86400.0, ("d", "day", "days")),
        (604800.0, ("week", "weeks")),
    )
    for spelling in spellings
}
_TOKENS = re.compile(
    r"\s*(?:tokens?|tok)?\s*(?:/\s*s(?:ec(?:ond)?)?|per\s+second)?\s*$", re.IGNORECASE
)
_DOLLARS = re.compile(r"^\s*(?:US)?\$\s*|\s*(?:\$|USD|dollars?)\s*$", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)")
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf)\s*([^\d\s]*)\s*")
_BITS_OR_BYTES = re.compile(r".*(?:b/[sS]|B[pP][sS])")


def _parse(
    text: object, units: dict[str, float], what: str, example: str, written: object = None
) -> float:
    """Return the value of a text; ``written`` is what messages show of it, where it was more."""
    shown = text if written is None else written
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InvalidInputError(f"{what} {shown!r} is not a number; write it like {example}")
    if isinstance(text, int) and abs(text) > sys.float_info.max:
        raise InvalidInputError(f"{what} of 309 digits or more is beyond the range of numbers")
    match = _QUANTITY.fullmatch(str(text))
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise InvalidInputError(
            f"{what} {_short(shown)} is not understood; write it like {example}"
        )
    if _BITS_OR_BYTES.fullmatch(match.group(2)):
        raise InvalidInputError(
            f"{what} {_short(shown)} may mean bits or bytes; write it like {example}"
        )
    if match.group(1) == "inf":
        return math.inf
    value = _product(match.group(1), factor)
    if not math.isfinite(value):
        raise InvalidInputError(f"{what} {_short(shown)} is beyond the range of numbers")
    if value < 0:
        raise InvalidInputError(f"{what} {_short(shown)} is negative; expected 0 or more")
    return value


def _product(number: str, factor: float) -> float:
    """Return a number times a factor by decimals, which keep ``5us`` at exactly 5e-6."""
    try:
        return float(Decimal(number) * Decimal(repr(factor))) + 0.0  # not -0.0
    except DecimalException:
        return math.inf


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def parse_bytes(text: object, what: str = "size") -> float:
    """Return bytes for ``16e9``, ``"16GB"`` (10^9) or ``"16GiB"`` (2^30).

    >>> parse_bytes("1.5GiB")
    1610612736.0
    """
    return _parse(text, _BYTE_UNITS, what, "16e9, 16GB or 16GiB")


def parse_bandwidth(text: object, what: str = "bandwidth") -> float:
    """Return bytes per second for ``1e9``, ``"25GB/s"``, ``"100Gbit/s"`` or ``"100Gbps"``.

    >>> parse_bandwidth("100Gbit/s")
    12500000000.0
    """
    return _parse(text, _RATE_UNITS, what, "1e9, 25GB/s or 100Gbit/s")


def parse_seconds(text: object, what: str = "time") -> float:
    """Return seconds for ``0.5``, ``"20us"``, ``"3ms"`` or ``"2min"``.

    >>> parse_seconds("20us")
    2e-05
    """
    return _parse(text, _TIME_UNITS, what, "0.5, 20us or 3ms")


def parse_count(text: object, what: str = "count") -> float:
    """Return a large number for ``15e12``, ``"15T"`` or ``"500k"``.

    >>> parse_count("15T")
    15000000000000.0
    """
    return _parse(text, _COUNT_UNITS, what, "15e12, 15T or 500k")


def parse_tokens(text: object, what: str = "tokens") -> float:
    """Return tokens, or tokens per second, for ``"2T"``, ``"2T tokens"`` or ``"500k tokens/s"``.

    >>> parse_tokens("500k tokens/s")
    500000.0
    """
    number = _TOKENS.sub("", text) if isinstance(text, str) else text
    return _parse(number, _COUNT_UNITS, what, "2T or 500k tokens/s", text)


def parse_money(text: object, what: str = "money") -> float:
    """Return US dollars for ``50000``, ``"$50k"``, ``"$50,000"`` or ``"1.5M USD"``.

    >>> parse_money("$50k")
    50000.0
    """
    number = text
    if isinstance(text, str):
        number = _DOLLARS.sub("", text)
        number = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), number)
    return _parse(number, _COUNT_UNITS, what, "50000, $50k or $1.5M", text)


def parse_duration(text: object, what: str = "time") -> float:
    """Return seconds for a time that people wait: ``"30 days"``, ``"12 h"`` or ``"2 weeks"``.

    A bare number is refused: it could be hours as well as days.

    >>> parse_duration("12 h")
    43200.0
    """
    return _parse(text, _LONG_TIMES, what, "12 h, 30 days or 2 weeks")


def format_bytes(value: float) -> str:
    """Return bytes for people, in powers of ten.

    >>> format_bytes(61.2e9)
    '61.2 GB'
    """
    return _scaled(value, ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")


def format_count(value: float) -> str:
    """Return a large count for people.

    >>> format_count(42800)
    '42.8 k'
    """
    return _scaled(value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")), "").strip()


def format_money(value: float) -> str:
    """Return US dollars for people.

    >>> format_money(48_213), format_money(2.5), format_money(1.27e6)
    ('$48,213', '$2.50', '$1.27 M')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"${format_count(value).replace(' G', ' B')}"
    return f"${value:,.0f}" if abs(value) >= 100 else f"${value:.2f}"


def format_duration(value: float) -> str:
    """Return a time that people wait for.

    >>> format_duration(30 * 86400), format_duration(7200), format_duration(90)
    ('30.0 days', '2.0 h', '90.0 s')
    """
    if not math.isfinite(value):
        return "-"
    for factor, unit in ((2 * 86_400.0, "days"), (7200.0, "h")):
        if abs(value) >= factor:
            each = 86_400.0 if unit == "days" else 3600.0
            return f"{value / each:,.1f} {unit}"
    return format_seconds(value)


def format_rate(value: float) -> str:
    """Return a rate for people; ``-`` where it is not known."""
    if not math.isfinite(value):
        return "-"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.1f}" if value < 1000 else format_count(value)


def format_joules(value: float) -> str:
    """Return an energy for people, with four significant digits or so.

    >>> format_joules(245100)
    '245.1 kJ'
    """
    if not math.isfinite(value):
        return "-"
    scale, unit = joule_unit(value)
    return f"{value / scale:.{_decimals(value / scale) + 1}f} {unit}"


def joule_unit(value: float) -> tuple[float, str]:
    """Return how many joules a unit that suits a value has, and its name."""
    units = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"))
    return next((pair for pair in units if abs(value) >= pair[0]), (1.0, "J"))


def format_seconds(value: float) -> str:
    """Return a time for people, with three significant digits or so.

    >>> format_seconds(0.00412)
    '4.12 ms'
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 36_000:
        return (
            f"{value / 3600:.{_decimals(value / 3600)}f} h"
            if abs(value) < 1e9
            else f"{value:.3g} s"
        )
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor:
            return f"{value / factor:.{_decimals(value / factor)}f} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def _scaled(value: float, steps: tuple[tuple[float, str], ...], unit: str) -> str:
    if not math.isfinite(value):
        return "-"
    for factor, name in steps:
        if abs(value) >= factor:
            return f"{value / factor:.{_decimals(value / factor)}f} {name}"
    return f"{value:.{_decimals(value) if value % 1 else 0}f} {unit}"


def _decimals(value: float) -> int:
    """Return how many decimals show a value with three significant digits, four from 1000 on."""
    return max(0, 2 - int(math.log10(max(1.0, abs(value)))))


def format_share(value: float, *, sign: bool = False) -> str:
    """Return a share for people, in percent; ``-`` where it is not known.

    >>> format_share(0.0512), format_share(0.25, sign=True)
    ('5.1 %', '+25 %')
    """
    if not math.isfinite(value):
        return "-"
    digits = 1 if abs(value) < 0.0995 else 0
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %"
