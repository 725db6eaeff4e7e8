"""Costs of units in fewer columns: what a step only ever adds up is added up before it is gathered."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.overlap import convention_of
from shardwise.cost.unit_costs import ActivationCost, StateCost, Traffic
from shardwise.job import Overlap
from shardwise.symbolic import added


def lean_activation(cost: ActivationCost, overlap: Overlap, *, pairs: bool, measured: bool) -> ActivationCost:
    """The same cost in fewer columns: what a step only ever adds up is added up before it is gathered.

    Experts' traffic stays apart where passes run in `pairs`, which hide it (`overlap.HIDEABLE_TOGETHER`), and under a `measured`
    stack, which shows a share of it and all of the others' (`overlap.BLOCKING`).
    """
    cost = replace(cost, backward_s=cost.backward_s + cost.recompute_s, recompute_s=0.0)
    if not convention_of(overlap).adds_up:  # the longest axis counts, so the axes stay apart
        return cost
    alike = ("tp", "cp") if measured or pairs else ("tp", "cp", "ep")
    return replace(
        cost, forward_traffic_s=_joined(cost.forward_traffic_s, *alike),
        backward_traffic_s=_joined(cost.backward_traffic_s, *alike),
    )  # fmt: skip


def _joined(traffic: Traffic, axis: str, *others: str) -> Traffic:
    """The same with some axes' seconds at another one's."""
    return {**traffic, axis: added(traffic[name] for name in (axis, *others)), **dict.fromkeys(others, 0.0)}


def lean_state(cost: StateCost, overlap: Overlap, *, offloads: bool = False) -> StateCost:
    """The same for state: bytes at rest in one column, in two where the optimizer's can rest on the host."""
    optimizer = cost.master_bytes + cost.optimizer_bytes
    rest = cost.parameters_bytes + cost.gradients_bytes + (0.0 if offloads else optimizer)
    cost = replace(
        cost,
        parameters_bytes=rest,
        gradients_bytes=0.0,
        master_bytes=0.0,
        optimizer_bytes=optimizer if offloads else 0.0,
    )
    if not convention_of(overlap).adds_up:
        return cost
    return replace(cost, step_traffic_s=_joined(cost.step_traffic_s, "fsdp", "dp", "control"))
