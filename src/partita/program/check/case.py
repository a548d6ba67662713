"""A Program beside its plan and problem, with the tables that several proofs share."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.core.program import Program
from partita.errors import InvalidInputError
from partita.program.layout import Crossings, Layout, crossings


class Homes(NamedTuple):
    """The places where stages live: a row for each stage and each of its devices.

    Attributes:
        ptr: Homes of stage s are rows ``ptr[s]`` to ``ptr[s + 1]``, by replica and rank.
        stage: The stage.
        device: The device.
        place: Place of the device among those of the stage.
    """

    ptr: Array
    stage: Array
    device: Array
    place: Array


@dataclass(frozen=True)
class Case:
    """A Program and what it must do.

    Attributes:
        problem: The problem.
        plan: The plan.
        program: The Program that is to carry it out.
    """

    problem: Problem
    plan: Plan
    program: Program

    @cached_property
    def layout(self) -> Layout:
        """The devices of the plan."""
        return Layout(self.plan)

    @cached_property
    def crossing(self) -> Crossings:
        """The tensors that cross stages."""
        return crossings(self.problem.graph, self.plan)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.problem.objective.mode is Mode.TRAINING

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.plan.stages)

    @property
    def num_devices(self) -> int:
        """Number of devices of the plan."""
        return len(self.plan.devices)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self.plan.num_microbatches

    @cached_property
    def num_ranks(self) -> int:
        """Largest number of devices of a replica."""
        return int(self.layout.ranks.max())

    def cell(self, stage: Array, microbatch: Array, rank: Array | int = 0) -> Array:
        """Return a number for each (stage, microbatch, rank), without gaps where all have ranks."""
        first: Array = stage.astype(np.int64) * self.num_microbatches + microbatch
        return first * self.num_ranks + rank

    @cached_property
    def cells(self) -> tuple[Array, Array, Array, Array]:
        """Stage, microbatch and rank of every cell, and whether the stage has that rank."""
        count = self.num_stages * self.num_microbatches
        pair = np.repeat(np.arange(count), self.num_ranks)
        stage, microbatch = np.divmod(pair, self.num_microbatches)
        rank = np.tile(np.arange(self.num_ranks), count)
        return stage, microbatch, rank, rank < self.layout.ranks[stage]

    def ranks(self, rows: Array) -> Array:
        """Return the rank of each row's device in the replica of its (stage, microbatch), or -1."""
        stage, microbatch = self.program.stage[rows], self.program.microbatch[rows]
        device = self.program.device[rows]
        result = np.full(len(rows), -1, dtype=np.int64)
        for rank in range(self.num_ranks):
            there = np.minimum(rank, self.layout.ranks[stage] - 1)
            result[self.layout.device(stage, microbatch, there) == device] = rank
        return np.minimum(result, self.layout.ranks[stage] - 1)

    @cached_property
    def homes(self) -> Homes:
        """The places where stages live."""
        flat = [
            np.array([device for group in stage.devices for device in group], dtype=np.int64)
            for stage in self.plan.stage_index
        ]
        index = self.plan.stage_index
        device = np.concatenate([flat[index[stage]] for stage in self.plan.stages])
        sizes = (self.layout.replicas * self.layout.ranks).astype(np.int64)
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        stage = np.repeat(np.arange(self.num_stages), sizes)
        return Homes(ptr, stage, device, np.arange(len(device)) - ptr[stage])

    @cached_property
    def _home_order(self) -> tuple[Array, Array]:
        keys = self.homes.stage * self.num_devices + self.homes.device
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def home(self, stage: Array, device: Array) -> Array:
        """Return the home of each (stage, device); -1 where the stage does not live there."""
        keys, order = self._home_order
        return look_up(keys, order, stage.astype(np.int64) * self.num_devices + device)

    def name(self, device: int) -> str:
        """Return the name of a device."""
        return self.plan.devices[device]

    def refuse(self, row: int, why: str) -> NoReturn:
        """Raise the error that names an instruction and says what is wrong with it."""
        raise InvalidInputError(f"{self.program.describe(int(row))} {why}")

    def refuse_missing(self, device: int, what: str, why: str) -> NoReturn:
        """Raise the error that names an instruction that a device lacks."""
        raise InvalidInputError(f"{self.name(int(device))}: {what} is missing; {why}")


def look_up(keys: Array, values: Array, wanted: Array) -> Array:
    """Return the value of each wanted key in a sorted list of keys; -1 where it is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], -1)


def first_repeat(numbers: Array) -> tuple[int, int]:
    """Return the positions of the first two equal numbers, of which there must be some."""
    order = np.argsort(numbers, kind="stable")
    again = int(np.argmax(numbers[order[1:]] == numbers[order[:-1]]))
    return int(order[again]), int(order[again + 1])
