"""Names: near ones for the messages about unknown ones, and texts of others on a terminal."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import pairwise

from partita.errors import InvalidInputError

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


def product_words(title: str) -> set[str]:
    """Return the words of a product's title, and each two that follow one another as one word.

    >>> sorted(product_words("NVIDIA_RTX-3090"))
    ['3090', 'nvidia', 'nvidiartx', 'rtx', 'rtx3090']
    """
    words = re.findall(r"[a-z0-9]+", title.lower())
    return {*words, *(a + b for a, b in pairwise(words))}


def same_product(name: str, titles: Iterable[str]) -> str | None:
    """Return the title among others' that means a type of GPU; ``None`` = none or several do.

    >>> same_product("a100", ["nvidia_a100_80gb", "v100"])
    'nvidia_a100_80gb'
    >>> same_product("a100-sxm-40gb", ["a100_40gb", "a100_80gb"])
    'a100_40gb'
    """
    known = list(dict.fromkeys(titles))
    if name in known:
        return name
    first, *others = re.findall(r"[a-z0-9]+", name.lower()) or [""]
    scores = {
        title: sum(word in words for word in others)
        for title in known
        if first in (words := product_words(title))
    }
    best = [title for title, score in scores.items() if score == max(scores.values())]
    return best[0] if len(best) == 1 else None


def _listing(choices: list[str]) -> str:
    shown = [choice[:_LONGEST] for choice in choices[:_SHOWN]]
    return ", ".join([*shown, *(["..."] if len(choices) > _SHOWN else [])]) or "none"


def escaped(text: str) -> str:
    r"""Return a text of somebody else in one line that a terminal shows as it is.

    Control characters, among them those that move the cursor or clear the screen, and those that
    turn the direction of writing or show nothing, are written out.

    >>> escaped("a\x1b[2Jb\n\u202e")
    'a\\x1b[2Jb\\n\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _written_out(c) for c in text)


def escaped_lines(text: str) -> str:
    r"""Return the lines of a text of somebody else as a terminal may show them.

    Line ends and tabs stay; a carriage return, which would write over a line, ends it.

    >>> escaped_lines("10 %\r20 %\r\nred \x1b[31m")
    '10 %\n20 %\nred \\x1b[31m'
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else _written_out(c) for c in lines)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def check_plain(text: str, what: str) -> None:
    """Refuse a name that a terminal could not show as it is.

    Raises:
        InvalidInputError: It has a control character, or one that turns the direction of writing.
    """
    if not text.isprintable():
        bad = next(c for c in text if not c.isprintable())
        raise InvalidInputError(
            f"{what} {short(escaped(text))} has the character {_written_out(bad)}, which terminals "
            "do not show; use others"
        )
