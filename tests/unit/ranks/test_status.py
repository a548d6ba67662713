"""Where ranks stand, and which of them holds up the others."""

import threading
import time
from pathlib import Path

import pytest

from partita.core.problem import Objective, Problem
from partita.core.program import Kind, Program
from partita.program.lower import lower
from partita.ranks.status import (
    Phase,
    Place,
    RankStatus,
    StatusBoard,
    StatusView,
    agree_on_stop,
    culprit,
    describe,
    place_of,
)
from partita.testing.builders import chain, flat_cluster, pipeline

SECOND = 1_000_000_000


@pytest.fixture
def program() -> Program:
    """Two stages on two devices, two microbatches."""
    graph, cluster = chain(4), flat_cluster(2)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    return lower(problem, pipeline(graph, cluster, [0, 1], microbatches=2))


def row_of(program: Program, device: int, kind: Kind) -> int:
    rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
    return next(row for row in rows if program.kind[row] == kind)


def line_of(
    row: int, awaited: int = -1, *, stands_s: float = 3.0, silent_s: float = 0.0, step: int = 1
) -> RankStatus:
    now = time.perf_counter_ns()
    since, beat = now - round(stands_s * SECOND), now - round(silent_s * SECOND)
    return RankStatus(row, awaited, since, step, beat, Phase.STEPS, 1)


RANKS = {0: 0, 1: 1}


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "board"
    StatusBoard(2, path).write(1, Place(7, 3, 11), 5, phase=Phase.OPEN, pid=42)
    line = StatusBoard(2, path).read(1)
    assert line[:4] == (7, 3, 11, 5)
    assert (line.phase, line.pid) == (Phase.OPEN, 42)
    assert StatusBoard(2, path).read(0).phase is Phase.ABSENT


def test_a_place_is_written_without_the_rest_of_the_line() -> None:
    board = StatusBoard(2)
    board.write(1, Place(7, 3, 11), 5, pid=42)
    line = board.place_line(1)
    line[0], line[1], line[2] = Place(8, -1, 12)
    assert board.read(1)[:4] == (8, -1, 12, 5)
    assert board.read(1).pid == 42
    assert board.read(0).phase is Phase.ABSENT


def test_only_a_rank_that_should_write_can_be_frozen() -> None:
    board = StatusBoard(3)
    board.write(0, Place(-1, -1, 0), -1, phase=Phase.IDLE)
    board.write(1, Place(1, -1, 0), 0)
    assert board.frozen(range(3), 60.0) == []
    assert board.frozen(range(3), 0.0) == [1]


def test_a_rank_without_a_sign_of_life_is_to_blame(program: Program) -> None:
    receive, backward = row_of(program, 0, Kind.RECV), row_of(program, 0, Kind.BACKWARD)
    lines = {
        0: line_of(backward, receive),
        1: line_of(row_of(program, 1, Kind.FORWARD), silent_s=2.5),
    }
    text = culprit(lines, program, RANKS)
    assert text.startswith("rank 1 stands still, without a sign of life for 2.5 s")
    assert "step 1, d1: FORWARD(stage 1, microbatch 0)" in text


def test_a_rank_that_computes_is_to_blame_if_the_others_wait(program: Program) -> None:
    receive, backward = row_of(program, 0, Kind.RECV), row_of(program, 0, Kind.BACKWARD)
    lines = {0: line_of(backward, receive), 1: line_of(row_of(program, 1, Kind.FORWARD))}
    assert culprit(lines, program, RANKS).startswith(
        "the others wait for rank 1: rank 1 has been at step 1, d1: FORWARD(stage 1, microbatch 0)"
    )


def test_ranks_that_ended_together_are_not_blamed_for_their_silence(program: Program) -> None:
    receive, backward = row_of(program, 0, Kind.RECV), row_of(program, 0, Kind.BACKWARD)
    lines = {
        0: line_of(backward, receive, silent_s=30.0),
        1: line_of(row_of(program, 1, Kind.FORWARD), silent_s=30.05),
    }
    assert culprit(lines, program, RANKS).startswith("the others wait for rank 1")


def test_a_rank_of_another_host_that_is_waited_for_is_named(program: Program) -> None:
    receive, backward = row_of(program, 0, Kind.RECV), row_of(program, 0, Kind.BACKWARD)
    text = culprit({0: line_of(backward, receive)}, program, RANKS)
    assert text.startswith("rank 1, which runs on another host, does not answer; rank 0 at step 1")


def test_nobody_is_to_blame_if_all_wait_for_one_another(program: Program) -> None:
    lines = {
        device: line_of(row_of(program, device, Kind.BACKWARD), row_of(program, device, Kind.RECV))
        for device in range(2)
    }
    assert culprit(lines, program, RANKS) == ""


def test_a_view_lists_what_every_rank_does(program: Program) -> None:
    board = StatusBoard(2)
    board.write(0, Place(row_of(program, 0, Kind.FORWARD), -1, time.perf_counter_ns()), 3)
    lines = StatusView(board, program, range(2)).all().splitlines()
    assert lines[0].startswith("  rank 0 has been at step 3, d0: FORWARD(stage 0, microbatch 0)")
    assert lines[1] == "  rank 1 has not started"


@pytest.mark.parametrize(
    ("phase", "words"),
    [(Phase.BUILD, "builds its model"), (Phase.AGREE, "compares with the others what will travel")],
)
def test_what_comes_before_the_steps_is_named(
    program: Program, phase: Phase, words: str
) -> None:  # fmt: skip
    line = RankStatus(-1, -1, 0, -1, 1, phase, 1)
    assert describe(line, 4, program) == f"rank 4 {words}"
    assert place_of(line, program) == f"while it {words}"


def test_a_rank_between_steps_says_so(program: Program) -> None:
    line = line_of(-1, step=6)
    assert describe(line, 0, program) == "rank 0 has been between steps, after step 6, for 3.0 s"
    assert place_of(line, program) == "after step 6"
    paused = line._replace(phase=Phase.PAUSED)
    assert describe(paused, 0, program) == describe(line, 0, program)
    assert place_of(paused, program) == "after step 6"


def test_a_rank_without_a_program_says_its_step() -> None:
    line = line_of(-1, step=6)
    assert describe(line, 0, None) == "rank 0 has been in step 6 for 3.0 s"
    assert place_of(line, None) == "in step 6"
    assert StatusView(StatusBoard(1), None, range(1)).culprit() == ""


def test_a_board_can_be_cleared(tmp_path: Path) -> None:
    board = StatusBoard(2, tmp_path / "board")
    board.write(1, Place(7, 3, 11), 5, pid=42)
    board.clear()
    assert StatusBoard(2, tmp_path / "board").read(1) == (-1, -1, 0, -1, 0, Phase.ABSENT, 0)


def test_a_rank_that_has_done_all_its_steps_is_not_to_blame(program: Program) -> None:
    board = StatusBoard(2)
    board.write(0, Place(-1, -1, 1), -1, phase=Phase.ENDED)
    row = row_of(program, 1, Kind.FORWARD)
    board.write(1, Place(row, -1, time.perf_counter_ns()), 3)
    assert StatusView(board, program, range(2)).culprit().startswith("the others wait for rank 1: ")
    assert StatusView(board, program, [0]).culprit() == ""
    assert StatusView(board, program, [0]).all() == "  rank 0 has done all its steps"


def test_a_rank_between_steps_is_to_blame_only_if_nobody_else_computes(program: Program) -> None:
    paused = line_of(-1, stands_s=9.0)._replace(phase=Phase.PAUSED)
    receive, backward = row_of(program, 0, Kind.RECV), row_of(program, 0, Kind.BACKWARD)
    waits, computes = line_of(backward, receive), line_of(row_of(program, 0, Kind.FORWARD))
    text = culprit({0: waits, 1: paused}, program, RANKS)
    assert text.startswith(
        "the others wait for rank 1: rank 1 has been between steps, after step 1"
    )
    text = culprit({0: computes, 1: paused}, program, RANKS)
    assert text.startswith("the others wait for rank 0: ")


def test_ranks_that_never_wait_for_one_another_stop_at_the_same_step() -> None:
    board, stopped = StatusBoard(3), dict[int, int]()

    def play(rank: int) -> None:
        step = rank  # they are not at the same step, nor equally fast
        while not board.stops_before(rank, step):
            step += 1
            time.sleep(0.0002 * rank)
        stopped[rank] = step

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    step = agree_on_stop(board, range(3))
    for thread in threads:
        thread.join(10)
    assert stopped == dict.fromkeys(range(3), step)


def test_nobody_stops_unasked() -> None:
    board = StatusBoard(1)
    assert not board.stops_before(0, 7)
    assert board.announced(0) == 7
