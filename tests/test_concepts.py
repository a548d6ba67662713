"""One home for each idea: a distinctive token of it occurs in one module only.

Tools that look for repeated text do not see two modules that do the same thing in other words. Here
each idea has a token that nobody can do it without, and the modules that may hold it.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "partita"


class Concept(NamedTuple):
    """An idea and where it lives.

    Attributes:
        token: A regular expression that code for the idea matches.
        homes: The modules (or folders, ending in a slash) below the package that may match.
        rooms: The folders in which no other may; all, unless given.
    """

    token: str
    homes: tuple[str, ...]
    rooms: tuple[str, ...] = ("",)


CONCEPTS: Mapping[str, Concept] = {
    "size of an op": Concept(
        r"parameter_bytes(\[\w+\])? \+ \S*saved_bytes|saved_bytes\.astype", ("core/graph.py",)
    ),
    "files that are whole or not there": Concept(
        r"\.replace\((\w+\.)*(path|target|note)\)|NamedTemporaryFile\(\s*\"w|mkstemp\(|os\.fsync\(",
        # A token must not replace another's, and a measurement writes to measure.
        ("atomic_files.py", "fleet/live/token.py", "fleet/profiler/machine_speeds.py"),
    ),
    "why the system refused": Concept(r"\bexc\.strerror\b|\"strerror\"", ("errors.py",)),
    "a file that cannot be read": Concept(r"FormatError\(f\"cannot be read", ("errors.py",)),
    "seconds of collectives": Concept(r"\bPASSES\b.* = {|PEERS_AT_A_TIME = ", ("cost/links.py",)),
    "text of nccl-tests": Concept(
        r"Collective test starting", ("profiler/calibrate/nccl_tests.py",)
    ),
    "samples of a step": Concept(
        r"class SampleOrder\b|def split_batch\b|torch\.randperm\(", ("runtime/batches.py",)
    ),
    "files of safetensors": Concept(r"\bdata_offsets\b", ("runtime/safetensors_file.py",)),
    "weights by name from any file": Concept(r"\bpytorch_model\b", ("runtime/weights.py",)),
    "metrics of a step": Concept(r"\bMETRICS = ", ("runtime/metric_rows.py",)),
    "what differs on a GPU": Concept(
        r"cuda\.synchronize\(|max_memory_allocated\(|cuda\.manual_seed\(",
        ("ranks/device.py", "profiler/"),
    ),
    "effort of a search": Concept(r"def left_s\b", ("planners/effort.py",)),
    "rounds of annealing": Concept(r"def anneal_rounds\b", ("planners/annealing.py",)),
    "a name and a cluster make a Problem": Concept(
        r"\bapply_overrides\(", ("catalogue/", "flows/problem.py")
    ),
    "options of a command from its request": Concept(
        r"def takes\(request", ("cli/from_request.py",)
    ),
    "the least change that makes it fit": Concept(
        r"with_recomputation\(graph\) is not graph|def least_number\b", ("flows/least_change.py",)
    ),
    "dividing a tensor among a tensor-parallel group": Concept(
        r"block \* \(rank \+ 1\) // count", ("capture/splits.py",)
    ),
    "whether blocks are recomputed": Concept(
        r"bool\(request\.recompute|recompute == .full.", ("flows/fields.py",)
    ),
    "schedules of the learning rate": Concept(
        r"\(.constant., .linear., .cosine.\)", ("runtime/training/recipe.py",)
    ),
    "options whose value may be left out": Concept(
        r"class BareOption\b|flag_value", ("cli/from_request.py",)
    ),
    "memory that a plan may use": Concept(
        r"\* (\w+\.)*objective\.memory_factor|\* self\.memory_factor", ("core/problem.py",)
    ),
    "whether a plan keeps within memory": Concept(
        r"\bpeak_memory\(|class Peaks\b",
        ("cost/memory.py", "cost/judge.py", "profiler/memory.py"),
    ),
    # Those that make a graph of another one set these columns, and memory divides them.
    "figures at a microbatch size": Concept(
        r"\bops\.(fixed_share|saved_fixed_bytes)\b|\b(tensors|table)\.fixed_bytes\b"
        r"|def (saved_at|time_factor)\b",
        ("core/graph.py", "cost/memory.py", "planners/auto/coarse.py", "profiler/estimate/"),
    ),
    "the schedule where nobody says one": Concept(
        r"(=|\bor) Schedule\.ONE_F_ONE_B\b", ("core/schedules.py", "testing/builders.py")
    ),
    "cores that this process may use": Concept(r"len\(os\.sched_getaffinity\(", ("processes.py",)),
    "keys that a YAML file must have": Concept(r": key \{key!r\} is missing", ("yaml_nodes.py",)),
    # A job of Ray's own is inside it already, and wants its log.
    # The second is the text of a driver that needs Ray alone.
    "connecting to a Ray": Concept(r"\bray\.init\(", ("ray_link.py", "trainers/starts/ray.py")),
    "rules of a grid": Concept(r"def (grid_of|plan_of_grid)\b", ("core/grid.py",)),
    "one function over many inputs": Concept(r"class \w*Workers\b(?!Fields)", ("workers.py",)),
    "words between a driver and its agents": Concept(r"partita> ", ("hosts/messages.py",)),
    "near names": Concept(r"get_close_matches\(", ("names.py",)),
    "SQLite files that survive kills": Concept(r"sqlite3\.connect\(", ("store.py",)),
    "versions of the tables of a file": Concept(r"versions \(part\b|user_version", ("store.py",)),
    "texts of others on a terminal": Concept(r"unicode_escape", ("names.py",)),
    "addresses of this machine alone": Concept(r"\.is_loopback\b", ("http.py",)),
    "who may do what on a server": Concept(
        r"class Role\b|def needed_role\b", ("service/users.py",)
    ),
    "speaking HTTP to a server": Concept(
        r"import_module\(.httpx.\)|\b(import|from) (httpx|urllib\.request|http\.client)\b",
        # A job may have the standard library alone.
        ("http.py", "fleet/live/news.py"),
    ),
    "quantities as people write them": Concept(
        r"def parse_(money|tokens|duration)\b", ("units.py",)
    ),
    "machines that can be had": Concept(r"def catalogue_offers\b", ("flows/offers.py",)),
    "seconds of a transformer block": Concept(r"def block_s\(case\b", ("transformer/kernels.py",)),
    "microbatches in flight in closed form": Concept(
        r"virtual = depth \+", ("transformer/memory.py",)
    ),
    "what a request trains of a large transformer": Concept(
        r"limit_bytes=first\.memory_bytes", ("flows/transformer_task.py",)
    ),
    "share of memory that a request leaves": Concept(
        r"--reserve R is --memory-factor", ("flows/problem.py",)
    ),
    "activation bytes of a block": Concept(r"def layer_bytes\b", ("transformer/activations.py",)),
    "loading plug-ins": Concept(r"\bentry_points\(", ("plugins.py",)),
    "names of GPUs": Concept(r"def (gpu_type|is_slice)\(", ("catalogue/gpu_names.py",)),
    "lists of hosts made clusters": Concept(
        r"def inventory_cluster\b|link figures are the catalogue", ("catalogue/inventory.py",)
    ),
    "levels behind a matrix of links": Concept(r"def infer_levels\b", ("catalogue/hierarchy.py",)),
    "documents in a notebook": Concept(r"def html_table\b|image/svg\+xml", ("report/notebook.py",)),
    "reading YAML": Concept(r"\b(import|from) yaml\b", ("yaml_nodes.py",)),
    "formats": Concept(r": Mapping\[str, Format\] = {", ("formats/table.py",)),
    "recognising a file": Concept(r"\.sniff\(", ("formats/detect.py",)),
    "built-in graphs": Concept(r"EXAMPLES: Mapping\b", ("catalogue/examples.py",)),
    "numbers that JSON has no word for": Concept(r"def number_or_none\b", ("core/columns.py",)),
    "compiled kernels": Concept(r"\b(import|from) numba\b|\bnjit\b", ("kernels.py",)),
    "bytes held by a parameter": Concept(
        r"\.optimizer_bytes_per_element\b", ("core/problem.py", "cost/tables.py")
    ),
    "state that moves between plans": Concept(
        r"\blasting_bytes\(", ("cost/tables.py", "cost/moves.py")
    ),
    "costs as a step has shown them": Concept(r"def calibrate\(problem", ("cost/measured.py",)),
    "bytes on the wire": Concept(r"def wire_bytes\b", ("core/precision.py",)),
    "memory that no plan can use": Concept(
        r"\b(GPU_RESERVE|CONTEXT_BYTES) = ", ("cost/tables.py",)
    ),
    "devices that are alike": Concept(r"peaks = tuple\(sorted\(", ("cost/tables.py",)),
    "ops that must stay together": Concept(
        r"np\.where\((label|colou?r|colocation) >= 0, \1", ("cost/tables.py",)
    ),
    "backward ops folded into backward": Concept(r"np\.where\(explicit\b", ("cost/tables.py",)),
    "metrics": Concept(r"= MetricRow\(|: MetricRow\(", ("core/metrics.py",)),
    "pipeline schedules": Concept(r"= ScheduleRow\(|: ScheduleRow\(", ("core/schedules.py",)),
    "what a schedule does": Concept(r"def stashes_weights|stashes_weights=True", ("core/",)),
    "a plan judged": Concept(r"def judge\(problem", ("cost/judge.py",)),
    "why nothing fits": Concept(
        r"no device may run op|the largest device that",
        ("planners/obstacle.py",),
    ),
    "the schedule that was asked for, else another": Concept(
        r"def _schedule_or\b|\.schedule or \(|default_schedule", ("core/problem.py",)
    ),
    "why a plan does not fit": Concept(r"more than its limit of", ("cost/judge.py",)),
    "forking ranks": Concept(r"\bos\.fork\(", ("ranks/pool.py",)),
    "why ranks fail": Concept(r"\bdef first_cause\b", ("ranks/failures.py",)),
    "launching by torch's agent": Concept(r"\bLocalElasticAgent\(", ("runtime/launch.py",)),
    "a stage for torch's schedules": Concept(r"\bPipelineStage\(", ("runtime/torch_stages.py",)),
    "capturing a model": Concept(
        r"\bcapture\.capture import capture\b",
        ("capture/origin.py", "profiler/measure/model.py", "profiler/estimate/estimate.py"),
    ),
    "what reproduces published faults": Concept(
        r"\bas_released\b|\bpartita\.released\b",
        (
            "released/",
            "planners/table.py",
            "fleet/simulate/table.py",
            "flows/fields.py",
            "flows/planner_choice.py",
            "flows/fleet/simulate.py",
        ),
    ),
    "instructions that several devices do together": Concept(
        r"def joints\b|class Joints\b|group \* span \+ turn", ("program/matching.py",)
    ),
    "the energy profile of a folder of logs": Concept(
        r"def read_logs\b|instructions-\(", ("flows/energy/logs.py",)
    ),
    "memory of fleets in other units than bytes": Concept(
        r"memory_g|\w_mb_per_s|\b_?[GM]B = |import .*\b_?[GM]B\b"
        r"|[*/] ?(1e[69]|10\*\*[69]|2(\.0)?\*\*30)\b",
        (
            "fleet/gigabytes.py",
            # Jobs, and clients of version 0.1, are told of memory in GB, too.
            "fleet/lease.py",
            "fleet/live/scheduler.py",
            "service/fleet/router.py",
        ),
        rooms=("fleet/", "flows/fleet/", "service/fleet/", "cli/fleet/"),
    ),
    "pauses that double with each failure": Concept(r"2(\.0)? \*\* min\(", ("processes.py",)),
    "proving a Program": Concept(r"def prove\b", ("program/check/",)),
}


def _holds(home: str, name: str) -> bool:
    return name == home or (home.endswith("/") and name.startswith(home))


@cache
def lines_with(token: str, text: str) -> tuple[int, ...]:
    """Return the lines of a text in which a token occurs; each text is looked through once."""
    found = re.compile(token, re.MULTILINE)
    if not found.search(text):
        return ()
    return tuple(n for n, line in enumerate(text.splitlines(), 1) if found.search(line))


def offenders(concept: Concept, sources: Mapping[str, str]) -> list[str]:
    """Return where the token of an idea occurs outside its home, as ``module:line``."""
    return [
        f"{name}:{number}"
        for name, text in sources.items()
        if name.startswith(concept.rooms) and not any(_holds(home, name) for home in concept.homes)
        for number in lines_with(concept.token, text)
    ]


@cache
def package_sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@pytest.mark.parametrize("idea", CONCEPTS)
def test_an_idea_has_one_home(idea: str) -> None:
    assert offenders(CONCEPTS[idea], package_sources()) == [], f"second home of: {idea}"


@pytest.mark.parametrize("idea", CONCEPTS)
def test_its_home_holds_the_idea(idea: str) -> None:
    concept, sources = CONCEPTS[idea], package_sources()
    for home in concept.homes:
        held = [name for name in sources if _holds(home, name)]
        assert any(re.search(concept.token, sources[name]) for name in held), home


@pytest.mark.parametrize("idea", CONCEPTS)
def test_a_second_home_would_be_found(idea: str) -> None:
    concept, sources = CONCEPTS[idea], package_sources()
    line = next(
        line
        for name, text in sources.items()
        if _holds(concept.homes[0], name)
        for line in text.splitlines()
        if re.search(concept.token, line)
    )
    second = f"{concept.rooms[0] or 'planners/'}second_home.py"
    added = {**sources, second: f"{line}\n"}
    assert offenders(concept, added) == [f"{second}:1"]


@pytest.mark.parametrize(
    "line",
    [
        "GB = 1e9",
        "_GB = 10**9",
        "from partita.fleet.gigabytes import _GB, in_gb",
        "    memory_gb: float",
        "storage_mb_per_s = 62.5",
        "size = place.memory_bytes / 1e9",
        "memory_bytes=np.array([400.0]) * 1e9,",
        "rate = servers.storage_bytes_per_s / 10**6",
        "words = f'{place.memory_bytes / 2**30:.1f} GiB'",
    ],
)
def test_a_second_unit_of_memory_in_the_rooms_of_fleets_would_be_found(line: str) -> None:
    concept = CONCEPTS["memory of fleets in other units than bytes"]
    for room in concept.rooms:
        added = {**package_sources(), f"{room}second_home.py": f"{line}\n"}
        assert offenders(concept, added) == [f"{room}second_home.py:1"]


MOST_WORDS = 3
"""Words besides facts that a pattern may have: as many tell one reason from another."""
MOST_SENTENCES = 8
"""Patterns of tests that have more; the number only falls. The words of messages have one home,
``test_messages.py``; elsewhere a refusal is told by its facts."""


def words_of(pattern: str) -> list[str]:
    """Return the words of a pattern that are no facts: no names, numbers, options, files."""
    plain = re.sub(r"\\.", " ", pattern)
    return re.findall(r"(?<![\w'\"/.=-])[a-z]{2,}(?![\w'\"/.=-]*[\w'\"=])", plain)


def patterns(text: str) -> Iterator[str]:
    """Yield what the tests of a module match messages with, where it is written out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "match":
            value = ast.literal_eval(node.value) if isinstance(node.value, ast.Constant) else ""
            yield str(value)


def test_refusals_are_told_by_their_facts_and_not_by_their_sentences() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {pattern}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for pattern in patterns(path.read_text(encoding="utf-8"))
        if len(words_of(pattern)) > MOST_WORDS
    ]
    assert len(long) <= MOST_SENTENCES, "\n".join(long)


def test_words_and_facts_are_told_apart() -> None:
    text = r'pytest.raises(ValueError, match=r"op \'a\' is 3; expected --tp below n_heads")'
    (pattern,) = patterns(text)
    assert words_of(pattern) == ["op", "is", "expected", "below"]
