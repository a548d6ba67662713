"""Measurement with a clock that is faked: every reading is one second later."""

import itertools
import time
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone calls it
from torch import nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.setting import Example
from partita.core.codec import read_json, write_json
from partita.core.graph import CostOrigin
from partita.errors import InvalidInputError, UnsupportedError
from partita.profiler.measure.clock import CpuStopwatch
from partita.profiler.measure.costs import Average, average_rounds, used, with_growth
from partita.profiler.measure.measure import ProfileOptions, measure
from partita.profiler.measure.ops import OpRunner, Overheads, RoundTimes, equal_ops
from partita.profiler.memory import LiveBytes, SavedBytes


class CountingClock:
    """Ticks once a reading."""

    counts_host = False

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def mark(self) -> float:
        return float(next(self._ticks))

    def between(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.down(F.gelu(self.up(x)))


class TinyGPT(nn.Module):
    """Tied embedding and head, two equal blocks."""

    def __init__(self, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(batch: int = 2) -> tuple[nn.Module, Example]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (batch, 9))
    return TinyGPT(), Example(
        args=(tokens[:, :-1].contiguous(),), labels=tokens[:, 1:].contiguous()
    )


def chain(batch: int = 4) -> tuple[nn.Module, Example]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    return model, Example(args=(torch.randn(batch, 8),), labels=torch.randn(batch, 8))


def conv() -> tuple[nn.Module, Example]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(144, 5),
    )
    return model, Example(args=(torch.randn(2, 3, 8, 8),), labels=torch.randint(0, 5, (2,)))


MODELS = {
    "chain": (chain, F.mse_loss),
    "gpt": (gpt, token_loss),
    "conv": (conv, F.cross_entropy),
}


@cache
def measured(name: str, *, mode: CaptureMode = CaptureMode.TRAINING, batch: int = 0, **options):
    make, loss = MODELS[name]
    model, example = make(batch) if batch else make()
    captured = capture(model, example, loss=loss, mode=mode)
    found = measure(
        captured,
        example,
        loss=loss,
        options=ProfileOptions(**{"rounds": 2, "warmup": 0, **options}),
        clock=CountingClock(),
    )
    return captured, found


@pytest.mark.parametrize("name", MODELS)
def test_every_op_that_a_gradient_flows_through_has_a_backward(name: str) -> None:
    captured, found = measured(name)
    costs = found.graph.costs[0]
    assert costs.origin is CostOrigin.MEASURED
    assert costs.device_type == "cpu"
    assert (costs.forward_s > 0).all()
    for row, op in enumerate(captured.ops):
        wanted = any(captured.values[v].requires_grad for v in op.makes)
        assert (costs.backward_s[row] > 0) == wanted, op.name
    assert (costs.backward_input_s <= costs.backward_s).all()


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_sum_to_those_of_the_untouched_model(name: str) -> None:
    make, loss = MODELS[name]
    model, example = make()
    count = SavedBytes({**dict(model.named_parameters()), **dict(model.named_buffers())})
    with count.hooks():
        loss(model(*example.args), example.labels)
    _, found = measured(name)
    assert found.graph.ops.saved_bytes.sum() == count.by_op.sum() > 0


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_ops_hand_on_are_the_real_ones(name: str) -> None:
    make, loss = MODELS[name]
    model, example = make()
    model.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    captured = capture(model, example, loss=loss)
    runner = OpRunner(captured, [*example.args, example.labels], CountingClock())
    held = {}
    plain = runner._hold
    runner._hold = lambda names, grads: (plain(names, grads), held.update(runner._held_gradients))
    runner.step()
    loss(model(*example.args), example.labels).backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(held[parameter_name], parameter.grad)


def test_backward_of_inputs_is_a_part_for_linear_and_nothing_for_embedding() -> None:
    captured, found = measured("gpt")
    costs = found.graph.costs[0]
    rows = {op.name: row for row, op in enumerate(captured.ops)}
    assert costs.backward_input_s[rows["embed/embedding"]] == 0
    assert costs.backward_input_s[rows["blocks.0.up/linear"]] > 0
    gelu = next(row for name, row in rows.items() if "gelu" in name)
    assert costs.backward_input_s[gelu] == costs.backward_s[gelu]


def test_the_whole_step_is_timed_and_the_ratio_reported() -> None:
    captured, found = measured("chain")
    record = found.record
    assert (record.whole_forward_s, record.whole_backward_s) == (1.0, 1.0)
    assert record.sum_forward_s == len(captured.ops)
    assert record.ratio == pytest.approx(found.record.sum_s / 2)


def test_ops_are_scaled_to_the_whole_only_when_asked() -> None:
    _, plain = measured("chain")
    _, scaled = measured("chain", match_whole=True)
    assert plain.graph.forward_s.sum() == 5
    assert scaled.graph.forward_s.sum() == pytest.approx(1.0)
    assert scaled.record.is_scaled
    assert scaled.record.ratio == plain.record.ratio


def test_inference_has_no_backward_and_saves_nothing() -> None:
    _, found = measured("gpt", mode=CaptureMode.EVAL)
    assert (found.graph.backward_s == 0).all()
    assert (found.graph.ops.saved_bytes == 0).all()
    assert found.record.whole_backward_s == 1.0  # one tick of the clock for nothing


def test_the_model_is_left_as_it_was() -> None:
    model, example = conv()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = torch.ones_like(model[0].weight)
    model[0].weight.grad = kept
    captured = capture(model, example, loss=F.cross_entropy)
    state = torch.get_rng_state()
    measure(captured, example, loss=F.cross_entropy, options=ProfileOptions(rounds=1))
    assert torch.equal(state, torch.get_rng_state())
    assert model[0].weight.grad is kept
    assert model[4].weight.grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_equal_ops_of_repeated_blocks_are_timed_once() -> None:
    captured, found = measured("gpt", equal_once=True)
    leader = equal_ops(captured)
    names = [op.name for op in captured.ops]
    assert leader[names.index("blocks.1.up/linear")] == names.index("blocks.0.up/linear")
    assert found.record.num_distinct == len(set(leader)) < len(leader)
    assert (found.graph.forward_s == 1).all()


def test_fewer_than_four_rounds_all_count_and_of_more_the_first_quarter_does_not() -> None:
    assert [len(used(range(n))) for n in (1, 2, 3, 4, 8)] == [1, 2, 3, 3, 6]


def test_a_slow_round_does_not_move_the_median_and_start_up_is_taken_off() -> None:
    def times(seconds: float) -> RoundTimes:
        column = np.array([seconds, 0.0])
        return RoundTimes(forward_s=column, backward_s=column, backward_input_s=column / 2)

    rounds = [times(s) for s in (1.0, 1.0, 9.0)]
    overheads = Overheads(
        forward_s=np.array([0.125, 0.0]), backward_s=np.full(2, 0.25), each_s=0.25
    )
    found = average_rounds(
        rounds,
        Average.MEDIAN,
        overheads=overheads,
        split=[times(1.0)],
        split_overheads=overheads,
        leader=[0, 1],
    )
    assert found.forward_s.tolist() == [0.875, 0.0]
    assert found.backward_s.tolist() == [0.75, 0.0]
    assert found.backward_input_s.tolist() == pytest.approx([0.25, 0.0])
    assert found.forward_spread[0] == 4.0


class SlowOps:
    """Ops that a clock says take 2**row seconds forward, and three times that backward."""

    def __init__(self) -> None:
        self.now = 0.0

    def function(self, row: int) -> type[torch.autograd.Function]:
        clock = self

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                clock.now += 2.0**row
                return x * weight

            @staticmethod
            def backward(ctx, gradient):
                clock.now += 3 * 2.0**row
                return gradient, gradient.sum()

        return Slow

    counts_host = False

    def mark(self) -> float:
        return self.now

    def between(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        pass


class SlowNet(nn.Module):
    """A chain, a branch that meets it again, and a part that no gradient comes back through."""

    def __init__(self, clock: SlowOps) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(5))
        self.functions = [clock.function(row) for row in range(5)]

    def forward(self, x):
        def run(row, value):
            return self.functions[row].apply(value, self.weights[row])

        first = run(0, x)
        left = run(1, run(2, first))
        right = run(3, first)
        unused = run(4, right).detach()
        return (left + right * unused).sum()


def test_the_backward_of_each_op_is_its_own_in_one_real_backward() -> None:
    clock = SlowOps()
    model, example = SlowNet(clock), Example(args=(torch.ones(2, 3),))
    captured = capture(model, example)
    found = measure(captured, example, clock=clock).graph
    rows = [row for row, op in enumerate(captured.ops) if op.kind == "Slow"]
    assert found.forward_s[rows].tolist() == [1, 4, 2, 8, 16]
    assert found.backward_s[rows].tolist() == [3, 12, 6, 24, 0]
    assert found.backward_s.sum() == 45


class Passing(nn.Module):
    """Leaves that hand on what they were given, beside what they make."""

    def forward(self, x, y):
        return x, x * y


class PassingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.leaves = nn.ModuleList(Passing() for _ in range(2))

    def forward(self, x):
        x = y = self.inner(x)
        for leaf in self.leaves:
            x, y = leaf(x, y)
        return (x + y).sum()


def test_a_tensor_that_an_op_hands_on_belongs_to_the_op_that_made_it() -> None:
    example = Example(args=(torch.ones(2, 4),))
    captured = capture(PassingNet(), example, granularity=Granularity.MODULE)
    assert not captured.notes
    found = measure(captured, example, clock=CountingClock())
    inner = [op.name for op in captured.ops].index("inner/Linear")
    assert (found.graph.backward_s > 0).all()
    assert found.graph.backward_s[inner] == 1


def test_flops_of_products_are_counted_and_attention_too() -> None:
    captured, found = measured("gpt")
    flops = dict(zip([op.name for op in captured.ops], found.graph.ops.flops, strict=True))
    tokens, width = 2 * 8, 16
    assert flops["blocks.0.up/linear"] == 2 * tokens * width * 4 * width
    assert flops["blocks.0/scaled_dot_product_attention"] == 4 * 2 * 8 * 8 * width
    assert flops["blocks.0/gelu"] == 0


def test_flops_of_an_lstm_are_its_products() -> None:
    example = Example(args=(torch.ones(5, 3, 4),))
    model = nn.LSTM(4, 6)
    captured = capture(model, example)
    found = measure(captured, example, clock=CountingClock())
    assert found.graph.ops.flops.sum() == 2 * 5 * 3 * 24 * (4 + 6)


def test_one_thread_is_timed_by_its_processor_time() -> None:
    assert CpuStopwatch(threads=1).mark is time.thread_time
    assert CpuStopwatch(threads=2).mark is time.perf_counter


def test_running_out_of_memory_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = chain()
    captured = capture(model, example, loss=F.mse_loss)
    plain = OpRunner.forward

    def failing(self, index, values, marks=None):
        done = plain(self, index, values, marks)
        if index == 2:
            raise torch.OutOfMemoryError("tried to allocate 8 GB")
        return done

    monkeypatch.setattr(OpRunner, "forward", failing)
    with pytest.raises(UnsupportedError, match=r"'2/linear'.*4 \(tried"):
        measure(captured, example, loss=F.mse_loss, options=ProfileOptions(rounds=1))


def test_an_example_of_another_shape_is_refused() -> None:
    model, example = chain()
    captured = capture(model, example, loss=F.mse_loss)
    with pytest.raises(InvalidInputError, match="has shape"):
        measure(captured, chain(6)[1], loss=F.mse_loss)


def test_a_missing_loss_function_is_said() -> None:
    model, example = chain()
    captured: CapturedModel = capture(model, example, loss=F.mse_loss)
    with pytest.raises(InvalidInputError, match="loss function"):
        measure(captured, example)


def test_two_batch_sizes_tell_what_is_fixed() -> None:
    _, small = measured("gpt", batch=2)
    _, large = measured("gpt", batch=4)
    grown = with_growth(small.graph, large.graph)
    assert (grown.ops.fixed_share == 1).all()  # the counting clock does not know the batch
    assert (grown.ops.saved_fixed_bytes <= grown.ops.saved_bytes).all()
    assert grown.ops.saved_fixed_bytes.sum() < 0.1 * grown.ops.saved_bytes.sum()
    with pytest.raises(InvalidInputError, match="batch size 2"):
        with_growth(small.graph, small.graph)


def test_predicted_peak_is_near_the_measured_one() -> None:
    for name in MODELS:
        _, found = measured(name)
        share = found.record.predicted_peak_bytes / found.record.peak_bytes
        assert 0.95 <= share <= 1.2, (name, share)


def test_live_bytes_fall_when_tensors_are_freed() -> None:
    live = LiveBytes()
    with live:
        first = torch.zeros(100)
        view = first[10:]
        second = first + 1
        assert live.now == 800
        del first, view
        assert live.now == 400
        del second
    assert (live.now, live.peak) == (0, 800)


def test_a_coarser_granularity_is_measured_too() -> None:
    model, example = gpt()
    captured = capture(model, example, loss=token_loss, granularity=Granularity.BLOCK)
    found = measure(captured, example, loss=token_loss, clock=CountingClock())
    assert (found.graph.backward_s > 0).sum() >= len(captured.blocks)
    count = measured("gpt")[1].graph.ops.saved_bytes.sum()
    assert found.graph.ops.saved_bytes.sum() == count


def test_a_measured_graph_is_a_document() -> None:
    _, found = measured("gpt")
    again = read_json(write_json(found.graph))
    assert again == found.graph
    assert again.annotations["profile"]["cpu"]["threads"] == 1


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmup": -1}, {"threads": -1}])
def test_impossible_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError):
        ProfileOptions(**wrong)
