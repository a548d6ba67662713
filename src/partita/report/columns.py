"""Columns of numbers as a short text, for pages: the one encoding, with a version.

Every column holds whole numbers of 32 bits. It is written as differences between neighbours or as
it stands, whichever packs better; the bytes of all values are then put into planes (all lowest
bytes, all second bytes, and so on), because planes of slowly changing numbers are mostly equal; all
planes are packed by gzip, which browsers unpack themselves, and the result is base64. The 21 MB of
JSON of a timeline of 197,000 instructions become 0.1 MB, 1.3 MB where its times are irregular.

A column may stand for other numbers: ``value = base + scale * whole``.
"""

import base64
import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.core.columns import Array
from partita.errors import FormatError, InvalidInputError

VERSION = 1
_WHOLE = 2**32
_QUICK = 1
_SMALLEST = 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaled:
    """Numbers as whole ones: ``base + scale * whole``.

    Attributes:
        whole: From 0 to 2 ** 32 - 1.
        scale: Distance between two neighbouring numbers.
        base: The number that 0 stands for.
    """

    whole: Array
    scale: float
    base: float = 0.0


def ticks(values: Array, length: float) -> Scaled:
    """Return numbers from 0 to a length on a grid of a 2 ** 32nd of it."""
    scale = max(float(length), 1e-300) / (_WHOLE - 1)
    whole = np.clip(np.rint(np.asarray(values, np.float64) / scale), 0, _WHOLE - 1)
    return Scaled(whole=whole.astype(np.int64), scale=scale)


def pack(columns: Mapping[str, Array | Scaled]) -> dict[str, Any]:
    """Return columns as JSON values; they may differ in length.

    Raises:
        InvalidInputError: A number does not fit into 32 bits.
    """
    described, planes = [], []
    for name, column in columns.items():
        scaled = column if isinstance(column, Scaled) else None
        whole = np.asarray(scaled.whole if scaled else column, np.int64)
        signed = bool((whole < 0).any())
        low = -(_WHOLE // 2) if signed else 0
        if bool(((whole < low) | (whole >= low + _WHOLE)).any()):
            raise InvalidInputError(f"column {name!r} has numbers beyond 32 bits")
        plain = (whole % _WHOLE).astype(np.uint32)
        options = [_planes(plain), _planes(_differences(plain))]
        sizes = [len(zlib.compress(data, _QUICK)) for _, data in options]
        delta = sizes[1] < sizes[0]
        width, data = options[delta]
        planes.append(data)
        about: dict[str, Any] = {"name": name, "rows": len(whole), "width": width}
        about |= {"delta": delta, "signed": signed}
        if scaled is not None:
            about |= {"scale": scaled.scale, "base": scaled.base}
        described.append(about)
    packed = gzip.compress(b"".join(planes), compresslevel=_SMALLEST, mtime=0)
    return {
        "version": VERSION,
        "columns": described,
        "data": base64.b64encode(packed).decode("ascii"),
    }


def unpack(packed: Mapping[str, Any]) -> dict[str, Array]:
    """Return the columns of packed ones: what the page does, for tests and other readers.

    Raises:
        FormatError: It is of another version.
    """
    if packed["version"] != VERSION:
        raise FormatError(f"columns are of version {packed['version']}; expected {VERSION}")
    data = np.frombuffer(gzip.decompress(base64.b64decode(packed["data"])), np.uint8)
    result, at = {}, 0
    for about in packed["columns"]:
        rows, width = about["rows"], about["width"]
        parts = data[at : at + rows * width].reshape(width, rows).astype(np.uint32)
        at += rows * width
        values = np.zeros(rows, np.uint32)
        for plane in range(width):
            values |= parts[plane] << np.uint32(8 * plane)
        if about["delta"]:
            steps = (values >> np.uint32(1)) ^ (np.uint32(0) - (values & np.uint32(1)))
            values = np.cumsum(steps, dtype=np.uint32)
        whole: Array = values.astype(np.int32) if about["signed"] else values
        if "scale" in about:
            whole = about["base"] + about["scale"] * whole.astype(np.float64)
        result[about["name"]] = whole
    return result


def _differences(values: Array) -> Array:
    """Return the differences of neighbours, modulo 2 ** 32, small ones of either sign small."""
    steps = np.diff(values, prepend=np.uint32(0)).astype(np.int32)
    return ((steps << 1) ^ (steps >> 31)).astype(np.uint32)


def _planes(values: Array) -> tuple[int, bytes]:
    """Return how many bytes each value needs, and all first bytes, then all second ones, ..."""
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    parts = values.astype("<u4").view(np.uint8).reshape(len(values), 4)[:, :width]
    return width, np.ascontiguousarray(parts.T).tobytes()
