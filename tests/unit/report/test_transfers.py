"""Which RECV belongs to a SEND, and who reads what it brought."""

import pytest

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.cost.predict import simulate
from partita.program.lower import lower
from partita.program.matching import match
from partita.report.transfers import transfers


def test_an_activation_goes_to_forward_and_a_gradient_to_backward(exchange):
    send, recv, consumer = (part.tolist() for part in transfers(exchange))
    assert (send, recv, consumer) == ([1, 8], [5, 2], [6, 3])


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE])
def test_the_timeline_alone_says_what_the_program_says(problem_of, schedule):
    problem, plan = problem_of(schedule, stages=8, transfer_s=0.3)
    program = lower(problem, plan)
    found = transfers(simulate(problem, plan, program=program))
    expected = match(program)
    assert len(found.send) == 2 * 7 * 8
    assert found.recv.tolist() == expected.partner[found.send].tolist()
    assert found.consumer.tolist() == expected.consumer[found.recv].tolist()


def test_a_message_without_its_other_end_is_kept(make):
    timeline = make([(0, Kind.SEND, 0, 0, 1, 0.0, 1.0), (0, Kind.SEND, 0, 1, 1, 1.0, 2.0)])
    assert transfers(timeline).recv.tolist() == [-1, -1]
    rows = [(0, Kind.SEND, 0, 1, 1, 0.0, 1.0), (1, Kind.RECV, 1, 1, 0, 0.0, 1.0)]
    found = transfers(make(rows))
    assert (found.recv.tolist(), found.consumer.tolist()) == ([1], [-1])


def test_a_timeline_without_rows_has_no_messages(make):
    assert [len(part) for part in transfers(make([]))] == [0, 0, 0]
