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
    "semi.csv": "a;b;c\n1;2;3\n",
    "sacct.txt": "JobID    User   Elapsed\n-------- ------ -------\n1 a b\n",
    "nogpus.txt": "JobID|Submit|ElapsedRaw\n1|2024-01-01|5\n",
    "ms.csv": "submitted,duration,gpus\n1700000000000,5,1\n",
    "word.csv": "submitted,duration,gpus\n0,long,1\n",
    "split.csv": "JobID,Submit,Elapsed,AllocTRES\n1,2024-01-01,5,cpu=1,gres/gpu=1\n",
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
        "missing/p.json cannot be written: there is no folder 'missing'",
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
    Wrong(
        "plan gpt-small --cluster '2 x a100'", 2, "'2 x a100' is not understood; write", "8xa100"
    ),
    Wrong("plan gpt-small --cluster a100,v100", 2, "write it like 8xa100, 2x8xa100 (2 hosts of 8)"),
    Wrong("estimate gpt-small --cluster 70000xa100", 2, "expected 1 to 65536 devices"),
    Wrong("explain ''", 2, "a file without a name cannot be read"),
    Wrong("plan gpt-small --cluster 2xa100 --time-limit soon", 2, "'soon' is not a valid float"),
    Wrong("plan gpt-small --cluster 2xa100 --time-limit 0", 2, "0.0 is not in the range 0.0<x"),
    Wrong(
        "plan gpt-small --cluster 2xa100 -o nofolder/x.json",
        2,
        "nofolder/x.json cannot be written: there is no folder 'nofolder'",
    ),
    Wrong("estimate gpt-small --cluster 2xa100 -o folder", 2, "folder cannot be written"),
    Wrong("compare gpt-small --cluster 2xa100 --report no/x.html", 2, "there is no folder 'no'"),
    Wrong(
        "energy frontier --stages 1,2 --device a100 --picture no/x.svg",
        2,
        "there is no folder 'no'",
    ),
    Wrong("fleet simulate generated --csv no/x.csv", 2, "there is no folder 'no'"),
    Wrong("plan gpt-small --cluster 2xa100 --optimizer adm", 2, "'adm' is not one of", "'adam'?"),
    Wrong("export g.json --to megatrn", 2, "'megatrn' is not one of", "did you mean 'megatron'?"),
    Wrong(
        "plan gpt-small --cluster 2xa100 --what-if bandwith=2x",
        2,
        "what if 'bandwith=2x' is not understood; did you mean",
        "bandwidth",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --what-if bandwidth=0x",
        2,
        "the factor of a what if is 0; expected more than 0",
        "2x",
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --what-if -host7/gpu0", 2, "no device of the cluster has"
    ),
    Wrong(
        "plan gpt-small --cluster 2xa100 --batch-size 7 --microbatch-size 2",
        2,
        "--batch-size 7 cannot be 3 microbatches of 2 samples",
    ),
    Wrong("plan gpt-small --cluster 2xa100 --precision fp7", 2, "'fp7' is not known", "'fp8'?"),
    Wrong("plan gpt-small --cluster 2xa100 --reserve 2", 2, "2.0 is not in the range 0<=x<1"),
    Wrong(
        "plan gpt-small --cluster 2xa100 --pin nosuch=host0/gpu0",
        2,
        "'nosuch' names no op of graph",
    ),
    Wrong(
        "compare gpt-small --cluster 2xa100 --planner single,nosuch",
        2,
        "--planner 'single,nosuch' names several; give each its own",
        "--planner single --planner nosuch",
    ),
    Wrong("energy frontier --stages 1,x --device a100", 2, "--stages 'x' is not understood"),
    Wrong("energy frontier --stages 65ms --backward 0x --device a100", 2, "--backward is '0x'"),
    Wrong("fleet simulate generated --loads 4:1", 2, "from the smaller to the larger"),
    Wrong("fleet simulate generated:jobs=0", 2, "0 jobs; expected 1 or more"),
    Wrong("fleet simulate semi.csv", 2, "semi.csv: the file is in no known format", "submitted"),
    Wrong("fleet simulate sacct.txt", 2, "columns of fixed width cut", "sacct --allusers"),
    Wrong("fleet simulate nogpus.txt", 2, "no column has the number of GPUs", "AllocTRES"),
    Wrong("fleet simulate ms.csv", 2, "submitted is '1700000000000'; expected", "milliseconds"),
    Wrong("fleet simulate word.csv", 2, "word.csv:2: duration is 'long'; expected a number"),
    Wrong("fleet simulate split.csv", 2, "split.csv:2: 5 cells, and the first line names 4"),
    Wrong("help plan extra", 2, "'plan' has no commands of its own, such as 'extra'"),
    Wrong("help nosuch", 2, "there is no command 'nosuch'"),
    Wrong("completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    Wrong("train gpt-small --steps 0", 2, "Invalid value for '--steps': 0 is not in the range"),
    Wrong("explain folder", 2, "folder: is a directory; expected a file"),
    Wrong("explain list.json --what-if", 2, "Option '--what-if' requires an argument."),
    Wrong("advise gpt-small --cluster 2xa100 --tokens -5", 2, "tokens '-5' is negative"),
    Wrong("advise llama3-8b --cluster 2x8xh100 --time-limit 2", 2, "is planned by its shape"),
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


def test_the_gallery_has_all_rows_that_were_tried() -> None:
    assert len(GALLERY) >= 142
    assert len({wrong.typed for wrong in GALLERY}) == len(GALLERY)


@pytest.mark.parametrize("words", [(), ("plan",), ("fleet", "simulate")])
def test_help_is_a_word_too(
    run: Callable[..., tuple[int, str, str]], words: tuple[str, ...]
) -> None:
    assert run("help", *words) == run(*words, "--help")
