"""The token that a server asks for and its clients show."""

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from partita.documents import write_text
from partita.errors import InvalidInputError
from partita.processes import TOKEN_VARIABLE

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def read_token(file: Path | None) -> str:
    """Return the token; that of a file counts before that of the environment.

    Raises:
        InvalidInputError: The file has none, or cannot be read.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"--token-file {file} cannot be read: {exc}") from exc
    if not token:
        raise InvalidInputError(f"--token-file {file} is empty")
    return token


def note_fleet(port: int, token_file: Path) -> None:
    """Note for this user's clients on this machine where the token of a fleet is.

    A folder that cannot be written to is no failure: clients then have to be told.
    """
    note = _note(port)
    with suppress(OSError, InvalidInputError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(note, f"{token_file.resolve()}\n")


def fleet_token(file: Path | None, server: str) -> str:
    """Return the token of a fleet: the one given, else the one that a fleet on this machine made.

    Raises:
        InvalidInputError: The file that was given has none, or cannot be read.
    """
    if token := read_token(file):
        return token
    with suppress(OSError, ValueError):
        address = urlsplit(server)
        if address.hostname in _LOOPBACK and address.port is not None:
            made = Path(_note(address.port).read_text(encoding="utf-8").strip())
            return made.read_text(encoding="ascii").strip()
    return ""


def _note(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "partita" / f"fleet-{port}"
