"""Configurations of PipeDream's runtime."""

import numpy as np
import pytest

from partita.core.plan import Plan, Stage, pipeline_stages
from partita.errors import InvalidInputError
from partita.exporters.pipedream_conf import num_ranks_of, read_num_ranks, runtime_configurations


def plan(*stages: Stage) -> Plan:
    devices = 1 + max(device for stage in stages for group in stage.devices for device in group)
    return Plan(
        fingerprint="0",
        devices=tuple(f"host0/gpu{row}" for row in range(devices)),
        stage_of=np.arange(len(stages), dtype=np.int32),
        stages=stages,
        microbatch_sizes=np.ones(12, dtype=np.int32),
    )


def test_the_three_configurations_of_a_replicated_pipeline() -> None:
    found = runtime_configurations([3, 1])
    assert found == {
        "dp_conf.json": {
            "module_to_stage_map": [0, 0, 0],
            "stage_to_rank_map": {"0": [0, 1, 2, 3]},
            "stage_to_depth_map": {"0": 0},
        },
        "mp_conf.json": {
            "module_to_stage_map": [0, 1, 1],
            "stage_to_rank_map": {"0": [0], "1": [1]},
            "stage_to_depth_map": {"0": 1, "1": 0},
        },
        "hybrid_conf.json": {
            "module_to_stage_map": [0, 1, 1],
            "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},
            "stage_to_depth_map": {"0": 1, "1": 0},
        },
    }


def test_the_depth_is_what_the_runtime_computes_without_the_map() -> None:
    counts = [2, 3, 1, 4]
    depth = runtime_configurations(counts)["hybrid_conf.json"]["stage_to_depth_map"]
    total = sum(counts)
    for stage, own in enumerate(counts):
        assert depth[str(stage)] == (total - 1 - sum(counts[:stage])) // own


@pytest.mark.parametrize("text", ["", "3,1", "0:3", "0:3,1:0", "0:3,0:1", "0:3,2:1", "0:-1,1:1"])
def test_ranks_that_do_not_fit_the_stages_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="stage to"):
        read_num_ranks(text, 2)


def test_ranks_go_by_the_stage_they_name() -> None:
    assert read_num_ranks(" 1:1, 0:3 ", 2) == [3, 1]


def test_a_device_with_two_stages_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="'host0/gpu0' holds stages 0 and 2"):
        num_ranks_of(plan(*pipeline_stages([range(1), range(1, 2), range(1)])))


def test_a_stage_divided_among_devices_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="divided among 2 devices"):
        num_ranks_of(plan(Stage(devices=((0, 1),))))
