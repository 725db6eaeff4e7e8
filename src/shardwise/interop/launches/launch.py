"""The input of a framework: a model, a job, a layout and the machines; as one value, and as named parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.layout.layers_per_stage import layers_by_virtual_stage, stage_placement
from shardwise.layout.layout import Layout, layout_from_fields
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.numerics import Gating, Numerics, Rotary
from shardwise.search.plan import Plan
from shardwise.values.errors import InputError

# Fields of a model that do not affect a run: names, sources, and what a config says beside.
COSTLESS_FIELDS = ("name", "source", "nominal_num_params", "numerics", "max_positions")
LaunchFields = Mapping[str, Any]  # by dotted name: model.d_model, numerics.rotary.base, job.seq_len, layout.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """How many devices there are, and how many of them share a host; of tori how many slices they are, and which chip's."""

    num_devices: int
    devices_per_node: int
    num_pods: int = 1
    chip: str = ""

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A training run as it is given to a framework; with the plan that it is, where there is one."""

    model: Architecture
    job: Job
    layout: Layout
    machines: Machines
    plan: Plan | None = None

    def fields(self) -> dict[str, Any]:
        """All parts by dotted name. `layout.layers_per_stage` are the layers of each virtual stage. The place of
        ranks is not a part: it
        follows from the order in which a target numbers them."""
        model = {
            one.name: getattr(self.model, one.name) for one in fields(self.model) if one.name not in COSTLESS_FIELDS
        }
        if self.model.structure.has_learned_positions:
            model["max_positions"] = self.model.max_positions  # the rows of a table of weights
        job = {one.name: getattr(self.job, one.name) for one in fields(self.job) if one.name != "overlap"}
        job["global_batch_seqs"] = self.job.num_seqs
        del job["global_batch_tokens"]
        layout = {one.name: getattr(self.layout, one.name) for one in fields(self.layout)}
        del layout["layers_per_stage"], layout["placement"]
        layout["stages"] = layers_by_virtual_stage(self.model, self.layout)
        every = {"model": model, "numerics": dict(_flatten(asdict(self.model.numerics))), "job": job, "layout": layout}
        return {f"{group}.{name}": value for group, own in every.items() for name, value in own.items()}


def _flatten(values: LaunchFields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def cluster_machines(cluster: Cluster) -> Machines:
    """The hosts of a cluster: of so many devices as its chip has on one, or as its innermost tier joins."""
    inner = cluster.topology.levels[0] if isinstance(cluster.topology, Switched) else None
    per_node = cluster.chip.devices_per_host or inner or cluster.num_devices
    pods = cluster.topology.num_pods if isinstance(cluster.topology, Pods) else 1
    return Machines(
        num_devices=cluster.num_devices, devices_per_node=min(per_node, cluster.num_devices), num_pods=pods,
        chip=cluster.chip.name,
    )  # fmt: skip


def launch_from_plan(plan: Plan) -> Launch:
    """What a plan says to whoever runs it."""
    where = cluster_machines(plan.cluster)
    return Launch(model=plan.model, job=plan.job, layout=plan.layout, machines=where, plan=plan)


def launch_from_fields(parts: LaunchFields, machines: Machines, model: Architecture | None = None) -> Launch:
    """A launch from its parts; what is missing takes the usual value. A `model` given is taken as it is.

    Raises `InputError` for parts that no launch has together.
    """
    own = {name: _fields_of_group(parts, name) for name in ("model", "job", "layout")}
    if model is None:
        model = with_numerics(Architecture(**{"name": "model", **own["model"]}), parts)
    seqs, stages = own["job"].pop("global_batch_seqs"), own["layout"].pop("stages", None)
    job = Job(global_batch_tokens=seqs * own["job"]["seq_len"], **own["job"])
    layout = with_stages(layout_from_fields(own["layout"]), model, stages)
    return Launch(model=model, job=job, layout=layout, machines=machines)


def with_numerics(model: Architecture, parts: LaunchFields) -> Architecture:
    """The model with those constants of its arithmetic that some parts say. Raises `InputError` for some that no model has."""
    return replace(model, numerics=_read_numerics(_fields_of_group(parts, "numerics"), model.numerics))


def with_stages(layout: Layout, model: Architecture, stages: Sequence[int] | None) -> Layout:
    """The layout whose virtual stages have these layers; None: as many as is natural. Raises `InputError` where none has."""
    if stages is None or layers_by_virtual_stage(model, layout) == tuple(stages):
        return layout
    placement = stage_placement(layout)
    if len(stages) != len(placement.ranks) or sum(stages) != model.num_layers:
        raise InputError(
            f"layout: found {len(stages)} stages of {sum(stages)} layers together; {len(placement.ranks)} stages of "
            f"{model.num_layers} are required"
        )
    found = replace(layout, layers_per_stage=placement.sum_by_rank(tuple(stages)))
    if layers_by_virtual_stage(model, found) != tuple(stages):
        raise InputError(f"layout: stages of {','.join(map(str, stages))} layers are dealt out as no layout has them")
    return found


def _as_dict(value: Rotary | Gating | None) -> dict[str, Any]:
    return {} if value is None else asdict(value)


def _fields_of_group(parts: LaunchFields, name: str) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in parts.items() if key.startswith(f"{name}.")}


def _read_numerics(given: LaunchFields, usual: Numerics) -> Numerics:
    """Constants by dotted name; those of the parts of numerics (rotary angles, gates) too."""
    kinds: Mapping[str, type[Rotary] | type[Gating]] = {"rotary": Rotary, "local_rotary": Rotary, "gating": Gating}
    found: dict[str, Any] = {name: value for name, value in given.items() if "." not in name}
    for name, kind in kinds.items():
        inner = _fields_of_group(given, name)
        if inner:
            found[name] = kind(**{**_as_dict(getattr(usual, name)), **inner})
    return replace(usual, **found)
