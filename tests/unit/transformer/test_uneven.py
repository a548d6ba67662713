"""Uneven stages over equal devices: never worse than regular ones, better where those waste."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.cost.links import fabric_of
from partita.transformer import choices
from partita.transformer.choices import find_choices
from partita.transformer.kernels import machine_of
from partita.transformer.layout import FRAMEWORKS
from partita.transformer.mixed import fits_places
from partita.transformer.named import named_shapes
from partita.transformer.pipelines import played_s
from partita.transformer.search import Task
from partita.transformer.uneven import refined


def task_on(shorthand: str, model: str, *, batch: int, share: float = 0.9, **more):
    cluster = read_shorthand(shorthand, load_catalogue())
    first = cluster.devices[0]
    task = Task(
        shape=named_shapes()[model].shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster)),
        batch=batch,
        sequence_length=8192,
        limit_bytes=first.memory_bytes * share,
        **more,
    )
    return task, cluster


def regular_and_uneven(monkeypatch, task, cluster):
    """Return the best choice of the regular space, and that of all."""
    best = find_choices(task, cluster)[0]
    with monkeypatch.context() as patch:
        patch.setattr(choices, "uneven_candidates", lambda *_: [])
        patch.setattr(choices, "refined", lambda step_s, lanes: (step_s, lanes))
        regular = find_choices(task, cluster)
    return (regular[0] if regular else None), best


@pytest.mark.parametrize(
    ("shorthand", "model", "batch", "fixed", "gain"),
    [
        # The head of a large vocabulary is as heavy as two layers.
        ("4xdgx-h100", "llama3-8b", 128, {"pp": 4, "tp": 1}, 0.05),
        # 80 layers over seven stages.
        ("7xdgx-h100", "llama3-70b", 112, {}, 0.005),
        # Only the first stages lack the memory for all that is in flight.
        ("8xl40s", "llama3-8b", 64, {"pp": 8, "cp": 1, "vp": 1}, 0.2),
        ("8xa100-sxm-40gb", "llama3-8b", 64, {}, 0.0),
        ("4xdgx-h100", "mixtral-8x7b", 64, {}, 0.0),
    ],
)
def test_uneven_stages_are_never_worse_and_better_where_regular_ones_wait(
    monkeypatch, shorthand, model, batch, fixed, gain
):
    task, cluster = task_on(shorthand, model, batch=batch, fixed=fixed)
    regular, best = regular_and_uneven(monkeypatch, task, cluster)
    assert best.step_s <= regular.step_s * (1 + 1e-9)
    assert best.step_s <= regular.step_s / (1 + gain)
    for lane in best.lanes:
        assert sum(lane.layers) == task.shape.layers
        assert fits_places(lane)


def test_only_stages_without_room_compute_again_and_the_title_says_so():
    fixed = {"pp": 8, "cp": 1, "vp": 1}
    task, cluster = task_on("8xl40s", "llama3-8b", batch=64, fixed=fixed)
    best = find_choices(task, cluster)[0]
    sets = [place.layout.recompute for place in best.lanes[0].places]
    # The first stages keep most microbatches in flight.
    assert sets[0] != ()
    assert sets[-1] == ()
    assert sorted(map(bool, sets), reverse=True) == list(map(bool, sets))
    assert "recompute mlp on" in best.title
    assert "layers" in best.title
    # Fixed is fixed, for every stage.
    task = replace(task, fixed={**fixed, "recompute": ("full",)})
    same = find_choices(task, cluster)[0]
    assert {place.layout.recompute for place in same.lanes[0].places} == {("full",)}


def test_what_fits_only_unevenly_is_found(monkeypatch):
    # Regular stages count a layer more where layers do not divide.
    fixed = {"tp": 8, "pp": 8, "cp": 2, "vp": 8, "recompute": ()}
    task, cluster = task_on("128xdgx-h100", "llama3-405b", batch=512, fixed=fixed)
    regular, best = regular_and_uneven(monkeypatch, task, cluster)
    assert regular is None
    assert best.step_s == pytest.approx(19.84, rel=0.02)


@pytest.mark.parametrize("framework", [f.name for f in FRAMEWORKS.values() if not f.stages_differ])
def test_frameworks_with_equal_stages_keep_them(framework):
    fixed = {"pp": 4, "tp": 1}
    task, cluster = task_on("4xdgx-h100", "llama3-8b", batch=128, fixed=fixed, framework=framework)
    for choice in find_choices(task, cluster):
        lane = choice.lanes[0]
        assert len({place.layout for place in lane.places}) == 1
        assert np.ptp(lane.layers) <= 1


def test_layers_that_lie_badly_are_moved():
    fixed = {"pp": 4, "tp": 1, "cp": 1, "vp": 1}
    task, cluster = task_on("4xdgx-h100", "llama3-8b", batch=64, fixed=fixed)
    lane = find_choices(task, cluster)[0].lanes[0]
    bad = replace(lane, layers=(lane.layers[0] - 1, *lane.layers[1:-1], lane.layers[-1] + 1))
    before = played_s([bad])
    after, lanes = refined(before, (bad,))
    assert after < before
    assert sum(lanes[0].layers) == task.shape.layers
