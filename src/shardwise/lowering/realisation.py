"""A layout as the engine realises it: groups of parameters, and every collective of a step with format, bytes and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from shardwise.derive.derivation import derived_unit
from shardwise.dtypes import bytes_per_element
from shardwise.errors import chosen
from shardwise.layout.family import Family, atomic_degrees, family_of
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of
from shardwise.layout.placement import ATOMS, AXIS_ORDERS
from shardwise.lowering.groups import Group, bucket_groups, unit_groups
from shardwise.lowering.parameters import Parameter, parameters, unit_paths
from shardwise.lowering.realise import realise
from shardwise.lowering.reductions import BUCKET_BYTES, REDUCTIONS, Reduction
from shardwise.model.architecture import Architecture
from shardwise.model.program import Role
from shardwise.precision import Precision
from shardwise.sharding.collective import Issued, Kind
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes

Statistics = Literal["micro_batch", "step", "never"]


@dataclass(frozen=True, kw_only=True)
class Realisation:
    """How the engine runs a layout: what of its recipe decides which collectives there are.

    `reduction` says when gradients that rest whole are reduced: `after` the backward pass, `per_parameter` as each is ready, or
    `bucketed`, as soon as `bucket_bytes` of them are; `reduce_each_micro_batch`: in every one, not in a step's last only.
    `statistics`: how often the routers' are added up.
    """

    architecture: Architecture
    layout: Layout
    precision: Precision
    reduction: Reduction = "bucketed"
    bucket_bytes: float = BUCKET_BYTES
    reduce_each_micro_batch: bool = False
    statistics: Statistics = "never"

    def __post_init__(self) -> None:
        chosen(dict.fromkeys(REDUCTIONS), self.reduction, "reduction")
        chosen(dict.fromkeys(get_args(Statistics)), self.statistics, "statistics")

    @cached_property
    def family(self) -> Family:
        return family_of(self.layout)

    @cached_property
    def mesh(self) -> Mesh:
        """The atomic axes as the ranks are numbered: the innermost of the placement varies fastest."""
        sizes = atomic_degrees(self.architecture, degrees_of(self.layout))
        order = self.layout.placement.axes if self.layout.placement else AXIS_ORDERS[0]
        atoms = [atom for axis in order for atom in ATOMS.get(axis, (axis,))]
        return Mesh(tuple((atom, int(sizes[atom])) for atom in reversed(atoms)))

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters(self.architecture, self.family)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Units where gradients are scattered as they come; buckets of gradients where they rest whole."""
        if self.layout.zero_stage >= 2:
            return unit_groups(self.parameters, self.architecture, self.mesh)
        most = 0.0 if self.reduction == "per_parameter" else self.bucket_bytes / bytes_per_element(self.reduced)
        return bucket_groups(self.parameters, self.architecture, self.mesh, most)

    @property
    def reduced(self) -> str:
        """The format in which gradients are reduced."""
        return self.precision.gradient_reduction

    @cached_property
    def batch_axes(self) -> Axes:
        """The axes that split sequences, over which the loss is summed."""
        head = derived_unit(self.architecture.structure, self.family, "head")
        return next(one.axes for one in realise(head) if one.role is Role.STATISTIC and one.scope == "step")

    def gathers(self, unit: str) -> tuple[str, ...]:
        """The passes ("forward", "backward") in which a unit needs its weights gathered, as derived."""
        derived = realise(derived_unit(self.architecture.structure, self.family, unit))
        phases = {one.phase for one in derived if one.kind is Kind.ALL_GATHER and one.role is Role.WEIGHT}
        return tuple(phase for phase in ("forward", "backward") if phase in phases)

    def keeps_gathered(self, unit: str) -> bool:
        """Whether a unit's backward pass reads the weights that its forward pass gathered."""
        return bool(derived_unit(self.architecture.structure, self.family, unit).kept)

    def used_groups(self, path: str) -> tuple[Group, ...]:
        """The groups whose weights a unit uses."""
        lent = self.architecture.tied_embeddings and path == "head"
        return tuple(group for group in self.groups if path in group.paths or (lent and "embedding" in group.paths))

    def issued(self, num_micro_batches: int) -> Counter[Issued]:
        """Every collective of a step with its count; over axes of one device there is none."""
        found: Counter[Issued] = Counter()
        for one, times in (
            *self._weights(num_micro_batches),
            *self._gradients(num_micro_batches),
            *self._control(num_micro_batches),
        ):
            axes = self.several(one.axes)
            if axes and times:
                found[one._replace(axes=axes)] += times
        return found

    def several(self, axes: Axes) -> Axes:
        """Of some axes those with more than one device."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def _weights(self, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
        for path, unit in unit_paths(self.architecture):
            for group in self.used_groups(path):
                yield self._gather(group, group.sync.gather), num_micro_batches * len(self.gathers(unit))
        for group in self.groups:
            yield self._gather(group, group.sync.step_gather), 1

    def _gather(self, group: Group, axes: Axes) -> Issued:
        dtype = self.precision.weights
        return Issued(Kind.ALL_GATHER, axes, dtype, _bytes(group.padded_size, dtype), "weights")

    def _gradients(self, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
        steps = num_micro_batches if self.reduce_each_micro_batch else 1
        for group in (group for group in self.groups if group.trained):
            whole, part = (_bytes(size, self.reduced) for size in (group.padded_size, group.shard_size))
            sync = group.sync
            yield Issued(Kind.REDUCE_SCATTER, sync.scatter, self.reduced, whole, "gradients"), num_micro_batches
            yield Issued(Kind.REDUCE_SCATTER, sync.step_scatter, self.reduced, whole, "gradients"), steps
            yield Issued(Kind.ALL_REDUCE, sync.reduce, self.reduced, part, "gradients"), 1 if sync.scatter else steps

    def _control(self, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
        dtype = self.control_dtype
        yield Issued(Kind.ALL_REDUCE, self.batch_axes, dtype, _bytes(1, dtype), "loss"), 1
        for axes in {group.sync.shard for group in self.groups if group.trained}:
            yield Issued(Kind.ALL_REDUCE, axes, dtype, _bytes(1, dtype), "norm"), 1
        layers = self.architecture.num_layers - self.architecture.num_dense_layers
        sums = {"micro_batch": 2, "step": 1, "never": 0}[self.statistics] * layers * self.architecture.num_experts
        times = num_micro_batches if self.statistics == "micro_batch" else 1
        if sums:
            yield Issued(Kind.ALL_REDUCE, self.batch_axes, dtype, _bytes(sums, dtype), "routing"), times

    @property
    def control_dtype(self) -> str:
        """The format of the loss, the norm and the routers' statistics: fp32, or fp64 where the model is in it."""
        return "fp64" if self.precision.activations == "fp64" else "fp32"


def _bytes(elements: int, dtype: str) -> int:
    return round(elements * bytes_per_element(dtype))
