"""What a search for a pipeline knows: the rules, the devices, and the best so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.objectives.pipedream import why_no_servers, why_not_pipedream
from partita.objectives.placed import why_not_implicit_training
from partita.objectives.repaired import pipedream_repaired_time
from partita.planners.effort import Effort
from partita.planners.pipedream.build import StageOn, pipeline_of
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.model import Model
from partita.planners.pipedream.search import PRECISE, Best
from partita.planners.pipedream.site import Site

PATIENCE = 3
"""Times as many steps are made while nothing is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a pipeline may be, and what is charged for it.

    Attributes:
        straight: One device per stage.
        exact: Every device must be used.
        memory: Whether memory limits the search.
        charge: What a byte of a cut counts: one over the compression, or 0.
        factor: Factor of the all-reduce.
        weighted: Whether replicas of unequal devices take shares by their speed.
    """

    straight: bool = False
    exact: bool = False
    memory: bool = True
    charge: float = 1.0
    factor: float = 4.0
    weighted: bool = True


class Pipeline(NamedTuple):
    """A pipeline of some family, and its plan."""

    family: Family
    stages: tuple[StageOn, ...]
    plan: Plan


@dataclass(slots=True, kw_only=True)
class Search:
    """A search for the best pipeline of a problem.

    Attributes:
        problem: The problem.
        rules: What a pipeline may be.
        model: Its nodes.
        site: Its devices.
        best: The best pipeline so far, with its period.
        low: A period that no pipeline is below.
        term: The argument behind ``low``.
        exact: Whether the best is the best of all pipelines.
        effort: Its time limit, if any.
        most_steps: Steps of tests on rows of unequal devices after which to stop as well.
        spent: Steps made.
        ration: Steps after which to leave the rest to other ideals.
    """

    problem: Problem
    rules: Rules
    model: Model
    site: Site
    best: Best[Pipeline]
    low: float
    term: str
    exact: bool = False
    effort: Effort = field(default_factory=Effort)
    most_steps: float = math.inf
    spent: int = 0
    ration: float = math.inf

    def value_of(self, plan: Plan, otherwise: float) -> float:
        """Return the period of a plan as the cost model has it, or a number where it cannot say."""
        if not self._measurable:
            return otherwise
        compression = 1 / self.rules.charge if self.rules.charge else None
        return pipedream_repaired_time(
            self.problem, plan, allreduce_factor=self.rules.factor, compression=compression
        ).value

    @property
    def _measurable(self) -> bool:
        return why_not_implicit_training(self.problem) is None and (
            why_no_servers(self.problem) is None
        )

    @property
    def alike(self) -> bool:
        """Whether all devices are equally fast and large."""
        site = self.site
        return len(set(self.model.class_of[site.devices].tolist())) == 1 and bool(
            (site.memory_bytes == site.memory_bytes[0]).all()
        )

    @property
    def free(self) -> bool:
        """Whether any op may run on any device."""
        _, matrix = self.problem.allowed
        return bool(matrix[:, self.site.devices].all())

    @property
    def is_late(self) -> bool:
        """Whether something is found and time is over, or even more was done for nothing."""
        if self.best.found is None:
            return self.spent > PATIENCE * self.most_steps
        return self.spent > self.most_steps or self.effort.is_over()

    def offer(self, family: Family, stages: Sequence[StageOn], period: float) -> float:
        """Note a pipeline; return its value, ``inf`` where it cannot be a plan.

        Of two that are equally good, the one stays that needs fewer microbatches.
        """
        plan = pipeline_of(self.problem, self.model, family, stages)
        metric = self.problem.objective.metric
        if plan is None or (
            metric is Metric.PIPEDREAM and why_not_pipedream(self.problem, plan) is not None
        ):
            return math.inf
        value = self.value_of(plan, period)
        pipeline = Pipeline(family, tuple(stages), plan)
        known = self.best.found
        if not self.best.offer(value, pipeline) and (
            known is not None
            and value <= self.best.value * (1 + PRECISE)
            and plan.num_microbatches < known.plan.num_microbatches
        ):
            self.best.value, self.best.found = value, pipeline
        return value

    def limits(self, memory_bytes: Array) -> Array:
        """Return the memory that limits the search."""
        return memory_bytes if self.rules.memory else np.full(len(memory_bytes), math.inf)
