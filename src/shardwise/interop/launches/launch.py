"""`Launch`: the input of a framework (model, job, layout, machines) as one value, and as named fields of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardwise.hardware import Cluster, Pods, Switched
from shardwise.layout import Layout, layers_by_virtual_stage, layout_from_fields, stage_placement
from shardwise.model import LABEL_FIELDS, Architecture, Gating, Job, Numerics, Rotary
from shardwise.model.parameters_and_flops import require_adapters
from shardwise.search import Plan
from shardwise.values import InputError

# Fields of a model that affect no cost.
COSTLESS_FIELDS = (*LABEL_FIELDS, "numerics", "max_positions")
LaunchFields = Mapping[str, Any]  # by dotted name: model.d_model, numerics.rotary.base, job.seq_len, layout.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The devices of a launch and how they are grouped.

    `devices_per_node` share a host. `num_pods` counts the slices of a TPU cluster; `chip` is the chip's name, if known.
    """

    num_devices: int
    devices_per_node: int
    num_pods: int = 1
    chip: str = ""

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A training run as a framework gets it; `plan` is the plan that it was made from, if any."""

    model: Architecture
    job: Job
    layout: Layout
    machines: Machines
    plan: Plan | None = None

    @property
    def seqs_at_once(self) -> int:
        """Sequences of one micro-batch on all replicas."""
        return self.layout.num_replicas * self.layout.micro_batch_seqs

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.job.num_seqs // self.seqs_at_once

    @property
    def num_steps(self) -> int | None:
        """Steps of the run, at least one, or None if the job has no number of tokens."""
        return max(round(self.job.tokens / self.job.global_batch_tokens), 1) if self.job.tokens else None

    def fields(self) -> dict[str, Any]:
        """Return every field by dotted name, such as `layout.tp`.

        `layout.stages` holds the layers of each virtual stage, in place of `layers_per_stage`. The placement of ranks is no
        field: it follows from the order in which a target numbers them.
        """
        names = [field.name for field in fields(self.model) if field.name not in COSTLESS_FIELDS]
        model = {name: getattr(self.model, name) for name in names}
        if self.model.structure.has_learned_positions:
            model["max_positions"] = self.model.max_positions  # each position is a row of weights
        model["lora_targets"] = tuple(sorted(self.model.structure.lora_targets))  # groups are written as what they hold
        job = {field.name: getattr(self.job, field.name) for field in fields(self.job) if field.name != "overlap"}
        job["global_batch_seqs"] = self.job.num_seqs
        del job["global_batch_tokens"]
        layout = {field.name: getattr(self.layout, field.name) for field in fields(self.layout)}
        del layout["layers_per_stage"], layout["placement"]
        layout["stages"] = layers_by_virtual_stage(self.model, self.layout)
        groups = {"model": model, "numerics": dict(_flatten(asdict(self.model.numerics))), "job": job, "layout": layout}
        return {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}


def _flatten(tree: LaunchFields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def plain_replica_fields(replicas: int, ep: int, tp: int, etp: int | None) -> LaunchFields:
    """Return the layout's fields of replicas without ZeRO: `fsdp` is what expert parallelism borrows, and `dp` the rest.

    Raises `InputError` if the replicas cannot lend as much.
    """
    lent = max(ep * (etp or tp) // tp, 1)
    if replicas % lent:
        raise InputError(f"expert parallelism of {ep} takes {lent} of {replicas} replicas; a divisor is required")
    return {"layout.dp": replicas // lent, "layout.fsdp": lent, "layout.zero_stage": 0}


def cluster_machines(cluster: Cluster) -> Machines:
    """Return the machines of a cluster.

    A node has as many devices as the chip's host, or else as the innermost tier of the network.
    """
    innermost_size = cluster.topology.levels[0] if isinstance(cluster.topology, Switched) else None
    devices_per_node = cluster.chip.devices_per_host or innermost_size or cluster.num_devices
    num_pods = cluster.topology.num_pods if isinstance(cluster.topology, Pods) else 1
    return Machines(
        num_devices=cluster.num_devices, devices_per_node=min(devices_per_node, cluster.num_devices), num_pods=num_pods,
        chip=cluster.chip.name,
    )  # fmt: skip


def launch_from_plan(plan: Plan) -> Launch:
    """Return the launch of a plan."""
    machines = cluster_machines(plan.cluster)
    return Launch(model=plan.model, job=plan.job, layout=plan.layout, machines=machines, plan=plan)


def launch_from_fields(launch_fields: LaunchFields, machines: Machines, model: Architecture | None = None) -> Launch:
    """Build a launch from its fields by dotted name; missing ones take their defaults. A `model` replaces the model's fields,
    but for its adapters.

    Raises `InputError` if the fields contradict one another, and for adapters of matrices that the model lacks.
    """
    groups = {name: _fields_of_group(launch_fields, name) for name in ("model", "job", "layout")}
    if model is None:
        model = with_numerics(Architecture(**{"name": "model", **groups["model"]}), launch_fields)
    elif adapters := {name: value for name, value in groups["model"].items() if name.startswith("lora_")}:
        model = replace(model, **adapters)
    require_adapters(model)
    num_seqs, stages = groups["job"].pop("global_batch_seqs"), groups["layout"].pop("stages", None)
    job = Job(global_batch_tokens=num_seqs * groups["job"]["seq_len"], **groups["job"])
    layout = with_stages(layout_from_fields(groups["layout"]), model, stages)
    return Launch(model=model, job=job, layout=layout, machines=machines)


def with_numerics(model: Architecture, launch_fields: LaunchFields) -> Architecture:
    """Return the model with the constants of its arithmetic that `launch_fields` sets. Raises `InputError` for invalid ones."""
    return replace(model, numerics=_read_numerics(_fields_of_group(launch_fields, "numerics"), model.numerics))


def with_stages(layout: Layout, model: Architecture, stages: Sequence[int] | None) -> Layout:
    """Return the layout with these layers on its virtual stages, or unchanged for None or if it already has them.

    Raises `InputError` if no layout splits the layers like this.
    """
    if stages is None or layers_by_virtual_stage(model, layout) == tuple(stages):
        return layout
    placement = stage_placement(layout)
    if len(stages) != len(placement.ranks) or sum(stages) != model.num_layers:
        raise InputError(
            f"layout: found {len(stages)} stages of {sum(stages)} layers together; {len(placement.ranks)} stages of "
            f"{model.num_layers} are required"
        )
    new_layout = replace(layout, layers_per_stage=placement.sum_by_rank(tuple(stages)))
    if layers_by_virtual_stage(model, new_layout) != tuple(stages):
        raise InputError(f"layout: stages of {','.join(map(str, stages))} layers are dealt out as no layout has them")
    return new_layout


def _as_dict(constants: Rotary | Gating | None) -> dict[str, Any]:
    return {} if constants is None else asdict(constants)


def _fields_of_group(launch_fields: LaunchFields, group: str) -> dict[str, Any]:
    prefix = f"{group}."
    return {field.removeprefix(prefix): value for field, value in launch_fields.items() if field.startswith(prefix)}


def _read_numerics(constants: LaunchFields, default: Numerics) -> Numerics:
    """Return numerics with constants by dotted name; those of nested values (rotary angles, gates) are set in place."""
    nested_types: dict[str, type[Rotary] | type[Gating]]
    nested_types = {"rotary": Rotary, "local_rotary": Rotary, "gating": Gating}
    changes: dict[str, Any] = {name: value for name, value in constants.items() if "." not in name}
    for name, nested_type in nested_types.items():
        nested_constants = _fields_of_group(constants, name)
        if nested_constants:
            changes[name] = nested_type(**{**_as_dict(getattr(default, name)), **nested_constants})
    return replace(default, **changes)
