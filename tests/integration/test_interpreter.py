"""Every schedule and every shape of plan, carried out by the interpreter, against plain autograd.

The reference is one process that runs the same microbatches in the same order, without a graph, a
stage or a Program. Float64, so that what is left is the order of additions.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from partita.core.placement import placement_plan
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.results import RunResult
from partita.runtime.stage_code import ModuleGraph, OpCode
from partita.runtime.training.recipe import Recipe
from partita.testing.builders import flat_cluster
from partita.testing.networks import (
    Network,
    gradient_error,
    random_network,
    reference,
    residual_network,
)

TOLERANCE = 1e-10
FLUSHING = [s for s in Schedule if s not in (Schedule.PIPEDREAM, Schedule.INFERENCE)]
LEARNING_RATE = 0.05


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Devices of each stage, and what is special about a plan.

    A device is a replica by itself, a tuple of devices a tensor-parallel one.
    """

    groups: Sequence[Sequence[int | tuple[int, ...]]]
    sizes: Sequence[int] = (2,) * 6
    stage_of: Sequence[int] = ()
    shares: Mapping[int, tuple[int, ...]] | None = None
    tied: bool = True


SHAPES = {
    "one device": Shape(groups=[[0]]),
    "four stages": Shape(groups=[[0], [1], [2], [3]]),
    "uneven stages": Shape(groups=[[0], [1], [2]], stage_of=[0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2]),
    "a stage for each op": Shape(groups=[[op % 3] for op in range(11)]),
    "fewer microbatches than stages": Shape(groups=[[0], [1], [2], [3]], sizes=[2, 2]),
    "unequal microbatches": Shape(groups=[[0], [1], [2]], sizes=[3, 3, 3, 1]),
    "unequal microbatches and replicas": Shape(groups=[[0, 1], [2]], sizes=[3, 3, 3, 1]),
    "data parallel": Shape(groups=[[0, 1, 2, 3]], sizes=[2] * 8),
    "3-1": Shape(groups=[[0, 1, 2], [3]]),
    "2-3-1": Shape(groups=[[0, 1], [2, 3, 4], [5]]),
    "1-3-1": Shape(groups=[[0], [1, 2, 3], [4]]),
    "shares 5/3": Shape(groups=[[0], [1, 2]], shares={1: (5, 3)}, sizes=[2] * 16),
    "shares 5/3 and 1/2/1": Shape(
        groups=[[0, 1], [2, 3, 4]], shares={0: (5, 3), 1: (1, 2, 1)}, sizes=[2] * 8
    ),
    "two rounds over two devices": Shape(groups=[[0], [1], [0], [1]], sizes=[2] * 8),
    "two rounds, odd microbatches": Shape(groups=[[0], [1], [0], [1]], sizes=[2] * 7),
    "three rounds over two replicas each": Shape(
        groups=[[0, 1], [2, 3]] * 3, sizes=[1] * 8, tied=False
    ),
    "there and back": Shape(groups=[[0], [1], [2], [1], [0]]),
    "replicas on shared devices": Shape(groups=[[0, 1], [1], [0, 1, 2], [2]]),
    "replicas on crossed devices": Shape(groups=[[0, 1, 2], [2, 3, 0]]),
    "tensor parallel 2-1": Shape(groups=[[(0, 1)], [2]], tied=False),
    "tensor parallel 4-1": Shape(groups=[[(0, 1, 2, 3)], [4]], tied=False),
    "tensor parallel 1-2": Shape(groups=[[0], [(1, 2)]], tied=False),
    "tensor parallel 2-4-2": Shape(groups=[[(0, 1)], [(2, 3, 4, 5)], [(0, 1)]], tied=False),
    "tensor parallel replicas, tied": Shape(groups=[[(0, 1), (2, 3)], [(4, 5)]]),
}
SHARDED = {
    "data parallel": SHAPES["data parallel"],
    "3-1": SHAPES["3-1"],
    "2-3-1": SHAPES["2-3-1"],
    "1-3-1": SHAPES["1-3-1"],
    "replicas of tensor parallel groups": Shape(groups=[[(0, 1), (2, 3)], [(4, 5)]]),
}


def plan_of(
    network: Network,
    shape: Shape,
    schedule: Schedule,
    *,
    shard: Shard = Shard.NONE,
    recompute: bool | Sequence[bool] = False,
) -> Plan:
    groups = [[(d,) if isinstance(d, int) else d for d in group] for group in shape.groups]
    num_ops, num_devices = len(network.graph), 1 + max(d for g in groups for r in g for d in r)
    return Plan(
        fingerprint=network.graph.fingerprint,
        devices=flat_cluster(num_devices).device_names,
        stage_of=np.array(shape.stage_of or np.arange(num_ops) * len(groups) // num_ops),
        stages=tuple(
            Stage(
                devices=tuple(group),
                shares=(shape.shares or {}).get(index, ()),
                shard=shard if len(group) > 1 else Shard.NONE,
            )
            for index, group in enumerate(groups)
        ),
        schedule=schedule,
        microbatch_sizes=np.array(shape.sizes),
        recompute=np.broadcast_to(recompute, num_ops),
    )


class Trial:
    """A network with data, to be run in one go and by a plan."""

    def __init__(self, network: Network, plan: Plan, *, steps: int = 1) -> None:
        infers = plan.schedule is Schedule.INFERENCE
        self.network, self.plan, self.steps = network, plan, steps
        self.problem = Problem(
            graph=network.graph,
            cluster=flat_cluster(len(plan.devices)),
            objective=Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING),
        )
        self.state = {n: torch.from_numpy(v) for n, v in network.parameters(1).items()}
        self.data = [
            [
                {name: torch.from_numpy(value) for name, value in inputs.items()}
                for inputs in network.microbatches(plan.microbatch_sizes.tolist(), 2 + step)
            ]
            for step in range(steps)
        ]

    def interpret(self, **options: object) -> RunResult:
        code = ModuleGraph(
            self.network.graph,
            {
                op.name: OpCode(call=op.function, parameters={p: p for p in op.parameters})
                for op in self.network.ops
            },
        )
        return interpret(
            self.problem,
            self.plan,
            code.stages(self.plan),
            state=self.state,
            load=lambda step, microbatch, name: self.data[step][microbatch][name],
            options=RunOptions(
                steps=self.steps, recipe=Recipe(learning_rate=LEARNING_RATE), **options
            ),
        )

    def expect(self, step: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
        weights = [size / self.plan.samples for size in self.plan.microbatch_sizes.tolist()]
        return reference(self.network, self.state, self.data[step], weights)

    def check(self, **options: object) -> RunResult:
        result = self.interpret(**options)
        losses, gradients = self.expect()
        (step,) = result.steps
        np.testing.assert_allclose(step.losses, losses, rtol=TOLERANCE)
        if self.plan.schedule is Schedule.INFERENCE:
            assert step.gradients == {}
        else:
            assert gradient_error(step.gradients, gradients) < TOLERANCE
        return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("schedule", [*FLUSHING, Schedule.INFERENCE])
def test_every_schedule_runs_every_shape(schedule: Schedule, shape: Shape) -> None:
    network = residual_network(tied=shape.tied)
    Trial(network, plan_of(network, shape, schedule)).check()


@pytest.mark.parametrize("shape", SHARDED.values(), ids=SHARDED)
@pytest.mark.parametrize("shard", [s for s in Shard if s is not Shard.NONE])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_every_schedule_runs_every_kind_of_sharding(
    schedule: Schedule, shard: Shard, shape: Shape
) -> None:
    network = residual_network(tied=shape.tied)
    Trial(network, plan_of(network, shape, schedule, shard=shard)).check()


@pytest.mark.parametrize("shape", ["four stages", "2-3-1", "there and back", "one device"])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_recomputation_changes_no_gradient(schedule: Schedule, shape: str) -> None:
    network = residual_network()
    some = [op % 4 == 0 for op in range(len(network.graph))]
    for recompute in (True, some):
        Trial(network, plan_of(network, SHAPES[shape], schedule, recompute=recompute)).check()


@pytest.mark.parametrize("schedule", FLUSHING)
def test_sharded_parameters_are_gathered_for_recomputation(schedule: Schedule) -> None:
    network = residual_network()
    plan = plan_of(
        network,
        SHAPES["1-3-1"],
        schedule,
        shard=Shard.PARAMETERS,
        recompute=[True, False] * 5 + [True],
    )
    Trial(network, plan).check()


@pytest.mark.parametrize("schedule", [*FLUSHING, Schedule.INFERENCE])
@pytest.mark.parametrize("seed", range(4))
def test_a_placement_visits_a_device_many_times(schedule: Schedule, seed: int) -> None:
    network = residual_network()
    device_of = np.random.default_rng(seed).integers(0, 3, len(network.graph))
    plan = placement_plan(
        network.graph,
        ("d0", "d1", "d2"),
        device_of,
        schedule=schedule,
        microbatch_sizes=np.array([3, 3, 3, 1]),
    )
    assert len(plan.stages) > 3
    Trial(network, plan).check()


@pytest.mark.parametrize("shape", ["four stages", "2-3-1", "tensor parallel 2-4-2"])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_blocking_transfers_give_the_same_bits(schedule: Schedule, shape: str) -> None:
    network = residual_network(tied=False)
    trial = Trial(network, plan_of(network, SHAPES[shape], schedule), steps=2)
    overlapped, blocking = trial.interpret(), trial.interpret(blocking=True)
    for one, other in zip(overlapped.steps, blocking.steps, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(g, other.gradients[n]) for n, g in one.gradients.items())


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_parameters_after_several_steps_equal_plain_training(
    schedule: Schedule, shard: Shard
) -> None:
    network = residual_network()
    trial = Trial(network, plan_of(network, SHAPES["2-3-1"], schedule, shard=shard), steps=3)
    result = trial.interpret()
    for step in range(trial.steps):
        losses, gradients = trial.expect(step)
        np.testing.assert_allclose(result.steps[step].losses, losses, rtol=TOLERANCE)
        assert gradient_error(result.steps[step].gradients, gradients) < TOLERANCE
        trial.state |= {n: trial.state[n] - LEARNING_RATE * g for n, g in gradients.items()}
    assert gradient_error(result.state, trial.state) < TOLERANCE


def test_outputs_are_those_of_the_model_in_order_of_microbatches() -> None:
    network = residual_network()
    shape = replace(SHAPES["2-3-1"], sizes=[3] * 5 + [1])
    trial = Trial(network, plan_of(network, shape, Schedule.INFERENCE))
    step = trial.interpret().steps[0]
    assert [part.shape[0] for part in step.outputs["logits"]] == [3] * 5 + [1]
    assert step.loss == pytest.approx(
        sum(m * loss for m, loss in zip(shape.sizes, step.losses, strict=True)) / 16
    )
    for inputs, logits, loss in zip(
        trial.data[0], step.outputs["logits"], step.losses, strict=True
    ):
        assert float(((logits - inputs["y"]) ** 2).mean()) == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("shape", ["four stages", "2-3-1", "tensor parallel 4-1", "there and back"])
def test_statistics_agree_with_the_program(shape: str) -> None:
    network = residual_network(tied=False)
    sizes = [3] * 11 + [1]
    trial = Trial(
        network, plan_of(network, replace(SHAPES[shape], sizes=sizes), Schedule.ONE_F_ONE_B)
    )
    program = lower(trial.problem, trial.plan)
    statistics = trial.interpret().statistics
    for device, name in enumerate(program.devices):
        rows = slice(int(program.ptr[device]), int(program.ptr[device + 1]))
        kinds, size = program.kind[rows], program.bytes[rows]
        assert statistics[name].sent_bytes == int(size[kinds == Kind.SEND].sum())
        assert statistics[name].instructions.total() == len(kinds)


def test_1f1b_keeps_as_many_microbatches_as_stages_follow() -> None:
    network = residual_network()
    peaks = {}
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        trial = Trial(network, plan_of(network, SHAPES["four stages"], schedule))
        peaks[schedule] = [s.peak_in_flight for s in trial.interpret().statistics.values()]
    assert peaks == {Schedule.GPIPE: [6] * 4, Schedule.ONE_F_ONE_B: [4, 3, 2, 1]}


def random_stages(
    rng: random.Random, num_stages: int, degrees: Sequence[int]
) -> tuple[int, list[Stage]]:
    """Return the number of devices, and stages with random replicas, shares and sharding."""
    teams: list[tuple[int, ...]] = []
    num_devices = 0
    for _ in range(rng.randint(1, 4)):
        tp = rng.choice(degrees)
        teams.append(tuple(range(num_devices, num_devices + tp)))
        num_devices += tp
    stages = []
    for _ in range(num_stages):
        tp = len(rng.choice(teams))
        alike = [team for team in teams if len(team) == tp]
        replicas = tuple(rng.sample(alike, rng.randint(1, min(3, len(alike)))))
        shard = rng.choice(list(Shard)) if len(replicas) > 1 else Shard.NONE
        shares = tuple(rng.randint(1, 2) for _ in replicas)
        if shard in (Shard.GRADIENTS, Shard.PARAMETERS):
            shares = ()
        stages.append(Stage(devices=replicas, shares=shares, shard=shard))
    return num_devices, stages


def gathers_on_shared_devices(stages: Sequence[Stage]) -> bool:
    """Return whether a stage divides its parameters over devices that run other stages too."""
    uses = Counter(device for stage in stages for team in stage.devices for device in team)
    return any(
        stage.shard is Shard.PARAMETERS and any(uses[d] > 1 for team in stage.devices for d in team)
        for stage in stages
    )


QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(QUICK, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(2, 9),
    num_devices=st.integers(1, 4),
    schedule=st.sampled_from(FLUSHING),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    blocking=st.booleans(),
)
def test_random_placements_of_random_networks(
    seed: int,
    num_ops: int,
    num_devices: int,
    schedule: Schedule,
    sizes: list[int],
    blocking: bool,
) -> None:
    rng = random.Random(seed)
    network = random_network(rng, num_ops=num_ops)
    plan = placement_plan(
        network.graph,
        flat_cluster(num_devices).device_names,
        np.array([rng.randrange(num_devices) for _ in range(num_ops)]),
        schedule=schedule,
        microbatch_sizes=np.array(sizes),
    )
    recompute = np.array([rng.random() < 0.3 for _ in range(num_ops)])
    Trial(network, replace(plan, recompute=recompute)).check(blocking=blocking)


@settings(QUICK, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(2, 9),
    num_stages=st.integers(1, 4),
    degrees=st.sampled_from([(1,), (2,), (1, 2, 4)]),
    schedule=st.sampled_from(FLUSHING),
    blocking=st.booleans(),
)
def test_random_pipelines_of_random_networks(
    seed: int,
    num_ops: int,
    num_stages: int,
    degrees: tuple[int, ...],
    schedule: Schedule,
    blocking: bool,
) -> None:
    rng = random.Random(seed)
    network = random_network(rng, num_ops=num_ops, tied=len(degrees) == 1)
    num_stages = min(num_stages, num_ops)
    cuts = sorted(rng.sample(range(1, num_ops), num_stages - 1))
    num_devices, stages = random_stages(rng, num_stages, degrees)
    turns = lcm(*(stage.round for stage in stages))
    plan = Plan(
        fingerprint=network.graph.fingerprint,
        devices=flat_cluster(num_devices).device_names,
        stage_of=np.searchsorted(cuts, np.arange(num_ops), side="right"),
        stages=tuple(stages),
        schedule=schedule,
        microbatch_sizes=np.array([rng.randint(1, 3) for _ in range(turns)]),
    )
    trial = Trial(network, plan)
    try:
        lower(trial.problem, plan)
    except InvalidInputError:
        assert gathers_on_shared_devices(stages)
        reject()
    trial.check(blocking=blocking)
