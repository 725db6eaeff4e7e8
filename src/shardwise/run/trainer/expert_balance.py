"""Router statistics, summed over the processes that share a micro-batch, and the balancing of experts by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from shardwise.run.kernels.experts import expert_capacity
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.recipe import TrainingRecipe
from shardwise.sharding import Axes

Statistic = int | Literal["loss", "dropped"]  # the counts of a router, or what all of them add to


class ExpertBalancer:
    """Keeps a model's experts evenly loaded, as the recipe says, and measures how evenly they are.

    `biases` [E] of the routers' choice, by the routers' unit index in the forward pass. `axes` split the tokens of a
    router's statistics, `stages` the routers.
    """

    def __init__(
        self, biases: Mapping[int, Tensor], exchange: MeshCollectives, axes: Axes, recipe: TrainingRecipe,
        stages: Axes = (),
    ) -> None:  # fmt: skip
        self.biases, self.exchange, self.axes, self.recipe, self.stages = biases, exchange, axes, recipe, stages
        self.counts: dict[int, Tensor] = {}  # rows of each expert [E] in this step, by router
        self.loss: Tensor | None = None
        self.dropped: Tensor | None = None  # [2]: rows of this process that were dropped, and all of its rows

    def begin_step(self) -> None:
        self.counts, self.loss, self.dropped = {}, None, None

    def statistics(self) -> dict[Statistic, Tensor]:
        """Return what the passes of a step have counted so far."""
        statistics: dict[Statistic, Tensor] = dict(self.counts.items())
        if self.loss is not None:
            statistics["loss"] = self.loss
        if self.dropped is not None:
            statistics["dropped"] = self.dropped
        return statistics

    def restore(self, statistics: Mapping[Statistic, Tensor]) -> None:
        """Take the statistics of passes that ran as a graph, without this object."""
        self.counts = {router: tensor for router, tensor in statistics.items() if isinstance(router, int)}
        self.loss, self.dropped = statistics.get("loss"), statistics.get("dropped")

    @torch.no_grad()
    def penalties(self, routed: Mapping[int, Tensor], num_micro_batches: int) -> dict[int, Tensor]:
        """Return the gradient of the auxiliary loss by each token's scores [E], by router; empty without such a loss.

        `routed` [2, E]: rows and summed probabilities of each expert on this process. Statistics are summed over all
        processes, but the gradient of a process is that of its own tokens: gradients of parameters are summed
        afterwards.
        """
        if not routed:
            return {}
        statistics = torch.stack(list(routed.values()), dim=1)  # [2, routers, E]
        if self.recipe.capacity_factor is not None:
            self._count_dropped(statistics[0], self.recipe.capacity_factor)
        if self.recipe.balance != "auxiliary":
            self._count(routed, statistics[0])
            return {}
        counts, probabilities = self.exchange.sum_and_wait(statistics, self.axes).unbind()
        self._count(routed, counts)
        loss, gradient = auxiliary_loss(counts, probabilities)
        self.loss = loss / num_micro_batches + (0.0 if self.loss is None else self.loss)
        scale = self.recipe.balance_coefficient / num_micro_batches
        return dict(zip(routed, (scale * gradient).unbind(), strict=True))

    def _count_dropped(self, counts: Tensor, factor: float) -> None:
        capacity = expert_capacity(counts.sum(dim=-1, keepdim=True), counts.shape[-1], factor)
        dropped = torch.stack(((counts - capacity).clamp(min=0).sum(), counts.sum()))
        self.dropped = dropped if self.dropped is None else self.dropped + dropped

    @property
    def dropped_share(self) -> float | None:
        """Share of this process's rows that experts dropped over capacity; None without a capacity."""
        return None if self.dropped is None else float(self.dropped[0] / self.dropped[1])

    def _count(self, routers: Iterable[int], counts: Tensor) -> None:
        for router, rows in zip(routers, counts, strict=True):
            self.counts[router] = self.counts[router] + rows if router in self.counts else rows

    @torch.no_grad()
    def end_step(self, zero_loss: Tensor) -> None:
        """Sum the losses of all stages, with `zero_loss` for one without a router; adjust the biases if the recipe uses
        them."""
        if self.stages and self.recipe.balance == "auxiliary":
            self.loss = self.exchange.sum_and_wait(zero_loss if self.loss is None else self.loss, self.stages)
        if self.counts and self.recipe.balance == "bias":
            self._move_biases()

    def _move_biases(self) -> None:
        routers = sorted(self.counts)
        summed = self.exchange.sum_and_wait(torch.stack([self.counts[router] for router in routers]), self.axes)
        self.counts = dict(zip(routers, summed, strict=True))
        for router, counts in self.counts.items():
            adjust_bias(self.biases[router], counts, self.recipe.balance_rate)

    @property
    def imbalance(self) -> float | None:
        """Rows of the fullest expert over the mean, in the worst layer of this process's stages. Without balancing,
        rows are those of this process's own tokens."""
        if not self.counts:
            return None
        counts = torch.stack(list(self.counts.values())).to(torch.float64)
        return float((counts.max(dim=-1).values / counts.mean(dim=-1).clamp(min=1e-12)).max())


def auxiliary_loss(counts: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return E · sum over experts of (share of the rows) · (mean probability), summed over routers, and its gradient.

    A router whose experts are equally loaded adds 1. The gradient is by each token's probabilities, [routers, E].

    Both operands are sums over all tokens that share a micro-batch. Source: Fedus et al. 2021 (Switch Transformer),
    equation 4; for more than one choice as Megatron-Core has it.

    >>> loss, gradient = auxiliary_loss(torch.tensor([[3.0, 3.0]]), torch.tensor([[2.0, 2.0]]))
    >>> loss.item(), gradient.tolist()
    (1.0, [[0.25, 0.25]])
    """
    # every token's probabilities add up to one, and every row of a token is counted once
    shares, tokens = counts / counts.sum(dim=-1, keepdim=True), probabilities.sum(dim=-1, keepdim=True)
    gradient = counts.shape[-1] * shares / tokens
    return (gradient * probabilities).sum(), gradient


def adjust_bias(balance_bias: Tensor, counts: Tensor, rate: float) -> None:
    """Raise the bias [E] of experts that got fewer rows than the mean of `counts` by `rate`, lower it where they got
    more. Source: Wang et al. 2024, algorithm 1."""
    counts = counts.to(balance_bias.dtype)
    balance_bias += rate * torch.sign(counts.mean() - counts)
