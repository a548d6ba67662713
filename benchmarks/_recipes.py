"""Recipes of training by plans against one process: groups, clipping, schedule, narrow types.

A script's trainer in four processes, twenty steps on new data each. In float64 its weights are
held against a loop of plain torch: AdamW with two groups of parameters, gradients clipped by their
norm over all of them, a cosine schedule after a warm-up. Under a policy of narrow types its losses
are held against those of a trainer of one process under the same policy.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import partita
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.precision import parse_precision
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard
from partita.runtime.job import Job
from partita.runtime.numerics import ready_numerics
from partita.runtime.training.parallelize import ScriptRank, being_rank
from partita.testing.builders import flat_cluster

STEPS, RATE, DECAY, CLIP, WARM_UP = 20, 3e-3, 0.1, 0.5, 4
ROUNDING = {"bf16-master": 2**-12, "fp16": 2**-14}
"""Largest difference of losses, relative: means over many products round to less than the last
place of one; weights that are not stepped differ by more."""
ROUNDING_OF_PARTS = {"bf16-master": 2**-9, "fp16": 2**-12}
"""The same where groups divide products: each rank rounds its part of a sum to the type, and so
does the sum, where one process rounds once. A quarter of the step between numbers at 1."""


def optimizer(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all recipes."""
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)


def scheduler(stepped: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule of all recipes: a warm-up, then a cosine."""

    def factor(step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))

    return torch.optim.lr_scheduler.LambdaLR(stepped, factor)


def trained(
    model: nn.Module, loss: Any, batches: Sequence[Any], precision: str | None, **more: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train as a script does; returns losses, and all weights on rank 0."""
    trainer = partita.parallelize(
        model,
        loss,
        optimizer=optimizer,
        groups=lambda _, parameter: parameter.dim() < 2,
        clip_norm=CLIP,
        scheduler=scheduler,
        precision=precision,
        **more,
    )
    losses = [float(trainer.step(batch)) for batch in batches]
    return losses, trainer.model_state()


def plain(
    model: nn.Module, loss: Any, batches: Sequence[Sequence[Any]], size: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train by a loop of plain torch, in parts of so many samples."""
    thin = [p for p in model.parameters() if p.dim() < 2]
    thick = [p for p in model.parameters() if p.dim() >= 2]
    stepped = optimizer([{"params": thick}, {"params": thin, "weight_decay": 0.0}])
    schedule, losses = scheduler(stepped), []
    for *inputs, labels in batches:
        stepped.zero_grad()
        total, count = 0.0, len(labels) // size
        for part in range(count):
            rows = slice(part * size, (part + 1) * size)
            value = loss(model(*(each[rows] for each in inputs)), labels[rows])
            (value / count).backward()
            total += float(value.detach()) / count
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepped.step()
        schedule.step()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def planned(
    name: str,
    model: nn.Module,
    example: Example,
    loss: Any,
    make_plan: Callable[[Graph], Plan],
    precision: str | None,
) -> Solution:
    """Return a plan for a model that was captured under a policy."""
    source = ModelSource(name=name, model=model, example=lambda *_: example, loss=loss)
    origin = ModelOrigin(text=name)
    numerics = ready_numerics(None if precision is None else parse_precision(precision), "cpu")
    captures = Captures(source, origin, lambda: numerics.autocast("cpu"))
    graph = origin.recorded_in(captures.at(example.batch_size).graph)
    plan = make_plan(graph)
    problem = Problem(graph=graph, cluster=flat_cluster(len(plan.devices)), objective=Objective())
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def in_ranks(solution: Solution, work: Callable[[], Any]) -> Any:
    """Do something in forked ranks of a plan; returns what rank 0 found."""
    world = len(solution.plan.devices)
    board, job = StatusBoard(world), Job(script=("script.py",), stall_limit_s=120)

    def main(member: Any, _: object) -> Any:
        torch.set_num_threads(1)
        with being_rank(ScriptRank(member=member, board=board, solution=solution, job=job)):
            return work()

    with RankPool(world, main, limit_s=120, board=board) as pool:
        return pool.call(None)[0]


def gaps(
    found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]
) -> tuple[float, float]:
    """Return the largest relative difference of losses, and of weights by their norms."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], wanted[0], strict=True))
    weights = max(
        float((found[1][n].double() - w.double()).norm() / w.double().norm().clamp(min=1e-6))
        for n, w in wanted[1].items()
        if w.is_floating_point()
    )
    return losses, weights


def show_recipes(
    subjects: dict[str, Any], plans: dict[str, Callable[[Graph], Plan]], missed: list[str]
) -> tuple[float, dict[str, float]]:
    """Run the recipes by the plans.

    Args:
        subjects: By name what builds a model in a type and makes its data (``Setup``).
        plans: Makers of plans with four microbatches.
        missed: Gets what misses its limit.

    Returns:
        The largest difference in float64, and that of losses by policy.
    """
    worst, narrow = 0.0, dict.fromkeys(ROUNDING, 0.0)
    for (name, make_setup), (kind, make_plan) in (
        (subject, plan) for subject in subjects.items() for plan in plans.items()
    ):
        cells = []
        for precision in (None, *ROUNDING):
            setup = make_setup(torch.float64 if precision is None else torch.float32)
            example, loss = setup.example(0), setup.subject.loss
            size = len(example.labels)
            batches = []
            for step in range(STEPS):
                one = setup.example(step, 4 * size)
                batches.append((*one.args, *one.kwargs.values(), one.labels))
            first = Example(
                args=(*example.args, *example.kwargs.values()),
                labels=example.labels,
                batch_size=size,
            )
            solution = planned(name, setup.model, first, loss, make_plan, precision)
            model = copy.deepcopy(setup.model)
            found = in_ranks(solution, lambda: trained(model, loss, batches, precision))  # noqa: B023
            if precision is None:
                wanted = plain(copy.deepcopy(setup.model), loss, batches, size)
                gap, limit = max(gaps(found, wanted)), 1e-9
                worst = max(worst, gap)
            else:
                alone = copy.deepcopy(setup.model)
                wanted = trained(alone, loss, batches, precision, microbatches=4)
                divides = any(stage.tp > 1 for stage in solution.plan.stages)
                limits = ROUNDING_OF_PARTS if divides else ROUNDING
                gap, limit = gaps(found, wanted)[0], limits[precision]
                narrow[precision] = max(narrow[precision], gap)
            cells.append(f"{precision or 'float64'} {gap:.1e}")
            if not gap <= limit:
                missed.append(f"{name}, {kind}, {precision or 'float64'}: {gap:.1e} in 20 steps")
        print(f"{name:8} {kind:24} " + "  ".join(cells), flush=True)
    return worst, narrow
