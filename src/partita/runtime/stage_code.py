"""What a stage computes: the one seam between Programs and models.

A ``StageCode`` turns the tensors that enter a stage into those that leave it. It neither knows nor
cares about autograd, versions of weights or devices: whoever calls it decides what is a leaf,
whether gradients are recorded, and which values the parameters have.

``ModuleGraph`` is the code of a graph whose ops were written by hand, a module or function each.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.capture.op import storage_of
from partita.capture.recomputation import Recomputation
from partita.capture.splits import Split
from partita.capture.stages import recomputed_places
from partita.capture.tensor.ops import TensorGroup
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.ranks.device import seed_device

Results: TypeAlias = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The circumstances of one run of a stage.

    Attributes:
        seed: Seed of the whole run.
        step: Step, from 0.
        microbatch: Microbatch of the step.
        training: Whether modules are in training mode.
        recomputing: Whether the stage has run for this microbatch before.
        recomputation: What ops that recompute leave their tensors to; None = all ops keep them.
        group: The ranks that divide its tensors, each with its slices of the parameters; None =
            all is computed here.
    """

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    training: bool = True
    recomputing: bool = False
    recomputation: Recomputation | None = None
    group: TensorGroup | None = None

    def op_seed(self, op: int) -> int:
        """Return the seed of an op's random numbers."""
        return op_seed(self, op)


class StageCode(Protocol):
    """The code of all stages of one plan."""

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> Mapping[str, Tensor]:
        """Return the tensors that a stage makes, by name.

        Args:
            stage: Index of the stage.
            inputs: Every tensor that the stage reads and does not make, by name. Not changed.
            parameters: Parameters and buffers that its ops use, by name. Buffers are changed in
                place.
            call: The circumstances. Random numbers depend on these and on the op alone
                (``op_seed``), so that a run can be repeated on another device.

        Returns:
            At least the tensors that later stages read, the outputs of the model and the loss.
        """
        ...

    def parameter_splits(self, degree: int) -> Mapping[str, Split]:
        """Return how a tensor-parallel group of some ranks divides parameters, by name.

        Those that are not here each rank holds whole.
        """
        ...

    def split_notes(self, degree: int) -> list[str]:
        """Return what such a group divides and what it does not, for people."""
        ...


def op_seed(call: Call, op: int) -> int:
    """Return the seed of an op's random numbers: a hash of (seed, step, op, microbatch)."""
    key = struct.pack("<4q", call.seed, call.step, op, call.microbatch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_op(call: Call, op: int) -> None:
    """Seed torch's default random generators for one op."""
    seed_device(op_seed(call, op))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCode:
    """What one op computes.

    Attributes:
        call: A module or function. Takes the op's input tensors in the order of its edges, a
            function its parameters too, by keyword; returns the op's tensor, or a tuple of them in
            the order of the graph.
        parameters: From the names that ``call`` has for its parameters and buffers to the graph's.
    """

    call: nn.Module | Callable[..., Results]
    parameters: Mapping[str, str] = field(default_factory=dict)


class ModuleGraph:
    """The code of a graph, a module or function for each op."""

    def __init__(self, graph: Graph, ops: Mapping[str, OpCode]) -> None:
        """Take the code of every op by name.

        Raises:
            InvalidInputError: An op without code, code for no op, or code whose parameters are not
                those that the graph lists for the op.
        """
        self.graph = graph
        unknown = sorted(set(ops) - set(graph.ops.names))
        missing = [name for name in graph.ops.names if name not in ops]
        if unknown or missing:
            what = "code for op" if unknown else "no code for op"
            raise InvalidInputError(
                f"{what} {(unknown or missing)[0]!r} of graph {graph.name!r}; "
                "expected one piece of code for each op"
            )
        self.ops = tuple(ops[name] for name in graph.ops.names)
        self._check_parameters()
        ptr, edges = graph.in_edges
        names, reads = graph.tensors.names, graph.edges.tensor[edges]
        self._inputs = [
            tuple(names[t] for t in reads[ptr[op] : ptr[op + 1]].tolist())
            for op in range(len(graph))
        ]
        self._outputs: list[list[str]] = [[] for _ in range(len(graph))]
        for name, producer in zip(names, graph.tensors.producer.tolist(), strict=True):
            if producer >= 0:
                self._outputs[producer].append(name)

    def _check_parameters(self) -> None:
        table = self.graph.parameters
        listed: list[set[str]] = [set() for _ in range(len(self.graph))]
        for op, row in zip(table.use_op.tolist(), table.use_parameter.tolist(), strict=True):
            listed[op].add(table.names[row])
        for op, (code, expected) in enumerate(zip(self.ops, listed, strict=True)):
            if set(code.parameters.values()) != expected:
                raise InvalidInputError(
                    f"the code of op {self.graph.ops.names[op]!r} uses parameters "
                    f"{sorted(code.parameters.values())}; the graph lists {sorted(expected)}"
                )

    def state(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers that the modules hold, by the graph's names.

        Of a tied parameter the first module's value counts. Parameters of functions are not here.
        """
        found: dict[str, Tensor] = {}
        for code in self.ops:
            if isinstance(code.call, nn.Module):
                held = {**dict(code.call.named_parameters()), **dict(code.call.named_buffers())}
                for local, name in code.parameters.items():
                    found.setdefault(name, held[local].detach().clone())
        return found

    def stages(self, plan: Plan) -> "ModuleStages":
        """Return the code of a plan's stages."""
        return ModuleStages(self, plan)

    def inputs(self, op: int) -> tuple[str, ...]:
        """Return the names of the tensors that an op reads."""
        return self._inputs[op]

    def run_op(
        self, op: int, values: Mapping[str, Tensor], parameters: Mapping[str, Tensor], call: Call
    ) -> dict[str, Tensor]:
        """Return the tensors of one op, by name."""
        code = self.ops[op]
        arguments = tuple(values[name] for name in self._inputs[op])
        held = {local: parameters[name] for local, name in code.parameters.items()}
        seed_op(call, op)
        if isinstance(code.call, nn.Module):
            code.call.train(call.training)
            made = functional_call(code.call, held, arguments)
        else:
            made = code.call(*arguments, **held)
        results = made if isinstance(made, tuple) else () if made is None else (made,)
        names = self._outputs[op]
        if len(results) != len(names):
            raise InvalidInputError(
                f"the code of op {self.graph.ops.names[op]!r} returned {len(results)} tensors; "
                f"the graph lists {len(names)}"
            )
        return dict(zip(names, results, strict=True))


class ModuleStages:
    """The stages of a plan for a ``ModuleGraph``; a ``StageCode``."""

    def __init__(self, code: ModuleGraph, plan: Plan) -> None:
        self._code = code
        self._ops: list[list[int]] = [[] for _ in plan.stages]
        for op in code.graph.topological_order.tolist():
            self._ops[int(plan.stage_of[op])].append(op)
        self._again = [
            list(recomputed_places([bool(plan.recompute[op]) for op in ops])) for ops in self._ops
        ]
        table = code.graph.parameters
        self._buffers = {name for name, held in zip(table.names, table.buffer, strict=True) if held}

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> Mapping[str, Tensor]:
        """Return every tensor that the ops of a stage make."""
        values, done, ops = dict(inputs), 0, self._ops[stage]
        for places in self._again[stage] if call.recomputation is not None else ():
            self._run_ops(ops[done : places.start], values, parameters, call)
            self._run_span([ops[place] for place in places], values, parameters, call)
            done = places.stop
        self._run_ops(ops[done:], values, parameters, call)
        return {name: value for name, value in values.items() if name not in inputs}

    def _run_ops(
        self,
        ops: Sequence[int],
        values: dict[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> None:
        """Run ops, and add what they make to the values."""
        with torch.random.fork_rng(devices=[]):
            for op in ops:
                values.update(self._code.run_op(op, values, parameters, call))

    def _run_span(
        self,
        ops: Sequence[int],
        values: dict[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> None:
        """Run neighbouring ops that recompute."""
        assert call.recomputation is not None
        read = {name for op in ops for name in self._code.inputs(op)}
        inputs = {name: value for name, value in values.items() if name in read}
        buffers = {name: parameters[name].clone() for name in self._buffers & parameters.keys()}

        def again(entering: Sequence[Tensor], weights: Mapping[str, Tensor]) -> None:
            own = {name: value.clone() for name, value in buffers.items()}
            found = dict(zip(inputs, entering, strict=True))
            self._run_ops(ops, found, {**weights, **own}, call)

        held = {storage_of(tensor) for tensor in parameters.values()}
        with call.recomputation.span(again, list(inputs.values()), held):
            self._run_ops(ops, values, parameters, call)

    def parameter_splits(self, degree: int) -> Mapping[str, Split]:
        """Return nothing: modules are run whole, by every rank of a group."""
        del degree
        return {}

    def split_notes(self, degree: int) -> list[str]:
        """Return that nothing is divided."""
        del degree
        return []
