"""Policies of dtypes, optimizers as rows, and bytes on the wire."""

import numpy as np
import pytest

from partita.core.codec import decode, encode
from partita.core.graph import ParameterTable
from partita.core.precision import OPTIMIZERS, PRECISIONS, parse_precision, wire_bytes
from partita.core.problem import Objective
from partita.errors import InvalidInputError


def test_a_text_names_a_preset_and_the_dtypes_that_differ():
    found = parse_precision("bf16,state=bf16, master=none")
    assert (found.state, found.master, found.weights) == ("bfloat16", None, "bfloat16")
    assert found.name == "bf16,state=bf16,master=none"
    assert parse_precision("fp8") is not None
    assert parse_precision("bf16") == PRECISIONS["bf16"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bf61", "did you mean"),
        ("bf16,sate=float32", "no part"),
        ("bf16,state", "no part"),
        ("bf16,weights=none", "weights is 'none'"),
        ("bf16,weights=int8", "weights is 'int8'"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_would_do(text, reason):
    with pytest.raises(InvalidInputError, match=reason):
        parse_precision(text)


def test_activations_have_16_bits_in_float8_and_32_in_tfloat32():
    kinds = {name: policy.activations for name, policy in PRECISIONS.items()}
    assert kinds["fp8"] == kinds["bf16"] == "bfloat16"
    assert kinds["tf32"] == "float32"
    copies = {name for name, policy in PRECISIONS.items() if policy.copy}
    assert copies == {"bf16-mixed"}


def test_eight_bit_adam_has_its_own_width_and_others_that_of_the_policy():
    pure = PRECISIONS["pure-bf16"]
    found = {name: row.state_bytes(pure) for name, row in OPTIMIZERS.items()}
    assert found == {"sgd": 0, "momentum": 2, "adam": 4, "adamw": 4, "adafactor": 0, "adam8bit": 2}
    assert OPTIMIZERS["adam"].state_bytes() == 8


def test_reductions_and_gathers_move_the_bytes_of_the_policy():
    table = ParameterTable(
        names=("w", "steps"),
        bytes=np.array([40.0, 8.0]),
        dtypes=("float32", "int64"),
        trainable=np.array([True, False]),
    )
    wire = wire_bytes(table, PRECISIONS["bf16-fp32-grads"])
    assert wire.reduced.tolist() == [40, 8]
    assert wire.gathered.tolist() == [20, 8]
    assert wire_bytes(table, PRECISIONS["fp8"]).gathered.tolist() == [10, 8]
    assert wire_bytes(table, None).reduced is table.bytes


def test_objectives_carry_their_policy_and_documents_without_one_are_read():
    objective = Objective().with_precision(parse_precision("bf16,state=bf16"))
    document = encode(objective)
    assert decode(document) == objective
    assert objective.optimizer_bytes_per_element == 4
    del document["precision"]
    assert decode(document).precision is None
