"""Where every rank of a host stands, in memory that all of them and the launcher share.

A rank writes its line a few times a second; whoever looks can say what a rank was doing when it
stopped answering, even if that rank is frozen or dead. A rank that only waits for another one says
so, so that the one that holds up all the others can be named (``culprit``).

The board also says before which step all ranks stop (``agree_on_stop``). A rank looks at that word
before every step, which costs it nothing; they need not wait for one another to agree.
"""

import mmap
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from partita.core.program import FIRST_COLLECTIVE, Kind, Program

STALE_S = 1.0
"""A rank that has not written for so long, ten times as long as it should, stands still."""
_LINE = struct.Struct("<7q")
_WORD = struct.Struct("<q")
_SETTLE_S = 0.01
"""How long after it was written a word of the board is certainly seen by all."""
_STOP_LOOK_S = 0.001


class Place(NamedTuple):
    """Where a device stands.

    Attributes:
        row: The instruction; -1 = between steps.
        awaited: The instruction whose end it waits for; -1 = it computes.
        since_ns: Since when.
    """

    row: int
    awaited: int
    since_ns: int


class Phase(IntEnum):
    """What a rank is at."""

    ABSENT = 0
    IDLE = 1
    BUILD = 2
    MEET = 3
    AGREE = 4
    OPEN = 5
    STEPS = 6
    PAUSED = 7
    CLOCKS = 8
    REPORT = 9
    ENDED = 10
    EVALUATE = 11

    @property
    def is_alive(self) -> bool:
        """Whether a rank in this phase keeps its line fresh."""
        return self not in (Phase.ABSENT, Phase.IDLE, Phase.PAUSED, Phase.ENDED)


_PHASES: Mapping[Phase, str] = {
    Phase.ABSENT: "has not started",
    Phase.IDLE: "has not begun its first step",
    Phase.BUILD: "builds its model",
    Phase.MEET: "waits for the other ranks to come",
    Phase.AGREE: "compares with the others what will travel",
    Phase.OPEN: "opens its channels",
    Phase.CLOCKS: "compares its clock with that of rank 0",
    Phase.REPORT: "hands over what it saw",
    Phase.ENDED: "has done all its steps",
    Phase.EVALUATE: "evaluates",
}


class RankStatus(NamedTuple):
    """Where a rank stands, as its line of the board says.

    Attributes:
        row: The instruction; -1 = between steps, it has not begun, or there is no Program.
        awaited: The instruction whose end it waits for; -1 = it computes.
        since_ns: Since when it stands there.
        step: The step; -1 = it has not begun.
        beat_ns: When it last wrote this.
        phase: What it is at.
        pid: Its process.
    """

    row: int
    awaited: int
    since_ns: int
    step: int
    beat_ns: int
    phase: Phase = Phase.STEPS
    pid: int = 0

    @property
    def silent_s(self) -> float:
        """How long it has shown no sign of life; 0 for one that need not."""
        if not self.phase.is_alive:
            return 0.0
        return (time.perf_counter_ns() - self.beat_ns) / 1e9

    @property
    def stands_s(self) -> float:
        """How long it has stood where it stands."""
        return (time.perf_counter_ns() - self.since_ns) / 1e9


class StatusBoard:
    """A line for each rank, and the step before which all of them stop.

    Behind the lines stand a word for each rank (the step it has announced, plus 1) and two for all:
    the step that is proposed to stop before and the one that is certain, both plus 1; 0 = none.
    """

    def __init__(self, ranks: int, path: Path | None = None) -> None:
        """Open a board in a file, or in memory that forked processes share.

        Args:
            ranks: Number of lines.
            path: The file; made if it is not there.
        """
        self._ranks, self._path = ranks, path
        self._words = max(1, ranks) * _LINE.size
        size = self._words + (max(1, ranks) + 2) * _WORD.size
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with path.open("a+b") as file:
                file.truncate(size)
                self._memory = mmap.mmap(file.fileno(), size)

    def __reduce__(self) -> tuple[type["StatusBoard"], tuple[int, Path]]:
        """Let a fresh process open the same file; memory without a file has no name."""
        assert self._path is not None
        return StatusBoard, (self._ranks, self._path)

    def write(
        self, rank: int, place: Place, step: int, *, phase: Phase = Phase.STEPS, pid: int = 0
    ) -> None:
        """Say where a rank stands."""
        now = time.perf_counter_ns()
        line = (place.row, place.awaited, place.since_ns, step, now, phase, pid)
        _LINE.pack_into(self._memory, rank * _LINE.size, *line)

    def place_line(self, rank: int) -> memoryview:
        """Return the first numbers of a rank's line, to be written at once: row, awaited, since."""
        begin = rank * _LINE.size
        return memoryview(self._memory)[begin : begin + 24].cast("q")

    def read(self, rank: int) -> RankStatus:
        """Return where a rank stands; of one that never wrote, that it has not started."""
        line = RankStatus(*_LINE.unpack_from(self._memory, rank * _LINE.size))
        if not line.beat_ns:
            return RankStatus(-1, -1, 0, -1, 0, Phase.ABSENT)
        return line._replace(phase=Phase(line.phase))

    def clear(self) -> None:
        """Forget what a run before has written."""
        self._memory[:] = bytes(len(self._memory))

    def announced(self, rank: int) -> int:
        """Return the step that a rank has announced last; -1 = none yet."""
        return self._word(rank)

    def stops_before(self, rank: int, step: int) -> bool:
        """Return whether a rank stops before a step; waits while that is being decided.

        The rank announces the step first and looks then; who proposes writes first and looks then.
        So at least one of the two sees the other, and no rank can pass a step that is certain.
        """
        while True:
            self._set_word(rank, step)
            proposed, certain = self._word(self._ranks), self._word(self._ranks + 1)
            if proposed < 0 or step < proposed:
                return False
            if certain >= 0:
                return step >= certain
            self._set_word(rank, step - 1)  # it has not begun
            time.sleep(_STOP_LOOK_S)

    def propose_stop(self, step: int, ranks: Iterable[int]) -> int:
        """Propose to stop before a step; returns the last step that a rank has begun by then."""
        self._set_word(self._ranks, step)
        time.sleep(_SETTLE_S)
        return max(self.announced(rank) for rank in ranks)

    def decide_stop(self, step: int) -> None:
        """Make a step that was proposed, and that no rank has begun, the one to stop before."""
        self._set_word(self._ranks + 1, step)

    def _word(self, place: int) -> int:
        (value,) = _WORD.unpack_from(self._memory, self._words + place * _WORD.size)
        return int(value) - 1

    def _set_word(self, place: int, value: int) -> None:
        _WORD.pack_into(self._memory, self._words + place * _WORD.size, value + 1)

    def frozen(self, ranks: Iterable[int], limit_s: float) -> list[int]:
        """Return the ranks that have shown no sign of life for longer than they may."""
        return [rank for rank in ranks if self.read(rank).silent_s > limit_s]


def agree_on_stop(board: StatusBoard, ranks: Sequence[int]) -> int:
    """Let all ranks of a host stop at the same step, as soon as can be; returns that step.

    No rank has to do anything for it but begin its next step, so it cannot hang.
    """
    step = max(board.announced(rank) for rank in ranks) + 1
    while (begun := board.propose_stop(step, ranks)) >= step:
        step = begun + 1
    board.decide_stop(step)
    return step


def describe(line: RankStatus, rank: int, program: Program | None) -> str:
    """Return where a rank stands and for how long, for people."""
    if line.phase in _PHASES:
        return f"rank {rank} {_PHASES[line.phase]}"
    if line.step < 0:
        return f"rank {rank} has not begun its first step"
    if program is None and line.phase is Phase.STEPS:
        return f"rank {rank} has been in step {line.step} for {line.stands_s:.1f} s"
    if program is None or line.row < 0:
        return (
            f"rank {rank} has been between steps, after step {line.step}, for {line.stands_s:.1f} s"
        )
    what = f"step {line.step}, {program.describe(line.row)}"
    if line.awaited < 0:
        return f"rank {rank} has been at {what} for {line.stands_s:.1f} s"
    awaited = program.describe(line.awaited)
    return f"rank {rank} at {what} has waited {line.stands_s:.1f} s for {awaited}"


def place_of(line: RankStatus, program: Program | None) -> str:
    """Return where a rank stands: the instruction, or what it is at."""
    if line.phase in _PHASES:
        return f"while it {_PHASES[line.phase]}"
    if program is None and line.phase is Phase.STEPS:
        return f"in step {line.step}"
    if program is None or line.row < 0:
        return f"after step {line.step}"
    waits = f", waiting for {program.describe(line.awaited)}" if line.awaited >= 0 else ""
    return f"at step {line.step}, {program.describe(line.row)}{waits}"


@dataclass(frozen=True, eq=False)
class StatusView:
    """What a launcher sees of its ranks.

    Attributes:
        board: Where they say what they are doing.
        program: What they run; None if it is no Program, and only their steps are known.
        ranks: Those that can be seen from here: the ranks of this host.
    """

    board: StatusBoard
    program: Program | None
    ranks: Sequence[int]

    def where(self, rank: int) -> str:
        """Return where a rank stands."""
        return place_of(self.board.read(rank), self.program)

    def all(self) -> str:
        """Return what every rank is doing, a line each."""
        return "\n".join(
            f"  {describe(self.board.read(rank), rank, self.program)}" for rank in self.ranks
        )

    def stands_still(self, rank: int) -> str:
        """Return that a rank shows no sign of life, and where it stands."""
        return stands_still(self.board.read(rank), rank, self.program)

    def culprit(self) -> str:
        """Return which rank holds up the others; empty if none can be told."""
        if self.program is None:
            return ""
        used = np.flatnonzero(np.diff(self.program.ptr)).tolist()
        rank_of = {device: rank for rank, device in enumerate(used)}
        return culprit(
            {rank: self.board.read(rank) for rank in self.ranks}, self.program, rank_of
        )  # fmt: skip


def stands_still(line: RankStatus, rank: int, program: Program | None) -> str:
    """Return that a rank shows no sign of life, and where it stands."""
    return (
        f"rank {rank} stands still, without a sign of life for {line.silent_s:.1f} s: "
        f"{describe(line, rank, program)}"
    )


def culprit(lines: Mapping[int, RankStatus], program: Program, rank_of: Mapping[int, int]) -> str:
    """Return which rank holds up the others, and where it stands; empty if none can be told.

    Args:
        lines: Where the ranks stand that can be seen from here.
        program: What they run.
        rank_of: The rank of each device of the plan.
    """
    # By the newest beat of all, not by now: the ranks may have been ended meanwhile.
    newest = max((line.beat_ns for line in lines.values() if line.phase.is_alive), default=0)
    beats = {rank: line.beat_ns for rank, line in lines.items() if line.phase.is_alive}
    oldest = min(beats, key=lambda rank: (beats[rank], rank), default=-1)
    if oldest >= 0 and newest - beats[oldest] > STALE_S * 1e9:
        return stands_still(lines[oldest], oldest, program)
    busy = {rank: line for rank, line in lines.items() if _holds_up(line)}
    if busy:
        # One between steps may wait for the others there: only blamed where nobody else is.
        rank = min(busy, key=lambda r: (busy[r].phase is Phase.PAUSED, busy[r].since_ns, r))
        return f"the others wait for rank {rank}: {describe(busy[rank], rank, program)}"
    for rank, line in sorted(lines.items(), key=lambda entry: entry[1].since_ns):
        unseen = sorted(set(_awaited_ranks(line, program, rank_of)) - set(lines))
        if unseen:
            return (
                f"rank {unseen[0]}, which runs on another host, does not answer; "
                f"{describe(line, rank, program)}"
            )
    return ""


def _holds_up(line: RankStatus) -> bool:
    """Return whether a rank could go on and has not."""
    if line.phase is not Phase.STEPS:
        return line.phase in (Phase.IDLE, Phase.BUILD, Phase.ABSENT, Phase.PAUSED)
    return line.awaited < 0


def _awaited_ranks(line: RankStatus, program: Program, rank_of: Mapping[int, int]) -> list[int]:
    """Return the ranks that a rank waits for."""
    if line.phase is not Phase.STEPS or line.awaited < 0:
        return []
    if program.kind[line.awaited] in (Kind.SEND, Kind.RECV):
        return [rank_of[int(program.peer[line.awaited])]]
    if program.kind[line.awaited] >= FIRST_COLLECTIVE:
        return [rank_of[device] for device in program.group_of(line.awaited).tolist()]
    return []
