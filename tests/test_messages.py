"""How messages are tested: their words in this one place, their facts wherever they are raised.

A test of a refusal asserts the class and the *facts* of the message: the name, value, limit, option
or place that is wrong, in their order, with two or three words at most that tell one reason from
another (``test_concepts.py`` counts them). How the sentences read that all parts share stands in
the gallery below; how every message of ours begins and ends is a rule, checked where the sentences
are written.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import partita
from partita import errors
from partita.core.cluster import Device
from partita.core.codec import decode, parse_json
from partita.core.columns import column, names
from partita.documents import load
from partita.errors import FormatError, InvalidInputError
from partita.flows.plan import PlanRequest
from partita.planners.table import get_planner
from partita.requests import make
from partita.units import parse_bytes, parse_seconds
from partita.yaml_nodes import parse_yaml, read_count, read_table, read_text

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PartitaError)
}
NAMES = ("Megatron", "Ray", "Ray's", "Slurm")
"""Words that begin with a capital wherever they stand."""

GALLERY: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: get_planner("uniforn"),
        InvalidInputError,
        "there is no planner 'uniforn'; did you mean 'uniform'?",
    ),
    (
        lambda: get_planner("uniform", stagse=2),
        InvalidInputError,
        "planner 'uniform' has no option 'stagse'; did you mean 'stages'?",
    ),
    (
        lambda: partita.plan("gpt-small", cluster="1xa100", planner="m-etf"),
        InvalidInputError,
        "planner 'm-etf' minimises makespan-parallel, makespan-sequential, not throughput; "
        "autopipe, auto do",
    ),
    (
        lambda: make(PlanRequest, model="m", cluster="2xa100", microbatches=0),
        InvalidInputError,
        "microbatches is 0; expected 1 or more",
    ),
    (
        lambda: Device(name="d", memory_bytes=-1),
        InvalidInputError,
        "device 'd': memory_bytes is -1; expected more than 0",
    ),
    (
        lambda: column([1.0, -1.0], np.float64, 2, "time", low=0),
        InvalidInputError,
        "time of row 1 is -1.0; expected 0 or more, finite",
    ),
    (
        lambda: names(["a", "b", "b"], "ops"),
        InvalidInputError,
        "ops: 'b' stands twice; names must be unique",
    ),
    (
        lambda: decode({"format": "partita.plan", "version": 99}),
        FormatError,
        "this partita.plan is of version 99, newer than the 1 that this Partita reads; "
        "upgrade Partita",
    ),
    (
        lambda: parse_json('{"a": 1, "a": 2}'),
        FormatError,
        "key 'a' stands twice in one object",
    ),
    (lambda: parse_json('{"a": '), FormatError, "line 1: not valid JSON: Expecting value"),
    (
        lambda: load("/nowhere/plan.json"),
        FormatError,
        "/nowhere/plan.json: cannot be read: no such file or directory",
    ),
    (
        lambda: parse_bytes("3 GX"),
        InvalidInputError,
        "size '3 GX' is not understood; write it like 16e9, 16GB or 16GiB",
    ),
    (
        lambda: parse_seconds("soon", "latency"),
        InvalidInputError,
        "latency 'soon' is not understood; write it like 0.5, 20us or 3ms",
    ),
    (
        lambda: read_table(parse_yaml("memroy: 1\n"), "a group", ("memory", "speed")),
        FormatError,
        "line 1: a group: unknown key 'memroy'; did you mean 'memory'? known are memory, speed",
    ),
    (
        lambda: read_count(parse_yaml("x"), "count", low=1, high=8),
        FormatError,
        "line 1: count is 'x'; expected a whole number from 1 to 8",
    ),
    (
        lambda: read_text(parse_yaml("[1]"), "name"),
        FormatError,
        "line 1: name is a list; expected a text",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), GALLERY, ids=[row[2] for row in GALLERY])
def test_shared_sentences_read_as_in_the_gallery(
    call: Callable[[], object], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert type(refused.value) is kind
    assert str(refused.value) == sentence


def sentences() -> Iterator[tuple[str, str, str]]:
    """Yield where an error of ours is made, and the first and the last text of its message."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in KINDS and node.args:
                message = node.args[0]
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                ends = [part.value if isinstance(part, ast.Constant) else "" for part in parts]
                if ends and isinstance(message, (ast.Constant, ast.JoinedStr)):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield place, str(ends[0]), str(ends[-1])


def why_bad(first: str, last: str) -> str:
    """Return what is wrong with a message that begins and ends so; empty = nothing."""
    word = first.split(" ", maxsplit=1)[0].rstrip(":,")
    if word[:1].isupper() and word not in NAMES and not re.search("[A-Z0-9_]", word[1:]):
        return "begins with a capital"
    if last.endswith(".") and not last.endswith("..."):
        return "ends with a full stop"
    return "calls itself an error" if re.match("[a-z]* ?error:", first.lower()) else ""


def test_every_message_begins_and_ends_as_the_conventions_say() -> None:
    found = list(sentences())
    assert len(found) > 1000
    assert [(place, why_bad(*ends)) for place, *ends in found if why_bad(*ends)] == []


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        ("No such plan", "No such plan", "begins with a capital"),
        ("NNODES is 0", "expected 1 or more", ""),
        ("op 'a' is bad", "leave it out.", "ends with a full stop"),
        ("expected 0, 1, ...", "expected 0, 1, ...", ""),
        ("Error: nothing", "nothing", "begins with a capital"),
        ("error: nothing", "nothing", "calls itself an error"),
    ],
)
def test_the_rule_of_messages_finds_what_breaks_it(first: str, last: str, why: str) -> None:
    assert why_bad(first, last) == why
