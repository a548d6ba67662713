"""The options that a script must take, and how their spelling is found."""

import pytest

from partita.errors import InvalidInputError, WorkerError
from partita.fleet.profiler.contract import (
    SPELLINGS,
    Attempt,
    Clause,
    find_spellings,
    first_spelling,
    refused_options,
    required_options,
    take_option,
)

FIRST = {
    Clause.BATCH: "-b",
    Clause.WORKERS: "--workers",
    Clause.ITERATIONS: "--max-iterations",
    Clause.DATA: "--data",
}


def test_a_script_that_takes_any_option_is_asked_for_those_its_text_does_not_name():
    def takes_anything(_):
        return Attempt("", "")

    def takes_spellings(spellings):
        unknown = [word for word in spellings.values() if word.startswith("--no-such")]
        return (
            Attempt("failed", f"unrecognized arguments: {unknown[0]}")
            if unknown
            else Attempt("", "")
        )

    unseen = (Clause.WORKERS,)
    with pytest.raises(InvalidInputError, match="does not take --workers/-j"):
        find_spellings("x.py", FIRST, takes_anything, unseen=unseen)
    assert find_spellings("x.py", FIRST, takes_anything) == FIRST
    assert find_spellings("x.py", FIRST, takes_spellings, unseen=unseen) == FIRST


@pytest.mark.parametrize(
    ("words", "value", "rest"),
    [
        (["--amp", "-b", "512", "--x"], "512", ["--amp", "--x"]),
        (["-b512"], "512", []),
        (["--batch=8", "--batch_size", "16"], "16", []),
        (["--batches", "8"], None, ["--batches", "8"]),
        (["-bf16"], None, ["-bf16"]),
        (["--", "-b", "1"], None, ["--", "-b", "1"]),
        (["x", "-b"], None, ["x", "-b"]),
    ],
)
def test_a_value_is_taken_out_of_the_arguments(words, value, rest):
    assert take_option(words, Clause.BATCH) == (value, rest)


@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("x.py: error: unrecognized arguments: --workers 3 -b 512", ("--workers", "-b")),
        ("x.py: error: unrecognized arguments: --data /mnt/data/-b/x", ("--data", "-b")),
        ("Error: No such option: --max-iterations", ("--max-iterations",)),
        ("Error: No such option '--data'.", ("--data",)),
        ("FATAL Flags parsing error: Unknown command line flag 'workers'", ("workers",)),
        ("getopt.GetoptError: option --workers not recognized", ("--workers",)),
        ("RuntimeError: no GPU", ()),
    ],
)
def test_what_parsers_refuse_is_understood(log, options):
    assert set(options) <= set(refused_options(log))
    assert bool(options) == bool(refused_options(log))


def test_what_a_parser_requires_is_understood():
    log = "x.py: error: the following arguments are required: --local_rank, --lr"
    assert required_options(log) == ("--local_rank", "--lr")


def test_the_spelling_of_the_arguments_goes_before_that_of_the_text():
    text = 'parser.add_argument("--max_iterations")'
    assert first_spelling(Clause.ITERATIONS, text, []) == "--max_iterations"
    assert first_spelling(Clause.ITERATIONS, text, ["--max-iterations=3"]) == "--max-iterations"
    assert first_spelling(Clause.JOB_NAME, text, []) is None


class Script:
    """A script that takes some options, as argparse would have it."""

    def __init__(self, *takes, requires=(), failure="ended with exit code 1"):
        self.takes, self.requires, self.failure = takes, requires, failure
        self.runs = []

    def __call__(self, spellings):
        self.runs.append(dict(spellings))
        refused = [word for word in spellings.values() if word not in self.takes]
        missing = [word for word in self.requires if word not in spellings.values()]
        if missing:
            return Attempt("failed", f"error: the following arguments are required: {missing[0]}")
        if refused:
            return Attempt("failed", f"error: unrecognized arguments: {' 1 '.join(refused)} 1")
        return Attempt("" if not self.failure else self.failure, "Traceback")


def test_spellings_that_are_refused_are_replaced():
    script = Script("--batch_size", "-j", "--max_iterations", "--data", failure="")
    found = find_spellings("x.py", FIRST, script)
    assert found == {
        Clause.BATCH: "--batch_size",
        Clause.WORKERS: "-j",
        Clause.ITERATIONS: "--max_iterations",
        Clause.DATA: "--data",
    }
    assert len(script.runs) == 4  # all refused ones are replaced at once


def test_every_missing_option_is_named_at_once():
    script = Script("-b", "--data", failure="")
    with pytest.raises(InvalidInputError, match=r"x\.py.*--workers/-j, --max_iter"):
        find_spellings("x.py", FIRST, script)


def test_an_option_that_need_not_be_taken_is_left_out():
    script = Script("-b", "--workers", "--max-iterations", "--data", failure="")
    found = find_spellings("x.py", {**FIRST, Clause.JOB_NAME: "--job-name"}, script)
    assert Clause.JOB_NAME not in found


def test_an_option_that_the_script_requires_is_added():
    takes = ("-b", "--workers", "--max-iterations", "--data", "--local_rank")
    script = Script(*takes, requires=("--local_rank",), failure="")
    assert find_spellings("x.py", FIRST, script)[Clause.LOCAL_RANK] == "--local_rank"


def test_another_failure_is_that_of_the_script():
    script = Script(*FIRST.values())
    with pytest.raises(WorkerError, match=r"exit.*1"):
        find_spellings("x.py", FIRST, script)
    assert len(script.runs) == 1


def test_the_script_refusing_its_own_argument_is_a_failure():
    def attempt(_):
        return Attempt("ended with exit code 2", "error: unrecognized arguments: --dali")

    with pytest.raises(WorkerError, match="exit code 2"):
        find_spellings("x.py", FIRST, attempt)


def test_no_spelling_belongs_to_two_clauses():
    spellings = [word for words in SPELLINGS.values() for word in words]
    assert len(spellings) == len(set(spellings))
