"""What a script is told: the profiler's values before its own."""

import pytest

from partita.errors import InvalidInputError
from partita.fleet.profiler.contract import Clause
from partita.fleet.profiler.request import ProfileRequest, script_options
from partita.fleet.profiler.runner import Ranks

SPELLINGS = {
    Clause.BATCH: "-b",
    Clause.WORKERS: "--workers",
    Clause.ITERATIONS: "--max-iterations",
    Clause.DATA: "--data",
}


@pytest.fixture
def request_of(tmp_path):
    def make(*arguments, **changes):
        script = tmp_path / "train.py"
        script.write_text("'--job-name' '--max_iterations'")
        return ProfileRequest(script=script, arguments=arguments, **changes)

    return make


def told(request, spellings=SPELLINGS, cpus=6, **changes):
    options = script_options(request, request.script.read_text())
    settings = {"name": "job_cpu_6", "cpus": cpus, "iterations": options.iterations, **changes}
    return options.arguments(spellings, request.ranks, **settings)


def test_an_option_on_both_sides_is_the_profilers(request_of):
    request = request_of(
        "--amp", "-b512", "--workers=3", "--max-iterations", "50", "--data", "a", "--lr", "1",
        batch_size=64, iterations=20, data="b",
    )  # fmt: skip
    assert told(request) == [
        "--amp", "--lr", "1", "-b", "64", "--workers", "6", "--max-iterations", "20", "--data", "b",
    ]  # fmt: skip


def test_the_scripts_own_values_hold_where_the_profiler_has_none(request_of):
    request = request_of("-b", "512", "--max_iterations", "7", "--data=a", "--epochs", "3")
    assert told(request) == [
        "--epochs", "3", "-b", "512", "--workers", "6", "--max-iterations", "7", "--data", "a",
    ]  # fmt: skip


def test_nothing_said_gives_the_usual_values(request_of):
    options = script_options(request_of(), "")
    assert (options.batch_size, options.iterations, options.data) == (256, 50, "./")


def test_epochs_are_forced_where_they_are_given(request_of):
    options = script_options(request_of("--epochs", "9", epochs=2), "")
    assert options.rest == ()
    assert Clause.EPOCHS in options.required


def test_workers_follow_the_cpus_of_a_rank_unless_they_are_given(request_of):
    options = script_options(request_of(), "")
    counts = [(6, 4), (24, 4), (1, 4), (1.5, 1), (0.25, 1)]
    assert [options.workers_at(n, Ranks(per_node=g)) for n, g in counts] == [1, 6, 1, 2, 1]
    assert script_options(request_of(workers=5), "").workers_at(24, Ranks()) == 5


def test_ours_stand_before_a_double_dash(request_of):
    assert told(request_of("x", "--", "y"), {Clause.BATCH: "-b"}) == ["x", "-b", "256", "--", "y"]


def test_spellings_are_those_of_the_text(request_of):
    request = request_of()
    options = script_options(request, request.script.read_text())
    assert options.first[Clause.ITERATIONS] == "--max_iterations"
    assert options.first[Clause.JOB_NAME] == "--job-name"
    assert Clause.LOCAL_RANK not in options.first


def test_a_batch_size_that_is_no_number_is_refused(request_of):
    with pytest.raises(InvalidInputError, match=r"'many'.*script"):
        script_options(request_of("-b", "many"), "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "cannot name a folder"),
        ({"ranks": Ranks(nodes=2, node_rank=2), "max_cpus": 1}, "expected 0 to 1"),
        ({"ranks": Ranks(nodes=2)}, "name the top of the sweep by --cpu"),
    ],
)
def test_requests_that_cannot_be_are_refused(request_of, changes, message):
    with pytest.raises(InvalidInputError, match=message):
        request_of(**changes)


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="is no file"):
        ProfileRequest(script=tmp_path / "none.py")
