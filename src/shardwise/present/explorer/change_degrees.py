"""Changes of a layout by the page's controls: fields of other values, and the fields that depend on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.layout import Layout, cp_variant_names
from shardwise.pipeline import natural_schedule

DEGREES = ("tp", "cp", "pp", "ep", "dp", "fsdp")


def with_fields(layout: Layout, fields: Mapping[str, Any], num_devices: int | None) -> Layout:
    """Return the layout with other values of some fields and those that depend on them.

    Replicas take the devices that are left; with `num_devices` None the number of devices follows the degrees.
    """
    tp, cp, pp = (fields.get(axis, getattr(layout, axis)) for axis in ("tp", "cp", "pp"))
    virtual = fields.get("num_virtual_stages", layout.num_virtual_stages if pp > 1 else 1)
    dependent: dict[str, Any] = (
        {"layers_per_stage": None, "placement": None} if not fields.keys().isdisjoint(DEGREES) else {}
    )
    if "tp" in fields:
        dependent |= {"sequence_parallel": tp > 1, "async_tp": layout.async_tp and tp > 1, "etp": None}
    if fields.get("sequence_parallel") is False:
        dependent["async_tp"] = False
    if cp == 1:
        dependent["cp_variant"] = cp_variant_names()[0]
    if fields.keys() & {"pp", "num_virtual_stages"}:
        dependent |= {
            "num_virtual_stages": virtual,
            "schedule": natural_schedule(pp, virtual),
            "layers_per_stage": None,
        }
    if fields.get("recompute", layout.recompute) == "none":
        dependent["recompute_layers"] = None
    if fields.get("zero_stage") and layout.zero_stage == 0:
        dependent |= {"fsdp": layout.dp, "dp": 1}
    changed = replace(layout, **{**dependent, **fields})
    return fill_devices(changed, changed.num_devices if num_devices is None else num_devices)


def fill_devices(layout: Layout, num_devices: int) -> Layout:
    """Return the layout with replicas on all devices: over `fsdp` under ZeRO, else over `dp`."""
    num_replicas = max(1, num_devices // (layout.tp * layout.cp * layout.pp))
    if layout.zero_stage == 0:
        return (
            replace(layout, dp=num_replicas, fsdp=1, ep=1, etp=None)
            if layout.fsdp > 1
            else replace(layout, dp=num_replicas)
        )
    dp = layout.dp if num_replicas % layout.dp == 0 else 1
    fsdp = num_replicas // dp
    zero = layout.zero_stage if fsdp * layout.cp > 1 else 0
    ep = layout.ep if fsdp % layout.ep == 0 or layout.etp is not None else math.gcd(layout.ep, fsdp)
    return replace(layout, dp=dp, fsdp=fsdp, zero_stage=zero, ep=ep)
