"""The targets of ``partita export`` that write other people's files: a row and a file each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from partita.errors import PartitaError
from partita.plugins import PluginGroup, guarded, load_target
from partita.trainers.target import PlanToWrite, Written

PLUGINS = PluginGroup(group="partita.targets", noun="target")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of files.

    Attributes:
        write: Where its writer is, ``"module:function"``.
        summary: What is written, in a few words.
    """

    write: str
    summary: str


TARGETS: Mapping[str, Target] = {
    "megatron": Target("partita.trainers.megatron:write_megatron", "arguments of Megatron-LM"),
    "torchtitan": Target(
        "partita.trainers.torchtitan:write_torchtitan", "a configuration of torchtitan"
    ),
    "deepspeed": Target(
        "partita.trainers.deepspeed:write_deepspeed", "JSON, pipeline and hostfile of DeepSpeed"
    ),
    "accelerate": Target(
        "partita.trainers.accelerate:write_accelerate", "YAML of accelerate launch"
    ),
    "schedule-csv": Target(
        "partita.trainers.schedule_csv:write_schedule_csv",
        "the order of torch.distributed.pipelining",
    ),
    "fsdp": Target("partita.trainers.fsdp:write_fsdp", "fully_shard and DTensor in Python"),
    "device-map": Target(
        "partita.trainers.device_map:write_device_map", "device_map of Hugging Face"
    ),
    "torchrun": Target("partita.trainers.starts.torchrun:write_torchrun", "a script per node"),
    "sbatch": Target("partita.trainers.starts.sbatch:write_sbatch", "a batch script of Slurm"),
    "ray": Target("partita.trainers.starts.ray:write_ray", "a driver for Ray"),
    "jobset": Target(
        "partita.trainers.starts.jobset:write_jobset", "a JobSet of Kubernetes, for Kueue"
    ),
    "trainjob": Target("partita.trainers.starts.jobset:write_trainjob", "a TrainJob of Kubeflow"),
    "skypilot": Target("partita.trainers.starts.skypilot:write_skypilot", "a task of SkyPilot"),
}


def writer(name: str) -> Callable[[PlanToWrite], Written]:
    """Return the writer of a target, of the table or of a plug-in.

    Raises:
        InvalidInputError: There is no such target.
    """
    if name in TARGETS:
        found: Callable[[PlanToWrite], Written] = load_target(TARGETS[name].write)
        return found
    plugged = PLUGINS.find(name)
    if plugged is None:
        raise PLUGINS.unknown(name, TARGETS)
    return guarded("target", name, plugged, returns=Written)


def why_not(name: str, plan: PlanToWrite) -> str:
    """Return why a target cannot hold a plan; empty where it can."""
    try:
        writer(name)(plan)
    except PartitaError as exc:
        return str(exc)
    return ""
