"""Models with memory for some parameters only."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from partita.capture.capture import capture_without_values
from partita.capture.op import is_fake
from partita.capture.origin import Captures, ModelOrigin, load_origin, load_origin_partly
from partita.capture.partial import build_partly, is_stand_in, without_saved_tensors
from partita.capture.setting import Example
from partita.capture.sources import ModelSource, SourceOptions
from partita.errors import InvalidInputError
from partita.models.zoo import build_model


@pytest.mark.parametrize("name", ["gpt3-small", "t5-small", "vgg16", "gnmt"])
def test_wanted_parameters_have_the_values_of_a_whole_build(name: str) -> None:
    def build(device: str) -> nn.Module:
        return build_model(name, scale=0.02, dtype=torch.float64, device=device, seed=3)

    whole = dict(build("cpu").named_parameters())
    wanted = set(list(whole)[::3])
    model = build_partly(build, wanted)
    part = dict(model.named_parameters())
    assert all(torch.equal(part[name], whole[name]) for name in wanted)
    assert {n for n, p in part.items() if not is_stand_in(p) and p.numel() > 1} <= wanted
    assert {n: p.shape for n, p in part.items()} == {n: p.shape for n, p in whole.items()}
    # What is drawn after it is the same, too.
    assert all(p.dtype == torch.float64 and p.requires_grad for p in part.values())


class Odd(nn.Module):
    """Initialises its parameters in unusual ways."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3, device=device))
        self.scale = nn.Parameter(torch.ones(1, device=device))
        self.second = nn.Linear(3, 5, device=device)
        nn.init.orthogonal_(self.second.weight)
        nn.init.trunc_normal_(self.first.data[1:], std=0.5)
        with torch.no_grad():
            self.second.bias[0] = 7.0
            self.second.bias.mul_(2)
        self.last = nn.Linear(5, 3, device=device)
        self.last.weight = nn.Parameter(torch.empty(3, 5, device=device))
        nn.init.xavier_uniform_(self.last.weight, gain=0.3)


@pytest.mark.parametrize("wanted", ["first", "second.weight", "second.bias", "last.weight"])
def test_random_numbers_are_drawn_for_what_is_not_wanted(wanted: str) -> None:
    torch.manual_seed(5)
    whole = dict(Odd("cpu").named_parameters())
    after = torch.rand(1)
    torch.manual_seed(5)
    model = build_partly(Odd, {wanted})
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(dict(model.named_parameters())[wanted], whole[wanted])


def test_a_model_that_differs_from_build_to_build_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot.*built"):
        build_partly(lambda d: nn.Linear(2, 3 if d == "meta" else 4, device=d), {"bias"})


def test_a_model_with_stand_ins_is_captured_as_the_whole() -> None:
    options = SourceOptions(scale=0.02, sequence_length=8, batch_size=2)
    origin = ModelOrigin(text="gpt3-small", options=options)
    whole = Captures(load_origin(origin), origin).at(2)
    source = load_origin_partly(origin, set(whole.graph.parameters.names[:5]))
    with without_saved_tensors():
        part = Captures(source, origin).at(2)
    assert part.graph.fingerprint == whole.graph.fingerprint
    held = [n for n, p in part.parameters.items() if not is_stand_in(p)]
    assert set(whole.graph.parameters.names[:5]) <= set(held)
    assert len(held) < len(part.parameters)


def test_what_cannot_be_built_in_parts_is_built_whole() -> None:
    origin = ModelOrigin(text=f"{__name__}:only_real")
    model = load_origin_partly(origin, set()).model
    assert not any(is_stand_in(parameter) for parameter in model.parameters())


def only_real(device: str) -> tuple[nn.Module, torch.Tensor]:
    if str(device) == "meta":
        raise ValueError("not here")
    return nn.Linear(3, 3), torch.ones(2, 3)


@pytest.mark.parametrize("text", ["gpt3-small", "resnet18", "hf:tiny-llama", "hf:tiny-t5"])
def test_a_capture_without_values_is_the_same(text: str) -> None:
    options = SourceOptions(batch_size=2, scale=1.0 if ":" in text else 0.05)
    origin = ModelOrigin(text=text, options=replace(options, sequence_length=8 * (text[0] != "r")))
    source = load_origin(origin)
    real = Captures(source, origin).at(2)
    before = dict(source.model.named_parameters())
    light = capture_without_values(
        source.model, source.example(2), loss=source.loss, name=source.name
    )
    assert light.graph.fingerprint == real.graph.fingerprint
    assert light.digest == real.digest
    assert all(map(torch.equal, light.constants, real.constants))
    for ours, theirs in zip(light.ops, real.ops, strict=True):
        assert (ours.changes, ours.draws, ours.constants) == (
            theirs.changes,
            theirs.draws,
            theirs.constants,
        )
    after = dict(source.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert light.parameters.keys() == real.parameters.keys()
    assert not any(map(is_fake, light.parameters.values()))


class Choosing(nn.Module):
    """Decides by a value that depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y.sum() if float(y.mean()) > 0 else y.square().sum()


def test_a_model_that_needs_values_is_captured_with_them() -> None:
    model = Choosing()
    source = ModelSource(
        name="choosing", model=model, example=lambda *_: Example(args=(torch.ones(2, 3),))
    )
    origin = ModelOrigin(text="choosing")
    known = Captures(source, origin).at(2).graph
    with pytest.raises(Exception, match="_local_scalar_dense"):
        capture_without_values(model, source.example(2))
    assert Captures(source, origin, known=known).at(2).graph.fingerprint == known.fingerprint


class Replacing(nn.Module):
    """Builds a parameter that it replaces, and may have read before."""

    def __init__(self, device: str, *, reads: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, device=device)
        dropped = self.first.weight
        value = dropped * 2 if reads else torch.zeros(3, 3, device=device)
        self.first.weight = nn.Parameter(value.detach())


@pytest.mark.parametrize("reads", [False, True])
def test_a_parameter_that_is_replaced_takes_memory_only_where_it_is_read(reads: bool) -> None:
    torch.manual_seed(5)
    whole = dict(Replacing("cpu", reads=reads).named_parameters())
    torch.manual_seed(5)
    part = build_partly(lambda device: Replacing(device, reads=reads), set(whole))
    assert all(torch.equal(p, whole[name]) for name, p in part.named_parameters())
