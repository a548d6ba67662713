"""Configurations of trainers as grids, found by content; nothing is executed or imported."""

import re
from collections.abc import Mapping

from partita.core.codec import parse_json
from partita.core.grid import Grid
from partita.errors import FormatError, InvalidInputError
from partita.trainers.accelerate import looks_like_accelerate, read_accelerate
from partita.trainers.deepspeed import looks_like_deepspeed, read_deepspeed
from partita.trainers.device_map import looks_like_device_map, read_device_map
from partita.trainers.megatron import looks_like_megatron, read_megatron
from partita.trainers.torchtitan import read_sections, read_toml

MAX_TEXT = 2_000_000
_COSTLY = re.compile(
    r"parallel|offload|overlap|fp8|expert|moe|activation|virtual|shard|pipeline|quantized|split"
    r"|zenflow|account-for|stage",
    re.IGNORECASE,
)
"""Names of settings that cost time or memory, among those of a model and its optimizer."""


def kind_of(text: str) -> str:
    """Return whose configuration a text is: a name of ``trainers.table``.

    Raises:
        FormatError: It is none that is known.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a file of {len(text)} characters; expected {MAX_TEXT} at most")
    if text.lstrip().startswith("{"):
        found = parse_json(text)
        if isinstance(found, Mapping) and "parallelism" in found:
            return "torchtitan"
        if looks_like_deepspeed(found):
            return "deepspeed"
        if looks_like_device_map(found):
            return "device-map"
    elif looks_like_megatron(text):
        return "megatron"
    elif looks_like_accelerate(text):
        return "accelerate"
    elif "[parallelism]" in text or "[training]" in text:
        return "torchtitan"
    raise FormatError(
        "no configuration of a trainer; expected arguments or a script of Megatron, TOML or saved "
        "JSON of torchtitan, JSON of DeepSpeed, YAML of accelerate, or a device map"
    )


def not_modelled(grid: Grid) -> list[str]:
    """Return what a configuration says that would change time or memory and is not modelled."""
    return [
        f"{name}={value}" if value else name
        for name, value in grid.annotations.items()
        if _COSTLY.search(name)
    ]


def read_configuration(text: str) -> Grid | Mapping[str, str]:
    """Return the grid of a configuration, or a device map as devices by module.

    Raises:
        FormatError: It is none that is known, or a value is wrong.
    """
    kind = kind_of(text)
    try:
        if kind == "megatron":
            return read_megatron(text)
        if kind == "accelerate":
            return read_accelerate(text)
        if kind == "deepspeed":
            return read_deepspeed(text)
        if kind == "device-map":
            return read_device_map(text)
        if text.lstrip().startswith("{"):
            return read_sections(parse_json(text))
        return read_toml(text)
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise FormatError(str(exc)) from exc
