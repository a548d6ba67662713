"""Connections to a Ray that is there: without its noise, and with our own handlers of signals."""

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from partita.errors import UnsupportedError


@contextmanager
def connected_ray(address: str, *, noun: str) -> Iterator[Any]:
    """Connect this process to a Ray, and leave it at the end; yields the package.

    Args:
        address: As ``ray.init`` takes it; empty = the one of ``RAY_ADDRESS``, or of this machine.
        noun: The option that needs it, for people.

    Raises:
        UnsupportedError: It is not installed, or there is none at the address.
    """
    try:
        import ray  # noqa: PLC0415 (an extra)
    except ImportError as exc:
        raise UnsupportedError(f"{noun} needs Ray: pip install partita[ray]") from exc
    path = os.environ.get("PYTHONPATH")
    with _own_signals(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what later versions of Ray will do
        try:
            ray.init(
                address=address or "auto",
                log_to_driver=False,
                logging_level="error",
                runtime_env={"env_vars": {"PYTHONPATH": path}} if path else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as exc:
            reason = str(exc).strip().splitlines()[0]
            raise UnsupportedError(f"no Ray at {address or 'auto'}: {reason}") from exc
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM, which connecting replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
