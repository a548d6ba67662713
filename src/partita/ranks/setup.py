"""This process made ready for ranks: its devices, threads and memory, and whether it can fork."""

import ctypes
import gc
import sys
from pathlib import Path

import torch

from partita.errors import UnsupportedError
from partita.processes import machine_cores

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES = 2**30
"""Blocks up to this size come from memory that is kept."""
_LARGE_BYTES = 2**18
"""Blocks from this size on are given back, where that is asked for."""


def visible_gpus() -> int:
    """Return how many GPUs torch sees here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_device(index: int, *, gpu: bool, num_local_ranks: int) -> torch.device:
    """Return a device of this host, ready to compute.

    Args:
        index: Which of its GPUs.
        gpu: Whether it is a GPU; the CPU otherwise, with a share of the cores.
        num_local_ranks: Ranks that share the cores.

    Raises:
        UnsupportedError: There is no such GPU.
    """
    if gpu:
        if index >= torch.cuda.device_count():
            raise UnsupportedError(
                f"there is no GPU {index} here; torch sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    torch.set_num_threads(max(1, machine_cores() // num_local_ranks))
    return torch.device("cpu")


def why_not_fork() -> str:
    """Return why this process cannot fork ranks; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "ranks are forked on Linux only"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        return "this process uses a GPU"
    if torch.get_num_threads() > 1:
        return f"torch may compute with {torch.get_num_threads()} threads here"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"this process has {threads} threads"
    return ""


_ALLOWED_THREADS = torch.get_num_threads()
"""Threads that torch begins with: the machine's cores, or what ``OMP_NUM_THREADS`` says."""


def limit_threads(ranks: int) -> int:
    """Let torch compute with as many threads as each of some ranks here may have.

    More than the cores' share makes all of them slower, up to ten times; no more than the user
    allows by ``OMP_NUM_THREADS``.
    """
    threads = max(1, min(_ALLOWED_THREADS, machine_cores() // ranks))
    torch.set_num_threads(threads)
    return threads


def warm_up_autograd() -> None:
    """Let torch import what a first backward needs, which can take seconds."""
    leaf = torch.ones(1, requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.ones(1))


def keep_freed_memory() -> None:
    """Let this process keep what it frees; does nothing where the C library is another one.

    By default glibc gives large blocks back to the system at once. A training step frees and asks
    for the same sizes over and over, and each time the system would have to page them in.
    """
    _set_thresholds(_LARGEST_BYTES, 2 * _LARGEST_BYTES - 1)


def give_back_memory() -> None:
    """Give back what this process has freed, and from now on large blocks as they are freed.

    A process that builds and captures a model frees many blocks of many sizes: kept, they would be
    more than what it needs. Does nothing where the C library is another one.
    """
    gc.collect()
    _set_thresholds(_LARGE_BYTES, _LARGE_BYTES)
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _set_thresholds(largest_kept_bytes: int, trimmed_bytes: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, largest_kept_bytes)
        mallopt(_TRIM_THRESHOLD, trimmed_bytes)
