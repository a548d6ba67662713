"""Kernels: the same interpreted and compiled, compiled where it pays, never from a stale cache."""

import ast
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from partita import kernels
from partita.kernels import Threshold, as_lists, compiled, kernel, pays, run

FACTOR = 3.0


class Table(NamedTuple):
    """Columns of the kernels below."""

    weight: object
    total: object
    num_rows: int = 2


@kernel
def _scaled(table, row):
    return FACTOR * table.weight[row]


@kernel
def _add_up(given, start, table):
    for row in range(given.num_rows):
        table.total[row] += start + _scaled(given, row)
    return given.num_rows


def small_table():
    return Table(np.array([0.1, 0.2]), np.zeros(2))


class Filled(NamedTuple):
    """Columns that are changed."""

    total: object


def test_a_kernel_is_the_function_itself():
    assert _scaled(Table([2.0], [0.0]), 0) == 6.0
    assert _scaled.__name__ == "_scaled"


@pytest.mark.parametrize("size", [0, 10**6])
def test_a_kernel_fills_named_tuples_interpreted_and_compiled(size):
    filled = Filled(np.zeros(2))
    assert run(_add_up, size, (small_table(), 1.0), (filled,)) == 2
    assert filled.total.tolist() == [1.0 + 3.0 * 0.1, 1.0 + 3.0 * 0.2]


def test_columns_with_gaps_are_closed_and_not_compiled_for():
    known = [*compiled(_add_up).signatures]
    gaps = Table(np.array([[0.1, 9.0], [0.2, 9.0]])[:, 0], np.zeros((2, 2))[:, 0])
    filled = Filled(np.zeros(2))
    assert run(_add_up, 10**6, (gaps, 1.0), (filled,)) == 2
    assert filled.total.tolist() == [1.0 + 3.0 * 0.1, 1.0 + 3.0 * 0.2]
    assert len(compiled(_add_up).signatures) == max(1, len(known))


@kernel
def _at(column, row):
    return column[row] if row >= 0 else 0.0


@kernel
def _last_above(column, least):
    found = -1
    for row in range(len(column)):
        if _at(column, row) > least:
            found = row
    return _at(column, found)


def test_a_kernel_that_is_called_is_compiled_once_whatever_its_arguments_begin_as():
    assert compiled(_last_above)(np.array([1.0, 3.0, 2.0]), 1.5) == 2.0
    assert compiled(_last_above)(np.array([1.0]), 1.5) == 0.0
    # Again, since what was called may have come from the cache.
    numba = pytest.importorskip("numba")
    caller = kernels._compile(_last_above, is_entry=False)
    caller.compile((numba.float64[::1], numba.float64))
    (signature,) = kernels._callees[_at].signatures
    assert str(signature[1]) == "int64"


def test_arrays_become_lists_wherever_they_are():
    class Outer(NamedTuple):
        table: Table
        number: object
        word: str

    outer = as_lists(Outer(small_table(), np.float64(2.0), "x"))
    assert outer == Outer(Table([0.1, 0.2], [0.0, 0.0]), 2.0, "x")
    assert type(outer.number) is float


@kernel
def _nothing(column):
    column[0] = 1.0


def test_it_pays_from_a_size_on():
    limit = Threshold(size=100)
    assert pays(_nothing, 100, limit)
    assert not pays(_nothing, 99, limit)


def test_it_pays_after_many_small_inputs():
    @kernel
    def fresh(column):
        column[0] = 1.0

    limit = Threshold(size=100, total=150)
    assert [pays(fresh, 60, limit) for _ in range(4)] == [False, False, False, True]


def test_it_pays_once_loaded_where_the_family_says_so():
    @kernel
    def fresh(column):
        column[0] = 1.0

    assert not pays(fresh, 1, Threshold(loaded=True))
    compiled(fresh)
    assert pays(fresh, 1, Threshold(loaded=True))
    assert not pays(fresh, 1, Threshold())


CALLEE = """
from typing import NamedTuple
from partita.kernels import kernel

SHIFT = {shift}

class Row(NamedTuple):
    {first}: object
    {second}: object

@kernel
def part(row):
    return {factor} * row.a[0] + row.b[0]
"""
ENTRY = """
from {callee} import SHIFT, Row, part
from partita.kernels import kernel

@kernel
def entry(row):
    return part(row) + SHIFT
"""


def load(path: Path, name: str) -> ModuleType:
    """Return a module as a new process would see it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


class Pair:
    """An entry in one file and what it calls and knows in another."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self._folder = folder
        self._name = "kernels_" + folder.name.replace("-", "_")
        (folder / "entry.py").write_text(ENTRY.format(callee=self._name))
        monkeypatch.setitem(sys.modules, self._name, None)
        monkeypatch.setitem(sys.modules, self._name + "_entry", None)

    def answer(self, *, factor=2.0, shift=0.0, fields=("a", "b")) -> float:
        """Return what the entry says, compiled or from the cache, with a callee written anew."""
        text = CALLEE.format(factor=factor, shift=shift, first=fields[0], second=fields[1])
        path = self._folder / "callee.py"
        path.write_text(text)
        callee = load(path, self._name)
        entry = load(self._folder / "entry.py", self._name + "_entry").entry
        row = callee.Row(a=np.array([10.0]), b=np.array([1.0]))
        self.twin = compiled(entry)
        return self.twin(row)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    return Pair(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"factor": 5.0}, 51.0), ({"shift": 0.5}, 21.5), ({"fields": ("b", "a")}, 21.0)],
)
def test_a_change_in_another_file_is_seen(pair, change, expected):
    assert pair.answer() == 21.0
    assert pair.answer(**change) == expected
    assert sum(pair.twin.stats.cache_hits.values()) == 0


def test_what_has_not_changed_comes_from_the_cache(pair):
    assert pair.answer() == pair.answer() == 21.0
    assert sum(pair.twin.stats.cache_hits.values()) == 1


def test_without_the_digest_the_cache_would_be_stale(pair, monkeypatch):
    """What the digest is for: Numba looks at the file of the entry alone."""
    monkeypatch.setattr(kernels, "_digest", lambda function: "same")
    assert pair.answer() == 21.0
    assert pair.answer(factor=5.0) == 21.0


def test_kernels_run_where_no_cache_can_be_written(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    @kernel
    def fresh(column):
        column[0] = 4.0

    monkeypatch.setattr(kernels, "_digest", refuse)
    column = np.zeros(1)
    run(fresh, math.inf, (), (column,))
    assert column.tolist() == [4.0]


def test_small_inputs_do_not_import_numba():
    code = (
        "import sys, numpy as np\n"
        "import partita.energy.frontier.frontier, partita.fleet.policies.table\n"
        "from partita.program.order import longest_levels\n"
        "longest_levels(np.array([0]), np.array([1]), 2)\n"
        "sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


PROBE = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_only_one_process_compiles_a_kernel_at_a_time(tmp_path):
    lock = tmp_path / "cache" / "kernel.lock"

    def is_taken(_: object = None) -> bool:
        probe = [sys.executable, "-S", "-c", PROBE, str(lock)]
        return subprocess.run(probe, capture_output=True, check=False).returncode != 0

    assert kernels._in_turn(is_taken, lock)("a signature")
    assert not is_taken()


def test_a_kernel_is_compiled_where_there_can_be_no_lock():
    assert kernels._in_turn(str, Path("/proc/nowhere/kernel.lock"))(7) == "7"


def test_seconds_of_compilation_are_counted_once(tmp_path, monkeypatch):
    clock = iter((10.0, 13.0, 20.0, 24.0))
    monkeypatch.setattr(kernels, "_stopwatch", kernels._Stopwatch())
    monkeypatch.setattr(kernels.time, "monotonic", lambda: next(clock))
    inner = kernels._in_turn(str, tmp_path / "inner.lock")
    kernels._in_turn(inner, tmp_path / "outer.lock")(7)
    assert kernels.compiling_s() == 3.0
    inner(7)
    assert kernels.compiling_s() == 7.0


SOURCE = Path(kernels.__file__).parent


def is_kernel(function):
    marks = (getattr(mark, "func", mark) for mark in function.decorator_list)
    return any(isinstance(mark, ast.Name) and mark.id == "kernel" for mark in marks)


def bare_calls(files):
    """Return the calls of kernels that neither a kernel makes nor the dispatcher."""
    trees = {name: ast.parse(text) for name, text in files.items()}
    functions = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for name, tree in trees.items()
    }
    marked = {name: {f.name for f in found if is_kernel(f)} for name, found in functions.items()}
    bare = []
    for name, tree in trees.items():
        known = set(marked[name])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known |= {a.name for a in node.names} & marked.get(node.module, set())
        for function in functions[name]:
            if not is_kernel(function):
                bare += [
                    f"{name}:{call.lineno} calls {call.func.id}"
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and call.func.id in known
                ]
    return bare


def test_kernels_are_called_through_the_dispatcher():
    files = {
        ".".join(("partita", *path.relative_to(SOURCE).with_suffix("").parts)): path.read_text()
        for path in SOURCE.rglob("*.py")
        if "kernel" in path.read_text()
    }
    # A bare call is right and interpreted, which nobody notices until a benchmark does.
    assert bare_calls(files) == []


def test_a_bare_call_of_a_kernel_is_found():
    home = "@kernel\ndef walk(x): pass\n\n@kernel(inline=True)\ndef run(x): walk(x)\n"
    user = "from home import walk\n\ndef use(x):\n    compiled(walk)(x)\n    walk(x)\n"
    assert bare_calls({"home": home, "user": user}) == ["user:5 calls walk"]
