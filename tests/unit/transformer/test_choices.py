"""Choices on a cluster: all fit, in their own arithmetic, and no device stays idle in vain."""

from dataclasses import replace

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.catalogue.what_if import what_if
from partita.core.cluster import Cluster
from partita.core.precision import parse_precision
from partita.cost.links import fabric_of
from partita.errors import InvalidInputError
from partita.transformer.choices import Choice, find_choices
from partita.transformer.kernels import accuracy_of, machine_of
from partita.transformer.layout import FRAMEWORKS, Layout
from partita.transformer.mixed import place_memory
from partita.transformer.named import named_shapes
from partita.transformer.pipelines import as_number
from partita.transformer.search import Task


def cluster_of(shorthand: str, *changes: str) -> Cluster:
    cluster = read_shorthand(shorthand, load_catalogue())
    for change in changes:
        cluster = what_if(cluster, change, load_catalogue())
    return cluster


def task_on(cluster: Cluster, model: str, *, batch: int, precision: str = "bf16", **more) -> Task:
    first, compute = cluster.devices[0], parse_precision(precision).compute
    return Task(
        shape=named_shapes()[model].shape,
        devices=len(cluster),
        machine=machine_of(first, fabric_of(cluster), compute=compute),
        batch=batch,
        sequence_length=4096,
        precision=precision,
        limit_bytes=first.memory_bytes * 0.92,
        **more,
    )


def assert_all_fit(choices: list[Choice]) -> None:
    for choice in choices:
        assert choice.total_bytes <= choice.limit_bytes
        for lane in choice.lanes:
            for number in range(len(lane.places)):
                total = as_number(place_memory(lane, number).total)
                assert total <= lane.limit_bytes(number)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_has_choices_that_fit(framework: str) -> None:
    sizes = {"llama3-8b": "dgx-h100", "llama3-70b": "8xdgx-h100", "mixtral-8x7b": "4xdgx-h100"}
    for model, shorthand in sizes.items():
        cluster = cluster_of(shorthand)
        found = find_choices(task_on(cluster, model, batch=64, framework=framework), cluster)
        assert found, model
        assert_all_fit(found)
        assert [choice.step_s for choice in found] == sorted(choice.step_s for choice in found)


@pytest.mark.parametrize(
    ("model", "shorthand", "batch"),
    [("llama3-70b", "7xdgx-h100", 112), ("deepseek-v3", "32xdgx-h100", 512)],
)
def test_layers_that_do_not_divide_fit_where_most_of_them_are(
    model: str, shorthand: str, batch: int
) -> None:
    cluster = cluster_of(shorthand)
    assert_all_fit(find_choices(task_on(cluster, model, batch=batch), cluster))


def test_wider_arithmetic_has_its_own_rate_and_width() -> None:
    cluster = cluster_of("8xa100")
    steps, shares = {}, {}
    for precision in ("bf16", "tf32", "fp32"):
        task = task_on(cluster, "llama3-8b", batch=64, precision=precision)
        best = find_choices(task, cluster)[0]
        peak = cluster.devices[0].peak_flop_per_s[parse_precision(precision).compute]
        steps[precision] = best.step_s
        shares[precision] = task.model_flops / (len(cluster) * peak * best.step_s)
    assert all(0.3 < share < 0.8 for share in shares.values()), shares
    assert steps["bf16"] < steps["tf32"] < steps["fp32"]


def test_devices_that_divide_badly_stay_idle() -> None:
    four, five = (cluster_of(f"{hosts}xdgx-h100") for hosts in (4, 5))
    best = {
        len(cluster): find_choices(task_on(cluster, "llama3-8b", batch=128), cluster)[0]
        for cluster in (four, five)
    }
    assert best[40].step_s <= best[32].step_s * (1 + 1e-9)


def test_one_lost_device_costs_no_more_than_its_host() -> None:
    lost = cluster_of("8xdgx-h100", "-host3/gpu1")
    without = cluster_of("8xdgx-h100", "-host3/*")
    steps = [
        find_choices(task_on(cluster, "llama3-70b", batch=128), cluster)[0].step_s
        for cluster in (lost, without)
    ]
    assert steps[0] <= steps[1] * (1 + 1e-9)


def test_racks_of_a_number_that_divides_badly_are_used_in_part() -> None:
    cluster = cluster_of("2xgb200-nvl72")
    task = replace(task_on(cluster, "llama3-70b", batch=256), fixed={"tp": 2, "pp": 2})
    best = find_choices(task, cluster)[0]
    assert best.num_devices == 128
    used = best.lanes[0].places[0].devices + best.lanes[0].places[1].devices
    assert {index // 72 for group in used for index in group} == {0, 1}


def test_slow_devices_are_priced_as_such_and_left_out_where_that_helps() -> None:
    cluster = cluster_of("4xdgx-h100")
    task = task_on(cluster, "llama3-8b", batch=96)
    even = find_choices(task, cluster)[0]
    slow = replace(cluster, devices=(replace(cluster.devices[0], speed=0.25), *cluster.devices[1:]))
    best = find_choices(task, slow)[0]
    without = cluster_of("4xdgx-h100", "-host0/*")
    alone = find_choices(task_on(without, "llama3-8b", batch=96), without)[0]
    assert even.step_s < best.step_s <= alone.step_s * (1 + 1e-9)


def test_money_is_saved_by_fewer_devices() -> None:
    cluster = cluster_of("8xdgx-h100")
    task = task_on(cluster, "llama3-8b", batch=128)
    quick, cheap = find_choices(task, cluster)[0], find_choices(task, cluster, by_price=True)[0]
    assert cheap.step_s * cheap.price_per_hour < quick.step_s * quick.price_per_hour
    assert cheap.num_devices < quick.num_devices
    free = replace(
        cluster, devices=tuple(replace(d, price_per_hour=np.nan) for d in cluster.devices)
    )
    with pytest.raises(InvalidInputError, match="has no price_per_hour"):
        find_choices(task, free, by_price=True)


def test_frozen_weights_have_no_gradient_to_count() -> None:
    cluster = cluster_of("dgx-h100")
    task = task_on(cluster, "llama3-8b", batch=32)
    frozen = replace(task, frozen=1.0)
    scores = 3 * task.shape._score_flops(task.tokens, task.sequence_length)
    assert (frozen.model_flops - scores) * 3 == pytest.approx((task.model_flops - scores) * 2)


@pytest.mark.parametrize(
    ("types", "layout", "more", "known"),
    [
        (("h100",), Layout(tp=4), {}, True),
        (("a100",), Layout(tp=4), {}, True),
        (("v100",), Layout(tp=4), {}, False),
        (("rtx4090",), Layout(tp=4), {}, False),
        (("l40s",), Layout(dp=8, zero=3), {}, False),
        (("h100", "a100"), Layout(tp=4), {}, False),
        (("h100",), Layout(tp=4), {"frozen": 0.99}, False),
        (("h100",), Layout(tp=4), {"compute": "float32"}, False),
        (("h100",), Layout(tp=4, framework="partita"), {}, False),
        (("h100",), Layout(dp=8, zero=3, framework="torchtitan"), {}, True),
    ],
)
def test_the_error_is_known_for_what_was_run_alone(types, layout, more, known) -> None:
    options = {"experts": False, "compute": "bfloat16", **more}
    assert (accuracy_of(layout, types, 8192, **options) is not None) is known
