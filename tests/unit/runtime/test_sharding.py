"""State that replicas divide: over memory and over forked ranks, against one process."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Problem, Schedule
from partita.core.program import Kind
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.ranks.member import Member
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard
from partita.runtime.executor import check_runnable, put_together
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.parameters import ParameterStore
from partita.runtime.process_transport import scatter_groups, used_devices
from partita.runtime.rank import RankOptions, RankReport, run_rank
from partita.runtime.results import RunResult
from partita.runtime.stage_code import ModuleGraph, OpCode
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe
from partita.runtime.workload import Workload
from partita.testing.builders import flat_cluster
from partita.testing.networks import gradient_error, residual_network

NETWORK = residual_network(tied=False)
STEPS, MICROBATCHES = 3, 4
RECIPE = Recipe(optimizer="adam")


def plan_of(
    groups: Sequence[Sequence[int]],
    shard: Shard,
    *,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    shard_group: int = 0,
    recompute: bool = False,
) -> Plan:
    stages = tuple(
        Stage(
            devices=tuple((d,) for d in group),
            shard=shard if len(group) > 1 else Shard.NONE,
            shard_group=shard_group if len(group) > 1 else 0,
        )
        for group in groups
    )
    devices = 1 + max(d for s in stages for team in s.devices for d in team)
    return Plan(
        fingerprint=NETWORK.graph.fingerprint,
        devices=tuple(f"d{d}" for d in range(devices)),
        stage_of=np.arange(11) * len(groups) // 11,
        stages=stages,
        schedule=schedule,
        microbatch_sizes=np.full(MICROBATCHES, 2),
        recompute=np.full(11, recompute),
    )


def parameters() -> dict[str, Tensor]:
    return {n: torch.from_numpy(v) for n, v in NETWORK.parameters(1).items()}


DATA = [
    [
        {n: torch.from_numpy(v) for n, v in found.items()}
        for found in NETWORK.microbatches([2] * MICROBATCHES, 7 + step)
    ]
    for step in range(STEPS)
]
PLANS = {
    **{f"{shard.value} dp2 x pp2": plan_of([[0, 1], [2, 3]], shard) for shard in list(Shard)[1:]},
    "parameters, interleaved": plan_of(
        [[0, 1], [2, 3], [0, 1], [2, 3]], Shard.PARAMETERS, schedule=Schedule.INTERLEAVED
    ),
    "parameters, zero bubble": plan_of(
        [[0, 1], [2, 3]], Shard.PARAMETERS, schedule=Schedule.ZERO_BUBBLE
    ),
    "gradients, uneven, recomputed": plan_of([[0, 1], [2], [3]], Shard.GRADIENTS, recompute=True),
    "parameters, recomputed early": plan_of(
        [[0, 1], [2], [3]], Shard.PARAMETERS, schedule=Schedule.EARLY_RECOMPUTE, recompute=True
    ),
    **{
        f"{shard.value} in two groups": plan_of([[0, 1, 2, 3]], shard, shard_group=2)
        for shard in list(Shard)[1:]
    },
    "parameters, each a group": plan_of([[0, 1]], Shard.PARAMETERS, shard_group=1),
}


class Ranks:
    """Four ranks that run every plan, and one process that runs none."""

    def __init__(self) -> None:
        self.tasks = {name: task_of(plan) for name, plan in PLANS.items()}
        board = StatusBoard(4)

        def main(member: Member, name: str) -> RankReport | None:
            task, workload = self.tasks[name]
            if member.rank >= len(used_devices(task.program)):
                return None
            options = RankOptions(steps=STEPS, recipe=RECIPE, stall_limit_s=60)
            return run_rank(task, member, workload, options=options, board=board, job=name)

        self.pool = RankPool(4, main, limit_s=60, board=board)

    def run(self, name: str) -> RunResult:
        answers = self.pool.call(name)
        return put_together(self.tasks[name][0], [a for a in answers if a is not None]).result


def task_of(plan: Plan) -> tuple[Task, Workload]:
    graph = NETWORK.graph
    code = ModuleGraph(
        graph,
        {
            op.name: OpCode(call=op.function, parameters={p: p for p in op.parameters})
            for op in NETWORK.ops
        },
    ).stages(plan)
    shapes = shapes_of()
    workload = Workload(
        code=code,
        state=parameters(),
        load=lambda step, turn, key: DATA[step][turn][key],
        shape_of=lambda tensor, _: shapes[graph.tensors.names[tensor]],
    )
    problem = Problem(graph=graph, cluster=flat_cluster(len(plan.devices)))
    program = lower(problem, plan)
    check(problem, plan, program)
    return Task(problem, plan, program, code), workload


def shapes_of() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    values, weights = dict(DATA[0][0]), parameters()
    for op in NETWORK.ops:
        made = op.function(
            *(values[name] for name in op.inputs), **{name: weights[name] for name in op.parameters}
        )
        parts = made if isinstance(made, tuple) else (made,)
        values.update(zip(op.outputs, parts, strict=True))
    return {name: (tuple(value.shape), value.dtype) for name, value in values.items()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    found = Ranks()
    yield found
    found.pool.close()


@pytest.fixture(scope="module")
def whole() -> RunResult:
    plan = plan_of([[0]], Shard.NONE)
    task, workload = task_of(plan)
    return interpret(
        task.problem,
        plan,
        task.code,
        state=workload.state,
        load=workload.load,
        options=RunOptions(steps=STEPS, recipe=RECIPE),
    )


@pytest.mark.parametrize("name", PLANS)
def test_ranks_that_divide_their_state_train_as_one_process(
    ranks: Ranks, whole: RunResult, name: str
) -> None:
    check_runnable(PLANS[name])
    result = ranks.run(name)
    assert gradient_error(result.state, whole.state) < 1e-9
    for step, expected in zip(result.steps, whole.steps, strict=True):
        assert gradient_error(step.gradients, expected.gradients) < 1e-9
        assert step.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in PLANS if "groups" in name])
def test_the_interpreter_knows_groups_that_hold_a_whole_each(
    ranks: Ranks, whole: RunResult, name: str
) -> None:
    task, workload = ranks.tasks[name]
    result = interpret(
        task.problem,
        task.plan,
        task.code,
        state=workload.state,
        load=workload.load,
        options=RunOptions(steps=STEPS, recipe=RECIPE),
    )
    assert gradient_error(result.state, whole.state) < 1e-9


def test_a_device_holds_its_part_and_gives_gathered_copies_back(ranks: Ranks) -> None:
    task, workload = ranks.tasks["parameters dp2 x pp2"]
    store = ParameterStore(task, 0, workload.state, RECIPE)
    names = task.borders[0].trained
    held = sum(tensor.numel() for tensor in store.tensors())
    assert held == sum(-(-workload.state[name].numel() // 2) for name in names)
    row = int(np.flatnonzero(task.program.kind == Kind.ALL_GATHER)[0])
    bucket = int(task.program.bucket[row])
    parts = store.outgoing(Kind.ALL_GATHER, bucket)
    for _ in range(2):
        store.incoming(Kind.ALL_GATHER, bucket, [torch.cat((part, part)) for part in parts])
        copies = store.weights(0, 0)[0]
        assert all(copy.untyped_storage().nbytes() for copy in copies.values())
        view = copies[names[0]][:1]
        assert store.outside(0, view).data_ptr() != view.data_ptr()
        assert store.outside(0, torch.ones(1)) is not view
        store.release(0)
        assert not any(copy.untyped_storage().nbytes() for copy in copies.values())
    with pytest.raises(InvalidInputError, match=r"divided.*gathered"):
        store.weights(0, 0)


def test_a_part_of_a_whole_parameter_costs_no_memory(ranks: Ranks) -> None:
    task, workload = ranks.tasks["optimizer dp2 x pp2"]
    store = ParameterStore(task, 1, workload.state, RECIPE)
    names = task.borders[0].trained
    assert sum(t.numel() for t in store.tensors()) == sum(workload.state[n].numel() for n in names)


def test_later_gradients_are_added_to_sums_that_nobody_else_holds(ranks: Ranks) -> None:
    task, workload = ranks.tasks["optimizer dp2 x pp2"]
    store, names = ParameterStore(task, 1, workload.state, RECIPE), task.borders[0].trained

    def ones() -> dict[str, torch.Tensor]:
        return {name: torch.ones_like(workload.state[name]) for name in names}

    assert store.sums_in_place(names) == {}
    shared = ones()
    store.add_gradients(shared)
    assert store.sums_in_place(names) == {}
    store.add_gradients(ones())
    sums = store.sums_in_place(names)
    assert list(sums) == list(names)
    assert all(bool((value == 2).all()) for value in sums.values())
    assert all(bool((value == 1).all()) for value in shared.values())


def test_groups_of_a_scatter() -> None:
    assert scatter_groups((4, 5, 6, 7), 4, 6) == ((4, 5, 6, 7), (6,))
    assert scatter_groups((4, 5, 6, 7), 2, 6) == ((6, 7), (4, 6))
    assert scatter_groups((4, 5, 6, 7), 1, 6) == ((6,), (4, 5, 6, 7))
