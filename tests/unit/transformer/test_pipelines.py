"""Layouts as plans: the cost model, the simulator and the closed form agree on them."""

from dataclasses import replace

import numpy as np
import pytest

import partita
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.plan import Shard
from partita.core.precision import parse_precision
from partita.core.problem import Objective, Problem
from partita.core.program import Kind
from partita.cost.links import fabric_of
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.transformer.kernels import machine_of
from partita.transformer.layout import Layout
from partita.transformer.mixed import (
    balance,
    groups_of,
    mixed_candidates,
    place_memory,
)
from partita.transformer.named import named_shapes
from partita.transformer.pipelines import (
    even_layers,
    graph_of,
    plan_of,
    played_s,
    regular_pipeline,
    stage_devices,
)
from partita.transformer.search import Task, least_s, price_all, search
from partita.transformer.uneven import refined


def task_on(cluster, model="llama3-8b", *, batch=64, length=4096, **fixed):
    machine = machine_of(cluster.devices[0], fabric_of(cluster))
    return Task(
        shape=named_shapes()[model].shape,
        devices=len(cluster),
        machine=machine,
        batch=batch,
        sequence_length=length,
        limit_bytes=cluster.devices[0].memory_bytes * 0.92,
        fixed=fixed,
    )


@pytest.fixture(scope="module")
def cluster():
    return read_shorthand("2xdgx-h100", load_catalogue())


LAYOUTS = {
    "tp": Layout(tp=4, sp=True, dp=4, zero=1),
    "pp": Layout(tp=2, sp=True, pp=4, dp=2, zero=1),
    "vp": Layout(tp=2, sp=True, pp=4, vp=4, dp=2, zero=1),
    "cp": Layout(cp=4, pp=2, dp=2, zero=1),
    "zero 3": Layout(dp=16, zero=3, shard_group=8),
    "full": Layout(tp=2, sp=True, pp=2, dp=4, recompute=("full",)),
    "offload": Layout(dp=16, zero=1, offload_optimizer=0.5),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_program_of_a_layout_is_proved_and_takes_about_its_price(name, cluster):
    task, layout = task_on(cluster), LAYOUTS[name]
    priced = price_all(task, [layout])
    lane = regular_pipeline(task, layout, cluster)
    graph = graph_of([lane])
    plan = plan_of([lane], graph, cluster)
    objective = Objective().with_precision(parse_precision("bf16"), "adam")
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    assert check(problem, plan).num_instructions > 0
    closed, played = float(priced.step_s[0]), played_s([lane])
    # The closed form spreads what the last stage has beside its layers; few layers show it most.
    assert played == pytest.approx(closed, rel=0.1)
    timeline = simulate(problem, plan)
    # Beside a pipeline the Program's reductions do not hide under the compute of their own chunk,
    # and what ZeRO-1 and 2 updated is gathered at the end of a step.
    assert closed * 0.9 < timeline.makespan_s < closed * 1.25
    assert timeline.peak_bytes.max() == pytest.approx(float(priced.total_bytes[0]), rel=0.25)


@pytest.mark.parametrize(
    ("model", "layout", "frozen"),
    [
        ("llama3-70b", Layout(dp=8, cp=2, zero=3, recompute=("full",)), 0.0),
        ("llama3-70b", Layout(tp=4, sp=True, dp=4, zero=3, recompute=("mlp",)), 0.0),
        ("mixtral-8x7b", Layout(dp=16, ep=8, expert_overlap=True, zero=3), 0.0),
        ("mixtral-8x7b", Layout(pp=2, vp=4, dp=8, ep=8, expert_overlap=True, zero=1), 0.0),
        ("llama3-70b", Layout(tp=2, sp=True, pp=4, vp=4, dp=2, zero=1), 0.998),
        ("mixtral-8x7b", Layout(dp=16, ep=4, zero=1), 0.997),
    ],
)
def test_simulated_a_plan_takes_as_long_and_as_much_as_it_was_planned_to(
    model, layout, frozen, cluster
):
    task = replace(task_on(cluster, model, batch=64, length=8192), frozen=frozen)
    lane = regular_pipeline(task, layout, cluster)
    graph = graph_of([lane])
    objective = Objective().with_precision(parse_precision("bf16"), "adam")
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    timeline = simulate(problem, plan_of([lane], graph, cluster))
    assert timeline.makespan_s == pytest.approx(played_s([lane]), rel=0.04)
    total = float(price_all(task, [layout]).total_bytes[0])
    assert 0.75 * total < timeline.peak_bytes.max() < 1.02 * total
    assert graph.parameters.elements.sum() == pytest.approx(task.shape.params, rel=1e-3)


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_leave_in_buckets_while_backward_goes_on(zero, cluster):
    task = task_on(cluster, "llama3-8b", batch=32, length=4096)
    lane = regular_pipeline(task, Layout(dp=16, zero=zero), cluster)
    graph = graph_of([lane])
    plan = plan_of([lane], graph, cluster)
    assert len(plan.stages) == 34  # embedding, blocks and head
    objective = Objective().with_precision(parse_precision("bf16"), "adam")
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    timeline = simulate(problem, plan)
    reduces = np.isin(timeline.kind, [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER])
    end_s = timeline.end_s[timeline.kind == Kind.BACKWARD].max()
    # Bucket after bucket; only those of the last blocks and the embedding are left.
    assert (timeline.start_s[reduces] < end_s).mean() > 0.9


def test_small_blocks_share_a_bucket(cluster):
    task = task_on(cluster, "llama3-8b")
    task = replace(task, shape=replace(task.shape, hidden=1024, ffn=2048, heads=8, kv_heads=8))
    lane = regular_pipeline(task, Layout(dp=16, zero=1), cluster)
    plan = plan_of([lane], graph_of([lane]), cluster)
    # Ten million parameters a block, forty million a bucket.
    assert np.bincount(plan.stage_of).tolist() == [1, *[4] * 8, 1]


def test_experts_have_teams_of_their_own(cluster):
    task = task_on(cluster, "qwen3-30b-a3b")
    layout = Layout(pp=2, dp=8, ep=8, zero=1)
    lane = regular_pipeline(task, layout, cluster)
    graph = graph_of([lane])
    plan = plan_of([lane], graph, cluster)
    assert {stage.ep for stage in plan.stages} == {8}
    assert len(plan.stages[0].teams(experts=True)) == 8
    objective = Objective().with_precision(parse_precision("bf16"), "adam")
    check(Problem(graph=graph, cluster=cluster, objective=objective), plan)


def test_ranks_lie_inside_hosts(cluster):
    task, layout = task_on(cluster), Layout(tp=4, sp=True, pp=2, dp=2)
    places = regular_pipeline(task, layout, cluster).places
    assert places[0].devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert places[1].devices == ((8, 9, 10, 11), (12, 13, 14, 15))


def test_layers_that_do_not_divide_leave_the_ends_less():
    assert even_layers(126, Layout(pp=8)) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert sum(even_layers(61, Layout(pp=4, vp=3))) == 61


def test_the_search_keeps_what_is_fixed_and_finds_no_better_than_free(cluster):
    free = search(task_on(cluster))
    fixed = search(task_on(cluster, tp=4, microbatch=1))
    assert {layout.tp for layout in fixed.layouts} == {4}
    assert fixed.step_s[0] >= free.step_s[0] * 0.994
    assert all(layout.devices == 16 for layout in free.layouts)
    fits = free.fits
    assert fits[0]
    assert (np.diff(free.step_s[fits])[1:] >= 0).all()


def test_types_in_a_row_and_side_by_side_are_plans():
    cluster = read_shorthand("dgx-h100+dgx-a100", load_catalogue())
    groups = groups_of(cluster, 0.92)
    task = replace(task_on(cluster, batch=64), machine=groups[0].machine)
    found = mixed_candidates(task, cluster, groups)
    row = next(c for c in found if len(c.lanes) == 1)
    beside = next(c for c in found if len(c.lanes) == 2)
    for candidate in (row, beside):
        graph = graph_of(candidate.lanes)
        plan = plan_of(candidate.lanes, graph, cluster)
        objective = Objective().with_precision(parse_precision("bf16"), "adam")
        problem = Problem(graph=graph, cluster=cluster, objective=objective)
        check(problem, plan)
        timeline = simulate(problem, plan)
        assert (timeline.peak_bytes <= cluster.memory_bytes[0] * 0.97).all()
        assert played_s(candidate.lanes) == pytest.approx(candidate.step_s, rel=0.1)
    # Quick devices have more layers, or more microbatches.
    held = dict.fromkeys(("h100", "a100"), 0)
    for chunk, layers in enumerate(row.lanes[0].layers):
        held[row.lanes[0].places[chunk % len(row.lanes[0].places)].device_type] += layers
    assert held["h100"] > held["a100"]
    assert beside.lanes[0].microbatches > beside.lanes[1].microbatches
    assert plan.stages[0].shard in (Shard.NONE, Shard.OPTIMIZER)


@pytest.mark.parametrize("shorthand", ["dgx-h100+8xl40s", "dgx-a100+dgx-a100-40gb"])
def test_programs_on_mixed_devices_need_the_memory_that_was_counted_and_no_more(shorthand):
    cluster = read_shorthand(shorthand, load_catalogue())
    groups = groups_of(cluster, 0.92)
    task = replace(task_on(cluster), machine=groups[0].machine, limit_bytes=groups[0].limit_bytes)
    found = mixed_candidates(task, cluster, groups)
    rows = [c for c in found if len(c.lanes) == 1]
    beside = [c for c in found if len(c.lanes) == 2]
    sharded = [c for c in beside if c.lanes[0].layout.zero == 3]
    uneven = [c for c in beside if c.lanes[0].microbatches != c.lanes[1].microbatches]
    apart = [c for c in rows if len({p.layout.recompute for p in c.lanes[0].places}) > 1]
    for candidate in (*rows[:2], *beside[:1], *sharded[:1], *uneven[:1], *apart[:1]):
        graph = graph_of(candidate.lanes)
        plan = plan_of(candidate.lanes, graph, cluster)
        objective = Objective().with_precision(parse_precision("bf16"), "adam")
        objective = replace(objective, memory_factor=0.92)
        problem = Problem(graph=graph, cluster=cluster, objective=objective)
        check(problem, plan)
        peaks = dict(zip(plan.devices, simulate(problem, plan).peak_bytes, strict=True))
        for lane in candidate.lanes:
            for number, place in enumerate(lane.places):
                device = cluster.device_names[place.devices[0][0]]
                # The Program does not know what no allocator sees.
                memory = place_memory(lane, number)
                least, most = (float(np.ravel(x)[0]) for x in (memory.allocated, memory.total))
                assert peaks[device] < 1.05 * most
                assert lane.more or peaks[device] > 0.75 * least


def test_layers_move_between_types_while_that_helps():
    cluster = read_shorthand("dgx-h100+dgx-a100", load_catalogue())
    groups = groups_of(cluster, 0.92)
    task = task_on(cluster, batch=16)
    task = replace(task, machine=groups[0].machine, limit_bytes=groups[0].limit_bytes)
    row = next(c for c in mixed_candidates(task, cluster, groups) if len(c.lanes) == 1).lanes[0]
    layers = list(row.layers)
    worst, best = (layers.index(find(layers)) for find in (min, max))
    layers[best] -= 2
    layers[worst] += 2
    bad = replace(row, layers=tuple(layers))
    before = played_s([bad])
    after, lanes = refined(before, (bad,))
    assert after < before
    assert after <= played_s([row]) * 1.01
    assert sum(lanes[0].layers) == task.shape.layers


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_quicker_than_the_bound(seed):
    draw = np.random.default_rng(seed)
    kinds = ["dgx-h100", "dgx-a100", "8xl40s", "dgx-h200", "dgx-b200"]
    names = draw.choice(kinds, size=1 + seed % 2, replace=False).tolist()
    cluster = read_shorthand("+".join(names), load_catalogue())
    model = str(draw.choice(["llama3-8b", "qwen3-30b-a3b", "gemma-2b"]))
    model = model if model in named_shapes() else "llama3-8b"
    groups = groups_of(cluster, 10.0)
    task = replace(
        task_on(cluster, model, length=int(draw.choice([2048, 32768]))),
        machine=groups[0].machine,
        limit_bytes=groups[0].limit_bytes,
    )
    bound = least_s(task, [(group.machine, len(group)) for group in groups])
    if len(groups) > 1:
        steps = [played_s(c.lanes) for c in mixed_candidates(task, cluster, groups)[:6]]
    else:
        best = search(task).layouts[:6]
        steps = [played_s([regular_pipeline(task, layout, cluster)]) for layout in best]
    assert 0.3 * min(steps) < bound < min(steps)


def test_balance_respects_memory():
    held = balance(np.array([1.0, 4.0]), np.zeros(2), np.array([3, 9]), 6)
    assert held.tolist() == [3, 3]


def test_ranks_are_numbered_in_the_order_of_the_layout():
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    usual = stage_devices(np.arange(16), layout, 2)
    assert usual == (((0, 1, 2, 3), (4, 5, 6, 7)), ((8, 9, 10, 11), (12, 13, 14, 15)))
    inside = stage_devices(np.arange(16), replace(layout, rank_order="tp-cp-pp-dp"), 2)
    assert inside == (((0, 1, 2, 3), (8, 9, 10, 11)), ((4, 5, 6, 7), (12, 13, 14, 15)))
    apart = stage_devices(np.arange(16), replace(layout, rank_order="pp-tp-dp-cp"), 2)
    assert apart == (((0, 2, 8, 10), (4, 6, 12, 14)), ((1, 3, 9, 11), (5, 7, 13, 15)))


def test_another_order_of_ranks_is_found_and_played_alike_where_the_network_is_slow():
    options = {"cluster": "2xdgx-h100", "batch_size": 1024, "tp": "1", "pp": "2", "vp": "1"}
    options |= {"cp": "1", "bandwidth": "rack=25Gbit/s"}
    found = {
        order: partita.plan("llama3-8b", rank_order=order, **options)
        for order in (None, "tp-cp-dp-pp", "tp-cp-ep-pp-dp")
    }
    usual, inside = found["tp-cp-dp-pp"], found["tp-cp-ep-pp-dp"]
    assert found[None].best.layout.rank_order == inside.best.layout.rank_order == "tp-cp-pp-dp"
    assert found[None].best.step_s == inside.best.step_s < 0.97 * usual.best.step_s
    # Stages of a replica share a host, as the Program sees it too.
    assert {device[:5] for device in inside.plan.devices[:8]} == {"host0", "host1"}
    for plan in (usual, inside):
        step_s = partita.simulate(plan).timeline.makespan_s
        assert step_s == pytest.approx(plan.best.step_s, rel=0.02)
    for order, words in (("tp-pp", "has not each of"), ("dp-tp-cp-pp", "numbers ranks")):
        with pytest.raises(InvalidInputError, match=words):
            partita.plan("llama3-8b", rank_order=order, **options)


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("2xdgx-h100", {"batch_size": 128, "offload_optimizer": "1"}),
        ("2xdgx-h100", {"batch_size": 128, "pp": "2", "vp": "1", "offload_optimizer": "0.5"}),
        ("2xdgx-h100", {"batch_size": 128, "pp": "1", "zero": "3", "shard_group": "8"}),
        (
            "4xdgx-h100",
            {"batch_size": 128, "pp": "4", "tp": "1", "zero": "3", "framework": "maxtext"},
        ),
    ],
)
def test_programs_take_as_long_as_the_closed_form(cluster, options):
    # The host updates what it keeps; copies of shards are reduced once per step.
    found = partita.plan("llama3-8b", cluster=cluster, **options)
    step_s = partita.simulate(found).timeline.makespan_s
    assert step_s == pytest.approx(found.best.step_s, rel=0.022)
