import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from partita.core.cluster import Cluster, Device
from partita.core.codec import FORMATS, encode, format_of
from partita.core.graph import Graph, VariantTable
from partita.core.problem import Objective, Problem
from partita.core.schema import json_schema
from partita.cost.predict import simulate
from partita.planners.table import solve
from partita.program.lower import lower
from partita.testing.builders import (
    chain,
    flat_cluster,
    host_cluster,
    paired_cluster,
    random_dag,
    small_energy_profile,
    small_frontier,
)
from partita.testing.fleet_builders import small_history, small_trace, steep

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "schemas"


def objects() -> list[object]:
    """Return objects of every type, with short and long columns, levels and a matrix."""
    graph = random_dag(30, random.Random(7))
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e8)
    solution = solve(Problem(graph=graph, cluster=cluster), "random", seed=1)
    problem, plan = solution.problem, solution.plan
    return [
        *(graph, chain(2), cluster, paired_cluster(3), problem.objective, problem),
        *(plan, solution, lower(problem, plan), simulate(problem, plan), flat_cluster(1)),
        Graph(ops=graph.ops, costs=graph.costs, variants=VariantTable(op=[0, 0], tp=[2, 4])),
        *(Objective(microbatches=3, microbatch_size=2), small_energy_profile(), small_frontier()),
        *(steep(), small_trace(), small_history()),
        Cluster(devices=(Device(name="d", peak_flop_per_s={"int8": 1e12}, clocks_mhz=(1.0, 2.0)),)),
    ]


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json_schema(name))


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_up_to_date(name):
    path = FOLDER / f"{name}.schema.json"
    text = json.dumps(json_schema(name), indent=1) + "\n"
    assert path.read_text(encoding="utf-8") == text, "run python docs/schemas/generate.py"


def test_there_is_no_other_file():
    names = {path.name for path in FOLDER.glob("*.json")}
    assert names == {f"{name}.schema.json" for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_every_schema_is_a_schema(name):
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["title"] == name
    assert schema["properties"]["format"] == {"const": name}
    assert schema["description"]


def test_every_document_is_valid():
    made = objects()
    assert {format_of(type(value)) for value in made} == set(FORMATS)
    for value in made:
        document = json.loads(json.dumps(encode(value)))
        errors = list(validator(document["format"]).iter_errors(document))
        assert not errors, errors[0].message


def plan_document(**changes: object) -> dict[str, Any]:
    plan = solve(Problem(graph=chain(3), cluster=flat_cluster(2)), "uniform").plan
    return encode(plan) | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "partita.graph"},
        {"version": 2},
        {"version": 0},
        {"version": "1"},
        {"unknown": 1},
        {"schedule": "2f2b"},
        {"stage_of": [0.5]},
        {"stage_of": "0"},
        {"stage_of": {"every": 0}},
        {"stage_of": {"every": 0, "rows": -1}},
        {"stage_of": {"every": "x", "rows": 1}},
        {"devices": [1]},
        {"stages": [{}]},
        {"stages": [{"devices": [0]}]},
        {"stages": {"distinct": []}},
        {"stages": {"distinct": [], "of": [0.5]}},
        {"recompute": [1]},
    ],
)
def test_documents_that_cannot_be_are_not_valid(changes):
    assert validator("partita.plan").is_valid(plan_document())
    assert not validator("partita.plan").is_valid(plan_document(**changes))


def test_keys_that_must_be_there_are_required():
    for key in ("format", "version", "fingerprint", "devices", "stage_of", "stages"):
        document = plan_document()
        del document[key]
        assert not validator("partita.plan").is_valid(document)
    document = plan_document()
    del document["schedule"]
    assert validator("partita.plan").is_valid(document)
