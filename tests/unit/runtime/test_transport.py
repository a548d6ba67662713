import pytest
import torch

from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.runtime.transport import Meeting, MemoryTransport, Message

FIRST = Message(source=0, target=1, tensor=5, microbatch=2, gradient=False)
SECOND = FIRST._replace(gradient=True)


def test_a_receive_may_be_posted_before_its_send() -> None:
    transport = MemoryTransport()
    pending = transport.receive(FIRST)
    assert pending.poll() is None
    sent = transport.send(FIRST, torch.arange(3))
    assert torch.equal(pending.poll(), torch.arange(3))
    assert sent.poll() is not None


def test_a_send_is_done_when_it_is_received() -> None:
    transport = MemoryTransport()
    sent = transport.send(FIRST, torch.arange(3))
    assert sent.poll() is None
    transport.receive(FIRST)
    assert sent.poll() is not None


def test_what_is_sent_is_a_copy() -> None:
    transport = MemoryTransport()
    value = torch.zeros(2, requires_grad=True)
    transport.send(FIRST, value)
    with torch.no_grad():
        value += 1
    received = transport.receive(FIRST).poll()
    assert received.tolist() == [0, 0]
    assert not received.requires_grad


def test_messages_of_a_pair_must_be_in_one_order() -> None:
    transport = MemoryTransport()
    transport.send(FIRST, torch.zeros(1))
    with pytest.raises(
        InvalidInputError,
        match=r"5.*microbatch 2.*5",
    ):
        transport.receive(SECOND)


def test_pairs_do_not_disturb_each_other() -> None:
    transport = MemoryTransport()
    transport.send(FIRST, torch.zeros(1))
    back = Message(source=1, target=0, tensor=9, microbatch=0, gradient=False)
    pending = transport.receive(back)
    transport.send(back, torch.ones(1))
    assert pending.poll().item() == 1


def meetings(kind: Kind, members: tuple[int, ...], **more: int) -> list[Meeting]:
    return [Meeting(kind=kind, device=device, members=members, **more) for device in members]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.ALL_REDUCE, [[10.0, 12.0], [10.0, 12.0]]),
        (Kind.REDUCE_SCATTER, [[10.0], [12.0]]),
        (Kind.ALL_GATHER, [[1.0, 2.0, 9.0, 10.0], [1.0, 2.0, 9.0, 10.0]]),
    ],
)
def test_collectives(kind: Kind, expected: list[list[float]]) -> None:
    transport = MemoryTransport()
    one, other = meetings(kind, (3, 8), bucket=0)
    first = transport.meet(one, [torch.tensor([1.0, 2.0])])
    assert first.poll() is None
    second = transport.meet(other, [torch.tensor([9.0, 10.0])])
    assert [value.tolist() for value in first.poll()] == [expected[0]]
    assert [value.tolist() for value in second.poll()] == [expected[1]]


def test_meetings_of_a_group_match_by_position() -> None:
    transport = MemoryTransport()
    one, other = meetings(Kind.ALL_REDUCE, (0, 1), bucket=0)
    early = [transport.meet(one, [torch.tensor([float(turn)])]) for turn in range(2)]
    transport.meet(other, [torch.tensor([10.0])])
    assert early[0].poll()[0].item() == 10
    assert early[1].poll() is None


def test_compute_and_collectives_of_one_group_stand_in_one_order() -> None:
    compute = meetings(Kind.FORWARD, (0, 1), microbatch=4)
    collective = meetings(Kind.ALL_REDUCE, (0, 1), bucket=0)
    transport = MemoryTransport()
    transport.meet(compute[0])
    first = transport.meet(collective[0], [torch.ones(1)])
    assert list(transport.meet(compute[1]).poll()) == []
    assert transport.meet(collective[1], [torch.ones(1)]).poll()[0].item() == 2
    assert first.poll()[0].item() == 2
    transport = MemoryTransport()
    transport.meet(compute[0])
    with pytest.raises(InvalidInputError, match=r"ALL_REDUCE\(bucket 0\).*device 0.*FORWARD"):
        transport.meet(collective[1], [torch.ones(1)])


def test_members_must_come_to_the_same_meeting() -> None:
    transport = MemoryTransport()
    transport.meet(meetings(Kind.ALL_REDUCE, (0, 1), bucket=0)[0], [torch.ones(1)])
    with pytest.raises(
        InvalidInputError,
        match=r"1.*ALL_REDUCE\(bucket 1\).*device 0.*ALL_REDUCE\(bucket 0\)",
    ):
        transport.meet(meetings(Kind.ALL_REDUCE, (0, 1), bucket=1)[1], [torch.ones(1)])
