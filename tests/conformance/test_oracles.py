"""Files of every target, read by the real package: ``benchmarks/interop.py`` on a few plans.

Packages are asked where ``PARTITA_ORACLES`` names the directory that ``benchmarks/interop.py
--install --cache DIR`` has filled; what bash and Python tell by themselves is asked always.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from partita.testing.slurm import private_slurm, why_no_slurm
from partita.trainers.table import TARGETS

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "interop.py"
CACHE = os.environ.get("PARTITA_ORACLES", "")
PLANS = 4


@pytest.fixture(scope="module")
def interop() -> Iterator[ModuleType]:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("benchmark_interop", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("target", [*TARGETS, "torchtitan-toml"])
def test_the_real_package_reads_what_was_planned(
    target: str, interop: ModuleType, tmp_path: Path
) -> None:
    home = interop.home_of(target)
    if home not in ("bash", "python") and not CACHE:
        pytest.skip(f"PARTITA_ORACLES is not set; the oracle is {home}")
    if home == "slurmctld":
        if reason := why_no_slurm():
            pytest.skip(reason)
        with private_slurm(tmp_path, interop.NODES) as slurm:
            row = interop.measure_target(target, tmp_path, interop.sbatch_of(slurm), PLANS)
    else:
        if home in interop.ENVIRONMENTS and interop.installed_oracle(home, Path(CACHE)) is None:
            pytest.skip(
                f"{CACHE} holds no oracle {home}; python benchmarks/interop.py --install "
                f"--cache {CACHE} makes it"
            )
        row = interop.measure_target(target, Path(CACHE), plans=PLANS)
    assert row.passes, row.problems
