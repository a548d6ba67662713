"""torch alone: a Python file that divides the user's model by ``fully_shard`` and DTensor.

Every block is a unit of ``fully_shard`` and the rest of the model another one, over a mesh of
copies, ranks that divide a copy, and tensor-parallel ranks. Tensors are divided where the names of
the modules say how: those of Llama in transformers and in torchtitan, whose attention counts heads
by what a rank holds. Others would run and compute something else, so they are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence

from partita.core.grid import Grid, block_chain
from partita.core.plan import Shard
from partita.errors import InfeasibleError
from partita.trainers.rules import Trainer
from partita.trainers.target import PlanToWrite, Written, check_options, torchrun_words

_RULES = Trainer(
    name="torchtitan",  # its row of frameworks: what FSDP2 and DTensor combine
    title="fully_shard",
    schedules={},
    shards=(Shard.NONE, Shard.GRADIENTS, Shard.PARAMETERS),
    blocks=True,
)
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3")
_ROWS = ("o_proj", "down_proj", "wo", "w2")
_WHOLE = re.compile(r"norm|_ln|^ln|layernorm", re.IGNORECASE)
_DTYPES = {"bf16-mixed": "bfloat16"}


def write_fsdp(plan: PlanToWrite) -> Written:
    """Return a plan as a Python file with ``parallelize(model)``.

    Raises:
        InfeasibleError: It has a pipeline, or divides what torch alone does not.
    """
    check_options(plan, (), "fsdp")
    grid = plan.grid
    _check(grid)
    blocks = [plan.renamed(name) for name in block_chain(plan.problem.graph).names]
    tensors = tensor_plan(plan) if grid.tp > 1 else {}
    name = f"{plan.name.replace('-', '_')}_parallel"
    left = ["model, data, optimizer, and clipping over DTensors"]
    if grid.precision not in ("", "fp32", *_DTYPES):
        left.append(f"precision {grid.precision}")
    remarks = [
        f"microbatches of a rank per step: {grid.microbatches} of {grid.microbatch_size} samples; "
        "with several, average their losses",
    ]
    if tensors:
        remarks.append(
            f"embedding and head are whole on the {grid.tp} tensor-parallel ranks, which take the "
            "same samples"
        )
    return Written(
        files={f"{name}.py": _code(plan, grid, blocks, tensors)},
        command=torchrun_words(plan, "train.py"),
        process="exec python train.py",
        left_to_you=(f"in train.py: from {name} import parallelize; {left[0]}", *left[1:]),
        remarks=tuple(remarks),
    )


def _check(grid: Grid) -> None:
    if grid.pp > 1:
        raise InfeasibleError(
            f"{grid.pp} stages of a pipeline; fully_shard divides within one: partita.split cuts "
            "stages, export --to torchtitan has both"
        )
    _RULES.check(grid)
    for what, degree in (("sequence", grid.cp), ("experts", grid.ep)):
        if degree > 1:
            raise InfeasibleError(
                f"{degree} ranks divide the {what}; a model must do so itself: export --to "
                "torchtitan"
            )
    if grid.sequence_parallel:
        raise InfeasibleError(
            "sequence parallelism; a plan of DTensor needs the model's own code for it: export "
            "--to torchtitan"
        )
    if grid.recompute and not grid.recomputes_blocks:
        raise InfeasibleError(
            f"{grid.recompute} is recomputed; a wrapped block recomputes all of it: choose full"
        )


def tensor_plan(plan: PlanToWrite) -> dict[str, str]:
    """Return how each matrix of a block is divided, by the name of its module within the block.

    Raises:
        InfeasibleError: A module is not known to work on a part of its heads.
    """
    graph = plan.problem.graph
    found: dict[str, str] = {}
    for block in block_chain(graph).names:
        mine = [
            name[len(block) + 1 :].rpartition(".")[0]
            for name in graph.parameters.names
            if name.startswith(f"{block}.")
        ]
        for module in mine:
            last = module.rpartition(".")[2]
            if last in _COLUMNS:
                found[module] = "ColwiseParallel"
            elif last in _ROWS:
                found[module] = "RowwiseParallel"
            elif not _WHOLE.search(last):
                raise InfeasibleError(
                    f"module {block}.{module} is divided by tensors; how DTensor would do so is "
                    "known of models with the names of Llama (q_proj, wq, ...): export --to "
                    "megatron or torchrun"
                )
    for kind, other in (("ColwiseParallel", "RowwiseParallel"), ("RowwiseParallel", "Colwise")):
        for module, style in found.items():
            parent = module.rpartition(".")[0]
            beside = (s for m, s in found.items() if m.rpartition(".")[0] == parent)
            if style == kind and not any(s.startswith(other) for s in beside):
                raise InfeasibleError(f"module {module} is divided, and nothing joins its parts")
    return found


def _code(plan: PlanToWrite, grid: Grid, blocks: Sequence[str], tensors: Mapping[str, str]) -> str:
    shard = 1 if grid.shard is Shard.NONE else grid.shard_group or grid.dp
    count = (grid.recompute_blocks or len(blocks)) if grid.recompute else 0
    hosts = ", ".join(f"{len(node.local)} on {node.name}" for node in plan.nodes)
    styles = sorted(set(tensors.values()))
    dtype = _DTYPES.get(grid.precision)
    lines = [
        plan.comment().rstrip("\n"),
        '"""The model divided as planned: parallelize(model) in every rank."""',
        "",
        "import torch",
    ]
    if count:
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    checkpoint_wrapper,",
            ")",
        ]
    shards = grid.dp > 1
    names = ["MixedPrecisionPolicy", "fully_shard"] if dtype else ["fully_shard"]
    lines += ["from torch.distributed.device_mesh import DeviceMesh"]
    if shards:
        lines += [f"from torch.distributed.fsdp import {', '.join(names)}"]
    if styles:
        lines += [
            "from torch.distributed.tensor.parallel import "
            + ", ".join([*styles, "parallelize_module"])
        ]
    lines += [
        "",
        f"# Ranks: {hosts}. Rank = (copy * SHARD + part) * TENSOR + tensor-parallel rank.",
        f"COPIES, SHARD, TENSOR = {grid.dp // shard}, {shard}, {grid.tp}",
        f"MICROBATCHES, MICROBATCH_SIZE = {grid.microbatches}, {grid.microbatch_size}",
        f"BLOCKS = {_names(blocks)}",
    ]
    if count:
        lines += [
            f"RECOMPUTED = BLOCKS[:{count}]" if count < len(blocks) else "RECOMPUTED = BLOCKS"
        ]
    if tensors:
        lines += [
            "TENSORS = {  # of each block",
            *[f"    {json.dumps(name)}: {style}()," for name, style in tensors.items()],
            "}",
        ]
    lines += [
        "",
        "",
        'def parallelize(model, device_type="cuda"):',
        '    """Divide a model in place and return it; before the optimizer is made."""',
        "    ranks = torch.arange(COPIES * SHARD * TENSOR).view(COPIES, SHARD, TENSOR)",
        '    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("copies", "shard", "tensor"))',
    ]
    if tensors:
        lines += [
            "    for name in BLOCKS:",
            '        parallelize_module(model.get_submodule(name), mesh["tensor"], TENSORS)',
        ]
    if count:
        lines += [
            "    for name in RECOMPUTED:",
            '        parent, _, child = name.rpartition(".")',
            "        block = checkpoint_wrapper(model.get_submodule(name))",
            "        model.get_submodule(parent).register_module(child, block)",
        ]
    if shards:
        part = '"shard"' if shard == grid.dp else '"copies", "shard"'
        given = grid.shard is Shard.PARAMETERS
        lines += [f'    options = {{"mesh": mesh[{part}], "reshard_after_forward": {given}}}']
        if dtype:
            lines += [
                "    # Weights and products in a narrow type, sums of gradients in float32.",
                '    options["mp_policy"] = MixedPrecisionPolicy(',
                f"        param_dtype=torch.{dtype}, reduce_dtype=torch.float32",
                "    )",
            ]
        lines += [
            "    for name in BLOCKS:",
            "        fully_shard(model.get_submodule(name), **options)",
            "    return fully_shard(model, **options)",
        ]
    else:
        lines += ["    return model"]
    return "\n".join(lines) + "\n"


def _names(blocks: Sequence[str]) -> str:
    """Return the blocks as Python writes them, as a range where they are one."""
    stem = blocks[0].rstrip("0")
    if list(blocks) == [f"{stem}{n}" for n in range(len(blocks))]:
        return f'[f"{stem}{{n}}" for n in range({len(blocks)})]'
    return json.dumps(list(blocks))
