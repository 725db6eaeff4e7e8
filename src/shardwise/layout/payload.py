"""A layout as it is in every payload of `--json`.

Read a layout from its payload. Keys that follow from the others are checked; natural layers per stage are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from shardwise.hardware import Topology
from shardwise.layout.layers_per_stage import (
    MAX_EMPTY_STAGES,
    layers_by_stage,
    natural_layers_by_stage,
    stage_placement,
)
from shardwise.layout.layout import Layout, layout_from_fields, parse_fields
from shardwise.layout.placement import Placement, cuts_by_axis, default_placement
from shardwise.layout.sharding_scheme import atomic_degrees, layout_degrees, num_micro_batches, seqs_per_replica
from shardwise.model import Architecture, Job
from shardwise.values import Flat, InputError, Payload, parse_dataclass
from shardwise.values.payload import known_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts(Payload):
    """Placement of a layout on a network, with the part of each level that each axis takes."""

    placement: Annotated[Placement, Flat]
    cuts: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, layout: Layout, architecture: Architecture, topology: Topology) -> PlacementFacts:
        """Return the placement of a layout on a network: its own, or the default one."""
        placement = layout.placement or default_placement(topology)
        cuts = cuts_by_axis(topology, placement, atomic_degrees(architecture, layout_degrees(layout)))
        return cls(placement=placement, cuts={axis: [cut.size for cut in levels] for axis, levels in cuts.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts(Payload):
    """Facts of a layout for a model, a network and a job: its degrees and choices, and numbers that follow from them.

    `text` is its notation, which `--layout` takes; `placement` is None without a network.

    >>> from shardwise.hardware.cluster_loading import load_cluster
    >>> from shardwise.model.load import load_model
    >>> job, network = Job(global_batch_tokens=2**20, seq_len=4096), load_cluster("h100:16").topology
    >>> facts = LayoutFacts.of(Layout.parse("fsdp=2 tp=8 pp=1"), load_model("llama-3-8b"), job, network)
    >>> facts.layout.tp, facts.num_micro_batches, facts.placement.cuts["fsdp"]
    (8, 128, [1, 2])
    """

    text: str
    layout: Annotated[Layout, Flat]
    num_micro_batches: int
    max_seqs_per_replica: int
    layers_per_stage: Sequence[int]
    placement: PlacementFacts | None

    @classmethod
    def of(cls, layout: Layout, architecture: Architecture, job: Job, topology: Topology | None) -> LayoutFacts:
        """Return the facts of a layout for a model, a job and a network."""
        degrees = layout_degrees(layout)
        return cls(
            text=str(layout), layout=layout, num_micro_batches=num_micro_batches(job, degrees),
            max_seqs_per_replica=seqs_per_replica(job, degrees),
            layers_per_stage=layers_by_stage(architecture, layout),
            placement=PlacementFacts.of(layout, architecture, topology) if topology else None,
        )  # fmt: skip


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


def parse_layout_text(text: str, architecture: Architecture, job: Job, label: str = "layout") -> Layout:
    """Return the layout of a text, in which `num_micro_batches` and `max_seqs_per_replica` may be written too.

    Raises `InputError` for a wrong text, and for derived values that do not follow from the layout, the model and the job.
    """
    values = parse_fields(text, prefix=label, extra_counts=DERIVED_FIELDS)
    derived = {key: values.pop(key) for key in DERIVED_FIELDS if key in values}
    return check_derived_fields(layout_from_fields(values), derived, architecture, job)


def parse_layout_shape(text: str, label: str = "layout") -> Layout:
    """Return the layout of a text; derived values (`DERIVED_FIELDS`) may be written in it too, and are not checked.

    Raises `InputError` for a wrong text.

    >>> parse_layout_shape("fsdp=8 num_micro_batches=4").fsdp
    8
    """
    values = parse_fields(text, prefix=label, extra_counts=DERIVED_FIELDS)
    return layout_from_fields({key: value for key, value in values.items() if key not in DERIVED_FIELDS})


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
