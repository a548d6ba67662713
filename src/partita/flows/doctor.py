"""What this machine has and lacks: what ``partita.doctor`` and the command ``doctor`` say."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.flows.results import Result
from partita.processes import machine_cores

PACKAGES = (
    ("torch", "run plans (the interpreter)", "partita[torch]"),
    ("transformers", "Hugging Face models", "partita[models]"),
    ("fastapi", "the HTTP service", "partita[serve]"),
    ("pynvml", "reading GPU power and clocks", "partita[energy]"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Examination(Result):
    """What a machine has and lacks.

    Attributes:
        python: Version of Python.
        cores: Cores that this process may use.
        memory_bytes: Main memory; 0 = not known.
        gpus: Names of the GPUs.
        rapl: Whether energy counters of the CPU can be read.
        packages: Version (None = not installed), purpose and source of optional packages.
        ready: By what can be done, whether it can be done here.
    """

    python: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    rapl: bool
    packages: Mapping[str, Mapping[str, str | None]]
    ready: Mapping[str, bool]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "python": self.python,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "gpus": list(self.gpus),
            "rapl": self.rapl,
            "packages": {name: dict(package) for name, package in self.packages.items()},
            "ready": dict(self.ready),
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return the optional packages."""
        return [{"package": name, **package} for name, package in self.packages.items()]

    def lines(self) -> list[str]:
        """Return the machine, what it can do, and what it cannot."""
        torch, gpus = self.packages["torch"]["version"], self.gpus
        memory = f"{self.memory_bytes / 1e9:.0f} GB" if self.memory_bytes else "memory not known"
        modelled = "RAPL" if self.rapl else "modelled only (no NVML, no RAPL)"
        machine = [
            f"python {self.python}",
            f"torch {torch}" if torch else "no torch",
            f"{self.cores} cores, {memory}",
            f"{len(gpus)} GPUs ({', '.join(sorted(set(gpus)))})" if gpus else "no GPU",
            f"energy: {'NVML' if gpus else modelled}",
        ]
        lines = [" · ".join(machine)]
        lines.append(f"ok: {', '.join(name for name, ready in self.ready.items() if ready)}")
        missing = [name for name, ready in self.ready.items() if not ready]
        return [*lines, f"not here: {', '.join(missing)}"] if missing else lines

    def reasons(self) -> list[str]:
        """Return for each missing part what it is for and how to get it."""
        lines = [
            f"{name}: for {package['purpose']}; pip install {package['install']!r}"
            for name, package in self.packages.items()
            if package["version"] is None
        ]
        if not self.gpus:
            lines.append("GPUs: none is visible (nvidia-smi); everything runs on CPU processes")
        if not self.rapl:
            lines.append("RAPL: no readable energy counter of the CPU under /sys/class/powercap")
        return lines


def doctor() -> Examination:
    """Say what this machine has and lacks."""
    packages = {
        name: {"version": _version(name), "purpose": purpose, "install": install}
        for name, purpose, install in PACKAGES
    }
    gpus = _gpus()
    return Examination(
        python=platform.python_version(),
        cores=machine_cores(),
        memory_bytes=_memory_bytes(),
        gpus=tuple(gpus),
        rapl=_has_rapl(),
        packages=packages,
        ready={
            "plan": True,
            "simulate": True,
            "convert": True,
            "interpret on CPU": packages["torch"]["version"] is not None,
            "GPU clocks": bool(gpus) and packages["pynvml"]["version"] is not None,
        },
    )


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version({"pynvml": "nvidia-ml-py"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpus() -> list[str]:
    """Return the names of the GPUs that the driver's own tool lists."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        result = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if result.returncode == 0 and line]


def _has_rapl() -> bool:
    counters = Path("/sys/class/powercap").glob("*/energy_uj")
    return any(os.access(path, os.R_OK) for path in counters)
