"""Synergy: every recorded run of the released simulator, by the released rules.

Inputs, answers and results are those of the data folder (msr-fiddle/synergy, run unmodified).
"""

import json

import numpy as np
import pytest

from partita.fleet.policies.resources import servers_of
from partita.formats.synergy import (
    read_cluster,
    read_models,
    read_results,
    read_trace,
    write_results,
    write_trace,
)
from partita.released.synergy import simulate_released

SMALL = ("static100_32gpu", "dyn100_32gpu")


@pytest.fixture(scope="module")
def synergy(shared_data):
    return shared_data / "synergy"


@pytest.fixture(scope="module")
def models(synergy):
    return read_models((synergy / "model_profiles.json").read_text())


def rows_of(synergy, tags):
    rows = json.loads((synergy / "answers.json").read_text())
    return [row for row in rows if row["tag"] in tags and row["mode"] != "opt"]


def check(synergy, models, row):
    text = (synergy / "traces" / row["trace"]).read_text()
    trace = read_trace(text, models, name=row["trace"])
    cluster = read_cluster((synergy / "configs" / f"c{row['gpus']}.ini").read_text())
    history = simulate_released(
        trace,
        servers_of(cluster),
        ordering=row["policy"].lower(),
        allocator=row["mode"],
    )
    name = f"{row['tag']}-{row['policy']}-{row['mode']}"
    expected = read_results((synergy / "results" / f"{name}.csv").read_text())
    assert read_results(write_results(history, trace)) == expected, name
    assert (history.rounds, history.events) == (row["rounds"], row["events"]), name
    hours = history.completion_s / 3600
    recorded = row["jct_all"]
    assert round(float(hours.mean()), 4) == recorded["mean"], name
    assert round(float(np.percentile(hours, 99)), 4) == recorded["p99"], name
    assert round(float(history.finish_s.max()) / 3600, 3) == row["makespan_h"], name


def test_every_row_of_the_100_job_traces_is_equal(synergy, models):
    rows = rows_of(synergy, SMALL)
    assert len(rows) == 36
    for row in rows:
        check(synergy, models, row)


def test_every_row_of_the_1000_job_trace_is_equal(synergy, models):
    rows = rows_of(synergy, ("single1000_128gpu",))
    assert len(rows) == 8
    for row in rows:
        check(synergy, models, row)


def test_some_jobs_of_the_static_trace_are_a_static_trace(synergy, models):
    lines = (synergy / "traces" / "deploy_static_100.csv").read_text().splitlines(keepends=True)
    assert read_trace("".join(lines[3::7]), models).start_s == 1.0
    assert read_trace(lines[5], models).start_s == 1.0


@pytest.mark.parametrize("name", ["deploy_dynamic_100", "synth_multi_load4_1000"])
def test_traces_are_written_as_they_were_read(synergy, models, name):
    text = (synergy / "traces" / f"{name}.csv").read_text()
    assert write_trace(read_trace(text, models)) == text
