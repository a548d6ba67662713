"""Checkpoints: who writes what, which of them count, and what is never loaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.errors import FormatError, InvalidInputError, WorkerError
from partita.ranks.member import Member
from partita.ranks.pool import RankPool
from partita.runtime.checkpoint.checkpoint import (
    Checkpoints,
    open_checkpoints,
    tensors_in,
)
from partita.runtime.checkpoint.files import LATEST, list_checkpoints, read_manifest
from partita.runtime.parts import Part, Slice, Stretch
from partita.runtime.training.saving import random_state, set_random_state


def on_ranks(count: int, main: Callable[[Member], Any]) -> list[Any]:
    """Return what forked ranks return."""
    with RankPool(count, lambda member, _: main(member), limit_s=60) as pool:
        return pool.call(None)


def some(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 4, generator=generator, dtype=torch.float64),
        "model.bias": torch.randn(5, generator=generator),
        "optim.weight.step": torch.tensor(float(seed)),
    }


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in some().items()}


def saved(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    found = Checkpoints(folder, keep=keep)
    for step in steps:
        found.save(step, some(step), {"step": step})
    found.wait()
    return found


def test_what_was_saved_is_loaded_though_it_changed_meanwhile(tmp_path: Path) -> None:
    checkpoints, held = Checkpoints(tmp_path), some(7)
    checkpoints.save(7, held, {"step": 7, "loss": 0.5})
    for value in held.values():
        value.zero_()
    checkpoints.wait()
    loaded = zeros()
    newest = checkpoints.newest()
    assert newest == tmp_path / "step-000007"
    assert checkpoints.load(newest, loaded) == {"step": 7, "loss": 0.5}
    for name, value in some(7).items():
        assert torch.equal(loaded[name], value)
    assert (tmp_path / LATEST).read_text() == "step-000007\n"


def test_only_the_newest_are_kept_and_leftovers_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-000001.ab.tmp").mkdir()
    (tmp_path / "step-000001.ab.tmp" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-000000.ab.old").mkdir()
    (tmp_path / "notes").mkdir()
    saved(tmp_path, 1, 2, 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        LATEST,
        "notes",
        "step-000002",
        "step-000003",
    ]


def test_a_step_that_is_saved_again_overwrites_nothing_and_is_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3)
    again = saved(tmp_path, 2)
    assert again.newest() == tmp_path / "step-000002-2"
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000002",
        "step-000003",
        "step-000002-2",
    ]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_is_found_and_the_checkpoint_before_is_taken(
    tmp_path: Path, name: str, damage: str
) -> None:
    told: list[str] = []
    saved(tmp_path, 1, 2)
    file = tmp_path / "step-000002" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    checkpoints = Checkpoints(tmp_path, warn=told.append)
    assert checkpoints.newest() == tmp_path / "step-000001"
    assert len(told) == 1
    assert "step-000002" in told[0]
    with pytest.raises(FormatError):
        checkpoints.load(tmp_path / "step-000002", zeros())


def test_an_empty_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").newest() is None


def test_where_all_checkpoints_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for folder in tmp_path.glob("step-*"):
        for file in folder.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidInputError, match=r"\(2 damaged\)"):
        Checkpoints(tmp_path, warn=lambda _: None).newest()


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    checkpoints = saved(tmp_path, 1)
    checkpoints._warn = told.append

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        checkpoints.save(2, some(2), {})
        checkpoints.wait()
    assert len(told) == 1
    assert "step 2" in told[0]
    assert "No space left" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-000001"]
    checkpoints.save(3, some(3), {})
    checkpoints.wait()
    assert checkpoints.newest() == tmp_path / "step-000003"


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    path = tmp_path / "step-000001"
    with pytest.raises(InvalidInputError, match=r"model\.other"):
        checkpoints.load(path, {"model.other": torch.zeros(1)})
    with pytest.raises(InvalidInputError, match=r"\[5\];.*\[6\]"):
        checkpoints.load(path, {"model.bias": torch.zeros(6)})


def test_ranks_write_what_they_own_once(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    sliced = torch.arange(24.0).reshape(4, 6)

    def main(member: Member) -> None:
        checkpoints = open_checkpoints(member, tmp_path, model="toy")
        stretch, cut = Stretch(member.rank, 2), Slice(1, member.rank, 2, blocks=3)
        checkpoints.save(
            4,
            {
                f"model.rank{member.rank}": torch.full((3,), float(member.rank)),
                "model.same": torch.ones(100_000),
                "model.flat": Part(whole.shape, stretch.of(whole), stretch),
                "model.cut": Part(sliced.shape, cut.of(sliced).contiguous(), None, cut),
                # Whole on one rank, divided on the other.
                "model.tied": Part(whole.shape, stretch.of(whole), stretch)
                if member.rank
                else whole.clone(),
            },
            {"rank": member.rank},
        )
        checkpoints.wait()

    on_ranks(2, main)
    path = tmp_path / "step-000004"
    assert read_manifest(path).extra == {"rank": 0}
    assert read_manifest(path).model == "toy"
    assert read_manifest(path).num_bytes < 600_000  # of the ones, one copy
    held = {name: torch.full(shape, -1.0) for name, (shape, _) in tensors_in(path).items()}
    Checkpoints(tmp_path).load(path, held)
    assert torch.equal(held["model.rank0"], torch.zeros(3))
    assert torch.equal(held["model.rank1"], torch.ones(3))
    assert torch.equal(held["model.flat"], whole)
    assert torch.equal(held["model.tied"], whole)
    assert torch.equal(held["model.cut"], sliced)

    def other(member: Member) -> bool:
        """Three ranks read what two have written."""
        checkpoints, stretch = open_checkpoints(member, tmp_path), Stretch(member.rank, 3)
        part = Part(whole.shape, torch.zeros(12), stretch)
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(newest, {"model.flat": part})
        return torch.equal(part.values, stretch.of(whole))

    assert on_ranks(3, other) == [True, True, True]


def test_a_tensor_of_which_a_piece_is_missing_is_an_error(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)

    def main(member: Member) -> str:
        checkpoints, stretch = open_checkpoints(member, tmp_path), Stretch(member.rank, 3)
        checkpoints.save(1, {"model.x": Part(whole.shape, stretch.of(whole), stretch)}, {})
        try:
            checkpoints.wait()
        except WorkerError as exc:
            return str(exc)
        return ""

    assert all("was not written" in text for text in on_ranks(2, main))
    assert list_checkpoints(tmp_path) == []


def test_random_numbers_go_on_where_they_were() -> None:
    import random  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415

    state = random_state()
    drawn = (random.random(), np.random.rand(), torch.rand(2).tolist())
    set_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == drawn
