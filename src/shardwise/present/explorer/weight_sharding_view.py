"""View of the sharding: every weight in the named-axis notation, at rest and in use, and the ranks of its shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from shardwise.derive import derived_unit, pad_vocabulary, weight_use_spec
from shardwise.derive.tensor_specs import (
    gradient_resting_spec,
    hidden_spec,
    optimizer_resting_spec,
    weight_resting_spec,
)
from shardwise.layout import TP_AXES, Layout, ShardingScheme, atomic_degrees, default_placement, layout_degrees
from shardwise.model import unit_counts
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.number_provenance import EXACT, Field, Fields, fields_payload
from shardwise.present.explorer.request import ViewRequest, head
from shardwise.price import Pricing
from shardwise.sharding import Mesh, Spec

ATOMS = {"tp": TP_AXES, "fsdp": ("fsdp", "ep")}  # the axes that are products of atomic ones, major first
RULE = "Austin et al., How to Scale Your Model, 2025, chapter 3: A[I_X, J_Y] on a mesh; derive/tensor_specs.py"
FIELDS: Fields = {
    "units.*.weights.*.elements": Field("elements of the weight", "the product of its dims", "", "model/decoder_block.py", EXACT),
    "units.*.weights.*.shards.*.elements": Field(
        "elements of a device's part, of the fullest device", "Π ⌈dim / product of the axes that it is split over⌉", "", RULE,
        EXACT, {"elements of the weight": "units.*.weights.*.elements", "copies": "units.*.weights.*.shards.*.copies"},
    ),
    "units.*.weights.*.shards.*.copies": Field(
        "devices of a stage that hold the same part", "devices / product of the axes in the spec", "", RULE, EXACT,
    ),
    "mesh.*.size": Field("degree of the axis", "given by the layout", "", "the layout", EXACT),
}  # fmt: skip
MAX_PARTS = 16  # of a dim that are drawn
MAX_RANKS = 8  # named of those that hold a part


def notation(request: ViewRequest) -> dict[str, Any]:
    """Return the mesh in the order of ranks, and the weights of each kind of unit.

    A weight has the specs at rest, in use, of its gradient and of the optimizer's state, the shape of a device's part, and the
    ranks that hold each part.
    """
    request.require_legal()
    plan = request.plan
    scheme = Pricing(plan.problem, plan.layout).scheme
    mesh = mesh_of(request, plan.layout)
    stage_mesh = Mesh(tuple(pair for pair in mesh.axes if pair[0] != "pp"))
    unsplit = [axis for axis, size in mesh.axes if size == 1]
    units = {}
    for kind, times in unit_counts(plan.model).items():
        unit = derived_unit(scheme, kind)
        sizes = pad_vocabulary(plan.model.dims, mesh)
        weights = [
            _weight(name, dims, _specs(unit.scheme, dims, unsplit), sizes, stage_mesh)
            for name, dims in unit.weights.items()
        ]
        units[kind] = {"times": times, "weights": weights}
    return head(request) | {
        "mesh": [{"axis": axis, "size": size} for axis, size in mesh.axes], "num_devices": mesh.num_devices,
        "hidden": str(hidden_spec(scheme).gather_axes(unsplit)), "units": units, "controls": controls(request),
        "fields": fields_payload(FIELDS),
    }  # fmt: skip


def _specs(scheme: ShardingScheme, dims: tuple[str, ...], unsplit: Collection[str]) -> dict[str, Spec]:
    """Return the specs of a weight, its gradient and its optimizer state, without the `unsplit` axes."""
    use = weight_use_spec(scheme, dims)
    specs = {
        "rest": weight_resting_spec(scheme, dims), "use": use, "gradient": gradient_resting_spec(scheme, use),
        "optimizer": optimizer_resting_spec(scheme, dims),
    }  # fmt: skip
    return {
        state: spec.gather_axes(unsplit).with_partial(axis for axis in spec.partial if axis not in unsplit)
        for state, spec in specs.items()
    }


def mesh_of(request: ViewRequest, layout: Layout) -> Mesh:
    """Return the atomic axes in the order of ranks, the innermost axis of the placement last."""
    placement = layout.placement or default_placement(request.cluster.topology)
    sizes = atomic_degrees(request.model, layout_degrees(replace(layout, placement=placement)))
    atoms = [atom for axis in reversed(placement.axes) for atom in ATOMS.get(axis, (axis,))]
    return Mesh(tuple((atom, int(sizes[atom])) for atom in atoms))


def _weight(
    name: str, dims: tuple[str, ...], specs: dict[str, Spec], sizes: dict[str, int], mesh: Mesh
) -> dict[str, Any]:
    elements = math.prod(sizes[dim] for dim in dims)
    return {
        "name": name, "shape": {dim: sizes[dim] for dim in dims}, "elements": elements,
        "specs": {state: str(spec) for state, spec in specs.items()},
        "shards": {state: _shard(spec, sizes, mesh) for state, spec in specs.items()},
    }  # fmt: skip


def _shard(spec: Spec, sizes: dict[str, int], mesh: Mesh) -> dict[str, Any]:
    """Return the shape and elements of the fullest device's part, the copies of a part, and the ranks that hold each."""
    parts = [mesh.size(axis for axis in axes if axis in mesh.names) for axes in spec.axes]
    shape = [-(-sizes[dim] // degree) for dim, degree in zip(spec.dims, parts, strict=True)]
    return {"shape": shape, "elements": math.prod(shape), "parts": parts, "copies": mesh.num_devices // max(1, math.prod(parts)),
            "holders": list(_holders(spec, parts, mesh))}  # fmt: skip


def _holders(spec: Spec, parts: list[int], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield for each part the first ranks of the first pipeline stage that hold it."""
    if math.prod(min(number, MAX_PARTS) for number in parts) > MAX_PARTS**2 or mesh.num_devices > 1 << 12:
        return
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(mesh.coordinates()):
        place = tuple(mesh.position(coordinate, [axis for axis in axes if axis in mesh.names]) for axes in spec.axes)
        if all(index < MAX_PARTS for index in place):
            ranks.setdefault(place, []).append(rank)
    for place, holders in sorted(ranks.items()):
        yield {"place": place, "ranks": holders[:MAX_RANKS], "num_ranks": len(holders)}
