"""Routers with groups of experts beside those of `transformers`: DeepSeek-V2's and -V3's, forward and backward, in float64."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.huggingface.numerics_reader import (
    DEEPSEEK_V2_ROUTER,
    DEEPSEEK_V3_ROUTER,
    NumericsRule,
    read_numerics,
)
from shardwise.model.numerics import Numerics
from shardwise.run.kernels import experts

B, T, D, M, E, K = 3, 16, 8, 12, 16, 4
SIZES: dict[str, Any] = {
    "hidden_size": D, "moe_intermediate_size": M, "num_experts_per_tok": K, "n_routed_experts": E, "n_shared_experts": 1,
    "intermediate_size": M, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {"n_group": 4, "topk_group": 2}),
    "v3, one group": ("v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}),
    "v3, gates as they are": ("v3", {"n_group": 4, "topk_group": 1, "norm_topk_prob": False}),
    "v2": ("v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}),
    "v2, all groups": ("v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 2}),
}
RULES = {"v2": NumericsRule(router=DEEPSEEK_V2_ROUTER), "v3": NumericsRule(router=DEEPSEEK_V3_ROUTER)}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def transformers_layer(version: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A layer of `transformers` with random weights and a bias of the choice, and what its config says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = importlib.import_module(f"transformers.models.deepseek_{version}.configuration_deepseek_{version}")
        code = importlib.import_module(f"transformers.models.deepseek_{version}.modeling_deepseek_{version}")
        config = getattr(configs, f"Deepseek{version.upper()}Config")(**{**SIZES, **settings})
        config._experts_implementation = "eager"
        layer = getattr(code, f"Deepseek{version.upper()}" + ("Moe" if version == "v2" else "MoE"))(config).double()
    for seed, weight in enumerate(layer.parameters()):
        weight.data = random(*weight.shape, seed=seed) / 2
    if version == "v3":
        layer.gate.e_score_correction_bias.data = random(E, seed=99) / 10
    return layer, config.to_dict()


def numerics_of(version: str, config: dict[str, Any]) -> Numerics:
    return read_numerics(config, RULES[version], d_model=D, head_dim=4, mlp="swiglu")


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their routers ask for float32 by name."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        yield


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("name", CASES)
def test_expert_layers_equal_transformers(name: str) -> None:
    version, settings = CASES[name]
    layer, config = transformers_layer(version, settings)
    numerics = numerics_of(version, config)
    assert not [key for key in numerics.unread if "rout" in key or "topk" in key]
    x, dy = random(B, T, D, seed=7).requires_grad_(), random(B, T, D, seed=8)
    expected = layer.experts(x.view(-1, D), *reversed(layer.gate(x)[1:])).view_as(x)
    dx, drouter, dup, ddown = torch.autograd.grad(
        expected, [x, layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj], dy
    )
    bias = layer.gate.e_score_correction_bias if version == "v3" else torch.zeros(E, dtype=torch.float64)
    y, router = x.detach(), layer.gate.weight.detach()
    routing = experts.route_tokens(
        y @ router.t(), K, bias, normalised=numerics.normalised_gates, gating=numerics.gating
    )
    sent = experts.dispatch(y, routing).requires_grad_()
    gate_up, down = (
        weight.detach().clone().requires_grad_() for weight in (layer.experts.gate_up_proj, layer.experts.down_proj)
    )
    expert_outputs = through(sent, routing, gate_up, down)
    torch.testing.assert_close(
        experts.combine(routing, expert_outputs.detach()), expected.detach(), rtol=1e-12, atol=1e-12
    )
    gradients = torch.autograd.grad(expert_outputs, [sent, gate_up, down], experts.combine_dx(dy, routing))
    dlogits = experts.route_gradient(
        experts.combine_dgates(dy, expert_outputs.detach(), routing), routing, None, torch.float64
    )
    dx_by_rows = experts.dispatch_dx(gradients[0], routing) + dlogits @ router
    for actual, reference in zip(
        (dx_by_rows, dlogits.flatten(0, 1).t() @ y.flatten(0, 1), *gradients[1:]),
        (dx, drouter, dup, ddown),
        strict=True,
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-12)


def through(rows: Tensor, routing: experts.TokenRouting, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each expert's rows through its matrices."""
    parts = zip(rows.split(routing.sizes), gate_up, down, strict=True)
    activations = (
        (F.linear(part, gate_up_weight).chunk(2, dim=-1), down_weight) for part, gate_up_weight, down_weight in parts
    )
    return torch.cat([F.linear(F.silu(gate) * up, down_weight) for (gate, up), down_weight in activations])


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("name", ["v3", "v2"])
def test_a_token_goes_to_few_groups(name: str) -> None:
    version, settings = CASES[name]
    gating = numerics_of(version, transformers_layer(version, settings)[1]).gating
    routing = experts.route_tokens(random(B, T, E, seed=3), K, torch.zeros(E), normalised=True, gating=gating)
    groups = [set((row // (E // gating.groups)).tolist()) for row in routing.choices]
    assert max(map(len, groups)) == gating.chosen_groups == 2
    assert len(set().union(*groups)) == gating.groups == 4
