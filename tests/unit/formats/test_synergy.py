import json

import numpy as np
import pytest

from partita.errors import FormatError, InvalidInputError
from partita.fleet.policies.resources import servers_of
from partita.formats.philly import read_philly
from partita.formats.synergy import (
    read_cluster,
    read_models,
    read_results,
    read_trace,
    write_results,
    write_trace,
)
from partita.testing.fleet_builders import flat, small_history, small_trace, steep

MODELS = {"steep": steep(), "flat": flat()}
INI = """[CLUSTER]
racks = 2
servers_per_rack = 3
gpus_per_server = 4
cpus_per_server = 12
dram_per_server = 250
sspeed_per_server = 500
"""


def matrices(**changes):
    entry = {"cpus": 6, "mem": 50, "speedup": 2.0, "iter_time": 0.5, "tput": [[0.5], [1.0], [2.0]]}
    sets = {"models": {"res_9_1": entry | changes, "res_9_2": {}}}
    axes = {"cpu_axis_per_gpu": [1, 3, 6], "mem_axis_gb_per_gpu": [50]}
    return json.dumps({**axes, "sets": sets})


def test_matrices_become_sensitivities_of_one_gpu():
    models = read_models(matrices())
    assert list(models) == ["res_9"]
    part = models["res_9"]
    assert part.cpus.tolist() == [1, 3, 6]
    assert part.speed.tolist() == [0.5, 1.0, 2.0]
    assert (part.iteration_s, part.demand_cpus, part.demand_speed) == (0.5, 6.0, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "cpu_axis_per_gpu"),
        (matrices(tput=[[1.0]]), "expected 3 by 1"),
        (matrices(iter_time="x"), "model 'res_9'"),
        (matrices(iter_time=-1.0), "iteration_s is -1.0"),
    ],
)
def test_broken_matrices_are_refused(text, message):
    with pytest.raises((FormatError, InvalidInputError), match=message):
        read_models(text)
    with pytest.raises(FormatError, match="no set 'other'"):
        read_models(matrices(), "other")


def test_a_trace_is_read_and_written():
    text = "5,steep,10,100,1\n7,flat,20.5,200,4\n"
    trace = read_trace(text, MODELS)
    assert trace.job_id.tolist() == [5, 7]
    assert trace.gpus.tolist() == [1, 4]
    assert np.isnan(trace.start_s)
    assert write_trace(trace) == text


def test_arrivals_a_millisecond_apart_are_a_static_trace():
    text = "0,steep,0.0,100,1\n1,flat,0.001,200,4\n"
    assert read_trace(text, MODELS).start_s == 1.0
    assert np.isnan(read_trace(text, MODELS, static=False).start_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1,steep,0,5\n", "4 fields"),
        ("1,steep,0,5,1\n2,vgg,0,5,1\n", "unknown model 'vgg'; known are steep, flat"),
        ("1,steep,x,5,1\n", "line 1: arrival_s: could not convert"),
        ("1,steep,0,5,1\n2,steep,nan,5,1\n", "line 2: arrival_s is nan; expected 0 to 1e"),
        ("1,steep,inf,5,1\n", "line 1: arrival_s is inf; expected 0 to 1e"),
        ("1,steep,-1,5,1\n", "line 1: arrival_s is -1; expected 0 to 1e"),
        ("1,steep,0,five,1\n", "line 1: iterations: invalid literal"),
        (f"1,steep,0,{'9' * 400},1\n", "line 1: iterations is inf; expected 0 to 9"),
        (f"1,steep,0,5,{2**40}\n", "line 1: gpus is 1.1e"),
    ],
)
def test_a_broken_trace_names_its_line(text, message):
    with pytest.raises(FormatError, match=message):
        read_trace(text, MODELS)


def test_servers_of_all_racks_have_their_own_names():
    servers = servers_of(read_cluster(INI))
    assert len(set(servers.names)) == 6
    assert servers.num_gpus == 24
    assert servers.memory_bytes.tolist() == [250e9] * 6


@pytest.mark.parametrize("text", ["nothing", "[OTHER]\n", "[CLUSTER]\nracks = x\n"])
def test_a_file_that_is_no_cluster_is_refused(text):
    with pytest.raises(FormatError, match="not a cluster of Synergy"):
        read_cluster(text)
    with pytest.raises(FormatError, match="racks is 0"):
        read_cluster("[CLUSTER]\nracks = 0\n")


def test_results_hold_the_jobs_that_ended():
    text = write_results(small_history(), small_trace(jobs=2))
    assert read_results(text) == {4: 900.0}
    with pytest.raises(FormatError, match="expected the columns"):
        read_results("a,b\n1,2\n")
    with pytest.raises(FormatError, match="expected numbers"):
        read_results("job_id,finish_s\n1,x\n")


def attempt(begin, end, gpus):
    detail = [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(gpus)]}]
    return {"start_time": begin, "end_time": end, "detail": detail}


def test_a_philly_log_sums_attempts_and_counts_what_never_ran():
    day = "2017-10-03 "
    ran = [
        attempt(day + "10:00:00", day + "10:30:00", 1),
        attempt(day + "11:00:00", day + "12:00:00", 4),
    ]
    log = [
        {"submitted_time": day + "09:00:00", "attempts": ran},
        {"submitted_time": day + "09:10:00", "attempts": []},
        {"submitted_time": day + "09:20:00", "attempts": [attempt(day + "10:00:00", None, 2)]},
        {"submitted_time": day + "10:00:00", "attempts": ran[:1]},
    ]
    found = read_philly(json.dumps(log))
    assert found.rows == [(0.0, 5400.0, 4), (3600.0, 1800.0, 1)]
    assert found.notes == ("2 without an attempt that ran and ended left out",)


@pytest.mark.parametrize("text", ["{}", "[{}]", '[{"attempts": [], "submitted_time": "x"}]', "[]"])
def test_a_file_that_is_no_philly_log_is_refused(text):
    with pytest.raises(FormatError):
        read_philly(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers_per_rack = 1e9", "more than 1,048,576 GPUs"),
        ("racks = 1.7", "racks is 1.7; expected a whole number"),
        ("gpus_per_server = 0.5", "gpus_per_server is 0.5; expected a whole number"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(text, words):
    with pytest.raises(FormatError, match=words):
        read_cluster(f"[CLUSTER]\n{text}\n")


def test_a_number_that_no_column_holds_is_refused_with_its_line():
    models = {"flat": flat()}
    with pytest.raises(FormatError, match=r"1:.*1e\+30;.*0"):
        read_trace(f"0,flat,0,{10**30},1\n", models)


@pytest.mark.parametrize("sets", [[], {"models": []}, {"models": None}, {}])
def test_sets_of_another_shape_are_refused(sets):
    text = json.dumps({"cpu_axis_per_gpu": [1], "mem_axis_gb_per_gpu": [1], "sets": sets})
    with pytest.raises(FormatError, match="'models'"):
        read_models(text)
