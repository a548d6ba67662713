import pytest
import torch
from torch import nn

from partita.errors import InvalidInputError
from partita.runtime.stage_code import Call, ModuleGraph, OpCode
from partita.testing.builders import chain


def test_op_without_code_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"'op1'.*'built'"):
        ModuleGraph(chain(2), {"op0": OpCode(call=torch.tanh, parameters={"weight": "w0"})})


def test_code_for_an_unknown_op_is_named() -> None:
    with pytest.raises(InvalidInputError, match="code for op 'op7'"):
        ModuleGraph(chain(1), {"op0": OpCode(call=torch.tanh), "op7": OpCode(call=torch.tanh)})


def test_code_must_use_the_parameters_of_the_graph() -> None:
    with pytest.raises(InvalidInputError, match=r"'op0'.*\[\];.*\['w0'\]"):
        ModuleGraph(chain(1), {"op0": OpCode(call=torch.tanh)})


def test_state_holds_copies_of_the_modules_parameters() -> None:
    module = nn.Linear(2, 2, bias=False)
    code = ModuleGraph(chain(1), {"op0": OpCode(call=module, parameters={"weight": "w0"})})
    state = code.state()
    assert list(state) == ["w0"]
    assert torch.equal(state["w0"], module.weight)
    assert state["w0"].data_ptr() != module.weight.data_ptr()


def test_an_op_that_makes_too_few_tensors_is_named() -> None:
    code = ModuleGraph(chain(1), {"op0": OpCode(call=lambda x, w: None, parameters={"w": "w0"})})
    one = torch.ones(1)
    with pytest.raises(InvalidInputError, match=r"'op0'.*0 tensors;.*1"):
        code.run_op(0, {"x": one}, {"w0": one}, Call())
