"""Experts: the router's choice, its balance, and the rows of tokens through their experts, none dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.functions import activate
from plain.gradients import Dispatch, Reorder, applied, at_least_fp32
from shardwise.model.numerics import DEFAULT_NUMERICS, Gating


@dataclass(frozen=True, slots=True)
class Routing:
    """What one layer's router did with N tokens: `gates` and `choices` [N, k], and the sums over tokens that balance needs.

    `counts` [E] are the rows that each expert got, `probabilities` [E] its softmax over all tokens added up.
    """

    gates: Tensor
    choices: Tensor
    counts: Tensor
    probabilities: Tensor


def route(
    logits: Tensor, num_chosen: int, balance_bias: Tensor, *, normalised: bool, gating: Gating = DEFAULT_NUMERICS.gating,
    capacity: tuple[float, int] | None = None,
) -> Routing:  # fmt: skip
    """The experts that each of N tokens takes, from logits [N, E].

    `balance_bias` [E] changes who is chosen and not the gates (Wang et al. 2024, auxiliary-loss-free load balancing).
    """
    scores = logits.to(at_least_fp32(logits.dtype))
    scores = scores.softmax(dim=-1) if gating.scores == "softmax" else torch.sigmoid(scores)
    votes = scores.detach() + balance_bias
    size = logits.shape[-1] // gating.groups
    of_groups = torch.stack(
        [group.topk(gating.votes).values.sum(dim=-1) for group in votes.split(size, dim=-1)], dim=-1
    )
    best = of_groups.topk(gating.chosen_groups).indices
    is_allowed = (torch.arange(logits.shape[-1]) // size == best[..., None]).any(dim=-2)
    choices = torch.where(is_allowed, votes, -torch.inf).topk(num_chosen, dim=-1).indices
    gates = scores.gather(-1, choices)
    if normalised:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    counts = torch.bincount(choices.flatten(), minlength=logits.shape[-1])
    gates = gates if capacity is None else gates * within(choices, logits.shape[-1], *capacity)
    shares = scores / scores.sum(dim=-1, keepdim=True)
    return Routing(gates * gating.scale, choices, counts, shares.sum(dim=0))


def within(choices: Tensor, num_experts: int, factor: float, parts: int) -> Tensor:
    """1 for choices that experts take, 0 for others: of each of so many equal parts of the tokens an expert takes at most the
    first of `factor` times an even share."""
    taken = torch.zeros_like(choices)
    for part, kept in zip(choices.chunk(parts), taken.chunk(parts), strict=True):
        for expert in range(num_experts):
            rows = (part.flatten() == expert).nonzero()[: math.ceil(part.numel() / num_experts * factor)]
            kept.view(-1)[rows] = 1
    return taken


def auxiliary_loss(routings: Iterable[Routing], whole: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor | None:
    """E · sum over experts of (share of the rows) · (mean probability), added over layers: 1 a layer where all are alike.

    `whole` adds the sums [2, layers, E] (counts, then probabilities) up over all devices that share a micro-batch. None
    without layers of experts. Source: Fedus et al. 2021 (Switch Transformer), equation 4; for more than one choice as
    Megatron-Core has it.
    """
    all_routings = list(routings)
    if not all_routings:
        return None
    probabilities = torch.stack([routing.probabilities for routing in all_routings])
    counts = torch.stack([routing.counts for routing in all_routings]).to(probabilities.dtype)
    counts, probabilities = whole(torch.stack((counts, probabilities))).unbind()
    # every token's probabilities add up to one, and every row of a token is counted once
    shares, means = (sums / sums.detach().sum(dim=-1, keepdim=True) for sums in (counts, probabilities))
    return counts.shape[-1] * (shares.detach() * means).sum()


@torch.no_grad()
def balance(balance_bias: Tensor, counts: Tensor, rate: float) -> None:
    """Raise the bias [E] of experts that got fewer rows than the mean of `counts` by `rate`, lower it where they got more.

    Source: Wang et al. 2024, algorithm 1.
    """
    counts = counts.to(balance_bias.dtype)
    balance_bias += rate * torch.sign(counts.mean() - counts)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts' weights: gate and up [E, M, D], down [E, M, D], and biases [E, M] and [E, D] where they have any."""

    kind: str
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __call__(self, y: Tensor, routing: Routing) -> Tensor:
        """y [N, D] through each token's experts, weighted by its gates."""
        chosen = routing.choices.shape[-1]
        order = routing.choices.flatten().argsort(stable=True)
        places = order.argsort()
        sent = applied(Dispatch, y, order, places, chosen)
        back = (self.grouped_rate if self.can_group(sent) else self.in_turn)(sent, routing.counts)
        rows = torch.unflatten(applied(Reorder, back, places, order), 0, (-1, chosen))
        return (routing.gates[..., None] * rows).sum(dim=1).to(y.dtype)

    def can_group(self, x: Tensor) -> bool:
        """Whether PyTorch has one kernel for all experts: on a GPU in bf16, for rows of whole 16 bytes. It then needs not wait
        for the counts on the host."""
        aligned = all(width * x.element_size() % 16 == 0 for width in self.up.shape[1:])
        return x.is_cuda and x.dtype == torch.bfloat16 and aligned

    def grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows [R, D] in the order of their experts, each through its own: one product for all experts."""
        ends = counts.cumsum(0).to(torch.int32)

        def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = F.grouped_mm(rows, weight, offs=ends)
            return out if bias is None else out + bias.repeat_interleave(counts, dim=0, output_size=len(rows))

        gate = None if self.gate is None else product(x, self.gate.transpose(1, 2), self.gate_bias)
        up = product(x, self.up.transpose(1, 2), self.up_bias)
        return product(activate(self.kind, gate, up), self.down, self.down_bias)

    def in_turn(self, x: Tensor, counts: Tensor) -> Tensor:
        """The same, one expert after the other."""
        parts = torch.split_with_sizes(x, counts.tolist())
        return torch.cat(
            [
                self.run_expert(part, *weights)
                for part, weights in zip(parts, self.weights_by_expert(len(parts)), strict=True)
            ]
        )

    def weights_by_expert(self, num_experts: int) -> Iterable[tuple[Tensor | None, ...]]:
        """The weights of each expert in turn; unbound at once, so that their gradients are put together once."""
        stacked = (self.gate, self.gate_bias, self.up, self.up_bias, self.down, self.down_bias)
        nothing = (None,) * num_experts
        return zip(*(nothing if weight is None else weight.unbind(0) for weight in stacked), strict=True)

    def run_expert(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        """One expert's rows."""
        gate, gate_bias, up, up_bias, down, down_bias = weights
        assert up is not None
        assert down is not None
        act = activate(self.kind, None if gate is None else F.linear(x, gate, gate_bias), F.linear(x, up, up_bias))
        return F.linear(act, down.t(), down_bias)
