"""Short causal convolutions along the sequence, one filter for each channel.

Devices that split the sequence have a segment of it each; the first outputs of a segment read the last rows of the one before,
and the gradient of its last rows reads the first of the one after. These few rows of every segment are gathered.

Sources: Poli et al. 2023 (Hyena); Gu and Dao 2023 (Mamba); Liquid AI 2025 (LFM2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.model.operations.recurrences import SEGMENT_AXES, SEGMENTS, segments_on_device, summed_axes
from shardwise.sharding import Spec
from shardwise.values import LocalDim, Polynomial, multiply_symbols


@dataclass(frozen=True, slots=True)
class SegmentEdge(Operation):
    """The last or first rows of each segment, [B, segments, w, *channels] of x [B, T, *channels]; nothing where the sequence is
    in one part. A segment has at least `w` rows."""

    kind: ClassVar[OperationKind] = "map"
    edge: Literal["last", "first"] = "last"
    sequence: str = "T"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x = _segmented(specs[0], self.sequence)
        return OperationSharding((x,), (_edge_sharding(x, dims[self.outputs[0]], self.sequence, gathered=False),))

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        return segments_on_device(sharding)


@dataclass(frozen=True, slots=True)
class ShortConvolution(Operation):
    """`y[t] = sum over i of weight[i] x[t - W + 1 + i]` for each channel, with zeros before the sequence.

    Inputs: x [B, T, *channels], the filters [W, *channels], and the last rows of all segments (`SegmentEdge`), which are required
    unsharded. Channels and batch are independent.
    """

    kind: ClassVar[OperationKind] = "map"
    sequence: str = "T"
    taps: str = "W"

    @property
    def missing_kernel(self) -> str:
        return "a short convolution"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x, weight, edges = specs
        weight = weight.with_axes(self.taps, ())
        x = _segmented(x, self.sequence)
        for dim in weight.dims:
            x = x.with_axes(dim, weight.axes_of(dim)) if dim in x.dims else x
        gathered = _edge_sharding(x, edges.dims, self.sequence, gathered=True)
        return OperationSharding((x, weight, gathered), (x,), ("", "", "the rows of the segment before"))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy, (x, weight, edges) = cotangents[self.outputs[0]], self.inputs
        after = SegmentEdge((dy,), ("?",), "first", self.sequence)
        gradient = ShortConvolutionGradient((*self.inputs, f"?{edges}", dy), ("?0", "?1"), self.sequence, self.taps)
        return [(edges, after), (x, gradient), (weight, gradient)]

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs for each output and tap."""
        return _convolution_flops(sharding, self.taps)


@dataclass(frozen=True, slots=True)
class ShortConvolutionGradient(Operation):
    """The gradients of rows and filters: (x, weight, last rows of segments, first rows of dy of segments, dy) -> (dx, dweight).

    Rows before the end of a segment are read by the first outputs of the next one. The gradient of the filters sums over rows.
    """

    kind: ClassVar[OperationKind] = "map"
    sequence: str = "T"
    taps: str = "W"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        forward = ShortConvolution((), (), self.sequence, self.taps).propagate_sharding(specs[:3], dims, fixed)
        x, weight, edges = forward.inputs
        dweight = weight.with_partial(summed_axes(x, weight))
        reasons = (*forward.reasons, "the first rows of the segment after", "")
        return OperationSharding((x, weight, edges, edges, x), (x, dweight), reasons)

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return _convolution_flops(sharding, self.taps) * 2.0


def _segmented(x: Spec, sequence: str) -> Spec:
    """Return the sharding of rows with the sequence split over `SEGMENT_AXES` alone."""
    return x.with_partial(()).with_axes(sequence, tuple(a for a in x.axes_of(sequence) if a in SEGMENT_AXES))


def _edge_sharding(x: Spec, edge_dims: Dims, sequence: str, *, gathered: bool) -> Spec:
    """Return the sharding of the first or last rows of `x`, each device with those of its own segment or of all."""
    rows = {dim: x.axes_of(dim) for dim in x.dims if dim != sequence}
    return Spec.of(edge_dims, rows if gathered else {**rows, SEGMENTS: x.axes_of(sequence)})


def _convolution_flops(sharding: OperationSharding, taps: str) -> Polynomial:
    return sharding.inputs[0].local_elements() * multiply_symbols([LocalDim(taps, ())], 2.0)


CONVOLUTION_OPERATIONS = (ShortConvolution, ShortConvolutionGradient, SegmentEdge)
