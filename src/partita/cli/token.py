"""The token that a server asks for and its clients show."""

import os
from pathlib import Path

from partita.errors import InvalidInputError


def read_token(file: Path | None) -> str:
    """Return the token; that of a file counts before that of the environment.

    Raises:
        InvalidInputError: The file has none, or cannot be read.
    """
    if file is None:
        return os.environ.get("PARTITA_TOKEN", "").strip()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"--token-file {file} cannot be read: {exc}") from exc
    if not token:
        raise InvalidInputError(f"--token-file {file} is empty")
    return token
