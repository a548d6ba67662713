"""Partita: plan neural networks over mixed devices, and see what becomes of the plan.

Public names are imported on first use, so that ``import partita`` stays light and never imports
torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    "Cluster": "partita.core.cluster",
    "Example": "partita.capture.setting",
    "Graph": "partita.core.graph",
    "Objective": "partita.core.problem",
    "Plan": "partita.core.plan",
    "Problem": "partita.core.problem",
    "Program": "partita.core.program",
    "Solution": "partita.core.solution",
    "Stage": "partita.core.plan",
    "Timeline": "partita.core.timeline",
    "advise": "partita.flows.advise",
    "calibrate": "partita.flows.calibrate",
    "cancel_jobs": "partita.flows.fleet.live",
    "check": "partita.cost.proof",
    "choose_clocks": "partita.flows.energy.choose",
    "compare": "partita.flows.compare",
    "compare_energy": "partita.flows.energy.compare",
    "convert": "partita.flows.convert",
    "convert_checkpoint": "partita.flows.checkpoint",
    "demo": "partita.flows.demo",
    "doctor": "partita.flows.doctor",
    "drain_fleet": "partita.flows.fleet.live",
    "estimate": "partita.flows.estimate",
    "evaluate": "partita.cost.judge",
    "explain": "partita.flows.explain",
    "export": "partita.flows.export",
    "fleet_doctor": "partita.flows.fleet.doctor",
    "fleet_curve": "partita.flows.fleet.curve",
    "fleet_trace": "partita.flows.fleet.trace",
    "frontier": "partita.flows.energy.frontier",
    "job_log": "partita.flows.fleet.live",
    "job_status": "partita.flows.fleet.live",
    "list_checkpoints": "partita.flows.checkpoint",
    "list_devices": "partita.flows.devices",
    "list_jobs": "partita.flows.fleet.live",
    "list_models": "partita.flows.models",
    "load": "partita.documents",
    "lower": "partita.program.lower",
    "merge_profiles": "partita.flows.profile",
    "parallelize": "partita.runtime.training.parallelize",
    "plan": "partita.flows.plan",
    "problem": "partita.flows.problem",
    "profile": "partita.flows.profile",
    "profile_energy": "partita.flows.energy.profile",
    "profile_model": "partita.profiler.measure.model",
    "profile_script": "partita.flows.fleet.profile",
    "profile_scripts": "partita.flows.fleet.profile",
    "recommend": "partita.flows.recommend",
    "replan": "partita.flows.replan",
    "replay_clocks": "partita.flows.energy.replay",
    "results": "partita.flows.runs.past",
    "robustness": "partita.flows.robustness",
    "run": "partita.flows.train",
    "run_plan": "partita.flows.train",
    "save": "partita.documents",
    "selftest": "partita.flows.selftest",
    "serve_energy": "partita.service.energy.serve",
    "serve_fleet": "partita.service.fleet.serve",
    "serve_page": "partita.service.ui.serve",
    "simulate": "partita.flows.simulate",
    "simulate_fleet": "partita.flows.fleet.simulate",
    "solve": "partita.planners.table",
    "split": "partita.runtime.split",
    "submit_jobs": "partita.flows.fleet.live",
    "train": "partita.flows.train",
    "write_report": "partita.flows.report",
}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (names are strings of the table)


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a module attribute may be anything)
    """Import the home of a public name when it is first asked for."""
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'partita' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
