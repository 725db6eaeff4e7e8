"""Experts: the router's choice, its balance, and the rows of tokens through their experts.

The program has routed tokens as [E, B, T, D], of which a token fills the rows of its experts; here are these rows alone, [R, D],
in the order of their experts. Letters: N tokens, k choices of each, E experts, R rows: N·k, or fewer where an
expert takes no more than its capacity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.numerics import DEFAULT_NUMERICS, SOFTMAX, Gating
from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.device_dispatch import at_least_fp32, on_host
from shardwise.run.kernels.matmul import QuantizedMatmul

Number = TypeVar("Number", float, Tensor)


class ExpertRows(ABC):
    """Rows in the order of their experts; `counts` [E] are those of each."""

    counts: Tensor

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each expert, on the host."""
        return on_host(self.counts, self.num_rows)

    @cached_property
    def ends(self) -> Tensor:
        """Where each expert's rows end, as grouped products take it."""
        return self.counts.cumsum(0).to(torch.int32)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Of all experts together."""

    @cached_property
    def owners(self) -> Tensor:
        """The expert of each row [R]."""
        experts = torch.arange(len(self.counts), device=self.counts.device)
        return experts.repeat_interleave(self.counts, output_size=self.num_rows)

    def repeat_per_row(self, vectors: Tensor) -> Tensor:
        """A vector of each expert [E, M] for each of its rows."""
        return vectors.repeat_interleave(self.counts, dim=0, output_size=self.num_rows)


@dataclass(frozen=True)
class Routing(ExpertRows):
    """What one layer's router did with tokens of a `shape` [B, T].

    `scores` [N, E] are its softmax, or each logit's sigmoid, `gates` and `choices` [N, k]; `wanted` [E] the rows that chose
    each expert, `counts` [E] those that it takes. Rows are in the `order` of (token, choice) pairs; `places` is the inverse of
    it, with R for what is `dropped`.
    """

    shape: tuple[int, ...]
    scores: Tensor
    gates: Tensor
    choices: Tensor
    counts: Tensor
    order: Tensor
    places: Tensor
    normalised: bool
    wanted: Tensor
    dropped: bool = False
    gating: Gating = DEFAULT_NUMERICS.gating

    @property
    def shares(self) -> Tensor:
        """Scores of a token that add up to one: what a loss evens out (DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20)."""
        return self.scores if self.gating.scores == SOFTMAX else self.scores / self.scores.sum(dim=-1, keepdim=True)

    def by_token(self, rows: Tensor) -> Tensor:
        """Rows [R, D] of each token [N, k, D], with 0 for what is dropped."""
        return torch.unflatten(self._with_dropped(rows).index_select(0, self.places), 0, (-1, self.num_chosen))

    def by_choice(self, rows: Tensor) -> Iterator[Tensor]:
        """Likewise of each token that of its first choice [N, D], of its second and so on: a part of the memory."""
        found = self._with_dropped(rows)
        yield from (found.index_select(0, places) for places in self.places.view(-1, self.num_chosen).unbind(1))

    def _with_dropped(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]) if self.dropped else rows

    @property
    def num_chosen(self) -> int:
        return self.choices.shape[-1]

    @property
    def num_rows(self) -> int:
        return len(self.order)


def route_tokens(
    logits: Tensor, num_chosen: int, balance_bias: Tensor, *, normalised: bool, gating: Gating = DEFAULT_NUMERICS.gating,
    capacity_factor: float | None = None,
) -> Routing:  # fmt: skip
    """The experts that each token takes, from logits [B, T, E].

    `balance_bias` [E] changes who is chosen and not the gates (Wang et al. 2024, auxiliary-loss-free load balancing).
    """
    rows = logits.flatten(0, -2)
    fine = at_least_fp32(logits.dtype)
    scores = rows.softmax(dim=-1, dtype=fine) if gating.scores == SOFTMAX else rows.to(fine).sigmoid()
    choices = _limit_to_groups(scores + balance_bias, gating).topk(num_chosen, dim=-1).indices
    gates = scores.gather(-1, choices)
    if normalised:
        gates = gates / _score_sum(gates)
    gates = gates if gating.scale == 1.0 else gates * gating.scale
    order = choices.flatten().argsort(stable=True)
    wanted = torch.zeros(logits.shape[-1], dtype=torch.long, device=logits.device)
    wanted.scatter_add_(0, choices.flatten(), torch.ones_like(order))  # bincount would wait for a GPU
    drops, counts, places = capacity_factor is not None, wanted, None
    if capacity_factor is not None:
        capacity = int(expert_capacity(len(order), len(wanted), capacity_factor))
        order, counts = _drop_over_capacity(capacity, order, choices.flatten(), wanted)
        numbers = torch.arange(len(order), device=order.device)
        places = torch.full_like(choices.flatten(), len(order)).index_copy_(0, order, numbers)
    return Routing(
        tuple(logits.shape[:-1]), scores, gates, choices, counts, order, order.argsort() if places is None else places,
        normalised, wanted, drops, gating,
    )  # fmt: skip


def expert_capacity(num_rows: Number, num_experts: int, factor: float) -> Number:
    """The rows that an expert takes at most of so many, rounded up."""
    return -(-num_rows * factor // num_experts)


def _drop_over_capacity(capacity: int, order: Tensor, owners: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, of each the first ones alone, and how many these are."""
    counts, begins = wanted.clamp(max=capacity), wanted.cumsum(0) - wanted
    place = torch.arange(len(order), device=order.device) - begins[owners[order]]
    num_kept = sum(device_dispatch.on_host(counts, min(len(order), capacity * len(wanted))))
    return order[(place >= capacity).argsort(stable=True)][:num_kept], counts


def _limit_to_groups(votes: Tensor, gating: Gating) -> Tensor:
    """What experts are chosen by [N, E], without those of groups that are not among the best."""
    if gating.chosen_groups == gating.groups:
        return votes
    grouped = torch.unflatten(votes, -1, (gating.groups, -1))
    best = grouped.topk(gating.votes, dim=-1).values.sum(dim=-1).topk(gating.chosen_groups, dim=-1).indices
    allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=votes.device).scatter_(-1, best, True)
    kept: Tensor = grouped.masked_fill(~allowed[..., None], -torch.inf)
    return kept.flatten(-2)


def _score_sum(scores: Tensor) -> Tensor:
    """Of each token's, with what keeps sigmoids that are all 0 from dividing by it (as DeepSeek-V3's own code has it)."""
    return scores.sum(dim=-1, keepdim=True) + 1e-20


def route_gradient(dgates: Tensor, routing: Routing, penalty: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradient of the logits [B, T, E] from that of the gates [N, k]; `penalty` [E] is that of each token's scores by a loss
    that evens the experts' shares out."""
    scores, choices, gating = routing.scores, routing.choices, routing.gating
    dchosen = dgates * gating.scale
    if routing.normalised:
        mean = (dgates * routing.gates).sum(dim=-1, keepdim=True)
        dchosen = (dchosen - mean) / _score_sum(scores.gather(-1, choices))
    dscores = torch.zeros_like(scores).scatter_(-1, choices, dchosen)
    if penalty is not None:
        dscores += penalty if gating.scores == SOFTMAX else _shares_backward(penalty, routing)
    if gating.scores == SOFTMAX:
        dlogits = scores * (dscores - (dscores * scores).sum(dim=-1, keepdim=True))
    else:
        dlogits = scores * (1.0 - scores) * dscores
    return dlogits.to(dtype).view(*routing.shape, dlogits.shape[-1])


def _shares_backward(penalty: Tensor, routing: Routing) -> Tensor:
    """The gradient of scores by that of their shares of a token's sum."""
    return (penalty - (penalty * routing.shares).sum(dim=-1, keepdim=True)) / routing.scores.sum(dim=-1, keepdim=True)


def dispatch(y: Tensor, routing: Routing) -> Tensor:
    """Each token of y [B, T, D] as often as it is sent."""
    return y.flatten(0, -2).index_select(0, routing.order // routing.num_chosen)


def dispatch_dx(drows: Tensor, routing: Routing) -> Tensor:
    """Add up the gradients of the rows of each token, in one order on any device."""
    return routing.by_token(drows).sum(dim=1).view(*routing.shape, drows.shape[-1])


def combine(routing: Routing, rows: Tensor) -> Tensor:
    """The results of each token's experts, weighted by its gates."""
    found = torch.zeros(len(routing.gates), rows.shape[-1], dtype=routing.gates.dtype, device=rows.device)
    for gates, chosen in zip(routing.gates.unbind(-1), routing.by_choice(rows), strict=True):
        found.addcmul_(gates[:, None], chosen)
    return found.to(rows.dtype).view(*routing.shape, rows.shape[-1])


def combine_dgates(dy: Tensor, rows: Tensor, routing: Routing) -> Tensor:
    """The gradient of the gates [N, k]."""
    wide = dy.flatten(0, -2).to(routing.gates.dtype)
    found = [torch.linalg.vecdot(wide, chosen.to(wide.dtype)) for chosen in routing.by_choice(rows)]
    return torch.stack(found, dim=-1)


def combine_dx(dy: Tensor, routing: Routing) -> Tensor:
    """The gradient of the experts' results."""
    given = (routing.gates[..., None] * dy.flatten(0, -2)[:, None]).to(dy.dtype)
    return given.flatten(0, 1).index_select(0, routing.order)


def has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch has one kernel for all experts: on a GPU in bf16, for rows of whole 16 bytes. The host then needs not wait
    for the counts."""
    aligned = all(width * rows.element_size() % 16 == 0 for width in weight.shape[1:])
    return device_dispatch.on_gpu(rows) and rows.dtype == torch.bfloat16 and aligned


def expert_matmul(
    rows: Tensor, weight: Tensor, routing: ExpertRows, *, product: QuantizedMatmul | None = None
) -> Tensor:
    """Rows [R, D] each by its expert's matrix of weight [E, D, M]; `product`: of operands that are cast."""
    if product is None and has_grouped_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=routing.ends)
    out = rows.new_empty(len(rows), weight.shape[-1])
    for (part, into), matrix in zip(_split_by_expert(routing, rows, out), weight, strict=True):
        if product is None:
            torch.mm(part, matrix, out=into)
        elif len(part):
            product.into(into, part, matrix, add=False)
    return out


def expert_gradient(
    left: Tensor, right: Tensor, routing: ExpertRows, out: Tensor, *, add: bool, product: QuantizedMatmul | None = None
) -> Tensor:
    """Of each expert leftᵀ · right over its rows, to `out` [E, M, D] or added to it; `product`: of operands that are cast."""
    if product is not None:
        return _quantized_gradient(left, right, routing, out if add else out.zero_(), product)
    if has_grouped_kernel(left, out):
        found = F.grouped_mm(left.t(), right, offs=routing.ends)
        return out.add_(found) if add else out.copy_(found)
    for (one, other), matrix in zip(_split_by_expert(routing, left, right), out, strict=True):
        if add:
            matrix.addmm_(one.t(), other)
        else:
            torch.mm(one.t(), other, out=matrix)
    return out


def _quantized_gradient(
    left: Tensor, right: Tensor, routing: ExpertRows, out: Tensor, product: QuantizedMatmul
) -> Tensor:
    for (one, other), matrix in zip(_split_by_expert(routing, left, right), out, strict=True):
        if len(one):
            product.into(matrix, one, other, add=True)
    return out


def sum_expert_rows(rows: Tensor, routing: ExpertRows) -> Tensor:
    """The rows of each expert added up, [E, M]."""
    out = rows.new_zeros(len(routing.counts), rows.shape[-1])
    return out.index_add_(0, routing.owners, rows)


def _split_by_expert(routing: ExpertRows, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each expert."""
    yield from zip(*(torch.split_with_sizes(one, routing.sizes) for one in rows), strict=True)
