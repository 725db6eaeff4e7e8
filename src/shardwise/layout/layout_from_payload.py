"""Read a layout from its payload's keys; fields that follow from the others are checked, natural layers per stage dropped."""

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
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.values.errors import InputError
from shardwise.values.plain_data import known_fields, parse_dataclass

# Keys of a layout's payload that follow from the others; they are checked, not trusted.
DERIVED_FIELDS = ("num_micro_batches", "max_seqs_per_replica")


def parse_layout(payload: Mapping[str, Any], architecture: Architecture, job: Job) -> Layout:
    """A layout from its payload's keys. Derived keys may be given, and must then be what follows from the others.

    `layers_per_stage` may say what is natural; only other numbers are a choice, and are kept as one.
    """
    field_values = dict(parse_dataclass(dict[str, Any], payload, "layout"))
    derived_values, text = (
        {key: field_values.pop(key) for key in DERIVED_FIELDS if key in field_values},
        field_values.pop("text", None),
    )
    if isinstance(field_values.get("placement"), Mapping):
        field_values["placement"] = known_fields(Placement, field_values["placement"])
    layout = check_derived_fields(parse_dataclass(Layout, field_values, "layout"), derived_values, architecture, job)
    if text is not None and _without_placement(Layout.parse(str(text)), architecture) != _without_placement(
        layout, architecture
    ):
        raise InputError(
            f"layout: text is {text!r}, but {str(layout)!r} follows from the rest; leave it out or change the others"
        )
    return layout


def _without_placement(layout: Layout, architecture: Architecture) -> Layout:
    """The layout without its placement, which a text may leave out."""
    return replace(_drop_default_stages(layout, architecture), placement=None)


def check_derived_fields(
    layout: Layout, derived_values: Mapping[str, Any], architecture: Architecture, job: Job
) -> Layout:
    """A layout of a model and job. Raises `InputError` where what is given of `DERIVED_FIELDS` does not follow from it."""
    layout = _drop_default_stages(layout, architecture)
    degrees = layout_degrees(layout)
    expected_values = {
        "num_micro_batches": num_micro_batches(job, degrees),
        "max_seqs_per_replica": seqs_per_replica(job, degrees),
    }
    wrong = [
        f"layout: {key} is {derived_values[key]!r}, but {value!r} follows from the rest; leave it out or change the degrees"
        for key, value in expected_values.items()
        if key in derived_values and derived_values[key] != value
    ]
    if wrong:
        raise InputError(*wrong)
    return layout


def _drop_default_stages(layout: Layout, architecture: Architecture) -> Layout:
    """The layout without layers per stage, if these are the natural ones."""
    if (
        layout.pp * layout.num_virtual_stages > architecture.num_layers + MAX_EMPTY_STAGES
    ):  # the legality rules report what is wrong
        return layout
    return (
        replace(layout, layers_per_stage=None)
        if layers_by_stage(architecture, layout) == natural_layers_by_stage(architecture, stage_placement(layout))
        else layout
    )
