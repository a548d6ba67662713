"""The proof of a Program: complete, free of deadlock (``program/check``), and within memory."""

from dataclasses import dataclass

from partita.core.columns import Columns, Floats
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Program
from partita.cost.judge import check_peaks
from partita.program.check import prove
from partita.program.lower import lower


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckReport(Columns):
    """Proof of a Program: complete, free of deadlock, within memory.

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
    program = lower(problem, plan) if program is None else program
    proved = prove(problem, plan, program)
    peak, limit = check_peaks(problem, plan, program)
    return CheckReport(devices=plan.devices, **proved._asdict(), peak_bytes=peak, limit_bytes=limit)
