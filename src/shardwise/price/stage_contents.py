"""Contents of one device of a pipeline stage, how often they run, and how micro-batches go through the stages. Numbers
or arrays.

Offload: what rests in the memory of the host in place of the device's, and the transfers over PCIe that it takes.
Activations leave for the host as the forward pass goes on and come back ahead of the backward pass, beside whatever the
device does; what takes longer than that is exposed. Two layers stay: the running one and the one in transit. Source:
Transformer Engine, get_cpu_offload_context; Megatron-Core, cpu_offloading: double buffers, both ways beside compute.

The optimizer's moments and master weights stream through the device for the update, up and down at once (PCIe is
full-duplex), beside the update's own kernels; two units of the model are resident at a time. Source: MaxText,
optimizer_memory_host_offload: state in pinned host memory that the device takes in for the update. Differs: ZeRO-Offload (Ren
et al. 2021) sends gradients down and weights up, 2 + 2 bytes for a parameter in place of 12 + 12, and updates on the host,
whose memory is slower still and has no source here. PCIe is assumed not to be shared with the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

from shardwise.hardware import Chip
from shardwise.layout.layout import get_offload_targets
from shardwise.model import Architecture
from shardwise.model.decoder import has_untied_embedding_weights, mtp_unit_counts
from shardwise.pipeline import PassSeconds, get_schedule
from shardwise.pipeline.schedule_definition import PeakCandidates, Schedule
from shardwise.price.unit_cost import ActivationCost, StateCost, sum_over_units
from shardwise.values import Value, minimum

RESIDENT_UNITS = 2  # layers, or units of the model, on the device at a time: one in work, one on its way


# An update on the host: bytes/s of the memory of a host's two sockets, each with eight channels of DDR5-4800 (NVIDIA, DGX H100
# user guide: two Xeon Platinum 8480C), the share that kernels over long arrays sustain (`CONSTANTS`: memory_fraction), and the
# bytes that it moves for each byte of state. Source of these: DeepSpeed 0.19, csrc/includes/cpu_adam.h and
# runtime/zero/stage3.py: the fp32 copy of a gradient is written, scaled in place and read (4 + 8 + 4), master copy and moments
# are read and written (24), the weight is cast and sent (2 + 2): 44 bytes for the 12 of a parameter's state.
HOST_MEMORY_BYTES_PER_S, HOST_MEMORY_FRACTION, MOVED_STATE = 614e9, 0.75, 44 / 12
DEVICES_PER_HOST = 8  # of chips whose entry does not say


class HostOffload(NamedTuple):
    """State that a layout keeps on the host, and bytes/s between a device and its host in each direction.

    `state_bytes_per_s`: bytes of the optimizer's state that are updated in a second for one device, where it streams through the
    device, or where the host updates it.
    """

    optimizer: Annotated[bool, "whether the host has the optimizer's state", "optimizer_on_host"]
    activations: Annotated[bool, "whether the host has activations", "activations_on_host"]
    bytes_per_s: Annotated[float, "PCIe, each way", "pcie_bytes_per_s"]
    state_bytes_per_s: Annotated[float, "state that is updated, of one device", "host_update_bytes_per_s"] = float(
        "inf"
    )

    def resident(self, times: Value) -> Value:
        """Return how many of `times` saved copies of a unit's activations are on the device."""
        return minimum(times, RESIDENT_UNITS) if self.activations else times


NO_OFFLOAD = HostOffload(optimizer=False, activations=False, bytes_per_s=float("inf"))


def host_offload(offload: str, chip: Chip, *, updates: bool = False) -> HostOffload:
    """Return the host's part of a layout's `offload`; with `updates` the host updates the optimizer's state, else it streams it.

    Raises `MissingValueError` when the chip has no sourced `pcie_bytes_per_s`, `InputError` for an unknown offload.
    """
    targets = get_offload_targets(offload)
    if not any(targets):
        return NO_OFFLOAD
    rate = chip.require_value("pcie_bytes_per_s")
    assert isinstance(rate, (int, float))
    update_rate = (
        HOST_MEMORY_BYTES_PER_S * HOST_MEMORY_FRACTION / MOVED_STATE / (chip.devices_per_host or DEVICES_PER_HOST)
    )
    state_rate = min(rate, update_rate) if updates else rate
    return HostOffload(targets.optimizer, targets.activations, float(rate), float(state_rate))


class Pipeline(NamedTuple):
    """Numbers by which micro-batches go through the stages.

    In a bidirectional pipeline a device's two stages count as one, and so do two micro-batches, one from either end:
    `rounds` of them make a step. `uneven`: what virtual stages with different numbers of layers add to the bubble
    (`pipeline.uneven_stage_costs`). `missing`: share of the last micro-batch that has no sequences, by which its passes are
    shorter.
    """

    schedule: str
    pp: Annotated[Value, "pipeline stages", "p"]
    num_virtual_stages: Annotated[Value, "virtual stages of a stage", "v"]
    num_micro_batches: Annotated[Value, "micro-batches", "m"]
    uneven: Annotated[Value, "micro-batches that uneven virtual stages add", "u"] = 0.0
    missing: Annotated[Value, "share of the last micro-batch without sequences", "n"] = 0.0

    @property
    def form(self) -> Schedule:
        """The schedule."""
        return get_schedule(self.schedule)

    @property
    def ends(self) -> int:
        """Number of ends at which micro-batches enter: 2 in a bidirectional pipeline, else 1."""
        return 2 if self.form.bidirectional else 1

    @property
    def passes_each(self) -> Value:
        """Forward passes of a device in a round: through each virtual stage, from each end."""
        return self.num_virtual_stages * self.ends

    @property
    def concurrent_passes(self) -> int:
        """Passes that run together on a device."""
        return 2 if self.form.runs_pairs else 1

    @property
    def rounds(self) -> Value:
        return self._in_rounds(self.num_micro_batches - self.missing)

    @property
    def overlapped_rounds(self) -> Value:
        """Rounds whose forward and backward passes run together with others'."""
        return self._in_rounds(self.form.num_overlapped(self.pp, self.num_virtual_stages, self.num_micro_batches))

    def bubble_s(self, passes: PassSeconds) -> Value:
        """Return the seconds that the device waits; `passes` are those of a round."""
        even = self._in_rounds(self.form.bubble_s(self.pp, self.num_virtual_stages, self.num_micro_batches, passes))
        if isinstance(self.uneven, float) and self.uneven == 0.0:
            return even
        return even + self.uneven * (passes.forward_s + passes.backward_s)

    def in_flight(self, stage: Value, holding: Value = 1.0) -> Value:
        """Return the rounds whose activations a stage holds; `holding`: factor over virtual stages with equal layers."""
        even = self.form.in_flight(self.pp, self.num_virtual_stages, self.num_micro_batches, stage)
        return self._scale_in_flight(even, holding)

    def other_peaks(self, stage: Value, holding: Value = 1.0) -> PeakCandidates:
        """Return further candidates for a device's peak: rounds in flight, and rounds of pending weight gradients
        beside the one at work."""
        moments = self.form.other_peaks(self.pp, self.num_virtual_stages, self.num_micro_batches, stage)
        return tuple((self._scale_in_flight(even, holding), self._in_rounds(awaiting)) for even, awaiting in moments)

    def _scale_in_flight(self, even: Value, holding: Value) -> Value:
        if isinstance(holding, float) and holding == 1.0:
            return self._in_rounds(even)
        return self._in_rounds(minimum(self.num_micro_batches, even * holding))

    @property
    def in_flight_at_end(self) -> Value:
        """Micro-batches between their forward and backward pass through head and multi-token prediction."""
        return self.form.num_at_end(self.pp, self.num_virtual_stages, self.num_micro_batches)

    def awaiting_weight_grads(self, stage: Value) -> Value:
        """Return how many of the rounds in flight may wait for their weight gradients only."""
        shape = self.pp, self.num_virtual_stages, self.num_micro_batches
        return self._in_rounds(self.form.num_awaiting_weight_grads(*shape, stage))

    def _in_rounds(self, number: Value) -> Value:
        """Convert a number of micro-batches to rounds."""
        return number / self.ends if self.ends > 1 else number


NO_RECOMPUTE = "kept_"  # prefix of the kind of layers without recomputation, in a stage where others recompute


class StageCounts(NamedTuple):
    """Contents of a stage: layers by kind, embedding and head (1 or 0), and virtual stages that it sends from.

    `kept` are the layers by kind that do not recompute though the others do; empty where all layers do the same.
    `predict` are modules of multi-token prediction, on the last stage. `copies` counts those of the embedding's
    weights: 0 where the head's serves (tied, and one stage holds both), with `untied` for weights that only the
    embedding has; `exchanges` is 1 where the gradients of two copies are exchanged (first and last stage of a
    pipeline). `tied` is 1 where the head's weight is the embedding's.
    """

    layers: Annotated[Mapping[str, Value], "layers of the stage"]
    embedding: Annotated[int, "embeddings of the stage"]
    head: Annotated[int, "heads of the stage"]
    predict: Annotated[int, "modules of multi-token prediction of the stage"]
    carries: Annotated[Value, "virtual stages that it hands over from"]
    copies: Annotated[int, "copies of the embedding's weight on the stage"]
    exchanges: Annotated[int, "whether gradients of that weight are exchanged"]
    kept: Annotated[Mapping[str, Value], "layers of the stage that recompute nothing"]
    untied: Annotated[int, "embeddings of which the stage holds what no head has"]
    tied: Annotated[int, "heads of the stage whose weight is the embedding's"]

    @property
    def units(self) -> dict[str, Value]:
        """Number of times that each unit computes on the stage."""
        return {**self.layer_passes, "embedding": self.embedding, "head": self.head, **self.predict_modules}

    @property
    def layer_passes(self) -> dict[str, Value]:
        """Layers by kind; those that do not recompute are kinds of their own."""
        recomputed = {kind: count - self.kept.get(kind, 0) for kind, count in self.layers.items()}
        return {**recomputed, **{NO_RECOMPUTE + kind: count for kind, count in self.kept.items()}}

    @property
    def weight_copies(self) -> dict[str, Value]:
        """Number of times that the stage holds each unit's weights."""
        return {
            **self.layers, "embedding": self.copies, "untied": self.untied, "head": self.head, **self.predict_modules,
        }  # fmt: skip

    @property
    def predict_modules(self) -> dict[str, int]:
        """Modules of multi-token prediction by kind."""
        return mtp_unit_counts(self.predict)


class ModelEnds(NamedTuple):
    """Properties of a model that its stages depend on."""

    tied: bool
    untied: bool  # whether a tied embedding has weights that the head lacks
    num_predict_layers: int

    @classmethod
    def of(cls, architecture: Architecture) -> ModelEnds:
        """Return the properties of an architecture."""
        return cls(
            architecture.tied_embeddings, has_untied_embedding_weights(architecture), architecture.num_predict_layers
        )

    @property
    def units_without_passes(self) -> tuple[str, ...]:
        """Units that no micro-batch passes through, whose weights a stage may hold."""
        return ("untied",) if self.untied else ()


def stage_counts(
    layers: Mapping[str, Value], model: ModelEnds, *, first: bool, last: bool, carries: Value,
    recomputed: Mapping[str, Value] | None = None,
) -> StageCounts:  # fmt: skip
    """Count the contents of a device that has the first stage of the model, the last, both or neither.

    Both are on one device without a pipeline, in a bidirectional pipeline (`layers` are then those of a stage and its
    mirror), and with virtual stages down the ranks and up again. A tied embedding is one tensor with two uses, and so
    is one that multi-token prediction borrows. `carries`: virtual stages of the device that send to another device or
    receive from one. `recomputed`: layers by kind that recompute; None: all.
    """
    alone = first and last
    borrowed = last and model.num_predict_layers > 0
    return StageCounts(
        layers, embedding=int(first), head=int(last), predict=model.num_predict_layers if last else 0, carries=carries,
        copies=int((first and not (model.tied and alone)) or (borrowed and not alone and not model.tied)),
        exchanges=int((model.tied or model.num_predict_layers > 0) and first != last),
        kept={} if recomputed is None else {kind: count - recomputed[kind] for kind, count in layers.items()},
        untied=int(alone and model.untied), tied=int(last and model.tied),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Contents of one device of a stage, the cost of each unit, and the order of micro-batches through the stages."""

    counts: StageCounts
    activation: Mapping[str, ActivationCost]
    state: Mapping[str, StateCost]
    pipeline: Pipeline
    host: HostOffload = NO_OFFLOAD

    @cached_property
    def layer_passes(self) -> Mapping[str, Value]:
        """Layers by kind; those that do not recompute are kinds of their own."""
        return self.counts.layer_passes

    @cached_property
    def weight_copies(self) -> Mapping[str, Value]:
        """Number of times that the stage holds each unit's weights."""
        return self.counts.weight_copies

    @cached_property
    def unit_passes(self) -> Mapping[str, Value]:
        """Number of times that a micro-batch passes through each unit."""
        return {**self.counts.units, "carry": self.counts.carries}

    def sum_activation(self, field: str, axis: str = "") -> Value:
        """Sum a field of `ActivationCost` over all that the stage computes; `axis`: of a field by parallel axis, the
        one axis."""
        return sum_over_units(self.activation, self.unit_passes, field, axis)

    def sum_state(self, field: str, axis: str = "") -> Value:
        """Sum a field of `StateCost` over all whose weights the stage holds."""
        return sum_over_units(self.state, self.weight_copies, field, axis)
