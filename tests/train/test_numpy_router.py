"""The router of the NumPy engine equals the executor's, one by hand under autograd, and the published rule."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from plain import experts as plain

from shardwise.model.numerics import SIGMOID, SOFTMAX, Gating
from shardwise.run.kernels import experts
from shardwise.run.numpy.kernels import Router

B, T, E, K = 3, 7, 12, 3
GROUPS = {"one": (1, 1, 1), "best of 3": (3, 1, 1), "two of 4": (4, 2, 2), "two of 6": (6, 2, 1), "all of 4": (4, 4, 2)}
CASES = list(product((SOFTMAX, SIGMOID), GROUPS, (True, False)))


def router_of(scores: str, groups: str, normalised: bool) -> Router:
    number, chosen, votes = GROUPS[groups]
    return Router(Gating(scores=scores, scale=2.5, groups=number, chosen_groups=chosen, votes=votes), normalised)


def dense(routing: Any) -> Any:
    """Gates [B, T, E] from those of the choices."""
    return torch.zeros(B * T, E, dtype=torch.float64).scatter(-1, routing.choices, routing.gates).view(B, T, E)


@pytest.mark.parametrize(("scores", "groups", "normalised"), CASES)
def test_gates_and_gradients_are_those_of_the_executor(scores: str, groups: str, normalised: bool) -> None:
    rng, router = np.random.default_rng(1), router_of(scores, groups, normalised)
    logits, dgates = rng.standard_normal((2, B, T, E))
    gates, kept = router.route(logits, K)
    options = {"normalised": normalised, "gating": router.gating}
    zero = torch.zeros(E, dtype=torch.float64)
    routing = experts.route_tokens(torch.tensor(logits), K, zero, **options)
    np.testing.assert_allclose(gates, dense(routing), rtol=1e-13, atol=0)
    by_choice = torch.tensor(dgates).flatten(0, 1).gather(-1, routing.choices)
    expected = experts.route_gradient(by_choice, routing, None, torch.float64)
    gradient = router.gradient(dgates, gates, kept)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-14)
    leaf = torch.tensor(logits).requires_grad_()
    by_hand = dense(plain.route(leaf.flatten(0, 1), K, zero, **options))
    np.testing.assert_allclose(gates, by_hand.detach(), rtol=1e-13, atol=0)
    by_hand.backward(torch.tensor(dgates))
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("scores", "groups", "normalised"), CASES)
def test_a_token_takes_the_best_experts_of_its_best_groups(scores: str, groups: str, normalised: bool) -> None:
    """DeepSeek-V3, 2.1.2 and 3.2.2, token by token: no set of groups has a larger sum of votes, no set of their experts larger
    scores, and gates are these scores, over their sum, times the scale."""
    router = router_of(scores, groups, normalised)
    number, chosen, votes = GROUPS[groups]
    logits, size = np.random.default_rng(2).standard_normal((B, T, E)), E // number
    gates, _ = router.route(logits, K)
    for token, row in zip(logits.reshape(-1, E), gates.reshape(-1, E), strict=True):
        scored = np.exp(token) / np.exp(token).sum() if scores == SOFTMAX else 1 / (1 + np.exp(-token))
        ballots = {group: sum(sorted(scored[group * size : (group + 1) * size])[-votes:]) for group in range(number)}
        allowed = sorted(ballots, key=lambda group: ballots[group])[-chosen:]
        best = sorted((expert for expert in range(E) if expert // size in allowed), key=lambda expert: scored[expert])[
            -K:
        ]
        assert sorted(np.flatnonzero(row)) == sorted(best)
        total = scored[best].sum() if normalised else 1.0
        np.testing.assert_allclose(row[best], 2.5 * scored[best] / total, rtol=1e-13)


def test_groups_change_the_choice() -> None:
    """Otherwise it would prove nothing that all agree."""
    logits = np.random.default_rng(3).standard_normal((B, T, E))
    free = Router(Gating()).route(logits, K)[0] > 0
    for groups in ("best of 3", "two of 4", "two of 6"):
        limited = router_of(SOFTMAX, groups, True).route(logits, K)[0] > 0
        assert (free != limited).any(axis=-1).mean() > 0.2, groups
    everywhere = router_of(SOFTMAX, "all of 4", True).route(logits, K)[0] > 0
    assert (free == everywhere).all()
