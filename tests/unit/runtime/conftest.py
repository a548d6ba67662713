"""Runs small networks by a plan, for tests that should not know how that is done."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from partita.core.plan import Plan
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Program
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.results import RunResult
from partita.runtime.stage_code import ModuleGraph, OpCode
from partita.testing.builders import flat_cluster
from partita.testing.networks import Network

RunNetwork = Callable[..., RunResult]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def problem_of(network: Network, plan: Plan) -> Problem:
    infers = plan.schedule is Schedule.INFERENCE
    return Problem(
        graph=network.graph,
        cluster=flat_cluster(len(plan.devices)),
        objective=Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING),
    )


@pytest.fixture
def make_problem() -> Callable[[Network, Plan], Problem]:
    return problem_of


@pytest.fixture
def run_network() -> RunNetwork:
    """Return what runs a network by a plan on given parameters and data[step][microbatch]."""

    def run(
        network: Network,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        data: Sequence[Sequence[Mapping[str, Tensor]]],
        program: Program | None = None,
        **options: object,
    ) -> RunResult:
        code = ModuleGraph(
            network.graph,
            {
                op.name: OpCode(call=op.function, parameters={p: p for p in op.parameters})
                for op in network.ops
            },
        )
        return interpret(
            problem_of(network, plan),
            plan,
            code.stages(plan),
            state=parameters,
            load=lambda step, microbatch, name: data[step][microbatch][name],
            program=program,
            options=RunOptions(steps=len(data), **options),
        )

    return run
