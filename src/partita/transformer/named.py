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
        remarks: What of a configuration is counted otherwise than it is, a sentence each.
    """

    shape: Shape
    sequence_length: int
    is_listed: bool = False
    remarks: tuple[str, ...] = ()


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
    config = read_configuration(model)
    if config is None:
        return None
    found = shape_from_config(config, name=model)
    return dataclasses.replace(found, shape=_named(found.shape, config, Path(model)))


def read_configuration(model: str) -> Mapping[str, Any] | None:
    """Return the configuration of Hugging Face, of whatever model, in a file; None = none is.

    Whoever reads other documents says what is wrong with a file that holds none.
    """
    path = Path(model)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    keys = ("model_type", "architectures", "hidden_size", "n_embd", "text_config")
    if not isinstance(config, dict) or "format" in config or not any(k in config for k in keys):
        return None
    return config


def _named(shape: Shape, config: Mapping[str, Any], path: Path) -> Shape:
    """Return the shape of a configuration under a name that says which model it is.

    That is the name of a listed model of the same kind and shape, else what the file is called if
    that is not ``config.json``, else what the configuration calls itself, or its kind and its size.
    """
    family = re.match(r"[a-z]*", str(config.get("model_type") or "").lower())
    for listed in named_shapes().values():
        if family and not listed.shape.name.startswith(family[0]):
            continue  # a Llama that is as large as a Mistral is no Mistral
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
    """Return the shape of a configuration's text model.

    What a shape cannot hold is refused, as a model of the same widths would be priced instead.

    Raises:
        InvalidInputError: A key that is needed is not there, or a model whose layers are no
            attention and feed-forward part of one width.
    """
    keys = _Keys(config, name)
    _refuse_other_layers(keys)
    kind = keys.kind
    hidden = keys.count("hidden_size", "n_embd", "n_embed", "d_model")
    layers = keys.count("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = keys.count("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
    rank = keys.count("kv_lora_rank", default=0)
    experts = keys.count(
        "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", default=0
    )
    if experts == 1 or keys.values.get("is_moe") is False:
        experts = 0
    dense = keys.count(
        "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0
    )
    interval = keys.count(
        "decoder_sparse_step",
        "moe_layer_freq",
        "interleave_moe_layer_step",
        "moe_layer_interval",
        default=1,
    )
    ffn = _ffn(keys, hidden) if not experts or dense or interval > 1 else 0
    expert_ffn = keys.count("moe_intermediate_size", default=0) if experts else 0
    if experts and not expert_ffn:
        expert_ffn = keys.count("intermediate_size", "ffn_hidden_size")
    windowed = _windowed_layers(keys.values, layers)
    shape = Shape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=0 if rank else _kv_heads(keys, heads),
        head_dim=keys.count(
            "qk_nope_head_dim",
            "head_dim",
            "kv_channels",
            default=0 if hidden % heads == 0 else 128,
        ),
        ffn=ffn,
        gated=not _is_of(kind, "ungated"),
        vocab=keys.count("padded_vocab_size", "vocab_size"),
        tied=bool(keys.values.get("tie_word_embeddings", _is_of(kind, "tied"))),
        experts=experts,
        top_k=keys.count(*_TOP_K) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=_shared_ffn(keys, expert_ffn) if experts else 0,
        dense_layers=dense,
        expert_interval=max(1, interval),
        query_rank=keys.count("q_lora_rank", default=0) if rank else 0,
        kv_rank=rank,
        rope_dim=keys.count("qk_rope_head_dim", default=0) if rank else 0,
        value_dim=keys.count("v_head_dim", default=0) if rank else 0,
        causal=not _is_of(kind, "encoder") or bool(keys.values.get("is_decoder")),
        window=keys.count("sliding_window", default=0) if windowed else 0,
        window_layers=windowed,
    )
    length = keys.count("max_position_embeddings", "n_positions", default=4096)
    remarks = []
    if "linear_attention" in _kinds_of_layers(keys.values):
        remarks.append(
            "its layers of linear attention are counted as full attention: parameters and times "
            "are approximate"
        )
    if keys.has_other_models:
        remarks.append("only the text model is counted, not what reads images or sound")
    return NamedShape(shape=shape, sequence_length=min(length, 4096), remarks=tuple(remarks))


_TOP_K = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
_FAMILIES = {
    "encoder": "bert bert-generation big_bird camembert data2vec-text ernie esm megatron-bert "
    "mpnet roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl",
    "ungated": "apertus arcee biogpt bloom codegen falcon fuyu gpt-sw3 gpt2 gpt_bigcode gpt_neo "
    "gpt_neox gpt_neox_japanese gptj jais2 mpt nanochat nemotron openai-gpt opt persimmon phi "
    "starcoder2 xglm",
    "tied": "bloom cohere cohere2 falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo mpt openai-gpt opt "
    "starcoder2 xglm",
    "usual width": "bloom codegen falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj mpt openai-gpt",
}
"""What families are where no key of theirs says it (``model_type``); those whose feed-forward part
has the usual width may leave that out."""


def _is_of(kind: str, what: str) -> bool:
    """Return whether a family is an encoder, ungated, tied, or of the usual width."""
    if what in ("ungated", "tied") and _is_of(kind, "encoder"):
        return True
    return kind in _FAMILIES[what].split() or (what == "tied" and kind.startswith("gemma"))


_GATE_INCLUDED = ("moshi", "qwen")
"""Families that count the gate in the width of the feed-forward part."""
_OTHER_BLOCKS = ("hrm_text", "jetmoe", "longcat_flash", "roc_bert", "xmod")
"""Families whose blocks are built otherwise than their keys let think."""
_OF_OTHER_LAYERS = ("mamba_", "ssm_", "lru_", "conv_L_")
"""How keys of layers begin that are no attention: state spaces, recurrences, convolutions."""


class _Keys:
    """The keys of a configuration, or of its text model, whatever a family calls them."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config.get("text_config")
        self.has_other_models = "vision_config" in config or isinstance(text, Mapping)
        if isinstance(text, Mapping) and "hidden_size" not in config:
            config = text
        nested = (config.get("ffn_config"), config.get("attn_config"))  # of MPT and DBRX
        inner = {k: v for each in nested if isinstance(each, Mapping) for k, v in each.items()}
        self.values: Mapping[str, Any] = {**inner, **config}
        self.kind = str(config.get("model_type", ""))
        self._name = name

    def count(self, *keys: str, default: int | None = None) -> int:
        """Return the count that the first of several keys holds.

        Raises:
            InvalidInputError: None is there and there is no default, or it is no count.
        """
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, list) and value and value.count(value[0]) == len(value):
                value = value[0]  # the same in each layer
            if value is None:
                continue
            if isinstance(value, bool) or not _is_whole(value) or not 0 <= int(value) <= _MOST:
                raise self.refusal(f"has {key} = {_short(value)}; expected one whole number")
            return int(value)
        if default is None:
            raise self.refusal(
                f"has no {' or '.join(keys[:2])}; expected that of a decoder-only transformer"
            )
        return default

    def refusal(self, why: str) -> InvalidInputError:
        """Return the error that refuses the configuration."""
        return InvalidInputError(f"configuration of {self._name!r} {why}")


def _is_whole(value: object) -> bool:
    """Return whether a value is a whole number, or the text of one."""
    if isinstance(value, str):
        return value.isdecimal()
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse_other_layers(keys: _Keys) -> None:
    """Refuse layers that are no attention, encoders beside decoders, and embeddings elsewhere.

    Raises:
        InvalidInputError: There are such.
    """
    values = keys.values
    if values.get("is_encoder_decoder") or "num_decoder_layers" in values:
        raise keys.refusal("is of an encoder with a decoder; a shape has one stack of blocks")
    if keys.kind in _OTHER_BLOCKS:
        raise keys.refusal(f"is of {keys.kind}, whose blocks no shape holds")
    kinds = sorted(
        kind
        for kind in _kinds_of_layers(values)
        if not kind.endswith("attention") and kind not in ("full", "sliding", "global", "local")
    )
    kinds += [f"{key}..." for key in _OF_OTHER_LAYERS if any(k.startswith(key) for k in values)]
    if kinds:
        raise keys.refusal(f"has other layers than attention ({kinds[0]}), which no shape holds")
    if values.get("hidden_size_per_layer_input"):
        raise keys.refusal("has embeddings in each layer, which no shape holds")
    hidden = keys.count("hidden_size", default=0)
    for key in ("embedding_size", "word_embed_proj_dim", "input_embedding_size"):
        if keys.count(key, default=hidden) != hidden:
            raise keys.refusal(f"has {key} {values[key]} beside {hidden}, which no shape holds")


def _kinds_of_layers(config: Mapping[str, Any]) -> set[str]:
    """Return the kinds of layers that a configuration lists."""
    listed = (config.get(key) for key in ("layer_types", "layers_block_type", "block_types"))
    return {str(kind) for kinds in listed if isinstance(kinds, list) for kind in kinds}


def _kv_heads(keys: _Keys, heads: int) -> int:
    """Return the heads of keys and values: one of all queries, of groups, or of each query."""
    grouped = bool(keys.values.get("new_decoder_architecture"))  # of the larger Falcons
    is_falcon = keys.kind == "falcon"
    if keys.values.get("multi_query", is_falcon or keys.kind == "gpt_bigcode") and not grouped:
        return 1
    if is_falcon and not grouped:
        return heads
    names = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num")
    return keys.count(*names, default=heads)


def _ffn(keys: _Keys, hidden: int) -> int:
    """Return the width of the dense feed-forward part."""
    usual = None
    if _is_of(keys.kind, "usual width"):
        usual = hidden * keys.count("expansion_ratio", default=4)
    names = ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff"]
    if keys.kind == "llama4_text":  # whose intermediate_size is that of experts
        names.insert(0, "intermediate_size_mlp")
    width = keys.count(*names, default=usual)
    return width // 2 if keys.kind in _GATE_INCLUDED else width


def _shared_ffn(keys: _Keys, expert_ffn: int) -> int:
    """Return the width of the shared experts together."""
    width = keys.count("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if width:
        return width
    usual = 1 if keys.kind == "llama4_text" else 0  # Llama 4's is not in its configuration
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return expert_ffn * keys.count(*names, "num_shared_expert", default=usual)


def _windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers see a window only."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    usual = {"gemma2": 2, "gemma3_text": 6}.get(str(config.get("model_type")), 0)
    pattern = config.get("sliding_window_pattern") or usual
    if isinstance(pattern, str) and set(pattern) == {"L", "G"}:  # local and global, in turn
        return sum(pattern[layer % len(pattern)] == "L" for layer in range(layers))
    every = int(pattern) if _is_whole(pattern) else 0
    return layers - layers // every if every > 1 else layers
