"""The clocks of ranks on several hosts, brought to that of rank 0.

Rank 0 asks each rank for its time, again and again; the exchange with the shortest way there and
back says how far the two clocks are apart, to within half of that time. It is done before and after
a run, and what lies between follows a straight line, as clocks drift. Ranks of one machine read the
same clock and exchange nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from partita.core.columns import Longs
from partita.ranks.member import Member

Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds of a clock that does not jump."""

ROUNDS = 20


class ClockReading(NamedTuple):
    """How far a rank's clock is ahead of rank 0's.

    Attributes:
        at_ns: When, by the rank's clock.
        ahead_ns: How far it is ahead.
        within_ns: The true value is at most so far off.
    """

    at_ns: int
    ahead_ns: int
    within_ns: int


def read_clock(
    member: Member, *, clock: Clock = time.perf_counter_ns, rounds: int = ROUNDS
) -> ClockReading:
    """Compare this rank's clock with rank 0's; all ranks call it at the same time."""
    if member.rank == 0:
        for rank in range(1, member.world):
            _ask(member, rank, clock, rounds)
        return ClockReading(clock(), 0, 0)
    return _answer(member, clock, rounds)


def _ask(member: Member, rank: int, clock: Clock, rounds: int) -> None:
    """Ask a rank for its time, and tell it what came of it."""
    best: ClockReading | None = None
    word = torch.zeros(1, dtype=torch.int64, device=member.device)
    for _ in range(rounds):
        begin = clock()
        dist.send(word, rank)
        dist.recv(word, rank)
        theirs = int(word.item())
        end = clock()
        reading = ClockReading(theirs, theirs - (begin + end) // 2, (end - begin + 1) // 2)
        if best is None or reading.within_ns < best.within_ns:
            best = reading
    assert best is not None
    dist.send(torch.tensor(best, dtype=torch.int64, device=member.device), rank)


def _answer(member: Member, clock: Clock, rounds: int) -> ClockReading:
    word = torch.zeros(1, dtype=torch.int64, device=member.device)
    for _ in range(rounds):
        dist.recv(word, 0)
        dist.send(torch.full_like(word, clock()), 0)
    result = torch.zeros(3, dtype=torch.int64, device=member.device)
    dist.recv(result, 0)
    return ClockReading(*result.tolist())


def to_rank_0(readings: Sequence[ClockReading]) -> Callable[[Longs], Longs]:
    """Return what turns times of a rank into those of rank 0.

    Args:
        readings: Of the rank's clock, none where it is rank 0's, one or two otherwise.
    """
    if not readings:
        return lambda times_ns: times_ns
    first, last = readings[0], readings[-1]
    span = last.at_ns - first.at_ns
    drift = (last.ahead_ns - first.ahead_ns) / span if span > 0 else 0.0

    def moved(times_ns: Longs) -> Longs:
        drifted = np.rint(drift * (np.minimum(times_ns, last.at_ns) - first.at_ns))
        return times_ns - first.ahead_ns - drifted.astype(np.int64)

    return moved
