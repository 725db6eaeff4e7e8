"""What routers did, added up over the processes that share a micro-batch, and the balance that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.spec import Axes
from shardwise.train.model.block import Block
from shardwise.train.model.decoder import Decoder, Output
from shardwise.train.model.experts import balance
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.recipe import Recipe


class _Summed(torch.autograd.Function):
    """A sum over processes whose gradient is each process's own: every process adds the whole loss that it goes into, and
    gradients of parameters are summed afterwards."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        return add_up(own.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Balancer:
    """Keeps a model's experts evenly loaded, as the recipe says, and counts how evenly they are."""

    def __init__(self, model: Decoder, exchange: Exchange, axes: Axes, recipe: Recipe) -> None:
        self.blocks = [
            block for block in model.layers.values() if isinstance(block, Block) and block.architecture.num_experts
        ]
        self.exchange, self.axes, self.recipe = exchange, axes, recipe
        self.counts: Tensor | None = None
        self.loss: Tensor | None = None

    def begin_step(self) -> None:
        self.counts = self.loss = None

    def penalty(self, output: Output, num_micro_batches: int) -> Tensor | None:
        """What a micro-batch adds to the loss; None where nothing. Statistics are those of all processes."""
        if not self.blocks:
            return None
        counts = torch.stack([routing.counts for routing in output.routings])
        if self.recipe.balance != "auxiliary":
            self._count(counts)
            return None
        loss = output.auxiliary(self._whole)
        assert loss is not None
        self.loss = loss.detach() / num_micro_batches + (0.0 if self.loss is None else self.loss)
        return self.recipe.balance_coefficient / num_micro_batches * loss

    def _whole(self, sums: Tensor) -> Tensor:
        whole: Tensor = _Summed.apply(sums, lambda own: self.exchange.sum_now(own, self.axes))  # type: ignore[no-untyped-call]
        self._count(whole[0].detach())
        return whole

    def _count(self, counts: Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the biases of the choice, where the recipe balances by them."""
        if self.counts is None or self.recipe.balance != "bias":
            return
        own = self.counts.to(torch.float64 if self.blocks[0].own("router").dtype == torch.float64 else torch.float32)
        self.counts = self.exchange.sum_now(own, self.axes)
        for block, counts in zip(self.blocks, self.counts, strict=True):
            balance(block.get_buffer("balance_bias"), counts, self.recipe.balance_rate)

    @property
    def imbalance(self) -> float | None:
        """Rows of the fullest expert over the mean, the worst layer's; without balance those of this process alone."""
        if self.counts is None:
            return None
        counts = self.counts.to(torch.float64)
        return float((counts.max(dim=-1).values / counts.mean(dim=-1).clamp(min=1e-12)).max())
