"""Reading a file by what it holds, not by its name, and writing one by its ending or by a name.

The rows are those of ``table.FORMATS``, of plug-ins (entry points of the group ``partita.formats``)
and of the caller. What is built in cannot be replaced: a plug-in is asked about a file, and loaded,
only where no built-in row knows it.
"""

import gzip
import io
import logging
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

from partita.catalogue.inventory import Completion
from partita.core.problem import Problem
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.formats.format import (
    Document,
    Format,
    Holds,
    OpenText,
    Source,
    refuse_to_open,
)
from partita.formats.table import FORMATS
from partita.plugins import PluginGroup, guarded

logger = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 2**29
PLUGINS = PluginGroup(group="partita.formats", noun="format")
_YAML_KEY = re.compile(r"[A-Za-z_][\w-]*[ \t]*:(?:[ \t]|$)", re.ASCII)


def detect_format(data: bytes) -> str:
    """Return the name of the format that an unpacked file is in.

    Raises:
        FormatError: It is in none, is not text, or is broken JSON.
    """
    return detect(Source(data=data))[0]


def detect(
    source: Source, formats: Mapping[str, Format] = FORMATS, wanted: Collection[str] = ()
) -> tuple[str, Format]:
    """Return the name and the row of the format that a file is in.

    Args:
        source: The file.
        formats: The rows.
        wanted: Contents whose formats a message names, by ``Holds``; empty = any.

    Raises:
        FormatError: It is in none, is not text, or is broken JSON.
    """
    for name, form in _asked(formats):
        if not (source.is_text or form.is_binary):
            continue
        try:
            found = form.sniff(source)
        except UnsupportedError as exc:  # of a plug-in that nobody asked for
            logger.warning("%s", exc)
            continue
        if found:
            return name, form
    usable = (*wanted, Holds.ANYTHING)
    named = {name: form for name, form in formats.items() if not wanted or form.holds in usable}
    raise _no_format(source, named)


def _asked(formats: Mapping[str, Format]) -> Iterator[tuple[str, Format]]:
    """Yield the rows in the order in which they are asked about a file."""
    firm = [(name, form) for name, form in formats.items() if not form.is_fallback]
    yield from ((name, form) for name, form in firm if form.holds is not Holds.PLAN)
    yield from ((name, form) for name, form in firm if form.holds is Holds.PLAN)
    for name, loaded in PLUGINS.load_all().items():
        if isinstance(loaded, Format):
            yield name, _guarded(name, loaded)
        else:
            logger.warning("format %r is a plug-in and no partita.formats.format.Format", name)
    yield from ((name, form) for name, form in formats.items() if form.is_fallback)


def _guarded(name: str, form: Format) -> Format:
    """Return the row of a plug-in whose failures are one line that names it."""
    return replace(
        form,
        sniff=guarded("format", name, form.sniff),
        read=guarded("format", name, form.read),
        write=guarded("format", name, form.write),
    )


def _no_format(source: Source, formats: Mapping[str, Format]) -> FormatError:
    """Return why a file is of no format."""
    try:
        text = source.text
    except FormatError as exc:
        return _unknown(exc.reason, formats, exc.line)
    if source.begins_as_json:
        value = source.parse()  # raises where it is broken
        if not isinstance(value, dict):
            return _unknown("the JSON file holds a list; expected an object", formats)
        shown = ", ".join(map(repr, list(value)[:6])) or "none"
        return _unknown(f"the JSON file has keys of no known format ({shown[:120]})", formats)
    if not text.strip():
        return _unknown("the file is empty", formats)
    if looks_like_yaml(source):
        return _unknown(
            "the file looks like YAML, which is read where a cluster is asked for", formats
        )
    return _unknown("the file is in no known format", formats)


def _unknown(reason: str, formats: Mapping[str, Format], line: int = 0) -> FormatError:
    titles = "; ".join(form.title for form in formats.values())
    return FormatError(f"{reason}; known are: {titles}", line=line)


def looks_like_yaml(source: Source) -> bool:
    """Return whether the first line with content is a key of a YAML mapping."""
    for line in source.text.splitlines():
        if line.strip() and line.lstrip()[0] != "#" and line.strip() != "---":
            return _YAML_KEY.match(line) is not None
    return False


def read_any(
    data: bytes,
    *,
    name: str = "",
    open_text: OpenText = refuse_to_open,
    problem: Problem | None = None,
    completion: Completion | None = None,
    formats: Mapping[str, Format] = FORMATS,
    wanted: Collection[str] = (),
) -> Document:
    """Return what a file of any known format holds.

    Args:
        data: The file; it may be packed with gzip.
        name: Name for a graph or cluster that has no name of its own.
        open_text: Opens files that this one names (``server_file``), see ``open_beside``.
        problem: The problem that a foreign plan is for.
        completion: The catalogue, and what lists of hosts leave out.
        formats: The rows.
        wanted: Contents that the caller can use, by ``Holds``: messages name no other formats;
            empty = any.

    Raises:
        FormatError: The file is in no known format, or breaks the rules of its own.
    """
    source = Source(
        data=unpacked(data),
        name=name,
        open_text=open_text,
        problem=problem,
        completion=completion,
    )
    try:
        return detect(source, formats, wanted)[1].read(source)
    except RecursionError as exc:
        raise FormatError("the file is nested too deeply") from exc


def write_as(value: Document, name: str, formats: Mapping[str, Format] = FORMATS) -> str | bytes:
    """Return a core object in a format.

    Raises:
        InvalidInputError: There is no such format, or it cannot hold this.
    """
    form = formats.get(name)
    if form is None:
        loaded = PLUGINS.find(name)
        if not isinstance(loaded, Format):
            known = ", ".join([*formats, *PLUGINS.names()])
            raise InvalidInputError(f"format {name!r} is not one of {known}")
        form = _guarded(name, loaded)
    return form.write(value)


def format_for(path: str, value: Document, formats: Mapping[str, Format] = FORMATS) -> str:
    """Return the format that a path asks for: by its ending, and by what is to be written.

    ``.npy`` is a speed matrix, ``.txt`` PipeDream's (a plan for a solution), ``.csv`` Perseus's (a
    frontier for a frontier) or Synergy's for a trace, ``.ini`` Synergy's cluster, all else ours.
    """
    ending = PurePath(path).suffix.lower()
    rows = {name: form for name, form in formats.items() if ending in form.endings}
    for name, form in rows.items():
        if isinstance(value, form.writes_by_ending):
            return name
    return next((name for name, form in rows.items() if not form.writes_by_ending), "partita")


def unpacked(data: bytes) -> bytes:
    """Return a file without its gzip packing, if it has one.

    Raises:
        FormatError: The packing is broken, or holds more than 512 MiB.
    """
    if not data.startswith(GZIP_MAGIC):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            result = file.read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise FormatError(f"broken gzip file: {exc}") from exc
    if len(result) > MAX_UNPACKED_BYTES:
        raise FormatError(f"the gzip file holds more than {MAX_UNPACKED_BYTES} bytes")
    return result
