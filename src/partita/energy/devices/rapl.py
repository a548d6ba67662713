"""CPU packages through the kernel's RAPL counters, with the memory that they feed."""

from pathlib import Path

from partita.core.energy import EnergyOrigin
from partita.errors import UnsupportedError

ROOT = Path("/sys/class/powercap")
_MICRO = 1e-6


class _Counter:
    """One counter of microjoules, which begins again at 0 above its range."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = _read(folder / "max_energy_range_uj")
        self._last_uj = _read(self._file)
        self._total_uj = 0

    def total_uj(self) -> int:
        now_uj = _read(self._file)
        passed = now_uj - self._last_uj
        # The range is the largest value, so that one more than it is 0.
        self._total_uj += passed if passed >= 0 else passed + self._range_uj + 1
        self._last_uj = now_uj
        return self._total_uj


def _read(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except PermissionError:
        raise UnsupportedError(
            f"no permission to read {path}; run as root, or let root do 'chmod a+r {path}'"
        ) from None
    except (OSError, ValueError) as exc:
        raise UnsupportedError(f"{path} cannot be read: {exc}") from exc


class RaplDevice:
    """One CPU package; its clocks are left alone. See ``PowerDevice``."""

    origin = EnergyOrigin.MEASURED
    type = ""
    resolution_s = 0.001
    at_once = True
    blocking_w: float | None = None
    clocks_mhz: tuple[int, ...] = ()

    def __init__(self, index: int = 0, root: Path = ROOT) -> None:
        """Open a package.

        Args:
            index: Which package of this machine.
            root: Where the kernel shows its power zones.

        Raises:
            UnsupportedError: There is no such package, or its counter may not be read; says which
                file.
        """
        zones = sorted(
            (folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1),
            key=lambda folder: int(folder.name.partition(":")[2]),
        )
        packages = [zone for zone in zones if _name(zone).startswith("package")]
        if not packages:
            raise UnsupportedError(
                f"there is no RAPL counter of a CPU package in {root}; this kernel or virtual "
                "machine does not show any"
            )
        if index >= len(packages):
            raise UnsupportedError(
                f"there is no CPU package {index}, this machine has {len(packages)}; ranks that "
                "share a package cannot tell their energy apart"
            )
        folder = packages[index]
        inner = sorted(folder.glob(f"{folder.name}:*"))
        memory = [zone for zone in inner if _name(zone) == "dram"]
        self.name = f"cpu{index}"
        self._counters = [_Counter(zone) for zone in (folder, *memory)]

    def set_clock(self, mhz: int) -> None:
        """Leave the clock as it is; only 0 makes sense."""
        if mhz:
            raise UnsupportedError(f"{self.name}: the clocks of CPUs are not set; asked {mhz} MHz")

    def reset(self) -> None:
        """Do nothing: no clock was set."""

    def energy_j(self) -> float | None:
        """Return the joules of package and memory since it was opened."""
        return sum(counter.total_uj() for counter in self._counters) * _MICRO


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text(encoding="ascii").strip()
    except OSError:
        return ""
