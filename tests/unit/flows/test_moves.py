"""Plans in the place of another: kept cuts, exchanged devices, and the trade-off between them."""

from dataclasses import replace

import numpy as np
import pytest

import partita
from partita.core.plan import Shard, Stage
from partita.core.problem import Objective, Problem
from partita.cost.memory import static_memory
from partita.cost.moves import moves
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.moves import OldPlan, kept_cuts, relabelled, replaced
from partita.flows.solutions import evaluated
from partita.program.lower import lower
from partita.testing.builders import Figures, chain, flat_cluster, host_cluster, pipeline

GRAPH = chain(6, Figures(forward_s=0.1, backward_s=0.2, tensor_bytes=1e3, parameter_bytes=4e6))


def posed(devices, **objective):
    cluster = flat_cluster(devices, bandwidth_bytes_per_s=1e9)
    return Problem(graph=GRAPH, cluster=cluster, objective=Objective(**objective))


def names(plan):
    return [
        [tuple(plan.devices[d] for d in group) for group in stage.devices] for stage in plan.stages
    ]


def without(problem, *lost):
    keep = [device for device in problem.cluster.devices if device.name not in lost]
    levels = tuple(level.taken(np.arange(len(keep))) for level in problem.cluster.levels)
    return replace(problem, cluster=replace(problem.cluster, devices=tuple(keep), levels=levels))


def test_an_old_plan_is_kept_for_another_batch():
    problem = posed(2, microbatches=12)
    old = pipeline(GRAPH, problem.cluster, [0, 1], microbatches=4)
    (kept,) = kept_cuts(old, problem)
    assert kept.num_microbatches == 12
    assert moves(old, kept, problem).total_bytes == 0


def test_a_lost_device_is_replaced_or_left_out():
    old = pipeline(GRAPH, flat_cluster(5), [(0, 1), (2, 3)], microbatches=4)
    problem = without(posed(5, microbatches=4), "d3")
    found = [names(plan) for plan in kept_cuts(old, problem)]
    assert [[("d0",), ("d1",)], [("d2",), ("d4",)]] in found  # the spare one
    assert [[("d0",), ("d1",)], [("d2",)]] in found  # without the replica
    for plan in kept_cuts(old, problem):
        assert plan.stage_of.tolist() == old.stage_of.tolist()


def test_a_stage_without_devices_joins_its_neighbour():
    old = pipeline(GRAPH, flat_cluster(3), [0, 1, 2], microbatches=4)
    problem = without(posed(3, microbatches=4), "d0")
    (plan,) = kept_cuts(old, problem)
    assert names(plan) == [[("d1",)], [("d2",)]]
    assert plan.stage_of.tolist() == [0, 0, 0, 0, 1, 1]


def test_new_devices_become_replicas_of_all_stages_or_of_one():
    problem = posed(4, microbatches=4)
    old = pipeline(GRAPH, flat_cluster(2), [0, 1], microbatches=4)
    found = [names(plan) for plan in kept_cuts(old, problem)]
    assert [[("d0",), ("d2",)], [("d1",), ("d3",)]] in found
    assert [[("d0",), ("d2",)], [("d1",)]] in found


def test_degrees_that_no_longer_fit_are_given_up():
    graph, cluster = GRAPH, flat_cluster(8)
    stage = Stage(
        devices=tuple((2 * r, 2 * r + 1) for r in range(4)),
        shard=Shard.OPTIMIZER,
        shard_group=2,
        ep=8,
    )
    old = replace(pipeline(graph, cluster, [0], microbatches=12), stages=(stage,))
    problem = without(posed(8, microbatches=12), "d7")
    (plan,) = kept_cuts(old, problem)
    assert names(plan)[0] == [("d0", "d1"), ("d2", "d3"), ("d4", "d5")]
    assert (plan.stages[0].shard, plan.stages[0].ep) == (Shard.OPTIMIZER, 1)


def test_another_graph_has_no_cut_to_keep():
    problem = posed(2)
    assert kept_cuts(pipeline(chain(5), problem.cluster, [0, 1]), problem) == []


def test_devices_that_are_alike_are_exchanged_so_that_nothing_moves():
    problem = posed(3, microbatches=4)
    old = OldPlan(plan=pipeline(GRAPH, problem.cluster, [0, 1, 2], microbatches=4), problem=problem)
    turned = pipeline(GRAPH, problem.cluster, [2, 0, 1], microbatches=4)
    assert old.moves(problem, turned).total_bytes > 0
    assert any(
        old.moves(problem, plan).total_bytes == 0 for plan in relabelled(old, problem, turned)
    )


def test_whole_hosts_are_exchanged_without_tearing_them_apart():
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e7)
    problem = Problem(graph=GRAPH, cluster=cluster, objective=Objective(microbatches=4))
    old = OldPlan(plan=pipeline(GRAPH, cluster, [0, 1, 2, 3], microbatches=4), problem=problem)
    turned = pipeline(GRAPH, cluster, [2, 3, 1, 0], microbatches=4)
    plans = relabelled(old, problem, turned)
    assert [names(plan) for plan in plans] == [names(old.plan)] * len(plans)


def test_the_plan_that_moves_least_within_the_slowdown_is_taken():
    problem = posed(2, microbatches=4)
    old = OldPlan(plan=pipeline(GRAPH, problem.cluster, [0, 1], microbatches=4), problem=problem)
    cut = np.array([0, 0, 0, 0, 1, 1])  # slower, and moves an op
    worse = replace(old.plan, stage_of=cut)
    turned = replace(old.plan, devices=("d1", "d0"))
    solution = evaluated(problem, turned, None)
    made, replacement = replaced(old, solution, minimise=True)
    assert made.plan.devices == old.plan.devices
    assert replacement.chosen.moves.total_bytes == 0
    assert "no state moves" in replacement.line
    plain, counted = replaced(old, solution)
    assert plain is solution
    assert counted.candidates == ()
    assert counted.chosen.moves.total_bytes == pytest.approx(6 * 12e6)
    slow, _ = replaced(
        OldPlan(plan=worse, problem=problem), evaluated(problem, old.plan, None), minimise=True
    )
    assert slow.value == pytest.approx(made.value)  # the old cut is more than 5 % slower
    kept, _ = replaced(
        OldPlan(plan=worse, problem=problem),
        evaluated(problem, old.plan, None),
        minimise=True,
        slowdown=1.0,
    )
    assert kept.plan.stage_of.tolist() == cut.tolist()


def test_candidates_are_a_front_with_the_plan_of_the_search():
    problem = posed(3, microbatches=6)
    old = OldPlan(plan=pipeline(GRAPH, flat_cluster(2), [0, 1], microbatches=6), problem=problem)
    solution = partita.solve(problem, "auto", iterations=5)
    _, found = replaced(old, solution, minimise=True)
    front = [(each.value, each.moves.total_bytes) for each in found.candidates]
    assert front == sorted(front)
    assert any(each.plan is solution.plan for each in found.candidates)
    assert min(size for _, size in front) == 0  # the old plan itself
    figures = found.to_json()
    assert figures["moved_bytes"] == found.chosen.moves.total_bytes
    assert sum(each["chosen"] for each in figures["candidates"]) == 1


def test_the_old_plan_comes_from_a_file_or_an_object(tmp_path):
    first = partita.plan("gpt-small", cluster="2xa100", microbatches=4, planner="uniform")
    file = tmp_path / "old.plan.json"
    save(first.solution, file)
    save(first.plan, tmp_path / "bare.json")
    given = {"cluster": "2xa100", "microbatches": 4, "planner": "uniform"}
    for source in (str(file), first, first.solution, first.plan, str(tmp_path / "bare.json")):
        again = partita.plan("gpt-small", from_plan=source, **given)
        assert again.replacement is not None
        assert again.replacement.chosen.moves.total_bytes == 0
    assert again.to_json()["moves"]["moved_bytes"] == 0
    assert "no state moves" in repr(again)


def test_the_search_starts_from_the_old_plan():
    first = partita.plan("gpt-small", cluster="4xa100", microbatches=8, iterations=60)
    again = partita.plan(
        "gpt-small", cluster="4xa100", microbatches=8, iterations=1, from_plan=first
    )
    assert again.solution.value <= first.solution.value * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"minimise_moves": True}, "needs --from"),
        ({"slowdown": 0.1}, "needs --objective energy or --minimise-moves"),
        (
            {"from_plan": "OLD", "minimise_moves": True, "objective": "energy"},
            "both choose among plans",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(InvalidInputError, match=words):
        partita.plan("gpt-small", cluster="2xa100", planner="uniform", **options)


def test_what_is_no_plan_is_refused(tmp_path):
    save(partita.problem("gpt-small", cluster="2xa100"), tmp_path / "problem.json")
    with pytest.raises(InvalidInputError, match="problem, not"):
        partita.plan("gpt-small", cluster="2xa100", from_plan=str(tmp_path / "problem.json"))


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_large_transformers_keep_what_they_can(model):
    old = partita.plan(model, cluster="4xdgx-h100", batch_size=96)
    same = partita.plan(model, cluster="4xdgx-h100", batch_size=96, from_plan=old)
    assert same.replacement.chosen.moves.total_bytes == 0
    assert same.replacement.candidates == ()
    # The first host is gone: hosts that are left keep their state, whatever number they have now.
    given = {"cluster": "4xdgx-h100", "what_if": ["-host0/*"], "batch_size": 96}
    found = partita.plan(model, **given, from_plan=old, minimise_moves=True)
    chosen, fastest = found.replacement.chosen, found.replacement.candidates[0]
    assert all(
        chosen.moves.total_bytes <= each.moves.total_bytes
        for each in found.replacement.candidates
        if each.value <= fastest.value * 1.05
    )
    assert chosen.value <= fastest.value * 1.05
    assert found.plan is chosen.plan
    assert found.to_json()["moves"]["moved_bytes"] == chosen.moves.total_bytes
    # Everything that the plan needs is copied, read or there, as the model of memory counts it.
    problem, moved = found.solution.problem, chosen.moves
    held = static_memory(problem, found.plan, lower(problem, found.plan))
    np.testing.assert_allclose(
        moved.copied + moved.read + moved.kept, held.weights + held.optimizer, rtol=1e-6
    )


def test_a_slowdown_of_large_transformers_needs_moves():
    with pytest.raises(InvalidInputError, match="--slowdown is for models"):
        partita.plan("llama3-8b", cluster="2xdgx-h100", slowdown=0.1)
