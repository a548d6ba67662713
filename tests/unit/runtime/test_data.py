"""Sources of batches: every kind read by step, and a position that can be gone on from."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.errors import InvalidInputError
from partita.runtime.batches import BatchLoader, LastBatch, SampleOrder, Sampling
from partita.runtime.data import DataSpec, check_named_data, open_data

VOCABULARY, LENGTH = 50, 4


class TinyText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.table(tokens) * mask[..., None]


def text_source() -> ModelSource:
    def example(size: int, turn: int = 0) -> Example:
        drawn = torch.Generator().manual_seed(abs(turn))
        tokens = torch.randint(0, VOCABULARY, (size or 2, LENGTH + 1), generator=drawn)
        mask = torch.ones(size or 2, LENGTH, dtype=torch.long)
        return Example(args=(tokens[:, :-1], mask), labels=tokens[:, 1:], batch_size=size or 2)

    return ModelSource(
        name="text", model=TinyText(), example=example, loss=lambda output, _: output.sum()
    )


def image_source(channels: int = 3) -> ModelSource:
    def example(size: int, turn: int = 0) -> Example:
        del turn
        labels = torch.zeros(size or 2, dtype=torch.long)
        return Example(args=(torch.zeros(size or 2, channels, 2, 2),), labels=labels)

    model = nn.Sequential(nn.Flatten(), nn.Linear(4 * channels, 2))
    return ModelSource(name="pictures", model=model, example=example, loss=lambda o, _: o.sum())


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    (np.arange(401) % VOCABULARY).astype(np.uint16).tofile(path)
    return path


def spec(source: object, **more: Any) -> DataSpec:
    return DataSpec(source=str(source), **more)


def test_random_windows_of_a_token_file_depend_on_seed_and_step_alone(tokens: Path) -> None:
    one, _ = open_data(spec(tokens, seed=3), text_source(), [2, 1])
    other, _ = open_data(spec(tokens, seed=3), text_source(), [2, 1])
    load = BatchLoader(one)
    seen = [[load(step, m, "tokens") for m in (0, 1)] for step in range(5)]
    assert torch.equal(other.batch(4)(1, "tokens"), seen[4][1])  # sought, nothing replayed
    labels = one.batch(2)(0, "labels")
    assert torch.equal(one.batch(2)(0, "tokens")[:, 1:], labels[:, :-1])
    assert labels.shape == (2, LENGTH)
    assert torch.equal(one.batch(0)(0, "mask"), torch.ones(2, LENGTH, dtype=torch.long))
    assert not torch.equal(seen[0][0], seen[1][0])


def test_an_epoch_of_random_windows_has_as_many_tokens_as_the_file(tokens: Path) -> None:
    random, _ = open_data(spec(tokens), text_source(), [2, 1])
    apart, _ = open_data(spec(tokens, sampling=Sampling.SHUFFLED), text_source(), [2, 1])
    assert random.steps_per_epoch == apart.steps_per_epoch == 33
    large, _ = open_data(spec(tokens), text_source(), [150])
    assert large.steps_per_epoch == 1


def test_sequential_windows_follow_one_another_and_begin_again(tokens: Path) -> None:
    batches, _ = open_data(spec(tokens, sampling=Sampling.SEQUENTIAL), text_source(), [3])
    assert batches.steps_per_epoch == 33  # 100 windows, the last one is dropped
    assert batches.batch(1)(0, "tokens")[0].tolist() == [12, 13, 14, 15]
    assert torch.equal(batches.batch(33)(0, "tokens"), batches.batch(0)(0, "tokens"))


def test_tokens_of_32_bits_are_read_when_said_and_suspected_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "wide.bin"
    (np.arange(200) % VOCABULARY).astype(np.uint32).tofile(path)
    batches, held_out = open_data(
        spec(f"{path}?dtype=uint32", sampling=Sampling.SEQUENTIAL), text_source(), [1]
    )
    assert batches.batch(1)(0, "tokens").tolist() == [[4, 5, 6, 7]]
    assert held_out is None
    with pytest.raises(InvalidInputError, match=r"dtype=uint32"):
        open_data(spec(path), text_source(), [1])


def test_data_that_are_not_there_are_refused_before_there_is_a_model(tokens: Path) -> None:
    check_named_data(spec(tokens), evaluates=False)
    check_named_data(spec("generated"), evaluates=True)
    with pytest.raises(InvalidInputError, match=r"nothing\.bin; --data"):
        check_named_data(spec("nothing.bin"), evaluates=False)
    with pytest.raises(InvalidInputError, match="cannot be imported"):
        check_named_data(spec("no_such_module:data"), evaluates=False)
    alone = tokens.parent / "alone" / "tokens.bin"
    alone.parent.mkdir()
    alone.write_bytes(tokens.read_bytes())
    with pytest.raises(InvalidInputError, match=r"data.*evaluate"):
        check_named_data(spec(alone), evaluates=True)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    np.array([1, 2, 3, 60] * 10, np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(InvalidInputError, match=r"60;.*49"):
        open_data(spec(tmp_path / "a.bin"), text_source(), [1])


def test_val_bin_beside_the_tokens_is_held_out(tokens: Path) -> None:
    (np.arange(100) % 7).astype(np.uint16).tofile(tokens.with_name("val.bin"))
    for source in (tokens, tokens.parent):
        _, held_out = open_data(spec(source), text_source(), [2])
        assert held_out is not None
        assert held_out.batch(0)(0, "tokens").tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]]


def test_a_model_that_reads_something_else_is_refused(tokens: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"tokens.*follow"):
        open_data(spec(tokens), image_source(), [1])
    with pytest.raises(InvalidInputError, match="no nowhere"):
        open_data(spec("nowhere"), text_source(), [1])


@pytest.mark.parametrize("ending", ["npy", "pt", "png"])
def test_images_have_the_class_of_their_folder(tmp_path: Path, ending: str) -> None:
    for number, name in enumerate(("ape", "bee")):
        folder = tmp_path / name
        folder.mkdir()
        for turn in range(3):
            image = np.full((2, 2, 3), 100 * number + turn, np.uint8)
            if ending == "npy":
                np.save(folder / f"{turn}.npy", image)
            elif ending == "pt":
                torch.save(torch.from_numpy(image).permute(2, 0, 1).clone(), folder / f"{turn}.pt")
            else:
                pytest.importorskip("PIL.Image").fromarray(image).save(folder / f"{turn}.png")
    batches, _ = open_data(spec(tmp_path, sampling=Sampling.SEQUENTIAL), image_source(), [2, 2])
    get = batches.batch(0)
    assert get(0, "labels").tolist() == [0, 0]
    assert get(1, "labels").tolist() == [0, 1]
    image = get(1, "input")
    assert image.shape == (2, 3, 2, 2)
    assert float(image[1, 0, 0, 0]) == pytest.approx((100 / 255 - 0.485) / 0.229, abs=1e-6)


def test_arrays_of_several_images_count_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "train" / "only").mkdir(parents=True)
    (tmp_path / "val" / "only").mkdir(parents=True)
    stack = np.arange(5 * 4, dtype=np.float32).reshape(5, 1, 2, 2)
    np.save(tmp_path / "train" / "only" / "all.npy", stack)
    np.save(tmp_path / "val" / "only" / "all.npy", stack[::-1])
    batches, held_out = open_data(
        spec(tmp_path, sampling=Sampling.SEQUENTIAL, last_batch=LastBatch.FILL),
        image_source(1),
        [2],
    )
    assert batches.steps_per_epoch == 3
    assert batches.batch(2)(0, "input")[:, 0, 0, 0].tolist() == [16, 0]  # filled from the start
    assert held_out is not None
    assert held_out.batch(0)(0, "input")[0, 0, 0, 0] == 16


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.read: list[int] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.read.append(row)
        return torch.full((1, 2, 2), float(row)), torch.tensor(row % 2)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("own_data")
    monkeypatch.setitem(sys.modules, "own_data", made)
    return made


@pytest.mark.parametrize("last", list(LastBatch))
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_has_the_samples_that_distributed_sampler_gives(
    module: ModuleType, last: LastBatch, replicas: int
) -> None:
    dataset = module.make = lambda: Numbers(22)
    batches, held_out = open_data(
        spec("own_data:make", seed=5, last_batch=last), image_source(1), [2, 2]
    )
    assert held_out is None  # the callable takes no split
    steps = batches.steps_per_epoch
    for epoch in (0, 1):
        samplers = [
            DistributedSampler(dataset(), replicas, rank, seed=5, drop_last=last is LastBatch.DROP)
            for rank in range(replicas)
        ]
        each = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            each.append(list(sampler))
        share = 4 // replicas
        whole = 22 // 4
        for step in range(whole):
            theirs = {n for rows in each for n in rows[step * share : (step + 1) * share]}
            get = batches.batch(epoch * steps + step)
            ours = {int(get(m, "input")[i, 0, 0, 0]) for m in (0, 1) for i in (0, 1)}
            assert ours == theirs
    assert steps == (5 if last is LastBatch.DROP else 6)


def test_only_the_microbatch_that_is_asked_for_is_read(module: ModuleType) -> None:
    numbers = Numbers(8)
    module.make = lambda: numbers
    batches, _ = open_data(
        spec("own_data:make", sampling=Sampling.SEQUENTIAL), image_source(1), [1, 2, 1]
    )
    get = batches.batch(1)
    get(1, "input")
    get(1, "labels")
    assert numbers.read == [5, 6]


def test_a_run_goes_on_from_a_saved_position_with_other_microbatches(module: ModuleType) -> None:
    module.make = lambda: Numbers(64)
    first, _ = open_data(spec("own_data:make"), image_source(1), [2, 2])
    state = first.state(3)
    second, _ = open_data(spec("own_data:make"), image_source(1), [4])
    second.load_state(state)
    get = first.batch(3)
    wanted = torch.cat([get(m, "input") for m in (0, 1)])
    assert torch.equal(second.batch(3)(0, "input"), wanted)
    module.make = lambda: Numbers(65)
    other, _ = open_data(spec("own_data:make"), image_source(1), [4])
    with pytest.raises(InvalidInputError, match="has samples 65"):
        other.load_state(state)


def test_an_iterable_of_batches_is_read_on_and_begins_again(module: ModuleType) -> None:
    def batches(batch_size: int) -> Iterator[Any]:
        for row in range(3):
            size = batch_size if row < 2 else 1  # the last one is not full
            yield torch.full((size, 1, 2, 2), float(row)), torch.zeros(size, dtype=torch.long)

    module.make = batches
    stream, _ = open_data(spec("own_data:make"), image_source(1), [1, 1])
    load = BatchLoader(stream)
    assert [float(load(step, 1, "input").mean()) for step in range(4)] == [0, 1, 0, 1]
    assert float(load(0, 0, "input").mean()) == 0  # sought backwards
    filled, _ = open_data(spec("own_data:make", last_batch=LastBatch.FILL), image_source(1), [1, 1])
    assert [float(filled.batch(step)(1, "input").mean()) for step in range(4)] == [0, 1, 2, 0]


def test_a_loader_with_a_state_is_sought_by_it(module: ModuleType) -> None:
    class Stateful:
        def __init__(self) -> None:
            self.place, self.given = 0, 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                self.place, self.given = self.place + 1, self.given + 1
                yield torch.full((2, 1, 2, 2), float(self.place)), torch.zeros(2, dtype=torch.long)

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    made: list[Stateful] = []

    def make() -> Stateful:
        made.append(Stateful())
        return made[-1]

    module.make = make
    first, _ = open_data(spec("own_data:make"), image_source(1), [2])
    for step in range(7):
        first.batch(step)
    state = first.state(7)
    second, _ = open_data(spec("own_data:make"), image_source(1), [2])
    second.load_state(state)
    assert float(second.batch(7)(0, "input").mean()) == 8
    assert made[-1].given == 1


def test_a_callable_with_splits_has_held_out_data(module: ModuleType) -> None:
    module.make = lambda split: Numbers(8 if split == "train" else 4)
    batches, held_out = open_data(spec("own_data:make"), image_source(1), [2])
    assert held_out is not None
    assert (batches.steps_per_epoch, held_out.steps_per_epoch) == (4, 2)


def test_generated_data_to_evaluate_on_are_others() -> None:
    source = text_source()
    batches, held_out = open_data(DataSpec(), source, [2, 2])
    assert held_out is not None
    seen = [batches.batch(step)(m, "tokens") for step in range(1) for m in (0,)]
    assert not any(torch.equal(held_out.batch(0)(0, "tokens"), each) for each in seen)


def test_too_few_samples_for_a_batch_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"3 samples.*4"):
        SampleOrder(num_items=3, batch_size=4)
