import dataclasses

import pytest

from partita.core.codec import decode, encode
from partita.core.energy import Frontier
from partita.errors import FormatError, InvalidInputError
from partita.testing.builders import small_frontier

NAN, INF = float("nan"), float("inf")


def frontier(**changes: object) -> Frontier:
    return dataclasses.replace(small_frontier(), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_s": [5.4, 3.0]}, "must go from fast to slow"),
        ({"time_s": [0.0, 3.0]}, "time_s of row 0 is 0.0; expected more than 0"),
        ({"all_max_s": 0.0}, "all_max_s is 0.0; expected more than 0, finite"),
        ({"all_max_s": NAN}, "all_max_s is nan; expected more than 0, finite"),
        ({"fastest_s": -1.0}, "fastest_s is -1.0; expected more than 0, finite"),
        ({"best_s": INF}, "best_s is inf; expected more than 0, finite"),
        ({"all_max_j": 0.0}, "all_max_j is 0.0; expected more than 0, finite"),
        ({"all_max_j": NAN}, "all_max_j is nan; expected more than 0, finite"),
    ],
)
def test_a_frontier_of_times_or_energies_that_cannot_be_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        frontier(**changes)


@pytest.mark.parametrize("value", [0, None, "inf"])
def test_a_document_without_the_time_of_all_max_is_refused(value: object) -> None:
    document = {**encode(small_frontier()), "all_max_s": value}
    with pytest.raises(FormatError, match=r"all_max_s.*;.*0, finite"):
        decode(document)
