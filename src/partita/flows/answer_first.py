"""The answer before the tables: what bounds a step, by how much, and what to do about it."""

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.core.metrics import Metric
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.core.solution import Proof
from partita.flows.summary import Summary
from partita.program.layout import crossings, owners
from partita.units import format_bytes, format_seconds, format_share

_UNEVEN = 1.5
"""How many times as long as the others a stage computes before that is worth a word."""
_WORTH = 0.02
"""Share of the step that a change has to gain."""
_PROVEN = 0.0005
"""Gap to the bound that is shown as nothing."""
_GAP = 0.2
"""Gap to the bound from which a longer search is worth a try."""


def what_bounds(summary: Summary) -> list[str]:
    """Return what bounds the step and what stands out in the plan, a sentence each."""
    timeline = summary.evaluation.timeline
    step_s = timeline.makespan_s
    busiest = int(np.argmax(timeline.busy_s))
    busy_s = float(timeline.busy_s[busiest])
    shares = {"computes": busy_s, "communicates": float(timeline.exposed_s[busiest])}
    shares["waits for others"] = max(0.0, step_s - sum(shares.values()))
    most = max(shares, key=lambda what: shares[what])
    name = timeline.devices[busiest]
    words = ", ".join(f"{what} {format_share(each / step_s)}" for what, each in shares.items())
    solution, above = summary.solution, ""
    # Other metrics have bounds of their own, in other units.
    if solution.lower_bound > 0 and solution.metric is Metric.THROUGHPUT:
        less = 1 - solution.lower_bound / step_s
        above = (
            f"; no plan can beat {format_seconds(solution.lower_bound)}, {format_share(less)} less"
        )
        if solution.proof is Proof.OPTIMAL or less < _PROVEN:
            above = "; no plan can be faster"
    cause = {
        "computes": f"compute on {name} bounds the step",
        "communicates": f"communication of {name} bounds the step",
        "waits for others": "waiting for one another bounds the step",
    }[most]
    first = f"{cause}: of {format_seconds(step_s)} the busiest device {words}{above}"
    return [first, *_communication(summary), *_uneven(summary)]


def _communication(summary: Summary) -> list[str]:
    """Return what the critical path waits for most on the links, and of which tensor."""
    timeline, problem = summary.evaluation.timeline, summary.solution.problem
    path = timeline.critical_path
    path = path[timeline.kind[path] > LAST_COMPUTE]
    sums: dict[tuple[int, int], float] = {}
    for row in path.tolist():
        # A message is sent by one row and received by another.
        kind = int(
            min(timeline.kind[row], Kind.SEND)
            if timeline.kind[row] == Kind.RECV
            else timeline.kind[row]
        )
        what = (kind, int(timeline.stage[row]))
        sums[what] = sums.get(what, 0.0) + float(timeline.end_s[row] - timeline.start_s[row])
    if not sums:
        return []
    (kind, stage), seconds = max(sums.items(), key=lambda each: each[1])
    if seconds < _WORTH * timeline.makespan_s:
        return []
    graph, plan = problem.graph, summary.solution.plan
    share = f"{format_seconds(seconds)} of the critical path"
    if kind >= FIRST_COLLECTIVE:
        word = Kind(kind).name.lower().replace("_", "-")
        parameter, owner = owners(graph, plan)
        held = parameter[owner == stage]
        if kind == Kind.ALL_TO_ALL or not len(held):
            return [f"{word} of stage {stage} takes {share}"]
        sizes = graph.parameters.bytes[held]
        largest = graph.parameters.names[int(held[int(sizes.argmax())])]
        return [
            f"{word} of stage {stage}'s {len(held)} parameters ({format_bytes(float(sizes.sum()))}"
            f"; the largest is {largest}, {format_bytes(float(sizes.max()))}) takes {share}"
        ]
    crossing = crossings(graph, plan)
    here = np.flatnonzero((crossing.producer == stage) | (crossing.reader == stage))
    if not len(here):
        return [f"messages of stage {stage} take {share}"]
    tensors = crossing.tensor[here]
    samples = np.array(float(plan.microbatch_sizes.max()))
    sizes = graph.tensors.bytes_at(samples, graph.batch_size, tensors)
    most = int(np.argmax(sizes))
    op = graph.ops.names[int(graph.tensors.producer[tensors[most]])]
    return [
        f"messages of stage {stage} take {share}; the largest tensor is what {op} makes, "
        f"{format_bytes(float(sizes[most]))}"
    ]


def _uneven(summary: Summary) -> list[str]:
    """Return which stage takes much longer than others, and how many devices do nothing."""
    plan, timeline = summary.solution.plan, summary.evaluation.timeline
    found = []
    loads = np.array(
        [
            max(
                float(timeline.busy_s[timeline.devices.index(plan.devices[device])])
                for group in stage.devices
                for device in group
            )
            for stage in plan.stages
        ]
    )
    if len(loads) > 1:
        slowest = int(loads.argmax())
        others = float(np.median(np.delete(loads, slowest)))
        if others > 0 and loads[slowest] >= _UNEVEN * others:
            found.append(
                f"stage {slowest} is busy {loads[slowest] / others:.1f} times as long as the others"
            )
    there = len(summary.solution.problem.cluster.devices)
    idle = there - len({d for stage in plan.stages for group in stage.devices for d in group})
    if idle > 0:
        replicas = max(stage.num_replicas for stage in plan.stages)
        why = ""
        if plan.num_microbatches <= replicas:
            why = f": {plan.num_microbatches} microbatches feed at most as many replicas"
        found.append(f"{idle} of {there} devices have nothing to do{why}")
    return found


def what_to_do(summary: Summary, plan_file: str, answers: Sequence[Any]) -> list[str]:
    """Return the changes that pay, as commands, the best first.

    Args:
        summary: The plan.
        plan_file: File that the plan was read from; empty = none.
        answers: What-ifs that were tried.
    """
    found = []
    paying = [each for each in answers if each.relative <= -_WORTH]
    for each in sorted(paying, key=lambda each: float(each.relative)):
        how = command_of(each.change, plan_file, summary)
        found.append(f"{how} reaches {gain_of(each)}: {each.note}")
    solution = summary.solution
    bound = solution.lower_bound
    if solution.proof is not Proof.OPTIMAL and bound and solution.planner == "auto":
        gap = solution.value / bound - 1 if solution.value > 0 else 0.0
        if gap > _GAP:
            command = command_of("time-limit", plan_file, summary)
            found.append(f"the gap to the bound is {format_share(gap)}: {command} searches longer")
    return found


def gain_of(answer: Any) -> str:  # noqa: ANN401 (a WhatIf, which is declared above this module)
    """Return what a change reaches: seconds of a step, and how much less that is per sample."""
    change = format_share(answer.relative, sign=True)
    each = " per sample" if answer.more_samples else ""
    return f"{format_seconds(answer.value)} ({change}{each})"


def command_of(change: str, plan_file: str, summary: Summary) -> str:
    """Return how a change is made: a command where there is one."""
    source = shlex.quote(plan_file) if plan_file else summary.solution.problem.graph.name
    name, _, value = change.partition("=")
    if name == "microbatches":
        factor = float(value.rstrip("x"))
        count = round(summary.solution.plan.num_microbatches * factor)
        return f"partita plan {source} --microbatches {count}"
    if name == "schedule":
        return f"partita plan {source} --schedule {value}"
    if name == "replan":
        return f"partita plan {source}"
    if name == "time-limit":
        return f"partita plan {source} --time-limit 20"
    return f"partita plan {source} --what-if {shlex.quote(change)}"
