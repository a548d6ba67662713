"""Requests to train a model and to run a plan, and which of their options go together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from partita.core.precision import OPTIMIZERS
from partita.core.program import TransferMode
from partita.core.schedules import Schedule, schedule_names
from partita.errors import InvalidInputError
from partita.flows.fields import SourceFields, StepFields
from partita.flows.solutions import SolutionRequest
from partita.hosts.table import PlaceFields, check_place
from partita.http import check_address
from partita.requests import Request, declare
from partita.runtime.baselines.names import BASELINES, TORCH_WAYS
from partita.runtime.metric_rows import SINKS
from partita.runtime.training.recipe import SCHEDULES as LEARNING_RATE_SCHEDULES
from partita.units import parse_tokens

OnStep: TypeAlias = Callable[[int, Any], None]
"""Called with a rank and each step that it has done."""
RUNS = "runs"
"""Where run directories are made."""
SHOWN = "terminal"
"""Where the report of a run is shown that names no file."""


def unwatched(_: int, __: object) -> None:
    """Show nothing of the steps."""


@dataclass(frozen=True, kw_only=True)
class SurvivalFields(Request):
    """How a run goes on when something goes wrong."""

    group = "when something goes wrong"
    max_restarts: int = declare(
        0, minimum=0, help="Restarts in a row without a new checkpoint before a run is given up."
    )
    elastic: str | None = declare(
        None, help="Least and most devices, such as 2:4; the run is replanned for those there are."
    )
    available: str | None = declare(
        None, help="With --elastic: file that names the devices that can be used, as they change."
    )
    replan: bool = declare(
        False,
        help="When a rank falls behind, plan around it and go on with that plan from a checkpoint "
        "where that saves more than the restart costs.",
    )
    on_nan: str = declare(
        "warn",
        choices=("warn", "ignore", "stop", "skip", "rollback"),
        help="Answer to a loss or gradient that is no number: say so once and go on, say nothing, "
        "stop and name rank, stage and op, skip the update, or go back to the newest checkpoint "
        "and leave out the data since.",
    )


@dataclass(frozen=True, kw_only=True)
class RunFields(SurvivalFields, PlaceFields):
    """How a plan is carried out."""

    group = "run"
    steps: int = declare(10, often=True, minimum=1, help="Number of steps to run.")
    epochs: float | None = declare(
        None, above=0.0, help="Number of times that all data are read, instead of --steps."
    )
    tokens: str | None = declare(
        None, help="Number of tokens to train on, such as 10M, instead of --steps."
    )
    data: str = declare(
        "generated",
        often=True,
        help="Data to train on: tokens.bin (16-bit tokens; tokens.bin?dtype=uint32), a folder with "
        "train.bin or with a sub-folder of images for each class, package.module:callable, or "
        "generated.",
    )
    weights: str | None = declare(
        None,
        metavar="PATH|none",
        usual="those of MODEL where it is a directory that has some, else drawn",
        help="First weights: a file of safetensors or torch.save, an index, or a directory; none "
        "draws them.",
    )
    sampling: str | None = declare(
        None,
        choices=("random", "shuffled", "sequential"),
        usual="random windows of tokens, other samples shuffled",
        help="Order of the samples: drawn anew for every step, shuffled in every epoch, or as "
        "they lie.",
    )
    last_batch: str = declare(
        "drop",
        choices=("drop", "fill"),
        help="Samples that fill no batch at the end of an epoch: left out, or filled up with the "
        "epoch's first ones.",
    )
    learning_rate: float | None = declare(
        None,
        often=True,
        flags=("--lr",),
        usual="0.1; adam and adamw 0.001",
        help="Learning rate of the optimizer.",
    )
    weight_decay: float | None = declare(
        None, minimum=0, usual="0; adamw 0.01", help="Weight decay of the optimizer."
    )
    lr_schedule: str = declare(
        "constant",
        choices=LEARNING_RATE_SCHEDULES,
        help="Learning rate after the warm-up: constant, or down to --lr-floor at the last step.",
    )
    warmup: int = declare(
        0, minimum=0, help="Steps in which the learning rate grows to its full value."
    )
    lr_floor: float = declare(
        0.0, minimum=0, maximum=1, help="Share of the learning rate that the last step has."
    )
    clip: float | None = declare(
        None, above=0.0, help="Largest norm of all gradients together; longer ones are scaled."
    )
    eval_every: int = declare(
        0,
        minimum=0,
        usual="never",
        help="Steps after which the loss on held-out data is taken; also at the end.",
    )
    eval_batches: int = declare(8, minimum=1, help="Batches of held-out data to evaluate on.")
    eval_data: str | None = declare(
        None,
        usual="val.bin or val/ beside --data; a callable's split val; other generated data",
        help="Held-out data to evaluate on, named as --data.",
    )
    metrics: tuple[str, ...] = declare(
        (),
        choices=SINKS,
        help="Metrics to write besides metrics.jsonl in the run directory: tensorboard, wandb "
        "(offline).",
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
        help="Let messages travel beside compute, or hold both devices.",
    )
    repeatable: bool = declare(
        False, help="Give every step the same data, by deterministic algorithms."
    )
    check: bool = declare(
        False,
        often=True,
        help="Compare with the captured graph and the untouched module; exit 5 if not equal.",
    )
    report: str | None = declare(
        None,
        often=True,
        bare=SHOWN,
        metavar="[FILE.html]",
        help="Show predicted against measured times, stage by stage; FILE.html writes a page.",
    )
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
    emulate_slow: tuple[str, ...] = declare(
        (),
        help="With --emulate: a device and the factor on its compute times, such as cpu1=2, which "
        "the plan does not know of.",
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
class SavingFields(Request):
    """When a run saves, and what it goes on from."""

    group = "checkpoints"
    save_every: int = declare(
        0, often=True, minimum=0, help="Steps from one checkpoint to the next; 0 saves none."
    )
    keep: int = declare(2, minimum=1, help="Number of checkpoints that stay.")
    checkpoints: str | None = declare(
        None, usual="checkpoints in the run's directory", help="Folder of the checkpoints."
    )
    resume: str | None = declare(
        None,
        often=True,
        metavar="auto|PATH",
        help="Checkpoint to go on from, or a folder of them; auto = the newest of --checkpoints, "
        "else of the model's runs, or none.",
    )

    @property
    def saves(self) -> bool:
        """Whether the run has to do with checkpoints."""
        return bool(self.save_every or self.checkpoints or self.resume)


@dataclass(frozen=True, kw_only=True)
class TrainRequest(StepFields, SourceFields, RunFields, SavingFields):
    """A model, the devices of this machine, and how it is planned and trained on them."""

    schedule: str | None = declare(
        None,
        choices=lambda: (*schedule_names(), *LEARNING_RATE_SCHEDULES),
        added=Schedule.plugins().names,
        help="Pipeline schedule; cosine, linear and constant mean --lr-schedule.",
    )
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
    tp: int = declare(
        1, minimum=1, help="Devices that divide the tensors of every replica of a stage."
    )
    sp: str = declare(
        "no",
        choices=("yes", "no"),
        help="Split tensors between products along the sequence in tensor parallelism, or do not.",
    )
    zero: int | None = declare(
        None,
        minimum=1,
        maximum=3,
        help="State that replicas divide instead of copying, as ZeRO counts it: 1 the optimizer's, "
        "2 gradients too, 3 parameters too.",
    )
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

    def with_schedules_apart(self) -> "TrainRequest":
        """Return the request whose ``schedule`` is that of the pipeline alone.

        That of the learning rate may stand there, too, where most people look for it: the names of
        the two kinds differ.

        Raises:
            InvalidInputError: Two schedules of the learning rate are given.
        """
        if self.schedule not in LEARNING_RATE_SCHEDULES:
            return self
        if self.lr_schedule not in (LEARNING_RATE_SCHEDULES[0], self.schedule):
            raise InvalidInputError(
                f"--schedule {self.schedule} and --lr-schedule {self.lr_schedule} both say how the "
                "learning rate changes; give one of them"
            )
        return replace(self, schedule=None, lr_schedule=self.schedule)


@dataclass(frozen=True, kw_only=True)
class RunRequest(SolutionRequest, RunFields, SavingFields):
    """A saved plan, and how it is carried out."""

    script: tuple[str, ...] = declare(
        (), is_argument=True, help="Script of your own with its arguments, which every rank runs."
    )
    model: str | None = declare(
        None, usual="the one that the graph was made from", help="Name of the model."
    )
    seed: int = declare(0, help="Seed of dropout and other random numbers, a script's too.")


_OF_TRAINING = (
    *("epochs", "tokens", "data", "weights", "sampling", "last_batch"),
    *("weight_decay", "lr_schedule", "warmup", "lr_floor", "clip"),
    *("eval_every", "eval_data", "metrics"),
)


def check_training(request: TrainRequest) -> TrainRequest:
    """Return a request to train whose options go together, each under its own name.

    Raises:
        InvalidInputError: One would be ignored, there is no model, or an optimizer that runs
            nowhere here.
    """
    if request.model is None:
        raise InvalidInputError("name a MODEL, or one in the --config file")
    request = request.with_schedules_apart()
    _check_optimizer(request)
    if request.baseline:
        _refuse_given(request, "baselines train in the model's own dtype", "precision")
    _check_together(request, request.baseline)
    _check_saving(request, request.baseline)
    _check_survival(request)
    if request.device is not None and request.baseline != "single":
        raise InvalidInputError("--device says where --baseline single runs; name both")
    if request.baseline:
        why = "a baseline brings its own plan"
        _refuse_given(request, why, "planner", "partition", "option", "pp", "dp", "zero", "emulate")
    if request.on is not None:
        why = "the host file, or --cluster, says which devices there are"
        _refuse_given(request, why, "devices")
    if request.cluster is None:
        why = "is for estimates of machines that are not here: add --cluster and --emulate"
        _refuse_given(request, why, "recompute", "kernels", "arithmetic")
        return request
    if request.on is not None:
        return request
    if not request.emulate:
        raise InvalidInputError(
            "--cluster names machines that are not here: add --emulate, or --on to run there"
        )
    why = "machines that are not here are estimated, not measured"
    _refuse_given(request, why, "devices", "device_ids", "rounds", "no_cache", "loss")
    return request


def check_run(request: RunRequest) -> None:
    """Refuse options of a run that would be ignored.

    Raises:
        InvalidInputError: One would be.
    """
    _check_optimizer(request)
    _check_together(request)
    _check_saving(request)
    _check_survival(request)
    if request.script:
        why = "the script says that itself"
        _refuse_given(request, why, "steps", "optimizer", "learning_rate", "model", "repeatable")
        _refuse_given(request, why, "precision", *_OF_TRAINING)
        why = "a script is run for real, by itself"
        _refuse_given(request, why, "check", "emulate", "capture")


def _check_optimizer(request: TrainRequest | RunRequest) -> None:
    """Check that the executor steps with the optimizer.

    Raises:
        InvalidInputError: It is one that only plans count with.
    """
    name = request.optimizer
    if name is not None and not OPTIMIZERS[name].runs:
        known = ", ".join(each.name for each in OPTIMIZERS.values() if each.runs)
        raise InvalidInputError(f"--optimizer {name} is for plans; a run here steps with {known}")


def _check_survival(request: TrainRequest | RunRequest) -> None:
    """Check that the options by which a run survives go together.

    Raises:
        InvalidInputError: One would be ignored.
    """
    if request.emulate:
        why = "an emulated run has nothing to go on from"
        _refuse_given(request, why, "on_nan", "elastic", "max_restarts")
    if not request.save_every:
        why = "there is nothing to go on from: add --save-every"
        _refuse_given(request, why, "elastic", *([] if request.emulate else ["replan"]))
        if request.on_nan == "rollback":
            raise InvalidInputError(f"--on-nan rollback: {why}")
    if request.available is not None and request.elastic is None:
        raise InvalidInputError("--available says which devices --elastic may use: add --elastic")


def _refuse_given(request: Request, why: str, *names: str) -> None:
    """Refuse options that would be ignored."""
    given = request.given()
    for name in names:
        if name in given:
            raise InvalidInputError(f"--{name.replace('_', '-')}: {why}")


def _check_saving(request: TrainRequest | RunRequest, baseline: str | None = None) -> None:
    """Refuse checkpoints where there are none.

    Raises:
        InvalidInputError: They were asked for all the same.
    """
    saving = ("save_every", "checkpoints", "resume")
    if request.emulate:
        _refuse_given(request, "an emulated run computes nothing", *saving)
    if baseline in TORCH_WAYS:
        _refuse_given(request, f"--baseline {baseline} runs by torch's own ways", *saving)
    if request.resume is not None and request.check:
        raise InvalidInputError(
            "--check compares the first steps, from the first weights; leave out --resume"
        )
    if not request.saves:
        _refuse_given(request, "is for checkpoints: add --save-every", "keep")


def _check_together(request: RunFields, baseline: str | None = None) -> None:
    """Check that the options of a run go together.

    Raises:
        InvalidInputError: One would be ignored, or means nothing here.
    """
    check_place(request)
    if request.on is not None:
        why = "is for the devices of this machine: leave out --on"
        _refuse_given(request, why, "launcher", "device_ids", "elastic", "available", "replan")
        if baseline in TORCH_WAYS:
            raise InvalidInputError(f"--baseline {baseline} {why}")
    rate = request.learning_rate
    if rate is not None and not rate > 0:
        raise InvalidInputError(f"--learning-rate {rate}; expected more than 0")
    lengths = [name for name in ("steps", "epochs", "tokens") if name in request.given()]
    if len(lengths) > 1:
        raise InvalidInputError(
            f"--{lengths[0]} and --{lengths[1]} both say how long the run is; give one of them"
        )
    if request.tokens is not None:
        parse_tokens(request.tokens, "--tokens")
    if not request.eval_every:
        _refuse_given(request, "nothing is evaluated: add --eval-every", "eval_data")
    if request.emulate:
        why = "an emulated run computes nothing"
        _refuse_given(request, why, *_OF_TRAINING)
        _refuse_given(request, why, "check", "capture", "order", "recalibrate", "repeatable")
        _refuse_given(request, why, "learning_rate")
    elif request.emulate_scale:
        raise InvalidInputError("--emulate-scale needs --emulate")
    else:
        _refuse_given(request, "slows emulated devices: add --emulate", "emulate_slow")
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
        _refuse_given(request, why, "export_timing_csv", "eval_every")
        _refuse_given(request, why, "max_restarts", "elastic", "replan", "on_nan")
