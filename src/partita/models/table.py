"""The specifications of all models, family by family."""

from collections.abc import Iterator
from functools import partial

from partita.models import data, losses
from partita.models.bert import BERT, BERTSize, bert_layers
from partita.models.bloom import Bloom, BloomSize
from partita.models.gnmt import GNMT
from partita.models.gpt import GPT, GPTSize, gpt_layers
from partita.models.inception import (
    Inception3,
    inception_dummy,
    inception_e,
    inception_e2,
    short_inception_e,
)
from partita.models.linear_toys import (
    LINEAR_MODEL,
    ONE_LAYER,
    SHORT_LINEAR,
    GraphMLP,
    ParallelThreeLayer,
    linear_chain,
)
from partita.models.resnet import ResNet, ResNetSize, resnet_layers
from partita.models.sparse_vgg import SparseVGG
from partita.models.spec import CountRule, ModelSpec, PublishedCount
from partita.models.t5 import T5, T5Size, t5_layers
from partita.models.transformer import Transformer
from partita.models.vision import alexnet, densenet121, squeezenet, vgg16

PERSEUS = "Perseus 2024"
BAECHI = "Baechi 2020"
PIPEDREAM = "PipeDream 2019"
SPARSE_PIPEDREAM = "SparsePipedream"
DYNAMIC = "DynamicMLTrainer"

# Name, size, default batch, the published figure in millions, its exact count, its rule.
GPT_SIZES: tuple[tuple[str, GPTSize, int, str, int, CountRule], ...] = (
    ("small", GPTSize(768, 12, 12), 8, "124.44 M", 124439808, CountRule.DISTINCT),
    ("medium", GPTSize(1024, 24, 16), 8, "354.82 M", 354823168, CountRule.DISTINCT),
    ("large", GPTSize(1536, 24, 16), 8, "758.73 M", 758727168, CountRule.DISTINCT),
    ("xl", GPTSize(2048, 24, 16), 8, "1313.63 M", 1313626112, CountRule.DISTINCT),
    ("2.7b", GPTSize(2560, 32, 32), 4, "2648.93 M", 2648931840, CountRule.DISTINCT),
    ("6.7b", GPTSize(4096, 32, 32), 4, "6654.21 M", 6654210048, CountRule.DISTINCT),
    ("13b", GPTSize(5120, 40, 40), 1, "12848.14 M", 12848143360, CountRule.DISTINCT),
    ("39b", GPTSize(8192, 48, 64), 1, "39491.63 M", 39491633152, CountRule.UNTIED),
    ("80b", GPTSize(9600, 72, 64), 1, "80600.16 M", 80600160000, CountRule.FORMULA),
    ("175b", GPTSize(12288, 96, 96), 1, "174591.68 M", 174591676416, CountRule.DISTINCT),
)
BERT_SIZES: tuple[tuple[str, BERTSize, str, int, CountRule], ...] = (
    ("base", BERTSize(768, 12, 12, 3072), "109.43 M", 109430586, CountRule.NO_LINEAR_BIAS),
    ("large", BERTSize(1024, 24, 16, 4096), "334.95 M", 334952250, CountRule.NO_LINEAR_BIAS),
    ("huge", BERTSize(2048, 24, 16, 8192), "1276.40 M", 1276395322, CountRule.DISTINCT),
)
T5_SIZES: tuple[tuple[str, T5Size, str, int], ...] = (
    ("small", T5Size(512, 64, 2048, 6, 8), "60.51 M", 60506624),
    ("base", T5Size(768, 64, 3072, 12, 12), "222.90 M", 222903552),
    ("large", T5Size(1024, 64, 4096, 24, 16), "737.67 M", 737668096),
    ("3b", T5Size(1024, 128, 16384, 24, 32), "3B", 2851598336),
    ("11b", T5Size(1024, 128, 65536, 24, 128), "11B", 11307321344),
)
WIDE_RESNETS: tuple[tuple[int, int, str, int], ...] = (
    (50, 2, "68.88 M", 68883240),
    (50, 4, "223.44 M", 223439144),
    (50, 8, "804.16 M", 804164904),
    (101, 2, "126.89 M", 126886696),
    (101, 4, "419.63 M", 419627304),
    (101, 8, "1517.37 M", 1517370664),
)
BLOOM_SIZES: tuple[tuple[str, BloomSize], ...] = (
    ("560m", BloomSize(1024, 24, 16)),
    ("1b1", BloomSize(1536, 24, 16)),
    ("1b7", BloomSize(2048, 24, 16)),
    ("3b", BloomSize(2560, 30, 32)),
    ("7b1", BloomSize(4096, 30, 32)),
    ("176b", BloomSize(14336, 70, 112)),
)
RESNET_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def language_models() -> Iterator[ModelSpec]:
    """Yield GPT-3 and Bloom."""
    for name, size, batch, figure, count, rule in GPT_SIZES:
        yield ModelSpec(
            name=f"gpt3-{name}",
            source=PERSEUS,
            inputs=f"{size.positions} tokens of {size.vocabulary}",
            build=partial(GPT, size),
            example=partial(data.causal_tokens, vocabulary=size.vocabulary),
            loss=losses.token_cross_entropy,
            batch_size=batch,
            sequence_length=size.positions,
            published=PublishedCount(figure=figure, count=count, rule=rule),
            layers=gpt_layers,
            num_embedding_layers=2,
        )
    for name, bloom in BLOOM_SIZES:
        yield ModelSpec(
            name=f"bloom-{name}",
            source=PERSEUS,
            inputs=f"1024 tokens of {bloom.vocabulary}, mask",
            build=partial(Bloom, bloom),
            example=partial(data.causal_tokens, vocabulary=bloom.vocabulary, seen=True),
            loss=losses.token_cross_entropy,
            batch_size=1 if name == "176b" else 4,
            sequence_length=1024,
            layers=bert_layers,
            num_embedding_layers=1,
        )


def encoder_models() -> Iterator[ModelSpec]:
    """Yield BERT and T5."""
    for name, size, figure, count, rule in BERT_SIZES:
        yield ModelSpec(
            name=f"bert-{name}-uncased",
            source=PERSEUS,
            inputs=f"{size.positions} tokens of {size.vocabulary}, mask, segments",
            build=partial(BERT, size),
            example=partial(data.masked_tokens, vocabulary=size.vocabulary),
            loss=losses.token_cross_entropy,
            batch_size=8,
            sequence_length=size.positions,
            published=PublishedCount(figure=figure, count=count, rule=rule),
            layers=bert_layers,
            num_embedding_layers=1,
        )
    for name, t5, figure, count in T5_SIZES:
        yield ModelSpec(
            name=f"t5-{name}",
            source=PERSEUS,
            inputs=f"512 + 512 tokens of {t5.vocabulary}, mask",
            build=partial(T5, t5),
            example=partial(data.sequence_pair, vocabulary=t5.vocabulary),
            loss=losses.token_cross_entropy,
            batch_size=4,
            sequence_length=512,
            published=PublishedCount(figure=figure, count=count),
            layers=t5_layers,
            num_embedding_layers=1,
            num_encoder_layers=t5.num_blocks,
        )


def image_models() -> Iterator[ModelSpec]:
    """Yield wide and plain residual networks and PipeDream's other image classifiers."""
    example = partial(data.images, side=224, classes=1000)
    common = partial(
        ModelSpec, inputs="image 3×224×224", example=example, loss=losses.class_cross_entropy
    )
    for depth, widening, figure, count in WIDE_RESNETS:
        yield common(
            name=f"wide-resnet{depth}_{widening}",
            source=PERSEUS,
            build=partial(ResNet, ResNetSize(RESNET_BLOCKS[depth], widening=widening)),
            batch_size=64 if depth == 101 and widening == 8 else 32,
            published=PublishedCount(figure=figure, count=count),
            layers=resnet_layers,
        )
    for depth, blocks in RESNET_BLOCKS.items():
        yield common(
            name=f"resnet{depth}",
            source=PIPEDREAM,
            build=partial(ResNet, ResNetSize(blocks, bottleneck=depth > 34)),
            batch_size=64,
            layers=resnet_layers,
        )
    for name, build in (
        ("vgg16", vgg16),
        ("alexnet", alexnet),
        ("densenet121", densenet121),
        ("squeezenet1_0", squeezenet),
    ):
        yield common(name=name, source=PIPEDREAM, build=build, batch_size=64)


def baechi_models() -> Iterator[ModelSpec]:
    """Yield Baechi's models."""
    baechi = partial(ModelSpec, source=BAECHI, loss=losses.mean_squared_error)
    yield baechi(
        name="inception_v3",
        inputs="image 3×299×299",
        build=Inception3,
        example=partial(data.image_targets, side=299, classes=1000),
        batch_size=64,
        basic_blocks=("BasicConv2d",),
        smallest_batch=2,
    )
    yield baechi(
        name="transformer",
        inputs="50 + 50 tokens of 30000",
        build=Transformer,
        example=data.translation_pair,
        batch_size=64,
        sequence_length=50,
        basic_blocks=("PositionalEncoding", "MultiHeadAttention", "PositionwiseFeedForward"),
    )
    yield ModelSpec(
        name="gnmt",
        source=BAECHI,
        inputs="40 + 40 tokens of 30000, lengths 5 to 40",
        build=GNMT,
        example=data.sentences,
        loss=losses.sentence_cross_entropy,
        batch_size=64,
        sequence_length=40,
    )


def toys() -> Iterator[ModelSpec]:
    """Yield Baechi's toys."""
    toy = partial(ModelSpec, source=BAECHI, loss=losses.mean_squared_error, batch_size=64)
    yield toy(
        name="inception_dummy",
        inputs="image 3×299×299",
        build=inception_dummy,
        example=partial(data.image_targets, side=299, classes=1000),
        basic_blocks=("BasicConv2d",),
    )
    for name, build, channels, side, outputs in (
        ("InceptionE", inception_e, 1280, 17, (320, 384, 384, 384, 384, 192)),
        ("InceptionE2", inception_e2, 1280, 17, (320, 384, 384, 192)),
        ("ShortInceptionE", short_inception_e, 512, 32, (512,)),
    ):
        yield toy(
            name=name,
            inputs=f"features {channels}×{side}×{side}",
            build=build,
            example=partial(data.feature_maps, channels=channels, side=side, outputs=outputs),
            basic_blocks=("BasicConv2d",),
        )
    vector = partial(toy, inputs="1×3072 numbers", example=data.vectors)
    yield vector(name="LinearModel", build=partial(linear_chain, LINEAR_MODEL))
    yield vector(name="ShortLinear", build=partial(linear_chain, SHORT_LINEAR))
    yield vector(name="ParallelThreeLayer", build=ParallelThreeLayer)
    yield vector(name="OneLayer", build=partial(linear_chain, ONE_LAYER))


def sparse_and_graph_models() -> Iterator[ModelSpec]:
    """Yield the models whose data are points or a graph."""
    yield ModelSpec(
        name="minkvgg",
        source=SPARSE_PIPEDREAM,
        inputs="3840 points: coordinates, features",
        build=SparseVGG,
        example=data.point_clouds,
        loss=losses.class_cross_entropy,
        batch_size=64,
    )
    yield ModelSpec(
        name="graph-mlp",
        source=DYNAMIC,
        inputs="767 features of a graph's node",
        build=GraphMLP,
        example=data.graph_nodes,
        loss=losses.log_likelihood,
        batch_size=8192,
    )
