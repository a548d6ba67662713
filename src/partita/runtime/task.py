"""What the loops of all devices share: a Program with its plan, seen stage by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError, UnsupportedError
from partita.program.layout import Layout, crossings, input_readers, owners
from partita.runtime.stage_code import StageCode


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBorder:
    """What enters and leaves a stage.

    Attributes:
        inputs: Tensors that it reads from earlier stages, ascending.
        loaded: Inputs of the model that it reads, ascending.
        outputs: Tensors that it makes and that leave it: for later stages, as an output of the
            model, or as the loss; ascending.
        trained: Names of its trainable parameters.
        frozen: Names of its other parameters.
        buffers: Names of its buffers.
        recomputes: Whether all of it runs again for backward: it keeps its inputs only.
        recomputes_some: Whether some of its ops, not all, run again.
    """

    inputs: tuple[int, ...]
    loaded: tuple[int, ...]
    outputs: tuple[int, ...]
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    recomputes: bool
    recomputes_some: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a parameter is divided among the replicas of its stage.

    Attributes:
        stage: The stage.
        shard: What else is divided with it.
        members: The devices, in the order of their parts.
    """

    stage: int
    shard: Shard
    members: tuple[int, ...]


class Task:
    """A Program to run, and the code of its stages.

    Attributes:
        problem: The problem.
        plan: The plan.
        program: Its Program.
        code: The code of its stages.
    """

    def __init__(self, problem: Problem, plan: Plan, program: Program, code: StageCode) -> None:
        """Check that the parts belong together.

        Raises:
            InvalidInputError: They do not, or there is no loss to train on.
            UnsupportedError: The graph has explicit backward ops, which have no code.
        """
        plan.check_fits(problem)
        if program.devices != plan.devices or program.num_stages != len(plan.stages):
            raise InvalidInputError(
                f"the program runs {program.num_stages} stages on {len(program.devices)} devices, "
                f"the plan has {len(plan.stages)} on {len(plan.devices)}; lower the plan again"
            )
        self.problem, self.plan, self.program, self.code = problem, plan, program, code
        self.graph = problem.graph
        # Weights of the microbatches' losses, where not all of their samples count; None = all do.
        self.weights: Sequence[float] | None = None
        self._check_has_code()

    def _check_has_code(self) -> None:
        """Check that the graph can be run, and trained where that is asked."""
        if not self.graph.is_forward.all():
            raise UnsupportedError(
                f"graph {self.graph.name!r} has explicit backward ops; a graph of forward ops "
                "can be run, with the backward pass left to autograd"
            )
        if self.is_training and (
            self.graph.loss < 0 or self.graph.tensors.producer[self.graph.loss] < 0
        ):
            raise InvalidInputError(
                f"graph {self.graph.name!r} names no loss that an op makes; training needs one"
            )

    @property
    def is_training(self) -> bool:
        """Whether there is a backward pass."""
        return self.problem.objective.mode is Mode.TRAINING

    def group(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """Return the devices, by tensor-parallel rank, that run a stage for a microbatch."""
        return self._groups[stage][microbatch]

    @cached_property
    def _groups(self) -> list[list[tuple[int, ...]]]:
        layout = Layout(self.plan)
        return [
            [stage.devices[replica] for replica in replicas]
            for stage, replicas in zip(self.plan.stages, layout.replica_of.tolist(), strict=True)
        ]

    def loss_weight(self, microbatch: int) -> float:
        """Return what the loss of a microbatch is seeded with."""
        if self.plan.stashes_weights:
            return 1.0
        if self.weights is not None:
            return self.weights[microbatch]
        return self.shares[microbatch]

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The share of each microbatch in the samples of a step."""
        return tuple(size / self.plan.samples for size in self.plan.microbatch_sizes.tolist())

    def stages_of(self, device: int) -> list[int]:
        """Return the stages that a device has a part in, ascending."""
        return [
            index
            for index, stage in enumerate(self.plan.stages)
            if any(device in group for group in stage.devices)
        ]

    @cached_property
    def results(self) -> frozenset[int]:
        """The tensors that a step is looked at for: outputs of the model and the loss."""
        return frozenset((*self.graph.outputs.tolist(), self.graph.loss))

    @cached_property
    def returning(self) -> tuple[tuple[int, ...], ...]:
        """The outputs of each stage whose gradients come back to it."""
        differentiable = self.graph.tensors.differentiable
        return tuple(
            tuple(t for t in border.outputs if differentiable[t] and t in self.readers)
            for border in self.borders
        )

    @cached_property
    def contributes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The inputs of each stage that have gradients, with the stage that makes them."""
        table = self.graph.tensors
        return tuple(
            tuple(
                (t, int(self.plan.stage_of[table.producer[t]]))
                for t in border.inputs
                if table.differentiable[t]
            )
            for border in self.borders
        )

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """The stages, ascending, that read each tensor which crosses stages."""
        crossing = crossings(self.graph, self.plan)
        return _grouped(crossing.tensor, crossing.reader)

    @cached_property
    def borders(self) -> tuple[StageBorder, ...]:
        """What enters and leaves each stage."""
        graph, plan, table = self.graph, self.plan, self.graph.parameters
        crossing = crossings(graph, plan)
        tensor, stage = input_readers(graph, plan)
        parameter, owner = owners(graph, plan)
        leaving = np.unique(np.r_[crossing.tensor, graph.outputs, graph.loss].astype(np.int64))
        leaving = leaving[leaving >= 0]
        leaving = leaving[graph.tensors.producer[leaving] >= 0]
        made_by = plan.stage_of[graph.tensors.producer[leaving]]
        inputs, loaded = _grouped(crossing.reader, crossing.tensor), _grouped(stage, tensor)
        outputs = _grouped(made_by, leaving)
        kinds = (table.trainable, ~table.trainable & ~table.buffer, table.buffer)
        named = [
            {
                key: tuple(table.names[row] for row in rows)
                for key, rows in _grouped(owner[mask], parameter[mask]).items()
            }
            for mask in (kind[parameter] for kind in kinds)
        ]
        flags = [plan.recompute[plan.stage_of == index] for index in range(len(plan.stages))]
        return tuple(
            StageBorder(
                inputs=inputs.get(index, ()),
                loaded=loaded.get(index, ()),
                outputs=outputs.get(index, ()),
                trained=named[0].get(index, ()),
                frozen=named[1].get(index, ()),
                buffers=named[2].get(index, ()),
                recomputes=bool(flags[index].all()),
                recomputes_some=bool(flags[index].any() and not flags[index].all()),
            )
            for index in range(len(plan.stages))
        )

    def shardings(self, device: int) -> Mapping[str, Sharding]:
        """Return how the parameters of a device are divided; those held whole are left out.

        The members of a division and their order are those of the Program's gathers; a reduction
        may have more, where several groups hold a whole each.
        """
        program, names = self.program, self.graph.parameters.names
        found: dict[str, Sharding] = {}
        for row in range(int(program.ptr[device]), int(program.ptr[device + 1])):
            if program.kind[row] != Kind.ALL_GATHER:
                continue
            stage = int(program.stage[row])
            sharding = Sharding(
                stage=stage,
                shard=self.plan.stages[stage].shard,
                members=tuple(program.group_of(row).tolist()),
            )
            for parameter in program.parameters_of(int(program.bucket[row])).tolist():
                found[names[parameter]] = sharding
        return found


def _grouped(keys: Array, values: Array) -> dict[int, tuple[int, ...]]:
    """Return the values of each key, ascending."""
    found: dict[int, list[int]] = {}
    for key, value in sorted(zip(keys.tolist(), values.tolist(), strict=True)):
        found.setdefault(key, []).append(value)
    return {key: tuple(part) for key, part in found.items()}
