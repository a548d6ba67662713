"""Kubernetes: a JobSet (with labels of Kueue) for mixed nodes, a Kubeflow TrainJob for equal ones.

A run of equal nodes is one replicated job, which Kueue admits with a flavor of its own. A pod's
rank among the nodes is the offset of its job plus its completion index.
"""

import re
from typing import Any

from partita.errors import InfeasibleError, InvalidInputError
from partita.trainers.starts.ordered import by_host, equal_runs
from partita.trainers.starts.torchrun import launch_line, node_remarks
from partita.trainers.target import Node, PlanToWrite, Written, check_options
from partita.yaml_nodes import write_yaml

JOBSET, TRAINJOB = "jobset.yaml", "trainjob.yaml"
OPTIONS = ("image", "queue", "topology", "port", "product", "namespace")
MOST_PODSETS = 18
"""Replicated jobs that Kueue admits together; 8 before its release 0.15."""
_LABEL = 63
PRODUCTS = {"a100": "NVIDIA-A100-SXM4-80GB", "h100": "NVIDIA-H100-80GB-HBM3"}
"""Labels ``nvidia.com/gpu.product`` of types whose label is known; others keep their name."""


def write_jobset(plan: PlanToWrite) -> Written:
    """Return a JobSet.

    Raises:
        InfeasibleError: It has more runs of nodes than Kueue admits.
        InvalidInputError: An option is not known.
    """
    check_options(plan, OPTIONS, "jobset")
    plan = by_host(plan)
    runs = equal_runs(plan.nodes)
    if len(runs) > MOST_PODSETS:
        raise InfeasibleError(
            f"{len(runs)} runs of equal nodes; Kueue admits {MOST_PODSETS} pod sets together"
        )
    name = plan.name[:40].strip("-")
    jobs = _job_names(runs)
    first = f"{name}-{jobs[0]}-0-0.{name}"
    if len(first) > _LABEL:
        raise InvalidInputError(f"host name {first!r} is longer than {_LABEL} characters")
    offset, replicated = 0, []
    for job, run in zip(jobs, runs, strict=True):
        template = _pod(plan, run[0], offset, first)
        spec = {"parallelism": len(run), "completions": len(run), "completionMode": "Indexed"}
        replicated.append(
            {"name": job, "template": {"spec": {**spec, "backoffLimit": 0, "template": template}}}
        )
        offset += len(run)
    metadata: dict[str, Any] = {"name": name}
    if "namespace" in plan.options:
        metadata["namespace"] = plan.options["namespace"]
    if "queue" in plan.options:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": plan.options["queue"]}
    body = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "coordinator": {"replicatedJob": jobs[0], "jobIndex": 0, "podIndex": 0},
            "replicatedJobs": replicated,
        },
    }
    left = [] if "queue" in plan.options else ["the queue of Kueue: -O queue=NAME"]
    return Written(
        files={JOBSET: plan.comment() + write_yaml(body)},
        command=f"kubectl create -f {JOBSET}",
        left_to_you=(*left, *_image_left(plan)),
        remarks=node_remarks(plan.nodes),
    )


def write_trainjob(plan: PlanToWrite) -> Written:
    """Return a TrainJob of Kubeflow.

    Raises:
        InfeasibleError: Nodes differ.
    """
    check_options(plan, ("image", "port", "runtime", "namespace"), "trainjob")
    plan = by_host(plan)
    runs = equal_runs(plan.nodes)
    if len(runs) > 1:
        raise InfeasibleError(
            f"nodes of {len(runs)} kinds follow one another; a TrainJob has one: export --to jobset"
        )
    node = plan.nodes[0]
    count = len(node.local)
    resources = {"limits": {"nvidia.com/gpu": str(count)}} if node.is_gpu else {}
    metadata: dict[str, Any] = {"name": plan.name}
    if "namespace" in plan.options:
        metadata["namespace"] = plan.options["namespace"]
    words = list(plan.command)
    is_python = bool(words) and (words[0].endswith(".py") or words[0] == "-m")
    command = ["torchrun", *([] if is_python else ["--no-python"]), *words]
    if not words:
        command = [
            "bash",
            "-c",
            "NNODES=$PET_NNODES NODE_RANK=$PET_NODE_RANK exec partita run plan.json",
        ]
    trainer: dict[str, Any] = {
        "numNodes": len(plan.nodes),
        "numProcPerNode": count,
        "image": plan.option("image", "IMAGE"),
        "command": command,
    }
    if resources:
        trainer["resourcesPerNode"] = resources
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": plan.option("runtime", "torch-distributed")},
            "trainer": trainer,
        },
    }
    return Written(
        files={TRAINJOB: plan.comment() + write_yaml(body)},
        command=f"kubectl create -f {TRAINJOB}",
        left_to_you=_image_left(plan),
        remarks=node_remarks(plan.nodes),
    )


def _image_left(plan: PlanToWrite) -> tuple[str, ...]:
    left = [] if "image" in plan.options else ["the image: -O image=NAME"]
    return (*left, *([] if plan.command else ["plan.json in the image or on a volume"]))


def _job_names(runs: list[list[Node]]) -> list[str]:
    names: list[str] = []
    for run in runs:
        kept = re.sub("[^a-z0-9]+", "-", run[0].type.lower()).strip("-")[:12] or "nodes"
        kept = kept if kept[0].isalpha() else f"n{kept}"
        names.append(kept if kept not in names else f"{kept}-{len(names)}")
    return names


def _pod(plan: PlanToWrite, node: Node, offset: int, first: str) -> dict[str, Any]:
    count = len(node.local)
    script = (
        f"export MASTER_ADDR={first} MASTER_PORT={plan.option('port', '29500')}\n"
        + launch_line(plan, rank="$((NODE_OFFSET + JOB_COMPLETION_INDEX))", each=str(count))
    )
    container: dict[str, Any] = {
        "name": "node",
        "image": plan.option("image", "IMAGE"),
        "command": ["bash", "-c", script],
        "env": [{"name": "NODE_OFFSET", "value": str(offset)}],
    }
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if node.is_gpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(count)}}
        label = plan.option("product") or PRODUCTS.get(node.type, node.type)
        if label not in ("", "gpu"):
            spec["nodeSelector"] = {"nvidia.com/gpu.product": label}
    template: dict[str, Any] = {"spec": spec}
    if "topology" in plan.options:
        template["metadata"] = {
            "annotations": {"kueue.x-k8s.io/podset-preferred-topology": plan.options["topology"]}
        }
    return template
