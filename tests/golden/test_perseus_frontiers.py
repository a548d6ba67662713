"""Perseus's published emulations: ours saves more at the fastest time, by the same accounting."""

import csv
import gzip

import pytest

from partita.energy.frontier.frontier import solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.savings import played
from partita.formats.perseus import read_energy_csv

CASES = [
    ("gpt3-175b", "a100_sxm", 83.64, 15.34),
    ("gpt3-175b", "a40", 70.38, 11.82),
    ("bloom", "a100_sxm", 83.64, 10.69),
]


@pytest.mark.parametrize(("model", "device", "blocking_w", "stated"), CASES)
def test_twelve_microbatches(shared_data, model, device, blocking_w, stated):
    folder = shared_data / "perseus"
    text = (folder / "stage_profile" / f"{model}+{device}_bf16.csv").read_text()
    known = read_energy_csv(text, blocking_w={"": blocking_w})
    pipeline = pipeline_model(known, Pipeline(microbatches=12))
    frontier = solve_frontier(pipeline, points=1, tries=100_000)
    name = f"{device}_{model}_bf16_mb12.csv.gz"
    with gzip.open(folder / "published_frontier" / name, "rt") as file:
        rows = [(float(row["time"]), float(row["energy"])) for row in csv.DictReader(file)]
    theirs = 100 * (1 - min(rows)[1] / frontier.all_max_j)
    ours = 100 * (1 - float(frontier.energy_j[0]) / frontier.all_max_j)
    assert theirs == pytest.approx(stated, abs=0.006)
    assert ours > stated
    assert frontier.gap[0] < 0.003
    assert frontier.time_s[0] <= frontier.fastest_s * (1 + 1e-9)
    step = played(pipeline, frontier.clocks(0))
    assert (step.time_s, step.energy_j) == pytest.approx(
        (frontier.time_s[0], frontier.energy_j[0]), rel=1e-9
    )
    assert bool(frontier.better_than_all_max) == (model == "bloom")
