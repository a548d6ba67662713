"""Plug-ins: what other packages add to a table, found by entry points.

Every table of the package that others may add to has a group of entry points:

===========================  =====================================================
``partita.planners``         functions from a problem to a solution
``partita.schedules``        orders of a pipeline
``partita.objectives``       metrics
``partita.formats``          foreign files
``partita.fleet.orderings``  which job comes first
``partita.fleet.allocators`` who gets how much
``partita.fleet.engines``    who runs the jobs of a live fleet
``partita.fleet.simulators`` by which rules a trace is played
===========================  =====================================================

A table says once which group is its own, and asks it for names that it does not have itself:

    PLUGINS = PluginGroup(group="partita.fleet.orderings", noun="ordering")

    def find_ordering(name: str) -> Ordering:
        if name in ORDERINGS:
            return ORDERINGS[name]          # what is built in cannot be replaced
        found = PLUGINS.find(name)          # loads this one and no other
        if found is None:
            raise PLUGINS.unknown(name, ORDERINGS)
        return guarded("ordering", name, found)

Looking at names (``names``, ``unknown``) loads nothing. ``find`` loads the one that is named and
raises where that is broken, since it was asked for. ``load_all`` leaves broken ones out, with one
warning line each: what nobody asked for breaks nothing.

Rows of built-in things may name them in the same way, ``"package.module:attribute"``, and be loaded
by ``load_target`` when they are asked for, so that a table imports nothing.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.names import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


@functools.cache
def installed(group: str) -> "Mapping[str, EntryPoint]":
    """Return the entry points of a group by name, without loading any; looked up once."""
    # It costs more than most commands' own imports, and most need no plug-in.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {entry.name: entry for entry in entry_points(group=group)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginGroup:
    """The plug-ins of one table.

    Attributes:
        group: Name of the group of entry points.
        noun: The word for one of them in messages, such as ``planner``.
    """

    group: str
    noun: str

    def names(self) -> list[str]:
        """Return the names of the plug-ins that are installed; loads none."""
        return list(installed(self.group))

    def find(self, name: str) -> Any | None:  # noqa: ANN401 (the table says what it expects)
        """Return the plug-in of a name; ``None`` if there is none.

        Raises:
            UnsupportedError: It cannot be loaded.
        """
        entry = installed(self.group).get(name)
        if entry is None:
            return None
        try:
            return entry.load()
        except Exception as exc:  # loading runs the plug-in's own code, which may raise anything
            raise UnsupportedError(
                f"{self.noun} {name!r} is a plug-in, and {entry.value} cannot be loaded: "
                f"{str(exc) or type(exc).__name__}"
            ) from exc

    def load_all(self) -> dict[str, Any]:
        """Return all plug-ins by name; one that cannot be loaded is left out, with a warning."""
        found: dict[str, Any] = {}
        for name in self.names():
            try:
                found[name] = self.find(name)
            except UnsupportedError as exc:
                logger.warning("%s", exc)
        return found

    def unknown(self, name: str, built_in: Iterable[str]) -> InvalidInputError:
        """Return the error about a name that neither a table nor a plug-in has."""
        known = [*built_in, *self.names()]
        return InvalidInputError(f"there is no {self.noun} {name!r}{did_you_mean(name, known)}")


def guarded(
    noun: str, name: str, function: Callable[_P, _R], *, returns: type | None = None
) -> Callable[_P, _R]:
    """Return a plug-in's function whose own failures are one line that names the plug-in.

    Args:
        noun: The word for it in messages.
        name: Its name.
        function: The function.
        returns: What it must return; ``None`` = anything.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            found = function(*args, **kwargs)
        except PartitaError:
            raise
        except Exception as exc:
            raise UnsupportedError(
                f"{noun} {name!r} is a plug-in and failed: {type(exc).__name__}: {exc}"
            ) from exc
        if returns is not None and not isinstance(found, returns):
            raise UnsupportedError(
                f"{noun} {name!r} is a plug-in and returned no {returns.__name__}"
            )
        return found

    return call


def load_target(target: str) -> Any:  # noqa: ANN401 (whatever the row names)
    """Return what a row names as ``"package.module:attribute"``.

    >>> load_target("partita.units:parse_bytes").__name__
    'parse_bytes'
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


class OpenNames(StrEnum):
    """An enumeration of names to which plug-ins add theirs.

    The members are the names that code of this package speaks of. A name that a plug-in has is
    found by its value, ``Metric("mine")``, and is one object from then on, as members are; it is
    not among those that iteration gives. Looking for it loads nothing.
    """

    @classmethod
    def plugins(cls) -> PluginGroup:
        """Return the group of entry points that adds names."""
        raise NotImplementedError

    @classmethod
    def _missing_(cls, value: object) -> "OpenNames | None":
        if not isinstance(value, str) or value not in cls.plugins().names():
            return None
        found = str.__new__(cls, value)
        found._name_ = found._value_ = value
        cls._value2member_map_[value] = found
        return found


_Names = TypeVar("_Names", bound=OpenNames)


def named(kind: type[_Names], value: str) -> _Names:
    """Return the member of a name.

    Raises:
        InvalidInputError: Neither this package nor a plug-in has the name; suggests near ones.
    """
    try:
        return kind(value)
    except ValueError:
        raise kind.plugins().unknown(value, [member.value for member in kind]) from None
