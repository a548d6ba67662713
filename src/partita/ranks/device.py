"""What differs between a CPU and a GPU, in one place: backend, groups, streams, memory, seeds.

Code of ranks asks ``seam_of(device)`` and never names CUDA or NCCL itself. On a GPU a backend works
on a stream of its own. torch lets it wait for the current stream when a tensor is handed to it, and
lets the current stream wait for it in ``wait()``; what is left to us is that the tensor lies on the
device of the rank, is contiguous, and is neither changed nor let go of before it was waited for.
``runtime/dry_run.py`` proves just that of every instruction of every rank.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from partita.errors import UnsupportedError, WorkerError

GLOO, NCCL = "gloo", "nccl"


class DeviceSeam(Protocol):
    """A device as ranks see it."""

    @property
    def backend(self) -> str:
        """Backend of torch.distributed that carries its tensors."""
        ...

    @property
    def tells_memory(self) -> bool:
        """Whether its memory is counted by torch."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was started has ended."""
        ...

    def reset_peak(self) -> None:
        """Forget how much memory was used at most."""
        ...

    def allocated_bytes(self) -> float:
        """Return how much memory tensors hold."""
        ...

    def peak_bytes(self) -> float:
        """Return how much memory tensors held at most."""
        ...


class CpuSeam:
    """The CPU: nothing runs behind our back, and torch counts no memory."""

    backend = GLOO
    tells_memory = False

    def synchronize(self) -> None:
        """Do nothing: what was called has ended."""

    def reset_peak(self) -> None:
        """Do nothing."""

    def allocated_bytes(self) -> float:
        """Return 0: it is not counted."""
        return 0.0

    def peak_bytes(self) -> float:
        """Return 0: it is not counted."""
        return 0.0


class CudaSeam:
    """A GPU of CUDA."""

    backend = NCCL
    tells_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        """Forget how much memory was used at most."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> float:
        """Return how much memory tensors hold."""
        return float(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> float:
        """Return how much memory tensors held at most."""
        return float(torch.cuda.max_memory_allocated(self._device))


def seam_of(device: torch.device) -> DeviceSeam:
    """Return a device as ranks see it."""
    return CudaSeam(device) if device.type == "cuda" else CpuSeam()


def has_ordered_groups(backend: str) -> bool:
    """Return whether a backend serves the messages of a group one after the other.

    Each ordered pair of devices then needs a group of its own, and several collectives of a group
    may be joined.
    """
    return backend == NCCL


def seed_device(value: int) -> None:
    """Seed the default random generators of the CPU and of GPUs that are in use."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.cuda.manual_seed(value)


def check_streams() -> str:
    """Compute on one stream of a GPU while another copies from pinned memory.

    Returns:
        What was seen.

    Raises:
        UnsupportedError: There is no GPU.
        WorkerError: A copy that was waited for by an event has other values.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("a CPU has no streams: what was called has ended")
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.arange(2**24, dtype=torch.float32).pin_memory()
    matrix = torch.randn(4096, 4096, device=device)
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    alone_s = [_seconds(lambda: [matrix @ matrix for _ in range(8)], device) for _ in range(2)][1]
    copied_s = [_seconds(lambda: source.to(device), device) for _ in range(2)][1]

    def both() -> None:
        with torch.cuda.stream(copies):
            target = source.to(device, non_blocking=True)
            done = copies.record_event()
        for _ in range(8):
            _ = matrix @ matrix
        torch.cuda.current_stream(device).wait_event(done)
        target.record_stream(torch.cuda.current_stream(device))
        if not torch.equal(target[::4097].cpu(), source[::4097]):
            raise WorkerError("a copy that an event was waited for has other values")

    both_s = [_seconds(both, device) for _ in range(2)][1]
    hidden = (alone_s + copied_s - both_s) / copied_s
    return f"a pinned copy beside compute: {hidden:.0%} of its time hidden"


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
