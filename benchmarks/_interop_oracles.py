# ruff: noqa: SLF001 (oracles are what packages keep private, too)
"""Runs inside an oracle's environment: lets the real package read files, and prints its values.

``python _interop_oracles.py ORACLE < cases.json``: a case names a folder with what was written. The
answer is a list with ``{"values": ...}`` or ``{"refused": ...}`` for each, on the last line.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]


def read_schedule(case: Case) -> dict[str, Any]:
    """Return what torch makes of a schedule: actions of each rank, and whether it can be played."""
    from torch.distributed.pipelining import schedules  # noqa: PLC0415

    text = next(Path(case["folder"]).glob("*.csv")).read_text()
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
        for rank, row in enumerate(text.splitlines())
    }
    pp, stages, batches = case["pp"], case["stages"], case["microbatches"]
    rank_of = schedules._validate_schedule(actions, pp, stages, batches)
    orders = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
    said = [[str(action) for action in orders[rank]] for rank in range(pp)]
    whole = schedules._add_send_recv(orders, lambda stage: rank_of[stage], stages)
    schedules._simulate_comms_compute(whole, lambda stage: rank_of[stage], stages)
    return {
        "actions": said,
        "rank_of": [rank_of[stage] for stage in range(stages)],
    }


def read_megatron(case: Case) -> dict[str, Any]:
    """Return what Megatron-Core makes of the arguments."""
    import torch  # noqa: PLC0415
    from megatron.core.transformer.enums import LayerType  # noqa: PLC0415
    from megatron.core.transformer.pipeline_parallel_layer_layout import (  # noqa: PLC0415
        PipelineParallelLayerLayout,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    flags = case["flags"]
    pp, layers = int(flags["--pipeline-model-parallel-size"]), int(flags["--num-layers"])
    text = flags.get("--pipeline-model-parallel-layout")
    blocks: list[int] = [layers]
    layout = None
    if text is not None:
        layout = PipelineParallelLayerLayout(text, pp)
        layout.validate_layer_layout(layers, None)
        chunks = len(layout.layout[0])
        held = [layout.layout[stage % pp][stage // pp] for stage in range(pp * chunks)]
        blocks = [sum(kind is LayerType.decoder for kind in stage) for stage in held]
    again = flags.get("--recompute-num-layers")
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=8,
        tensor_model_parallel_size=int(flags["--tensor-model-parallel-size"]),
        pipeline_model_parallel_size=pp,
        pipeline_model_parallel_layout=layout,
        virtual_pipeline_model_parallel_size=len(blocks) // pp if len(blocks) > pp else None,
        pipeline_dtype=torch.bfloat16,
        sequence_parallel="--sequence-parallel" in flags,
        recompute_granularity=flags.get("--recompute-granularity"),
        recompute_method=flags.get("--recompute-method"),
        recompute_num_layers=None if again is None else int(again),
    )
    return {
        "blocks": blocks,
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "recompute": config.recompute_granularity or "",
        "layers": config.num_layers,
    }


def _titan_values(config: Any) -> dict[str, Any]:
    p, t = config.parallelism, config.training
    return {
        "pp": p.pipeline_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "replicate": p.data_parallel_replicate_degree,
        "shard": p.data_parallel_shard_degree,
        "reshard": p.fsdp_reshard_after_forward,
        "schedule": p.pipeline_parallel_schedule if p.pipeline_parallel_degree > 1 else "",
        "parts": p.module_fqns_per_model_part,
        "local": t.local_batch_size,
        "global": t.global_batch_size,
    }


def read_titan(case: Case) -> dict[str, Any]:
    """Return what torchtitan 0.3 makes of the function."""
    import importlib  # noqa: PLC0415

    from torchtitan.config.manager import ConfigManager  # noqa: PLC0415

    file = next(Path(case["folder"]).glob("*_titan.py"))
    sys.path.insert(0, str(file.parent))
    sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()
    try:
        found = ConfigManager().parse_args(["--module", file.stem, "--config", "planned"])
    finally:
        sys.path.pop(0)
    kind = type(found.activation_checkpoint).__qualname__
    recompute = {"NoneType": "", "FullAC.Config": "full", "SelectiveAC.Config": "products"}
    return _titan_values(found) | {"recompute": recompute[kind]}


def read_titan_toml(case: Case) -> dict[str, Any]:
    """Return what torchtitan 0.2 makes of the TOML."""
    from torchtitan.config.manager import ConfigManager  # noqa: PLC0415

    file = next(Path(case["folder"]).glob("*_titan.toml"))
    found = ConfigManager().parse_args(["--job.config_file", str(file)])
    mode = found.activation_checkpoint.mode
    return _titan_values(found) | {
        "recompute": {"none": "", "selective": "products"}.get(mode, mode)
    }


def read_accelerate(case: Case) -> dict[str, Any]:
    """Return what accelerate puts into the environment of its processes."""
    from accelerate.commands import launch  # noqa: PLC0415
    from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: PLC0415

    file = str(Path(case["folder"]) / "accelerate.yaml")
    args = launch.launch_command_parser().parse_args(["--config_file", file, "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    found = prepare_multi_gpu_env(args)
    mesh = {
        name: int(found.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP")
    }
    return {
        "processes": int(args.num_processes),
        "fsdp": bool(args.use_fsdp),
        "reshard": found.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() if args.use_fsdp else "",
        "mesh": list(mesh.values()) if args.use_fsdp else [],
        "recompute": found.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true",
    }


def read_device_map(case: Case) -> dict[str, Any]:
    """Return the device of each parameter of a model with the names of the graph."""
    import torch  # noqa: PLC0415
    from accelerate.utils import check_device_map  # noqa: PLC0415

    model = torch.nn.Module()
    for name in case["parameters"]:
        *path, leaf = name.split(".")
        at = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(leaf, torch.nn.Parameter(torch.empty(1, device="meta")))
    found = json.loads((Path(case["folder"]) / "device_map.json").read_text())
    check_device_map(model, found)
    return {"devices": sorted(set(found.values())), "modules": len(found)}


def read_deepspeed(case: Case) -> dict[str, Any]:
    """Return what DeepSpeed makes of its JSON, its hostfile and the pipeline's cut."""
    import deepspeed.comm as dist  # noqa: PLC0415
    from deepspeed.launcher.runner import _parse_hostfile  # noqa: PLC0415
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415

    folder = Path(case["folder"])
    dist.get_rank = lambda *_, **__: 0

    class Mesh:
        def get_data_parallel_world_size(self) -> int:
            return int(case["dp"])

    found = DeepSpeedConfig(json.loads((folder / "ds_config.json").read_text()), mpu=Mesh())
    hosts = _parse_hostfile((folder / "hostfile").read_text().splitlines())
    values = {
        "batch": found.train_batch_size,
        "micro": found.train_micro_batch_size_per_gpu,
        "steps": found.gradient_accumulation_steps,
        "zero": found.zero_optimization_stage,
        "slots": list(hosts.values()),
        "bounds": [],
    }
    module = folder / "planned_pipeline.py"
    if module.exists():
        space: dict[str, Any] = {}
        exec(compile(module.read_text(), str(module), "exec"), space)
        values["bounds"] = _bounds(space["PlannedPipeline"], space["STAGES"])
    return values


def _bounds(kind: Any, stages: int) -> list[list[int]]:
    """Return the layers of each stage that the written module sets through DeepSpeed's method."""
    bounds = []
    for stage in range(stages):
        one = object.__new__(kind)
        place = type("Place", (), {"pipe": stage})()
        object.__setattr__(one, "global_rank", 0)
        topology = type("Topology", (), {"get_coord": lambda _, rank, place=place: place})()
        object.__setattr__(one, "_topo", topology)
        one.__dict__["_modules"] = {}
        one._partition_layers()
        bounds.append([one._local_start, one._local_stop])
    return bounds


def read_kubernetes(case: Case) -> dict[str, Any]:
    """Return a manifest as the models of Kubeflow hold it, its pods checked by a schema."""
    import kubernetes_validate  # noqa: PLC0415
    import yaml  # noqa: PLC0415
    from kubeflow_trainer_api import models  # noqa: PLC0415

    file = next(Path(case["folder"]).glob("*.yaml"))
    found = yaml.safe_load(file.read_text())
    names = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
    kept = getattr(models, names[found["kind"]]).from_dict(found).to_dict()
    if kept != found:
        raise ValueError(f"the model of {found['kind']} does not hold all keys")
    spec = found["spec"]
    if found["kind"] == "TrainJob":
        trainer = spec["trainer"]
        return {"nodes": [trainer["numNodes"]], "each": [trainer["numProcPerNode"]]}
    for job in spec["replicatedJobs"]:
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        kubernetes_validate.validate({**body, **job["template"]}, "1.34", strict=True)
    jobs = [job["template"]["spec"] for job in spec["replicatedJobs"]]
    pods = [job["template"]["spec"]["containers"][0] for job in jobs]
    return {
        "nodes": [job["parallelism"] for job in jobs],
        "each": [int(pod["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods],
    }


def read_sky(case: Case) -> dict[str, Any]:
    """Return what SkyPilot makes of a task."""
    import sky  # noqa: PLC0415

    task = sky.Task.from_yaml(str(Path(case["folder"]) / "sky.yaml"))
    (resources,) = task.resources
    return {"nodes": [task.num_nodes], "each": list(resources.accelerators.values())}


def read_fsdp(case: Case) -> dict[str, Any]:
    """Return how torch divides a model of the plan's modules, among ranks that only exist here."""
    import runpy  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    code = next(Path(case["folder"]).glob("*_parallel.py"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["ranks"])
    try:
        names = runpy.run_path(str(code))
        model = nn.Module()
        for name in case["parameters"]:
            *modules, last = name.split(".")
            at = model
            for part in modules:
                if part not in at._modules:
                    at.register_module(part, nn.Module())
                at = at._modules[part]
            at.register_parameter(last, nn.Parameter(torch.zeros(16)))
        blocks = names["BLOCKS"]
        names["parallelize"](model, device_type="cpu")
        units = [
            name.replace("_checkpoint_wrapped_module.", "").removesuffix(
                "._checkpoint_wrapped_module"
            )
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
        ]
        parameters = list(model.parameters())
        mesh = parameters[0].device_mesh if isinstance(parameters[0], DTensor) else None
        if units and sorted(units) != sorted(["", *blocks]):
            raise ValueError(f"units are {units[:3]}, blocks {blocks[:3]}")
        policies = {
            module._get_fsdp_state()._fsdp_param_group._reshard_after_forward
            for module in model.modules()
            if isinstance(module, FSDPModule) and module is not model
        }
        return {
            "units": len(units),
            "mesh": [] if mesh is None else list(mesh.shape),
            "divided": all(isinstance(p, DTensor) for p in parameters),
            "reshard": sorted(policies),
            "recompute": sum(
                "_checkpoint_wrapped_module" in module._modules for module in model.modules()
            ),
        }
    finally:
        dist.destroy_process_group()


ORACLES: Mapping[str, Callable[[Case], dict[str, Any]]] = {
    "schedule-csv": read_schedule,
    "megatron": read_megatron,
    "torchtitan": read_titan,
    "torchtitan-toml": read_titan_toml,
    "accelerate": read_accelerate,
    "device-map": read_device_map,
    "fsdp": read_fsdp,
    "deepspeed": read_deepspeed,
    "jobset": read_kubernetes,
    "trainjob": read_kubernetes,
    "skypilot": read_sky,
}


def main() -> None:
    """Answer for all cases."""
    logging.disable(logging.CRITICAL)
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append({"values": ORACLES[sys.argv[1]](case)})
        except (Exception, SystemExit) as exc:  # noqa: BLE001 (whatever a package says no with)
            answers.append({"refused": f"{type(exc).__name__}: {exc}"[:300]})
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
