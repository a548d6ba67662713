"""Proves a Program: complete, free of deadlock, and within memory.

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
4. The members of a group list the same instructions (``joints``), and the lists come to their end
   with buffered and with rendezvous sends (``deadlock``).
5. No device needs more memory than it may use (``room``).

All of it is linear in the instructions but for sorts of messages.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Columns, Floats
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.cost.check.case import Case
from partita.cost.check.deadlock import check_deadlock
from partita.cost.check.fields import check_fields, num_collectives
from partita.cost.check.grid import check_grid
from partita.cost.check.joints import check_joints
from partita.cost.check.messages import check_messages
from partita.cost.check.parameters import check_parameters
from partita.cost.check.room import check_memory
from partita.cost.lower import lower


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckReport(Columns):
    """What was proved: complete, free of deadlock, within memory.

    Attributes:
        devices: Names of the devices.
        num_instructions: Instructions of all devices.
        num_messages: Pairs of a SEND and its RECV.
        num_collectives: Collectives, each counted once for all its members.
        sent_bytes: Bytes of all messages.
        peak_bytes: Largest use of memory by device.
        limit_bytes: What each device may use.
    """

    devices: tuple[str, ...]
    num_instructions: int
    num_messages: int
    num_collectives: int
    sent_bytes: int
    peak_bytes: Floats
    limit_bytes: Floats

    @property
    def headroom_bytes(self) -> Floats:
        """Memory that each device has left at its peak."""
        return self.limit_bytes - self.peak_bytes


def check(problem: Problem, plan: Plan, program: Program | None = None) -> CheckReport:
    """Prove that a Program carries out a plan, and return what was found on the way.

    Args:
        problem: The problem.
        plan: A plan for it.
        program: The Program; ``None`` = what the plan lowers to.

    Raises:
        InvalidInputError: It does not; names the instruction at fault, its device, and why.
        InfeasibleError: A device has too little memory; which, by how much, and what would do.
    """
    plan.check_fits(problem)
    case = Case(problem, plan, lower(problem, plan) if program is None else program)
    check_fields(case)
    grid = check_grid(case)
    partner = check_messages(case, grid)
    check_parameters(case, grid)
    joints = check_joints(case)
    check_deadlock(case, partner, joints)
    peak, limit = check_memory(case)
    sends = np.flatnonzero(case.program.kind == Kind.SEND)
    return CheckReport(
        devices=plan.devices,
        num_instructions=len(case.program),
        num_messages=len(sends),
        num_collectives=num_collectives(case),
        sent_bytes=int(case.program.bytes[sends].sum()),
        peak_bytes=peak,
        limit_bytes=limit,
    )
