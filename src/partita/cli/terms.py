"""Words of tables and lines, and what they mean: the footnotes of ``--explain-terms``.

``docs/glossary.md`` has the same words.
"""

import re
import sys
import textwrap
from typing import Any, NamedTuple, TextIO

import click


class Term(NamedTuple):
    """A word that results use.

    Attributes:
        word: The word, or several that belong together.
        meaning: What it means, without an end.
        pattern: What finds it in a result; empty = the word itself.
    """

    word: str
    meaning: str
    pattern: str = ""


TERMS = (
    Term(
        "step",
        "one update of the weights: all microbatches, forward and backward, and the optimizer",
    ),
    Term(
        "microbatch",
        "the samples that pass through the stages together; a step has `--microbatches` of them",
        r"microbatch(es)?",
    ),
    Term(
        "stage, replica",
        "a part of the model that runs as one unit; copies of it that share the microbatches",
        r"(stages?|replicas?)",
    ),
    Term(
        "2 stages (8-4)",
        "two stages, the first on 8 devices, the second on 4",
        r"stages? \(\d+(-\d+)+\)",
    ),
    Term("busy", "share of a step in which devices compute"),
    Term("bubble", "share of a step in which a device does not compute"),
    Term(
        "network",
        "time in which a device does not compute while a message or collective is under way; the "
        "rest of the bubble is idle",
    ),
    Term(
        "MFU",
        "model FLOP utilisation: the share of the devices' peak rate that the arithmetic of the "
        "model reaches, by the precision that the costs assume",
    ),
    Term(
        "vs bound, gap",
        "how far a plan is above what no plan of the same problem can beat",
        r"(vs bound|gap|no plan can beat)",
    ),
    Term(
        "work over speed",
        "a lower bound: all work, divided by the speed of all devices together",
    ),
    Term(
        "assignment LP",
        "a lower bound: the best that devices of different speed could do if work could be split "
        "at will, by a linear program",
    ),
    Term(
        "critical path",
        "the chain of instructions of which each waits for the one before; the step is as long as "
        "it",
    ),
    Term(
        "peak / memory",
        "the most that the fullest device holds, and what it may hold",
        r"(peak / memory|peak)",
    ),
    Term(
        "reserve",
        "share of a GPU's memory that plans leave free for what no model of memory knows "
        "(`--reserve`)",
        r"reserved?",
    ),
    Term(
        "1f1b, gpipe, zero-bubble, ...",
        "orders of forwards and backwards ([program.md](program.md))",
        r"(1f1b|gpipe|interleaved-1f1b|zero-bubble|split-1f1b|early-recompute-1f1b)",
    ),
    Term(
        "sharded (optimizer, gradients, parameters)",
        "replicas divide that state instead of copying it, as ZeRO 1, 2 and 3 do",
        r"sharded|zero ?[123]",
    ),
    Term(
        "tp, pp, dp, cp, ep",
        "degrees: devices that divide each tensor, stages of the pipeline, replicas, parts of a "
        "sequence, groups of experts; b is the size of a microbatch",
        r"(tp|pp|dp|cp|ep) ?\d+",
    ),
    Term(
        "measured on a busy machine",
        "other programs ran while it was measured: such times are too long, and differ from one "
        "measurement to the next",
        r"unreliable",
    ),
    Term(
        "T*, T_min, all-max",
        "the step time of least energy; the shortest step time; all devices at their highest "
        "clocks ([energy.md](energy.md))",
        r"(T\*|T_min|all-max)",
    ),
    Term(
        "fair (of a fleet)",
        "Jain's index of how evenly jobs are slowed down; 1 = all alike",
        r"fair",
    ),
    Term(
        "stops, moves",
        "jobs that were stopped before their end; jobs that went on elsewhere",
        r"(stops|moves)",
    ),
)


def terms_of(text: str) -> list[Term]:
    """Return the words that a text uses, in the order of the table.

    >>> [term.word for term in terms_of("MFU 38 %, gap 2 %")]
    ['MFU', 'vs bound, gap']
    """
    return [
        term
        for term in TERMS
        if re.search(rf"(?<!\w)({term.pattern or re.escape(term.word)})(?!\w)", text)
    ]


class _Heard:
    """A stream that remembers what is written to it; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        """Write a text, and remember it."""
        written = self._stream.write(text)  # refuses bytes, by which click asks what it is
        self.texts.append(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def explain_terms(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Say below the result what its words mean; below JSON on stderr."""
    if not value or ctx.resilient_parsing:
        return
    stream = sys.stdout
    heard: Any = _Heard(stream)
    sys.stdout = heard  # what it has not itself is the stream's

    def end() -> None:
        sys.stdout = stream
        lines = footnotes("".join(heard.texts))
        if lines:
            click.echo("\n".join(["words:", *lines]), err=bool(ctx.params.get("as_json")))

    ctx.call_on_close(end)


def footnotes(text: str, width: int = 0) -> list[str]:
    """Return what the words of a text mean, wrapped to a width; 0 = the terminal's."""
    from partita.cli.console import terminal_width  # noqa: PLC0415 (only where it is asked for)

    width = width or terminal_width()
    lines: list[str] = []
    for term in terms_of(text):
        meaning = re.sub(r"\[([^]]*)\]\(\1\)", r"docs/\1", term.meaning).replace("`", "")
        lines += textwrap.wrap(
            f"{term.word}: {meaning}", width, initial_indent="  ", subsequent_indent="    "
        )
    return lines
