"""The built-in problems say what the published files say, and the models have the right size."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import EXAMPLES, example
from partita.core.codec import read_json, write_json
from partita.core.graph import CostOrigin
from partita.errors import InvalidInputError
from partita.formats.baechi import read_baechi
from partita.formats.dynamicml import read_dynamicml
from partita.formats.server_file import open_beside, read_server_file


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_problem_that_survives_its_document(name):
    problem = example(name)
    assert problem.graph.name == name
    assert read_json(write_json(problem)) == problem
    assert example(name) == problem


def test_an_unknown_example_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInputError, match="'x'; there are chain201"):
        example("x")


@pytest.mark.parametrize("figure", ["fig1", "fig2", "fig21", "fig3"])
def test_the_dummy_graphs_are_those_of_baechi(shared_data, figure):
    read = read_baechi((shared_data / f"baechi/graphs/graph_{figure}.json").read_text())
    problem = example(f"baechi-{figure}")
    assert dataclasses.replace(read.graph, name=problem.graph.name) == problem.graph
    assert dataclasses.replace(read.cluster, name=problem.cluster.name) == problem.cluster
    assert read.objective == problem.objective


def test_the_chain_is_that_of_dynamicml(shared_data):
    read = read_dynamicml((shared_data / "dynamicml/chain201_k3.json").read_text())
    problem = example("chain201")
    plain = dataclasses.replace(read.graph, name="chain201", annotations={})
    assert plain == problem.graph
    assert dataclasses.replace(read.cluster, name="chain201") == problem.cluster
    assert read.objective == problem.objective


def test_the_six_nodes_are_those_of_sparsepipedream(shared_data):
    path = shared_data / "sparsepipedream/test_server.txt"
    opener = open_beside(str(path), lambda name: Path(name).read_text())
    read = read_server_file(path.read_text(), opener, name="six-node-chain")
    problem = example("six-node-chain")
    assert dataclasses.replace(read.graph, annotations={}) == problem.graph
    assert read.cluster == problem.cluster
    assert read.objective == problem.objective


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "blocks", "gflops"),
    [
        ("gpt-small", 124_439_808, 15, 12, pytest.approx(292, rel=0.02)),
        ("resnet50", 25_557_032, 18, 16, pytest.approx(8.2, rel=0.02)),
    ],
)
def test_models_have_the_published_size(name, parameters, layers, blocks, gflops):
    graph = example(name).graph
    table = graph.parameters
    assert table.elements[table.trainable].sum() == parameters
    assert len(graph.ops.layers.names) == layers
    assert graph.ops.layers.of.min() >= 0
    assert len(graph.ops.blocks.names) == blocks
    assert graph.ops.flops.sum() / graph.batch_size / 1e9 == gflops


def test_the_head_of_the_gpt_uses_the_weight_of_the_embedding():
    graph = example("gpt-small").graph
    table = graph.parameters
    weight = table.names.index("embedding.word.weight")
    users = [graph.ops.names[op] for op in table.use_op[table.use_parameter == weight]]
    assert users == ["embedding.word", "head.linear"]
    assert graph.ops.layers.names[:2] == ("embedding.word", "embedding.position")
    assert graph.tokens_per_sample == 1024


@pytest.mark.parametrize("name", ["gpt-small", "resnet50"])
def test_models_have_skips_a_loss_and_estimated_costs_for_three_types(name):
    graph = example(name).graph
    assert [costs.device_type for costs in graph.costs] == ["a100", "v100", "cpu"]
    assert {costs.origin for costs in graph.costs} == {CostOrigin.ESTIMATED}
    totals = [costs.forward_s.sum() for costs in graph.costs]
    assert totals == sorted(totals)
    assert graph.tensors.names[graph.loss] == "head.loss"
    assert graph.tensors.bytes[graph.loss] == graph.tensors.fixed_bytes[graph.loss] == 4
    readers = np.bincount(graph.edges.tensor, minlength=len(graph.tensors))
    assert (readers[graph.tensors.producer >= 0] > 1).sum() >= 15
    assert not graph.tensors.differentiable[graph.tensors.producer < 0].any()
    for costs in graph.costs:
        assert (costs.backward_s >= costs.forward_s).all()
        assert (costs.backward_input_s == costs.forward_s).all()


def test_batch_norms_have_buffers():
    table = example("resnet50").graph.parameters
    assert table.buffer.sum() == 2 * 53
    assert not table.trainable[table.buffer].any()


@pytest.mark.parametrize("name", ["gpt-small", "resnet50"])
def test_times_of_the_models_are_the_roofline_that_the_module_describes(name):
    graph = example(name).graph
    touched = np.zeros(len(graph.ops))
    made = graph.tensors.producer >= 0
    np.add.at(touched, graph.tensors.producer[made], graph.tensors.bytes[made])
    np.add.at(touched, graph.edges.reader, graph.tensors.bytes[graph.edges.tensor])
    uses = graph.parameters
    np.add.at(touched, uses.use_op, uses.bytes[uses.use_parameter])
    for costs in graph.costs:
        device = load_catalogue().device_type(costs.device_type)
        peak, memory = device.peak_flop_per_s["float32"], device.memory_bytes_per_s
        assert (costs.peak_flop_per_s, costs.memory_bytes_per_s) == (peak, memory)
        expected = graph.ops.flops / (0.5 * peak) + touched / (0.8 * memory) + 5e-6
        np.testing.assert_allclose(costs.forward_s, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("gpt-small", "31f3c73c9c30222ecf4853b0a5b71532"),
        ("resnet50", "83da501ee0275c573c9fb00c2fa06e22"),
        ("chain201", "8a5d0e771fcc9e6dda60654beb9437c3"),
        ("baechi-fig1", "ffb80ec37bd8a22019b53492a5e004e5"),
    ],
)
def test_built_in_graphs_keep_their_fingerprint(name, fingerprint):
    assert example(name).graph.fingerprint == fingerprint
