"""Models of the zoo: counts, layers, one training step of each, and repeatability."""

from functools import cache

import pytest
import torch
from torch import nn

from partita.errors import InvalidInputError
from partita.models.spec import CountRule
from partita.models.zoo import (
    MODELS,
    build_model,
    example_inputs,
    find_model,
    layers_of,
    loss_of,
    parameter_count,
)

# Perseus' configurations, counted on their transformers and torchvision definitions.
TRUE_COUNTS = {
    "gpt3-small": 124439808,
    "gpt3-medium": 354823168,
    "gpt3-large": 758727168,
    "gpt3-xl": 1313626112,
    "gpt3-2.7b": 2648931840,
    "gpt3-6.7b": 6654210048,
    "gpt3-13b": 12848143360,
    "gpt3-39b": 39079927808,
    "gpt3-80b": 80127542400,
    "gpt3-175b": 174591676416,
    "bert-base-uncased": 109514298,
    "bert-large-uncased": 335174458,
    "bert-huge-uncased": 1276395322,
    "t5-small": 60506624,
    "t5-base": 222903552,
    "t5-large": 737668096,
    "t5-3b": 2851598336,
    "t5-11b": 11307321344,
    "wide-resnet50_2": 68883240,
    "wide-resnet50_4": 223439144,
    "wide-resnet50_8": 804164904,
    "wide-resnet101_2": 126886696,
    "wide-resnet101_4": 419627304,
    "wide-resnet101_8": 1517370664,
    "bloom-560m": 559214592,
    "bloom-1b1": 1065314304,
    "bloom-1b7": 1722408960,
    "bloom-3b": 3002557440,
    "bloom-7b1": 7069016064,
    "bloom-176b": 176247271424,
    # torchvision's
    "vgg16": 138357544,
    "alexnet": 61100840,
    "resnet18": 11689512,
    "resnet50": 25557032,
    "resnet101": 44549160,
    "densenet121": 7978856,
    "squeezenet1_0": 1248424,
    "inception_v3": 27161264,
    # SparsePipedream's profile (252.7 MB) and DynamicMLTrainer's modules
    "minkvgg": 63182824,
    "graph-mlp": 3145728 + 2 * 16781312 + 40970,
}
# The published table, in millions.
TABLE = {
    "gpt3-small": 124.44,
    "gpt3-medium": 354.82,
    "gpt3-large": 758.73,
    "gpt3-xl": 1313.63,
    "gpt3-2.7b": 2648.93,
    "gpt3-6.7b": 6654.21,
    "gpt3-13b": 12848.14,
    "gpt3-39b": 39491.63,
    "gpt3-80b": 80600.16,
    "gpt3-175b": 174591.68,
    "bert-base-uncased": 109.43,
    "bert-large-uncased": 334.95,
    "bert-huge-uncased": 1276.40,
    "t5-small": 60.51,
    "t5-base": 222.90,
    "t5-large": 737.67,
    "wide-resnet50_2": 68.88,
    "wide-resnet50_4": 223.44,
    "wide-resnet50_8": 804.16,
    "wide-resnet101_2": 126.89,
    "wide-resnet101_4": 419.63,
    "wide-resnet101_8": 1517.37,
}
OTHER_RULES = {
    "gpt3-39b": CountRule.UNTIED,
    "gpt3-80b": CountRule.FORMULA,
    "bert-base-uncased": CountRule.NO_LINEAR_BIAS,
    "bert-large-uncased": CountRule.NO_LINEAR_BIAS,
}
LAYERS = {
    "bert-huge-uncased": 26,
    "gpt3-xl": 27,
    "gpt3-2.7b": 35,
    "bloom-3b": 32,
    "t5-3b": 74,
    "wide-resnet101_8": 34,
}
OPS = {
    "inception_v3": 133,
    "transformer": 35,
    "LinearModel": 10,
    "ShortLinear": 5,
    "ParallelThreeLayer": 9,
    "OneLayer": 3,
    "minkvgg": 52,
}
DEEP = {"gpt3-39b", "gpt3-80b", "gpt3-175b", "bloom-176b", "t5-11b"}


counted = cache(parameter_count)


@cache
def on_meta(name: str) -> nn.Module:
    """Return a model of full size without numbers, for tests that only look at it."""
    return build_model(name, device="meta")


def small_scale(name: str) -> float:
    return 0.01 if name in DEEP else 0.05


def small_batch(name: str, seed: int = 0):
    length = 12 if MODELS[name].sequence_length else None
    return example_inputs(name, 2, scale=small_scale(name), seed=seed, sequence_length=length)


def step(name: str, model: nn.Module) -> torch.Tensor:
    batch = small_batch(name)
    torch.manual_seed(1)
    loss = loss_of(name)(model(*batch.args, **batch.kwargs), batch.labels)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", TRUE_COUNTS)
def test_distinct_parameters_are_those_of_the_published_configuration(name: str) -> None:
    assert counted(name).count == TRUE_COUNTS[name]


@pytest.mark.parametrize("name", TABLE)
def test_the_published_table_is_matched_under_its_rule(name: str) -> None:
    count = counted(name)
    assert round(count.table_count / 1e6, 2) == TABLE[name]
    assert count.table_figure == f"{TABLE[name]:.2f} M"
    assert count.rule is OTHER_RULES.get(name, CountRule.DISTINCT)
    assert (count.table_count == count.count) == (name not in OTHER_RULES)


@pytest.mark.parametrize(("name", "billions"), [("t5-3b", 3), ("t5-11b", 11)])
def test_large_t5_round_to_the_billions_of_their_names(name: str, billions: int) -> None:
    count = counted(name)
    assert round(count.count / 1e9) == billions
    assert count.table_figure == f"{billions}B"


def test_the_table_and_the_models_agree_on_every_count() -> None:
    published = {name: spec.published for name, spec in MODELS.items() if spec.published}
    assert len(published) == 24
    for name, entry in published.items():
        assert counted(name).table_count == entry.count, name


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_trains_with_a_gradient_for_every_parameter(name: str) -> None:
    model = build_model(name, scale=small_scale(name))
    assert model.training
    assert torch.isfinite(step(name, model))
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path


@pytest.mark.parametrize("name", ["gpt3-175b", "t5-11b", "gnmt", "minkvgg", "inception_v3"])
def test_a_model_of_full_size_runs_forward_and_backward_on_meta(name: str) -> None:
    model = build_model(name, device="meta")
    batch = example_inputs(name, MODELS[name].smallest_batch, device="meta")
    loss = loss_of(name)(model(*batch.args, **batch.kwargs), batch.labels)
    loss.backward()
    assert loss.is_meta
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_the_published_partitions(name: str) -> None:
    assert len(layers_of(name, on_meta(name))) == LAYERS[name]


@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if spec.layers])
def test_layers_hold_every_leaf_module_once(name: str) -> None:
    model = on_meta(name)
    layers = layers_of(name, model)
    assert len({layer.name for layer in layers}) == len(layers)
    for path, module in model.named_modules():
        if not list(module.children()):
            holders = [
                layer.name
                for layer in layers
                for prefix in layer.prefixes
                if path == prefix or path.startswith(f"{prefix}.")
            ]
            assert len(holders) == 1, (path, holders)
    for layer in layers:
        for prefix in layer.prefixes:
            model.get_submodule(prefix)


def test_t5_opens_its_decoder_with_the_encoder_norm_and_the_decoder_embedding() -> None:
    layers = layers_of("t5-3b", on_meta("t5-3b"))
    assert {"encoder.norm", "decoder.embedding"} < set(layers[25].prefixes)
    assert layers[24].prefixes == ("encoder.blocks.23",)
    assert layers[26].prefixes == ("decoder.blocks.0.feed_forward",)
    assert MODELS["t5-3b"].num_encoder_layers == 24


def leaves(module: nn.Module, basic: tuple[str, ...]) -> int:
    children = list(module.children())
    if type(module).__name__ in basic or not children:
        return 1
    return sum(leaves(child, basic) for child in children)


@pytest.mark.parametrize("name", OPS)
def test_modules_at_block_granularity_are_the_ops_of_the_published_graph(name: str) -> None:
    model = on_meta(name)
    assert leaves(model, MODELS[name].basic_blocks) == OPS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_scaled_model_keeps_its_modules_and_loses_width(name: str) -> None:
    full = on_meta(name)
    small = build_model(name, scale=0.1, device="meta")
    assert [path for path, _ in small.named_modules()] == [path for path, _ in full.named_modules()]
    assert layers_of(name, small) == layers_of(name, full)
    count = sum(parameter.numel() for parameter in small.parameters())
    assert count < 0.2 * sum(parameter.numel() for parameter in full.parameters())


@pytest.mark.parametrize("name", ["gpt3-small", "gnmt", "resnet18", "minkvgg", "graph-mlp"])
def test_the_same_seed_gives_the_same_weights_data_and_loss(name: str) -> None:
    first, second, other = (
        build_model(name, scale=0.05, seed=seed).state_dict() for seed in (7, 7, 8)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    batches = [small_batch(name, seed) for seed in (3, 3, 4)]
    same = [torch.equal(a, b) for a, b in zip(batches[0].args, batches[1].args, strict=True)]
    assert all(same)
    assert torch.equal(batches[0].labels, batches[1].labels)
    assert not torch.equal(batches[0].labels, batches[2].labels)
    losses = [step(name, build_model(name, scale=0.05)) for _ in range(2)]
    assert torch.equal(*losses)


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model("OneLayer", scale=0.01)
    example_inputs("OneLayer", 2, scale=0.01)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "head", "embedding"),
    [
        ("gpt3-small", "head.decoder", "token_embedding"),
        ("bert-base-uncased", "head.decoder", "embeddings.words"),
        ("bloom-560m", "head.decoder", "embeddings.words"),
        ("t5-small", "head.decoder", "encoder.embedding.embedding"),
        ("t5-small", "decoder.embedding.embedding", "encoder.embedding.embedding"),
        ("gnmt", "encoder.embedding", "decoder.embedding"),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_tied_weights_are_one_parameter(
    name: str, head: str, embedding: str, dtype: torch.dtype | None
) -> None:
    model = build_model(name, scale=0.05, dtype=dtype)
    tied, own = (model.get_submodule(path).weight for path in (head, embedding))
    assert tied is own
    assert own.dtype == (dtype or torch.float32)


def test_a_batch_has_the_asked_size_whatever_the_model() -> None:
    for name, spec in MODELS.items():
        batch = example_inputs(name, 3, scale=0.05, device="meta")
        assert all(len(argument) == 3 for argument in batch.args), name
        assert len(batch.labels) == 3, name
        assert example_inputs(name, device="meta").labels.shape[0] == spec.batch_size


def test_shapes_on_meta_are_those_of_the_data() -> None:
    for name in MODELS:
        real, meta = (
            example_inputs(name, 2, scale=0.05, device=device) for device in ("cpu", "meta")
        )
        for a, b in zip((*real.args, real.labels), (*meta.args, meta.labels), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name


def test_names_are_found_in_any_case_and_near_names_suggested() -> None:
    assert find_model("inceptione2").name == "InceptionE2"
    with pytest.raises(InvalidInputError, match="did you mean 'gpt3-small'"):
        build_model("gpt-small")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(InvalidInputError, match="scale"):
        build_model("OneLayer", scale=scale)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="batch size"):
        example_inputs("OneLayer", 0)
    with pytest.raises(InvalidInputError, match="reads no sequences"):
        example_inputs("vgg16", 1, sequence_length=8)
    with pytest.raises(InvalidInputError, match="2 to 1024"):
        example_inputs("gpt3-small", 1, sequence_length=2000)
