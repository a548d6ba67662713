"""The steps of ``partita.train`` and ``partita.run``: profile, plan, carry out, write down."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from partita.capture.captured import CaptureMode, Granularity
from partita.capture.origin import (
    Captures,
    ModelOrigin,
    load_origin,
    load_origin_partly,
    origin_of,
)
from partita.capture.sources import ModelSource, SourceOptions, directory_of
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import cpu_hosts, local_cluster, read_shorthand
from partita.core.cluster import Cluster
from partita.core.codec import read_json, write_json
from partita.core.graph import DeviceKind, Graph
from partita.core.plan import Plan, Shard
from partita.core.precision import DEFAULT_OPTIMIZER, parse_precision
from partita.core.problem import Mode, Objective, Problem
from partita.core.program import TransferMode
from partita.core.solution import Solution
from partita.documents import save
from partita.errors import InvalidInputError, UnsupportedError
from partita.flows.estimated import check_model, estimator_of, find_modules_here, source_options
from partita.flows.fields import ClusterFields, PlannerFields
from partita.flows.planner_choice import chosen_planner
from partita.flows.problem import (
    objective_of,
    objective_remarks,
    read_cluster,
    specialised_remarks,
    with_usual_reserve,
)
from partita.flows.profile import ProfiledModel, profile_cache, profiled_model
from partita.flows.runs.baselines import baseline_plan
from partita.flows.runs.elastic import execute_surviving
from partita.flows.runs.execute import (
    Execution,
    Outcome,
    device_kind,
    execute,
    run_script,
    used_names,
    write_files,
)
from partita.flows.runs.granted import Grant, by_grant, lease_of
from partita.flows.runs.requests import OnStep, RunFields, RunRequest, TrainRequest, unwatched
from partita.flows.solutions import evaluated, read_solution
from partita.flows.summary import Summary, describe_plan, summarise
from partita.hosts.driver import OnLine, hosts_of
from partita.hosts.ssh import load_hostfile
from partita.hosts.table import make_place
from partita.planners.table import get_planner
from partita.processes import machine_cores, other_load
from partita.profiler.measure.measure import ProfileOptions, this_gpu_type
from partita.program.order import ListOrder
from partita.ranks.setup import limit_threads, visible_gpus
from partita.requests import OnProgress, silent
from partita.runtime.baselines.names import TORCH_WAYS
from partita.runtime.batches import LastBatch, Sampling
from partita.runtime.checkpoint.files import newest_in, newest_of_runs, read_manifest
from partita.runtime.data import DataSpec, check_named_data, open_data, tokens_of
from partita.runtime.directory import make_run_directory
from partita.runtime.emulation.rehearsal import Emulation
from partita.runtime.job import Job
from partita.runtime.metric_rows import StepRow
from partita.runtime.metrics import OnRow, RunFacts, Tracker, check_sinks, open_sinks
from partita.runtime.power import Power
from partita.runtime.rank import StepNews
from partita.runtime.rank_capture import Capture
from partita.runtime.rendezvous import Host, decided_by_first
from partita.runtime.restarts import never
from partita.runtime.run_state import HERE, RunEvents, driving
from partita.runtime.training.evaluation import Evaluation
from partita.runtime.training.recipe import NanPolicy, Recipe, Schedule
from partita.runtime.training.saving import AUTO
from partita.runtime.weights import weights_in
from partita.units import parse_tokens

USUAL_DEVICES = 2
_DRAWN = "none"
_CPU = "cpu"
"""Type of the devices of machines without GPUs."""
_STAGED = ("uniform", "uniform_floor", "uniform_transformer", "parameters", "autopipe")
"""Planners that take a number of stages."""
_DIVIDING = ("uniform", "custom")
"""Planners that take a tensor-parallel degree."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """A plan that is about to be carried out.

    Attributes:
        request: What was asked.
        summary: The plan and its figures.
        host: This host among those of the run.
        gpus: GPUs of this host that the ranks may use.
        steps: Number of steps.
        profiled: The measured model; None where costs were estimated, or the plan was read.
        grant: What the fleet gave that has started it; None = none has.
        is_left_out: Whether the plan uses other hosts only.
        remarks: What was done other than asked, a sentence each.
    """

    request: TrainRequest | RunRequest
    summary: Summary
    host: Host
    gpus: int
    steps: int
    profiled: ProfiledModel | None = None
    grant: Grant | None = None
    is_left_out: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def solution(self) -> Solution:
        """The plan with its problem."""
        return self.summary.solution


def prepare_training(request: TrainRequest, on_progress: OnProgress = silent) -> PreparedRun:
    """Profile a model and plan it over this machine's devices.

    Where several hosts are told of one another, the first one does so for the devices of all.

    Raises:
        InfeasibleError: It does not fit.
        InvalidInputError: There is no such model, or a value that does not go with the devices.
        UnsupportedError: More GPUs are wanted than there are.
    """
    assert request.model is not None  # checked before
    grant, host = Grant.of(os.environ), _this_host(request)
    request = by_grant(request, grant, host)
    assert request.model is not None
    find_modules_here()
    check_sinks(request.metrics)
    if not request.emulate:
        check_named_data(data_of(request), evaluates=bool(request.eval_every))
    request = replace(request, model=check_model(request.model))
    assert request.model is not None
    _check_weights_there(request)
    gpus = use_device_ids(request.device_ids, visible_gpus())
    profiled: ProfiledModel | None = None
    is_left_out = False
    if host.num_hosts > 1 and request.cluster is None:
        if grant is not None and len(grant.servers) == host.num_hosts:
            host = replace(host, names=grant.servers)
        solution, profiled, found = _plan_for_hosts(request, host, gpus, on_progress)
        is_left_out, host = found is None, found or host
    else:
        solution, profiled = _plan_for(request, _cluster(request, gpus), gpus, on_progress)
    graph = solution.problem.graph
    steps = request.steps
    if profiled is not None:
        steps = steps_of(request, solution.plan, lambda: profiled.captures.source)
    elif not request.emulate:
        steps = steps_of(request, solution.plan, lambda: load_origin(named_origin(graph, None)))
    return PreparedRun(
        steps=steps,
        request=request,
        summary=summarise(solution),
        host=host,
        gpus=gpus,
        profiled=profiled,
        grant=grant,
        is_left_out=is_left_out,
        remarks=(*objective_remarks(request), *specialised_remarks(graph)),
    )


def _plan_for(
    request: TrainRequest, cluster: Cluster, gpus: int, on_progress: OnProgress
) -> tuple[Solution, ProfiledModel | None]:
    """Return the plan for a cluster, and the model as it was measured; None = it was not."""
    stages, replicas = degrees(len(cluster.devices), request.pp, request.dp, request.tp)
    on_progress(f"profiling {request.model}")
    is_measured = _is_measured(request, cluster, gpus)
    profiled = _profiled(request, cluster, on_progress) if is_measured else None
    graph = _estimated(request, cluster) if profiled is None else profiled.graph
    types = sorted({device.type for device in cluster.devices})
    if profiled is not None and request.tp > 1 and all(types):
        captured = profiled.captures.at(graph.batch_size)
        graph = replace(graph, degrees=captured.degrees_at(request.tp, graph, types))
    objective = objective_of(graph, Objective(), request)
    objective = with_usual_reserve(objective, cluster, request)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    on_progress("planning")
    noisy = replace(problem, graph=perturbed(graph, request.perturb, request.seed))
    found = _plan(noisy, request, stages, replicas)
    return evaluated(problem, found.plan, found), profiled


def _plan_for_hosts(
    request: TrainRequest, host: Host, gpus: int, on_progress: OnProgress
) -> tuple[Solution, ProfiledModel | None, Host | None]:
    """Plan for the devices of several hosts, which the first one does for all.

    Returns:
        The plan, the model as it was measured here, and this host among those that the plan uses;
        None = it uses others.

    Raises:
        InvalidInputError: Their devices differ: costs are measured on one of them.
    """
    measured: list[ProfiledModel | None] = [None]

    def plan(hosts: Sequence[Mapping[str, Any]]) -> str:
        found, measured[0] = _plan_for(request, _cluster_of(host, hosts), gpus, on_progress)
        return json.dumps([write_json(found), [each["address"] for each in hosts]])

    if host.index:
        on_progress(f"waiting for the plan of {host.called(0)}")
    type_, count = _devices_here(request, gpus)
    mine = {"type": type_, "count": count, "address": host.own_address()}
    plan_text, addresses = json.loads(decided_by_first(host, mine, plan))
    solution: Solution = read_json(plan_text)
    cluster = solution.problem.cluster
    used = {cluster.devices[cluster.index_of[name]].host for name in used_names(solution.plan)}
    return solution, measured[0], host.among(sorted(used), addresses)


def _cluster_of(host: Host, hosts: Sequence[Mapping[str, Any]]) -> Cluster:
    """Return the devices of several hosts, each with their type and number."""
    types = {str(each["type"]) for each in hosts}
    if len(types) > 1:
        found = ", ".join(f"{host.called(k)} {each['type']}" for k, each in enumerate(hosts))
        raise InvalidInputError(
            f"the hosts have different devices: {found}; 'partita run' takes a plan for them"
        )
    (type_,) = types
    if type_ == _CPU:
        return cpu_hosts({f"host{k}": each["count"] for k, each in enumerate(hosts)})
    return read_shorthand(
        "+".join(f"1x{each['count']}x{type_}" for each in hosts), load_catalogue()
    )


def _this_host(request: RunFields) -> Host:
    """Return this host among those of a run; one that only drives other hosts is none of them."""
    return Host.of(os.environ) if request.on is None else Host()


def _is_measured(request: TrainRequest, cluster: Cluster, gpus: int) -> bool:
    """Return whether costs are measured here: the devices are this machine's, or like them."""
    if request.cluster is None or request.emulate:
        return request.cluster is None
    return {device.type for device in cluster.devices} == {this_gpu_type() if gpus else _CPU}


def prepare_run(request: RunRequest) -> PreparedRun:
    """Read a plan, with a request applied to it.

    Raises:
        InvalidInputError: The file holds no plan, or a bare one without its graph.
    """
    grant, host = Grant.of(os.environ), _this_host(request)
    request = by_grant(request, grant, host)
    find_modules_here()
    _check_weights_there(request)
    solution = read_solution(request)
    remarks: tuple[str, ...] = ()
    if grant is not None and not request.emulate and request.on is None:
        solution, remarks = _planned_for_grant(request, solution, grant)
    gpus = use_device_ids(request.device_ids, visible_gpus())
    limit_threads(len(used_names(solution.plan)))
    graph = solution.problem.graph
    return PreparedRun(
        steps=steps_of(
            request, solution.plan, lambda: load_origin(named_origin(graph, request.model))
        ),
        request=request,
        summary=summarise(solution),
        host=host,
        gpus=gpus,
        grant=grant,
        remarks=(*remarks, *objective_remarks(request), *specialised_remarks(graph)),
    )


def _planned_for_grant(
    request: RunRequest, solution: Solution, grant: Grant
) -> tuple[Solution, tuple[str, ...]]:
    """Return a plan for no more devices than a fleet has granted, and what was done to it."""
    used = used_names(solution.plan)
    if len(used) <= grant.devices:
        return solution, ()
    problem = solution.problem
    some = replace(problem, cluster=problem.cluster.only(used[: grant.devices]))
    found = evaluated(some, plan_for_devices(request, solution, some).plan, solution)
    plan = describe_plan(found.plan)
    return found, (f"{grant.devices} of {len(used)} devices were granted: {plan}",)


def carry_out(
    prepared: PreparedRun,
    on_progress: OnProgress = silent,
    on_step: OnStep = unwatched,
    on_row: OnRow = lambda _: None,
    *,
    on_line: OnLine = unwatched,
    directory: Path | None = None,
) -> Outcome | None:
    """Carry out a plan in a run directory of its own, and write there what came of it.

    Args:
        prepared: The plan.
        on_progress: Called with each step of the work.
        on_step: Called with a rank and each training step that it has done.
        on_row: Called with the metrics of each step that all ranks have done.
        on_line: Called with a rank of other hosts and each line that it prints.
        directory: The run directory; a new one if not given.

    Returns:
        The run beside its prediction; None on other hosts than the first, which has it.

    Raises:
        UnsupportedError: The devices of the plan are not here.
        WorkerError: A rank failed, died or stood still; names it.
    """
    if prepared.is_left_out:
        on_progress("the plan uses other hosts only")
        return None
    watch = _Watch(on_progress=on_progress, on_step=on_step, on_row=on_row, on_line=on_line)
    lease = lease_of(prepared.request, prepared.grant, prepared.steps, prepared.host)
    if lease is None:
        return _carry_out(prepared, watch, directory)
    if lease.is_done:
        on_progress(f"all steps are done: {prepared.request.checkpoints} has the last one")
        lease.end(stopped=False)
        return None

    def on_done(row: StepRow) -> None:
        lease.note(row.step)
        on_row(row)

    done_by: dict[int, int] = {}

    def on_news(rank: int, news: StepNews) -> None:
        done_by[rank] = news.step + 1
        lease.note(min(done_by.values()))
        on_step(rank, news)

    watch = replace(watch, on_row=on_done, stop=lease.why)
    if prepared.host.num_hosts > 1:  # ranks of other hosts say nothing here, so there are no rows
        watch = replace(watch, on_step=on_news)
    made = _carry_out(prepared, watch, directory)
    if made is not None:
        lease.end(stopped=bool(made.run.stopped))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """What is called as a run goes on, and what says why it is to end."""

    on_progress: OnProgress
    on_step: OnStep
    on_row: OnRow
    on_line: OnLine
    stop: Callable[[], str] = never


def _carry_out(prepared: PreparedRun, watch: _Watch, directory: Path | None) -> Outcome | None:
    request, solution, on_progress = prepared.request, prepared.solution, watch.on_progress
    plan, cluster, graph = solution.plan, solution.problem.cluster, solution.problem.graph
    script = request.script if isinstance(request, RunRequest) else ()
    kind = DeviceKind.CPU
    if not request.emulate:
        gpus = prepared.gpus if request.on is None else None
        kind = device_kind(cluster, plan, gpus, prepared.host.num_hosts)
    origin = _origin(prepared)
    check_sinks(request.metrics)
    captures: Captures | None = None
    if prepared.profiled is not None:
        captures = prepared.profiled.captures
    elif origin is not None and not script:
        # Where nothing is computed here, the model has stand-ins for all its parameters.
        elsewhere = request.on is not None and not request.check
        source = load_origin_partly(origin, frozenset()) if elsewhere else load_origin(origin)
        captures = Captures(source, origin)
    used = used_names(plan)
    baseline = (request.baseline or "") if isinstance(request, TrainRequest) else ""
    directory = run_directory_of(prepared) if directory is None else directory
    on_progress = _noted(prepared, directory, on_progress)
    execution = Execution(
        job=with_checkpoints(
            replace(
                job_of(request, origin, kind, prepared.steps),
                weights="" if script else weights_of(request, origin, on_progress),
            ),
            request,
            directory,
            graph.name,
            on_progress,
        ),
        directory=directory,
        check=request.check,
        launcher=request.launcher,
        host=prepared.host,
        baseline=baseline,
        on_progress=on_progress,
        on_line=watch.on_line,
    )
    facts = RunFacts(
        ranks=len(used),
        samples=plan.samples,
        tokens=0 if captures is None else plan.samples * tokens_of(captures.source),
        recipe=execution.job.recipe,
        has_loss=not request.emulate,
    )
    settings = {name: value for name, value in request.given().items() if name != "plan"}
    sinks = open_sinks(request.metrics, directory, settings)
    # Of other hosts' load nothing is known here, and an emulated run sleeps.
    busy = "" if request.on is not None or request.emulate else other_load()
    with Tracker(facts, sinks, watch.on_row) as tracker, ExitStack() as stack:
        if not prepared.host.index:
            stack.enter_context(driving(directory, request.on or HERE))

        def noted(rank: int, news: StepNews) -> None:
            tracker(rank, news)
            watch.on_step(rank, news)

        execution = replace(execution, on_step=noted)

        def run_plan(found: Solution, way: Execution) -> Outcome | None:
            with ExitStack() as hosts:
                if request.on is not None:
                    place = make_place(request, hosts_of(found, way.job))
                    on_progress(f"waiting for {request.on}")
                    way = replace(way, place=hosts.enter_context(place))
                if script:
                    return run_script(found, way, script)
                return execute(found, way, captures)

        outcome = execute_surviving(
            solution,
            execution,
            request,
            run_plan,
            partial(plan_for_devices, request, solution),
            stop=watch.stop,
        )
        if outcome is None:
            return None
        return write_files(replace(outcome, busy=busy), execution, request)


def _noted(prepared: PreparedRun, directory: Path, on_progress: OnProgress) -> OnProgress:
    """Leave the plan in the run directory, and return what notes there what is told of the run.

    Of hosts that share the directory the first one does.
    """
    if prepared.host.index:
        return on_progress
    save(prepared.solution, directory / "plan.json")
    events = RunEvents(directory, prepared.steps)

    def noted(text: str) -> None:
        events(text)
        on_progress(text)

    return noted


def run_directory_of(prepared: PreparedRun) -> Path:
    """Make the run directory of a plan: date, model, devices, schedule."""
    request, solution = prepared.request, prepared.solution
    plan, cluster = solution.plan, solution.problem.cluster
    used = used_names(plan)
    types = sorted({device.type for device in cluster.devices if device.name in used})
    baseline = (request.baseline or "") if isinstance(request, TrainRequest) else ""
    return make_run_directory(
        Path(request.runs),
        solution.problem.graph.name,
        f"{len(used)}x{'+'.join(types)}",
        baseline or plan.schedule.value,
        "emulated" if request.emulate else "",
    )


def plan_for_devices(
    request: TrainRequest | RunRequest, first: Solution, problem: Problem
) -> Solution:
    """Plan for some of the devices of a run, by the planner of its first plan where that can be.

    A tensor-parallel degree stays where it divides the devices.
    """
    count, tp = len(problem.cluster.devices), max(stage.tp for stage in first.plan.stages)
    if tp > 1 and count % tp == 0:
        sequence = any(stage.sequence_parallel for stage in first.plan.stages)
        uniform = get_planner("uniform", stages=count // tp, tp=tp, sequence_parallel=sequence)
        return uniform(problem)
    if isinstance(request, TrainRequest) and request.pp is None and request.dp is None:
        stages, replicas = degrees(count, None, None, 1)
        whole = replace(request, zero=None, tp=1)  # one replica
        return _plan(problem, whole, stages, replicas)
    planner = first.planner if isinstance(request, RunRequest) and first.planner else None
    return chosen_planner(PlannerFields(planner=planner)).function()(problem)


def steps_of(request: RunFields, plan: Plan, source: Callable[[], ModelSource]) -> int:
    """Return the steps of a run: as many as it says, or as its epochs or tokens take.

    Raises:
        InvalidInputError: The data have no end, or samples are no texts.
    """
    if request.epochs is None and request.tokens is None:
        return request.steps
    model, sizes = source(), plan.microbatch_sizes.tolist()
    if request.tokens is not None:
        per_step = plan.samples * tokens_of(model)
        if not per_step:
            raise InvalidInputError(
                f"--tokens {request.tokens}: {model.name!r} reads no texts; give --steps or "
                "--epochs"
            )
        return max(1, math.ceil(parse_tokens(request.tokens, "--tokens") / per_step))
    assert request.epochs is not None
    batches, _ = open_data(data_of(request), model, sizes)
    if not batches.steps_per_epoch:
        raise InvalidInputError(
            f"--epochs {request.epochs:g}: {request.data} has no end; give --steps"
        )
    return max(1, round(request.epochs * batches.steps_per_epoch))


def recipe_of(request: RunFields, steps: int) -> Recipe:
    """Return what a request trains with, for a number of steps."""
    assert isinstance(request, TrainRequest | RunRequest)
    constant = request.lr_schedule == "constant"
    return Recipe(
        optimizer=request.optimizer or DEFAULT_OPTIMIZER,
        learning_rate=request.learning_rate,
        weight_decay=request.weight_decay,
        clip_norm=request.clip,
        precision=None if request.precision is None else parse_precision(request.precision),
        schedule=Schedule(
            name=request.lr_schedule,
            warmup=request.warmup,
            steps=0 if constant else steps,
            floor=request.lr_floor,
        ),
        on_nan=NanPolicy(request.on_nan),
    )


def data_of(request: RunFields) -> DataSpec:
    """Return the data that a request names."""
    assert isinstance(request, TrainRequest | RunRequest)
    return DataSpec(
        source=request.data,
        held_out=request.eval_data or "",
        sampling=None if request.sampling is None else Sampling(request.sampling),
        last_batch=LastBatch(request.last_batch),
        seed=request.seed,
    )


def _origin(prepared: PreparedRun) -> ModelOrigin | None:
    """Return the model of a run; None where it is emulated."""
    request, graph = prepared.request, prepared.solution.problem.graph
    if request.emulate:
        return None
    if prepared.profiled is not None:
        return prepared.profiled.captures.origin
    if isinstance(request, TrainRequest):
        return named_origin(graph, None)
    return named_origin(graph, graph.name if request.script else request.model)


def _check_weights_there(request: RunFields) -> None:
    """Check that the weights are there, before anything takes time.

    Raises:
        InvalidInputError: They are not.
    """
    named = request.weights
    if named is not None and named != _DRAWN and not Path(named).exists():
        raise InvalidInputError(f"--weights {named}: there is no such file or directory")


def weights_of(
    request: RunFields, origin: ModelOrigin | None, on_progress: OnProgress = silent
) -> str:
    """Return the first weights of a run: a path, or empty where they are drawn.

    Those of a directory that is named as the model are taken, and that is said.
    """
    if origin is None or request.weights == _DRAWN:
        return ""
    if request.weights is not None:
        return str(Path(request.weights).absolute())
    directory = directory_of(origin.text)
    found = None if directory is None else weights_in(directory)
    if found is None:
        return ""
    on_progress(f"first weights are those of {found}; --weights {_DRAWN} draws them")
    return str(found.absolute())


def named_origin(graph: Graph, text: str | None) -> ModelOrigin:
    """Return the model that a graph was made from, or another one that is named for it."""
    if text is None:
        return origin_of(graph)
    try:
        return replace(origin_of(graph), text=text)
    except InvalidInputError:
        return ModelOrigin(text=text, options=SourceOptions(batch_size=graph.batch_size))


def job_of(
    request: RunFields, model: ModelOrigin | None, kind: DeviceKind, steps: int
) -> Job:  # fmt: skip
    """Return how the ranks run, as a request says."""
    assert isinstance(request, TrainRequest | RunRequest)
    transfers = TransferMode(request.transfers)
    emulation = None
    if request.emulate:
        emulation = Emulation(
            scale=request.emulate_scale,
            steps=steps,
            slow=_slow_devices(request.emulate_slow),
            blocking=transfers is TransferMode.BLOCKING,
        )
    power = None
    if request.energy_server or request.power_device or request.export_timing_csv:
        power = Power(
            device=request.power_device or "",
            server=request.energy_server or "",
            wish=request.energy_wish or "",
            profile_steps=request.profile_steps,
            keep_log=bool(request.export_timing_csv),
        )
    return Job(
        model=None if emulation else model,
        steps=steps,
        recipe=recipe_of(request, steps),
        data=data_of(request),
        evaluation=Evaluation(every=request.eval_every, batches=request.eval_batches),
        seed=request.seed,
        order=ListOrder(request.order),
        transfers=transfers,
        same_data=request.repeatable,
        keep_results=False,
        capture=Capture(request.capture),
        stall_limit_s=request.stall_limit,
        device=kind,
        emulate=emulation,
        power=power,
    )


def _slow_devices(texts: Sequence[str]) -> dict[str, float]:
    """Return the factors on the compute times of devices, by name.

    Raises:
        InvalidInputError: A text says none.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, factor = text.rpartition("=")
        try:
            found[name] = float(factor)
        except ValueError:
            name = ""
        if not name:
            raise InvalidInputError(f"--emulate-slow {text!r}; expected DEVICE=FACTOR, like cpu1=2")
    return found


def with_checkpoints(
    job: Job,
    request: TrainRequest | RunRequest,
    directory: Path,
    model: str,
    on_progress: OnProgress = silent,
) -> Job:
    """Return how the ranks run, with the checkpoints that a request asks for.

    Args:
        job: How they run without.
        request: What was asked.
        directory: The run directory.
        model: Name of the model's graph.
        on_progress: Called with which checkpoint the run goes on from.

    Raises:
        InvalidInputError: There is no such checkpoint, or it leaves nothing to do.
    """
    if not request.saves:
        return job
    folder = Path(request.checkpoints or directory / "checkpoints").absolute()
    resume, found = request.resume, None
    if resume is not None and resume != AUTO:
        found = newest_in(Path(resume))
        if found is None:
            raise InvalidInputError(f"--resume {resume}: there is no checkpoint")
        resume = str(Path(resume).absolute())
    elif resume == AUTO and request.checkpoints is not None:
        found = newest_in(folder)
    elif resume == AUTO:
        found = newest_of_runs(Path(request.runs), model)
        resume = None if found is None else str(found.parent.absolute())
    if found is not None:
        step = read_manifest(found).step
        has_script = isinstance(request, RunRequest) and request.script
        if step >= job.steps and not has_script:
            raise InvalidInputError(
                f"{found} has done {step} steps; --steps {job.steps} leaves nothing to do"
            )
        on_progress(f"newest checkpoint: {found}, which the ranks verify first")
    return replace(
        job,
        checkpoints=str(folder),
        save_every=request.save_every,
        keep=request.keep,
        resume=resume,
    )


def _cluster(request: TrainRequest, gpus: int) -> Cluster:
    """Return the machines to plan for.

    Raises:
        UnsupportedError: More GPUs are wanted than there are.
    """
    if request.cluster is not None and request.on is not None:
        found, _ = read_cluster(ClusterFields(cluster=request.cluster))
        assert found is not None  # one was named
        return found
    if request.cluster is not None:
        return read_shorthand(request.cluster, load_catalogue())
    if request.on is not None:
        return _cluster_on(request.on)
    type_, count = _devices_here(request, gpus)
    if type_ == _CPU:
        return local_cluster(count)
    return read_shorthand(f"1x{count}x{type_}", load_catalogue())


def _devices_here(request: TrainRequest, gpus: int) -> tuple[str, int]:
    """Return type and number of the devices of this machine that a training is for.

    Raises:
        UnsupportedError: More GPUs are wanted than there are.
    """
    wanted = max(gpus_wanted(), (request.devices or 0) if gpus else 0)
    if wanted > gpus:
        raise UnsupportedError(
            f"{wanted} GPUs are wanted, this machine has {gpus}; --emulate --cluster rehearses a "
            "plan for machines that are not here"
        )
    if gpus:
        return this_gpu_type(), wanted or gpus
    return _CPU, request.devices or USUAL_DEVICES


def _cluster_on(place: str) -> Cluster:
    """Return the hosts of a host file as CPU processes, as many as each has slots.

    Raises:
        InvalidInputError: The place is none that has a host file.
    """
    kind, _, hostfile = place.partition(":")
    if kind != "ssh":
        raise InvalidInputError(
            f"--on {kind}: add --cluster, which says what devices its hosts have"
        )
    hosts = load_hostfile(Path(hostfile))
    return cpu_hosts({host.name: max(1, host.slots) for host in hosts})


def gpus_wanted() -> int:
    """Return what NUM_GPUS says; 0 = nothing.

    Raises:
        InvalidInputError: It is no number.
    """
    text = os.environ.get("NUM_GPUS", "0")
    if not text.isdecimal():
        raise InvalidInputError(f"NUM_GPUS is {text!r}; expected a number")
    return int(text)


def use_device_ids(text: str | None, gpus: int) -> int:
    """Let ranks see some GPUs only, or run on some cores only; returns how many GPUs are seen.

    This process is limited too: its ranks inherit what it has.

    Raises:
        InvalidInputError: There is no such device.
        UnsupportedError: This system cannot choose cores.
    """
    if text is None:
        return gpus
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--device-ids {text!r}; expected numbers like 0,1") from None
    if not gpus and not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError("--device-ids chooses cores, which this system does not let us do")
    there = list(range(gpus)) if gpus else sorted(os.sched_getaffinity(0))
    missing = sorted(set(ids) - set(there))
    if missing:
        what = "GPUs" if gpus else "cores"
        known = ", ".join(map(str, there))
        raise InvalidInputError(
            f"--device-ids {text}: there is no {missing[0]}; {what} are {known}"
        )
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = visible if len(visible) == gpus else [str(number) for number in there]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[number] for number in ids)
        return len(ids)
    os.sched_setaffinity(0, ids)
    return 0


def _estimated(request: TrainRequest, cluster: Cluster) -> Graph:
    """Return the model priced by shapes, for machines that are not here."""
    assert request.model is not None
    estimated = estimator_of(
        request.model,
        request,
        request.mode,
        batch_size=request.microbatch_size,
        seed=request.seed,
        as_used=False,  # a run computes in the dtype of the model unless it is told otherwise
    )
    return estimated(sorted({device.type for device in cluster.devices}))


def _profiled(request: TrainRequest, cluster: Cluster, on_progress: OnProgress) -> ProfiledModel:
    """Return the model with its measured costs."""
    assert request.model is not None
    on_gpu = cluster.devices[0].kind is DeviceKind.GPU
    here = len(cluster.devices) if request.on else sum(d.host == 0 for d in cluster.devices)
    ranks = 1 if request.baseline == "single" else here
    if request.baseline in TORCH_WAYS:
        ranks = machine_cores()  # a thread each: these ranks are forked
    threads = limit_threads(ranks)
    infers = request.mode == Mode.INFERENCE.value
    origin = ModelOrigin(
        text=request.model,
        options=source_options(
            request,
            batch_size=request.microbatch_size,
            device="cuda:0" if on_gpu else "cpu",
            seed=request.seed,
        ),
        granularity=Granularity(request.granularity),
        mode=CaptureMode.EVAL if infers else CaptureMode.TRAINING,
        loss=request.loss or "",
    )
    return profiled_model(
        origin,
        ProfileOptions(rounds=request.rounds, threads=threads),
        cache=None if request.no_cache else profile_cache(),
        on_round=lambda done, total: on_progress(
            f"profiling {request.model}: {done} of {total} rounds"
        ),
    )


def _plan(problem: Problem, request: TrainRequest, stages: int, replicas: int) -> Solution:
    if request.baseline:
        return _baseline(problem, request, request.baseline)
    has_degrees = request.pp is not None or request.dp is not None or request.tp > 1
    planner = request.planner
    if has_degrees and planner is None and request.partition is None:
        planner = "uniform"
    choice = chosen_planner(
        PlannerFields(planner=planner, partition=request.partition, option=request.option)
    )
    name, options = choice.name, dict(choice.options)
    if has_degrees:
        if name in _STAGED:
            options.setdefault("stages", stages)
        elif name != "custom":
            raise InvalidInputError(
                f"--pp, --dp and --tp say nothing to planner {name!r}; leave them out"
            )
        options.setdefault("replicas", replicas)
    if request.tp > 1:
        if name not in _DIVIDING:
            raise InvalidInputError(
                f"--tp says nothing to planner {name!r}; use {' or '.join(_DIVIDING)}"
            )
        options.setdefault("tp", request.tp)
    if name == "random":
        options.setdefault("seed", request.seed)
    solution = get_planner(name, **options)(problem)
    if request.pp is not None and len(solution.plan.stages) != stages:
        raise InvalidInputError(
            f"--pp {stages} does not match the {len(solution.plan.stages)} stages of {name}"
        )
    return _divided(solution, request, name)


def _divided(solution: Solution, request: TrainRequest, name: str) -> Solution:
    """Return what a planner has found with what is asked to be divided within its stages."""
    if request.zero is not None:
        if name not in _DIVIDING:
            raise InvalidInputError(
                f"--zero says nothing to planner {name!r}, which may divide state by itself; use "
                f"{' or '.join(_DIVIDING)}"
            )
        solution = replace(solution, plan=sharded(solution.plan, request.zero))
    if request.sp == "yes":
        solution = replace(solution, plan=divided_along_sequence(solution.plan))
    return solution


def divided_along_sequence(plan: Plan) -> Plan:
    """Return a plan whose tensor-parallel groups divide tensors along the sequence, too.

    Raises:
        InvalidInputError: It has no such group.
    """
    stages = tuple(replace(stage, sequence_parallel=stage.tp > 1) for stage in plan.stages)
    if not any(stage.sequence_parallel for stage in stages):
        raise InvalidInputError("--sp yes: no stage divides tensors; add --tp")
    return replace(plan, stages=stages)


def sharded(plan: Plan, zero: int) -> Plan:
    """Return a plan whose replicas divide their state, as ZeRO counts it.

    Raises:
        InvalidInputError: No stage has replicas.
    """
    kinds = (Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS)
    stages = tuple(
        replace(stage, shard=kinds[zero - 1]) if len(stage.devices) > 1 else stage
        for stage in plan.stages
    )
    if stages == plan.stages:
        raise InvalidInputError(f"--zero {zero}: no stage has replicas to divide state; add --dp")
    return replace(plan, stages=stages)


def _baseline(problem: Problem, request: TrainRequest, name: str) -> Solution:
    names: Sequence[str] = problem.cluster.device_names
    if request.device is not None and not 0 <= request.device < len(names):
        raise InvalidInputError(f"--device {request.device}; expected 0 to {len(names) - 1}")
    device = "" if request.device is None else names[request.device]
    return baseline_plan(name, problem, device=device, seed=request.seed)


def degrees(devices: int, pp: int | None, dp: int | None, tp: int) -> tuple[int, int]:
    """Return stages and replicas: what is left open follows from the devices.

    Raises:
        InvalidInputError: Their product is not the number of devices; says which would be.
    """
    if devices % tp:
        raise InvalidInputError(
            f"--tp {tp} does not divide {devices} devices; expected a divisor, or --devices "
            f"{tp * max(1, devices // tp)}"
        )
    devices //= tp
    if pp is None and dp is None:
        return devices, 1
    stages = pp if pp is not None else max(1, devices // (dp or 1))
    replicas = dp if dp is not None else max(1, devices // stages)
    if stages * replicas != devices:
        pairs = [(d, devices // d) for d in range(1, devices + 1) if devices % d == 0]
        fitting = ", ".join(f"{a} x {b}" for a, b in pairs)
        groups = "devices" if tp == 1 else f"groups of {tp} devices"
        raise InvalidInputError(
            f"--pp {stages} x --dp {replicas} = {stages * replicas} does not match {devices} "
            f"{groups}; pp x dp could be {fitting}"
        )
    return stages, replicas


def perturbed(graph: Graph, factor: float, seed: int) -> Graph:
    """Return a graph whose op times are multiplied by uniform(1 - factor, 1 + factor)."""
    if not 0 <= factor < 1:
        raise InvalidInputError(f"--perturb {factor}; expected 0 to below 1")
    if factor == 0:
        return graph
    rng = np.random.default_rng(seed)
    costs = tuple(
        replace(
            cost,
            forward_s=cost.forward_s * rng.uniform(1 - factor, 1 + factor, len(graph)),
            backward_s=cost.backward_s * rng.uniform(1 - factor, 1 + factor, len(graph)),
        )
        for cost in graph.costs
    )
    return replace(graph, costs=costs)
