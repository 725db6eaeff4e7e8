"""A call of a PyTorch kernel, with the names of what it reads and writes, and rewrites of a list of calls.

Calls are built in the context of a unit. A rewrite writes gradients of weights to where they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.derive import CollectiveStep, ComputeStep, ShardedTensor, ShardedUnit, pad_vocabulary, weight_use_spec
from shardwise.derive.low_precision_products import is_block_product
from shardwise.derive.producer_casts import Form, produced_operands, product_form
from shardwise.model import Architecture, Role, Route
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.kernels.activation_casts import OutputCast
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.matmul import ProductFormats, QuantizedMatmul
from shardwise.sharding import Axes, Spec
from shardwise.step import UnitCollective
from shardwise.step.kernel_fusion import BATCH_DIMS

# What a call may read besides the tensors of the program.
ANGLES = "@angles"  # cosines and sines, by parts of the sequence
MASK = "@sight"  # the attention mask, by parts of the sequence
RING_MASKS = "@sights"  # in a ring, one mask for the block of each rank
BALANCE_BIAS = "@balance"  # a router's bias
PENALTY = "@penalty"  # gradient of a router's scores from a balance loss
TRAINS = "@trains"  # whether a backward pass follows
GRADIENTS = "@gradients"  # the unit's `GradientSink`
EXPERT_ROWS = "@rows"  # description of the rows that a rank has, where they are not those of its own tokens
ROUTER_STATISTICS = "@routed"  # written by a router: rows asked for and sum of probabilities of each expert, [2, E]

OutputTarget = tuple[Tensor | None, bool]  # the tensor to write a sum to, if any, and whether to add to what is there
NO_TARGET: OutputTarget = (None, False)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call: `writes` = kernel(*`reads`), by slot name.

    `over` maps an operand's position to a kernel that computes the same and overwrites that operand. `into(target,
    *operands, add=...)` writes the result to a target, or adds it to what is there; `into_each(targets, *operands)`
    does so for several results, and returns them all. `is_view`: outputs share memory with inputs.
    `phase` is forward, recompute or backward. `results` are the results of the
    operations that the call stands for, whether or not it writes them; `traffic` is the collective that it starts or
    waits for. `casts` are the weights that the call casts as matrices, or takes as cast ones (`CastWeight`), each with
    the number of its dims that are a stack of them, and of those after that are their rows or their columns.
    """

    kernel: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    phase: str = "forward"
    over: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    into: Callable[..., Any] | None = None
    into_each: Callable[..., Any] | None = None
    is_view: bool = False
    results: tuple[str, ...] = ()
    traffic: UnitCollective | None = None
    casts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def form_key(key: str, form: Form) -> str:
    """Return the slot name of a form of the tensor in a slot."""
    return key if form == "plain" else f"{key} {form}"


class CallBuilder:
    """Context in which the calls of one unit on one rank are built; activations are in `dtype`.

    `batch_parts` collects the parts of the micro-batch that calls read: by key, the name of the part and the axes that
    split its sequences. `formats` are those to which products with the unit's weights cast their operands; None:
    no cast.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        architecture: Architecture,
        rank: Rank,
        dtype: torch.dtype,
        formats: ProductFormats | None,
    ) -> None:
        self.unit, self.architecture, self.rank, self.dtype, self.formats = unit, architecture, rank, dtype, formats
        self.batch_parts: dict[str, tuple[str, tuple[Axes, ...]]] = {}
        self.numerics, self.sizes = architecture.numerics, pad_vocabulary(architecture.dims, rank.mesh)
        routes = (operation for operation in unit.forward.program.operations if isinstance(operation, Route))
        self.gates = next((route.outputs[0] for route in routes), "")
        self.produced = produced_operands(unit) if formats is not None and formats.casts_in_producers else ()

    def output_cast(self, phase: str, name: str) -> OutputCast | None:
        """Return the forms in which a phase writes a result; None: as it is."""
        formats = self.formats
        produced = next((operand for operand in self.produced if (operand.phase, operand.name) == (phase, name)), None)
        return None if produced is None or formats is None else formats.of_result(self.unit.tensors[name], produced)

    def saved_keys(self) -> Iterator[str]:
        """Yield the slot names of what the forward pass saves."""
        for name, spec in self.unit.saved.items():
            key = self.tensor_key(name, spec)
            yield from (form_key(key, form) for form in self._forms_in_backward(name) or ("plain",))

    def with_forms(self, call: KernelCall, step: ComputeStep, phase: str) -> KernelCall:
        """Return the call of a step that reads each operand in the form that its producer has written for it."""
        forms = {tensor.name: self._form_read(phase, step, tensor) for tensor in step.reads} if self.produced else {}
        return replace(call, reads=tuple(form_key(name, forms.get(name, "plain")) for name in call.reads))

    def _form_read(self, phase: str, step: ComputeStep, tensor: ShardedTensor) -> Form:
        form = product_form(step, tensor, self.unit.tensors)
        cast = self.output_cast(phase, tensor.name)
        saved: tuple[Form, ...] = () if phase == "forward" else self._forms_in_backward(tensor.name)
        forms = saved if cast is None else cast.forms
        return form if form in forms else "plain"

    def _forms_in_backward(self, name: str) -> tuple[Form, ...]:
        """Return the forms that a backward pass has of a tensor which was computed again, or else saved."""
        formats = self.formats
        for produced in reversed([operand for operand in self.produced if operand.name == name]):
            assert formats is not None
            castable = formats.producer_forms(produced)
            return produced.saved_forms(castable) if produced.phase == "forward" else produced.written(castable)
        return ()

    @cached_property
    def reduced_statistics(self) -> frozenset[str]:
        """Statistics of tokens that a collective reduces between kernels in either pass, and their gradients."""
        steps = (step for steps in self.unit.phases().values() for step in steps if isinstance(step, CollectiveStep))
        names = {step.tensor.name for step in steps if self._is_reduced(step)}
        return frozenset({*names, *(self.unit.tensors[name].gradient_of for name in names)})

    def _is_reduced(self, step: CollectiveStep) -> bool:
        specs = step.collective.before, step.collective.after
        before, after = (self.rank.sharding(spec) for spec in specs)
        return step.tensor.dims == ("B", "T") and before != after

    def is_routed(self, *names: str) -> bool:
        """Return whether any of these tensors holds the rows of experts."""
        return any(self.unit.tensors[name].role is Role.ROUTED for name in names)

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor is a weight."""
        return self.unit.tensors[name].role is Role.WEIGHT

    @property
    def statistics(self) -> torch.dtype:
        """Dtype of sums: float32 or wider."""
        return at_least_fp32(self.dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; statistics are kept in float32 or wider."""
        return self.statistics if self.unit.tensors[name].role is Role.STATISTIC else self.dtype

    def tensor_key(self, name: str, spec: Spec) -> str:
        """Return the slot name of a tensor in a sharding."""
        # The same tensor in another sharding is another slot. A scalar has no sharding, and a gradient of a weight goes to
        # its sink, which knows one name.
        tensor = self.unit.tensors.get(name)
        if tensor is None or not tensor.dims or tensor.role is Role.WEIGHT_GRADIENT:
            return name
        if tensor.role is Role.CONSTANT:
            return self.batch_part(name, spec.axes_of("T"))
        used, home = self.rank.sharding(spec), self.rank.sharding(self._home_spec(name))
        return name if used == home else f"{name} {used}"

    def _home_spec(self, name: str) -> Spec:
        """Return the sharding in which a tensor is kept between calls; a single use may slice a weight further."""
        tensor = self.unit.tensors.get(name)
        if tensor is not None and tensor.role is Role.WEIGHT:
            return weight_use_spec(self.unit.scheme, tensor.dims)
        forward, backward = self.unit.forward.specs, self.unit.backward.specs
        return forward[name] if name in forward else backward[name]

    def batch_part(self, name: str, *axes: Axes) -> str:
        """Register a part of the micro-batch whose sequences `axes` split, and return its key. A part of two kinds
        (queries and keys) has two tuples of axes."""
        split = tuple(self.rank.nontrivial_axes(part_axes) for part_axes in axes)
        key = " ".join([name, *("·".join(part_axes) for part_axes in split)]).rstrip()
        self.batch_parts[key] = name, split
        return key

    def rows(self, spec: Spec) -> str:
        """Return the slot that describes the routed rows of a sharding: the router's choice where they are its own
        tokens'."""
        sharding = self.rank.sharding(spec)
        experts, tokens = sharding.axes_of("E"), sharding.axes_of("T")
        is_router = not experts and tokens == self.rank.sharding(self._home_spec(self.gates)).axes_of("T")
        return self.gates if is_router else f"{EXPERT_ROWS} {'·'.join(experts)} {'·'.join(tokens)}"

    def with_tensor_keys(self, call: KernelCall, steps: Iterable[ComputeStep]) -> KernelCall:
        """Return a call of some steps with slot names for the shardings in which the steps read and write tensors."""
        keys: dict[str, str] = {}
        for step in steps:
            for name, spec in (*step.writes, *step.reads):
                keys.setdefault(name, self.tensor_key(name, spec))
        reads, writes = (tuple(keys.get(name, name) for name in names) for names in (call.reads, call.writes))
        return replace(call, reads=reads, writes=writes)

    def quantized_matmul(self, step: ComputeStep) -> QuantizedMatmul | None:
        """Return the product of a step whose operands are cast to a narrow format; None where they are not."""
        operation, tensors = step.operation, self.unit.tensors
        if self.formats is None or not is_block_product(operation, tensors):
            return None
        left, right, result = (spec.dims for spec in (*step.placed.inputs, *step.placed.outputs))
        return self.formats.product(left, right, result, [tensors[name] for name in operation.inputs])

    def local_sizes(self, step: ComputeStep) -> dict[str, int]:
        """Return this rank's size of every dim, without those of tokens (B, T)."""
        specs = (*step.placed.inputs, *step.placed.outputs)
        pairs = ((dim, axes) for spec in specs for dim, axes in zip(spec.dims, spec.axes, strict=True))
        return {dim: self.sizes[dim] // self.rank.mesh.size(axes) for dim, axes in pairs if dim not in BATCH_DIMS}


class GradientSink(Protocol):
    """Destination of the gradients of a unit's weights."""

    def target(self, weight: str) -> OutputTarget:
        """Return a contiguous tensor for a weight's gradient, or None, and whether to add to what is there."""

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        """Take a gradient that is ready; None: it has been written to its target."""


def write_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> Iterator[KernelCall]:
    """Yield calls, each weight gradient delivered as soon as it is made, and written to its target where a kernel can."""
    for call in calls:
        gradients = [name for name in call.writes if name in weight_of]
        if gradients and call.into is not None:
            yield _write_to_target(call, weight_of[gradients[0]])
            continue
        if gradients and call.into_each is not None:
            yield _write_to_targets(call, weight_of)
            continue
        yield call
        yield from (_deliver_call(name, weight_of[name], call.phase) for name in gradients)


def deliver_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> list[KernelCall]:
    """Return the deliveries of all gradients that some calls make, for a later pass."""
    return [
        _deliver_call(name, weight_of[name], "backward") for call in calls for name in call.writes if name in weight_of
    ]


def _deliver_call(name: str, weight: str, phase: str) -> KernelCall:
    return KernelCall(
        lambda gradients, gradient: gradients.deliver(weight, gradient), (GRADIENTS, name), (), phase, results=(name,)
    )


def _write_to_target(call: KernelCall, weight: str) -> KernelCall:
    """Return a call that writes a gradient to its target."""
    kernel, into = call.kernel, call.into
    assert into is not None

    def deliver(gradients: GradientSink, *operands: Any) -> None:
        target, add = gradients.target(weight)
        if target is None:
            gradients.deliver(weight, kernel(*operands))
        else:
            into(target, *operands, add=add)
            gradients.deliver(weight, None)

    return KernelCall(deliver, (GRADIENTS, *call.reads), (), call.phase, results=call.results)


def _write_to_targets(call: KernelCall, weight_of: Mapping[str, str]) -> KernelCall:
    """Return a call that writes several results, the gradients among them to their targets."""
    into, weights = call.into_each, [weight_of.get(name) for name in call.writes]
    assert into is not None

    def deliver(gradients: GradientSink, *operands: Any) -> Any:
        targets = [gradients.target(weight) if weight else NO_TARGET for weight in weights]
        tensors = into(targets, *operands)
        for weight, (target, _), gradient in zip(weights, targets, tensors, strict=True):
            if weight:
                gradients.deliver(weight, gradient if target is None else None)
        remaining = [tensor for weight, tensor in zip(weights, tensors, strict=True) if not weight]
        return remaining[0] if len(remaining) == 1 else remaining

    remaining_names = tuple(name for name in call.writes if name not in weight_of)
    return KernelCall(deliver, (GRADIENTS, *call.reads), remaining_names, call.phase, results=call.results)
