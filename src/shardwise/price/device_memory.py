"""The memory of one device of a pipeline stage, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, NamedTuple

from shardwise.hardware.chips import Chip
from shardwise.pipeline.schedule import PeakCandidates
from shardwise.price.stage_contents import RESIDENT_UNITS, StageCosts
from shardwise.price.unit_cost import ActivationCost, StateCost, is_zero, scale_by_count, sum_over_units
from shardwise.values.elementwise import Value, maximum, where


class PeakBytes(NamedTuple):
    """Bytes when the device is the fullest: workspace, logits, and what ZeRO gathers for one micro-batch at a time."""

    workspace: Value
    logits: Value
    gathered: Value


class HeadGradientBytes(NamedTuple):
    """Bytes of the head's gradients, whole and scattered: at the loss, in the last layer, in those before it."""

    at_loss: Value
    in_layer: Value
    further: Value


class GatheredBytes(NamedTuple):
    """Bytes that ZeRO gathers at the loss, in the last module of multi-token prediction, in the last layer, in the one before,
    at the embedding. `of_loss`: gradients that the head makes beside."""

    at_loss: Value
    of_loss: Value
    in_module: Value
    in_layer: Value
    in_next_layer: Value
    at_embedding: Value


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one device of a stage. `gathers_ahead`: ZeRO has what two units use, not one; `stepwise`: see
    `values.loss_kernels.LossKernel`.

    Activations of layers are kept for every micro-batch in flight, those of head and multi-token prediction, which the last
    virtual stage has, for those `at_end`, the loss over the logits for one. One that waits for its weight gradients holds what
    they are made of instead, which counts where it is more. With passes from both ends two run at once. What the host holds is
    not among them, but for what is on its way.
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
        """State at rest; for state on the host, what is in transfer."""
        if offloaded:
            return RESIDENT_UNITS * _largest_unit(self.stage.state, self.stage.weight_copies, field)
        return self.stage.sum_state(field)

    @property
    def activations(self) -> Value:
        """Activations saved for the backward passes of the micro-batches in flight.

        Where backward passes are split, what waits for weight gradients as well: beside the pass at work, or with its own when
        that has ended, and its workspace with it.
        """
        pipeline = self.stage.pipeline
        if not pipeline.form.splits_backward:
            return self._saved_bytes(self.in_flight)
        more, moments = self._extra_weight_grad_bytes, self.other_peaks or ((self.in_flight, self.waiting),)
        ended = maximum(more / pipeline.passes_each - self.peak.workspace - self.peak.logits, 0.0)
        waiting = (self._saved_bytes(held) + waits * more + ended for held, waits in moments)
        return maximum(self._saved_bytes(self.in_flight), *waiting)

    def _saved_bytes(self, in_flight: Value) -> Value:
        """Bytes that are saved for so many micro-batches in flight."""
        stage = self.stage
        layers = [(unit, in_flight, count) for unit, count in stage.layer_passes.items()]
        behind = [(unit, self.at_end, count) for unit, count in stage.counts.predict_modules.items()]
        kept = {u: 0 if is_zero(count) else stage.host.resident(times * count) for u, times, count in layers + behind}
        of_head = 0 if is_zero(stage.counts.head) else self.at_end * stage.counts.head
        return sum_over_units(stage.activation, {**kept, "head": of_head}, "saved_bytes")

    @property
    def _extra_weight_grad_bytes(self) -> Value:
        """Bytes that weight gradients of layers are made of beyond what is saved for the whole backward pass.

        What came back from the host for the backward pass does not leave again: all of it stays until the gradients are made.
        """
        stage = self.stage
        costs = [(stage.activation[unit], count) for unit, count in stage.layer_passes.items() if not is_zero(count)]
        if stage.host.activations:
            return sum((one.waiting_bytes * count for one, count in costs), start=0.0)
        return sum((maximum(one.waiting_bytes - one.saved_bytes, 0.0) * count for one, count in costs), start=0.0)

    @cached_property
    def peak(self) -> PeakBytes:
        """At the loss, in a layer's backward pass, or at the embedding of a stage without a head.

        The loss has freed the logits before the first layer runs backward, and the head its saved tensors; then the last
        module of multi-token prediction does. The share of the activations that stands for the workspace of engines that are
        not stepwise was measured with the latter still allocated.
        """
        counts, running, further = self.stage.counts, self.stage.layer_passes, self.stage.counts.predict_modules
        if self.stepwise:
            return self._peak_stepwise
        if not (counts.head or counts.predict):
            return PeakBytes(self._workspace(running), 0.0, self._gathered)
        logits = sum_over_units(self.stage.activation, {"head": counts.head, **further}, "logits_bytes")
        in_layer = PeakBytes(self._workspace({**running, **further}), 0.0, self._gathered)
        return _larger_peak(in_layer, PeakBytes(0.0, logits, self._gathered))

    @property
    def _peak_stepwise(self) -> PeakBytes:
        """The fullest of the loss, the last module of multi-token prediction, the last layer and the one before it."""
        counts, gathered = self.stage.counts, self._gathered_stepwise
        head, further = {"head": counts.head}, counts.predict_modules
        total = partial(sum_over_units, self.stage.activation)
        workspace = self._workspace(self.stage.layer_passes) - total({**head, **further}, "saved_bytes")
        logits = total({**head, **further}, "logits_bytes")
        at_loss = PeakBytes(total(head, "workspace_bytes"), logits, gathered.at_loss)
        making = PeakBytes(total(head, "making_bytes"), logits, gathered.at_loss + gathered.of_loss)
        fullest = _larger_peak(PeakBytes(workspace, 0.0, gathered.in_layer), _larger_peak(at_loss, making))
        for unit, count in self.stage.layer_passes.items():
            if not is_zero(count):
                behind = workspace - self.stage.activation[unit].saved_bytes
                behind = PeakBytes(behind, 0.0, gathered.in_next_layer)
                fullest = _larger_peak(fullest, PeakBytes(*(where(count > 1, one, 0.0) for one in behind)))
        if counts.embedding and not counts.head:
            gone = total(self.stage.layer_passes, "saved_bytes") / counts.carries
            fullest = _larger_peak(fullest, PeakBytes(-gone, 0.0, gathered.at_embedding))
        if not counts.predict:
            return fullest
        module = self._workspace({"predict": 1}) - total(head, "saved_bytes")
        return _larger_peak(
            PeakBytes(module, total({**further, "predict": 0}, "logits_bytes"), gathered.in_module), fullest
        )

    @property
    def workspace(self) -> Value:
        """Of the backward pass when it is the fullest; more where the update, for which nothing is saved, needs more than all
        that is there then beside the state."""
        update = _largest_unit(self.stage.state, self.stage.weight_copies, "update_bytes")
        own = self.peak.workspace
        if isinstance(update, float) and update == 0.0:
            return own
        others = self.activations + self.peak.logits + self.gathered + self.buffers
        return maximum(own, update - others)

    def _workspace(self, times: Mapping[str, Value]) -> Value:
        """Workspace of the unit that needs the most while it runs backward."""
        return _largest_unit(self.stage.activation, times, "workspace_bytes")

    @property
    def _end_units(self) -> Mapping[str, int]:
        counts = self.stage.counts
        return {"embedding": counts.embedding, "head": counts.head, **counts.predict_modules}

    @property
    def _gathered(self) -> Value:
        """Two neighbouring units of the largest: two layers of one kind, or a layer and its neighbour of another.

        On a TPU those of one: XLA gathers each weight ahead of its use and scatters each gradient as it comes, by the peaks that
        its compilers give (tests/crosscheck/golden). Source of two: PyTorch, FSDP2: a block at a time, the next one prefetched.
        """
        layers = self._of_layers("transient_bytes")
        edges = _largest_unit(self.stage.state, self._end_units, "transient_bytes")
        most = maximum(0.0, *(size * (count > 0) for size, count in layers))
        if not self.gathers_ahead:
            return maximum(most, edges)
        pairs = (size * (count > 0) + size * (count > 1) for size, count in layers)
        return maximum(most + edges, *pairs)

    @property
    def _gathered_stepwise(self) -> GatheredBytes:
        """What is gathered at the loss, in the last module of multi-token prediction, in the last layer, in the one before and at
        the embedding.

        At the loss, weights of the head and of the unit before it, and the head's gradients; in that unit its own and those of
        the one before, its gradients, and what is left of the head's; in a module the head's weights too, and behind it the
        gradients of the embedding that it has used. At the embedding, its weights and those of the next unit in the forward pass,
        or its gradients and what is being scattered, of the layer's or then of its own, in the backward pass. Source:
        train/parallel (weights are gathered one unit ahead; of gradients one flat array arrives while the next one's are made).
        """
        state, counts = self.stage.state, self.stage.counts
        head, embedding = state["head"], state["embedding"]
        gradients = self._of_layers("unscattered_bytes")
        whole = self._of_layers("transient_bytes")
        weights = [(size - own, count) for (size, count), (own, _) in zip(whole, gradients, strict=True)]
        of_layer, made, leaving = (
            maximum(0.0, *(size * (count > 0) for size, count in sizes))
            for sizes in (weights, gradients, self._of_layers("leaving_bytes"))
        )
        two = maximum(of_layer, *(size * (count > 0) + size * (count > 1) for size, count in weights))
        of_head = counts.head * (head.transient_bytes - head.unscattered_bytes)
        own = self._head_gradients(of_head)
        lent = embedding.unscattered_bytes
        in_layer, in_next = two + made + own.in_layer, two + made + own.further + leaving
        at_embedding = maximum(
            lent + maximum(leaving, embedding.arriving_bytes), embedding.transient_bytes - lent + of_layer
        )
        if not counts.predict:
            return GatheredBytes(of_layer + of_head, own.at_loss, 0.0, in_layer, in_next, at_embedding)
        module, lent = state["predict"], 0.0 if counts.tied else lent
        both = of_head + module.transient_bytes - module.unscattered_bytes
        in_module = both + module.unscattered_bytes + own.at_loss
        return GatheredBytes(both, own.at_loss, in_module, in_layer + lent, in_next + lent, at_embedding)

    def _head_gradients(self, weights: Value) -> HeadGradientBytes:
        """Those of the head, beside so many bytes of its gathered weights.

        Parts arrive when these have left. Gradients of a tied head are sent behind the embedding's, and stay whole until then;
        where another stage has the embedding, behind the norm's. Source: `step.parameters.group_parameters`,
        `run.parallel.gradient_reducer`.
        """
        counts, head = self.stage.counts, self.stage.state["head"]
        whole, part = head.unscattered_bytes, head.arriving_bytes
        if not counts.head:
            return HeadGradientBytes(0.0, 0.0, 0.0)
        if not counts.tied:
            return HeadGradientBytes(whole + maximum(part - weights, 0.0), head.leaving_bytes, 0.0)
        return (
            HeadGradientBytes(whole, whole, whole) if counts.embedding else HeadGradientBytes(whole, whole + part, 0.0)
        )

    def _of_layers(self, field: str) -> list[tuple[Value, Value]]:
        """A field of each kind of layer that the stage has, with how many it has."""
        layers = self.stage.counts.layers
        return [(getattr(self.stage.state[unit], field), count) for unit, count in layers.items() if not is_zero(count)]

    @property
    def gathered(self) -> Value:
        """What ZeRO gathers for all passes that run at once, and gradients on their way into another format."""
        passing = _largest_unit(self.stage.state, self.stage.weight_copies, "passing_bytes")
        return scale_by_count(self.stage.pipeline.concurrent_passes, self.peak.gathered + passing)

    @property
    def buffers(self) -> Value:
        """Those of the largest collective of each pass that runs at once."""
        counts = self.stage.counts
        several = {**self.stage.layer_passes, "head": counts.head, **counts.predict_modules}
        return scale_by_count(
            self.stage.pipeline.concurrent_passes, _largest_unit(self.stage.activation, several, "buffer_bytes")
        )


def price_device_memory(
    stage: StageCosts, number: Value, chip: Chip, *, holding: Value = 1.0, stepwise: bool = False
) -> DeviceMemory:
    """The memory of a device of one stage, by its index (from 0); `holding`: see `Pipeline.in_flight`."""
    return DeviceMemory(
        stage=stage, in_flight=stage.pipeline.in_flight(number, holding), waiting=stage.pipeline.awaiting_weight_grads(number),
        other_peaks=stage.pipeline.other_peaks(number, holding),
        at_end=stage.pipeline.in_flight_at_end, runtime_bytes=chip.runtime_bytes, gathers_ahead=chip.vendor != "Google",
        stepwise=stepwise,
    )  # fmt: skip


def _larger_peak(one: PeakBytes, other: PeakBytes) -> PeakBytes:
    """The one of two moments that holds more."""
    more = sum(one) > sum(other)
    return PeakBytes(*(where(more, a, b) for a, b in zip(one, other, strict=True)))


def _largest_unit(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """The largest of a field among the units that the stage has."""
    return maximum(
        0.0, *(getattr(costs[unit], field) * (count > 0) for unit, count in times.items() if not is_zero(count))
    )
