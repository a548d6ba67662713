"""The options that a training script must take, and how they are spelt.

Synergy's contract is ``--batch/-b``, ``--workers/-j``, ``--max_iterations`` and ``--data``; its own
sample scripts spell some of them otherwise. A clause lists the spellings of one meaning. Which of
them a script takes is found by runs of one iteration: what the script refuses is spelt otherwise in
the next, until it runs or a clause has no spelling left. Its text is looked at first, so that one
run is enough as a rule.

An option that is given on both sides is the profiler's: the script's own is taken out of its
arguments, so that this does not depend on how it treats repeated options.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from partita.errors import InvalidInputError, WorkerError

_UNKNOWN = re.compile(
    r"(?:unrecogni[sz]ed (?:arguments?|options?)|(?:no such|unknown) (?:option|argument)|"
    r"unknown command line flag|unexpected argument)\W(?P<rest>.+)"
    r"|option (?P<option>-\S+) not recogni[sz]ed",
    re.IGNORECASE,
)
_REQUIRED = re.compile(r"(?:arguments are required:|missing option)\s*(?P<rest>.+)", re.IGNORECASE)
_OPTION = re.compile(r"""(?:^|(?<=[\s'"/:,]))--?[A-Za-z][\w-]*|(?<=')[A-Za-z]\w*(?=')""")


class Clause(StrEnum):
    """What an option of the contract means."""

    BATCH = "batch"
    WORKERS = "workers"
    ITERATIONS = "max_iterations"
    DATA = "data"
    EPOCHS = "epochs"
    JOB_NAME = "job-name"
    LOCAL_RANK = "local_rank"
    NODES = "nnodes"
    NODE_RANK = "node_rank"


SPELLINGS: Mapping[Clause, tuple[str, ...]] = {
    Clause.BATCH: ("-b", "--batch", "--batch-size", "--batch_size"),
    Clause.WORKERS: ("--workers", "-j", "--num-workers", "--num_workers"),
    Clause.ITERATIONS: ("--max-iterations", "--max_iterations"),
    Clause.DATA: ("--data",),
    Clause.EPOCHS: ("--epochs",),
    Clause.JOB_NAME: ("--job-name", "--job_name"),
    Clause.LOCAL_RANK: ("--local_rank", "--local-rank"),
    Clause.NODES: ("--nnodes",),
    Clause.NODE_RANK: ("--node_rank", "--node-rank"),
}
REQUIRED = (Clause.BATCH, Clause.WORKERS, Clause.ITERATIONS, Clause.DATA)
_README_WORDS: Mapping[Clause, str] = {
    Clause.BATCH: "--batch/-b",
    Clause.WORKERS: "--workers/-j",
    Clause.ITERATIONS: "--max_iterations or --max-iterations",
    Clause.DATA: "--data",
    Clause.EPOCHS: "--epochs",
}


def take_option(arguments: Sequence[str], clause: Clause) -> tuple[str | None, list[str]]:
    """Return the last value that arguments give an option, and the arguments without it.

    Known are ``-b 8``, ``-b8``, ``--batch 8`` and ``--batch=8``. What follows ``--`` is not looked
    at.
    """
    value: str | None = None
    rest: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            rest += arguments[index:]
            break
        name, equals, inline = word.partition("=")
        short = next((s for s in SPELLINGS[clause] if len(s) == 2 and _joined(word, s)), None)
        if name in SPELLINGS[clause] and equals:
            value = inline
        elif word in SPELLINGS[clause] and index + 1 < len(arguments):
            index += 1
            value = arguments[index]
        elif short is not None:
            value = word[2:]
        else:
            rest.append(word)
        index += 1
    return value, rest


def _joined(word: str, short: str) -> bool:
    """Return whether a word is a short option and its number in one."""
    return word.startswith(short) and word[2:].isdigit()


def first_spelling(clause: Clause, source: str, arguments: Sequence[str]) -> str | None:
    """Return the spelling to try first: as in the arguments, as quoted in the script's text.

    None where the text is known and quotes none of them.
    """
    given = [word.partition("=")[0] for word in arguments]
    for spelling in SPELLINGS[clause]:
        if spelling in given:
            return spelling
    for spelling in SPELLINGS[clause]:
        if f'"{spelling}"' in source or f"'{spelling}'" in source:
            return spelling
    return None


def refused_options(log: str) -> tuple[str, ...]:
    """Return the options that a script refuses as unknown, in the words of common parsers."""
    found: list[str] = []
    for match in _UNKNOWN.finditer(log):
        found += _OPTION.findall(match.group("rest") or match.group("option"))
    return tuple(dict.fromkeys(found))


def required_options(log: str) -> tuple[str, ...]:
    """Return the options that a script asks for."""
    found: list[str] = []
    for match in _REQUIRED.finditer(log):
        found += _OPTION.findall(match.group("rest"))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a run of one iteration went.

    Attributes:
        failure: What went wrong in one line; empty where nothing did.
        log: What the script printed.
    """

    failure: str
    log: str


@dataclass(slots=True)
class _Search:
    """The spellings in use, and those that are left."""

    script: str
    using: dict[Clause, str]
    left: dict[Clause, list[str]]
    missing: list[Clause] = field(default_factory=list)

    def advance(self, attempt: Attempt, required: Sequence[Clause]) -> bool:
        """Spell what was refused otherwise; returns whether anything changed."""
        refused, changed = refused_options(attempt.log), False
        for clause, spelling in list(self.using.items()):
            if spelling not in refused and spelling.lstrip("-") not in refused:
                continue
            changed = True
            if self.left[clause]:
                self.using[clause] = self.left[clause].pop(0)
                continue
            del self.using[clause]
            if clause in required:
                self.missing.append(clause)
        return self._add_required(attempt) or changed

    def _add_required(self, attempt: Attempt) -> bool:
        wanted, changed = required_options(attempt.log), False
        for clause, spellings in SPELLINGS.items():
            for spelling in spellings:
                if spelling in wanted and clause not in self.using:
                    self.using[clause] = spelling
                    self.left[clause] = []
                    changed = True
        return changed


def find_spellings(
    script: str,
    first: Mapping[Clause, str],
    attempt: Callable[[Mapping[Clause, str]], Attempt],
    *,
    required: Sequence[Clause] = REQUIRED,
    unseen: Sequence[Clause] = (),
) -> Mapping[Clause, str]:
    """Return how a script spells the contract, found by runs of one iteration.

    Args:
        script: Its name, for messages.
        first: The spellings to begin with; clauses that are absent are not passed at all.
        attempt: Runs the script for one iteration with some spellings.
        required: Clauses that the script must take.
        unseen: Those that its text does not name. Whether it takes them is seen by a spelling that
            nobody has: a script that takes that one, too, heeds neither.

    Raises:
        InvalidInputError: The script does not take a required clause; names each.
        WorkerError: It fails for another reason.
    """
    search = _Search(
        script,
        dict(first),
        {clause: [s for s in SPELLINGS[clause] if s != word] for clause, word in first.items()},
    )
    while True:
        result = attempt(dict(search.using))
        if not result.failure and not search.missing:
            doubted = {clause: f"--no-such-{clause}" for clause in unseen if clause in search.using}
            if doubted and not attempt({**search.using, **doubted}).failure:
                raise _lacks(script, list(doubted))
            return search.using
        if search.missing and not refused_options(result.log):
            raise _lacks(script, search.missing)
        if not search.advance(result, required):
            if search.missing:
                raise _lacks(script, search.missing)
            raise WorkerError(f"{script} with one iteration {result.failure}")


def _lacks(script: str, missing: Sequence[Clause]) -> InvalidInputError:
    words = ", ".join(
        _README_WORDS.get(clause, f"--{clause}")
        for clause in sorted(missing, key=list(Clause).index)
    )
    return InvalidInputError(
        f"{script} does not take {words}, which profiling needs; add the option"
        f"{'s' if len(missing) > 1 else ''} to the script"
    )
