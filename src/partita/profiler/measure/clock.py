"""Clocks for ops: the processor's timer, or events of a GPU.

A mark is cheap and may not be read at once: on a GPU it is an event in the stream. Seconds between
two marks are asked for after a round, when all of them have passed.
"""

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Tells the time on the device that computes."""

    @property
    def counts_host(self) -> bool:
        """Whether the time that Python takes to start an op is in what it tells."""
        ...

    def mark(self) -> Any:  # noqa: ANN401  # a moment, as the device has it
        """Return a mark of now."""
        ...

    def between(self, first: Any, last: Any) -> float:  # noqa: ANN401  # marks
        """Return the seconds between two marks, after ``settle``."""
        ...

    def settle(self) -> None:
        """Wait until all work before now is done."""
        ...


class CpuStopwatch:
    """The processor; work is done when a call returns.

    Where one thread computes, its processor time: other processes do not disturb that, unlike the
    wall clock. Where several do, the wall clock.
    """

    counts_host = True

    def __init__(self, threads: int = 1) -> None:
        self.mark = time.thread_time if threads == 1 else time.perf_counter

    @staticmethod
    def between(first: float, last: float) -> float:
        """Return the seconds between two marks."""
        return last - first

    @staticmethod
    def settle() -> None:
        """Do nothing: there is nothing to wait for."""


class CudaStopwatch:
    """Events in the current stream of a GPU. Not tried: there was no GPU to try it on."""

    counts_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:  # noqa: ANN401  # torch has no types for it
        """Return an event of now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: Any, last: Any) -> float:  # noqa: ANN401  # events
        """Return the seconds between two events."""
        return float(first.elapsed_time(last)) / 1e3

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)


def stopwatch_for(device: torch.device, threads: int) -> Stopwatch:
    """Return the clock of a device, where so many threads of the processor compute."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch(threads)


class EngineStart:
    """Times calls of autograd's engine for an op whose backward does nothing."""

    def __init__(self, clock: Stopwatch, device: torch.device, num_targets: int = 1) -> None:
        """Prepare the op.

        Args:
            clock: Tells the time.
            device: Device of the op.
            num_targets: Tensors whose gradients are asked for.
        """
        self._clock = clock
        self._leaves = [torch.zeros(1, device=device) for _ in range(num_targets)]
        for leaf in self._leaves:
            leaf.requires_grad_()
        self._gradient = torch.ones(1, device=device)

    def seconds(self) -> float:
        """Return the time of one call."""
        with torch.enable_grad():
            made = self._leaves[0].view_as(self._leaves[0])
        first = self._clock.mark()
        torch.autograd.grad([made], self._leaves, [self._gradient], allow_unused=True)
        return self._clock.between(first, self._clock.mark())
