"""Which groups of ranks a transport opens, and under which names."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.core.problem import Objective, Problem
from partita.program.lower import lower
from partita.ranks.member import Member
from partita.runtime.emulation.rehearsal import NoCode
from partita.runtime.process_transport import ProcessTransport, agreement_key, statement
from partita.runtime.task import Task
from partita.testing.builders import chain, flat_cluster, pipeline


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """Return the groups that are made: the number that names each, and its ranks."""
    found: list[tuple[int, tuple[int, ...]]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        found.append((dist.distributed_c10d._world.group_count, tuple(ranks)))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", noted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield found
    dist.destroy_process_group()


def shape_of(tensor: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (1,), torch.float32


def test_the_same_ranks_have_a_group_for_every_purpose(made: list[Any]) -> None:
    member = Member(rank=0, world=3, store=HashStore())
    groups = [
        member.group_of([0, 1]),
        member.group_of([0, 1], "0>1"),
        member.group_of([1, 0], "1>0"),
        member.group_of([0, 2]),
    ]
    assert len({id(group) for group in groups}) == 4
    assert member.group_of([1, 0]) is groups[0]
    assert member.group_of([0, 1], "1>0") is groups[2]
    assert [ranks for _, ranks in made] == [(0, 1), (0, 1), (0, 1), (0, 2)]
    assert len({name for name, _ in made}) == 4
    assert list(member.groups) == [("", (0, 1)), ("0>1", (0, 1)), ("1>0", (0, 1)), ("", (0, 2))]


def test_names_do_not_depend_on_what_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_of(ranks: list[int], **_: object) -> tuple[int, list[int]]:
        return dist.distributed_c10d._world.group_count, ranks

    monkeypatch.setattr(dist.distributed_c10d._world, "group_count", 0)
    monkeypatch.setattr(dist, "new_group", name_of)
    one, other = (Member(rank=0, world=3, store=HashStore()) for _ in range(2))
    first = [one.group_of([0, 1], "x"), one.group_of([0, 2])]
    second = [other.group_of([2, 0]), other.group_of([1, 0], "x")]
    assert first == second[::-1]


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("gloo", {("", (0, 1))}),
        ("nccl", {("", (0, 1)), ("0>2", (0, 2)), ("2>0", (0, 2))}),
    ],
)
def test_with_nccl_each_ordered_pair_has_a_group_of_its_own(
    made: list[Any], backend: str, wanted: set[Any]
) -> None:
    """Two replicas of a stage before a third rank: it sends to each and each to it."""
    graph, cluster = chain(4), flat_cluster(3)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    plan = pipeline(graph, cluster, [[0, 1], 2], microbatches=2)
    task = Task(problem, plan, lower(problem, plan), NoCode())
    store = HashStore()
    for rank in range(3):
        store.set(agreement_key("job", rank), statement(task, rank, shape_of))
    member = Member(rank=0, world=3, store=store, backend=backend)
    ProcessTransport(task, member, shape_of)
    assert set(member.groups) == wanted
    assert len(made) == len(wanted)
