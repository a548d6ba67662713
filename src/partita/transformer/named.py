"""Shapes by name (``catalogue/shapes.yaml``) and from configurations of Hugging Face.

A configuration is read by its keys alone: what counts is in them, so that neither transformers nor
weights are needed, and a model of hundreds of billions of parameters is read in milliseconds.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from partita.errors import InvalidInputError
from partita.names import nearest
from partita.transformer.shape import Shape
from partita.yaml_nodes import parse_yaml, read_count, read_flag, read_table

_FLAGS = ("gated", "tied", "causal")
_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class NamedShape:
    """A shape and the length of the sequences that it is trained with, unless asked otherwise.

    Attributes:
        is_listed: Whether it is of the catalogue; else a configuration's.
    """

    shape: Shape
    sequence_length: int
    is_listed: bool = False


@cache
def named_shapes() -> Mapping[str, NamedShape]:
    """Return the shapes of the catalogue by name."""
    text = resources.files("partita.catalogue").joinpath("shapes.yaml")
    root = read_table(parse_yaml(text.read_text(encoding="utf-8")), "shapes", ("shapes",))
    fields = {field.name for field in dataclasses.fields(Shape)} - {"name"}
    found: dict[str, NamedShape] = {}
    for name, node in read_table(root.entries["shapes"], "shapes").entries.items():
        entries = read_table(node, f"shape {name}", (*fields, "length")).entries
        values: dict[str, Any] = {
            key: read_flag(value, f"shape {name}: {key}")
            if key in _FLAGS
            else read_count(value, f"shape {name}: {key}", low=0, high=_MOST)
            for key, value in entries.items()
        }
        length = values.pop("length")
        shape = Shape(name=name, **values)
        found[name] = NamedShape(shape=shape, sequence_length=length, is_listed=True)
    return found


def find_shape(model: str) -> NamedShape | None:
    """Return the shape that a name, or a file with a configuration, stands for; None = none.

    >>> find_shape("llama3-8b").shape.params
    8030261248

    Raises:
        InvalidInputError: A configuration of a model that is no transformer of equal blocks.
    """
    known = named_shapes().get(_listed_name(model))
    if known is not None:
        return known
    path = Path(model)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None  # no configuration: whoever reads other documents says what is wrong with it
    sizes = ("hidden_size", "n_embd", "text_config")
    if not isinstance(config, dict) or "format" in config or not any(k in config for k in sizes):
        return None
    found = shape_from_config(config, name=model)
    return dataclasses.replace(found, shape=_named(found.shape, config, path))


def _named(shape: Shape, config: Mapping[str, Any], path: Path) -> Shape:
    """Return the shape of a configuration under a name that says which model it is.

    That is the name of a listed model of the same shape, else what the file is called if that is
    not ``config.json``, else what the configuration calls itself, or its kind and its size.
    """
    for listed in named_shapes().values():
        if dataclasses.replace(shape, name=listed.shape.name) == listed.shape:
            return listed.shape
    own = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    size = shape.params / 1e9
    digits = f"{size:.1f}b" if size < 10 else f"{size:,.0f}b"
    sized = f"{config.get('model_type') or 'model'}-{digits}".replace(".0b", "b")
    stem = path.stem if path.name != "config.json" else ""
    return dataclasses.replace(shape, name=stem or own or sized)


def _listed_name(model: str) -> str:
    """Return the name in the catalogue of a model, or of its id on Hugging Face's hub.

    Releases of one shape have one name: Llama 3.1 and 3.3 are as large as Llama 3.

    >>> _listed_name("meta-llama/Llama-3.1-70B-Instruct"), _listed_name("llama3.1-8b")
    ('llama3-70b', 'llama3-8b')
    """
    name = re.sub(r"^(llama-?3)\.[13]\b", r"\1", model.lower().rpartition("/")[2])
    if "/" not in model or Path(model).exists():
        return name if "/" not in model else model.lower()
    name = re.sub(r"^meta-", "", name)
    name = re.sub(r"-(instruct|base|chat|it|hf|v[0-9.]+|[0-9]{4}).*$", "", name)
    name = re.sub(r"^(llama-?3)\.[13]\b", r"\1", name)
    plain = {re.sub(r"[^a-z0-9]", "", known): known for known in named_shapes()}
    return plain.get(re.sub(r"[^a-z0-9]", "", name), model.lower())


def near_shape(name: str) -> str | None:
    """Return the shape that a name was probably meant to be, whatever its hyphens and dots.

    >>> near_shape("llama-3-8b")
    'llama3-8b'
    """
    plain = {re.sub(r"[^a-z0-9]", "", known): known for known in named_shapes()}
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    near = nearest(text, plain)
    return plain[near] if near else None


def shape_from_config(config: Mapping[str, Any], *, name: str = "model") -> NamedShape:
    """Return the shape of a configuration's decoder.

    Raises:
        InvalidInputError: A key that is needed is not there.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        config = text

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if config.get(key) is not None:
                return int(config[key])
        if default is None:
            raise InvalidInputError(
                f"configuration of {name!r} has no {' or '.join(keys)}; expected that of a "
                "decoder-only transformer"
            )
        return default

    hidden, layers = number("hidden_size", "n_embd"), number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    rank = number("kv_lora_rank", default=0)
    experts = number("num_local_experts", "n_routed_experts", "num_experts", default=0)
    expert_ffn = number("moe_intermediate_size", "intermediate_size", default=0) if experts else 0
    ffn = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    dense = number("first_k_dense_replace", default=0)
    interval = number(
        "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1
    )
    shared = number("shared_expert_intermediate_size", default=0)
    if not shared and experts:
        shared = number("n_shared_experts", default=0) * expert_ffn
    windowed = _windowed_layers(config, layers)
    shape = Shape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=0 if rank else number("num_key_value_heads", default=heads),
        head_dim=number("qk_nope_head_dim", "head_dim", default=0 if hidden % heads == 0 else 128),
        ffn=ffn if not experts or dense or interval > 1 else 0,
        gated=_is_gated(config),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", _ties_usually(config))),
        experts=experts,
        top_k=number("num_experts_per_tok", "experts_per_token", default=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=dense,
        expert_interval=max(1, interval),
        query_rank=number("q_lora_rank", default=0) if rank else 0,
        kv_rank=rank,
        rope_dim=number("qk_rope_head_dim", default=0) if rank else 0,
        value_dim=number("v_head_dim", default=0) if rank else 0,
        window=number("sliding_window", default=0) if windowed else 0,
        window_layers=windowed,
    )
    length = number("max_position_embeddings", "n_positions", default=4096)
    return NamedShape(shape=shape, sequence_length=min(length, 4096))


def _ties_usually(config: Mapping[str, Any]) -> bool:
    """Return whether a family's head is its embedding where a configuration does not say."""
    kind = str(config.get("model_type", ""))
    return kind.startswith("gemma") or kind in ("gpt2", "opt", "bloom", "falcon", "mpt")


def _is_gated(config: Mapping[str, Any]) -> bool:
    """Return whether the feed-forward part has a gate: all but GPT-2's and its like."""
    ungated = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt")
    return str(config.get("model_type", "")) not in ungated


def _windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers see a window only."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    pattern = int(config.get("sliding_window_pattern") or 0)
    return layers - layers // pattern if pattern > 1 else layers
