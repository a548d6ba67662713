"""Optimal splits of the published inputs of Tarnawski et al. 2020 have their recorded values.

Source: dnn-partitioning of the shared data folder (its README says where inputs and answers come
from). ``benchmarks/planners.py --group dnn-partitioning`` measures all of them, with CPU seconds.
"""

import json
import random

import pytest

from partita.core.problem import Metric
from partita.formats.dnn_partitioning import read_dnn_partitioning, write_split
from partita.planners.optimal_split import plan_optimal_split

LOADS = (
    "LayerGraphs/bert24_inference",
    "LayerGraphs/bert24_training",
    "LayerGraphs/gnmt_training",
    "LayerGraphs/inceptionv3_inference",
    "LayerGraphs/inceptionv3_training",
    "LayerGraphs/resnet50_inference",
    "LayerGraphs/resnet50_training",
    "OperatorGraphs/bert_L-12_training",
    "OperatorGraphs/bert_l-12_inference",
    "OperatorGraphs/bert_l-3_inference",
    "OperatorGraphs/bert_l-3_training",
    "OperatorGraphs/bert_l-6_inference",
    "OperatorGraphs/resnet50_inference",
    "OperatorGraphs/resnet50_training",
)


@pytest.fixture(scope="module")
def published(shared_data):
    """Return what reads an input, and its recorded answer."""
    folder = shared_data / "dnn-partitioning"
    answers = {row["case"]: row for row in json.loads((folder / "answers.json").read_text())}

    def read(case):
        return (folder / f"{case}.json").read_text(), answers[case]

    return read


def renumbered(text, seed):
    """Return an input with other ids, and nodes, edges and classes in another order."""
    rng = random.Random(seed)
    document = json.loads(text)
    ids = [node["id"] for node in document["nodes"]]
    new_id = dict(zip(ids, rng.sample(range(10 * len(ids)), len(ids)), strict=True))
    colors = sorted({node["colorClass"] for node in document["nodes"] if "colorClass" in node})
    new_color = dict(zip(colors, rng.sample(range(10 * len(ids)), len(colors)), strict=True))
    for node in document["nodes"]:
        node["id"] = new_id[node["id"]]
        if "colorClass" in node:
            node["colorClass"] = new_color[node["colorClass"]]
    for edge in document["edges"]:
        edge["sourceId"], edge["destId"] = new_id[edge["sourceId"]], new_id[edge["destId"]]
    rng.shuffle(document["nodes"])
    rng.shuffle(document["edges"])
    return json.dumps(document)


@pytest.mark.parametrize("case", LOADS)
def test_contiguous_splits_are_the_recorded_optima(published, case):
    text, answer = published(f"throughput/{case}")
    solution = plan_optimal_split(read_dnn_partitioning(text))
    assert solution.value * 1e3 == pytest.approx(answer["ours_dp"]["max_load"], rel=1e-6)
    assert solution.stats["best_contiguous"]


@pytest.mark.parametrize("case", LOADS[::3])
def test_numbers_and_order_of_nodes_do_not_matter(published, case):
    text, answer = published(f"throughput/{case}")
    solution = plan_optimal_split(read_dnn_partitioning(renumbered(text, seed=5)))
    assert solution.value * 1e3 == pytest.approx(answer["ours_dp"]["max_load"], rel=1e-6)


@pytest.mark.parametrize("case", [LOADS[1], LOADS[2], LOADS[9], LOADS[12]])
def test_splits_of_any_shape_are_near_the_best_known(published, case):
    text, answer = published(f"throughput/{case}")
    problem = read_dnn_partitioning(text)
    solution = plan_optimal_split(problem, contiguous=False, iterations=2_000_000)
    assert solution.value * 1e3 <= answer["best_known"]["max_load"] * 1.005
    assert json.loads(write_split(problem, solution.plan))["fpgas"]


@pytest.mark.parametrize("case", ["LayerGraphs/gnmt", "OperatorGraphs/bert_l-3"])
def test_latency_is_near_the_best_known(published, case):
    text, answer = published(f"latency/{case}_inference")
    problem = read_dnn_partitioning(text, metric=Metric.SINGLE_SAMPLE_LATENCY)
    solution = plan_optimal_split(problem)
    assert solution.value * 1e3 <= answer["best_known"]["latency"] * 1.01
