"""The Slurm and the Ray that tests start for themselves."""

import time

import pytest

from partita.testing.ray import PrivateRay
from partita.testing.slurm import PrivateSlurm

pytestmark = pytest.mark.slow


@pytest.mark.root
def test_a_job_of_the_private_slurm_holds_fake_gpus(
    slurm: PrivateSlurm,
) -> None:
    submitted = slurm.call(
        "sbatch", "--parsable", "-w", "n3", "--gres=gpu:2", "--mem=1G", "--no-requeue",
        "-o", f"{slurm.directory}/%j.out", "--wrap", "echo $CUDA_VISIBLE_DEVICES; sleep 600",
    ).strip()  # fmt: skip
    printed = slurm.directory / f"{submitted}.out"
    last_s = time.monotonic() + 60
    while not (printed.exists() and printed.read_text()) and time.monotonic() < last_s:
        time.sleep(0.05)
    assert printed.read_text() == "0,1\n"
    slurm.call("scancel", submitted)


def test_the_private_ray_has_two_nodes_of_fake_gpus(ray: PrivateRay) -> None:
    assert ray.living_nodes() == 2
