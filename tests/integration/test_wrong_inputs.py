"""The gallery of wrong inputs: what is typed, the exit code, the one line, what is suggested.

Everything is refused before anything takes time; nothing shows a traceback.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

FILES = {
    "empty": "",
    "text.txt": "hello\n",
    "bad.json": '{"format": "partita.plan"',
    "list.json": "[1]",
    "odd.json": '{"format": "partita.nothing", "version": 1}',
    "new.json": '{"format": "partita.graph", "version": 99}',
    "c.yaml": "hosts:\n  - devces: 4\n",
    "log.csv": "submitted,duration\n1,2\n",
    "job.yaml": "command: x\nsteps: none\n",
    "opt.yaml": "stepz: 3\n",
}


class Wrong(NamedTuple):
    """A command that is refused."""

    typed: str
    code: int
    says: str
    suggests: str = ""


GALLERY = (
    Wrong("plann gpt-small", 2, "there is no command 'plann'; did you mean 'plan'?", "plan"),
    Wrong("--nosuch", 2, "No such option '--nosuch'."),
    Wrong("plan", 2, "name a MODEL, or a --cluster file that names its profiles"),
    Wrong("plan nosuch --cluster 2xa100", 2, "there is no model 'nosuch', nor such a file"),
    Wrong(
        "plan gpt-smal --cluster 2xa100",
        2,
        "there is no model 'gpt-smal', nor such a file; did you mean",
        "gpt-small",
    ),
    Wrong("plan gpt-small --cluster nosuch", 2, "device type 'nosuch' is not in the catalogue"),
    Wrong(
        "plan gpt-small --cluster 2xa10000",
        2,
        "device type 'a10000' is not in the catalogue; did you mean",
        "a100",
    ),
    Wrong("plan gpt-small --cluster 0xa100", 2, "cluster '0xa100': expected 1 to 65536 devices"),
    Wrong("plan gpt-small --cluster 2x", 2, "cluster '2x': '2x' is not understood"),
    Wrong("plan gpt-small --cluster c.yaml", 2, "c.yaml:1: expected either 'groups' or 'devices'"),
    Wrong(
        "plan gpt-small --cluster missing.yaml",
        2,
        "missing.yaml: cannot be read: no such file or directory",
    ),
    Wrong("plan gpt-small --cluster folder", 2, "device type 'folder' is not in the catalogue"),
    Wrong("plan gpt-small --cluster 2xa100 --planner nosuch", 2, "there is no planner 'nosuch'"),
    Wrong(
        "plan gpt-small --cluster 2xa100 --planner uniform -O stagez=2",
        2,
        "planner 'uniform' has no option 'stagez'; did you mean",
        "stages",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --planner uniform -O stages", 2, "--option 'stages' is not"
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --microbatches 0",
        2,
        "Invalid value for '--microbatches': 0 is not in the range",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --microbatches many",
        2,
        "Invalid value for '--microbatches': 'many' is not a valid",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --microbatches 2 --microbatch-size 4 --batch-size 9",
        2,
        "2 microbatches of 4 samples are 8, not --batch-size 9",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --objective nosuch",
        2,
        "Invalid value for '--objective': 'nosuch'",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --schedule nosuch",
        2,
        "Invalid value for '--schedule': 'nosuch'",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --precision fp3",
        2,
        "precision 'fp3' is not known; did you mean 'fp32' or 'fp8'?",
        "fp32",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --time-limit -1",
        2,
        "Invalid value for '--time-limit': -1.0 is not in the range",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --bandwidth nosuch=3",
        2,
        "cluster '2xa100' has no level 'nosuch'",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --bandwidth host=fast",
        2,
        "value of level host 'fast' is not understood; write it like",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 -o folder", 2, "folder cannot be written: is a directory"
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 -o missing/p.json",
        2,
        "missing/p.json cannot be written: no such file or directory",
    ),
    Wrong("plan empty --cluster 2xa100", 2, "empty: the file is empty"),
    Wrong("plan text.txt --cluster 2xa100", 2, "text.txt: the file is in no known format"),
    Wrong(
        "plan bad.json --cluster 2xa100", 2, "bad.json:1: not valid JSON: Expecting ',' delimiter"
    ),
    Wrong(
        "plan list.json --cluster 2xa100",
        2,
        "list.json: the JSON file holds a list; expected an object",
    ),
    Wrong("plan odd.json --cluster 2xa100", 2, "odd.json: format is 'partita.nothing'"),
    Wrong(
        "plan new.json --cluster 2xa100",
        2,
        "new.json: this partita.graph is of version 99, newer than the",
    ),
    Wrong("plan folder --cluster 2xa100", 2, "folder: is a directory; expected a file"),
    Wrong(
        "plan log.csv --cluster 2xa100",
        2,
        "log.csv: this is a log of submissions; 'partita fleet trace",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --devices 2",
        2,
        "--devices and --cluster exclude each other",
    ),
    Wrong(
        "plan gpt-small --devices 99", 2, "Invalid value for '--devices': 99 is not in the range"
    ),
    Wrong("explain", 2, "Missing argument 'PLAN'."),
    Wrong("explain missing.json", 2, "missing.json: cannot be read: no such file or directory"),
    Wrong("explain bad.json", 2, "bad.json:1: not valid JSON: Expecting ',' delimiter"),
    Wrong("explain c.yaml", 2, "c.yaml:1: expected either 'groups' or 'devices'"),
    Wrong("explain gpt-small", 2, "gpt-small: cannot be read: no such file or directory"),
    Wrong("simulate missing.json", 2, "missing.json: cannot be read: no such file or directory"),
    Wrong("simulate folder", 2, "folder: is a directory; expected a file"),
    Wrong("simulate text.txt", 2, "text.txt: the file is in no known format"),
    Wrong(
        "compare gpt-small --cluster 2xa100 --planners nosuch",
        2,
        "No such option '--planners'.",
        "--planner",
    ),
    Wrong("estimate nosuch --cluster 2xa100", 2, "there is no model 'nosuch', nor such a file"),
    Wrong("robustness missing.json", 2, "'missing.json' is neither a file (no such file) nor a"),
    Wrong("report missing.json", 2, "missing.json: cannot be read: no such file or directory"),
    Wrong("devices nosuch", 2, "no device type and no machine's name contains 'nosuch'"),
    Wrong("models nosuch", 2, "no model's name contains 'nosuch'"),
    Wrong("convert missing.json --to dot", 2, "Missing argument 'OUT'."),
    Wrong("convert bad.json --to nosuch", 2, "Missing argument 'OUT'."),
    Wrong("export missing.json", 2, "missing.json: cannot be read: no such file or directory"),
    Wrong("results nosuch", 2, "runs/nosuch/results.json: no results: no such file or"),
    Wrong("results --cancel", 2, "no run on other hosts under runs; name one"),
    Wrong("checkpoint list missing", 2, "there is no command 'list'; did you mean 'ls'?", "ls"),
    Wrong("checkpoint verify missing", 2, "missing is no folder of checkpoints"),
    Wrong("run missing.json", 2, "missing.json: cannot be read: no such file or directory"),
    Wrong("run bad.json", 2, "bad.json:1: not valid JSON: Expecting ',' delimiter"),
    Wrong(
        "run missing.json --steps 0", 2, "Invalid value for '--steps': 0 is not in the range x>=1."
    ),
    Wrong("train", 2, "name a MODEL, or one in the --config file"),
    Wrong("train nosuch", 2, "there is no model 'nosuch', nor such a file"),
    Wrong(
        "train gpt3-small --steps 0", 2, "Invalid value for '--steps': 0 is not in the range x>=1."
    ),
    Wrong(
        "train gpt3-small --steps 2 --epochs 3",
        2,
        "--steps and --epochs both say how long the run is; give one",
    ),
    Wrong(
        "train gpt3-small --tokens many",
        2,
        "--tokens 'many' is not understood; write it like 2T or 500k",
    ),
    Wrong("train gpt3-small --learning-rate -1", 2, "--learning-rate -1.0; expected more than 0"),
    Wrong(
        "train gpt3-small --optimizer adam8bit",
        2,
        "--optimizer adam8bit is for plans; a run here steps with sgd,",
    ),
    Wrong("train gpt3-small --optimizer nosuch", 2, "Invalid value for '--optimizer': 'nosuch'"),
    Wrong(
        "train gpt3-small --cluster 2xa100",
        2,
        "--cluster names machines that are not here: add --emulate, or",
    ),
    Wrong(
        "train gpt3-small --elastic 2:4",
        2,
        "--elastic: there is nothing to go on from: add --save-every",
    ),
    Wrong(
        "train gpt3-small --available x", 2, "--available says which devices --elastic may use: add"
    ),
    Wrong("train gpt3-small --on nosuch", 2, "--on 'nosuch': there is no 'nosuch'"),
    Wrong(
        "train gpt3-small --config opt.yaml",
        2,
        "opt.yaml:1: there is no option 'stepz'; did you mean 'steps'?",
        "steps",
    ),
    Wrong(
        "train gpt3-small --config missing.yaml",
        2,
        "missing.yaml: cannot be read: no such file or directory",
    ),
    Wrong("train gpt3-small --keep 3", 2, "--keep: is for checkpoints: add --save-every"),
    Wrong("train gpt3-small --emulate --check", 2, "--check: an emulated run computes nothing"),
    Wrong(
        "train gpt3-small --energy-server nonsense",
        2,
        "energy server 'nonsense'; expected an address like",
    ),
    Wrong(
        "train gpt3-small --profile-steps 3",
        2,
        "--profile-steps: it says when the energy server is told: add",
    ),
    Wrong(
        "train gpt3-small --zero 4", 2, "Invalid value for '--zero': 4 is not in the range 1<=x<=3."
    ),
    Wrong(
        "energy frontier missing.csv", 2, "missing.csv: cannot be read: no such file or directory"
    ),
    Wrong("energy frontier text.txt", 2, "text.txt: the file is in no known format"),
    Wrong("energy serve --port 99999", 2, "Invalid value for '--port': 99999 is not in the range"),
    Wrong(
        "fleet simulate missing.csv", 2, "missing.csv: cannot be read: no such file or directory"
    ),
    Wrong(
        "fleet simulate log.csv",
        2,
        "log.csv:1: no column has the number of GPUs, such as num_gpus,",
    ),
    Wrong(
        "fleet simulate generated:jobz=3",
        2,
        "'generated:jobz=3': 'jobz=3' is not understood; write",
    ),
    Wrong(
        "fleet simulate generated --policy nosuch", 2, "policy 'nosuch' is not ORDERING:ALLOCATOR"
    ),
    Wrong(
        "fleet simulate generated --policy fifo:nosuch",
        2,
        "policy 'fifo:nosuch' is not ORDERING:ALLOCATOR",
    ),
    Wrong("fleet simulate generated --policy fifo", 2, "policy 'fifo' is not ORDERING:ALLOCATOR"),
    Wrong(
        "fleet simulate generated --loads many", 2, "--loads is 'many'; expected a number above 0"
    ),
    Wrong("fleet simulate generated --seeds 1,1", 2, "--seeds 1,1: a seed stands twice"),
    Wrong(
        "fleet simulate generated --seeds 5:1",
        2,
        "--seeds '5:1'; expected FIRST:LAST of 200 seeds at most",
    ),
    Wrong(
        "fleet simulate generated:seed=2 --seeds 0,1",
        2,
        "--seeds: another seed is given, too; leave one of them out",
    ),
    Wrong(
        "fleet simulate generated --window 5000:6000",
        2,
        "window 5000:6000 holds no job; ids go from 0 to 99",
    ),
    Wrong(
        "fleet submit missing.yaml", 2, "missing.yaml: cannot be read: no such file or directory"
    ),
    Wrong(
        "fleet submit job.yaml", 2, "job.yaml:2: steps is 'none'; expected a whole number from 1"
    ),
    Wrong("fleet queue --server nonsense", 2, "fleet server 'nonsense'; expected an address like"),
    Wrong(
        "fleet serve --gpus 1 --host 0.0.0.0",
        2,
        "'0.0.0.0' can be reached from other machines: a token is",
    ),
    Wrong("fleet serve --gpus 1 --policy nosuch", 2, "policy 'nosuch' is not ORDERING:ALLOCATOR"),
    Wrong("fleet serve --gpus 1 --quota x", 2, "--quota 'x' is not"),
    Wrong("fleet doctor --engine nosuch", 2, "Invalid value for '--engine': 'nosuch'"),
    Wrong("calibrate --nosuch", 2, "No such option '--nosuch'."),
    Wrong("recommend nosuch", 2, "model 'nosuch' is no large transformer"),
    Wrong("replan missing.json", 2, "missing.json: cannot be read: no such file or directory"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    (made / "folder").mkdir()
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize("wrong", GALLERY, ids=lambda wrong: wrong.typed)
def test_wrong_input_is_one_line_with_its_code_and_a_suggestion(
    wrong: Wrong,
    folder: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    code, out, err = run(*shlex.split(wrong.typed))
    assert (code, out) == (wrong.code, "")
    *progress, line = err.splitlines()
    assert line.startswith("partita: ")
    assert wrong.says in line
    assert wrong.suggests in line
    assert len(line) < 1200
    assert not any(each.startswith("partita: ") or "Traceback" in each for each in progress)
    assert sorted(folder.rglob("*")) == before


def test_the_gallery_has_ninety_rows() -> None:
    assert len(GALLERY) >= 90
    assert len({wrong.typed for wrong in GALLERY}) == len(GALLERY)


@pytest.mark.parametrize("words", [(), ("plan",), ("fleet", "simulate")])
def test_help_is_a_word_too(
    run: Callable[..., tuple[int, str, str]], words: tuple[str, ...]
) -> None:
    assert run("help", *words) == run(*words, "--help")
