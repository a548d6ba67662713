"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "partita"
COMMON = {"errors", "units", "names", "plugins", "atomic_files"}
HEAVY = {"torch", "numba", "scipy", "numpy", "rich", "yaml", "rustworkx"}

PAGE = Path(__file__).resolve().parent.parent / "docs" / "design.md"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _names(cell: str) -> set[str]:
    return {name.strip(" `") for name in cell.split(",") if name.strip()}


def read_table() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return from the page what each room may import, of ours and of others."""
    text = PAGE.read_text(encoding="utf-8")
    body = text.split("| room | holds |", 1)[1].split("\n\n", 1)[0]
    rows = [_cells(line) for line in body.splitlines()[2:]]
    ours = {row[0].strip("`"): _names(row[2]) for row in rows}
    return ours, {row[0].strip("`"): _names(row[3]) for row in rows}


MAY_IMPORT, THIRD_PARTY = read_table()
EVERYTHING = {"everything"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Return the imports and calls of a file, also inside functions; a file is parsed once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = (ast.Import, ast.ImportFrom, ast.Call)
    return tuple(node for node in ast.walk(tree) if isinstance(node, wanted))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module of a file with its line, also inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_parts_import_only_what_they_may(path: Path) -> None:
    part = part_of(path)
    for name, line in imports(path):
        top, _, rest = name.partition(".")
        where = f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        if top == "partita":
            inner = rest.split(".")[0]
            allowed = MAY_IMPORT.get(part, EVERYTHING)
            if allowed != EVERYTHING and inner not in COMMON | {part}:
                assert inner in allowed, where
            if part not in ("cli", "__main__"):
                assert inner != "cli", where
                assert inner, f"{where}: import from the defining module"
        elif part in THIRD_PARTY and top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[part], where


def test_every_room_is_on_the_page() -> None:
    found = {part_of(path) for path in modules()} - {"__init__", "__main__"} - COMMON
    assert found == set(MAY_IMPORT)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    names = {
        ".".join(["partita", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in modules()
    }
    for name, path in names.items():
        found = set()
        for target, _ in imports(path):
            if target in names:
                found.add(target)
            elif f"{target}.__init__" in names and target != "partita":
                found.add(f"{target}.__init__")
        graph[name] = found - {name}
    done: set[str] = set()
    while True:
        free = {n for n, needs in graph.items() if n not in done and needs <= done}
        if not free:
            break
        done |= free
    assert set(graph) == done, f"import circle among {sorted(set(graph) - done)}"


def test_only_cli_prints() -> None:
    for path in modules():
        if part_of(path) in ("cli", "__main__"):
            continue
        calls = [
            node.lineno
            for node in nodes(path)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
        ]
        assert not calls, f"{path}: print at lines {calls}"


def loaded_by(code: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has loaded after some code."""
    script = f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


def test_importing_partita_is_light() -> None:
    assert not loaded_by("import partita") & HEAVY


def test_help_imports_nothing_heavy() -> None:
    code = (
        "from partita.cli.main import main\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try: main(['--help'])\n"
        "    except SystemExit as stop: assert not stop.code\n"
    )
    assert not loaded_by(code) & HEAVY


def test_planning_a_saved_graph_imports_no_torch(tmp_path: Path) -> None:
    plan, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    code = (
        "import contextlib, io\n"
        "from partita.catalogue.examples import example\n"
        "from partita.documents import save\n"
        "from partita.cli.main import main\n"
        f"save(example('resnet50').graph, {str(graph)!r})\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main(['plan', {str(graph)!r}, '-c', '4xa100', '-o', {str(plan)!r}, '-q'])\n"
        "    except SystemExit as stop: assert not stop.code, stop.code\n"
    )
    assert "torch" not in loaded_by(code)
    assert plan.exists()


def test_planning_parts_import_no_torch() -> None:
    names = "core.solution cost.judge cost.predict planners.table formats.detect flows.compare"
    code = "\n".join(f"import partita.{name}" for name in names.split())
    assert "torch" not in loaded_by(code)
