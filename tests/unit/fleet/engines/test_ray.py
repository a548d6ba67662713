"""Ray's answers and the options of its engine, without a Ray."""

import json
import os

import pytest

from partita.errors import InvalidInputError
from partita.fleet.engines.protocol import Cause
from partita.fleet.engines.ray import _end, _sealed, read_ray_nodes, start_ray


def answer(*rows: dict) -> dict:
    return {"data": {"result": {"result": list(rows)}}}


def row(name: str, **total: float) -> dict:
    return {
        "node_name": name,
        "node_id": f"id of {name}",
        "state": "ALIVE",
        "labels": {},
        "resources_total": {"CPU": 8.0, "memory": 1e9, "node:1.2.3.4": 1.0, **total},
    }


def test_types_of_gpus_are_labels_rays_resource_or_a_custom_one() -> None:
    labelled = {**row("a", GPU=2.0), "labels": {"ray.io/accelerator-type": "A100"}}
    nodes = read_ray_nodes(
        answer(
            labelled,
            row("b", **{"GPU": 2.0, "accelerator_type:H100": 1.0}),
            row("c", GPU=2.0, v100=2.0),
            row("d", GPU=2.0),
            {**row("e"), "state": "DEAD"},
        )
    )
    assert [node.gpu_type for node in nodes] == ["a100", "h100", "v100", "", ""]
    assert [node.is_alive for node in nodes] == [True, True, True, True, False]
    with pytest.raises(InvalidInputError, match="nodes cannot"):
        read_ray_nodes({"data": None})


def test_an_order_reaches_its_driver_although_ray_replaces_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", '/root/"x"')
    order = {"command": ["sh", "-c", "cd $HOME; echo ${HOME} \\$HOME"], "folder": "/a$HOME"}
    assert json.loads(os.path.expandvars(_sealed(order))) == order


def ended(status: str, message: str = "", lost: tuple[str, ...] = ()):
    job = {"status": status, "message": message, "end_time": 5000, "driver_exit_code": 1}
    return _end(job, lost)


def test_ends_are_told_apart() -> None:
    assert ended("SUCCEEDED").exit_code == 0
    assert ended("STOPPED").cause is Cause.OTHERS
    own = ended("FAILED", 'log\npartita-ended: {"cause": "itself", "exit_code": 3}\n')
    assert (own.exit_code, own.cause, own.ended_s) == (3, Cause.ITSELF, 5.0)
    node = ended("FAILED", 'partita-ended: {"cause": "node", "why": "node r2 died"}')
    assert (node.cause, node.why) == (Cause.ENGINE, "node r2 died")
    with_it = ended("FAILED", "Traceback", lost=("r2",))
    assert (with_it.cause, with_it.why) == (Cause.ENGINE, "node r2 died")
    broken = ended("FAILED", "x\nNo module named partita\n")
    assert (broken.cause, broken.why) == (
        Cause.ITSELF,
        "its driver on Ray died: No module named partita",
    )


def test_a_ray_is_started_on_this_machine_only() -> None:
    with pytest.raises(InvalidInputError, match="http://head:8265"):
        start_ray("http://head:8265")
