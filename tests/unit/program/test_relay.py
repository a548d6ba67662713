"""Values passed on from stage to stage."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import VariantTable
from partita.core.problem import Problem, Schedule
from partita.core.program import Kind
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import UnsupportedError
from partita.program.layout import crossings
from partita.program.lower import lower
from partita.program.relay import relayed
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    flat_cluster,
    pipeline,
    random_pipeline,
)

SIZES = Figures(forward_s=1.0, backward_s=1.0, tensor_bytes=(100.0, 10.0, 10.0, 10.0, 10.0))


def five_stages(skips, traits=None, **options):
    graph = chain(5, SIZES, traits or Traits(), skips=skips)
    cluster = flat_cluster(5, bandwidth_bytes_per_s=100.0)
    plan = pipeline(graph, cluster, range(5), microbatches=2, **options)
    return Problem(graph=graph, cluster=cluster), plan


def cut_bytes(problem, plan):
    """Return the bytes that cross each cut forward, for one microbatch."""
    crossing = crossings(problem.graph, plan)
    assert (crossing.reader == crossing.producer + 1).all()
    size = problem.graph.tensors.bytes[crossing.tensor]
    return np.bincount(crossing.producer, weights=size).tolist()


def messages(problem, plan, *, gradient):
    program = lower(problem, plan)
    rows = (program.kind == Kind.SEND) & (program.gradient == gradient)
    pairs = zip(program.device[rows].tolist(), program.peer[rows].tolist(), strict=True)
    return sorted(set(pairs))


def test_a_value_crosses_every_cut_up_to_its_last_reader():
    # t0 has 100 bytes and is read in stages 1, 2 and 3; stage 3 is its last reader.
    problem, plan = five_stages([(0, 2), (0, 3)])
    assert (0, 3) in messages(problem, plan, gradient=False)
    passed = relayed(problem, plan)
    assert cut_bytes(*passed) == [100.0, 110.0, 110.0, 10.0]
    neighbours = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert messages(*passed, gradient=False) == neighbours
    assert messages(*passed, gradient=True) == [(b, a) for a, b in neighbours]
    check(*passed)


def test_a_stage_that_does_not_read_passes_on_too():
    passed = relayed(*five_stages([(0, 4)]))
    assert cut_bytes(*passed) == [100.0, 110.0, 110.0, 110.0]
    names = passed[0].graph.ops.names[5:]
    assert names == ("t0/relay1", "t0/relay2", "t0/relay3")
    assert passed[1].stage_of[5:].tolist() == [1, 2, 3]


def test_what_has_no_gradient_is_passed_on_without():
    problem, plan = five_stages([(1, 3)], Traits(detached=[1]))
    passed = relayed(problem, plan)
    assert not passed[0].graph.tensors.differentiable[-1]
    assert (3, 2) in messages(*passed, gradient=True)
    assert (2, 1) not in messages(*passed, gradient=True)
    check(*passed)


def test_a_chain_stays_as_it_is():
    problem, plan = five_stages([])
    passed = relayed(problem, plan)
    assert passed[0].graph == problem.graph
    assert passed[1] == plan


def test_passing_on_takes_no_compute():
    problem, plan = five_stages([(0, 4), (1, 3)])
    direct, passed = simulate(problem, plan), simulate(*relayed(problem, plan))
    assert passed.busy_s.tolist() == pytest.approx(direct.busy_s.tolist())


@pytest.mark.parametrize("schedule", Schedule)
def test_any_plan_stays_valid(schedule):
    for seed in range(8):
        problem, plan = random_pipeline(random.Random(f"{schedule}{seed}"), schedule=schedule)
        passed = relayed(problem, plan)
        crossing = crossings(passed[0].graph, passed[1])
        assert (crossing.reader == crossing.producer + 1).all()
        check(*passed)


def test_graphs_with_variants_are_refused():
    problem, plan = five_stages([(0, 2)])
    graph = replace(problem.graph, variants=VariantTable(op=[0], tp=2))
    with pytest.raises(UnsupportedError, match="variants"):
        relayed(replace(problem, graph=graph), plan)
