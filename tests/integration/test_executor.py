"""Forked processes against one process: a few cells of ``benchmarks/equivalence.py``.

One pool of four ranks serves them all.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.program.order import ListOrder

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KINDS = (
    "DAG over 3",
    "uneven over 4",
    "replicated 3-1",
    "interleaved",
    "zero-bubble",
    "recompute",
    "inference",
)
MODES = [(order, blocking) for order in ListOrder for blocking in (False, True)]


class Cells:
    """The cells by name, and the ranks that run them."""

    def __init__(self, benchmark: ModuleType) -> None:
        self.benchmark = benchmark
        gpt = benchmark.Setup("gpt", torch.float64)
        nodes = benchmark.Setup("graph-mlp", torch.float64)
        dropped = benchmark.Setup("gpt", torch.float64, dropout=True)
        make, plans = benchmark.make_cell, benchmark.PLANS
        self.cells: dict[Any, Any] = {kind: make(kind, gpt, plans[kind]) for kind in KINDS}
        self.cells |= {
            "dropout": make("dropout", dropped, benchmark.recomputing, steps=2),
            "uneven shares": make("uneven shares", gpt, benchmark.uneven_shares, steps=2),
            "sizes": make(
                "sizes", gpt, lambda g: benchmark.staged(g, (0.5,), [[0], [1]], (2, 2, 2, 1))
            ),
            "stashing": make(
                "stashing",
                nodes,
                lambda g: benchmark.staged(g, (0.3, 0.6), [[0], [1], [2]], 6, Schedule.PIPEDREAM),
            ),
        }
        for order, blocking in MODES:
            self.cells[order, blocking] = make(
                "mode", gpt, plans["interleaved"], order=order, blocking=blocking
            )
        self.pool = benchmark.Pool(list(self.cells.values()))

    def run(self, name: object) -> tuple[Any, Any]:
        """Return a cell and what the ranks made of it."""
        cell = self.cells[name]
        return cell, self.pool.run(cell)


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    """Yield the cells; the ranks end with the module."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        found = Cells(importlib.import_module("equivalence"))
        yield found
        found.pool.close()


@pytest.mark.parametrize("kind", [*KINDS, "uneven shares", "sizes"])
def test_ranks_compute_what_one_process_does(cells: Cells, kind: str) -> None:
    cell, result = cells.run(kind)
    assert cells.benchmark.against_plain(cell, result.steps[0]) <= 1e-9
    assert cells.benchmark.against_interpreter(cell, result) <= 1e-9


def test_ranks_draw_the_numbers_of_the_interpreter(cells: Cells) -> None:
    cell, result = cells.run("dropout")
    assert cells.benchmark.against_interpreter(cell, result) <= 1e-9
    assert cells.benchmark.against_plain(cell, result.steps[0]) > 1e-3, "nothing was dropped"


def test_weight_stashing_is_a_replay_with_delayed_weights(cells: Cells) -> None:
    cell, result = cells.run("stashing")
    expected = cells.benchmark.stashed_weights(cell)
    found = [result.state[name] for name in expected]
    assert cells.benchmark.tensor_gap(found, list(expected.values())) <= 1e-9
    undelayed = [cell.setup.state[name] for name in expected]
    assert cells.benchmark.tensor_gap(undelayed, list(expected.values())) > 1e-9


@pytest.mark.parametrize(("order", "blocking"), MODES)
def test_every_execution_mode_gives_the_same_bits(
    cells: Cells, order: ListOrder, blocking: bool
) -> None:
    cell, result = cells.run((order, blocking))
    _, first = cells.run((ListOrder.DEVICE, False))
    assert cells.benchmark.same_bits(first.steps[0], result.steps[0])
    lists = [list_of(cells.cells[o, False].task.program) for o in ListOrder]
    assert len({tuple(part) for part in lists}) == len(ListOrder), "the orders do not differ"
    assert list_of(cell.task.program) in lists


def list_of(program: Any) -> list[tuple[int, int, int]]:
    """Return the compute of the first device, in order."""
    rows = range(int(program.ptr[1]))
    found = [
        (int(program.kind[r]), int(program.stage[r]), int(program.microbatch[r])) for r in rows
    ]
    return [entry for entry in found if Kind.FORWARD <= entry[0] < Kind.UPDATE]
