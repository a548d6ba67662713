"""Records every torch call of a model: a function-level trace with module paths.

A ``TorchFunctionMode`` sees each torch call, one level deep, above autograd: calling the recorded
functions again can be differentiated. Tensors are told apart by identity and kept alive, so that no
identity comes twice. ``autograd.Function.apply`` and ``nn.Module.__call__``, which the mode does
not see, are replaced while a trace is on.

What is not recorded: results that are the same object (a ``.to`` that changes nothing), and what
depends on no input and no parameter, which becomes a constant. A tensor that is written in place is
another value afterwards.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from partita.capture.op import (
    CapturedOp,
    FunctionCall,
    ModuleCall,
    ValueInfo,
    is_fake,
    refs_in,
    storage_of,
)
from partita.capture.shapes import flexible_sizes
from partita.capture.tree import Const, Param, Ref, Value, map_leaves, tensors_of

GETTERS = frozenset(
    {
        "__len__",
        "_version",
        "data_ptr",
        "device",
        "dim",
        "dtype",
        "element_size",
        "get_device",
        "grad_fn",
        "is_complex",
        "is_contiguous",
        "is_cpu",
        "is_cuda",
        "is_floating_point",
        "is_grad_enabled",
        "is_inference",
        "is_leaf",
        "is_meta",
        "is_mkldnn",
        "is_nested",
        "is_quantized",
        "is_signed",
        "is_sparse",
        "is_tensor",
        "itemsize",
        "layout",
        "names",
        "nbytes",
        "ndim",
        "nelement",
        "numel",
        "requires_grad",
        "result_type",
        "retains_grad",
        "shape",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    }
)
_SHAPE_READS = frozenset({"shape", "size", "__len__", "numel", "nelement"})
_READS = frozenset(
    {
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__format__",
        "__hash__",
        "__index__",
        "__int__",
        "__repr__",
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
    }
)
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "gumbel", "rrelu")
_RANDOM_INSIDE = ("attention", "lstm", "gru", "rnn")
"""Functions that may draw; fake tensors do not show it, and seeding the others does no harm."""

_RUNNING_STATISTICS = frozenset({"batch_norm", "instance_norm"})


class EscapedTensorError(Exception):
    """A tensor with a gradient came from a call that the trace has not seen."""


class ChangedConstantError(Exception):
    """A constant was written after it had been recorded; snapshots are needed."""


def kind_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function; of the getter of a property that of the property."""
    name = str(getattr(func, "__name__", type(func).__name__))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


class Trace(TorchFunctionMode):
    """Records the torch calls made while it is active.

    Attributes:
        ops: Recorded ops.
        values: The tensors: inputs of the model first.
        constants: Tensors that depend on no input and no parameter.
        reads: Places where the value of a tensor was read by Python: path and function.
        aliased: Storages that are written through one tensor and read through another.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
        *,
        opaque: frozenset[str] = frozenset(),
        snapshots: bool = False,
    ) -> None:
        """Prepare a trace.

        Args:
            parameters: Parameters and buffers by canonical name.
            modules: The modules by path.
            opaque: Paths of modules to record as one call each.
            snapshots: Whether constants are copied when they are recorded.
        """
        super().__init__()
        self.ops: list[CapturedOp] = []
        self.values: list[ValueInfo] = []
        self.constants: list[Tensor] = []
        self.reads: list[tuple[str, str]] = []
        self.aliased: set[int] = set()
        self._parameter_of = {id(tensor): name for name, tensor in parameters.items()}
        self._parameters = dict(parameters)
        self._stores = {storage_of(tensor): name for name, tensor in parameters.items()}
        self._path_of = {id(module): path for path, module in modules.items()}
        self._opaque, self._snapshots = opaque, snapshots
        self._value_of: dict[int, int] = {}
        self._defined_at: list[int] = []
        self._written_at: dict[int, int] = {}
        self._constant_of: dict[tuple[int, int], int] = {}
        self._constant_versions: list[tuple[Tensor, int]] = []
        self._constant_stores: list[int] = []
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._keep: list[Tensor] = []
        self._calls: Counter[str] = Counter()
        self._scopes: list[tuple[str, str]] = []
        self._depth = 0
        self._count = 0
        self.is_fake = any(map(is_fake, parameters.values()))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Record a torch call."""
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind in GETTERS and getattr(func, "__name__", "") != "__set__":
            if kind in _SHAPE_READS:
                self._note_shape_read(kind, args)
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def add_input(self, tensor: Tensor) -> int:
        """Register an input of the model and return its row."""
        if id(tensor) not in self._value_of:
            self.is_fake |= is_fake(tensor)
            self._define(tensor, -1)
        return self._value_of[id(tensor)]

    def ref(self, tensor: Tensor) -> Ref:
        """Return what stands for a tensor."""
        name = self._parameter_of.get(id(tensor))
        if name is not None:
            return Param(name)
        value = self._value_of.get(id(tensor))
        store = storage_of(tensor)
        if value is not None:
            if self._written_at.get(store, -1) > self._defined_at[value]:
                self.aliased.add(store)
            return Value(value)
        if store in self._written_at:
            self.aliased.add(store)
        if tensor.grad_fn is not None:
            raise EscapedTensorError(
                f"{self._path() or 'the model'} uses a tensor of {type(tensor.grad_fn).__name__} "
                "that no torch call seen by the trace has made"
            )
        return Const(self._constant(tensor))

    def refs(self, node: object) -> Any:  # noqa: ANN401  # the container that it was given
        """Return a container with references in the place of tensors."""
        return map_leaves(lambda leaf: self.ref(leaf) if isinstance(leaf, Tensor) else leaf, node)

    def finish(self) -> None:
        """Check that constants are still what they were when they were recorded.

        Raises:
            ChangedConstantError: One has been written since.
        """
        for tensor, version in self._constant_versions:
            if _version(tensor) != version:
                raise ChangedConstantError

    @property
    def constant_stores(self) -> list[int]:
        """The storage of each constant, while it was recorded."""
        return self._constant_stores

    @contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """Record calls under a path that is no module's."""
        self._scopes.append((path, path))
        try:
            yield
        finally:
            self._scopes.pop()

    def assign_buffer(self, name: str, tensor: Tensor) -> None:
        """Record that a module has put another tensor in the place of a buffer."""
        with torch.no_grad():
            self.call(Tensor.copy_, (self._parameters[name], tensor), {})

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Call a function, record it if there is anything to record, and return its result."""
        self._depth += 1
        try:
            return self._call(func, args, kwargs)
        finally:
            self._depth -= 1

    def _call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        inputs = tensors_of((args, kwargs))
        versions = [_version(tensor) for tensor in inputs]
        recorded = (self.refs(args), self.refs(dict(kwargs)))
        self._count += 1
        torch.default_generator.manual_seed(self._count)
        before = None if self.is_fake else torch.default_generator.get_state()
        result = func(*args, **kwargs)
        written = [t for t, version in zip(inputs, versions, strict=True) if _version(t) != version]
        made = tensors_of(result)
        self.is_fake = self.is_fake or any(map(is_fake, made))
        if not made and not written:
            self._note_read(kind_of(func), recorded)
            return result
        if not written and all(self._is_known(tensor) for tensor in made):
            return result
        refs = refs_in(recorded)
        drew = self._drew(func, (args, kwargs), before)
        stale = any(storage_of(tensor) in self._written_at for tensor in inputs)
        # Constants that are real, beside fake tensors, are constants all the same.
        valueless = any(map(is_fake, (*inputs, *made)))
        if drew or stale or valueless or any(not isinstance(ref, Const) for ref in refs):
            self._record(func, recorded, refs, (made, written), drew=drew)
        return result

    def _drew(
        self,
        func: Callable[..., Any],
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        before: Tensor | None,
    ) -> bool:
        """Return whether a call has drawn random numbers, given the generator's state before."""
        if before is None or self.is_fake:
            return _may_draw(func, *given)
        return not torch.equal(before, torch.default_generator.get_state())

    def _record(
        self,
        func: Callable[..., Any],
        recorded: tuple[tuple[Any, ...], Mapping[str, Any]],
        refs: list[Ref],
        results: tuple[list[Tensor], list[Tensor]],
        *,
        drew: bool,
    ) -> None:
        made, written = results
        kind = kind_of(func)
        reads = tuple(ref.index for ref in refs if isinstance(ref, Value))
        flexible = flexible_sizes(kind, recorded, [self.values[v] for v in reads], made)
        changes, writes = self._define_written(written, kind)
        outputs = []
        for place, tensor in enumerate(made):
            if not self._is_known(tensor):
                outputs.append((place, self._define(tensor, len(self.ops), flexible)))
        self.ops.append(
            CapturedOp(
                kind=kind,
                module=self._path(),
                scopes=tuple(scope for _, scope in self._scopes),
                func=func,
                args=recorded[0],
                kwargs=recorded[1],
                outputs=tuple(outputs),
                writes=tuple(writes),
                reads=reads,
                makes=tuple(sorted([v for _, v in outputs] + [v for _, v in writes])),
                parameters=tuple(ref.name for ref in refs if isinstance(ref, Param)),
                changes=tuple(changes),
                constants=tuple(ref.index for ref in refs if isinstance(ref, Const)),
                grad=torch.is_grad_enabled(),
                autocast=_autocast(),
                draws=drew,
                seed=self._count,
            )
        )

    def _define_written(
        self, written: list[Tensor], kind: str
    ) -> tuple[list[str], list[tuple[Ref, int]]]:
        """Make new values of what an op has written; return changed buffers and (old, new)."""
        changes, writes = [], []
        for tensor in {id(t): t for t in written}.values():
            store = storage_of(tensor)
            name = self._parameter_of.get(id(tensor))
            if name is not None:
                changes.append(name)
                if kind not in _RUNNING_STATISTICS:
                    self.aliased.add(store)
            else:
                if store in self._stores:
                    self.aliased.add(store)
                old = self._ref_before(tensor)
                writes.append((old, self._define(tensor, len(self.ops), self._flexible_of(old))))
            self._written_at[store] = len(self.ops)
        return changes, writes

    def _ref_before(self, tensor: Tensor) -> Ref:
        """Return what stood for a tensor before it was written."""
        value = self._value_of.get(id(tensor))
        return Value(value) if value is not None else Const(self._last_constant(tensor))

    def _last_constant(self, tensor: Tensor) -> int:
        return max(i for (key, _), i in self._constant_of.items() if key == id(tensor))

    def _flexible_of(self, ref: Ref) -> frozenset[int]:
        if not isinstance(ref, Value):
            return frozenset()
        info = self.values[ref.index]
        return frozenset(info.shape[d] for d in info.flexible)

    def _define(self, tensor: Tensor, op: int, flexible: frozenset[int] = frozenset()) -> int:
        row = len(self.values)
        shape = tuple(tensor.shape)
        self.values.append(
            ValueInfo(
                shape=shape,
                dtype=tensor.dtype,
                device=tensor.device,
                # A view that was made without autograd requires a gradient and has no function.
                requires_grad=tensor.requires_grad and tensor.grad_fn is not None,
                storage=storage_of(tensor),
                flexible=tuple(d for d, length in enumerate(shape) if length in flexible),
                op=op,
            )
        )
        self._defined_at.append(op)
        self._value_of[id(tensor)] = row
        self._keep.append(tensor)
        return row

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._value_of or id(tensor) in self._parameter_of

    def _constant(self, tensor: Tensor) -> int:
        key = (id(tensor), _version(tensor))
        if key not in self._constant_of:
            self._constant_of[key] = len(self.constants)
            self._keep.append(tensor)
            self._constant_stores.append(storage_of(tensor))
            kept = tensor.detach()
            if self._snapshots and tensor.layout is torch.strided:
                kept = self._snapshot(tensor)
            else:
                self._constant_versions.append((tensor, key[1]))
            self.constants.append(kept)
        return self._constant_of[key]

    def _snapshot(self, tensor: Tensor) -> Tensor:
        """Return a copy; views of one storage stay views of one copy.

        Of a storage that an op has written the copy is the one from before: the op writes it again.
        """
        store, version = storage_of(tensor), _version(tensor)
        if store in self._written_at:
            version = max(v for s, v in self._copies if s == store)
        key = (store, version)
        if key not in self._copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._copies[key] = whole.set_(tensor.untyped_storage()).clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset, stride = tensor.storage_offset(), tensor.stride()
        return made.set_(self._copies[key].untyped_storage(), offset, tensor.shape, stride)

    def _path(self) -> str:
        return self._scopes[-1][0] if self._scopes else ""

    def _note_read(self, kind: str, recorded: object) -> None:
        live = any(not isinstance(ref, Const) for ref in refs_in(recorded))
        if live and kind in _READS:
            self.reads.append((self._path(), kind))

    def _note_shape_read(self, kind: str, args: tuple[Any, ...]) -> None:
        value = self._value_of.get(id(args[0])) if args else None
        if value is not None and self.values[value].flexible:
            self.reads.append((self._path(), kind))

    @contextmanager
    def active(self) -> Iterator["Trace"]:
        """Record while in this context."""
        plain_call = nn.Module.__call__
        plain_apply = torch.autograd.Function.__dict__["apply"]

        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return self._call_module(plain_call, module, args, kwargs)

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._depth:
                return plain_apply.__get__(None, cls)(*args, **kwargs)
            if cls is CheckpointFunction:
                return args[0](*args[2:])
            return self.call(FunctionCall(cls), args, kwargs)

        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield self
        finally:
            nn.Module.__call__ = plain_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]

    def _call_module(
        self,
        plain_call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401  # whatever the module returns
        path = self._path_of.get(id(module))
        if self._depth or path is None:
            return plain_call(module, *args, **kwargs)
        turn = self._calls[path]
        self._calls[path] += 1
        self._scopes.append((path, f"{path}@{turn}" if turn else path))
        try:
            if path in self._opaque or isinstance(module, torch.jit.ScriptModule):
                held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                return self.call(ModuleCall(module), (held, args, dict(kwargs)), {})
            return plain_call(module, *args, **kwargs)
        finally:
            self._scopes.pop()


def _may_draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call may draw random numbers, by its name; fake tensors do not show it."""
    kind = kind_of(func)
    if any(name in kind for name in _RANDOM):
        return True
    if kind == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return any(name in kind for name in _RANDOM_INSIDE)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  # torch's own name


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
