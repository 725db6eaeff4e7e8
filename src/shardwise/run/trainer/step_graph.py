"""The passes of a step as a CUDA graph: captured once and replayed, where the host issues kernels more slowly than they run.

A graph repeats the kernels that one step issued, at the same addresses. What a step decides on the host is not in it: passes are
captured only where they decide nothing (`find_obstacle`), and the update, whose learning rate changes, is issued as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.price import Pricing
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels.experts import GROUPED_BYTES
from shardwise.run.mixed_precision import training_dtypes
from shardwise.run.recipe import TrainingRecipe
from shardwise.search import Plan
from shardwise.step import RankProgram
from shardwise.values import describe_error

WARM_UPS = 2  # steps of a shape before it is captured: kernels are compiled, and attention's is chosen
MOST_CAPTURES = 3  # of a run: shapes that change more often cost more than their graphs gain

PASSES = ("forward", "recompute", "backward")
Passes = Callable[[Sequence[MicroBatch]], list[Tensor]]


class StepGraph(Protocol):
    """Graph of kernels."""

    def capture(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Capture the kernels of `work` without running them, and return its results, which replays write."""

    def replay(self) -> None:
        """Run the kernels."""


class CudaStepGraph:
    """Graph of the CUDA kernels of a stream."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Capture the kernels of `work` without running them, and return its results, which replays write."""
        with torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        """Run the kernels."""
        self._graph.replay()


class PassLoad(NamedTuple):
    """Predicted seconds of the kernels of a micro-batch's passes, and of launching them: by the host, where its time for a kernel
    was measured (`bench machine`), else the gaps that launches leave."""

    kernels_s: float
    launches_s: float

    @property
    def is_launch_bound(self) -> bool:
        """True if starting the kernels takes longer than running them."""
        return self.launches_s > self.kernels_s


def predict_load(plan: Plan) -> PassLoad:
    """Return the load of a micro-batch of a plan, forward and backward, by the constants of its cluster.

    Where the host's time for a kernel is known, gaps between kernels are time of the device.
    """
    pricing = Pricing(plan.problem, plan.layout)
    pricer, values = pricing.pricer, pricing.values
    kernels_s, num_kernels = 0.0, 0
    for name, num_units, scheme in pricing.units_by_scheme():
        parts = pricer.parts(scheme, name)
        num_kernels += num_units * sum(kernel.phase in PASSES for kernel in parts.kernels)
        kernels_s += num_units * sum(
            float(pricer.kernels_s(parts, phase, values, making_gradients=making_gradients))
            for phase in PASSES
            for making_gradients in (False, True)
        )
    gaps_s, host_s = (num_kernels * float(seconds) for seconds in (pricer.rates.launch_s, pricer.rates.host_s))
    return PassLoad(kernels_s + gaps_s, host_s) if host_s else PassLoad(kernels_s, gaps_s)


def find_obstacle(instance: RankProgram, recipe: TrainingRecipe, device: torch.device) -> str | None:
    """Return why the passes of a run's steps cannot be captured, or None."""
    obstacles: tuple[tuple[bool, str], ...] = (
        (device.type != "cuda", "the device is no GPU"),
        (instance.mesh.num_devices > 1, "several ranks exchange messages inside a step"),
        (waits_for_experts(instance, recipe), "the host waits for the rows of each expert"),
        (training_dtypes(instance.precision).scales_loss, "the loss scale changes between steps"),
        (recipe.respect_documents, "masks of documents differ between batches"),
        (recipe.noise_scale_every > 0, "the gradient noise scale is measured in some steps"),
    )
    return next((reason for applies, reason in obstacles if applies), None)


def waits_for_experts(instance: RankProgram, recipe: TrainingRecipe) -> bool:
    """Return whether passes on one GPU need the number of rows of each expert on the host: not where one kernel multiplies the
    rows of all (`run.kernels.experts.has_grouped_kernel`), and none is dropped."""
    architecture, precision = instance.architecture, instance.precision
    if not architecture.num_experts:
        return False
    dtype = training_dtypes(precision).activations
    widths = (architecture.d_model, architecture.d_ff)
    is_grouped = dtype == torch.bfloat16 and all(width * dtype.itemsize % GROUPED_BYTES == 0 for width in widths)
    return recipe.capacity_factor is not None or precision.matmul is not None or not is_grouped


def plan_graph(plan: Plan, instance: RankProgram, recipe: TrainingRecipe, device: torch.device) -> GraphedPasses:
    """Return the passes of a run, captured where they can be and where launches would bound them."""
    obstacle = find_obstacle(instance, recipe, device)
    if obstacle is None:
        load = predict_load(plan)
        if not load.is_launch_bound:
            obstacle = (
                f"by the prediction kernels of a micro-batch take {load.kernels_s:.2g} s and their launches "
                f"{load.launches_s:.2g} s"
            )
    return GraphedPasses(obstacle)


class _StepShape(NamedTuple):
    """Constants of a captured step: targets of the batch, and rows and length of each micro-batch."""

    num_targets: int
    micro_batches: tuple[tuple[int, ...], ...]


class GraphedPasses:
    """Passes of steps, eager at first, then captured, then replayed; a step of another shape starts over.

    `obstacle` says why passes are not captured (any longer); `num_captures` counts graphs.
    """

    def __init__(self, obstacle: str | None = None, make_graph: Callable[[], StepGraph] = CudaStepGraph) -> None:
        self.obstacle, self.num_captures, self.num_replays = obstacle, 0, 0
        self._make_graph = make_graph
        self._shape: _StepShape | None = None
        self._num_eager = 0
        self._graph: StepGraph | None = None
        self._inputs: list[MicroBatch] = []
        self._losses: list[Tensor] = []

    def run(
        self, passes: Passes, micro_batches: Sequence[MicroBatch], num_targets: int,
        without_clock: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Tensor]:  # fmt: skip
        """Run the passes of a step and return their losses.

        `without_clock`: entered around a capture, since an event that a graph records has no time to be read.
        """
        if self.obstacle is not None:
            return passes(micro_batches)
        shape = _StepShape(num_targets, tuple(tuple(batch.ids_BT.shape) for batch in micro_batches))
        if shape != self._shape:
            self._begin(shape)
        if self.obstacle is not None or self._num_eager < WARM_UPS:
            self._num_eager += 1
            return passes(micro_batches)
        if self._graph is None:
            try:
                with without_clock():
                    self._capture(passes, micro_batches)
            except RuntimeError as error:  # CUDA's refusal of an operation in a capture; nothing of the step has run
                self.obstacle = f"the capture failed: {describe_error(error)}"
                return passes(micro_batches)
        return self._replay(micro_batches)

    def _begin(self, shape: _StepShape) -> None:
        """Forget the graph of another shape."""
        self._shape, self._num_eager = shape, 0
        self._graph, self._inputs, self._losses = None, [], []
        if self.num_captures >= MOST_CAPTURES:
            self.obstacle = f"shapes of steps changed after {self.num_captures} graphs"

    def _capture(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> None:
        graph = self._make_graph()
        self._inputs = [_copy_batch(batch) for batch in micro_batches]
        self._losses = graph.capture(lambda: passes(self._inputs))
        self._graph = graph
        self.num_captures += 1

    def _replay(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        assert self._graph is not None
        for target, source in zip(self._inputs, micro_batches, strict=True):
            target.ids_BT.copy_(source.ids_BT)
            target.targets_BT.copy_(source.targets_BT)
        self._graph.replay()
        self.num_replays += 1
        return [loss.clone() for loss in self._losses]  # the next replay writes them, and sums over ranks are in place


def _copy_batch(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch at addresses of its own."""
    return replace(batch, ids_BT=batch.ids_BT.clone(), targets_BT=batch.targets_BT.clone())
