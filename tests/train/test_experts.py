"""The router's choice and its balance, and rows of tokens through their experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.run.engine import expert_parallel
from shardwise.run.engine.expert_parallel import LocalExpertRows
from shardwise.run.kernels import device_dispatch, experts
from shardwise.run.kernels.elementwise import FUNCTIONS
from shardwise.run.kernels.experts import TokenRouting, route_tokens
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.expert_balance import ExpertBalancer, adjust_bias, auxiliary_loss

B, T, E, K, D, M = 4, 16, 6, 2, 8, 12
N = B * T


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(logits: Tensor, num_chosen: int = K, bias: Tensor | None = None, *, normalised: bool = True) -> TokenRouting:
    return route_tokens(logits, num_chosen, torch.zeros(E) if bias is None else bias, normalised=normalised)


def gates_by_hand(logits: Tensor, choices: Tensor, *, normalised: bool) -> Tensor:
    chosen = logits.flatten(0, -2).softmax(dim=-1).gather(-1, choices)
    return chosen / chosen.sum(dim=-1, keepdim=True) if normalised else chosen


def uneven_logits() -> Tensor:
    """Logits by which one expert gets all tokens and another none."""
    logits = random(B, T, E)
    logits[..., 3] += 20.0
    logits[..., 0] -= 20.0
    return logits


@pytest.mark.parametrize("normalised", [True, False])
def test_gates_are_shares_of_the_chosen_experts(normalised: bool) -> None:
    logits = random(B, T, E)
    routing = route(logits, normalised=normalised)
    shares = logits.flatten(0, 1).softmax(dim=-1)
    largest, chosen = shares.topk(K)
    assert torch.equal(routing.choices, chosen)
    torch.testing.assert_close(routing.gates, largest / largest.sum(dim=-1, keepdim=True) if normalised else largest)
    assert routing.counts.tolist() == routing.sizes == [(chosen == expert).sum().item() for expert in range(E)]
    torch.testing.assert_close(routing.scores, shares)
    assert (routing.shape, routing.num_chosen) == ((B, T), K)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_an_expert_takes_the_first_rows_up_to_its_capacity(factor: float) -> None:
    logits, capacity = random(B, T, E), math.ceil(N * K / E * factor)
    every = route(logits)
    routing = route_tokens(logits, K, torch.zeros(E), normalised=True, capacity_factor=factor)
    assert routing.sizes == [min(size, capacity) for size in every.sizes]
    kept = torch.cat([part[:capacity] for part in every.order.split(every.sizes)])
    assert torch.equal(routing.order, kept)
    assert routing.num_rows == len(kept) <= N * K
    torch.testing.assert_close(routing.gates, every.gates)  # of what is left no gate is larger
    assert torch.equal(routing.requested, every.counts)


def test_dropped_rows_add_nothing_and_get_no_gradient() -> None:
    logits, y, dy = random(B, T, E), random(B, T, D, seed=1), random(B, T, D, seed=2)
    routing = route_tokens(logits, K, torch.zeros(E), normalised=True, capacity_factor=0.5)
    dense = torch.zeros(N * K, 1, dtype=torch.float64).index_fill_(0, routing.order, 1.0).view(N, K, 1)
    rows = experts.dispatch(y, routing)
    expected = (routing.gates[..., None] * dense * y.view(N, 1, D)).sum(dim=1)
    torch.testing.assert_close(experts.combine(routing, rows).view(N, D), expected)
    torch.testing.assert_close(experts.dispatch_dx(rows, routing).view(N, D), dense.sum(dim=1) * y.view(N, D))
    dgates = experts.combine_dgates(dy, rows, routing)
    torch.testing.assert_close(dgates, (dy.view(N, 1, D) * y.view(N, 1, D) * dense).sum(dim=-1))
    assert experts.combine_dx(dy, routing).shape == rows.shape


def test_the_share_of_dropped_rows_is_counted() -> None:
    balancer = ExpertBalancer({}, None, (), TrainingRecipe(steps=1, balance="none", capacity_factor=1.0))  # type: ignore[arg-type]
    balancer.begin_step()
    assert balancer.dropped_share is None
    for counts in ([6.0, 1.0, 1.0], [4.0, 4.0, 1.0]):  # of 8 rows an expert takes 3 at most, of 9 likewise
        balancer.penalties({0: torch.tensor([counts, [0.0, 0.0, 0.0]])}, 2)
    assert balancer.dropped_share == pytest.approx((3 + 2) / (8 + 9))
    balancer.begin_step()
    assert balancer.dropped_share is None


class Alike:
    """An exchange of ranks whose padded parts are known."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def all_gather(self, whole: Tensor, part: Tensor, axes: tuple[str, ...]) -> None:
        longest = len(part)
        padded = [torch.cat([shard, shard.new_zeros(longest - len(shard), shard.shape[1])]) for shard in self.parts]
        assert any(torch.equal(part, shard) for shard in padded)
        whole.copy_(torch.cat(padded))


@pytest.mark.parametrize("logits", [random(B, T, E), uneven_logits()], ids=["even", "uneven"])
def test_ranks_with_the_same_tokens_have_the_rows_of_their_own_experts(logits: Tensor) -> None:
    routing, rows, places = route(logits), random(N * K, D), range(3)
    shares: list[Any] = [LocalExpertRows(None, ("tp",), routing, place, 3) for place in places]  # type: ignore[arg-type]
    parts = [share.local_part(rows) for share in shares]
    assert torch.equal(torch.cat(parts), rows)
    assert [share.sizes for share in shares] == [routing.sizes[2 * place : 2 * place + 2] for place in places]
    assert torch.equal(sum(share.pad_to_all_experts(part) for share, part in zip(shares, parts, strict=True)), rows)
    gradient = sum(expert_parallel.dispatch_dx(part, share) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(gradient, experts.dispatch_dx(rows, routing))
    local = LocalExpertRows(Alike(parts), ("tp",), routing, 1, 3)  # type: ignore[arg-type]
    _, arriving = local.start_return(parts[1])
    assert torch.equal(local.sort_returned(arriving), rows)


def test_rows_are_in_the_order_of_their_experts() -> None:
    routing = route(random(B, T, E))
    owners = routing.choices.flatten()[routing.order]
    assert owners.tolist() == sorted(owners.tolist())
    assert all(part.tolist() == sorted(part.tolist()) for part in routing.order.split(routing.sizes))
    assert torch.equal(routing.order[routing.inverse_order], torch.arange(N * K))
    assert routing.ends.tolist() == [sum(routing.sizes[: expert + 1]) for expert in range(E)]
    assert torch.equal(routing.repeat_per_row(torch.arange(E)[:, None])[:, 0], owners)


def test_scores_and_gates_are_in_float32() -> None:
    routing = route_tokens(random(B, T, E).to(torch.bfloat16), K, torch.zeros(E), normalised=True)
    assert routing.scores.dtype == routing.gates.dtype == torch.float32
    gradient = experts.route_gradient(random(N, K).float(), routing, None, torch.bfloat16)
    assert (gradient.dtype, gradient.shape) == (torch.bfloat16, (B, T, E))


@pytest.mark.parametrize("normalised", [True, False])
def test_the_gradient_of_the_logits_is_that_of_the_gates_and_the_penalty(normalised: bool) -> None:
    """The penalty is what a loss adds to the gradient of each token's scores; a bias of the choice has no part in it."""
    logits, dgates, penalty = random(B, T, E).requires_grad_(), random(N, K, seed=1), random(E, seed=2)
    routing = route(logits.detach(), bias=torch.linspace(0.0, 0.3, E), normalised=normalised)
    gates = gates_by_hand(logits, routing.choices, normalised=normalised)
    penalised = (logits.softmax(dim=-1) * penalty).sum()
    for loss, penalty_gradient in (((gates * dgates).sum(), None), ((gates * dgates).sum() + penalised, penalty)):
        (expected,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(experts.route_gradient(dgates, routing, penalty_gradient, torch.float64), expected)


@pytest.mark.parametrize("logits", [random(B, T, E), uneven_logits()], ids=["even", "uneven"])
def test_dispatch_and_combine_have_their_transposes(logits: Tensor) -> None:
    """Against autograd of each token's rows by hand."""
    routing = route(logits)
    y, rows, dy = random(B, T, D).requires_grad_(), random(N * K, D, seed=1), random(B, T, D, seed=2)
    sent = y.flatten(0, 1)[:, None].expand(-1, K, -1).flatten(0, 1)[routing.order]
    torch.testing.assert_close(experts.dispatch(y.detach(), routing), sent.detach(), rtol=0, atol=0)
    (expected,) = torch.autograd.grad(sent, y, rows)
    torch.testing.assert_close(experts.dispatch_dx(rows, routing), expected)
    gates, row_values = routing.gates.clone().requires_grad_(), rows.clone().requires_grad_()
    back = torch.zeros(N * K, D, dtype=rows.dtype).index_put((routing.order,), row_values)
    out = torch.einsum("nk,nkd->nd", gates, back.view(N, K, D)).view(B, T, D)
    torch.testing.assert_close(experts.combine(routing, rows), out.detach())
    dgates, dx = torch.autograd.grad(out, (gates, row_values), dy)
    torch.testing.assert_close(experts.combine_dgates(dy, rows, routing), dgates)
    torch.testing.assert_close(experts.combine_dx(dy, routing), dx)


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
def test_no_row_is_dropped_however_uneven_the_choice(kind: str) -> None:
    """Against every expert over every token, weighted; one expert gets all tokens, others none."""
    y, routing = random(B, T, D, seed=1), route(uneven_logits())
    assert routing.counts[3] == N
    assert routing.counts[0] == 0
    gate, up, down = (random(E, M, D, seed=seed) for seed in (2, 3, 4))
    gate_bias, up_bias, down_bias = random(E, M, seed=5), random(E, M, seed=6), random(E, D, seed=7)
    rows = experts.dispatch(y, routing)
    opened, raised = (
        experts.expert_matmul(rows, weight.transpose(1, 2), routing) + routing.repeat_per_row(bias)
        for weight, bias in ((gate, gate_bias), (up, up_bias))
    )
    act = FUNCTIONS["swiglu"](opened, raised) if kind == "swiglu" else FUNCTIONS["relu"](raised)
    actual = experts.combine(routing, experts.expert_matmul(act, down, routing) + routing.repeat_per_row(down_bias))
    opened, raised = (torch.einsum("btd,emd->btem", y, w) + b for w, b in ((gate, gate_bias), (up, up_bias)))
    act = torch.nn.functional.silu(opened) * raised if kind == "swiglu" else raised.relu()
    out = torch.einsum("btem,emd->bted", act, down) + down_bias
    weights = torch.zeros(N, E, dtype=y.dtype).scatter(1, routing.choices, routing.gates).view(B, T, E)
    torch.testing.assert_close(actual, torch.einsum("bte,bted->btd", weights, out))


@pytest.mark.parametrize("logits", [random(B, T, E), uneven_logits()], ids=["even", "uneven"])
def test_products_of_experts_have_their_gradients(logits: Tensor) -> None:
    """Written anew, or added to what is there; an expert without rows has none."""
    routing = route(logits)
    rows, weight = random(N * K, D).requires_grad_(), random(E, D, M, seed=1).requires_grad_()
    dy, initial = random(N * K, M, seed=2), random(E, D, M, seed=3)
    parts = zip(rows.split(routing.sizes), weight, strict=True)
    out = torch.cat([part @ matrix for part, matrix in parts])
    drows, dweight = torch.autograd.grad(out, (rows, weight), dy)
    torch.testing.assert_close(experts.expert_matmul(rows.detach(), weight.detach(), routing), out.detach())
    torch.testing.assert_close(experts.expert_matmul(dy, weight.detach().transpose(1, 2), routing), drows)
    for add, expected in ((False, dweight), (True, dweight + initial)):
        target = initial.clone() if add else torch.full_like(initial, torch.nan)
        assert experts.expert_gradient(rows.detach(), dy, routing, target, add=add) is target
        torch.testing.assert_close(target, expected)
    sums = torch.stack([part.sum(dim=0) for part in dy.split(routing.sizes)])
    torch.testing.assert_close(experts.sum_expert_rows(dy, routing), sums)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("logits", [random(B, T, E), uneven_logits()], ids=["even", "uneven"])
def test_grouped_product_equals_the_products_of_each_expert(
    logits: Tensor, dtype: torch.dtype, tolerance: float, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has it, also of a matrix that is turned; one expert may have no rows."""
    calls, grouped_mm = [], torch.nn.functional.grouped_mm

    def counted(*operands: Tensor, **options: Any) -> Tensor:
        calls.append(operands)
        return grouped_mm(*operands, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    wide, routing = 16, route(logits)
    rows, weight, dy = (
        random(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate(((N * K, D), (E, D, wide), (N * K, wide)), start=1)
    )
    initial = random(E, D, wide, seed=5).to(dtype)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(experts, "has_grouped_kernel", lambda *operands, grouped=grouped: grouped)
        results.append(
            (
                experts.expert_matmul(rows, weight, routing),
                experts.expert_matmul(dy, weight.transpose(1, 2), routing),
                experts.expert_gradient(rows, dy, routing, initial.clone(), add=add),
            )
        )
    assert len(calls) == 3
    for looped, fused in zip(*results, strict=True):
        assert looped.dtype == fused.dtype == dtype
        torch.testing.assert_close(looped, fused, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "widths", "on_gpu", "is_grouped"),
    [
        (torch.bfloat16, (8, 16), True, True),
        (torch.bfloat16, (8, 16), False, False),
        (torch.bfloat16, (12, 16), True, False),
        (torch.bfloat16, (8, 12), True, False),
        (torch.float32, (8, 16), True, False),
    ],
)
def test_grouped_kernel_needs_a_gpu_and_rows_of_whole_16_bytes(
    dtype: torch.dtype, widths: tuple[int, int], on_gpu: bool, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_dispatch, "on_gpu", lambda x: on_gpu)
    assert (
        experts.has_grouped_kernel(torch.zeros(4, 8, dtype=dtype), torch.zeros(2, *widths, dtype=dtype)) is is_grouped
    )


# Balance. `sums` are what a router's call hands over: rows and probabilities by expert, [2, E].


def sums(routing: TokenRouting) -> Tensor:
    return torch.stack((routing.counts.to(routing.scores.dtype), routing.scores.sum(dim=0)))


def losses(*routings: TokenRouting) -> tuple[Tensor, Tensor]:
    return auxiliary_loss(*torch.stack([sums(routing) for routing in routings], dim=1).unbind())


class Others:
    """In the place of an exchange: adds what the other processes have."""

    def __init__(self, *summands: Tensor) -> None:
        self.summands = summands

    def sum_and_wait(self, values: Tensor, axes: Any) -> Tensor:
        assert axes == ("dp",)
        return torch.stack((values, *self.summands)).sum(dim=0)


def balancer(kind: Any, *summands: Tensor, biases: dict[int, Tensor] | None = None) -> ExpertBalancer:
    exchange: Any = Others(*summands)
    return ExpertBalancer(biases or {}, exchange, ("dp",), TrainingRecipe(steps=1, balance=kind))


def test_the_auxiliary_loss_is_one_a_layer_when_all_experts_are_alike_and_e_when_one_has_all() -> None:
    alike = route(torch.zeros(B, T, E, dtype=torch.float64))
    assert losses(alike, alike)[0].item() == pytest.approx(2.0)
    all_to_one = torch.zeros(B, T, E, dtype=torch.float64)
    all_to_one[..., 1] = 50.0
    assert losses(route(all_to_one, 1))[0].item() == pytest.approx(E)


def loss_by_hand(logits: Tensor, routing: TokenRouting) -> Tensor:
    """E · sum over experts of (share of the rows) · (mean probability)."""
    return E * (routing.counts / routing.counts.sum() * logits.flatten(0, -2).softmax(dim=-1).mean(dim=0)).sum()


def test_the_auxiliary_loss_has_its_gradient_by_each_tokens_probabilities() -> None:
    logits = [random(B, T, E, seed=seed).requires_grad_() for seed in (0, 1)]
    routings = [route(rank_logits.detach()) for rank_logits in logits]
    loss, penalties = losses(*routings)
    expected = sum(loss_by_hand(rank_logits, routing) for rank_logits, routing in zip(logits, routings, strict=True))
    torch.testing.assert_close(loss, expected.detach())
    gradients = torch.autograd.grad(expected, logits)
    for routing, penalty, gradient in zip(routings, penalties, gradients, strict=True):
        actual = experts.route_gradient(torch.zeros(N, K, dtype=torch.float64), routing, penalty, torch.float64)
        torch.testing.assert_close(actual, gradient)


def test_the_auxiliary_loss_over_halves_of_a_batch_is_that_of_the_whole() -> None:
    """Processes add their sums up; each one's penalty then gives the gradient of its own tokens."""
    logits = random(B, T, E)
    whole, halves = route(logits), [route(half) for half in logits.chunk(2)]
    nothing, gradients = torch.zeros(N // 2, K, dtype=torch.float64), []
    for half, other_half in (halves, halves[::-1]):
        half_balancer = balancer("auxiliary", sums(other_half)[:, None])
        (penalty,) = half_balancer.penalties({2: sums(half)}, 1).values()
        assert half_balancer.loss is not None
        torch.testing.assert_close(half_balancer.loss, losses(whole)[0])
        gradients.append(experts.route_gradient(nothing, half, penalty, torch.float64))
    penalty = 0.01 * losses(whole)[1][0]
    expected = experts.route_gradient(torch.zeros(N, K, dtype=torch.float64), whole, penalty, torch.float64)
    torch.testing.assert_close(torch.cat(gradients), expected)


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    """And penalties are shares of it, each for its router."""
    first, second = (route(random(B, T, E, seed=seed)) for seed in (0, 1))
    experts_balancer = balancer("auxiliary")
    experts_balancer.begin_step()
    for routing in (first, second):
        penalties = experts_balancer.penalties({1: sums(routing), 3: sums(second)}, 2)
        assert list(penalties) == [1, 3]
        torch.testing.assert_close(torch.stack(list(penalties.values())), 0.01 / 2 * losses(routing, second)[1])
    assert experts_balancer.loss is not None
    torch.testing.assert_close(experts_balancer.loss, (losses(first, second)[0] + losses(second, second)[0]) / 2)
    counts = torch.stack((first.counts + second.counts, 2 * second.counts)).double()
    assert experts_balancer.imbalance == pytest.approx((counts.max(dim=-1).values / (2 * N * K / E)).max().item())
    experts_balancer.begin_step()
    assert experts_balancer.loss is experts_balancer.imbalance is None
    assert not experts_balancer.counts


@pytest.mark.parametrize("kind", ["bias", "none"])
def test_without_an_auxiliary_loss_there_are_no_penalties(kind: str) -> None:
    """Rows are counted on each process alone, and by bias added up at the end of the step."""
    local, remote = (route(random(B, T, E, seed=seed)) for seed in (0, 1))
    biases = {1: torch.zeros(E)}
    local_balancer = balancer(kind, remote.counts[None], biases=biases)
    assert local_balancer.penalties({1: sums(local)}, 1) == {}
    assert local_balancer.loss is None
    local_balancer.end_step(torch.zeros(()))
    counts = local.counts + remote.counts if kind == "bias" else local.counts
    mean = counts.double().mean()
    assert local_balancer.imbalance == pytest.approx(float(counts.max() / mean))
    moved = 1e-3 * torch.sign(mean - counts).float() if kind == "bias" else torch.zeros(E)
    assert torch.equal(biases[1], moved)


@pytest.mark.parametrize("kind", ["auxiliary", "bias", "none"])
def test_a_model_without_routers_has_nothing_to_balance(kind: str) -> None:
    idle_balancer = balancer(kind)
    assert idle_balancer.penalties({}, 1) == {}
    idle_balancer.end_step(torch.zeros(()))
    assert idle_balancer.loss is idle_balancer.imbalance is None
    assert not idle_balancer.counts


def test_biases_move_towards_the_mean_and_stay_there() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5])
    adjust_bias(bias, torch.tensor([1, 2, 3]), 0.25)
    assert bias.tolist() == [0.75, 0.5, 0.25]


def test_the_balance_bias_evens_the_counts_out_and_leaves_the_gates() -> None:
    logits = random(B, T, E)
    logits[..., 2] += 2.0
    bias = torch.zeros(E)
    first = route(logits, bias=bias, normalised=False)
    for _ in range(400):
        adjust_bias(bias, route(logits, bias=bias, normalised=False).counts, 1e-3)
    last = route(logits, bias=bias, normalised=False)
    mean = N * K / E
    assert (first.counts - mean).abs().max() > mean
    assert (last.counts - mean).abs().max() < 0.35 * mean
    torch.testing.assert_close(last.gates, gates_by_hand(logits, last.choices, normalised=False))
