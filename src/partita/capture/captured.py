"""A captured model: a graph whose ops can be run again, one by one or stage by stage."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from partita.capture.blocks import Block, call_signature
from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.tensor.code import SplitStages
from partita.capture.tensor.costs import alone_code, degree_table
from partita.capture.tensor.parallel import TensorSplits, split_tensors
from partita.capture.tree import Value, map_leaves
from partita.core.graph import DegreeTable, Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError


class Granularity(StrEnum):
    """Kind of an op of a captured graph."""

    OP = "op"
    MODULE = "module"
    BLOCK = "block"


class CaptureMode(StrEnum):
    """The mode of the modules while they were captured."""

    TRAINING = "training"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """A place where Python read the value of a tensor, so that the graph holds for the example.

    Attributes:
        module: Path of the module.
        function: Name of the call, such as ``item``; ``shape`` for a shape that depends on data.
    """

    module: str
    function: str


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedModel:
    """A model as a graph, with the code of every op.

    Attributes:
        graph: The graph; costs are zero.
        ops: The ops, in the order of the graph.
        values: The tensors. The first are those of the graph, in its order; the rest stay inside of
            ops that are several calls.
        constants: Tensors that depend on neither inputs nor parameters.
        output: Result of the model, with a ``Ref`` for each tensor.
        metrics: What the loss function returned beside the loss, by name, with a ``Ref`` each.
        model: The live model.
        parameters: Live parameters and buffers by name, unused ones too.
        granularity: Size of an op that was asked for.
        mode: The mode it was captured in.
        runs_eval: Whether the ops give what the model gives in eval mode.
        specializations: Places where the value of a tensor was read.
        blocks: The repeated blocks.
        notes: Remarks for the user: fall-backs, unused parameters, specialisations.
    """

    graph: Graph
    ops: tuple[CapturedOp, ...]
    values: tuple[ValueInfo, ...]
    constants: tuple[Tensor, ...]
    output: Any
    model: nn.Module
    parameters: Mapping[str, Tensor]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING
    runs_eval: bool = True
    specializations: tuple[Specialization, ...] = ()
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def is_training(self) -> bool:
        """Whether it was captured in training mode."""
        return self.mode is CaptureMode.TRAINING

    @cached_property
    def digest(self) -> str:
        """A hash of everything the ops compute: functions, literals, shapes, types.

        Unlike the fingerprint of the graph it differs for another batch size.
        """
        digest = hashlib.sha256(self.graph.fingerprint.encode())
        for op in self.ops:
            digest.update(f"{op.name}:{call_signature(op, repr)}\n".encode())
        for info in self.values:
            digest.update(f"{info.shape} {info.dtype} {info.requires_grad}\n".encode())
        return digest.hexdigest()[:32]

    def state(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers that the graph uses, by name."""
        names = self.graph.parameters.names
        return {name: self.parameters[name].detach().clone() for name in names}

    def check_mode(self, *, training: bool) -> None:
        """Check that the ops can run in training or in eval mode.

        Raises:
            InvalidInputError: They cannot.
        """
        if training and not self.is_training:
            raise InvalidInputError(
                f"{self.graph.name!r} was captured in eval mode; capture it in training mode"
            )
        if not training and not self.runs_eval:
            raise InvalidInputError(
                f"{self.graph.name!r} computes something else in eval mode than its training graph "
                "with the flags off; capture it in eval mode"
            )

    def stages(self, plan: Plan) -> SplitStages:
        """Return the code of a plan's stages, whole and for tensor-parallel groups.

        Raises:
            InvalidInputError: The plan is for another graph.
        """
        return SplitStages(self, plan)

    @cached_property
    def _splits(self) -> dict[int, TensorSplits]:
        return {}

    def splits(self, degree: int) -> TensorSplits:
        """Return how a tensor-parallel group of some ranks divides the model."""
        if degree not in self._splits:
            self._splits[degree] = split_tensors(self, degree)
        return self._splits[degree]

    def degrees_at(self, degree: int, graph: Graph, types: Sequence[str]) -> DegreeTable:
        """Return the costs of the ops on one device and on a rank of a tensor-parallel group.

        Args:
            degree: Ranks of the group.
            graph: The graph with costs on one device.
            types: Types of the devices.
        """
        return degree_table(self, self.splits(degree), graph, types)

    def shard(self, degree: int) -> "CapturedModel":
        """Return what the first rank of a tensor-parallel group runs, without the other ranks."""
        splits = self.splits(degree)
        code = alone_code(self, splits)

        def part(name: str, tensor: Tensor) -> Tensor:
            if name not in splits.parameters:
                return tensor
            own = splits.parameters[name].take(tensor.detach(), 0, degree).clone()
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(own, requires_grad=tensor.requires_grad)
            return own

        held = {name: part(name, tensor) for name, tensor in self.parameters.items()}
        return replace(self, ops=code.ops, values=code.values, parameters=held)

    def rebuild_output(self, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401  # the model's
        """Return what the model would return, given the outputs of the graph by name."""
        names = self.graph.tensors.names

        def fill(leaf: object) -> object:
            return tensors[names[leaf.index]] if isinstance(leaf, Value) else leaf

        return map_leaves(fill, self.output)
