"""The record of a search."""

from partita.planners.search_trace import SearchTrace


def test_a_trace_keeps_new_bests_alone_and_tells_of_them():
    told = []
    trace = SearchTrace(on_record=lambda seconds, value: told.append((seconds, value)))
    for value in (5.0, 7.0, 5.0, 4.0):
        trace.record(value)
    assert [value for _, value in trace.points] == [5.0, 4.0]
    assert told == trace.points
    seconds = [time for time, _ in trace.points]
    assert seconds == sorted(seconds)
