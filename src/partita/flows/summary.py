"""The figures of a solution that tables, JSON and pages show, computed once."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.bounds import CLEARLY, bound
from partita.core.columns import number_or_none, thawed
from partita.core.graph import CostOrigin, Graph
from partita.core.plan import Plan, Shard
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.judge import Evaluation, evaluate
from partita.units import format_bytes

AS_USED = "as_used"
"""Note of an estimate whose arithmetic nobody named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A solution with all that the cost model says of it.

    Attributes:
        solution: The solution.
        evaluation: What the cost model says of its plan.
    """

    solution: Solution
    evaluation: Evaluation

    @property
    def overfull(self) -> str:
        """The device that needs more memory than it has by our model; empty where all fit."""
        return overfull(self.evaluation.timeline)

    @property
    def cuts_inside_blocks(self) -> str:
        """Cuts inside blocks that send more than those between blocks do; empty = none.

        A block's input and output are narrow; a cut inside sends what is wide.
        """
        graph, plan = self.solution.problem.graph, self.solution.plan
        block, source = graph.ops.blocks.of, graph.edge_source
        if not len(block):
            return ""
        inner = np.flatnonzero(source >= 0)
        maker, reader, tensor = source[inner], graph.edges.reader[inner], graph.edges.tensor[inner]
        within = (block[maker] == block[reader]) & (block[maker] >= 0)
        # What a block hands to the next is as narrow as a cut can be.
        narrow = graph.tensors.bytes[tensor[~within & (block[maker] >= 0)]].min(initial=np.inf)
        cut = within & (plan.stage_of[maker] != plan.stage_of[reader])
        wide = cut & (graph.tensors.bytes[tensor] > 1.5 * narrow)
        if not wide.any():
            return ""
        most = format_bytes(float(graph.tensors.bytes[tensor[wide]].max()))
        return f"cuts inside blocks send up to {most}, cuts between them {format_bytes(narrow)}"

    @property
    def bound_term(self) -> str:
        """What gives the lower bound, for people; empty where there is none."""
        solution = self.solution
        if solution.lower_bound <= 0:
            return ""
        known = bound(solution.problem)
        is_own = solution.lower_bound > max(known.value, 0.0) * CLEARLY
        return "proven by the planner" if is_own else known.term

    @property
    def utilisation(self) -> float:
        """Share of the step in which the devices that work at all are busy, on average."""
        timeline = self.evaluation.timeline
        working = timeline.utilisation[timeline.busy_s > 0]
        return float(working.mean()) if len(working) else 0.0

    @property
    def title(self) -> str:
        """The plan in a few words, such as ``"4 stages x 2, 1f1b"``."""
        return describe_plan(self.solution.plan)

    @property
    def value_line(self) -> str:
        """The value of the plan, and how far it may be from the best possible."""
        solution = self.solution
        words = f"{solution.value:.5g} {solution.unit} ({solution.metric.value})"
        if solution.lower_bound <= 0:
            return words
        return f"{words}, at most {100 * solution.gap:.1f} % above the best possible"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values under stable keys; unknown ones are null."""
        solution, evaluation = self.solution, self.evaluation
        timeline = evaluation.timeline
        devices = [
            {
                "device": name,
                "utilisation": float(timeline.utilisation[index]),
                "bubble": float(timeline.bubble[index]),
                "peak_bytes": float(timeline.peak_bytes[index]),
                "limit_bytes": number_or_none(float(timeline.limit_bytes[index])),
                "headroom_bytes": number_or_none(float(evaluation.headroom_bytes[index])),
                "memory": evaluation.memory.to_json(index),
            }
            for index, name in enumerate(timeline.devices)
        ]
        return {
            "planner": solution.planner,
            "options": thawed(solution.options),
            "plan": self.title,
            "metric": solution.metric.value,
            "value": solution.value,
            "unit": solution.unit,
            "lower_bound": solution.lower_bound,
            "bound_term": self.bound_term or None,
            "gap": number_or_none(solution.gap),
            "proof": solution.proof.value,
            "step_s": evaluation.step_s,
            "samples_per_s": number_or_none(evaluation.samples_per_s),
            "tokens_per_s": number_or_none(evaluation.tokens_per_s),
            "flop_utilisation": number_or_none(evaluation.flop_utilisation),
            "utilisation": self.utilisation,
            "bubble": 1.0 - self.utilisation,
            "price_per_step": number_or_none(evaluation.price_per_step),
            "bottleneck": evaluation.bottleneck,
            "assumptions": list(evaluation.assumptions),
            "estimated": estimate_basis(solution.problem.graph),
            "precision": getattr(solution.problem.objective.precision, "name", None),
            "memory_factor": solution.problem.objective.memory_factor,
            "overfull": self.overfull or None,
            "rules": [str(rule) for rule in solution.problem.rules],
            "objectives": {
                metric.value: number_or_none(value.value)
                for metric, value in evaluation.values.items()
            },
            "devices": devices,
        }


def overfull(timeline: Timeline) -> str:
    """Return which device of a step needs more memory than it has; empty where all fit."""
    headroom = timeline.limit_bytes - timeline.peak_bytes
    worst = int(headroom.argmin())
    if headroom[worst] >= 0:
        return ""
    need, limit = timeline.peak_bytes[worst], timeline.limit_bytes[worst]
    return (
        f"device {timeline.devices[worst]!r} needs {format_bytes(float(need))} of "
        f"{format_bytes(float(limit))}"
    )


def summarise(solution: Solution) -> Summary:
    """Return a solution with its evaluation."""
    return Summary(solution=solution, evaluation=evaluate(solution.problem, solution.plan))


def estimate_basis(graph: Graph) -> dict[str, Any] | None:
    """Return what the costs of a graph were computed for, as JSON values; None if measured.

    Keys are ``dtype`` of the weights (null without weights), ``arithmetic``, ``tokens_per_sample``
    (null where samples have none) and ``microbatch_size``.
    """
    costs, table = graph.costs[0], graph.parameters
    if costs.origin not in (CostOrigin.ESTIMATED, CostOrigin.GENERATED):
        return None
    held: dict[str, float] = {}
    for dtype, size in zip(table.dtypes, table.bytes.tolist(), strict=True):
        held[dtype] = held.get(dtype, 0.0) + size
    notes = graph.annotations.get("estimate", {}).get(costs.device_type, {})
    return {
        "dtype": max(held, key=lambda dtype: held[dtype]) if held else None,
        "arithmetic": notes.get("dtype", graph.dtype),
        "tokens_per_sample": graph.tokens_per_sample or None,
        "microbatch_size": graph.batch_size,
    }


def is_as_used(graph: Graph) -> bool:
    """Return whether the arithmetic of an estimate is what its devices are used with by default."""
    notes = graph.annotations.get("estimate", {}).get(graph.costs[0].device_type, {})
    return bool(notes.get(AS_USED, False))


def describe_plan(plan: Plan) -> str:
    """Return a plan in a few words."""
    replicas = sorted({stage.num_replicas for stage in plan.stage_index})
    used = len(
        {device for stage in plan.stage_index for group in stage.devices for device in group}
    )
    tp = max(stage.tp for stage in plan.stage_index)
    levels = {stage.shard for stage in plan.stage_index}
    level = levels.pop() if len(levels) == 1 else Shard.NONE
    end = f"{f', {level.value} sharded' * (level is not Shard.NONE)}, {plan.schedule.value}"
    visits = len(plan.stages) > used and plan.schedule.value != "interleaved-1f1b"
    if visits:
        return f"{len(plan.stages)} stages on {used} devices{end}"
    words = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    if replicas != [1] and len({stage.devices for stage in plan.stages}) == 1 < len(plan.stages):
        # All devices have all stages: the units in which they gather and reduce.
        words, end = f"1 stage in {len(plan.stages)} units", end.rpartition(", ")[0]
    if replicas != [1]:
        per_stage = [stage.num_replicas for stage in plan.stages]
        same = len(replicas) == 1
        words += f" x {replicas[0]}" if same else f" ({'-'.join(map(str, per_stage[:8]))})"
    if tp > 1:
        words += f", tensor-parallel {tp}"
    return f"{words}{end}"
