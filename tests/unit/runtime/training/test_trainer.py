"""Trainers: in one process, and as forked ranks of a plan, with the same numbers."""

import dataclasses
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita
from partita.capture.capture import capture
from partita.capture.origin import ModelOrigin
from partita.capture.partial import is_stand_in
from partita.capture.setting import Example
from partita.core.plan import Plan, Shard, Stage
from partita.core.precision import parse_precision
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard
from partita.runtime.batches import CHECKED_STEPS
from partita.runtime.job import Job
from partita.runtime.local_sums import LocalSum
from partita.runtime.numerics import ready_numerics
from partita.runtime.restarts import PassedData, Stopper
from partita.runtime.training.optimizers import Agreement
from partita.runtime.training.parallelize import ScriptRank, being_rank
from partita.runtime.training.plan_trainer import PlanTrainer, deal
from partita.runtime.training.recipe import NanPolicy, Recipe
from partita.runtime.training.trainer import group_options
from partita.runtime.weights import load_weights
from partita.testing.builders import flat_cluster

SAMPLES = 8


class Net(nn.Module):
    """A small classifier with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.last = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        return self.last(hidden if scale is None else hidden * scale)


@dataclasses.dataclass
class Output:
    loss: Tensor
    accuracy: Tensor
    logits: Tensor


class WithLoss(Net):
    """The same as models of Hugging Face are: labels go in, the loss comes out."""

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Output:
        logits = super().forward(x)
        right = (logits.argmax(-1) == labels).double().mean()
        return Output(nn.functional.cross_entropy(logits, labels), right, logits)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def loss_with_metrics(output: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_fn(output, labels), {"largest": output.amax(-1).mean()}


def batches(count: int = 4, sizes: Sequence[int] = (SAMPLES,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(sizes[k % len(sizes)], 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (sizes[k % len(sizes)],), generator=generator),
        )
        for k in range(count)
    ]


def made(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def solution(
    model: nn.Module,
    example: Example,
    loss: Any,
    groups: Sequence[Sequence[int]],
    shard: Shard = Shard.NONE,
    tp: int = 1,
) -> Solution:
    captured = capture(model, example, loss=loss, name="net")
    graph = ModelOrigin(text="net").recorded_in(captured.graph)
    ops = len(graph)
    devices = 1 + max(max(group) for group in groups)
    cluster = flat_cluster(devices)
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(device.name for device in cluster.devices),
        stage_of=np.minimum(np.arange(ops) // 2, len(groups) - 1),
        stages=tuple(
            Stage(
                devices=tuple(tuple(group[k : k + tp]) for k in range(0, len(group), tp)),
                shard=shard if len(group) > 1 else Shard.NONE,
            )
            for group in groups
        ),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=np.full(4, 2),
    )
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def in_ranks(
    planned: Solution,
    script: Callable[[], Any],
    *,
    stops: bool = False,
    told: list[str] | None = None,
    **settings: Any,
) -> list[Any]:
    """Run a script in forked ranks of a plan; returns what it returned in each.

    Args:
        planned: The plan.
        script: The script.
        stops: Whether the ranks are asked to stop as soon as they have begun.
        told: Gets the sentences that ranks want people to read.
        settings: Of the job.
    """
    world = len(planned.plan.devices)
    board = StatusBoard(world)
    job = Job(script=("script.py",), stall_limit_s=60, **settings)
    stopper = Stopper(board, range(world), lambda: "SIGTERM" if stops else "")

    def note(_: int, news: object) -> None:
        if isinstance(news, str) and told is not None:
            told.append(news)

    def main(member: Any, _: object) -> Any:
        torch.set_num_threads(1)
        with being_rank(ScriptRank(member=member, board=board, solution=planned, job=job)):
            return script()

    with RankPool(world, main, limit_s=60, board=board) as pool:
        return pool.call(None, on_look=stopper.look, on_message=note)


def train(model: nn.Module, loss: Any, data: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Train as a user's script does; returns what it would print."""
    trainer = partita.parallelize(
        model,
        loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
        groups=lambda _, parameter: parameter.dim() < 2,
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
        **settings,
    )
    losses = [trainer.step(batch) for batch in data]
    return {
        "losses": losses,
        "metrics": [loss.metrics for loss in losses],
        "norm": trainer.gradient_norm,
        "rates": trainer.learning_rates,
        "evaluated": trainer.evaluate(data),
        "again": trainer.step(data[0]),
        "state": trainer.model_state(),
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for what in ("losses", "norm", "rates", "again"):
        assert found[what] == pytest.approx(wanted[what], rel=1e-9), what
    for what in ("evaluated", "metrics"):
        pairs = zip(
            *(x if isinstance(x, list) else [x] for x in (found[what], wanted[what])), strict=True
        )
        for one, other in pairs:
            assert one == pytest.approx(other, rel=1e-9)


def same_weights(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


class Plain(nn.Module):
    """Two products, of which tensor-parallel ranks divide the columns and the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_tensor_parallel_ranks_train_as_one_process_does() -> None:
    data = batches(sizes=(SAMPLES, 5))
    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(Plain), example, loss_fn, [[0, 1]], tp=2)
    wanted = train(made(Plain), loss_fn, data)
    found = in_ranks(planned, lambda: train(made(Plain), loss_fn, data))
    for one in found:
        same(one, wanted)
    same_weights(found[0]["state"], wanted["state"])


@pytest.mark.parametrize("precision", ["bf16-master", "fp16"])
def test_divided_parameters_in_narrow_types_are_rounded_anew_after_every_step(
    precision: str,
) -> None:
    def narrow() -> list[float]:
        trainer = partita.parallelize(
            made().float(),
            loss_fn,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
            precision=precision,
            microbatches=4,
        )
        return [float(trainer.step(batch)) for batch in data]

    data = [(x.float(), labels) for x, labels in batches(1)] * 6
    numerics = ready_numerics(parse_precision(precision), "cpu")
    example = Example(args=(data[0][0][:2],), labels=data[0][1][:2])
    with numerics.autocast("cpu"):
        planned = solution(made().float(), example, loss_fn, [[0, 1]], Shard.PARAMETERS)
    wanted = narrow()
    assert wanted[-1] < 0.98 * wanted[0]
    for found in in_ranks(planned, narrow):
        assert found == pytest.approx(wanted, rel=1e-3)


PIPELINE = [[0], [1]]
CASES = {
    "pipeline": (PIPELINE, Shard.NONE, (SAMPLES,)),
    "replicas": ([[0, 1]], Shard.NONE, (SAMPLES,)),
    "smaller-batches": (PIPELINE, Shard.NONE, (SAMPLES, 5, 3, 1)),
    "divided-parameters": ([[0, 1]], Shard.PARAMETERS, (SAMPLES, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_trains_as_one_process_does(name: str) -> None:
    groups, shard, sizes = CASES[name]
    data = batches(sizes=sizes)
    planned = solution(
        made(), Example(args=data[0][:1], labels=data[0][1]), loss_with_metrics, groups, shard
    )
    first = solution(
        made(),
        Example(args=(data[0][0][:2],), labels=data[0][1][:2]),
        loss_with_metrics,
        groups,
        shard,
    )
    assert first.plan.fingerprint == planned.plan.fingerprint
    wanted = train(made(), loss_with_metrics, data)
    found = in_ranks(planned, lambda: train(made(), loss_with_metrics, data))
    for one in found:
        same(one, wanted)
    same_weights(found[0]["state"], wanted["state"])
    assert not found[1]["state"]
    assert set(wanted["metrics"][0]) == {"largest"}


@pytest.mark.parametrize(("groups", "tp"), [(PIPELINE, 1), ([[0, 1]], 1), ([[0, 1]], 2)])
def test_weights_of_a_file_are_the_first_ones_in_one_process_and_under_a_plan(
    groups: list[list[int]], tp: int, tmp_path: Path
) -> None:
    data, path = batches(), tmp_path / "weights.safetensors"
    torch.manual_seed(9)
    other = Net()
    partita.parallelize(other, loss_fn, optimizer="adamw").model_state(path)
    wanted = train(other, loss_fn, data)
    assert wanted["losses"] != pytest.approx(train(made(), loss_fn, data)["losses"], rel=1e-3)
    same(train(made(), loss_fn, data, weights=path), wanted)

    def script() -> tuple[dict[str, Any], int]:
        torch.manual_seed(os.getpid())  # no rank's own weights may be seen
        model = Net()
        read = load_weights(Net(), path).bytes_read
        trainer = partita.parallelize(model, loss_fn, optimizer="adamw", weights=path)
        trainer.step(data[0])
        assert isinstance(trainer, PlanTrainer)
        return train(Net(), loss_fn, data, weights=path), trainer.report().weight_bytes - read

    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(), example, loss_fn, groups, tp=tp)
    found = in_ranks(planned, script)
    for one, more in found:
        same(one, wanted)
        # Replicas hold all; stages, and ranks that divide tensors, a part.
        assert more < 0 if groups == PIPELINE or tp > 1 else more == 0
    same_weights(found[0][0]["state"], wanted["state"])


def test_a_checkpoint_wins_over_weights(tmp_path: Path) -> None:
    data, path = batches(), tmp_path / "weights.safetensors"
    first = partita.parallelize(made(), loss_fn, optimizer="adamw")
    first.model_state(path)
    first.step(data[0])
    first.save(tmp_path / "saved")
    again = partita.parallelize(made(), loss_fn, optimizer="adamw", weights=path)
    assert again.resume(tmp_path / "saved") == 1
    same_weights(again.model_state(), first.model_state())


def test_models_that_return_their_loss_take_labels_none_and_give_metrics() -> None:
    data = [{"x": x, "labels": labels, "mask": None} for x, labels in batches()]
    example = Example(kwargs={key: None if v is None else v[:2] for key, v in data[0].items()})
    planned = solution(made(WithLoss), example, None, PIPELINE)
    wanted = train(made(WithLoss), None, data)
    found = in_ranks(planned, lambda: train(made(WithLoss), None, data))
    same(found[0], wanted)
    assert set(wanted["evaluated"]) == {"loss", "accuracy"}


def test_the_form_of_before_and_a_call_still_work() -> None:
    data = batches(2)
    step = partita.parallelize(made(), loss_fn, lambda p: torch.optim.SGD(p, lr=0.1))
    assert [step(batch) for batch in data] == [
        pytest.approx(value) for value in plain_losses(made(), data)
    ]
    with pytest.raises(UnsupportedError, match=r"process.*device"):
        partita.parallelize(made(), loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), "plan.json")


def plain_losses(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, labels in data:
        optimizer.zero_grad()
        loss = loss_fn(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def touch() -> list[str]:
    """Touch the model after training; returns what was said."""
    data, model = batches(2), made()
    trainer = partita.parallelize(model, loss_fn, optimizer="adam")
    told = []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in data:
        trainer.step(batch)
    for use in (model.state_dict, lambda: list(model.parameters()), lambda: model(data[0][0])):
        try:
            use()
        except InvalidInputError as exc:
            told.append(str(exc))
    trainer.gather_into(model)
    moved = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    return [*told, f"moved {len(moved)}"]


def collectives(clip_norm: float | None) -> tuple[int, list[float]]:
    """Return how many sums over all ranks a step waits for beside those of its Program."""
    data, calls = batches(3), []
    trainer = partita.parallelize(made(), loss_fn, optimizer="adam", clip_norm=clip_norm)
    trainer.step(data[0])
    # Small sums of ranks on one machine go through its memory.
    plain = {torch.distributed: torch.distributed.all_reduce, LocalSum: LocalSum.start}

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return function(*args, **kwargs)

        return call

    torch.distributed.all_reduce = counted(torch.distributed.all_reduce)
    LocalSum.start = counted(LocalSum.start)
    try:
        losses = [float(trainer.step(batch)) for batch in data[1:]]
    finally:
        torch.distributed.all_reduce, LocalSum.start = plain.values()
    return len(calls) // 2, losses


@pytest.mark.parametrize(
    ("groups", "clip_norm", "count"),
    [([[0, 1]], None, 1), (PIPELINE, 0.5, 1), (PIPELINE, None, 1), ([[0, 1]], 0.5, 2)],
    ids=["with gradients", "with the norm", "alone", "with the norm of replicas"],
)
def test_the_loss_travels_with_what_all_ranks_sum(
    groups: list[list[int]], clip_norm: float | None, count: int
) -> None:
    trainer = partita.parallelize(made(), loss_fn, optimizer="adam", clip_norm=clip_norm)
    wanted = [float(trainer.step(batch)) for batch in batches(3)][1:]
    for found, losses in in_ranks(small_plan(groups=groups), lambda: collectives(clip_norm)):
        assert found == count
        assert losses == pytest.approx(wanted, rel=1e-9)


def train_on_another_batch() -> tuple[int, str]:
    """Train, rank 1 on another batch once all were compared; return steps made and the error."""
    trainer = partita.parallelize(made(), loss_fn, optimizer="adam")
    first, other = batches(2)
    for step in range(3 * CHECKED_STEPS):
        differs = step > CHECKED_STEPS and torch.distributed.get_rank()
        try:
            trainer.step(other if differs else first)
        except WorkerError as exc:
            return step, str(exc)
    return 0, ""


@pytest.mark.parametrize("groups", [[[0, 1]], PIPELINE], ids=["replicas", "pipeline"])
def test_batches_that_differ_later_are_found_beside_the_loss(groups: list[list[int]]) -> None:
    for steps, said in in_ranks(small_plan(groups=groups), train_on_another_batch):
        assert steps == 2 * CHECKED_STEPS
        assert f"step {steps}: rank 1 has another batch than rank 0" in said


def test_a_model_that_a_rank_does_not_hold_says_so() -> None:
    data = batches(1)
    example = Example(args=(data[0][0][:2],), labels=data[0][1][:2])
    for told in in_ranks(solution(made(), example, loss_fn, PIPELINE), touch):
        assert len(told) == 4
        assert all("use trainer.model_state()" in text for text in told[:3])
        assert told[3] == "moved 6"
    for told in in_ranks(solution(made(), example, loss_fn, [[0, 1]]), touch):
        assert told == ["moved 6"]  # each rank holds all of it: the model is alive


def clip_by_hand() -> tuple[float, list[bool]]:
    """Clip as a script does that was not ported; returns the norm, and whether weights move."""
    data, model = batches(2), made()
    trainer = partita.parallelize(model, loss_fn, optimizer="adam")
    trainer.step(data[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    trainer.step(data[1])
    return norm, [not value.equal(before[name]) for name, value in model.state_dict().items()]


def test_who_clips_the_parameters_of_the_model_is_told_once_what_to_use() -> None:
    told: list[str] = []
    data = batches(1)
    example = Example(args=(data[0][0][:2],), labels=data[0][1][:2])
    found = in_ranks(solution(made(), example, loss_fn, [[0, 1]]), clip_by_hand, told=told)
    assert found == [(0.0, [True] * 6)] * 2  # nothing was there to clip; training went on
    assert len(told) == 2
    assert all("use clip_norm" in text for text in told)


def test_weights_are_streamed_to_a_file(tmp_path: Path) -> None:
    trainer = partita.parallelize(made(), loss_fn)
    trainer.model_state(tmp_path / "weights.safetensors")
    load = pytest.importorskip("safetensors.torch").load_file
    same_weights(load(tmp_path / "weights.safetensors"), trainer.model_state())


def test_weights_and_optimizer_are_saved(tmp_path: Path) -> None:
    data = batches(2)
    trainer = partita.parallelize(made(), loss_fn, optimizer="adam")
    with pytest.raises(InvalidInputError, match=r"nothing.*evaluate"):
        trainer.evaluate([])
    trainer.step(data[0])
    trainer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-000001"]


def gone_on(folder: Path, data: Sequence[Any], until: int) -> list[float]:
    """Train as a script does that can be started again: from where it was saved last."""
    trainer = partita.parallelize(
        made(),
        loss_fn,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.02),
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    )
    done = trainer.resume(folder)
    losses = [float(trainer.step(batch)) for batch in data[done:until]]
    trainer.save(folder)
    with pytest.raises(InvalidInputError, match=r"before.*first"):
        trainer.resume(folder)
    if hasattr(trainer, "report"):
        trainer.report()
    return losses


def test_a_script_goes_on_alone_and_under_a_plan(tmp_path: Path) -> None:
    data = batches(6)
    wanted = gone_on(tmp_path / "whole", data, 6)
    inputs, labels = data[0]
    planned = solution(
        made(), Example(args=(inputs[:2],), labels=labels[:2], batch_size=2), loss_fn, [[0], [1]]
    )
    found = gone_on(tmp_path / "parts", data, 2)
    both = in_ranks(planned, lambda: gone_on(tmp_path / "parts", data, 4))
    assert both[0] == both[1]
    found += both[0] + gone_on(tmp_path / "parts", data, 6)
    assert found == pytest.approx(wanted, rel=1e-9)


def small_plan(loss: Any = loss_fn, groups: Sequence[Sequence[int]] = PIPELINE) -> Solution:
    inputs, labels = batches(1)[0]
    return solution(
        made(), Example(args=(inputs[:2],), labels=labels[:2], batch_size=2), loss, groups
    )


def adam(**settings: Any) -> Any:
    return partita.parallelize(
        made(), loss_fn, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.02), **settings
    )


def numbered_data(count: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(count, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (count,), generator=generator),
    )


def train_until_stopped(loader: Callable[[Any], Any]) -> tuple[list[float], bool]:
    """Train on a loader; returns losses, and whether the script was ended."""
    trainer, losses = adam(), []
    ended = False
    try:
        for batch in loader(trainer):
            losses.append(float(trainer.step(batch)))
    except SystemExit:
        with pytest.raises(SystemExit, match=r"^$"):  # no more steps, whatever a script does
            trainer.step(batch)
        ended = True
    assert trainer.report().has_stopped == ended
    return losses, ended


def test_ranks_that_are_asked_to_stop_save_their_step_and_end_the_script(tmp_path: Path) -> None:
    data = numbered_data(5 * 9 + 5)  # the last batch of an epoch has fewer samples

    def loader(epochs: int) -> Callable[[Any], Any]:
        return lambda trainer: trainer.loader(data, seed=2, batch_size=8, epochs=epochs)

    settings = {"checkpoints": str(tmp_path / "stopped"), "resume": "auto"}
    found = in_ranks(
        small_plan(), lambda: train_until_stopped(loader(10_000)), stops=True, **settings
    )
    losses, ended = found[0]
    assert ended
    assert found[1] == found[0]
    assert all(losses)
    (saved,) = (path.name for path in (tmp_path / "stopped").glob("step-*"))
    assert saved == f"step-{len(losses):06}"
    epochs = len(losses) // 7 + 2
    more, ended = in_ranks(small_plan(), lambda: train_until_stopped(loader(epochs)), **settings)[0]
    assert not ended
    wanted = train_until_stopped_alone(loader(epochs))
    assert [*losses, *more] == pytest.approx(wanted, rel=1e-7)


def train_until_stopped_alone(loader: Callable[[Any], Any]) -> list[float]:
    trainer = adam()
    return [float(trainer.step(batch)) for batch in loader(trainer)]


def test_checkpoints_of_smaller_batches_have_the_number_of_their_step(tmp_path: Path) -> None:
    data = batches(4, sizes=(SAMPLES, 5))

    def script() -> dict[int, dict[str, Tensor]]:
        trainer, states = adam(), {}
        for batch in data:
            trainer.step(batch)
            states[trainer.steps] = trainer.model_state()
        trainer.report()
        return states

    settings = {"checkpoints": str(tmp_path), "save_every": 3}
    states = in_ranks(small_plan(), script, **settings)[0]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000004"]
    trainer = adam()
    assert trainer.resume(tmp_path / "step-000003") == 3
    same_weights(trainer.model_state(), states[3])


LOADERS: dict[str, Callable[[Any], Any]] = {
    "items": lambda trainer: trainer.loader(
        numbered_data(29), batch_size=8, seed=4, epochs=2, drop_last=True
    ),
    "shuffled unseeded": lambda trainer: trainer.loader(
        torch.utils.data.DataLoader(numbered_data(24), batch_size=8, shuffle=True), epochs=2
    ),
    "one for each epoch": lambda trainer: (
        batch
        for epoch in range(2)
        for batch in trainer.loader(numbered_data(24), batch_size=8, seed=epoch)
    ),
}


def read_on(folder: Path, loader: Callable[[Any], Any], steps: int) -> list[float]:
    """Train some steps on what a loader gives, from where it was saved; evaluate in between."""
    torch.manual_seed(11)
    trainer, losses = adam(), []
    trainer.resume(folder)
    for batch in loader(trainer):
        trainer.evaluate(trainer.loader(numbered_data(16), batch_size=8))
        losses.append(float(trainer.step(batch)))
        if len(losses) == steps:
            break
    trainer.save(folder)
    if hasattr(trainer, "report"):
        trainer.report()
    return losses


@pytest.mark.parametrize("name", LOADERS)
def test_a_script_reads_on_where_it_was_saved(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name]
    wanted = read_on(tmp_path / "whole", loader, 7)
    assert len(wanted) == 6
    found = read_on(tmp_path / "parts", loader, 2)
    found += in_ranks(small_plan(), lambda: read_on(tmp_path / "parts", loader, 2))[0]
    found += read_on(tmp_path / "parts", loader, 7)
    assert found == pytest.approx(wanted, rel=1e-7)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = adam()
    trainer.step(batches(1)[0])
    trainer.save(tmp_path)

    def script() -> str:
        other = partita.parallelize(made(), loss_fn, optimizer="sgd")
        try:
            other.resume(tmp_path)
            other.step(batches(1)[0])
        except InvalidInputError as exc:
            return str(exc)
        return ""

    for told in (script(), *in_ranks(small_plan(), script)):
        assert told.startswith(
            "the checkpoint was saved by optimizer adamw, this run steps with sgd"
        )


def test_a_script_that_begins_its_data_again_is_told_so(tmp_path: Path) -> None:
    read_on(tmp_path, LOADERS["items"], 2)

    def script(*, reads_on: bool) -> int:
        trainer = adam()
        for batch in LOADERS["items"](trainer) if reads_on else batches(1):
            trainer.step(batch)
        return trainer.steps

    settings = {"checkpoints": str(tmp_path), "resume": "auto"}
    for reads_on, steps, count in ((False, 3, 1), (True, 6, 0)):
        told: list[str] = []
        found = in_ranks(
            small_plan(), lambda on=reads_on: script(reads_on=on), told=told, **settings
        )
        assert found == [steps, steps]
        assert len([text for text in told if "goes on after step 2, but" in text]) == count


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    read_on(tmp_path, LOADERS["items"], 2)
    with pytest.raises(InvalidInputError, match=r"seed 5,.*4"):
        read_on(
            tmp_path, lambda trainer: trainer.loader(numbered_data(29), seed=5, batch_size=8), 1
        )


def test_batches_larger_than_the_plan_are_evaluated_in_parts() -> None:
    data = batches(3, sizes=(21, SAMPLES, 9))

    def script() -> dict[str, float]:
        return adam().evaluate(data)

    wanted = script()
    for found in in_ranks(small_plan(), script):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_predictions_of_a_plan_are_those_of_one_process() -> None:
    (x, labels), (small, few) = batches(2, sizes=(SAMPLES, 5))
    example = Example(kwargs={"x": x[:2], "labels": labels[:2], "mask": None})

    def script() -> list[Output]:
        trainer = partita.parallelize(made(WithLoss), None, optimizer="sgd")
        pairs = ((x, labels), (small, few))
        return [trainer.predict({"x": a, "labels": b, "mask": None}) for a, b in pairs]

    found = in_ranks(solution(made(WithLoss), example, None, PIPELINE), script)
    assert found[1] == [None, None]
    for one, wanted in zip(found[0], script(), strict=True):
        for name in ("loss", "accuracy", "logits"):
            assert torch.allclose(getattr(one, name), getattr(wanted, name), rtol=1e-9), name


def test_a_loader_deals_all_samples_in_one_order_by_seed() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    trainer = partita.parallelize(made(), loss_fn)
    first, again, other = (
        [b[0].tolist() for b in trainer.loader(data, seed=seed, batch_size=4, epochs=2)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert [len(batch) for batch in first] == [4, 4, 2] * 2
    assert sorted(row for batch in first[:3] for row in batch) == list(range(10))
    with pytest.raises(InvalidInputError, match=r"needs.*samples"):
        next(trainer.loader(data))


def test_callbacks_at_and_microbatches() -> None:
    seen: list[tuple[int, float]] = []
    data = batches(4)
    trainer = partita.parallelize(
        made(),
        loss_fn,
        optimizer="sgd",
        callbacks=[lambda t, loss: seen.append((t.steps, loss))],
        microbatches=3,
    )
    marks = []
    for batch in data:
        trainer.step(batch)
        marks.append(trainer.at(every=2))
    assert marks == [False, True, False, True]
    assert [value for _, value in seen] == pytest.approx(plain_losses(made(), data))


@pytest.mark.parametrize(
    ("samples", "sizes", "real"),
    [
        (8, (2, 2, 2, 2), (2, 2, 2, 2)),
        (5, (3, 2, 2, 2), (3, 2, 0, 0)),
        (4, (2, 2, 2, 2), (2, 2, 0, 0)),
        (3, (3, 3, 3, 3), (3, 0, 0, 0)),
        (1, (2, 2, 2, 2), (1, 0, 0, 0)),
    ],
)
def test_fewer_samples_are_dealt_over_the_microbatches(samples, sizes, real) -> None:
    dealt = deal(samples, (2, 2, 2, 2))
    assert (dealt.sizes, dealt.real) == (sizes, real)
    assert sum(dealt.weights) == pytest.approx(1.0)
    rows = iter(dealt.rows)
    taken = [[next(rows) for _ in range(size)] for size in sizes]
    counted = [row for part, count in zip(taken, real, strict=True) for row in part[:count]]
    assert counted == list(range(samples))
    assert deal(3, (1, 1, 1, 1)).real == (1, 1, 1, 0)
    assert deal(7, (6, 2)).sizes == (5, 2)
    with pytest.raises(InvalidInputError, match=r"9 samples;.*8"):
        deal(9, (2, 2, 2, 2))


def test_groups_by_pattern_and_predicate() -> None:
    model = made()
    rules = {"*.bias": {"lr": 0.5}, "last.*": {"weight_decay": 0.0}}
    found = group_options(rules, model)
    assert found["last.bias"] == {"lr": 0.5}
    assert found["last.weight"] == {"weight_decay": 0.0}
    assert "first.weight" not in found
    with pytest.raises(InvalidInputError, match="no parameter"):
        group_options({"head.*": {"lr": 1}}, model)
    with pytest.raises(InvalidInputError, match="returned a int"):
        group_options(lambda *_: 3, model)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-master", "fp16"])
def test_a_plan_computes_with_the_precision_of_one_process(precision: str) -> None:
    def train_some() -> list[float]:
        torch.manual_seed(1)
        model = Net().float()
        trainer = partita.parallelize(
            model, loss_fn, optimizer="adamw", precision=precision, clip_norm=1.0, microbatches=4
        )
        losses = [trainer.step((x.float(), labels)) for x, labels in batches(6)]
        return [*losses, *trainer.evaluate([(x.float(), y) for x, y in batches(2)]).values()]

    data = batches(1)
    example = Example(args=(data[0][0][:2].float(),), labels=data[0][1][:2])
    try:
        wanted = train_some()
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    plain = solution(made().float(), example, loss_fn, PIPELINE)
    for found in in_ranks(plain, train_some):
        assert found == pytest.approx(wanted, rel=2e-3)
    assert wanted[0] > wanted[5]


def test_a_scaled_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    agreement = Agreement(Recipe(precision=parse_precision("fp16"), clip_norm=1.0))
    before = agreement.scale
    agreement.conclude(float("inf"))
    assert agreement.skips
    assert agreement.scale == before / 2
    agreement.conclude((2 * agreement.scale) ** 2)
    assert (agreement.skips, agreement.norm) == (False, 2.0)
    used = agreement.used({"w": torch.ones(1) * agreement.scale})["w"]
    assert float(used) == pytest.approx(0.5, rel=1e-5)


class Poisoned(Net):
    """A model whose logits are no numbers where the first feature of a sample is large."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale) + torch.log(torch.relu(100 - x[:, :1]))


def poisoned(count: int, at: int, sizes: Sequence[int] = (SAMPLES,)) -> list[tuple[Tensor, Tensor]]:
    data = batches(count, sizes=sizes)
    data[at][0][0, 0] = 200
    return data


def train_poisoned(data: Sequence[Any], on_nan: str | None) -> tuple[list[float], str]:
    trainer = partita.parallelize(made(Poisoned), loss_fn, optimizer="sgd", on_nan=on_nan)
    losses: list[float] = []
    try:
        for batch in data:
            losses.append(float(trainer.step(batch)))  # noqa: PERF401 (those before an error count)
    except WorkerError as exc:
        return losses, str(exc)
    return losses, ""


def poisoned_plan() -> Solution:
    inputs, labels = batches(1)[0]
    example = Example(args=(inputs[:2],), labels=labels[:2], batch_size=2)
    return solution(made(Poisoned), example, loss_fn, PIPELINE)


@pytest.mark.parametrize("sizes", [(SAMPLES,), (SAMPLES, 5)])
def test_a_script_stops_at_a_loss_that_is_no_number(sizes: Sequence[int]) -> None:
    data = poisoned(3, 1, sizes)
    asked = {"recipe": Recipe(on_nan=NanPolicy.STOP)}
    for given, job in (("stop", {}), (None, asked)):
        found = in_ranks(poisoned_plan(), lambda given=given: train_poisoned(data, given), **job)
        for losses, error in found:
            assert len(losses) == 1
            assert "loss or gradients of step 2 are no numbers: rank 1, " in error
    losses, error = train_poisoned(data, "stop")
    assert len(losses) == 1
    assert "step 2 are no numbers" in error


def test_a_script_skips_a_step_without_numbers_and_says_so() -> None:
    data = poisoned(3, 1)
    told: list[str] = []
    found = in_ranks(poisoned_plan(), lambda: train_poisoned(data, "skip"), told=told)
    assert [text for text in told if "step 2 are no numbers" in text]
    wanted, _ = train_poisoned([data[0], data[2]], "skip")
    assert [found[0][0][0], found[0][0][2]] == pytest.approx(wanted, rel=1e-9)


def test_a_loss_without_numbers_is_never_silent(caplog: pytest.LogCaptureFixture) -> None:
    data = poisoned(2, 0)
    told: list[str] = []
    in_ranks(poisoned_plan(), lambda: train_poisoned(data, None), told=told)
    assert [text for text in told if text.startswith("the loss of step 1 is nan")]
    train_poisoned(data, None)
    assert "loss or gradients of step 1 are no numbers" in caplog.text
    with pytest.raises(InvalidInputError, match="on_nan 'explode'"):
        partita.parallelize(made(), loss_fn, on_nan="explode")


def test_a_loader_passes_over_data_that_had_no_numbers(tmp_path: Path) -> None:
    data = batches(6)

    def script() -> list[float]:
        trainer = adam()
        found = [float(trainer.step(batch)) for batch in trainer.loader(iter(data))]
        trainer.report()
        return found

    trainer = adam()
    for batch in trainer.loader(iter(data[:2])):
        trainer.step(batch)
    trainer.save(tmp_path)
    passed = (PassedData(step=2, count=3),)
    settings = {"checkpoints": str(tmp_path), "resume": "auto", "passed": passed}
    (loss,) = in_ranks(small_plan(), script, **settings)[0]
    assert loss == pytest.approx(float(trainer.step(data[5])), rel=1e-9)


class Branching(Net):
    """A model that takes another way where the data are large: the capture has one of them."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found = super().forward(x, scale)
        return found * 3 if bool(x.sum() > 100) else found


def test_a_branch_that_was_not_captured_is_found_by_a_check() -> None:
    data = batches(3)
    data[1][0][6] = 100.0  # in the last microbatch of the second batch

    def script(check: int) -> tuple[int, str]:
        trainer = partita.parallelize(made(Branching), loss_fn, optimizer="sgd", check=check)
        try:
            for batch in data:
                trainer.step(batch)
        except WorkerError as exc:
            return trainer.steps, str(exc)
        return trainer.steps, ""

    example = Example(args=(data[0][0][:2],), labels=data[0][1][:2], batch_size=2)
    planned = solution(made(Branching), example, loss_fn, PIPELINE)
    for steps, error in in_ranks(planned, lambda: script(3)):
        assert steps == 1
        assert "step 2: the loss by the plan is" in error
        assert "another way on these data" in error
    assert in_ranks(planned, lambda: script(True)) == [(3, "")] * 2
    assert script(3) == (3, "")


def test_one_process_says_that_gradients_are_used_up_and_its_model_is_pickled_as_any(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups)

    before = partita.parallelize(made(), loss_fn, optimizer=optimizer)
    with pytest.raises(InvalidInputError, match="nothing to save"):
        before.save(tmp_path)
    before.step(batches(1)[0])
    before.save(tmp_path)
    model = made()
    trainer = partita.parallelize(model, loss_fn, optimizer=optimizer, clip_norm=1.0)
    trainer.resume(tmp_path)
    for batch in batches(2):
        trainer.step(batch)
    assert "used up" not in caplog.text
    for _ in range(2):
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    (said,) = (text for text in caplog.messages if "used up within trainer.step" in text)
    assert "clip_norm" in said
    assert type(pickle.loads(pickle.dumps(model)).first.weight) is nn.Parameter


def test_a_batch_that_is_too_large_says_what_would_do() -> None:
    with pytest.raises(InvalidInputError, match=r"16 samples.* 8.* --microbatches 4"):
        deal(16, (4, 4))


def test_a_function_that_builds_the_model_gives_ranks_memory_for_their_part_alone() -> None:
    data = batches(3, sizes=(SAMPLES, 5))
    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(), example, loss_fn, [[0], [1, 2]])

    def script() -> tuple[dict[str, Any], list[str], float, Tensor]:
        trainer = partita.parallelize(made, loss_fn, optimizer="sgd")
        hidden = [n for n, p in trainer.model.named_parameters() if is_stand_in(p)]
        losses = {"losses": [trainer.step(batch) for batch in data]}
        evaluated, state = trainer.evaluate(data), trainer.model_state()
        trainer.gather_into(trainer.model)
        return {**losses, **state}, hidden, evaluated["loss"], trainer.model.first.weight.clone()

    whole = partita.parallelize(made, loss_fn, optimizer="sgd", microbatches=4)
    wanted = [whole.step(batch) for batch in data]
    found = in_ranks(planned, script)
    assert [hidden for _, hidden, *_ in found] == [
        ["norm.weight", "norm.bias", "last.weight", "last.bias"],
        *[["first.weight", "first.bias"]] * 2,
    ]
    for seen, _, evaluated, first in found:
        assert seen.pop("losses") == pytest.approx(wanted, rel=1e-9)
        assert evaluated == pytest.approx(whole.evaluate(data)["loss"], rel=1e-9)
        assert torch.allclose(first, whole.model.first.weight, rtol=1e-9)
    same_weights(found[0][0], whole.model_state())


def test_ranks_that_build_other_first_weights_are_named() -> None:
    data = batches(1)
    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(), example, loss_fn, [[0], [1, 2]])

    def build() -> nn.Module:
        torch.manual_seed(torch.distributed.get_rank())
        return Net()

    with pytest.raises(InvalidInputError, match=r"'last.bias' .* rank \d .* rank \d"):
        in_ranks(planned, lambda: partita.parallelize(build, loss_fn).step(data[0]))


def test_a_model_on_the_meta_device_is_filled_from_weights_or_refused(tmp_path: Path) -> None:
    data = batches(2)
    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(), example, loss_fn, [[0], [1]])
    file = tmp_path / "weights.pt"
    torch.save(made().state_dict(), file)

    def script() -> list[float]:
        with torch.device("meta"):
            model = Net()
        trainer = partita.parallelize(model, loss_fn, optimizer="sgd", weights=file)
        return [float(trainer.step(batch)) for batch in data]

    whole = partita.parallelize(made(), loss_fn, optimizer="sgd", microbatches=4)
    wanted = [float(whole.step(batch)) for batch in data]
    assert script() == pytest.approx(wanted, rel=1e-9)
    for found in in_ranks(planned, script):
        assert found == pytest.approx(wanted, rel=1e-9)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(InvalidInputError, match=r"Net .* meta device.* weights"):
        partita.parallelize(empty, loss_fn)


class Pooled(Net):
    """Sequences of any length, weighted by a number that is no tensor."""

    def forward(self, x: Tensor, weight: float, kind: str | None = None) -> Tensor:
        pooled = super().forward(x * weight).mean(1)
        return pooled if kind is None else pooled.relu()


def test_numbers_of_python_and_lengths_of_sequences_may_change_from_batch_to_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    data = [
        {
            "x": torch.randn(samples, length, 6, generator=generator, dtype=torch.float64),
            "weight": weight,
            "labels": torch.randint(0, 4, (samples,), generator=generator),
        }
        for samples, length, weight in [
            (8, 5, 1.0), (8, 5, -2.0), (8, 3, -2.0), (3, 5, 0.5), (8, 5, 1.0)
        ]
    ]  # fmt: skip
    example = Example(args=(data[0]["x"][:2], 1.0), labels=data[0]["labels"][:2])
    planned = solution(made(Pooled), example, loss_fn, PIPELINE)
    wanted = train(made(Pooled), loss_fn, data)
    for found in in_ranks(planned, lambda: train(made(Pooled), loss_fn, data)):
        same(found, wanted)


def test_a_list_with_a_value_for_each_sample_is_refused_and_a_loss_is_read_as_a_tensor_is() -> None:
    x, labels = batches()[0]
    trainer = partita.parallelize(made(Pooled), loss_fn, optimizer="sgd", microbatches=2)
    batch = {"x": x[:, None], "weight": [1.0] * SAMPLES, "labels": labels}
    with pytest.raises(InvalidInputError, match=r"'weight' .* 8 values"):
        trainer.step(batch)
    loss = trainer.step({**batch, "weight": 1.0})
    assert loss.item() == float(loss.detach()) == loss
    with pytest.raises(InvalidInputError, match=r"loss\.backward"):
        loss.backward()


def test_a_loss_that_is_a_sum_over_samples_is_told() -> None:
    data, told = batches(), []

    def total(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels, reduction="sum")

    planned = solution(made(), Example(args=data[0][:1], labels=data[0][1]), total, PIPELINE)
    in_ranks(planned, lambda: train(made(), total, data[:1])["losses"], told=told)
    assert sum("a sum over samples (cross_entropy)" in line for line in told) == 1


@pytest.mark.parametrize(("shard", "tp"), [(Shard.OPTIMIZER, 1), (Shard.NONE, 2)])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_parts(shard: Shard, tp: int) -> None:
    data = batches()
    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(Plain), example, loss_fn, [[0, 1]], shard, tp)

    def script() -> Any:
        optimizer = torch.optim.Adafactor
        return partita.parallelize(made(Plain), loss_fn, optimizer=optimizer).step(data[0])

    with pytest.raises(UnsupportedError, match="Adafactor steps parts"):
        in_ranks(planned, script)


def test_a_scheduler_that_waits_for_a_measurement_is_refused() -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau"):
        partita.parallelize(made(), loss_fn, optimizer=torch.optim.SGD, scheduler=scheduler)


class Scaled(Net):
    """A model with a number of Python that scripts change, and one that it counts itself."""

    scale, calls = 1.0, 0

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x * self.scale, weight)


def test_numbers_that_a_script_changes_between_steps_are_seen() -> None:
    data, told = batches(6), []
    share = 0.0

    def annealed(output: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(output, labels) + share * output.square().mean()

    def script() -> list[float]:
        nonlocal share
        model, share, found = made(Scaled), 0.0, []
        trainer = partita.parallelize(model, annealed, optimizer="adamw")
        for step, batch in enumerate(data):
            share, model.scale = 0.1 * (step // 2), 1.0 + (step == 3)
            found.append(trainer.step(batch))
        return found

    planned = solution(made(Scaled), Example(args=data[0][:1], labels=data[0][1]), annealed, [[0]])
    (found,) = in_ranks(planned, script, told=told)
    assert found == pytest.approx(script(), rel=1e-9)
    assert [line for line in told if line.startswith("share has changed")]


@dataclass
class Settings:
    """What a configuration has: values in lists and dicts, and in objects of its own."""

    factors: list[float]
    inner: dict[str, Any]


SETTINGS = Settings([1.0], {})


def smoothed(output: Tensor, labels: Tensor) -> Tensor:
    """A loss that reads a variable of its module by another function."""
    return loss_fn(output, labels) * _factor()


def _factor() -> float:
    return SETTINGS.factors[0]


class Configured(Net):
    """A model that reads values deep in a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings([1.0, 2.0], {"deep": SimpleNamespace(scale=1.0)})

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        scale = self.settings.inner["deep"].scale * sum(self.settings.factors)
        return super().forward(x * scale, weight)


def test_values_in_nested_objects_that_a_script_changes_between_steps_are_seen() -> None:
    data, told = batches(6), []

    def script() -> list[float]:
        model, found = made(Configured), []
        SETTINGS.factors[0] = 1.0
        trainer = partita.parallelize(model, smoothed, optimizer="adamw")
        changes = [
            lambda: None,
            lambda: model.settings.factors.append(0.5),
            lambda: setattr(model.settings.inner["deep"], "scale", 0.5),
            lambda: SETTINGS.factors.__setitem__(0, 3.0),
            lambda: setattr(model, "settings", Settings([2.0], dict(model.settings.inner))),
            lambda: setattr(model.settings.inner["deep"], "scale", 2.0),
        ]
        for batch, change in zip(data, changes, strict=True):
            change()
            found.append(trainer.step(batch))
        return found

    example = Example(args=data[0][:1], labels=data[0][1])
    planned = solution(made(Configured), example, smoothed, [[0]])
    (found,) = in_ranks(planned, script, told=told)
    assert found == pytest.approx(script(), rel=1e-9)
    assert [line for line in told if line.startswith("settings.factors has changed")]


def test_parameters_that_are_frozen_later_are_refused() -> None:
    data = batches()

    def script() -> None:
        model = made()
        trainer = partita.parallelize(model, loss_fn, optimizer="adamw")
        trainer.step(data[0])
        model.first.weight.requires_grad_(False)
        trainer.step(data[1])

    planned = solution(made(), Example(args=data[0][:1], labels=data[0][1]), loss_fn, [[0]])
    with pytest.raises(InvalidInputError, match=r"requires_grad of 'first\.weight'"):
        in_ranks(planned, script)


class Shifted(nn.Module):
    """A model whose ops depend on whether a batch has a single sample, as shifted labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.last = nn.Linear(8, 12, dtype=torch.float64)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.words(words).mean(1))
        logits = self.last(hidden[:, None] + self.words(words))
        wanted = nn.functional.pad(labels, (0, 1), value=0)[:, 1:].contiguous()
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), wanted)}


@pytest.mark.parametrize("left", [1, 3, 5])
def test_a_last_batch_of_few_samples_has_the_graph_of_the_plan(left: int) -> None:
    generator = torch.Generator().manual_seed(2)
    words = [torch.randint(0, 12, (size, 5), generator=generator) for size in (8, 8, left)]
    data = [{"words": part, "labels": part} for part in words]

    def script() -> dict[str, float]:
        trainer = partita.parallelize(made(Shifted), None, optimizer="adamw", microbatches=4)
        for batch in data[:2]:
            trainer.step(batch)
        return trainer.evaluate(data)

    example = Example(kwargs={key: value[:2] for key, value in data[0].items()})
    planned = solution(made(Shifted), example, None, PIPELINE)
    wanted = script()
    assert all(found == pytest.approx(wanted, rel=1e-9) for found in in_ranks(planned, script))


def test_a_trainer_says_what_does_the_work_of_names_that_it_does_not_have():
    trainer = partita.parallelize(nn.Linear(2, 2), nn.functional.mse_loss, optimizer="sgd")
    with pytest.raises(
        AttributeError, match=r"no attribute 'optimizer': parallelize\(.*scheduler="
    ):
        _ = trainer.optimizer
    with pytest.raises(AttributeError, match=r"'nothing_known'$"):
        _ = trainer.nothing_known
    assert not hasattr(trainer, "zero_grad")
