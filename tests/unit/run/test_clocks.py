"""Times of ranks on several hosts, brought to rank 0's clock."""

from partita.run.clocks import ClockReading, to_rank_0
from partita.run.device_parts import DeviceStatistics, StepRecord
from partita.run.executor import aligned
from partita.run.rank import RankReport


def test_a_common_clock_is_left_alone() -> None:
    assert to_rank_0(())(123) == 123


def test_one_reading_shifts() -> None:
    assert to_rank_0([ClockReading(1_000, 400, 5)])(1_500) == 1_100


def test_two_readings_follow_the_drift_between_them() -> None:
    moved = to_rank_0([ClockReading(1_000, 400, 5), ClockReading(2_000, 500, 5)])
    assert [moved(time) for time in (1_000, 1_500, 2_000)] == [600, 1_050, 1_500]
    assert moved(2_500) == 2_000


def test_a_report_is_moved_as_a_whole() -> None:
    report = RankReport(
        device=1,
        records=[StepRecord(begin_ns=[1_000, 1_100], end_ns=[1_050, 1_200])],
        state={},
        statistics=DeviceStatistics(),
        step_ns=[(990, 1_210)],
        clock=(ClockReading(900, 100, 1), ClockReading(2_000, 100, 1)),
    )
    found = aligned(report)
    assert found.records[0].begin_ns == [900, 1_000]
    assert found.records[0].end_ns == [950, 1_100]
    assert found.step_ns == [(890, 1_110)]
    assert aligned(found) is found
