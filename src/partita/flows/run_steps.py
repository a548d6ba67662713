"""The steps of ``partita.train`` and ``partita.run``: profile, plan, carry out, write down."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from partita.capture.captured import CaptureMode, Granularity
from partita.capture.origin import Captures, ModelOrigin, load_origin, origin_of
from partita.capture.sources import SourceOptions
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import local_cluster, read_shorthand
from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind, Graph
from partita.core.problem import Mode, Objective, Problem
from partita.core.program import TransferMode
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.flows.baselines import baseline_plan
from partita.flows.estimated import estimator_of, find_modules_here, source_options
from partita.flows.execute import (
    Execution,
    Outcome,
    device_kind,
    execute,
    run_script,
    used_names,
    write_files,
)
from partita.flows.fields import PlannerFields
from partita.flows.planner_choice import chosen_planner
from partita.flows.problem import objective_of, objective_remarks, with_usual_reserve
from partita.flows.profile import ProfiledModel, profile_cache, profiled_model
from partita.flows.run_requests import OnStep, RunFields, RunRequest, TrainRequest, unwatched
from partita.flows.solutions import evaluated, read_solution
from partita.flows.summary import Summary, summarise
from partita.planners.table import get_planner
from partita.processes import machine_cores
from partita.profiler.measure.measure import ProfileOptions, this_gpu_type
from partita.program.order import ListOrder
from partita.ranks.setup import limit_threads, visible_gpus
from partita.requests import OnProgress, silent
from partita.runtime.baseline_names import TORCH_WAYS
from partita.runtime.directory import make_run_directory
from partita.runtime.emulation import Emulation
from partita.runtime.job import Job
from partita.runtime.launch import Host
from partita.runtime.power import Power
from partita.runtime.rank_capture import Capture

USUAL_DEVICES = 2
_STAGED = ("uniform", "uniform_floor", "uniform_transformer", "parameters", "autopipe")
"""Planners that take a number of stages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """A plan that is about to be carried out.

    Attributes:
        request: What was asked.
        summary: The plan and its figures.
        host: This host among those of the run.
        gpus: GPUs of this host that the ranks may use.
        profiled: The measured model; None where costs were estimated, or the plan was read.
        remarks: What was done other than asked, a sentence each.
    """

    request: TrainRequest | RunRequest
    summary: Summary
    host: Host
    gpus: int
    profiled: ProfiledModel | None = None
    remarks: tuple[str, ...] = ()

    @property
    def solution(self) -> Solution:
        """The plan with its problem."""
        return self.summary.solution


def prepare_training(request: TrainRequest, on_progress: OnProgress = silent) -> PreparedRun:
    """Profile a model and plan it over this machine's devices.

    Raises:
        InfeasibleError: It does not fit.
        InvalidInputError: There is no such model, or a value that does not go with the devices.
        UnsupportedError: More GPUs are wanted than there are.
    """
    find_modules_here()
    host, gpus = Host.of(os.environ), use_device_ids(request.device_ids, visible_gpus())
    cluster = _cluster(request, gpus)
    stages, replicas = degrees(len(cluster.devices), request.pp, request.dp, request.tp)
    on_progress(f"profiling {request.model}")
    profiled = None if request.cluster is not None else _profiled(request, cluster)
    graph = _estimated(request, cluster) if profiled is None else profiled.graph
    objective = objective_of(graph, Objective(), request)
    objective = with_usual_reserve(objective, cluster, request)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    on_progress("planning")
    noisy = replace(problem, graph=perturbed(graph, request.perturb, request.seed))
    found = _plan(noisy, request, stages, replicas)
    return PreparedRun(
        request=request,
        summary=summarise(evaluated(problem, found.plan, found)),
        host=host,
        gpus=gpus,
        profiled=profiled,
        remarks=objective_remarks(request),
    )


def prepare_run(request: RunRequest) -> PreparedRun:
    """Read a plan, with a request applied to it.

    Raises:
        InvalidInputError: The file holds no plan, or a bare one without its graph.
    """
    find_modules_here()
    solution = read_solution(request)
    host, gpus = Host.of(os.environ), use_device_ids(request.device_ids, visible_gpus())
    limit_threads(len(used_names(solution.plan)))
    return PreparedRun(
        request=request,
        summary=summarise(solution),
        host=host,
        gpus=gpus,
        remarks=objective_remarks(request),
    )


def carry_out(
    prepared: PreparedRun, on_progress: OnProgress = silent, on_step: OnStep = unwatched
) -> Outcome | None:
    """Carry out a plan in a run directory of its own, and write there what came of it.

    Args:
        prepared: The plan.
        on_progress: Called with each step of the work.
        on_step: Called with a rank and each training step that it has done.

    Returns:
        The run beside its prediction; None on other hosts than the first, which has it.

    Raises:
        UnsupportedError: The devices of the plan are not here.
        WorkerError: A rank failed, died or stood still; names it.
    """
    request, solution = prepared.request, prepared.solution
    plan, cluster, graph = solution.plan, solution.problem.cluster, solution.problem.graph
    script = request.script if isinstance(request, RunRequest) else ()
    kind = DeviceKind.CPU
    if not request.emulate:
        kind = device_kind(cluster, plan, prepared.gpus, prepared.host.num_hosts)
    origin = _origin(prepared)
    used = used_names(plan)
    types = sorted({device.type for device in cluster.devices if device.name in used})
    baseline = (request.baseline or "") if isinstance(request, TrainRequest) else ""
    directory = make_run_directory(
        Path(request.runs),
        graph.name,
        f"{len(used)}x{'+'.join(types)}",
        baseline or plan.schedule.value,
        "emulated" if request.emulate else "",
    )
    execution = Execution(
        job=job_of(request, origin, kind),
        directory=directory,
        check=request.check,
        launcher=request.launcher,
        host=prepared.host,
        baseline=baseline,
        on_progress=on_progress,
        on_step=on_step,
    )
    if script:
        outcome = run_script(solution, execution, script)
    elif prepared.profiled is not None:
        outcome = execute(solution, execution, prepared.profiled.captures)
    else:
        captures = None if origin is None else Captures(load_origin(origin), origin)
        outcome = execute(solution, execution, captures)
    return None if outcome is None else write_files(outcome, execution, request)


def _origin(prepared: PreparedRun) -> ModelOrigin | None:
    """Return the model of a run; None where it is emulated."""
    request, graph = prepared.request, prepared.solution.problem.graph
    if request.emulate:
        return None
    if prepared.profiled is not None:
        return prepared.profiled.captures.origin
    assert isinstance(request, RunRequest)
    return named_origin(graph, graph.name if request.script else request.model)


def named_origin(graph: Graph, text: str | None) -> ModelOrigin:
    """Return the model that a graph was made from, or another one that is named for it."""
    if text is None:
        return origin_of(graph)
    try:
        return replace(origin_of(graph), text=text)
    except InvalidInputError:
        return ModelOrigin(text=text, options=SourceOptions(batch_size=graph.batch_size))


def job_of(request: RunFields, model: ModelOrigin | None, kind: DeviceKind) -> Job:
    """Return how the ranks run, as a request says."""
    assert isinstance(request, TrainRequest | RunRequest)
    transfers = TransferMode(request.transfers)
    emulation = None
    if request.emulate:
        emulation = Emulation(
            scale=request.emulate_scale,
            steps=request.steps,
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
        steps=request.steps,
        optimizer=request.optimizer or "adam",
        learning_rate=request.learning_rate,
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


def _cluster(request: TrainRequest, gpus: int) -> Cluster:
    """Return the machines to plan for.

    Raises:
        UnsupportedError: More GPUs are wanted than there are.
    """
    if request.cluster is not None:
        return read_shorthand(request.cluster, load_catalogue())
    wanted = max(gpus_wanted(), (request.devices or 0) if gpus else 0)
    if wanted > gpus:
        raise UnsupportedError(
            f"{wanted} GPUs are wanted, this machine has {gpus}; --emulate --cluster rehearses a "
            "plan for machines that are not here"
        )
    if gpus:
        return read_shorthand(f"1x{wanted or gpus}x{this_gpu_type()}", load_catalogue())
    return local_cluster(request.devices or USUAL_DEVICES)


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
    )
    return estimated(sorted({device.type for device in cluster.devices}))


def _profiled(request: TrainRequest, cluster: Cluster) -> ProfiledModel:
    """Return the model with its measured costs."""
    assert request.model is not None
    on_gpu = cluster.devices[0].kind is DeviceKind.GPU
    ranks = 1 if request.baseline == "single" else len(cluster.devices)
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
    )


def _plan(problem: Problem, request: TrainRequest, stages: int, replicas: int) -> Solution:
    if request.baseline:
        return _baseline(problem, request, request.baseline)
    has_degrees = request.pp is not None or request.dp is not None
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
                f"--pp and --dp say nothing to planner {name!r}; leave them out"
            )
        options.setdefault("replicas", replicas)
    if name == "random":
        options.setdefault("seed", request.seed)
    solution = get_planner(name, **options)(problem)
    if request.pp is not None and len(solution.plan.stages) != stages:
        raise InvalidInputError(
            f"--pp {stages} does not match the {len(solution.plan.stages)} stages of {name}"
        )
    return solution


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
        UnsupportedError: Tensor parallelism.
    """
    if tp > 1:
        raise UnsupportedError(
            f"--tp {tp}: tensor parallelism can be planned and simulated, but not run yet; "
            "use --tp 1"
        )
    if pp is None and dp is None:
        return devices, 1
    stages = pp if pp is not None else max(1, devices // (dp or 1))
    replicas = dp if dp is not None else max(1, devices // stages)
    if stages * replicas != devices:
        pairs = [(d, devices // d) for d in range(1, devices + 1) if devices % d == 0]
        fitting = ", ".join(f"{a} x {b}" for a, b in pairs)
        raise InvalidInputError(
            f"--pp {stages} x --dp {replicas} = {stages * replicas} does not match {devices} "
            f"devices; pp x dp could be {fitting}"
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
