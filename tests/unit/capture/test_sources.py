"""Models as users name them: what their callables may return, and what is said when they fail."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from partita.capture.origin import Captures, ModelOrigin, load_origin, named_loss, origin_of
from partita.capture.setting import Example
from partita.capture.sources import ModelSource, SourceOptions, callable_in, load_source
from partita.errors import InvalidInputError
from partita.profiler.measure.measure import ProfileOptions
from partita.profiler.measure.model import profile_model

MODULE = """
import torch
from torch import nn


def raises():
    raise RuntimeError("no such file")


def needs(path):
    return nn.Linear(2, 2), torch.ones(1, 2)


def nothing():
    return nn.Linear(2, 2), iter(())


def counted():
    return nn.Linear(2, 2), (torch.full((3, 2), float(turn)) for turn in range(4)), total


def drawn():
    return nn.Linear(2, 2), lambda size: torch.randn(size, 2), total


def total(output, labels):
    return output.sum()


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module of the user's own."""
    (tmp_path / "own_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_models", "broken_models"):
        sys.modules.pop(name, None)
    return "own_models"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_models:raises", "own_models:raises failed: RuntimeError: no such file"),
        ("own_models:needs", "missing 1 required positional argument"),
        ("own_models:nothing", "no example could be made: StopIteration"),
        ("own_models:missing", "has no 'missing'"),
        ("own_models:number", "expected a callable"),
        ("broken_models:build", "cannot be imported: SyntaxError"),
        ("no_such_module:build", "cannot be imported"),
        (":", "package.module:callable"),
        (":build", "package.module:callable"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_fails_is_said_in_one_line(name: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        load_source(name).example(0)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def batch(source: ModelSource, turn: int, size: int = 0) -> torch.Tensor:
    found: torch.Tensor = source.example(size, turn).args[0]
    return found


def test_every_turn_has_its_own_data_and_the_same_turn_the_same(own: str) -> None:
    for source in (
        load_source(f"{own}:drawn"),
        load_source("gpt3-small", SourceOptions(scale=0.03)),
    ):
        first, other, again = (batch(source, turn, 2) for turn in (0, 1, 0))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_the_items_of_an_iterator_can_be_had_again(own: str) -> None:
    source = load_source(f"{own}:counted")
    values = [batch(source, turn)[0, 0].item() for turn in (2, 0, 3, 2)]
    assert values == [2.0, 0.0, 3.0, 2.0]
    with pytest.raises(InvalidInputError, match="example could"):
        source.example(0, 4)


def test_a_graph_remembers_its_model_and_brings_it_back(own: str) -> None:
    origin = ModelOrigin(
        text=f"{own}:drawn", options=SourceOptions(batch_size=3, dtype="float64"), loss="mse"
    )
    captured = Captures(load_origin(ModelOrigin(text=f"{own}:drawn")), origin).at().graph
    assert origin_of(origin.recorded_in(captured)) == origin
    assert origin.recorded_in(captured).fingerprint == captured.fingerprint
    with pytest.raises(InvalidInputError, match=r"does.*model"):
        origin_of(captured)


@pytest.mark.parametrize("own_loss", ["cross_entropy", "mse", "torch.nn.functional:l1_loss"])
def test_losses_by_name(own_loss: str) -> None:
    output = torch.tensor([[0.5, 2.0], [1.0, -1.0]])
    labels = torch.tensor([1, 0]) if own_loss == "cross_entropy" else torch.ones(2, 2)
    wanted = {
        "cross_entropy": nn.functional.cross_entropy,
        "mse": nn.functional.mse_loss,
        "torch.nn.functional:l1_loss": nn.functional.l1_loss,
    }[own_loss]
    assert named_loss(own_loss)(output, labels).item() == pytest.approx(
        wanted(output, labels).item()
    )
    with pytest.raises(InvalidInputError, match="cross_entropy"):
        named_loss("hinge")


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    example = Example(args=(torch.ones(1, 2),))
    with pytest.raises(InvalidInputError, match="nothing to train"):
        profile_model(
            model, example, loss=lambda output, _: output.sum(), options=ProfileOptions(rounds=1)
        )


MAKERS = """
import torch
def helper(x): return x
def _private(): return 1
def main(): raise SystemExit
def build(batch_size=2):
    model = torch.nn.Linear(4, 3)
    return model, torch.randn(batch_size, 4), torch.zeros(batch_size, dtype=torch.long), LOSS
LOSS = torch.nn.CrossEntropyLoss()
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return what writes a module of the user's and returns the name of its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_{abs(hash(text)) % 10**9}.py"
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


def test_the_only_function_of_a_file_that_makes_a_model_is_found(
    own_file: Callable[[str], str],
) -> None:
    file = own_file(MAKERS)
    name = callable_in(file)
    assert name == callable_in(f"{file}:build") == f"{file.removesuffix('.py')}:build"
    example = load_source(name).example(0)
    assert example.labels.tolist() == [0, 0]  # by themselves, before the loss
    assert [tuple(each.shape) for each in example.args] == [(2, 4)]


def test_files_with_several_makers_or_none_say_what_would_do(
    own_file: Callable[[str], str],
) -> None:
    two = own_file(MAKERS + "def other(): return build()\n")
    with pytest.raises(InvalidInputError, match=r"own_\d+:build, own_\d+:other"):
        callable_in(two)
    with pytest.raises(InvalidInputError, match=r"def build\(\)"):
        callable_in(own_file("x = 1\n"))
    with pytest.raises(InvalidInputError, match=r"nosuch\.py"):
        callable_in("nosuch.py")
    with pytest.raises(InvalidInputError, match="cannot be imported: NameError"):
        callable_in(own_file("nothing\n"))


def test_a_last_result_that_is_no_loss_is_named(own_file: Callable[[str], str]) -> None:
    file = own_file(
        "import torch\ndef build(): return torch.nn.Linear(2, 2), torch.ones(1, 2), 3\n"
    )
    with pytest.raises(InvalidInputError, match=r"int.* loss"):
        load_source(callable_in(file))
