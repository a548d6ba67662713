"""Exported packages compute what the model computes."""

import json
from collections.abc import Callable

import gallery
import pytest
import torch
from gallery import GALLERY
from torch import Tensor, nn
from torch.nn import functional

from partita.capture.captured import CaptureMode, Granularity
from partita.capture.setting import Example, example_inputs
from partita.capture.tree import tensors_of
from partita.errors import InvalidInputError
from partita.exporters.package import package_files

Write = Callable[..., object]
READS_VALUES = {"reads a value", "experts", "packed"}


def assert_equal_step(written, example: Example, loss) -> None:
    """Check output, loss, gradients and buffers of one training step."""
    output, found = written.run(example, training=True)
    wanted, expected = written.expected(example, loss, training=True)
    for one, other in zip(tensors_of(output), tensors_of(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    if expected is None:
        expected = wanted.loss if hasattr(wanted, "loss") else wanted["loss"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    written.original.zero_grad()
    written.model.zero_grad()
    found.backward()
    expected.backward()
    gradients = written.gradients()
    for name, parameter in written.original.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)
    state = written.original.state_dict()
    for name, tensor in written.model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in GALLERY if name != "layer drop"])
def test_a_training_step_of_the_package_equals_the_model(name: str, write: Write) -> None:
    case = GALLERY[name]
    written = write(gallery.build(name), case.example(0), case.loss)
    assert_equal_step(written, case.example(0), case.loss)
    if name not in READS_VALUES:
        assert_equal_step(written, case.example(5), case.loss)


@pytest.mark.parametrize("name", ["resnet", "seq2seq", "in place", "containers", "dropout"])
def test_stages_of_one_op_each_equal_the_model(name: str, write: Write) -> None:
    case = GALLERY[name]
    written = write(gallery.build(name), case.example(0), case.loss, stages=1000)
    assert len(written.blueprint.stages) > 5
    assert_equal_step(written, case.example(1), case.loss)


@pytest.mark.parametrize("name", [name for name, case in GALLERY.items() if case.runs_eval])
def test_eval_mode_of_the_package_equals_the_model(name: str, write: Write) -> None:
    case = GALLERY[name]
    written = write(gallery.build(name), case.example(0), case.loss, stages=2)
    output, _ = written.run(case.example(0), training=False)
    wanted, _ = written.expected(case.example(0), case.loss, training=False)
    for one, other in zip(tensors_of(output), tensors_of(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "resnet", "branches", "seq2seq", "packed", "gpt"])
def test_layers_of_torch_are_calls_of_layers_at_module_granularity(name: str, write: Write) -> None:
    case = GALLERY[name]
    model, example = gallery.build(name), case.example(0)
    written = write(model, example, case.loss, granularity=Granularity.MODULE)
    assert_equal_step(written, example, case.loss)
    assert "functional.conv2d" not in written.source


def test_a_model_whose_eval_mode_differs_is_for_training_alone(write: Write) -> None:
    case = GALLERY["layer drop"]
    written = write(gallery.build("layer drop"), case.example(0), case.loss)
    with pytest.raises(RuntimeError, match="training mode alone"):
        written.run(case.example(0), training=False)


def test_a_model_captured_in_eval_mode_refuses_to_train(write: Write) -> None:
    case = GALLERY["dropout"]
    written = write(gallery.build("dropout"), case.example(0), mode=CaptureMode.EVAL)
    assert not written.package.build().training
    with pytest.raises(RuntimeError, match="eval mode alone"):
        written.run(case.example(0), training=True)
    output, _ = written.run(case.example(0), training=False)
    wanted, _ = written.expected(case.example(0), None, training=False)
    torch.testing.assert_close(output, wanted)


def test_without_labels_the_model_returns_its_output_and_no_loss(write: Write) -> None:
    case = GALLERY["gpt"]
    example = case.example(0)
    written = write(gallery.build("gpt"), example, case.loss)
    arguments = written.named(example)
    del arguments["labels"]
    output, loss = written.model.output_and_loss(**arguments)
    assert loss is None
    torch.testing.assert_close(output, written.original(*example.args))


class Tied(nn.Module):
    """An embedding whose weight is that of the head, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(gallery.VOCABULARY, gallery.WIDTH)
        self.middle = nn.Linear(gallery.WIDTH, gallery.WIDTH).requires_grad_(False)
        self.head = nn.Linear(gallery.WIDTH, gallery.VOCABULARY)
        self.head.weight = self.embedding.weight
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


def test_tied_weights_are_one_parameter_of_all_stages_that_use_it(write: Write) -> None:
    torch.manual_seed(0)
    case = GALLERY["gpt"]
    written = write(Tied().double(), case.example(0), case.loss)
    assert_equal_step(written, case.example(0), case.loss)
    wiring = json.loads((written.folder / "wiring.json").read_text())
    assert wiring["shared_parameters"] == {"embedding.weight": ["stage0", "stage1"]}
    assert wiring["aliases"] == {"head.weight": "embedding.weight"}
    parameters = dict(written.model.named_parameters())
    assert not parameters["middle.weight"].requires_grad
    assert "head.weight" not in parameters
    assert "head.weight" in written.model.state_dict()
    stage = written.package.Stage1()
    whole = written.original.state_dict()
    stage.load_state_dict({name: whole[name] for name in stage.state_dict()})


def test_a_state_of_another_model_is_refused_by_name(write: Write) -> None:
    case = GALLERY["mlp"]
    written = write(gallery.build("mlp"), case.example(0), case.loss)
    state = written.original.state_dict()
    first = next(iter(state))
    del state[first]
    state["other.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=rf"{first}.*other\.weight"):
        written.model.load_state_dict(state)
    keys = written.model.load_state_dict(state, strict=False)
    assert keys.missing_keys == [first]
    assert keys.unexpected_keys == ["other.weight"]


def test_the_source_reads_like_the_model(write: Write) -> None:
    case = GALLERY["gpt with dropout"]
    written = write(gallery.build("gpt with dropout"), case.example(0), case.loss)
    assert "training=self.training" in written.source
    assert "nn.LayerNorm(" in written.source
    assert "# blocks.0" in written.source
    assert max(map(len, written.source.splitlines())) < 140


class Contexts(nn.Module):
    """Computes a part without gradients and a part under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(gallery.WIDTH, gallery.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean() + self.layer.weight.abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.layer(x)
        return h.float() / scale


def test_gradient_and_autocast_modes_are_written(write: Write) -> None:
    torch.manual_seed(0)
    example = Example(args=(torch.randn(4, gallery.WIDTH),))
    loss = lambda output, labels: output.square().mean()  # noqa: E731
    written = write(Contexts(), example, loss)
    assert_equal_step(written, example, loss)
    assert "with torch.no_grad():" in written.source
    assert "dtype=torch.bfloat16" in written.source


class Buffers(nn.Module):
    """Has a buffer that its state lacks, and a position table of a parameter's view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.weight = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        view = self.weight[0]
        changed = functional.relu(view.clone(), inplace=True)
        return (x * self.table + changed).relu_().sum(-1)


def test_buffers_outside_of_the_state_come_with_the_package(write: Write) -> None:
    example = Example(args=(torch.randn(4, 8),))
    loss = lambda output, labels: output.square().mean()  # noqa: E731
    written = write(Buffers(), example, loss)
    assert "table" not in written.model.state_dict()
    assert_equal_step(written, example, loss)


def test_new_weights_have_the_spread_of_the_original_ones(write: Write) -> None:
    case = GALLERY["packed"]
    written = write(gallery.build("packed"), case.example(0), case.loss)
    fresh = dict(written.package.build().named_parameters())
    for name, parameter in written.original.named_parameters():
        if parameter.numel() > 100:
            assert fresh[name].std().item() == pytest.approx(parameter.std().item(), rel=0.5)


def local_function_model() -> nn.Module:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Hidden.apply(x)

    return Model()


def test_a_function_that_cannot_be_imported_is_refused_by_name(write: Write) -> None:
    example = Example(args=(torch.ones(2, requires_grad=True),))
    with pytest.raises(InvalidInputError, match="Hidden"):
        write(local_function_model(), example, stages=1)


class Scaled(nn.Module):
    """A module without children that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_an_opaque_module_that_is_none_of_torchs_is_refused_by_class(write: Write) -> None:
    model = nn.Sequential(Scaled(), nn.Linear(8, 8))
    example = Example(args=(torch.ones(2, 8),))
    with pytest.raises(InvalidInputError, match=r"class .*Scaled.*granularity op"):
        write(model, example, granularity=Granularity.MODULE)
    write(model, example)


def test_a_name_that_is_no_package_is_refused(write: Write) -> None:
    case = GALLERY["mlp"]
    written = write(gallery.build("mlp"), case.example(0), case.loss)
    with pytest.raises(InvalidInputError, match="'gpus_4'"):
        package_files(written.blueprint, "gpus=4", None)


def test_weights_are_written_when_asked_for(write: Write) -> None:
    case = GALLERY["resnet"]
    written = write(gallery.build("resnet"), case.example(0), case.loss)
    inputs = example_inputs(written.original, case.example(0))
    files = package_files(written.blueprint, "again", inputs, weights=True)
    (written.folder / "weights.pt").write_bytes(files["weights.pt"])
    state = written.original.state_dict()
    for name, tensor in written.package.build().state_dict().items():
        torch.testing.assert_close(tensor, state[name])
