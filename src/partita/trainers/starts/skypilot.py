"""SkyPilot: a task for nodes of one shape. A list of accelerators means one of them, not all."""

from partita.errors import InfeasibleError
from partita.trainers.starts.ordered import by_host, equal_runs
from partita.trainers.starts.torchrun import launch_line, node_remarks
from partita.trainers.target import PlanToWrite, Written, check_options
from partita.yaml_nodes import write_yaml

FILE = "sky.yaml"
OPTIONS = ("accelerator", "infra", "port")
ACCELERATORS = {"a100": "A100-80GB", "h100": "H100", "h200": "H200", "v100": "V100", "t4": "T4"}
ACCELERATORS |= {"l4": "L4", "a10g": "A10G", "b200": "B200", "l40s": "L40S"}
"""Names that SkyPilot has for types; others are its own to be named with ``-O accelerator=``."""


def write_skypilot(plan: PlanToWrite) -> Written:
    """Return a task.

    Raises:
        InfeasibleError: Nodes differ, or are no accelerators.
    """
    check_options(plan, OPTIONS, "skypilot")
    plan = by_host(plan)
    runs = equal_runs(plan.nodes)
    node = plan.nodes[0]
    if len(runs) > 1:
        raise InfeasibleError(
            f"nodes of {len(runs)} kinds follow one another; a task of SkyPilot has one: export "
            "--to jobset"
        )
    kind = plan.option("accelerator") or ACCELERATORS.get(node.type, node.type.upper())
    resources: dict[str, object] = {}
    if node.is_gpu:
        resources["accelerators"] = f"{kind}:{len(node.local)}"
    if "infra" in plan.options:
        resources["infra"] = plan.options["infra"]
    run = (
        'export MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")\n'
        f"export MASTER_PORT={plan.option('port', '29500')}\n"
        + launch_line(plan, rank="$SKYPILOT_NODE_RANK", each=str(len(node.local)))
        + "\n"
    )
    body: dict[str, object] = {"name": plan.name, "num_nodes": len(plan.nodes)}
    if resources:
        body["resources"] = resources
    body["run"] = run
    return Written(
        files={FILE: plan.comment() + write_yaml(body)},
        command=f"sky launch {FILE}",
        left_to_you=("workdir, file_mounts and setup of your environment",),
        remarks=node_remarks(plan.nodes),
    )
