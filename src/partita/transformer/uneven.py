"""Pipelines over equal devices whose stages differ: in layers, and in what they compute again.

Regular layouts give every stage as many layers and the same recomputation. The ends also have the
embedding and the head, layers need not divide, and only the first stages, which keep most
microbatches in flight, may lack the memory for all activations. For each of the best layouts the
slowest stage is made as quick as can be: the least threshold for which stages that stay below it,
each with the lightest recomputation that fits, hold all layers (exact for the slowest stage; what
is left over is taken from the slowest ones). ``refined`` then moves single layers and changes the
recomputation of stages while that makes a played step shorter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.transformer.layout import FRAMEWORKS, Layout
from partita.transformer.memory import in_flight
from partita.transformer.mixed import (
    Candidate,
    Figures,
    chunk_layers,
    figures_of,
    fits_place,
    fits_places,
)
from partita.transformer.pipelines import (
    Pipeline,
    as_number,
    place_passes,
    played_s,
    regular_pipeline,
)
from partita.transformer.search import Priced, Task, recompute_sets

NEAR = 1.15
"""How far above the best step a layout may be, with least recomputation, to be made uneven."""
MOST_TRIED = 60
"""Layouts that are made uneven, the quickest with least recomputation first."""
KEPT = 8
"""Uneven pipelines that are returned."""
MOST_MOVES = 40
"""Moves that are played where types of devices differ."""
MOST_MOVES_ALIKE = 10
"""The same on equal devices, where the slowest stage is balanced already."""


def uneven_candidates(priced: Priced, cluster: Cluster, devices: Array) -> list[Candidate]:
    """Return pipelines with uneven stages that fit, the quickest first.

    Args:
        priced: Regular layouts with their prices.
        cluster: The cluster.
        devices: Its devices that they are for.
    """
    task = priced.task
    if not FRAMEWORKS[task.framework].stages_differ:
        return []
    sets = recompute_sets(task)
    found: list[Candidate] = []
    layouts = list(_lightest(priced))
    if not layouts:
        return []
    rows = [replace(layout, recompute=again) for layout in layouts for again in sets]
    figures = figures_of(task, rows, task.machine)
    for number, layout in enumerate(layouts):
        here = slice(number * len(sets), (number + 1) * len(sets))
        of = Figures(*(column[here] for column in figures))
        stages = _stages(task, layout, of)
        if stages is None:
            continue
        held, chosen, step_s = stages
        lane = regular_pipeline(task, layout, cluster, devices)
        again = [replace(layout, recompute=sets[row]) for row in chosen.tolist()]
        layers = chunk_layers(held, layout.vp)
        places = tuple(replace(p, layout=own) for p, own in zip(lane.places, again, strict=True))
        found.append(Candidate(lanes=(replace(lane, places=places, layers=layers),), step_s=step_s))
    found.sort(key=lambda candidate: candidate.step_s)
    fitting = (candidate for candidate in found if fits_places(candidate.lanes[0]))
    return [candidate for candidate, _ in zip(fitting, range(KEPT), strict=False)]


def _lightest(priced: Priced) -> Iterator[Layout]:
    """Yield layouts with stages that may be quick enough, as with least recomputation."""
    step_s, fits = priced.step_s, priced.fits
    best = step_s[fits].min() if fits.any() else np.inf
    seen: set[Layout] = set()
    for row in np.argsort(step_s, kind="stable").tolist():
        layout = priced.layouts[row]
        bare = replace(layout, recompute=())
        if step_s[row] > NEAR * best or len(seen) == MOST_TRIED:
            return
        if layout.pp > 1 and bare not in seen:
            seen.add(bare)
            yield layout


def _stages(task: Task, layout: Layout, of: Figures) -> tuple[Array, Array, float] | None:
    """Return layers and recomputation of each stage, and about a step's seconds; None = no room.

    Args:
        task: What is trained.
        layout: Degrees.
        of: Figures of the layout, a row for each set of recomputation.
    """
    depth, vp, layers = layout.pp, layout.vp, task.shape.layers
    turns = task.batch // (layout.dp * layout.microbatch)
    place = np.arange(depth)
    flight = np.asarray(in_flight(depth, vp, turns, place))
    # By set and stage.
    column = Figures(*(part[:, None] for part in of))
    limit = np.asarray(task.limit_bytes)
    most = np.minimum(column.most_layers(limit, flight, place == 0, place == depth - 1), layers)
    extra = of.embedding_s[0] * (place == 0) + of.head_s[0] * (place == depth - 1)
    # load[stage, n]: seconds of a stage with n layers, with the set that fits and takes least.
    count = np.arange(layers + 1)
    seconds = of.block_s[:, None, None] * count + extra[:, None]
    seconds = np.where(count <= most[:, :, None], seconds, np.inf)
    load, chosen = seconds.min(axis=0), seconds.argmin(axis=0)
    if not np.isfinite(load[:, vp]).all():
        return None
    # More layers never take less time, so that what stays below a threshold is a prefix.
    steps = np.unique(load[np.isfinite(load)])
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if _most_below(load, steps[middle], vp).sum() >= layers:
            high = middle
        else:
            low = middle + 1
    if low == len(steps):
        return None
    held = _most_below(load, steps[low], vp)
    for _ in range(int(held.sum()) - layers):
        now = np.where(held > vp, load[place, held], -np.inf)
        held[int(np.argmax(now))] -= 1
    if int(held.sum()) != layers:
        return None
    final, sets = load[place, held], chosen[place, held]
    total = turns * final.max() + (final.sum() - final.max()) / vp
    total += 2 * of.send_s.max() * (turns + depth) * (1 if vp == 1 else 0.1) + of.after_s.max()
    return held, sets, float(total)


def _most_below(load: Array, threshold: float, least: int) -> Array:
    """Return the layers of each stage whose seconds stay below a threshold; 0 = too few do."""
    most: Array = (load <= threshold).sum(axis=1) - 1
    return np.where(most >= least, most, 0)


def refined(step_s: float, lanes: tuple[Pipeline, ...]) -> tuple[float, tuple[Pipeline, ...]]:
    """Return lanes, and their played seconds, changed while that makes a step shorter.

    A stage passes a layer to another one as long as it fits, or computes less again.
    """
    lane = lanes[0]
    if len(lanes) > 1 or len(lane.places) == 1:
        return step_s, lanes
    if not FRAMEWORKS[lane.layout.framework].stages_differ:
        return step_s, lanes
    left, better = MOST_MOVES_ALIKE if lane.joined is None else MOST_MOVES, True
    while better and left:
        better = False
        for moved in _neighbours(lane):
            if not left:
                break
            left -= 1
            found = played_s([moved])
            if found < step_s * (1 - 1e-6):
                step_s, lane, better = found, moved, True
                break
    return step_s, (lane,)


def _neighbours(lane: Pipeline) -> Iterator[Pipeline]:
    """Yield pipelines with one change that fit: a layer moved, or a stage that keeps more."""
    depth = len(lane.places)
    known: dict[tuple[Layout, str], float] = {}
    for place in lane.places:
        if (place.layout, place.kind) not in known:
            known[place.layout, place.kind] = as_number(place_passes(lane.task, place).block_s)
    each = [known[place.layout, place.kind] for place in lane.places]
    load = [each[number] * sum(lane.layers[number::depth]) for number in range(depth)]
    # One chunk per type and end stands for those like it; the most loaded ones give first.
    kinds = {
        (
            lane.places[chunk % depth].layout,
            lane.places[chunk % depth].device_type,
            chunk % depth in (0, depth - 1),
            layers,
        ): chunk
        for chunk, layers in enumerate(lane.layers)
    }
    chunks = sorted(kinds.values(), key=lambda chunk: -load[chunk % depth])
    for chunk in chunks:
        for again in _less(lane, chunk % depth):
            places = list(lane.places)
            place = places[chunk % depth]
            places[chunk % depth] = replace(place, layout=replace(place.layout, recompute=again))
            kept = replace(lane, places=tuple(places))
            if fits_place(kept, chunk % depth):
                yield kept
    for giver, taker in product(chunks, reversed(chunks)):
        layers = list(lane.layers)
        layers[giver] -= 1
        layers[taker] += 1
        moved = replace(lane, layers=tuple(layers))
        if giver != taker and layers[giver] and fits_place(moved, taker % depth):
            yield moved


def _less(lane: Pipeline, number: int) -> Sequence[tuple[str, ...]]:
    """Return sets that compute less again than that of a place, the least first."""
    own = lane.places[number].layout.recompute
    sets = recompute_sets(lane.task)
    return sets[: sets.index(own)] if own in sets else ()
