"""Formats of fleets: told by content, logs as tables, clusters as INI files."""

import json

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.documents import open_file
from partita.errors import FormatError, InvalidInputError
from partita.formats.detect import detect_format, read_any, write_as
from partita.formats.submissions import read_submissions
from partita.formats.synergy import read_cluster, write_cluster_ini

PROFILE = [{"2": 0.5}, {"2": {"0": 40.0, "100": 20.0}}, {"2": {"0": 100.0, "100": 0.0}}]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0,alexnet,0.001,3349,1\n1,gnmt,5,1,2\n", "synergy-trace"),
        ("0,alexnet,0.001,3349\n", "synergy-trace"),
        ("0,alexnet,nan,3349,1\n", "synergy-trace"),
        ("0,alexnet,0,3349,1,7\n", "synergy-trace"),
        ("[CLUSTER]\nracks = 1\n", "synergy-cluster"),
        ("# mine\n[CLUSTER]\nracks = 1\n", "synergy-cluster"),
        (json.dumps(PROFILE), "synergy-profile"),
        ('{"cpu_axis_per_gpu": [], "mem_axis_gb_per_gpu": [], "sets": {}}', "synergy-models"),
        ('[{"attempts": [], "submitted_time": "2017"}]', "philly"),
        ("jobid, timestamp, duration, num_gpus\n", "submissions"),
        ("stage,instruction,frequency,time,energy\n", "perseus-profile"),
    ],
)
def test_a_file_is_told_by_its_content(text, name):
    assert detect_format(text.encode()) == name


@pytest.mark.parametrize("text", ["0,alexnet,0.001,3349,1\n", "timestamp,duration,gpus\n1,2,3\n"])
def test_what_needs_sensitivities_says_which_command_reads_it(text):
    with pytest.raises(FormatError, match="partita fleet trace"):
        read_any(text.encode())


@pytest.mark.parametrize("text", ["1410,0,1000,5\n", "0,alexnet\n", "jobs,alexnet,0,1,1\n"])
def test_other_tables_are_no_broken_trace(text):
    with pytest.raises(FormatError, match="no known format"):
        detect_format(text.encode())


def test_a_profile_comes_back():
    found = read_any(json.dumps(PROFILE).encode(), name="job")
    assert found.name == "job"
    assert read_any(write_as(found, "synergy-profile").encode(), name="job") == found


def test_other_documents_are_refused_by_name():
    found = read_any(json.dumps(PROFILE).encode(), name="job")
    with pytest.raises(InvalidInputError, match=r"trace,.*partita\.sensitivity"):
        write_as(found, "synergy-trace")
    with pytest.raises(InvalidInputError, match="read only"):
        write_as(found, "philly")


def test_a_table_of_submissions_has_seconds_or_stamps():
    text = "user, submit_time, duration, gpus\na, 100, 7200, 2\nb, 40, 60.5, 1\nc, 50, 0, 1\n"
    assert read_submissions(text).rows == [(60, 7200, 2), (0, 60.5, 1), (10, 0, 1)]
    stamps = "timestamp,duration,num_gpus\n2017-10-03 07:00:00,5,1\n2017-10-03T08:00:00,6,4\n"
    assert read_submissions(stamps) == ([(0, 5, 1), (3600, 6, 4)], (), (), ())
    named = "submitted,gpus,duration_s,model\n0,1,60, resnet50\n5,0,60,vgg\n6,1,60,\n"
    assert read_submissions(named).models == ("resnet50", "")  # of the jobs that count


@pytest.mark.parametrize(
    ("column", "seconds"),
    [
        ("duration_s", 2),
        ("runtime", 2),
        ("duration_min", 120),
        ("duration_h", 7200),
        ("elapsed_d", 172800),
    ],
)
def test_durations_are_in_the_unit_of_their_column(column, seconds):
    text = f"submitted,{column},gpus\n0,2,1\n"
    assert detect_format(text.encode()) == "submissions"
    assert read_submissions(text).rows == [(0, seconds, 1)]


def test_a_table_says_what_it_leaves_out_or_changes():
    rows = "0,60,1\n1,60,0.5\n2,60,1.5\n3,0,2\n4,-1,1\n5,60,0\n6,60,0\n"
    found = read_submissions("timestamp,duration,gpus\n" + rows)
    assert found.rows == [(0, 60, 1), (1, 60, 1), (2, 60, 2), (3, 0, 2)]
    assert found.notes == (
        "2 with parts of GPUs taken as whole ones",
        "1 without a duration taken as one iteration",
        "1 with a negative duration left out",
        "2 without a GPU left out",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timestamp,num_gpus\n1,2\n", "line 1: no column has the duration, .*duration_h"),
        ("timestamp,duration,gpus\n1,x,1\n", "line 2: duration is 'x'; expected a number, or days"),
        ("timestamp,duration,gpus\nsoon,5,1\n", "line 2: timestamp is 'soon'; expected sec"),
        ("timestamp,duration,gpus\n1,inf,1\n", "line 2: duration is 'inf'"),
        ("timestamp,duration,gpus\n1,5,0\n", "no job that ran; 1 without a GPU left out"),
        ("timestamp,duration,gpus\n1\n", "line 2"),
    ],
)
def test_a_broken_table_names_the_line(text, message):
    with pytest.raises(FormatError, match=message):
        read_submissions(text)


def test_a_cluster_of_equal_servers_comes_back():
    cluster = read_shorthand("3x8xv100", load_catalogue())
    again = read_cluster(write_cluster_ini(cluster))
    assert len(again.hosts) == 3
    assert len(again) == 24
    assert {(host.cpus, host.memory_bytes) for host in again.hosts} == {(24, 500e9)}


def test_servers_that_differ_are_refused():
    with pytest.raises(InvalidInputError, match="differ"):
        write_cluster_ini(read_shorthand("8xv100+4xv100", load_catalogue()))


def test_a_table_of_other_columns_is_told_what_a_log_of_jobs_is(tmp_path):
    file = tmp_path / "jobs.csv"
    file.write_text("JobID,Account,Start,End\n1,ann,2025-01-02,2025-01-03\n", encoding="utf-8")
    with pytest.raises(FormatError, match=r"submitted, duration_s, gpus\)$") as caught:
        open_file(file).format_of(("jobs",))
    assert "hostfile" not in str(caught.value)  # what a caller cannot use is not named


def test_what_sinfo_prints_is_no_cluster_and_says_what_is(tmp_path):
    file = tmp_path / "sinfo.txt"
    file.write_text("PARTITION AVAIL  NODES  STATE NODELIST\ngpu* up 4 idle node[01-04]\n")
    with pytest.raises(InvalidInputError, match="scontrol show node"):
        open_file(file).load()
