"""A layout in numbers: flat arrays of parameters, and every collective of a step with format, bytes and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.derive.derivation import Unit, derived_unit
from shardwise.dtypes import bytes_per_element
from shardwise.issuing import IssuePolicy
from shardwise.layout.family import Family, atomic_degrees, family_of
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of
from shardwise.layout.placement import ATOMS, AXIS_ORDERS
from shardwise.lowering.control import NUM_ROUTERS, control_traffic, norm_axes, routing_axes
from shardwise.lowering.flat import FlatArrays
from shardwise.lowering.groups import Group, groups_of
from shardwise.lowering.instruction import Start
from shardwise.lowering.parameters import TIED, Parameter, parameters, unit_paths, used_parameters
from shardwise.lowering.template import Template, unit_template
from shardwise.lowering.traffic import Traffic, unit_traffic
from shardwise.lowering.weights import rests_whole, weight_groups
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICTS
from shardwise.model.program import Role
from shardwise.optimizer import DEFAULT
from shardwise.precision import Precision
from shardwise.sharding.collective import ROWS, Issued, Kind
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes
from shardwise.symbolic import Values


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A layout of a model in numbers, as an engine with this policy runs it in this precision recipe with this optimizer."""

    architecture: Architecture
    layout: Layout
    precision: Precision
    policy: IssuePolicy = field(default_factory=IssuePolicy)
    seq_len: int | None = None  # of which the bytes of activations' collectives depend
    optimizer: str = DEFAULT

    @cached_property
    def family(self) -> Family:
        return replace(family_of(self.layout), optimizer=self.optimizer)

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
        most = self.most_elements if rests_whole(self.family) else None
        return groups_of(self.parameters, self.architecture, self.mesh, most)

    @property
    def most_elements(self) -> float:
        """Elements of gradients that a bucket holds at most."""
        return self.policy.most_bytes / bytes_per_element(self.reduced)

    @property
    def reduced(self) -> str:
        """The format in which gradients are reduced."""
        return self.precision.gradient_reduction

    @cached_property
    def values(self) -> Values:
        """Sizes of the model's dims, and the degrees."""
        degrees = atomic_degrees(self.architecture, degrees_of(self.layout))
        return Values({**self.architecture.dims, NUM_ROUTERS: self.architecture.num_routers, **degrees})

    @cached_property
    def batch_axes(self) -> Axes:
        """The axes of more than one device that split a batch by sequences."""
        return self.several(replace(self.family, experts=self.architecture.num_experts > 0).batch_axes)

    @cached_property
    def loss_axes(self) -> Axes:
        """Those that split its tokens, over which the loss is summed."""
        loss = (one.axes for one in self.traffic("head") if one.role is Role.STATISTIC and one.scope == "step")
        return self.several(next(loss))

    @property
    def words_of_rank(self) -> int:
        """How many words of the vocabulary a rank has logits of."""
        return self.architecture.vocab_size // self.mesh.size(self.used["head"][TIED].use.axes_of("V"))

    @cached_property
    def norm_axes(self) -> Axes:
        """Those that split gradients, over which the squares of the norm are summed."""
        return self.several(norm_axes(self.architecture.structure, self.family))

    @cached_property
    def routing_axes(self) -> Axes:
        """Those that split tokens where their experts are chosen, over which the routers' statistics are summed."""
        experts = self.architecture.num_experts > 0
        return self.several(routing_axes(self.architecture.structure, self.family)) if experts else ()

    @cached_property
    def axes(self) -> frozenset[Axes]:
        """Every group of axes that a step has a collective over."""
        used = {self.loss_axes, self.norm_axes, self.routing_axes, *(a for group in self.groups for a in group.sync)}
        used |= {self.several(one.axes) for one in self._activations()}
        return frozenset(used - {()})

    @cached_property
    def single(self) -> frozenset[str]:
        """The axes of one device."""
        return frozenset(axis for axis, size in self.mesh.axes if size == 1)

    def unit(self, name: str) -> Unit:
        """A unit as derived for the layout."""
        return derived_unit(self.architecture.structure, self.family, name)

    def traffic(self, name: str) -> tuple[Traffic, ...]:
        """The collectives of a unit."""
        return unit_traffic(self.unit(name), self.policy, self.single)

    @cached_property
    def used(self) -> dict[str, dict[str, Parameter]]:
        """By unit's path the parameters that it uses, by their names in its program (`used_parameters`)."""
        return used_parameters(self.architecture, self.parameters)

    def gathered(self, path: str, unit: str, phase: str) -> tuple[Group, ...]:
        """The groups whose weights the unit at a path needs gathered in a pass ("forward", "backward"); what axes of one device
        split is whole already."""
        weights = [name for group in weight_groups(self.unit(unit)) if phase in group.passes for name in group.weights]
        needed = {self.used[path][name].name for name in weights}
        return tuple(group for group in self.groups if group.sync.gather and not needed.isdisjoint(group.names))

    def keeps_gathered(self, unit: str) -> bool:
        """Whether a unit's backward pass reads the weights that its forward pass gathered."""
        return bool(self.unit(unit).kept)

    def issued(self, num_micro_batches: int) -> Counter[Issued]:
        """Every collective of a step with its count; over axes of one device there is none."""
        found: Counter[Issued] = Counter()
        activations = ((one, num_micro_batches) for one in self.of_activations())
        for one, times in (*self._weights(num_micro_batches), *self._control(num_micro_batches), *activations):
            if one.axes:
                found[one] += times
        return found

    def template(self, path: str, unit: str) -> Template:
        """The instructions of the unit at a path."""
        family = replace(self.family, recompute=self.recompute(path, unit))
        return unit_template(self.architecture.structure, family, unit, self.policy, self.single)

    def _activations(self) -> Iterator[Traffic]:
        """What moves activations over several devices in a micro-batch, in order: all units forward, and back."""
        units = list(unit_paths(self.architecture))
        passes = (("forward", units), ("backward", units[::-1]))
        for name, (path, unit) in ((name, one) for name, order in passes for one in order):
            for started in self.template(path, unit).passes[name]:
                if isinstance(started, Start) and self._moves_activations(started.traffic):
                    yield started.traffic

    def _moves_activations(self, one: Traffic) -> bool:
        return not one.carries_weights and not one.is_control and bool(self.several(one.axes))

    def of_activations(self) -> Iterator[Issued]:
        """The collectives on activations of a micro-batch, in the order in which they are issued; but those that run
        beside computations are issued block by block, in a ring."""
        sizes: Values | None = None
        for one in self._activations():
            if self.seq_len is None:
                raise ValueError("an instance whose activations move needs a length of sequences")
            seqs = self.layout.micro_batch_seqs * self.mesh.size(self.batch_axes)
            sizes = sizes or Values({**self.values, "B": seqs, "T": self.seq_len})
            dtype = self.control_dtype if one.role is Role.STATISTIC else self.precision.activations
            num_bytes, axes = _bytes(one.elements.evaluate(sizes), dtype), self.several(one.axes)
            if one.beside:  # each block but the rank's own
                ranks = self.mesh.size(axes)
                yield from [Issued(Kind.PERMUTE, axes, dtype, num_bytes // ranks, "activations")] * (ranks - 1)
            else:
                yield Issued(one.kind, axes, dtype, num_bytes, ROWS if one.role is Role.ROUTED else "activations")

    def recompute(self, path: str, unit: str) -> str:
        """The recompute policy of the unit at a path: a layer's, for the first so many of them."""
        most = self.layout.recompute_layers
        recomputes = unit in LAYERS and (most is None or int(path.removeprefix("layers.")) < most)
        return self.layout.recompute if recomputes else "none"

    def _weights(self, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
        for _, unit in unit_paths(self.architecture):
            for one in self.traffic(unit):
                if one.carries_weights and not self._serves_head(one):
                    times = num_micro_batches if one.scope == "micro_batch" else 1
                    yield from ((array, times) for array in self._arrays(one))

    def _serves_head(self, one: Traffic) -> bool:
        """Whether the embedding's serves: a tied head gathers its weight, where the unit has not gathered it for the embedding,
        but has neither gradient nor state of its own."""
        gathers = one.role is Role.WEIGHT and one.scope == "micro_batch"
        gathers = gathers and not (one.unit in PREDICTS and one.phase == "forward")
        return self.architecture.tied_embeddings and one.tensors == (TIED,) and not gathers

    def _arrays(self, one: Traffic) -> Iterator[Issued]:
        """A collective on each of its flat arrays."""
        assert isinstance(one.payload, FlatArrays)
        what, dtype = ("weights", self.precision.weights) if one.role is Role.WEIGHT else ("gradients", self.reduced)
        for elements in one.payload.arrays(self.values, self.most_elements):
            yield Issued(one.kind, self.several(one.axes), dtype, _bytes(elements, dtype), what)

    def several(self, axes: Axes) -> Axes:
        """Of some axes those with more than one device."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def _control(self, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
        dtype = self.control_dtype
        units = (unit for _, unit in unit_paths(self.architecture))
        loss = (one for unit in units for one in self.traffic(unit) if one.is_control)
        others = control_traffic(self.architecture.structure, self.family, self.policy)
        for one in (*loss, *others):
            num_bytes = _bytes(one.elements.evaluate(self.values), dtype)
            times = num_micro_batches if one.scope == "micro_batch" else 1
            yield Issued(one.kind, self.several(one.axes), dtype, num_bytes, one.tensors[0]), times

    @property
    def control_dtype(self) -> str:
        """The format of the loss, the norm and the routers' statistics: fp32, or fp64 where the model is in it."""
        return "fp64" if self.precision.activations == "fp64" else "fp32"


def _bytes(elements: float, dtype: str) -> int:
    return round(elements * bytes_per_element(dtype))
