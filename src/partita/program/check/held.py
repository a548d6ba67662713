"""Buckets of parameters: the devices that hold, reduce and step each.

A trainable parameter is in one bucket. All devices of all stages that use it hold a part of it;
those that hold the same part, a team, reduce it together, and those that divide its state gather it
together. A device steps it once, in the UPDATE of the lowest stage there that uses it.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Shard
from partita.core.precision import wire_bytes
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.program.check.case import Case, look_up
from partita.program.layout import divisions, owners

GRADIENT_SHARDS = (Shard.GRADIENTS, Shard.PARAMETERS)


class Owned(NamedTuple):
    """Pairs of a bucket and a stage that uses its parameters, sorted.

    Attributes:
        bucket: The bucket.
        stage: The stage.
        experts: Whether its parameters are divided as those of experts.
    """

    bucket: Array
    stage: Array
    experts: Array


class Buckets(NamedTuple):
    """Rules of each bucket: how and when it is reduced and stepped.

    Attributes:
        kind: The collective that reduces it; -1 = no other device holds it.
        span: Microbatches between two reductions.
        cycle: Microbatches between two updates.
        shard: Index into ``Shard`` of what is divided; 0 where nothing is shared.
        bytes: Bytes of a part in a reduction.
        gathered: Bytes of a part in a gather.
    """

    kind: Array
    span: Array
    cycle: Array
    shard: Array
    bytes: Array
    gathered: Array


class Held(NamedTuple):
    """A row for each bucket and device that holds it, sorted by both.

    Attributes:
        key: ``bucket * devices + device``.
        bucket: The bucket.
        device: The device.
        stage: The stage whose UPDATE steps it there.
        team: A number shared by the devices that reduce it together.
        sharding: A number shared by the devices that divide its state, and gather it together.
    """

    key: Array
    bucket: Array
    device: Array
    stage: Array
    team: Array
    sharding: Array

    def find(self, bucket: Array, device: Array, num_devices: int) -> Array:
        """Return the row of each (bucket, device); -1 where the device does not hold it."""
        wanted = bucket.astype(np.int64) * num_devices + device
        return look_up(self.key, np.arange(len(self.key)), wanted)


def check_buckets(case: Case) -> Owned:
    """Check that the buckets divide the trainable parameters, and return their owners.

    Raises:
        InvalidInputError: A parameter in no bucket, in two or in one where it does not belong.
    """
    program, table = case.program, case.problem.graph.parameters
    parameter, stage = owners(case.problem.graph, case.plan)
    used = table.trainable[parameter]
    if not case.trains:
        used &= _gathers(case, parameter, stage)
    parameter, stage = parameter[used], stage[used]
    listed, count = program.bucket_parameters, len(table)
    if len(listed) and int(listed.max()) >= count:
        raise InvalidInputError(f"a bucket holds parameter {listed.max()}; there are {count}")
    times = np.bincount(listed, minlength=count)
    needed = np.zeros(count, dtype=np.int64)
    needed[parameter] = 1
    if not np.array_equal(times, needed):
        wrong = int(np.argmax(times != needed))
        raise InvalidInputError(
            f"parameter {table.names[wrong]!r} is in {times[wrong]} buckets; expected "
            f"{needed[wrong]}: one if it is trained, or gathered in inference, else none"
        )
    bucket_of = np.zeros(count, dtype=np.int64)
    bucket_of[listed] = np.repeat(
        np.arange(len(program.bucket_ptr) - 1), np.diff(program.bucket_ptr)
    )
    pairs, first = np.unique(bucket_of[parameter] * case.num_stages + stage, return_index=True)
    apart = np.array([part.ep > 1 for part in case.plan.stages])[stage] & table.expert[parameter]
    apart &= np.bincount(parameter, minlength=count)[parameter] == 1
    owned = Owned(pairs // case.num_stages, pairs % case.num_stages, apart[first])
    _check_same_owners(case, owned, parameter, bucket_of)
    _check_experts(case, parameter, bucket_of[parameter], apart)
    _check_ties(case, owned)
    return owned


def _gathers(case: Case, parameter: Array, stage: Array) -> Array:
    """Return for pairs of parameter and stage whether the stage alone holds it, in parts."""
    parts = np.array(
        [part.shard is Shard.PARAMETERS and len(part) > part.parts() for part in case.plan.stages]
    )
    alone: Array = np.bincount(parameter, minlength=int(parameter.max(initial=0)) + 1) == 1
    result: Array = parts[stage] & alone[parameter]
    return result


def _check_same_owners(case: Case, owned: Owned, parameter: Array, bucket_of: Array) -> None:
    names = case.problem.graph.parameters.names
    own = np.bincount(parameter, minlength=len(names))[parameter]
    together = np.bincount(owned.bucket, minlength=len(case.program.bucket_ptr))
    wrong = own != together[bucket_of[parameter]]
    if wrong.any():
        at = int(parameter[np.argmax(wrong)])
        raise InvalidInputError(
            f"bucket {bucket_of[at]} holds parameter {names[at]!r} together with parameters of "
            "other stages; those are reduced together that the same stages use"
        )


def _check_experts(case: Case, parameter: Array, bucket: Array, apart: Array) -> None:
    """Check that no bucket holds both kinds of parameters of a stage that divides them apart."""
    some, rest = np.unique(bucket[apart]), np.unique(bucket[~apart])
    mixed = np.intersect1d(some, rest)
    if len(mixed):
        name = case.problem.graph.parameters.names[int(parameter[(bucket == mixed[0]) & apart][0])]
        raise InvalidInputError(
            f"bucket {mixed[0]} holds parameter {name!r} of experts together with others; a stage "
            "with expert parallelism divides and reduces them apart"
        )


def _check_ties(case: Case, owned: Owned) -> None:
    tied = np.bincount(owned.bucket)[owned.bucket] > 1
    if tied.any() and case.plan.stashes_weights:
        bucket = int(owned.bucket[np.argmax(tied)])
        raise InvalidInputError(
            f"bucket {bucket} is tied over several stages; schedule "
            f"{case.plan.schedule.value!r} keeps versions of each stage alone"
        )
    degree = np.array([stage.tp for stage in case.plan.stages])[owned.stage]
    wrong = (owned.bucket[1:] == owned.bucket[:-1]) & (degree[1:] != degree[:-1])
    if wrong.any():
        bucket = int(owned.bucket[np.argmax(wrong)])
        raise InvalidInputError(
            f"bucket {bucket} is tied over stages of different tensor-parallel degree; they must "
            "be equal"
        )


def held_buckets(case: Case, owned: Owned) -> Held:
    """Return who holds, reduces and steps each bucket."""
    homes = case.homes
    counts = np.diff(homes.ptr)[owned.stage]
    first = np.repeat(homes.ptr[owned.stage], counts)
    home = first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    bucket, stage = np.repeat(owned.bucket, counts), homes.stage[home]
    experts = np.repeat(owned.experts, counts)
    order = np.lexsort((stage, homes.device[home], bucket))
    key = (bucket * case.num_devices + homes.device[home])[order]
    lowest = order[np.flatnonzero(np.r_[True, np.diff(key) != 0])] if len(key) else order
    bucket, home, experts = bucket[lowest], home[lowest], experts[lowest]
    device, stage = homes.device[home], homes.stage[home]
    division = divisions(case.plan)
    column = experts.astype(np.int64)
    team = bucket * case.num_devices + homes.place[home] % division.parts[stage, column]
    sharding = _sharding(team, division.group[stage, column])
    return Held(bucket * case.num_devices + device, bucket, device, stage, team, sharding)


def _sharding(team: Array, size: Array) -> Array:
    """Return a number for each group of ``size`` devices of a team, in the order of devices."""
    _, number, sizes = np.unique(team, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    place = np.empty(len(team), dtype=np.int64)
    place[order] = np.arange(len(team)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # A team has fewer groups than devices, of which all teams together have len(team).
    result: Array = number * (len(team) + 1) + place // size
    return result


def bucket_rules(case: Case, owned: Owned, held: Held) -> Buckets:
    """Return what must happen to each bucket."""
    program, plan = case.program, case.plan
    count = len(program.bucket_ptr) - 1
    first, experts = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    first[owned.bucket[::-1]] = owned.stage[::-1]
    experts[owned.bucket] = owned.experts
    tied = np.bincount(owned.bucket, minlength=count) > 1
    shared = np.zeros(count, dtype=bool)
    _, team, sizes = np.unique(held.team, return_inverse=True, return_counts=True)
    shared[held.bucket] = sizes[team] > 1
    rank = np.array([list(Shard).index(stage.shard) for stage in plan.stages], dtype=np.int64)
    shard = np.where(tied | ~shared, 0, rank[first])
    whole = np.full(count, case.num_microbatches)
    cycle = case.layout.round[first].astype(np.int64) if plan.stashes_weights else whole
    by_turn = np.isin(shard, [list(Shard).index(part) for part in GRADIENT_SHARDS])
    reduces, gathers = np.zeros(count), np.zeros(count)
    bucket = np.repeat(np.arange(count), np.diff(program.bucket_ptr))
    wire = wire_bytes(case.problem.graph.parameters, case.problem.objective.precision)
    np.add.at(reduces, bucket, wire.reduced[program.bucket_parameters])
    np.add.at(gathers, bucket, wire.gathered[program.bucket_parameters])
    parts = divisions(plan).parts[first, experts]
    reduced = np.where(shard == 0, int(Kind.ALL_REDUCE), int(Kind.REDUCE_SCATTER))
    return Buckets(
        np.where(shared, reduced, -1),
        np.where(by_turn, case.layout.replicas[first], cycle),
        cycle,
        shard,
        reduces / parts,
        gathers / parts,
    )
