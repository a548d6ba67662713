"""Periods that no pipeline of a problem can beat under the repaired objective.

With T the period, N devices, g the factor of the all-reduce and B the fastest link, every plan has:

* work: each op runs somewhere, so ``sum over ops min over classes (u t) <= T sum over devices u``
  for any weights u of the classes of devices; weights by speed are used;
* indivisible: the stage of an op with seconds c and trained bytes P has r replicas, and takes at
  least ``(c + g (r - 1)/r P/B) / r`` for some r up to N;
* sync or cut: two ops joined by a tensor of b bytes with ``2 b > T K`` share a stage, K the bytes
  per second that all links of a cut carry together (flat: ``B floor(N/2)``, as one of two stages
  has at most half of the devices). Ops so joined have work c and bytes P together. Where c > T they
  are in a stage of r >= 2 replicas, the least that ``indivisible`` permits, whose devices lose
  ``g (r - 1)/r P/B`` each round: the work to be done grows by it, whatever else is in the stage.
  The least T that does not contradict itself is found by bisection; T' > T is never contradicted
  where T is not, as joints and replicas only become fewer.

The all-reduce of r replicas, at most m in each of q servers, takes at least ``g (r - 1)/r P/B``:
``(m - 1)/m + (q - 1)/q >= 1 - 1/(m q)``.

Where all ideals can be looked at, ``relaxed_cluster`` gives a better bound for equal devices in
several servers: a flat cluster on which every pipeline takes no longer, solved exactly by ``flat``.

* r replicas reduce in ``g min ((m - 1)/m P/B1 + (q - 1)/q P/B2)`` over q servers, ``m = ceil(r/q)``
  up to the size of a server.
* A cut of b bytes between stages of r and r' replicas, with shares a_x, b_x of server x, loads a
  link by at least ``2 b a_x b_x / (n_x B1)``, n_x the fewer of their devices in x, and a port
  by ``2 b (a_x + b_x - 2 a_x b_x) / B2``. Summed over the servers, ``2 = sum a + sum b`` is at most
  ``T/(2 b) (Q B2 + 2 B1 min(r, r'))`` with Q servers: ``min(r, r') >= (2 b/T - Q B2/2) / B1``.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.planners.pipedream.flat import FlatCluster
from partita.planners.pipedream.model import Model
from partita.planners.pipedream.site import Site

FACTOR = 4.0
STEPS = 24


class _Sizes(NamedTuple):
    """What the bounds ask: seconds on the fastest class, seconds of a reduction, devices."""

    seconds: Array
    reduce_s: Array
    num_devices: int


def bound_of(
    model: Model, site: Site, *, factor: float = FACTOR, charge: float = 1.0
) -> tuple[float, str]:
    """Return the best bound for a model on a site, and its name.

    Args:
        model: The model.
        site: The site.
        factor: Factor of the all-reduce.
        charge: What a byte of a cut counts.
    """
    rate = max(float(site.rate.max()), site.outer_rate if site.num_servers > 1 else 0.0)
    # Two uses of one parameter in a stage are reduced once.
    trained = model.trained_bytes if not model.shares_parameters else np.zeros(model.q.num_nodes)
    classes = np.unique(model.class_of[site.devices])
    seconds = model.seconds[classes].min(axis=0)
    sizes = _Sizes(seconds, factor * trained / rate, len(site.devices))
    counts = np.bincount(np.searchsorted(classes, model.class_of[site.devices]))
    work = _work(model.seconds[classes], counts)
    indivisible = float(_least_period(sizes, sizes.seconds, sizes.reduce_s).max())
    best = max(work, indivisible)
    refined = best if charge == 0 else _sync_or_cut(model, sizes, _capacity(site) / charge, best)
    if refined > best * (1 + 1e-9):
        return refined, "sync or cut"
    return (work, "work") if work >= indivisible else (indivisible, "indivisible op")


def relaxed_cluster(model: Model, site: Site, factor: float) -> FlatCluster:
    """Return a flat cluster on which no pipeline of equal devices in servers takes longer.

    What the model may count too often, reductions or memory, is left out.
    """
    count, size = len(site.devices), int(np.bincount(site.server).max())
    rate, servers = float(site.rate.max()), site.num_servers
    sync = np.zeros(count + 1)
    for replicas in range(2, 1 if model.shares_parameters else count + 1):
        spread = np.arange(-(-replicas // size), min(servers, replicas) + 1)
        most = -(-replicas // spread)
        seconds = (most - 1) / most / rate + (spread - 1) / spread / site.outer_rate
        sync[replicas] = factor * float(seconds.min())
    return FlatCluster(
        rate=rate,
        sync=sync,
        memory_bytes=np.inf if model.overcounts else float(site.memory_bytes.max()),
        straight=False,
        allowed=np.arange(count + 2),
        spare_rate=servers * site.outer_rate / 2 if servers > 1 else 0.0,
    )


def _work(seconds: Array, counts: Array) -> float:
    total = seconds.sum(axis=1)
    weight = 1 / np.maximum(total, 1e-300)
    weight /= weight.max()
    return float((weight[:, None] * seconds).min(axis=0).sum() / (counts * weight).sum())


def _least_period(sizes: _Sizes, seconds: Array, reduce_s: Array) -> Array:
    """Return the least time of a stage with some work and reduction, over all replicas."""
    most = sizes.num_devices
    # The time falls from two replicas on, so that one and the most are all that matter.
    count = np.array([1, most])
    times = (seconds[:, None] + reduce_s[:, None] * (count - 1) / count) / count
    return np.asarray(times.min(axis=1))


def _capacity(site: Site) -> float:
    """Return the bytes per second that a cut can carry at most, over all its links."""
    if site.num_servers == 1:
        return float(site.rate[0]) * max(len(site.devices) // 2, 1)
    inside = float((np.bincount(site.server) * site.rate).sum())
    return inside + site.num_servers * site.outer_rate


def _sync_or_cut(model: Model, sizes: _Sizes, capacity: float, low: float) -> float:
    """Return the least period that the argument does not contradict, down to ``low``."""
    order = np.argsort(-model.net_bytes, kind="stable")
    size = model.net_bytes[order]
    high = float(sizes.seconds.sum() + sizes.reduce_s.sum())
    if not _contradicted(model, sizes, order[: _bound_nets(size, low, capacity)], low):
        return low
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        joined = order[: _bound_nets(size, middle, capacity)]
        if _contradicted(model, sizes, joined, middle):
            low = middle
        else:
            high = middle
    return low


def _bound_nets(falling: Array, period: float, capacity: float) -> int:
    return int(np.searchsorted(-falling, -period * capacity / 2, side="left"))


def _contradicted(model: Model, sizes: _Sizes, nets: Array, period: float) -> bool:
    """Return whether no pipeline of this period exists, as joined ops need too much."""
    label = _joined(model, nets)
    work = np.bincount(label, sizes.seconds)
    reduce_s = np.bincount(label, sizes.reduce_s)
    if bool((_least_period(sizes, work, reduce_s) > period * (1 + 1e-9)).any()):
        return True
    split = np.flatnonzero(work > period * (1 + 1e-9))
    if not len(split):
        return False
    both = work[split] + reduce_s[split]
    root = np.sqrt(np.maximum(both**2 - 4 * period * reduce_s[split], 0.0))
    least = np.maximum(2, np.ceil((both + root) / (2 * period) * (1 - 1e-9)))
    extra = float((reduce_s[split] * (1 - 1 / least)).sum())
    return float(work.sum()) + extra > sizes.num_devices * period * (1 + 1e-9)


def _joined(model: Model, nets: Array) -> Array:
    """Return labels of the nodes, the same for those that the nets join."""
    root = list(range(model.q.num_nodes))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    pointers, pins = model.q.nets.ptr, model.q.nets.pins
    for net in nets.tolist():
        first, *others = (find(pin) for pin in pins[pointers[net] : pointers[net + 1]].tolist())
        for other in others:
            root[find(other)] = find(first)
    return np.unique([find(node) for node in range(len(root))], return_inverse=True)[1]
