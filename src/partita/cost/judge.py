"""Everything the cost model says of a plan, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from partita.core.columns import Array, Columns, Floats
from partita.core.graph import CostOrigin, Graph, SampleUnit
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Metric, Mode, Problem, Schedule
from partita.core.program import LAST_COMPUTE, Kind, Program
from partita.core.timeline import Timeline
from partita.cost.durations import cluster_devices, stage_seconds
from partita.cost.memory import memory_events, peak_memory, static_memory
from partita.cost.power import step_joules
from partita.cost.predict import simulate
from partita.errors import InfeasibleError
from partita.objectives import OBJECTIVES, evaluate_published
from partita.objectives.value import Value
from partita.program.check import prove
from partita.program.lower import lower
from partita.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What becomes of a plan, and what bounds it.

    Attributes:
        step_s: Seconds of a step: from idle to the last update; with weight stashing the steady
            period.
        timeline: The simulated step.
        values: Value of the plan by every objective that applies.
        samples_per_s: NaN where the graph does not know its samples.
        tokens_per_s: NaN where it is not a token model.
        flop_utilisation: Share of the devices' peak rate that the model's arithmetic reaches;
            NaN where the figures are not known.
        price_per_step: Money for a step; NaN where a price is not known.
        bottleneck: What bounds the step, for people.
        assumptions: What was assumed because nothing was known, a sentence each.
    """

    step_s: float
    timeline: Timeline
    values: Mapping[Metric, Value]
    samples_per_s: float
    tokens_per_s: float
    flop_utilisation: float
    price_per_step: float
    bottleneck: str
    assumptions: tuple[str, ...]

    @property
    def headroom_bytes(self) -> Array:
        """Memory that is left on each device of the plan at its peak."""
        return self.timeline.limit_bytes - self.timeline.peak_bytes


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Return all that the cost model says of a plan.

    Raises:
        InvalidInputError: The plan is not one for the problem, or cannot run.
    """
    timeline = simulate(problem, plan, period=plan.stashes_weights)
    step_s = timeline.period_s if plan.stashes_weights else timeline.makespan_s
    values = {Metric.THROUGHPUT: _step_value(timeline, step_s), **evaluate_published(problem, plan)}
    known = problem.graph.sample_unit is SampleUnit.SAMPLE and step_s > 0
    rate = plan.samples / step_s if known else float("nan")
    return Evaluation(
        step_s=step_s,
        timeline=timeline,
        values=values,
        samples_per_s=rate,
        tokens_per_s=rate * problem.graph.tokens_per_sample or float("nan"),
        flop_utilisation=_flop_utilisation(problem, plan, step_s),
        price_per_step=_price(problem, plan, step_s),
        bottleneck=_bottleneck(timeline),
        assumptions=_assumptions(problem, plan),
    )


def measure(problem: Problem, plan: Plan) -> Value:
    """Return the value of a plan by the problem's own metric.

    Raises:
        UnsupportedError: The metric is energy, and the power of a device is not known.
    """
    metric = problem.objective.metric
    if metric in OBJECTIVES:
        return OBJECTIVES[metric](problem, plan)
    if metric is Metric.LATENCY:
        return _latency_value(problem, plan)
    timeline = simulate(problem, plan, period=plan.stashes_weights)
    step_s = timeline.period_s if plan.stashes_weights else timeline.makespan_s
    if metric is Metric.ENERGY:
        joules = step_joules(problem, plan, timeline, step_s) / plan.samples
        return Value(metric=metric, value=joules, unit="J/sample", bottleneck=_bottleneck(timeline))
    return _step_value(timeline, step_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckReport(Columns):
    """What was proved: complete, free of deadlock, within memory.

    Attributes:
        devices: Names of the devices.
        num_instructions: Instructions of all devices.
        num_messages: Pairs of a SEND and its RECV.
        num_collectives: Collectives, each counted once for all its members.
        sent_bytes: Bytes of all messages.
        peak_bytes: Largest use of memory by device.
        limit_bytes: What each device may use.
    """

    devices: tuple[str, ...]
    num_instructions: int
    num_messages: int
    num_collectives: int
    sent_bytes: int
    peak_bytes: Floats
    limit_bytes: Floats

    @property
    def headroom_bytes(self) -> Floats:
        """Memory that each device has left at its peak."""
        return self.limit_bytes - self.peak_bytes


def check(problem: Problem, plan: Plan, program: Program | None = None) -> CheckReport:
    """Prove that a Program carries out a plan, and return what was found on the way.

    Args:
        problem: The problem.
        plan: A plan for it.
        program: The Program; ``None`` = what the plan lowers to.

    Raises:
        InvalidInputError: It does not; names the instruction at fault, its device, and why.
        InfeasibleError: A device has too little memory; which, by how much, and what would do.
    """
    plan.check_fits(problem)
    program = lower(problem, plan) if program is None else program
    proved = prove(problem, plan, program)
    peak, limit = _check_peaks(problem, plan, program)
    return CheckReport(devices=plan.devices, **proved._asdict(), peak_bytes=peak, limit_bytes=limit)


def _check_peaks(problem: Problem, plan: Plan, program: Program) -> tuple[Array, Array]:
    """Check the peak of every device against its limit, and return both.

    The limit is the device's memory times the objective's memory factor.

    Raises:
        InfeasibleError: A device needs more than it may use; says how much, where, and what
            would do.
    """
    cluster, factor = problem.cluster, problem.objective.memory_factor
    index = np.array([cluster.index_of[name] for name in plan.devices])
    limit = cluster.memory_bytes[index] * factor
    peak = peak_memory(problem, plan, program)
    over = peak - limit
    if not (over > 0).any():
        return peak, limit
    device = int(np.argmax(over))
    raise InfeasibleError(
        f"device {plan.devices[device]!r} needs {format_bytes(peak[device])} at "
        f"{_peak_place(problem, plan, program, device)}, {format_bytes(over[device])} above the "
        f"{format_bytes(limit[device])} it may use; recompute activations, make microbatches "
        "smaller, shard its stages over replicas, or move ops to a device with more room"
    )


def _peak_place(problem: Problem, plan: Plan, program: Program, device: int) -> str:
    """Return the instruction at which a device holds most."""
    events = memory_events(problem, plan, program)
    mine = np.flatnonzero(program.device[events.row] == device)
    row, at_end, delta = (part[mine] for part in events)
    order = np.lexsort((delta > 0, 2 * row + at_end))
    used = np.cumsum(delta[order])
    if not len(used) or used.max() <= 0:
        total = static_memory(problem, plan, program).total[device]
        return f"rest (weights, gradients, optimizer state and workspace are {format_bytes(total)})"
    return program.describe(int(row[order[np.argmax(used)]]))


def check_memory(problem: Problem, plan: Plan) -> None:
    """Check that a plan keeps within the memory of its devices.

    Raises:
        InfeasibleError: It does not; names the device, by how much, and what would do.
    """
    limit = problem.cluster.memory_bytes[cluster_devices(problem, plan.devices)]
    limit = limit * problem.objective.memory_factor
    if bool(np.isinf(limit).all()):
        return
    peak = peak_memory(problem, plan, lower(problem, plan))
    over = peak - limit
    worst = int(np.argmax(over))
    if over[worst] > 0:
        raise InfeasibleError(
            f"device {plan.devices[worst]!r} needs {format_bytes(peak[worst])} for "
            f"{_held_words(problem, plan, worst)}, {format_bytes(over[worst])} more than its limit "
            f"of {format_bytes(limit[worst])}; use more devices, smaller microbatches or "
            "recomputation"
        )


def _held_words(problem: Problem, plan: Plan, device: int) -> str:
    """Return the stages of a device and the op that takes the most memory there."""
    stages = [
        index
        for index, stage in enumerate(plan.stages)
        if any(device in group for group in stage.devices)
    ]
    graph = problem.graph
    held = np.where(
        np.isin(plan.stage_of, stages), graph.parameter_bytes + graph.ops.saved_bytes, -1.0
    )
    named = ", ".join(map(str, stages[:5])) + (", ..." if len(stages) > 5 else "")
    return (
        f"stage{'s' * (len(stages) > 1)} {named} (largest op "
        f"{graph.ops.names[int(np.argmax(held))]!r})"
    )


def _step_value(timeline: Timeline, step_s: float) -> Value:
    return Value(metric=Metric.THROUGHPUT, value=step_s, unit="s", bottleneck=_bottleneck(timeline))


def _latency_value(problem: Problem, plan: Plan) -> Value:
    """Return the time of one microbatch from input to output."""
    objective = replace(problem.objective, mode=Mode.INFERENCE, schedule=None, microbatches=1)
    stages = tuple(replace(stage, devices=stage.devices[:1], shares=()) for stage in plan.stages)
    one = replace(
        plan,
        stages=stages,
        schedule=Schedule.INFERENCE,
        microbatch_sizes=equal_microbatches(1, int(plan.microbatch_sizes[0])),
    )
    timeline = simulate(replace(problem, objective=objective), one)
    latency = timeline.makespan_s
    bottleneck = _bottleneck(timeline)
    return Value(metric=Metric.LATENCY, value=latency, unit="s", bottleneck=bottleneck)


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
    if training and plan.schedule is Schedule.ZERO_BUBBLE and split:
        result.append("the split of backward is not known: half for inputs, half for weights")
    if any(stage.tp > 1 for stage in plan.stage_index) and not len(graph.variants):
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
