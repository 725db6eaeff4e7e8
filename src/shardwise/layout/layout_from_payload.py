"""Read a layout from its payload. Keys that follow from the others are checked; natural layers per stage are dropped."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.layout.degrees import layout_degrees, num_micro_batches, seqs_per_replica
from shardwise.layout.layers_per_stage import (
    MAX_EMPTY_STAGES,
    layers_by_stage,
    natural_layers_by_stage,
    stage_placement,
)
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement
from shardwise.model import Architecture, Job
from shardwise.values import InputError, parse_dataclass
from shardwise.values.plain_data import known_fields

# Keys of a layout's payload that follow from the others; they are checked, not trusted.
DERIVED_FIELDS = ("num_micro_batches", "max_seqs_per_replica")


def parse_layout(payload: Mapping[str, Any], architecture: Architecture, job: Job) -> Layout:
    """Return the layout of a payload. Derived keys may be given, and must then be what follows from the others.

    `layers_per_stage` may hold the natural numbers; only other ones are a choice, and are kept as one. Raises `InputError`.
    """
    fields = dict(parse_dataclass(dict[str, Any], payload, "layout"))
    derived, text = ({key: fields.pop(key) for key in DERIVED_FIELDS if key in fields}, fields.pop("text", None))
    if isinstance(fields.get("placement"), Mapping):
        fields["placement"] = known_fields(Placement, fields["placement"])
    layout = check_derived_fields(parse_dataclass(Layout, fields, "layout"), derived, architecture, job)
    if text is not None and _without_placement(Layout.parse(str(text)), architecture) != _without_placement(
        layout, architecture
    ):
        raise InputError(
            f"layout: text is {text!r}, but {str(layout)!r} follows from the rest; leave it out or change the others"
        )
    return layout


def _without_placement(layout: Layout, architecture: Architecture) -> Layout:
    return replace(_drop_default_stages(layout, architecture), placement=None)


def check_derived_fields(layout: Layout, derived: Mapping[str, Any], architecture: Architecture, job: Job) -> Layout:
    """Return the layout without natural layers per stage. Raises `InputError` where a value of `DERIVED_FIELDS` does not
    follow from it."""
    layout = _drop_default_stages(layout, architecture)
    degrees = layout_degrees(layout)
    expected = {
        "num_micro_batches": num_micro_batches(job, degrees),
        "max_seqs_per_replica": seqs_per_replica(job, degrees),
    }
    wrong = [
        f"layout: {key} is {derived[key]!r}, but {value!r} follows from the rest; leave it out or change the degrees"
        for key, value in expected.items()
        if key in derived and derived[key] != value
    ]
    if wrong:
        raise InputError(*wrong)
    return layout


def _drop_default_stages(layout: Layout, architecture: Architecture) -> Layout:
    if (
        layout.pp * layout.num_virtual_stages > architecture.num_layers + MAX_EMPTY_STAGES
    ):  # the legality rules report what is wrong
        return layout
    return (
        replace(layout, layers_per_stage=None)
        if layers_by_stage(architecture, layout) == natural_layers_by_stage(architecture, stage_placement(layout))
        else layout
    )
