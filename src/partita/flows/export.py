"""A plan as code, or as the files of other tools: what ``partita.export`` does."""

import dataclasses
import importlib.metadata
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.core.graph import Graph
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Metric, Mode
from partita.core.solution import Solution
from partita.cost.judge import evaluate
from partita.documents import OpenedFile, open_file, unused_path, write_bytes, write_text
from partita.errors import InvalidInputError, reason_of
from partita.exporters.pipedream_conf import num_ranks_of, read_num_ranks, runtime_configurations
from partita.flows.extras import torch_needed
from partita.flows.fields import DTYPES, GRANULARITIES, ClusterFields, PlanSource
from partita.flows.results import Result
from partita.flows.solutions import bare_problem, evaluated
from partita.formats.pipedream import read_pipedream_plan, stage_ids, write_pipedream_plan
from partita.requests import declare, fields_of, make
from partita.trainers.table import PLUGINS, TARGETS, why_not, writer
from partita.trainers.target import PlanToWrite

if TYPE_CHECKING:
    from partita.capture.origin import ModelOrigin

OWN = ("python", "pipedream", "pipedream-conf")
"""Targets that are written here; the others are rows of ``trainers/table.py``."""
_OF_MODEL = ("sequence_length", "dtype", "scale", "granularity", "seed", "mode", "batch_size")
"""Fields that say something else of the model than the plan does."""
_PLANS = "the plan's"


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ClusterFields):
    """A saved plan, and what to write it as."""

    plan: PlanSource = declare("", is_argument=True, metavar="PLAN", help="Plan, or gpus=N.txt.")
    to: str = declare(
        "python",
        choices=(*OWN, *TARGETS),
        added=PLUGINS.names,
        metavar="TARGET",
        help="Kind of files to write.",
    )
    check: bool = declare(
        False, help="List which targets can hold the plan and why the others cannot; write nothing."
    )
    release: str | None = declare(
        None, usual="0.3", help="Release of torchtitan to write for: 0.3, main or 0.2 (TOML)."
    )
    base: str | None = declare(
        None,
        metavar="MODULE:FUNCTION",
        help="Your own configuration of torchtitan that the plan is added to.",
    )
    rename: tuple[str, ...] = declare(
        (), metavar="OURS=YOURS", help="Name of a module in your model, such as lm_head=output."
    )
    option: tuple[str, ...] = declare(
        (),
        flags=("-O",),
        metavar="NAME=VALUE",
        help="Option of the target, such as queue=train or time=04:00:00.",
    )
    script: tuple[str, ...] = declare(
        (),
        is_argument=True,
        metavar="[-- COMMAND ...]",
        help="Command that every process runs instead of partita run.",
    )
    output: str | None = declare(
        None,
        flags=("-o",),
        usual="named by the model",
        help="Directory (pipedream: file) to write.",
    )
    model: str | None = declare(
        None, help="Model, where PLAN does not say it; see 'partita profile'."
    )
    package: str | None = declare(
        None, usual="that of the directory", help="Name of the Python package."
    )
    weights: bool = declare(False, help="Write the weights too, as weights.pt.")
    stage_to_num_ranks: str | None = declare(
        None,
        flags=("--stage-to-num-ranks-map",),
        usual="the plan's replicas",
        help="Ranks of each stage, such as 0:3,1:1.",
    )
    batch_size: int | None = declare(None, minimum=1, usual=_PLANS, help="Samples of a call.")
    mode: str | None = declare(
        None, choices=[mode.value for mode in Mode], usual=_PLANS, help="Mode of the model."
    )
    sequence_length: int | None = declare(
        None, minimum=2, usual=_PLANS, help="Tokens per sample, not for callables."
    )
    dtype: str | None = declare(
        None, choices=DTYPES, usual=_PLANS, help="Type of weights and inputs."
    )
    scale: float | None = declare(
        None, usual=_PLANS, help="Factor on the widths of a built-in model."
    )
    granularity: str | None = declare(
        None, choices=GRANULARITIES, usual=_PLANS, help="Make each node of the graph one of these."
    )
    seed: int | None = declare(None, usual=_PLANS, help="Seed of weights and data.")
    graph: str | None = declare(None, help="The graph that a bare plan is for.")

    def of_model(self) -> dict[str, Any]:
        """Return what is said of the model, by the names of the fields."""
        return {name: value for name in _OF_MODEL if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Export(Result):
    """The files that a plan was written as.

    Attributes:
        to: The kind of files.
        stages: Number of stages of the plan.
        written: Paths of the files.
        notes: What should be known of them, a sentence each.
        command: The command to type; empty where there is none.
        left_to_you: What the files do not say.
        refusals: By target, why it cannot hold the plan, empty where it can; of ``check`` alone.
        process: What each process under torchrun runs, in the folder of the files; may be empty.
    """

    to: str
    stages: int
    written: tuple[str, ...]
    notes: tuple[str, ...] = ()
    command: str = ""
    left_to_you: tuple[str, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    process: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what was written as JSON values."""
        if self.refusals:
            return {"stages": self.stages, "targets": dict(self.refusals)}
        return {
            "to": self.to,
            "stages": self.stages,
            "written": list(self.written),
            "command": self.command or None,
            "left_to_you": list(self.left_to_you),
            "remarks": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return what was written in one line, or a line for each target."""
        if self.refusals:
            return [f"{name}: {why or 'yes'}" for name, why in self.refusals.items()]
        return [f"{self.stages} stages written as {self.to}: {', '.join(self.written)}"]


def export(plan: PlanSource, /, **options: Any) -> Export:  # noqa: ANN401 (fields of ExportRequest)
    """Write a plan as code, one readable module per stage, or as the files of another tool.

    Args:
        plan: What :func:`partita.plan` returned, a solution, or the path of a file; a
            ``gpus=N.txt`` of PipeDream holds graph and plan.
        **options: The fields of :class:`ExportRequest`: the options of ``partita export``.

    Raises:
        InfeasibleError: The target cannot hold the plan; says the first rule that it breaks.
        InvalidInputError: There is no such plan or model, or a folder in the way.
        UnsupportedError: torch is needed and not there.
    """
    return export_request(make(ExportRequest, plan=plan, **options))


def export_request(request: ExportRequest) -> Export:
    """Export what a request asks for; see :func:`export`."""
    if request.to != "python":
        odd = [name for name in ("model", "weights", "package") if getattr(request, name)]
        for name in (*odd, *request.of_model()):
            raise InvalidInputError(f"--{name.replace('_', '-')} is for --to python")
    if request.to in OWN:
        for name in ("release", "base", "rename", "option", "script"):
            if getattr(request, name) and not request.check:
                raise InvalidInputError(f"--{name} is for the files of trainers and launchers")
    if request.check:
        return _checked(request)
    if request.to not in OWN:
        return _write_for(request)
    graph, plan = _read(request)
    counts = _num_ranks(request.stage_to_num_ranks, plan, checked=request.to == "pipedream-conf")
    notes: Sequence[str] = ()
    if request.to == "pipedream":
        written = _write_pipedream(graph, plan, counts, request.output)
    elif request.to == "pipedream-conf":
        written = _write_configurations(graph, counts, request.output)
    else:
        plan = _with_replicas(plan, counts) if request.stage_to_num_ranks else plan
        written, notes = _write_package(graph, plan, request)
    return Export(
        to=request.to, stages=len(plan.stages), written=tuple(written), notes=tuple(notes)
    )


def _write_for(request: ExportRequest) -> Export:
    """Write the files of a trainer or a launcher."""
    plan = _to_write(request)
    found = writer(request.to)(plan)
    place = made_folder(request.output or f"{plan.name}-{request.to}")
    for name, text in found.files.items():
        write_text(place / name, text)
    return Export(
        to=request.to,
        stages=len(plan.plan.stages),
        written=tuple(str(place / name) for name in found.files),
        notes=found.remarks,
        command=f"cd {shlex.quote(str(place))} && {found.command}",
        left_to_you=found.left_to_you,
        process=found.process,
    )


def _checked(request: ExportRequest) -> Export:
    """Return for each target why it cannot hold the plan."""
    plan = _to_write(request)
    refusals = {name: why_not(name, plan) for name in (*TARGETS, *PLUGINS.names())}
    return Export(to="", stages=len(plan.plan.stages), written=(), refusals=refusals)


def _to_write(request: ExportRequest) -> PlanToWrite:
    """Return the plan of a request as writers take it."""
    solution = _solution(request)
    for pair in (*request.rename, *request.option):
        if not all(pair.partition("=")[::2]):
            raise InvalidInputError(f"{pair!r} is not of the form NAME=VALUE")
    is_step = solution.metric is Metric.THROUGHPUT and solution.unit == "s"
    step_s = solution.value if is_step else evaluate(solution.problem, solution.plan).step_s
    return PlanToWrite(
        solution=solution,
        step_s=step_s,
        made_by=(f"partita {importlib.metadata.version('partita')}: {_command(request)}",),
        release=request.release or "",
        base=request.base or "",
        rename=dict(pair.split("=", 1) for pair in request.rename),
        options=dict(pair.split("=", 1) for pair in request.option),
        command=request.script,
    )


def _command(request: ExportRequest) -> str:
    """Return the command that asks for the same, without what is at its default."""
    name = request.plan if isinstance(request.plan, str) else "PLAN"
    words = ["partita", "export", name, "--to", request.to]
    for option in ("release", "base"):
        if getattr(request, option):
            words += [f"--{option}", getattr(request, option)]
    words += [word for pair in request.rename for word in ("--rename", pair)]
    words += [word for pair in request.option for word in ("-O", pair)]
    words += ["--", *request.script] if request.script else []
    return " ".join(shlex.join(words).split())


def _solution(request: ExportRequest) -> Solution:
    """Return the plan of a request with its problem.

    Raises:
        InvalidInputError: A bare plan comes without its graph and cluster.
    """
    problem = None if request.graph is None else bare_problem(request.graph, request)
    if not isinstance(request.plan, str | OpenedFile):
        return request.plan if isinstance(request.plan, Solution) else request.plan.solution
    file = open_file(request.plan) if isinstance(request.plan, str) else request.plan
    found = file.load(problem=problem)
    if isinstance(found, Solution):
        return found
    if isinstance(found, Plan) and problem is not None:
        return evaluated(problem, found, None)
    kind = type(found).__name__.lower()
    raise InvalidInputError(
        f"{file.name!r} holds a {kind}; --to {request.to} needs a plan with its problem, as "
        "'partita plan' writes it, or --graph and --cluster"
    )


def _read(request: ExportRequest) -> tuple[Graph, Plan]:
    """Return the graph and the plan in a file; a ``gpus=N.txt`` holds both."""
    given = [getattr(request, one.name) for one in fields_of(ClusterFields)]
    if request.graph is None and any(value is not None for value in given):
        raise InvalidInputError("a cluster is for a bare plan: name its --graph too")
    problem = None if request.graph is None else bare_problem(request.graph, request)
    if not isinstance(request.plan, str | OpenedFile):
        own = request.plan if isinstance(request.plan, Solution) else request.plan.solution
        return own.problem.graph, own.plan
    file = open_file(request.plan) if isinstance(request.plan, str) else request.plan
    found = file.load(problem=problem)
    if isinstance(found, Solution):
        return found.problem.graph, found.plan
    if isinstance(found, Plan) and problem is not None:
        return problem.graph, found
    if isinstance(found, Plan):
        raise InvalidInputError(f"{file.name} is a bare plan: name its --graph")
    if isinstance(found, Graph) and stage_ids(found) is not None:
        return found, read_pipedream_plan(file.text, found)
    kind = type(found).__name__.lower()
    raise InvalidInputError(
        f"{file.name!r} holds a {kind}, not a plan; make one with 'partita plan'"
    )


def _num_ranks(text: str | None, plan: Plan, *, checked: bool) -> list[int]:
    if text is not None:
        return read_num_ranks(text, len(plan.stages))
    return num_ranks_of(plan) if checked else [stage.num_replicas for stage in plan.stages]


def _with_replicas(plan: Plan, counts: list[int]) -> Plan:
    """Return a plan with other replicas, on devices in their order."""
    ends = [sum(counts[: row + 1]) for row in range(len(counts))]
    names = [*plan.devices, *(f"device{row}" for row in range(len(plan.devices), ends[-1]))]
    sizes = plan.microbatch_sizes
    if any(len(sizes) % own for own in counts):
        sizes = equal_microbatches(math.lcm(*counts), int(sizes[0]))
    return dataclasses.replace(
        plan,
        microbatch_sizes=sizes,
        devices=tuple(names[: ends[-1]]),
        stages=pipeline_stages(
            [range(end - own, end) for own, end in zip(counts, ends, strict=True)]
        ),
    )


def _write_pipedream(graph: Graph, plan: Plan, counts: list[int], output: str | None) -> list[str]:
    path = output or str(unused_path(Path(f"gpus={sum(counts)}.txt")))
    write_text(path, write_pipedream_plan(graph, plan))
    return [path]


def _write_configurations(graph: Graph, counts: list[int], output: str | None) -> list[str]:
    folder = made_folder(output or f"{graph.name}-conf")
    found = runtime_configurations(counts)
    for name, values in found.items():
        write_text(folder / name, json.dumps(values, indent=4) + "\n")
    return [str(folder / name) for name in found]


def made_folder(path: str) -> Path:
    """Return a directory, made if it is not there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        reason = reason_of(exc)
        raise InvalidInputError(f"{path} cannot be a directory: {reason}") from exc
    return Path(path)


def _write_package(
    graph: Graph, plan: Plan, request: ExportRequest
) -> tuple[list[str], Sequence[str]]:
    """Write a package; return the names of its files, and remarks of the capture."""
    with torch_needed("packages of modules need"):
        from partita.exporters.described import described_blueprint  # noqa: PLC0415 (torch)
        from partita.exporters.package import package_files, package_name  # noqa: PLC0415 (torch)
    folder = request.output or package_name(graph.name)
    package = request.package or Path(folder).resolve().name
    notes: Sequence[str] = ()
    if request.model is None and stage_ids(graph) is not None:
        for name in (*(["weights"] if request.weights else ()), *request.of_model()):
            odd = name.replace("_", "-")
            raise InvalidInputError(f"--{odd} is for a model; name it with --model")
        blueprint = dataclasses.replace(described_blueprint(graph, plan), name=package)
        files = package_files(blueprint, package, None)
    else:
        files, notes = _model_files(graph, plan, package, request)
    _check_free(Path(folder))
    place = made_folder(folder)
    for name, data in files.items():
        write_bytes(place / name, data)
    return [str(place / name) for name in sorted(files)], notes


def _check_free(folder: Path) -> None:
    """Refuse to write over something that is no exported package."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "wiring.json").exists():
        raise InvalidInputError(f"{folder} is not empty and no exported package; name another -o")


def _model_files(
    graph: Graph, plan: Plan, package: str, request: ExportRequest
) -> tuple[dict[str, bytes], Sequence[str]]:
    """Return the files of a package for a model that is built and captured again, and remarks."""
    from partita.capture.origin import Captures, load_origin  # noqa: PLC0415 (torch)
    from partita.capture.setting import example_inputs  # noqa: PLC0415 (torch)
    from partita.exporters.blueprint import blueprint_of  # noqa: PLC0415 (torch)
    from partita.exporters.matched import matched_plan  # noqa: PLC0415 (torch)
    from partita.exporters.package import package_files  # noqa: PLC0415 (torch)

    origin = _origin(graph, request)
    source = load_origin(origin)
    size = request.batch_size or (int(plan.microbatch_sizes[0]) if _is_ours(graph) else 0)
    captured = Captures(source, origin).at(size)
    inputs = example_inputs(source.model, source.example(size))
    fitting = plan if _is_ours(graph) else matched_plan(graph, plan, captured)
    blueprint = blueprint_of(captured, fitting, inputs)
    return package_files(blueprint, package, inputs, weights=request.weights), captured.notes


def _is_ours(graph: Graph) -> bool:
    """Return whether samples of a graph are samples of its model."""
    return stage_ids(graph) is None


def _origin(graph: Graph, request: ExportRequest) -> "ModelOrigin":
    """Return the model of a graph: what it says itself, with what the request says instead."""
    from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
    from partita.capture.origin import ANNOTATION, ModelOrigin, origin_of  # noqa: PLC0415 (torch)

    text, said = request.model, request.of_model()
    is_said = text is None or ANNOTATION in graph.annotations
    origin = origin_of(graph) if is_said else ModelOrigin(text=text or "")
    changes: dict[str, Any] = {} if text is None else {"text": text}
    if "granularity" in said:
        changes["granularity"] = Granularity(said.pop("granularity"))
    if "mode" in said:
        is_training = said.pop("mode") == Mode.TRAINING.value
        changes["mode"] = CaptureMode.TRAINING if is_training else CaptureMode.EVAL
    options = dataclasses.replace(origin.options, **said)
    return dataclasses.replace(origin, options=options, **changes)
