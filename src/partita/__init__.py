"""Partita: plan neural networks over mixed devices, and see what becomes of the plan.

Public names are imported on first use, so that ``import partita`` stays light and never imports
torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "Cluster": "partita.core.cluster",
    "Graph": "partita.core.graph",
    "Objective": "partita.core.problem",
    "Plan": "partita.core.plan",
    "Problem": "partita.core.problem",
    "Program": "partita.core.program",
    "Solution": "partita.core.solution",
    "Stage": "partita.core.plan",
    "Timeline": "partita.core.timeline",
    "calibrate": "partita.flows.calibrate",
    "check": "partita.cost.proof",
    "compare": "partita.flows.compare",
    "convert": "partita.flows.convert",
    "demo": "partita.flows.demo",
    "doctor": "partita.flows.doctor",
    "estimate": "partita.flows.estimate",
    "evaluate": "partita.cost.judge",
    "explain": "partita.flows.explain",
    "export": "partita.flows.export",
    "fleet_curve": "partita.flows.fleet.curve",
    "fleet_trace": "partita.flows.fleet.trace",
    "frontier": "partita.flows.energy",
    "list_models": "partita.flows.models",
    "load": "partita.documents",
    "lower": "partita.program.lower",
    "parallelize": "partita.runtime.parallelize",
    "plan": "partita.flows.plan",
    "problem": "partita.flows.problem",
    "profile": "partita.flows.profile",
    "profile_model": "partita.profiler.measure.model",
    "results": "partita.flows.past_runs",
    "robustness": "partita.flows.robustness",
    "run": "partita.flows.train",
    "run_plan": "partita.flows.train",
    "save": "partita.documents",
    "simulate": "partita.flows.simulate",
    "simulate_fleet": "partita.flows.fleet.simulate",
    "solve": "partita.planners.table",
    "train": "partita.flows.train",
}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (names are strings of the table)


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a module attribute may be anything)
    """Import the home of a public name when it is first asked for."""
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'partita' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
