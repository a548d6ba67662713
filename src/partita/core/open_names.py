"""Names of tables that other packages may add to."""

from enum import StrEnum
from typing import TypeVar

from partita.plugins import PluginGroup


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
