"""The schedulers by name."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from partita.energy.policies.base import Scheduler
from partita.energy.policies.fixed import AllMax, PointSolution, TwoFrequencies
from partita.energy.policies.job import Job, Rank
from partita.energy.policies.perseus import Perseus
from partita.energy.policies.profiling import GlobalPowerLimit, InstructionProfiler
from partita.errors import InvalidInputError
from partita.names import did_you_mean

SCHEDULERS: Mapping[str, type[Scheduler]] = {
    "perseus": Perseus,
    "instruction-profiler": InstructionProfiler,
    "point-solution": PointSolution,
    "all-max": AllMax,
    "two-frequencies": TwoFrequencies,
    "global-power-limit": GlobalPowerLimit,
}
"""What ``--scheduler`` takes."""

_FROM_FILES = {"plans": "solution_path"}
"""Options whose values are read from files, and what they are called where a file is named."""

_KINDS: Mapping[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    float | None: (int, float),
    str: (str,),
    bool: (bool,),
}


def check_scheduler(name: str, options: Mapping[str, object]) -> None:
    """Refuse a scheduler or options that there are not, and values that no job can have.

    Raises:
        InvalidInputError: Says what there is.
    """
    if name not in SCHEDULERS:
        raise InvalidInputError(f"there is no scheduler {name!r}{did_you_mean(name, SCHEDULERS)}")
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(SCHEDULERS[name]).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option, value in options.items():
        if option not in parameters:
            raise InvalidInputError(
                f"scheduler {name!r} has no option {option!r}{did_you_mean(option, parameters)}"
            )
        allowed = _KINDS.get(parameters[option].annotation)
        if allowed and (
            not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        ):
            kind = allowed[-1].__name__
            raise InvalidInputError(
                f"option {option!r} of scheduler {name!r} is {value!r}; expected a value of type "
                f"{kind}"
            )
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            given = _FROM_FILES.get(option, option)
            raise InvalidInputError(f"scheduler {name!r} needs the option {given!r}")
    SCHEDULERS[name].check_options(options)


def make_scheduler(
    name: str, job: Job, ranks: Sequence[Rank], options: Mapping[str, Any]
) -> Scheduler:
    """Return the scheduler of a job.

    Raises:
        InvalidInputError: There is no such scheduler or option, or it does not fit the job.
    """
    check_scheduler(name, options)
    return SCHEDULERS[name](job, ranks, **options)
