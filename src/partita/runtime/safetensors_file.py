"""Files of safetensors, written and read tensor by tensor: no model need be in memory whole."""

import io
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partita.atomic_files import replacing
from partita.errors import FormatError, UnsupportedError, reading
from partita.runtime.parts import Slice

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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


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
    with replacing(path, to_disk=True) as part, part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, value in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            flat = value.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + begin)


class SafetensorsFile:
    """A file of safetensors, of which only what is asked for is read.

    Attributes:
        path: The file.
        described: Shape and type of its tensors by name.
        bytes_read: Bytes that were read so far, with those of the header.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FormatError: There is no such file, or it is none of safetensors, or not whole.
            UnsupportedError: A tensor has a type that is not known here.
        """
        self.path = path
        with reading(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if 8 + length > size:
                raise FormatError("is no whole file of safetensors: its header is cut off")
            header = _parsed(file.read(length))
        self._data = self.bytes_read = 8 + length
        self.described: dict[str, Described] = {}
        self._begin: dict[str, int] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            with reading(path):
                self._admit(name, entry, size)

    def _admit(self, name: str, entry: Any, size: int) -> None:  # noqa: ANN401  # of a file
        try:
            dtype, shape = entry["dtype"], torch.Size(entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as exc:
            raise FormatError(f"the header does not say where {name!r} lies") from exc
        if dtype not in _DTYPES:
            raise UnsupportedError(f"{self.path}: {name!r} is of type {dtype}, which is not known")
        self.described[name] = (shape, _DTYPES[dtype])
        if begin < 0 or end - begin != size_of(self.described[name]):
            raise FormatError(f"{name!r} has {end - begin} bytes; its shape and type need others")
        if self._data + end > size:
            raise FormatError(f"is not whole: it ends within {name!r}")
        self._begin[name] = self._data + begin

    def read_into(self, name: str, target: Tensor, part: Slice | None = None) -> None:
        """Read a tensor into another of its shape, whatever the type of that.

        Args:
            name: The tensor.
            target: The other one.
            part: What is read of it; the rest of the other stays as it is. None = all.

        Raises:
            FormatError: The file has become shorter, or cannot be read.
        """
        shape, dtype = self.described[name]
        if part is not None:
            for begin, length in part.ranges(shape[part.dim]):
                self._read_range(name, target.detach(), part.dim, begin, length)
            return
        # Where nothing is to be converted no second tensor takes memory.
        direct = target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous()
        value = target.detach() if direct else torch.empty(shape, dtype=dtype)
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            self._fill(file, name, 0, value)
        if not direct:
            with torch.no_grad():
                target.copy_(value)

    def _read_range(self, name: str, target: Tensor, dim: int, begin: int, length: int) -> None:
        """Read some entries of a dimension: a stretch of the file for each place before it."""
        shape, dtype = self.described[name]
        inner = shape[dim + 1 :].numel()
        value = torch.empty((*shape[:dim], length, *shape[dim + 1 :]), dtype=dtype)
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            for number, row in enumerate(value.view(-1, length * inner)):
                self._fill(file, name, (number * shape[dim] + begin) * inner, row)
        with torch.no_grad():
            target.narrow(dim, begin, length).copy_(value)

    def _fill(self, file: io.FileIO, name: str, first: int, value: Tensor) -> None:
        """Fill a contiguous tensor with the elements of another from one on."""
        if not value.numel():
            return
        file.seek(self._begin[name] + first * value.itemsize)
        left = value.reshape(-1).view(torch.uint8).numpy().data
        self.bytes_read += left.nbytes
        while left:
            count = file.readinto(left)
            if not count:
                raise FormatError(f"is not whole: it ends within {name!r}")
            left = left[count:]


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise FormatError("is no file of safetensors: its header is not JSON") from exc
    if not isinstance(found, dict):
        raise FormatError("is no file of safetensors: its header is no JSON object")
    return found
