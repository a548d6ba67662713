"""Our definitions compute what those of transformers compute, given the same weights."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.models.bert import BERT, BERTSize
from partita.models.bloom import Bloom, BloomSize
from partita.models.gpt import GPT, GPTSize
from partita.models.t5 import T5, T5Size

transformers = pytest.importorskip("transformers")

Names = Iterator[tuple[str, str]]


def both(weight: str, theirs: str) -> Names:
    yield f"{weight}.weight", f"{theirs}.weight"
    yield f"{weight}.bias", f"{theirs}.bias"


def gpt_names() -> Names:
    yield "token_embedding.weight", "transformer.wte.weight"
    yield "position_embedding.embedding.weight", "transformer.wpe.weight"
    yield from both("head.norm", "transformer.ln_f")
    for block in range(2):
        ours, theirs = f"blocks.{block}", f"transformer.h.{block}"
        yield from both(f"{ours}.norm_1", f"{theirs}.ln_1")
        yield from both(f"{ours}.norm_2", f"{theirs}.ln_2")
        yield from both(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn")
        yield from both(f"{ours}.attention.output", f"{theirs}.attn.c_proj")
        yield from both(f"{ours}.feed_forward.up", f"{theirs}.mlp.c_fc")
        yield from both(f"{ours}.feed_forward.down", f"{theirs}.mlp.c_proj")


def bert_names() -> Names:
    embeddings = "bert.embeddings"
    yield "embeddings.words.weight", f"{embeddings}.word_embeddings.weight"
    yield "embeddings.positions.weight", f"{embeddings}.position_embeddings.weight"
    yield "embeddings.types.weight", f"{embeddings}.token_type_embeddings.weight"
    yield from both("embeddings.norm", f"{embeddings}.LayerNorm")
    yield from both("head.transform", "cls.predictions.transform.dense")
    yield from both("head.norm", "cls.predictions.transform.LayerNorm")
    yield "head.bias", "cls.predictions.bias"
    for block in range(2):
        ours, theirs = f"blocks.{block}", f"bert.encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.attention.self.{part}")
        yield from both(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        yield from both(f"{ours}.norm_1", f"{theirs}.attention.output.LayerNorm")
        yield from both(f"{ours}.up", f"{theirs}.intermediate.dense")
        yield from both(f"{ours}.down", f"{theirs}.output.dense")
        yield from both(f"{ours}.norm_2", f"{theirs}.output.LayerNorm")


def bloom_names() -> Names:
    yield "embeddings.words.weight", "transformer.word_embeddings.weight"
    yield from both("embeddings.norm", "transformer.word_embeddings_layernorm")
    yield from both("head.norm", "transformer.ln_f")
    for block in range(2):
        ours, theirs = f"blocks.{block}", f"transformer.h.{block}"
        yield from both(f"{ours}.norm_1", f"{theirs}.input_layernorm")
        yield from both(f"{ours}.norm_2", f"{theirs}.post_attention_layernorm")
        yield from both(f"{ours}.attention.qkv", f"{theirs}.self_attention.query_key_value")
        yield from both(f"{ours}.attention.output", f"{theirs}.self_attention.dense")
        yield from both(f"{ours}.feed_forward.up", f"{theirs}.mlp.dense_h_to_4h")
        yield from both(f"{ours}.feed_forward.down", f"{theirs}.mlp.dense_4h_to_h")


def t5_names() -> Names:
    parts = {"query": "q", "key": "k", "value": "v", "output": "o"}
    yield "encoder.embedding.embedding.weight", "shared.weight"
    yield "encoder.norm.norm.weight", "encoder.final_layer_norm.weight"
    yield "head.norm.norm.weight", "decoder.final_layer_norm.weight"
    for stack in ("encoder", "decoder"):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"{stack}.position_bias.table.weight", bias
        last = 1 if stack == "encoder" else 2
        for block in range(2):
            ours, theirs = f"{stack}.blocks.{block}", f"{stack}.block.{block}.layer"
            own = f"{ours}.attention" if last == 1 else f"{ours}.attention.own"
            yield f"{own}.norm.weight", f"{theirs}.0.layer_norm.weight"
            yield f"{ours}.feed_forward.norm.weight", f"{theirs}.{last}.layer_norm.weight"
            for mine, name in (("up", "wi"), ("down", "wo")):
                dense = f"{theirs}.{last}.DenseReluDense.{name}.weight"
                yield f"{ours}.feed_forward.{mine}.weight", dense
            for mine, name in parts.items():
                yield f"{own}.attention.{mine}.weight", f"{theirs}.0.SelfAttention.{name}.weight"
                if last == 2:
                    cross = f"{theirs}.1.EncDecAttention.{name}.weight"
                    yield f"{ours}.attention.cross.{mine}.weight", cross
            if last == 2:
                yield f"{ours}.attention.norm.weight", f"{theirs}.1.layer_norm.weight"


def copy_weights(
    ours: nn.Module,
    theirs: nn.Module,
    names: Callable[[], Names],
    change: Callable[[str, Tensor], Tensor],
) -> None:
    state: Mapping[str, Tensor] = theirs.state_dict()
    own = dict(ours.named_parameters())
    copied = set()
    with torch.no_grad():
        for mine, name in names():
            own[mine].copy_(change(name, state[name]))
            copied.add(mine)
    assert copied == set(own)


def as_is(_: str, weight: Tensor) -> Tensor:
    return weight


def transposed(name: str, weight: Tensor) -> Tensor:
    return weight.T if ".c_" in name and weight.dim() == 2 else weight


def by_part(name: str, weight: Tensor) -> Tensor:
    if "query_key_value" not in name:
        return weight
    return weight.view(4, 3, 8, -1).transpose(0, 1).reshape(weight.shape)


def theirs_of(config: Any, architecture: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def test_gpt_is_gpt2() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16, use_cache=False
    )
    theirs = theirs_of(config, "GPT2LMHeadModel")
    ours = GPT(GPTSize(32, 2, 4, vocabulary=50, positions=16)).eval()
    copy_weights(ours, theirs, gpt_names, transposed)
    ids = tokens(2, 9)
    assert torch.allclose(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_bert_is_bert() -> None:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=50,
        max_position_embeddings=16,
    )
    theirs = theirs_of(config, "BertForMaskedLM")
    ours = BERT(BERTSize(32, 2, 4, 48, vocabulary=50, positions=16)).eval()
    copy_weights(ours, theirs, bert_names, as_is)
    ids, seen, types = tokens(2, 9), torch.ones(2, 9, dtype=torch.long), tokens(2, 9) % 2
    seen[1, 6:] = 0
    expected = theirs(input_ids=ids, attention_mask=seen, token_type_ids=types).logits
    assert torch.allclose(ours(ids, seen, types), expected, rtol=1e-4, atol=1e-4)


def test_bloom_is_bloom() -> None:
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=50, use_cache=False
    )
    theirs = theirs_of(config, "BloomForCausalLM")
    ours = Bloom(BloomSize(32, 2, 4, vocabulary=50)).eval()
    copy_weights(ours, theirs, bloom_names, by_part)
    ids, seen = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    expected = theirs(input_ids=ids, attention_mask=seen).logits
    assert torch.allclose(ours(ids, seen), expected, rtol=1e-4, atol=1e-4)


def test_t5_is_t5() -> None:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=50,
        use_cache=False,
        decoder_start_token_id=0,
    )
    theirs = theirs_of(config, "T5ForConditionalGeneration")
    ours = T5(T5Size(32, 8, 48, 2, 4, vocabulary=50)).eval()
    copy_weights(ours, theirs, t5_names, as_is)
    ids, output_ids, seen = tokens(2, 40), tokens(2, 11), torch.ones(2, 40, dtype=torch.long)
    seen[1, 30:] = 0
    expected = theirs(input_ids=ids, attention_mask=seen, decoder_input_ids=output_ids).logits
    assert torch.allclose(ours(ids, output_ids, seen), expected, rtol=1e-4, atol=1e-4)
