"""A list of scripts to profile: YAML whose keys are the options of ``partita fleet profile``."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from partita.errors import FormatError
from partita.names import suggest
from partita.yaml_nodes import (
    Items,
    Node,
    Table,
    at_line,
    parse_yaml,
    read_items,
    read_table,
    read_text,
)

_OWN = ("script", "args")


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job of a list.

    Attributes:
        line: Where it stands.
        words: Its options, script and arguments, as typed after ``partita fleet profile``.
    """

    line: int
    words: list[str]


def read_job_list(text: str, path: str, known: Collection[str]) -> list[ListedJob]:
    """Return the jobs of a list.

    ``jobs`` is a list of mappings with ``script``, ``args`` (a text or a list) and options;
    ``defaults`` holds options of all. Without ``job-name`` a job is called by its script.

    Args:
        text: The file.
        path: Its name, for errors.
        known: Names of the options, spelt with hyphens.

    Raises:
        FormatError: It is not such a list; knows the line.
    """
    try:
        root = read_table(parse_yaml(text), "the list", ("defaults", "jobs"))
        if "jobs" not in root.entries:
            raise FormatError("the key jobs is missing", line=root.line)
        shared: dict[str, str] = {}
        if "defaults" in root.entries:
            shared = _options(read_table(root.entries["defaults"], "defaults"), known)
        jobs = [_job(node, shared, known) for node in read_items(root.entries["jobs"], "jobs")]
        _check_names(jobs)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc
    return [job for job, _ in jobs]


def _job(node: Node, shared: Mapping[str, str], known: Collection[str]) -> tuple[ListedJob, str]:
    table = read_table(node, "a job")
    if "script" not in table.entries:
        raise FormatError("a job has no script", line=table.line)
    script = read_text(table.entries["script"], "script")
    options = {"job-name": _stem(script), **shared, **_options(table, known)}
    arguments = _arguments(table.entries["args"]) if "args" in table.entries else []
    words = [f"--{name}={value}" for name, value in options.items()]
    return ListedJob(table.line, [*words, "--", script, *arguments]), options["job-name"]


def _check_names(jobs: list[tuple[ListedJob, str]]) -> None:
    """Refuse two jobs of one name, whose results would be one job's."""
    seen: dict[str, int] = {}
    for job, name in jobs:
        if name in seen:
            raise FormatError(
                f"job {name!r} stands twice, first on line {seen[name]}; give one a job-name",
                line=job.line,
            )
        seen[name] = job.line


def _options(table: Table, known: Collection[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, node in table.entries.items():
        name = key.replace("_", "-")
        if key in _OWN:
            continue
        if len(name) < 2 or name not in known:
            line = table.line_of[key]
            raise FormatError(f"unknown key {key!r}{suggest(name, known)}", line=line)
        options[name] = read_text(node, key)
    return options


def _arguments(node: Node) -> list[str]:
    if isinstance(node, Items):
        return [read_text(part, "args") for part in node.nodes]
    with at_line(node.line):
        try:
            return shlex.split(read_text(node, "args"))
        except ValueError as exc:
            raise FormatError(f"args: {str(exc).lower()}", line=node.line) from exc


def _stem(script: str) -> str:
    return script.rpartition("/")[2].partition(".")[0] or "job"
