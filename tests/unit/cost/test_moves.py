"""State that moves from plan to plan, against sets of elements counted one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.plan import Plan, Shard, Stage
from partita.core.precision import parse_precision
from partita.core.problem import Mode, Objective, Problem
from partita.cost.memory import static_memory
from partita.cost.moves import kept_bytes, moves
from partita.cost.tables import SHARD_LEVEL, lasting_bytes
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    flat_cluster,
    host_cluster,
    pipeline,
)

ELEMENTS = 5040 * 4
MEGA = 1_000_000.0


def model(num_ops=6, **traits):
    return chain(num_ops, Figures(parameter_bytes=4.0 * ELEMENTS), Traits(**traits))


def owned(problem, plan):
    """Return what each device holds, element by element: {device: {(parameter, kind): mask}}."""
    table = problem.graph.parameters
    held = {name: {} for name in plan.devices}
    users = {}
    for op, row in zip(table.use_op.tolist(), table.use_parameter.tolist(), strict=True):
        users.setdefault(row, set()).add(int(plan.stage_of[op]))
    for row, stages in users.items():
        for number in sorted(stages):
            stage = plan.stages[number]
            experts = bool(table.expert[row])
            flat = [d for group in stage.devices for d in group]
            tp = len(stage.devices[0]) // stage.cp
            parts = stage.ep * max(stage.etp, 1) if experts and stage.ep > 1 else tp
            trained = bool(table.trainable[row]) and problem.objective.mode is Mode.TRAINING
            for place, device in enumerate(flat):
                team = flat[place % parts :: parts]
                group = stage.shard_group
                group = group if group and len(team) % group == 0 else len(team)
                shard = team.index(device) % group
                width = ELEMENTS // parts
                first = (place % parts) * width
                for kind, level in (("weights", 3), ("master", 1), ("state", 1)):
                    mask = np.zeros(ELEMENTS, dtype=bool)
                    if trained and len(stages) == 1 and SHARD_LEVEL[stage.shard] >= level:
                        mask[first + shard * (width // group) :][: width // group] = True
                    else:
                        mask[first : first + width] = True
                    held[plan.devices[device]].setdefault((table.names[row], kind), mask)
    return held


def counted(old, plan, problem, old_problem=None):
    """Return (copied, read, kept) bytes of each device, by counting."""
    before, after = owned(old_problem or problem, old), owned(problem, plan)
    need = lasting_bytes(problem.graph.parameters, problem.objective)
    width = {
        (name, kind): getattr(need, kind)[row] / ELEMENTS
        for row, name in enumerate(problem.graph.parameters.names)
        for kind in ("weights", "master", "state")
    }
    alive = {name: held for name, held in before.items() if name in problem.cluster.index_of}
    result = []
    nothing = np.zeros(ELEMENTS, dtype=bool)
    for device in plan.devices:
        copied = read = kept = 0.0
        for key, mask in after[device].items():
            own = alive.get(device, {}).get(key, nothing)
            others = np.logical_or.reduce([held.get(key, nothing) for held in alive.values()])
            kept += width[key] * (mask & own).sum()
            copied += width[key] * (mask & ~own & others).sum()
            read += width[key] * (mask & ~own & ~others).sum()
        result.append((copied, read, kept))
    return np.array(result).T


def random_plan(rng, graph, cluster):
    """Return a plan with replicas, tensor, context and expert parallelism, and sharded state."""
    names = list(cluster.device_names)
    rng.shuffle(names)
    stages, used = [], 0
    for _ in range(rng.randint(1, 3)):
        ranks, replicas = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
        if stages and (used + ranks * replicas > len(names) or rng.random() < 0.2):
            stages.append(rng.choice(stages))
            continue
        first = range(used, used + ranks * replicas, ranks)
        devices = tuple(tuple(range(begin, begin + ranks)) for begin in first)
        used += ranks * replicas
        cp = rng.choice([1, 2]) if ranks > 1 else 1
        copies = ranks * replicas // (ranks // cp)
        shard = rng.choice(list(Shard))
        sizes = [size for size in range(1, copies + 1) if copies % size == 0]
        eps = [size for size in range(1, ranks * replicas + 1) if ranks * replicas % size == 0]
        stages.append(
            Stage(
                devices=devices,
                cp=cp,
                shard=shard,
                shard_group=0 if shard is Shard.NONE else rng.choice([0, rng.choice(sizes)]),
                ep=rng.choice(eps),
            )
        )
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(names[:used]),
        stage_of=np.arange(len(graph)) * len(stages) // len(graph),
        stages=tuple(stages),
        microbatch_sizes=np.ones(6, dtype=int),
    )


@pytest.mark.parametrize("seed", range(40))
def test_moves_equal_elements_counted_one_by_one(seed):
    rng = random.Random(seed)
    graph = model(tied=[(0, 5)] if seed % 2 else (), frozen=[2])
    drawn = np.array([rng.random() < 0.4 for _ in graph.parameters.names])
    drawn[6:] = False
    graph = replace(graph, parameters=replace(graph.parameters, expert=drawn))
    cluster = flat_cluster(14, bandwidth_bytes_per_s=MEGA)
    policy = rng.choice(["fp32", "bf16", "fp16"])
    objective = Objective().with_precision(parse_precision(policy), rng.choice(["adam", "sgd"]))
    problem = Problem(graph=graph, cluster=flat_cluster(12), objective=objective)
    old = random_plan(rng, graph, cluster)
    plan = random_plan(rng, graph, problem.cluster)
    found = moves(old, plan, problem)
    copied, read, kept = counted(old, plan, problem)
    np.testing.assert_allclose(found.copied, copied)
    np.testing.assert_allclose(found.read, read)
    np.testing.assert_allclose(found.kept, kept)
    assert sum(found.by_kind.values()) == pytest.approx(found.total_bytes)
    place = [problem.cluster.index_of[name] for name in plan.devices]
    table = kept_bytes(old, plan, problem)
    np.testing.assert_allclose(table[range(len(place)), place], kept)


def test_the_same_plan_moves_nothing():
    graph, cluster = model(), flat_cluster(4)
    plan = pipeline(graph, cluster, [(0, 1), (2, 3)], shard=Shard.OPTIMIZER, microbatches=2)
    found = moves(plan, plan, Problem(graph=graph, cluster=cluster))
    assert found.total_bytes == 0
    assert found.copy_s == 0


def test_what_is_needed_is_what_the_memory_model_holds():
    graph, cluster = model(tied=[(0, 5)]), flat_cluster(4)
    problem = Problem(graph=graph, cluster=cluster)
    plan = pipeline(graph, cluster, [(0, 1), (2, 3)], shard=Shard.PARAMETERS, microbatches=2)
    old = pipeline(graph, cluster, [0, 1, 2], microbatches=2)
    found = moves(old, plan, problem)
    static = static_memory(problem, plan, lower(problem, plan))
    np.testing.assert_allclose(
        found.copied + found.read + found.kept, static.weights + static.optimizer
    )


def test_a_lost_device_gives_nothing_so_its_state_is_read_from_a_checkpoint():
    graph = model(num_ops=2)
    old = pipeline(graph, flat_cluster(2), [0, 1])
    problem = Problem(graph=graph, cluster=flat_cluster(1))
    plan = pipeline(graph, problem.cluster, [0])
    found = moves(old, plan, problem)
    whole = 12.0 * ELEMENTS  # weights and Adam's state of one op
    assert (found.copied_bytes, found.read_bytes) == (0, whole)
    assert found.kept.tolist() == [whole]
    assert np.isnan(found.read_s)  # nobody knows how fast the host reads
    disks = tuple(replace(host, storage_bytes_per_s=whole) for host in problem.cluster.hosts)
    problem = replace(problem, cluster=replace(problem.cluster, hosts=disks))
    assert moves(old, plan, problem).read_s == pytest.approx(1.0)


def test_a_replica_that_is_left_sends_what_a_lost_one_had():
    graph = model(num_ops=2)
    old = pipeline(graph, flat_cluster(3), [(0, 2)], microbatches=2)
    cluster = flat_cluster(2, bandwidth_bytes_per_s=MEGA)
    plan = pipeline(graph, cluster, [(0, 1)], microbatches=2)
    found = moves(old, plan, Problem(graph=graph, cluster=cluster))
    assert (found.copied_bytes, found.read_bytes) == (24.0 * ELEMENTS, 0)
    assert found.copy_s == pytest.approx(24.0 * ELEMENTS / MEGA)


def test_state_comes_from_the_nearest_holder_and_senders_take_turns():
    graph = model(num_ops=1)
    cluster = host_cluster(2, 4, inside_bytes_per_s=10 * MEGA, between_bytes_per_s=MEGA)
    problem = Problem(graph=graph, cluster=cluster)
    size = 12.0 * ELEMENTS
    near = pipeline(graph, cluster, [(0, 4)], microbatches=2)
    wide = pipeline(graph, cluster, [(0, 1, 4, 5)], microbatches=4)
    # d1 takes from d0, d5 from d4: nothing crosses hosts.
    assert moves(near, wide, problem).copy_s == pytest.approx(size / (10 * MEGA))
    # d0 and d1 each send to one of d2 and d3 at the same time.
    pair = pipeline(graph, cluster, [(0, 1)], microbatches=2)
    four = pipeline(graph, cluster, [(0, 1, 2, 3)], microbatches=4)
    assert moves(pair, four, problem).copy_s == pytest.approx(size / (10 * MEGA))
    # The port of a host carries both copies.
    away = pipeline(graph, cluster, [(4, 5)], microbatches=2)
    assert moves(pair, away, problem).copy_s == pytest.approx(2 * size / MEGA)


def test_another_optimizer_begins_with_new_state_and_a_master_copy_is_made_of_weights():
    graph, cluster = model(num_ops=1), flat_cluster(2)
    sgd = Objective().with_precision(parse_precision("fp32"), "sgd")
    adam = Objective().with_precision(parse_precision("bf16"), "adam")
    before = Problem(graph=graph, cluster=cluster, objective=sgd)
    after = Problem(graph=graph, cluster=cluster, objective=adam)
    here, there = pipeline(graph, cluster, [0]), pipeline(graph, cluster, [1])
    assert moves(here, here, after, before).total_bytes == 0
    found = moves(here, there, after, before)
    assert found.by_kind == {"weights": 2.0 * ELEMENTS, "master": 4.0 * ELEMENTS, "state": 0}


def test_gradients_that_stand_beside_a_master_copy_do_not_move():
    graph, cluster = model(num_ops=1), flat_cluster(2)
    objective = Objective().with_precision(parse_precision("fp16"), "adam")
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    found = moves(pipeline(graph, cluster, [0]), pipeline(graph, cluster, [1]), problem)
    assert found.by_kind["master"] == 4.0 * ELEMENTS


def test_a_plan_of_another_model_is_refused():
    graph, cluster = model(), flat_cluster(2)
    names = tuple(f"other.{name}" for name in graph.parameters.names)
    other = replace(graph, parameters=replace(graph.parameters, names=names))
    problem = Problem(graph=graph, cluster=cluster)
    old = pipeline(other, cluster, [0, 1])
    with pytest.raises(InvalidInputError, match="no parameter of"):
        moves(old, pipeline(graph, cluster, [0]), problem, replace(problem, graph=other))
