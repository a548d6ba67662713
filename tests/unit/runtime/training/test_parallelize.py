"""Batches of a user's script: what tells two of them apart."""

import pytest
import torch

from partita.runtime.training.parallelize import batch_digest

WORDS = torch.arange(24).reshape(8, 3)


@pytest.mark.parametrize(
    "other",
    [
        WORDS.flip(0),
        WORDS.reshape(3, 8),
        WORDS.to(torch.int32),
        (WORDS,),
        {"words": WORDS},
        [WORDS, 1],
        None,
    ],
)
def test_another_batch_has_another_digest(other: object) -> None:
    assert batch_digest(other) != batch_digest(WORDS)


def test_equal_batches_have_one_digest_wherever_their_numbers_lie() -> None:
    columns = WORDS.t().contiguous().t()
    assert not columns.is_contiguous()
    assert batch_digest((columns, {"mask": None})) == batch_digest((WORDS.clone(), {"mask": None}))


def test_samples_in_another_order_are_seen_in_a_tensor_of_which_only_a_part_is_read() -> None:
    images = torch.randn(16, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    assert batch_digest(images) == batch_digest(images.clone())
    assert batch_digest(images) != batch_digest(images[torch.arange(15, -1, -1)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64])
def test_every_type_of_number_has_a_digest(dtype: torch.dtype) -> None:
    ones = torch.ones(3, dtype=dtype)
    assert batch_digest(ones) == batch_digest(torch.ones(3, dtype=dtype))
    assert batch_digest(ones) != batch_digest(torch.zeros(3, dtype=dtype))


def test_empty_and_sparse_tensors_count_by_shape_and_type() -> None:
    assert batch_digest(torch.empty(0, 3)) != batch_digest(torch.empty(0, 4))
    assert batch_digest(torch.eye(3).to_sparse()) == batch_digest(torch.eye(3).to_sparse())
