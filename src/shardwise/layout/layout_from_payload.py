"""Read a layout from its payload's keys; fields that follow from the others are checked, natural layers per stage dropped."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.layout.degrees import degrees_of, num_micro_batches, seqs_per_replica
from shardwise.layout.layers_per_stage import MOST_EMPTY, held_layers, layers_per_stage, stages_on_ranks
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.values.errors import InputError
from shardwise.values.plain_data import _only, parse

# Keys of a layout's payload that follow from the others; they are checked, not trusted.
DERIVED = ("num_micro_batches", "max_seqs_per_replica")


def parse_layout(payload: Mapping[str, Any], model: Architecture, job: Job) -> Layout:
    """A layout from its payload's keys. Derived keys may be given, and must then be what follows from the others.

    `layers_per_stage` may say what is natural; only other numbers are a choice, and are kept as one.
    """
    own = dict(parse(dict[str, Any], payload, "layout"))
    given, text = {key: own.pop(key) for key in DERIVED if key in own}, own.pop("text", None)
    if isinstance(own.get("placement"), Mapping):
        own["placement"] = _only(Placement, own["placement"])
    layout = settled_layout(parse(Layout, own, "layout"), given, model, job)
    if text is not None and _placed_anywhere(Layout.parse(str(text)), model) != _placed_anywhere(layout, model):
        raise InputError(
            f"layout: text is {text!r}, but {str(layout)!r} follows from the rest; leave it out or change the others"
        )
    return layout


def _placed_anywhere(layout: Layout, model: Architecture) -> Layout:
    """The layout without its placement, which a text may leave out."""
    return replace(_natural(layout, model), placement=None)


def settled_layout(layout: Layout, given: Mapping[str, Any], model: Architecture, job: Job) -> Layout:
    """A layout of a model and job. Raises `InputError` where what is given of `DERIVED` does not follow from it."""
    layout = _natural(layout, model)
    degrees = degrees_of(layout)
    follows = {
        "num_micro_batches": num_micro_batches(job, degrees),
        "max_seqs_per_replica": seqs_per_replica(job, degrees),
    }
    wrong = [
        f"layout: {key} is {given[key]!r}, but {value!r} follows from the rest; leave it out or change the degrees"
        for key, value in follows.items()
        if key in given and given[key] != value
    ]
    if wrong:
        raise InputError(*wrong)
    return layout


def _natural(layout: Layout, model: Architecture) -> Layout:
    """The layout without layers per stage, if these are the natural ones."""
    if layout.pp * layout.num_virtual_stages > model.num_layers + MOST_EMPTY:  # the legality rules report what is wrong
        return layout
    return (
        replace(layout, layers_per_stage=None)
        if held_layers(model, layout) == layers_per_stage(model, stages_on_ranks(layout))
        else layout
    )
