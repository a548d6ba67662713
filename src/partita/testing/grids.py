"""Random grids that a trainer can run, and broken ones that it cannot."""

import random
from collections.abc import Iterator
from dataclasses import replace

from partita.core.grid import Grid, block_chain, complete_grid, is_tied, plan_of_grid, unit_cuts
from partita.core.plan import Shard, Stage
from partita.core.problem import Problem
from partita.core.schedules import Schedule
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.trainers.rules import Trainer


def random_grids(
    rng: random.Random, problem: Problem, trainer: Trainer | None = None
) -> Iterator[Grid]:
    """Yield grids of a problem without end: of all shapes, or those that a trainer can run.

    Samples of a step are those of the problem, so that a configuration without a batch is enough.
    """
    chain = block_chain(problem.graph)
    blocks, devices = len(chain.names), len(problem.cluster)
    batch = problem.microbatches * problem.microbatch_size
    tied = is_tied(problem.graph, chain)
    while True:
        tp, cp = rng.choice([1, 1, 2]), 1
        pp = rng.choice([1, 2, 4])
        dp = rng.choice([1, 2, 4, 8])
        if pp * dp * tp * cp > devices or batch % (dp * problem.microbatch_size):
            continue
        chunks = rng.choice([1, 1, 2]) if pp > 1 else 1
        shard = rng.choice(list(Shard)) if dp > 1 else Shard.NONE
        schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
        if chunks == 1 and pp > 1 and rng.random() < 0.2:
            schedule = Schedule.GPIPE
        cuts = random_cuts(rng, blocks, pp * chunks)
        if pp == 1 and shard is Shard.PARAMETERS:
            cuts, chunks, schedule = unit_cuts(blocks), blocks + 2, Schedule.INTERLEAVED
        grid = Grid(
            pp=pp,
            dp=dp,
            tp=tp,
            chunks=chunks,
            cuts=cuts,
            shard=shard,
            recompute=rng.choice(["", "full"]),
            batch_size=batch,
            microbatch_size=problem.microbatch_size,
            schedule=schedule,
            tied=tied,
        )
        if trainer is not None and any(trainer.refusals(grid)):
            continue
        yield complete_grid(problem, grid)


def untied(problem: Problem) -> Problem:
    """Return a problem whose head has weights of its own."""
    graph, table = problem.graph, problem.graph.parameters
    chain = block_chain(graph)
    place = chain.place[table.use_op]
    before = set(table.use_parameter[place == 0].tolist())
    shared = [p for p in table.use_parameter[place > len(chain.names)].tolist() if p in before]
    if not shared:
        return problem
    uses = table.use_parameter.copy()
    rows = [*range(len(table)), *shared]
    for number, parameter in enumerate(shared):
        uses[(uses == parameter) & (place > len(chain.names))] = len(table) + number
    columns = ("bytes", "trainable", "buffer", "copy_bytes", "expert")
    parameters = replace(
        table,
        names=(*table.names, *(f"head.{table.names[p]}" for p in shared)),
        dtypes=tuple(table.dtypes[row] for row in rows),
        use_parameter=uses,
        **{name: getattr(table, name)[rows] for name in columns},
    )
    return replace(problem, graph=replace(graph, parameters=parameters))


def random_cuts(rng: random.Random, blocks: int, stages: int) -> tuple[int, ...]:
    """Return blocks for each stage; the first and the last may have none."""
    inner = sorted(rng.sample(range(1, blocks), stages - 1)) if stages > 1 else []
    cuts = [b - a for a, b in zip([0, *inner], [*inner, blocks], strict=True)]
    if stages > 2 and rng.random() < 0.2:
        cuts[1] += cuts[0]
        cuts[0] = 0
    return tuple(cuts)


def solution_of_grid(problem: Problem, grid: Grid) -> Solution:
    """Return the plan of a grid with its value, whether or not it fits into memory."""
    plan = plan_of_grid(problem, grid)
    value = measure(problem, plan)
    return Solution(
        problem=problem,
        plan=plan,
        metric=problem.objective.metric,
        value=value.value,
        unit=value.unit,
    )


def broken_solutions(rng: random.Random, solution: Solution) -> Iterator[tuple[str, Solution]]:
    """Yield plans that are no grids, made of one that is, with the rule that each breaks."""
    plan = solution.plan
    stages = list(plan.stages)

    def with_stage(number: int, stage: Stage) -> Solution:
        changed = [*stages[:number], stage, *stages[number + 1 :]]
        return replace(solution, plan=replace(plan, stages=tuple(changed)), value=1.0)

    last = len(stages) - 1
    wide = [stage for stage in stages if stage.num_replicas > 1]
    if last and wide and len({stage.devices for stage in stages}) == len(stages):
        fewer = replace(stages[last], devices=stages[last].devices[:1], shares=(1,))
        yield "G1", with_stage(last, replace(fewer, shard=Shard.NONE, shard_group=0))
    if plan.num_microbatches > 1 and not wide:
        sizes = plan.microbatch_sizes.copy()
        sizes[0] += 1
        yield "G2", replace(solution, plan=replace(plan, microbatch_sizes=sizes), value=1.0)
    if last > 1 and len({stage.devices for stage in stages}) == len(stages):
        number = rng.randrange(2, last + 1)
        yield "G3", with_stage(number, replace(stages[number], devices=stages[0].devices))
    if last and (moved := _end_of_stage(solution)) is not None:
        stage_of = plan.stage_of.copy()
        stage_of[moved] += 1
        yield "G4", replace(solution, plan=replace(plan, stage_of=stage_of), value=1.0)


def _end_of_stage(solution: Solution) -> int | None:
    """Return the last op of the last block of the first stage that has several ops of a block."""
    graph, stage_of = solution.problem.graph, solution.plan.stage_of
    place = block_chain(graph).place
    block = max((int(p) for p, s in zip(place, stage_of, strict=True) if s == 0 and p), default=0)
    ops = [op for op in graph.topological_order.tolist() if place[op] == block]
    return ops[-1] if block and len(ops) > 1 else None
