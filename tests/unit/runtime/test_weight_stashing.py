"""Weight stashing against a plain loop with delayed weights, which shares no code with it.

Stage s keeps ``W_s`` microbatches in flight: its replicas, and the largest W of the stages that
read from it. Microbatch m finds the weights after ``max(0, floor((m - W_s + 1) / round_s))``
updates, forward and backward. An update takes the mean of the gradients of a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.plan import Plan, Stage
from partita.core.problem import Schedule
from partita.testing.networks import Network, gradient_error, residual_network

LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    groups: Sequence[Sequence[int | tuple[int, ...]]]
    shares: Sequence[Sequence[int]]
    microbatches: int
    sizes: Sequence[int] = ()
    recompute: bool = False

    @property
    def stages(self) -> list[Stage]:
        return [
            Stage(
                devices=tuple((d,) if isinstance(d, int) else d for d in group),
                shares=tuple(shares),
            )
            for group, shares in zip(self.groups, self.shares, strict=True)
        ]


PIPELINES = {
    "one stage": Pipeline(groups=[[0]], shares=[[1]], microbatches=4),
    "four stages": Pipeline(groups=[[0], [1], [2], [3]], shares=[[1]] * 4, microbatches=9),
    "data parallel": Pipeline(groups=[[0, 1, 2]], shares=[[1, 1, 1]], microbatches=9),
    "3-1": Pipeline(groups=[[0, 1, 2], [3]], shares=[[1, 1, 1], [1]], microbatches=12),
    "2-3-1": Pipeline(
        groups=[[0, 1], [2, 3, 4], [5]], shares=[[1, 1], [1, 1, 1], [1]], microbatches=12
    ),
    "1-3-1": Pipeline(groups=[[0], [1, 2, 3], [4]], shares=[[1], [1] * 3, [1]], microbatches=12),
    "shares 5/3": Pipeline(groups=[[0, 1], [2]], shares=[[5, 3], [1]], microbatches=24),
    "shares 5/3 and 1/2/1": Pipeline(
        groups=[[0, 1], [2, 3, 4]], shares=[[5, 3], [1, 2, 1]], microbatches=16
    ),
    "unequal microbatches": Pipeline(
        groups=[[0], [1], [2]], shares=[[1]] * 3, microbatches=4, sizes=[3, 3, 3, 1]
    ),
    "a stage for each op": Pipeline(
        groups=[[op % 3] for op in range(11)], shares=[[1]] * 11, microbatches=14
    ),
    "there and back": Pipeline(groups=[[0], [1], [2], [1], [0]], shares=[[1]] * 5, microbatches=8),
    "replicas on shared devices": Pipeline(
        groups=[[0, 1], [1], [0, 1, 2], [2]],
        shares=[[1, 1], [1], [1, 1, 1], [1]],
        microbatches=12,
    ),
    "tensor parallel 2-4-2": Pipeline(
        groups=[[(0, 1)], [(2, 3, 4, 5)], [(0, 1)]], shares=[[1]] * 3, microbatches=5
    ),
    "two rounds over two devices": Pipeline(
        groups=[[0], [1], [0], [1]], shares=[[1]] * 4, microbatches=8
    ),
    "tensor parallel 2-1": Pipeline(groups=[[(0, 1)], [2]], shares=[[1], [1]], microbatches=6),
    "recomputing": Pipeline(
        groups=[[0], [1, 2], [3]], shares=[[1], [1, 1], [1]], microbatches=8, recompute=True
    ),
}


def microbatches_in_flight(
    network: Network, op_stage: Sequence[int], stages: Sequence[Stage]
) -> list[int]:
    """Return W of each stage."""
    made_in = {t: op_stage[op] for op, part in enumerate(network.ops) for t in part.outputs}
    readers: list[set[int]] = [set() for _ in stages]
    for op, part in enumerate(network.ops):
        for tensor in part.inputs:
            source = made_in.get(tensor, op_stage[op])
            readers[source] |= {op_stage[op]} - {source}
    result = [0] * len(stages)
    for index in reversed(range(len(stages))):
        later = max((result[reader] for reader in readers[index]), default=0)
        result[index] = len(stages[index].devices) + later
    return result


def train_with_delayed_weights(
    network: Network,
    op_stage: Sequence[int],
    stages: Sequence[Stage],
    parameters: dict[str, Tensor],
    data: Sequence[Sequence[dict[str, Tensor]]],
) -> dict[str, Tensor]:
    """Return the parameters after all steps; the pipeline runs empty after each."""
    in_flight = microbatches_in_flight(network, op_stage, stages)
    rounds = [sum(s.shares) for s in stages]
    stage_of = {
        name: op_stage[op]
        for op, part in enumerate(network.ops)
        for name in part.parameters
        if name != "frozen"
    }
    latest = dict(parameters)
    for microbatches in data:
        history = {name: [latest[name]] for name in stage_of}
        sums = {name: torch.zeros_like(latest[name]) for name in stage_of}
        for turn, inputs in enumerate(microbatches):
            leaves = dict(latest)
            for name, stage in stage_of.items():
                version = max(0, (turn - in_flight[stage] + 1) // rounds[stage])
                leaves[name] = history[name][version].clone().requires_grad_()
            network.loss(inputs, leaves).backward()
            for name, stage in stage_of.items():
                sums[name] += leaves[name].grad
                if (turn + 1) % rounds[stage] == 0:
                    step = LEARNING_RATE * sums[name] / rounds[stage]
                    history[name].append(history[name][-1] - step)
                    sums[name] = torch.zeros_like(sums[name])
        latest |= {name: versions[-1] for name, versions in history.items()}
    return latest


def plan_of(network: Network, pipeline: Pipeline) -> Plan:
    stages, num_ops = pipeline.stages, len(network.graph)
    devices = 1 + max(d for s in stages for team in s.devices for d in team)
    return Plan(
        fingerprint=network.graph.fingerprint,
        devices=tuple(f"d{d}" for d in range(devices)),
        stage_of=np.arange(num_ops) * len(stages) // num_ops,
        stages=tuple(stages),
        schedule=Schedule.PIPEDREAM,
        microbatch_sizes=np.array(pipeline.sizes or [2] * pipeline.microbatches),
        recompute=np.full(num_ops, pipeline.recompute),
    )


def inputs_of(network: Network, plan: Plan, *, steps: int) -> list[list[dict[str, Tensor]]]:
    return [
        [
            {name: torch.from_numpy(value) for name, value in inputs.items()}
            for inputs in network.microbatches(plan.microbatch_sizes.tolist(), 4 + step)
        ]
        for step in range(steps)
    ]


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_stashed_weights_equal_a_replay_with_delayed_weights(run_network, pipeline) -> None:
    network = residual_network(tied=False)
    plan = plan_of(network, pipeline)
    parameters = {n: torch.from_numpy(v) for n, v in network.parameters(3).items()}
    data = inputs_of(network, plan, steps=2)
    expected = train_with_delayed_weights(
        network, plan.stage_of.tolist(), plan.stages, parameters, data
    )
    result = run_network(network, plan, parameters, data)
    assert gradient_error(result.state, expected) < 1e-10
    assert gradient_error(parameters, expected) > 1e-3


def test_the_first_stage_keeps_as_many_versions_as_microbatches_in_flight(run_network) -> None:
    network = residual_network(tied=False)
    plan = plan_of(network, Pipeline(groups=[[0], [1], [2]], shares=[[1]] * 3, microbatches=9))
    parameters = {n: torch.from_numpy(v) for n, v in network.parameters(3).items()}
    result = run_network(network, plan, parameters, inputs_of(network, plan, steps=1))
    assert [result.statistics[d].peak_versions for d in plan.devices] == [3, 2, 1]
