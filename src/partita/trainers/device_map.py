"""``device_map`` of Hugging Face: modules by device, for one process on one host.

Every parameter and buffer of the model must be covered by exactly one key, tied ones must share a
device, and a block is never cut. Devices are numbers, as the first of several is chosen by an order
that texts do not have.
"""

import json
from collections.abc import Mapping

from partita.core.codec import parse_json
from partita.core.grid import block_chain
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import FormatError, InfeasibleError
from partita.names import short
from partita.trainers.target import PlanToWrite, Written, check_options

FILE, MODULE = "device_map.json", "load_model.py"
MAX_TEXT = 2_000_000


def write_device_map(plan: PlanToWrite) -> Written:
    """Return a plan as a map from modules to numbers of devices.

    Raises:
        InfeasibleError: It has replicas, groups or several hosts, cuts a block, or divides tied
            weights.
    """
    check_options(plan, (), "device-map")
    found = map_of(plan.problem, plan.plan)
    found = {plan.renamed(name): device for name, device in found.items()}
    loader = (
        f"{plan.comment()}"
        '"""The model on the devices of the plan."""\n\n'
        "import json\nfrom pathlib import Path\n\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'DEVICE_MAP = json.loads(Path(__file__).with_name("{FILE}").read_text())\n\n\n'
        "def load(name, **options):\n"
        '    """Return a model of the hub or of a directory on its devices."""\n'
        "    return AutoModelForCausalLM.from_pretrained(name, device_map=DEVICE_MAP, **options)\n"
    )
    return Written(
        files={FILE: json.dumps(found, indent=2) + "\n", MODULE: loader},
        command="python -c 'from load_model import load; load(\"MODEL\")'",
        left_to_you=("the name of the model",),
        remarks=("devices take turns: one process, no microbatches, as accelerate runs it",),
    )


def map_of(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the number of the device of each module that holds parameters.

    A module is as large as it can be: a block, or a module outside of the blocks.

    Raises:
        InfeasibleError: The plan is no such map.
    """
    graph, cluster = problem.graph, problem.cluster
    for number, stage in enumerate(plan.stages):
        if len(stage) > 1:
            what = f"{stage.num_replicas} replicas" if stage.num_replicas > 1 else f"tp {stage.tp}"
            raise InfeasibleError(
                f"stage {number} has {what}; a device map has one process and one device per module"
            )
    hosts = {cluster.devices[cluster.index_of[name]].host for name in plan.devices}
    if len(hosts) > 1:
        raise InfeasibleError(
            f"the plan uses {len(hosts)} hosts; a device map is for one process on one host"
        )
    mine = [d for d, device in enumerate(cluster.devices) if device.host in hosts]
    number_of = {cluster.device_names[d]: number for number, d in enumerate(mine)}
    uses = graph.parameters
    if not len(uses):
        raise InfeasibleError(f"graph {graph.name!r} names no parameters")
    _check_blocks(problem, plan)
    modules = _modules(problem)
    device_at: dict[str, int] = {}
    device_of: dict[int, int] = {}
    names = graph.parameters.names
    for op, parameter in zip(uses.use_op.tolist(), uses.use_parameter.tolist(), strict=True):
        device = number_of[plan.devices[int(plan.device_of[op])]]
        if device_of.setdefault(parameter, device) != device:
            raise InfeasibleError(
                f"{names[parameter]} is used on devices {device_of[parameter]} and {device}; a "
                "device map has tied weights on one: move what uses it, such as with --pin"
            )
        module = modules[parameter]
        if device_at.setdefault(module, device) != device:
            raise InfeasibleError(
                f"module {module} is cut over devices {device_at[module]} and {device}; plan with "
                "--granularity block"
            )
    return device_at


def _check_blocks(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that cuts a block, also between ops without parameters."""
    graph = problem.graph
    if not len(graph.ops.blocks.of):
        return
    device_at: dict[int, int] = {}
    for op, block in enumerate(graph.ops.blocks.of.tolist()):
        device = int(plan.device_of[op])
        if block >= 0 and device_at.setdefault(block, device) != device:
            raise InfeasibleError(
                f"block {graph.ops.blocks.names[block]} is cut (op {graph.ops.names[op]}); plan "
                "with --granularity block"
            )


def _modules(problem: Problem) -> list[str]:
    """Return the module of each parameter: its block, else what is before the last dot."""
    graph = problem.graph
    try:
        blocks: tuple[str, ...] = block_chain(graph).names
    except InfeasibleError:
        blocks = ()
    found = []
    for name in graph.parameters.names:
        whole = [block for block in blocks if name.startswith(f"{block}.") or name == block]
        found.append(whole[0] if whole else name.rpartition(".")[0] or name)
    return found


def read_device_map(text: str) -> dict[str, str]:
    """Return the device of each module as a text: a number, ``cpu`` or ``disk``.

    Raises:
        FormatError: It is no JSON object of modules and devices.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a JSON of {len(text)} characters; expected {MAX_TEXT} at most")
    found = parse_json(text)
    if not isinstance(found, Mapping) or not found:
        raise FormatError(f"expected a JSON object of modules and devices, got {short(found)}")
    devices: dict[str, str] = {}
    for name, device in found.items():
        text = str(device).removeprefix("cuda:") if isinstance(device, str | int) else ""
        if isinstance(device, bool) or not (text in ("cpu", "disk") or text.isdigit()):
            raise FormatError(
                f"{short(name)} is on {short(device)}; expected a number, cuda:N, cpu or disk"
            )
        devices[str(name)] = text
    return devices


def looks_like_device_map(found: object) -> bool:
    """Return whether a JSON value is a device map."""
    return (
        isinstance(found, Mapping)
        and bool(found)
        and all(
            isinstance(value, int | str) and not isinstance(value, bool) for value in found.values()
        )
        and any(str(value).removeprefix("cuda:").isdigit() for value in found.values())
        and "format" not in found
    )


def assignment_of(problem: Problem, devices: Mapping[str, str]) -> dict[str, str]:
    """Return a device map as the assignment of the planner ``manual``.

    Raises:
        InfeasibleError: It offloads to disk, or names a device that is not there.
    """
    cluster = problem.cluster
    first = cluster.devices[0].host
    mine = [device.name for device in cluster.devices if device.host == first]
    found = {}
    for module, device in devices.items():
        if not device.isdigit():
            raise InfeasibleError(f"{short(module)} is on {device}; plans have accelerators alone")
        if int(device) >= len(mine):
            raise InfeasibleError(
                f"{short(module)} is on device {device}; the first host has {len(mine)}"
            )
        found[module] = mine[int(device)]
    return found
