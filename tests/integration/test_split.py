"""Models cut by ``partita.split`` under torch's own schedules equal one process."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

import partita
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.sources import ModelSource, SourceOptions, load_source
from partita.core.grid import Grid
from partita.core.plan import Shard
from partita.core.problem import Objective, Problem, Schedule
from partita.core.solution import Solution
from partita.errors import InfeasibleError, InvalidInputError, UnsupportedError
from partita.ranks.pool import RankPool
from partita.testing.builders import flat_cluster
from partita.testing.grids import solution_of_grid

MICROBATCHES, SAMPLES = 4, 2
GPT2 = "tiny-gpt2?resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
LLAMA = "tiny-llama?num_hidden_layers=4"
Build = Callable[[Any], Any]


def source_of(name: str, seed: int = 0) -> ModelSource:
    options = SourceOptions(batch_size=SAMPLES, sequence_length=8, dtype="float64", seed=seed)
    return load_source(f"hf:{name}", options)


def solution_for(name: str, size: int = 2, **grid: Any) -> Solution:
    """Return a plan of some devices for a tiny model of transformers."""
    origin = ModelOrigin(text=f"hf:{name}")
    graph = origin.recorded_in(Captures(source_of(name), origin).at(SAMPLES).graph)
    problem = Problem(graph=graph, cluster=flat_cluster(size), objective=Objective())
    samples = {"batch_size": MICROBATCHES * SAMPLES, "microbatch_size": SAMPLES}
    return solution_of_grid(problem, Grid(**{"pp": 2, **samples, **grid}))


def batches(source: ModelSource, count: int = 2) -> list[dict[str, Any]]:
    made = [source.example(MICROBATCHES * SAMPLES, turn) for turn in range(count)]
    return [{**example.kwargs, "labels": example.labels} for example in made]


def alone(source: ModelSource) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return losses and gradients of one process that takes the same microbatches."""
    model, optimizer = source.model, torch.optim.SGD(source.model.parameters(), lr=0.1)
    losses, gradients = [], []
    for batch in batches(source):
        optimizer.zero_grad()
        total = 0.0
        for turn in range(MICROBATCHES):
            rows = slice(turn * SAMPLES, (turn + 1) * SAMPLES)
            inputs = {name: value[rows] for name, value in batch.items()}
            labels = inputs.pop("labels")
            loss = source.loss(model(**inputs), labels) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


def in_ranks(name: str, planned: Solution, build: Build) -> list[Any]:
    """Train in two forked ranks by a schedule; returns the losses and gradients of each."""

    def main(member: Any, _: object) -> Any:
        torch.set_num_threads(1)
        source = source_of(name, seed=member.rank)  # the weights of rank 0 count
        data = batches(source_of(name))
        pipeline = partita.split(source.model.train(), planned, data[0], source.loss)
        schedule = build(pipeline)
        held = dict(n for stage in pipeline.stages for n in stage.submod.named_parameters())
        optimizer = torch.optim.SGD(held.values(), lr=0.1)
        losses, gradients = [], []
        for batch in data:
            found: list[torch.Tensor] = []
            optimizer.zero_grad()
            schedule.step(**pipeline.begin_step(batch), losses=found)
            pipeline.end_step()
            losses += [float(sum(found)) / MICROBATCHES] if found else []
            gradients.append({n: p.grad.clone() for n, p in held.items()})
            optimizer.step()
        return losses, gradients

    with RankPool(2, main, limit_s=60) as pool:
        return pool.call(None)


def check_equal(found: list[Any], wanted: Any) -> None:
    losses = [loss for losses, _ in found for loss in losses]
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    for step, expected in enumerate(wanted[1]):
        seen = set()
        for _, gradients in found:
            for name, value in gradients[step].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
                seen.add(name)
        assert seen == set(expected)


def one_f_one_b(pipeline: Any) -> Any:
    return Schedule1F1B(pipeline.stages[0], pipeline.num_microbatches, loss_fn=pipeline.loss)


def test_gpt2_with_tied_weights_under_torchs_1f1b_equals_one_process() -> None:
    planned = solution_for(GPT2)
    found = in_ranks(GPT2, planned, one_f_one_b)
    shared = set(found[0][1][0]) & set(found[1][1][0])
    assert shared == {"transformer.wte.weight"}
    check_equal(found, alone(source_of(GPT2)))


@pytest.mark.parametrize(
    ("schedule", "chunks"), [(Schedule.ZERO_BUBBLE, 1), (Schedule.INTERLEAVED, 2)]
)
def test_llama_under_an_exported_schedule_equals_one_process(
    schedule: Schedule, chunks: int, tmp_path: Path
) -> None:
    planned = solution_for(LLAMA, schedule=schedule, chunks=chunks)
    written = partita.export(planned, to="schedule-csv", output=str(tmp_path)).written
    code = next(path for path in written if path.endswith(".py"))

    def by_file(pipeline: Any) -> Any:
        names = runpy.run_path(code)
        mine = names["STAGES_OF_RANK"][dist.get_rank()]
        assert [stage.stage_index for stage in pipeline.stages] == mine
        return names["build_schedule"](pipeline.stages, loss_fn=pipeline.loss)

    check_equal(in_ranks(LLAMA, planned, by_file), alone(source_of(LLAMA)))


def exported(planned: Solution, folder: Path) -> dict[str, Any]:
    """Return what the Python of ``--to fsdp`` defines."""
    (code,) = partita.export(planned, to="fsdp", output=str(folder)).written
    return runpy.run_path(code)


def test_llama_divided_by_fully_shard_and_dtensor_as_exported_equals_one_process(
    tmp_path: Path,
) -> None:
    planned = solution_for(LLAMA, 4, pp=1, dp=2, tp=2, shard=Shard.PARAMETERS, recompute="full")
    names = exported(planned, tmp_path)
    assert (names["COPIES"], names["SHARD"], names["TENSOR"]) == (1, 2, 2)
    assert names["MICROBATCHES"] * names["SHARD"] == MICROBATCHES

    def main(member: Any, _: object) -> Any:
        torch.set_num_threads(1)
        source = source_of(LLAMA)
        model = names["parallelize"](source.model.train(), device_type="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = range(member.rank // 2, MICROBATCHES, 2)
        losses, gradients = [], []
        for batch in batches(source_of(LLAMA)):
            optimizer.zero_grad()
            total = 0.0
            for turn in mine:
                rows = slice(turn * SAMPLES, (turn + 1) * SAMPLES)
                inputs = {name: value[rows] for name, value in batch.items()}
                labels = inputs.pop("labels")
                loss = source.loss(model(**inputs), labels) / len(mine)
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            gradients.append(
                {
                    name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor().clone()
                    for name, p in model.named_parameters()
                }
            )
            optimizer.step()
        return losses, gradients

    with RankPool(4, main, limit_s=120) as pool:
        found = pool.call(None)
    means = [sum(pair) / 2 for pair in zip(found[0][0], found[2][0], strict=True)]
    check_equal([(means, found[0][1]), ([], found[3][1])], alone(source_of(LLAMA)))


def test_what_fully_shard_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, grid, words in (
        (LLAMA, {"pp": 2}, "2 stages of a pipeline; fully_shard divides within one"),
        (GPT2, {"pp": 1, "tp": 2}, "how DTensor would do so is known of models with the names"),
        (LLAMA, {"pp": 1, "dp": 2, "shard": Shard.OPTIMIZER}, "cannot shard optimizer alone"),
        (LLAMA, {"pp": 1, "tp": 2, "sequence_parallel": True}, "sequence parallelism"),
    ):
        with pytest.raises(InfeasibleError, match=words) as refused:
            exported(solution_for(name, **grid), tmp_path)
        assert "\n" not in str(refused.value)


def test_what_torchs_schedules_cannot_run_is_refused_in_one_line() -> None:
    planned, source = solution_for(LLAMA, chunks=2), source_of(LLAMA)
    batch = batches(source, 1)[0]
    with pytest.raises(UnsupportedError, match="torchrun"):
        partita.split(source.model, planned, batch, source.loss)

    def refusal(solution: Solution, given: Any = batch) -> str:
        with pytest.raises((InvalidInputError, UnsupportedError)) as refused:
            partita.split(source.model, solution, given, source.loss)
        return str(refused.value)

    fewer = {name: value[:-1] for name, value in batch.items()}
    again = replace(planned, plan=replace(planned.plan, recompute=planned.plan.recompute | True))
    placed = [replace(stage, devices=((0,),)) for stage in planned.plan.stages]
    lonely = replace(planned, plan=replace(planned.plan, stages=tuple(placed)))

    def main(member: Any, _: object) -> list[str]:
        del member
        return [refusal(planned, fewer), refusal(again), refusal(lonely)]

    with RankPool(2, main, limit_s=60) as pool:
        for found in pool.call(None):
            assert found[0] == "the batch has 7 samples; the plan is for 8: 4 microbatches"
            assert found[1] == "partita.split has no recomputation; plan without it"
            assert found[2] == "there are 2 ranks; the plan has 4 stages on 1 devices"
