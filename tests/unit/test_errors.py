import pickle

import pytest

from partita.errors import (
    FormatError,
    InfeasibleError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
    WorkerError,
)


def test_every_error_has_its_exit_code_and_one_ancestor():
    kinds = [PartitaError, InvalidInputError, FormatError, InfeasibleError]
    kinds += [UnsupportedError, WorkerError]
    assert [kind.exit_code for kind in kinds] == [1, 2, 2, 3, 4, 5]
    assert all(issubclass(kind, PartitaError) for kind in kinds)
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(FormatError, InvalidInputError)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({}, "op has memory -3"),
        ({"line": 14}, "line 14: op has memory -3"),
        ({"path": "graph.txt"}, "graph.txt: op has memory -3"),
        ({"path": "graph.txt", "line": 14}, "graph.txt:14: op has memory -3"),
    ],
)
def test_a_format_error_says_where(place, words):
    error = FormatError("op has memory -3", **place)
    assert str(error) == words
    assert (error.path, error.line) == (place.get("path", ""), place.get("line", 0))


def test_a_format_error_learns_its_file_later():
    error = FormatError("op has memory -3", line=14).at("graph.txt")
    assert str(error) == "graph.txt:14: op has memory -3"
    assert error.reason == "op has memory -3"


def test_a_format_error_survives_another_process():
    error = pickle.loads(pickle.dumps(FormatError("wrong", path="a", line=3)))
    assert (str(error), error.reason, error.path, error.line) == ("a:3: wrong", "wrong", "a", 3)
