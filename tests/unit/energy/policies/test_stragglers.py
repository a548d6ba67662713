"""Stragglers: slower than their own past and than their peers."""

import pytest

from partita.energy.policies.stragglers import Sensitivity, SlowdownWatch
from partita.errors import InvalidInputError


def step(*seconds: float, clock: int = 1000) -> list[tuple[tuple[int, int], float]]:
    return [((place, clock), one) for place, one in enumerate(seconds)]


def well(watch: SlowdownWatch, steps: int = 5) -> None:
    for _ in range(steps):
        assert watch.observe(step(1.0, 2.0, 3.0, 4.0)) == pytest.approx(1.0)


def test_a_step_in_which_everything_is_slower_counts_at_once() -> None:
    watch = SlowdownWatch()
    well(watch)
    slowdown = watch.observe(step(1.5, 3.0, 4.5, 6.0))
    assert slowdown == pytest.approx(1.5)
    assert watch.decide(slowdown, (1.0, 1.0, 1.0)) == pytest.approx(1.5)
    assert watch.decide(watch.observe(step(1.52, 3.0, 4.5, 6.1))) is None


def test_a_hiccup_of_some_instructions_is_no_straggler() -> None:
    watch = SlowdownWatch()
    well(watch)
    assert watch.decide(watch.observe(step(1.0, 4.0, 6.0, 8.0))) is None
    assert watch.decide(watch.observe(step(1.0, 2.0, 3.0, 4.0))) is None
    slowdowns = [watch.observe(step(1.0, 4.0, 6.0, 8.0)) for _ in range(3)]
    assert watch.decide(slowdowns[-1]) == pytest.approx(2.0)


def test_it_is_announced_again_when_it_changes_and_when_it_is_over() -> None:
    watch = SlowdownWatch()
    well(watch)
    assert watch.decide(watch.observe(step(1.5, 3.0, 4.5, 6.0))) == pytest.approx(1.5)
    assert watch.decide(watch.observe(step(2.0, 4.0, 6.0, 8.0))) == pytest.approx(2.0)
    assert watch.decide(watch.observe(step(1.1, 2.2, 3.3, 4.4))) == pytest.approx(1.1)
    assert watch.decide(watch.observe(step(1.02, 2.0, 3.0, 4.1))) == 1.0
    assert watch.decide(watch.observe(step(1.0, 2.0, 3.0, 4.0))) is None


def test_nobody_is_a_straggler_where_all_are_slow() -> None:
    watch = SlowdownWatch()
    well(watch)
    slowdown = watch.observe(step(1.5, 3.0, 4.5, 6.0))
    assert watch.decide(slowdown, (1.5, 1.5, 1.0)) is None
    assert watch.decide(slowdown, (1.0, 1.0, 1.5)) == pytest.approx(1.5)


def test_other_clocks_have_a_past_of_their_own() -> None:
    watch = SlowdownWatch()
    well(watch)
    assert watch.observe(step(2.0, 4.0, 6.0, 8.0, clock=500)) == 1.0
    watch.observe(step(2.0, 4.0, 6.0, 8.0, clock=500))
    assert watch.observe(step(3.0, 6.0, 9.0, 12.0, clock=500)) == pytest.approx(1.5)


def test_what_a_slow_device_does_is_not_its_past() -> None:
    watch = SlowdownWatch()
    well(watch)
    watch.decide(watch.observe(step(1.5, 3.0, 4.5, 6.0)))
    for _ in range(3):
        watch.observe(step(3.0, 6.0, 9.0, 12.0, clock=500))
    watch.decide(watch.observe(step(1.0, 2.0, 3.0, 4.0)))
    assert watch.observe(step(2.0, 4.0, 6.0, 8.0, clock=500)) == 1.0


def test_a_straggler_at_clocks_without_a_past_is_still_one() -> None:
    """It gets another plan because it is slow; that once made it look well."""
    watch = SlowdownWatch()
    well(watch)
    watch.decide(watch.observe(step(1.5, 3.0, 4.5, 6.0)))
    slow = step(1.2, 2.4, 3.6, 4.8, clock=1250)
    for _ in range(4):
        assert watch.decide(watch.observe(slow)) is None
    assert watch.announced == pytest.approx(1.5)
    assert watch.decide(watch.observe(step(0.8, 1.6, 2.4, 3.2, clock=1250))) == 1.0


def test_a_straggler_that_recovers_with_its_plan_is_well_at_once() -> None:
    watch = SlowdownWatch()
    well(watch)
    watch.decide(watch.observe(step(1.5, 3.0, 4.5, 6.0)))
    assert watch.decide(watch.observe(step(0.8, 1.6, 2.4, 3.2, clock=1250))) == 1.0


def test_a_straggler_without_any_past_at_new_instructions_stays() -> None:
    watch = SlowdownWatch()
    well(watch)
    watch.decide(watch.observe(step(1.5, 3.0, 4.5, 6.0)))
    others = [((f"other {place}", 500), 7.0) for place in range(3)]
    assert watch.decide(watch.observe(others)) is None


def test_limits_must_make_sense() -> None:
    with pytest.raises(InvalidInputError, match="recovered < slow"):
        Sensitivity(slow=1.1, recovered=1.2)
    with pytest.raises(InvalidInputError, match="learned is 1"):
        Sensitivity(learned=1)


def test_the_first_part_of_a_step_is_suspected_where_all_of_it_is_slow() -> None:
    watch = SlowdownWatch()
    assert watch.suspect(step(9.0, 9.0, 9.0)) == 1.0
    for _ in range(3):
        watch.observe(step(*[1.0] * 20))
    assert watch.early == 5
    assert watch.suspect(step(*[1.4] * 5)) == pytest.approx(1.4)
    assert watch.suspect(step(1.4, 1.4, 1.0, 1.4, 1.4)) == 1.0
    assert watch.suspect(step(1.4, 1.4)) == 1.0
    assert watch.announced == 1.0
