"""Plans that are changed on the page: simulated at once, in this process, and kept when saved."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from partita.core.codec import read_json, write_json
from partita.core.columns import number_or_none
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.flows.edits import EditedPlan, edit_plan, stage_rows
from partita.report.figures import Figure, Track, memory_figure, timeline_figure
from partita.service.ui.held import DocumentStore, Held

MOST_PASSES = 2_000_000
"""Stages times microbatches of a plan that is simulated while somebody waits."""
_KEPT = 4


class Editor:
    """Answers edits of plans that the page has.

    Args:
        store: Where the plans are.
    """

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._read: OrderedDict[str, Solution] = OrderedDict()
        self._before: dict[str, float] = {}
        self._turn = threading.Lock()

    def answer(self, key: str, edits: Sequence[str]) -> dict[str, Any]:
        """Return a plan with edits: its figures, its stages, and how it compares.

        Raises:
            InvalidInputError: An edit is not possible; says why.
        """
        began = time.perf_counter()
        with self._turn:
            base = self._solution(key)
            found = self._edited(base, edits)
            before = self._step_s(key, base)
        # A step of more microbatches does more: what then compares is the time of a sample.
        work = found.plan.samples / base.plan.samples
        has_bound = base.lower_bound > 0 and base.unit == "s" and work == 1
        return {
            "title": found.title,
            "refusal": found.refusal,
            "step_s": found.step_s,
            "change": found.step_s / work / before - 1 if before else 0.0,
            "per": "" if work == 1 else "per sample, ",
            "busy": float(found.timeline.utilisation.mean()),
            "gap": found.step_s / base.lower_bound - 1 if has_bound else None,
            "instructions": len(found.timeline),
            "stages": stage_rows(found),
            "ops": len(found.plan.stage_of),
            "schedule": found.plan.schedule.value,
            "microbatches": found.plan.num_microbatches,
            "devices": _devices(found),
            "figures": edited_figures(found),
            "server_s": time.perf_counter() - began,
        }

    def _step_s(self, key: str, base: Solution) -> float:
        """Return the seconds of a step of a plan as it was, simulated once."""
        if key not in self._before:
            self._before = {
                known: value for known, value in self._before.items() if known in self._read
            }
            self._before[key] = edit_plan(base, ()).step_s
        return self._before[key]

    def save(self, key: str, edits: Sequence[str]) -> Held:
        """Keep a plan with edits as a document, and return it.

        Raises:
            InvalidInputError: An edit is not possible, or the plan breaks a limit.
        """
        with self._turn:
            base = self._solution(key)
            solution = self._edited(base, edits).solution(base)
        name = f"{base.problem.graph.name}.edited.plan.json"
        about = f"edited: {len(solution.plan.stages)} stages, {solution.value:.5g} {solution.unit}"
        return self._store.add(name, "solution", about, write_json(solution))

    def _edited(self, base: Solution, edits: Sequence[str]) -> EditedPlan:
        asked = [edit.partition("=")[2] for edit in edits if edit.startswith("microbatches=")]
        last = asked[-1] if asked and asked[-1].isdecimal() else str(base.plan.num_microbatches)
        passes = len(base.plan.stages) * int(last[:12])
        if passes > MOST_PASSES:
            raise InvalidInputError(
                f"{passes:,} passes of microbatches through stages are too many to simulate while "
                "you wait; 'partita simulate' takes them"
            )
        return edit_plan(base, edits)

    def _solution(self, key: str) -> Solution:
        if key not in self._read:
            held = self._store.get(key)
            if held.kind != "solution":
                raise InvalidInputError(f"{held.title[:80]!r} holds a {held.kind}; expected a plan")
            self._read[key] = read_json(held.text)
            if len(self._read) > _KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(key)
        return self._read[key]


def edited_figures(found: EditedPlan) -> list[Figure]:
    """Return the timeline and the memory of an edited plan."""
    cluster = found.problem.cluster
    track = Track(name="edited", timeline=found.timeline)
    figures = [timeline_figure([track], cluster=cluster, title="Simulated step")]
    if len(found.timeline.memory_device):
        figures.append(memory_figure(found.timeline, cluster=cluster))
    return figures


def _devices(found: EditedPlan) -> list[dict[str, Any]]:
    used = set(found.plan.devices)
    return [
        {
            "name": device.name,
            "type": device.type,
            "used": device.name in used,
            "memory_bytes": number_or_none(device.memory_bytes),
        }
        for device in found.problem.cluster.devices
    ]
