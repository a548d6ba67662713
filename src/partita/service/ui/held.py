"""Documents that the page has: uploaded ones, and those that came of its work.

They live as long as the server, in its memory; the oldest go where they would be too many. A
document is known by a digest of its content, so that an address that names one stays right.
"""

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from partita.errors import InvalidInputError
from partita.service.errors import printable

MOST_NAME = 120
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A document that the page has.

    Attributes:
        key: Digest of its kind and text.
        name: Its file's name: letters that any system takes.
        title: As people see it, whatever is in it.
        kind: What it holds: ``graph``, ``problem``, ``cluster``, ``solution``, ``frontier``, ...
        about: What it is, in a line.
        text: The document.
    """

    key: str
    name: str
    title: str
    kind: str
    about: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return what is known of it, without its text."""
        return {
            "id": self.key,
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "about": self.about,
            "bytes": len(self.text),
        }


def file_name(title: str) -> str:
    """Return a name for a file: no folders, and letters that mean nothing to any system.

    >>> file_name("../../etc/passwd"), file_name("\u202ea b.json"), file_name("..")
    ('passwd', 'a-b.json', 'document')
    """
    last = PureWindowsPath(PurePosixPath(title).name).name
    return _UNSAFE.sub("-", last).strip("-.")[:MOST_NAME] or "document"


class DocumentStore:
    """Documents by key, the latest ones.

    Args:
        most_bytes: Length of all texts together.
        most: Number of documents.
    """

    def __init__(self, most_bytes: int, most: int = 256) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._bytes = 0

    def add(self, title: str, kind: str, about: str, text: str) -> Held:
        """Keep a document, and return it as it is held."""
        key = hashlib.sha256(f"{kind}\n{text}".encode("utf-8", "replace")).hexdigest()[:24]
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        title = printable(title)[:2000]
        held = Held(
            key=key,
            name=file_name(title),
            title=title,
            kind=kind,
            about=printable(about)[:2000],
            text=text,
        )
        self._held[key] = held
        self._bytes += len(text)
        while len(self._held) > 1 and (
            self._bytes > self._most_bytes or len(self._held) > self._most
        ):
            self._bytes -= len(self._held.popitem(last=False)[1].text)
        return held

    def get(self, key: str) -> Held:
        """Return a document.

        Raises:
            InvalidInputError: It is not held, or no longer.
        """
        if key not in self._held:
            raise InvalidInputError(
                f"document {printable(key)[:40]!r} is not held here any more; upload it, or make "
                "it again"
            )
        self._held.move_to_end(key)
        return self._held[key]

    def listed(self) -> list[Held]:
        """Return all documents, the latest first."""
        return list(reversed(self._held.values()))
