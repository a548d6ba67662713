"""Which failure of several ranks is the cause, and what is said of it."""

import json
import re
import signal
from pathlib import Path

import pytest

from partita.errors import FormatError, InvalidInputError, WorkerError
from partita.ranks.failures import (
    Failure,
    PeerError,
    as_partita_error,
    error_of,
    first_cause,
    read_error,
    write_error,
)

OWN = Failure(rank=1, error=InvalidInputError("rank 1: wrong"), exit_code=2)
LOST = Failure(rank=0, error=PeerError("rank 0 lost rank 1"), exit_code=5)
STALLED = Failure(rank=2, exit_code=5)
KILLED = Failure(rank=3, exit_code=-signal.SIGKILL)
ENDED = Failure(rank=4, exit_code=-signal.SIGTERM)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([LOST, STALLED, KILLED, OWN], OWN),
        ([LOST, STALLED, KILLED], KILLED),
        ([LOST, STALLED, ENDED], STALLED),
        ([LOST, ENDED], LOST),
        ([ENDED, LOST], ENDED),
    ],
)
def test_the_first_cause_is_found(failures: list[Failure], cause: Failure) -> None:
    assert first_cause(failures) is cause


def test_an_error_of_a_rank_keeps_its_kind() -> None:
    assert error_of(OWN) is OWN.error


def test_a_death_says_where_and_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(9)))
    failure = Failure(rank=3, exit_code=-signal.SIGKILL, log=log)
    error = error_of(failure, culprit="rank 9 waits", where="at step 1", stands="  rank 3 stood")
    assert isinstance(error, WorkerError)
    lines = str(error).splitlines()
    assert lines[0] == "rank 3 was killed by SIGKILL at step 1"
    assert lines[1:6] == [f"  rank 3 said: line {number}" for number in range(4, 9)]
    assert lines[6] == "  rank 3 stood"


def test_of_a_rank_that_waited_too_long_the_one_it_waited_for_comes_first() -> None:
    text = str(error_of(STALLED, culprit="rank 1 stands still", where="at step 2"))
    assert text.splitlines() == ["rank 1 stands still", "rank 2 ended with exit code 5 at step 2"]


@pytest.mark.parametrize(
    ("exc", "kind", "text"),
    [
        (KeyError("x"), WorkerError, "rank 3: KeyError: 'x'"),
        (InvalidInputError("wrong"), InvalidInputError, "rank 3: wrong"),
        (FormatError("bad", path="f"), InvalidInputError, "rank 3: f: bad"),
        (PeerError("rank 3 lost one"), PeerError, "rank 3 lost one"),
    ],
)
def test_errors_of_ranks_name_them_and_survive_a_file(
    exc: Exception, kind: type, text: str
) -> None:  # fmt: skip
    error = as_partita_error(3, exc)
    assert (type(error), str(error)) == (kind, text)
    again = read_error(write_error(error))
    assert (type(again), str(again)) == (kind, text)


def test_an_error_of_a_users_code_names_its_line_and_the_log(tmp_path: Path) -> None:
    try:
        json.loads("{")  # raised in Python's own modules, called from here
    except ValueError as exc:
        error = as_partita_error(3, exc)
    assert re.search(r"rank 3: JSONDecodeError: .* \(.*test_failures\.py:\d+\)$", str(error))
    whole = error_of(Failure(rank=3, error=error, log=tmp_path / "rank3.log"))
    assert f"rank 3 printed: {tmp_path / 'rank3.log'}" in str(whole)
