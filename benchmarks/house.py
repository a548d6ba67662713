"""The house in figures: how much source there is, and how it hangs together.

Definitions, all from the syntax trees of the ``.py`` files below a source folder (``src/partita``):

* ``docstring``: lines of the docstrings of modules, classes and functions, blank ones in them
  included. ``comments``: lines that hold a comment and nothing else. ``code``: lines that hold
  anything else; the rest is blank.
* ``one importer``: modules, packages' ``__init__`` aside, that exactly one other module imports,
  which lies in the same part (the first folder below the package). An import at any depth counts,
  as does one for type checking; what a string names does not.
* ``private, once``: functions and methods whose name begins with one underscore and that are
  named exactly once besides their definition, in their module or in one that imports them from it.
* ``inner imports``: import statements inside functions.
* ``plan imports``, ``mixed plan imports``, ``help imports``: modules of the package in
  ``sys.modules`` at the end of the commands of ``COMMANDS``, each in a fresh process. The second
  plans for devices that differ, where ``auto`` asks more planners.

With two folders a column is printed for each: before and after. With ``--check`` the exit code is 1
where a plan imports more than ``MOST_IMPORTS``, half of what it did before the house was rebuilt.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from _harness import ROOT

TITLES = {
    "files": "files",
    "lines": "lines",
    "code": "lines of code",
    "docstring": "lines of docstrings",
    "comments": "lines of comments",
    "one_importer": "modules with one importer, in their part",
    "one_importer_lines": "their lines",
    "private_once": "private functions named once",
    "inner_imports": "imports inside functions",
    "plan_imports": "modules that `partita plan` imports",
    "mixed_plan_imports": "the same on a mixed cluster",
    "help_imports": "modules that `partita --help` imports",
}
COMMANDS = {
    "plan_imports": "plan gpt-small -c 4xa100 -p auto --iterations 3 --json -o plan.json",
    "mixed_plan_imports": "plan gpt-small -c 2x4xa100+4xv100 --microbatches 8 --iterations 3",
    "help_imports": "--help",
}
MOST_IMPORTS = 116
BOUNDED = ("plan_imports", "mixed_plan_imports")
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTION)


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        name: Its dotted name, without ``__init__``.
        is_package: Whether it is the ``__init__`` of a folder.
        text: What it holds.
    """

    name: str
    is_package: bool
    text: str

    @property
    def part(self) -> str:
        """The first folder below the package; of a file beside these folders its own name."""
        return ".".join(self.name.split(".")[:2])

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    def line_kinds(self) -> Counter[str]:
        """Return the number of lines of code, docstrings and comments."""
        alone = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
            for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        }
        code, comments = set(), set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            rows = range(token.start[0], token.end[0] + 1)
            if token.type == tokenize.COMMENT:
                comments |= set(rows)
            elif token.type not in _NOT_CODE:
                code |= set(rows)
        code -= alone
        return Counter(code=len(code), docstring=len(alone), comments=len(comments - code - alone))

    def imported(self) -> Iterator[tuple[str, str]]:
        """Yield the modules and names that it imports; the name is empty for a whole module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((one.name, "") for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, one.name) for one in node.names)

    def inner_imports(self) -> int:
        """Return the number of import statements inside functions."""
        inner = {
            id(below)
            for node in ast.walk(self.tree)
            if isinstance(node, _FUNCTION)
            for below in ast.walk(node)
            if isinstance(below, ast.Import | ast.ImportFrom)
        }
        return len(inner)

    def named(self) -> Counter[str]:
        """Return how often each name or attribute is read."""
        return Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        )

    def private_functions(self) -> Counter[str]:
        """Return how often each private function or method is defined, nested ones left out."""
        found: Counter[str] = Counter()
        bodies = [self.tree.body]
        while bodies:
            for node in bodies.pop():
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)
                elif isinstance(node, _FUNCTION) and _is_private(node.name):
                    found[node.name] += 1
        return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules_of(source: Path) -> dict[str, Module]:
    """Return the modules below a folder that is a package, by name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        words = [source.name, *path.relative_to(source).with_suffix("").parts]
        is_package = words[-1] == "__init__"
        name = ".".join(words[:-1] if is_package else words)
        found[name] = Module(name, is_package, path.read_text(encoding="utf-8"))
    return found


def importers_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for where, name in module.imported():
            below = f"{where}.{name}"
            target = below if name and below in modules else where
            if target in modules and target != module.name:
                found[target].add(module.name)
    return found


def one_importer(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules that one module imports, of their own part."""
    importers = importers_of(modules)
    return [
        name
        for name, module in modules.items()
        if not module.is_package
        and len(importers[name]) == 1
        and modules[next(iter(importers[name]))].part == module.part
    ]


def private_once(modules: Mapping[str, Module]) -> list[str]:
    """Return the private functions that are named once besides their definition."""
    named = {name: module.named() for name, module in modules.items()}
    outside: Counter[tuple[str, str]] = Counter()
    for module in modules.values():
        for where, name in module.imported():
            if where in modules and _is_private(name):
                outside[where, name] += named[module.name][name]
    return [
        f"{module.name}.{function}"
        for module in modules.values()
        for function, times in module.private_functions().items()
        if times == 1 and named[module.name][function] + outside[module.name, function] == 1
    ]


def imports_of_command(source: Path, command: str) -> list[str]:
    """Return the package's modules that a command has imported when it ends."""
    code = (
        "import json, os, sys\n"
        f"from {source.name}.cli.main import main\n"
        "out, sys.stdout = sys.stdout, open(os.devnull, 'w')\n"
        "try:\n"
        f"    main({command.split()!r})\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        f"mine = sorted(m for m in sys.modules if (m + '.').startswith('{source.name}.'))\n"
        "print(json.dumps(mine), file=out)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(source.parent)},
        )
    modules: list[str] = json.loads(done.stdout)
    return modules


def figures_of(source: Path) -> dict[str, int]:
    """Return all figures of a source folder, by the keys of ``TITLES``."""
    modules = modules_of(source)
    kinds = sum((module.line_kinds() for module in modules.values()), Counter())
    single = one_importer(modules)
    return {
        "files": len(modules),
        "lines": sum(module.lines for module in modules.values()),
        "code": kinds["code"],
        "docstring": kinds["docstring"],
        "comments": kinds["comments"],
        "one_importer": len(single),
        "one_importer_lines": sum(modules[name].lines for name in single),
        "private_once": len(private_once(modules)),
        "inner_imports": sum(module.inner_imports() for module in modules.values()),
    } | {key: len(imports_of_command(source, command)) for key, command in COMMANDS.items()}


def main() -> None:
    """Print the figures of one source folder, or of two side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[ROOT / "src" / "partita"], help="one or two folders"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a plan imports too much")
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    parser.add_argument("--list", action="store_true", help="print the modules and functions too")
    options = parser.parse_args()
    if len(options.paths) > 2:
        parser.error("expected one or two folders")
    columns = [figures_of(path.resolve()) for path in options.paths]
    if options.json:
        print(json.dumps(columns[0] if len(columns) == 1 else columns, indent=1))
    else:
        _show(options.paths[-1].resolve(), columns, lists=options.list)
    missed = [key for key in BOUNDED if columns[-1][key] > MOST_IMPORTS]
    for key in missed:
        print(f"missed: {TITLES[key]}: above {MOST_IMPORTS}", file=sys.stderr)
    if options.check and missed:
        raise SystemExit(1)


def _show(source: Path, columns: list[dict[str, int]], *, lists: bool) -> None:
    if lists:
        modules = modules_of(source)
        print("one importer:", *one_importer(modules), sep="\n  ")
        print("private, named once:", *private_once(modules), sep="\n  ")
    for key, title in TITLES.items():
        print(f"{title:<42}" + "".join(f"{column[key]:>10,}" for column in columns))
    print("ok " + " ".join(f"{key}={value}" for key, value in columns[-1].items()))


if __name__ == "__main__":
    main()
