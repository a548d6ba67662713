"""Lists of scripts to profile are decoded by the fields of the request."""

import pytest

from partita.errors import FormatError
from partita.flows.fleet.profile import ProfileScriptRequest, read_job_list

LIST = """\
defaults: {cpu: 2, batch: 8}
jobs:
  - {script: a/one.py, args: "--data 'x y'", num_gpus: 2}
  - {script: two.py, job-name: second, cpu: 4, image: torch}
"""


def test_options_of_a_job_win_over_the_defaults_of_the_list() -> None:
    one, two = read_job_list(LIST, "jobs.yaml", ProfileScriptRequest(output="here", repeats=3))
    assert (one.script, one.job_name) == (("a/one.py", "--data", "x y"), "one")
    assert (one.cpu, one.batch_size, one.num_gpus) == (2, 8, 2)
    assert (two.job_name, two.cpu, two.docker_img, two.num_gpus) == ("second", 4, "torch", 1)
    assert {(job.output, job.repeats) for job in (one, two)} == {("here", 3)}


def test_what_is_given_wins_over_the_list_also_where_it_is_the_default() -> None:
    request = ProfileScriptRequest(num_gpus=1, cpu=None)
    one, two = read_job_list(LIST, "jobs.yaml", request, given=("num_gpus", "cpu"))
    assert (one.num_gpus, one.cpu, two.cpu, two.batch_size) == (1, None, None, 8)


def test_folders_of_results_are_no_keys_of_a_job() -> None:
    with pytest.raises(FormatError, match=r"jobs.yaml:1:.*'output'"):
        read_job_list("jobs: [{script: x, output: y}]", "jobs.yaml", ProfileScriptRequest())
