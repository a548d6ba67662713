"""Hugging Face models from their configurations (the ``models`` extra).

A configuration is the mapping of a ``config.json``: it names its ``model_type`` and, in
``architectures``, the class to build; without one, it is that of the type's usual training task.
Weights are drawn, never downloaded; ``runtime/weights.py`` reads those of a directory into a model.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.models.draw import Draw
from partita.models.spec import Batch

_DECODER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
TINY_CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-llama": {
            **_DECODER,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        },
        "tiny-qwen2": {
            **_DECODER,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
        },
        "tiny-mixtral": {
            **_DECODER,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
        },
        "tiny-gpt2": {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 100,
            "n_positions": 64,
        },
        "tiny-bert": {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "max_position_embeddings": 64,
        },
        "tiny-t5": {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 100,
            "decoder_start_token_id": 0,
        },
        "tiny-vit": {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 10,
        },
        "tiny-whisper": {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 100,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
    }
)


_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM")
_TASKS_OF_IMAGES = ("IMAGE_CLASSIFICATION",)
_IMAGE_SIDE = 224
_UNMASKED = "sdpa_unmasked"
_USUAL_LENGTH = 128
_LONGEST_ESTIMATE = 4096
_UNSAID_ESTIMATE = 2048
_LENGTH_LIMITS = ("max_position_embeddings", "max_target_positions")
_LENGTH_HINTS = ("n_positions", "seq_length", "max_seq_len", "max_sequence_length")


def import_transformers() -> Any:  # noqa: ANN401 (an optional package without types)
    """Return the package.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 (an optional extra)
    except ModuleNotFoundError as exc:
        message = "Hugging Face models need transformers; pip install 'partita[models]'"
        raise UnsupportedError(message) from exc
    return transformers


def build_hugging_face(
    configuration: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a model in training mode; the same seed gives the same weights.

    Args:
        configuration: The mapping of a ``config.json``.
        device: ``"meta"`` allocates nothing.
        dtype: Of the parameters; float32 if not given.
        seed: Of the weights.

    Raises:
        InvalidInputError: transformers refuses the configuration.
        UnsupportedError: transformers is not installed, or does not know this type of model.
    """
    transformers = import_transformers()
    options = {"use_cache": False, **configuration}
    kind = options.pop("model_type", None)
    if kind is None:
        raise InvalidInputError("a Hugging Face configuration needs model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model type {kind!r}"
        )
    place = torch.device(device)
    try:
        config = transformers.AutoConfig.for_model(kind, **options)
        architecture = _architecture(transformers, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with torch.device("meta" if place.type == "meta" else "cpu"):
                model: nn.Module = architecture(config)
        if place.type == "meta":
            _attend_without_values(transformers, model)
    except (PartitaError, MemoryError):
        raise
    except Exception as exc:
        raise InvalidInputError(f"transformers refuses this {kind} configuration: {exc}") from exc
    if dtype is not None:
        model = model.to(dtype)
    return (model if place.type in ("meta", "cpu") else model.to(place)).train()


def _attend_without_values(transformers: Any, model: Any) -> None:  # noqa: ANN401 (without types)
    """Let a model attend on meta tensors, where transformers would read the values of a mask.

    Its own attention under another name has no function that makes masks. Generated samples have no
    padding, so that the mask would be left out for ``is_causal`` in any case.
    """
    if model.config._attn_implementation != "sdpa":  # noqa: SLF001 (it has no public reader)
        return
    attend = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register(_UNMASKED, attend)
    model.set_attn_implementation(_UNMASKED)


def _architecture(transformers: Any, config: Any) -> Any:  # noqa: ANN401 (without types)
    """Return the class that a configuration names, or that of its usual training task."""
    version = transformers.__version__
    for name in config.architectures or ():
        if not hasattr(transformers, name):
            raise UnsupportedError(f"transformers {version} has no {name!r}")
        return getattr(transformers, name)
    for task in (*_TASKS, *_TASKS_OF_IMAGES):
        found = getattr(transformers, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in found:
            return found[type(config)]
    raise UnsupportedError(
        f"transformers {version} has no usual training task for {config.model_type!r}; causal, "
        "masked and sequence-to-sequence language models, speech to text and image classification "
        "have one; for others name a class in architectures"
    )


def usual_length(model: Any) -> int:  # noqa: ANN401 (a class of an optional package without types)
    """Return tokens per sample of what is measured: 128, or as many as the model can read."""
    limit = _length_limit(model.config.get_text_config())
    return min(_USUAL_LENGTH, limit) if limit else _USUAL_LENGTH


def estimated_length(model: Any) -> int:  # noqa: ANN401 (see above)
    """Return tokens per sample of an estimate where none are asked for.

    They are as many as the configuration says, up to 4096, and 2048 where it says nothing. Models
    are trained at such lengths, and an estimate of a long sample takes no longer than of a short.
    """
    config = model.config.get_text_config()
    hints = (getattr(config, name, None) for name in _LENGTH_HINTS)
    said = _length_limit(config) or next((n for n in hints if isinstance(n, int) and n > 0), 0)
    return min(said or _UNSAID_ESTIMATE, _LONGEST_ESTIMATE)


def _length_limit(config: Any) -> int:  # noqa: ANN401 (see above)
    """Return the most tokens that a model can read; 0 if there is no limit."""
    limits = [getattr(config, name, None) for name in _LENGTH_LIMITS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=0)


def hugging_face_inputs(
    model: Any,  # noqa: ANN401 (a class of an optional package without types)
    batch_size: int,
    *,
    sequence_length: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Batch:
    """Return a generated batch for a model: no positional arguments, keywords, labels.

    Text, images (``pixel_values``) and log-mel speech (``input_features``) are known, by what the
    model calls its main input; an encoder-decoder also gets output tokens.

    Raises:
        InvalidInputError: More tokens than the model can read.
        UnsupportedError: It reads something else, or its configuration does not say how much.
    """
    try:
        return _generated(model, batch_size, sequence_length, device, seed)
    except AttributeError as exc:
        raise UnsupportedError(
            f"no data can be generated for a {model.config.model_type} model: its configuration "
            f"has no {exc.name}"
        ) from exc


def _generated(
    model: Any,  # noqa: ANN401 (see above)
    batch_size: int,
    sequence_length: int,
    device: torch.device | str,
    seed: int,
) -> Batch:
    config, main, draw = model.config, model.main_input_name, Draw(seed, device)
    if main == "pixel_values":
        seen = getattr(config, "vision_config", config)  # of a model of images and texts
        size = getattr(seen, "image_size", None) or _IMAGE_SIDE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = draw.normal(batch_size, seen.num_channels, height, width)
        return Batch((), {main: pixels}, draw.integers(0, config.num_labels, batch_size))
    limit, words = _length_limit(config.get_text_config()), config.get_text_config().vocab_size
    if limit and sequence_length > limit:
        raise InvalidInputError(
            f"{sequence_length} tokens per sample are more than the {limit} that this "
            f"{config.model_type} model can read"
        )
    tokens = draw.integers(0, words, batch_size, sequence_length + 1)
    shown, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if main == "input_features":
        frames = 2 * config.max_source_positions
        speech = draw.normal(batch_size, config.num_mel_bins, frames)
        return Batch((), {main: speech, "decoder_input_ids": shown}, labels)
    if main != "input_ids":
        raise UnsupportedError(f"no data can be generated for a model that reads {main!r}")
    if not config.is_encoder_decoder:
        return Batch((), {main: shown}, labels)
    source = draw.integers(0, words, batch_size, sequence_length)
    return Batch((), {main: source, "decoder_input_ids": shown}, labels)


def hugging_face_loss(output: Any, labels: Tensor) -> Tensor:  # noqa: ANN401 (see above)
    """Return the mean cross-entropy of a model's logits.

    Raises:
        UnsupportedError: The model has none.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise UnsupportedError(
            "this Hugging Face model returns no logits to train on; name a class with a head in "
            "architectures, such as LlamaForCausalLM"
        )
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
