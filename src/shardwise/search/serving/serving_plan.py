"""Answer of a serving search: a layout with its instances and batch limits, what it gives, and why others were left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.hardware import Cluster
from shardwise.model import Architecture
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    PooledEstimate,
    ServingCalibration,
    ServingEstimate,
    ServingFormats,
    ServingLayout,
    ServingProblem,
    Workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """A model, a cluster, and the requests that are to be served: of `isl` input and `osl` output tokens, of which `rate_per_s`
    arrive (None: as many as the cluster serves within the limits)."""

    architecture: Architecture
    cluster: Cluster
    isl: int
    osl: int
    rate_per_s: float | None
    engine: str
    release: str | None
    formats: ServingFormats
    batch_limits: BatchLimits
    latency_limits: LatencyLimits
    cached_tokens: int = 0
    calibration: ServingCalibration | None = None

    def problem(self, *, concurrency: float | None = None, rate_per_s: float | None = None) -> ServingProblem:
        """Return the serving problem at a concurrency or at a rate."""
        workload = Workload(
            isl=self.isl, osl=self.osl, cached_tokens=self.cached_tokens, concurrency=concurrency, rate_per_s=rate_per_s
        )
        return ServingProblem(
            architecture=self.architecture, cluster=self.cluster, workload=workload, engine=self.engine, release=self.release,
            formats=self.formats, batch_limits=self.batch_limits, latency_limits=self.latency_limits,
            calibration=self.calibration,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """A configuration of a search: a layout at a number of requests in the system, and what it gives."""

    layout: ServingLayout
    concurrency: float
    ttft_s: float
    tpot_s: float
    tokens_per_s_per_device: float
    requests_per_s: float

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens per second that a user sees."""
        return 1.0 / self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedServingLayout:
    """A layout that was not chosen, at the most requests that it serves within the limits, and the reason."""

    point: ServingPoint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The chosen layout under a load.

    `estimate` is at the rate, or at `concurrency` where none was named. `batch_limits` are those to start the engine with.
    `front` is the Pareto front of the time of a token against output tokens/s per device, over all layouts that fit; `curve` the
    chosen layout at every concurrency, and `knee` where more requests begin to cost more latency than they give throughput.
    `doubled` is what twice the load makes of it: the same instances at twice the rate (None where they cannot serve it), and the
    devices that it takes within the limits. `smallest` is the layout of fewest devices that holds the model and one request.
    `prefill_devices_per_decode_device`: devices that prefill for each that decodes, where the two part, so that neither waits.
    `pools` is the best deployment whose prefill and decode part (None where none meets the limits).
    """

    question: ServingQuestion
    layout: ServingLayout
    batch_limits: BatchLimits
    concurrency: float
    estimate: ServingEstimate
    alternatives: tuple[RejectedServingLayout, ...]
    front: tuple[ServingPoint, ...]
    curve: tuple[ServingPoint, ...]
    knee: ServingPoint
    smallest: ServingLayout
    doubled: ServingEstimate | None
    doubled_devices: int | None
    prefill_devices_per_decode_device: float
    num_configurations: int
    pools: PooledEstimate | None = None

    @property
    def pools_gain(self) -> float | None:
        """Share that pools serve more of all tokens than the layout, or of its devices that they save at a rate; None without."""
        if self.pools is None:
            return None
        if self.question.rate_per_s is not None:
            return 1.0 - self.pools.layout.num_devices / self.layout.num_devices
        rates = [
            estimate.tokens_per_s_per_device.value * estimate.layout.num_devices
            for estimate in (self.pools, self.estimate)
        ]
        return rates[0] / rates[1] - 1.0

    @property
    def idle_devices(self) -> int:
        """Devices of the cluster that the plan leaves free."""
        return self.question.cluster.num_devices - self.layout.num_devices


def pareto_front(points: Sequence[ServingPoint]) -> tuple[ServingPoint, ...]:
    """Return the points that none beats in both the time of a token and the throughput of a device, the quickest first."""
    front: list[ServingPoint] = []
    for point in sorted(points, key=lambda point: (point.tpot_s, -point.tokens_per_s_per_device)):
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device:
            front.append(point)
    return tuple(front)


def find_knee(curve: Sequence[ServingPoint]) -> ServingPoint:
    """Return the point of a curve that is farthest above the line between its ends, both axes scaled to 1.

    Source: Satopaa et al. 2011, Finding a "Kneedle" in a Haystack, section III.
    """
    first, last = curve[0], curve[-1]
    width = (last.tpot_s - first.tpot_s) or 1.0
    height = (last.tokens_per_s_per_device - first.tokens_per_s_per_device) or 1.0
    return max(
        curve,
        key=lambda point: (
            (point.tokens_per_s_per_device - first.tokens_per_s_per_device) / height
            - (point.tpot_s - first.tpot_s) / width
        ),
    )
