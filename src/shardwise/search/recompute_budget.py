"""What each tensor of a layer costs to keep and to compute again, and the set of tensors to keep under a budget of bytes.

The bytes of a set and the seconds of what it leaves out are added up tensor by tensor (`model.saving`): those of a kernel of
its own and of the collectives that its result takes. Fused kernels read less, so of the sets that are within `NEAR_BEST` of the
best the one is taken whose derived step is the fastest, as it is priced. `list_layer_recompute` lists, tensor by tensor and
kernel by kernel, what a layer keeps for its backward pass and what it computes again under a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.derive.low_precision_products import product_operands
from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.derive.tensor_specs import ulysses_specs
from shardwise.hardware.cluster import Cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model.architecture import Architecture
from shardwise.model.backward import SaveChoice, combine_choices, pareto_save_choices, saveable_results
from shardwise.model.decoder import LAYER_UNITS
from shardwise.model.job import Job
from shardwise.model.recompute_policies import budget_bytes, format_tensor_set, is_byte_budget
from shardwise.price.layout_pricer import Pricing
from shardwise.price.number_formats import SavedTensors
from shardwise.price.unit_inputs import priced_family
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.kernel_fusion import unfused_kernels
from shardwise.values.errors import InputError, raise_problems
from shardwise.values.units import format_bytes

# Sets that are priced as derived: those whose added-up seconds are at most so many times those of the best.
NEAR_BEST, MAX_PRICED = 1.05, 4
# What a result takes where it is made. Gathers are for its uses, and the backward pass has them whether it was kept or not.
RESULT_COLLECTIVES = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """A set of tensors by kind of layer, the policy that it is, its bytes over all layers of the model in a micro-batch, and the
    seconds that the rest takes."""

    policy: str
    savings: Mapping[str, SaveChoice]
    num_bytes: float
    seconds: float


class RecomputeLayer:
    """A kind of layer at the sizes of a layout."""

    def __init__(self, pricing: Pricing, kind: str) -> None:
        self.pricing, self.kind, self.pricer = pricing, kind, pricing.pricer

    def unit(self, policy: str) -> ShardedUnit:
        """Its derivation under another policy."""
        family = replace(self.pricer.complete_family(self.pricing.family), recompute=policy)
        structure = self.pricer.structure
        return derived_unit(structure, priced_family(structure, family, self.kind), self.kind)

    @cached_property
    def plain(self) -> ShardedUnit:
        """The derivation that keeps whatever the backward pass reads."""
        return self.unit("none")

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bytes of each result as it is kept for one micro-batch."""
        unit, forward = self.plain, self.plain.forward
        lying = {**forward.specs, **ulysses_specs(unit.family, forward.program)}
        keys = SavedTensors(unit, product_operands(unit.phases(), unit.tensors, unit.saved))
        made = (out for operation in forward.program.operations for out in operation.outputs)
        return {
            name: float(self.pricer.formats.saved_bytes(keys.saved([(name, lying[name])]), self.pricing.values))
            for name in made
        }

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds to compute each result again, by the first of its operation's, collectives that it takes included."""
        family = replace(self.pricing.family, recompute="full")
        parts, values, links = self.pricer.parts(family, self.kind), self.pricing.values, self.pricing.links
        found: dict[str, float] = {}
        for kernel in unfused_kernels(self.unit("full"), "recompute"):
            own = float(self.pricer.kernel_s(replace(kernel, steps=()), parts, values))
            found[kernel.outputs[0]] = found.get(kernel.outputs[0], 0.0) + own
        makers = {
            out: operation.outputs[0]
            for operation in self.plain.forward.program.operations
            for out in operation.outputs
        }
        for moved in parts.collectives:
            if moved.phase == "recompute" and moved.kind in RESULT_COLLECTIVES and moved.tensors[0] in makers:
                maker = makers[moved.tensors[0]]
                found[maker] = found.get(maker, 0.0) + float(self.pricer.collective_s(moved, parts, values, links))
        return found

    @cached_property
    def savings(self) -> tuple[SaveChoice, ...]:
        """Every set of which no other has fewer bytes and fewer seconds, from the most bytes to the fewest."""
        forward, reads = self.plain.forward.program, self.plain.backward.program.inputs
        return pareto_save_choices(forward, reads, self.sizes, self.seconds, saveable_results(forward, reads))


def recompute_layers(pricing: Pricing) -> dict[str, RecomputeLayer]:
    """The kinds of layer that a model has."""
    return {kind: RecomputeLayer(pricing, kind) for kind in pricing.units if kind in LAYER_UNITS}


def list_pareto_sets(pricing: Pricing) -> tuple[RecomputeChoice, ...]:
    """The sets of which no other has fewer bytes and fewer seconds over all layers, from the most bytes to the fewest."""
    layers = recompute_layers(pricing)
    if len(layers) == 1:
        ((kind, layer),) = layers.items()
        num_layers = float(sum(pricing.layers))
        return tuple(_make_choice({kind: one}, {kind: num_layers}) for one in layer.savings)
    (first, one), (second, other) = layers.items()
    times = {"dense_block": float(sum(pricing.dense)), "block": float(sum(pricing.layers) - sum(pricing.dense))}
    pairs = combine_choices(one.savings, other.savings, (times[first], times[second]))
    return tuple(reversed([_make_choice({first: a, second: b}, times) for a, b in pairs]))


def _make_choice(found: Mapping[str, SaveChoice], times: Mapping[str, float]) -> RecomputeChoice:
    num_bytes = sum(one.num_bytes * times[kind] for kind, one in found.items())
    seconds = sum(one.seconds * times[kind] for kind, one in found.items())
    return RecomputeChoice(
        _policy_name({kind: one.saved for kind, one in found.items()}, seconds), found, num_bytes, seconds
    )


def _policy_name(kept: Mapping[str, Sequence[str]], seconds: float) -> str:
    """The shortest text of a set."""
    if not seconds:
        return "none"
    if not any(kept.values()):
        return "full"
    return format_tensor_set({"": next(iter(kept.values()))} if len(kept) == 1 else kept)


def fit_recompute_budget(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> Layout:
    """The layout with the set of tensors that keeps the activations of every device (the term `memory.activations`) within the
    budget that its `recompute` is, and of those the fastest; itself where that is no budget.

    Raises `InputError` where a block's input, which is always kept, is more.
    """
    if not is_byte_budget(layout.recompute):
        return layout
    raise_problems(violations(architecture, job, cluster.num_devices, replace(layout, recompute="full")))
    most = budget_bytes(layout.recompute)

    def priced(policy: str) -> Pricing:
        return Pricing(architecture, cluster, job, replace(layout, recompute=policy))

    full = priced("full")
    least = max(activation_bytes_by_stage(full))
    if least > most:
        raise InputError(
            f"recompute: found {layout.recompute}, and {format_bytes(least)} of activations on a device where every layer keeps "
            "its input alone; a budget of at least as much is required, or fewer tokens in a micro-batch"
        )
    estimated = _estimate_activation_bytes(full, priced("none"))
    fitting = [one for one in list_pareto_sets(full) if max(estimated(one)) <= most]
    while fitting:
        near = [one for one in fitting if one.seconds <= NEAR_BEST * fitting[0].seconds][:MAX_PRICED]
        found = [(priced(one.policy), one.policy) for one in near]
        steps = [
            (float(one.slowest_s()), policy) for one, policy in found if max(activation_bytes_by_stage(one)) <= most
        ]
        if steps:
            return replace(layout, recompute=min(steps)[1])
        fitting = fitting[len(near) :]
    return replace(layout, recompute="full")


def activation_bytes_by_stage(pricing: Pricing) -> list[float]:
    """Bytes that a device of each stage keeps for the backward pass (the term `memory.activations`)."""
    return [float(memory.activations) for memory in pricing.memories(pricing.stages())]


def _estimate_activation_bytes(full: Pricing, plain: Pricing) -> Callable[[RecomputeChoice], list[float]]:
    """The same of a set without deriving it, from what is kept at least and at most: it grows with the bytes of the set."""
    sizes = {kind: layer.savings[0].num_bytes for kind, layer in recompute_layers(full).items()}
    layers = [full.counts(rank).layers for rank in range(full.layout.pp)]
    ends = [
        (least, (most - least) / (sum(count[kind] * sizes[kind] for kind in sizes) or 1.0), count)
        for least, most, count in zip(
            activation_bytes_by_stage(full), activation_bytes_by_stage(plain), layers, strict=True
        )
    ]

    def of(one: RecomputeChoice) -> list[float]:
        return [
            float(least + each * sum(count[kind] * own.num_bytes for kind, own in one.savings.items()))
            for least, each, count in ends
        ]

    return of


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is kept, and its bytes."""

    tensor: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class RecomputedWork:
    """A kernel or a collective that runs again: what it makes or moves, its seconds, and the bytes that would keep of this what
    the backward pass reads."""

    what: str
    tensors: tuple[str, ...]
    seconds: float
    spared_bytes: float


@dataclass(frozen=True, slots=True)
class LayerRecompute:
    """One layer of a kind, of which the model has `num_layers`, in one micro-batch on one device."""

    layer: str
    num_layers: int
    kept: tuple[KeptTensor, ...]
    recomputed: tuple[RecomputedWork, ...]

    @property
    def kept_bytes(self) -> float:
        """Bytes of all that is kept."""
        return sum(one.num_bytes for one in self.kept)

    @property
    def seconds(self) -> float:
        """Seconds of all that runs again."""
        return sum(one.seconds for one in self.recomputed)


def list_layer_recompute(pricing: Pricing) -> tuple[LayerRecompute, ...]:
    """Each kind of layer of a model, under a layout's policy."""
    dense = sum(pricing.dense)
    counts = {"dense_block": dense, "block": sum(pricing.layers) - dense}
    return tuple(
        LayerRecompute(
            kind,
            counts[kind],
            tuple(_kept_tensors(layer, pricing)),
            tuple(_recomputed_work(layer, layer.unit(pricing.family.recompute), pricing)),
        )
        for kind, layer in recompute_layers(pricing).items()
    )


def _kept_tensors(layer: RecomputeLayer, pricing: Pricing) -> Iterator[KeptTensor]:
    unit, formats = layer.unit(pricing.family.recompute), pricing.pricer.formats
    keys = SavedTensors(unit, product_operands(unit.phases(), unit.tensors, unit.saved))
    for name, spec in unit.saved.items():
        yield KeptTensor(name, float(formats.saved_bytes(keys.saved([(name, spec)]), pricing.values)))


def _recomputed_work(layer: RecomputeLayer, unit: ShardedUnit, pricing: Pricing) -> Iterator[RecomputedWork]:
    """Kernels in order, then the collectives that go over several devices."""
    parts, pricer = pricing.pricer.parts(pricing.family, layer.kind), pricing.pricer
    reads = set(layer.plain.backward.program.inputs) - set(unit.saved)
    for kernel in (one for one in parts.kernels if one.phase == "recompute"):
        spared = sum(layer.sizes[name] for name in kernel.outputs if name in reads)
        yield RecomputedWork(kernel.kind, kernel.outputs, float(pricer.kernel_s(kernel, parts, pricing.values)), spared)
    for moved in parts.collectives:
        if moved.phase == "recompute" and not moved.moves_weights and pricing.values.group_degree(moved.axes) > 1:
            seconds = float(pricer.collective_s(moved, parts, pricing.values, pricing.links))
            yield RecomputedWork(str(moved.kind), moved.tensors, seconds, 0.0)
