"""What engines of clusters have in common: options as texts, a controller that may be away."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from partita.errors import InvalidInputError
from partita.fleet.engines.protocol import EngineAwayError
from partita.processes import retry_pause_s

_T = TypeVar("_T")


def read_options(engine: str, kind: type[_T], values: Mapping[str, str]) -> _T:
    """Return options that were given as texts: ``yes`` or ``no``, seconds, or any text.

    Args:
        engine: Name of the engine.
        kind: The dataclass of its options; the types of its fields say how each is read.
        values: Texts by name.

    Raises:
        InvalidInputError: There is no such option, or a value is wrong.
    """
    type_of: dict[str, Any] = {one.name: one.type for one in fields(kind)}  # type: ignore[arg-type]
    read: dict[str, str | bool | float] = {}
    for name, text in values.items():
        if name not in type_of:
            raise InvalidInputError(
                f"engine {engine} has no option {name!r}; it has {', '.join(sorted(type_of))}"
            )
        read[name] = text
        if type_of[name] is bool:
            if text not in ("yes", "no"):
                raise InvalidInputError(f"{name} is {text!r}; expected yes or no")
            read[name] = text == "yes"
        elif type_of[name] is float:
            read[name] = _seconds(name, text)
    return kind(**read)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError(f"{name} is {text!r}; expected seconds, more than 0")
    return value


@dataclass(slots=True, kw_only=True)
class Controller:
    """Whether the controller of a cluster answers, and when it is asked again where it does not.

    Attributes:
        noun: What answers, in messages.
        clock: Seconds that only grow.
        first_s: How long it is left alone after a first failure; twice as long after each more.
        longest_s: How long at most.
    """

    noun: str
    clock: Callable[[], float]
    first_s: float
    longest_s: float
    _failures: int = 0
    _until_s: float = 0.0
    _why: str = ""

    @property
    def pause_s(self) -> float:
        """Seconds until it is asked again; 0 = now."""
        return max(0.0, self._until_s - self.clock())

    @property
    def failure(self) -> str:
        """Why it cannot be asked now, in a line."""
        return f"{self.noun} is away, asked again in {self.pause_s:.0f} s: {self._why}"

    def failed(self, why: object) -> None:
        """Leave it alone for a while."""
        self._failures += 1
        self._why = str(why)
        self._until_s = self.clock() + retry_pause_s(
            self._failures, first_s=self.first_s, longest_s=self.longest_s
        )

    def answered(self) -> None:
        """Forget the failures."""
        self._failures, self._until_s, self._why = 0, 0.0, ""

    def away_error(self) -> EngineAwayError:
        """Return the error of a call that it did not answer."""
        return EngineAwayError(f"{self.noun} is away: {self._why}", self.pause_s)
