"""Keeps memory that torch has freed on a CPU, so that the next tensor need not be paged in again.

By default glibc gives large blocks back to the system at once. A training step frees and asks for
the same sizes over and over, and each time the system has to page them in.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES = 2**30
"""Blocks up to this size come from memory that is kept."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees; does nothing where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_BYTES - 1)
