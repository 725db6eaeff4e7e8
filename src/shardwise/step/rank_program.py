"""Everything that one rank holds and runs, in numbers: units, parameters, flat arrays, collectives with dtype and bytes.

Names and shapes of a stored model: each whole parameter, and the biases of its routers. Loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from shardwise.derive import ShardedUnit, derived_unit
from shardwise.derive.tensor_specs import WEIGHT_USE
from shardwise.layout import (
    Layout,
    ShardingScheme,
    atomic_degrees,
    layout_degrees,
    make_sharding_scheme,
    stage_placement,
)
from shardwise.layout.placement import ATOMIC_AXES, AXIS_ORDERS
from shardwise.model import BASE_LAYER, DEFAULT_OPTIMIZER, Architecture, Role, is_layer
from shardwise.model.decoder import routes_tokens
from shardwise.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, RankSlot
from shardwise.sharding import Axes, Mesh, Spec
from shardwise.step import pipeline_stages as pipeline
from shardwise.step.collectives import (
    AXIS_ORDER,
    NUM_ROUTERS,
    layer_counts,
    list_unit_collectives,
    noise_axes,
    norm_axes,
    routing_axes,
    unit_operands,
)
from shardwise.step.flat_arrays import WeightSync, is_bucketed, shard_alignment, weight_groups
from shardwise.step.instructions import (
    MIRROR_RANKS,
    PIPELINE,
    Instruction,
    StartCollective,
    UnitCollective,
    unroll_rings,
)
from shardwise.step.parameters import (
    Parameter,
    ParameterGroup,
    PlacedUnit,
    group_parameters,
    list_parameters,
    parameters_by_unit,
    unit_paths,
)
from shardwise.step.pipeline_stages import select_instructions, splits_backward_pass, stage_units
from shardwise.step.unit_instructions import UnitInstructions, lower_unit
from shardwise.values import IssuePolicy, LocalDim, Precision, SymbolValues, bytes_per_element, get_precision


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """A layout of a model in numbers, for the ranks at one position along `pp`.

    It is what an engine runs under `policy`, in one precision recipe, with one optimizer.
    """

    architecture: Architecture
    layout: Layout
    precision: Precision
    policy: IssuePolicy = field(default_factory=IssuePolicy)
    seq_len: int | None = None  # of which the bytes of activations' collectives depend
    optimizer: str = DEFAULT_OPTIMIZER
    pp_rank: int = 0

    def for_pp_rank(self, pp_rank: int) -> RankProgram:
        """Return the program of the ranks at another position along `pp`."""
        return self if pp_rank == self.pp_rank else replace(self, pp_rank=pp_rank)

    @cached_property
    def stages(self) -> dict[int, tuple[PlacedUnit, ...]]:
        """Units of each virtual stage that the rank holds, in the model's order."""
        units = stage_units(self.architecture, self.layout)
        return {stage: units[stage] for stage in stage_placement(self.layout).stages_of_rank(self.pp_rank)}

    @cached_property
    def units(self) -> tuple[PlacedUnit, ...]:
        """The units that the rank holds, in the order of the forward pass."""
        return tuple(unit for units in self.stages.values() for unit in units)

    @cached_property
    def scheme(self) -> ShardingScheme:
        """The sharding scheme, which the derivation reads of the layout, the model and the job."""
        return make_sharding_scheme(
            self.layout, self.architecture.structure, optimizer=self.optimizer, shares_amax=self.precision.shares_amax
        )

    @cached_property
    def mesh(self) -> Mesh:
        """Atomic axes as the ranks are numbered: the innermost of the placement varies fastest."""
        sizes = atomic_degrees(self.architecture, layout_degrees(self.layout))
        order = self.layout.placement.axes if self.layout.placement else AXIS_ORDERS[0]
        atoms = [atom for axis in order for atom in ATOMIC_AXES.get(axis, (axis,))]
        return Mesh(tuple((atom, int(sizes[atom])) for atom in reversed(atoms)))

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return list_parameters(self.architecture, self.scheme, self.units)

    @cached_property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """Flat arrays: units where gradients are scattered as they come, buckets of gradients where they rest whole."""
        alignment = shard_alignment(self.optimizer)
        return group_parameters(
            self.parameters, self.architecture, self.mesh, self._max_array_elements, self.mirrored_names, alignment
        )

    @cached_property
    def mirrored_names(self) -> frozenset[str]:
        """Names of trained parameters of which the mirrored rank (p - 1 - rank) has a copy.

        They are what both ends of a tied model use, what multi-token prediction borrows, and in a bidirectional pipeline all.
        """
        opposite = self.for_pp_rank(self.layout.pp - 1 - self.pp_rank)
        if opposite is self:
            return frozenset()
        copied = {parameter.name for parameter in opposite.parameters}
        return frozenset(parameter.name for parameter in self.parameters if parameter.trained) & copied

    @property
    def max_bucket_elements(self) -> float:
        """Largest number of gradient elements in a bucket."""
        return self.policy.max_bucket_bytes / bytes_per_element(self.gradient_dtype)

    def _max_array_elements(self, sync: WeightSync) -> float | None:
        """Return the largest number of elements in an array of weights with this sync; None: no limit."""
        return self.max_bucket_elements if is_bucketed(self.scheme, sync) else None

    @property
    def gradient_dtype(self) -> str:
        """Format in which gradients are reduced."""
        return self.precision.gradient_reduction

    @cached_property
    def values(self) -> SymbolValues:
        """Sizes of the dims of the base layer and of units that are no layers, and the degrees."""
        return SymbolValues({**self.architecture.dims, **self._counts_and_degrees})

    @cached_property
    def _counts_and_degrees(self) -> dict[str, int]:
        degrees = atomic_degrees(self.architecture, layout_degrees(self.layout))
        return {NUM_ROUTERS: self.num_routers(self.units), **layer_counts(self.architecture), **degrees}

    @cached_property
    def _values_by_kind(self) -> dict[str, SymbolValues]:
        """`values` with the sizes of each kind of layer that differs from the base layer."""
        layers = {kind: self.architecture.unit_architecture(kind) for kind in self.architecture.layer_kinds}
        return {kind: SymbolValues({**layer.dims, **self._counts_and_degrees}) for kind, layer in layers.items()}

    def unit_values(self, unit: str) -> SymbolValues:
        """Return the sizes of a unit's dims, and the degrees."""
        return self._values_by_kind.get(unit, self.values)

    def num_routers(self, units: Iterable[PlacedUnit]) -> int:
        """Return the number of units that have a router."""
        return sum(routes_tokens(self.architecture.structure, unit.kind) for unit in units)

    @cached_property
    def batch_axes(self) -> Axes:
        """Axes of more than one device that split a batch by sequences."""
        return self.drop_single_device_axes(self.scheme.batch_axes)

    @cached_property
    def loss_axes(self) -> Axes:
        """Axes over which the loss is summed: those that split its tokens, and `pp`, whose last stage has it."""
        per_step = (collective for collective in self.traffic("head") if collective.scope == "step")
        loss = (collective.axes for collective in per_step if collective.role is Role.STATISTIC)
        return self.drop_single_device_axes(("pp", *next(loss)))

    @property
    def local_vocab_size(self) -> int:
        """Words of the vocabulary whose logits a rank has, padding included."""
        return int(self.values[LocalDim("V", WEIGHT_USE["V"])])

    @cached_property
    def norm_axes(self) -> Axes:
        """Axes that split gradients, over which the squares of the norm are summed."""
        return self.drop_single_device_axes(norm_axes(self.scheme))

    @cached_property
    def noise_axes(self) -> Axes:
        """Axes over which the squares of every micro-batch's gradient are summed."""
        return self.drop_single_device_axes(noise_axes(self.scheme))

    @cached_property
    def amax_axes(self) -> Axes:
        """Axes over which the amax of products' operands is taken; none unless scales depend on it."""
        return self.drop_single_device_axes(AXIS_ORDER) if self.precision.shares_amax else ()

    def operands(self, unit: str) -> tuple[str, ...]:
        """Return the tensors that products with the weights of a kind of unit read."""
        return unit_operands(self.architecture.structure, unit)

    @cached_property
    def routing_axes(self) -> Axes:
        """Axes that split tokens where their experts are chosen, over which routers' statistics are summed."""
        experts = self.architecture.num_experts > 0
        return self.drop_single_device_axes(routing_axes(self.scheme)) if experts else ()

    @cached_property
    def axes(self) -> frozenset[Axes]:
        """Every group of axes that a step of any rank has a collective over."""
        units = tuple(unit_paths(self.architecture))
        syncs = {parameter.sync for parameter in list_parameters(self.architecture, self.scheme, units)}
        collectives = chain.from_iterable(self.activation_collectives(path, unit) for path, unit in units)
        of_units = (collective for kind in {unit for _, unit in units} for collective in self.traffic(kind))
        used = {PIPELINE, *(axes for sync in syncs for axes in sync), *(collective.axes for collective in collectives)}
        used |= {collective.axes for collective in of_units if collective.role in (Role.DIRECTION, Role.MEAN)}
        if self.policy.noise_scale:
            used |= {self.noise_axes, *(sync.within(self.scheme.replica_axes) for sync in syncs)}
        groups = {self.drop_single_device_axes(axes) for axes in used}
        groups |= {self.loss_axes, self.norm_axes, self.amax_axes, self.routing_axes}
        if any(self.for_pp_rank(rank).mirrored_names for rank in range(self.layout.pp)):
            groups.add(MIRROR_RANKS)
        return frozenset(groups - {()})

    @cached_property
    def single_device_axes(self) -> frozenset[str]:
        """Axes of one device."""
        return frozenset(axis for axis, size in self.mesh.axes if size == 1)

    def unit(self, name: str) -> ShardedUnit:
        """Return a unit as derived for the layout."""
        return derived_unit(self.scheme, name)

    def traffic(self, name: str) -> tuple[UnitCollective, ...]:
        """Return the collectives of a unit."""
        return list_unit_collectives(self.unit(name), self.policy, self.single_device_axes)

    @cached_property
    def parameters_by_unit(self) -> dict[str, dict[str, Parameter]]:
        """Parameters that each unit uses, by its path and by their names in its program."""
        return parameters_by_unit(self.architecture, self.parameters, self.units)

    def gathered(self, path: str, unit: str, phase: str) -> tuple[ParameterGroup, ...]:
        """Return the groups whose weights a unit needs gathered in a pass ("forward", "backward").

        Weights that only axes of one device split are whole already.
        """
        regathered = {"forward"} if self.gathers_again(unit) else set()
        passes = {phase} | regathered if phase == "backward" else {phase}
        moved = (group for group in weight_groups(self.unit(unit)) if not passes.isdisjoint(group.passes))
        weights = [name for group in moved for name in group.weights]
        parameter_names = {self.parameters_by_unit[path][name].name for name in weights}
        gathered = (group for group in self.groups if group.sync.gather)
        return tuple(group for group in gathered if not parameter_names.isdisjoint(group.names))

    def keeps_gathered(self, unit: str) -> bool:
        """Return True if the backward pass reads the weights that the forward pass gathered: it follows at once."""
        return bool(self.unit(unit).gathered_weights) and self.backward_follows_forward

    def gathers_again(self, unit: str) -> bool:
        """Return True if the backward pass must gather the unit's weights a second time."""
        return bool(self.unit(unit).gathered_weights) and not self.backward_follows_forward

    @property
    def backward_follows_forward(self) -> bool:
        """True if the last stage runs each micro-batch's backward pass right after its forward pass."""
        return pipeline.backward_follows_forward(self.layout)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule splits backward passes into I and W."""
        return pipeline.splits_backward(self.layout)

    def unit_instructions(self, path: str, unit: str) -> UnitInstructions:
        """Return the instructions of the unit at a path."""
        scheme = self.scheme.with_recompute(self.recompute(path, unit))
        return lower_unit(scheme, unit, self.policy, self.single_device_axes)

    def steps(self, num_micro_batches: int) -> tuple[RankSlot, ...]:
        """Return the slots that the rank runs in a step, in order, with the messages around them."""
        return pipeline.rank_slots(self.layout, num_micro_batches, self.pp_rank)

    def forward_steps(self, num_micro_batches: int) -> tuple[RankSlot, ...]:
        """Return the slots that the rank runs in an evaluation: forward passes alone."""
        return pipeline.forward_rank_slots(self.layout, num_micro_batches, self.pp_rank)

    def units_with_weight_grads(self, kind: str, stage: int) -> tuple[str, ...]:
        """Return the paths of the units that give weight gradients in a pass of this kind."""
        splits = {FULL_BACKWARD: (True, False), BACKWARD_INPUT: (False,), BACKWARD_WEIGHT: (True,)}[kind]
        return tuple(path for path, unit in self.stages[stage] if splits_backward_pass(unit) in splits)

    def ordered_units(self, kind: str, stage: int) -> tuple[PlacedUnit, ...]:
        """Return the units of a stage in the order in which a pass runs through them."""
        units = self.stages[stage]
        return units if kind == FORWARD else units[::-1]

    def instructions(self, path: str, unit: str, kind: str) -> tuple[Instruction, ...]:
        """Return the instructions of a unit in a pass of a kind."""
        return select_instructions(self.unit_instructions(path, unit), unit, kind)

    def activation_collectives(self, path: str, unit: str, *kinds: str) -> Iterator[UnitCollective]:
        """Yield the activation collectives over several devices in passes of a unit, in order."""
        for kind in kinds or (FORWARD, FULL_BACKWARD):
            for started in unroll_rings(self.instructions(path, unit, kind)):
                if isinstance(started, StartCollective) and self._moves_activations(started.collective):
                    yield started.collective

    def _moves_activations(self, collective: UnitCollective) -> bool:
        if collective.moves_weights or collective.is_control:
            return False
        return bool(self.drop_single_device_axes(collective.axes))

    def micro_batch_values(self, unit: str) -> SymbolValues:
        """Return `unit_values` with the sizes of a micro-batch."""
        values = self._micro_batch_values
        return values.get(unit, values[BASE_LAYER])

    @cached_property
    def _micro_batch_values(self) -> dict[str, SymbolValues]:
        if self.seq_len is None:
            raise ValueError("an instance whose activations move needs a length of sequences")
        seqs = self.layout.micro_batch_seqs * self.mesh.size(self.batch_axes)
        kinds = (BASE_LAYER, *self.architecture.layer_kinds)
        return {kind: SymbolValues({**self.unit_values(kind), "B": seqs, "T": self.seq_len}) for kind in kinds}

    @cached_property
    def hidden_state_spec(self) -> Spec:
        """Sharding of the hidden state between two units, and so between two stages."""
        forward = self.unit(BASE_LAYER).forward
        tensors = forward.program.tensors
        (name,) = (output for output in forward.program.outputs if tensors[output].role is Role.RESIDUAL)
        return forward.specs[name]

    def recompute(self, path: str, unit: str) -> str:
        """Return the recompute policy of a unit; `recompute_layers` limits it to the first layers of the rank."""
        num_recomputed = self.layout.recompute_layers
        recomputes = is_layer(unit) and (num_recomputed is None or self._numbers[path] < num_recomputed)
        return self.layout.recompute if recomputes else "none"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Number of each layer among those of the rank that holds it, by path."""
        units_by_rank = (self.for_pp_rank(rank).units for rank in range(self.layout.pp))
        layers = ([path for path, unit in units if is_layer(unit)] for units in units_by_rank)
        return {path: number for rank_layers in layers for number, path in enumerate(rank_layers)}

    def drop_single_device_axes(self, axes: Axes) -> Axes:
        """Drop axes that have a single device."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    @property
    def control_dtype(self) -> str:
        """Format of the loss, the norm and the routers' statistics: fp32, or fp64 for a model in fp64."""
        return "fp64" if self.precision.activations == "fp64" else "fp32"


def balance_biases(architecture: Architecture) -> dict[str, str]:
    """Return the name of each router's balance bias, by the path of its unit."""
    structure = architecture.structure
    return {path: f"{path}.balance_bias" for path, kind in unit_paths(architecture) if routes_tokens(structure, kind)}


def single_device_instance(architecture: Architecture) -> RankProgram:
    """Return the program of the whole model on one device."""
    return RankProgram(architecture=architecture, layout=Layout(), precision=get_precision("fp32"))


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its full name.

    >>> tiny = Architecture(name="tiny", num_layers=1, d_model=4, d_ff=6, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=7)
    >>> parameter_shapes(tiny)["layers.0.wq"]
    (1, 2, 2, 4)
    """
    program = single_device_instance(architecture)
    return {parameter.name: shape_of(parameter, architecture) for parameter in program.parameters}


def shape_of(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of a whole parameter."""
    dims = architecture.unit_architecture(parameter.unit).dims
    return tuple(dims[dim] for dim in parameter.use.dims)
