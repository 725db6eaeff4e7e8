"""Memory of one device of a pipeline stage, from the costs of its units, in numbers or arrays; the verdict on whether it fits.

A price of memory has an error. Where a device has less than `TIGHT_MARGIN` of its memory left, the price leaves the answer
open, and the verdict is "tight".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Literal, NamedTuple, get_args

from shardwise.hardware import Chip
from shardwise.pipeline.schedule_definition import PeakCandidates
from shardwise.price.stage_contents import RESIDENT_UNITS, StageCosts
from shardwise.price.unit_cost import ActivationCost, StateCost, is_zero, scale_by_count, sum_over_units
from shardwise.values import Value, maximum, where

MemoryVerdict = Literal["fits", "tight", "does not fit"]
MEMORY_VERDICTS: tuple[MemoryVerdict, ...] = get_args(MemoryVerdict)
# Share of a device's memory below which the answer is open. Source: a twentieth of 159 published peaks is more than 8.9% above
# the price (docs/accuracy.md); a study of the same runs takes 10% of allocated memory as the rule for running out of it, 15%
# of reserved. Above the whole memory the answer is no: allocated bytes are over-predicted by 4.4% at most (30 runs), and an
# allocator keeps 5% besides (`SLACK` of published runs).
TIGHT_MARGIN = 0.10


def memory_verdict(memory_bytes: float, capacity_bytes: float) -> MemoryVerdict:
    """Return the verdict on bytes of a device of so much memory.

    >>> [memory_verdict(predicted, 100e9) for predicted in (90e9, 95e9, 101e9)]
    ['fits', 'tight', 'does not fit']
    """
    if memory_bytes > capacity_bytes:
        return "does not fit"
    return "fits" if memory_bytes <= capacity_bytes * (1.0 - TIGHT_MARGIN) else "tight"


def describe_margin(margin: float, verdict: MemoryVerdict) -> str:
    """Return a verdict with the share of the memory that is free, or missing.

    >>> describe_margin(0.25, "fits"), describe_margin(0.04, "tight"), describe_margin(-0.5, "does not fit")
    ('fits, 25% free', 'TIGHT, 4.0% free of the 10% that predictions need', 'DOES NOT FIT, 50% too much')
    """
    match verdict:
        case "fits":
            return f"fits, {margin:.0%} free"
        case "tight":
            return f"TIGHT, {margin:.1%} free of the {TIGHT_MARGIN:.0%} that predictions need"
        case _:
            return f"DOES NOT FIT, {-margin:.0%} too much"


def tight_memory_note(margin: float) -> str:
    """Return the caveat of an estimate whose memory is tight."""
    return (
        f"memory is tight: {margin:.1%} of a device is free, and predictions of memory are off by up to {TIGHT_MARGIN:.0%}; "
        "the run may run out of memory"
    )


class PeakBytes(NamedTuple):
    """Bytes at the peak of a device: workspace, logits, and what ZeRO gathers for one micro-batch at a time."""

    workspace: Value
    logits: Value
    gathered: Value


class HeadGradientBytes(NamedTuple):
    """Bytes of the head's gradients, whole and scattered: at the loss, in the last layer, in those before it."""

    at_loss: Value
    in_layer: Value
    before: Value


class GatheredBytes(NamedTuple):
    """Bytes that ZeRO gathers at the loss, in the last module of multi-token prediction, in the last layer, in the one
    before, and at the embedding. `of_loss`: gradients that the head makes meanwhile."""

    at_loss: Value
    of_loss: Value
    in_module: Value
    in_layer: Value
    in_next_layer: Value
    at_embedding: Value


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device of a stage.

    `gathers_ahead`: ZeRO has what two units use, not one; `stepwise`: see `values.engine_policies.LossKernel`. Activations
    of layers are kept for every micro-batch in flight, those of head and multi-token prediction, on the last virtual
    stage, for those `at_end`, the loss over the logits for one. A micro-batch that waits for its weight gradients holds
    their inputs instead, which counts where it is more. In a bidirectional pipeline two passes run at once. What is on
    the host does not count, except in transit.
    """

    stage: StageCosts
    in_flight: Annotated[Value, "micro-batches in flight on the stage", "in flight"]
    waiting: Annotated[Value, "of these, how many wait for their weight gradients only"]
    other_peaks: PeakCandidates  # where none waits while the most are in flight: both numbers at other moments
    at_end: Annotated[Value, "micro-batches between their passes through the head", "at the head"]
    runtime_bytes: Annotated[float, "context, libraries and fragmentation"]
    gathers_ahead: Annotated[bool, "whether the next unit is gathered beside the one in work"]
    stepwise: Annotated[bool, "whether operations run one after the other, as derived"]

    def sum_state(self, field: str, *, offloaded: bool = False) -> Value:
        """Return the bytes of a field of `StateCost`; for state on the host, what is in transfer."""
        if offloaded:
            return RESIDENT_UNITS * _largest_unit(self.stage.state, self.stage.weight_copies, field)
        return self.stage.sum_state(field)

    @property
    def gradients(self) -> Value:
        """Gradients between the micro-batches of a step: as they rest, or whole where only the last one reduces them."""
        deferred = self.sum_state("deferred_bytes")
        resting = self.sum_state("gradients_bytes")
        return resting if is_zero(deferred) else resting + deferred * (self.stage.pipeline.num_micro_batches > 1)

    @property
    def activations(self) -> Value:
        """Activations saved for the backward passes of the micro-batches in flight.

        Where backward passes are split, what waits for weight gradients counts too: beside the pass at work, or after
        it has ended and freed its workspace.
        """
        pipeline = self.stage.pipeline
        if not pipeline.form.splits_backward:
            return self._saved_bytes(self.in_flight)
        extra, moments = self._extra_weight_grad_bytes, self.other_peaks or ((self.in_flight, self.waiting),)
        ended = maximum(extra / pipeline.passes_each - self.peak.workspace - self.peak.logits, 0.0)
        waiting = (self._saved_bytes(in_flight) + num_awaiting * extra + ended for in_flight, num_awaiting in moments)
        return maximum(self._saved_bytes(self.in_flight), *waiting)

    def _saved_bytes(self, in_flight: Value) -> Value:
        """Return the bytes saved for so many micro-batches in flight."""
        stage = self.stage
        layers = [(unit, in_flight, count) for unit, count in stage.layer_passes.items()]
        modules = [(unit, self.at_end, count) for unit, count in stage.counts.predict_modules.items()]
        units, resident = layers + modules, stage.host.resident
        saved = {unit: 0 if is_zero(count) else resident(times * count) for unit, times, count in units}
        head_copies = 0 if is_zero(stage.counts.head) else self.at_end * stage.counts.head
        return sum_over_units(stage.activation, {**saved, "head": head_copies}, "saved_bytes")

    @property
    def _extra_weight_grad_bytes(self) -> Value:
        """Bytes of weight gradients' inputs beyond what is saved for the whole backward pass, of all layers.

        What came back from the host for the backward pass stays until the gradients are made.
        """
        stage = self.stage
        costs = [(stage.activation[unit], count) for unit, count in stage.layer_passes.items() if not is_zero(count)]
        if stage.host.activations:
            return sum((cost.waiting_bytes * count for cost, count in costs), start=0.0)
        return sum((maximum(cost.waiting_bytes - cost.saved_bytes, 0.0) * count for cost, count in costs), start=0.0)

    @cached_property
    def peak(self) -> PeakBytes:
        """Peak at the loss, in a layer's backward pass, or at the embedding of a stage without a head.

        The loss has freed the logits before the first layer runs backward, and the head its saved tensors; then the
        last module of multi-token prediction does. The share of the activations that stands for the workspace of
        engines that are not stepwise was measured with the latter still allocated.
        """
        counts, running, modules = self.stage.counts, self.stage.layer_passes, self.stage.counts.predict_modules
        if self.stepwise:
            return self._peak_stepwise
        if not (counts.head or counts.predict):
            return PeakBytes(self._workspace(running), 0.0, self._gathered)
        logits = sum_over_units(self.stage.activation, {"head": counts.head, **modules}, "logits_bytes")
        in_layer = PeakBytes(self._workspace({**running, **modules}), 0.0, self._gathered)
        return _larger_peak(in_layer, PeakBytes(0.0, logits, self._gathered))

    @property
    def _peak_stepwise(self) -> PeakBytes:
        """The largest of the loss, the last module of multi-token prediction, the last layer and the one before it."""
        counts, gathered = self.stage.counts, self._gathered_stepwise
        head, modules = {"head": counts.head}, counts.predict_modules
        total = partial(sum_over_units, self.stage.activation)
        workspace = self._workspace(self.stage.layer_passes) - total({**head, **modules}, "saved_bytes")
        logits = total({**head, **modules}, "logits_bytes")
        at_loss = PeakBytes(total(head, "workspace_bytes"), logits, gathered.at_loss)
        making = PeakBytes(total(head, "making_bytes"), logits, gathered.at_loss + gathered.of_loss)
        fullest = _larger_peak(PeakBytes(workspace, 0.0, gathered.in_layer), _larger_peak(at_loss, making))
        for unit, count in self.stage.layer_passes.items():
            if not is_zero(count):
                next_layer = workspace - self.stage.activation[unit].saved_bytes
                next_layer = PeakBytes(next_layer, 0.0, gathered.in_next_layer)
                next_layer = PeakBytes(*(where(count > 1, num_bytes, 0.0) for num_bytes in next_layer))
                fullest = _larger_peak(fullest, next_layer)
        if counts.embedding and not counts.head:
            freed = total(self.stage.layer_passes, "saved_bytes") / counts.carries
            fullest = _larger_peak(fullest, PeakBytes(-freed, 0.0, gathered.at_embedding))
        if not counts.predict:
            return fullest
        module = self._workspace({"predict": 1}) - total(head, "saved_bytes")
        logits = total({**modules, "predict": 0}, "logits_bytes")
        return _larger_peak(PeakBytes(module, logits, gathered.in_module), fullest)

    @property
    def workspace(self) -> Value:
        """Working memory at the peak: of the backward pass, or of a whole-matrix update if that needs more.

        In the update nothing is saved, so it may use all that is there at the peak beside the state.
        """
        update = _largest_unit(self.stage.state, self.stage.weight_copies, "update_bytes")
        backward = self.peak.workspace
        if isinstance(update, float) and update == 0.0:
            return backward
        present = self.activations + self.peak.logits + self.gathered + self.buffers
        return maximum(backward, update - present)

    def _workspace(self, times: Mapping[str, Value]) -> Value:
        """Return the workspace of the unit that needs the most while it runs backward."""
        return _largest_unit(self.stage.activation, times, "workspace_bytes")

    @property
    def _end_units(self) -> Mapping[str, int]:
        counts = self.stage.counts
        return {"embedding": counts.embedding, "head": counts.head, **counts.predict_modules}

    @property
    def _gathered(self) -> Value:
        """Bytes gathered for two neighbouring units of the largest: two layers of one kind, or a layer and its
        neighbour of another.

        For a TPU it is one unit: XLA gathers each weight ahead of its use and scatters each gradient as it comes, by
        the peaks that its compilers give (tests/crosscheck/golden). Source of two: PyTorch, FSDP2: a block at a time,
        the next one prefetched.
        """
        layers = self._of_layers("transient_bytes")
        edges = _largest_unit(self.stage.state, self._end_units, "transient_bytes")
        largest = maximum(0.0, *(size * (count > 0) for size, count in layers))
        if not self.gathers_ahead:
            return maximum(largest, edges) + self._lent_to_layers
        pairs = (size * (count > 0) + size * (count > 1) for size, count in layers)
        return maximum(largest + edges, *pairs) + self._lent_to_layers

    @property
    def _gathered_stepwise(self) -> GatheredBytes:
        """Bytes gathered at the loss, in the last module of multi-token prediction, in the last layer, in the one
        before, at the embedding.

        At the loss, weights of the head and of the unit before it, and the head's gradients; in that unit its own and those
        of the one before, its gradients, and the rest of the head's; in a module the head's weights too, and after it the
        gradients of the embedding that it has used. At the embedding, its weights and those of the next unit in the forward
        pass, or its gradients and those being scattered, of the layer or then its own, in the backward pass. Source:
        run/engine (weights are gathered one unit ahead; of gradients one flat array arrives while the next one's are made).
        """
        state, counts = self.stage.state, self.stage.counts
        head, embedding = state["head"], state["embedding"]
        gradients = self._of_layers("unscattered_bytes")
        transient = self._of_layers("transient_bytes")
        weights = [(size - gradient, count) for (size, count), (gradient, _) in zip(transient, gradients, strict=True)]
        of_layer, gradient_bytes, leaving = (
            maximum(0.0, *(size * (count > 0) for size, count in sizes))
            for sizes in (weights, gradients, self._of_layers("leaving_bytes"))
        )
        two_layers = maximum(of_layer, *(size * (count > 0) + size * (count > 1) for size, count in weights))
        of_head = counts.head * (head.transient_bytes - head.unscattered_bytes)
        head_gradients = self._head_gradients(of_head)
        lent = embedding.unscattered_bytes
        in_layer = two_layers + gradient_bytes + head_gradients.in_layer + self._lent_to_layers
        in_next = two_layers + gradient_bytes + head_gradients.before + leaving + self._lent_to_layers
        in_backward = lent + maximum(leaving, embedding.arriving_bytes)
        at_embedding = maximum(in_backward, embedding.transient_bytes - lent + of_layer)
        if not counts.predict:
            return GatheredBytes(of_layer + of_head, head_gradients.at_loss, 0.0, in_layer, in_next, at_embedding)
        module, lent = state["predict"], 0.0 if counts.tied else lent
        head_and_module = of_head + module.transient_bytes - module.unscattered_bytes
        in_module = head_and_module + module.unscattered_bytes + head_gradients.at_loss
        in_layer, in_next = in_layer + lent, in_next + lent
        return GatheredBytes(head_and_module, head_gradients.at_loss, in_module, in_layer, in_next, at_embedding)

    def _head_gradients(self, weights: Value) -> HeadGradientBytes:
        """Return the bytes of the head's gradients, where its gathered weights take `weights` bytes.

        Shards arrive when the weights have been freed. Gradients of a tied head are sent after the embedding's, and
        stay whole until then; where another stage has the embedding, after the norm's. Source:
        `step.parameters.group_parameters`, the gradient reducer of `run`.
        """
        counts, head = self.stage.counts, self.stage.state["head"]
        gradients, shards = head.unscattered_bytes, head.arriving_bytes
        if not counts.head:
            return HeadGradientBytes(0.0, 0.0, 0.0)
        if not counts.tied:
            return HeadGradientBytes(gradients + maximum(shards - weights, 0.0), head.leaving_bytes, 0.0)
        if counts.embedding:
            return HeadGradientBytes(gradients, gradients, gradients)
        return HeadGradientBytes(gradients, gradients + shards, 0.0)

    @property
    def _lent_to_layers(self) -> Value:
        """Bytes of gradients of weights that layers use and another layer owns, from their last use to their first."""
        return sum((size * (count > 0) for size, count in self._of_layers("lent_bytes")), start=0.0)

    def _of_layers(self, field: str) -> list[tuple[Value, Value]]:
        """Return a field of each kind of layer that the stage has, with the number of layers."""
        layers = self.stage.counts.layers
        return [(getattr(self.stage.state[unit], field), count) for unit, count in layers.items() if not is_zero(count)]

    @property
    def gathered(self) -> Value:
        """Bytes that ZeRO gathers for all concurrent passes, and gradients in transit into another format."""
        passing = _largest_unit(self.stage.state, self.stage.weight_copies, "passing_bytes")
        return scale_by_count(self.stage.pipeline.concurrent_passes, self.peak.gathered + passing)

    @property
    def buffers(self) -> Value:
        """Buffers of the largest collective of each concurrent pass."""
        counts = self.stage.counts
        units = {**self.stage.layer_passes, "head": counts.head, **counts.predict_modules}
        largest = _largest_unit(self.stage.activation, units, "buffer_bytes")
        return scale_by_count(self.stage.pipeline.concurrent_passes, largest)


def price_device_memory(
    stage: StageCosts, number: Value, chip: Chip, *, holding: Value = 1.0, stepwise: bool = False
) -> DeviceMemory:
    """Return the memory of a device of one stage, by its index (from 0); `holding`: see `Pipeline.in_flight`."""
    return DeviceMemory(
        stage=stage, in_flight=stage.pipeline.in_flight(number, holding), waiting=stage.pipeline.awaiting_weight_grads(number),
        other_peaks=stage.pipeline.other_peaks(number, holding),
        at_end=stage.pipeline.in_flight_at_end, runtime_bytes=chip.runtime_bytes, gathers_ahead=chip.vendor != "Google",
        stepwise=stepwise,
    )  # fmt: skip


def _larger_peak(first: PeakBytes, second: PeakBytes) -> PeakBytes:
    """Return the larger of two peaks, row by row for arrays."""
    more = sum(first) > sum(second)
    return PeakBytes(*(where(more, a, b) for a, b in zip(first, second, strict=True)))


def _largest_unit(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """Return the largest of a field among the units that the stage has."""
    present = ((unit, count) for unit, count in times.items() if not is_zero(count))
    return maximum(0.0, *(getattr(costs[unit], field) * (count > 0) for unit, count in present))
