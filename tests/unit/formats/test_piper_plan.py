import dataclasses
import json

import pytest

from partita.core.plan import Plan, Stage
from partita.errors import FormatError, InvalidInputError
from partita.formats.piper import read_piper, read_piper_plan, write_piper_plan

RECOMPUTE = "activation recomp"


def option(kind, fw, bw):
    numbers = dict.fromkeys(("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB"), 1.0)
    return {"id": kind, **numbers, "syncTimeFw": fw, "syncTimeBw": bw}


@pytest.fixture(scope="module")
def problem():
    first = [option(kind, {}, {"1": 0.0}) for kind in ("vanilla", RECOMPUTE)]
    second = [option("vanilla", {"0": 0.0}, {})]
    document = {
        "maxDevices": 8,
        "maxMemoryPerDevice": 1e9,
        "bandwidth": 1e9,
        "mbsInBatch": 12,
        "nodes": [
            {"id": 0, "TMPCs": {"1": first, "2": first}},
            {"id": 1, "TMPCs": {"1": second, "2": second}},
        ],
        "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 1.0}],
    }
    return read_piper(json.dumps(document))


def stage(nodes, d=1, t=1, **options):
    return {
        "nodes": nodes,
        "dataParallelDegree": d,
        "tensorParallelDegree": t,
        "TMPCids": {str(node): options.get(f"n{node}", "vanilla") for node in nodes},
    }


def text_of(*stages):
    return json.dumps({"stages": list(stages)})


def test_stages_take_devices_in_order(problem):
    plan = read_piper_plan(text_of(stage([0], 3, 2, n0=RECOMPUTE), stage([1], 2, 1)), problem)
    assert plan.stages[0].devices == ((0, 1), (2, 3), (4, 5))
    assert plan.stages[1].devices == ((6,), (7,))
    assert plan.devices == problem.cluster.device_names
    assert plan.recompute.tolist() == [True, False]
    assert plan.num_microbatches == 12


def test_plans_come_back_byte_for_byte(problem):
    plan = read_piper_plan(text_of(stage([0], 4, n0=RECOMPUTE), stage([1])), problem)
    text = write_piper_plan(problem, plan)
    assert read_piper_plan(text, problem) == plan
    assert write_piper_plan(problem, read_piper_plan(text, problem)) == text
    assert json.loads(text)["stages"][0] == stage([0], 4, n0=RECOMPUTE)


def test_without_microbatches_the_fewest_are_taken(problem):
    free = dataclasses.replace(
        problem, objective=dataclasses.replace(problem.objective, microbatches=None)
    )
    plan = read_piper_plan(text_of(stage([0], 3), stage([1], 2)), free)
    assert plan.num_microbatches == 6


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], ["2 nodes are in no stage"]),
        ([stage([0])], ["1 nodes are in no stage", "1"]),
        ([stage([0, 1]), stage([1])], ["each node once"]),
        ([stage([0, 0])], ["each once"]),
        ([stage([0, 2])], ["2", "id of a node"]),
        ([stage([1]), stage([0])], ["later stage"]),
        ([stage([0], 9)], ["devices 0 to 8", "has 8"]),
        ([stage([0], 0)], ["dataParallelDegree is 0"]),
        ([stage([0], 5), stage([1])], ["5", "do not divide 12"]),
        ([stage([0], 1, 4)], ["no option 'vanilla'", "degree 4"]),
        ([stage([0]), stage([1], n1=RECOMPUTE)], ["node 1", RECOMPUTE]),
        ([stage([0], n0="fast")], ["'fast'", "vanilla"]),
        ([{"nodes": [0]}], ["'dataParallelDegree'"]),
    ],
)
def test_plans_that_do_not_fit_are_refused(problem, stages, words):
    with pytest.raises(FormatError) as caught:
        read_piper_plan(text_of(*stages), problem)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((Stage(devices=((0,),)), Stage(devices=((0,),))), "several"),
        ((Stage(devices=((0,), (1,)), shares=(2, 1)), Stage(devices=((2,),))), "shares"),
    ],
)
def test_what_the_format_cannot_say_is_refused(problem, stages, reason):
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=[0, 1],
        stages=stages,
        microbatch_sizes=[1] * 12,
    )
    with pytest.raises(InvalidInputError, match=reason):
        write_piper_plan(problem, plan)
