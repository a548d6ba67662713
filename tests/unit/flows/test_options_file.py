"""Files of options are decoded by the fields of a request, and know their lines."""

from pathlib import Path
from typing import Any

import pytest

from partita.errors import FormatError
from partita.flows.options_file import read_options_file
from partita.flows.runs.requests import TrainRequest


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return read_options_file(str(path), TrainRequest, {"json": "as_json"})


def test_values_have_the_types_of_their_fields(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "model: gpt3-small\nsteps: '3'\nlearning-rate: 1e-2\nmicrobatch_size: 2\ncheck: yes\n"
        "device-ids: 0\noption: [stages=2, replicas=1]\np: uniform\njson: true\nloss:\n",
    )
    assert found == {
        "model": "gpt3-small",
        "steps": 3,
        "learning_rate": 0.01,
        "microbatch_size": 2,
        "check": True,
        "device_ids": "0",
        "option": ("stages=2", "replicas=1"),
        "planner": "uniform",
        "as_json": True,
    }


def test_a_single_value_is_enough_for_an_option_that_may_stand_several_times(
    tmp_path: Path,
) -> None:
    assert read(tmp_path, "option: stages=2\n") == {"option": ("stages=2",)}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing yet\n") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nstepz: 4\n", "yaml:2: there is no option 'stepz'; did you mean"),
        ("\nsteps: 0\n", "yaml:2: steps is 0; expected 1 or more"),
        ("steps: many\n", "yaml:1: option 'steps' is 'many'; expected a whole number"),
        ("perturb: [1]\n", "yaml:1: option 'perturb' is a list; expected a text"),
        ("scale: wide\n", "yaml:1: option 'scale' is 'wide'; expected a number"),
        ("check: perhaps\n", "yaml:1: option 'check' is 'perhaps'; expected true or false"),
        ("order: devise\n", "yaml:1: there is no order 'devise'; did you mean"),
        ("- steps\n", "yaml:1: the file of options is a list; expected a mapping"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
