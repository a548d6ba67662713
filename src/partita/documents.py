"""Files: opening any that Partita reads, and writing its own whole or not at all."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from partita.atomic_files import write_atomically
from partita.catalogue.catalogue import Catalogue, load_catalogue
from partita.core.codec import write_json
from partita.core.problem import Problem
from partita.errors import FormatError, InvalidInputError, reason_of, unreadable

if TYPE_CHECKING:
    from partita.catalogue.inventory import Completion
    from partita.formats.format import Document, Format

CLUSTER_YAML = "cluster-yaml"
MAX_FILE_BYTES = 2**31
_PART_BYTES = 2**24


@cache
def formats() -> "Mapping[str, Format]":
    """Return the formats of files: the foreign ones, and YAML for clusters, which has a catalogue.

    They are imported here: a command that opens no file needs none of them.
    """
    from partita.catalogue.cluster_yaml.reader import read_cluster_yaml  # noqa: PLC0415
    from partita.catalogue.cluster_yaml.writer import write_cluster_yaml  # noqa: PLC0415
    from partita.formats import table  # noqa: PLC0415
    from partita.formats.detect import looks_like_yaml  # noqa: PLC0415
    from partita.formats.format import Format, Holds  # noqa: PLC0415

    def write_yaml(value: "Document") -> str:
        try:
            cluster = table.cluster_of(value)
        except InvalidInputError:
            kind = type(value).__name__.lower()
            problem = f"YAML holds a cluster, got a {kind}; name another format with --to"
            raise InvalidInputError(problem) from None
        return write_cluster_yaml(cluster)

    return {
        **table.FORMATS,
        CLUSTER_YAML: Format(
            title="a cluster (YAML)",
            holds=Holds.CLUSTER,
            sniff=looks_like_yaml,
            read=lambda source: read_cluster_yaml(source.text, source.known.catalogue),
            write=write_yaml,
            endings=(".yaml", ".yml"),
            is_fallback=True,
        ),
    }


@dataclass(frozen=True)
class OpenedFile:
    """A file whose bytes were read, once: standard input cannot be read again.

    Attributes:
        name: Its path; ``-`` = standard input.
        data: Its bytes.
    """

    name: str
    data: bytes

    def load(
        self,
        *,
        problem: Problem | None = None,
        completion: "Completion | None" = None,
        wanted: tuple[str, ...] = (),
    ) -> Any:  # noqa: ANN401 (any type)
        """Return the core object in it; see `load`.

        Args:
            problem: The problem that a foreign plan is for.
            completion: The catalogue, and what lists of hosts leave out.
            wanted: Contents that the caller can use, such as ``"a plan"``: messages name the
                formats of these alone; empty = any.

        Raises:
            FormatError: It holds nothing that is known.
        """
        from partita.formats.detect import read_any  # noqa: PLC0415 (see formats)
        from partita.formats.server_file import open_beside  # noqa: PLC0415 (likewise)

        try:
            return read_any(
                self.unpacked,
                name=_title(self.name),
                open_text=open_beside("" if self.name == "-" else self.name, _open_named),
                problem=problem,
                completion=completion,
                formats=formats(),
                wanted=wanted,
            )
        except FormatError as exc:
            raise self._placed(exc) from exc

    @property
    def format(self) -> str:
        """The name of the format it is in, by content.

        Raises:
            FormatError: It is in none.
        """
        return self.format_of()

    def format_of(self, wanted: tuple[str, ...] = ()) -> str:
        """Return the name of the format it is in; see `load` on what is wanted.

        Raises:
            FormatError: It is in none.
        """
        from partita.formats.detect import detect  # noqa: PLC0415 (see formats)
        from partita.formats.format import Source  # noqa: PLC0415 (likewise)

        try:
            return detect(Source(data=self.unpacked), formats(), wanted)[0]
        except FormatError as exc:
            raise self._placed(exc) from exc

    @property
    def is_listing(self) -> bool:
        """Whether it lists hosts whose GPUs the caller may have to name.

        Raises:
            FormatError: It is in no format.
        """
        row = formats().get(self.format)
        return row is not None and row.is_listing

    @cached_property
    def unpacked(self) -> bytes:
        """Its bytes without gzip packing.

        Raises:
            FormatError: The packing is broken.
        """
        from partita.formats.detect import unpacked  # noqa: PLC0415 (see formats)

        try:
            return unpacked(self.data)
        except FormatError as exc:
            raise self._placed(exc) from exc

    @property
    def text(self) -> str:
        """Its text in UTF-8, unpacked, without a byte order mark.

        Raises:
            FormatError: It is not text.
        """
        try:
            return self.unpacked.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise FormatError(f"is not UTF-8 text (byte {exc.start})", path=self.name) from exc

    def _placed(self, error: FormatError) -> FormatError:
        if error.path:
            return error
        return error.at("standard input" if self.name == "-" else self.name)


def open_file(path: str | Path) -> OpenedFile:
    """Read a file, or standard input for ``-``, for whoever looks at it more than once.

    Raises:
        FormatError: It cannot be read.
    """
    return OpenedFile(str(path), read_bytes(str(path)))


def load(path: str | Path, *, problem: Problem | None = None) -> Any:  # noqa: ANN401 (any type)
    """Return the core object in a file: a Partita document, or any foreign format that is known.

    The format is found by content, not by name. ``-`` reads standard input. A foreign plan needs
    the problem that it is for.

    Raises:
        FormatError: The file cannot be read, or holds nothing that is known.
    """
    return open_file(path).load(problem=problem)


def _title(name: str) -> str:
    """Return what to call a graph: the file's stem, or the folder of a plain ``graph.txt``."""
    stem = Path(name).name.split(".")[0]
    return Path(name).resolve().parent.name if stem == "graph" else stem.strip("-")


def save(value: object, path: str | Path) -> None:
    """Write the document of a core object to a file."""
    write_text(path, write_json(value))


def read_bytes(name: str) -> bytes:
    """Return the bytes of a file, or of standard input for ``-``.

    Raises:
        FormatError: It cannot be read.
    """
    if name == "-":
        return _read_stream(sys.stdin.buffer, "standard input")
    path = Path(name)
    try:
        if not name:
            raise FormatError("a file without a name cannot be read")
        if path.is_dir():
            raise FormatError("is a directory; expected a file", path=name)
        with path.open("rb") as file:
            return _read_stream(file, name)
    except FormatError:
        raise
    except (OSError, ValueError) as exc:
        raise unreadable(name, exc) from exc


def _read_stream(file: BinaryIO, name: str) -> bytes:
    """Return all bytes of a stream, which may be a device or pipe without an end."""
    parts, size = [], 0
    while part := file.read(_PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > MAX_FILE_BYTES:
            raise FormatError(f"is larger than {MAX_FILE_BYTES} bytes", path=name)
    return b"".join(parts)


def open_catalogue(path: str | None) -> Catalogue:
    """Return the catalogue, with a user's own file if there is one.

    Raises:
        FormatError: The file cannot be read or is wrong; knows path and line.
    """
    if path is None:
        return load_catalogue()
    try:
        return load_catalogue(read_text(path))
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc


def read_text(name: str) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises:
        FormatError: It cannot be read, or is not text.
    """
    return open_file(name).text


def _open_named(name: str) -> str:
    """Return the text of a file that another one names, or raise ``FileNotFoundError``."""
    if not Path(name).exists():
        raise FileNotFoundError(2, "no such file", name)
    return read_text(name)


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all; ``-`` writes to standard output.

    Raises:
        InvalidInputError: It cannot be written.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidInputError(
            f"{path} cannot be written: {text[exc.start]!r} has no UTF-8"
        ) from exc
    write_bytes(path, data)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it; a device or pipe is written to.

    A link is followed: what it leads to is written.

    Raises:
        InvalidInputError: It cannot be written.
    """
    try:
        target = Path(path).resolve()
        if target.exists() and not (target.is_file() or target.is_dir()):
            target.write_bytes(data)
        else:
            write_atomically(target, data)
    except (OSError, ValueError) as exc:
        reason = reason_of(exc)
        raise InvalidInputError(f"{path} cannot be written: {reason}") from exc


def unused_path(path: Path) -> Path:
    """Return the path, or the first numbered one that does not exist yet."""
    if not path.exists():
        return path
    # A dot in front, or within a number (llama-1.2b.plan.json), is part of the stem.
    ending = "".join(re.findall(r"(?<=.)((?:\.[A-Za-z]\w*)+)$", path.name))
    stem = path.name.removesuffix(ending)
    for number in range(2, 10_000):
        candidate = path.with_name(f"{stem}-{number}{ending}")
        if not candidate.exists():
            return candidate
    raise InvalidInputError(f"{path} and 9998 numbered ones exist; name another with -o")
