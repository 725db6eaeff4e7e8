"""The router's choice and its balance."""

from __future__ import annotations

import pytest
import torch

from shardwise.train.model.experts import Experts, auxiliary_loss, balance, route

N, E, K, D, M = 64, 6, 2, 8, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("normalised", [True, False])
def test_gates_are_shares_of_the_chosen_experts(normalised: bool) -> None:
    logits = random(N, E)
    routing = route(logits, K, torch.zeros(E), normalised=normalised)
    shares = logits.softmax(dim=-1)
    largest, chosen = shares.topk(K)
    assert torch.equal(routing.choices, chosen)
    wanted = largest / largest.sum(dim=-1, keepdim=True) if normalised else largest
    torch.testing.assert_close(routing.gates, wanted)
    assert routing.counts.tolist() == [(chosen == expert).sum().item() for expert in range(E)]
    torch.testing.assert_close(routing.probabilities, shares.sum(dim=0))


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
def test_no_row_is_dropped_however_uneven_the_choice(kind: str) -> None:
    """Against every expert over every token, weighted; one expert gets all tokens, others none."""
    logits, y = random(N, E), random(N, D, seed=1)
    logits[:, 3] += 20.0
    logits[:, 0] -= 20.0
    routing = route(logits, K, torch.zeros(E), normalised=True)
    assert routing.counts[3] == N
    assert routing.counts[0] == 0
    gate, up, down = (random(E, M, D, seed=seed) for seed in (2, 3, 4))
    gate_bias, up_bias, down_bias = random(E, M, seed=5), random(E, M, seed=6), random(E, D, seed=7)
    held = (gate, up, down, gate_bias, up_bias, down_bias)
    experts = Experts(kind, *held) if kind == "swiglu" else Experts(kind, None, up, down, None, up_bias, down_bias)
    opened, raised = (torch.einsum("nd,emd->nem", y, w) + b for w, b in ((gate, gate_bias), (up, up_bias)))
    act = torch.nn.functional.silu(opened) * raised if kind == "swiglu" else raised.relu()
    out = torch.einsum("nem,emd->ned", act, down) + down_bias
    weights = torch.zeros(N, E, dtype=y.dtype).scatter(1, routing.choices, routing.gates)
    torch.testing.assert_close(experts(y, routing), torch.einsum("ne,ned->nd", weights, out))


def test_the_auxiliary_loss_is_one_a_layer_when_all_experts_are_alike_and_e_when_one_has_all() -> None:
    alike = route(torch.zeros(N, E, dtype=torch.float64), K, torch.zeros(E), normalised=True)
    assert auxiliary_loss([alike, alike]).item() == pytest.approx(2.0)
    all_to_one = torch.zeros(N, E, dtype=torch.float64)
    all_to_one[:, 1] = 50.0
    assert auxiliary_loss([route(all_to_one, 1, torch.zeros(E), normalised=True)]).item() == pytest.approx(E)
    assert auxiliary_loss([]) is None


def test_the_auxiliary_loss_over_halves_of_a_batch_is_that_of_the_whole() -> None:
    """Ranks add their sums up; each half's loss then has the gradient of its own tokens."""
    logits = random(N, E).requires_grad_()
    whole = route(logits, K, torch.zeros(E), normalised=True)
    (wanted,) = torch.autograd.grad(auxiliary_loss([whole]), logits)
    halves = [route(half, K, torch.zeros(E), normalised=True) for half in logits.chunk(2)]
    total = torch.stack([sum(h.counts for h in halves).to(logits.dtype), sum(h.probabilities.detach() for h in halves)])

    def summed(own: torch.Tensor) -> torch.Tensor:
        return own + (total[:, None] - own.detach())

    losses = [auxiliary_loss([half], summed) for half in halves]
    for loss in losses:
        torch.testing.assert_close(loss, auxiliary_loss([whole]))
    (found,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_the_balance_bias_evens_the_counts_out_and_leaves_the_gates() -> None:
    logits = random(N, E)
    logits[:, 2] += 2.0
    bias = torch.zeros(E)
    first = route(logits, K, bias, normalised=False)
    for _ in range(400):
        balance(bias, route(logits, K, bias, normalised=False).counts, 1e-3)
    last = route(logits, K, bias, normalised=False)
    mean = N * K / E
    assert (first.counts - mean).abs().max() > mean
    assert (last.counts - mean).abs().max() < 0.35 * mean
    torch.testing.assert_close(last.gates, logits.softmax(dim=-1).gather(-1, last.choices))


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
@pytest.mark.parametrize("biased", [False, True])
def test_one_product_for_all_experts_is_that_of_each(kind: str, biased: bool) -> None:
    """Values and every gradient; one expert has no rows."""
    wide = 12
    x, up, gate, down = (random(*shape).float() for shape in ((N, D), *((E, wide, D),) * 3))
    biases = [random(E, width).float() if biased else None for width in (wide, wide, D)]
    counts = torch.tensor([20, 0, 5, 30, 8, 1])
    held = [x, gate if kind == "swiglu" else None, up, down, biases[0] if kind == "swiglu" else None, *biases[1:]]
    leaves = [tensor.requires_grad_() for tensor in held if tensor is not None]
    experts = Experts(kind, *held[1:])
    dy = random(N, D, seed=8).float()
    results = []
    for run in (experts.in_turn, experts.grouped):
        out = run(x, counts)
        results.append((out, *torch.autograd.grad(out, leaves, dy)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
