"""The token of a fleet: made on its first start, for the eyes of its user alone."""

import os
import secrets
import stat
from pathlib import Path

from partita.errors import InvalidInputError

TOKEN_FILE = "token"


def make_token(folder: Path) -> str:
    """Return the token in a fleet's folder; makes both where they are not there.

    The file has mode 0600 from its first instant and is whole or not there at all, so that a kill
    or a second process at any moment leaves a token that counts.

    Raises:
        InvalidInputError: The file cannot be made or read, or others may read it.
    """
    path = folder / TOKEN_FILE
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            _write_new(path, secrets.token_urlsafe(32))
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"token file {path} cannot be used: {exc}") from exc
    if mode & 0o077:
        raise InvalidInputError(
            f"token file {path} has mode {mode:04o}, so others may read it; remove it (a new one "
            "is made), or chmod 600"
        )
    if not token:
        raise InvalidInputError(f"token file {path} is empty; remove it, and a new one is made")
    return token


def _write_new(path: Path, token: str) -> None:
    """Write a file that nobody else may read; one that is there by now stays."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        # A link fails where the name is taken, a rename would replace the other's token.
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return
    finally:
        unfinished.unlink(missing_ok=True)
