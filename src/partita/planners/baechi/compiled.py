"""Functions that run as they are on lists, and compiled by Numba on arrays.

A kernel may call other kernels of its module. Interpreted it costs no import; compiled, with an
on-disk cache, it is a hundred times faster. Both do the same floating-point operations in the same
order, so that the size of an input never changes an answer.
"""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from types import FunctionType
from typing import Any, TypeAlias

Number: TypeAlias = Any
"""What a kernel computes from its columns, an integer, a float or a truth value."""

COMPILE_FROM = 500_000
"""Steps of a kernel from which compiled code is worth the import of Numba."""


class Kernel:
    """A function with a compiled twin."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 (lists or arrays)
        """Run interpreted."""
        return self._function(*arguments)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The same function in machine code, with the compiled twins of the kernels it calls."""
        from numba import njit  # noqa: PLC0415 (loaded only where it pays)

        function: Any = self._function
        scope = dict(function.__globals__)
        for name in function.__code__.co_names:
            if isinstance(scope.get(name), Kernel):
                scope[name] = scope[name].compiled
        twin = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        twin.__qualname__ = function.__qualname__
        # Kernels allocate nothing, and counting references to columns would cost most of the time.
        options: dict[str, Any] = {"cache": True, "_nrt": False}
        result: Callable[..., Any] = njit(**options)(twin)
        return result


def run(kernel: Kernel, steps: float, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Run a kernel that fills its outputs, compiled where it takes many steps.

    Args:
        kernel: The kernel.
        steps: How many innermost steps it takes, about.
        inputs: Arrays, numbers, and named tuples of them; they are only read.
        outputs: Arrays that it fills.

    Returns:
        What the kernel returns.
    """
    if steps >= COMPILE_FROM:
        return kernel.compiled(*inputs, *outputs)
    lists = [array.tolist() for array in outputs]
    result = kernel(*(as_lists(value) for value in inputs), *lists)
    for array, values in zip(outputs, lists, strict=True):
        array[:] = values
    return result


def as_lists(value: Any) -> Any:  # noqa: ANN401 (arrays, numbers, and named tuples of them)
    """Return an input with its arrays as lists, which are faster to index one by one."""
    if isinstance(value, tuple):
        return type(value)(*map(as_lists, value))
    return value.tolist() if hasattr(value, "tolist") else value
