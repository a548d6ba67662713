"""Carries out a Program in one process, with torch and real autograd: the meaning of a Program.

The devices take turns: each runs as far as it can, and one that waits for a message or a meeting
lets the next one run. When none can go on, the Program is wrong, and the error names what
each device is stuck at; there is no hang.

Equal to one device means: equal to one process that runs the same microbatches in the same order.
Every member of a tensor-parallel group runs the whole op, so of tensor parallelism only the routing
is tested here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Program
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.device_parts import Load, Wait, Waiting
from partita.runtime.parameters import ParameterStore
from partita.runtime.results import RunResult, merged, step_result
from partita.runtime.stage_code import StageCode
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe
from partita.runtime.transport import MemoryTransport

_NAMED_WHEN_STUCK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a Program is interpreted.

    Attributes:
        steps: Number of steps.
        seed: Seed of all random numbers.
        recipe: What is trained with.
        blocking: Whether SEND and RECV hold their device; those that stand together are a batch.
    """

    steps: int = 1
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    blocking: bool = False


def interpret(
    problem: Problem,
    plan: Plan,
    code: StageCode,
    *,
    state: Mapping[str, Tensor],
    load: Load,
    program: Program | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Run a plan in one process.

    Args:
        problem: The problem.
        plan: A plan for it.
        code: The code of its stages.
        state: Initial parameters and buffers by name; not changed.
        load: Gives the inputs of the model.
        program: The Program of the plan, if it was lowered before.
        options: How to run it.

    Raises:
        InvalidInputError: The Program cannot be carried out, or replicas end with different
            parameters; names the instructions that are stuck, or the parameter.
    """
    options = options or RunOptions()
    task = Task(problem, plan, program or lower(problem, plan), code)
    transport = MemoryTransport()
    stores = [
        ParameterStore(task, device, state, options.recipe) for device in range(len(plan.devices))
    ]
    loops = [
        DeviceLoop(
            task,
            device,
            transport,
            store=store,
            runner=StageRunner(task, store, seed=options.seed),
            load=load,
            blocking=options.blocking,
        )
        for device, store in enumerate(stores)
    ]
    _take_turns(loops, options.steps)
    return RunResult(
        steps=tuple(
            step_result(task, [loop.records[step] for loop in loops])
            for step in range(options.steps)
        ),
        state=merged([store.state() for store in stores], task),
        statistics={name: loop.statistics for name, loop in zip(plan.devices, loops, strict=True)},
    )


def _take_turns(loops: Sequence[DeviceLoop], steps: int) -> None:
    """Run all devices to the end, each as far as it can at a time."""
    players = {index: _all_steps(loop, steps) for index, loop in enumerate(loops)}
    waits: dict[int, Wait] = {}
    while players:
        moved = False
        for index, player in list(players.items()):
            before = loops[index].executed
            wait = next(player, None)
            moved = moved or wait is None or loops[index].executed > before
            if wait is None:
                del players[index]
                waits.pop(index, None)
            else:
                waits[index] = wait
        if players and not moved:
            _refuse_stuck([waits[index] for index in players])


def _all_steps(loop: DeviceLoop, steps: int) -> Waiting[None]:
    for step in range(steps):
        yield from loop.play(step)


def _refuse_stuck(waits: Sequence[Wait]) -> None:
    named = "; ".join(wait.reason for wait in waits[:_NAMED_WHEN_STUCK])
    more = len(waits) - _NAMED_WHEN_STUCK
    rest = f"; and {more} more devices" if more > 0 else ""
    raise InvalidInputError(f"no device can go on: {named}{rest}")
