"""Gradients in flat memory: views that backward adds to, sums that are reduced as they lie."""

import pytest
import torch

from partita.errors import InvalidInputError
from partita.runtime.flat_gradients import FlatGradients

LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3), "v": torch.zeros(4)}
BUCKETS = [("w", "b"), ("v",)]


def gradients(factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, factor) for name, value in LIKE.items()}


def reduce(flat: FlatGradients) -> None:
    for bucket in BUCKETS:
        flat.take_home(bucket, flat.sent(bucket) * 2)


def test_views_of_a_bucket_lie_in_what_is_sent() -> None:
    flat = FlatGradients(BUCKETS, LIKE)
    flat.add(gradients())
    flat.add(gradients(2.0))
    sent = flat.sent(("w", "b"))
    assert sent.shape == (9,)
    assert sent.tolist() == [3.0] * 9
    assert {name: tuple(view.shape) for name, view in flat.views.items()} == {
        "w": (2, 3), "b": (3,), "v": (4,)
    }  # fmt: skip
    assert flat.views["w"].data_ptr() == sent.data_ptr()


def test_a_step_begins_with_zeros_and_has_the_same_views() -> None:
    flat = FlatGradients(BUCKETS, LIKE)
    views = dict(flat.views)
    for _ in range(2):
        flat.add(gradients())
        reduce(flat)
        used = flat.use(0.5)
        assert all(used[name] is views[name] for name in views)
        assert all(bool((view == 1).all()) for view in used.values())
        assert flat.unused() == []


def test_what_autograd_adds_to_the_views_is_what_it_computes() -> None:
    flat = FlatGradients([("w",)], {"w": LIKE["w"]})
    leaf = torch.ones(2, 3, requires_grad=True)
    leaf.grad = flat.views["w"]
    for _ in range(2):
        flat.begin()
        (leaf * torch.arange(6.0).view(2, 3)).sum().backward()
    assert flat.sent(("w",)).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_parameters_without_a_gradient_bring_zeros() -> None:
    flat = FlatGradients(BUCKETS, LIKE)
    flat.add(gradients())
    reduce(flat)
    flat.use(1.0)
    assert flat.sent(("v",)).tolist() == [0.0] * 4


def test_a_gradient_that_comes_after_its_reduction_is_refused() -> None:
    flat = FlatGradients(BUCKETS, LIKE)
    flat.add(gradients())
    flat.sent(("w", "b"))
    with pytest.raises(InvalidInputError, match=r"'w'.* reduction"):
        flat.add(gradients())


def test_a_bucket_that_was_not_reduced_cannot_be_used() -> None:
    flat = FlatGradients(BUCKETS, LIKE)
    flat.add(gradients())
    flat.take_home(("w", "b"), flat.sent(("w", "b")))
    with pytest.raises(InvalidInputError, match="'v'"):
        flat.use(1.0)
    assert sorted(flat.unused()) == ["b", "v", "w"]
