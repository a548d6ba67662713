import numpy as np
import pytest

from partita.errors import InvalidInputError
from partita.fleet.study.generated import (
    Mix,
    Submission,
    at_load,
    deal_models,
    draw_durations,
    draw_gpus,
    generate_trace,
    published_jobs,
    trace_of_log,
)
from partita.testing.fleet_builders import flat, steep

MODELS = [steep("a"), steep("b"), flat("c"), flat("d", kind="speech")]


def rng():
    return np.random.default_rng(7)


def test_the_same_seed_draws_the_same_trace():
    first, second = (generate_trace(MODELS, rng(), jobs=50) for _ in range(2))
    assert first == second
    assert generate_trace(MODELS, np.random.default_rng(8), jobs=50) != first


def test_durations_have_the_published_ranges_and_mean():
    minutes = draw_durations(rng(), 20_000) / 60
    assert minutes.min() >= 10**1.5
    assert minutes.max() <= 10**4
    assert minutes.mean() / 60 == pytest.approx(16.8, rel=0.05)
    assert draw_durations(rng(), 2000, short=True).max() / 60 <= 10**2.7


def test_classes_keep_their_shares_and_models_take_turns():
    dealt = deal_models(MODELS, 100, {"image": 20.0, "language": 70.0, "speech": 10.0})
    assert np.bincount(dealt).tolist() == [10, 10, 70, 10]
    # The first goes to the class that is furthest below its share.
    assert dealt[0] == 2
    with pytest.raises(InvalidInputError, match="'video'"):
        deal_models(MODELS, 5, {"video": 1.0})
    with pytest.raises(InvalidInputError, match="expected one above 0"):
        deal_models(MODELS, 5, {"image": 0.0})


def test_poisson_arrivals_come_at_their_rate_and_static_ones_at_once():
    trace = generate_trace(MODELS, rng(), jobs=4000, mix=Mix(per_hour=6.0))
    assert trace.arrival_s[-1] / 3600 == pytest.approx(4000 / 6, rel=0.05)
    static = generate_trace(MODELS, rng(), jobs=3, mix=Mix(per_hour=None))
    assert static.start_s == 1.0
    assert static.arrival_s.tolist() == [0.0, 0.001, 0.002]


def test_gpu_demands_follow_their_shares():
    gpus = draw_gpus(rng(), 5000, {1: 70.0, 4: 30.0})
    assert set(gpus.tolist()) == {1, 4}
    assert (gpus == 4).mean() == pytest.approx(0.3, abs=0.03)
    with pytest.raises(InvalidInputError, match="GPU shares"):
        draw_gpus(rng(), 5, {1: -1.0})


def test_a_load_gives_the_same_jobs_other_arrivals():
    trace = generate_trace(MODELS, rng(), jobs=500)
    busy = at_load(trace, rng(), per_hour=90.0)
    assert busy.iterations.tolist() == trace.iterations.tolist()
    assert busy.arrival_s[-1] < trace.arrival_s[-1] / 5
    with pytest.raises(InvalidInputError, match="expected more than 0"):
        at_load(trace, rng(), per_hour=0.0)


def test_a_log_gives_durations_gpus_and_arrivals():
    log = [
        Submission(submitted_s=900.0, duration_s=7200.0, gpus=4),
        Submission(submitted_s=300.0, duration_s=3600.0, gpus=3),
        Submission(submitted_s=100.0, duration_s=60.0, gpus=1),
        Submission(submitted_s=100.0, duration_s=7200.0, gpus=32),
    ]
    trace = trace_of_log(log, MODELS, rng())
    assert trace.arrival_s.tolist() == [0.0, 0.0, 200.0, 800.0]
    assert trace.gpus.tolist() == [1, 32, 3, 4]
    assert trace.fair_s.tolist() == [60.0, 7200.0, 3600.0, 7200.0]
    single = trace_of_log(log, MODELS, rng(), multi_gpu=False, mix=Mix(per_hour=5.0))
    assert single.gpus.tolist() == [1, 1, 1, 1]
    assert len(trace_of_log(log, MODELS, rng(), real_durations=False)) == 4
    with pytest.raises(InvalidInputError, match="has no job"):
        trace_of_log([], MODELS, rng())


def test_the_published_reader_keeps_some_jobs_and_says_which_not():
    log = [
        Submission(submitted_s=900.0, duration_s=7200.0, gpus=4),
        Submission(submitted_s=300.0, duration_s=3600.0, gpus=3),
        Submission(submitted_s=100.0, duration_s=60.0, gpus=1),
        Submission(submitted_s=100.0, duration_s=7200.0, gpus=32),
    ]
    kept, notes = published_jobs(log)
    trace = trace_of_log(kept, MODELS, rng())
    assert trace.arrival_s.tolist() == [0.0, 600.0]
    assert trace.gpus.tolist() == [1, 4]
    assert notes == (
        "1 shorter than 32 or longer than 10,000 minutes left out",
        "1 with more than 16 GPUs left out",
        "1 whose GPUs are no power of two taken as 1 GPU",
    )
    kept, notes = published_jobs(log, multi_gpu=False)
    assert len(kept) == 3
    assert len(notes) == 1
    with pytest.raises(InvalidInputError, match="log ran"):
        published_jobs(log[2:3])
    with pytest.raises(InvalidInputError, match="16 GPUs or fewer"):
        published_jobs(log[3:])


def test_a_trace_needs_jobs():
    with pytest.raises(InvalidInputError, match="0 jobs"):
        generate_trace(MODELS, rng(), jobs=0)
