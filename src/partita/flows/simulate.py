"""A plan played on its cluster, from idle or disturbed: what ``partita.simulate`` does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from partita.core.codec import encode
from partita.core.columns import number_or_none
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import TransferMode
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost import predict
from partita.cost.memory import MemoryBreakdown, memory_breakdown
from partita.cost.predict import Disturbance
from partita.cost.proof import CheckReport, check
from partita.documents import load
from partita.errors import FormatError, InvalidInputError
from partita.flows.fields import PlanSource
from partita.flows.results import Result
from partita.flows.solutions import SolutionRequest, read_solution, run_files
from partita.flows.summary import describe_plan
from partita.program.lower import lower
from partita.requests import OnProgress, declare, make, silent
from partita.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(SolutionRequest):
    """A saved plan, and what makes its step differ from the ideal one."""

    slow: tuple[str, ...] = declare(
        (), help="Straggler, DEVICE=FACTOR: its compute takes FACTOR times as long; several times."
    )
    perturb: float = declare(0.0, help="Multiply each time by uniform(1 - P, 1 + P).")
    seed: int = declare(0, help="Seed of the perturbation.")
    transfers: str = declare(
        TransferMode.OVERLAPPED.value,
        choices=[mode.value for mode in TransferMode],
        help="Let messages travel beside compute, or hold both devices.",
    )
    period: bool = declare(False, help="Find the steady period of steps, too.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Simulation(Result):
    """A plan that was played.

    Attributes:
        solution: The plan with its problem.
        timeline: What every device did when.
        transfers: How messages travelled.
        report: What the checker proved of the plan's Program.
        memory: Where the memory of each device goes at its peak.
    """

    solution: Solution
    timeline: Timeline
    transfers: TransferMode
    report: CheckReport
    memory: MemoryBreakdown

    @property
    def title(self) -> str:
        """What a picture of it shows: model, plan and cluster."""
        problem = self.solution.problem
        plan = describe_plan(self.solution.plan)
        return f"{problem.graph.name} on {problem.cluster.name} · {plan}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; the timeline is a document of its own."""
        timeline, problem = self.timeline, self.solution.problem
        return {
            "model": problem.graph.name,
            "plan": describe_plan(self.solution.plan),
            "origin": timeline.origin.value,
            "transfers": self.transfers.value,
            "makespan_s": timeline.makespan_s,
            "period_s": number_or_none(timeline.period_s),
            "instructions": len(timeline),
            "devices": self.rows(),
            "critical_path": timeline.critical_path.tolist(),
            "objective": encode(problem.objective),
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return how busy each device is, and how full."""
        timeline = self.timeline
        return [
            {
                "device": name,
                "busy_s": float(timeline.busy_s[index]),
                "utilisation": float(timeline.utilisation[index]),
                "bubble": float(timeline.bubble[index]),
                "peak_bytes": float(timeline.peak_bytes[index]) if timeline.has_memory else None,
                "limit_bytes": number_or_none(float(timeline.limit_bytes[index])),
                "memory": self.memory.to_json(index),
            }
            for index, name in enumerate(timeline.devices)
        ]

    def document(self) -> object:
        """Return the step, which a notebook draws."""
        return self.timeline

    def lines(self) -> list[str]:
        """Return the time of a step in two lines."""
        return [
            f"{self.solution.problem.graph.name}: {describe_plan(self.solution.plan)}, "
            f"{self.timeline.origin.value}",
            self.step_words,
        ]

    @property
    def step_words(self) -> str:
        """The time of a step, from idle and in steady state, for people."""
        words = f"step {format_seconds(self.timeline.makespan_s)} from idle"
        if np.isfinite(self.timeline.period_s):
            words += f", {format_seconds(self.timeline.period_s)} in steady state"
        return words


@overload
def simulate(
    problem: Problem,
    plan: Plan,
    /,
    **options: Any,  # noqa: ANN401 (of cost.predict)
) -> Timeline: ...


@overload
def simulate(
    plan: PlanSource,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of SimulateRequest)
) -> Simulation: ...


def simulate(
    source: Problem | PlanSource,
    plan: Plan | None = None,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,
) -> Timeline | Simulation:
    """Play a plan on its cluster.

    Args:
        source: What :func:`partita.plan` returned, a solution, or the path of a file; or a problem,
            with a plan for it, of which the bare timeline is returned.
        plan: The plan, where a problem was given.
        on_progress: Called with the name of the model.
        **options: The fields of :class:`SimulateRequest`, which are the options of ``partita
            simulate``; with a problem and a plan the keywords of
            :func:`partita.cost.predict.simulate`.

    Raises:
        InvalidInputError: There is no such plan, device or option.
    """
    if isinstance(source, Problem):
        if plan is None:
            raise InvalidInputError("a problem is simulated with a plan for it; make one first")
        return predict.simulate(source, plan, **options)
    return simulate_request(make(SimulateRequest, plan=source, **options), on_progress)


def simulate_request(request: SimulateRequest, on_progress: OnProgress = silent) -> Simulation:
    """Simulate what a request asks for; see :func:`simulate`."""
    found = run_files(request.plan)
    if found is not None:
        request = replace(request, plan=found[0])
    solution = read_solution(request)
    measured = None if found is None else _measured(found[1], solution, request)
    disturbance = Disturbance(
        slow=_factors(request.slow), perturb=request.perturb, seed=request.seed
    )
    on_progress(solution.problem.graph.name)
    transfers = TransferMode(request.transfers)
    program = lower(solution.problem, solution.plan)
    return Simulation(
        solution=solution,
        report=check(solution.problem, solution.plan, program),
        memory=memory_breakdown(solution.problem, solution.plan, program),
        timeline=measured
        or predict.simulate(
            solution.problem,
            solution.plan,
            program=program,
            disturbance=disturbance,
            transfers=transfers,
            period=request.period or solution.plan.stashes_weights,
        ),
        transfers=transfers,
    )


def _measured(path: str | None, solution: Solution, request: SimulateRequest) -> Timeline | None:
    """Return the step that a run has measured; None where it left none, or another is asked for.

    Raises:
        FormatError: The file holds no timeline of the plan's devices.
    """
    if path is None or request.given().keys() - {"plan", "graph"}:
        return None
    timeline = load(path)
    if not isinstance(timeline, Timeline) or timeline.devices != solution.plan.devices:
        raise FormatError("expected a timeline of the devices of the run's plan", path=path)
    return timeline


def _factors(pairs: tuple[str, ...]) -> dict[str, float]:
    result = {}
    for pair in pairs:
        name, sign, factor = pair.rpartition("=")
        try:
            if not sign:
                raise ValueError
            result[name] = float(factor)
        except ValueError:
            raise InvalidInputError(f"--slow {pair!r} is not of the form DEVICE=FACTOR") from None
    return result
