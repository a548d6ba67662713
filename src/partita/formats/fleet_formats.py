"""Formats of fleets: Synergy's profiles, traces and clusters, and logs of submissions.

A trace names its models only, a log not even those: both need sensitivities, so that they are told
here but read where these are given (``partita fleet trace``, ``partita fleet simulate``).
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from partita.core.cluster import Cluster
from partita.core.codec import format_of
from partita.core.fleet import Sensitivity, Trace
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError
from partita.formats.form import Document, Format, Source
from partita.formats.philly_csv import is_submission_head
from partita.formats.synergy import read_cluster, write_trace
from partita.formats.synergy_cluster import is_synergy_cluster, write_cluster_ini
from partita.formats.synergy_profile import (
    is_synergy_profile,
    read_synergy_profile,
    write_synergy_profile,
)

_TRACE_LINE = re.compile(r"\d+,[^,\s][^,]*,[0-9.eE+-]+,\d+,\d+\s*")
_BROKEN_TRACE_LINE = re.compile(r"\d+,\s*[A-Za-z][^,]*(,[^,]*){2,4}")
"""A number, a name and about as many cells as there are fields: the reader says what is wrong."""
_MATRICES = frozenset({"cpu_axis_per_gpu", "mem_axis_gb_per_gpu", "sets"})


def text_format(text: str) -> str | None:
    """Return the fleet's format of a text that is no JSON; ``None`` = it has none."""
    first = text.lstrip().partition("\n")[0]
    if _TRACE_LINE.fullmatch(first):
        return "synergy-trace"
    if is_submission_head({cell.strip() for cell in first.split(",")}):
        return "submissions"
    if is_synergy_cluster(text):
        return "synergy-cluster"
    return "synergy-trace" if _BROKEN_TRACE_LINE.fullmatch(first) else None


def json_format(value: Any) -> str | None:  # noqa: ANN401 (JSON is any value)
    """Return the fleet's format of a JSON value; ``None`` = it has none."""
    if is_synergy_profile(value):
        return "synergy-profile"
    if isinstance(value, dict):
        return "synergy-models" if value.keys() >= _MATRICES else None
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "philly" if value[0].keys() >= {"attempts", "submitted_time"} else None
    return None


def _refuse(what: str, instead: str) -> NoReturn:
    raise FormatError(f"this is {what}; {instead}")


def _needs_models(what: str) -> NoReturn:
    _refuse(
        what,
        "'partita fleet trace FILE --profiles SENSITIVITIES -o trace.json' makes it a document",
    )


def _cannot_write(what: str) -> NoReturn:
    raise InvalidInputError(f"{what} can be read only")


def _trace_of(value: Document) -> Trace:
    if isinstance(value, Trace):
        return value
    raise InvalidInputError(f"this format holds a trace, got a {format_of(type(value))}")


def _sensitivity_of(value: Document) -> Sensitivity:
    if isinstance(value, Sensitivity):
        return value
    raise InvalidInputError(f"this format holds a sensitivity, got a {format_of(type(value))}")


def _cluster_of(value: Document) -> Cluster:
    if isinstance(value, Solution):
        value = value.problem
    if isinstance(value, Problem):
        value = value.cluster
    if isinstance(value, Cluster):
        return value
    raise InvalidInputError(f"this format holds a cluster, got a {format_of(type(value))}")


def _read_profile(source: Source) -> Sensitivity:
    return read_synergy_profile(source.text, name=source.name or "job")


FLEET_FORMATS: Mapping[str, Format] = {
    "synergy-profile": Format(
        title="a profile.json of Synergy's profiler",
        read=_read_profile,
        write=lambda value: write_synergy_profile(_sensitivity_of(value)),
    ),
    "synergy-trace": Format(
        title="a trace of Synergy (CSV)",
        read=lambda _: _needs_models("a trace of Synergy"),
        write=lambda value: write_trace(_trace_of(value)),
    ),
    "synergy-cluster": Format(
        title="a cluster of Synergy (INI)",
        read=lambda source: read_cluster(source.text, name=source.name or "cluster"),
        write=lambda value: write_cluster_ini(_cluster_of(value)),
    ),
    "synergy-models": Format(
        title="Synergy's matrices of models",
        read=lambda _: _refuse(
            "a file of several sensitivities", "name it with --profiles of 'partita fleet'"
        ),
        write=lambda _: _cannot_write("matrices of models"),
    ),
    "philly": Format(
        title="a job log of Philly",
        read=lambda _: _needs_models("a log of submissions"),
        write=lambda _: _cannot_write("a log of submissions"),
    ),
    "submissions": Format(
        title="a table of submissions (CSV)",
        read=lambda _: _needs_models("a log of submissions"),
        write=lambda _: _cannot_write("a log of submissions"),
    ),
}
