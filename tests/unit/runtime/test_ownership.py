"""Every parameter is held by exactly the ranks of its stages."""

import pytest

from partita.errors import InvalidInputError
from partita.runtime.ownership import check_holders

EXPECTED = {"embedding": [0, 2], "block": [1]}


def test_what_the_plan_says_is_accepted() -> None:
    check_holders({0: ["embedding"], 1: ["block"], 2: ["embedding"]}, EXPECTED)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({0: ["embedding"], 1: ["block"], 2: []}, r"'embedding' is held by ranks \[0\]"),
        ({0: ["embedding", "block"], 1: ["block"], 2: ["embedding"]}, r"'block' .* \[0, 1\]"),
        ({0: ["embedding"], 1: [], 2: ["embedding"]}, r"'block' is held by ranks \[\]"),
        ({0: ["embedding"], 1: ["block", "head"], 2: ["embedding"]}, r"'head' .* belongs to \[\]"),
    ],
)
def test_anything_else_names_the_parameter_and_the_ranks(
    held: dict[int, list[str]], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check_holders(held, EXPECTED)
