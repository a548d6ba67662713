"""Writers of trainers' and launchers' files, and what they refuse."""

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from partita.core.grid import Grid
from partita.core.plan import Shard
from partita.core.problem import Problem
from partita.core.schedules import Schedule
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.problem import problem as pose_problem
from partita.testing.grids import random_grids, solution_of_grid, untied
from partita.trainers.rules import TRAINERS
from partita.trainers.schedule_csv import read_schedule_csv
from partita.trainers.table import TARGETS, why_not, writer
from partita.trainers.target import PlanToWrite


@pytest.fixture(scope="module")
def small() -> Problem:
    """Return a transformer of 12 blocks on two hosts."""
    return pose_problem("gpt-small", cluster="2x4xa100", microbatches=16, microbatch_size=2)


def to_write(problem: Problem, grid: Grid, **values: object) -> PlanToWrite:
    """Return the plan of a grid as writers take it."""
    made = ("partita 0: partita export plan.json",)
    return PlanToWrite(
        solution=solution_of_grid(problem, grid),
        step_s=0.5,
        made_by=made,
        **values,  # type: ignore[arg-type]
    )


def test_every_file_that_can_begins_with_version_plan_step_and_command(small: Problem) -> None:
    plan = to_write(small, Grid(pp=2, dp=2, cuts=(6, 6)))
    solo = to_write(small, Grid(dp=4, shard=Shard.PARAMETERS))
    untied = {"torchtitan", "accelerate", "fsdp"}
    for name in TARGETS:
        if name == "device-map":
            continue
        written = writer(name)(solo if name in untied else plan)
        assert written.command
        for file, text in written.files.items():
            if file.endswith((".csv", "plan.json", "hostfile")):
                continue
            assert "partita 0: partita export plan.json" in text[:400], file
            assert "predicted step 500 ms" in text[:600], file
            if file.endswith(".py"):
                compile(text, file, "exec")
            if file.endswith((".sh", ".sbatch")):
                subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


def test_refusals_are_those_of_the_rules(small: Problem) -> None:
    base = Grid(pp=2, cuts=(6, 6))
    cases = {
        ("megatron", "choose 1f1b, interleaved-1f1b"): replace(base, schedule=Schedule.GPIPE),
        ("megatron", "at most ZeRO-1 beside a pipeline"): replace(
            base, dp=2, shard=Shard.GRADIENTS
        ),
        ("megatron", "interleaves them"): replace(base, chunks=2, cuts=(3, 3, 3, 3)),
        ("torchtitan", "the head is tied"): base,
        ("torchtitan", "cannot shard optimizer alone"): Grid(dp=2, shard=Shard.OPTIMIZER),
        ("deepspeed", "divide tensors in a pipeline"): replace(base, tp=2),
        ("accelerate", "has no pipelines"): base,
        ("accelerate", "copies of the state beside tensor"): Grid(dp=2, tp=2),
        ("schedule-csv", "no pipeline"): Grid(dp=2),
        ("schedule-csv", "no letter"): replace(
            base, recompute="full", schedule=Schedule.EARLY_RECOMPUTE
        ),
        ("device-map", "has 2 replicas"): Grid(dp=2),
        ("device-map", "tied weights on one"): base,
    }
    for (name, words), grid in cases.items():
        with pytest.raises(InfeasibleError, match=words):
            writer(name)(to_write(small, grid))
        assert words in why_not(name, to_write(small, grid))


def test_old_weights_are_refused() -> None:
    for trainer in TRAINERS.values():
        found = list(trainer.refusals(Grid(pp=2, schedule=Schedule.PIPEDREAM)))
        assert found[0] == "schedule pipedream keeps old weights; choose 1f1b"


def test_what_trainers_can_run_is_written(small: Problem) -> None:
    problem = untied(small)
    for name, trainer in TRAINERS.items():
        grids = random_grids(random.Random(2), problem, trainer)
        for grid in (next(grids) for _ in range(10)):
            if name == "deepspeed" and grid.pp > 1 and grid.tp > 1:
                continue
            if name == "accelerate" and grid.recompute and grid.shard is Shard.NONE:
                continue
            writer(name)(to_write(problem, grid))


def test_a_schedule_in_columns_needs_only_earlier_ones(small: Problem) -> None:
    grid = Grid(pp=4, cuts=(3, 3, 3, 3), schedule=Schedule.ZERO_BUBBLE)
    files = writer("schedule-csv")(to_write(small, grid)).files
    text = next(text for name, text in files.items() if name.endswith(".csv"))
    rows = read_schedule_csv(text)
    assert len(rows) == 4
    # Each rank runs its 16 microbatches forward, and backward in two parts.
    assert all(len(row) == 3 * 16 for row in rows)
    column = {
        cell: at for row in text.splitlines() for at, cell in enumerate(row.split(",")) if cell
    }
    for stage in range(1, 4):
        for batch in range(16):
            assert column[f"{stage - 1}F{batch}"] < column[f"{stage}F{batch}"]
            assert column[f"{stage}I{batch}"] < column[f"{stage - 1}I{batch}"]


def test_options_that_a_target_does_not_take_are_refused(small: Problem) -> None:
    plan = to_write(small, Grid(dp=2), options={"tme": "1"})
    with pytest.raises(InvalidInputError, match="did you mean 'time'"):
        writer("sbatch")(plan)
    blank = to_write(small, Grid(dp=2), options={"time": "1 --uid=0"})
    with pytest.raises(InvalidInputError, match="without blanks"):
        writer("sbatch")(blank)


def test_mixed_nodes_are_components_jobs_and_refusals() -> None:
    mixed = pose_problem(
        "gpt-small", cluster="1x4xa100+1x2xv100", microbatches=6, microbatch_size=2
    )
    plan = to_write(mixed, Grid(dp=6), command=("train.py", "--x", "a b"))
    job = writer("sbatch")(plan).files["job.sbatch"]
    assert "#SBATCH hetjob" in job
    assert "--gpus-per-node=v100:2" in job
    assert "srun --het-group=0,1" in job
    jobset = writer("jobset")(replace(plan, options={"queue": "train", "image": "me"}))
    assert "kueue.x-k8s.io/queue-name: train" in jobset.files["jobset.yaml"]
    for name in ("trainjob", "skypilot"):
        with pytest.raises(InfeasibleError, match="export --to jobset"):
            writer(name)(plan)


def test_a_device_map_covers_each_parameter_once() -> None:
    chain = pose_problem("gpt-small", cluster="1x4xa100", microbatches=4, microbatch_size=2)
    tied = to_write(chain, Grid(pp=1))
    found = json.loads(writer("device-map")(tied).files["device_map.json"])
    names = chain.graph.parameters.names
    for name in names:
        assert sum(name == key or name.startswith(f"{key}.") for key in found) == 1
    assert set(found.values()) == {0}
    renamed = writer("device-map")(replace(tied, rename={"layer0": "transformer.h.0"}))
    assert "transformer.h.0" in json.loads(renamed.files["device_map.json"])


def test_a_node_that_is_not_in_the_plan_fails_with_a_line(small: Problem, tmp_path: Path) -> None:
    files = writer("torchrun")(to_write(small, Grid(dp=2), command=("x.py",))).files
    path = tmp_path / "start_node.sh"
    path.write_text(files["start_node.sh"])
    done = subprocess.run(
        ["bash", str(path)],
        env={"PLAN_NODE": "elsewhere", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 1
    assert "this node is elsewhere, none of: host0" in done.stderr
