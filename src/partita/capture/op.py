"""One op of a captured model: a torch function with its arguments, ready to be called again.

An op that was captured in training has an eval form, too. Functions carry their training flag as an
argument: in eval it is switched off, dropout inside of attention is set to nothing, and batch
norm's count stands still. Branches that a model takes in Python are not switched; ``capture``
compares with the model itself and says so.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.capture.tree import Const, Param, Ref, Value, leaves_of, map_leaves, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """Shape, type and storage of a tensor of the graph when it was captured.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        device: Device that it was on.
        requires_grad: Whether a gradient flows back through it.
        storage: A number for its storage: equal for tensors that are views of one another.
        flexible: Dimensions whose size depends on data.
        op: The op that makes it, -1 = an input of the model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    flexible: tuple[int, ...] = ()
    op: int = -1

    @property
    def bytes(self) -> int:
        """Size of its elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOp:
    """A call of a torch function, or several that run as one.

    Attributes:
        name: Unique name: module path, with the number of its call where there are several, and
            function.
        kind: Name of the function.
        module: Path of the module that made the call.
        scopes: Paths of the modules around the call, outermost first, with call numbers.
        func: Function that is called.
        args: Positional arguments; a ``Ref`` stands for every tensor.
        kwargs: Arguments by name.
        outputs: Pairs (place among the tensors of the result, tensor of the graph).
        writes: Pairs (what is written in place, tensor that it is afterwards). Buffers that are
            written are not here.
        reads: Tensors of the graph that it reads, in the order of its arguments.
        makes: Tensors of the graph that it makes, in the order of the graph.
        parameters: Parameters and buffers that it uses.
        changes: The buffers among them that it writes.
        constants: The constants that it uses.
        grad: Whether autograd was on.
        autocast: Device types with the dtype that autocast was on for.
        draws: Whether it draws random numbers.
        seed: Seed of its random numbers while it was captured.
        in_place: Whether it may write in place: as a part of an op that has no other reader.
        parts: The calls of an op that is several, in order; then ``func`` is not used.
        owned: Tensors from outside that several calls read and write, so that they need a copy.
    """

    name: str = ""
    kind: str
    module: str = ""
    scopes: tuple[str, ...] = ()
    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    outputs: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[Ref, int], ...] = ()
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    constants: tuple[int, ...] = ()
    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    draws: bool = False
    seed: int = 0
    in_place: bool = False
    parts: tuple["CapturedOp", ...] = ()
    owned: tuple[Ref, ...] = ()

    @property
    def leaves(self) -> tuple["CapturedOp", ...]:
        """The single calls that the op consists of."""
        if not self.parts:
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)


def refs_in(node: object) -> list[Ref]:
    """Return the distinct references in recorded arguments, in order."""
    found = (leaf for _, leaf in leaves_of(node) if isinstance(leaf, Ref))
    return list(dict.fromkeys(found))


class FunctionCall:
    """Calls an ``autograd.Function``."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any function
        """Return what the function makes."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's


class ModuleCall:
    """Calls a live module with given parameters; its flags and hooks stay live."""

    def __init__(self, module: nn.Module, flags: Mapping[str, bool] | None = None) -> None:
        self.module = module
        self.flags = flags
        self.__name__ = type(module).__name__

    def __call__(
        self, held: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401  # whatever the module returns
        """Return what the module makes of its arguments with the parameters ``held``."""
        if self.flags is not None:
            for name, module in self.module.named_modules():
                module.training = self.flags.get(name, module.training)
        return functional_call(self.module, dict(held), args, dict(kwargs))

    def in_mode(self, *, training: bool) -> "ModuleCall":
        """Return the same call with the flags of now, or with all of them off."""
        flags = {name: training and m.training for name, m in self.module.named_modules()}
        return ModuleCall(self.module, flags)


def storage_of(tensor: Tensor) -> int:
    """Return a number for the storage of a tensor; its own where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch has no public identity
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values: it is on the meta device, or a ``FakeTensor``."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


@dataclass(slots=True)
class Replay:
    """Calls captured ops on an environment of values.

    Attributes:
        values: Tensors of the graph that are there, by row.
        parameters: Parameters and buffers by name.
        constants: Constants of the captured model.
        protected: Storages that no op may write: those of inputs and parameters.
        as_captured: Whether random numbers are seeded as they were while capturing.
    """

    values: dict[int, Tensor]
    parameters: Mapping[str, Tensor]
    constants: tuple[Tensor, ...]
    protected: frozenset[int] = frozenset()
    as_captured: bool = False

    def resolve(self, ref: Ref) -> Tensor:
        """Return the tensor that a reference stands for."""
        if isinstance(ref, Value):
            return self.values[ref.index]
        if isinstance(ref, Param):
            return self.parameters[ref.name]
        assert isinstance(ref, Const)
        return self.constants[ref.index]

    def run(self, op: CapturedOp, *, in_place: bool = False) -> None:
        """Call an op and put what it makes into ``values``."""
        if not op.parts:
            self._call(op, in_place=in_place)
            return
        values = {value: self.values[value] for value in op.reads}
        constants = list(self.constants)
        copies: dict[int, Tensor] = {}
        for ref in op.owned:
            if isinstance(ref, Value):
                values[ref.index] = self.copy(self.resolve(ref), copies)
            elif isinstance(ref, Const):
                constants[ref.index] = self.copy(self.resolve(ref), copies)
        inner = Replay(
            values=values,
            parameters=self.parameters,
            constants=tuple(constants),
            protected=self.protected,
            as_captured=self.as_captured,
        )
        for part in op.parts:
            inner.run(part, in_place=part.in_place)
        self.values.update((value, inner.values[value]) for value in op.makes)

    @staticmethod
    def copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
        """Return a tensor like another; views of one storage become views of one copy."""
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor.clone()
        key = storage_of(tensor)
        if key not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            copies[key] = whole.set_(tensor.untyped_storage()).clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(
            copies[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def _call(self, op: CapturedOp, *, in_place: bool) -> None:
        written = {ref: self._target(ref, in_place=in_place) for ref, _ in op.writes}

        def fill(leaf: object) -> object:
            if not isinstance(leaf, Ref):
                return leaf
            return written[leaf] if leaf in written else self.resolve(leaf)

        args = [fill(a) if isinstance(a, Ref) else map_leaves(fill, a) for a in op.args]
        kwargs = {name: map_leaves(fill, value) for name, value in op.kwargs.items()}
        if self.as_captured:
            torch.default_generator.manual_seed(op.seed)
        with circumstances(op):
            result = op.func(*args, **kwargs)
        if op.outputs:
            tensors = [result] if isinstance(result, Tensor) else tensors_of(result)
            for place, value in op.outputs:
                self.values[value] = tensors[place]
        for ref, value in op.writes:
            self.values[value] = written[ref]

    def _target(self, ref: Ref, *, in_place: bool) -> Tensor:
        """Return the tensor that an op will write: the one it stands for, or a copy."""
        tensor = self.resolve(ref)
        if in_place and storage_of(tensor) not in self.protected:
            return tensor
        return tensor.clone()


def circumstances(op: CapturedOp) -> AbstractContextManager[object]:
    """Return a context in which autograd and autocast are as they were for an op."""
    if op.grad and not op.autocast:
        return nullcontext()
    stack = ExitStack()
    if not op.grad:
        stack.enter_context(torch.no_grad())
    for device, dtype in op.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
    return stack


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_TRAIN_IS_THIRD = frozenset(
    f"{name}{end}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for end in ("", "_")
)


def eval_form(op: CapturedOp) -> CapturedOp | None:
    """Return what an op is in eval mode; None where it does nothing."""
    if op.parts:
        parts = tuple(part for part in map(eval_form, op.parts) if part is not None)
        return replace(op, parts=parts) if parts else None
    if not op.makes and all(name.endswith("num_batches_tracked") for name in op.changes):
        return None
    if isinstance(op.func, ModuleCall):
        return replace(op, func=op.func.in_mode(training=False))
    return _without_training(op)


def _without_training(op: CapturedOp) -> CapturedOp:
    names = _parameter_names(op.func)
    changed = op
    if op.kind in _RECURRENT:
        changed = _with(op, 6 if isinstance(op.args[3], bool) else 7, "train", value=False)
    elif op.kind == "scaled_dot_product_attention":
        changed = _with(op, 4, "dropout_p", value=0.0)
    elif op.kind == "batch_norm" and not any(isinstance(a, Ref) for a in _statistics(op)):
        pass
    elif "training" in names:
        changed = _with(op, names.index("training"), "training", value=False)
    elif op.kind in _TRAIN_IS_THIRD:
        changed = _with(op, 2, "train", value=False)
    return changed


def _statistics(op: CapturedOp) -> tuple[Any, ...]:
    return (*op.args[1:3], op.kwargs.get("running_mean"))


def _parameter_names(func: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return []


def _with(op: CapturedOp, place: int, name: str, *, value: object) -> CapturedOp:
    """Return an op with another value of an argument that it has; unchanged where it has not."""
    if name in op.kwargs:
        return replace(op, kwargs={**op.kwargs, name: value})
    if place < len(op.args):
        return replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))
    if name == "training":
        return replace(op, kwargs={**op.kwargs, name: value})
    return op
