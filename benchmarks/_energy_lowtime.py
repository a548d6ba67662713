"""PyPI's lowtime on a pipeline's profile, as its own Perseus example calls it.

Blocking power is taken off each option's energy (over quantised time), the cost model is the best
exponential of its grid search, the schedule is its Synchronous1F1B. Only the CPU seconds of its
solver count: not the fits, not the graph, not our notes of the clocks.
"""

import logging
import time
import warnings
from itertools import pairwise
from typing import Any, NamedTuple

import networkx as nx
from lowtime.cost_model import ExponentialModel
from lowtime.operation import (
    CandidateExecutionOptions,
    DummyOperation,
    ExecutionOption,
    OperationSpec,
)
from lowtime.perseus.instruction import Backward, Forward
from lowtime.perseus.schedule import Synchronous1F1B
from lowtime.solver import PhillipsDessouky

from partita.core.energy import EnergyProfile
from partita.core.program import Kind

KINDS = {Forward: Kind.FORWARD, Backward: Kind.BACKWARD}
FEW_OPTIONS, FORGIVING = 3, 0.95


class LowtimePoint(NamedTuple):
    """One step of lowtime: the clocks of (stage, kind, microbatch), and its solver's CPU so far."""

    claimed_s: float
    cpu_s: float
    clocks: dict[tuple[int, Kind, int], int]


class LowtimeRun(NamedTuple):
    """A sweep, whole or stopped at a limit of CPU seconds.

    Attributes:
        points: Its points that were kept, from slow to fast.
        steps: Points that it went through.
        steps_in_all: Points from the slowest to the fastest; those it has when it is done.
        cpu_s: CPU seconds of its solver for ``steps``.
        last_step_s: Mean CPU seconds of the last tenth of them.
        done: Whether it came to its end.
    """

    points: list[LowtimePoint]
    steps: int
    steps_in_all: int
    cpu_s: float
    last_step_s: float
    done: bool

    @property
    def whole_cpu_s(self) -> float:
        """CPU seconds of the whole sweep: steps that were not run cost what the last ones did.

        Later steps cost more than earlier ones (more of the graph becomes critical), so that this
        is on lowtime's side.
        """
        return self.cpu_s + (self.steps_in_all - self.steps) * self.last_step_s


def run_lowtime(
    profile: EnergyProfile,
    microbatches: int,
    *,
    unit_s: float,
    cpu_limit_s: float,
    keep: int = 40,
) -> LowtimeRun:
    """Return lowtime's sweep over a 1F1B pipeline of a profile's stages.

    Args:
        profile: Seconds and joules by clock; one blocking power.
        microbatches: Microbatches of a step.
        unit_s: Its unit of time.
        cpu_limit_s: Stop the solver after that many CPU seconds.
        keep: About how many points to keep with their clocks, evenly spread, and the last.
    """
    logging.getLogger("lowtime").setLevel(logging.ERROR)
    graph, instructions = _graph(profile, microbatches, unit_s)
    fastest = _longest(graph, fastest=True)
    slowest = _longest(graph, fastest=False)
    every = max(1, (slowest - fastest) // keep)
    points: list[LowtimePoint] = []
    spent: list[float] = []
    total = 0.0
    sweep = PhillipsDessouky(graph).run()
    done = False
    latest = None
    while total < cpu_limit_s:
        begin = time.process_time()
        step = next(sweep, None)
        spent.append(time.process_time() - begin)
        total += spent[-1]
        if step is None:
            done = True
            spent.pop()
            break
        latest = step.real_time
        if len(spent) % every == 0:
            points.append(_noted(latest, total, instructions))
    if latest is not None and (not points or points[-1].claimed_s != latest):
        points.append(_noted(latest, total, instructions))
    tail = spent[-max(1, len(spent) // 10) :]
    return LowtimeRun(
        points=points,
        steps=len(spent),
        steps_in_all=len(spent) if done else max(len(spent), slowest - fastest),
        cpu_s=total,
        last_step_s=sum(tail) / len(tail),
        done=done,
    )


def _noted(claimed_s: float, cpu_s: float, instructions: list[Any]) -> LowtimePoint:
    clocks = {
        (op.stage_id, KINDS[type(op)], op.micro_batch_id): op.assigned_knob for op in instructions
    }
    return LowtimePoint(claimed_s, cpu_s, clocks)


def _graph(
    profile: EnergyProfile, microbatches: int, unit_s: float
) -> tuple[nx.DiGraph, list[Any]]:
    """Return lowtime's graph and its instructions."""
    stages = profile.num_stages
    graph = nx.DiGraph()
    graph.add_node(0, op=DummyOperation())
    graph.add_node(1, op=DummyOperation())
    graph.graph |= {"source_node": 0, "sink_node": 1}
    number: dict[tuple[int, type, int], int] = {}
    instructions = []
    for stage in range(stages):
        specs = {made: _spec(profile, stage, kind, unit_s) for made, kind in KINDS.items()}
        chain = []
        for op in Synchronous1F1B(stages, microbatches, stage, specs):
            node = len(graph)
            graph.add_node(node, op=op)
            number[stage, type(op), op.micro_batch_id] = node
            instructions.append(op)
            chain.append(node)
        graph.add_edges_from(pairwise([0, *chain, 1]))
    for (stage, made, microbatch), node in number.items():
        if stage + 1 < stages:
            other = number[stage + 1, made, microbatch]
            graph.add_edge(*((node, other) if made is Forward else (other, node)))
    return graph, instructions


def _spec(profile: EnergyProfile, stage: int, kind: Kind, unit_s: float) -> OperationSpec:
    rows = profile.rows_of(stage, int(kind), "")
    power = profile.blocking_power_w("")
    options = [
        ExecutionOption(
            real_time=float(profile.seconds[row]),
            unit_time=unit_s,
            cost=float(profile.joules[row]) - power * int(profile.seconds[row] // unit_s) * unit_s,
            knob=round(float(profile.clock_mhz[row])),
        )
        for row in rows
    ]
    candidates = CandidateExecutionOptions(options)
    if len(candidates.options) <= FEW_OPTIONS:
        candidates = CandidateExecutionOptions(options, noise_factor=FORGIVING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its grid of first guesses overflows here and there
        return OperationSpec(candidates, ExponentialModel(candidates, search_strategy="best"))


def _longest(graph: nx.DiGraph, *, fastest: bool) -> int:
    """Return lowtime's units of time with all instructions at their fastest, or slowest."""
    end: dict[int, int] = {}
    for node in nx.topological_sort(graph):
        op = graph.nodes[node]["op"]
        own = 0 if op.is_dummy else (op.min_duration if fastest else op.max_duration)
        end[node] = own + max((end[before] for before in graph.predecessors(node)), default=0)
    return max(end.values())
