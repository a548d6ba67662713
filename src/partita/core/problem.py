"""The question to a planner: a graph, a cluster, and what counts as good."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import Cluster
from partita.core.columns import Displayed, Floats, Ints, frozen_array
from partita.core.graph import DTYPE_BYTES, Graph
from partita.core.metrics import Metric
from partita.core.precision import OPTIMIZERS, Precision
from partita.core.rules import Rule, allowed_places
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.errors import InvalidInputError
from partita.plugins import named

__all__ = ["DEFAULT_MICROBATCHES", "Metric", "Mode", "Objective", "Problem", "Schedule"]

DEFAULT_MICROBATCHES = 8
"""Microbatches in a step where nobody says how many."""


class Mode(StrEnum):
    """Use of the model: training or inference."""

    TRAINING = "training"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Measure of a good plan, and what is given. ``None`` leaves a choice to the planner.

    Attributes:
        metric: Metric to minimise.
        mode: Training or inference.
        microbatches: Microbatches in a step.
        microbatch_size: Samples in a microbatch; ``None`` = the graph's batch size.
        schedule: Pipeline schedule.
        memory_factor: Share of each device's memory that a plan may use, above 0 up to 1.
        optimizer_bytes_per_element: Optimizer state for an element of a trainable parameter:
            0 for SGD, 4 with momentum, 8 for Adam (``with_precision`` knows those of a policy).
        precision: Dtypes of weights, gradients, master copy, reductions and gathers; ``None`` =
            those of the graph's parameters, which the optimizer steps themselves.
    """

    metric: Metric = Metric.THROUGHPUT
    mode: Mode = Mode.TRAINING
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: Schedule | None = None
    memory_factor: float = 1.0
    optimizer_bytes_per_element: float = 8.0
    precision: Precision | None = None

    def __post_init__(self) -> None:
        for what in ("microbatches", "microbatch_size"):
            value = getattr(self, what)
            if value is not None and not 1 <= value <= 1_000_000:
                raise InvalidInputError(f"{what} is {value}; expected 1 to 1000000")
        if not 0 < self.memory_factor <= 1:
            raise InvalidInputError(
                f"memory_factor is {self.memory_factor}; expected above 0 and up to 1"
            )
        if not (
            self.optimizer_bytes_per_element >= 0
            and math.isfinite(self.optimizer_bytes_per_element)
        ):
            raise InvalidInputError(
                f"optimizer_bytes_per_element is {self.optimizer_bytes_per_element}; expected >= 0"
            )
        object.__setattr__(self, "metric", named(Metric, self.metric))
        if self.schedule is not None:
            object.__setattr__(self, "schedule", named(Schedule, self.schedule))
        infers = self.mode is Mode.INFERENCE
        if self.schedule is not None and infers != self.schedule.row.infers:
            raise InvalidInputError(
                f"schedule {self.schedule.value!r} is not one for {self.mode.value}"
            )

    def with_precision(
        self, precision: Precision | None, optimizer: str | None = None
    ) -> "Objective":
        """Return the objective under a policy of dtypes, with the state of an optimizer.

        ``None`` as the optimizer leaves it as it is: its numbers get the dtype of the policy.
        """
        if optimizer is not None:
            state = OPTIMIZERS[optimizer].state_bytes(precision)
        else:
            before, after = (
                DTYPE_BYTES[policy.state if policy else "float32"]
                for policy in (self.precision, precision)
            )
            state = self.optimizer_bytes_per_element * after / before
        return replace(self, precision=precision, optimizer_bytes_per_element=state)

    def usable_bytes(self, cluster: Cluster) -> Floats:
        """Return the memory of each device of a cluster that a plan may use."""
        usable: Floats = cluster.memory_bytes * self.memory_factor
        return usable

    @property
    def pipeline_schedule(self) -> Schedule:
        """The schedule of stages in a row: what was asked for, else 1F1B or plain inference."""
        return self._schedule_or(DEFAULT_SCHEDULE)

    @property
    def placement_schedule(self) -> Schedule:
        """The schedule of ops placed one by one: as asked for, else GPipe or plain inference.

        A placement may go back and forth between devices, which leaves 1F1B no order to keep.
        """
        return self._schedule_or(Schedule.GPIPE)

    def _schedule_or(self, training: Schedule) -> Schedule:
        if self.schedule is not None:
            return self.schedule
        return Schedule.INFERENCE if self.mode is Mode.INFERENCE else training


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem(Displayed):
    """A graph to spread over a cluster.

    Attributes:
        graph: The model.
        cluster: The machines.
        objective: Measure of a good plan.
        rules: Pins and bans of ops.
    """

    graph: Graph
    cluster: Cluster
    objective: Objective = Objective()
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        self._set(rules=tuple(self.rules))
        _ = self.allowed

    @cached_property
    def allowed(self) -> tuple[Ints, NDArray[np.bool_]]:
        """``(row_of_op, matrix)``: op i may run on device d iff ``matrix[row_of_op[i], d]``."""
        return allowed_places(self.graph, self.cluster, self.rules)

    @cached_property
    def limit_bytes(self) -> Floats:
        """Memory of each device of the cluster that a plan may use."""
        return frozen_array(self.objective.usable_bytes(self.cluster), np.float64)

    @property
    def microbatches(self) -> int:
        """Microbatches in a step: as asked, else 8, or 1 where the metric is about a single one."""
        single = self.objective.metric.row.one_microbatch
        return self.objective.microbatches or (1 if single else DEFAULT_MICROBATCHES)

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch: as asked, else the graph's batch size."""
        return self.objective.microbatch_size or self.graph.batch_size
