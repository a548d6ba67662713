"""Nodes of Kubernetes, as ``kubectl get nodes -o json`` prints them.

GPUs are counted by what can be allocated (``nvidia.com/gpu``, ``amd.com/gpu``) and named by the
labels of NVIDIA's feature discovery (``nvidia.com/gpu.product``, ``.memory``, ``.count``). Nodes
that are not ready or take no pods are left out. Labels of the network's topology
(``network.topology.nvidia.com/leaf`` and so on) become levels of switches.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from partita.catalogue.inventory import Completion, FoundHost, equal_gpus, inventory_cluster
from partita.core.cluster import Cluster
from partita.errors import FormatError, InvalidInputError
from partita.names import short

_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_PRODUCT = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "gpu.nvidia.com/model")
_TOPOLOGY = tuple(
    f"network.topology.nvidia.com/{part}" for part in ("accelerator", "leaf", "spine", "core")
)
_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)(m|Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FACTORS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_MIB = 2**20


def is_kubernetes_nodes(value: object) -> bool:
    """Return whether a JSON value is a node, or a list of nodes."""
    if not isinstance(value, dict):
        return False
    if value.get("kind") == "Node":
        return True
    items = value.get("items")
    is_node = isinstance(items, list) and any(
        isinstance(item, dict) and item.get("kind") == "Node" for item in items
    )
    return value.get("kind") == "NodeList" or is_node


def read_kubernetes_nodes(value: Any, known: Completion, *, name: str = "kubernetes") -> Cluster:  # noqa: ANN401 (JSON is any value)
    """Return the nodes with GPUs that take pods.

    Raises:
        FormatError: A node is broken.
        InvalidInputError: None has GPUs, or their type is not known.
    """
    listed = _table(value, "what is listed")
    items = [listed] if listed.get("kind") == "Node" else listed.get("items")
    if not isinstance(items, list):
        raise FormatError("key 'items' is no list; expected what kubectl get nodes -o json prints")
    nodes = [_table(item, "a node") for item in items]
    usable = [node for node in nodes if _takes_pods(node)]
    hosts = [host for host in map(_host, usable) if host.gpus]
    if not hosts:
        raise InvalidInputError(
            f"none of {len(nodes)} nodes is ready and has GPUs ({' or '.join(_RESOURCES)})"
        )
    return inventory_cluster(name, hosts, known)


def _takes_pods(node: Mapping[str, Any]) -> bool:
    if _part(node, "spec").get("unschedulable") is True:
        return False
    conditions = _part(node, "status").get("conditions")
    ready = [
        part.get("status")
        for part in (conditions if isinstance(conditions, list) else [])
        if isinstance(part, dict) and part.get("type") == "Ready"
    ]
    return not ready or ready[-1] == "True"


def _host(node: Mapping[str, Any]) -> FoundHost:
    meta, status = _part(node, "metadata"), _part(node, "status")
    name = meta.get("name")
    if not isinstance(name, str) or not name:
        raise FormatError("a node has no name")
    labels = _part(meta, "labels")
    there = {**_part(status, "capacity"), **_part(status, "allocatable")}
    count = int(sum(_quantity(there.get(key, "0"), name, key) for key in _RESOURCES))
    own = labels.get("nvidia.com/gpu.count")
    if own is not None and count:  # GPUs that are shared in time count several times
        count = min(count, int(_quantity(own, name, "nvidia.com/gpu.count")))
    title = next((str(labels[key]) for key in _PRODUCT if labels.get(key)), "")
    memory = _quantity(labels.get("nvidia.com/gpu.memory", "0"), name, "nvidia.com/gpu.memory")
    path = tuple(str(labels[key]) for key in _TOPOLOGY if labels.get(key))
    return FoundHost(
        name=name,
        gpus=equal_gpus(
            count, name, title=title.removesuffix("-SHARED"), memory_bytes=memory * _MIB
        ),
        cpus=int(_quantity(there.get("cpu", "0"), name, "cpu")),
        memory_bytes=_quantity(there.get("memory", "0"), name, "memory"),
        switches=path,
    )


def _quantity(value: object, node: str, key: str) -> float:
    """Return a quantity as Kubernetes writes it: ``127500m``, ``512Gi``."""
    match = _QUANTITY.fullmatch(str(value))
    number = float(match[1]) * _FACTORS[match[2] or ""] if match else math.nan
    if not 0 <= number < 2.0**63:
        raise FormatError(f"node {node!r}: {key} is {short(value)}; expected such as 8 or 512Gi")
    return number


def _part(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _table(table.get(key) or {}, key)


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is {short(value)}; expected an object")
    return value
