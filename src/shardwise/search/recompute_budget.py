"""Cost of keeping each tensor of a layer and of computing it again, and the set of tensors to keep under a budget of bytes.

Bytes of a set, and seconds to recompute the rest, are added up tensor by tensor (`model.backward`): a kernel of its own for
each, and the collectives of its result. Fused kernels read less, so several sets close to the best (`NEAR_BEST`) are priced
exactly and the fastest is taken. `list_layer_recompute` lists what a layer keeps for its backward pass and what it computes
again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.derive import ShardedUnit, derived_unit
from shardwise.derive.low_precision_products import product_operands
from shardwise.derive.sharded_unit import saved_specs
from shardwise.layout import Layout, violations
from shardwise.model import is_byte_budget, is_layer
from shardwise.model.backward import SaveChoice, combine_choices, pareto_save_choices, saveable_results
from shardwise.model.recompute_policies import budget_bytes, format_tensor_set
from shardwise.price import Pricing, Problem
from shardwise.price.tensor_formats import SavedTensors, producible_operands
from shardwise.sharding import CollectiveKind, Spec
from shardwise.step.kernel_fusion import unfused_kernels
from shardwise.values import InputError, format_bytes, raise_problems

# Sets that are priced as derived: those whose added-up seconds are at most so many times those of the best.
NEAR_BEST, MAX_PRICED = 1.05, 4
# What a result takes where it is made. Gathers are for its uses, and the backward pass has them whether it was kept or not.
RESULT_COLLECTIVES = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """A set of tensors to keep, by kind of layer, and the recompute policy that names it.

    `num_bytes` of the set and `seconds` to recompute the rest are over all layers of the model, for one micro-batch."""

    policy: str
    savings: Mapping[str, SaveChoice]
    num_bytes: float
    seconds: float


class RecomputeLayer:
    """A kind of layer at the sizes of a layout."""

    def __init__(self, pricing: Pricing, kind: str) -> None:
        self.pricing, self.kind, self.pricer = pricing, kind, pricing.pricer
        self.values = pricing.unit_values.of(kind)

    def unit(self, policy: str) -> ShardedUnit:
        """Derive the layer under another recompute policy."""
        return derived_unit(self.pricing.scheme.with_recompute(policy), self.kind)

    @cached_property
    def plain(self) -> ShardedUnit:
        """Derivation that keeps every tensor the backward pass reads."""
        return self.unit("none")

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bytes of each result as kept for one micro-batch."""
        forward = self.plain.forward
        specs = saved_specs(self.plain.scheme, forward)
        results = (out for operation in forward.program.operations for out in operation.outputs)
        return self.saved_bytes(self.plain, {name: specs[name] for name in results})

    def saved_bytes(self, unit: ShardedUnit, specs: Mapping[str, Spec]) -> dict[str, float]:
        """Return the bytes of tensors with these specs, as `unit` keeps them for one micro-batch."""
        produced = producible_operands(unit, self.pricer.rates.policy)
        saved = SavedTensors(unit, product_operands(unit.phases(), unit.tensors, unit.saved), produced)
        return {
            name: float(self.pricer.formats.saved_bytes(saved.saved([(name, spec)]), self.values))
            for name, spec in specs.items()
        }

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds to compute each result again with its collectives. Keys are the first result of each operation."""
        scheme = self.pricing.scheme.with_recompute("full")
        parts, values, links = self.pricer.parts(scheme, self.kind), self.values, self.pricing.links
        seconds: dict[str, float] = {}
        for kernel in unfused_kernels(self.unit("full"), "recompute"):
            kernel_s = float(self.pricer.kernel_s(replace(kernel, steps=()), parts, values))
            seconds[kernel.outputs[0]] = seconds.get(kernel.outputs[0], 0.0) + kernel_s
        producers = {
            out: operation.outputs[0]
            for operation in self.plain.forward.program.operations
            for out in operation.outputs
        }
        for collective in parts.collectives:
            if collective.phase != "recompute" or collective.kind not in RESULT_COLLECTIVES:
                continue
            if (producer := producers.get(collective.tensors[0])) is not None:
                collective_s = float(self.pricer.collective_s(collective, parts, values, links))
                seconds[producer] = seconds.get(producer, 0.0) + collective_s
        return seconds

    @cached_property
    def savings(self) -> tuple[SaveChoice, ...]:
        """Pareto-optimal sets in bytes and seconds, from the most bytes to the fewest."""
        forward, reads = self.plain.forward.program, self.plain.backward.program.inputs
        return pareto_save_choices(forward, reads, self.sizes, self.seconds, saveable_results(forward, reads))


def recompute_layers(pricing: Pricing) -> dict[str, RecomputeLayer]:
    """Return the kinds of layer that a model has."""
    return {kind: RecomputeLayer(pricing, kind) for kind in filter(is_layer, pricing.units)}


def list_pareto_sets(pricing: Pricing) -> tuple[RecomputeChoice, ...]:
    """Return the Pareto-optimal sets over all layers in bytes and seconds, from the most bytes to the fewest."""
    layers = recompute_layers(pricing)
    if len(layers) == 1:
        ((kind, layer),) = layers.items()
        num_layers = float(sum(pricing.layers))
        return tuple(_make_choice({kind: saving}, {kind: num_layers}) for saving in layer.savings)
    counts = {kind: float(count) for kind, count in pricing.architecture.layer_counts.items()}
    choices = combine_choices([layer.savings for layer in layers.values()], [counts[kind] for kind in layers])
    return tuple(reversed([_make_choice(dict(zip(layers, choice, strict=True)), counts) for choice in choices]))


def _make_choice(savings: Mapping[str, SaveChoice], counts: Mapping[str, float]) -> RecomputeChoice:
    num_bytes = sum(saving.num_bytes * counts[kind] for kind, saving in savings.items())
    seconds = sum(saving.seconds * counts[kind] for kind, saving in savings.items())
    return RecomputeChoice(
        _policy_name({kind: saving.saved for kind, saving in savings.items()}, seconds), savings, num_bytes, seconds
    )


def _policy_name(tensors: Mapping[str, Sequence[str]], seconds: float) -> str:
    """Return the shortest text of a set."""
    if not seconds:
        return "none"
    if not any(tensors.values()):
        return "full"
    return format_tensor_set({"": next(iter(tensors.values()))} if len(tensors) == 1 else tensors)


def fit_recompute_budget(problem: Problem, layout: Layout) -> Layout:
    """Replace a budget of bytes in a layout's `recompute` by the fastest set of tensors within it.

    The budget bounds the activations of every device (the term `memory.activations`). A layout without a budget is returned as
    it is. Raises `InputError` if a block's input, which is always kept, already exceeds the budget."""
    if not is_byte_budget(layout.recompute):
        return layout
    raise_problems(
        violations(problem.architecture, problem.job, problem.cluster.num_devices, replace(layout, recompute="full"))
    )
    max_bytes = budget_bytes(layout.recompute)

    def price(policy: str) -> Pricing:
        return Pricing(problem, replace(layout, recompute=policy))

    full = price("full")
    min_bytes = max(activation_bytes_by_stage(full))
    if min_bytes > max_bytes:
        raise InputError(
            f"recompute: found {layout.recompute}, and {format_bytes(min_bytes)} of activations on a device where every layer "
            "keeps its input alone; a budget of at least as much is required, or fewer tokens in a micro-batch"
        )
    estimate_bytes = _estimate_activation_bytes(full, price("none"))
    fitting = [choice for choice in list_pareto_sets(full) if max(estimate_bytes(choice)) <= max_bytes]
    while fitting:
        near = [choice for choice in fitting if choice.seconds <= NEAR_BEST * fitting[0].seconds][:MAX_PRICED]
        pricings = [(price(choice.policy), choice.policy) for choice in near]
        steps = [
            (float(pricing.slowest_s()), policy)
            for pricing, policy in pricings
            if max(activation_bytes_by_stage(pricing)) <= max_bytes
        ]
        if steps:
            return replace(layout, recompute=min(steps)[1])
        fitting = fitting[len(near) :]
    return replace(layout, recompute="full")


def activation_bytes_by_stage(pricing: Pricing) -> list[float]:
    """Return the bytes that a device of each stage keeps for the backward pass (the term `memory.activations`)."""
    return [float(memory.activations) for memory in pricing.memories(pricing.stages())]


def _estimate_activation_bytes(full: Pricing, plain: Pricing) -> Callable[[RecomputeChoice], list[float]]:
    """Return a function that estimates the activation bytes of a set by stage without deriving it.

    Bytes grow linearly with the bytes of the set, from full recomputation to none."""
    sizes = {kind: layer.savings[0].num_bytes for kind, layer in recompute_layers(full).items()}
    layers = [full.counts(rank).layers for rank in range(full.layout.pp)]
    stages = [
        (min_bytes, (max_bytes - min_bytes) / (sum(count[kind] * sizes[kind] for kind in sizes) or 1.0), count)
        for min_bytes, max_bytes, count in zip(
            activation_bytes_by_stage(full), activation_bytes_by_stage(plain), layers, strict=True
        )
    ]

    def estimate_bytes(choice: RecomputeChoice) -> list[float]:
        return [
            float(min_bytes + slope * sum(count[kind] * saving.num_bytes for kind, saving in choice.savings.items()))
            for min_bytes, slope, count in stages
        ]

    return estimate_bytes


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
        """Bytes of all kept tensors."""
        return sum(tensor.num_bytes for tensor in self.kept)

    @property
    def seconds(self) -> float:
        """Seconds of all recomputed work."""
        return sum(work.seconds for work in self.recomputed)


def list_layer_recompute(pricing: Pricing) -> tuple[LayerRecompute, ...]:
    """Return kept tensors and recomputed work of each kind of layer, under the layout's policy."""
    counts, layers = pricing.architecture.layer_counts, []
    for kind, layer in recompute_layers(pricing).items():
        unit = layer.unit(pricing.scheme.recompute)
        kept_tensors = tuple(KeptTensor(name, size) for name, size in layer.saved_bytes(unit, unit.saved).items())
        layers.append(LayerRecompute(kind, counts[kind], kept_tensors, tuple(_recomputed_work(layer, unit, pricing))))
    return tuple(layers)


def _recomputed_work(layer: RecomputeLayer, unit: ShardedUnit, pricing: Pricing) -> Iterator[RecomputedWork]:
    """Yield kernels in order, then the collectives over several devices."""
    parts, pricer, values = pricing.pricer.parts(pricing.scheme, layer.kind), pricing.pricer, layer.values
    reads = set(layer.plain.backward.program.inputs) - set(unit.saved)
    for kernel in (kernel for kernel in parts.kernels if kernel.phase == "recompute"):
        spared_bytes = sum(layer.sizes[name] for name in kernel.outputs if name in reads)
        yield RecomputedWork(kernel.kind, kernel.outputs, float(pricer.kernel_s(kernel, parts, values)), spared_bytes)
    for collective in parts.collectives:
        if collective.phase != "recompute" or collective.moves_weights:
            continue
        if values.group_degree(collective.axes) > 1:
            seconds = float(pricer.collective_s(collective, parts, values, pricing.links))
            yield RecomputedWork(str(collective.kind), collective.tensors, seconds, 0.0)
