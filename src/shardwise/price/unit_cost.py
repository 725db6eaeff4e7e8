"""Cost of one unit (`model.decoder.UNIT_PROGRAMS`) on one device: seconds by phase and axis, bytes by kind, and their sums.

`UnitPricer` evaluates derived expressions at the sizes and degrees of `unit_values.py`, which may be numbers (one layout)
or arrays (a table of them). It returns the columns `ActivationCost` and `StateCost`, which a stage sums up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from shardwise.derive import RING_AXES
from shardwise.hardware import GroupLinks, collective_s
from shardwise.hardware.network.topology import ring_s
from shardwise.layout import ShardingScheme
from shardwise.model import DEFAULT_OPTIMIZER, Role, get_optimizer
from shardwise.price.overlap import BLOCKING
from shardwise.price.roofline import KernelWork, Rates
from shardwise.price.tensor_formats import TensorFormats
from shardwise.price.unit_inputs import (
    StateElements,
    UnitCostInputs,
    chunked_groups,
    largest_update_share,
    unit_cost_inputs,
)
from shardwise.price.unit_memory import UnitMemory
from shardwise.step import Kernel, UnitCollective
from shardwise.values import Precision, SymbolValues, Value, get_loss_kernel, maximum, minimum
from shardwise.values.symbolic import IdentityCache, Result

SecondsByAxis = Mapping[str, Value]  # seconds by parallel axis
# Phases of the passes through which a host's queue of launches runs ahead of its device, or behind it.
HOST_PASSES = (("forward",), ("recompute", "backward"))
ACTIVATION_AXES = ("tp", "cp", "ep", "pp")  # whose collectives move activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCost:
    """Cost per micro-batch: seconds of compute and of exposed communication; bytes kept, and bytes while working.

    `weight_s` is the part of `backward_s` that makes weight gradients (without the casts of its inputs, which run at
    once), `waiting_bytes` what that part reads. `backward_traffic_s` includes recomputation. `workspace_bytes` come on
    top of what is saved, for the head on top of the logits.
    """

    forward_s: Annotated[Value, "its kernels in a forward pass"]
    backward_s: Annotated[Value, "its kernels in a backward pass"]
    recompute_s: Annotated[Value, "its kernels that run again for a backward pass"]
    weight_s: Annotated[Value, "those of a backward pass that make weight gradients"]
    forward_traffic_s: Annotated[SecondsByAxis, "its collectives on activations in a forward pass"]
    backward_traffic_s: Annotated[SecondsByAxis, "its collectives on activations in a backward pass"]
    saved_bytes: Annotated[Value, "what it keeps for a backward pass"]
    workspace_bytes: Annotated[Value, "what it needs beside that while it runs backward"]
    making_bytes: Annotated[Value, "the same from when it makes the first gradient of a weight"]
    logits_bytes: Annotated[Value, "the loss over its logits"]
    buffer_bytes: Annotated[Value, "input and output of its largest collective on activations"]
    waiting_bytes: Annotated[Value, "what its weight gradients are made of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCost:
    """Seconds of weight and gradient communication per micro-batch and per step, and of the update; bytes of state at rest.

    `exchange_s`: of the gradients of two copies of the same weights, on the first and the last stage. `unscattered_bytes`:
    the gradients among the transient bytes. `arriving_bytes`: what a device receives when they are scattered, before it is
    added to the resting gradients. `leaving_bytes`: what of both is still live when the gradients of the next unit are made.
    `passing_bytes`: gradients as products give them, where the resting ones have another format. `deferred_bytes`: whole
    gradients of ZeRO-2 and -3, less the resting ones, where they are reduced in a step's last micro-batch only. `lent_bytes`:
    gradients of weights of another layer, which stay whole until that layer reduces them with its own.
    """

    gather_forward_s: Annotated[Value, "ZeRO's collectives for it in a forward pass"]
    gather_backward_s: Annotated[Value, "ZeRO's collectives for it in a backward pass"]
    step_weights_s: Annotated[Value, "gathers of its weights, once per step, and what its update moves"]
    step_traffic_s: Annotated[SecondsByAxis, "collectives for its gradients, once per step"]
    update_s: Annotated[Value, "its kernels in the update"]
    exchange_s: Annotated[Value, "gradients exchanged with the device that has the same weights"]
    parameters_bytes: Annotated[Value, "its weights as they rest"]
    gradients_bytes: Annotated[Value, "its gradients as they rest"]
    master_bytes: Annotated[Value, "the optimizer's copy of its weights"]
    optimizer_bytes: Annotated[Value, "its moments"]
    transient_bytes: Annotated[Value, "its gathered weights and its gradients before they are scattered"]
    unscattered_bytes: Annotated[Value, "its gradients among these"]
    arriving_bytes: Annotated[Value, "what a device gets of its gradients when they are scattered"]
    leaving_bytes: Annotated[Value, "the last of its gradients to be scattered"]
    passing_bytes: Annotated[Value, "its gradients as products give them"]
    deferred_bytes: Annotated[Value, "its whole gradients until the last micro-batch, beyond those at rest"]
    lent_bytes: Annotated[Value, "gradients of weights that another layer owns"]
    update_bytes: Annotated[Value, "what is there beside the state while matrices are updated as a whole"]


Cost = TypeVar("Cost", ActivationCost, StateCost)
Merge = Callable[[Sequence[Value]], Value]


def merge_costs(costs: Sequence[Cost], merge: Merge, merge_traffic: Merge | None = None) -> Cost:
    """Merge several costs into one, column by column; `merge_traffic` merges columns by axis, else `merge` does."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(costs[0])):
        values = [getattr(cost, name) for cost in costs]
        if isinstance(values[0], Mapping):
            of_axis = merge_traffic or merge
            columns[name] = {axis: of_axis([value[axis] for value in values]) for axis in values[0]}
        else:
            columns[name] = merge(values)
    return type(costs[0])(**columns)


class UnitPricer:
    """Prices units at the rates of a chip under a stack, with one precision recipe, one kind of loss and one optimizer."""

    def __init__(
        self, rates: Rates, precision: Precision, loss: str = "unfused", optimizer: str = DEFAULT_OPTIMIZER, *,
        attention: str | None = None, dropout: bool = False,
    ) -> None:  # fmt: skip
        self.precision = precision
        cast = precision if rates.policy.casts == "everywhere" else precision.with_casts_in_matmuls
        self.formats = TensorFormats(cast, get_optimizer(optimizer))
        self.loss = get_loss_kernel(loss)
        self.attention, self.dropout = attention, dropout
        self._set_rates(rates)

    def _set_rates(self, rates: Rates) -> None:
        """Set the rates, and what depends on them: the memo of kernels' seconds, and the memory model of their stack."""
        if self.attention:  # a job's choices count before those of the stack
            rates = replace(rates, fused_attention=self.attention == "fused")
        if self.dropout:
            rates = replace(rates, policy=replace(rates.policy, dropout=True))
        self.rates, self.seconds = rates, IdentityCache()
        self.memory = UnitMemory(
            self.formats, self.precision, self.loss, rates.policy, fused_attention=rates.fused_attention
        )

    def at(self, rates: Rates) -> UnitPricer:
        """Return a pricer at other rates, which must have the same `policy.casts`: formats are not rebuilt."""
        repriced = copy(self)
        repriced._set_rates(rates)
        return repriced

    @property
    def max_bucket_elements(self) -> float:
        """Largest number of gradient elements in a bucket."""
        return self.memory.max_bucket_elements

    def parts(self, scheme: ShardingScheme, name: str) -> UnitCostInputs:
        return unit_cost_inputs(scheme, name, self.rates.policy)

    def memoize(self, values: SymbolValues, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return `make()` at these values, computed once for all rates; it may depend on `key`, the model, the job and
        the stack."""
        # The identities of formats and loss stand for precision and optimizer: a pricer builds its formats once, and copies
        # at other rates share them. Only `RepricedSymbolValues` keep the result over several rates.
        identities = self.formats, self.loss
        dependencies = key, self.rates.policy, self.rates.fused_attention
        return values.compute_rate_independent(identities, make, key=dependencies)

    def activation(self, name: str, scheme: ShardingScheme, values: SymbolValues, links: GroupLinks) -> ActivationCost:
        """Return compute, activation communication and activation memory of one unit.

        In a table, communication is over placements, all else over sizes (`GroupLinks.per_placement`).
        """
        key = "activation", name, scheme
        parts, of_memory = self.memoize(values, key, lambda: self.memory.activation_bytes(name, scheme, values))
        compute = {p: self.compute_s(parts, p, values) for p in ("forward", "backward", "recompute")}
        weight_s = self.kernels_s(parts, "backward", values, making_gradients=True)
        compute["backward"] = compute["backward"] + weight_s
        idle = self.idle_s(parts, compute)
        launched = {p: self.with_launches_s(parts, p, seconds) + idle[p] for p, seconds in compute.items()}
        comm = self.exposed_activation_s(parts, values, links)
        if self.rates.routed.overlaps:
            for phase, device_s in compute.items():
                self.hide_exchanges(comm, phase, links.per_placement(device_s))
        if self.rates.host_s:
            self.hide_behind_host(comm, {p: links.per_placement(seconds) for p, seconds in idle.items()})

        def seconds(group: str, *phases: str) -> Value:
            return sum((comm.get((phase, group), 0.0) for phase in phases), start=0.0)

        of_sizes = {
            "forward_s": launched["forward"], "backward_s": launched["backward"], "recompute_s": launched["recompute"],
            "weight_s": weight_s, **of_memory,
        }  # fmt: skip
        return ActivationCost(
            forward_traffic_s={axis: seconds(axis, "forward") for axis in ACTIVATION_AXES},
            backward_traffic_s={axis: seconds(axis, "recompute", "backward") for axis in ACTIVATION_AXES},
            **of_sizes,
        )

    def state(self, name: str, scheme: ShardingScheme, values: SymbolValues, links: GroupLinks) -> StateCost:
        """Return weight and gradient communication, the update, and the state at rest of one unit."""
        key = "state", name, scheme
        parts, elements, of_rest = self.memoize(values, key, lambda: self.memory.state_at_rest(name, scheme, values))
        comm = self.collectives_s(parts, parts.state_collectives, values, links)
        gathered_roles = Role.WEIGHT, Role.DIRECTION, Role.MEAN
        gathers = (c for c in parts.collectives if c.role in gathered_roles and c.phase == "update")
        step_weights = sum(self.collectives_s(parts, gathers, values, links).values(), start=0.0)
        step = {axis: comm.get(("update", axis), 0.0) for axis in ("fsdp", "dp", "control")}
        of_sizes = {"update_s": self.compute_s(parts, "update", values), **of_rest}
        return StateCost(
            gather_forward_s=comm.get(("forward", "fsdp"), 0.0), gather_backward_s=comm.get(("backward", "fsdp"), 0.0),
            step_weights_s=step_weights, step_traffic_s={**step, "fsdp": step["fsdp"] - step_weights},
            exchange_s=self.exchange_s(elements, links),
            **{column: links.per_placement(value) for column, value in of_sizes.items()},
        )  # fmt: skip

    def compute_s(self, parts: UnitCostInputs, phase: str, values: SymbolValues) -> Value:
        """Return the seconds of a phase's kernels except those of weight gradients, with the casts of the products' operands."""
        return self.kernels_s(parts, phase, values, making_gradients=False) + self.casts_s(parts, phase, values)

    def casts_s(self, parts: UnitCostInputs, phase: str, values: SymbolValues) -> Value:
        """Return the seconds of the casts of a phase's product operands, and of the kernels that scale the products' results."""
        num_bytes = self.formats.cast_bytes(phase, parts.products, values)
        return (num_bytes + self.formats.rescale_bytes(phase, parts.kernels, values)) / self.rates.bytes_per_s

    def with_launches_s(self, parts: UnitCostInputs, phase: str, device_s: Value) -> Value:
        """Return the seconds of a phase's kernels with the gaps between them."""
        num_kernels = sum(kernel.phase == phase for kernel in parts.kernels)
        return self.rates.with_launches_s(device_s, num_kernels, routed=parts.is_routed(phase))

    def exposed_activation_s(
        self, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks
    ) -> dict[tuple[str, str], Value]:
        """Return the exposed seconds of the collectives on activations, by phase and axis."""
        plain = (c for c in parts.collectives if not c.moves_weights and not c.chunked_with)
        comm = self.collectives_s(parts, plain, values, links)
        for key, seconds_left in self.exposed_chunked_s(parts, values, links):
            comm[key] = comm.get(key, 0.0) + seconds_left
        key = "backward", "tp"
        if self.rates.overlaps_gradients and key in comm:
            comm[key] = comm[key] - self.hidden_by_weight_grads_s(parts, values, links)
        return comm

    def hidden_by_weight_grads_s(self, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks) -> Value:
        """Return the seconds of tensor-parallel collectives that run beside the products of weight gradients, which
        nothing waits for."""
        backward = (c for c in parts.collectives if c.phase == "backward" and not c.chunked_with)
        moved = (c for c in backward if c.role is Role.ACTIVATION)
        seconds = self.collectives_s(parts, moved, values, links).get(("backward", "tp"), 0.0)
        products = links.per_placement(self.kernels_s(parts, "backward", values, making_gradients=True))
        return minimum(seconds, products)

    def idle_s(self, parts: UnitCostInputs, device_s: Mapping[str, Value]) -> dict[str, Value]:
        """Return by phase the seconds in which the device waits for its host.

        Launches and kernels are two queues: what the host gets ahead in one phase of a pass it does not have to wait for in
        another. A layer's recomputation and backward pass follow one another, layer after layer.
        """
        behind_s = {}
        for phase, seconds in device_s.items():
            num_kernels = sum(kernel.phase == phase for kernel in parts.kernels)
            behind_s[phase] = self.rates.host_behind_s(seconds, num_kernels, routed=parts.is_routed(phase))
        idle = {}
        for phases in HOST_PASSES:
            remaining_s = maximum(sum((behind_s[phase] for phase in phases), start=0.0), 0.0)
            for phase in phases[:-1]:
                idle[phase] = minimum(maximum(behind_s[phase], 0.0), remaining_s)
                remaining_s = remaining_s - idle[phase]
            idle[phases[-1]] = remaining_s
        return idle

    def hide_exchanges(self, comm: dict[tuple[str, str], Value], phase: str, device_s: Value) -> None:
        """Subtract from exchanges of routed tokens what runs beside the kernels of another micro-batch."""
        if (phase, "ep") in comm:
            comm[phase, "ep"] = maximum(comm[phase, "ep"] - device_s, 0.0)

    def hide_behind_host(self, comm: dict[tuple[str, str], Value], idle_s: Mapping[str, Value]) -> None:
        """Subtract from blocking communication what fits into the time in which the device waits for its host in that pass."""
        for phases in HOST_PASSES:
            remaining_s = sum((idle_s[phase] for phase in phases), start=0.0)
            for key in ((phase, axis) for phase in phases for axis in BLOCKING if (phase, axis) in comm):
                comm[key], remaining_s = maximum(comm[key] - remaining_s, 0.0), maximum(remaining_s - comm[key], 0.0)

    def kernels_s(self, parts: UnitCostInputs, phase: str, values: SymbolValues, *, making_gradients: bool) -> Value:
        """Return the seconds of a phase's kernels that make weight gradients, or of the others."""
        kernels = (k for k in parts.kernels if k.phase == phase and k.makes_weight_grads is making_gradients)
        return sum((self.kernel_s(kernel, parts, values) for kernel in kernels), start=0.0)

    def kernel_s(self, kernel: Kernel, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return the seconds of one kernel, computed once for all schemes of a unit that have it."""
        # The memo key is the identity of kernel and values: `Interner` makes equal kernels of all schemes one object, so a
        # kernel that is rebuilt misses silently. `dependencies` holds all else of `parts` that the result depends on.
        casts = self.formats.produced_by(kernel, parts.products) if parts.products.produced else ()
        dependencies = parts.products.narrow, parts.arrays if kernel.shape.owned_matrices_only else (), casts

        def make() -> Value:
            compute = partial(self.work, kernel, parts, values)
            work = values.compute_rate_independent((kernel, self.formats), compute, key=dependencies)
            return self.rates.kernel_s(kernel.kind, self.formats.product_rate_format(kernel), work)

        return self.seconds.compute_once((kernel, values), make, key=dependencies)

    def work(self, kernel: Kernel, parts: UnitCostInputs, values: SymbolValues) -> KernelWork:
        """Return the work of one kernel; for a function of whole matrices that of the device with the most of them."""
        shape = kernel.shape
        flops, num_bytes = kernel.flops.evaluate(values), self.kernel_bytes(kernel, parts, values)
        if shape.owned_matrices_only:
            share = largest_update_share(parts.arrays, values)
            flops, num_bytes = flops * share, num_bytes * share
        return KernelWork(
            flops, num_bytes, shape.contraction.evaluate(values),
            tuple(extent.evaluate(values) for extent in shape.extents), shape.group_rows.evaluate(values),
            shape.scores.evaluate(values), shape.width.evaluate(values), kernel.phase == "backward",
            kernel.phase == "update", Role.LOGITS in kernel.elements,
        )  # fmt: skip

    def exposed_chunked_s(
        self, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks
    ) -> Iterator[tuple[tuple[str, str], Value]]:
        """Yield the exposed seconds of the collectives that overlap with computations in chunks, by phase and axis.

        With n chunks the first of the computation has nothing to overlap with, or the last of the communication:
        (n-1)/n of the computation can hide communication. Collectives beside the same computations share it.
        """
        for collectives, kernels in chunked_groups(parts.collectives, parts.kernels):
            first, num_chunks = collectives[0], values.group_degree(collectives[0].axes)
            compute_s = sum((self.kernel_s(kernel, parts, values) for kernel in kernels), start=0.0)
            compute_s = compute_s * (1.0 - 1.0 / num_chunks)
            moved_s = sum((self.chunked_s(c, parts, values, links) for c in collectives), start=0.0)
            yield (first.phase, first.stream), maximum(moved_s - links.per_placement(compute_s), 0.0)

    def chunked_s(
        self, collective: UnitCollective, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks
    ) -> Value:
        """Return the seconds of a chunked collective: a ring along `cp`; tensor parallelism's take as long as unchunked."""
        if collective.axes != RING_AXES:
            return self.collective_s(collective, parts, values, links)
        num_bytes, pieces = self.memory.payload_bytes(collective, parts, values), values.group_degree(collective.axes)
        return ring_s(collective.axes, links.per_placement(num_bytes), links.per_placement(pieces), links)

    def flops(self, name: str, scheme: ShardingScheme, values: SymbolValues) -> dict[str, Value]:
        """Return the FLOPs of products and attention of a micro-batch by phase; flash attention's rebuilt scores count in the
        backward phase."""
        flops_by_phase: dict[str, Value] = {}
        for kernel in self.parts(scheme, name).kernels:
            if kernel.phase == "update":  # once per step; Muon and Shampoo multiply matrices there
                continue
            flops_by_phase[kernel.phase] = flops_by_phase.get(kernel.phase, 0.0) + kernel.flops.evaluate(values)
        return flops_by_phase

    def kernel_bytes(self, kernel: Kernel, parts: UnitCostInputs, values: SymbolValues) -> Value:
        return self.formats.kernel_bytes(kernel, parts.products, values)

    def collectives_s(
        self, parts: UnitCostInputs, collectives: Iterable[UnitCollective], values: SymbolValues, links: GroupLinks
    ) -> dict[tuple[str, str], Value]:
        """Return the seconds of some of a unit's collectives by phase and time term."""
        total: dict[tuple[str, str], Value] = {}
        for collective in collectives:
            key = (collective.phase, collective.time_term)
            total[key] = total.get(key, 0.0) + self.collective_s(collective, parts, values, links)
        return total

    def collective_s(
        self, collective: UnitCollective, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks
    ) -> Value:
        """Return the seconds of a collective, or of one per flat array."""
        width, routed = self.formats.collective_width(collective, parts.products), collective.role is Role.ROUTED
        # Keyed by the identity of the payload, not of the collective, and stored with the links: what moves the same bytes over
        # the same axes is priced once, whichever unit or phase it is in. `price_key` holds all else that the seconds depend on.
        price_key = collective.kind, collective.axes, width, routed, self.max_bucket_elements

        def make() -> Value:
            compute, format_key = partial(self.payloads, collective, width, values), (width, self.max_bucket_elements)
            count, num_bytes = values.compute_rate_independent((collective.payload,), compute, key=format_key)
            num_bytes, rows = (
                links.per_placement(num_bytes),
                values["k"] if routed and self.rates.routed.dispatch == "per_group" else 1,
            )
            seconds = collective_s(collective.kind, collective.axes, num_bytes, links, rows)
            return scale_by_count(links.per_placement(count), seconds)

        return links.seconds.compute_once((collective.payload, values), make, key=price_key)

    def payloads(self, collective: UnitCollective, width: float, values: SymbolValues) -> tuple[Value, Value]:
        """Return the number of collectives, and the bytes of each at `width` bytes per element."""
        count, elements = collective.extent(values, self.max_bucket_elements)
        return count, elements * width / maximum(count, 1)

    def exchange_s(self, elements: StateElements, links: GroupLinks) -> Value:
        """Return the seconds of an AllReduce of two: each sends its reduced gradients and receives the other's."""
        num_bytes = elements.shard * self.formats.roles[Role.WEIGHT_GRADIENT]
        return links.neighbour_link(("pp",)).all_gather_s(links.per_placement(num_bytes))


def sum_over_units(
    costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str, axis: str = ""
) -> Value:
    """Sum a field over all units, each as often as the stage has it; `axis`: of a field by parallel axis, the one axis."""
    total: Value = None
    for unit, count in times.items():
        if is_zero(count):  # the stage never has the unit, so its cost is not looked up
            continue
        value = getattr(costs[unit], field)
        value = value[axis] if axis else value
        if not (isinstance(value, float) and value == 0.0):
            value = scale_by_count(count, value)
            total = value if total is None else total + value
    return 0.0 if total is None else total


def scale_by_count(count: Value, value: Value) -> Value:
    return value if isinstance(count, int) and count == 1 else value * count


def is_zero(count: Value) -> bool:
    return isinstance(count, int) and count == 0
