"""A layout as it is in every payload of `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from typing_extensions import TypedDict

from shardwise.hardware import Topology
from shardwise.layout.degrees import atomic_degrees, layout_degrees, num_micro_batches, seqs_per_replica
from shardwise.layout.layers_per_stage import layers_by_stage
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement, cuts_by_axis, default_placement
from shardwise.model import Architecture, Job
from shardwise.values import MergedFields


class PlacementCuts(TypedDict):
    """The part of each network level that each axis takes."""

    cuts: dict[str, list[int]]


class DerivedFields(TypedDict):
    """The layout as text (`--layout` takes it), and what follows from it for a model, a network and a job.

    `placement` is null where the payload has no network.
    """

    text: str
    num_micro_batches: int
    max_seqs_per_replica: int
    layers_per_stage: list[int]
    placement: Annotated[dict[str, Any], MergedFields(Placement, PlacementCuts)] | None


LayoutPayload = Annotated[dict[str, Any], MergedFields(Layout, DerivedFields)]


def layout_payload(layout: Layout, architecture: Architecture, job: Job, topology: Topology | None) -> dict[str, Any]:
    """Return the fields of a layout, with what follows from it for a model, a job and a network.

    >>> from shardwise.hardware.cluster_loading import load_cluster
    >>> from shardwise.model.load import load_model
    >>> job, network = Job(global_batch_tokens=2**20, seq_len=4096), load_cluster("h100:16").topology
    >>> payload = layout_payload(Layout.parse("fsdp=2 tp=8 pp=1"), load_model("llama-3-8b"), job, network)
    >>> payload["tp"], payload["num_micro_batches"], payload["placement"]["cuts"]["fsdp"]
    (8, 128, [1, 2])
    """
    degrees = layout_degrees(layout)
    return {
        "text": str(layout),
        **asdict(layout),
        "num_micro_batches": num_micro_batches(job, degrees),
        "max_seqs_per_replica": seqs_per_replica(job, degrees),
        "layers_per_stage": list(layers_by_stage(architecture, layout)),
        "placement": _placement_payload(layout, architecture, topology) if topology else None,
    }


def _placement_payload(layout: Layout, architecture: Architecture, topology: Topology) -> dict[str, Any]:
    placement = layout.placement or default_placement(topology)
    cuts = cuts_by_axis(topology, placement, atomic_degrees(architecture, layout_degrees(layout)))
    return {**asdict(placement), "cuts": {axis: [cut.size for cut in levels] for axis, levels in cuts.items()}}
