"""Bodies of the energy server's requests and replies, and what they mean in core types.

The first fields of each are Zeus's; then come those of the SOSP '24 artifact, then ours.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from partita.core.energy import EnergyOrigin
from partita.core.problem import Schedule
from partita.energy.frontier.choose import PointLimits
from partita.energy.policies.job import Rank, Result, Straggler
from partita.errors import InvalidInputError
from partita.names import check_plain

MAX_RANKS = 2**16
MAX_MICROBATCHES = 2**16


def _figure(value: object) -> object:
    """Refuse what pydantic would take for a number: neither "1" nor true is 1; 1.0 is."""
    if isinstance(value, str | bool):
        raise ValueError("expected a number")
    return value


def _plain(text: str) -> str:
    """Refuse what a terminal could not show as it is."""
    try:
        check_plain(text, "name")
    except InvalidInputError as exc:
        raise ValueError(str(exc)) from exc
    return text


Whole = Annotated[int, BeforeValidator(_figure)]
Figure = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Place = Annotated[Whole, Field(ge=0, lt=MAX_RANKS)]
Degree = Annotated[Whole, Field(ge=1, le=MAX_RANKS)]
Clock = Annotated[Whole, Field(ge=1, le=1_000_000)]
Seconds = Annotated[Figure, Field(ge=0, le=1e9)]
Joules = Annotated[Figure, Field(ge=0, le=1e15)]
Name = Annotated[str, Field(max_length=256), AfterValidator(_plain)]
Names = Annotated[list[Name], Field(max_length=2**20)]


class WishBody(BaseModel):
    """What the deployed point has to keep; see ``PointLimits``."""

    model_config = ConfigDict(extra="forbid")

    least_energy: StrictBool = False
    slowdown: Seconds | None = None
    deadline_s: Seconds | None = None
    energy_j: Joules | None = None
    power_w: Joules | None = None
    straggler_s: Seconds | None = None

    def wish(self) -> PointLimits:
        """Return it as a core type."""
        return PointLimits(**self.model_dump())


class JobBody(BaseModel):
    """A job to be registered."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    job_id: Literal[""] = ""
    pp_degree: Degree
    dp_degree: Degree
    tp_degree: Degree
    world_size: Degree
    job_metadata: Annotated[str, Field(max_length=65536)] | None = None
    tenant: Name | None = None
    framework: Name | None = None
    model_name: Name | None = None
    partition_method: Name | None = None
    microbatch_size: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    num_microbatches: Annotated[Whole, Field(ge=1, le=MAX_MICROBATCHES)] | None = None
    schedule: Schedule | None = None
    solution: dict[str, Any] | None = None
    wish: WishBody | None = None
    profile: dict[str, Any] | None = None

    @field_validator("world_size")
    @classmethod
    def _product(cls, value: int, info: Any) -> int:  # noqa: ANN401 (pydantic's)
        degrees = [info.data.get(name) for name in ("pp_degree", "dp_degree", "tp_degree")]
        if None not in degrees and degrees[0] * degrees[1] * degrees[2] != value:
            raise ValueError(
                f"pp_degree x dp_degree x tp_degree is {degrees[0] * degrees[1] * degrees[2]}, "
                f"not {value}"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _metadata(cls, values: Any) -> Any:  # noqa: ANN401 (any JSON)
        """Take figures that a client without fields for them has put into the metadata."""
        if not isinstance(values, dict):
            return values
        said = metadata(values.get("job_metadata"))
        taken = {key: said[key] for key in ("num_microbatches", "schedule", "wish") if key in said}
        given = {key: value for key, value in values.items() if value is not None}
        return {**values, **taken, **given}


def metadata(text: object) -> dict[str, Any]:
    """Return the object that a job's metadata is; empty where it is another text."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class RankBody(BaseModel):
    """A rank to be registered."""

    rank: Place
    dp_rank: Place
    pp_rank: Place
    tp_rank: Place
    available_frequencies: Annotated[list[Clock], Field(max_length=4096)]
    pipe_schedule: Names | None = None
    device_type: Name = ""
    device: Name = ""
    origin: EnergyOrigin = EnergyOrigin.MEASURED
    blocking_w: Annotated[Figure, Field(ge=0, le=1e6)] | None = None

    def to_rank(self) -> Rank:
        """Return it as a core type."""
        return Rank(
            rank=self.rank,
            dp_rank=self.dp_rank,
            pp_rank=self.pp_rank,
            tp_rank=self.tp_rank,
            clocks_mhz=tuple(sorted(set(self.available_frequencies), reverse=True)),
            instructions=tuple(self.pipe_schedule or ()),
            device_type=self.device_type,
            device=self.device,
            origin=self.origin,
            blocking_w=self.blocking_w,
        )


class ArtifactRankBody(BaseModel):
    """A rank as the artifact's clients register it."""

    job_id: Annotated[str, Field(max_length=512)]
    rank: Place
    dp_rank: Place
    pp_rank: Place
    tp_rank: Place
    pipe_schedule: Names
    power_state_range: Annotated[list[Clock], Field(max_length=4096)]

    def to_body(self) -> RankBody:
        """Return it in Zeus's form."""
        return RankBody(
            rank=self.rank,
            dp_rank=self.dp_rank,
            pp_rank=self.pp_rank,
            tp_rank=self.tp_rank,
            available_frequencies=self.power_state_range,
            pipe_schedule=self.pipe_schedule,
        )


class ResultBody(BaseModel):
    """What a rank measured under a schedule."""

    rank: Place
    iter_time: list[Seconds]
    iter_energy: list[Joules] | None = None
    time_breakdown: dict[Name, list[list[Seconds]]] = {}
    energy_breakdown: dict[Name, list[list[Joules]]] | None = None
    version: Annotated[Whole, Field(ge=0, le=2**53)] | None = None

    def to_result(self) -> Result:
        """Return it as a core type."""
        return Result(
            rank=self.rank,
            version=self.version or 0,
            iteration_s=tuple(self.iter_time),
            iteration_j=tuple(self.iter_energy or ()),
            seconds={name: tuple(map(tuple, each)) for name, each in self.time_breakdown.items()},
            joules={
                name: tuple(map(tuple, each))
                for name, each in (self.energy_breakdown or {}).items()
            },
        )


class StragglerBody(BaseModel):
    """Word of a straggler."""

    rank: Place | None = None
    dp_rank: Place | None = None
    slowdown: Annotated[Figure, Field(ge=1, le=1e6)] | None = None
    iteration_s: Annotated[Figure, Field(gt=0, le=1e9)] | None = None
    delay_s: Annotated[Figure, Field(ge=0, le=1e7)] = 0.0

    def to_straggler(self) -> Straggler:
        """Return it as a core type."""
        return Straggler(
            rank=self.rank,
            dp_rank=self.dp_rank,
            slowdown=self.slowdown,
            iteration_s=self.iteration_s,
        )


class ScheduleReply(BaseModel):
    """The clocks of a rank's step."""

    rank: int
    frequencies: list[Annotated[list[str | int], Field(min_length=2, max_length=2)]]
    version: int
    state: Literal["profiling", "deployed"]
    time_s: float | None
    energy_j: float | None
    note: str = ""
    power_states: list[int] | None = None


class JobReply(BaseModel):
    """A job as it stands."""

    job_id: str
    tenant: str
    scheduler: str
    state: Literal["registering", "solving", "profiling", "deployed", "failed"]
    version: int
    world_size: int
    pp_degree: int
    dp_degree: int
    tp_degree: int
    registered: int
    missing: list[int]
    silent: list[int]
    stragglers: list[dict[str, Any]]
    time_s: float | None
    energy_j: float | None
    iteration_s: float | None
    iteration_j: float | None
    note: str
    idle_s: float


class FrontierReply(BaseModel):
    """The frontier of a pipeline and the point that is deployed."""

    job_id: str
    dp_rank: int
    point: int
    time_s: float
    energy_j: float
    frontier: dict[str, Any]


class InfoReply(BaseModel):
    """How the server was started."""

    scheduler: str
    scheduler_args: dict[str, Any]
    log_level: str
    mode: str
    dump_data: bool
    dump_dir: str
    profile_steps: int
    num_microbatches: int | None
    schedule: str
    poll_limit_s: float
    solve_limit_s: float
    version: str
    schedulers: list[str]
