"""Published plans have their published values: ``benchmarks/objectives.py`` on a few files.

Records: PipeDream, Tarnawski et al. 2020, Piper, DynamicMLTrainer and Baechi, in the shared data
folder (its README says where they come from).
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from partita.formats.pipedream import read_pipedream
from partita.objectives.cuts import counted_ops, live_cut_bytes, released_cut_bytes

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "objectives.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_objectives", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("family", "inputs", "rows"),
    [
        ("pipedream_rows", ("vgg16", "gnmt"), 49),
        ("split_rows", ("bert24", "gnmt", "bert_l-3"), 26),
        ("piper_rows", ("bert32a100.json",), 83),
        ("sharding_rows", ("chain201_k3", "small01", "medium2"), 12),
        ("parallel_rows", ("graph_fig3", "inception_v3_b64", "layered_200"), 65),
        ("sequential_rows", ("graph_fig3", "inception_v3_b64", "transformer_b64"), 15),
    ],
)
def test_plans_have_their_recorded_values(benchmark, shared_data, family, inputs, rows):
    found = list(getattr(benchmark, family)(shared_data, inputs))
    assert [row for row in found if row.missed] == []
    assert sum(row.evaluable for row in found) == rows


def test_rows_without_a_plan_are_listed_with_the_reason(benchmark, shared_data):
    rows = list(benchmark.sequential_rows(shared_data, ("layered_1000",)))
    assert [row.note for row in rows] == ["the order of commitment is not kept"] * 3
    assert not any(row.evaluable or row.missed for row in rows)


@pytest.mark.parametrize(
    ("model", "states", "over"), [("resnet18", 100, 30), ("squeezenet1_0", 99, 32)]
)
def test_released_cuts_are_over_counted_as_often_as_found(shared_data, model, states, over):
    """How often the released optimizer counts a cut too often, as recorded."""
    text = (shared_data / "pipedream/profiles" / model / "graph.txt").read_text()
    graph = read_pipedream(text)
    counted = counted_ops(graph)
    needs = {op: set() for op in range(len(graph))}
    for source, reader in zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True):
        if source >= 0:
            needs[reader].add(source)
    seen, stack = {frozenset()}, [frozenset()]
    while stack:
        ideal = stack.pop()
        for op in range(len(graph)):
            if op not in ideal and needs[op] <= ideal and (larger := ideal | {op}) not in seen:
                seen.add(larger)
                stack.append(larger)
    differ = 0
    for ideal in seen - {frozenset(), frozenset(range(len(graph)))}:
        stage_of = np.array([op not in ideal for op in range(len(graph))], np.int32)
        live = live_cut_bytes(graph, stage_of, 2, counted)[0]
        differ += released_cut_bytes(graph, stage_of, 2, counted)[0] > live
    assert (len(seen) - 1, differ) == (states, over)
