"""The commands of docs/tutorial.md run in their order, on its configuration and its script."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
SCRIPTS = ROOT / "examples" / "training"


def test_both_tasks_run_in_few_commands(
    tmp_path: Path, run_page: Callable[[Path], list[list[str]]]
) -> None:
    found = re.search(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    (tmp_path / "config.json").write_text(found.group(1), encoding="utf-8")
    shutil.copy(SCRIPTS / "gpt_ported.py", tmp_path)
    shown = run_page(PAGE)
    planning = [line for line in shown if line[0] in ("advise", "explain", "report", "export")]
    assert 1 <= len(planning) <= 5
    assert (tmp_path / "start" / "megatron" / "megatron_args.sh").is_file()
    assert (tmp_path / "report.html").is_file()


def test_the_ported_script_has_at_most_ten_new_lines() -> None:
    plain = (SCRIPTS / "gpt_plain.py").read_text(encoding="utf-8").splitlines()
    ported = (SCRIPTS / "gpt_ported.py").read_text(encoding="utf-8").splitlines()
    new = [line for line in ported if line not in plain and line.strip()]
    assert "import partita" in new
    assert len(new) <= 10
