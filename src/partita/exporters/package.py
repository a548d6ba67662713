"""Writes an exported package into a directory."""

import io
import json
import keyword
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from partita.capture.tree import Const, leaves_of
from partita.errors import InvalidInputError
from partita.exporters import support
from partita.exporters.blueprint import Blueprint
from partita.exporters.model_source import init_source, main_source, model_source, readme
from partita.exporters.naming import identifier
from partita.exporters.stage_source import crossing_names, stage_source
from partita.exporters.wiring import wiring_of


def package_name(text: str) -> str:
    """Return the name of a package for a model or directory.

    >>> package_name("gpt3-2.7b")
    'gpt3_2_7b'
    """
    return identifier(text)


def package_files(
    blueprint: Blueprint,
    package: str,
    inputs: Mapping[str, Tensor] | None,
    *,
    weights: bool = False,
) -> dict[str, bytes]:
    """Return the files of a package by name.

    Args:
        blueprint: The model in stages.
        package: Name of the package.
        inputs: One microbatch by the names of the graph's inputs, for the self-test; None where
            no shapes are known: no self-test.
        weights: Whether parameters and buffers are written too.

    Raises:
        InvalidInputError: An op cannot be written, or the name is none of a package.
    """
    if not package.isidentifier() or keyword.iskeyword(package):
        raise InvalidInputError(
            f"{package!r} is not the name of a package; such as {package_name(package)!r}"
        )
    crossing = crossing_names(blueprint)
    sources = [stage_source(blueprint, row, crossing) for row in range(len(blueprint.stages))]
    wiring = wiring_of(blueprint, crossing, sources)
    texts = {
        "__init__.py": init_source(blueprint, crossing),
        "whole.py": model_source(blueprint, crossing),
        "support.py": Path(support.__file__).read_text(encoding="utf-8"),
        "wiring.json": json.dumps(wiring, indent=2),
        "README.md": readme(blueprint, wiring, package),
    }
    texts |= {f"stage{row}.py": source.text for row, source in enumerate(sources)}
    files = {name: text.encode() for name, text in texts.items()}
    used = {index for source in sources for index in source.constants}
    used |= {leaf.index for _, leaf in leaves_of(blueprint.output) if isinstance(leaf, Const)}
    kept = {f"constant_{index}": blueprint.constants[index] for index in sorted(used)}
    memories = {index for source in sources for index in source.memories}
    kept |= {f"memory_{index}": _memory(blueprint.constants[index]) for index in sorted(memories)}
    kept |= {n: t for n, t in blueprint.parameters.items() if not isinstance(t, nn.Parameter)}
    if kept:
        files["constants.pt"] = _saved(kept)
    if inputs is not None:
        files["__main__.py"] = main_source(package).encode()
        files["example.pt"] = _saved(_whole_numbers(blueprint, crossing, inputs))
    if weights:
        state = {n: t for n, t in blueprint.parameters.items() if n not in blueprint.unsaved}
        files["weights.pt"] = _saved(state)
    return files


def _whole_numbers(
    blueprint: Blueprint, crossing: Mapping[int, str], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the inputs that cannot be drawn: tokens, lengths, coordinates, masks."""
    row_of = {blueprint.names[row]: row for row in blueprint.inputs}
    return {
        crossing[row_of[name]]: tensor
        for name, tensor in inputs.items()
        if name in row_of and not tensor.is_floating_point()
    }


def _memory(tensor: Tensor) -> Tensor:
    """Return all numbers of the memory that a tensor is a view of."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as torch saves them."""
    file = io.BytesIO()
    torch.save({name: tensor.detach() for name, tensor in tensors.items()}, file)
    return file.getvalue()
