import math
from dataclasses import replace

import numpy as np
import pytest

from partita.core.codec import decode, encode, read_json, write_json
from partita.core.fleet import Job, Sensitivity, Trace, trace_of
from partita.errors import FormatError, InvalidInputError
from partita.testing.fleet_builders import flat, small_history, small_trace, steep


@pytest.mark.parametrize("value", [steep(), flat(), small_trace(), small_history()])
def test_documents_come_back_as_they_were(value):
    assert decode(encode(value)) == value
    assert read_json(write_json(value)) == value


def test_a_trace_gives_its_jobs_back():
    jobs = [
        Job(job_id=3, sensitivity=steep(), iterations=5, gpus=2, min_gpus=1, max_gpus=4),
        Job(job_id=1, sensitivity=flat(), iterations=7, tenant="a", gpu_types=("a100", "v100")),
        Job(job_id=2, sensitivity=flat("other"), iterations=7, gpu_types=("v100",), priority=2.0),
    ]
    trace = trace_of(jobs)
    again = [trace.job(row) for row in range(3)]
    assert [job.job_id for job in again] == [3, 1, 2]
    assert (again[0].min_gpus, again[0].max_gpus) == (1, 4)
    assert again[1].tenant == "a"
    assert again[1].gpu_types == ("a100", "v100")
    assert again[2].gpu_types == ("v100",)
    assert again[2].priority == 2.0
    assert trace_of(again) == trace


def test_the_time_alone_counts_iterations_at_speed_1():
    assert small_trace(jobs=2).fair_s.tolist() == [1800.0, 3600.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iteration_s": 0.0}, "iteration_s is 0.0"),
        ({"speed": np.zeros(3)}, "no point has a speed"),
        ({"cpus": np.zeros(3)}, "cpus of sensitivity 'x'"),
        ({"gpu_type": np.array([0, 0, 1])}, "GPU type"),
        ({"frontier_speed": np.array([2.0]), "frontier_w": np.array([1.0])}, "frontier"),
    ],
)
def test_a_sensitivity_that_cannot_be_is_refused(changes, message):
    fields = {
        "iteration_s": 1.0,
        "cpus": np.ones(3),
        "memory_bytes": np.ones(3),
        "speed": np.ones(3),
    }
    with pytest.raises(InvalidInputError, match=message):
        Sensitivity(name="x", **(fields | changes))


def test_a_sensitivity_without_points_is_refused():
    with pytest.raises(InvalidInputError, match=r"least.*point"):
        Sensitivity(name="x", iteration_s=1.0, cpus=[], memory_bytes=[], speed=[])


def test_a_job_twice_or_out_of_its_range_is_refused():
    job = Job(job_id=1, sensitivity=flat(), iterations=1)
    with pytest.raises(InvalidInputError, match="1 stands"):
        trace_of([job, job])
    with pytest.raises(InvalidInputError, match=r"2 GPUs.*3.*2"):
        trace_of([Job(job_id=1, sensitivity=flat(), iterations=1, gpus=2, min_gpus=3)])


def test_an_empty_trace_is_refused_and_a_broken_one_named():
    document = encode(small_trace())
    document["gpus"] = [0] * 6
    with pytest.raises(FormatError, match=r"row 0.*0"):
        decode(document)
    with pytest.raises(InvalidInputError, match=r"least.*job"):
        Trace(
            sensitivities=(flat(),), job_id=[], sensitivity=[], arrival_s=[], iterations=[], gpus=[]
        )


def test_a_history_knows_who_did_not_end():
    history = small_history()
    assert history.unfinished == 1
    assert history.completion_s[0] == 900.0
    assert math.isnan(history.completion_s[1])


def test_equal_sensitivities_are_one_and_different_ones_need_names_of_their_own():
    jobs = [Job(job_id=i, sensitivity=flat(), iterations=1) for i in range(3)]
    assert len(trace_of(jobs).sensitivities) == 1
    other = Job(job_id=9, sensitivity=flat(iteration_s=2.0), iterations=1)
    with pytest.raises(InvalidInputError, match=r"sensitivities.*'flat'"):
        trace_of([*jobs, other])


@pytest.mark.parametrize("field", ["restart_s", "demand_cpus", "working_bytes", "dataset_bytes"])
@pytest.mark.parametrize("value", [-1.0, 1e308, math.inf])
def test_figures_of_a_sensitivity_are_within_reason(field, value):
    with pytest.raises(InvalidInputError, match=f"{field} is .*; expected 0 or more"):
        replace(steep(), **{field: value})


def test_a_name_that_cannot_be_written_is_refused():
    with pytest.raises(InvalidInputError, match=r"text.*written"):
        replace(steep(), name="\ud800")
    assert replace(steep(), name="größer 🚀").name == "größer 🚀"
