"""Requests to train a model and to run a plan, and which of their options go together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from partita.core.program import TransferMode
from partita.errors import InvalidInputError
from partita.flows.fields import SourceFields, StepFields
from partita.flows.solutions import SolutionRequest
from partita.http import check_address
from partita.requests import Request, declare
from partita.runtime.baseline_names import BASELINES, TORCH_WAYS

OnStep: TypeAlias = Callable[[int, Any], None]
"""Called with a rank and each step that it has done."""
RUNS = "runs"
"""Where run directories are made."""


def unwatched(_: int, __: object) -> None:
    """Show nothing of the steps."""


@dataclass(frozen=True, kw_only=True)
class RunFields(Request):
    """How a plan is carried out."""

    steps: int = declare(10, minimum=1, help="Number of steps to run.")
    learning_rate: float | None = declare(
        None, usual="0.1; adam 0.001", help="Learning rate of the optimizer."
    )
    order: str = declare(
        "device",
        choices=("device", "global", "program"),
        help="Order of compute: each device by its schedule, all by one order, or as the model's "
        "code runs.",
    )
    transfers: str = declare(
        TransferMode.OVERLAPPED.value,
        choices=[mode.value for mode in TransferMode],
        help="Whether messages travel beside compute, or hold both devices.",
    )
    repeatable: bool = declare(
        False, help="Give every step the same data, by deterministic algorithms."
    )
    check: bool = declare(
        False,
        help="Compare with the captured graph and the untouched module; exit 5 if not equal.",
    )
    report: bool = declare(False, help="Show predicted against measured times, stage by stage.")
    recalibrate: str | None = declare(
        None, help="File to write the graph to, with costs as this run has shown them."
    )
    capture: str = declare(
        "none",
        choices=("profile", "memory", "none"),
        help="Record a torch.profiler trace of all ranks, or the memory that each held.",
    )
    device_ids: str | None = declare(
        None, help="GPUs to use, or cores for CPU processes, such as 0,1."
    )
    emulate: bool = declare(False, help="Sleep instead of computing; messages are real.")
    emulate_scale: float = declare(
        0.0, usual="suitable", help="Factor on the compute times of an emulated run."
    )
    launcher: str = declare(
        "auto",
        choices=("auto", "fork", "torchrun"),
        help="Start ranks as forks of this process, or as fresh processes by torchrun's agent.",
    )
    stall_limit: float = declare(
        300.0, help="Seconds that an instruction may take before the run is given up."
    )
    energy_server: str | None = declare(
        None, help="Energy server to take clocks from, such as http://127.0.0.1:7787."
    )
    energy_wish: str | None = declare(
        None,
        usual="the fastest",
        help="Limit that the energy server's clocks keep: slowdown=0.02, deadline=SECONDS, "
        "energy=JOULES, power=WATTS, straggler=SECONDS, least-energy; several with commas.",
    )
    power_device: str | None = declare(
        None,
        usual="what there is; the plan's type",
        help="Power device of each rank: nvml, zeus, rapl, modelled:a100, replay:DIR, none.",
    )
    profile_steps: int = declare(
        5, minimum=1, help="Steps after which the energy server is told how long they took."
    )
    export_timing_csv: str | None = declare(
        None, help="Directory for instructions-%d.csv and time-energy-%d.csv."
    )
    runs: str = declare(RUNS, help="Folder in which run directories are made.")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(StepFields, SourceFields, RunFields):
    """A model, the devices of this machine, and how it is planned and trained on them."""

    model: str | None = declare(None, is_argument=True, help="Name of a model.")
    devices: int | None = declare(
        None,
        minimum=1,
        maximum=16,
        usual="its GPUs, or 2",
        help="Number of devices of this machine.",
    )
    cluster: str | None = declare(
        None, flags=("-c",), help="With --emulate: machines that are not here, such as 2x4xa100."
    )
    planner: str | None = declare(
        None,
        flags=("-p",),
        usual="auto; uniform with --pp or --dp",
        help="Planner, such as uniform or custom:0,8,14.",
    )
    partition: str | None = declare(None, help="The same as --planner.")
    option: tuple[str, ...] = declare((), flags=("-O",), help="Option of the planner, k=v.")
    pp: int | None = declare(None, minimum=1, help="Number of stages of the pipeline.")
    dp: int | None = declare(None, minimum=1, help="Number of replicas of every stage.")
    tp: int = declare(1, minimum=1, help="Devices per op: only 1 can be run.")
    seed: int = declare(0, help="Seed of weights and data.")
    loss: str | None = declare(
        None,
        usual="the model's own",
        help="Loss function: cross_entropy, mse, or package.module:callable.",
    )
    perturb: float = declare(0.0, help="Plan with op times multiplied by uniform(1 - P, 1 + P).")
    rounds: int = declare(8, minimum=1, help="Rounds to profile.")
    no_cache: bool = declare(False, help="Profile anew, and keep nothing.")
    baseline: str | None = declare(
        None, choices=BASELINES, help="Baseline to run instead, on the same data by the same rules."
    )
    device: int | None = declare(None, help="Number of the device of --baseline single.")


@dataclass(frozen=True, kw_only=True)
class RunRequest(SolutionRequest, RunFields):
    """A saved plan, and how it is carried out."""

    script: tuple[str, ...] = declare(
        (), is_argument=True, help="Script of your own with its arguments, which every rank runs."
    )
    model: str | None = declare(
        None, usual="the one that the graph was made from", help="Name of the model."
    )
    seed: int = declare(0, help="Seed of dropout and other random numbers, a script's too.")


def check_training(request: TrainRequest) -> None:
    """Refuse options of a training that would be ignored.

    Raises:
        InvalidInputError: One would be, or there is no model.
    """
    if request.model is None:
        raise InvalidInputError("name a MODEL, or one in the --config file")
    _check_together(request, request.baseline)
    if request.device is not None and request.baseline != "single":
        raise InvalidInputError("--device says where --baseline single runs; name both")
    if request.baseline:
        why = "a baseline brings its own plan"
        _refuse_given(request, why, "planner", "partition", "option", "pp", "dp", "emulate")
    if request.cluster is None:
        why = "is for estimates of machines that are not here: add --cluster and --emulate"
        _refuse_given(request, why, "recompute", "kernels", "arithmetic")
        return
    if not request.emulate:
        raise InvalidInputError("--cluster names machines that are not here: add --emulate")
    why = "machines that are not here are estimated, not measured"
    _refuse_given(request, why, "devices", "device_ids", "rounds", "no_cache", "loss")


def check_run(request: RunRequest) -> None:
    """Refuse options of a run that would be ignored.

    Raises:
        InvalidInputError: One would be.
    """
    _check_together(request)
    if request.script:
        why = "the script says that itself"
        _refuse_given(request, why, "steps", "optimizer", "learning_rate", "model", "repeatable")
        why = "a script is run for real, by itself"
        _refuse_given(request, why, "check", "emulate", "capture")


def _refuse_given(request: Request, why: str, *names: str) -> None:
    """Refuse options that would be ignored."""
    given = request.given()
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')}: {why}")


def _check_together(request: RunFields, baseline: str | None = None) -> None:
    """Check that the options of a run go together.

    Raises:
        InvalidInputError: One would be ignored, or means nothing here.
    """
    rate = request.learning_rate
    if rate is not None and not rate > 0:
        raise InvalidInputError(f"--learning-rate {rate}; expected more than 0")
    if request.emulate:
        why = "an emulated run computes nothing"
        _refuse_given(request, why, "check", "capture", "order", "recalibrate", "repeatable")
        _refuse_given(request, why, "learning_rate")
    elif request.emulate_scale:
        raise InvalidInputError("--emulate-scale needs --emulate")
    if request.energy_server:
        check_address(request.energy_server, noun="energy server")
    else:
        why = "it says when the energy server is told: add --energy-server"
        _refuse_given(request, why, "profile_steps")
        why = "it says what the energy server's clocks keep: add --energy-server"
        _refuse_given(request, why, "energy_wish")
    if baseline in TORCH_WAYS:
        why = f"{baseline} is torch's own way, without a plan of ours"
        _refuse_given(request, why, "capture", "order", "transfers", "report", "recalibrate")
        _refuse_given(request, why, "launcher", "energy_server", "power_device")
        _refuse_given(request, why, "export_timing_csv")
