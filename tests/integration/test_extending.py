"""The page about extending: its package is installed as a plug-in, and its commands are run."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
SHELL = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the page's package as an installed distribution."""
    root = tmp_path_factory.mktemp("site")
    package = root / "partita_example"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    for block in blocks("python"):
        head, _, body = block.partition("\n")
        (root / head.removeprefix("# ")).write_text(body, encoding="utf-8")
    groups = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info = root / "partita_example-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: partita-example\nVersion: 1.0\n")
    return root


def run(command: str, site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    partita = f"{sys.executable} -m partita"
    return subprocess.run(
        re.sub(r"^partita\b", partita, command),
        shell=True,
        check=False,
        cwd=folder,
        env={**SHELL, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_every_command_of_the_page_runs_with_the_plug_ins(installed: Path, tmp_path: Path) -> None:
    shown = [
        line[2:]
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert len(shown) == 7
    for command in shown:
        done = run(command, installed, tmp_path)
        assert not done.returncode, f"{command}: {done.stderr}"
    assert {path.name for path in tmp_path.glob("*.plan.json")} == {
        "reversed.plan.json",
        "cut.plan.json",
        "halves.plan.json",
        "ops.plan.json",
    }


ENGINE = """
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.fleet.engines.table import engine_names, make_engine
from partita.fleet.policies.resources import servers_of

servers = servers_of(read_shorthand("1x2xv100", load_catalogue()))
engine = make_engine("noting", servers, groups=False)
assert "noting" in engine_names()
print(engine.name, type(engine).__mro__[1].__name__)
"""


@pytest.mark.slow
def test_the_engine_of_the_page_is_made_by_its_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    done = run(f"{sys.executable} engine.py", installed, tmp_path)
    assert done.stdout.split() == ["noting", "LocalEngine"], done.stderr
