"""Finds where a loss or gradient that is no number comes from: rank, stage and first op.

All ranks agree on the norm of the gradients before any weight changes, and leave the update out
when it is no number. The step can then be played once more with the same weights, data and random
numbers, and every stage looked at: the one that makes NaN or Inf of numbers is run op by op. That
costs nothing as long as all is well.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its stubs

from partita.ranks.failures import BadDataError, NotFiniteError, PeerError
from partita.ranks.member import Member
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.device_parts import Runner
from partita.runtime.parameters import ParameterStore
from partita.runtime.process_transport import used_devices
from partita.runtime.stage_pass import StagePass, StageRunner, Visit
from partita.runtime.task import Task
from partita.runtime.training.recipe import NanPolicy


def is_finite(values: Iterable[Tensor]) -> bool:
    """Return whether all tensors hold numbers alone."""
    return all(
        bool(value.isfinite().all()) for value in values if value.is_floating_point()
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """Where something that is no number was made of numbers; the least is the first.

    Attributes:
        backward: Whether it was in a backward.
        place: How far from the beginning of the pass: the stage, counted along the data.
        microbatch: The microbatch.
        rank: The rank.
        stage: The stage.
        what: The op, or the parameter whose gradient it is; empty = not known.
    """

    backward: bool
    place: int
    microbatch: int
    rank: int
    stage: int
    what: str

    def describe(self) -> str:
        """Return it for people."""
        half = "backward" if self.backward else "forward"
        what = f", {self.what}" if self.what else ""
        return f"rank {self.rank}, {half} of stage {self.stage}, microbatch {self.microbatch}{what}"


class CheckedRunner:
    """Runs stages as another runner does, and looks at what they make; a ``Runner``."""

    def __init__(self, runner: Runner, task: Task, rank: int) -> None:
        self._runner, self._task, self._rank = runner, task, rank
        self.findings: list[Finding] = []

    def forward(self, step: int, visit: Visit, inputs: dict[int, Tensor]) -> StagePass:
        """Run a stage on its inputs."""
        given = dict(inputs)
        table = self._task.graph.tensors
        bad = [t for t, value in given.items() if table.producer[t] < 0 and not is_finite([value])]
        if bad:
            self._find(visit, f"in the input {table.names[bad[0]]!r}", backward=False)
        done = self._runner.forward(step, visit, inputs)
        if is_finite(given.values()) and not is_finite(done.outputs.values()):
            op = ""
            if isinstance(self._runner, StageRunner):
                op = self._runner.first_not_finite(step, visit, given)
            self._find(visit, f"first by op {op!r}" if op else "", backward=False)
        return done

    def recompute(self, step: int, visit: Visit, done: StagePass) -> None:
        """Run a stage again if its outputs have no graph yet."""
        self._runner.recompute(step, visit, done)

    def begin_backward(self, visit: Visit, done: StagePass, cotangents: dict[int, Tensor]) -> None:
        """Give a pass the gradients of its outputs."""
        self._runner.begin_backward(visit, done, cotangents)

    def gradients(
        self, visit: Visit, done: StagePass
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return the gradients of inputs and parameters."""
        sound = self._is_sound(done)
        # Those of this microbatch alone, which a sum would hide.
        runner = self._runner
        find = runner.separate_gradients if isinstance(runner, StageRunner) else runner.gradients
        of_inputs, of_weights = find(visit, done)
        self._look(visit, of_inputs, of_weights, sound=sound)
        return of_inputs, of_weights

    def input_gradients(self, visit: Visit, done: StagePass) -> dict[int, Tensor]:
        """Return the gradients of the inputs alone."""
        sound = self._is_sound(done)
        found = self._runner.input_gradients(visit, done)
        self._look(visit, found, {}, sound=sound)
        return found

    def weight_gradients(self, visit: Visit, done: StagePass) -> dict[str, Tensor]:
        """Return the gradients of the parameters, after those of the inputs."""
        sound = self._is_sound(done)
        found = self._runner.weight_gradients(visit, done)
        self._look(visit, {}, found, sound=sound)
        return found

    def _is_sound(self, done: StagePass) -> bool:
        return is_finite((done.cotangents or {}).values()) and is_finite(done.outputs.values())

    def _look(
        self,
        visit: Visit,
        of_inputs: Mapping[int, Tensor],
        of_weights: Mapping[str, Tensor],
        *,
        sound: bool,
    ) -> None:
        if not sound or is_finite([*of_inputs.values(), *of_weights.values()]):
            return
        bad = [name for name, value in of_weights.items() if not is_finite([value])]
        what = ""
        if bad:
            op, name = max((_last_op(self._task, name), name) for name in bad)
            what = f"first in the gradient of {name!r}, of op {self._task.graph.ops.names[op]!r}"
        self._find(visit, what, backward=True)

    def _find(self, visit: Visit, what: str, *, backward: bool) -> None:
        place = len(self._task.plan.stages) - visit.stage if backward else visit.stage
        self.findings.append(
            Finding(
                backward=backward,
                place=place,
                microbatch=visit.microbatch,
                rank=self._rank,
                stage=visit.stage,
                what=what,
            )
        )


def _last_op(task: Task, parameter: str) -> int:
    """Return the last op that uses a parameter: backward comes by it first."""
    table = task.graph.parameters
    row = table.names.index(parameter)
    return int(table.use_op[table.use_parameter == row].max())


class NumberCheck:
    """Looks after every step whether its gradients were numbers, and explains it if not."""

    def __init__(
        self, policy: NanPolicy, task: Task, store: ParameterStore, member: Member, job: str
    ) -> None:
        self._policy, self._task, self._store = policy, task, store
        self._member, self._job = member, job

    @property
    def is_bad(self) -> bool:
        """Whether the gradients of the last step were no numbers; all ranks know the same.

        Where losses are scaled, those that overflow by their scale are no fault.
        """
        asked = self._policy.acts and self._store.agrees and self._store.loss_scale <= 1
        return asked and not math.isfinite(self._store.gradient_norm)

    def explain(self, loop: DeviceLoop, step: int) -> None:
        """Play a bad step once more under checks; all ranks call it.

        Raises:
            NotFiniteError: On the rank where it began, unless such steps are to be skipped.
            PeerError: On the others.
        """
        checked: list[CheckedRunner] = []

        def wrap(runner: Runner) -> Runner:
            checked.append(CheckedRunner(runner, self._task, self._member.rank))
            return checked[0]

        # The step must leave no trace: its buffers, its turn of the schedule, its record.
        store, rank = self._store, self._member.rank
        stages = self._task.stages_of(used_devices(self._task.program)[rank])
        buffers = {k: v for stage in stages for k, v in store.buffers(stage).items()}
        schedule = store.optimizer.schedule_state()
        put_back = loop.wrap_runner(wrap)
        try:
            for _ in loop.play(step):
                raise AssertionError("a transport over processes waits itself")
        finally:
            put_back()
        loop.records.pop()
        store.set_buffers(buffers)
        store.optimizer.load_schedule_state(schedule)
        found = self._exchanged(step, checked[0].findings)
        first = min(found, default=None)
        where = first.describe() if first is not None else "where could not be found again"
        text = f"loss or gradients of step {step + 1} are no numbers: {where}"
        if self._policy is NanPolicy.SKIP:
            if rank == 0:
                self._member.notify(f"{text}; its update is left out")
            return
        blamed = first.rank if first is not None else 0
        kind = BadDataError if self._policy is NanPolicy.ROLLBACK else NotFiniteError
        raise (kind if rank == blamed else PeerError)(text)

    def _exchanged(self, step: int, findings: list[Finding]) -> list[Finding]:
        """Return the findings of all ranks."""
        member = self._member
        shared = PrefixStore(f"{self._job}/numbers/{step}", member.store)
        mine = [[f.backward, f.place, f.microbatch, f.rank, f.stage, f.what] for f in findings[:1]]
        shared.set(str(member.rank), json.dumps(mine))
        keys = ("backward", "place", "microbatch", "rank", "stage", "what")
        return [
            Finding(**dict(zip(keys, row, strict=True)))
            for rank in range(member.world)
            for row in json.loads(shared.get(str(rank)))
        ]
