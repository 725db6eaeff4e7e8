"""Rows of routed tokens that move between ranks, or of which a rank keeps a part, as calls."""

from __future__ import annotations

from torch import Tensor

from shardwise.engine.torch.calls import Call, Calls
from shardwise.engine.torch.moving import MOVING, Moving, OnWay, ends_of, is_issued
from shardwise.engine.torch.rows import Lane, Rows, Share, lane, start_counts
from shardwise.lowering.instruction import Slice, Start
from shardwise.lowering.traffic import Traffic
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Spec

BACK = {Kind.REDUCE_SCATTER}  # kinds that bring rows back whatever they do to the experts' dim
OF_LANES = (Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def moves_rows(one: Moving, calls: Calls) -> bool:
    """Whether an instruction moves rows, or cuts them in place, and has to know whose they are."""
    if isinstance(one, Slice):
        before, after = _around(calls, one)
        return before != after and (calls.is_routed(one.step.tensor.name) or one.step.tensor.name == calls.gates)
    traffic = one.traffic
    return is_issued(calls, traffic) and traffic.kind in OF_LANES and calls.is_routed(traffic.tensors[0])


def _around(calls: Calls, one: Slice) -> tuple[Spec, Spec]:
    before, after = one.step.collective.before, one.step.collective.after
    return calls.rank.sharding(before), calls.rank.sharding(after)


def row_calls(calls: Calls, one: Moving, phase: str) -> Call:
    """The call of a start, a wait or a slice."""
    if isinstance(one, Slice):
        return _share(calls, one, phase)
    if one.traffic.tells is not None:
        return _counts(calls, one.traffic.tells, phase, starts=isinstance(one, Start))
    return _start(calls, one.traffic, phase) if isinstance(one, Start) else _wait(calls, one.traffic, phase)


def _share(calls: Calls, one: Slice, phase: str) -> Call:
    """Each rank of a group, which all have the same tokens, keeps the rows of its own experts; the router's choice is cut to what
    says which these are."""
    (before, after), name, exchange = _around(calls, one), one.step.tensor.name, calls.rank.exchange
    axes = after.axes_of("E")[len(before.axes_of("E")) :]
    place, parts = calls.rank.position(axes), calls.rank.mesh.size(axes)
    key, cut = calls.key(name, before), calls.key(name, after)
    assert exchange is not None, "a rank of several has an exchange"

    def share(routing: Rows) -> Share:
        return Share(exchange, axes, routing, place, parts)

    def rows(x: Tensor, routing: Rows) -> tuple[Share, Tensor]:
        found = share(routing)
        return found, found.cut(x)

    if name == calls.gates:
        return Call(share, (key,), (cut,), phase, alone=True)
    return Call(rows, (key, calls.rows(before)), (calls.rows(after), cut), phase, is_view=True, alone=True)


def _counts(calls: Calls, traffic: Traffic, phase: str, *, starts: bool) -> Call:
    """The number of rows for each expert is sent before the rows."""
    exchange = calls.rank.exchange
    before, after, name = ends_of(calls, traffic)
    rows, made, on_way = calls.rows(before), calls.rows(after), f"{MOVING} rows of {calls.key(name, after)}"
    axes, to_all, dtype = calls.rank.several(traffic.axes), traffic.kind is Kind.ALL_GATHER, calls.statistics
    ranks = calls.rank.mesh.size(axes)
    assert exchange is not None, "a rank of several has an exchange"

    def start(own: Rows) -> OnWay:
        return OnWay(*start_counts(own, exchange, axes, ranks, to_all=to_all, dtype=dtype))

    def wait(told: OnWay, own: Rows) -> Lane:
        told.pending.wait()
        return lane(own, exchange, axes, told.arriving, to_all=to_all)

    if starts:
        return Call(start, (rows,), (on_way,), phase, alone=True)
    return Call(wait, (on_way, rows), (made,), phase, alone=True)


def _goes_back(before: Spec, after: Spec, kind: Kind) -> bool:
    return kind in BACK or len(before.axes_of("E")) > len(after.axes_of("E"))


def _start(calls: Calls, traffic: Traffic, phase: str) -> Call:
    before, after, name = ends_of(calls, traffic)
    back = _goes_back(before, after, traffic.kind)
    key, rows = calls.key(name, before), calls.rows(before if back else after)

    def start(x: Tensor, way: Lane) -> OnWay:  # or a `Share`, of which rows only come back
        return OnWay(*(way.start_back(x) if back else way.start(x)))

    return Call(start, (key, rows), (f"{MOVING} {calls.key(name, after)}",), phase, alone=True)


def _wait(calls: Calls, traffic: Traffic, phase: str) -> Call:
    before, after, name = ends_of(calls, traffic)
    back = _goes_back(before, after, traffic.kind)
    rows = calls.rows(before if back else after)

    def wait(on_way: OnWay, x: Tensor, way: Lane) -> Tensor:
        on_way.pending.wait()
        return way.arrived_back(on_way.arriving) if back else way.arrived(on_way.arriving)

    reads = (f"{MOVING} {calls.key(name, after)}", calls.key(name, before), rows)
    return Call(wait, reads, (calls.key(name, after),), phase, alone=True)
