"""From a plan to the Program that runs it.

Compute instructions are ordered on each device by the plan's schedule. Their *level* is the longest
path over device orders and data edges. A device lists everything by (level, compute before messages
before collectives, canonical number), and a message has its producer's level at both ends: one
global linear extension with atomic exchanges, which is free of deadlock with buffered and with
rendezvous sends, overlapped and blocking.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from partita.core.columns import Array, frozen_array
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError
from partita.program.layout import (
    Bucket,
    Crossings,
    Layout,
    Reductions,
    crossings,
    input_readers,
    reductions,
)
from partita.program.listing import Listing
from partita.program.order import ListOrder, longest_levels, ordered
from partita.program.schedules import SLOTS, Order, Pipeline, in_flight

_GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def lower(problem: Problem, plan: Plan, *, order: ListOrder = ListOrder.DEVICE) -> Program:
    """Return the Program of a plan.

    Args:
        problem: The problem.
        plan: A plan for it.
        order: Whose order the devices list their compute in.

    Raises:
        InvalidInputError: The plan does not fit the problem, its schedule cannot run it, or it
            cannot be listed in that order.
    """
    plan.check_fits(problem)
    return _Lowering(problem, plan, order).program()


class _Lowering:
    """The steps of ``lower``, with what they share.

    Nodes of the level graph: one for each (kind, stage, microbatch), then the gathers of sharded
    parameters, then the updates of weight stashing. Tensor-parallel ranks share a node.
    """

    def __init__(self, problem: Problem, plan: Plan, order: ListOrder) -> None:
        self.problem, self.plan = problem, plan
        self.graph = problem.graph
        self.layout = Layout(plan)
        self.crossing: Crossings = crossings(problem.graph, plan)
        # Crossings are sorted by tensor: where no tensor stands twice, no device is sent one twice.
        self.read_once = bool((np.diff(self.crossing.tensor) != 0).all())
        self.in_flight = in_flight(plan, self.layout, self.crossing)
        pipe = Pipeline(plan, self.layout, self.in_flight)
        self.order: Order = ordered(order, _order(problem, pipe), pipe, self.crossing)
        self.kinds = list(self.order)
        self.reductions: Reductions = reductions(problem, plan)
        self.stages, self.microbatches = self.layout.num_stages, self.layout.num_microbatches
        self.size = self.stages * self.microbatches
        self.exists = self._existing()
        self.gathers = self._gather_entries()
        self.updates = self._update_entries()
        self.level = self._levels()
        self.listing = Listing(len(plan.devices))

    def _existing(self) -> Array:
        """Return which compute nodes there are: RECOMPUTE only in stages that recompute."""
        exists = np.ones((len(self.kinds), self.stages), dtype=bool)
        if Kind.RECOMPUTE in self.kinds:
            # Ops of each stage that recompute; one is enough for the stage to have the instruction.
            again = np.bincount(
                self.plan.stage_of, weights=self.plan.recompute, minlength=self.stages
            )
            exists[self.kinds.index(Kind.RECOMPUTE)] = again > 0
        return np.repeat(exists.ravel(), self.microbatches)

    def node(self, kind: Kind, stage: Array, microbatch: Array) -> Array:
        """Return the node of each (stage, microbatch) of a kind."""
        first = self.kinds.index(kind) * self.size
        result: Array = first + stage.astype(np.int64) * self.microbatches + microbatch
        return result

    @property
    def gradient_kind(self) -> Kind | None:
        """The kind that sends gradients; None in inference."""
        return next((kind for kind in self.kinds if kind in _GRADIENT_KINDS), None)

    @property
    def last_kind(self) -> Kind:
        """The kind that completes the gradients of parameters."""
        split = Kind.BACKWARD_WEIGHT in self.kinds
        return Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD

    def _grid(self) -> tuple[Array, Array]:
        stage, turn = np.divmod(np.arange(self.size), self.microbatches)
        return stage, turn

    def _gather_entries(self) -> list[tuple[int, Kind, Array]]:
        """Return (stage, kind, microbatches[gather, replica]) of every gather of parameters.

        A backward that follows its RECOMPUTE uses the copy that was gathered for that.
        """
        entries: list[tuple[int, Kind, Array]] = []
        for stage, buckets in sorted(self.reductions.own.items()):
            if not any(bucket.shard is Shard.PARAMETERS for bucket in buckets):
                continue
            # Every replica of the stage takes one microbatch of a row; they gather together for it.
            turns = np.arange(self.microbatches).reshape(-1, int(self.layout.replicas[stage]))
            kinds = {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT}
            if Kind.RECOMPUTE in self.kinds and self.exists[self._recompute_node(stage)]:
                kinds = {Kind.FORWARD, Kind.RECOMPUTE}
            entries += [(stage, kind, turns) for kind in self.kinds if kind in kinds]
        return entries

    def _recompute_node(self, stage: int) -> int:
        return self.kinds.index(Kind.RECOMPUTE) * self.size + stage * self.microbatches

    def _update_entries(self) -> list[tuple[int, Array]]:
        """Return (stage, last microbatch of each round) of every updating stage when stashing."""
        if not self.plan.stashes_weights:
            return []
        return [
            (
                stage,
                np.arange(
                    self.layout.round[stage] - 1, self.microbatches, self.layout.round[stage]
                ),
            )
            for stage in self.reductions.updating
        ]

    def _levels(self) -> Array:
        """Return the level of every node.

        Gathers are issued one compute ahead, unless devices would then wait for each other in a
        circle.
        """
        if self.gathers:
            with suppress(InvalidInputError):
                return self._levels_of(*self._order_entries(ahead=True))
        return self._levels_of(*self._order_entries(ahead=False))

    def _levels_of(self, device: Array, key: Array, node: Array, total: int) -> Array:
        by_device = _by_device(device, key)
        device, node = device[by_device], node[by_device]
        # One sort of edges: each entry of a device's order waits for the one before it.
        follows = device[1:] == device[:-1]
        source, target = [node[:-1][follows]], [node[1:][follows]]
        turns = np.arange(self.microbatches)
        # The other sort: forwards wait for the stages they read from. Several tensors between two
        # stages make one edge.
        pairs = np.unique(np.stack([self.crossing.producer, self.crossing.reader]), axis=1)
        a, b = (np.repeat(side, self.microbatches) for side in pairs)
        turn = np.tile(turns, pairs.shape[1])
        source.append(self.node(Kind.FORWARD, a, turn))
        target.append(self.node(Kind.FORWARD, b, turn))
        if self.gradient_kind is not None:
            # Gradients go the other way, for tensors that have one.
            flows = self.graph.tensors.differentiable[self.crossing.tensor]
            pairs = np.stack([self.crossing.producer[flows], self.crossing.reader[flows]])
            pairs = np.unique(pairs, axis=1)
            a, b = (np.repeat(side, self.microbatches) for side in pairs)
            turn = np.tile(turns, pairs.shape[1])
            source.append(self.node(self.gradient_kind, b, turn))
            target.append(self.node(self.gradient_kind, a, turn))
        return self._longest(np.concatenate(source), np.concatenate(target), total)

    def _longest(self, source: Array, target: Array, total: int) -> Array:
        level, reached = longest_levels(source, target, total)
        if reached < total:
            raise InvalidInputError(
                f"schedule {self.plan.schedule.value!r} cannot run this plan: the orders of the "
                "devices wait for each other in a circle"
            )
        return level

    def _order_entries(self, *, ahead: bool) -> tuple[Array, Array, Array, int]:
        """Return device, key and node of every entry in a device's order, and the node count.

        Args:
            ahead: Whether a gather stands before the compute that precedes the one it is for, if
                that is of another stage (whose copy it would else replace), and so runs beside it.
        """
        stage, turn = self._grid()
        # One rank stands for its tensor-parallel group, whose members list the same.
        rank0 = self.layout.device(stage, turn)
        device = [np.tile(rank0, len(self.kinds))]
        key = [np.concatenate([self.order[kind].ravel() for kind in self.kinds])]
        node = [np.arange(len(self.kinds) * self.size)]
        device[0], key[0], node[0] = (part[0][self.exists] for part in (device, key, node))
        total = len(self.kinds) * self.size
        for s, kind, turns in self.gathers:
            # A gather is one node that stands in the order of every replica's device, before the
            # compute that needs it: keys are multiples of SLOTS, RECOMPUTE is one below, so two
            # and three below are free. What is fetched ahead lets the compute's own gather go
            # first.
            members = self.layout.device(np.full(turns.shape, s), turns).ravel()
            needs = self.order[kind][s, turns].ravel()
            before = needs
            if ahead:
                before = self._one_ahead(device[0], key[0], node[0], (members, needs, s))
            device.append(members)
            key.append(np.where(before == needs, needs - 3, before - 2))
            node.append(total + np.repeat(np.arange(len(turns)), turns.shape[1]))
            total += len(turns)
        for s, lasts in self.updates:
            # An update is one node for all replicas, right after the backward that ends the round.
            members = np.array(self.layout.members(s, 0))
            device.append(np.tile(members, len(lasts)))
            key.append(np.repeat(self.order[Kind.BACKWARD][s, lasts] + 1, len(members)))
            node.append(total + np.repeat(np.arange(len(lasts)), len(members)))
            total += len(lasts)
        return np.concatenate(device), np.concatenate(key), np.concatenate(node), total

    def _one_ahead(
        self, device: Array, key: Array, node: Array, entries: tuple[Array, Array, int]
    ) -> Array:
        """Return the key of the compute before each entry on its device, if of another stage."""
        members, before, stage = entries
        order = np.lexsort((key, device))
        low, span = int(key.min()), int(key.max() - key.min()) + 1
        keys = device[order].astype(np.int64) * span + key[order] - low
        place = np.searchsorted(keys, members.astype(np.int64) * span + before - low)
        previous = order[np.maximum(place - 1, 0)]
        other = (node[previous] % self.size) // self.microbatches != stage
        # Equal keys stand in the order of nodes: what goes before one of them goes before all.
        alone = (place < 2) | (keys[np.maximum(place - 2, 0)] != keys[np.maximum(place - 1, 0)])
        # Right before a key between the multiples stands other compute.
        alone &= key[previous] % SLOTS == 0
        takes = (place > 0) & (device[previous] == members) & other & alone
        return np.where(takes, key[previous], before)

    def program(self) -> Program:
        """Return the finished Program."""
        self._list_compute()
        self._list_loads()
        self._list_messages()
        self._list_gathers()
        if self.problem.objective.mode is Mode.TRAINING:
            if self.plan.stashes_weights:
                self._list_rounds()
            else:
                self._list_step_end()
        return self.listing.program(self.plan, self.reductions.parameters)

    def _versions(self, stage: Array, turn: Array) -> Array:
        if not self.plan.stashes_weights:
            return np.zeros(len(stage), dtype=np.int64)
        # When a microbatch enters, all but the last ``in_flight``, itself included, have come back;
        # the version is the number of full rounds among those.
        ahead = turn - self.in_flight[stage] + 1
        updated = np.zeros(self.stages, dtype=bool)
        updated[list(self.reductions.updating)] = True
        return np.where(updated[stage], np.maximum(0, ahead // self.layout.round[stage]), 0)

    def _list_compute(self) -> None:
        stage, turn = self._grid()
        version = self._versions(stage, turn)
        for index, kind in enumerate(self.kinds):
            there = self.exists[index * self.size : (index + 1) * self.size]
            for rank in range(int(self.layout.ranks.max())):
                rows = np.flatnonzero(there & (self.layout.ranks[stage] > rank))
                s, m = stage[rows], turn[rows]
                node = self.node(kind, s, m)
                self.listing.compute(
                    kind,
                    device=self.layout.device(s, m, rank),
                    level=self.level[node],
                    # Loads of this node take the slots before: the same level, and right before it.
                    number=(node + 1) * self._load_slots() - 1,
                    stage=s,
                    microbatch=m,
                    group=self._tp_groups(s, m),
                    version=version[rows],
                )

    def _load_slots(self) -> int:
        return len(self.graph.tensors) + 1

    def _tp_groups(self, stage: Array, turn: Array) -> Array:
        """Return the group of each instruction of a tensor-parallel stage; -1 elsewhere."""
        group = np.full(len(stage), -1, dtype=np.int64)
        for s in np.unique(stage[self.layout.ranks[stage] > 1]).tolist():
            rows = np.flatnonzero(stage == s)
            ids = [self.listing.group(devices) for devices in self.plan.stages[s].devices]
            group[rows] = np.array(ids)[self.layout.replica_of[s, turn[rows]]]
        return group

    def _list_loads(self) -> None:
        """Load every model input on every stage that reads it, right before its forward."""
        tensor, stage = input_readers(self.graph, self.plan)
        turn = np.tile(np.arange(self.microbatches), len(tensor))
        tensor, stage = (np.repeat(part, self.microbatches) for part in (tensor, stage))
        node = self.node(Kind.FORWARD, stage, turn)
        for rank in range(int(self.layout.ranks.max())):
            rows = np.flatnonzero(self.layout.ranks[stage] > rank)
            self.listing.compute(
                Kind.LOAD,
                device=self.layout.device(stage[rows], turn[rows], rank),
                level=self.level[node[rows]],
                number=node[rows] * self._load_slots() + tensor[rows],
                stage=stage[rows],
                microbatch=turn[rows],
                tensor=tensor[rows],
            )

    def _list_messages(self) -> None:
        tensor, producer, reader = (np.repeat(part, self.microbatches) for part in self.crossing)
        turn = np.tile(np.arange(self.microbatches), len(self.crossing.tensor))
        remote = np.flatnonzero(
            self.layout.device(producer, turn) != self.layout.device(reader, turn)
        )
        tensor, producer, reader, turn = (p[remote] for p in (tensor, producer, reader, turn))
        self._list_activations(tensor, producer, reader, turn)
        if self.gradient_kind is not None:
            flows = np.flatnonzero(self.graph.tensors.differentiable[tensor])
            self._list_gradients(*(part[flows] for part in (tensor, producer, reader, turn)))

    def _list_activations(self, tensor: Array, producer: Array, reader: Array, turn: Array) -> None:
        """Send each tensor once to every remote device that reads it, to its first reader there."""
        if not self.read_once:
            # Later readers on the device find the tensor there, so it is sent to the reader of
            # lowest level.
            home = self._home(tensor, turn, self.layout.device(reader, turn))
            level = self.level[self.node(Kind.FORWARD, reader, turn)]
            early_first = np.lexsort((level, home))
            # Back to the order of crossings, which numbers the messages the same way at both ends.
            first = np.sort(early_first[_first_of(home[early_first])])
            tensor, producer, reader, turn = (p[first] for p in (tensor, producer, reader, turn))
        for rank in range(int(self.layout.ranks.max())):
            rows = np.flatnonzero(self.layout.ranks[reader] > rank)
            a, b, m = producer[rows], reader[rows], turn[rows]
            self._list_pairs(
                tensor[rows],
                m,
                # Producers of fewer ranks serve several.
                source=self.layout.device(a, m, rank % self.layout.ranks[a]),
                target=self.layout.device(b, m, rank),
                # A message has its producer's level at both ends: that makes the lists one global
                # order.
                level=self.level[self.node(Kind.FORWARD, a, m)],
                stages=(a, b),
                gradient=False,
            )

    def _list_gradients(self, tensor: Array, producer: Array, reader: Array, turn: Array) -> None:
        """Send each gradient back once from every remote device, after its last contributor."""
        assert self.gradient_kind is not None
        level = self.level[self.node(self.gradient_kind, reader, turn)]
        if not self.read_once:
            # Contributions of one device are added up there and sent with the last of them.
            home = self._home(tensor, turn, self.layout.device(reader, turn))
            late_first = np.lexsort((-level, home))
            last = np.sort(late_first[_first_of(home[late_first])])
            tensor, producer, reader, turn, level = (
                p[last] for p in (tensor, producer, reader, turn, level)
            )
        for rank in range(int(self.layout.ranks.max())):
            rows = np.flatnonzero(self.layout.ranks[producer] > rank)
            a, b, m = producer[rows], reader[rows], turn[rows]
            self._list_pairs(
                tensor[rows],
                m,
                source=self.layout.device(b, m, rank % self.layout.ranks[b]),
                target=self.layout.device(a, m, rank),
                level=level[rows],
                stages=(b, a),
                gradient=True,
            )

    def _home(self, tensor: Array, turn: Array, device: Array) -> Array:
        """Return a number for each (tensor, microbatch, device)."""
        number: Array = tensor.astype(np.int64) * self.microbatches + turn
        return number * len(self.plan.devices) + device

    def _list_pairs(
        self,
        tensor: Array,
        turn: Array,
        *,
        source: Array,
        target: Array,
        level: Array,
        stages: tuple[Array, Array],
        gradient: bool,
    ) -> None:
        samples = self.plan.microbatch_sizes[turn]
        # A rank receives what it holds of the tensor.
        parts = self.layout.tensor_parts[stages[1]]
        size = self.graph.tensors.bytes_at(samples, self.graph.batch_size, tensor) / parts
        self.listing.messages(
            tensor=tensor,
            microbatch=turn,
            source=source,
            target=target,
            level=level,
            stages=stages,
            size_bytes=np.ceil(size).astype(np.int64),
            gradient=gradient,
        )

    def _list_gathers(self) -> None:
        """Gather sharded parameters before each compute of their stage."""
        first = len(self.kinds) * self.size
        for stage, _, turns in self.gathers:
            for number in range(len(turns)):
                for bucket in self.reductions.own[stage]:
                    if bucket.shard is Shard.PARAMETERS:
                        self._list_collective(Kind.ALL_GATHER, bucket, self.level[first + number])
            first += len(turns)

    def _list_collective(self, kind: Kind, bucket: Bucket, level: int) -> None:
        # Whole teams reduce; only those gather that hold parts of the same copy.
        gathers = kind is Kind.ALL_GATHER
        size = bucket.gathered_bytes if gathers else bucket.reduced_bytes
        for members, stages in bucket.sharding if gathers else bucket.teams:
            self.listing.collective(
                kind,
                members=members,
                stages=stages,
                level=level,
                bucket=bucket.index,
                size_bytes=size,
            )

    def _last_level(self, stages: tuple[int, ...], turns: Array) -> int:
        """Return the level at which the parameter gradients of stages are complete."""
        return int(self._last_levels(stages, turns.reshape(1, -1))[0])

    def _last_levels(self, stages: tuple[int, ...], rounds: Array) -> Array:
        """Return the same for each of several rounds, a row of microbatches each."""
        nodes = self.node(self.last_kind, np.array(stages).reshape(-1, 1, 1), rounds)
        result: Array = self.level[nodes].max(axis=(0, 2))
        return result

    def _list_rounds(self) -> None:
        """Weight stashing: reduce and update after every round."""
        # Nodes of updates come after those of compute and of gathers.
        first = len(self.kinds) * self.size + sum(len(turns) for _, _, turns in self.gathers)
        for stage, lasts in self.updates:
            length = int(self.layout.round[stage])
            shared = [bucket for bucket in self.reductions.own[stage] if bucket.is_shared]
            for last in lasts.tolist() if shared else []:
                level = self._last_level((stage,), np.arange(last - length + 1, last + 1))
                for bucket in shared:
                    self._list_collective(Kind.ALL_REDUCE, bucket, level)
            levels = self.level[first : first + len(lasts)]
            self._list_updates([stage], levels, np.arange(1, len(lasts) + 1))
            first += len(lasts)

    def _list_step_end(self) -> None:
        """Reduce gradients as soon as they are complete, then update all stages."""
        every = np.arange(self.microbatches)
        # Updates come after everything else; the gathers of what they changed after them, which the
        # listing sees to, as collectives come last within a level.
        end = int(self.level.max()) + 1
        gathers = []
        for bucket in self.reductions.buckets:
            if not bucket.is_shared:
                continue
            if bucket.shard is Shard.NONE:
                self._list_collective(
                    Kind.ALL_REDUCE, bucket, self._last_level(bucket.stages, every)
                )
            elif bucket.shard is Shard.OPTIMIZER:
                self._list_collective(
                    Kind.REDUCE_SCATTER, bucket, self._last_level(bucket.stages, every)
                )
            else:
                # Sharded gradients cannot be kept whole: they are reduced after each round of
                # replicas.
                rounds = every.reshape(-1, self.plan.stages[bucket.stages[0]].num_replicas)
                for level in self._last_levels(bucket.stages, rounds).tolist():
                    self._list_collective(Kind.REDUCE_SCATTER, bucket, level)
            if bucket.shard in (Shard.OPTIMIZER, Shard.GRADIENTS):
                gathers.append(bucket)
        self._list_updates(self.reductions.updating, np.array([end]), np.array([0]))
        for bucket in gathers:
            self._list_collective(Kind.ALL_GATHER, bucket, end)

    def _list_updates(self, stages: Sequence[int], levels: Array, versions: Array) -> None:
        """Update stages once for each level, on every device that steps their parameters."""
        rows = [
            (device, stage, self.listing.group(group) if len(group) > 1 else -1)
            for stage in stages
            for group in self.plan.stages[stage].devices
            for device in group
            if self.reductions.steps(device, stage)
        ]
        device, stage, group = (
            np.repeat(part, len(levels)) for part in np.array(rows).reshape(-1, 3).T
        )
        self.listing.compute(
            Kind.UPDATE,
            device=device,
            level=np.tile(levels, len(rows)),
            number=stage.astype(np.int64),
            stage=stage,
            microbatch=np.full(len(device), -1),
            group=group,
            version=np.tile(versions, len(rows)),
        )


def _order(problem: Problem, pipe: Pipeline) -> Order:
    plan = pipe.plan
    infers = problem.objective.mode is Mode.INFERENCE
    if infers != plan.schedule.row.infers:
        raise InvalidInputError(
            f"schedule {plan.schedule.value!r} does not do {problem.objective.mode.value}"
        )
    if plan.stashes_weights and any(stage.shard is not Shard.NONE for stage in plan.stages):
        raise InvalidInputError(
            f"schedule {plan.schedule.value!r} keeps versions of whole weights; shard 'none' only"
        )
    order: Order = plan.schedule.row.order_function()(pipe)
    return order


def _by_device(device: Array, key: Array) -> Array:
    """Return the entries sorted by device and key."""
    # One sort by a combined key costs less than a sort by two, where the key fits in 64 bits.
    low, span = int(key.min()), int(key.max()) - int(key.min()) + 1
    if span * (int(device.max()) + 1) < 2**62:
        return np.argsort(device * np.int64(span) + (key - low), kind="stable")
    return np.lexsort((key, device))


def _first_of(keys: Array) -> Array:
    """Return the positions of the first occurrence of each key, in order of position."""
    if len(keys) < 2:
        return np.arange(len(keys))
    _, first = np.unique(keys, return_index=True)
    return frozen_array(np.sort(first), np.int64)
