"""Modules with buffers and random numbers, by a plan and in one go."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.plan import Plan, Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.results import RunResult
from partita.runtime.stage_code import Call, ModuleGraph, OpCode, op_seed
from partita.testing.builders import flat_cluster
from partita.testing.networks import gradient_error

OPS = ("first", "norm", "drop", "second", "loss")
DROP = OPS.index("drop")
SEED = 7
SIZES = (4, 4, 4, 2)


def make_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "first": nn.Linear(3, 4, dtype=torch.float64),
        "norm": nn.BatchNorm1d(4, dtype=torch.float64),
        "drop": nn.Dropout(0.4),
        "second": nn.Linear(4, 3, dtype=torch.float64),
        "loss": nn.MSELoss(),
    }


def make_code() -> ModuleGraph:
    modules = make_modules()
    names, uses, buffers = [], [], []
    for op, module in enumerate(modules.values()):
        held = [*module.named_parameters(), *module.named_buffers()]
        names += [f"{OPS[op]}.{local}" for local, _ in held]
        uses += [op] * len(held)
        buffers += [not isinstance(value, nn.Parameter) for _, value in held]
    graph = Graph(
        name="modules",
        ops=OpTable(names=OPS),
        costs=(OpCosts(forward_s=np.ones(len(OPS))),),
        tensors=TensorTable(
            names=("x", "y", *(f"{op}.out" for op in OPS)), producer=np.array([-1, -1, *range(5)])
        ),
        edges=EdgeTable(tensor=np.array([0, 2, 3, 4, 5, 1]), reader=np.array([0, 1, 2, 3, 4, 4])),
        parameters=ParameterTable(
            names=tuple(names),
            trainable=~np.array(buffers),
            buffer=np.array(buffers),
            use_op=np.array(uses),
            use_parameter=np.arange(len(names)),
        ),
        outputs=np.array([5]),
        loss=6,
    )
    return ModuleGraph(
        graph,
        {
            op: OpCode(
                call=module,
                parameters={
                    local: f"{op}.{local}"
                    for local, _ in [*module.named_parameters(), *module.named_buffers()]
                },
            )
            for op, module in modules.items()
        },
    )


def inputs(step: int, microbatch: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + (name == "y"))
    return torch.randn(SIZES[microbatch], 3, generator=generator, dtype=torch.float64)


def train_in_one_go(
    steps: int, microbatches: Sequence[int] = range(4)
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return gradients of the last step, state and losses of plain training."""
    modules = nn.ModuleDict(make_modules())
    losses = []
    for step in range(steps):
        modules.zero_grad()
        for microbatch in microbatches:
            hidden = modules["norm"](modules["first"](inputs(step, microbatch, "x")))
            torch.manual_seed(op_seed(Call(seed=SEED, step=step, microbatch=microbatch), DROP))
            out = modules["second"](modules["drop"](hidden))
            loss = modules["loss"](out, inputs(step, microbatch, "y"))
            losses.append(loss.item())
            (loss * SIZES[microbatch] / sum(SIZES)).backward()
        gradients = {name: p.grad.clone() for name, p in modules.named_parameters()}
        with torch.no_grad():
            for parameter in modules.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return gradients, {n: v.detach() for n, v in modules.state_dict().items()}, losses


def plan_of(graph: Graph, groups: Sequence[Sequence[int]], schedule: Schedule, **more) -> Plan:
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(f"d{d}" for d in range(1 + max(d for g in groups for d in g))),
        stage_of=np.arange(len(OPS)) * len(groups) // len(OPS),
        stages=tuple(Stage(devices=tuple((d,) for d in group)) for group in groups),
        schedule=schedule,
        microbatch_sizes=np.array(SIZES),
        **more,
    )


def run(plan: Plan, *, steps: int = 1, seed: int = SEED) -> RunResult:
    code = make_code()
    infers = plan.schedule is Schedule.INFERENCE
    problem = Problem(
        graph=code.graph,
        cluster=flat_cluster(len(plan.devices)),
        objective=Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING),
    )
    return interpret(
        problem,
        plan,
        code.stages(plan),
        state=code.state(),
        load=inputs,
        options=RunOptions(steps=steps, seed=seed),
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "schedule", [s for s in Schedule if s not in (Schedule.PIPEDREAM, Schedule.INFERENCE)]
)
@pytest.mark.parametrize(
    "groups", [[[0]], [[0], [1], [2]], [[0], [1], [0], [1], [0]]], ids=["one", "three", "ring"]
)
def test_dropout_and_batch_norm_equal_one_process(groups, schedule, recompute) -> None:
    plan = plan_of(make_code().graph, groups, schedule, recompute=recompute)
    result = run(plan, steps=2)
    gradients, state, losses = train_in_one_go(2)
    np.testing.assert_allclose([*result.steps[0].losses, *result.steps[1].losses], losses)
    assert gradient_error(result.steps[1].gradients, gradients) < 1e-10
    assert set(result.state) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-10, atol=1e-12)
    assert int(result.state["norm.num_batches_tracked"]) == 8


def test_dropout_equals_one_process_on_replicated_stages() -> None:
    """Batch norm only sees microbatches, so replicas change its statistics and no gradient."""
    plan = plan_of(make_code().graph, [[0], [1, 2], [3]], Schedule.ONE_F_ONE_B)
    result = run(plan)
    gradients, _, losses = train_in_one_go(1)
    np.testing.assert_allclose(result.steps[0].losses, losses)
    assert gradient_error(result.steps[0].gradients, gradients) < 1e-10


def test_running_statistics_of_a_replicated_stage_are_those_of_replica_0() -> None:
    result = run(plan_of(make_code().graph, [[0, 1]], Schedule.ONE_F_ONE_B))
    _, state, _ = train_in_one_go(1, microbatches=[0, 2])
    assert int(result.state["norm.num_batches_tracked"]) == 2
    torch.testing.assert_close(result.state["norm.running_mean"], state["norm.running_mean"])


def test_random_numbers_depend_on_seed_step_and_microbatch_alone() -> None:
    graph = make_code().graph
    one = plan_of(graph, [[0]], Schedule.GPIPE)
    three = plan_of(graph, [[0], [1], [2]], Schedule.ONE_F_ONE_B)
    assert run(one).steps[0].losses == run(three).steps[0].losses
    assert run(one).steps[0].losses != run(one, seed=8).steps[0].losses
    call = Call(seed=1, step=2, microbatch=3)
    seeds = {
        op_seed(other, op)
        for other in (
            call,
            replace(call, seed=0),
            replace(call, step=0),
            replace(call, microbatch=0),
        )
        for op in (0, 1)
    }
    assert len(seeds) == 8
    assert op_seed(call, 1) == op_seed(replace(call, recomputing=True, training=False), 1)


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    code = make_code()
    torch.manual_seed(5)
    plan = plan_of(code.graph, [[0], [1]], Schedule.GPIPE)
    problem = Problem(graph=code.graph, cluster=flat_cluster(2))
    interpret(problem, plan, code.stages(plan), state=code.state(), load=inputs)
    assert torch.equal(torch.rand(3), expected)


def test_inference_evaluates_and_changes_nothing() -> None:
    code = make_code()
    result = run(plan_of(code.graph, [[0], [1, 2], [3]], Schedule.INFERENCE))
    modules = nn.ModuleDict(make_modules()).eval()
    for microbatch, out in enumerate(result.steps[0].outputs["second.out"]):
        hidden = modules["norm"](modules["first"](inputs(0, microbatch, "x")))
        torch.testing.assert_close(out, modules["second"](hidden))
    before = code.state()
    assert all(torch.equal(value, before[name]) for name, value in result.state.items())
    assert result.steps[0].gradients == {}
