import pytest

from partita.core.problem import Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.pipedream import read_pipedream, read_pipedream_plan, write_pipedream_plan


def node(name, desc="Linear", stage=None):
    line = (
        f"{name} -- {desc} -- forward_compute_time=1.000, backward_compute_time=2.000, "
        "activation_size=8.0, parameter_size=0.000"
    )
    return line if stage is None else f"{line} -- stage_id={stage}"


PROFILE = "\n".join(
    [
        node("i", "Input"),
        node("a"),
        node("b", "LSTM(1, 1)"),
        node("c", "__getitem__(1)"),
        node("d"),
        "\ti -- a",
        "\ta -- b",
        "\tb -- c",
        "\tb -- d",
    ]
)
OUTPUT = "\n".join(
    [
        node("a", stage=0),
        node("b", "LSTM(1, 1)", stage=2),
        node("d", stage=5),
        node("i", "Input", stage=0),
        "\ti -- a",
        "\ta -- b",
        "\tb -- d",
    ]
)


def test_stages_are_made_dense_and_dropped_elements_follow_their_producer():
    graph = read_pipedream(PROFILE)
    plan = read_pipedream_plan(OUTPUT, graph)
    assert plan.stage_of.tolist() == [0, 1, 1, 2]
    assert plan.devices == ("host0/gpu0", "host0/gpu1", "host0/gpu2")
    assert plan.schedule is Schedule.PIPEDREAM
    assert plan.fingerprint == graph.fingerprint
    assert plan.num_microbatches == 1


def test_replicas_devices_and_microbatches_can_be_given():
    graph = read_pipedream(PROFILE)
    names = [f"x{i}" for i in range(9)]
    plan = read_pipedream_plan(OUTPUT, graph, replicas=[3, 2, 1], devices=names)
    assert [stage.devices for stage in plan.stages] == [((0,), (1,), (2,)), ((3,), (4,)), ((5,),)]
    assert plan.devices == tuple(names[:6])
    assert plan.num_microbatches == 6
    assert read_pipedream_plan(OUTPUT, graph, microbatches=4).num_microbatches == 4


def test_a_plan_comes_back_byte_for_byte():
    graph = read_pipedream(PROFILE)
    plan = read_pipedream_plan(OUTPUT, graph)
    text = write_pipedream_plan(graph, plan)
    assert text.splitlines()[0].endswith("stage_id=0")
    again = read_pipedream_plan(text, graph)
    assert again == plan
    assert write_pipedream_plan(graph, again) == text
    assert read_pipedream(text).fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (OUTPUT.replace(" -- stage_id=2", ""), {}, ["'b' has no stage_id"]),
        (OUTPUT.replace("stage_id=5", "stage_id=1"), {}, ["'d' of stage 1", "'b'", "stage 2"]),
        ("\n".join(OUTPUT.splitlines()[1:4]), {}, ["'a'", "not in the plan"]),
        (OUTPUT, {"replicas": [1]}, ["[1]", "3 stages"]),
        (OUTPUT, {"replicas": [1, 0, 1]}, ["[1, 0, 1]"]),
        (OUTPUT, {"replicas": [4, 1, 1], "devices": ["a"]}, ["1 devices for 6"]),
        (OUTPUT, {"microbatches": 0}, ["0 microbatches"]),
        (OUTPUT, {"replicas": [997, 991, 983]}, ["microbatches in a step"]),
        (OUTPUT, {"replicas": [2, 1, 1], "microbatches": 3}, ["do not divide 3"]),
    ],
)
def test_plans_that_do_not_fit_are_refused(text, options, words):
    with pytest.raises(FormatError) as caught:
        read_pipedream_plan(text, read_pipedream(PROFILE), **options)
    for word in words:
        assert word in str(caught.value)


def test_a_plan_for_another_graph_is_not_written():
    graph = read_pipedream(PROFILE)
    plan = read_pipedream_plan(OUTPUT, graph)
    with pytest.raises(InvalidInputError, match="not for graph"):
        write_pipedream_plan(read_pipedream(OUTPUT), plan)
