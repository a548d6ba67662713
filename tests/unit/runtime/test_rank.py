"""What a rank says on the board, and what it keeps of its steps."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from partita.ranks.member import Member
from partita.ranks.status import Phase, Place, StatusBoard
from partita.runtime import rank
from partita.runtime.clocks import ClockReading
from partita.runtime.device_parts import StepRecord
from partita.runtime.rank import KEPT_STAMPS, RankOptions, StepPlayer, Watchdog, clock_reading


class FakeLoop:
    """A loop that sees a loss in every step, and when two instructions began and ended."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.statistics = None
        self.place = Place(-1, -1, 0)
        self.compute_s = 0.0

    def play(self, step: int) -> Iterator[None]:
        self.records.append(
            StepRecord(
                outputs={(7, 0): torch.tensor(float(step)), (8, 0): torch.ones(3)},
                begin_ns=np.array([step, step]),
                end_ns=np.array([step, step + 1]),
            )
        )
        return iter(())


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch):
    made = []
    start = Watchdog.__init__

    def noted(self, *args, **kwargs):
        made.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(Watchdog, "__init__", noted)
    yield
    for watchdog in made:
        watchdog.close()


def player_of(board: StatusBoard, *, keep_results: bool) -> StepPlayer:
    plan = SimpleNamespace(microbatch_sizes=np.array([2]), samples=2)
    task = SimpleNamespace(plan=plan, graph=SimpleNamespace(loss=7), program=None, shares=(1.0,))
    options = RankOptions(steps=1, keep_results=keep_results)
    member = Member(rank=0, world=1, store=None)
    watchdog = Watchdog(0, board, options.stall_limit_s)
    return StepPlayer(FakeLoop(), task, 0, member, options=options, board=board, watchdog=watchdog)


def test_a_watchdog_wakes_again_and_its_thread_ends_when_it_is_closed() -> None:
    board = StatusBoard(1)
    watchdog = Watchdog(0, board, 60.0, phase=Phase.OPEN)
    for _ in range(2):
        with watchdog.awake():
            watchdog.enter(Phase.STEPS)
            assert board.read(0).phase is Phase.STEPS
        assert board.read(0).phase is Phase.PAUSED
    assert "watchdog" in [thread.name for thread in threading.enumerate()]
    watchdog.close()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_stamps_of_the_last_steps_are_kept_over_calls() -> None:
    player = player_of(StatusBoard(1), keep_results=False)
    losses = []
    for _ in range(KEPT_STAMPS + 4):
        player.play(1, lambda news: losses.append(news.loss))
    records = player.report().records
    assert losses == list(range(KEPT_STAMPS + 4))
    assert [len(record.begin_ns) for record in records] == [0] * 4 + [2] * KEPT_STAMPS
    assert [len(record.end_ns) for record in records] == [0] * 4 + [2] * KEPT_STAMPS
    assert all(list(record.outputs) == [(7, 0)] for record in records)
    assert len(player.report().step_ns) == KEPT_STAMPS + 4


def test_all_is_kept_if_results_are() -> None:
    player = player_of(StatusBoard(1), keep_results=True)
    player.play(KEPT_STAMPS + 4, lambda _: None)
    records = player.report().records
    assert all(len(record.begin_ns) == 2 and len(record.outputs) == 2 for record in records)


def test_a_rank_that_has_played_is_between_steps() -> None:
    board = StatusBoard(1)
    player_of(board, keep_results=False).play(3, lambda _: None)
    assert (board.read(0).phase, board.read(0).step) == (Phase.PAUSED, 2)


@pytest.mark.parametrize(
    ("phase", "after"),
    [(Phase.BUILD, Phase.IDLE), (Phase.OPEN, Phase.IDLE), (Phase.REPORT, Phase.ENDED)],
)
def test_what_a_rank_is_at_is_written_at_once(phase: Phase, after: Phase) -> None:
    board = StatusBoard(1)
    with Watchdog(0, board, 60.0, phase=Phase.CLOCKS) as watchdog:
        assert board.read(0).phase is Phase.CLOCKS
        watchdog.enter(phase)
        assert board.read(0).phase is phase
    assert board.read(0).phase is after


def test_a_rank_that_fails_is_left_where_it_stood() -> None:
    board = StatusBoard(1)
    with pytest.raises(ArithmeticError), Watchdog(0, board, 60.0, phase=Phase.OPEN):
        raise ArithmeticError
    assert board.read(0).phase is Phase.OPEN


@pytest.mark.parametrize(
    ("phase", "step", "is_limited"),
    [
        (Phase.BUILD, -1, False),
        (Phase.CLOCKS, -1, True),
        (Phase.STEPS, -1, False),
        (Phase.STEPS, 0, True),
        (Phase.REPORT, 0, False),
    ],
)
def test_what_may_take_only_so_long(phase: Phase, step: int, is_limited: bool) -> None:
    watchdog = Watchdog(0, StatusBoard(1), 60.0, phase=phase)
    watchdog.step = step
    assert watchdog._is_limited is is_limited


def test_clocks_are_compared_unless_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = ClockReading(1, 2, 3)
    monkeypatch.setattr(rank, "read_clock", lambda _: reading)
    assert clock_reading(SimpleNamespace(shares_clock=True), None) == ()
    assert clock_reading(SimpleNamespace(shares_clock=False), None) == (reading,)
