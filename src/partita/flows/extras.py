"""What to install where an optional package is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from partita.errors import UnsupportedError


@contextmanager
def torch_needed(what: str) -> Iterator[None]:
    """Say what to install where an import inside fails for want of torch.

    Args:
        what: What needs it, such as ``"profiles need"``.

    Raises:
        UnsupportedError: torch is not there.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise UnsupportedError(f"{what} torch; pip install 'partita[torch]'") from exc
