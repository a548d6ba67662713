"""Hugging Face accelerate: the YAML of ``accelerate launch``, written and read.

Its inner keys keep their long prefixes and are checked by nobody, so that what is written here is
compared with what its launcher puts into the environment (``benchmarks/interop.py``). It has no
pipelines, and the same number of processes on every machine.
"""

from collections.abc import Mapping
from typing import Any

from partita.core.grid import Grid
from partita.core.plan import Shard
from partita.errors import FormatError, InfeasibleError
from partita.names import short
from partita.trainers.target import PlanToWrite, Written, check_options
from partita.yaml_nodes import (
    Node,
    Table,
    parse_yaml,
    read_count,
    read_flag,
    read_table,
    read_text,
    write_yaml,
)

FILE = "accelerate.yaml"
_PREFIX = "parallelism_config_"
_PRECISIONS = {"bf16-mixed": "bf16", "bf16": "bf16", "bf16-fp32-grads": "bf16", "fp16": "fp16"}
_PRECISIONS |= {"fp8": "fp8", "fp32": "no", "tf32": "no"}


def config_of(grid: Grid, machines: int) -> dict[str, Any]:
    """Return a grid as a configuration."""
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": _PRECISIONS.get(grid.precision, "no"),
        "num_machines": machines,
        "num_processes": grid.size,
        "rdzv_backend": "static",
    }
    if grid.shard is Shard.NONE and grid.tp * grid.cp == 1:
        found["distributed_type"] = "MULTI_GPU" if grid.size > 1 else "NO"
        return found
    found["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": grid.shard is Shard.PARAMETERS,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": grid.recomputes_blocks,
    }
    shard = grid.dp if grid.shard is not Shard.NONE else 1
    if grid.shard_group:
        shard = grid.shard_group // grid.cp
    sizes = {
        "dp_replicate": grid.dp // shard,
        "dp_shard": shard,
        "tp": grid.tp,
        "cp": grid.cp,
    }
    found["parallelism_config"] = {f"{_PREFIX}{name}_size": size for name, size in sizes.items()}
    return found


def write_accelerate(plan: PlanToWrite) -> Written:
    """Return a plan as a configuration of accelerate.

    Raises:
        InfeasibleError: accelerate cannot run it.
    """
    check_options(plan, (), "accelerate")
    grid = plan.grid_for("accelerate")
    counts = [len(node.local) for node in plan.nodes]
    if len(set(counts)) > 1:
        raise InfeasibleError(
            f"nodes have {min(counts)} to {max(counts)} processes; accelerate starts as many on "
            "each: export --to torchrun"
        )
    if grid.shard_group and grid.shard_group % grid.cp:
        raise InfeasibleError(
            f"shard groups of {grid.shard_group} are no multiple of {grid.cp} context-parallel "
            "ranks"
        )
    if grid.recompute and grid.shard is Shard.NONE and grid.tp * grid.cp == 1:
        raise InfeasibleError(
            "whole blocks are recomputed; accelerate does so with sharding (FSDP) alone"
        )
    files = {FILE: plan.comment() + write_yaml(config_of(grid, len(counts)))}
    words = ["accelerate launch --config_file", FILE]
    if len(counts) > 1:
        words += ["--machine_rank $NODE_RANK --main_process_ip", plan.nodes[0].name]
        words.append("--main_process_port 29500")
    return Written(
        files=files,
        command=" ".join([*words, "train.py"]),
        left_to_you=(
            "model, data and optimizer",
            f"the batch: {grid.microbatch_size} samples a process, "
            f"gradient_accumulation_steps={grid.microbatches} in Accelerator(...)",
        ),
        remarks=()
        if grid.precision in _PRECISIONS
        else (f"precision {grid.precision!r} is yours",),
    )


def looks_like_accelerate(text: str) -> bool:
    """Return whether a text is a configuration of accelerate."""
    return "distributed_type:" in text


def read_accelerate(text: str) -> Grid:
    """Return the grid of a configuration.

    Raises:
        FormatError: It is no YAML, or a value is wrong.
    """
    root = read_table(parse_yaml(text), "the configuration of accelerate")
    entries = root.entries
    kind = _text(entries, "distributed_type", "NO").upper()
    if kind in ("DEEPSPEED", "MEGATRON_LM", "TPU", "XLA"):
        raise FormatError(
            f"distributed_type is {kind}; read its own configuration (JSON, arguments) instead",
            line=entries["distributed_type"].line,
        )
    processes = _count(entries, "num_processes", 0)
    fsdp = _section(entries, "fsdp_config")
    sizes = _section(entries, "parallelism_config")
    tp, cp = _count(sizes, f"{_PREFIX}tp_size", 1), _count(sizes, f"{_PREFIX}cp_size", 1)
    replicate = _count(sizes, f"{_PREFIX}dp_replicate_size", 1)
    shard = _count(sizes, f"{_PREFIX}dp_shard_size", 0)
    if processes and processes % (tp * cp):
        raise FormatError(f"num_processes {processes} is no multiple of tp {tp} x cp {cp}")
    dp = processes // (tp * cp)
    if shard and processes and replicate * shard != dp:
        raise FormatError(
            f"num_processes {processes} is not replicate {replicate} x shard {shard} x tp {tp} x "
            f"cp {cp}"
        )
    level = Shard.NONE
    if kind == "FSDP" and (shard != 1 or cp > 1) and dp * cp != 1:
        level = _level(fsdp)
    group = shard * cp if level is not Shard.NONE and replicate > 1 else 0
    machines = _count(entries, "num_machines", 1)
    if level is not Shard.NONE and not sizes and _is_hybrid(fsdp) and machines > 1:
        if processes % machines:
            raise FormatError(
                f"num_processes {processes} is no multiple of num_machines {machines}, each of "
                "which divides the state"
            )
        group = processes // machines
    known = {"distributed_type", "num_processes", "num_machines", "fsdp_config", "rdzv_backend"}
    known |= {"parallelism_config", "mixed_precision", "compute_environment"}
    again = fsdp.get("fsdp_activation_checkpointing")
    return Grid(
        dp=dp,
        tp=tp,
        cp=cp,
        shard=level,
        shard_group=group,
        recompute="full" if again and read_flag(again, "fsdp_activation_checkpointing") else "",
        precision={"bf16": "bf16-mixed", "fp16": "fp16", "fp8": "fp8"}.get(
            _text(entries, "mixed_precision", "no"), "fp32"
        ),
        annotations={
            **{key[:80]: _words(entries[key]) for key in entries if key not in known},
            **_offloaded(fsdp),
        },
    )


def _is_hybrid(fsdp: Mapping[str, Node]) -> bool:
    """Return whether FSDP 1 divides the state within a machine and copies it to the others."""
    strategy = _text(fsdp, "fsdp_sharding_strategy", "").upper()
    return strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5")


def _offloaded(fsdp: Mapping[str, Node]) -> dict[str, str]:
    key = "fsdp_offload_params"
    return {key: "true"} if key in fsdp and read_flag(fsdp[key], key) else {}


def _level(fsdp: Mapping[str, Node]) -> Shard:
    """Return what FSDP divides: 2 by whether it gives weights back, 1 by its strategy."""
    levels = {"FULL_SHARD": Shard.PARAMETERS, "1": Shard.PARAMETERS, "TRUE": Shard.PARAMETERS}
    levels |= {"HYBRID_SHARD": Shard.PARAMETERS, "4": Shard.PARAMETERS}
    levels |= {"SHARD_GRAD_OP": Shard.GRADIENTS, "2": Shard.GRADIENTS, "FALSE": Shard.GRADIENTS}
    levels |= {"HYBRID_SHARD_ZERO2": Shard.GRADIENTS, "5": Shard.GRADIENTS}
    levels |= {"NO_SHARD": Shard.NONE, "3": Shard.NONE}
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        if key in fsdp:
            value = read_text(fsdp[key], key)
            if value.upper() not in levels:
                raise FormatError(f"{key} {short(value)} is not known", line=fsdp[key].line)
            return levels[value.upper()]
    return Shard.PARAMETERS


def _section(entries: Mapping[str, Node], key: str) -> Mapping[str, Node]:
    if key not in entries:
        return {}
    return read_table(entries[key], key).entries


def _count(entries: Mapping[str, Node], key: str, usual: int) -> int:
    return read_count(entries[key], key, low=1, high=10**6) if key in entries else usual


def _text(entries: Mapping[str, Node], key: str, usual: str) -> str:
    return read_text(entries[key], key) if key in entries else usual


def _words(node: Node) -> str:
    return "..." if isinstance(node, Table) else str(getattr(node, "text", "..."))[:200]
