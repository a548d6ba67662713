"""Receives that are posted before their place in the list."""

from types import SimpleNamespace

import pytest

from partita.core.problem import Problem, Schedule
from partita.core.program import Kind
from partita.program.lower import lower
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.emulation.rehearsal import emulated_workload
from partita.runtime.transport import MemoryTransport
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


class AheadTransport(MemoryTransport):
    """Asks for receives to be posted ahead."""

    def __init__(self, posted_ahead: int) -> None:
        super().__init__()
        self.posted_ahead = posted_ahead


def order_of_issue(ahead: int, *, blocking: bool = False) -> list[int]:
    graph, cluster = chain(2, Figures()), flat_cluster(2)
    problem = Problem(graph=graph, cluster=cluster)
    plan = pipeline(graph, cluster, [0, 1], schedule=Schedule.GPIPE, microbatches=4)
    task = emulated_workload(problem, plan).task
    loop = DeviceLoop(
        task,
        1,
        AheadTransport(ahead),
        store=SimpleNamespace(agrees=False),
        runner=None,
        load=None,
        blocking=blocking,
    )
    return [instruction.row for instruction in loop._issued]


def kinds(rows: list[int]) -> list[Kind]:
    graph, cluster = chain(2, Figures()), flat_cluster(2)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(
        problem, pipeline(graph, cluster, [0, 1], schedule=Schedule.GPIPE, microbatches=4)
    )
    return [Kind(int(program.kind[row])) for row in rows]


@pytest.mark.parametrize(("ahead", "blocking"), [(0, False), (2, True)])
def test_the_list_is_the_order_of_issue(ahead: int, blocking: bool) -> None:
    rows = order_of_issue(ahead, blocking=blocking)
    assert rows == sorted(rows)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_receives_are_posted_before_the_passes_that_they_overlap(ahead: int) -> None:
    issued = kinds(order_of_issue(ahead))
    posted = [
        sum(kind is Kind.RECV for kind in issued[:place])
        for place, kind in enumerate(issued)
        if kind is Kind.FORWARD
    ]
    assert posted == [min(4, turn + 1 + ahead) for turn in range(4)]


def test_receives_and_all_others_keep_their_orders() -> None:
    rows = order_of_issue(2)
    found = kinds(rows)
    for wanted in (True, False):
        part = [row for row, kind in zip(rows, found, strict=True) if (kind is Kind.RECV) is wanted]
        assert part == sorted(part)
