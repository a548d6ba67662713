"""Plan files for the scheduler ``point-solution``: data, never run."""

from pathlib import Path

from partita.documents import read_text
from partita.energy.policies.fixed import NamedPlan
from partita.errors import FormatError, InvalidInputError
from partita.formats.perseus import read_clock_plan


def read_plans(path: str) -> list[NamedPlan]:
    """Return the plans in a file, or in the ``.py`` files of a folder in order of their names.

    Raises:
        InvalidInputError: There is none.
        FormatError: A file is not a plain list of clocks.
    """
    place = Path(path)
    files = sorted(place.glob("*.py")) if place.is_dir() else [place]
    if not files:
        raise InvalidInputError(f"{path}: there is no plan (*.py) in this folder")
    plans: list[NamedPlan] = []
    for file in files:
        try:
            plan = read_clock_plan(read_text(str(file)))
        except FormatError as exc:
            raise (exc if exc.path else exc.at(str(file))) from exc
        plans.append((file.name, tuple(map(tuple, plan))))
    return plans
