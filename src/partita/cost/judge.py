"""A plan, judged once: its value, the limits that it keeps or breaks, and why.

``measure`` gives the value by the problem's metric, ``judge`` the value with the limits,
``judge_candidate`` the same for searches, ``evaluate`` all figures that people ask for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import CostOrigin, Graph, SampleUnit
from partita.core.metrics import MemoryRule
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.core.program import LAST_COMPUTE, Kind, Program
from partita.core.timeline import Timeline
from partita.cost.durations import cluster_devices, stage_seconds
from partita.cost.memory import (
    MemoryBreakdown,
    memory_breakdown,
    memory_events,
    memory_limits,
    peak_memory,
    static_memory,
)
from partita.cost.power import step_joules
from partita.cost.predict import simulate
from partita.errors import InfeasibleError, InvalidInputError, PartitaError, UnsupportedError
from partita.objectives.placed import placement_errors
from partita.objectives.value import Value, evaluate_published, value_of
from partita.program.lower import lower
from partita.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of a plan, and what bounds it.

    Attributes:
        problem: The problem.
        plan: The plan.
        step: The value of the plan by our own model of a step.
        step_s: Seconds of a step: from idle to the last update; with weight stashing the steady
            period.
        timeline: The simulated step.
        memory: Where the memory of each device goes at its peak.
        samples_per_s: NaN where the graph does not know its samples.
        tokens_per_s: NaN where it is not a token model.
        flop_utilisation: Share of the devices' peak rate that the model's arithmetic reaches;
            NaN where the figures are not known.
        price_per_step: Money for a step; NaN where a price is not known.
        bottleneck: What bounds the step, for people.
        assumptions: What was assumed because nothing was known, a sentence each.
    """

    problem: Problem
    plan: Plan
    step: Value
    step_s: float
    timeline: Timeline
    memory: MemoryBreakdown
    samples_per_s: float
    tokens_per_s: float
    flop_utilisation: float
    price_per_step: float
    bottleneck: str
    assumptions: tuple[str, ...]

    @property
    def values(self) -> Mapping[Metric, Value]:
        """Value of the plan by every objective that applies, found when it is asked for."""
        return {Metric.THROUGHPUT: self.step, **evaluate_published(self.problem, self.plan)}

    @property
    def headroom_bytes(self) -> Array:
        """Memory that is left on each device of the plan at its peak."""
        return self.timeline.limit_bytes - self.timeline.peak_bytes


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Return all that the cost model says of a plan.

    Raises:
        InvalidInputError: The plan is not one for the problem, or cannot run.
    """
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program, period=plan.stashes_weights)
    step_s, bottleneck = _seconds(plan, timeline), _bottleneck(timeline)
    plan.check_fits(problem)
    known = problem.graph.sample_unit is SampleUnit.SAMPLE and step_s > 0
    rate = plan.samples / step_s if known else float("nan")
    return Evaluation(
        problem=problem,
        plan=plan,
        step=_step_time(problem, plan, timeline, bottleneck),
        step_s=step_s,
        timeline=timeline,
        memory=memory_breakdown(problem, plan, program),
        samples_per_s=rate,
        tokens_per_s=rate * problem.graph.tokens_per_sample or float("nan"),
        flop_utilisation=_flop_utilisation(problem, plan, step_s),
        price_per_step=_price(problem, plan, step_s),
        bottleneck=bottleneck,
        assumptions=_assumptions(problem, plan),
    )


def measure(problem: Problem, plan: Plan) -> Value:
    """Return the value of a plan by the problem's own metric.

    Raises:
        UnsupportedError: The metric is energy, and the power of a device is not known.
    """
    return value_of(problem.objective.metric, problem, plan)


class Limit(StrEnum):
    """Limit that a plan can break: it must run, and keep its metric's, the rules and memory."""

    RUN = "run"
    METRIC = "metric"
    RULE = "rule"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The value of a plan, and whether it keeps its limits.

    Attributes:
        value: Value by the problem's metric, with unit and bottleneck.
        limit: The first limit that is broken; ``None`` = all are kept.
        reason: What is broken, in words; empty = nothing.
        over_bytes: Bytes that the fullest device needs beyond its limit; 0 where memory is kept,
            ``inf`` where another limit is broken first.
        headroom_bytes: Memory left on each device of the plan at its peak; ``None`` where the
            metric counts memory by its own rule, or another limit is broken first.
    """

    value: Value
    limit: Limit | None = None
    reason: str = ""
    over_bytes: float = 0.0
    headroom_bytes: Array | None = None

    @property
    def feasible(self) -> bool:
        """Whether the plan keeps all limits."""
        return self.limit is None

    @property
    def score(self) -> float:
        """The value where the plan keeps all limits, else ``inf``."""
        return self.value.value if self.limit is None else math.inf

    @property
    def rank(self) -> tuple[float, float]:
        """What orders plans, the best first: of those that do not fit, by the bytes over."""
        return self.score, self.over_bytes


def judge(problem: Problem, plan: Plan, *, bottleneck: bool = True) -> Judgement:
    """Return the value of a plan by the problem's metric, and whether it keeps its limits.

    The limits are those of the metric (``Value.errors``) and, unless the metric counts memory by
    its own rule alone, the problem's rules and the peak of the plan's Program.

    Args:
        problem: The problem.
        plan: A plan for it.
        bottleneck: Whether to name what bounds a simulated step; searches need not know.

    Raises:
        InvalidInputError: The plan cannot run, or the metric cannot measure it.
        UnsupportedError: The metric is energy, and the power of a device is not known.
    """
    metric = problem.objective.metric
    timeline = None
    if metric in _OF_TIMELINE:
        # The simulation that gives the value gives the memory, too.
        timeline = _step(problem, plan)
        words = _bottleneck(timeline) if bottleneck else ""
        value = _OF_TIMELINE[metric](problem, plan, timeline, words)
    else:
        value = measure(problem, plan)
    if value.errors:
        return _broken(value, Limit.METRIC, value.errors[0])
    if metric.row.memory is MemoryRule.METRIC:
        return Judgement(value=value)
    errors = placement_errors(problem, plan)
    if errors:
        return _broken(value, Limit.RULE, errors[0])
    if timeline is None:
        limit = memory_limits(problem, plan)
        if bool(np.isinf(limit).all()):
            return Judgement(value=value, headroom_bytes=limit)
        found = peaks(problem, plan)
    else:
        found = Peaks(timeline.peak_bytes, timeline.limit_bytes)
    left = -found.over_bytes
    over = max(0.0, -float(left.min()))
    if not over:
        return Judgement(value=value, headroom_bytes=left)
    return Judgement(
        value=value,
        limit=Limit.MEMORY,
        reason=f"device {plan.devices[int(left.argmin())]!r} needs {format_bytes(over)} more than "
        "its limit",
        over_bytes=over,
        headroom_bytes=left,
    )


def judge_candidate(problem: Problem, plan: Plan) -> Judgement:
    """Return the judgement of a plan that a search made, which need not be one that can run."""
    try:
        return judge(problem, plan, bottleneck=False)
    except (InfeasibleError, InvalidInputError) as exc:
        return cannot_run(problem, exc)


def cannot_run(problem: Problem, why: PartitaError) -> Judgement:
    """Return the judgement of a plan that cannot run, or cannot even be made."""
    nothing = Value(metric=problem.objective.metric, value=math.inf)
    return _broken(nothing, Limit.RUN, str(why))


def _broken(value: Value, limit: Limit, reason: str) -> Judgement:
    return Judgement(value=value, limit=limit, reason=reason, over_bytes=math.inf)


def check_memory(problem: Problem, plan: Plan) -> None:
    """Check that a plan keeps within the memory of its devices.

    Raises:
        InfeasibleError: It does not; names the device, by how much, and what would do.
    """
    if not bool(np.isinf(memory_limits(problem, plan)).all()):
        check_peaks(problem, plan, lower(problem, plan))


class Peaks(NamedTuple):
    """Memory of each device of a plan.

    Attributes:
        peak_bytes: The most that it holds in a step.
        limit_bytes: What it may use.
    """

    peak_bytes: Array
    limit_bytes: Array

    @property
    def over_bytes(self) -> Array:
        """Bytes that each device needs beyond its limit; below 0 where it has room."""
        return self.peak_bytes - self.limit_bytes

    @property
    def fit(self) -> bool:
        """Whether every device has the memory."""
        return bool((self.peak_bytes <= self.limit_bytes).all())

    @property
    def fullest(self) -> int:
        """The device that needs the largest share of what it may use."""
        shares = self.peak_bytes / self.limit_bytes
        return int(np.argmax(shares if shares.any() else self.peak_bytes))

    @property
    def worst(self) -> tuple[float, float]:
        """Peak and limit of the fullest device."""
        return float(self.peak_bytes[self.fullest]), float(self.limit_bytes[self.fullest])

    @property
    def fullness(self) -> float:
        """Peak over limit of the fullest device; above 1 it does not fit."""
        peak, limit = self.worst
        return peak / limit


def peaks(problem: Problem, plan: Plan, program: Program | None = None) -> Peaks:
    """Return the memory that a plan needs and may use, of each of its devices.

    Args:
        problem: The problem.
        plan: A plan for it.
        program: Its Program, if it was lowered before.
    """
    peak = peak_memory(problem, plan, program or lower(problem, plan))
    return Peaks(peak, memory_limits(problem, plan))


def check_peaks(problem: Problem, plan: Plan, program: Program) -> Peaks:
    """Check the peak of every device against its limit, and return both.

    Raises:
        InfeasibleError: A device needs more than it may use; says how much, what for, when, and
            what would do.
    """
    found = peaks(problem, plan, program)
    peak, limit, over = *found, found.over_bytes
    device = int(np.argmax(over))
    if not over[device] > 0:
        return found
    raise InfeasibleError(
        f"device {plan.devices[device]!r} needs {format_bytes(peak[device])} for "
        f"{_held_words(problem, plan, device)} {_peak_place(problem, plan, program, device)}, "
        f"{format_bytes(over[device])} more than its limit of {format_bytes(limit[device])}; use "
        "more devices, smaller microbatches, recomputation or sharding, or move ops to a device "
        "with more room"
    )


def _held_words(problem: Problem, plan: Plan, device: int) -> str:
    """Return the stages of a device and the op that takes the most memory there."""
    stages = [
        index
        for index, stage in enumerate(plan.stages)
        if any(device in group for group in stage.devices)
    ]
    graph = problem.graph
    held = np.where(np.isin(plan.stage_of, stages), graph.size_bytes, -1.0)
    named = ", ".join(map(str, stages[:5])) + (", ..." if len(stages) > 5 else "")
    return (
        f"stage{'s' * (len(stages) > 1)} {named} (largest op "
        f"{graph.ops.names[int(np.argmax(held))]!r})"
    )


def _peak_place(problem: Problem, plan: Plan, program: Program, device: int) -> str:
    """Return when a device holds most: at rest, or at an instruction."""
    events = memory_events(problem, plan, program)
    mine = np.flatnonzero(program.device[events.row] == device)
    row, at_end, delta, _ = (part[mine] for part in events)
    order = np.lexsort((delta > 0, 2 * row + at_end))
    used = np.cumsum(delta[order])
    if not len(used) or used.max() <= 0:
        total = static_memory(problem, plan, program).total[device]
        words = f"weights, gradients, optimizer state and workspace are {format_bytes(total)}"
        return f"at rest ({words})"
    return f"at {program.describe(int(row[order[np.argmax(used)]]))}"


def step_time(problem: Problem, plan: Plan) -> Value:
    """Return the seconds of a step: of weight stashing, from a step to the next."""
    timeline = _step(problem, plan)
    return _step_time(problem, plan, timeline, _bottleneck(timeline))


def energy(problem: Problem, plan: Plan) -> Value:
    """Return the modelled joules of a step, all clocks at their highest, over its samples.

    Raises:
        UnsupportedError: The power of a device is not known.
    """
    timeline = _step(problem, plan)
    return _energy(problem, plan, timeline, _bottleneck(timeline))


def money(problem: Problem, plan: Plan) -> Value:
    """Return the price of a step: that of the devices that a plan uses, for as long as it takes.

    Raises:
        UnsupportedError: The price of a device is not known.
    """
    timeline = _step(problem, plan)
    return _money(problem, plan, timeline, _bottleneck(timeline))


def _step(problem: Problem, plan: Plan) -> Timeline:
    return simulate(problem, plan, period=plan.stashes_weights)


def _seconds(plan: Plan, timeline: Timeline) -> float:
    return timeline.period_s if plan.stashes_weights else timeline.makespan_s


def _step_time(problem: Problem, plan: Plan, timeline: Timeline, bottleneck: str) -> Value:
    del problem
    seconds = _seconds(plan, timeline)
    return Value(metric=Metric.THROUGHPUT, value=seconds, bottleneck=bottleneck)


def _energy(problem: Problem, plan: Plan, timeline: Timeline, bottleneck: str) -> Value:
    joules = step_joules(problem, plan, timeline, _seconds(plan, timeline)) / plan.samples
    unit = Metric.ENERGY.row.unit
    return Value(metric=Metric.ENERGY, value=joules, unit=unit, bottleneck=bottleneck)


def _money(problem: Problem, plan: Plan, timeline: Timeline, bottleneck: str) -> Value:
    price = _price(problem, plan, _seconds(plan, timeline))
    if math.isnan(price):
        unknown = next(d for d in problem.cluster.devices if math.isnan(d.price_per_hour))
        raise UnsupportedError(
            f"the price of device {unknown.name!r} (type {unknown.type or 'none'!r}) is not known; "
            "give its type a price_per_hour in a catalogue of your own (--catalogue)"
        )
    unit = Metric.COST.row.unit
    return Value(metric=Metric.COST, value=price, unit=unit, bottleneck=bottleneck)


_OF_TIMELINE: Mapping[Metric, Callable[[Problem, Plan, Timeline, str], Value]] = {
    Metric.THROUGHPUT: _step_time,
    Metric.ENERGY: _energy,
    Metric.COST: _money,
}
"""Metrics whose value follows from the simulated step."""


def latency(problem: Problem, plan: Plan) -> Value:
    """Return the seconds of one microbatch from input to output."""
    objective = replace(problem.objective, mode=Mode.INFERENCE, schedule=None, microbatches=1)
    stages = tuple(replace(stage, devices=stage.devices[:1], shares=()) for stage in plan.stages)
    one = replace(
        plan,
        stages=stages,
        schedule=Schedule.INFERENCE,
        microbatch_sizes=equal_microbatches(1, int(plan.microbatch_sizes[0])),
    )
    timeline = simulate(replace(problem, objective=objective), one)
    seconds, bottleneck = timeline.makespan_s, _bottleneck(timeline)
    return Value(metric=Metric.LATENCY, value=seconds, bottleneck=bottleneck)


def _bottleneck(timeline: Timeline) -> str:
    """Return what bounds a step: moving data, if the critical path mostly does, or a device."""
    path = timeline.critical_path
    spent = timeline.end_s[path] - timeline.start_s[path]
    moving = timeline.kind[path] > LAST_COMPUTE
    whole = format_seconds(timeline.makespan_s)
    moved_s = float(spent[moving].sum())
    if moved_s * 2 > float(spent.sum()):
        sends = float(spent[timeline.kind[path] == Kind.SEND].sum())
        what = "transfers" if sends * 2 > moved_s else "reductions"
        return f"{what} on the critical path ({format_seconds(moved_s)} of {whole})"
    worst = int(np.argmax(timeline.busy_s))
    busy = format_seconds(float(timeline.busy_s[worst]))
    return f"compute on {timeline.devices[worst]} (busy {busy} of {whole})"


def _flop_utilisation(problem: Problem, plan: Plan, step_s: float) -> float:
    """Return the share of the peak rate of the arithmetic that the costs were computed with."""
    graph = problem.graph
    devices = [problem.cluster.devices[i] for i in cluster_devices(problem, plan.devices).tolist()]
    # Costs that assumed a peak know it best: graphs of older versions say the dtype of weights.
    assumed = {costs.device_type: costs.peak_flop_per_s for costs in graph.costs}
    peaks = [assumed.get(d.type) or d.peak_flop_per_s.get(graph.dtype, 0.0) for d in devices]
    passes = _passes(graph) if problem.objective.mode is Mode.TRAINING else 1.0
    work = float((passes * graph.ops.flops).sum()) * plan.samples / graph.batch_size
    if not work or not all(peaks) or step_s <= 0:
        return float("nan")
    return float(work / (sum(peaks) * step_s))


def _passes(graph: Graph) -> Array:
    """Return how often a training step does the forward work of each op.

    Three times as a rule: forward, the gradient of inputs, the gradient of weights. The first ops
    of a model compute no gradient of inputs, frozen ones none of weights. Recomputation is not
    counted.
    """
    costs, table = graph.costs[0], graph.parameters
    held = np.bincount(table.use_op, minlength=len(graph))
    trained = np.bincount(
        table.use_op, weights=table.trainable[table.use_parameter], minlength=len(graph)
    )
    by_input = costs.backward_input_s != 0  # NaN, not known, counts
    by_weight = (held == 0) | (trained > 0)
    passes: Array = 1.0 + (costs.backward_s > 0) * (by_input + 1.0 * by_weight)
    return passes


def _price(problem: Problem, plan: Plan, step_s: float) -> float:
    devices = [problem.cluster.devices[i] for i in cluster_devices(problem, plan.devices).tolist()]
    return float(sum(device.price_per_hour for device in devices)) * step_s / 3600


def _assumptions(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Return what the cost model assumed, a sentence each."""
    graph, result = problem.graph, []
    training = problem.objective.mode is Mode.TRAINING
    if graph.costs[0].origin in (CostOrigin.ESTIMATED, CostOrigin.GENERATED):
        result.append(f"op times are {graph.costs[0].origin.value}, not measured")
    types = {device.type for device in problem.cluster.devices}
    if any(not costs.device_type for costs in graph.costs) and len(types) > 1:
        result.append("the op times hold for every device type alike: all count as equally fast")
    if stage_seconds(problem, plan).modelled:
        result.append("op times of some device types are modelled from another type's by roofline")
    split = bool(np.isnan(graph.costs[0].backward_input_s).any())
    if training and plan.schedule.row.splits_backward and split:
        result.append("the split of backward is not known: half for inputs, half for weights")
    if any(stage.tp > 1 for stage in plan.stage_index) and not (
        len(graph.variants) or len(graph.degrees)
    ):
        result.append("tensor-parallel ops are assumed to split evenly at no extra cost")
    devices = [problem.cluster.devices[i] for i in cluster_devices(problem, plan.devices).tolist()]
    if training and not all(device.memory_bytes_per_s for device in devices):
        result.append("weight updates take no time where the memory bandwidth is not known")
    if not bool(graph.tensors.load_s.any()):
        result.append("loading of inputs takes no time")
    if training and not bool(graph.is_forward.all()):
        result.append(
            "gradients travel along the forward edges; explicit backward edges are ignored"
        )
    return tuple(result)
