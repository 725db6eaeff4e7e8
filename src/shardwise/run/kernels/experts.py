"""Experts: the router's choice, its balance, and grouped products of token rows with the experts' matrices.

The program has routed tokens as [E, B, T, D], of which a token fills the rows of its experts; here only these rows are
stored, [R, D], sorted by expert. Letters: N tokens, k choices of each, E experts, R rows: N·k, or fewer where experts
have a capacity.
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

from shardwise.model import DEFAULT_NUMERICS, Gating
from shardwise.model.numerics import SOFTMAX
from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.device_dispatch import at_least_fp32, has_triton, on_host
from shardwise.run.kernels.matmul import QuantizedMatmul

Number = TypeVar("Number", float, Tensor)


class ExpertRows(ABC):
    """Token rows sorted by expert; `counts` [E] is the number of rows of each expert."""

    counts: Tensor

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows of each expert, on the host."""
        return on_host(self.counts, self.num_rows)

    @cached_property
    def ends(self) -> Tensor:
        """Row after the last of each expert [E], as `grouped_mm` takes it."""
        return self.counts.cumsum(0).to(torch.int32)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows of all experts."""

    @cached_property
    def owners(self) -> Tensor:
        """Expert of each row [R]."""
        experts = torch.arange(len(self.counts), device=self.counts.device)
        return experts.repeat_interleave(self.counts, output_size=self.num_rows)

    def repeat_per_row(self, vectors: Tensor) -> Tensor:
        """Return the vector of each row's expert, from one vector per expert [E, M]."""
        return vectors.repeat_interleave(self.counts, dim=0, output_size=self.num_rows)


@dataclass(frozen=True)
class TokenRouting(ExpertRows):
    """A router's choice for the tokens of one layer, of `shape` [B, T].

    `scores` [N, E] are the softmax of its logits, or their sigmoids; `gates` and `choices` [N, k]. `requested` [E] counts
    the rows that chose each expert, `counts` [E] those that it processes. `order` [R] is the (token, choice) pair of
    each row; `inverse_order` [N·k] is its inverse, with R for pairs that are dropped (`dropped`: there may be some).
    """

    shape: tuple[int, ...]
    scores: Tensor
    gates: Tensor
    choices: Tensor
    counts: Tensor
    order: Tensor
    inverse_order: Tensor
    normalised: bool
    requested: Tensor
    dropped: bool = False
    gating: Gating = DEFAULT_NUMERICS.gating

    @property
    def shares(self) -> Tensor:
        """Scores divided by their sum, which a balance loss evens out (DeepSeek-AI 2024, DeepSeek-V3, eq. 17 to 20)."""
        return self.scores if self.gating.scores == SOFTMAX else self.scores / self.scores.sum(dim=-1, keepdim=True)

    @property
    def row_of_pair(self) -> Tensor:
        """Row of each token's choices [N, k], R for those that are dropped."""
        return self.inverse_order.view(-1, self.num_chosen)

    def by_token(self, rows: Tensor) -> Tensor:
        """Return the rows [R, D] of each token as [N, k, D], with 0 for dropped ones."""
        return torch.unflatten(self._with_dropped(rows).index_select(0, self.inverse_order), 0, (-1, self.num_chosen))

    def by_choice(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield, choice by choice, the row of each token [N, D], which takes 1/k of the memory of `by_token`."""
        padded = self._with_dropped(rows)
        yield from (padded.index_select(0, row_indices) for row_indices in self.row_of_pair.unbind(1))

    def _with_dropped(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]) if self.dropped else rows

    @property
    def num_chosen(self) -> int:
        """Number of experts of a token."""
        return self.choices.shape[-1]

    @property
    def num_rows(self) -> int:
        return len(self.order)


def route_tokens(
    logits: Tensor, num_chosen: int, balance_bias: Tensor, *, normalised: bool, gating: Gating = DEFAULT_NUMERICS.gating,
    capacity_factor: float | None = None,
) -> TokenRouting:  # fmt: skip
    """Choose the experts of each token from logits [B, T, E].

    `balance_bias` [E] changes which experts are chosen, not the gates (Wang et al. 2024, auxiliary-loss-free load
    balancing).
    """
    rows = logits.flatten(0, -2)
    score_dtype = at_least_fp32(logits.dtype)
    scores = rows.softmax(dim=-1, dtype=score_dtype) if gating.scores == SOFTMAX else rows.to(score_dtype).sigmoid()
    choices = _limit_to_groups(scores + balance_bias, gating).topk(num_chosen, dim=-1).indices
    gates = scores.gather(-1, choices)
    if normalised:
        gates = gates / _score_sum(gates)
    gates = gates if gating.scale == 1.0 else gates * gating.scale
    order = choices.flatten().argsort(stable=True)
    requested = torch.zeros(logits.shape[-1], dtype=torch.long, device=logits.device)
    requested.scatter_add_(0, choices.flatten(), torch.ones_like(order))  # bincount would wait for a GPU
    drops, counts, inverse_order = capacity_factor is not None, requested, None
    if capacity_factor is not None:
        capacity = int(expert_capacity(len(order), len(requested), capacity_factor))
        order, counts = _drop_over_capacity(capacity, order, choices.flatten(), requested)
        numbers = torch.arange(len(order), device=order.device)
        inverse_order = torch.full_like(choices.flatten(), len(order)).index_copy_(0, order, numbers)
    return TokenRouting(
        tuple(logits.shape[:-1]), scores, gates, choices, counts, order,
        order.argsort() if inverse_order is None else inverse_order, normalised, requested, drops, gating,
    )  # fmt: skip


def expert_capacity(num_rows: Number, num_experts: int, factor: float) -> Number:
    """Return the largest number of rows that an expert takes of `num_rows`, rounded up."""
    return -(-num_rows * factor // num_experts)


def _drop_over_capacity(capacity: int, order: Tensor, owners: Tensor, requested: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of rows by expert, the first `capacity` of each, and how many each expert has."""
    counts, first_rows = requested.clamp(max=capacity), requested.cumsum(0) - requested
    index_in_expert = torch.arange(len(order), device=order.device) - first_rows[owners[order]]
    num_kept = sum(device_dispatch.on_host(counts, min(len(order), capacity * len(requested))))
    return order[(index_in_expert >= capacity).argsort(stable=True)][:num_kept], counts


def _limit_to_groups(votes: Tensor, gating: Gating) -> Tensor:
    """Return the scores [N, E] to choose by, with minus infinity outside the best groups of experts."""
    if gating.chosen_groups == gating.groups:
        return votes
    grouped = torch.unflatten(votes, -1, (gating.groups, -1))
    best = grouped.topk(gating.votes, dim=-1).values.sum(dim=-1).topk(gating.chosen_groups, dim=-1).indices
    allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=votes.device).scatter_(-1, best, True)
    limited: Tensor = grouped.masked_fill(~allowed[..., None], -torch.inf)
    return limited.flatten(-2)


def _score_sum(scores: Tensor) -> Tensor:
    """Return the sum of each token's scores, not 0 where all sigmoids are (as in DeepSeek-V3's own code)."""
    return scores.sum(dim=-1, keepdim=True) + 1e-20


def route_gradient(dgates: Tensor, routing: TokenRouting, penalty: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the logits [B, T, E] from that of the gates [N, k].

    `penalty` [E] is the gradient of each token's scores from a loss that balances experts.
    """
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


def _shares_backward(penalty: Tensor, routing: TokenRouting) -> Tensor:
    """Return the gradient of scores from that of `TokenRouting.shares`."""
    return (penalty - (penalty * routing.shares).sum(dim=-1, keepdim=True)) / routing.scores.sum(dim=-1, keepdim=True)


def dispatch(y: Tensor, routing: TokenRouting) -> Tensor:
    """Return a row of y [B, T, D] for each choice of each token, sorted by expert."""
    return y.flatten(0, -2).index_select(0, routing.order // routing.num_chosen)


def dispatch_dx(drows: Tensor, routing: TokenRouting) -> Tensor:
    """Add up the gradients of the rows of each token, in one order on any device."""
    if has_triton(drows):
        from shardwise.run.triton_kernels import expert_permutation

        total = expert_permutation.gathered_sum(drows, routing.row_of_pair, None)
        return total.view(*routing.shape, drows.shape[-1])
    return routing.by_token(drows).sum(dim=1).view(*routing.shape, drows.shape[-1])


def combine(routing: TokenRouting, rows: Tensor) -> Tensor:
    """Return the results of each token's experts, weighted by its gates."""
    if has_triton(rows, routing.gates):
        from shardwise.run.triton_kernels import expert_permutation

        combined = expert_permutation.gathered_sum(rows, routing.row_of_pair, routing.gates)
        return combined.view(*routing.shape, rows.shape[-1])
    total = torch.zeros(len(routing.gates), rows.shape[-1], dtype=routing.gates.dtype, device=rows.device)
    for gates, chosen in zip(routing.gates.unbind(-1), routing.by_choice(rows), strict=True):
        total.addcmul_(gates[:, None], chosen)
    return total.to(rows.dtype).view(*routing.shape, rows.shape[-1])


def combine_dgates(dy: Tensor, rows: Tensor, routing: TokenRouting) -> Tensor:
    """Return the gradient of the gates [N, k]."""
    if has_triton(dy, rows):
        from shardwise.run.triton_kernels import expert_permutation

        return expert_permutation.gate_gradient(dy.flatten(0, -2), rows, routing.row_of_pair)
    wide = dy.flatten(0, -2).to(routing.gates.dtype)
    dgates = [torch.linalg.vecdot(wide, chosen.to(wide.dtype)) for chosen in routing.by_choice(rows)]
    return torch.stack(dgates, dim=-1)


def combine_dx(dy: Tensor, routing: TokenRouting) -> Tensor:
    """Return the gradient of the experts' results."""
    if has_triton(dy, routing.gates):
        from shardwise.run.triton_kernels import expert_permutation

        return expert_permutation.row_gradient(dy.flatten(0, -2), routing.gates, routing.order)
    drows = (routing.gates[..., None] * dy.flatten(0, -2)[:, None]).to(dy.dtype)
    return drows.flatten(0, 1).index_select(0, routing.order)


GROUPED_BYTES = 16  # that divide the rows of a grouped product's operands (torch.nn.functional.grouped_mm)


def has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether PyTorch has one kernel for all experts: on a GPU, in bf16, for rows of whole 16 bytes.

    The host then need not wait for the counts.
    """
    aligned = all(width * rows.element_size() % GROUPED_BYTES == 0 for width in weight.shape[1:])
    return device_dispatch.on_gpu(rows) and rows.dtype == torch.bfloat16 and aligned


def expert_matmul(
    rows: Tensor, weight: Tensor, routing: ExpertRows, *, product: QuantizedMatmul | None = None
) -> Tensor:
    """Multiply rows [R, D] each by its expert's matrix of weight [E, D, M]; `product` casts the operands."""
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
    """Write leftᵀ · right over the rows of each expert to `out` [E, M, D], or add it; `product` casts the operands."""
    if product is not None:
        return _quantized_gradient(left, right, routing, out if add else out.zero_(), product)
    if has_grouped_kernel(left, out):
        gradient = F.grouped_mm(left.t(), right, offs=routing.ends)
        return out.add_(gradient) if add else out.copy_(gradient)
    for (left_rows, right_rows), matrix in zip(_split_by_expert(routing, left, right), out, strict=True):
        if add:
            matrix.addmm_(left_rows.t(), right_rows)
        else:
            torch.mm(left_rows.t(), right_rows, out=matrix)
    return out


def _quantized_gradient(
    left: Tensor, right: Tensor, routing: ExpertRows, out: Tensor, product: QuantizedMatmul
) -> Tensor:
    for (left_rows, right_rows), matrix in zip(_split_by_expert(routing, left, right), out, strict=True):
        if len(left_rows):
            product.into(matrix, left_rows, right_rows, add=True)
    return out


def sum_expert_rows(rows: Tensor, routing: ExpertRows) -> Tensor:
    """Sum the rows of each expert, [E, M]."""
    out = rows.new_zeros(len(routing.counts), rows.shape[-1])
    return out.index_add_(0, routing.owners, rows)


def _split_by_expert(routing: ExpertRows, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of each expert."""
    yield from zip(*(torch.split_with_sizes(tensor, routing.sizes) for tensor in rows), strict=True)
