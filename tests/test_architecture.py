"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "partita"
COMMON = {"errors", "units"}
HEAVY = {"torch", "numba", "scipy", "numpy", "rich", "yaml", "rustworkx"}

MAY_IMPORT = {
    "core": set(),
    "catalogue": {"core"},
    "formats": {"core"},
    "cost": {"core"},
    "plan": {"core", "cost"},
    "energy": {"core", "cost", "catalogue", "formats"},
    "fleet": {"core", "cost", "catalogue", "processes"},
    "models": {"core", "cost", "catalogue"},
    "processes": set(),
    "ranks": {"processes"},
    "profile": {"core", "cost", "catalogue", "models", "processes", "ranks"},
    "run": {"core", "cost", "catalogue", "models", "profile", "energy", "processes", "ranks"},
    "export": {"core", "cost", "models", "profile", "formats"},
    "documents": {"core", "catalogue", "formats"},
    "flows": {"core", "cost", "plan", "energy", "fleet", "models", "profile", "run", "catalogue"}
    | {"formats", "documents", "ranks"},
    "testing": {"core", "cost", "plan", "run"},
    "report": {"core", "cost", "plan", "flows"},
    "service": {"core", "cost", "plan", "energy", "fleet", "models", "profile", "run", "catalogue"}
    | {"formats", "documents", "flows", "report", "processes", "ranks", "export"},
}
THIRD_PARTY = {
    "core": {"numpy"},
    "catalogue": {"numpy", "yaml"},
    "formats": {"numpy", "yaml"},
    "cost": {"numpy", "numba"},
    "plan": {"numpy", "numba", "scipy", "rustworkx"},
    "models": {"numpy", "torch", "transformers"},
    "processes": set(),
    "ranks": {"torch"},
    "profile": {"numpy", "torch", "rustworkx", "yaml"},
    "run": {"numpy", "torch"},
    "export": {"numpy", "torch"},
    "documents": set(),
    "flows": {"numpy"},
    "testing": {"numpy", "pytest"},
    "report": {"numpy", "rich"},
    "service": {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "numpy"},
    "cli": {"click", "rich", "numpy", "yaml"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module of a file with its line, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
            if part in MAY_IMPORT and inner not in COMMON | {part}:
                assert inner in MAY_IMPORT[part], where
            if part not in ("cli", "__main__"):
                assert inner != "cli", where
                assert inner, f"{where}: import from the defining module"
        elif part in THIRD_PARTY and top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[part], where


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
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
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
    names = "core.solution cost.evaluate cost.simulate plan.table formats.detect flows.compare"
    code = "\n".join(f"import partita.{name}" for name in names.split())
    assert "torch" not in loaded_by(code)
