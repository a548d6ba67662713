"""DeepSpeed: its JSON, a pipeline module with the plan's cut, and a hostfile; the JSON is read.

No key of the JSON holds a cut (``pipeline.stages`` is read by nobody), so a plan with stages comes
with a subclass of ``PipelineModule``. The batch is ``micro x accumulation x data-parallel ranks``,
which DeepSpeed asserts.
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from partita.core.codec import parse_json
from partita.core.grid import Grid
from partita.core.plan import Shard
from partita.errors import FormatError, InfeasibleError
from partita.names import short
from partita.trainers.target import PlanToWrite, Written, check_options

FILE, MODULE, HOSTS = "ds_config.json", "planned_pipeline.py", "hostfile"
MAX_TEXT = 1_000_000
LEVELS = list(Shard)
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "bf16-fp32-grads": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {},
}
_KNOWN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "tensor_parallel", "bf16", "bfloat16", "fp16", "_partita"),
    *("communication_data_type", "activation_checkpointing"),
)
_COSTLY = (
    *("offload_param", "cpu_offload_params", "zero_quantized_weights", "zero_quantized_gradients"),
    "zenflow",
)
"""Settings of ZeRO that are not modelled."""


def config_of(grid: Grid) -> dict[str, Any]:
    """Return a grid as a configuration."""
    zero: dict[str, Any] = {"stage": LEVELS.index(grid.shard)}
    if grid.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": grid.offload_optimizer}
    if grid.shard is Shard.PARAMETERS and grid.shard_group:
        zero["zero_hpz_partition_size"] = grid.shard_group
    found: dict[str, Any] = {
        "train_batch_size": grid.batch_size,
        "train_micro_batch_size_per_gpu": grid.microbatch_size,
        "gradient_accumulation_steps": grid.microbatches,
        "zero_optimization": zero,
        **_PRECISIONS.get(grid.precision, {}),
    }
    if grid.tp > 1:
        found["tensor_parallel"] = {"autotp_size": grid.tp}
    return found


def write_deepspeed(plan: PlanToWrite) -> Written:
    """Return a plan as files of DeepSpeed.

    Raises:
        InfeasibleError: DeepSpeed cannot run it.
    """
    check_options(plan, (), "deepspeed")
    grid = plan.grid_for("deepspeed")
    _check(grid)
    header = {"_partita": plan.header}
    files = {FILE: json.dumps({**header, **config_of(grid)}, indent=2) + "\n"}
    files[HOSTS] = "".join(f"{node.name} slots={len(node.local)}\n" for node in plan.nodes)
    left = ["model, data and optimizer"]
    remarks = [f"ZeRO stage {LEVELS.index(grid.shard)}, data-parallel degree {grid.dp}"]
    if grid.pp > 1:
        files[MODULE] = _module(plan, grid)
        left.append(f"your layers, as PlannedPipeline(layers=[...]) of {MODULE}")
        remarks.append("the cut is set through a private method: try it with each release")
    if grid.recompute:
        left.append("deepspeed.checkpointing around each block, as the plan recomputes all")
    if grid.precision not in _PRECISIONS:
        left.append(f"precision {grid.precision or 'of the model'}")
    return Written(
        files=files,
        command=f"deepspeed --hostfile {HOSTS} train.py --deepspeed_config {FILE}",
        left_to_you=tuple(left),
        remarks=tuple(remarks),
    )


def _check(grid: Grid) -> None:
    """Refuse what the JSON cannot say."""
    if grid.pp > 1 and grid.tp > 1:
        raise InfeasibleError(
            f"{grid.tp} ranks divide tensors in a pipeline; DeepSpeed has automatic tensor "
            "parallelism without stages alone: export --to megatron"
        )
    for degree, what in ((grid.cp, "the sequence"), (grid.ep, "the experts")):
        if degree > 1:
            raise InfeasibleError(
                f"{degree} ranks divide {what}; DeepSpeed is told so in the model's code, not in "
                "its configuration"
            )
    if grid.recompute not in ("", "full"):
        raise InfeasibleError(f"DeepSpeed recomputes whole blocks, the plan {grid.recompute}")
    if grid.shard_group and grid.shard is not Shard.PARAMETERS:
        raise InfeasibleError(
            f"shard groups of {grid.shard_group}; DeepSpeed has groups for ZeRO-3 alone"
        )


def bounds_of(grid: Grid) -> list[int]:
    """Return where each stage begins among embedding, blocks and head, and the end."""
    ends = list(accumulate(grid.cuts))
    return [0, *(end + 1 for end in ends[:-1]), ends[-1] + 2]


def _module(plan: PlanToWrite, grid: Grid) -> str:
    return (
        f"{plan.comment()}"
        '"""A pipeline of DeepSpeed with the cut of the plan."""\n\n'
        "from deepspeed.pipe import PipelineModule\n\n"
        f"STAGES = {grid.pp}\n"
        f"BOUNDS = {bounds_of(grid)}\n"
        '"""First layer of each stage: the embedding is 0, the head the last."""\n\n\n'
        "class PlannedPipeline(PipelineModule):\n"
        '    """The layers (embedding, blocks, head) cut as planned."""\n\n'
        "    def __init__(self, layers, **options):\n"
        "        if len(layers) != BOUNDS[-1]:\n"
        '            raise ValueError(f"the plan has {BOUNDS[-1]} layers, got {len(layers)}")\n'
        "        super().__init__(layers=layers, num_stages=STAGES, **options)\n\n"
        '    def _partition_layers(self, method="uniform"):\n'
        "        stage = self._topo.get_coord(self.global_rank).pipe\n"
        "        self.parts = list(BOUNDS)\n"
        "        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])\n"
    )


def looks_like_deepspeed(found: object) -> bool:
    """Return whether a JSON value is a configuration of DeepSpeed."""
    words = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    return isinstance(found, Mapping) and any(word in found for word in words)


def read_deepspeed(text: str) -> Grid:
    """Return the grid of a configuration; ``"auto"`` = not said.

    Raises:
        FormatError: It is no JSON, or a value is wrong.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a JSON of {len(text)} characters; expected {MAX_TEXT} at most")
    found = parse_json(text)
    if not isinstance(found, Mapping):
        raise FormatError(f"expected a JSON object, got {short(found)}")
    zero = _section(found, "zero_optimization")
    stage = _count(zero, "stage", 0, least=0)
    if stage > 3:
        raise FormatError(f"zero_optimization.stage is {stage}; expected 0 to 3")
    tensor = _section(found, "tensor_parallel")
    size = _count(found, "train_micro_batch_size_per_gpu", 0)
    batch = _count(found, "train_batch_size", 0)
    steps = _count(found, "gradient_accumulation_steps", 0)
    each = size * (steps or 1)
    if batch and size and steps and batch % each:
        raise FormatError(
            f"train_batch_size {batch} is no multiple of micro-batch {size} x accumulation {steps}"
        )
    offload = zero.get("offload_optimizer")
    away = isinstance(offload, Mapping) and offload.get("device") not in (None, "none")
    ratio = _ratio(offload) if away else float(zero.get("cpu_offload") is True)
    group = max(_count(zero, name, 1) for name in ("zero_hpz_partition_size", "mics_shard_size"))
    return Grid(
        dp=batch // each if batch and size and steps else 0,
        tp=_count(tensor, "autotp_size", 1),
        shard=LEVELS[stage],
        shard_group=group if group > 1 and stage == 3 else 0,
        offload_optimizer=ratio,
        batch_size=batch,
        microbatch_size=size,
        precision=_precision(found),
        annotations=_rest(found, zero),
    )


def _rest(found: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, str]:
    """Return what is not modelled and changes time or memory."""
    rest = {str(key)[:80]: short(value) for key, value in found.items() if key not in _KNOWN}
    for key in _COSTLY:
        value = zero.get(key)
        is_away = not isinstance(value, Mapping) or value.get("device") not in (None, "none")
        if value not in (None, False) and is_away:
            rest[f"zero_optimization.{key}"] = short(value)
    again = found.get("activation_checkpointing")
    if isinstance(again, Mapping) and any(value is True for value in again.values()):
        rest["activation_checkpointing"] = short(again)
    return rest


def _section(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key, {})
    if value in (None, "auto"):
        return {}
    if not isinstance(value, Mapping):
        raise FormatError(f"{key} is {short(value)}; expected an object")
    return value


def _count(found: Mapping[str, Any], key: str, usual: int, *, least: int = 1) -> int:
    value = found.get(key, usual)
    if value in (None, "auto"):
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**6:
        if value == usual:
            return usual
        raise FormatError(f"{key} is {short(value)}; expected a number from {least}, or auto")
    return value


def _ratio(offload: Any) -> float:  # noqa: ANN401 (an object of a file)
    ratio = offload.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise FormatError(f"offload_optimizer.ratio is {short(ratio)}; expected 0 to 1")
    return float(ratio)


def _precision(found: Mapping[str, Any]) -> str:
    enabled = [
        name
        for name in ("bf16", "bfloat16", "fp16")
        if _section(found, name).get("enabled") in (True, "auto")
    ]
    if not enabled:
        return "fp32"
    if enabled[0] == "fp16":
        return "fp16"
    low = found.get("communication_data_type") in ("bf16", "bfp16")
    return "bf16" if low else "bf16-fp32-grads"
