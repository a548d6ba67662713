"""Proves a Program: complete and free of deadlock.

What must be there is derived anew from the graph and the plan, not taken from the code that lowers
plans, so that a Program from anywhere can be proved, and a mistake of ``lower`` shows.

1. Every (stage, microbatch) has one FORWARD on each device of its replica and, in training, one
   BACKWARD or one BACKWARD_INPUT with a later BACKWARD_WEIGHT (``grid``).
2. Every input of a FORWARD is loaded, made before on the same device, or received before; every
   differentiable tensor gets one contribution from each stage that reads it. SEND and RECV are one
   to one, of equal bytes, and in one order for each pair of devices (``messages``).
3. Every trainable parameter is in one bucket, reduced when the gradients of all owners are there,
   over all devices that hold it, and stepped once on each; forward and backward use one version of
   the weights (``held``, ``parameters``).
4. The members of a group list the same instructions, and the lists come to their end with buffered
   and with rendezvous sends (``deadlock``).

``cost.proof.check`` adds that no device needs more memory than it may use.

All of it is linear in the instructions but for sorts of messages.
"""

from typing import NamedTuple

import numpy as np

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.program.check.case import Case
from partita.program.check.deadlock import check_deadlock
from partita.program.check.fields import check_fields, num_collectives
from partita.program.check.grid import check_grid
from partita.program.check.messages import check_messages
from partita.program.check.parameters import check_parameters
from partita.program.matching import joints


class Proved(NamedTuple):
    """Figures of a Program that was proved.

    Attributes:
        num_instructions: Instructions of all devices.
        num_messages: Pairs of a SEND and its RECV.
        num_collectives: Collectives, each counted once for all its members.
        sent_bytes: Bytes of all messages.
    """

    num_instructions: int
    num_messages: int
    num_collectives: int
    sent_bytes: int


def prove(problem: Problem, plan: Plan, program: Program) -> Proved:
    """Prove that a Program carries out a plan, whatever its memory.

    Raises:
        InvalidInputError: It does not; names the instruction at fault, its device, and why.
    """
    plan.check_fits(problem)
    case = Case(problem, plan, program)
    check_fields(case)
    grid = check_grid(case)
    partner = check_messages(case, grid)
    check_parameters(case, grid)
    check_deadlock(case, partner, joints(program))
    sends = np.flatnonzero(program.kind == Kind.SEND)
    return Proved(
        num_instructions=len(program),
        num_messages=len(sends),
        num_collectives=num_collectives(case),
        sent_bytes=int(program.bytes[sends].sum()),
    )
