"""Profiles that were measured before, in a directory, under a key of all that they depend on.

The key is made after the model was captured: functions with their literals, shapes and types; the
source files of all classes of the model and of what they import, directly or not; versions; the
processor; the options. A model that has changed has another key, so that nothing found here is out
of date. Files of installed packages that define no class of the model are covered by the version of
their package, those of the standard library by that of Python. What no file defines (a notebook, a
prompt) is known by the byte code of all its functions and classes.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType

import torch

from partita.atomic_files import write_atomically
from partita.capture.captured import CapturedModel
from partita.capture.op import FunctionCall, ModuleCall
from partita.core.codec import read_json, write_json
from partita.core.graph import Graph
from partita.errors import InvalidInputError, reason_of

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


logger = logging.getLogger(__name__)


def profile_key(captured: CapturedModel, facts: Mapping[str, object]) -> str:
    """Return the key of a measurement.

    Args:
        captured: The model.
        facts: Further facts that it depends on: options, versions, processor, threads.
    """
    digest = hashlib.sha256(captured.digest.encode())
    digest.update(f"{captured.mode} {captured.granularity} {captured.graph.batch_size}\n".encode())
    for name, tensor in captured.parameters.items():
        said = (name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        digest.update(f"{said}\n".encode())
    for name, code in sorted(code_of(_modules_of(captured)).items()):
        digest.update(f"{name} {hashlib.sha256(code).hexdigest()}\n".encode())
    for module in captured.model.modules():
        digest.update(f"{module.extra_repr()} {module.training}\n".encode())
    for fact, value in sorted(facts.items()):
        digest.update(f"{fact}={value!r}\n".encode())
    digest.update(f"{torch.__version__} {sys.version}".encode())
    return digest.hexdigest()[:40]


def _modules_of(captured: CapturedModel) -> set[str]:
    """Return the names of the Python modules that define what a captured model calls."""
    modules = list(captured.model.modules())
    functions: list[object] = []
    for op in captured.ops:
        for leaf in op.leaves:
            if isinstance(leaf.func, FunctionCall):
                functions.append(leaf.func.function)
            elif isinstance(leaf.func, ModuleCall):
                modules += leaf.func.module.modules()
    for module in modules:
        functions += [value for value in vars(module).values() if callable(value)]
    classes = {kind for module in modules for kind in type(module).__mro__}
    return {str(getattr(value, "__module__", "")) for value in (*classes, *functions)}


class ProfileCache:
    """Graphs with costs in a directory, a file each."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def load(self, key: str) -> Graph | None:
        """Return the graph under a key; None if there is none that can be read."""
        path = self._path(key)
        try:
            graph = read_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, InvalidInputError, UnicodeDecodeError) as exc:
            logger.warning("%s cannot be read and is measured anew: %s", path, exc)
            return None
        return graph if isinstance(graph, Graph) else None

    def save(self, key: str, graph: Graph) -> None:
        """Write a graph, whole or not at all; where that cannot be done there is a warning only."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(key), write_json(graph))
        except OSError as exc:
            reason = reason_of(exc)
            logger.warning("cache %s cannot be written: %s", self._directory, reason)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.graph.json"
