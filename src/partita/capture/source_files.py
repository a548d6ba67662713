"""The code that a model depends on: files of its classes, and what these import, directly or not.

Files of installed packages that define no class of the model are covered by the version of their
package, those of the standard library by that of Python. What no file defines (a notebook, a
prompt) is told by the byte code of all its functions and classes.
"""

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def code_of(names: Iterable[str]) -> dict[str, bytes]:
    """Return what defines some modules and all that they import, by name.

    Args:
        names: Names of loaded modules.
    """
    starts = set(names)
    found: dict[str, bytes] = {}
    waiting = sorted(starts)
    while waiting:
        name = waiting.pop()
        module, top = sys.modules.get(name), name.partition(".")[0]
        if name in found or module is None or top in sys.stdlib_module_names - {"__main__"}:
            continue
        path = _file_of(module)
        if path is not None and _INSTALLED.intersection(path.parts):
            found[f"{top} (version)"] = _version_of(top).encode()
            if name in starts and top != "torch":
                found[name] = path.read_bytes()
        elif path is not None:
            found[name] = path.read_bytes()
            waiting += _imports_of(module, found[name])
        else:
            found[name] = _defined_in(module)
            waiting += _names_in(module)
    return found


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if file is not None and Path(file).is_file() else None


def _version_of(package: str) -> str:
    """Return the version of an installed package, as it says itself or its installer."""
    said = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _imports_of(module: ModuleType, source: bytes) -> set[str]:
    """Return the loaded modules that a file imports, at any place; none if it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    wanted: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            wanted.add(base)
            wanted.update(f"{base}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in wanted]
    packages = {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}
    return packages.intersection(sys.modules)


def _absolute(module: ModuleType, node: ast.ImportFrom) -> str:
    """Return the module that a ``from`` names."""
    name = "." * node.level + (node.module or "")
    try:
        return importlib.util.resolve_name(name, module.__package__)
    except ImportError:
        return node.module or ""


def _names_in(module: ModuleType) -> set[str]:
    """Return the modules that the names of a module come from."""
    held = list(vars(module).values())
    modules = {value.__name__ for value in held if isinstance(value, ModuleType)}
    return modules | {str(getattr(value, "__module__", "")) for value in held}


def _defined_in(module: ModuleType) -> bytes:
    """Return the byte code of all functions and methods that a module defines."""
    return b"\n".join(
        f"{name} ".encode() + _bytes_of(code)
        for name, value in sorted(vars(module).items())
        if getattr(value, "__module__", None) == module.__name__
        for code in _codes(value)
    )


def _codes(value: object) -> Iterator[CodeType]:
    members = [vars(value)[name] for name in sorted(vars(value))] if isinstance(value, type) else []
    for member in (value, *members):
        function = getattr(member, "__func__", member)
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _bytes_of(code: CodeType) -> bytes:
    """Return byte code with its constants, which do not say where they are in memory."""
    inner = b"".join(_bytes_of(c) for c in code.co_consts if isinstance(c, CodeType))
    plain = [c for c in code.co_consts if not isinstance(c, CodeType)]
    return code.co_code + repr((plain, code.co_names)).encode() + inner
