import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.graph import Graph, Labels, OpCosts, OpTable, Phase, SampleUnit
from partita.errors import FormatError, InvalidInputError
from partita.formats.pipedream import (
    read_pipedream,
    stage_ids,
    stores_nothing,
    write_pipedream,
)


def node(name, desc="Conv2d(3, 64)", forward="1.000", backward="2.000", act="8.0", param="0.000"):
    return (
        f"{name} -- {desc} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={act}, parameter_size={param}"
    )


TEXT = "\n".join(
    [
        node("node1", "Input0", "636.000", "0.000", "12.0"),
        node("node4", "LSTM(2, 4)", "3.190", "5.348", "[6.0; 1.0; 1.5]", "50364416.000"),
        node("node3", "ReLU(inplace)", "0.077", "0.196", "4.0"),
        node("node2", "Add", "0.000", "0.000", "4.0"),
        node("node9", "__getitem__(1)", "0.000", "0.000", "1.0"),
        "\tnode3 -- node2",
        "\tnode4 -- node2",
        "\tnode4 -- node3",
        "\tnode1 -- node4",
        "\tnode4 -- node9",
    ]
)


def test_nodes_become_ops_and_sources_named_input_become_inputs():
    graph = read_pipedream(TEXT, name="g")
    assert graph.name == "g"
    assert graph.ops.names == ("node4", "node3", "node2", "node9")
    assert graph.tensors.names == ("node1", "node4", "node3", "node2", "node9")
    assert graph.tensors.producer.tolist() == [-1, 0, 1, 2, 3]
    assert graph.tensors.load_s.tolist() == [0.636, 0, 0, 0, 0]
    assert graph.tensors.differentiable.tolist() == [False, True, True, True, True]
    assert graph.batch_size == 1
    assert graph.sample_unit is SampleUnit.MINIBATCH


def test_times_are_seconds_and_lists_are_summed_and_kept():
    graph = read_pipedream(TEXT)
    assert graph.forward_s.tolist() == [3.19 / 1000, 0.077 / 1000, 0, 0]
    assert graph.backward_s.tolist() == [5.348 / 1000, 0.196 / 1000, 0, 0]
    assert graph.tensors.bytes.tolist() == [12, 8.5, 4, 4, 1]
    assert graph.annotations["pipedream"]["activation_lists"] == {"node4": (6.0, 1.0, 1.5)}
    assert "[6.0; 1.0; 1.5]" in write_pipedream(graph)


def test_only_nodes_with_parameters_have_one():
    graph = read_pipedream(TEXT)
    assert graph.parameters.names == ("node4.weight",)
    assert graph.parameters.bytes.tolist() == [50364416.0]
    assert graph.parameters.dtypes == ("float32",)


def test_order_of_arguments_is_the_order_of_edges():
    graph = read_pipedream(TEXT)
    pointers, edges = graph.in_edges
    add = graph.ops.names.index("node2")
    feeding = graph.edge_source[edges[pointers[add] : pointers[add + 1]]]
    assert [graph.ops.names[op] for op in feeding] == ["node3", "node4"]


def test_unused_elements_of_tuples_are_not_outputs():
    graph = read_pipedream(TEXT)
    assert [graph.tensors.names[tensor] for tensor in graph.outputs] == ["node2"]


@pytest.mark.parametrize(
    ("desc", "nothing"),
    [
        ("ReLU(inplace)", True),
        ("ReLU(inplace=True)", True),
        ("ReLU6(inplace=True)", True),
        ("LeakyReLU(negative_slope=0.01, inplace)", True),
        ("ReLU(inplace=False)", False),
        ("ReLU()", False),
        ("Dropout(p=0.5, inplace=False)", True),
        ("Dropout(p=0.2)", True),
        ("View(-1)", True),
        ("Size(0)", True),
        ("Size", True),
        ("Add(inplace)", True),
        ("Add", False),
        ("__getitem__(3)", True),
        ("Sequential(  (0): ReLU(inplace))", False),
        ("Viewer", False),
    ],
)
def test_what_stores_nothing_of_its_own(desc, nothing):
    assert stores_nothing(desc) is nothing
    graph = read_pipedream(node("n", desc))
    assert graph.ops.saved_bytes.tolist() == [0.0 if nothing else 8.0]


def test_types_are_the_first_word_of_the_description():
    text = "\n".join([node("a", "self.get_seq_lens"), node("b", "Branch 0"), node("c", "(x)")])
    types = read_pipedream(text).ops.types
    assert [types.names[label] for label in types.of] == ["self.get_seq_lens", "Branch", "(x)"]


def test_a_file_comes_back_byte_for_byte():
    assert write_pipedream(read_pipedream(TEXT)) == TEXT


def test_stage_ids_survive():
    text = f"{node('a')} -- stage_id=0\n{node('b')} -- stage_id=7\n{node('c')}\n\ta -- b"
    graph = read_pipedream(text)
    assert stage_ids(graph).tolist() == [0, 7, -1]
    assert write_pipedream(graph) == text
    assert stage_ids(read_pipedream(node("a"))) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text + "\n\n  \n",
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\t", "    "),
    ],
)
def test_marks_line_ends_and_blank_lines_do_not_matter(change):
    assert read_pipedream(change(TEXT)) == read_pipedream(TEXT)


@pytest.mark.parametrize(
    ("name", "desc"),
    [
        ("a,b", "Conv2d(3, 64, kernel_size=(3, 3))"),
        ("{x}", "Emu(  (bidir): LSTM(1024, 1024)    (layer1): {LSTM})"),
        ("a=b", "x -- y"),
        ("ä é", ""),
        ("Input7", "Linear"),
    ],
)
def test_odd_ids_and_descriptions_are_kept(name, desc):
    text = f"{node(name, desc)}\n{node('z')}\n\t{name} -- z"
    graph = read_pipedream(text)
    assert graph.ops.names[0] == name
    assert write_pipedream(graph) == text


def test_an_input_that_is_fed_is_an_op():
    graph = read_pipedream(f"{node('a')}\n{node('b', 'InputNorm')}\n\ta -- b")
    assert graph.ops.names == ("a", "b")


def test_numbers_of_inputs_come_back():
    text = f"{node('i', 'Input', '1.000', '2.500', '3.0', '4.000')}\n{node('b')}\n\ti -- b"
    assert write_pipedream(read_pipedream(text)) == text


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"{node('a')}\n{node('a')}", 2, ["'a'", "line 1", "unique"]),
        (f"{node('a')}\n\ta -- b", 2, ["'b'", "no node"]),
        (f"{node('a')}\n\tb -- a", 2, ["'b'", "no node"]),
        (f"{node('a')}\n{node('b')}\n\ta -- b\n\tb -- a", 4, ["'b' -> 'a'", "cycle"]),
        (f"{node('a')}\n\ta -- a", 2, ["cycle"]),
        (node("a", forward="nan"), 1, ["'nan'", "forward_compute_time", "0 to"]),
        (node("a", backward="-3"), 1, ["'-3'", "backward_compute_time"]),
        (node("a", act="1e308"), 1, ["'1e308'", "activation_size", "0 to"]),
        (node("a", act="[1.0; x]"), 1, ["'x'", "activation_size"]),
        (node("a", param="inf"), 1, ["'inf'", "parameter_size"]),
        (node("a", param="1e999"), 1, ["'1e999'", "parameter_size"]),
        (node("a", param="1_0"), 1, ["'1_0'"]),
        (node("a") + " -- stage_id=-1", 1, ["stage_id", "'-1'"]),
        (node("a") + " -- stage_id=x", 1, ["stage_id", "'x'"]),
        (f"{node('a')}\nnode2 -- Conv2d", 2, ["node2", "expected"]),
        (f"{node('a')}\n\ta", 2, ["edge", "expected"]),
        (f"{node('a')}\n\ta -- b -- c", 2, ["edge", "expected"]),
        (node("a").replace("parameter_size", "size"), 1, ["keys", "parameter_size"]),
        (node("a").replace(", parameter_size=0.000", ""), 1, ["keys"]),
        (f"{node('a')}\n{node('b', 'x' + chr(0))}", 2, ["NUL"]),
        (" -- ".join(["", *node("a").split(" -- ")[1:]]), 1, ["expected"]),
        ("", 0, ["no node"]),
        ("\n\t\n", 0, ["no node"]),
        (node("a", "Input"), 0, ["no op"]),
    ],
)
def test_errors_have_line_value_and_what_would_do(text, line, words):
    with pytest.raises(FormatError) as caught:
        read_pipedream(text)
    assert caught.value.line == line
    for word in words:
        assert word in str(caught.value)


def test_long_chains_need_no_recursion():
    lines = [node(f"n{i}") for i in range(3000)] + [f"\tn{i} -- n{i + 1}" for i in range(2999)]
    text = "\n".join(lines)
    assert write_pipedream(read_pipedream(text)) == text


def test_the_line_of_a_late_cycle_is_found():
    lines = [node(f"n{i}") for i in range(100)] + [f"\tn{i} -- n{i + 1}" for i in range(99)]
    with pytest.raises(FormatError, match="'n99' -> 'n3' closes a cycle") as caught:
        read_pipedream("\n".join([*lines, "\tn99 -- n3", "\tn0 -- n50"]))
    assert caught.value.line == 200


def test_a_graph_from_elsewhere_is_written_with_tied_weights_once():
    graph = example("gpt-small").graph
    text = write_pipedream(graph)
    again = read_pipedream(text)
    assert write_pipedream(again) == text
    assert again.ops.names == graph.ops.names
    assert again.forward_s.tolist() == pytest.approx(graph.forward_s.tolist(), rel=1e-15)
    trained = graph.parameters.bytes[graph.parameters.trainable].sum()
    assert again.parameters.bytes.sum() == trained


def test_the_times_of_another_device_type_can_be_written():
    graph = example("six-node-chain").graph
    assert "forward_compute_time=0.302" in write_pipedream(graph)
    assert "forward_compute_time=0.388" in write_pipedream(graph, device_type="TitanXP")
    with pytest.raises(InvalidInputError, match="not for 'x'"):
        write_pipedream(graph, device_type="x")


def small(names=("a", "b"), **columns):
    costs = OpCosts(forward_s=np.ones(len(names)))
    return Graph(ops=OpTable(names=names, **columns), costs=(costs,))


def test_backward_ops_cannot_be_written():
    with pytest.raises(InvalidInputError, match="'b' is backward"):
        write_pipedream(small(phase=[Phase.FORWARD, Phase.BACKWARD]))


@pytest.mark.parametrize("name", ["a -- b", "a\nb", " a", "a --", "\ufeffa", "a\0"])
def test_names_that_would_break_the_file_are_refused(name):
    with pytest.raises(InvalidInputError, match="an id"):
        write_pipedream(small((name, "z")))


def test_ops_without_tensors_are_written_and_come_back():
    text = write_pipedream(small())
    assert "activation_size=[]" in text
    assert write_pipedream(read_pipedream(text)) == text


def test_a_source_of_a_type_called_input_stays_an_op():
    types = Labels(names=("InputLayer",), of=np.zeros(2, np.int32))
    text = write_pipedream(small(types=types))
    assert "a -- Module(InputLayer) -- " in text
    assert read_pipedream(text).ops.names == ("a", "b")
