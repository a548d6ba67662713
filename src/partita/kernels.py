"""Hot loops over columns: interpreted on small inputs, compiled and cached on disk for large ones.

A kernel is a plain function marked with ``@kernel``. It indexes columns, and named tuples of
columns, and calls other kernels. Interpreted it runs as it stands, on lists, which Python indexes
faster than arrays; its compiled twin, made on first use along with the twins of the kernels that it
calls, runs on the arrays. Both do the same floating-point operations in the same order (no fast
mathematics), so that the size of an input never changes an answer.

This is the only module that imports Numba, and it does so where compiled code pays; ``Threshold``
says when. A family of kernels that is always compiled calls ``compiled(kernel)`` itself.

Numba's cache on disk notices a change in the file of the function that is called, and not one in
the files of the functions it calls, although their machine code is part of the entry. So the name
under which an entry is kept carries a digest of everything that goes into it: the sources of all
kernels reached, the constants that they read, and the fields of the named tuples they know.

Processes that need the same kernel at the same time take turns: the first compiles it, and the
others load what it has kept.
"""

import dis
import fcntl
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import numpy as np

Column: TypeAlias = Any
"""What a kernel indexes: a list, or compiled an array; also a named tuple of these."""
Number: TypeAlias = Any
"""What a kernel computes from its columns: an integer, a float or a truth value."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Value = TypeVar("_Value")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Threshold(NamedTuple):
    """When compiled code pays: loading Numba takes as long as interpreting some 100,000 steps.

    Attributes:
        size: Least size of a call, in the unit of the family (rows, steps, ideals, job-rounds).
        total: Size of all interpreted calls of a kernel together from which on it is compiled: a
            search over many plans makes many small calls.
        loaded: Whether a kernel that is compiled already runs so at any size.
    """

    size: float = 30_000
    total: float = math.inf
    loaded: bool = False


ROWS = Threshold(size=30_000, total=100_000, loaded=True)
"""For kernels that make one pass over rows."""


class _Options(NamedTuple):
    """How a kernel is compiled; see ``kernel``."""

    allocates: bool
    inline: bool


_options: dict[Callable[..., Any], _Options] = {}
_entries: dict[Callable[..., Any], Any] = {}
_callees: dict[Callable[..., Any], Any] = {}
_interpreted: defaultdict[Callable[..., Any], float] = defaultdict(float)
"""Sizes that each kernel was interpreted on, which decides how it runs and not what it returns."""


@dataclass(slots=True)
class _Stopwatch:
    """Seconds that this process has spent on making machine code, or waiting for another to."""

    total_s: float = 0.0
    is_running: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time until the end of the block; blocks inside it count once."""
        if self.is_running:
            yield
            return
        self.is_running, begin = True, time.monotonic()
        try:
            yield
        finally:
            self.is_running = False
            self.total_s += time.monotonic() - begin


_stopwatch = _Stopwatch()


def compiling_s() -> float:
    """Return the seconds that went into loading Numba and compiling kernels so far.

    They are spent once per machine; a search that counts them would do nothing else the first time.
    """
    return _stopwatch.total_s


@overload
def kernel(function: _Function) -> _Function: ...


@overload
def kernel(
    *, allocates: bool = False, inline: bool = False
) -> Callable[[_Function], _Function]: ...


def kernel(
    function: _Function | None = None, *, allocates: bool = False, inline: bool = False
) -> _Function | Callable[[_Function], _Function]:
    """Mark a function as a kernel, and return it as it is: interpreted calls cost nothing more.

    Args:
        function: The function.
        allocates: Whether it makes arrays or lists. For those that do not, references to columns
            are not counted, which would take most of the time of a small kernel.
        inline: Whether its machine code becomes part of its callers, for kernels that are small and
            take many columns, which a call would copy.
    """

    def mark(marked: _Function) -> _Function:
        _options[marked] = _Options(allocates=allocates, inline=inline)
        return marked

    return mark if function is None else mark(function)


def pays(function: Callable[..., Any], size: float, when: Threshold | None = None) -> bool:
    """Return whether a kernel is to run compiled; if not, count the size as interpreted.

    Args:
        function: The kernel.
        size: Size of its input, in all calls together where the caller knows of more.
        when: From which size on; ``None`` = ``ROWS``.
    """
    limit = ROWS if when is None else when
    if size >= limit.size or _interpreted[function] >= limit.total:
        return True
    if limit.loaded and function in _entries:
        return True
    _interpreted[function] += size
    return False


def run(
    function: Callable[..., _R],
    size: float,
    inputs: Sequence[Column],
    outputs: Sequence[Column],
    when: Threshold | None = None,
) -> _R:
    """Run a kernel, interpreted or compiled, that fills its outputs; return what it returns.

    Args:
        function: The kernel; it takes the inputs, then the outputs.
        size: Size of the input; see ``pays``.
        inputs: Arrays, numbers, and named tuples of them; they are only read.
        outputs: Arrays, and named tuples of them, that it changes.
        when: From which size on it is compiled; ``None`` = ``ROWS``.
    """
    if pays(function, size, when):
        return compiled(function)(*map(_contiguous, inputs), *outputs)
    # Most are arrays: asking for them here saves a call each, which small inputs would notice.
    array = np.ndarray
    given = [v.tolist() if type(v) is array else as_lists(v) for v in inputs]
    lists = [v.tolist() if type(v) is array else as_lists(v) for v in outputs]
    result = function(*given, *lists)
    for output, values in zip(outputs, lists, strict=True):
        if type(output) is array:
            output[:] = values
        else:
            for part, column in zip(output, values, strict=True):
                part[:] = column
    return result


def _contiguous(value: Column) -> Column:
    """Return an input whose arrays have no gaps: for those with gaps Numba would compile again."""
    if type(value) is np.ndarray:
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)
    if hasattr(value, "_fields"):
        # Nearly always nothing has gaps, and the tuple can stay as it is.
        array, number = np.ndarray, (float, int)
        if all(v.flags.c_contiguous if type(v) is array else isinstance(v, number) for v in value):
            return value
        return type(value)(*map(_contiguous, value))
    return value


def as_lists(value: _Value) -> _Value:
    """Return an array as a list, a named tuple with its arrays as lists, anything else as it is."""
    given: Any = value
    if isinstance(given, (np.ndarray, np.generic)):
        given = given.tolist()
    elif hasattr(given, "_fields"):
        given = type(given)(*map(as_lists, given))
    result: _Value = given
    return result


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the compiled twin of a kernel, which takes arrays in place of lists."""
    twin = _entries.get(function)
    if twin is None:
        with _stopwatch.running():
            twin = _entries[function] = _compile(function, is_entry=True)
    result: Callable[_P, _R] = twin
    return result


def _compile(function: Callable[..., Any], *, is_entry: bool) -> Callable[..., Any]:
    """Return a function in machine code, called from Python (an entry) or by other kernels.

    Only entries are kept on disk: they hold the machine code of all that they call.
    """
    from numba import njit  # noqa: PLC0415 (loaded only where it pays)

    assert isinstance(function, FunctionType)
    options = _options[function]
    scope = dict(function.__globals__)
    for name, callee in _called(function):
        if callee not in _callees:
            _callees[callee] = _compile(callee, is_entry=False)
        scope[name] = _callees[callee]
    twin = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    twin.__qualname__ = function.__qualname__
    settings: dict[str, Any] = {
        "_nrt": options.allocates,
        "forceinline": options.inline and not is_entry,
        # Wrappers that only Python or C would call take longer to compile than the loops.
        "no_cpython_wrapper": not is_entry,
        "no_cfunc_wrapper": True,
    }
    if not is_entry:
        callee = njit(**settings)(twin)
        callee.get_call_template = _without_literals(callee.get_call_template)
        return callee  # type: ignore[no-any-return]
    try:
        twin.__qualname__ += f"_{_digest(function)}"
        dispatcher = njit(cache=True, **settings)(twin)
        lock = Path(dispatcher.stats.cache_path, f"{twin.__qualname__}.lock")
        dispatcher.compile = _in_turn(dispatcher.compile, lock)
        return dispatcher  # type: ignore[no-any-return]
    except (OSError, RuntimeError):  # no source to be read, or no directory for a cache
        return njit(**settings)(twin)  # type: ignore[no-any-return]


def _without_literals(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compiles a kernel for the types of its arguments, whatever their values.

    Types are inferred in passes: where a variable begins as -1 the first knows it as that number,
    and Numba would compile all that is called with it, for that number and then for any.
    """
    from numba.core import types  # noqa: PLC0415 (loaded only where it pays)

    unliteral: Callable[[Any], Any] = types.unliteral

    def call(args: Sequence[Any], kws: Mapping[str, Any]) -> object:
        named = {name: unliteral(value) for name, value in kws.items()}
        return resolve(tuple(map(unliteral, args)), named)

    return call


def _in_turn(compile_or_load: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """Return what compiles a kernel, or loads it, while no other process does so.

    A lock is that of a process and not of what it forks, and ends with the process.
    """

    def call(signature: object) -> object:
        with ExitStack() as stack:
            stack.enter_context(_stopwatch.running())
            # Without a folder that can be written to, or with one that has no locks, all compile.
            with suppress(OSError):
                lock.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(lock.open("w"))
                fcntl.lockf(file, fcntl.LOCK_EX)
            return compile_or_load(signature)

    return call


def _called(function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the kernels that a function calls, by the name under which it knows them."""
    for name, value in _read(function):
        if isinstance(value, FunctionType) and value in _options:
            yield name, value


def _read(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function reads of the module around it, by name, in the order of first use."""
    names = (step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL")
    for name in dict.fromkeys(names):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _digest(function: FunctionType) -> str:
    """Return a digest of all that the machine code of a kernel follows from."""
    reached = [function]
    for caller in reached:
        reached.extend(callee for _, callee in _called(caller) if callee not in reached)
    parts = {Path(found.__code__.co_filename).read_bytes() for found in reached}
    for found in reached:
        for name, value in _read(found):
            if isinstance(value, (int, float, str, tuple)):
                parts.add(f"{found.__module__} {name} {value!r}".encode())
        for value in found.__globals__.values():
            if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
                parts.add(f"{value.__module__} {value.__qualname__} {value._fields}".encode())
    return hashlib.blake2b(b"\0".join(sorted(parts)), digest_size=6).hexdigest()
