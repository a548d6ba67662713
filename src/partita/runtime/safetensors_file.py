"""Writes files of safetensors tensor by tensor, so that a model need never be in memory whole."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partita.errors import UnsupportedError

Described: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor."""

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def size_of(described: Described) -> int:
    """Return the bytes of a tensor."""
    return described[0].numel() * described[1].itemsize


def write_weights(
    path: Path, described: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors to a file of safetensors, one at a time.

    Args:
        path: The file; it is there whole, or not at all.
        described: All of them by name, in the order of the file.
        tensors: The tensors, each once, in any order.

    Raises:
        UnsupportedError: One has a type that the format does not know.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (shape, dtype) in described.items():
        if dtype not in _NAMES:
            raise UnsupportedError(f"{name!r} is of {dtype}, which safetensors do not know")
        end = begin + size_of((shape, dtype))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, value in tensors:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                flat = value.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().tobytes())
            file.truncate(8 + len(text) + begin)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
