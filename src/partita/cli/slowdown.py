"""The option ``--slowdown`` of planning with energy."""

import click

from partita.core.problem import Metric, Problem

DEFAULT_SLOWDOWN = 0.02


def read_slowdown(problem: Problem, given: float | None) -> float | None:
    """Return how much slower than the fastest plan a step may be; None where energy is no aim.

    Raises:
        UsageError: A slowdown was given for another metric.
    """
    if problem.objective.metric is Metric.ENERGY:
        return DEFAULT_SLOWDOWN if given is None else given
    if given is not None:
        raise click.UsageError("--slowdown needs --objective energy")
    return None
