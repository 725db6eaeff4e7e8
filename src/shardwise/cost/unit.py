"""The cost of one unit (`model.decoder.UNITS`) on one device: seconds by phase and axis, bytes by kind.

Every number is a derived expression evaluated at the sizes and degrees in `values`, which may be numbers (one layout) or
arrays (a table of them).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace

from shardwise.cost.communication import collective_s, ring_s
from shardwise.cost.counts import times_each
from shardwise.cost.formats import Formats
from shardwise.cost.overlap import BLOCKING
from shardwise.cost.rates import Rates, Work
from shardwise.cost.unit_costs import ACTIVATION_AXES, ActivationCost, StateCost
from shardwise.cost.unit_memory import UnitMemory
from shardwise.cost.unit_parts import Parts, State, charged_to, fullest_share, parts_of
from shardwise.derive.overlapped import RING
from shardwise.job import Precision
from shardwise.layout.family import Family
from shardwise.loss import loss_named
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.traffic import Traffic
from shardwise.model.architecture import Architecture
from shardwise.model.program import Role
from shardwise.network.placed import Links
from shardwise.optimizer.table import DEFAULT, optimizer_named
from shardwise.symbolic import Made, Result, Value, Values, maximum, minimum


class UnitPricer:
    """Prices units at the rates of a chip under a stack, with one precision recipe, one kind of loss and one optimizer."""

    def __init__(
        self, architecture: Architecture, rates: Rates, precision: Precision, loss: str = "unfused", optimizer: str = DEFAULT
    ) -> None:  # fmt: skip
        self.structure = architecture.structure
        self.precision, self.optimizer = precision, optimizer
        cast = precision if rates.policy.casts == "everywhere" else precision.cast_in_products
        self.formats = Formats(cast, optimizer_named(optimizer))
        self.loss = loss_named(loss)
        self._take(rates)

    def _take(self, rates: Rates) -> None:
        """Rates, seconds of kernels at them, and the bytes that depend on what their stack issues and fuses."""
        self.rates, self.seconds = rates, Made()
        self.memory = UnitMemory(
            self.structure, self.formats, self.precision, self.loss, rates.policy, fused_attention=rates.fused_attention
        )

    def at(self, rates: Rates) -> UnitPricer:
        """The same at other rates."""
        other = copy(self)
        other._take(rates)
        return other

    def of_structure(self, family: Family) -> Family:
        """The family with the facts of the model and the job that it depends on."""
        return replace(
            family, experts=self.structure.experts, optimizer=self.optimizer, shares_amax=self.precision.shares_amax
        )

    @property
    def most_elements(self) -> float:
        """Elements of gradients that a bucket holds at most."""
        return self.memory.most_elements

    def parts(self, family: Family, name: str) -> Parts:
        return parts_of(self.structure, family, name, self.rates.policy)

    def once(self, values: Values, what: Hashable, make: Callable[[], Result]) -> Result:
        """What `make` gives at some values, which depends on nothing else but `what`, the model, the job and the stack: at any
        other rates it is the same."""
        of = self.structure, self.formats, self.loss
        return values.once_for_all_rates(of, make, at=(what, self.rates.policy, self.rates.fused_attention))

    def activation(self, name: str, family: Family, values: Values, links: Links) -> ActivationCost:
        """Compute, activation traffic and activation memory of one unit. Of arrays, traffic is over placements, all else over
        sizes (`Links.sizes`)."""
        parts, of_memory = self.once(
            values,
            ("activation", name, family),
            lambda: self.memory.activation_bytes(name, self.of_structure(family), values),
        )
        compute = {p: self.compute_s(parts, p, values) for p in ("forward", "backward", "recompute")}
        weight_s = self.kernels_s(parts, "backward", values, making_gradients=True)
        compute["backward"] = compute["backward"] + weight_s
        launched = {p: self.launched_s(parts, p, seconds) for p, seconds in compute.items()}
        comm = self.activation_traffic(parts, values, links)
        if self.rates.host_s:
            idle = {p: links.along(self.idle_s(parts, p, seconds)) for p, seconds in compute.items()}
            self.hide_behind_host(comm, idle)

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

    def state(self, name: str, family: Family, values: Values, links: Links) -> StateCost:
        """Weight and gradient traffic, the update, and the state at rest of one unit."""
        parts, elements, of_rest = self.once(
            values, ("state", name, family), lambda: self.memory.state_at_rest(name, self.of_structure(family), values)
        )
        comm = self.traffic(parts, parts.state_collectives, values, links)
        gathered = Role.WEIGHT, Role.DIRECTION, Role.MEAN
        gathers = (one for one in parts.collectives if one.role in gathered and one.phase == "update")
        step_weights = sum(self.traffic(parts, gathers, values, links).values(), start=0.0)
        step = {axis: comm.get(("update", axis), 0.0) for axis in ("fsdp", "dp", "control")}
        of_sizes = {"update_s": self.compute_s(parts, "update", values), **of_rest}
        return StateCost(
            gather_forward_s=comm.get(("forward", "fsdp"), 0.0), gather_backward_s=comm.get(("backward", "fsdp"), 0.0),
            step_weights_s=step_weights, step_traffic_s={**step, "fsdp": step["fsdp"] - step_weights},
            exchange_s=self.exchange_s(elements, links),
            **{column: links.along(value) for column, value in of_sizes.items()},
        )  # fmt: skip

    def compute_s(self, parts: Parts, phase: str, values: Values) -> Value:
        """Seconds of a phase's kernels except those of weight gradients, with the casts of the products' operands."""
        casts = self.formats.cast_bytes(phase, parts.products, values) / self.rates.bytes_per_s
        return self.kernels_s(parts, phase, values, making_gradients=False) + casts

    def launched_s(self, parts: Parts, phase: str, device_s: Value) -> Value:
        """Seconds of a phase's kernels as the host launches them."""
        num_kernels = sum(kernel.phase == phase for kernel in parts.kernels)
        return self.rates.launched_s(device_s, num_kernels, routed=parts.routed)

    def activation_traffic(self, parts: Parts, values: Values, links: Links) -> dict[tuple[str, str], Value]:
        """Seconds of the collectives on activations by phase and axis; of those in pieces what the kernels beside do not hide."""
        plain = (one for one in parts.collectives if not one.carries_weights and not one.beside)
        comm = self.traffic(parts, plain, values, links)
        for key, seconds_left in self.overlapped_s(parts, values, links):
            comm[key] = comm.get(key, 0.0) + seconds_left
        key = "backward", "tp"
        if self.rates.overlaps_gradients and key in comm:
            comm[key] = comm[key] - self.beside_gradients_s(parts, values, links)
        return comm

    def beside_gradients_s(self, parts: Parts, values: Values, links: Links) -> Value:
        """Seconds of tensor parallelism's collectives that run beside the products of weight gradients: no others wait for the
        inputs that these take, nor for the gradients of inputs before the unit is done with them."""
        moved = (c for c in parts.collectives if c.phase == "backward" and c.role is Role.ACTIVATION and not c.beside)
        seconds = self.traffic(parts, moved, values, links).get(("backward", "tp"), 0.0)
        products = links.along(self.kernels_s(parts, "backward", values, making_gradients=True))
        return minimum(seconds, products)

    def idle_s(self, parts: Parts, phase: str, device_s: Value) -> Value:
        """Seconds of a phase in which the device waits for its host."""
        num_kernels = sum(kernel.phase == phase for kernel in parts.kernels)
        return self.rates.idle_s(device_s, num_kernels, routed=parts.routed)

    def hide_behind_host(self, comm: dict[tuple[str, str], Value], idle_s: Mapping[str, Value]) -> None:
        """Take from the traffic that kernels wait for what fits where the device waits for its host."""
        for phase, left in idle_s.items():
            for key in ((phase, axis) for axis in BLOCKING if (phase, axis) in comm):
                comm[key], left = maximum(comm[key] - left, 0.0), maximum(left - comm[key], 0.0)

    def kernels_s(self, parts: Parts, phase: str, values: Values, *, making_gradients: bool) -> Value:
        """Seconds of a phase's kernels that make weight gradients, or of the others."""
        found = (k for k in parts.kernels if k.phase == phase and k.makes_gradients is making_gradients)
        return sum((self.kernel_s(kernel, parts, values) for kernel in found), start=0.0)

    def kernel_s(self, kernel: Kernel, parts: Parts, values: Values) -> Value:
        """Seconds of one kernel, computed once for all families of a unit that have it."""
        at = parts.products.narrow, parts.arrays if kernel.shape.in_part else ()

        def make() -> Value:
            work = values.once_for_all_rates((kernel, self.formats), lambda: self.work(kernel, parts, values), at=at)
            return self.rates.kernel_s(kernel.kind, self.formats.product_rate_format(kernel), work)

        return self.seconds.once((kernel, values), make, at=at)

    def work(self, kernel: Kernel, parts: Parts, values: Values) -> Work:
        """The work of one kernel; of a function of whole matrices that of a device with most of them."""
        shape = kernel.shape
        flops, num_bytes = kernel.flops.evaluate(values), self.kernel_bytes(kernel, parts, values)
        if shape.in_part:
            share = fullest_share(parts.arrays, values)
            flops, num_bytes = flops * share, num_bytes * share
        return Work(
            flops, num_bytes, shape.summed.evaluate(values),
            tuple(side.evaluate(values) for side in shape.sides), shape.group_rows.evaluate(values),
            shape.scores.evaluate(values), shape.width.evaluate(values), kernel.phase == "backward",
            kernel.phase == "update", Role.LOGITS in kernel.elements,
        )  # fmt: skip

    def overlapped_s(self, parts: Parts, values: Values, links: Links) -> Iterator[tuple[tuple[str, str], Value]]:
        """Exposed seconds of the collectives that overlap with computations in pieces, by phase and axis.

        With n pieces the first of the computation waits for nothing, or the last of the communication hides behind
        nothing: (n-1)/n of the computation is there to hide behind. Collectives beside the same computations share it.
        """
        together: dict[tuple[str, tuple[str, ...]], list[Traffic]] = {}
        for one in parts.collectives:
            if one.beside:
                together.setdefault((one.phase, one.beside), []).append(one)
        for (phase, beside), moved in together.items():
            kernels = [k for k in parts.kernels if k.phase == phase and not set(k.outputs).isdisjoint(beside)]
            pieces = values.degree(moved[0].axes)
            compute = sum((self.kernel_s(kernel, parts, values) for kernel in kernels), start=0.0) * (
                1.0 - 1.0 / pieces
            )
            traffic = sum((self.in_pieces_s(one, parts, values, links) for one in moved), start=0.0)
            yield (phase, moved[0].group), maximum(traffic - links.along(compute), 0.0)

    def in_pieces_s(self, one: Traffic, parts: Parts, values: Values, links: Links) -> Value:
        """Seconds of a collective in pieces: a ring along `cp`; what tensor parallelism moves is as fast as in one piece."""
        if one.axes != RING:
            return self.collective_s(one, parts, values, links)
        moved, pieces = self.memory.moved_bytes(one, parts, values), values.degree(one.axes)
        return ring_s(one.axes, links.along(moved), links.along(pieces), links)

    def flops(self, name: str, family: Family, values: Values) -> dict[str, Value]:
        """FLOPs of products and attention by phase; flash attention's rebuilt scores count in the backward phase."""
        found: dict[str, Value] = {}
        for kernel in self.parts(family, name).kernels:
            found[kernel.phase] = found.get(kernel.phase, 0.0) + kernel.flops.evaluate(values)
        return found

    def kernel_bytes(self, kernel: Kernel, parts: Parts, values: Values) -> Value:
        return self.formats.kernel_bytes(kernel, parts.products, values)

    def traffic(
        self, parts: Parts, collectives: Iterable[Traffic], values: Values, links: Links
    ) -> dict[tuple[str, str], Value]:
        """Seconds of some of a unit's collectives by phase and the axis that they are charged to."""
        total: dict[tuple[str, str], Value] = {}
        for one in collectives:
            key = (one.phase, charged_to(one))
            total[key] = total.get(key, 0.0) + self.collective_s(one, parts, values, links)
        return total

    def collective_s(self, one: Traffic, parts: Parts, values: Values, links: Links) -> Value:
        """Seconds of a collective, or of one per flat array; computed once for all that move the same over the same axes."""
        width, routed = self.formats.moved_width(one, parts.products), one.role is Role.ROUTED
        of = one.kind, one.axes, width, routed, self.most_elements

        def make() -> Value:
            count, num_bytes = values.once_for_all_rates(
                (one.payload,), lambda: self.payloads(one, width, values), at=(width, self.most_elements)
            )
            each = collective_s(one.kind, one.axes, links.along(num_bytes), links, values["k"] if routed else 1)
            return times_each(links.along(count), each)

        return links.seconds.once((one.payload, values), make, at=of)

    def payloads(self, one: Traffic, width: float, values: Values) -> tuple[Value, Value]:
        """The number of collectives, and the bytes of each where elements have a width."""
        count, elements = one.extent(values, self.most_elements)
        return count, elements * width / maximum(count, 1)

    def exchange_s(self, elements: State, links: Links) -> Value:
        """An AllReduce of two: each sends its reduced gradients and receives the other's."""
        num_bytes = elements.shard * self.formats.roles[Role.WEIGHT_GRADIENT]
        return links.hop(("pp",)).all_gather_s(links.along(num_bytes))
