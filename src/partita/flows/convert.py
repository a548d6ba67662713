"""Between Partita's documents and foreign formats: what ``partita.convert`` does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.catalogue.examples import EXAMPLES
from partita.core.codec import format_of
from partita.core.plan import Plan
from partita.documents import formats, open_file, write_bytes, write_text
from partita.errors import InvalidInputError
from partita.flows.fields import ClusterFields, ObjectiveFields
from partita.flows.problem import completion_of, refuse_type
from partita.flows.results import Result
from partita.flows.solutions import bare_problem
from partita.formats.detect import format_for, write_as
from partita.formats.server_file import server_profiles
from partita.formats.table import problem_of
from partita.planners.pipeline import solution_of
from partita.requests import declare, make
from partita.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ConvertRequest(ClusterFields, ObjectiveFields):
    """A document or a foreign file, and what to write it as."""

    source: Any = declare("", is_argument=True, metavar="IN", help="File to read, or the object.")
    target: str = declare("", is_argument=True, metavar="OUT", help="File to write.")
    to: str | None = declare(
        None,
        help="Format to write; default by OUT's ending: .txt, .npy, .csv, .ini, .yaml, else ours.",
    )
    graph: str | None = declare(None, help="The graph (or problem) that IN is a plan for.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Conversion(Result):
    """A thing written in another format.

    Attributes:
        kind: What was read, such as ``"plan"``.
        format: The format that it was written in.
        content: What was written: text, or bytes of a binary format.
        written: Where to; empty = nowhere.
    """

    kind: str
    format: str
    content: str | bytes
    written: str

    def to_json(self) -> dict[str, Any]:
        """Return what was read and written as JSON values."""
        return {
            "read": self.kind,
            "format": self.format,
            "written": self.written,
            "bytes": len(self.content),
        }

    def lines(self) -> list[str]:
        """Return what was written where, in one line."""
        place = f" to {self.written}" if self.written else f", {format_bytes(len(self.content))}"
        return [f"{self.kind} written as {self.format}{place}"]


def convert(
    source: Any,  # noqa: ANN401 (a core object or a path)
    target: str = "",
    /,
    **options: Any,  # noqa: ANN401 (fields of ConvertRequest)
) -> Conversion:
    """Translate a file or an object into another format.

    The format of a file is found by its content, not by its name. A foreign plan needs the
    ``graph`` that it is for, and a ``cluster`` unless that file holds one.

    Args:
        source: The path of a file (``-`` is standard input), a built-in example, or the object.
        target: The path of the file to write; empty = none, the result holds the content.
        **options: The fields of :class:`ConvertRequest`: the options of ``partita convert``.

    >>> convert("chain201", to="partita").kind
    'problem'

    Raises:
        InvalidInputError: The format cannot hold it, or there is no such file or format.
    """
    return convert_request(make(ConvertRequest, source=source, target=target, **options))


def convert_request(request: ConvertRequest) -> Conversion:
    """Convert what a request asks for; see :func:`convert`."""
    problem = None if request.graph is None else bare_problem(request.graph, request)
    found: Any = request.source
    file = open_file(found) if isinstance(found, str) and found not in EXAMPLES else None
    if file is None or not file.is_listing:
        refuse_type(request)
    if file is not None:
        found = file.load(problem=problem, completion=completion_of(request))
    elif isinstance(found, str):
        found = EXAMPLES[found]()
    found = getattr(found, "solution", found)  # a result, such as that of partita.plan
    if isinstance(found, Plan) and problem is not None:
        found = solution_of(problem, found, "", {})
    name = request.to or format_for(request.target, found, formats())
    content = write_as(found, name, formats())
    if isinstance(content, bytes) and request.target == "-":
        raise InvalidInputError("a binary file cannot go to stdout; name a file")
    if request.target and isinstance(content, bytes):
        write_bytes(request.target, content)
    elif request.target and isinstance(content, str):
        if name == "server-file" and request.target != "-":
            _write_profiles(found, request.target)
        write_text(request.target, content)
    return Conversion(
        kind=format_of(type(found)).removeprefix("partita."),
        format=name,
        content=content,
        written=request.target,
    )


def _write_profiles(found: Any, target: str) -> None:  # noqa: ANN401 (a core object)
    """Write the profiles that a server file names beside it."""
    for path, text in server_profiles(problem_of(found)).items():
        place = Path(target).parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text)
