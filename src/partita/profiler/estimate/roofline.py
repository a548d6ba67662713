"""Seconds of a kernel on a type of device: a roofline with a share of the peak for each class.

A kernel takes the longer of computing and moving, and a launch::

    seconds = max(work / (share[kind] * peak), bytes / (memory_share * bandwidth)) + launch

The work of a product of matrices is what its tiles take: a device computes as many tiles at a time
as it has processors, and the last wave is as long as a full one. Products with an odd length run
slower, and so do convolutions of small images. The shares are fitted on measured runs by
``benchmarks/estimate_accuracy.py`` and stand in ``catalogue/kernels.yaml``.
"""

import math
from dataclasses import dataclass
from functools import cache

from partita.catalogue.catalogue import DeviceType
from partita.catalogue.kernel_rates import DeviceKernels, kernels_on
from partita.errors import InvalidInputError
from partita.profiler.flops import Kernel, KernelClass, Tiles

TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.7))
"""Rows, columns and relative rate of the tiles that a library chooses from."""
SPLITS = (1, 2, 3, 4)
"""Into how many parts a library cuts the inner length, to fill the last wave."""
ODD_SHARE = 0.8
"""Rate of a product whose innermost length is odd (Perseus runs: heads of 50,257 columns)."""
SMALL_IMAGE_PIXELS = 45.0
"""Convolutions reach pixels / (pixels + this) of their rate (Perseus runs)."""
HOST_S_PER_ELEMENT = 3.8e-9
"""Seconds of one number on the host (17 ms for the 17 steps of T5's 512 x 512)."""

_MOVING = frozenset({KernelClass.ELEMENTWISE, KernelClass.REDUCTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A device's peaks at one dtype, and what kernels reach of them.

    Attributes:
        peak_flop_per_s: Peak rate.
        memory_bytes_per_s: Memory bandwidth.
        kernels: What kernels reach.
        float_factor: Bytes of a floating-point number over those of the captured one.
    """

    peak_flop_per_s: float
    memory_bytes_per_s: float
    kernels: DeviceKernels
    float_factor: float = 1.0

    def moved_bytes(self, kernel: Kernel) -> float:
        """Return the bytes that a kernel moves at this dtype."""
        return kernel.read_write_bytes + (self.float_factor - 1.0) * kernel.floating_bytes

    def seconds(self, kernel: Kernel) -> float:
        """Return how long a kernel takes."""
        if kernel.kind is KernelClass.HOST:
            return HOST_S_PER_ELEMENT * kernel.work
        shares = self.kernels.shares
        moving_kind = kernel.kind if kernel.kind in _MOVING else KernelClass.ELEMENTWISE
        moving = self.moved_bytes(kernel) / (shares[moving_kind] * self.memory_bytes_per_s)
        computing = 0.0
        if kernel.flops and kernel.kind not in _MOVING:
            peak = shares[kernel.kind] * self.peak_flop_per_s
            computing = computed_flops(kernel, self.kernels.processors) / peak
        return max(moving, computing) + kernel.launches * self.kernels.launch_s


def computed_flops(kernel: Kernel, processors: int) -> float:
    """Return the FLOPs of full waves that take as long as a kernel."""
    work = kernel.work * kernel.flops
    if kernel.image:
        return work * (kernel.image + SMALL_IMAGE_PIXELS) / kernel.image
    if kernel.tiles is None:
        return work
    tiles = kernel.tiles
    if any(length % 2 and length > 1 for length in (tiles.rows, tiles.columns, tiles.inner)):
        work /= ODD_SHARE
    return work * wave_factor(tiles, processors)


@cache
def _waves(number: int, rows: int, columns: int, processors: int) -> float:
    best = math.inf
    for high, wide, rate in TILES:
        for first, second in ((high, wide), (wide, high)):
            count = number * math.ceil(rows / first) * math.ceil(columns / second)
            for split in SPLITS:
                pieces = count * split
                if processors:
                    pieces = math.ceil(pieces / processors) * processors
                best = min(best, pieces / split * first * second / rate)
    return best / (number * rows * columns)


def wave_factor(tiles: Tiles, processors: int) -> float:
    """Return computed over needed FLOPs of a product: padding of tiles and the last wave."""
    return _waves(tiles.number, tiles.rows, tiles.columns, processors)


def roofline_of(device: DeviceType, dtype: str, float_factor: float = 1.0) -> Roofline:
    """Return the roofline of a type of device at a dtype.

    Raises:
        InvalidInputError: The catalogue has no peak for the dtype, or no memory bandwidth.
    """
    peak = device.peak_flop_per_s.get(dtype, 0.0)
    if not peak:
        known = ", ".join(sorted(device.peak_flop_per_s)) or "none"
        raise InvalidInputError(
            f"device type {device.name!r} has no peak rate for {dtype}; there are {known}"
        )
    if not device.memory_bytes_per_s:
        raise InvalidInputError(f"device type {device.name!r} has no memory bandwidth")
    return Roofline(
        peak_flop_per_s=peak,
        memory_bytes_per_s=device.memory_bytes_per_s,
        kernels=kernels_on(device.name),
        float_factor=float_factor,
    )
