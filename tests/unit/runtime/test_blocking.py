"""Blocking transfers: messages that stand together are posted together, then waited for."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.plan import Plan, pipeline_stages
from partita.core.problem import Problem, Schedule
from partita.core.program import Kind
from partita.program.lower import lower
from partita.runtime import interpreter
from partita.runtime.transport import MemoryTransport, Message, Pending
from partita.testing.networks import Network, residual_network

NETWORK = residual_network(tied=False)


@dataclass(frozen=True)
class Watched:
    """A message under way that says when it is asked for; a second answer is an error."""

    pending: Pending[Tensor]
    events: list[str]
    answered: list[bool]

    def poll(self) -> Tensor | None:
        assert not self.answered, "asked again after it had arrived"
        value = self.pending.poll()
        if value is not None:
            self.answered.append(True)
            self.events.append("arrived")
        return value


class WatchedTransport(MemoryTransport):
    """Writes down what each device posts and sees arrive."""

    def __init__(self, events: dict[int, list[str]]) -> None:
        super().__init__()
        self._events = events

    def send(self, message: Message, value: Tensor) -> Pending[Tensor]:
        self._events[message.source].append("posted")
        return Watched(super().send(message, value), self._events[message.source], [])

    def receive(self, message: Message) -> Pending[Tensor]:
        self._events[message.target].append("posted")
        return Watched(super().receive(message), self._events[message.target], [])


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Return what devices post and see arrive in the interpreter, by device."""
    found: dict[int, list[str]] = {device: [] for device in range(3)}
    monkeypatch.setattr(interpreter, "MemoryTransport", lambda: WatchedTransport(found))
    return found


def test_adjacent_messages_are_one_batch(
    events: dict[int, list[str]],
    make_problem: Callable[[Network, Plan], Problem],
    run_network: Callable[..., Any],
) -> None:
    plan = Plan(
        fingerprint=NETWORK.graph.fingerprint,
        devices=("d0", "d1", "d2"),
        stage_of=np.arange(11) * 3 // 11,
        stages=pipeline_stages([[0], [1], [2]]),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=np.full(4, 2),
    )
    parameters = {n: torch.from_numpy(v) for n, v in NETWORK.parameters(1).items()}
    data = [
        {n: torch.from_numpy(v) for n, v in inputs.items()}
        for inputs in NETWORK.microbatches([2] * 4, 2)
    ]
    run_network(NETWORK, plan, parameters, [data], blocking=True)
    program = lower(make_problem(NETWORK, plan), plan)
    sizes = []
    for device, seen in events.items():
        rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
        travels = [program.kind[row] in (Kind.SEND, Kind.RECV) for row in rows]
        batches = [len(list(run)) for travel, run in groupby(travels) if travel]
        expected = [event for n in batches for event in ["posted"] * n + ["arrived"] * n]
        assert seen == expected
        sizes += batches
    assert max(sizes) > 1
