"""Tensor-parallel code of captured models: the ranks of a group are threads here."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, Granularity
from partita.capture.setting import Example, example_inputs
from partita.capture.splits import Split
from partita.capture.tensor.rules import CannotSplitError, reshaped
from partita.capture.tensor.sequence import along_sequences
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage

BATCH, LENGTH, HIDDEN, HEADS, WORDS = 2, 4, 16, 4, 70
LIMIT = 1e-12


@dataclass
class Room:
    """Where the ranks of a group meet."""

    size: int
    brought: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)


@dataclass
class Ranked:
    """A group of threads, seen by one of them."""

    room: Room
    rank: int

    @property
    def size(self) -> int:
        return self.room.size

    def gather(self, value: Tensor) -> list[Tensor]:
        self.room.brought[self.rank] = value.detach().clone()
        self.room.barrier.wait()
        found = [self.room.brought[rank] for rank in range(self.size)]
        self.room.barrier.wait()
        assert len({tuple(part.shape) for part in found}) == 1
        return found

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self.gather(value)).sum(0)

    def sum_of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([found[self.rank] for found in self.gather(torch.stack([*parts]))]).sum(
            0
        )

    def maximum(self, value: Tensor) -> Tensor:
        return torch.stack(self.gather(value)).amax(0)


@dataclass(frozen=True)
class Call:
    group: Ranked | None
    training: bool = True

    def op_seed(self, op: int) -> int:
        return op + 1


def plan_of(graph: Graph, stages: int, size: int = 1, *, sequence: bool = False) -> Plan:
    ranks = np.arange(stages * size).reshape(stages, size).tolist()
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(f"d{n}" for n in range(stages * size)),
        stage_of=np.arange(len(graph)) * stages // len(graph),
        stages=tuple(Stage(devices=(tuple(own),), sequence_parallel=sequence) for own in ranks),
    )


def largest_gap(
    model: CapturedModel,
    inputs: Mapping[str, Tensor],
    size: int,
    stages: int,
    *,
    sequence: bool = False,
) -> float:
    """Return the largest difference of loss and gradients between a group and one process."""
    code = model.stages(plan_of(model.graph, stages, size, sequence=sequence))
    splits = code.parameter_splits(size)
    names, state = model.graph.tensors.names, model.state()

    def run(group: Ranked | None) -> tuple[Tensor, dict[str, Tensor]]:
        held = {}
        for name, value in state.items():
            whole = group is None or name not in splits
            part = value if whole else splits[name].take(value, group.rank, size)
            held[name] = part.clone().requires_grad_(value.is_floating_point())
        values = dict(inputs)
        for stage in range(stages):
            values.update(code.run(stage, values, held, Call(group)))
        loss = values[names[model.graph.loss]]
        gradients = torch.autograd.grad(loss, list(held.values()), allow_unused=True)
        pairs = zip(held, gradients, strict=True)
        return loss.detach(), {n: torch.zeros(0) if g is None else g for n, g in pairs}

    wanted = run(None)
    room, found = Room(size), dict[int, tuple[Tensor, dict[str, Tensor]]]()

    def main(rank: int) -> None:
        try:
            found[rank] = run(Ranked(room, rank))
        except BaseException:
            room.barrier.abort()
            raise

    # One after the other would do but for the meetings; random numbers are seeded op by op, and
    # threads share the generator, so only models without draws are run here.
    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == size
    gaps = [abs(float(loss - wanted[0])) for loss, _ in found.values()]
    for name, gradient in wanted[1].items():
        for rank in range(size):
            mine = found[rank][1][name]
            part = splits[name].take(gradient, rank, size) if name in splits else gradient
            gaps.append(float((mine - part).norm()) / max(float(part.norm()), 1e-3))
    return max(gaps)


class Attention(nn.Module):
    """Queries and fewer keys and values, with a norm of each head, as qwen3 has it."""

    def __init__(self, kv_heads: int, *, explicit: bool = False) -> None:
        super().__init__()
        self.kv_heads, self.explicit, width = kv_heads, explicit, HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, kv_heads * width)
        self.value = nn.Linear(HIDDEN, kv_heads * width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], -1, HIDDEN // HEADS)
        q = F.rms_norm(self.query(x).view(shape), (shape[-1],), self.scale).transpose(1, 2)
        k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.key, self.value))
        if self.explicit:
            times = HEADS // self.kv_heads
            k, v = (
                t[:, :, None].expand(-1, -1, times, -1, -1).reshape(t.shape[0], HEADS, LENGTH, -1)
                for t in (k, v)
            )
            scores = (q @ k.transpose(2, 3)) * 0.5 + self.bias
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=True)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(x.shape))
        return result


class Fused(nn.Module):
    """One projection for queries, keys and values, in batches of heads as bloom has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        width = HIDDEN // HEADS
        fused = self.qkv(x).view(BATCH, LENGTH, HEADS, 3, width)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q, k, v = (t.transpose(1, 2).reshape(BATCH * HEADS, LENGTH, width) for t in (q, k, v))
        ramp = torch.arange(LENGTH, dtype=x.dtype).view(1, 1, LENGTH).expand(BATCH * HEADS, 1, -1)
        scores = torch.baddbmm(ramp, q, k.transpose(1, 2), alpha=0.5)
        mixed = torch.bmm(scores.softmax(-1), v).view(BATCH, HEADS, LENGTH, width)
        result: Tensor = self.output(mixed.permute(0, 2, 1, 3).reshape(BATCH, LENGTH, HIDDEN))
        return result


class Chunked(nn.Module):
    """One projection cut in three, and a gated one cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.gated = nn.Linear(HIDDEN, 40)
        self.down = nn.Linear(20, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        both = self.gated(x)
        result: Tensor = x + self.down(F.silu(both[..., :20]) * both[..., 20:])
        return result


class Language(nn.Module):
    """Words, a block and tied weights for the output; the vocabulary is odd for three ranks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, padding_idx=3)
        self.norm = nn.LayerNorm(HIDDEN)
        self.block = block

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.block(self.norm(x))
        return F.linear(self.norm(x), self.words.weight)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0)


def captured(
    block: Callable[[], nn.Module], granularity: Granularity = Granularity.OP
) -> tuple[CapturedModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Language(block()).double()
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    example = Example(args=(words[:, :-1],), labels=words[:, 1:])
    found = capture(model, example, loss=loss_of, granularity=granularity, name="language")
    return found, dict(example_inputs(model, example))


BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(HEADS),
    "grouped": lambda: Attention(2),
    "one key": lambda: Attention(1),
    "explicit": lambda: Attention(2, explicit=True),
    "batches of heads": Fused,
    "sections": Chunked,
    "mlp": lambda: nn.Sequential(nn.Linear(HIDDEN, 30), nn.GELU(), nn.Linear(30, HIDDEN)),
    "not divisible": lambda: nn.Sequential(
        nn.Linear(HIDDEN, 31), nn.ReLU(), nn.LayerNorm(31), nn.Linear(31, HIDDEN)
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_computes_what_one_process_computes(name: str, size: int) -> None:
    model, inputs = captured(BLOCKS[name])
    assert largest_gap(model, inputs, size, stages=1) < LIMIT


@pytest.mark.parametrize("name", ["grouped", "batches of heads", "sections"])
@pytest.mark.parametrize("stages", [3, 7])
def test_stages_may_be_cut_within_what_is_split(name: str, stages: int) -> None:
    model, inputs = captured(BLOCKS[name])
    assert largest_gap(model, inputs, 2, stages=stages) < LIMIT


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 1), (2, 2)])
def test_tensors_between_products_are_divided_along_the_sequence(
    name: str, size: int, stages: int
) -> None:
    model, inputs = captured(BLOCKS[name])
    assert largest_gap(model, inputs, size, stages, sequence=True) < LIMIT
    found = along_sequences(model, model.splits(size))
    shape = (BATCH, LENGTH, HIDDEN)
    layouts = [found.layouts[r] for r in found.sequences if tuple(model.values[r].shape) == shape]
    assert layouts.count(Split(1, (LENGTH,))) == len(layouts) >= 4


def test_joined_rows_are_divided_within_each_sample() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(*s)) for s in ((16, 32), (32, 16)))
            self.bias = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.mm(x.view(-1, HIDDEN), self.up).tanh()
            return torch.addmm(self.bias, rows, self.down).view(x.shape)

    model, inputs = captured(Joined)
    assert largest_gap(model, inputs, 2, 1, sequence=True) < LIMIT
    found = along_sequences(model, model.splits(2))
    layouts = {found.layouts[row] for row in found.sequences}
    assert layouts == {Split(0, (LENGTH,) * BATCH), Split(1, (LENGTH,))}


def test_three_ranks_divide_a_vocabulary_unevenly() -> None:
    model, inputs = captured(BLOCKS["mlp"])
    splits = model.stages(plan_of(model.graph, 1)).parameter_splits(3)
    assert [splits["words.weight"].length(rank, 3) for rank in range(3)] == [23, 23, 24]
    assert largest_gap(model, inputs, 3, stages=1) < LIMIT


@pytest.mark.parametrize("granularity", [Granularity.MODULE, Granularity.BLOCK])
def test_coarser_ops_are_divided_call_by_call(granularity: Granularity) -> None:
    model, inputs = captured(BLOCKS["sections"], granularity)
    assert model.stages(plan_of(model.graph, 1)).parameter_splits(2)
    assert largest_gap(model, inputs, 2, stages=1) < LIMIT


def test_products_are_split_by_structure() -> None:
    model, _ = captured(BLOCKS["sections"])
    splits = model.splits(2).parameters
    assert splits["words.weight"] == Split(0, (WORDS,))
    assert splits["block.qkv.weight"] == Split(0, (HIDDEN,) * 3)
    assert splits["block.qkv.bias"] == Split(0, (HIDDEN,) * 3)
    assert splits["block.output.weight"] == Split(1, (HIDDEN,))
    assert splits["block.gated.weight"] == Split(0, (20, 20))
    assert "block.output.bias" not in splits
    assert "norm.weight" not in splits


def test_what_needs_whole_tensors_is_replicated_and_said() -> None:
    model, _ = captured(BLOCKS["not divisible"])
    found = model.splits(2)
    assert "block.0.weight" not in found.parameters
    assert any("block.0.weight" in note and "layer_norm" in note for note in found.notes())


def test_costs_are_divided_where_ops_are() -> None:
    model, _ = captured(BLOCKS["mlp"])
    ones = np.ones(len(model.graph))
    table = model.degrees_at(2, model.graph, ("cpu",))
    names = list(model.graph.ops.names)
    rows = {op: table.row_of[kind, "cpu", 2, 1, 1, "none"] for kind, op in enumerate(names)}
    up, down = rows["block.0/linear"], rows["block.2/linear"]
    assert table.tensor_calls[up] == 0
    assert table.tensor_calls_back[up] == 2  # the gradient of what several ranks read
    assert table.tensor_calls[down] == 2
    assert table.tensor_bytes[down] == BATCH * LENGTH * HIDDEN * 8
    assert len(table) == 2 * len(ones)


def test_reshapes_keep_heads_together() -> None:
    assert reshaped(Split(2, (48,)), (2, 4, 48), (2, 4, 4, 3, 4), 2) == Split(2, (4,))
    assert reshaped(Split(2, (16,) * 3), (2, 4, 48), (2, 4, 3, 4, 4), 2) == Split(3, (4,))
    assert reshaped(Split(1, (4,)), (2, 4, 5, 6), (8, 5, 6), 2) == Split(0, (4, 4))
    assert reshaped(Split(0, (4, 4)), (8, 5, 6), (2, 4, 5, 6), 2) == Split(1, (4,))
    with pytest.raises(CannotSplitError) as caught:
        reshaped(Split(2, (48,)), (2, 4, 48), (2, 4, 3, 4, 4), 2)
    assert caught.value.count == 3


def test_parts_join_to_the_whole() -> None:
    whole = torch.arange(70).view(7, 10)
    split = Split(1, (3, 7))
    parts = [split.take(whole, rank, 3) for rank in range(3)]
    assert [part.shape[1] for part in parts] == [split.length(rank, 3) for rank in range(3)]
    assert torch.equal(split.join(parts), whole)


def test_what_joins_an_empty_tensor_as_caches_begin_is_split() -> None:
    class Cached(Attention):
        def forward(self, x: Tensor) -> Tensor:
            shape = (x.shape[0], x.shape[1], -1, HIDDEN // HEADS)
            q, k, v = (
                layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            k, v = (torch.cat([torch.tensor([], dtype=x.dtype), t], dim=-2) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v)
            result: Tensor = self.output(mixed.transpose(1, 2).reshape(x.shape))
            return result

    model, inputs = captured(lambda: Cached(HEADS))
    assert {"block.query.weight", "block.key.weight"} <= set(model.splits(2).parameters)
    assert largest_gap(model, inputs, 2, 1) < LIMIT
