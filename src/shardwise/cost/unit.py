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
from shardwise.cost.formats import Formats, elements_of
from shardwise.cost.overlap import BLOCKING
from shardwise.cost.rates import Rates, Work
from shardwise.cost.unit_costs import ACTIVATION_AXES, ActivationCost, StateCost
from shardwise.cost.unit_parts import (
    Parts,
    State,
    charged_to,
    elements_at,
    fullest_share,
    held_in,
    parts_of,
    priced_family,
)
from shardwise.cost.workspace import GRADIENT_SHARE, SCORES, fullest_bytes
from shardwise.derive.overlapped import RING
from shardwise.dtypes import bytes_per_element
from shardwise.job import Precision
from shardwise.layout.context import variant_of
from shardwise.layout.family import BATCH, EXPERT, Family
from shardwise.loss import loss_named
from shardwise.lowering.amaxes import layer_counts
from shardwise.lowering.control import NUM_ROUTERS
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.traffic import Traffic
from shardwise.model.architecture import Architecture
from shardwise.model.program import Role
from shardwise.model.recompute import policy_named
from shardwise.network.placed import Links
from shardwise.optimizer.table import DEFAULT, optimizer_named
from shardwise.symbolic import Local, Made, Result, Value, Values, added, maximum, minimum


def unit_values(
    architecture: Architecture, seq_len: int, degrees: Mapping[str, Value], cp_variant: str = "all_gather",
    attended_tokens: int | None = None,
) -> Values:  # fmt: skip
    """The symbols' values: dims of the model, the job's lengths, atomic degrees, sequences on one device.

    In a plain ring the rank with the last piece of the sequence has the most scores, and the others wait for it.
    """
    last = degrees["cp"] if variant_of(cp_variant).waits_for_last else 1
    span = architecture.average_span(seq_len, last_of=last)
    if attended_tokens is not None and attended_tokens < seq_len:  # a block of scores for each document
        span = architecture.average_span(attended_tokens) * attended_tokens / seq_len
    counts = {NUM_ROUTERS: architecture.num_routers, **layer_counts(architecture)}
    values = Values({**architecture.dims, "T": seq_len, "span": span, **counts, **degrees})
    values["B"] = values[Local("B", BATCH)] = values[Local("B", BATCH + EXPERT)] = degrees["micro_batch_seqs"]
    if architecture.num_experts:  # what one device's experts take in: the sequences of its whole ep group
        values[Local("B", BATCH)] = degrees["micro_batch_seqs"] * degrees["ep"]
    return values


class UnitPricer:
    """Prices units at the rates of a chip under a stack, with one precision recipe, one kind of loss and one optimizer."""

    def __init__(
        self, architecture: Architecture, rates: Rates, precision: Precision, loss: str = "unfused", optimizer: str = DEFAULT
    ) -> None:  # fmt: skip
        self.structure = architecture.structure
        self.rates = rates
        self.precision, self.optimizer = precision, optimizer
        cast = precision if rates.policy.casts == "everywhere" else precision.cast_in_products
        self.formats = Formats(cast, optimizer_named(optimizer))
        self.loss = loss_named(loss)
        self.bytes_per_logit = self.loss.bytes_at(bytes_per_element(precision.activations))
        self.seconds = Made()  # of kernels

    def at(self, rates: Rates) -> UnitPricer:
        """The same at other rates."""
        other = copy(self)
        other.rates, other.seconds = rates, Made()
        return other

    def of_structure(self, family: Family) -> Family:
        """The family with the facts of the model and the job that it depends on."""
        return replace(
            family, experts=self.structure.experts, optimizer=self.optimizer, shares_amax=self.precision.shares_amax
        )

    @property
    def most_elements(self) -> float:
        """Elements of gradients that a bucket holds at most."""
        return self.rates.policy.most_bytes / bytes_per_element(self.precision.gradient_reduction)

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
            values, ("activation", name, family), lambda: self.activation_bytes(name, family, values)
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

    def activation_bytes(self, name: str, family: Family, values: Values) -> tuple[Parts, dict[str, Value]]:
        """A unit's parts, and its bytes by column of `ActivationCost`."""
        family = priced_family(self.structure, self.of_structure(family), name)
        parts = self.parts(family, name)
        saved, logits = self.saved_bytes(parts, values)
        if policy_named(family.recompute).keeps_scores:
            saved = saved + SCORES * self.written_scores(parts, values)
        return parts, {
            "saved_bytes": saved, "logits_bytes": logits,
            "workspace_bytes": self.workspace_bytes(name, family, values) - saved,
            "making_bytes": self.workspace_bytes(name, family, values, making=True) - saved,
            "buffer_bytes": self.buffer_bytes(parts, values),
            "waiting_bytes": self.formats.saved_bytes(parts.waiting, values),
        }  # fmt: skip

    def state(self, name: str, family: Family, values: Values, links: Links) -> StateCost:
        """Weight and gradient traffic, the update, and the state at rest of one unit."""
        parts, elements, of_rest = self.once(
            values, ("state", name, family), lambda: self.state_at_rest(name, family, values)
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

    def state_at_rest(self, name: str, family: Family, values: Values) -> tuple[Parts, State, dict[str, Value]]:
        """A unit's parts, the elements of its state, and its bytes by column of `StateCost`."""
        family = self.of_structure(family)
        parts = self.parts(family, name)
        elements = elements_at(parts.arrays, values, self.most_elements)
        of_rest = self.state_bytes(parts, family, elements)
        return parts, elements, {**of_rest, "update_bytes": self.update_bytes(parts, elements, values)}

    def update_bytes(self, parts: Parts, elements: State, values: Values) -> Value:
        """Bytes that the update of matrices as a whole needs beside the state: the array of what is made of their gradients, in
        parts and together, and for the largest of them what its products take and give. None of elementwise updates."""
        kernels = [one for one in parts.kernels if one.kind == "of_matrix"]
        if not kernels:
            return 0.0
        own = maximum(0.0, *(one.shape.passing.evaluate(values) for one in kernels))
        direction, factor = (self.formats.roles[role] for role in (Role.DIRECTION, Role.FACTOR))
        return elements.together * direction + own * max(direction, factor)

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
        moved, pieces = self.moved_bytes(one, parts, values), values.degree(one.axes)
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

    def moved_bytes(self, one: Traffic, parts: Parts, values: Values) -> Value:
        """The payload of a collective in bytes."""
        return one.extent(values, self.most_elements).elements * self.formats.moved_width(one, parts.products)

    def saved_bytes(self, parts: Parts, values: Values) -> tuple[Value, Value]:
        """Bytes saved for the backward pass without the logits, and bytes of the loss over the logits."""
        logits = elements_of(parts.products.saved, Role.LOGITS).evaluate(values) * self.bytes_per_logit
        return self.formats.saved_bytes(parts.products.saved, values), logits

    def workspace_bytes(self, name: str, family: Family, values: Values, *, making: bool = False) -> Value:
        """Bytes of a unit when it is the fullest in its backward pass, with what it saved, without the logits; `making`: from
        when it makes the first gradient of a weight."""
        if self.loss.stepwise:
            scores = self.written_scores(self.parts(family, name), values)
            held = [one for one in held_in(self.structure, family, name, self.rates.policy) if one.makes or not making]
            return fullest_bytes(held, self.formats, scores, values, zero_stage=family.zero_stage)
        plain = self.parts(replace(family, recompute="none"), name)
        kept = self.saved_bytes(plain, values)[0] + SCORES * self.written_scores(plain, values)
        return (1.0 + GRADIENT_SHARE * (name != "head")) * kept

    def written_scores(self, parts: Parts, values: Values) -> Value:
        """Scores of a unit that are written to memory, where attention is not fused; every recompute rebuilds them."""
        if self.rates.fused_attention:
            return 0.0
        scans = (k for k in parts.kernels if k.phase == "forward" and k.kind == "scan")
        return sum((kernel.shape.scores.evaluate(values) for kernel in scans), start=0.0)

    def buffer_bytes(self, parts: Parts, values: Values) -> Value:
        """Input and output of the largest activation collective; in pieces it holds one that is used and one that moves.

        A device alone has none. Of stepwise engines they are among what is there at each moment.
        """
        if self.loss.stepwise:
            return 0.0
        sizes = [
            self.moved_bytes(one, parts, values)
            * (values.degree(one.axes) > 1)
            / (values.degree(one.axes) if one.beside else 1)
            for one in parts.collectives
            if one.role in (Role.ACTIVATION, Role.RESIDUAL, Role.ROUTED)
        ]
        return 2.0 * maximum(0.0, *sizes)

    def exchange_s(self, elements: State, links: Links) -> Value:
        """An AllReduce of two: each sends its reduced gradients and receives the other's."""
        num_bytes = elements.shard * self.formats.roles[Role.WEIGHT_GRADIENT]
        return links.hop(("pp",)).all_gather_s(links.along(num_bytes))

    def state_bytes(self, parts: Parts, family: Family, elements: State) -> dict[str, Value]:
        """Bytes of a unit's state, by column of `StateCost`."""
        return {
            column: added(getattr(elements, name) * width for name, width in widths.items() if width)
            for column, widths in self.state_widths(parts, family).items()
        }

    def state_widths(self, parts: Parts, family: Family) -> dict[str, dict[str, float]]:
        """What the columns of `StateCost` count: bytes of each element of the parts of a unit's `State`.

        Where gradients rest in fp32 only, products give them in the format of the activations first. Source: Megatron-Core and
        Transformer Engine: fused accumulation allocates a bf16 gradient of each weight all the same (the latter keeps one of
        each shape), by which SimuMax's measured peaks are above the rest. Experts' come one expert at a time, which is little.
        """
        precision, gradient = self.precision, self.precision.gradient_bytes
        gathered = self.formats.weight_in_use(parts.products) if family.zero_stage == 3 else 0.0
        unscattered = bytes_per_element(precision.gradients) if family.zero_stage >= 2 else 0.0
        passing = bytes_per_element(precision.activations)
        casts = family.zero_stage < 2 and passing < bytes_per_element(precision.gradients)
        stepwise = unscattered if self.loss.stepwise else 0.0
        arriving, leaving = {"shard": stepwise}, {"last": stepwise}
        if family.zero_stage == 1:  # whole gradients rest, and what comes of them is there until the step's end
            arriving = leaving = {"shard": bytes_per_element(precision.gradient_reduction) * self.loss.stepwise}
        optimizer = self.formats.optimizer
        moments = precision.moment_bytes(optimizer)
        return {
            "parameters_bytes": self.formats.resting_widths(),
            "gradients_bytes": {"shard" if family.zero_stage >= 2 else "trained": gradient},
            # with fp32 weights the weights are their own master copy
            "master_bytes": {"shard": precision.master_bytes},
            "optimizer_bytes": {
                "shard": moments,
                "apart": precision.moment_bytes(optimizer.of(matrix=False)) - moments,
                "factors": precision.factor_bytes(optimizer),
            },
            "transient_bytes": {"used": gathered, "trained": unscattered},
            "unscattered_bytes": {"trained": stepwise},
            "arriving_bytes": arriving,
            "leaving_bytes": leaving,
            "passing_bytes": {"passing": passing if casts else 0.0},
        }
