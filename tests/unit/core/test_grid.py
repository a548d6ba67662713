"""Grids: the regular middle between plans and trainers."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import EdgeTable
from partita.core.grid import (
    Grid,
    Placement,
    block_chain,
    complete_grid,
    even_cuts,
    grid_of,
    plan_of_grid,
)
from partita.core.plan import Shard, Stage
from partita.core.problem import Problem
from partita.core.schedules import Schedule
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.problem import problem as pose_problem
from partita.testing.builders import chain, flat_cluster
from partita.testing.grids import broken_solutions, random_grids, solution_of_grid


@pytest.fixture(scope="module")
def small() -> Problem:
    """Return a transformer of 12 blocks on two hosts."""
    return pose_problem("gpt-small", cluster="2x4xa100", microbatches=16, microbatch_size=2)


def test_plans_of_random_grids_are_these_grids(small: Problem) -> None:
    grids = random_grids(random.Random(0), small)
    for grid in (next(grids) for _ in range(60)):
        plan = plan_of_grid(small, grid)
        found = grid_of(small, plan)
        assert replace(found, precision="") == replace(grid, tied=True)
        assert plan_of_grid(small, found) == plan


def test_broken_plans_are_refused_in_one_line(small: Problem) -> None:
    rng, seen = random.Random(1), set()
    grids = random_grids(rng, small)
    for grid in (next(grids) for _ in range(40)):
        for rule, broken in broken_solutions(rng, solution_of_grid(small, grid)):
            with pytest.raises(InfeasibleError) as caught:
                grid_of(small, broken.plan)
            assert "\n" not in str(caught.value)
            seen.add(rule)
    assert seen == {"G1", "G2", "G3", "G4"}


def test_a_v_is_known(small: Problem) -> None:
    grid = Grid(pp=2, chunks=2, placement=Placement.V, cuts=(3, 3, 3, 3), batch_size=32)
    plan = plan_of_grid(small, replace(grid, schedule=Schedule.INTERLEAVED))
    assert [stage.devices[0][0] for stage in plan.stages] == [0, 1, 1, 0]
    assert grid_of(small, plan).placement is Placement.V


def test_refusals_name_stage_and_reason(small: Problem) -> None:
    plan = plan_of_grid(small, Grid(pp=2, dp=2, cuts=(6, 6)))
    cases = {
        "stage 1 has 1 replicas, stage 0 has 2": {1: Stage(devices=((2,),), shares=(1,))},
        "stage 1 deals shares 3:1": {1: Stage(devices=((2,), (3,)), shares=(3, 1))},
        "stage 1 shards optimizer, stage 0 none": {
            1: replace(plan.stages[1], shard=Shard.OPTIMIZER)
        },
        "keeps 50% of its activations in host memory": {
            number: replace(stage, offload_activations=0.5)
            for number, stage in enumerate(plan.stages)
        },
        "is in two groups of devices": {1: Stage(devices=((1,), (2,)))},
    }
    for words, changes in cases.items():
        stages = tuple(changes.get(number, stage) for number, stage in enumerate(plan.stages))
        with pytest.raises(InfeasibleError, match=words):
            grid_of(small, replace(plan, stages=stages))


def test_recomputation_of_parts_and_ends_is_refused(small: Problem) -> None:
    plan = plan_of_grid(small, Grid(pp=2, cuts=(6, 6), recompute="full", recompute_blocks=2))
    found = grid_of(small, plan)
    assert (found.recompute, found.recompute_blocks) == ("full", 2)
    chain = block_chain(small.graph)
    for place, words in (
        (0, "trainers recompute blocks alone"),
        (1, "without its op"),
        (7, "recomputes 1 of its 6 blocks"),
    ):
        flags = np.array(plan.recompute)
        if place == 1:
            flags[np.argmax(chain.place == 1)] = False
        elif place == 0:
            flags[np.argmax(chain.place == 0)] = True
        else:
            flags[chain.place == place] = False
        with pytest.raises(InfeasibleError, match=words):
            grid_of(small, replace(plan, recompute=flags))


def test_ranks_of_a_host_must_be_consecutive(small: Problem) -> None:
    names = small.cluster.device_names
    mixed = (names[0], names[4], names[1], names[5])
    plan = plan_of_grid(small, Grid(pp=4, ranks=mixed))
    with pytest.raises(InfeasibleError, match=r"ranks 0 and 2.*host0, rank 1.*host1"):
        grid_of(small, plan)


def test_a_gradient_that_skips_a_stage_is_refused(small: Problem) -> None:
    graph = small.graph
    place = block_chain(graph).place
    first, last = (int(np.flatnonzero(place == at)[-1]) for at in (1, 12))
    made = (graph.tensors.producer == first) & graph.tensors.differentiable
    edges = EdgeTable(
        tensor=np.append(graph.edges.tensor, np.flatnonzero(made)[0]),
        reader=np.append(graph.edges.reader, last),
    )
    skip = replace(small, graph=replace(graph, edges=edges))
    assert grid_of(skip, plan_of_grid(skip, Grid(pp=2, cuts=(6, 6)))).pp == 2
    plan = plan_of_grid(skip, Grid(pp=4, cuts=(3, 3, 3, 3)))
    with pytest.raises(InfeasibleError, match="stage 0 feeds stage 3"):
        grid_of(skip, plan)


def test_what_a_grid_does_not_say_is_completed(small: Problem) -> None:
    grid = complete_grid(small, Grid(pp=4, dp=0))
    assert (grid.dp, grid.cuts, grid.batch_size) == (2, (3, 3, 3, 3), 32)
    assert even_cuts(10, 4) == (3, 3, 2, 2)
    with pytest.raises(InfeasibleError, match="16 ranks"):
        complete_grid(small, Grid(pp=16))
    with pytest.raises(InfeasibleError, match="11 blocks"):
        complete_grid(small, Grid(cuts=(11,)))
    with pytest.raises(InvalidInputError, match="no multiple"):
        complete_grid(small, Grid(dp=3))
    with pytest.raises(InfeasibleError, match="holds nothing"):
        plan_of_grid(small, Grid(pp=4, cuts=(6, 0, 0, 6)))


def test_a_model_without_blocks_is_no_grid() -> None:
    problem = Problem(graph=chain(4), cluster=flat_cluster(2))
    with pytest.raises(InfeasibleError, match="no repeated blocks"):
        complete_grid(problem, Grid())


@pytest.mark.parametrize("values", [{"pp": 0}, {"cuts": (1, 2)}, {"pp": 2, "ranks": ("a",)}])
def test_impossible_grids_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        Grid(**values)  # type: ignore[arg-type]
