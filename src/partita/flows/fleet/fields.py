"""Options that several requests on fleets share, each declared once."""

from dataclasses import dataclass

from partita.core.fleet import Sensitivity
from partita.requests import Request, declare


@dataclass(frozen=True, kw_only=True)
class JobFields(Request):
    """Where the jobs of a trace get their sensitivities and powers from, and how they are drawn."""

    profiles: tuple[str | Sensitivity, ...] = declare(
        (),
        metavar="FILE",
        usual="built-in modelled classes",
        help="Sensitivities: documents, Synergy's profile.json or matrices, or a folder of "
        "'fleet profile'; several times.",
    )
    profile_set: str = declare("models", help="Set of Synergy's matrices to use.")
    power_model: str | None = declare(
        None,
        metavar="TYPE",
        help="Type of GPU for which time against energy of jobs that carry no frontier is "
        "modelled.",
    )
    published_filter: bool = declare(
        False,
        help="Keep of a log only what Synergy's reader keeps: jobs of 32 to 10,000 minutes and up "
        "to 16 GPUs; other GPUs than powers of two are 1.",
    )
    seed: int = declare(1, minimum=0, help="Seed of arrivals and all other draws.")
