"""A layout as people write it, "tp=8 pp=4 fsdp=16 recompute=selective": its words, and natural values for the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from shardwise.changes import convert
from shardwise.errors import InputError
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement
from shardwise.names import did_you_mean
from shardwise.schedule.schedule import natural_schedule
from shardwise.units import parse_count

LIKE: Mapping[str, Any] = {field.name: field.default for field in fields(Layout)}
ABSENT: Mapping[str, str] = {"etp": "none", "recompute_layers": "all"}  # how None is written
# What others call a field: Megatron-LM's and torchtitan's options, and their usual abbreviations.
ELSEWHERE: Mapping[str, str] = {
    "vpp": "num_virtual_stages", "vp": "num_virtual_stages", "mbs": "micro_batch_seqs", "micro_batch_size": "micro_batch_seqs",
    "sp": "sequence_parallel", "zero": "zero_stage", "dp_shard": "fsdp", "dp_replicate": "dp",
    "activation_checkpoint": "recompute",
}  # fmt: skip


def parse_fields(text: str, *, what: str = "layout", also: Collection[str] = ()) -> dict[str, Any]:
    """The values of a layout's fields by name, and whole numbers for the names in `also`.

    Raises `InputError` for a word that is no KEY=VALUE, a key that is not known or given twice, and a value of another kind;
    `what` stands before the problem.
    """
    found: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        known = (*LIKE, *also)
        if not equals or key not in known:
            hint = f" (did you mean {ELSEWHERE[key]!r}?)" if key in ELSEWHERE else did_you_mean(key, known)
            raise InputError(f"{what}: found {word!r}{hint}; KEY=VALUE with a key of {', '.join(known)} is required")
        if key in found:
            raise InputError(f"{what}: {key} is given twice")
        found[key] = _value(key, value, what)
    return found


def layout_of(given: Mapping[str, Any]) -> Layout:
    """The layout with these fields. Fields that are left out take natural values: ZeRO-3 where fsdp > 1, sequence parallelism
    where tp > 1, the natural schedule for the stages. Raises `InputError` for values that no layout has."""
    fsdp, tp, pp = (given.get(axis, 1) for axis in ("fsdp", "tp", "pp"))
    natural = {
        "zero_stage": natural_zero_stage(fsdp), "sequence_parallel": tp > 1,
        "schedule": natural_schedule(pp, given.get("num_virtual_stages", 1)),
    }  # fmt: skip
    return Layout(**{**natural, **given})


def natural_zero_stage(fsdp: int) -> int:
    """The natural ZeRO stage for a degree of fsdp."""
    return 3 if fsdp > 1 else 0


def _value(key: str, text: str, what: str) -> Any:
    label = f"{what}: {key}"
    if text.lower() == ABSENT.get(key):
        return None
    if key == "placement":
        return _placement(text, label)
    if key == "layers_per_stage":
        return tuple(parse_count(part, what=label, least=0) for part in text.strip("[]").split(","))
    return parse_count(text, what=label) if key in ABSENT else convert(text, LIKE.get(key, 1), label)


def _placement(text: str, label: str) -> Placement:
    axes, at, levels = text.partition("@")
    if not at or not all(level.isdecimal() for level in levels.split(",")):
        raise InputError(f"{label}: found {text!r}; AXES@LEVELS is required, such as tp,cp,fsdp,dp,pp@0,1")
    return Placement(axes=tuple(axes.split(",")), levels=tuple(int(level) for level in levels.split(",")))
