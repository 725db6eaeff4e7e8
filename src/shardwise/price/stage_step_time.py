"""Step time of one pipeline stage, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

from shardwise.model import OverlapConvention
from shardwise.pipeline import PassSeconds
from shardwise.price.overlap import HIDEABLE, HIDEABLE_TOGETHER, exposed_by_axis, exposed_s
from shardwise.price.stage_contents import StageCosts
from shardwise.price.unit_cost import ACTIVATION_AXES, SecondsByAxis, scale_by_count, sum_over_units
from shardwise.values import Value, maximum


class StepSpan(NamedTuple):
    """Part of a step: how often it occurs, its compute, and the communication beside it, of which some axes' can hide."""

    times: Annotated[Value, "how often this part of the step comes"]
    compute_s: Annotated[Value, "its compute"]
    traffic_s: Annotated[SecondsByAxis, "the traffic beside that"]
    hideable: tuple[str, ...] = HIDEABLE


class CommunicationTime(NamedTuple):
    """Seconds of a step by axis, and of transfers to and from the host as `host`: exposed, and hidden behind compute."""

    exposed_s: dict[str, float]
    hidden_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StageStep:
    """Step of a stage.

    `share`: the measured share of communication that is exposed where no kernel waits for it; None: as the convention
    `overlap` says. The embedding's weight is gathered where it is used, whoever holds it. Weight gradients of layers
    can wait; those of embedding and head are taken at once, for the gradients of logits are too large to keep. In a
    bidirectional pipeline two devices hold the same weights and exchange gradients.
    """

    stage: StageCosts
    overlap: OverlapConvention
    share: Annotated[Value | None, "measured exposed share of communication that no kernel waits for", "exposed"] = None

    @cached_property
    def forward_s(self) -> Value:
        """Seconds of a micro-batch's forward pass."""
        return self.stage.sum_activation("forward_s")

    @cached_property
    def backward_s(self) -> Value:
        """Seconds of its backward pass, without what is recomputed."""
        return self.stage.sum_activation("backward_s")

    @cached_property
    def recompute_s(self) -> Value:
        """Seconds of what is recomputed for its backward pass."""
        return self.stage.sum_activation("recompute_s")

    @cached_property
    def weight_s(self) -> Value:
        """Seconds of the part of the backward pass that can wait, where the schedule splits it."""
        splits = self.stage.pipeline.form.splits_backward
        return sum_over_units(self.stage.activation, self.stage.layer_passes, "weight_s") if splits else 0.0

    @cached_property
    def update_s(self) -> Annotated[Value, "the update's kernels"]:
        """Seconds of the update's kernels."""
        return self.stage.sum_state("update_s")

    @cached_property
    def host_s(self) -> Annotated[Value, "a micro-batch's activations to the host, and as long back"]:
        """Seconds of a micro-batch's activations to the host, and as many back."""
        host, leaving = self.stage.host, {**self.stage.layer_passes, **self.stage.counts.predict_modules}
        if not host.activations:
            return 0.0
        return sum_over_units(self.stage.activation, leaving, "saved_bytes") / host.bytes_per_s

    @cached_property
    def stream_s(self) -> Annotated[Value, "the optimizer's state through the device, or through the host's update"]:
        """Seconds of the optimizer's state through the device, or of its update on the host."""
        host, rests = self.stage.host, self.stage.sum_state
        return (rests("master_bytes") + rests("optimizer_bytes")) / host.state_bytes_per_s if host.optimizer else 0.0

    @cached_property
    def forward_communication_s(self) -> SecondsByAxis:
        """Seconds of collectives by axis in a micro-batch's forward pass."""
        # the embedding gathers what only it has (`untied`) with the rest of its weights
        gathering = {**self.stage.weight_copies, "embedding": self.stage.counts.embedding, "untied": 0}
        gathered = sum_over_units(self.stage.state, gathering, "gather_forward_s")
        exposed = {axis: self.stage.sum_activation("forward_traffic_s", axis) for axis in ACTIVATION_AXES}
        return exposed | {"fsdp": gathered}

    @cached_property
    def backward_communication_s(self) -> SecondsByAxis:
        """Seconds of collectives by axis in a micro-batch's backward pass."""
        gathered = self.stage.sum_state("gather_backward_s")
        exposed = {axis: self.stage.sum_activation("backward_traffic_s", axis) for axis in ACTIVATION_AXES}
        return exposed | {"fsdp": gathered}

    @cached_property
    def first_forward_communication_s(self) -> SecondsByAxis:
        """Seconds by axis in the first micro-batch's forward pass, with the step's weights."""
        return {
            **self.forward_communication_s,
            "fsdp": self.forward_communication_s["fsdp"] + self.stage.sum_state("step_weights_s"),
        }

    @cached_property
    def last_backward_communication_s(self) -> SecondsByAxis:
        """Seconds by axis in the last micro-batch's backward pass, with the step's gradients."""
        stage, backward = self.stage, self.backward_communication_s
        step = {axis: stage.sum_state("step_traffic_s", axis) for axis in ("fsdp", "dp", "control")}
        last = {**backward, **step, "fsdp": backward["fsdp"] + step["fsdp"]}
        if stage.counts.exchanges:
            last["pp"] = last["pp"] + stage.state["embedding"].exchange_s
        if stage.pipeline.form.bidirectional:
            last["pp"] = last["pp"] + stage.sum_state("exchange_s")
        return last

    @cached_property
    def spans(self) -> Mapping[str, StepSpan]:
        """Parts of the step: steady forward and backward passes, alone and together, the first and the last pass."""
        pipeline, work_b = self.stage.pipeline, self.backward_s + self.recompute_s
        num_alone = pipeline.rounds - (1 + pipeline.overlapped_rounds if pipeline.form.runs_pairs else 1)
        parts = {
            "forward": StepSpan(num_alone, self.forward_s, self.forward_communication_s),
            "backward": StepSpan(num_alone, work_b, self.backward_communication_s),
        }
        if pipeline.form.runs_pairs:
            # a forward and a backward pass of different micro-batches at once: each hides the other's communication
            backward_s = self.backward_communication_s
            traffic = {axis: seconds + backward_s[axis] for axis, seconds in self.forward_communication_s.items()}
            work = self.forward_s + self.backward_s + self.recompute_s
            parts["together"] = StepSpan(pipeline.overlapped_rounds, work, traffic, HIDEABLE_TOGETHER)
        first = StepSpan(1, self.forward_s, self.first_forward_communication_s)
        return {**parts, "first": first, "last": StepSpan(1, work_b, self.last_backward_communication_s)}

    @cached_property
    def seconds(self) -> Mapping[str, Value]:
        """Seconds of one occurrence of each span, exposed communication included."""
        return {name: _with_host_copies(self._span_s(span), self.host_s) for name, span in self.spans.items()}

    def _span_s(self, span: StepSpan) -> Value:
        return span.compute_s + exposed_s(self.overlap, span.compute_s, span.traffic_s, span.hideable, self.share)

    @cached_property
    def steady(self) -> PassSeconds:
        """Seconds of the passes that the bubble consists of."""
        seconds = self.seconds
        return PassSeconds(seconds["forward"], seconds["backward"], self.weight_s, seconds.get("together", 0.0))

    @cached_property
    def bubble_s(self) -> Value:
        """Seconds that the stage waits, without communication once per step."""
        # rebuilt field by field, so that an explanation notes all four as inputs, whichever the schedule reads
        steady = self.steady
        passes = PassSeconds(steady.forward_s, steady.backward_s, steady.weight_s, steady.overlapped_s)
        return self.stage.pipeline.bubble_s(passes)

    @cached_property
    def total_s(self) -> Value:
        """Seconds of all micro-batches, the bubble and the update."""
        total = self.bubble_s + _with_host_copies(self.update_s, self.stream_s)
        for name, span in self.spans.items():
            total = total + scale_by_count(span.times, self.seconds[name])
        return total

    @cached_property
    def communication(self) -> CommunicationTime:
        """Exposed and hidden seconds of one layout's collectives and host transfers."""
        late_s = max(self.stream_s - self.update_s, 0.0)
        total = CommunicationTime({"host": late_s}, {"host": self.stream_s - late_s})
        for span in self.spans.values():
            compute_s, traffic_s, times = span.compute_s, span.traffic_s, span.times
            exposed = exposed_by_axis(self.overlap, compute_s, traffic_s, span.hideable, self.share)
            exposed["host"] = max(self.host_s - compute_s - sum(exposed.values()), 0.0)
            for axis, seconds in {**traffic_s, "host": self.host_s}.items():
                total.exposed_s[axis] = total.exposed_s.get(axis, 0.0) + times * exposed[axis]
                total.hidden_s[axis] = total.hidden_s.get(axis, 0.0) + times * (seconds - exposed[axis])
        return total


def _with_host_copies(span_s: Value, host_s: Value) -> Value:
    """Return the seconds of a span with host transfers beside all of it: the longer of the two.

    PCIe is full-duplex, so those of a forward and a backward pass that run together do not add up.
    """
    return span_s if isinstance(host_s, float) and host_s == 0.0 else maximum(span_s, host_s)
