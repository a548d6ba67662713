"""Ranks that are started fresh; what happens to forked ones is tested with whole runs."""

import os
from pathlib import Path

import pytest

from partita.errors import WorkerError
from partita.ranks.pool import RankPool, Start


@pytest.mark.slow
def test_fresh_ranks_answer_and_an_error_names_its_rank_and_ends_them() -> None:
    # What they do is a function that a fresh process can import: an attribute of the member.
    start = Start(fork=False, joins=False, limit_s=120.0)
    with RankPool(2, getattr, start=start, limit_s=120.0) as pool:
        assert pool.call("rank") == [0, 1]
        assert pool.call("world") == [2, 2]
        pids = list(pool.pids)
        assert len({*pids, os.getpid()}) == 3
        with pytest.raises(WorkerError, match=r"rank [01].*AttributeError"):
            pool.call("no_such_thing")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
