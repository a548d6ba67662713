"""Near names, for the error messages about unknown ones."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 60
_COMPARED = 1000
_SHOWN = 40


def short(value: object) -> str:
    """Return how a value looks in a message, cut to a length that fits a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown one was probably meant to be; ``None`` = none is near.

    >>> nearest("memroy", ["memory", "speed"])
    'memory'
    """
    near = get_close_matches(name, list(known), n=1)
    return near[0] if near else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: what was meant, and what there is.

    >>> suggest("memroy", ["memory", "speed"])
    "; did you mean 'memory'? known are memory, speed"
    """
    choices = list(known)
    near = get_close_matches(name[:_LONGEST].lower(), choices[:_COMPARED], n=3, cutoff=0.6)
    asked = f"; did you mean {' or '.join(map(short, near))}?" if near else ";"
    shown = [
        *(choice[:_LONGEST] for choice in choices[:_SHOWN]),
        *(["..."] if len(choices) > _SHOWN else []),
    ]
    return f"{asked} known are {', '.join(shown) or 'none'}"
