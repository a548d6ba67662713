"""A plan carried out: in forked or fresh processes, emulated, or by torch's own ways."""

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.capture.origin import Captures
from partita.core.cluster import Cluster
from partita.core.columns import number_or_none
from partita.core.graph import DeviceKind
from partita.core.plan import Plan
from partita.core.problem import Mode
from partita.core.program import Program
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.predict import simulate
from partita.documents import save, write_text
from partita.errors import FormatError, InvalidInputError, UnsupportedError, WorkerError
from partita.flows.problem import specialised_remarks
from partita.flows.results import Result
from partita.flows.runs.energy import energy_figures, export_timing
from partita.flows.runs.requests import SHOWN, OnStep, RunFields, unwatched
from partita.flows.summary import describe_plan
from partita.hosts.driver import OnLine, Watch, run_on
from partita.hosts.places import Place
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.ranks.setup import why_not_fork
from partita.report.trace import chrome_trace
from partita.requests import OnProgress, silent
from partita.runtime.baselines.names import TORCH_WAYS
from partita.runtime.baselines.torch_ways import make_subject, run_baseline, verify_baseline
from partita.runtime.directory import write_results
from partita.runtime.emulation.rehearsal import (
    EmulatedWorkload,
    emulate_forked,
    emulated_workload,
    predicted,
)
from partita.runtime.executor import Run, check_runnable, make_task, run_forked
from partita.runtime.job import Job, JobDirectory
from partita.runtime.launch import collect, launch
from partita.runtime.metric_rows import METRICS
from partita.runtime.numerics import ready_numerics
from partita.runtime.rendezvous import Host
from partita.runtime.report import RunReport, recalibrated, report_run, settled
from partita.runtime.restarts import Survival
from partita.runtime.tensor_parallel import tensor_parallel_remarks
from partita.runtime.training.evaluation import Evaluation
from partita.runtime.verify import UNTOUCHED_MODULE, Verdict, verify
from partita.runtime.verify_module import verify_module
from partita.runtime.weights import LoadedWeights, check_weights, load_weights
from partita.runtime.workload import Workload, model_workload, use_repeatable_algorithms
from partita.units import format_bytes, format_seconds, format_share

CHECKED_STEPS = 2
SHOWN_WARNINGS = 8


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Outcome(Result):
    """A run beside its prediction, with the comparisons that were asked for.

    Attributes:
        solution: The plan with its problem.
        run: The run.
        predicted: The simulated step.
        report: The run beside its prediction; None for torch's own ways, which have no Program.
        verdict: The comparison with the captured graph in one process (for ``ddp`` and ``fsdp``
            with the untouched module), if it was asked for.
        module_verdict: The comparison with the untouched module, or why there is none; None if it
            was not asked for, or ``verdict`` is just that.
        baseline: Name of the baseline; empty for a plan of our own.
        remarks: What differs from a real run.
        directory: The run directory; None where nothing is written.
        busy: That other programs kept the machine busy when it began; empty = none did.
        written: Names of the files that were written.
        checkpoints: Folder of its checkpoints; empty = it saved nothing.
        weights: Path of its first weights; empty = they were drawn, or a script has them.
        weight_bytes: Bytes that were read of them, by all processes together.
    """

    solution: Solution
    run: Run
    predicted: Timeline
    report: RunReport | None = None
    verdict: Verdict | None = None
    module_verdict: Verdict | str | None = None
    baseline: str = ""
    remarks: tuple[str, ...] = ()
    directory: Path | None = None
    busy: str = ""
    written: tuple[str, ...] = ()
    checkpoints: str = ""
    weights: str = ""
    weight_bytes: int = 0

    @property
    def resume_by(self) -> str:
        """How a run that was stopped goes on."""
        return f"go on with --resume {self.checkpoints}" if self.checkpoints else "nothing is saved"

    @property
    def origin(self) -> str:
        """Whether it was measured or emulated."""
        return self.run.timelines[-1].origin.value if self.run.timelines else "measured"

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median without the first quarter; NaN where none was left."""
        return float(np.median(settled(self.run.step_s))) if self.run.step_s else math.nan

    @property
    def error(self) -> float:
        """The prediction relative to what was measured."""
        return self.predicted.makespan_s / self.step_s - 1

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step, once, also of earlier attempts; None where there is none."""
        last = [number_or_none(step.loss) for step in self.run.result.steps]
        if len(self.run.losses) <= len(last):
            return last
        return [number_or_none(loss) for _, loss in sorted(self.run.losses.items())]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All comparisons that were made."""
        made = (self.verdict, self.module_verdict)
        return tuple(verdict for verdict in made if isinstance(verdict, Verdict))

    def _weight_figures(self) -> dict[str, Any] | None:
        if not self.weight_bytes:
            return None
        return {"path": self.weights or None, "bytes_read": self.weight_bytes}

    def _check_figures(self) -> dict[str, Any] | None:
        if self.verdict is None:
            return None
        found, module = self.verdict.to_json(), self.module_verdict
        if isinstance(module, Verdict):
            found["module"] = module.to_json()
        elif module is not None:
            found["module"] = {"against": UNTOUCHED_MODULE, "equal": None, "reason": module}
        return found

    def require_equal(self) -> None:
        """Check that the run equals what it was compared with.

        Raises:
            WorkerError: It does not equal the captured graph, or the untouched module.
        """
        for verdict in self.verdicts:
            if not verdict.is_equal:
                worst = verdict.differences[0] if verdict.differences else None
                what = (
                    f"{worst.what} {worst.name!r} of step {worst.step}"
                    if worst
                    else "nothing compared"
                )
                notes = specialised_remarks(self.solution.problem.graph)
                raise WorkerError(
                    f"the run differs from {verdict.against}: {what} by {verdict.worst:.1e}"
                    + "".join(f"; {note}" for note in notes)
                )

    def lines(self) -> list[str]:
        """Return the verdicts of a run, and its speed beside the predicted one."""
        steps = max((*self.run.losses, len(self.run.step_s) - 1)) + 1
        words = [f"step {steps}/{steps}"]
        losses = self.losses
        if any(loss is not None for loss in losses):
            first, last = (math.nan if loss is None else loss for loss in (losses[0], losses[-1]))
            words.append(f"loss {first:.4g} -> {last:.4g}")
        if self.run.held_out:
            words.append(f"held out {self.run.held_out[max(self.run.held_out)]:.4g}")
        words += [
            f"{format_seconds(self.step_s)} per step {self.origin}",
            f"predicted {format_seconds(self.predicted.makespan_s)}"
            f" ({format_share(self.error, sign=True)})",
            f"{self.solution.plan.samples / self.step_s:.3g} samples/s",
        ]
        if self.report is not None:
            bubbles = [row.bubble[1] for row in self.report.devices]
            words.append(f"bubble {format_share(sum(bubbles) / len(bubbles))}")
        checks = [verdict.line() for verdict in self.verdicts]
        if isinstance(self.module_verdict, str):
            checks.append(f"not compared with the untouched module: {self.module_verdict}")
        lines = [*(f"check     {line}" for line in checks), "run       " + "  ".join(words)]
        if self.weight_bytes:
            read = f"{format_bytes(self.weight_bytes)} read"
            lines.append(f"weights   {self.weights or 'those of the script'}: {read}")
        if self.busy:
            lines.append(f"busy      {self.busy}")
        lines += [f"survived  {incident.line()}" for incident in self.run.incidents]
        if self.run.stopped:
            lines.append(f"stopped   {self.run.stopped}, after step {steps}; {self.resume_by}")
        return lines

    def rows(self) -> list[Mapping[str, object]]:
        """Return predicted and measured seconds of each stage."""
        return [
            {
                "stage": row.stage,
                "devices": ", ".join(row.devices),
                "predicted compute_s": row.compute_s[0],
                "measured compute_s": row.compute_s[1],
            }
            for row in (() if self.report is None else self.report.stages)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        plan, problem = self.solution.plan, self.solution.problem
        return {
            "model": problem.graph.name,
            "planner": self.solution.planner,
            "baseline": self.baseline or None,
            "plan": describe_plan(plan),
            "schedule": plan.schedule.value,
            "devices": list(plan.devices),
            "mode": problem.objective.mode.value,
            "origin": self.origin,
            "remarks": list(self.remarks),
            "steps": len(self.run.step_s),
            "incidents": [incident.to_json() for incident in self.run.incidents],
            "stopped": self.run.stopped or None,
            "samples_per_step": plan.samples,
            "weights": self._weight_figures(),
            "losses": self.losses,
            "held_out_losses": {
                str(step + 1): number_or_none(loss) for step, loss in self.run.held_out.items()
            },
            "step_s": list(self.run.step_s),
            "median_step_s": self.step_s,
            "samples_per_s": plan.samples / self.step_s,
            "predicted_step_s": self.predicted.makespan_s,
            "prediction_error": self.error,
            "check": self._check_figures(),
            "report": None if self.report is None else self.report.to_json(),
            "memory": {name: asdict(use) for name, use in self.run.memory.items()},
            "energy": energy_figures(self.run),
            "busy": self.busy or None,
            "machine": machine(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Execution:
    """How a plan is carried out.

    Attributes:
        job: How it is run.
        directory: The run directory.
        check: Whether the first steps are compared with one process.
        launcher: ``fork``, ``torchrun``, or ``auto``: forked where that can be done.
        host: This host among those of the run.
        baseline: One of torch's own ways, or empty.
        on_progress: Called with each step of the work.
        on_step: Called with a rank and each step that it has done.
        survival: How it goes on when something goes wrong.
        place: The other hosts that it runs on; None = this machine, with ``host``.
        on_line: Called with a rank of other hosts and each line that it prints.
    """

    job: Job
    directory: Path
    check: bool = False
    launcher: str = "auto"
    host: Host = field(default_factory=Host)
    baseline: str = ""
    on_progress: OnProgress = silent
    on_step: OnStep = unwatched
    survival: Survival = field(default_factory=Survival)
    place: Place | None = None
    on_line: OnLine = lambda _, __: None

    @property
    def logs(self) -> Path:
        """Where what the ranks print goes."""
        path = self.directory / "logs"
        path.mkdir(exist_ok=True)
        return path


def machine() -> dict[str, Any]:
    """Return what times of a run depend on."""
    return {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def device_kind(
    cluster: Cluster, plan: Plan, gpus_here: int | None, num_hosts: int = 1
) -> DeviceKind:
    """Return what the ranks of a plan compute on: all on GPUs, or all on CPUs.

    Args:
        cluster: The machines.
        plan: The plan.
        gpus_here: GPUs of this host; None = ranks run elsewhere, and see themselves.
        num_hosts: Hosts that the ranks are spread over; with one all of them run here.

    Raises:
        UnsupportedError: The plan needs devices that are not here; names the way out.
    """
    names = set(used_names(plan))
    used = [device for device in cluster.devices if device.name in names]
    kinds = {device.kind for device in used}
    if kinds == {DeviceKind.CPU}:
        return DeviceKind.CPU
    by_host = Counter(device.host for device in used)
    needed = len(used) if num_hosts == 1 else max(by_host.values())
    if kinds == {DeviceKind.GPU} and (gpus_here is None or gpus_here >= needed):
        return DeviceKind.GPU
    if gpus_here is None:
        raise UnsupportedError("the plan mixes GPUs with CPUs, which no backend joins")
    types = ", ".join(sorted({device.type for device in used}))
    raise UnsupportedError(
        f"the plan is for {len(used)} devices ({types}), this machine has {gpus_here} GPUs; "
        "--emulate rehearses it here, --devices N plans for CPU processes"
    )


def used_names(plan: Plan) -> list[str]:
    """Return the devices that a plan uses."""
    used = {d for stage in plan.stages for group in stage.devices for d in group}
    return [plan.devices[device] for device in sorted(used)]


def execute(solution: Solution, execution: Execution, captures: Captures | None) -> Outcome | None:
    """Carry out a plan, and compare it with its prediction and, if asked, with one process.

    Args:
        solution: The plan with its problem.
        execution: How.
        captures: The model; None where the plan is emulated.

    Returns:
        What it came to; None on other hosts than the first, which has it.

    Raises:
        WorkerError: A rank failed, died or stood still; names it.
    """
    if execution.job.emulate is not None:
        return _emulate(solution, execution)
    assert captures is not None
    taken = _take_weights(execution, captures)
    outcome = _execute(solution, execution, captures)
    if outcome is None:
        return None
    return replace(
        outcome,
        weights=execution.job.weights,
        weight_bytes=outcome.weight_bytes + taken.bytes_read,
        remarks=(*outcome.remarks, *taken.remarks),
    )


def _take_weights(execution: Execution, captures: Captures) -> LoadedWeights:
    """Read the first weights into the model where it computes here, or is what ranks are forked of.

    Where others read them, names and shapes are checked.

    Raises:
        InvalidInputError: They are not those of the model.
    """
    if not execution.job.weights:
        return LoadedWeights()
    path, model = Path(execution.job.weights), captures.source.model
    is_used = execution.check or _forks(execution)
    try:
        return load_weights(model, path) if is_used else check_weights(model, path)
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise InvalidInputError(f"{exc}; --weights none draws them") from exc


def _execute(solution: Solution, execution: Execution, captures: Captures) -> Outcome | None:
    if execution.place is not None and not execution.check:
        execution.on_progress(f"running {execution.job.steps} steps")
        made = _run_fresh(solution, execution)
        return None if made is None else replace(made, baseline=execution.baseline)
    precision = execution.job.recipe.precision
    if precision is not None:
        device = "cuda" if execution.job.device is DeviceKind.GPU else "cpu"
        numerics = ready_numerics(precision, device)
        source, origin = captures.source, captures.origin
        captures = Captures(source, origin, lambda: numerics.autocast(device))
    if execution.job.same_data:
        use_repeatable_algorithms()
    execution.on_progress("capturing the model")
    workload = model_workload(
        captures,
        solution.problem,
        solution.plan,
        same_data=execution.job.same_data,
        data=execution.job.data,
    )
    if execution.baseline in TORCH_WAYS:
        return _run_torch(solution, execution, captures, workload)
    if execution.job.evaluation.every or solution.problem.objective.mode is Mode.INFERENCE:
        for size in dict.fromkeys(solution.plan.microbatch_sizes.tolist()):
            captures.at(size).check_mode(training=False)
    execution = replace(execution, job=replace(execution.job, compared=True))
    return _run(solution, execution, captures, workload)


def run_script(solution: Solution, execution: Execution, script: Sequence[str]) -> Outcome | None:
    """Run a user's script in every rank of a plan; it trains through ``partita.parallelize``.

    Raises:
        InvalidInputError: There is no such script.
        WorkerError: A rank failed, died or stood still; names it.
    """
    if not Path(script[0]).is_file():
        raise InvalidInputError(f"there is no script {script[0]!r}")
    job = replace(execution.job, model=None, emulate=None, script=tuple(script))
    return _run_fresh(solution, replace(execution, job=job))


def _run_fresh(solution: Solution, execution: Execution) -> Outcome | None:
    """Run in fresh processes that build all they need themselves; nothing is computed here."""
    check_runnable(solution.plan)
    job = execution.job
    run = _launched(solution, execution, job, execution.directory)
    return None if run is None else _outcome(solution, run, job.program(solution), job)


def _outcome(solution: Solution, run: Run, program: Program, job: Job) -> Outcome:
    """Put a run beside its prediction."""
    problem, plan = solution.problem, solution.plan
    prediction = simulate(problem, plan, program=program, transfers=job.transfers)
    peaks = [run.memory[name].peak_bytes if name in run.memory else np.nan for name in plan.devices]
    return Outcome(
        solution=solution,
        run=run,
        predicted=prediction,
        report=report_run(plan, program, prediction, run.timelines, run.step_s, peaks)
        if run.timelines
        else None,
        checkpoints=job.checkpoints,
        weight_bytes=run.weight_bytes,
        remarks=_some_warnings(run.warnings),
    )


def _some_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return what ranks have warned of, each sentence once, and of many the first ones."""
    found = list(dict.fromkeys(warnings))
    more = len(found) - SHOWN_WARNINGS
    if more > 0:
        found[SHOWN_WARNINGS:] = [f"and {more} more warnings: logs and metrics have all"]
    return tuple(found)


def _emulate(solution: Solution, execution: Execution) -> Outcome | None:
    job = execution.job
    workload = emulated_workload(solution.problem, solution.plan, job.emulation())
    for remark in workload.remarks:
        execution.on_progress(remark)
    run: Run | None
    if _forks(execution):
        run = emulate_forked(
            workload,
            limit_s=job.stall_limit_s,
            log_directory=execution.logs,
            on_step=execution.on_step,
            stop=execution.survival.stop,
        )
    else:
        run = _launched(solution, execution, job, execution.directory)
    return None if run is None else _emulated_outcome(solution, workload, run)


def _emulated_outcome(solution: Solution, workload: EmulatedWorkload, run: Run) -> Outcome:
    """Put an emulated run beside its prediction."""
    prediction = predicted(workload)
    return Outcome(
        solution=solution,
        run=run,
        predicted=prediction,
        report=report_run(
            solution.plan, workload.task.program, prediction, run.timelines, run.step_s
        ),
        remarks=workload.remarks,
    )


def _run(
    solution: Solution, execution: Execution, captures: Captures, workload: Workload
) -> Outcome | None:
    problem, plan, job = solution.problem, solution.plan, execution.job
    check_runnable(plan)
    task = make_task(problem, plan, workload, order=job.order)
    verdict: Verdict | None = None
    module_verdict: Verdict | str | None = None
    found: Run | None
    run: Run | None
    if execution.check:
        execution.on_progress("comparing with the captured graph and with the untouched module")
        short = _short(job)
        if _forks(execution):
            found = run_forked(
                task, workload, options=short.rank_options(), log_directory=execution.logs
            )
        else:
            quiet = replace(execution, on_step=unwatched, on_line=unwatched, survival=Survival())
            found = _launched(solution, quiet, short, execution.directory / "check")
        if found is not None:
            verdict = verify(task, workload, found.result, short.rank_options())
            subject = make_subject(problem, plan, captures, workload)
            module_verdict = verify_module(subject, found.result, short.rank_options())
    execution.on_progress(f"running {job.steps} steps")
    if _forks(execution):
        run = run_forked(
            task,
            workload,
            options=job.rank_options(),
            log_directory=execution.logs,
            on_step=execution.on_step,
            survival=execution.survival,
        )
    else:
        run = _launched(solution, execution, job, execution.directory)
    if run is None:
        return None
    made = _outcome(solution, run, task.program, job)
    return replace(
        made,
        verdict=verdict,
        module_verdict=module_verdict,
        baseline=execution.baseline,
        remarks=(*made.remarks, *tensor_parallel_remarks(task)),
    )


def _short(job: Job) -> Job:
    """Return the first steps of a job, with all that they give."""
    return replace(
        job,
        steps=min(CHECKED_STEPS, job.steps),
        keep_results=True,
        power=None,
        evaluation=Evaluation(),
        checkpoints="",
        save_every=0,
        resume=None,
    )


def _forks(execution: Execution) -> bool:
    """Return whether ranks are forked from this process.

    Raises:
        UnsupportedError: They should be, and cannot.
    """
    if execution.launcher == "torchrun" or execution.host.num_hosts > 1 or execution.place:
        return False
    if execution.job.device is DeviceKind.GPU:
        return False
    why = why_not_fork()
    if why and execution.launcher == "fork":
        raise UnsupportedError(f"ranks cannot be forked: {why}; --launcher torchrun does not fork")
    return not why


def _launched(solution: Solution, execution: Execution, job: Job, directory: Path) -> Run | None:
    """Run in fresh processes, on this host or together with others; the first one has the run."""
    JobDirectory(directory).create(solution, job)
    if execution.place is not None:
        watch = Watch(
            on_step=execution.on_step, on_line=execution.on_line, say=execution.on_progress
        )
        ended = run_on(directory, execution.place, survival=execution.survival, watch=watch)
        return collect(directory, ended)
    ended = launch(
        directory, execution.host, on_step=execution.on_step, survival=execution.survival
    )
    return None if execution.host.index else collect(directory, ended)


def _run_torch(
    solution: Solution, execution: Execution, captures: Captures, workload: Workload
) -> Outcome:
    """Run one of torch's own ways."""
    problem, plan, job = solution.problem, solution.plan, execution.job
    if not _forks(execution):
        raise UnsupportedError(
            f"baseline {execution.baseline} runs in forked CPU processes of one host, which cannot "
            f"be had here: {why_not_fork() or 'the run is for GPUs or several hosts'}"
        )
    subject = make_subject(problem, plan, captures, workload)
    verdict = None
    if execution.check:
        execution.on_progress(f"comparing {execution.baseline} with one process")
        options = _short(job).rank_options()
        found = run_baseline(
            execution.baseline, subject, options=options, log_directory=execution.logs
        )
        verdict = verify_baseline(execution.baseline, subject, found.result, options)
    execution.on_progress(f"running {job.steps} steps")
    run = run_baseline(
        execution.baseline,
        subject,
        options=job.rank_options(),
        log_directory=execution.logs,
        on_step=execution.on_step,
    )
    return Outcome(
        solution=solution,
        run=run,
        predicted=simulate(problem, plan),
        verdict=verdict,
        baseline=execution.baseline,
    )


def write_run(outcome: Outcome, directory: Path, order: ListOrder = ListOrder.DEVICE) -> Outcome:
    """Write plan, results, timeline and traces of a run into its directory.

    Returns:
        The run, which knows its directory and the names of the files.
    """
    problem, plan = outcome.solution.problem, outcome.solution.plan
    save(outcome.solution, directory / "plan.json")
    written = ["results.json", "plan.json"]
    if outcome.run.timelines:
        last = outcome.run.timelines[-1]
        save(last, directory / "timeline.json")
        program = lower(problem, plan, order=order)
        names = problem.graph.tensors.names
        write_text(
            directory / "trace.json", chrome_trace(last, program=program, tensor_names=names)
        )
        written += ["timeline.json", "trace.json (open in Perfetto)"]
    if outcome.run.trace:
        write_text(directory / "profiler.json", outcome.run.trace)
        written.append("profiler.json")
    write_results(directory, {"name": directory.name, **outcome.to_json()})
    if (directory / METRICS).exists():
        written.append(METRICS)
    return replace(outcome, directory=directory, written=(*written, "logs/"))


def write_files(outcome: Outcome, execution: Execution, request: RunFields) -> Outcome:
    """Write a run into its directory, and what else a request asks for beside it."""
    made = write_run(outcome, execution.directory, execution.job.order)
    more: list[str] = []
    if request.recalibrate:
        assert outcome.report is not None  # torch's ways are refused
        problem, plan = outcome.solution.problem, outcome.solution.plan
        save(recalibrated(problem, plan, outcome.report), request.recalibrate)
        more.append(request.recalibrate)
    if request.report not in (None, SHOWN):
        from partita.flows.report import write_report  # noqa: PLC0415 (where a page is asked for)

        more.append(write_report(str(execution.directory), output=str(request.report)).output)
    if request.export_timing_csv:
        more += export_timing(outcome.run, Path(request.export_timing_csv))
    return replace(made, written=(*made.written, *more))
