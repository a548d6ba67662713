"""Stages of which some ops run again in backward: the same numbers, in the memory forecast."""

import gc
from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.recomputation import Recomputation
from partita.capture.setting import Example
from partita.core.cluster import Cluster, Device
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Objective, Problem
from partita.cost.memory import saved_by_stage
from partita.errors import InvalidInputError
from partita.profiler.measure.measure import ProfileOptions, measure
from partita.profiler.memory import LiveBytes
from partita.runtime.stage_code import Call

WIDTH, SAMPLES = 64, 32


class Block(nn.Module):
    """Dropout, statistics that change, a write in place, an activation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y = self.second(nn.functional.gelu(self.first(self.norm(x))))
        return nn.functional.relu_(self.drop(y)) + x


class Model(nn.Module):
    """Two blocks with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh().square().mean()


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    torch.manual_seed(1)
    return capture(Model(), Example(args=(torch.randn(SAMPLES, WIDTH),)), loss=lambda out, _: out)


def plan_of(graph: Graph, again: np.ndarray) -> Plan:
    return Plan(
        fingerprint=graph.fingerprint,
        devices=("d0",),
        stage_of=np.zeros(len(graph), dtype=np.int32),
        stages=(Stage(devices=((0,),)),),
        microbatch_sizes=np.array([SAMPLES]),
        recompute=again,
    )


def run(
    captured: CapturedModel, again: np.ndarray, *, early: bool = False, twice: bool = False
) -> tuple[Mapping[str, Tensor], float, float]:
    """Return gradients and changed buffers, what was live after forward, and the peak after it."""
    graph, table = captured.graph, captured.graph.parameters
    held = {n: captured.parameters[n].detach().clone() for n in table.names}
    leaves = [n for n, t in zip(table.names, table.trainable, strict=True) if t]
    for name in leaves:
        held[name].requires_grad_()
    first = {n: t.clone() for n, t in held.items() if n not in leaves}
    stages = captured.stages(plan_of(graph, again))
    torch.manual_seed(2)
    x = torch.randn(SAMPLES, WIDTH)
    left = Recomputation(lambda: {**held, **first}, nullcontext)
    live = LiveBytes()
    for tensor in (*held.values(), *first.values(), *captured.constants, x):
        live.watch(tensor)
    before = live.now
    with live:
        made = stages.run(0, {graph.tensors.names[0]: x}, held, Call(recomputation=left))
        loss = made[graph.tensors.names[graph.loss]]
        gc.collect()
        kept = live.now - before
        live.restart()
        if early:
            left.now()
        wanted = [held[n] for n in leaves]
        if twice:
            torch.autograd.grad(loss, wanted, retain_graph=True)
        found = torch.autograd.grad(loss, wanted)
    buffers = {n: t for n, t in held.items() if n not in leaves}
    return {**dict(zip(leaves, found, strict=True)), **buffers}, kept, live.peak - before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", [{}, {"early": True}, {"twice": True}])
def test_any_ops_run_again_with_the_same_bits(captured, seed: int, how: dict[str, bool]) -> None:
    count = len(captured.graph)
    expected, _, _ = run(captured, np.zeros(count, dtype=bool))
    again = np.random.default_rng(seed).random(count) < 0.5
    found, _, _ = run(captured, again, **how)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_what_is_live_after_forward_is_what_the_forecast_says(captured) -> None:
    example = Example(args=(torch.randn(SAMPLES, WIDTH),))
    options = ProfileOptions(rounds=1, warmup=0)
    graph = measure(captured, example, loss=lambda out, _: out, options=options).graph
    problem = Problem(
        graph=graph,
        cluster=Cluster(devices=[Device(name="d0", memory_bytes=1e9)]),
        objective=Objective(microbatch_size=SAMPLES),
    )
    count = len(graph)
    whole = run(captured, np.zeros(count, dtype=bool))
    again = np.arange(count) < count // 2
    found = run(captured, again)
    (((forecast,),), ((brought,),)) = saved_by_stage(
        problem, plan_of(graph, again), np.array([float(SAMPLES)])
    )
    assert found[1] < 0.7 * whole[1]
    assert found[1] == pytest.approx(forecast, rel=0.02)
    assert brought > 0


def test_ops_that_do_not_do_the_same_twice_are_refused() -> None:
    calls = []

    def again(inputs, parameters) -> None:
        calls.append(1)

    left = Recomputation(dict, nullcontext)
    x = torch.ones(3, requires_grad=True)
    with left.span(again, [x], set()):
        y = (x * 2).exp()
    with pytest.raises(InvalidInputError, match=r"saved 1 tensors .*, and 0"):
        y.sum().backward()
    assert calls == [1]
