"""Parts of tensors: boxes in the whole, and the whole from its parts."""

import itertools

import pytest
import torch

from partita.errors import InvalidInputError
from partita.runtime.parts import Part, Slice, Stretch, joined


def parts_of(whole: torch.Tensor, count: int, slices: tuple[Slice, ...] = ()) -> list[Part]:
    found = []
    for taken in slices or (None,):
        inner = whole if taken is None else taken.of(whole)
        for index in range(count):
            stretch = Stretch(index, count)
            found.append(Part(whole.shape, stretch.of(inner), stretch, taken))
    return found


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (4, 1, 3), (0, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 30])
def test_stretches_of_any_shape_make_the_whole_again(shape: tuple[int, ...], count: int) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    parts = parts_of(whole, count)
    assert torch.equal(joined(parts), whole)
    # Every element is in one box, and a part has few boxes.
    sizes = [v.numel() for part in parts for _, _, v in part.boxes()]
    assert sum(sizes) == whole.numel()
    assert all(len(list(part.boxes())) <= max(1, 2 * len(shape)) for part in parts)


@pytest.mark.parametrize(
    ("dim", "blocks", "count"), [*itertools.product((0, 1), (1, 3), (1, 2, 5))]
)
def test_stretches_of_slices_make_the_whole_again(dim: int, blocks: int, count: int) -> None:
    whole = torch.arange(12 * 6 * 2, dtype=torch.float64).reshape(12, 6, 2)
    slices = tuple(Slice(dim, index, 2, blocks) for index in range(2))
    assert torch.equal(joined(parts_of(whole, count, slices)), whole)


def test_a_slice_without_stretch_has_its_own_shape() -> None:
    whole = torch.arange(24).reshape(6, 4)
    taken = Slice(0, 1, 2, 3)
    assert taken.of(whole)[:, 0].tolist() == [4, 12, 20]
    part = Part(whole.shape, taken.of(whole), slice=taken)
    assert [(o, n) for o, n, _ in part.boxes()] == [((row, 0), (1, 4)) for row in (1, 3, 5)]


def test_the_boxes_are_views_of_the_values() -> None:
    part = parts_of(torch.zeros(4, 4), 3)[1]
    for _, _, view in part.boxes():
        view.fill_(1)
    assert part.values.tolist() == [1.0] * 6


def test_missing_parts_are_said() -> None:
    with pytest.raises(InvalidInputError, match=r"2 parts.*8.*12 elements"):
        joined(parts_of(torch.zeros(3, 4), 3)[:2])
    with pytest.raises(InvalidInputError, match=r"1 blocks.*2"):
        Slice(0, 0, 2).ranges(5)
