"""The exceptions that Partita raises on purpose.

Every message says what is wrong, where, the value, and what would do: lower case, no full stop.

PartitaError
  InvalidInputError   impossible input (also a ValueError)
    FormatError       a file; knows path and line
  InfeasibleError     no plan fits; which limit, by how much
  UnsupportedError    this machine or this install cannot; what to install
  WorkerError         a process died or hung
"""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath


class PartitaError(Exception):
    """Anything that Partita reports to its user in one line.

    Attributes:
        exit_code: What the command line exits with when this reaches it.
    """

    exit_code = 1


class InvalidInputError(PartitaError, ValueError):
    """An input that cannot be right."""

    exit_code = 2


class FormatError(InvalidInputError):
    """A file or text that cannot be read.

    Attributes:
        path: Name of the file, or empty for a bare text.
        line: Line number from 1, or 0 where there is none.
        reason: What is wrong, without the place.
    """

    def __init__(self, reason: str, *, path: str = "", line: int = 0) -> None:
        self.reason = reason
        self.path = path
        self.line = line
        place = f"{path}:{line}" if path and line else path or (f"line {line}" if line else "")
        super().__init__(f"{place}: {reason}" if place else reason)

    def at(self, path: str) -> "FormatError":
        """Return the same error with the name of the file it came from."""
        return FormatError(self.reason, path=path, line=self.line)


def reason_of(exc: BaseException) -> str:
    """Return why the system refused something, in its own words: ``permission denied``."""
    return (getattr(exc, "strerror", None) or str(exc) or type(exc).__name__).lower()


def unreadable(path: str | PathLike[str], exc: BaseException) -> FormatError:
    """Return the error of a file that the system does not let us read."""
    return FormatError(f"cannot be read: {reason_of(exc)}", path=fspath(path))


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Name a file in whatever goes wrong while it is opened and parsed.

    Raises:
        FormatError: It cannot be opened, or is not what it should be; knows the path.
    """
    try:
        yield
    except OSError as exc:
        raise unreadable(path, exc) from exc
    except FormatError as exc:
        raise (exc if exc.path else exc.at(fspath(path))) from exc


class InfeasibleError(PartitaError):
    """No plan keeps within the limits."""

    exit_code = 3


class UnsupportedError(PartitaError):
    """This machine or this installation cannot do it."""

    exit_code = 4


class WorkerError(PartitaError):
    """A worker process died or hung.

    Attributes:
        rank: The rank to blame; -1 = not known.
    """

    exit_code = 5
    rank = -1
