"""Equal shapes: every device used alike, in pipelines of equal layers and in data parallelism.

They are quick to make and easy to run: ``partita estimate`` tabulates them, and the search of
``auto`` starts from them, too, so that its answer is never behind them.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError
from partita.planners.auto.frame import Batch, batch_choices
from partita.planners.pipeline import cut_layers, layer_of_ops, legal_boundaries, main_devices
from partita.planners.uniform import uniform_boundaries

_CUTS = (1, 2, 4, 8, 16)
"""Parts in which a stage may gather sharded parameters, besides its layers one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A way to use all devices.

    Attributes:
        stages: Stages of the pipeline; fewer where equal numbers of layers give fewer.
        replicas: Replicas of each stage.
        shard: What the replicas divide.
        words: A plan of another kind in a few words; empty where the figures say all.
    """

    stages: int
    replicas: int
    shard: Shard = Shard.NONE
    words: str = ""

    @property
    def title(self) -> str:
        """The shape for people."""
        if self.words:
            return self.words
        words = f"{self.stages} stages" if self.stages > 1 else ""
        if self.replicas > 1:
            copies = f"{self.replicas} replicas"
            words = f"{words} x {copies}" if words else f"data parallel, {copies}"
        if self.shard is not Shard.NONE:
            words += f", {self.shard.value} sharded"
        return words or "one device"


def shapes(problem: Problem, shard: Shard = Shard.NONE) -> list[Shape]:
    """Return the ways to use all devices that are tried.

    Pipelines of every number of stages that divides the devices, replicated to use all of them.
    In training also data parallelism over all devices at each level of sharding.

    Args:
        problem: The problem.
        shard: What replicas divide at least.
    """
    count = len(main_devices(problem))
    _, layers = layer_of_ops(problem.graph)
    sizes = [size for size in range(1, min(count, layers) + 1) if count % size == 0]
    infers = problem.objective.mode is Mode.INFERENCE
    found = [
        Shape(
            stages=size,
            replicas=count // size,
            shard=shard if count > size and not infers else Shard.NONE,
        )
        for size in sizes
    ]
    if count > 1 and not infers:
        levels = list(Shard)
        more = levels[levels.index(shard) + 1 :]
        found += [Shape(stages=1, replicas=count, shard=level) for level in more]
    return found


def dealt(problem: Problem, replicas: int) -> Batch:
    """Return how a step is split so that replicas get equal shares: as usual where that does it.

    Raises:
        InvalidInputError: No split that the problem leaves free does it.
    """
    fitting = (batch for batch in batch_choices(problem) if batch.count % replicas == 0)
    found = next(fitting, None)
    if found is None:
        count, size = problem.microbatches, problem.microbatch_size
        is_free = len(batch_choices(problem)) > 1
        what = f"{count * size} samples" if is_free else f"{count} microbatches"
        raise InvalidInputError(f"{what} cannot be dealt to {replicas} replicas")
    return found


def plans_of(problem: Problem, shape: Shape) -> list[Plan]:
    """Return the plans of a shape: one, or where parameters are sharded one for each way to cut.

    Raises:
        InvalidInputError: The microbatches cannot be dealt to the replicas.
    """
    batch = dealt(problem, shape.replicas)
    coarse = uniform_boundaries(problem.graph, shape.stages)
    cuts = {tuple(coarse)}
    if shape.shard is Shard.PARAMETERS:
        _, layers = layer_of_ops(problem.graph)
        rounds, stages = batch.count // shape.replicas, len(coarse) - 1
        counts = [layers] if rounds == 1 else [stages * cut for cut in _CUTS] + [layers]
        for count in counts:
            finer = {*coarse, *uniform_boundaries(problem.graph, min(count, layers))}
            cuts.add(tuple(legal_boundaries(problem.graph, sorted(finer))))
    return [_plan(problem, shape, batch, (coarse, list(cut))) for cut in sorted(cuts)]


def equal_plans(problem: Problem) -> list[Plan]:
    """Return the plans of all shapes whose replicas can be dealt equal shares."""
    found: list[Plan] = []
    for shape in shapes(problem):
        try:
            found += plans_of(problem, shape)
        except InvalidInputError:
            continue
    return found


def _plan(problem: Problem, shape: Shape, batch: Batch, cuts: tuple[list[int], list[int]]) -> Plan:
    """Return the plan that cuts at boundaries; parts of one coarse stage share its devices."""
    coarse, boundaries = cuts
    devices = main_devices(problem)
    names = problem.cluster.device_names
    home = np.searchsorted(coarse, boundaries[:-1], side="right") - 1
    stages = tuple(
        Stage(
            devices=tuple((int(stage) * shape.replicas + r,) for r in range(shape.replicas)),
            shard=shape.shard,
        )
        for stage in home
    )
    used = (len(coarse) - 1) * shape.replicas
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=tuple(names[device] for device in devices[:used]),
        stage_of=cut_layers(problem.graph, boundaries),
        stages=stages,
        schedule=problem.objective.pipeline_schedule,
        microbatch_sizes=equal_microbatches(batch.count, batch.size),
    )
