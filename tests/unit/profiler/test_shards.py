"""Ranks of tensor-parallel groups, measured alone with a clock that counts its readings."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone calls it
from torch import nn

from partita.capture.setting import Example
from partita.core.codec import read_json, write_json
from partita.core.graph import Graph
from partita.profiler.measure import shards
from partita.profiler.measure.measure import ProfileOptions
from partita.profiler.measure.model import CaptureOptions, profile_model
from partita.profiler.merge import merge_costs


class CountingClock:
    """Ticks once a reading: every op takes as long, however large its part is."""

    counts_host = False

    def __init__(self, *_: object) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 1.0
        return self._now

    def between(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        pass


def profiled(kind: str = "cpu") -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    return profile_model(
        model,
        Example(args=(torch.randn(4, 8),), labels=torch.randn(4, 8)),
        loss=F.mse_loss,
        options=ProfileOptions(rounds=1, warmup=0, device_type=kind, threads=1),
        capture_options=CaptureOptions(tensor_degree=2),
    ).graph


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setattr(shards, "stopwatch_for", CountingClock)
    return profiled()


def test_ops_of_a_rank_are_measured_and_not_divided(graph: Graph) -> None:
    table = graph.degrees
    rank = table.tp == 2
    assert sorted(set(table.tp.tolist())) == [1, 2]
    assert (table.forward_s[rank] == 1).all()  # a reading each, not half of what one device takes
    assert (table.backward_s[rank] >= 1).all()
    assert np.array_equal(table.forward_s[~rank], graph.costs[0].forward_s)


def test_a_rank_keeps_its_part_of_what_is_split(graph: Graph) -> None:
    table = graph.degrees
    whole, part = (table.saved_bytes[table.tp == degree] for degree in (1, 2))
    gelu = next(row for row, name in enumerate(graph.ops.names) if "gelu" in name.lower())
    assert part[gelu] == whole[gelu] / 2 > 0


def test_calls_among_ranks_are_left_to_the_links(graph: Graph) -> None:
    table = graph.degrees
    rank = table.tp == 2
    assert table.tensor_calls[rank].sum() == 2  # one sum: two all-gathers of its size
    assert not table.tensor_calls[~rank].any()


def test_the_graph_with_ranks_is_a_document_and_merges(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_json(write_json(graph)) == graph
    monkeypatch.setattr(shards, "stopwatch_for", CountingClock)
    both = merge_costs([graph, profiled("a100")]).degrees
    assert both.device_types == ("cpu", "a100")
    assert len(both) == 2 * len(graph.degrees)
    assert len(both.row_of) == len(both)
