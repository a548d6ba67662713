import dataclasses

import pytest

from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def program(**changes: object) -> Program:
    """Return a forward on d0 that sends to d1, then a reduction, some of it changed."""
    parts: dict[str, object] = {
        "devices": ("d0", "d1"),
        "num_stages": 2,
        "microbatch_sizes": [4, 2],
        "ptr": [0, 3, 5],
        "kind": [Kind.FORWARD, Kind.SEND, Kind.ALL_REDUCE, Kind.RECV, Kind.ALL_REDUCE],
        "stage": [0, 0, -1, 1, -1],
        "microbatch": [1, 1, -1, 1, -1],
        "tensor": [-1, 3, -1, 3, -1],
        "gradient": [False, True, False, True, False],
        "peer": [-1, 1, -1, 0, -1],
        "group": [-1, -1, 0, -1, 0],
        "bucket": [-1, -1, 0, -1, 0],
        "bytes": [0, 64, 128, 64, 128],
        "version": [0, -1, -1, -1, -1],
        "group_ptr": [0, 2],
        "group_devices": [0, 1],
        "bucket_ptr": [0, 3],
        "bucket_parameters": [5, 6, 9],
    }
    return Program(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stages": -1}, "num_stages is -1; expected 0 or more"),
        ({"num_stages": 1}, "stage of row 3 is 1; expected -1 to 0"),
        ({"devices": ("d0", "d0")}, "devices of the program: 'd0' stands twice"),
        ({"microbatch_sizes": [4, 0]}, "microbatch size of row 1 is 0; expected 1 or more"),
        ({"microbatch": [2] * 5}, "microbatch of row 0 is 2; expected -1 to 1"),
        ({"kind": [14, 0, 0, 0, 0]}, "kind of row 0 is 14; expected 0 to 13"),
        ({"tensor": [-2] * 5}, "tensor of row 0 is -2; expected -1 or more"),
        ({"peer": [-1, 2, -1, 0, -1]}, "peer of row 1 is 2; expected -1 to 1"),
        ({"group": [-1, -1, 1, -1, 0]}, "group of row 2 is 1; expected -1 to 0"),
        ({"bucket": [-1, -1, 1, -1, 0]}, "bucket of row 2 is 1; expected -1 to 0"),
        ({"bytes": [-1] * 5}, "bytes of row 0 is -1; expected 0 or more"),
        ({"bytes": [2**63] * 5}, "bytes must hold whole numbers within the range of int64"),
        ({"version": [-2] * 5}, "version of row 0 is -2; expected -1 or more"),
        ({"stage": [0]}, "stage has 1 values for 5 rows"),
        ({"ptr": [0, 3]}, "ptr has 2 values for 3 rows"),
        ({"ptr": [0, 3, 4]}, "ptr of the program does not cover its 5 rows"),
        ({"ptr": [1, 3, 5]}, "ptr of the program does not cover its 5 rows"),
        ({"ptr": [0, 5, 4]}, "ptr of the program does not cover its 5 rows"),
        ({"ptr": [0, 6, 5]}, "ptr of row 1 is 6; expected 0 to 5"),
        ({"group_ptr": [0, 1]}, "group_ptr of the program does not cover its 2 rows"),
        ({"group_ptr": [], "group": -1}, "group_ptr of the program does not cover its 2 rows"),
        ({"group_devices": [0, 2]}, "group_devices of row 1 is 2; expected 0 to 1"),
        ({"bucket_ptr": [0, 4]}, "bucket_ptr of row 1 is 4; expected 0 to 3"),
    ],
)
def test_programs_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidInputError) as caught:
        program(**changes)
    assert str(caught.value).startswith(words)


def test_a_program_is_frozen_and_its_columns_are_read_only():
    made = program()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.num_stages = 3
    for field in dataclasses.fields(made):
        values = getattr(made, field.name)
        if field.name not in ("devices", "num_stages"):
            assert not values.flags.writeable, field.name
    assert not made.device.flags.writeable
    assert not made.is_compute.flags.writeable


def test_a_program_is_read_by_device_group_and_bucket():
    made = program()
    assert (len(made), made.num_microbatches) == (5, 2)
    assert made.device.tolist() == [0, 0, 0, 1, 1]
    assert made.is_compute.tolist() == [True, False, False, False, False]
    assert made.group_of(2).tolist() == [0, 1]
    assert made.parameters_of(0).tolist() == [5, 6, 9]


def test_instructions_are_described_for_people():
    made = program()
    assert [made.describe(row) for row in range(5)] == [
        "d0: FORWARD(stage 0, microbatch 1) at position 0",
        "d0: SEND(stage 0, microbatch 1, gradient of tensor 3, to d1) at position 1",
        "d0: ALL_REDUCE(bucket 0) at position 2",
        "d1: RECV(stage 1, microbatch 1, gradient of tensor 3, from d0) at position 0",
        "d1: ALL_REDUCE(bucket 0) at position 1",
    ]


def test_programs_are_equal_by_value():
    assert program() == program()
    assert program() != program(bytes=[0, 64, 128, 64, 129])


def test_a_lowered_plan_is_a_valid_program():
    graph = chain(4, Figures(parameter_bytes=8.0))
    cluster = flat_cluster(3)
    problem = Problem(graph=graph, cluster=cluster)
    made = lower(problem, pipeline(graph, cluster, [0, (1, 2)], microbatches=4))
    assert made == dataclasses.replace(made)
    assert made.ptr[-1] == len(made)
