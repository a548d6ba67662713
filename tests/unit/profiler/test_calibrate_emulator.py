"""The parts of the link emulator that need no root."""

import pytest

from partita.errors import InvalidInputError
from partita.runtime.emulation.link import Direction, LinkShape, Namespace


def test_packets_leave_at_the_rate_and_arrive_the_delay_later():
    way = Direction(LinkShape(rate_bytes_per_s=1e6, delay_s=0.005))
    for _ in range(3):
        assert way.take(b"x" * 1000, now_s=10.0)
    assert way.next_s == pytest.approx(10.006)
    assert list(way.due(10.0059)) == []
    assert len(list(way.due(10.0071))) == 2
    assert len(list(way.due(10.0081))) == 1
    assert way.next_s == float("inf")


def test_an_idle_link_saves_up_no_burst():
    way = Direction(LinkShape(rate_bytes_per_s=1e6))
    way.take(b"x" * 1000, now_s=1.0)
    list(way.due(5.0))
    way.take(b"x" * 1000, now_s=5.0)
    assert way.next_s == pytest.approx(5.001)


def test_a_full_queue_loses_packets():
    way = Direction(LinkShape(rate_bytes_per_s=1e3))
    packet = bytes(2**20)
    taken = sum(way.take(packet, now_s=0.0) for _ in range(100))
    assert taken == 64


@pytest.mark.parametrize(
    "figures",
    [
        {"rate_bytes_per_s": 0.0},
        {"rate_bytes_per_s": float("nan")},
        {"rate_bytes_per_s": 1e6, "delay_s": -1.0},
        {"rate_bytes_per_s": 1e6, "mtu_bytes": 100},
    ],
)
def test_impossible_links_are_refused(figures):
    with pytest.raises(InvalidInputError, match="expected"):
        LinkShape(**figures)


def test_a_command_runs_inside_its_namespace():
    end = Namespace("one", "198.18.0.1", "partita0")
    assert end.command("true", "x") == ["ip", "netns", "exec", "one", "true", "x"]
    assert str(end) == "one"
