"""All formats in one table, and reading a file by what it holds, not by its name.

``FORMATS`` is the table: ``partita convert IN OUT --to NAME`` reads with ``read_any`` and writes
with ``write_as``. A foreign *plan* can only be read together with its problem.
"""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from partita.core.cluster import Cluster
from partita.core.codec import decode, format_of, parse_json, write_json
from partita.core.energy import EnergyProfile, Frontier
from partita.core.fleet import Trace
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError
from partita.formats.baechi import read_baechi, write_baechi
from partita.formats.baechi_plan import read_placement, write_placement
from partita.formats.dnn_partitioning import read_dnn_partitioning, write_dnn_partitioning
from partita.formats.dynamicml import (
    NPY_MAGIC,
    read_assignment,
    read_dynamicml,
    read_speed_matrix,
    write_assignment,
    write_dynamicml,
    write_speed_matrix,
)
from partita.formats.fleet_formats import FLEET_FORMATS, json_format, text_format
from partita.formats.form import Document, Format, Source
from partita.formats.perseus import read_energy_csv, write_energy_csv, write_frontier_csv
from partita.formats.pipedream import KEYS, read_pipedream, write_pipedream
from partita.formats.pipedream_plan import read_pipedream_plan, write_pipedream_plan
from partita.formats.piper import read_piper, write_piper
from partita.formats.piper_plan import read_piper_plan, write_piper_plan
from partita.formats.server_file import KEYWORD, OpenText, read_server_file, write_server_file
from partita.formats.split_plan import read_split, write_split
from partita.formats.synergy_cluster import is_synergy_cluster

GZIP_MAGIC = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 2**29
_YAML_KEY = re.compile(r"[A-Za-z_][\w-]*[ \t]*:(?:[ \t]|$)", re.ASCII)


def graph_of(value: Document) -> Graph:
    """Return the graph of a graph, problem or solution.

    Raises:
        InvalidInputError: It has none.
    """
    if isinstance(value, Graph):
        return value
    return problem_of(value, needed="a graph").graph


def problem_of(value: Document, *, needed: str = "a problem (graph and cluster)") -> Problem:
    """Return the problem of a problem or solution.

    Raises:
        InvalidInputError: It has none.
    """
    if isinstance(value, Problem):
        return value
    if isinstance(value, Solution):
        return value.problem
    raise InvalidInputError(f"this format holds {needed}, got a {type(value).__name__.lower()}")


def _cluster_of(value: Document) -> Cluster:
    return value if isinstance(value, Cluster) else problem_of(value, needed="a cluster").cluster


def _solved(value: Document) -> Solution:
    if isinstance(value, Solution):
        return value
    raise InvalidInputError(
        f"this format holds a plan; it is written from a solution, not from a "
        f"{type(value).__name__.lower()}"
    )


def _problem_format(
    title: str, read: Callable[..., Problem], write: Callable[[Problem], str]
) -> Format:
    return Format(
        title=title,
        read=lambda source: read(source.text, **({"name": source.name} if source.name else {})),
        write=lambda value: write(problem_of(value)),
    )


def _plan_format(
    title: str, read: Callable[[str, Problem], Plan], write: Callable[[Problem, Plan], str]
) -> Format:
    return Format(
        title=title,
        read=lambda source: read(source.text, source.for_problem(title)),
        write=lambda value: write(_solved(value).problem, _solved(value).plan),
    )


def _read_stages(source: Source) -> Graph | Plan:
    """Return the graph of a ``gpus=N.txt``, or with a problem its plan."""
    if source.problem is None:
        return read_pipedream(source.text, name=source.name or "graph")
    devices = source.problem.cluster.device_names
    return read_pipedream_plan(source.text, source.problem.graph, devices=devices)


FORMATS: Mapping[str, Format] = {
    "partita": Format(
        title="a document of Partita (JSON)",
        read=lambda source: decode(parse_json(source.text)),
        write=write_json,
    ),
    "pipedream": Format(
        title="PipeDream's profile graph.txt",
        read=lambda source: read_pipedream(source.text, name=source.name or "graph"),
        write=lambda value: write_pipedream(graph_of(value)),
    ),
    "pipedream-plan": Format(
        title="PipeDream's plan gpus=N.txt",
        read=_read_stages,
        write=lambda value: write_pipedream_plan(_solved(value).problem.graph, _solved(value).plan),
    ),
    "server-file": Format(
        title="SparsePipedream's server_file",
        read=lambda source: read_server_file(
            source.text, source.open_text, name=source.name or "servers"
        ),
        write=lambda value: write_server_file(problem_of(value)),
    ),
    "dnn-partitioning": _problem_format(
        "an input of dnn-partitioning", read_dnn_partitioning, write_dnn_partitioning
    ),
    "dnn-partitioning-plan": _plan_format("a split of dnn-partitioning", read_split, write_split),
    "piper": _problem_format("an input of Piper", read_piper, write_piper),
    "piper-plan": _plan_format("a plan of Piper", read_piper_plan, write_piper_plan),
    "dynamicml": _problem_format(
        "an instance of DynamicMLTrainer", read_dynamicml, write_dynamicml
    ),
    "dynamicml-plan": _plan_format(
        "an assignment of nodes to devices", read_assignment, write_assignment
    ),
    "dynamicml-speed": Format(
        title="DynamicMLTrainer's gpu_speed.npy",
        read=lambda source: read_speed_matrix(source.data, name=source.name or "dynamicml"),
        write=lambda value: write_speed_matrix(_cluster_of(value)),
    ),
    "baechi": _problem_format("a cost graph of Baechi", read_baechi, write_baechi),
    "baechi-plan": _plan_format("a placement of Baechi", read_placement, write_placement),
}


def _profile_of(value: Document) -> EnergyProfile:
    if isinstance(value, Frontier) and value.profile is not None:
        return value.profile
    if isinstance(value, EnergyProfile):
        return value
    raise InvalidInputError(f"this format holds an energy profile, got a {format_of(type(value))}")


def _frontier_of(value: Document) -> Frontier:
    if isinstance(value, Frontier):
        return value
    raise InvalidInputError(f"this format holds a frontier, got a {format_of(type(value))}")


def _read_points(_: Source) -> Document:
    raise FormatError(
        "these are times and energies without clocks, which are no document; 'partita energy "
        "compare' reads them as a frontier"
    )


ENERGY_FORMATS: Mapping[str, Format] = {
    "perseus-profile": Format(
        title="Perseus's profile.csv",
        read=lambda source: read_energy_csv(source.text, name=source.name or "profile"),
        write=lambda value: write_energy_csv(_profile_of(value)),
    ),
    "perseus-frontier": Format(
        title="Perseus's iteration_time_energy.csv",
        read=_read_points,
        write=lambda value: write_frontier_csv(_frontier_of(value)),
    ),
}
"""Formats that hold no graph and no plan."""

_HEADS: tuple[tuple[str, frozenset[str]], ...] = (
    ("perseus-profile", frozenset({"instruction", "frequency"})),
    ("perseus-profile", frozenset({"instruction", "power limit"})),
    ("perseus-frontier", frozenset({"time", "energy"})),
)
"""The columns that tell a table's format; the first that are all there hold."""

_JSON_SHAPES: tuple[tuple[str, frozenset[str]], ...] = (
    ("dnn-partitioning", frozenset({"nodes", "edges", "maxFPGAs"})),
    ("piper", frozenset({"nodes", "edges", "mbsInBatch"})),
    ("dynamicml", frozenset({"node_weights", "edges", "matrix"})),
    ("baechi", frozenset({"nodes", "edges", "devices"})),
    ("piper-plan", frozenset({"stages"})),
    ("dnn-partitioning-plan", frozenset({"fpgas"})),
    ("dnn-partitioning-plan", frozenset({"cpus"})),
    ("baechi-plan", frozenset({"placement"})),
    ("dynamicml-plan", frozenset({"parts"})),
    ("dynamicml-plan", frozenset({"assignment"})),
)
"""The keys that tell a JSON file's format; the first that are all there hold."""


def detect_format(data: bytes) -> str:
    """Return the name of the format that an unpacked file is in.

    Raises:
        FormatError: It is in none, is not text, or is broken JSON.
    """
    if data.startswith(NPY_MAGIC):
        return "dynamicml-speed"
    return _detect_text(_decoded(data))


def read_any(
    data: bytes,
    *,
    name: str = "",
    open_text: OpenText | None = None,
    problem: Problem | None = None,
    read_yaml: Callable[[str], Document] | None = None,
) -> Document:
    """Return what a file of any known format holds.

    Args:
        data: The file; it may be packed with gzip.
        name: What to call a graph or cluster that has no name of its own.
        open_text: Opens files that this one names (``server_file``), see ``open_beside``.
        problem: The problem that a foreign plan is for.
        read_yaml: Reads a YAML text (a cluster, which needs the catalogue); ``None`` = not known.

    Raises:
        FormatError: The file is in no known format, or breaks the rules of its own.
    """
    data = unpacked(data)
    if data.startswith(NPY_MAGIC):
        found, text = "dynamicml-speed", ""
    else:
        text = _decoded(data)
        if read_yaml is not None and _text_format(text) is None and _is_yaml(text):
            return read_yaml(text)
        found = _detect_text(text)
    if found == "dynamicml-plan" and _names_kinds(problem):
        found = "dnn-partitioning-plan"
    source = Source(
        data=data,
        text=text,
        name=name,
        open_text=_refuse_to_open if open_text is None else open_text,
        problem=problem,
    )
    try:
        return _known_formats()[found].read(source)
    except RecursionError as exc:
        raise FormatError("the file is nested too deeply") from exc


def write_as(value: Document, name: str) -> str | bytes:
    """Return a core object in a format.

    Raises:
        InvalidInputError: There is no such format, or it cannot hold this.
    """
    known = _known_formats()
    if name not in known:
        raise InvalidInputError(f"format {name!r} is not one of {', '.join(known)}")
    return known[name].write(value)


def _known_formats() -> dict[str, Format]:
    return {**FORMATS, **ENERGY_FORMATS, **FLEET_FORMATS}


def format_for(path: str, value: Document) -> str:
    """Return the format that a path asks for: by its ending, and by what is to be written.

    ``.npy`` is a speed matrix, ``.txt`` PipeDream's (a plan for a solution), ``.csv`` Perseus's (a
    frontier for a frontier) or Synergy's for a trace, ``.ini`` Synergy's cluster, all else ours.
    """
    ending = PurePath(path).suffix.lower()
    if ending == ".npy":
        return "dynamicml-speed"
    if ending == ".txt":
        return "pipedream-plan" if isinstance(value, Solution) else "pipedream"
    if ending == ".ini":
        return "synergy-cluster"
    if ending == ".csv" and isinstance(value, Trace):
        return "synergy-trace"
    if ending == ".csv":
        return "perseus-frontier" if isinstance(value, Frontier) else "perseus-profile"
    return "partita"


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


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise _unknown(f"byte 0x{data[exc.start]:02x} is not UTF-8 text", line) from exc


def _is_yaml(text: str) -> bool:
    """Return whether the first line with content is a key of a YAML mapping."""
    for line in text.splitlines():
        if line.strip() and line.lstrip()[0] != "#" and line.strip() != "---":
            return _YAML_KEY.match(line) is not None
    return False


def _text_format(text: str) -> str | None:
    """Return the format of a text by its first character or marks; ``None`` = not known."""
    if text.lstrip()[:1] in ("{", "["):
        return "synergy-cluster" if is_synergy_cluster(text) else "json"
    if f"{KEYS[0]}=" in text:
        return "pipedream-plan" if " -- stage_id=" in text else "pipedream"
    if text.lstrip().startswith(KEYWORD):
        return "server-file"
    head = {cell.strip() for cell in text.lstrip().partition("\n")[0].split(",")}
    found = next((name for name, columns in _HEADS if columns <= head), None)
    return found or text_format(text)


def _detect_text(text: str) -> str:
    found = _text_format(text)
    if found is not None:
        return _detect_json(parse_json(text)) if found == "json" else found
    if not text.strip():
        raise _unknown("the file is empty")
    if _is_yaml(text):
        raise _unknown("the file looks like YAML, which is read where a cluster is asked for")
    raise _unknown("the file is in no known format")


def _detect_json(value: Any) -> str:  # noqa: ANN401 (JSON is any value)
    fleet = json_format(value)
    if fleet is not None:
        return fleet
    if not isinstance(value, dict):
        raise _unknown("the JSON file holds a list; expected an object")
    if "format" in value:
        return "partita"
    for name, keys in _JSON_SHAPES:
        if keys <= value.keys():
            return name
    shown = ", ".join(map(repr, list(value)[:6])) or "none"
    raise _unknown(f"the JSON file has keys of no known format ({shown[:120]})")


def _names_kinds(problem: Problem | None) -> bool:
    return problem is not None and "dnn-partitioning" in problem.graph.annotations


def _refuse_to_open(path: str) -> str:
    raise FileNotFoundError(2, "files that this one names cannot be opened here", path)


def _unknown(reason: str, line: int = 0) -> FormatError:
    titles = "; ".join(form.title for form in _known_formats().values())
    return FormatError(f"{reason}; known are: {titles}", line=line)
