"""Configurations of trainers as people write them, read or refused in one line."""

import json
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from partita.core.grid import Grid, complete_grid, grid_of, plan_of_grid
from partita.core.plan import Shard
from partita.core.problem import Problem
from partita.core.schedules import Schedule
from partita.errors import FormatError, InvalidInputError
from partita.flows.compare import compare
from partita.flows.problem import problem as pose_problem
from partita.planners.table import solve
from partita.testing.grids import random_grids, solution_of_grid, untied
from partita.trainers.read import kind_of, read_configuration
from partita.trainers.rules import TRAINERS
from partita.trainers.table import writer
from partita.trainers.target import PlanToWrite

SCRIPT = """#!/bin/bash
# 8 GPUs of one node
GPUS_PER_NODE=8
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
    --master_addr $MASTER_ADDR
)
TRAINING_ARGS=(--micro-batch-size 2 --global-batch-size 64 --bf16)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    --num-layers 12  --hidden-size 768 \\
    ${TRAINING_ARGS[@]} \\
\t--tensor-model-parallel-size 2 \\
    --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
"""
MEGATRON: Mapping[str, tuple[str, Grid | str]] = {
    "script with arrays and arithmetic": (
        SCRIPT,
        Grid(
            tp=2,
            pp=4,
            dp=2,
            sequence_parallel=True,
            cuts=(3, 3, 3, 3),
            batch_size=64,
            microbatch_size=2,
            shard=Shard.OPTIMIZER,
            tied=True,
            precision="bf16-fp32-grads",
        ),
    ),
    "quoted arguments of 2021": (
        'GPT_ARGS="--num-layers 24 --micro-batch-size 4\n  --global-batch-size 16 --fp16"\n'
        "OPTS=' --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 '\n"
        "python pretrain.py $GPT_ARGS $OPTS\n",
        Grid(
            pp=2,
            dp=0,
            cuts=(12, 12),
            batch_size=16,
            microbatch_size=4,
            tied=True,
            precision="fp16",
        ),
    ),
    "file of arguments with a layout": (
        "--tensor-model-parallel-size=1\n--pipeline-model-parallel-size=2\n"
        "--pipeline-model-parallel-layout 'E|(t*2|)*2ttL'\n--num-layers 6\n"
        "--untie-embeddings-and-output-weights\n--recompute-granularity full\n"
        "--recompute-method block --recompute-num-layers 1\n",
        Grid(
            pp=2,
            dp=0,
            chunks=2,
            cuts=(0, 2, 2, 2),
            schedule=Schedule.INTERLEAVED,
            recompute="full",
            recompute_blocks=1,
            precision="fp32",
        ),
    ),
    "arrays of which one is used": (
        "SMALL=(--num-layers 12 --micro-batch-size 4)\n"
        "LARGE=(--num-layers 48 --micro-batch-size 1 --tensor-model-parallel-size 8)\n"
        "torchrun --nproc-per-node 8 p.py ${SMALL[@]} > log.txt 2>&1\n",
        Grid(dp=8, cuts=(12,), microbatch_size=4, tied=True, precision="fp32"),
    ),
    "a command within a quoted word": (
        "export TP=2 MB=1; srun --ntasks-per-node=1 bash -lc '\n"
        "  torchrun --nproc_per_node 4 p.py --tensor-model-parallel-size $TP --num-layers 8 \\ \n"
        "    --micro-batch-size $MB'\n",
        Grid(
            dp=2,
            tp=2,
            cuts=(8,),
            microbatch_size=1,
            tied=True,
            precision="fp32",
            annotations={"ntasks-per-node": "1 bash -lc"},
        ),
    ),
    "names of 2020 and a function": (
        "run() {\n  python -m torch.distributed.launch --nproc_per_node 8 p.py --num-layers 24"
        " --model-parallel-size 2 \\\n --checkpoint-activations --zero-stage 1 --batch-size 4 "
        '"$@"\n}\n'
        "run --fp16\n",
        Grid(
            dp=4,
            tp=2,
            cuts=(24,),
            recompute="full",
            microbatch_size=4,
            shard=Shard.OPTIMIZER,
            tied=True,
            precision="fp16",
        ),
    ),
    "defaults, sums with brackets and expr": (
        ": ${TP:=2}\nPP=${PP:-${STAGES:-2}}; N=`expr 2 \\* 3`\n"
        "x --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers "
        "$((N + (1 + 1) * 2 - 2)) --micro-batch-size 1\n",
        Grid(dp=0, tp=2, pp=2, cuts=(4, 4), microbatch_size=1, tied=True, precision="fp32"),
    ),
    "a size that a branch chooses": (
        'if [ "$1" = small ]; then\n  NL=12\nelse\n  NL=48\nfi\nx --num-layers $NL '
        "--micro-batch-size 1\n",
        "line 1: --num-layers is set within a branch",
    ),
    "a switch that a branch adds": (
        "A=(--num-layers 8 --micro-batch-size 1)\n[[ $FP8 == 1 ]] && A+=(--fp8-format hybrid)\n"
        'x "${A[@]}"\n',
        "line 2: --fp8-format is set within a branch",
    ),
    "two commands": (
        "x --num-layers 8 --micro-batch-size 1\npython eval.py --num-layers 8 "
        "--micro-batch-size 8\n",
        "line 1: --micro-batch-size is '1' for one command and '8' for another (line 2)",
    ),
    "a list in Python": (
        'args = ["--num-layers", "24", "--micro-batch-size", "2"]\n',
        "no flags of Megatron with values",
    ),
    "variable from outside": (
        "python x.py --num-layers 8 --pipeline-model-parallel-size ${PP}\n",
        "--pipeline-model-parallel-size is '${PP}', a variable that the file does not set",
    ),
    "layers that Megatron would drop": (
        "x --num-layers 30 --pipeline-model-parallel-size 4 --micro-batch-size 1\n",
        "30 blocks cannot be dealt to 4 stages",
    ),
    "processes that do not divide": (
        "torchrun --nproc-per-node 6 x.py --tensor-model-parallel-size 4\n",
        "6 processes are no multiple of 4",
    ),
}
TITAN: Mapping[str, tuple[str, Grid | str]] = {
    "toml of 0.1 with batch_size": (
        "[training]\nbatch_size = 8\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 2\n"
        'data_parallel_shard_degree = 4\n[activation_checkpoint]\nmode = "full"\n',
        Grid(
            tp=2,
            dp=4,
            sequence_parallel=True,
            shard=Shard.PARAMETERS,
            recompute="full",
            batch_size=32,
            microbatch_size=8,
            precision="bf16-mixed",
        ),
    ),
    "degrees of 0.1 in three sections": (
        "[training]\nbatch_size = 8\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 4\n"
        "[experimental]\npipeline_parallel_degree = 2\n[activation_checkpoint]\n"
        'mode = "selective"\nselective_ac_option = "2"\n',
        Grid(
            tp=2,
            pp=2,
            dp=4,
            sequence_parallel=True,
            shard=Shard.GRADIENTS,
            batch_size=32,
            microbatch_size=1,
            precision="bf16-mixed",
            annotations={"activation_checkpoint": "selective, option '2'"},
        ),
    ),
    "pipeline with leftover ranks": (
        "[parallelism]\npipeline_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"
        'pipeline_parallel_schedule = "interleaved1f1b"\n'
        'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1"],'
        ' ["layers.2"], ["norm", "output"]]\n',
        Grid(
            pp=2,
            dp=0,
            chunks=2,
            cuts=(1, 1, 1, 0),
            schedule=Schedule.INTERLEAVED,
            shard=Shard.GRADIENTS,
            microbatch_size=1,
            precision="bf16-mixed",
        ),
    ),
    "saved JSON of 0.3": (
        json.dumps(
            {
                "training": {"local_batch_size": 2, "global_batch_size": 16, "dtype": "float32"},
                "parallelism": {
                    "data_parallel_replicate_degree": 2,
                    "data_parallel_shard_degree": 2,
                    "pipeline_parallel_schedule_csv": "",
                    "context_parallel_load_balancer": "headtail",
                },
                "activation_checkpoint": None,
            }
        ),
        Grid(
            dp=4,
            shard=Shard.PARAMETERS,
            shard_group=2,
            batch_size=16,
            microbatch_size=2,
            precision="bf16-mixed",
            annotations={"context_parallel_load_balancer": "'headtail'"},
        ),
    ),
    "a layer that is left out": (
        "[parallelism]\npipeline_parallel_degree = 2\n"
        'module_fqns_per_model_part = [["layers.0"], ["layers.2"]]\n',
        "leave out a layer",
    ),
    "broken toml": ("[parallelism]\ntensor_parallel_degree = \n", "no TOML"),
    "a schedule that is not modelled": (
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"\n',
        "is not modelled",
    ),
}
DEEPSPEED: Mapping[str, tuple[str, Grid | str]] = {
    "auto everywhere": (
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "bf16": '
        '{"enabled": "auto"}, "gradient_clipping": 1.0}',
        Grid(
            dp=0,
            shard=Shard.GRADIENTS,
            precision="bf16-fp32-grads",
            annotations={"gradient_clipping": "1.0"},
        ),
    ),
    "all three batches": (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,'
        ' "gradient_accumulation_steps": 8, "fp16": {"enabled": true}}',
        Grid(dp=4, batch_size=64, microbatch_size=2, precision="fp16"),
    ),
    "offloaded": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}',
        Grid(dp=0, shard=Shard.PARAMETERS, offload_optimizer=1.0, precision="fp32"),
    ),
    "names of 0.3, MiCS and weights on disk": (
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "cpu_offload": '
        'true, "mics_shard_size": 8, "offload_param": {"device": "nvme"}}, '
        '"activation_checkpointing": {"cpu_checkpointing": true}}',
        Grid(
            dp=0,
            shard=Shard.PARAMETERS,
            shard_group=8,
            offload_optimizer=1.0,
            microbatch_size=2,
            precision="fp32",
            annotations={
                "zero_optimization.offload_param": "{'device': 'nvme'}",
                "activation_checkpointing": "{'cpu_checkpointing': True}",
            },
        ),
    ),
    "batches that contradict": (
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4,'
        ' "gradient_accumulation_steps": 2}',
        "no multiple",
    ),
    "a stage that is not there": ('{"zero_optimization": {"stage": 4}}', "expected 0 to 3"),
}
ACCELERATE: Mapping[str, tuple[str, Grid | str]] = {
    "as accelerate config writes it": (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\n"
        "downcast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n",
        Grid(
            dp=4,
            precision="bf16-mixed",
            annotations={
                "debug": "false",
                "downcast_bf16": "no",
                "gpu_ids": "all",
                "machine_rank": "0",
                "main_training_function": "main",
            },
        ),
    ),
    "fsdp 2 with a mesh": (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, "
        "fsdp_reshard_after_forward: false}\nparallelism_config: {parallelism_config_tp_size: 2, "
        "parallelism_config_dp_shard_size: 2, parallelism_config_dp_replicate_size: 2}\n",
        Grid(dp=4, tp=2, shard=Shard.GRADIENTS, shard_group=2, precision="fp32"),
    ),
    "fsdp 1 by its strategy": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: "
        "SHARD_GRAD_OP\n",
        Grid(dp=2, shard=Shard.GRADIENTS, precision="fp32"),
    ),
    "fsdp 1 within each machine": (
        "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nfsdp_config:\n"
        "  fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_offload_params: true\n",
        Grid(
            dp=16,
            shard=Shard.PARAMETERS,
            shard_group=8,
            precision="fp32",
            annotations={"fsdp_offload_params": "true"},
        ),
    ),
    "another tool's configuration": ("distributed_type: DEEPSPEED\n", "read its own configuration"),
    "a mesh that does not fit": (
        "distributed_type: FSDP\nnum_processes: 6\n"
        "parallelism_config: {parallelism_config_dp_shard_size: 4}\n",
        "is not replicate 1 x shard 4",
    ),
}
DEVICE_MAPS: Mapping[str, tuple[str, dict[str, str] | str]] = {
    "numbers": ('{"transformer.wte": 0, "lm_head": 1}', {"transformer.wte": "0", "lm_head": "1"}),
    "one device": ('{"": 0}', {"": "0"}),
    "names": ('{"a": "cuda:1", "b": "cpu"}', {"a": "1", "b": "cpu"}),
    "disk": ('{"a": 0, "b": "disk"}', {"a": "0", "b": "disk"}),
    "another device": ('{"a": 0, "b": "mps"}', "expected a number, cuda:N, cpu or disk"),
}
CASES = {"megatron": MEGATRON, "torchtitan": TITAN, "deepspeed": DEEPSPEED}
CASES |= {"accelerate": ACCELERATE, "device-map": DEVICE_MAPS}
FLAT = [(kind, name, *case) for kind, cases in CASES.items() for name, case in cases.items()]


@pytest.mark.parametrize(("kind", "name", "text", "expected"), FLAT, ids=[c[1] for c in FLAT])
def test_what_people_have_is_read_or_refused_in_one_line(
    kind: str, name: str, text: str, expected: object
) -> None:
    assert kind_of(text) == kind
    if isinstance(expected, str):
        with pytest.raises(FormatError) as caught:
            read_configuration(text)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    found = read_configuration(text)
    if isinstance(found, Grid) and kind == "megatron":
        assert "hidden-size" in found.annotations or name != "script with arrays and arithmetic"
        object.__setattr__(found, "annotations", {})
        object.__setattr__(expected, "annotations", {})
    assert found == expected


@pytest.mark.parametrize(
    ("script", "refusal"),
    [
        ("--micro-batch-size " + "${" * 20_000, "a variable that the file does not set"),
        ("A=12345678\n" + "A=$A$A\n" * 99 + "x --micro-batch-size $A", "grows over all bounds"),
        (
            "A='" + "--b 1 " * 9000 + "'\n" + "x $A --micro-batch-size 1\n" * 999,
            "more than 200000 words",
        ),
    ],
    ids=["brackets", "doubling", "repeating"],
)
def test_scripts_that_grow_are_refused(script: str, refusal: str) -> None:
    with pytest.raises(FormatError, match=refusal):
        read_configuration(script)


def test_mutated_configurations_give_no_traceback() -> None:
    rng = random.Random(7)
    pieces = ["$(", "${A}", "'", '"', "(", "*", "|", "\\\n", "-1", "0", "1e9", "é", "{", "[", ":"]
    texts = [text for _, _, text, _ in FLAT]
    for _ in range(4000):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            cut = rng.choice([0, 1, 3, 20])
            text = text[:at] + rng.choice([*pieces, ""]) + text[at + cut :]
        with suppress(InvalidInputError):
            read_configuration(text)


@pytest.fixture(scope="module")
def small() -> Problem:
    """Return an untied transformer of 12 blocks on two hosts."""
    tied = pose_problem("gpt-small", cluster="2x4xa100", microbatches=16, microbatch_size=2)
    return untied(tied)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("release", ["0.3", "0.2"])
def test_what_is_written_is_read_as_the_same_plan(name: str, release: str, small: Problem) -> None:
    if (release == "0.2") != (name == "torchtitan"):
        pytest.skip("a Python file is not read; the others have one release")
    grids = random_grids(random.Random(4), small, TRAINERS[name])
    for grid in (next(grids) for _ in range(12)):
        if name == "deepspeed" and (grid.pp > 1 or grid.recompute):
            continue
        if name == "accelerate" and grid.recompute and grid.shard is Shard.NONE:
            continue
        if name == "torchtitan" and grid.tp > 1:
            continue  # Sequence parallelism is its default, which the problem does not model.
        solution = solution_of_grid(small, grid)
        plan = PlanToWrite(solution=solution, step_s=1.0, release=release * (release == "0.2"))
        text = next(iter(writer(name)(plan).files.values()))
        found = read_configuration(text)
        assert isinstance(found, Grid)
        assert plan_of_grid(small, found) == solution.plan
        again = grid_of(small, plan_of_grid(small, found))
        assert again.cuts == complete_grid(small, grid).cuts


def test_a_script_is_compared_and_its_changes_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.sh"
    script = SCRIPT.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4").rstrip()
    path.write_text(f"{script} --overlap-grad-reduce\n")
    found = compare(
        "gpt-small",
        cluster="2x4xa100",
        planner=["uniform", f"grid:{path}", "single"],
        batch_size=64,
        microbatch_size=2,
    )
    assert "train.sh: not modelled: overlap-grad-reduce" in caplog.messages[0]
    assert "hidden-size" not in caplog.text
    assert "trains in bf16-fp32-grads, the costs are those of fp32" in caplog.text
    named = [each for each in found.candidates if each.name.startswith("grid:")]
    assert named[0].summary is not None
    other = tmp_path / "flat.sh"
    other.write_text("torchrun --nproc-per-node 8 x.py --num-layers 12 --micro-batch-size 2\n")
    both = [f"grid:{path}", f"grid:{other}"]
    better = compare("gpt-small", cluster="2x4xa100", planner=both, batch_size=64)
    assert [each.name for each in better.candidates] == both[::-1]
    assert "--pipeline-model-parallel-size: 4 -> 1" in better.changes[both[0]]
    assert "--sequence-parallel: set -> not set" in better.changes[both[0]]


def test_a_device_map_is_a_plan() -> None:
    chain = pose_problem("gpt-small", cluster="1x2xa100", microbatches=4, microbatch_size=2)
    text = json.dumps({"embedding*": 0, "layer*": 0, "head*": 0})
    found = solve(chain, "grid", grid=read_configuration(text))
    assert set(found.plan.device_of.tolist()) == {0}
    with pytest.raises(InvalidInputError, match="needs a file"):
        solve(chain, "grid", grid=3)
