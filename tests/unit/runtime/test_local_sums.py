"""Sums over the ranks of one machine by shared memory."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from partita.runtime import local_sums
from partita.runtime.local_sums import LocalRanks, bytes_of_sum, same_machine


def in_ranks(count: int, work: Callable[[LocalRanks], Any]) -> list[Any]:
    """Return what each of some ranks finds; threads stand for processes."""
    store, found, opened = HashStore(), dict[int, Any](), list[LocalRanks]()

    def be(rank: int) -> None:
        ranks = LocalRanks(range(count), rank, store, "test")
        opened.append(ranks)
        found[rank] = work(ranks)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for ranks in opened:
        ranks.close()
    return [found[rank] for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_sums_are_those_in_the_order_of_the_ranks_in_every_turn(count: int) -> None:
    brought = torch.randn(
        5, count, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def work(ranks: LocalRanks) -> list[list[torch.Tensor]]:
        first, second = ranks.open([bytes_of_sum([12, 1]), bytes_of_sum([3])])
        found = []
        for turn in brought:
            mine = turn[ranks.rank]
            small = mine[:, 0].float()
            # A second sum is under way beside the first.
            started = [first.start([mine, mine[0, 0]]), second.start([small])]
            assert started[0] is not None
            assert started[1] is not None
            found.append([*started[0].poll(), *started[1].poll()])
        return found

    for found in in_ranks(count, work):
        for turn, (wide, single, small) in zip(brought, found, strict=True):
            total = turn[0] + turn[1]
            for other in turn[2:]:
                total = total + other
            assert wide.equal(total)
            assert single.equal(total[0, 0])
            assert small.dtype is torch.float32
            assert small.allclose(total[:, 0].float())


def test_what_a_rank_brings_stays_as_it_is() -> None:
    def work(ranks: LocalRanks) -> torch.Tensor:
        (total,) = ranks.open([64])
        mine = torch.full((2,), 3.0)
        started = total.start([mine.expand(2)])
        assert started is not None
        assert started.poll()[0].tolist() == [6.0, 6.0]
        return mine

    assert all(mine.tolist() == [3.0, 3.0] for mine in in_ranks(2, work))


def test_what_has_no_room_is_left_to_others_and_the_next_sum_goes_on() -> None:
    def work(ranks: LocalRanks) -> list[float]:
        (total,) = ranks.open([64])
        assert total.start([torch.zeros(100)]) is None
        started = total.start([torch.ones(2)])
        assert started is not None
        return started.poll()[0].tolist()

    assert in_ranks(2, work) == [[2.0, 2.0]] * 2


def test_a_rank_that_has_gone_is_named() -> None:
    def work(ranks: LocalRanks) -> str:
        (total,) = ranks.open([64])
        if ranks.rank:
            ranks.close()
            return ""
        try:
            started = total.start([torch.ones(1)])
            assert started is not None
            started.poll()
        except RuntimeError as exc:
            return str(exc)
        return "nothing"

    assert in_ranks(2, work)[0] == "connection closed by peer: rank 1 has gone"


def test_ranks_of_other_networks_are_not_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    found: dict[int, bool] = {}
    identity = {0: "a", 1: "b"}
    rank_of = threading.local()
    monkeypatch.setattr(local_sums, "loopback_identity", lambda: identity[rank_of.value])

    def be(rank: int) -> None:
        rank_of.value = rank
        found[rank] = same_machine((0, 1), rank, store, "test")

    for name in ("apart", "together"):
        threads = [threading.Thread(target=be, args=(rank,)) for rank in identity]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == dict.fromkeys(identity, name == "together")
        identity, store = {0: "a", 1: "a"}, HashStore()
