"""Stories: what somebody who has never heard of us types, and the one line that answers it.

A story names its page. The page shows the story's commands, all of them and no others, so that one
run proves both.
"""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORIES = sorted(Path(__file__).parent.glob("*.story"))
LAB = """\
user,submitted,gpus,duration_s,model
ann,0,1,7200,resnet50
bob,600,2,3600,our-own-net
ann,900,4,1800,bert
cid,1200,1,36,gnmt
cid,1300,8,10800,our-own-net
bob,1400,1,720,resnet50
bob,1500,3,3600,lstm
"""


class Story(NamedTuple):
    """What is typed, each with a pattern of the line that answers, and the page that shows it."""

    page: Path
    typed: list[str]
    answers: list[str]


def read(file: Path) -> Story:
    lines = file.read_text(encoding="utf-8").splitlines()
    (page,) = [line.removeprefix("page ") for line in lines if line.startswith("page ")]
    typed = [line[2:] for line in lines if line.startswith("$ ")]
    answers = [line[2:] for line in lines if line.startswith("= ")]
    assert len(typed) == len(answers) > 0
    return Story(ROOT / page, typed, answers)


def commands_of(page: Path) -> list[str]:
    """Return the commands that a page shows."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line[2:].partition("  #")[0].strip() for line in lines if line.startswith("$ partita")]


def provide(folder: Path) -> None:
    """Put what the stories' people have into their folder."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    found = re.search(r"```json\n(.*?)```", tutorial, flags=re.DOTALL)
    assert found is not None
    (folder / "config.json").write_text(found.group(1), encoding="utf-8")
    (folder / "lab.csv").write_text(LAB, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "training" / "gpt_ported.py", folder)


@pytest.mark.slow
@pytest.mark.parametrize("file", STORIES, ids=lambda file: file.stem)
def test_a_story_is_answered_line_by_line(
    file: Path, tmp_path: Path, commands: Callable[..., object]
) -> None:
    provide(tmp_path)
    story = read(file)
    for line, answer in zip(story.typed, story.answers, strict=True):
        done = commands.run(*shlex.split(line)[1:], folder=tmp_path, COLUMNS="100")
        assert done.returncode == 0, f"{line}: {done.stderr}"
        shown = done.stdout + done.stderr
        assert re.search(answer, shown, flags=re.MULTILINE), f"{line}\n{shown}"
        assert "Traceback" not in shown


def test_pages_show_the_commands_of_their_stories_and_no_others() -> None:
    stories = [read(file) for file in STORIES]
    for page in {story.page for story in stories}:
        typed = [line for story in stories if story.page == page for line in story.typed]
        assert sorted(commands_of(page)) == sorted(typed), page


def test_a_model_is_planned_and_a_script_trained_in_at_most_five_commands() -> None:
    for name in ("llama_config", "own_script"):
        assert len(read(Path(__file__).with_name(f"{name}.story")).typed) <= 5


def test_every_page_of_a_task_is_that_of_a_story() -> None:
    pages = {read(file).page for file in STORIES}
    told = {page for page in (ROOT / "docs" / "tasks").glob("*.md") if commands_of(page)}
    assert told <= pages
