"""Times of ranks on several hosts, brought to rank 0's clock."""

import numpy as np

from partita.runtime.clocks import ClockReading, to_rank_0
from partita.runtime.device_parts import DeviceStatistics, StepRecord
from partita.runtime.executor import aligned
from partita.runtime.rank import RankReport


def test_a_common_clock_is_left_alone() -> None:
    assert to_rank_0(())(np.array([123])).tolist() == [123]


def test_one_reading_shifts() -> None:
    assert to_rank_0([ClockReading(1_000, 400, 5)])(np.array([1_500])).tolist() == [1_100]


def test_two_readings_follow_the_drift_between_them() -> None:
    moved = to_rank_0([ClockReading(1_000, 400, 5), ClockReading(2_000, 500, 5)])
    times = np.array([1_000, 1_500, 2_000, 2_500])
    assert moved(times).tolist() == [600, 1_050, 1_500, 2_000]


def test_times_far_from_0_lose_nothing() -> None:
    late = 2**60 + 1
    moved = to_rank_0([ClockReading(late, 3, 1), ClockReading(late + 10, 3, 1)])
    assert moved(np.array([late + 4])).tolist() == [late + 1]


def test_a_report_is_moved_as_a_whole() -> None:
    report = RankReport(
        device=1,
        records=[StepRecord(begin_ns=np.array([1_000, 1_100]), end_ns=np.array([1_050, 1_200]))],
        state={},
        statistics=DeviceStatistics(),
        step_ns=[(990, 1_210)],
        clock=(ClockReading(900, 100, 1), ClockReading(2_000, 100, 1)),
    )
    found = aligned(report)
    assert found.records[0].begin_ns.tolist() == [900, 1_000]
    assert found.records[0].end_ns.tolist() == [950, 1_100]
    assert found.step_ns == [(890, 1_110)]
    assert aligned(found) is found
