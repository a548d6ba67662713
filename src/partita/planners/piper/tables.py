"""Columns that Piper's search works on, as named tuples of arrays that kernels can take."""

from typing import NamedTuple

from partita.core.columns import Array


class Nodes(NamedTuple):
    """Figures of the nodes, ``[degree, node]``, and of the edges between them.

    Attributes:
        seconds: Of a microbatch, the faster choice of every op; inf = the degree is not allowed.
        saved: Bytes for each microbatch in flight.
        fixed: Bytes that do not depend on the microbatches in flight.
        reduce_s: Seconds a microbatch that a further replica's gradients take.
        least: Fewest bytes with one microbatch in flight.
        leave_s: Seconds of all that leaves the node, if all of it is cut.
        in_ptr: Edges ``in_ptr[v]`` to ``in_ptr[v + 1]`` enter node v.
        in_source: The node that each edge leaves.
        in_enter_s: Seconds that a cut edge takes where it enters, ``[degree, edge]``.
        in_leave_s: Seconds that it takes where it leaves.
        in_kept: Bytes that an entering edge keeps for each microbatch in flight.
    """

    seconds: Array
    saved: Array
    fixed: Array
    reduce_s: Array
    least: Array
    leave_s: Array
    in_ptr: Array
    in_source: Array
    in_enter_s: Array
    in_leave_s: Array
    in_kept: Array


class Lattice(NamedTuple):
    """Ideals with the steps between them.

    Attributes:
        member: Whether each node is in each ideal, ``[ideal, node]``.
        step_ptr: Steps ``step_ptr[i]`` to ``step_ptr[i + 1]`` lead up from ideal i.
        step_target: The ideal with one node more.
        step_node: The node that it has more.
    """

    member: Array
    step_ptr: Array
    step_target: Array
    step_node: Array


class Stages(NamedTuple):
    """All stages: what an upper ideal has more than a lower one; figures are ``[stage, degree]``.

    Attributes:
        ptr: Stages ``ptr[i]`` to ``ptr[i + 1]`` have ideal i as the lower one.
        upper: The upper ideal.
        most: Devices that the stage may run on.
        seconds: Compute and transfers of a microbatch on one replica; inf = not allowed.
        reduce_s: Seconds a microbatch that a further replica's gradients take.
        saved: Bytes for each microbatch in flight, faster choices.
        fixed: Bytes besides.
        free: Most microbatches in flight that fit without a slower choice.
        stuck: Fewest microbatches in flight that are known not to fit at all.
    """

    ptr: Array
    upper: Array
    most: Array
    seconds: Array
    reduce_s: Array
    saved: Array
    fixed: Array
    free: Array
    stuck: Array


class Items(NamedTuple):
    """Slower choices that take less memory; figures are ``[degree, item]``.

    Attributes:
        node: The node that each item belongs to.
        extra_s: Seconds more; inf = there is no such choice.
        less_saved: Bytes less for each microbatch in flight.
        less_fixed: Bytes less besides; often negative.
    """

    node: Array
    extra_s: Array
    less_saved: Array
    less_fixed: Array


class Known(NamedTuple):
    """What was found of choices before, and room to work.

    Attributes:
        order: Items by seconds a byte, best first, a row for a degree and microbatches in flight.
        order_key: What each row of ``order`` is for; -1 = nothing yet.
        order_count: Items of each row that save anything.
        flight: Microbatches in flight that each slot is for; -1 = nothing yet.
        tried: Whether the slot's figures are as good as they get.
        left: Branches that one choice may take, and that all together may still take.
        low: No choice of the slot's stage takes fewer extra seconds.
        high: Extra seconds of the best choice known.
        item: Room for the items of a stage.
        gain: Room for the bytes that items save.
        cost: Room for the extra seconds of items.
        taken: Room for a choice.
        best: Room for the best choice.
    """

    order: Array
    order_key: Array
    order_count: Array
    flight: Array
    tried: Array
    left: Array
    low: Array
    high: Array
    item: Array
    gain: Array
    cost: Array
    taken: Array
    best: Array


class Limits(NamedTuple):
    """What a plan has to keep.

    Attributes:
        devices: Number of devices.
        replicas: Most that the data-parallel degrees may add up to.
        bytes: Memory of a device.
        degrees: Tensor-parallel degrees.
        divisors: Data-parallel degrees, ascending.
        work: Device seconds that each ideal takes at least.
        room: Devices that each ideal takes at least for its memory.
    """

    devices: int
    replicas: int
    bytes: float
    degrees: Array
    divisors: Array
    work: Array
    room: Array


class Fronts(NamedTuple):
    """Ways to run all that an ideal leaves, none better than another in both sums.

    Attributes:
        begin: Ways ``begin[i]`` to ``end[i]`` belong to ideal i.
        end: See ``begin``.
        replicas: Sum of data-parallel degrees, ascending within an ideal.
        devices: Sum of devices, descending within an ideal.
        stage: First stage of the way.
        degree: Its tensor-parallel degree, as an index.
        data: Its data-parallel degree.
        rest: The way that goes on after it.
        least: Room: fewest devices for each sum of degrees, and how they come about, ``[5, sum]``.
    """

    begin: Array
    end: Array
    replicas: Array
    devices: Array
    stage: Array
    degree: Array
    data: Array
    rest: Array
    least: Array


class Case(NamedTuple):
    """All that a trial of a time looks at.

    Attributes:
        limits: What a plan has to keep.
        lattice: The ideals.
        stages: The stages between them.
        items: Slower choices of their ops.
        known: What was found of choices before.
    """

    limits: Limits
    lattice: Lattice
    stages: Stages
    items: Items
    known: Known
