"""Tables of jobs as people have them: Slurm's accounting, separators, decimal commas, stamps."""

import pytest

from partita.errors import FormatError
from partita.formats.detect import detect_format
from partita.formats.submissions import SACCT, read_submissions

HEAD = "JobID|JobName|User|Submit|Start|ElapsedRaw|State|AllocTRES"
JOBS = (
    '101|train "big|ann|T08:00:00|T08:05:00|7200|COMPLETED|cpu=64,gres/gpu:a100=8,gres/gpu=8',
    "101.batch|batch||T08:05:00|T08:05:00|7200|COMPLETED|cpu=64,gres/gpu=8",
    "101.0|python||T08:05:00|T08:05:00|7190|COMPLETED|cpu=64,gres/gpu=8",
    "102_3|sweep|bob|T08:10:00|T08:10:01|600|TIMEOUT|cpu=8,gres/gpu:a100=1,gres/gpu:v100=1",
    "103|prep|bob|T08:20:00|T08:20:01|60|COMPLETED|cpu=8,mem=16G",
    "104|wait|eve|T08:30:00|Unknown|0|PENDING|gres/gpu=1",
    "105|gone|eve|T08:40:00|T08:50:00|0|CANCELLED by 1000|gres/gpu=1",
    "106|now|ann|T09:00:00|T09:00:00|30|RUNNING|gres/gpu=4",
)
SACCT_TEXT = (
    "\n".join([HEAD, *JOBS]).replace("|T", "|2024-03-01T").replace("|2024-03-01TIM", "|TIM")
)


def test_the_jobs_of_sacct_are_kept_as_they_are_and_the_rest_is_counted():
    assert detect_format(SACCT_TEXT.encode()) == "submissions"
    found = read_submissions(SACCT_TEXT)
    assert found.rows == [(0, 7200, 8), (600, 600, 2), (3600, 30, 4)]
    assert found.tenants == ("ann", "bob", "ann")
    assert found.notes == (
        "2 steps of jobs left out",
        "1 without a GPU left out",
        "2 that never started left out",
        "1 still running taken with the time they ran so far",
    )


@pytest.mark.parametrize("end", ["|", ""])
def test_elapsed_time_of_sacct_is_days_and_hours(end):
    text = (
        f"JobID|Submit|Elapsed|AllocGRES{end}\n7|2024-03-01T08:00:00|1-02:03:04|gpu:a100:4{end}\n"
    )
    assert read_submissions(text).rows == [(0, 93784, 4)]


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [("2-00:00:00", 172800), ("01:30:00", 5400), ("05:30", 330), ("1 days 00:00:01", 86401)],
)
def test_durations_may_be_written_as_clocks(clock, seconds):
    assert read_submissions(f"submitted,duration,gpus\n0,{clock},1\n").rows == [(0, seconds, 1)]


def test_semicolons_bring_decimal_commas():
    text = "Submit Time;Duration (h);Num GPUs\n0;1,5;2\n7200,5;0,25;1\n1.007.200,5;1;1\n"
    assert detect_format(text.encode()) == "submissions"
    assert read_submissions(text).rows == [(0, 5400, 2), (7200.5, 900, 1), (1007200.5, 3600, 1)]


def test_stamps_keep_their_zone_and_ends_give_durations():
    text = (
        "submitted\tstart\tend\tgpus\n"
        "2024-03-01T08:00:00Z\t2024-03-01T09:00:00Z\t2024-03-01T10:30:00Z\t1\n"
        "2024-03-01T10:00:00+01:00\t2024-03-01T09:00:00Z\t2024-03-01T12:00:00+02:00\t1\n"
        "2024-03-01T10:00:00+01:00\t2024-03-01T09:00:00Z\tUnknown\t1\n"
    )
    found = read_submissions(text)
    assert found.rows == [(0, 5400, 1), (3600, 3600, 1)]
    assert found.notes == ("1 that had not ended left out",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("JobID|Submit|ElapsedRaw|State\n", "number of GPUs.*AllocTRES.*sacct --allusers"),
        ("Submit|AllocTRES\n", "no column has the duration, .*start and end.*sacct"),
        ("duration;gpus\n1;1\n", "no column has the time of submission, such as timestamp"),
        (
            "JobID,Submit,ElapsedRaw,AllocTRES\n1,2024-03-01,5,cpu=1,gres/gpu=1\n",
            "line 2: 5 cells, and the first line names 4 columns; .*quoted",
        ),
        ("submitted,duration,gpus\n1700000000000,5,1\n", "line 2: .*not milliseconds"),
        ('submitted,duration,gpus\n0,"1,5",1\n', "line 2: duration is '1,5'; expected a number"),
        ("submitted,duration,gpus\n0,5,\n", "line 2: gpus is ''; expected a number of GPUs"),
        (
            "JobID    User   Submit   Elapsed\n-------- ------ -------- -------\n1 a b c\n",
            "columns of fixed width.*--parsable2",
        ),
    ],
)
def test_a_table_that_cannot_be_read_says_what_would_do(text, message):
    assert detect_format(text.encode()) == "submissions"
    with pytest.raises(FormatError, match=message):
        read_submissions(text)


def test_the_command_that_is_suggested_prints_what_is_read():
    names = SACCT.rpartition("=")[2].split(",")
    cells = [
        "1",
        "ann",
        "2024-03-01T08:00:00",
        "2024-03-01T08:00:00",
        "60",
        "COMPLETED",
        "gres/gpu=2",
    ]
    assert len(cells) == len(names)
    text = "|".join(names) + "\n" + "|".join(cells) + "\n"
    assert read_submissions(text) == ([(0, 60, 2)], (), ("ann",), ())


@pytest.mark.parametrize(
    "text",
    [
        "stage|instruction|frequency\n",
        "Start|End|User\n",
        '"unended',
    ],
)
def test_other_tables_are_no_jobs(text):
    with pytest.raises(FormatError, match="no known format"):
        detect_format(text.encode())
