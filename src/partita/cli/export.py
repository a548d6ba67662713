"""``partita export``: a plan as code, or as the files of PipeDream."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.cli.inputs import ProblemOptions, read_problem
from partita.cli.options import MODES, cluster_options, output_options, source_options
from partita.core.graph import Graph
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.solution import Solution
from partita.documents import open_file, unused_path, write_bytes, write_text
from partita.errors import InvalidInputError
from partita.exporters.pipedream_conf import num_ranks_of, read_num_ranks, runtime_configurations
from partita.flows.extras import torch_needed
from partita.formats.pipedream import read_pipedream_plan, stage_ids, write_pipedream_plan

if TYPE_CHECKING:
    from partita.capture.origin import ModelOrigin

TARGETS = ("python", "pipedream", "pipedream-conf")


@click.command(
    epilog="Example: partita export gpt.plan.json --to python -o gpt_stages\n\n"
    "partita export gpus=4.txt --to python --model vgg16 -o vgg16_stages"
)
@click.argument("plan", metavar="PLAN")
@click.option("--to", type=click.Choice(TARGETS), default="python", show_default=True)
@click.option("-o", "--output", help="Directory (pipedream: file) to write. [named by the model]")
@click.option("--model", help="The model, where PLAN does not say it. See 'partita profile'.")
@click.option("--package", help="Name of the Python package. [that of the directory]")
@click.option("--weights", is_flag=True, help="Write the weights too, as weights.pt.")
@click.option(
    "--stage-to-num-ranks",
    "--stage-to-num-ranks-map",
    "num_ranks",
    help="Ranks of each stage such as 0:3,1:1. [the plan's replicas]",
)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a call. [the plan's]")
@click.option("--mode", type=click.Choice(MODES), help="Of the model. [the plan's]")
@source_options
@click.option("--graph", help="The graph that a bare plan is for.")
@cluster_options
@output_options
def command(plan: str, to: str, output: str | None, **rest: Any) -> None:
    """Write PLAN as code: one readable module a stage, or the files of PipeDream.

    python: a package that needs torch alone. pipedream: gpus=N.txt. pipedream-conf: the
    configurations of PipeDream's runtime for data, model and hybrid parallelism. PLAN is what
    'partita plan' has written, or a gpus=N.txt; of such a file the layers are made from their
    descriptions if no --model is named.
    """
    rest.pop("debug")
    if to != "python" and (odd := _given(("model", "weights", "package", *_OF_MODEL))):
        raise click.UsageError(f"--{odd[0].replace('_', '-')} is for --to python")
    graph, found = _read(plan, rest)
    counts = _num_ranks(rest["num_ranks"], found, checked=to == "pipedream-conf")
    if to == "pipedream":
        written = _write_pipedream(graph, found, counts, output)
    elif to == "pipedream-conf":
        written = _write_configurations(graph, counts, output)
    else:
        found = _with_replicas(found, counts) if rest["num_ranks"] else found
        written = _write_package(graph, found, output, rest)
    if rest["as_json"]:
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json({"to": to, "stages": len(found.stages), "written": written})
    elif not rest["quiet"]:
        for path in written:
            click.echo(f"written {path}")


_CLUSTER = ("cluster", "devices", "bandwidth", "latency", "catalogue_file")
_OF_MODEL = ("sequence_length", "dtype", "scale", "granularity", "seed", "mode", "batch_size")


def _read(path: str, rest: dict[str, Any]) -> tuple[Graph, Plan]:
    """Return the graph and the plan in a file; a ``gpus=N.txt`` holds both."""
    given = rest.pop("graph")
    cluster = {name: rest.pop(name) for name in _CLUSTER}
    if given is None and any(value is not None for value in cluster.values()):
        raise click.UsageError("a cluster is for a bare plan: name its --graph too")
    problem = None if given is None else read_problem(given, ProblemOptions(**cluster))
    file = open_file(path)
    found = file.load(problem=problem)
    if isinstance(found, Solution):
        return found.problem.graph, found.plan
    if isinstance(found, Plan) and problem is not None:
        return problem.graph, found
    if isinstance(found, Plan):
        raise click.UsageError(f"{path} is a bare plan: name its --graph")
    if isinstance(found, Graph) and stage_ids(found) is not None:
        return found, read_pipedream_plan(file.text, found)
    kind = type(found).__name__.lower()
    raise InvalidInputError(f"{path!r} holds a {kind}, not a plan; make one with 'partita plan'")


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
    folder = _folder(output or f"{graph.name}-conf")
    found = runtime_configurations(counts)
    for name, values in found.items():
        write_text(folder / name, json.dumps(values, indent=4) + "\n")
    return [str(folder / name) for name in found]


def _folder(path: str) -> Path:
    """Return a directory, made if it is not there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise InvalidInputError(f"{path} cannot be a directory: {reason}") from exc
    return Path(path)


def _write_package(graph: Graph, plan: Plan, output: str | None, rest: dict[str, Any]) -> list[str]:
    with torch_needed("packages of modules need"):
        from partita.exporters.described import described_blueprint  # noqa: PLC0415 (torch)
        from partita.exporters.package import package_files, package_name  # noqa: PLC0415 (torch)
    folder = output or package_name(graph.name)
    package = rest["package"] or Path(folder).resolve().name
    if rest["model"] is None and stage_ids(graph) is not None:
        if rest["weights"] or _given(_OF_MODEL):
            odd = "weights" if rest["weights"] else _given(_OF_MODEL)[0].replace("_", "-")
            raise click.UsageError(f"--{odd} is for a model; name it with --model")
        blueprint = dataclasses.replace(described_blueprint(graph, plan), name=package)
        files = package_files(blueprint, package, None)
    else:
        files = _model_files(graph, plan, package, rest)
    _check_free(Path(folder))
    place = _folder(folder)
    for name, data in files.items():
        write_bytes(place / name, data)
    return [str(place / name) for name in sorted(files)]


def _given(names: Sequence[str]) -> list[str]:
    """Return those options that the user has typed."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [name for name in names if context.get_parameter_source(name) is typed]


def _check_free(folder: Path) -> None:
    """Refuse to write over something that is no exported package."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "wiring.json").exists():
        raise InvalidInputError(f"{folder} is not empty and no exported package; name another -o")


def _model_files(graph: Graph, plan: Plan, package: str, rest: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of a package for a model that is built and captured again."""
    from partita.capture.origin import Captures, load_origin  # noqa: PLC0415 (torch)
    from partita.capture.setting import example_inputs  # noqa: PLC0415 (torch)
    from partita.exporters.blueprint import blueprint_of  # noqa: PLC0415 (torch)
    from partita.exporters.matched import matched_plan  # noqa: PLC0415 (torch)
    from partita.exporters.package import package_files  # noqa: PLC0415 (torch)

    origin = _origin(graph, rest)
    source = load_origin(origin)
    size = rest["batch_size"] or (int(plan.microbatch_sizes[0]) if _is_ours(graph) else 0)
    captured = Captures(source, origin).at(size)
    inputs = example_inputs(source.model, source.example(size))
    fitting = plan if _is_ours(graph) else matched_plan(graph, plan, captured)
    for note in captured.notes:
        if not rest["quiet"] and not rest["as_json"]:
            click.echo(f"note: {note}", err=True)
    blueprint = blueprint_of(captured, fitting, inputs)
    return package_files(blueprint, package, inputs, weights=rest["weights"])


def _is_ours(graph: Graph) -> bool:
    """Return whether samples of a graph are samples of its model."""
    return stage_ids(graph) is None


def _origin(graph: Graph, rest: dict[str, Any]) -> "ModelOrigin":
    """Return the model of a graph: what it says itself, with what the user says instead."""
    from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
    from partita.capture.origin import ANNOTATION, ModelOrigin, origin_of  # noqa: PLC0415 (torch)

    text = rest["model"]
    is_known = text is None or ANNOTATION in graph.annotations
    origin = origin_of(graph) if is_known else ModelOrigin(text=text)
    typed = {name: rest[name] for name in _given(_OF_MODEL)}
    changes: dict[str, Any] = {} if text is None else {"text": text}
    if "granularity" in typed:
        changes["granularity"] = Granularity(typed.pop("granularity"))
    if "mode" in typed:
        is_training = typed.pop("mode") == "training"
        changes["mode"] = CaptureMode.TRAINING if is_training else CaptureMode.EVAL
    options = dataclasses.replace(origin.options, **typed)
    return dataclasses.replace(origin, options=options, **changes)
