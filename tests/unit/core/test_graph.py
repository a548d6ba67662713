import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from partita.core.graph import (
    CostOrigin,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    Phase,
    TensorTable,
    VariantTable,
)
from partita.errors import InvalidInputError
from partita.testing.builders import Figures, Traits, chain, diamond

NAN, INF = float("nan"), float("inf")


def graph(**changes: object) -> Graph:
    """Return three ops in a row with two parameters, some of it changed."""
    parts: dict[str, object] = {
        "ops": OpTable(names=("a", "b", "c")),
        "costs": (OpCosts(forward_s=[1.0, 2.0, 3.0]),),
        "tensors": TensorTable(names=("x", "ta", "tb", "tc"), producer=[-1, 0, 1, 2]),
        "edges": EdgeTable(tensor=[0, 1, 2], reader=[0, 1, 2]),
        "parameters": ParameterTable(
            names=("v", "w"), bytes=[8.0, 4.0], use_op=[0, 2, 1], use_parameter=[0, 0, 1]
        ),
        "outputs": [3],
        "loss": 3,
    }
    return Graph(**(parts | changes))


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        make()
    return str(caught.value)


def arrays(owner: object) -> list[np.ndarray]:
    """Return all columns of a core object and its parts."""
    found = []
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, np.ndarray):
                found.append(part)
            elif dataclasses.is_dataclass(part):
                found += arrays(part)
    return found


def test_a_graph_is_frozen_and_all_of_its_columns_are_read_only():
    made = graph()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.ops.names = ()
    columns = arrays(made)
    assert len(columns) > 40
    assert not any(values.flags.writeable for values in columns)
    derived = (made.edge_source, made.topological_order, made.parameter_bytes, made.is_forward)
    assert not any(values.flags.writeable for values in derived)


def test_lists_become_tuples_and_columns_of_the_right_type():
    made = graph(ops=OpTable(names=["a", "b", "c"], colocation=[0, 0, -1]))
    assert made.ops.names == ("a", "b", "c")
    assert made.ops.colocation.dtype == np.int32
    assert made.forward_s.dtype == np.float64
    assert made.ops.phase.dtype == np.int8
    assert isinstance(made.costs, tuple)


def test_the_source_of_a_column_may_change_later():
    seconds = np.array([1.0, 2.0, 3.0])
    made = graph(costs=[OpCosts(forward_s=seconds)])
    seconds[:] = -1
    assert made.forward_s.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ()}, "a graph needs at least one op, got none"),
        ({"names": ("a", "a")}, "ops: 'a' stands twice; names must be unique"),
        ({"names": ("a", "")}, "ops: '' is not a name; expected a non-empty string"),
        ({"flops": [1.0, NAN]}, "flops of row 1 ('b') is nan; expected 0 to 1e+27"),
        ({"flops": [1.0, -1.0]}, "flops of row 1 ('b') is -1.0; expected 0 to 1e+27"),
        ({"saved_bytes": [INF, 0]}, "saved_bytes of row 0 ('a') is inf; expected 0 to 1.15292e+18"),
        ({"workspace_bytes": [1e308, 0]}, "workspace_bytes of row 0 ('a') is 1e+308; expected 0 "),
        ({"workspace_bytes": [2**63, 0]}, "workspace_bytes of row 0 ('a') is 9.2233720368547"),
        ({"fixed_share": [0.5, 1.5]}, "fixed_share of row 1 ('b') is 1.5; expected 0 to 1"),
        ({"phase": [0, 2]}, "phase of row 1 ('b') is 2; expected 0 to 1"),
        ({"colocation": [-2, 0]}, "colocation of row 0 ('a') is -2; expected -1 or more"),
        ({"device_kinds": [0, 3]}, "device_kinds of row 0 ('a') is 0; expected 1 to 3"),
        ({"colocation": [0, 2**31]}, "colocation must hold whole numbers within the range of int"),
        ({"flops": [1.0]}, "flops has 1 values for 2 rows"),
        ({"saved_fixed_bytes": [0, 5]}, "op 'b': saved_fixed_bytes exceed saved_bytes"),
        ({"layers": Labels(names=("l",), of=[0])}, "layers label 1 of 2 ops"),
        ({"types": Labels(names=("l",), of=[0] * 3)}, "types label 3 of 2 ops"),
    ],
)
def test_ops_that_cannot_be_are_refused(changes, words):
    message = refusal(lambda: OpTable(**({"names": ("a", "b")} | changes)))
    assert message.startswith(words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Labels(names=("a",), of=[0, 1]), "label of row 1 is 1; expected -1 to 0"),
        (lambda: Labels(names=("a",), of=[-2]), "label of row 0 is -2; expected -1 to 0"),
        (lambda: Labels(names=("a", "a")), "labels: 'a' stands twice"),
        (lambda: Labels(names=("a",), of=3), "label of row 0 is 3; expected -1 to 0"),
        (
            lambda: OpCosts(forward_s=[1.0, NAN]),
            "forward_s of row 1 is nan; expected 0 to 1e+15",
        ),
        (
            lambda: OpCosts(forward_s=[1.0], backward_s=[-1.0]),
            "backward_s of row 0 is -1.0; expected 0 to 1e+15",
        ),
        (
            lambda: OpCosts(forward_s=[1.0, 1.0], backward_s=[1.0]),
            "backward_s has 1 values for 2 rows",
        ),
        (
            lambda: OpCosts(forward_s=[1.0], backward_s=[1.0], backward_input_s=[1.5]),
            "backward_input_s of row 0 exceeds backward_s",
        ),
        (
            lambda: OpCosts(forward_s=[1.0], device_type="a100", peak_flop_per_s=NAN),
            "peak_flop_per_s of costs for 'a100' is nan; expected 0 or more, finite",
        ),
        (
            lambda: OpCosts(forward_s=[1.0], memory_bytes_per_s=-1.0),
            "memory_bytes_per_s of costs for 'any device' is -1.0; expected 0 or more, finite",
        ),
    ],
)
def test_labels_and_costs_that_cannot_be_are_refused(make, words):
    assert refusal(make).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ("t", "t")}, "tensors: 't' stands twice"),
        ({"producer": [0]}, "tensor producer has 1 values for 2 rows"),
        ({"producer": [0, -2]}, "tensor producer of row 1 ('u') is -2; expected -1 or more"),
        ({"bytes": [1.0, INF]}, "tensor bytes of row 1 ('u') is inf; expected 0 to 1.15292e+18"),
        ({"bytes": [1.0, 4.0], "fixed_bytes": [0, 5]}, "tensor 'u': fixed_bytes exceed bytes"),
        ({"transfer_s": [NAN, -1.0]}, "transfer_s of row 1 ('u') is -1.0; expected 0 to 1e+15"),
        ({"load_s": NAN}, "load_s of row 0 ('t') is nan; expected 0 to 1e+15"),
        ({"differentiable": [2, 0]}, "differentiable must hold true or false"),
    ],
)
def test_tensors_that_cannot_be_are_refused(changes, words):
    parts = {"names": ("t", "u"), "producer": [0, 0]} | changes
    assert refusal(lambda: TensorTable(**parts)).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ("v", "v")}, "parameters: 'v' stands twice"),
        ({"bytes": [1.0, -1.0]}, "parameter bytes of row 1 ('w') is -1.0; expected 0 to"),
        (
            {"dtypes": ("float32", "float31")},
            "parameter dtypes ['float31'] are not known; there are ['bfloat16', 'bool',",
        ),
        ({"dtypes": ("float32",)}, "1 dtypes for 2 parameters"),
        ({"use_op": [0]}, "parameter of a use has 0 values for 1 rows"),
        ({"use_op": [0], "use_parameter": [2]}, "parameter of a use of row 0 is 2; expected 0 to"),
        ({"use_op": [-1], "use_parameter": [0]}, "op of a parameter use of row 0 is -1; expected"),
        ({"buffer": [False, True]}, "buffer 'w' cannot be trainable"),
    ],
)
def test_parameters_that_cannot_be_are_refused(changes, words):
    message = refusal(lambda: ParameterTable(**({"names": ("v", "w")} | changes)))
    assert message.startswith(words)


def test_a_parameter_without_dtype_is_float32_and_has_a_number_of_elements():
    plain = ParameterTable(names=("v",), bytes=[8.0])
    assert (plain.dtypes, plain.elements.tolist()) == (("float32",), [2.0])
    mixed = ParameterTable(names=("v", "w"), bytes=[8.0, 8.0], dtypes=("float16", "int64"))
    assert mixed.elements.tolist() == [4.0, 1.0]
    assert len(ParameterTable().elements) == 0


def test_a_tied_parameter_is_one_and_counts_for_each_op_that_uses_it():
    tied = chain(3, Figures(parameter_bytes=10.0), Traits(tied=[(0, 2)], bare=[0, 1, 2]))
    assert tied.parameters.names == ("tied0",)
    assert tied.parameter_bytes.tolist() == [10.0, 0.0, 10.0]
    assert graph().parameter_bytes.tolist() == [8.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": [0, 1]}, "variant tp of row 0 is 0; expected 1 or more"),
        ({"tp": [2]}, "variant tp has 1 values for 2 rows"),
        ({"forward_s": [NAN, 1.0]}, "forward_s of row 0 is nan; expected 0 to 1e+15"),
        ({"saved_bytes": -1.0}, "saved_bytes of row 0 is -1.0; expected 0 to"),
        ({"op": [1, 1]}, "two variants of one op have the same tp and recompute"),
        (
            {"sync_in_ptr": [0, 1, 1], "sync_in_bytes": [1.0, 2.0]},
            "variant sync_in_ptr does not cover its values",
        ),
        (
            {"sync_out_ptr": [0, 2, 1], "sync_out_bytes": [1.0]},
            "sync_out_ptr of row 1 is 2; expected 0 to 1",
        ),
        (
            {"sync_out_ptr": [0, 1], "sync_out_bytes": [1.0]},
            "sync_out_ptr has 2 values for 3 rows",
        ),
        (
            {"sync_in_ptr": [0, 1, 1], "sync_in_bytes": [-1.0]},
            "sync_in_bytes of row 0 is -1.0; expected 0 to",
        ),
        ({"sync_in_bytes": [1.0]}, "variant sync_in_ptr does not cover its values"),
    ],
)
def test_variants_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: VariantTable(**({"op": [0, 1]} | changes))).startswith(words)


def test_variants_are_found_by_op_degree_and_recomputation():
    variants = VariantTable(op=[0, 0, 1], tp=[1, 2, 2], recompute=[True, False, False])
    assert variants.row_of == {(0, 1, True): 0, (0, 2, False): 1, (1, 2, False): 2}
    assert variants.sync_in_ptr.tolist() == [0, 0, 0, 0]
    assert len(graph(variants=variants).variants) == 3
    assert len(VariantTable()) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "a graph needs a name, got ''"),
        ({"costs": ()}, "a graph needs costs for at least one type of device"),
        (
            {"costs": (OpCosts(forward_s=[1.0] * 3), OpCosts(forward_s=[2.0] * 3))},
            "costs for one device type stand twice in ['', '']",
        ),
        (
            {"costs": (OpCosts(forward_s=[1.0]),)},
            "costs for 'any device' have 1 rows for 3 ops",
        ),
        (
            {"costs": (OpCosts(device_type="a100", forward_s=[1.0] * 4),)},
            "costs for 'a100' have 4 rows for 3 ops",
        ),
        (
            {"tensors": TensorTable(names=("x", "t", "u", "v"), producer=[3, 0, 0, 0])},
            "tensor producer of row 0 is 3; there are 3",
        ),
        ({"edges": EdgeTable(tensor=[0, 9], reader=[0, 1])}, "edge tensor of row 1 is 9; there ar"),
        ({"edges": EdgeTable(tensor=[0, 1], reader=[0, 3])}, "edge reader of row 1 is 3; there ar"),
        (
            {"parameters": ParameterTable(names=("v",), use_op=[7], use_parameter=[0])},
            "op of a parameter use of row 0 is 7; there are 3",
        ),
        ({"variants": VariantTable(op=[3])}, "variant op of row 0 is 3; there are 3"),
        ({"outputs": [0, 4]}, "outputs of row 1 is 4; expected 0 to 3"),
        ({"loss": 4}, "loss is tensor 4; there are 4 tensors"),
        ({"loss": -2}, "loss is tensor -2; there are 4 tensors"),
        ({"batch_size": 0}, "batch_size is 0; expected 1 to 2147483647"),
        ({"batch_size": 2**63}, "batch_size is 9223372036854775808; expected 1 to 2147483647"),
        ({"tokens_per_sample": -1}, "tokens_per_sample is -1; expected 0 to 2147483647"),
        ({"dtype": "float31"}, "dtype 'float31' is not one of ['bfloat16',"),
        ({"annotations": {"x": NAN}}, "annotations: nan is not a JSON number"),
        (
            {
                "tensors": TensorTable(names=("ta", "tb"), producer=[0, 1]),
                "edges": EdgeTable(tensor=[0, 1], reader=[1, 0]),
                "outputs": [],
                "loss": -1,
            },
            "the graph has a cycle: 'a' -> 'b' -> 'a'; expected a DAG",
        ),
        (
            {"edges": EdgeTable(tensor=[2], reader=[1])},
            "the graph has a cycle: 'b' -> 'b'; expected a DAG",
        ),
    ],
)
def test_graphs_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: graph(**changes)).startswith(words)


def test_tables_know_their_length():
    made = graph()
    assert [len(part) for part in (made.ops, made.tensors, made.edges, made.parameters)] == [
        *(3, 4, 3, 2)
    ]


def test_edges_of_unequal_length_are_refused():
    message = refusal(lambda: EdgeTable(tensor=[0, 1], reader=[1]))
    assert message == "edge reader has 1 values for 2 rows"
    assert refusal(lambda: EdgeTable(tensor=[-1], reader=[1])).startswith("edge tensor of row 0")


def test_edges_are_found_by_op_in_the_order_of_arguments():
    made = graph(edges=EdgeTable(tensor=[1, 0, 2, 0], reader=[2, 0, 2, 2]))
    assert made.edge_source.tolist() == [0, -1, 1, -1]
    pointers, edges = made.in_edges
    assert (pointers.tolist(), edges.tolist()) == ([0, 1, 1, 4], [1, 0, 2, 3])
    pointers, edges = made.out_edges
    assert (pointers.tolist(), edges.tolist()) == ([0, 1, 2, 2], [0, 2])


def test_the_first_costs_are_the_reference():
    slow = OpCosts(device_type="slow", forward_s=[9.0] * 3, origin=CostOrigin.MEASURED)
    fast = OpCosts(device_type="fast", forward_s=[1.0] * 3, backward_s=[2.0] * 3)
    made = graph(costs=(fast, slow))
    assert (made.forward_s.tolist(), made.backward_s.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_an_op_may_be_an_explicit_backward_one():
    made = graph(ops=OpTable(names=("a", "b", "c"), phase=[Phase.FORWARD, 0, Phase.BACKWARD]))
    assert made.is_forward.tolist() == [True, True, False]


def test_graphs_are_equal_by_value_and_unknowns_are_equal():
    assert graph() == graph()
    assert graph() != graph(name="other")
    assert graph() != graph(costs=(OpCosts(forward_s=[1.0, 2.0, 4.0]),))
    assert graph() != "graph"
    assert len(graph()) == 3


def test_the_fingerprint_is_known_and_stays():
    assert chain(3).fingerprint == "1ab4ab7504b50797189fbeb8db9d2b75"
    assert graph().fingerprint == graph().fingerprint
    assert len({chain(3).fingerprint, chain(4).fingerprint, diamond(2).fingerprint}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"costs": (OpCosts(forward_s=[9.0] * 3),)},
        {"batch_size": 7},
        {"dtype": "float16"},
        {"tokens_per_sample": 5},
        {"annotations": {"a": 1}},
        {"ops": OpTable(names=("a", "b", "c"), flops=5.0, colocation=[0, 0, -1])},
        {"variants": VariantTable(op=[0], tp=[2])},
    ],
)
def test_costs_batch_and_remarks_do_not_change_the_fingerprint(changes):
    assert graph(**changes).fingerprint == graph().fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": OpTable(names=("a", "b", "d"))},
        {"ops": OpTable(names=("a", "b", "c"), phase=[0, 0, 1])},
        {"tensors": TensorTable(names=("x", "ta", "tb", "td"), producer=[-1, 0, 1, 2])},
        {"tensors": TensorTable(names=("x", "ta", "tb", "tc"), producer=[-1, 0, 1, 1])},
        {"edges": EdgeTable(tensor=[0, 1, 1], reader=[0, 1, 2])},
        {"edges": EdgeTable(tensor=[0, 1, 2, 1], reader=[0, 1, 2, 2])},
        {"parameters": ParameterTable()},
        {
            "parameters": ParameterTable(
                names=("v", "w"), bytes=[8.0, 4.0], use_op=[0, 1], use_parameter=[0, 1]
            )
        },
        {"outputs": [2, 3]},
        {"loss": -1},
    ],
)
def test_a_change_of_the_structure_changes_the_fingerprint(changes):
    assert graph(**changes).fingerprint != graph().fingerprint


def test_equal_graphs_have_equal_fingerprints_also_with_negative_zeros():
    uses = {"names": ("v",), "use_op": [0], "use_parameter": [0]}
    plus = graph(parameters=ParameterTable(bytes=[0.0], **uses))
    minus = graph(parameters=ParameterTable(bytes=[-0.0], **uses))
    assert plus == minus
    assert plus.fingerprint == minus.fingerprint


def test_names_of_any_script_have_a_fingerprint():
    names = ("größe", "层", "\ud800")
    assert len(graph(ops=OpTable(names=names)).fingerprint) == 32


def test_figures_at_a_microbatch_size_grow_but_for_their_fixed_part() -> None:
    graph = chain(2, Figures(saved_bytes=30.0, tensor_bytes=49.0))
    ops = dataclasses.replace(graph.ops, fixed_share=[0.0, 0.5], saved_fixed_bytes=[0.0, 10.0])
    assert ops.saved_at(0.5).tolist() == [15.0, 20.0]
    assert ops.time_factor(0.5).tolist() == [0.5, 0.75]
    assert ops.time_factor(4.0, microbatches=8).tolist() == [4.0, 6.0]
    fixed, growing = ops.time_parts(graph.forward_s)
    assert (fixed + growing).tolist() == graph.forward_s.tolist()
    table = dataclasses.replace(graph.tensors, fixed_bytes=0.0)
    assert table.bytes_at(np.array([1, 2, 49]), 49, np.ones(3, dtype=int)).tolist() == [1, 2, 49]
    same = dataclasses.replace(table, fixed_bytes=table.bytes)
    assert same.bytes_at(0.25).tolist() == table.bytes.tolist()
