"""A layout with some fields of other values, and what goes with them: what a slider of the page makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.layout import Layout, cp_variant_names
from shardwise.pipeline import natural_schedule

DEGREES = ("tp", "cp", "pp", "ep", "dp", "fsdp")


def with_fields(layout: Layout, fields: Mapping[str, Any], num_devices: int | None) -> Layout:
    """The layout with other values and what goes with them; replicas take what is left of the devices (None: nothing)."""
    tp, cp, pp = (fields.get(axis, getattr(layout, axis)) for axis in ("tp", "cp", "pp"))
    virtual = fields.get("num_virtual_stages", layout.num_virtual_stages if pp > 1 else 1)
    follows: dict[str, Any] = (
        {"layers_per_stage": None, "placement": None} if not fields.keys().isdisjoint(DEGREES) else {}
    )
    if "tp" in fields:
        follows |= {"sequence_parallel": tp > 1, "async_tp": layout.async_tp and tp > 1, "etp": None}
    if fields.get("sequence_parallel") is False:
        follows["async_tp"] = False
    if cp == 1:
        follows["cp_variant"] = cp_variant_names()[0]
    if fields.keys() & {"pp", "num_virtual_stages"}:
        follows |= {"num_virtual_stages": virtual, "schedule": natural_schedule(pp, virtual), "layers_per_stage": None}
    if fields.get("recompute", layout.recompute) == "none":
        follows["recompute_layers"] = None
    if fields.get("zero_stage") and layout.zero_stage == 0:
        follows |= {"fsdp": layout.dp, "dp": 1}
    changed = replace(layout, **{**follows, **fields})
    return refilled(changed, changed.num_devices if num_devices is None else num_devices)


def refilled(layout: Layout, num_devices: int) -> Layout:
    """The layout with as many replicas as devices are left: of ZeRO over `fsdp`, else over `dp`."""
    rest = max(1, num_devices // (layout.tp * layout.cp * layout.pp))
    if layout.zero_stage == 0:
        return replace(layout, dp=rest, fsdp=1, ep=1, etp=None) if layout.fsdp > 1 else replace(layout, dp=rest)
    dp = layout.dp if rest % layout.dp == 0 else 1
    fsdp = rest // dp
    zero = layout.zero_stage if fsdp * layout.cp > 1 else 0
    ep = layout.ep if fsdp % layout.ep == 0 or layout.etp is not None else math.gcd(layout.ep, fsdp)
    return replace(layout, dp=dp, fsdp=fsdp, zero_stage=zero, ep=ep)
