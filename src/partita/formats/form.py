"""What a file format is: how a source becomes a core object, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from partita.core.cluster import Cluster
from partita.core.energy import EnergyProfile, Frontier
from partita.core.fleet import FleetHistory, Sensitivity, Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Objective, Problem
from partita.core.program import Program
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.errors import FormatError
from partita.formats.server_file import OpenText

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a reader is given.

    Attributes:
        data: The file, unpacked.
        text: The file as text; empty for a binary one.
        name: What to call a graph or cluster that has no name of its own; may be empty.
        open_text: Opens files that this one names.
        problem: The problem that a plan is for, if known.
    """

    data: bytes
    text: str
    name: str
    open_text: OpenText
    problem: Problem | None

    def for_problem(self, what: str) -> Problem:
        """Return the problem, or refuse a plan without one."""
        if self.problem is None:
            raise FormatError(f"this is {what}; give the problem (graph and cluster) it is for")
        return self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format.

    Attributes:
        title: What it is, in a few words, with an article.
        read: Returns the core object of a source.
        write: Returns the file of a core object.
    """

    title: str
    read: Callable[[Source], Document]
    write: Callable[[Document], str | bytes]
