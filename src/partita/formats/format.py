"""A row of the table of formats: how a file is recognised, read as a core object, and written."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.inventory import Completion
from partita.core.cluster import Cluster
from partita.core.codec import parse_json
from partita.core.energy import EnergyProfile, Frontier
from partita.core.fleet import FleetHistory, Sensitivity, Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Objective, Problem
from partita.core.program import Program
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.errors import FormatError

Document: TypeAlias = (
    Graph
    | Cluster
    | Objective
    | Problem
    | Plan
    | Solution
    | Program
    | Timeline
    | EnergyProfile
    | Frontier
    | Sensitivity
    | Trace
    | FleetHistory
)

OpenText: TypeAlias = Callable[[str], str]


class Holds(StrEnum):
    """Contents of the files of a format."""

    ANYTHING = "anything"
    GRAPH = "a graph"
    PROBLEM = "a graph and a cluster"
    PLAN = "a plan"
    CLUSTER = "a cluster"
    ENERGY_PROFILE = "an energy profile"
    FRONTIER = "a frontier"
    SENSITIVITY = "sensitivities of jobs"
    TRACE = "jobs"


def refuse_to_open(path: str) -> str:
    """Open no file that another one names."""
    raise FileNotFoundError(2, "files that this one names cannot be opened here", path)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, as the rows of the table see it; text and JSON are made once, when asked for.

    Attributes:
        data: The file, unpacked.
        name: Name for a graph or cluster that has no name of its own; may be empty.
        open_text: Opens files that this one names.
        problem: The problem that a plan is for, if known.
        completion: The catalogue, and what lists of hosts leave out.
    """

    data: bytes
    name: str = ""
    open_text: OpenText = refuse_to_open
    problem: Problem | None = None
    completion: Completion | None = None

    @property
    def known(self) -> Completion:
        """The catalogue, the package's own if none is given, and what lists of hosts leave out."""
        return self.completion or Completion(catalogue=load_catalogue())

    @cached_property
    def text(self) -> str:
        """The file as text, without a byte order mark.

        Raises:
            FormatError: It is not UTF-8; knows the line.
        """
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            line = self.data.count(b"\n", 0, exc.start) + 1
            reason = f"byte 0x{self.data[exc.start]:02x} is not UTF-8 text"
            raise FormatError(reason, line=line) from exc

    @cached_property
    def is_text(self) -> bool:
        """Whether the file is UTF-8 text."""
        try:
            return self.text is not None
        except FormatError:
            return False

    @cached_property
    def begins_as_json(self) -> bool:
        """Whether the text begins as a JSON object or list does; an INI file may, too."""
        return self.text.lstrip()[:1] in ("{", "[")

    @cached_property
    def json(self) -> Any:  # noqa: ANN401 (JSON is any value)
        """The value of a JSON text; ``None`` where it is none, or broken: see `parse`."""
        try:
            return self.parse() if self.begins_as_json else None
        except FormatError:
            return None

    def parse(self) -> Any:  # noqa: ANN401 (JSON is any value)
        """Return the value of a JSON text.

        Raises:
            FormatError: It is broken; knows the line.
        """
        return parse_json(self.text)

    @cached_property
    def first_line(self) -> str:
        """The first line with content."""
        return self.text.lstrip().partition("\n")[0]

    @cached_property
    def columns(self) -> frozenset[str]:
        """The cells of the first line: the columns of a table."""
        return frozenset(cell.strip() for cell in self.first_line.split(","))

    def has_keys(self, *keys: str) -> bool:
        """Return whether the file is a JSON object with these keys."""
        return isinstance(self.json, dict) and self.json.keys() >= set(keys)

    def for_problem(self, what: str) -> Problem:
        """Return the problem, or refuse a plan without one."""
        if self.problem is None:
            raise FormatError(f"this is {what}; give the problem (graph and cluster) it is for")
        return self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format. An entry point of the group ``partita.formats`` names one of these.

    Attributes:
        title: Name in a few words, with an article.
        holds: Contents of its files.
        sniff: Returns whether a file is of this format. The rows that hold no plan are asked first,
            then those that do, each in the order of the table; plug-ins and fallbacks come last.
        read: Returns the core object of a source.
        write: Returns the file of a core object; raises ``InvalidInputError`` for what it cannot
            hold.
        endings: Of file names (``.txt``) that stand for this format where something is written.
        writes_by_ending: Types for which the ending means this format and not the first one that
            has the ending without such types.
        is_binary: Whether it is asked about files that are no text, too; it sniffs at ``data``.
        is_fallback: Whether files are of this format only if they are of no other.
        is_listing: Whether its files list hosts whose GPUs the caller may have to name
            (``Source.known``).
    """

    title: str
    holds: Holds
    sniff: Callable[[Source], bool]
    read: Callable[[Source], Document]
    write: Callable[[Document], str | bytes]
    endings: tuple[str, ...] = ()
    writes_by_ending: tuple[type, ...] = ()
    is_binary: bool = False
    is_fallback: bool = False
    is_listing: bool = False
