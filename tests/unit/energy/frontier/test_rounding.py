"""Points between two others, made of the microbatches of both."""

import numpy as np

from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind
from partita.energy.frontier.frontier import solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.rounding import lower_hull


def two_clocks(stages: int = 4) -> EnergyProfile:
    """Return a profile whose instructions are fast or cheap, with nothing in between."""
    rows = [
        (stage, int(kind), 0, clock, seconds, joules)
        for stage in range(stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for clock, seconds, joules in ((1400.0, 1.0, 500.0), (1000.0, 1.2, 300.0))
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    names = ("stage", "kind", "device_type", "clock_mhz", "seconds", "joules")
    return EnergyProfile(
        name="two",
        origin=EnergyOrigin.PUBLISHED,
        device_types=("",),
        blocking_w={"": 50.0},
        **dict(zip(names, columns, strict=True)),
    )


def test_only_corners_below_all_lines_are_on_the_hull() -> None:
    assert lower_hull([0, 1, 2, 3], [9, 8, 2, 0]) == [0, 2, 3]
    assert lower_hull([0, 1, 2], [2, 1, 0]) == [0, 2]
    assert lower_hull([1], [1]) == [0]


def test_halfway_between_two_clocks_half_of_the_microbatches_run_slowly() -> None:
    model = pipeline_model(two_clocks(), Pipeline(microbatches=40))
    found = solve_frontier(model, points=5, tries=0)
    assert len(found) == 5
    assert found.gap.max() < 0.012
    middle = found.clocks(2)
    slow = (middle == 1000).sum() / (middle > 0).sum()
    assert 0.4 < slow < 0.6
    assert found.time_s[2] <= (found.time_s[0] + found.time_s[4]) / 2 * (1 + 1e-9)
