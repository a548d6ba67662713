"""What the definitions compute, against independent statements of the same thing."""

import json

import pytest
import torch
from click.testing import CliRunner

from partita.cli.models import command
from partita.models.attention import FusedAttention, SplitAttention
from partita.models.bloom import alibi_slopes
from partita.models.draw import Draw
from partita.models.gnmt import PackedBidirectional
from partita.models.sparse_vgg import (
    COARSE_CELLS,
    LEVELS,
    SIDE,
    SparseConvolution,
    SparsePool,
    SparseTensor,
)
from partita.models.t5 import relative_buckets
from partita.models.zoo import MODELS, build_model, example_inputs


def points(batch: int = 2) -> SparseTensor:
    coordinates, _ = example_inputs("minkvgg", batch, scale=0.05).args
    features = torch.randn(*coordinates.shape[:2], 3, generator=torch.Generator().manual_seed(1))
    return SparseTensor(coordinates, features)


def dense(x: SparseTensor, sample: int, side: int) -> torch.Tensor:
    grid = torch.zeros(x.features.shape[2], side, side, side)
    i, j, k = x.coordinates[sample].T
    grid[:, i, j, k] = x.features[sample].T
    return grid


def test_generated_points_fill_every_level_evenly() -> None:
    x = points()
    expected = COARSE_CELLS
    for *_, joined in LEVELS:
        expected *= joined
    assert x.coordinates.shape == (2, expected, 3)
    assert 0 <= int(x.coordinates.min()) <= int(x.coordinates.max()) < SIDE
    for sample in x.coordinates:
        cells, count = sample, expected
        for *_, joined in LEVELS:
            assert len(cells.unique(dim=0)) == count
            cells, count = torch.div(cells, 2, rounding_mode="floor"), count // joined


def test_a_sparse_convolution_is_the_dense_one_at_the_points() -> None:
    x = points()
    torch.manual_seed(0)
    layer = SparseConvolution(3, 5)
    y = layer(x)
    weight = layer.kernel.view(3, 3, 3, 3, 5).permute(4, 3, 0, 1, 2)
    for sample in range(2):
        full = torch.nn.functional.conv3d(dense(x, sample, SIDE)[None], weight, padding=1)[0]
        i, j, k = y.coordinates[sample].T
        assert torch.allclose(full[:, i, j, k].T, y.features[sample], atol=1e-5)


def test_a_sparse_pool_is_the_maximum_of_each_cell() -> None:
    x = points()
    positive = SparseTensor(x.coordinates, x.features.abs())
    y = SparsePool(LEVELS[0][2])(positive)
    for sample in range(2):
        full = torch.nn.functional.max_pool3d(dense(positive, sample, SIDE)[None], 2)[0]
        assert torch.equal(dense(y, sample, SIDE // 2), full)


def test_packed_sequences_end_at_their_length() -> None:
    torch.manual_seed(0)
    layer = PackedBidirectional(4)
    x = torch.randn(2, 6, 4)
    y = layer(x, torch.tensor([6, 3]))
    alone = layer.lstm(x[1:, :3])[0]
    assert y.shape == (2, 6, 8)
    assert torch.allclose(y[1:, :3], alone, atol=1e-6)
    assert not y[1, 3:].any()


@pytest.mark.parametrize("name", ["gpt3-small", "bloom-560m"])
def test_a_causal_model_does_not_look_ahead(name: str) -> None:
    model = build_model(name, scale=0.05).eval()
    tokens, *rest = example_inputs(name, 1, scale=0.05, sequence_length=8).args
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 30
    a, b = (model(each, *rest) for each in (tokens, changed))
    assert torch.allclose(a[:, :5], b[:, :5], atol=1e-5)
    assert not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-5)


@pytest.mark.parametrize("name", ["bert-base-uncased", "t5-small"])
def test_unseen_tokens_do_not_matter(name: str) -> None:
    model = build_model(name, scale=0.05).eval()
    args = list(example_inputs(name, 1, scale=0.05, sequence_length=8).args)
    seen = 1 if name.startswith("bert") else 2
    args[seen] = args[seen].clone()
    args[seen][:, 6:] = 0
    changed = [args[0].clone(), *args[1:]]
    changed[0][:, 6:] = (changed[0][:, 6:] + 1) % 30
    a, b = model(*args), model(*changed)
    shown = slice(0, 6) if seen == 1 else slice(None)
    assert torch.allclose(a[:, shown], b[:, shown], atol=1e-5)


def test_fused_and_split_attention_compute_the_same() -> None:
    torch.manual_seed(0)
    fused = FusedAttention(2, 4, 0.0)
    split = SplitAttention(8, 2, 4, bias=True, dropout=0.0)
    parts = (split.query, split.key, split.value)
    for index, part in enumerate(parts):
        part.weight.data = fused.qkv.weight.data[8 * index : 8 * index + 8]
        part.bias.data = fused.qkv.bias.data[8 * index : 8 * index + 8]
    split.output.load_state_dict(fused.output.state_dict())
    x = torch.randn(2, 5, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.allclose(fused(x), split(x, x, causal), atol=1e-6)


def test_buckets_are_exact_when_near_and_shared_when_far() -> None:
    one_way = relative_buckets(200, torch.device("cpu"), bidirectional=False)
    assert one_way[20, 20:].eq(0).all()
    assert one_way[20, :20].flip(0)[:15].tolist() == list(range(1, 16))
    assert one_way[199, 0] == 31
    both = relative_buckets(200, torch.device("cpu"), bidirectional=True)
    assert both[20, 21] == 17
    assert both[20, 19] == 1
    assert int(both.max()) == 31


def test_slopes_exist_for_any_number_of_heads() -> None:
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == [2.0 ** -(0.5 + step) for step in range(4)]


def test_choices_are_distinct_and_ascending() -> None:
    chosen = Draw(0).choices(8, 5, 10)
    assert chosen.shape == (10, 5)
    assert (chosen.diff(dim=1) > 0).all()


def test_the_command_lists_models_with_both_counts() -> None:
    result = CliRunner().invoke(command, ["gpt3-39b"])
    assert result.exit_code == 0
    assert "39,079,927,808" in " ".join(result.output.split())
    assert "39491.63 M (39,491,633,152): tied head counted twice" in " ".join(result.output.split())


def test_the_command_prints_json() -> None:
    result = CliRunner().invoke(command, ["bert-huge", "--json"])
    (row,) = json.loads(result.output)
    assert row["parameters"] == 1276395322
    assert row["layers"] == 26
    assert row["published"]["figure"] == "1276.40 M"


def block_edges(name: str) -> set[tuple[str, str]]:
    """Return the edges between modules at block granularity, as Baechi finds them by autograd."""
    model = build_model(name, device="meta")
    producer: dict[int, str] = {}
    kept, edges = [], set()

    def watch(path: str, module: torch.nn.Module) -> None:
        children = list(module.named_children())
        if children and type(module).__name__ not in MODELS[name].basic_blocks:
            for child, inner in children:
                watch(f"{path}.{child}", inner)
            return

        def note(_: object, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            sources = (producer[id(x)] for x in args if x.requires_grad and id(x) in producer)
            edges.update((source, path) for source in sources)
            producer[id(output)] = path
            kept.append(output)

        module.register_forward_hook(note)

    watch("", model)
    model(*example_inputs(name, 2, device="meta").args)
    return edges


@pytest.mark.parametrize(("name", "count"), [("inception_v3", 168), ("transformer", 39)])
def test_edges_between_blocks_are_as_many_as_baechi_found(name: str, count: int) -> None:
    assert len(block_edges(name)) == count
