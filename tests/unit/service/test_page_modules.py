"""The modules of the page: their form, their size, and what node says of them."""

import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from partita.report.page import MODULES, STYLES, static_text
from partita.service.ui.router import OWN_MODULES

MOST_BYTES = 200_000
NODE = shutil.which("node")
TESTS = Path(__file__).parent / "static" / "ui.test.mjs"
STATIC = files("partita.service.ui").joinpath("static")


def text_of(name: str) -> str:
    return STATIC.joinpath(name).read_text(encoding="utf-8")


def test_all_files_are_served_and_no_other_is_there() -> None:
    assert {each.name for each in STATIC.iterdir()} == set(OWN_MODULES)


def test_scripts_and_styles_of_report_and_page_are_small() -> None:
    own = sum(len(text_of(name).encode()) for name in OWN_MODULES)
    assert own + sum(len(static_text(name).encode()) for name in (*MODULES, *STYLES)) <= MOST_BYTES


@pytest.mark.parametrize("name", [name for name in OWN_MODULES if name.endswith(".js")])
def test_modules_import_in_single_lines_and_make_no_markup(name: str) -> None:
    text = text_of(name)
    known = {*(f"./{each}" for each in OWN_MODULES), *(f"./report/{each}" for each in MODULES)}
    imports = re.findall(r"^import .*$", text, re.MULTILINE)
    for line in imports:
        found = re.fullmatch(r'import \{ [\w, ]+ \} from "(.+)";', line)
        assert found, line
        assert found[1] in known, line
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http:",
    ):
        assert word not in text
    assert 'setAttribute("style"' not in text


def test_the_shell_has_no_script_or_style_of_its_own() -> None:
    text = text_of("index.html")
    assert not re.search(r"<script[^>]*>[^<]", text)
    assert "<style" not in text
    assert not re.search(r"\son\w+=", text)
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', text)) == {
        "data:,",
        "/ui/static/report/style.css",
        "/ui/static/ui.css",
        "/ui/static/ui.js",
    }


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_modules_compute_what_their_tests_say(tmp_path: Path) -> None:
    assert NODE is not None
    static = tmp_path / "static"
    shutil.copytree(str(STATIC), static)
    shutil.copytree(str(files("partita.report").joinpath("static")), static / "report")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    found = subprocess.run(
        [NODE, "--test", str(TESTS)],
        env={**os.environ, "PARTITA_STATIC": str(static)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout
