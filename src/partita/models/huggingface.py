"""Hugging Face models from their configurations (the ``models`` extra).

A configuration is the mapping of a ``config.json``: it names its ``model_type`` and, in
``architectures``, the class to build. Weights are drawn, never downloaded.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from partita.errors import InvalidInputError, UnsupportedError
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


def _transformers() -> Any:  # noqa: ANN401 (an optional package without types)
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
    """
    transformers = _transformers()
    options = dict(configuration)
    kind = options.pop("model_type", None)
    names = options.get("architectures") or ()
    if kind is None or not names:
        raise InvalidInputError("a Hugging Face configuration needs model_type and architectures")
    architecture = getattr(transformers, names[0], None)
    if architecture is None:
        raise UnsupportedError(f"transformers {transformers.__version__} has no {names[0]!r}")
    config = transformers.AutoConfig.for_model(kind, **{"use_cache": False, **options})
    place = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("meta" if place.type == "meta" else "cpu"):
            model: nn.Module = architecture(config)
    if dtype is not None:
        model = model.to(dtype)
    return (model if place.type in ("meta", "cpu") else model.to(place)).train()


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
    """
    config, main, draw = model.config, model.main_input_name, Draw(seed, device)
    if main == "pixel_values":
        side = config.image_size
        pixels = draw.normal(batch_size, config.num_channels, side, side)
        return Batch((), {main: pixels}, draw.integers(0, config.num_labels, batch_size))
    tokens = draw.integers(0, config.vocab_size, batch_size, sequence_length + 1)
    shown, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if main == "input_features":
        frames = 2 * config.max_source_positions
        speech = draw.normal(batch_size, config.num_mel_bins, frames)
        return Batch((), {main: speech, "decoder_input_ids": shown}, labels)
    if main != "input_ids":
        raise UnsupportedError(f"no data can be generated for a model that reads {main!r}")
    if not config.is_encoder_decoder:
        return Batch((), {main: shown}, labels)
    source = draw.integers(0, config.vocab_size, batch_size, sequence_length)
    return Batch((), {main: source, "decoder_input_ids": shown}, labels)


def hugging_face_loss(output: Any, labels: Tensor) -> Tensor:  # noqa: ANN401 (see above)
    """Return the mean cross-entropy of a model's logits."""
    logits: Tensor = output.logits
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
