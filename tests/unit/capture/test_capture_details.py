"""What a captured graph says, what it refuses, and how a capture falls back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gallery import BATCH, GALLERY, VOCABULARY, WIDTH, Gpt, build, cross_entropy, features, mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.setting import Example, example_inputs
from partita.capture.stages import CapturedStages
from partita.core.plan import Plan, Stage
from partita.errors import InvalidInputError
from partita.runtime.stage_code import Call, StageCode


def captured(name: str, **options) -> CapturedModel:
    return capture(build(name), GALLERY[name].example(0), loss=GALLERY[name].loss, **options)


def one_stage(model: CapturedModel) -> Plan:
    graph = model.graph
    return Plan(
        fingerprint=graph.fingerprint,
        devices=("d0",),
        stage_of=np.zeros(len(graph)),
        stages=(Stage(devices=((0,),)),),
        microbatch_sizes=np.array([graph.batch_size]),
    )


def test_ops_are_named_by_module_and_function() -> None:
    graph = captured("mlp").graph
    assert graph.ops.names[:5] == ("0/linear", "1/relu", "2/linear", "3/gelu", "4/linear")
    assert graph.ops.types.names[graph.ops.types.of[0]] == "linear"
    assert graph.ops.modules.names[graph.ops.modules.of[2]] == "2"
    assert graph.tensors.names[0] == "input"
    assert graph.tensors.producer[0] == -1


def test_a_module_called_twice_has_a_call_number_and_one_parameter() -> None:
    graph = captured("twice").graph
    assert "layer/linear" in graph.ops.names
    assert "layer@1/linear" in graph.ops.names
    assert graph.parameters.names.count("layer.weight") == 1
    assert np.sum(graph.parameters.use_parameter == 0) == 2


def test_tied_weights_are_one_parameter() -> None:
    table = captured("gpt").graph.parameters
    assert "head.weight" not in table.names
    row = table.names.index("embed.weight")
    assert np.sum(table.use_parameter == row) == 2


def test_tensors_have_bytes_and_say_what_grows_with_the_batch() -> None:
    model = captured("gpt")
    graph = model.graph
    row = graph.tensors.names.index("embed/embedding")
    assert graph.tensors.bytes[row] == BATCH * 6 * WIDTH * 8
    assert graph.tensors.fixed_bytes[row] == 0
    for name in ("cos", graph.tensors.names[graph.loss]):
        row = graph.tensors.names.index(name)
        assert graph.tensors.fixed_bytes[row] == graph.tensors.bytes[row]
    assert graph.batch_size == BATCH
    assert graph.tokens_per_sample == 6
    assert graph.dtype == "float64"


def test_equal_layers_are_blocks_of_one_kind() -> None:
    model = captured("gpt")
    assert [block.name for block in model.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len({block.kind for block in model.blocks}) == 1
    assert model.graph.ops.blocks.names == ("blocks.0", "blocks.1", "blocks.2")
    other = captured("shared bias")
    assert len(other.blocks) == 3
    assert len({block.kind for block in other.blocks}) == 2


def test_blocks_become_ops() -> None:
    names = captured("gpt", granularity=Granularity.BLOCK).graph.ops.names
    assert sum(name.startswith("blocks.") for name in names) == 3


def test_a_given_prefix_becomes_one_op() -> None:
    names = captured(
        "transformer", granularity=Granularity.BLOCK, prefixes=("body.encoder",)
    ).graph.ops.names
    assert sum(name.startswith("body.encoder") for name in names) == 1
    assert sum(name.startswith("body.decoder.layers") for name in names) == 2


def test_leaf_modules_become_ops_that_stay_live() -> None:
    model = captured("mlp", granularity=Granularity.MODULE)
    assert model.graph.ops.names[:2] == ("0/Linear", "1/ReLU")


def test_inputs_are_named_by_their_place() -> None:
    model = captured("containers")
    assert model.graph.tensors.names[:3] == ("batch.left", "batch.more.right", "options.target")
    assert set(example_inputs(build("containers"), GALLERY["containers"].example(0))) == set(
        model.graph.tensors.names[:3]
    )


def test_outputs_are_rebuilt_in_their_containers() -> None:
    model = captured("containers")
    made = {name: torch.zeros(1) for name in model.graph.tensors.names}
    output = model.rebuild_output(made)
    assert set(output) == {"pair", "loss"}
    assert type(output["pair"]).__name__ == "Pair"
    assert isinstance(output["pair"].parts, list)


def test_value_reads_are_reported_with_their_module() -> None:
    (read,) = captured("reads a value").specializations
    assert (read.module, read.function) == ("", "item")


def test_data_dependent_shapes_share_a_colocation_class() -> None:
    model = captured("experts")
    classes = model.graph.ops.colocation
    flexible = [row for row, value in enumerate(model.values) if value.flexible]
    assert flexible
    for row in flexible:
        readers = model.graph.edges.reader[model.graph.edges.tensor == row]
        ops = [int(model.graph.tensors.producer[row]), *readers.tolist()]
        assert len({int(classes[op]) for op in ops}) == 1
        assert classes[ops[0]] >= 0
    assert model.graph.ops.names.index("out/linear") not in np.flatnonzero(classes >= 0)


def test_a_changed_model_has_another_fingerprint() -> None:
    case = GALLERY["gpt"]
    prints = {
        capture(model.double(), case.example(0), loss=cross_entropy).graph.fingerprint
        for model in (Gpt(), Gpt(layers=2), Gpt(0.1))
    }
    assert len(prints) == 3
    wider = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    narrow = nn.Sequential(nn.Linear(WIDTH, 10), nn.ReLU(), nn.Linear(10, 4)).double()
    rows = GALLERY["mlp"].example(0)
    assert capture(wider, rows).graph.fingerprint != capture(narrow, rows).graph.fingerprint


def test_another_batch_size_has_the_same_fingerprint_and_another_digest() -> None:
    small = capture(mlp().double(), Example(args=(features(2, WIDTH),)))
    large = capture(mlp().double(), Example(args=(features(6, WIDTH),)))
    assert small.graph.fingerprint == large.graph.fingerprint
    assert small.digest != large.digest


@pytest.mark.parametrize(
    "wrong", [features(2, WIDTH), features(BATCH, WIDTH).float(), features(BATCH, WIDTH, 1)]
)
def test_other_shapes_and_types_are_refused_before_anything_runs(wrong) -> None:
    model = captured("mlp")
    code: StageCode = model.stages(one_stage(model))
    with pytest.raises(InvalidInputError, match=r"'input'.*0"):
        code.run(0, {"input": wrong}, model.state(), Call())


def test_a_missing_input_is_refused() -> None:
    model = captured("mlp")
    with pytest.raises(InvalidInputError, match="was not given"):
        model.stages(one_stage(model)).run(0, {}, model.state(), Call())


def test_a_plan_for_another_graph_is_refused() -> None:
    model = captured("mlp")
    with pytest.raises(InvalidInputError, match="fingerprint"):
        CapturedStages(model, replace(one_stage(model), fingerprint="0"))


def test_modes_that_were_not_captured_are_refused() -> None:
    model = captured("mlp", mode=CaptureMode.EVAL)
    inputs = {"input": features(BATCH, WIDTH)}
    with pytest.raises(InvalidInputError, match=r"captured.*eval"):
        model.stages(one_stage(model)).run(0, inputs, model.state(), Call())
    drops = captured("layer drop")
    with pytest.raises(InvalidInputError, match="in eval mode"):
        drops.check_mode(training=False)


class Hidden(nn.Module):
    """Makes a tensor in a way that no torch function call shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return torch.tanh(self.layer(x))


def test_what_cannot_be_seen_falls_back_to_opaque_modules_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hidden(), nn.Linear(WIDTH, 2)).double()
    found = capture(model, Example(args=(features(BATCH, WIDTH),)))
    assert found.notes[0].startswith("not captured by function")
    assert found.graph.ops.names == ("0/Linear", "1/Hidden", "2/Linear")


def test_a_model_that_cannot_run_is_refused_with_its_error() -> None:
    with pytest.raises(InvalidInputError, match=r"captured.*mat1.*mat2"):
        capture(mlp().double(), Example(args=(features(2, WIDTH + 1),)))
    with pytest.raises(InvalidInputError, match="cannot be called"):
        capture(mlp().double(), Example())


def test_frozen_parts_stay_frozen() -> None:
    model = build("resnet").train()
    model[1].eval()
    found = capture(model, GALLERY["resnet"].example(0))
    frozen = next(op for op in found.ops if op.module == "1")
    assert frozen.changes == ()
    assert not model[1].training


def test_fake_tensors_are_captured_and_run_on_real_parameters() -> None:
    with FakeTensorMode():
        model = Gpt()
        ids = torch.ones(BATCH, 6, dtype=torch.int64)
        found = capture(model, Example(args=(ids,), labels=ids), loss=cross_entropy)
    real = Gpt()
    ids = torch.randint(0, VOCABULARY, (BATCH, 6))
    state = {**dict(real.named_parameters()), **dict(real.named_buffers())}
    inputs = {"ids": ids, "labels": ids}
    made = found.stages(one_stage(found)).run(0, inputs, state, Call())
    expected = cross_entropy(real(ids), ids)
    assert torch.equal(made[found.graph.tensors.names[found.graph.loss]], expected)
