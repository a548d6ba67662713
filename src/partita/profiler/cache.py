"""Profiles that were measured before, in a directory, under a key of all that they depend on.

The key is made after the model was captured: functions with their literals, shapes and types; the
source files of all classes of the model and of what they import; versions; the processor; the
options. A model that has changed has another key, so that nothing found here is out of date.
"""

import hashlib
import logging
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from partita.capture.captured import CapturedModel
from partita.capture.op import FunctionCall, ModuleCall
from partita.capture.source_files import code_of
from partita.core.codec import read_json, write_json
from partita.core.graph import Graph
from partita.errors import InvalidInputError

logger = logging.getLogger(__name__)


def profile_key(captured: CapturedModel, facts: Mapping[str, object]) -> str:
    """Return the key of a measurement.

    Args:
        captured: The model.
        facts: What else it depends on: options, versions, processor, threads.
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
        part: Path | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._directory, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                part = Path(file.name)
                file.write(write_json(graph))
            part.replace(self._path(key))
        except OSError as exc:
            reason = exc.strerror or str(exc)
            logger.warning("cache %s cannot be written: %s", self._directory, reason)
            if part is not None:
                with suppress(OSError):
                    part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.graph.json"
