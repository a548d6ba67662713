"""The op that makes a NaN of numbers is found by running a stage op by op."""

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import example_inputs
from partita.capture.sources import SourceOptions, load_source
from partita.runtime.stage_code import Call
from partita.testing.builders import flat_cluster, pipeline

MODEL = ModelOrigin(
    text="gpt3-small",
    options=SourceOptions(batch_size=1, sequence_length=4, scale=0.03, dtype="float64"),
)


def test_the_first_op_that_makes_a_nan_is_named_and_masks_are_not() -> None:
    captures = Captures(load_source(MODEL.text, MODEL.options), MODEL)
    captured = captures.at(1)
    graph = captured.graph
    stages = captured.stages(pipeline(graph, flat_cluster(1), [0], microbatches=1))
    example = captures.source.example(1, 0)
    inputs = example_inputs(captures.source.model, example)
    state = {name: value.detach().clone() for name, value in captured.parameters.items()}
    assert stages.first_not_finite(0, inputs, state, Call()) in ("", *graph.ops.names)
    name = next(n for n in graph.parameters.names if n.endswith("qkv.weight"))
    state[name].view(-1)[0] = float("nan")
    row = graph.parameters.names.index(name)
    op = int(graph.parameters.use_op[graph.parameters.use_parameter == row][0])
    assert stages.first_not_finite(0, inputs, state, Call()) == graph.ops.names[op]
