"""The metric energy: joules of a plan with the highest clocks."""

from dataclasses import replace

import pytest

from partita.catalogue.examples import example
from partita.core.cluster import Device
from partita.core.problem import Metric, Problem
from partita.cost.judge import measure
from partita.cost.power import waiting_power_w
from partita.cost.predict import simulate
from partita.errors import UnsupportedError
from partita.planners.table import solve


def asked() -> Problem:
    base = example("gpt-small")
    return replace(base, objective=replace(base.objective, metric=Metric.ENERGY))


def test_the_value_is_the_power_of_busy_and_of_waiting_devices_a_sample() -> None:
    problem = asked()
    plan = solve(problem, "uniform").plan
    value = measure(problem, plan)
    timeline = simulate(problem, plan)
    device = problem.cluster.devices[0]
    compute = timeline.kind <= 5
    busy = float((timeline.end_s - timeline.start_s)[compute & (timeline.kind > 0)].sum())
    idle = len(timeline.devices) * timeline.makespan_s - busy
    waiting = waiting_power_w(device.idle_w, device.max_w)
    assert value.unit == "J/sample"
    assert value.value == pytest.approx((device.max_w * busy + waiting * idle) / plan.samples)


def test_one_device_needs_less_than_a_pipeline_that_waits() -> None:
    problem = asked()
    assert solve(problem, "single").value < solve(problem, "uniform").value


def test_waiting_draws_what_was_measured() -> None:
    assert waiting_power_w(45.0, 300.0) == pytest.approx(83.25)


def test_a_device_without_a_power_is_named() -> None:
    problem = asked()
    devices = tuple(Device(name=d.name, host=d.host, type="a100") for d in problem.cluster.devices)
    powerless = replace(problem, cluster=replace(problem.cluster, devices=devices))
    plan = solve(replace(problem, objective=example("gpt-small").objective), "uniform").plan
    with pytest.raises(UnsupportedError, match="'host0/gpu0'"):
        measure(powerless, plan)
