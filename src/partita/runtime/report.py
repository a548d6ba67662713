"""A run beside its prediction: per stage and per device, in the same units."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.columns import Floats
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.core.timeline import Timeline
from partita.program.matching import match

_FORWARD = (Kind.FORWARD,)
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage, predicted and measured.

    Attributes:
        stage: The stage.
        devices: Where it runs.
        forward_s: Seconds of a forward: predicted, measured.
        backward_s: Seconds of a backward, all of its parts: predicted, measured.
        compute_s: Seconds of compute per step, on its busiest device: predicted, measured.
    """

    stage: int
    devices: tuple[str, ...]
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]
    compute_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device, predicted and measured.

    Attributes:
        device: Its name.
        busy_s: Seconds of compute per step: predicted, measured.
        bubble: Share of the step without compute: predicted, measured.
        transfer_s: Seconds of the quickest message that it sends, predicted and measured. That a
            message has come is only seen when somebody waits for it, so others look slower.
        peak_bytes: Peak of memory: predicted, measured (NaN where it was not).
    """

    device: str
    busy_s: tuple[float, float]
    bubble: tuple[float, float]
    transfer_s: tuple[float, float]
    peak_bytes: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run beside its prediction.

    Attributes:
        step_s: Seconds a step: predicted, measured (median without the first quarter).
        stages: The stages.
        devices: The devices.
        slowest: The device whose compute is furthest above its prediction, with the factor.
    """

    step_s: tuple[float, float]
    stages: tuple[StageRow, ...]
    devices: tuple[DeviceRow, ...]
    slowest: tuple[str, float]

    @property
    def error(self) -> float:
        """The prediction relative to what was measured."""
        return self.step_s[0] / self.step_s[1] - 1

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""

        def pair(values: tuple[float, float]) -> dict[str, float | None]:
            first, second = (v if np.isfinite(v) else None for v in values)
            return {"predicted": first, "measured": second}

        return {
            "step_s": pair(self.step_s),
            "error": self.error,
            "slowest": {"device": self.slowest[0], "factor": self.slowest[1]},
            "stages": [
                {
                    "stage": row.stage,
                    "devices": list(row.devices),
                    "forward_s": pair(row.forward_s),
                    "backward_s": pair(row.backward_s),
                    "compute_s": pair(row.compute_s),
                }
                for row in self.stages
            ],
            "devices": [
                {
                    "device": row.device,
                    "busy_s": pair(row.busy_s),
                    "bubble": pair(row.bubble),
                    "transfer_s": pair(row.transfer_s),
                    "peak_bytes": pair(row.peak_bytes),
                }
                for row in self.devices
            ],
        }


def settled(values: Sequence[float]) -> list[float]:
    """Return what is left of a series when its first quarter is discarded."""
    return list(values[len(values) // 4 :])


def report_run(
    plan: Plan,
    program: Program,
    predicted: Timeline,
    measured: Sequence[Timeline],
    step_s: Sequence[float],
    peak_bytes: Sequence[float] = (),
) -> RunReport:
    """Compare a run with its prediction; the first quarter of the steps is left out.

    Args:
        plan: The plan.
        program: Its Program.
        predicted: The simulated step.
        measured: The steps of the run, of the same Program.
        step_s: Seconds of each step.
        peak_bytes: Measured peak of each device, if there is one.
    """
    late = measured[len(measured) // 4 :]
    spent = np.median([timeline.end_s - timeline.start_s for timeline in late], axis=0)
    expected = predicted.end_s - predicted.start_s
    sends = program.kind == Kind.SEND
    partner = match(program).partner[sends]
    for seconds, timelines in ((expected, [predicted]), (spent, late)):
        arrivals = [t.end_s[partner] - t.start_s[sends] for t in timelines]
        seconds[sends] = np.min(arrivals, axis=0)
    measured_step = float(np.median(settled(step_s)))
    stages = tuple(
        _stage_row(plan, predicted, index, expected, spent) for index in range(len(plan.stages))
    )
    peaks = list(peak_bytes) or [float("nan")] * len(plan.devices)
    devices = tuple(
        _device_row(predicted, index, expected, spent, measured_step, peaks[index])
        for index in range(len(plan.devices))
    )
    factors = {
        row.device: row.busy_s[1] / row.busy_s[0] for row in devices if row.busy_s[0] > 0
    } or {plan.devices[0]: 1.0}
    worst = max(factors, key=lambda name: factors[name])
    return RunReport(
        step_s=(predicted.makespan_s, measured_step),
        stages=stages,
        devices=devices,
        slowest=(worst, factors[worst]),
    )


def _mean(values: Floats, rows: Any) -> float:  # noqa: ANN401  # a mask
    return float(values[rows].mean()) if bool(np.any(rows)) else 0.0


def _least(values: Floats, rows: Any) -> float:  # noqa: ANN401  # a mask
    return float(values[rows].min()) if bool(np.any(rows)) else float("nan")


def _stage_row(
    plan: Plan, timeline: Timeline, stage: int, expected: Floats, spent: Floats
) -> StageRow:
    here = timeline.stage == stage
    forward = here & np.isin(timeline.kind, _FORWARD)
    backward = here & np.isin(timeline.kind, _BACKWARD)
    runs = max(int(forward.sum()), 1)

    def compute(values: Floats) -> float:
        rows = forward | backward
        by_device = np.bincount(timeline.device[rows], weights=values[rows])
        return float(by_device.max(initial=0.0))

    devices = sorted({device for group in plan.stages[stage].devices for device in group})
    return StageRow(
        stage=stage,
        devices=tuple(plan.devices[device] for device in devices),
        forward_s=(_mean(expected, forward), _mean(spent, forward)),
        backward_s=(
            float(expected[backward].sum()) / runs,
            float(spent[backward].sum()) / runs,
        ),
        compute_s=(compute(expected), compute(spent)),
    )


def _device_row(
    timeline: Timeline,
    device: int,
    expected: Floats,
    spent: Floats,
    step_s: float,
    peak: float,
) -> DeviceRow:
    here = timeline.device == device
    compute = here & (timeline.kind <= Kind.UPDATE)
    sends = here & (timeline.kind == Kind.SEND)
    predicted_busy, busy = float(expected[compute].sum()), float(spent[compute].sum())
    return DeviceRow(
        device=timeline.devices[device],
        busy_s=(predicted_busy, busy),
        bubble=(
            1 - predicted_busy / timeline.makespan_s if timeline.makespan_s else 0.0,
            1 - busy / step_s if step_s else 0.0,
        ),
        transfer_s=(_least(expected, sends), _least(spent, sends)),
        peak_bytes=(float(timeline.peak_bytes[device]), peak),
    )


def recalibrated(problem: Problem, plan: Plan, report: RunReport) -> Graph:
    """Return the graph with costs as the run has shown them: each stage's ops scaled alike.

    Only the costs of the type of device that a stage ran on change.
    """
    graph = problem.graph
    types = {device.name: device.type for device in problem.cluster.devices}
    costs = list(graph.costs)
    for index, cost in enumerate(costs):
        forward, backward = np.ones(len(graph)), np.ones(len(graph))
        for row in report.stages:
            if not any(types[name] == cost.device_type for name in row.devices):
                continue
            ops = plan.stage_of == row.stage
            forward[ops] = _factor(row.forward_s)
            backward[ops] = _factor(row.backward_s)
        costs[index] = replace(
            cost, forward_s=cost.forward_s * forward, backward_s=cost.backward_s * backward
        )
    return replace(graph, costs=tuple(costs))


def _factor(pair: tuple[float, float]) -> float:
    predicted, measured = pair
    return measured / predicted if predicted > 0 and measured > 0 else 1.0
