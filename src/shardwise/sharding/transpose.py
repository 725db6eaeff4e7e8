"""Transposes: what the backward pass does with a product and with a collective.

The transpose of `A * B -> C` for A is `dC * B -> dA`, and for B is `A * dC -> dB`. AllGather and ReduceScatter are each
other's transposes; the transpose of an AllReduce whose result is used replicated is nothing (the identity), and that of
nothing, on a replicated tensor that partial work consumes, is an AllReduce (S1's conjugate pairs f/f* and g/g*).
"""

from __future__ import annotations

from shardwise.sharding.collective import Collective, Kind
from shardwise.sharding.spec import Spec


def transpose_contraction(
    left: tuple[str, ...], right: tuple[str, ...], result: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Dims of the two backward products: for "left" `(d result, right, d left)`, for "right" `(left, d result, d right)`."""
    return {"left": (result, right, left), "right": (left, result, right)}


def cotangent(spec: Spec) -> Spec:
    """How the gradient of a tensor lies: split as the tensor is; partial where the tensor is used replicated by partial work."""
    return spec.with_partial(())


def transpose_collective(collective: Collective) -> Collective | None:
    """The collective on the gradient, or None where it is the identity (AllReduce: the gradient is replicated already)."""
    swap = {
        Kind.ALL_GATHER: Kind.REDUCE_SCATTER,
        Kind.REDUCE_SCATTER: Kind.ALL_GATHER,
        Kind.ALL_TO_ALL: Kind.ALL_TO_ALL,
        Kind.SLICE: Kind.ALL_GATHER,
        Kind.SEND_RECV: Kind.SEND_RECV,
    }
    if collective.kind is Kind.ALL_REDUCE:
        return None
    before = cotangent(collective.after)
    if collective.kind is Kind.ALL_GATHER:
        before = before.with_partial(collective.axes)
    return Collective(swap[collective.kind], collective.axes, before, cotangent(collective.before))
