"""What a driver and the agents of its run say to one another: a line of JSON each.

An agent says what happens on its host on standard output and is told what to do on standard input,
which is what ssh, srun and every other way to start a command hand through. Lines that are no
message (a greeting of a login shell) are passed over, so a message begins with a mark.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from partita.core.codec import decode_part, encode_part, parse_json
from partita.errors import FormatError

_MARK = b"partita> "


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent has come.

    Attributes:
        pid: Its process.
        hostname: The name that its host has for itself.
        loopback: Tells its 127.0.0.1 from those of others; empty = not known.
        port: A port of its host that is free.
    """

    pid: int
    hostname: str
    loopback: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The ranks of a host are to start.

    Attributes:
        index: Number of the host.
        names: Names of all hosts, by number.
        address: Where the first host is reached.
        port: The port of its store.
        files: Texts of the job directory by name.
        folder: Folder to run in, where the host has it.
        script: The user's script, where it is not there; empty = none is run.
        environment: Variables that the ranks have besides those of the host.
        restarts: How often the run is started again without a new checkpoint.
    """

    index: int
    names: tuple[str, ...]
    address: str
    port: int
    files: Mapping[str, str]
    folder: str = ""
    script: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The ranks are to stop at a step on which all agree, and save.

    Attributes:
        why: The reason.
    """

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The ranks are to end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """An agent lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some bytes of a file of the job directory, which follow those that were sent before.

    Attributes:
        path: The file, from the job directory.
        data: The bytes, in base64.
    """

    path: str
    data: str

    @classmethod
    def of(cls, path: str, data: bytes) -> "Chunk":
        """Return bytes of a file."""
        return cls(path=path, data=base64.b64encode(data).decode("ascii"))

    def content(self) -> bytes:
        """Return the bytes.

        Raises:
            FormatError: They are damaged.
        """
        try:
            return base64.b64decode(self.data, validate=True)
        except binascii.Error as exc:
            raise FormatError(f"bytes of {self.path} are damaged: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence for people.

    Attributes:
        text: The sentence.
    """

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The ranks of a host have ended well, and all files were sent.

    Attributes:
        ended: How the job has ended, as JSON of ``runtime.launch.Ended``.
    """

    ended: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The ranks of a host have ended because something failed.

    Attributes:
        error: The error, as ``ranks.failures.write_error`` writes it.
        rank: The rank to blame; -1 = not known.
    """

    error: str
    rank: int = -1


Message: TypeAlias = Hello | Start | Stop | End | Beat | Chunk | Remark | Done | Failed
_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Start, Stop, End, Beat, Chunk, Remark, Done, Failed)
}


def write_message(message: Message) -> bytes:
    """Return a message as a line."""
    values = [type(message).__name__, encode_part(message)]
    return _MARK + json.dumps(values).encode() + b"\n"


def read_message(line: bytes) -> Message | None:
    """Return the message of a line; None where it holds none.

    Raises:
        FormatError: It holds one that cannot be read.
    """
    if not line.startswith(_MARK):
        return None
    values = parse_json(line.removeprefix(_MARK).decode("utf-8", "replace"))
    if not isinstance(values, list) or len(values) != 2 or values[0] not in _KINDS:
        raise FormatError("a message of another version; install the same one on all hosts")
    return decode_part(values[1], _KINDS[values[0]], values[0])
