"""Kernels of ``condensed``: units summed by stage, and a skeleton filled with figures and played.

Columns by (class, unit) or (class, stage) are flat, the class outermost. -1 = none.
"""

from typing import NamedTuple

from partita.core.program import Kind
from partita.kernels import Column, Number, kernel
from partita.program.simulate import play_rows

_LOAD, _FORWARD, _RECOMPUTE = int(Kind.LOAD), int(Kind.FORWARD), int(Kind.RECOMPUTE)
_BACKWARD, _INPUT, _WEIGHT = (
    int(Kind.BACKWARD),
    int(Kind.BACKWARD_INPUT),
    int(Kind.BACKWARD_WEIGHT),
)
_UPDATE, _SEND, _RECV = int(Kind.UPDATE), int(Kind.SEND), int(Kind.RECV)
_RECEIVED, _GATHERED, _KEPT = 0, 1, 2
"""Parts of memory, as in ``cost.memory``; what is left is recomputed."""


class UnitFigures(NamedTuple):
    """Figures of units and of the tensors between them, for one size of microbatch.

    Attributes:
        forward: Seconds by class and unit.
        backward: Likewise, both parts.
        backward_input: Likewise, the part for the inputs.
        saved: Bytes that each unit keeps from forward to backward.
        reduced: Bytes of the trained parameters of each unit alone, as replicas reduce them.
        gathered: The same as they gather them.
        traffic: Bytes that an update of them moves.
        net_bytes: Bytes of each tensor.
        net_sent: The same as whole bytes, which travel.
        net_given: Seconds of the transfer where they are given, else 0.
        net_free: 1 where the seconds follow from the link.
        op_unit: The unit of each op that needs scratch memory or saves, in topological order.
        op_scratch: Its scratch memory.
        op_saved: Bytes that it keeps.
        tied_ptr: The tied parameters that it uses are ``tied[tied_ptr[op]:tied_ptr[op + 1]]``.
        tied: See ``tied_ptr``.
        tied_bytes: Bytes of the gradient of each.
    """

    forward: Column
    backward: Column
    backward_input: Column
    saved: Column
    reduced: Column
    gathered: Column
    traffic: Column
    net_bytes: Column
    net_sent: Column
    net_given: Column
    net_free: Column
    op_unit: Column
    op_scratch: Column
    op_saved: Column
    tied_ptr: Column
    tied: Column
    tied_bytes: Column


class Nets(NamedTuple):
    """Forward tensors between units, in order of the tensors.

    Attributes:
        source: The unit that makes each.
        ptr: The units that read it are ``pins[ptr[net]:ptr[net + 1]]``.
        pins: See ``ptr``.
        differentiable: Whether it has a gradient.
        keeper: The unit whose saved bytes have it; -1 = nobody keeps it for backward.
        keeps: Whether each of ``pins`` keeps it.
    """

    source: Column
    ptr: Column
    pins: Column
    differentiable: Column
    keeper: Column
    keeps: Column


class Sums(NamedTuple):
    """Figures by stage (times by class and stage), of a stage that one device runs.

    Attributes:
        forward: Seconds of a microbatch.
        backward: Likewise, both parts, without recomputation.
        backward_input: Likewise, the part for the inputs.
        recompute: Likewise, forward of what is recomputed.
        kept: Bytes from forward to backward.
        brought: Bytes that recomputing brings back.
        held: Bytes all the time.
        reduced: Bytes that replicas reduce.
        gathered: Bytes that they gather where they shard.
        traffic: Bytes that an update moves.
        scratch: Scratch memory beyond what is saved later.
        inputs: Bytes of the inputs that it keeps because it recomputes.
        again: Whether a unit recomputes.
        load: Seconds to load model inputs.
        waiting: Bytes of gradients of tied parameters that wait.
        users: By tied parameter and stage, the ops that use it.
        met: Likewise, those of them that were met.
    """

    forward: Column
    backward: Column
    backward_input: Column
    recompute: Column
    kept: Column
    brought: Column
    held: Column
    reduced: Column
    gathered: Column
    traffic: Column
    scratch: Column
    inputs: Column
    again: Column
    load: Column
    waiting: Column
    users: Column
    met: Column


class Runs(NamedTuple):
    """Messages between stages, each of one tensor or of several that follow one another.

    Attributes:
        producer: The sending stage.
        ptr: The reading stages are ``readers[ptr[run]:ptr[run + 1]]``.
        readers: See ``ptr``.
        differentiable: Whether gradients travel back.
        sent: Bytes that take the link's time.
        size: Bytes of a receive buffer.
        given: Seconds that are given.
        free: Tensors that each pay the latency of the link.
        last_out: By stage, the run that it sent last.
        last_in: By stage, the run that it received last.
        seen: By stage, the last tensor that it reads.
    """

    producer: Column
    ptr: Column
    readers: Column
    differentiable: Column
    sent: Column
    size: Column
    given: Column
    free: Column
    last_out: Column
    last_in: Column
    seen: Column


@kernel
def condense(  # noqa: C901, PLR0912, PLR0915 (one pass over the columns)
    stage_of: Column,
    again: Column,
    static: Column,
    units: UnitFigures,
    nets: Nets,
    sums: Sums,
    runs: Runs,
) -> Number:
    """Sum units by stage and join messages; return the number of runs, -1 = data flow backwards.

    Two tensors are one message where nobody can tell: both have one reading stage, the same one,
    and follow one another in the order of what their producer sends and of what their reader sends
    back.
    """
    num_units = len(stage_of)
    num_stages = len(sums.kept)
    num_classes = len(sums.forward) // num_stages
    for s in range(num_stages):
        sums.kept[s] = 0.0
        sums.brought[s] = 0.0
        sums.held[s] = 0.0
        sums.reduced[s] = 0.0
        sums.gathered[s] = 0.0
        sums.traffic[s] = 0.0
        sums.scratch[s] = 0.0
        sums.inputs[s] = 0.0
        sums.again[s] = 0
        sums.load[s] = 0.0
        sums.waiting[s] = 0.0
        runs.last_out[s] = -1
        runs.last_in[s] = -1
        runs.seen[s] = -1
    for k in range(len(sums.forward)):
        sums.forward[k] = 0.0
        sums.backward[k] = 0.0
        sums.backward_input[k] = 0.0
        sums.recompute[k] = 0.0
    for c in range(num_classes):
        for u in range(num_units):
            cell = c * num_stages + stage_of[u]
            k = c * num_units + u
            sums.forward[cell] += units.forward[k]
            sums.backward[cell] += units.backward[k]
            sums.backward_input[cell] += units.backward_input[k]
            if again[u]:
                sums.recompute[cell] += units.forward[k]
    for u in range(num_units):
        s = stage_of[u]
        if again[u]:
            sums.again[s] = 1
            sums.brought[s] += units.saved[u]
        else:
            sums.kept[s] += units.saved[u]
        sums.held[s] += static[u]
        sums.reduced[s] += units.reduced[u]
        sums.gathered[s] += units.gathered[u]
        sums.traffic[s] += units.traffic[u]
    for k in range(len(sums.users)):
        sums.users[k] = 0
        sums.met[k] = 0
    for k in range(len(units.op_unit)):
        for use in range(units.tied_ptr[k], units.tied_ptr[k + 1]):
            sums.users[units.tied[use] * num_stages + stage_of[units.op_unit[k]]] += 1
    # From the last op of a stage to its first: ``load`` holds for now what the later ops save. The
    # part of a tied gradient waits from the last of its users to the first, where it is summed.
    for k in range(len(units.op_unit) - 1, -1, -1):
        s = stage_of[units.op_unit[k]]
        above = units.op_scratch[k] - sums.load[s] + sums.waiting[s]
        for use in range(units.tied_ptr[k], units.tied_ptr[k + 1]):
            cell = units.tied[use] * num_stages + s
            sums.met[cell] += 1
            if sums.users[cell] == 1:
                continue
            size = units.tied_bytes[units.tied[use]]
            if sums.met[cell] == 1:
                sums.waiting[s] += size
            if sums.met[cell] == sums.users[cell]:
                above += size
                sums.waiting[s] -= size
        sums.scratch[s] = max(sums.scratch[s], above)
        sums.load[s] += units.op_saved[k]
    for s in range(num_stages):
        sums.load[s] = 0.0
    count = 0
    ends = 0
    for net in range(len(nets.source)):
        producer = stage_of[nets.source[net]]
        begin = ends
        inside = 0
        # Whether a unit here counts it, and one that keeps it for another that recomputes.
        counted = nets.keeper[net]
        known = counted >= 0 and stage_of[counted] == producer
        held = 0
        for pin in range(nets.ptr[net], nets.ptr[net + 1]):
            reader = stage_of[nets.pins[pin]]
            if reader < producer:
                return -1
            if reader == producer and again[nets.pins[pin]]:
                inside = 1
            if reader == producer and nets.keeps[pin] == 1 and not again[nets.pins[pin]]:
                held = 1
            if reader == producer or runs.seen[reader] == net:
                continue
            runs.seen[reader] = net
            # Readers stand in ascending order.
            k = ends
            while k > begin and runs.readers[k - 1] > reader:
                runs.readers[k] = runs.readers[k - 1]
                k -= 1
            runs.readers[k] = reader
            ends += 1
        # What units that recompute keep of others in their stage, and others for them.
        if known and not again[counted]:
            inside = 0
        elif known and held == 1:
            inside = 1
        elif again[nets.source[net]]:
            inside = 0
        if inside == 1:
            sums.inputs[producer] += units.net_bytes[net]
        if ends == begin:
            continue
        for k in range(begin, ends):
            reader = runs.readers[k]
            # What a stage that recomputes keeps of its inputs.
            if sums.again[reader] == 1:
                sums.inputs[reader] += units.net_bytes[net]
        reader = runs.readers[begin]
        last = runs.last_out[producer]
        joins = (
            ends - begin == 1
            and last >= 0
            and last == runs.last_in[reader]
            and runs.ptr[last + 1] - runs.ptr[last] == 1
            and runs.differentiable[last] == nets.differentiable[net]
        )
        if joins:
            ends = begin
            row = last
        else:
            row = count
            count += 1
            runs.producer[row] = producer
            runs.ptr[row] = begin
            runs.ptr[row + 1] = ends
            runs.differentiable[row] = nets.differentiable[net]
            runs.sent[row] = 0.0
            runs.size[row] = 0.0
            runs.given[row] = 0.0
            runs.free[row] = 0
            runs.last_out[producer] = row
            for k in range(begin, ends):
                runs.last_in[runs.readers[k]] = row
        runs.size[row] += units.net_sent[net]
        if units.net_free[net] == 1:
            runs.sent[row] += units.net_sent[net]
            runs.free[row] += 1
        else:
            runs.given[row] += units.net_given[net]
    return count


class Rows(NamedTuple):
    """Columns of a skeleton's Program and of its matching, as the simulator reads them.

    Attributes:
        ptr: By device, as in a Program.
        kind: By row.
        device: By row.
        stage: By row.
        run: The run that a SEND or RECV moves.
        peer: Other device of a SEND.
        call: The collective that a row is part of.
        ring: Its place among the members of all groups.
        partner: See ``program.matching``.
        joint: Likewise.
        joint_size: Likewise.
        first_wait: Likewise.
        next_wait: Likewise.
        turn: Places of collectives, see ``program.simulate``.
        held_stage: With ``held_device``: every stage on every one of its devices.
        held_device: See ``held_stage``.
        pair_from: With ``pair_to``: the ordered pairs of devices that exchange messages.
        pair_to: See ``pair_from``.
    """

    ptr: Column
    kind: Column
    device: Column
    stage: Column
    run: Column
    peer: Column
    call: Column
    ring: Column
    partner: Column
    joint: Column
    joint_size: Column
    first_wait: Column
    next_wait: Column
    turn: Column
    held_stage: Column
    held_device: Column
    pair_from: Column
    pair_to: Column


class Terms(NamedTuple):
    """Changes of memory in the order of the lists: device, sign, part, and stage, run or call."""

    device: Column
    sign: Column
    part: Column
    index: Column


class Links(NamedTuple):
    """Links of all ordered pairs of the cluster's devices; ports in come after ports out."""

    latency: Column
    bandwidth: Column
    out_port: Column
    in_port: Column


class Figures(NamedTuple):
    """All that a skeleton does not know of a plan.

    Attributes:
        place: The cluster's device of each device of the plan.
        class_of: Its class.
        limit: Bytes that it may use.
        extra: Bytes that it holds beside those of its stages.
        tp: Tensor-parallel degree of each stage.
        split: Devices that divide an update of it.
        rate: Memory bandwidth of each class; 0 = updates take no time.
        call_s: Seconds of each collective.
        call_bytes: Bytes of each.
        successor: The next device of the cluster in the ring, by place among the members.
        flags: Whether RECOMPUTE is an instruction; number of devices in the cluster.
        cutoff: Plans whose busiest device computes so long are not played.
    """

    place: Column
    class_of: Column
    limit: Column
    extra: Column
    tp: Column
    split: Column
    rate: Column
    call_s: Column
    call_bytes: Column
    successor: Column
    flags: Column
    cutoff: Number


class Scratch(NamedTuple):
    """Working columns of ``measure``: results first, then those of the simulator.

    Attributes:
        result: Excess of memory, and 1 where the value is one of the simulation.
        times: Seconds of the kinds of compute by (kind, class, stage).
        used: Memory of each device.
        excess: What each device needs beyond its limit at its peak; negative = that much is free.
        busy: Compute of each device.
        out_port: By row.
        in_port: By row.
        seconds: By row.
        order: What the simulator writes: see ``program.simulate``.
    """

    result: Column
    times: Column
    used: Column
    excess: Column
    busy: Column
    out_port: Column
    in_port: Column
    seconds: Column
    flags: Column
    start: Column
    end: Column
    cause: Column
    position: Column
    clock: Column
    last: Column
    blocked: Column
    stack: Column
    held: Column
    come: Column
    ready: Column
    longest: Column
    reason: Column
    head: Column
    chain: Column
    free: Column
    holder: Column


@kernel
def _fill_times(sums: Sums, figures: Figures, times: Column) -> None:
    """Fill the seconds of each kind of compute, by class and stage."""
    cells = len(sums.forward)
    stages = len(sums.kept)
    early = figures.flags[0] == 1
    for cell in range(cells):
        stage = cell % stages
        tp = figures.tp[stage]
        again = sums.recompute[cell] / tp
        forward = sums.forward[cell] / tp
        backward = sums.backward[cell] / tp
        inputs = sums.backward_input[cell] / tp
        rate = figures.rate[cell // stages]
        times[_LOAD * cells + cell] = sums.load[stage]
        times[_FORWARD * cells + cell] = forward
        times[_RECOMPUTE * cells + cell] = again
        times[_BACKWARD * cells + cell] = backward + (0.0 if early else again)
        times[_INPUT * cells + cell] = inputs + again
        times[_WEIGHT * cells + cell] = max(backward - inputs, 0.0)
        times[_UPDATE * cells + cell] = (
            sums.traffic[stage] / figures.split[stage] / rate if rate > 0 else 0.0
        )


@kernel
def _excess(
    rows: Rows, terms: Terms, sums: Sums, runs: Runs, figures: Figures, scratch: Scratch
) -> Number:
    """Return by how much the fullest device exceeds its limit at its peak; 0 where none does."""
    used = scratch.used
    busy = scratch.busy
    for d in range(len(used)):
        used[d] = figures.extra[d]
        busy[d] = 0.0
    for k in range(len(rows.held_stage)):
        stage = rows.held_stage[k]
        d = rows.held_device[k]
        used[d] += sums.held[stage]
        # ``busy`` holds the largest scratch memory for now.
        busy[d] = max(busy[d], sums.scratch[stage] / figures.tp[stage])
    excess = scratch.excess
    for d in range(len(used)):
        used[d] += busy[d]
        excess[d] = used[d] - figures.limit[d]
    for k in range(len(terms.device)):
        index = terms.index[k]
        part = terms.part[k]
        d = terms.device[k]
        if part == _RECEIVED:
            value = runs.size[index]
        elif part == _GATHERED:
            value = figures.call_bytes[index]
        elif part == _KEPT:
            value = sums.kept[index] / figures.tp[index] + sums.inputs[index]
        else:
            value = sums.brought[index] / figures.tp[index]
        used[d] += terms.sign[k] * value
        excess[d] = max(excess[d], used[d] - figures.limit[d])
    over = 0.0
    for d in range(len(used)):
        over = max(over, excess[d])
    return over


@kernel
def _fill_rows(
    rows: Rows, sums: Sums, runs: Runs, links: Links, figures: Figures, scratch: Scratch
) -> None:
    """Fill seconds and ports of every row, and what each device computes."""
    cells = len(sums.forward)
    stages = len(sums.kept)
    size = figures.flags[1]
    for d in range(len(scratch.busy)):
        scratch.busy[d] = 0.0
    for row in range(len(rows.kind)):
        kind = rows.kind[row]
        d = rows.device[row]
        scratch.out_port[row] = -1
        scratch.in_port[row] = -1
        if kind <= _UPDATE:
            cell = figures.class_of[d] * stages + rows.stage[row]
            seconds = scratch.times[kind * cells + cell]
            scratch.seconds[row] = seconds
            scratch.busy[d] += seconds
        elif kind == _RECV:
            scratch.seconds[row] = 0.0
        elif kind == _SEND:
            run = rows.run[row]
            pair = figures.place[d] * size + figures.place[rows.peer[row]]
            scratch.seconds[row] = (
                runs.given[run]
                + runs.free[run] * links.latency[pair]
                + runs.sent[run] / links.bandwidth[pair]
            )
            scratch.out_port[row] = links.out_port[pair]
            scratch.in_port[row] = links.in_port[pair]
        else:
            pair = figures.place[d] * size + figures.successor[rows.ring[row]]
            scratch.seconds[row] = figures.call_s[rows.call[row]]
            scratch.out_port[row] = links.out_port[pair]
            scratch.in_port[row] = links.in_port[pair]


@kernel
def _shares_port(rows: Rows, links: Links, figures: Figures, scratch: Scratch) -> Number:
    """Return 1 where a port serves more than one ordered pair of devices."""
    size = figures.flags[1]
    # ``holder`` tells which ports are taken, and is cleared again before it is used.
    for port in range(len(scratch.holder)):
        scratch.holder[port] = -1
    for k in range(len(rows.pair_from)):
        pair = figures.place[rows.pair_from[k]] * size + figures.place[rows.pair_to[k]]
        for port in (links.out_port[pair], links.in_port[pair]):
            if port >= 0:
                if scratch.holder[port] >= 0:
                    return 1
                scratch.holder[port] = k
    return 0


@kernel
def _clear(rows: Rows, scratch: Scratch) -> None:
    """Prepare the columns that the simulator writes."""
    for row in range(len(scratch.start)):
        scratch.start[row] = 0.0
        scratch.end[row] = -1.0
        scratch.cause[row] = -1
    for d in range(len(scratch.clock)):
        scratch.position[d] = rows.ptr[d]
        scratch.clock[d] = 0.0
        scratch.last[d] = -1
        scratch.blocked[d] = -1
        scratch.stack[d] = -1
        scratch.held[d] = 0
    for k in range(len(scratch.come)):
        scratch.come[k] = 0
        scratch.ready[k] = 0.0
        scratch.longest[k] = 0.0
        scratch.reason[k] = -1
        scratch.head[k] = -1
    for row in range(len(scratch.chain)):
        scratch.chain[row] = -1
    for port in range(len(scratch.free)):
        scratch.free[port] = 0.0
        scratch.holder[port] = -1


@kernel(allocates=True)
def measure(
    rows: Rows,
    terms: Terms,
    sums: Sums,
    runs: Runs,
    links: Links,
    figures: Figures,
    scratch: Scratch,
) -> Number:
    """Return the seconds of a step; -1 where memory does not suffice, -2 where it gets stuck."""
    # result: bytes that the fullest device lacks; 1 if the step was played to its end.
    scratch.result[1] = 0.0
    # Memory first: it needs sums alone, and most plans of a search that lose, lose here.
    over = _excess(rows, terms, sums, runs, figures, scratch)
    scratch.result[0] = over
    if over > 0:
        return -1.0
    _fill_times(sums, figures, scratch.times)
    _fill_rows(rows, sums, runs, links, figures, scratch)
    # No device ends before it has done its own work: what exceeds the best plan so far by that
    # alone need not be played.
    least = 0.0
    for d in range(len(scratch.busy)):
        least = max(least, scratch.busy[d])
    if least >= figures.cutoff:
        return least
    # Flags of the simulator: messages may have to wait for a port; rows that several devices do
    # together; transfers that hold their devices, which condensed plans do not have.
    has_calls = 1 if len(figures.call_s) > 0 else 0
    scratch.flags[0] = 1 if has_calls == 1 else _shares_port(rows, links, figures, scratch)
    scratch.flags[1] = 1 if len(rows.joint_size) > 0 else 0
    scratch.flags[2] = 0
    _clear(rows, scratch)
    play_rows(
        rows.ptr,
        rows.kind,
        scratch.seconds,
        rows.device,
        scratch.out_port,
        scratch.in_port,
        scratch.flags,
        rows.partner,
        rows.joint,
        rows.joint_size,
        rows.first_wait,
        rows.next_wait,
        rows.turn,
        scratch.start,
        scratch.end,
        scratch.cause,
        scratch.position,
        scratch.clock,
        scratch.last,
        scratch.blocked,
        scratch.stack,
        scratch.held,
        scratch.come,
        scratch.ready,
        scratch.longest,
        scratch.reason,
        scratch.head,
        scratch.chain,
        scratch.free,
        scratch.holder,
    )
    # A device that is not at the end of its list waits for something that never comes.
    for d in range(len(scratch.position)):
        if scratch.position[d] < rows.ptr[d + 1]:
            return -2.0
    value = 0.0
    for row in range(len(scratch.end)):
        value = max(value, scratch.start[row], scratch.end[row])
    scratch.result[1] = 1.0
    return value
