"""Mutated inputs for the readers of other people's files: none may break a reader, or hold it up.

The files under ``tests/golden/readers`` are changed at random (bytes, lines, numbers, words of
another file; cut, doubled, moved), and each reader must return or raise an error of ours in one
line within a second of CPU time. ``--count`` inputs over all readers, 10,000 unless said otherwise:

    python benchmarks/mutated_inputs.py --check
"""

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.inventory import Completion
from partita.core.codec import parse_json
from partita.documents import formats
from partita.errors import PartitaError
from partita.flows.flight import compare_dumps
from partita.formats.detect import read_any
from partita.formats.flight_recorder import read_flight_dump
from partita.formats.format import Source
from partita.formats.torch_trace import read_torch_trace
from partita.formats.traced_ops import read_traced_ops
from partita.profiler.calibrate.nccl_tests import read_nccl_tests
from partita.trainers.read import read_configuration

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "tests" / "golden" / "readers"
LIMIT_S = 1.0
_NUMBERS = ("0", "-1", "99999999999999999999", "1e309", "nan", "07", "3.5", "0x1f", "")
_WORDS = (
    *(b"\x1b[31m", b"\x00", b"\xff\xfe", b"N/A", b"[N/A]", b"(null)", b"X", b"NV0", b"GPU0"),
    *(b"slots=", b"\t", b"\r\n", b"{", b"}", b"[", b"]", b'"', b"<gpu/>", b"&b;", b"a[1-", b"..."),
)


def _listing(name: str) -> Callable[[bytes, Completion], Any]:
    """Return a reader of one format, whatever a file looks like."""
    row = formats()[name]
    return lambda data, known: row.read(Source(data=data, name="mutated", completion=known))


def _trace(data: bytes, _: Completion) -> object:
    value = parse_json(Source(data=data).text)
    return read_torch_trace(value, name="rank0.json"), read_traced_ops(value)


def _dump(data: bytes, _: Completion) -> object:
    dump = read_flight_dump(data, name="rank_0")
    return compare_dumps({0: dump, 1: dump}).lines()


def _nccl_tests(data: bytes, _: Completion) -> object:
    return read_nccl_tests(Source(data=data).text, path="all_reduce.txt")


def _trainer(data: bytes, _: Completion) -> object:
    return read_configuration(Source(data=data).text)


LISTINGS = ("nvidia-smi", "nccl-topology", "slurm", "kubernetes", "hostfile")
READERS: Mapping[str, Callable[[bytes, Completion], Any]] = {
    **{name: _listing(name) for name in LISTINGS},
    "torch-trace": _trace,
    "flight-recorder": _dump,
    "nccl-tests": _nccl_tests,
    "trainers": _trainer,
}
"""Readers by name; ``tests/golden/readers`` has a folder of files for each."""


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return a file with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_CHANGES)(data, other, rng)
    return data


def _cut(data: bytes, _: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _byte(data: bytes, _: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _word(data: bytes, _: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(_WORDS) + data[at:]


def _number(data: bytes, _: bytes, rng: random.Random) -> bytes:
    starts = [
        at
        for at in range(len(data))
        if data[at : at + 1].isdigit() and not data[max(at - 1, 0) : at].isdigit()
    ]
    if not starts:
        return data
    at = rng.choice(starts)
    end = at
    while data[end : end + 1].isdigit():
        end += 1
    return data[:at] + rng.choice(_NUMBERS).encode() + data[end:]


def _lines(data: bytes, _: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    line = lines.pop(rng.randrange(len(lines)))
    to = rng.randint(0, len(lines))
    return b"".join([*lines[:to], line * rng.choice((0, 1, 2, 50)), *lines[to:]])


def _spliced(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at, start = rng.randint(0, len(data)), rng.randint(0, len(other))
    return data[:at] + other[start : start + rng.randint(0, 200)] + data[at:]


_CHANGES = (_cut, _byte, _word, _number, _lines, _spliced)


def outcome(name: str, count: int, *, seed: int) -> Counter[str]:
    """Return how many mutated inputs of a reader were read and refused.

    Raises:
        AssertionError: One broke the reader, was refused in several lines, or took too long.
    """
    rng = random.Random(f"{seed} {name}")
    files = [path.read_bytes() for path in sorted((FILES / name).iterdir())]
    known = [Completion(catalogue=load_catalogue(), given=given) for given in ("", "a100", "2xt4")]
    counts: Counter[str] = Counter()
    is_quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for _ in range(count):
            data = mutated(rng.choice(files), rng.choice(files), rng)
            counts[_read(name, data, rng.choice(known))] += 1
    finally:
        logging.disable(is_quiet)
    return counts


def _read(name: str, data: bytes, known: Completion) -> str:
    start = time.process_time()
    result, said = "read", ""
    for read in (READERS[name], *((_any,) if name in LISTINGS else ())):
        try:
            read(data, known)
        except PartitaError as exc:
            result, said = "refused", str(exc)
        except Exception as exc:
            raise AssertionError(f"{name} breaks with {exc!r} on {data!r}") from exc
    assert "\n" not in said, f"{name} refuses in several lines: {said}"
    took = time.process_time() - start
    assert took < LIMIT_S, f"{name} takes {took:.1f} s for {data!r}"
    return result


def _any(data: bytes, known: Completion) -> object:
    """Read a file as a command does: by what it looks like."""
    return read_any(data, name="mutated", completion=known, formats=formats())


def main() -> None:
    """Mutate files for all readers and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="inputs over all readers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a reader breaks")
    options = parser.parse_args()
    print(f"{'reader':<20}{'inputs':>8}{'read':>8}{'refused':>9}{'seconds':>9}")
    failed = False
    for name in READERS:
        start = time.perf_counter()
        each = -(-options.count // len(READERS))
        try:
            counts = outcome(name, each, seed=options.seed)
        except AssertionError as exc:
            failed = True
            print(f"{name:<20} {str(exc)[:400]}")
            continue
        took = time.perf_counter() - start
        print(f"{name:<20}{each:>8}{counts['read']:>8}{counts['refused']:>9}{took:>9.1f}")
    if options.check and failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
