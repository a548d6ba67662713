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
    near = get_close_matches(name[:_LONGEST], list(known)[:_COMPARED], n=1)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: what was meant, else what there is.

    >>> did_you_mean("unifrom", ["single", "uniform"]), did_you_mean("x", ["single", "uniform"])
    ("; did you mean 'uniform'?", '; there are single, uniform')
    """
    choices = list(known)
    near = nearest(name, choices)
    return f"; did you mean {short(near)}?" if near else f"; there are {_listing(choices)}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: what was meant, and what there is.

    >>> suggest("memroy", ["memory", "speed"])
    "; did you mean 'memory'? known are memory, speed"
    """
    choices = list(known)
    near = get_close_matches(name[:_LONGEST].lower(), choices[:_COMPARED], n=3, cutoff=0.6)
    asked = f"; did you mean {' or '.join(map(short, near))}?" if near else ";"
    return f"{asked} known are {_listing(choices)}"


def _listing(choices: list[str]) -> str:
    shown = [choice[:_LONGEST] for choice in choices[:_SHOWN]]
    return ", ".join([*shown, *(["..."] if len(choices) > _SHOWN else [])]) or "none"
