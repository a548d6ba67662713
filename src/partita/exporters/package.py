"""Exported packages: their files, written into a directory, and the messages between stages."""

import io
import json
import keyword
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.capture.tree import Const, leaves_of
from partita.errors import InvalidInputError
from partita.exporters import support
from partita.exporters.blueprint import Blueprint
from partita.exporters.model_source import init_source, main_source, model_source, readme
from partita.exporters.python_source import identifier
from partita.exporters.stage_source import StageSource, crossing_names, stage_source

VERSION = 1


def wiring_of(
    blueprint: Blueprint, crossing: Mapping[int, str], sources: Sequence[StageSource]
) -> dict[str, Any]:
    """Return inputs, stages, replicas and what they exchange."""
    plan = blueprint.plan
    maker = {row: number for number, s in enumerate(blueprint.stages) for row in s.leaving}

    def described(row: int) -> dict[str, Any]:
        info = blueprint.values[row]
        return {
            "tensor": blueprint.names[row],
            "variable": crossing[row],
            "shape": list(info.shape) if blueprint.has_shapes else None,
            "dtype": str(info.dtype).removeprefix("torch.") if blueprint.has_shapes else None,
            "gradient": info.requires_grad,
            "from": f"stage{maker[row]}" if row in maker else "input",
        }

    readers: dict[int, list[int]] = {}
    for number, stage in enumerate(blueprint.stages):
        for row in stage.inputs:
            readers.setdefault(row, []).append(number)
    stages = [
        {
            "name": f"stage{number}",
            "devices": [[plan.devices[d] for d in group] for group in placed.devices],
            "replicas": placed.num_replicas,
            "shares": list(placed.shares),
            "inputs": [described(row) for row in stage.inputs],
            "outputs": [
                {**described(row), "to": [f"stage{s}" for s in readers.get(row, [])]}
                for row in stage.leaving
            ],
            "parameters": list(source.parameters),
        }
        for number, (stage, placed, source) in enumerate(
            zip(blueprint.stages, plan.stages, sources, strict=True)
        )
    ]
    holders: dict[str, list[str]] = {}
    for number, source in enumerate(sources):
        for name in source.parameters:
            holders.setdefault(name, []).append(f"stage{number}")
    return {
        "format": "partita.export",
        "version": VERSION,
        "model": blueprint.name,
        "fingerprint": plan.fingerprint,
        "schedule": plan.schedule.value,
        "microbatch_sizes": plan.microbatch_sizes.tolist(),
        "modes": list(blueprint.modes),
        "needs": sorted({"torch"}.union(*(source.needs for source in sources))),
        "inputs": [
            {**described(row), "optional": row in blueprint.labels} for row in blueprint.inputs
        ],
        "outputs": [described(row) for row in blueprint.outputs],
        "loss": described(blueprint.loss) if blueprint.loss >= 0 else None,
        "stages": stages,
        "shared_parameters": {n: where for n, where in holders.items() if len(where) > 1},
        "aliases": dict(blueprint.aliases),
    }


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
